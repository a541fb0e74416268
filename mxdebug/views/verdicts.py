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
GROUPS = (("as it should be", GOOD, figures.UP), ("the test is wrong", BAD, figures.GATE),
          ("the data cannot show it", BLIND, "#cc79a7"))  # colours: Okabe and Ito's; the glyphs say the same
# What stands in a cell, since words would spill out of it in a narrow window; a key above has both.
GLYPHS = {NOTICED: "✓", ERROR: "E", MISSED: "✗", SAME: "=", ABSENT: "–", RIGHT: "✓", ALARM: "!"}
NARROW = 440  # pixels that a figure has in a window of 900 with the file browser open
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
        inside = [max(len(line[i]) for line in self.words) for i in range(len(self.columns))]
        names = [_lines(name, max(12, n)) for name, n in zip(self.columns, inside)]
        widths = [max(n, *map(len, name)) for name, n in zip(names, inside)]
        tall = max(map(len, names))
        over = zip(*([""] * (tall - len(name)) + name for name in names))
        lines = [*(("", texts) for texts in over), *zip(self.rows, self.words)]
        return "\n".join(f"{row:<{head}}  " + "  ".join(f"{w:<{n}}" for w, n in zip(words, widths)).rstrip() for row, words in lines)


def _lines(name: str, wide: int) -> list[str]:
    """A column's name in lines of that many characters; a number stays with its percent sign, and no word is broken."""
    bound = name.replace(" %", "\N{NO-BREAK SPACE}%")
    return [line.replace("\N{NO-BREAK SPACE}", " ") for line in textwrap.wrap(bound, wide, break_long_words=False)]


def key(v: Verdicts) -> list[str]:
    """A line for each group of words that is there: its colour, glyphs with their words, and what they have in common."""
    found = {w for line in v.words for w in line}
    return [f'<span style="color:{colour}">\N{BLACK SQUARE}</span> {", ".join(f"{GLYPHS[w]} {w}" for w in words if w in found)}: {meaning}'
            for meaning, words, colour in GROUPS if not found.isdisjoint(words)]


def draw(v: Verdicts, says: str) -> go.Figure:
    """A box with its glyph for each cell, above them a key of the glyphs; `says` is the sentence below."""
    left = 16 + 7 * max(map(len, v.rows))
    wide = max(8, (NARROW - left) // (7 * max(1, len(v.columns))))  # characters, 7 pixels each, that fit above a column
    names = [_lines(name, wide) for name in v.columns]
    head = 15 * max(map(len, names)) + 6  # pixels for the columns' names
    lines = key(v)
    top = head + figures.LINE * len(lines)
    figure = figures.figure(v.title, says, plot=22 * len(v.rows) + top, below=14, headings=False, left=left)
    for meaning, words, colour in GROUPS:
        at = [(x, y, w) for y, line in enumerate(v.words) for x, w in enumerate(line) if w in words]
        if at:
            figure.add_bar(x=[0.94] * len(at), base=[x - 0.47 for x, _, _ in at], y=[y for _, y, _ in at], orientation="h", width=0.86,
                           name=meaning, marker={"color": colour, "line": {"width": 0}}, text=[GLYPHS[w] for _, _, w in at],
                           textposition="inside", insidetextanchor="middle", textangle=0, textfont={"color": "black", "size": 13},
                           hoverinfo="text", hovertext=[f"{w}: {WORDS[w]}" for _, _, w in at], constraintext="none")
    # Not plotly's legend: that is no wider than the cells, and breaks over the columns' names.
    figure.add_annotation(text="<br>".join(lines), x=0, y=1, xref="paper", yref="paper", xanchor="left", yanchor="bottom", xshift=6 - left,
                          yshift=head, align="left", showarrow=False, font={"size": 12, "color": figures.TEXT})
    figure.update_layout(barmode="overlay", margin={"t": figure.layout.margin.t + top})
    figure.update_xaxes(**figures.plain_axis(tickvals=list(range(len(names))), ticktext=["<br>".join(name) for name in names], tickangle=0,
                                             side="top", tickfont={"size": 11}, range=[-0.5, len(names) - 0.5]))
    figure.update_yaxes(**figures.plain_axis(tickvals=list(range(len(v.rows))), ticktext=[f"{r} " for r in v.rows],
                                             range=[len(v.rows) - 0.5, -0.5]))
    return figure
