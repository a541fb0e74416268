"""Where an output is wrong: errors by token, expert and column, and patterns that are there, not those that chance makes."""

from __future__ import annotations

import functools
import itertools
import math

import pytest
import test_path_faults
import torch
from making import situation
from torch import Tensor

import mxdebug
from mxdebug import recorded
from mxdebug.contracts import find
from mxdebug.errors import MxdebugError
from mxdebug.faults import FAULTS
from mxdebug.layouts import SWIZZLE_128x4
from mxdebug.reference import EXACT, forward
from mxdebug.views import chances, output_error, periods
from mxdebug.views.output_error import ERROR, LOST, WORSE, ZERO, points
from mxdebug.views.periods import ALIKE, FEW, PERIOD, STRETCH


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def planted(size: int, period: int, residues: set[int], seed: int = 0) -> Tensor:
    """Errors around 1, around 2 at these residues."""
    at = torch.tensor([i % period in residues for i in range(size)])
    return 1 + 0.1 * normal(size, seed=seed).abs() + at.double()


# -- patterns ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "period", "residues", "worse"), [
    (384, 2, {1}, ((1, 1),)), (384, 4, {3}, ((3, 3),)), (384, 32, set(range(1, 31)), ((1, 30),)), (384, 8, {1, 2, 5}, ((1, 2), (5, 5))),
    (2880, 64, set(range(32, 64)), ((32, 63),)), (1000, 128, {0, 127}, ((0, 0), (127, 127))), (90, 3, {0}, ((0, 0),)),
])
def test_a_planted_period_is_found(size: int, period: int, residues: set[int], worse: periods.Ranges) -> None:
    p = periods.find(planted(size, period, residues))
    assert (p.kind, p.period, p.worse) == (PERIOD, period, worse) and p.chance < -3
    assert p.mask().tolist() == [i % period in residues for i in range(size)]
    assert 2 <= p.levels[0] <= 2.3 and 1 <= p.levels[1] <= 1.3


def test_a_multiple_of_the_period_is_not_reported() -> None:
    """What repeats every 4 repeats every 8, 16 ... too: the smallest says it."""
    assert {periods.find(planted(size, 4, {0, 1}, seed)).period for size in (128, 512, 2880) for seed in range(3)} == {4}


@pytest.mark.parametrize(("first", "last"), [(0, 63), (128, 199), (77, 140)])
def test_a_stretch_is_found(first: int, last: int) -> None:
    values = 1 + 0.1 * normal(200).abs()
    values[first: last + 1] += 1
    p = periods.find(values)
    assert (p.kind, p.period) == (STRETCH, 0) and p.mask().nonzero().flatten().tolist() == list(range(first, last + 1))
    values[first: last + 1] = math.inf  # how large they are does not count
    assert periods.find(values).mask().equal(p.mask())


def test_chance_alone_shows_nothing() -> None:
    """400 looks at values without a pattern, light- and heavy-tailed: at 1 alarm in 1000 looks, 3 or more have a chance of 0.8%."""
    alarms = sum(periods.find(f(normal(n, seed=seed)).abs()).kind != ALIKE
                 for seed in range(100) for n in (48, 384) for f in (torch.Tensor.exp, torch.Tensor.reciprocal))
    assert alarms <= 2
    loose = sum(periods.find(normal(48, seed=seed).abs(), alarms=0.5).kind != ALIKE for seed in range(100))
    assert 5 <= loose <= 50  # the bound is an upper one, and not an empty one


@pytest.mark.parametrize("wrong", [1, 2, 5, 20, 100])
def test_a_few_wrong_columns_anywhere_show_nothing(wrong: int) -> None:
    """Of 384 columns; with ties, F would claim 14 to 62 of 100."""
    claims = 0
    for seed in range(30):
        values = torch.zeros(384, dtype=torch.float64)
        values[torch.randperm(384, generator=torch.Generator().manual_seed(seed))[:wrong]] = 0.1 + normal(wrong, seed=seed).abs()
        claims += periods.find(values).kind in (PERIOD, STRETCH)
    assert claims == 0  # 1 in 1000 looks at most


@pytest.mark.parametrize("first", [0, 200, 376])
def test_a_few_adjacent_wrong_columns_are_a_stretch(first: int) -> None:
    values = torch.zeros(384, dtype=torch.float64)
    values[first: first + 8] = 0.5 + normal(8).abs()
    p = periods.find(values)
    assert (p.kind, p.worse, p.hits) == (STRETCH, ((first, first + 7),), (8, 0)) and p.text("column").startswith("only columns ")
    values[100] = 3.0  # one more, elsewhere: "only" would not be true
    assert periods.find(values).text("column").startswith("no period; worse: columns ")
    assert periods.find(values).text("column").endswith(", the others 0 but for 1 of 376")


def test_where_less_than_half_of_a_residue_is_wrong_the_numbers_say_so() -> None:
    """Every second of the columns with c % 8 in 3: their median is 0, as that of all others."""
    values = torch.zeros(1000, dtype=torch.float64)
    hit = [8 * i + 3 for i in range(125) if i in {0, 1, 3, 4, 6, 11, 12, 14, 19, 23, 24, 30, 37, 38, 39, 47, 52, 53, 61, 66, 70, 75, 77, 81,
                                                  82, 83, 90, 94, 97, 101, 102, 103, 110, 115, 120, 121, 122, 124}]
    values[hit] = 1 + normal(len(hit)).abs()
    assert periods.find(values).text("column") == "period 8: columns with c % 8 in 3: 38 of 125 wrong, of the others 0 of 875"


def test_the_worst_ones_are_looked_at_apart_from_all_that_are_wrong() -> None:
    """A quarter of all columns is wrong a little, anywhere; 22 at one residue of 9 are wrong altogether."""
    values = torch.zeros(198, dtype=torch.float64)
    values[torch.randperm(198, generator=torch.Generator().manual_seed(3))[:50]] = 1e-3
    values[4::9] = 1.0
    p = periods.find(values)
    assert p.levels == (1.0, 0.0)
    assert p.text("column") == "period 9: columns with c % 9 in 4: 22 of 22 among the worst, of the others 0 of 176"
    values[[4, 40, 76, 85, 94, 103, 112, 121, 139, 157, 166, 184]] = 0  # 12 of the 22 are not: the median is 0
    assert periods.find(values).text("column") == "period 9: columns with c % 9 in 4: 10 of 22 among the worst, of the others 0 of 176"


def test_ties_at_another_level_than_0() -> None:
    values = torch.full((384,), 2.0, dtype=torch.float64)
    values[torch.arange(5, 384, 16)] = 3.0
    assert periods.find(values).text("column") == "period 16: columns with c % 16 in 5: 24 of 24 worse than most, of the others 0 of 360"
    values = torch.full((384,), 2.0, dtype=torch.float64)
    values[torch.arange(5, 384, 16)] = 1.0
    p = periods.find(values)
    assert p.worse == ((0, 4), (6, 15))
    assert p.text("column").endswith("in 0..4, 6..15: 360 of 360 no better than most, of the others 0 of 24")


def test_the_hypergeometric_tail_against_counting() -> None:
    """Every way to draw 4 of 9, of which 3 are marked."""
    ways = list(itertools.combinations(range(9), 4))
    for hits in range(4):
        share = sum(sum(i < 3 for i in way) >= hits for way in ways) / len(ways)
        assert chances.log_tail(9, 3, 4, hits) == pytest.approx(math.log(share), abs=1e-12)
    assert chances.log_tail(9, 3, 4, 4) == -math.inf


@pytest.mark.parametrize(("size", "wrong"), [(40, 40), (64, 64), (384, 384), (64, 20), (384, 60), (384, 8)])
def test_what_would_show_shows(size: int, wrong: int) -> None:
    """Of values without a pattern it is said which periods would have shown: each of them does, where one residue holds the worst."""
    values = torch.zeros(size, dtype=torch.float64)
    values[torch.randperm(size, generator=torch.Generator().manual_seed(1))[:wrong]] = 1 + normal(wrong).abs()
    p = periods.find(values)
    first, last = p.shown
    assert p.kind == ALIKE and 2 <= first < last <= size // 2 and f"to {last} would show" in p.text("column")
    worst = values.sort(descending=True).values
    for period in (q for q in periods.candidates(size) if first <= q <= last):
        at = torch.arange(size) % period == period - 1  # the last residue: the one with the fewest positions
        planted = torch.empty_like(values)
        rest = worst[int(at.sum()):]
        planted[at], planted[~at] = worst[: int(at.sum())], rest[torch.randperm(len(rest), generator=torch.Generator().manual_seed(period))]
        assert periods.find(planted).kind in (PERIOD, STRETCH), period


def test_without_power_nothing_is_promised() -> None:
    """Of 64 values, 4 at one residue of 16 cannot stand out: C(64, 4) = 635,376 ways, and 7472 stretches that are looked at."""
    assert periods.find(normal(64).abs()).shown[1] < 16
    values = torch.zeros(384, dtype=torch.float64)
    values[[5, 300]] = 1.0
    assert periods.find(values).text("column") == "2 of 384 columns wrong: too few to show a pattern"


def test_log_chance_against_closed_forms() -> None:
    """I_x(a, 1) = x^a: two degrees between; I_x(1, b) = 1 - (1 - x)^b: two within. Beta(1/2, 1/2) is the arcsine law."""
    for share in (0.01, 0.3, 0.77, 0.999):
        for n in (3, 10, 501):
            assert periods.log_chance(share, 2, n) == pytest.approx(n / 2 * math.log(1 - share), rel=1e-9)
            assert periods.log_chance(share, n, 2) == pytest.approx(math.log1p(-share ** (n / 2)), rel=1e-6)
        assert periods.log_chance(share, 1, 1) == pytest.approx(math.log(1 - 2 / math.pi * math.asin(math.sqrt(share))), rel=1e-9)
    assert periods.log_chance(0.0, 3, 10) == 0 and periods.log_chance(0.5, 3, 0) == 0


def test_stretches_against_all_of_them() -> None:
    """Every contiguous stretch, one by one."""
    for seed, n in ((0, 2), (1, 7), (2, 70)):
        sums, counts = normal(n, seed=seed), torch.ones(n, dtype=torch.float64)
        sums -= sums.mean()
        every = {(a, b): float(sums[a:b].sum()) ** 2 * n / ((b - a) * (n - b + a))
                 for a in range(n) for b in range(a + 1, n + 1) if b - a < n}
        start, stop, share = periods._stretch(sums, counts, 1.0)
        assert share == pytest.approx(max(every.values())) == pytest.approx(every[start, stop])


@pytest.mark.parametrize(("values", "kind", "text"), [
    ([0.0] * 50, periods.ZERO, "no error in any column"), ([], periods.ZERO, "no error in any column"),
    ([0.3], FEW, "1 columns are too few to show a pattern"), ([0.3] * 6, FEW, "6 columns are too few to show a pattern"),
    ([0.3] * 64, ALIKE, "no pattern"),
    ([0.0, 0.5] * 32, PERIOD, "period 2: odd columns: 0.500, the others 0"),
    ([0.5, 0.0, 0.0] * 32, PERIOD, "period 3: columns with c % 3 in 0: 0.500, the others 0"),
    ([0.0] * 60 + [0.25] * 60, STRETCH, "only columns 60 on: 0.250, the others 0"),
    ([2.0] * 60 + [math.inf] * 60, STRETCH, "no period; worse: columns 60 on: inf, the others 2.000"),
])
def test_patterns_in_words(values: list[float], kind: str, text: str) -> None:
    p = periods.find(torch.tensor(values, dtype=torch.float64))
    assert p.kind == kind and p.text("column") == text


def test_what_cannot_be_looked_at() -> None:
    for values in (torch.tensor([1.0, math.nan]), torch.ones(2, 2)):
        with pytest.raises(MxdebugError, match="count NaN apart"):
            periods.find(values)


@pytest.mark.parametrize(("value", "text"), [(0, "0"), (0.0004, "4e-04"), (0.5, "0.500"), (116508470.45, "1e+08"), (math.inf, "inf")])
def test_numbers(value: float, text: str) -> None:
    assert periods.number(value) == text


# -- errors -----------------------------------------------------------------------------------------------------------


def test_columns_that_are_equally_bad_are_counted() -> None:
    want = torch.ones(2, 100)
    got = want.clone()
    got[:, 7::20] = 0  # columns 7, 27, 47, 67 and 87 are gone
    said = str(output_error.output_error(got, want)).splitlines()
    at = next(i for i, line in enumerate(said) if "worst columns" in line)
    assert said[at + 1: at + 5] == ["    7                  1.000", "    27                 1.000", "    47                 1.000", "    and 2 more as bad"]
    # of 64 columns 3 or 4 are gone: columns 0-63 lose 7, 27, 47 and columns 64-99 two of 36
    assert said[at + 5:] == ["  worst stretches", f"    {'64..99':<16}   0.236", f"    {'0..63':<16}   0.217"]  # sqrt(2/36), sqrt(3/64)


def test_errors_along_both_axes_and_by_expert() -> None:
    want = torch.tensor([[3.0, 4.0, 0.0], [3.0, 4.0, 0.0]])
    got = torch.tensor([[3.0, 4.0, 0.0], [6.0, 8.0, 0.0]])  # token 1 is twice as large
    e = output_error.output_error(got, want, torch.tensor([[0, 1], [1, -1]]))
    half = pytest.approx(math.sqrt(0.5))  # the last bit of a root is the machine's
    assert e.tokens.tolist() == [0, 1] and e.columns.tolist() == [half, half, 0]  # sqrt(9 / 18), sqrt(16 / 32)
    assert [(x.expert, x.tokens, x.error, x.others) for x in e.experts] == [(0, 1, 0, 1), (1, 2, half, None)]  # -1 is no expert
    assert e.comparison.relative_l2 == half and e.worst_blocks() == [(0, 2, half)]
    assert e.worst_columns() == [(0, half), (1, half), (2, 0.0)] and "worst stretches" not in str(e)
    assert "    1                  0.707       2  -" in str(e).splitlines()  # all tokens selected it: there are no others


def test_nan_and_inf_are_counted_apart() -> None:
    want = torch.ones(3, 4)
    got = want.clone()
    got[0, 1], got[1, 1], got[2, 1], got[1, 3] = math.nan, math.inf, math.nan, 3
    e = output_error.output_error(got, want)
    assert e.bad_tokens.tolist() == [1, 1, 1] and e.bad_columns.tolist() == [0, 3, 0, 0]
    assert e.tokens.tolist() == [0, math.sqrt(4 / 3), 0]  # of the 3 finite columns, each of size 1, one is off by 2
    assert e.columns.tolist() == [0, math.inf, 0, math.sqrt(4 / 3)]  # nothing of column 1 is known
    assert "NaN or inf: 3 of 12" in str(e) and "NaN or inf in 3 tokens, 1 column" in str(e)
    same = output_error.output_error(got, got)  # NaN where NaN is wanted is right
    assert same.bad_columns.tolist() == [0] * 4 and same.comparison.bit_identical
    zero = output_error.output_error(torch.ones(2, 2), torch.zeros(2, 2))
    assert zero.tokens.tolist() == [math.inf, math.inf]  # no relative error of 0


def test_columns_that_were_not_cut_are_counted_apart() -> None:
    want = normal(5, 60)
    got = torch.cat([want, torch.zeros(5, 4)], 1)
    got[2, 61] = 1
    e = output_error.output_error(got, want)
    assert e.extra == (4, 1) and "4 columns more than wanted, from 60 on, 1 of them not 0" in str(e) and e.comparison.relative_l2 == 0


@pytest.mark.parametrize(("got", "want"), [((2, 3), (2, 4)), ((2, 3), (3, 3))])
def test_outputs_of_two_calls_are_refused(got: tuple[int, ...], want: tuple[int, ...]) -> None:
    with pytest.raises(MxdebugError, match="outputs of two different calls"):
        output_error.output_error(torch.zeros(got), torch.zeros(want))
    with pytest.raises(MxdebugError, match="those of another call"):
        output_error.output_error(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(3, 1).long())


def test_what_is_no_output() -> None:
    for t in (torch.zeros(2, 3, 4), torch.zeros(6), [[1.0]]):
        with pytest.raises(MxdebugError, match="a tensor with two dimensions"):
            output_error.output_error(t, t)
    with pytest.raises(MxdebugError, match="at least one column"):
        output_error.output_error(torch.zeros(2, 0), torch.zeros(2, 0))
    with pytest.raises(MxdebugError, match="the router's weights, not its ids"):
        output_error.output_error(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 1))


@pytest.mark.parametrize("size", [1e-200, 1e200])
def test_sizes_whose_squares_leave_float64(size: float) -> None:
    e = output_error.output_error(torch.full((2, 3), 1.5 * size, dtype=torch.float64), torch.full((2, 3), size, dtype=torch.float64))
    assert str(e).startswith("relative L2 0.500, cosine 1.000, norm ratio 1.500;") and e.tokens.tolist() == pytest.approx([0.5, 0.5])


def test_nan_in_both_outputs_is_said() -> None:
    want = torch.ones(2, 4)
    want[0] = math.nan
    assert "NaN or inf: 0 of 8, and 4 in both outputs" in str(output_error.output_error(want, want))


def test_nan_is_attributed_to_its_expert() -> None:
    """All that expert 2 gives is NaN; expert 0 shares one of its tokens, and its other one is off by half."""
    want, experts = torch.ones(4, 128), torch.tensor([[2, 1], [0, 2], [0, 1], [1, 3]])
    got = want.clone()
    got[:2], got[2] = math.nan, 1.5
    e = output_error.output_error(got, want, experts)
    assert [(x.expert, x.error, x.bad) for x in e.worst_experts()] == [(2, math.inf, 256), (0, 0.5, 128), (1, pytest.approx(math.sqrt(1 / 8)), 128)]
    lines = str(e).splitlines()
    at = next(i for i, line in enumerate(lines) if "worst experts" in line)
    assert lines[at + 1] == "    2                    inf       2         256  0.354"  # the others: sqrt((128 / 4) / (2 * 128))
    assert output_error.points(torch.tensor([x.error for x in e.experts]), torch.tensor([x.bad for x in e.experts])).kinds[2] == LOST
    got = want.clone()
    got[1, 70], got[:, :64] = math.nan, 2
    e = output_error.output_error(got, want)  # one NaN comes before any error
    assert e.worst_blocks() == [(64, 127, 0.0), (0, 63, 1.0)] and e.worst_columns(2) == [(70, 0.0), (0, 1.0)]


# -- what theory predicts ---------------------------------------------------------------------------------------------


@functools.cache
def right() -> tuple[object, Tensor]:
    s = situation("gptoss", tokens=32)
    return s, s.build()[1]


@pytest.mark.parametrize(("fault", "key", "period", "worse"), [
    # A shuffle in blocks of 8 b rows moves row b i + j to 8 j + i. They are the same for (b - 1) i = 7 j alone: the first and last row.
    ("rows-shuffled-32", "w2", 32, ((1, 30),)), ("rows-shuffled-16", "w2", 16, ((1, 14),)),
    ("rows-shuffled-32", "w2_scale", 32, ((1, 30),)),
])
def test_shuffled_rows_of_w2_are_periods_of_columns(fault: str, key: str, period: int, worse: periods.Ranges) -> None:
    s, want = right()
    e = output_error.output_error(FAULTS[fault].injected(s, (key,)).build()[1], want, s.experts)
    assert (e.by_column.kind, e.by_column.period, e.by_column.worse) == (PERIOD, period, worse)
    assert e.by_column.levels[1] == 0 and e.columns[0] == 0 and not e.may_be_own
    assert e.by_token.kind in (ALIKE, FEW) and e.extra[0] == 0
    residues = output_error.folded(e)
    assert len(residues.x) == period and [x for x, kind in zip(residues.x, residues.kinds) if kind == ZERO] == [0, period - 1]


def test_linear_scales_read_as_128x4_have_period_128() -> None:
    """With 4 scales a row, row 32 q + m of a tile gets those of row 4 m + q: the same for 31 q = 3 m alone, rows 0 and 127."""
    g = torch.Generator().manual_seed(0)
    w, x = torch.randn(1024, 4, 8, generator=g), torch.randn(16, 32, generator=g)
    meant = torch.randint(120, 136, (1024, 4), generator=g, dtype=torch.uint8)
    want, got = (x @ (w * torch.exp2(s.float() - 127)[..., None]).reshape(1024, 32).T
                 for s in (meant, SWIZZLE_128x4.unpack(meant.flatten(), 1024, 4)))
    e = output_error.output_error(got, want)
    assert (e.by_column.kind, e.by_column.period, e.by_column.worse) == (PERIOD, 128, ((1, 126),))


def test_scales_swizzled_before_an_exchange_are_a_stretch_of_tokens() -> None:
    """Two ranks of 80 tokens, each padded to a tile of 128: rank 0's padding stands where the kernel looks for tokens from 80 on."""
    s = test_path_faults.right("nvfp4/FLASHINFER_CUTLASS", "ModelOpt NVFP4", tokens=160)
    e = output_error.output_error(FAULTS["x-scales-before-exchange"].injected(s).build()[1], s.build()[1], s.experts)
    assert e.by_token.kind == STRETCH and int(e.by_token.mask().nonzero()[0]) == 80 and e.tokens[:80].max() == 0


def test_one_wrong_expert_stands_out() -> None:
    s, want = right()
    got = want.clone()
    hit = (s.experts == 2).any(1)
    got[hit] *= 1.5
    e = output_error.output_error(got, want, s.experts)
    assert max(e.experts, key=lambda x: x.error).expert == 2
    two = next(x for x in e.experts if x.expert == 2)
    assert abs(two.error - 0.5) <= 1.5 * 2**-9  # bf16 stores 1.5 times a number within 2^-9 of itself
    assert two.others == 0 and two.tokens == int(hit.sum())


def test_a_pattern_of_the_weights_is_called_their_own() -> None:
    want = normal(40, 256)
    want[:, ::4] *= 0.01  # these columns are small by themselves: the same noise is a larger relative error there
    e = output_error.output_error(want + 0.01 * normal(40, 256, seed=1), want)
    assert e.by_column.period == 4 and e.may_be_own and "the wanted output is smaller there, too" in str(e)


def test_one_absolute_error_on_sizes_that_grow_is_called_their_own() -> None:
    """No stretch of the errors is one of the sizes, exactly: the middle of a ramp is anywhere."""
    ramp = torch.linspace(1, 3, 384, dtype=torch.float64)
    want, noise = normal(16, 384) * ramp, 0.1 * normal(16, 384, seed=1)
    e = output_error.output_error(want + noise, want)
    assert e.by_column.kind == STRETCH and e.own == ("", "smaller") and "smaller there, too: maybe the weights' own pattern" in str(e)
    e = output_error.output_error((want + noise).T, want.T)
    assert e.by_token.kind == STRETCH and e.own == ("smaller", "") and "smaller there, too: maybe the tokens' own sizes" in str(e)
    want = normal(16, 384) * (1 + 0.1 * (ramp < 2))  # a tenth larger there: far too little for an error of 10 times as much
    e = output_error.output_error(want + noise * (1 + 9 * (ramp < 2)), want)
    assert e.by_column.kind == STRETCH and e.own == ("", "")


def test_nan_is_no_pattern_of_the_weights() -> None:
    """Columns that are NaN have a wanted output like all others, whatever is known of their error."""
    want = normal(16, 384)
    got = want + 0.05 * normal(16, 384, seed=1)
    got[:, 3::7] = math.nan
    e = output_error.output_error(got, want)
    assert (e.by_column.period, e.by_column.worse) == (7, ((3, 3),)) and not e.may_be_own and "own pattern" not in str(e)
    assert e.by_column.text("column") == "period 7: columns with c % 7 in 3: 55 of 55 with NaN or inf, of the others 0 of 329"
    exact = want.clone()
    exact[2, 3::7] = math.nan  # what is finite is right: medians would say "0, the others 0"
    assert output_error.output_error(exact, want).by_column.text("column").endswith("55 of 55 with NaN or inf, of the others 0 of 329")


@pytest.mark.parametrize("name", ["c01", "c03", "c05", "c13"])
def test_recorded_calls(name: str) -> None:
    """The relative L2 error that was recorded, and no pattern: these faults strike all rows alike."""
    r = recorded.call(name)
    call = mxdebug.load_call(r.path)
    seen = find(call.function, call.arguments).see(call.arguments)
    layer = mxdebug.open_checkpoint(r.checkpoint_path).layer().layer.part(seen.parallel)
    want = forward(seen.x[:, : layer.hidden].double(), seen.experts, seen.router, layer, parallel=seen.parallel, roundings=EXACT,
                   compute=torch.float64).output
    e = output_error.output_error(call.outputs[0], want, seen.experts)
    assert r.off_by is None or abs(e.comparison.relative_l2 - r.off_by) <= 0.005  # off_by has two decimals
    assert e.by_column.kind in (ALIKE, FEW) and e.by_token.kind in (ALIKE, FEW) and int(e.bad_columns.sum()) == 0


# -- drawing ----------------------------------------------------------------------------------------------------------


def test_points_are_at_most_512_and_keep_the_worst() -> None:
    values = torch.linspace(0, 1, 2880, dtype=torch.float64)
    values[100] = 7
    p = points(values)
    assert p.pooled == 6 and len(p.x) == 480 and p.x[16] == 100 and p.error[16] == 7 and p.x[0] == 5  # 96 to 101 are group 16
    bad = torch.zeros(2880, dtype=torch.int64)
    bad[97] = 1
    lost = points(values, bad)
    assert (lost.x[16], lost.kinds[16]) == (97, LOST)  # NaN is worse than 7
    kinds = points(torch.tensor([0.0, 1.0, 2.0, math.inf]), None, torch.tensor([False, False, True, False])).kinds
    assert kinds == (ZERO, ERROR, WORSE, LOST)
    assert points(torch.zeros(0, dtype=torch.float64)).x == ()


def test_the_drawing_says_what_it_shows() -> None:
    want = normal(64, 1100)
    got = want.clone()
    got[:, 3::4] *= 1.5
    got[:, 3] = 3 * want[:, 3]
    got[5, 8] = math.nan
    e = output_error.output_error(got, want, torch.arange(64)[:, None] % 8)
    figure = output_error.draw(e)
    assert figure.to_json() == output_error.draw(output_error.output_error(got, want, torch.arange(64)[:, None] % 8)).to_json()
    says = figure.layout.meta["says"]
    assert "a point is the largest of 3 columns" in says
    assert "period 4: columns with c % 4 in 3: 0.500, the others 0 but for 1 of 825" in says
    assert says in [t.text.replace("<br>", " ") for t in figure.layout.annotations]
    assert output_error.folded(e).error == pytest.approx((0, 0, 0, 0.5))  # medians: column 3 alone is off by 2
    named = {t.name: t for t in figure.data if t.showlegend}
    assert set(named) == {ERROR, ZERO, LOST, "columns with c % 4 in 3"} and len({t.marker.symbol for t in named.values()}) == 4
    assert all(len(t.x) <= 512 for t in figure.data)


@pytest.mark.parametrize("shape", [(1, 1), (1, 2880), (300, 1), (0, 64)])
def test_any_shape_is_drawn(shape: tuple[int, int]) -> None:
    e = output_error.output_error(torch.ones(shape), torch.zeros(shape))
    assert output_error.draw(e).to_json() and str(e).startswith("relative L2")
