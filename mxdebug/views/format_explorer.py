"""A number to its nearest codes: pick a format, a number, and how large the outlier is that shares its block scale."""

from __future__ import annotations

import math
from typing import Any

import ipywidgets
import plotly.graph_objects as go

from ..errors import MxdebugError
from ..formats import EXPONENT_RULES, FORMATS
from . import explorer, number, number_figure


LEAST, MOST = 0.01, 10.0  # of the outlier
TINY, HUGE = 2.0**-100, 2.0**100  # of the largest number: its global scale, 1/2688 of it, stays a normal float32


class Explorer(explorer.Explorer[number.Outlier]):
    """Lists of formats and of rules for the shared exponent, a slider for the outlier, and a box for the number looked at.

    `format`, `rule`, `outlier` and `number` are the widgets: set `.value` to drive it from code, then read `shown` (a
    `number.Outlier`). `number` holds text, so that it takes nan and inf as well: "0.01", "-1e-3", "nan". `rule` is of MX formats
    alone; NVFP4 rounds its block scale to E4M3.

    format    a name in `formats.FORMATS`; number: the number; outlier: from 0.01 to 10, three digits of it
    rule      one of `formats.EXPONENT_RULES`
    largest   of the whole tensor, above 0: it gives NVFP4 its global scale
    Raises MxdebugError for another name, and for an outlier or a largest number outside of these.
    """

    def __init__(self, format: str = "MXFP4", number: float = 0.01, outlier: float = 1.0, *, rule: str = "floor",
                 largest: float = number.LARGEST) -> None:
        for what, name, names in (("format", format, FORMATS), ("exponent rule", rule, EXPONENT_RULES)):
            if name not in names:
                raise MxdebugError(what, f"one of {', '.join(names)}", str(name))
        for what, value, least, most in (("outlier", outlier, LEAST, MOST), ("largest", largest, TINY, HUGE)):
            if not least <= value <= most:
                raise MxdebugError(what, f"a number from {least:g} to {most:g}", f"{value:g}")
        self._largest = largest
        self.format = ipywidgets.Dropdown(value=format, options=list(FORMATS), description="format", **self.WIDE)
        self.rule = ipywidgets.Dropdown(value=rule, options=EXPONENT_RULES, description="exponent rule", disabled=FORMATS[format].outer,
                                        **self.WIDE)
        self.outlier = ipywidgets.FloatLogSlider(value=outlier, min=round(math.log10(LEAST)), max=round(math.log10(MOST)), step=0.1, readout_format=".3g", description="outlier",
                                                 **self.LATE)
        self.number = ipywidgets.Text(value=f"{number:.9g}", description="number a", **self.LATE)
        super().__init__([self.format, self.rule, self.outlier, self.number])
        self.format.observe(self._ruled, names="value")

    def compute(self) -> number.Outlier:
        """The block with that outlier and that number."""
        fmt = FORMATS[self.format.value]
        try:
            value = float(self.number.value)
        except ValueError:
            raise MxdebugError("number", "a number, nan or inf", repr(self.number.value)) from None
        outlier = float(f"{self.outlier.value:.3g}")  # as the slider says
        return number.with_outlier(fmt, value, outlier, rule=None if fmt.outer else self.rule.value, largest=self._largest)

    def picture(self, shown: number.Outlier) -> go.Figure:
        """As `number_figure.draw`."""
        return number_figure.draw(shown)

    def _ruled(self, change: Any) -> None:
        self.rule.disabled = FORMATS[self.format.value].outer
