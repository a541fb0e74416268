"""Is the answer right, and does it say what an engineer on call needs?

The 14 recorded calls, right calls of every kind (a false alarm is the worst bug), calls that are not what they seem, damaged and
incomplete dumps, and how it all prints.
"""

from __future__ import annotations

import math
import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from making import CONTRACT, PATH, POSITIONS, call_of, checkpoint_layer, diagnosed, found, made_bytes, situation
from torch import Tensor

import mxdebug.views  # noqa: F401  registers how a diagnosis looks in a notebook
from mxdebug import recorded
from mxdebug.calls import load
from mxdebug.checkpoints import CheckpointLayer
from mxdebug.diagnosis import CONSISTENT, PROVED, SUSPECTED, Diagnosis, Finding, Source, diagnose, recover
from mxdebug.diagnosis.floor import follows, rounding_floor
from mxdebug.diagnosis.outputs import sample_tokens
from mxdebug.diagnosis.given import Given
from mxdebug.diagnosis.parameters import examine_router
from mxdebug.errors import MxdebugError
from mxdebug.faults import FAULTS
from mxdebug.formats import BlockTensor
from mxdebug.layouts import SM90_WEIGHT_INTERLEAVE
from mxdebug.metrics import compare
from mxdebug.recipes import E8M0_SHIFTED, PAD_END
from mxdebug.reference import Activation, MoELayer, Parallel
from mxdebug.views.html import render as html

# -- recorded on an H200 ----------------------------------------------------------------------------------------

W13 = ("w13", "w13_scale", "w13_bias")
# Call -> what recorded.py says was done wrong, as fault ids and operands; how many operands equal the recipe's.
RECORDED: dict[str, tuple[str, dict[str, tuple[str, ...]], str]] = {
    "c01": ("right", {}, "6 of 6"), "c02": ("right", {}, "4 of 4"),
    "c03": ("wrong", {"rows-gate-up": W13}, "3 of 6"),
    "c04": ("wrong", {"scales-linear": ("w13_scale",)}, "5 of 6"),
    "c05": ("wrong", {"swiglu-alpha-lost": (), "swiglu-beta-lost": (), "swiglu-limit-lost": ()}, "4 of 4"),
    "c06": ("wrong", {"weights-linear": ("w13", "w2")}, "4 of 6"),
    "c07": ("wrong", {"rows-interleaved": W13}, "3 of 6"),
    "c08": ("wrong", {"rows-gate-up": ("w13_scale",)}, "3 of 4"),
    "c09": ("right", {}, "4 of 4"), "c10": ("right", {}, "6 of 6"),
    "c11": ("wrong", {"padding-at-end": W13}, "3 of 6"),
    "c12": ("right", {}, "6 of 6"), "c13": ("right", {}, "6 of 6"),
    "c14": ("wrong", {"weights-linear": ("w13",)}, "3 of 4"),
}


@pytest.fixture(scope="module")
def recordings() -> dict[str, Diagnosis]:
    return {n: diagnose(r.path, r.checkpoint_path) for n, r in recorded.CALLS.items()}


@pytest.mark.parametrize("name", recorded.CALLS)
def test_recorded_call(name: str, recordings: dict[str, Diagnosis]) -> None:
    d, r = recordings[name], recorded.call(name)
    verdict, findings, equal = RECORDED[name]
    assert d.verdict == verdict == ("right" if r.wrong.startswith("nothing") else "wrong") and found(d) == findings
    assert all(f.strength == PROVED for f in d.findings)
    assert d.kernel.bit_identical  # what the H200 wrote follows from what it was given, right or wrong
    assert f"{equal} operands equal vLLM's recipe byte for byte" in d.checked[0]
    if r.off_by is not None:
        decimals = len(str(r.off_by).split(".")[1])
        assert abs(d.truth.relative_l2 - r.off_by) <= 0.6 * 10**-decimals  # the README rounds
    assert d.floor.relative_l2 < 0.004 and (d.truth.relative_l2 < 0.004 if d.ok else d.truth.relative_l2 > 0.5)
    for f in d.findings:
        assert f.effect > 0.01
    if len(d.findings) == 1:
        assert d.findings[0].effect == pytest.approx(d.truth.relative_l2, abs=0.01)
    assert d.findings == tuple(sorted(d.findings, key=lambda f: -f.effect))


def test_recorded_calls_without_a_checkpoint() -> None:
    """Only the kernel can be checked: it computed what it was given. Nothing is called right."""
    for name in ("c01", "c04", "c05", "c12"):
        d = diagnose(recorded.call(name).path)
        assert d.verdict == "undecided" and not d.ok and d.kernel.bit_identical and d.truth is None and any("--checkpoint" in line for line in d.open)
        if name == "c04":  # its scales are linear, and rows and columns have levels of their own
            assert found(d) == {"scales-linear": ("w13_scale",)} and d.findings[0].strength == SUSPECTED and "suspected, no more" in d.summary
        else:
            assert not d.findings and "whether it was given the right bytes needs the checkpoint" in d.summary


def test_largest_recorded_call_takes_less_than_two_seconds() -> None:
    """Processor time, since the machine may be busy with other things."""
    call, layer = load(recorded.call("c14").path), checkpoint_layer("minimax-tiny")
    taken = []
    for _ in range(3):
        start = time.process_time()
        diagnose(call, layer)
        taken.append(time.process_time() - start)
    assert min(taken) < 2.0


def test_a_checkpoint_may_be_a_path_a_checkpoint_or_a_layer() -> None:
    from mxdebug import open_checkpoint

    r = recorded.call("c04")
    checkpoints = (r.checkpoint_path, str(r.checkpoint_path), open_checkpoint(r.checkpoint_path), checkpoint_layer(r.checkpoint))
    assert len({str(diagnose(c, k)) for c in (r.path, str(r.path), load(r.path)) for k in checkpoints}) == 1


# -- right calls ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", POSITIONS)
def test_right_calls_are_right(position: str) -> None:
    for seed, tokens, top_k, magnitude in ((0, 12, 2, 3.0), (1, 1, 1, 0.5), (2, 3, 3, 30.0), (3, 70, 2, 1.0), (4, 5, 4, 1e-3)):
        s = situation(position, tokens=tokens, top_k=top_k, seed=seed, magnitude=magnitude)
        d = diagnosed(position, s)
        assert d.verdict == "right" and d.ok and not d.findings and d.kernel.bit_identical, str(d)
        here = (s.experts // s.local_experts == s.parallel.ep_rank).any()
        assert not here or d.truth.relative_l2 == d.floor.relative_l2 < 0.01, str(d)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(list(POSITIONS)), st.integers(0, 2**31), st.integers(0, 9), st.integers(1, 4), st.floats(0.01, 40.0), st.booleans())
def test_no_false_alarm(position: str, seed: int, tokens: int, top_k: int, magnitude: float, renormalised: bool) -> None:
    s = situation(position, tokens=tokens, top_k=min(top_k, 4), seed=seed, magnitude=magnitude)
    if not renormalised:
        s = replace(s, router=torch.rand(s.router.shape, generator=torch.Generator().manual_seed(seed)))
    d = diagnosed(position, s)
    if not renormalised and "gptoss" in POSITIONS[position][0] and tokens and s.router.shape[1] > 1:  # whose router does divide them by their sum
        assert [(f.id, f.strength) for f in d.findings] == [("router-not-renormalised", CONSISTENT)], str(d)
        return
    assert d.verdict == "right" and not d.findings, str(d)


def test_a_call_without_tokens_is_right() -> None:
    d = diagnosed("gptoss", situation("gptoss", tokens=0))
    assert d.verdict == "right" and "0 of 0 tokens" in str(d)


def test_tokens_without_an_expert_here() -> None:
    """A rank that has nothing to do writes zeros; that is right, and says that no expert was touched."""
    s = situation("8-experts-ep1")
    elsewhere = replace(s, experts=s.experts % 4)
    d = diagnosed("8-experts-ep1", elsewhere)
    assert d.ok and any("touch 0 of 4 experts" in line for line in d.open)


def test_vllm_fills_the_w2_bias_with_zeros_on_other_ranks() -> None:
    """vLLM loads gpt-oss's w2 bias on tp_rank 0 only; the kernel does not read it elsewhere. Anything there is right."""
    for value in (torch.zeros_like, lambda t: t * 3, lambda t: t * 0 + torch.nan):
        arguments, output = situation("gptoss-tp1").build()
        other = put(arguments, "w2_bias", value(arguments["fc2_expert_biases"]))
        d = diagnose(call_of(other, output), checkpoint_layer("gptoss-tiny"))
        assert d.ok and "w2 bias: not read on tp_rank 1" in d.checked and "5 of 5 operands" in d.checked[0]
    arguments, output = situation("gptoss-tp0").build()
    zeros = {**arguments, "fc2_expert_biases": torch.zeros_like(arguments["fc2_expert_biases"])}
    d = diagnose(call_of(zeros, CONTRACT.emulate(zeros)), checkpoint_layer("gptoss-tiny"))
    assert found(d) == {"bias-missing": ("w2_bias",)} and "zeros in the call" in d.findings[0].evidence


def with_layer(name: str, **changes: Any) -> CheckpointLayer:
    chosen = checkpoint_layer(name)
    return replace(chosen, layer=replace(chosen.layer, **changes))


def test_biases_of_zeros_may_be_left_out() -> None:
    """Passing none, or zeros, for a checkpoint without biases or with biases of zeros is the same."""
    layer = checkpoint_layer("gptoss-tiny").layer
    zero = {n: torch.zeros_like(getattr(layer, n)) for n in ("gate_bias", "up_bias", "down_bias")}
    none = dict.fromkeys(zero)
    s = situation("gptoss")
    for passed in (zero, none):
        arguments, output = replace(s, layer=replace(s.layer, **passed)).build()
        for checkpoint in (with_layer("gptoss-tiny", **zero), with_layer("gptoss-tiny", **none)):
            d = diagnose(call_of(arguments, output), checkpoint)
            assert d.ok and not d.findings, str(d)


def test_parameters_that_change_nothing_may_be_left_out() -> None:
    """alpha 1, beta 0 and no limit are what the kernel takes anyway."""
    neutral = Activation("swiglu", torch.ones(4), torch.zeros(4), torch.full((4,), math.inf))
    s = situation("minimax")
    s = replace(s, layer=replace(s.layer, activation=neutral))
    for passed in (neutral, Activation("silu"), Activation("swiglu", limit=torch.full((4,), math.inf))):
        arguments, output = replace(s, activation=passed).build()
        d = diagnose(call_of(arguments, output), with_layer("minimax-tiny", activation=neutral))
        assert d.ok and not d.findings, str(d)


def test_a_rounding_now_and_then_is_right() -> None:
    """A GPU adds in another order: one element in a thousand, one step of bf16. Ten times the floor is not."""
    arguments, output = situation("gptoss", tokens=32).build()
    rounded = output.clone().view(torch.int16)
    largest = output.abs().argmax(dim=1)  # the worst that one step can do
    rounded[torch.arange(0, 32, 3), largest[::3]] += 1
    d = diagnose(call_of(arguments, rounded.view(torch.bfloat16)), checkpoint_layer("gptoss-tiny"))
    assert d.ok and d.kernel.differing == 11 and not d.kernel.bit_identical and "11 of 12288 elements differ, by up to 1 ulp" in str(d)
    noise = 10 * rounding_floor(384) * torch.randn(output.shape, generator=torch.Generator().manual_seed(0))
    noisy = (output.float() * (1 + noise)).bfloat16()
    d = diagnose(call_of(arguments, noisy), checkpoint_layer("gptoss-tiny"))
    assert d.verdict == "wrong, not explained" and not d.findings


def test_follows() -> None:
    want = torch.randn(4, 384, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert follows(want, want.clone(), 384) and not follows(want * 1.01, want, 384)
    one = want.clone()
    one[2] *= 1.02  # one token of four: 2 % of each of its elements is more than a step of one
    assert not follows(one, want, 384)
    want[1, 7] = 0.0  # nothing is lost but the NaN itself
    for value in (torch.nan, torch.inf, -torch.inf):
        bad = want.clone()
        bad[1, 7] = value
        assert not follows(bad, want, 384) and not follows(want, bad, 384) and follows(bad, bad.clone(), 384)
    zero = torch.zeros(4, 384).bfloat16()
    assert follows(zero, zero, 384) and not follows(want, zero, 384)


# -- other bytes, the same weights ------------------------------------------------------------------------------


def lower_scales(t: BlockTensor) -> tuple[BlockTensor, int]:
    """Blocks whose codes can all be doubled (0.5 to 1 up to 3 to 6) get a scale one lower and codes of twice the value."""
    double = {0: 0, 1: 2, 2: 4, 4: 6, 3: 5, 5: 7, 6: None, 7: None}
    table = torch.tensor([(double[c % 8] if double[c % 8] is not None else 0) | (c & 8) for c in range(16)], dtype=torch.uint8)
    fits = torch.tensor([double[c % 8] is not None for c in range(16)])
    codes = t.codes().unflatten(-1, (-1, 32))
    blocks = fits[codes.long()].all(-1) & (t.scales > 1)
    new = torch.where(blocks[..., None], table[codes.long()], codes).flatten(-2)
    return BlockTensor(new[..., 0::2] | new[..., 1::2] << 4, t.scales - blocks.to(torch.uint8), t.format), int(blocks.sum())


def halved(t: BlockTensor) -> BlockTensor:
    """Weights at half the size, so that many blocks have no large code: E2M1 2 -> 1, 3 -> 1.5, ... exact where it can be."""
    half = torch.tensor([0, 0, 1, 1, 2, 3, 4, 5] * 2, dtype=torch.uint8) | torch.tensor([0] * 8 + [8] * 8, dtype=torch.uint8)
    codes = half[t.codes().long()]
    return BlockTensor(codes[..., 0::2] | codes[..., 1::2] << 4, t.scales, t.format)


@pytest.mark.parametrize("parts", [("gate", "up"), ("down",), ("gate",), ("gate", "up", "down")], ids="+".join)
def test_another_encoding_of_equal_values_is_right(parts: tuple[str, ...]) -> None:
    """A quantiser that chose a lower scale and doubled codes: not one weight differs, so nothing is wrong."""
    s = situation("gptoss")
    small = {n: halved(getattr(s.layer, n)) for n in ("gate", "up", "down")}  # so that blocks can be written both ways
    s = replace(s, layer=replace(s.layer, **small))
    other, blocks = {}, 0
    for n in parts:
        other[n], count = lower_scales(small[n])
        blocks += count
        assert torch.equal(other[n].dequantise(), small[n].dequantise())
    assert blocks > 100
    arguments, output = replace(s, layer=replace(s.layer, **other)).build()
    d = diagnose(call_of(arguments, output), with_layer("gptoss-tiny", **small))
    assert d.verdict == "right" and not d.findings, str(d)
    want = [t for t, n in (("w13 payload, w13 block scales", "gate"), ("w2 payload, w2 block scales", "down")) if n in parts]
    assert f"{', '.join(want)}: other bytes, the same weights (no fault)" in d.checked[0]
    assert output.equal(s.build()[1])


def test_scales_under_zeros_of_the_padding_may_be_anything() -> None:
    """192 rows padded to 256 by an engine that fills scales with 127 (1.0), as vLLM does for TRT-LLM; but not with 0xFF, which is inf."""
    s = situation("gptoss-192")
    for key in ("w13_scale", "w2_scale"):
        s = s.edit((key,), lambda form: {"fill": 127})
    d = diagnosed("gptoss-192", s)
    assert d.ok and "w13 block scales, w2 block scales: other bytes, the same weights (no fault)" in d.checked[0]
    d = diagnosed("gptoss-192", situation("gptoss-192").edit(("w13_scale",), lambda form: {"fill": 255}))
    assert found(d) == {"padding-not-zero": ("w13_scale",)} and d.findings[0].effect == math.inf and not d.ok


def test_padding_that_meets_zeros_is_no_fault() -> None:
    """Rubbish in w13's padding is multiplied by w2's zeros: worth a line, no fault. In both it is one."""
    s = situation("gptoss-192")
    first = s.edit(("w13", "w13_scale", "w13_bias"), lambda form: {"fill": 0x77})
    d = diagnosed("gptoss-192", first)
    assert d.ok and any("not zero in the padding: w13 payload: 98304 of 98304" in line and "no fault" in line for line in d.checked)
    d = diagnosed("gptoss-192", first.edit(("w2", "w2_scale"), lambda form: {"fill": 0x77}))
    assert found(d) == {"padding-not-zero": ("w13", "w13_scale", "w13_bias", "w2", "w2_scale")} and d.findings[0].effect > 0.1


def test_scales_in_another_shape_are_the_same_bytes() -> None:
    for position in ("gptoss", "8-experts-ep1"):
        arguments, output = situation(position).build()
        flat = {**arguments, "quant_scales": [arguments["quant_scales"][0].flatten(), arguments["quant_scales"][1].flatten(0, 1)]}
        assert diagnose(call_of(flat, output), checkpoint_layer(POSITIONS[position][0])).ok
        wrong = FAULTS["scales-128x4"].injected(situation(position))
        a, o = wrong.build()
        a["quant_scales"] = tuple(t.flatten() for t in a["quant_scales"])
        assert found(diagnose(call_of(a, o), checkpoint_layer(POSITIONS[position][0]))) == {"scales-128x4": ("w13_scale", "w2_scale")}


# -- without a checkpoint; crashed; incomplete -------------------------------------------------------------------


@pytest.mark.parametrize("position", ["gptoss", "8-experts-ep1", "gptoss-tp1"])
def test_without_a_checkpoint(position: str) -> None:
    """A right call is undecided, wrong operands too; only what the kernel or the router did can be seen."""
    s = situation(position)
    assert diagnose(call_of(*s.build())).verdict == "undecided"
    assert diagnose(call_of(*FAULTS["rows-gate-up"].injected(s).build())).verdict == "undecided"
    d = diagnose(call_of(*FAULTS["kernel-ignores-limit"].injected(s).build()))
    assert d.verdict == "wrong" and found(d) == {"kernel-ignores-limit": ()} and "swiglu_limit is passed but not applied" in d.summary
    d = diagnose(call_of(*FAULTS["router-squared"].injected(s).build()))
    assert d.verdict == "wrong" and found(d) == {"router-squared": ()} and d.findings[0].strength == CONSISTENT
    arguments, output = s.build()
    d = diagnose(call_of(arguments, output.roll(1, 0)))
    assert d.verdict == "wrong, not explained" and not d.findings and "does not follow from what was passed" in d.summary


def test_crash_dump_of_a_right_call() -> None:
    arguments, _ = situation("gptoss").build()
    d = diagnose(call_of(arguments, None), checkpoint_layer("gptoss-tiny"))
    assert d.verdict == "crash dump" and not d.findings and not d.ok and d.kernel is None
    assert "the call did not return" in d.summary and "Its arguments are right: look at the kernel, the driver and memory" in d.summary
    assert d.truth.relative_l2 < 0.004 and any("no output was recorded" in line for line in d.checked)
    d = diagnose(call_of(arguments, None))
    assert d.verdict == "crash dump" and "keep the kernel's contract" in d.summary


def test_outputs_beside_a_record_without_its_end_are_said(tmp_path: Path) -> None:
    """They are not trusted, but who copied half of a record should hear of it."""
    folder = Path(shutil.copytree(load(recorded.call("c02").path).source, tmp_path / "call"))
    record = folder / "metadata.jsonl"
    record.write_text(record.read_text().splitlines()[0])
    for there in (True, False):
        d = diagnose(folder, recorded.call("c02").checkpoint_path)
        assert d.verdict == "crash dump" and any("outputs.pt is there, but the record does not say completed" in line for line in d.open) == there, str(d)
        (folder / "outputs.pt").unlink(missing_ok=True)


def test_crash_dump_of_a_wrong_call() -> None:
    arguments, _ = FAULTS["scales-linear"].injected(situation("gptoss")).build()
    d = diagnose(call_of(arguments, None), checkpoint_layer("gptoss-tiny"))
    assert d.verdict == "crash dump" and found(d) == {"scales-linear": ("w13_scale", "w2_scale")} and "block scales linear" in d.summary
    garbage = {**arguments, "fc1_expert_weights": made_bytes(*arguments["fc1_expert_weights"].shape)}
    d = diagnose(call_of(garbage, None), checkpoint_layer("gptoss-tiny"))
    assert d.verdict == "crash dump" and "w13 payload: not what the recipe makes" in d.summary
    assert "besides: block scales linear" in d.summary


@pytest.mark.parametrize("lost", ["fc1_expert_biases", "fc2_expert_biases"])
@pytest.mark.parametrize("checkpoint", [None, "gptoss-tiny"])
def test_one_bias_only_breaks_the_contract(lost: str, checkpoint: str | None) -> None:
    """FlashInfer refuses it ('Back optional access'): inputs, no outputs."""
    arguments, _ = situation("gptoss").build()
    d = diagnose(call_of({**arguments, lost: None}, None), checkpoint and checkpoint_layer(checkpoint))
    assert d.verdict == "crash dump" and found(d) == {"contract-broken": ()} and d.findings[0].strength == PROVED
    assert d.summary.endswith("The kernel's contract is broken: biases") and "pass zeros for the other" in d.findings[0].evidence


def test_broken_contract_of_a_call_that_returned() -> None:
    """Scale sizes are not checked by the kernel: such a call returns, with garbage."""
    arguments, output = situation("gptoss").build()
    short = {**arguments, "quant_scales": [arguments["quant_scales"][0][:, :4], arguments["quant_scales"][1]]}
    d = diagnose(call_of(short, output), checkpoint_layer("gptoss-tiny"))
    assert d.verdict == "wrong" and d.findings[0].id == "contract-broken" and d.findings[0].where == "w13 block scales (quant_scales[0])"
    assert "reads past the end" in d.findings[0].evidence
    assert d.summary == "the kernel's contract is broken: w13 block scales (quant_scales[0])"


def test_pending_flush() -> None:
    d = diagnose(call_of({}, None, status="pending flush"), checkpoint_layer("gptoss-tiny"))
    assert d.verdict == "pending flush" and not d.findings and not d.ok and "that is no crash" in d.summary
    assert "flush_graph_dumps" in d.summary and d.truth is d.kernel is None


def test_a_completed_call_without_an_output_is_not_called_right() -> None:
    arguments, _ = situation("gptoss").build()
    for checkpoint in (None, checkpoint_layer("gptoss-tiny")):
        d = diagnose(call_of(arguments, None, status="completed"), checkpoint)
        assert d.verdict == "undecided" and "holds no output" in d.summary and not d.ok
    arguments, _ = FAULTS["rows-gate-up"].injected(situation("gptoss")).build()
    assert diagnose(call_of(arguments, None, status="completed"), checkpoint_layer("gptoss-tiny")).verdict == "wrong"


# -- outputs that do not follow ----------------------------------------------------------------------------------


@pytest.mark.parametrize("token", [0, 137, 299])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_nan_in_one_token_of_many_is_seen(token: int, value: float) -> None:
    """Only 64 of 300 tokens are emulated, but those that are not finite are among them."""
    arguments, output = situation("gptoss-192", tokens=300, magnitude=0.5).build()
    output = output.clone()
    output[token, 5] = value
    d = diagnose(call_of(arguments, output), checkpoint_layer("gptoss-192"))
    assert d.verdict == "wrong, not explained" and not d.findings and "NaN or inf in other places" in d.summary, str(d)
    assert f"NaN or inf in 1 of 300 tokens, first in token {token}, column 5" in d.open and not d.truth.masks_equal
    assert any(line.startswith("operands and parameters are right: look behind the call") for line in d.checked)


def test_nan_in_scales_that_are_laid_out_twice() -> None:
    """Two layouts, one after the other, and bytes that are not the checkpoint's: what is left to say is said, without an error."""
    scales, twice = situation("minimax").build()[0]["quant_scales"][0].clone(), FAULTS["scales-twice"].injected(situation("minimax")).build()[0]
    broken = twice["quant_scales"][0].clone()
    broken.view(-1)[5000] = 0xFF
    d = diagnose(call_of({**twice, "quant_scales": [broken, *twice["quant_scales"][1:]]}, None), checkpoint_layer("minimax-tiny"))
    assert not torch.equal(scales, broken) and "scales-twice" in found(d), str(d)


def test_nan_that_follows_from_the_operands_is_the_operands_fault() -> None:
    """A scale byte of 0xFF in the call: the kernel is right to give NaN."""
    arguments, _ = situation("minimax").build()
    scales = arguments["quant_scales"][1].clone()
    scales.view(-1)[5000] = 0xFF
    broken = {**arguments, "quant_scales": [arguments["quant_scales"][0], scales]}
    output = CONTRACT.emulate(broken)
    assert not torch.isfinite(output).all()
    d = diagnose(call_of(broken, output), checkpoint_layer("minimax-tiny"))
    assert found(d) == {"scales-nan": ("w2_scale",)} and d.findings[0].strength == PROVED and d.kernel.bit_identical
    assert "1 of 3072 scales of expert 1 are NaN, all others are the checkpoint's" in d.findings[0].evidence, str(d)


def test_unwritten_output_is_the_memory_that_was_passed() -> None:
    arguments, output = situation("gptoss").build()
    memory = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    d = diagnose(call_of({**arguments, "output": memory}, memory.clone()), checkpoint_layer("gptoss-tiny"))
    assert d.verdict == "wrong" and found(d) == {"output-unwritten": ()} and d.findings[0].strength == PROVED
    assert "CUDA_LAUNCH_BLOCKING" in d.findings[0].fault.fix
    zeros = diagnose(call_of({**arguments, "output": memory}, torch.zeros_like(output)), checkpoint_layer("gptoss-tiny"))
    assert found(zeros) == {"output-unwritten": ()} and zeros.findings[0].strength == CONSISTENT
    # stale memory next to a right output means nothing; nor does memory that happens to hold the right output
    assert diagnose(call_of({**arguments, "output": memory}, output), checkpoint_layer("gptoss-tiny")).ok
    assert diagnose(call_of({**arguments, "output": output.clone()}, output), checkpoint_layer("gptoss-tiny")).ok


def test_a_fault_in_tokens_that_are_not_searched_is_not_blamed_on_the_kernel() -> None:
    """One token is another one's output: the tokens around it are right, and no broken computation may be named for them."""
    arguments, output = situation("minimax", tokens=40).build()
    output = output.clone()
    output[17] = output[3]
    d = diagnose(call_of(arguments, output), checkpoint_layer("minimax-tiny"))
    assert d.verdict == "wrong, not explained" and not d.findings, str(d)


def test_a_broken_computation_must_reproduce_all_tokens_not_only_those_furthest_off() -> None:
    """A kernel that ignores the limit in some tokens, and is a little off in the others: that is not ignoring the limit."""
    s = situation("minimax", tokens=24)
    arguments, output = s.build()
    broken = FAULTS["kernel-ignores-limit"].injected(s).build()[1]
    mixed = torch.where((torch.arange(24) < 12)[:, None], broken, output * 1.05)
    d = diagnose(call_of(arguments, mixed), checkpoint_layer("minimax-tiny"))
    assert d.verdict == "wrong, not explained" and not d.findings, str(d)


def test_too_many_weights_are_not_searched_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a large layer stacks of broken computations would take hours: they are left out, and that is said."""
    from mxdebug.diagnosis import outputs

    monkeypatch.setattr(outputs, "MOST_WEIGHTS", 1)
    monkeypatch.setattr(outputs, "FEW_WEIGHTS", 1)
    s = FAULTS["kernel-ignores-limit"].injected(situation("gptoss"))
    assert found(diagnosed("gptoss", s)) == {"kernel-ignores-limit": ()}
    d = diagnosed("gptoss", FAULTS["kernel-router-twice"].injected(s))
    assert d.verdict == "wrong, not explained" and "no known broken computation reproduces it, alone" in d.summary
    assert any(line.startswith("pairs of broken computations were not tried") for line in d.open)


def test_sampled_tokens() -> None:
    """Spread; tokens with an expert here first; some that are not finite before all."""
    arguments, output = situation("8-experts-ep1", tokens=200, top_k=1).build()
    here = arguments["token_selected_experts"].flatten() >= 4
    tokens = sample_tokens(Given.of(CONTRACT, arguments), 64)
    assert len(tokens) == 64 == len(tokens.unique()) and torch.equal(tokens, tokens.sort().values) and here[tokens].all()
    assert tokens.min() < 10 and tokens.max() > 190
    more = sample_tokens(Given.of(CONTRACT, arguments), 150)
    assert len(more) == 150 and here[more].sum() == here.sum()
    bad = output.clone()
    bad[150:190] = torch.nan
    chosen = sample_tokens(Given.of(CONTRACT, arguments), 64, bad)
    assert ((chosen >= 150) & (chosen < 190)).sum() >= 8 and len(chosen) == 64
    assert sample_tokens(Given.of(CONTRACT, arguments), 1000).tolist() == list(range(200))


# -- bytes that nothing explains ---------------------------------------------------------------------------------


@pytest.mark.parametrize("key", ["w13", "w13_scale", "w13_bias", "w2", "w2_scale", "w2_bias"])
def test_random_bytes_are_not_explained(key: str) -> None:
    s = situation("gptoss")
    arguments = s.arguments()
    o = CONTRACT.operand(key)
    t = o.get(arguments)
    garbage = made_bytes(*t.shape) % 250
    if key.endswith("bias"):
        garbage = torch.randn(t.shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    broken = put(arguments, key, garbage)
    d = diagnose(call_of(broken, CONTRACT.emulate(broken)), checkpoint_layer("gptoss-tiny"))
    assert d.verdict == "wrong, not explained" and not d.findings, str(d)
    assert f"{o.title}: not what the recipe makes of this checkpoint, and no known fault explains it" in d.summary
    line = next(line for line in d.open if line.startswith(f"{o.title}: no known change"))
    want = {"w13": "0 of 512 rows", "w2": "0 of 384 rows"}.get(key)
    assert want is None or want in line
    assert "are not the checkpoint's, the first is" in line and "5 of 6 operands" in d.checked[0]


def put(arguments: dict[str, Any], key: str, t: Tensor) -> dict[str, Any]:
    """The arguments with one operand replaced."""
    name, _, index = CONTRACT.operand(key).argument.partition("[")
    if index:
        return {**arguments, name: [t if i == int(index[0]) else u for i, u in enumerate(arguments[name])]}
    return {**arguments, name: t}


def test_weights_of_another_checkpoint() -> None:
    """Same shapes, other weights: said in one sentence."""
    arguments, output = situation("minimax").build()
    d = diagnose(call_of(arguments, output), with_layer("gptoss-tiny", gate_bias=None, up_bias=None, down_bias=None))
    assert d.verdict == "wrong, not explained" and d.summary.startswith("none of this call's weights are this layer's")
    assert "another layer or checkpoint" in d.summary


def test_one_broken_expert_is_named() -> None:
    arguments, _ = situation("gptoss").build()
    w13 = arguments["fc1_expert_weights"].clone()
    w13[2] = made_bytes(*w13[2].shape)
    broken = put(arguments, "w13", w13)
    d = diagnose(call_of(broken, CONTRACT.emulate(broken)), checkpoint_layer("gptoss-tiny"))
    assert d.verdict == "wrong, not explained" and not d.findings
    assert any("gives the bytes of expert 2. In expert 2" in line for line in d.open), str(d)
    # a fault in all experts, and one of them broken besides: both are said
    both = put(FAULTS["rows-gate-up"].injected(situation("gptoss")).arguments(), "w13_scale", put(arguments, "w13", w13)["quant_scales"][0])
    scales = FAULTS["scales-128x4"].injected(situation("gptoss"), ("w13_scale",)).arguments()["quant_scales"][0].clone()
    scales[1] = made_bytes(*scales[1].shape) % 250
    both = put(arguments, "w13_scale", scales)
    d = diagnose(call_of(both, CONTRACT.emulate(both)), checkpoint_layer("gptoss-tiny"))
    assert d.verdict == "wrong, not explained" and found(d) == {"scales-128x4": ("w13_scale",)}
    assert "3 of 4 experts" in d.findings[0].evidence and "besides: block scales swizzled 128x4" in d.summary


@pytest.mark.parametrize("what", ["zero", "twice"])
def test_half_of_the_weight_not_loaded(what: str) -> None:
    """w3 never loaded, or w1 loaded in its place: that is no other order of the rows, and must not be called one."""
    s = situation("minimax")
    layer = s.layer
    up = replace(layer.up, payload=torch.zeros_like(layer.up.payload)) if what == "zero" else replace(layer.up, payload=layer.gate.payload)
    arguments, output = replace(s, layer=replace(layer, up=up)).build()
    d = diagnose(call_of(arguments, output), checkpoint_layer("minimax-tiny"))
    if what == "zero":
        assert found(d) == {"operand-not-loaded": ("w13",)} and d.findings[0].strength == PROVED, str(d)
        lost = int((layer.up.payload != 0).sum())
        assert f"{lost} of {2 * layer.up.payload.numel()} bytes of every expert are zero where the checkpoint's are not" in d.findings[0].evidence
    else:
        assert d.verdict == "wrong, not explained" and not d.findings
        assert any("256 of 512 rows are in place, 256 stand elsewhere" in line for line in d.open), str(d)


def test_scales_that_were_never_written_are_not_proved_to_be_cast() -> None:
    """All zeros: what a cast by value leaves of scales below 1, and what fresh memory holds."""
    arguments, _ = situation("gptoss").build()
    zeros = put(arguments, "w2_scale", torch.zeros_like(arguments["quant_scales"][1]))
    d = diagnose(call_of(zeros, CONTRACT.emulate(zeros)), checkpoint_layer("gptoss-tiny"))
    assert found(d) == {"scales-cast-by-value": ("w2_scale",)} and d.findings[0].strength == CONSISTENT
    assert any("every byte is zero, which memory that was never written also gives" in line for line in d.open)


def test_rows_in_an_unknown_order_are_written_out() -> None:
    """All operands of w13 in one order, the bias too: the permutation is printed."""
    s = FAULTS["rows-unnamed"].injected(situation("gptoss"), W13)
    d = diagnosed("gptoss", s)
    assert found(d) == {"rows-unnamed": W13} and d.findings[0].strength == PROVED
    assert "physical rows hold logical rows 262,261,260,259,258,257,256,269,268,267,266,265,... of [w1; w3]" in d.findings[0].evidence
    r = recover("w13", s.arguments()["fc1_expert_weights"], situation("gptoss").plan.forms["w13"], Source(s.layer, Parallel()))
    seen = SM90_WEIGHT_INTERLEAVE.unpack(s.arguments()["fc1_expert_weights"], 512, 192)
    assert torch.equal(seen, torch.cat([s.layer.gate.payload, s.layer.up.payload], 1)[:, r.permutation]) and r.complete


def test_one_mistake_is_likelier_than_two() -> None:
    """At 4 columns linear and 8x4 are the same bytes: w2's scales are called what w13's are, which can be told."""
    s = FAULTS["scales-8x4"].injected(situation("gptoss-tp1"))
    d = diagnosed("gptoss-tp1", s)
    assert found(d) == {"scales-8x4": ("w13_scale", "w2_scale")} and d.findings[0].strength == PROVED
    assert any("w2 block scales: at this size the same bytes as linear" in line for line in d.open)


def test_scales_that_are_off_say_by_how_much() -> None:
    s = situation("gptoss", few=True)
    d = diagnosed("gptoss", s.edit(("w13_scale",), lambda form: {"values": E8M0_SHIFTED[2]}).edit(("w2_scale",), lambda form: {"values": E8M0_SHIFTED[-1]}))
    assert found(d) == {"scales-off": ("w13_scale", "w2_scale")} and "off by a power of two" in d.summary
    assert d.findings[0].evidence == "w13 block scales: bytes equal the checkpoint's scales times 2^2; w2 block scales: bytes equal the checkpoint's scales times 2^-1"


def test_effect_of_each_fault_alone() -> None:
    """Two faults on one operand: each effect is that of the fault alone, not of the operand as passed."""
    s = situation("gptoss")
    for id in ("rows-gate-up", "scales-128x4"):
        alone = diagnosed("gptoss", FAULTS[id].injected(s, ("w13_scale",)))
        both = diagnosed("gptoss", FAULTS["rows-gate-up"].injected(FAULTS["scales-128x4"].injected(s, ("w13_scale",)), ("w13_scale",)))
        assert both.finding(id).effect == alone.finding(id).effect == pytest.approx(alone.truth.relative_l2, abs=0.01)


def test_recover_states_what_it_found() -> None:
    s = situation("gptoss-192")
    plan, source = s.plan, Source(s.layer, Parallel())
    edited = plan.edit("w13_scale", padding=PAD_END, experts=(1, 2, 3, 0))
    r = recover("w13_scale", edited.convert(s.layer)["w13_scale"], plan.forms["w13_scale"], source)
    assert (r.form.padding, r.experts, r.complete, r.tp_rank, r.permutation) == (PAD_END, (1, 2, 3, 0), True, 0, None)
    clean = recover("w2", plan.convert(s.layer)["w2"], plan.forms["w2"], source)
    assert clean.form == clean.expected and clean.experts == clean.expected_experts == (0, 1, 2, 3) and not clean.alternatives


# -- parameters --------------------------------------------------------------------------------------------------


def test_parameters_that_the_checkpoint_does_not_state_are_suspected() -> None:
    s = situation("minimax")
    plain = with_layer("minimax-tiny", activation=Activation("silu"))
    arguments, output = s.build()
    d = diagnose(call_of(arguments, output), plain)
    assert set(found(d)) == {"swiglu-alpha-changed", "swiglu-beta-changed", "swiglu-limit-changed"}
    assert {f.strength for f in d.findings} == {SUSPECTED}
    assert "the call passes 1.702 for every expert, the checkpoint states none" in d.finding("swiglu-alpha-changed").evidence


def test_parameters_of_one_expert() -> None:
    """A value by expert that is wrong for one of them, with both printed."""
    s = situation("minimax")
    limit = s.activation.limit.clone()
    limit[2] = 5.0
    d = diagnosed("minimax", replace(s, activation=replace(s.activation, limit=limit)))
    assert found(d) == {"swiglu-limit-changed": ()}
    assert "values by expert: 7, 7, 5, 7" in d.findings[0].evidence and "7 for every expert" in d.findings[0].evidence


def test_activation_of_another_kind() -> None:
    d = diagnosed("gptoss", FAULTS["activation-kind"].injected(situation("gptoss")))
    assert found(d) == {"activation-kind": ()} and "the call computes gelu, the checkpoint means swiglu" in d.findings[0].evidence


def test_squared_router_weights_are_measured_against_their_roots() -> None:
    """The distance from the checkpoint's result is that of the right weights, which are the roots."""
    d = diagnosed("gptoss", FAULTS["router-squared"].injected(situation("gptoss")))
    assert d.truth.relative_l2 > 0.1 and d.floor.relative_l2 < 0.004
    assert d.findings[0].effect == pytest.approx(d.truth.relative_l2, abs=0.01)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 40), st.integers(1, 8),
       st.sampled_from(["renormalised", "softmax", "sigmoid", "scaled", "ones"]), st.booleans())
def test_router_weights_of_every_kind_are_no_alarm(seed: int, tokens: int, k: int, kind: str, bf16: bool) -> None:
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(tokens, 64, generator=g) * 2
    top = {"renormalised": lambda: logits.topk(k).values.softmax(-1), "softmax": lambda: logits.softmax(-1).topk(k).values,
           "sigmoid": lambda: logits.sigmoid().topk(k).values, "scaled": lambda: 2.5 * logits.topk(k).values.softmax(-1),
           "ones": lambda: torch.full((tokens, k), 1.0)}[kind]()
    assert examine_router(top.bfloat16().float() if bf16 else top) == []


def test_squared_router_weights_of_few_tokens() -> None:
    """In bf16 a single token's roots may sum to 1 by chance: several are needed. NaN and negative weights say nothing."""
    w = torch.rand(6, 4, generator=torch.Generator().manual_seed(0)).softmax(-1)
    assert [f.id for f in examine_router(w.square())] == ["router-squared"]
    assert [f.id for f in examine_router(w[:1].square())] == ["router-squared"]
    coarse = w.bfloat16().square().float().bfloat16().float()
    assert examine_router(coarse[:1]) == [] and [f.id for f in examine_router(coarse)] == ["router-squared"]
    assert examine_router(w.square() * torch.nan) == examine_router(-w.square()) == examine_router(w[:, :1].square()) == []


# -- what the data could not have shown ---------------------------------------------------------------------------


def test_vacuity_is_said() -> None:
    quiet = diagnosed("gptoss", situation("gptoss", magnitude=0.05, tokens=3, top_k=1))
    assert quiet.ok and any("no pre-activation of the sampled tokens reaches the limit 7" in line for line in quiet.open)
    assert any("touch" in line and "of 4 experts here" in line for line in quiet.open)
    assert any("top-1 routing" in line for line in quiet.open)
    loud = diagnosed("gptoss", situation("gptoss", tokens=12))
    assert loud.ok and not loud.open
    layer = checkpoint_layer("gptoss-tiny").layer
    flat = {n: replace(getattr(layer, n), scales=torch.full_like(getattr(layer, n).scales, 120)) for n in ("gate", "up", "down")}
    s = situation("gptoss")
    d = diagnose(call_of(*replace(s, layer=replace(s.layer, **flat)).build()), with_layer("gptoss-tiny", **flat))
    assert d.ok and {f"all {w} block scales are equal: a misplaced scale could not show (no fault of scale placement)" for w in ("w13", "w2")} <= set(d.open)
    assert d.open[-1] == f'a call that hides none of this: mxdebug.probe.probe("{PATH}")'


# -- input that does not fit --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("position", "checkpoint", "words"), [
    ("gptoss", "gptoss-8-experts", r"\[8, 256, 384\]: layer 0's part.*got \[4, 256, 384\].*parallel position that the kernel is not told: --tp SIZE RANK"),
    ("gptoss-tp1", "gptoss-8-experts", r"\[8, 128, 384\].*tp 1/2"), ("8-experts-ep1", "gptoss-tiny", r"\[2, 256, 384\].*ep 1/2")])
def test_a_checkpoint_that_does_not_fit(position: str, checkpoint: str, words: str) -> None:
    with pytest.raises(MxdebugError, match=words):
        diagnose(call_of(*situation(position).build()), checkpoint_layer(checkpoint))


def test_a_padded_twin_fits_by_shape_and_is_told_by_its_bytes() -> None:
    """192 padded is 256, and the one checkpoint is a part of the other: the shapes agree. A quarter of the rows is missing."""
    d = diagnose(call_of(*situation("gptoss-192").build()), checkpoint_layer("gptoss-tiny"))
    assert d.verdict == "wrong, not explained" and set(found(d)) == {"operand-not-loaded"}, str(d)
    assert any(line.startswith("w13 bias") and "384 of 512 values are in place, 128 are zero" in line for line in d.open)


def test_outputs_of_another_call() -> None:
    arguments, output = situation("gptoss").build()
    for bad, words in ((output[:5], r"output: expected shape \[12, 384\], got shape \[5, 384\]"),
                       (output.half(), "output: expected torch.bfloat16, got torch.float16"),
                       (output.float(), "output: expected torch.bfloat16, got torch.float32")):
        for checkpoint in (None, checkpoint_layer("gptoss-tiny")):
            with pytest.raises(MxdebugError, match=words):
                diagnose(call_of(arguments, bad), checkpoint)


def test_unknown_calls_and_engines() -> None:
    arguments, output = situation("gptoss").build()
    with pytest.raises(MxdebugError, match="call: expected cutlass_fused_moe.*got trtllm_fp4_block_scale_moe"):
        diagnose(call_of(arguments, output, function="trtllm_fp4_block_scale_moe"))
    with pytest.raises(MxdebugError, match="engine: expected only vllm, got 'sglang'"):
        diagnose(call_of(arguments, output), checkpoint_layer("gptoss-tiny"), engine="sglang")
    d = diagnose(call_of({**arguments, "tp_size": 2, "tp_rank": 2}, output), checkpoint_layer("gptoss-tiny"))
    assert [f.id for f in d.findings] == ["contract-broken"] and "expected 0 <= rank < tp_size = 2, got 2" in d.findings[0].evidence


# -- how it prints -------------------------------------------------------------------------------------------------


def samples() -> dict[str, Callable[[], Diagnosis]]:
    s = situation("gptoss")
    arguments, output = s.build()
    layer = checkpoint_layer("gptoss-tiny")
    return {
        **{n: (lambda r=r: diagnose(r.path, r.checkpoint_path)) for n, r in recorded.CALLS.items()},
        "no checkpoint": lambda: diagnose(call_of(arguments, output)), "crash": lambda: diagnose(call_of(arguments, None), layer),
        "one bias": lambda: diagnose(call_of({**arguments, "fc1_expert_biases": None}, None), layer),
        "pending": lambda: diagnose(call_of({}, None, status="pending flush")),
        "kernel": lambda: diagnosed("gptoss", FAULTS["kernel-clamp-2"].injected(s)),
        "garbage": lambda: diagnose(call_of(put(arguments, "w13", made_bytes(4, 512, 192)), output.flip(0)), layer),
        "ep": lambda: diagnosed("8-experts-ep1", FAULTS["ep-rank"].injected(situation("8-experts-ep1"))),
        "rolled": lambda: diagnosed("gptoss", FAULTS["experts-rolled"].injected(s)),
        "order": lambda: diagnosed("gptoss", FAULTS["rows-unnamed"].injected(s)),
        "contract": lambda: diagnose(call_of(put(arguments, "w2_scale", arguments["quant_scales"][1][:, :2]), output), layer),
    }


@pytest.mark.parametrize("what", list(samples()))
def test_text_is_narrow_and_complete(what: str) -> None:
    d = samples()[what]()
    text = str(d)
    lines = text.splitlines()
    assert max(map(len, lines)) <= 120 and lines[0].startswith(f"{d.verdict.upper()}: ") and text == text.rstrip() and repr(d) == text
    flat = " ".join(text.split())
    parts = [p for f in d.findings for p in (f.fault.title, f.strength, f.where, f.evidence, f.fix)]
    for part in (d.summary, *parts, *d.checked, *d.open, *(value for _, value in d.call)):
        assert " ".join(part.split()) in flat
    assert [line for line in lines if re.match(r"\d+\. ", line)] and d.findings or not d.findings
    assert "tensor(" not in text and "<function" not in text and "None" not in text and "nan" not in text
    page = html(d)
    for part in (d.verdict.upper(), *(f.fault.title for f in d.findings)):
        assert part.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("'", "&#x27;").replace('"', "&quot;") in page
    assert d._repr_html_() == page and page.count("<div") == page.count("</div>") and page.count("<table") == page.count("</table>")


def test_first_lines_of_a_diagnosis(recordings: dict[str, Diagnosis]) -> None:
    """What someone sees who looks for five seconds."""
    lines = str(recordings["c04"]).splitlines()
    assert lines[:7] == [
        "WRONG: block scales linear; the kernel reads the SM90 fold (w13 block scales)", "",
        "1. block scales linear; the kernel reads the SM90 fold  [proved]", "  where     w13 block scales",
        "  evidence  bytes equal the checkpoint's in this form, for every expert (4)",
        "  effect    alone it moves the output by relative L2 1.164",
        "  fix       call interleave_moe_scales_for_sm90_mixed_gemm once, on linear uint8 scales"]


def test_html_escapes_what_comes_from_files() -> None:
    """Names and values of dumps and checkpoints are untrusted."""
    evil = "<script>alert('x')</script>\"&"
    s = situation("gptoss")
    arguments, output = FAULTS["swiglu-limit-lost"].injected(s).build()
    layer = checkpoint_layer("gptoss-tiny")
    layer = replace(layer, provenance={**layer.provenance, "limit": evil})
    d = diagnose(call_of(arguments, output, versions={"flashinfer": evil.replace(" ", ""), "torch": "2.11"}), layer)
    assert evil in d.findings[0].evidence
    finding = Finding(replace(FAULTS["rows-gate-up"], title=evil, fix=evil, reports=(evil,)), PROVED, evil, evil)
    d = replace(d, findings=(*d.findings, finding), summary=evil, verdict=evil, checked=(evil,), open=(evil,), call=((evil, evil),))
    page = html(d)
    assert "<script" not in page and "alert('x')" not in page and page.count("&lt;script&gt;") >= 10 and "\"&\"" not in page


def test_findings_can_be_asked_for() -> None:
    d = diagnosed("gptoss", FAULTS["rows-gate-up"].injected(situation("gptoss")))
    assert d.finding("rows-gate-up") is d.findings[0] and d.finding("rows-interleaved") is None and d.findings[0].id == "rows-gate-up"


def test_compare_is_what_the_kernel_line_says() -> None:
    arguments, output = situation("gptoss").build()
    d = diagnose(call_of(arguments, output), checkpoint_layer("gptoss-tiny"))
    assert d.kernel == compare(output, CONTRACT.emulate(arguments))
    assert f"emulation of what was passed: {d.kernel}"[:60] in " ".join(str(d).split())
    assert isinstance(checkpoint_layer("gptoss-tiny").layer, MoELayer)


# -- bytes that only seem to be the checkpoint's ---------------------------------------------------------------------------


def passed_instead(key: str, change: Callable[[Tensor], Tensor]) -> Diagnosis:
    """The recorded call c01 with another operand, and the output that the kernel would write."""
    r = recorded.call("c01")
    call = load(r.path)
    arguments = dict(call.arguments)
    o = CONTRACT.operand(key)
    o.put(arguments, change(o.get(arguments).clone()))
    return diagnose(replace(call, arguments=arguments, outputs=(CONTRACT.emulate(arguments),)), r.checkpoint_path)


def eight_bytes(t: Tensor) -> Tensor:
    """Complement 8 bytes that are one row's, as the kernel reads it."""
    logical = SM90_WEIGHT_INTERLEAVE.unpack(t[0], 384, 128)
    logical[17, 64:72] ^= 255
    t[0] = SM90_WEIGHT_INTERLEAVE.pack(logical).reshape(t[0].shape)
    return t


@pytest.mark.parametrize("change", [lambda t: t ^ 255, eight_bytes], ids=["all", "eight bytes"])
def test_complemented_bytes_are_not_the_checkpoints(change: Callable[[Tensor], Tensor]) -> None:
    d = passed_instead("w2", change)
    assert d.verdict == "wrong, not explained" and not d.findings and dict(d.operands)["w2"] == "different"


@pytest.mark.parametrize("confirmed", [False, True])
def test_a_hash_that_says_equal_is_not_believed(confirmed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hash that mxdebug had at first is the same for a word and its complement. Bytes are compared after it; and should that fail as
    well, the call is not right if another layer comes out of it."""
    def collides(t: Tensor) -> Tensor:
        words = torch.nn.functional.pad(t, (0, -t.shape[-1] % 8)).contiguous().view(torch.int64)
        return ((words ^ (words >> 29)) * (2 * torch.arange(words.shape[-1]) + 1)).sum(-1)

    module = sys.modules["mxdebug.diagnosis.recover"]  # the package has a function of that name
    monkeypatch.setattr(module, "row_hashes", collides)
    if not confirmed:
        monkeypatch.setattr(module, "_confirmed", lambda seen, r, source: r)
    d = passed_instead("w2", lambda t: t ^ 255)
    assert d.verdict == "wrong, not explained" and "w2 payload" in d.summary
    assert any("no known change" in t for t in d.open) == confirmed


@pytest.mark.parametrize("byte", [0x00, 0xFF])
@pytest.mark.parametrize("key", ["w13", "w13_scale", "w2", "w2_scale"])
def test_memory_that_was_never_written_proves_nothing(key: str, byte: int) -> None:
    d = passed_instead(key, lambda t: torch.full_like(t.view(torch.uint8), byte).view(t.dtype))
    assert not d.ok and not any(f.strength == PROVED for f in d.findings), str(d)
    said = (*d.open, *(f.evidence for f in d.findings))
    assert any(f"is 0x{byte:02x}, as of memory that was never written or was filled" in t or "every byte is zero, which memory" in t for t in said), str(d)
