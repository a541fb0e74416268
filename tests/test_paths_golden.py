"""Do the recipes make what vLLM 0.33's own converters make? Golden tensors, byte for byte, scales and scalars included.

The files were written by tests/data/make_vllm_golden.py, which ran vLLM's layers on a CPU; the inputs are computed here again.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from making import call_of, golden
from safetensors import safe_open
from torch import Tensor

from mxdebug.checkpoints import CheckpointLayer
from mxdebug.contracts import contract
from mxdebug.diagnosis import diagnose
from mxdebug.diagnosis.operands import examine
from mxdebug.diagnosis.recover import Source
from mxdebug.errors import MxdebugError
from mxdebug.formats import MXFP4, NVFP4, BlockTensor
from mxdebug.layouts import GATE_UP
from mxdebug.recipes import recipe
from mxdebug.reference import Activation, MoELayer, Parallel

DATA = Path(__file__).parent / "data"
CASES = golden().PATH_CASES
PAIRS = [(name, path) for name, case in CASES.items() for path in case.paths]
# Rows that vLLM itself leaves wrong: halves swapped in a layer without gate, and halves of alternating rows.
WRONG = {"mxfp4-cutlass-mxfp8-compressed-non-gated": "rows-swapped-without-gate", "nvfp4-cutlass-modelopt-interleaved": "rows-interleaved-swapped"}


def stored(name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(DATA / f"vllm-{name}.safetensors", "pt") as f:
        return {k: f.get_tensor(k) for k in f.keys()}, f.metadata()


def layer_of(name: str) -> MoELayer:
    """The case's layer as a checkpoint gives it: divisors turned into multipliers, as float32 1 / divisor."""
    case = {**CASES, **golden().REFUSED}[name]
    t = golden().made(name)
    inverted = case.kind.startswith("compressed-tensors nvfp4")

    def number(key: str) -> Tensor | None:
        value = t.get(key)
        return value if value is None or not inverted else 1.0 / value

    def weight(key: str) -> BlockTensor | None:
        return None if key not in t else BlockTensor(t[key], t[f"{key}_scale"].view(torch.uint8), NVFP4 if case.nvfp4 else MXFP4, number(f"{key}_scale_2"))

    inputs = [number(f"{k}_input_scale") for k in ("gate", "up") if f"{k}_input_scale" in t]
    bias = case.bias and not case.nvfp4
    limit = torch.full((case.experts,), 7.0)
    act = Activation("swiglu", limit=limit) if case.gated else Activation("relu2")
    return MoELayer(weight("gate"), weight("up"), weight("down"), act, t.get("gate_bias") if bias and case.gated else None, t["up_bias"] if bias else None,
                    t["down_bias"] if bias else None, w13_input_scale=torch.stack(inputs).amax(0) if inputs else None, w2_input_scale=number("down_input_scale"))


@pytest.mark.parametrize(("name", "path"), PAIRS)
def test_recipe_makes_vllms_bytes(name: str, path: str) -> None:
    want, _ = stored(name)
    layer, case = layer_of(name), CASES[name]
    got = recipe("vllm", path, case.kind).plan(layer).convert(layer)
    for key in ("w13", "w13_scale", "w13_bias", "w2", "w2_scale", "w2_bias"):
        assert (got.get(key) is None) == (key not in want), key
        if key not in want:
            continue
        a, b = got[key], want[key]
        b = b if key.endswith("bias") else b.contiguous().view(torch.uint8)
        assert a.numel() == b.numel() and a.dtype == b.dtype, key
        assert torch.equal(a.flatten(), b.flatten()) == (not (name in WRONG and key.startswith("w13"))), key
    for key in ("w13_alpha", "w2_alpha", "a1_gscale", "a2_gscale", "g1_scale_c"):
        if key in want and key in got:
            assert torch.equal(got[key], want[key]), key
        assert key not in want or key in got or key == "g1_scale_c" or not case.nvfp4


@pytest.mark.parametrize("name", WRONG)
def test_what_vllm_converts_wrongly_is_named(name: str) -> None:
    """vLLM's own bytes against the checkpoint: which fault of the catalogue the converter has."""
    want, _ = stored(name)
    case, layer = CASES[name], layer_of(name)
    c = contract(case.paths[0])
    plan = recipe("vllm", c.path, case.kind).plan(layer)
    operands = {k: t if k.endswith("bias") else t.view(torch.uint8) for k, t in want.items() if k in plan.forms}
    made = {**plan.scalars(layer), **operands}
    x = torch.randn(4, layer.hidden, generator=torch.Generator().manual_seed(1))
    ids, router = torch.tensor([[0, 1]] * 4).int(), torch.full((4, 2), 0.5)
    arguments = plan.call(made, layer.activation, plan.quantise(x, made), ids, router)
    evidence = examine(c, plan, Source(layer, Parallel()), arguments)
    assert {f.id for f in evidence.findings} == {WRONG[name]}, evidence
    d = diagnose(call_of(arguments, c.emulate(arguments), function=c.function), CheckpointLayer(0, case.kind, layer, GATE_UP, {}, {}, frozenset()))
    assert WRONG[name] in {f.id for f in d.findings} and d.verdict == "wrong"


@pytest.mark.parametrize(("name", "path"), [(n, p) for n, p in PAIRS if n not in WRONG])
def test_contract_reads_vllms_call(name: str, path: str) -> None:
    """dtypes, shapes and strides of every operand as vLLM's experts pass it are the contract's."""
    _, metadata = stored(name)
    layer, case = layer_of(name), CASES[name]
    c = contract(path)
    if layer.hidden % 32:
        pytest.skip("FlashInfer refuses this hidden size; vLLM does not look")
    plan = recipe("vllm", path, case.kind).plan(layer)
    part = plan.arguments(layer, torch.randn(3, layer.hidden), torch.zeros(3, 1).int(), torch.ones(3, 1))
    call = json.loads(metadata["call"])
    call = call.get(path, call)
    seen = 0
    for o in (*c.operands, *c.inputs):
        name_, _, index = o.argument.partition("[")
        entry, t = call.get(o.argument), part.get(name_)
        t = t[int(index[:-1])] if index and isinstance(t, (list, tuple)) else t
        if isinstance(entry, dict) and isinstance(t, Tensor) and o.key not in ("experts", "router"):
            assert (entry["dtype"].removeprefix("torch."), entry["shape"]) == (str(t.dtype).removeprefix("torch."), list(t.shape)), (o.key, entry)
            assert entry.get("stride", list(t.stride())) == list(t.stride()), o.key
            seen += 1
    assert seen >= 4


@pytest.mark.parametrize("name", [n for n in golden().REFUSED if "no-bias" not in n and "uninterleave" not in n and "interleaved" not in n and "tanh" not in n])
def test_what_vllm_refuses_is_refused(name: str) -> None:
    case = golden().REFUSED[name]
    assert name in json.loads((DATA / "vllm-refusals.json").read_text())
    for path in case.paths:
        with pytest.raises(MxdebugError):
            layer = layer_of(name)
            recipe("vllm", path, case.kind).plan(layer)


def test_a_wrong_byte_would_be_seen() -> None:
    """The comparison above is exact: one flipped bit, and it is red."""
    name = "nvfp4-trtllm-modelopt-unaligned"
    layer = layer_of(name)
    up = layer.up.payload.clone()
    up[1, 40, 17] ^= 1
    changed = replace(layer, up=replace(layer.up, payload=up))
    got = recipe("vllm", CASES[name].paths[0], CASES[name].kind).plan(changed).convert(changed)
    assert (got["w13"].flatten() != stored(name)[0]["w13"].view(torch.uint8).flatten()).sum() == 1
