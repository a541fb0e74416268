"""What alpha, beta, limit and the place of the clamp do to a call's own pre-activations: a figure with sliders."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ipywidgets
import plotly.graph_objects as go
import torch
from torch import Tensor

from ..contracts import Contract, Seen
from ..diagnosis.given import Given
from ..errors import MxdebugError
from ..metrics import Comparison, compare, plain
from ..recipes.swiglu import PARAMETERS, Passed, parameters
from ..reference import CLAMPS, Activation, Trace
from . import explorer, figures, swiglu_surface
from .sample import sample

WIDEST = 20  # the pre-activations drawn: from -WIDEST to WIDEST; those beyond are counted, not drawn
LIMITS = (*map(float, range(1, 13)), 15.0, 20.0, 30.0, math.inf)  # inf: no limit is passed
VIEWS = ("two curves", "surface")
_NEUTRAL = {"alpha": 1.0, "beta": 0.0, "limit": math.inf}


# -- one setting ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """The parameters of all experts, as numbers: 1, 0 and inf stand for what is not passed."""

    alpha: float = 1.0
    beta: float = 0.0
    limit: float = math.inf
    clamp: str = CLAMPS[0]

    @classmethod
    def of(cls, activation: Activation) -> Setting:
        """Raises MxdebugError for an activation without parameters (GELU, ReLU2), and for experts that differ."""
        if activation.kind not in ("silu", "swiglu"):
            raise MxdebugError("activation", "silu or swiglu", activation.kind, "only SwiGLU has alpha, beta and limit")
        given = {n: t for n in PARAMETERS if (t := getattr(activation, n)) is not None}
        for name, t in given.items():
            if t.unique().numel() != 1:
                raise MxdebugError(
                    f"swiglu_{name}", "one value for all experts", f"{t.unique().numel()} values", "one slider moves all experts"
                )
        return cls(**{n: round(float(t[0]), 6) for n, t in given.items()}, clamp=activation.clamp)

    def activation(self, experts: int) -> Activation:
        """As the kernel gets it: float32 [experts] each, nothing where the value is the kernel's own."""
        given = {n: torch.full((experts,), v) for n in PARAMETERS if (v := getattr(self, n)) != _NEUTRAL[n]}
        return Activation("swiglu", **given, clamp=self.clamp) if given else Activation("silu")

    def __str__(self) -> str:
        return self.numbers + ("" if math.isinf(self.limit) else f" ({self.clamp})")

    @property
    def numbers(self) -> str:
        """Without the place of the clamp: short enough for a title."""
        limit = "none" if math.isinf(self.limit) else f"{self.limit:g}"
        return f"alpha {self.alpha:g}, beta {self.beta:g}, limit {limit}"


# -- its effect -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Points:
    """Along one input of the activation: its values, and the factor that each becomes. The product of the two factors is the output."""

    inputs: tuple[float, ...]
    factor: tuple[float, ...]
    beyond: tuple[bool, ...]


@dataclass(frozen=True)
class Effect:
    """What a setting makes of a call, against what the checkpoint means and against what was recorded.

    token, expert      whose pre-activations are drawn
    gate, up           these pre-activations; gate_line, up_line: the curve; gate_meant, up_meant: the checkpoint's
    counted            (pre-activations of gate beyond the limit, of up, all of gate), over the whole call
    checkpoint         the emulated output against the emulated output with the checkpoint's parameters
    recorded           the emulated output against the recorded one; None without a recording
    """

    setting: Setting
    token: int
    expert: int
    gate: Points
    up: Points
    gate_line: Points
    up_line: Points
    gate_meant: Points
    up_meant: Points
    counted: tuple[int, int, int]
    checkpoint: Comparison
    recorded: Comparison | None

    def __str__(self) -> str:
        g, u, n = self.counted
        beyond = "no limit acts" if math.isinf(self.setting.limit) else f"beyond the limit: {g} of {n} gate, {u} of {n} up"
        c = self.checkpoint
        lines = [
            str(self.setting),
            f"  {beyond}",
            f"  against the checkpoint: relative L2 {plain(c.relative_l2)}, cosine {c.cosine:.3f}, norm ratio {plain(c.norm_ratio)}",
        ]
        if self.recorded is not None:
            r = self.recorded
            lines.append(
                f"  against the recording: relative L2 {plain(r.relative_l2)}, "
                f"{r.elements - r.differing} of {r.elements} numbers have its bits"
            )
        return "\n".join(lines)


def effect(
    seen: Seen, trace: Trace, setting: Setting, meant: Setting, want: Tensor, recorded: Tensor | None = None, row: int = 0
) -> Effect:
    """Emulate a call with other parameters. No parameter changes a pre-activation, so the trace of the call as it was serves for all.

    seen, trace   `Contract.see(arguments)` and its `trace(keep=True)`
    meant, want   the checkpoint's setting, and the output [T, H] with it
    row           which (token, slot) of the trace is drawn
    """
    got = _with(seen, setting.activation(seen.layer.experts), trace)
    line = torch.linspace(-WIDEST, WIDEST, 121, dtype=torch.float64)
    gate, up = trace.gate[row].double(), trace.up[row].double()
    s = setting
    return Effect(
        setting,
        int(trace.token[row]),
        int(trace.expert[row]),
        _points(s, gate, True),
        _points(s, up, False),
        _points(s, line, True),
        _points(s, line, False),
        _points(meant, line, True),
        _points(meant, line, False),
        (int(_beyond(s, trace.gate, True).sum()), int(_beyond(s, trace.up, False).sum()), trace.up.numel()),
        compare(got, want),
        None if recorded is None else compare(got, recorded),
    )


def _with(seen: Seen, activation: Activation, trace: Trace) -> Tensor:
    """The output with another activation."""
    return replace(seen, layer=replace(seen.layer, activation=activation)).trace(before=trace).output


def _beyond(s: Setting, values: Tensor, is_gate: bool) -> Tensor:
    """bool: which values the clamp changes. After the activation, it changes none of these."""
    if s.clamp == "after activation":
        return torch.zeros_like(values, dtype=torch.bool)
    both = s.clamp.split(", ")[0 if is_gate else 1].endswith("both")
    return (values > s.limit) | (both & (values < -s.limit))


def _points(s: Setting, values: Tensor, is_gate: bool) -> Points:
    """The factor of gate is the activation at up 0 with beta 1; the factor of up is the activation at gate 1, without its factor of gate.

    A clamp after the activation acts on the product, so it is left out of the factors.
    """
    act = replace(s, limit=math.inf, clamp=CLAMPS[0]) if s.clamp == "after activation" else s
    gate_factor = replace(act, beta=1.0).activation(1)
    one, zero = torch.ones(1, dtype=torch.float64), torch.zeros(1, dtype=torch.float64)
    factor = gate_factor(values, zero, 0) if is_gate else act.activation(1)(one, values, 0) / gate_factor(one, zero, 0)
    inside = values.abs() <= WIDEST
    return Points(
        *(tuple(round(v, 3) + 0.0 for v in t[inside].tolist()) for t in (values, factor)),
        tuple(_beyond(s, values, is_gate)[inside].tolist()),
    )


# -- its figure -------------------------------------------------------------------------------------------------------

_NAMES = ("this setting", "checkpoint", "within limit", "beyond limit")


def draw(e: Effect) -> go.Figure:
    """Two panels: the factor that gate becomes, and that of up. Grey is the checkpoint's; the points are pre-activations."""
    clamp = "" if math.isinf(e.setting.limit) else f" The clamp: {e.setting.clamp}."
    if e.setting.clamp == "after activation":
        clamp = " The clamp acts on the product here, so it is in neither panel."
    figure = figures.figure(
        f"SwiGLU with {e.setting.numbers}",
        f"Each point is a pre-activation of token {e.token} in expert {e.expert}. Output = factor of gate x factor of up. "
        f"Dotted: what the checkpoint means.{clamp}",
        plot=270,
        legend=True,
    )
    grid = {"showgrid": True, "gridcolor": figures.GRID, "zeroline": True, "zerolinecolor": figures.TEXT, "zerolinewidth": 1}
    for i, (axis, points, line, meant, colour) in enumerate(
        (("", e.gate, e.gate_line, e.gate_meant, figures.GATE), ("2", e.up, e.up_line, e.up_meant, figures.UP))
    ):
        axes = {"xaxis": f"x{axis}", "yaxis": f"y{axis}", "hovertemplate": "%{x} becomes %{y}<extra></extra>"}
        drawn = [
            (line, True, {"mode": "lines", "line": {"color": colour, "width": 2}}),
            (meant, True, {"mode": "lines", "line": {"color": figures.TEXT, "width": 1.5, "dash": "dot"}}),
            (points, False, {"mode": "markers", "marker": {"color": colour, "size": 6, "symbol": "circle-open"}}),
            (
                points,
                True,
                {
                    "mode": "markers",
                    "marker": {"color": figures.TEXT, "size": 7, "symbol": "x-thin", "line": {"color": figures.TEXT, "width": 1.4}},
                },
            ),
        ]
        for name, (p, beyond, style) in zip(_NAMES, drawn):
            some = range(len(p.inputs)) if style["mode"] == "lines" else [j for j, b in enumerate(p.beyond) if b == beyond]
            figure.add_scatter(
                x=[p.inputs[j] for j in some],
                y=[p.factor[j] for j in some],
                name=name,
                legendgroup=name,
                showlegend=not i and p is not meant,  # the sentence says that one: a narrow window has no room for four
                **axes,
                **style,
            )
    figure.update_layout(
        xaxis=figures.plain_axis(domain=[0, 0.46], title="gate", range=[-WIDEST - 1, WIDEST + 1], **grid),
        xaxis2=figures.plain_axis(domain=[0.54, 1], title="up", range=[-WIDEST - 1, WIDEST + 1], anchor="y2", **grid),
        yaxis=figures.plain_axis(title="factor", range=[-4, WIDEST + 1], **grid),
        yaxis2=figures.plain_axis(anchor="x2", range=[-WIDEST - 2, WIDEST + 2], **grid),
    )
    figures.heading(figure, 0, "gate * sigmoid(alpha * gate)")
    figures.heading(figure, 0.54, "up + beta")
    return figure


# -- sliders ----------------------------------------------------------------------------------------------------------


class Explorer(explorer.Explorer[Effect]):
    """Sliders for alpha, beta and limit, a list for the place of the clamp; below them what the kernel would make of the call.

    It starts at what the call passes. `alpha`, `beta`, `limit` and `clamp` are the widgets: set `.value` to drive it from code, then
    read `effect`. Raises MxdebugError where the call or the checkpoint has no SwiGLU.

    contract, arguments   the call; meant: the checkpoint's activation; recorded: the output [T, H] to be compared bit for bit
    row                   which (token, slot) is drawn; of a large call that one alone is computed, see `sample`, and `recorded` is not compared
    """

    def __init__(
        self, contract: Contract, arguments: Mapping[str, Any], meant: Activation, recorded: Tensor | None = None, row: int = 0
    ) -> None:
        shown = sample(Given.of(contract, arguments), row)
        if not shown.whole:
            meant, recorded, row = _of_expert(meant, shown.expert), None, 0
        self._seen, self._activation = shown.seen, meant
        self._trace = self._seen.trace(keep=True)
        self._meant, self._recorded, self._row = Setting.of(meant), recorded, row
        self._want = _with(self._seen, meant, self._trace)
        start = Setting.of(self._seen.layer.activation)
        if start.limit not in LIMITS:
            raise MxdebugError(
                "swiglu_limit", f"one of {', '.join(f'{v:g}' for v in LIMITS)}", f"{start.limit:g}", "the slider has no such place"
            )
        self.alpha = ipywidgets.FloatSlider(
            value=start.alpha, min=0.0, max=3.0, step=0.002, readout_format=".3f", description="alpha", **self.LATE
        )
        self.beta = ipywidgets.FloatSlider(
            value=start.beta, min=-1.0, max=2.0, step=0.05, readout_format=".2f", description="beta", **self.LATE
        )
        self.limit = ipywidgets.SelectionSlider(
            value=start.limit, options=[("none" if math.isinf(v) else f"{v:g}", v) for v in LIMITS], description="limit", **self.LATE
        )
        self.clamp = ipywidgets.Dropdown(value=start.clamp, options=CLAMPS, description="where it clamps", **self.WIDE)
        self.view = ipywidgets.Dropdown(value=VIEWS[0], options=VIEWS, description="picture", **self.WIDE)
        super().__init__([self.alpha, self.beta, self.limit, self.clamp, self.view])

    @property
    def effect(self) -> Effect:
        """What the sliders lead to."""
        return self.shown

    def compute(self) -> Effect:
        """Emulate the call with the sliders' parameters."""
        setting = Setting(round(self.alpha.value, 6), round(self.beta.value, 6), self.limit.value, self.clamp.value)
        return effect(self._seen, self._trace, setting, self._meant, self._want, self._recorded, self._row)

    def picture(self, shown: Effect) -> go.Figure:
        """The two factors as `draw` has them, or their product as `swiglu_surface.draw` has it."""
        return draw(shown) if self.view.value == VIEWS[0] else swiglu_surface.draw(self.surface())

    def surface(self) -> swiglu_surface.Surface:
        """The product over gate and up with the sliders' parameters, and the points of the row that is drawn."""
        expert, t, r = int(self._trace.expert[self._row]), self._trace, self._row
        experts = self._seen.layer.experts
        return swiglu_surface.surface(self.shown.setting.activation(experts), self._activation, t.gate[r], t.up[r], name=str(self.shown.setting), expert=expert)


def _of_expert(a: Activation, expert: int) -> Activation:
    return replace(a, **{n: None if getattr(a, n) is None else getattr(a, n)[expert: expert + 1] for n in PARAMETERS})


# -- what arrives -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arrivals:
    """What a kernel gets on several paths, one line a path and version; a name in `lost` is stated and not used."""

    lines: tuple[tuple[str, str, Passed | str], ...]

    def __str__(self) -> str:
        width = max(len(path) for path, _, _ in self.lines)
        out = [f"{'':<{width}}  vLLM      alpha   beta  limit  stated, but not used"]
        for path, version, passed in self.lines:
            if isinstance(passed, str):
                out.append(f"{path:<{width}}  {version:<8}  {passed}")
                continue
            values = "  ".join(f"{'-' if (v := getattr(passed, n).value) is None else f'{v:g}':>5}" for n in PARAMETERS)
            out.append(f"{path:<{width}}  {version:<8}  {values}  {', '.join(passed.unused)}".rstrip())
        return "\n".join(out)


def arrivals(
    cases: Sequence[tuple[str, str, Mapping[str, Any] | None]], *, activation: str, model_config: Mapping[str, Any], model_type: str | None
) -> Arrivals:
    """(path, version, quantization_config) -> what `recipes.swiglu.parameters` says is passed; or why vLLM does not run it."""
    lines: list[tuple[str, str, Passed | str]] = []
    for path, version, quant_config in cases:
        try:
            lines.append(
                (
                    path,
                    version,
                    parameters(
                        path,
                        activation=activation,
                        quant_config=quant_config,
                        model_config=model_config,
                        model_type=model_type,
                        version=version,
                    ),
                )
            )
        except MxdebugError as error:
            lines.append((path, version, f"not run: {error.reason}"))
    return Arrivals(tuple(lines))
