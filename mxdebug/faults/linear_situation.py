"""Everything that leads to one call of a linear kernel, and to what the layer hands on: the linear counterpart of `Situation`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..calls import Call
from ..checkpoints import CheckpointLinear
from ..errors import MxdebugError
from ..recipes.w4a16.plan import LinearPlan
from ..recipes.w4a16.recipe import LinearRecipe
from ..reference_linear import LinearLayer


@dataclass(frozen=True)
class LinearRun:
    """One run of an engine's layer: what it was given and what it handed on.

    operands  weight, weight_scale, alpha, as the kernel takes them
    x         [..., K] as the layer got it; output [..., N], or None where it raised; error: what it raised
    """

    operands: Mapping[str, Tensor]
    x: Tensor
    output: Tensor | None
    error: str = ""

    def __repr__(self) -> str:
        """Dtypes, shapes and strides: where tensors of equal values differ."""

        def said(t: Tensor | None) -> str:
            return "none" if t is None else f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}, strides {list(t.stride())}"

        lines = [f"  {key:<13} {said(t)}" for key, t in {**self.operands, "x": self.x, "output": self.output}.items()]
        return "\n".join(["LinearRun", *lines, *([f"  error         {self.error}"] if self.error else [])])


@dataclass(frozen=True)
class LinearSituation:
    """What is in the checkpoint, what the recipe makes of it, what is passed, what the layer does with the kernel's output.

    `build` gives the kernel's arguments and output, `call` both as a recorded call, `checkpoint` what it is diagnosed against, `run` the layer's;
    a fault's record gives another LinearSituation.
    kernel  what the kernel hands back instead of its output: "", or "memory" for memory that it never wrote
    """

    recipe: LinearRecipe
    layer: LinearLayer
    x: Tensor
    plan: LinearPlan
    kernel: str = ""

    @staticmethod
    def right(recipe: LinearRecipe, layer: LinearLayer, x: Tensor) -> LinearSituation:
        """The situation without a fault. x [..., K]."""
        return LinearSituation(recipe, layer, x, recipe.plan(layer))

    def edit(self, **slots: Any) -> LinearSituation:
        """The situation with some slots of the plan filled otherwise."""
        return replace(self, plan=self.plan.edit(**slots))

    def arguments(self) -> dict[str, Any]:
        """The kernel's arguments."""
        return self.plan.arguments(self.plan.convert(self.layer), self.x)

    def build(self) -> tuple[dict[str, Any], Tensor | None]:
        """(arguments, the kernel's output [M, N padded]); the output is None where the call is refused, which leaves a crash dump."""
        arguments = self.arguments()
        try:
            out = self.recipe.contract.emulate(arguments)
        except MxdebugError:
            return arguments, None
        return arguments, torch.zeros_like(out) if self.kernel else out

    def call(self) -> Call:
        """The kernel's call as it would be recorded; without an output where it is refused."""
        return Call.made(self.recipe.contract.function, *self.build())

    def checkpoint(self) -> CheckpointLinear:
        """The layer as a checkpoint holds it."""
        return CheckpointLinear("model.layers.0.self_attn.qkv_proj", self.recipe.checkpoint, self.layer, {}, self.layer.format.block)

    def run(self) -> LinearRun:
        """What the layer hands on."""
        arguments, out = self.build()
        x = self.x.to(self.plan.x_dtype)
        operands = {o.key: o.get(arguments) for o in (*self.recipe.contract.operands, self.recipe.contract.operand("alpha"))}
        if out is None:
            return LinearRun(operands, x, None, refusal(self.recipe, arguments))
        try:
            return LinearRun(operands, x, self.plan.finish(out, tuple(self.x.shape[:-1]), self.layer.bias))
        except RuntimeError as error:
            return LinearRun(operands, x, None, str(error))


def refusal(recipe: LinearRecipe, arguments: Mapping[str, Any]) -> str:
    """What vLLM 0.33 or FlashInfer 0.7.4 says where it refuses a call; "" for a call that it takes."""
    a, b = (arguments[o.argument] for o in (recipe.contract.operand("x"), recipe.contract.operand("weight")))
    if a.dtype != torch.bfloat16:  # FlashInferCuteDslNvFp4W4A16LinearKernel.apply_weights
        return f"FlashInfer CuTe-DSL W4A16 requires BF16 input, got {a.dtype}"
    k = recipe.contract.sizes(b)[1]
    if a.shape[1] != k:  # _compute_cute_dsl_sm100, _compute_cute_dsl
        return (
            f"a.shape[1]={a.shape[1]} but k inferred from prepared b.shape={tuple(b.shape)} is {k}"
            if b.dtype == torch.int32
            else f"a.shape[1]={a.shape[1]} but b.shape={tuple(b.shape)} encodes K={k}"
        )
    try:
        recipe.contract.check(arguments)
    except MxdebugError as error:
        return str(error)
    return ""
