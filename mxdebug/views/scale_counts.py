"""How many different block scales does a tensor have? A swizzle that is left out shows in as many bytes as differ from their neighbours."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import plotly.graph_objects as go
from torch import Tensor

from . import figures


@dataclass(frozen=True)
class ScaleCounts:
    """Of some tensors, by name: how often each E8M0 byte stands among the block scales; only those that do, ascending."""

    counts: tuple[tuple[str, tuple[tuple[int, int], ...]], ...]

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.counts)
        lines = []
        for name, counts in self.counts:
            byte, most = max(counts, key=lambda c: c[1])
            total = sum(n for _, n in counts)
            many = f"{len(counts):>2} different scale{'s' if len(counts) > 1 else ' '}"
            lines.append(f"{name:<{width}}  {many}; {100 * most / total:3.0f}% are 2^{byte - 127}")
        return "\n".join(lines)


def scale_counts(tensors: Mapping[str, Tensor]) -> ScaleCounts:
    """Count the E8M0 bytes of uint8 tensors of any shape."""
    return ScaleCounts(tuple((name, tuple((int(b), int(n)) for b, n in zip(*t.unique(return_counts=True)))) for name, t in tensors.items()))


def draw(c: ScaleCounts) -> go.Figure:
    """One panel for each tensor, all on the same axes."""
    figure = figures.figure("Which block scales there are", "One bar a block scale: how many of the blocks have it. Where one bar "
                            "has them all, no order of the bytes differs from any other.", plot=190)
    width, gap = 1 / len(c.counts), 0.04
    every = [byte for _, counts in c.counts for byte, _ in counts]
    ticks = range(min(every), max(every) + 1, 2)
    for i, (name, counts) in enumerate(c.counts):
        axis, total = "" if i == 0 else str(i + 1), sum(n for _, n in counts)
        figure.add_bar(x=[byte for byte, _ in counts], y=[round(100 * n / total, 1) for _, n in counts], xaxis=f"x{axis}", width=0.8,
                       marker={"color": figures.UP}, hovertemplate="byte %{x}: %{y}% of the blocks<extra></extra>")
        start = i * width
        figure.update_layout({f"xaxis{axis}": figures.plain_axis(domain=[start, start + width - gap], tickvals=list(ticks), anchor="y",
                                                                 ticktext=[figures.power(b - 127) for b in ticks], title="block scale",
                                                                 range=[min(every) - 0.7, max(every) + 0.7])})
        figures.heading(figure, start, name)
    figure.update_yaxes(**figures.plain_axis(title="% of the blocks", showgrid=True, gridcolor=figures.GRID, range=[0, 104]))
    figure.update_layout(xaxis_anchor="y")
    return figure
