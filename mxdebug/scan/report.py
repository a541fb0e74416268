"""The outcome of a scan as a record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .finding import BROKEN, NOTE, SEVERITIES, SUSPICIOUS, Finding
from .statistics import Statistics

CLEAN = "CLEAN"
_EXIT = {CLEAN: 0, SUSPICIOUS.upper(): 1, BROKEN.upper(): 2}


@dataclass(frozen=True)
class Report:
    """What a scan found.

    path        as it was given
    stated      the quantisation that the configuration states, in words; kinds: kind -> number of weights of it, by names and dtypes
    findings    most serious first
    statistics  one record for each class of weights
    read        "headers", "scales" (and one-number tensors), "payload" -> bytes that the findings rest on; size: bytes of all files
    resumed     weights that a state file had already
    payload     whether payloads were read; tp: the degrees asked about
    """

    path: str
    stated: str
    kinds: Mapping[str, int]
    findings: tuple[Finding, ...]
    statistics: tuple[Statistics, ...]
    read: Mapping[str, int]
    size: int
    files: int
    tensors: int
    resumed: int
    payload: bool
    tp: tuple[int, ...]

    @property
    def verdict(self) -> str:
        """CLEAN (notes do not count), SUSPICIOUS or BROKEN."""
        worst = next((s for s in SEVERITIES if any(f.severity == s for f in self.findings)), NOTE)
        return CLEAN if worst == NOTE else worst.upper()

    @property
    def exit_code(self) -> int:
        """0 CLEAN, 1 SUSPICIOUS, 2 BROKEN."""
        return _EXIT[self.verdict]

    def counts(self) -> str:
        """ "2 broken, 3 notes"."""
        numbers = {s: len({f.id for f in self.findings if f.severity == s}) for s in SEVERITIES}
        words = [f"{n} {s}{'s' if s == NOTE and n > 1 else ''}" for s, n in numbers.items() if n]
        return ", ".join(words) or "nothing found"

    def was_read(self) -> str:
        """In a sentence, what was read."""
        parts = ", ".join(f"{_size(n)} of {what}" for what, n in self.read.items() if n)
        more = "" if self.payload else "; payloads were not (--payload reads them)"
        return f"{_size(sum(self.read.values()))} of {_size(self.size)} in {self.files} files ({parts}){more}"

    def by_rule(self) -> list[list[Finding]]:
        """Findings, those of one rule together, most serious first."""
        groups: dict[str, list[Finding]] = {}
        for f in self.findings:
            groups.setdefault(f.id, []).append(f)
        return sorted(groups.values(), key=lambda fs: SEVERITIES.index(fs[0].severity))

    def __str__(self) -> str:
        from .text import render

        return render(self)


def _size(n: int) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB"):
        if n < 1024 or unit == "TiB":
            return f"{n} bytes" if unit == "bytes" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError
