"""Evidence from the output: does it follow from what was passed, and if not, which broken computation reproduces it?"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import combinations

import torch
from torch import Tensor

from ..contracts import Seen
from ..faults import FAULTS, KERNEL_FAULTS, Fault, KernelChange
from ..metrics import Comparison, compare
from ..reference import Trace
from .finding import CONSISTENT, PROVED, Finding
from .given import Given
from .floor import floor_words, follows
from .region import Region, wrong_region

SAMPLE = 4  # tokens on which hypotheses about the computation are tried
DEPTH = 2   # broken computations of which all stacks are tried
DEEPER = 3  # and this deep from the closest of those
KEPT = 6    # how many of the closest are built upon
FEW_WEIGHTS = 10**8       # dequantised for one hypothesis: about a second
ALL_WEIGHTS = 3 * 10**8  # dequantised for the tokens that are emulated at all
MOST_WEIGHTS = 4 * 10**9  # dequantised for all of them


def sample_tokens(given: Given, count: int, output: Tensor | None = None) -> Tensor:
    """int64, ascending: up to `count` tokens spread over the call. Tokens with an expert on this rank come before others, since only
    they say anything; some whose output is not finite, all zero or unwritten come first, so that one bad token of thousands is seen."""
    here = given.here.any(1)
    odd = torch.zeros_like(here)
    if output is not None:  # cheap looks at every token: not finite, all zero though experts are here, or left as the memory was
        odd = ~torch.isfinite(output).all(1) | (here & (output == 0).all(1))
        if (memory := given.memory) is not None and memory.shape == output.shape:
            odd |= here & (memory == output).all(1)
    chosen = _spread(odd, max(1, count // 8))
    for pool in (here, ~here):
        free = pool.clone()
        free[chosen] = False
        chosen = torch.cat([chosen, _spread(free, count - chosen.numel())])
    while chosen.numel() > 1 and given.weights(chosen) > ALL_WEIGHTS:
        chosen = chosen[: chosen.numel() * 2 // 3 or 1]  # a large layer: fewer tokens, which touch fewer experts; the odd ones stay
    return chosen.sort().values


def _spread(mask: Tensor, count: int) -> Tensor:
    """Up to `count` of the positions where `mask` is True, evenly spread."""
    at = mask.nonzero().flatten()
    return at[torch.linspace(0, at.numel() - 1, min(count, at.numel())).round().long()] if at.numel() and count > 0 else at[:0]


@dataclass(frozen=True)
class OutputEvidence:
    """comparison of the recorded output with the emulation of what was passed; whether it follows from it; findings if not.

    tokens  which were compared, of `total`
    trace   the emulation for them
    pairs   whether pairs of broken computations were tried
    open    what was not tried, and where NaN or inf stand
    floor   the derived floor against what was measured, in words
    """

    comparison: Comparison
    follows: bool
    findings: tuple[Finding, ...]
    tokens: Tensor
    trace: Trace
    total: int
    pairs: bool = True
    open: tuple[str, ...] = ()
    floor: str = ""


def examine(given: Given, output: Tensor, most_tokens: int = 64) -> OutputEvidence:
    """Emulate the call (on up to `most_tokens` tokens) and compare bit for bit; where it differs, search the broken computations."""
    tokens = sample_tokens(given, most_tokens, output)
    seen = given.see(tokens)
    trace = seen.trace(keep=True)
    got, emulated = output[tokens], trace.output
    comparison, words = compare(got, emulated), floor_words(got, emulated, given.k, seen.roundings)
    if follows(got, emulated, given.k, seen.roundings):
        return OutputEvidence(comparison, True, (), tokens, trace, len(output), floor=words)
    memory, unwritten = given.memory, None
    if memory is not None and memory.shape == output.shape and compare(output, memory).bit_identical:
        unwritten = PROVED, "the output equals, bit for bit, the memory that the call was given to write into"
    elif not output.any():
        unwritten = CONSISTENT, "every element of the output is zero; the operands do not give zeros"
    if unwritten:
        finding = Finding(FAULTS["output-unwritten"], unwritten[0], "all tokens", unwritten[1])
        return OutputEvidence(comparison, False, (finding,), tokens, trace, len(output), floor=words)
    region = wrong_region(got, emulated, given.k, seen.roundings)
    if region is not None and (finding := _unwritten_part(region, got, emulated, None if memory is None or memory.shape != output.shape else memory[tokens], tokens)):
        return OutputEvidence(comparison, False, (finding,), tokens, trace, len(output), floor=words)
    findings, not_tried = _search(given, got, emulated, tokens)
    if not findings and region is not None:
        only = f"{region.text(tokens)}; everywhere else the output follows from what was passed"
        if region.tile is None:
            not_tried = (*not_tried, f"the output is wrong in {only}")
        else:
            findings = (Finding(FAULTS["output-tile"], CONSISTENT, "output", only),)
    bad = (~torch.isfinite(output)).nonzero() if not comparison.masks_equal else output.new_zeros(0, 2)
    where = () if not len(bad) else (f"NaN or inf in {bad[:, 0].unique().numel()} of {output.shape[0]} tokens, first in token {bad[0, 0]}, column {bad[0, 1]}",)
    return OutputEvidence(comparison, False, findings, tokens, trace, len(output), not not_tried, (*not_tried, *where), words)


def _unwritten_part(bad: Region, got: Tensor, emulated: Tensor, memory: Tensor | None, tokens: Tensor) -> Finding | None:
    """A part of the output that still holds the memory it was to be written into, or zeros, where the rest follows."""
    there = got[bad.mask]
    if memory is not None and torch.equal(there, memory[bad.mask]):
        return Finding(FAULTS["output-partly-unwritten"], PROVED, "output", f"{bad.text(tokens)} equal the memory that the call was given; everywhere else the output follows")
    if not there.any() and bool((emulated[bad.mask] != 0).any()):
        return Finding(FAULTS["output-partly-unwritten"], CONSISTENT, "output", f"{bad.text(tokens)} are zero; everywhere else the output follows")
    return None


def _search(given: Given, got: Tensor, emulated: Tensor, tokens: Tensor) -> tuple[tuple[Finding, ...], tuple[str, ...]]:
    """Stacks of broken computations, shallow ones first, that reproduce the output: on the tokens that are furthest off, then on all.

    (findings, what was not tried)
    """
    few = _furthest(given, got, emulated, tokens)
    at = torch.isin(tokens, few)
    # With several ranks a broken computation may number experts from elsewhere, so all of them are needed.
    seen = given.see(tokens) if given.base.parallel.ep_size == 1 else given.contract.see(given.arguments).pick(tokens)
    want, plain = got[at], emulated[at]
    sample = seen.pick(at.nonzero().flatten())

    def output(stack: tuple[Fault, ...], of: Seen) -> Tensor:
        return _stack(stack).output(of)

    single = {f: output((f,), sample) for f in KERNEL_FAULTS}
    active = [f for f in KERNEL_FAULTS if not compare(single[f], plain).bit_identical]
    reachable = ~torch.isfinite(torch.stack([plain, *single.values()])).all(0)
    if bool((~torch.isfinite(want) & ~reachable).any()):
        return (), ()  # none of them makes NaN or inf there
    spent, most = 0, max(len(active), MOST_WEIGHTS // given.weights(few))
    distance: dict[tuple[Fault, ...], float] = {}
    for depth in range(1, DEEPER + 1):
        stacks = list(combinations(active, depth)) if depth <= DEPTH else _built_upon(distance, active, depth)
        if (spent := spent + len(stacks)) > most:
            return (), (f"{'pairs' if depth == 2 else 'triples'} of broken computations were not tried: {len(stacks)} emulations of a layer of this size",)
        made = {s: single[s[0]] if depth == 1 else output(s, sample) for s in stacks}
        distance |= {s: _distance(o, want) for s, o in made.items()}
        hits = [s for s, o in made.items() if follows(o, want, given.k, seen.roundings)]
        near = {h: compare(o, got) for h in hits if follows(o := output(h, seen), got, given.k, seen.roundings)}
        if near:
            return tuple(_reproduced(sorted(near, key=lambda h: near[h].differing), near, lambda f: compare(single[f], plain), len(tokens))), ()
    return (), ()


def _distance(got: Tensor, want: Tensor) -> float:
    """How far two outputs are apart in direction: faults that are still hidden may scale it. Smaller is closer."""
    c = compare(got, want)
    return 1.0 - c.cosine if c.masks_equal and c.cosine == c.cosine else 2.0


def _built_upon(distance: Mapping[tuple[Fault, ...], float], active: list[Fault], depth: int) -> list[tuple[Fault, ...]]:
    """Stacks of `depth` that contain one of the closest smaller ones: explaining away, not trying all products."""
    closest = sorted((s for s in distance if len(s) == depth - 1), key=lambda s: distance[s])[:KEPT]
    order = {f: i for i, f in enumerate(active)}
    found = {tuple(sorted((*s, f), key=order.__getitem__)) for s in closest for f in active if f not in s}
    return sorted(found, key=lambda s: [order[f] for f in s])


def _furthest(given: Given, got: Tensor, emulated: Tensor, tokens: Tensor) -> Tensor:
    """Of `tokens`, up to SAMPLE whose output is furthest from the emulation; fewer, where their experts would be too many weights."""
    a, b = (t.double().nan_to_num(1e30, 1e30, -1e30) for t in (got, emulated))
    order = tokens[(a - b).norm(dim=1).argsort(descending=True)]
    for n in range(min(SAMPLE, order.numel()), 1, -1):
        if given.weights(order[:n]) <= FEW_WEIGHTS:
            return order[:n].sort().values
    return order[:1]


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
