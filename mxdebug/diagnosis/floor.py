"""The floor: how far rounding alone can bring a kernel's output from its emulation, derived from formats, K and accumulation."""

from __future__ import annotations

import math

from torch import Tensor

from ..metrics import compare
from ..reference import Roundings


def rounding_floor(k: int, roundings: Roundings | None = None) -> float:
    """The relative L2 distance that rounding can make between a kernel and its emulation.

    Both add K products in float32; their sums differ by at most K * 2^-24. A result that is stored with steps of s (relative to itself)
    flips to the neighbouring number with probability K * 2^-24 / s and is then off by s: sqrt(K * 2^-24 * s) in all. Three results
    are stored as bf16 (s = 2^-8) on the way (GEMM1, activation, GEMM2): sqrt(3 * K * 2^-32). K 384: 5.2e-4; K 2944: 1.4e-3.
    Faults of the catalogue move an output by 3e-2 and more.

    Where the inner activation is requantised, its steps are coarser: at most 2^-3 for E4M3, 1/2 for E2M1, whose block scale has steps of
    2^-3 besides. Sums, bf16 results that flipped before it and the approximate reciprocal (2^-22) tip it: d = K * 2^-23 + 2^-22.
    A kernel whose quantisation is not in open code may store a bf16 result where the emulation does not, or the other way round:
    d = 2^-9 then. MXFP8, K 2944: 7e-3; not in open code: 1.6e-2. NVFP4: 1.6e-2; not in open code: 3.5e-2.
    """
    plain = 3 * k * 2.0**-32
    if roundings is None or roundings.requantise is None:
        return math.sqrt(plain)
    tips = 2.0**-9 if roundings.activation is None else k * 2.0**-23 + 2.0**-22
    steps = 0.5 + 2.0**-3 if roundings.requantise.format.packed else 2.0**-3
    return math.sqrt(plain + tips * steps)


def floor_words(got: Tensor, want: Tensor, k: int, roundings: Roundings | None) -> str:
    """The derived floor and the measured distance, in a sentence."""
    floor, measured = rounding_floor(k, roundings), compare(got, want).relative_l2
    how = f"three results stored as bf16 after float32 sums of {k} products: sqrt(3 * {k} * 2^-32)"
    if roundings is not None and roundings.requantise is not None:
        tips = "2^-9" if roundings.activation is None else f"({k} * 2^-23 + 2^-22)"
        how += f", and an inner activation requantised to {roundings.requantise.format.name} in steps of {'2^-1 + 2^-3' if roundings.requantise.format.packed else '2^-3'}: + {tips} * step under the root"
    return f"floor: rounding alone can make a relative L2 of {floor:.1e} ({how}); measured {measured:.1e}"


def follows(got: Tensor, want: Tensor, k: int, roundings: Roundings | None = None) -> bool:
    """Whether an output is the emulated one, token by token, up to `rounding_floor`; NaN and inf must stand in the same places.

    In a narrow layer a single step of one large number is more than the floor, so one step (2^-7 at most) of the largest is allowed too.
    """
    if not got.numel():
        return True
    if not compare(got, want).masks_equal:
        return False
    a, b = (t.double().nan_to_num(0.0, 0.0, 0.0) for t in (got, want))
    return bool(((a - b).norm(dim=1) <= rounding_floor(k, roundings) * b.norm(dim=1) + 2.0**-7 * b.abs().amax(dim=1)).all())
