"""What the kernel was given, what a fix would do to the output, what to do next, and what to write down about a call of one's own."""

from __future__ import annotations

import functools
import math
import textwrap
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from ..diagnosis import finding as verdicts
from ..errors import MxdebugError
from ..formats import BlockTensor, ScaleCodec
from ..metrics import Comparison
from ..metrics import compare as distance
from ..reference import MoELayer
from . import codes, compare, flow, outputs
from .own import WIDTH, Dump, Own, columns, passed, same

if TYPE_CHECKING:
    from .call_explorer import Explorer

AS_PASSED = ("x", "x_scale", "experts", "router")  # no recipe makes these
NEXT = {
    verdicts.RIGHT: "This call is not the reason. Read the lines 'open': what it could not have shown. Then take another layer or rank, "
                    "or a call with more tokens; then look outside of the kernel: attention, router, sampler.",
    verdicts.WRONG: "Do what the finding's fix says, in the engine's conversion or where it makes the call. Record the same prompt again: "
                    "the new call must be RIGHT. Where the finding is proved, nothing else needs to be ruled out. Where it is consistent "
                    "or suspected, the what-if below must bring the output back before you believe it.",
    verdicts.UNEXPLAINED: "No known fault makes these bytes, or this output. First make sure that checkpoint, layer and rank are the right "
                          "ones. Then look for a pattern in the views below: which rows, which experts, which columns. A new pattern is "
                          "worth a report; the text at the end is made for it.",
    verdicts.UNDECIDED: "Something that would decide it is missing: the checkpoint, the output, or tokens that do not fill whole tiles. "
                        "The lines 'open' say what.",
    verdicts.CRASHED: "Inputs without outputs: the call raised, hung or was killed. If a finding says that the contract is broken, that is "
                      "why. If the arguments are right, look at the error message (mxdebug symptom TEXT), at the driver, at memory.",
    verdicts.PENDING: "FlashInfer saw this call inside a CUDA graph and never wrote its tensors. Record again in eager mode.",
}
NOT_READ = "Nothing can be said about this call. The text behind 'got' is what is in the way: correct that, or set CALL to another one."


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


def compared(own: Own, operand: str | None = None, expert: int = 0) -> compare.Compared:
    """A weight as the kernel reads it against the checkpoint.

    operand  "w13", "gate", "up", "down" or "w2" of an expert on this rank, or "weight" of a linear layer; None: w13, or the weight
    """
    if own.linear:
        meant, read, scale = _weight(own, operand)
        return compare.compare(meant, read, title="The weight: the kernel's eye against the checkpoint", read_scale=scale)
    meant, read = _layers(own, expert)
    operand = operand or "w13"
    return compare.of_layers(meant, read, operand, title=f"{operand} of expert {expert}: the kernel's eye against the checkpoint")


def counted(own: Own, operand: str | None = None, expert: int = 0) -> codes.Codes:
    """The codes and block scales of a weight, as they are meant and as they are read; operand and expert as of `compared`."""
    if own.linear:
        meant, read, scale = _weight(own, operand)
        return codes.codes(meant, read, title="Which codes and scales there are", read_scale=scale)
    operand = operand or "w13"
    return codes.of_layers(*_layers(own, expert), operand, title=f"Which codes and scales there are in {operand} of expert {expert}")


def _layers(own: Own, expert: int) -> tuple[MoELayer, MoELayer]:
    """One expert as it is meant, and as the kernel reads it."""
    if expert not in range(own.meant.experts):
        raise MxdebugError("EXPERT", f"0 to {own.meant.experts - 1}", repr(expert), "experts are counted from 0 on each rank")
    return own.meant.take([expert]), own.kernel.decode(own.call.arguments, experts=[expert])


def _weight(own: Own, operand: str | None) -> tuple[BlockTensor, BlockTensor, ScaleCodec]:
    """A linear layer's weight as it is meant, as the kernel reads it without padding (which has no global scale that could be meant), and how."""
    if operand not in (None, "weight"):
        raise MxdebugError("OPERAND", "weight", repr(operand), "a linear layer has one weight and no experts")
    seen, meant = own.kernel.see(own.call.arguments), own.meant.weight
    n, k = meant.shape
    w = seen.weight
    return meant, replace(w, payload=w.payload[:n, : k // 2], scales=w.scales[:n, : k // w.format.block], global_scale=seen.alpha.expand(n)), seen.scale


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

    return Explorer(own.call, own.chosen)


def guess(own: Own) -> list[str | tuple[str, str]]:
    """The diagnosis's findings as the explorer's switches: a fault, or (fault, operand) for each where it struck not all that it can."""
    titles = {o.title: o.key for o in own.kernel.operands}
    out: list[str | tuple[str, str]] = []
    for f in own.diagnosis.findings:
        struck = [titles[t] for t in f.where.split(", ") if t in titles]
        every = [k for k in f.fault.strikes if k in own.plan.forms]
        out += [f.id] if not struck or set(struck) == set(every) else [(f.id, key) for key in struck]
    return out


def next_step(own: Own) -> str:
    """What to do now, by the verdict."""
    try:
        verdict, text = own.diagnosis.verdict, NEXT[own.diagnosis.verdict]
    except MxdebugError as error:
        verdict, text = "not read", f"{error}. {NOT_READ}"
    return textwrap.fill(f"{verdict.upper()}. {text}", WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def report(own: Own) -> str:
    """A text for a bug report, in Markdown: versions, path, finding, evidence, fix. It names no file and no machine."""
    d = own.diagnosis
    lines = [f"**{d.verdict.upper()}**: {d.summary}", "", *(f"- {label}: {text}" for label, text in d.call)]
    for f in d.findings:
        lines += ["", f"**{f.title}** ({f.strength}: {verdicts.STRENGTHS[f.strength]})", ""]
        lines += [f"- where: {f.where}", f"- evidence: {f.evidence}"]
        if f.effect is not None and math.isfinite(f.effect):
            lines.append(f"- effect: alone it moves the output by relative L2 {f.effect:.3f}")
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
        lines.append(f"- the same call with vLLM's operands, emulated, against what the checkpoint means: relative L2 {mended:.3f}")
    except MxdebugError:
        pass  # without a checkpoint, or for a broken contract, there is no such call
    lines += [f"- not decided: {text}" for text in d.open]
    return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent="  " if line.startswith("- ") else "", break_on_hyphens=False)
                     for line in lines)
