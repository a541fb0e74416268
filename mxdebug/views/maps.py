"""Maps of uint8 codes, pooled, with glyphs for all that no colour stands for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
import torch
from torch import Tensor

from . import figures

GLYPHS = 48  # glyphs along each side of a map: more would run into each other


@dataclass(frozen=True, eq=False)
class Map:
    """What a map shows, in cells.

    codes    uint8 [rows, columns]; 0: a glyph stands there instead of a colour
    glyphs   name -> (symbol, bool [rows, columns]); no cell is in two of them
    pooled   (rows, columns) of the matrix in one cell
    """

    codes: Tensor
    glyphs: dict[str, tuple[str, Tensor]]
    pooled: tuple[int, int]

    @property
    def thinned(self) -> bool:
        """Whether one glyph stands for several cells."""
        return bool(self.glyphs) and max(self.codes.shape) > GLYPHS


def thinned(where: Tensor) -> list[tuple[int, int]]:
    """Cells of bool [rows, columns] to put a glyph on: of each tile, of at most GLYPHS x GLYPHS, the one nearest to its middle.

    Of several that are equally near, the first one by rows.
    """
    rows, columns = where.shape
    high, wide = figures.pooling((rows, columns), GLYPHS)
    r, c = where.nonzero().unbind(1)
    off = (2 * (r % high) - high + 1).abs() + (2 * (c % wide) - wide + 1).abs()
    nearest = torch.full((GLYPHS * GLYPHS,), -1).scatter_reduce(
        0, r // high * GLYPHS + c // wide, off * rows * columns + r * columns + c, "amin", include_self=False)
    return [divmod(i % (rows * columns), columns) for i in nearest[nearest >= 0].tolist()]


def add_map(figure: go.Figure, m: Map, colours: dict[int, str], ticks: dict[int, str], bar: str, x: str, y: str,
            domain: tuple[float, float], what: tuple[str, str] = ("row", "column")) -> None:
    """Add a map of codes, its glyphs and, below it, its colour bar.

    colours   of all codes from the lowest to the highest, without gaps; ticks: code -> label on the bar; bar: its title
    x, y      axes; domain: of the x axis; what: the words for rows and columns when a cell is pointed at
    """
    low, high = min(colours), max(colours)
    scale = [colours[c] for c in range(low, high + 1)]
    blank = bool((m.codes == 0).any())
    codes = torch.where(m.codes == 0, low - 1, m.codes) if blank else m.codes  # next to the lowest, so that the scale has no empty steps
    first = low - blank
    gap = 0.6 if max(m.codes.shape) <= 64 else 0
    figure.add_heatmap(
        z=figures.typed(codes), x0=0, dx=m.pooled[1], y0=0, dy=m.pooled[0], xaxis=x, yaxis=y, zmin=first - 0.5, zmax=high + 0.5,
        xgap=gap, ygap=gap, colorscale=figures.steps([figures.BLANK] * blank + scale),
        hovertemplate=f"{what[0]} %{{y}}, {what[1]} %{{x}}<extra></extra>",
        colorbar={"orientation": "h", "y": 0, "yanchor": "top", "ypad": 48, "x": domain[0], "xanchor": "left", "xpad": 0,
                  "len": domain[1] - domain[0], "thickness": 10, "outlinewidth": 0, "ticks": "", "tickvals": list(ticks),
                  "ticktext": list(ticks.values()), "tickangle": 0, "tickfont": {"size": 11, "color": figures.TEXT},
                  "title": {"text": bar, "side": "top", "font": {"size": 11, "color": figures.TEXT}}})
    known = {trace.name for trace in figure.data}
    for name, (symbol, where) in m.glyphs.items():
        at = thinned(where)
        figure.add_scatter(
            x=figures.typed_positions([c * m.pooled[1] for _, c in at]), y=figures.typed_positions([r * m.pooled[0] for r, _ in at]),
            mode="markers", name=name, xaxis=x, yaxis=y, legendgroup=name, showlegend=name not in known, hoverinfo="name",
            marker={"symbol": symbol, "size": 3 if symbol == figures.SMALL else 6, "color": figures.TEXT,
                    "line": {"color": figures.TEXT, "width": 1.2}})


def map_axes(m: Map, domain: tuple[float, float], number: str, row: str, column: str) -> dict[str, Any]:
    """Layout of the axes of a map: `number` is "" or "2", ...; row, column: titles."""
    rows, columns = m.codes.shape
    return {f"xaxis{number}": figures.plain_axis(domain=list(domain), anchor=f"y{number}", title=column,
                                         range=[-0.5 * m.pooled[1], (columns - 0.5) * m.pooled[1]]),
            f"yaxis{number}": figures.plain_axis(anchor=f"x{number}", title=row, range=[(rows - 0.5) * m.pooled[0], -0.5 * m.pooled[0]])}
