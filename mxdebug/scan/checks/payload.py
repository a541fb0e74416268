"""What payloads say, where they were read (--payload, --index)."""

from __future__ import annotations

from collections.abc import Iterator

from ..catalogue import RULES
from ..codes import NAN
from ..finding import Finding, make
from ..scene import Scene, share
from .scales import all_zero, of

_SHOWN = 3


def check(scene: Scene) -> Iterator[Finding]:
    """Zero scales under other payload, NaN elements, zero weights and rows; files that changed while they were read."""
    if failed := [m for m in scene.measured.values() if m.failed]:
        why = sorted({m.failed for m in failed})  # each file says its own
        said = "; ".join(why[:_SHOWN]) + (f"; and {len(why) - _SHOWN} more" if len(why) > _SHOWN else "")
        yield make(RULES["shard-damaged"], f"{len(failed):,} weights could not be read: {said}", (m.key for m in failed))
    for group in scene.groups:
        if group.payload is None:
            continue
        if group.lost.any():
            yield of(group, "zero-scale-under-payload", group.lost, f"{group.lost.sum():,} of {group.blocks:,} blocks")
        if not group.kind.packed and (nan := group.payload[:, NAN[True]].sum(1)).any():
            yield of(group, "payload-nan", nan, f"{nan.sum():,} elements (byte 0x7F or 0xFF)")
        zero = all_zero(group)
        if zero.any():
            yield of(group, "payload-zero", zero, f"{zero.sum():,} of {len(zero):,} weights")
        if (rows := group.zero_rows * ~zero).any():
            total = sum(w.sizes[1] for w, _ in group.units)
            yield of(group, "payload-rows-zero", rows, f"{rows.sum():,} of {total:,} rows ({share(int(rows.sum()), total)})")
