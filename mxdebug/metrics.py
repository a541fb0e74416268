"""How far apart are two outputs? Masks first, then bits, then cosine, norm ratio and relative L2 together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .errors import MxdebugError


def plain(value: float, digits: int = 3) -> str:
    """A distance or a ratio as prints have it: decimals up to 1000, beyond that three significant digits."""
    return f"{value:.{digits}f}" if abs(value) < 1000 else f"{value:.2e}"


@dataclass(frozen=True)
class Comparison:
    """`got` against `want`.

    elements     how many numbers were compared
    differing    how many are not bit-identical; -1 where the dtypes differ, or are not bfloat16, float16 or float32
    max_ulps     the largest distance in units of the last place, over elements finite in both; -1 as above
    masks_equal  whether NaN, +inf and -inf stand in the same places
    cosine, norm_ratio, relative_l2   over the elements finite in both, in float64; NaN where undefined
    """

    elements: int
    differing: int
    max_ulps: int
    masks_equal: bool
    cosine: float
    norm_ratio: float
    relative_l2: float

    @property
    def bit_identical(self) -> bool:
        """Every element has the same bits (NaN payloads count as equal)."""
        return self.differing == 0 and self.masks_equal

    def __str__(self) -> str:
        bits = "bit-identical" if self.bit_identical else f"{self.differing} of {self.elements} elements differ, by up to {self.max_ulps} ulp"
        if self.differing < 0:
            bits = f"{self.elements} elements whose bits cannot be compared"
        mask = "" if self.masks_equal else "; NaN or inf in other places"
        return f"{bits}{mask}; relative L2 {plain(self.relative_l2, 4)}, cosine {self.cosine:.4f}, norm ratio {plain(self.norm_ratio, 4)}"


def compare(got: Tensor, want: Tensor) -> Comparison:
    """Compare two tensors of one shape. Raises MxdebugError where the shapes differ."""
    if got.shape != want.shape:
        raise MxdebugError("output", f"shape {list(want.shape)}", f"shape {list(got.shape)}", "outputs of two different calls")
    want = want.to(got.device)
    a, b = got.double(), want.double()
    nan_a, nan_b = torch.isnan(a), torch.isnan(b)
    inf_a, inf_b = torch.isinf(a), torch.isinf(b)
    masks_equal = bool((nan_a == nan_b).all() and (torch.where(inf_a, a, 0.0) == torch.where(inf_b, b, 0.0)).all())
    finite = ~(nan_a | nan_b | inf_a | inf_b)
    differing, max_ulps = -1, -1
    if got.dtype == want.dtype and got.dtype in _ORDERED:
        distance = (_ordered(got) - _ordered(want)).abs()
        differing = int(((distance != 0) & ~(nan_a & nan_b)).sum())
        max_ulps = int(distance[finite].max()) if finite.any() else 0
    a, b = a[finite], b[finite]
    na, nb = a.norm().item(), b.norm().item()
    return Comparison(
        elements=got.numel(), differing=differing, max_ulps=max_ulps, masks_equal=masks_equal,
        cosine=(a @ b).item() / (na * nb) if na and nb else float("nan"),
        norm_ratio=na / nb if nb else float("nan"),
        relative_l2=float("nan") if got.numel() and not finite.any() else (a - b).norm().item() / nb if nb else (0.0 if na == 0 else float("inf")))


_ORDERED = {torch.bfloat16: torch.int16, torch.float16: torch.int16, torch.float32: torch.int32}


def _ordered(x: Tensor) -> Tensor:
    """Map floats to integers that are as far apart as the floats are in ulps. +0 and -0 differ by one."""
    bits = x.contiguous().view(_ORDERED[x.dtype]).long()
    low = -(2 ** (8 * x.element_size() - 1))
    return torch.where(bits < 0, low - bits - 1, bits)
