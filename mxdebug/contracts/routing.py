"""Expert ids and router weights out of a TRT-LLM call: given as a pair, packed into one integer, or as the router's logits.

Rules: FlashInfer 0.7.4, csrc/fused_moe/trtllm_backend/trtllm_fused_moe_routing_runner.cu and RoutingCustomPolicy.cuh (logits),
fused_moe/core.py trtllm_fp4_block_scale_routed_moe (pairs and packed ids).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import MxdebugError, brief
from .operand import Arguments, number, shown

if TYPE_CHECKING:
    from .contract import Contract

# FlashInfer RoutingMethodType
METHODS = {0: "Default", 1: "Renormalize", 2: "DeepSeekV3", 3: "Llama4", 4: "RenormalizeNaive", 5: "TopK", 6: "SigmoidRenorm", 7: "MiniMax2",
           8: "Sigmoid", 9: "TopKSigmoid", 10: "Unspecified"}


def read_routing(c: Contract, arguments: Arguments, tokens: int) -> tuple[Tensor, Tensor]:
    """(ids int32 [T, k], weights float32 [T, k]) of a TRT-LLM call. Raises MxdebugError for a method that is not emulated."""
    given = arguments.get("topk_ids")
    if isinstance(given, Tensor):
        if given.dtype != torch.int32 or given.dim() != 2 or given.shape[0] != tokens:
            raise MxdebugError("selected experts (topk_ids)", f"torch.int32 [{tokens}, top-k], expert id << 16 | bits of a bf16 weight", shown(given))
        return given >> 16, (given << 16).view(torch.float32)
    if given is not None:
        ids, weights = (given[i] if isinstance(given, (list, tuple)) and len(given) == 2 else None for i in (0, 1))
        if not isinstance(ids, Tensor) or ids.dtype != torch.int32 or ids.dim() != 2 or ids.shape[0] != tokens:
            raise MxdebugError("selected experts (topk_ids[0])", f"torch.int32 [{tokens}, top-k]", shown(ids), "ids that were not cast to int32, or of another call")
        if not isinstance(weights, Tensor) or weights.dtype not in (torch.bfloat16, torch.float32) or weights.shape != ids.shape:
            raise MxdebugError("router weights (topk_ids[1])", f"torch.bfloat16 or torch.float32 {list(ids.shape)}", shown(weights), "router weights of another call")
        return ids, weights.float()
    logits = arguments.get("routing_logits")
    if not isinstance(logits, Tensor) or logits.dtype not in (torch.bfloat16, torch.float32) or logits.dim() != 2 or logits.shape[0] != tokens:
        raise MxdebugError("router logits (routing_logits)", f"torch.bfloat16 or torch.float32 [{tokens}, experts]", shown(logits), "logits of another call")
    experts, top_k = logits.shape[1], number(arguments, "top_k", 1)
    if not 1 <= top_k <= experts:
        raise MxdebugError("top_k", f"1 to {experts}, the experts", str(top_k))
    bias, factor = arguments.get("routing_bias"), arguments.get("routed_scaling_factor")
    if bias is not None and (not isinstance(bias, Tensor) or not bias.is_floating_point() or tuple(bias.shape) != (experts,)):
        raise MxdebugError("routing_bias", f"floating-point numbers [{experts}]", shown(bias), "the bias of another layer")
    if factor is not None and (isinstance(factor, bool) or not isinstance(factor, (int, float))):
        raise MxdebugError("routed_scaling_factor", "a number", brief(factor), "not a call of this function, or a damaged dump")
    return route(logits, top_k, number(arguments, "routing_method_type", 0), bias, factor, number(arguments, "n_group", 0),
                 bool(arguments.get("norm_topk_prob", True)))


def route(logits: Tensor, top_k: int, method: int, bias: Tensor | None, factor: float | None, groups: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """What TRT-LLM's routing kernel makes of logits [T, E]: ids int32 and weights, rounded once to bf16, as float32, both [T, k].

    At equal scores the lower expert id wins. Bias and factor count for DeepSeekV3 and MiniMax2 only.
    """
    name = METHODS.get(method, str(method))
    x = logits.float()
    if name in ("Default", "Renormalize", "RenormalizeNaive", "TopK", "TopKSigmoid"):
        values, ids = _top(x.softmax(-1) if name == "Default" else x, top_k)
        weights = {"Default": lambda v: v, "TopK": lambda v: v, "TopKSigmoid": torch.sigmoid}.get(name, lambda v: v.softmax(-1))(values)
    elif name in ("Sigmoid", "SigmoidRenorm", "Llama4") or (name in ("MiniMax2", "DeepSeekV3") and groups <= 1):
        scores = x.sigmoid()
        biased = scores if bias is None or name not in ("MiniMax2", "DeepSeekV3") else scores + bias.float()
        ids = _top(biased, top_k)[1]
        weights = scores.gather(1, ids)
        if name in ("MiniMax2", "DeepSeekV3"):
            weights = weights * (1.0 if factor is None else float(factor)) / (weights.sum(-1, keepdim=True) + 1e-20)
        elif name == "SigmoidRenorm" and renormalise:
            weights = weights / weights.sum(-1, keepdim=True).clamp(min=1e-20)
    else:
        raise MxdebugError("routing_method_type", "a method that is emulated: all but Unspecified, and DeepSeekV3 without groups",
                           f"{name}{f' with {groups} groups' if groups > 1 else ''}", "route outside of the kernel, or record the modular call")
    return ids.int(), weights.to(torch.bfloat16).float()


def _top(scores: Tensor, k: int) -> tuple[Tensor, Tensor]:
    values, ids = scores.sort(dim=-1, descending=True, stable=True)
    return values[:, :k], ids[:, :k]
