"""Which linear layer of a checkpoint, and which tensor-parallel part of it, does a call hold? Dumps do not say; the rows of the weight do."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..checkpoints import Checkpoint, CheckpointLinear
from ..contracts import LinearContract
from ..errors import MxdebugError
from ..layouts import row_hashes
from ..recipes import SWAP_NIBBLES
from ..recipes.w4a16.padding import round_up

SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Located:
    """chosen: the layer, or the part of it that the call holds; note: what was not stated, or is not as stated; other_rank: the bytes are another rank's."""

    chosen: CheckpointLinear
    note: str = ""
    other_rank: bool = False


def locate_linear(
    contract: LinearContract,
    arguments: Mapping[str, object],
    checkpoint: Checkpoint,
    *,
    module: str | None = None,
    layer: int | None = None,
    tp: tuple[int, int] | None = None,
) -> Located:
    """The checkpoint's layer whose weight is in the call, cut to the part that fits.

    module  its name, a file's or one of the joined ones (qkv_proj, gate_up_proj), or the end of one; None: found by the rows of the weight, in whatever
            order they stand
    layer   only names of this layer; tp: the tensor-parallel position; the bytes say which rank's part it is, and whether that is the stated one
    Raises MxdebugError where none or several fit.
    """
    b = contract.get("weight", arguments)
    if b is None or b.dtype != contract.operand("weight").dtype:
        raise MxdebugError(
            "weight", str(contract.operand("weight").dtype), "none" if b is None else str(b.dtype), "state the layer: --module NAME"
        )
    if tp is not None and not 0 <= tp[1] < tp[0]:
        raise MxdebugError("--tp SIZE RANK", "0 <= RANK < SIZE", f"{tp[0]} {tp[1]}")
    n, k = contract.sizes(b)
    o = contract.operand("weight")
    rows = o.layout.unpack(o.payload(b).flatten(), n, k // 2).reshape(n, k // 2)
    joined, single = _names(checkpoint, module, layer)
    held: list[tuple[float, CheckpointLinear]] = []
    fits: list[CheckpointLinear] = []
    for names in (joined, single):  # an engine that joins nothing has the file's own modules
        for name in names if max((share for share, _ in held), default=0.0) < 1.0 else ():
            shape = checkpoint.linear_shape(name)
            if shape is None or not _may_fit(shape, (n, k)):
                continue
            best, most = None, 0.0
            for part in _parts(checkpoint.linear(name), (n, k), None if tp is None else tp[0]):
                fits.append(part)
                if (share := _held(rows, part)) > most:  # the first of equals: the whole layer, few ranks
                    best, most = part, share
                if share == 1.0 and (tp is None or _rank(part) == tp):
                    break
            if best is not None and most >= 0.5:
                held.append((most, best))
    found = [part for share, part in held if share == max(held, key=lambda h: h[0])[0]]
    if module is not None and not found:
        stated = [p for p in fits if tp is None or _rank(p) == tp]
        if not stated and tp is not None:
            raise MxdebugError(
                "call and --tp",
                f"rank {tp[1]}'s part of {joined[0]} in {tp[0]}",
                f"N, K padded {[n, k]}",
                "another size, or the whole layer",
            )
        return Located(
            stated[0] if stated else checkpoint.linear(joined[0])
        )  # sizes do not fit, or its rows are not here: the diagnosis says so
    if len(found) != 1:
        raise MxdebugError(
            "linear layer",
            f"one of {len(joined) + len(single)} whose weight is in the call (N, K padded {[n, k]})",
            f"none of the {len(fits)} of that size" if not found else f"several: {', '.join(f.name for f in found[:4])}",
            "another checkpoint, or weights that were requantised or never loaded; state the layer with --module NAME"
            if not found
            else "layers with equal weights; state --module NAME",
        )
    holds = _rank(found[0])
    if tp is None:
        return Located(
            found[0],
            ""
            if holds is None
            else f"the bytes are those of tensor-parallel rank {holds[1]} of {holds[0]}; whether this process is that rank, --tp SIZE RANK checks",
        )
    return Located(found[0], other_rank=holds != tp)


def _names(checkpoint: Checkpoint, module: str | None, layer: int | None) -> tuple[list[str], list[str]]:
    """(names of what engines run, the file's modules besides), by what the user stated."""
    joined, single = list(checkpoint.linear_names), [name for name in checkpoint.linears if name not in checkpoint.linear_names]
    if layer is not None:
        joined, single = ([name for name in names if f"layers.{layer}." in name] for names in (joined, single))
        if not joined:
            raise MxdebugError(
                "--layer", "the number of a layer with linear modules", str(layer), f"the checkpoint has {len(checkpoint.linears)} of them"
            )
    if module is None:
        return joined, single
    ends = [name for name in (*joined, *single) if name == module or name.endswith("." + module)]
    return ([ends[0]] if len(ends) == 1 else [module]), []


def _rank(part: CheckpointLinear) -> tuple[int, int] | None:
    """(size, rank) of a part that `_parts` made; None for a whole layer."""
    match = re.search(r"tensor-parallel rank (\d+) of (\d+)", part.name)
    return None if match is None else (int(match[2]), int(match[1]))


def same_part(whole: CheckpointLinear, like: CheckpointLinear) -> Iterator[CheckpointLinear]:
    """The parts of another layer that are of the size of `like`: whole, or every rank's of as many."""
    rank = _rank(like)
    yield from _parts(whole, (round_up(like.layer.n), round_up(like.layer.k)), 1 if rank is None else rank[0])


def _may_fit(shape: tuple[int, int], padded: tuple[int, int]) -> bool:
    """Whether a part of the layer can have the call's size; rows may be repeated (key and value heads), so no more than that they are not too many."""
    n, k = shape
    whole_k = round_up(k) == padded[1]
    return (whole_k and padded[0] <= round_up(n)) or (
        round_up(n) == padded[0] and any(k % size == 0 and round_up(k // size) == padded[1] for size in SIZES)
    )


def _parts(whole: CheckpointLinear, padded: tuple[int, int], only: int | None) -> Iterator[CheckpointLinear]:
    """Every part of the layer that has the call's size, the whole one first; only: of this many ranks."""
    joined = len(whole.layer.rows) == 3  # q, k, v
    for size in SIZES if only is None else (only,):
        for axis, kv in (
            [("rows", None), *([("rows", n) for n in SIZES if n < size] if joined else []), ("columns", None)]
            if size > 1
            else [("rows", None)]
        ):
            for rank in range(size):
                try:
                    part = whole.layer if size == 1 else whole.layer.part(size, rank, axis, kv)
                except MxdebugError:
                    break
                if (round_up(part.n), round_up(part.k)) != padded:
                    break
                repeated = "" if kv is None else f", keys and values in {kv} shares"
                yield (
                    whole
                    if size == 1
                    else replace(whole, name=f"{whole.name} ({axis} of tensor-parallel rank {rank} of {size}{repeated})", layer=part)
                )


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
