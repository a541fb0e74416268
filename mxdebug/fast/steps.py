"""Rules that never fall, from a block's maximum to its scale byte and from a magnitude to its code, as tables that a kernel can read: the rules themselves stay
written once, in torch."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BINS = 1 << 15
"""Of the bits of a float32 that is not negative, all but the lowest 16: the numbers that bf16 has."""
_NEVER = (1 << 31) - 1
_INF = 0x7F800000


def step_table(rule: Callable[[Tensor], Tensor], device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor] | None:
    """(first, at): uint8 [parts, BINS], the byte of the least number of each bin, and int32 [parts, BINS], the bits of the least float32 of the bin that
    has the next byte.

    rule: float32 [1 or parts, n] -> uint8 [parts, n], and it never falls. dtype: bfloat16 has one number in a bin. None where a bin has more than one step.
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
    steps, bins = rise.topk(int(rise.sum(1).max()), dim=1)  # as many for each part as the most have: `steps` says which of them rise
    below = first.gather(1, bins)
    low, high = (bins << 16).int(), (bins << 16 | 0xFFFF).int()  # the first has the lower byte, the last the upper one
    for _ in range(16):
        middle = low + (high - low) // 2
        upper = of(middle) > below
        low, high = torch.where(upper, low, middle), torch.where(upper, middle, high)
    return first, at.scatter(1, bins, torch.where(steps == 1, high, _NEVER))


def least_with(reaches: Callable[[Tensor], Tensor], near: Tensor, dtype: torch.dtype) -> Tensor:
    """int32 [parts, 256, n]: the bits of the least bfloat16, or float32, magnitude up to inf that reaches the codes 1 to n; -1 where none does.

    reaches: float32 [..., parts, 256, n] -> whether they do, under each scale byte; all larger ones do, too. near: float64, where the steps are
    but for roundings to dtype, and of the quotient to float32; 0 where there is none.
    """
    shift = 16 if dtype == torch.bfloat16 else 0
    inf = _INF >> shift
    # Roundings move a step by one number at most: this one does not reach the code, and the fourth from it does.
    low = ((near.float().view(torch.int32) >> shift) - 2).clamp(min=0)
    tried = (low + torch.arange(1, 4, dtype=torch.int32, device=near.device)[:, None, None, None]).clamp(max=inf)
    least = low + 1 + (~reaches((tried << shift).view(torch.float32))).sum(0)  # at once: on a GPU each operation costs more than its work
    return torch.where(near == 0, -1, least).int()
