"""The form of one operand: which choices were made on the way from the checkpoint to the kernel's bytes.

Each choice is a slot. A recipe fills the slots as the kernel wants them; a fault of the recipe is the same form with one
slot filled otherwise; a diagnosis recovers the slots from bytes and compares.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..layouts import Composed, Layout, RowOrder, RowShuffle
from .stages import Experts, Lay, PadAll, PadEnd, PadHalves, Rows, Shuffle, Stage, ToDtype
from .values import SplitHalves, Values

_TOGETHER = 4  # experts that are brought into a form at once

PAD_HALVES, PAD_END, PAD_ALL = "each half on its own", "once at the end", "once, behind the last expert"


@dataclass(frozen=True)
class Form:
    """Slots of one operand.

    halves, rows, columns   the logical matrix: `halves` parts (gate, up) of `rows` rows, `columns` bytes; columns None: a bias
    padded_rows, padded_columns   a half's rows and the columns as the kernel gets them
    was       the order of the rows in the file, for prints
    values    slot: how the bytes' values were changed (none is right)
    experts   slot: the checkpoint's experts, in the order in which they stand here; None: as they are
    padding   slot: PAD_HALVES, PAD_END or PAD_ALL (of matrices)
    order     slot: the order of the rows of w13; None where there are no halves
    shuffle   slot: a permutation of rows within blocks (none is right for CUTLASS)
    fill      slot: the byte in the padding
    layout    slot: where the bytes lie; None for a bias
    shape     the shape of one expert's result, as the engine leaves it
    dtype     the dtype to which a bias is rounded
    stored    the dtype in which the engine keeps a bias before that, if it is another
    """

    halves: int
    rows: int
    columns: int | None
    padded_rows: int
    padded_columns: int | None
    was: str
    order: RowOrder | None
    layout: Layout | Composed | None
    shape: tuple[int, ...] | None = None
    dtype: torch.dtype | None = None
    stored: torch.dtype | None = None
    values: Values | SplitHalves | None = None
    experts: tuple[int, ...] | None = None
    padding: str = PAD_HALVES
    shuffle: RowShuffle | None = None
    fill: int = 0

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The steps that lead from the logical operand to this form, in order; those that change nothing are left out."""
        out: list[Stage] = [s for s in (self.values, Experts(self.experts) if self.experts else None) if s]
        columns, padded_columns = self.columns, self.padded_columns
        if (self.rows, columns) != (self.padded_rows, padded_columns) and self.padding == PAD_HALVES:
            out.append(PadHalves(self.halves, self.rows, self.padded_rows, columns, padded_columns, self.fill))
        if self.order is not None:
            out.append(Rows(self.order, was=self.was))
        if (self.rows, columns) != (self.padded_rows, padded_columns) and self.padding == PAD_END:
            out.append(PadEnd(self.halves * self.rows, self.halves * self.padded_rows, columns, padded_columns))
        rows = self.halves * self.padded_rows
        if self.padding == PAD_ALL:
            rows = self.layout.padded(rows, padded_columns)[0]
            out.append(PadAll(self.halves * self.rows, rows, columns, padded_columns))
        if self.shuffle is not None:
            out.append(Shuffle(self.shuffle))
        if self.layout is not None:
            out.append(Lay(self.layout, rows, padded_columns, self.shape))
        out += [ToDtype(d) for d in (self.stored, self.dtype) if d is not None]
        return tuple(out)

    def row_indices(self) -> Tensor:
        """int64 [halves * padded_rows]: the logical row that stands in each row before the layout; -1 is padding (PAD_ALL: or another expert's)."""
        rows = torch.arange(self.halves * self.rows)[:, None]
        for stage in self.stages:
            if isinstance(stage, (PadHalves, PadEnd)):
                stage = replace(stage, cols=1, padded_cols=1, **({"fill": -1} if isinstance(stage, PadHalves) else {}))
                rows = stage.apply(rows[None] + 1)[0] - 1 if isinstance(stage, PadEnd) else stage.apply(rows[None])[0]
            elif isinstance(stage, PadAll):
                rows = torch.nn.functional.pad(rows, (0, 0, 0, self.halves * self.padded_rows - len(rows)), value=-1)
            elif isinstance(stage, (Rows, Shuffle)):
                rows = stage.apply(rows[None])[0]
        return rows[:, 0]

    def apply(self, t: Tensor) -> Tensor:
        """Logical operand [E, halves * rows(, columns)] -> the operand in this form."""
        for stage in self.stages:
            t = stage.apply(t)
        return t

    def apply_to_some(self, logical: Callable[[list[int]], Tensor], experts: int, wanted: list[int]) -> Tensor:
        """As `apply`, of the experts at these positions, one or more; the others are zeros that nobody should read.

        logical: the operand of the experts at some positions. They are asked for a few at a time, since each stage makes them anew.
        """
        if self.padding == PAD_ALL or self.experts:  # not each on its own
            return self.apply(logical(list(range(experts))))
        out = None
        for start in range(0, len(wanted), _TOGETHER):
            some = wanted[start : start + _TOGETHER]
            made = self.apply(logical(some))
            out = made.new_zeros(experts, *made.shape[1:]) if out is None else out
            out[some] = made
        return out

    def undo(self, t: Tensor) -> Tensor:
        """The inverse of `apply`, up to stages that lose something."""
        for stage in reversed(self.stages):
            t = stage.undo(t)
        return t
