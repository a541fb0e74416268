"""mxdebug on the command line."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import click

from .commands.catalogue import confusion, faults
from .commands.cut import cut
from .commands.repeats import repeats
from .commands.scan import scan
from .commands.weights import weights
from .commands.where import where
from .errors import MxdebugError, printable

if TYPE_CHECKING:
    from torch import Tensor

    from .checkpoints import Checkpoint
    from .diagnosis import Diagnosis


# Tensors of hundreds of MB come and go: in huge pages torch gets them several times faster. Read by torch when it is loaded, which is later.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")


INTERRUPTED, INTERNAL = 130, 70  # as shells and sysexits.h have it
SLOW = 1 << 26  # bytes of a call that takes seconds


class _Group(click.Group):
    """Bad input ends with one readable message and exit code 2, never with a traceback. 1 is a verdict: interruptions and errors of our own end otherwise."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            click.echo("mxdebug: interrupted", err=True)
            sys.exit(INTERRUPTED)
        except MxdebugError as error:
            click.echo(f"mxdebug: {error.operand}\n  expected  {error.expected}\n  got       {error.got}", err=True)
            if error.reason:
                click.echo(f"  likely    {error.reason}", err=True)
            sys.exit(2)
        except (click.ClickException, click.exceptions.Exit, click.Abort, BrokenPipeError):
            raise  # click's own, and a reader who has seen enough, as `head` has
        except Exception:
            traceback.print_exc()
            click.echo("mxdebug: this is an error in mxdebug, and says nothing of what it was given", err=True)
            sys.exit(INTERNAL)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="mxdebug")
def main() -> None:
    """Find out why a block-scaled (MXFP4, NVFP4, MXFP8) layer computes garbage.

    Start with `mxdebug demo`, then `mxdebug doctor` for how to record a call of your engine, then `mxdebug diagnose`.
    """


@main.command()
@click.argument("dump", type=click.Path(exists=True, path_type=Path))
@click.option("--checkpoint", type=click.Path(exists=True, path_type=Path), help="Folder of the model: config.json and safetensors.")
@click.option("--layer", type=int, help="Layer of the checkpoint; without it the layer is found by the weights' rows.")
@click.option("--call", "wanted", help="Only the call of this number, or whose folder's name contains this text.")
@click.option("--engine", default="vllm", show_default=True, help="Whose recipe the operands should follow.")
@click.option("--module", help="For a linear kernel: the layer's name, such as model.layers.0.self_attn.qkv_proj; without it, it is found by the weights' rows.")
@click.option("--tp", type=(int, int), metavar="SIZE RANK", help="Tensor-parallel position, for kernels that are not told (TRT-LLM, CuTe-DSL).")
@click.option("--index", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Of the checkpoint, from `mxdebug scan --index`: finds layer and slice at once.")
@click.option("--device", help="Where calls of experts are computed, such as cuda. The result is the same.")
@click.option("--sent", type=click.Path(exists=True, dir_okay=False, path_type=Path),
              help="A .safetensors file with what each rank's tokens were before quantisation, one tensor [rows, H] a rank, named in rank order.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), help="Write a page with pictures too: no scripts, no weights, no paths, fit to be sent.")
@click.option("--json", "as_json", type=click.Path(dir_okay=False, path_type=Path), help="Write the diagnosis as JSON too; mxdebug.report.schema says what is in it.")
def diagnose(dump: Path, checkpoint: Path | None, layer: int | None, wanted: str | None, engine: str, module: str | None, tp: tuple[int, int] | None,
             index: Path | None, device: str | None, sent: Path | None, html: Path | None, as_json: Path | None) -> None:
    """Say what is wrong with the calls in DUMP, a folder that FlashInfer wrote (FLASHINFER_LOGLEVEL=10).

    Or with one run of a converted linear layer: DUMP is then a .safetensors file that mxdebug.save_run wrote.

    Exit code: 0 every call is right, 1 something is wrong or undecided, 2 the input cannot be read.
    """
    from .calls import scan
    from .commands.choosing import MANY, choose
    from .contracts import ALL
    from .diagnosis import diagnose as run
    from .reference import Parallel
    from .report import Entry, Report
    from .report.record import write_all

    def write(entries: list[Entry], opened: Checkpoint | None = None) -> None:
        write_all(Report(tuple(entries), dump, checkpoint, layer, module, tp, sent, engine, wanted, index), html, as_json, opened)

    write([])
    if dump.suffix == ".safetensors" and dump.is_file():
        try:
            d = _diagnose_file(dump, checkpoint, module, layer, tp, engine)
        except MxdebugError as error:
            write([Entry(dump.name, "", "run", error)])
            raise
        click.echo(str(d))
        write([Entry(dump.name, "", "run", d)])
        sys.exit(0 if d.ok else 1)
    recordings, opened = choose(scan(dump), wanted, ALL), None
    if wanted is None and len(recordings) > MANY:
        click.echo(f"{len(recordings)} calls; --call picks some, by number or by a part of the folder's name\n")
    if checkpoint is not None:
        from .checkpoints import open_checkpoint

        opened = open_checkpoint(checkpoint)
    found = None
    if index is not None:
        from .scan import load_index

        found = load_index(index)
        if checkpoint is not None and (stale := found.stale(checkpoint)):
            raise MxdebugError(f"--index {index.name}", "an index of this checkpoint", "; ".join(stale[:3]), "files that changed: mxdebug scan --index again")
    _threads(max(r.size for r in recordings))
    names = [r.source.name for r in recordings]
    worst, verdicts, entries = 0, {}, []
    for r in recordings:
        call, name = None, r.source.name
        heading = f"--- {printable(name if names.count(name) == 1 else f'{r.source.parent.name}/{name}')}"
        if r.size >= SLOW and sys.stderr.isatty():
            click.echo(f"mxdebug: reading and diagnosing {printable(name)}, {r.size / 2**20:,.0f} MiB", err=True)
        try:
            call = r.load()
            d = run(call, opened, layer=layer, engine=engine, tp=tp and Parallel(*tp), sent=sent and _tokens(sent), module=module, index=found,
                    device=device)
        except MxdebugError as error:
            entries.append(Entry.of(r, error, call))
            if len(recordings) == 1:
                write(entries)
                raise
            click.echo(f"{heading}\nNOT READ: {error}\n")
            worst, verdict = 2, "not read"
        else:
            entries.append(Entry.of(r, d, call))
            worst, verdict = max(worst, 0 if d.ok else 1), d.verdict
            if len(recordings) == 1:
                click.echo(str(d))
            elif d.ok:
                click.echo(f"{heading}\nRIGHT (layer {dict(d.call).get('layer', '?').split(' ')[0]})\n")
            else:
                click.echo(f"{heading}\n{d}\n")
        verdicts[verdict] = verdicts.get(verdict, 0) + 1
    if len(recordings) > 1:
        click.echo(f"{len(recordings)} calls: " + ", ".join(f"{n} {verdict}" for verdict, n in verdicts.items()))
    write(entries, opened)
    sys.exit(worst)


def _diagnose_file(file: Path, checkpoint: Path | None, module: str | None, layer: int | None, tp: tuple[int, int] | None, engine: str) -> Diagnosis:
    """Diagnose one run of a linear layer from a file."""
    from .checkpoints import open_checkpoint
    from .diagnosis.linear import diagnose_run
    from .diagnosis.linear_elsewhere import besides
    from .diagnosis.linear_locate import locate_linear
    from .diagnosis.linear_run import load_run

    run, kernel = load_run(file)
    if checkpoint is None:
        raise MxdebugError("--checkpoint", "the folder of the model", "none", "a layer's run says nothing without what it should compute")
    _threads(0)
    arguments = kernel.arguments(run.operands, run.x)
    opened = open_checkpoint(checkpoint)
    located = locate_linear(kernel, arguments, opened, module=module, layer=layer, tp=tp)
    return besides(diagnose_run(run, located.chosen, kernel, engine), located, tp, kernel, arguments, opened)


def _tokens(file: Path) -> list[Tensor]:
    """The tensors of a .safetensors file in the order of their names."""
    from safetensors import SafetensorError

    from .files import open_safetensors

    try:
        with open_safetensors(file, file.resolve().parent, "not a .safetensors file, or cut off") as f:
            tensors = [f.get_tensor(name) for name in sorted(f.keys())]
    except (SafetensorError, RuntimeError) as error:
        raise MxdebugError(f"--sent {file.name}", "a .safetensors file", str(error)) from error
    if not tensors:
        raise MxdebugError(f"--sent {file.name}", "one tensor [rows, H] for each rank", "no tensors")
    return tensors


def _threads(size: int) -> None:
    """On a small call the threads' waiting for each other costs more than they save, above all on a busy machine."""
    if size < SLOW:
        import torch

        torch.set_num_threads(1)


@main.command()
@click.argument("name", default="c04")
def demo(name: str) -> None:
    """Diagnose a recorded wrong call that ships with mxdebug: no GPU, no network. NAME is c01 to c14."""
    from .diagnosis import diagnose as run
    from .recorded import CALLS, call

    r = call(name)
    click.echo(f"An NVIDIA H200 ran FlashInfer's cutlass_fused_moe on the weights of {r.checkpoint}; FlashInfer dumped the call ({r.name}).")
    click.echo("Nothing crashed. What follows is computed from the dump and the checkpoint alone, on this machine:\n")
    click.echo(f"$ mxdebug diagnose {_shown(r.path)} --checkpoint {_shown(r.checkpoint_path)}\n")
    _threads(0)
    d: Diagnosis = run(r.path, r.checkpoint_path)
    click.echo(str(d))
    click.echo(f"\nWhat was really done wrong when this call was recorded: {r.wrong}.")
    click.echo(f"Others: {', '.join(c for c in CALLS if c != name)} (mxdebug demo NAME). Your own engine: mxdebug doctor tells how to record a call.")


def _shown(path: Path) -> str:
    """A path as one would type it from here."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)


@main.command()
def doctor() -> None:
    """What this machine can run, and how to record a call of your engine."""
    from .doctor import report

    click.echo(report())


@main.command()
@click.argument("path", required=False)
def contract(path: str | None) -> None:
    """What a path's kernel reads and computes, operand by operand, and how vLLM gets there. Without PATH: the paths."""
    from .contracts import ALL
    from .contracts import any_contract as find
    from .recipes import RECIPES
    from .recipes.w4a16.recipe import LINEAR_RECIPES

    if path is None:
        width = max(map(len, ALL))
        for c in ALL.values():
            click.echo(f"{c.path:<{width}}  {c.function}, {' '.join(f'SM{s}' for s in c.sm)}; {'; '.join(v.how for v in c.verified)}")
        return
    click.echo(str(find(path)))
    for r in (*RECIPES, *LINEAR_RECIPES):
        if r.path == path:
            click.echo(f"\n{r.engine} {r.version}, {r.checkpoint} checkpoints: {r.source}\n  {r.forced_by}")


@main.command()
@click.option("--sm", type=int, required=True, help="90, 100, 103, 110, 120 or 121.")
@click.option("--quantisation", type=click.Choice(["mxfp4", "nvfp4"]), required=True)
@click.option("--checkpoint", required=True, help="gpt-oss, mxfp4, compressed-tensors or quark; for nvfp4 modelopt, compressed-tensors or quark.")
@click.option("--activation", default="silu", show_default=True, help="vLLM's MoEActivation: silu, swigluoai, swigluoai_uninterleave, relu2_no_mul, ...")
@click.option("--activations", "key", help="How the checkpoint declares activations: none, mxfp8, nvfp4, ...; nvfp4 for NVFP4 weights where it is not said.")
@click.option("--moe-backend", default="auto", show_default=True)
@click.option("--tp", default=1, show_default=True)
@click.option("--dp", default=1, show_default=True)
@click.option("--expert-parallel", is_flag=True)
@click.option("--swiglu-limit", type=float)
@click.option("--version", default="0.33", show_default=True, help="vLLM's version.")
def select(sm: int, quantisation: str, checkpoint: str, activation: str, key: str | None, moe_backend: str, tp: int, dp: int, expert_parallel: bool,
           swiglu_limit: float | None, version: str) -> None:
    """Which path vLLM takes for a MoE layer, and why not the others, in its priority order."""
    from .recipes.select import Setup
    from .recipes.select import select as run

    key = {None: "nvfp4" if quantisation == "nvfp4" else None, "none": None}.get(key, key)
    click.echo(str(run(Setup(sm, quantisation, checkpoint, activation, key, moe_backend, tp=tp, dp=dp, expert_parallel=expert_parallel,
                             swiglu_limit=swiglu_limit), version)))


@main.command("select-linear")
@click.option("--sm", type=int, required=True, help="Compute capability as one number: 90, 100, 121, ...")
@click.option("--dtype", type=click.Choice(["bfloat16", "float16"]), default="bfloat16", show_default=True, help="Of the model's activations.")
@click.option("--linear-backend", default="auto", show_default=True, help="vLLM's --linear-backend.")
@click.option("--flashinfer", help="FlashInfer's version, or none. Without it the installed one, else 0.7.4.")
@click.option("--humming/--no-humming", default=True, show_default=True, help="Humming is installed; it comes with vLLM for CUDA.")
@click.option("--b12x/--no-b12x", default=False, show_default=True, help="b12x is installed.")
@click.option("--batch-invariant", is_flag=True, help="VLLM_BATCH_INVARIANT=1.")
@click.option("--version", default="0.33", show_default=True, help="vLLM's version: 0.33, or 53014, the rule as #53014 brought it (0.30).")
def select_linear(sm: int, dtype: str, linear_backend: str, flashinfer: str | None, humming: bool, b12x: bool, batch_invariant: bool,
                  version: str) -> None:
    """Which kernel vLLM takes for an NVFP4 W4A16 linear layer (BF16 activations), why not the others, and what fails only later.

    Exit code: 0 a kernel is taken, 1 vLLM refuses, or the kernel taken will fail at run time, 2 bad input.
    """
    from .doctor import installed
    from .recipes.w4a16 import LinearSetup
    from .recipes.w4a16 import select_linear as run

    if flashinfer is None:
        found = installed("flashinfer-python")
        flashinfer = found if found is not None and found[0].isdigit() else "0.7.4"
    got = run(LinearSetup(sm, dtype, linear_backend, None if flashinfer == "none" else flashinfer, humming, b12x, batch_invariant), version)
    click.echo(str(got))
    sys.exit(0 if got.runs else 1)


@main.command()
@click.argument("text", required=False)
def symptom(text: str | None) -> None:
    """What an engine's error message, or a line of its log, means: about SwiGLU's parameters, or NVFP4 W4A16 linear layers. TEXT: the message, or a part of it;
    without TEXT: the messages that are known.

    Exit code: 0 it is known, 1 it is not.
    """
    from .recipes import swiglu
    from .recipes.symptom import fitting
    from .recipes.w4a16 import symptoms as linear

    known = (*swiglu.SYMPTOMS, *linear.SYMPTOMS)
    if not text:
        click.echo("\n".join(s.message for s in known))
        return
    found = fitting(known, text)
    if not found:
        click.echo("not known: `mxdebug symptom` lists the messages that are; for wrong output without a message: mxdebug doctor")
        sys.exit(1)
    click.echo(found[0].meaning if len(found) == 1 else "\n\n".join(f"{s.message}\n  {s.meaning}" for s in found))


@main.command()
@click.option("--engine", default="vllm", show_default=True)
def audit(engine: str) -> None:
    """Run the installed engine's own converters on this CPU and say, by path and checkpoint kind, whether the kernels get what they read.

    Exit code: 0 all right, 1 something is wrong, 2 nothing was run.
    """
    from .audit import report

    text, ok = report(engine)
    click.echo(text)
    sys.exit({True: 0, False: 1, None: 2}[ok])


@main.command()
@click.option("--path", default="mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16", show_default=True)
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), required=True, help="JSON file for the record.")
@click.option("--commit", default="unknown", help="Version of mxdebug to note in the record.")
def verify(path: str, out: Path, commit: str) -> None:
    """Run a path's real kernel on this machine's GPU, clean and with every fault, against the emulation. Needs that GPU."""
    from .verify import summary, write

    click.echo(summary(write(path, commit, out)))


class _Passing(click.Command):
    """A command that leaves all that follows `--` to another program, in ctx.args."""

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- OPTIONS OF JUPYTER LAB]"]

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        cut = args.index("--") if "--" in args else len(args)
        super().parse_args(ctx, args[:cut])
        ctx.args = args[cut + 1 :]
        return ctx.args


@main.command(cls=_Passing)
@click.argument("folder", default="mxdebug-notebooks", type=click.Path(path_type=Path))
@click.option("--fresh", is_flag=True, help="Replace notebooks that were changed; yours stay beside them, as NAME.bak-1.ipynb.")
@click.option("--no-open", is_flag=True, help="Only copy, and print the command that opens JupyterLab.")
@click.pass_context
def lab(ctx: click.Context, folder: Path, fresh: bool, no_open: bool) -> None:
    """Copy the notebooks to FOLDER, without ever writing to one that you changed, and open JupyterLab there.

    On another machine: mxdebug lab -- --no-browser --port 9999, then open the address that it prints through an SSH tunnel
    (as root, in a container, JupyterLab also wants --allow-root).
    """
    from .lab import command, copy, launch

    copied = copy(folder, fresh)
    click.echo(str(copied))
    if no_open:
        click.echo(command(copied, ctx.args))
    else:
        launch(copied, ctx.args)


@main.command()
@click.argument("word", required=False)
def glossary(word: str | None) -> None:
    """What a word of the field or of this project means. Without WORD: all words, by subject."""
    from .glossary import explain, words

    click.echo(words() if word is None else explain(word))


main.add_command(scan)

for _command in (cut, confusion, faults, repeats, weights, where):
    main.add_command(_command)


if __name__ == "__main__":
    main()
