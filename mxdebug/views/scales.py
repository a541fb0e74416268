"""The block scales that a kernel reads, beside those that the checkpoint means."""

from __future__ import annotations

from dataclasses import dataclass

import plotly.graph_objects as go
import torch
from torch import Tensor

from ..errors import MxdebugError
from ..formats import E8M0, E8M0_SM90, MXFP4
from ..reference import MoELayer
from . import figures
from .worst import Worst, worst_scales


@dataclass(frozen=True, eq=False)
class Reading:
    """Two logical matrices of scale bytes, both pooled alike.

    meant, read  uint8 [rows shown, columns]: by the checkpoint, by the kernel
    first_row    of the part that is shown; pooled: (rows, columns) of the scale matrix in one cell
    off_by       binades (read - meant) -> number of block scales, over all experts and rows
    special      how many bytes read or meant are 0x00 or 0xFF, which are no powers of two to the kernel; they are not in off_by
    worst        the block scales that are furthest off, of the rows shown
    """

    title: str
    meant: Tensor
    read: Tensor
    first_row: int
    pooled: tuple[int, int]
    off_by: dict[int, int]
    special: int
    worst: Worst

    @property
    def total(self) -> int:
        """All block scales that were compared."""
        return sum(self.off_by.values()) + self.special

    @property
    def wrong(self) -> int:
        """How many of them are read as another number, or as 0.0 or inf."""
        return self.total - self.off_by.get(0, 0)

    def __str__(self) -> str:
        lines = [f"{self.wrong} of {self.total} block scales are read wrong ({self.wrong / self.total:.1%})",
                 f"  {'factor':<9} {'too small':>9} {'too large':>9}"]
        for binades in sorted({abs(b) for b in self.off_by} - {0}):
            lines.append(f"  {2 ** binades:<9} {self.off_by.get(-binades, 0):>9} {self.off_by.get(binades, 0):>9}")
        if self.special:
            lines.append(f"  read as 0.0 or inf: {self.special}")
        return "\n".join(lines)


def reading(meant: Tensor, read: Tensor, *, title: str, expert: int = 0, rows: range | None = None) -> Reading:
    """Compare scale bytes [E, rows, columns] as the kernel reads them with those that are meant; `rows` of one expert are shown.

    Raises MxdebugError where the two have other shapes or are no bytes.
    """
    if meant.shape != read.shape or meant.dtype != torch.uint8 or read.dtype != torch.uint8 or meant.dim() != 3:
        raise MxdebugError("block scales", f"uint8 {list(meant.shape)} twice", f"{read.dtype} {list(read.shape)}",
                           "decode the call's operands first; a padded layer next to an unpadded one")
    rows = range(meant.shape[1]) if rows is None else rows
    # How often each byte is read for each that is meant, an expert at a time: counting makes 8 bytes of each.
    pairs = torch.zeros(1 << 16, dtype=torch.int64)
    for a, b in zip(meant, read):
        pairs += torch.bincount((a.int() * 256 + b).flatten(), minlength=1 << 16)
    usual = pairs.reshape(256, 256)[1:255, 1:255]
    off_by = {b: n for b in range(-253, 254) if (n := int(usual.diagonal(b).sum()))}
    shown = tuple(t[expert, rows.start: rows.stop] for t in (meant, read))
    worst = worst_scales(*shown, block=MXFP4.block, meant_scale=E8M0, read_scale=E8M0_SM90, first_row=rows.start)
    (a, pooled), (b, _) = map(figures.pool, shown)
    return Reading(title, a, b, rows.start, pooled, off_by, int(pairs.sum() - usual.sum()), worst)


def w13(meant: MoELayer, read: MoELayer, *, title: str, expert: int = 0, rows: range | None = None) -> Reading:
    """The block scales of w13, rows as the kernel has them (up, then gate): of the checkpoint's layer, and of a call's decoded one."""
    def both(layer: MoELayer) -> Tensor:
        return layer.up.scales if layer.gate is None else torch.cat([layer.up.scales, layer.gate.scales], dim=1)

    return reading(both(meant), both(read), title=title, expert=expert, rows=rows)


def draw(r: Reading) -> go.Figure:
    """Both matrices side by side on one colour scale."""
    pooled = "" if r.pooled == (1, 1) else f" Each cell is the largest of {r.pooled[0]} x {r.pooled[1]} block scales."
    seen = "Right: the same cells as the kernel reads them out of the bytes that it was given."
    if not r.wrong:
        seen = "Right: the kernel reads the same."
    says = f"One cell a block of 32 weights, coloured by its block scale. Left: each row and each column has its own level. {seen}{pooled}"
    cells, columns = r.meant.shape
    has_special = bool(((r.read == 0) | (r.read == 255) | (r.meant == 0) | (r.meant == 255)).any())
    figure = figures.figure(r.title, says, plot=figures.cell_height(cells), below=figures.BELOW_CELLS, legend=has_special)
    both = torch.cat([r.meant.flatten(), r.read.flatten()])
    for i, codes in enumerate((r.meant, r.read)):
        figures.cells(figure, codes, both, ("x", "x2")[i], ("y", "y2")[i], r.first_row, r.pooled[0], scale=True, bar=i == 0)
    row_axis = {"range": [r.first_row + (cells - 0.5) * r.pooled[0], r.first_row - 0.5 * r.pooled[0]]}
    column_axis = {"title": "column", "range": [-0.5, columns - 0.5]}
    figure.update_layout(
        xaxis=figures.plain_axis(domain=[0, 0.48], **column_axis), yaxis=figures.plain_axis(title="row", **row_axis),
        xaxis2=figures.plain_axis(domain=[0.52, 1], anchor="y2", **column_axis),
        yaxis2=figures.plain_axis(anchor="x2", showticklabels=False, **row_axis))
    figures.heading(figure, 0, "the checkpoint means")
    figures.heading(figure, 0.52, "the kernel reads")
    return figure
