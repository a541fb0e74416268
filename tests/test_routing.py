"""Expert ids and router weights that TRT-LLM makes of logits, by method; expected values written out.

Logits 2, 1, 0, 1: e^2 7.389, e^1 2.718, e^0 1; softmax over all: 0.5344, 0.1966, 0.0723, 0.1966; sigmoid: 0.8808, 0.7311, 0.5, 0.7311.
Weights are rounded once to bf16.
"""

from __future__ import annotations

import pytest
import torch

from mxdebug.contracts import contract
from mxdebug.contracts.routing import METHODS, read_routing, route
from mxdebug.errors import MxdebugError

LOGITS = torch.tensor([[2.0, 1.0, 0.0, 1.0]])
NUMBER = {name: n for n, name in METHODS.items()}


def bf16(*values: float) -> list[float]:
    return torch.tensor(values).bfloat16().float().tolist()


@pytest.mark.parametrize(("name", "weights"), [
    ("Default", (0.534447, 0.196612)), ("Renormalize", (0.731059, 0.268941)), ("RenormalizeNaive", (0.731059, 0.268941)), ("TopK", (2.0, 1.0)),
    ("SigmoidRenorm", (0.546428, 0.453572)), ("Sigmoid", (0.880797, 0.731059)), ("TopKSigmoid", (0.880797, 0.731059)),
    ("MiniMax2", (0.546428, 0.453572)), ("DeepSeekV3", (0.546428, 0.453572))])
def test_method(name: str, weights: tuple[float, ...]) -> None:
    """Two of four experts: 0, and of the equal 1 and 3 the lower. Renormalize: e^2 / (e^2 + e^1); SigmoidRenorm: 0.8808 / 1.6119."""
    ids, got = route(LOGITS, 2, NUMBER[name], None, None, 0, True)
    assert ids.tolist() == [[0, 1]] and ids.dtype == torch.int32
    assert got[0].tolist() == pytest.approx(bf16(*weights), rel=2**-8)
    assert torch.equal(got, got.bfloat16().float())


def test_llama4_takes_one_expert_by_sigmoid() -> None:
    ids, got = route(LOGITS, 1, NUMBER["Llama4"], None, None, 0, True)
    assert ids.tolist() == [[0]] and got[0].tolist() == bf16(0.880797)


def test_bias_and_factor_count_for_deepseek_and_minimax_only() -> None:
    """A bias of 1 lifts expert 2 above all; its weight is still its own sigmoid: 0.5 / (0.5 + 0.8808) * 2.5 = 0.9053."""
    bias = torch.tensor([0.0, 0.0, 1.0, 0.0])
    for name in ("DeepSeekV3", "MiniMax2"):
        ids, got = route(LOGITS, 2, NUMBER[name], bias, 2.5, 1, True)
        assert ids.tolist() == [[2, 0]] and got[0].tolist() == pytest.approx(bf16(0.905267, 1.594733), rel=2**-8)
    for name in ("Renormalize", "Sigmoid", "SigmoidRenorm", "Default"):
        assert route(LOGITS, 2, NUMBER[name], bias, 2.5, 0, True)[0].tolist() == [[0, 1]]


def test_sigmoid_renorm_without_renormalisation() -> None:
    assert route(LOGITS, 2, NUMBER["SigmoidRenorm"], None, None, 0, False)[1][0].tolist() == bf16(0.880797, 0.731059)


@pytest.mark.parametrize(("method", "groups"), [(NUMBER["Unspecified"], 0), (NUMBER["DeepSeekV3"], 4), (77, 0)])
def test_what_is_not_emulated_is_said(method: int, groups: int) -> None:
    with pytest.raises(MxdebugError, match="routing_method_type: expected a method that is emulated"):
        route(LOGITS, 2, method, None, None, groups, True)


@pytest.mark.parametrize("bad", [
    {"top_k": -1}, {"top_k": 10**6}, {"top_k": [1]}, {"top_k": "x"}, {"n_group": [1]}, {"routing_method_type": "x"}, {"routed_scaling_factor": "x"},
    {"routing_bias": torch.zeros(3)}, {"routing_bias": 4}], ids=str)
def test_what_a_dump_may_say_instead_of_numbers(bad: dict) -> None:
    arguments = {"routing_logits": LOGITS, "top_k": 2, "routing_method_type": 2, **bad}
    with pytest.raises(MxdebugError):
        read_routing(contract("nvfp4/FLASHINFER_TRTLLM"), arguments, 1)
