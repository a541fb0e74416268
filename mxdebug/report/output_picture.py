"""Where an output is wrong, by token and column, as a map; and in words, what the views make of it."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..diagnosis import Diagnosis
from ..views.output_error import OutputError, output_error
from ..views.own import Own
from . import svg
from .operand_pictures import Picture

MOST = (24, 56)  # cells: tokens, columns
STEPS = (0.03, 0.1, 0.3, 1.0, 3.0)  # relative errors at which the colour changes, above that of a right call
ROUNDING = 3.0  # times the error of a right call on the whole: in single cells it may well be that


def of_output(d: Diagnosis, own: Own) -> Picture:
    """The picture of the recorded output against what the checkpoint means. Raises MxdebugError where there is no output."""
    got, want = own.output, own.meant_output
    got, want = got[:, : want.shape[1]].double(), want.double()
    floor = 0.0 if d.floor is None or math.isnan(d.floor.relative_l2) else d.floor.relative_l2
    levels, (high, wide), steps = cells(got, want, ROUNDING * floor)
    experts = None if own.linear else own._given.base.experts[own.tokens]
    error: OutputError = output_error(got, want, experts)
    grid = svg.Grid(
        levels,
        "the recorded output against what the checkpoint means",
        "column",
        "token",
        ("0", "0"),
        (str(want.shape[1] - 1), str(len(want) - 1)),
    )
    words = [(f"l{i}", w) for i, w in enumerate(_words(steps))]
    words += [("lost", "NaN or inf")] if any(svg.LOST in line for line in levels) else []
    picked = (
        "" if len(own.tokens) == len(own.call.outputs[0]) else f" {len(own.tokens)} tokens of {len(own.call.outputs[0]):,} were looked at."
    )
    return Picture(
        "The output",
        svg.grids([grid], "error of the output by token and column") + svg.legend(words),
        f"One cell is {_counted(high, 'token')} by {_counted(wide, 'column')}, coloured by its relative L2 error.{picked} "
        f"On the whole a right call has {floor:.3g}, this one {error.comparison.relative_l2:.3g}. "
        f"By token: {error.by_token.text('token')}. "
        f"By column: {error.by_column.text('column')}.",
    )


def cells(got: Tensor, want: Tensor, rounding: float) -> tuple[list[list[int]], tuple[int, int], tuple[float, ...]]:
    """(levels of each cell, (tokens, columns) in one, the upper ends of the levels) of two outputs float64 [T, H].

    Level 0: a relative L2 error of at most `rounding`; LOST: NaN or inf in one of them and not the same in the other.
    """
    steps = (rounding, *(s for s in STEPS if s > rounding))
    high, wide = (-(-n // most) for n, most in zip(want.shape, MOST))
    both = torch.isfinite(got) & torch.isfinite(want)
    lost = ~both & ~((got == want) | (got.isnan() & want.isnan()))
    error, size = (torch.where(both, t, 0.0).square() for t in (got - want, want))

    def pooled(t: Tensor) -> Tensor:
        return torch.stack([torch.stack([part.sum() for part in line.split(wide, 1)]) for line in t.double().split(high)])

    e, s = pooled(error), pooled(size)
    relative = torch.where(e == 0, 0.0, (e / s).sqrt())
    level = torch.bucketize(relative, torch.tensor(steps, dtype=torch.float64))
    return torch.where(pooled(lost) > 0, svg.LOST, level).tolist(), (high, wide), steps


def _words(steps: tuple[float, ...]) -> list[str]:
    return [f"up to {steps[0]:.2g}: rounding", *(f"up to {s:g}" for s in steps[1:]), "more"]


def _counted(n: int, unit: str) -> str:
    return f"{n} {unit}{'s' if n != 1 else ''}"
