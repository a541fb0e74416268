"""Which bytes of each weight a scan reads."""

from __future__ import annotations

from .header import Entry
from .measure import LONGEST, Piece, Task
from .weights import Weight

_BYTES = ("U8", "F8_E4M3", "F8_E8M0")


def task_of(weight: Weight, payload: bool, index: bool) -> Task | None:
    """What is read of a weight: block scales and one-number tensors; with `payload` or `index` the payload too. None: nothing can be read.

    Scales of a wrong shape are counted all the same. A payload is only read where its shape and its scales' are the kind's.
    """
    scale, data = weight.known.get("scale"), weight.known.get("payload")
    numbers = tuple(
        (role, _piece(weight.known[role])) for role in ("global", "input") if role in weight.known and is_number(weight.known[role])
    )
    scale = scale if scale is not None and scale.dtype in _BYTES and scale.size else None
    experts = _experts(weight, scale)
    whole = (payload or index) and readable(weight)
    if scale is None and not numbers:
        return None
    sizes = weight.sizes
    return Task(
        weight.module,
        experts,
        _piece(scale) if scale else None,
        _piece(data) if whole else None,
        sizes[1] if whole else 0,
        weight.kind.packed,
        weight.kind.block_bytes,
        weight.kind.e4m3,
        numbers,
        _names(weight) if index and whole else (),
    )


def readable(weight: Weight) -> bool:
    """Whether the payload can be read row by row next to its scales."""
    scale = weight.known.get("scale")
    if weight.scale_shape is None or scale is None or scale.dtype not in _BYTES or scale.shape != weight.scale_shape:
        return False
    e, n, _ = weight.sizes
    return weight.known["payload"].size // (e * n) <= LONGEST


def is_number(entry: Entry) -> bool:
    """One float32: shape [] or [1]."""
    return entry.dtype == "F32" and entry.shape in ((), (1,))


def _experts(weight: Weight, scale: Entry | None) -> int:
    experts = weight.sizes[0] if weight.sizes is not None else 1
    return experts if scale is None or scale.size % experts == 0 else 1


def _names(weight: Weight) -> tuple[str, ...]:
    """The projections in the rows of one expert: gpt-oss has gate and up in turn (transformers models/gpt_oss)."""
    fused = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}
    return fused.get(weight.projection, (weight.projection,)) if weight.fused else (weight.projection,)


def _piece(entry: Entry) -> Piece:
    return Piece(entry.file, entry.start, entry.size)
