"""A recipe applied to one layer: the stages of each operand, and the arguments of the call that follows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..contracts import Contract, contract
from ..errors import MxdebugError
from ..formats import BlockTensor
from ..reference import MoELayer, Parallel
from .form import Form
from .stages import ToDtype


def logical_operands(layer: MoELayer) -> dict[str, Tensor | None]:
    """The operands of a layer before any stage: w13 rows are gate, then up."""

    def both(gate: Tensor | None, up: Tensor | None) -> Tensor | None:
        return up if gate is None or up is None else torch.cat([gate, up], dim=1)

    g = layer.gate
    return {
        "w13": both(g and g.payload, layer.up.payload), "w13_scale": both(g and g.scales, layer.up.scales),
        "w13_bias": both(layer.gate_bias, layer.up_bias),
        "w2": layer.down.payload, "w2_scale": layer.down.scales, "w2_bias": layer.down_bias,
    }


@dataclass(frozen=True)
class Plan:
    """What an engine does with one layer: a `Form` for each operand; `padded` is (intermediate, hidden) as the kernel gets them.

    A fault of the recipe is another plan: `edit` makes it.
    """

    path: str
    forms: Mapping[str, Form]
    padded: tuple[int, int]

    @property
    def contract(self) -> Contract:
        return contract(self.path)

    def edit(self, key: str, **slots: Any) -> Plan:
        """The plan with some slots of one operand's form changed."""
        if key not in self.forms:
            raise MxdebugError("operand", f"one of {', '.join(self.forms)}", repr(key))
        return replace(self, forms={**self.forms, key: replace(self.forms[key], **slots)})

    def convert(self, layer: MoELayer) -> dict[str, Tensor | None]:
        """Run all stages: the operands as the kernel gets them."""
        return {key: None if t is None else self.forms[key].apply(t) for key, t in logical_operands(layer).items()}

    def __str__(self) -> str:
        return "\n".join(f"{key:<10} " + " | ".join(s.name for s in form.stages) for key, form in self.forms.items())

    def invert(self, operands: Mapping[str, Tensor | None], layer: MoELayer) -> MoELayer:
        """The logical layer that these operands come from; `layer` gives format and activation.

        Inverse of `convert` up to lossy stages, whose canonical result stays.
        """
        logical = {key: None if t is None else self.forms[key].undo(t) for key, t in operands.items()}
        half = layer.intermediate if layer.gate is not None else 0

        def pick(key: str, rows: slice) -> Tensor | None:
            return None if logical[key] is None else logical[key][:, rows]

        gate, up = slice(0, half), slice(half, half + layer.intermediate)
        return replace(
            layer, gate=BlockTensor(pick("w13", gate), pick("w13_scale", gate), layer.up.format) if half else None,
            up=BlockTensor(pick("w13", up), pick("w13_scale", up), layer.up.format),
            down=BlockTensor(logical["w2"], logical["w2_scale"], layer.down.format),
            gate_bias=pick("w13_bias", gate) if half else None, up_bias=pick("w13_bias", up), down_bias=logical["w2_bias"])

    def costs(self, layer: MoELayer) -> dict[str, float]:
        """What the lossy stages lose: relative L2 by operand, 0.0 where the rounding changes nothing."""
        out = {}
        for key, t in logical_operands(layer).items():
            for stage in self.forms[key].stages if t is not None else ():
                if isinstance(stage, ToDtype):
                    out[key] = stage.cost(t)
                t = stage.apply(t)
        return out

    def arguments(self, layer: MoELayer, x: Tensor, experts: Tensor, router: Tensor, parallel: Parallel = Parallel()) -> dict[str, Any]:
        """The whole call: FlashInfer's arguments for activations x [T, H], already converted operands and the activation's parameters.

        `layer` is the part of the layer that this rank holds. x is padded with zeros to the kernel's hidden size.
        """
        return self.call(self.convert(layer), layer, x, experts, router, parallel)

    def call(self, operands: Mapping[str, Tensor | None], layer: MoELayer, x: Tensor, experts: Tensor, router: Tensor,
             parallel: Parallel = Parallel()) -> dict[str, Any]:
        """As `arguments`, with operands that were converted before."""
        a, (_, hidden) = layer.activation, self.padded
        names = {"silu": "Swiglu", "swiglu": "Swiglu", "gelu": "Geglu", "relu2": "Relu2"}
        if a.kind not in names:
            raise MxdebugError("activation", f"one of {', '.join(names)}", a.kind, "FlashInfer CUTLASS computes GELU with erf, not tanh")
        return {
            **self.contract.flags,
            "input": torch.nn.functional.pad(x.to(torch.bfloat16), (0, hidden - x.shape[1])),
            "token_selected_experts": experts.to(torch.int32), "token_final_scales": router.float(),
            "fc1_expert_weights": operands["w13"], "fc2_expert_weights": operands["w2"],
            "quant_scales": [operands["w13_scale"], operands["w2_scale"]],
            "fc1_expert_biases": operands["w13_bias"], "fc2_expert_biases": operands["w2_bias"],
            "swiglu_alpha": a.alpha, "swiglu_beta": a.beta, "swiglu_limit": a.limit, "activation_type": names[a.kind],
            "output_dtype": torch.bfloat16,
            "tp_size": parallel.tp_size, "tp_rank": parallel.tp_rank, "ep_size": parallel.ep_size, "ep_rank": parallel.ep_rank,
        }
