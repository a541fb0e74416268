"""`mxdebug cut`: a minimal reproduction, cut out of a recorded call."""

from __future__ import annotations

from pathlib import Path

import click

from ..errors import MxdebugError


@click.command()
@click.argument("dump", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--checkpoint", type=click.Path(exists=True, path_type=Path), required=True, help="Folder of the model: config.json and safetensors."
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="A new folder, for dump, checkpoint and README.txt.")
@click.option("--layer", type=int, help="As of `mxdebug diagnose`.")
@click.option("--module", help="As of `mxdebug diagnose`.")
@click.option("--tp", type=(int, int), metavar="SIZE RANK", help="As of `mxdebug diagnose`.")
@click.option("--call", "wanted", help="The call of this number, or whose folder's name contains this text, where there are several.")
@click.option("--probe-data", is_flag=True, help="Put made weights and activations in the place of yours, under the same faults.")
def cut(
    dump: Path,
    checkpoint: Path,
    out: Path,
    layer: int | None,
    module: str | None,
    tp: tuple[int, int] | None,
    wanted: str | None,
    probe_data: bool,
) -> None:
    """Cut a small call that still shows the same faults out of one in DUMP: one token and its experts, where that is enough.

    OUT then has a dump and a checkpoint with no more than that, to send or to keep as a test. What was written is diagnosed again;
    where it shows other faults, the command ends with an error and leaves nothing.
    """
    from ..checkpoints import open_checkpoint
    from ..cut import cut as run
    from ..cut import cut_made
    from ..cut.folder import CHECKPOINT, DUMP, size

    if dump.is_file() and dump.suffix == ".safetensors":
        raise MxdebugError(
            "dump",
            "a folder that FlashInfer wrote",
            f"{dump.name}, a run of a linear layer",
            "it is one layer and a few tokens already: send that file with the layer's tensors",
        )
    call, opened = _one(dump, wanted), open_checkpoint(checkpoint)
    made = (cut_made if probe_data else run)(call, opened, out, layer=layer, module=module, tp=tp)
    click.echo(f"{made.after.verdict.upper()}: {', '.join(f.id for f in made.after.findings) or 'no fault'}")
    if probe_data:
        click.echo("  data      made: no weight and no activation of yours is in it")
    else:
        experts = (
            f", {len(made.experts)} of {made.of_experts} experts ({', '.join(map(str, made.experts))})"
            if made.of_experts
            else ", the whole layer"
        )
        click.echo(f"  kept      {len(made.tokens)} of {made.of_tokens} tokens{experts}")
        if len(made.tokens) == made.of_tokens > 1:
            click.echo("  why all   " + ("no part of it shows the same" if call.outputs else "there is no output to cut by, and no part of it shows the same"))
    for id, reason in made.left_out:
        click.echo(f"  left out  {id}: {reason}")
    before = size(call.source) if call.source else 0
    click.echo(f"  dump      {before:,} -> {size(out / DUMP):,} bytes")
    click.echo(f"  model     {size(checkpoint):,} -> {size(out / CHECKPOINT):,} bytes")
    click.echo(f"  tried     {made.tries} times, diagnosed again from {out.name}")


def _one(dump: Path, wanted: str | None) -> object:
    """The one call that is meant."""
    from ..calls import scan
    from ..contracts import ALL
    from .choosing import choose

    there = choose(scan(dump), wanted, ALL)
    if len(there) != 1:
        names = ", ".join(r.source.name for r in there[:8]) + (f" and {len(there) - 8} more" if len(there) > 8 else "")
        raise MxdebugError("call", "exactly one: --call NUMBER or a part of the folder's name", names, "a dump of several calls")
    return there[0].load()
