"""Do the format explorer's controls lead to the rounding that they say, and does its figure show it?"""

from __future__ import annotations

import json
import math
import time
from typing import Any

import plotly.graph_objects as go
import pytest

from mxdebug.errors import MxdebugError
from mxdebug.formats import EXPONENT_RULES, FORMATS, MXFP4, NVFP4
from mxdebug.views import figures, number_figure
from mxdebug.views.format_explorer import Explorer
from mxdebug.views.number import Outlier, with_outlier


def drawn(x: Explorer) -> dict[str, Any]:
    return x.children[-1].outputs[0]["data"][figures.MIMETYPE]


def same(x: Explorer, o: Outlier) -> bool:
    """Whether the explorer shows that, in words and as a picture."""
    want = json.loads(number_figure.draw(o).to_json())
    return str(x) == str(o) and drawn(x)["data"] == want["data"] and drawn(x)["layout"] == want["layout"]


def trace(figure: go.Figure, name: str) -> Any:
    return next((t for t in figure.data if t.name == name), None)


# -- controls -----------------------------------------------------------------------------------------------------------


def test_it_starts_with_the_notebooks_block_and_follows() -> None:
    x = Explorer()
    assert same(x, with_outlier(MXFP4, 0.01, 1.0, rule="floor")) and x.shown.loss.zeros == 30
    x.outlier.value = 0.02
    assert same(x, with_outlier(MXFP4, 0.01, 0.02, rule="floor")) and x.shown.loss.zeros == 2
    x.outlier.value = 10**-0.5  # a place of the slider
    assert same(x, with_outlier(MXFP4, 0.01, 0.316, rule="floor"))  # as it says beside it
    x.number.value = "0.3"
    # 0.3 is the largest now: 2^(-2 - 2) = 0.0625, and 4.8 of that is nearer to 4 than to 6: 0.25
    assert x.shown.number.chosen.value == 0.25 and x.shown.block.scale == 0.0625
    x.rule.value = "ceil"
    assert x.shown.block.scale == 0.0625  # 0.3 / 6 = 0.05
    x.move(number="0.4", outlier=0.1)
    assert x.shown.block.scale == 0.125   # 0.4 / 6 = 0.067 needs the next power of two
    x.rule.value = "floor"
    assert x.shown.block.scale == 0.0625 and "no number beyond 6" in x.shown.number.why  # 6.4


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_and_rule(name: str) -> None:
    x = Explorer(number=-0.037, outlier=0.5)
    for rule in EXPONENT_RULES:
        x.move(format=name, rule=rule)
        outer = FORMATS[name].outer
        assert x.rule.disabled == outer and same(x, with_outlier(FORMATS[name], -0.037, 0.5, rule=None if outer else rule))


def test_the_global_scale_follows_from_the_largest_of_the_tensor() -> None:
    x = Explorer("NVFP4", 0.01, 1.0, largest=1.0)
    assert x.rule.disabled and x.shown.block.global_scale == pytest.approx(1 / 2688) and x.shown.block.scale_byte == 0x7E
    assert same(x, with_outlier(NVFP4, 0.01, 1.0, largest=1.0))


def test_what_is_no_number_is_said_in_place_and_the_picture_stays() -> None:
    x = Explorer()
    before = drawn(x)
    x.number.value = "one"
    assert isinstance(x.error, MxdebugError) and "a number, nan or inf" in x.children[-2].value and drawn(x) is before
    x.move(number="inf", format="NVFP4")
    assert "finite numbers" in x.children[-2].value and drawn(x) is before
    x.format.value = "MXFP4"
    assert x.error is None and x.shown.number.value == math.inf
    for what in ({"format": "FP4"}, {"rule": "round"}):
        with pytest.raises(MxdebugError, match="one of"):
            Explorer(**what)


@pytest.mark.parametrize("what", [{"outlier": 0.0}, {"outlier": -1.0}, {"outlier": 11.0}, {"outlier": math.nan}, {"format": "NVFP4", "largest": 0.0},
                                  {"largest": -1.0}, {"largest": math.nan}, {"format": "NVFP4", "largest": math.inf}, {"format": "NVFP4", "largest": 1e-40}])
def test_numbers_that_the_controls_cannot_hold_are_refused(what: dict[str, Any]) -> None:
    name = "largest" if "largest" in what else "outlier"
    with pytest.raises(MxdebugError, match=f"^{name}: expected a number from"):
        Explorer(**what)
    for outlier in (0.01, 10.0):
        assert Explorer(outlier=outlier).outlier.value == outlier


def test_without_a_kernel_the_same_figure() -> None:
    bundle = Explorer()._repr_mimebundle_()
    assert set(bundle) == {"text/plain", "application/vnd.jupyter.widget-view+json", figures.MIMETYPE}
    assert bundle["text/plain"].startswith("[explorer]\nMXFP4: 32 numbers") and len(json.dumps(bundle)) < 30_000


def test_it_is_quick() -> None:
    """CPU time, the best of a few, as other programs may run; the aim is 0.5 and 0.2 s."""
    first, moves = [], []
    for name in ("MXFP4", "MXFP8"):
        start = time.process_time()
        x = Explorer(name)
        first.append(time.process_time() - start)
        for outlier in (0.1, 1.0, 10.0):
            start = time.process_time()
            x.outlier.value = outlier
            moves.append(time.process_time() - start)
    assert min(first) < 0.5 and min(moves) < 0.2


# -- the figure ---------------------------------------------------------------------------------------------------------


def test_figure_of_lost_numbers() -> None:
    o = with_outlier(MXFP4, 0.01, 1.0, rule="floor")
    figure = number_figure.draw(o)
    assert figure.to_json() == number_figure.draw(o).to_json()
    lost = trace(figure, figures.ZERO)
    assert len(lost.x) == 31 and o.outlier not in lost.x and len(set(lost.y)) == 1  # all but the outlier, on the line of 0
    assert lost.y[0] < min(trace(figure, "meant").y) and figure.layout.yaxis2.tickvals[0] == lost.y[0]
    assert trace(figure, "read as").x == (o.outlier,) and trace(figure, "read as").y == (1.0,)
    assert len(trace(figure, "meant").x) == 32 and figure.layout.yaxis2.ticktext[0] == "0"
    # 2 codes on either side of 0 and 0.5: -1, -0.5 below; 1, 1.5 above
    codes, = (t for t in figure.data if t.mode == "text")
    assert codes.y == (-1.0, -0.5, 0.0, 0.5, 1.0, 1.5)
    assert codes.text == ("1 01 0  -0.25", "1 00 1  -0.125", "<b>0 00 0</b>  0", "0 00 1  0.125", "0 01 0  0.25", "0 01 1  0.375")
    assert set(trace(figure, "halfway").y) == {0.25}
    says = figure.layout.meta["says"]
    assert "there are 30 numbers, and 30 become 0; without the outlier, 2." in says


def test_a_number_below_0_stands_between_codes_with_a_sign() -> None:
    codes, = (t for t in number_figure.draw(with_outlier(MXFP4, -0.1, 1.0, rule="floor")).data if t.mode == "text")
    assert codes.y == (-1.5, -1.0, -0.5, 0.0, 0.5, 1.0)  # -0.4 is between -0.5 and -0
    assert codes.text[2:4] == ("<b>1 00 1</b>  -0.125", "1 00 0  -0")


def test_special_numbers_have_glyphs() -> None:
    nan = number_figure.draw(with_outlier(MXFP4, math.nan, 1.0, rule="floor"))
    assert len(trace(nan, figures.NAN).x) == 32 and trace(nan, figures.NAN).marker.symbol == figures.SYMBOLS[figures.NAN]
    assert trace(nan, "read as") is None and "all numbers of the block are read as NaN" in nan.layout.meta["says"]
    inf = number_figure.draw(with_outlier(MXFP4, math.inf, 1.0, rule="floor"))
    assert trace(inf, figures.INF).x == (0,) and trace(inf, "further off").marker.symbol == figures.ABOVE
    far = number_figure.draw(with_outlier(NVFP4, -5.0, 0.1, largest=0.1))
    assert trace(far, "further off").marker.symbol == figures.BELOW
    zero = number_figure.draw(with_outlier(MXFP4, 0.0, 1.0, rule="floor"))
    assert trace(zero, figures.FROM_ZERO).x == (0,)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-9, 0.5, -3.0, 3e38])
def test_every_number_can_be_drawn(fmt: Any, value: float) -> None:
    o = with_outlier(fmt, value, 1.0, rule=None if fmt.outer else "even")
    figure = number_figure.draw(o)
    low, high = figure.layout.yaxis.range
    letters = [t for t in figure.data if t.mode == "markers+text"]
    assert [t.text for t in letters] == [("a",), ("a",)] and low < letters[0].y[0] < high
    assert all(low < c <= high for t in figure.data if t.mode == "text" for c in t.y) and len(figure.to_json()) < 30_000


def test_move_refuses_what_is_no_control_and_what_a_control_does_not_take() -> None:
    x = Explorer()
    with pytest.raises(MxdebugError, match="one of format, rule, outlier, number"):
        x.move(value=3)
    with pytest.raises(MxdebugError, match="one of format"):
        x.move(layout=3)  # a widget's layout is its CSS
    with pytest.raises(MxdebugError, match="one of MXFP4, MXFP8"):
        x.move(format="MXFP3")
    x.move(number="0.3")
    assert x.shown.number.value == pytest.approx(0.3) and x.error is None  # as float32
