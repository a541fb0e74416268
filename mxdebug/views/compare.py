"""The kernel's-eye view of a weight against the checkpoint: where do the values differ, and which block scales are off by how much?"""

from __future__ import annotations

from dataclasses import dataclass, replace

import plotly.graph_objects as go
import torch
from torch import Tensor

from ..errors import MxdebugError
from ..formats import BlockTensor, ScaleCodec
from ..reference import MoELayer
from . import figures, maps
from .figures import INF, NAN, PADDED, SYMBOLS
from .maps import Map
from .worst import Worst, WorstBlock, check_alike, describe, largest, number, of_blocks, value_differences

SCALES = 256  # columns of the right map at most; the left one has what remains of 512, so that both together keep the limit of one
BINADES = 10  # colours of the left map: smaller differences have a glyph
BEYOND = 6    # binades that the right map's colours reach on either side
LEAST = -124  # no lower binade has a colour: its code must leave room for 0 and for that of equal
MIDDLE = 127  # code of an equal block scale: a step of n binades is MIDDLE + n
CHUNK = 96    # rows that are dequantised at a time: they stay in the processor's cache
W13, PARTS = "w13", {"gate": "gate", "up": "up", "down": "down", "w2": "down"}


@dataclass(frozen=True, eq=False)
class Compared:
    """One weight of one expert, as the kernel has it in rows and columns, with what is counted over all of it.

    operand, expert     which (expert None: a linear layer has none); shape: rows, K; block: elements that share a scale
    differences         map of the largest |kernel - checkpoint| in each cell, by binade: code 127 + n for 2^n <= it < 2^(n+1)
    lowest, highest     the binades n that have a colour
    ratios              map of how many binades |block scale read| is off |meant|, the furthest one in each cell (above before
                        below): code 127 + n for up to 2^n, rounded away from 0; exact where scales are powers of two
    weights, blocks     how many differ; nan, inf: how many weights are NaN or inf, on either side; padding: weights beyond the
                        checkpoint's shape, all counted as 0 that is meant
    largest, at         the largest |difference|, and its (row, column): the first one in the order of rows; None where nothing differs
    global_scales       (meant, read), where they differ
    worst               the worst blocks
    """

    title: str
    operand: str
    expert: int | None
    shape: tuple[int, int]
    block: int
    differences: Map
    lowest: int
    highest: int
    ratios: Map
    weights: int
    blocks: int
    nan: int
    inf: int
    padding: int
    largest: float | None
    at: tuple[int, int] | None
    global_scales: tuple[tuple[float, float], ...]
    worst: Worst

    def __str__(self) -> str:
        rows, columns = self.shape
        n, blocks = rows * columns, rows * columns // self.block
        of = "" if self.expert is None else f", expert {self.expert}"
        out = [f"{self.operand}{of}: {rows} x {columns}" + (f", {self.padding:,} of it padding" if self.padding else ""),
               f"  {self.weights:,} of {n:,} weights differ ({self.weights / n:.1%})",
               f"  in {self.blocks:,} of {blocks:,} blocks ({self.blocks / blocks:.1%})"]
        if self.largest is not None:
            out.append(f"  largest |difference| {number(self.largest)}, at row {self.at[0]}, column {self.at[1]}")
        if self.nan or self.inf:
            out.append(f"  NaN: {self.nan:,} weights, inf: {self.inf:,} weights")
        for a, b in self.global_scales:
            out.append(f"  global scale: {a:.6g} is meant, {b:.6g} is read" + (f" (factor {b / a:.4g})" if a else ""))
        (h, w), (sh, sw) = self.differences.pooled, self.ratios.pooled
        out.append(f"  pooled by maximum: {h} x {w} weights, {sh} x {sw} block scales in a cell")
        return "\n".join(out)


def compare(meant: BlockTensor, read: BlockTensor, *, title: str, operand: str = "weight", expert: int | None = None,
            meant_scale: ScaleCodec | None = None, read_scale: ScaleCodec | None = None, k: int = 5) -> Compared:
    """Compare what the checkpoint means with what the kernel reads.

    meant, read   [E, rows, K], of which `expert` is taken (None: the first), or [rows, K], which are that expert (None: those of a linear
                  layer); where the kernel has more rows or columns, they are padding
    meant_scale, read_scale   the codecs that block scales are read with; None: the format's own; k: how many of the worst blocks
    Raises MxdebugError where formats or numbers of experts differ, or the kernel has fewer rows or columns, and for an expert that there
    is not.
    """
    for t in (meant, read):
        if not isinstance(t, BlockTensor):
            raise MxdebugError("weights to compare", "BlockTensors", type(t).__name__, "values, where codes and block scales are compared")
    many = [t.shape[0] for t in (meant, read) if t.payload.dim() == 3]
    if many:
        check_experts(many[0], many[-1])
        expert = check_expert(0 if expert is None else expert, many[0])
    a, b = (t if t.payload.dim() == 2 else t[expert] for t in (meant, read))
    return _compare([(a, b)], title, operand, expert, meant_scale, read_scale, k)


def of_layers(meant: MoELayer, read: MoELayer, operand: str, *, title: str, expert: int = 0, k: int = 5) -> Compared:
    """The same for an operand of two layers: the checkpoint's, and a call's decoded one (`contract.decode(call.arguments)`).

    operand   "w13" (the rows of up, then those of gate, each half padded on its own), "gate", "up", "down" or "w2"
    Of a call of one rank, `meant` is what that rank holds: `layer.part(contract.parallel(call.arguments))`. Raises MxdebugError as
    `compare` does.
    """
    parts = operand_parts(meant, read, operand)
    check_expert(expert, meant.experts)
    parts = [(a[expert], b[expert]) for a, b in parts]
    return _compare(parts, title, operand, expert, meant.scale, read.scale, k)


def check_experts(meant: int, read: int) -> None:
    """Raise MxdebugError unless both have as many experts."""
    if meant != read:
        raise MxdebugError("experts", f"as many in both, {read} as the kernel reads", f"{meant} are meant",
                           "an expert-parallel rank against the whole layer: compare with layer.part(contract.parallel(call.arguments))")


def check_expert(expert: int, experts: int) -> int:
    """The expert; MxdebugError where there is none of that number."""
    if isinstance(expert, bool) or not isinstance(expert, int) or not 0 <= expert < experts:
        raise MxdebugError("expert", f"a number, 0 <= expert < {experts}", repr(expert))
    return expert


def operand_parts(meant: MoELayer, read: MoELayer, operand: str) -> list[tuple[BlockTensor, BlockTensor]]:
    """Pairs of weights [E, rows, K] that an operand consists of, in the kernel's order; MxdebugError where one is not there.

    So it is where the layers have different numbers of experts.
    """
    check_experts(meant.experts, read.experts)
    if operand not in (W13, *PARTS):
        raise MxdebugError("operand", f"one of {', '.join((W13, *PARTS))}", repr(operand))
    names = [PARTS[operand]] if operand in PARTS else ["up"] if meant.gate is None and read.gate is None else ["up", "gate"]
    parts = [(getattr(meant, name), getattr(read, name)) for name in names]
    if any(t is None for pair in parts for t in pair):
        raise MxdebugError(operand, "its gate in both layers", "in one or none", "a layer without gate")
    return parts


def _compare(parts: list[tuple[BlockTensor, BlockTensor]], title: str, operand: str, expert: int | None, meant_scale: ScaleCodec | None,
             read_scale: ScaleCodec | None, k: int) -> Compared:
    if not all(t.payload.numel() for pair in parts for t in pair):
        raise MxdebugError(operand, "at least one row and one block", f"shape {list(parts[0][0].shape)}")
    a, b, inside, columns = _stacked(parts)
    shape, fmt = (b.shape[0], b.shape[1]), b.format
    scale_cells = (figures.LARGEST, SCALES)
    wide = -(-b.scales.shape[1] // figures.pooling((1, b.scales.shape[1]), scale_cells)[1])
    pooled = figures.pooling(shape, (figures.LARGEST, figures.LARGEST - wide))
    cells, blocks, weights, nan, inf = _differences(a, b, inside, columns, pooled, meant_scale, read_scale)
    differences, lowest, highest = _difference_map(cells, pooled)
    bad = largest(blocks, k)
    described = [describe(a, b, *at, expert, meant_scale, read_scale) for at in bad]
    scales = [(codec or fmt.scale).decode(t.scales) for t, codec in ((a, meant_scale), (b, read_scale))]
    ratios = _ratio_map(*scales, inside, columns // fmt.block, scale_cells)
    first: WorstBlock | None = described[0] if described else None
    wrong = int((blocks != 0).sum())
    return Compared(title, operand, expert, shape, fmt.block, differences, lowest, highest, ratios, weights, wrong, nan, inf,
                    shape[0] * shape[1] - int(inside.sum()) * columns, first and first.largest, first and (first.row, first.column),
                    _global_scales(parts), of_blocks(described, wrong, blocks.numel(), a, meant_scale))


def _global_scales(parts: list[tuple[BlockTensor, BlockTensor]]) -> tuple[tuple[float, float], ...]:
    """(meant, read) where they differ, each pair once."""
    pairs = [(float(x), float(y)) for a, b in parts if a.global_scale is not None
             for x, y in zip(a.global_scale.flatten(), b.global_scale.flatten())]
    return tuple(dict.fromkeys(p for p in pairs if p[0] != p[1]))


def _stacked(parts: list[tuple[BlockTensor, BlockTensor]]) -> tuple[BlockTensor, BlockTensor, Tensor, int]:
    """Pairs of [rows, K] -> both one below the other in the kernel's shape, 0 where it has more; bool [rows]: the checkpoint's; its K."""
    meant, read, inside = [], [], []
    for a, b in parts:
        rows, columns = b.shape[0] - a.shape[0], b.columns - a.columns
        if a.format != b.format or rows < 0 or columns < 0:
            raise MxdebugError("what the kernel reads", f"{a.format.name}, at least {list(a.shape)}", f"{b.format.name} {list(b.shape)}",
                               "another tensor-parallel part, or gate and up joined on one side only")
        inside.append(torch.arange(b.shape[0]) < a.shape[0])
        if rows or columns:
            payload, scales = (torch.nn.functional.pad(t, (0, wide.shape[1] - t.shape[1], 0, rows))
                               for t, wide in ((a.payload, b.payload), (a.scales, b.scales)))
            a = replace(a, payload=payload, scales=scales)
        meant.append(a)
        read.append(b)
    return _joined(meant), _joined(read), torch.cat(inside), parts[0][0].columns


def _joined(tensors: list[BlockTensor]) -> BlockTensor:
    if len(tensors) == 1:
        return tensors[0]
    scale = None if tensors[0].global_scale is None else torch.cat([t.global_scale.float().expand(t.shape[0]) for t in tensors])
    return BlockTensor(torch.cat([t.payload for t in tensors]), torch.cat([t.scales for t in tensors]), tensors[0].format, scale)


# -- values -----------------------------------------------------------------------------------------------------------

PAD = -1.0  # a cell that is padding and nothing else; a difference is never below 0


def _differences(a: BlockTensor, b: BlockTensor, inside: Tensor, columns: int, pooled: tuple[int, int], meant_scale: ScaleCodec | None,
                 read_scale: ScaleCodec | None) -> tuple[Tensor, Tensor, int, int, int]:
    """The largest |difference| of each cell and of each block; how many weights differ, are NaN, are inf.

    A cell is NaN or inf where some weight of it is, on either side, and PAD where all of it is padding that is read as 0.
    """
    check_alike(a, b)
    rows, block = a.shape[0], a.format.block
    height = pooled[0] * max(1, CHUNK // pooled[0])
    cells, blocks = [], []
    differ = nans = infs = 0
    padded = not bool(inside.all()) or columns < a.columns
    finite = _surely_finite(a, meant_scale) and _surely_finite(b, read_scale)
    for start in range(0, rows, height):
        at = slice(start, min(start + height, rows))
        if finite and _same(a[at], b[at], meant_scale, read_scale):
            d = torch.zeros(at.stop - at.start, a.columns)
        else:
            x, y = a[at].dequantise(scale=meant_scale), b[at].dequantise(scale=read_scale)
            d = (y - x).abs_() if finite else value_differences(x, y)
            differ += int(torch.count_nonzero(d))
        blocks.append(d.unflatten(-1, (-1, block)).amax(-1))
        if not finite:
            nan, inf = x.isnan() | y.isnan(), x.isinf() | y.isinf()
            nans, infs = nans + int(nan.sum()), infs + int(inf.sum())
            d = torch.where(nan, torch.nan, torch.where(inf, torch.inf, d))
        if padded:
            beyond = ~inside[at][:, None] | (torch.arange(a.columns) >= columns)
            d = torch.where(beyond & (d == 0), PAD, d)
        cells.append(torch.stack([part.amax(0) for part in d.split(pooled[0])]))
    return torch.stack([part.amax(1) for part in torch.cat(cells).split(pooled[1], dim=1)], dim=1), torch.cat(blocks), differ, nans, infs


def _surely_finite(t: BlockTensor, scale: ScaleCodec | None) -> bool:
    """Whether no value and no difference of two can be NaN or inf, by the largest scale alone: many times faster than to look."""
    most = (scale or t.format.scale).decode(t.scales).double().abs().amax() * t.format.element.max
    most = most if t.global_scale is None else most * t.global_scale.double().abs().amax()
    return t.format.packed and bool(most < 1e38)


def _same(a: BlockTensor, b: BlockTensor, meant_scale: ScaleCodec | None, read_scale: ScaleCodec | None) -> bool:
    """Whether two tensors hold the same codes and scales; if so their values are equal."""
    scales = [(codec or t.format.scale).decode(t.scales) for t, codec in ((a, meant_scale), (b, read_scale))]
    same_global = a.global_scale is None or torch.equal(a.global_scale, b.global_scale)
    return same_global and torch.equal(a.payload, b.payload) and torch.equal(*scales)


def _difference_map(cells: Tensor, pooled: tuple[int, int]) -> tuple[Map, int, int]:
    """Cells of `_differences` -> codes and glyphs; the lowest and the highest binade that have a colour."""
    finite = cells.isfinite() & (cells > 0)
    binade = torch.frexp(torch.where(finite, cells, 1))[1] - 1
    used = binade[finite]
    lowest, highest = 1, 0  # none
    if used.numel():
        highest = max(int(used.max()), LEAST)
        lowest = max(highest - BINADES + 1, min(int(used.min()), highest), LEAST)
    small = finite & (binade < lowest)
    glyphs = {NAN: (SYMBOLS[NAN], cells.isnan()), INF: (SYMBOLS[INF], cells.isinf()), PADDED: (SYMBOLS[PADDED], cells == PAD),
              f"|difference| below {figures.power(lowest)}": (figures.SMALL, small)}
    codes = torch.where(finite & ~small, binade + MIDDLE, torch.where(cells == 0, lowest + MIDDLE - 1, 0)).to(torch.uint8)
    return Map(codes, {name: (s, w) for name, (s, w) in glyphs.items() if bool(w.any())}, pooled), lowest, highest


# -- block scales -----------------------------------------------------------------------------------------------------

_PAD, _ZERO, _FROM_ZERO, _INF, _NAN = -1, 600, 601, 602, 603  # above and below all steps, so that the largest key of a cell wins


def _ratio_map(meant: Tensor, read: Tensor, inside: Tensor, columns: int, most: tuple[int, int]) -> Map:
    """Block scales as numbers [rows, columns] -> steps of binades."""
    a, b = meant.double().abs(), read.double().abs()
    keys = 2 * steps(a, b).abs() + (b > a)  # the further off the larger; above before below
    for key, where in ((_ZERO, (b == 0) & (a > 0)), (_FROM_ZERO, (a == 0) & (b > 0)), (_INF, a.isinf() | b.isinf()),
                       (_NAN, a.isnan() | b.isnan()), (_PAD, ~inside[:, None] | (torch.arange(a.shape[1]) >= columns))):
        keys = torch.where(where, key, keys)
    keys, pooled = figures.pool(keys, most)
    step = torch.where(keys % 2 == 1, keys // 2, -(keys // 2))
    usual = (keys >= 0) & (keys < _ZERO)
    glyphs = {NAN: (SYMBOLS[NAN], keys == _NAN), INF: (SYMBOLS[INF], keys == _INF), figures.ZERO: (SYMBOLS[figures.ZERO], keys == _ZERO),
              figures.FROM_ZERO: (SYMBOLS[figures.FROM_ZERO], keys == _FROM_ZERO), PADDED: (SYMBOLS[PADDED], keys == _PAD),
              f"factor above {figures.power(BEYOND)}": (figures.ABOVE, usual & (step > BEYOND)),
              f"factor below {figures.power(-BEYOND)}": (figures.BELOW, usual & (step < -BEYOND))}
    codes = torch.where(usual & (step.abs() <= BEYOND), step + MIDDLE, 0).to(torch.uint8)
    return Map(codes, {name: (s, w) for name, (s, w) in glyphs.items() if bool(w.any())}, pooled)


def steps(meant: Tensor, read: Tensor) -> Tensor:
    """float64 >= 0 twice -> int32: log2(read / meant), rounded away from 0; 0 where they are equal, or where it is no number.

    From the exponents, not from a logarithm, so that a factor of exactly 2^n is n on every machine.
    """
    ratio = read / meant
    known = (ratio > 0) & ratio.isfinite()
    mantissa, exponent = torch.frexp(torch.where(known, ratio, 1))
    floor = exponent - 1
    return torch.where(known, torch.where(ratio > 1, floor + (mantissa != 0.5), floor), 0).int()


# -- drawing ----------------------------------------------------------------------------------------------------------


def says(c: Compared) -> str:
    """What the figure shows, in words, with the pooling factors."""
    (h, w), (sh, sw) = c.differences.pooled, c.ratios.pooled
    one = "one cell is one weight" if h * w == 1 else f"one cell is the largest |difference| of {h} x {w} weights (rows x columns)"
    left = "where the kernel reads other weights" if c.weights or c.nan or c.inf else "the kernel reads every weight as it is meant"
    scale = "one cell is one scale" if sh * sw == 1 else f"one cell is the furthest off of {sh} x {sw}"
    equal = not set(c.ratios.glyphs) - {PADDED} and not bool(((c.ratios.codes != MIDDLE) & (c.ratios.codes != 0)).any())
    right = "every block scale is read as it is meant" if equal else "by which factor block scales are off"
    thinned = " A glyph can stand for several cells around it." if c.differences.thinned or c.ratios.thinned else ""
    return f"Left: {left}; {one}. Right: {right}; {scale}. Grey: equal.{thinned}"


def draw(c: Compared) -> go.Figure:
    """Both maps side by side, rows at one height; `c.worst` is the table to show below."""
    names = dict.fromkeys((*c.differences.glyphs, *c.ratios.glyphs))
    lines = -(-sum(len(name) + 7 for name in names) // figures.WIDTH)
    plot = max(120, figures.cell_height(c.differences.codes.shape[0]))
    figure = figures.figure(c.title, says(c), plot=plot, below=figures.BELOW_CELLS, legend=lines)
    left, right = (0.0, 0.48), (0.54, 1.0)
    low, high = c.lowest + MIDDLE, c.highest + MIDDLE
    colours = {low - 1: figures.EQUAL, **dict(zip(range(low, high + 1), figures.binade_colours(high - low + 1)))}
    every = -(-len(colours) // 5)  # few labels, the lowest as far from "0" as from each other: a window can be narrow
    ticks = {low - 1: "0", **{n: figures.power(n - MIDDLE) for n in colours if (high - n) % every == 0 and n >= low - 1 + every}}
    maps.add_map(figure, c.differences, colours, ticks, "|difference|, from this power of two on", "x", "y", left)
    colours = dict(zip(range(MIDDLE - BEYOND, MIDDLE + BEYOND + 1), figures.diverging_colours(BEYOND)))
    ticks = {n: "1" if n == MIDDLE else figures.power(n - MIDDLE) for n in colours if (n - MIDDLE) % 3 == 0}
    maps.add_map(figure, c.ratios, colours, ticks, "kernel's block scale / checkpoint's", "x2", "y2", right, ("row", "block"))
    figure.update_layout(maps.map_axes(c.differences, left, "", "row", "column"))
    figure.update_layout(maps.map_axes(c.ratios, right, "2", "", "block"), yaxis2_showticklabels=False)
    figures.heading(figure, left[0], "weights")
    figures.heading(figure, right[0], "block scales")
    return figure
