"""Bytes in another order on the CPU: where they are moved in words, by loops of which the compiler makes vectors."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from numba import njit
from torch import Tensor

from . import spread
from .compiled import WORDS, compiled

if TYPE_CHECKING:
    from ..layouts.moves import Blocks, Origins

# -- places -------------------------------------------------------------------------------------------------------------


@compiled
def _move(source: np.ndarray, target: np.ndarray, outer: np.ndarray, inner: np.ndarray, first: int, end: int) -> None:
    n = len(inner)
    for tile in range(first, end):
        start = np.uint64(tile // len(outer) * len(outer) * n) + outer[tile % len(outer)]
        own = target[tile * n : (tile + 1) * n]
        for i in range(n):
            own[i] = source[start + inner[i]]


def move(flat: Tensor, origins: Origins) -> Tensor:
    """The units of uint8 [..., slab] in another order."""
    out = torch.empty_like(flat)
    source, target = (t.reshape(-1).numpy().view(WORDS[origins.unit]) for t in (flat, out))
    outer, inner = origins.outer.astype(np.uint64), origins.inner.astype(np.uint64)  # such indices need no check for negative ones
    spread(lambda first, end: _move(source, target, outer, inner, first, end), target.size // len(inner))
    return out


# -- single bytes -------------------------------------------------------------------------------------------------------

_L = np.uint64
_BYTES, _PAIRS, _LEFT, _HALF = _L(0x00FF00FF00FF00FF), _L(0x0000FFFF0000FFFF), _L(0xFFFFFFFF), _L(32)


@njit(inline="always")
def _exchange(a: int, b: int, c: int, d: int) -> tuple[int, int, int, int]:
    """Transpose 4 x 4 bytes, in each half of four words of 64 bits: the n-th bytes of a, b, c and d make a half of the n-th word."""
    s, t = ((a >> _L(8)) ^ b) & _BYTES, ((c >> _L(8)) ^ d) & _BYTES
    a, b, c, d = a ^ (s << _L(8)), b ^ s, c ^ (t << _L(8)), d ^ t
    s, t = ((a >> _L(16)) ^ c) & _PAIRS, ((b >> _L(16)) ^ d) & _PAIRS
    a, c, b, d = a ^ (s << _L(16)), c ^ s, b ^ (t << _L(16)), d ^ t
    return a, b, c, d


# From a word of each of four rows to a block, and back: loops over one index, of which the compiler makes vectors. The halves of words are
# put in order, too: they are eight words of four bytes.


@compiled
def _to_blocks(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray, blocks: np.ndarray) -> None:
    for i in range(len(a)):
        p, q = (a[i] & _LEFT) | (c[i] << _HALF), (a[i] >> _HALF) | (c[i] & ~_LEFT)
        r, s = (b[i] & _LEFT) | (d[i] << _HALF), (b[i] >> _HALF) | (d[i] & ~_LEFT)
        blocks[4 * i], blocks[4 * i + 1], blocks[4 * i + 2], blocks[4 * i + 3] = _exchange(p, q, r, s)


@compiled
def _to_rows(blocks: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray) -> None:
    for i in range(len(a)):
        p, q, r, s = _exchange(blocks[4 * i], blocks[4 * i + 1], blocks[4 * i + 2], blocks[4 * i + 3])
        a[i], b[i] = (p & _LEFT) | (q << _HALF), (r & _LEFT) | (s << _HALF)
        c[i], d[i] = (p >> _HALF) | (q & ~_LEFT), (r >> _HALF) | (s & ~_LEFT)


@njit(inline="always")
def _copy(source: np.ndarray, target: np.ndarray) -> None:
    a, b, c, d = source[0], source[1], source[2], source[3]  # all before the first is written, so that the compiler moves them as one
    target[0], target[1], target[2], target[3] = a, b, c, d


@compiled
def _transpose(
    logical: np.ndarray, physical: np.ndarray, outer: np.ndarray, far: np.ndarray, near: np.ndarray, rows: np.ndarray, back: bool,
    first: int, end: int,
) -> None:
    """logical uint64 [n], physical uint64 [n / 4, 4]; uint64 [2, many], [2, n], [2, m] and [4] as in `Blocks`."""
    many, n, m = outer.shape[1], far.shape[1], near.shape[1]
    kept = np.empty((m, n, 4), dtype=np.uint64)  # the blocks of a tile in the rows' order: those of the layout are far apart
    for tile in range(first, end):
        before = _L(tile // many * many * n * m)
        x, y = before * _L(4) + outer[0, tile % many], before + outer[1, tile % many]
        if back:
            for i in range(n):
                for j in range(m):
                    _copy(physical[y + far[1, i] + near[1, j]], kept[j, i])
        for j in range(m):
            own, at = kept[j].reshape(-1), x + near[0, j]
            a, b, c, d = logical[at + rows[0] :][:n], logical[at + rows[1] :][:n], logical[at + rows[2] :][:n], logical[at + rows[3] :][:n]
            if back:
                _to_rows(own, a, b, c, d)
            else:
                _to_blocks(a, b, c, d, own)
        if not back:
            for i in range(n):
                for j in range(m):
                    _copy(kept[j, i], physical[y + far[1, i] + near[1, j]])


def transpose(flat: Tensor, blocks: Blocks, back: bool) -> Tensor:
    """The bytes of uint8 [..., slab] from logical to physical order; back: from physical to logical order."""
    out = torch.empty_like(flat)
    logical, physical = (t.reshape(-1).numpy().view(np.uint64) for t in ((out, flat) if back else (flat, out)))
    # Such indices need no check for negative ones.
    tables = [t.astype(np.uint64) for t in (blocks.outer, blocks.far, blocks.near, blocks.rows)]
    tiles = len(physical) // (4 * blocks.far.shape[1] * blocks.near.shape[1])
    spread(lambda first, end: _transpose(logical, physical.reshape(-1, 4), *tables, back, first, end), tiles)
    return out


# -- the SM90 weight interleave -----------------------------------------------------------------------------------------

# A word is made of four bytes: `a` and `b` stand in rows r and r + 8 of a tile of 16 rows, `c` and `d` four columns further
# (layouts/catalogue.py; the shifts are those of its _FP4_MOVES). Its low half is made of their low nibbles, its high half of the high
# ones, alike. So eight words are made side by side: first their lowest bytes, as one word of 64 bits, then their second ones, ..., and at
# last these bytes are transposed.


@njit(inline="always")
def _low(a: int, b: int, c: int) -> int:
    return ((a << _L(6)) & _L(0xC0C0C0C0C0C0C0C0)) | ((b << _L(3)) & _L(0x3838383838383838)) | (c & _L(0x0707070707070707))


@njit(inline="always")
def _high(a: int, b: int, c: int, d: int) -> int:
    return (
        ((a << _L(4)) & _L(0x8080808080808080)) | ((d << _L(3)) & _L(0x4040404040404040)) | ((d << _L(5)) & _L(0x2020202020202020))
        | ((b << _L(1)) & _L(0x1010101010101010)) | ((d << _L(1)) & _L(0x0C0C0C0C0C0C0C0C)) | ((c >> _L(2)) & _L(0x0202020202020202))
        | ((a >> _L(2)) & _L(0x0101010101010101))
    )  # fmt: skip


@njit(inline="always")
def _nibbles(x: int, y: int) -> tuple[int, int, int, int]:
    """The inverse of `_low` and `_high`."""
    three, eight = _L(0x0707070707070707), _L(0x0808080808080808)
    a = ((x >> _L(6)) & _L(0x0303030303030303)) | ((y << _L(2)) & _L(0x0404040404040404)) | ((y >> _L(4)) & eight)
    b = ((x >> _L(3)) & three) | ((y >> _L(1)) & eight)
    c = (x & three) | ((y << _L(2)) & eight)
    d = ((y >> _L(5)) & _L(0x0101010101010101)) | ((y >> _L(1)) & _L(0x0606060606060606)) | ((y >> _L(3)) & eight)
    return a, b, c, d


# 16 bytes of row r and 16 of row r + 8 make four words in either half of a tile: `left` in the low 32 bits here, `right` in the high ones.
# Words are read and written in whole groups of four, for the compiler gathers those with gaps one by one.


@compiled
def _weave(upper: np.ndarray, lower: np.ndarray, left: np.ndarray, right: np.ndarray) -> None:
    four, half = _L(4), _L(32)
    for i in range(len(left) // 4):
        a, c = _L(upper[4 * i]) | (_L(upper[4 * i + 2]) << half), _L(upper[4 * i + 1]) | (_L(upper[4 * i + 3]) << half)
        b, d = _L(lower[4 * i]) | (_L(lower[4 * i + 2]) << half), _L(lower[4 * i + 1]) | (_L(lower[4 * i + 3]) << half)
        e, f, g, h = a >> four, b >> four, c >> four, d >> four
        a, b, c, d = _exchange(_low(a, b, c), _high(a, b, c, d), _low(e, f, g), _high(e, f, g, h))
        left[4 * i], left[4 * i + 1], left[4 * i + 2], left[4 * i + 3] = a, b, c, d
        right[4 * i], right[4 * i + 1], right[4 * i + 2], right[4 * i + 3] = a >> half, b >> half, c >> half, d >> half


@compiled
def _unweave(left: np.ndarray, right: np.ndarray, upper: np.ndarray, lower: np.ndarray) -> None:
    four, half = _L(4), _L(32)
    for i in range(len(left) // 4):
        a, b = _L(left[4 * i]) | (_L(right[4 * i]) << half), _L(left[4 * i + 1]) | (_L(right[4 * i + 1]) << half)
        c, d = _L(left[4 * i + 2]) | (_L(right[4 * i + 2]) << half), _L(left[4 * i + 3]) | (_L(right[4 * i + 3]) << half)
        a, b, c, d = _exchange(a, b, c, d)
        e, f, g, h = _nibbles(c, d)
        a, b, c, d = _nibbles(a, b)
        a, b, c, d = a | (e << four), b | (f << four), c | (g << four), d | (h << four)
        upper[4 * i], upper[4 * i + 1], upper[4 * i + 2], upper[4 * i + 3] = a, c, a >> half, c >> half
        lower[4 * i], lower[4 * i + 1], lower[4 * i + 2], lower[4 * i + 3] = b, d, b >> half, d >> half


@compiled
def _interleave(logical: np.ndarray, physical: np.ndarray, back: bool, first: int, end: int) -> None:
    """logical uint32 [rows, columns / 4], physical uint32 [rows / 16, 2, 8, columns / 4]; tiles of 16 rows from `first` on."""
    for tile in range(first, end):
        for row in range(8):
            upper, lower = logical[tile * 16 + row], logical[tile * 16 + 8 + row]
            left, right = physical[tile, 0, row], physical[tile, 1, row]
            if back:
                _unweave(left, right, upper, lower)
            else:
                _weave(upper, lower, left, right)


def sm90_weights(flat: Tensor, columns: int, back: bool) -> Tensor:
    """uint8 [..., rows * columns] in the order of SM90_WEIGHT_INTERLEAVE; back: from it. Rows are a multiple of 16, columns of 32."""
    out = torch.empty_like(flat)
    logical, physical = (t.reshape(-1).numpy().view(np.uint32) for t in ((out, flat) if back else (flat, out)))
    rows_of, tiles_of = logical.reshape(-1, columns // 4), physical.reshape(-1, 2, 8, columns // 4)
    spread(lambda first, end: _interleave(rows_of, tiles_of, back, first, end), len(tiles_of))
    return out
