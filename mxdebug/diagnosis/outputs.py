"""Evidence from the output: does it follow from what was passed, and if not, which broken computation reproduces it?"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from ..contracts import Contract
from ..faults import FAULTS, KERNEL_FAULTS, Fault, KernelChange
from ..metrics import Comparison, compare
from ..reference import Trace
from .finding import CONSISTENT, PROVED, Finding

SAMPLE = 4  # tokens on which hypotheses about the computation are tried
DEPTH = 2   # broken computations that are stacked at most; three would take five times as long to rule out
FEW_WEIGHTS = 10**8       # dequantised for one hypothesis: about a second
ALL_WEIGHTS = 3 * 10**8  # dequantised for the tokens that are emulated at all
MOST_WEIGHTS = 4 * 10**9  # dequantised for all of them


def rounding_floor(k: int) -> float:
    """The relative L2 distance that the rounding of intermediate results can make between a kernel and its emulation.

    Both add K products in float32; their sums differ by at most K * 2^-24. Stored as bf16 (step 2^-8) a result then flips
    to the neighbouring number with probability K * 2^-24 / 2^-8 and is off by 2^-8 of itself. Three results are stored on
    the way (GEMM1, activation, GEMM2), so: sqrt(3 * K * 2^-16) * 2^-8. K 384: 5.2e-4; K 2944: 1.4e-3. Faults of the
    catalogue move an output by 3e-2 and more.
    """
    return math.sqrt(3 * k * 2.0**-16) * 2.0**-8


def follows(got: Tensor, want: Tensor, k: int) -> bool:
    """Whether an output is the emulated one, token by token, up to `rounding_floor`; NaN and inf must stand in the same places.

    In a narrow layer a single step of one large number is more than the floor, so one step (2^-7 at most) of the largest is allowed too.
    """
    if not got.numel():
        return True
    if not compare(got, want).masks_equal:
        return False
    a, b = (t.double().nan_to_num(0.0, 0.0, 0.0) for t in (got, want))
    return bool(((a - b).norm(dim=1) <= rounding_floor(k) * b.norm(dim=1) + 2.0**-7 * b.abs().amax(dim=1)).all())


def sample_tokens(contract: Contract, arguments: Mapping[str, Any], count: int, output: Tensor | None = None) -> Tensor:
    """int64, ascending: up to `count` tokens spread over the call. Tokens with an expert on this rank come before others, since only
    they say anything; some whose output is not finite, all zero or unwritten come first, so that one bad token of thousands is seen."""
    experts = contract.operand("w13").get(arguments).shape[0]
    local = arguments["token_selected_experts"].long() - contract.parallel(arguments).ep_rank * experts
    here = ((local >= 0) & (local < experts)).any(1)
    odd = torch.zeros_like(here)
    if output is not None:  # cheap looks at every token: not finite, all zero though experts are here, or left as the memory was
        odd = ~torch.isfinite(output).all(1) | (here & (output == 0).all(1))
        memory = arguments.get("output")
        if isinstance(memory, Tensor) and memory.shape == output.shape:
            odd |= here & (memory == output).all(1)
    chosen = _spread(odd, max(1, count // 8))
    for pool in (here, ~here):
        free = pool.clone()
        free[chosen] = False
        chosen = torch.cat([chosen, _spread(free, count - chosen.numel())])
    while chosen.numel() > 1 and _weights(contract, arguments, chosen) > ALL_WEIGHTS:
        chosen = chosen[: chosen.numel() * 2 // 3 or 1]  # a large layer: fewer tokens, which touch fewer experts; the odd ones stay
    return chosen.sort().values


def _spread(mask: Tensor, count: int) -> Tensor:
    """Up to `count` of the positions where `mask` is True, evenly spread."""
    at = mask.nonzero().flatten()
    return at[torch.linspace(0, at.numel() - 1, min(count, at.numel())).round().long()] if at.numel() and count > 0 else at[:0]


def touched(contract: Contract, arguments: Mapping[str, Any], tokens: Tensor) -> list[int]:
    """Positions of the experts on this rank that these tokens use; the first where they use none."""
    experts = contract.operand("w13").get(arguments).shape[0]
    local = arguments["token_selected_experts"][tokens].long() - contract.parallel(arguments).ep_rank * experts
    return local[(local >= 0) & (local < experts)].unique().tolist() or [0]


def restrict(contract: Contract, arguments: Mapping[str, Any], tokens: Tensor) -> dict[str, Any]:
    """The same call for some tokens only, with only the experts that they touch: the cost no longer grows with all experts.

    Experts are renumbered from 0 on one rank; tokens' experts of other ranks get an id beyond the last.
    """
    p = contract.parallel(arguments)
    experts = contract.operand("w13").get(arguments).shape[0]
    local = arguments["token_selected_experts"][tokens].long() - p.ep_rank * experts
    here = (local >= 0) & (local < experts)
    used = torch.tensor(touched(contract, arguments, tokens))
    renumber = torch.full((experts,), used.numel(), dtype=torch.long)
    renumber[used] = torch.arange(used.numel())
    ids = torch.where(here, renumber[local.clamp(0, experts - 1)], used.numel()).to(torch.int32)

    def pick(t: Any, by_bytes: bool = False) -> Any:
        if by_bytes and isinstance(t, Tensor) and t.numel() % experts == 0:  # scales count by bytes, whatever their shape
            t = t.reshape(experts, -1)
        return t[used] if isinstance(t, Tensor) and t.shape[:1] == (experts,) else t

    names = ("fc1_expert_weights", "fc2_expert_weights", "fc1_expert_biases", "fc2_expert_biases", "swiglu_alpha", "swiglu_beta", "swiglu_limit")
    return {**arguments, **{n: pick(arguments.get(n)) for n in names}, "quant_scales": [pick(t, by_bytes=True) for t in arguments["quant_scales"]],
            "input": arguments["input"][tokens], "token_selected_experts": ids, "token_final_scales": arguments["token_final_scales"][tokens],
            "ep_size": 1, "ep_rank": 0}


@dataclass(frozen=True)
class OutputEvidence:
    """comparison of the recorded output with the emulation of what was passed; whether it follows from it; findings if not.

    tokens  which were compared, of `total`
    trace   the emulation for them
    pairs   whether pairs of broken computations were tried
    open    what was not tried, and where NaN or inf stand
    """

    comparison: Comparison
    follows: bool
    findings: tuple[Finding, ...]
    tokens: Tensor
    trace: Trace
    total: int
    pairs: bool = True
    open: tuple[str, ...] = ()


def examine(contract: Contract, arguments: Mapping[str, Any], output: Tensor, most_tokens: int = 64) -> OutputEvidence:
    """Emulate the call (on up to `most_tokens` tokens) and compare bit for bit; where it differs, search the broken computations."""
    k = max(arguments["input"].shape[1], contract.operand("w2").get(arguments).shape[-1] * 2)
    tokens = sample_tokens(contract, arguments, most_tokens, output)
    trace = contract.trace(restrict(contract, arguments, tokens), keep=True)
    got, emulated = output[tokens], trace.output
    comparison = compare(got, emulated)
    if follows(got, emulated, k):
        return OutputEvidence(comparison, True, (), tokens, trace, len(output))
    memory = arguments.get("output")
    if isinstance(memory, Tensor) and memory.shape == output.shape and compare(output, memory).bit_identical:
        return OutputEvidence(comparison, False, (Finding(FAULTS["output-unwritten"], PROVED, "all tokens", "the output equals, bit for bit, the memory that the call was given to write into"),), tokens, trace, len(output))
    if not output.any():
        return OutputEvidence(comparison, False, (Finding(FAULTS["output-unwritten"], CONSISTENT, "all tokens", "every element of the output is zero; the operands do not give zeros"),), tokens, trace, len(output))
    findings, not_tried = _search(contract, arguments, got, emulated, tokens, k)
    bad = (~torch.isfinite(output)).nonzero() if not comparison.masks_equal else output.new_zeros(0, 2)
    where = () if not len(bad) else (f"NaN or inf in {bad[:, 0].unique().numel()} of {output.shape[0]} tokens, first in token {bad[0, 0]}, column {bad[0, 1]}",)
    return OutputEvidence(comparison, False, findings, tokens, trace, len(output), not not_tried, (*not_tried, *where))


def _search(contract: Contract, arguments: Mapping[str, Any], got: Tensor, emulated: Tensor, tokens: Tensor,
            k: int) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Stacks of broken computations, shallow ones first, that reproduce the output: on the tokens that are furthest off, then on all.

    (findings, what was not tried)
    """
    few = _furthest(contract, arguments, got, emulated, tokens)
    if contract.parallel(arguments).ep_size == 1:  # otherwise a broken computation may number experts from elsewhere
        at = torch.isin(tokens, few)
        arguments, tokens, few = restrict(contract, arguments, tokens), torch.arange(tokens.numel()), at.nonzero().flatten()
    layer, want = contract.decode(arguments), got[torch.isin(tokens, few)]
    plain = emulated[torch.isin(tokens, few)]

    def output(stack: tuple[Fault, ...], which: Tensor) -> Tensor:
        return _stack(stack).output(contract, arguments, layer, which)

    single = {f: output((f,), few) for f in KERNEL_FAULTS}
    active = [f for f in KERNEL_FAULTS if not compare(single[f], plain).bit_identical]
    reachable = ~torch.isfinite(torch.stack([plain, *single.values()])).all(0)
    if bool((~torch.isfinite(want) & ~reachable).any()):
        return (), ()  # none of them makes NaN or inf there
    spent, most = 0, max(len(active), MOST_WEIGHTS // _weights(contract, arguments, few))
    for depth in range(1, DEPTH + 1):
        stacks = list(combinations(active, depth))
        if (spent := spent + len(stacks)) > most:
            return (), (f"pairs of broken computations were not tried: {len(stacks)} emulations of a layer of this size",)
        hits = [s for s in stacks if follows(single[s[0]] if depth == 1 else output(s, few), want, k)]
        near = {h: compare(output(h, tokens), got) for h in hits if follows(output(h, tokens), got, k)}
        if near:
            return tuple(_reproduced(sorted(near, key=lambda h: near[h].differing), near, lambda f: compare(single[f], plain), len(tokens))), ()
    return (), ()


def _furthest(contract: Contract, arguments: Mapping[str, Any], got: Tensor, emulated: Tensor, tokens: Tensor) -> Tensor:
    """Of `tokens`, up to SAMPLE whose output is furthest from the emulation; fewer, where their experts would be too many weights."""
    a, b = (t.double().nan_to_num(1e30, 1e30, -1e30) for t in (got, emulated))
    order = tokens[(a - b).norm(dim=1).argsort(descending=True)]
    for n in range(min(SAMPLE, order.numel()), 1, -1):
        if _weights(contract, arguments, order[:n]) <= FEW_WEIGHTS:
            return order[:n].sort().values
    return order[:1]


def _weights(contract: Contract, arguments: Mapping[str, Any], tokens: Tensor) -> int:
    """How many weights one emulation of these tokens dequantises."""
    w13, w2 = (contract.operand(key).get(arguments) for key in ("w13", "w2"))
    return len(touched(contract, arguments, tokens)) * 2 * (w13[0].numel() + w2[0].numel())


def _reproduced(hits: list[tuple[Fault, ...]], near: Mapping[tuple[Fault, ...], Comparison], alone: Callable[[Fault], Comparison],
                tokens: int) -> Iterable[Finding]:
    """Findings for the closest of the stacks that reproduce the output; the others are named as inseparable."""
    others = [" + ".join(f.id for f in h) for h in hits[1:]]
    also = "" if not others else f"; so do {', '.join(others[:3])}" + (f" and {len(others) - 3} more" if len(others) > 3 else "") + ": this call cannot tell them apart"
    exact = "bit for bit" if near[hits[0]].bit_identical else f"but for the rounding of {near[hits[0]].differing} of {near[hits[0]].elements} elements"
    for fault in hits[0]:
        with_others = "" if len(hits[0]) == 1 else f" (together with {', '.join(f.id for f in hits[0] if f is not fault)})"
        yield Finding(fault, CONSISTENT if others else PROVED, f"output, {tokens} sampled tokens",
                      f"this computation{with_others} reproduces the recorded output {exact}, the contract's does not{also}", effect=alone(fault).relative_l2)


def _stack(stack: tuple[Fault, ...]) -> KernelChange:
    change = stack[0].change
    for f in stack[1:]:
        change = change.then(f.change)
    return change
