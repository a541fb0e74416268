"""Values to codes on the CPU. What a format fixes is a constant of its kernel: shifts by variables would leave the compiler without vectors."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from . import spread
from .compiled import WORDS, compiled, data

if TYPE_CHECKING:
    from ..formats import BlockFormat

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
def _divide(value: np.ndarray, step: float) -> None:
    for i in range(len(value)):
        value[i] = np.float32(np.float64(value[i]) / step)


@functools.cache
def _kernel(fmt: BlockFormat) -> Callable[..., None]:
    n, exact, packed = fmt.block, not fmt.outer, fmt.packed
    mantissa, bias, sign = fmt.element.mantissa_bits, fmt.element.bias, _U(fmt.element.bits - 1)
    drop, half = _U(23 - mantissa), _U((1 << (22 - mantissa)) - 1)
    normal, lowered = _U((128 - bias) << 23), _U((127 - bias) << 23)  # the least normal number, and what its exponent is lowered by
    add, added = np.float32(2.0 ** (24 - bias - mantissa)), _U((151 - bias - mantissa) << 23)  # its last place is the step of the type's subnormals
    most = _U(torch.tensor(fmt.element.max).view(torch.int32).item())

    @compiled
    def maxima(bits: np.ndarray, largest: np.ndarray) -> None:
        """Of each block the largest magnitude; inf, or one NaN, where there is one."""
        for block in range(len(largest)):
            most = _U(0)
            for i in range(n):
                m = _U(bits[block, i] & _MAGNITUDE)
                most = _U(m if m > most else most)
            largest[block] = _NAN if most > _INF else most

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

    @compiled
    def quantise(x: np.ndarray, first_of: np.ndarray, at: np.ndarray, steps: np.ndarray, payload: np.ndarray, scales: np.ndarray, first: int, end: int) -> None:
        columns = x.shape[1]
        bits, small, code = np.empty(columns, dtype=np.uint32), np.empty(columns, dtype=np.float32), np.empty(columns, dtype=np.uint8)
        blocks, largest = bits.reshape(-1, n), np.empty(scales.shape[1], dtype=np.uint32)
        values = blocks.view(np.float32)
        for row in range(first, end):
            if x.itemsize == 2:
                _widen(x[row], bits)
            else:
                bits[:] = x[row]
            maxima(blocks, largest)
            for block in range(scales.shape[1]):
                bin = largest[block] >> _U(16)
                scale = first_of[bin] + (largest[block] >= at[bin])
                scales[row, block] = scale
                step = steps[scale]
                if step == 0.0:
                    blocks[block] = _U(0)
                elif exact:  # a power of two: the product is the quotient
                    _multiply(values[block], np.float32(1.0 / step))
                else:
                    _divide(values[block], step)
            if packed:
                round(bits, small, code)
                _pack(code.view(np.uint16), payload[row])
            else:
                round(bits, small, payload[row])

    return quantise


def quantise(x: Tensor, fmt: BlockFormat, first_of: Tensor, at: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
    """(payload, scales) of bfloat16 or float32 [..., K] as `formats.quantise` makes them.

    first_of, at: of `fast.steps`, for each part; steps float64 [parts, 256]: what elements under each scale byte are divided by, 0 where they become zeros.
    """
    payload = torch.empty(*x.shape[:-1], x.shape[-1] // (2 if fmt.packed else 1), dtype=torch.uint8)
    scales = torch.empty(*x.shape[:-1], x.shape[-1] // fmt.block, dtype=torch.uint8)
    parts, kernel = len(first_of), _kernel(fmt)
    bits = data(x).view(WORDS[x.element_size()]).reshape(parts, -1, x.shape[-1])
    arrays: list[Any] = [t.numpy() for t in (first_of, at, steps)] + [t.view(parts, -1, t.shape[-1]).numpy() for t in (payload, scales)]
    for of_part in zip(bits, *arrays):
        spread(lambda first, end: kernel(*of_part, first, end), bits.shape[1])  # noqa: B023  done before the next turn
    return payload, scales
