"""Evidence from global scales: the numbers that are passed against those that the recipe makes of the checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

from ..contracts import Contract
from ..faults import FAULTS, SCALAR_FAULTS, SCALARS
from ..recipes import Plan
from ..reference import MoELayer
from .finding import CONSISTENT, PROVED, Finding
from .given import Given

RELATIVE = 2.0**-20  # products of a few float32 numbers, in another order


def examine(given: Given, plan: Plan, part: MoELayer) -> list[Finding]:
    """Compare every global scale that the kernel reads. Nothing where the format has none."""
    right = plan.scalars(part)
    out = [f for key in SCALARS if key in right and (f := _one(given, key, right, part)) is not None]
    if part.gate is not None and part.gate.global_scale is not None and not torch.equal(part.gate.global_scale, part.up.global_scale):
        ratio = (part.up.global_scale.float() / part.gate.global_scale.float())
        out.append(Finding(FAULTS["global-shared-by-halves"], PROVED, "checkpoint", f"w3's global scale is {_range(ratio)} times w1's, which both are read with"))
    return _joined(out)


def _one(given: Given, key: str, right: dict[str, Tensor], part: MoELayer) -> Finding | None:
    contract: Contract = given.contract
    passed = contract.get(key, given.arguments)
    if passed is None:
        return None
    got, want = passed.float().reshape(-1).expand(given.experts), right[key]
    if key in contract.first_only:
        got, want = got[:1], want[:1]
    if torch.allclose(got, want, rtol=RELATIVE, atol=0.0):
        return None
    names = []
    for fault in SCALAR_FAULTS:
        if key in fault.strikes and (t := fault.passed(key, right, part)) is not None and torch.allclose(got, t[: got.numel()], rtol=RELATIVE, atol=0.0):
            names.append(fault)
    ratio = got / want
    evidence = f"{contract.operand(key).argument}: passed {_range(got)}, the checkpoint's {_range(want)} (ratio {_range(ratio)})"
    if not names:
        return Finding(FAULTS["global-other"], PROVED, contract.operand(key).title, evidence)
    also = f"; {', '.join(f.id for f in names[1:])} would give the same numbers" if len(names) > 1 else ""
    return Finding(names[0], CONSISTENT if also else PROVED, contract.operand(key).title, evidence + also)


def _joined(findings: list[Finding]) -> list[Finding]:
    """Scalars that share a fault share a finding."""
    out: dict[str, Finding] = {}
    for f in findings:
        old = out.get(f.id)
        strength = f.strength if old is None or f.strength == old.strength else PROVED
        out[f.id] = f if old is None else Finding(f.fault, strength, f"{old.where}, {f.where}", f"{old.evidence}; {f.evidence}")
    return list(out.values())


def _range(t: Tensor) -> str:
    low, high = t.min().item(), t.max().item()
    return f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
