"""Changes of the bytes of an operand, value by value or block by block. No recipe has one: each is a fault."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats import E4M3, words


@dataclass(frozen=True)
class Values:
    """Change the value of every byte by a table of 256."""

    name: str
    table: tuple[int, ...]

    @property
    def lossless(self) -> bool:
        return len(set(self.table)) == 256

    def apply(self, t: Tensor) -> Tensor:
        return _translated(t, self.table)

    def undo(self, t: Tensor) -> Tensor:
        """The inverse; where bytes were merged, the lowest byte that leads there."""
        inverse = torch.zeros(256, dtype=torch.uint8)
        for source in range(255, -1, -1):
            inverse[self.table[source]] = source
        return _translated(t, tuple(inverse.tolist()))


SWAP_NIBBLES = Values("nibbles swapped", tuple((b & 15) << 4 | b >> 4 for b in range(256)))
# What `.to(torch.uint8)` does to a float8_e8m0fnu scale: the number 2^(b-127) is truncated to an integer, modulo 256.
CAST_BY_VALUE = Values("cast by value", tuple(2 ** (b - 127) % 256 if b >= 127 else 0 for b in range(256)))
# The same for a float8_e4m3fn scale; NaN becomes 0.
CAST_E4M3_BY_VALUE = Values("E4M3 cast by value", tuple(int(v) % 256 if v == v else 0 for v in E4M3.table().tolist()))
# What `.to(torch.float8_e4m3fn)` does to a scale byte: the byte as a number, rounded to E4M3.
CAST_TO_E4M3 = Values("cast to E4M3", tuple(E4M3.encode(torch.arange(256.0)).tolist()))


def _translated(t: Tensor, table: tuple[int, ...]) -> Tensor:
    """uint8 bytes of any shape by a table of 256. Two bytes a lookup where they come in pairs: several times faster."""
    if t.numel() % 2:
        return torch.tensor(table, dtype=torch.uint8, device=t.device)[t.long()]
    pairs = words(t.flatten(), torch.int16).int() & 0xFFFF
    return _pairs(table).to(t.device).index_select(0, pairs).view(torch.uint8).reshape(t.shape)


@functools.lru_cache(maxsize=64)  # all that a scale is tried with: 128 KiB each
def _pairs(table: tuple[int, ...]) -> Tensor:
    """int16 [65536]: what two bytes, as one number, become."""
    one, both = torch.tensor(table, dtype=torch.int32), torch.arange(1 << 16)
    return (one[both & 255] | one[both >> 8] << 8).to(torch.int16)


@dataclass(frozen=True)
class SplitHalves:
    """Codes of a block as GGML's types store them: byte j of a block holds the elements j and j + block/2, not 2j and 2j + 1.

    Source: ggml-quants.c, dequantize_row_mxfp4.
    """

    block: int
    lossless: bool = True

    @property
    def name(self) -> str:
        return f"codes split in halves of {self.block}"

    def apply(self, t: Tensor) -> Tensor:
        """uint8 [..., bytes], whole blocks."""
        low, high = torch.stack([t & 15, t >> 4], -1).flatten(-2).unflatten(-1, (-1, self.block)).chunk(2, -1)
        return (low | high << 4).flatten(-2)

    def undo(self, t: Tensor) -> Tensor:
        bytes_ = t.unflatten(-1, (-1, self.block // 2))
        codes = torch.cat([bytes_ & 15, bytes_ >> 4], -1).unflatten(-1, (-1, 2))
        return (codes[..., 0] | codes[..., 1] << 4).flatten(-2)


def _e4m3(name: str, change: Callable[[float], float]) -> Values:
    """A change of E4M3 scales as numbers; codes of NaN and of negative numbers stay."""
    old = E4M3.table()
    new = E4M3.encode(torch.tensor([change(v) if v > 0 else 0.0 for v in old.tolist()], dtype=torch.float32))
    return Values(name, tuple(int(n) if v > 0 else b for b, (v, n) in enumerate(zip(old.tolist(), new.tolist()))))


def _ceil2(v: float) -> int:
    """The smallest e with 2^e >= v."""
    mantissa, e = math.frexp(v)
    return e - 1 if mantissa == 0.5 else e


SHIFTS = tuple(d for n in range(1, 9) for d in (n, -n))  # powers of two by which scales are tried to be off
# E8M0: another exponent is the byte plus a constant. E4M3: the number times 2^d, rounded and saturated as E4M3 is.
E8M0_SHIFTED = {d: Values(f"scales times 2^{d}", tuple(b if b == 255 else min(max(b + d, 0), 254) for b in range(256))) for d in SHIFTS}
E4M3_SHIFTED = {d: _e4m3(f"scales times 2^{d}", lambda v, d=d: v * 2.0**d) for d in SHIFTS}
# What a consumer of powers of two makes of E4M3 scales if the codes are not requantised: the next power of two, still as E4M3.
E4M3_ROUNDED_UP = _e4m3("scales rounded up to powers of two", lambda v: 2.0 ** _ceil2(v))
# The same power of two as an E8M0 byte, which a reader of E4M3 takes for another number.
E4M3_AS_E8M0 = Values("scales as E8M0 bytes", tuple(127 + _ceil2(v) if v > 0 else b for b, v in enumerate(E4M3.table().tolist())))
# The number of an E8M0 scale, stored as E4M3 (saturated at 448, 0 below 2^-10) and read as an exponent.
E8M0_AS_E4M3 = Values(
    "scales as E4M3 bytes", tuple(E4M3.encode(torch.tensor([2.0 ** (b - 127) if b < 137 else 448.0 for b in range(256)])).tolist())
)
# Kernels that decode scales to fp16 and flush its subnormals: 2^-15 and below.
E8M0_FLUSHED = Values("scales of 2^-15 and less became 0", tuple(0 if b <= 112 else b for b in range(256)))
# E4M3's own subnormals, below 2^-6: a decoder without them, or one that has flushed them.
E4M3_FLUSHED = Values("scales below 2^-6 became 0", tuple(0 if 0 < b < 8 else b for b in range(256)))
