"""Which rule of `mxdebug scan` finds which fault, in which kind of checkpoint? Every injection put into every kind, and scanned."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory

from .scan import Finding, scan
from .scan.catalogue import RULES
from .scan.finding import SEVERITIES
from .scan.injections import INJECTIONS, SHARDS, Injection
from .scan.kinds import KINDS
from .scan.probe import probe_checkpoint, save_shards

Cells = Mapping[str, Mapping[str, str]]  # kind -> Injection.name -> a letter

FOUND, PAYLOAD, AMONG, OTHER, MISSED, CANNOT = "P", "p", "a", "w", "X", "-"
# From the best to the worst.
LETTERS = {
    FOUND: "found, with the right experts, and nothing else as severe",
    PAYLOAD: "the same, but only with --payload",
    AMONG: "found beside another rule that is as severe",
    OTHER: "not found by this rule with the right experts, but by another that is as severe",
    MISSED: "missed",
    CANNOT: "this kind cannot have it",
}


def examine_files(injection: Injection, kind: str) -> str:
    """Put a fault into a kind and scan it: a letter of LETTERS."""
    if kind not in injection.kinds:
        return CANNOT
    with TemporaryDirectory() as folder:
        path = injected(Path(folder), injection, kind)
        letter = _letter(injection, kind, _new(path, kind, payload=False))
        if letter in (OTHER, MISSED):
            read = _letter(injection, kind, _new(path, kind, payload=True))
            letter = {FOUND: PAYLOAD}.get(read, read)
    return letter


def injected(folder: Path, injection: Injection, kind: str) -> Path:
    """A healthy checkpoint of a kind with a fault, written into a folder, which it returns."""
    tensors, config = probe_checkpoint(kind)
    injection.inject(tensors, config, kind)
    save_shards(folder, tensors, config, SHARDS)
    if injection.files is not None:
        injection.files(folder)
    return folder


def _new(folder: Path, kind: str, payload: bool) -> list[Finding]:
    """What is found and is not said of the healthy checkpoint too: some notes are of any file."""
    return [f for f in scan(folder, payload=payload).findings if (f.id, f.text) not in _healthy(kind, payload)]


@functools.cache
def _healthy(kind: str, payload: bool) -> frozenset[tuple[str, str]]:
    with TemporaryDirectory() as folder:
        report = scan(save_shards(Path(folder), *probe_checkpoint(kind), SHARDS), payload=payload)
    return frozenset((f.id, f.text) for f in report.findings)


def _letter(injection: Injection, kind: str, new: list[Finding]) -> str:
    rank = SEVERITIES.index(RULES[injection.rule].severity)
    others = any(f.id != injection.rule and SEVERITIES.index(f.severity) <= rank for f in new)
    if any(f.id == injection.rule and f.experts == injection.experts(KINDS[kind]) for f in new):
        return AMONG if others else FOUND
    return OTHER if others else MISSED


def measure_files(progress: Callable[[str], None] = lambda kind: None) -> dict[str, dict[str, str]]:
    """All cells, as `measured_files` keeps them."""
    out = {}
    for kind in KINDS:
        progress(kind)
        out[kind] = {i.name: examine_files(i, kind) for i in INJECTIONS}
    return out


def files_as_json(found: Cells) -> str:
    """The cells as JSON: what mxdebug/data/confusion_files.json holds."""
    return json.dumps(found, indent=1) + "\n"


@functools.cache
def measured_files() -> dict[str, dict[str, str]]:
    """The cells as `mxdebug confusion --files --json` wrote them."""
    return json.loads((files("mxdebug") / "data" / "confusion_files.json").read_text())


def table_files(found: Cells) -> str:
    """A line an injection, a column a kind; then the counts."""
    lines = ["Each cell: what `mxdebug scan` makes of a small checkpoint of this kind with this fault.",
             "P under (1), for example: in a checkpoint of the first kind it is found.", ""]
    lines += [f"  {letter}  {means}" for letter, means in LETTERS.items()] + [""]
    lines += [f"  ({i}) {kind}" for i, kind in enumerate(found, 1)] + [""]
    width = max(len(i.rule) for i in INJECTIONS)
    lines.append(" " * width + "".join(f"  ({i})" for i in range(1, len(found) + 1)))
    lines += [f"{i.rule:<{width}}" + "".join(f"   {found[k][i.name]} " for k in found) + f"  {i.how}" for i in INJECTIONS]
    letters = [letter for cells in found.values() for letter in cells.values() if letter != CANNOT]
    counts = ", ".join(f"{letters.count(letter)} {letter}" for letter in LETTERS if letter in letters)
    return "\n".join([*lines, "", f"{len(letters)} cases: {counts}"])


def strikes(rule: str) -> str:
    """The kinds that can have a fault of a rule, in words; "" where no injection is known."""
    kinds = {kind for i in INJECTIONS if i.rule == rule for kind in i.kinds}
    return "every kind" if len(kinds) == len(KINDS) else ", ".join(k for k in KINDS if k in kinds)
