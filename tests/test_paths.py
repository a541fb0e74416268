"""Do contract and recipe of every path agree? Both laws of the design, for every path, checkpoint kind, size and option.

decode(recipe(x)) == canonical(x): zeros added, biases in the kernel's dtype, one alpha for both halves (w1's), the largest input scale;
recipe(decode(y)) == y: the same bytes come out again. And golden tensors that vLLM's own converters made are byte-exact.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from making import assert_same_layer, made_layer, padded
from torch import Tensor

from mxdebug.contracts import CONTRACTS, contract, find
from mxdebug.errors import MxdebugError
from mxdebug.layouts import LINEAR, SWIZZLE_128x4
from mxdebug.metrics import compare
from mxdebug.recipes import RECIPES, Recipe, recipe
from mxdebug.reference import EXACT, MoELayer, Parallel, forward

ALL = [pytest.param(r, id=f"{r.path} {r.checkpoint.split(' ')[0]}") for r in RECIPES]
# What vLLM refuses or pads: (intermediate, hidden) that are right for every path, and sizes that need padding.
ALIGNED, UNALIGNED = (128, 256), (96, 320)


def fits(r: Recipe) -> tuple[int, int]:
    """A size that the path takes without padding weights in vLLM."""
    return (192, 320) if r.path == "nvfp4/FLASHINFER_CUTLASS" else UNALIGNED


def biases(r: Recipe) -> bool:
    return "w13_bias" in {o.key for o in r.contract.operands} and "nvfp4" not in r.path


def canonical(layer: MoELayer, r: Recipe) -> MoELayer:
    """What the kernel can see of a layer, written out: padding, biases, and for NVFP4 alpha = w1's global scale x the largest input scale."""
    plan = r.plan(layer)
    out = padded(layer, *plan.padded)
    if "TRTLLM" in r.path:  # biases are kept as bf16 and passed as float32
        out = replace(out, **{n: b.float() for n in ("gate_bias", "up_bias", "down_bias") if (b := getattr(out, n)) is not None})
    if not layer.up.format.outer:
        return out
    a13, a2 = layer.w13_input_scale.max(), layer.w2_input_scale.max()
    first = (layer.gate if layer.gate is not None else layer.up).global_scale * a13
    return replace(out, gate=out.gate and replace(out.gate, global_scale=first), up=replace(out.up, global_scale=first),
                   down=replace(out.down, global_scale=layer.down.global_scale * a2))


def call(r: Recipe, layer: MoELayer, p: Parallel = Parallel(), tokens: int = 5, seed: int = 3) -> dict:
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, layer.hidden, generator=g)
    k = min(2, layer.experts)
    ids = torch.stack([torch.randperm(layer.experts, generator=g)[:k] for _ in range(tokens)])
    part = layer.part(p)
    return r.plan(part).arguments(part, x, ids, torch.rand(tokens, k, generator=g), p)


def check_laws(r: Recipe, layer: MoELayer, p: Parallel = Parallel(), tokens: int = 5) -> None:
    part, arguments = layer.part(p), call(r, layer, p, tokens)
    assert find(r.contract.function, arguments) is r.contract
    seen, want = r.contract.decode(arguments), canonical(part, r)
    folded = r.contract.clamps_before_scaling and part.activation.kind == "swiglu"
    if folded:  # limit and beta were divided by alpha and multiplied again
        for name in ("beta", "limit"):
            assert torch.allclose(getattr(seen.activation, name), getattr(want.activation, name), rtol=2.0**-22)
        seen = replace(seen, activation=want.activation)
    assert_same_layer(seen, want)
    # and backwards: what was decoded, converted again, gives the same bytes
    again = r.plan(replace(seen, w13_input_scale=part.w13_input_scale, w2_input_scale=part.w2_input_scale)).convert(
        replace(seen, w13_input_scale=part.w13_input_scale, w2_input_scale=part.w2_input_scale))
    for o in r.contract.operands:
        a, b = again.get(o.key), o.get(arguments)
        assert (a is None) == (b is None) and (a is None or torch.equal(o.as_passed(a), b)), o.key
    # the position: TRT-LLM and CuTe-DSL are told of experts only
    stated = r.contract.parallel(arguments)
    assert (stated.ep_size, stated.ep_rank) == (p.ep_size, p.ep_rank)
    assert stated.tp_size == (p.tp_size if "CUTLASS" in r.path else 1)


@pytest.mark.parametrize("r", ALL)
@pytest.mark.parametrize("size", ["aligned", "unaligned"])
@pytest.mark.parametrize("p", [Parallel(), Parallel(1, 0, 2, 1), Parallel(2, 1)], ids=["whole", "ep 1 of 2", "tp 1 of 2"])
def test_laws(r: Recipe, size: str, p: Parallel) -> None:
    i, h = (256, 512) if size == "aligned" else fits(r)
    if p.tp_size == 2 and r.path == "nvfp4/FLASHINFER_CUTLASS":
        i = 2 * i
    check_laws(r, made_layer(2, h, i, fmt=r.contract.weights, biases=biases(r)), p)


@pytest.mark.parametrize("r", [p for p in ALL if "TRTLLM_MXFP4" not in p.values[0].path])
def test_laws_without_gate(r: Recipe) -> None:
    """Relu2: no halves, so no order of halves; rows are shuffled all the same on TRT-LLM."""
    i, h = (256, 320) if r.path == "nvfp4/FLASHINFER_CUTLASS" else (160, 320)
    check_laws(r, made_layer(3, h, i, fmt=r.contract.weights, biases=biases(r), gated=False))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.sampled_from(RECIPES), st.integers(1, 3), st.integers(1, 9), st.integers(1, 13), st.integers(1, 140), st.booleans(), st.booleans())
def test_laws_hold_for_any_size(r: Recipe, experts: int, i: int, h: int, tokens: int, with_biases: bool, gated: bool) -> None:
    step = 64 if r.path == "nvfp4/FLASHINFER_CUTLASS" else 32
    layer = made_layer(experts, h * 32, i * step if gated or step == 32 else i * 128, fmt=r.contract.weights,
                       biases=with_biases and biases(r), gated=gated)
    if not gated and "TRTLLM_MXFP4" in r.path:
        with pytest.raises(MxdebugError, match="a layer without gate"):
            r.plan(layer)
        return
    check_laws(r, layer, tokens=tokens)


@pytest.mark.parametrize("r", ALL)
def test_emulation_is_near_what_the_checkpoint_means(r: Recipe) -> None:
    """Within the quantisation of the activations: MXFP8 31 dB (0.028), NVFP4 20.5 dB (0.094), twice each; bf16 0.01."""
    layer = made_layer(4, 512, 256, fmt=r.contract.weights, biases=biases(r))
    if layer.gate.global_scale is not None:  # one alpha is passed for both halves
        layer = replace(layer, up=replace(layer.up, global_scale=layer.gate.global_scale))
        layer = replace(layer, **{n: torch.full((4,), v) for n, v in (("w13_input_scale", 4.0 / 2688), ("w2_input_scale", 40.0 / 2688))})
    g = torch.Generator().manual_seed(9)
    x = torch.randn(24, 512, generator=g).bfloat16()
    ids = torch.stack([torch.randperm(4, generator=g)[:2] for _ in range(24)])
    router = torch.rand(24, 2, generator=g)
    arguments = r.plan(layer).arguments(layer, x, ids, router)
    got = r.contract.emulate(arguments)
    want = forward(x, ids, router, layer, parallel=Parallel(), roundings=EXACT, compute=torch.float64).output
    noise = {"MXFP8": 0.028, "NVFP4": 0.094}.get(r.contract.activations.name if r.contract.activations else "", 0.003)
    c = compare(got.double(), want)
    assert 0 < c.relative_l2 < 2**0.5 * noise and abs(c.norm_ratio - 1) < noise


@pytest.mark.parametrize("r", ALL)
def test_tokens_can_be_picked(r: Recipe) -> None:
    layer = made_layer(4, *reversed((256, 512)), fmt=r.contract.weights, biases=biases(r))
    arguments = call(r, layer, tokens=140)
    whole = r.contract.emulate(arguments)
    some = torch.tensor([0, 3, 77, 139])
    assert torch.equal(r.contract.see(arguments, tokens=some).emulate(), whole[some])


def test_activation_scales_follow_contract_and_call() -> None:
    """CUTLASS reads 128x4 unless swizzled_input_sf is False; TRT-LLM and CuTe-DSL read linear bytes."""
    layouts = {c.path: c.x_layout({}) for c in CONTRACTS.values()}
    assert {p for p, x in layouts.items() if x is SWIZZLE_128x4} == {"mxfp4/FLASHINFER_CUTLASS_MXFP4_MXFP8", "nvfp4/FLASHINFER_CUTLASS"}
    assert {p for p, x in layouts.items() if x is LINEAR} == {"mxfp4/FLASHINFER_TRTLLM_MXFP4_MXFP8", "nvfp4/FLASHINFER_TRTLLM", "nvfp4/FLASHINFER_CUTEDSL"}
    assert {p for p, x in layouts.items() if x is None} == {"mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16", "mxfp4/FLASHINFER_TRTLLM_MXFP4_BF16"}
    c = contract("nvfp4/FLASHINFER_CUTLASS")
    assert c.x_layout({"swizzled_input_sf": False}) is LINEAR


@pytest.mark.parametrize("path", ["mxfp4/FLASHINFER_CUTLASS_MXFP4_MXFP8", "nvfp4/FLASHINFER_CUTLASS"])
@pytest.mark.parametrize("tokens", [5, 128])
def test_linear_scales_are_seen_by_their_size_unless_tokens_fill_the_tiles(path: str, tokens: int) -> None:
    """5 tokens: 5 rows of bytes instead of 128, refused with the reason; 128 tokens: as many bytes, another output."""
    r = next(r for r in RECIPES if r.path == path)
    layer = made_layer(2, 512, 256, fmt=r.contract.weights, biases=biases(r))
    right = call(r, layer, tokens=tokens)
    plan = replace(r.plan(layer), x_layout=LINEAR)
    g = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, 512, generator=g)
    wrong = plan.call(plan.convert(layer), layer.activation, plan.quantise(x, plan.convert(layer)), *_routing(right), Parallel())
    if tokens == 5:
        with pytest.raises(MxdebugError, match="128 x .*linear scales, which this kernel reads as swizzled"):
            r.contract.emulate(wrong)
    else:
        assert compare(r.contract.emulate(wrong).double(), r.contract.emulate(right).double()).relative_l2 > 0.1


def _routing(arguments: dict) -> tuple[Tensor, Tensor]:
    return arguments["token_selected_experts"], arguments["token_final_scales"]


def test_vllm_refuses_what_nvfp4_cutlass_cannot_pad() -> None:
    r = recipe("vllm", "nvfp4/FLASHINFER_CUTLASS", "ModelOpt NVFP4")
    with pytest.raises(MxdebugError, match="intermediate size: expected a multiple of 64, got 96"):
        r.plan(made_layer(2, 320, 96, fmt=r.contract.weights, biases=False))


def test_printed_contracts_say_what_they_were_verified_against() -> None:
    for c in CONTRACTS.values():
        text = str(c)
        assert "verified" in text and (("H200" in text) == (c.sm == (90,)))
        assert (c.sm == (90,)) or "was not run" in text or "were not run" in text


@pytest.mark.parametrize("r", ALL)
@pytest.mark.parametrize("p", [Parallel(), Parallel(1, 0, 2, 1)], ids=["whole", "ep 1 of 2"])
def test_experts_decoded_one_by_one_give_the_same(r: Recipe, p: Parallel) -> None:
    arguments = call(r, made_layer(4, *fits(r)[::-1], biases=biases(r), fmt=r.contract.weights), p)
    for tokens in (None, torch.tensor([0, 3])):
        traces = [r.contract.see(arguments, tokens=tokens, whole=whole).trace(keep=True) for whole in (True, False)]
        for name in ("output", "token", "slot", "expert", "gate", "up"):
            assert torch.equal(*(getattr(t, name) for t in traces)), name


@pytest.mark.parametrize("path", ["mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16", "nvfp4/FLASHINFER_CUTLASS"])
@pytest.mark.parametrize("sizes", [(3, 0, 64), (0, 128, 64)], ids=["no rows", "no experts"])
def test_a_layer_of_nothing_breaks_the_contract(path: str, sizes: tuple[int, int, int]) -> None:
    r = next(p.values[0] for p in ALL if p.values[0].path == path)
    arguments = call(r, made_layer(3, *fits(r)[::-1], biases=biases(r), fmt=r.contract.weights))
    e, i, h = sizes
    for key, shape in (("w13", (e, 2 * i, h // 2)), ("w2", (e, h, i // 2))):
        o = r.contract.operand(key)
        dtype = o.get(arguments).dtype
        o.put(arguments, torch.zeros(*shape[:-1], shape[-1] // dtype.itemsize, dtype=dtype))
    with pytest.raises(MxdebugError):
        r.contract.see(arguments)


def test_scales_without_the_view_break_the_contract() -> None:
    r = next(p.values[0] for p in ALL if p.values[0].path == "nvfp4/FLASHINFER_CUTEDSL")
    arguments = call(r, made_layer(2, *fits(r)[::-1], biases=biases(r), fmt=r.contract.weights))
    o = r.contract.operand("w13_scale")
    o.put(arguments, o.get(arguments).flatten())
    with pytest.raises(MxdebugError, match="6-D view"):
        r.contract.see(arguments)
