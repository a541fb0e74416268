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
from .chances import log_chance
from .pattern import Pattern, counted, number, shows, with_levels

BLOCK = 64  # columns of one block in the table of the worst ones
WORST = 3
OWN = 2.0  # how much smaller or larger the wanted output must be to be named as a reason, where errors are counted, not measured
DECADE = 10.0  # more than that between the largest and the smallest: a logarithmic axis


@dataclass(frozen=True)
class ExpertError:
    """One expert: how many tokens selected it, the relative L2 error of these, and that of all others (None: there are none).

    bad: how many elements of its tokens are NaN or inf where the other output has something else
    """

    expert: int
    tokens: int
    error: float
    others: float | None
    bad: int = 0


@dataclass(frozen=True, eq=False)
class OutputError:
    """An output [T, H] against the wanted one.

    comparison   over all tokens and wanted columns
    tokens       float64 [T], columns: float64 [H]: relative L2 error, over elements that are finite in both; inf: not 0 where 0 is wanted,
                 or nothing was finite
    bad_tokens, bad_columns   int64 [T], [H]: how many elements are NaN or inf where the other output has something else
    experts      by number, where the selected experts were given
    blocks, bad_blocks   float64, int64 [blocks of BLOCK columns]: the same of these
    extra        columns beyond the wanted ones: (how many, how many of them hold something that is not 0)
    by_token, by_column   the pattern along each axis; elements that are NaN or inf count as the largest errors
    both         elements that are NaN or the same inf in both outputs
    sizes        float64 [T], [H]: root mean square of the wanted output, over its finite elements: what is small by itself has a large
                 relative error
    """

    title: str
    comparison: Comparison
    tokens: Tensor
    columns: Tensor
    bad_tokens: Tensor
    bad_columns: Tensor
    experts: tuple[ExpertError, ...]
    blocks: Tensor
    bad_blocks: Tensor
    extra: tuple[int, int]
    by_token: Pattern
    by_column: Pattern
    both: int
    sizes: tuple[Tensor, Tensor]

    @property
    def own(self) -> tuple[str, str]:
        """Of tokens and of columns: "smaller" or "larger" where the wanted output is that at the pattern's worse positions, so much that
        the checkpoint (or the input), not the fault, may have made the pattern; else ""."""
        return (_own(self.by_token, self.sizes[0], _worst(self.tokens, self.bad_tokens, sum(self.by_token.hits))),
                _own(self.by_column, self.sizes[1], _worst(self.columns, self.bad_columns, sum(self.by_column.hits))))

    @property
    def may_be_own(self) -> bool:
        """Whether the checkpoint, not the fault, may have made the pattern of the columns."""
        return bool(self.own[1])

    def worst_blocks(self, k: int = WORST) -> list[tuple[int, int, float]]:
        """The k blocks of columns with most NaN or inf, then with the largest error: (first column, last, relative L2)."""
        return [(i * BLOCK, min((i + 1) * BLOCK, self.columns.numel()) - 1, float(self.blocks[i]))
                for i in _worst(self.blocks, self.bad_blocks, k)]

    def worst_columns(self, k: int = WORST) -> list[tuple[int, float]]:
        """The k columns with most NaN or inf, then with the largest error; of equal ones the first: (column, relative L2)."""
        return [(i, float(self.columns[i])) for i in _worst(self.columns, self.bad_columns, k)]

    def worst_experts(self, k: int = WORST) -> list[ExpertError]:
        """The k experts with the largest share of NaN or inf, then with the largest error."""
        return sorted(self.experts, key=lambda e: (-e.bad / e.tokens, -e.error))[:k]

    def __str__(self) -> str:
        c, bad = self.comparison, int(self.bad_columns.sum())
        both = f", and {self.both} in both outputs" if self.both else ""
        lines = [f"relative L2 {number(c.relative_l2)}, cosine {_three(c.cosine)}, norm ratio {_three(c.norm_ratio)}; "
                 f"NaN or inf: {bad} of {c.elements}{both}"]
        if bad:
            tokens, columns = (int((t > 0).sum()) for t in (self.bad_tokens, self.bad_columns))
            lines.append(f"  NaN or inf in {_counted(tokens, 'token')}, {_counted(columns, 'column')}")
        for unit, values, p, own in (("token", self.tokens, self.by_token, self.own[0]),
                                     ("column", self.columns, self.by_column, self.own[1])):
            lines.append(f"  by {unit:<7} {_span(values)}; {p.text(unit)}")
            whose = "weights' own pattern" if unit == "column" else "tokens' own sizes"
            lines += [f"             the wanted output is {own} there, too: maybe the {whose}"] if own else []
        if self.extra[0]:
            held = f"{self.extra[1]} of them not 0" if self.extra[1] else "all 0"
            lines.append(f"  {_counted(self.extra[0], 'column')} more than wanted, from {self.columns.numel()} on, {held}")
        head = "  NaN or inf" if bad else ""
        lines += [f"  {'worst experts':<18} {'error':>7}  {'tokens':>6}{head}  other tokens' error"] if self.experts else []
        for e in self.worst_experts():
            others = "-" if e.others is None else number(e.others)
            lines.append(f"    {e.expert:<16} {number(e.error):>7}  {e.tokens:>6}{f'  {e.bad:>10}' if bad else ''}  {others}")
        lines.append(f"  {'worst columns':<18} {'error':>7}{head}")
        worst = _worst(self.columns, self.bad_columns, WORST)
        lines += [_line(str(i), self.columns[i], self.bad_columns[i], bad) for i in worst]
        first, last = ((self.columns[i], self.bad_columns[i]) for i in (worst[0], worst[-1]))
        more = int(((self.columns == first[0]) & (self.bad_columns == first[1])).sum()) - len(worst) if first == last else 0
        lines += [f"    and {more} more as bad"] if more > 0 else []
        if len(self.blocks) > 1:
            lines.append("  worst stretches")
            lines += [_line(f"{a}..{b}", v, self.bad_blocks[a // BLOCK], bad) for a, b, v in self.worst_blocks()]
        return "\n".join(lines)


def _line(name: str, error: Tensor | float, lost: Tensor, bad: int) -> str:
    return f"    {name:<16} {number(float(error)):>7}" + (f"  {int(lost):>10}" if bad else "")


def _worst(error: Tensor, bad: Tensor, k: int) -> list[int]:
    """The k positions with most NaN or inf, among these with the largest error; of equal ones the first."""
    order = error.argsort(descending=True, stable=True)
    return order[bad[order].argsort(descending=True, stable=True)][:k].tolist()


def output_error(got: Tensor, want: Tensor, experts: Tensor | None = None, *, title: str = "Where the output is wrong") -> OutputError:
    """Compare an output [T, H] with the wanted one, token by token, expert by expert, column by column.

    want     what the checkpoint means (`reference.forward`), or what an emulation gives
    experts  int [T, k], the selected experts, to attribute tokens to them; ids below 0 are none
    `got` may have more columns, as an output has that was not cut: they are counted apart. Raises MxdebugError for other shapes.
    """
    for t in (got, want):
        if not isinstance(t, Tensor) or t.dim() != 2:
            has = f"shape {list(t.shape)}" if isinstance(t, Tensor) else type(t).__name__
            raise MxdebugError("output", "a tensor with two dimensions, [tokens, columns]", has, "flatten batch and sequence to tokens")
    if want.shape[1] == 0:
        raise MxdebugError("output", "at least one column", f"shape {list(want.shape)}", "cut off too much")
    if got.shape[0] != want.shape[0] or got.shape[1] < want.shape[1]:
        raise MxdebugError("output", f"shape {list(want.shape)}, or more columns", f"shape {list(got.shape)}",
                           "outputs of two different calls")
    if experts is not None and experts.is_floating_point():
        raise MxdebugError("selected experts", "whole numbers", str(experts.dtype), "the router's weights, not its ids")
    if experts is not None and (experts.dim() != 2 or experts.shape[0] != want.shape[0]):
        raise MxdebugError("selected experts", f"shape [{want.shape[0]}, k]", f"shape {list(experts.shape)}", "those of another call")
    width = want.shape[1]
    beyond, got = got[:, width:], got[:, :width]
    a, b = _in_range(got.double(), want.double())
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    finite = torch.isfinite(a) & torch.isfinite(b)
    bad = ~finite & ~same
    error, size = (torch.where(finite, t, 0.0).square() for t in (a - b, b))

    def along(axis: int) -> tuple[Tensor, Pattern]:
        relative = _relative(error.sum(axis), size.sum(axis), finite.any(axis) | ~bad.any(axis))
        # One NaN is worse than any error; among equally many the error of the rest decides, here mapped to 0..1.
        ranked = bad.sum(axis) + torch.where(torch.isinf(relative), 1.0, relative / (1 + relative))
        return relative, _told(periods.find(ranked), relative, bad.any(axis))

    tokens, by_token = along(1)
    columns, by_column = along(0)
    parts = [slice(i, i + BLOCK) for i in range(0, width, BLOCK)]
    blocks = torch.stack([_of(error[:, i], size[:, i], finite[:, i], bad[:, i]) for i in parts])
    bad_blocks = torch.stack([bad[:, i].sum() for i in parts])
    extra = beyond.shape[1], int((beyond != 0).any(0).sum()) if beyond.numel() else 0
    known = torch.isfinite(b)
    squares = torch.where(known, b, 0.0).square()
    sizes = [torch.where(known.any(axis), (squares.sum(axis) / known.sum(axis)).sqrt(), torch.inf) for axis in (1, 0)]
    scaled = got.dtype == torch.float64 or want.dtype == torch.float64  # bits are of no interest then, and squares could leave the range
    return OutputError(title, compare(a, b) if scaled else compare(got, want), tokens, columns, bad.sum(1), bad.sum(0),
                       _by_expert(error, size, finite, bad, experts), blocks, bad_blocks, extra, by_token, by_column,
                       int((same & ~finite).sum()), (sizes[0], sizes[1]))


def _in_range(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Both times one power of two, where squares of float64 would be 0 or inf."""
    most = max((float(t[t.isfinite()].abs().max()) for t in (a, b) if bool(t.isfinite().any())), default=1.0)
    if most == 0 or 1e-100 < most < 1e100:
        return a, b
    shift = torch.tensor(-math.frexp(most)[1])
    return torch.ldexp(a, shift), torch.ldexp(b, shift)


def _relative(error: Tensor, size: Tensor, known: Tensor) -> Tensor:
    """sqrt(error / size) of sums of squares; 0 where nothing is off, inf where something is though 0 is wanted, or nothing is known."""
    out = torch.where(error == 0, 0.0, (error / size).sqrt())
    return torch.where(known, out, torch.inf)


def _of(error: Tensor, size: Tensor, finite: Tensor, bad: Tensor) -> Tensor:
    """The relative L2 error of a part of the output, [tokens, columns] each."""
    return _relative(error.sum(), size.sum(), finite.any() | ~bad.any())


def _told(p: Pattern, relative: Tensor, lost: Tensor) -> Pattern:
    """A pattern that was found in ranks, with numbers that show it: those of NaN and inf where these make it, else of relative errors."""
    if p.kind not in (periods.PERIOD, periods.STRETCH):
        return p
    nan = counted(p, lost, "with NaN or inf")
    told = with_levels(p, relative)
    if shows(nan) and (2 * nan.hits[0] >= int(p.mask().sum()) or not shows(told)):
        return with_levels(nan, relative)
    return told if shows(told) else Pattern(periods.ALIKE, p.size, p.tried)


def _own(p: Pattern, sizes: Tensor, worst: list[int]) -> str:
    """Whether the wanted sizes differ where the errors do, by no chance and by enough to be the reason.

    An error of one size everywhere makes the factor between the errors that between the sizes; its root is asked for. (Where the others
    are exact, only other columns of 0 can be the reason.) Where the pattern is told by counts, the positions that are counted, `worst`,
    must be smaller or larger by a factor of 2.
    """
    if p.kind not in (periods.PERIOD, periods.STRETCH):
        return ""
    (e, f), mask, least = p.levels, p.mask(), OWN
    if p.word == periods.WRONG and e > f:
        least = math.sqrt(e / f) if f else math.inf
    else:
        mask = torch.zeros_like(mask).index_fill(0, torch.tensor(worst, dtype=torch.int64), True)
    a, b = (float(sizes[m].median()) if bool(m.any()) else math.inf for m in (mask, ~mask))
    z, inside = periods.scores(sizes), int(mask.sum())
    total = float(z @ z) * inside * (p.size - inside) / p.size
    if a == b or not total or log_chance(float(z[mask].sum()) ** 2 / total, 1, p.size - 2) > math.log(periods.ALARMS):
        return ""
    factor = math.inf if min(a, b) == 0 else max(a, b) / min(a, b)
    return ("smaller" if a < b else "larger") if factor >= least else ""


def _by_expert(error: Tensor, size: Tensor, finite: Tensor, bad: Tensor, experts: Tensor | None) -> tuple[ExpertError, ...]:
    if experts is None:
        return ()
    out = []
    for e in experts[experts >= 0].unique().tolist():
        of = (experts == e).any(1)
        mine, rest = (float(_of(error[m], size[m], finite[m], bad[m])) for m in (of, ~of))
        out.append(ExpertError(int(e), int(of.sum()), mine, None if bool(of.all()) else rest, int(bad[of].sum())))
    return tuple(out)


def _three(value: float) -> str:
    return "NaN" if math.isnan(value) else f"{value:.3f}"


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
    experts = points(torch.tensor([x.error for x in e.experts], dtype=torch.float64), torch.tensor([x.bad for x in e.experts]))
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
        return {**grid, "type": "linear", "range": [_short(-0.08 * high), _short(1.25 * high)], "nticks": 4}, 0.0, _short(high * 1.15)
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    tens = range(first, last + 1, -(-(last - first + 1) // 4))
    stretch = (high / low) ** 0.12
    labels = [f"{10.0**i:g}" if -4 < i < 4 else f"10{figures.power(i)[1:]}" for i in tens]
    return {**grid, "type": "log", "range": [round(math.log10(v), 3) for v in (low / stretch**2, high * stretch**2)],  # the same digits on every machine
            "tickvals": [10.0**i for i in tens], "ticktext": labels}, _short(low / stretch), _short(high * stretch)


def _short(value: float) -> float:
    """Three digits: they are the same on every machine."""
    return float(f"{value:.3g}")


def _says(e: OutputError, panels: dict[str, Points]) -> str:
    pooled = "; ".join(f"a point is the largest of {p.pooled} {unit}s" for unit, p in panels.items() if p.pooled > 1)
    above = "of each token, and of all tokens of each expert" if e.experts else "of each token"
    return (f"Relative L2 error of the output. Above: {above}. Below: of each column{f' ({pooled})' if pooled else ''}"
            f"{', and by residue' if e.by_column.kind == periods.PERIOD else ''}. By token: {e.by_token.text('token')}. "
            f"By column: {e.by_column.text('column')}.")
