"""Do the sliders show what the kernel would compute, and do the exercises of notebook 02 say what a wrong answer means?"""

from __future__ import annotations

import functools
import json
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from making import CONTRACT

import mxdebug
from mxdebug import recorded
from mxdebug.calls import Call
from mxdebug.errors import MxdebugError
from mxdebug.exercises import WIDTH
from mxdebug.exercises_swiglu import check, unknown_output
from mxdebug.metrics import compare
from mxdebug.recipes.swiglu import FIX, V033
from mxdebug.reference import CLAMPS, Activation
from mxdebug.views import figures, sample, swiglu_surface
from mxdebug.views.swiglu_explorer import Effect, Explorer, Setting, arrivals, draw, effect

M3 = Setting(1.702, 1.0, 7.0)


@functools.cache
def call(name: str) -> Call:
    return mxdebug.load_call(recorded.call(name).path)


@functools.cache
def meant() -> Activation:
    return mxdebug.open_checkpoint(recorded.call("c05").checkpoint_path).layer().layer.activation


@functools.cache
def made(setting: Setting) -> Effect:
    seen = CONTRACT.see(call("c05").arguments)
    return effect(seen, seen.trace(keep=True), setting, M3, call("c02").outputs[0], call("c05").outputs[0], row=4)


def explorer() -> Explorer:
    return Explorer(CONTRACT, call("c05").arguments, meant(), call("c05").outputs[0], row=4)


# -- a setting ----------------------------------------------------------------------------------------------------------


def test_setting_is_the_activation_and_back() -> None:
    assert Setting.of(meant()) == M3 and Setting.of(Activation("silu")) == Setting()
    back = M3.activation(4)
    assert all(torch.equal(getattr(back, n), getattr(meant(), n)) for n in ("alpha", "beta", "limit"))
    assert Setting().activation(4).kind == "silu"
    assert str(Setting()) == "alpha 1, beta 0, limit none" and str(M3) == "alpha 1.702, beta 1, limit 7 (gate above, up both)"


def test_setting_refuses_what_sliders_cannot_show() -> None:
    with pytest.raises(MxdebugError, match="silu or swiglu"):
        Setting.of(Activation("gelu"))
    with pytest.raises(MxdebugError, match="one value for all experts"):
        Setting.of(Activation("swiglu", alpha=torch.tensor([1.0, 2.0])))


# -- its effect ---------------------------------------------------------------------------------------------------------


def test_what_the_call_passes_reproduces_the_recording() -> None:
    e = made(Setting())
    assert e.recorded.bit_identical and e.counted[:2] == (0, 0)
    # recorded.CALLS: c05 is off by 0.67
    assert (
        str(e)
        == """\
alpha 1, beta 0, limit none
  no limit acts
  against the checkpoint: relative L2 0.674, cosine 0.862, norm ratio 1.305
  against the recording: relative L2 0.000, 2304 of 2304 numbers have its bits"""
    )


def test_the_checkpoints_setting_gives_the_right_calls_bits() -> None:
    e = made(M3)
    assert e.checkpoint.bit_identical and not e.recorded.bit_identical


def test_points_lie_on_the_formula() -> None:
    for s in (Setting(), M3, replace(M3, clamp="gate both, up above"), Setting(1.702, 1.0, math.inf), Setting(0.5, -1.0, 3.0)):
        e = made(s)
        both_g, both_u = s.clamp.startswith("gate both"), s.clamp.endswith("up both")
        for p in (e.gate, e.gate_line):
            for x, y in zip(p.inputs, p.factor):
                g = max(min(x, s.limit), -s.limit if both_g else -math.inf)
                assert y == pytest.approx(g / (1 + math.exp(-s.alpha * g)), abs=2e-3)
        for p in (e.up, e.up_line):
            for x, y in zip(p.inputs, p.factor):
                assert y == pytest.approx(max(min(x, s.limit), -s.limit if both_u else -math.inf) + s.beta, abs=2e-3)


def test_a_clamp_after_the_activation_is_in_neither_factor() -> None:
    after = made(replace(M3, clamp="after activation"))
    free = made(Setting(1.702, 1.0, math.inf))
    assert after.gate_line.factor == free.gate_line.factor and after.up_line.factor == free.up_line.factor
    assert after.checkpoint.relative_l2 > 0.6 and "in neither panel" in draw(after).layout.meta["says"]


@pytest.mark.parametrize("clamp", CLAMPS)
def test_counts_of_the_whole_call(clamp: str) -> None:
    t = CONTRACT.trace(call("c05").arguments, keep=True)
    gate, up = (
        (t.gate > 7).sum() + (t.gate < -7).sum() * clamp.startswith("gate both"),
        (t.up > 7).sum() + (t.up < -7).sum() * clamp.endswith("up both"),
    )
    want = (0, 0) if clamp == "after activation" else (int(gate), int(up))
    assert made(replace(M3, clamp=clamp)).counted == (*want, 12 * 256)


# -- its figure ---------------------------------------------------------------------------------------------------------


def test_figure_is_the_same_each_time_and_small() -> None:
    a, b = draw(made(M3)), draw(made(M3))
    assert a.to_json() == b.to_json() and "uid" not in a.to_json() and len(a.to_json()) < 40_000
    assert [t.name for t in a.data if t.showlegend] == ["this setting", "within limit", "beyond limit"]
    assert a.layout.title.text == "<b>SwiGLU with alpha 1.702, beta 1, limit 7</b>"  # a narrow window cuts longer ones off
    says = a.layout.meta["says"]
    assert "token 5 in expert 1" in says and says.endswith("The clamp: gate above, up both.")
    assert sum(len(t.x) for t in a.data[2:4]) == len(made(M3).gate.inputs)
    assert len(a.data[3].x) == sum(x > 7 for x in made(M3).gate.inputs)


# -- sliders ------------------------------------------------------------------------------------------------------------


def test_explorer_follows_its_sliders() -> None:
    x = explorer()
    assert x.effect == made(Setting()) and not math.isfinite(x.limit.value)
    x.alpha.value, x.beta.value, x.limit.value = 1.702, 1.0, 7.0
    assert x.effect.setting == M3 and x.effect.checkpoint.bit_identical
    readout, figure = x.children[-2:]
    for clamp in CLAMPS:
        x.clamp.value = clamp
        shown = figure.outputs[0]["data"][figures.MIMETYPE]
        assert {k: shown[k] for k in ("data", "layout")} == {k: json.loads(draw(x.effect).to_json())[k] for k in ("data", "layout")}
        assert clamp in readout.value and len(figure.outputs) == 1


def test_explorer_shows_itself_without_a_kernel_too() -> None:
    bundle = explorer()._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "application/vnd.jupyter.widget-view+json", figures.MIMETYPE}
    assert bundle["text/plain"] == f"[explorer]\n{made(Setting())}"
    assert "uid" not in json.dumps(bundle[figures.MIMETYPE]) and len(json.dumps(bundle)) < 60_000


def test_explorer_refuses_a_limit_without_a_place() -> None:
    odd = {**call("c02").arguments, "swiglu_limit": torch.full((4,), 6.5)}
    with pytest.raises(MxdebugError, match="the slider has no such place"):
        Explorer(CONTRACT, odd, meant())


# -- what arrives -------------------------------------------------------------------------------------------------------


def test_arrivals() -> None:
    config = {"swiglu_alpha": 1.702, "swiglu_beta": 1.0, "swiglu_limit": 7.0}
    cutlass, trtllm = "mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16", "mxfp4/FLASHINFER_TRTLLM_MXFP4_BF16"
    quant = {"quant_method": "mxfp4"}
    a = arrivals(
        [(cutlass, FIX, None), (cutlass, V033, quant), (trtllm, V033, quant)],
        activation="SWIGLUOAI_UNINTERLEAVE",
        model_config=config,
        model_type="minimax_m3",
    )
    # tests/test_swiglu.py test_what_each_method_hands_on derives these values from vLLM
    assert (
        str(a)
        == """\
                                     vLLM      alpha   beta  limit  stated, but not used
mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16  #48929    1.702      1      7
mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16  0.33          -      -      7  alpha, beta
mxfp4/FLASHINFER_TRTLLM_MXFP4_BF16   0.33      not run: vLLM does not take this path for it (_supports_activation)"""
    )


# -- exercises ----------------------------------------------------------------------------------------------------------


def flat(answer: object) -> str:
    assert max(map(len, str(answer).splitlines())) <= WIDTH
    return str(answer).replace("\n  ", " ").replace("\n", " ")


@pytest.mark.parametrize(
    ("answer", "right", "says"),
    [
        (None, None, "NOT ANSWERED YET"),
        (..., None, "NOT ANSWERED YET"),
        ("7", False, "this is str"),
        (True, False, "this is bool"),
        (float("nan"), False, "this is nan"),
        (-42, True, "computed -90.0"),
        (-41.9997, True, "gate 10 becomes 7"),  # (-7 + 1) * 7
        (-80, False, "without any limit"),  # (-9 + 1) * 10
        (-49, False, "without beta"),  # -7 * 7
        (-90.0, False, "plain SiLU"),  # -9 * 10
        (-56, False, "up is not"),  # (-9 + 1) * 7
        (-60, False, "gate is not"),  # (-7 + 1) * 10
        (-7, False, "applied to the product"),
        (0, False, "exchanged"),
        (42, False, "sign"),
        (3, False, "no known mistake"),
    ],
)
def test_exercise_value(answer: Any, right: bool | None, says: str) -> None:
    got = check("swiglu-value", answer)
    assert got.right is right and says in flat(got)
    assert right is True or "-42" not in str(got)


def fixed(q: dict, m: dict) -> float | None:
    return q["gemm1_beta"] if q.get("gemm1_beta") is not None else m.get("swiglu_beta")


@pytest.mark.parametrize(
    ("answer", "right", "says"),
    [
        (None, None, "NOT ANSWERED YET"),
        (lambda q, m: ..., None, "returns nothing yet"),
        (lambda q, m: None, None, "returns nothing yet"),
        (fixed, True, "all 5 cases"),
        (lambda q, m: m.get("swiglu_beta", q.get("gemm1_beta")), False, "quantisation config comes first"),
        (lambda q, m: q.get("gemm1_beta"), False, "that it did not is #48929"),
        (lambda q, m: 1.0 if fixed(q, m) is None else fixed(q, m), False, "never asked for"),
        (lambda q, m: q.get("gemm1_beta") or m.get("swiglu_beta"), False, "0, which is a value"),
        (lambda q, m: q.get("gemm1_beta", m.get("swiglu_beta")), False, "holds None"),
        (lambda q, m: q["gemm1_beta"], False, "raised KeyError"),
    ],
)
def test_exercise_resolve(answer: Any, right: bool | None, says: str) -> None:
    got = check("swiglu-resolve", answer)
    assert got.right is right and says in flat(got)


@pytest.mark.parametrize(
    ("answer", "right", "says"),
    [
        ((), None, "one slider at a time"),
        ((1.702, None, 7.0), None, "NOT ANSWERED YET"),
        (("a", 0, 7.0), False, "alpha is a number"),
        ((1, 0, -1), False, "leaves nothing"),
        ((1.702, 0, 10, "gate below"), False, "no clamp"),
        ((1.702, 0, 10), True, "limit is another model's"),
        ((1.702, 0.0, 10.0, "gate both, up both"), True, "cannot tell"),
        ((1.702, 1.0, 7.0), False, "gain is in beta"),
        ((1.702, 0.0, math.inf), False, "gain is in limit"),
        ((1.0, 0.0, 10.0), False, "gain is in alpha"),
        ((1.702, 0.0, 10.0, "gate above, up above"), False, "where it clamps"),
    ],
)
def test_exercise_unknown(answer: tuple[Any, ...], right: bool | None, says: str) -> None:
    got = check("swiglu-unknown", *answer)
    assert got.right is right and says in flat(got)


def test_unknown_output_is_not_the_recorded_one() -> None:
    assert compare(unknown_output(), call("c02").outputs[0]).relative_l2 > 0.3
    unknown_output().zero_()
    assert unknown_output().abs().sum() > 0


# -- the surface --------------------------------------------------------------------------------------------------------


def oai() -> Activation:
    one = torch.ones(1)
    return Activation("swiglu", alpha=1.702 * one, beta=one, limit=7 * one)


def test_surface_by_hand() -> None:
    """Two places of the grid, and three points: inside, clamped, and beyond the picture.

    silu(2) = 2 / (1 + e^-2) = 1.7616; times up 4 is 7.05, in [4, 8): the binade 2, and levels count from 2^-3, so 2 + 3 + 1 = 6.
    With alpha 1.702, beta 1: 2 / (1 + e^-3.404) = 1.9357; times 5 is 9.68, in [8, 16): 7.
    """
    gate, up = torch.tensor([2.0, 9.0, 40.0]), torch.tensor([4.0, -8.0, 1.0])
    s = swiglu_surface.surface(Activation("silu"), oai(), gate, up, name="no parameters")
    at = {v: i for i, v in enumerate(s.axis)}
    assert s.this[at[4.0], at[2.0]] == 6 and s.meant[at[4.0], at[2.0]] == 7
    assert s.this[at[-4.0], at[2.0]] == -6  # the same, negative
    assert s.this[at[1.0], at[-16.0]] == 0  # -16 * sigmoid(-16) is -2e-6, below 2^-3
    assert (s.gate, s.up, s.outside) == ((2.0, 9.0), (4.0, -8.0), 1) and s.changed == (True, True)
    assert s.limits == (None, 7.0)
    # (9, -8) means 7 * sigmoid(11.914) * (-7 + 1) = -42.0; silu gives 9 * sigmoid(9) * -8 = -71.99
    want = torch.tensor([9.6785, -42.0, 7 * 2.0], dtype=torch.float64)
    got = torch.tensor([7.0464, -71.9911, 40.0], dtype=torch.float64)
    assert abs(s.moved - float((got - want).norm() / want.norm())) < 2e-3
    assert "2 of 2 pre-activations drawn" in str(s) and "1 more lie beyond the picture" in str(s)


def test_surface_of_the_checkpoints_own_setting_differs_nowhere() -> None:
    s = swiglu_surface.surface(oai(), oai(), torch.randn(50), torch.randn(50), name="same")
    assert s.differ == 0 and not any(s.changed) and s.moved == 0


def test_a_limit_changes_only_what_is_beyond_it() -> None:
    lost = replace(oai(), limit=None)
    s = swiglu_surface.surface(lost, oai(), torch.tensor([6.9, 7.2, 3.0, 3.0]), torch.tensor([1.0, 1.0, -7.2, 6.9]), name="limit lost")
    # gate 7.2 gives 7.2 * sigmoid(12.25) * 2 = 14.4 for 14.0: 2.9 % more. up -7.2 gives (-6.2) for (-6): 3.3 %
    assert s.changed == (False, True, True, False) and s.limits == (None, 7.0)
    axis = torch.tensor(s.axis)
    other = s.this != s.meant
    assert not other[(axis.abs() <= 7)[:, None] & (axis <= 7)].any() and other.any()


def test_surface_figure() -> None:
    s = swiglu_surface.surface(Activation("silu"), oai(), torch.tensor([2.0, 0.0]), torch.tensor([4.0, 0.0]), name="no parameters")
    figure = swiglu_surface.draw(s)
    maps = [t for t in figure.data if t.type == "heatmap"]
    assert len(maps) == 2 and {t.name for t in figure.data if t.type == "scatter"} == {"pre-activation", "its output is off"}
    assert len(figure.layout.shapes) == 3  # the limit of the checkpoint: gate above, up on both sides; the setting has none
    assert len(figure.to_json()) < 60_000
    assert figure.to_json() == swiglu_surface.draw(s).to_json()


def test_explorer_shows_the_surface() -> None:
    e = explorer()
    e.view.value = "surface"
    shown = e._figure.outputs[0]["data"][figures.MIMETYPE]["data"]
    assert sum(t["type"] == "heatmap" for t in shown) == 2
    e.view.value = "two curves"
    assert not any(t["type"] == "heatmap" for t in e._figure.outputs[0]["data"][figures.MIMETYPE]["data"])


def test_a_large_call_is_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pre-activations are those of one token in one expert, by the same emulation as the whole."""
    whole = Explorer(CONTRACT, call("c05").arguments, meant(), row=4)
    monkeypatch.setattr(sample, "MOST", 1)
    part = Explorer(CONTRACT, call("c05").arguments, meant(), recorded=call("c05").outputs[0], row=4)
    assert part.shown.recorded is None and part.shown.gate.inputs == whole.shown.gate.inputs and part.shown.up.inputs == whole.shown.up.inputs
    assert part.shown.counted[2] == 256


def test_exercises_take_tensors_and_refuse_many() -> None:
    assert check("swiglu-value", torch.tensor(-42.0)).right is True
    got = check("swiglu-resolve", lambda q, m: torch.ones(3))
    assert got.right is False and "gave Tensor, it must give a number" in flat(got)
