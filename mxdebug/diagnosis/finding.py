"""What a diagnosis says: findings as records, and how they print in a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass

from ..errors import printable
from ..faults import Fault
from ..metrics import Comparison, plain

PROVED, CONSISTENT, SUSPECTED = "proved", "consistent", "suspected"
STRENGTHS = {
    PROVED: "bytes are equal, or the output is reproduced bit for bit and by nothing else",
    CONSISTENT: "explains what was seen; other causes might too",
    SUSPECTED: "statistics or configuration speak for it",
}


@dataclass(frozen=True)
class Finding:
    """A fault with its evidence.

    fault     the catalogue's record
    strength  proved, consistent or suspected
    where     operands, experts, tokens
    evidence  what was compared, with numbers
    effect    relative L2 by which this finding alone moves the output away from the right one; None where it was not computed
    reads     the order or layout that the kernel reads, where the fault is another one; advice: its fix for this kernel
    """

    fault: Fault
    strength: str
    where: str
    evidence: str
    effect: float | None = None
    reads: str = ""
    advice: str = ""

    @property
    def id(self) -> str:
        return self.fault.id

    @property
    def fix(self) -> str:
        """What to change: the fault's fix, in the words of this kernel where there are any."""
        return self.advice or self.fault.fix

    @property
    def title(self) -> str:
        """The fault's title, and what the kernel reads instead."""
        return f"{self.fault.title}; the kernel reads {self.reads}" if self.reads else self.fault.title


# What the comparison of an operand with the recipe's bytes gave.
EQUAL, SAME_VALUES, DIFFERENT, UNREAD = "equal", "other bytes, the same weights", "different", "not read"

# Set by mxdebug.views: how a Diagnosis looks in a notebook.
HTML: list[Callable[[Diagnosis], str]] = []

RIGHT, WRONG, UNEXPLAINED, UNDECIDED, CRASHED, PENDING = "right", "wrong", "wrong, not explained", "undecided", "crash dump", "pending flush"


@dataclass(frozen=True)
class Diagnosis:
    """The answer for one call.

    verdict    right; wrong (findings explain it); wrong, not explained; undecided; crash dump; pending flush
    summary    one sentence
    findings   strongest and most effective first
    call       what was called, where
    kernel     recorded output against the emulation of what was passed: does the kernel keep its contract?
    truth      recorded output (or, without one, the emulated output) against what the checkpoint means; floor: the same for a right call
    checked    what was looked at, in order
    open       what this data could not have shown, or what stays undecided
    operands   (operand key, EQUAL, SAME_VALUES, DIFFERENT or UNREAD); empty without a checkpoint
    follows    whether the recorded output follows from what was passed; None where that was not looked at
    """

    verdict: str
    summary: str
    findings: tuple[Finding, ...]
    call: tuple[tuple[str, str], ...]
    kernel: Comparison | None
    truth: Comparison | None
    floor: Comparison | None
    checked: tuple[str, ...]
    open: tuple[str, ...]
    operands: tuple[tuple[str, str], ...] = ()
    follows: bool | None = None

    @property
    def ok(self) -> bool:
        """Whether the call is right."""
        return self.verdict == RIGHT

    def finding(self, id: str) -> Finding | None:
        """The finding of that fault id, if there is one."""
        return next((f for f in self.findings if f.id == id), None)

    def __str__(self) -> str:
        return render(self)

    __repr__ = __str__  # also where a notebook shows text; the fields' own repr would hold addresses of functions

    def _repr_html_(self) -> str | None:
        return HTML[-1](self) if HTML else None


def distance(truth: Comparison, floor: Comparison | None) -> str:
    """How far the output is from what the checkpoint means, with the floor that a right call has."""
    text = f"relative L2 {plain(truth.relative_l2)}, cosine {truth.cosine:.3f}, norm ratio {plain(truth.norm_ratio)}"
    if not truth.masks_equal:
        text = "NaN or inf where the checkpoint has none; elsewhere " + text
    return text if floor is None else f"{text} (a right call: {plain(floor.relative_l2)})"


def render(d: Diagnosis, width: int = 110) -> str:
    """Plain text for a terminal: verdict first, then what to do, then what was checked."""
    lines = [*textwrap.wrap(f"{d.verdict.upper()}: {d.summary}", width), ""]

    def put(label: str, text: str) -> None:
        lines.extend(textwrap.wrap(text, width, initial_indent=f"  {label:<9} ", subsequent_indent=" " * 12) or [f"  {label}"])

    for i, f in enumerate(d.findings, 1):
        lines.extend(textwrap.wrap(f"{i}. {f.title}  [{f.strength}]", width, subsequent_indent="   "))
        put("where", f.where)
        put("evidence", f.evidence)
        if f.effect is not None:
            put("effect", f"alone it moves the output by relative L2 {plain(f.effect)}")
        put("fix", f.fix)
        if f.fault.reports:
            put("reports", ", ".join(f.fault.reports))
        lines.append("")
    for label, value in d.call:
        put(label, value)
    if d.truth is not None:
        put("output", "from the checkpoint's own result: " + distance(d.truth, d.floor))
    if d.kernel is not None:
        put("kernel", f"recorded output against emulation of what was passed: {d.kernel}")
    for text in d.checked:
        put("checked", text)
    for text in d.open:
        put("open", text)
    return printable("\n".join(lines))
