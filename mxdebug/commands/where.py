"""`mxdebug where`."""

from __future__ import annotations

from pathlib import Path

import click


@click.command()
@click.argument("dump", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--index",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    required=True,
    help="From `mxdebug scan CHECKPOINT --index FILE`.",
)
@click.option("--call", "wanted", help="Only the call of this number, or whose folder's name contains this text.")
def where(dump: Path, index: Path, wanted: str | None) -> None:
    """Which layer, experts and tensor-parallel slice of a model the calls in DUMP hold: dumps do not say.

    Compares hashes of the rows of w13, which survive every order of rows and experts. Exit code: 0 all were found, 2 one was not.
    """
    from ..calls import scan
    from ..contracts import CONTRACTS
    from ..diagnosis.where import where as find
    from ..errors import printable
    from ..scan import load_index
    from .choosing import choose

    known = load_index(index)
    for r in choose(scan(dump), wanted, CONTRACTS):
        click.echo(f"call {r.sequence}, {printable(r.source.name)}: {find(r.load(), known)}")
