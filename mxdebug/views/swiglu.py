"""Gate and up are not interchangeable: what SwiGLU makes of each."""

from __future__ import annotations

from dataclasses import dataclass

import plotly.graph_objects as go
import torch
from torch import Tensor

from ..reference import Activation
from . import figures


@dataclass(frozen=True)
class Curves:
    """The activation along each of its inputs, and on examples.

    inputs    values of the input that moves, from -10 to 10
    by_gate   output for those values of gate, up fixed; by_up: the other way round; fixed: the value of the input that stays
    examples  (gate, up, output, output with the two exchanged)
    """

    inputs: tuple[float, ...]
    by_gate: tuple[float, ...]
    by_up: tuple[float, ...]
    fixed: float
    limit: float | None
    examples: tuple[tuple[float, float, float, float], ...]

    def __str__(self) -> str:
        lines = [f"{'gate':>6} {'up':>6}   {'output':>8}   gate and up exchanged"]
        lines += [f"{g:>6.1f} {u:>6.1f}   {out:>8.3f}   {swapped:>8.3f}" for g, u, out, swapped in self.examples]
        return "\n".join(lines)


def curves(activation: Activation, examples: tuple[tuple[float, float], ...] = ((2.0, -3.0), (4.0, 1.0), (-4.0, 4.0)),
           fixed: float = 1.0, expert: int = 0) -> Curves:
    """Evaluate one expert's activation in float64."""
    def out(gate: Tensor | float, up: Tensor | float) -> Tensor:
        gate, up = torch.broadcast_tensors(torch.as_tensor(gate, dtype=torch.float64), torch.as_tensor(up, dtype=torch.float64))
        return activation(gate, up, expert)

    inputs = torch.arange(-20, 21, dtype=torch.float64) / 2

    def rounded(t: Tensor) -> tuple[float, ...]:
        return tuple(round(v, 4) for v in t.tolist())  # the figure must be the same on every machine

    return Curves(tuple(inputs.tolist()), rounded(out(inputs, fixed)), rounded(out(fixed, inputs)), fixed,
                  activation.parameter("limit", expert), tuple((g, u, out(g, u).item(), out(u, g).item()) for g, u in examples))


def draw(c: Curves) -> go.Figure:
    """The two curves side by side, on one vertical scale."""
    limit = "" if c.limit is None else f" Both stop at the limit {c.limit:g}: gate from above only, up on both sides."
    figure = figures.figure(
        "Gate is a switch, up is the signal",
        f"Left: below 0, gate switches the output off. Right: the output follows up in a straight line.{limit} "
        "So a kernel that takes one for the other computes something else, of a similar size.", plot=230)
    for axis, values, name, colour, dash in (("", c.by_gate, "gate", figures.GATE, "solid"), ("2", c.by_up, "up", figures.UP, "dash")):
        figure.add_scatter(x=list(c.inputs), y=list(values), mode="lines", line={"color": colour, "width": 3, "dash": dash},
                           xaxis=f"x{axis}", yaxis="y", hovertemplate=f"{name} %{{x}}: %{{y}}<extra></extra>")
    grid = {"showgrid": True, "gridcolor": figures.GRID, "zeroline": True, "zerolinecolor": figures.TEXT, "zerolinewidth": 1}
    input_axis = {**grid, "tickvals": [-8, -4, 0, 4, 8]}
    figure.update_layout(
        xaxis=figures.plain_axis(domain=[0, 0.48], title=f"gate, while up is {c.fixed:g}", **input_axis),
        xaxis2=figures.plain_axis(domain=[0.52, 1], title=f"up, while gate is {c.fixed:g}", anchor="y", **input_axis),
        yaxis=figures.plain_axis(title="output", **grid))
    figures.heading(figure, 0, "gate moves")
    figures.heading(figure, 0.52, "up moves")
    return figure
