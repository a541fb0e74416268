"""Does a guess about a call explain just the calls that it should, in small calls and in large ones; and do the controls say so?"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from making import PATH, situation

import mxdebug
from mxdebug import recorded
from mxdebug.calls import Call
from mxdebug.checkpoints import CheckpointLayer
from mxdebug.errors import MxdebugError
from mxdebug.reference import Parallel
from mxdebug.views import hypothesis, sample
from mxdebug.views.call_explorer import NONE, SWITCHES, Explorer, draw
from mxdebug.views.hypothesis import ALL, Guess, Trials

ROWS = ("w13", "w13_scale", "w13_bias")
# What was done to each recorded call, and the faults that say so.
EXPLAINS: dict[str, Guess] = {
    "c01": (), "c02": (), "c09": (), "c10": (), "c12": (), "c13": (),
    "c03": [("rows-gate-up", ROWS)],
    "c04": [("scales-linear", ("w13_scale",))],
    "c05": [("swiglu-alpha-lost", ()), ("swiglu-beta-lost", ()), ("swiglu-limit-lost", ())],
    "c06": [("weights-linear", ("w13", "w2"))],
    "c07": [("rows-interleaved", ROWS)],
    "c08": [("rows-gate-up", ("w13_scale",))],
    "c11": [("padding-at-end", ROWS)],
    "c14": [("weights-linear", ("w13",))],
}


@functools.cache
def parts(name: str) -> tuple[Call, CheckpointLayer]:
    r = recorded.call(name)
    return mxdebug.load_call(r.path), mxdebug.open_checkpoint(r.checkpoint_path).layer()


@functools.cache
def trials(name: str) -> Trials:
    return Trials(*parts(name))


@functools.cache
def large(name: str = "c04") -> Trials:
    """The same call, as if it were too large to be computed whole."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "MOST", 1)
        return Trials(*parts(name), row=2)


# -- guesses ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPLAINS)
def test_recorded_calls_are_explained_by_what_was_done_to_them(name: str) -> None:
    t = trials(name).trial(EXPLAINS[name])
    assert t.explained and t.output.bit_identical and all(m.right for m in t.matches), str(t)
    assert t.verdict.startswith("EXPLAINED" if EXPLAINS[name] else "RIGHT")
    if EXPLAINS[name]:
        without = trials(name).trial(())
        assert not without.explained and not without.follows
        # these faults alone are all the difference, so the right output is as far off as the recording's README says
        assert round(t.effect, 2) == recorded.call(name).off_by or recorded.call(name).off_by is None


def test_a_wrong_guess_says_which_bytes_are_not_as_predicted() -> None:
    """c04 has linear w13 scales; with all that the fault can strike, w2's are predicted linear too, and they are not."""
    t = trials("c04").trial([("scales-linear", ())])
    assert [m.key for m in t.matches if not m.right] == ["w2_scale"] and not t.explained
    assert t.verdict == "NOT EXPLAINED: w2 block scales"
    off = next(m for m in t.matches if m.key == "w2_scale")
    assert str(off) == f"w2 block scales    {off.total - off.equal} of 12288 bytes differ"  # 4 experts, 384 rows, 8 columns
    call, layer = parts("c04")
    want = trials("c04").contract.operand("w2_scale").get(call.arguments).flatten()
    linear = layer.layer.down.scales.flatten()
    assert off.total - off.equal == int((want != linear).sum())


def test_bytes_explained_but_another_output() -> None:
    """A kernel that ignores beta is no operand's fault: bytes and activation are equal, the output is another one."""
    t = trials("c01").trial([("kernel-ignores-beta", ())])
    assert t.verdict == "BYTES EXPLAINED, but the output is another one" and not t.explained and t.effect > 0.05


def test_refused_calls_have_no_output() -> None:
    """Scales that fill another number of bytes break the contract: 192 rows of padding that 128x4 would add."""
    call, layer = parts("c01")
    broken = Trials(call, layer)
    broken._made_without = (broken._made_without[0], None, MxdebugError("w13 block scales", "12 columns", "16"))
    t = broken.trial(())
    assert t.verdict == "IMPOSSIBLE: the kernel would refuse this call: w13 block scales, 16" and t.output is None and not t.explained
    assert "no output: refused" in [a.text for a in draw(t).layout.annotations]


def test_what_cannot_strike_is_refused() -> None:
    able = trials("c01").faults()
    assert able["scales-linear"] == ("w13_scale", "w2_scale") and able["swiglu-limit-lost"] == ("call",)
    assert {"wrong-tp-slice", "wrong-ep-slice", "padding-at-end", "bias-unexpected", "gelu-tanh-as-erf"}.isdisjoint(able)  # none of that in c01
    assert "padding-at-end" in trials("c10").faults() and "wrong-tp-slice" in trials("c13").faults() and "wrong-ep-slice" in trials("c12").faults()
    for guess, text in (([("nonsense", ())], "nonsense"), ([("scales-linear", ("w13",))], "operands among w13_scale, w2_scale, got w13"),
                        ([("wrong-tp-slice", ())], "cannot strike")):
        with pytest.raises(MxdebugError, match=text):
            trials("c01").trial(guess)


def test_another_layer_is_refused() -> None:
    call, layer = parts("c01")
    half = replace(layer, layer=layer.layer.part(Parallel(2, 0)))  # intermediate 128, where the call has 256
    with pytest.raises(MxdebugError, match="another checkpoint, layer or parallel position"):
        Trials(call, half)


def test_another_number_of_experts_is_refused() -> None:
    call, layer = parts("c01")
    eight = parts("c12")[1]
    assert (layer.layer.experts, eight.layer.experts) == (4, 8)
    for most in (sample.MOST, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sample, "MOST", most)
            with pytest.raises(MxdebugError, match="expected 8 experts on all ranks, as this checkpoint gives it, got 4"):
                Trials(call, eight)


def test_the_stated_tensor_parallel_position_is_taken() -> None:
    """c13 is rank 1 of 2, and says so; rank 0 has other bytes of all that is cut, and the same bias of w2."""
    call, layer = parts("c13")
    for most in (sample.MOST, 1):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sample, "MOST", most)
            assert Trials(call, layer, tp=(2, 1)).trial(()).explained
            other = Trials(call, layer, tp=(2, 0))
            assert {m.key for m in other.trial(()).matches if not m.right} >= {"w13", "w13_scale", "w13_bias", "w2", "w2_scale"}
    e = Explorer(call, layer, tp=(2, 0))
    e.row.value = 1
    assert e.shown.verdict.startswith("NOT EXPLAINED")  # another row, the same position


def test_a_call_without_an_expert_of_this_rank_is_refused() -> None:
    call, layer = parts("c01")
    o = trials("c01").contract.operand("experts")
    arguments = {**call.arguments, o.argument: torch.full_like(o.get(call.arguments), 77)}
    with pytest.raises(MxdebugError, match="selected experts: expected some of this rank's, 0 to 3, got none in 12 slots"):
        Trials(replace(call, arguments=arguments), layer)


# -- a part of a large call ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", EXPLAINS)
def test_a_part_of_a_call_is_explained_by_the_same(name: str) -> None:
    t = large(name).trial(EXPLAINS[name])
    assert t.explained and t.output.bit_identical, str(t)
    if EXPLAINS[name]:
        assert not large(name).trial(()).explained


def test_a_part_is_one_experts_share_of_a_token() -> None:
    """The parts of a token, weighted by the router and added, are the output of the whole call."""
    call, layer = parts("c01")
    contract = trials("c01").contract
    ids, router = contract.see(call.arguments).experts, contract.see(call.arguments).router
    total = torch.zeros(384, dtype=torch.float64)
    seen = set()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "MOST", 1)
        for row in range(ids.numel()):
            t = Trials(call, layer, row=row)
            assert t.sample.expert == int(ids[t.sample.token, t.sample.slot]) and not t.sample.whole
            seen.add((t.sample.token, t.sample.slot))
            if t.sample.token == 2:
                total += t._there[0].double() * float(router[2, t.sample.slot])
        with pytest.raises(MxdebugError, match="0 to 11"):  # six tokens, two slots
            Trials(call, layer, row=12)
    assert len(seen) == 12
    assert (total.float() - call.outputs[0][2].float()).abs().max() <= 2 ** -7 * total.abs().max()  # each part was rounded to bf16


def test_a_part_has_only_its_experts_bytes() -> None:
    t = large().trial(())
    assert {m.key: m.total for m in t.matches}["w13"] == 512 * 384 // 2 and "experts-rolled" not in large().faults()
    assert "token " in str(t) and "before the router weight" in str(t)


# -- the explorer -------------------------------------------------------------------------------------------------------


@functools.cache
def made() -> Explorer:
    return Explorer(*parts("c04"))


def test_switching_a_fault_on_and_off() -> None:
    e = made()
    e.guess()
    assert e.shown.verdict == "NOT EXPLAINED: w13 block scales" and e.fault_1.value == NONE
    e.fault_1.value = "scales-linear"
    assert e.strikes_1.options == (ALL, "w13_scale", "w2_scale") and e.shown.verdict == "NOT EXPLAINED: w2 block scales"
    e.strikes_1.value = "w13_scale"
    assert e.shown.explained and str(e).startswith("EXPLAINED") and "EXPLAINED" in e._says.value
    e.fault_2.value = "swiglu-limit-lost"
    assert e.shown.verdict == "NOT EXPLAINED: activation"
    e.guess(("scales-linear", "w13_scale"))
    assert e.shown.explained and e.fault_2.value == NONE
    e.fault_1.value = NONE
    assert e.strikes_1.options == (ALL,) and not e.shown.guess


def test_impossible_guesses_are_refused() -> None:
    for faults in (("scales-linear", "w13"), "nonsense"):
        with pytest.raises(MxdebugError):
            made().guess(faults)
    for fault in (("scales-linear", "w13_scale", "w2_scale"), None, 3):
        with pytest.raises(MxdebugError, match="fault 1: expected an id, or .id, operand."):
            made().guess(fault)
    with pytest.raises(MxdebugError, match="checkpoint: expected one layer"):
        Explorer(parts("c04")[0], None)
    with pytest.raises(MxdebugError, match="at most 3"):
        made().guess(*["scales-linear"] * (SWITCHES + 1))


def test_two_faults_that_exclude_each_other_are_an_answer() -> None:
    """What cannot be made stands in place of the text; the controls go on working."""
    e = made()
    e.guess("rows-gate-up", ("rows-gate-up", "w13"))
    assert e.error is None or "!" in e._says.value
    e.guess()
    assert e.error is None and e.shown.verdict.startswith("NOT EXPLAINED")


def test_a_token_can_be_picked() -> None:
    e = Explorer(*parts("c01"))
    e.row.value = 7
    assert e.shown.explained and e._trials.sample.token == sample.sample(_given("c01"), 7).token
    assert e.row.max == 11


def _given(name: str) -> object:
    from mxdebug.diagnosis.given import Given

    return Given.of(trials(name).contract, parts(name)[0].arguments)


def test_a_folder_and_a_checkpoints_folder_will_do() -> None:
    r = recorded.call("c05")
    e = Explorer(r.path, r.checkpoint_path)
    e.guess("swiglu-alpha-lost", "swiglu-beta-lost", "swiglu-limit-lost")
    assert e.shown.explained


def test_its_picture() -> None:
    e = made()
    e.guess(("scales-linear", "w13_scale"))
    f = draw(e.shown)
    bars = {t.name: t for t in f.data if t.type == "bar"}
    assert len(bars["equal"].x) == 6 and set(bars["equal"].text) == {"✓"} and not len(bars["differs"].x)
    points = f.data[-1]
    assert points.x == points.y and len(points.x) == 384
    e.guess()
    f = draw(e.shown)
    bars = {t.name: t for t in f.data if t.type == "bar"}
    m = next(m for m in e.shown.matches if not m.right)
    assert list(bars["differs"].y) == ["w13 block scales"] and bars["differs"].text[0] == f"≠ {m.equal / m.total:.0%}"
    assert f.data[-1].x != f.data[-1].y


def test_a_call_without_output_is_compared_with_what_the_kernel_makes_of_it() -> None:
    call, layer = parts("c04")
    t = Trials(replace(call, outputs=()), layer).trial(EXPLAINS["c04"])
    assert t.explained and t.against == "what the kernel makes of the call"


@pytest.mark.parametrize("position", ["8-experts-tp1-ep1", "gptoss-192-tp1"])
def test_positions(position: str) -> None:
    """Tensor and expert parallel parts, made here."""
    s = situation(position, tokens=3)
    arguments, output = s.build()
    call = replace(parts("c01")[0], arguments={**parts("c01")[0].arguments, **arguments}, outputs=(output,))
    chosen = {"8-experts-tp1-ep1": "c12", "gptoss-192-tp1": "c10"}[position]
    assert Trials(call, parts(chosen)[1]).trial(()).explained
    assert PATH == Trials(call, parts(chosen)[1]).contract.path
    assert hypothesis.layer_of(call, parts(chosen)[1]) is parts(chosen)[1]


# -- some features of a large expert --------------------------------------------------------------------------------------


@functools.cache
def some(name: str) -> Trials:
    """A part with 96 of 256 features: blocks 0, 4 and 7 of 8, as they lie evenly from first to last."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "MOST", 1)
        patch.setattr(sample, "FEATURES", 96)
        return Trials(*parts(name), row=2)


@pytest.mark.parametrize("name", [n for n in EXPLAINS if n != "c13"])  # c13 has just 128 features of two ranks
def test_some_features_are_explained_by_the_same(name: str) -> None:
    t = some(name).trial(EXPLAINS[name])
    assert t.explained and t.output.bit_identical, str(t)
    if EXPLAINS[name]:
        assert not some(name).trial(()).explained


def test_some_features_are_their_share_of_the_output() -> None:
    """All features computed, with zeros as codes of w2 where the others are: bit for bit the same, since to add 0 changes no sum."""
    s, t = some("c01").sample, large("c01")
    assert s.blocks.tolist() == [0, 4, 7] and "what 96 of 256 features of expert" in str(s)
    seen = t.sample.seen
    assert s.token == t.sample.token and s.expert == t.sample.expert and t.sample.blocks is None and seen.layer.intermediate == 256
    payload = seen.layer.down.payload.clone()  # two codes a byte: features 0-31, 128-159 and 224-255 stay
    payload[..., 16:64] = 0
    payload[..., 80:112] = 0
    zeroed = replace(seen, layer=replace(seen.layer, down=replace(seen.layer.down, payload=payload)))
    got = torch.tensor(some("c01").trial(()).predicted)
    assert torch.equal(got, zeroed.emulate()[0].float()) and not torch.equal(got, seen.emulate()[0].float())


def test_parameters_of_every_expert_are_compared() -> None:
    """Alpha of the last of four experts: no byte of a weight differs, and no token selects it where only the first is looked at."""
    call, layer = parts("c01")
    alpha = call.arguments["swiglu_alpha"].clone()
    alpha[3] = 1.0
    t = Trials(replace(call, arguments={**call.arguments, "swiglu_alpha": alpha}), layer).trial(())
    assert not t.activation and t.verdict == "NOT EXPLAINED: activation differ, but the output is the same"
