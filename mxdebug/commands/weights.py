"""`mxdebug weights`."""

from __future__ import annotations

import sys
from pathlib import Path

import click


@click.command()
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--path",
    "kernel",
    required=True,
    help="The kernel that they are for, such as mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16 (mxdebug contract lists them).",
)
@click.option(
    "--checkpoint", type=click.Path(exists=True, path_type=Path), required=True, help="Folder of the model: config.json and safetensors."
)
@click.option("--layer", type=int, help="Layer of the checkpoint.")
@click.option("--tp", type=(int, int), metavar="SIZE RANK", default=(1, 0), help="Tensor-parallel position.")
@click.option("--ep", type=(int, int), metavar="SIZE RANK", default=(1, 0), help="Expert-parallel position.")
@click.option("--engine", default="vllm", show_default=True)
def weights(file: Path, kernel: str, checkpoint: Path, layer: int | None, tp: tuple[int, int], ep: tuple[int, int], engine: str) -> None:
    """Say what is wrong with a layer's converted weights, next to the checkpoint: no GPU, no call.

    FILE: a .safetensors file of one layer's parameters as the engine holds them after loading, in vLLM for example

    \b
        save_file({n: p.detach().cpu().contiguous().view(torch.uint8) if p.element_size() == 1 else p.detach().cpu().contiguous()
                   for n, p in layer.named_parameters()}, "layer3.safetensors")

    under the names w13_weight, w13_weight_scale, w13_bias, w2_weight, w2_weight_scale, w2_bias. Exit code: 0 right, 1 something is wrong, 2 not read.
    """
    from ..diagnosis.weights import diagnose_weights
    from ..reference import Parallel

    d = diagnose_weights(file, kernel, checkpoint, layer=layer, engine=engine, parallel=Parallel(*tp, *ep))
    click.echo(str(d))
    sys.exit(0 if d.ok else 1)
