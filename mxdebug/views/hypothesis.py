"""A guess about a call, tried: the checkpoint, converted with some faults switched on, against what was passed and recorded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..calls import Call
from ..checkpoints import CheckpointLayer
from ..contracts import Contract, Seen, find
from ..contracts.operand import Operand
from ..diagnosis.given import Given
from ..diagnosis.locate import position
from ..diagnosis.outputs import follows
from ..errors import MxdebugError
from ..faults import CALL_FAULTS, FAULTS, KERNEL_FAULTS, OPERAND_FAULTS, PARAMETER_FAULTS, SCALARS, SCALAR_FAULTS, Situation
from ..metrics import Comparison, compare, plain
from ..recipes import Plan, logical_operands, recipe
from ..reference import MoELayer, Parallel
from .sample import Sample, sample

Guess = Sequence[tuple[str, Sequence[str]]]  # faults, each with the operands that it strikes; none: all that it can
ALL = "all it can"
POINTS = 512  # numbers of the output that are drawn


@dataclass(frozen=True)
class Match:
    """One operand: how many of its bytes are as the guess predicts; None where only one of the two has it."""

    key: str
    title: str
    equal: int | None
    total: int

    @property
    def right(self) -> bool:
        """Whether all are."""
        return self.equal == self.total

    def __str__(self) -> str:
        if self.equal is None:
            return f"{self.title:<17}  on one side only"
        return f"{self.title:<17}  {'equal' if self.right else f'{self.total - self.equal} of {self.total} bytes differ'}"


@dataclass(frozen=True)
class Trial:
    """What a guess predicts, against what is there.

    guess      the faults that are switched on
    sample     which part of the call was computed
    matches    the operands
    activation whether the call passes the activation that the guess predicts
    output     the predicted output against the recorded one (`against` says which); None where the kernel would refuse the call
    follows    whether that is the same up to rounding
    effect     the predicted output against the one of the guess without faults
    refused    why the kernel would refuse, or None
    predicted, there   numbers of the shown token, the first POINTS of its columns
    """

    guess: tuple[tuple[str, tuple[str, ...]], ...]
    sample: str
    matches: tuple[Match, ...]
    activation: bool
    against: str
    output: Comparison | None
    follows: bool
    effect: float | None
    refused: str | None
    predicted: tuple[float, ...]
    there: tuple[float, ...]

    @property
    def explained(self) -> bool:
        """Whether bytes, activation and output are all as predicted."""
        return self.activation and self.follows and all(m.right for m in self.matches)

    @property
    def verdict(self) -> str:
        """In one line."""
        wrong = [m.title for m in self.matches if not m.right] + ([] if self.activation else ["activation"])
        if self.refused is not None:
            return f"IMPOSSIBLE: the kernel would refuse this call: {self.refused}"
        if self.explained:
            return "EXPLAINED: every byte and the output are as predicted" if self.guess else "RIGHT: without any fault, every byte and the output are as predicted"
        if not wrong:
            return "BYTES EXPLAINED, but the output is another one"
        return f"NOT EXPLAINED: {', '.join(wrong)}" + (" differ, but the output is the same" if self.follows else "")

    def __str__(self) -> str:
        on = " + ".join(f"{fault} ({', '.join(keys) if keys else ALL})" for fault, keys in self.guess) or "no fault"
        lines = [self.verdict, f"  switched on  {on}", f"  computed     {self.sample}"]
        lines += [f"  operand      {m}" for m in self.matches if not m.right] or ["  operands     all equal"]
        if self.output is not None:
            same = self.output.elements - self.output.differing
            lines.append(f"  output       {same} of {self.output.elements} numbers have the bits of {self.against}, relative L2 {plain(self.output.relative_l2)}")
        if self.effect is not None:
            lines.append(f"  effect       these faults move the output by relative L2 {plain(self.effect)}")
        return "\n".join(lines)


class Trials:
    """One call and one layer of a checkpoint, made ready so that each guess costs little.

    call, layer  as for `mxdebug.diagnose`; engine: whose recipe; row: which (token, slot) is shown, see `sample`
    tp           the tensor-parallel (size, rank), as for `mxdebug.diagnose`; None: as the call says, or its bytes
    Tokens, expert ids and router weights are taken as they were passed: a guess is about the layer, its activation, and the kernel.
    Raises MxdebugError where the call breaks its contract, does not fit the layer, or gives this rank nothing to do.
    """

    def __init__(self, call: Call, layer: CheckpointLayer, engine: str = "vllm", row: int = 0, tp: tuple[int, int] | None = None) -> None:
        self.contract: Contract = find(call.function, call.arguments)
        c, arguments = self.contract, call.arguments
        self.recipe = recipe(engine, c.path, layer.kind)
        given = Given.of(c, arguments)
        stated = c.parallel(arguments)
        if (experts := given.experts * stated.ep_size) != layer.layer.experts:
            raise MxdebugError("call", f"{layer.layer.experts} experts on all ranks, as this checkpoint gives it", f"{experts}",
                               "another checkpoint or layer")
        if not bool(given.here.any()):
            first = stated.ep_rank * given.experts
            raise MxdebugError("selected experts", f"some of this rank's, {first} to {first + given.experts - 1}",
                               f"none in {given.base.experts.numel()} slots", "ids that are out of range, or tokens of other ranks only")
        self.sample: Sample = sample(given, row)
        ids, router = given.base.experts, given.base.router
        parallel = position(given, layer.layer, self.recipe, Parallel(*tp) if tp else None)
        self._x, self._passed, whole = c.activations_of(arguments), arguments, layer.layer
        if self.sample.whole:
            self._position = None
        else:
            t, self._position = self.sample.token, self.sample.expert
            one = whole.take([self.sample.expert + stated.ep_rank * given.experts])
            self._x, ids, router, whole = self._x[t: t + 1], *(getattr(self.sample.seen, n) for n in ("experts", "router")), one
            parallel, stated = Parallel(parallel.tp_size, parallel.tp_rank), Parallel(stated.tp_size, stated.tp_rank)
        part = whole.part(parallel)
        plan = self.recipe.plan(part, layer.layer)
        if plan.padded != (given.base.layer.intermediate, given.base.layer.hidden):
            raise MxdebugError("call", f"a layer of intermediate and hidden size {list(plan.padded)}, as this checkpoint gives it",
                               str([given.base.layer.intermediate, given.base.layer.hidden]), "another checkpoint, layer or parallel position")
        self._right = Situation(self.recipe, whole, parallel, given.base.x, ids, router, plan, part.activation, stated)
        self._parts: dict[Parallel, tuple[MoELayer, dict[str, Tensor | None]]] = {}
        self._made: dict[Any, Tensor | None] = {}
        self._matched: dict[tuple[str, int | None], Match] = {}
        self._recorded = call.outputs[0] if call.outputs and self.sample.whole else None
        self._there = self.sample.seen.emulate() if self._recorded is None else self._recorded
        self._tried: dict[Any, Trial] = {}
        self._made_without = self._output(self._right)

    def faults(self) -> dict[str, tuple[str, ...]]:
        """The faults that can be switched on for this call -> the operands that each can strike ("call" and "kernel" besides operands)."""
        out = {}
        for f in (*OPERAND_FAULTS, *SCALAR_FAULTS, *PARAMETER_FAULTS, *(k for k in KERNEL_FAULTS if k not in CALL_FAULTS)):
            if able := self._able(f.id):
                out[f.id] = able
        return out

    def _able(self, fault: str) -> tuple[str, ...]:
        """The operands that a fault can strike in this call; faults that bring a checkpoint of their own are left out."""
        out = []
        for key in FAULTS[fault].strikes if fault in FAULTS else ():
            if key not in (*self._right.plan.forms, *SCALARS, "call", "kernel"):
                continue
            try:
                made = FAULTS[fault].injected(self._right, (key,))
            except MxdebugError:
                continue
            if made.layer.activation is self._right.layer.activation:
                out.append(key)
        return tuple(out)

    def trial(self, guess: Guess) -> Trial:
        """Try some faults, one after the other. Raises MxdebugError for a fault that cannot strike here."""
        made = tuple((fault, tuple(keys)) for fault, keys in guess)
        if made not in self._tried:
            self._tried[made] = self._try(made)
        return self._tried[made]

    def _try(self, guess: tuple[tuple[str, tuple[str, ...]], ...]) -> Trial:
        situation = self._right
        for fault, keys in guess:
            able = self._able(fault)
            if not able or set(keys) - set(able):
                raise MxdebugError(f"fault {fault}", f"operands among {', '.join(able)}" if able else f"one of {', '.join(self.faults())}",
                                   ", ".join(keys) or fault, "it cannot strike that in this call, or not in the part of it that is shown")
            situation = FAULTS[fault].injected(situation, keys or able)
        arguments, seen, output = self._output(situation) if guess else self._made_without
        matches, part = self._matches(arguments), str(self.sample)
        if seen is None or isinstance(output, MxdebugError):
            return Trial(guess, part, matches, True, "", None, False, None, f"{output.operand}, {output.got}", (), ())
        there, row, right = self._there, self.sample.token if self.sample.whole else 0, self._made_without[2]
        name = "the recording" if self._recorded is not None else "what the kernel makes of the call"
        effect = None if not guess or isinstance(right, MxdebugError) else compare(output, right).relative_l2
        k = max(seen.layer.hidden, seen.layer.intermediate)
        return Trial(guess, part, matches, self._same_activation(seen), name, compare(output, there), follows(output, there, k, self.contract.roundings),
                     effect, None, *(_numbers(t[row]) for t in (output, there)))

    def _output(self, situation: Situation) -> tuple[dict[str, Any], Seen | None, Tensor | MxdebugError]:
        operands = situation.operands(lambda plan, p: self._converted(situation, plan, p))
        arguments = situation.plan.call(operands, situation.activation, self._x, situation.experts, situation.router, situation.stated)
        if situation.kernel is self._right.kernel and self._passed_too(arguments):
            return arguments, self.sample.seen, self._there
        try:
            seen = self.sample.cut(self.contract.see(arguments))
            return arguments, seen, situation.kernel.output(seen)
        except MxdebugError as error:
            return arguments, None, error

    def _passed_too(self, arguments: Mapping[str, Any]) -> bool:
        """Whether these are the bytes and parameters of the call, of which a part was emulated already."""
        if self.sample.whole or not all(m.right for m in self._matches(arguments)):
            return False
        for o in (o for o in self.contract.inputs if o.key.startswith("swiglu_")):
            a, b = arguments.get(o.argument), self._passed.get(o.argument)
            if isinstance(a, Tensor) and isinstance(b, Tensor):
                if not self._match(o, a, b).right:
                    return False
            elif a is not b and (isinstance(a, Tensor) or isinstance(b, Tensor) or a != b):
                return False
        return True

    def _converted(self, situation: Situation, plan: Plan, p: Parallel) -> dict[str, Tensor | None]:
        """As Plan.convert; an operand in a form that was made before is not made again."""
        if situation.layer is not self._right.layer:
            return plan.convert(situation.layer.part(p))
        if p not in self._parts:
            part = situation.layer.part(p)
            self._parts[p] = part, logical_operands(part)
        part, logical = self._parts[p]
        for key, t in logical.items():
            if key in plan.forms and (key, plan.forms[key], p) not in self._made:
                self._made[key, plan.forms[key], p] = None if t is None else plan.forms[key].apply(t)
        return {**{key: self._made[key, form, p] for key, form in plan.forms.items()}, **plan.scalars(part)}

    def _matches(self, arguments: Mapping[str, Any]) -> tuple[Match, ...]:
        keys = [o for o in (*self.contract.operands, *self.contract.inputs) if o in self.contract.operands or o.key in SCALARS]
        pairs = [(o, o.get(arguments), o.get(self._passed)) for o in keys]
        return tuple(self._match(o, a, b) for o, a, b in pairs if a is not None or b is not None)

    def _match(self, o: Operand, a: Tensor | None, b: Tensor | None) -> Match:
        """Bytes that are kept in `_made` are compared once."""
        at = (o.key, None if a is None else a.data_ptr())
        if at in self._matched:
            return self._matched[at]
        part = b if b is None or self._position is None else _of(b, self._position, self._experts)
        found = _match(o.key, o.title, a, part)
        if a is not None and any(t is not None and t.data_ptr() == a.data_ptr() for t in self._made.values()):
            self._matched[at] = found
        return found

    @property
    def _experts(self) -> int:
        return self.contract.operand("w13").get(self._passed).shape[0]

    def _same_activation(self, seen: Seen) -> bool:
        a, b = seen.layer.activation, self.sample.seen.layer.activation
        names = ("alpha", "beta", "limit")

        def values(activation: Any, name: str) -> list[float] | None:
            t = getattr(activation, name)
            return None if t is None else t.flatten().tolist()

        return a.kind == b.kind and all(values(a, n) == values(b, n) for n in names)


def _of(t: Tensor, position: int, experts: int) -> Tensor:
    """One expert's part of an operand; a scalar that all experts share is its own."""
    return t if t.numel() == 1 else t.reshape(experts, -1)[position]


def _match(key: str, title: str, a: Tensor | None, b: Tensor | None) -> Match:
    if a is None or b is None:
        return Match(key, title, None, (b if a is None else a).nbytes)
    a, b = (t.contiguous().flatten().view(torch.uint8) for t in (a, b))
    equal = b.numel() if torch.equal(a, b) else b.numel() - int(torch.count_nonzero(a != b)) if a.shape == b.shape else 0
    return Match(key, title, equal, b.numel())


def _numbers(t: Tensor) -> tuple[float, ...]:
    return tuple(t[:POINTS].double().tolist())


def layer_of(call: Call, checkpoint: Any, layer: int | None = None) -> CheckpointLayer:
    """The layer of a checkpoint (opened, or its folder, or one layer already) that a call belongs to."""
    from ..checkpoints import open_checkpoint
    from ..diagnosis.locate import locate

    if isinstance(checkpoint, CheckpointLayer):
        return checkpoint
    if checkpoint is None:
        raise MxdebugError("checkpoint", "one layer, an opened checkpoint, or its folder", "None",
                           "a guess is about what was made of a checkpoint")
    opened = open_checkpoint(checkpoint) if not hasattr(checkpoint, "layers") else checkpoint
    return opened.layer(locate(call, opened) if layer is None else layer)
