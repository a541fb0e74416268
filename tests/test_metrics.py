"""Can the numbers that decide be trusted? Distances counted by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mxdebug.diagnosis.region import Region
from mxdebug.errors import MxdebugError
from mxdebug.metrics import Comparison, compare, plain

NAN, INF = math.nan, math.inf


def bf16(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.bfloat16)


def from_bits(*bits: int) -> Tensor:
    """bfloat16 numbers with these bits."""
    return torch.tensor([b - 65536 if b >= 32768 else b for b in bits], dtype=torch.int16).view(torch.bfloat16)


def test_equal_tensors() -> None:
    x = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    c = compare(x, x.clone())
    assert c.bit_identical and str(c).startswith("bit-identical; relative L2 0.0000")
    assert (c.elements, c.differing, c.max_ulps, c.masks_equal, c.norm_ratio, c.relative_l2) == (15, 0, 0, True, 1.0, 0.0)
    assert c.cosine == pytest.approx(1.0, abs=1e-15)


def test_large_distances_are_short() -> None:
    assert [plain(v) for v in (0.0, 0.0514, 999.9, 1000.0, 30212351421.135, INF)] == ["0.000", "0.051", "999.900", "1.00e+03", "3.02e+10", "inf"]
    assert "relative L2 1.00e+10, cosine" in str(compare(bf16(1e10), bf16(1.0)))


def test_a_region_of_all_tokens_says_so() -> None:
    for rows, words in ((2, "all 2 tokens"), (1, "token 3")):
        mask = torch.zeros(2, 8, dtype=torch.bool)
        mask[:rows, 4:] = True
        assert Region(mask, torch.arange(rows), torch.arange(4, 8)).text(torch.tensor([3, 5])) == f"{words}, columns 4 to 7 of 8"


@pytest.mark.parametrize(("a", "b", "ulps", "why"), [
    (0x3F80, 0x3F81, 1, "1 and its neighbour 1 + 2^-7"),
    (0x3F80, 0x3F7F, 1, "across a power of two"),
    (0x3F80, 0x4000, 128, "1 and 2: 128 steps of 2^-7"),
    (0xBF80, 0xBF81, 1, "-1 and the next below"),
    (0x0000, 0x0001, 1, "0 and the smallest subnormal"),
    (0x0000, 0x8000, 1, "+0 and -0 have different bits: one apart"),
    (0x0001, 0x8001, 3, "across zero: 0x0001, +0, -0, 0x8001"),
    (0x3F80, 0xBF80, 2 * 0x3F80 + 1, "1 and -1"),
    (0x7F7F, 0xFF7F, 2 * 0x7F7F + 1, "the two ends")])
def test_ulps_counted_by_hand(a: int, b: int, ulps: int, why: str) -> None:
    for got, want in ((a, b), (b, a)):
        c = compare(from_bits(got, 0x4040), from_bits(want, 0x4040))
        assert (c.differing, c.max_ulps, c.bit_identical) == (1, ulps, False), why


@settings(max_examples=60, deadline=None)
@given(st.integers(-127, 127), st.integers(-127, 127), st.sampled_from((torch.bfloat16, torch.float16, torch.float32)))
def test_ulps_of_subnormals_are_multiples_of_the_smallest(m: int, n: int, dtype: torch.dtype) -> None:
    """Subnormals are evenly spaced, so m and n times the smallest are |m - n| apart; one more where -0 lies between."""
    smallest = {torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24, torch.float32: 2.0**-149}[dtype]
    a, b = (torch.tensor([k * smallest], dtype=torch.float64).to(dtype) for k in (m, n))
    assert compare(a, b).max_ulps == abs(m - n) + ((m < 0) != (n < 0))


@settings(max_examples=40, deadline=None)
@given(st.floats(-2.0**100, 2.0**100, width=32).filter(lambda v: abs(v) > 1e-30), st.integers(0, 20))
def test_ulps_are_steps_of_nextafter(start: float, steps: int) -> None:
    x = y = np.float32(start)
    for _ in range(steps):
        y = np.nextafter(y, np.float32(np.inf))
    assert compare(torch.tensor([x]), torch.tensor([y])).max_ulps == steps


def test_signed_zero_is_a_difference_of_bits_and_not_of_values() -> None:
    c = compare(bf16(0.0, 2.0), bf16(-0.0, 2.0))
    assert not c.bit_identical and c.masks_equal and c.relative_l2 == 0.0 and c.cosine == 1.0


@pytest.mark.parametrize(("got", "want", "equal"), [
    ((NAN, 1.0), (NAN, 1.0), True), ((NAN, 1.0), (1.0, NAN), False), ((NAN, 1.0), (INF, 1.0), False), ((INF, 1.0), (INF, 1.0), True),
    ((INF, 1.0), (-INF, 1.0), False), ((INF, 1.0), (1.0, 1.0), False), ((1.0, 1.0), (-INF, 1.0), False), ((-INF, NAN), (-INF, NAN), True)])
def test_masks_come_first(got: tuple[float, ...], want: tuple[float, ...], equal: bool) -> None:
    c = compare(bf16(*got), bf16(*want))
    assert c.masks_equal == equal == c.bit_identical
    assert ("NaN or inf in other places" in str(c)) == (not equal)


def test_nan_payloads_count_as_equal() -> None:
    assert compare(from_bits(0x7FC0, 0x3F80), from_bits(0xFFFF, 0x3F80)).bit_identical


def test_numbers_are_over_elements_finite_in_both() -> None:
    """[3, nan, inf, 4] and [3, 100, 100, 2]: over (3, 4) and (3, 2): cosine 17 / (5 sqrt 13), ratio 5 / sqrt 13, L2 2 / sqrt 13."""
    c = compare(torch.tensor([3.0, NAN, INF, 4.0]), torch.tensor([3.0, 100.0, 100.0, 2.0]))
    assert c.elements == 4 and c.differing == 3 and not c.masks_equal
    assert c.cosine == pytest.approx(17 / (5 * math.sqrt(13)), rel=1e-12)
    assert c.norm_ratio == pytest.approx(5 / math.sqrt(13), rel=1e-12)
    assert c.relative_l2 == pytest.approx(2 / math.sqrt(13), rel=1e-12)
    assert c.max_ulps == 1 << 23  # 2 and 4 are one binade apart: 2^23 floats


@pytest.mark.parametrize("factor", [2.9e4, 0.5, -1.0])
def test_a_wrong_global_scale_keeps_the_cosine(factor: float) -> None:
    """So cosine alone sees nothing: norm ratio and relative L2 do."""
    want = torch.randn(64, generator=torch.Generator().manual_seed(1))
    c = compare(want * factor, want)
    assert c.cosine == pytest.approx(math.copysign(1.0, factor), abs=1e-12)
    assert c.norm_ratio == pytest.approx(abs(factor), rel=1e-6)
    assert c.relative_l2 == pytest.approx(abs(factor - 1), rel=1e-6)


def test_relative_l2_is_relative_to_want() -> None:
    """got [1, 2, 2], want [1, 0, 0]: distance sqrt 8, |want| 1; the other way round sqrt 8 / 3."""
    a, b = torch.tensor([1.0, 2.0, 2.0]), torch.tensor([1.0, 0.0, 0.0])
    assert compare(a, b).relative_l2 == pytest.approx(math.sqrt(8)) and compare(b, a).relative_l2 == pytest.approx(math.sqrt(8) / 3)
    assert compare(a, b).norm_ratio == pytest.approx(3.0) and compare(b, a).norm_ratio == pytest.approx(1 / 3)


def test_where_a_number_is_undefined() -> None:
    zeros, ones = torch.zeros(4), torch.ones(4)
    c = compare(ones, zeros)
    assert math.isnan(c.cosine) and math.isnan(c.norm_ratio) and c.relative_l2 == INF
    c = compare(zeros, ones)
    assert math.isnan(c.cosine) and c.norm_ratio == 0.0 and c.relative_l2 == 1.0
    c = compare(zeros, zeros)
    assert c.bit_identical and c.relative_l2 == 0.0 and math.isnan(c.cosine)
    c = compare(torch.full((4,), NAN), ones)
    assert not c.masks_equal and c.max_ulps == 0 and c.differing == 4


def test_no_overflow_in_the_norms() -> None:
    """float32 near its end: the squares overflow float32, not float64."""
    x = torch.full((8,), 3e38)
    c = compare(x, x / 2)
    assert c.norm_ratio == pytest.approx(2.0, rel=1e-6) and c.cosine == pytest.approx(1.0)


def test_different_dtypes_have_values_but_no_ulps() -> None:
    c = compare(bf16(1.0, 2.0), torch.tensor([1.0, 2.0]))
    assert (c.differing, c.max_ulps, c.bit_identical, c.relative_l2) == (-1, -1, False, 0.0)
    assert "ulp" not in str(c) and "-1" not in str(c)


def test_views_and_strides() -> None:
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(2))
    assert compare(x.T, x.T.contiguous()).bit_identical
    assert compare(x[::2], x[::2].clone()).bit_identical


def test_shapes_must_be_equal() -> None:
    with pytest.raises(MxdebugError, match=r"expected shape \[4\], got shape \[2, 2\]"):
        compare(torch.zeros(2, 2), torch.zeros(4))


def test_the_text_of_a_difference() -> None:
    c = Comparison(elements=10, differing=3, max_ulps=2, masks_equal=True, cosine=0.5, norm_ratio=2.0, relative_l2=0.25)
    assert str(c) == "3 of 10 elements differ, by up to 2 ulp; relative L2 0.2500, cosine 0.5000, norm ratio 2.0000"
