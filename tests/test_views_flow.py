"""The flow of a call: every operand has its station, and what was struck, and nothing else, is wrong."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import test_path_faults
import torch
from making import call_of, checkpoint_layer, situation
from test_path_faults import OTHERS

import mxdebug
from mxdebug import recorded
from mxdebug.checkpoints import CheckpointLayer, CheckpointLinear
from mxdebug.diagnosis import Diagnosis
from mxdebug.diagnosis.finding import DIFFERENT, EQUAL, SAME_VALUES, UNREAD
from mxdebug.errors import MxdebugError
from mxdebug.faults import FAULTS, LINEAR_FAULTS, LinearSituation, Situation
from mxdebug.layouts import GATE_UP
from mxdebug.recipes.w4a16.recipe import linear_recipe
from mxdebug.views import figures
from mxdebug.views.flow import COLOURS, FILE, GLYPHS, LEFT, MIDDLE, RIGHT, TRUNK, UNCHECKED, UNDECIDED, WRONG, Flow, draw, flow


@functools.cache
def of_recorded(name: str, checkpoint: bool = True) -> Flow:
    r = recorded.call(name)
    call, layer = mxdebug.load_call(r.path), mxdebug.open_checkpoint(r.checkpoint_path).layer() if checkpoint else None
    return flow(call, mxdebug.diagnose(call, layer), layer)


def of_situation(s: Situation, checkpoint: CheckpointLayer | None = None) -> Flow:
    arguments, output = s.build()
    call = call_of(arguments, output, function=s.recipe.contract.function)
    checkpoint = checkpoint or CheckpointLayer(0, s.recipe.checkpoint, s.layer, GATE_UP, {}, {}, frozenset())
    return flow(call, mxdebug.diagnose(call, checkpoint), checkpoint)


@functools.cache
def linear_layer() -> CheckpointLinear:
    return mxdebug.open_checkpoint(recorded.W4A16).linear("model.layers.0.self_attn.qkv_proj")


def of_linear(fault: str | None, kernel: str = "sm12x") -> Flow:
    chosen = linear_layer()
    x = torch.randn(8, chosen.layer.k, generator=torch.Generator().manual_seed(0)).bfloat16()
    s = LinearSituation.right(linear_recipe(f"nvfp4_w4a16/flashinfer_cutedsl/{kernel}", chosen.kind, "vllm"), chosen.layer, x)
    arguments, output = (LINEAR_FAULTS[fault].inject(s) if fault else s).build()
    call = call_of(arguments, output, function="mm_bf16_fp4")
    return flow(call, mxdebug.diagnose(call, chosen), chosen)


def wrong(f: Flow) -> set[str]:
    return {s.key for s in f.stations if s.verdict == WRONG}


# -- right calls ------------------------------------------------------------------------------------------------------


def test_a_right_call_station_by_station() -> None:
    f = of_recorded("c01")
    assert f.steps == ("GEMM 1", "activation", "GEMM 2", "combine")
    assert {step: [s.key for s in f.of(step)] for step in f.steps} == {
        "GEMM 1": ["x", "w13", "w13_scale", "w13_bias"], "activation": ["activation"], "GEMM 2": ["w2", "w2_scale", "w2_bias"],
        "combine": ["experts", "router"]}
    assert {s.key: s.verdict for s in f.stations} == {"x": UNCHECKED, "experts": UNCHECKED, "router": UNCHECKED} | {
        key: RIGHT for key in ("w13", "w13_scale", "w13_bias", "activation", "w2", "w2_scale", "w2_bias")}
    assert f.output == (RIGHT, "follows from what was passed") and f.verdict == "right" and f.findings == ()
    # gpt-oss files alternate gate and up rows; the kernel wants up above gate, its payload interleaved and its scales folded for SM90.
    assert f.station("w13_scale").stages == ("rows g0,u0,g1,u1 -> [w3; w1]", "SM90 scale fold")
    assert f.station("w2").stages == ("SM90 weight interleave",) and f.station("x").stages == ()
    assert [s.source for s in f.of("combine")] == ["the layer before"] * 2 and f.station("activation").source == "config.json"
    with pytest.raises(MxdebugError, match="operand: expected one of x, w13"):
        f.station("w3")


@pytest.mark.parametrize("name", ["c02", "c09", "c10", "c12", "c13"])
def test_right_calls_have_nothing_wrong(name: str) -> None:
    f = of_recorded(name)
    assert wrong(f) == set() and f.output[0] == RIGHT and {s.verdict for s in f.stations} == {RIGHT, UNCHECKED}
    assert ("w13_bias" in {s.key for s in f.stations}) == (recorded.call(name).checkpoint != "minimax-tiny")  # which has none


@pytest.mark.parametrize("r", OTHERS, ids=lambda r: f"{r.path} {r.checkpoint}")
def test_every_contract_has_a_flow(r: object) -> None:
    f = of_situation(test_path_faults.right(r.path, r.checkpoint))
    assert wrong(f) == set() and f.output[0] == RIGHT and f.verdict == "right", str(f)
    needed = {o.key for o in (*r.contract.operands, *r.contract.inputs) if not o.optional and not o.key.startswith("swiglu")}
    assert needed <= {s.key for s in f.stations}


# -- wrong calls ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "struck"), [
    ("c03", {"w13", "w13_scale", "w13_bias"}), ("c04", {"w13_scale"}), ("c05", {"activation"}), ("c06", {"w13", "w2"}),
    ("c07", {"w13", "w13_scale", "w13_bias"}), ("c08", {"w13_scale"}), ("c11", {"w13", "w13_scale", "w13_bias"}), ("c14", {"w13"})])
def test_what_was_done_wrong_on_the_gpu_is_what_is_wrong(name: str, struck: set[str]) -> None:
    """As `recorded` says what was done."""
    f = of_recorded(name)
    assert wrong(f) == struck and f.output[0] == RIGHT and f.verdict == "wrong"  # the kernel computes wrong operands rightly
    for s in f.stations:
        assert bool(s.findings) == (s.verdict == WRONG)
        assert s.verdict != WRONG or s.why == "; ".join(f.findings[i - 1].removesuffix(" [proved]") for i in s.findings)


OPERAND_CASES = [("rows-gate-up", "w13"), ("scales-linear", "w13_scale"), ("scales-linear", "w2_scale"), ("weights-linear", "w2"),
                 ("nibbles-swapped", "w13"), ("rows-shuffled-32", "w2_bias")]


@pytest.mark.parametrize(("fault", "key"), [(f, k) for f, k in OPERAND_CASES if f in FAULTS and k in FAULTS[f].strikes])
def test_one_struck_operand_is_the_only_wrong_one(fault: str, key: str) -> None:
    f = of_situation(FAULTS[fault].injected(situation("gptoss", tokens=2, few=True), (key,)), checkpoint_layer("gptoss-tiny"))
    assert wrong(f) == {key} and FAULTS[fault].title in f.station(key).why and f.station(key).findings == (1,)


def test_operands_that_no_fault_explains() -> None:
    s = situation("gptoss", tokens=2, few=True)
    arguments, output = s.build()
    arguments["fc2_expert_weights"] = torch.flip(arguments["fc2_expert_weights"], [1])
    layer = checkpoint_layer("gptoss-tiny")
    call = call_of(arguments, None)
    d = mxdebug.diagnose(call, layer)
    f = flow(call, d, layer)
    assert dict(d.operands)["w2"] == DIFFERENT and "no known fault explains it" in f.station("w2").why and wrong(f) == {"w2"}
    assert f.output == (UNCHECKED, "none was recorded (crashed)")


def test_an_output_that_does_not_follow() -> None:
    arguments, output = situation("gptoss", tokens=2, few=True).build()
    call = call_of(arguments, output * 2)
    d = mxdebug.diagnose(call, checkpoint_layer("gptoss-tiny"))
    f = flow(call, d, checkpoint_layer("gptoss-tiny"))
    assert d.follows is False and f.output[0] == WRONG and wrong(f) == set()
    assert f.output[1].startswith("does not follow from what was passed")


def test_without_a_checkpoint_operands_are_not_checked() -> None:
    f = of_recorded("c06", checkpoint=False)
    assert {s.verdict for s in f.stations} == {UNCHECKED} and f.checkpoint == ("no checkpoint", "") and f.verdict == "undecided"
    assert f.station("w13").why == "that needs the checkpoint" and f.output[0] == RIGHT and f.distance == ""
    assert all(s.stages == () for s in f.stations if s.source == "checkpoint")


def test_activation_scales() -> None:
    """Linear scales of 4 tokens fill no tile of 128 rows: the buffer is too small, so the kernel refuses it. 128 tokens show nothing."""
    s = test_path_faults.right("nvfp4/FLASHINFER_CUTLASS", "ModelOpt NVFP4")
    f = of_situation(FAULTS["x-scales-linear"].injected(s))
    assert of_situation(s).station("x_scale").verdict == RIGHT and f.station("x_scale").verdict == WRONG
    assert f.output == (UNCHECKED, "none was recorded (crashed)")
    tile = test_path_faults.right("nvfp4/FLASHINFER_CUTLASS", "ModelOpt NVFP4", tokens=128)
    full = of_situation(FAULTS["x-scales-linear"].injected(tile))
    assert full.station("x_scale").verdict == UNDECIDED and full.verdict == "undecided"


# -- linear layers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernel", ["sm100", "sm12x"])
def test_a_right_linear_call(kernel: str) -> None:
    f = of_linear(None, kernel)
    assert f.steps == ("GEMM",) and wrong(f) == set() and f.output[0] == RIGHT and "qkv_proj" in f.checkpoint[0]
    assert {s.key: s.verdict for s in f.stations} == {"x": UNCHECKED, "weight": RIGHT, "weight_scale": RIGHT, "alpha": RIGHT}
    assert f.station("weight").stages[0].startswith("pad 200 x 352 -> 256 x 384")


@pytest.mark.parametrize(("fault", "key"), [("scales-not-recoded", "weight_scale")])
def test_a_linear_fault(fault: str, key: str) -> None:
    f = of_linear(fault)
    assert wrong(f) == {key} and f.station(key).why == FAULTS[fault].title


# -- what a diagnosis keeps -------------------------------------------------------------------------------------------


def test_states_of_operands_are_kept() -> None:
    layer = checkpoint_layer("gptoss-tiny")
    s = situation("gptoss", tokens=2, few=True)
    d = mxdebug.diagnose(call_of(*FAULTS["scales-linear"].injected(s, ("w13_scale",)).build()), layer)
    assert dict(d.operands) == {"w13": EQUAL, "w13_scale": DIFFERENT, "w13_bias": EQUAL, "w2": EQUAL, "w2_scale": EQUAL, "w2_bias": EQUAL}
    assert d.follows is True and {EQUAL, DIFFERENT, SAME_VALUES, UNREAD} >= set(dict(d.operands).values())
    bare = Diagnosis("right", "s", (), (), None, None, None, (), ())
    assert bare.operands == () and bare.follows is None
    tp = mxdebug.diagnose(call_of(*situation("gptoss-tp1", tokens=2, few=True).build()), layer)
    assert dict(tp.operands)["w2_bias"] in (UNREAD, EQUAL)


# -- text and drawing -------------------------------------------------------------------------------------------------


def test_no_diagnosis() -> None:
    with pytest.raises(MxdebugError, match="diagnosis: expected a Diagnosis, got NoneType"):
        flow(mxdebug.load_call(recorded.call("c01").path), None)


def test_text() -> None:
    lines = str(of_recorded("c04")).splitlines()
    assert lines[0] == "gpt-oss checkpoint, layer 0" and lines[1] == "  GEMM 1: x · w13ᵀ + bias"
    assert "    ✓ w13 payload       right: its bytes equal the recipe's" in lines
    assert "    ✗ w13 block scales  wrong: block scales linear; the kernel reads the SM90 fold" in lines
    assert "  activation: swiglu, alpha 1.702, beta 1, limit 7" in lines and "verdict: wrong" in lines
    assert lines[-1].startswith("  1. block scales linear") and lines[-1].endswith("[proved]")
    f = replace(of_recorded("c04"), checkpoint=("c", "the file is damaged"))
    assert str(f).splitlines()[0] == "c  ✗ the file is damaged"


def made(name: str) -> Flow:
    return of_linear("scales-not-recoded") if name == "linear" else of_recorded("c04", False) if name == "bare" else of_recorded(name)


@pytest.mark.parametrize("name", ["c01", "c04", "c05", "c11", "bare", "linear"])
def test_every_station_is_drawn_with_glyph_and_word(name: str) -> None:
    f = made(name)
    figure = draw(f)
    assert figure.to_json() == draw(f).to_json()
    says = figure.layout.meta["says"]
    texts = [t.text or "" for t in figure.layout.annotations]
    assert says.endswith(".") and says in [t.replace("<br>", " ") for t in texts] and f"Verdict: {f.verdict}" in says
    for s in f.stations:
        mine = [t for t in texts if t.startswith(f"<b>{s.title}</b>")]
        assert len(mine) == 1 and f"{GLYPHS[s.verdict]} {s.verdict}" in mine[0]
    assert "color" not in "".join(texts)  # text has the colour that is readable on light and dark; the frames have the verdicts'
    boxes = [s for s in figure.layout.shapes if s.type == "rect"]
    assert [b.line.color for b in boxes if b.x0 == MIDDLE[0]] == [COLOURS[v] for v in (*(s.verdict for s in f.stations), f.output[0])]
    assert len(boxes) == 2 * len(f.stations) + len(f.steps) + 2  # left and middle, the steps, the checkpoint and the output
    for column in {b.x0 for b in boxes}:  # none overlaps another in its column
        spans = sorted((b.y0, b.y1) for b in boxes if b.x0 == column)
        assert all(a[1] < b[0] for a, b in zip(spans, spans[1:]))
    assert sum(b.line.width == 2.5 for b in boxes) == len(wrong(f)) + (f.output[0] == WRONG)  # wrong ones are thick, besides
    solid = [(b.y0 + b.y1) / 2 for b in boxes if b.x0 == LEFT[0] and b.line.dash == "solid"][1:]  # but for the checkpoint's own box
    assert [t.y for t in figure.layout.annotations if t.ax == TRUNK] == solid and len(solid) == sum(s.source == FILE for s in f.stations)
    low, high = sorted(figure.layout.yaxis.range)
    assert all(low < b.y0 and b.y1 < high for b in boxes) and len(says) <= 5 * figures.WIDTH


def test_long_names_are_wrapped_not_cut() -> None:
    texts = [t.text.replace("<br>", " ") for t in draw(of_linear(None)).layout.annotations if t.text]
    assert any("model.layers.0.self_attn.qkv_proj" in t.replace(" ", "") and "nvfp4-pack-quantized" in t for t in texts)
    below = next(t.text for t in draw(of_recorded("c05")).layout.annotations if "output follows" in (t.text or ""))
    assert "relative L2" in below and max(map(len, below.split("<br>")[1:])) <= 40
