"""The converters of an installed engine, path by path. vLLM: model_executor/layers/fused_moe/oracle/mxfp4.py and nvfp4.py."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..errors import MxdebugError
from ..layouts import INTERLEAVED, RowOrder
from ..recipes import RECIPES, Recipe
from ..reference import MoELayer
from .judge import Audit, Converter, audit
from .layers import DIVISORS, made_layer
from .standins import replaced

READ = "0.33"  # the version that the recipes and this file were read from
_FUSED = "vllm.model_executor.layers.fused_moe"
_GPT_OSS = "gpt-oss"


@dataclass(frozen=True)
class EngineAudit:
    """What became of an engine's converters. ok: None where none ran, for the reason that `message` gives."""

    engine: str
    version: str | None
    message: str
    audits: tuple[Audit, ...] = ()

    @property
    def ok(self) -> bool | None:
        ran = [a for a in self.audits if not a.refused]
        return all(a.ok for a in ran) if ran else None

    def __str__(self) -> str:
        lines = [self.message]
        width = max((len(f"{a.path}, {a.checkpoint}") for a in self.audits), default=0)
        for a in self.audits:
            lines.append(f"  {f'{a.path}, {a.checkpoint}':<{width}}  {a.layer}: {a.outcome}")
            lines += [f"      {text}" for text in (a.refused, a.failed) if text]
            lines += [f"      {line}" for line in a.lines]
        if self.audits:
            counts = {o: sum(a.outcome == o for a in self.audits) for o in ("right", "wrong", "failed", "refused")}
            lines.append(f"{len(self.audits)} combinations: " + ", ".join(f"{n} {o}" for o, n in counts.items() if n))
        return "\n".join(lines)


def report(engine: str) -> tuple[str, bool | None]:
    """The audit of an engine as text, and whether all is right; None where nothing ran. Raises MxdebugError for an unknown engine."""
    if engine not in ENGINES:
        raise MxdebugError("engine", f"one of {', '.join(ENGINES)}", repr(engine), "no converters of it are known")
    found = ENGINES[engine]()
    return str(found), found.ok


def audit_vllm(paths: tuple[str, ...] | None = None) -> EngineAudit:
    """Audit the converters of the vLLM that can be imported here: every path and checkpoint kind, with and without gate, interleaved too.

    paths  only these

    vLLM's compiled parts and a GPU are not needed. A vLLM that is absent or that cannot be imported is a message, not an error. What vLLM
    refuses by its own checks is `refused`; a converter that raises has `failed`.
    """
    if (spec := find_spec("vllm")) is None:
        return EngineAudit(
            "vllm", None, "vLLM is not installed here, so none of its converters ran: pip install vllm, or put its sources on the path"
        )
    found = _version()
    which = f"vLLM {found or 'of unknown version'} ({spec.origin or next(iter(spec.submodule_search_locations or ()), 'no file')})"
    with replaced():
        try:
            oracles = {name: importlib.import_module(f"{_FUSED}.oracle.{name}") for name in ("mxfp4", "nvfp4")}
            activations = importlib.import_module(f"{_FUSED}.activation").MoEActivation
        except Exception as error:  # whatever stands in the way of the import, it is the answer
            return EngineAudit(
                "vllm",
                found,
                f"{which}: its converters cannot be imported, so none ran: {type(error).__name__}: {error}. They need vLLM's "
                f"Python files and its Python dependencies, not its compiled parts; mxdebug was written for {READ}",
            )
        audits = [a for r in RECIPES if r.engine == "vllm" and (paths is None or r.path in paths) for a in _recipe(r, oracles, activations)]
    note = "" if found and found.startswith(READ) else f"; mxdebug's recipes are those of {READ}"
    return EngineAudit("vllm", found, f"{which}: its converters on the CPU, FlashInfer's layout operations replaced{note}", tuple(audits))


ENGINES: dict[str, Callable[[], EngineAudit]] = {"vllm": audit_vllm}


def _version() -> str | None:
    try:
        return version("vllm")
    except PackageNotFoundError:
        return None


def _recipe(r: Recipe, oracles: dict[str, ModuleType], activations: Any) -> list[Audit]:
    """All layers of one path and checkpoint kind: gated, with rows that alternate where that is another kind of model, and without gate."""
    oracle, backend = oracles[r.path.split("/")[0]], r.path.split("/")[1]
    cases: list[tuple[str, bool, RowOrder | None]] = [("SWIGLUOAI" if r.checkpoint == _GPT_OSS else "SILU", True, None)]
    if r.checkpoint != _GPT_OSS:
        cases.append(("RELU2_NO_MUL", False, None))
    if r.contract.weights.outer:
        cases.insert(1, ("SWIGLUOAI", True, INTERLEAVED))
    out = []
    for name, gated, rows in cases:
        layer = made_layer(r.path, gated=gated)
        empty = Audit(r.path, r.checkpoint, "vLLM", f"{name}" + (f", rows {rows.name}" if rows else "" if gated else ", no gate"))
        try:
            activation = activations[name]
            member = (oracle.NvFp4MoeBackend if r.contract.weights.outer else oracle.Mxfp4MoeBackend)[backend]
            if refusal := _refusal(oracle, member, activation, gated):
                out.append(replace(empty, refused=refusal))
                continue
            convert, padded = (_nvfp4 if r.contract.weights.outer else _mxfp4)(oracle, member, r, activation, layer)
            done = audit(convert, r.path, layer, checkpoint=r.checkpoint, rows=rows, padded=padded, name="vLLM")
            out.append(replace(done, layer=empty.layer))
        except Exception as error:  # a vLLM of another version, or a layer that its converter does not take
            out.append(replace(empty, failed=f"{type(error).__name__}: {error}"))
    return out


def _experts(oracle: ModuleType, backend: Any) -> Any:
    """The class that calls the kernel with tokens already routed."""
    return next(c for c in oracle.backend_to_kernel_cls(backend) if not c.is_monolithic())


def _refusal(oracle: ModuleType, backend: Any, activation: Any, gated: bool) -> str:
    """What vLLM's own checks say against such a layer (FusedMoEExperts.is_supported_config, less those of the machine)."""
    experts = _experts(oracle, backend)
    if not experts._supports_activation(activation):
        return f"{experts.__name__} does not support {activation.name}"
    if not gated and not experts._supports_no_act_and_mul():
        return f"{experts.__name__} takes no layer without gate"
    return ""


def _taken(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    """Those of the arguments that this version of the function has."""
    names = inspect.signature(function).parameters
    return {k: v for k, v in arguments.items() if k in names}


def _mxfp4(oracle: ModuleType, backend: Any, r: Recipe, activation: Any, layer: MoELayer) -> tuple[Converter, tuple[int, int]]:
    """vLLM's converter for MXFP4, and its padding at allocation as (intermediate, hidden)."""
    function = getattr(oracle, f"convert_{'gpt_oss_' if r.checkpoint == _GPT_OSS else ''}weight_to_mxfp4_moe_kernel_format")
    hidden, intermediate = oracle.mxfp4_round_up_hidden_size_and_intermediate_size(backend, layer.hidden, layer.intermediate)

    def convert(t: dict[str, Tensor]) -> dict[str, Tensor | None]:
        module = torch.nn.Module()
        module.activation = activation
        names = ("w13", "w2", "w13_scale", "w2_scale", "w13_bias", "w2_bias")
        w13, w2, s13, s2, b13, b2 = (torch.nn.Parameter(t[k], requires_grad=False) if k in t else None for k in names)
        made = function(
            backend,
            module,
            w13,
            w2,
            s13,
            s2,
            **_taken(function, {"w13_bias": b13, "w2_bias": b2, "_cache_permute_indices": {}, "activation": activation}),
        )
        return dict(zip(names, made))

    return convert, (intermediate, hidden)


def _nvfp4(oracle: ModuleType, backend: Any, r: Recipe, activation: Any, layer: MoELayer) -> tuple[Converter, None]:
    """vLLM's converter for NVFP4 and what follows it: quantisation config, and the experts' folding of the input scales.

    Before it, as ModelOptNvFp4FusedMoE and CompressedTensorsW4A4Nvfp4MoEMethod do: w1's global scale for both halves, divisors inverted.
    """
    gated = layer.gate is not None

    def convert(t: dict[str, Tensor]) -> dict[str, Tensor | None]:
        config = SimpleNamespace(
            moe_parallel_config=SimpleNamespace(enable_eplb=False),
            hidden_dim=layer.hidden,
            hidden_dim_unpadded=None,
            intermediate_size_per_partition=layer.intermediate,
            is_act_and_mul=gated,
        )
        holder = torch.nn.Module()
        holder.activation, holder.moe_config = activation, config
        t = {k: 1.0 / v if r.checkpoint in DIVISORS and k.endswith(("_scale_2", "_input_scale")) else v for k, v in t.items()}
        made = oracle.convert_to_nvfp4_moe_kernel_format(
            backend,
            holder,
            w13=t["w13"],
            w13_scale=t["w13_scale"],
            w13_scale_2=t["w13_scale_2"][:, 0].contiguous(),
            a13_scale=t["w13_input_scale"],
            w2=t["w2"],
            w2_scale=t["w2_scale"],
            w2_scale_2=t["w2_scale_2"],
            a2_scale=t["w2_input_scale"],
            is_act_and_mul=gated,
        )
        names = (
            "w13_weight",
            "w13_weight_scale",
            "w13_weight_scale_2",
            "w13_input_scale",
            "w2_weight",
            "w2_weight_scale",
            "w2_weight_scale_2",
            "w2_input_scale",
        )
        for key, value in zip(names, made):
            holder.register_parameter(key, torch.nn.Parameter(value, requires_grad=False))
        made_config = oracle.make_nvfp4_moe_quant_config(
            backend=backend,
            w13_scale=holder.w13_weight_scale,
            w2_scale=holder.w2_weight_scale,
            w13_scale_2=holder.w13_weight_scale_2,
            w2_scale_2=holder.w2_weight_scale_2,
            a13_scale=holder.w13_input_scale,
            a2_scale=holder.w2_input_scale,
        )
        experts = object.__new__(_experts(oracle, backend))  # without a whole model's configuration, which its __init__ asks for
        vars(experts).update(
            quant_config=made_config,
            moe_config=config,
            is_situ=False,
            gemm1_alpha=None,
            _gemm1_clamp_limit_unfolded=None,
            _gemm1_beta_unfolded=None,
        )
        experts.process_weights_after_loading(holder)
        out = {
            "w13": holder.w13_weight,
            "w13_scale": holder.w13_weight_scale,
            "w2": holder.w2_weight,
            "w2_scale": holder.w2_weight_scale,
            "w13_alpha": made_config.g1_alphas,
            "w2_alpha": made_config.g2_alphas,
            "a2_gscale": made_config.a2_gscale,
        }
        return {**out, **({"g1_scale_c": experts.g1_scale_c} if r.contract.clamps_before_scaling else {})}

    return convert, None
