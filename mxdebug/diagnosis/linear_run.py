"""One run of an engine's converted linear layer as a file: written inside the engine's process, read wherever mxdebug is installed."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ..contracts import LINEAR_CONTRACTS, LinearContract
from ..contracts.operand import MMA
from ..errors import MxdebugError
from ..faults import LinearRun
from ..layouts.catalogue import cutedsl_sm100_view
from ..recipes.w4a16.converted import MARK

_NAMES = {"weight": "weight", "weight_scale": "weight_scale", "alpha": "weight_global_scale"}  # vLLM's names of a converted layer
_MOST = 1 << 31  # bytes of one file: a layer and a few tokens; more is another file


def save_run(file: str | os.PathLike[str], layer: torch.nn.Module | Mapping[str, Tensor], x: Tensor, output: Tensor | None, error: str = "") -> Path:
    """Write what a converted layer holds, what it was given and what it handed on (or the exception's text), as safetensors.

    layer   the engine's module, or its tensors by vLLM's names: weight, weight_scale, weight_global_scale, as the kernel gets them
    x       [..., K] as the layer was called with it; output [..., N], None where it raised
    A forward hook is enough: layer.register_forward_hook(lambda m, args, out: save_run("run.safetensors", m, args[0], out)).
    """
    def of(name: str) -> Tensor | None:
        return layer.get(name) if isinstance(layer, Mapping) else getattr(layer, name, None)

    tensors = {name: of(name) for name in _NAMES.values()}
    for name, t in tensors.items():
        if not isinstance(t, Tensor):
            raise MxdebugError(f"{name} of the layer", "a tensor", type(t).__name__, "a layer of another kernel, or one that is not converted yet")
    scales = tensors["weight_scale"]
    metadata = {"mxdebug": "linear run 1", "error": error[:1000]}
    if scales.dim() == 6:  # a file keeps no strides, and the kernel reads memory: so keep memory, and the strides beside it
        metadata["weight_scale_strides"] = ",".join(map(str, scales.stride()))
    packed = {name: t.detach().cpu().contiguous() for name, t in tensors.items()} | {"x": x.detach().cpu().contiguous()}
    if output is not None:
        packed["output"] = output.detach().cpu().contiguous()
    save_file(packed, str(file), metadata)
    return Path(file)


def load_run(file: str | os.PathLike[str]) -> tuple[LinearRun, LinearContract]:
    """What `save_run` wrote, and the contract of its kernel. Raises MxdebugError for another file, dtypes that no kernel takes, strides that do not fit."""
    path = Path(file)
    try:
        if path.stat().st_size > _MOST:
            raise MxdebugError(str(path), f"a file of at most {_MOST} bytes: one layer, a few tokens", f"{path.stat().st_size} bytes")
        with safe_open(str(path), "pt") as f:
            metadata, found = f.metadata() or {}, {name: f.get_tensor(name) for name in f.keys()}
    except (SafetensorError, OSError, ValueError) as error:
        if isinstance(error, MxdebugError):
            raise
        raise MxdebugError(str(path), "a .safetensors file that mxdebug.save_run wrote", str(error), "another or a damaged file") from error
    needed = {*_NAMES.values(), "x"}
    if metadata.get("mxdebug") != "linear run 1" or not needed <= found.keys():
        raise MxdebugError(str(path), f"a run of a linear layer, with {', '.join(sorted(needed))}", ", ".join(sorted(found)[:8]) or "no tensors",
                           f"a state dict of a converted layer ({MARK})" if MARK in found else "a checkpoint, or tokens for --sent")
    if "weight_scale_strides" in metadata:
        found["weight_scale"] = _strided(found["weight_scale"], metadata["weight_scale_strides"], path)
    kernel = next((c for c in LINEAR_CONTRACTS.values() if c.operand("weight").dtype == found["weight"].dtype), None)
    if kernel is None:
        raise MxdebugError("weight of the layer", " or ".join(str(c.operand("weight").dtype) for c in LINEAR_CONTRACTS.values()), str(found["weight"].dtype), "a layer of another kernel")
    return LinearRun({key: found[name] for key, name in _NAMES.items()}, found["x"], found.get("output"), metadata.get("error", "")), kernel


def _strided(t: Tensor, text: str, path: Path) -> Tensor:
    """The tensor with the strides that it had: the kernel's view, or contiguous. Others would not be dense, and no file should choose them."""
    view = cutedsl_sm100_view(t.permute(5, 2, 4, 0, 1, 3).contiguous()) if t.dim() == 6 else t
    for candidate in (view, t.contiguous()):
        if ",".join(map(str, candidate.stride())) == text:
            return candidate
    raise MxdebugError(f"strides of weight_scale in {path.name}", f"those of the {MMA}, or contiguous ones", text[:80], "a sliced or otherwise permuted view")
