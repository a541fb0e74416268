"""Which codes a weight uses, and which block scales: counts, of what is meant and of what is read.

Counts do not see an order: rows, bytes, nibbles or experts that change places leave every bar as it is. They see bytes that are
taken for something else, values that were quantised again, and whatever is missing or there twice.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

import plotly.graph_objects as go
import torch
from torch import Tensor

from ..errors import MxdebugError
from ..formats import BlockTensor, ElementCodec, ScaleCodec
from ..reference import MoELayer
from . import figures
from .compare import check_expert, check_experts, operand_parts
from .worst import number

SAME, NIBBLES, PAIRED, OTHER = "same bytes", "nibbles exchanged", "same codes, other pairs", "other codes"
MEANS, READS = "the checkpoint means", "the kernel reads"


@dataclass(frozen=True)
class Counts:
    """One tensor. payload, scales: how often each byte occurs (256 numbers); block scales are read with `codec`."""

    name: str
    element: ElementCodec
    codec: ScaleCodec
    payload: tuple[int, ...]
    scales: tuple[int, ...]

    @property
    def codes(self) -> tuple[int, ...]:
        """How often each element code occurs: 16 numbers for E2M1 (both nibbles of each byte), else 256."""
        if self.element.bits == 8:
            return self.payload
        low, high = torch.tensor(self.payload).reshape(16, 16).sum(0), torch.tensor(self.payload).reshape(16, 16).sum(1)
        return tuple((low + high).tolist())

    @property
    def swapped(self) -> tuple[int, ...]:
        """The payload's counts if the nibbles of each byte changed places."""
        return tuple(torch.tensor(self.payload).reshape(16, 16).T.flatten().tolist())

    @property
    def unused(self) -> tuple[int, ...]:
        """Element codes that do not occur."""
        return tuple(c for c, n in enumerate(self.codes) if n == 0)


@dataclass(frozen=True)
class Codes:
    """Counts of one tensor, or of what is meant and what is read; padding: how many weights more the kernel reads.

    block: elements that share a scale; equal: whether both are the same, byte for byte, but for padding
    """

    title: str
    block: int
    counts: tuple[Counts, ...]
    padding: int = 0
    equal: bool = False

    @property
    def payload_order(self) -> str | None:
        """What the counts of the payload say about its order: SAME, NIBBLES, PAIRED or OTHER; padding, as bytes 0x00, is left out."""
        if len(self.counts) == 1:
            return None
        a, b = self.counts
        extra = self.padding // (8 // a.element.bits)
        got, swapped = (_without(n, extra) for n in (b.payload, b.swapped))
        if a.payload == got:
            return SAME
        if a.element.bits == 8:
            return OTHER
        return NIBBLES if a.payload == swapped else PAIRED if a.codes == _without(b.codes, self.padding) else OTHER

    @property
    def same_scales(self) -> bool | None:
        """Whether the block scales are the same numbers, each as often."""
        if len(self.counts) == 1:
            return None
        a, b = (scale_bars(c) for c in self.counts)
        if self.padding:  # a padded block's scale counts for nothing, whatever it is: so many must be left over, and none be missing
            return all(b.get(k, 0) >= n for k, n in a.items()) and sum(b.values()) - sum(a.values()) == self.padding // self.block
        return a == b

    def verdict(self) -> str:
        """One or two sentences on both tensors; "" for one alone."""
        if len(self.counts) == 1:
            return ""
        if self.equal and self.same_scales:
            return "Payload and block scales are equal, byte for byte."
        if self.payload_order == SAME and self.same_scales:
            return "The same bytes and the same scales, each as often: only their order can be wrong."
        payload = {SAME: "the same bytes, each as often, so only their order can be wrong",
                   NIBBLES: "the same bytes with their two nibbles exchanged, which no bar shows",
                   PAIRED: "the same codes in other pairs, so only the order of single codes is wrong",
                   OTHER: "other codes, not only another order"}[self.payload_order]
        scales = "the same, each as often, so only their order can be wrong" if self.same_scales else "others, not only another order"
        return f"Payload: {payload}. Block scales: {scales}."

    def __str__(self) -> str:
        out = []
        width = max(len(c.name) for c in self.counts)
        for c in self.counts:
            bits = c.element.bits
            unused = f"{len(c.unused)} of {2 ** bits} codes unused"
            if bits == 4 and c.unused:
                unused += ": " + ", ".join(_value(c.element, code) for code in c.unused)
            special = [f"{sum(n for (_, label, _), n in bars(c).items() if label == kind):,} {kind}" for kind in ("NaN", "inf")
                       if bits == 8 and any(label == kind for _, label, _ in bars(c))]
            scales = [b for b, n in enumerate(c.scales) if n]
            out.append(f"{c.name:<{width}}  {sum(c.codes):,} {c.element.name} codes, {', '.join([unused, *special])}")
            values = [float(c.codec.table()[b]) for b in scales]
            usual = sorted(v for v in values if v == v and abs(v) not in (0, float("inf")))
            span = f", from {number(usual[0], True)} to {number(usual[-1], True)}" if usual else ""
            different = f"{len(scales)} different byte{'s' * (len(scales) != 1)}"
            out.append(f"{'':<{width}}  {sum(c.scales):,} block scales, {different} ({c.codec.name}){span}")
            out += [f"{'':<{width}}    {label}: {n:,}" for (_, label, special), n in scale_bars(c).items() if special]
        if self.padding:
            out.append(f"padding: {self.padding:,} weights more are read than are meant")
        return "\n".join(out + textwrap.wrap(self.verdict(), figures.WIDTH))


def _without(counts: tuple[int, ...], zeros: int) -> tuple[int, ...]:
    return (counts[0] - zeros, *counts[1:])


def _value(element: ElementCodec, code: int) -> str:
    return number(float(element.table()[code]))


def codes(meant: BlockTensor, read: BlockTensor | None = None, *, title: str, expert: int | None = None,
          names: tuple[str, str] = (MEANS, READS), meant_scale: ScaleCodec | None = None, read_scale: ScaleCodec | None = None) -> Codes:
    """Count codes and block scales of one tensor, or of two.

    meant, read   [..., rows, K]; `expert` takes one along the first axis, None counts all of them
    meant_scale, read_scale   the codecs that block scales are read with; None: the format's own
    Raises MxdebugError where formats or numbers of experts differ or less is read than is meant, and for an expert that there is not.
    """
    if read is not None and meant.payload.dim() == read.payload.dim() == 3:
        check_experts(meant.shape[0], read.shape[0])
    for t in (meant, read):
        if expert is not None and t is not None:
            check_expert(expert, t.shape[0] if t.payload.dim() == 3 else 0)
    tensors = [t if expert is None else t[expert] for t in (meant, read) if t is not None]
    return _codes([[t] for t in tensors], title, names, (meant_scale, read_scale))


def of_layers(meant: MoELayer, read: MoELayer, operand: str, *, title: str, expert: int | None = None) -> Codes:
    """The same for an operand of two layers: "w13" (up and gate together), "gate", "up", "down" or "w2", as in `compare.of_layers`."""
    parts = operand_parts(meant, read, operand)
    if expert is not None:
        check_expert(expert, meant.experts)
    sides = [[t if expert is None else t[expert] for t in side] for side in zip(*parts)]
    return _codes(sides, title, (MEANS, READS), (meant.scale, read.scale))


def _codes(sides: list[list[BlockTensor]], title: str, names: tuple[str, str],
           scales: tuple[ScaleCodec | None, ScaleCodec | None]) -> Codes:
    format = sides[0][0].format
    padding = sum(t.payload.numel() for t in sides[-1]) - sum(t.payload.numel() for t in sides[0])
    if any(t.format != format for side in sides for t in side) or padding < 0:
        raise MxdebugError("what the kernel reads", f"{format.name}, at least {list(sides[0][0].shape)}",
                           f"{sides[-1][0].format.name} {list(sides[-1][0].shape)}", "another tensor-parallel part, or other experts")
    counted = []
    for side, name, codec in zip(sides, names, scales):
        payload, scale_bytes = (_bytes([getattr(t, part) for t in side]) for part in ("payload", "scales"))
        counted.append(Counts(name, format.element, codec or format.scale, payload, scale_bytes))
    equal = len(sides) == 2 and all(_starts_with(getattr(b, part), getattr(a, part))
                                    for a, b in zip(*sides) for part in ("payload", "scales"))
    return Codes(title, format.block, tuple(counted), padding * (8 // format.element.bits), equal)


def _starts_with(read: Tensor, meant: Tensor) -> bool:
    """Whether the bytes are equal in the rows and columns that are meant; beyond is padding."""
    return read.dim() == meant.dim() and torch.equal(read[tuple(slice(n) for n in meant.shape)], meant)


def _bytes(tensors: list[Tensor]) -> tuple[int, ...]:
    """How often each byte occurs, a part at a time: counting makes 8 bytes of each."""
    total = torch.zeros(256, dtype=torch.int64)
    for part in (p for t in tensors for p in t.flatten().split(1 << 20)):
        total += torch.bincount(part, minlength=256)
    return tuple(total.tolist())


Bar = tuple[float, str, bool]  # place along the axis; label; whether it is special, for which hatching stands


def bars(c: Counts) -> dict[Bar, int]:
    """The bars of the elements, from the left: E2M1 by value, one for each code; 8-bit elements by the binade of their magnitude."""
    if c.element.bits == 4:
        order = [15, 14, 13, 12, 11, 10, 9, 8, 0, 1, 2, 3, 4, 5, 6, 7]
        return {(i, f"{_value(c.element, code)}<br>{code}", False): c.codes[code] for i, code in enumerate(order)}
    return by_binade(c.element.table(), c.codes)


def scale_bars(c: Counts) -> dict[Bar, int]:
    """The bars of the block scales that occur: E8M0 one for each byte, others by binade; zero, inf, NaN and negative ones are special."""
    if not c.codec.name.startswith("E8M0"):
        return by_binade(c.codec.table(), c.scales)
    out: dict[Bar, int] = {}
    for byte, n in enumerate(c.scales):
        if n:
            value = float(c.codec.table()[byte])
            special = byte in (0, 255)
            read = "0" if value == 0 else "2⁻¹²⁷" if byte == 0 else number(value)
            out[(float(byte - 127), f"0x{byte:02X}: {read}" if special else f"{figures.power(byte - 127)}<br>{byte}", special)] = n
    return out


def by_binade(table: Tensor, counts: tuple[int, ...]) -> dict[Bar, int]:
    """Counts of 256 codes by binade of their value in `table`, whatever their sign; 0, -0, inf, NaN have their own bars."""
    out: dict[Bar, int] = {}
    for value, n in zip(table.tolist(), counts):
        if n:
            place, label, special = _binade(value)
            out[(place, label, special)] = out.get((place, label, special), 0) + n
    return dict(sorted(out.items()))


def _binade(value: float) -> Bar:
    t = torch.tensor(value)
    if value != value:
        return 1002.0, "NaN", True
    if value == 0:
        return (-1001.0, "0", True) if not torch.signbit(t) else (-1002.0, "-0", True)
    if abs(value) == float("inf"):
        return 1001.0, "inf", True
    exponent = int(torch.frexp(t.double())[1]) - 1
    return float(exponent), figures.power(exponent), False


# -- drawing ----------------------------------------------------------------------------------------------------------


def draw(c: Codes) -> go.Figure:
    """Above: elements. Below: block scales. Filled bars are meant, hollow ones are read; hatched ones are special values."""
    element = c.counts[0].element
    what = "each of the 16 codes, by value" if element.bits == 4 else f"each binade of {element.name}, whatever the sign"
    scale = "each power of two" if all(n.codec.name.startswith("E8M0") for n in c.counts) else "each binade"
    sides = [[bars(n) for n in c.counts], [scale_bars(n) for n in c.counts]]
    special = any(bar[2] and n for side in sides for one in side for bar, n in one.items())
    says = f"Above: how many weights have {what}. Below: how many block scales have {scale}. {c.verdict()}".strip()
    figure = figures.figure(c.title, says, plot=360, below=44, legend=special + (len(c.counts) > 1))
    colours = (figures.MEANT, figures.READ)
    for side, axis, domain in zip(sides, ("", "2"), ((0.58, 1.0), (0.0, 0.40))):
        places = sorted({bar for one in side for bar in one})
        positions = _positions(places)
        for i, (one, counts) in enumerate(zip(side, c.counts)):
            for hatched in (False, True):
                at = [p for p in places if one.get(p) and p[2] == hatched]
                if at:
                    figure.add_bar(
                        x=[positions[p] for p in at], y=[one[p] for p in at], xaxis=f"x{axis}", yaxis=f"y{axis}", offsetgroup=str(i),
                        alignmentgroup="all", showlegend=False, marker=_marker(colours[i], i == 0, hatched),
                        text=[f"{one[p]:,}" for p in at] if hatched else None, textposition="outside", cliponaxis=False,  # they can be few
                        textfont={"size": 11, "color": figures.TEXT},
                        customdata=[p[1].replace("<br>", ", ") for p in at],
                        hovertemplate=f"{counts.name}: %{{customdata}}: %{{y}}<extra></extra>")
        every = -(-sum(not p[2] for p in places) // 18)
        ticks = [p for j, p in enumerate(places) if p[2] or j % every == 0]
        figure.update_layout({
            f"xaxis{axis}": figures.plain_axis(anchor=f"y{axis}", tickvals=[positions[p] for p in ticks], tickangle=0,
                                               ticktext=[p[1].replace(": ", "<br>") for p in ticks],
                                               range=[-0.7, max(positions.values(), default=0) + 0.7]),
            f"yaxis{axis}": figures.plain_axis(anchor=f"x{axis}", domain=domain, showgrid=True, gridcolor=figures.GRID,
                                               rangemode="tozero", nticks=4)})
    keys = [(n.name, _marker(colours[i], i == 0, False)) for i, n in enumerate(c.counts) if len(c.counts) > 1]
    for name, marker in keys + [("0, inf or NaN", _marker(figures.TEXT, False, True))] * special:
        figure.add_bar(x=[None], y=[None], name=name, legendgroup=name, marker=marker)
    figures.heading(figure, 0, f"weights: {element.name}" + (", value and code" if element.bits == 4 else ""))
    below = "block scales: " + ", ".join(dict.fromkeys(n.codec.name for n in c.counts))
    figure.add_annotation(text=below, x=0, y=0.40, xref="paper", yref="paper", xanchor="left", yanchor="bottom", yshift=4, showarrow=False,
                          font={"size": 13, "color": figures.TEXT})
    figure.update_layout(barmode="group", bargap=0.25, bargroupgap=0.1)
    return figure


def _marker(colour: str, filled: bool, hatched: bool) -> dict[str, object]:
    """Filled for what is meant, hollow for what is read, hatched for special values."""
    fill = colour if filled and not hatched else figures.BLANK
    pattern = {"pattern": {"shape": "/", "fgcolor": colour, "size": 5}} if hatched else {}
    return {"color": fill, "line": {"color": colour, "width": 1.5}, **pattern}


def _positions(places: list[Bar]) -> dict[Bar, float]:
    """Places along the axis -> positions from 0: binades keep their distances, special bars stand one step beside them."""
    usual = [p[0] for p in places if not p[2]]
    low, high = (min(usual), max(usual)) if usual else (0.0, 0.0)
    before = [p for p in places if p[2] and p[0] < low]
    after = [p for p in places if p[2] and p not in before]
    start = len(before) + 0.5 * bool(before)
    out = {p: p[0] - low + start for p in places if not p[2]}
    out |= {p: float(i) for i, p in enumerate(before)}
    return out | {p: start + high - low + 1.5 * bool(usual) + i for i, p in enumerate(after)}
