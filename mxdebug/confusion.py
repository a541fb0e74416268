"""Which evidence names which fault, on which MoE path? Every fault of the catalogue put into probe data and diagnosed, as one table."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .calls import Call
from .checkpoints.settings import Routing
from .contracts import Contract
from .diagnosis import Diagnosis, diagnose
from .diagnosis.finding import RIGHT, UNDECIDED
from .diagnosis.floor import follows
from .diagnosis.repeats import same_bits
from .diagnosis.weights import diagnose_weights, kept
from .errors import MxdebugError
from .evidence import AMONG, CANNOT, EQUIVALENT, KINDS, MISSED, OPEN, OUTCOMES, RELATED, SEEN
from .faults import FAULTS, OPERANDS, SCALARS, Fault, LinearSituation, Situation
from .faults.call_faults import SCALING
from .probe import probe
from .recipes import RECIPES
from .reference import Parallel

PATHS = tuple(dict.fromkeys(r.path for r in RECIPES))


@dataclass(frozen=True)
class Case:
    """One fault in one situation of a path, and what each kind of evidence made of it (a key of OUTCOMES)."""

    fault: Fault
    path: str
    situation: Situation | LinearSituation | None
    found: Mapping[str, str]
    others: tuple[str, ...] = ()

    @property
    def letters(self) -> str:
        return "".join(OUTCOMES[self.found[kind]].letter for kind in KINDS)


# What config.json must say for these to be seen.
_ROUTING = {
    "router-not-renormalised": Routing(True, None, "norm_topk_prob"),
    "router-renormalised": Routing(False, None, "norm_topk_prob"),
    "router-scaled-twice": Routing(True, SCALING, "norm_topk_prob, routed_scaling_factor"),
}

OF_RANKS = "x-scales-before-exchange"
_OF_THE_FILE = ("global-shared-by-halves", "gelu-tanh-as-erf")  # these bring a checkpoint of their own
# Where a kernel takes one number with a default, the default is "not passed".
SAME = {f"swiglu-{n}-changed": f"swiglu-{n}-lost" for n in ("alpha", "beta")}


def situations(path: str) -> Iterator[Situation]:
    """Right calls of a path, one after the other: plain, on the second of two tensor-parallel ranks, of two expert-parallel ones, top-1, without
    gate, without biases; on the second of so many tensor-parallel ranks that equal shares of the intermediate size are no whole blocks."""
    for settings in (
        {},
        {"parallel": Parallel(2, 1)},
        {"parallel": Parallel(1, 0, 2, 1)},
        {"top_k": 1},
        {"gated": False},
        {"biased": False},
        {"parallel": Parallel(4, 1)},  # of 192 in blocks of 32
        {"parallel": Parallel(8, 1)},  # of 192 and 320 in blocks of 16
    ):
        try:
            yield _probe(path, **settings)
        except MxdebugError:
            continue


_PROBES: dict[tuple[Any, ...], Situation] = {}


def _probe(path: str, **settings: Any) -> Situation:
    key = (path, *sorted(settings.items(), key=str))
    if key not in _PROBES:
        _PROBES[key] = probe(path, **settings)
    return _PROBES[key]


def injected(fault: Fault, path: str) -> tuple[Situation, Situation, dict[str, Any], Tensor | None] | None:
    """(right situation, struck one, its arguments, its output) in the first situation in which the fault moves the output; else in the first in
    which it changes anything; None where it cannot strike the path."""
    fallback = None
    for s in situations(path):
        if fault.id == OF_RANKS and s.parallel.ep_size == 1:
            continue  # one rank exchanges nothing
        right, output = s.build()
        for keys in _subsets(fault, s):
            try:
                broken = fault.injected(s, keys)
                arguments, wrong = broken.build()
            except MxdebugError:
                continue
            case = s, broken, arguments, wrong
            hidden = s.layer.hidden  # what the padding's columns hold is nobody's
            if wrong is None or not follows(
                wrong[:, :hidden], output[:, :hidden], max(s.layer.hidden, s.layer.intermediate), s.recipe.contract.roundings
            ):
                return case
            if fallback is None and (
                fault.id in (*_ROUTING, *_OF_THE_FILE) or not torch.equal(wrong, output) or not same_bits(list(right.values()), list(arguments.values()))
            ):
                fallback = case
    return fallback


def _subsets(fault: Fault, s: Situation) -> Iterable[tuple[str, ...] | None]:
    keys = tuple(k for k in fault.strikes if k in s.plan.forms or k in SCALARS)
    if fault.id == "wrong-ep-slice":  # of all operands at once it is the stated rank that is wrong, which is another fault
        return [(k,) for k in keys]
    return (None, *((k,) for k in keys)) if keys else (None,)


def examine(fault: Fault, path: str) -> Case:
    """Strike a path with a fault and diagnose it with each kind of evidence."""
    nothing = dict.fromkeys(KINDS, CANNOT)
    case = None if fault.strikes in (("linear",), ("calls",)) else injected(fault, path)
    if case is None:
        return Case(fault, path, None, nothing)
    s, broken, arguments, wrong = case
    clean = s.build()[1]
    moved = (
        wrong is None or fault.id in (*_ROUTING, *_OF_THE_FILE) or not torch.equal(wrong[:, : s.layer.hidden], clean[:, : s.layer.hidden])
    )
    chosen = (broken if fault.id in _OF_THE_FILE else s).checkpoint()
    chosen = replace(chosen, routing=_ROUTING.get(fault.id, chosen.routing))
    told = s.recipe.contract.parallel(arguments).tp_size == s.parallel.tp_size
    tp = None if told else s.parallel
    call = Call.made(s.recipe.contract.function, arguments, wrong)
    ways: dict[str, Callable[[], Diagnosis]] = {"call": lambda: diagnose(call), "together": lambda: diagnose(call, chosen, tp=tp)}
    if set(fault.strikes) & {*OPERANDS, *SCALARS}:
        known = kept(s.recipe.contract)
        ways["weights"] = lambda: diagnose_weights(
            {k: t for k, t in broken.operands().items() if t is not None and k in known}, path, chosen, parallel=broken.stated
        )
    return judged(Case(fault, path, s, nothing), ways, titles_of(fault, s.recipe.contract), moved)


def judged(case: Case, ways: Mapping[str, Callable[[], Diagnosis]], titles: set[str], moved: bool) -> Case:
    """The case with what each kind of evidence (a key of KINDS) makes of it; the other arguments as of `outcome`."""
    found, others = dict(case.found), []
    for evidence, way in ways.items():
        try:
            d = way()
        except MxdebugError as error:
            found[evidence] = SEEN
            others.append(str(error))
            continue
        found[evidence] = outcome(case.fault, d, titles, moved)
        others += [f.id for f in d.findings if f.id != case.fault.id]
    return replace(case, found=found, others=tuple(dict.fromkeys(others)))


def outcome(fault: Fault, d: Diagnosis, titles: set[str], moved: bool) -> str:
    """What a diagnosis makes of a fault that strikes operands of these titles; moved: whether the output is another one than it should be."""
    if (f := d.finding(fault.id)) is not None:
        return f.strength
    if beside(fault, d, titles):
        return AMONG
    if d.verdict == RIGHT:
        return MISSED if moved else EQUIVALENT
    if d.verdict == UNDECIDED:
        return RELATED if d.findings else OPEN
    return SEEN


def beside(fault: Fault, d: Diagnosis, titles: set[str]) -> bool:
    """Whether a diagnosis names a fault beside another: as the same setting, by its id, or as another reading of an operand that it strikes (titles)."""
    if d.finding(SAME.get(fault.id, "")) is not None:
        return True
    if any(re.search(rf"(?<![\w-]){fault.id}(?![\w-])", text) for text in (*d.open, *(f.evidence for f in d.findings))):
        return True
    readings = ("at this size the same bytes as", "other reading(s) explain the same bytes")
    return any(t.partition(":")[0] in titles and any(r in t for r in readings) for t in d.open)


def titles_of(fault: Fault, contract: Contract, keys: Iterable[str] | None = None) -> set[str]:
    """How prints call the operands that a fault strikes: all that it can, or these."""
    return {o.title for o in contract.operands if o.key in (fault.strikes if keys is None else keys)}


def measure(path: str, faults: Iterable[str] | None = None) -> list[Case]:
    """All cases of a path: every fault of the catalogue, or these."""
    return [examine(FAULTS[id], path) for id in (FAULTS if faults is None else faults)]


def cells(cases: Iterable[Case]) -> dict[str, dict[str, str]]:
    """path -> fault id -> three letters; faults that cannot strike a path are left out."""
    out: dict[str, dict[str, str]] = {}
    for c in cases:
        out.setdefault(c.path, {})
        if c.situation is not None:
            out[c.path][c.fault.id] = c.letters
    return out


def as_json(cases: Iterable[Case]) -> str:
    """`cells` as JSON: what mxdebug/data/confusion.json holds."""
    return json.dumps(cells(cases), indent=1) + "\n"
