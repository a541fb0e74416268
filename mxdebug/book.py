"""The catalogue of faults as a book: one page for people, made from the records and from what `mxdebug confusion` measured."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from importlib.resources import files

from .faults import FAULTS, LINEAR_FAULTS, Fault, fault
from .faults.families import FAMILIES
from .scan.catalogue import RULES

_WORDS = {
    "P": "proves it",
    "c": "explains it, but not alone",
    "s": "raises a suspicion",
    "a": "names it beside another",
    "r": "raises a suspicion of a related fault",
    "w": "shows that something is wrong",
    "?": "says nothing",
    "X": "misses it",
    "=": "cannot matter",
    "-": "",
}
_ORDER = "Pcarsw?=X-"
_EVIDENCE = ("converted weights", "a call alone", "call and checkpoint")
# What a scan of the files alone can say of a fault: the ids of its findings are the scan's own (mxdebug scan --help).
FILES = {
    "global-shared-by-halves": "proves it",
    "global-shared-by-parts": "proves it",
    "group-32-as-16": "proves it",
    "global-folded-into-blocks": "tells the risk: which share would be lost",
    "scales-small-flushed": "tells the risk: which share would be lost",
    "scales-flushed": "tells the risk: which share would be lost",
    "global-not-loaded": "proves it where the file lacks the number",
    "scales-cast-by-value": "tells the risk: scales stored as numbers",
    "padding-at-end": "tells the risk: sizes that need padding",
    "padding-not-zero": "tells the risk: sizes that need padding",
    "experts-stride": "tells the risk: sizes that need padding",
    "input-scale-of-each-expert": "tells the risk: input scales that differ by expert",
    "scales-nan": "proves it where the file has them",
}


@functools.cache
def measured() -> dict[str, dict[str, str]]:
    """path -> fault id -> three letters, as `mxdebug confusion` printed them."""
    return json.loads((files("mxdebug") / "data" / "confusion.json").read_text())


def evidence(id: str) -> list[tuple[str, str]]:
    """(kind of evidence, how far it gets at best), for every kind that says anything."""
    out = [("the files alone", FILES[id])] if id in FILES else []
    for i, kind in enumerate(_EVIDENCE):
        letters = [cells[id][i] for cells in measured().values() if id in cells]
        best = min(letters, key=_ORDER.index, default="-")
        if _WORDS[best]:
            out.append((kind, _WORDS[best]))
    if FAULTS[id].strikes == ("calls",):
        out.append(("two calls", "proves it"))
    if id in LINEAR_FAULTS or FAULTS[id].strikes == ("linear",):
        out.append(("a linear layer's call or run, and the checkpoint", "names it"))
    return out


def record(id: str) -> Iterator[tuple[str, str]]:
    """(label, text) of one record."""
    f: Fault = fault(id)
    linear = LINEAR_FAULTS.get(f.id)
    strikes = [", ".join(f.strikes)] if f.strikes not in (("linear",), ("calls",)) else []
    if f.strikes == ("calls",):
        strikes.append("two calls of one kernel")
    if linear is not None or f.strikes == ("linear",):
        strikes.append("linear layers: " + (", ".join(linear.strikes) if linear is not None else "the layer's call"))
    yield "fault", f"{f.id}: {f.title}"
    yield "strikes", "; ".join(strikes)
    yield "proved by", f.gives_away
    yield "shows on", f.needs
    yield "evidence", "; ".join(f"{kind}: {how}" for kind, how in evidence(f.id)) or "none by itself"
    yield "fix", f.fix
    yield "reports", ", ".join(f.reports) or "none"


def markdown() -> str:
    """The whole book."""
    lines = [
        "# What goes wrong: the catalogue of faults",
        "",
        "Made from the records by `mxdebug faults --book`. Each fault can be put into a made call (`inject`) and is recognised by the evidence named; "
        "`mxdebug confusion` prints which evidence names which fault on which path, and the table stands at the end.",
        "",
    ]
    for chapter in FAMILIES:
        lines += [f"## {chapter.title}", "", chapter.about, ""]
        for id in chapter.ids:
            parts = dict(record(id))
            lines += [f"### {id}", "", f"{_sentence(FAULTS[id].title)}", ""]
            lines += [
                f"- **{label}** {parts[label]}"
                for label in ("strikes", "proved by", "shows on", "evidence", "fix", "reports")
                if parts[label] != "none"
            ] + [""]
    lines += [
        "## The files themselves",
        "",
        "What `mxdebug scan CHECKPOINT` finds. *Broken*: engines load garbage, or refuse the file. *Suspicious*: some engine will compute "
        "other numbers than the file means. *Note*: no fault of the file, but what only some backends or tensor-parallel degrees do to it.",
        "",
    ]
    for r in RULES.values():
        lines += [
            f"- **{r.id}** ({r.severity}) {_sentence(r.title)} {_sentence(r.means)} Fix: {r.fix}."
            + (f" Reports: {', '.join(r.reports)}." if r.reports else "")
        ]
    lines += ["", "## Which evidence names which fault", "", "```text", table(), "```"]
    return "\n".join(lines)


def _sentence(text: str) -> str:
    return text[0].upper() + text[1:] + "."


def table() -> str:
    """The measured table as text."""
    from .confusion import text_of

    return text_of(measured())


def contents() -> str:
    """The chapters: how many faults, how many of them each kind of evidence names (proved or consistent) on some path. At most 88 columns."""
    lines = [f"{'':<29}faults  files  weights  call  both  two calls"]
    for chapter in FAMILIES:
        named = [sum(any(id in cells and cells[id][i] in "Pc" for cells in measured().values()) for id in chapter.ids) for i in range(3)]
        two = sum(FAULTS[id].strikes == ("calls",) for id in chapter.ids)
        numbers = (sum(id in FILES for id in chapter.ids), *named, two)
        cells = "".join(f"{n or '.':>{w}}" for n, w in zip(numbers, (7, 9, 6, 6, 11)))
        lines.append(f"{chapter.title:<29}{len(chapter.ids):>6}{cells}")
    return "\n".join(lines)
