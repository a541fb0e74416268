"""How far each kind of evidence gets with each fault: the words, and the table of what `mxdebug confusion` measured."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files

from .contracts import LINEAR_CONTRACTS
from .diagnosis.finding import CONSISTENT, PROVED, SUSPECTED
from .faults import FAULTS, LINEAR_FAULTS
from .faults.linear_faults import LAYER

Cells = Mapping[str, Mapping[str, str]]  # path -> fault id -> a letter for each of KINDS

KINDS = {"weights": "converted weights", "call": "a call alone", "together": "call and checkpoint"}
OF_RUNS = tuple(f.id for f in LINEAR_FAULTS.values() if f.level == LAYER)  # what a linear layer does around its kernel, so that no call holds it


@dataclass(frozen=True)
class Outcome:
    """letter: in the table; means: its legend; does: how a sentence goes on that begins with the kind of evidence."""

    letter: str
    means: str
    does: str


AMONG, RELATED, SEEN, OPEN, EQUIVALENT, MISSED, CANNOT = (
    "among",
    "related",
    "seen",
    "open",
    "equivalent",
    "missed",
    "cannot",
)
# From the best to the worst. The first three are the strengths of a finding.
OUTCOMES = {
    PROVED: Outcome("P", "named, proved", "proves it"),
    CONSISTENT: Outcome("c", "named; others might explain it too", "explains it, but not alone"),
    SUSPECTED: Outcome("s", "named, as a suspicion", "raises a suspicion"),
    AMONG: Outcome("a", "another fault that gives the same bytes or output is named, and this one with it", "names it beside another"),
    RELATED: Outcome("r", "another fault is suspected", "raises a suspicion of another fault"),
    SEEN: Outcome("w", "said to be wrong, not named", "shows that something is wrong"),
    OPEN: Outcome("?", "said to be undecided", "says nothing"),
    EQUIVALENT: Outcome("=", "changes nothing that the kernel reads, and is called right", "cannot matter"),
    MISSED: Outcome("X", "called right", "misses it"),
    CANNOT: Outcome("-", "cannot strike here, or not what this evidence is about", ""),
}
BY_LETTER = {o.letter: o for o in OUTCOMES.values()}


@functools.cache
def measured() -> dict[str, dict[str, str]]:
    """The cells as `mxdebug confusion --json` wrote them."""
    return json.loads((files("mxdebug") / "data" / "confusion.json").read_text())


def best(id: str, *, linear: bool | None = None) -> dict[str, Outcome]:
    """The best outcome of each kind of evidence on any path; kinds that are not about this fault are left out. linear: only on paths of
    linear layers, or of MoE layers."""
    out = {}
    for i, kind in enumerate(KINDS):
        letters = {cells[id][i] for path, cells in measured().items() if id in cells and linear in (None, path in LINEAR_CONTRACTS)}
        outcome = next((o for o in OUTCOMES.values() if o.letter in letters), OUTCOMES[CANNOT])
        if outcome.does:
            out[kind] = outcome
    return out


def table(found: Cells) -> str:
    """A line a fault, a column a path, a letter for each kind of evidence; then the counts."""
    paths = list(found)
    ids = [id for id in FAULTS if any(id in found[p] for p in paths)]
    width = max(map(len, ids), default=0)
    lines = ["Each cell: converted weights next to the checkpoint, one recorded call alone, that call and its checkpoint.",
             "P?P, for example: the weights prove it, the call alone leaves it undecided, call and checkpoint prove it.", ""]
    lines += [f"  {o.letter}  {o.means}" for o in OUTCOMES.values()] + [""]
    if any(p in LINEAR_CONTRACTS for p in paths):
        lines += ["On linear paths converted weights alone are not read, and the last letter of what a layer does around its kernel, which no",
                  f"call holds, is that of one run of the layer and its checkpoint: {', '.join(OF_RUNS)}.", ""]
    lines += [f"  ({i}) {p}" for i, p in enumerate(paths, 1)] + [""]
    lines.append(" " * width + "".join(f"  ({i})" for i in range(1, len(paths) + 1)))
    lines += [f"{id:<{width}}" + "".join(f"  {found[p].get(id, len(KINDS) * OUTCOMES[CANNOT].letter)}" for p in paths) for id in ids]
    lines.append("")
    for i, kind in enumerate(KINDS.values()):
        letters = [cells[i] for p in paths for cells in found[p].values() if cells[i] != OUTCOMES[CANNOT].letter]
        counts = ", ".join(f"{letters.count(letter)} {letter}" for letter in BY_LETTER if letter in letters)
        lines += [f"{kind}: {len(letters)} cases: {counts}"] if letters else []
    return "\n".join(lines)
