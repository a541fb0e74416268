"""Where does a layout put a byte? Pick a layout, a shape and a byte, by its row and column or by its offset in memory."""

from __future__ import annotations

import math
from typing import Any

import ipywidgets
import plotly.graph_objects as go
from torch import Tensor

from ..errors import MxdebugError
from ..layouts import Layout
from . import byte, byte_figure, explorer

LARGEST = 1 << 20  # rows and columns that can be asked for
AS_WRITTEN = "as it is written"
NUMBER, CHOICE = ({"style": {"description_width": "8em"}, "layout": {"width": width, "max_width": "100%"}} for width in ("16em", "26em"))


class Explorer(explorer.Explorer[byte.Byte]):
    """Lists of layouts, boxes for rows and columns of the matrix, and for a byte: `row` and `column`, or `offset` in memory.

    `written_as`, `read_as`, `rows`, `columns`, `row`, `column` and `offset` are the widgets: set `.value` to drive it from code, then read
    `shown` (a `byte.Byte`). The last of row, column and offset that was moved decides; the others follow. Another shape keeps the byte
    where it has one there, else takes the last row or column.

    layout   how the buffer is written: a name in `byte.CATALOGUE`, or a Layout of your own
    row, column   the byte that is picked first; the last row or column where the matrix has fewer
    read_as  how a kernel reads it; None: as it is written
    values   uint8 [rows, columns], E8M0 bytes to colour by; the shape is then theirs and stays
    Raises MxdebugError for a layout without that name, and where it does not take the shape.
    """

    def __init__(self, layout: str | Layout = "128x4", rows: int = 128, columns: int = 32, row: int = 69, column: int = 6, *,
                 read_as: str | Layout | None = None, values: Tensor | None = None) -> None:
        self._layouts = dict(byte.CATALOGUE)
        self._values, self._by_offset, self._following = values, False, False
        if values is not None:
            rows, columns = values.shape
        written, read = self._named(layout), AS_WRITTEN if read_as is None else self._named(read_as)
        names = list(self._layouts)

        def whole(value: int, low: int, high: int, label: str, **more: Any) -> ipywidgets.BoundedIntText:
            return ipywidgets.BoundedIntText(value=value, min=low, max=high, description=label, **NUMBER, **more)

        def line(*controls: ipywidgets.Widget) -> ipywidgets.HBox:
            return ipywidgets.HBox(controls, layout={"flex_flow": "row wrap"})

        self.written_as = ipywidgets.Dropdown(value=written, options=names, description="written as", **CHOICE)
        self.read_as = ipywidgets.Dropdown(value=read, options=[AS_WRITTEN, *names], description="the kernel reads", **CHOICE)
        self.rows = whole(rows, 1, LARGEST, "rows", disabled=values is not None)
        self.columns = whole(columns, 1, LARGEST, "columns", disabled=values is not None)
        self.row, self.column = whole(row, 0, rows - 1, "row"), whole(column, 0, columns - 1, "column")
        self.offset = whole(0, 0, math.prod(self._layouts[written].padded(rows, columns)) - 1, "offset")
        super().__init__([line(self.written_as, self.read_as), line(self.rows, self.columns), line(self.row, self.column, self.offset)])
        self._follow()

    def compute(self) -> byte.Byte:
        """The byte that was picked last, by place or by offset."""
        written = self._layouts[self.written_as.value]
        read = None if self.read_as.value in (AS_WRITTEN, written.name) else self._layouts[self.read_as.value]
        shape = (self.rows.value, self.columns.value)
        if self._by_offset:
            return byte.at_offset(written, shape, self.offset.value, read_as=read, values=self._values)
        return byte.at(written, shape, self.row.value, self.column.value, read_as=read, values=self._values)

    def picture(self, shown: byte.Byte) -> go.Figure:
        """As `byte_figure.draw`."""
        return byte_figure.draw(shown)

    def move(self, **values: Any) -> None:
        """Set several controls, the shape before the byte, and compute once; `layout` is another word for `written_as`."""
        if "layout" in values:  # not a control here: a widget's `layout` is its place on the page
            values["written_as"] = values.pop("layout")
        if values.keys() & {"row", "column", "offset"}:
            self._by_offset = "offset" in values
        super().move(**dict(sorted(values.items(), key=lambda v: v[0] in ("row", "column", "offset"))))

    def _moved(self, change: Any) -> None:
        if self._following:
            return
        if change is not None and change.owner in (self.row, self.column, self.offset):
            self._by_offset = change.owner is self.offset
        elif change is not None:
            self._bound()
        super()._moved(change)
        if not self._held and self.error is None:
            self._follow()

    def _bound(self) -> None:
        """Rows, columns and offsets that the matrix has are those that can be picked."""
        self._following = True
        try:
            self.row.max, self.column.max = self.rows.value - 1, self.columns.value - 1
            self.offset.max = math.prod(self._layouts[self.written_as.value].padded(self.rows.value, self.columns.value)) - 1
        except MxdebugError:
            pass  # the layout refuses the shape; `compute` says so
        finally:
            self._following = False

    def _follow(self) -> None:
        """Set row, column and offset to the byte that is shown; padding has an offset only."""
        picked = self.shown.picked
        self._following = True
        try:
            self.offset.value = picked.offset
            if not picked.padding:
                self.row.value, self.column.value = picked.row, picked.column
        finally:
            self._following = False
        self._by_offset = picked.padding

    def _named(self, layout: str | Layout) -> str:
        if isinstance(layout, Layout):
            self._layouts.setdefault(layout.name, layout)
            if self._layouts[layout.name] != layout:
                raise MxdebugError("layout", "a name of its own", layout.name, "another layout has that name")
            return layout.name
        if layout not in self._layouts:
            raise MxdebugError("layout", f"one of {', '.join(self._layouts)}", str(layout))
        return layout
