"""What a scan says: rules (what can be wrong with a checkpoint) and findings (where it is, with numbers)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..errors import printable

NOTE, SUSPICIOUS, BROKEN = "note", "suspicious", "broken"
SEVERITIES = (BROKEN, SUSPICIOUS, NOTE)
MEANINGS = {
    BROKEN: "engines load garbage, or refuse the file",
    SUSPICIOUS: "some engine will compute other numbers than the file means, or the file was made badly",
    NOTE: "no fault of the file: what only some backends or tensor-parallel degrees do to it",
}
MOST_NAMES = 1000
"""Names that a finding lists; `Finding.count` has the number of all."""
_LONGEST_NAME, _LONGEST_TEXT = 200, 4000


@dataclass(frozen=True)
class Rule:
    """Something that can be wrong with a checkpoint.

    id        stable; JSON and tests use it
    severity  one of SEVERITIES
    title     one line
    means     what comes of it
    fix       what to do
    reports   public reports of it, such as "vllm#45212"
    """

    id: str
    severity: str
    title: str
    means: str
    fix: str
    reports: tuple[str, ...] = ()


@dataclass(frozen=True)
class Finding:
    """A rule that a checkpoint breaks.

    text     where and how much, with numbers
    tensors  names, at most MOST_NAMES of them; they are untrusted text, already free of control characters
    count    how many tensors it concerns; of: of how many that could have it, None where that says nothing
    experts  numbers of the experts concerned, over all layers; empty where they are no experts' tensors
    """

    rule: Rule
    text: str
    tensors: tuple[str, ...]
    count: int
    of: int | None = None
    experts: tuple[int, ...] = ()

    @property
    def id(self) -> str:
        return self.rule.id

    @property
    def severity(self) -> str:
        return self.rule.severity


def shown(text: str) -> str:
    """A name from a stranger's file as it may be printed: on one line, without what would move a terminal's cursor, and cut."""
    safe = printable(text[: 2 * _LONGEST_NAME]).replace("\n", "\\n")
    return safe if len(safe) <= _LONGEST_NAME else f"{safe[:_LONGEST_NAME]}..."


def make(rule: Rule, text: str, tensors: Iterable[str], of: int | None = None, experts: Iterable[int | None] = ()) -> Finding:
    """A Finding with names and text made printable; names in order and without repetition."""
    names = list(dict.fromkeys(tensors))
    numbers = tuple(sorted({e for e in experts if e is not None}))
    one_line = printable(text[:_LONGEST_TEXT]).replace("\n", "\\n")
    return Finding(rule, one_line, tuple(shown(n) for n in names[:MOST_NAMES]), len(names), of, numbers)
