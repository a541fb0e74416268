"""Which operation vLLM runs between Marlin's GEMMs, and which SwiGLU parameters reach it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..layouts import GATE_UP, INTERLEAVED, RowOrder


@dataclass(frozen=True)
class MarlinActivation:
    """What vLLM runs between Marlin's GEMMs: gate * sigmoid(alpha * gate) * (up + beta), clamped at limit as FlashInfer does.

    op     the function of torch.ops._C that computes it
    rows   the order of gate and up in which it reads the first GEMM's result
    takes  the parameters that it is given: one number for all experts, where FlashInfer's kernels take one for each
    fixed  those that it is not given, whatever any configuration says
    needs  those without which vLLM stops ("requires clamp_limit")

    Which values those are, and from which configuration: recipes/swiglu.
    """

    op: str
    rows: RowOrder
    takes: tuple[str, ...]
    fixed: Mapping[str, float]
    needs: tuple[str, ...] = ()


# By vLLM's names. Source: fused_moe/activation.py apply_moe_activation; experts/marlin_moe.py passes the experts' `activation` and
# `activation_config`. SILU is silu_and_mul where no limit is given. swigluoai_and_mul is called with its own defaults.
MARLIN_ACTIVATIONS: Mapping[str, MarlinActivation] = {
    "SILU": MarlinActivation("silu_and_mul_with_clamp", GATE_UP, ("limit",), {"alpha": 1.0, "beta": 0.0}),
    "SWIGLUOAI": MarlinActivation("swigluoai_and_mul", INTERLEAVED, (), {"alpha": 1.702, "beta": 1.0, "limit": 7.0}),
    "SWIGLUOAI_UNINTERLEAVE": MarlinActivation("silu_and_mul_with_clamp", GATE_UP, ("alpha", "beta", "limit"), {}, needs=("limit",)),
}
