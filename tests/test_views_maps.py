"""Maps of weights and of block scales, histograms of codes, tables of the worst blocks: what is in each cell, and why."""

from __future__ import annotations

import functools
import json
import math
from collections import Counter

import plotly.graph_objects as go
import pytest
import torch
from making import CONTRACT, made_bytes, made_layer

import mxdebug
from mxdebug import recorded
from mxdebug.contracts import find
from mxdebug.errors import MxdebugError
from mxdebug.formats import E4M3_SCALE, E8M0, E8M0_SM90, MXFP4, MXFP8, NVFP4, BlockTensor, quantise
from mxdebug.layouts import SM90_SCALE_FOLD, SWIZZLE_128x4
from mxdebug.recipes import SWAP_NIBBLES
from mxdebug.reference import MoELayer
from mxdebug.views import activation_scales, codes, compare, figures, linear, maps, scale_counts, scales, worst
from mxdebug.views.compare import MIDDLE

ONE = 0x22  # two codes of 1.0; E2M1: 0, 0.5, 1, 1.5, 2, 3, 4, 6 are the codes 0 to 7, +8 their negatives


@functools.cache
def layer(name: str) -> MoELayer:
    return mxdebug.open_checkpoint(recorded.call(name).checkpoint_path).layer().layer


@functools.cache
def decoded(name: str) -> MoELayer:
    return CONTRACT.decode(mxdebug.load_call(recorded.call(name).path).arguments)


def ones(rows: int, columns: int, scale: int = 127) -> BlockTensor:
    """MXFP4 weights that are all 1.0 * 2^(scale - 127)."""
    payload, scales = ((rows, columns // 2), ONE), ((rows, columns // 32), scale)
    return BlockTensor(*(torch.full(*what, dtype=torch.uint8) for what in (payload, scales)), MXFP4)


def changed(t: BlockTensor, *, payload: dict[tuple[int, ...], int] | None = None,
            scale: dict[tuple[int, ...], int] | None = None) -> BlockTensor:
    """A copy with some bytes replaced."""
    p, s = t.payload.clone(), t.scales.clone()
    for at, byte in (payload or {}).items():
        p[at] = byte
    for at, byte in (scale or {}).items():
        s[at] = byte
    return BlockTensor(p, s, t.format, t.global_scale)


def glyphs(m: maps.Map) -> dict[str, list[list[int]]]:
    return {name: where.nonzero().tolist() for name, (_, where) in m.glyphs.items()}


def legend(figure: go.Figure) -> list[str]:
    return [t.name for t in figure.data if t.showlegend is not False and t.name]


# -- compare: weights -------------------------------------------------------------------------------------------------


def test_one_wrong_code_is_one_cell() -> None:
    # Byte 5 of row 3 holds columns 10 (low nibble) and 11: 0x24 makes column 10 read 2.0 where 1.0 is meant. |2 - 1| = 2^0.
    a = ones(8, 64)
    c = compare.compare(a, changed(a, payload={(3, 5): 0x24}), title="t")
    wanted = torch.full((8, 64), MIDDLE - 1)  # equal: one below the lowest binade that has a colour
    wanted[3, 10] = MIDDLE
    assert torch.equal(c.differences.codes.int(), wanted.int()) and c.differences.codes.dtype == torch.uint8
    assert (c.lowest, c.highest, c.weights, c.blocks, c.largest, c.at) == (0, 0, 1, 1, 1.0, (3, 10))
    assert set(c.ratios.codes.flatten().tolist()) == {MIDDLE} and not c.differences.glyphs and not c.ratios.glyphs
    assert str(c).splitlines() == ["weight: 8 x 64", "  1 of 512 weights differ (0.2%)", "  in 1 of 16 blocks (6.2%)",
                                   "  largest |difference| 1, at row 3, column 10",
                                   "  pooled by maximum: 1 x 1 weights, 1 x 1 block scales in a cell"]
    assert c.worst.blocks == (worst.WorstBlock(None, 3, 0, (0, 31), 1.0, 1.0, (1.0,) * 4, (1.0,) * 4, 1.0, 10),)


@pytest.mark.parametrize(("byte", "step"), [(128, 1), (126, -1), (130, 3), (133, 6), (121, -6)])
def test_a_wrong_scale_is_a_step_of_binades(byte: int, step: int) -> None:
    a = ones(4, 96)
    c = compare.compare(a, changed(a, scale={(2, 1): byte}), title="t")
    assert int(c.ratios.codes[2, 1]) == MIDDLE + step and int((c.ratios.codes != MIDDLE).sum()) == 1
    # All 32 weights of the block, columns 32 to 63, are off by |2^step - 1|: its binade is step - 1 above 1, else -1.
    off = c.differences.codes != c.lowest + MIDDLE - 1
    assert off.nonzero().tolist() == [[2, i] for i in range(32, 64)]
    assert set(c.differences.codes[off].tolist()) == {MIDDLE + (step - 1 if step > 0 else -1)} and c.weights == 32


def test_factors_between_powers_of_two_are_rounded_away_from_equal() -> None:
    meant, read = torch.tensor([1.0, 1, 1, 1, 1, 1, 0, 1]), torch.tensor([1, 1.5, 2, 3, 0.75, 0.5, 1, 0])
    assert compare.steps(meant.double(), read.double()).tolist() == [0, 1, 1, 2, -1, -1, 0, 0]  # 0 has a glyph, not a step


def test_of_pooled_scales_the_furthest_off_is_shown() -> None:
    a = ones(1024, 32)  # 2 rows a cell
    b = changed(a, scale={(0, 0): 124, (1, 0): 130, (2, 0): 129, (3, 0): 124, (4, 0): 0xFF, (5, 0): 133})
    c = compare.compare(a, b, title="t")
    assert c.ratios.pooled == (2, 1)
    assert c.ratios.codes[:4, 0].tolist() == [MIDDLE + 3, MIDDLE - 3, 0, MIDDLE]  # above before below; NaN before all
    assert glyphs(c.ratios) == {"NaN": [[2, 0]]}


def test_what_no_colour_stands_for_has_a_glyph_and_its_name_in_the_legend() -> None:
    a = changed(ones(6, 64), scale={(4, 0): 0x00})
    # SM90 reads 0x00 as 0 and 0xFF as inf; the OCP codec, with which the checkpoint is read, has 2^-127 and NaN.
    b = changed(ones(6, 64), scale={(0, 0): 0x00, (1, 1): 0xFF, (2, 0): 127 + 7, (3, 1): 127 - 7, (5, 1): 128}, payload={(1, 16): 0x20})
    c = compare.compare(a, b, title="t", meant_scale=E8M0_SM90, read_scale=E8M0_SM90)
    assert glyphs(c.ratios) == {"inf": [[1, 1]], "read as 0": [[0, 0]], "0 is meant": [[4, 0]], "factor above 2⁶": [[2, 0]],
                                "factor below 2⁻⁶": [[3, 1]]}
    assert c.ratios.codes[5].tolist() == [MIDDLE, MIDDLE + 1] and int((c.ratios.codes == 0).sum()) == 5
    # Row 1's second block is inf, but for column 32, whose code is 0: 0 * inf is NaN.
    assert glyphs(c.differences)["NaN"] == [[1, 32]] and glyphs(c.differences)["inf"] == [[1, i] for i in range(33, 64)]
    assert (c.nan, c.inf, c.weights) == (1, 31, 6 * 32)
    figure = compare.draw(c)
    assert sorted(legend(figure)) == sorted({*c.differences.glyphs, *c.ratios.glyphs})
    assert len({t.marker.symbol for t in figure.data if t.name}) == len(legend(figure))  # no two look alike
    for m in (c.differences, c.ratios):  # a cell has a colour or one glyph
        covered = sum((where.int() for _, where in m.glyphs.values()), torch.zeros_like(m.codes, dtype=torch.int32))
        assert torch.equal(covered, (m.codes == 0).int())


def test_scales_that_are_nan_are_glyphs() -> None:
    a = ones(2, 64)
    c = compare.compare(a, changed(a, scale={(1, 0): 0xFF}), title="t")  # OCP: NaN
    assert glyphs(c.ratios) == {"NaN": [[1, 0]]} and glyphs(c.differences) == {"NaN": [[1, i] for i in range(32)]}
    assert c.worst.blocks[0].row == 1 and "NaN: 32 weights, inf: 0 weights" in str(c)
    nan = changed(a, scale={(1, 0): 0xFF})
    assert compare.compare(nan, nan, title="t").weights == 0  # NaN for NaN is equal


def test_small_differences_have_a_glyph_not_the_end_of_the_colours() -> None:
    a = changed(ones(2, 64), scale={(1, 0): 127 - 12, (1, 1): 127 - 9})
    c = compare.compare(a, changed(a, payload={(0, 0): 0x24, (1, 0): 0x24, (1, 16): 0x24}), title="t")  # off by 1, 2^-12, 2^-9
    assert (c.lowest, c.highest) == (-9, 0) and glyphs(c.differences) == {"|difference| below 2⁻⁹": [[1, 0]]}
    assert int(c.differences.codes[1, 32]) == MIDDLE - 9 and legend(compare.draw(c)) == ["|difference| below 2⁻⁹"]


def test_large_weights_are_pooled_by_the_maximum() -> None:
    # 1100 rows / 512 -> 3 rows a cell. Both maps share 512 columns: 4096 weights and 128 scales; 4096 / (512 - 128) -> 11 a cell.
    a = ones(1100, 4096)
    b = changed(a, payload={(700, 100): 0x24, (701, 100): 0x27})  # columns 200: 2 and 6 for 1; rows 700 and 701 share cell 233
    c = compare.compare(a, b, title="t")
    assert c.differences.pooled == (3, 11) and c.ratios.pooled == (3, 1)
    assert tuple(c.differences.codes.shape) == (367, 373) and c.differences.codes.shape[1] + c.ratios.codes.shape[1] <= 512
    off = c.differences.codes != c.lowest + MIDDLE - 1
    assert off.nonzero().tolist() == [[233, 18]] and int(c.differences.codes[233, 18]) == MIDDLE + 2  # |6 - 1| = 5 >= 4; the mean is 0.2
    assert "pooled by maximum: 3 x 11 weights, 3 x 1 block scales in a cell" in str(c)
    assert "largest |difference| of 3 x 11 weights" in compare.draw(c).layout.meta["says"]
    nan = compare.compare(a, changed(b, scale={(699, 6): 0xFF}), title="t")
    assert [233, 18] in glyphs(nan.differences)["NaN"]  # NaN is worse than any number of its cell


@pytest.mark.parametrize("shape", [(1, 32), (1, 4096), (3000, 32), (7, 96), (513, 544)])
def test_any_shape_fits(shape: tuple[int, int]) -> None:
    a = ones(*shape)
    c = compare.compare(a, changed(a, payload={(-1, -1): 0x42}), title="t")
    assert c.differences.codes.shape[0] <= 512 and c.differences.codes.shape[1] + c.ratios.codes.shape[1] <= 512
    assert c.at == (shape[0] - 1, shape[1] - 1) and int(c.differences.codes[-1, -1]) == MIDDLE  # the last, not full, cell has it too
    assert compare.draw(c).to_json()


def test_pooling_is_the_maximum_of_dense_differences() -> None:
    a, b = (quantise(torch.randn(700, 1024, generator=torch.Generator().manual_seed(n)), MXFP4, rule="floor") for n in (0, 1))
    c = compare.compare(a, b, title="t")
    dense = (a.dequantise() - b.dequantise()).abs()
    h, w = c.differences.pooled
    for i, j in ((0, 0), (17, 30), (349, 200)):
        cell = dense[i * h: (i + 1) * h, j * w: (j + 1) * w].max()
        assert 2.0 ** (int(c.differences.codes[i, j]) - MIDDLE) <= cell < 2.0 ** (int(c.differences.codes[i, j]) - MIDDLE + 1)
    assert c.weights == int((dense != 0).sum()) and c.largest == float(dense.max())


def test_what_cannot_be_compared() -> None:
    a = ones(4, 64)
    for b, message in ((ones(3, 64), "another tensor-parallel part"), (quantise(torch.ones(4, 64), MXFP8, rule="floor"), "at least"),
                       (ones(4, 32), "at least")):
        with pytest.raises(MxdebugError, match=message):
            compare.compare(a, b, title="t")
    with pytest.raises(MxdebugError, match="at least one row"):
        compare.compare(ones(0, 64), ones(0, 64), title="t")
    with pytest.raises(MxdebugError, match="operand: expected one of"):
        compare.of_layers(layer("c01"), layer("c01"), "w3", title="t")
    with pytest.raises(MxdebugError, match="0 <= expert < 4"):
        compare.of_layers(layer("c01"), layer("c01"), "w13", title="t", expert=4)
    with pytest.raises(MxdebugError, match="gate"):
        compare.of_layers(made_layer(4, 64, 32, gated=False), layer("c01"), "w13", title="t")


@pytest.mark.parametrize("expert", [-1, 4, True, 1.0])
def test_an_expert_that_there_is_not(expert: object) -> None:
    a = layer("c01").up
    for look in (compare.compare, codes.codes):
        with pytest.raises(MxdebugError, match="expert: expected a number, 0 <= expert < 4"):
            look(a, a, title="t", expert=expert)
    for look in (compare.of_layers, codes.of_layers):
        with pytest.raises(MxdebugError, match="expert: expected a number, 0 <= expert < 4"):
            look(layer("c01"), layer("c01"), "w2", title="t", expert=expert)


def test_a_rank_is_compared_with_its_part_of_the_layer() -> None:
    """c12 is the call of a rank that holds 4 of 8 experts: right against its part, and no answer against the whole layer."""
    call = mxdebug.load_call(recorded.call("c12").path)
    part = layer("c12").part(find(call.function, call.arguments).parallel(call.arguments))
    assert layer("c12").experts == 8 and part.experts == 4
    for operand in ("w13", "w2"):
        assert compare.of_layers(part, decoded("c12"), operand, title="t", expert=3).weights == 0
        for look in (compare.of_layers, codes.of_layers):
            with pytest.raises(MxdebugError, match=r"4 as the kernel reads, got 8 are meant.*layer\.part\("):
                look(layer("c12"), decoded("c12"), operand, title="t")


@pytest.mark.parametrize("k", [0, -1, None])
def test_how_many_of_the_worst(k: object) -> None:
    a = ones(4, 64)
    with pytest.raises(MxdebugError, match="a number from 1 on"):
        compare.compare(a, a, title="t", k=k)
    with pytest.raises(MxdebugError, match="a number from 1 on"):
        worst.worst(a, a, k)


def test_one_expert_without_gate() -> None:
    one = made_layer(1, 64, 32, gated=False)
    c = compare.of_layers(one, one, "w13", title="t")
    assert c.shape == (32, 64) and c.weights == 0 and str(c.worst) == "no block of 64 differs"
    assert compare.says(c).startswith("Left: the kernel reads every weight as it is meant")


def test_global_scales_are_said_apart() -> None:
    x = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(0))
    a = quantise(x, NVFP4)
    b = BlockTensor(a.payload, a.scales, NVFP4, a.global_scale * 2)
    c = compare.compare(a, b, title="t", expert=1)
    assert set(c.ratios.codes.flatten().tolist()) == {MIDDLE} and "(factor 2)" in str(c)  # the block scales are right
    assert c.weights == int((a[1].dequantise() != 0).sum())


# -- recorded calls ---------------------------------------------------------------------------------------------------


def test_a_right_call_is_grey_all_over() -> None:
    for operand in ("w13", "w2"):
        c = compare.of_layers(layer("c01"), decoded("c01"), operand, title="t", expert=2)
        assert (c.weights, c.nan, c.inf, c.padding, c.worst.blocks, c.largest) == (0, 0, 0, 0, (), None)
        assert set(c.differences.codes.flatten().tolist()) == {MIDDLE} and set(c.ratios.codes.flatten().tolist()) == {MIDDLE}


@pytest.mark.parametrize("expert", [0, 3])
def test_linear_scales_read_through_the_fold(expert: int) -> None:
    """c04: bytes in linear order; the kernel takes byte index_map[r, k] for the scale of row r, block k."""
    c = compare.of_layers(layer("c04"), decoded("c04"), "w13", title="t", expert=expert)
    meant = torch.cat([layer("c04").up.scales[expert], layer("c04").gate.scales[expert]])
    read = meant.flatten()[SM90_SCALE_FOLD.index_map(*meant.shape)]
    assert torch.equal(c.ratios.codes.int(), MIDDLE + (read.int() - meant.int()).clamp(-6, 6))  # none is further off here
    assert int((read.int() - meant.int()).abs().max()) <= 6


def test_rows_in_another_order_are_whole_rows() -> None:
    """c03: [w1; w3] where [w3; w1] is read, so each half holds the other's rows: row r differs as up[r] does from gate[r]."""
    c = compare.of_layers(layer("c03"), decoded("c03"), "w13", title="t")
    up, gate = layer("c03").up[0].dequantise(), layer("c03").gate[0].dequantise()
    d = (up - gate).abs()
    assert c.weights == 2 * int((d != 0).sum()) and c.largest == float(d.max())
    assert torch.equal(c.differences.codes[:256], c.differences.codes[256:])


def test_padding_is_a_glyph() -> None:
    """c10: each half of w13, 192 rows, is padded to 256 with zeros. c11: at the end, so gate's first 64 rows are read as up's padding."""
    right, moved = (compare.of_layers(layer(n), decoded(n), "w13", title="t") for n in ("c10", "c11"))
    assert right.weights == 0 and right.padding == 2 * 64 * 384
    for m in (right.differences, right.ratios):
        (name, (_, where)), = m.glyphs.items()
        assert name == "padding" and bool((m.codes[where] == 0).all())
        assert where.any(1).nonzero().flatten().tolist() == [*range(192, 256), *range(448, 512)]
    bad = (moved.differences.codes != moved.lowest + MIDDLE - 1).any(1) & ~moved.differences.glyphs["padding"][1].all(1)
    assert bad.nonzero().flatten().tolist() == list(range(192, 448))
    assert legend(compare.draw(right)) == ["padding"]


# -- glyphs -----------------------------------------------------------------------------------------------------------


def test_glyphs_are_thinned_evenly() -> None:
    where = torch.zeros(96, 96, dtype=torch.bool)  # tiles of 2 x 2
    where[0, 0] = where[0, 1] = where[95, 95] = True
    assert maps.thinned(where) == [(0, 0), (95, 95)]
    assert maps.thinned(torch.ones(48, 3, dtype=torch.bool)) == [(r, c) for r in range(48) for c in range(3)]
    many = torch.ones(500, 144, dtype=torch.bool)
    assert len(maps.thinned(many)) == 46 * 48 and maps.thinned(torch.zeros(5, 5, dtype=torch.bool)) == []  # tiles of 11 x 3
    alone = torch.zeros(500, 500, dtype=torch.bool)
    alone[321, 123] = True
    assert maps.thinned(alone) == [(321, 123)]  # a single one is never lost


def test_diverging_colours_are_even() -> None:
    colours = figures.diverging_colours(6)
    assert len(colours) == 13 and colours[6] == figures.EQUAL and len(set(colours)) == 13
    assert len(figures.diverging_colours(1)) == 3


# -- the worst blocks -------------------------------------------------------------------------------------------------


def test_largest_against_sorting() -> None:
    g = torch.Generator().manual_seed(0)
    for k in (1, 3, 10, 50):
        t = torch.randint(0, 4, (5, 8), generator=g).double()  # many ties
        t[1, 2], t[4, 0], t[0, 7] = torch.nan, torch.nan, torch.inf
        order = sorted(((r, c) for r in range(5) for c in range(8) if not t[r, c] == 0),
                       key=lambda at: (-1e9 if t[at].isnan() else -float(t[at].clamp(max=100)), at))
        assert worst.largest(t, k) == order[:k]
    assert worst.largest(torch.zeros(2, 2), 3) == [] and worst.largest(torch.zeros(0, 4), 2) == []


def test_worst_blocks_of_all_experts() -> None:
    a = BlockTensor(torch.full((2, 4, 32), ONE, dtype=torch.uint8), torch.full((2, 4, 2), 127, dtype=torch.uint8), MXFP4)
    b = changed(a, payload={(1, 3, 20): 0x27, (0, 1, 2): 0xA2, (0, 2, 0): 0x12})  # 6 for 1; -1 for 1; 0.5 for 1 (high nibble)
    w = worst.worst(a, b, k=5)
    assert [(x.expert, x.row, x.block, x.largest, x.column) for x in w.blocks] == [(1, 3, 1, 5.0, 40), (0, 1, 0, 2.0, 5), (0, 2, 0, 0.5, 1)]
    assert (w.wrong, w.total) == (3, 16) and len(worst.worst(a, b, k=2).blocks) == 2
    assert [line.split() for line in str(w).splitlines()[:5]] == [
        "the 3 worst of 3 blocks that differ (16 in all), by largest |difference|".split(),
        "row block scale factor column the first 4 weights".split(), "expert columns |diff.|".split(),
        "3 1 meant 1 40 1 1 1 1".split(), "1 32-63 read 1 1 5 1 1 1 1".split()]
    assert w.blocks[0].factor == 1 and w.blocks[2].weights_read == (1.0, 0.5, 1.0, 1.0)
    with pytest.raises(MxdebugError, match="weights to compare"):
        worst.worst(a, a[0])


def test_worst_scales_by_the_factor_between_them() -> None:
    meant = torch.tensor([[127, 127, 127], [120, 127, 127]], dtype=torch.uint8)
    read = torch.tensor([[130, 127, 123], [0, 255, 127]], dtype=torch.uint8)
    w = worst.worst_scales(meant, read, block=32, meant_scale=E8M0, read_scale=E8M0_SM90, first_row=64)
    # inf where 0 or inf is read, in the order in which they lie; then 2^-4 before 2^3, since 16 > 8.
    assert [(x.row, x.block, x.columns, x.factor) for x in w.blocks] == [(65, 0, (0, 31), 0.0), (65, 1, (32, 63), float("inf")),
                                                                         (64, 2, (64, 95), 2**-4), (64, 0, (0, 31), 2**3)]
    assert (w.wrong, w.total) == (4, 6) and "2^-4" in str(w)
    outside = torch.zeros(2, 3, dtype=torch.bool)
    outside[0, 1] = True
    first = worst.worst_scales(meant, read, block=32, meant_scale=E8M0, outside=outside).blocks[0]
    assert (first.row, first.block, first.scale_read, first.factor) == (0, 1, None, None)
    numbers = worst.worst_scales(torch.tensor([[1.0, -1.0, 0.0]]), torch.tensor([[1.5, 1.0, 0.0]]), block=16)
    assert [x.block for x in numbers.blocks] == [0, 1] and numbers.wrong == 2  # -1 for 1 is no equal scale; 0 for 0 is
    for a, b, more in ((meant, read[:1], {"meant_scale": E8M0}), (meant, read, {}), (meant.float(), read.float(), {"meant_scale": E8M0})):
        with pytest.raises(MxdebugError, match="block scales"):
            worst.worst_scales(a, b, block=32, **more)


@pytest.mark.parametrize(("value", "power", "text"), [
    (None, False, "-"), (float("nan"), True, "NaN"), (0.125, True, "2^-3"), (1.0, True, "1"), (-4.0, True, "-2^2"), (0.75, True, "0.75"),
    (1234567.0, False, "1.235e+06")])
def test_numbers_in_tables(value: float | None, power: bool, text: str) -> None:
    assert worst.number(value, power) == text


def test_a_table_of_the_worst_is_beside_every_map_of_values() -> None:
    r = scales.w13(layer("c04"), decoded("c04"), title="t", expert=1, rows=range(64, 128))
    factors = [max(b.factor, 1 / b.factor) for b in r.worst.blocks]
    meant = torch.cat([layer("c04").up.scales[1], layer("c04").gate.scales[1]])
    off = (meant.flatten()[SM90_SCALE_FOLD.index_map(512, 12)].int() - meant.int())[64:128].abs()
    assert factors == [2.0**n for n in off.flatten().sort(descending=True).values[:5].tolist()]
    assert all(64 <= b.row < 128 for b in r.worst.blocks) and (r.worst.wrong, r.worst.total) == (int((off != 0).sum()), 64 * 12)
    x = made_bytes(200, 8) // 16 + 120
    shown = activation_scales.reading(x, x.flatten(), SWIZZLE_128x4, title="t")  # linear bytes of 200 tokens, no padding to 256
    assert shown.worst.blocks[0].scale_read is None and shown.worst.wrong == shown.wrong
    meant, read = torch.tensor([[0x38, 0x40]], dtype=torch.uint8), torch.tensor([[0x38, 0x48]], dtype=torch.uint8)
    lin = linear.reading(meant, read, E4M3_SCALE, title="t")  # E4M3: 0x38 is 1, 0x40 is 2, 0x48 is 4
    assert [(b.block, b.columns, b.factor) for b in lin.worst.blocks] == [(1, (16, 31), 2.0)]


def test_scales_are_counted_as_they_were() -> None:
    """Each byte is read once for each of 0 to 99: off_by and special follow from a subtraction."""
    meant, read = (t[None].to(torch.uint8) for t in torch.meshgrid(torch.arange(100), torch.arange(256), indexing="ij"))
    r = scales.reading(meant, read, title="t")
    assert r.special == 100 * 256 - 99 * 254 and r.off_by == dict(Counter(b - a for a in range(1, 100) for b in range(1, 255)))


# -- codes ------------------------------------------------------------------------------------------------------------


def counted(payload: list[int], scale_bytes: list[int]) -> BlockTensor:
    data, scale = (torch.tensor([t], dtype=torch.uint8) for t in (payload, scale_bytes))
    return BlockTensor(data.repeat(1, 16 // len(payload)), scale, MXFP4)


def test_each_nibble_is_counted() -> None:
    c = codes.codes(counted([0x12, 0xF0], [120]), title="t")  # 8 times each byte: codes 2, 1, 0, 15
    assert {i: n for i, n in enumerate(c.counts[0].codes) if n} == {0: 8, 1: 8, 2: 8, 15: 8}
    assert c.counts[0].unused == tuple(range(3, 15)) and c.payload_order is None and c.verdict() == ""
    assert str(c).splitlines()[0] == ("the checkpoint means  32 E2M1 codes, 12 of 16 codes unused: "
                                      "1.5, 2, 3, 4, 6, -0, -0.5, -1, -1.5, -2, -3, -4")
    bars = codes.bars(c.counts[0])
    labels = "-6 -4 -3 -2 -1.5 -1 -0.5 -0 0 0.5 1 1.5 2 3 4 6".split()
    assert [label for _, label, _ in bars] == [f"{v}<br>{b}" for v, b in zip(labels, (15, 14, 13, 12, 11, 10, 9, 8, *range(8)))]
    assert bars[(0, "-6<br>15", False)] == 8 and sum(bars.values()) == 32


@pytest.mark.parametrize(("read", "order"), [([0xF0, 0x12], codes.SAME), ([0x21, 0x0F], codes.NIBBLES), ([0x02, 0xF1], codes.PAIRED),
                                             ([0x12, 0xF1], codes.OTHER)])
def test_what_counts_say_about_an_order(read: list[int], order: str) -> None:
    c = codes.codes(counted([0x12, 0xF0], [120]), counted(read, [120]), title="t")
    assert c.payload_order == order and c.same_scales


def test_verdicts_on_recorded_calls_and_faults() -> None:
    """c04's scales and c11's rows lie elsewhere: counts are equal. SM90's interleave moves bits: without it (c06) there are other codes."""
    assert codes.of_layers(layer("c06"), decoded("c06"), "w13", title="t").payload_order == codes.OTHER
    for name in ("c01", "c04", "c10", "c11"):
        c = codes.of_layers(layer(name), decoded(name), "w13", title="t")
        assert c.payload_order == codes.SAME and c.padding == (4 * 2 * 64 * 384 if name in ("c10", "c11") else 0), name
        assert c.verdict() == {  # c01 and c10 are right: byte for byte, c10 but for its padding
            True: "Payload and block scales are equal, byte for byte.",
            False: "The same bytes and the same scales, each as often: only their order can be wrong."}[name in ("c01", "c10")], name
    a = layer("c01").up
    swapped = BlockTensor(SWAP_NIBBLES.apply(a.payload), a.scales, MXFP4)
    c = codes.codes(a, swapped, title="t", expert=2)
    assert c.payload_order == codes.NIBBLES and c.counts[0].codes == c.counts[1].codes
    assert c.verdict() == ("Payload: the same bytes with their two nibbles exchanged, which no bar shows. "
                           "Block scales: the same, each as often, so only their order can be wrong.")
    cast = BlockTensor(a.payload, (a.scales.int() - 1).to(torch.uint8), MXFP4)
    assert codes.codes(a, cast, title="t").same_scales is False
    with pytest.raises(MxdebugError, match="experts: expected as many in both, 2 as the kernel reads, got 4 are meant"):
        codes.codes(a, a[:2], title="t")


def test_eight_bit_elements_are_counted_by_binade() -> None:
    """Against torch's own float8: 2^n <= |x| < 2^(n + 1); zeros of both signs and NaN apart."""
    payload = torch.arange(256, dtype=torch.uint8).reshape(1, 256)
    c = codes.codes(BlockTensor(payload, torch.full((1, 8), 127, dtype=torch.uint8), MXFP8), title="t").counts[0]
    values = payload.view(torch.float8_e4m3fn).float().flatten().tolist()
    def binade(v: float) -> str:
        return figures.power(math.frexp(v)[1] - 1) if v and v == v else "NaN" if v else "-0" if math.copysign(1, v) < 0 else "0"

    wanted = Counter(map(binade, values))
    assert {label: n for (_, label, _), n in codes.bars(c).items()} == dict(wanted)
    assert {label for (_, label, hatched) in codes.bars(c) if hatched} == {"0", "-0", "NaN"}


def test_special_scales_have_hatched_bars_with_their_number() -> None:
    a = ones(4, 64)
    c = codes.codes(a, changed(a, scale={(0, 0): 0, (0, 1): 255, (1, 0): 130}), title="t", read_scale=E8M0_SM90)
    assert {label: n for (_, label, hatched), n in codes.scale_bars(c.counts[1]).items() if hatched} == {"0x00: 0": 1, "0xFF: inf": 1}
    assert codes.scale_bars(c.counts[0]) == {(0.0, "2⁰<br>127", False): 8} and c.same_scales is False
    figure = codes.draw(c)
    assert legend(figure) == ["the checkpoint means", "the kernel reads", "0, inf or NaN"]
    hatched = [t for t in figure.data if t.marker.pattern.shape == "/" and t.text is not None]
    assert [list(t.text) for t in hatched] == [["1", "1"]]
    assert figure.layout.meta["says"].startswith("Above: how many weights have each of the 16 codes")


def test_counts_of_one_row_and_of_nvfp4() -> None:
    q = quantise(torch.randn(1, 32, generator=torch.Generator().manual_seed(0)), NVFP4)
    c = codes.codes(q, q, title="t")
    assert c.verdict() == "Payload and block scales are equal, byte for byte." and "2 block scales" in str(c)
    assert codes.draw(c).to_json()


def test_scale_counts() -> None:
    tensors = {"a": [127, 127, 127, 128], "b": [[120] * 4]}
    c = scale_counts.scale_counts({name: torch.tensor(t, dtype=torch.uint8) for name, t in tensors.items()})
    assert c.counts == (("a", ((127, 3), (128, 1))), ("b", ((120, 4),)))
    assert str(c).splitlines() == ["a   2 different scales;  75% are 2^0", "b   1 different scale ; 100% are 2^-7"]
    figure = scale_counts.draw(c)
    assert [list(t.y) for t in figure.data] == [[75.0, 25.0], [100.0]]


# -- drawing ----------------------------------------------------------------------------------------------------------


def made(name: str) -> go.Figure:
    if name == "codes":
        return codes.draw(codes.of_layers(layer("c04"), decoded("c04"), "w13", title="t"))
    return compare.draw(compare.of_layers(layer(name), decoded(name), "w13", title="t"))


@pytest.mark.parametrize("name", ["c01", "c04", "c11", "codes"])
def test_drawings_are_the_same_each_time_and_say_what_they_show(name: str) -> None:
    a = made(name)
    assert a.to_json() == made(name).to_json() and len(json.dumps(json.loads(a.to_json()))) < 300_000  # a notebook has room for some
    says = a.layout.meta["says"]
    assert says.endswith(".") and says in [t.text.replace("<br>", " ") for t in a.layout.annotations]
    assert a.layout.paper_bgcolor == a.layout.plot_bgcolor == figures.BLANK


def test_colours_are_steps_and_the_bar_has_room_for_its_labels() -> None:
    figure = made("c04")
    left, right = (t for t in figure.data if t.type == "heatmap")
    assert list(right.colorbar.ticktext) == ["2⁻⁶", "2⁻³", "1", "2³", "2⁶"] and left.colorbar.ticktext[0] == "0"
    at = list(left.colorbar.tickvals)  # few, and as far from "0" as from each other
    assert len(at) <= 5 and min(b - a for a, b in zip(at, at[1:])) == at[-1] - at[-2]
    assert left.colorbar.tickangle == right.colorbar.tickangle == 0
    for t in (left, right):
        edges = [x for x, _ in t.colorscale]
        assert edges[0] == 0 and edges[-1] == 1 and all(t.colorscale[i][1] == t.colorscale[i + 1][1] for i in range(0, len(edges), 2))


