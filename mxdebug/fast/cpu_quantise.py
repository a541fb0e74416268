"""Values to codes on the CPU. What a format fixes is a constant of its kernel: shifts by variables would leave the compiler without vectors."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..formats import E2M1, E4M3, E5M2
from . import spread
from .compiled import WORDS, compiled, data

if TYPE_CHECKING:
    from ..formats import BlockFormat, ElementCodec

_U = np.uint32
_MAGNITUDE, _INF, _NAN, _ONE = _U(0x7FFFFFFF), _U(0x7F800000), _U(0x7FC00000), _U(1)


@compiled
def _widen(x: np.ndarray, bits: np.ndarray) -> None:
    """bfloat16 to float32."""
    for i in range(len(bits)):
        bits[i] = _U(x[i]) << _U(16)


@compiled
def _pack(pairs: np.ndarray, payload: np.ndarray) -> None:
    for i in range(len(pairs)):
        payload[i] = (pairs[i] & np.uint16(0xF)) | (pairs[i] >> np.uint16(4))


# Functions of their own, since the compiler makes vectors of a loop over one array, but not of one over a row within a loop over rows.


@compiled
def _multiply(value: np.ndarray, factor: float) -> None:
    for i in range(len(value)):
        value[i] *= factor


@compiled
def _divide(value: np.ndarray, divisor: float) -> None:
    for i in range(len(value)):
        value[i] = np.float32(np.float64(value[i]) / divisor)


# One function for each constant, made of numbers alone: numba finds such a one again on disk, but not one that is made of other functions.


def _maxima(n: int) -> Callable[..., None]:
    @compiled
    def maxima(bits: np.ndarray, largest: np.ndarray) -> None:
        """Of each block of n the largest magnitude; inf, or one NaN, where there is one."""
        for block in range(len(largest)):
            most = _U(0)
            for i in range(n):
                m = _U(bits[block, i] & _MAGNITUDE)
                most = _U(m if m > most else most)
            largest[block] = _NAN if most > _INF else most

    return maxima


def _rounding(element: ElementCodec) -> Callable[..., None]:
    mantissa, bias, sign = element.mantissa_bits, element.bias, _U(element.bits - 1)
    drop, half = _U(23 - mantissa), _U((1 << (22 - mantissa)) - 1)
    normal, lowered = _U((128 - bias) << 23), _U((127 - bias) << 23)  # the least normal number, and what its exponent is lowered by
    add, added = np.float32(2.0 ** (24 - bias - mantissa)), _U((151 - bias - mantissa) << 23)  # its last place is the step of the type's subnormals
    most = _U(torch.tensor(element.max).view(torch.int32).item())

    @compiled
    def round(bits: np.ndarray, small: np.ndarray, code: np.ndarray) -> None:
        """float32 bits -> codes, to nearest, ties to even. Each sum is cut to 32 bits at once, as the compiler cannot know that it may."""
        sums = small.view(np.uint32)
        for i in range(len(bits)):
            b = _U(bits[i] & _MAGNITUDE)
            sums[i] = b if b < normal else normal
        for i in range(len(bits)):
            small[i] += add
        for i in range(len(bits)):
            b = _U(bits[i] & _MAGNITUDE)
            m = b if b < most else most
            c = _U(_U(_U(_U(m - lowered) + half) + _U(_U(m >> drop) & _ONE)) >> drop)
            c = c if m >= normal else _U(sums[i] - added)
            c = _U(0x7F) if b > _INF else c
            sums[i] = _U(c | _U(_U(bits[i] >> _U(31)) << sign))
        for i in range(len(bits)):
            code[i] = sums[i]

    return round


BLOCKS = (16, 32)
_maxima_16, _maxima_32 = (_maxima(n) for n in BLOCKS)
_to_e2m1, _to_e4m3, _to_e5m2 = (_rounding(element) for element in (E2M1, E4M3, E5M2))


@compiled
def _quantise(x: np.ndarray, first_of: np.ndarray, at: np.ndarray, divisors: np.ndarray, payload: np.ndarray, scales: np.ndarray, exact: bool, mantissa: int,
              first: int, end: int) -> None:  # fmt: skip
    columns, blocks = x.shape[1], scales.shape[1]
    bits, small, code = np.empty(columns, dtype=np.uint32), np.empty(columns, dtype=np.float32), np.empty(columns, dtype=np.uint8)
    largest, by_block = np.empty(blocks, dtype=np.uint32), bits.reshape(blocks, -1)
    values = by_block.view(np.float32)
    for row in range(first, end):
        if x.itemsize == 2:
            _widen(x[row], bits)
        else:
            bits[:] = x[row]
        if by_block.shape[1] == 16:
            _maxima_16(by_block, largest)
        else:
            _maxima_32(by_block, largest)
        for block in range(blocks):
            bin = largest[block] >> _U(16)
            scale = first_of[bin] + (largest[block] >= at[bin])
            scales[row, block] = scale
            divisor = divisors[scale]
            if divisor == 0.0:
                by_block[block] = _U(0)
            elif exact:  # a power of two: the product is the quotient
                _multiply(values[block], np.float32(1.0 / divisor))
            else:
                _divide(values[block], divisor)
        if mantissa == 1:
            _to_e2m1(bits, small, code)
            _pack(code.view(np.uint16), payload[row])
        elif mantissa == 3:
            _to_e4m3(bits, small, payload[row])
        else:
            _to_e5m2(bits, small, payload[row])


def quantise(x: Tensor, fmt: BlockFormat, first_of: Tensor, at: Tensor, divisors: Tensor) -> tuple[Tensor, Tensor]:
    """(payload, scales) of bfloat16 or float32 [..., K] as `formats.quantise` makes them; fmt has blocks of 16 or 32 elements of E2M1, E4M3 or E5M2.

    first_of, at: of `fast.step_table`, for each part; divisors float64 [parts, 256]: what elements under each scale byte are divided by, 0 where they become zeros.
    """
    payload = torch.empty(*x.shape[:-1], x.shape[-1] // (2 if fmt.packed else 1), dtype=torch.uint8, device=x.device)
    scales = torch.empty(*x.shape[:-1], x.shape[-1] // fmt.block, dtype=torch.uint8, device=x.device)
    parts = len(first_of)
    bits = data(x).view(WORDS[x.element_size()]).reshape(parts, -1, x.shape[-1])
    arrays: list[Any] = [t.numpy() for t in (first_of, at, divisors)] + [t.view(parts, -1, t.shape[-1]).numpy() for t in (payload, scales)]
    for of_part in zip(bits, *arrays):
        spread(lambda first, end: _quantise(*of_part, not fmt.outer, fmt.element.mantissa_bits, first, end), bits.shape[1])  # noqa: B023  done before the next turn
    return payload, scales
