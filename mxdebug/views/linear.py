"""What faults do to a linear layer: its scales as the kernel reads them, and the distance of its output, in every number that people report."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, replace

import plotly.graph_objects as go
import torch
from torch import Tensor

from ..diagnosis.linear import diagnose_run
from ..diagnosis.linear_operands import refined
from ..errors import MxdebugError
from ..faults import FAULTS, LINEAR_FAULTS, LinearSituation
from ..formats import E4M3_SCALE, NVFP4, ScaleCodec
from ..metrics import Comparison, compare
from . import figures
from .worst import Worst, worst_scales


@dataclass(frozen=True)
class Line:
    """One fault. distance: the kernel's output cut to N against what the weight means, None where the call is refused (of bias-missing and bias-twice:
    the layer's output against the layer's); worst: the largest relative
    error of one output feature; said: what the diagnosis of the layer's run names."""

    fault: str
    distance: Comparison | None
    worst: float
    said: tuple[str, ...]


@dataclass(frozen=True)
class FaultTable:
    """Lines in the order in which they were asked for; `not_here` are faults that cannot strike this layer."""

    path: str
    lines: tuple[Line, ...]
    not_here: tuple[str, ...]

    def legend(self) -> str:
        """What each fault is, a line each."""
        width = max(len(line.fault) for line in self.lines)
        return "\n".join(
            textwrap.fill(
                f"{line.fault:<{width}}  {FAULTS[line.fault].title}", 88, subsequent_indent=" " * (width + 2), break_on_hyphens=False
            )
            for line in self.lines
            if line.fault != "none"
        )

    def __str__(self) -> str:
        width = max(len(line.fault) for line in self.lines)
        out = [
            f"{self.path.rpartition('/')[2]:<{width}}  {'cosine':>8} {'norm ratio':>10} {'relative L2':>11} {'SQNR dB':>8} {'worst feature':>13}  diagnosis"
        ]
        for line in self.lines:
            d = line.distance
            said = "right" if not line.said else "named" if line.said == (line.fault,) else " + ".join(line.said)
            numbers = (
                f"{'refused':>8} {'-':>10} {'-':>11} {'-':>8} {'-':>13}"
                if d is None
                else (f"{d.cosine:>8.4f} {d.norm_ratio:>10.4g} {d.relative_l2:>11.4g} {round(sqnr(d), 1) + 0.0:>8.1f} {line.worst:>13.3g}")
            )
            out.append(f"{line.fault:<{width}}  {numbers}  {said}")
        if self.not_here:
            out += textwrap.wrap(f"cannot strike here: {', '.join(self.not_here)}", 96, subsequent_indent="  ", break_on_hyphens=False)
        return "\n".join(out)


def sqnr(d: Comparison) -> float:
    """Signal to quantisation noise in dB: -20 log10 of the relative L2 distance."""
    return -20 * math.log10(d.relative_l2) if d.relative_l2 > 0 else math.inf


def fault_table(s: LinearSituation, faults: Sequence[str] | None = None) -> FaultTable:
    """Inject faults one by one into a right situation; "none" is the right one. All that can strike by default."""
    from ..checkpoints import CheckpointLinear

    lines, not_here = [], []
    for id in ("none", *LINEAR_FAULTS) if faults is None else faults:
        try:
            broken = s if id == "none" else LINEAR_FAULTS[id].inject(s)
        except MxdebugError:
            not_here.append(id)
            continue
        run, out = broken.run(), broken.build()[1]
        chosen = CheckpointLinear("layer", s.recipe.checkpoint, broken.layer, {}, broken.layer.format.block)
        said = tuple(f.id for f in diagnose_run(run, chosen, s.recipe.contract).findings)
        want = replace(refined(broken.layer), bias=None).forward(s.x.reshape(-1, s.layer.k))
        got = None if out is None or run.output is None else out[:, : s.layer.n]
        if id in (
            "bias-missing",
            "bias-twice",
        ):  # all others leave their trace in the kernel's part, beside which a bias would only blur the numbers
            got, want = run.output.reshape(-1, s.layer.n), want + s.layer.bias.double()
        lines.append(Line(id, None if got is None else compare(got.double(), want), math.nan if got is None else _worst(got, want), said))
    return FaultTable(s.recipe.path, tuple(lines), tuple(not_here))


def _worst(got: Tensor, want: Tensor) -> float:
    norms = want.double().norm(dim=0)
    return float(((got.double() - want.double()).norm(dim=0)[norms > 0] / norms[norms > 0]).nan_to_num(math.inf).max())


# -- scales -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class ScaleReading:
    """Block scales that are meant, and those that a kernel reads, as float32 [rows, columns]; `off_by`: binades (read / meant) -> how many."""

    title: str
    meant: Tensor
    read: Tensor

    @property
    def wrong(self) -> int:
        """How many are read as another number."""
        return int((self.meant != self.read).sum())

    @property
    def worst(self) -> Worst:
        """The block scales that are furthest off."""
        return worst_scales(self.meant, self.read, block=NVFP4.block)

    @property
    def off_by(self) -> dict[int, int]:
        both = (self.meant > 0) & (self.read > 0) & (self.meant != self.read)
        values, counts = (self.read[both].log2() - self.meant[both].log2()).round().int().unique(return_counts=True)
        return dict(zip(values.tolist(), counts.tolist()))

    def __str__(self) -> str:
        total, lost = self.meant.numel(), int(((self.meant > 0) & (self.read == 0)).sum())
        off = self.off_by
        small, large = (sum(n for b, n in off.items() if (b < 0) == low and b != 0) for low in (True, False))
        most = max((abs(b) for b in off), default=0)
        return (
            f"{self.wrong} of {total} block scales are read wrong ({self.wrong / total:.1%})\n"
            f"  too small: {small}, too large: {large}, by a factor of up to 2^{most}\n  read as 0: {lost}; off by less than that: {self.wrong - small - large - lost}"
        )


def reading(meant: Tensor, read: Tensor, codec: ScaleCodec, *, title: str) -> ScaleReading:
    """uint8 [rows, columns] as the file means them (E4M3) and as a kernel reads them with `codec`; both of the same shape."""
    if meant.shape != read.shape or meant.dim() != 2:
        raise MxdebugError("block scales", f"one matrix {list(meant.shape)} twice", f"shape {list(read.shape)}", "padding was not cut off")
    return ScaleReading(title, E4M3_SCALE.decode(meant), codec.decode(read))


def draw(r: ScaleReading, rows: range | None = None) -> go.Figure:
    """Both matrices side by side on one colour scale, a step a binade; zero has a glyph."""
    rows = range(r.meant.shape[0]) if rows is None else rows
    a, b = (_binade(t[rows.start : rows.stop]) for t in (r.meant, r.read))
    (a, pooled), (b, _) = figures.pool(a), figures.pool(b)
    shown = "" if len(rows) == r.meant.shape[0] else f" Rows {rows.start} to {rows.stop - 1} of {r.meant.shape[0]}."
    says = (
        f"One cell a block of 16 weights; the colour is the power of two below its block scale. Left: a row of small weights is dark all along.{shown} "
        + (
            "Right: the same cells as the kernel reads them out of the bytes that it was given."
            if r.wrong
            else "Right: the kernel reads the same."
        )
    )
    zero = bool((a == 0).any() or (b == 0).any())
    figure = figures.figure(r.title, says, plot=figures.cell_height(a.shape[0]), below=figures.BELOW_CELLS, legend=zero)
    both = torch.cat([a.flatten(), b.flatten()])
    for i, codes in enumerate((a, b)):
        figures.cells(figure, codes, both, ("x", "x2")[i], ("y", "y2")[i], rows.start, pooled[0], scale=True, bar=i == 0)
    for trace in figure.data:
        trace.name = "read as 0" if trace.name == figures.SPECIAL[0x00][0] else trace.name
    bar = figure.data[0].colorbar
    bar.title.text, bar.ticktext = "block scale", tuple(text.partition("<br>")[0] for text in bar.ticktext)
    column_axis, row_axis = (
        {"title": "column", "range": [-0.5, a.shape[1] - 0.5]},
        {"range": [rows.start + (a.shape[0] - 0.5) * pooled[0], rows.start - 0.5 * pooled[0]]},
    )
    figure.update_layout(
        xaxis=figures.plain_axis(domain=[0, 0.48], **column_axis),
        yaxis=figures.plain_axis(title="row", **row_axis),
        xaxis2=figures.plain_axis(domain=[0.52, 1], anchor="y2", **column_axis),
        yaxis2=figures.plain_axis(anchor="x2", showticklabels=False, **row_axis),
    )
    figures.heading(figure, 0, "the checkpoint means")
    figures.heading(figure, 0.52, "the kernel reads")
    return figure


def _binade(values: Tensor) -> Tensor:
    """float32 -> uint8: 127 + the exponent of its binade, as an E8M0 byte has it; 0 for 0."""
    return torch.where(values > 0, torch.frexp(values)[1] + 126, 0).to(torch.uint8)


# -- what happens when scales get small -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Binades:
    """By name, how many block scales lie in each binade (exponent -> number), and how many are 0."""

    counts: dict[str, dict[int, int]]
    zeros: dict[str, int]
    total: int

    def below(self, name: str, exponent: int) -> int:
        """How many are below 2^exponent, zeros among them."""
        return self.zeros[name] + sum(n for e, n in self.counts[name].items() if e < exponent)

    def __str__(self) -> str:
        width = max(map(len, self.counts))
        return "\n".join(
            f"{name:<{width}}  {self.below(name, -6):>5} of {self.total} below 2^-6, {self.zeros[name]:>5} are 0" for name in self.counts
        )


def binades(**scales: Tensor) -> Binades:
    """Count E4M3 scale bytes (uint8, any shape, of equal size) by binade; the names are the keywords, with blanks for underscores."""
    counts, zeros = {}, {}
    for name, t in scales.items():
        values = E4M3_SCALE.decode(t).flatten()
        e, n = (torch.frexp(values[values > 0])[1] - 1).unique(return_counts=True)
        counts[name.replace("_", " ")], zeros[name.replace("_", " ")] = dict(zip(e.tolist(), n.tolist())), int((values == 0).sum())
    return Binades(counts, zeros, next(iter(scales.values())).numel())


def draw_binades(b: Binades) -> go.Figure:
    """Bars by binade, one row of bars a name; the edge below which E4M3 is subnormal is marked."""
    says = (
        "How many block scales lie in each binade. Left of the line E4M3 is subnormal: fewer bits the smaller the number, and 0 below 2⁻¹⁰. "
        "Marlin's S0E5M3 makes everything left of the line 0."
    )
    figure = figures.figure("Block scales by size", says, plot=20 + 110 * len(b.counts), below=34, legend=False, headings=False)
    low = min(min(c, default=0) for c in b.counts.values()) - 1
    high = max(max(c, default=0) for c in b.counts.values())
    xs = list(range(min(low, -10), high + 1))
    for i, (name, counts) in enumerate(b.counts.items()):
        top, bottom = 1 - i / len(b.counts), 1 - (i + 1) / len(b.counts)
        axis = "" if i == 0 else str(i + 1)
        zero = xs[0]
        figure.add_bar(
            x=xs,
            y=[b.zeros[name] if x == zero else counts.get(x, 0) for x in xs],
            yaxis=f"y{axis}",
            marker={"color": [figures.GATE if x < -6 else figures.UP for x in xs]},
            hovertemplate="%{x}: %{y}<extra></extra>",
            width=0.85,
        )
        figure.update_layout({f"yaxis{axis}": figures.plain_axis(domain=[bottom, top - 0.08], showticklabels=False, anchor="x")})
        figure.add_annotation(
            text=name,
            x=0,
            y=top,
            xref="paper",
            yref="paper",
            xanchor="left",
            yanchor="top",
            showarrow=False,
            font={"size": 13, "color": figures.TEXT},
        )
    ticks = [x for x in xs if x % 2 == 0 or x == xs[0]]
    figure.update_layout(
        xaxis=figures.plain_axis(
            tickvals=ticks,
            ticktext=["0" if x == xs[0] else figures.power(x) for x in ticks],
            anchor=f"y{len(b.counts) if len(b.counts) > 1 else ''}",
        ),
        bargap=0,
        shapes=[  # one for each row of bars: through all it would cross the names
            {
                "type": "line",
                "x0": -6.5,
                "x1": -6.5,
                "y0": 0,
                "y1": 1,
                "yref": f"y{i} domain",
                "line": {"color": figures.TEXT, "dash": "dot"},
            }
            for i in ("", *range(2, len(b.counts) + 1))
        ],
    )
    return figure
