"""Does the contract read operands as the H200 does, and say clearly when a call breaks it?

Oracle: 14 recorded calls, right and wrong ones; every output must come out bit for bit. The laws that tie contract and recipe
together: decoding what the recipe made gives the checkpoint's weights (padded, biases in bf16), and converting what was decoded
gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from making import (COMPRESSED, CONTRACT, GPT_OSS, PATH, POSITIONS, assert_same_layer, checkpoint_layer, made_layer, padded, situation)
from torch import Tensor

from mxdebug import recorded
from mxdebug.calls import load
from mxdebug.contracts import CONTRACTS, contract, find
from mxdebug.errors import MxdebugError
from mxdebug.formats import E8M0_SM90
from mxdebug.metrics import compare
from mxdebug.recipes import recipe
from mxdebug.reference import MoELayer, Parallel

# -- recorded on an H200 ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", recorded.CALLS)
def test_recorded_call_is_emulated_bit_for_bit(name: str) -> None:
    call = load(recorded.call(name).path)
    c = find(call.function, call.arguments)
    assert c.path == PATH
    got, want = c.emulate(call.arguments), call.outputs[0]
    assert got.dtype == want.dtype == torch.bfloat16 and got.shape == want.shape
    result = compare(got, want)
    assert result.bit_identical and result.elements == want.numel() and result.relative_l2 == 0.0
    assert want.float().norm() > 1.0  # it is no comparison of zeros


def test_recorded_calls_are_what_they_are_counted_as() -> None:
    """54,528 numbers in 14 calls, none NaN; two calls of one layer differ, so that a constant could not pass."""
    outputs = {n: load(c.path).outputs[0] for n, c in recorded.CALLS.items()}
    assert len(outputs) == 14 and sum(o.numel() for o in outputs.values()) == 54_528
    assert all(torch.isfinite(o).all() for o in outputs.values())
    assert compare(outputs["c03"], outputs["c01"]).relative_l2 > 0.7


@pytest.mark.parametrize("name", ["c01", "c02", "c10", "c12", "c13"])
def test_recorded_right_calls_decode_to_the_checkpoint(name: str) -> None:
    """What the kernel sees is the checkpoint's layer, padded, on the stated position."""
    r, call = recorded.call(name), load(recorded.call(name).path)
    part = checkpoint_layer(r.checkpoint).layer.part(CONTRACT.parallel(call.arguments))
    seen = CONTRACT.decode(call.arguments)
    assert_same_layer(seen, padded(part, seen.intermediate, seen.hidden))


# -- contract and recipe ----------------------------------------------------------------------------------------

SIZES = {"aligned": (2, 256, 128), "hidden 320": (3, 320, 128), "intermediate 192": (2, 128, 192), "both": (4, 320, 192),
         "one block": (1, 32, 32)}
PARTS = {"whole": Parallel(), "tp 0 of 2": Parallel(2, 0), "tp 1 of 2": Parallel(2, 1), "ep 1 of 2": Parallel(1, 0, 2, 1),
         "tp 2 of 3, ep 3 of 4": Parallel(3, 2, 4, 3)}


def made_call(layer: MoELayer, kind: str, p: Parallel = Parallel(), tokens: int = 5) -> tuple[MoELayer, dict[str, Any]]:
    """(the rank's part, the arguments of a right call)."""
    part = layer.part(p)
    g = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, layer.hidden, generator=g)
    k = min(2, layer.experts)
    ids = torch.stack([torch.randperm(layer.experts, generator=g)[:k] for _ in range(tokens)])
    return part, recipe("vllm", PATH, kind).plan(part).arguments(part, x, ids, torch.rand(tokens, k, generator=g), p)


@pytest.mark.parametrize("kind", [GPT_OSS, COMPRESSED])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("biases", [None, torch.float32, torch.bfloat16], ids=str)
def test_decoding_what_the_recipe_made_gives_the_checkpoint(kind: str, size: str, biases: torch.dtype | None) -> None:
    """decode(recipe(x)) == canonical(x): zeros added, biases rounded to bf16, everything else untouched."""
    layer = made_layer(*SIZES[size], biases=biases is not None, dtype=biases or torch.float32)
    part, arguments = made_call(layer, kind)
    plan = recipe("vllm", PATH, kind).plan(part)
    assert all(n % 128 == 0 for n in plan.padded)
    seen = CONTRACT.decode(arguments)
    assert_same_layer(seen, padded(part, *plan.padded))
    # and backwards: the recipe made these bytes, so it makes them again from what was decoded
    again = recipe("vllm", PATH, kind).plan(seen).convert(seen)
    for o in CONTRACT.operands:
        a, b = again[o.key], o.get(arguments)
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), o.key


@pytest.mark.parametrize("kind", [GPT_OSS, COMPRESSED])
@pytest.mark.parametrize("p", PARTS)
def test_laws_hold_for_the_part_of_every_rank(kind: str, p: str) -> None:
    """tp 2 of 3: 6 blocks of 192 are shared 2, 2, 2, and 64 is padded to 128."""
    layer = made_layer(4, 320, 192, seed=1)
    part, arguments = made_call(layer, kind, PARTS[p])
    plan = recipe("vllm", PATH, kind).plan(part)
    assert_same_layer(CONTRACT.decode(arguments), padded(part, *plan.padded))
    assert CONTRACT.parallel(arguments) == PARTS[p]


@pytest.mark.parametrize("position", ["gptoss-192", "minimax", "8-experts-ep1", "gptoss-192-tp1"])
def test_laws_hold_for_the_recorded_checkpoints(position: str) -> None:
    s = situation(position)
    part = s.layer.part(POSITIONS[position][1])
    assert_same_layer(CONTRACT.decode(s.arguments()), padded(part, *s.plan.padded))


def test_ranks_add_up() -> None:
    """The sum over tensor-parallel ranks, and over expert-parallel ranks, is the whole layer's output; the w2 bias is in it once."""
    layer = made_layer(4, 256, 256, seed=2)
    whole = CONTRACT.emulate(made_call(layer, GPT_OSS)[1]).double()
    for ranks in ([Parallel(2, 0), Parallel(2, 1)], [Parallel(1, 0, 2, 0), Parallel(1, 0, 2, 1)]):
        summed = sum(CONTRACT.emulate(made_call(layer, GPT_OSS, p)[1]).double() for p in ranks)
        assert compare(summed, whole).relative_l2 < 0.01  # each rank rounds its output to bf16
    without = replace(layer, down_bias=torch.zeros_like(layer.down_bias))
    assert compare(CONTRACT.emulate(made_call(without, GPT_OSS)[1]).double(), whole).relative_l2 > 0.05  # the bias would show
    # rank 1 does not read the w2 bias at all
    assert torch.equal(*(CONTRACT.emulate(made_call(x, GPT_OSS, Parallel(2, 1))[1]) for x in (layer, without)))


def test_padding_changes_nothing() -> None:
    """A layer of 320 x 192 computes the same in a kernel that sees 384 x 256; the columns that were added stay zero."""
    layer = made_layer(2, 320, 192, seed=4)
    arguments = made_call(layer, GPT_OSS)[1]
    out = CONTRACT.emulate(arguments)
    assert out.shape[1] == 384 and not out[:, 320:].any()
    bf16 = replace(layer, **{n: getattr(layer, n).bfloat16() for n in ("gate_bias", "up_bias", "down_bias")}, scale=E8M0_SM90)
    seen = CONTRACT.see(arguments)
    small = replace(seen, x=seen.x[:, :320], layer=bf16).emulate()
    assert compare(out[:, :320], small).bit_identical


def test_bytes_count_not_shapes_of_scales() -> None:
    """The kernel takes a pointer: any shape of the same bytes reads the same; strides are not handed over, so views are refused."""
    arguments = situation("gptoss").arguments()
    want = CONTRACT.decode(arguments)
    flat = {**arguments, "quant_scales": [arguments["quant_scales"][0].flatten(), arguments["quant_scales"][1].reshape(-1, 4)]}
    assert_same_layer(CONTRACT.decode(flat), want)
    strided = dict(arguments)
    for name in ("fc1_expert_weights", "fc2_expert_weights"):
        t = torch.zeros(*arguments[name].shape[:-1], arguments[name].shape[-1] + 8, dtype=torch.uint8)
        t[..., :-8] = arguments[name]
        strided[name] = t[..., :-8]
    assert not strided["fc1_expert_weights"].is_contiguous()
    with pytest.raises(MxdebugError, match="contiguous memory"):
        CONTRACT.decode(strided)
    with pytest.raises(MxdebugError, match="contiguous memory"):
        CONTRACT.decode({**arguments, "input": torch.nn.functional.pad(arguments["input"], (0, 8))[:, :-8]})


# -- scale bytes at the ends of their range ----------------------------------------------------------------------


def with_scale(key: str, expert: int, row: int, block: int, byte: int) -> tuple[dict[str, Any], dict[str, Any], Tensor]:
    """(a right call, the same with one scale byte replaced, tokens that use the expert). row counts in logical order."""
    s = situation("minimax", tokens=8)
    layer = s.layer
    part = getattr(layer, key)
    scales = part.scales.clone()
    scales[expert, row, block] = byte
    changed = replace(layer, **{key: replace(part, scales=scales)})
    right = s.arguments()
    return right, {**replace(s, layer=changed).arguments()}, (right["token_selected_experts"] == expert).any(1)


def test_scale_byte_0x00_is_zero() -> None:
    """On SM90 the block counts as zeros, exactly as if its codes were zero; OCP's 2^-127 is nothing else by chance."""
    right, zeroed, uses = with_scale("down", 2, 5, 3, 0x00)
    seen = CONTRACT.decode(zeroed)
    block = seen.down[2].dequantise(scale=seen.scale)[5, 96:128]
    assert not block.any() and CONTRACT.decode(right).down[2].dequantise()[5, 96:128].any()
    assert (seen.down[2].dequantise()[5, 96:128] != 0).any()  # the format's own codec says 2^-127
    moved = (CONTRACT.emulate(zeroed) != CONTRACT.emulate(right)).nonzero()
    assert set(moved[:, 1].tolist()) == {5} and set(moved[:, 0].tolist()) <= set(uses.nonzero().flatten().tolist()) and len(moved) > 0


@pytest.mark.parametrize(("key", "row"), [("down", 5), ("up", 200), ("gate", 200)])
def test_scale_byte_0xff_reaches_the_output(key: str, row: int) -> None:
    """0xFF reads as inf: the tokens of that expert are NaN or inf, in w2's column alone or, through w13, in all of them."""
    right, broken, uses = with_scale(key, 2, row, 3, 0xFF)
    unlimited = {f"swiglu_{n}": None for n in ("alpha", "beta", "limit")}
    assert torch.isfinite(CONTRACT.emulate({**right, **unlimited})).all() and 0 < uses.sum() < len(uses)
    bad = ~torch.isfinite(CONTRACT.emulate({**broken, **unlimited}))
    # a gate of -inf gives -inf * sigmoid(-inf) = NaN, one of inf gives inf: both spread over the row of the output
    assert torch.equal(bad.any(1), uses)
    columns = bad[uses].any(0)
    assert columns.nonzero().flatten().tolist() == [5] if key == "down" else bool(columns.all())


def test_limit_hides_an_infinite_scale() -> None:
    """Up is clamped to [-limit, limit], inf too: the output stays finite and is wrong all the same."""
    right, broken, _ = with_scale("up", 2, 200, 3, 0xFF)
    out = CONTRACT.emulate(broken)
    assert torch.isfinite(out).all() and compare(out, CONTRACT.emulate(right)).differing > 100


def test_scale_bytes_between_are_powers_of_two() -> None:
    assert E8M0_SM90.decode(torch.tensor([0, 1, 126, 127, 128, 254, 255], dtype=torch.uint8)).tolist() == [
        0.0, 2.0**-126, 0.5, 1.0, 2.0, 2.0**127, float("inf")]


# -- broken contracts --------------------------------------------------------------------------------------------


def _set(name: str, change: Callable[[Any], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda a: {**a, name: change(a[name])}


def _scales(index: int, change: Callable[[Tensor], Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda a: {**a, "quant_scales": [change(t) if i == index else t for i, t in enumerate(a["quant_scales"])]}


_IDS, _ROUTER = "token_selected_experts", "token_final_scales"
X, IDS, ROUTER = "activations (input)", f"selected experts ({_IDS})", f"router weights ({_ROUTER})"
W13, W2 = "w13 payload (fc1_expert_weights)", "w2 payload (fc2_expert_weights)"
S13, S2 = "w13 block scales (quant_scales[0])", "w2 block scales (quant_scales[1])"
BOTH = "both fc1_expert_biases and fc2_expert_biases, or neither"
# What was done, and the words that must be in operand, expectation and finding.
BROKEN: dict[str, tuple[Callable[[dict[str, Any]], dict[str, Any]], str, str, str]] = {
    "fp16 activations": (_set("input", lambda t: t.half()), X, "torch.bfloat16 [tokens, H]", "torch.float16 [12, 384]"),
    "fp8 activations": (_set("input", lambda t: t.to(torch.float8_e4m3fn)), X, "torch.bfloat16", "float8_e4m3fn"),
    "3-D activations": (_set("input", lambda t: t[None]), X, "[tokens, H]", "[1, 12, 384]"),
    "no activations": (_set("input", lambda t: None), X, "torch.bfloat16", "NoneType"),
    "narrow activations": (_set("input", lambda t: t[:, :256]), W13, "shape [4, 512, 192]", "activations [12, 256]"),
    "int64 weights": (_set("fc1_expert_weights", lambda t: t.view(torch.int64)), W13, "torch.uint8", "torch.int64"),
    "int64 w2": (_set("fc2_expert_weights", lambda t: t.view(torch.int64)), W2, "torch.uint8", "torch.int64"),
    "no weights": (_set("fc1_expert_weights", lambda t: None), W13, "torch.uint8 [E, 2I, H/2]", "none"),
    "weights as a list": (_set("fc1_expert_weights", lambda t: [t]), W13, "a tensor", "list"),
    "2-D weights": (_set("fc1_expert_weights", lambda t: t.flatten(0, 1)), "w13 and w2 payload", "[E, 2I, H/2]", "[2048, 192]"),
    "experts of one weight only": (_set("fc2_expert_weights", lambda t: t[:3]), "w13 and w2 payload", "[E, H, I/2]", "[3, 384, 128]"),
    "half of the rows": (_set("fc1_expert_weights", lambda t: t[:, :256]), W13, "[4, 512, 192]", "[4, 256, 192]"),
    "unpadded hidden size": (lambda a: {**a, "fc1_expert_weights": a["fc1_expert_weights"][..., :160], "input": a["input"][:, :320],
                                        "fc2_expert_weights": a["fc2_expert_weights"][:, :320]}, "hidden size", "a multiple of 128", "320"),
    "unpadded intermediate size": (lambda a: {**a, "fc1_expert_weights": a["fc1_expert_weights"][:, :384],
                                              "fc2_expert_weights": a["fc2_expert_weights"][..., :96]},
                                   "intermediate size", "a multiple of 128", "192"),
    "scales as floats": (_scales(0, lambda t: t.float()), S13, "torch.uint8", "torch.float32"),
    "scales as e8m0": (_scales(1, lambda t: t.view(torch.float8_e8m0fnu)), S2, "torch.uint8", "e8m0fnu"),
    "scales as int32": (_scales(0, lambda t: t.view(torch.int32)), S13, "torch.uint8", "torch.int32"),
    "scales of 16 elements": (_scales(0, lambda t: torch.cat([t, t], dim=-1)), S13,
                              "24576 bytes: 4 experts x 512 rows x 12 blocks", "49152 bytes"),
    "scales of an unpadded layer": (_scales(1, lambda t: t.flatten(1)[:, :-64]), S2, "12288 bytes", "12032 bytes"),
    "one scale tensor": (_set("quant_scales", lambda q: q[:1]), S2, "torch.uint8", "none"),
    "no scales": (_set("quant_scales", lambda q: None), S13, "torch.uint8", "none"),
    "w13 bias only": (_set("fc2_expert_biases", lambda t: None), "biases", BOTH, "one of them"),
    "w2 bias only": (_set("fc1_expert_biases", lambda t: None), "biases", BOTH, "one of them"),
    "float32 bias": (_set("fc1_expert_biases", lambda t: t.float()), "w13 bias (fc1_expert_biases)", "torch.bfloat16", "torch.float32"),
    "float32 w2 bias": (_set("fc2_expert_biases", lambda t: t.float()), "w2 bias (fc2_expert_biases)", "torch.bfloat16", "torch.float32"),
    "unpadded bias": (_set("fc1_expert_biases", lambda t: t[:, :384]), "w13 bias", "shape [4, 512]", "shape [4, 384]"),
    "bias of one expert": (_set("fc2_expert_biases", lambda t: t[0]), "w2 bias", "shape [4, 384]", "shape [384]"),
    "alpha as a float": (_set("swiglu_alpha", lambda t: 1.702), "swiglu_alpha", "torch.float32 [experts on this rank]", "float"),
    "limit in bf16": (_set("swiglu_limit", lambda t: t.bfloat16()), "swiglu_limit", "torch.float32", "torch.bfloat16 [4]"),
    "beta as a scalar": (_set("swiglu_beta", lambda t: t[0]), "swiglu_beta", "[experts on this rank]", "torch.float32 []"),
    "alpha of all ranks": (_set("swiglu_alpha", lambda t: torch.cat([t, t])), "swiglu alpha", "shape [4]", "shape [8]"),
    "unknown activation": (_set("activation_type", lambda t: "Gelu"), "activation_type", "one of Swiglu", "Gelu"),
    "layer with gate as one without": (_set("activation_type", lambda t: "Relu2"), W13, "[4, 256, 192]", "[4, 512, 192]"),
    "int64 expert ids": (_set(_IDS, lambda t: t.long()), IDS, "torch.int32 [12, top-k]", "torch.int64"),
    "expert ids of fewer tokens": (_set(_IDS, lambda t: t[:5]), IDS, "[12, top-k]", "[5, 2]"),
    "no expert ids": (_set(_IDS, lambda t: None), IDS, "torch.int32", "NoneType"),
    "bf16 router weights": (_set(_ROUTER, lambda t: t.bfloat16()), ROUTER, "torch.float32 [12, 2]", "torch.bfloat16"),
    "router weights of another top-k": (_set(_ROUTER, lambda t: t[:, :1]), ROUTER, "[12, 2]", "[12, 1]"),
    "no router weights": (_set(_ROUTER, lambda t: None), ROUTER, "torch.float32", "NoneType"),
}


@pytest.mark.parametrize("what", BROKEN)
@pytest.mark.parametrize("does", ["decode", "emulate"])
def test_broken_contract_says_operand_expected_and_got(what: str, does: str) -> None:
    change, operand, expected, got = BROKEN[what]
    arguments = situation("gptoss").arguments()
    CONTRACT.decode(arguments)
    with pytest.raises(MxdebugError) as error:
        getattr(CONTRACT, does)(change(dict(arguments)))
    assert operand == error.value.operand and expected in error.value.expected and got in error.value.got
    assert str(error.value) == (f"{error.value.operand}: expected {error.value.expected}, got {error.value.got}"
                                + (f". Likely reason: {error.value.reason}" if error.value.reason else ""))


def test_layers_without_biases_or_parameters_are_allowed() -> None:
    s = situation("minimax")
    a = {**s.arguments(), "swiglu_alpha": None, "swiglu_beta": None, "swiglu_limit": None}
    seen = CONTRACT.decode(a)
    assert seen.gate_bias is seen.up_bias is seen.down_bias is None and seen.activation.kind == "silu"


class _Enum:
    """FlashInfer's ActivationType, as far as it matters: an object with a name."""

    name = "Geglu"

    def __str__(self) -> str:
        return "an enum"


@pytest.mark.parametrize(("kind", "parameters", "want"), [
    ("Swiglu", (), "silu"), ("Swiglu", ("limit",), "swiglu"), ("Swiglu", ("alpha", "beta", "limit"), "swiglu"),
    ("SwigluBias", (), "swiglu"),
    ("Geglu", (), "gelu"), (_Enum(), (), "gelu"), ("GegluTanh", (), "gelu_tanh")], ids=str)
def test_activation_that_arguments_select(kind: Any, parameters: tuple[str, ...], want: str) -> None:
    """Any of alpha, beta, limit turns Swiglu into SwigluBias; without them it is plain silu(gate) * up."""
    a = situation("minimax").arguments()
    a = {**a, "activation_type": kind, **{f"swiglu_{n}": None for n in ("alpha", "beta", "limit") if n not in parameters}}
    got = CONTRACT.decode(a).activation
    assert got.kind == want and all((getattr(got, n) is not None) == (n in parameters) for n in ("alpha", "beta", "limit"))


def test_layer_without_gate() -> None:
    """Relu2: w13 has one half, and all rows are up."""
    a = situation("minimax").arguments()
    layer = CONTRACT.decode(a)
    plain = {**a, "fc1_expert_weights": a["fc1_expert_weights"][:, :256].contiguous(),
             "quant_scales": [a["quant_scales"][0][:, :4].contiguous(), a["quant_scales"][1]],
             "activation_type": "Relu2", "swiglu_alpha": None, "swiglu_beta": None, "swiglu_limit": None}
    seen = CONTRACT.decode(plain)
    assert seen.gate is None and torch.equal(seen.up.payload, layer.up.payload) and torch.equal(seen.up.scales, layer.up.scales)


# -- finding and running -----------------------------------------------------------------------------------------


def test_find() -> None:
    a = situation("gptoss").arguments()
    assert find("cutlass_fused_moe", a) is contract(PATH) is CONTRACTS[PATH]


def test_flags_that_an_older_flashinfer_does_not_have_count_as_off() -> None:
    """But the flag that selects a kernel must be there."""
    a = situation("gptoss").arguments()
    older = {k: v for k, v in a.items() if k not in ("use_wfp4afp8_humming", "use_packed_weights", "backend")}
    assert find("cutlass_fused_moe", older) is CONTRACT
    with pytest.raises(MxdebugError, match="a call of another kernel"):
        find("cutlass_fused_moe", {k: v for k, v in a.items() if k != "use_w4_group_scaling"})


@pytest.mark.parametrize(("function", "change", "words"), [
    ("trtllm_fp4_block_scale_moe", {}, ("trtllm_fp4_block_scale_moe",)),
    ("cutlass_fused_moe", {"use_w4_group_scaling": False}, ("use_w4_group_scaling=False",)),
    ("cutlass_fused_moe", {"use_mxfp8_act_scaling": True}, ("use_mxfp8_act_scaling=True",)),
    ("cutlass_fused_moe", {"backend": "trtllm"}, ("backend=trtllm",))], ids=lambda v: str(v)[:30])
def test_find_says_what_was_called_and_what_is_known(function: str, change: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises(MxdebugError) as error:
        find(function, {**situation("gptoss").arguments(), **change})
    assert error.value.operand == "call" and PATH in error.value.expected and function in error.value.got
    assert all(w in error.value.got for w in words)


def test_unknown_names() -> None:
    with pytest.raises(MxdebugError, match=f"path: expected one of {PATH}, .*, got 'mxfp4/MARLIN'"):
        contract("mxfp4/MARLIN")
    with pytest.raises(MxdebugError, match="operand: expected one of w13, w13_scale, w13_bias, w2, w2_scale, w2_bias, got 'w3'"):
        CONTRACT.operand("w3")


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU answers")
def test_run_without_a_gpu_says_what_is_needed_and_what_is_here() -> None:
    with pytest.raises(MxdebugError) as error:
        CONTRACT.run(situation("gptoss").arguments())
    text = str(error.value)
    assert "this machine" in text and "SM90 (H100, H200)" in text and "flashinfer-python with flashinfer-jit-cache" in text
    assert f"no CUDA GPU (torch {torch.__version__})" in text and "use emulate" in text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an H100 or H200 and FlashInfer's compiled kernels")
@pytest.mark.parametrize("name", recorded.CALLS)
def test_run_gives_the_recorded_output(name: str) -> None:
    call = load(recorded.call(name).path)
    assert compare(CONTRACT.run(call.arguments).cpu(), call.outputs[0]).bit_identical


def test_printed_contract_states_every_operand() -> None:
    text = str(CONTRACT)
    assert text.startswith(f"{PATH}: cutlass_fused_moe(") and "use_w4_group_scaling=True" in text and "SM90" in text
    for o in CONTRACT.operands:
        line = next(line for line in text.splitlines() if line.strip().startswith(o.title))
        assert o.argument in line and o.shape in line
    assert "layout SM90 scale fold, rows [w3; w1], scale codec E8M0_SM90" in text
    assert "recorded on an H200" in text and "0x00 is 0.0 and 0xFF is inf" in text
