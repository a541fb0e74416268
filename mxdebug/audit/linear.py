"""The same question for a linear layer's converter: does the kernel get what it reads? For an engine's own tests, without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..contracts import any_contract
from ..diagnosis.linear_operands import KEYS, examine, examine_alpha
from ..errors import MxdebugError
from ..recipes.vllm import CT_NVFP4, MODELOPT
from ..recipes.w4a16.examples import made_linear
from ..recipes.w4a16.recipe import linear_recipe
from ..reference_linear import LinearLayer

Converter = Callable[[dict[str, Tensor]], "Mapping[str, Tensor] | tuple[Tensor, Tensor, Tensor]"]
CASES = (((128,), 384), ((72, 40, 48), 320), ((128,), 352), ((104, 48, 48), 336))  # (parts, K): aligned, N, K, both unaligned


def loaded_linear(layer: LinearLayer, checkpoint: str) -> dict[str, Tensor]:
    """A layer's parameters by the names under which vLLM loads them: what a converter is given. Global scales as the file stores them."""
    scales = layer.scales.view(torch.float8_e4m3fn).clone()
    if checkpoint == MODELOPT:
        return {"weight": layer.payload.clone(), "weight_scale": scales, "weight_scale_2": layer.global_scales.clone()}
    if checkpoint == CT_NVFP4:
        return {"weight_packed": layer.payload.clone(), "weight_scale": scales, "weight_global_scale": 1.0 / layer.global_scales}
    raise MxdebugError("checkpoint kind", f"{MODELOPT} or {CT_NVFP4}", repr(checkpoint))


def audit_linear(converter: Converter, path: str, checkpoint: str) -> list[str]:
    """What a converter gets wrong, in words, over layers that need padding along N, along K, along both and not at all.

    converter  loaded parameters (`loaded_linear`) -> weight, weight_scale and alpha (or weight_global_scale), by name or in this order
    path       as in mxdebug.contracts: nvfp4_w4a16/flashinfer_cutedsl/sm100 or .../sm12x
    What the converter raises passes through. Raises MxdebugError for a result without these.
    """
    contract, recipe, wrong = any_contract(path), linear_recipe(path, checkpoint), []
    for parts, k in CASES:
        for differ in (False, True) if len(parts) > 1 else (False,):
            layer = made_linear(sum(parts), k, parts=parts, differ=differ)
            layer = layer if checkpoint == MODELOPT else LinearLayer(**{**vars(layer), "global_scales": 1.0 / (1.0 / layer.global_scales)})
            plan, made = recipe.plan(layer), _named(converter(loaded_linear(layer, checkpoint)))
            where = f"N {layer.n}, K {k}{', parts whose global scales differ' if differ else ''}: "
            arguments = contract.arguments(made, torch.zeros(1, plan.padded[1], dtype=torch.bfloat16))
            try:
                seen = contract.see(arguments)
            except MxdebugError as error:
                wrong.append(where + str(error))
                continue
            evidence = examine(contract, recipe, layer, arguments, seen)
            folded = any(f.id == "global-folded-into-blocks" for e in evidence.explained.values() for f in e.stack)
            found = [
                *evidence.findings,
                *(f for f in examine_alpha(contract, plan, layer, arguments, folded) if f.id != "global-shared-by-parts"),
            ]
            wrong += [f"{where}{f.where}: {f.title} ({f.id}); {f.fix}" for f in found] + [
                where + text for text in evidence.unexplained.values()
            ]
    return wrong


def assert_linear_keeps_contract(converter: Converter, path: str, checkpoint: str) -> None:
    """For an engine's own tests: AssertionError with what is wrong, fault by fault, unless every operand is right."""
    __tracebackhide__ = True
    if wrong := audit_linear(converter, path, checkpoint):
        raise AssertionError(f"{path}, {checkpoint}:\n" + "\n".join(f"  {line}" for line in wrong))


def _named(made: object) -> dict[str, Tensor]:
    if isinstance(made, tuple) and len(made) == 3:
        made = dict(zip((*KEYS, "alpha"), made))
    if isinstance(made, Mapping):
        out = {("alpha" if k == "weight_global_scale" else k): t for k, t in made.items()}
        if set(out) >= {*KEYS, "alpha"}:
            return {k: out[k] for k in (*KEYS, "alpha")}
    raise MxdebugError(
        "the converter's result",
        "weight, weight_scale and alpha (or weight_global_scale)",
        ", ".join(map(str, made)) if isinstance(made, Mapping) else type(made).__name__,
        "other names: name them in a lambda around the converter",
    )
