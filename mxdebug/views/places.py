"""Where bytes lie: one matrix in logical order beside the same bytes in memory, with some of them marked in both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
import torch
from torch import Tensor

from ..errors import MxdebugError
from ..layouts import Layout
from . import figures

THIN = 64  # more rows than that are drawn without gaps, which would take a fifth of the colour away
PANEL, LETTER = 150, 19  # pixels that a panel is wide in a window of 900 with the file browser open, and that a letter needs
LETTERS = "abcdefghijklmnopqrstuvwxyz"
SCALE, ROW = "scale byte", "logical row"


@dataclass(frozen=True)
class Mark:
    """One byte, in both orders: (row, column) of the logical matrix; `offset` in memory, drawn at (line, place)."""

    letter: str
    row: int
    column: int
    offset: int
    line: int
    place: int


@dataclass(frozen=True, eq=False)
class Places:
    """What the two halves of the figure hold.

    title, layout   for prints
    shape       rows, columns of the whole logical matrix
    first_row, first_offset   of the part that is shown
    logical     uint8 [rows shown, columns]; what each cell is coloured by
    physical    uint8 [lines, bytes a line]: the same bytes in memory order
    colour      SCALE (E8M0 bytes) or ROW (the row that a byte comes from)
    """

    title: str
    layout: str
    shape: tuple[int, int]
    first_row: int
    first_offset: int
    logical: Tensor
    physical: Tensor
    colour: str
    marks: tuple[Mark, ...]

    def __str__(self) -> str:
        rows, columns = self.logical.shape
        lines = [f"rows {self.first_row} to {self.first_row + rows - 1} of {self.shape[0]}, {columns} columns, "
                 f"fill bytes {self.first_offset} to {self.first_offset + self.physical.numel() - 1} in memory"]
        for m in self.marks:
            value = f", value {int(self.logical[m.row - self.first_row, m.column])}" if self.colour == SCALE else ""
            lines.append(f"  {m.letter}: row {m.row:>3}, column {m.column:>2} -> byte {m.offset:>4}{value}")
        for m in self.marks[:1]:
            lines.append(f"  in linear order {m.letter} would be byte {m.row * self.shape[1] + m.column}")
        return "\n".join(lines)


def _places(layout: Layout, shape: tuple[int, int], rows: range, line: int, at: Sequence[tuple[int, int]], title: str, colour: str,
            logical: Tensor, physical: Tensor) -> Places:
    offsets = layout.index_map(*shape)
    shown = offsets[rows.start: rows.stop]
    first = int(shown.min())
    if int(shown.max()) - first + 1 != shown.numel() or shown.numel() % line:
        raise MxdebugError("rows to show", f"whole tiles of layout {layout.name} ({layout.tile[0]} rows), in lines of {line} bytes",
                           f"rows {rows.start} to {rows.stop - 1}")
    marks = []
    for letter, (row, column) in zip(LETTERS, at):
        if row not in rows or not 0 <= column < shape[1]:
            raise MxdebugError("byte to mark", f"rows {rows.start} to {rows.stop - 1}, columns below {shape[1]}", f"({row}, {column})")
        offset = int(offsets[row, column])
        marks.append(Mark(letter, row, column, offset, *divmod(offset - first, line)))
    in_memory = physical.flatten()[first: first + shown.numel()].reshape(-1, line)
    return Places(title, layout.name, shape, rows.start, first, logical[rows.start: rows.stop], in_memory, colour, tuple(marks))


def of_scales(layout: Layout, logical: Tensor, physical: Tensor, rows: range, at: Sequence[tuple[int, int]], *,
              title: str, line: int = 16) -> Places:
    """Block scales before and after a layout.

    logical   uint8 [rows, columns] of one expert; physical: its bytes as the kernel gets them, any shape
    rows      which rows to show: they must fill whole tiles; line: bytes drawn in one line
    at        (row, column) of the bytes to mark
    Raises MxdebugError where the bytes are not that matrix in that layout.
    """
    shape = (logical.shape[0], logical.shape[1])
    if not torch.equal(layout.pack(logical).flatten(), physical.flatten()):
        raise MxdebugError("physical bytes", f"the logical matrix in layout {layout.name}", "other bytes",
                           "another layout, expert or row order")
    return _places(layout, shape, rows, line, at, title, SCALE, logical, physical)


def of_rows(layout: Layout, shape: tuple[int, int], rows: range, at: Sequence[tuple[int, int]], *,
            title: str, line: int = 32) -> Places:
    """Where the bytes of each row go; for payloads, whose values would look like noise. shape: rows, columns in bytes."""
    source = (torch.arange(shape[0])[:, None] - rows.start).clamp(0, len(rows) - 1).to(torch.uint8).expand(shape).contiguous()
    physical = torch.empty(shape[0] * shape[1], dtype=torch.uint8)
    physical[layout.index_map(*shape).flatten()] = source.flatten()
    return _places(layout, shape, rows, line, at, title, ROW, source, physical)


def draw(p: Places, cell: str | None = None) -> go.Figure:
    """Two heatmaps side by side, cell for byte. cell: what one cell is, in words, where it is not a byte of a weight."""
    cell = cell or ("a byte of the payload (two weights), coloured by its row" if p.colour == ROW else "a block of 32 weights, coloured by its block scale")
    says = f"Left: one cell {cell}. Right: the same bytes in the order in which they lie in memory. Letters mark the same bytes in both."
    rows, columns = p.logical.shape
    lines, places = p.physical.shape
    height = figures.cell_height(max(rows, lines))
    figure = figures.figure(p.title, says, plot=height, below=figures.BELOW_CELLS)
    both = torch.cat([p.logical.flatten(), p.physical.flatten()])
    panels = ((p.logical, "x", "y", p.first_row, 1, [(m.letter, m.column, m.row) for m in p.marks]),
              (p.physical, "x2", "y2", p.first_offset, places, [(m.letter, m.place, p.first_offset + m.line * places) for m in p.marks]))
    for i, (codes, x, y, first, step, marks) in enumerate(panels):
        figures.cells(figure, codes, both, x, y, first, step, scale=p.colour == SCALE, bar=i == 0)
        letters = apart(marks, (PANEL / codes.shape[1], height / codes.shape[0] / step), step, first + codes.shape[0] * step / 2)
        for (_, column, at), (_, _, put) in zip(marks, letters):
            if put != at:
                figure.add_scatter(x=[column, column], y=[at, put], mode="lines+markers", xaxis=x, yaxis=y,
                                   line={"color": "white", "width": 2}, cliponaxis=False, hoverinfo="skip", showlegend=False,
                                   marker={"size": 5, "color": "white", "line": {"color": "black", "width": 1}})
        figure.add_scatter(x=[m[1] for m in letters], y=[m[2] for m in letters], text=[m[0] for m in letters], mode="markers+text",
                           xaxis=x, yaxis=y, marker={"size": 16, "color": "white", "line": {"color": "black", "width": 1.5}},
                           textfont={"color": "black", "size": 12}, cliponaxis=False, hoverinfo="skip", showlegend=False)
    if rows > THIN:
        figure.data[0].ygap = 0
    end = p.first_offset + (lines - 0.5) * places
    figure.update_layout(
        xaxis=figures.plain_axis(domain=[0, 0.41], title="column", range=[-0.5, columns - 0.5]),
        yaxis=figures.plain_axis(title="row", ticklabelstandoff=5, tickvals=_ticks(p.first_row, rows, 1),
                                 range=[p.first_row + rows - 0.5, p.first_row - 0.5]),
        xaxis2=figures.plain_axis(domain=[0.57, 1], title=f"byte within a line of {places}", anchor="y2", range=[-0.5, places - 0.5]),
        yaxis2=figures.plain_axis(title="first byte of the line", anchor="x2", ticklabelstandoff=5,
                                  tickvals=_ticks(p.first_offset, lines, places), range=[end, p.first_offset - 0.5 * places]))
    figures.heading(figure, 0, "logical")
    figures.heading(figure, 0.57, "physical: in memory")
    figure.update_annotations(yshift=9, selector={"yanchor": "bottom"})  # headings and numbers leave room for half a letter
    figure.update_xaxes(ticklabelstandoff=7)
    return figure


def apart(marks: list[tuple[str, int, int]], pixels: tuple[float, float], step: int, middle: float) -> list[tuple[str, int, int]]:
    """Where to put the letters of marks (letter, x, y): one that would lie on an earlier one moves by steps of y towards the middle.

    pixels   for 1 of x and for 1 of y
    """
    out: list[tuple[str, int, int]] = []
    for letter, x, y in marks:
        put, way = y, step if y < middle else -step
        while any(abs(x - a) * pixels[0] < LETTER and abs(put - b) * pixels[1] < LETTER for _, a, b in out):
            put += way
        out.append((letter, x, put))
    return out


def _ticks(first: int, count: int, step: int) -> list[int]:
    every = max(1, -(-count // 8))
    every = next(e for e in (1, 2, 4, 8, 16, 32, 64, 128, 256, 512) if e >= every)
    return [first + i * step for i in range(0, count, every)]
