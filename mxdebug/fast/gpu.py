"""Kernels for CUDA, compiled by Triton at first use."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..formats import words
from ..layouts.moves import UNITS, Blocks, Origins
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
def _exchange(a, b, c, d):
    """As `fast.cpu_layouts._exchange`."""
    s, t = ((a >> 8) ^ b) & 0x00FF00FF00FF00FF, ((c >> 8) ^ d) & 0x00FF00FF00FF00FF
    a, b, c, d = a ^ (s << 8), b ^ s, c ^ (t << 8), d ^ t
    s, t = ((a >> 16) ^ c) & 0x0000FFFF0000FFFF, ((b >> 16) ^ d) & 0x0000FFFF0000FFFF
    return a ^ (s << 16), b ^ (t << 16), c ^ s, d ^ t


@triton.jit
def _transpose(logical, physical, outer, far, near, rows, slab, many, n, m, back: tl.constexpr, across: tl.constexpr, size: tl.constexpr):
    """As `fast.cpu_layouts._transpose`: a lane moves a block, a program `across` of `far` times size / across of `near`; slab: its blocks."""
    tile, at = tl.program_id(0).to(tl.int64), tl.arange(0, size)
    i, j = tl.program_id(1) * across + at % across, tl.program_id(2) * (size // across) + at // across
    there = (i < n) & (j < m)
    o, before = tile % many, tile // many * slab
    p = logical + before * 4 + tl.load(outer + o) + tl.load(far + i, there, 0) + tl.load(near + j, there, 0)
    q = before + tl.load(outer + many + o) + tl.load(far + n + i, there, 0) + tl.load(near + m + j, there, 0)
    block = physical + q[:, None] * 4 + tl.arange(0, 4)[None, :]
    p0, p1, p2, p3 = p + tl.load(rows), p + tl.load(rows + 1), p + tl.load(rows + 2), p + tl.load(rows + 3)
    half: tl.constexpr = 0xFFFFFFFF
    if back:
        ac, bd = tl.split(tl.reshape(tl.load(block, there[:, None], 0), (size, 2, 2)))  # 16 bytes at once
        a, c = tl.split(ac)
        b, d = tl.split(bd)
        a, b, c, d = _exchange(a, b, c, d)
        tl.store(p0, (a & half) | (b << 32), there)
        tl.store(p1, (c & half) | (d << 32), there)
        tl.store(p2, ((a >> 32) & half) | (b & ~half), there)
        tl.store(p3, ((c >> 32) & half) | (d & ~half), there)
    else:
        a, b, c, d = tl.load(p0, there, 0), tl.load(p1, there, 0), tl.load(p2, there, 0), tl.load(p3, there, 0)
        a, c = (a & half) | (c << 32), ((a >> 32) & half) | (c & ~half)
        b, d = (b & half) | (d << 32), ((b >> 32) & half) | (d & ~half)
        a, b, c, d = _exchange(a, c, b, d)
        tl.store(block, tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (size, 4)), there[:, None])


@functools.lru_cache(maxsize=32)
def _blocks_on_device(blocks: Blocks, device: torch.device) -> list[Tensor]:
    return [torch.from_numpy(np.ascontiguousarray(t)).to(device) for t in (blocks.outer, blocks.far, blocks.near, blocks.rows)]


def transpose(flat: Tensor, blocks: Blocks, back: bool) -> Tensor:
    """As `fast.cpu_layouts.transpose`."""
    out = torch.empty_like(flat)
    logical, physical = (words(t.view(-1), torch.int64) for t in ((out, flat) if back else (flat, out)))
    many, n, m = (t.shape[1] for t in (blocks.outer, blocks.far, blocks.near))
    grid = physical.numel() // (4 * n * m), triton.cdiv(n, 32), triton.cdiv(m, 8)
    with torch.cuda.device(flat.device):
        _transpose[grid](logical, physical, *_blocks_on_device(blocks, flat.device), many * n * m, many, n, m, back, 32, 256, num_warps=4)
    return out


@triton.jit
def _low(a, b, c):
    return ((a << 6) & 0xC0C0C0C0C0C0C0C0) | ((b << 3) & 0x3838383838383838) | (c & 0x0707070707070707)


@triton.jit
def _high(a, b, c, d):
    x = ((a << 4) & 0x8080808080808080) | ((d << 3) & 0x4040404040404040) | ((d << 5) & 0x2020202020202020) | ((b << 1) & 0x1010101010101010)
    return x | ((d << 1) & 0x0C0C0C0C0C0C0C0C) | ((c >> 2) & 0x0202020202020202) | ((a >> 2) & 0x0101010101010101)


@triton.jit
def _nibbles(x, y):
    a = ((x >> 6) & 0x0303030303030303) | ((y << 2) & 0x0404040404040404) | ((y >> 4) & 0x0808080808080808)
    b = ((x >> 3) & 0x0707070707070707) | ((y >> 1) & 0x0808080808080808)
    c = (x & 0x0707070707070707) | ((y << 2) & 0x0808080808080808)
    d = ((y >> 5) & 0x0101010101010101) | ((y >> 1) & 0x0606060606060606) | ((y >> 3) & 0x0808080808080808)
    return a, b, c, d


@triton.jit
def _halves(a, b):
    """Of two words of 64 bits, their low halves as one, and their high ones."""
    return (a & 0xFFFFFFFF) | (b << 32), (a >> 32) | (b & 0xFFFFFFFF00000000)


@triton.jit
def _pair(p, there):
    """Two words of 64 bits, read at once."""
    return tl.split(tl.load(p[:, None] + tl.arange(0, 2)[None, :], there[:, None], 0).to(tl.uint64, bitcast=True))


@triton.jit
def _put(p, a, b, there):
    """The inverse of `_pair`."""
    tl.store(p[:, None] + tl.arange(0, 2)[None, :], tl.join(a, b).to(tl.int64, bitcast=True), there[:, None])


@triton.jit
def _sm90(logical, physical, total, across, back: tl.constexpr, wide: tl.constexpr, size: tl.constexpr):
    """As `fast.cpu_layouts._weave` and `_unweave`: a lane has 16 bytes of row r and 16 of row r + 8, and four words in either half of a tile.
    across: such lanes of a row."""
    first = tl.program_id(0).to(tl.int64) if wide else tl.program_id(0)  # divisions of 64 bits are dear
    at = first * size + tl.arange(0, size)
    there = at < total
    tile = at // across // 8
    upper, left = logical + (at + tile * 8 * across) * 2, physical + (at + tile * 8 * across) * 2
    lower, right = upper + 16 * across, left + 16 * across
    if back:
        ab, cd = _pair(left, there)
        ef, gh = _pair(right, there)
        a, b = _halves(ab, ef)
        c, d = _halves(cd, gh)
        a, b, c, d = _exchange(a, b, c, d)
        e, f, g, h = _nibbles(c, d)
        a, b, c, d = _nibbles(a, b)
        u, v = _halves(a | (e << 4), c | (g << 4))
        x, y = _halves(b | (f << 4), d | (h << 4))
        _put(upper, u, v, there)
        _put(lower, x, y, there)
    else:
        u, v = _pair(upper, there)
        x, y = _pair(lower, there)
        a, c = _halves(u, v)
        b, d = _halves(x, y)
        a, b, c, d = _exchange(_low(a, b, c), _high(a, b, c, d), _low(a >> 4, b >> 4, c >> 4), _high(a >> 4, b >> 4, c >> 4, d >> 4))
        ab, ef = _halves(a, b)
        cd, gh = _halves(c, d)
        _put(left, ab, cd, there)
        _put(right, ef, gh, there)


def sm90_weights(flat: Tensor, columns: int, back: bool) -> Tensor:
    """As `fast.cpu_layouts.sm90_weights`."""
    out, total = torch.empty_like(flat), flat.numel() // 32
    logical, physical = (words(t.view(-1), torch.int64) for t in ((out, flat) if back else (flat, out)))
    with torch.cuda.device(flat.device):
        _sm90[(triton.cdiv(total, 128),)](logical, physical, total, columns // 16, back, flat.numel() >= 1 << 31, 128, num_warps=1)
    return out


@triton.jit
def _scale_bytes(largest, block, part, first_of, at, there, bins: tl.constexpr):
    """Of blocks with these maxima, float32 bits; part: blocks of a global scale."""
    largest = tl.where(largest > 0x7F800000, 0x7FC00000, largest)  # the table knows of one NaN
    of = block // part * bins + (largest >> 16)
    return tl.load(first_of + of, there, 0).to(tl.int32) + (largest >= tl.load(at + of, there, 0)).to(tl.int32)


@triton.jit
def _to_packed(x, first_of, at, steps, payload, scales, total, part, n: tl.constexpr, half: tl.constexpr, bins: tl.constexpr, size: tl.constexpr):
    """`size` blocks of n elements to E2M1. A lane makes a word of eight codes of the 32-bit words of its values: eight, or four that hold two bfloat16 each."""
    block = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    there = block < total
    each: tl.constexpr = 4 if half else 8
    k = tl.arange(0, each)[None, None, :]
    place = block[:, None] * (n // 8) + tl.arange(0, n // 8)[None, :]
    w = tl.load(x + place[:, :, None] * each + k, there[:, None, None], 0)
    low = w & (0x7FFF if half else 0x7FFFFFFF)
    largest = tl.max(tl.max(tl.maximum(low, (w >> 16) & 0x7FFF) if half else low, 2), 1) << (16 if half else 0)
    scale = _scale_bytes(largest, block, part, first_of, at, there, bins)
    tl.store(scales + block, scale.to(tl.uint8), there)
    steps += (block // part * 256 + scale) * 7
    t1, t2, t3, t4 = tl.load(steps, there, -1), tl.load(steps + 1, there, -1), tl.load(steps + 2, there, -1), tl.load(steps + 3, there, -1)
    t5, t6, t7 = tl.load(steps + 4, there, -1), tl.load(steps + 5, there, -1), tl.load(steps + 6, there, -1)
    empty = (t1 < 0)[:, None, None]
    if half:
        # Two comparisons in one: of a magnitude with its sign bit set, less a step, the bit stays set where the step is reached. Of seven such bits in a row
        # the code's lowest is the parity, since they are ones and then zeros; the next is that of every second, the third the one in the middle.
        both = w | -0x7FFF8000
        s2, s4, s6 = both - (t2 * 0x10001)[:, None, None], both - (t4 * 0x10001)[:, None, None], both - (t6 * 0x10001)[:, None, None]
        second = s2 ^ s4 ^ s6
        first = second ^ (both - (t1 * 0x10001)[:, None, None]) ^ (both - (t3 * 0x10001)[:, None, None])
        first ^= (both - (t5 * 0x10001)[:, None, None]) ^ (both - (t7 * 0x10001)[:, None, None])
        code = ((first >> 15) & 0x10001) | ((second >> 14) & 0x20002) | ((s4 >> 13) & 0x40004) | ((w >> 12) & 0x80008)
        code = tl.where(empty, 0, (code | (code >> 12)) & 0xFF) << (8 * k)
    else:
        code = (low >= t1[:, None, None]).to(tl.int32) + (low >= t2[:, None, None]).to(tl.int32) + (low >= t3[:, None, None]).to(tl.int32)
        code += (low >= t4[:, None, None]).to(tl.int32) + (low >= t5[:, None, None]).to(tl.int32) + (low >= t6[:, None, None]).to(tl.int32)
        code += (low >= t7[:, None, None]).to(tl.int32)
        code = tl.where(empty, 0, code | ((w >> 28) & 8)) << (4 * k)
    tl.store(payload + place, tl.sum(code, 2), there[:, None])


@triton.jit
def _to_single(x, first_of, at, factors, payload, scales, total, half: tl.constexpr, mantissa: tl.constexpr, bias: tl.constexpr, most: tl.constexpr,
               bins: tl.constexpr, size: tl.constexpr):  # fmt: skip
    """`size` blocks of 32 elements to E4M3 or E5M2, as fast.cpu_quantise."""
    block = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
    there = block < total
    place = block[:, None] * 32 + tl.arange(0, 32)[None, :]
    given = tl.load(x + place, there[:, None], 0).to(tl.int32) << (16 if half else 0)
    magnitude = given & 0x7FFFFFFF
    scale = _scale_bytes(tl.max(magnitude, 1), block, total, first_of, at, there, bins)
    tl.store(scales + block, scale.to(tl.uint8), there)
    b = (magnitude.to(tl.float32, bitcast=True) * tl.load(factors + scale, there, 0.0)[:, None]).to(tl.int32, bitcast=True) & 0x7FFFFFFF
    m = tl.minimum(b, most)
    drop: tl.constexpr = 23 - mantissa
    normal: tl.constexpr = (128 - bias) << 23
    added: tl.constexpr = (151 - bias - mantissa) << 23
    large = (m - ((127 - bias) << 23) + ((1 << (drop - 1)) - 1) + ((m >> drop) & 1)) >> drop
    add = tl.full(b.shape, added, tl.int32).to(tl.float32, bitcast=True)
    small = (tl.minimum(b, normal).to(tl.float32, bitcast=True) + add).to(tl.int32, bitcast=True) - added
    code = tl.where(b > 0x7F800000, 0x7F, tl.where(m >= normal, large, small)) | ((given >> 24) & 0x80)
    tl.store(payload + place, code.to(tl.uint8), there[:, None])


def quantise(x: Tensor, fmt: BlockFormat, first_of: Tensor, at: Tensor, by: Tensor) -> tuple[Tensor, Tensor]:
    """As `fast.cpu_quantise.quantise`."""
    payload = torch.empty(*x.shape[:-1], x.shape[-1] // (2 if fmt.packed else 1), dtype=torch.uint8, device=x.device)
    scales = torch.empty(*x.shape[:-1], x.shape[-1] // fmt.block, dtype=torch.uint8, device=x.device)
    total, e, half = scales.numel(), fmt.element, x.element_size() == 2
    with torch.cuda.device(x.device):  # sizes and warps: the fastest of those that were tried on an H200
        if fmt.packed:
            size, given, made = 128 if half else 2048 // fmt.block, words(x.view(-1).view(torch.uint8), torch.int32), payload.view(-1).view(torch.int32)
            part, grid = total // len(first_of), (triton.cdiv(total, size),)
            _to_packed[grid](given, first_of, at, by, made, scales, total, part, fmt.block, half, BINS, size, num_warps=4)
        else:
            most, given = int(torch.tensor(e.max).view(torch.int32)), x.view(torch.int16 if half else torch.int32)
            _to_single[(triton.cdiv(total, 64),)](given, first_of, at, by, payload, scales, total, half, e.mantissa_bits, e.bias, most, BINS, 64, num_warps=1)
    return payload, scales
