"""Does the Marlin recipe do what vLLM's fallback does?

Oracles that we did not write: the bytes that vLLM 0.33's own converters give for made tensors and the calls of its `apply_moe_activation`
(tests/data/make_marlin_golden.py), and the thread formulas of csrc gptq_marlin_repack.cu, in plain Python.
Laws: layouts invert; undo(convert(x)) == canonical(x); convert(undo(y)) == y.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import Tensor

from mxdebug.errors import MxdebugError
from mxdebug.formats import E2M1, E4M3, FORMATS, MXFP4, NVFP4, BlockFormat, BlockTensor, pack_fp4
from mxdebug.layouts import GATE_UP, INTERLEAVED
from mxdebug.layouts.marlin import MARLIN_A8, MARLIN_A16, MarlinLayout, bias_rows, pack_bias, unpack_bias
from mxdebug.recipes.marlin import MARLIN_ACTIVATIONS, MARLIN_RECIPES, MarlinPlan, MarlinRecipe, marlin_operands, marlin_recipe
from mxdebug.reference import Activation, MoELayer

DATA = Path(__file__).parent / "data"
BF16, FP16, FP8 = torch.bfloat16, torch.float16, torch.float8_e4m3fn
COMPRESSED_MX, COMPRESSED_NV = "compressed-tensors mxfp4-pack-quantized", "compressed-tensors nvfp4-pack-quantized"


def random_bytes(*shape: int, seed: int = 0, below: int = 256) -> Tensor:
    return torch.randint(0, below, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def assert_same_layer(got: MoELayer, want: MoELayer) -> None:
    """Every byte of weights and scales, every bit of global scales and biases."""
    for name in ("gate", "up", "down"):
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), name
        if a is not None:
            assert torch.equal(a.payload, b.payload) and torch.equal(a.scales, b.scales), name
            assert (a.global_scale is None) == (b.global_scale is None)
            assert a.global_scale is None or torch.equal(a.global_scale, b.global_scale), name
    for name in ("gate_bias", "up_bias", "down_bias"):
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None) and (a is None or (a.dtype == b.dtype and torch.equal(a, b))), name


# -- layouts ------------------------------------------------------------------------------------------------------


def codes_of_word(word: int) -> list[int]:
    return [word >> 4 * i & 15 for i in range(8)]


def words_by_the_kernels_threads(codes: list[list[int]], a8: bool) -> list[int]:
    """gptq_marlin_repack_kernel for 4 bits, codes[n][k]: tiles of 16 k x 64 n (A8: 32 x 32), 4 warps of 32 threads, one word each."""
    rows, columns = len(codes), len(codes[0])
    tile_k, tile_n = (32, 32) if a8 else (16, 64)
    out = [0] * (rows * columns // 8)
    for tile in range(rows * columns // 1024):
        k0, n0 = tile // (rows // tile_n) * tile_k, tile % (rows // tile_n) * tile_n
        for warp in range(4):
            for thread in range(32):
                if a8:
                    n = n0 + warp // 2 * 16 + thread // 4 + warp % 2 * 8
                    k = k0 + thread % 4 * 4
                    values = [codes[n][k + i] for i in range(4)] + [codes[n][k + 16 + i] for i in range(4)]
                    order = (0, 4, 1, 5, 2, 6, 3, 7)
                else:
                    n, k = n0 + warp * 16 + thread // 4, k0 + thread % 4 * 2
                    values = [codes[n][k + o] for o in (0, 1, 8, 9)] + [codes[n + 8][k + o] for o in (0, 1, 8, 9)]
                    order = (0, 2, 4, 6, 1, 3, 5, 7)
                out[tile * 128 + thread * 4 + warp] = sum(values[order[i]] << 4 * i for i in range(8))
    return out


@pytest.mark.parametrize("layout", [MARLIN_A16, MARLIN_A8], ids=lambda x: x.name)
def test_weights_lie_as_the_kernels_threads_write_them(layout: MarlinLayout) -> None:
    codes = random_bytes(192, 96, below=16)
    words = layout.pack(pack_fp4(codes))
    assert words.dtype == torch.int32 and words.shape == (96 // 16, 2 * 192)
    assert (words.flatten().long() % 2**32).tolist() == words_by_the_kernels_threads(codes.tolist(), layout is MARLIN_A8)


def test_first_word_written_out() -> None:
    """Row 0 has the codes k % 8, row 8 the codes 8 + k % 8, all others 15."""
    codes = torch.full((64, 32), 15, dtype=torch.uint8)
    codes[0], codes[8] = torch.arange(32) % 8, 8 + torch.arange(32) % 8
    # A16: rows 0 and 8, k 0, 8, then 1, 9. k 8 and 9 have the codes 0 and 1 again.
    assert codes_of_word(int(MARLIN_A16.pack(pack_fp4(codes))[0, 0])) == [0, 0, 8, 8, 1, 1, 9, 9]
    # A8: row 0 only, k 0, 16, 1, 17, 2, 18, 3, 19.
    assert codes_of_word(int(MARLIN_A8.pack(pack_fp4(codes))[0, 0])) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_scale_and_bias_orders_written_out() -> None:
    """get_scale_perms: place 8i + j takes row i + 8j; then j = 1, 2 and 5, 6 change places. Single: place 8i + 2a + l row 8a + 2i + l."""
    rows = torch.arange(64, dtype=torch.uint8)[:, None]
    a16 = MARLIN_A16.pack_scales(rows)[0].tolist()
    assert a16[:16] == [0, 16, 8, 24, 32, 48, 40, 56, 1, 17, 9, 25, 33, 49, 41, 57]
    assert a16 == [i + 8 * j for i in range(8) for j in (0, 2, 1, 3, 4, 6, 5, 7)]
    single = [0, 1, 8, 9, 16, 17, 24, 25, 2, 3, 10, 11, 18, 19, 26, 27, 4, 5, 12, 13, 20, 21, 28, 29, 6, 7, 14, 15, 22, 23, 30, 31]
    assert MARLIN_A8.pack_scales(rows)[0].tolist() == single + [32 + r for r in single]
    assert bias_rows(32).tolist() == single


def test_scales_are_transposed() -> None:
    """Scale (row 9, group 1) of 64 x 3: row 9 is i = 1, j = 1, so place 8 + 2 (j = 1 stands third) of the second line."""
    scales = torch.zeros(64, 3, dtype=torch.uint8)
    scales[9, 1] = 1
    assert MARLIN_A16.pack_scales(scales).nonzero().tolist() == [[1, 10]]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([MARLIN_A16, MARLIN_A8]), st.integers(1, 3), st.integers(1, 4), st.integers(1, 5), st.integers(0, 3),
       st.integers(0, 99))
def test_layouts_invert(layout: MarlinLayout, n: int, k: int, groups: int, experts: int, seed: int) -> None:
    lead = (experts,) if experts else ()
    payload, scales = random_bytes(*lead, 64 * n, 16 * k, seed=seed), random_bytes(*lead, 64 * n, groups, seed=seed)
    words = layout.pack(payload)
    assert words.shape == (*lead, 2 * k, 128 * n) and torch.equal(layout.unpack(words), payload)
    packed = layout.pack_scales(scales)
    assert packed.shape == (*lead, groups, 64 * n) and torch.equal(layout.unpack_scales(packed), scales)
    bias = torch.randn(*lead, 32 * n)
    assert torch.equal(unpack_bias(pack_bias(bias)), bias)
    if experts > 1:  # each expert is laid out on its own
        assert torch.equal(words[1], layout.pack(payload[1])) and torch.equal(packed[1], layout.pack_scales(scales[1]))


def test_layouts_refuse_what_does_not_fill_tiles() -> None:
    with pytest.raises(MxdebugError, match=r"Marlin weights A16: expected rows % 64 == 0 and columns % 8 == 0, got 32 x 16"):
        MARLIN_A16.pack(random_bytes(32, 16))
    with pytest.raises(MxdebugError, match=r"Marlin weights A8: expected rows % 32 == 0 and columns % 16 == 0, got 64 x 8"):
        MARLIN_A8.pack(random_bytes(64, 8))
    with pytest.raises(MxdebugError, match=r"Marlin scales A16: expected rows % 64 == 0"):
        MARLIN_A16.pack_scales(random_bytes(32, 4))
    with pytest.raises(MxdebugError, match="bias rows for Marlin: expected a multiple of 32, got 48"):
        bias_rows(48)
    with pytest.raises(MxdebugError, match="Marlin weights: expected int32 .*got torch.uint8"):
        MARLIN_A16.unpack(random_bytes(4, 128))


# -- the recipe against vLLM ----------------------------------------------------------------------------------------


@functools.cache
def golden() -> ModuleType:
    """make_marlin_golden.py: its made inputs. It runs no vLLM here."""
    spec = importlib.util.spec_from_file_location("make_marlin_golden", DATA / "make_marlin_golden.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CASES = ("mxfp4-gpt-oss", "mxfp4-plain", "mxfp4-fp8-activations", "mxfp4-compressed", "mxfp4-compressed-fp8-activations", "nvfp4-modelopt",
         "nvfp4-modelopt-small-scales", "nvfp4-modelopt-no-gate", "nvfp4-compressed-fp16")


@functools.cache
def golden_case(name: str) -> tuple[MoELayer, MarlinPlan]:
    """A case's made tensors as a layer in logical order, and the plan for it."""
    c, t = golden().CASES[name], golden().made(name)
    fmt = FORMATS[c.format]
    weights = {k: BlockTensor(t[k], t[f"{k}_scale"], fmt, 1.0 / t[f"{k}_divisor"] if fmt is NVFP4 else None)
               for k in ("gate", "up", "down") if k in t}
    layer = MoELayer(weights.get("gate"), weights["up"], weights["down"], Activation("silu" if c.gated else "relu2"),
                     *(t.get(f"{k}_bias") for k in ("gate", "up", "down")))
    return layer, marlin_recipe(fmt, c.checkpoint).plan(layer, dtype=c.dtype, input_dtype=c.input_dtype)


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("name", CASES)
def test_recipe_gives_the_bytes_of_vllms_own_converter(name: str) -> None:
    """Every operand: dtype, shape, every byte; and no operand that vLLM does not have."""
    assert tuple(golden().CASES) == CASES
    layer, plan = golden_case(name)
    ours = plan.convert(layer)
    with safe_open(DATA / f"marlin-{name}.safetensors", "pt") as f:
        keys = set(f.keys())
        assert f.metadata()["vllm"] == "0.33" and keys == {k for k, t in ours.items() if t is not None}
        for key in keys:
            assert same_bytes(ours[key], f.get_tensor(key)), key
    c = golden().CASES[name]
    short = marlin_operands(layer, format=FORMATS[c.format], checkpoint=c.checkpoint, dtype=c.dtype, input_dtype=c.input_dtype)
    assert all((a is None) == (short[k] is None) and (a is None or same_bytes(a, short[k])) for k, a in ours.items())


@pytest.mark.parametrize("name", CASES)
def test_golden_data_can_show_a_fault(name: str) -> None:
    """Another layout, another row order, experts or scales of another place: each gives other bytes than vLLM's."""
    layer, plan = golden_case(name)
    right = plan.convert(layer)
    other = MARLIN_A16 if plan.layout is MARLIN_A8 else MARLIN_A8
    wrong = [(replace(plan, layout=other), layer), (plan, replace(layer, down=layer.down[[1, 0] + list(range(2, layer.experts))]))]
    if layer.gate is not None:
        rows = GATE_UP if plan.recipe.rows is INTERLEAVED else INTERLEAVED
        wrong.append((replace(plan, recipe=replace(plan.recipe, rows=rows)), layer))
    for changed, which in wrong:
        got = changed.convert(which)
        for key in ("w13", "w13_scale") if which is layer else ("w2", "w2_scale"):
            assert not same_bytes(got[key], right[key]), key
    if layer.up_bias is not None:
        assert not torch.equal(layer.up_bias, layer.up_bias.bfloat16().float())


@pytest.mark.parametrize("name", CASES)
def test_undo_gives_the_canonical_layer(name: str) -> None:
    layer, plan = golden_case(name)
    operands, canonical = plan.convert(layer), plan.canonical(layer)
    assert_same_layer(plan.undo(operands, layer), canonical)
    assert_same_layer(plan.canonical(canonical), canonical)  # nothing more is lost the second time
    again = plan.convert(plan.undo(operands, layer))
    assert all((t is None) == (again[k] is None) and (t is None or same_bytes(t, again[k])) for k, t in operands.items())


@functools.cache
def random_layer(fmt: BlockFormat, experts: int, hidden: int, intermediate: int, seed: int, gated: bool, biases: bool,
                 top: int) -> MoELayer:
    def weight(rows: int, columns: int, n: int) -> BlockTensor:
        s = seed + 10 * n
        scales = random_bytes(experts, rows, columns // fmt.block, seed=s + 1, below=top)
        g = torch.rand(experts, generator=torch.Generator().manual_seed(s + 2)) / 100 + 1e-4 if fmt.outer else None
        return BlockTensor(random_bytes(experts, rows, columns // 2, seed=s), scales, fmt, g)

    def bias(rows: int, n: int) -> Tensor | None:
        return torch.randn(experts, rows, generator=torch.Generator().manual_seed(seed + n)) if biases else None

    gate = weight(intermediate, hidden, 0) if gated else None
    return MoELayer(gate, weight(intermediate, hidden, 1), weight(hidden, intermediate, 2), Activation("silu" if gated else "relu2"),
                    bias(intermediate, 3), bias(intermediate, 4), bias(hidden, 5))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MARLIN_RECIPES), st.integers(1, 3), st.integers(1, 6), st.integers(1, 6), st.integers(0, 50), st.booleans(),
       st.sampled_from([BF16, FP16]), st.booleans(), st.integers(2, 0x7F))
def test_laws_for_every_recipe_and_shape(r: MarlinRecipe, experts: int, hidden: int, intermediate: int, seed: int, gated: bool,
                                         dtype: torch.dtype, fp8: bool, top: int) -> None:
    if r.format is NVFP4:
        h, i, fp8 = 64 * hidden, 16 * intermediate, False
    else:
        h, i, gated, dtype = 32 * hidden, 32 * intermediate, True, BF16
        if r.align is None:
            h, i = 128 * hidden, 64 * intermediate
    layer = random_layer(r.format, experts, h, i, seed, gated, r.biases and gated, top)
    plan = r.plan(layer, dtype=dtype, input_dtype=FP8 if fp8 else None)
    operands, canonical = plan.convert(layer), plan.canonical(layer)
    assert_same_layer(plan.undo(operands, layer), canonical)
    assert_same_layer(plan.canonical(canonical), canonical)
    losses = plan.losses(layer)
    if r.format is NVFP4:
        for name, key in (("gate", "w13"), ("up", "w13"), ("down", "w2")):
            before, after = getattr(layer, name), getattr(canonical, name)
            if before is not None:  # in float64 all factors are exact
                a, b = (E4M3.decode(w.scales).double() for w in (before, after))
                kept = b != 0
                assert torch.equal(a[kept] * losses.scale_factor[key], b[kept])
        counts = {key: sum(int(((w.scales > 0) & (c.scales == 0)).sum()) for w, c in pairs) for key, pairs in (
            ("w13", [(layer.gate, canonical.gate), (layer.up, canonical.up)] if gated else [(layer.up, canonical.up)]),
            ("w2", [(layer.down, canonical.down)]))}
        assert losses.flushed == counts


# -- shapes, padding, numbers -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("checkpoint", "sizes", "padded"), [
    ("gpt-oss", (2880, 2880), (2944, 3072)), ("mxfp4", (128, 256), (128, 256)), (COMPRESSED_MX, (64, 128), (64, 128)),
    (COMPRESSED_MX, (128, 64 * 6), (128, 384))])
def test_mxfp4_padding(checkpoint: str, sizes: tuple[int, int], padded: tuple[int, int]) -> None:
    """Intermediate to 128, hidden to 256, at allocation: 2880 = 22.5 * 128 = 11.25 * 256. compressed-tensors: none."""
    layer = random_layer(MXFP4, 1, sizes[1], sizes[0], 0, True, False, 200)
    plan = marlin_recipe(MXFP4, checkpoint).plan(layer, dtype=BF16)
    assert plan.padded == padded
    o, (i, h) = plan.convert(layer), padded
    assert {k: tuple(t.shape) for k, t in o.items() if t is not None} == {
        "w13": (1, h // 16, 4 * i), "w13_scale": (1, h // 32, 2 * i), "w2": (1, i // 16, 2 * h), "w2_scale": (1, i // 32, h)}


@pytest.mark.parametrize(("hidden", "intermediate", "padded"), [
    (128, 16, 64), (384, 80, 128), (192, 80, 128), (64, 144, 256), (128, 64, 64)])
def test_nvfp4_pads_only_the_intermediate_size(hidden: int, intermediate: int, padded: int) -> None:
    """To 64, or to 128 where hidden is not a multiple of 128: then w13 needs rows % 128 and w2 columns % 128."""
    layer = random_layer(NVFP4, 1, hidden, intermediate, 0, False, False, 0x7F)
    assert marlin_recipe(NVFP4, "ModelOpt NVFP4").plan(layer, dtype=BF16).padded == (padded, hidden)


def nvfp4(scales: list[int], globals_: list[float]) -> MoELayer:
    """One expert per global scale, H = I = 64. Gate has these scale bytes first in row 0, up and down have 0x38 (1.0) everywhere."""
    e = len(globals_)
    ones = torch.full((e, 64, 4), 0x38, dtype=torch.uint8)
    first = torch.zeros(e, 64, 4, dtype=torch.uint8)
    first[:, 0, : len(scales)] = torch.tensor(scales, dtype=torch.uint8)
    payload = random_bytes(e, 64, 32)
    g = torch.tensor(globals_)
    return MoELayer(BlockTensor(payload, first, NVFP4, g), BlockTensor(payload, ones, NVFP4, 4 * g), BlockTensor(payload, ones, NVFP4, g),
                    Activation("silu"))


def test_small_scales_are_flushed_and_counted() -> None:
    """Largest scale 448 (0x7E): factor 1. What is below 2^-6 (0x08), E4M3's subnormals, becomes 0: here 0x07 and 0x01, in both experts."""
    layer = nvfp4([0x7E, 0x07, 0x01, 0x08], [0.5, 0.25])
    plan = marlin_recipe(NVFP4, "ModelOpt NVFP4").plan(layer, dtype=BF16)
    losses = plan.losses(layer)
    assert losses.scale_factor == {"w13": 1.0, "w2": 256.0} and losses.flushed == {"w13": 4, "w2": 0}
    assert plan.canonical(layer).gate.scales[:, 0].tolist() == [[0x7E, 0, 0, 0x08]] * 2
    # w2: 448 / 1.0 -> 2^8, 256 is 0x78; 0.5 * 2^119 / 2^8 = 2^110
    assert plan.canonical(layer).down.scales.unique().tolist() == [0x78]
    operands = plan.convert(layer)
    assert operands["w2_alpha"].tolist() == [2.0**110, 2.0**109] and operands["w13_alpha"].tolist() == [2.0**118, 2.0**117]


@pytest.mark.parametrize(("top", "factor"), [(0x7E, 1.0), (0x7D, 1.0), (0x76, 2.0), (0x3E, 256.0), (0x3F, 128.0), (0x38, 256.0)])
def test_scale_factor(top: int, factor: float) -> None:
    """The largest power of two that keeps top <= 448. 0x7D is 416; 0x76 is 224 = 448/2; 0x3E is 1.75 = 448/256; 0x3F is 1.875."""
    layer = nvfp4([top], [1.0])
    plan = marlin_recipe(NVFP4, "ModelOpt NVFP4").plan(layer, dtype=BF16)
    assert plan.losses(layer).scale_factor["w13"] == factor
    half = marlin_recipe(NVFP4, "ModelOpt NVFP4").plan(layer, dtype=FP16)
    assert half.losses(layer).scale_factor == {"w13": 1.0, "w2": 1.0}  # float16: never


def test_float16_flushes_where_bfloat16_does_not() -> None:
    """Scales 0x07 (7 * 2^-9) beside 1.0: times 256 it is 3.5, kept; in float16 there is no factor. Alpha is g * 2^7 there."""
    layer = nvfp4([0x07], [1.0])
    r = marlin_recipe(NVFP4, COMPRESSED_NV)
    assert r.plan(layer, dtype=BF16).losses(layer).flushed["w13"] == 0
    half = r.plan(layer, dtype=FP16)
    assert half.losses(layer).flushed["w13"] == 1 and half.convert(layer)["w13_alpha"].tolist() == [128.0]


def test_negative_scales_become_zero() -> None:
    layer = nvfp4([0xB8, 0xC0, 0x38], [1.0])  # -1, -2, 1
    plan = marlin_recipe(NVFP4, "ModelOpt NVFP4").plan(layer, dtype=BF16)
    assert plan.losses(layer).negative == {"w13": 2, "w2": 0} and plan.losses(layer).flushed == {"w13": 0, "w2": 0}
    assert plan.canonical(layer).gate.scales[0, 0].tolist() == [0, 0, 0x78, 0]


def test_w13_takes_gates_global_scale() -> None:
    """Up's is 4 times gate's: up comes out at a quarter, whatever is larger."""
    layer = nvfp4([0x38], [0.5, 2.0])
    plan = marlin_recipe(NVFP4, "ModelOpt NVFP4").plan(layer, dtype=BF16)
    assert plan.losses(layer).up_factor.tolist() == [0.25, 0.25]
    canonical = plan.canonical(layer)
    assert torch.equal(canonical.up.dequantise() * 4, layer.up.dequantise())
    assert torch.equal(canonical.gate.dequantise(), layer.gate.dequantise())


def test_global_scale_beyond_float32_is_inf_as_in_vllm() -> None:
    """A divisor taken for a multiplier, 2^10: 2^10 * 2^119 is 2^129."""
    layer = nvfp4([0x38], [1024.0])
    plan = marlin_recipe(NVFP4, "ModelOpt NVFP4").plan(layer, dtype=BF16)
    assert plan.convert(layer)["w13_alpha"].tolist() == [torch.inf] and plan.canonical(layer).up.global_scale.tolist() == [torch.inf]


@pytest.mark.parametrize("name", ["mxfp4-plain", "mxfp4-fp8-activations", "nvfp4-modelopt-small-scales"])
def test_operands_mean_the_layers_numbers(name: str) -> None:
    """Read single weights by the kernel's formulas, without our layouts: code * scale * alpha / 2^126, bfloat16's share of the alpha."""
    layer, plan = golden_case(name)
    o = plan.convert(layer)
    i, a8 = plan.padded[0], plan.reads is MARLIN_A8
    gate = layer.gate.dequantise(torch.float64)
    for n, k in ((0, 0), (1, 17), (13, 63), (40, 100), (63, 127)):
        if a8:
            thread, warp, q = n % 8 * 4 + k % 16 // 4, n % 32 // 8, 2 * (k % 4) + k % 32 // 16
            word = (k // 32 * (2 * i // 32) + n // 32) * 128 + thread * 4 + warp
            column = n // 32 * 32 + n % 8 // 2 * 8 + n % 32 // 8 * 2 + n % 2
        else:
            thread, warp, q = n % 8 * 4 + k % 8 // 2, n % 64 // 16, 4 * (k % 2) + 2 * (n % 16 // 8) + k % 16 // 8
            word = (k // 16 * (2 * i // 64) + n // 64) * 128 + thread * 4 + warp
            column = n // 64 * 64 + n % 8 * 8 + (0, 2, 1, 3, 4, 6, 5, 7)[n % 64 // 8]
        for e in range(layer.experts):
            code = codes_of_word(int(o["w13"][e].flatten()[word]))[q]
            byte = int(o["w13_scale"].view(torch.uint8)[e, k // plan.recipe.format.block, column])
            if plan.recipe.format is NVFP4:
                half = torch.tensor([byte << 7], dtype=torch.int16).view(FP16).double().item()
                scale = half * o["w13_alpha"][e].double().item() / 2.0**126
            else:
                scale = 2.0 ** (byte - (6 if a8 else 0) - 127)
            assert E2M1.table()[code].item() * scale == pytest.approx(gate[e, n, k].item(), rel=1e-6, abs=0)


# -- refusals ---------------------------------------------------------------------------------------------------------


def plan_of(fmt: BlockFormat, checkpoint: str, hidden: int, intermediate: int, *, gated: bool = True, biases: bool = False, top: int = 0x7F,
            dtype: torch.dtype = BF16, input_dtype: torch.dtype | None = None) -> MarlinPlan:
    layer = random_layer(fmt, 1, hidden, intermediate, 0, gated, biases, top)
    return marlin_recipe(fmt, checkpoint).plan(layer, dtype=dtype, input_dtype=input_dtype)


def test_refusals() -> None:
    with pytest.raises(MxdebugError, match="hidden size: expected a multiple of 64, got 96"):
        plan_of(NVFP4, "ModelOpt NVFP4", 96, 64)
    with pytest.raises(MxdebugError, match="w13 size: expected multiples of 64 x 128 or of 128 x 64, got 192 x 160"):
        plan_of(MXFP4, COMPRESSED_MX, 160, 96)
    with pytest.raises(MxdebugError, match="w2 size: expected .*, got 128 x 32"):
        plan_of(MXFP4, COMPRESSED_MX, 128, 32)
    with pytest.raises(MxdebugError, match="dtype: expected torch.bfloat16, got torch.float16.*no other kernel for MXFP4"):
        plan_of(MXFP4, "gpt-oss", 128, 64, dtype=FP16)
    with pytest.raises(MxdebugError, match="input_dtype: expected None, got torch.float8_e4m3fn"):
        plan_of(NVFP4, "ModelOpt NVFP4", 128, 64, input_dtype=FP8)
    with pytest.raises(MxdebugError, match="input_dtype: expected None or torch.float8_e4m3fn, got torch.int8"):
        plan_of(MXFP4, "mxfp4", 128, 64, input_dtype=torch.int8)
    with pytest.raises(MxdebugError, match="layer: expected gate and up weights, got a layer without gate"):
        plan_of(MXFP4, "mxfp4", 128, 64, gated=False)
    with pytest.raises(MxdebugError, match="block scales: expected E8M0 bytes up to 249, got 25[0-5]"):
        plan_of(MXFP4, "mxfp4", 128, 64, input_dtype=FP8, top=256)
    with pytest.raises(MxdebugError, match="biases: expected none, got 3 of 3.*no bias for ModelOpt NVFP4"):
        plan_of(NVFP4, "ModelOpt NVFP4", 128, 64, biases=True)
    layer = random_layer(MXFP4, 1, 128, 64, 0, True, True, 0x7F)
    with pytest.raises(MxdebugError, match="biases: expected all three or none, got 2 of 3"):
        marlin_recipe(MXFP4, "mxfp4").plan(replace(layer, gate_bias=None), dtype=BF16)
    with pytest.raises(MxdebugError, match="w13 weights: expected NVFP4, got MXFP4"):
        marlin_recipe(NVFP4, "ModelOpt NVFP4").plan(layer, dtype=BF16)
    with pytest.raises(MxdebugError, match="Marlin recipe: expected one of: MXFP4 of gpt-oss; .*, got NVFP4 of gpt-oss"):
        marlin_recipe(NVFP4, "gpt-oss")


# -- FP8 activations, SwiGLU ------------------------------------------------------------------------------------------


def test_fp8_activations_change_the_layout_where_the_converter_knows_of_them() -> None:
    """The method for compressed-tensors calls its converter without input_dtype; the experts read it from the environment all the same."""
    for checkpoint, aware in (("gpt-oss", True), ("mxfp4", True), (COMPRESSED_MX, False)):
        plan = plan_of(MXFP4, checkpoint, 128, 64, input_dtype=FP8)
        assert plan.reads is MARLIN_A8 and plan.layout is (MARLIN_A8 if aware else MARLIN_A16)
        plain = plan_of(MXFP4, checkpoint, 128, 64)
        assert plain.reads is plain.layout is MARLIN_A16


def test_activations_are_called_as_vllm_calls_them() -> None:
    """apply_moe_activation with the model's alpha, beta, limit: which function of torch.ops._C, with which limit, alpha, beta."""
    with safe_open(DATA / "marlin-activations.safetensors", "pt") as f:
        calls = json.loads(f.metadata()["calls"])
    assert {c["activation"] for c in calls} == set(MARLIN_ACTIVATIONS) and len(calls) == 12
    for c in calls:
        a = MARLIN_ACTIVATIONS[c["activation"]]
        neutral = {"alpha": 1.0, "beta": 0.0, "limit": None}
        values = {n: a.fixed[n] if n in a.fixed else neutral[n] if c[n] is None else c[n] for n in neutral}
        op, numbers = c["called"]
        if any(c[n] is None for n in a.needs):
            assert op == "AssertionError"
        elif op == "silu_and_mul":  # SILU without a limit
            assert a.op == "silu_and_mul_with_clamp" and values == neutral
        elif op == "swigluoai_and_mul":
            assert a.op == op and not a.takes and numbers == []
        else:
            assert a.op == op and numbers == [values[n] for n in ("limit", "alpha", "beta")]
        assert set(a.takes) | set(a.fixed) == {"alpha", "beta", "limit"} and not set(a.takes) & set(a.fixed)


def test_gpt_oss_rows_stay_as_swigluoai_reads_them() -> None:
    """Interleaved rows go with SWIGLUOAI; all other checkpoints keep [w1; w3], which SILU and SWIGLUOAI_UNINTERLEAVE read."""
    assert MARLIN_ACTIVATIONS["SWIGLUOAI"].rows is INTERLEAVED
    assert {n for n, a in MARLIN_ACTIVATIONS.items() if a.rows is GATE_UP} == {"SILU", "SWIGLUOAI_UNINTERLEAVE"}
    assert {r.checkpoint for r in MARLIN_RECIPES if r.rows is INTERLEAVED} == {"gpt-oss"}
    assert [r.checkpoint for r in MARLIN_RECIPES if r.path == "nvfp4/MARLIN" and r.format is NVFP4] == ["ModelOpt NVFP4", COMPRESSED_NV]
