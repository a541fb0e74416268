"""Notebook 05 with other data in its first cell, without a kernel; and the checks of its exercises.

Its cells must go through for every kind of call: right, wrong, undecided or broken, of experts or linear, with and without a checkpoint.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import making_linear
import making_nvfp4
import pytest
import torch
from making import call_of
from test_linear_diagnosis import SIGNATURE
from test_path_dumps import signature

from mxdebug import MxdebugError, open_checkpoint, recorded
from mxdebug.calls import load
from mxdebug.diagnosis import diagnose
from mxdebug.exercises import check
from mxdebug.exercises_own import CHECKS, made_call, unknown_call
from mxdebug.faults import FAULTS, LINEAR_FAULTS, LinearSituation, Situation
from mxdebug.recipes import recipe
from mxdebug.recipes.w4a16.recipe import linear_recipe
from mxdebug.reference import Parallel
from mxdebug.views import own, own_fix

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "05_bring_your_own.ipynb"
BF16, MXFP8 = "mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16", "mxfp4/FLASHINFER_CUTLASS_MXFP4_MXFP8"
SM100, SM12X = "nvfp4_w4a16/flashinfer_cutedsl/sm100", "nvfp4_w4a16/flashinfer_cutedsl/sm12x"


@functools.cache
def cells() -> tuple[str, ...]:
    """The notebook's code, the exercises left out: they are about calls of their own."""
    found = []
    for cell in json.loads(NOTEBOOK.read_text())["cells"]:
        if cell["cell_type"] == "markdown" and "## Exercises" in "".join(cell["source"]):
            return tuple(found)
        found += ["".join(cell["source"])] if cell["cell_type"] == "code" else []
    raise AssertionError("the notebook has no exercises")


def shown(*things: Any, raw: bool = False) -> None:
    """In the place of IPython's display: print what a notebook without figures would show."""
    for t in things:
        print(t["text/plain"] if raw else t)


def run(capsys: pytest.CaptureFixture[str], dump: Any, checkpoint: Any = None, *, call: int | None = None, layer: Any = None, tp: Any = None) -> str:
    """Run all cells with these values in the first one; what they printed. A traceback of any cell fails the test."""
    names: dict[str, Any] = {}
    for i, source in enumerate(cells()):
        exec(compile(source.replace("CALL = None", f"CALL = {call}"), f"cell {i}", "exec"), names)
        if i == 0:
            assert {"DUMP", "CHECKPOINT", "LAYER", "TP"} <= set(names)
            names.update(DUMP=dump, CHECKPOINT=checkpoint, LAYER=layer, TP=tp)
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def _no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own, "_said", [])
    monkeypatch.setattr("IPython.display.display", shown)


# -- calls of every kind ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", recorded.CALLS)
def test_recorded_calls(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    r = recorded.call(name)
    text = run(capsys, r.path, r.checkpoint_path)
    right = r.wrong.startswith("nothing")
    verdict = "RIGHT" if right else "WRONG"
    assert f"call 0: {verdict}" in text and f"**{verdict}**" in text
    line = next(t for t in text.splitlines() if t.startswith("all right"))
    # relative L2: whatever was wrong, right operands bring the output back to what a right call has
    assert line.split()[2] == f"{diagnose(r.path, r.checkpoint_path).floor.relative_l2:.3f}"
    assert ("not as the recipe makes them: none" in text) == right
    assert right or "EXPLAINED: every byte" in text


def test_without_a_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, recorded.call("c04").path)
    assert "UNDECIDED" in text and "not for this call. CHECKPOINT: expected the folder of the model, got none" in flat(text)
    assert "a what-if: not for this call. The reason is above: CHECKPOINT." in text
    assert "[E, 2I/64, H/128, 16, 16]" in text  # the contract is there all the same


def test_several_calls_and_one_picked(capsys: pytest.CaptureFixture[str]) -> None:
    dump = own.shipped_dump("c02", "c05", "c09")
    text = run(capsys, dump, recorded.call("c05").checkpoint_path)
    assert "call 0: RIGHT\ncall 1: WRONG" in text and "\ncall 1\n" in text
    text = run(capsys, dump, recorded.call("c05").checkpoint_path, call=2)
    assert "\ncall 2\n" in text and "**RIGHT**" in text


def of(path: str, checkpoint: Path) -> Situation:
    """A right call on the path, of the checkpoint's layer."""
    layer = open_checkpoint(checkpoint).layer()
    g = torch.Generator().manual_seed(3)
    x = torch.randn(5, layer.layer.hidden, generator=g).bfloat16()
    ids = torch.stack([torch.randperm(layer.layer.experts, generator=g)[:2] for _ in range(5)]).int()
    return Situation.right(recipe("vllm", path, layer.kind), layer.layer, x, ids, torch.softmax(torch.randn(5, 2, generator=g), -1))


def save(s: Situation, folder: Path, **changes: Any) -> Path:
    arguments, output = s.build()
    function = s.recipe.contract.function
    call_of(arguments, output, function=function, signature=signature(function), **changes).save(folder)
    return folder


PATHS = [(MXFP8, None, "scales-linear"), ("mxfp4/FLASHINFER_TRTLLM_MXFP4_BF16", None, "rows-gate-up"), ("nvfp4/FLASHINFER_CUTLASS", "nvfp4", None),
         ("nvfp4/FLASHINFER_TRTLLM", "nvfp4", "nibbles-swapped"), ("nvfp4/FLASHINFER_CUTEDSL", "nvfp4", "scales-linear")]


@pytest.mark.parametrize(("path", "kind", "fault"), PATHS, ids=[f"{p} {f}" for p, _, f in PATHS])
def test_other_paths(path: str, kind: str | None, fault: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = recorded.ROOT / "checkpoints" / "gptoss-tiny"
    if kind:
        checkpoint = making_nvfp4.write(tmp_path / "model", making_nvfp4.MODELOPT, differ=False, hidden=512, intermediate=256)
    s = of(path, checkpoint)
    text = run(capsys, save(FAULTS[fault].injected(s) if fault else s, tmp_path / "dumps"), checkpoint)
    assert f"call 0: {'WRONG' if fault else 'RIGHT'}" in text and path in text, text
    assert "not for this call" not in text, text


@pytest.mark.parametrize("path", [SM100, SM12X])
@pytest.mark.parametrize("fault", [None, "scales-linear", "x-padded-by-bytes"])
def test_linear_calls(path: str, fault: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = making_linear.write_compressed_tensors(tmp_path / "model", bias=True)
    chosen = open_checkpoint(checkpoint).linear("model.layers.0.self_attn.qkv_proj")
    x = torch.randn(5, chosen.layer.k, generator=torch.Generator().manual_seed(1)).bfloat16()
    s = LinearSituation.right(linear_recipe(path, chosen.kind), chosen.layer, x)
    s = s if fault is None else LINEAR_FAULTS[fault].inject(s)
    arguments, output = s.build()
    call_of(arguments, output, function="mm_bf16_fp4", signature=SIGNATURE).save(tmp_path / "dumps")
    text = run(capsys, tmp_path / "dumps", checkpoint)
    assert "call 0: " + ("RIGHT" if fault is None else "CRASH DUMP" if output is None else "WRONG") in text, text
    assert "the call explorer: not for this call" in text
    assert text.count("not for this call") == 1 or output is None, text
    assert "UNDECIDED" in run(capsys, tmp_path / "dumps") or output is None


# -- calls that are broken ------------------------------------------------------------------------------------------------


def crashed(folder: Path) -> Path:
    replace(load(recorded.call("c03").path), outputs=(), status="crashed").save(folder)
    return folder


def test_crash_dump(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, crashed(tmp_path), recorded.call("c03").checkpoint_path)
    assert "CRASH DUMP" in text and "the output against the checkpoint: not for this call. output: expected what the kernel wrote" in flat(text)
    assert "all right" in text and "\nas recorded" not in text  # what-if needs no output


def test_broken_contract(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = load(recorded.call("c01").path)
    broken = {**call.arguments, "fc1_expert_biases": call.arguments["fc1_expert_biases"].float()}
    replace(call, arguments=broken).save(tmp_path)
    text = run(capsys, tmp_path, recorded.call("c01").checkpoint_path)
    assert "contract is broken" in text and "float32 [4, 512]" in text and "a what-if: not for this call. The reason is above: w13 bias" in text


def test_pending_flush(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = crashed(tmp_path)
    (file,) = folder.glob("*/metadata.jsonl")
    record = json.loads(file.read_text().splitlines()[-1])
    file.write_text(json.dumps({**record, "execution_status": "graph_capture_pending_flush", "graph_capture": True}))
    for tensors in folder.glob("*/*.pt"):
        tensors.unlink()
    text = run(capsys, folder, recorded.call("c03").checkpoint_path)
    assert "PENDING FLUSH" in text and "Record again in eager mode" in flat(text) and "a contract: not for this call" in text


def test_unreadable_and_foreign_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = crashed(tmp_path)
    (file,) = folder.glob("*/metadata.jsonl")
    file.write_text("{")
    call = load(recorded.kernel_dumps("block_scale_interleave")[0])
    call.save(folder)
    text = run(capsys, folder, recorded.call("c03").checkpoint_path)
    assert "cannot be read" in text and "no path of mxdebug's" in text and text.count("NOT READ") == 2, text
    assert "a diagnosis: not for this call" in text and "a report: not for this call. The reason is above: metadata.jsonl." in text


@pytest.mark.parametrize("checkpoint", [recorded.ROOT / "nowhere", recorded.call("c02").checkpoint_path, recorded.W4A16], ids=["none there", "another", "linear"])
def test_a_checkpoint_that_does_not_fit(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, recorded.call("c01").path, checkpoint)
    assert "NOT READ" in text or "WRONG, NOT EXPLAINED" in text
    assert "SM90 weight interleave" in text  # what needs no checkpoint is shown


def test_settings_that_do_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    r = recorded.call("c01")
    for settings, says in (({"layer": 7}, "does not fit CHECKPOINT and LAYER"), ({"tp": (2, 1)}, "does not fit CHECKPOINT and TP"),
                           ({"layer": "model.layers.0.self_attn.qkv_proj"}, "change LAYER in the first cell, and run all cells again")):
        text = flat(run(capsys, r.path, r.checkpoint_path, **settings))
        assert says in text and "NOT READ" in text and "**RIGHT**" not in text and "Nothing can be said" not in text, text
    r = recorded.call("c13")
    text = flat(run(capsys, r.path, r.checkpoint_path, tp=(4, 1)))  # of the same size, with padding
    assert "TP is (4, 1) in the first cell: if this process was another rank, change that" in text
    with pytest.raises(MxdebugError, match="None, or a number from 0 to 0"):
        run(capsys, r.path, r.checkpoint_path, call=3)


@pytest.mark.parametrize(("name", "value"), [
    ("DUMP", None), ("DUMP", ""), ("DUMP", "/nowhere"), ("DUMP", 3), ("CHECKPOINT", 5), ("CHECKPOINT", " "), ("LAYER", -1), ("LAYER", "-1"), ("LAYER", 1.5),
    ("LAYER", True), ("LAYER", ""), ("TP", 2), ("TP", "2,1"), ("TP", (0, 0)), ("TP", (2, 2)), ("TP", (2,)), ("TP", (2, 1.0)), ("TP", [2, -1])])
def test_a_setting_that_cannot_be_is_said_by_its_name(name: str, value: Any) -> None:
    settings = {"DUMP": recorded.call("c13").path, "CHECKPOINT": None, "LAYER": None, "TP": None, name: value}
    with pytest.raises(MxdebugError, match=f"^{name}: .*change {name} in the first cell, and run all cells again$"):
        own.open_dump(settings["DUMP"], settings["CHECKPOINT"], layer=settings["LAYER"], tp=settings["TP"])


def test_an_empty_dump_is_said_by_its_name(tmp_path: Path) -> None:
    with pytest.raises(MxdebugError, match="^DUMP: .*change DUMP in the first cell, and run all cells again$"):
        own.open_dump(tmp_path)
    dump = own.open_dump(recorded.call("c13").path)
    for number in (1, -1, True, 0.0, "0"):
        with pytest.raises(MxdebugError, match="^CALL: .*change CALL in this cell"):
            dump.pick(number)


def test_settings_are_taken_as_they_are_meant() -> None:
    r = recorded.call("c13")
    (mine,) = own.open_dump(str(r.path), str(r.checkpoint_path), layer="0", tp=[2, 1]).calls
    assert mine.layer == 0 and mine.tp == (2, 1) and mine.diagnosis.ok and mine.chosen.index == 0


def test_a_wrong_checkpoint_is_quoted_as_the_setting(capsys: pytest.CaptureFixture[str]) -> None:
    text = run(capsys, recorded.call("c01").path, "/none")
    assert "CHECKPOINT: expected a folder with config.json" in text and "got no such path (/none)" in flat(text)
    assert "weights against the checkpoint: not for this call. The reason is above: CHECKPOINT." in text and "above: none" not in text


def test_equal_reasons_are_said_once() -> None:
    folder = recorded.kernel_dumps("mxfp8_quantize")[0].parent
    text = own.open_dump(folder).verdicts(most=11)
    assert flat(text).count("got mxfp8_quantize") == 1 and text.startswith("calls 0, 1, 2, 3, 4, 5: NOT READ: call"), text
    assert text.count("NOT READ") == 4  # of four functions


# -- what differs, and what to do next -----------------------------------------------------------------------------------


def changed(folder: Path, key: str | None = None, byte: int | None = None, name: str = "c01", **changes: Any) -> own.Own:
    """A right call with one byte, by its place in the operand, or something else changed."""
    r, call = recorded.call(name), load(recorded.call(name).path)
    arguments = dict(call.arguments) | changes
    if key is not None:
        o = own.open_dump(r.path).calls[0].kernel.operand(key)
        t = o.get(arguments).clone()
        t.view(-1)[byte] ^= 0x11
        o.put(arguments, t)
    replace(call, arguments=arguments).save(folder)
    return own.open_dump(folder, r.checkpoint_path).pick()


@pytest.mark.parametrize(("key", "expert"), [("w13", 1), ("w2", 3), ("w2_scale", 2)])
def test_the_culprit_is_shown(key: str, expert: int, tmp_path: Path) -> None:
    """One byte of one expert: nothing chosen, that operand and that expert are what is seen."""
    o = own.open_dump(recorded.call("c01").path).calls[0]
    one = o.kernel.operand(key).get(o.call.arguments)[0].numel()
    mine = changed(tmp_path, key, one * expert + 11)
    weight = key.partition("_")[0]
    d = own_fix.differing(mine)
    assert d.pick() == (weight, expert) and d.operands == (o.kernel.operand(key).title,)
    assert [bool(n) for n in d.wrong[weight]] == [e == expert for e in range(4)] and not any(d.wrong["w2" if weight == "w13" else "w13"])
    seen = own_fix.compared(mine)
    assert (seen.operand, seen.expert) == (weight, expert) and 0 < seen.blocks <= d.wrong[weight][expert]
    assert {b.expert for b in seen.worst.blocks} == {expert} and f"{weight}, expert {expert}:" in str(seen)
    assert f"{weight}: differs in 1 of 4 experts: expert {expert} in {d.wrong[weight][expert]} of" in str(d)
    assert f"{weight} of expert {expert}" in own_fix.counted(mine).title
    assert not own_fix.compared(mine, weight, 0).weights  # what is chosen is shown all the same


def test_what_differs_where_all_or_nothing_does() -> None:
    mine = own.open_dump(recorded.call("c07").path, recorded.call("c07").checkpoint_path).pick()
    # w13 has 2 x 256 rows of 384 / 32 blocks, w2 384 rows of 256 / 32; c07 has all rows of w13 in another order
    assert str(own_fix.differing(mine)) == ("operands that differ: w13 payload, w13 block scales, w13 bias\n"
                                            "w13: differs in all 4 experts, in 6,144 of 6,144 blocks each\nw2: equal in all 4 experts")
    right = own.open_dump(recorded.call("c01").path, recorded.call("c01").checkpoint_path).pick()
    assert own_fix.differing(right).wrong == {"w13": (0,) * 4, "w2": (0,) * 4} and own_fix.differing(right).pick() == ("w13", 0)
    for operand, expert, name in ((None, 4, "EXPERT"), (None, "0", "EXPERT"), ("w1", 0, "OPERAND")):
        with pytest.raises(MxdebugError, match=f"^{name}: expected None"):
            own_fix.compared(mine, operand, expert)


def test_next_step_says_where_to_look(tmp_path: Path) -> None:
    def says(mine: own.Own) -> str:
        return flat(own_fix.next_step(mine))

    call, path = load(recorded.call("c01").path), recorded.call("c01").checkpoint_path
    output = call.outputs[0].clone()
    output[:, 1::7] *= -3
    replace(call, outputs=(output,)).save(tmp_path / "kernel")
    text = says(own.open_dump(tmp_path / "kernel", path).pick())
    assert "All operands are right, and the output does not follow" in text and "make sure" not in text, text
    text = says(own.open_dump(tmp_path / "kernel").pick())
    assert "whatever the checkpoint is" in text and "With CHECKPOINT in the first cell" in text, text
    text = says(changed(tmp_path / "byte", "w2", 5))
    assert "w2 payload cannot be explained, and 5 of 6 operands are as they should be: layer and checkpoint are the right ones" in text, text
    text = says(own.open_dump(recorded.call("c01").path, recorded.call("c02").checkpoint_path).pick())
    assert "First make sure that CHECKPOINT, LAYER and TP are those of this call; if not, change them in the first cell" in text, text


# -- the explorer ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("change", "title"), [("x", "the activations hold NaN or inf already"), ("router", "router weights are NaN"),
                                               ("experts", "tokens select experts that do not exist")])
def test_the_explorer_comes_up_for_findings_without_a_switch(change: str, title: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call = load(recorded.call("c01").path)
    o = own.open_dump(recorded.call("c01").path).calls[0].kernel.operand(change)
    t = o.get(call.arguments).clone()
    t[0, 0] = 77 if change == "experts" else torch.nan
    changed(tmp_path, **{o.argument: t})
    text = run(capsys, tmp_path, recorded.call("c01").checkpoint_path)
    assert f"no switch for: {title}" in text and "the call explorer: not for this call" not in text, text


def test_the_explorer_takes_the_stated_rank(tmp_path: Path) -> None:
    """TRT-LLM's kernel is not told its rank: bytes of rank 1, and rank 0 stated, are wrong for the diagnosis and for the explorer."""
    path, checkpoint = "mxfp4/FLASHINFER_TRTLLM_MXFP4_BF16", recorded.ROOT / "checkpoints" / "gptoss-tiny"
    whole = of(path, checkpoint)
    save(Situation.right(whole.recipe, whole.layer, whole.x, whole.experts, whole.router, Parallel(2, 1)), tmp_path)
    (mine,) = own.open_dump(tmp_path, checkpoint, tp=(2, 1)).calls
    assert mine.diagnosis.ok and own_fix.explorer(mine).shown.verdict.startswith("RIGHT")
    (mine,) = own.open_dump(tmp_path, checkpoint, tp=(2, 0)).calls
    e = own_fix.explorer(mine)
    assert mine.diagnosis.finding("wrong-tp-slice") and e.shown.verdict.startswith("NOT EXPLAINED"), str(e)
    assert own_fix.guess(mine, e) == ["wrong-tp-slice"] and "EXPLAINED: every byte" in own_fix.switch_on(mine, e), str(e)
    assert "TP is (2, 0) in the first cell: if this process was another rank, change that" in flat(own_fix.next_step(mine))


# -- the pieces -----------------------------------------------------------------------------------------------------------


def test_what_if_puts_each_operand_right_alone() -> None:
    mine = own.open_dump(recorded.call("c07").path, recorded.call("c07").checkpoint_path).pick()
    w = own_fix.what_if(mine)
    assert w.differs == ("w13 payload", "w13 block scales", "w13 bias") and w.tokens == 6 and not w.refused
    off = {line.name: round(line.comparison.relative_l2, 3) for line in w.table.lines[1:]}
    # c08 is just this: payload right, scales not, of another model; 1.614 is what the GPU wrote, by recorded.CALLS 1.61
    assert off["as recorded"] == off["as passed, emulated"] == 1.614
    assert off["only w13 payload right"] < off["as recorded"] < off["only w13 block scales right"]
    assert w.mended.relative_l2 == mine.diagnosis.floor.relative_l2
    assert torch.equal(w.right, load(recorded.call("c01").path).outputs[0])  # c01 is the right call on the same tokens, by the H200
    assert own_fix.guess(mine, own_fix.explorer(mine)) == ["rows-interleaved"]


def test_twins_are_calls_on_the_same_tokens() -> None:
    dump = own.open_dump(own.shipped_dump("c01", "c02", "c04", "c13"), own.shipped_checkpoint("c04"))
    assert [o.number for o in dump.twins(dump.calls[2])] == [0]  # c02: other tokens; c13: other tokens
    assert own_fix.after_the_fix(dump, dump.calls[2]).startswith("call 0: against the emulated fix: bit-identical")


def test_report_names_no_file() -> None:
    for name in ("c01", "c05", "c11"):
        text = own_fix.report(own.open_dump(recorded.call(name).path, recorded.call(name).checkpoint_path).pick())
        assert not re.search(r"/|\\\\", re.sub(r"mxfp4/\w+|read/|w1/w3", "", text.replace("gate/up", ""))), text
        assert max(map(len, text.splitlines())) <= own.WIDTH and "FlashInfer 0.7.4" in text


def test_every_verdict_has_a_next_step() -> None:
    from mxdebug.diagnosis import finding

    assert set(own_fix.NEXT) == {finding.RIGHT, finding.WRONG, finding.UNEXPLAINED, finding.UNDECIDED, finding.CRASHED, finding.PENDING}
    source = NOTEBOOK.read_text()
    assert all(f"| {verdict} |" in source for verdict in own_fix.NEXT)


# -- exercises ------------------------------------------------------------------------------------------------------------


def flat(answer: Any) -> str:
    return str(answer).replace("\n  ", " ").replace("\n", " ")


@pytest.mark.parametrize(("answer", "right", "says"), [
    ((), None, "give a path and an operand"), ((MXFP8, None), None, "NOT ANSWERED YET"), ((..., "w13"), None, "NOT ANSWERED YET"),
    # 6 rows x 12 columns are 72 bytes; a tile has 128 rows and 4 columns: 128 x 12
    ((MXFP8, "x_scale"), True, "72 bytes were passed. The layout 128x4 fills tiles of 128 rows, so for 6 tokens the kernel reads 1536"),
    ((MXFP8, "input_sf"), True, "vllm#42118"), ((MXFP8, "activation scales"), True, "RIGHT"),
    ((BF16, "x_scale"), False, "called with use_w4_group_scaling=True, and this call was not"),
    (("nvfp4/FLASHINFER_CUTLASS", "x_scale"), False, "takes 6 quant_scales, and here are 4"),
    (("nvfp4/FLASHINFER_CUTEDSL", "x_scale"), False, "cute_dsl_fused_moe_nvfp4, and this is a call of cutlass_fused_moe"),
    ((MXFP8, "w2_scale"), False, "is what the contract wants"), ((MXFP8, "swiglu_alpha"), False, "was not passed"),
    ((MXFP8, "w3"), False, "no operand 'w3'"), ((MXFP8, 5), False, "no operand 5"), (("vllm", "w13"), False, "no path 'vllm'"),
    ((7, [1]), False, "no path 7"), ((MXFP8, torch.ones(2)), False, "no operand"),
])
def test_exercise_unknown(answer: tuple[Any, ...], right: bool | None, says: str) -> None:
    got = check("own-unknown", *answer)
    assert got.right is right and says in flat(got), got
    if right is not True and "x_scale" not in answer:
        assert "input_sf" not in str(got) and "x_scale" not in str(got).partition("there are ")[0]


def test_the_unknown_call_is_wrong_in_one_operand_only() -> None:
    c = recipe("vllm", MXFP8, "gpt-oss").contract
    call = unknown_call()
    assert c.matches(call.function, call.arguments)
    with pytest.raises(MxdebugError, match="activation scales"):
        c.see(call.arguments)
    mended = {**call.arguments, "input_sf": torch.nn.functional.pad(call.arguments["input_sf"], (0, 0, 0, 122))}
    assert c.see(mended).x.shape == (6, 384)


@pytest.mark.parametrize(("answer", "right", "says"), [
    ((), None, "give an operand, a stage and a check"), (("w13_bias", "rows", None), None, "NOT ANSWERED YET"),
    (("w13_bias", "rows", "bytes"), True, "relative L2 0.157, with a cosine of 0.988"), (("w13_bias", "ROWS g0", "bytes"), True, "RIGHT"),
    (("w13", "rows", "bytes"), False, "all of its stages were done"), (("w2_scale", "SM90", "bytes"), False, "all of its stages were done"),
    (("bias", "rows", "bytes"), False, "no operand 'bias'"), (("w13_bias", "to", "bytes"), False, "'to bfloat16' was done"),
    (("w13_bias", "swizzle", "bytes"), False, "no stage 'swizzle'; it has: rows"), (("w13_bias", "", "bytes"), False, "no stage"),
    (("w13_bias", 3, "bytes"), False, "no stage 3"), ((3, "rows", "bytes"), False, "no operand 3"), (("w13_bias", "rows", "vibes"), False, "no check"),
    (("w13_bias", "rows", "reads"), False, "off by 16%"), (("w13_bias", "rows", "finite"), False, "passes this check as it is"),
    (("w13_bias", "rows", "shape"), False, "bfloat16 [4, 512]"), (("w13_bias", "rows", "cosine"), False, "the wrong call has 0.988"),
])
def test_exercise_maintainers(answer: tuple[Any, ...], right: bool | None, says: str) -> None:
    got = check("own-maintainers", *answer)
    assert got.right is right and says in flat(got), got


def test_only_one_check_notices_the_made_call() -> None:
    """What the exercise says of each check, computed: the wrong call passes all but the last."""
    mine = made_call()
    bias, truth = mine.call.arguments["fc1_expert_biases"], mine.diagnosis.truth
    o = mine.kernel.operand("w13_bias")
    assert bool(torch.isfinite(mine.call.outputs[0]).all()) and bias.dtype == o.dtype and list(bias.shape) == [4, 512]
    assert truth.cosine > 0.98 and f"{truth.cosine:.3f}" == "0.988"
    assert not torch.equal(bias, mine.right["fc1_expert_biases"]) and [o.title for o in mine.kernel.operands if not own.same(
        mine, o, mine.call.arguments, mine.right)] == ["w13 bias"]
    assert list(CHECKS) == ["reads", "finite", "shape", "cosine", "bytes"]
