"""Kernels for the CPU, compiled by numba at first use and kept on disk. Plain loops: the compiler makes vectors of them where it can."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import torch
from numba import njit
from torch import Tensor

from . import spread
from .compiled import WORDS, compiled, data
from .cpu_quantise import quantise as quantise

if TYPE_CHECKING:
    from ..layouts.layout import Origins


# -- numbers ------------------------------------------------------------------------------------------------------------


@compiled
def _look_up(payload: np.ndarray, scales: np.ndarray, table: np.ndarray, out: np.ndarray, first: int, end: int) -> None:
    each = payload.shape[1] // scales.shape[1]
    for row in range(first, end):
        codes, values = payload[row].reshape(-1, each), out[row].reshape(-1, each)  # indices that start at 0 need no check for negative ones
        for block in range(scales.shape[1]):
            meant = table[scales[row, block]]
            for i in range(each):
                values[block, i] = meant[codes[block, i]]


def look_up(payload: Tensor, scales: Tensor, table: Tensor, out: Tensor) -> None:
    """out[r, c] = table[scales[r, c // block], payload[r, c]].

    payload uint8 [rows, n], scales uint8 [rows, n / block], table [256, 256, m] of a dtype of 2 or 4 bytes with m elements for each byte,
    out [rows, n * m] of that dtype.
    """
    word = WORDS[table.element_size() * table.shape[-1]]
    arrays = payload.numpy(), scales.numpy(), data(table).reshape(256, -1).view(word), data(out).reshape(len(payload), -1).view(word)
    spread(lambda first, end: _look_up(*arrays, first, end), len(payload))


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


# -- the SM90 weight interleave -----------------------------------------------------------------------------------------

# A word is made of four bytes: `a` and `b` stand in rows r and r + 8 of a tile of 16 rows, `c` and `d` four columns further (layouts/catalogue.py). The
# shifts are those of its _FP4_MOVES, written out: only constants let the compiler work on eight words at once.
_U = np.uint32


@njit(inline="always")
def _weave(a: int, b: int, c: int, d: int) -> int:
    return (
        ((a & _U(0x80)) << _U(24)) | ((a & _U(0x70)) << _U(18)) | ((a & _U(0x08)) << _U(12)) | ((a & _U(0x07)) << _U(6))
        | ((b & _U(0x80)) << _U(21)) | ((b & _U(0x70)) << _U(15)) | ((b & _U(0x08)) << _U(9)) | ((b & _U(0x07)) << _U(3))
        | ((c & _U(0x80)) << _U(18)) | ((c & _U(0x70)) << _U(12)) | ((c & _U(0x08)) << _U(6)) | (c & _U(0x07))
        | ((d & _U(0x80)) << _U(23)) | ((d & _U(0x10)) << _U(25)) | ((d & _U(0x60)) << _U(21))
        | ((d & _U(0x08)) << _U(11)) | ((d & _U(0x01)) << _U(13)) | ((d & _U(0x06)) << _U(9))
    )  # fmt: skip


@compiled
def _weave_rows(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray, out: np.ndarray) -> None:
    for i in range(len(out)):
        out[i] = _U(_weave(_U(a[i]), _U(b[i]), _U(c[i]), _U(d[i])))


@compiled
def _unweave_rows(words: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray) -> None:
    for i in range(len(words)):
        w = words[i]
        a[i] = ((w >> _U(24)) & _U(0x80)) | ((w >> _U(18)) & _U(0x70)) | ((w >> _U(12)) & _U(0x08)) | ((w >> _U(6)) & _U(0x07))
        b[i] = ((w >> _U(21)) & _U(0x80)) | ((w >> _U(15)) & _U(0x70)) | ((w >> _U(9)) & _U(0x08)) | ((w >> _U(3)) & _U(0x07))
        c[i] = ((w >> _U(18)) & _U(0x80)) | ((w >> _U(12)) & _U(0x70)) | ((w >> _U(6)) & _U(0x08)) | (w & _U(0x07))
        d[i] = (
            ((w >> _U(23)) & _U(0x80)) | ((w >> _U(25)) & _U(0x10)) | ((w >> _U(21)) & _U(0x60))
            | ((w >> _U(11)) & _U(0x08)) | ((w >> _U(13)) & _U(0x01)) | ((w >> _U(9)) & _U(0x06))
        )  # fmt: skip


@compiled
def _interleave(logical: np.ndarray, physical: np.ndarray, back: bool, first: int, end: int) -> None:
    """logical uint32 [rows, columns / 16, 4], physical uint32 [rows / 16, 2, 8, columns / 4]; tiles of 16 rows from `first` on."""
    n = logical.shape[1]
    four = np.empty((4, n), dtype=np.uint32)  # the four bytes of each word, one kind behind the other
    kinds = four.view(np.uint8)
    for tile in range(first, end):
        for half in range(2):
            for row in range(8):
                upper, lower, words = logical[tile * 16 + row], logical[tile * 16 + 8 + row], physical[tile, half, row]
                at = half * 2
                if back:
                    _unweave_rows(words, kinds[0], kinds[1], kinds[2], kinds[3])
                    for i in range(n):
                        upper[i, at], upper[i, at + 1] = four[0, i], four[2, i]
                        lower[i, at], lower[i, at + 1] = four[1, i], four[3, i]
                else:
                    for i in range(n):
                        four[0, i], four[2, i] = upper[i, at], upper[i, at + 1]
                        four[1, i], four[3, i] = lower[i, at], lower[i, at + 1]
                    _weave_rows(kinds[0], kinds[1], kinds[2], kinds[3], words)


def sm90_weights(flat: Tensor, columns: int, back: bool) -> Tensor:
    """uint8 [..., rows * columns] in the order of SM90_WEIGHT_INTERLEAVE; back: from it. Rows are a multiple of 16, columns of 32."""
    out = torch.empty_like(flat)
    logical, physical = (t.reshape(-1).numpy().view(np.uint32) for t in ((out, flat) if back else (flat, out)))
    rows_of, tiles_of = logical.reshape(-1, columns // 16, 4), physical.reshape(-1, 2, 8, columns // 4)
    spread(lambda first, end: _interleave(rows_of, tiles_of, back, first, end), len(tiles_of))
    return out


# -- statistics ---------------------------------------------------------------------------------------------------------

_LANES, _ROUNDS = 128, 15  # words side by side, and how many of them a counter of four bits takes


@compiled
def _add(words: np.ndarray, counters: np.ndarray) -> None:
    """Count, in each nibble of each lane, the codes that have all bits of 1, 2, ..., 15: one array of lanes for each."""
    one = np.uint64(0x1111111111111111)
    for j in range(_LANES):
        w = words[j]
        a, b, c, d = w & one, (w >> np.uint64(1)) & one, (w >> np.uint64(2)) & one, (w >> np.uint64(3)) & one
        ab, cd = a & b, c & d
        counters[1 * _LANES + j] += a
        counters[2 * _LANES + j] += b
        counters[3 * _LANES + j] += ab
        counters[4 * _LANES + j] += c
        counters[5 * _LANES + j] += c & a
        counters[6 * _LANES + j] += c & b
        counters[7 * _LANES + j] += c & ab
        counters[8 * _LANES + j] += d
        counters[9 * _LANES + j] += d & a
        counters[10 * _LANES + j] += d & b
        counters[11 * _LANES + j] += d & ab
        counters[12 * _LANES + j] += cd
        counters[13 * _LANES + j] += cd & a
        counters[14 * _LANES + j] += cd & b
        counters[15 * _LANES + j] += cd & ab


@compiled
def _sum_nibbles(words: np.ndarray) -> int:
    low4, low8, low16 = np.uint64(0x0F0F0F0F0F0F0F0F), np.uint64(0x00FF00FF00FF00FF), np.uint64(0x0000FFFF0000FFFF)
    total = np.uint64(0)
    for w in words:
        w = (w & low4) + ((w >> np.uint64(4)) & low4)
        total += (w & low8) + ((w >> np.uint64(8)) & low8)  # 128 lanes of at most 60 stay below 2^16
    total = (total & low16) + ((total >> np.uint64(16)) & low16)
    return np.int64((total & np.uint64(0xFFFFFFFF)) + (total >> np.uint64(32)))


@compiled
def _codes(words: np.ndarray, counts: np.ndarray) -> None:
    counters = np.empty(16 * _LANES, dtype=np.uint64)
    step = _LANES * _ROUNDS
    full = len(words) // step
    having = np.zeros(16, dtype=np.int64)  # codes that have these bits, and maybe others
    for start in range(0, full * step, step):
        counters[:] = 0
        for at in range(start, start + step, _LANES):
            _add(words[at : at + _LANES], counters)
        for code in range(1, 16):
            having[code] += _sum_nibbles(counters[code * _LANES : (code + 1) * _LANES])
    having[0] = full * step * 16
    for bit in (1, 2, 4, 8):
        for code in range(16):
            if not code & bit:
                having[code] -= having[code | bit]
    counts += having
    for w in words[full * step :]:
        for shift in range(0, 64, 4):
            counts[(w >> np.uint64(shift)) & np.uint64(15)] += 1


def count_codes(payload: np.ndarray) -> np.ndarray:
    """int64 [16]: how often each 4-bit code occurs in uint8 [n], n a multiple of 8."""
    counts = np.zeros(16, dtype=np.int64)
    _codes(payload.view(np.uint64), counts)
    return counts


@compiled
def _bytes_of(words: np.ndarray, counts: np.ndarray) -> None:
    eight = np.zeros((8, 256), dtype=np.uint32)  # a table for each byte of a word: equal neighbours do not wait for each other
    byte = np.uint64(0xFF)
    for w in words:
        for k in range(8):
            eight[k, (w >> np.uint64(8 * k)) & byte] += np.uint32(1)
    for b in range(256):
        for k in range(8):
            counts[b] += eight[k, b]


def count_bytes(payload: np.ndarray) -> np.ndarray:
    """int64 [256]: how often each byte occurs in uint8 [n], n a multiple of 8 and below 2^32."""
    counts = np.zeros(256, dtype=np.int64)
    _bytes_of(payload.view(np.uint64), counts)
    return counts


@compiled
def _zeros(words: np.ndarray, scales: np.ndarray, is_zero: np.ndarray, element: np.uint64, found: np.ndarray) -> None:
    each = words.shape[1] // max(1, scales.shape[1])
    for row in range(len(words)):
        empty = True
        for w in words[row]:
            if w & element:  # nearly always the first
                empty = False
                break
        found[0] += empty
        for block in range(0 if empty else scales.shape[1]):
            if is_zero[scales[row, block]]:
                for i in range(block * each, (block + 1) * each):
                    if words[row, i] & element:
                        found[1] += 1
                        break


def count_zeros(payload: np.ndarray, scales: np.ndarray, is_zero: np.ndarray, element: int) -> tuple[int, int]:
    """(rows of zeros, blocks whose scale is zero and whose payload is not).

    payload uint8 [rows, n]; scales uint8 [rows, blocks], or [rows, 0] where they are not asked about; n is a multiple of 8 * blocks. is_zero bool
    [256]: the scale bytes that are zero. element: the bits of eight payload bytes that are not signs.
    """
    found = np.zeros(2, dtype=np.int64)
    _zeros(payload.view(np.uint64), scales, is_zero, np.uint64(element), found)
    return int(found[0]), int(found[1])


# -- products -----------------------------------------------------------------------------------------------------------


# In any order: sums of one block's products of codes are exact in float64, and others are wanted to float64's precision only. Totals are added as they
# are written.
@functools.partial(compiled, fastmath={"reassoc", "contract"})
def _dot(x: np.ndarray, w: np.ndarray) -> float:
    total = 0.0
    for i in range(len(w)):
        total += x[i] * w[i]
    return total


@compiled
def _decode(payload: np.ndarray, values: np.ndarray, out: np.ndarray) -> None:
    for i in range(out.shape[0]):
        for k in range(out.shape[1]):
            out[i, k] = values[payload[i], k]


@compiled
def _block_gemm(x: np.ndarray, payload: np.ndarray, scales: np.ndarray, values: np.ndarray, codec: np.ndarray, out: np.ndarray, first: int, end: int) -> None:
    blocks, tokens = scales.shape[1], len(x)
    each = payload.shape[1] // blocks
    n = each * values.shape[1]
    w, total = np.empty(n), np.empty(tokens, dtype=np.float32)
    elements = w.reshape(each, -1)
    exact = np.empty(1)
    bits, upper = exact.view(np.uint64), ~np.uint64((1 << 29) - 1)
    for row in range(first, end):
        total[:] = 0
        for block in range(blocks):
            _decode(payload[row, block * each : (block + 1) * each], values, elements)
            scale = codec[scales[row, block]]
            for t in range(tokens):
                exact[0] = _dot(x[t, block * n : (block + 1) * n], w)
                bits[0] &= upper  # towards zero: what is left fits float32
                product = np.float32(exact[0]) * scale
                total[t] = product if block == 0 else total[t] + product
        out[row] = total


def block_gemm(x: Tensor, payload: Tensor, scales: Tensor, values: Tensor, codec: Tensor) -> Tensor:
    """float32 [T, N]: as `mxdebug.block_gemm`. x float64 [T, K], payload uint8 [N, ...], scales uint8 [N, blocks], values float64 [256, elements of a
    byte], codec float32 [256]."""
    out = torch.empty(len(payload), len(x), dtype=torch.float32)
    arrays = [t.numpy() for t in (x, payload, scales, values, codec, out)]
    spread(lambda first, end: _block_gemm(*arrays, first, end), len(payload))
    return out.T


@compiled
def _gemm(x: np.ndarray, payload: np.ndarray, scales: np.ndarray, values: np.ndarray, codec: np.ndarray, outer: float, out: np.ndarray, first: int, end: int) -> None:
    blocks, tokens = scales.shape[1], len(x)
    each = payload.shape[1] // blocks
    n = each * values.shape[1]
    w, total = np.empty(n), np.empty(tokens)
    elements = w.reshape(each, -1)
    for row in range(first, end):
        total[:] = 0
        for block in range(blocks):
            _decode(payload[row, block * each : (block + 1) * each], values, elements)
            scale = codec[scales[row, block]]
            for i in range(n):
                w[i] = np.float32(np.float32(w[i]) * scale) * outer  # float32 products, as `BlockTensor.dequantise` makes them
            for t in range(tokens):
                total[t] += _dot(x[t, block * n : (block + 1) * n], w)
        out[row] = total


def gemm(x: Tensor, payload: Tensor, scales: Tensor, values: Tensor, codec: Tensor, outer: float) -> Tensor:
    """float64 [T, N]: x times the dequantised weight, transposed, up to the order of additions; arguments as of `block_gemm`, and the global scale."""
    out = torch.empty(len(payload), len(x), dtype=torch.float64)
    arrays = [t.numpy() for t in (x, payload, scales, values, codec)]
    spread(lambda first, end: _gemm(*arrays, np.float32(outer), out.numpy(), first, end), len(payload))
    return out.T
