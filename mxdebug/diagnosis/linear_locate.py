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
AXES = ("rows", "columns")


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
        if shape is None or not any(_fits(shape, size, axis, (n, k)) for size in (SIZES if tp is None else (tp[0],)) for axis in AXES):
            continue
        whole = checkpoint.linear(name)
        for part in _parts(whole, (n, k), tp):
            fits += 1
            if (module is not None and (tp is not None or part is whole)) or _holds(rows, part):
                found.append(part)
                break
    if module is not None and not found:
        return checkpoint.linear(module)  # sizes do not fit, or its rows are not here: the diagnosis says so
    if len(found) != 1:
        raise MxdebugError("linear layer", f"one of {len(names)} whose weight is in the call (N, K padded {[n, k]})",
                           f"none of the {fits} of that size" if not found else f"several: {', '.join(f.name for f in found[:4])}",
                           "another checkpoint, or weights that were requantised or never loaded; state the layer with --module NAME" if not found
                           else "layers with equal weights; state --module NAME")
    return found[0]


def _fits(shape: tuple[int, int], size: int, axis: str, padded: tuple[int, int]) -> bool:
    n, k = shape
    if (n if axis == "rows" else k) % size:
        return False
    return (round_up(n // size if axis == "rows" else n), round_up(k // size if axis == "columns" else k)) == padded


def _parts(whole: CheckpointLinear, padded: tuple[int, int], tp: tuple[int, int] | None) -> Iterator[CheckpointLinear]:
    for size in SIZES if tp is None else (tp[0],):
        for axis in AXES if size > 1 else AXES[:1]:
            if not _fits((whole.layer.n, whole.layer.k), size, axis, padded):
                continue
            for rank in range(size) if tp is None else (tp[1],):
                if size == 1:
                    yield whole
                    continue
                try:
                    yield replace(whole, name=f"{whole.name} ({axis} of tensor-parallel rank {rank} of {size})", layer=whole.layer.part(size, rank, axis))
                except MxdebugError:
                    continue


def _holds(rows: Tensor, part: CheckpointLinear) -> bool:
    """Whether at least half of the part's rows stand in the call, in any order, nibbles swapped or not."""
    payload = part.layer.payload
    here = row_hashes(rows[:, : payload.shape[1]].contiguous())
    return any(torch.isin(row_hashes(t), here).float().mean().item() >= 0.5 for t in (payload, SWAP_NIBBLES.apply(payload)))
