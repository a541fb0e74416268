"""A kernel's contract: what each operand's bytes mean to it, and what it computes with them. No defaults: all is stated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from ..errors import MxdebugError
from ..formats import BlockFormat, BlockTensor
from ..layouts import LINEAR, Layout
from ..reference import Activation, MoELayer, Parallel, Roundings, Trace
from . import moe
from .operand import Arguments, Operand
from .seen import Seen
from .verified import Verified


@dataclass(frozen=True)
class Contract:
    """path is the engine's own name; function, flags and `belongs` select the kernel; sm lists the architectures that have it.

    weights, activations   the block formats that the GEMMs multiply; activations None: bf16
    operands   the layer: payload, block scales and biases of w13 and w2
    inputs     the rest: tokens, router, global scales, parameters of the activation
    kinds      FlashInfer's ActivationType -> what the kernel computes (reference.Activation.kind)
    multiple   (intermediate, hidden) sizes are multiples of these, since the kernel's tiles are
    position   arguments -> which part of the layer the call says it computes
    fixed      sizes, position and activation -> the arguments that are no tensors
    belongs    whether a call with these flags is this kernel's; refuses raises for what this kernel alone checks
    floats     alpha, beta and limit are passed as numbers, not as one tensor each
    clamps_before_scaling   limit and beta are meant for the GEMM's sums before alpha scales them
    routing    where expert ids and router weights are no plain tensors; aliases: other functions with the same contract
    first_only  scalars of which the kernel reads element 0 for every expert; crops: the output may be narrower than the padded hidden size
    `see` decodes a call; `emulate` gives the kernel's output on any machine; `run` calls the kernel on the GPU that it needs.
    """

    path: str
    function: str
    flags: Mapping[str, Any]
    sm: tuple[int, ...]
    weights: BlockFormat
    activations: BlockFormat | None
    operands: tuple[Operand, ...]
    inputs: tuple[Operand, ...]
    kinds: Mapping[str, str]
    roundings: Roundings
    multiple: tuple[int, int]
    alignment: str
    verified: tuple[Verified, ...]
    notes: tuple[str, ...]
    position: Callable[[Contract, Arguments], Parallel]
    fixed: Callable[[moe.Made], dict[str, Any]]
    belongs: Callable[[Arguments], bool]
    refuses: Callable[[Contract, Arguments, Activation], None]
    _run: Callable[[Contract, Arguments], Tensor]
    floats: bool = False
    clamps_before_scaling: bool = False
    routing: Callable[[Contract, Arguments, int], tuple[Tensor, Tensor]] | None = None
    aliases: tuple[str, ...] = ()
    first_only: tuple[str, ...] = ()
    crops: bool | None = None

    def operand(self, key: str) -> Operand:
        """The operand of that key."""
        for o in (*self.operands, *self.inputs):
            if o.key == key:
                return o
        raise MxdebugError("operand", f"one of {', '.join(o.key for o in self.operands)}", repr(key))

    def get(self, key: str, arguments: Arguments) -> Tensor | None:
        """The tensor of an operand or input; None where the call, or the kernel, has none of that key."""
        return next((o.get(arguments) for o in (*self.operands, *self.inputs) if o.key == key), None)

    def matches(self, function: str, arguments: Arguments) -> bool:
        """Whether a call falls under this contract. A flag that an older version of the function does not have counts as off."""
        return (function in (self.function, *self.aliases) and all(arguments.get(k, v if not v or isinstance(v, str) else None) == v for k, v in self.flags.items())
                and self.belongs(arguments))

    def x_layout(self, arguments: Arguments) -> Layout | None:
        """How the kernel reads the activations' block scales: the contract's layout, unless the call asks for linear ones."""
        stated = next((o.layout for o in self.inputs if o.key == "x_scale"), None)
        return LINEAR if stated is not None and arguments.get("swizzled_input_sf", True) is False else stated

    def activations_of(self, arguments: Arguments) -> Tensor | BlockTensor:
        """The call's activations [T, H]: bf16, or codes and block scales in logical order (with a global scale of 1)."""
        return moe.activations(self, arguments)

    def see(self, arguments: Arguments, *, tokens: Tensor | None = None, experts: Sequence[int] | None = None, whole: bool = True) -> Seen:
        """The call as the kernel sees it. tokens: only these, with only the experts that they use, renumbered from 0.

        experts picks positions on this rank. whole=False: experts are decoded one by one, each time that a trace comes to them, and not kept.
        The whole call is checked in any case. Raises MxdebugError on a broken contract.
        """
        return moe.see(self, arguments, tokens, experts, whole)

    def decode(self, arguments: Arguments, experts: Sequence[int] | None = None) -> MoELayer:
        """The layer as the kernel sees it, with the scale codec that it reads with; `experts` picks positions on this rank."""
        return self.see(arguments, experts=experts).layer

    def parallel(self, arguments: Arguments) -> Parallel:
        """The tensor- and expert-parallel position that the call states."""
        return self.position(self, arguments)

    def trace(self, arguments: Arguments, layer: MoELayer | None = None, *, keep: bool = False) -> Trace:
        """Emulate with the roundings of the kernel; `layer` replaces the decoded one (to ask what-if)."""
        seen = self.see(arguments)
        return (seen if layer is None else replace(seen, layer=layer)).trace(keep=keep)

    def emulate(self, arguments: Arguments) -> Tensor:
        """The output [T, H] that the kernel writes for these arguments, right or wrong ones."""
        return self.trace(arguments).output

    def arguments(self, operands: Mapping[str, Tensor | None], activation: Activation, x: Tensor | BlockTensor, x_layout: Layout | None,
                  experts: Tensor, router: Tensor, parallel: Parallel) -> dict[str, Any]:
        """The inverse of `see`: a call's arguments from operands in the kernel's layout (bytes as uint8) and tokens."""
        return moe.arguments(self, operands, activation, x, x_layout, experts, router, parallel)

    def run(self, arguments: Arguments) -> Tensor:
        """The real kernel's output. Raises MxdebugError where this machine cannot run it, saying what it has and what is needed."""
        return self._run(self, arguments)

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.function}({', '.join(f'{k}={v}' for k, v in self.flags.items() if v)}), "
                 + " ".join(f"SM{s}" for s in self.sm)]
        for o in (*self.operands, *self.inputs):
            parts = [str(o.dtype).removeprefix("torch."), o.shape, *(p for p in (
                o.layout and f"layout {o.layout.name}", o.rows and f"rows {o.rows.name}", o.shuffle and o.shuffle.name,
                o.scale and f"scale codec {o.scale.name}", o.view != "plain" and o.view) if p)]
            lines.append(f"  {o.title:<18} {o.argument:<26} {', '.join(parts)}  ({o.key})")
        lines.append(f"  alignment          {self.alignment}")
        lines += [f"  verified           {v.how}: {v.result} ({v.versions})" for v in self.verified]
        lines += [f"  note               {n}" for n in self.notes]
        return "\n".join(lines)
