"""What config.json says, and where: the kind of quantisation and its block, the number of experts, the activation and its parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ..errors import MxdebugError, brief
from ..formats import MXFP4, NVFP4, BlockFormat
from ..recipes.swiglu import GPT_OSS_ALPHA, GPT_OSS_BETA, GPT_OSS_LIMIT, PARAMETERS
from ..reference import Activation
from .kinds import COMPRESSED_TENSORS, COMPRESSED_TENSORS_NVFP4, GPT_OSS, MODELOPT_NVFP4, SUPPORTED

BY_MODEL_TYPE = f"model_type gpt_oss (vLLM: {GPT_OSS_ALPHA}, {GPT_OSS_BETA}, {GPT_OSS_LIMIT})"  # vLLM quantization/mxfp4.py
NOT_STATED = "not stated"
EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # how engines call the number of experts
ROUTING = ("norm_topk_prob", "routed_scaling_factor")
HF_QUANT_CONFIG = "hf_quant_config.json"
W4A16 = "W4A16_NVFP4"  # ModelOpt's quant_algo for weights alone
NVFP4_32 = replace(NVFP4, block=32)  # no kernel's format, but exporters make it (TensorRT-LLM issue 19091)

# hidden_act -> activation kind. "uninterleave" is about row order only: the same function (vLLM fused_moe/activation.py).
HIDDEN_ACT = {"swigluoai": "swiglu", "swigluoai_uninterleave": "swiglu", "silu": "silu", "gelu": "gelu",
              "gelu_pytorch_tanh": "gelu_tanh", "gelu_tanh": "gelu_tanh", "relu2": "relu2"}


@dataclass(frozen=True)
class Config:
    """config.json, a file from strangers: every value is checked for its type before use.

    beside  hf_quant_config.json of the same folder, where older ModelOpt writes its quantisation; None where there is none
    """

    path: Path
    data: Mapping[str, Any]
    beside: Mapping[str, Any] | None = None

    def get(self, key: str, *types: type) -> tuple[Any, str] | None:
        """(value, where) from the top level or from text_config; None where it is absent or null.

        Raises MxdebugError for another type, or where the two places disagree.
        """
        found = [(d[key], f"config.json {where}{key}") for d, where in self._places() if d.get(key) is not None]
        for value, where in found:
            if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
                raise MxdebugError(f"{where} of {self.path.parent}", " or ".join(t.__name__ for t in types), _typed(value))
        if len(found) == 2 and found[0][0] != found[1][0]:
            raise MxdebugError(f"{key} of {self.path}", "one value",
                               f"{brief(found[0][0])} at the top, {brief(found[1][0])} in text_config",
                               "a config edited in one place only; engines differ in which they read")
        return found[0] if found else None

    def _places(self) -> list[tuple[Mapping[str, Any], str]]:
        text = self.data.get("text_config")
        if text is not None and not isinstance(text, dict):
            raise MxdebugError(f"text_config of {self.path}", "an object", _typed(text))
        return [(self.data, "")] + ([(text, "text_config.")] if text is not None else [])

    @property
    def model_type(self) -> str | None:
        """text_config's, else the top level's: a multimodal model has one type of its own and one of its language model."""
        for place, where in reversed(self._places()):
            value = place.get("model_type")
            if isinstance(value, str):
                return value
            if value is not None:
                raise MxdebugError(f"config.json {where}model_type of {self.path.parent}", "str", _typed(value))
        return None


@dataclass(frozen=True)
class Quantisation:
    """kind: one of KINDS. nvfp4: NVFP4, or with the block of 32 that a config states; `refusal` is then what is wrong for MoE layers.

    w4a16  NVFP4 weights and 16-bit activations, by the rule of `_w4a16`
    """

    kind: str
    nvfp4: BlockFormat
    refusal: MxdebugError | None
    w4a16: bool


def stated_quantisation(config: Config) -> Quantisation:
    """What `stated_kind` says, and a block of 32 under NVFP4's name allowed: linear layers of that are read, to show what it does.

    Raises MxdebugError as `stated_kind` does.
    """
    try:
        return Quantisation(kind := stated_kind(config), NVFP4, None, _w4a16(config, kind))
    except MxdebugError as error:
        refusal = error
    try:
        return Quantisation(kind := stated_kind(config, NVFP4_32), NVFP4_32, refusal, _w4a16(config, kind))
    except MxdebugError:
        raise refusal from None


def _w4a16(config: Config, kind: str) -> bool:
    """Whether vLLM 0.33 keeps the activations of linear layers in 16 bits. `config` has passed `stated_kind`.

    ModelOpt (modelopt.py ModelOptNvFp4Config._from_config): quant_algo says so, or it is NVFP4 and every one of the config_groups
    has no input_activations; groups one level down, under "quantization", are not seen there. config.json goes before the file beside it.
    compressed-tensors (compressed_tensors.py _get_scheme_from_parts): weights NVFP4, input_activations none. A model where only some
    groups are so has no single answer: False.
    """
    found = config.get("quantization_config", dict)
    quantisation = found[0] if found is not None else config.beside or {}
    groups = quantisation.get("config_groups")
    weights_only = isinstance(groups, dict) and bool(groups) and all(
        isinstance(g, dict) and g.get("input_activations") is None for g in groups.values())
    if kind == COMPRESSED_TENSORS_NVFP4:
        return weights_only
    if kind != MODELOPT_NVFP4:
        return False
    return str(quantisation.get("quantization", quantisation).get("quant_algo")).upper() == W4A16 or weights_only


def stated_kind(config: Config, nvfp4: BlockFormat = NVFP4) -> str:
    """One of KINDS, as quantization_config says, or hf_quant_config.json where config.json has none (vLLM: config.py reads them so).

    Raises MxdebugError for every other format, for none, for another block than the format's (`nvfp4` is what goes by that name),
    and where the two files contradict each other.
    """
    found = config.get("quantization_config", dict)
    operand = f"quantization_config of {config.path}"
    if config.beside is None:
        if found is None:
            raise MxdebugError(operand, SUPPORTED, "none", "a checkpoint that is not quantised, or a config.json of the base model")
        return _kind(found[0], operand, nvfp4)
    beside = _modelopt(config.beside, f"{config.path.parent / HF_QUANT_CONFIG}", nvfp4)
    if found is not None and (kind := _kind(found[0], operand, nvfp4)) != beside:
        raise MxdebugError(operand, f"{beside}, as {HF_QUANT_CONFIG} says", kind,
                           "files of two checkpoints; engines differ in which they read")
    return beside


def _kind(quantisation: Mapping[str, Any], operand: str, nvfp4: BlockFormat) -> str:
    method, fmt = quantisation.get("quant_method"), quantisation.get("format")
    if method == "mxfp4":
        return GPT_OSS
    if method in ("modelopt", "modelopt_fp4"):
        return _modelopt(quantisation, operand, nvfp4)
    kinds = {"mxfp4-pack-quantized": (COMPRESSED_TENSORS, MXFP4), "nvfp4-pack-quantized": (COMPRESSED_TENSORS_NVFP4, nvfp4)}
    if method != "compressed-tensors" or not isinstance(fmt, str) or fmt not in kinds:
        raise MxdebugError(operand, SUPPORTED, f"quant_method {brief(method)}, format {brief(fmt)}", "a format not read yet")
    kind, block_format = kinds[fmt]
    _check_groups(quantisation.get("config_groups"), block_format, operand)
    return kind


def _modelopt(quantisation: Mapping[str, Any], operand: str, nvfp4: BlockFormat) -> str:
    """MODELOPT_NVFP4. hf_quant_config.json has everything one level down; either case of quant_algo (vLLM modelopt.py from_config)."""
    inner = quantisation.get("quantization", quantisation)
    if not isinstance(inner, dict):
        raise MxdebugError(f"quantization of {operand}", "an object", _typed(inner))
    algo, size = inner.get("quant_algo"), inner.get("group_size")
    if not isinstance(algo, str) or algo.upper() not in ("NVFP4", W4A16):
        reason = "one format a layer, which is not read yet" if algo == "MIXED_PRECISION" else "a format not read yet"
        raise MxdebugError(operand, SUPPORTED, f"ModelOpt's quant_algo {brief(algo)}", reason)
    if size not in (None, nvfp4.block):
        raise MxdebugError(f"group_size of {operand}", f"{nvfp4.block}, which is NVFP4's", brief(size), "another format under this name")
    _check_groups(inner.get("config_groups"), nvfp4, operand)
    return MODELOPT_NVFP4


def _check_groups(groups: Any, fmt: BlockFormat, operand: str) -> None:
    """Refuse a config_groups whose weights are not of the format `fmt`; what a group does not say is not held against it."""
    other = "a block of 16 is NVFP4's" if fmt is MXFP4 else "a block of 32 is MXFP4's"
    for name, group in (groups.items() if isinstance(groups, dict) else [("config_groups", groups)] if groups is not None else []):
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict):
            raise MxdebugError(f"config_groups of {operand}", "objects with weights", f"{name}: {brief(group)}")
        for key, want in (("num_bits", fmt.element.bits), ("group_size", fmt.block), ("type", "float")):
            if weights.get(key) not in (None, want):
                raise MxdebugError(f"{name} of {operand}", f"{key} {want!r}, which is {fmt.name}'s", brief(weights[key]),
                                   f"another format under this name; {other}")


def stated_experts(config: Config) -> tuple[int, str] | None:
    """(number of experts, where) if config.json states it. Engines use one of three names."""
    for key in EXPERTS:
        if (found := config.get(key, int)) is not None:
            return found
    return None


@dataclass(frozen=True)
class Routing:
    """What config.json says of the router weights.

    renormalised  whether a token's weights are divided by their sum; None: not stated
    factor        what they are multiplied with afterwards (DeepSeek's routed_scaling_factor), in the router or behind the experts; None: nothing
    where         the keys that say so
    """

    renormalised: bool | None = None
    factor: float | None = None
    where: str = NOT_STATED


def read_routing(config: Config) -> Routing:
    """norm_topk_prob and routed_scaling_factor. model_type gpt_oss: softmax over the chosen experts, so always renormalised (transformers, vLLM)."""
    stated, factor = config.get(ROUTING[0], bool), _number(config, ROUTING[1])
    where = ", ".join(found[1] for found in (stated, factor) if found is not None)
    if stated is None and config.model_type == "gpt_oss":
        return Routing(True, factor and factor[0], "model_type gpt_oss")
    return Routing(None if stated is None else stated[0], factor and factor[0], where or NOT_STATED)


@dataclass(frozen=True)
class Stated:
    """The activation, where each of its parts came from, and which of alpha, beta, limit config.json states itself."""

    activation: Activation
    provenance: Mapping[str, str]
    stated: frozenset[str]


def read_activation(config: Config, kind: str, experts: int) -> Stated:
    """The activation of a layer with `experts` experts; alpha, beta and limit become float32 [experts].

    model_type gpt_oss: swiglu with 1.702 and 1.0 whatever hidden_act says, and swiglu_limit, by default 7.0.
    Others: by hidden_act (Nemotron writes mlp_hidden_act); a parameter that is not stated stays None, nothing is assumed.
    Raises MxdebugError for an unknown activation, or parameters that do not fit it.
    """
    parameters = {p: _number(config, f"swiglu_{p}") for p in PARAMETERS}
    for p in PARAMETERS:
        if (per_layer := config.get(f"swiglu_{p}s", object)) is not None:
            raise MxdebugError(f"{per_layer[1]} of {config.path.parent}", f"swiglu_{p}, one number", brief(per_layer[0]),
                               "a model with one value a layer, which is not read yet")
    stated = frozenset(p for p, found in parameters.items() if found)
    where = {p: found[1] if found else NOT_STATED for p, found in parameters.items()}
    values = {p: found[0] if found else None for p, found in parameters.items()}
    if config.model_type == "gpt_oss":
        for p, default in zip(PARAMETERS, (GPT_OSS_ALPHA, GPT_OSS_BETA, GPT_OSS_LIMIT)):
            if values[p] is None:
                values[p], where[p] = default, BY_MODEL_TYPE
            elif p != "limit" and values[p] != default:
                raise MxdebugError(f"{where[p]} of {config.path.parent}", f"{default}, which engines fix for model_type gpt_oss",
                                   str(values[p]), "a changed model under the old model_type; engines ignore the value")
        where["activation"] = BY_MODEL_TYPE
        act = "swiglu"
    else:
        act, where["activation"] = _hidden_act(config, kind, stated)
    tensors = {p: torch.full((experts,), v, dtype=torch.float32) for p, v in values.items() if v is not None}
    return Stated(Activation(act, **tensors), where, stated)


def _hidden_act(config: Config, kind: str, stated: frozenset[str]) -> tuple[str, str]:
    found = [f for f in (config.get("hidden_act", str), config.get("mlp_hidden_act", str)) if f is not None]
    known = ", ".join(HIDDEN_ACT)
    if len({name for name, _ in found}) != 1:
        raise MxdebugError(f"hidden_act of {config.path}", f"one of {known}",
                           " and ".join(f"{where} {name!r}" for name, where in found) or "none",
                           "a shortened or mixed config.json; the activation cannot be known")
    name, where = found[0]
    operand = f"{where} of {config.path.parent}"
    if name not in HIDDEN_ACT:
        raise MxdebugError(operand, f"one of {known}", repr(name), "an activation that is not known yet")
    act = HIDDEN_ACT[name]
    if kind == GPT_OSS and act == "silu":
        # gpt-oss itself writes "silu" and means another function, so with its names "silu" alone settles nothing.
        raise MxdebugError(operand, "model_type gpt_oss, or hidden_act swigluoai", f"{name!r} with model_type {config.model_type!r}",
                           "a model derived from gpt-oss, whose hidden_act silu stands for swigluoai")
    if act == "silu" and stated == {"limit"}:
        return "swiglu", f"{where} {name}, with a limit"
    if act != "swiglu" and stated:
        given = ", ".join(f"swiglu_{p}" for p in PARAMETERS if p in stated)
        raise MxdebugError(operand, "swigluoai, which has parameters" + (" (silu may have swiglu_limit)" if act == "silu" else ""),
                           f"{name!r} next to {given}", "a config edited in one place only")
    return act, f"{where} {name}"


def _number(config: Config, key: str) -> tuple[float, str] | None:
    found = config.get(key, int, float)
    if found is None:
        return None
    value, where = found
    operand = f"{where} of {config.path.parent}"
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(torch.tensor(number, dtype=torch.float32).item()):  # kernels take float32
        raise MxdebugError(operand, "a finite float32", brief(value))
    if key == "swiglu_limit" and number <= 0:
        raise MxdebugError(operand, "above 0", str(number), "meant as 'no limit': some engines read 0 so, others clamp to 0")
    return number, where


def _typed(value: Any) -> str:
    return f"{type(value).__name__} {brief(value)}"
