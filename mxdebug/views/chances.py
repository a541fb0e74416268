"""Logarithms of the chances that patterns are judged by."""

from __future__ import annotations

import math
from collections.abc import Sequence


def log_tail(size: int, marked: int, drawn: int, hits: int) -> float:
    """log P(at least so many hits) where `drawn` of `size` positions are picked at random and `marked` ones of all count as a hit.

    The hypergeometric distribution, exactly, so it holds for any number of ties.
    """
    terms = [log_choose(marked, k) + log_choose(size - marked, drawn - k)
             for k in range(max(hits, drawn + marked - size), min(drawn, marked) + 1)]
    most = max(terms, default=-math.inf)
    if not terms:
        return -math.inf
    return min(0.0, most + math.log(math.fsum(math.exp(t - most) for t in terms)) - log_choose(size, drawn))


def log_choose(n: int, k: int) -> float:
    """log of the number of ways to pick k of n."""
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def log_least(sizes: Sequence[float]) -> float:
    """log of the chance of any one grouping of all values into groups of these sizes."""
    return sum(math.lgamma(s + 1) for s in sizes) - math.lgamma(sum(sizes) + 1)


def log_chance(share: float, between: int, within: int) -> float:
    """log P(R^2 >= share) for `between` and `within` degrees of freedom: I_(1 - share)(within / 2, between / 2).

    I is the regularised incomplete beta function.
    """
    x, a, b = min(1.0, max(1.0 - share, 1e-15)), within / 2, between / 2
    if within <= 0 or x == 1.0:
        return 0.0
    if x < (a + 1) / (a + b + 2):
        return min(0.0, _log_beta(x, a, b))
    return math.log1p(-min(math.exp(_log_beta(1 - x, b, a)), 1 - 1e-16))


def _log_beta(x: float, a: float, b: float) -> float:
    """log I_x(a, b) by its continued fraction (Lentz's method; DLMF 8.17.22), which converges fast for x < (a + 1) / (a + b + 2)."""
    tiny = 1e-300
    c, d = 1.0, 1.0 / (1 - (a + b) * x / (a + 1) or tiny)
    fraction = d
    for m in range(1, 1000):
        for term in (m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)), -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))):
            d = 1.0 / (1 + term * d or tiny)
            c = 1 + term / c or tiny
            fraction *= c * d
        if abs(c * d - 1) < 1e-13:
            break
    front = a * math.log(x) + b * math.log1p(-x) + math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) - math.log(a)
    return front + math.log(fraction)
