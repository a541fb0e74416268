"""A kernel's contract: what each operand's bytes mean to it, and what it computes with them. No defaults: all is stated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import MxdebugError
from ..formats import ScaleCodec
from ..layouts import Layout, RowOrder
from ..reference import MoELayer, Parallel, Roundings, Trace, forward

Arguments = Mapping[str, Any]


@dataclass(frozen=True)
class Operand:
    """One tensor as the kernel gets it.

    key       short name, vLLM's: w13, w13_scale, w13_bias, w2, w2_scale, w2_bias
    argument  the kernel function's parameter, `quant_scales[0]` for the first of a list
    title     how prints call it
    shape     in words; E experts, I intermediate, H hidden size, both as padded for the kernel
    layout, rows, scale   how the bytes are read; None where the question does not arise
    """

    key: str
    argument: str
    title: str
    dtype: torch.dtype
    shape: str
    layout: Layout | None
    rows: RowOrder | None
    scale: ScaleCodec | None
    optional: bool
    meaning: str

    def get(self, arguments: Arguments) -> Tensor | None:
        """This operand's tensor in a call's arguments; None where it was not passed."""
        name, _, index = self.argument.partition("[")
        value = arguments.get(name)
        if index:
            position = int(index.rstrip("]"))
            value = value[position] if isinstance(value, (list, tuple)) and len(value) > position else None
        if value is not None and not isinstance(value, Tensor):
            raise MxdebugError(f"{self.title} ({self.argument})", "a tensor", type(value).__name__)
        return value


@dataclass(frozen=True)
class Verified:
    """What a contract was checked against: who ran, which version, what was compared."""

    how: str
    versions: str
    result: str


@dataclass(frozen=True)
class Contract:
    """path is the engine's own name; function and flags select the kernel; sm lists the architectures that have it.

    `decode` gives the weights as the kernel sees them, in logical order; `emulate` its output, on any machine; `run`
    calls the real kernel on the GPU that it needs.
    """

    path: str
    function: str
    flags: Mapping[str, Any]
    sm: tuple[int, ...]
    operands: tuple[Operand, ...]
    roundings: Roundings
    alignment: str
    verified: tuple[Verified, ...]
    notes: tuple[str, ...]
    _decode: Callable[[Contract, Arguments, Sequence[int] | None], MoELayer]
    _run: Callable[[Contract, Arguments], Tensor]

    def operand(self, key: str) -> Operand:
        """The operand of that key."""
        for o in self.operands:
            if o.key == key:
                return o
        raise MxdebugError("operand", f"one of {', '.join(o.key for o in self.operands)}", repr(key))

    def matches(self, function: str, arguments: Arguments) -> bool:
        """Whether a call falls under this contract."""
        return function == self.function and all(arguments.get(k) == v for k, v in self.flags.items())

    def decode(self, arguments: Arguments, experts: Sequence[int] | None = None) -> MoELayer:
        """The layer as the kernel sees it, with the scale codec that it reads with; `experts` picks positions on this rank.

        The whole call is checked in any case. Raises MxdebugError on a broken contract.
        """
        return self._decode(self, arguments, experts)

    def parallel(self, arguments: Arguments) -> Parallel:
        """The tensor- and expert-parallel position that the call states."""
        return Parallel(*(int(arguments.get(k, d)) for k, d in (("tp_size", 1), ("tp_rank", 0), ("ep_size", 1), ("ep_rank", 0))))

    def trace(self, arguments: Arguments, layer: MoELayer | None = None, *, keep: bool = False,
              compute: torch.dtype = torch.float32) -> Trace:
        """Emulate with the roundings of the kernel; `layer` replaces the decoded one (to ask what-if)."""
        return forward(arguments["input"], arguments["token_selected_experts"], arguments["token_final_scales"],
                       layer or self.decode(arguments), parallel=self.parallel(arguments), roundings=self.roundings,
                       compute=compute, keep=keep)

    def emulate(self, arguments: Arguments) -> Tensor:
        """The output [T, H] that the kernel writes for these arguments, right or wrong ones."""
        return self.trace(arguments).output

    def run(self, arguments: Arguments) -> Tensor:
        """The real kernel's output. Raises MxdebugError where this machine cannot run it, saying what it has and what is needed."""
        return self._run(self, arguments)

    def __str__(self) -> str:
        lines = [f"{self.path}: {self.function}({', '.join(f'{k}={v}' for k, v in self.flags.items() if v)}), "
                 + " ".join(f"SM{s}" for s in self.sm)]
        for o in self.operands:
            parts = [str(o.dtype).removeprefix("torch."), o.shape, *(p for p in (
                o.layout and f"layout {o.layout.name}", o.rows and f"rows {o.rows.name}", o.scale and f"scale codec {o.scale.name}") if p)]
            lines.append(f"  {o.title:<18} {o.argument:<26} {', '.join(parts)}")
        lines.append(f"  alignment          {self.alignment}")
        lines += [f"  verified           {v.how}: {v.result} ({v.versions})" for v in self.verified]
        lines += [f"  note               {n}" for n in self.notes]
        return "\n".join(lines)
