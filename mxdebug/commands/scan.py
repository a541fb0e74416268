"""`mxdebug scan`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import click

from ..errors import MxdebugError

NOT_SCANNED = 3


class _Scan(click.Command):
    """Whatever keeps the checkpoint from being scanned, wrong options too, ends with exit code 3: 2 says that the checkpoint is broken."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        try:
            return super().make_context(*args, **kwargs)
        except click.UsageError as error:
            error.exit_code = NOT_SCANNED
            raise


@click.command(cls=_Scan)
@click.argument("checkpoint", type=click.Path(path_type=Path))
@click.option("--payload", is_flag=True, help="Read the payloads too: code statistics, zero scales under other payload, weights of zeros.")
@click.option(
    "--tp",
    multiple=True,
    type=click.IntRange(1, 1024),
    help="A tensor-parallel degree to check sizes for; several times for several.  [default: 1, 2, 4, 8]",
)
@click.option(
    "--processes",
    type=click.IntRange(1, 256),
    default=1,
    show_default=True,
    help="How many read and count at once, at least two: up to 8 as threads, more as processes that read 4 GiB each.",
)
@click.option("--resume", type=click.Path(dir_okay=False, path_type=Path), help="Keep what was measured in this file, and go on from it.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write everything that was found, for machines.")
@click.option("--html", "html_file", type=click.Path(dir_okay=False, path_type=Path), help="Write one self-contained page.")
@click.option(
    "--index",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Write row hashes of all weights, by which a call's layer is found. Reads the payloads.",
)
@click.option("--quiet", is_flag=True, help="No progress bar.")
def scan(
    checkpoint: Path,
    payload: bool,
    tp: tuple[int, ...],
    processes: int,
    resume: Path | None,
    json_file: Path | None,
    html_file: Path | None,
    index: Path | None,
    quiet: bool,
) -> None:
    """Look for what is wrong with a CHECKPOINT of any size: a folder with safetensors, or one such file.

    Reads headers, block scales and global scales of MXFP4, NVFP4 and MXFP8 weights (gpt-oss, compressed-tensors, ModelOpt, Quark), compares
    them with the quantisation configuration, and says what engines would make of them. No GPU, no engine; nothing outside the folder is
    opened.

    Exit code: 0 clean (notes say what only some backends do), 1 suspicious, 2 broken, 3 it could not be scanned, 130 it was interrupted.
    """
    from ..files import check_writable, write
    from ..scan import scan as run
    from ..scan import to_html, to_json
    from ..scan.scan import TP

    try:
        for file, option in ((json_file, "--json"), (html_file, "--html"), (index, "--index"), (resume, "--resume")):
            if file is not None:
                check_writable(file, option)
        report = run(
            checkpoint,
            payload=payload,
            tp=tuple(dict.fromkeys(tp)) or TP,
            processes=processes,
            resume=resume,
            index=index,
            progress=not quiet,
        )
        click.echo(str(report))
        for file, option, text in ((json_file, "--json", to_json), (html_file, "--html", to_html)):
            if file is not None:
                write(file, text(report), option)
    except MxdebugError as error:
        click.echo(f"mxdebug: {error.operand}\n  expected  {error.expected}\n  got       {error.got}", err=True)
        if error.reason:
            click.echo(f"  likely    {error.reason}", err=True)
        sys.exit(NOT_SCANNED)
    except KeyboardInterrupt:
        if resume is not None:
            click.echo(f"mxdebug: what was measured is in {resume.name}; the same command goes on from it", err=True)
        raise
    sys.exit(report.exit_code)
