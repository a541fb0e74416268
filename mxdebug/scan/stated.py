"""What config.json and hf_quant_config.json state, as far as a scan compares it with the weights. Nothing is trusted to be of its type."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .. import files
from ..checkpoints.kinds import COMPRESSED_TENSORS, COMPRESSED_TENSORS_NVFP4, GPT_OSS, MODELOPT_NVFP4
from ..checkpoints.settings import EXPERTS
from ..errors import MxdebugError
from .catalogue import RULES
from .finding import Finding, make, shown
from .kinds import COMPRESSED_TENSORS_MXFP8, KINDS, MODELOPT_MXFP8, QUARK_MXFP4
from .patterns import Patterns

CONFIG, BESIDE = "config.json", "hf_quant_config.json"
_FORMATS = {
    "mxfp4-pack-quantized": COMPRESSED_TENSORS,
    "nvfp4-pack-quantized": COMPRESSED_TENSORS_NVFP4,
    "mxfp8-quantized": COMPRESSED_TENSORS_MXFP8,
}
_ALGORITHMS = {"NVFP4": MODELOPT_NVFP4, "W4A16_NVFP4": MODELOPT_NVFP4, "NVFP4_AWQ": MODELOPT_NVFP4, "MXFP8": MODELOPT_MXFP8}
_IGNORED = ("ignore", "exclude_modules", "exclude", "modules_to_not_convert")
_SIZES = {
    "hidden": ("hidden_size",),
    "experts": EXPERTS,
    "layers": ("num_hidden_layers",),
    "intermediate": ("moe_intermediate_size", "intermediate_size"),
}


@dataclass(frozen=True)
class Stated:
    """kind: one of KINDS, None where none is stated or it is not known; words: what is stated, to print.

    ignore    the modules that are excepted
    targets   modules that are quantised: None for all linear ones
    sizes     hidden, experts, layers, intermediate, as far as stated
    block     group_size, where stated
    """

    kind: str | None
    words: str
    ignore: Patterns
    targets: Patterns | None
    sizes: Mapping[str, int]
    block: int | None
    findings: tuple[Finding, ...] = field(default=())


def read_stated(folder: Path) -> Stated:
    """What the folder's configuration states. Never raises: what cannot be read becomes a finding."""
    found: list[Finding] = []
    config, beside = (_object(folder, name, found) for name in (CONFIG, BESIDE))
    text = config.get("text_config")
    places = [config, text] if isinstance(text, dict) else [config]
    sizes = {what: value for what, keys in _SIZES.items() if (value := _whole(places, keys)) is not None}
    quantisation = next((p["quantization_config"] for p in places if isinstance(p.get("quantization_config"), dict)), None)
    if quantisation is None:
        quantisation = beside
    inner = quantisation.get("quantization")
    inner = inner if isinstance(inner, dict) else quantisation
    if not quantisation:
        if not found:
            found.append(make(RULES["config-silent"], f"{CONFIG} has no quantization_config, and there is no {BESIDE}", [CONFIG]))
        return Stated(None, "nothing", Patterns((), None), None, sizes, None, tuple(found))
    kind, words = _kind(quantisation, inner, bool(beside) and quantisation is beside)
    if beside and quantisation is not beside:
        other = beside.get("quantization")
        of_file, words_file = _kind(beside, other if isinstance(other, dict) else beside, True)
        if kind is not None and of_file is not None and kind != of_file:
            found.append(make(RULES["kind-contradiction"], f"{CONFIG} states {words}, {BESIDE} {words_file}", [CONFIG, BESIDE]))
    if kind is None:
        found.append(make(RULES["config-not-checked"], f"{words}; known are {', '.join(KINDS)}", [CONFIG]))
    entries = [
        e
        for key in _IGNORED
        for place in (inner, quantisation)
        if isinstance(place.get(key), list)
        for e in place[key]
        if isinstance(e, str)
    ]
    return Stated(kind, words, Patterns(entries, kind), _targets(quantisation, kind), sizes, _block(inner), tuple(found))


def _object(folder: Path, name: str, found: list[Finding]) -> dict[str, Any]:
    if not (folder / name).exists():
        return {}
    try:
        return files.read_json(folder / name, folder)
    except MxdebugError as error:
        found.append(make(RULES["config-unreadable"], f"{name}: expected {error.expected}, got {shown(error.got)}", [name]))
        return {}


def _kind(quantisation: Mapping[str, Any], inner: Mapping[str, Any], modelopt: bool) -> tuple[str | None, str]:
    """(kind or None, what is stated)."""
    method, fmt, algorithm = (d.get(key) for d, key in ((quantisation, "quant_method"), (quantisation, "format"), (inner, "quant_algo")))
    words = ", ".join(
        f"{key} {shown(str(value))}"
        for key, value in (("quant_method", method), ("format", fmt), ("quant_algo", algorithm))
        if value is not None
    )
    if method == "mxfp4":
        return GPT_OSS, words
    if method == "mxfp8":  # MiniMax; vLLM reads it as ModelOpt's
        return MODELOPT_MXFP8, words
    if method in ("modelopt", "modelopt_fp4", "modelopt_mxfp8") or modelopt:
        return _ALGORITHMS.get(str(algorithm).upper()), words or BESIDE
    if method == "compressed-tensors":
        return _FORMATS.get(str(fmt)), words
    if method == "quark":
        everywhere = quantisation.get("global_quant_config")
        weight = everywhere.get("weight") if isinstance(everywhere, dict) else None
        fp4 = isinstance(weight, dict) and weight.get("dtype") == "fp4" and weight.get("group_size") in (None, 32)
        return (QUARK_MXFP4 if fp4 else None), f"{words}, weights {shown(str(weight.get('dtype') if isinstance(weight, dict) else None))}"
    return None, words or "a quantization_config without quant_method"


def _targets(quantisation: Mapping[str, Any], kind: str | None) -> Patterns | None:
    """compressed-tensors names classes or modules to quantise, Quark may have rules for some layers; "Linear" is every linear module."""
    groups = quantisation.get("config_groups")
    if quantisation.get("quant_method") == "compressed-tensors" and isinstance(groups, dict):
        entries = [
            t
            for g in groups.values()
            if isinstance(g, dict) and isinstance(g.get("targets"), list)
            for t in g["targets"]
            if isinstance(t, str)
        ]
        return None if "Linear" in entries else Patterns(entries, kind)
    return Patterns((), kind) if quantisation.get("layer_quant_config") else None


def _block(inner: Mapping[str, Any]) -> int | None:
    groups = inner.get("config_groups")
    stated = [inner.get("group_size")]
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        stated.append(weights.get("group_size") if isinstance(weights, dict) else None)
    return next((s for s in stated if type(s) is int and s > 0), None)


def _whole(places: list[Mapping[str, Any]], keys: tuple[str, ...]) -> int | None:
    return next((p[key] for key in keys for p in places if type(p.get(key)) is int and p[key] > 0), None)
