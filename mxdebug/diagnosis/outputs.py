"""Evidence from the output: does it follow from what was passed, and if not, which broken computation reproduces it?"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from ..contracts import Contract
from ..faults import FAULTS, KERNEL_FAULTS, Fault, KernelChange
from ..metrics import Comparison, compare
from ..reference import MoELayer
from .finding import CONSISTENT, PROVED, Finding

SAMPLE = 8  # tokens on which hypotheses about the computation are tried
DEPTH = 3   # broken computations that are stacked at most


def rounding_floor(k: int) -> float:
    """The relative L2 distance that the rounding of intermediate results can make between a kernel and its emulation.

    Both add K products in float32; their sums differ by at most K * 2^-24. Stored as bf16 (step 2^-8) a result then flips
    to the neighbouring number with probability K * 2^-24 / 2^-8 and is off by 2^-8 of itself. Three results are stored on
    the way (GEMM1, activation, GEMM2), so: sqrt(3 * K * 2^-16) * 2^-8. K 384: 5.2e-4; K 2944: 1.4e-3. Faults of the
    catalogue move an output by 3e-2 and more.
    """
    return math.sqrt(3 * k * 2.0**-16) * 2.0**-8


def follows(got: Tensor, want: Tensor, k: int) -> bool:
    """Whether an output is the emulated one, token by token, up to `rounding_floor`; NaN and inf must stand in the same places."""
    if not compare(got, want).masks_equal:
        return False
    a, b = (t.double().nan_to_num(0.0, 0.0, 0.0) for t in (got, want))
    return bool(((a - b).norm(dim=1) <= rounding_floor(k) * b.norm(dim=1)).all())


def sample_tokens(arguments: Mapping[str, Any], count: int) -> Tensor:
    """int64: up to `count` tokens spread over the call, those first that have an expert on this rank."""
    total = arguments["input"].shape[0]
    return torch.linspace(0, total - 1, min(count, total)).long().unique()


def restrict(contract: Contract, arguments: Mapping[str, Any], tokens: Tensor) -> dict[str, Any]:
    """The same call for some tokens only, with only the experts that they touch: the cost no longer grows with all experts.

    Experts are renumbered from 0 on one rank; tokens' experts of other ranks get an id beyond the last.
    """
    p = contract.parallel(arguments)
    experts = contract.operand("w13").get(arguments).shape[0]
    local = arguments["token_selected_experts"][tokens].long() - p.ep_rank * experts
    here = (local >= 0) & (local < experts)
    used = local[here].unique()
    if used.numel() == 0:
        used = torch.zeros(1, dtype=torch.long)
    renumber = torch.full((experts,), used.numel(), dtype=torch.long)
    renumber[used] = torch.arange(used.numel())
    ids = torch.where(here, renumber[local.clamp(0, experts - 1)], used.numel()).to(torch.int32)

    def pick(t: Any) -> Any:
        return t[used] if isinstance(t, Tensor) and t.shape[:1] == (experts,) else t

    names = ("fc1_expert_weights", "fc2_expert_weights", "fc1_expert_biases", "fc2_expert_biases", "swiglu_alpha", "swiglu_beta", "swiglu_limit")
    return {**arguments, **{n: pick(arguments.get(n)) for n in names}, "quant_scales": [pick(t) for t in arguments["quant_scales"]],
            "input": arguments["input"][tokens], "token_selected_experts": ids, "token_final_scales": arguments["token_final_scales"][tokens],
            "ep_size": 1, "ep_rank": 0}


@dataclass(frozen=True)
class OutputEvidence:
    """comparison of the recorded output with the emulation of what was passed; whether it follows from it; findings if not."""

    comparison: Comparison
    follows: bool
    findings: tuple[Finding, ...]


def examine(contract: Contract, arguments: Mapping[str, Any], output: Tensor, layer: MoELayer | None = None, most_tokens: int = 64) -> OutputEvidence:
    """Emulate the call (on up to `most_tokens` tokens) and compare bit for bit; where it differs, search the broken computations."""
    k = max(arguments["input"].shape[1], contract.operand("w2").get(arguments).shape[-1] * 2)
    tokens = sample_tokens(arguments, most_tokens)
    small = restrict(contract, arguments, tokens)
    emulated = contract.emulate(small)
    comparison = compare(output[tokens], emulated)
    if follows(output[tokens], emulated, k):
        return OutputEvidence(comparison, True, ())
    memory = arguments.get("output")
    if isinstance(memory, Tensor) and memory.shape == output.shape and compare(output, memory).bit_identical:
        return OutputEvidence(comparison, False, (Finding(FAULTS["output-unwritten"], PROVED, "all tokens", "the output equals, bit for bit, the memory that the call was given to write into"),))
    if not output.any():
        return OutputEvidence(comparison, False, (Finding(FAULTS["output-unwritten"], CONSISTENT, "all tokens", "every element of the output is zero; the operands do not give zeros"),))
    return OutputEvidence(comparison, False, tuple(_search(contract, arguments, output, k)))


def _search(contract: Contract, arguments: Mapping[str, Any], output: Tensor, k: int) -> Iterable[Finding]:
    """Stacks of broken computations, shallow ones first, that reproduce the output on sampled tokens, then on all."""
    tokens = sample_tokens(arguments, SAMPLE)
    layer, want = contract.decode(arguments), output[tokens]
    plain = contract.emulate(restrict(contract, arguments, tokens))
    active = [f for f in KERNEL_FAULTS if not compare(f.change.output(contract, arguments, layer, tokens), plain).bit_identical]
    for depth in range(1, DEPTH + 1):
        hits = [stack for stack in combinations(active, depth) if follows(_stack(stack).output(contract, arguments, layer, tokens), want, k)]
        if hits:
            break
    else:
        return
    strength = PROVED if len(hits) == 1 else CONSISTENT
    also = "" if len(hits) == 1 else "; so do " + ", ".join(" + ".join(f.id for f in h) for h in hits[1:4]) + ": this call cannot tell them apart"
    for fault in hits[0]:
        alone = compare(fault.change.output(contract, arguments, layer, tokens), plain)
        with_others = "" if len(hits[0]) == 1 else f" (together with {', '.join(f.id for f in hits[0] if f is not fault)})"
        yield Finding(fault, strength, f"output, {tokens.numel()} sampled tokens",
                      f"this computation reproduces the recorded output{with_others}, the contract's does not{also}", effect=alone.relative_l2)


def _stack(stack: tuple[Fault, ...]) -> KernelChange:
    change = stack[0].change
    for f in stack[1:]:
        change = change.then(f.change)
    return change
