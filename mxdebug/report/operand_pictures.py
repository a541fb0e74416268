"""Pictures of operands: which differ, which rows stand where, where scale bytes lie, and which bytes are others.

Places come from the forms that a diagnosis recovered, never from weights; of the bytes themselves only the share that differs is shown.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..contracts import Contract
from ..diagnosis import Diagnosis, Recovered, Source, recover
from ..diagnosis.finding import DIFFERENT
from ..layouts import Composed, Layout
from ..recipes import Form, logical_operands
from ..views.own import Own
from ..views.rows import PADDING, Rows, Strip, shown_positions
from . import svg

MOST = (32, 56)  # cells of a map of bytes: rows, columns
LINES, LINE = 16, 32  # of memory, that a picture of places shows, and bytes in each
EXPERTS = 12
SHARES = (0.0, 0.01, 0.1, 0.25, 0.5, 0.75, 1.0)
SHARE_WORDS = ("no byte differs", "up to 1% do", "up to 10%", "up to 25%", "up to 50%", "up to 75%", "more")


@dataclass(frozen=True)
class Picture:
    """heading: what it shows; body: SVG and its legend, as HTML; caption: what to see in it, as text."""

    heading: str
    body: str
    caption: str


@dataclass(frozen=True)
class _Part:
    """The same, of one operand that is not named in it."""

    kind: str
    body: str
    caption: str


def of_operands(d: Diagnosis, own: Own) -> Iterator[Picture]:
    """The pictures of the operands that differs from what the recipe makes of the checkpoint."""
    keys = [key for key, state in d.operands if state == DIFFERENT]
    if own.linear:
        yield from _linear(keys, own)
        return
    contract: Contract = own.kernel
    plan, whole = own.plan, own.chosen.layer
    source = Source(whole, own._position)
    logical = logical_operands(own.meant)
    pictures: dict[tuple[str, str, str], list[str]] = {}  # those that several operands share are shown once
    for key in keys:
        o, form = contract.operand(key), plan.forms.get(key)
        t = o.get(own.call.arguments)
        if form is None or t is None or logical[key] is None:
            continue
        actual = (t if key.endswith("bias") else o.payload(t)).reshape(t.shape[0] if o.view == "plain" else t.shape[-1], -1)
        r = _likeliest(recover(key, actual, form, source), d, contract)
        placed = [p for p in (_experts(r), _rows(r), _places(r)) if p is not None]
        # Where known places explain every byte, a map of those that differ says nothing more.
        rest = None if placed and r.complete else _bytes(actual, logical[key], form)
        for p in [*placed, *([rest] if rest else [])]:
            pictures.setdefault((p.kind, p.body, p.caption), []).append(o.title)
    yield from (
        Picture(f"{kind} of {' and '.join([', '.join(titles[:-1])] * (len(titles) > 1) + titles[-1:])}", body, caption)
        for (kind, body, caption), titles in pictures.items()
    )


def _likeliest(r: Recovered, d: Diagnosis, contract: Contract) -> Recovered:
    """Of several readings, the one that fills its slots as the findings say, so that pictures and findings tell the same."""
    said = [s for f in d.findings if f.fault.slots and r.key in f.fault.strikes and (s := f.fault.slots(r.key, r.expected, contract))]
    best = max(
        (r.form, *r.alternatives), key=lambda form: sum(all(getattr(form, slot) == value for slot, value in s.items()) for s in said)
    )
    return replace(r, form=best)


def _rows(r: Recovered) -> _Part | None:
    wanted, there = r.expected.row_indices(), r.form.row_indices() if r.permutation is None else r.permutation
    if not r.explained or wanted.shape != there.shape or torch.equal(wanted, there):
        return None
    strips = Rows("", _strip("the kernel reads", wanted, r.expected), (_strip("as passed", there, r.expected),))
    at, lines = shown_positions(len(wanted), 6), []
    for strip in (*strips.strips, strips.wanted):
        lines.append(
            (
                strip.name,
                [
                    svg.Box(
                        strip.labels[p],
                        {"g": "gate", "u": "up", "-": "pad"}.get(strip.labels[p][0], "row"),
                        strip.labels[p] != strips.wanted.labels[p],
                        i > 0 and at[i - 1] != p - 1,
                    )
                    for i, p in enumerate(at)
                ],
            )
        )
    agree = strips.agree(strips.strips[0])
    words = [("gate", "g: a row of gate (w1)"), ("up", "u: a row of up (w3)")] if r.expected.halves == 2 else [("row", "r: a row")]
    words += [("pad", "-: padding")] if any(PADDING in s.labels for s in (*strips.strips, strips.wanted)) else []
    return _Part(
        "Rows",
        svg.strips(lines, "order of rows") + svg.legend(words),
        f"One box is one row, at the start, the middle and the end of the {len(wanted):,} rows of one expert. "
        "A cross: the kernel takes the row for "
        f"the one below it. {agree:,} of {len(wanted):,} rows are where the kernel reads them.",
    )


def _strip(name: str, rows: Tensor, form: Form) -> Strip:
    def label(i: int) -> str:
        return PADDING if i < 0 else f"r{i}" if form.halves == 1 else f"g{i}" if i < form.rows else f"u{i - form.rows}"

    return Strip(name, "", tuple(map(label, rows.tolist())))


def _experts(r: Recovered) -> _Part | None:
    if r.experts == r.expected_experts or not r.explained:
        return None
    pairs = list(zip(r.experts, r.expected_experts))[:EXPERTS]
    lines = [
        ("as passed", [svg.Box("?" if a < 0 else str(a), "row", a != b) for a, b in pairs]),
        ("the kernel reads", [svg.Box(str(b), "row") for _, b in pairs]),
    ]
    more = f" (the first {EXPERTS} of {len(r.experts)})" if len(r.experts) > EXPERTS else ""
    return _Part(
        "Experts",
        svg.strips(lines, "order of experts"),
        f"One box is the expert of the checkpoint that stands at a place{more}; a question mark: none of them. "
        "A cross: another than the kernel takes it for.",
    )


def _offsets(layout: Layout | Composed, rows: int, columns: int) -> Tensor:
    """int64 [rows, columns]: where each byte lies in memory."""
    if isinstance(layout, Layout):
        return layout.index_map(rows, columns)
    pr, pc = layout.first.padded(rows, columns)
    return layout.second.index_map(pr, pc).flatten()[layout.first.index_map(rows, columns)]


def _places(r: Recovered) -> _Part | None:
    wanted, there = r.expected.layout, r.form.layout
    if wanted is None or there is None or wanted == there or not r.explained:
        return None
    rows, columns = r.expected.halves * r.expected.padded_rows, r.expected.padded_columns
    a, b = (_offsets(layout, rows, columns) for layout in (wanted, there))
    same = int((a == b).sum())
    if same == a.numel():
        return None  # bits within bytes moved, or the layout is the same at this size
    n = min(LINES * LINE, a.numel() // LINE * LINE or a.numel())
    levels = []
    for offsets in (b, a):
        row = torch.full((int(offsets.max()) + 1,), -1)
        row[offsets.flatten()] = torch.arange(rows)[:, None].expand(rows, columns).flatten()
        levels.append(row[:n])
    last = int(torch.cat(levels).max()) + 1
    grids = [
        svg.Grid(
            [[int(v) * 8 // last if v >= 0 else svg.LOST for v in line] for line in level.split(LINE)],
            heading,
            "byte within a line",
            "line of memory",
            ("0", "0"),
            (str(LINE - 1), str(-(-n // LINE) - 1)),
            "r",
        )
        for level, heading in zip(levels, ("as passed", "the kernel reads"))
    ]
    words = [
        (f"r{i}", f"rows {-(-i * last // 8)} to {-(-(i + 1) * last // 8) - 1}")
        for i in range(8)
        if -(-i * last // 8) <= -(-(i + 1) * last // 8) - 1
    ]
    kind = "scale byte" if r.key.endswith("_scale") else "byte"
    return _Part(
        "Places",
        svg.grids(grids, "places of bytes in memory") + svg.legend(words),
        f"One cell is one {kind}, in the order of memory (the first {n:,} of one expert); its colour says of which logical rows it is. "
        f"Left: {there.name}, "
        f"as the bytes were passed. Right: {wanted.name}, as the kernel reads them. "
        f"{same:,} of {a.numel():,} bytes lie where the kernel looks for them.",
    )


def _bytes(actual: Tensor, logical: Tensor, form: Form) -> _Part | None:
    """The share of bytes that differ from the recipe's, in the first expert that has some."""
    if form.layout is None or len(actual) != len(logical):
        return None
    rows, columns = form.halves * form.padded_rows, form.padded_columns
    for expert in range(len(actual)):
        want = form.apply(logical[expert : expert + 1]).reshape(-1)
        if want.shape == actual[expert].shape and not torch.equal(want, actual[expert]):
            a, b = (form.layout.unpack(t, rows, columns).reshape(rows, columns) for t in (want, actual[expert]))
            halves = "; up stands above gate" if form.halves == 2 and form.order is not None and form.order.name == "[w3; w1]" else ""
            return shares(a != b, f" of expert {expert}", halves)
    return None


def shares(differ: Tensor, of: str = "", note: str = "") -> _Part:
    """A map of bool [rows, columns]: where the bytes of an operand, in logical order, are others than the recipe's."""
    high, wide = (-(-n // most) for n, most in zip(differ.shape, MOST))
    cells = torch.stack([torch.stack([part.float().mean() for part in line.split(wide, 1)]) for line in differ.split(high)])
    levels = torch.bucketize(cells, torch.tensor(SHARES), right=False).clamp(max=svg.LEVELS - 1)
    grid = svg.Grid(
        levels.tolist(),
        f"bytes that are others than the recipe's{of}",
        "byte of the row",
        "row",
        ("0", "0"),
        (str(differ.shape[1] - 1), str(differ.shape[0] - 1)),
    )
    return _Part(
        "Bytes",
        svg.grids([grid], "bytes that differ") + svg.legend([(f"l{i}", w) for i, w in enumerate(SHARE_WORDS)]),
        f"The operand as the kernel reads it, in rows and columns{note}. "
        f"One cell is {high} x {wide} bytes; the stronger its colour, the more of them are others "
        f"than what the recipe makes of the checkpoint. {int(differ.sum()):,} of {differ.numel():,} bytes differ.",
    )


def _linear(keys: list[str], own: Own) -> Iterator[Picture]:
    got, want = own.kernel.see(own.call.arguments).weight, own.kernel.see(own.right).weight
    for key, name in (("weight", "payload"), ("weight_scale", "scales")):
        a, b = getattr(got, name), getattr(want, name)
        if key in keys and a.shape == b.shape:
            part = shares(a != b)
            yield Picture(f"Bytes of {own.kernel.operand(key).title}", part.body, part.caption)
