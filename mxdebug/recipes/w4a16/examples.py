"""Made linear layers in which every fault can show, and what the recipe prepares of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from ...contracts.cutedsl_w4a16 import CONTRACTS
from ...formats import NVFP4
from ...reference_linear import LinearLayer
from ..vllm import MODELOPT
from .recipe import linear_recipe

SIZES = ((128, 384), (160, 320), (128, 352), (200, 336))  # (N, K): aligned, N unaligned, K unaligned, both


def made_linear(
    n: int,
    k: int,
    *,
    parts: tuple[int, ...] | None = None,
    differ: bool = True,
    bias: bool = True,
    seed: int = 0,
    factors: tuple[float, ...] = (2.0, 4.0, 1.0),
) -> LinearLayer:
    """A layer with all codes of the payload, E4M3 scales from 2^-3 to 7.5 that differ by row and by block, a few below 2^-6 (in some rows all).

    Every scale from 0 to 448 stands somewhere, so that a recoder that saturates or drops one is seen. differ: the parts' global scales are in the ratios
    of `factors`, of which the largest is neither the first nor the last; else they are equal.
    """
    g = torch.Generator().manual_seed(seed)
    rows = parts or (n,)
    payload = torch.randint(0, 256, (n, k // 2), generator=g, dtype=torch.uint8)
    by_row, by_block = torch.randint(0, 6, (n, 1), generator=g), torch.randint(0, 8, (n, k // 16), generator=g)
    scales = (0x20 + 8 * by_row + by_block).to(torch.uint8)
    scales[::5, ::3] = torch.randint(2, 8, scales[::5, ::3].shape, generator=g, dtype=torch.uint8)  # subnormal ones
    scales[4::9] = torch.randint(1, 8, scales[4::9].shape, generator=g, dtype=torch.uint8)  # rows of small weights have no others
    some = scales[2::6, 1::3]
    scales[2::6, 1::3] = (torch.arange(some.numel()) % 127).to(torch.uint8).reshape(some.shape)  # every code but NaN
    scale = torch.rand(1, generator=g).add(0.5).mul(2.0**-7)
    return LinearLayer(
        payload,
        scales,
        NVFP4,
        tuple(f"part{i}" for i in range(len(rows))),
        rows,
        torch.cat([scale * (factors[i % len(factors)] if differ else 1.0) for i in range(len(rows))]),
        torch.randn(n, generator=g).bfloat16() if bias else None,
    )


def prepared() -> Iterator[tuple[str, tuple[Tensor, Tensor, Tensor, Tensor], tuple[int, int]]]:
    """(name, (a, b, b_descale, alpha), shape of the kernel's output) for both layouts, all SIZES, 1 and 5 tokens."""
    for c in CONTRACTS:
        for n, k in SIZES:
            layer = made_linear(n, k)
            plan = linear_recipe(c.path, MODELOPT).plan(layer)
            operands = plan.convert(layer)
            for tokens in (1, 5):
                arguments = plan.arguments(operands, torch.zeros(tokens, k))
                yield (
                    f"{c.path.rsplit('/')[-1]}, {n} x {k}, {tokens} token{'s' if tokens > 1 else ''}",
                    (arguments["a"], arguments["b"], arguments["b_descale"], arguments["alpha"]),
                    (tokens, plan.padded[0]),
                )
