"""A rule from a block's maximum to its scale byte, as a table that a kernel can read: the rule itself stays written once, in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BINS = 1 << 15
"""Of the bits of a float32 that is not negative, all but the lowest 16: the numbers that bf16 has."""
_NEVER = (1 << 31) - 1


def steps(rule: Callable[[Tensor], Tensor], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """(first, at): uint8 [parts, BINS], the byte of the least number of each bin, and int32 [parts, BINS], the bits of the least float32 of the bin that
    has the next byte.

    rule: float32 [1, n] -> uint8 [parts, n], and it never falls. dtype: bfloat16 has one number in a bin. None where a bin has more than one step.
    """
    bits = torch.arange(BINS, dtype=torch.int32, device=device)[None] << 16

    def of(bits: Tensor) -> Tensor:
        return rule(bits.view(torch.float32))

    first = of(bits)
    at = torch.full(first.shape, _NEVER, dtype=torch.int32, device=device)
    if dtype == torch.bfloat16:
        return first, at
    rise = of(bits | 0xFFFF).int() - first.int()
    rise[:, 0x7F80:] = 0  # inf and NaN: a kernel asks for inf itself, and for one NaN
    if ((rise != 0) & (rise != 1)).any():
        return None
    for part, rows in enumerate(rise):
        bin = rows.nonzero().flatten()
        low, high = bin << 16, (bin << 16) | 0xFFFF  # the first has the lower byte, the last the upper one
        for _ in range(16):
            middle = (low + high) // 2
            upper = _of_part(rule, middle.int(), part) > first[part, bin]
            low, high = torch.where(upper, low, middle), torch.where(upper, middle, high)
        at[part, bin] = high.int()
    return first, at


def _of_part(rule: Callable[[Tensor], Tensor], bits: Tensor, part: int) -> Tensor:
    return rule(bits[None].view(torch.float32))[part]
