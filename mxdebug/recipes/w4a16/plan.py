"""What vLLM does with one NVFP4 linear layer on the W4A16 path: slots, filled as the kernel wants them. A fault fills one otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...contracts import LinearContract
from ...errors import MxdebugError
from ...formats import E4M3, E4M3_SCALE, recode_e4m3_to_s0e5m3, recode_e4m3_to_s0e5m3_marlin
from ...layouts import SWIZZLE_128x4
from ...layouts.catalogue import cutedsl_sm100_view
from ...reference_linear import LinearLayer
from ..values import CAST_E4M3_BY_VALUE, SWAP_NIBBLES
from .padding import PackedBytes, elements_of, padding_bytes, round_up

# -- what a slot can hold; the first of each is right ---------------------------------------------------------------
PAYLOAD = ("as stored", "nibbles swapped")
ORDER = ("as joined", "reversed", "interleaved")  # or a permutation such as "0,2,1"
SCALE_VALUES = ("as stored", "cast by value", "global scale folded in")
GROUP = (16, 32)
SWIZZLES = (1, 0, 2)
VIEW = ("strided", "contiguous")  # SM100: of the 6-D view
RECODE = ("exact", "left as E4M3", "small scales flushed", "Marlin's")  # SM12x: to S0E5M3
SCALAR = (
    "one for all parts",
    "inverted",
    "missing",
    "another part's",
    "squared",
    "rounded to bf16",
    "rounded to fp16",
    "not that of the file",
)
X_PAD = ("elements", "bytes", "none")
X_DTYPE = (torch.bfloat16, torch.float16)
BIAS = ("after the slice", "before the slice", "missing", "twice")
FLUSHED_BELOW = 2.0**-6  # vLLM nvfp4_marlin_process_scales: scale * 2^7 < 2


@dataclass(frozen=True)
class LinearPlan:
    """n, k: the layer's sizes; larger: which of the parts' global scales all get, "max" (ModelOpt) or "min" (compressed-tensors).

    The other fields are slots; see the tuples of the same name above for what they can hold.
    """

    contract: LinearContract
    n: int
    k: int
    takes: str
    payload: str = PAYLOAD[0]
    order: str = ORDER[0]
    scale_values: str = SCALE_VALUES[0]
    group: int = GROUP[0]
    swizzles: int = SWIZZLES[0]
    view: str = VIEW[0]
    recode: str = RECODE[0]
    scalar: str = SCALAR[0]
    x_pad: str = X_PAD[0]
    x_dtype: torch.dtype = X_DTYPE[0]
    sliced: bool = True
    bias: str = BIAS[0]

    @property
    def padded(self) -> tuple[int, int]:
        """(N, K) as the kernel gets them: the next multiples of 64."""
        return round_up(self.n), round_up(self.k)

    @property
    def weights_padding_bytes(self) -> PackedBytes:
        """What K was padded by, in payload bytes."""
        return padding_bytes(self.k)

    @property
    def sm12x(self) -> bool:
        """Whether this is the layout of SM12x."""
        return self.contract.operand("weight").dtype == torch.int32

    def edit(self, **slots: Any) -> LinearPlan:
        """The plan with some slots filled otherwise."""
        return replace(self, **slots)

    # -- weights ----------------------------------------------------------------------------------------------------

    def convert(self, layer: LinearLayer) -> dict[str, Tensor]:
        """The operands as the kernel takes them: weight, weight_scale, alpha."""
        return {"weight": self.convert_payload(layer), "weight_scale": self.convert_scales(layer), "alpha": self.global_scale(layer)}

    def convert_payload(self, layer: LinearLayer) -> Tensor:
        """Pad both axes to 64 with zeros; SM12x: into tiles, as int32 [K/16, 2N]. vLLM pad_nvfp4_weight_for_cutlass, FlashInfer _prepare_cute_dsl."""
        n, k = self.padded
        t = self._ordered(layer.payload, layer)
        if self.payload == "nibbles swapped":
            t = SWAP_NIBBLES.apply(t)
        t = pad(t, (0, k // 2 - t.shape[1], 0, n - t.shape[0]))
        o = self.contract.operand("weight")
        return o.layout.pack(t).reshape(k // 16, 8 * n).view(torch.int32) if self.sm12x else t

    def convert_scales(self, layer: LinearLayer) -> Tensor:
        """Pad to 128 rows and 4 columns with zeros, swizzle (vLLM swizzle_blockscale); then FlashInfer's preparation.

        SM100: a 6-D view of the same bytes. SM12x: back to linear without the padding of the swizzle, transposed, recoded to S0E5M3.
        """
        t = self._scale_bytes(self._ordered(layer.scales, layer), layer)
        rows, columns = SWIZZLE_128x4.padded(*t.shape)
        t = pad(t, (0, columns - t.shape[1], 0, rows - t.shape[0]))
        for _ in range(self.swizzles):
            t = SWIZZLE_128x4.pack(t).reshape(rows, columns)
        if not self.sm12x:
            out = cutedsl_sm100_view(t.reshape(rows // 128, columns // 4, 32, 4, 4).view(torch.float8_e4m3fn))
            return out.contiguous() if self.view == "contiguous" else out
        n, k = self.padded
        linear = SWIZZLE_128x4.unpack(t, n, k // 16).reshape(n, k // 16).T.contiguous()
        return _recode(linear, self.recode)

    def global_scale(self, layer: LinearLayer) -> Tensor:
        """float32 [1]. ModelOpt: the largest multiplier of the joined parts; compressed-tensors: 1 / the largest divisor, so the smallest multiplier."""
        g = layer.global_scales.float()
        at = int(g.argmax() if self.takes == "max" else g.argmin())
        if self.scalar == "another part's":
            at = int(g.argmin() if self.takes == "max" else g.argmax())
        number = g[at].reshape(1)
        changed = {
            "inverted": lambda g: 1.0 / g,
            "squared": lambda g: g * g,
            "rounded to bf16": lambda g: g.bfloat16().float(),
            "rounded to fp16": lambda g: g.half().float(),
        }
        if self.scalar in changed:
            return changed[self.scalar](number)
        if self.scalar == "missing" or self.scale_values == "global scale folded in":
            return torch.ones_like(number)
        return number * 1.5 if self.scalar == "not that of the file" else number

    def _ordered(self, t: Tensor, layer: LinearLayer) -> Tensor:
        if self.order == ORDER[0]:
            return t
        parts = t.split(list(layer.rows))
        if self.order == "interleaved":
            return torch.stack(parts, 1).flatten(0, 1)
        order = range(len(parts))[::-1] if self.order == "reversed" else map(int, self.order.split(","))
        return torch.cat([parts[i] for i in order])

    def _scale_bytes(self, t: Tensor, layer: LinearLayer) -> Tensor:
        block = layer.format.block
        if block == 32 and self.group == 32:  # [N, K/32] at the front of memory for [N, K/16], the rest as it was allocated
            t = pad(t, (0, self.k // 16 - t.shape[1]))
        elif block != 16:
            raise MxdebugError(
                "group size",
                "16, which is NVFP4's",
                str(block),
                "no W4A16 kernel reads other blocks: vLLM allocates K/16 scales a row (TensorRT-LLM#19091)",
            )
        if self.scale_values == "cast by value":
            return CAST_E4M3_BY_VALUE.apply(t)
        if self.scale_values == "global scale folded in":
            return E4M3.encode(E4M3_SCALE.decode(t) * replace(self, scale_values="as stored", scalar=SCALAR[0]).global_scale(layer))
        return t

    # -- the call ---------------------------------------------------------------------------------------------------

    def activations(self, x: Tensor) -> Tensor:
        """x [..., K] -> [M, K padded] in the dtype that is passed: padded by two elements for each byte that the weight was padded by."""
        x = x.reshape(-1, x.shape[-1]).to(self.x_dtype)
        wide = {"elements": elements_of(self.weights_padding_bytes), "bytes": self.weights_padding_bytes, "none": 0}[self.x_pad]
        return pad(x, (0, wide)).contiguous()

    def arguments(self, operands: Mapping[str, Tensor], x: Tensor) -> dict[str, Any]:
        """The call of the kernel for activations x [..., K]."""
        return self.contract.arguments(operands, self.activations(x))

    def finish(self, out: Tensor, shape: tuple[int, ...], bias: Tensor | None) -> Tensor:
        """The kernel's output [M, N padded] -> the layer's [..., N]: cut, then the bias added, then the shape of x.

        Raises RuntimeError as torch does where the bias is added before the cut and sizes differ.
        """
        if bias is not None and self.bias == "before the slice":
            out = out + bias
        if self.sliced:
            out = out[..., : self.n].contiguous() if out.shape[-1] != self.n else out
        for _ in range({"after the slice": 1, "twice": 2}.get(self.bias, 0) if bias is not None else 0):
            out = out + bias
        return out.reshape(*shape, out.shape[-1])

    def canonical(self, layer: LinearLayer) -> LinearLayer:
        """The layer as the kernel can see it at best: one global scale for all parts."""
        return layer.with_one_global_scale(replace(self, scalar=SCALAR[0], scale_values=SCALE_VALUES[0]).global_scale(layer)[0])

    def invert(self, operands: Mapping[str, Tensor], layer: LinearLayer) -> LinearLayer:
        """The logical layer that these operands come from; `layer` gives the parts and what is not in them. Inverse of `convert` up to `canonical`."""
        weight = self.contract.see(self.arguments(operands, torch.zeros(1, self.k))).weight
        scales = weight.scales[: self.n, : self.k // 16]
        if self.sm12x:
            scales = E4M3.encode(self.contract.operand("weight_scale").scale.decode(scales))
        return replace(layer, payload=weight.payload[: self.n, : self.k // 2], scales=scales).with_one_global_scale(operands["alpha"][0])

    def __str__(self) -> str:
        (n, k), (rows, columns) = self.padded, SWIZZLE_128x4.padded(self.n, self.k // 16)
        to = "128x4" if self.swizzles == 1 else f"128x4, {self.swizzles} times"
        last = f"linear {n} x {k // 16} | transposed | S0E5M3, {self.recode}" if self.sm12x else f"6-D view, {self.view}"
        return "\n".join(
            (
                f"weight       pad {self.n} x {self.k} -> {n} x {k} elements ({self.weights_padding_bytes} bytes a row)"
                + (" | SM12x weight tiles" if self.sm12x else ""),
                f"weight_scale pad {self.n} x {self.k // 16} -> {rows} x {columns} | {to} | {last}",
                f"alpha        the {'largest' if self.takes == 'max' else 'smallest'} of the parts' global scales, as a multiplier",
                f"x            pad K {self.k} -> {k} (2 elements a byte); bfloat16",
                f"output       first {self.n} of {n} columns, then + bias",
            )
        )


def _recode(scales: Tensor, how: str) -> Tensor:
    if how == "left as E4M3":
        return scales
    if how == "Marlin's":
        return recode_e4m3_to_s0e5m3_marlin(scales)
    if how == "small scales flushed":
        scales = torch.where(E4M3_SCALE.decode(scales) < FLUSHED_BELOW, 0, scales)
    return recode_e4m3_to_s0e5m3(scales)
