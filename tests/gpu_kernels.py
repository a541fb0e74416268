"""The special function unit's own results, through two lines of PTX. Only imported on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _ex2(x, y, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(x + at, mask=at < n)
    out = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [value], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(y + at, out, mask=at < n)


@triton.jit
def _rcp(x, y, n, block: tl.constexpr):
    at = tl.program_id(0) * block + tl.arange(0, block)
    value = tl.load(x + at, mask=at < n)
    out = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [value], dtype=tl.float32, is_pure=True, pack=1)
    tl.store(y + at, out, mask=at < n)


def _run(kernel: object, x: Tensor) -> Tensor:
    y = torch.empty_like(x)
    kernel[(triton.cdiv(x.numel(), 1024),)](x, y, x.numel(), block=1024)
    return y


def ex2_approx(x: Tensor) -> Tensor:
    """ex2.approx.ftz.f32 of a contiguous float32 CUDA tensor."""
    return _run(_ex2, x)


def rcp_approx(x: Tensor) -> Tensor:
    """rcp.approx.ftz.f32 of a contiguous float32 CUDA tensor."""
    return _run(_rcp, x)
