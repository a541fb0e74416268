"""Evidence from global scales: the numbers that are passed against those that the recipe makes of the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..contracts import Contract
from ..faults import FAULTS, QUANTISED_WITH, SCALAR_FAULTS, SCALARS, Fault
from ..recipes import Plan
from ..reference import MoELayer
from .finding import CONSISTENT, PROVED, SUSPECTED, Finding
from .given import Given

RELATIVE = 2.0**-20  # products of a few float32 numbers, in another order


def positive(scales: Tensor) -> Tensor:
    """bool, of the same shape: where global scales are positive finite numbers, and no subnormal ones."""
    return torch.isfinite(scales) & (scales >= torch.finfo(torch.float32).tiny)


def not_loaded(given: Given) -> list[Finding]:
    """Global scales that are no positive finite numbers: no checkpoint is needed to see it."""
    out = []
    for key in (*SCALARS, QUANTISED_WITH):
        got = None if given.contract.weights.outer is False else given.contract.get(key, given.arguments)
        if got is None:
            continue
        got = got.float().reshape(-1)
        bad = ~positive(got)
        if bad.any():
            e = int(bad.nonzero()[0])
            out.append(Finding(FAULTS["global-not-loaded"], SUSPECTED if key == QUANTISED_WITH else PROVED, given.contract.operand(key).title,
                               f"{given.contract.operand(key).argument}: {int(bad.sum())} of {len(got)} are no positive number, the first is expert {e}'s: {got[e]:g}"))
    return joined(out)


def examine(given: Given, plan: Plan, part: MoELayer, others: Sequence[Mapping[str, Tensor]] = (), moved: Mapping[str, Tensor] | None = None) -> list[Finding]:
    """Compare every global scale that is passed. Nothing where the format has none. A finding each; `joined` puts them together.

    others: what other ranks would be passed; moved: what belongs to the experts that stand here, where all operands have them in another order
    """
    right = plan.scalars(part)
    lost = not_loaded(given)
    seen = {title for f in lost for title in f.where.split(", ")}
    out = [*lost, *(f for key in (*SCALARS, QUANTISED_WITH) if key in right and (f := _one(given, key, right, part, others, moved)) is not None and f.where not in seen)]
    if part.gate is not None and part.gate.global_scale is not None and not torch.equal(part.gate.global_scale, part.up.global_scale):
        ratio = (part.up.global_scale.float() / part.gate.global_scale.float())
        out.append(Finding(FAULTS["global-shared-by-halves"], PROVED, "checkpoint", f"w3's global scale is {_range(ratio)} times w1's, which both are read with"))
    return out


def quantised_with(given: Given, findings: Sequence[Finding]) -> Tensor | None:
    """float32 scalar: what the call says that its activations were multiplied with, where it is more than a suspicion that this is not the checkpoint's."""
    operand = next((o for o in given.contract.inputs if o.key == QUANTISED_WITH), None)
    if operand is None or not any(operand.title in f.where.split(", ") for f in findings if f.strength != SUSPECTED):
        return None
    return operand.get(given.arguments).float().reshape(-1)[0]


def unconfirmed(given: Given, findings: list[Finding]) -> list[Finding]:
    """The findings on a recorded call, where no sender says how its tokens were quantised: a number that the kernel does not read is then a suspicion."""
    title = next((o.title for o in given.contract.inputs if o.key == QUANTISED_WITH), None)
    return [replace(f, strength=SUSPECTED) if f.where == title else f for f in findings]


def _one(given: Given, key: str, right: dict[str, Tensor], part: MoELayer, others: Sequence[Mapping[str, Tensor]],
         moved: Mapping[str, Tensor] | None) -> Finding | None:
    contract: Contract = given.contract
    passed = contract.get(key, given.arguments)
    if passed is None:
        return None
    got, want = passed.float().reshape(-1).expand(given.experts), right[key]
    if key in contract.first_only:
        got, want = got[:1], want[:1]
    if torch.allclose(got, want, rtol=RELATIVE, atol=0.0):
        return None
    if moved is not None and torch.allclose(got, moved[key][: got.numel()], rtol=RELATIVE, atol=0.0):
        return Finding(FAULTS["experts-rolled"], PROVED, contract.operand(key).title, f"{contract.operand(key).argument}: the numbers of the experts that stand here")
    names: list[Fault] = []
    twin = "a2_gscale" if key == QUANTISED_WITH else key  # what strikes one factor before a quantisation strikes the other
    for fault in SCALAR_FAULTS:
        if twin in fault.strikes and (t := fault.passed(key, right, part)) is not None and torch.allclose(got, t[: got.numel()], rtol=RELATIVE, atol=0.0):
            names.append(fault)
    for other in others:
        if torch.allclose(got, other[key][: got.numel()], rtol=RELATIVE, atol=0.0):
            names.append(FAULTS["global-of-another-rank"])
            break
    ratio = got / want
    evidence = f"{contract.operand(key).argument}: passed {_range(got)}, the checkpoint's {_range(want)} (ratio {_range(ratio)})"
    names = names or [FAULTS["global-other"]]
    also = f"; {', '.join(f.id for f in names[1:])} would give the same numbers" if len(names) > 1 else ""
    if key == QUANTISED_WITH:
        also += f"; {_CALLERS}, then the tokens come in {_range(ratio)} times as large as w13 alpha takes them for"
    return Finding(names[0], CONSISTENT if also else PROVED, contract.operand(key).title, evidence + also)


_CALLERS = "the kernel does not read it for activations that are quantised already, but if the caller quantised them with it"


def joined(findings: list[Finding]) -> list[Finding]:
    """Findings of one fault as one: scalars that share it, or that go with operands. A suspicion proves nothing by standing beside proof."""
    out: dict[tuple[str, bool], Finding] = {}
    for f in findings:
        key = f.id, f.strength == SUSPECTED
        old = out.get(key)
        strength = f.strength if old is None or f.strength == old.strength else PROVED
        out[key] = f if old is None else replace(old, strength=strength, where=f"{old.where}, {f.where}", evidence=f"{old.evidence}; {f.evidence}")
    return list(out.values())


def _range(t: Tensor) -> str:
    low, high = t.min().item(), t.max().item()
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
