"""Drawing a number between its codes, and the block that it stands in: `number.Outlier` as two panels."""

from __future__ import annotations

import math

import plotly.graph_objects as go

from . import figures
from .number import Code, Number, Outlier

LEFT, RIGHT = (0, 0.33), (0.46, 1)  # where the panels are
BESIDE = 2      # codes drawn on either side of the two next to the number
LIFT = 4        # the 0 of the logarithmic axis stands that factor below the smallest number
FAR = (figures.ABOVE, figures.BELOW)  # what points to a number that is further off than the axis goes


def draw(o: Outlier) -> go.Figure:
    """Left: the codes around the number `a`. Right: what is meant and what is read, for each number of the block."""
    figure = figures.figure(_title(o), _says(o), plot=320, legend=1, left=52)
    _codes(figure, o)
    _block(figure, o)
    figures.heading(figure, LEFT[0], "a between its codes")
    figures.heading(figure, RIGHT[0], f"all {len(o.block.values)} numbers: magnitudes")
    return figure


def _title(o: Outlier) -> str:
    n = o.number
    return f"{o.block.format.name}: {n.value:g} is read as {n.chosen.value:g}"


def _says(o: Outlier) -> str:
    if math.isnan(o.block.step):
        return "One NaN makes the block scale NaN: all numbers of the block are read as NaN."
    return ("Left: lines are codes, each with what it is read as in this block; the number, a, goes to the nearest. Right: lines are all "
            "magnitudes that this block can hold; a dash is what the dot is read as. Besides a and the outlier there are "
            f"{o.loss.of} numbers, and {o.loss.zeros} become 0; without the outlier, {o.without.zeros}.")


# -- left -------------------------------------------------------------------------------------------------------------


def _around(o: Outlier, n: Number) -> list[Code]:
    """The codes next to the number and BESIDE more on either side, ascending; 0 once, with the number's sign."""
    element = o.block.format.element
    top = 1 << (element.bits - 1)
    size = [v for v in element.table()[:top].tolist() if v <= element.max]  # ascending with the code
    ladder = [*(-c for c in range(len(size) - 1, 0, -1)), *range(len(size))]  # -c: the code c with a sign
    low, high = (0 if c is None else (-(c.code - top) if c.code >= top else c.code) for c in (n.below or n.above, n.above or n.below))
    first, last = ladder.index(low), ladder.index(high)
    zero = top if math.copysign(1.0, n.scaled) < 0 else 0
    return [o.block.code(zero if c == 0 else top - c if c < 0 else c) for c in ladder[max(0, first - BESIDE): last + BESIDE + 1]]


def _codes(figure: go.Figure, o: Outlier) -> None:
    n = o.number
    axis = figures.plain_axis(title="number / scale", range=[-1, 1], tickvals=[])
    if n.below is not None or n.above is not None:
        codes = _around(o, n)
        elements = [c.element for c in codes]
        gap = max(b - a for a, b in zip(elements, elements[1:]))
        low, high = elements[0] - 0.5 * gap, elements[-1] + 0.7 * gap
        if low > n.scaled >= low - 2 * gap:
            low = n.scaled - 0.4 * gap
        if high < n.scaled <= high + 2 * gap:
            high = n.scaled + 0.4 * gap
        figure.add_scatter(x=[x for _ in codes for x in (0, 1, None)], y=[y for c in codes for y in (c.element, c.element, None)],
                           mode="lines", line={"color": figures.TEXT, "width": 1}, hoverinfo="skip", showlegend=False)
        figure.add_scatter(x=[0.02] * len(codes), y=elements, mode="text", textposition="top right", showlegend=False, hoverinfo="skip",
                           text=[f"<b>{c.bits}</b>  {c.value:.4g}" if c == n.chosen else f"{c.bits}  {c.value:.4g}" for c in codes],
                           textfont={"family": "monospace", "size": 11, "color": figures.TEXT})
        if math.isfinite(n.middle):
            figure.add_scatter(x=[0, 1], y=[n.middle] * 2, mode="lines", line={"color": figures.TEXT, "width": 1, "dash": "dot"},
                               name="halfway", hovertemplate="halfway: %{y}<extra></extra>")
        shown = min(max(n.scaled, low + 0.15 * gap), high - 0.15 * gap)
        figure.add_scatter(x=[0.85, 0.85], y=[shown, n.chosen.element], mode="lines", line={"color": figures.READ, "width": 2},
                           hoverinfo="skip", showlegend=False)
        figure.add_scatter(x=[0.85], y=[n.chosen.element], mode="markers", hoverinfo="skip", showlegend=False,
                           marker={"symbol": "line-ew", "size": 28, "line": {"color": figures.READ, "width": 3}})
        if shown != n.scaled:  # too far off to be drawn in its place
            figure.add_scatter(x=[0.72], y=[shown], mode="markers", name="further off", hoverinfo="skip",
                               marker={"symbol": FAR[n.scaled < shown], "size": 9, "color": figures.TEXT})
        _letter(figure, 0.85, shown, f"{n.value:g} / {n.step:g} = {n.scaled:g}", "x", "y")
        every = -(-len(elements) // 8)
        axis = figures.plain_axis(title="number / scale", range=[low, high], tickvals=elements[::every],
                                  ticktext=[f"{e:g}" for e in elements[::every]])
    else:
        figure.add_annotation(text="NaN lies between no codes", x=0.5, y=0, xref="x", yref="y", showarrow=False,
                              font={"color": figures.TEXT})
    figure.layout.xaxis = figures.plain_axis(domain=LEFT, range=[0, 1], showticklabels=False)
    figure.layout.yaxis = axis


# -- right ------------------------------------------------------------------------------------------------------------


def _block(figure: go.Figure, o: Outlier) -> None:
    b = o.block
    meant, read = (t.double().abs().tolist() for t in (b.values, b.read))
    element = b.format.element
    ladder = [v * b.step for v in element.table()[1: 1 << (element.bits - 1)].tolist() if v <= element.max]
    seen = [v for v in (*meant, *read) if v and math.isfinite(v)] or [1.0]
    low, high = min(seen), max([*seen, *(v for v in ladder[-1:] if v <= 8 * max(seen))])
    steps = [v for v in ladder if low / 2 <= v <= high]
    floor, top = low / LIFT, high * 2
    axes = {"xaxis": "x2", "yaxis": "y2"}
    n = len(meant)
    figure.add_scatter(x=[x for _ in steps for x in (-0.7, n - 0.3, None)], y=[y for v in steps for y in (v, v, None)], mode="lines",
                       line={"color": figures.GRID, "width": 1}, hoverinfo="skip", showlegend=False, **axes)

    def place(v: float) -> float:
        return floor if v == 0 or math.isnan(v) else min(v, top)

    figure.add_scatter(x=[x for i in range(n) for x in (i, i, None)],
                       y=[y for m, r in zip(meant, read) for y in (place(m), place(r), None)], mode="lines",
                       line={"color": figures.GRID, "width": 1}, hoverinfo="skip", showlegend=False, **axes)
    groups = (
        ("meant", meant, lambda v: 0 < v < math.inf, {"symbol": "circle", "size": 6, "color": figures.MEANT}),
        ("read as", read, lambda v: 0 < v < math.inf, {"symbol": "line-ew", "size": 11, "line": {"color": figures.READ, "width": 2.5}}),
        (figures.ZERO, read, lambda v: v == 0, {"symbol": figures.SYMBOLS[figures.ZERO], "size": 7, "color": figures.READ}),
        (figures.FROM_ZERO, meant, lambda v: v == 0, {"symbol": figures.SYMBOLS[figures.FROM_ZERO], "size": 11, "color": figures.MEANT}),
        (figures.INF, read, math.isinf, {"symbol": figures.SYMBOLS[figures.INF], "size": 8, "color": figures.READ}),
        (figures.NAN, read, math.isnan, {"symbol": figures.SYMBOLS[figures.NAN], "size": 7, "color": figures.READ}))
    for name, values, belongs, marker in groups:
        some = [i for i in range(n) if belongs(values[i])]
        if some:
            figure.add_scatter(x=some, y=[place(values[i]) for i in some], mode="markers", name=name, marker=marker,
                               text=[f"{b.values[i]:g} is read as {b.read[i]:g}" for i in some],
                               hovertemplate="number %{x}: %{text}<extra></extra>", **axes)
    _letter(figure, o.at, place(meant[o.at]), f"{o.number.value:g} is read as {o.number.chosen.value:g}", "x2", "y2")
    powers = range(math.ceil(math.log10(low)), math.floor(math.log10(top)) + 1)
    tens = [10.0 ** p for p in powers[:: max(1, -(-len(powers) // 8))]]
    figure.layout.xaxis2 = figures.plain_axis(domain=RIGHT, title="number of the block", anchor="y2", range=[-0.9, n - 0.1])
    figure.layout.yaxis2 = figures.plain_axis(type="log", anchor="x2", range=[math.log10(floor / 1.6), math.log10(top * 1.2)],
                                              tickvals=[floor, *tens], ticktext=["0", *(f"{t:g}" for t in tens)])


def _letter(figure: go.Figure, x: float, y: float, says: str, xaxis: str, yaxis: str) -> None:
    figure.add_scatter(x=[x], y=[y], text=["a"], mode="markers+text", xaxis=xaxis, yaxis=yaxis, showlegend=False, hovertext=[says],
                       hoverinfo="text", marker={"size": 16, "color": "white", "line": {"color": "black", "width": 1.5}},
                       textfont={"color": "black", "size": 12})
