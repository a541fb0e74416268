"""The two halves of w13: which row of gate or up stands where, in the file, as the kernel reads it, and as it was passed."""

from __future__ import annotations

from dataclasses import dataclass

import plotly.graph_objects as go
import torch
from torch import Tensor

from ..errors import MxdebugError
from ..layouts import RowOrder, match_rows, row_hashes
from ..reference import MoELayer
from . import figures

PADDING = "-"


@dataclass(frozen=True)
class Strip:
    """One order of all rows: labels g0, g1, ... (gate), u0, u1, ... (up), or PADDING, by physical row. note: a second line of the name."""

    name: str
    note: str
    labels: tuple[str, ...]


@dataclass(frozen=True)
class Rows:
    """Some orders of the rows of w13, one below the other; `wanted` is the order that the kernel reads."""

    title: str
    wanted: Strip
    strips: tuple[Strip, ...]

    def agree(self, strip: Strip) -> int:
        """How many rows hold what the kernel takes them for."""
        return sum(a == b for a, b in zip(strip.labels, self.wanted.labels))

    def __str__(self) -> str:
        n = len(self.wanted.labels)
        lines = []
        for s in (*self.strips, self.wanted):
            shown = f"{' '.join(s.labels[:3])} ... {' '.join(s.labels[n // 2 - 1: n // 2 + 1])} ... {s.labels[-1]}"
            lines.append((f"{s.name} {s.note}", shown, "" if s is self.wanted else f"{self.agree(s):>{len(str(n))}} of {n} right"))
        widths = [max(len(line[i]) for line in lines) for i in (0, 1)]
        return "\n".join(f"{name:<{widths[0]}}  {shown:<{widths[1]}}  {right}".rstrip() for name, shown, right in lines)


def order(name: str, note: str, rows: RowOrder, half: int) -> Strip:
    """The strip of a row order, for halves of `half` rows."""
    return _strip(name, note, rows.indices(half))


def passed(name: str, note: str, read: MoELayer, layer: MoELayer, expert: int = 0) -> Strip:
    """The strip of a call: each row of its w13, in physical order, is looked up in the checkpoint's gate and up.

    read   the call's decoded layer, whose up is w13's first half
    Raises MxdebugError where a row that is not all zeros is neither.
    """
    rows = torch.cat([read.up.payload[expert], read.gate.payload[expert]])
    columns = layer.up.payload.shape[-1]  # the call may have padded columns
    known = torch.cat([layer.gate.payload[expert], layer.up.payload[expert]])
    indices = match_rows(row_hashes(rows[:, :columns]), row_hashes(known))
    lost = (indices < 0) & rows.bool().any(-1)
    if bool(lost.any()):
        raise MxdebugError("rows of w13", "rows of this expert's gate and up",
                           f"{int(lost.sum())} others, the first at {int(lost.nonzero()[0])}",
                           "another expert, or a payload that is in another layout than the kernel reads")
    return _strip(name, note, indices, half=layer.intermediate)


def _strip(name: str, note: str, indices: Tensor, half: int | None = None) -> Strip:
    half = indices.numel() // 2 if half is None else half
    return Strip(name, note, tuple(PADDING if i < 0 else f"g{i}" if i < half else f"u{i - half}" for i in indices.tolist()))


def rows(title: str, wanted: Strip, *strips: Strip) -> Rows:
    """Put strips together. Raises MxdebugError where they have different lengths."""
    for s in strips:
        if len(s.labels) != len(wanted.labels):
            raise MxdebugError(f"rows of {s.name}", f"{len(wanted.labels)} rows", str(len(s.labels)), "padded on one side only")
    return Rows(title, wanted, strips)


def shown_positions(n: int, each: int = 4) -> tuple[int, ...]:
    """Physical rows that are drawn: the first ones, those around the middle, the last ones."""
    half = n // 2
    return (*range(each), *range(half - each // 2, half + each // 2), *range(n - each // 2, n)) if n > 3 * each else tuple(range(n))


def draw(r: Rows) -> go.Figure:
    """One line of boxes for each order; boxes that are not what the kernel takes them for have a cross."""
    strips = (*r.strips, r.wanted)
    n = len(r.wanted.labels)
    at = shown_positions(n)
    gaps = [i for i in range(1, len(at)) if at[i] != at[i - 1] + 1]
    xs = [i + 0.8 * sum(g <= i for g in gaps) for i in range(len(at))]
    figure = figures.figure(
        r.title, "One box is one row of w13: g is a row of gate (w1), u of up (w3). The last line is what the kernel takes each row for; "
        "a row that is something else has a cross.", plot=36 * len(strips), legend=True, headings=False, left=108)
    for half, name, colour in (("g", "gate (w1)", figures.GATE), ("u", "up (w3)", figures.UP), (PADDING, "padding", figures.GRID)):
        points = [(x, k, s.labels[p], s.labels[p] != r.wanted.labels[p])
                  for k, s in enumerate(strips) for x, p in zip(xs, at) if s.labels[p].startswith(half)]
        if points:
            figure.add_scatter(
                x=[p[0] for p in points], y=[p[1] for p in points], text=[f"{p[2]}<br><b>×</b>" if p[3] else p[2] for p in points],
                mode="markers+text", name=name, marker={"symbol": "square", "size": 26, "color": colour},
                textfont={"size": 9, "color": figures.TEXT if half == PADDING else "black"}, hoverinfo="skip")
    for g in gaps:
        figure.add_annotation(x=(xs[g] + xs[g - 1]) / 2, y=(len(strips) - 1) / 2, text="…", showarrow=False,
                              font={"size": 16, "color": figures.TEXT})
    figure.update_xaxes(**figures.plain_axis(tickvals=xs, ticktext=[str(p) for p in at], title=f"physical row (0 to {n - 1})",
                                             range=[-0.8, xs[-1] + 0.8]))
    figure.update_yaxes(**figures.plain_axis(tickvals=list(range(len(strips))), ticktext=[f"{s.name}<br>{s.note}" for s in strips],
                                             range=[len(strips) - 0.4, -0.6]))
    return figure
