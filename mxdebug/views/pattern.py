"""A pattern along an axis as a record, and in words."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

SHOWN = 4  # more runs of residues than that are counted, not listed
PERIOD, STRETCH, ALIKE, ZERO, FEW = "period", "stretch", "alike", "zero", "too few"
WRONG = "wrong"  # what a hit is, where that is any value but 0
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
    hits     how many of the worse and of the other positions are what `word` says
    shown    of ALIKE: the first and the last period up to which one residue that is worse than all others would have been found;
             (0, 0): none would
    """

    kind: str
    size: int
    tried: int = 0
    period: int = 0
    worse: Ranges = ()
    levels: tuple[float, float] = (0.0, 0.0)
    chance: float = 0.0
    hits: tuple[int, int] = (0, 0)
    word: str = WRONG
    shown: tuple[int, int] = (0, 0)

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
            only = self.hits[1] == 0 and self.word == WRONG
            name = f"period {self.period}: " if self.kind == PERIOD else "only " if only else "no period; worse: "
            return f"{name}{self.where(unit)}: {self._told()}"
        few = sum(self.hits)
        if self.kind == FEW and self.word != WRONG:
            return f"nearly all {unit}s are alike: too few differ to show a pattern"
        if self.kind == FEW and 0 < few <= self.size / 2:
            return f"{few} of {self.size} {unit}s {self.word}: too few to show a pattern"
        first, last = self.shown
        shown = f" (a clear period {'up' if first == 2 else f'from {first}'} to {last} would show)" if last else ""
        return {ALIKE: "no pattern" + shown, ZERO: f"no error in any {unit}",
                FEW: f"{self.size} {unit}s are too few to show a pattern"}[self.kind]

    def _told(self) -> str:
        """How the worse positions differ from the others, in numbers that show it."""
        inside = int(self.mask().sum())
        counts = (f"{self.hits[0]} of {inside}", f"{self.hits[1]} of {self.size - inside}")
        if self.word != WRONG or not self.levels[0] > self.levels[1]:
            return f"{counts[0]} {self.word}, of the others {counts[1]}"
        but = f" but for {counts[1]}" if self.levels[1] == 0 and self.hits[1] else ""
        return f"{number(self.levels[0])}, the others {number(self.levels[1])}{but}"


def counted(p: Pattern, hit: Tensor, word: str) -> Pattern:
    """The pattern with the numbers of positions where bool [size] is true."""
    mask = p.mask()
    return replace(p, hits=(int(hit[mask].sum()), int(hit[~mask].sum())), word=word)


def with_levels(p: Pattern, values: Tensor) -> Pattern:
    """The pattern with the medians of `values`."""
    mask = p.mask()
    return replace(p, levels=(float(values[mask].double().median()), float(values[~mask].double().median())))


def shows(p: Pattern) -> bool:
    """Whether the numbers that are printed show the worse positions as worse: their median, or their share of hits."""
    inside = int(p.mask().sum())
    return (p.word == WRONG and p.levels[0] > p.levels[1]) or p.hits[0] * (p.size - inside) > p.hits[1] * inside


def number(value: float) -> str:
    """A relative error, as prints have it."""
    if math.isnan(value):
        return "NaN"
    return "inf" if math.isinf(value) else "0" if value == 0 else f"{value:.3f}" if 0.001 <= value < 1000 else f"{value:.0e}"


def _range(r: tuple[int, int]) -> str:
    return str(r[0]) if r[0] == r[1] else f"{r[0]}..{r[1]}"
