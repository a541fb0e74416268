"""Evidence from the operands of a linear layer: which stack of faults makes these bytes of the checkpoint's?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations, product

import torch
from torch import Tensor

from ..contracts import LinearContract, LinearSeen
from ..contracts.linear import in_memory
from ..errors import MxdebugError
from ..faults import FAULTS, LINEAR_FAULTS, LinearFault, LinearSituation
from ..formats import E4M3_SCALE, NVFP4
from ..layouts import row_hashes
from ..recipes.vllm import CT_NVFP4, MODELOPT
from ..recipes.w4a16.plan import FLUSHED_BELOW, LinearPlan
from ..recipes.w4a16.recipe import LinearRecipe, linear_recipe
from ..reference_linear import LinearLayer
from .finding import CONSISTENT, PROVED, Finding

DEPTH = 3  # faults that are stacked at most in one operand
RELATIVE = 2.0**-20  # one product of float32 numbers
KEYS = ("weight", "weight_scale")


@dataclass(frozen=True)
class Explained:
    """stack: the faults that make the operand's bytes, () where it is right; fillings: fault id -> the slots that it filled, and how;
    others: stacks of the same depth that give the same bytes."""

    stack: tuple[LinearFault, ...]
    fillings: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    others: tuple[tuple[LinearFault, ...], ...] = ()


@dataclass(frozen=True)
class OperandEvidence:
    """explained by key; unexplained: key -> what stands there; same_values: other bytes, the same weights; foreign: no row is the checkpoint's."""

    findings: tuple[Finding, ...]
    explained: Mapping[str, Explained]
    unexplained: Mapping[str, str]
    same_values: tuple[str, ...]
    foreign: bool
    open: tuple[str, ...]


def refined(layer: LinearLayer) -> LinearLayer:
    """The layer with one scale for 16 elements: of a checkpoint with one for 32 every scale stands twice."""
    return (
        layer
        if layer.format.block == 16
        else replace(layer, scales=layer.scales.repeat_interleave(layer.format.block // 16, 1), format=NVFP4)
    )


def converted(plan: LinearPlan, key: str, layer: LinearLayer) -> Tensor:
    """The operand that a plan makes."""
    if key == "weight":
        return plan.convert_payload(layer)
    return plan.convert_scales(layer if plan.group == layer.format.block else refined(layer))


def memory(t: Tensor) -> Tensor:
    """The bytes of an operand as its kernel reads them."""
    return in_memory(t) if t.dim() == 6 else t.contiguous().view(torch.uint8).flatten()


def examine(
    contract: LinearContract, recipe: LinearRecipe, layer: LinearLayer, arguments: Mapping[str, object], seen: LinearSeen | None
) -> OperandEvidence:
    """Compare weight and block scales of a call with what the recipe makes of the checkpoint. seen: None for a call that the kernel refuses."""
    base = LinearSituation(recipe, layer, torch.zeros(1, layer.k), recipe.plan(layer))
    explained: dict[str, Explained] = {}
    unexplained: dict[str, str] = {}
    for key in KEYS:
        t, o = contract.get(key, arguments), contract.operand(key)
        if t is None or not o.takes(t.dtype):
            unexplained[key] = f"{o.title}: " + ("not passed" if t is None else f"{t.dtype}, which are not the kernel's bytes")
        elif (found := _explain(base, key, memory(t), explained.get("weight"))) is not None:
            explained[key] = found
        else:
            unexplained[key] = ""
    same: tuple[str, ...] = ()
    if (
        seen is not None
        and any(e.stack or e.others for e in explained.values()) | bool(unexplained)
        and _same_weight(seen, base.plan, layer)
    ):
        same = tuple(k for k in KEYS if k in unexplained or explained[k].stack)
        unexplained, explained = {}, {k: Explained(()) for k in KEYS}
    foreign = False
    if seen is not None:
        unexplained = {k: text or _stands_there(contract, k, seen, base.plan, layer) for k, text in unexplained.items()}
        foreign = "weight" in unexplained and not torch.isin(row_hashes(_rows(seen, base.plan)), row_hashes(layer.payload)).any()
    return OperandEvidence(
        tuple(_findings(contract, layer, explained)), explained, unexplained, same, bool(foreign), tuple(_ambiguities(contract, explained))
    )


Filling = Mapping[str, object]


def stacks(
    base: LinearSituation, key: str, seen: Mapping[str, Filling]
) -> Iterator[tuple[tuple[LinearFault, ...], tuple[Filling, ...], LinearPlan]]:
    """Every stack of up to DEPTH faults of one operand that fill different slots, shallow ones first: (faults, what each fills, the plan).

    seen  how faults filled their slots in the operand before: with several faults in one operand only that is tried, and each fault's usual way
    """
    able = [
        f
        for f in LINEAR_FAULTS.values()
        if key in f.strikes
        and f.slots
        and f.fits(base) is None
        and not (f.layer and f.layer(base.layer).format.block != base.layer.format.block)
    ]
    for depth in range(DEPTH + 1):
        for stack in combinations(able, depth):
            ways = [
                [f.slots, *(f.variants(base) if depth < 2 else [seen[f.id]] if f.id in seen and seen[f.id] != f.slots else [])]
                for f in stack
            ]
            for fillings in product(*ways):
                slots = {slot: value for filling in fillings for slot, value in filling.items()}
                if len(slots) == sum(map(len, fillings)):
                    yield stack, fillings, base.plan.edit(**slots)


def _explain(base: LinearSituation, key: str, got: Tensor, before: Explained | None) -> Explained | None:
    hits: dict[tuple[LinearFault, ...], tuple[Filling, ...]] = {}
    for stack, fillings, plan in stacks(base, key, before.fillings if before else {}):
        if hits and len(stack) > len(next(iter(hits))):
            break
        try:
            want = memory(converted(plan, key, base.layer))
        except MxdebugError:
            continue
        if torch.equal(got, want):
            hits.setdefault(stack, fillings)
    if not hits:
        return None
    first, *others = hits
    return Explained(first, {f.id: filling for f, filling in zip(first, hits[first])}, tuple(others))


def _rows(seen: LinearSeen, plan: LinearPlan) -> Tensor:
    return seen.weight.payload[:, : plan.k // 2].contiguous()


def _same_weight(seen: LinearSeen, plan: LinearPlan, layer: LinearLayer) -> bool:
    """Whether the weights that the kernel sees, global scale included, are the right ones all the same: other encodings of the same values."""
    right = plan.contract.see(
        plan.arguments({key: converted(plan, key, layer) for key in KEYS} | {"alpha": plan.global_scale(layer)}, torch.zeros(1, plan.k))
    )
    got, want = (s.weight.dequantise(torch.float64, s.scale) * s.alpha.double() for s in (seen, right))
    return got.shape == want.shape and torch.equal(got, want)


def _stands_there(contract: LinearContract, key: str, seen: LinearSeen, plan: LinearPlan, layer: LinearLayer) -> str:
    title = contract.operand(key).title
    if key == "weight":
        got, want, unit = row_hashes(_rows(seen, plan)), row_hashes(layer.payload), "rows"
        found, right = got[: plan.n], want
    else:
        expected = contract.see(
            plan.arguments({k: converted(plan, k, layer) for k in KEYS} | {"alpha": plan.global_scale(layer)}, torch.zeros(1, plan.k))
        ).weight.scales
        got, want = (row_hashes(t[: plan.n, : plan.k // 16].contiguous()) for t in (seen.weight.scales, expected))
        found, right, unit = got, want, "rows of scales"
    placed = int((found == right).sum())
    moved = int((torch.isin(found, right) & (found != right) & (found != 0)).sum())
    zero = (found == 0) & (right != 0)
    text = f"{title}: no known change of the checkpoint gives the bytes. Read as this kernel reads them, {placed} of {len(right)} {unit} are in place"
    text += f", {moved} stand elsewhere" if moved else ""
    if zero.any():
        at = zero.nonzero().flatten()
        text += f", {len(at)} are zero (rows {int(at[0])} to {int(at[-1])})"
    if placed == len(right):
        return text + ": the difference is in the padding"
    other = (found != right) & ~zero & ~torch.isin(found, right)
    return text + (f", {int(other.sum())} are not this layer's (the first is row {int(other.nonzero()[0])})" if other.any() else "")


def _findings(contract: LinearContract, layer: LinearLayer, explained: Mapping[str, Explained]) -> Iterator[Finding]:
    struck: dict[str, list[str]] = {}
    for key, e in explained.items():
        for f in e.stack:
            struck.setdefault(f.id, []).append(key)
    for id, keys in struck.items():
        unsure = all(any(id not in {f.id for f in other} for other in explained[k].others) for k in keys)
        stack = {len(explained[k].stack) for k in keys} != {1}
        together = (
            ""
            if not stack
            else "; " + "; ".join(f"{contract.operand(k).title}: " + " + ".join(f.id for f in explained[k].stack) for k in keys)
        )
        yield Finding(
            FAULTS[id],
            CONSISTENT if unsure else PROVED,
            ", ".join(contract.operand(k).title for k in keys),
            f"bytes equal the checkpoint's under this change{_order(id, layer, explained[keys[0]])}{_lost(id, layer)}{together}"
            + ("; not under this change alone, see below" if unsure else ""),
            advice=LINEAR_FAULTS[id].advice,
        )


def _order(id: str, layer: LinearLayer, e: Explained) -> str:
    """In which order joined parts stand."""
    how = str(e.fillings.get(id, {}).get("order", ""))
    if not how:
        return ""
    names = [name.rpartition(".")[2] for name in layer.names]
    order = range(len(names))[::-1] if how == "reversed" else range(len(names)) if how == "interleaved" else map(int, how.split(","))
    return ": " + ("a row of each in turn, " if how == "interleaved" else "") + ", ".join(names[i] for i in order)


def _lost(id: str, layer: LinearLayer) -> str:
    """How many block scales a flush makes 0: the output as a whole may hardly move, rows of small weights are gone."""
    if id not in ("scales-flushed", "scales-recoded-for-marlin"):
        return ""
    small = E4M3_SCALE.decode(layer.scales) < FLUSHED_BELOW
    return f"; {int(small.sum())} of {small.numel()} scales become 0, {int(small.all(1).sum())} of {layer.n} rows have no others"


def _ambiguities(contract: LinearContract, explained: Mapping[str, Explained]) -> Iterator[str]:
    for key, e in explained.items():
        if e.others and e.stack:
            yield (
                f"{contract.operand(key).title}: {' or '.join(' + '.join(f.id for f in s) for s in (e.stack, *e.others[:3]))} give the same bytes; "
                "this data cannot tell them apart"
            )


def examine_alpha(
    contract: LinearContract, plan: LinearPlan, layer: LinearLayer, arguments: Mapping[str, object], folded: bool
) -> list[Finding]:
    """The global scale that is passed against the checkpoint's, and whether the joined parts have one in common.

    folded: the block scales hold it already (a finding of `examine`), so that 1 is what belongs beside them.
    """
    passed = contract.get("alpha", arguments)
    if passed is not None and passed.numel() != 1:
        return []  # refused, and said so
    got = torch.ones(1) if passed is None else passed.float().reshape(1).cpu()
    want = torch.ones(1) if folded else plan.global_scale(layer).cpu()
    where, out = contract.operand("alpha").title, []
    if not torch.allclose(got, want, rtol=RELATIVE, atol=0.0):
        base = LinearSituation(
            linear_recipe(contract.path, MODELOPT if plan.takes == "max" else CT_NVFP4), layer, torch.zeros(1, layer.k), plan
        )
        names = [
            f
            for f in LINEAR_FAULTS.values()
            if "scalar" in f.slots
            and f.id != "global-other"
            and f.fits(base) is None
            and any(
                torch.allclose(got, plan.edit(**s).global_scale(layer).cpu(), rtol=RELATIVE, atol=0.0) for s in (f.slots, *f.variants(base))
            )
        ]
        evidence = f"alpha: passed {'none, which is 1' if passed is None else f'{got.item():.8g}'}, the checkpoint's {want.item():.8g} (ratio {(got / want).item():.6g})"
        if len(names) > 1:
            evidence += f"; {', '.join(f.id for f in names[1:])} would give the same number"
        id = names[0].id if names else "global-other"
        out.append(Finding(FAULTS[id], PROVED if len(names) < 2 else CONSISTENT, where, evidence, advice=LINEAR_FAULTS[id].advice))
    if len(layer.global_scales.unique()) > 1:
        ratio = want.item() / layer.global_scales if not folded else plan.global_scale(layer).item() / layer.global_scales
        out.append(
            Finding(
                FAULTS["global-shared-by-parts"],
                PROVED,
                "checkpoint",
                "the output of each part is multiplied by: "
                + ", ".join(f"{name.rsplit('.')[-1]} {r:.4g}" for name, r in zip(layer.names, ratio.tolist())),
            )
        )
    return out
