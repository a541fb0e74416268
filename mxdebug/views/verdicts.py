"""Which test notices which fault: words in a table, for tests of tests."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import plotly.graph_objects as go
from torch import Tensor

from ..errors import MxdebugError
from ..metrics import compare
from . import figures

NOTICED, ERROR, MISSED, SAME, ABSENT = "noticed", "error", "missed", "same bits", "cannot occur"
RIGHT, ALARM = "passes", "false alarm"
# What each word means, in the order in which several calls are summed up: one call that notices is enough.
WORDS = {
    NOTICED: "the test fails, as it should",
    ERROR: "an exception: nobody can overlook it",
    MISSED: "the output is wrong, and the test passes",
    SAME: "with this data the output does not change by a bit",
    ABSENT: "this data has no place for it",
    RIGHT: "right, and the test passes",
    ALARM: "right, and the test fails",
}
GOOD, BAD, BLIND = (NOTICED, ERROR, RIGHT), (MISSED, ALARM), (SAME, ABSENT)
COLOURS = ((GOOD, figures.UP), (BAD, figures.GATE), (BLIND, "#cc79a7"))  # Okabe and Ito's; the words say the same
Test = Callable[[Tensor, Tensor], bool]  # (got, want) -> whether it passes


def verdict(outputs: Iterable[tuple[Tensor | None, Tensor]], test: Test) -> str:
    """What a test makes of one fault, as one of WORDS. outputs: (under the fault, right) of every call that it looks at; none: ABSENT.

    An output that is None was refused by the kernel; one of another shape is an error too. After the first call that notices none is made.
    """
    found = {ABSENT}
    for got, want in outputs:
        if got is None or got.shape != want.shape:
            found.add(ERROR)
        elif compare(got, want).bit_identical:
            found.add(SAME)
        else:
            found.add(MISSED if test(got, want) else NOTICED)
        if NOTICED in found:
            break
    return next(word for word in WORDS if word in found)


@dataclass(frozen=True)
class Verdicts:
    """words[row][column] is what the test of that column makes of that row's fault: one of WORDS."""

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    words: tuple[tuple[str, ...], ...]

    def __post_init__(self) -> None:
        odd = {w for line in self.words for w in line} - set(WORDS)
        if odd or [len(line) for line in self.words] != [len(self.columns)] * len(self.rows):
            raise MxdebugError("verdicts", f"{len(self.rows)} x {len(self.columns)} of {', '.join(WORDS)}",
                               ", ".join(sorted(odd)) or f"lines of {sorted({len(line) for line in self.words})} words")

    def good(self, column: str) -> int:
        """How many rows that test judges as it should."""
        at = self.columns.index(column)
        return sum(line[at] in GOOD for line in self.words)

    def overlooked(self) -> Verdicts:
        """The rows that at least one test does not judge as it should."""
        kept = [i for i, line in enumerate(self.words) if any(w not in GOOD for w in line)]
        return Verdicts(self.title, tuple(self.rows[i] for i in kept), self.columns, tuple(self.words[i] for i in kept))

    def __str__(self) -> str:
        head = max(map(len, self.rows))
        widths = [max(len(name), *(len(line[i]) for line in self.words)) for i, name in enumerate(self.columns)]
        lines = [("", self.columns), *zip(self.rows, self.words)]
        return "\n".join(f"{row:<{head}}  " + "  ".join(f"{w:<{n}}" for w, n in zip(words, widths)).rstrip() for row, words in lines)


def draw(v: Verdicts, says: str) -> go.Figure:
    """A box with its word for each cell; `says` is the sentence below."""
    wide = max(10, 78 // max(1, len(v.columns)))  # characters that fit above a column in a window of 900 pixels
    parts = [name.replace(" %", "\N{NO-BREAK SPACE}%").replace(", ", ",\n").split("\n") for name in v.columns]
    names = ["<br>".join(line for part in name for line in textwrap.wrap(part, wide)) for name in parts]
    tall = 1 + max(name.count("<br>") for name in names)
    figure = figures.figure(v.title, says, plot=22 * len(v.rows) + 16 * tall, below=14, legend=True, headings=False,
                            left=16 + 7 * max(map(len, v.rows)))
    meanings = (("as it should be", GOOD), ("the test is wrong", BAD), ("the data cannot show it", BLIND))
    for (meaning, words), (_, colour) in zip(meanings, COLOURS):
        at = [(x, y, w) for y, line in enumerate(v.words) for x, w in enumerate(line) if w in words]
        if at:
            figure.add_bar(x=[0.94] * len(at), base=[x - 0.47 for x, _, _ in at], y=[y for _, y, _ in at], orientation="h", width=0.86,
                           name=meaning, marker={"color": colour, "line": {"width": 0}}, text=[w for _, _, w in at], textposition="inside",
                           insidetextanchor="middle", textangle=0, textfont={"color": "black", "size": 11}, hoverinfo="text",
                           hovertext=[WORDS[w] for _, _, w in at], constraintext="none")
    figure.update_layout(barmode="overlay")
    figure.update_xaxes(**figures.plain_axis(tickvals=list(range(len(names))), ticktext=names, tickangle=0, side="top",
                                             range=[-0.5, len(names) - 0.5]))
    figure.update_yaxes(**figures.plain_axis(tickvals=list(range(len(v.rows))), ticktext=[f"{r} " for r in v.rows],
                                             range=[len(v.rows) - 0.5, -0.5]))
    height = figure.layout.height
    figure.update_layout(margin={"t": figure.layout.margin.t + 16 * tall}, height=height)
    return figure
