"""Kernels for CUDA, compiled by Triton at first use."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import words
from ..layouts.layout import UNITS, Origins
from .steps import BINS

if TYPE_CHECKING:
    from ..formats import BlockFormat, BlockTensor, ElementCodec, ScaleCodec


_SIZE = 512  # words of 32 bits, or bytes, of one program: whole blocks of every format


@triton.jit
def _packed(payload, scales, table, outer, out, total, part, each: tl.constexpr, has_outer: tl.constexpr, whole: tl.constexpr, size: tl.constexpr):
    """Words of eight E2M1 codes, so that a lane writes 16 bytes of bf16. each: words of a block scale; part: words of a global scale."""
    first = tl.program_id(0).to(tl.int64) * size
    at, eight = tl.arange(0, size), tl.arange(0, 8)
    there = first + at < total
    code = tl.load(payload + first + at, there, 0)[:, None] >> (4 * eight)[None, :]
    # The bits of an E2M1 code are those of an fp16 that is 2^14 times smaller, subnormals too.
    value = (((code & 8) << 12) | ((code & 7) << 9)).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32) * 16384.0
    value *= tl.load(table + tl.load(scales + (first + at) // each, there, 0).to(tl.int32))[:, None]
    if has_outer:
        # One for the program where `whole`, since the division of each is dear.
        value *= tl.load(outer + first // part) if whole else tl.load(outer + (first + at) // part, there, 0.0)[:, None]
    tl.store(out + first * 8 + at[:, None] * 8 + eight[None, :], value.to(out.dtype.element_ty), there[:, None])


@triton.jit
def _single(payload, scales, table, elements, out, total, each: tl.constexpr, size: tl.constexpr):
    """One element a byte, by a table. No format with such elements has a global scale."""
    first = tl.program_id(0).to(tl.int64) * size
    at = tl.arange(0, size)
    there = first + at < total
    value = tl.load(elements + tl.load(payload + first + at, there, 0).to(tl.int32))
    value *= tl.load(table + tl.load(scales + first // each + at // each, there, 0).to(tl.int32))
    tl.store(out + first + at, value.to(out.dtype.element_ty), there)


@functools.cache
def _on(codec: ScaleCodec | ElementCodec, device: torch.device) -> Tensor:
    """The codec's table on a device: copying it each time would take longer than the kernel."""
    return codec.table().to(device)


def dequantise(t: BlockTensor, dtype: torch.dtype, codec: ScaleCodec, outer: Tensor | None, out: Tensor | None) -> Tensor:
    """As `BlockTensor.dequantise`. outer: float32 [n], a global scale for each n-th part, or None."""
    device, packed = t.payload.device, t.format.packed
    out = torch.empty(t.shape, dtype=dtype, device=device) if out is None else out
    payload, size = (words(t.payload, torch.int32), _SIZE) if packed else (t.payload, 4 * _SIZE)
    total, each, table = payload.numel(), t.format.block // (8 if packed else 1), _on(codec, device)
    part, grid = total if outer is None else total // outer.numel(), (triton.cdiv(total, size),)
    with torch.cuda.device(device):
        if packed:
            _packed[grid](payload, t.scales, table, table if outer is None else outer, out, total, part, each, outer is not None, part % size == 0, size)
        else:
            _single[grid](payload, t.scales, table, _on(t.format.element, device), out, total, each, size)
    return out


@triton.jit
def _move(source, target, outer, inner, n, many, size: tl.constexpr):
    """As `fast.cpu.move`: a program writes up to `size` units, one after the other."""
    tile = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * size + tl.arange(0, size)
    there = at < n
    start = tile // many * many * n + tl.load(outer + tile % many)
    tl.store(target + tile * n + at, tl.load(source + start + tl.load(inner + at, there, 0), there), there)


@functools.lru_cache(maxsize=32)
def _on_device(origins: Origins, device: torch.device) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(origins.outer).to(device), torch.from_numpy(origins.inner).int().to(device)


def move(flat: Tensor, origins: Origins) -> Tensor:
    """As `fast.cpu.move`."""
    out = torch.empty_like(flat)
    source, target = (words(t.view(-1), UNITS[origins.unit]) for t in (flat, out))
    outer, inner = _on_device(origins, flat.device)
    n = len(inner)
    size = min(1024 if origins.unit == 1 else 4096, triton.next_power_of_2(n))  # with four warps the fastest on an H200
    with torch.cuda.device(flat.device):
        _move[(target.numel() // n, triton.cdiv(n, size))](source, target, outer, inner, n, len(outer), size, num_warps=4)
    return out


@triton.jit
def _sm90(logical, physical, total, columns, back: tl.constexpr, wide: tl.constexpr, size: tl.constexpr):
    """The SM90 weight interleave: a lane has eight bytes of row r and eight of row r + 8 of a tile, which make four words (fast.cpu has the fields)."""
    first = tl.program_id(0).to(tl.int64) if wide else tl.program_id(0)  # divisions of 64 bits are dear
    at = first * size + tl.arange(0, size)  # the number of the four words, in physical order
    there = at < total
    across = columns // 16
    column, rest = at % across, at // across
    row, half, tile = rest & 7, (rest >> 3) & 1, rest >> 4
    upper = ((tile * 16 + row) * columns + column * 16 + half * 8) >> 3  # in eights of bytes
    lower = upper + columns  # eight rows on
    lane = tl.arange(0, 4)[None, :]
    words = physical + at[:, None] * 4 + lane
    if back:
        w = tl.load(words, there[:, None], 0)
        a = ((w >> 24) & 0x80) | ((w >> 18) & 0x70) | ((w >> 12) & 0x08) | ((w >> 6) & 0x07)
        b = ((w >> 21) & 0x80) | ((w >> 15) & 0x70) | ((w >> 9) & 0x08) | ((w >> 3) & 0x07)
        c = ((w >> 18) & 0x80) | ((w >> 12) & 0x70) | ((w >> 6) & 0x08) | (w & 0x07)
        d = ((w >> 23) & 0x80) | ((w >> 25) & 0x10) | ((w >> 21) & 0x60) | ((w >> 11) & 0x08) | ((w >> 13) & 0x01) | ((w >> 9) & 0x06)
        shift = lane.to(tl.int64) * 8
        x = tl.sum((a.to(tl.int64) << shift) | (c.to(tl.int64) << (shift + 32)), 1)
        y = tl.sum((b.to(tl.int64) << shift) | (d.to(tl.int64) << (shift + 32)), 1)
        tl.store(logical + upper, x, there)
        tl.store(logical + lower, y, there)
    else:
        x, y = tl.load(logical + upper, there, 0)[:, None], tl.load(logical + lower, there, 0)[:, None]
        shift = lane * 8
        a, c = x.to(tl.int32) >> shift, (x >> 32).to(tl.int32) >> shift
        b, d = y.to(tl.int32) >> shift, (y >> 32).to(tl.int32) >> shift
        w = ((a & 0x80) << 24) | ((a & 0x70) << 18) | ((a & 0x08) << 12) | ((a & 0x07) << 6)
        w |= ((b & 0x80) << 21) | ((b & 0x70) << 15) | ((b & 0x08) << 9) | ((b & 0x07) << 3)
        w |= ((c & 0x80) << 18) | ((c & 0x70) << 12) | ((c & 0x08) << 6) | (c & 0x07)
        w |= ((d & 0x80) << 23) | ((d & 0x10) << 25) | ((d & 0x60) << 21) | ((d & 0x08) << 11) | ((d & 0x01) << 13) | ((d & 0x06) << 9)
        tl.store(words, w, there[:, None])


def sm90_weights(flat: Tensor, columns: int, back: bool) -> Tensor:
    """As `fast.cpu.sm90_weights`."""
    out, total = torch.empty_like(flat), flat.numel() // 16
    logical, physical = (out, flat) if back else (flat, out)
    grid, arrays = (triton.cdiv(total, 128),), (words(logical.view(-1), torch.int64), words(physical.view(-1), torch.int32))
    with torch.cuda.device(flat.device):
        _sm90[grid](*arrays, total, columns, back, flat.numel() >= 1 << 31, 128, num_warps=1)  # one warp and 128: the fastest of those that were tried on an H200
    return out


@triton.jit
def _quantise(x, first_of, at, by, payload, scales, total, part, n: tl.constexpr, packed: tl.constexpr, half: tl.constexpr, mantissa: tl.constexpr, bias: tl.constexpr,
              most: tl.constexpr, bins: tl.constexpr, size: tl.constexpr):  # fmt: skip
    """`size` blocks of n elements, given as bits, of bfloat16 if `half`; part: blocks of a global scale. fast.cpu_quantise says what is computed."""
    block = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    there = block < total
    given = tl.load(x + block[:, None] * n + tl.arange(0, n)[None, :], there[:, None], 0).to(tl.int32)
    bits = given & (0x7FFF if half else 0x7FFFFFFF)
    largest = tl.max(bits, 1) << (16 if half else 0)
    largest = tl.where(largest > 0x7F800000, 0x7FC00000, largest)
    of = block // part * bins + (largest >> 16)
    scale = tl.load(first_of + of, there, 0).to(tl.int32) + (largest >= tl.load(at + of, there, 0)).to(tl.int32)
    tl.store(scales + block, scale.to(tl.uint8), there)
    if packed:
        steps = by + (block // part * 256 + scale) * 7
        least = tl.load(steps, there, -1)[:, None]
        code = (bits >= least).to(tl.int32)
        for k in tl.static_range(1, 7):
            code += (bits >= tl.load(steps + k, there, -1)[:, None]).to(tl.int32)
        code |= (given >> (12 if half else 28)) & 8
        code = tl.where(least < 0, 0, code)
        low, high = tl.split(tl.reshape(code, (size, n // 2, 2)))
        tl.store(payload + block[:, None] * (n // 2) + tl.arange(0, n // 2)[None, :], (low | (high << 4)).to(tl.uint8), there[:, None])
    else:
        factor = tl.load(by + block // part * 256 + scale, there, 0.0)[:, None]
        b = (((bits << 16) if half else bits).to(tl.float32, bitcast=True) * factor).to(tl.int32, bitcast=True) & 0x7FFFFFFF
        m = tl.minimum(b, most)
        drop: tl.constexpr = 23 - mantissa
        normal: tl.constexpr = (128 - bias) << 23
        added: tl.constexpr = (151 - bias - mantissa) << 23
        large = (m - ((127 - bias) << 23) + ((1 << (drop - 1)) - 1) + ((m >> drop) & 1)) >> drop
        add = tl.full(b.shape, added, tl.int32).to(tl.float32, bitcast=True)
        small = (tl.minimum(b, normal).to(tl.float32, bitcast=True) + add).to(tl.int32, bitcast=True) - added
        code = tl.where(b > 0x7F800000, 0x7F, tl.where(m >= normal, large, small))
        code |= (given >> (8 if half else 24)) & 0x80
        tl.store(payload + block[:, None] * n + tl.arange(0, n)[None, :], code.to(tl.uint8), there[:, None])


def quantise(x: Tensor, fmt: BlockFormat, first_of: Tensor, at: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
    """As `fast.cpu_quantise.quantise`."""
    payload = torch.empty(*x.shape[:-1], x.shape[-1] // (2 if fmt.packed else 1), dtype=torch.uint8, device=x.device)
    scales = torch.empty(*x.shape[:-1], x.shape[-1] // fmt.block, dtype=torch.uint8, device=x.device)
    total, e, half = scales.numel(), fmt.element, x.element_size() == 2
    most = int(torch.tensor(e.max).view(torch.int32))
    with torch.cuda.device(x.device):
        _quantise[(triton.cdiv(total, 64),)](x.view(torch.int16 if half else torch.int32), first_of, at, by, payload, scales, total, total // len(first_of),
                                             fmt.block, fmt.packed, half, e.mantissa_bits, e.bias, most, BINS, 64)  # fmt: skip
    return payload, scales
