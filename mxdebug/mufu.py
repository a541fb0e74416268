"""ex2.approx and rcp.approx as NVIDIA's special function unit computes them, bit for bit.

nvcc -use_fast_math turns exp into ex2.approx.ftz.f32 and a reciprocal into rcp.approx.ftz.f32. Neither is correctly
rounded, and one flipped activation changes dozens of outputs, so an emulation needs their exact results. Both depend
on the 23 fraction bits of the argument alone; their distance from the correctly rounded result (-1, 0 or +1 ulp) was
read off an H200 for all 2^23 fractions and ships as data.
"""

from __future__ import annotations

import functools
import lzma
from importlib import resources

import torch
from torch import Tensor

_FRACTIONS = 1 << 23


@functools.cache
def _correction(name: str, device: str) -> Tensor:
    raw = lzma.decompress(resources.files("mxdebug").joinpath("data", "mufu", f"{name}.xz").read_bytes())
    return torch.frombuffer(bytearray(raw), dtype=torch.int8).to(device)


def _corrected(exact: Tensor, name: str, fraction: Tensor) -> Tensor:
    rounded = exact.float()
    return (rounded.view(torch.int32) + _correction(name, str(exact.device))[fraction]).view(torch.float32)


def ex2(x: Tensor) -> Tensor:
    """2^x, float32 of any shape. The argument is cut to 23 fraction bits; a negative one is taken in one's complement (H200)."""
    magnitude = x.double().abs()
    steps = (magnitude.nan_to_num(0.0, 0.0, 0.0).clamp(max=512.0) * _FRACTIONS).floor().long()
    whole, fraction = steps >> 23, steps & (_FRACTIONS - 1)
    below = (x < 0) & (fraction > 0)
    fraction = torch.where(below, _FRACTIONS - 1 - fraction, fraction)
    exponent = torch.where(x < 0, -whole - below.long(), whole)
    out = torch.ldexp(_corrected(torch.exp2(fraction.double() / _FRACTIONS), "ex2", fraction).double(), exponent)
    out = torch.where(out < 2.0**-126, 0.0, out).float()  # .ftz: subnormal results become zero
    return torch.where(torch.isinf(x), torch.where(x > 0, x, torch.zeros_like(x)), torch.where(torch.isnan(x), x, out))


def rcp(x: Tensor) -> Tensor:
    """1 / x for float32 x >= 1 (or inf, or NaN) of any shape."""
    fraction = (x.contiguous().view(torch.int32) & (_FRACTIONS - 1)).long()
    mantissa, exponent = torch.frexp(x.double().nan_to_num(1.0, 1.0, 1.0))
    out = torch.ldexp(_corrected(1.0 / (2 * mantissa), "rcp", fraction).double(), 1 - exponent)
    out = torch.where(out < 2.0**-126, 0.0, out).float()
    return torch.where(torch.isinf(x), torch.zeros_like(x), torch.where(torch.isnan(x), x, out))


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + expf(-x)) in float32 as nvcc -use_fast_math compiles it: rcp(1 + ex2(-x * log2 e))."""
    return rcp(1.0 + ex2(-x.float() * 1.4426950408889634))
