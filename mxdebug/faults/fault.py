"""A fault: a small named change of a recipe's choices, of the call, or of what the kernel does. Injected here, recognised in `diagnosis`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ..calls import Call
from ..checkpoints import CheckpointLayer
from ..contracts import Contract, Seen
from ..errors import MxdebugError
from ..recipes import Form, Plan, Recipe
from ..reference import Activation, MoELayer, Parallel

Slots = Callable[[str, Form, Contract], Mapping[str, Any] | None]
OPERANDS = ("w13", "w13_scale", "w13_bias", "w2", "w2_scale", "w2_bias")
SCALARS = ("w13_alpha", "w2_alpha", "a2_gscale", "g1_scale_c")  # global scales that a kernel reads
QUANTISED_WITH = "a1_gscale"  # the one that the caller quantised the activations with: passed, and not read for those


@dataclass(frozen=True)
class KernelChange:
    """What a kernel would compute if it did not keep its contract: changes of the decoded layer, the router weights, the position, the call, the output."""

    layer: Callable[[MoELayer], MoELayer] = lambda layer: layer
    router: Callable[[Tensor], Tensor] = lambda router: router
    parallel: Callable[[Parallel], Parallel] = lambda parallel: parallel
    seen: Callable[[Seen], Seen] = lambda seen: seen
    after: Callable[[Tensor], Tensor] = lambda output: output

    def then(self, other: KernelChange) -> KernelChange:
        """Both changes, this one first."""
        return KernelChange(lambda t: other.layer(self.layer(t)), lambda r: other.router(self.router(r)),
                            lambda p: other.parallel(self.parallel(p)), lambda s: other.seen(self.seen(s)), lambda t: other.after(self.after(t)))

    def output(self, seen: Seen) -> Tensor:
        """The output of a call as the kernel sees it, under this change."""
        seen = self.seen(seen)
        return self.after(replace(seen, layer=self.layer(seen.layer), router=self.router(seen.router), parallel=self.parallel(seen.parallel)).emulate())


@dataclass(frozen=True)
class Situation:
    """Everything that leads to one call: what is in the checkpoint, what the recipe makes of it, what is passed, what the kernel does.

    `build` gives the arguments and the output, `call` both as a recorded call, `checkpoint` what it is diagnosed against; a fault's `inject`
    gives another Situation.

    layer      the whole layer of the checkpoint; parallel: this rank's position; x, experts, router: the tokens
    plan       the recipe applied to this rank's part
    slices     operand key -> the position whose part that operand holds, where it is not `parallel`
    activation what is passed as the activation (per local expert); dropped: operands that are not passed
    stated     the position that is passed to the kernel
    cut        how the layer is cut for a position
    """

    recipe: Recipe
    layer: MoELayer
    parallel: Parallel
    x: Tensor
    experts: Tensor
    router: Tensor
    plan: Plan
    activation: Activation
    stated: Parallel
    slices: Mapping[str, Parallel] = field(default_factory=dict)
    dropped: frozenset[str] = frozenset()
    kernel: KernelChange = KernelChange()
    cut: Callable[[MoELayer, Parallel], MoELayer] = MoELayer.part

    @staticmethod
    def right(recipe: Recipe, layer: MoELayer, x: Tensor, experts: Tensor, router: Tensor, parallel: Parallel = Parallel()) -> Situation:
        """The situation without a fault."""
        part = layer.part(parallel)
        return Situation(recipe, layer, parallel, x, experts, router, recipe.plan(part, layer), part.activation, parallel)

    @property
    def local_experts(self) -> int:
        return self.layer.experts // self.parallel.ep_size

    def edit(self, keys: tuple[str, ...], change: Callable[[Form], Mapping[str, Any]]) -> Situation:
        """Change slots of some operands' forms."""
        plan = self.plan
        for key in keys:
            plan = plan.edit(key, **change(plan.forms[key]))
        return replace(self, plan=plan)

    def operands(self, convert: Callable[[Plan, Parallel], dict[str, Tensor | None]] | None = None) -> dict[str, Tensor | None]:
        """What is passed of the layer, by key. convert: (plan, position) -> that part's converted operands, if not by `Plan.convert`."""
        convert = convert or (lambda plan, position: plan.convert(self.cut(self.layer, position)))
        parts = {p: convert(self.plan, p) for p in {self.parallel, *self.slices.values()}}
        mine = parts[self.parallel]
        return {**mine, **{k: None if k in self.dropped else parts[self.slices.get(k, self.parallel)][k] for k in OPERANDS if k in mine}}

    def arguments(self) -> dict[str, Any]:
        """The call's arguments."""
        operands = self.operands()
        return self.plan.call(operands, self.activation, self.plan.quantise(self.x, operands), self.experts, self.router, self.stated)

    def build(self) -> tuple[dict[str, Any], Tensor | None]:
        """(arguments, output) of the call; the output is None where the kernel refuses the arguments, which leaves a crash dump."""
        arguments = self.arguments()
        try:
            seen = self.recipe.contract.see(arguments)
        except MxdebugError:
            return arguments, None
        return arguments, self.kernel.output(seen)

    def call(self) -> Call:
        """The call as it would be recorded; without an output where the kernel refuses the arguments."""
        return Call.made(self.recipe.contract.function, *self.build())

    def checkpoint(self) -> CheckpointLayer:
        """The layer as a checkpoint holds it: `mxdebug.diagnose(s.call(), s.checkpoint())`."""
        return CheckpointLayer(0, self.recipe.checkpoint, self.layer, self.recipe.rows, {}, {}, frozenset())


@dataclass(frozen=True)
class Fault:
    """One record of the catalogue.

    id, title    how prints name it
    strikes      operand keys that it can strike, each on its own or together; or ("call",) or ("kernel",)
    inject       (situation, operand keys) -> situation
    slots        for operands: (key, right form, contract) -> the slots of a Form that give it away, or None where the kernel reads
                 just this, or it does not fit; itself None where a fault is recognised in code
    gives_away   what proves it
    needs        which data can show it
    fix          what to change, in one line
    reports      public reports
    variants     other fillings of the slot that are the same fault
    change       of the kernel: what it computes instead
    layer        of the checkpoint: what was made of it before the recipe
    """

    id: str
    title: str
    strikes: tuple[str, ...]
    inject: Callable[[Situation, tuple[str, ...]], Situation]
    gives_away: str
    needs: str
    fix: str
    reports: tuple[str, ...] = ()
    slots: Slots | None = None
    change: KernelChange | None = None
    variants: tuple[Any, ...] = ()
    layer: Callable[[MoELayer], MoELayer] | None = None

    def injected(self, situation: Situation, keys: tuple[str, ...] | None = None) -> Situation:
        """The situation with this fault; keys: which operands it strikes (all that it can, by default)."""
        there = tuple(k for k in self.strikes if k in situation.plan.forms or k in SCALARS)
        for k in there if keys is None else keys:
            if k not in self.strikes or (k in OPERANDS and k not in there):  # "call" and "kernel" are struck anywhere
                raise MxdebugError(f"operand for fault {self.id}", f"one of {', '.join(there)}" if there else "none: it strikes no operand here", repr(k),
                                   "this path has no such operand" if k in self.strikes else "")
        return self.inject(situation, there if keys is None else keys)


def needs(condition: bool, fault: str, what: str) -> None:
    """Raise where a situation cannot have a fault."""
    if not condition:
        raise MxdebugError(f"situation for fault {fault}", what, "none of that", "this fault cannot strike here")


def full_like_first(value: float, experts: int) -> Tensor:
    """float32 [experts], all `value`."""
    return torch.full((experts,), value, dtype=torch.float32)
