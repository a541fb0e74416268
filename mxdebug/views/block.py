"""One block of a block-scaled weight: 4-bit codes, one block scale, and the numbers that they make."""

from __future__ import annotations

from dataclasses import dataclass

import plotly.graph_objects as go

from ..formats import BlockTensor
from . import figures


@dataclass(frozen=True)
class Block:
    """What one block holds.

    where    expert, row, block
    payload  its bytes, two codes each; codes: the 4-bit codes, even element first
    elements the number that each code stands for; scale_byte: the block scale as stored; scale: its value
    weights  elements * scale
    steps    all numbers that this block could hold with this scale, ascending
    """

    where: tuple[int, int, int]
    format: str
    payload: tuple[int, ...]
    codes: tuple[int, ...]
    elements: tuple[float, ...]
    scale_byte: int
    scale: float
    weights: tuple[float, ...]
    steps: tuple[float, ...]

    def __str__(self) -> str:
        expert, row, number = self.where
        n, shown = len(self.codes), 8
        per_byte = n // len(self.payload)

        def line(label: str, cells: list[str], width: int, what: str) -> str:
            return f"{label:<9}" + "".join(f"{c:>{width}}" for c in cells) + f"  ... {what}"

        return "\n".join([
            f"{self.format}, expert {expert}, row {row}, block {number}: elements {number * n} to {(number + 1) * n - 1}",
            line("payload", [f"{b:02x}" for b in self.payload[: shown // per_byte]], 9 * per_byte, f"{len(self.payload)} bytes (hex)"),
            line("codes", [str(c) for c in self.codes[:shown]], 9, f"{n} codes"),
            line("elements", [f"{e:.1f}" for e in self.elements[:shown]], 9, "codes as numbers"),
            f"{'scale':<9}     byte {self.scale_byte} means 2^({self.scale_byte} - 127) = {self.scale:g}",
            line("weights", [f"{w:.5f}" for w in self.weights[:shown]], 9, "element * scale"),
        ])


def block(weight: BlockTensor, expert: int, row: int, number: int) -> Block:
    """The block of that number in one row of one expert of an MX weight [E, rows, K]."""
    f = weight.format
    per_byte = 2 if f.packed else 1
    payload = weight.payload[expert, row, number * f.block // per_byte: (number + 1) * f.block // per_byte]
    codes = weight.codes()[expert, row, number * f.block: (number + 1) * f.block]
    byte = weight.scales[expert, row, number]
    scale = f.scale.decode(byte).item()
    elements = f.element.decode(codes)
    return Block((expert, row, number), f.name, tuple(payload.tolist()), tuple(codes.tolist()), tuple(elements.tolist()), int(byte),
                 scale, tuple((elements * scale).tolist()), tuple(sorted({v * scale for v in f.element.table().tolist()})))


def draw(b: Block) -> go.Figure:
    """Bars for the weights over lines for all numbers that the block could hold."""
    n = len(b.codes)
    figure = figures.figure(
        f"{n} weights that share one block scale",
        f"Each bar is one weight. It can end on a grey line only: the {len(b.steps)} numbers that a 4-bit code has (0, 0.5, 1, 1.5, 2, 3, "
        f"4, 6 and their negatives), each times the block scale {b.scale:g}. Another scale byte stretches or shrinks the whole picture.",
        plot=240, headings=False, left=78)
    figure.add_bar(x=list(range(n)), y=list(b.weights), marker={"color": figures.OTHER}, hovertemplate="element %{x}: %{y}<extra></extra>")
    for step in b.steps:
        figure.add_hline(y=step, line={"color": figures.GRID, "width": 1}, layer="below")
    labelled = [s for s in b.steps if abs(s / b.scale) in (0, 1, 2, 3, 4, 6)]
    figure.update_xaxes(**figures.plain_axis(title=f"element of the block (0 to {n - 1})", tickvals=list(range(0, n, 4)),
                                             range=[-0.7, n - 0.3]))
    figure.update_yaxes(**figures.plain_axis(title="weight", tickvals=labelled, ticktext=[f"{s:g}" for s in labelled],
                                             range=[b.steps[0] * 1.06, b.steps[-1] * 1.06]))
    return figure
