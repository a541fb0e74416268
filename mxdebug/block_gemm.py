"""A GEMM whose block scales are powers of two, summed as a tensor core sums it: block by block, each sum cut to float32."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from . import fast
from .formats import BlockTensor, ElementCodec, ScaleCodec, byte_values, words

_SUMS = 1 << 20  # sums of blocks that are held at a time: some MB, whatever the layer's size
_BITS = 15       # bits of an activation that one float32 sum takes exactly, see `_parts`


FEW = 8  # tokens up to which a compiled loop over rows beats a BLAS on dequantised weights


def block_gemm(x: Tensor, weight: BlockTensor, scale: ScaleCodec) -> Tensor:
    """x [T, K] times a weight [N, K] of an MX format, transposed: float32 [T, N].

    Each sum of one block's products is exact, then cut to float32 (tensor cores do not round), multiplied by the block's scale, which is a
    power of two, and added to the float32 total in the order of K.
    """
    block = weight.format.block
    if (compiled := fast.on_cpu(weight.payload, weight.scales, x)) is not None and 0 < x.shape[0] <= FEW:
        return compiled.block_gemm(x.double(), weight.payload, weight.scales, byte_values(weight.format.element).double(), scale.table())
    blocks = x.unflatten(-1, (-1, block)).transpose(0, 1)  # [blocks, T, block]
    parts = _parts(blocks.float()) if weight.format.packed and x.device.type == "cpu" and x.dtype != torch.float64 else None
    rows = max(32, _SUMS // (blocks.shape[0] * max(1, x.shape[0])))
    out = []
    for first in range(0, weight.payload.shape[0], rows):
        some = weight[first: first + rows]
        if parts is None:
            elements = some.elements().double()
            sums = torch.bmm(blocks.double(), elements.unflatten(-1, (-1, block)).permute(1, 2, 0))
        else:
            elements = _elements(some.payload, weight.format.element)
            sums = torch.bmm(parts, elements.unflatten(-1, (-1, block)).permute(1, 2, 0))
            sums = sums.unflatten(1, (-1, x.shape[0])).double().sum(1)
        sums = cut(sums) * scale.decode(some.scales).T[:, None]  # [blocks, T, rows]
        total = sums[0]
        for b in range(1, len(sums)):
            total = total + sums[b]
        out.append(total)
    return torch.cat(out, dim=1)


def cut(x: Tensor) -> Tensor:
    """float64 -> float32 by dropping bits: towards zero."""
    return (x.view(torch.int64) & ~((1 << 29) - 1)).view(torch.float64).float()


def _parts(blocks: Tensor) -> Tensor | None:
    """Activations [blocks, T, 32] as up to three addends of at most 15 bits each, one below the other [blocks, parts * T, 32]; else None.

    An E2M1 element is a multiple of 0.5 up to 6, so it has 12 steps. 32 products of 15 bits with it stay below 2^15 * 12 * 32 < 2^24 steps: a
    float32 sum of them is exact, in whatever order a BLAS adds, and takes half the time and memory of a float64 one. float64 holds the sum of
    the parts.
    """
    if torch.get_float32_matmul_precision() != "highest":
        return None  # somebody allowed float32 products to be rounded
    exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True))[1]
    if not torch.isfinite(blocks).all() or bool((exponent < -60).any()) or bool((exponent > 60).any()):
        return None
    step, rest, parts = torch.exp2((exponent - _BITS).float()), blocks, []
    while len(parts) < 3 and (not parts or bool(rest.any())):
        parts.append(torch.trunc(rest / step) * step)
        rest = rest - parts[-1]
        step = step * 2.0 ** -_BITS
    return None if bool(rest.any()) else torch.cat(parts, dim=1)


def _elements(payload: Tensor, element: ElementCodec) -> Tensor:
    """Payload [N, K/2] -> float32 [N, K]: two bytes, so four codes, a lookup."""
    pairs = words(payload, torch.int16).int() & 0xFFFF
    return torch.nn.functional.embedding(pairs, _quads(element)).flatten(-2)


@functools.cache
def _quads(element: ElementCodec) -> Tensor:
    pairs = byte_values(element)
    return torch.cat([pairs.repeat(256, 1), pairs.repeat_interleave(256, dim=0)], dim=-1)
