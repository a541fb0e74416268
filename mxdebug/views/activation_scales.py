"""Activation scales as a kernel reads them, beside the tokens' own; and what an exchange between ranks does to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import plotly.graph_objects as go
import torch
from torch import Tensor

from ..errors import MxdebugError
from ..exchange import Exchange, ScaleFinding, examine_scales, read_scales
from ..formats import E8M0, MXFP8
from ..layouts import SWIZZLE_128x4, Layout
from . import figures, places
from .worst import Worst, worst_scales

BEYOND = "beyond the end of the buffer"
RANKS = ("#56b4e9", "#e69f00", "#009e73", "#cc79a7")  # Okabe and Ito's; the number of the rank stands beside
TILE = SWIZZLE_128x4.tile[0]
Strip = tuple[tuple[tuple["int | None", int], ...], ...]  # for each tile its parts: (rank, or None for padding; rows)


# -- what is read -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Reading:
    """The scales that belong to the tokens, and those that a kernel finds for them.

    meant, read   uint8 [tokens, columns], E8M0 bytes; where `outside` is true, read is unknown
    outside       bool [tokens, columns]: the kernel looks beyond the buffer's end
    """

    title: str
    meant: Tensor
    read: Tensor
    outside: Tensor

    @property
    def wrong(self) -> int:
        """How many are read as another scale, or from beyond the end."""
        return int(((self.meant != self.read) | self.outside).sum())

    @property
    def worst(self) -> Worst:
        """The scales that are furthest off, those from beyond the end first; a row is a token."""
        return worst_scales(self.meant, self.read, block=MXFP8.block, meant_scale=E8M0, outside=self.outside)

    def __str__(self) -> str:
        total, off = self.meant.numel(), (self.read.int() - self.meant.int())[~self.outside]
        largest = int(off.abs().max()) if off.numel() else 0
        return (f"{self.wrong} of {total} block scales are read wrong ({self.wrong / total:.1%})\n"
                f"  too small: {int((off < 0).sum())}, too large: {int((off > 0).sum())}, by a factor of up to {2 ** largest}\n"
                f"  {BEYOND}: {int(self.outside.sum())}")


def reading(meant: Tensor, buffer: Tensor, layout: Layout, *, title: str) -> Reading:
    """Read a buffer of bytes in `layout` for tokens whose scales are `meant`, uint8 [tokens, columns]."""
    read, outside = read_scales(buffer, *meant.shape, layout)
    return Reading(title, meant, read, outside)


def draw(r: Reading) -> go.Figure:
    """Both matrices side by side on one colour scale; a glyph for what lies beyond the buffer's end."""
    beyond = bool(r.outside.any())
    says = ("One cell a block of 32 numbers of one token, coloured by its block scale. Left: each row and each column has its own level. "
            "Right: the same cells as the kernel reads them" + ("; a stroke: it looks beyond the end." if beyond else "."))
    rows, columns = r.meant.shape
    figure = figures.figure(r.title, says, plot=max(90, figures.cell_height(rows)), below=figures.BELOW_CELLS, legend=beyond)
    read = torch.where(r.outside, r.meant.amin(), r.read)
    both = torch.cat([r.meant.flatten(), read.flatten()])
    figures.cells(figure, r.meant, both, "x", "y", 0, 1, scale=True, bar=True)
    figures.cells(figure, read, both, "x2", "y2", 0, 1, scale=True, bar=False, padding=r.outside)
    names = {figures.PADDING[0]: BEYOND,  # E8M0 bytes as they are, not as SM90's kernel reads those of weights
             figures.SPECIAL[0x00][0]: "0x00: 2⁻¹²⁷, as padding has", figures.SPECIAL[0xFF][0]: "0xFF: NaN"}
    for trace in figure.data:
        trace.name = names.get(trace.name, trace.name)
        trace.legendgroup = trace.name
    column_axis, row_axis = {"title": "column", "range": [-0.5, columns - 0.5]}, {"range": [rows - 0.5, -0.5]}
    if rows > places.THIN:
        figure.update_traces(ygap=0, selector={"type": "heatmap"})
    figure.update_layout(
        xaxis=figures.plain_axis(domain=[0, 0.48], **column_axis), yaxis=figures.plain_axis(title="token", **row_axis),
        xaxis2=figures.plain_axis(domain=[0.52, 1], anchor="y2", **column_axis),
        yaxis2=figures.plain_axis(anchor="x2", showticklabels=False, **row_axis))
    figures.heading(figure, 0, "the tokens' own")
    figures.heading(figure, 0.52, "the kernel reads")
    return figure


def draw_tile(p: places.Places) -> go.Figure:
    """`places.draw`, in words that are true of activations."""
    figure = places.draw(p, "a block of 32 numbers of one token, coloured by its block scale")
    return figure


# -- tiles ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tiles:
    """Whose rows stand in the tiles of 128 rows: a list of (rank, or None for padding; rows) for each tile.

    reads   what a kernel that reads 128x4 takes the buffer for: the swizzle of all rows, rank by rank
    gets    what it is handed where each rank swizzled its own rows before an all-gather
    """

    counts: tuple[int, ...]
    reads: Strip
    gets: Strip

    @property
    def right(self) -> int:
        """How many tokens' scales stand where the kernel looks for them."""
        return sum(a == b and a is not None for a, b in zip(_each_row(self.reads), _each_row(self.gets)))

    def __str__(self) -> str:
        def text(strip: Strip) -> str:
            return " | ".join(", ".join(f"{n} of {'padding' if rank is None else f'rank {rank}'}" for rank, n in tile) for tile in strip)

        return "\n".join([f"{' + '.join(map(str, self.counts))} tokens, tile by tile:", f"  the kernel reads  {text(self.reads)}",
                          f"  it gets           {text(self.gets)}", f"  in their places: {self.right} of {sum(self.counts)}"])


def _each_row(strip: Strip) -> list[tuple[int, int] | None]:
    """(rank, its row) at each row of the tiles, None for padding."""
    seen: dict[int | None, int] = {}
    out: list[tuple[int, int] | None] = []
    for rank, n in (part for tile in strip for part in tile):
        first = seen.get(rank, 0)
        seen[rank] = first + n
        out += [None if rank is None else (rank, first + i) for i in range(n)]
    return out


def tiles(counts: Sequence[int]) -> Tiles:
    """For each rank its number of tokens."""
    if not counts or min(counts) < 1:
        raise MxdebugError("counts", "numbers >= 1, one for each rank", str(counts))
    each = [_filled([(rank, n)]) for rank, n in enumerate(counts)]
    return Tiles(tuple(counts), _filled(list(enumerate(counts))), tuple(tile for rank in each for tile in rank))


def _filled(parts: list[tuple[int, int]]) -> Strip:
    """Rows one after the other in tiles of 128, the last one padded."""
    out: list[list[tuple[int | None, int]]] = [[]]
    for rank, n in (*parts, (None, -sum(n for _, n in parts) % TILE)):
        while n:
            room = TILE - sum(k for _, k in out[-1])
            if not room:
                out.append([])
                continue
            out[-1].append((rank, min(n, room)))
            n -= min(n, room)
    return tuple(tuple(tile) for tile in out)


def draw_tiles(t: Tiles) -> go.Figure:
    """Two bars above each other: what the kernel reads, what it gets."""
    if len(t.counts) > len(RANKS):
        raise MxdebugError("ranks to draw", f"at most {len(RANKS)}", str(len(t.counts)))
    says = ("Rows of the swizzled buffer, in tiles of 128. Above: what the kernel takes it for, all tokens one after the other, padding at "
            "the end. Below: what it gets if each rank swizzles before the exchange: every rank's tiles carry their own padding.")
    figure = figures.figure("Swizzled before the exchange: whose rows are where", says, plot=110, headings=False, left=110)
    for y, strip in enumerate((t.gets, t.reads)):
        start = 0
        for rank, n in (part for tile in strip for part in tile):
            colour, frame = (figures.BLANK, 1) if rank is None else (RANKS[rank], 0)  # text reads best on the page
            label = "padding" if rank is None else f"rank {rank}"
            figure.add_bar(x=[n], base=[start], y=[y], orientation="h", width=0.62,
                           marker={"color": colour, "line": {"width": frame, "color": figures.TEXT}},
                           text=[f"{label}<br>{n}"], textposition="inside", insidetextanchor="middle", textangle=0,
                           textfont={"size": 11, "color": figures.TEXT if rank is None else "black"},
                           hovertemplate=f"{label}: {n} rows<extra></extra>", showlegend=False)
            start += n
    ends = [TILE * i for i in range(len(t.gets) + 1)]
    for x in ends:
        figure.add_shape(type="line", x0=x, x1=x, y0=-0.5, y1=1.5, line={"color": figures.TEXT, "width": 1, "dash": "dot"})
    figure.update_layout(barmode="overlay", uniformtext={"minsize": 9, "mode": "hide"},
                         xaxis=figures.plain_axis(title="row of the buffer", tickvals=ends, range=[-1, ends[-1] + 1]),
                         yaxis=figures.plain_axis(tickvals=[1, 0], ticktext=["the kernel reads", "it gets"], range=[-0.5, 1.5]))
    return figure


# -- several exchanges ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Line:
    """One exchange, as rank 0's kernel finds it; alone: judged from its call only; sent: with what the ranks sent."""

    tokens: tuple[int, ...]
    order: str
    got: int
    read: int
    wrong: int
    alone: ScaleFinding
    sent: ScaleFinding


@dataclass(frozen=True)
class Summary:
    """Several exchanges, one line each."""

    lines: tuple[Line, ...]

    def __str__(self) -> str:
        names = ["+".join(map(str, line.tokens)) for line in self.lines]
        width = max(6, *map(len, names))
        out = [f"{'tokens':<{width}}  {'order':<14}  {'bytes':>5}  {'read':>5}  {'wrong':>7}  {'from one call':<25}  with what was sent"]
        for name, line in zip(names, self.lines):
            wrong = f"{line.wrong}/{sum(line.tokens)}"
            out.append(f"{name:<{width}}  {line.order:<14}  {line.got:>5}  {line.read:>5}  {wrong:>7}  "
                       f"{_short(line.alone):<25}  {_short(line.sent)}")
        return "\n".join(out)


def _short(f: ScaleFinding) -> str:
    if f.wrong is not None:
        return f"proved {'wrong' if f.wrong else 'right'} by {f.by}"
    return "undecided" if f.status == "undecided" else f"{f.status} {'right' if f.verdict == 'right' else 'wrong'}"


def summary(exchanges: Sequence[Exchange]) -> Summary:
    """Exchanges by all-gather, for a kernel that reads 128x4: every rank is handed the same, so rank 0 stands for all.

    Raises MxdebugError where the ranks were handed different bytes.
    """
    out = []
    for e in exchanges:
        h = e.handed[0]
        if not all(torch.equal(h.scales, other.scales) for other in e.handed):
            raise MxdebugError("exchange", "an all-gather: the same bytes on every rank", e.case.implementation)
        alone, sent = (examine_scales(h.payload, h.scales, format=e.format, contract_layout=SWIZZLE_128x4, sent=s) for s in (None, e.sent))
        rows, columns = SWIZZLE_128x4.padded(h.payload.shape[0], h.columns)
        out.append(Line(e.case.rows_per_rank, e.case.order, h.scales.numel(), rows * columns, e.wrong_rows(0, SWIZZLE_128x4), alone, sent))
    return Summary(tuple(out))
