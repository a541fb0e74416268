"""Minimal reproductions: smaller, with the same faults on the same operands; and with made numbers in place of the user's."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import making_linear
import making_nvfp4
import pytest
import torch
from click.testing import CliRunner
from making import call_of
from safetensors import safe_open
from torch import Tensor

from mxdebug import recorded
from mxdebug.calls import Call, load
from mxdebug.checkpoints import open_checkpoint
from mxdebug.checkpoints.writing import copy_experts
from mxdebug.cli import main
from mxdebug.contracts import find
from mxdebug.cut import cut, cut_made
from mxdebug.cut.folder import size
from mxdebug.cut.search import faults
from mxdebug.cut.smaller import Places
from mxdebug.diagnosis import diagnose
from mxdebug.errors import MxdebugError
from mxdebug.faults import FAULTS, LINEAR_FAULTS, SCALARS, LinearSituation, Situation
from mxdebug.recipes import recipe
from mxdebug.recipes.w4a16.recipe import linear_recipe
from mxdebug.reference import Parallel

WRONG = [name for name, r in recorded.CALLS.items() if not r.wrong.startswith("nothing")]


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def tensors(checkpoint: Path) -> dict[str, Tensor]:
    with safe_open(str(checkpoint / "model.safetensors"), "pt") as f:
        return {name: f.get_tensor(name) for name in f.keys()}


def as_bytes(t: Tensor) -> Tensor:
    return t.contiguous().flatten().view(torch.uint8)


# -- recorded calls ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", recorded.CALLS)
def test_a_recorded_call_is_cut_to_one_token(name: str, tmp_path: Path) -> None:
    r, out = recorded.call(name), tmp_path / "cut"
    call = load(r.path)
    c = cut(call, open_checkpoint(r.checkpoint_path), out)
    contract = find(call.function, call.arguments)
    assert faults(c.after, contract) == faults(c.before, contract) and c.after.verdict == c.before.verdict
    assert len(c.tokens) == 1 and c.tries == 1
    # The token's own experts, on each of two ranks for c12, which has four of eight experts here.
    selected = call.arguments["token_selected_experts"][c.tokens[0]].tolist()
    assert set(selected) <= set(c.experts) and len(c.experts) == (4 if name == "c12" else len(selected))
    small = load(out / "dump")
    assert small.arguments["input"].shape[0] == 1 and torch.equal(small.arguments["input"][0], call.arguments["input"][c.tokens[0]])
    assert torch.equal(small.outputs[0][0], call.outputs[0][c.tokens[0]])  # as it was recorded
    assert [c.experts[i] for i in small.arguments["token_selected_experts"][0].tolist()] == selected
    assert size(out / "dump") < size(r.path) and size(out / "checkpoint") < size(r.checkpoint_path)
    again = diagnose(out / "dump", out / "checkpoint")
    assert str(again) == str(c.after) and again.kernel.bit_identical


def test_the_worst_token_is_taken(tmp_path: Path) -> None:
    """c14: of 70 tokens the one whose output is furthest from what the checkpoint means."""
    r = recorded.call("c14")
    c = cut(load(r.path), open_checkpoint(r.checkpoint_path), tmp_path / "cut")
    from mxdebug.cut.search import _off, _worst_first

    call, checkpoint = load(r.path), open_checkpoint(r.checkpoint_path)
    ranked = _worst_first(call, find(call.function, call.arguments), checkpoint.layer(), None)
    assert c.tokens == (ranked[0],) and len(ranked) == 64
    # (a - b) / b of [3, 4] against [0, 4] is 3/4, of [6, 8] against [6, 8] 0; NaN is the worst
    off = _off(torch.tensor([[3.0, 4.0], [6.0, 8.0], [torch.nan, 0.0]]), torch.tensor([[0.0, 4.0], [6.0, 8.0], [1.0, 1.0]]))
    assert off.tolist() == [0.75, 0.0, torch.inf]


@pytest.mark.parametrize("name", WRONG)
def test_nothing_of_the_user_is_in_a_probe(name: str, tmp_path: Path) -> None:
    r, out = recorded.call(name), tmp_path / "probe"
    call = load(r.path)
    c = cut_made(call, open_checkpoint(r.checkpoint_path), out)
    assert not c.left_out and {f.id: f.where for f in c.after.findings} == {f.id: f.where for f in c.before.findings}
    made, small = tensors(out / "checkpoint"), load(out / "dump")
    for key, t in tensors(r.checkpoint_path).items():
        if t.numel() > 64:  # made bytes agree with others by chance: 1 in 256 of codes, 1 in 8 of scales, which are of 8 values
            assert key not in made or made[key].shape != t.shape or (as_bytes(made[key]) == as_bytes(t)).float().mean() < 0.25, key
    x, old = small.arguments["input"], call.arguments["input"]
    assert x.shape[1] != old.shape[1] or (x[:, None] == old).float().mean(-1).max() < 0.1  # a few of a token's 384 numbers, by chance
    assert "emulation, not a recording" in (out / "README.txt").read_text()
    scales = made[next(k for k in made if "scale" in k)].flatten(0, -2)
    assert scales.view(torch.uint8).unique().numel() == 8 and not (scales == scales[0]).all()  # 116 to 123, that differ by row


@pytest.mark.parametrize("probe_data", [False, True])
def test_the_command_and_its_folder(probe_data: bool, tmp_path: Path) -> None:
    r, out = recorded.call("c04"), tmp_path / "Jane Doe" / "out"
    out.parent.mkdir()
    code, text = run("cut", r.path, "--checkpoint", r.checkpoint_path, "--out", out, *(["--probe-data"] if probe_data else []))
    assert code == 0 and text.startswith("WRONG: scales-linear\n") and ("made: no weight" in text) == probe_data
    assert sorted(p.name for p in out.iterdir()) == ["README.txt", "checkpoint", "dump"]
    readme = (out / "README.txt").read_text()
    assert "mxdebug diagnose dump --checkpoint checkpoint\n" in readme and "scales-linear [proved]" in readme
    for file in out.rglob("*"):
        assert file.is_dir() or (b"Jane" not in file.read_bytes() and str(recorded.ROOT).encode() not in file.read_bytes()), file
    assert run("diagnose", out / "dump", "--checkpoint", out / "checkpoint")[0] == 1
    config = json.loads((out / "checkpoint" / "config.json").read_text())
    assert config["num_local_experts"] == (4 if probe_data else 2) and "architectures" not in config
    again = run("cut", r.path, "--checkpoint", r.checkpoint_path, "--out", out)
    assert again[0] == 2 and "a new or an empty folder" in again[1]


def test_one_call_must_be_meant(tmp_path: Path) -> None:
    for name in ("c01", "c04"):
        load(recorded.call(name).path).save(tmp_path / "dumps")
    model = recorded.call("c01").checkpoint_path
    code, text = run("cut", tmp_path / "dumps", "--checkpoint", model, "--out", tmp_path / "o")
    assert code == 2 and "--call NUMBER" in text and not (tmp_path / "o").exists()
    assert run("cut", tmp_path / "dumps", "--checkpoint", model, "--out", tmp_path / "o", "--call", "4")[1].startswith(
        "WRONG: scales-linear"
    )


def test_other_faults_leave_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is written is diagnosed again; here somebody changes a byte on the way."""
    from mxdebug.cut import search

    def spoiled(checkpoint: Any, index: int, experts: Any, folder: Path) -> Path:
        other = open_checkpoint(recorded.call("c01").checkpoint_path)
        return copy(other, index, [e ^ 1 for e in experts], folder)

    copy = search.copy_experts
    monkeypatch.setattr(search, "copy_experts", spoiled)
    r = recorded.call("c04")
    with pytest.raises(MxdebugError, match="cut: expected the faults of the whole call: scales-linear"):
        cut(load(r.path), open_checkpoint(r.checkpoint_path), tmp_path / "cut")
    assert not (tmp_path / "cut").exists()


# -- made calls -------------------------------------------------------------------------------------------------------

MXFP4 = {"gpt-oss": "gptoss-192", "compressed-tensors mxfp4-pack-quantized": "minimax-tiny"}


def model_of(kind: str, folder: Path) -> Path:
    return (
        recorded.ROOT / "checkpoints" / MXFP4[kind]
        if kind in MXFP4
        else making_nvfp4.write(folder / "model", kind, differ=False, hidden=448)
    )


def made(
    path: str,
    kind: str,
    model: Path,
    fault: str = "",
    tokens: int = 6,
    parallel: Parallel = Parallel(),
    keys: tuple[str, ...] | None = None,
) -> Call:
    """A call of a path on a checkpoint, with a fault."""
    r, layer, g = recipe("vllm", path, kind), open_checkpoint(model).layer().layer, torch.Generator().manual_seed(1)
    x = (torch.randn(tokens, layer.hidden, generator=g) * (1 if r.contract.weights.outer else 3)).bfloat16()
    ids = torch.stack([torch.randperm(layer.experts, generator=g)[:2] for _ in range(tokens)]).int()
    s = Situation.right(r, layer, x, ids, torch.softmax(torch.randn(tokens, 2, generator=g), -1), parallel)
    able = tuple(k for k in FAULTS[fault].strikes if k in s.plan.forms or k in SCALARS) if fault else ()
    s = FAULTS[fault].injected(s, keys or able or None) if fault else s
    return call_of(*s.build(), function=r.contract.function)


OTHER_PATHS = [
    ("mxfp4/FLASHINFER_CUTLASS_MXFP4_MXFP8", "gpt-oss", ("scales-linear", "rows-gate-up", "router-squared")),
    ("mxfp4/FLASHINFER_TRTLLM_MXFP4_BF16", "gpt-oss", ("rows-not-shuffled", "swiglu-limit-lost")),
    ("mxfp4/FLASHINFER_TRTLLM_MXFP4_MXFP8", "compressed-tensors mxfp4-pack-quantized", ("nibbles-swapped",)),
    ("nvfp4/FLASHINFER_CUTLASS", making_nvfp4.MODELOPT, ("nibbles-swapped", "global-inverted", "x-scales-linear")),
    ("nvfp4/FLASHINFER_TRTLLM", making_nvfp4.COMPRESSED, ("rows-not-shuffled", "input-scale-twice")),
    ("nvfp4/FLASHINFER_CUTEDSL", making_nvfp4.MODELOPT, ("scales-linear", "weight-global-missing")),
]


@pytest.mark.parametrize("path, kind, fault", [(p, k, f) for p, k, fs in OTHER_PATHS for f in ("", *fs)])
def test_calls_of_other_paths(path: str, kind: str, fault: str, tmp_path: Path) -> None:
    model = model_of(kind, tmp_path)
    call, opened = made(path, kind, model, fault), open_checkpoint(model)
    c = cut(call, opened, tmp_path / "cut")
    contract = find(call.function, call.arguments)
    assert faults(c.after, contract) == faults(c.before, contract) and bool(c.after.findings) == bool(fault), str(c.after)
    # x-scales-linear breaks the contract, so that no token can be told from another: the call stays whole
    assert len(c.tokens) == (6 if fault == "x-scales-linear" else 1) and len(c.experts) <= 4
    if fault:
        p = cut_made(call, opened, tmp_path / "probe")
        assert not p.left_out and {f.id for f in p.after.findings} == {f.id for f in p.before.findings}, str(p.after)


def test_input_scales_of_all_experts_still_count(tmp_path: Path) -> None:
    """NVFP4's kernels get the largest input scale of all experts: the expert that has it stays, or a global scale would be wrong."""
    model = making_nvfp4.write(tmp_path / "model", making_nvfp4.MODELOPT, experts=8, differ=False, hidden=448)
    call, opened = made("nvfp4/FLASHINFER_TRTLLM", making_nvfp4.MODELOPT, model), open_checkpoint(model)
    layer = opened.layer().layer
    largest = {int(layer.w13_input_scale.argmax()), int(layer.w2_input_scale.argmax())}
    c = cut(call, opened, tmp_path / "cut")
    selected = set(call.arguments["topk_ids"][0][c.tokens[0]].tolist())
    assert c.after.ok and not largest <= selected and set(c.experts) == selected | largest and c.tries == 2


def test_a_fault_of_all_experts_keeps_all(tmp_path: Path) -> None:
    """Experts that stand in a circle: two of four alone would be others' experts, in no order at all."""
    model = model_of("gpt-oss", tmp_path)
    call = made("mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16", "gpt-oss", model, "experts-rolled")
    c = cut(call, open_checkpoint(model), tmp_path / "cut")
    assert [f.id for f in c.after.findings] == ["experts-rolled"] and c.experts == (0, 1, 2, 3) and len(c.tokens) == 1


def test_tokens_that_do_not_show_the_fault_are_left_out(tmp_path: Path) -> None:
    """NaN in token 0 alone: its output is the worst. An expert that does not exist: in one that is not the worst. Both are kept alone."""
    model = model_of("gpt-oss", tmp_path)
    for fault in ("input-not-finite", "expert-ids"):
        call = made("mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16", "gpt-oss", model, fault)
        c = cut(call, open_checkpoint(model), tmp_path / fault)
        assert [f.id for f in c.after.findings] == [fault] and c.tokens == (0,), str(c)


def test_new_numbers_of_experts() -> None:
    """Two ranks of four: positions 1 and 3 are experts 1, 3 and 5, 7. Ids that are no expert's stay so: -1, and 8, one beyond the last."""
    places = Places((1, 3), 4, 2)
    assert places.experts == (1, 3, 5, 7)
    assert places.renumber(torch.tensor([[1, 7], [-1, 8], [3, 9]])).tolist() == [[0, 3], [-1, 4], [1, 5]]


def test_routing_in_one_integer_and_by_logits(tmp_path: Path) -> None:
    """TRT-LLM's other two ways to say which experts: packed ids, and the router's logits."""
    path, model = "mxfp4/FLASHINFER_TRTLLM_MXFP4_BF16", model_of("gpt-oss", tmp_path)
    call = made(path, "gpt-oss", model, "rows-not-shuffled")
    ids, weights = call.arguments["topk_ids"]
    weights = weights.bfloat16().float()
    packed = (ids << 16) | (weights.bfloat16().view(torch.int16).int() & 0xFFFF)
    logits = torch.full((len(ids), 4), -20.0).scatter(1, ids.long(), weights.log())
    others = {k: v for k, v in call.arguments.items() if k != "topk_ids"}
    for n, arguments in enumerate(
        ({**others, "topk_ids": packed}, {**others, "routing_logits": logits, "routing_method_type": 1, "top_k": 2})
    ):
        contract = find(call.function, arguments)
        again = replace(call, arguments=arguments, outputs=(contract.emulate(arguments),))
        c = cut(again, open_checkpoint(model), tmp_path / str(n))
        assert [f.id for f in c.after.findings] == ["rows-not-shuffled"] and len(c.tokens) == 1 and len(c.experts) == 2, str(c.after)


def test_a_tensor_parallel_rank(tmp_path: Path) -> None:
    """TRT-LLM's kernel is not told its position: --tp goes into README.txt."""
    path, model = "mxfp4/FLASHINFER_TRTLLM_MXFP4_BF16", model_of("gpt-oss", tmp_path)
    call = made(path, "gpt-oss", model, "nibbles-swapped", parallel=Parallel(2, 1))
    c = cut(call, open_checkpoint(model), tmp_path / "cut", tp=(2, 1))
    assert [f.id for f in c.after.findings] == ["nibbles-swapped"] and "--checkpoint checkpoint --tp 2 1" in (
        tmp_path / "cut" / "README.txt"
    ).read_text()


def test_a_probe_says_what_it_leaves_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A finding whose fault cannot be injected is named; where there is no other, nothing is written."""
    model = model_of("gpt-oss", tmp_path)
    call = made("mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16", "gpt-oss", model, "router-squared")
    with pytest.raises(MxdebugError, match="a finding that can be injected"):
        cut_made(made("mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16", "gpt-oss", model), open_checkpoint(model), tmp_path / "none")
    both = replace(call, arguments={**call.arguments, "swiglu_limit": None})

    def refuses(s: Situation, keys: tuple[str, ...]) -> Situation:
        raise MxdebugError("situation", "another", "this one")

    monkeypatch.setitem(FAULTS, "swiglu-limit-lost", replace(FAULTS["swiglu-limit-lost"], inject=refuses))
    from mxdebug.diagnosis import parameters

    monkeypatch.setattr(parameters, "FAULTS", FAULTS)
    p = cut_made(both, open_checkpoint(model), tmp_path / "probe")
    assert [id for id, _ in p.left_out] == ["swiglu-limit-lost"] and [f.id for f in p.after.findings] == ["router-squared"]


# -- linear layers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["nvfp4_w4a16/flashinfer_cutedsl/sm100", "nvfp4_w4a16/flashinfer_cutedsl/sm12x"])
@pytest.mark.parametrize("id", ["", "scales-linear", "nibbles-swapped"])
def test_a_linear_call_keeps_its_layer_and_one_token(path: str, id: str, tmp_path: Path) -> None:
    model = making_linear.write_modelopt(tmp_path / "model")
    opened = open_checkpoint(model)
    found = opened.linear("model.layers.0.self_attn.qkv_proj")
    x = torch.randn(5, found.layer.k, generator=torch.Generator().manual_seed(1)).bfloat16()
    s = LinearSituation.right(linear_recipe(path, found.kind), found.layer, x)
    call = call_of(*(LINEAR_FAULTS[id].inject(s) if id else s).build(), function="mm_bf16_fp4")
    c = cut(call, opened, tmp_path / "cut")
    assert {f.id for f in c.after.findings} == ({id} if id else set()) and len(c.tokens) == 1 and c.after.verdict == c.before.verdict
    assert set(tensors(tmp_path / "cut" / "checkpoint")) == {n for n in tensors(model) if ".self_attn." in n and "o_proj" not in n}
    with pytest.raises(MxdebugError, match="not made for linear layers yet"):
        cut_made(call, opened, tmp_path / "probe")


def test_what_config_says_of_routing_is_kept(tmp_path: Path) -> None:
    """A fault that only config.json gives away is still there in the cut."""
    model = tmp_path / "model"
    shutil.copytree(recorded.call("c02").checkpoint_path, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "norm_topk_prob": True}))
    call = load(recorded.call("c02").path)
    scaled = {**call.arguments, "token_final_scales": call.arguments["token_final_scales"] * torch.linspace(0.4, 0.9, 6)[:, None]}
    call = replace(call, arguments=scaled, outputs=(find(call.function, scaled).emulate(scaled),))
    opened = open_checkpoint(model)
    assert [f.id for f in diagnose(call, opened).findings] == ["router-not-renormalised"]
    c = cut(call, opened, tmp_path / "cut")
    assert [f.id for f in c.after.findings] == ["router-not-renormalised"] and len(c.tokens) == 1
    assert open_checkpoint(tmp_path / "cut" / "checkpoint").layer().routing == opened.layer().routing


@pytest.mark.parametrize("change", ["no tokens", "no experts"])
def test_calls_whose_tokens_cannot_be_told_apart_are_refused(change: str, tmp_path: Path) -> None:
    r = recorded.call("c04")
    call = load(r.path)
    a = dict(call.arguments)
    if change == "no tokens":
        a |= {"input": a["input"][:0]}
    else:
        a |= {"fc1_expert_weights": a["fc1_expert_weights"][:0]}
    with pytest.raises(MxdebugError):
        cut(replace(call, arguments=a), open_checkpoint(r.checkpoint_path), tmp_path / "cut", layer=0)
    assert not (tmp_path / "cut").exists()


def test_a_call_with_too_few_ids_is_cut_to_what_it_has(tmp_path: Path) -> None:
    """Ids for 2 of 6 tokens break the contract; so do fewer of them."""
    r = recorded.call("c04")
    call = load(r.path)
    few = {**call.arguments, "token_selected_experts": call.arguments["token_selected_experts"][:2]}
    c = cut(replace(call, arguments=few), open_checkpoint(r.checkpoint_path), tmp_path / "cut", layer=0)
    assert [f.id for f in c.after.findings] == [f.id for f in c.before.findings] == ["contract-broken"]


def test_experts_that_a_checkpoint_does_not_have(tmp_path: Path) -> None:
    opened = open_checkpoint(recorded.call("c04").checkpoint_path)
    with pytest.raises(MxdebugError, match=r"experts of model.layers.0.mlp.experts: expected numbers from 0 to 3, got \[0, 99\]"):
        copy_experts(opened, 0, [0, 99], tmp_path / "c")
