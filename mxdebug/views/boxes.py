"""Boxes with text and arrows between them, in a figure whose axes count pixels downwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import plotly.graph_objects as go

from . import figures

Span = tuple[float, float]


def middle(span: Span) -> float:
    """Halfway."""
    return (span[0] + span[1]) / 2


@dataclass
class Boxes:
    """Collects what is drawn; `add_to` adds it at once, since plotly looks at all annotations again each time that it gets one more."""

    shapes: list[dict[str, Any]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)

    def box(self, x: Span, y: Span, lines: list[str], colour: str, dash: str = "solid", width: float = 1.0, size: int = 12,
            hover: str = "") -> None:
        """A rectangle with lines of text in its middle; hover: what is said when the text is pointed at."""
        self.shapes.append({"type": "rect", "x0": x[0], "x1": x[1], "y0": y[0], "y1": y[1],
                            "line": {"color": colour, "width": width, "dash": dash}})
        self.notes.append({"text": "<br>".join(lines), "x": middle(x), "y": middle(y), "showarrow": False, "hovertext": hover or None,
                           "font": {"size": size, "color": figures.TEXT}})

    def line(self, x: Span, y: Span) -> None:
        """A line from (x[0], y[0]) to (x[1], y[1])."""
        self.shapes.append({"type": "line", "x0": x[0], "x1": x[1], "y0": y[0], "y1": y[1], "line": {"color": figures.TEXT, "width": 1}})

    def arrow(self, x: Span, y: Span) -> None:
        """The same, with a head at its end."""
        self.notes.append({"text": "", "x": x[1], "y": y[1], "ax": x[0], "ay": y[0], "xref": "x", "yref": "y", "axref": "x", "ayref": "y",
                           "showarrow": True, "arrowhead": 2, "arrowsize": 1, "arrowwidth": 1, "arrowcolor": figures.TEXT})

    def add_to(self, figure: go.Figure, x: Span, y: Span) -> None:
        """Draw everything on axes of these ranges, beside the annotations that the figure has."""
        figure.update_layout(shapes=self.shapes, annotations=[*figure.layout.annotations, *self.notes],
                             xaxis=figures.plain_axis(range=list(x), showticklabels=False),
                             yaxis=figures.plain_axis(range=list(y), showticklabels=False))
