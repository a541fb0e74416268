"""Are the golden files of tests/data what the made inputs say?

vLLM's results (tests/data/make_vllm_golden.py) are checked by what needs no vLLM: sizes and dtypes written out, every byte where the path's
row order and padding put it, the alphas by their formula. Tests of recipes compare with these files; this one keeps them honest.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from making import golden
from safetensors import safe_open
from torch import Tensor

from mxdebug.layouts import GATE_UP, GROUPS_64, INTERLEAVED_UP, SHUFFLE_32, SWIZZLE_128x4, UP_GATE, RowOrder

DATA = Path(__file__).parent / "data"
# Hidden and intermediate size in the operands. MXFP4 CUTLASS pads to multiples of 128 and 128, MXFP4 TRTLLM to 256 and 128, NVFP4 TRTLLM
# and CUTEDSL to 256 and 64 (gated) or 128 (non-gated), NVFP4 CUTLASS the intermediate size of a non-gated layer to 128, else nothing.
PADDED = {
    "mxfp4-cutlass-mxfp8-gpt-oss-aligned": (128, 128), "mxfp4-cutlass-mxfp8-gpt-oss-unaligned": (384, 128),
    "mxfp4-cutlass-mxfp8-compressed-aligned": (128, 128), "mxfp4-cutlass-mxfp8-compressed-unaligned": (256, 128),
    "mxfp4-cutlass-mxfp8-compressed-non-gated": (384, 128),
    "mxfp4-trtllm-gpt-oss-aligned": (256, 128), "mxfp4-trtllm-gpt-oss-unaligned": (256, 128),
    "mxfp4-trtllm-compressed-aligned": (256, 128), "mxfp4-trtllm-compressed-unaligned": (768, 128),
    "nvfp4-cutlass-modelopt-aligned": (320, 64), "nvfp4-cutlass-modelopt-hidden-unaligned": (336, 64),
    "nvfp4-cutlass-modelopt-interleaved": (128, 64), "nvfp4-cutlass-modelopt-non-gated": (320, 128),
    "nvfp4-cutlass-compressed-differ": (320, 64),
    "nvfp4-trtllm-modelopt-aligned": (512, 64), "nvfp4-trtllm-modelopt-unaligned": (512, 128),
    "nvfp4-trtllm-modelopt-non-gated": (512, 128), "nvfp4-trtllm-compressed-differ": (256, 64),
    "nvfp4-cutedsl-modelopt-aligned": (256, 128), "nvfp4-cutedsl-modelopt-unaligned": (512, 128),
    "nvfp4-cutedsl-modelopt-interleaved": (256, 64), "nvfp4-cutedsl-modelopt-non-gated": (512, 128),
    "nvfp4-cutedsl-compressed-differ": (256, 64),
}
NAMES = tuple(PADDED)


@functools.cache
def kept(name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A golden file's tensors and metadata."""
    with safe_open(DATA / f"vllm-{name}.safetensors", "pt") as f:
        return {k: f.get_tensor(k) for k in f.keys()}, f.metadata()


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


# -- files ----------------------------------------------------------------------------------------------------------


def test_every_case_has_its_file_and_they_are_small() -> None:
    assert tuple(golden().PATH_CASES) == NAMES
    files = [DATA / f"vllm-{name}.safetensors" for name in NAMES]
    assert {f.name for f in DATA.glob("vllm-??fp4-*.safetensors")} == {f.name for f in files}
    assert sum(f.stat().st_size for f in files) < 3e6


def test_cases_can_show_a_fault() -> None:
    """Every path has two or three experts, padding in a size (where it pads), a K above 128 with scale columns other than 16."""
    cases = golden().PATH_CASES
    for path in {p for c in cases.values() for p in c.paths}:
        here = {name: c for name, c in cases.items() if path in c.paths}
        assert all(c.experts in (2, 3) for c in here.values())
        columns = {name: PADDED[name][0] // (16 if c.nvfp4 else 32) for name, c in here.items()}
        assert any(PADDED[name][0] > 128 and columns[name] != 16 for name in here)
        assert any(PADDED[name][1] != c.intermediate for name, c in here.items())
    for name in NAMES:
        t = golden().made(name)
        for key in ("gate", "up", "down") if cases[name].gated else ("up", "down"):
            codes = t[f"{key}_scale"].view(torch.uint8)
            assert (codes < (0x7F if cases[name].nvfp4 else 0xFF)).all() and codes.unique().numel() > 100  # valid, no NaN, and they differ
            assert not torch.equal(t[key][0], t[key][1])


@pytest.mark.parametrize("name", NAMES)
def test_metadata(name: str) -> None:
    case, (_, meta) = golden().PATH_CASES[name], kept(name)
    assert meta["vllm"] == "0.33" and json.loads(meta["paths"]) == list(case.paths)
    swizzled = {"mxfp4/FLASHINFER_CUTLASS_MXFP4_MXFP8": True, "mxfp4/FLASHINFER_TRTLLM_MXFP4_MXFP8": False,
                "mxfp4/FLASHINFER_TRTLLM_MXFP4_BF16": None,  # bf16 activations have no scales
                "nvfp4/FLASHINFER_CUTLASS": True, "nvfp4/FLASHINFER_TRTLLM": False, "nvfp4/FLASHINFER_CUTEDSL": False}
    assert json.loads(meta["activation_scales_swizzled"]) == {p: swizzled[p] for p in case.paths}
    differ = [w for w in json.loads(meta["warnings"]) if not w.startswith("Padding hidden size")]
    which = {golden().MODELOPT: "weight_scale_2", golden().COMPRESSED_NVFP4: "weight_global_scale"}.get(case.kind)
    assert differ == ([f"w1_{which} must match w3_{which}. Accuracy may be affected."] if case.differ else [])


def test_what_vllm_refuses() -> None:
    said = {k: (v["error"], v["message"]) for k, v in json.loads((DATA / "vllm-refusals.json").read_text()).items()}
    assert said.keys() == golden().REFUSED.keys()
    # 2 * 96 = 192 gate and up rows are no multiple of 128, and this path does not pad halves.
    error, message = said["nvfp4-cutlass-modelopt-unaligned"]
    assert error == "NotImplementedError" and message.startswith("Intermediate size padding for w1 and w3")
    assert said["mxfp4-trtllm-compressed-non-gated"] == ("NotImplementedError", "kernel does not support no act_and_mul MLP layer")
    assert said["mxfp4-cutlass-mxfp8-gpt-oss-no-bias"] == said["mxfp4-trtllm-gpt-oss-no-bias"] == ("AssertionError", "")
    for name, activation in (("mxfp4-trtllm-compressed-uninterleave", "SWIGLUOAI_UNINTERLEAVE"),
                             ("nvfp4-trtllm-modelopt-interleaved", "SWIGLUOAI"), ("nvfp4-cutedsl-modelopt-gelu-tanh", "GELU_TANH")):
        assert said[name] == ("NotImplementedError", f"kernel does not support MoEActivation.{activation} activation")


# -- operands -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_shapes_and_dtypes(name: str) -> None:
    case, (t, _) = golden().PATH_CASES[name], kept(name)
    hidden, intermediate = PADDED[name]
    e, rows, block = case.experts, intermediate * (2 if case.gated else 1), 16 if case.nvfp4 else 32
    codes = torch.float8_e4m3fn if case.nvfp4 or "trtllm" in name else torch.uint8
    want = {"w13": (torch.uint8, (e, rows, hidden // 2)), "w2": (torch.uint8, (e, hidden, intermediate // 2)),
            # swizzle_blockscale pads rows to 128 and columns to 4; elsewhere the padded weights already are such multiples.
            "w13_scale": (codes, (e, up(rows, 128), up(hidden // block, 4))),
            "w2_scale": (codes, (e, up(hidden, 128), intermediate // block))}
    if not case.nvfp4 and case.bias:
        dtype = torch.float32 if "trtllm" in name else torch.bfloat16
        want |= {"w13_bias": (dtype, (e, rows)), "w2_bias": (dtype, (e, hidden))}
    scalars = {"w13_alpha", "w2_alpha"} if case.nvfp4 or "cutlass" in name else set()
    scalars |= {"a1_gscale", "a2_gscale"} if case.nvfp4 else set()
    scalars |= {"g1_scale_c"} if name.startswith("nvfp4-trtllm") else set()
    want |= {k: (torch.float32, (e,)) for k in scalars}
    got = {k: (v.dtype, tuple(v.shape)) for k, v in t.items() if not k.startswith("swiglu")}
    assert got == want


def w13_rows(name: str, half: int) -> Tensor:
    """int64: physical row i of w13 holds row [i] of [gate; up], each half padded to `half` (of up alone in a non-gated layer)."""
    case = golden().PATH_CASES[name]
    if not case.gated:
        rows = torch.arange(half)
        if name.startswith("mxfp4"):  # vLLM 0.33 swaps halves that are not there
            rows = torch.cat([rows[half // 2:], rows[:half // 2]])
    elif name == "nvfp4-cutlass-modelopt-interleaved":  # this converter swaps halves of alternating rows too
        alternating = torch.stack([torch.arange(half), half + torch.arange(half)], 1).flatten()
        rows = torch.cat([alternating[half:], alternating[:half]])
    else:
        order: RowOrder = INTERLEAVED_UP if "trtllm" in name else GROUPS_64 if "cutedsl" in name else UP_GATE
        rows = order.indices(half)
        assert not torch.equal(rows, GATE_UP.indices(half))
    return rows[SHUFFLE_32.indices(len(rows))] if "trtllm" in name else rows


def padded(t: Tensor, rows: int, columns: int | None = None) -> Tensor:
    """Zeros behind the last row and the last column of [E, rows, ...]."""
    out = t.new_zeros(t.shape[0], rows, *(() if columns is None else (columns,)))
    out[tuple(slice(0, n) for n in t.shape)] = t
    return out


@pytest.mark.parametrize("name", NAMES)
def test_every_byte_lies_where_the_paths_order_puts_it(name: str) -> None:
    """Payload, scales and biases from the made inputs, zero-padded, in the path's row order, scales in 128x4."""
    case, t, (ours, _) = golden().PATH_CASES[name], golden().made(name), kept(name)
    hidden, intermediate = PADDED[name]
    block = 16 if case.nvfp4 else 32
    order = w13_rows(name, intermediate)
    down = SHUFFLE_32.indices(hidden) if "trtllm" in name else torch.arange(hidden)
    halves = ("gate", "up") if case.gated else ("up",)
    w13 = torch.cat([padded(t[k], intermediate, hidden // 2) for k in halves], 1)[:, order]
    assert same_bytes(ours["w13"], w13)
    assert same_bytes(ours["w2"], padded(t["down"], hidden, intermediate // 2)[:, down])
    s13 = torch.cat([padded(t[f"{k}_scale"].view(torch.uint8), intermediate, hidden // block) for k in halves], 1)[:, order]
    s2 = padded(t["down_scale"].view(torch.uint8), hidden, intermediate // block)[:, down]
    for key, scales in (("w13_scale", s13), ("w2_scale", s2)):
        assert torch.equal(ours[key].view(torch.uint8).flatten(), SWIZZLE_128x4.pack(scales).flatten()), key
        assert not torch.equal(ours[key].view(torch.uint8).flatten(), SWIZZLE_128x4.pack(scales.flip(1)).flatten())
    if "w13_bias" in ours:
        assert not torch.equal(t["up_bias"], t["up_bias"].bfloat16().float())  # parameters are bf16, so loading rounds
        b13 = torch.cat([padded(t[f"{k}_bias"].bfloat16(), intermediate) for k in halves], 1)[:, order]
        b2 = padded(t["down_bias"].bfloat16(), hidden)[:, down]
        for key, bias in (("w13_bias", b13), ("w2_bias", b2)):
            assert same_bytes(ours[key], bias.to(ours[key].dtype)), key


@pytest.mark.parametrize("name", [n for n in NAMES if n.startswith("nvfp4")])
def test_global_scales(name: str) -> None:
    """alpha = w1's global scale * the largest input scale; a_gscale = 1 / it; g1_scale_c = w13_alpha * a2_gscale, gated, else a2_gscale."""
    case, t, (ours, _) = golden().PATH_CASES[name], golden().made(name), kept(name)
    first, *_ = halves = ("gate", "up") if case.gated else ("up",)
    if case.kind == golden().COMPRESSED_NVFP4:
        t = {k: 1 / v if k.endswith(("_scale_2", "_input_scale")) else v for k, v in t.items()}
    a1 = torch.stack([t[f"{k}_input_scale"] for k in halves]).max()
    a2 = t["down_input_scale"].max()
    assert t["down_input_scale"].unique().numel() == case.experts and case.differ != torch.equal(t[f"{first}_scale_2"], t["up_scale_2"])
    want = {"w13_alpha": t[f"{first}_scale_2"] * a1, "w2_alpha": t["down_scale_2"] * a2,
            "a1_gscale": (1 / a1).repeat(case.experts), "a2_gscale": (1 / a2).repeat(case.experts)}
    if "trtllm" in name:
        want["g1_scale_c"] = want["w13_alpha"] * want["a2_gscale"] if case.gated else want["a2_gscale"]
    for key, value in want.items():
        assert torch.equal(ours[key], value), key


@pytest.mark.parametrize("name", NAMES)
def test_swiglu_parameters(name: str) -> None:
    """What arrives at the kernel. OAI is alpha 1.5, beta 0.75, limit 6.5."""
    case, (ours, _) = golden().PATH_CASES[name], kept(name)
    got = {k.removeprefix("swiglu_"): v for k, v in ours.items() if k.startswith("swiglu")}
    alpha, beta, limit = case.swiglu
    if case.kind == golden().GPT_OSS:
        alpha, beta, limit = 1.702, 1.0, 7.0  # constants, also where the layer says OAI
    elif case.kind == golden().COMPRESSED or (case.activation == "silu" and "trtllm" not in name):
        alpha = beta = None  # the limit alone: MXFP4 never passes more, CUTLASS and CuTe-DSL not for SILU
    shape = () if "cutedsl" in name else (case.experts,)
    want = {k: torch.full(shape, v) for k, v in (("alpha", alpha), ("beta", beta), ("limit", limit)) if v is not None}
    if name.startswith("nvfp4-trtllm"):  # it clamps and shifts before it scales
        want = {k: v if k == "alpha" else v / ours["w13_alpha"] for k, v in want.items()}
    assert got.keys() == want.keys() and all(torch.equal(got[k], v) for k, v in want.items())


# -- the call -------------------------------------------------------------------------------------------------------


def test_views_at_the_call() -> None:
    """int64 payload and int32 scales for CUTLASS, 6-D scales for CuTe-DSL, nothing viewed for TRT-LLM."""
    def call(name: str) -> dict[str, dict[str, object]]:
        return json.loads(kept(name)[1]["call"])

    cutlass = call("nvfp4-cutlass-modelopt-aligned")
    # 320 codes are 160 bytes are 20 int64.
    assert cutlass["fc1_expert_weights"] == {"operand": "w13", "dtype": "int64", "shape": [2, 128, 20], "stride": [2560, 20, 1]}
    assert [cutlass[f"quant_scales[{i}]"]["operand"] for i in range(6)] == [
        "a1_gscale", "w13_scale", "w13_alpha", "a2_gscale", "w2_scale", "w2_alpha"]
    assert cutlass["quant_scales[1]"]["dtype"] == "int32" and cutlass["quant_scales[4]"]["shape"] == [2, 384, 1]  # 320 rows padded to 384
    mxfp8 = call("mxfp4-cutlass-mxfp8-gpt-oss-unaligned")
    assert mxfp8["fc2_expert_weights"]["dtype"] == "int64" and mxfp8["quant_scales[0]"]["dtype"] == "int32"
    assert mxfp8["use_mxfp8_act_scaling"] is True
    ones_for_both = ["w13_scale", "w13_alpha", "w2_scale", "w13_alpha"]
    assert [mxfp8[f"quant_scales[{i}]"]["operand"] for i in range(4)] == ones_for_both
    dsl = call("nvfp4-cutedsl-modelopt-unaligned")
    # 256 rows are 2 tiles of 128, 32 columns 8 tiles of 4; memory is [expert, row tile, column tile, 32, 4, 4].
    assert dsl["w1_weight_sf"] == {"operand": "w13_scale", "dtype": "float8_e4m3fn",
                                   "shape": [32, 4, 2, 4, 8, 2], "stride": [16, 4, 4096, 1, 512, 8192]}
    assert (dsl["w1_alpha"]["operand"], dsl["fc2_input_scale"]["operand"], dsl["swiglu_limit"]) == ("w13_alpha", "a2_gscale", 6.5)
    for name in ("mxfp4-trtllm-gpt-oss-unaligned", "nvfp4-trtllm-modelopt-unaligned"):
        trtllm = call(name)
        assert trtllm["gemm1_weights"]["dtype"] == "uint8" and trtllm["gemm1_weights_scale"]["dtype"] == "float8_e4m3fn"
    assert [trtllm[k]["operand"] for k in ("output1_scale_scalar", "output1_scale_gate_scalar", "output2_scale_scalar")] == [
        "g1_scale_c", "w13_alpha", "w2_alpha"]
