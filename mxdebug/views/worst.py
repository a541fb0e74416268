"""The k worst blocks: where to look first, as a table that stands below a map."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import MxdebugError
from ..formats import E8M0, BlockTensor, ScaleCodec

FIRST = 4  # weights of a block in the table


@dataclass(frozen=True)
class WorstBlock:
    """One block. row, block: as the kernel counts them; columns: the first and the last of its elements.

    scale_meant, scale_read       block scales as numbers; None: there is none (read: beyond the buffer's end)
    weights_meant, weights_read   the block's first values, all scales applied; empty where only scales were compared
    largest, column               the largest |difference| of two weights, and its column; None where only scales were compared
    """

    expert: int | None
    row: int
    block: int
    columns: tuple[int, int]
    scale_meant: float | None
    scale_read: float | None
    weights_meant: tuple[float, ...] = ()
    weights_read: tuple[float, ...] = ()
    largest: float | None = None
    column: int | None = None

    @property
    def factor(self) -> float | None:
        """Scale read / scale meant; inf where 0 is meant, 1 where both are 0, None where one is not there."""
        if self.scale_meant is None or self.scale_read is None:
            return None
        if self.scale_meant == 0:
            return 1.0 if self.scale_read == 0 else math.copysign(math.inf, self.scale_read)
        return self.scale_read / self.scale_meant


@dataclass(frozen=True)
class Worst:
    """Blocks, the worst one first.

    by       what they are sorted by; equal ones: by expert, row and block
    wrong    blocks that differ at all, of `total`; unit: what one is, in words
    powers   whether scales are printed as powers of two
    """

    by: str
    wrong: int
    total: int
    unit: str
    powers: bool
    blocks: tuple[WorstBlock, ...]

    def __str__(self) -> str:
        if not self.blocks:
            return f"no {self.unit} of {self.total:,} differs"
        shown = f"the {len(self.blocks)} worst" if len(self.blocks) > 1 else "the worst"
        out = [f"{shown} of {self.wrong:,} {self.unit}s that differ ({self.total:,} in all), by {self.by}"]
        experts = {b.expert for b in self.blocks} - {None}
        one = len(experts) < 2
        if experts and one:
            out[0] += f", expert {min(experts)}"
        weights = bool(self.blocks[0].weights_meant)
        lines = [["row", "block", "", "scale", "factor"], ["" if one else "expert", "columns", "", "", ""]]
        lines[0] += ["column", f"the first {len(self.blocks[0].weights_meant)} weights"] if weights else []
        lines[1] += ["|diff.|", ""] if weights else []
        for b in self.blocks:
            meant = [str(b.row), str(b.block), "meant", number(b.scale_meant, self.powers), ""]
            read = ["" if one else str(b.expert), f"{b.columns[0]}-{b.columns[1]}", "read", number(b.scale_read, self.powers),
                    number(b.factor, self.powers)]
            if weights:
                meant += [str(b.column), " ".join(f"{number(w, digits=3):>8}" for w in b.weights_meant)]
                read += [number(b.largest), " ".join(f"{number(w, digits=3):>8}" for w in b.weights_read)]
            lines += [meant, read]
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
        return "\n".join(out + ["  ".join(t.ljust(w) if i == 2 else t.rjust(w) for i, (t, w) in enumerate(zip(line, widths))).rstrip()
                                for line in lines])


def number(x: float | None, power: bool = False, digits: int = 4) -> str:
    """So many digits; with `power` a power of two but 1 is written as one; "-" for None."""
    if x is None:
        return "-"
    if math.isnan(x):
        return "NaN"
    mantissa, exponent = math.frexp(abs(x))
    if power and mantissa == 0.5 and x != 1:
        return f"{'-' * (x < 0)}2^{exponent - 1}"
    return f"{x:.{digits}g}"


def largest(badness: Tensor, k: int) -> list[tuple[int, ...]]:
    """Positions of the k largest numbers above 0, NaN before inf before all others, equal ones in the order in which they lie.

    Raises MxdebugError for k below 1.
    """
    if isinstance(k, bool) or not isinstance(k, int) or k < 1:
        raise MxdebugError("k, how many of the worst", "a number from 1 on", repr(k))
    flat = badness.flatten()
    nan = flat.isnan().nonzero().flatten()[:k]
    rest = torch.where(flat.isnan(), 0, flat)
    found = min(k - nan.numel(), int((rest > 0).sum()))
    if found:
        candidates = (rest >= rest.topk(found).values[-1]).nonzero().flatten()  # more than `found` of them where some are equal
        order = rest[candidates].sort(descending=True, stable=True).indices[:found]
        nan = torch.cat([nan, candidates[order]])
    return [_place(n, badness.shape) for n in nan.tolist()]


def _place(flat: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    out: list[int] = []
    for size in reversed(shape):
        flat, at = divmod(flat, size)
        out.append(at)
    return tuple(reversed(out))


def block_differences(meant: Tensor, read: Tensor, block: int) -> Tensor:
    """Values [..., K] twice -> float32 [..., K / block]: the largest |read - meant| of a block.

    NaN where a NaN stands against something else, inf where an inf does; equal values, NaN and NaN too, are no difference.
    """
    return value_differences(meant, read).unflatten(-1, (-1, block)).amax(-1)


def value_differences(meant: Tensor, read: Tensor) -> Tensor:
    """|read - meant| of float32 values, as `block_differences` says; a difference of finite values stays finite."""
    out = (read - meant).abs_()
    if bool(torch.isfinite(out.amax())):
        return out
    out = torch.where(meant.isfinite() & read.isfinite(), out.clamp(max=torch.finfo(out.dtype).max), out)
    return torch.where((meant == read) | (meant.isnan() & read.isnan()), 0, out)


def worst(meant: BlockTensor, read: BlockTensor, k: int = 5, *, expert: int | None = None, meant_scale: ScaleCodec | None = None,
          read_scale: ScaleCodec | None = None) -> Worst:
    """The k blocks with the largest |difference| of a weight.

    meant, read   [E, rows, K] (all experts one after the other: some tenths of a second each for a large layer), or [rows, K]
                  of one expert, whose number is `expert`
    meant_scale, read_scale   the codecs that block scales are read with; None: the format's own
    Raises MxdebugError where the two have other shapes or formats.
    """
    check_alike(meant, read)
    experts = [expert] if meant.payload.dim() == 2 else list(range(meant.shape[0]))
    found: list[tuple[float, WorstBlock]] = []
    wrong = total = 0
    for e in experts:
        a, b = (meant, read) if meant.payload.dim() == 2 else (meant[e], read[e])
        bad = block_differences(a.dequantise(scale=meant_scale), b.dequantise(scale=read_scale), a.format.block)
        wrong, total = wrong + int((bad != 0).sum()), total + bad.numel()
        found += [(float(bad[at]), describe(a, b, *at, e, meant_scale, read_scale)) for at in largest(bad, k)]
    order = largest(torch.tensor([bad for bad, _ in found], dtype=torch.float64), k)
    return of_blocks([found[i][1] for i, in order], wrong, total, meant, meant_scale)


def of_blocks(blocks: list[WorstBlock], wrong: int, total: int, meant: BlockTensor, meant_scale: ScaleCodec | None) -> Worst:
    """Put described blocks of weights together."""
    return Worst("largest |difference|", wrong, total, "block",
                 _powers(meant_scale or meant.format.scale), tuple(blocks))


def check_alike(meant: BlockTensor, read: BlockTensor) -> None:
    """Raise MxdebugError unless both are matrices, or stacks of them, of one shape and format."""
    if meant.shape != read.shape or meant.format != read.format or meant.payload.dim() not in (2, 3):
        raise MxdebugError("weights to compare", f"{meant.format.name} {list(meant.shape)} twice", f"{read.format.name} {list(read.shape)}",
                           "a padded weight next to an unpadded one")


def describe(meant: BlockTensor, read: BlockTensor, row: int, block: int, expert: int | None = None, meant_scale: ScaleCodec | None = None,
             read_scale: ScaleCodec | None = None) -> WorstBlock:
    """One block of two [rows, K] tensors, with its first weights."""
    n = meant.format.block
    at = slice(block * n, (block + 1) * n)
    a, b = meant[row].dequantise(scale=meant_scale)[at], read[row].dequantise(scale=read_scale)[at]
    d = value_differences(a, b)
    where, = largest(d, 1) or [(0,)]
    scales = [float((codec or t.format.scale).decode(t.scales[row, block])) for t, codec in ((meant, meant_scale), (read, read_scale))]
    return WorstBlock(expert, row, block, (at.start, at.stop - 1), *scales, tuple(a[:FIRST].tolist()), tuple(b[:FIRST].tolist()),
                      float(d[where]), at.start + where[0])


def _powers(codec: ScaleCodec) -> bool:
    return codec.name.startswith(E8M0.name)


def worst_scales(meant: Tensor, read: Tensor, k: int = 5, *, block: int, meant_scale: ScaleCodec | None = None,
                 read_scale: ScaleCodec | None = None, outside: Tensor | None = None, first_row: int = 0) -> Worst:
    """The k block scales that are furthest off, by the factor between them, whichever is larger; where only scales are at hand.

    meant, read   [E, rows, columns] or [rows, columns]: uint8 bytes, then `meant_scale` says how they are read and `read_scale` how
                  the kernel does (None: the same), or numbers in float32
    block         elements that share a scale; outside: bool of the same shape, where the kernel looks beyond the buffer's end
    first_row     the number of the first row
    NaN, 0 and inf against anything else come first. Raises MxdebugError where shapes differ, or bytes come without a codec.
    """
    if meant.shape != read.shape or meant.dim() not in (2, 3):
        raise MxdebugError("block scales", f"shape {list(meant.shape)} twice, with two or three dimensions", f"shape {list(read.shape)}",
                           "padding was not cut off")
    powers = meant_scale is not None and _powers(meant_scale)
    values = []
    for t, codec in ((meant, meant_scale), (read, read_scale or meant_scale)):
        if (t.dtype == torch.uint8) != (codec is not None):
            raise MxdebugError("block scales", "uint8 with a codec, or numbers without",
                               f"{t.dtype}, codec {codec.name if codec else 'none'}")
        values.append(codec.table() if codec else t.float())
    if meant.dtype == torch.uint8:
        bad = scale_badness(values[0][:, None], values[1][None, :])[meant.long(), read.long()]  # 65,536 pairs instead of every scale
        at_meant, at_read = (lambda at: float(values[0][int(meant[at])])), (lambda at: float(values[1][int(read[at])]))
    else:
        bad = scale_badness(values[0], values[1])
        at_meant, at_read = (lambda at: float(values[0][at])), (lambda at: float(values[1][at]))
    if outside is not None:
        bad = torch.where(outside, torch.nan, bad)
    blocks = []
    for at in largest(bad, k):
        row, column = at[-2:]
        beyond = outside is not None and bool(outside[at])
        blocks.append(WorstBlock(at[0] if len(at) == 3 else None, first_row + row, column, (column * block, (column + 1) * block - 1),
                                 at_meant(at), None if beyond else at_read(at)))
    return Worst("the factor between them", int((bad != 0).sum()), bad.numel(), "block scale", powers, tuple(blocks))


def scale_badness(meant: Tensor, read: Tensor) -> Tensor:
    """float64: the larger of two scales by the smaller, 0 where they are equal; NaN where one is, inf where one is 0 or inf.

    A quotient and no logarithm: it is the same on every machine, so equal ones are equal. Signs count: -1 for 1 is no equal scale.
    """
    a, b = torch.broadcast_tensors(meant.double(), read.double())
    out = torch.maximum(a.abs(), b.abs()) / torch.minimum(a.abs(), b.abs())
    return torch.where((a == b) | (a.isnan() & b.isnan()), 0, out)
