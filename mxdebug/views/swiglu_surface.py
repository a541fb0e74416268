"""SwiGLU as a surface over gate and up: one setting beside the checkpoint's, and where a call's own pre-activations lie on it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import plotly.graph_objects as go
import torch
from torch import Tensor

from ..reference import Activation
from . import figures

REACH, STEP = 16.0, 0.25  # gate and up from -REACH to REACH; more is drawn nowhere, and counted
LEVELS = 9                # colours on each side of 0; one colour a power of two
_SMALLEST = -3            # |output| below 2^-3 has the colour of 0


@dataclass(frozen=True, eq=False)
class Surface:
    """Outputs over a grid, and the points of a call.

    axis            values of gate (across) and up (upwards)
    this, meant     int8 [up, gate]: sign * (1 + the binade of |output| above 2^-3), 0 for less; of the setting, and of the checkpoint's
    gate, up        the pre-activations that are drawn; changed: those whose output the two settings give differently by more than 1 %
    outside         how many lie beyond the picture
    moved           relative L2 that the setting moves all these activations by
    limits          the limit of the setting, and the checkpoint's; None where there is none
    name            the setting in words
    """

    axis: tuple[float, ...]
    this: Tensor
    meant: Tensor
    gate: tuple[float, ...]
    up: tuple[float, ...]
    changed: tuple[bool, ...]
    outside: int
    moved: float
    limits: tuple[float | None, float | None]
    name: str

    @property
    def differ(self) -> int:
        """How many cells of the grid have another colour."""
        return int((self.this != self.meant).sum())

    def __str__(self) -> str:
        return (f"{self.name}\n  {sum(self.changed)} of {len(self.gate)} pre-activations drawn give an output that is off by more than 1%\n"
                f"  {self.outside} more lie beyond the picture\n"
                f"  the activations move by relative L2 {self.moved:.3f}")


def surface(setting: Activation, meant: Activation, gate: Tensor, up: Tensor, *, name: str, expert: int = 0) -> Surface:
    """gate, up: float [N], the pre-activations of one expert; both activations are evaluated in float64 with that expert's parameters."""
    axis = torch.arange(-REACH, REACH + STEP, STEP, dtype=torch.float64)
    grid = torch.meshgrid(axis, axis, indexing="ij")  # [up, gate]
    g, u = gate.double(), up.double()
    got, want = setting(g, u, expert), meant(g, u, expert)
    changed = (got - want).abs() > 0.01 * want.abs()
    inside = (g.abs() <= REACH) & (u.abs() <= REACH)

    def limit(a: Activation) -> float | None:
        value = a.parameter("limit", expert)
        return None if value is None or math.isinf(value) else value

    return Surface(tuple(axis.tolist()), *(_binades(a(grid[1], grid[0], expert)) for a in (setting, meant)),
                   *(tuple(round(v, 3) for v in t[inside].tolist()) for t in (g, u)), tuple(changed[inside].tolist()), int((~inside).sum()),
                   float((got - want).norm() / want.norm()), (limit(setting), limit(meant)), name)


def _binades(values: Tensor) -> Tensor:
    exponent = torch.frexp(values.abs())[1] - 1 - _SMALLEST
    level = torch.where(values.abs() < 2.0 ** _SMALLEST, 0, (exponent + 1).clamp(1, LEVELS))
    return (level * values.sign().int()).to(torch.int8)


def draw(s: Surface) -> go.Figure:
    """The two surfaces side by side on one colour scale, with the points on both."""
    says = (f"Left: {s.name}. Each place is a pair of gate (across) and up (upwards); its colour is the output, a step a power of two, "
            "orange above 0, blue below. "
            "Dots: this call's own pre-activations; crosses: those whose output is off by more than 1%. Dotted lines: where the clamp acts.")
    figure = figures.figure("The output of SwiGLU, and what the checkpoint means", says, plot=300, below=figures.BELOW_CELLS, legend=True)
    colours = figures.steps(figures.diverging_colours(LEVELS))
    ticks = [-LEVELS, -6, -3, 0, 3, 6, LEVELS]  # far enough apart for their labels
    labels = [("-" if t < 0 else "") + (f"{2.0 ** (abs(t) - 1 + _SMALLEST):g}" if t else "0") for t in ticks]
    labels[0], labels[-1] = f"≤ {labels[0]}", f"≥ {labels[-1]}"
    for i, (levels, limit) in enumerate(((s.this, s.limits[0]), (s.meant, s.limits[1]))):
        axes = {"xaxis": ("x", "x2")[i], "yaxis": ("y", "y2")[i]}
        codes = (levels.int() + LEVELS).to(torch.uint8)
        figure.add_heatmap(z=figures.typed(codes), x0=s.axis[0], dx=STEP, y0=s.axis[0], dy=STEP, zmin=-0.5, zmax=2 * LEVELS + 0.5, colorscale=colours,
                           showscale=i == 0, hovertemplate="gate %{x}, up %{y}<extra></extra>", **axes,
                           colorbar={"orientation": "h", "y": 0, "yanchor": "top", "ypad": 48, "x": 0, "xanchor": "left", "xpad": 0, "len": 1,
                                     "thickness": 10, "outlinewidth": 0, "ticks": "", "tickvals": [t + LEVELS for t in ticks], "ticktext": labels, "tickangle": 0,
                                     "tickfont": {"size": 11, "color": figures.TEXT},
                                     "title": {"text": "output", "side": "top", "font": {"size": 11, "color": figures.TEXT}}} if i == 0 else None)
        for off, name, symbol in ((False, "pre-activation", "circle"), (True, "its output is off", "x")):
            at = [k for k, c in enumerate(s.changed) if c is off]
            figure.add_scatter(x=[s.gate[k] for k in at], y=[s.up[k] for k in at], mode="markers", name=name, legendgroup=name, showlegend=i == 0,
                               hoverinfo="skip", **axes,
                               marker={"symbol": symbol, "size": 6 if off else 5, "color": "black" if off else "white", "line": {"color": "white" if off else "black", "width": 0.8}})
        if limit is not None and limit < REACH:
            line = {"color": figures.TEXT, "width": 1.4, "dash": "dot"}
            ref = {"xref": axes["xaxis"], "yref": axes["yaxis"], "line": line, "type": "line"}
            figure.add_shape(x0=limit, x1=limit, y0=-REACH, y1=REACH, **ref)
            for y in (-limit, limit):
                figure.add_shape(x0=-REACH, x1=REACH, y0=y, y1=y, **ref)
    around = {"range": [-REACH, REACH], "tickvals": [-14, -7, 0, 7, 14]}
    figure.update_layout(
        xaxis=figures.plain_axis(domain=[0, 0.47], title="gate", **around), yaxis=figures.plain_axis(title="up", **around),
        xaxis2=figures.plain_axis(domain=[0.53, 1], title="gate", anchor="y2", **around),
        yaxis2=figures.plain_axis(anchor="x2", showticklabels=False, **around))
    figures.heading(figure, 0, "this setting")
    figures.heading(figure, 0.53, "the checkpoint means")
    return figure
