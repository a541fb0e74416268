"""A linear layer in the kernel's form, as a module: convert once, run, save, load."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...contracts.cutedsl_w4a16 import by_layout
from ...errors import MxdebugError
from ...layouts.catalogue import cutedsl_sm100_view
from ...reference_linear import LinearLayer
from .op import mm_bf16_fp4
from .padding import MULTIPLE, Elements, PackedBytes, elements_of, padding_bytes, round_up
from .recipe import linear_recipe

MARK = "mxdebug_converted"  # a tensor of this name in a state dict says that its weights are a kernel's, not a checkpoint's
_FAMILIES = {"sm100": 100, "sm12x": 120}


class ConvertedLinear(torch.nn.Module):
    """weight, weight_scale, weight_global_scale under vLLM's names, as FlashInfer prepared them; bias [N] or None.

    n, k                   the layer's own sizes
    weights_padding_bytes  what K was padded by, in payload bytes (vLLM: weights_padding_cols)
    activations_padding    what activations are padded by along K, in elements
    family                 "sm100" or "sm12x"
    `forward` is vLLM's apply_weights; the state dict carries a mark, so that it is recognised as converted and never loaded as a checkpoint.
    """

    def __init__(self, operands: Mapping[str, Tensor], n: int, k: int, family: str, bias: Tensor | None = None) -> None:
        super().__init__()
        self.n, self.k, self.family = n, k, family
        self.weights_padding_bytes: PackedBytes = padding_bytes(k)
        self.activations_padding: Elements = elements_of(self.weights_padding_bytes)  # once, here: torch.compile does not trace the types
        for name, key in (("weight", "weight"), ("weight_scale", "weight_scale"), ("weight_global_scale", "alpha")):
            self.register_buffer(name, operands[key])
        self.register_buffer("bias", bias)
        self.register_buffer(MARK, torch.tensor([1, _FAMILIES[family], n, k]))

    @staticmethod
    def convert(layer: LinearLayer, family: str, checkpoint: str) -> ConvertedLinear:
        """Bring a checkpoint's layer into the form of "sm100" or "sm12x", by vLLM's recipe for that checkpoint kind."""
        plan = linear_recipe(by_layout(family).path, checkpoint).plan(layer)
        return ConvertedLinear(plan.convert(layer), layer.n, layer.k, family, layer.bias)

    @staticmethod
    def from_state_dict(state: Mapping[str, Tensor]) -> ConvertedLinear:
        """The module of a saved state dict, whatever strides the file kept. Raises MxdebugError for a state dict of another kind."""
        mark = state.get(MARK)
        families = {v: k for k, v in _FAMILIES.items()}
        values = mark.tolist() if isinstance(mark, Tensor) and mark.dtype == torch.int64 and mark.shape == (4,) else None
        if (
            values is None
            or values[0] != 1
            or values[1] not in families
            or not {"weight", "weight_scale", "weight_global_scale"} <= state.keys()
        ):
            raise MxdebugError(
                "state dict",
                f"a converted layer: weight, weight_scale, weight_global_scale and {MARK}",
                ", ".join(sorted(state)[:8]) or "nothing",
                "a checkpoint's tensors: open_checkpoint reads those",
            )
        scales, family = state["weight_scale"], families[values[1]]
        if family == "sm100":  # a file has values under their indices, and no strides
            if scales.dim() != 6:
                raise MxdebugError(
                    "weight_scale of a converted layer",
                    "the 6-D view [32, 4, N/128, 4, K/64, 1]",
                    f"shape {list(scales.shape)}",
                    "flattened on the way",
                )
            scales = cutedsl_sm100_view(scales.permute(5, 2, 4, 0, 1, 3).contiguous())
        operands = {"weight": state["weight"], "weight_scale": scales, "alpha": state["weight_global_scale"]}
        out = ConvertedLinear(operands, values[2], values[3], family, state.get("bias"))
        contract = by_layout(family)
        contract.check(
            contract.arguments(operands, torch.zeros(1, values[3] + out.activations_padding, dtype=torch.bfloat16, device=scales.device))
        )
        if (sizes := contract.sizes(state["weight"])) != (round_up(values[2]), round_up(values[3])):
            raise MxdebugError(
                "weight of a converted layer",
                f"N, K {values[2:]} padded to {MULTIPLE}, as {MARK} says",
                str(list(sizes)),
                "tensors of two layers",
            )
        return out

    def forward(self, x: Tensor) -> Tensor:
        """x bf16 [..., K] -> bf16 [..., N]. Raises MxdebugError for another dtype before anything is computed: the kernel takes BF16 only."""
        if x.dtype != torch.bfloat16:
            raise MxdebugError(
                "activations",
                "torch.bfloat16",
                str(x.dtype),
                "a model loaded in FP16: vLLM selects this kernel without looking at the dtype, "
                "and raises here ('FlashInfer CuTe-DSL W4A16 requires BF16 input'); serve it with --dtype bfloat16, or with Marlin",
            )
        if x.shape[-1] != self.k:
            raise MxdebugError("activations", f"last dimension {self.k}", f"shape {list(x.shape)}", "padded already, or another layer's")
        flat = torch.nn.functional.pad(x.reshape(-1, self.k), (0, self.activations_padding)).contiguous()
        out = mm_bf16_fp4(flat, self.weight, self.weight_scale, self.weight_global_scale)
        out = out[:, : self.n]
        if self.bias is not None:
            out = out + self.bias
        return out.reshape(*x.shape[:-1], self.n)

    def extra_repr(self) -> str:
        return f"n={self.n}, k={self.k}, {self.family}, padded to {MULTIPLE}, K by {self.weights_padding_bytes} bytes"
