"""Values that show how a quantiser rounds."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def values_to_round() -> Iterator[Tensor]:
    """[rows, 64]: every bfloat16, in order and shuffled; every float16; any float32; numbers half way between codes, under many scales; zeros of both signs."""
    order = torch.Generator().manual_seed(3)
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    yield every.view(-1, 64)
    shuffled = every[torch.randperm(1 << 16, generator=order)].view(-1, 64)
    yield from (shuffled, shuffled.view(torch.float16))
    yield torch.randint(-(1 << 31), (1 << 31) - 1, (2000, 64), generator=order).int().view(torch.float32)
    halves = torch.randint(-60, 61, (1000, 64), generator=order) / 8 * torch.exp2(torch.randint(-140, 120, (1000, 1), generator=order).float())
    yield from (halves, halves.bfloat16(), (halves * 1e-6).half(), torch.randn(500, 64, generator=order), torch.zeros(2, 64), -torch.zeros(2, 64))
