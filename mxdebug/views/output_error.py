"""Where is an output wrong: in which tokens, which experts, which columns, and is there a pattern?"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import plotly.graph_objects as go
import torch
from torch import Tensor

from ..errors import MxdebugError
from ..metrics import Comparison, compare
from . import figures, periods
from .periods import Pattern, number

BLOCK = 64  # columns of one block in the table of the worst ones
WORST = 3
DECADE = 10.0  # more than that between the largest and the smallest: a logarithmic axis


@dataclass(frozen=True)
class ExpertError:
    """One expert: how many tokens selected it, the relative L2 error of these, and that of all others."""

    expert: int
    tokens: int
    error: float
    others: float


@dataclass(frozen=True, eq=False)
class OutputError:
    """An output [T, H] against the wanted one.

    comparison   over all tokens and wanted columns
    tokens       float64 [T], columns: float64 [H]: relative L2 error, over elements that are finite in both; inf: not 0 where 0 is wanted,
                 or nothing was finite
    bad_tokens, bad_columns   int64 [T], [H]: how many elements are NaN or inf where the other output has something else
    experts      by number, where the selected experts were given
    blocks       float64 [blocks of BLOCK columns]
    extra        columns beyond the wanted ones: (how many, how many of them hold something that is not 0)
    by_token, by_column   the pattern along each axis; elements that are NaN or inf count as the largest errors
    own          the pattern of the wanted columns' sizes: rows of the weight that are small by themselves show in a relative error too
    """

    title: str
    comparison: Comparison
    tokens: Tensor
    columns: Tensor
    bad_tokens: Tensor
    bad_columns: Tensor
    experts: tuple[ExpertError, ...]
    blocks: Tensor
    extra: tuple[int, int]
    by_token: Pattern
    by_column: Pattern
    own: Pattern

    @property
    def may_be_own(self) -> bool:
        """Whether the wanted columns' sizes have the pattern of the error: then the checkpoint, not the fault, may have made it."""
        a, b = self.by_column, self.own
        if (a.kind, a.period) != (b.kind, b.period):
            return False
        return a.kind == periods.PERIOD or a.kind == periods.STRETCH and torch.equal(a.mask(), b.mask())

    def worst_blocks(self, k: int = WORST) -> list[tuple[int, int, float]]:
        """The k blocks of columns with the largest error, largest first: (first column, last, relative L2)."""
        order = self.blocks.argsort(descending=True, stable=True)[:k].tolist()
        return [(i * BLOCK, min((i + 1) * BLOCK, self.columns.numel()) - 1, float(self.blocks[i])) for i in order]

    def worst_columns(self, k: int = WORST) -> list[tuple[int, float]]:
        """The k columns with the largest error, largest first; of equal ones the first: (column, relative L2)."""
        return [(i, float(self.columns[i])) for i in self.columns.argsort(descending=True, stable=True)[:k].tolist()]

    def __str__(self) -> str:
        c, bad = self.comparison, int(self.bad_columns.sum())
        lines = [f"relative L2 {c.relative_l2:.3f}, cosine {c.cosine:.3f}, norm ratio {c.norm_ratio:.3f}; "
                 f"NaN or inf: {bad} of {c.elements}"]
        if bad:
            tokens, columns = (int((t > 0).sum()) for t in (self.bad_tokens, self.bad_columns))
            lines.append(f"  NaN or inf in {_counted(tokens, 'token')}, {_counted(columns, 'column')}")
        lines += [f"  by token   {_span(self.tokens)}; {self.by_token.text('token')}",
                  f"  by column  {_span(self.columns)}; {self.by_column.text('column')}"]
        if self.may_be_own:
            sizes = "smaller" if bool((self.own.mask() ^ self.by_column.mask()).any()) else "larger"
            lines.append(f"             the wanted output is {sizes} there, too: maybe the weights' own pattern")
        if self.extra[0]:
            held = f"{self.extra[1]} of them not 0" if self.extra[1] else "all 0"
            lines.append(f"  {_counted(self.extra[0], 'column')} more than wanted, from {self.columns.numel()} on, {held}")
        worst = sorted(self.experts, key=lambda e: -e.error)[:WORST]
        lines += [f"  {'worst experts':<18} {'error':>7}  {'tokens':>6}  other tokens' error"] if worst else []
        lines += [f"    {e.expert:<16} {number(e.error):>7}  {e.tokens:>6}  {number(e.others)}" for e in worst]
        lines.append(f"  {'worst columns':<18} {'error':>7}")
        columns = self.worst_columns()
        lines += [f"    {c:<16} {number(v):>7}" for c, v in columns]
        more = int((self.columns == columns[0][1]).sum()) - len(columns) if columns and columns[0][1] == columns[-1][1] else 0
        lines += [f"    and {more} more as bad"] if more > 0 else []
        lines += ["  worst stretches", *(f"    {f'{a}..{b}':<16} {number(v):>7}" for a, b, v in self.worst_blocks())] if len(self.blocks) > 1 else []
        return "\n".join(lines)


def output_error(got: Tensor, want: Tensor, experts: Tensor | None = None, *, title: str = "Where the output is wrong") -> OutputError:
    """Compare an output [T, H] with the wanted one, token by token, expert by expert, column by column.

    want     what the checkpoint means (`reference.forward`), or what an emulation gives
    experts  int [T, k], the selected experts, to attribute tokens to them; ids below 0 are none
    `got` may have more columns, as an output has that was not cut: they are counted apart. Raises MxdebugError for other shapes.
    """
    if got.dim() != 2 or want.dim() != 2 or got.shape[0] != want.shape[0] or got.shape[1] < want.shape[1]:
        raise MxdebugError("output", f"shape {list(want.shape)}, or more columns", f"shape {list(got.shape)}",
                           "outputs of two different calls")
    if experts is not None and (experts.dim() != 2 or experts.shape[0] != want.shape[0]):
        raise MxdebugError("selected experts", f"shape [{want.shape[0]}, k]", f"shape {list(experts.shape)}", "those of another call")
    width = want.shape[1]
    beyond, got = got[:, width:], got[:, :width]
    a, b = got.double(), want.double()
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    finite = torch.isfinite(a) & torch.isfinite(b)
    bad = ~finite & ~same
    error, size = (torch.where(finite, t, 0.0).square() for t in (a - b, b))

    def along(axis: int) -> tuple[Tensor, Pattern]:
        relative = _relative(error.sum(axis), size.sum(axis), finite.any(axis) | ~bad.any(axis))
        # One NaN is worse than any error; among equally many the error of the rest decides, here mapped to 0..1.
        ranked = bad.sum(axis) + torch.where(torch.isinf(relative), 1.0, relative / (1 + relative))
        return relative, _with_levels(periods.find(ranked), relative)

    tokens, by_token = along(1)
    columns, by_column = along(0)
    starts = range(0, width, BLOCK)
    blocks = torch.stack([_relative(error[:, i: i + BLOCK].sum(), size[:, i: i + BLOCK].sum(), torch.tensor(True)) for i in starts])
    extra = beyond.shape[1], int((beyond != 0).any(0).sum()) if beyond.numel() else 0
    return OutputError(title, compare(got, want), tokens, columns, bad.sum(1), bad.sum(0), _by_expert(error, size, experts), blocks, extra,
                       by_token, by_column, periods.find(size.sum(0).sqrt()))


def _relative(error: Tensor, size: Tensor, known: Tensor) -> Tensor:
    """sqrt(error / size) of sums of squares; 0 where nothing is off, inf where something is though 0 is wanted, or nothing is known."""
    out = torch.where(error == 0, 0.0, (error / size).sqrt())
    return torch.where(known, out, torch.inf)


def _with_levels(p: Pattern, values: Tensor) -> Pattern:
    """The pattern with the medians of `values`, where it was found in their ranks together with NaN."""
    if p.kind not in (periods.PERIOD, periods.STRETCH):
        return p
    mask = p.mask()
    return Pattern(p.kind, p.size, p.tried, p.period, p.worse, (float(values[mask].median()), float(values[~mask].median())), p.chance)


def _by_expert(error: Tensor, size: Tensor, experts: Tensor | None) -> tuple[ExpertError, ...]:
    if experts is None:
        return ()
    error, size, out, sure = error.sum(1), size.sum(1), [], torch.tensor(True)
    for e in experts[experts >= 0].unique().tolist():
        of = (experts == e).any(1)
        mine, rest = (float(_relative(error[m].sum(), size[m].sum(), sure)) for m in (of, ~of))
        out.append(ExpertError(int(e), int(of.sum()), mine, rest))
    return tuple(out)


def _counted(n: int, unit: str) -> str:
    return f"{n} {unit}{'s' if n != 1 else ''}"


def _span(values: Tensor) -> str:
    return f"{number(float(values.min()))} to {number(float(values.max()))}" if values.numel() else "none"


# -- drawing ----------------------------------------------------------------------------------------------------------

ZERO, LOST, WORSE, ERROR = "exactly 0", "with NaN or inf", "worse", "error"
SYMBOLS = {ZERO: "circle-open", LOST: "x", WORSE: "triangle-up", ERROR: "circle"}
TOP_ROW, BOTTOM_ROW = (0.64, 1.0), (0.0, 0.36)  # of the plot's height


@dataclass(frozen=True)
class Points:
    """What a panel shows: at most `figures.LARGEST` points. x: the position of each; error: its value, the largest of a group of `pooled`;
    kinds: ZERO, LOST (an element of it is NaN or inf, or 0 was wanted), WORSE (one of the pattern's worse positions), ERROR."""

    x: tuple[int, ...]
    error: tuple[float, ...]
    kinds: tuple[str, ...]
    pooled: int = 1


def points(values: Tensor, bad: Tensor | None = None, worse: Tensor | None = None) -> Points:
    """The points of an axis, of each group the position with the largest error; one with NaN or inf is larger than all others.

    values, bad, worse   float64, int64, bool [n]
    """
    n = values.numel()
    lost, pooled = torch.isinf(values) if bad is None else (bad > 0) | torch.isinf(values), max(1, -(-n // figures.LARGEST))
    rank = torch.where(lost, torch.inf, values)
    at = [i + int(part.argmax()) for i, part in zip(range(0, n, pooled), rank.split(pooled))]
    kinds = [LOST if lost[i] else ZERO if values[i] == 0 else WORSE if worse is not None and worse[i] else ERROR for i in at]
    return Points(tuple(at), tuple(values[at].tolist()), tuple(kinds), pooled)


def folded(e: OutputError) -> Points | None:
    """The median error of the columns of each residue, where there is a period. NaN in a column is not seen here."""
    p = e.by_column
    if p.kind != periods.PERIOD:
        return None
    medians = torch.stack([e.columns[r::p.period].median() for r in range(p.period)])
    return points(medians, None, p.mask()[: p.period])


def draw(e: OutputError) -> go.Figure:
    """Panels on one axis of relative L2 error: by token, by expert (if there are any), by column, and by residue if there is a period."""
    masks = {u: p.mask() for u, p in (("token", e.by_token), ("column", e.by_column)) if p.kind in (periods.PERIOD, periods.STRETCH)}
    numbers = [x.expert for x in e.experts]
    experts = points(torch.tensor([x.error for x in e.experts], dtype=torch.float64))
    across = (0.62, 0.7)
    panels = [("token", "", points(e.tokens, e.bad_tokens, masks.get("token")), (0.0, across[0] if e.experts else 1.0), TOP_ROW)]
    if e.experts:
        by_expert = replace(experts, x=tuple(numbers[i] for i in experts.x))
        panels.append(("expert", "2", by_expert, (across[1], 1.0), TOP_ROW))
    fold = folded(e)
    panels.append(("column", "3", points(e.columns, e.bad_columns, masks.get("column")), (0.0, across[0] if fold else 1.0), BOTTOM_ROW))
    if fold:
        panels.append((f"c % {e.by_column.period}", "4", fold, (across[1], 1.0), BOTTOM_ROW))
    figure = figures.figure(e.title, _says(e, {u: p for u, _, p, _, _ in panels}), plot=330, below=40, legend=True)
    figure.update_layout(legend_itemsizing="constant")
    values = [v for _, _, p, _, _ in panels for v in p.error if 0 < v < math.inf]
    low, high = (min(values), max(values)) if values else (1e-3, 1.0)
    axis_of, at_zero, at_top = _scale(low, high)
    named: set[str] = set()
    for unit, axis, p, columns, rows in panels:
        for kind in dict.fromkeys(p.kinds):
            name = e.by_token.where(unit) if kind == WORSE and unit == "token" else e.by_column.where("column") if kind == WORSE else kind
            some = [i for i, k in enumerate(p.kinds) if k == kind]
            special = kind in (ZERO, LOST)
            figure.add_scatter(
                x=[p.x[i] for i in some],
                y=[at_zero if v == 0 else at_top if math.isinf(v) else float(f"{v:.3g}") for i in some for v in (p.error[i],)],
                mode="markers", name=name, legendgroup=name, showlegend=name not in named, xaxis=f"x{axis}", yaxis=f"y{axis}",
                marker={"symbol": SYMBOLS[kind], "size": 8 if len(p.x) <= 64 else 6 if kind != ERROR else 5,
                        "color": figures.TEXT if special else figures.GATE if kind == WORSE else figures.UP,
                        **({"line": {"color": figures.TEXT, "width": 1.2}} if special else {})},
                hovertemplate=f"{unit} %{{x}}: " + (kind if special else "%{y}") + "<extra></extra>")
            named.add(name)
        first, last = min(p.x, default=0), max(p.x, default=1)
        margin = max(0.5, 0.03 * (last - first))
        figure.update_layout({
            f"xaxis{axis}": figures.plain_axis(domain=list(columns), anchor=f"y{axis}", title=unit, range=[first - margin, last + margin],
                                               **({"dtick": 1} if last - first < 10 else {"nticks": 8 if columns[0] == 0 else 5})),
            f"yaxis{axis}": figures.plain_axis(domain=list(rows), anchor=f"x{axis}", showticklabels=columns[0] == 0, **axis_of)})
        name = {"token": "by token", "expert": "by expert", "column": "by column"}.get(unit, f"by {unit}: medians")
        figure.add_annotation(text=name, x=columns[0], y=rows[1], xref="paper", yref="paper", xanchor="left", yanchor="bottom", yshift=2,
                              showarrow=False, font={"size": 13, "color": figures.TEXT})
    return figure


def _scale(low: float, high: float) -> tuple[dict[str, object], float, float]:
    """(the vertical axis for values from low to high, where zeros stand on it, where inf does)."""
    grid = {"showgrid": True, "gridcolor": figures.GRID}
    if high <= DECADE * low:
        return {**grid, "type": "linear", "range": [-0.08 * high, 1.25 * high], "nticks": 4}, 0.0, high * 1.15
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    tens = range(first, last + 1, -(-(last - first + 1) // 4))
    stretch = (high / low) ** 0.12
    labels = [f"{10.0**i:g}" if -4 < i < 4 else f"10{figures.power(i)[1:]}" for i in tens]
    return {**grid, "type": "log", "range": [math.log10(low / stretch**2), math.log10(high * stretch**2)],
            "tickvals": [10.0**i for i in tens], "ticktext": labels}, low / stretch, high * stretch


def _says(e: OutputError, panels: dict[str, Points]) -> str:
    pooled = "; ".join(f"a point is the largest of {p.pooled} {unit}s" for unit, p in panels.items() if p.pooled > 1)
    above = "of each token, and of all tokens of each expert" if e.experts else "of each token"
    return (f"Relative L2 error of the output. Above: {above}. Below: of each column{f' ({pooled})' if pooled else ''}"
            f"{', and by residue' if e.by_column.kind == periods.PERIOD else ''}. By token: {e.by_token.text('token')}. "
            f"By column: {e.by_column.text('column')}.")
