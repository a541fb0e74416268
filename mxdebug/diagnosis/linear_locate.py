"""Which linear layer of a checkpoint, and which tensor-parallel part of it, does a call hold? Dumps do not say; the rows of the weight do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..checkpoints import Checkpoint, CheckpointLinear
from ..contracts import LinearContract
from ..errors import MxdebugError
from ..layouts import row_hashes
from ..recipes import SWAP_NIBBLES
from ..recipes.w4a16.padding import round_up

SIZES = (1, 2, 4, 8, 16, 32, 64)


def locate_linear(contract: LinearContract, arguments: Mapping[str, object], checkpoint: Checkpoint, *, module: str | None = None, layer: int | None = None,
                  tp: tuple[int, int] | None = None) -> CheckpointLinear:
    """The checkpoint's layer whose weight is in the call, cut to the part that fits.

    module  its name, a file's or one of the joined ones (qkv_proj, gate_up_proj); None: found by the rows of the weight, in whatever order they stand
    layer   only names of this layer; tp: the tensor-parallel position, found by size and bytes where it is not given
    Raises MxdebugError where none or several fit.
    """
    b = contract.get("weight", arguments)
    if b is None or b.dtype != contract.operand("weight").dtype:
        raise MxdebugError("weight", str(contract.operand("weight").dtype), "none" if b is None else str(b.dtype), "state the layer: --module NAME")
    n, k = contract.sizes(b)
    o = contract.operand("weight")
    rows = o.layout.unpack(o.payload(b).flatten(), n, k // 2).reshape(n, k // 2)
    names = [module] if module is not None else [name for name in checkpoint.linear_names if layer is None or f"layers.{layer}." in name]
    found: list[CheckpointLinear] = []
    fits = 0
    for name in names:
        shape = checkpoint.linear_shape(name)
        if shape is None or not _may_fit(shape, (n, k)):
            continue
        best, most = None, 0.0
        for part in _parts(checkpoint.linear(name), (n, k), tp):
            fits += 1
            if (share := _held(rows, part)) > most:  # the first of equals: the whole layer, few ranks
                best, most = part, share
            if share == 1.0:
                break
        if best is not None and most >= 0.5:
            found.append(best)
    if module is not None and not found:
        return next(_parts(checkpoint.linear(module), (n, k), tp), checkpoint.linear(module))  # sizes do not fit, or its rows are not here: the diagnosis says so
    if len(found) != 1:
        raise MxdebugError("linear layer", f"one of {len(names)} whose weight is in the call (N, K padded {[n, k]})",
                           f"none of the {fits} of that size" if not found else f"several: {', '.join(f.name for f in found[:4])}",
                           "another checkpoint, or weights that were requantised or never loaded; state the layer with --module NAME" if not found
                           else "layers with equal weights; state --module NAME")
    return found[0]


def _may_fit(shape: tuple[int, int], padded: tuple[int, int]) -> bool:
    """Whether a part of the layer can have the call's size; rows may be repeated (key and value heads), so no more than that they are not too many."""
    n, k = shape
    whole_k = round_up(k) == padded[1]
    return (whole_k and padded[0] <= round_up(n)) or (round_up(n) == padded[0] and any(k % size == 0 and round_up(k // size) == padded[1] for size in SIZES))


def _parts(whole: CheckpointLinear, padded: tuple[int, int], tp: tuple[int, int] | None) -> Iterator[CheckpointLinear]:
    """Every part of the layer that has the call's size, the whole one first."""
    joined = len(whole.layer.rows) == 3  # q, k, v
    for size in SIZES if tp is None else (tp[0],):
        for axis, kv in [("rows", None), *([("rows", n) for n in SIZES if n < size] if joined else []), ("columns", None)] if size > 1 else [("rows", None)]:
            for rank in range(size) if tp is None else (tp[1],):
                try:
                    part = whole.layer if size == 1 else whole.layer.part(size, rank, axis, kv)
                except MxdebugError:
                    break
                if (round_up(part.n), round_up(part.k)) != padded:
                    break
                repeated = "" if kv is None else f", keys and values in {kv} shares"
                yield whole if size == 1 else replace(whole, name=f"{whole.name} ({axis} of tensor-parallel rank {rank} of {size}{repeated})", layer=part)


def _held(rows: Tensor, part: CheckpointLinear) -> float:
    """The share of rows that call and part have in common, in any order, nibbles swapped or not; rows of zeros (padding) do not count."""
    payload = part.layer.payload
    here = row_hashes(rows[:, : payload.shape[1]].contiguous())
    here = here[here != 0]
    shares = []
    for t in (payload, SWAP_NIBBLES.apply(payload)):
        there = row_hashes(t)
        there = there[there != 0]
        if len(there) and len(here):
            shares.append(min(float(torch.isin(there, here).double().mean()), float(torch.isin(here, there).double().mean())))
    return max(shares, default=0.0)
