"""Do the views hold what they say? Data first: what is in each cell, where it came from; then that a drawing is the same each time."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import plotly.graph_objects as go
import pytest
import torch
from making import CONTRACT, PATH

import mxdebug
from mxdebug import exercises, recorded
from mxdebug.calls import Call
from mxdebug.errors import MxdebugError
from mxdebug.exercises import check
from mxdebug.layouts import (GATE_UP, INTERLEAVED, LINEAR, SCALE_LAYOUTS, SM90_SCALE_FOLD, SM90_WEIGHT_INTERLEAVE, SWIZZLE_128x4, UP_GATE)
from mxdebug.recipes import logical_operands
from mxdebug.reference import Activation, MoELayer
from mxdebug.views import block, figures, live, measured, outputs, places, rows, scales, swiglu

NOTEBOOKS = sorted((Path(__file__).parent.parent / "notebooks").glob("*.ipynb"))


@functools.cache
def call(name: str) -> Call:
    return mxdebug.load_call(recorded.call(name).path)


@functools.cache
def layer(name: str) -> MoELayer:
    return mxdebug.open_checkpoint(recorded.call(name).checkpoint_path).layer().layer


@functools.cache
def decoded(name: str) -> MoELayer:
    return CONTRACT.decode(call(name).arguments)


def fold() -> places.Places:
    scale = logical_operands(layer("c01"))["w13_scale"][0, UP_GATE.indices(256)]
    physical = call("c01").arguments["quant_scales"][0][0]
    return places.of_scales(SM90_SCALE_FOLD, scale, physical, range(64, 128), [(69, 6), (85, 6)], title="t")


def special() -> scales.Reading:
    made = torch.tensor([[[0, 255, 120, 121], [122, 123, 124, 125]]], dtype=torch.uint8)
    return scales.reading(made, made, title="t")


def order() -> rows.Rows:
    return rows.rows("t", rows.order("k", "n", UP_GATE, 256), rows.passed("c", "n", decoded("c03"), layer("c03")))


DRAWN: dict[str, Callable[[], go.Figure]] = {
    "block": lambda: block.draw(block.block(layer("c01").gate, 0, 0, 0)), "fold": lambda: places.draw(fold()),
    "tile": lambda: places.draw(places.of_rows(SM90_WEIGHT_INTERLEAVE, (32, 64), range(16), [(1, 5)], title="t")),
    "scales": lambda: scales.draw(scales.w13(layer("c04"), decoded("c04"), title="t")), "special": lambda: scales.draw(special()),
    "rows": lambda: rows.draw(order()), "swiglu": lambda: swiglu.draw(swiglu.curves(layer("c01").activation)),
}


# -- what all figures share ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAWN)
def test_drawing_is_the_same_each_time_and_says_what_it_shows(name: str) -> None:
    a, b = DRAWN[name](), DRAWN[name]()
    assert a.to_json() == b.to_json()
    says = a.layout.meta["says"]
    assert says.endswith(".") and says in [t.text.replace("<br>", " ") for t in a.layout.annotations]
    assert a.layout.paper_bgcolor == a.layout.plot_bgcolor == figures.BLANK
    assert "uid" not in a.to_json() and len(a.to_json()) < 40_000


def test_show_embeds_data_and_a_sentence_only(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    monkeypatch.setattr("IPython.display.display", lambda bundle, raw: shown.append(bundle))
    figures.show(places.draw(fold()))
    figures.show_text("a < b")
    assert set(shown[0]) == {figures.MIMETYPE, "text/plain"} and set(shown[0][figures.MIMETYPE]) == {"data", "layout", "config"}
    assert shown[0]["text/plain"].startswith("[figure] t. Left: one cell a block")
    assert shown[1]["text/plain"] == "a < b" and "a &lt; b</pre>" in shown[1]["text/html"]


def test_one_colour_step_for_each_binade() -> None:
    scale = figures.binades(118, 126)
    assert len(scale) == 18 and len({colour for _, colour in scale}) == 9
    assert [edge for edge, _ in scale][:4] == [0, 1 / 9, 1 / 9, 2 / 9] and scale[-1][0] == 1
    assert len({c for _, c in figures.binades(7, 7)}) == 1
    assert figures.power(-6) == "2⁻⁶" and figures.power(10) == "2¹⁰"


def test_pool_takes_the_largest_and_says_the_factor() -> None:
    codes = torch.arange(7 * 3, dtype=torch.uint8).reshape(7, 3)
    same, factor = figures.pool(codes, 7)
    assert factor == (1, 1) and torch.equal(same, codes)
    pooled, factor = figures.pool(codes, 4)
    assert factor == (2, 1) and pooled[:, 2].tolist() == [5, 11, 17, 20]
    big, factor = figures.pool(torch.zeros(2000, 513, dtype=torch.uint8))
    assert factor == (4, 2) and tuple(big.shape) == (500, 257)
    with pytest.raises(MxdebugError, match="a matrix"):
        figures.pool(torch.zeros(2, 2, 2))


def test_special_bytes_are_glyphs_and_never_colours() -> None:
    figure = DRAWN["special"]()
    heat = figure.data[0]
    assert list(heat.z[0][:2]) == [None, None] and (heat.zmin, heat.zmax) == (119.5, 125.5)
    names = [t.name for t in figure.data if t.name]
    assert names == ["0x00: read as 0.0 on SM90", "0xFF: read as inf on SM90"] * 2 and figure.layout.showlegend
    assert [t.showlegend for t in figure.data if t.name] == [True, True, False, False]
    assert {t.marker.symbol for t in figure.data if t.name} == {"circle-open", "x"}


def test_padding_is_a_glyph() -> None:
    figure = figures.figure("t", "s.", 100)
    codes = torch.tensor([[120, 0]], dtype=torch.uint8)
    figures.cells(figure, codes, codes, "x", "y", 10, 2, scale=False, bar=False, padding=torch.tensor([[False, True]]))
    heat, glyphs = figure.data
    assert list(heat.z[0]) == [120, None] and (glyphs.name, glyphs.x, glyphs.y) == ("padding", (1,), (10,))


# -- block ------------------------------------------------------------------------------------------------------------------


def test_block_is_codes_times_scale() -> None:
    gate = layer("c01").gate
    b = block.block(gate, 0, 0, 0)
    assert b.payload[:4] == (0x4A, 0x1A, 0xE9, 0xA1) and b.codes[:4] == (10, 4, 10, 1) and b.elements[:4] == (-1.0, 2.0, -1.0, 0.5)
    assert (b.scale_byte, b.scale) == (123, 0.0625) and len(b.codes) == len(b.weights) == 32 and len(b.payload) == 16
    assert b.steps == tuple(0.0625 * v for v in (-6, -4, -3, -2, -1.5, -1, -0.5, 0, 0.5, 1, 1.5, 2, 3, 4, 6))
    for expert, row, number in ((0, 0, 0), (3, 255, 11)):
        b = block.block(gate, expert, row, number)
        assert b.weights == tuple(gate.dequantise()[expert, row, 32 * number: 32 * number + 32].tolist())
        assert f"byte {b.scale_byte} means 2^({b.scale_byte} - 127)" in str(b)


# -- places -----------------------------------------------------------------------------------------------------------------


def test_places_show_the_same_bytes_in_both_orders() -> None:
    p = fold()
    assert (p.first_row, p.first_offset, tuple(p.logical.shape), tuple(p.physical.shape)) == (64, 768, (64, 12), (48, 16))
    assert p.marks == (places.Mark("a", 69, 6, 1106, 21, 2), places.Mark("b", 85, 6, 1110, 21, 6))
    for m in p.marks:
        assert p.logical[m.row - 64, m.column] == p.physical[m.line, m.place]
    index = SM90_SCALE_FOLD.index_map(512, 12)[64:128] - 768
    assert torch.equal(p.physical.flatten()[index], p.logical)
    assert "a: row  69, column  6 -> byte 1106" in str(p) and "in linear order a would be byte 834" in str(p)


def test_tile_shows_the_row_of_each_byte() -> None:
    p = places.of_rows(SM90_WEIGHT_INTERLEAVE, (32, 64), range(16, 32), [(17, 5), (25, 5)], title="t")
    assert p.first_offset == 16 * 64 and sorted(p.physical.flatten().tolist()) == sorted(list(range(16)) * 64)
    assert p.physical[0, :6].tolist() == [0, 8, 0, 8, 0, 8]  # rows r and r + 8 are woven
    assert p.marks[1].offset == p.marks[0].offset + 1


def test_letters_of_neighbours_do_not_lie_on_each_other() -> None:
    marks = [("a", 0, 0), ("b", 3, 0), ("c", 4, 0), ("d", 15, 480), ("e", 14, 480)]
    # 10 pixels a byte, 13 a line of 16 bytes; letters need 19: c is 10 from b and moves two lines down, e is 10 from d and moves two up
    assert places.apart(marks, (10, 13 / 16), 16, 248) == [*marks[:2], ("c", 4, 32), marks[3], ("e", 14, 448)]
    assert places.apart(marks, (20, 13 / 16), 16, 248) == marks  # wide enough
    tile = places.of_rows(SM90_WEIGHT_INTERLEAVE, (16, 32), range(16), [(1, 5), (9, 5)], line=16, title="t")
    letters, lines = (list(places.draw(tile).select_traces({"mode": mode})) for mode in ("markers+text", "lines+markers"))
    assert all(t.cliponaxis is False for t in letters)  # whole at the edge, too
    # row 9 lies beside row 1 in memory: b's letter moves, and a line leads from it to b's byte
    a, b = tile.marks
    assert a.line == b.line == 2 and abs(a.place - b.place) == 1
    assert [(list(t.x), t.y[0]) for t in lines] == [([b.place] * 2, 32)] and lines[0].y[1] == letters[1].y[1] > 32 == letters[1].y[0]


def test_places_refuse_what_they_cannot_show() -> None:
    scale = logical_operands(layer("c01"))["w13_scale"][0]
    with pytest.raises(MxdebugError, match="SM90 scale fold, got other bytes"):
        places.of_scales(SM90_SCALE_FOLD, scale, scale, range(64), [], title="t")
    with pytest.raises(MxdebugError, match="whole tiles"):
        places.of_rows(SM90_SCALE_FOLD, (512, 12), range(32), [], title="t")
    with pytest.raises(MxdebugError, match="byte to mark"):
        places.of_rows(SM90_SCALE_FOLD, (512, 12), range(64), [(64, 0)], title="t")


@pytest.mark.parametrize("layout", [SM90_SCALE_FOLD, LINEAR, SWIZZLE_128x4], ids=lambda x: x.name)
def test_places_of_any_layout(layout: Any) -> None:
    p = places.of_rows(layout, (256, 8), range(128), [], title="t")
    assert torch.bincount(p.physical.flatten().int()).tolist() == [8] * 128 and "would be" not in str(p)


# -- scales -----------------------------------------------------------------------------------------------------------------


def test_scales_that_are_read_right_and_wrong() -> None:
    assert scales.w13(layer("c01"), decoded("c01"), title="t").wrong == 0
    r = scales.w13(layer("c04"), decoded("c04"), title="t")
    assert (r.wrong, r.total, r.special, r.pooled) == (17556, 24576, 0, (1, 1)) and tuple(r.meant.shape) == (512, 12)
    assert (r.off_by[1], r.off_by[-1], r.off_by[-6], r.off_by[6]) == (5062, 5073, 3, 4)
    assert "17556 of 24576 block scales are read wrong (71.4%)" in str(r) and "  2              5073      5062" in str(r)
    assert torch.equal(r.read[:256], decoded("c04").up.scales[0]) and torch.equal(r.meant[256:], layer("c04").gate.scales[0])


def test_special_scales_are_counted_apart() -> None:
    meant = torch.full((1, 2, 2), 120, dtype=torch.uint8)
    read = torch.tensor([[[0, 255], [120, 123]]], dtype=torch.uint8)
    r = scales.reading(meant, read, title="t")
    assert (r.off_by, r.special, r.total, r.wrong) == ({0: 1, 3: 1}, 2, 4, 3) and "read as 0.0 or inf: 2" in str(r)
    with pytest.raises(MxdebugError, match="block scales"):
        scales.reading(meant, read[:, :1], title="t")


def test_large_scale_matrices_are_pooled_and_say_so() -> None:
    big = torch.randint(110, 130, (1, 1500, 90), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    r = scales.reading(big, big, title="t")
    assert r.pooled == (3, 1) and tuple(r.meant.shape) == (500, 90) and r.meant[0, 0] == big[0, :3, 0].max()
    assert "Each cell is the largest of 3 x 1 block scales" in scales.draw(r).layout.meta["says"]


# -- rows -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "order"), [("c01", UP_GATE), ("c03", GATE_UP), ("c07", INTERLEAVED)])
def test_rows_are_found_where_they_are(name: str, order: Any) -> None:
    for expert in (0, 3):
        assert rows.passed("s", "n", decoded(name), layer(name), expert) == rows.order("s", "n", order, 256)


def test_rows_with_padding() -> None:
    labels = rows.passed("s", "n", decoded("c10"), layer("c10")).labels
    assert labels[:192] == tuple(f"u{i}" for i in range(192)) and set(labels[192:256]) == {rows.PADDING} and labels[256] == "g0"
    moved = rows.passed("s", "n", decoded("c11"), layer("c11")).labels
    assert moved[192] == "g0" and set(moved[384:]) == {rows.PADDING}


def test_rows_count_what_agrees() -> None:
    wanted = rows.order("kernel", "reads", UP_GATE, 4)
    r = rows.rows("t", wanted, rows.order("file", "has", GATE_UP, 4), rows.order("other", "has", UP_GATE, 4))
    assert [r.agree(s) for s in r.strips] == [0, 8]
    assert str(r).splitlines()[0] == "file has      g0 g1 g2 ... g3 u0 ... u3  0 of 8 right"
    assert rows.shown_positions(512) == (0, 1, 2, 3, 254, 255, 256, 257, 510, 511) and rows.shown_positions(8) == tuple(range(8))
    crossed = [text for trace in rows.draw(r).data for text in trace.text if "×" in text]
    assert len(crossed) == 8
    with pytest.raises(MxdebugError, match="8 rows"):
        rows.rows("t", wanted, rows.order("short", "has", GATE_UP, 3))


def test_rows_that_are_no_rows_of_the_checkpoint() -> None:
    with pytest.raises(MxdebugError, match="another layout"):
        rows.passed("s", "n", decoded("c06"), layer("c06"))  # payload not interleaved: no row survives


# -- swiglu, outputs --------------------------------------------------------------------------------------------------------


def test_curves_are_the_activation() -> None:
    c = swiglu.curves(layer("c01").activation)
    at = {x: i for i, x in enumerate(c.inputs)}
    assert c.by_gate[at[0.0]] == 0 and c.by_up[at[-1.0]] == 0  # (up + 1) * gate * sigmoid
    assert c.by_gate[at[7.0]] == c.by_gate[at[10.0]] and c.by_up[at[-7.0]] == c.by_up[at[-10.0]] and c.limit == 7
    assert c.examples[0][2] == pytest.approx(-2 * 2 / (1 + 2.718281828 ** (-2 * 1.702)), rel=1e-6)
    assert "2.0   -3.0     -3.871     -0.054" in str(c)
    plain = swiglu.curves(Activation("silu"))
    assert plain.limit is None and "limit" not in swiglu.draw(plain).layout.meta["says"]


def test_output_table() -> None:
    want = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    t = outputs.table(("w", want), {"double": 2 * want, "nan": torch.full_like(want, torch.nan)}, first=2)
    assert [line.not_finite for line in t.lines] == [0, 0, 4] and t.lines[0].comparison is None
    assert t.lines[1].comparison.relative_l2 == 1
    assert str(t).splitlines()[2].split() == ["double", "1.000", "1.000", "2.000", "0", "2.0000", "4.0000"]


# -- measured, live ---------------------------------------------------------------------------------------------------------


def record(**more: Any) -> dict[str, Any]:
    case = {"size": "4 experts, 384 x 192, 5 tokens, top-2", "fault": "none", "struck": "", "elements": 1920, "differing": 0, "max_ulps": 0,
            "masks_equal": True, "kernel_relative_l2": 0.0, "truth_relative_l2": 0.0034, "truth_cosine": 0.99999, "truth_norm_ratio": 1.0}
    wrong = case | {"fault": "rows-gate-up", "struck": "w13, w13_scale", "differing": 3, "kernel_relative_l2": 2e-5,
                    "truth_relative_l2": 0.66}
    alone = wrong | {"struck": "w13", "truth_cosine": float("nan")}
    other = case | {"size": "8 experts, 1024 x 768, 7 tokens, top-3"}
    return {"path": PATH, "sm": "90", "flashinfer": "0.7.4", "torch": "2.11.0+cu130", "cases": [case, wrong, alone, other], **more}


def test_measured_table_of_a_made_record() -> None:
    lines = measured.table(record()).splitlines()
    assert lines[0] == f"{PATH}, run on SM90: FlashInfer 0.7.4, torch 2.11.0"
    assert lines[3] == "4 experts, 384 x 192" and lines[7] == "8 experts, 1024 x 768"
    assert lines[5].split() == ["rows-gate-up", "w13,", "w13_scale", "5", "tokens,", "top-2", "0.660", "1.000", "1.000", "3", "of", "1920"]
    assert "NaN" in lines[6]
    assert lines[-1] == "kernel and emulation: 7674 of 7680 numbers bit-identical; relative L2 of any call at most 0.000020"
    assert len(measured.table(record(), each_operand=False).splitlines()) == len(lines) - 1
    assert "rows-gate-up" not in measured.table(record(), faults=("none",))
    assert "0 of 0" in measured.table(record(cases=[]))


def test_measured_record_of_another_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "r.json"
    monkeypatch.setattr(measured, "load", lambda: None)
    assert "not part of this installation" in measured.table()
    monkeypatch.undo()
    assert measured.load(file) is None
    for content, message in (([], "list of cases"), ({"cases": [{"size": "x"}]}, "one without fault")):
        file.write_text(json.dumps(content))
        with pytest.raises(MxdebugError, match=message):
            measured.load(file)
    file.write_text(json.dumps(record()))
    assert measured.table(measured.load(file)) == measured.table(record())


def test_shipped_record_is_a_table() -> None:
    shipped = measured.load()
    assert shipped is None or all(c["fault"] in measured.table(shipped) for c in shipped["cases"])


def test_live_says_by_name_what_did_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert str(live.rerun(CONTRACT, recorded.CALLS.values())) == "not run here: cutlass_fused_moe on SM90 (no CUDA GPU)"


def test_live_compares_with_what_was_recorded() -> None:
    emulating = replace(CONTRACT, _run=lambda contract, arguments: contract.emulate(arguments))
    here = live.rerun(emulating, [recorded.call("c01"), recorded.call("c06")])
    assert here.not_run is None and [r.name for r in here.reruns] == ["c01", "c06"]
    assert all(r.follows and r.comparison.bit_identical for r in here.reruns) and "c06: bit-identical" in str(here)
    other = replace(CONTRACT, _run=lambda contract, arguments: contract.emulate(arguments) * 2)
    assert not live.rerun(other, [recorded.call("c01")]).reruns[0].follows

    def broken(contract: Any, arguments: Any) -> None:
        raise MxdebugError("w13", "a", "b")

    with pytest.raises(MxdebugError, match="w13"):
        live.rerun(replace(CONTRACT, _run=broken), [recorded.call("c01")])


# -- how a diagnosis looks --------------------------------------------------------------------------------------------------


def test_diagnosis_in_a_notebook() -> None:
    d = mxdebug.diagnose(call("c04"), recorded.call("c04").checkpoint_path)
    html = d._repr_html_()
    assert html.count("<div") == html.count("</div>") and html.count("<table") == html.count("</table>") and "<script" not in html
    assert "WRONG" in html and "block scales linear" in html and "proved" in html
    assert repr(d) == str(d) and "0x" not in repr(d)  # no addresses of functions: a notebook's output is the same each time
    nasty = replace(d, summary="<img src=x>", call=(("<b>", "<i>"),))
    assert "<img" not in nasty._repr_html_() and "<i>" not in nasty._repr_html_()


# -- exercises --------------------------------------------------------------------------------------------------------------


def right_converter(s: torch.Tensor) -> torch.Tensor:
    e, r, c = s.shape
    return torch.cat([s[:, 1::2], s[:, 0::2]], 1).reshape(e, r // 64, 4, 16, c // 4, 4).permute(0, 1, 4, 3, 2, 5)


def only_fold(s: torch.Tensor) -> torch.Tensor:
    e, r, c = s.shape
    return s.reshape(e, r // 64, 4, 16, c // 4, 4).permute(0, 1, 4, 3, 2, 5)


def wrong_axes(s: torch.Tensor) -> torch.Tensor:
    e, r, c = s.shape
    return torch.cat([s[:, 1::2], s[:, 0::2]], 1).reshape(e, 4, r // 64, 16, c // 4, 4).permute(0, 2, 4, 3, 1, 5)


def broken(s: torch.Tensor) -> torch.Tensor:
    raise KeyError("sizes")


@pytest.mark.parametrize(("answer", "right", "says"), [
    ((None,), None, "NOT ANSWERED YET"), ((...,), None, "NOT ANSWERED YET"), ((), None, "NOT ANSWERED YET"),
    ((1.5,), False, "whole number"), ((True,), False, "whole number"), ((6144,), False, "outside"),
    ((1353,), True, "elements 288 to 319 of row 100"), ((1352,), False, "look at kb and g"), ((1369,), False, "look at rb, s and f"),
    *(((int(layout.index_map(512, 12)[100, 9]),), False, f"another layout: {layout.name}") for layout in SCALE_LAYOUTS[1:]),
])
def test_exercise_place(answer: tuple[Any, ...], right: bool | None, says: str) -> None:
    got = check("place", *answer)
    assert got.right is right and says in str(got).replace("\n  ", " ").replace("\n", " ")
    if right is not True:
        assert "1353" not in str(got)


@pytest.mark.parametrize(("answer", "right", "says"), [
    (None, None, "NOT ANSWERED YET"), (lambda s: ..., None, "returns nothing yet"), (lambda s: None, None, "returns nothing yet"),
    (right_converter, True, "recorded call c01"), (lambda s: right_converter(s).flatten(), True, "RIGHT"),
    (lambda s: right_converter(s).float(), False, "torch.float32"), (lambda s: [1], False, "this is list"),
    (lambda s: right_converter(s)[:1], False, "24576 bytes went in, 6144 came out"), (broken, False, "raised KeyError"),
    (lambda s: right_converter(s).reshape(4, 8, 3, 16, 16), False, "take it from scales.shape"),
    (only_fold, False, "rows are g0,u0,g1,u1"), (lambda s: torch.cat([s[:, 1::2], s[:, 0::2]], 1), False, "block scales linear"),
    (lambda s: only_fold(torch.cat([s[:, 0::2], s[:, 1::2]], 1)), False, "rows are [w1; w3]"),
    (lambda s: right_converter(s ^ 1), False, "No known fault leads to these bytes"), (wrong_axes, False, "of 24576 bytes are not what the kernel"),
])
def test_exercise_scales(answer: Any, right: bool | None, says: str) -> None:
    got = check("scales", answer)
    assert got.right is right and says in str(got).replace("\n  ", " ").replace("\n", " ")


@pytest.mark.parametrize(("answer", "right", "says"), [
    ((None, None), None, "Operands: w13, w13_scale, w2, w2_scale"), (("w13_scale", None), None, "Faults: rows-gate-up"),
    (("w13_scale", "rows-gate-up"), True, "reproduces all 2304 numbers"),
    (("w13", "rows-gate-up"), False, "other bytes than were recorded for w13, w13_scale"),
    (("w13_scale", "scales-linear"), False, "would have written something else"), (("w2", "rows-gate-up"), False, "cannot strike w2"),
    (("w3", "rows-gate-up"), False, "no operand 'w3'"), (("w2", "cosmic-ray"), False, "no fault 'cosmic-ray'"),
    (("w13_scale", "padding-at-end"), False, "cannot be in this call"),
])
def test_exercise_c08(answer: tuple[Any, Any], right: bool | None, says: str) -> None:
    got = check("c08", *answer)
    assert got.right is right and says in str(got).replace("\n  ", " ").replace("\n", " ")


def test_exercises() -> None:
    with pytest.raises(MxdebugError, match="place, scales, c08"):
        check("c09")
    assert repr(check("place")) == str(check("place")) and max(map(len, str(check("c08")).splitlines())) <= exercises.WIDTH
    assert tuple(exercises.file_scales().shape) == (4, 512, 12)
    assert torch.equal(exercises.file_scales()[:, 1::2], layer("c01").up.scales)


# -- the notebooks themselves -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.name)
def test_notebook_is_committed_as_it_should_be(path: Path) -> None:
    text = path.read_text()
    assert len(text) < 1_000_000 and "plotly.min.js" not in text and "require.config" not in text
    notebook = json.loads(text)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3" and "widgets" not in notebook["metadata"]
    cells = [SimpleNamespace(**c) for c in notebook["cells"] if c["cell_type"] == "code"]
    assert [c.execution_count for c in cells] == list(range(1, len(cells) + 1))
    for c in cells:
        for o in c.outputs:
            assert o["output_type"] in ("stream", "display_data", "execute_result") and o.get("name") != "stderr"
    outputs_text = json.dumps([o for c in cells if "nbval-ignore-output" not in c.metadata.get("tags", []) for o in c.outputs])
    assert not re.search(r"0x[0-9a-f]{8}|/home/|/tmp/|site-packages", outputs_text)
