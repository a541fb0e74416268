"""Calls whose inputs or outputs are odd in ways that no operand shows: none of them may pass as right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from mxdebug import recorded
from mxdebug.calls import Call, load
from mxdebug.contracts import find
from mxdebug.diagnosis import Diagnosis, diagnose

CLEAN = recorded.call("c01")


def changed(argument: str, change: Callable[[Tensor], Tensor]) -> Call:
    """The recorded right call with one argument changed, and the output that the kernel gives for it."""
    call = load(CLEAN.path)
    arguments = {**call.arguments, argument: change(call.arguments[argument].clone())}
    return replace(call, arguments=arguments, outputs=(find(call.function, arguments).emulate(arguments), *call.outputs[1:]))


def put(at: tuple[int, int], value: float) -> Callable[[Tensor], Tensor]:
    def change(t: Tensor) -> Tensor:
        t[at] = value
        return t

    return change


def ids(d: Diagnosis) -> list[str]:
    return [f.id for f in d.findings]


@pytest.mark.parametrize("argument, change, fault", [
    ("input", put((2, 5), torch.nan), "input-not-finite"), ("input", put((0, 0), torch.inf), "input-not-finite"),
    ("token_final_scales", put((1, 0), torch.nan), "router-not-finite"), ("token_final_scales", put((1, 0), -0.5), "router-not-finite"),
    ("token_final_scales", torch.zeros_like, "router-not-finite"),
    ("token_selected_experts", put((0, 0), 9), "expert-ids"), ("token_selected_experts", put((0, 0), -2), "expert-ids"),
    ("token_selected_experts", lambda t: torch.full_like(t, 77), "expert-ids"),
])
def test_garbage_that_comes_in_is_named(argument: str, change: Callable[[Tensor], Tensor], fault: str) -> None:
    call = changed(argument, change)
    d = diagnose(call, CLEAN.checkpoint_path)
    assert d.verdict == "wrong" and ids(d) == [fault]
    assert ids(diagnose(call)) == [fault]
    crash = diagnose(replace(call, outputs=(), status="crashed"), CLEAN.checkpoint_path)
    assert crash.verdict == "crash dump" and ids(crash) == [fault]


@pytest.mark.parametrize("argument, value, words", [("token_selected_experts", -1, "2 of 12 expert ids are -1: no expert computes these slots in the emulation"),
                                                    ("token_final_scales", 0.0, "all router weights of 1 of 6 tokens are 0")])
def test_padding_is_no_fault(argument: str, value: float, words: str) -> None:
    """Engines give padding tokens ids of -1 or weights of 0; the kernels skip them."""
    call = changed(argument, lambda t: torch.where(torch.arange(len(t))[:, None] == 3, torch.tensor(value, dtype=t.dtype), t))
    with_checkpoint, without = diagnose(call, CLEAN.checkpoint_path), diagnose(call)
    assert with_checkpoint.ok and not ids(without), str(with_checkpoint)
    for d in (with_checkpoint, without):
        assert any(words in line for line in d.open) and not any("not to 1" in line or "expert twice" in line for line in d.open), str(d)


def test_unusual_routing_is_said() -> None:
    assert any("sum to 1.500" in text for text in diagnose(changed("token_final_scales", lambda t: t * 1.5), CLEAN.checkpoint_path).open)
    twice = changed("token_selected_experts", lambda t: t[:, :1].expand(-1, 2).contiguous())
    assert any("one expert twice" in text for text in diagnose(twice, CLEAN.checkpoint_path).open)


@pytest.mark.parametrize("argument", ["input", "fc1_expert_weights", "fc1_expert_biases"])
def test_views_break_the_contract(argument: str) -> None:
    """FlashInfer hands the kernel a pointer without strides; on an H200 such calls gave other outputs, and no error."""
    call = load(CLEAN.path)
    t = call.arguments[argument]
    view = torch.nn.functional.pad(t, (0, 8))[..., :-8]
    d = diagnose(replace(call, arguments={**call.arguments, argument: view}), CLEAN.checkpoint_path)
    assert d.verdict == "wrong" and ids(d) == ["contract-broken"] and "contiguous" in d.findings[0].evidence


@pytest.mark.parametrize("stale", [False, True])
def test_tokens_that_were_not_written_are_found_among_many(stale: bool) -> None:
    call = load(recorded.call("c02").path)
    many = {k: call.arguments[k].repeat(60, 1) for k in ("input", "token_selected_experts", "token_final_scales")}
    memory = torch.randn(360, 384).to(torch.bfloat16)
    output = call.outputs[0].repeat(60, 1)
    output[201:203] = memory[201:203] if stale else 0
    d = diagnose(replace(call, arguments={**call.arguments, **many, "output": memory}, outputs=(output,)), recorded.call("c02").checkpoint_path)
    assert not d.ok


def test_right_says_how_many_tokens_were_looked_at() -> None:
    call = load(recorded.call("c02").path)
    many = {k: call.arguments[k].repeat(60, 1) for k in ("input", "token_selected_experts", "token_final_scales")}
    d = diagnose(replace(call, arguments={**call.arguments, **many, "output": None}, outputs=(call.outputs[0].repeat(60, 1),)), recorded.call("c02").checkpoint_path)
    assert d.ok and "64 of 360 tokens" in d.summary


def test_against_another_model_nothing_else_is_claimed() -> None:
    d = diagnose(CLEAN.path, recorded.call("c02").checkpoint_path)
    assert d.verdict == "wrong, not explained" and not d.findings and "another layer or checkpoint" in d.summary


def test_wrong_layer_names_the_right_one(tmp_path: Path) -> None:
    tensors = {}
    for name, value in load_file(CLEAN.checkpoint_path / "model.safetensors").items():
        generator = torch.Generator().manual_seed(len(tensors))
        other = value[torch.randperm(4, generator=generator)] + 1 if value.dtype != torch.uint8 else value ^ 0x11
        if name.endswith("_scales"):
            other = value.roll(1, 1)
        tensors[name.replace("layers.0", "layers.1")], tensors[name] = value, other.contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    config = (CLEAN.checkpoint_path / "config.json").read_text().replace('"num_hidden_layers": 1', '"num_hidden_layers": 2')
    (tmp_path / "config.json").write_text(config)
    assert diagnose(CLEAN.path, tmp_path).ok
    d = diagnose(CLEAN.path, tmp_path, layer=0)
    assert not d.ok and "--layer 1" in d.open[0]
