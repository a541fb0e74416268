"""Is there a pattern along an axis: a period, or a stretch that differs from the rest? Asked with a known rate of false alarms.

What is compared are ranks, not sizes, so the answer holds for errors of any distribution: a column whose error is 10^30 counts as the
worst one, no more. Each rank becomes the number that stands there in a normal sample (van der Waerden's scores). A candidate cuts the axis
into groups: the residues of a period, or one stretch and the rest. R^2 is the share of the scores' variance that lies between the groups.
Where all orders of the values are equally likely ("no pattern"), R^2 of g groups of n values follows Beta((g - 1) / 2, (n - g) / 2), the
F test in another form, and no arrangement is less likely than (product of the groups' sizes!) / n!. The chance of a candidate is the larger
of both, times the number of candidates (Bonferroni): a pattern is reported where that is below `ALARMS`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import MxdebugError

ALARMS = 1e-3  # at most one look in 1000 at values without a pattern reports one
EVERY = 32     # periods up to this are all tried; above, multiples of STEP and divisors of the axis
STEP = 16      # every tile of rows and every block of the layouts here is a multiple of that
STARTS = 32    # of stretches that are looked at at once: they stay in the processor's cache
SHOWN = 4      # more runs of residues than that are counted, not listed
PERIOD, STRETCH, ALIKE, ZERO, FEW = "period", "stretch", "alike", "zero", "too few"
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Pattern:
    """What the values along an axis look like.

    kind     PERIOD, STRETCH (one contiguous stretch against the rest), ALIKE (no pattern), ZERO (all are 0), FEW (too few to tell)
    size     how many values there are; tried: how many candidates
    period   of PERIOD, else 0
    worse    the residues (PERIOD) or positions (STRETCH) with the larger values, as (first, last)
    levels   the medians of the larger and of the other values
    chance   upper bound of log10 of the probability of such a pattern where there is none; 0.0 where none is reported
    """

    kind: str
    size: int
    tried: int = 0
    period: int = 0
    worse: Ranges = ()
    levels: tuple[float, float] = (0.0, 0.0)
    chance: float = 0.0

    def mask(self) -> Tensor:
        """bool [size]: which positions are the worse ones."""
        at = torch.arange(self.size)
        at = at % self.period if self.kind == PERIOD else at
        out = torch.zeros(self.size, dtype=torch.bool)
        for first, last in self.worse:
            out |= (at >= first) & (at <= last)
        return out

    def where(self, unit: str) -> str:
        """The worse positions in words; unit: "column", "token". Empty where there is no pattern."""
        if self.kind == PERIOD:
            if self.period == 2:
                return f"{('even', 'odd')[self.worse[0][0]]} {unit}s"
            listed = ", ".join(_range(r) for r in self.worse[:SHOWN])
            if len(self.worse) > SHOWN:
                listed = f"{sum(b - a + 1 for a, b in self.worse)} residues: {listed}, ..."
            return f"{unit}s with {unit[0]} % {self.period} in {listed}"
        if self.kind == STRETCH:
            return f"{unit}s " + " and ".join(f"{a} on" if b == self.size - 1 else _range((a, b)) for a, b in self.worse)
        return ""

    def text(self, unit: str) -> str:
        """The pattern in one line."""
        if self.kind in (PERIOD, STRETCH):
            name = f"period {self.period}: " if self.kind == PERIOD else "only " if self.levels[1] == 0 else "no period; worse: "
            return f"{name}{self.where(unit)}: {number(self.levels[0])}, the others {number(self.levels[1])}"
        return {ALIKE: "no pattern", ZERO: f"no error in any {unit}",
                FEW: f"{self.size} {unit}s are too few to show a pattern"}[self.kind]


def number(value: float) -> str:
    """A relative error, as prints have it."""
    return "inf" if math.isinf(value) else "0" if value == 0 else f"{value:.3f}" if 0.001 <= value < 1000 else f"{value:.0e}"


def _range(r: tuple[int, int]) -> str:
    return str(r[0]) if r[0] == r[1] else f"{r[0]}..{r[1]}"


def candidates(size: int) -> tuple[int, ...]:
    """The periods that are tried: those that occur at least twice, and can come from a layout."""
    return tuple(p for p in range(2, size // 2 + 1) if p <= EVERY or p % STEP == 0 or size % p == 0)


def find(values: Tensor, alarms: float = ALARMS) -> Pattern:
    """The pattern of values [n] >= 0, none of them NaN; inf is larger than all others.

    Of several, the one that is least likely by chance, and of its period's divisors the smallest that explains as much.

    alarms: in which share of looks at values without a pattern one may be reported. Raises MxdebugError for NaN.
    """
    n = values.numel()
    if values.dim() != 1 or bool(torch.isnan(values).any()):
        raise MxdebugError("values along an axis", "numbers [n], without NaN", f"shape {list(values.shape)}", "count NaN apart first")
    if not bool(values.any()):
        return Pattern(ZERO, n)
    look = _Look.at(values, alarms)
    tried = len(look.periods) + look.stretches
    if n < 4 or _least([n // 2, n - n // 2]) + look.cost[1] > look.limit:
        return Pattern(FEW, n, tried)
    if look.total == 0:
        return Pattern(ALIKE, n, tried)
    stretch = look.stretch(n)
    found = min((look.period(p) for p in look.promising()), key=lambda f: f[0])
    if found[0] <= look.limit:
        found = look.smallest(found[1])
    chance, period, worse = min((found, stretch), key=lambda f: f[0])
    if chance > look.limit:
        return Pattern(ALIKE, n, tried)
    kind, period = (STRETCH, 0) if period == n else (PERIOD, period)
    mask = Pattern(kind, n, tried, period, worse).mask()
    if kind == STRETCH:
        worse = _sharper(values, mask)
        mask = Pattern(kind, n, tried, period, worse).mask()
    levels = tuple(float(values[m].double().median()) for m in (mask, ~mask))
    return Pattern(kind, n, tried, period, worse, (levels[0], levels[1]), chance / math.log(10))


Found = tuple[float, int, Ranges]  # log of the chance, the period (n: a stretch), the worse residues


@dataclass(frozen=True)
class _Look:
    """One look at n values: their scores, and for each period that is tried the share that lies between its residues.

    Two questions are asked, which share the alarms: do the residues of a period differ (one candidate a period)? Does one stretch differ
    from the rest, of the residues of a period or of all positions? The second sees less, but sees it better.
    """

    z: Tensor
    total: float
    periods: tuple[int, ...]
    shares: dict[int, float]
    stretches: int
    cost: tuple[float, float]
    limit: float

    @staticmethod
    def at(values: Tensor, alarms: float) -> _Look:
        n, z = values.numel(), scores(values)
        periods, total = candidates(n), float(z @ z)
        stretches = sum(p * (p - 1) // 2 for p in (*periods, n))
        shares = {p: float((s**2 / c).sum()) / total for p in periods for s, c in (_residues(z, p),)} if total else {}
        cost = (math.log(2 * max(1, len(periods))), math.log(2 * max(1, stretches)))
        return _Look(z, total, periods, shares, stretches, cost, math.log(alarms))

    @property
    def n(self) -> int:
        return self.z.numel()

    def promising(self, most: int = 4) -> list[int]:
        """The periods whose residues differ most. Only their stretches are looked at, though all are counted."""
        return sorted(self.periods, key=lambda p: log_chance(self.shares[p], p - 1, self.n - p))[:most]

    def stretch(self, period: int) -> Found:
        """The stretch of residues that differs most from the rest; period n: of all positions."""
        sums, counts = _residues(self.z, period)
        start, stop, share = _stretch(sums, counts, self.total)
        inside = int(counts[start:stop].sum())
        chance = max(log_chance(share, 1, self.n - 2), _least([inside, self.n - inside])) + self.cost[1]
        return chance, period, _side(sums, start, stop)

    def period(self, period: int) -> Found:
        """What a period explains: by its residues, or by one stretch of them, whichever is less likely by chance."""
        sums, counts = _residues(self.z, period)
        whole = max(log_chance(self.shares[period], period - 1, self.n - period), _least(counts.tolist())) + self.cost[0]
        part = self.stretch(period)
        mask = Pattern(PERIOD, self.n, 0, period, part[2]).mask()
        explained = float(self.z[mask].sum()) ** 2 * self.n / (int(mask.sum()) * int((~mask).sum())) / self.total
        if self.adds(explained, self.shares[period], period - 2, self.n - period):  # one stretch does not say all
            return min(whole, part[0]), period, _upper(sums, counts)
        return min(whole, part[0]), period, part[2]

    def adds(self, few: float, many: float, more: int, within: int) -> bool:
        """Whether the finer of two nested groupings explains more than the coarser by more than chance."""
        return more > 0 and 1 - few > 1e-9 and log_chance((many - few) / (1 - few), more, within) <= self.limit

    def smallest(self, period: int) -> Found:
        """The smallest divisor of a period that explains something, and no less than the period does."""
        for d in self.periods:
            if period % d == 0 and d < period and not self.adds(self.shares[d], self.shares[period], period - d, self.n - period):
                if (found := self.period(d))[0] <= self.limit:
                    return found
        return self.period(period)


def _residues(z: Tensor, period: int) -> tuple[Tensor, Tensor]:
    """(sum, number) of the scores of each residue."""
    residue = torch.arange(z.numel()) % period
    return torch.zeros(period, dtype=z.dtype).index_add_(0, residue, z), torch.bincount(residue, minlength=period).double()


def scores(values: Tensor) -> Tensor:
    """float64 [n], mean 0: the normal quantile of each value's rank; equal values share the mean of their ranks."""
    _, inverse, counts = values.unique(sorted=True, return_inverse=True, return_counts=True)
    last = counts.cumsum(0).double()
    rank = ((last - counts + 1 + last) / 2)[inverse]
    z = math.sqrt(2) * torch.erfinv(2 * rank / (values.numel() + 1) - 1)
    return z - z.mean()


def _stretch(sums: Tensor, counts: Tensor, total: float) -> tuple[int, int, float]:
    """(start, stop, R^2) of the contiguous stretch of groups that differs most from the rest."""
    s, c = (torch.cat([torch.zeros(1, dtype=t.dtype), t.cumsum(0)]) for t in (sums, counts))
    best, n = (0, 1, -1.0), float(c[-1])
    for first in range(0, sums.numel(), STARTS):  # [starts, stops] at once
        inside = c - c[first: first + STARTS, None]
        share = (s - s[first: first + STARTS, None]).square_() / (inside * (n - inside))
        share = torch.where((inside > 0) & (inside < n), share, -1)
        start, stop = divmod(int(share.argmax()), share.shape[1])
        if (found := float(share[start, stop]) * n / total) > best[2] + 1e-12:
            best = (first + start, stop, found)
    return best


def _side(sums: Tensor, start: int, stop: int) -> Ranges:
    """The stretch or, where that has the smaller values, the rest; all sums add up to 0."""
    inside, every = range(start, stop), range(sums.numel())
    return ranges(inside if sums[start:stop].sum() > 0 else [i for i in every if i not in inside])


def _sharper(values: Tensor, mask: Tensor) -> Ranges:
    """The ends of a stretch by values: ranks do not see the gap between two levels, and take a neighbour or two for the wrong side."""
    v = torch.where(values.isinf(), 1.0, values / (1 + values)).double()
    high = (v > (v[mask].median() + v[~mask].median()) / 2).double()
    sums = high - high.mean()
    if not bool(sums.any()):
        return ranges(mask.nonzero().flatten().tolist())
    return _side(sums, *_stretch(sums, torch.ones_like(sums), float(sums @ sums))[:2])


def _upper(sums: Tensor, counts: Tensor) -> Ranges:
    """The residues of the upper class, where two classes of residues, whichever, explain most."""
    order = (sums / counts).argsort(descending=True, stable=True)
    s, c = sums[order].cumsum(0)[:-1], counts[order].cumsum(0)[:-1]
    return ranges(sorted(order[: int((s**2 / (c * (counts.sum() - c))).argmax()) + 1].tolist()))


def ranges(at: Sequence[int]) -> Ranges:
    """Ascending positions as (first, last) of each run."""
    out: list[tuple[int, int]] = []
    for i in at:
        if out and out[-1][1] == i - 1:
            out[-1] = (out[-1][0], i)
        else:
            out.append((i, i))
    return tuple(out)


def _least(sizes: Sequence[float]) -> float:
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
