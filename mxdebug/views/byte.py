"""Where one byte goes: its place in the logical matrix, its place in memory, and what lies around it. Only what is shown is computed."""

from __future__ import annotations

import math
import re
import textwrap
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import MxdebugError
from ..layouts import LAYOUTS, Layout
from ..layouts.marlin import MARLIN_A8, MARLIN_A16
from . import figures

CATALOGUE = {**LAYOUTS, **{m.name: m for of in (MARLIN_A16, MARLIN_A8) for m in (of.weights, of.scales)}}
MOST = 4096       # cells shown of the matrix, and as many bytes of the memory
AROUND = 3        # bytes listed before and after the picked one
WIDTH = 80        # characters in a line of text, so that a window of 900 pixels shows it whole


@dataclass(frozen=True)
class Place:
    """One byte: logical row and column, and its offset in memory. `padding`: it is in none of the matrix's rows or columns."""

    row: int
    column: int
    offset: int
    padding: bool

    def __str__(self) -> str:
        return "padding" if self.padding else f"row {self.row}, column {self.column}"


@dataclass(frozen=True)
class Taken:
    """What a kernel that reads the buffer in another layout takes for the picked byte.

    layout   the one that it reads; offset: where it looks for the byte
    places   what stands there: one byte; several where the two layouts move bits differently; none beyond the end of the buffer
    intact   whether that is one byte with its bits in order
    size     bytes in the buffer
    right    for how many of the `of` bytes of the shown logical part it takes the right one
    """

    layout: str
    offset: int
    places: tuple[Place, ...]
    intact: bool
    size: int
    right: int
    of: int

    def __str__(self) -> str:
        found = "; ".join(map(str, self.places)) or f"beyond the end of the buffer ({self.size} bytes)"
        bits = "bits of " if self.places and not self.intact else ""
        return (f"a kernel that reads {self.layout} looks at offset {self.offset}: {bits}{found}\n"
                f"it takes the right byte for {self.right} of {self.of} bytes of the logical part shown")


@dataclass(frozen=True, eq=False)
class Byte:
    """One byte in both orders, and the parts of both that are shown.

    layout         how the buffer is written; shape: rows, columns of the matrix; padded: with its padding
    picked         the byte; around: (offset, row, column) of those beside it in memory
    rows, columns  of the logical part: whole tiles; offsets: int64 [rows, columns], where each of its bytes lies
    memory         offsets of the physical part, drawn in lines of `line` bytes
    from_row, from_column   int64 [lines, line]: where each byte of the physical part comes from; -1 behind the end of the buffer
    taken          what a kernel that reads another layout gets; None: no other was asked for
    values         the E8M0 bytes to colour by, uint8 of `shape`; None: colour is the logical row
    """

    layout: Layout
    shape: tuple[int, int]
    padded: tuple[int, int]
    picked: Place
    around: tuple[Place, ...]
    rows: range
    columns: range
    offsets: Tensor
    memory: range
    line: int
    from_row: Tensor
    from_column: Tensor
    taken: Taken | None
    values: Tensor | None

    @property
    def whole(self) -> bool:
        """Whether nothing is left out."""
        return (len(self.rows), len(self.columns)) == self.padded and len(self.memory) == math.prod(self.padded)

    def part(self) -> str:
        """Which part of the matrix and of the memory is shown, in words."""
        (rows, columns), total = self.padded, math.prod(self.padded)
        return (f"rows {self.rows[0]} to {self.rows[-1]} of {rows}, columns {self.columns[0]} to {self.columns[-1]} of {columns}; "
                f"bytes {self.memory[0]} to {self.memory[-1]} of {total}")

    def __str__(self) -> str:
        p = self.picked
        if p.padding:  # the formula, as for a matrix that fills the tiles; then what is special here
            lines = self.layout.explain(p.row, p.column, *self.padded).splitlines()
            lines[-1:] = [f"that is padding: {self.shape[0]} x {self.shape[1]} is padded to {self.padded[0]} x {self.padded[1]} "
                          f"with {self.layout.fill}"]
        else:
            lines = self.layout.explain(p.row, p.column, *self.shape).splitlines()
        lines.append("beside it in memory")
        width = 1 + len(str(max(self.around[-1].offset, *self.padded)))
        for name, cells in (("offset", [str(n.offset) for n in self.around]),
                            ("row", ["pad" if n.padding else str(n.row) for n in self.around]),
                            ("column", ["pad" if n.padding else str(n.column) for n in self.around])):
            lines.append(f"  {name:<7}" + "".join(f"{c:>{max(width, 5)}}" for c in cells))
        if self.taken is not None:
            lines += str(self.taken).splitlines()
        lines.append("shown: all" if self.whole else f"shown: {self.part()}")
        return "\n".join(part for line in lines for part in _wrapped(line))


# -- making it --------------------------------------------------------------------------------------------------------


def at(layout: Layout, shape: tuple[int, int], row: int, column: int, *, read_as: Layout | None = None, values: Tensor | None = None,
       most: int = MOST) -> Byte:
    """The byte at that row and column of a matrix of `shape`.

    read_as   the layout in which a kernel reads the buffer; what does it take for this byte?
    values    uint8 of `shape`: E8M0 bytes to colour by, of a layout that moves whole bytes
    most      cells to show of the matrix, and of the memory
    Raises MxdebugError where a layout refuses the shape, the byte is not in the matrix, or more cells are asked for than a view shows.
    """
    padded = layout.padded(*shape)
    if not (0 <= row < shape[0] and 0 <= column < shape[1]):
        raise MxdebugError("byte", f"a row below {shape[0]} and a column below {shape[1]}", f"({row}, {column})")
    offset = int(layout.offsets(torch.tensor(row), torch.tensor(column), *shape))
    return _byte(layout, shape, padded, Place(row, column, offset, False), read_as, values, most)


def at_offset(layout: Layout, shape: tuple[int, int], offset: int, *, read_as: Layout | None = None, values: Tensor | None = None,
              most: int = MOST) -> Byte:
    """The byte at that offset in memory, which may be padding; for the rest see `at`."""
    padded = layout.padded(*shape)
    if not 0 <= offset < math.prod(padded):
        raise MxdebugError("offset", f"below {math.prod(padded)}, the size of the buffer", str(offset))
    return _byte(layout, shape, padded, _place(layout, shape, offset), read_as, values, most)


def _byte(layout: Layout, shape: tuple[int, int], padded: tuple[int, int], picked: Place, read_as: Layout | None,
          values: Tensor | None, most: int) -> Byte:
    if most > figures.LARGEST ** 2:
        raise MxdebugError("cells to show", f"at most {figures.LARGEST ** 2}", str(most))
    if values is not None and (values.dtype != torch.uint8 or tuple(values.shape) != shape or layout.bits):
        raise MxdebugError("values", f"uint8 {list(shape)}, of a layout that moves whole bytes",
                           f"{values.dtype} {list(values.shape)}, layout {layout.name}", "a payload, whose bytes would look like noise"
                           if layout.bits else "another operand's scales, or a shape that includes the padding")
    total = math.prod(padded)
    high = figures.LARGEST if total <= most else max(64, layout.tile[0])
    rows = _span(picked.row, padded[0], layout.tile[0], high)
    columns = _span(picked.column, padded[1], layout.tile[1], min(figures.LARGEST, most // len(rows)))
    offsets = layout.offsets(torch.tensor(rows)[:, None], torch.tensor(columns), *shape)
    line = _line(layout, padded)
    size = most // line * line
    first = int(offsets.min())  # the memory from where the logical part begins, if the picked byte is not too far from there
    if picked.offset >= first + size:
        first = max(0, (picked.offset - size // 2) // line * line)
    memory = range(min(first, max(0, total - size)), min(total, first + size))
    place = memory[0] + torch.arange(-(-len(memory) // line) * line).reshape(-1, line)
    from_row, from_column = (torch.where(place < total, n, -1) for n in layout.positions(place.clamp(max=total - 1), *shape))
    around = range(max(0, picked.offset - AROUND), min(total, picked.offset + AROUND + 1))
    taken = None if read_as is None or picked.padding else _taken(layout, read_as, shape, picked, rows, columns, offsets)
    return Byte(layout, shape, padded, picked, tuple(_place(layout, shape, o) for o in around), rows, columns, offsets, memory, line,
                from_row, from_column, taken, values)


def _place(layout: Layout, shape: tuple[int, int], offset: int) -> Place:
    row, column = map(int, layout.positions(torch.tensor(offset), *shape))
    return Place(row, column, offset, row >= shape[0] or column >= shape[1])


def _span(at: int, total: int, unit: int, most: int) -> range:
    """At most `most` of `total`, but one unit at least: whole units, with `at` among them."""
    size = max(unit, most // unit * unit)
    if total <= size:
        return range(total)
    start = min(at // size * size, total - size)
    return range(start, start + size)


def _line(layout: Layout, padded: tuple[int, int]) -> int:
    """Bytes in one drawn line of memory: what the fastest axes hold together, so that the eye finds the axes; 16 to 64 if it can be."""
    sizes = dict(zip(layout.pattern.split("->")[1].split(), layout.physical_shape(*padded)))
    fixed, line = dict(layout.sizes), 1
    for axis, size in reversed(sizes.items()):
        line *= size
        if line >= 16 or axis not in fixed:
            break
    if not 4 <= line <= 64:
        line = 32
    return 2 * line if line <= 32 and math.prod(padded) > 128 * line else line


def _taken(written: Layout, read: Layout, shape: tuple[int, int], picked: Place, rows: range, columns: range, offsets: Tensor) -> Taken:
    total, lanes = math.prod(written.padded(*shape)), _lanes(written, read)
    offset = int(read.offsets(torch.tensor(picked.row), torch.tensor(picked.column), *shape))
    whole = [lane[0][0] if lane == [(lane[0][0], bit) for bit in range(8)] else -1 for lane in lanes]
    found = sorted({offset // 4 * 4 + byte for byte, _ in lanes[offset % 4]})
    places = tuple(_place(written, shape, o) for o in found) if found[-1] < total else ()
    # Byte for byte: right is a byte whose eight bits come from the place where this layout put it.
    row, column = torch.tensor(rows)[:, None], torch.tensor(columns)
    inside = ((row < shape[0]) & (column < shape[1])).expand(offsets.shape)
    looks = read.offsets(row.clamp(max=shape[0] - 1), column.clamp(max=shape[1] - 1), *shape)
    source = torch.tensor(whole)[looks % 4]
    right = inside & (source >= 0) & (looks // 4 * 4 + source == offsets)
    return Taken(read.name, offset, places, whole[offset % 4] >= 0, total, int(right.sum()), int(inside.sum()))


def _wrapped(line: str) -> list[str]:
    """A line in parts that a narrow window shows whole; an axis and its digit stay together."""
    joined = re.sub(r"(\w) (\d+\*)", "\\1\u00a0\\2", line)
    return [part.replace("\u00a0", " ") for part in textwrap.wrap(joined, WIDTH, subsequent_indent="    ")]


def _lanes(written: Layout, read: Layout) -> list[list[tuple[int, int]]]:
    """For each byte of a 32-bit word as the reader restores it, its eight bits from the lowest: (byte, bit) that the writer put there."""
    to = written.bits or range(32)
    source = {target: bit for bit, target in enumerate(to)}
    looks = read.bits or range(32)
    return [[divmod(source[looks[8 * byte + bit]], 8) for bit in range(8)] for byte in range(4)]
