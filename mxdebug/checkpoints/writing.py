"""Write a small checkpoint: some experts of a layer, or a linear layer, of a large one; or made tensors under the names of its kind.

Tensors are copied with their dtypes and bytes as the file has them, never through numbers. config.json keeps
what mxdebug reads, and nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ..errors import MxdebugError, brief
from ..files import read_json
from ..recipes.swiglu import PARAMETERS
from .checkpoint import Checkpoint
from .settings import EXPERTS, HF_QUANT_CONFIG, ROUTING
from .store import SINGLE, Reader

_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E8M0": torch.float8_e8m0fnu}  # Reader.read gives their bytes
SIZES = ("hidden_size", "intermediate_size", "moe_intermediate_size")
_MODEL = ("model_type", "hidden_act", "mlp_hidden_act", *(f"swiglu_{p}" for p in PARAMETERS), *ROUTING, *EXPERTS, *SIZES)
_QUANTISATION = ("quant_method", "format", "quant_algo", "group_size", "config_groups", "quantization")


def copy_experts(checkpoint: Checkpoint, index: int, experts: Sequence[int], folder: Path) -> Path:
    """Write layer `index` with these experts only, numbered anew from 0 in the order given, into a new folder. Returns the folder.

    Raises MxdebugError for an unknown layer or expert, and where the files are damaged or cannot be written.
    """
    names, out = checkpoint._names[checkpoint._index(index)], {}
    with checkpoint._store.reader() as reader:
        count = checkpoint._count(names, reader)
        if any(not 0 <= e < count for e in experts):
            raise MxdebugError(f"experts of {names.module}", f"numbers from 0 to {count - 1}", brief(list(experts)))
        for leaf, name in names.fused.items():
            out[name] = torch.cat([_raw(reader, name, slice(e, e + 1)) for e in experts])
        for (word, leaf), found in names.single.items():
            for new, e in enumerate(experts):
                if e not in found:
                    raise MxdebugError(
                        f"{names.module}.{e}.{names.words[word]}.{leaf}", "a tensor", "no such tensor", "an incomplete download"
                    )
                out[f"{names.module}.{new}.{names.words[word]}.{leaf}"] = _raw(reader, found[e])
    return save(folder, out, *small_config(checkpoint, {key: len(experts) for key in EXPERTS}))


def copy_tensors(checkpoint: Checkpoint, names: Sequence[str], folder: Path) -> Path:
    """Write these tensors into a new folder, as they are."""
    with checkpoint._store.reader() as reader:
        out = {name: _raw(reader, name) for name in names}
    return save(folder, out, *small_config(checkpoint, {}))


def _raw(reader: Reader, name: str, part: slice | None = None) -> Tensor:
    dtype, _ = reader.header(name)
    t = reader.read(name) if part is None else reader.read(name, part)
    return t.view(_DTYPES[dtype]) if dtype in _DTYPES else t


def small_config(checkpoint: Checkpoint, changed: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, Any] | None]:
    """(config.json, hf_quant_config.json or None) with the keys that mxdebug reads; changed: other values, of keys that are there."""
    beside = (checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent) / HF_QUANT_CONFIG
    config = _some(checkpoint.config, changed)
    if isinstance(checkpoint.config.get("text_config"), dict):
        config["text_config"] = _some(checkpoint.config["text_config"], changed)
    if not beside.exists():
        return config, None
    stated = read_json(beside, beside.parent)
    return config, {k: _picked(v) if k == "quantization" else v for k, v in stated.items() if k in _QUANTISATION}


def _some(config: Mapping[str, Any], changed: Mapping[str, int]) -> dict[str, Any]:
    out = {k: changed.get(k, v) for k, v in config.items() if k in _MODEL and v is not None}
    if isinstance(config.get("quantization_config"), dict):
        out["quantization_config"] = _picked(config["quantization_config"])
    return out


def _picked(quantisation: Any) -> Any:
    return {k: v for k, v in quantisation.items() if k in _QUANTISATION} if isinstance(quantisation, dict) else quantisation


def save(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], beside: Mapping[str, Any] | None = None) -> Path:
    """Write tensors, config.json and hf_quant_config.json (if there is one) into a folder, made if it is not there. Returns it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file({name: t.clone(memory_format=torch.contiguous_format) for name, t in tensors.items()}, folder / SINGLE)
        (folder / "config.json").write_text(json.dumps(config, indent=1))
        (folder / SINGLE).chmod((folder / "config.json").stat().st_mode)  # safetensors lets nobody else read it
        if beside is not None:
            (folder / HF_QUANT_CONFIG).write_text(json.dumps(beside, indent=1))
    except (OSError, SafetensorError) as error:
        raise MxdebugError(
            str(folder), "a folder that can be written to", str(error), "no permission, or the disk is full"
        ) from error
    return folder
