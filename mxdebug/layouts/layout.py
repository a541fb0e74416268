"""A layout: where the byte at logical (row, column) lies in memory. Written as one readable einops pattern."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from ..errors import MxdebugError
from .moves import moved


@dataclass(frozen=True)
class Layout:
    """An invertible order of the bytes of a [rows, columns] uint8 matrix.

    pattern   einops, logical axes on the left, physical axes on the right, slowest first: "(mt m4 m32) (kt k4) -> mt kt m32 m4 k4"
    sizes     the axes of fixed size
    pads      whether a matrix that does not fill the tiles is padded with `fill` (True) or refused (False)
    bits      for layouts that also permute bits: of each 32-bit little-endian word of physical bytes, source bit b goes to bits[b]
    source    who defines it
    compiled  the name of its own kernel in mxdebug.fast.cpu and gpu, where it has one

    Leading axes (experts) are batch axes: every slab is laid out on its own.
    """

    name: str
    pattern: str
    sizes: tuple[tuple[str, int], ...]
    pads: bool
    source: str
    bits: tuple[int, ...] | None = None
    fill: int = 0
    compiled: str = ""

    # -- geometry ---------------------------------------------------------------------------------------------

    @functools.cached_property
    def axes(self) -> tuple[list[str], list[str], list[str]]:
        """(of the rows, of the columns, of memory), slowest first."""
        left, right = self.pattern.split("->")
        groups = [re.findall(r"\w+", g) for g in re.findall(r"\([^)]*\)|\w+", left)]
        if len(groups) != 2:
            raise MxdebugError(f"layout {self.name}", "a pattern with two logical axes", self.pattern)
        return groups[0], groups[1], re.findall(r"\w+", right)

    @functools.cached_property
    def tile(self) -> tuple[int, int]:
        """(rows, columns) that a matrix must be a multiple of, or is padded to."""
        sizes = dict(self.sizes)
        rows, cols, _ = self.axes
        return math.prod(sizes.get(a, 1) for a in rows), math.prod(sizes.get(a, 1) for a in cols)

    def padded(self, rows: int, cols: int) -> tuple[int, int]:
        """The shape that a [rows, cols] matrix takes up; raises where the layout does not pad."""
        tr, tc = self.tile
        out = (-(-rows // tr) * tr, -(-cols // tc) * tc)
        if out != (rows, cols) and not self.pads:
            raise MxdebugError(f"matrix for layout {self.name}", f"rows % {tr} == 0 and columns % {tc} == 0",
                               f"{rows} x {cols}", f"this layout does not pad; pad before it ({self.source})")
        return out

    def physical_shape(self, rows: int, cols: int) -> tuple[int, ...]:
        """The physical axes, slowest first, of a [rows, cols] matrix."""
        sizes = self.sizes_of(*self.padded(rows, cols))
        return tuple(sizes[a] for a in self.axes[2])

    def sizes_of(self, rows: int, cols: int) -> dict[str, int]:
        """The length of each axis, for a matrix that fills its tiles."""
        sizes = dict(self.sizes)
        tr, tc = self.tile
        for axes, total, tile in ((self.axes[0], rows, tr), (self.axes[1], cols, tc)):
            for a in axes:
                sizes.setdefault(a, total // tile)
        return sizes

    @property
    def moves_nothing(self) -> bool:
        """Whether memory has the logical order."""
        return [*self.axes[0], *self.axes[1]] == list(self.axes[2])

    # -- bytes ------------------------------------------------------------------------------------------------

    def pack(self, logical: Tensor) -> Tensor:
        """uint8 [..., rows, cols] -> uint8 [..., *physical_shape]."""
        self._check(logical, "logical matrix")
        rows, cols = logical.shape[-2:]
        pr, pc = self.padded(rows, cols)
        if (pr, pc) != (rows, cols):
            logical = torch.nn.functional.pad(logical, (0, pc - cols, 0, pr - rows), value=self.fill)
        out = moved(self, logical.flatten(-2), pr, pc, back=False)
        return out.reshape(*logical.shape[:-2], *self.physical_shape(rows, cols))

    def unpack(self, physical: Tensor, rows: int, cols: int) -> Tensor:
        """uint8 bytes of any shape -> uint8 [..., rows, cols]: what a reader of this layout sees in them.

        The batch axes are those in front of the layout's physical (or padded 2-D) shape; where the bytes have neither,
        as many leading axes of `physical` as are needed to leave one slab.
        Raises MxdebugError where the bytes are not a whole number of slabs.
        """
        self._check(physical, "physical bytes")
        pr, pc = self.padded(rows, cols)
        tails = (self.physical_shape(rows, cols), (pr, pc))
        batch = _batch_shape(physical, pr * pc, tails, f"bytes for layout {self.name} of {rows} x {cols}")
        out = moved(self, physical.reshape(*batch, pr * pc), pr, pc, back=True)
        return out.unflatten(-1, (pr, pc))[..., :rows, :cols].contiguous()

    def index_map(self, rows: int, cols: int) -> Tensor:
        """int64 [rows, cols]: the physical byte offset of each logical byte, within one slab.

        For a layout that permutes bits, the offset of the byte before the bits of its 32-bit word are permuted.
        """
        pr, pc = self.padded(rows, cols)
        sizes = self.sizes_of(pr, pc)
        left, right = self.pattern.split("->")
        flat = torch.arange(pr * pc)
        return rearrange(flat, f"({right}) -> {left}", **{a: sizes[a] for a in self.axes[2]})[:rows, :cols].contiguous()

    def offsets(self, row: Tensor, column: Tensor, rows: int, cols: int) -> Tensor:
        """int64: the entries of `index_map` at row and column (broadcast), by arithmetic: for a few bytes of a large matrix.

        Also for the rows and columns of the padding, which `index_map` leaves out.
        """
        sizes = self.sizes_of(*self.padded(rows, cols))
        row_axes, col_axes, out_axes = self.axes
        return _number({**_digits(row, row_axes, sizes), **_digits(column, col_axes, sizes)}, out_axes, sizes)

    def positions(self, offset: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
        """int64 (row, column) of the bytes at those offsets: the inverse of `offsets`; in the padding they exceed rows or cols."""
        sizes = self.sizes_of(*self.padded(rows, cols))
        row_axes, col_axes, out_axes = self.axes
        digits = _digits(offset, out_axes, sizes)
        return _number(digits, row_axes, sizes), _number(digits, col_axes, sizes)

    def explain(self, row: int, column: int, rows: int, cols: int) -> str:
        """Derive in words where the byte at (row, column) of a [rows, cols] matrix lies."""
        if not (0 <= row < rows and 0 <= column < cols):
            raise MxdebugError("position", f"inside {rows} x {cols}", f"({row}, {column})")
        pr, pc = self.padded(rows, cols)
        sizes = self.sizes_of(pr, pc)
        row_axes, col_axes, out_axes = self.axes
        digits = {**_digits(row, row_axes, sizes), **_digits(column, col_axes, sizes)}
        strides, step = {}, 1
        for a in reversed(out_axes):
            strides[a], step = step, step * sizes[a]
        offset = sum(digits[a] * strides[a] for a in out_axes)
        lines = [f"{self.name}: {self.pattern}"]
        if (pr, pc) != (rows, cols):
            lines.append(f"{rows} x {cols} is padded to {pr} x {pc} with {self.fill}")
        lines.append(f"row {row} = " + _digit_text(digits, row_axes, sizes))
        lines.append(f"column {column} = " + _digit_text(digits, col_axes, sizes))
        lines.append("offset = " + " + ".join(f"{a} {digits[a]}*{strides[a]}" for a in out_axes) + f" = {offset}")
        if self.bits:
            word, byte = divmod(offset, 4)
            lines.append(f"that is byte {byte} of word {word}; its bits are then permuted inside the word:")
            for label, source in (("low nibble", range(4)), ("high nibble", range(4, 8))):
                moves = ", ".join(f"{'MEES'[b % 4]} to bit {self.bits[8 * byte + b]}" for b in reversed(source))
                lines.append(f"  {label}: {moves}")
        else:
            lines.append(f"linear would be {row}*{cols} + {column} = {row * cols + column}")
        return "\n".join(lines)

    def _check(self, t: Tensor, what: str) -> None:
        if t.dtype != torch.uint8:
            raise MxdebugError(f"{what} for layout {self.name}", "dtype torch.uint8", str(t.dtype),
                               "view it as uint8 first (view, never a cast by value)")
        if t.dim() < 2 and what.startswith("logical"):
            raise MxdebugError(f"{what} for layout {self.name}", "at least two dimensions", f"shape {list(t.shape)}")


def _batch_shape(t: Tensor, slab: int, tails: tuple[tuple[int, ...], ...], what: str) -> tuple[int, ...]:
    count, rest = divmod(t.numel(), slab) if slab else (0, 1)
    if rest or count == 0:
        raise MxdebugError(what, f"a multiple of {slab} bytes", f"{t.numel()} bytes, shape {list(t.shape)}",
                           "rows or columns not padded, or another layout's padding")
    for tail in tails:  # an axis of one expert is kept where the shape shows it
        if t.dim() >= len(tail) and tuple(t.shape[-len(tail):]) == tail:
            return tuple(t.shape[:-len(tail)])
    lead, batch = 1, []
    for size in t.shape:
        if lead == count:
            break
        lead *= size
        batch.append(size)
    return tuple(batch) if lead == count and batch else ((count,) if count > 1 else ())


def _digits(value: int | Tensor, axes: list[str], sizes: dict[str, int]) -> dict[str, int | Tensor]:
    """The value as a number whose digits are the axes, slowest first."""
    out: dict[str, int | Tensor] = {}
    for a in reversed(axes):
        value, out[a] = value // sizes[a], value % sizes[a]
    return out


def _number(digits: dict[str, int | Tensor], axes: list[str], sizes: dict[str, int]) -> int | Tensor:
    """The inverse of `_digits`."""
    out: int | Tensor = 0
    for a in axes:
        out = out * sizes[a] + digits[a]
    return out


def _digit_text(digits: dict[str, int], axes: list[str], sizes: dict[str, int]) -> str:
    parts, step = [], 1
    for a in reversed(axes):
        parts.append(f"{a} {digits[a]}" + (f"*{step}" if step > 1 else ""))
        step *= sizes[a]
    return " + ".join(reversed(parts))


@dataclass(frozen=True)
class Composed:
    """Layouts applied one after the other to the same bytes: `first`'s result is read as [rows, cols] by `second`.

    That is what applying a swizzle to bytes that are swizzled already does.
    """

    first: Layout
    second: Layout

    @property
    def name(self) -> str:
        return f"{self.second.name} of {self.first.name}" if self.first != self.second else f"{self.first.name} applied twice"

    @property
    def bits(self) -> tuple[int, ...] | None:
        """Whether bits are permuted within words, by either."""
        return self.second.bits or self.first.bits

    def padded(self, rows: int, cols: int) -> tuple[int, int]:
        return self.second.padded(*self.first.padded(rows, cols))

    def pack(self, logical: Tensor) -> Tensor:
        """As Layout.pack."""
        pr, pc = self.first.padded(*logical.shape[-2:])
        return self.second.pack(self.first.pack(logical).reshape(*logical.shape[:-2], pr, pc))

    def unpack(self, physical: Tensor, rows: int, cols: int) -> Tensor:
        """As Layout.unpack."""
        return self.first.unpack(self.second.unpack(physical, *self.first.padded(rows, cols)), rows, cols)
