"""Is a number taken to the code that it should go to, and is the reason true? Against ml_dtypes, gfloat and torchao, and written out."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from mxdebug.errors import MxdebugError
from mxdebug.formats import EXPONENT_RULES, FORMATS, MXFP4, MXFP8, MXFP8_E5M2, NVFP4, BlockFormat
from mxdebug.views.number import Block, Number, block, number, with_outlier

ML_DTYPE = {"E2M1": "float4_e2m1fn", "E4M3": "float8_e4m3fn", "E5M2": "float8_e5m2"}
FAMILIES = [pytest.param(f, rule, id=f"{f.name}-{rule}") for f in FORMATS.values() for rule in ((None,) if f.outer else EXPONENT_RULES)]
UNIT = 1 / 2688  # NVFP4's global scale where the largest number of the tensor is 1


@pytest.fixture(scope="module")
def gfloat() -> SimpleNamespace:
    lib = pytest.importorskip("gfloat")
    formats = pytest.importorskip("gfloat.formats")
    return SimpleNamespace(lib=lib, info={n: getattr(formats, f"format_info_ocp_{n.lower()}") for n in ML_DTYPE})


def scaled_by_one(fmt: BlockFormat, x: float) -> Number:
    """The number in a block whose scale is 1: its largest is the element's largest, or the number."""
    values = torch.zeros(fmt.block)
    values[0], values[1] = x, fmt.element.max
    b = block(values, fmt, rule=None if fmt.outer else "floor", global_scale=1.0 if fmt.outer else None)
    assert b.step == 1 or not abs(x) < 2 * fmt.element.max
    return number(b, 0)


# -- written out --------------------------------------------------------------------------------------------------------
# In a block of scale 1. E2M1 has 0, 0.5, 1, 1.5, 2, 3, 4, 6 at codes 0 to 7; E4M3 steps of 2^-9 up to 2^-6 (code 8), of 2^-3 from 1 (0x38)
# to 2, of 32 from 256 to 448 (0x7E); E5M2 steps of 2^-16 up to 2^-14 (code 4), of 0.25 from 1 (0x3C), of 8192 from 32768 to 57344 (0x7B).

WRITTEN = [
    # format, number, code below, code above, chosen, error, what the reason says
    (MXFP4, 0.0, 0x0, 0x0, 0x0, 0.0, "a code of its own"),
    (MXFP4, -0.0, 0x8, 0x8, 0x8, 0.0, "a code of its own"),
    (MXFP4, 0.5, 0x1, 0x1, 0x1, 0.0, "exact"),                            # the only subnormal of E2M1
    (MXFP4, 0.3, 0x0, 0x1, 0x1, 0.2, "above 0.25, the middle; subnormal"),
    (MXFP4, 0.25, 0x0, 0x1, 0x0, -0.25, "halfway: ties go to the even code"),  # between 000 and 001
    (MXFP4, 0.2, 0x0, 0x1, 0x0, -0.2, "less than half of 0.5"),
    (MXFP4, 0.8, 0x1, 0x2, 0x2, 0.2, "0.8 is above 0.75, the middle"),    # 1 is the smallest normal number
    (MXFP4, 0.75, 0x1, 0x2, 0x2, 0.25, "halfway"),                        # 001, 010: up
    (MXFP4, 1.25, 0x2, 0x3, 0x2, -0.25, "halfway"),                       # 010, 011: down
    (MXFP4, 2.5, 0x4, 0x5, 0x4, -0.5, "halfway"),                         # 2 and 3: down
    (MXFP4, 3.5, 0x5, 0x6, 0x6, 0.5, "halfway"),                          # 3 and 4: up
    (MXFP4, -5.0, 0xF, 0xE, 0xE, 1.0, "halfway"),                         # -6 and -4: to -4, whose code 110 is even
    (MXFP4, -5.1, 0xF, 0xE, 0xF, -0.9, "5.1 is above 5, the middle"),
    (MXFP4, 6.0, 0x7, 0x7, 0x7, 0.0, "exact"),
    (MXFP4, 7.5, 0x7, None, 0x7, -1.5, "saturated: there is no number beyond 6"),
    (MXFP4, -7.5, None, 0xF, 0xF, 1.5, "saturated: there is no number beyond 6"),
    (NVFP4, 0.25, 0x0, 0x1, 0x0, -0.25, "halfway"),
    (NVFP4, 6.0, 0x7, 0x7, 0x7, 0.0, "exact"),
    (MXFP8, 2.0**-9, 0x01, 0x01, 0x01, 0.0, "exact"),                     # the smallest subnormal
    (MXFP8, 2.0**-10, 0x00, 0x01, 0x00, -(2.0**-10), "halfway"),
    (MXFP8, 3 * 2.0**-10, 0x01, 0x02, 0x02, 2.0**-10, "halfway"),         # 1.5 steps: to 2
    (MXFP8, 2.2 * 2.0**-9, 0x02, 0x03, 0x02, -0.2 * 2.0**-9, "subnormal"),
    (MXFP8, 1.0625, 0x38, 0x39, 0x38, -0.0625, "halfway"),
    (MXFP8, -1.1, 0xB9, 0xB8, 0xB9, -0.025, "above 1.0625"),
    (MXFP8, 448.0, 0x7E, 0x7E, 0x7E, 0.0, "exact"),
    (MXFP8, 500.0, 0x7E, None, 0x7E, -52.0, "no number beyond 448"),      # 0x7F is NaN, never taken
    (MXFP8_E5M2, 2.0**-17, 0x00, 0x01, 0x00, -(2.0**-17), "halfway"),
    (MXFP8_E5M2, 1.125, 0x3C, 0x3D, 0x3C, -0.125, "halfway"),
    (MXFP8_E5M2, 1.375, 0x3D, 0x3E, 0x3E, 0.125, "halfway"),
    (MXFP8_E5M2, 65000.0, 0x7B, None, 0x7B, -7656.0, "no number beyond 57344"),  # 0x7C is inf, never taken
]


@pytest.mark.parametrize(("fmt", "x", "below", "above", "chosen", "error", "why"), WRITTEN,
                         ids=[f"{w[0].name}:{w[1]:g}" for w in WRITTEN])
def test_written_out(fmt: BlockFormat, x: float, below: int | None, above: int | None, chosen: int, error: float, why: str) -> None:
    n = scaled_by_one(fmt, x)
    assert [c and c.code for c in (n.below, n.above, n.chosen)] == [below, above, chosen]
    assert n.error == pytest.approx(error, rel=1e-5) and why in n.why


def test_nan_and_inf_take_the_block_with_them() -> None:
    o = with_outlier(MXFP4, math.nan, 1.0, rule="floor")
    assert o.block.scale_byte == 0xFF and bool(o.block.read.isnan().all()) and math.isnan(o.number.error)
    assert (o.number.below, o.number.above) == (None, None) and "all of it reads as NaN" in o.number.why
    assert "others   30 of 30 become NaN" in str(o)
    eight = with_outlier(MXFP8, math.nan, 1.0, rule="floor").number
    assert eight.chosen.code == 0x7F and math.isnan(eight.chosen.element)
    # inf counts as 2^128: 128 - 2 = 126, byte 253; 6 * 2^126 = 1.5 * 2^128 is beyond float32
    o = with_outlier(MXFP4, -math.inf, 1.0, rule="floor")
    assert (o.block.scale_byte, o.number.chosen.code, o.number.chosen.value) == (253, 0xF, -math.inf)
    assert o.number.error == 0 and "inf saturates" in o.number.why and o.loss.zeros == 30
    for x in (math.nan, math.inf):
        with pytest.raises(MxdebugError, match="finite numbers"):
            with_outlier(NVFP4, x, 1.0)


def test_scales_written_out() -> None:
    def scale(fmt: BlockFormat, largest: float, rule: str | None = None) -> tuple[int, str]:
        values = torch.zeros(fmt.block)
        values[3] = -largest
        b = block(values, fmt, rule=rule, global_scale=UNIT if fmt.outer else None)
        return b.scale_byte, b.scale_why

    assert scale(MXFP4, 7.0, "floor") == (127, "floor(log2(7)) - 2 = 0; byte 127 means 2^0 = 1")        # log2 7 = 2.8; 7 saturates at 6
    assert scale(MXFP4, 7.0, "ceil") == (128, "ceil(log2(7 / 6)) = 1; byte 128 means 2^1 = 2")
    assert scale(MXFP4, 7.0, "even") == (128, "floor(log2(7 rounded to 2 bits)) - 2 = 1; byte 128 means 2^1 = 2")  # 1.11 -> 10.0
    assert scale(MXFP4, 6.5, "even")[0] == 127                                                           # 1.101 -> 1.1: 6
    assert scale(MXFP8, 500.0, "floor")[0] == 127 and scale(MXFP8, 500.0, "ceil")[0] == 128
    assert scale(MXFP4, 0.0, "floor") == (0, "all are 0: byte 0 means 2^-127 = 5.87747e-39")
    assert "kept within -127 to 127" in scale(MXFP4, 1e-40, "floor")[1]
    # the largest of the tensor gives 448 itself; a quarter of it 112; 0.3 gives 134.4, between 128 and 144; there is no room for 3
    assert scale(NVFP4, 1.0)[0] == 0x7E and scale(NVFP4, 0.25)[1].endswith("= 112; the nearest E4M3 is 112 (byte 110)")
    assert scale(NVFP4, 0.3)[1].endswith("= 134.4; the nearest E4M3 is 128 (byte 112)")
    assert scale(NVFP4, 3.0)[1].endswith("= 1344; beyond 448, so 448 (byte 126)")
    assert "block scale is 0" in with_outlier(NVFP4, -1e-9, 1e-9, spread=1e-9).number.why


def test_the_blocks_of_the_notebook_written_out() -> None:
    """31 weights of about 0.01 and one of 1: the scale is 2^(0 - 2), the smallest code 0.5 * 0.25, and half of that is 0.0625."""
    o = with_outlier(MXFP4, 0.01, 1.0, rule="floor")
    assert bool((o.block.values.abs() < 0.0625).sum() == 31)
    assert str(o) == """\
MXFP4: 32 numbers share one block scale; the largest is 1
scale    floor(log2(1)) - 2 = -2; byte 125 means 2^-2 = 0.25
number   0.01 / 0.25 = 0.04
below    code 0x00 (0 00 0) = 0, read as 0
above    code 0x01 (0 00 1) = 0.5, read as 0.125
chosen   0x00: less than half of 0.5, the smallest code: becomes 0
error    -0.01, 100.0% of the number
others   30 of 30 become 0, relative L2 1.000
         without the outlier: 2 of 30 become 0, relative L2 0.102
outlier  1 is read as 1"""


def test_the_larger_the_outlier_the_more_is_lost() -> None:
    for fmt, rule in ((MXFP4, "floor"), (NVFP4, None)):
        losses = [with_outlier(fmt, 0.01, outlier, rule=rule).loss for outlier in (0.02, 0.05, 0.1, 0.2, 1.0, 10.0)]
        zeros = [loss.zeros for loss in losses]
        blocks = [with_outlier(fmt, 0.01, outlier, rule=rule).block for outlier in (0.02, 0.05, 0.1, 0.2, 1.0, 10.0)]
        small = [torch.cat([b.values[1: fmt.block * 5 // 8], b.values[fmt.block * 5 // 8 + 1:]]).abs() for b in blocks]
        # 0.5 is the smallest code: a quarter of the scale is halfway, and a tie goes to the even code, which is 0
        assert zeros == [int((v <= b.step / 4).sum()) for v, b in zip(small, blocks)]
        assert zeros == sorted(zeros) and zeros[-1] == losses[-1].of == fmt.block - 2
        relative = [loss.relative_l2 for loss in losses]
        assert relative == sorted(relative) and relative[-1] == 1.0
    assert with_outlier(MXFP8, 0.01, 1.0, rule="floor").loss.zeros == 0  # 8 bits: 2^-9 * 2^-8 is small enough for all of them


# -- against libraries --------------------------------------------------------------------------------------------------


def numbers(fmt: BlockFormat) -> list[float]:
    """Every code's number, every middle, what lies next to some of these, and what is beyond, below twice the largest."""
    table = sorted({abs(v) for v in fmt.element.table().tolist() if math.isfinite(v)})
    middles = [(a + b) / 2 for a, b in zip(table, table[1:])]
    near = [float(np.nextafter(np.float32(m), np.float32(to))) for m in middles[:: 1 + len(middles) // 16] for to in (0, np.inf)]
    return [s * v for v in (*table, *middles, *near, table[-1] * 1.01, table[-1] * 1.1) for s in (1, -1)]


@pytest.mark.parametrize("fmt", [MXFP4, MXFP8, MXFP8_E5M2], ids=lambda f: f.name)
def test_every_code_and_middle_as_gfloat_and_ml_dtypes(fmt: BlockFormat, gfloat: SimpleNamespace) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    dtype = getattr(ml_dtypes, ML_DTYPE[fmt.element.name])
    for x in numbers(fmt):
        n = scaled_by_one(fmt, x)
        info = gfloat.info[fmt.element.name]
        assert n.chosen.code == gfloat.lib.encode_float(info, gfloat.lib.round_float(info, x, gfloat.lib.RoundMode.TiesToEven, sat=True))
        if abs(x) <= fmt.element.max:  # ml_dtypes overflows to NaN or inf, where block formats saturate
            assert n.chosen.code == int(np.array([x], np.float32).astype(dtype).view(np.uint8)[0])
        down, up = (gfloat.lib.round_float(info, x, mode, sat=True) for mode in (
            gfloat.lib.RoundMode.TowardNegative, gfloat.lib.RoundMode.TowardPositive))
        assert (n.below is None) == (x < -fmt.element.max) and (n.above is None) == (x > fmt.element.max)
        assert n.below is None or (n.below.element == down <= x and gfloat.lib.decode_float(info, n.below.code).fval == down)
        assert n.above is None or (n.above.element == up >= x and gfloat.lib.decode_float(info, n.above.code).fval == up)


@pytest.mark.parametrize(("fmt", "rule"), FAMILIES)
def test_blocks_as_torchao(fmt: BlockFormat, rule: str | None) -> None:
    """Scale byte and codes of blocks with outliers from 0.01 to 10, and what is read."""
    pytest.importorskip("torchao")
    config = pytest.importorskip("torchao.prototype.mx_formats.config")
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    nv = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    mode = {"floor": "FLOOR", "ceil": "RCEIL", "even": "EVEN"}
    dtype = {"E2M1": torch.float4_e2m1fn_x2, "E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}[fmt.element.name]
    for outlier in (0.01, 0.037, 0.1, 0.5, 1.0, 1.9, 3.3, 10.0):
        b = with_outlier(fmt, -0.0123, outlier, rule=rule).block
        if fmt.outer:
            scales, payload = nv.nvfp4_quantize(b.values[None], 16, torch.tensor(b.global_scale))
        else:
            scales, payload = mx.to_mx(b.values[None], dtype, 32, getattr(config.ScaleCalculationMode, mode[rule]))
        payload = payload.view(torch.uint8).flatten()
        codes = torch.stack([payload & 0xF, payload >> 4], 1).flatten() if fmt.packed else payload
        assert scales.view(torch.uint8).flatten().tolist() == [b.scale_byte] and torch.equal(codes, b.codes)
        assert [b.code(int(c)).value for c in codes] == b.read.tolist()


# -- its reasons --------------------------------------------------------------------------------------------------------


def reason_is_true(b: Block, n: Number) -> None:
    """What is said about a number, against the distances to all numbers that the block can hold."""
    reachable = [(abs(v - n.scaled), c) for c, v in enumerate(b.format.element.table().tolist()) if math.isfinite(v)]
    least = min(reachable)[0]
    nearest = {c & ~(1 << (b.format.element.bits - 1)) for d, c in reachable if d == least}
    assert abs(n.chosen.element - n.scaled) == least
    said = {"exact": least == 0 and n.scaled != 0, "a code of its own": n.scaled == 0, "saturated": abs(n.scaled) > b.format.element.max,
            "halfway": len(nearest) == 2, "less than half": n.chosen.element == 0 and least > 0 and len(nearest) == 1}
    others = [name for name in said if name in n.why]
    assert [name for name, true in said.items() if true] == others and (others or n.why.startswith("nearest"))
    if not others:
        assert ("subnormal" in n.why) == (n.chosen.bits.split()[1].strip("0") == "")
    assert math.copysign(1, n.chosen.element) == math.copysign(1, n.scaled) or n.chosen.element == 0
    if n.below is not None and n.above is not None:
        assert n.below.element <= n.scaled <= n.above.element and n.chosen in (n.below, n.above)


@pytest.mark.parametrize(("fmt", "rule"), FAMILIES)
def test_reasons_are_true(fmt: BlockFormat, rule: str | None) -> None:
    for outlier in (0.02, 0.3, 1.9):
        b = with_outlier(fmt, 0.01, outlier, rule=rule).block
        for at in range(fmt.block):
            reason_is_true(b, number(b, at))
    if rule == "floor":
        for x in numbers(fmt)[::3]:  # all of them would take a while
            values = torch.zeros(fmt.block)
            values[0] = x
            b = block(values, fmt, rule=rule)
            reason_is_true(b, number(b, 0))


def test_refusals() -> None:
    with pytest.raises(MxdebugError, match=r"float32 \[32\]"):
        block(torch.zeros(16), MXFP4, rule="floor")
    with pytest.raises(MxdebugError, match="one block does not show it"):
        block(torch.zeros(16), NVFP4)
    with pytest.raises(MxdebugError, match="in the range of float32"):
        with_outlier(MXFP4, 1e39, 1.0, rule="floor")
    with pytest.raises(MxdebugError, match="one of floor, ceil, even"):
        with_outlier(MXFP4, 0.1, 1.0)  # quantisers differ, so there is no default
