"""`mxdebug faults` and `mxdebug confusion`."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command()
@click.argument("id", required=False)
@click.option("--linear", "only_linear", is_flag=True, help="Only those that can strike linear layers.")
@click.option("--book", is_flag=True, help="The whole catalogue as Markdown.")
def faults(id: str | None, only_linear: bool, book: bool) -> None:
    """The catalogue of faults, by chapters; with an ID, one of them whole."""
    from ..book import markdown, record
    from ..evidence import best
    from ..faults import FAULTS, LINEAR_FAULTS
    from ..faults.families import FAMILIES

    if book:
        click.echo(markdown())
    elif id is not None:
        for label, text in record(id):
            click.echo(f"{label:<10} {text}")
    else:
        width = max(map(len, FAULTS))
        for chapter in FAMILIES:
            shown = [FAULTS[i] for i in chapter.ids if not only_linear or i in LINEAR_FAULTS or FAULTS[i].strikes == ("linear",) or best(i, linear=True)]
            if shown:
                click.echo(f"\n{chapter.title}")
            for f in shown:
                click.echo(f"  {f.id:<{width}}  {f.title}")


@click.command()
@click.option("--path", "paths", multiple=True, help="Only this path; several times for several.")
@click.option("--fault", "ids", multiple=True, help="Only this fault; several times for several.")
@click.option("--files", "of_files", is_flag=True, help="Instead: which rule of `mxdebug scan` finds which fault in a checkpoint's files.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the cells, as mxdebug keeps them.")
def confusion(paths: tuple[str, ...], ids: tuple[str, ...], of_files: bool, json_file: Path | None) -> None:
    """Put every fault into probe data on every path and say which evidence names it. Some minutes on a laptop.

    With --files: put every fault of a checkpoint into a small one of every kind, scan it, and say which is found. Half a minute.

    Exit code: 0 no fault is called right with call and checkpoint at hand (--files: none is missed), 1 one is.
    """
    if of_files:
        _confusion_of_files(paths, ids, json_file)
    from ..confusion import PATHS, as_json, cells, measure
    from ..confusion_linear import LINEAR_PATHS, measure_linear
    from ..contracts import any_contract
    from ..evidence import MISSED, table
    from ..faults import fault

    for p in paths:
        any_contract(p)
    chosen, cases = [fault(i).id for i in ids] or None, []
    for p in paths or (*PATHS, *LINEAR_PATHS):
        click.echo(f"{p} ...", err=True)
        cases += measure_linear(p, chosen) if p in LINEAR_PATHS else measure(p, chosen)
    click.echo(table(cells(cases)))
    if json_file is not None:
        json_file.write_text(as_json(cases))
    sys.exit(1 if any(c.found["together"] == MISSED for c in cases) else 0)


def _confusion_of_files(paths: tuple[str, ...], ids: tuple[str, ...], json_file: Path | None) -> None:
    from ..confusion_files import MISSED, files_as_json, measure_files, table_files

    if paths or ids:
        raise click.UsageError("--files is about checkpoints: it takes neither --path nor --fault")
    found = measure_files(lambda kind: click.echo(f"{kind} ...", err=True))
    click.echo(table_files(found))
    if json_file is not None:
        json_file.write_text(files_as_json(found))
    sys.exit(1 if any(MISSED in cells.values() for cells in found.values()) else 0)
