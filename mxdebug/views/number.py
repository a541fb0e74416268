"""A number to its nearest codes: the code below and above, which is taken and why; and what an outlier in its block costs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import MxdebugError
from ..formats import E4M3, BlockFormat, BlockTensor, ElementCodec, quantise

SPREAD = 0.01   # standard deviation of the small numbers beside the outlier
LARGEST = 10.0  # of the whole tensor: NVFP4's global scale follows from it


@dataclass(frozen=True)
class Code:
    """One code: its bits (sign, exponent, mantissa), the number that it stands for, and that times block scale and global scale."""

    code: int
    bits: str
    element: float
    value: float

    def __str__(self) -> str:
        return f"code {self.code:#04x} ({self.bits}) = {self.element:g}, read as {self.value:g}"


@dataclass(frozen=True, eq=False)
class Block:
    """Numbers that share one block scale, quantised.

    values        float32 [n]: what is meant; codes: uint8 [n]; read: float32 [n], code * block scale (* global scale)
    scale_byte    as stored; scale: its value; global_scale: 1 where the format has none
    scale_why     how the scale follows from the block's largest magnitude
    """

    format: BlockFormat
    values: Tensor
    codes: Tensor
    read: Tensor
    scale_byte: int
    scale: float
    global_scale: float
    scale_why: str

    @property
    def step(self) -> float:
        """What a code's number is multiplied by."""
        return self.scale * self.global_scale

    def code(self, code: int) -> Code:
        """What a code of the format's elements means in this block."""
        element = self.format.element.table()[code]
        value = element * torch.tensor(self.scale) * torch.tensor(self.global_scale)  # float32, in `dequantise`'s order
        return Code(code, _bits(code, self.format.element), float(element), float(value))

    def __str__(self) -> str:
        largest = float(self.values.abs().max())
        return (f"{self.format.name}: {len(self.values)} numbers share one block scale; the largest is {largest:g}\n"
                f"scale    {self.scale_why}")


@dataclass(frozen=True)
class Number:
    """One number of a block, and the codes that it lies between.

    value     what is meant, a float32; scaled: value / (block scale * global scale), the float32 that is rounded
    below, above   the codes next to it, below <= scaled <= above; both are `chosen` where a code stands for exactly this number;
              None: there is none on that side, or the number is NaN
    chosen    the code that is stored; why: the rule that chose it
    """

    value: float
    scaled: float
    step: float
    below: Code | None
    above: Code | None
    chosen: Code
    why: str

    @property
    def error(self) -> float:
        """What is read, less what is meant."""
        return 0.0 if self.chosen.value == self.value else self.chosen.value - self.value

    @property
    def middle(self) -> float:
        """Halfway between the codes below and above, in units of the scale; NaN where there are not two."""
        pair = self.below is not None and self.above is not None and self.below != self.above
        return (self.below.element + self.above.element) / 2 if pair else math.nan

    def __str__(self) -> str:
        share = f", {abs(self.error / self.value):.1%} of the number" if self.value and math.isfinite(self.error / self.value) else ""
        return "\n".join([
            f"number   {self.value:g} / {self.step:g} = {self.scaled:g}",
            f"below    {self.below or 'no code'}",
            f"above    {self.above or 'no code'}",
            f"chosen   {self.chosen.code:#04x}: {self.why}",
            f"error    {self.error:g}{share}"])


@dataclass(frozen=True)
class Loss:
    """What becomes of the small numbers of a block: how many `of` them are read as 0; relative L2 of the errors, NaN if all are lost."""

    zeros: int
    of: int
    relative_l2: float

    def __str__(self) -> str:
        if math.isnan(self.relative_l2):
            return f"{self.of} of {self.of} become NaN"
        return f"{self.zeros} of {self.of} become 0, relative L2 {self.relative_l2:.3f}"


@dataclass(frozen=True, eq=False)
class Outlier:
    """A block with one outlier, and one number of it looked at.

    at, outlier   the places of the number and of the outlier
    loss, without what becomes of the others: as it is, and with 0 in place of the outlier
    """

    block: Block
    number: Number
    at: int
    outlier: int
    loss: Loss
    without: Loss

    def __str__(self) -> str:
        meant, read = (float(t[self.outlier]) for t in (self.block.values, self.block.read))
        return "\n".join([str(self.block), str(self.number),
                          f"others   {self.loss}", f"         without the outlier: {self.without}",
                          f"outlier  {meant:g} is read as {read:g}"])


# -- making it --------------------------------------------------------------------------------------------------------


def block(values: Tensor, fmt: BlockFormat, *, rule: str | None = None, global_scale: float | None = None) -> Block:
    """Quantise one block, float32 [fmt.block], as `formats.quantise` does. rule: of MX formats; global_scale: of NVFP4, must be given.

    Raises MxdebugError for another number of values, a rule that does not fit, and NaN or inf in NVFP4.
    """
    if tuple(values.shape) != (fmt.block,) or values.dtype != torch.float32:
        raise MxdebugError("values", f"float32 [{fmt.block}], one block of {fmt.name}", f"{values.dtype} {list(values.shape)}")
    if fmt.outer and global_scale is None:
        raise MxdebugError("global scale", "the tensor's", "none", "one block does not show it")
    outer = torch.tensor(global_scale, dtype=torch.float32) if fmt.outer else None
    q: BlockTensor = quantise(values, fmt, rule=rule, global_scale=outer)
    byte = int(q.scales)
    scale = float(fmt.scale.table()[byte])
    why = _nvfp4_scale(values, byte, scale, float(outer)) if fmt.outer else _shared_scale(values, fmt.element, rule or "", byte, scale)
    return Block(fmt, values, q.codes(), q.dequantise(), byte, scale, 1.0 if outer is None else float(outer), why)


def number(b: Block, at: int) -> Number:
    """The number at that place of a block. Codes are compared by magnitude: their order is that of their numbers, and the sign is kept."""
    value, step, chosen = float(b.values[at]), b.step, b.code(int(b.codes[at]))
    if math.isnan(value) or math.isnan(step):
        return Number(value, math.nan, step, None, None, chosen, "the block holds a NaN, so its scale is NaN, and all of it reads as NaN")
    scaled = float(torch.tensor(value / step, dtype=torch.float32)) if step else 0.0  # what `quantise` rounds
    size = abs(scaled)
    element = b.format.element
    ladder = [v for v in element.table()[: 1 << (element.bits - 1)].tolist() if v <= element.max]  # the codes from 0 up; not inf, not NaN
    low = max(code for code, v in enumerate(ladder) if v <= size)
    high = low if ladder[low] == size else low + 1
    sign = 0 if math.copysign(1.0, scaled) > 0 else 1 << (element.bits - 1)
    inner, outer = b.code(low | sign), b.code(high | sign) if high < len(ladder) else None
    below, above = (outer, inner) if sign else (inner, outer)
    return Number(value, scaled, step, below, above, chosen, _why(b, value, size, ladder, low, high))


def with_outlier(fmt: BlockFormat, value: float, outlier: float, *, rule: str | None = None, spread: float = SPREAD,
                 largest: float = LARGEST) -> Outlier:
    """A block of `value` (the first), one outlier, and beside them numbers as normally distributed weights have them.

    spread    their standard deviation; they are quantiles of the normal distribution, so the same each time
    largest   of the whole tensor, which gives NVFP4 its global scale, largest / (448 * 6)
    Raises MxdebugError where a number is no float32, and as `block`.
    """
    numbers = torch.tensor([value, outlier, spread, largest], dtype=torch.float64)
    if bool((numbers.float().isinf() & numbers.isfinite()).any()):
        raise MxdebugError("number", "in the range of float32", str(numbers.tolist()))
    n, at, place = fmt.block, 0, fmt.block * 5 // 8
    others = n - 2
    quantiles = torch.special.ndtri((torch.arange(others, dtype=torch.float64) + 0.5) / others)
    order = torch.arange(others) * 11 % others  # so that they look like weights; 11 has no factor in common with 30 or 14
    small = ((quantiles * 1e4).round() / 1e4)[order] * spread  # four decimals: the same on every machine
    values = torch.cat([numbers[:1], small[: place - 1], numbers[1:2], small[place - 1:]]).float()
    global_scale = largest / (E4M3.max * fmt.element.max) if fmt.outer else None
    whole = block(values, fmt, rule=rule, global_scale=global_scale)
    calm = values.clone()
    calm[place] = 0
    without = block(calm, fmt, rule=rule, global_scale=global_scale)
    rest = torch.tensor([i for i in range(n) if i not in (at, place)])
    return Outlier(whole, number(whole, at), at, place, _loss(whole, rest), _loss(without, rest))


def _loss(b: Block, places: Tensor) -> Loss:
    meant, read = b.values[places].double(), b.read[places].double()
    return Loss(int(((read == 0) & (meant != 0)).sum()), int((meant != 0).sum()), float((read - meant).norm() / meant.norm()))


# -- why --------------------------------------------------------------------------------------------------------------


def _why(b: Block, value: float, size: float, ladder: list[float], low: int, high: int) -> str:
    largest = ladder[-1]
    if b.step == 0:
        return "the block scale is 0, so all of the block reads as 0"
    if math.isinf(size) and math.isinf(value):
        return f"inf saturates: the largest is {largest:g}, and that times this block scale is beyond float32"
    if value == 0:
        return "0 has a code of its own, for either sign"
    if high == low:
        return "exact: a code stands for this number"
    if high == len(ladder):
        return f"saturated: there is no number beyond {largest:g}"
    middle = (ladder[low] + ladder[high]) / 2
    if size == middle:
        return f"{size:g} is halfway: ties go to the even code, whose last bit is 0"
    if low == 0 and size < middle:
        return f"less than half of {ladder[1]:g}, the smallest code: becomes 0"
    nearer = low if size < middle else high
    return f"nearest: {size:g} is {'below' if nearer == low else 'above'} {middle:g}, the middle" + (
        "; subnormal: its exponent bits are 0" if 0 < nearer < 1 << b.format.element.mantissa_bits else "")


def _shared_scale(values: Tensor, element: ElementCodec, rule: str, byte: int, scale: float) -> str:
    """In words what `formats.shared_exponent` did."""
    amax = float(values.abs().max())
    means = f"byte {byte} means 2^{byte - 127} = {scale:g}"
    if math.isnan(amax):
        return f"the largest is NaN: byte {byte} means NaN"
    if amax == 0:
        return f"all are 0: {means}"
    if math.isinf(amax):
        return f"inf counts as 2^128: {means}"
    formula = {"floor": f"floor(log2({amax:g})) - {element.emax}",
               "ceil": f"ceil(log2({amax:g} / {element.max:g}))",
               "even": f"floor(log2({amax:g} rounded to {element.mantissa_bits + 1} bits)) - {element.emax}"}[rule]
    return f"{formula} = {byte - 127}; {means}" if 0 < byte < 254 else f"{formula}, kept within -127 to 127; {means}"


def _nvfp4_scale(values: Tensor, byte: int, scale: float, outer: float) -> str:
    amax = float(values.abs().max())
    want = amax / 6 / outer
    how = f"the nearest E4M3 is {scale:g}" if want <= E4M3.max else f"beyond {E4M3.max:g}, so {scale:g}"
    return f"{amax:g} / 6 / global scale {outer:g} = {want:g}; {how} (byte {byte})"


def _bits(code: int, element: ElementCodec) -> str:
    text = f"{code:0{element.bits}b}"
    return f"{text[0]} {text[1: 1 + element.exponent_bits]} {text[1 + element.exponent_bits:]}"
