"""What does a linear layer compute? A quantised weight whose rows may come from several joined projections, and a bias."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .errors import MxdebugError
from .formats import BlockFormat, BlockTensor


@dataclass(frozen=True)
class LinearLayer:
    """A linear layer in logical order: y = x @ weight^T + bias.

    Engines join projections that share their input (q, k, v; gate, up) along the rows; each part keeps its own global scale.

    payload        uint8 [N, K/2]
    scales         uint8 [N, K/block], bytes of the format's scale codec
    format         NVFP4; a `block` other than 16 is another checkpoint's, which no kernel of this project reads
    names, rows    the parts, in order: what the file calls them, and how many rows each has; rows add up to N
    global_scales  float32 [parts], multipliers, whatever the file stores
    bias           [N] in the file's dtype, or None
    input_scales   float32 [parts], multipliers: global scales of the activations. Read, and unused where activations stay 16-bit; or None
    """

    payload: Tensor
    scales: Tensor
    format: BlockFormat
    names: tuple[str, ...]
    rows: tuple[int, ...]
    global_scales: Tensor
    bias: Tensor | None = None
    input_scales: Tensor | None = None

    def __post_init__(self) -> None:
        n = self.payload.shape[0]
        if len(self.names) != len(self.rows) or sum(self.rows) != n:
            raise MxdebugError(
                "parts of a linear layer",
                f"rows that add up to {n}",
                f"{list(self.rows)} for {list(self.names)}",
                "a projection is missing",
            )
        for name, t, want in (
            ("global scales", self.global_scales, (len(self.rows),)),
            ("input scales", self.input_scales, (len(self.rows),)),
            ("bias", self.bias, (n,)),
        ):
            if t is not None and tuple(t.shape) != want:
                raise MxdebugError(
                    f"{name} of a linear layer", f"shape {list(want)}", f"shape {list(t.shape)}", "one number a part; a bias for each row"
                )
        self.weight  # noqa: B018 - checks dtypes and shapes

    @property
    def n(self) -> int:
        """Output features: rows of the weight."""
        return self.payload.shape[0]

    @property
    def k(self) -> int:
        """Input features: elements in a row of the weight."""
        return self.payload.shape[1] * 2

    @property
    def weight(self) -> BlockTensor:
        """The weight [N, K], with each row's own global scale (float32 [N])."""
        return BlockTensor(
            self.payload,
            self.scales,
            self.format,
            self.global_scales.float().repeat_interleave(torch.tensor(self.rows, device=self.payload.device)),
        )

    def with_one_global_scale(self, scale: Tensor) -> LinearLayer:
        """The layer as a kernel sees it that takes one number (float32 []) for all parts."""
        return replace(self, global_scales=scale.float().reshape(1).expand(len(self.rows)).clone())

    def forward(self, x: Tensor) -> Tensor:
        """What the checkpoint means: x [..., K] -> float64 [..., N], no intermediate rounding. MxdebugError where K does not fit."""
        if x.shape[-1] != self.k:
            raise MxdebugError(
                "activations",
                f"last dimension {self.k}",
                f"shape {list(x.shape)}",
                "padded activations, unpadded weights, or another layer's",
            )
        y = x.double() @ self.weight.dequantise(torch.float64).T
        return y if self.bias is None else y + self.bias.double()

    def part(self, size: int, rank: int, axis: str, kv: int | None = None) -> LinearLayer:
        """The slice of one tensor-parallel rank. axis "rows": of every part its share of rows (q, k, v; gate, up); "columns": a share of K (o, down).

        kv  into how many shares the parts after the first are cut, where there are fewer key and value heads than ranks: neighbouring ranks then hold
            the same share (vLLM QKVParallelLinear, num_kv_head_replicas); None: as many as ranks
        The bias belongs to the rows; of a layer that is cut along K rank 0 alone adds it. Raises MxdebugError where a share is not whole rows or blocks.
        """
        if not 0 <= rank < size:
            raise MxdebugError("tensor-parallel rank", f"0 <= rank < {size}", str(rank))
        if axis == "columns":
            if self.k % (size * self.format.block):
                raise MxdebugError("K of one rank", f"{self.k} / {size} in whole blocks of {self.format.block}", "a cut inside a block")
            share = self.k // size
            return replace(
                self,
                payload=self.payload[:, rank * share // 2 : (rank + 1) * share // 2].contiguous(),
                scales=self.scales[:, rank * share // self.format.block : (rank + 1) * share // self.format.block].contiguous(),
                bias=self.bias if rank == 0 else None,
            )
        shares = [size] + [kv or size] * (len(self.rows) - 1)
        if any(r % n or size % n for r, n in zip(self.rows, shares)):
            raise MxdebugError(
                "rows of one rank",
                f"{list(self.rows)} in {shares} equal shares",
                "a remainder",
                "key and value heads that are repeated on several ranks",
            )
        mine, first = [], 0
        for r, n in zip(self.rows, shares):
            share, which = r // n, rank * n // size
            mine.append(torch.arange(first + which * share, first + (which + 1) * share))
            first += r
        rows = torch.cat(mine)
        return replace(
            self,
            payload=self.payload[rows],
            scales=self.scales[rows],
            rows=tuple(len(m) for m in mine),
            bias=None if self.bias is None else self.bias[rows],
        )
