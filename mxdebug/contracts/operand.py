"""One tensor as a kernel gets it: where it stands among the arguments, and how its bytes are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import MxdebugError, brief
from ..formats import ScaleCodec
from ..layouts import Layout, RowOrder, RowShuffle

Arguments = Mapping[str, Any]
MMA = "6-D view [32, 4, rows/128, 4, columns/4, E]"  # FlashInfer convert_sf_to_mma_layout


@dataclass(frozen=True)
class Operand:
    """One tensor as the kernel gets it.

    key       short name, vLLM's: w13, w13_scale, w13_bias, w2, w2_scale, w2_bias; see the contracts for others
    argument  the kernel function's parameter, `quant_scales[0]` for the first of a list
    title     how prints call it
    shape     in words; E experts, I intermediate, H hidden size, both as padded for the kernel, T tokens
    layout, rows, scale   how the bytes are read; None where the question does not arise
    shuffle   a permutation of rows within blocks, on top of `rows`; None: none
    view      "plain", or MMA: a strided view of the same bytes
    also      other dtypes under which the kernel takes the same bytes, because it does not look
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
    shuffle: RowShuffle | None = None
    view: str = "plain"
    also: tuple[torch.dtype, ...] = ()

    @property
    def where(self) -> str:
        """Title and argument, as errors name the operand."""
        return f"{self.title} ({self.argument})"

    def takes(self, dtype: torch.dtype) -> bool:
        """Whether the kernel takes a tensor of this dtype."""
        return dtype == self.dtype or dtype in self.also

    def get(self, arguments: Arguments) -> Tensor | None:
        """This operand's tensor in a call's arguments; None where it was not passed."""
        name, _, index = self.argument.partition("[")
        value = arguments.get(name)
        if index:
            position = int(index.rstrip("]"))
            value = value[position] if isinstance(value, (list, tuple)) and len(value) > position else None
        if value is not None and not isinstance(value, Tensor):
            raise MxdebugError(self.where, "a tensor", type(value).__name__)
        return value

    def put(self, arguments: dict[str, Any], t: Tensor | None) -> None:
        """Set this operand in a call's arguments."""
        name, _, index = self.argument.partition("[")
        if not index:
            arguments[name] = t
            return
        position, items = int(index.rstrip("]")), list(arguments.get(name) or ())
        items += [None] * (position + 1 - len(items))
        items[position] = t
        arguments[name] = tuple(items) if isinstance(arguments.get(name), tuple) else items

    def payload(self, t: Tensor) -> Tensor:
        """The kernel's tensor -> uint8 bytes in the order of memory, shape [E, ...] where it starts with the experts."""
        if self.view == MMA:
            if t.dim() != 6:
                raise MxdebugError(self.where, MMA, f"shape {list(t.shape)}", "scales that convert_sf_to_mma_layout did not see")
            t = t.permute(5, 2, 4, 0, 1, 3)
        return t.contiguous().view(torch.uint8) if t.dtype != torch.uint8 else t.contiguous()

    def as_passed(self, t: Tensor) -> Tensor:
        """uint8 bytes of any shape [E, ...] -> the view that the kernel takes; other dtypes pass unchanged."""
        if t.dtype == torch.uint8 and self.dtype != torch.uint8:
            t = t.contiguous().view(self.dtype)
        if self.view == MMA:
            experts, rows, columns = t.shape
            t = t.reshape(experts, rows // 128, columns // 4, 32, 4, 4).permute(3, 4, 1, 5, 2, 0)
        return t

    def broken_view(self, t: Tensor) -> str | None:
        """What is wrong with the strides of the kernel's tensor, or None: kernels get a pointer and assume the strides."""
        bare = t.permute(5, 2, 4, 0, 1, 3) if self.view == MMA and t.dim() == 6 else t
        return None if bare.is_contiguous() else f"shape {list(t.shape)} with strides {list(t.stride())}"


def number(arguments: Arguments, name: str, default: int) -> int:
    """An argument that is a whole number; the default where it was not passed, or is None. MxdebugError for anything else: a dump can say anything."""
    value = arguments.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int):
        raise MxdebugError(name, "a whole number", brief(value), "not a call of this function, or a damaged dump")
    return value


def shown(value: object) -> str:
    """A value as an error shows it."""
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
