"""What all figures share: colours that work on light and dark, one sentence below each, and output that is the same on every machine."""

from __future__ import annotations

import json
import textwrap
from typing import Any

import plotly.graph_objects as go
import torch
from plotly.colors import sample_colorscale
from torch import Tensor

from ..errors import MxdebugError

MIMETYPE = "application/vnd.plotly.v1+json"
TEXT = "#7d7d7d"  # readable on JupyterLab's white and on its near-black (contrast 4.1 and 4.6)
GRID = "rgba(127, 127, 127, 0.28)"
# Okabe and Ito's colours; letters or shapes always say the same thing besides.
UP, GATE, WRONG = "#56b4e9", "#e69f00", "#d55e00"
LARGEST = 512  # cells along each side of a heatmap
LINE = 17      # pixels a line of text takes
WIDTH = 74     # characters a line of text has, so that nothing is cut off in a window of 900 pixels


def binades(low: int, high: int) -> list[tuple[float, str]]:
    """A plotly colour scale with one step, not a gradient, for each integer from low to high; dark is low (cividis)."""
    n = high - low + 1
    colours = sample_colorscale("Cividis", [0.5] if n == 1 else [i / (n - 1) for i in range(n)])
    return [(edge / n, colour) for i, colour in enumerate(colours) for edge in (i, i + 1)]


def power(exponent: int) -> str:
    """2 to that power as a label, e.g. 2⁻⁶."""
    return "2" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def figure(title: str, says: str, height: int, below: int = 44, legend: bool = False) -> go.Figure:
    """An empty figure with a title above and, in words, what it shows below.

    height in pixels without the sentence; below: pixels between the plot and the sentence (tick labels, axis titles, colour bar).
    """
    lines = textwrap.wrap(says, WIDTH)
    top = 44 + (26 if legend else 0)
    figure = go.Figure()
    figure.update_layout(
        template=None, height=height + len(lines) * LINE, margin={"l": 62, "r": 14, "t": top, "b": below + len(lines) * LINE + 8},
        paper_bgcolor="rgba(0,0,0,0)", plot_bgcolor="rgba(0,0,0,0)", font={"family": "sans-serif", "size": 12, "color": TEXT},
        title={"text": f"<b>{title}</b>", "x": 0, "xref": "paper", "xanchor": "left", "y": 1, "yref": "container", "yanchor": "top",
               "pad": {"t": 12}, "font": {"size": 14, "color": TEXT}},
        legend={"orientation": "h", "x": 0, "xanchor": "left", "y": 1, "yanchor": "bottom", "bgcolor": "rgba(0,0,0,0)"},
        showlegend=legend, dragmode=False, hoverlabel={"font": {"family": "monospace", "size": 12}},
        meta={"says": says})
    figure.add_annotation(text="<br>".join(lines), x=0, y=0, xref="paper", yref="paper", xanchor="left", yanchor="top", yshift=-below,
                          align="left", showarrow=False, font={"size": 13, "color": TEXT})
    return figure


def plain_axis(**more: Any) -> dict[str, Any]:
    """An axis without frame, for cells and lines alike."""
    return {"showgrid": False, "zeroline": False, "showline": False, "ticks": "", "color": TEXT, "title": {"standoff": 6}, "fixedrange": True, **more}


def pool(codes: Tensor, most: int = LARGEST) -> tuple[Tensor, tuple[int, int]]:
    """Codes [rows, columns] -> at most most x most codes, each the largest of a group; (rows, columns) of a group. (1, 1): nothing pooled.

    A last group that is not full counts only what it has.
    """
    if codes.dim() != 2:
        raise MxdebugError("cells", "a matrix", f"shape {list(codes.shape)}", "pick one expert first")
    factors = tuple(-(-size // most) for size in codes.shape)
    for axis, factor in enumerate(factors):
        if factor > 1:
            codes = torch.cat([part.amax(dim=axis, keepdim=True) for part in codes.split(factor, dim=axis)], dim=axis)
    return codes, (factors[0], factors[1])


def show(figure: go.Figure) -> None:
    """Display a figure in a notebook as plotly's MIME type, without plotly's JavaScript; as its sentence where figures cannot be drawn."""
    from IPython.display import display

    data = json.loads(figure.to_json())
    bundle = {"data": data["data"], "layout": data["layout"], "config": {"displayModeBar": False, "responsive": True}}
    title = figure.layout.title.text.replace("<b>", "").replace("</b>", "")
    display({MIMETYPE: bundle, "text/plain": f"[figure] {title}. {figure.layout.meta['says']}"}, raw=True)


SPECIAL = {0x00: ("0x00: read as 0.0 on SM90", "circle-open"), 0xFF: ("0xFF: read as inf on SM90", "x")}
PADDING = ("padding", "line-ne")


def cells(figure: go.Figure, codes: Tensor, alike: Tensor, x: str, y: str, first: int, step: int, *, scale: bool, bar: bool, padding: Tensor | None = None) -> None:
    """Add a heatmap of uint8 codes [rows, columns]: one colour for each code, scale bytes 0x00 and 0xFF and padding as glyphs with a legend entry.

    alike     all codes that must share the colour scale (other panels); first, step: the y of row 0 and between rows
    scale     whether codes are E8M0 bytes, labelled with their value, or plain numbers; bar: whether to add the colour bar
    padding   bool [rows, columns]: cells that are padding
    """
    special = [c for c in SPECIAL if scale and bool((codes == c).any())]
    usual = alike[(alike != 0x00) & (alike != 0xFF)] if scale else alike
    low, high = (int(usual.min()), int(usual.max())) if usual.numel() else (127, 127)
    hidden = torch.zeros_like(codes, dtype=torch.bool) if padding is None else padding.clone()
    for c in special:
        hidden |= codes == c
    z = [[None if h else v for v, h in zip(row, hide)] for row, hide in zip(codes.tolist(), hidden.tolist())]
    n = high - low + 1
    every = -(-n // 10)
    ticks = list(range(low, high + 1, every))
    labels = [f"{power(t - 127)}<br>{t}" for t in ticks] if scale else [str(t) for t in ticks]
    bar_title = "block scale, and its byte" if scale else "row that the byte comes from"
    figure.add_heatmap(
        z=z, y0=first, dy=step, xaxis=x, yaxis=y, zmin=low - 0.5, zmax=high + 0.5, colorscale=binades(low, high), showscale=bar, xgap=0.6, ygap=0.6, hoverongaps=False,
        hovertemplate=("%{y}, %{x}: %{z}<extra></extra>"),
        colorbar={"orientation": "h", "y": 0, "yanchor": "top", "ypad": 46, "x": 0, "xanchor": "left", "xpad": 0, "len": 1, "thickness": 10, "outlinewidth": 0, "ticks": "",
                  "tickvals": ticks, "ticktext": labels, "tickfont": {"size": 11, "color": TEXT},
                  "title": {"text": bar_title, "side": "top", "font": {"size": 11, "color": TEXT}}} if bar else None)
    glyphs = [(codes == c, *SPECIAL[c]) for c in special]
    if padding is not None and bool(padding.any()):
        glyphs.append((padding, *PADDING))
    for where, name, symbol in glyphs:
        at = where.nonzero().tolist()
        figure.add_scatter(x=[c for _, c in at], y=[first + r * step for r, _ in at], mode="markers", name=name, xaxis=x, yaxis=y, legendgroup=name, showlegend=bar,
                           marker={"symbol": symbol, "size": 6, "color": TEXT, "line": {"color": TEXT, "width": 1.2}}, hoverinfo="name")
