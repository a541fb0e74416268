"""Kernels for the CPU, compiled by numba at first use and kept on disk. Plain loops: the compiler makes vectors of them where it can."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from . import spread
from .compiled import WORDS, compiled, data
from .cpu_layouts import move as move
from .cpu_layouts import sm90_weights as sm90_weights
from .cpu_layouts import transpose as transpose
from .cpu_quantise import quantise as quantise

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
