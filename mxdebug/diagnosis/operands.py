"""Evidence from operands: what each one should be, what it is, and which fault of the catalogue is the difference."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..contracts import Contract
from ..faults import CUT_FAULT, FAULTS, LAYER_FAULTS, OPERAND_FAULTS, Fault, cuts_block, split_evenly
from ..formats import BlockTensor
from ..layouts import GROUPS_64, INTERLEAVED_UP, LINEAR, SM90_SCALE_FOLD, SM90_WEIGHT_INTERLEAVE, UP_GATE, Layout, SWIZZLE_128x4
from ..recipes import PAD_ALL, Form, Plan
from ..reference import MoELayer
from .damage import find_damage, nan_codes
from .finding import CONSISTENT, DIFFERENT, EQUAL, PROVED, SAME_VALUES, UNREAD, Finding
from .recover import SLOTS, Recovered, Source, padding_not_zero, recover, rows_in_place


@dataclass(frozen=True)
class OperandEvidence:
    """What looking at the operands gave.

    findings    grouped by fault
    alone       (fault id, operand key) -> what makes the operand with this fault only, where it has several, for some positions; None: it cannot be made
    broken      keys of operands that are not what the recipe makes, explained or not
    unexplained keys of operands whose bytes no reading explains -> what stands there
    foreign     those of them in which no row of the checkpoint was found
    equal       keys whose bytes equal the recipe's
    same_values keys whose bytes differ but mean the same weights
    unread      keys of operands that the kernel does not read at this position
    open        ambiguities
    experts     which of the checkpoint's experts stand here, where all weights have them in the same other order than the recipe
    """

    findings: tuple[Finding, ...]
    alone: Mapping[tuple[str, str], Callable[[list[int]], Tensor | None]]
    broken: tuple[str, ...]
    unexplained: Mapping[str, str]
    foreign: frozenset[str]
    equal: tuple[str, ...]
    same_values: tuple[str, ...]
    unread: tuple[str, ...]
    open: tuple[str, ...]
    experts: tuple[int, ...] | None = None

    @property
    def states(self) -> tuple[tuple[str, str], ...]:
        """(operand key, what the comparison gave), as `Diagnosis.operands` has it."""
        groups = ((EQUAL, self.equal), (SAME_VALUES, self.same_values), (DIFFERENT, self.broken), (UNREAD, self.unread))
        return tuple((key, state) for state, keys in groups for key in keys)


def examine(contract: Contract, plan: Plan, source: Source, arguments: Mapping[str, Any]) -> OperandEvidence:
    """Compare every operand of a call with what the recipe makes of the checkpoint."""
    rank, experts = source.parallel.tp_rank, contract.operand("w13").get(arguments).shape[0]
    # The kernel takes pointers: scales may come in any shape, only the order of their bytes counts.
    actual = {o.key: None if t is None else (t if o.key.endswith("bias") else o.payload(t)).reshape(experts, -1)
              for o in contract.operands if o.key in plan.forms for t in (o.get(arguments),)}
    part = source.layer.part(source.parallel)
    equal, broken, missing, unexpected, unread = [], [], [], [], []
    for key, t in actual.items():
        wants = source.shape(key, rank) is not None and (not key.endswith("bias") or bool(source.logical(key, rank).any()))
        has = t is not None and (not key.endswith("bias") or bool(t.any()))
        if t is not None and _equal(t, source, key, plan.forms[key]):
            equal.append(key)
        elif key == "w2_bias" and contract.parallel(arguments).tp_rank != 0:
            unread += [key] if has or wants else []  # vLLM itself fills it with zeros there
        elif has != wants:
            (unexpected if has else missing).append(key)
        elif has:
            broken.append(key)
    same = _same_values(contract, plan, part, arguments, broken)
    broken = [k for k in broken if k not in same]
    even = Source(source.layer, source.parallel, split_evenly) if cuts_block(source.layer, source.parallel) else None
    struck = [k for k in broken if k in CUT_FAULT.strikes] if even else []
    # Where one operand is the even cut byte for byte, all are: one engine cuts all of them alike.
    cut = struck if any(_equal(actual[k], even, k, plan.forms[k]) for k in struck) else []
    recovered = {k: recover(k, actual[k], plan.forms[k], even if k in cut else source) for k in broken}
    recovered = {k: replace(r, made_from=CUT_FAULT.id) if r.complete and k in cut else r for k, r in recovered.items()}
    recovered = _prefer_shared({k: r if r.complete else _made_from(r, actual[k], plan, source, even if k in struck and not cut else None)
                                for k, r in recovered.items()}, contract)
    findings, alone, ambiguous = _name(contract, recovered, source, {k: not actual[k].any() for k in broken})
    if dirty := {k: n for k, r in recovered.items() if r.complete and r.form.padding != PAD_ALL and (n := padding_not_zero(k, actual[k], r))[0]}:
        counts = ", ".join(f"{contract.operand(k).title}: {bad} of {total}" for k, (bad, total) in dirty.items())
        findings.append(Finding(FAULTS["padding-not-zero"], PROVED, ", ".join(contract.operand(k).title for k in dirty), f"not zero in the padding: {counts}"))
    if missing:
        norms = ", ".join(f"{contract.operand(k).title}: norm {source.logical(k, rank).float().norm():.3f} in the checkpoint, "
                          + ("none" if actual[k] is None else "zeros") + " in the call" for k in missing)
        findings.append(Finding(FAULTS["bias-missing"], PROVED, ", ".join(contract.operand(k).title for k in missing), norms))
    if unexpected:
        norms = ", ".join(f"{contract.operand(k).title}: norm {actual[k].float().norm():.3f} in the call, none in the checkpoint" for k in unexpected)
        findings.append(Finding(FAULTS["bias-unexpected"], PROVED, ", ".join(contract.operand(k).title for k in unexpected), norms))
    hurt = {k: d for k, r in recovered.items() if not r.complete
            and (d := find_damage(actual[k], r, source, nan_codes(contract.weights) if k.endswith("_scale") else ()))}
    for fault in dict.fromkeys(d.fault for d in hurt.values()):
        keys = [k for k, d in hurt.items() if d.fault == fault]
        findings.append(Finding(FAULTS[fault], PROVED if any(hurt[k].strength == PROVED for k in keys) else CONSISTENT,
                                ", ".join(contract.operand(k).title for k in keys), "; ".join(f"{contract.operand(k).title}: {hurt[k].text}" for k in keys)))
    stands = {k: _stands_there(contract.operand(k).title, actual[k], r, source) for k, r in recovered.items() if not r.complete and k not in hurt}
    return OperandEvidence(findings=tuple(findings), alone=alone, broken=(*broken, *missing, *unexpected), unexplained={k: t for k, (t, _) in stands.items()},
                           foreign=frozenset(k for k, (_, known) in stands.items() if not known), equal=tuple(equal),
                           same_values=tuple(same), unread=tuple(unread), open=tuple(ambiguous), experts=_order(recovered))


def _order(recovered: Mapping[str, Recovered]) -> tuple[int, ...] | None:
    """The one other order in which all weights have the checkpoint's experts."""
    orders = {recovered[k].experts if k in recovered and recovered[k].complete else () for k in ("w13", "w13_scale", "w2", "w2_scale")}
    return orders.pop() or None if len(orders) == 1 else None


def _prefer_shared(recovered: dict[str, Recovered], contract: Contract) -> dict[str, Recovered]:
    """Where several readings explain an operand, take the one whose faults other operands have too: one mistake is likelier than two."""
    def faults(key: str, form: Form) -> set[str]:
        expected = recovered[key].expected
        return {_fault_of(slot, form, expected, key, contract).id for slot in SLOTS if getattr(form, slot) != getattr(expected, slot)}

    out = dict(recovered)
    for key, r in recovered.items():
        others = [f for k, o in recovered.items() if k != key for f in faults(k, o.form)]
        readings = (r.form, *r.alternatives)
        best = max(readings, key=lambda form: sum(others.count(f) for f in faults(key, form)))  # the first of equals
        if best is not r.form:
            out[key] = replace(r, form=best, alternatives=tuple(f for f in readings if f is not best))
    return out


def _made_from(r: Recovered, actual: Tensor, plan: Plan, source: Source, even: Source | None) -> Recovered:
    """The reading of a checkpoint that was changed before the recipe, or cut otherwise, where that explains what the checkpoint itself does not."""
    if even is not None and (other := recover(r.key, actual, plan.forms[r.key], even)).complete:
        return replace(other, made_from=CUT_FAULT.id)
    for fault in LAYER_FAULTS if r.key.endswith("_scale") and source.layer.up.global_scale is not None else ():
        other = recover(r.key, actual, plan.forms[r.key], Source(fault.layer(source.layer), source.parallel))
        if other.complete:
            return replace(other, made_from=fault.id)
    return r


def _stands_there(title: str, actual: Tensor, r: Recovered, source: Source) -> tuple[str, bool]:
    """(in words, what an operand holds that no reading explains; whether any of it is the checkpoint's)."""
    lost = [p for p, e in enumerate(r.experts) if e < 0]
    which = "" if len(lost) == len(r.experts) else f" of expert{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost[:8]))}{',...' if len(lost) > 8 else ''}"
    want, placed, moved, zero, foreign = rows_in_place(r.key, actual, r.form, source, lost[0])
    unit = "values" if r.form.layout is None else "rows"
    counts = [f"{placed} of {want} {unit} are in place", *(f"{n} {text}" for n, text in ((moved, "stand elsewhere"), (zero, "are zero")) if n)]
    if foreign >= 0:
        counts.append(f"others are not the checkpoint's, the first is {unit[:-1]} {foreign}")
    layout = "" if r.form.layout is None else f", read in the layout {r.form.layout.name}"
    return f"{title}: no known change of the checkpoint gives the bytes{which}. In expert {lost[0]}{layout}, " + ", ".join(counts), bool(r.explained or placed or moved)


def _equal(t: Tensor, source: Source, key: str, form: Form) -> bool:
    """Whether [E, n] holds the experts that it should, in this form."""
    rank, wanted = source.parallel.tp_rank, source.expected_experts
    if source.shape(key, rank) is None or t.shape[0] != len(wanted):
        return False
    # One expert at a time: a converted layer need not be in memory a second time.
    return all(torch.equal(row, form.apply(source.logical(key, rank, slice(e, e + 1))).reshape(-1).to(t.dtype)) for row, e in zip(t, wanted))


def _same_values(contract: Contract, plan: Plan, part: MoELayer, arguments: Mapping[str, Any], broken: list[str]) -> list[str]:
    """Keys among `broken` whose weights dequantise to the checkpoint's all the same: other encodings, or other bytes under zeros."""
    if not {"w13", "w13_scale", "w2", "w2_scale"} & set(broken):
        return []
    if contract.operand("w13").get(arguments).shape[0] != part.experts:
        return []
    pi, ph = plan.padded
    suspects = {"w13", "w13_scale"} & set(broken), {"w2", "w2_scale"} & set(broken)
    same = [bool(keys) for keys in suspects]
    for e in range(part.experts):  # one expert at a time, and no further than the first that differs
        if not any(same):
            return []
        seen = contract.decode(arguments, experts=[e])
        same[0] = same[0] and all(_same_matrix(a, b, e, pi, ph, seen) for a, b in ((seen.gate, part.gate), (seen.up, part.up)) if a and b)
        same[1] = same[1] and _same_matrix(seen.down, part.down, e, ph, pi, seen)
    return [k for keys, alike in zip(suspects, same) for k in broken if alike and k in keys]


def _same_matrix(seen: BlockTensor, want: BlockTensor, expert: int, rows: int, columns: int, layer: MoELayer) -> bool:
    got, right = (replace(t, global_scale=None if t.global_scale is None else torch.ones(())).dequantise(scale=layer.scale) for t in (seen[0], want[expert]))
    return torch.equal(got, torch.nn.functional.pad(right, (0, columns - right.shape[1], 0, rows - right.shape[0])))


def _name(contract: Contract, recovered: Mapping[str, Recovered], source: Source,
          blank: Mapping[str, bool]) -> tuple[list[Finding], dict[tuple[str, str], Callable[[list[int]], Tensor | None]], list[str]]:
    """Turn recovered forms into findings, grouped by fault; operands that share a fault share a finding. blank: operands that are all zeros."""
    struck: dict[str, list[str]] = {}
    notes: dict[str, dict[str, list[str]]] = {}  # fault id -> what was seen -> the operands in which it was seen
    unsure: dict[str, set[str]] = {}
    ambiguous: list[str] = []

    def strike(fault: str, key: str, note: str = "") -> None:
        struck.setdefault(fault, []).append(key)
        if note:
            notes.setdefault(fault, {}).setdefault(note, []).append(contract.operand(key).title)

    for key, r in recovered.items():
        title = contract.operand(key).title
        if r.explained == 0.0:
            continue
        for slot in SLOTS:
            found, wanted = getattr(r.form, slot), getattr(r.expected, slot)
            if found != wanted:
                id = _fault_of(slot, r.form, r.expected, key, contract).id
                strike(id, key, _NOTES[id].format(found.name) if id in _NOTES else "")
                if any(getattr(form, slot) != found for form in r.alternatives if not _same_map(form, r.form)) or blank[key]:
                    unsure.setdefault(id, set()).add(key)
        if r.made_from == CUT_FAULT.id:
            share, block = source.layer.intermediate // source.parallel.tp_size, source.layer.down.format.block
            strike(r.made_from, key, f"bytes equal the checkpoint's, cut into equal shares of {share}, which are no whole blocks of {block}")
        elif r.made_from:
            strike(r.made_from, key)
        if r.permutation is not None:
            strike("rows-unnamed", key, _describe(r.permutation, r.form, r.expected, key))
        if r.tp_rank != r.expected_tp_rank:
            strike("wrong-tp-slice", key, f"holds rank {r.tp_rank}'s slice, stated is tp_rank {r.expected_tp_rank}")
        twins = [form for form in r.alternatives if _same_map(form, r.form)]
        if twins:
            ambiguous.append(f"{title}: at this size the same bytes as " + " or ".join(" | ".join(s.name for s in form.stages) for form in twins[:2]))
        if others := [form for form in r.alternatives if form not in twins]:
            ambiguous.append(f"{title}: {len(others)} other reading(s) explain the same bytes, e.g. "
                             + " | ".join(s.name for s in others[0].stages) + "; this data cannot tell them apart")
        if blank[key]:
            ambiguous.append(f"{title}: every byte is zero, which memory that was never written also gives")
    moved = {k: r.experts for k, r in recovered.items() if r.explained > 0 and any(e >= 0 and e != w for e, w in zip(r.experts, r.expected_experts))}
    _experts(moved, source, strike)
    several = {k for keys in struck.values() for k in keys if sum(k in other for other in struck.values()) > 1}
    # Made when they are asked for: all at once would be the layer again for each fault.
    alone = {(id, k): partial(_alone, id, recovered[k], source, contract) for id, keys in struck.items() for k in keys if k in several}
    # An operand that proves a fault speaks for those that could be read otherwise too.
    return [_finding(id, keys, contract, recovered, notes.get(id, {}), unsure.get(id) == set(keys), several) for id, keys in struck.items()], alone, ambiguous


# What a fault's title leaves open.
_NOTES = {"layout-other": "the layout is {}, every byte equals the checkpoint's in it", "scales-off": "bytes equal the checkpoint's {}"}


def _same_map(a: Form, b: Form) -> bool:
    """Whether two forms put every byte in the same place at their size, whatever the data."""
    if a.columns is None or a.values != b.values:
        return False
    probe = torch.randint(1, 256, (1, a.halves * a.rows, a.columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return torch.equal(a.apply(probe).flatten(), b.apply(probe).flatten())


def _finding(id: str, keys: list[str], contract: Contract, recovered: Mapping[str, Recovered], notes: Mapping[str, Sequence[str]], unsure: bool,
             several: set[str]) -> Finding:
    n = len(recovered[keys[0]].experts)
    partial = [k for k in keys if not recovered[k].complete]
    share = f"every expert ({n})" if not partial else ", ".join(f"{sum(e >= 0 for e in recovered[k].experts)} of {n} experts in {contract.operand(k).title}" for k in partial)
    evidence = "; ".join(text if len(notes) == 1 else f"{', '.join(titles)}: {text}" for text, titles in notes.items())
    evidence = evidence or f"bytes equal the checkpoint's in this form, for {share}"
    if several:  # then the fault's title does not say the whole form
        evidence += "".join(f"; {contract.operand(k).title}: {' | '.join(s.name for s in recovered[k].form.stages)}" for k in keys if k in several)
    if unsure:
        evidence += "; not in this form alone, see below"
    return Finding(FAULTS[id], CONSISTENT if unsure else PROVED, ", ".join(contract.operand(k).title for k in keys), evidence,
                   **_words(id, keys, recovered[keys[0]].expected, contract))


# How a title goes on ("the kernel reads ..."), and what to call for it.
_READS = {SM90_SCALE_FOLD: "the SM90 fold", SM90_WEIGHT_INTERLEAVE: "the SM90 interleave", SWIZZLE_128x4: "them swizzled 128x4", LINEAR: "them linear"}
_CALL = {SM90_SCALE_FOLD: "call interleave_moe_scales_for_sm90_mixed_gemm once, on linear uint8 scales",
         SM90_WEIGHT_INTERLEAVE: "call interleave_moe_weights_for_sm90_mixed_gemm(weight, 'fp4') once",
         SWIZZLE_128x4: "call block_scale_interleave once, on linear uint8 scales", LINEAR: "pass the packed weights as they are"}
_ORDER = {UP_GATE: "torch.cat([up, gate], dim=1)", INTERLEAVED_UP: "torch.stack([up, gate], dim=2).reshape(w13.shape)",
          GROUPS_64: "[up, gate] interleaved in groups of 64 rows"}


def _words(id: str, keys: list[str], expected: Form, contract: Contract) -> dict[str, str]:
    """What a finding says of this kernel: what it reads, and how to get there."""
    changed = FAULTS[id].slots(keys[0], expected, contract) if FAULTS[id].slots else None
    if not changed:
        return {}
    family = [o.key for o in contract.operands if o.key.split("_")[0] == keys[0].split("_")[0]]
    only = "" if set(family) <= set(keys) or {"order", "shuffle"}.isdisjoint(changed) else f"only in {', '.join(contract.operand(k).title for k in keys)}: "
    if "order" in changed and expected.order is not None:
        return {"reads": expected.order.name, "advice": f"{only or FAULTS[id].fix + ': '}{_ORDER[expected.order]}"}
    if "shuffle" in changed and expected.shuffle is not None:
        return {"reads": f"them after the {expected.shuffle.name}", "advice": f"{only}permute rows once, by get_w2_permute_indices_with_cache with epilogue_tile_m=128"}
    if "layout" in changed:
        return {"reads": _READS[expected.layout] if isinstance(changed["layout"], Layout) else "", "advice": _CALL[expected.layout]}
    return {}


def _alone(id: str, r: Recovered, source: Source, contract: Contract, wanted: list[int]) -> Tensor | None:
    """The operand as it would be with this fault only, at the positions that are wanted; None where its rows have no named order, or not every expert
    is explained."""
    if not r.complete or r.permutation is not None or r.made_from:
        return None
    slots = {slot: getattr(r.form, slot) for slot in SLOTS if getattr(r.form, slot) != getattr(r.expected, slot)
             and _fault_of(slot, r.form, r.expected, r.key, contract).id == id}
    experts = r.expected_experts if slots or id == "wrong-tp-slice" else r.experts
    rank = r.tp_rank if id == "wrong-tp-slice" else r.expected_tp_rank
    return replace(r.expected, **slots).apply_to_some(lambda some: source.logical(r.key, rank, [experts[i] for i in some]), len(experts), wanted)


def _fault_of(slot: str, form: Form, expected: Form, key: str, contract: Contract) -> Fault:
    for fault in OPERAND_FAULTS:
        changed = fault.slots(key, expected, contract) if fault.slots and key in fault.strikes else None
        if changed and slot in changed and getattr(form, slot) in (changed[slot], *fault.variants):
            return fault
    return FAULTS["layout-other" if slot == "layout" else "rows-unnamed"]


def _experts(moved: Mapping[str, tuple[int, ...]], source: Source, strike: Callable[[str, str, str], None]) -> None:
    """Experts that are not where they should be: the whole layer of another rank, all operands rolled alike, or one out of step."""
    if not moved:
        return
    p, local = source.parallel, len(next(iter(moved.values())))
    weights = {k for k in ("w13", "w13_scale", "w2", "w2_scale")}
    maps = set(moved.values())
    together = len(maps) == 1 and weights <= set(moved)
    ranks = {key: {e // local for e in experts if e >= 0} for key, experts in moved.items()}
    # The same other rank's experts everywhere: then it is the stated rank that is wrong, whatever else happened to their order.
    misstated = p.ep_size > 1 and weights <= set(moved) and len(set.union(*ranks.values())) == 1 and set.union(*ranks.values()) != {p.ep_rank}
    for key, experts in moved.items():
        shown = ",".join("?" if e < 0 else str(e) for e in experts[:8]) + (",..." if local > 8 else "")
        rank, rest = divmod(experts[0], local)
        whole_rank = rest == 0 and experts == tuple(range(experts[0], experts[0] + local))
        if misstated:
            strike("ep-rank", key, f"experts {','.join(map(str, sorted(experts)[:8]))}{',...' if local > 8 else ''} stand here: those of rank {min(ranks[key])}, but ep_rank is {p.ep_rank}")
        elif whole_rank and p.ep_size > 1:
            strike("wrong-ep-slice", key, f"experts {shown} stand here: those of rank {rank}, but ep_rank is {p.ep_rank}")
        if not whole_rank or p.ep_size == 1:
            strike("experts-rolled" if together else "operand-of-another-expert", key, f"the checkpoint's experts {shown} stand here, in this order")


def _describe(permutation: Tensor, form: Form, expected: Form, key: str) -> str:
    of = "[w1; w3]" if form.halves == 2 else "w3" if key.startswith("w13") else "w2"
    shown = ",".join(str(int(i)) for i in permutation[:12])
    where = "" if form.layout == expected.layout else f"read in the layout {form.layout.name}, "
    return f"{where}physical rows hold logical rows {shown},... of {of}"
