"""Drawing where one byte goes: `byte.Byte` as two panels, logical and physical."""

from __future__ import annotations

import base64
import math
from typing import Any

import plotly.graph_objects as go
import torch
from torch import Tensor

from . import figures
from .byte import Byte

LEFT, RIGHT = (0, 0.42), (0.58, 1)  # where the panels are
FAR = ("from a row outside the left panel", "circle")


def draw(b: Byte) -> go.Figure:
    """Logical and physical part side by side; `a` is the picked byte in both, `b` what a kernel that reads another layout takes for it."""
    row, column = torch.tensor(b.rows)[:, None], torch.tensor(b.columns)
    padding = ((row >= b.shape[0]) | (column >= b.shape[1])).expand(b.offsets.shape)
    behind = b.from_row < 0
    padding_right = (b.from_row >= b.shape[0]) | (b.from_column >= b.shape[1])
    far = ((b.from_row < b.rows[0]) | (b.from_row > b.rows[-1])) & ~behind & ~padding_right
    if b.values is None:
        left, right = (row - b.rows[0]).expand(b.offsets.shape), b.from_row - b.rows[0]
    else:
        values = b.values.long()
        left, right = (values[r.clamp(0, b.shape[0] - 1), c.clamp(0, b.shape[1] - 1)]
                       for r, c in ((row, column), (b.from_row, b.from_column)))
    has_padding, has_far = bool(padding.any() or padding_right.any()), bool(far.any())
    special = b.values is not None and bool(((b.values == 0x00) | (b.values == 0xFF)).any())
    figure = figures.figure(_title(b), _says(b, has_padding, has_far),
                            plot=max(120, figures.cell_height(max(b.offsets.shape[0], b.from_row.shape[0]))), below=figures.BELOW_CELLS,
                            legend=has_padding or has_far or special)
    hover = ("row %{y}, column %{x}<br>lies at offset %{customdata}",
             "offset %{y} + %{x}<br>comes from row %{customdata[0]}, column %{customdata[1]}")
    _cells(figure, b, left, {figures.PADDING: padding}, padding, b.offsets, hover[0])
    _cells(figure, b, right, {figures.PADDING: padding_right, FAR: far}, far | padding_right | behind,
           torch.stack([b.from_row, b.from_column], -1), hover[1])
    _marks(figure, b)
    rows, lines = len(b.rows), behind.shape[0]
    layout = figure.layout  # set one by one: `update_layout` merges, and takes most of a move's time
    layout.coloraxis = _colours(b, torch.cat([left[~padding], right[~(far | padding_right | behind)]]))
    layout.xaxis = figures.plain_axis(domain=LEFT, title="column", range=[b.columns[0] - 0.5, b.columns[-1] + 0.5])
    layout.yaxis = figures.plain_axis(title="row", tickvals=_ticks(b.rows[0], rows, 1), range=[b.rows[-1] + 0.5, b.rows[0] - 0.5])
    layout.xaxis2 = figures.plain_axis(domain=RIGHT, title=f"byte within a line of {b.line}", anchor="y2", range=[-0.5, b.line - 0.5])
    layout.yaxis2 = figures.plain_axis(
        title="first byte of the line", anchor="x2", tickformat="d", tickvals=_ticks(b.memory[0], lines, b.line),
        range=[b.memory[0] + (lines - 0.5) * b.line, b.memory[0] - 0.5 * b.line])
    figures.heading(figure, LEFT[0], "logical")
    figures.heading(figure, RIGHT[0], "physical: in memory")
    return figure


def _title(b: Byte) -> str:
    return f"{b.layout.name}: row {b.picked.row}, column {b.picked.column} lies at offset {b.picked.offset}"


def _says(b: Byte, padding: bool, far: bool) -> str:
    colour = "its row" if b.values is None else "the block scale that it is"
    says = [f"One cell is one byte, coloured by {colour}; left in rows and columns, right in the order of memory.",
            "a: the picked byte, in both."]
    if b.taken is not None:
        says.append(f"b: what a kernel that reads {b.taken.layout} takes for it.")
    if b.layout.bits:
        says.append("Frame: the word inside which this layout moves the bits.")
    if not b.whole:
        says.append(f"Only a part is drawn: {b.part()}.")
    if far:
        says.append("Dots: bytes of rows outside the left panel.")
    if padding:
        says.append("Strokes: padding.")
    return " ".join(says)


def _cells(figure: go.Figure, b: Byte, codes: Tensor, glyphs: dict[tuple[str, str], Tensor], hidden: Tensor, custom: Tensor,
           hover: str) -> None:
    """One panel, the left one first: a heatmap of codes without what is hidden, and glyphs."""
    left = not figure.data
    axes = {"xaxis": "x" if left else "x2", "yaxis": "y" if left else "y2"}
    first_x, first_y, step = (b.columns[0], b.rows[0], 1) if left else (0, b.memory[0], b.line)
    if b.values is not None:
        special = {name: (codes == code) & ~hidden for code, name in figures.SPECIAL.items()}
        glyphs, hidden = {**glyphs, **special}, hidden | (codes == 0x00) | (codes == 0xFF)
    gap = 0.6 if max(codes.shape) <= 64 else 0
    seen = torch.where(hidden, torch.nan, codes.float()) if bool(hidden.any()) else codes
    figure.add_heatmap(
        z=_array(seen), x0=first_x, dx=1, y0=first_y, dy=step, coloraxis="coloraxis",
        xgap=gap, ygap=gap, hoverongaps=True, customdata=_array(custom),
        hovertemplate=hover + "<extra></extra>", **axes)
    known = {trace.name for trace in figure.data}
    for (name, symbol), where in glyphs.items():
        if bool(where.any()):
            y, x = where.nonzero(as_tuple=True)
            dot = symbol == FAR[1]
            figure.add_scatter(x=_array(first_x + x), y=_array(first_y + y * step), mode="markers", name=name, legendgroup=name,
                               showlegend=name not in known, hoverinfo="skip",  # the cell below says more
                               marker={"symbol": symbol, "size": 2 if dot else 5, "color": figures.TEXT,
                                       "line": {"color": figures.TEXT, "width": 0 if dot else 1}}, **axes)


def _colours(b: Byte, codes: Tensor) -> dict[str, Any]:
    """A colour for each code, and the bar that says which: for block scales one step a binade."""
    if b.values is not None:
        codes = codes[(codes != 0x00) & (codes != 0xFF)]
    low, high = (int(codes.min()), int(codes.max())) if codes.numel() else (127, 127)
    ticks = list(range(low, high + 1, -(-(high - low + 1) // 9)))
    labels = [str(b.rows[0] + t) for t in ticks] if b.values is None else [f"{figures.power(t - 127)}<br>{t}" for t in ticks]
    title = "row that the byte comes from" if b.values is None else "block scale, and its byte"
    scale = "Cividis" if b.values is None else figures.binades(low, high)
    return {"cmin": low - 0.5, "cmax": high + 0.5, "colorscale": scale, "colorbar": {
        "orientation": "h", "y": 0, "yanchor": "top", "ypad": 48, "x": 0, "xanchor": "left", "xpad": 0, "len": 1, "thickness": 10,
        "outlinewidth": 0, "ticks": "", "tickvals": ticks, "ticktext": labels, "tickfont": {"size": 11, "color": figures.TEXT},
        "title": {"text": title, "side": "top", "font": {"size": 11, "color": figures.TEXT}}}}


def _marks(figure: go.Figure, b: Byte) -> None:
    """The letters; and, where bits move, a frame around the word of the picked byte."""
    logical, physical = [("a", b.picked.row, b.picked.column)], [("a", b.picked.offset)]
    if b.taken is not None and b.taken.offset != b.picked.offset:
        logical += [("b", p.row, p.column) for p in b.taken.places]
        physical.append(("b", b.taken.offset))
    first = b.memory[0]
    panels = ((("x", "y"), [(m, c, r) for m, r, c in logical if r in b.rows and c in b.columns]),
              (("x2", "y2"), [(m, (o - first) % b.line, first + (o - first) // b.line * b.line) for m, o in physical if o in b.memory]))
    if b.layout.bits:
        line, place = divmod(b.picked.offset // 4 * 4 - first, b.line)
        ends = ((-0.5, -0.5), (3.5, -0.5), (3.5, 0.5), (-0.5, 0.5), (-0.5, -0.5))
        figure.add_scatter(x=[place + dx for dx, _ in ends], y=[first + (line + dy) * b.line for _, dy in ends], mode="lines", xaxis="x2",
                           yaxis="y2", line={"color": figures.TEXT, "width": 2}, hoverinfo="skip", showlegend=False)
    for (x, y), marks in panels:
        figure.add_scatter(x=[m[1] for m in marks], y=[m[2] for m in marks], text=[m[0] for m in marks], mode="markers+text",
                           xaxis=x, yaxis=y, cliponaxis=False, hoverinfo="skip", showlegend=False, textfont={"color": "black", "size": 12},
                           marker={"size": 16, "color": "white", "line": {"color": "black", "width": 1.5}})


def _ticks(first: int, count: int, step: int) -> list[int]:
    every = 1 << max(0, math.ceil(math.log2(count / 8)))
    return [first + i * step for i in range(0, count, every)]


def _array(t: Tensor) -> dict[str, str]:
    """Numbers as plotly's typed array, which is a third of their text; NaN leaves a cell empty."""
    if t.is_floating_point():
        kind, name = torch.float32, "f4"
    else:
        largest = int(t.max()) if t.numel() else 0
        kind, name = next((k, n) for k, n, bits in ((torch.int8, "i1", 7), (torch.int16, "i2", 15), (torch.int32, "i4", 31), (None, "", 64))
                          if largest < 1 << bits)
    data = bytes(t.to(kind).contiguous().flatten().view(torch.uint8).tolist())
    return {"dtype": name, "bdata": base64.b64encode(data).decode(), "shape": ", ".join(map(str, t.shape))}
