"""A recipe applied to one layer: the stages of each operand, and the arguments of the call that follows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..contracts import Contract, contract
from ..errors import MxdebugError
from ..formats import BlockTensor
from ..layouts import Layout
from ..reference import Activation, MoELayer, Parallel
from ..requantise import QUANTISERS
from .form import Form
from .stages import ToDtype


_MADE_OF: dict[str, Callable[[MoELayer], tuple[Tensor | None, Tensor | None]]] = {
    "w13": lambda layer: (layer.gate and layer.gate.payload, layer.up.payload), "w13_scale": lambda layer: (layer.gate and layer.gate.scales, layer.up.scales),
    "w13_bias": lambda layer: (layer.gate_bias, layer.up_bias),
    "w2": lambda layer: (None, layer.down.payload), "w2_scale": lambda layer: (None, layer.down.scales), "w2_bias": lambda layer: (None, layer.down_bias),
}
"""What each operand is made of: (the rows of gate, if there are any; the other rows)."""


def logical_operand(layer: MoELayer, key: str, experts: slice | list[int] = slice(None)) -> Tensor | None:
    """An operand of some experts before any stage: w13 rows are gate, then up. A copy where there are both, else a view if experts is a slice."""
    gate, up = _MADE_OF[key](layer)
    if gate is None or up is None:
        return None if up is None else up[experts]
    return torch.cat([gate[experts], up[experts]], dim=1)


def logical_shape(layer: MoELayer, key: str) -> tuple[int, ...] | None:
    """(rows, columns), or (rows,) of a bias: one expert's; None where the layer has no such operand."""
    gate, up = _MADE_OF[key](layer)
    return None if up is None else (up.shape[1] + (0 if gate is None else gate.shape[1]), *up.shape[2:])


def logical_rows(layer: MoELayer, key: str, rows: Tensor) -> Tensor:
    """Some rows, int64 in rising order, of every expert."""
    gate, up = _MADE_OF[key](layer)
    first = 0 if gate is None else gate.shape[1]
    own = up[:, rows[rows >= first] - first]
    return own if gate is None else torch.cat([gate[:, rows[rows < first]], own], dim=1)


def logical_operands(layer: MoELayer) -> dict[str, Tensor | None]:
    """All operands of a layer before any stage."""
    return {key: logical_operand(layer, key) for key in _MADE_OF}


@dataclass(frozen=True)
class Plan:
    """What an engine does with one layer: a `Form` for each operand; `padded` is (intermediate, hidden) as the kernel gets them.

    x_layout  how the block scales of the activations are laid; None for bf16
    scalars   layer -> the global scales that are passed, by key; and x_gscale, what x is multiplied with before it is quantised

    A fault of the recipe is another plan: `edit` makes it.
    """

    path: str
    forms: Mapping[str, Form]
    padded: tuple[int, int]
    x_layout: Layout | None = None
    scalars: Callable[[MoELayer], dict[str, Tensor]] = lambda layer: {}

    @property
    def contract(self) -> Contract:
        return contract(self.path)

    def edit(self, key: str, **slots: Any) -> Plan:
        """The plan with some slots of one operand's form changed."""
        if key not in self.forms:
            raise MxdebugError("operand", f"one of {', '.join(self.forms)}", repr(key))
        return replace(self, forms={**self.forms, key: replace(self.forms[key], **slots)})

    def convert(self, layer: MoELayer) -> dict[str, Tensor | None]:
        """Run all stages: the operands as the kernel gets them, bytes as uint8, and the global scales."""
        made = {key: None if t is None else self.forms[key].apply(t) for key, t in logical_operands(layer).items() if key in self.forms}
        return {**made, **self.scalars(layer)}

    def __str__(self) -> str:
        return "\n".join(f"{key:<10} " + " | ".join(s.name for s in form.stages) for key, form in self.forms.items())

    def invert(self, operands: Mapping[str, Tensor | None], layer: MoELayer) -> MoELayer:
        """The logical layer that these operands come from; `layer` gives format, global scales and activation.

        Inverse of `convert` up to lossy stages, whose canonical result stays.
        """
        logical = {key: None if t is None else self.forms[key].undo(t) for key, t in operands.items() if key in self.forms}
        half = layer.intermediate if layer.gate is not None else 0

        def pick(key: str, rows: slice) -> Tensor | None:
            return None if logical.get(key) is None else logical[key][:, rows]

        gate, up = slice(0, half), slice(half, half + layer.intermediate)
        return replace(
            layer, gate=BlockTensor(pick("w13", gate), pick("w13_scale", gate), layer.up.format, layer.gate.global_scale) if half else None,
            up=BlockTensor(pick("w13", up), pick("w13_scale", up), layer.up.format, layer.up.global_scale),
            down=BlockTensor(logical["w2"], logical["w2_scale"], layer.down.format, layer.down.global_scale),
            gate_bias=pick("w13_bias", gate) if half else None, up_bias=pick("w13_bias", up), down_bias=logical.get("w2_bias"))

    def costs(self, layer: MoELayer) -> dict[str, float]:
        """What the lossy stages lose: relative L2 by operand, 0.0 where the rounding changes nothing."""
        out = {}
        for key, t in logical_operands(layer).items():
            for stage in self.forms[key].stages if t is not None and key in self.forms else ():
                if isinstance(stage, ToDtype):
                    out[key] = stage.cost(t)
                t = stage.apply(t)
        return out

    def arguments(self, layer: MoELayer, x: Tensor, experts: Tensor, router: Tensor, parallel: Parallel = Parallel()) -> dict[str, Any]:
        """The whole call: FlashInfer's arguments for activations x [T, H], converted operands and the activation's parameters.

        `layer` is the part of the layer that this rank holds. x is padded with zeros to the kernel's hidden size and quantised as the
        contract asks.
        """
        operands = self.convert(layer)
        return self.call(operands, layer.activation, self.quantise(x, operands), experts, router, parallel)

    def quantise(self, x: Tensor, operands: Mapping[str, Tensor | None]) -> Tensor | BlockTensor:
        """Activations x [T, H] as the engine hands them to the kernel: padded, bf16 or quantised by the kernels' own arithmetic."""
        x = torch.nn.functional.pad(x.to(torch.bfloat16), (0, self.padded[1] - x.shape[1]))
        fmt = self.contract.activations
        return x if fmt is None else QUANTISERS[fmt.name](x, operands["x_gscale"] if fmt.outer else None)

    def call(self, operands: Mapping[str, Tensor | None], activation: Activation, x: Tensor | BlockTensor, experts: Tensor, router: Tensor,
             parallel: Parallel = Parallel()) -> dict[str, Any]:
        """As `arguments`, with operands that were converted, and activations that were quantised before."""
        return self.contract.arguments(operands, self.passed(operands, activation), x, self.x_layout, experts, router, parallel)

    def passed(self, operands: Mapping[str, Tensor | None], activation: Activation) -> Activation:
        """alpha, beta and limit as they are passed: TRT-LLM's NVFP4 kernel takes limit and beta for sums that are not scaled yet."""
        if not self.contract.clamps_before_scaling or activation.kind != "swiglu":
            return activation
        alpha = operands["w13_alpha"]
        return replace(activation, **{n: None if getattr(activation, n) is None else getattr(activation, n) / alpha for n in ("beta", "limit")})
