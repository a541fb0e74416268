"""Static pictures as inline SVG: maps of cells and strips of boxes. No scripts, nothing external; colours are the page's CSS variables."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import escaped

WIDE = 840  # units across: pixels on a page of 900
LETTER = 6.6  # units that a letter of 12 units' size needs
LOST = -1  # level of a cell with NaN or inf
LEVELS = 7


@dataclass(frozen=True)
class Grid:
    """A map of cells.

    cells    levels [rows][columns]: 0 (as it should be) to LEVELS - 1, or LOST
    heading  above it; across, down: what the axes are, in words
    first, last   labels at the two ends of each axis: (across, down)
    colours  "l": one colour that gets stronger; "r": eight that are told apart, for places
    """

    cells: Sequence[Sequence[int]]
    heading: str
    across: str
    down: str
    first: tuple[str, str]
    last: tuple[str, str]
    colours: str = "l"


@dataclass(frozen=True)
class Box:
    """One box of a strip: its text, the class that colours it, and whether it has a cross; gap: something was left out before it."""

    text: str
    colour: str
    wrong: bool = False
    gap: bool = False


def svg(height: float, label: str, parts: Sequence[str], wide: float = WIDE) -> str:
    """A picture; label: what a screen reader says."""
    return (
        f'<svg viewBox="0 0 {wide:.0f} {height:.0f}" style="max-width:{wide:.0f}px" role="img" aria-label="{escaped(label)}">'
        + "".join(parts)
        + "</svg>"
    )


def text(x: float, y: float, words: str, *, anchor: str = "start", style: str = "") -> str:
    """Words with their baseline at y."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" class="{style}">{escaped(words)}</text>'


def grids(panels: Sequence[Grid], label: str, tall: float = 260) -> str:
    """Maps side by side, each with its heading and axes."""
    left, top, gap, below = 34.0, 24.0, 50.0, 36.0
    wide = (WIDE - left - gap * (len(panels) - 1)) / len(panels)
    parts: list[str] = []
    rows, columns = max(len(p.cells) for p in panels), max(len(p.cells[0]) for p in panels)
    side = min(18.0, wide / columns, tall / rows) if len(panels) > 1 else min(wide / columns, 18.0)
    high = max(4.0, min(side, tall / rows))
    for i, p in enumerate(panels):
        x = left + i * (wide + gap)
        width, height = side * len(p.cells[0]), high * len(p.cells)
        parts += [
            text(x, 15, p.heading, style="h"),
            *_cells(p, x, top, side, high),
            f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{height:.1f}" class="frame"/>',
            text(x, top + height + 14, p.first[0], style="t"),
            text(x + width, top + height + 14, p.last[0], anchor="end", style="t"),
            text(x + width / 2, top + height + 28, p.across, anchor="middle", style="t"),
            text(x - 5, top + 11, p.first[1], anchor="end", style="t"),
            text(x - 5, top + height, p.last[1], anchor="end", style="t"),
            f'<text class="t" text-anchor="middle" transform="translate({x - 10:.1f} {top + height / 2:.1f}) rotate(-90)">'
            f"{escaped(p.down)}</text>",
        ]
    return svg(top + high * rows + below, label, parts)


def _cells(p: Grid, x: float, y: float, wide: float, high: float) -> list[str]:
    """One path a level, a rectangle for each run of equal cells in a row."""
    runs: dict[int, list[str]] = {}
    for r, line in enumerate(p.cells):
        start = 0
        for c in range(1, len(line) + 1):
            if c == len(line) or line[c] != line[start]:
                across = (c - start) * wide
                runs.setdefault(line[start], []).append(
                    f"M{x + start * wide:.1f} {y + r * high:.1f}h{across:.1f}v{high:.1f}h{-across:.1f}z"
                )
                start = c
    return [
        f'<path shape-rendering="crispEdges" class="{"lost" if level == LOST else f"{p.colours}{level}"}" d="{"".join(d)}"/>'
        for level, d in sorted(runs.items())
    ]


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Swatches with words: (class, words), as HTML."""
    return (
        '<p class="legend">'
        + "".join(
            f'<span><svg class="swatch" viewBox="0 0 12 12"><rect width="12" height="12" class="{name}"/></svg>{escaped(words)}</span>'
            for name, words in entries
        )
        + "</p>"
    )


def strips(lines: Sequence[tuple[str, Sequence[Box]]], label: str) -> str:
    """Lines of boxes one below the other, each with its name."""
    left = 12 + LETTER * max(len(name) for name, _ in lines)
    gaps = max(sum(b.gap for b in boxes) for _, boxes in lines)
    side = min(64.0, (WIDE - left - 20 * gaps) / max(len(boxes) for _, boxes in lines))
    parts: list[str] = []
    for i, (name, boxes) in enumerate(lines):
        y, x = 4 + 38 * i, left
        parts.append(text(0, y + 20, name, style="h"))
        for b in boxes:
            if b.gap:
                parts.append(text(x + 9, y + 20, "…", anchor="middle"))
                x += 20
            parts.append(f'<rect x="{x + 1:.1f}" y="{y}" width="{side - 2:.1f}" height="30" rx="3" class="{b.colour}"/>')
            parts.append(text(x + side / 2, y + (14 if b.wrong else 20), b.text, anchor="middle", style="on"))
            if b.wrong:
                parts.append(text(x + side / 2, y + 27, "×", anchor="middle", style="on cross"))
            x += side
    return svg(38 * len(lines) + 2, label, parts)
