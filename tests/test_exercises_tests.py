"""The exercises of notebook 06: right answers, what each wrong one is said to mean, and answers that make no sense. And its two views."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mxdebug import MxdebugError
from mxdebug.diagnosis.floor import follows, rounding_floor
from mxdebug.exercises import EXERCISES, WIDTH
from mxdebug.exercises_tests import K, MISTAKES, SCALE_SHAPES, TESTS_EXERCISES, _shown, check, pairs
from mxdebug.faults import FAULTS, Situation
from mxdebug.formats import MXFP4, BlockTensor
from mxdebug.layouts import SM90_SCALE_FOLD
from mxdebug.metrics import compare
from mxdebug.recipes import recipe
from mxdebug.reference import Activation, MoELayer, Parallel
from mxdebug.views import scale_counts, verdicts

NOTEBOOK = Path(__file__).parent.parent / "notebooks" / "06_when_tests_lie.ipynb"


def flat(answer: Any) -> str:
    assert max(map(len, str(answer).splitlines())) <= WIDTH
    return " ".join(str(answer).split())


def test_they_are_registered() -> None:
    assert TESTS_EXERCISES.items() <= EXERCISES.items() and len(TESTS_EXERCISES) == 3


# -- block scales that can show where they stand ------------------------------------------------------------------------


def drawn(low: int, high: int) -> Callable[[int, int], Tensor]:
    return lambda rows, columns: torch.randint(low, high, (rows, columns), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)


def normal(rows: int, columns: int) -> Tensor:
    """The scales that torch.randn gives: 2^ceil(log2(largest / 6))."""
    largest = torch.randn(rows, columns, 32, generator=torch.Generator().manual_seed(0)).abs().amax(-1)
    return (127 + torch.ceil(torch.log2(largest / 6))).to(torch.uint8)


def by_column(rows: int, columns: int) -> Tensor:
    return (110 + torch.arange(columns) % 13).to(torch.uint8).expand(rows, columns)


def spread_by_row(rows: int, columns: int) -> Tensor:
    """Rows over 40 powers of two, blocks of a row over 10: no block is lost next to its neighbours."""
    return (100 + torch.arange(rows)[:, None] * 7 % 31 + torch.arange(columns) * 3 % 11).to(torch.uint8)


def strange(*size: int) -> Any:
    raise ZeroDivisionError("division by zero")


@pytest.mark.parametrize(("answer", "right", "says"), [
    (None, None, "give a function"), (..., None, "give a function"), (lambda r, c: None, None, "byte b is the scale 2^(b - 127)"),
    (lambda r, c: ..., None, "returns nothing yet"),
    (drawn(112, 127), True, "each of the 9 mistakes changes most of the bytes that it moves, in 3 sizes"), (spread_by_row, True, "RIGHT"),
    (lambda r, c: torch.full((r, c), 120, dtype=torch.uint8), False,
     f"nobody can see: {', '.join(MISTAKES)}. Every byte is right all the same"),
    (by_column, False, "nobody can see: not folded,"),
    (normal, False, "these change too few of those that they move: not folded (18%)"),
    (drawn(0, 256), False, "bytes are 0x00 or 0xFF, which this kernel reads as 0 and as inf"),
    (drawn(80, 140), False, "in one row the largest scale is 2^59 times the smallest"),
    (lambda r, c: torch.rand(r, c), False, "a block scale of MXFP4 is a uint8 byte, this is torch.float32"),
    (lambda r, c: [[1] * c] * r, False, "this is list"), (lambda r, c: 7, False, "this is int"),
    (lambda r, c: drawn(112, 127)(c, r), False, "for 512 rows and 12 columns the function gave the shape [12, 512]"),
    (lambda r, c: drawn(112, 127)(512, 12), False, "for 128 rows and 4 columns the function gave the shape [512, 12]"),
    (strange, False, "for 512 x 12 the function raised ZeroDivisionError: division by zero"),
    (lambda: 1, False, "raised TypeError"), (120, False, "raised TypeError"), ("scales", False, "raised TypeError"),
    (torch.zeros(2), False, "raised TypeError"),
])
def test_scales(answer: Any, right: bool | None, says: str) -> None:
    got = check("tests-scales", answer)
    assert got.right is right and says in flat(got), str(got)


def test_each_mistake_is_one() -> None:
    """With as good as all bytes different each mistake changes nearly every byte that it moves; with equal ones none."""
    for rows, columns in SCALE_SHAPES:
        different = torch.arange(rows * columns).reshape(rows, columns).mul(37).remainder(251).to(torch.uint8)
        assert min(_shown(different).values()) > 0.9
        assert set(_shown(torch.full((rows, columns), 9, dtype=torch.uint8)).values()) <= {0.0, 1.0}
    # rows 0 and 1 of 128 x 4 exchanged with the other half, by hand: the halves are 64 rows apart
    marks = torch.arange(128, dtype=torch.uint8)[:, None].expand(128, 4).contiguous()
    assert torch.equal(MISTAKES["halves not swapped"](marks), SM90_SCALE_FOLD.pack((marks + 64) % 128))
    # 0 2 4 ... and 1 3 5 ... are up and gate in the kernel's order; in the file's they alternate
    assert SM90_SCALE_FOLD.unpack(MISTAKES["rows still g0,u0,g1,u1"](marks), 128, 4)[:4, 0].tolist() == [0, 64, 1, 65]


# -- a criterion ------------------------------------------------------------------------------------------------------


def own(got: Tensor, want: Tensor, k: int) -> bool:
    """By hand: masks, then each token within ten floors."""
    a, b = got.double(), want.double()
    if not torch.equal(torch.isnan(a), torch.isnan(b)):
        return False
    a, b = a.nan_to_num(), b.nan_to_num()
    return bool(((a - b).norm(dim=1) <= 10 * rounding_floor(k) * b.norm(dim=1)).all())


@pytest.mark.parametrize(("answer", "right", "says"), [
    (None, None, "give a function"), (lambda *a: None, None, "rounding_floor(k) says how far rounding alone goes"),
    (lambda *a: ..., None, "nothing yet"),
    (follows, True, "passes all 5 right outputs and none of 11 wrong ones"), (own, True, "RIGHT"),
    (lambda got, want, k: torch.tensor(own(got, want, k)), True, "RIGHT"),
    (lambda *a: True, False, "11 of 11 wrong outputs pass, 0 of 5 right ones fail. passes: a NaN where none belongs (NaN or inf in"),
    (lambda *a: False, False, "0 of 11 wrong outputs pass, 5 of 5 right ones fail. fails, though it is right: the emulation of the right"),
    (lambda a, b, k: torch.allclose(a.float(), b.float(), atol=0.1, rtol=0.1, equal_nan=True), False,
     "passes: fault scales-linear, all outputs 2^-12 times as large"),
    (lambda a, b, k: compare(a, b).cosine > 0.97, False, "passes: 1.5 times too large (relative L2 0.5001, of the worst token 0.5007, cosine"),
    (lambda a, b, k: compare(a, b).masks_equal and 0.9 < compare(a, b).norm_ratio < 1.1, False, "passes: columns in the reverse order"),
    (lambda a, b, k: compare(a, b).masks_equal and compare(a, b).relative_l2 < rounding_floor(k), False,
     "1 of 11 wrong outputs pass, 0 of 5 right ones fail. passes: one of 2040 tokens is 2 % too large"),
    (lambda a, b, k: torch.equal(a, b), False, "4 of 5 right ones fail. fails, though it is right: two numbers of 2304"),
    (lambda a, b, k: own(a, b, k) and not torch.isnan(a).any(), False, "fails, though it is right: a number that is NaN in both"),
    (lambda a, b, k: compare(a, b).relative_l2, False, "the function returned float"),
    (lambda *a: "yes", False, "the function returned str"),
    (lambda a, b, k: a == b, False, "the function returned Tensor"), (lambda *a: 1, False, "the function returned int"),
    (strange, False, "raised ZeroDivisionError"), (lambda got, want: True, False, "raised TypeError"), (0.1, False, "raised TypeError"),
])
def test_criterion(answer: Any, right: bool | None, says: str) -> None:
    got = check("tests-criterion", answer)
    assert got.right is right and says in flat(got), str(got)


def test_a_learner_cannot_spoil_the_pairs() -> None:
    def spoils(got: Tensor, want: Tensor, k: int) -> bool:
        got.zero_(), want.zero_()
        return True

    check("tests-criterion", spoils)
    assert check("tests-criterion", follows).right


def test_the_pairs_are_what_they_say() -> None:
    right, wrong = [p for p in pairs() if p.right], [p for p in pairs() if not p.right]
    assert compare(right[0].got, right[0].want).bit_identical  # the emulation is what the H200 wrote
    flips = compare(right[1].got, right[1].want)
    assert (flips.differing, flips.max_ulps) == (2, 1) and flips.relative_l2 < rounding_floor(K)
    for p, factor in zip(right[2:4], (2.0**-12, 2.0**10)):  # a power of two changes no mantissa
        assert torch.equal(p.want.float(), right[0].want.float() * factor)
        assert compare(p.got, p.want).relative_l2 == pytest.approx(flips.relative_l2)
    assert float(next(p for p in wrong if "scales-linear" in p.what).want.abs().max()) < 0.1  # so that an absolute tolerance sees nothing
    one = wrong[-1]
    assert int((one.got != one.want).any(1).sum()) == 1 and compare(one.got, one.want).relative_l2 < rounding_floor(K)
    assert all(follows(p.got, p.want, K) == p.right for p in pairs())


# -- the fault that survives --------------------------------------------------------------------------------------------


def layer(bias: float | None) -> MoELayer:
    g = torch.Generator().manual_seed(0)

    def weight(rows: int, columns: int) -> BlockTensor:
        return BlockTensor(torch.randint(0, 256, (2, rows, columns // 2), generator=g, dtype=torch.uint8),
                           torch.randint(118, 123, (2, rows, columns // 32), generator=g, dtype=torch.uint8), MXFP4)

    weights = weight(128, 128), weight(128, 128), weight(128, 128)
    biases = [None if bias is None else (bias * torch.randn(2, 128, generator=g)).bfloat16() for _ in range(3)]
    return MoELayer(*weights, Activation("swiglu", *(torch.full((2,), v) for v in (1.702, 1.0, 7.0))), *biases)


def situation(bias: float | None, parallel: Parallel = Parallel(), only: int | None = None) -> Situation:
    g = torch.Generator().manual_seed(1)
    experts = torch.tensor([[0, 1], [1, 0], [0, 1]]) if only is None else torch.full((3, 1), only)
    x, router = torch.randn(3, 128, generator=g).bfloat16(), torch.full(experts.shape, 1.0 / experts.shape[1])
    r = recipe("vllm", "mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16", "gpt-oss")
    return Situation.right(r, layer(bias), x, experts.int(), router, parallel)


@pytest.mark.parametrize(("answer", "right", "says"), [
    (None, None, "the w2 bias is passed but not added. When would its output be the right one"), (..., None, "give a call"),
    (lambda: situation(1.0), True, "`follows` says no. With this call among its own, the fourth test notices this fault"),
    (lambda: situation(1.0, Parallel(2, 0)), True, "RIGHT"), (lambda: situation(1.0, Parallel(1, 0, 2, 1)), True, "RIGHT"),
    (lambda: situation(None), False, "stays invisible, bit for bit: its layer has no biases"),
    (lambda: situation(1.0, Parallel(2, 1)), False, "rank 1 of 2 must not add the down bias anyway"),
    (lambda: situation(0.0), False, "its down bias is all zeros"),
    (lambda: situation(1e-30), False, "too small to move a bf16 number"),
    (lambda: situation(1.0, Parallel(1, 0, 2, 1), only=0), False, "no token selects an expert of this rank"),
    (lambda: situation(3e-5), False, "no more than rounding may do"),
    (lambda: FAULTS["scales-linear"].injected(situation(1.0)), False, "wrong already, without the fault"),
    (lambda: situation, False, "is wanted, this is function"), (lambda: 3, False, "this is int"),
    (lambda: layer(1.0), False, "this is MoELayer"),
])
def test_survivor(answer: Any, right: bool | None, says: str) -> None:
    got = check("tests-survivor", answer() if callable(answer) else answer)
    assert got.right is right and says in flat(got), str(got)


# -- the notebook: what its prose says and no cell prints -------------------------------------------------------------


def squeezed(text: str) -> str:
    return " ".join(text.split())


def test_the_notebook_says_what_its_cells_print() -> None:
    """Numbers that the prose takes from outputs: if a cell prints other ones, the prose must follow."""
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    found = [o for c in cells if c["cell_type"] == "code" for o in c["outputs"]]
    outputs = "\n".join("".join(o.get("text", o.get("data", {}).get("text/plain", ""))) for o in found)
    prose = "\n".join("".join(c["source"]) for c in cells if c["cell_type"] == "markdown")
    for said, printed in (
        ("Four tests are green for a converter that does nothing", "forgotten, against the H200: relative L2 1.57"),
        ("nine times in ten the largest", "blocks of 32 normal numbers 91% have their largest between 1.5 and 3"),
        ("(c) 3", "torch.randn   3 different scales"),
        ("about 0.2; SwiGLU makes 0.02 of that; the second GEMM makes 0.05", "gate and up 0.21, after SwiGLU 0.022, after w2 0.047,"),
        ("All outputs are smaller than 0.1", "largest 0.028"),
        ("0.008 or less, the forgotten fold passes", "0.002   0.008   0.031    0.12     0.49     2        8        31"),
        ("where they are 31, the right kernel fails", "right conversion  " + 7 * "passes " + "false alarm"),
        ("a lost alpha, which bends every activation a little, is missed up to 0.12", "alpha lost        " + 4 * "missed " + "noticed"),
        ("relative L2 of 0.0001 was all", "scales-flushed              1.000       1.000       0.0001"),
        ("(c) above 0.99", "0.9958"),
        ("the fourth all but three", "notices 67 of 70"),
        ("The first notices about six in ten", "notices 44 of 70"),
    ):
        assert said in prose, said
        assert squeezed(printed) in squeezed(outputs), printed


# -- the two views ------------------------------------------------------------------------------------------------------


def test_verdict() -> None:
    want = torch.ones(2, 3, dtype=torch.bfloat16)
    other = want * 2
    lenient: verdicts.Test = lambda got, want: True  # noqa: E731
    strict: verdicts.Test = lambda got, want: torch.equal(got, want)  # noqa: E731
    assert verdicts.verdict([], strict) == verdicts.ABSENT
    assert verdicts.verdict([(want.clone(), want)], strict) == verdicts.SAME
    assert verdicts.verdict([(other, want)], lenient) == verdicts.MISSED
    assert verdicts.verdict([(other, want)], strict) == verdicts.NOTICED
    assert verdicts.verdict([(None, want)], lenient) == verdicts.ERROR == verdicts.verdict([(want[:1], want)], lenient)
    # one call that notices is enough, and nothing is made after it; a call that cannot show it says less than one that is forgiven
    assert verdicts.verdict([(want, want), (other, want)], strict) == verdicts.NOTICED
    assert verdicts.verdict([(want, want), (other, want)], lenient) == verdicts.MISSED

    def calls() -> Any:
        yield other, want
        raise AssertionError("asked for another call")

    assert verdicts.verdict(calls(), strict) == verdicts.NOTICED


def test_verdicts() -> None:
    v = verdicts.Verdicts("t", ("a", "longer"), ("x", "y, z"), (("noticed", "missed"), ("passes", "error")))
    assert (v.good("x"), v.good("y, z")) == (2, 1) and v.overlooked().rows == ("a",)
    assert str(v).splitlines() == ["        x        y, z", "a       noticed  missed", "longer  passes   error"]
    figure = verdicts.draw(v, "One sentence.")
    words = {hover.split(":")[0]: (glyph, trace.name, float(y))
             for trace in figure.data for hover, glyph, y in zip(trace.hovertext, trace.text, trace.y)}
    good, bad = "as it should be", "the test is wrong"
    assert words == {"noticed": ("✓", good, 0), "passes": ("✓", good, 1), "error": ("E", good, 1), "missed": ("✗", bad, 0)}
    # of each group what is there, and nothing that is not: no line for what the data cannot show
    key = [re.sub("<.*?>", "", line) for line in verdicts.key(v)]
    assert key == ["■ ✓ noticed, E error, ✓ passes: as it should be", "■ ✗ missed: the test is wrong"]
    assert set(verdicts.GLYPHS) == set(verdicts.WORDS) and "<br>".join(verdicts.key(v)) in [a.text for a in figure.layout.annotations]
    with pytest.raises(MxdebugError, match="1 x 1 of noticed"):
        verdicts.Verdicts("t", ("a",), ("x",), (("green",),))
    with pytest.raises(MxdebugError, match="lines of"):
        verdicts.Verdicts("t", ("a",), ("x", "y"), (("noticed",),))


def test_long_names_of_columns_are_broken_but_no_word_and_no_percentage() -> None:
    v = verdicts.Verdicts("t", ("a",), ("92.5 % within 0.1 + 85 %", "FlashInfer's data"), (("noticed", "same bits"),))
    # 12 characters, or as many as the longest word of a column has
    assert str(v).splitlines() == ["   92.5 %", "   within 0.1 +  FlashInfer's", "   85 %          data", "a  noticed       same bits"]
    # a figure of 440 pixels less 16 + 7 for the rows has 200 a column: 28 characters of 7 pixels, so no name is broken
    assert verdicts.draw(v, "One.").layout.xaxis.ticktext == v.columns
    # 25 characters in the rows' names: 440 - 191 leaves 124 a column, 17 characters
    wide = verdicts.Verdicts("t", ("a" * 25,), v.columns, v.words)
    assert verdicts.draw(wide, "One.").layout.xaxis.ticktext == ("92.5 % within 0.1<br>+ 85 %", "FlashInfer's data")


def test_scale_counts() -> None:
    two = torch.tensor([120, 121, 121, 121], dtype=torch.uint8)
    c = scale_counts.scale_counts({"one": torch.full((2, 4), 124, dtype=torch.uint8), "two": two})
    assert c.counts == (("one", ((124, 8),)), ("two", ((120, 1), (121, 3))))
    assert str(c).splitlines() == ["one   1 different scale ; 100% are 2^-3", "two   2 different scales;  75% are 2^-6"]
    bars = scale_counts.draw(c).data
    assert [tuple(b.x) for b in bars] == [(124,), (120, 121)] and [tuple(b.y) for b in bars] == [(100.0,), (25.0, 75.0)]
