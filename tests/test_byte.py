"""Does the picture of one byte say where it goes? For every layout against `Layout.pack` and `unpack`; for 128x4 written out."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mxdebug.errors import MxdebugError
from mxdebug.layouts import LINEAR, SM90_SCALE_FOLD, SM90_WEIGHT_INTERLEAVE, SWIZZLE_8x4, SWIZZLE_128x4, TRANSPOSED, Layout
from mxdebug.views import byte, byte_figure, figures
from mxdebug.views.byte import CATALOGUE, Byte, Place, at, at_offset

TILES = (2, 3)  # of a layout that does not pad: another number of tiles along each axis
UNALIGNED = ((1, 1), (100, 6), (129, 5), (300, 37))  # of layouts that pad


def shapes(layout: Layout) -> list[tuple[int, int]]:
    return list(UNALIGNED) if layout.pads else [layout.tile, (TILES[0] * layout.tile[0], TILES[1] * layout.tile[1])]


EVERY = [pytest.param(layout, shape, id=f"{name}-{shape[0]}x{shape[1]}") for name, layout in CATALOGUE.items() for shape in shapes(layout)]


def numbered(shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """uint8 twice: low and high half of 1 + the linear offset of each byte; so 0 is padding."""
    numbers = torch.arange(1, shape[0] * shape[1] + 1).reshape(shape)
    return (numbers % 256).to(torch.uint8), (numbers // 256).to(torch.uint8)


def origin(layout: Layout, shape: tuple[int, int]) -> Tensor:
    """int64 [bytes]: for each byte in memory the linear offset of the logical byte that `pack` put there; -1 for padding."""
    whole = replace(layout, bits=None)  # which byte goes where; which bits inside a word is another test's matter
    low, high = (whole.pack(half).flatten().long() for half in numbered(shape))
    return low + 256 * high - 1


# -- index arithmetic ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layout", "shape"), EVERY)
def test_positions_and_offsets_as_pack(layout: Layout, shape: tuple[int, int]) -> None:
    came = origin(layout, shape)
    row, column = layout.positions(torch.arange(len(came)), *shape)
    inside = (row < shape[0]) & (column < shape[1])
    assert torch.equal(torch.where(inside, row * shape[1] + column, -1), came)
    assert torch.equal(layout.offsets(row, column, *shape), torch.arange(len(came)))  # of the padding, too


@pytest.mark.parametrize(("layout", "shape"), EVERY)
def test_a_byte_as_pack(layout: Layout, shape: tuple[int, int]) -> None:
    """What the two panels hold, cell for cell, and the picked byte."""
    came = origin(layout, shape)
    row, column = shape[0] * 2 // 3, shape[1] - 1
    b = at(layout, shape, row, column)
    assert came[b.picked.offset] == row * shape[1] + column and not b.picked.padding
    where = came.argsort(stable=True)[(came < 0).sum():]  # linear offset -> place in memory
    for i, r in enumerate(b.rows):
        for j, c in enumerate(b.columns):
            assert r >= shape[0] or c >= shape[1] or b.offsets[i, j] == where[r * shape[1] + c]
    r, c = b.from_row.flatten(), b.from_column.flatten()
    inside = (r >= 0) & (r < shape[0]) & (c < shape[1])
    assert torch.equal(torch.where(inside, r * shape[1] + c, -1)[: len(b.memory)], came[list(b.memory)])
    assert bool((r[len(b.memory):] == -1).all())
    assert at_offset(layout, shape, b.picked.offset).picked == b.picked


# -- a kernel that reads another layout ---------------------------------------------------------------------------------

READ = [("128x4", "linear", (256, 8)), ("linear", "128x4", (256, 8)), ("8x4", "128x4", (128, 8)), ("SM90 scale fold", "linear", (128, 12)),
        ("transposed", "V-cache 4x4", (8, 12)), ("SM90 weight interleave", "linear", (64, 64)), ("linear", "Marlin weights A16", (64, 64)),
        ("SM12x weight tiles", "SM90 weight interleave", (64, 64)), ("Marlin weights A8", "Marlin weights A16", (64, 64)),
        ("SM90 weight interleave", "SM90 weight interleave", (32, 32))]


@pytest.mark.parametrize(("written", "read", "shape"), READ)
def test_what_is_taken_is_what_unpack_sees(written: str, read: str, shape: tuple[int, int]) -> None:
    """The bytes that are named, each of them and no others, decide what `read.unpack(written.pack(x))` has at the picked place."""
    gen = torch.Generator().manual_seed(1)
    writes, reads = CATALOGUE[written], CATALOGUE[read]

    def random() -> Tensor:
        return torch.randint(0, 256, shape, generator=gen, dtype=torch.uint8)

    def seen(x: Tensor) -> Tensor:
        return reads.unpack(writes.pack(x), *shape)

    for row, column in ((0, 0), (5, 3), (shape[0] - 1, shape[1] - 2)):
        b = at(writes, shape, row, column, read_as=reads, most=shape[0] * shape[1])
        taken = b.taken
        assert taken is not None and taken.places and not any(p.padding for p in taken.places)
        x, other = random(), random()
        for p in taken.places:
            other[p.row, p.column] = x[p.row, p.column]
            flipped = x.clone()
            flipped[p.row, p.column] ^= 0xFF
            assert seen(flipped)[row, column] != seen(x)[row, column]
        assert seen(other)[row, column] == seen(x)[row, column]
        if taken.intact:
            assert len(taken.places) == 1 and seen(x)[row, column] == x[taken.places[0].row, taken.places[0].column]
        assert (len(b.rows), len(b.columns)) == shape
        always = torch.stack([seen(y) == y for y in (random() for _ in range(8))]).all(0)
        assert (taken.right, taken.of) == (int(always.sum()), shape[0] * shape[1])


def test_taken_beyond_the_end_and_in_the_padding() -> None:
    # 100 x 6 in linear order is 600 bytes; 128x4 looks for (99, 5) at 512 + 3 * 16 + 3 * 4 + 1 = 573
    assert at(LINEAR, (100, 6), 99, 5, read_as=SWIZZLE_128x4).taken.offset == 573
    # (35, 4): 512 + 3 * 16 + 1 * 4 + 0 = 564 = 94 * 6 + 0
    assert at(LINEAR, (100, 6), 35, 4, read_as=SWIZZLE_128x4).taken.places == (Place(94, 0, 564, False),)
    # row 95 = 2 * 32 + 31, column 4: 512 + 31 * 16 + 2 * 4 = 1016, and there are 600 bytes
    beyond = at(LINEAR, (100, 6), 95, 4, read_as=SWIZZLE_128x4)
    assert beyond.taken.places == () and "looks at offset 1016: beyond the end of the buffer (600 bytes)" in str(beyond.taken)
    # the other way round, linear looks for (99, 5) at 599 = 512 + 5 * 16 + 1 * 4 + 3: row 37, column 4 + 3, which is padding
    assert at(SWIZZLE_128x4, (100, 6), 99, 5, read_as=LINEAR).taken.places == (Place(37, 7, 599, True),)


# -- written out --------------------------------------------------------------------------------------------------------


def test_128x4_written_out() -> None:
    """cuBLAS: a tile is 128 rows x 4 columns = 512 bytes, 32 lines of 16; line m32 has rows m32, + 32, + 64, + 96, four bytes each."""
    b = at(SWIZZLE_128x4, (128, 32), 69, 6, read_as=LINEAR)
    # row 69 = 2 * 32 + 5, column 6 = 1 * 4 + 2: tile 1 (512) + line 5 (80) + third of four rows (8) + column 2 of the tile = 602
    assert b.picked == Place(69, 6, 602, False) and b.whole and b.line == 32
    # 69 * 32 + 6 = 2214 = 4 * 512 + 10 * 16 + 1 * 4 + 2: tile 4, line 10, second row: row 32 + 10, column 4 * 4 + 2
    assert b.taken.offset == 2214 and b.taken.places == (Place(42, 18, 2214, False),) and b.taken.intact
    # Both orders agree where 512 kt + 16 m32 + 4 m4 + k4 = 1024 m4 + 32 m32 + 4 kt + k4, so where 127 kt = 4 m32 + 255 m4. kt is 0 to 7,
    # m32 0 to 31, m4 0 to 3. m4 = 0: kt = m32 = 0. m4 = 1: 127 kt - 255 = 4 m32 <= 124 leaves kt = 3 and 126, no multiple of 4; m4 = 2:
    # kt = 5 and 125, neither; m4 = 3: kt = 7 and 124 = 4 * 31. So they agree in two runs of 4 bytes, the first and the last.
    assert (b.taken.right, b.taken.of) == (8, 4096)
    assert str(b) == """\
128x4: (mt m4 m32) (kt k4) -> mt kt m32 m4 k4
row 69 = mt 0*128 + m4 2*32 + m32 5
column 6 = kt 1*4 + k4 2
offset = mt 0*4096 + kt 1*512 + m32 5*16 + m4 2*4 + k4 2*1 = 602
linear would be 69*32 + 6 = 2214
beside it in memory
  offset   599  600  601  602  603  604  605
  row       37   69   69   69   69  101  101
  column     7    4    5    6    7    4    5
a kernel that reads linear looks at offset 2214: row 42, column 18
it takes the right byte for 8 of 4096 bytes of the logical part shown
shown: all"""


def test_padding_written_out() -> None:
    """100 x 6 takes 128 x 8 = 1024 bytes. Offset 1010 = 512 + 31 * 16 + 0 * 4 + 2: row 31, column 4 + 2, which the matrix has not."""
    b = at_offset(SWIZZLE_128x4, (100, 6), 1010, read_as=LINEAR)
    assert b.picked == Place(31, 6, 1010, True) and b.taken is None
    assert "that is padding: 100 x 6 is padded to 128 x 8 with 0" in str(b) and "linear would be" not in str(b)
    assert [str(p) for p in b.around] == ["padding", "row 31, column 4", "row 31, column 5", "padding", "padding",
                                          "row 63, column 4", "row 63, column 5"]
    # 13 = 0 * 16 + 3 * 4 + 1 is row 96, column 1; 61 = 3 * 16 + 13 row 99; 77 = 4 * 16 + 13 would be row 100
    assert [at_offset(SWIZZLE_128x4, (100, 6), o).picked.padding for o in (13, 61, 77)] == [False, False, True]
    strokes = [t for t in byte_figure.draw(b).data if t.name == figures.PADDED]
    assert len(strokes) == 2 and strokes[0].showlegend and not strokes[1].showlegend
    assert [decoded(t.x) for t in strokes] == [1024 - 600] * 2


def decoded(array: dict[str, str]) -> int:
    """Numbers in a typed array."""
    return math.prod(map(int, array["shape"].split(",")))


# -- what is shown ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", CATALOGUE.values(), ids=CATALOGUE)
def test_only_a_part_of_a_large_matrix_is_computed(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    """w13 of gpt-oss-20b, 5760 x 2880: payload bytes 5760 x 1440."""
    monkeypatch.setattr(Layout, "index_map", lambda *a: pytest.fail("the whole matrix was computed"))
    for row, column in ((0, 0), (5759, 1439), (3000, 700)):
        b = at(layout, (5760, 1440), row, column, read_as=LINEAR)
        assert row in b.rows and column in b.columns and b.picked.offset in b.memory
        assert b.offsets.numel() <= byte.MOST and len(b.memory) <= byte.MOST and b.memory[-1] < 5760 * 1440
        assert len(b.rows) % layout.tile[0] == 0 and len(b.columns) % layout.tile[1] == 0
        assert b.offsets[row - b.rows[0], column - b.columns[0]] == b.picked.offset
        at_line, at_place = divmod(b.picked.offset - b.memory[0], b.line)
        assert (b.from_row[at_line, at_place], b.from_column[at_line, at_place]) == (row, column)
        assert f"shown: {b.part()}" in str(b).replace("\n    ", " ") and max(map(len, str(b).splitlines())) <= byte.WIDTH
        size = len(byte_figure.draw(b).to_json())
        assert size < 130_000


def test_refusals() -> None:
    with pytest.raises(MxdebugError, match="rows % 64 == 0"):
        at(SM90_SCALE_FOLD, (100, 6), 0, 0)
    with pytest.raises(MxdebugError, match="a row below 100 and a column below 6"):
        at(SWIZZLE_128x4, (100, 6), 100, 0)  # in the padding: pick it by its offset
    with pytest.raises(MxdebugError, match="below 1024, the size of the buffer"):
        at_offset(SWIZZLE_128x4, (100, 6), 1024)
    with pytest.raises(MxdebugError, match="at most 262144"):
        at(LINEAR, (4, 4), 0, 0, most=512 * 512 + 1)
    with pytest.raises(MxdebugError, match="of a layout that moves whole bytes"):
        at(SM90_WEIGHT_INTERLEAVE, (16, 32), 0, 0, values=torch.zeros(16, 32, dtype=torch.uint8))


# -- the figure ---------------------------------------------------------------------------------------------------------


def letters(b: Byte) -> list[list[tuple[str, float, float]]]:
    return [list(zip(t.text, t.x, t.y)) for t in byte_figure.draw(b).select_traces({"mode": "markers+text"})]


def test_letters_stand_on_the_byte_in_both_panels() -> None:
    b = at(SWIZZLE_128x4, (128, 32), 69, 6, read_as=LINEAR)
    # lines of 32 bytes: 602 = 18 * 32 + 26, 2214 = 69 * 32 + 6
    assert letters(b) == [[("a", 6, 69), ("b", 18, 42)], [("a", 26, 576), ("b", 6, 2208)]]
    assert letters(at(SWIZZLE_128x4, (128, 32), 0, 0, read_as=LINEAR)) == [[("a", 0, 0)], [("a", 0, 0)]]  # the same byte: no b
    # row 4000 = 31 * 128 + 1 * 32, column 100 = 25 * 4: 31 * 23040 + 25 * 512 + 1 * 4 = 727044, in the line of 32 from 727040
    assert letters(at(SWIZZLE_128x4, (5760, 180), 4000, 100)) == [[("a", 100, 4000)], [("a", 4, 727040)]]
    says = byte_figure.draw(b).layout.meta["says"]
    assert "b: what a kernel that reads linear takes for it" in says and "padding" not in says and "Dots" not in says


def test_colours_are_rows_or_scales() -> None:
    values = torch.full((128, 8), 120, dtype=torch.uint8)
    values[0, 0], values[1, 1], values[2] = 0x00, 0xFF, 126
    figure = byte_figure.draw(at(SWIZZLE_128x4, (128, 8), 5, 5, values=values))
    names = [t.name for t in figure.data if t.showlegend]
    assert names == [name for name, _ in figures.SPECIAL.values()]  # a glyph each, never a colour
    bar = figure.layout.coloraxis
    assert (bar.cmin, bar.cmax) == (119.5, 126.5) and bar.colorbar.ticktext[0] == "2⁻⁷<br>120"
    rows = byte_figure.draw(at(SWIZZLE_128x4, (128, 8), 5, 5)).layout.coloraxis
    assert (rows.cmin, rows.cmax) == (-0.5, 127.5) and rows.colorbar.title.text == "row that the byte comes from"


def test_bytes_of_other_rows_are_dots_and_words_are_framed() -> None:
    far = byte_figure.draw(at(TRANSPOSED, (5760, 180), 100, 7))
    assert "Dots: bytes of rows outside the left panel." in far.layout.meta["says"]
    framed = byte_figure.draw(at(SM90_WEIGHT_INTERLEAVE, (16, 32), 3, 5))
    # (3, 5) = h 0, r8 3, q 1, l4 1: 3 * 32 + 1 * 4 + 1 * 2 = 102 in the upper half (ml 0); its word begins at 100: in the line of 16
    # from 96, place 4
    word, = framed.select_traces({"mode": "lines"})
    assert word.x == (3.5, 7.5, 7.5, 3.5, 3.5) and set(word.y) == {96 - 8, 96 + 8} and "Frame: the word" in framed.layout.meta["says"]
    assert not list(far.select_traces({"mode": "lines"}))


def test_the_same_figure_each_time() -> None:
    b = at(SWIZZLE_8x4, (300, 37), 17, 3, read_as=SWIZZLE_128x4)
    one, two = byte_figure.draw(b).to_json(), byte_figure.draw(b).to_json()
    assert one == two and "uid" not in one and json.loads(one)["layout"]["meta"]["says"].count("Strokes: padding") == 1
