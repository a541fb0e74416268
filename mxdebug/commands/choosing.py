"""Which of a dump's calls a command is about."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING

import click

from ..errors import MxdebugError, printable

if TYPE_CHECKING:
    from ..calls import Recording
    from ..contracts import Contract, LinearContract

MANY = 8


def choose(recordings: list[Recording], wanted: str | None, contracts: Mapping[str, Contract | LinearContract]) -> list[Recording]:
    """The calls of this number, or whose folder's name contains `wanted`, of kernels among `contracts` where there are some (numbers are counted for each
    function); without it all of these kernels, and a line on what is left out.

    Raises MxdebugError where there is none.
    """
    known = {f for c in contracts.values() for f in (c.function, *c.aliases)}
    if wanted is not None:
        chosen = [r for r in recordings if (r.sequence == int(wanted) if re.fullmatch(r"[0-9]{1,9}", wanted) else wanted in r.source.name)]
        if not chosen:
            more = f" and {len(recordings) - MANY} more" if len(recordings) > MANY else ""
            raise MxdebugError("call", "one of " + ", ".join(r.source.name for r in recordings[:MANY]) + more, repr(wanted))
        return [r for r in chosen if r.function in known] or chosen
    chosen = [r for r in recordings if r.function in known]
    others: dict[str, int] = {}
    for r in recordings:
        if r.function not in known:
            others[r.function] = others.get(r.function, 0) + 1
    if not chosen:
        found = ", ".join(f"{n} of {f}" for f, n in others.items()) or "no recorded call"
        raise MxdebugError("dump", f"a call of {', '.join(sorted(known))}", found, "set FLASHINFER_DUMP_INCLUDE (see mxdebug doctor)")
    if others:
        click.echo(printable("left out: " + ", ".join(f"{n} calls of {f}" for f, n in others.items())))
    return chosen
