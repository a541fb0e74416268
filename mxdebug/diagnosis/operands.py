"""Evidence from operands: what each one should be, what it is, and which fault of the catalogue is the difference."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..contracts import Contract
from ..faults import FAULTS, OPERAND_FAULTS, Fault
from ..recipes import Form, Plan
from ..reference import MoELayer, Parallel
from .finding import PROVED, Finding
from .recover import Recovered, Source, recover

SLOTS = ("layout", "values", "order", "padding", "shuffle")


@dataclass(frozen=True)
class OperandEvidence:
    """What looking at the operands gave.

    findings   grouped by fault
    broken     keys of operands that are not what the recipe makes, explained or not
    unexplained keys of operands whose bytes no reading explains
    equal      keys whose bytes equal the recipe's
    same_values keys whose bytes differ but mean the same weights
    open       ambiguities
    """

    findings: tuple[Finding, ...]
    broken: tuple[str, ...]
    unexplained: tuple[str, ...]
    equal: tuple[str, ...]
    same_values: tuple[str, ...]
    open: tuple[str, ...]
    ep_rank: int | None


def examine(contract: Contract, plan: Plan, source: Source, arguments: Mapping[str, Any]) -> OperandEvidence:
    """Compare every operand of a call with what the recipe makes of the checkpoint."""
    keys = [o.key for o in contract.operands]
    actual = {o.key: o.get(arguments) for o in contract.operands}
    part = source.layer.part(source.parallel)
    expected_present = {k: source.logical(k, source.parallel.tp_rank) is not None for k in keys}
    equal, broken, missing, unexpected = [], [], [], []
    for key in keys:
        t = actual[key]
        if expected_present[key] and (t is None or (key.endswith("bias") and not t.any() and source.logical(key, source.parallel.tp_rank).any())):
            missing.append(key)
        elif not expected_present[key]:
            unexpected += [key] if t is not None and bool(t.any()) else []
        elif _equal(key, t, plan, part):
            equal.append(key)
        else:
            broken.append(key)
    same = _same_values(contract, plan, part, arguments, broken)
    broken = [k for k in broken if k not in same]
    recovered = {k: recover(k, actual[k], plan.forms[k], source) for k in broken}
    # An operand equal to the recipe's holds the experts that it should.
    findings, ep_rank, ambiguous = _name(contract, recovered, source)
    if missing:
        norms = ", ".join(f"{contract.operand(k).title}: norm {source.logical(k, source.parallel.tp_rank).float().norm():.3f} in the checkpoint, "
                          + ("none" if actual[k] is None else "zeros") + " in the call" for k in missing)
        findings.append(Finding(FAULTS["bias-missing"], PROVED, ", ".join(contract.operand(k).title for k in missing), norms))
    findings.extend(Finding(FAULTS["bias-missing"], PROVED, contract.operand(k).title, "the call passes a bias, the checkpoint has none") for k in unexpected)
    return OperandEvidence(
        findings=tuple(findings), broken=(*broken, *missing, *unexpected), unexplained=tuple(k for k, r in recovered.items() if not r.complete),
        equal=tuple(equal), same_values=tuple(same), open=tuple(ambiguous), ep_rank=ep_rank)


def _equal(key: str, t: Tensor, plan: Plan, part: MoELayer) -> bool:
    from ..recipes import logical_operands

    logical, form = logical_operands(part)[key], plan.forms[key]
    if t.numel() != logical.shape[0] * (form.halves * form.padded_rows) * (form.padded_columns or 1):
        return False
    # One expert at a time: a converted layer need not be in memory a second time.
    flat = t.reshape(t.shape[0], -1)
    return t.shape[0] == logical.shape[0] and all(torch.equal(flat[e], form.apply(logical[e:e + 1]).reshape(-1).to(t.dtype)) for e in range(t.shape[0]))


def _same_values(contract: Contract, plan: Plan, part: MoELayer, arguments: Mapping[str, Any], broken: list[str]) -> list[str]:
    """Keys among `broken` whose weights dequantise to the checkpoint's all the same: other encodings, or other bytes under zeros."""
    if not {"w13", "w13_scale", "w2", "w2_scale"} & set(broken):
        return []
    seen = contract.decode(arguments)
    if seen.experts != part.experts:
        return []
    pi, ph = plan.padded
    out: list[str] = []
    for keys, pairs in ((("w13", "w13_scale"), ((seen.gate, part.gate, pi, ph), (seen.up, part.up, pi, ph))), (("w2", "w2_scale"), ((seen.down, part.down, ph, pi),))):
        if set(keys) & set(broken) and all(_same_matrix(a, b, rows, columns, seen, e) for a, b, rows, columns in pairs for e in range(part.experts)):
            out += [k for k in keys if k in broken]
    return out


def _same_matrix(seen: Any, want: Any, rows: int, columns: int, layer: MoELayer, expert: int) -> bool:
    right = want[expert].dequantise(scale=layer.scale)
    right = torch.nn.functional.pad(right, (0, columns - right.shape[1], 0, rows - right.shape[0]))
    return torch.equal(seen[expert].dequantise(scale=layer.scale), right)


def _name(contract: Contract, recovered: Mapping[str, Recovered], source: Source) -> tuple[list[Finding], int | None, list[str]]:
    """Turn recovered forms into findings, grouped by fault; operands that share a fault share a finding."""
    struck: dict[str, list[str]] = {}
    notes: dict[str, list[str]] = {}
    ambiguous: list[str] = []

    def strike(fault: str, key: str, note: str = "") -> None:
        struck.setdefault(fault, []).append(key)
        if note:
            notes.setdefault(fault, []).append(note)

    for key, r in recovered.items():
        title = contract.operand(key).title
        if r.explained == 0.0:
            continue
        for slot in SLOTS:
            found, wanted = getattr(r.form, slot), getattr(r.expected, slot)
            if found != wanted:
                strike(_fault_of(slot, found, key).id, key)
        if r.permutation is not None:
            strike("rows-unnamed", key, _describe(r.permutation, r.form))
        if r.tp_rank != r.expected_tp_rank:
            strike("wrong-tp-slice", key, f"{title} holds rank {r.tp_rank}'s slice, the call is tp_rank {r.expected_tp_rank}")
        if r.alternatives:
            ambiguous.append(f"{title}: {len(r.alternatives)} other reading(s) explain the same bytes, e.g. "
                             + ", ".join(s.name for s in r.alternatives[0].stages) + "; this data cannot tell them apart")
    moved = {k: r.experts for k, r in recovered.items() if r.explained > 0 and any(e >= 0 and e != w for e, w in zip(r.experts, r.expected_experts))}
    ep_rank = _experts(moved, recovered, contract, source, strike)
    findings = []
    for id, keys in struck.items():
        titles = [contract.operand(k).title for k in keys]
        partial = [k for k in keys if not recovered[k].complete]
        share = "every expert" if not partial else ", ".join(f"{recovered[k].explained:.0%} of experts in {contract.operand(k).title}" for k in partial)
        n = len(recovered[keys[0]].experts)
        evidence = "; ".join(notes.get(id, ())) or f"bytes equal the checkpoint's in this form, for {share} ({n})"
        findings.append(Finding(FAULTS[id], PROVED, ", ".join(titles), evidence))
    return findings, ep_rank, ambiguous


def _fault_of(slot: str, value: Any, key: str) -> Fault:
    for fault in OPERAND_FAULTS:
        if key in fault.strikes and fault.slots and slot in fault.slots and fault.slots[slot] == value:
            return fault
    return FAULTS["layout-other" if slot == "layout" else "rows-unnamed"]


def _experts(moved: Mapping[str, tuple[int, ...]], recovered: Mapping[str, Recovered], contract: Contract, source: Source, strike: Any) -> int | None:
    """Experts that are not where they should be: the whole layer of another rank, all operands rolled alike, or one out of step."""
    if not moved:
        return None
    p, local = source.parallel, len(next(iter(moved.values())))
    weights = {k for k in ("w13", "w13_scale", "w2", "w2_scale")}
    maps = set(moved.values())
    together = len(maps) == 1 and weights <= set(moved)
    for key, experts in moved.items():
        title, shown = contract.operand(key).title, ",".join(map(str, experts[:8])) + (",..." if local > 8 else "")
        rank, rest = divmod(experts[0], local)
        whole_rank = rest == 0 and experts == tuple(range(experts[0], experts[0] + local))
        if together and whole_rank and p.ep_size > 1:
            strike("ep-rank", key, f"{title} holds experts {shown}: those of rank {rank}, but ep_rank is {p.ep_rank}")
        elif whole_rank and p.ep_size > 1:
            strike("wrong-ep-slice", key, f"{title} holds experts {shown}: those of rank {rank}, but ep_rank is {p.ep_rank}")
        else:
            strike("experts-rolled" if together else "operand-of-another-expert", key, f"{title} holds experts {shown} of the checkpoint")
    return divmod(next(iter(maps))[0], local)[0] if together else None


def _describe(permutation: Tensor, form: Form) -> str:
    shown = ",".join(str(int(i)) for i in permutation[:12])
    return f"{form.layout.name}; physical rows hold logical rows {shown},... of [w1; w3]" if form.halves == 2 else f"physical rows hold rows {shown},..."


def moved_rank(parallel: Parallel, ep_rank: int) -> Parallel:
    """The position of the rank whose experts the operands hold."""
    return Parallel(parallel.tp_size, parallel.tp_rank, parallel.ep_size, ep_rank)
