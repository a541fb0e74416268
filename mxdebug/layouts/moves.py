"""How a layout's bytes are moved: tables of places, for torch and for compiled kernels."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .. import fast
from ..formats import words

if TYPE_CHECKING:
    from .layout import Layout


def moved(layout: Layout, flat: Tensor, rows: int, cols: int, back: bool) -> Tensor:
    """Slabs [..., rows * cols] in physical order; back: in logical order."""
    if layout.moves_nothing and not layout.bits:
        return flat.clone()
    compiled = fast.on_cpu(flat) or fast.on_gpu(flat)
    if compiled is not None and layout.bits and layout.compiled:
        return getattr(compiled, layout.compiled)(flat, cols, back)
    if compiled is not None and not layout.bits:
        blocks = blocks_of(layout, rows, cols, NEAR[flat.device.type])
        return compiled.transpose(flat, blocks, back) if blocks is not None else compiled.move(flat, _origins(layout, rows, cols, back))
    maps = _places(layout, rows, cols, str(flat.device))
    if layout.bits and back:
        flat = _permute_bits(flat, _inverse(layout.bits))
    out = _gather(flat, maps[1 if back else 0], maps[2])
    return _permute_bits(out, layout.bits) if layout.bits and not back else out


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
    sizes = layout.sizes_of(rows, cols)
    row_axes, col_axes, out_axes = layout.axes
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
def blocks_of(layout: Layout, rows: int, cols: int, most: int) -> Blocks | None:
    """With at most so many blocks in `near`; None where the layout is no such move."""
    sizes = layout.sizes_of(rows, cols)
    logical, physical = [*layout.axes[0], *layout.axes[1]], layout.axes[2]
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
