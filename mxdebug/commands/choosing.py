"""Which of a dump's calls a command is about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..errors import MxdebugError

if TYPE_CHECKING:
    from ..calls import Recording


def chosen(recordings: Sequence[Recording], wanted: str | None) -> list[Recording]:
    """MoE calls, or those of this number or whose folder's name contains `wanted`. Raises MxdebugError where there is none."""
    from ..contracts import ALL

    known = {f for c in ALL.values() for f in (c.function, *c.aliases)}
    out = [
        r
        for r in recordings
        if r.function in known and (wanted is None or (r.sequence == int(wanted) if wanted.isdigit() else wanted in r.source.name))
    ]
    if not out:
        raise MxdebugError(
            "calls", f"one of {', '.join(sorted(known))}" + (f" matching {wanted!r}" if wanted else ""), f"{len(recordings)} others"
        )
    return out
