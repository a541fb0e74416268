"""Two recorded calls against each other: what varies, what is stale, and what is only a sum in another order."""

from __future__ import annotations

import pytest
import torch

from mxdebug import recorded
from mxdebug.calls import Call, load
from mxdebug.confusion import PATHS
from mxdebug.diagnosis import PROVED
from mxdebug.diagnosis.repeats import compare_calls
from mxdebug.errors import MxdebugError
from mxdebug.faults import TWO_CALLS_FAULTS, Situation
from mxdebug.probe import probe


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fault", TWO_CALLS_FAULTS, ids=lambda f: f.id)
def test_each_is_named(fault, path: str) -> None:
    s = probe(path)
    d = compare_calls(s.call(), fault.injected(s).call())
    assert [(f.id, f.strength) for f in d.findings] == [(fault.id, PROVED)] and d.verdict == "wrong", str(d)
    assert (d.findings[0].effect is None) == (fault.id == "output-stale")  # an old output differs from itself by nothing
    if fault.id == "output-varies":
        assert "call 1's output follows from what was passed and call 1's output does not follow" in d.findings[0].evidence
        columns = len(s.build()[1][0])  # what the kernel writes, padding included
        assert d.findings[0].where == f"6 of 12 tokens (0, 2, 4, 6, 8, 10), columns 64 to 127 of {columns} (whole tiles of 64)"


@pytest.mark.parametrize("path", PATHS)
def test_sums_in_another_order_are_no_fault(path: str) -> None:
    """Experts added in the opposite order in float32, as atomics may: single steps of bf16, here and there."""
    s = probe(path)
    a = s.call()
    flipped = Situation.right(s.recipe, s.layer, s.x, s.experts.flip(1), s.router.flip(1))
    out = flipped.build()[1]
    b = Call.made(s.recipe.contract.function, a.arguments, out)
    d = compare_calls(a, b)
    assert d.ok and not d.findings, str(d)
    shifted = a.outputs[0].clone()  # and a step of bf16 up in every hundredth element
    shifted.view(torch.int16).flatten()[::100] += 1
    assert compare_calls(a, Call.made(s.recipe.contract.function, a.arguments, shifted)).ok
    # but not everywhere
    wrong = (a.outputs[0].float() * 1.02).to(a.outputs[0].dtype)
    assert [f.id for f in compare_calls(a, Call.made(s.recipe.contract.function, a.arguments, wrong)).findings] == ["output-varies"]


def test_tokens_alone_and_together_agree() -> None:
    s = probe(PATHS[0])
    few = Situation.right(s.recipe, s.layer, s.x[3:5], s.experts[3:5], s.router[3:5])
    d = compare_calls(s.call(), few.call())
    assert d.ok and "the tokens that both have get the same bits" in d.summary and "2 in common" in dict(d.call)["calls"], str(d)


def test_calls_that_cannot_be_compared() -> None:
    s = probe(PATHS[0])
    a = s.call()
    with pytest.raises(MxdebugError, match="two calls: expected at least one token"):
        compare_calls(a, Situation.right(s.recipe, s.layer, s.x * 2, s.experts, s.router).call())
    with pytest.raises(MxdebugError, match="two calls: expected with recorded outputs"):
        compare_calls(a, Call.made(s.recipe.contract.function, a.arguments, None))
    with pytest.raises(MxdebugError, match="two calls' w13 payload: expected the same tensor in both"):
        compare_calls(a, probe(PATHS[0], seed=1).call())
    with pytest.raises(MxdebugError, match="two calls: expected of one kernel"):
        compare_calls(a, probe(PATHS[1]).call())


def test_another_parameter_is_another_computation() -> None:
    """c05 is c02 without alpha, beta and limit: the same tokens and weights, another output, and no fault of the kernel."""
    with pytest.raises(MxdebugError, match="two calls' swiglu_alpha: expected the same in both"):
        compare_calls(load(recorded.call("c02").path), load(recorded.call("c05").path))
