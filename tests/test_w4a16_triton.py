"""The Triton kernel for NVFP4 W4A16 against FlashInfer's own converters and references, and against ml_dtypes' values.

Runs on a GPU (SM80 or newer), or, where Triton is installed, on a CPU: `TRITON_INTERPRET=1 pytest tests/test_w4a16_triton.py`.
With MXDEBUG_W4A16_RECORD=FILE, `test_gpu_measures` writes what it saw.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import platform
from collections.abc import Callable
from dataclasses import asdict

import pytest
import torch
from torch import Tensor

from mxdebug.errors import MxdebugError
from mxdebug.metrics import Comparison, compare
from mxdebug.w4a16_triton import mm_bf16_fp4

TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = TRITON and os.environ.get("TRITON_INTERPRET") == "1"
GPU = TRITON and not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
DEVICE = "cuda" if GPU else "cpu"
runs_triton = pytest.mark.skipif(not (GPU or INTERPRETED), reason="not run here: Triton needs a GPU (SM80+) or TRITON_INTERPRET=1")

LAYOUTS = ("SM100", "SM12x")
SHAPES = ((64, 64), (192, 320), (320, 704), (128, 2944))  # N, K
TOKENS = (1, 7, 33)
SCALES = {"any": (0x01, 0x7E), "subnormal and just above": (0x01, 0x0F), "usual": (0x30, 0x58)}  # E4M3 codes, first and last


def weight(n: int, k: int, scales: str, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random codes uint8 [N, K/2] and E4M3 scales uint8 [N, K/16] of a kind in SCALES, no two rows or blocks alike."""
    g = torch.Generator().manual_seed(seed)
    first, last = SCALES[scales]
    return (torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=g),
            torch.randint(first, last + 1, (n, k // 16), dtype=torch.uint8, generator=g))


def in_128x4(scales: Tensor) -> Tensor:
    """uint8 [N, K/16] -> the bytes in 128x4 order, flat, as cuBLAS documents it. Rows that pad N are NaN (0x7F): reading one shows."""
    n, columns = scales.shape
    rows = -(-n // 128) * 128
    padded = torch.full((rows, columns), 0x7F, dtype=torch.uint8)
    padded[:n] = scales
    return padded.view(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4).reshape(-1)


def mma_view(swizzled: Tensor, n: int, columns: int) -> Tensor:
    """The view that FlashInfer's `convert_sf_to_mma_layout` makes of bytes in 128x4 order."""
    return swizzled.view(1, -(-n // 128), columns // 4, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)


def prepared(layout: str, payload: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """What FlashInfer's own converters make of the weight, on the device of the tests: b, b_descale."""
    fi = pytest.importorskip("flashinfer.gemm.gemm_bf16_fp4_cute_dsl")
    try:
        b, s, _ = (fi._prepare_cute_dsl_sm100 if layout == "SM100" else fi._prepare_cute_dsl_sm12x)(payload, in_128x4(scales), None, 16)
    except ModuleNotFoundError:  # SM100's needs the package `cutlass` for a view
        b, s = payload, mma_view(in_128x4(scales), *scales.shape)
    return b.to(DEVICE), s.to(DEVICE)


def test_the_view_is_flashinfers() -> None:
    convert = pytest.importorskip("flashinfer.cute_dsl.utils", exc_type=ImportError).convert_sf_to_mma_layout
    _, scales = weight(192, 320, "any")
    got, want = mma_view(in_128x4(scales), *scales.shape), convert(in_128x4(scales), m=192, k=320)
    assert torch.equal(got, want) and got.stride() == want.stride()


def reference(layout: str) -> Callable[..., Tensor]:
    """FlashInfer's reference for operands in a layout: (a, b, b_descale, alpha) -> [M, N] in the dtype of a."""
    fi = pytest.importorskip("flashinfer.trace.templates.gemm")
    return fi._mm_bf16_fp4_cute_dsl_sm100_reference if layout == "SM100" else fi._mm_bf16_fp4_cute_dsl_reference


def values(payload: Tensor, scales: Tensor) -> Tensor:
    """The weight float64 [N, K], by ml_dtypes."""
    ml, np = pytest.importorskip("ml_dtypes"), pytest.importorskip("numpy")
    codes = np.stack([payload.numpy() & 15, payload.numpy() >> 4], axis=-1).reshape(payload.shape[0], -1)
    factors = scales.numpy().view(ml.float8_e4m3fn).astype(np.float64)
    return torch.from_numpy(codes.view(ml.float4_e2m1fn).astype(np.float64) * factors.repeat(16, axis=1))


def activations(m: int, k: int, seed: int = 1) -> Tensor:
    return torch.randn(m, k, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def floor(k: int) -> float:
    """Relative L2 that rounding can make between two ways to compute one stored result.

    Both add K exact products in float32; their sums differ by d = K * 2^-24 at most, relative to the result. Stored as bf16, in steps of
    s = 2^-8, a result flips to its neighbour with probability d / s and is then off by s: sqrt(d / s) * s = sqrt(K * 2^-32).
    """
    return math.sqrt(k * 2.0**-32)


def check(got: Tensor, want: Tensor, k: int) -> Comparison:
    """`got` is `want`, token by token up to `floor` and one step (2^-7) of the largest element; no more elements differ than can flip."""
    c = compare(got, want)
    assert c.masks_equal, c
    a, b = (t.double().nan_to_num(0.0, 0.0, 0.0).to("cpu") for t in (got, want))
    allowed = floor(k) * b.norm(dim=1) + 2.0**-7 * b.abs().amax(dim=1)
    assert ((a - b).norm(dim=1) <= allowed).all(), c
    bound = (allowed.norm() / b.norm()).item()
    assert c.relative_l2 <= bound and abs(c.norm_ratio - 1) <= bound and 1 - c.cosine <= bound**2 / 2 + 1e-12, (c, bound)
    flips = k * 2.0**-16 * c.elements  # d / s of each; four standard deviations, for small outputs
    assert c.differing <= flips + 4 * math.sqrt(flips) + 1, (c, flips)
    return c


# -- the kernel ---------------------------------------------------------------------------------------------------


@runs_triton
@pytest.mark.parametrize(("n", "k", "scales"), [(n, k, s) for n, k in SHAPES for s in SCALES if GPU or k < 1000 or s == "any"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_follows_both_oracles(layout: str, n: int, k: int, scales: str) -> None:
    w = weight(n, k, scales)
    b, s = prepared(layout, *w)
    alpha = torch.tensor([1 / 2688 / 0.7], dtype=torch.float32, device=DEVICE)
    for m in TOKENS if GPU or k < 1000 else (7,):  # the interpreter is slow
        a = activations(m, k)
        got = mm_bf16_fp4(a, b, s, alpha)
        assert got.dtype == torch.bfloat16 and got.shape == (m, n)
        check(got, reference(layout)(a, b, s, alpha), k)
        check(got.cpu(), (alpha.double().cpu() * (a.double().cpu() @ values(*w).T)).bfloat16(), k)


@runs_triton
@pytest.mark.parametrize(("n", "k"), [(64, 64), (192, 128), (320, 192)])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_hot_activations_read_every_element_bit_for_bit(layout: str, n: int, k: int) -> None:
    """Token i is the i-th unit vector: the output is the weight, transposed. Every pair of a code and a scale is there in turn."""
    pairs = torch.arange(n * k // 16).view(n, k // 16)
    scales = (pairs * 5 % 0x7F).to(torch.uint8)  # 0x00 to 0x7E
    if layout == "SM100":
        scales |= (pairs % 2 * 0x80).to(torch.uint8)  # S0E5M3 has no sign
    payload = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    b, s = prepared(layout, payload, scales)
    got = mm_bf16_fp4(torch.eye(k, dtype=torch.bfloat16, device=DEVICE), b, s, torch.ones(1, device=DEVICE))
    want = values(payload, scales).T.contiguous().bfloat16()
    assert torch.equal(want.double(), values(payload, scales).T)  # exact in bf16
    assert torch.equal(got.cpu(), want)


@runs_triton
def test_every_finite_s0e5m3_scale() -> None:
    """Also those that no E4M3 scale becomes: bytes 0x00 to 0xF7 are the float16 with the bits byte << 7."""
    scales = torch.arange(4 * 64).clamp(max=0xF7).to(torch.uint8).view(4, 64)  # [K/16, N]
    b = torch.full((4, 128), 0x22222222, dtype=torch.int32)  # code 2 is 1.0
    got = mm_bf16_fp4(torch.eye(64, dtype=torch.bfloat16, device=DEVICE), b.to(DEVICE), scales.to(DEVICE), torch.ones(1, device=DEVICE))
    want = (scales.to(torch.int16) << 7).view(torch.float16).repeat_interleave(16, 0).bfloat16()
    assert torch.equal(got.cpu(), want)


@runs_triton
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_nan_scale_makes_its_row_nan(layout: str) -> None:
    payload, scales = weight(192, 128, "usual")
    scales[77, 3] = 0x7F
    b, s = prepared(layout, payload, scales)
    got = mm_bf16_fp4(activations(3, 128), b, s, torch.ones(1, device=DEVICE))
    assert torch.isnan(got).nonzero()[:, 1].unique().tolist() == [77] and torch.isnan(got[:, 77]).all()


@runs_triton
@pytest.mark.filterwarnings("ignore:.*encountered in:RuntimeWarning")  # NumPy's, of the interpreter: inf and NaN are meant
@pytest.mark.parametrize("layout", LAYOUTS)
def test_activations_as_fp16(layout: str) -> None:
    """Token 0 is beyond fp16, token 1 among its subnormals, token 2 below all; with the flag, the sum is that of a.half()."""
    w = weight(192, 320, "usual")
    b, s = prepared(layout, *w)
    a = activations(4, 320)
    a[0, 5], a[1], a[2] = 1e5, a[1] * 2.0**-22, a[2] * 2.0**-30
    alpha = torch.tensor([0.37], device=DEVICE)
    want = reference(layout)(a.half().float(), b, s, alpha).bfloat16()
    got = mm_bf16_fp4(a, b, s, alpha, activations_as_fp16=True)
    check(got, want, 320)
    assert not torch.isfinite(got[0]).any() and not got[2].any()
    plain = mm_bf16_fp4(a, b, s, alpha)
    check(plain, reference(layout)(a, b, s, alpha), 320)
    assert compare(plain[1:2], got[1:2]).relative_l2 > 0.02
    check(got[3:], plain[3:], 320)


@runs_triton
def test_scales_as_float8_and_no_tokens() -> None:
    b, s = prepared("SM100", *weight(192, 128, "usual"))
    a, alpha = activations(5, 128), torch.ones(1, device=DEVICE)
    assert torch.equal(mm_bf16_fp4(a, b, s.view(torch.float8_e4m3fn), alpha), mm_bf16_fp4(a, b, s, alpha))
    assert mm_bf16_fp4(a[:0], b, s, alpha).shape == (0, 192)


# -- what it refuses ----------------------------------------------------------------------------------------------


def operands(layout: str) -> dict[str, Tensor]:
    b, s = prepared(layout, *weight(192, 128, "usual"))
    return {"a": activations(3, 128), "b": b, "b_descale": s, "alpha": torch.ones(1, device=DEVICE)}


@pytest.mark.parametrize(("layout", "operand", "change", "named"), [
    ("SM100", "a", lambda t: t.float(), "a"),
    ("SM100", "a", lambda t: t[:, ::2], "a"),
    ("SM100", "a", lambda t: t[:, :64].contiguous(), "b"),
    ("SM100", "a", lambda t: t[:, :96].contiguous(), "a, b"),
    ("SM100", "b", lambda t: t.view(torch.int32), "a, b"),
    ("SM100", "b", lambda t: t.t(), "b"),
    ("SM12x", "b", lambda t: t[:, :256].contiguous(), "b_descale"),
    ("SM12x", "b", lambda t: t.t().contiguous(), "a, b"),
    ("SM100", "b_descale", lambda t: t.contiguous(), "b_descale"),
    ("SM100", "b_descale", lambda t: t.squeeze(-1), "b_descale"),
    ("SM100", "b_descale", lambda t: t.to(torch.int16), "b_descale"),
    ("SM12x", "b_descale", lambda t: t.t(), "b_descale"),
    ("SM12x", "b_descale", lambda t: t.t().contiguous().t(), "b_descale"),
    ("SM12x", "b_descale", lambda t: t.view(torch.float8_e4m3fn), "b_descale"),
    ("SM100", "alpha", lambda t: t[0], "alpha"),
    ("SM100", "alpha", lambda t: t.double(), "alpha"),
])
def test_wrong_operands_are_named(layout: str, operand: str, change: Callable[[Tensor], Tensor], named: str) -> None:
    given = operands(layout)
    given[operand] = change(given[operand])
    with pytest.raises(MxdebugError) as e:
        mm_bf16_fp4(**given)
    assert e.value.operand == named


@pytest.mark.skipif(GPU or INTERPRETED, reason="says what a machine without Triton or a GPU answers")
def test_a_machine_that_cannot_run_it_says_so() -> None:
    with pytest.raises(MxdebugError, match="this machine"):
        mm_bf16_fp4(**operands("SM100"))


# -- on a GPU: how close, how fast --------------------------------------------------------------------------------


def microseconds(call: Callable[[], object], repeats: int = 50) -> float:
    """The median time of a call on the GPU, by events."""
    times = []
    for _ in range(repeats + 5):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return sorted(times[5:])[repeats // 2]


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="not run here: needs a GPU of SM80 or newer, and Triton")
def test_gpu_measures() -> None:
    """Every small shape, and a layer as large as gpt-oss's (5760 x 2880), against FlashInfer's reference on the same GPU."""
    import triton

    cases = []
    for n, k, tokens in [*((n, k, TOKENS) for n, k in SHAPES), (5760, 2880, (1, 16, 512))]:
        large, w = n == 5760, weight(n, k, "any")
        dense = torch.randn(k, n, dtype=torch.bfloat16, device=DEVICE) if large else None
        for layout in LAYOUTS:
            b, s = prepared(layout, *w)
            alpha = torch.tensor([1 / 2688 / 0.7], device=DEVICE)
            for m in tokens:
                for as_fp16 in (False, True) if layout == "SM12x" and large else (False,):
                    a = activations(m, k)
                    want = reference(layout)(a.half().float() if as_fp16 else a, b, s, alpha).bfloat16()
                    c = check(mm_bf16_fp4(a, b, s, alpha, as_fp16), want, k)
                    case = {"M": m, "N": n, "K": k, "layout": layout, "activations_as_fp16": as_fp16, **asdict(c), "floor": floor(k)}
                    if dense is not None:
                        case["microseconds"] = round(microseconds(lambda: mm_bf16_fp4(a, b, s, alpha, as_fp16)), 1)  # noqa: B023
                        case["torch_bf16_microseconds"] = round(microseconds(lambda: a @ dense), 1)  # noqa: B023
                    print({key: float(f"{v:.3g}") if type(v) is float else v for key, v in case.items()})
                    cases.append(case)
    sm = torch.cuda.get_device_capability()
    record = {"gpu": torch.cuda.get_device_name(), "sm": f"{sm[0]}{sm[1]}", "torch": torch.__version__, "triton": triton.__version__,
              "python": platform.python_version(), "reference": "flashinfer.trace.templates.gemm, float32 on the same GPU", "cases": cases}
    if path := os.environ.get("MXDEBUG_W4A16_RECORD"):
        with open(path, "w") as f:
            json.dump(record, f, indent=1)
