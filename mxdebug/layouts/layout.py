"""A layout: where the byte at logical (row, column) lies in memory. Written as one readable einops pattern."""

from __future__ import annotations

import functools
import math
import re
from dataclasses import dataclass

import numpy as np
import torch
from einops import rearrange
from torch import Tensor

from .. import fast
from ..errors import MxdebugError
from ..formats import words


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
    def _axes(self) -> tuple[list[str], list[str], list[str]]:
        left, right = self.pattern.split("->")
        groups = [re.findall(r"\w+", g) for g in re.findall(r"\([^)]*\)|\w+", left)]
        if len(groups) != 2:
            raise MxdebugError(f"layout {self.name}", "a pattern with two logical axes", self.pattern)
        return groups[0], groups[1], re.findall(r"\w+", right)

    @functools.cached_property
    def tile(self) -> tuple[int, int]:
        """(rows, columns) that a matrix must be a multiple of, or is padded to."""
        sizes = dict(self.sizes)
        rows, cols, _ = self._axes
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
        sizes = self._all_sizes(*self.padded(rows, cols))
        return tuple(sizes[a] for a in self._axes[2])

    def _all_sizes(self, rows: int, cols: int) -> dict[str, int]:
        sizes = dict(self.sizes)
        tr, tc = self.tile
        for axes, total, tile in ((self._axes[0], rows, tr), (self._axes[1], cols, tc)):
            for a in axes:
                sizes.setdefault(a, total // tile)
        return sizes

    @property
    def _moves_nothing(self) -> bool:
        return [*self._axes[0], *self._axes[1]] == list(self._axes[2])

    # -- bytes ------------------------------------------------------------------------------------------------

    def pack(self, logical: Tensor) -> Tensor:
        """uint8 [..., rows, cols] -> uint8 [..., *physical_shape]."""
        self._check(logical, "logical matrix")
        rows, cols = logical.shape[-2:]
        pr, pc = self.padded(rows, cols)
        if (pr, pc) != (rows, cols):
            logical = torch.nn.functional.pad(logical, (0, pc - cols, 0, pr - rows), value=self.fill)
        out = self._moved(logical.flatten(-2), pr, pc, back=False)
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
        out = self._moved(physical.reshape(*batch, pr * pc), pr, pc, back=True)
        return out.unflatten(-1, (pr, pc))[..., :rows, :cols].contiguous()

    def _moved(self, flat: Tensor, pr: int, pc: int, back: bool) -> Tensor:
        """Slabs [..., pr * pc] in physical order; back: in logical order."""
        if self._moves_nothing and not self.bits:
            return flat.clone()
        compiled = fast.on_cpu(flat) or fast.on_gpu(flat)
        if compiled is not None and self.bits and self.compiled:
            return getattr(compiled, self.compiled)(flat, pc, back)
        if compiled is not None and not self.bits:
            blocks = _blocks(self, pr, pc, NEAR[flat.device.type])
            return compiled.transpose(flat, blocks, back) if blocks is not None else compiled.move(flat, _origins(self, pr, pc, back))
        maps = _places(self, pr, pc, str(flat.device))
        if self.bits and back:
            flat = _permute_bits(flat, _inverse(self.bits))
        out = _gather(flat, maps[1 if back else 0], maps[2])
        return _permute_bits(out, self.bits) if self.bits and not back else out

    def index_map(self, rows: int, cols: int) -> Tensor:
        """int64 [rows, cols]: the physical byte offset of each logical byte, within one slab.

        For a layout that permutes bits, the offset of the byte before the bits of its 32-bit word are permuted.
        """
        pr, pc = self.padded(rows, cols)
        sizes = self._all_sizes(pr, pc)
        left, right = self.pattern.split("->")
        flat = torch.arange(pr * pc)
        return rearrange(flat, f"({right}) -> {left}", **{a: sizes[a] for a in self._axes[2]})[:rows, :cols].contiguous()

    def offsets(self, row: Tensor, column: Tensor, rows: int, cols: int) -> Tensor:
        """int64: the entries of `index_map` at row and column (broadcast), by arithmetic: for a few bytes of a large matrix.

        Also for the rows and columns of the padding, which `index_map` leaves out.
        """
        sizes = self._all_sizes(*self.padded(rows, cols))
        row_axes, col_axes, out_axes = self._axes
        return _number({**_digits(row, row_axes, sizes), **_digits(column, col_axes, sizes)}, out_axes, sizes)

    def positions(self, offset: Tensor, rows: int, cols: int) -> tuple[Tensor, Tensor]:
        """int64 (row, column) of the bytes at those offsets: the inverse of `offsets`; in the padding they exceed rows or cols."""
        sizes = self._all_sizes(*self.padded(rows, cols))
        row_axes, col_axes, out_axes = self._axes
        digits = _digits(offset, out_axes, sizes)
        return _number(digits, row_axes, sizes), _number(digits, col_axes, sizes)

    def explain(self, row: int, column: int, rows: int, cols: int) -> str:
        """Derive in words where the byte at (row, column) of a [rows, cols] matrix lies."""
        if not (0 <= row < rows and 0 <= column < cols):
            raise MxdebugError("position", f"inside {rows} x {cols}", f"({row}, {column})")
        pr, pc = self.padded(rows, cols)
        sizes = self._all_sizes(pr, pc)
        row_axes, col_axes, out_axes = self._axes
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


def _inverse(bits: tuple[int, ...]) -> tuple[int, ...]:
    out = [0] * len(bits)
    for source, target in enumerate(bits):
        out[target] = source
    return tuple(out)


MOST_INNER = 4096


@dataclass(frozen=True, eq=False)
class Origins:
    """Where a move takes its units from: unit o * len(inner) + i of a slab comes from outer[o] + inner[i], in units; int64.

    Offsets are sums over the axes, so that two short tables hold them all: `inner` those of the fastest axes, which the first cache keeps.
    """

    outer: np.ndarray
    inner: np.ndarray
    unit: int  # bytes: 1, 2, 4 or 8


@functools.lru_cache(maxsize=32)
def _origins(layout: Layout, rows: int, cols: int, back: bool) -> Origins:
    """From logical to physical order; back: from physical to logical order."""
    sizes, strides, unit = _units(layout, rows, cols, back)
    inner, outer = np.zeros(1, dtype=np.int64), np.zeros(1, dtype=np.int64)
    for n, stride in zip(reversed(sizes), reversed(strides)):
        # Of an axis that is too long for `inner`, a part of it.
        part = next(k for k in range(min(n, max(1, MOST_INNER // len(inner))), 0, -1) if n % k == 0) if len(outer) == 1 else 1
        inner = (np.arange(part)[:, None] * stride + inner).ravel()
        outer = (np.arange(n // part)[:, None] * stride * part + outer).ravel()
    return Origins(outer, inner, unit)


def _units(layout: Layout, rows: int, cols: int, back: bool) -> tuple[list[int], list[int], int]:
    """(sizes of the axes that are written, their strides in what is read, bytes of a unit), both in units.

    The bytes that stay together are the last axes of both.
    """
    sizes = layout._all_sizes(rows, cols)
    row_axes, col_axes, out_axes = layout._axes
    read, written = [*row_axes, *col_axes], list(out_axes)
    if back:
        read, written = written, read
    strides, step = {}, 1
    for a in reversed(read):
        strides[a], step = step, step * sizes[a]
    together = 1
    while read and written and read[-1] == written[-1]:
        together *= sizes[read.pop()]
        last = written.pop()
    unit = next(u for u in UNITS if together % u == 0)
    if together > unit:  # what is left of the axis that is moved in units
        written.append(last)
        sizes, strides = {**sizes, last: together // unit}, {**strides, last: unit}
    return [sizes[a] for a in written], [strides[a] // unit for a in written], unit


@dataclass(frozen=True, eq=False)
class Blocks:
    """A move of single bytes as one of words: a block of 32 physical bytes is eight bytes of each of four logical rows, which are eight
    words of four bytes, transposed to four of eight.

    A block is at the sum of an entry of `outer`, one of `far` and one of `near`, int64 [2, n]: in words of eight logical bytes, and in
    blocks of physical ones. The words of `far` follow each other in their row, and `near` runs along the physical blocks: a tile of both
    is compact on either side.
    """

    outer: np.ndarray
    far: np.ndarray
    near: np.ndarray
    rows: np.ndarray  # int64 [4]: where, from there, the eight bytes of each row are


NEAR, FAR = {"cpu": 16, "cuda": 64}, 256  # at most so many: the fastest of those that were tried


@functools.lru_cache(maxsize=32)
def _blocks(layout: Layout, rows: int, cols: int, most: int) -> Blocks | None:
    """With at most so many blocks in `near`; None where the layout is no such move."""
    sizes = layout._all_sizes(rows, cols)
    logical, physical = [*layout._axes[0], *layout._axes[1]], layout._axes[2]
    strides = {a: np.array([math.prod(sizes[b] for b in order[order.index(a) + 1:]) for order in (logical, physical)]) for a in logical}
    axes = {a: (sizes[a], strides[a]) for a in logical}
    block = _taken(axes, physical, 32)[0]
    first, word, byte = block[:8:2], np.arange(8), np.arange(4)[:, None]
    if len(block) < 32 or not np.array_equal(block, (first[word // 2] + word % 2 * 4 + byte).ravel()):
        return None
    far = _taken(axes, [a for a in logical if axes[a][1][0] == 8], FAR)
    near, outer = _taken(axes, physical, most), _taken(axes, logical, rows * cols)
    return Blocks(*(offsets // [[8], [32]] for offsets in (outer, far, near)), first // 8)


def _taken(axes: dict[str, tuple[int, np.ndarray]], order: list[str], most: int) -> np.ndarray:
    """int64 [2, n], n <= most: the offsets of the fastest entries of axes (size, strides) in an order; `axes` keeps the rest."""
    out = np.zeros((2, 1), dtype=np.int64)
    for a in reversed(order):
        n, stride = axes[a]
        part = next(k for k in range(min(n, most // out.shape[1]), 0, -1) if n % k == 0)
        out = (stride[:, None, None] * np.arange(part)[:, None] + out[:, None]).reshape(2, -1)
        axes[a] = n // part, stride * part
        if part < n:
            break
    return out


UNITS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}  # bytes that stay together -> the dtype that moves them


@functools.lru_cache(maxsize=8)
def _places(layout: Layout, rows: int, cols: int, device: str) -> tuple[Tensor, Tensor, int]:
    """(the logical unit of each physical one, the physical unit of each logical one, bytes of a unit); the maps are int32.

    A gather through such a map is several times faster than moving single bytes by a permutation of many axes, and the faster the more
    bytes of a row stay together.
    """
    physical = layout.index_map(rows, cols).flatten()
    unit = next(u for u in UNITS if physical.numel() % u == 0 and _together(physical, u))
    physical = physical[::unit] // unit
    logical = torch.empty_like(physical)
    logical[physical] = torch.arange(physical.numel())
    return logical.int().to(device), physical.int().to(device), unit


def _together(physical: Tensor, unit: int) -> bool:
    """Whether each `unit` bytes that follow each other, and start at a multiple of `unit`, do so physically too."""
    units = physical.reshape(-1, unit)
    return bool((units[:, 0] % unit == 0).all()) and bool((units == units[:, :1] + torch.arange(unit)).all())


def _gather(flat: Tensor, places: Tensor, unit: int) -> Tensor:
    """flat uint8 [..., n]: its units at `places`."""
    units = words(flat.reshape(-1, flat.shape[-1]), UNITS[unit])
    return torch.stack([slab.index_select(0, places) for slab in units]).view(torch.uint8).reshape(flat.shape) if len(units) else flat


def _permute_bits(t: Tensor, bits: tuple[int, ...]) -> Tensor:
    """Permute the bits of each 32-bit little-endian word: source bit b goes to bits[b]."""
    halves = words(t.flatten(), torch.int16).int() & 0xFFFF
    low, high = _bit_tables(bits, str(t.device))
    moved = low.index_select(0, halves[0::2]) | high.index_select(0, halves[1::2])
    return moved.view(torch.uint8).view(t.shape)


@functools.cache
def _bit_tables(bits: tuple[int, ...], device: str) -> tuple[Tensor, Tensor]:
    """int32 [65536] twice: where the bits of the low and of the high half of a word go."""
    value = torch.arange(1 << 16)
    tables = []
    for half in (0, 16):
        out = torch.zeros_like(value)
        for b in range(16):
            out |= (value >> b & 1) << bits[half + b]
        tables.append(torch.where(out >= 1 << 31, out - (1 << 32), out).int().to(device))
    return tables[0], tables[1]


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
