"""What all figures share: colours that work on light and dark, one sentence below each, and output that is the same on every machine."""

from __future__ import annotations

import base64
import json
import textwrap
from typing import Any

import plotly.graph_objects as go
import torch
from plotly.colors import sample_colorscale
from torch import Tensor

from ..errors import MxdebugError

MIMETYPE = "application/vnd.plotly.v1+json"
TEXT = "#7a7a7a"  # readable on JupyterLab's white and on its near-black (contrast 4.3 and 4.4)
GRID = "rgba(127, 127, 127, 0.28)"
# Okabe and Ito's colours; letters or shapes always say the same thing besides.
UP, GATE, OTHER = "#56b4e9", "#e69f00", "#009e73"
MEANT, READ = "#0072b2", "#d55e00"  # bars: filled, what the checkpoint means; hollow, what the kernel reads
BLUES = ("rgb(181, 220, 245)", "rgb(63, 151, 211)", "rgb(10, 75, 140)")
ORANGES = ("rgb(251, 217, 160)", "rgb(229, 138, 31)", "rgb(154, 67, 0)")
EQUAL = "rgba(127, 127, 127, 0.25)"  # cells without a difference: a shade of either background, not a step of a scale
BLANK = "rgba(0, 0, 0, 0)"
LARGEST = 512  # cells along each side of a heatmap
TOP = 40       # pixels above the plot for the title; headings of panels and a legend need HEADINGS and LEGEND more
HEADINGS, LEGEND = 22, 26
BELOW_CELLS = 118  # pixels below a heatmap: ticks, axis title, colour bar
LINE = 17      # pixels a line of text takes
WIDTH = 72     # characters a line of text has, so that nothing is cut off in a window of 900 pixels with the file browser open


def steps(colours: list[str]) -> list[tuple[float, str]]:
    """A plotly colour scale of equal steps, not a gradient."""
    return [(edge / len(colours), colour) for i, colour in enumerate(colours) for edge in (i, i + 1)]


def binade_colours(n: int) -> list[str]:
    """n colours from dark to bright (cividis)."""
    return sample_colorscale("Cividis", [0.5] if n == 1 else [i / (n - 1) for i in range(n)])


def binades(low: int, high: int) -> list[tuple[float, str]]:
    """A plotly colour scale with one step for each integer from low to high; dark is low (cividis)."""
    return steps(binade_colours(high - low + 1))


def diverging_colours(n: int) -> list[str]:
    """2n + 1 colours for -n to n, n >= 1: blues below 0, EQUAL at 0, oranges above; the further from 0 the darker."""
    at = [1.0] if n == 1 else [i / (n - 1) for i in range(n)]
    low, high = (sample_colorscale(list(ends), at) for ends in (BLUES, ORANGES))
    return [*reversed(low), EQUAL, *high]


def cell_height(rows: int) -> int:
    """Pixels for a heatmap of that many rows: cells of up to 9 pixels, about 420 in all, but a pixel a row at least."""
    return int(max(1.0, min(9.0, 420 / rows)) * rows)


def power(exponent: int) -> str:
    """2 to that power as a label, e.g. 2⁻⁶."""
    return "2" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def figure(title: str, says: str, plot: int, below: int = 54, legend: int = 0, headings: bool = True, left: int = 62) -> go.Figure:
    """An empty figure with a title above and, in words, what it shows below.

    plot   the height of the plot in pixels; below: pixels between the plot and the sentence (tick labels, axis titles, colour bar);
    legend: lines that it takes, True is one; headings: whether to leave room for them; left: pixels for the vertical axis' tick labels
    """
    lines = textwrap.wrap(says, WIDTH)
    top = TOP + HEADINGS * headings + LEGEND * legend
    height = top + plot + below + len(lines) * LINE + 12
    # All at once, which is several times faster than update_layout; and without plotly's own template, which takes longer to load than all the rest.
    figure = go.Figure(layout={
        "template": {}, "height": height,
        "margin": {"l": left, "r": 14, "t": top, "b": below + len(lines) * LINE + 12},
        "paper_bgcolor": BLANK, "plot_bgcolor": BLANK, "font": {"family": "sans-serif", "size": 12, "color": TEXT},
        "title": {"text": f"<b>{title}</b>", "x": 0, "xref": "container", "xanchor": "left", "y": 1, "yref": "container",
                  "yanchor": "top", "pad": {"t": 12, "l": 8}, "font": {"size": 14, "color": TEXT}},
        "legend": {"orientation": "h", "x": 0, "xanchor": "left", "y": 1 - 34 / height, "yanchor": "top",
                   "yref": "container", "bgcolor": BLANK, "itemclick": False, "itemdoubleclick": False},
        "showlegend": bool(legend), "dragmode": False, "hoverlabel": {"font": {"family": "monospace", "size": 12}},
        "meta": {"says": says},
        "annotations": [{"text": "<br>".join(lines), "x": 0, "y": 0, "xref": "paper", "yref": "paper", "xanchor": "left", "yanchor": "top",
                         "yshift": -below, "xshift": 6 - left, "align": "left", "showarrow": False, "font": {"size": 13, "color": TEXT}}]})
    figure.layout.template = None
    return figure


def plain_axis(**more: Any) -> dict[str, Any]:
    """An axis without frame, for cells and lines alike; `title` is its text."""
    title = {"text": more.pop("title", ""), "standoff": 4, "font": {"size": 12}}
    return {"showgrid": False, "zeroline": False, "showline": False, "ticks": "", "color": TEXT, "fixedrange": True, "title": title, **more}


def heading(figure: go.Figure, x: float, text: str) -> None:
    """A heading above the panel that starts at x (0 to 1); it stands below a legend."""
    figure.add_annotation(text=text, x=x, y=1, xref="paper", yref="paper", xanchor="left", yanchor="bottom", yshift=2, showarrow=False,
                          font={"size": 13, "color": TEXT})


def pooling(shape: tuple[int, int], most: int | tuple[int, int] = LARGEST) -> tuple[int, int]:
    """(rows, columns) that one cell must hold for a matrix of that shape to fit; most: cells along each side, or (rows, columns)."""
    most = (most, most) if isinstance(most, int) else most
    return -(-shape[0] // most[0]), -(-shape[1] // most[1])


def pool(codes: Tensor, most: int | tuple[int, int] = LARGEST) -> tuple[Tensor, tuple[int, int]]:
    """Codes [rows, columns] -> (codes [<= most, <= most], each the largest of a group; (rows, columns) of a group).

    (1, 1): nothing was pooled. A last group that is not full counts only what it has.
    """
    if codes.dim() != 2:
        raise MxdebugError("cells", "a matrix", f"shape {list(codes.shape)}", "pick one expert first")
    factors = pooling((codes.shape[0], codes.shape[1]), most)
    for axis, factor in enumerate(factors):
        if factor > 1:
            codes = torch.cat([part.amax(dim=axis, keepdim=True) for part in codes.split(factor, dim=axis)], dim=axis)
    return codes, (factors[0], factors[1])


def show_text(text: object) -> None:
    """Display text whose lines are long: a narrow window scrolls it, where it would wrap what is printed."""
    from html import escape

    from IPython.display import display

    style = "white-space: pre; overflow-x: auto; margin: 0; padding: 0 0.6em; font-size: var(--jp-code-font-size, 13px)"
    display({"text/html": f'<pre style="{style}">{escape(str(text))}</pre>', "text/plain": str(text)}, raw=True)


def show(figure: go.Figure) -> None:
    """Display a figure in a notebook as plotly's MIME type, without plotly's JavaScript; as its sentence where figures cannot be drawn."""
    from IPython.display import display

    title = figure.layout.title.text.replace("<b>", "").replace("</b>", "")
    display({MIMETYPE: bundle(figure), "text/plain": f"[figure] {title}. {figure.layout.meta['says']}"}, raw=True)


def bundle(figure: go.Figure) -> dict[str, Any]:
    """What JupyterLab draws: plotly's data and layout. It follows the width of its cell by itself.

    Not "responsive": plotly then sets the height anew as well, and to 0 where the page hides it for a moment, as a change of theme does.
    """
    data = json.loads(figure.to_json())
    return {"data": data["data"], "layout": data["layout"], "config": {"displayModeBar": False, "responsive": False}}


def typed(codes: Tensor) -> dict[str, str]:
    """uint8 [rows, columns] as plotly's typed array: a notebook would otherwise hold one line of text for each cell."""
    data = base64.b64encode(bytes(codes.flatten().tolist())).decode()
    return {"dtype": "u1", "bdata": data, "shape": f"{codes.shape[0]}, {codes.shape[1]}"}


def typed_positions(values: list[int]) -> dict[str, str]:
    """The same for a list of whole numbers from 0, below 2^32."""
    size = 2 if max(values, default=0) < 1 << 16 else 4
    return {"dtype": f"u{size}", "bdata": base64.b64encode(b"".join(v.to_bytes(size, "little") for v in values)).decode()}


# What a cell can be that no colour stands for, and its symbol in every map.
NAN, INF, ZERO, FROM_ZERO, PADDED = "NaN", "inf", "read as 0", "0 is meant", "padding"
SYMBOLS = {NAN: "diamond", INF: "x", ZERO: "circle-open", FROM_ZERO: "square-open", PADDED: "line-ne"}
ABOVE, BELOW, SMALL = "triangle-up", "triangle-down", "circle"  # clipped: too large, too small; a difference too small for the scale
SPECIAL = {0x00: ("0x00: read as 0.0 on SM90", SYMBOLS[ZERO]), 0xFF: ("0xFF: read as inf on SM90", SYMBOLS[INF])}
PADDING = (PADDED, SYMBOLS[PADDED])


def cells(figure: go.Figure, codes: Tensor, alike: Tensor, x: str, y: str, first: int, step: int, *,
          scale: bool, bar: bool, padding: Tensor | None = None) -> None:
    """Add a heatmap of uint8 codes [rows, columns]: one colour for each code; glyphs for scale bytes 0x00 and 0xFF and for padding.

    alike     all codes that must share the colour scale (other panels); first, step: the y of row 0 and between rows
    scale     whether codes are E8M0 bytes, labelled with their value, or plain numbers; bar: whether to add the colour bar
    padding   bool [rows, columns]: cells that are padding
    """
    special = [c for c in SPECIAL if scale and bool((codes == c).any())]
    usual = alike[(alike != 0x00) & (alike != 0xFF)] if scale else alike
    low, high = (int(usual.min()), int(usual.max())) if usual.numel() else (127, 127)
    gap = 0.6 if max(codes.shape) <= 128 else 0
    hidden = torch.zeros_like(codes, dtype=torch.bool) if padding is None else padding.clone()
    for c in special:
        hidden |= codes == c
    z = typed(codes)
    if bool(hidden.any()):
        z = [[None if h else v for v, h in zip(row, hide)] for row, hide in zip(codes.tolist(), hidden.tolist())]
    n = high - low + 1
    every = -(-n // 10)
    ticks = list(range(low, high + 1, every))
    labels = [f"{power(t - 127)}<br>{t}" for t in ticks] if scale else [str(t) for t in ticks]
    bar_title = "block scale, and its byte" if scale else "row that the byte comes from"
    figure.add_heatmap(
        z=z, y0=first, dy=step, xaxis=x, yaxis=y, zmin=low - 0.5, zmax=high + 0.5, colorscale=binades(low, high), showscale=bar,
        xgap=gap, ygap=gap, hoverongaps=False, hovertemplate="%{y}, %{x}: %{z}<extra></extra>",
        colorbar={"orientation": "h", "y": 0, "yanchor": "top", "ypad": 48, "x": 0, "xanchor": "left", "xpad": 0, "len": 1,
                  "thickness": 10, "outlinewidth": 0, "ticks": "", "tickvals": ticks, "ticktext": labels,
                  "tickfont": {"size": 11, "color": TEXT},
                  "title": {"text": bar_title, "side": "top", "font": {"size": 11, "color": TEXT}}} if bar else None)
    glyphs = [(codes == c, *SPECIAL[c]) for c in special]
    if padding is not None and bool(padding.any()):
        glyphs.append((padding, *PADDING))
    known = {trace.name for trace in figure.data}
    for where, name, symbol in glyphs:
        at = where.nonzero().tolist()
        figure.add_scatter(x=[c for _, c in at], y=[first + r * step for r, _ in at], mode="markers", name=name, xaxis=x, yaxis=y,
                           legendgroup=name, showlegend=name not in known, hoverinfo="name",
                           marker={"symbol": symbol, "size": 6, "color": TEXT, "line": {"color": TEXT, "width": 1.2}})
