"""Is there a pattern along an axis: a period, or a stretch that differs from the rest? Asked with a known rate of false alarms.

What is compared are ranks, not sizes, so the answer holds for errors of any distribution: a column whose error is 10^30 counts as the
worst one, no more. Each rank becomes the number that stands there in a normal sample (van der Waerden's scores). A candidate cuts the axis
into groups: the residues of a period, or one stretch and the rest. R^2 is the share of the scores' variance that lies between the groups.
Where all orders of the values are equally likely ("no pattern"), R^2 of g groups of n values follows Beta((g - 1) / 2, (n - g) / 2), the
F test in another form, and no arrangement is less likely than (product of the groups' sizes!) / n!. The chance of a candidate is the larger
of both, times the number of candidates (Bonferroni): a pattern is reported where that is below `ALARMS`.

Where more than half of the values are equal, as where most columns are exact, the F test does not hold. Then the question is only where
the others stand, and where those of them that are at least half as large as the largest; the chance of a candidate is that of so many of
them there (hypergeometric, exact), times the number of candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import MxdebugError
from .chances import log_chance, log_choose, log_least, log_tail
from .pattern import ALIKE, FEW, PERIOD, STRETCH, WRONG, ZERO, Pattern, Ranges, counted, number, shows, with_levels

__all__ = ["ALIKE", "FEW", "PERIOD", "STRETCH", "WRONG", "ZERO", "Pattern", "candidates", "find", "number", "scores"]

ALARMS = 1e-3  # at most one look in 1000 at values without a pattern reports one
EVERY = 32     # periods up to this are all tried; above, multiples of STEP and divisors of the axis
STEP = 16      # every tile of rows and every block of the layouts here is a multiple of that
SAME = 0.5     # a larger share of equal values, and only the places of the others are looked at
STARTS = 32    # of stretches that are looked at at once: they stay in the processor's cache


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
    cuts = _cuts(values)
    looks = [_Look.at(values, alarms / len(cuts), marks, word) for marks, word in cuts]
    first, tried = looks[0], sum(len(look.periods) + look.stretches for look in looks)
    hit, word = (values > 0, WRONG) if first.marks is None or first.total == 0 else (first.marks, first.word)
    none = Pattern(ALIKE, n, tried, hits=(0, int(hit.sum())), word=word)
    if n < 4 or not any(look.could_find() for look in looks):
        return replace(none, kind=FEW)
    if first.total == 0:
        return none
    none = replace(none, shown=first.shown())
    every = [(found, look) for look in looks for found in (look.best(), look.stretch(n))]
    (chance, period, worse), look = min(every, key=lambda f: f[0][0])
    if chance > look.limit:
        return none
    chance = (chance + math.log(len(looks))) / math.log(10)
    p = Pattern(STRETCH if period == n else PERIOD, n, tried, 0 if period == n else period, worse, chance=chance)
    if p.kind == STRETCH and look.marks is None:
        p = replace(p, worse=_sharper(values, p.mask()))
    p = counted(with_levels(p, values), *((hit, word) if look is first else (look.marks, look.word)))
    return p if shows(p) else none


Found = tuple[float, int, Ranges]  # log of the chance, the period (n: a stretch), the worse residues


@dataclass(frozen=True)
class _Look:
    """One look at n values: their scores, and for each period that is tried the share that lies between its residues.

    Two questions are asked, which share the alarms: do the residues of a period differ (one candidate a period)? Does one stretch differ
    from the rest, of the residues of a period or of all positions? The second sees less, but sees it better.

    marks   where most values are equal: bool [n], which ones are above these, or not below, as `word` says; z are then the marks
    """

    z: Tensor
    total: float
    periods: tuple[int, ...]
    shares: dict[int, float]
    stretches: int
    cost: tuple[float, float]
    limit: float
    marks: Tensor | None
    word: str

    @staticmethod
    def at(values: Tensor, alarms: float, marks: Tensor | None, word: str) -> _Look:
        n = values.numel()
        z = scores(values) if marks is None else marks.double() - marks.double().mean()
        periods, total = candidates(n), float(z @ z)
        stretches = sum(p * (p - 1) // 2 for p in (*periods, n))
        shares = {p: float((s**2 / c).sum()) / total for p in periods for s, c in (_residues(z, p),)} if total else {}
        cost = (math.log(2 * max(1, len(periods))), math.log(2 * max(1, stretches)))
        return _Look(z, total, periods, shares, stretches, cost, math.log(alarms), marks, word)

    @property
    def n(self) -> int:
        return self.z.numel()

    @property
    def marked(self) -> int:
        return 0 if self.marks is None else int(self.marks.sum())

    def best(self) -> Found:
        """The period that is least likely by chance, or its divisor that says as much."""
        found = min((self.period(p) for p in self.promising()), key=lambda f: f[0])
        return self.smallest(found[1]) if self.marks is None and found[0] <= self.limit else found

    def promising(self, most: int = 4) -> list[int]:
        """The periods whose residues differ most. Only their stretches are looked at, though all are counted."""
        return sorted(self.periods, key=lambda p: log_chance(self.shares[p], p - 1, self.n - p))[:most]

    def two(self, share: float, inside: int, hits: int) -> float:
        """log of the chance of one group of so many positions against the rest; share: R^2; hits: the marks in it."""
        if self.marks is None:
            return max(log_chance(share, 1, self.n - 2), log_least([inside, self.n - inside]))
        return math.log(2) + min(log_tail(self.n, self.marked, inside, hits),
                                 log_tail(self.n, self.marked, self.n - inside, self.marked - hits))

    def stretch(self, period: int) -> Found:
        """The stretch of residues that differs most from the rest; period n: of all positions."""
        sums, counts = _residues(self.z, period)
        if self.marks is not None and period == self.n:  # the best one begins and ends between runs of marks: these alone are looked at
            runs = self.marks.unique_consecutive(return_counts=True)[1]
            edges = [0, *runs.cumsum(0).tolist()]
            start, stop, share = _stretch(torch.stack([t.sum() for t in self.z.split(runs.tolist())]), runs.double(), self.total)
            start, stop = edges[start], edges[stop]
        else:
            start, stop, share = _stretch(sums, counts, self.total)
        inside = int(counts[start:stop].sum())
        hits = round(float(sums[start:stop].sum()) + inside * self.marked / self.n)
        return self.two(share, inside, hits) + self.cost[1], period, _side(sums, start, stop)

    def period(self, period: int) -> Found:
        """What a period explains: by its residues, or by one stretch of them, whichever is less likely by chance."""
        sums, counts = _residues(self.z, period)
        part, upper = self.stretch(period), _upper(sums, counts)
        if self.marks is not None:  # any set of residues: as many candidates as there are sets of that size, for each size
            mask = Pattern(PERIOD, self.n, 0, period, upper).mask()
            residues = sum(b - a + 1 for a, b in upper)
            chance = log_tail(self.n, self.marked, int(mask.sum()), int(self.marks[mask].sum()))
            return min(part, (chance + log_choose(period, residues) + math.log(period) + self.cost[0], period, upper), key=lambda f: f[0])
        whole = max(log_chance(self.shares[period], period - 1, self.n - period), log_least(counts.tolist())) + self.cost[0]
        mask = Pattern(PERIOD, self.n, 0, period, part[2]).mask()
        explained = float(self.z[mask].sum()) ** 2 * self.n / (int(mask.sum()) * int((~mask).sum())) / self.total
        one = not self.adds(explained, self.shares[period], period - 2, self.n - period)  # one stretch says all
        return min(whole, part[0]), period, part[2] if one else upper

    def would_show(self, period: int) -> bool:
        """Whether one residue would be found that has the largest values of all, or as many marks as there is room for."""
        inside = self.n // period
        top = float(self.z.sort(descending=True).values[:inside].sum())
        share = top**2 * self.n / (inside * (self.n - inside)) / self.total
        hits = min(inside, self.marked)
        part = self.two(share, inside, hits) + self.cost[1]
        if self.marks is not None:
            return min(part, log_tail(self.n, self.marked, inside, hits) + 2 * math.log(period) + self.cost[0]) <= self.limit
        sizes = torch.bincount(torch.arange(self.n) % period).tolist()
        return min(part, max(log_chance(share, period - 1, self.n - period), log_least(sizes)) + self.cost[0]) <= self.limit

    def shown(self) -> tuple[int, int]:
        """The first and the last period of the first run of those that would show; (0, 0) if none would."""
        first = next((i for i, p in enumerate(self.periods) if self.would_show(p)), None)
        if first is None:
            return 0, 0
        last = next((i for i, p in enumerate(self.periods) if i > first and not self.would_show(p)), len(self.periods))
        return self.periods[first], self.periods[last - 1]

    def could_find(self) -> bool:
        """Whether any arrangement of these values would be called a pattern."""
        if not self.total:
            return log_least([self.n // 2, self.n - self.n // 2]) + self.cost[1] <= self.limit
        if self.marks is None:
            return self.would_show(2)
        return self.two(1.0, self.marked, self.marked) + self.cost[1] <= self.limit

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


def _cuts(values: Tensor) -> list[tuple[Tensor | None, str]]:
    """Which positions to look at, bool [n], and what these are in words; None: all, by their ranks, where most values are different.

    All depends on how often which value occurs, not on where, so that it makes no place more likely than another.
    """
    level, counts = values.unique(return_counts=True)
    at = int(counts.argmax())
    if int(counts[at]) <= SAME * values.numel():
        return [(None, WRONG)]
    if bool((values > level[at]).sum() <= (values < level[at]).sum()):
        return [(values >= level[at], WRONG if at == 1 and level[0] == 0 else "no better than most")]
    out = [(values > level[at], WRONG if level[at] == 0 else "worse than most")]
    worst = values >= values.max() / 2
    return out if torch.equal(worst, out[0][0]) or bool(worst[values == level[at]].any()) else [*out, (worst, "among the worst")]


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
