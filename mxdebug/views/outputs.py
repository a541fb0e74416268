"""Outputs of several calls as one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..metrics import Comparison, compare, plain


@dataclass(frozen=True)
class Line:
    """One output: its first numbers, how many are NaN or inf, and its comparison with the wanted one (None for that itself)."""

    name: str
    first: tuple[float, ...]
    not_finite: int
    comparison: Comparison | None


@dataclass(frozen=True)
class Table:
    """Outputs against one wanted output. The numbers that decide come first, where a narrow window shows them."""

    lines: tuple[Line, ...]

    def __str__(self) -> str:
        width = max(4, *(len(line.name) for line in self.lines))
        out = [f"{'':<{width}}  relative L2  cosine  norm ratio  NaN/inf  first numbers of the output"]
        for line in self.lines:
            c = line.comparison
            off = f"{'':>31}" if c is None else f"{plain(c.relative_l2):>11}  {c.cosine:>6.3f}  {plain(c.norm_ratio):>10}"
            out.append(f"{line.name:<{width}}  {off}  {line.not_finite:>7}  " + " ".join(f"{v:>8.4f}" for v in line.first))
        return "\n".join(out)


def table(want: tuple[str, Tensor], others: Mapping[str, Tensor], first: int = 5) -> Table:
    """(name, output) that is wanted, and others by name, each [T, H]."""
    def line(name: str, t: Tensor, comparison: Comparison | None) -> Line:
        return Line(name, tuple(t.flatten()[:first].double().tolist()), int((~torch.isfinite(t)).sum()), comparison)

    return Table((line(want[0], want[1], None), *(line(name, t, compare(t, want[1])) for name, t in others.items())))
