"""A report as one HTML page that may be sent to strangers: every text is escaped, nothing is loaded or run, no weight, no path is in it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ..calls import dump_recipe
from ..checkpoints import Checkpoint
from ..contracts import ALL, LINEAR_CONTRACTS
from ..diagnosis import Diagnosis, Finding
from ..diagnosis.finding import DIFFERENT, EQUAL, RIGHT, STRENGTHS, distance
from ..errors import MxdebugError, escaped
from ..files import write
from ..metrics import plain
from ..private import Private
from .record import Entry, Report, mxdebug_version
from .style import STYLE

# A browser that is asked to run or load something here refuses, whatever a mistake of ours might let through.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"
ILLUSTRATED = 8  # calls with pictures: each needs its layer again
_COLOURS = {RIGHT: "right", "undecided": "unsure", "crash dump": "unsure", "pending flush": "unsure"}


def write_html(report: Report, file: Path, checkpoint: Checkpoint | None = None) -> None:
    """Write a report as a page. checkpoint: the opened one, if there was one. Raises MxdebugError where the file cannot be written."""
    write(file, page(report, checkpoint), "--html")


def page(report: Report, checkpoint: Checkpoint | None = None) -> str:
    """The page as text."""
    hide = report.private
    several = len(report.entries) > 1
    wrong = [e for e in report.entries if e.verdict not in (RIGHT, "not read")]
    pictured = set(map(id, wrong[:ILLUSTRATED] or report.entries[:1]))
    body = [f"<h1>Diagnosis of {_name(report, hide)}</h1>"]
    if several:
        body += list(_table(report, hide))
    for n, entry in enumerate(report.entries, 1):
        body += _call(n, entry, report, hide, checkpoint if id(entry) in pictured else None, several)
    body += _reproduce(report, hide)
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><meta name="referrer" content="no-referrer">'
        f"<title>mxdebug: {_name(report, hide)}</title><style>{STYLE}</style></head>\n<body>\n" + "\n".join(body) + "\n</body></html>\n"
    )


def _name(report: Report, hide: Private) -> str:
    return escaped(hide(report.entries[0].name if len(report.entries) == 1 else report.dump.resolve().name))


def _badge(verdict: str) -> str:
    return f'<span class="verdict {_COLOURS.get(verdict, "wrong")}">{escaped(verdict.upper())}</span>'


def _table(report: Report, hide: Private) -> Iterator[str]:
    counts: dict[str, int] = {}
    for e in report.entries:
        counts[e.verdict] = counts.get(e.verdict, 0) + 1
    yield f"<p>{len(report.entries)} calls: {escaped(', '.join(f'{n} {verdict}' for verdict, n in counts.items()))}.</p>"
    yield "<table><thead><tr><th>call</th><th>verdict</th><th>what was found</th></tr></thead><tbody>"
    for n, e in enumerate(report.entries, 1):
        what = str(e.diagnosis) if isinstance(e.diagnosis, MxdebugError) else e.diagnosis.summary if not e.diagnosis.ok else ""
        colour = _COLOURS.get(e.verdict, "wrong")
        yield (
            f'<tr><td><a href="#call{n}">{escaped(hide(e.name))}</a></td><td class="{colour}"><b>{escaped(e.verdict)}</b></td>'
            f"<td>{escaped(hide(what))}</td></tr>"
        )
    yield "</tbody></table>"


def _call(n: int, entry: Entry, report: Report, hide: Private, checkpoint: Checkpoint | None, several: bool) -> Iterator[str]:
    yield f'<section class="call" id="call{n}">'
    if several:
        yield f"<h2>{escaped(hide(entry.name))}</h2>"
    d = entry.diagnosis
    if isinstance(d, MxdebugError):
        yield f'<p class="summary">{_badge(entry.verdict)}{escaped(hide(str(d)))}</p></section>'
        return
    yield f'<p class="summary">{_badge(d.verdict)}{escaped(hide(d.summary))}</p>'
    yield from (_finding(i, f, hide) for i, f in enumerate(d.findings, 1))
    if d.operands:
        yield from _operands(d, entry)
    if checkpoint is not None and entry.recording is not None:
        yield from _pictures(d, entry, report, hide, checkpoint)
    folded = several and d.ok  # of many right calls nobody reads more than the verdict
    yield "<details><summary>What was looked at</summary>" if folded else "<h3>What was looked at</h3>"
    rows = [*d.call]
    if d.truth is not None:
        rows.append(("output", "from the checkpoint's own result: " + distance(d.truth, d.floor)))
    if d.kernel is not None:
        rows.append(("kernel", f"recorded output against emulation of what was passed: {d.kernel}"))
    yield _list(rows + [("checked", t) for t in d.checked] + [("open", t) for t in d.open], hide)
    yield "</details></section>" if folded else "</section>"


def _finding(n: int, f: Finding, hide: Private) -> str:
    rows = [("where", f.where), ("evidence", f.evidence)]
    rows += [("effect", f"alone it moves the output by relative L2 {plain(f.effect)}")] if f.effect is not None else []
    rows += [("fix", f.fix), ("means", f"{f.strength}: {STRENGTHS[f.strength]}")]
    rows += [("reports", ", ".join(f.fault.reports))] if f.fault.reports else []
    return (
        f'<div class="finding"><h4>{n}. {escaped(f.title)}<span class="strength">{escaped(f.strength)}</span></h4>'
        f'<p class="small soft">fault <code>{escaped(f.id)}</code></p>{_list(rows, hide)}</div>'
    )


def _list(rows: list[tuple[str, str]], hide: Private) -> str:
    return "<dl>" + "".join(f"<dt>{escaped(label)}</dt><dd>{escaped(hide(text))}</dd>" for label, text in rows) + "</dl>"


def _operands(d: Diagnosis, entry: Entry) -> Iterator[str]:
    """A strip of all operands: equal, or not."""
    titles = {o.key: o.title for c in ALL.values() if entry.function in ("", c.function, *c.aliases) for o in c.operands}
    order = {key: i for i, key in enumerate(("w13", "w13_scale", "w13_bias", "w2", "w2_scale", "w2_bias"))}
    marks = {EQUAL: ("equal", "✓"), DIFFERENT: ("different", "✗")}
    yield '<h3>Operands</h3><ul class="operands">'
    for key, state in sorted(d.operands, key=lambda item: order.get(item[0], len(order))):
        colour, glyph = marks.get(state, ("", "–"))
        yield f'<li class="{colour}"><b>{escaped(titles.get(key, key))}</b><span class="small soft">{glyph} {escaped(state)}</span></li>'
    equal = sum(state == EQUAL for _, state in d.operands)
    yield (
        f'</ul><p class="small soft">What the kernel was given, against what the recipe makes of the checkpoint: '
        f"{equal} of {len(d.operands)} "
        "operands are equal byte for byte.</p>"
    )


def _pictures(d: Diagnosis, entry: Entry, report: Report, hide: Private, checkpoint: Checkpoint) -> Iterator[str]:
    """Pictures; one that cannot be made of this call is left out, and said."""
    from ..views.own import Own
    from .operand_pictures import of_operands
    from .output_picture import of_output

    layer = report.module if report.module is not None else report.layer
    own = Own(0, entry.recording, checkpoint, layer, report.tp)
    for make in (lambda: of_operands(d, own), lambda: [of_output(d, own)]):
        try:
            for p in make():
                yield f"<figure><h3>{escaped(p.heading)}</h3>{p.body}<figcaption>{escaped(hide(p.caption))}</figcaption></figure>"
        except MxdebugError as error:
            yield f'<p class="small soft">No picture here: {escaped(hide(str(error)))}</p>'


def _reproduce(report: Report, hide: Private) -> Iterator[str]:
    functions = sorted({e.function for e in report.entries} & {f for c in ALL.values() for f in (c.function, *c.aliases)})
    versions = sorted(
        {(k, v.split(" ")[0]) for e in report.entries for k, v in e.versions.items() if k in ("flashinfer", "torch", "python")}
    )
    yield "<h2>How to reproduce</h2>"
    yield _list([("mxdebug", mxdebug_version()), *((k, f"{v} (as the dump says)") for k, v in versions)], hide)
    wrong = next((e for e in report.entries if e.verdict not in (RIGHT, "not read")), None)
    lines = list(dict.fromkeys([report.command(), report.command(wrong)]))
    yield "<p>Diagnose the dump again, in the folder that holds dump and checkpoint; no GPU is needed:</p>" + _lines(lines, hide)
    if report.checkpoint is not None and wrong is not None and wrong.recording is not None:  # of a right call there is nothing to be cut
        cut = report.command(wrong, "cut") + " --out cut"
        yield "<p>Cut a small call with the same faults out of it, one token where that is enough:</p>" + _lines([cut], hide)
        if wrong.diagnosis.findings and wrong.function not in {c.function for c in LINEAR_CONTRACTS.values()}:
            yield "<p>The same, with made numbers in place of the model's:</p>" + _lines([f"{cut} --probe-data"], hide)
    if functions:
        yield f"<p>Record such a dump:</p><pre>{escaped(dump_recipe(','.join(functions)))}</pre>"
        notes = [n for c in ALL.values() if c.path in _paths(report) for n in c.notes if "FLASHINFER_" in n]
        yield from (f'<p class="small soft">{escaped(n)}</p>' for n in notes)
    yield (
        "<footer>Made by mxdebug. This page holds no weights, no activations and no paths; pictures are made of places, shares and errors. "
        "It loads nothing and runs nothing.</footer>"
    )


def _lines(lines: list[str], hide: Private) -> str:
    return f"<pre>{escaped(hide(chr(10).join(lines)))}</pre>"


def _paths(report: Report) -> set[str]:
    """The paths of the calls."""
    return {dict(e.diagnosis.call).get("path", "").partition(",")[0] for e in report.entries if isinstance(e.diagnosis, Diagnosis)}
