"""`mxdebug repeats`."""

from __future__ import annotations

import sys
from pathlib import Path

import click

from ..errors import MxdebugError


@click.command()
@click.argument("dump", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--calls", nargs=2, metavar="A B", help="Numbers of two calls; without it each is compared with the next one on the same weights."
)
def repeats(dump: Path, calls: tuple[str, str] | None) -> None:
    """Do two calls in DUMP contradict each other: same inputs, another output; a token that changes with its batch; an old output?

    Sums in another order (atomics of the fused finalise) are told apart by their size. No checkpoint is needed.
    Exit code: 0 nothing contradicts, 1 something does, 2 no two calls can be compared.
    """
    from ..calls import scan
    from ..contracts import CONTRACTS
    from ..diagnosis.repeats import compare_calls
    from .choosing import choose

    recordings = choose(scan(dump), None, CONTRACTS)
    if calls is not None:
        pairs = [tuple(choose(recordings, n, CONTRACTS)[0] for n in calls)]
    else:
        pairs = [(a, b) for i, a in enumerate(recordings) for b in recordings[i + 1 :]]
    compared, wrong, why, paired = 0, 0, None, set()
    for a, b in pairs:
        if calls is None and a.sequence in paired:
            continue
        try:
            d = compare_calls(a.load(), b.load())
        except MxdebugError as error:
            why = error
            continue
        paired.add(a.sequence)
        compared, wrong = compared + 1, wrong + (not d.ok)
        click.echo(f"--- calls {a.sequence} and {b.sequence}\n{d}\n")
    if not compared:
        raise why or MxdebugError("calls", "two calls of one kernel", str(len(recordings)), "record the same prompt twice")
    click.echo(f"{compared} pairs compared, {wrong} contradict")
    sys.exit(1 if wrong else 0)
