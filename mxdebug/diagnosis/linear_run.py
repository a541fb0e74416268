"""One run of an engine's converted linear layer as a file: written inside the engine's process, read wherever mxdebug is installed."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..contracts import LINEAR_CONTRACTS, LinearContract
from ..contracts.operand import MMA
from ..errors import MxdebugError
from ..faults import LinearRun
from ..files import open_safetensors
from ..layouts.catalogue import cutedsl_sm100_view
from ..recipes.w4a16.converted import MARK

_NAMES = {"weight": "weight", "weight_scale": "weight_scale", "alpha": "weight_global_scale"}  # vLLM's names of a converted layer
_MOST = 1 << 31  # bytes of one file: a layer and a few tokens; more is another file


def save_run(
    file: str | os.PathLike[str],
    layer: torch.nn.Module | Mapping[str, Tensor],
    x: Tensor,
    output: Tensor | tuple[Tensor, ...] | None,
    error: str = "",
) -> Path:
    """Write what a converted layer holds, what it was given and what it handed on (or the exception's text), as safetensors.

    layer   the engine's module, or its tensors by vLLM's names: weight, weight_scale, weight_global_scale, as the kernel gets them
    x       [..., K] as the layer was called with it; output [..., N], or a tuple of it and the bias that vLLM's layers hand on; None where it raised
    `capture_runs` does this for every layer of a model. Raises MxdebugError for a layer that is not converted for this kernel.
    """
    output = output[0] if isinstance(output, tuple) and output else output
    for name, t in (("x", x), *(() if output is None else (("output", output),))):
        if not isinstance(t, Tensor):
            raise MxdebugError(f"{name} of the run", "a tensor", type(t).__name__)

    def of(name: str) -> Tensor | None:
        return layer.get(name) if isinstance(layer, Mapping) else getattr(layer, name, None)

    tensors = {name: of(name) for name in _NAMES.values()}
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            raise MxdebugError(
                f"{name} of the layer", "a tensor", type(t).__name__, "a layer of another kernel, or one that is not converted yet"
            )
    scales = tensors["weight_scale"]
    metadata = {"mxdebug": "linear run 1", "error": error[:1000]}
    if scales.dim() == 6:  # a file keeps no strides, and the kernel reads memory: so keep memory, and the strides beside it
        metadata["weight_scale_strides"] = ",".join(map(str, scales.stride()))
    packed = {name: t.detach().cpu().contiguous() for name, t in tensors.items()} | {"x": x.detach().cpu().contiguous()}
    if output is not None:
        packed["output"] = output.detach().cpu().contiguous()
    save_file(packed, str(file), metadata)
    return Path(file)


@contextmanager
def capture_runs(model: torch.nn.Module, folder: str | os.PathLike[str], most: int = 1) -> Iterator[list[Path]]:
    """While the block runs, write the first `most` runs of every converted W4A16 layer of a model into a folder; yields the list of the files.

    A layer with a `quant_method` (vLLM) is recorded there, around `quant_method.apply`: before a row-parallel layer adds up over ranks, after its bias.
    Others by their forward. What raises is recorded with its text, and raises on. Files are NAME-pPROCESS-COUNT.safetensors.
    """
    os.makedirs(folder, exist_ok=True)
    files: list[Path] = []
    undo: list[tuple[object, str, object]] = []
    try:
        for name, layer in model.named_modules():
            if not all(isinstance(getattr(layer, n, None), Tensor) for n in _NAMES.values()):
                continue
            owner, method = (
                (layer.quant_method, "apply")
                if callable(getattr(getattr(layer, "quant_method", None), "apply", None))
                else (layer, "forward")
            )
            undo.append((owner, method, vars(owner).get(method)))
            setattr(owner, method, _recording(getattr(owner, method), layer, Path(folder), name or "layer", most, files))
        if not undo:
            raise MxdebugError(
                "model",
                "a layer with weight, weight_scale and weight_global_scale",
                "none",
                "not converted yet, or another kernel's layers",
            )
        yield files
    finally:
        for owner, method, before in reversed(undo):
            delattr(owner, method) if before is None else setattr(owner, method, before)


def _recording(
    call: Callable[..., Any], layer: torch.nn.Module, folder: Path, name: str, most: int, files: list[Path]
) -> Callable[..., Any]:
    count = itertools.count(1)

    @functools.wraps(call)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        # A quant_method may serve several layers: apply(layer, x, bias). A forward has x first.
        given = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.nn.Module)]
        if given and given[0] is not layer:
            return call(*args, **kwargs)
        x = kwargs.get("x", next((a for a in args if isinstance(a, Tensor)), None))
        n = next(count)
        before = None if n > most or x is None else x.detach().clone()
        output, error = None, ""
        try:
            output = call(*args, **kwargs)
        except Exception as raised:
            error = str(raised)
            raise
        finally:
            if before is not None:
                files.append(save_run(folder / f"{name}-p{os.getpid()}-{n}.safetensors", layer, before, output, error))
        return output

    return recorded


def load_run(file: str | os.PathLike[str]) -> tuple[LinearRun, LinearContract]:
    """What `save_run` wrote, and the contract of its kernel. Raises MxdebugError for another file, dtypes that no kernel takes, strides that do not fit."""
    path = Path(file)
    try:
        if path.stat().st_size > _MOST:
            raise MxdebugError(str(path), f"a file of at most {_MOST} bytes: one layer, a few tokens", f"{path.stat().st_size} bytes")
        with open_safetensors(path, path.resolve().parent, "damaged, or not a file that mxdebug.save_run wrote") as f:
            metadata, found = f.metadata() or {}, {name: f.get_tensor(name) for name in f.keys()}
    except MxdebugError:
        raise
    except (SafetensorError, OSError, RuntimeError) as error:
        raise MxdebugError(str(path), "a .safetensors file that mxdebug.save_run wrote", str(error), "another or a damaged file") from error
    needed = {*_NAMES.values(), "x"}
    if metadata.get("mxdebug") != "linear run 1" or not needed <= found.keys():
        raise MxdebugError(
            str(path),
            f"a run of a linear layer, with {', '.join(sorted(needed))}",
            ", ".join(sorted(found)[:8]) or "no tensors",
            f"a state dict of a converted layer ({MARK})" if MARK in found else "a checkpoint, or tokens for --sent",
        )
    for name in (*_NAMES.values(), "x"):
        if found[name].dim() < 1 and name != "weight_global_scale" or not found[name].numel():
            raise MxdebugError(
                f"{name} in {path.name}",
                "at least one axis, and something in it",
                f"shape {list(found[name].shape)}",
                "a damaged or edited file",
            )
    if "weight_scale_strides" in metadata:
        found["weight_scale"] = _strided(found["weight_scale"], metadata["weight_scale_strides"], path)
    kernel = next((c for c in LINEAR_CONTRACTS.values() if c.operand("weight").dtype == found["weight"].dtype), None)
    if kernel is None:
        raise MxdebugError(
            "weight of the layer",
            " or ".join(str(c.operand("weight").dtype) for c in LINEAR_CONTRACTS.values()),
            str(found["weight"].dtype),
            "a layer of another kernel",
        )
    return LinearRun({key: found[name] for key, name in _NAMES.items()}, found["x"], found.get("output"), metadata.get("error", "")), kernel


def _strided(t: Tensor, text: str, path: Path) -> Tensor:
    """The tensor with the strides that it had: the kernel's view, or contiguous. Others would not be dense, and no file should choose them."""
    view = cutedsl_sm100_view(t.permute(5, 2, 4, 0, 1, 3).contiguous()) if t.dim() == 6 else t
    for candidate in (view, t.contiguous()):
        if ",".join(map(str, candidate.stride())) == text:
            return candidate
    raise MxdebugError(
        f"strides of weight_scale in {path.name}",
        f"those of the {MMA}, or contiguous ones",
        text[:80],
        "a sliced or otherwise permuted view",
    )
