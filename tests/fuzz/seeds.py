"""Whole inputs to begin with, one folder each, small; and the entry points that read them."""

from __future__ import annotations

import functools
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from making import call_of
from making_linear import write_compressed_tensors, write_modelopt
from making_nvfp4 import COMPRESSED, MODELOPT, write
from safetensors.torch import load_file, save_file

from mxdebug import recorded
from mxdebug.calls import load, scan
from mxdebug.checkpoints import open_checkpoint
from mxdebug.diagnosis import diagnose, diagnose_run
from mxdebug.diagnosis.linear_run import load_run, save_run
from mxdebug.faults import LinearSituation
from mxdebug.recipes.w4a16.recipe import linear_recipe

SIGNATURE = (
    "(a: torch.Tensor, b: torch.Tensor, b_descale: torch.Tensor, alpha: Optional[torch.Tensor] = None, *, "
    "backend: Literal['cudnn', 'cute-dsl'], out_dtype: Optional[torch.dtype] = None, block_size: int = 16) -> torch.Tensor"
)
_MODULE = "model.layers.0.self_attn.qkv_proj"
_OPERANDS = {"weight": "weight", "weight_scale": "weight_scale", "alpha": "weight_global_scale"}


def _copy(source: Path, folder: Path) -> None:
    """Without the H200 recordings' owner and mode: copies are changed."""
    shutil.copytree(source, folder, copy_function=shutil.copyfile)


def _sharded(source: Path, folder: Path) -> None:
    """The same checkpoint in two shards with an index."""
    tensors = load_file(source / "model.safetensors")
    names = sorted(tensors)
    folder.mkdir()
    where = {name: f"model-0000{1 + (i * 2 >= len(names))}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in sorted(set(where.values())):
        save_file({name: tensors[name] for name in names if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "config.json").write_text((source / "config.json").read_text())


def _situation(checkpoint: Path) -> LinearSituation:
    found = open_checkpoint(checkpoint).linear(_MODULE)
    x = torch.randn(3, found.layer.k, generator=torch.Generator().manual_seed(1)).bfloat16()
    return LinearSituation.right(linear_recipe("nvfp4_w4a16/flashinfer_cutedsl/sm100", found.kind), found.layer, x)


def make(folder: Path) -> Path:
    """Write every seed below `folder`, and return it."""

    def of(name: str) -> Path:
        (folder / name).mkdir(parents=True)
        return folder / name

    c09, c01 = recorded.call("c09"), recorded.call("c01")
    _copy(c09.path, of("dump-pt") / "dumps")
    load(c09.path).save(of("dump-safetensors") / "dumps", "safetensors")
    _copy(c01.checkpoint_path, of("gpt-oss") / "model")
    _sharded(c09.checkpoint_path, of("mxfp4") / "model")
    small = dict(experts=2, hidden=64, intermediate=32)
    write(of("modelopt-moe") / "model", MODELOPT, **small)
    write(of("nvfp4-moe") / "model", COMPRESSED, **small)
    write_modelopt(of("modelopt-linear") / "model", bias=True)
    write_compressed_tensors(of("nvfp4-linear") / "model", bias=True)
    made = _situation(folder / "modelopt-linear" / "model")
    arguments, output = made.build()
    call_of(arguments, output, function="mm_bf16_fp4", module="flashinfer.gemm.gemm_bf16_fp4", signature=SIGNATURE).save(
        of("dump-linear") / "dumps"
    )
    run = made.run()
    save_run(of("run") / "run.safetensors", {_OPERANDS[k]: t for k, t in run.operands.items()}, run.x, run.output, run.error)
    save_file({"rank0": torch.zeros(2, 32), "rank1": torch.ones(2, 32)}, of("sent") / "sent.safetensors")
    return folder


# -- entry points: what they read is printed as a terminal and a notebook would show it -------------------------------------


def _shown(d: Any) -> str:
    return f"{d}\n{d!r}\n{d._repr_html_()}"


def _dump(folder: Path, reference: Path, checkpoint: str) -> str:
    """Every call that can be read, against a whole checkpoint."""
    texts = []
    for recording in scan(folder / "dumps"):
        texts += [recording.problem, recording.load().__repr__()] if recording.status == "unreadable" else []
        texts.append(_shown(diagnose(recording.load(), _opened(reference / checkpoint / "model"))))
    return "\n".join(texts)


@functools.cache
def _opened(path: Path) -> Any:
    return open_checkpoint(path)


@functools.cache
def _call(path: Path) -> Any:
    return load(path)


def _layers(folder: Path, reference: Path) -> str:
    """Every layer, and for MXFP4 a whole call against it."""
    opened = open_checkpoint(folder / "model")
    texts = [repr(opened.experts), repr(opened.w4a16)] if opened.layers else []
    for index in opened.layers[:4]:
        layer = opened.layer(index)
        texts.append(f"{layer.kind} {layer.names} {layer.provenance}")
    for seed, call in (("mxfp4", "c09"), ("gpt-oss", "c01")):
        if folder.name.startswith(seed) and opened.layers:
            texts.append(_shown(diagnose(_call(recorded.call(call).path), opened)))
    return ascii("\n".join(texts[:-1])) + "\n".join(texts[-1:])  # names are the file's own; they are shown by repr


def _linears(folder: Path, reference: Path) -> str:
    opened = open_checkpoint(folder / "model")
    for name in (*opened.linear_names, *opened.linears)[:12]:
        opened.linear_shape(name)
        opened.linear(name)
    return _shown(diagnose(_call(next((reference / "dump-linear" / "dumps").glob("2*"))), opened))


def _run(folder: Path, reference: Path) -> str:
    run, contract = load_run(folder / "run.safetensors")
    return _shown(diagnose_run(run, _opened(reference / "modelopt-linear" / "model").linear(_MODULE), contract))


def _sent(folder: Path, reference: Path) -> str:
    from mxdebug.cli import _tokens

    return repr([t.shape for t in _tokens(folder / "sent.safetensors")])


def cli(arguments: list[str]) -> str:
    """What a command printed. Raises what it left uncaught, and AssertionError for another exit code than 0, 1, 2."""
    from click.testing import CliRunner

    from mxdebug.cli import main

    out = CliRunner().invoke(main, arguments)
    if out.exception is not None and not isinstance(out.exception, SystemExit):
        raise out.exception
    assert out.exit_code in (0, 1, 2), out.exit_code
    return out.output


def _cli(what: str, folder: Path, reference: Path) -> str:
    """The same from a shell; the part that is not under attack is the whole one."""
    other = {"dump-linear": "modelopt-linear", "run": "modelopt-linear", "dump-pt": "mxfp4", "dump-safetensors": "mxfp4"}.get(what)
    if what == "run":
        return cli(["diagnose", str(folder / "run.safetensors"), "--module", _MODULE, "--checkpoint", str(reference / other / "model")])
    if other is not None:
        return cli(["diagnose", str(folder / "dumps"), "--checkpoint", str(reference / other / "model")])
    if what == "sent":
        return cli(["diagnose", str(recorded.call("c09").path), "--sent", str(folder / "sent.safetensors")])
    dump = (
        str(next((reference / "dump-linear" / "dumps").glob("2*")))
        if "linear" in what
        else str(recorded.call("c01" if what == "gpt-oss" else "c09").path)
    )
    return cli(["diagnose", dump, "--checkpoint", str(folder / "model")])


def _entry(name: str) -> Callable[[Path, Path], str]:
    if name.startswith("dump"):
        return functools.partial(_dump, checkpoint="modelopt-linear" if name == "dump-linear" else "mxfp4")
    return {"run": _run, "sent": _sent}.get(name) or (_linears if name.endswith("linear") else _layers)


NAMES = (
    "dump-pt",
    "dump-safetensors",
    "dump-linear",
    "gpt-oss",
    "mxfp4",
    "modelopt-moe",
    "nvfp4-moe",
    "modelopt-linear",
    "nvfp4-linear",
    "run",
    "sent",
)
ENTRIES: Mapping[str, Callable[[Path, Path], str]] = {name: _entry(name) for name in NAMES}
"""Seed -> (the folder under attack, the folder of whole seeds) -> what was shown."""
CLI: Mapping[str, Callable[[Path, Path], str]] = {name: functools.partial(_cli, name) for name in NAMES}
"""The same through the command line."""
