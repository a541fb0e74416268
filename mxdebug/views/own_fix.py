"""What the kernel was given, what a fix would do to the output, what to do next, and what to write down about a call of one's own."""

from __future__ import annotations

import functools
import math
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from ..diagnosis import diagnose
from ..diagnosis import finding as verdicts
from ..errors import MxdebugError
from ..metrics import Comparison, plain
from ..metrics import compare as distance
from . import flow, outputs
from .own import WIDTH, Dump, Own, columns, passed, same
from .own_weights import compared, counted, differing

if TYPE_CHECKING:
    from .call_explorer import Explorer

__all__ = ["after_the_fix", "compared", "counted", "differing", "explorer", "guess", "next_step", "operands", "report", "switch_on", "way",
           "what_if"]
AS_PASSED = ("x", "x_scale", "experts", "router")  # no recipe makes these
NEXT = {
    verdicts.RIGHT: "This call is not the reason. Read the lines 'open': what it could not have shown. Then take another layer or rank, "
                    "or a call with more tokens; then look outside of the kernel: attention, router, sampler.",
    verdicts.WRONG: "Do what the finding's fix says, in the engine's conversion or where it makes the call. Record the same prompt again: "
                    "the new call must be RIGHT. Where the finding is proved, nothing else needs to be ruled out. Where it is consistent "
                    "or suspected, the what-if below must bring the output back before you believe it.",
    verdicts.UNEXPLAINED: "No known fault makes these bytes, or this output.",
    verdicts.UNDECIDED: "Something that would decide it is missing: the checkpoint, the output, or tokens that do not fill whole tiles. "
                        "The lines 'open' say what.",
    verdicts.CRASHED: "Inputs without outputs: the call raised, hung or was killed. If a finding says that the contract is broken, that is "
                      "why. If the arguments are right, look at the error message (mxdebug symptom TEXT), at the driver, at memory.",
    verdicts.PENDING: "FlashInfer saw this call inside a CUDA graph and never wrote its tensors. Record again in eager mode.",
}
NOT_READ = "Nothing can be said about this call. The text behind 'got' is what is in the way: correct that, or set CALL to another one."
UNFIT = "The call itself can be read, but it does not fit {}: change in the first cell what is not right, and run all cells again."
SETTINGS = ("{} cannot be explained. First make sure that {} are those of this call; if not, change them in the first cell, and run all "
            "cells again. If they are, these weights were changed in a way that mxdebug does not know, or never loaded: the views below "
            "show where.")
BYTES = ("{} cannot be explained, and {} of {} operands are as they should be: layer and checkpoint are the right ones. Look at what makes "
         "this operand, from the file to the call. The views below show which expert, which rows and which columns; a pattern that mxdebug "
         "does not know is worth a report, and the text at the end is made for it.")
KERNEL = ("All operands are right, and the output does not follow from what was passed: checkpoint, layer and rank are the right ones, and "
          "so is the conversion. Run the same call again: if its output changes, look for a race, or for memory that something else "
          "writes. If it does not, the kernel computes something else: try another version, tactic or backend, and report it with the "
          "text at the end.")
ALONE = ("The output does not follow from what was passed, whatever the checkpoint is: look at the kernel's version, tactic and backend, "
         "at races, and at memory that something else writes. With CHECKPOINT in the first cell you would also see whether the right "
         "operands were passed.")


def operands(own: Own) -> str:
    """Every tensor of the call: what was passed, and what the contract wants there."""
    lines = [("operand", "argument", "passed", "the contract wants")]
    for o in (*own.kernel.operands, *own.kernel.inputs):
        t = passed(o, own.call.arguments)
        reads = ", ".join(str(p.name) for p in (o.layout, o.rows, o.shuffle, o.scale) if p is not None)
        if t is not None or not o.optional:
            lines.append((o.title, o.argument, _brief(t), f"{_name(o.dtype)} {o.shape}" + (f": {reads}" if reads else "")))
    return columns(lines)


def _brief(value: Tensor | float | None) -> str:
    return f"{_name(value.dtype)} {list(value.shape)}" if isinstance(value, Tensor) else "-" if value is None else f"{value:g}"


def _name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def way(own: Own) -> flow.Flow:
    """The way of the call from the checkpoint to its output, with the diagnosis's verdict of each operand."""
    try:
        layer = own.chosen
    except MxdebugError:
        layer = None
    return flow.flow(own.call, own.diagnosis, layer)


@dataclass(frozen=True, eq=False)
class WhatIf:
    """Outputs of some tokens against what the checkpoint means.

    differs   titles of the operands whose bytes are not the recipe's; refused: those that cannot be put right alone, and why
    tokens    how many; right: bf16 [tokens, H]: the emulated output of the call with right operands
    table     all outputs; the last line is `right`
    """

    differs: tuple[str, ...]
    refused: tuple[str, ...]
    tokens: int
    right: Tensor
    table: outputs.Table

    @property
    def mended(self) -> Comparison:
        """The call with right operands against what the checkpoint means."""
        return self.table.lines[-1].comparison

    def __str__(self) -> str:
        head = f"not as the recipe makes them: {', '.join(self.differs) or 'none'}"
        alone = [f"cannot be put right alone: {text}" for text in self.refused]
        return "\n".join([head, *alone, "", str(self.table), "", f"({self.tokens} tokens)"])


@functools.lru_cache(maxsize=4)
def what_if(own: Own) -> WhatIf:
    """Emulate the call as it was passed; with each operand put right alone that is not the recipe's; and with all of them right.

    Tokens, their scales and router weights stay as they were passed. Raises MxdebugError without a checkpoint, and for a call that
    breaks its kernel's contract.
    """
    args, right, want = own.call.arguments, own.right, own.meant_output
    differs = [o for o in (*own.kernel.operands, *own.kernel.inputs) if o.key not in AS_PASSED and not same(own, o, args, right)]
    tried = {"as recorded": own.output} if own.call.outputs else {}
    tried["as passed, emulated"], refused = own.see().emulate(), []
    for o in differs if len(differs) > 1 else ():
        mixed = dict(args)
        o.put(mixed, passed(o, right))
        try:
            tried[f"only {o.title} right"] = own.see(mixed).emulate()
        except MxdebugError as error:  # the kernel wants both, or neither
            refused.append(f"{o.title}, since then {error}")
    tried["all right"] = good = own.see(right).emulate()
    cut = {name: t[:, : want.shape[1]].double() for name, t in tried.items()}
    table = outputs.table(("the checkpoint means", want), cut, first=4)
    return WhatIf(tuple(o.title for o in differs), tuple(refused), len(own.tokens), good, table)


def after_the_fix(dump: Dump, own: Own) -> str:
    """Other recorded calls on the same tokens against the emulated fix: they should be what `what_if` predicts."""
    right, lines = what_if(own).right, []
    for other in dump.twins(own):
        says = f"against the emulated fix: {distance(other.output, right)}" if other.output.shape == right.shape else "another size"
        lines.append(textwrap.fill(f"call {other.number}: {says}", WIDTH, subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(lines or ["no other call in this dump is on the same tokens"])


def explorer(own: Own) -> Explorer:
    """The call explorer for this call, with no fault switched on. Raises MxdebugError for a linear call, and without a checkpoint."""
    if own.linear:
        raise MxdebugError("call", "one of a mixture of experts", own.call.function, "the explorer has faults of experts only")
    from .call_explorer import Explorer

    return Explorer(own.call, own.chosen, tp=own.tp)


def guess(own: Own, explorer: Explorer) -> list[str | tuple[str, str]]:
    """The diagnosis's findings as switches that the explorer has: a fault, or (fault, operand) for each where it struck not all it can.

    A fault that struck more operands than there are switches is one that strikes all that it can.
    """
    return [switch for _, switches in _switches(own, explorer) for switch in switches]


def _switches(own: Own, explorer: Explorer) -> list[tuple[str, list[str | tuple[str, str]]]]:
    """(title, switches) of each finding; none where the explorer has no such fault for this call, or no room for all that it struck."""
    from .call_explorer import SWITCHES

    titles = {o.title: o.key for o in own.kernel.operands}
    out: list[tuple[str, list[str | tuple[str, str]]]] = []
    room = SWITCHES
    for f in own.diagnosis.findings:
        able = explorer.able.get(f.id, ())
        struck = [titles[t] for t in f.where.split(", ") if t in titles]
        switches: list[str | tuple[str, str]] = [f.id] if not struck or set(struck) == set(able) else [(f.id, key) for key in struck]
        if len(switches) > room:
            switches = [f.id]  # all that it can: there is no place for each
        if not able or set(struck) - set(able) or not room:
            switches = []
        room -= len(switches)
        out.append((f.title, switches))
    return out


def switch_on(own: Own, explorer: Explorer) -> str:
    """Switch the diagnosis's findings on in the explorer; what it says then, and which findings it has no switch for."""
    found, on = _switches(own, explorer), guess(own, explorer)
    explorer.guess(*on)
    lines = [str(explorer)] if on else []
    if without := [title for title, switches in found if not switches]:
        lines.append(textwrap.fill(f"no switch for: {'; '.join(without)}", WIDTH, subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(lines) or "no switch is on: the diagnosis has no finding"


def next_step(own: Own) -> str:
    """What to do now: by the verdict, and by what it rests on."""
    try:
        d = own.diagnosis
        verdict, text = d.verdict, _unexplained(own) if d.verdict == verdicts.UNEXPLAINED else NEXT[d.verdict]
        if own.tp and any(f.id == "wrong-tp-slice" for f in d.findings):
            text = f"TP is {own.tp} in the first cell: if this process was another rank, change that, and run all cells again. Else: {text}"
    except MxdebugError as error:
        says = "" if "in the first cell" in error.reason else UNFIT.format(_settings(own)) if _readable(own) else NOT_READ
        verdict, text = "not read", f"{error}. {says}".strip()
    return textwrap.fill(f"{verdict.upper()}. {text}", WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def _unexplained(own: Own) -> str:
    """Whether the settings, an operand or the kernel is to be looked at first, for a call that no fault explains."""
    d = own.diagnosis
    first = "First do what is said under 'fix', and record again. If it is still wrong: " if d.findings else ""
    differ = [key for key, state in d.operands if state == verdicts.DIFFERENT]
    named = {title for f in d.findings for title in f.where.split(", ")}
    unexplained = [title for key in differ if (title := own.kernel.operand(key).title) not in named]
    if not d.operands:
        return first + ALONE
    if not unexplained:
        return first + KERNEL
    titles = ", ".join(unexplained)
    if not d.findings and ({"w13", "w2"} <= set(differ) or "weight" in differ):
        return SETTINGS.format(titles, _settings(own))
    if d.follows is False:
        first += "The output does not follow from these bytes, so the kernel may have read others: record the call again. "
    return first + BYTES.format(titles, len(d.operands) - len(differ), len(d.operands))


def _settings(own: Own) -> str:
    names = ["CHECKPOINT", *(name for name, value in (("LAYER", own.layer), ("TP", own.tp)) if value is not None)]
    return "CHECKPOINT, LAYER and TP" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _readable(own: Own) -> bool:
    """Whether the call can be diagnosed without the settings."""
    try:
        diagnose(own.call)
        return True
    except MxdebugError:
        return False


def report(own: Own) -> str:
    """A text for a bug report, in Markdown: versions, path, finding, evidence, fix. It names no file and no machine."""
    d = own.diagnosis
    lines = [f"**{d.verdict.upper()}**: {d.summary}", "", *(f"- {label}: {text}" for label, text in d.call)]
    for f in d.findings:
        lines += ["", f"**{f.title}** ({f.strength}: {verdicts.STRENGTHS[f.strength]})", ""]
        lines += [f"- where: {f.where}", f"- evidence: {f.evidence}"]
        if f.effect is not None and math.isfinite(f.effect):
            lines.append(f"- effect: alone it moves the output by relative L2 {plain(f.effect)}")
        lines.append(f"- fix: {f.fix}")
        if f.fault.reports:
            lines.append(f"- seen before: {', '.join(f.fault.reports)}")
    lines.append("")
    if d.truth is not None:
        lines.append(f"- output against what the checkpoint means: {verdicts.distance(d.truth, d.floor)}")
    if d.kernel is not None:
        lines.append(f"- output against an emulation of what was passed: {d.kernel}")
    try:
        mended = what_if(own).mended.relative_l2
        lines.append(f"- the same call with vLLM's operands, emulated, against what the checkpoint means: relative L2 {plain(mended)}")
    except MxdebugError:
        pass  # without a checkpoint, or for a broken contract, there is no such call
    lines += [f"- not decided: {text}" for text in d.open]
    return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent="  " if line.startswith("- ") else "", break_on_hyphens=False)
                     for line in lines)
