"""Which activation a call selects: FlashInfer's ActivationType and the parameters, as each kernel takes them."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import MxdebugError
from ..reference import Activation
from .operand import Arguments, shown

if TYPE_CHECKING:
    from .contract import Contract

# FlashInfer 0.7.4, tllm_enums.py ActivationType
ACTIVATION_TYPES = {0: "Gelu", 1: "Relu", 2: "Silu", 3: "Swiglu", 4: "Geglu", 5: "SwigluBias", 6: "Relu2", 7: "SwigluStep", 8: "GegluTanh",
                    9: "Identity", 10: "Situ", 11: "InvalidType", 12: "ClampedRelu2", 13: "PowLU"}
NUMBERS = {name: number for number, name in ACTIVATION_TYPES.items()}
PARAMETERS = ("alpha", "beta", "limit")


def activation_type(arguments: Arguments) -> str:
    """The name of the call's activation_type: an enum, its number, or the name itself. Swiglu where none is given (FlashInfer)."""
    value = arguments.get("activation_type", "Swiglu")
    value = getattr(value, "name", value)
    return ACTIVATION_TYPES.get(value, str(value)) if isinstance(value, int) and not isinstance(value, bool) else str(value)


def read_activation(c: Contract, arguments: Arguments) -> Activation:
    """The activation that the call's arguments select. Any of alpha, beta, limit turns Swiglu into SwigluBias (FlashInfer)."""
    name = activation_type(arguments)
    parameters = {k: _parameter(c, arguments, k) for k in PARAMETERS}
    given = any(t is not None for t in parameters.values())
    if name not in c.kinds:
        raise MxdebugError("activation_type", f"one of {', '.join(c.kinds)}", name, "not emulated for this kernel")
    if c.kinds[name] in ("silu", "swiglu") and (given or name == "SwigluBias"):
        return _unfolded(c, arguments, Activation("swiglu", **parameters))
    return Activation(c.kinds[name])


def _parameter(c: Contract, arguments: Arguments, name: str) -> Tensor | None:
    o = c.operand(f"swiglu_{name}")
    value = arguments.get(o.argument)
    if value is None:
        return None
    if c.floats:
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise MxdebugError(o.argument, "one number for all experts", shown(value), "a tensor where this kernel takes a float")
        neutral = {"alpha": (1.0,), "beta": (0.0,), "limit": (math.inf, torch.finfo(torch.float32).max)}[name]  # the function's defaults
        return None if value in neutral else torch.full((c.operand("w13").get(arguments).shape[0],), float(value))
    if not isinstance(value, Tensor) or value.dtype != torch.float32 or value.dim() != 1:
        raise MxdebugError(o.argument, "torch.float32 [experts on this rank]", shown(value), "a Python float where the kernel takes one value for each expert")
    return value


def _unfolded(c: Contract, arguments: Arguments, act: Activation) -> Activation:
    """TRT-LLM clamps the sums before they are scaled, and adds beta to them: limit and beta come divided by the GEMM's alpha."""
    alpha = c.get("w13_alpha", arguments)
    if alpha is None or not c.clamps_before_scaling or act.kind != "swiglu":
        return act
    alpha = alpha.float().reshape(-1)
    fits = {n: getattr(act, n) for n in ("beta", "limit") if getattr(act, n) is not None and getattr(act, n).shape == alpha.shape}
    return replace(act, **{n: t * alpha for n, t in fits.items()})
