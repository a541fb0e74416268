"""The same question for a linear layer's converter: does the kernel get what it reads? For an engine's own tests, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..diagnosis.linear_operands import KEYS, examine, examine_alpha
from ..errors import MxdebugError
from ..recipes.vllm import CT_NVFP4, MODELOPT
from ..recipes.w4a16.examples import made_linear
from ..recipes.w4a16.recipe import LinearRecipe, linear_recipe
from ..reference_linear import LinearLayer

Converter = Callable[[dict[str, Tensor]], "Mapping[str, Tensor] | tuple[Tensor, Tensor, Tensor]"]
# (parts, K, ratios of the parts' global scales): aligned, N, K, both unaligned. Neither the first nor the last part's global scale is right in all of
# them; two parts of equal length, as gate and up have.
CASES = (
    ((64, 64), 384, (1.0, 2.0)),
    ((72, 40, 48), 320, (2.0, 4.0, 1.0)),
    ((128,), 352, (1.0,)),
    ((104, 48, 48), 336, (2.0, 1.0, 4.0)),
)
ALIGNED = {
    "weight": 32,
    "weight_scale": 16,
    "alpha": 16,
}  # bytes; FlashInfer _launch_cute_dsl_sm100 refuses other addresses at the first call


def loaded_linear(layer: LinearLayer, checkpoint: str) -> dict[str, Tensor]:
    """A layer's parameters by the names under which vLLM loads them: what a converter is given. Global scales as the file stores them."""
    scales = layer.scales.view(torch.float8_e4m3fn).clone()
    if checkpoint == MODELOPT:
        return {"weight": layer.payload.clone(), "weight_scale": scales, "weight_scale_2": layer.global_scales.clone()}
    if checkpoint == CT_NVFP4:
        return {"weight_packed": layer.payload.clone(), "weight_scale": scales, "weight_global_scale": 1.0 / layer.global_scales}
    raise MxdebugError("checkpoint kind", f"{MODELOPT} or {CT_NVFP4}", repr(checkpoint))


def audit_linear(converter: Converter, path: str, checkpoint: str) -> list[str]:
    """What a converter gets wrong, a line each, over layers that need padding along N, along K, along both and not at all.

    converter  loaded parameters (`loaded_linear`) -> weight, weight_scale and alpha (or weight_global_scale), by name or in this order; what it raises is
               such a line too
    path       as in mxdebug.contracts: nvfp4_w4a16/flashinfer_cutedsl/sm100 or .../sm12x
    Raises MxdebugError for an unknown path or kind, and for a result without these.
    """
    recipe, cases = linear_recipe(path, checkpoint), {}
    for parts, k, factors in CASES:
        for differ in (False, True) if len(parts) > 1 else (False,):
            layer = made_linear(sum(parts), k, parts=parts, differ=differ, factors=factors)
            layer = layer if checkpoint == MODELOPT else replace(layer, global_scales=1.0 / (1.0 / layer.global_scales))
            where = f"N {layer.n}, K {k}" + (", global scales that differ" if differ else "")
            for line in _wrong(converter, recipe, layer, checkpoint):
                cases.setdefault(line, []).append(where)
    return [f"{line}  [{'; '.join(where)}]" for line, where in cases.items()]


def _wrong(converter: Converter, recipe: LinearRecipe, layer: LinearLayer, checkpoint: str) -> list[str]:
    contract, plan = recipe.contract, recipe.plan(layer)
    try:
        made = converter(loaded_linear(layer, checkpoint))
    except Exception as error:  # an engine's code: whatever it raises is the answer
        return [f"the converter raised {type(error).__name__}: {error}"]
    made = _named(made)
    if other := [key for key, t in made.items() if t.device.type != "cpu"]:
        return [f"{', '.join(other)}: on {made[other[0]].device}; this audit runs on the CPU"]
    takes = contract.operand("weight").takes(made["weight"].dtype) and made["weight"].dim() == 2
    if takes and (got := contract.sizes(made["weight"])) != plan.padded:
        return [f"weight: N, K {list(got)} as the kernel reads it; vLLM pads {[layer.n, layer.k]} to {list(plan.padded)}"]
    arguments = contract.arguments(made, torch.zeros(1, plan.padded[1], dtype=torch.bfloat16))
    try:
        seen = contract.see(arguments)
    except MxdebugError as error:
        return [str(error)]
    evidence = examine(contract, recipe, layer, arguments, seen)
    folded = any(f.id == "global-folded-into-blocks" for e in evidence.explained.values() for f in e.stack)
    # Numbers differ from case to case: the line of a global scale has its ratio only.
    alpha = [f for f in examine_alpha(contract, plan, layer, arguments, folded) if f.id != "global-shared-by-parts"]
    rule = (
        "vLLM passes the largest of the parts' multipliers" if plan.takes == "max" else "vLLM passes 1 / the largest of the parts' divisors"
    )
    lines = [f"{f.where}: {f.title} ({f.id}); {f.fix}" for f in evidence.findings]
    lines += [f"{f.where}: {f.title} ({f.id}), {f.evidence[f.evidence.index('(ratio') :]}; {rule}; {f.fix}" for f in alpha]
    lines += list(evidence.unexplained.values())
    if contract.sm[0] == 100 and (bad := [k for k, t in made.items() if t.storage_offset() * t.element_size() % ALIGNED[k]]):
        lines.append(
            f"{', '.join(bad)}: a view that starts inside another tensor; FlashInfer refuses addresses that are no multiples of {ALIGNED[bad[0]]} bytes"
        )
    return lines


def assert_linear_keeps_contract(converter: Converter, path: str, checkpoint: str) -> None:
    """For an engine's own tests: AssertionError with what is wrong, fault by fault, unless every operand is right."""
    __tracebackhide__ = True
    if wrong := audit_linear(converter, path, checkpoint):
        raise AssertionError(f"{path}, {checkpoint}:\n" + "\n".join(f"  {line}" for line in wrong))


def _named(made: object) -> dict[str, Tensor]:
    if isinstance(made, (tuple, list)) and len(made) == 3 and all(isinstance(t, Tensor) for t in made):
        made = dict(zip((*KEYS, "alpha"), made))
    if isinstance(made, Mapping):
        out = {("alpha" if k == "weight_global_scale" else k): t for k, t in made.items()}
        missing = [k for k in (*KEYS, "alpha") if not isinstance(out.get(k), Tensor)]
        if not missing:
            return {k: out[k] for k in (*KEYS, "alpha")}
        raise MxdebugError(
            "the converter's result",
            "tensors weight, weight_scale and alpha (or weight_global_scale)",
            f"no {', '.join(missing)} among {', '.join(map(str, made))}",
        )
    raise MxdebugError(
        "the converter's result",
        "weight, weight_scale and alpha (or weight_global_scale)",
        type(made).__name__,
        "return the three tensors, by name or in this order",
    )
