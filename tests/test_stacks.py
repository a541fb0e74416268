"""Three faults at once, drawn at random on every path: bytes explain some away, parameters others, the output the rest."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from mxdebug.confusion import PATHS, beside, titles_of
from mxdebug.diagnosis import Diagnosis, diagnose
from mxdebug.diagnosis.outputs import follows
from mxdebug.errors import MxdebugError
from mxdebug.faults import CALL_FAULTS, FAULTS, KERNEL_FAULTS, OPERAND_FAULTS, PARAMETER_FAULTS, SCALAR_FAULTS, Fault, Situation
from mxdebug.probe import probe

# Of one operand these leave nothing by which another fault could be told, or they need a situation of their own.
_ALONE = {
    "bias-missing",
    "bias-unexpected",
    "experts-rolled",
    "operand-of-another-expert",
    "wrong-tp-slice",
    "wrong-ep-slice",
    "ep-rank",
    "rows-unnamed",
    "layout-other",
    "operand-not-loaded",
    "scales-nan",
    "experts-stride",
    "padding-not-zero",
    "gelu-tanh-as-erf",
    "router-not-renormalised",
    "router-renormalised",
    "router-scaled-twice",
    "router-squared",
    "global-folded-into-blocks",
    "activation-kind",
}


def _kernel(s: Situation) -> list[Fault]:
    out = s.build()[1]
    return [f for f in KERNEL_FAULTS if not torch.equal(f.injected(s).build()[1], out)]


def _stacks(path: str, count: int) -> Iterator[tuple[Situation, list[tuple[Fault, tuple[str, ...] | None]]]]:
    """One fault of an operand, one of a scalar, parameter or another operand, one of the kernel."""
    rng, s = random.Random(path), probe(path)
    kernel = _kernel(s)
    operands = [(f, (k,)) for f in OPERAND_FAULTS if f.id not in _ALONE for k in f.strikes if k in s.plan.forms]
    others = [(f, None) for f in (*PARAMETER_FAULTS, *SCALAR_FAULTS, *CALL_FAULTS) if f.id not in _ALONE]
    made = 0
    while made < count:
        first, second, third = rng.choice(operands), rng.choice(operands + 3 * others), (rng.choice(kernel), None)
        if first[1] == second[1] or second[0].id.startswith("swiglu") and third[0].id.startswith(("kernel-ignores", "kernel-clamp")):
            continue
        try:
            broken, outputs = s, [s.build()[1]]
            for f, keys in (first, second, third):
                broken = f.injected(broken, keys)
                outputs.append(broken.build()[1])
        except MxdebugError:
            continue
        k = max(s.plan.padded)
        if any(o is None for o in outputs) or any(follows(b, a, k, s.recipe.contract.roundings) for a, b in zip(outputs, outputs[1:])):
            continue  # a fault that another one hides leaves no trace
        made += 1
        yield broken, [first, second, third]


@pytest.mark.parametrize("path", PATHS)
def test_three_faults_are_named(path: str) -> None:
    for broken, chosen in _stacks(path, 5):
        d: Diagnosis = diagnose(broken.call(), broken.checkpoint())
        for f, keys in chosen:
            named = d.finding(f.id) is not None or beside(f, d, titles_of(f, broken.recipe.contract, keys))
            assert named, f"{path}, {f.id} of {[(g.id, k) for g, k in chosen]}: {d}"
        assert len(d.findings) == len({f.id for f, _ in chosen}), f"{path}, {[(g.id, k) for g, k in chosen]}: {d}"


@pytest.mark.parametrize("seed", range(8))
def test_three_broken_computations_are_reproduced(seed: int) -> None:
    """Three changes of the kernel at once, which no pair explains: found from the closest pairs, not by trying all products."""
    rng, s = random.Random(seed), probe(PATHS[0])
    k, kernel = max(s.plan.padded), _kernel(s)
    while True:
        chosen = rng.sample(kernel, 3)
        broken = s
        for f in chosen:
            broken = f.injected(broken)
        wrong = broken.build()[1]
        pairs = [FAULTS[b.id].injected(FAULTS[a.id].injected(s)).build()[1] for a in chosen for b in chosen if a is not b]
        if torch.isfinite(wrong).all() and not any(follows(wrong, p, k) for p in pairs):
            break
    d = diagnose(broken.call(), broken.checkpoint())
    again = s
    for f in d.findings:
        again = f.fault.injected(again)
    assert d.findings and follows(again.build()[1], wrong, k), f"{[f.id for f in chosen]}: {d}"
    assert len(d.findings) <= 3
