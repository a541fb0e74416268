"""Which parameters reach the kernel, and where each value came from: the rules, applied to a config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...contracts.activation import PARAMETERS
from ...errors import MxdebugError
from ...reference import Activation
from .activations import OAI, lands_on
from .rules import FIX, GPT_OSS_METHOD, MARLIN_RULE, METHODS, RULES, W4A4, W4A8, Method, Rule

_NEUTRAL = {"alpha": 1.0, "beta": 0.0, "limit": None}
_CARRIED = {"alpha": "gemm1_alpha", "beta": "gemm1_beta", "limit": "gemm1_clamp_limit"}  # the fields of FusedMoEQuantConfig
_LARGEST = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Value:
    """One parameter as the kernel gets it, or None, and where it came from or why it did not arrive."""

    value: float | None
    source: str


@dataclass(frozen=True)
class Passed:
    """What vLLM passes to the kernel of one path for one activation.

    form    whether the kernel takes float32 [experts of this rank] or one number
    folded  parameters that the kernel gets divided by g1_alphas; `alpha`, `beta` and `limit` are the numbers before that
    stated  what config.json states, whether it arrives or not
    """

    path: str
    version: str
    activation: str
    alpha: Value
    beta: Value
    limit: Value
    form: str
    folded: tuple[str, ...]
    stated: Mapping[str, float]

    @property
    def unused(self) -> tuple[str, ...]:
        """Parameters that config.json states and for which the kernel uses another value: #48929, where the model means them."""
        return tuple(n for n in PARAMETERS if n in self.stated and self.stated[n] != self._effective(n))

    def _effective(self, name: str) -> float | None:
        value = getattr(self, name).value
        takes_any = self.folded or self.activation in ("SILU", *OAI)  # CUTLASS's GELU and ReLU2 ignore what they are given
        return value if takes_any and value is not None else _NEUTRAL[name]

    def tensors(self, experts: int, g1_alphas: Tensor | None = None) -> dict[str, Tensor | None]:
        """alpha, beta, limit as float32 [experts], divided where the path wants that; None where nothing is passed.

        g1_alphas: float32 [experts], weight global scale x input scale, all above 0. NVFP4 TRT-LLM needs it, no other path takes it.
        Raises MxdebugError otherwise.
        """
        if (g1_alphas is None) == bool(self.folded):
            want, got = ("float32 [experts]", "none") if self.folded else ("none", "a tensor")
            raise MxdebugError(f"g1_alphas for {self.path}", want, got,
                               "only a kernel that clamps before it scales is given limit / g1_alphas and beta / g1_alphas")
        if g1_alphas is not None and (g1_alphas.shape != (experts,) or g1_alphas.dtype != torch.float32 or not bool((g1_alphas > 0).all())):
            raise MxdebugError("g1_alphas", f"float32 [{experts}], all above 0",
                               f"{g1_alphas.dtype} {list(g1_alphas.shape)}, {int((~(g1_alphas > 0)).sum())} not above 0",
                               "the scales of all ranks, or of one expert")
        values = {n: getattr(self, n).value for n in PARAMETERS}
        full = {n: None if v is None else torch.full((experts,), v, dtype=torch.float32) for n, v in values.items()}
        return {n: t / g1_alphas if t is not None and n in self.folded else t for n, t in full.items()}

    def computes(self, experts: int) -> Activation:
        """The activation that the kernel then computes on scaled pre-activations, to be compared with what the checkpoint means.

        FlashInfer turns Swiglu into SwigluBias when any parameter is given (flashinfer_cutlass_fused_moe_binding.cu); with none it is silu.
        Raises MxdebugError where TRT-LLM gets parameters for GELU: its GeGlu applies them, and no reference does.
        """
        kind = lands_on(self.path, self.activation).kind
        given = {n: torch.full((experts,), v, dtype=torch.float32) for n in PARAMETERS if (v := getattr(self, n).value) is not None}
        if kind in ("silu", "swiglu"):
            return Activation("swiglu", **given) if given else Activation("silu")
        if given and self.folded:
            raise MxdebugError(f"parameters of {self.activation} on {self.path}", "none", ", ".join(given),
                               "a config edited in one place only")
        return Activation(kind)

    def explain(self) -> str:
        """Each value and where it came from, one a line; then what config.json states and the kernel does not get."""
        lines = [f"{self.path}, {self.activation}, vLLM {self.version}; the kernel takes {self.form}"]
        for name in PARAMETERS:
            v = getattr(self, name)
            by = ", divided by g1_alphas (the kernel clamps before it scales)" if name in self.folded and v.value is not None else ""
            lines.append(f"  {name:<6}{'-' if v.value is None else f'{v.value:g}':<7}{v.source}{by}")
        lines += [f"  unused: config.json states swiglu_{n} {self.stated[n]:g}, the kernel computes with "
                  f"{'no limit' if (e := self._effective(n)) is None else f'{e:g}'}" for n in self.unused]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.explain()


def parameters(path: str, *, activation: str, quant_config: Mapping[str, Any] | None, model_config: Mapping[str, Any] | None,
               model_type: str | None, version: str) -> Passed:
    """The parameters that vLLM passes on `path` for `activation`, each with its provenance.

    path          one of SUPPORTED
    activation    a name of vLLM's MoEActivation
    quant_config  config.json's quantization_config, whose quant_method says which quantisation method hands parameters on ("online"
                  where vLLM quantises while loading); or what vLLM's FusedMoEQuantConfig holds, as gemm1_alpha, gemm1_beta and
                  gemm1_clamp_limit, taken as it is
    model_config  config.json: swiglu_alpha, swiglu_beta, swiglu_limit, at the top or in text_config. The model's class gives them to the
                  layer; MiniMax-M3's and DeepSeek-V4's do
    model_type    gpt_oss has a quantisation method of its own for MXFP4
    version       "0.33", or "#48929" for what the fix left behind. The fix did not touch quantisation methods: quant_method is not
                  looked at there, and None means that FusedMoEQuantConfig holds nothing
    Raises MxdebugError for what vLLM does not accept or where it would stop, and where the quantisation method cannot be known.
    """
    lands_on(path, activation)
    if (version, path) not in RULES:
        raise MxdebugError("version", f"one of {', '.join(v for v, p in RULES if p == path)} for {path}", version,
                           "#48929 changed FlashInfer CUTLASS and Marlin only" if version == FIX else "no rules were read for it")
    rule, stated = RULES[version, path], _stated(model_config or {})
    carried = _carried(path, quant_config or {}, stated, model_type, version)
    values = {n: _value(n, activation, rule, carried[n], stated.get(n)) for n in PARAMETERS}
    if rule is MARLIN_RULE and activation == "SWIGLUOAI_UNINTERLEAVE" and values["limit"].value is None:
        raise MxdebugError(f"limit of {path}", "a number in the quantisation or the model config", "none",
                           "vLLM stops here: SWIGLUOAI_UNINTERLEAVE requires clamp_limit")
    return Passed(path, version, activation, **values, form=rule.form, folded=rule.folded, stated={n: v.value for n, v in stated.items()})


def _stated(model_config: Mapping[str, Any]) -> dict[str, Value]:
    """swiglu_* at the top of config.json or in its text_config."""
    text = model_config.get("text_config")
    if text is not None and not isinstance(text, Mapping):
        raise MxdebugError("text_config of config.json", "an object", repr(text)[:80])
    places = (("config.json ", model_config), ("config.json text_config.", text or {}))
    out = {}
    for name in PARAMETERS:
        key = f"swiglu_{name}"
        found = [Value(_number(v, where + key), where + key) for where, place in places if (v := place.get(key)) is not None]
        if len({f.value for f in found}) > 1:
            raise MxdebugError(f"{key} of config.json", "one value", f"{found[0].value:g} at the top, {found[1].value:g} in text_config",
                               "a config edited in one place only; engines differ in which they read")
        if found:
            out[name] = found[0]
    return out


def _value(name: str, activation: str, rule: Rule, carried: Value, stated: Value | None) -> Value:
    if rule.fixed and activation == "SWIGLUOAI":
        return Value(rule.fixed[name], f"fixed in swigluoai_and_mul, no configuration reaches it ({rule.source})")
    if rule.folded and activation.endswith("_NO_MUL"):
        return Value(None, f"not passed: a layer without gate has none ({rule.source})")
    if not rule.whatever and name not in (PARAMETERS if activation in OAI else ("limit",) if activation == "SILU" else ()):
        only = "SILU passes the limit only" if activation == "SILU" else f"{activation} has no parameters"
        return Value(None, f"not passed: {only} ({rule.source})")
    if carried.value is not None:
        return carried
    if rule.falls_back and stated is not None:
        return Value(stated.value, f"{stated.source}, by way of the model config: {carried.source} ({rule.source})")
    if name in rule.default:
        return Value(rule.default[name], rule.default_is)
    return Value(None, f"not passed: {carried.source}" + ("" if rule.falls_back else f"; the model config is not asked ({rule.source})"))


def _carried(path: str, quant_config: Mapping[str, Any], stated: Mapping[str, Value], model_type: str | None,
             version: str) -> dict[str, Value]:
    """What FusedMoEQuantConfig holds: as given, or as the quantisation method fills it."""
    if wrong := sorted(k for k in quant_config if k.startswith("swiglu_")):
        raise MxdebugError("quant_config", f"{', '.join(_CARRIED.values())}, or quant_method", ", ".join(wrong),
                           "vLLM reads no swiglu_* from quantization_config: they belong to the model config")
    given = {n: Value(_number(v, k), f"quantisation config, {k}") for n, k in _CARRIED.items() if (v := quant_config.get(k)) is not None}
    if given or version == FIX:
        return {n: given.get(n, Value(None, "the quantisation config holds none")) for n in PARAMETERS}
    method = _method(path, quant_config, model_type)
    out = {}
    for n in PARAMETERS:
        if n in method.constants:
            out[n] = Value(method.constants[n], f"vLLM's constant for gpt-oss ({method.name}); config.json is not asked")
        elif n not in method.hands_on:
            out[n] = Value(None, f"{method.name} does not hand on swiglu_{n}")
        elif n in stated:
            out[n] = Value(stated[n].value, f"{stated[n].source}, handed on by {method.name}")
        else:
            out[n] = Value(None, f"config.json states no swiglu_{n}")
    return out


def _method(path: str, quant_config: Mapping[str, Any], model_type: str | None) -> Method:
    kind, (fmt, backend) = quant_config.get("quant_method"), path.split("/")
    known = [k for f, k in METHODS if f == fmt]
    if kind not in known:
        raise MxdebugError(f"quant_method of quantization_config for {path}", f"one of {', '.join(known)}", repr(kind),
                           "methods differ in what they hand on, so the values cannot be known without it")
    if (fmt, kind) == ("mxfp4", "mxfp4") and model_type == "gpt_oss":
        return GPT_OSS_METHOD
    if (fmt, kind) == ("mxfp4", "compressed-tensors"):
        # 8-bit activations make it W4A8. The other method takes Marlin or vLLM's own CUTLASS, so on FlashInfer's paths it must be W4A8.
        groups = quant_config.get("config_groups")
        inputs = [g.get("input_activations") for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
        return W4A8 if backend != "MARLIN" or any(isinstance(i, dict) and i.get("num_bits") == 8 for i in inputs) else W4A4
    return METHODS[fmt, kind]


def _number(value: Any, operand: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= _LARGEST:
        raise MxdebugError(operand, "a finite float32", repr(value)[:80])
    return float(value)
