"""A call, and a guess about it: switch faults on and off, and see whether that explains what was passed and recorded."""

from __future__ import annotations

from pathlib import Path

import ipywidgets
import plotly.graph_objects as go

from ..calls import Call, load
from ..checkpoints import Checkpoint, CheckpointLayer
from ..errors import MxdebugError
from . import explorer, figures
from .hypothesis import ALL, Trial, Trials, layer_of

NONE = "no fault"
SWITCHES = 3  # faults at a time


def draw(t: Trial) -> go.Figure:
    """Left: how much of each operand is as predicted. Right: the predicted output against the one that is there, a point a number."""
    figure = figures.figure(
        t.verdict.split(":")[0].capitalize() + (f" with {', '.join(f for f, _ in t.guess)}" if t.guess else " with no fault"),
        "Left: the part of each operand's bytes that is as this guess predicts. Right: one point a number of one token's output, across as it is "
        "in the call, up as predicted: all points on the line, and the guess explains the output.", plot=250, left=132)
    bars = [(m.title, 0.0 if m.equal is None else m.equal / m.total, m.right) for m in t.matches]
    for right, colour, name in ((True, figures.OTHER, "equal"), (False, figures.GATE, "differs")):
        some = [b for b in bars if b[2] is right]
        figure.add_bar(x=[b[1] for b in some], y=[b[0] for b in some], orientation="h", marker={"color": colour}, name=name, width=0.6,
                       text=["✓" if right else f"≠ {b[1]:.0%}" for b in some], textposition="outside", cliponaxis=False,
                       textfont={"color": figures.TEXT, "size": 12}, hovertemplate="%{y}: %{x:.1%} as predicted<extra></extra>")
    ends = [min((*t.there, *t.predicted), default=-1.0), max((*t.there, *t.predicted), default=1.0)]
    figure.add_scatter(x=ends, y=ends, xaxis="x2", yaxis="y2", mode="lines", line={"color": figures.TEXT, "width": 1, "dash": "dot"}, hoverinfo="skip")
    figure.add_scatter(x=[round(v, 4) for v in t.there], y=[round(v, 4) for v in t.predicted], xaxis="x2", yaxis="y2", mode="markers",
                       marker={"color": figures.UP, "size": 5, "symbol": "circle-open"}, hovertemplate="in the call %{x}, predicted %{y}<extra></extra>")
    if t.refused is not None:
        figure.add_annotation(text="no output: refused", x=0.78, y=0.5, xref="paper", yref="paper", showarrow=False, font={"color": figures.TEXT, "size": 13})
    grid = {"showgrid": True, "gridcolor": figures.GRID, "zeroline": False}
    layout = figure.layout  # set one by one: `update_layout` merges, which takes longer
    layout.barmode = "overlay"
    layout.xaxis = figures.plain_axis(domain=[0, 0.4], title="bytes as predicted", range=[0, 1.18], tickvals=[0, 0.5, 1], ticktext=["0%", "50%", "100%"])
    layout.yaxis = figures.plain_axis(categoryorder="array", categoryarray=[b[0] for b in bars][::-1])
    layout.xaxis2 = figures.plain_axis(domain=[0.58, 1], anchor="y2", title="output in the call", **grid)
    layout.xaxis2.ticklabelstandoff = 7  # below the lowest number of the other axis
    layout.yaxis2 = figures.plain_axis(anchor="x2", title="predicted", **grid)
    figures.heading(figure, 0, "operands")
    figures.heading(figure, 0.58, "output")
    return figure


class Explorer(explorer.Explorer[Trial]):
    """Lists of faults, and of what each strikes; below them whether this guess explains the call.

    `fault_1`, `strikes_1` and so on, and `row`, are the widgets: set `.value`, or `guess`, to drive it from code, then read `shown`.
    `able` are the faults that there are for this call -> the operands that each can strike.

    call        a Call, or the folder of one dump
    checkpoint  one layer, an opened checkpoint, or its folder (then `layer` says which; None: found by the rows of the weights)
    tp          the tensor-parallel (size, rank), for kernels that are not told and where the bytes do not show it
    Of a large call one expert's part of one token is computed, and `row` picks which: `sample.Sample`. Raises MxdebugError as `hypothesis.Trials` does.
    """

    def __init__(self, call: Call | str | Path, checkpoint: Checkpoint | CheckpointLayer | str | Path, *, layer: int | None = None,
                 engine: str = "vllm", row: int = 0, tp: tuple[int, int] | None = None) -> None:
        self._call = call if isinstance(call, Call) else load(call)
        self._layer, self._engine, self._tp = layer_of(self._call, checkpoint, layer), engine, tp
        self._trials = Trials(self._call, self._layer, engine, row, tp)
        self._at = row
        self.able = self._trials.faults()
        self.row = ipywidgets.BoundedIntText(value=row, min=0, max=self._trials.sample.rows - 1, description="token and slot", **self.WIDE)
        controls: list[ipywidgets.Widget] = [self.row]
        for i in range(1, SWITCHES + 1):
            fault, strikes = (
                ipywidgets.Dropdown(options=options, description=text, style={"description_width": f"{label}em"},
                                    layout={"width": f"{wide}em", "min_width": "0"})  # so that both share a narrow line
                for options, text, label, wide in (([NONE, *self.able], f"fault {i}", 9, 27), ([ALL], "on", 2, 15)))
            fault.observe(lambda change, strikes=strikes: self._offer(strikes, change["new"]), names="value")  # before the one that computes
            setattr(self, f"fault_{i}", fault)
            setattr(self, f"strikes_{i}", strikes)
            controls.append(ipywidgets.HBox([fault, strikes], layout={"max_width": "100%"}))
        super().__init__(controls)

    def guess(self, *faults: str | tuple[str, str]) -> None:
        """Switch on these faults, each an id or (id, operand), and all others off. Raises MxdebugError where one cannot strike this call."""
        values = {}
        if len(faults) > SWITCHES:
            raise MxdebugError("faults", f"at most {SWITCHES} at a time", str(len(faults)))
        for i in range(1, SWITCHES + 1):
            given = faults[i - 1] if i <= len(faults) else NONE
            if not isinstance(given, (str, tuple)) or isinstance(given, tuple) and len(given) != 2:
                raise MxdebugError(f"fault {i}", "an id, or (id, operand)", repr(given))
            fault, strikes = given if isinstance(given, tuple) else (given, ALL)
            if fault != NONE and fault not in self.able or strikes not in (ALL, *self.able.get(fault, ())):
                able = self.able.get(fault)
                raise MxdebugError(f"fault {fault}", f"operands among {', '.join(able)}" if able else f"one of {', '.join(self.able)}", strikes,
                                   "it cannot strike that in this call, or not in the part of it that is shown")
            values |= {f"fault_{i}": fault, f"strikes_{i}": strikes}
        self.move(**values)

    def _offer(self, strikes: ipywidgets.Dropdown, fault: str) -> None:
        """The operands that a fault can strike; the list goes back to all of them."""
        self._held += 1
        strikes.options = (ALL, *self.able.get(fault, ()))
        self._held -= 1

    def compute(self) -> Trial:
        """Try the faults that are switched on."""
        if self.row.value != self._at:
            self._trials, self._at = Trials(self._call, self._layer, self._engine, self.row.value, self._tp), self.row.value
        switches = [(getattr(self, f"fault_{i}").value, getattr(self, f"strikes_{i}").value) for i in range(1, SWITCHES + 1)]
        return self._trials.trial([(fault, () if strikes == ALL else (strikes,)) for fault, strikes in switches if fault != NONE])

    def picture(self, shown: Trial) -> go.Figure:
        """As `draw`."""
        return draw(shown)
