"""Does a recipe do what the engine does?

Oracle: the bytes that vLLM 0.33's own converters give for made tensors, padded as vLLM allocates and loaded as vLLM loads
(tests/data/make_vllm_golden.py). Laws: stages undo what they did, a plan inverts.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from making import COMPRESSED, CONTRACT, GPT_OSS, PATH, assert_same_layer, checkpoint_layer, golden, made_bytes, made_layer, padded
from safetensors import safe_open

from mxdebug import recorded
from mxdebug.calls import load
from mxdebug.contracts import CONTRACTS
from mxdebug.errors import MxdebugError
from mxdebug.formats import MXFP4, MXFP8, BlockTensor
from mxdebug.layouts import (GATE_UP, INTERLEAVED, LINEAR, ROW_ORDERS, SHUFFLE_16, SHUFFLE_32, SM90_SCALE_FOLD, SM90_WEIGHT_INTERLEAVE,
                             SWIZZLE_128x4, UP_GATE, Composed)
from mxdebug.recipes import (CAST_BY_VALUE, PAD_END, RECIPES, SWAP_NIBBLES, Experts, Lay, PadEnd, PadHalves, Rows, Shuffle, Stage, ToDtype,
                             Values, logical_operands, recipe)
from mxdebug.reference import Activation, MoELayer, Parallel

DATA = Path(__file__).parent / "data"
CASES = ("gpt-oss-unaligned", "gpt-oss-aligned", "compressed-unaligned")


def golden_layer(name: str) -> MoELayer:
    """A case's made tensors as a layer in logical order."""
    t = golden().made(name)
    weights = {k: BlockTensor(t[k], t[f"{k}_scale"], MXFP4) for k in ("gate", "up", "down")}
    return MoELayer(**weights, activation=Activation("silu"), gate_bias=t["gate_bias"], up_bias=t["up_bias"], down_bias=t["down_bias"])


@pytest.mark.parametrize("name", CASES)
def test_recipe_gives_the_bytes_of_vllms_own_converter(name: str) -> None:
    """Every operand: dtype, shape, every byte."""
    assert tuple(golden().CASES) == CASES
    layer = golden_layer(name)
    ours = recipe("vllm", PATH, golden().CASES[name][0]).plan(layer).convert(layer)
    with safe_open(DATA / f"vllm-{name}.safetensors", "pt") as f:
        assert f.metadata()["vllm"] == "0.33" and set(f.keys()) == set(ours)
        for key, got in ours.items():
            want = f.get_tensor(key)
            assert got.dtype == want.dtype and got.shape == want.shape, key
            assert torch.equal(got.contiguous().view(torch.uint8), want.view(torch.uint8)), key


@pytest.mark.parametrize("name", CASES)
def test_golden_data_can_show_a_fault(name: str) -> None:
    """Experts, rows and blocks differ, biases do not fit bf16; the other kind's row order gives other bytes."""
    layer = golden_layer(name)
    for t in (layer.gate, layer.up, layer.down):
        assert t.scales.unique().numel() > 200 and not torch.equal(t.payload[0], t.payload[1])
    assert not torch.equal(layer.gate_bias, layer.gate_bias.bfloat16().float())
    plan = recipe("vllm", PATH, golden().CASES[name][0]).plan(layer)
    with safe_open(DATA / f"vllm-{name}.safetensors", "pt") as f:
        for order in (GATE_UP, INTERLEAVED):
            wrong = plan.edit("w13", order=order).convert(layer)["w13"]
            assert (wrong != f.get_tensor("w13")).float().mean() > 0.2  # the rest is padding


@pytest.mark.parametrize("name", ["c01", "c02", "c10", "c12", "c13"])
def test_recipe_gives_the_operands_of_the_recorded_right_calls(name: str) -> None:
    """Recorded on an H200 with FlashInfer's own interleave kernels."""
    r, call = recorded.call(name), load(recorded.call(name).path)
    chosen = checkpoint_layer(r.checkpoint)
    part = chosen.layer.part(CONTRACT.parallel(call.arguments))
    ours = recipe("vllm", PATH, chosen.kind).plan(part).convert(part)
    for o in CONTRACT.operands:
        got, want = ours[o.key], o.get(call.arguments)
        assert (got is None) == (want is None) and (got is None or torch.equal(got.flatten(), want.flatten())), o.key


# -- recipes ----------------------------------------------------------------------------------------------------


def test_recipes_state_their_key_and_source() -> None:
    assert [(r.engine, r.version, r.path, r.checkpoint, r.rows) for r in RECIPES if r.path == PATH] == [
        ("vllm", "0.33", PATH, GPT_OSS, INTERLEAVED), ("vllm", "0.33", PATH, COMPRESSED, GATE_UP)]
    assert RECIPES[0].source == "convert_gpt_oss_weight_to_mxfp4_moe_kernel_format"
    assert RECIPES[1].source == "convert_weight_to_mxfp4_moe_kernel_format"
    assert all(r.contract is CONTRACTS[r.path] and "--moe-backend" in r.forced_by for r in RECIPES)


@pytest.mark.parametrize(("path", "kind"), [("mxfp4/MARLIN", GPT_OSS), (PATH, "modelopt")])
def test_unknown_recipe_lists_those_that_exist(path: str, kind: str) -> None:
    with pytest.raises(MxdebugError, match="engine: expected only vllm, got 'sglang'"):
        recipe("sglang", path, kind)
    with pytest.raises(MxdebugError) as error:
        recipe("vllm", path, kind)
    assert error.value.operand == "recipe" and error.value.got == f"vllm {path} for {kind}"
    near = [r for r in RECIPES if path == r.path] or [r for r in RECIPES if r.checkpoint == kind]
    assert len(near) >= 2 and all(f"{r.engine} {r.version} {r.path} for {r.checkpoint}" in error.value.expected for r in near)


def test_recipe_refuses_what_it_does_not_convert() -> None:
    layer = made_layer(2, 128, 128)
    mxfp8 = BlockTensor(made_bytes(2, 128, 128), made_bytes(2, 128, 4), MXFP8)
    r = recipe("vllm", PATH, GPT_OSS)
    with pytest.raises(MxdebugError, match="w13 weights: expected MXFP4, got MXFP8"):
        r.plan(MoELayer(mxfp8, mxfp8, mxfp8, Activation("silu")))
    with pytest.raises(MxdebugError, match="layer: expected gate and up weights, got a layer without gate"):
        recipe("vllm", "mxfp4/FLASHINFER_TRTLLM_MXFP4_BF16", GPT_OSS).plan(MoELayer(None, layer.up, layer.down, Activation("relu2")))
    plan = r.plan(layer)
    with pytest.raises(MxdebugError, match="operand: expected one of w13, .*got 'w1'"):
        plan.edit("w1", order=GATE_UP)
    tanh = MoELayer(layer.gate, layer.up, layer.down, Activation("gelu_tanh"))
    trtllm = recipe("vllm", "mxfp4/FLASHINFER_TRTLLM_MXFP4_BF16", GPT_OSS).plan(layer)
    with pytest.raises(MxdebugError, match="activation: expected one of silu, .*gelu_tanh.*open code"):
        trtllm.arguments(tanh, torch.zeros(1, 128), torch.zeros(1, 1).int(), torch.ones(1, 1))


# -- plans ------------------------------------------------------------------------------------------------------


def test_printed_plan() -> None:
    """What an engine does, one line an operand, in order."""
    layer = made_layer(2, 320, 192)
    assert str(recipe("vllm", PATH, GPT_OSS).plan(layer)) == "\n".join((
        "w13        pad each half 192 -> 256, columns 160 -> 192 | rows g0,u0,g1,u1 -> [w3; w1] | SM90 weight interleave",
        "w13_scale  pad each half 192 -> 256, columns 10 -> 12 | rows g0,u0,g1,u1 -> [w3; w1] | SM90 scale fold",
        "w13_bias   pad each half 192 -> 256 | rows g0,u0,g1,u1 -> [w3; w1] | to bfloat16",
        "w2         pad rows 320 -> 384, columns 96 -> 128 | SM90 weight interleave",
        "w2_scale   pad rows 320 -> 384, columns 6 -> 8 | SM90 scale fold",
        "w2_bias    pad rows 320 -> 384 | to bfloat16"))
    aligned = recipe("vllm", PATH, COMPRESSED).plan(made_layer(2, 256, 128, biases=False))
    assert str(aligned).splitlines()[0] == "w13        rows [w1; w3] -> [w3; w1] | SM90 weight interleave"
    assert "pad" not in str(aligned)


def test_printed_plan_of_a_fault_shows_it() -> None:
    plan = recipe("vllm", PATH, GPT_OSS).plan(made_layer(2, 256, 192))
    text = str(plan.edit("w13", padding=PAD_END, order=GATE_UP, shuffle=SHUFFLE_32, experts=(1, 0), values=SWAP_NIBBLES))
    assert text.splitlines()[0] == ("w13        nibbles swapped | experts 1,0 | rows g0,u0,g1,u1 -> [w1; w3] | "
                                    "pad the end of all rows 384 -> 512 | TRT-LLM shuffle in 32 | SM90 weight interleave")
    assert text.splitlines()[1:] == str(plan).splitlines()[1:]  # the other operands are untouched
    assert "SM90 scale fold applied twice" in str(plan.edit("w2_scale", layout=Composed(SM90_SCALE_FOLD, SM90_SCALE_FOLD)))


@pytest.mark.parametrize("kind", [GPT_OSS, COMPRESSED])
@pytest.mark.parametrize("size", [(2, 256, 128), (3, 320, 192), (1, 32, 32)], ids=str)
@pytest.mark.parametrize("biases", [True, False])
def test_plan_inverts(kind: str, size: tuple[int, int, int], biases: bool) -> None:
    """Weights come back byte for byte; biases in bf16, which is their canonical result."""
    layer = made_layer(*size, biases=biases, dtype=torch.bfloat16)
    plan = recipe("vllm", PATH, kind).plan(layer)
    back = plan.invert(plan.convert(layer), layer)
    assert_same_layer(back, layer)
    assert_same_layer(padded(back, *plan.padded), padded(layer, *plan.padded))


@pytest.mark.parametrize("p", [Parallel(2, 1), Parallel(3, 2), Parallel(1, 0, 4, 3), Parallel(2, 0, 2, 1)], ids=str)
def test_plan_inverts_for_the_part_of_a_rank(p: Parallel) -> None:
    part = made_layer(4, 320, 192, dtype=torch.bfloat16).part(p)
    plan = recipe("vllm", PATH, GPT_OSS).plan(part)
    assert_same_layer(plan.invert(plan.convert(part), part), part)


def test_faulty_plan_inverts_too() -> None:
    """A fault that loses nothing can be undone, however many slots it fills."""
    layer = made_layer(3, 256, 192, dtype=torch.bfloat16)
    plan = recipe("vllm", PATH, GPT_OSS).plan(layer)
    for key, slots in {"w13": {"padding": PAD_END, "order": INTERLEAVED, "values": SWAP_NIBBLES, "layout": LINEAR},
                       "w13_scale": {"experts": (2, 0, 1), "layout": Composed(SM90_SCALE_FOLD, SWIZZLE_128x4)},
                       "w13_bias": {"shuffle": SHUFFLE_16}, "w2": {"experts": (1, 2, 0)}, "w2_scale": {"layout": SWIZZLE_128x4}}.items():
        plan = plan.edit(key, **slots)
    assert_same_layer(plan.invert(plan.convert(layer), layer), layer)
    right = recipe("vllm", PATH, GPT_OSS).plan(layer).convert(layer)
    assert all(not torch.equal(t.flatten(), right[k].flatten()) for k, t in plan.convert(layer).items() if k != "w2_bias")


def test_padded_activations_and_arguments() -> None:
    layer = made_layer(2, 320, 192)
    plan = recipe("vllm", PATH, GPT_OSS).plan(layer)
    x = torch.randn(3, 320)
    a = plan.arguments(layer, x, torch.tensor([[0, 1]] * 3), torch.full((3, 2), 0.5, dtype=torch.float64), Parallel(2, 1, 4, 3))
    assert a["input"].shape == (3, 384) and torch.equal(a["input"][:, :320], x.bfloat16()) and not a["input"][:, 320:].any()
    assert a["token_selected_experts"].dtype == torch.int32 and a["token_final_scales"].dtype == torch.float32
    assert (a["tp_size"], a["tp_rank"], a["ep_size"], a["ep_rank"]) == (2, 1, 4, 3)
    assert a["activation_type"] == "Swiglu" and a["swiglu_limit"].tolist() == [7.0, 7.0] and a["output_dtype"] == torch.bfloat16
    assert all(a[k] == v for k, v in CONTRACT.flags.items())


def test_costs_of_biases_that_bf16_does_not_hold() -> None:
    """Relative L2 of the rounding: 0 for bf16, between 2^-12 and 2^-8 for float32; weights cost nothing."""
    plan = recipe("vllm", PATH, GPT_OSS).plan(made_layer(2, 320, 192))
    costs = plan.costs(made_layer(2, 320, 192, dtype=torch.float32))
    assert set(costs) == {"w13_bias", "w2_bias"} and all(2**-12 < c < 2**-8 for c in costs.values())
    assert plan.costs(made_layer(2, 320, 192, dtype=torch.bfloat16)) == {"w13_bias": 0.0, "w2_bias": 0.0}
    assert plan.costs(made_layer(2, 320, 192, biases=False)) == {}
    third = torch.full((1, 4), 1 / 3)
    assert ToDtype(torch.bfloat16).cost(third) == pytest.approx(abs(0.333984375 - 1 / 3) * 3, rel=1e-4)  # bf16(1/3) = 171/512
    assert ToDtype(torch.bfloat16).cost(torch.zeros(1, 4)) == 0.0


def test_logical_operands() -> None:
    layer = made_layer(2, 64, 32)
    t = logical_operands(layer)
    assert torch.equal(t["w13"], torch.cat([layer.gate.payload, layer.up.payload], 1)) and torch.equal(t["w2_scale"], layer.down.scales)
    assert torch.equal(t["w13_bias"], torch.cat([layer.gate_bias, layer.up_bias], 1)) and torch.equal(t["w2_bias"], layer.down_bias)
    plain = logical_operands(MoELayer(None, layer.up, layer.down, Activation("relu2")))
    assert torch.equal(plain["w13"], layer.up.payload) and plain["w13_bias"] is None


# -- stages -----------------------------------------------------------------------------------------------------

STAGES: dict[str, tuple[Stage, tuple[int, ...]]] = {
    "pad halves": (PadHalves(2, 5, 8, 3, 4), (2, 10, 3)), "pad rows": (PadHalves(1, 5, 8), (2, 5)),
    "pad end": (PadEnd(10, 16, 3, 4), (2, 10, 3)),
    "shuffle": (Shuffle(SHUFFLE_32), (2, 64, 3)), "experts": (Experts((2, 0, 1)), (3, 4, 2)), "nibbles": (SWAP_NIBBLES, (2, 4, 3)),
    "lay": (Lay(SM90_WEIGHT_INTERLEAVE, 32, 64, (32, 64)), (2, 32, 64)),
    "lay composed": (Lay(Composed(SM90_SCALE_FOLD, SWIZZLE_128x4), 128, 8, (1024,)), (2, 128, 8)),
    **{f"rows {o.name}": (Rows(o, was="?"), (2, 256, 3)) for o in ROW_ORDERS if o is not GATE_UP}}


@pytest.mark.parametrize("name", STAGES)
def test_lossless_stage_undoes_itself(name: str) -> None:
    stage, shape = STAGES[name]
    t = made_bytes(*shape)
    out = stage.apply(t)
    assert isinstance(stage, Stage) and stage.lossless and stage.name
    assert torch.equal(stage.undo(out), t) and not torch.equal(out.flatten()[: t.numel()], t.flatten())


def test_padding_of_halves_and_of_the_end_differ() -> None:
    """Two halves of two rows, padded to three: each half on its own, or once. The second moves the boundary."""
    t = torch.tensor([[[1], [2], [3], [4]]], dtype=torch.uint8)
    assert PadHalves(2, 2, 3, 1, 2).apply(t).tolist() == [[[1, 0], [2, 0], [0, 0], [3, 0], [4, 0], [0, 0]]]
    assert PadEnd(4, 6, 1, 2).apply(t).tolist() == [[[1, 0], [2, 0], [3, 0], [4, 0], [0, 0], [0, 0]]]


def test_experts_and_nibbles_written_out() -> None:
    assert Experts((2, 0, 1)).apply(torch.tensor([[10], [11], [12]])).tolist() == [[12], [10], [11]]
    assert SWAP_NIBBLES.apply(torch.tensor([[0x1F, 0xA0]], dtype=torch.uint8)).tolist() == [[0xF1, 0x0A]]


def test_cast_by_value_is_what_torch_does_to_e8m0() -> None:
    """`.to(torch.uint8)` on float8_e8m0fnu: 127 (1.0) becomes 1, 130 (8.0) becomes 8, what is below 1 or above 128 becomes 0."""
    codes = torch.arange(255, dtype=torch.uint8)
    numbers = codes.view(torch.float8_e8m0fnu).float().to(torch.int64).clamp(max=2**62)
    assert torch.equal(CAST_BY_VALUE.apply(codes), numbers.to(torch.uint8))
    assert [CAST_BY_VALUE.table[c] for c in (0, 126, 127, 130, 134, 135, 254, 255)] == [0, 0, 1, 8, 128, 0, 0, 0]
    assert not CAST_BY_VALUE.lossless and SWAP_NIBBLES.lossless
    assert CAST_BY_VALUE.undo(torch.tensor([1, 8, 0], dtype=torch.uint8)).tolist() == [127, 130, 0]  # the lowest byte that leads there


def test_values_stage_of_any_table() -> None:
    rotate = Values("plus one", tuple((b + 1) % 256 for b in range(256)))
    assert rotate.lossless and rotate.apply(torch.tensor([255, 3], dtype=torch.uint8)).tolist() == [0, 4]
    assert torch.equal(rotate.undo(rotate.apply(made_bytes(2, 5))), made_bytes(2, 5))


def test_laying_out_an_unpadded_matrix_is_refused() -> None:
    with pytest.raises(MxdebugError, match=r"operand before SM90 weight interleave: expected shape \[E, 32, 64\], got shape \[2, 16, 64\]"):
        Lay(SM90_WEIGHT_INTERLEAVE, 32, 64, (32, 64)).apply(made_bytes(2, 16, 64))


def test_row_indices_follow_every_stage() -> None:
    """Form.row_indices says which logical row stands where; checked by sending row numbers through the form's own stages."""
    layer = made_layer(1, 128, 192)
    plan = recipe("vllm", PATH, GPT_OSS).plan(layer)
    for slots in ({}, {"order": INTERLEAVED}, {"padding": PAD_END}, {"padding": PAD_END, "order": UP_GATE, "shuffle": SHUFFLE_16},
                  {"shuffle": SHUFFLE_32}):
        form = plan.edit("w13_bias", **slots).forms["w13_bias"]
        numbers = torch.arange(1, 385, dtype=torch.float32)[None]  # 384 rows: 1.. as bf16 holds 256 of them exactly, so no ToDtype
        for stage in form.stages[:-1]:
            numbers = stage.apply(numbers)
        assert torch.equal(form.row_indices(), numbers[0].long() - 1)
        assert int((form.row_indices() < 0).sum()) == 512 - 384
