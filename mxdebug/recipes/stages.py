"""The steps by which an engine brings one operand into a kernel's form. Lossless stages have an inverse; lossy ones a canonical result.

Every stage takes and gives a tensor whose axis 0 is the expert and axis 1 the row. w13 starts in logical order: gate rows, then up rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from ..errors import MxdebugError
from ..layouts import Composed, Layout, RowOrder, RowShuffle


@runtime_checkable
class Stage(Protocol):
    """`apply` transforms an operand; `undo` reverts it; a stage that is not lossless reverts to its canonical form."""

    @property
    def name(self) -> str:
        """What prints call it."""

    @property
    def lossless(self) -> bool:
        """Whether `undo` gets everything back."""

    def apply(self, t: Tensor) -> Tensor:
        """Operand [E, rows, ...] -> operand."""

    def undo(self, t: Tensor) -> Tensor:
        """The inverse of `apply`."""


@dataclass(frozen=True)
class PadHalves:
    """Pad each of `halves` parts of the rows to `padded_rows`, and the columns to `padded_cols`, with `fill`."""

    halves: int
    rows: int
    padded_rows: int
    cols: int | None = None
    padded_cols: int | None = None
    fill: int = 0
    lossless: bool = True

    @property
    def name(self) -> str:
        what = f"pad {'each half' if self.halves == 2 else 'rows'} {self.rows} -> {self.padded_rows}"
        return what if self.cols in (None, self.padded_cols) else f"{what}, columns {self.cols} -> {self.padded_cols}"

    def apply(self, t: Tensor) -> Tensor:
        parts = t.unflatten(1, (self.halves, self.rows))
        columns = () if self.cols is None else (0, self.padded_cols - self.cols)
        return torch.nn.functional.pad(parts, (*columns, 0, self.padded_rows - self.rows), value=self.fill).flatten(1, 2)

    def undo(self, t: Tensor) -> Tensor:
        parts = t.unflatten(1, (self.halves, self.padded_rows))[:, :, : self.rows]
        return (parts if self.cols is None else parts[..., : self.cols]).flatten(1, 2)


@dataclass(frozen=True)
class PadEnd:
    """Pad the rows once, at their end, and the columns. On two halves that moves the boundary between them: a fault."""

    rows: int
    padded_rows: int
    cols: int | None = None
    padded_cols: int | None = None
    lossless: bool = True

    @property
    def name(self) -> str:
        return f"pad the end of all rows {self.rows} -> {self.padded_rows}"

    def apply(self, t: Tensor) -> Tensor:
        columns = () if self.cols is None else (0, self.padded_cols - self.cols)
        return torch.nn.functional.pad(t, (*columns, 0, self.padded_rows - self.rows))

    def undo(self, t: Tensor) -> Tensor:
        return t[:, : self.rows] if self.cols is None else t[:, : self.rows, : self.cols]


@dataclass(frozen=True)
class PadAll:
    """Put the experts' rows one behind the other and pad once, behind the last: a kernel that looks for expert e at e * `padded_rows` finds
    another's rows. A fault."""

    rows: int
    padded_rows: int
    cols: int
    padded_cols: int
    lossless: bool = True

    @property
    def name(self) -> str:
        return f"experts at a stride of {self.rows} rows, not {self.padded_rows}"

    def apply(self, t: Tensor) -> Tensor:
        missing = t.shape[0] * (self.padded_rows - self.rows)
        joined = torch.nn.functional.pad(t.flatten(0, 1), (0, self.padded_cols - self.cols, 0, missing))
        return joined.unflatten(0, (t.shape[0], self.padded_rows))

    def undo(self, t: Tensor) -> Tensor:
        return t.flatten(0, 1)[: t.shape[0] * self.rows, : self.cols].unflatten(0, (t.shape[0], self.rows))


@dataclass(frozen=True)
class Shuffle:
    """Permute rows within blocks, as TRT-LLM-gen's kernels want them. Not part of a CUTLASS recipe: there, a fault."""

    shuffle: RowShuffle
    lossless: bool = True

    @property
    def name(self) -> str:
        return self.shuffle.name

    def apply(self, t: Tensor) -> Tensor:
        return t[:, self.shuffle.indices(t.shape[1]).to(t.device)]

    def undo(self, t: Tensor) -> Tensor:
        return t[:, torch.argsort(self.shuffle.indices(t.shape[1])).to(t.device)]


@dataclass(frozen=True)
class Experts:
    """Put the experts into another order: position e holds the checkpoint's expert order[e]. No recipe does this: a fault."""

    order: tuple[int, ...]
    lossless: bool = True

    @property
    def name(self) -> str:
        return "experts " + ",".join(map(str, self.order))

    def apply(self, t: Tensor) -> Tensor:
        return t[list(self.order)]

    def undo(self, t: Tensor) -> Tensor:
        return t[torch.argsort(torch.tensor(self.order))]


@dataclass(frozen=True)
class Rows:
    """Put the rows of w13, in logical order [gate; up], into another order. `was` is the order in the file, for the name only."""

    order: RowOrder
    was: str
    lossless: bool = True

    @property
    def name(self) -> str:
        return f"rows {self.was} -> {self.order.name}"

    def apply(self, t: Tensor) -> Tensor:
        return t[:, self.order.indices(t.shape[1] // 2).to(t.device)]

    def undo(self, t: Tensor) -> Tensor:
        return t[:, torch.argsort(self.order.indices(t.shape[1] // 2)).to(t.device)]


@dataclass(frozen=True)
class Lay:
    """Bring the bytes of each expert's matrix into a layout. `shape` is the shape of one expert's result, as the engine leaves it."""

    layout: Layout | Composed
    rows: int
    cols: int
    shape: tuple[int, ...]
    lossless: bool = True

    @property
    def name(self) -> str:
        return self.layout.name

    def apply(self, t: Tensor) -> Tensor:
        if tuple(t.shape[1:]) != (self.rows, self.cols):
            raise MxdebugError(f"operand before {self.name}", f"shape [E, {self.rows}, {self.cols}]", f"shape {list(t.shape)}", "not padded")
        return self.layout.pack(t).reshape(t.shape[0], *self.shape)

    def undo(self, t: Tensor) -> Tensor:
        return self.layout.unpack(t.reshape(t.shape[0], -1), self.rows, self.cols).reshape(t.shape[0], self.rows, self.cols)


@dataclass(frozen=True)
class ToDtype:
    """Round a float operand to the dtype that the kernel takes."""

    dtype: torch.dtype
    lossless: bool = False

    @property
    def name(self) -> str:
        return f"to {str(self.dtype).removeprefix('torch.')}"

    def apply(self, t: Tensor) -> Tensor:
        return t.to(self.dtype)

    def undo(self, t: Tensor) -> Tensor:
        return t

    def cost(self, t: Tensor) -> float:
        """Relative L2 error of this rounding on an operand; 0.0 where nothing is lost."""
        norm = t.double().norm().item()
        return (t.to(self.dtype).double() - t.double()).norm().item() / norm if norm else 0.0
