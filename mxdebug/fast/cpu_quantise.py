"""Values to codes on the CPU. What a format fixes is a constant of its kernel: shifts by variables would leave the compiler without vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic
from torch import Tensor

from ..formats import E4M3, E5M2
from . import spread
from .compiled import WORDS, compiled, data

if TYPE_CHECKING:
    from ..formats import BlockFormat, ElementCodec

_H, _U = np.uint16, np.uint32
_MAGNITUDE, _INF, _NAN, _ONE = _U(0x7FFFFFFF), _U(0x7F800000), _U(0x7FC00000), _U(1)


@intrinsic
def _float(context: Any, bits: Any) -> Any:
    """uint32 -> the float32 of these bits; in an array this would take another pass."""
    return types.float32(types.uint32), lambda context, builder, signature, given: builder.bitcast(given[0], ir.FloatType())


@intrinsic
def _bits(context: Any, number: Any) -> Any:
    return types.uint32(types.float32), lambda context, builder, signature, given: builder.bitcast(given[0], ir.IntType(32))


# -- the largest of each block ------------------------------------------------------------------------------------------

# Of four words that stand apart, over whole rows: a loop over a block at a time would end in steps that are no vectors. The functions that make functions here
# and below get numbers and types alone: numba finds such a one again on disk, but not one that is made of other functions.


def _of_four(word: Any, mask: int) -> Callable[..., None]:
    mask = word(mask)

    @compiled
    def of_four(a: np.ndarray, b: np.ndarray, c: np.ndarray, d: np.ndarray, out: np.ndarray) -> None:
        for i in range(len(out)):
            p, q, r, s = word(a[i] & mask), word(b[i] & mask), word(c[i] & mask), word(d[i] & mask)
            upper, lower = p if p > q else q, r if r > s else s
            out[i] = upper if upper > lower else lower

    return of_four


_of_four_16, _of_four_32 = _of_four(_H, 0x7FFF), _of_four(_U, 0x7FFFFFFF)


@compiled
def _scale_bytes(row: np.ndarray, n: int, first_of: np.ndarray, at: np.ndarray, four: np.ndarray, sixteen: np.ndarray, scales: np.ndarray) -> None:
    """Of blocks of n words of `row`, bfloat16 or float32 bits. four, sixteen: memory to work in, as long as the row."""
    k, j = n // 4, n // 16  # of 32 words, those 8 and 2 apart, and two are left; of 16 words, those 4 and 1 apart
    m = len(row) - 3 * k
    o = m - 3 * j
    if row.itemsize == 2:
        _of_four_16(row[:m], row[k : k + m], row[2 * k : 2 * k + m], row[3 * k :], four[:m])
        _of_four_16(four[:o], four[j : j + o], four[2 * j : 2 * j + o], four[3 * j : m], sixteen[:o])
    else:
        _of_four_32(row[:m], row[k : k + m], row[2 * k : 2 * k + m], row[3 * k :], four[:m])
        _of_four_32(four[:o], four[j : j + o], four[2 * j : 2 * j + o], four[3 * j : m], sixteen[:o])
    for block in range(len(scales)):
        p, q = sixteen[block * n], sixteen[block * n + j - 1]
        most = _U(p if p > q else q) << _U(32 - 8 * row.itemsize)
        most = _NAN if most > _INF else most  # the table knows of one NaN
        scales[block] = first_of[most >> _U(16)] + (most >= at[most >> _U(16)])


# -- codes --------------------------------------------------------------------------------------------------------------


def _coding(word: Any, n: int) -> Callable[..., None]:
    mask, shift, eight = word((1 << (8 * word().itemsize - 1)) - 1), word(8 * word().itemsize - 4), word(8)

    @compiled
    def coding(row: np.ndarray, a: int, b: int, c: int, d: int, e: int, f: int, g: int, code: np.ndarray) -> None:
        """E2M1: how many of its seven steps a magnitude has reached."""
        for i in range(n):
            m = word(row[i] & mask)
            low = word(word(word(m >= a) + word(m >= b)) + word(word(m >= c) + word(m >= d)))
            high = word(word(word(m >= e) + word(m >= f)) + word(m >= g))
            code[i] = word(word(low + high) | word(word(row[i] >> shift) & eight))

    return coding


def _rounding(element: ElementCodec) -> Callable[..., None]:
    mantissa, bias, sign = element.mantissa_bits, element.bias, _U(element.bits - 1)
    drop, half = _U(23 - mantissa), _U((1 << (22 - mantissa)) - 1)
    normal, lowered = _U((128 - bias) << 23), _U((127 - bias) << 23)  # the least normal number, and what its exponent is lowered by
    add, added = np.float32(2.0 ** (24 - bias - mantissa)), _U((151 - bias - mantissa) << 23)  # its last place is the step of the type's subnormals
    most = _U(torch.tensor(element.max).view(torch.int32).item())

    @compiled
    def rounding(row: np.ndarray, factor: float, code: np.ndarray) -> None:
        """A block of 32 to nearest, ties to even. Each sum is cut to 32 bits at once, as the compiler cannot know that it may."""
        for i in range(32):
            given = _U(_U(row[i]) << _U(32 - 8 * row.itemsize))
            b = _bits(_float(_U(given & _MAGNITUDE)) * factor)
            m = b if b < most else most
            c = _U(_U(_U(_U(m - lowered) + half) + _U(_U(m >> drop) & _ONE)) >> drop)
            small = _U(_bits(_float(b if b < normal else normal) + add) - added)
            c = c if m >= normal else small
            c = _U(0x7F) if b > _INF else c
            code[i] = _U(c | _U(_U(given >> _U(31)) << sign))

    return rounding


_code_16_of_16, _code_32_of_16 = _coding(_H, 16), _coding(_H, 32)
_code_16_of_32, _code_32_of_32 = _coding(_U, 16), _coding(_U, 32)
_to_e4m3, _to_e5m2 = _rounding(E4M3), _rounding(E5M2)


@compiled
def _pack(pairs: np.ndarray, payload: np.ndarray) -> None:
    for i in range(len(payload)):
        payload[i] = _U(pairs[i] | _U(pairs[i] >> _U(12)))


@compiled
def _packed(x: np.ndarray, first_of: np.ndarray, at: np.ndarray, steps: np.ndarray, payload: np.ndarray, scales: np.ndarray, first: int, end: int) -> None:
    columns, blocks = x.shape[1], scales.shape[1]
    n = columns // blocks
    four, sixteen, codes = np.empty(columns, x.dtype), np.empty(columns, x.dtype), np.empty((blocks, n), np.uint16)
    pairs, numbers = codes.reshape(-1).view(np.uint32), 1 << (8 * x.itemsize - 1)
    for row in range(first, end):
        values, own = x[row].reshape(-1, n), scales[row]
        _scale_bytes(x[row], n, first_of, at, four, sixteen, own)
        for block in range(blocks):
            t = steps[own[block]]
            if t[0] >= numbers:
                codes[block] = 0  # without their signs
            elif x.itemsize == 2:
                if n == 16:
                    _code_16_of_16(values[block], t[0], t[1], t[2], t[3], t[4], t[5], t[6], codes[block])
                else:
                    _code_32_of_16(values[block], t[0], t[1], t[2], t[3], t[4], t[5], t[6], codes[block])
            elif n == 16:
                _code_16_of_32(values[block], t[0], t[1], t[2], t[3], t[4], t[5], t[6], codes[block])
            else:
                _code_32_of_32(values[block], t[0], t[1], t[2], t[3], t[4], t[5], t[6], codes[block])
        _pack(pairs, payload[row])


@compiled
def _single(x: np.ndarray, first_of: np.ndarray, at: np.ndarray, factors: np.ndarray, payload: np.ndarray, scales: np.ndarray, mantissa: int, first: int,
            end: int) -> None:  # fmt: skip
    four, sixteen = np.empty(x.shape[1], x.dtype), np.empty(x.shape[1], x.dtype)
    for row in range(first, end):
        values, codes, own = x[row].reshape(-1, 32), payload[row].reshape(-1, 32), scales[row]
        _scale_bytes(x[row], 32, first_of, at, four, sixteen, own)
        for block in range(len(own)):
            if mantissa == 3:
                _to_e4m3(values[block], factors[own[block]], codes[block])
            else:
                _to_e5m2(values[block], factors[own[block]], codes[block])


def quantise(x: Tensor, fmt: BlockFormat, first_of: Tensor, at: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
    """(payload, scales) of bfloat16 or float32 [..., K] as `formats.quantise` makes them.

    fmt: blocks of 16 or 32 elements of E2M1, or of 32 of E4M3 or E5M2. first_of, at: of `fast.step_table`, for each part of x. by: for E2M1 int32
    [parts, 256, 7], of `fast.least_with`; else float32 [parts, 256], what elements under each scale byte are multiplied by.
    """
    payload = torch.empty(*x.shape[:-1], x.shape[-1] // (2 if fmt.packed else 1), dtype=torch.uint8, device=x.device)
    scales = torch.empty(*x.shape[:-1], x.shape[-1] // fmt.block, dtype=torch.uint8, device=x.device)
    parts, word = len(first_of), WORDS[x.element_size()]
    bits = data(x).view(word).reshape(parts, -1, x.shape[-1])
    bys = by.numpy().view(np.uint32).astype(word) if fmt.packed else by.numpy()
    made = [t.view(parts, -1, t.shape[-1]).numpy() for t in (payload, scales)]
    for values, *of_part in zip(bits, first_of.numpy(), at.numpy(), bys, *made):

        def some(first: int, end: int) -> None:
            if fmt.packed:
                _packed(values, *of_part, first, end)  # noqa: B023  done before the next turn
            else:
                _single(values, *of_part, fmt.element.mantissa_bits, first, end)  # noqa: B023

        spread(some, len(values))
    return payload, scales
