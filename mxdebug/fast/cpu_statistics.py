"""Count codes, bytes and zeros on the CPU: all that a scan needs, apart from the other kernels, so that it loads no more."""

from __future__ import annotations

import numpy as np
from numba import njit

from .compiled import compiled

_U = np.uint64


@njit(inline="always")
def _ones(x: int) -> int:
    """How many bits are set. LLVM knows this way of counting, and makes of it what the machine has for it, many words at once."""
    x = x - ((x >> _U(1)) & _U(0x5555555555555555))
    x = (x & _U(0x3333333333333333)) + ((x >> _U(2)) & _U(0x3333333333333333))
    x = (x + (x >> _U(4))) & _U(0x0F0F0F0F0F0F0F0F)
    return (x * _U(0x0101010101010101)) >> _U(56)


@compiled
def _add(first: np.ndarray, second: np.ndarray, third: np.ndarray, fourth: np.ndarray, having: np.ndarray) -> None:
    """Add to having[s] how many codes of these words have all bits of s, and maybe others.

    Four words change places until a, b, c and d hold nothing but the lowest, second, third and highest bits of their 64 codes. Then one
    `and` and one count of bits ask all of them at once.
    """
    even, low = _U(0x5555555555555555), _U(0x3333333333333333)
    n1 = n2 = n3 = n4 = n5 = n6 = n7 = n8 = n9 = n10 = n11 = n12 = n13 = n14 = n15 = _U(0)  # an array would be slow
    for i in range(len(first)):
        w, x, y, z = first[i], second[i], third[i], fourth[i]
        w, x = (w & even) | ((x & even) << _U(1)), ((w >> _U(1)) & even) | (x & ~even)
        y, z = (y & even) | ((z & even) << _U(1)), ((y >> _U(1)) & even) | (z & ~even)
        a, c = (w & low) | ((y & low) << _U(2)), ((w >> _U(2)) & low) | (y & ~low)
        b, d = (x & low) | ((z & low) << _U(2)), ((x >> _U(2)) & low) | (z & ~low)
        ab, cd = a & b, c & d
        n1 += _ones(a)
        n2 += _ones(b)
        n3 += _ones(ab)
        n4 += _ones(c)
        n5 += _ones(c & a)
        n6 += _ones(c & b)
        n7 += _ones(c & ab)
        n8 += _ones(d)
        n9 += _ones(d & a)
        n10 += _ones(d & b)
        n11 += _ones(d & ab)
        n12 += _ones(cd)
        n13 += _ones(cd & a)
        n14 += _ones(cd & b)
        n15 += _ones(cd & ab)
    for s, n in enumerate((n1, n2, n3, n4, n5, n6, n7, n8, n9, n10, n11, n12, n13, n14, n15)):
        having[s + 1] += n


@compiled
def _codes(words: np.ndarray, counts: np.ndarray) -> None:
    n = len(words) // 4
    having = np.zeros(16, dtype=np.int64)
    having[0] = n * 64
    _add(words[:n], words[n : 2 * n], words[2 * n : 3 * n], words[3 * n : 4 * n], having)
    for bit in (1, 2, 4, 8):
        for code in range(16):
            if not code & bit:
                having[code] -= having[code | bit]
    counts += having
    for w in words[4 * n :]:
        for shift in range(0, 64, 4):
            counts[(w >> _U(shift)) & _U(15)] += 1


def count_codes(payload: np.ndarray) -> np.ndarray:
    """int64 [16]: how often each 4-bit code occurs in uint8 [n], n a multiple of 8."""
    counts = np.zeros(16, dtype=np.int64)
    _codes(payload.view(np.uint64), counts)
    return counts


@compiled
def _bytes_of(words: np.ndarray, rest: np.ndarray, counts: np.ndarray) -> None:
    eight = np.zeros((8, 256), dtype=np.uint32)  # a table for each byte of a word: equal neighbours do not wait for each other
    byte = _U(0xFF)
    for w in words:
        for k in range(8):
            eight[k, (w >> _U(8 * k)) & byte] += np.uint32(1)
    for b in rest:
        eight[0, b] += np.uint32(1)
    for b in range(256):
        for k in range(8):
            counts[b] += eight[k, b]


def count_bytes(some: np.ndarray) -> np.ndarray:
    """int64 [256]: how often each byte occurs in uint8 [n], n below 2^32."""
    counts, whole = np.zeros(256, dtype=np.int64), len(some) // 8 * 8
    _bytes_of(some[:whole].view(np.uint64), some[whole:], counts)
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

    payload uint8 [rows, n]; scales uint8 [rows, blocks], or [rows, 0] where they are not asked about; n is a multiple of 8 * blocks.
    is_zero bool [256]: the scale bytes that are zero. element: the bits of eight payload bytes that are not signs.
    """
    found = np.zeros(2, dtype=np.int64)
    _zeros(payload.view(np.uint64), scales, is_zero, _U(element), found)
    return int(found[0]), int(found[1])
