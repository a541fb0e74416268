"""What all explorers share: controls, what they say in words, a picture; and that an exception is seen."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any, Generic, TypeVar

import ipywidgets
import plotly.graph_objects as go
import traitlets

from ..errors import MxdebugError
from . import figures

Data = TypeVar("Data")


class Explorer(ipywidgets.VBox, Generic[Data]):
    """Some controls; below them what they lead to, in words and as a picture.

    A subclass makes its controls, hands them to `super().__init__`, and says with `compute` what the controls mean (a record whose
    `str` is the text) and with `picture` how it looks. Both are plain: every move of a control calls them, in the browser as in a cell
    that sets `.value`; after it `shown` is the record.

    A MxdebugError (a shape that a layout refuses, say) is an answer: it stands in place of the text, the last picture stays, and `error`
    holds it. Any other exception stands there too, and is raised: a cell that moved the control fails.
    """

    WIDE = {"style": {"description_width": "9em"}, "layout": {"width": "34em", "max_width": "100%"}}
    LATE = {"continuous_update": False, **WIDE}  # for sliders whose every step costs something: at the end of a drag, not all along it

    def __init__(self, controls: Sequence[ipywidgets.Widget]) -> None:
        self._says = ipywidgets.HTML(layout={"overflow": "auto"})  # a long line scrolls alone, not the controls with it
        self._says.add_class("mxdebug-says")
        self.error: MxdebugError | None = None
        self.shown: Data = self.compute()
        # Not plotly's FigureWidget: it stays blank where values change before the browser has drawn it, as in "Run All Cells".
        self._figure = ipywidgets.Output()
        self._controls = tuple(controls)
        self._held = 0
        self._tell()
        super().__init__([*controls, self._says, self._figure])
        self.add_class("mxdebug-explorer")
        for control in _values(controls):
            control.observe(self._moved, names="value")

    def compute(self) -> Data:
        """What the controls lead to."""
        raise NotImplementedError

    def picture(self, shown: Data) -> go.Figure:
        """The figure of what `compute` returned."""
        raise NotImplementedError

    def move(self, **values: Any) -> None:
        """Set several controls, by the names of their attributes, and compute once."""
        self._held += 1
        try:
            for name, value in values.items():
                self._set(name, value)
        finally:
            self._held -= 1
        self._moved(None)

    def _set(self, name: str, value: Any) -> None:
        control = getattr(self, name, None)
        if control not in _values(self._controls):
            names = [n for n, c in vars(self).items() if c in _values(self._controls)]
            raise MxdebugError("control", f"one of {', '.join(names)}", repr(name))
        try:
            control.value = value
        except traitlets.TraitError as error:
            offered = [o[1] if isinstance(o, tuple) else o for o in getattr(control, "options", ())]
            raise MxdebugError(name, f"one of {', '.join(map(str, offered))}" if offered else "a value that the control takes", repr(value), str(error)) from None

    def _moved(self, change: object) -> None:
        if self._held:
            return
        try:
            self.shown = self.compute()
            self.error = None
            self._tell()
        except MxdebugError as error:
            self.error = error
            self._says.value = _pre(f"{error.operand}\n  expected  {error.expected}\n  got       {error.got}"
                                    + (f"\n  likely    {error.reason}" if error.reason else ""), "!")
        except Exception as error:
            self._says.value = _pre(f"{type(error).__name__}: {error}", "!")
            raise

    def _tell(self) -> None:
        self._says.value = _pre(str(self.shown))
        still = self._still()
        self._figure.layout.min_height = f"{still[figures.MIMETYPE]['layout']['height']}px"  # so that the page does not jump
        self._figure.outputs = ({"output_type": "display_data", "data": still, "metadata": {}},)

    def _still(self) -> dict[str, Any]:
        return {figures.MIMETYPE: figures.bundle(self.picture(self.shown)), "text/plain": f"[explorer]\n{self.shown}"}

    def __str__(self) -> str:
        return str(self.shown) if self.error is None else str(self.error)

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        """The widget; where none can run, the same figure without controls; where none can be drawn, the text."""
        return {**super()._repr_mimebundle_(**kwargs), **self._still()}


def _values(controls: Sequence[ipywidgets.Widget]) -> list[ipywidgets.Widget]:
    """The controls that hold a value, also those inside boxes."""
    out: list[ipywidgets.Widget] = []
    for c in controls:
        if isinstance(c, ipywidgets.Box):
            out += _values(c.children)
        elif c.has_trait("value") and not isinstance(c, (ipywidgets.HTML, ipywidgets.Label)):
            out.append(c)
    return out


def _pre(text: str, mark: str = "") -> str:
    lead = f'<b style="color: #c4572b">{mark}</b> ' if mark else ""
    return f'<pre style="margin: 0.4em 0; line-height: 1.4; white-space: pre; overflow-x: auto">{lead}{escape(text)}</pre>'
