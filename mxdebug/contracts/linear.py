"""The contract of a linear kernel: one quantised weight, 16-bit activations, one global scale. The same verbs as a MoE kernel's."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import MxdebugError
from ..formats import BlockFormat, BlockTensor, ScaleCodec
from .operand import MMA, Arguments, Operand
from .verified import Verified


@dataclass(frozen=True)
class LinearSeen:
    """A call as the kernel sees it: sizes as padded for it.

    x        [M, K] as passed
    weight   [N, K] in logical order, without the global scale (which is 1 in it); scale: the codec that the kernel reads block scales with
    alpha    float32 [], multiplies the sums
    products the dtype in which activations and weights are multiplied
    may_convert   whether some tactic for one token multiplies in fp16 and another does not, so that the call alone cannot say
    """

    x: Tensor
    weight: BlockTensor
    scale: ScaleCodec
    alpha: Tensor
    products: torch.dtype
    may_convert: bool = False

    def absolute(self) -> Tensor:
        """float32 [M, N]: the sums of the products' absolute values, times |alpha|: what errors of a float32 sum are a part of."""
        x = self.x.to(self.products).float().nan_to_num(0.0, 0.0, 0.0).abs()
        return (x @ self.weight.dequantise(torch.float32, self.scale).nan_to_num_(0.0).abs_().T) * self.alpha.abs()

    @functools.cached_property
    def sums(self) -> Tensor:
        """float32 [M, N]: the sums before alpha. Weights are exact in bf16 and in fp16, since E2M1 times a 4-bit significand has 6 bits at most;
        but in fp16 one above 65504 is inf, which scales in another code than the kernel's can make (FlashInfer multiplies them by half2_mul).
        """
        x, weight = (t.to(self.products).double() for t in (self.x, self.weight.dequantise(torch.float64, self.scale)))
        return (x @ weight.T).float()

    def emulate(self) -> Tensor:
        """bf16 [M, N]: the sum in float32, times alpha in float32, stored as bf16."""
        return (self.sums * self.alpha).to(torch.bfloat16)


@dataclass(frozen=True)
class LinearContract:
    """path is the engine's own name and the architecture; function and flags select the kernel; sm lists the architectures that have it.

    weights    the block format of the weight
    operands   weight and weight_scale; inputs: x and alpha
    multiple   (N, K) are multiples of these
    products   (M, N, K) -> what activations are rounded to before they are multiplied, and whether another tactic could round otherwise
    `see` decodes a call, `emulate` gives the kernel's output on any machine, `run` calls the kernel.
    """

    path: str
    function: str
    flags: Mapping[str, Any]
    sm: tuple[int, ...]
    weights: BlockFormat
    operands: tuple[Operand, ...]
    inputs: tuple[Operand, ...]
    multiple: tuple[int, int]
    products: Callable[[int, int, int], tuple[torch.dtype, bool]]
    alignment: str
    verified: tuple[Verified, ...]
    notes: tuple[str, ...]
    _run: Callable[[LinearContract, Arguments], Tensor]
    aliases: tuple[str, ...] = ()

    def operand(self, key: str) -> Operand:
        """The operand of that key."""
        for o in (*self.operands, *self.inputs):
            if o.key == key:
                return o
        raise MxdebugError("operand", f"one of {', '.join(o.key for o in (*self.operands, *self.inputs))}", repr(key))

    def get(self, key: str, arguments: Arguments) -> Tensor | None:
        """The tensor of that key in a call; None where it was not passed."""
        return self.operand(key).get(arguments)

    def matches(self, function: str, arguments: Arguments) -> bool:
        """Whether a call falls under this contract: by function, flags, and the dtype of the weight, which tells the layouts apart."""
        b = arguments.get(self.operand("weight").argument)
        return (
            function in (self.function, *self.aliases)
            and all(arguments.get(k) == v for k, v in self.flags.items())
            and getattr(b, "dtype", None) == self.operand("weight").dtype
        )

    def check(self, arguments: Arguments) -> None:
        """Raise MxdebugError where the kernel, or FlashInfer in front of it, refuses the call. Looks at dtypes, shapes and strides only."""
        x, b, scales = (self._checked(key, arguments) for key in ("x", "weight", "weight_scale"))
        self._checked("alpha", arguments)
        n, k = self.sizes(b)
        for name, size, multiple in (("N", n, self.multiple[0]), ("K", k, self.multiple[1])):
            if size == 0 or size % multiple:
                raise MxdebugError(
                    f"{name} of the weight", f"a multiple of {multiple} ({self.alignment})", str(size), "the weight was not padded"
                )
        if x.dim() != 2 or x.shape[1] != k:
            raise MxdebugError(
                self.operand("x").where,
                f"shape [M, {k}], since the weight has K {k}",
                f"shape {list(x.shape)}",
                "activations padded by another number than the weight: padding counts payload bytes, of two elements each",
            )
        s = self.operand("weight_scale")
        want = s.layout.padded(n, k // self.weights.block)
        # Behind a strided view the kernel gets a pointer, so only the number of bytes is checked; a plain one is checked by its shape.
        if scales.numel() != want[0] * want[1] or (s.view != MMA and tuple(scales.shape) != (want[1], want[0])):
            raise MxdebugError(
                s.where,
                f"{want[0] * want[1]} bytes for N {n} and K {k}, as {s.shape}",
                f"{scales.numel()} bytes, shape {list(scales.shape)}",
                "scales of the unpadded weight, of another block size, or not prepared",
            )
        if not x.is_contiguous():
            raise MxdebugError(
                self.operand("x").where,
                "contiguous memory",
                f"shape {list(x.shape)} with strides {list(x.stride())}",
                "a slice of a wider tensor: FlashInfer refuses it ('requires contiguous a and b tensors')",
            )
        if not b.is_contiguous():
            raise MxdebugError(
                self.operand("weight").where, "contiguous memory", f"strides {list(b.stride())}", "a transposed or sliced view"
            )

    def see(self, arguments: Arguments) -> LinearSeen:
        """The call as the kernel sees it. Raises MxdebugError as `check`."""
        self.check(arguments)
        x, b, scales, alpha = (self.get(key, arguments) for key in ("x", "weight", "weight_scale", "alpha"))
        n, k = self.sizes(b)
        o, s = self.operand("weight"), self.operand("weight_scale")
        payload = o.layout.unpack(o.payload(b).flatten(), n, k // 2).reshape(n, k // 2)
        blocks = s.layout.unpack(in_memory(scales) if s.view == MMA else s.payload(scales).flatten(), n, k // self.weights.block).reshape(
            n, -1
        )
        one = torch.ones((), device=x.device)
        return LinearSeen(
            x,
            BlockTensor(payload, blocks, self.weights, one),
            s.scale,
            one if alpha is None else alpha.float().reshape(()),
            *self.products(x.shape[0], n, k),
        )

    def sizes(self, weight: Tensor) -> tuple[int, int]:
        """(N, K) of the kernel's weight, as padded. Raises where it has another number of axes."""
        if weight.dim() != 2:
            raise MxdebugError(
                self.operand("weight").where,
                self.operand("weight").shape,
                f"shape {list(weight.shape)}",
                "a weight of several experts, or not prepared",
            )
        return (weight.shape[1] // 2, weight.shape[0] * 16) if weight.dtype == torch.int32 else (weight.shape[0], weight.shape[1] * 2)

    def _checked(self, key: str, arguments: Arguments) -> Tensor | None:
        o = self.operand(key)
        t = o.get(arguments)
        if t is None and o.optional:
            return None
        if t is None or not o.takes(t.dtype):
            reason = {
                "x": "a model loaded in FP16: the kernel takes BF16 only, and vLLM looks at the dtype at the first forward, not when it selects the kernel",
                "weight_scale": "scales cast by value, or left as the other architecture's",
                "alpha": "a global scale of another dtype",
            }.get(key, "")
            raise MxdebugError(o.where, f"{o.dtype} {o.shape}", "none" if t is None else str(t.dtype), reason)
        if key == "alpha" and t.numel() != 1:
            raise MxdebugError(o.where, "one number", f"shape {list(t.shape)}", "a global scale for each joined part; the kernel takes one")
        return t

    def emulate(self, arguments: Arguments) -> Tensor:
        """The output bf16 [M, N] that the kernel writes for these arguments, right or wrong ones."""
        return self.see(arguments).emulate()

    def arguments(self, operands: Mapping[str, Tensor | None], x: Tensor) -> dict[str, Any]:
        """A call's arguments, from operands by key (as the kernel takes them) and activations [M, K]."""
        out: dict[str, Any] = dict(self.flags)
        for key, t in {**operands, "x": x}.items():
            self.operand(key).put(out, t)
        return out

    def run(self, arguments: Arguments) -> Tensor:
        """The real kernel's output. Raises MxdebugError where this machine cannot run it, saying what it has and what is needed."""
        return self._run(self, arguments)

    def __str__(self) -> str:
        lines = [
            f"{self.path}: {self.function}({', '.join(f'{k}={v!r}' for k, v in self.flags.items())}), "
            + " ".join(f"SM{s}" for s in self.sm)
        ]
        for o in (*self.operands, *self.inputs):
            parts = [
                str(o.dtype).removeprefix("torch."),
                o.shape,
                *(
                    p
                    for p in (
                        o.layout and f"layout {o.layout.name}",
                        o.scale and f"scale codec {o.scale.name}",
                        o.view != "plain" and o.view,
                    )
                    if p
                ),
            ]
            lines.append(f"  {o.title:<18} {o.argument:<12} {', '.join(parts)}  ({o.key})")
        lines.append(f"  alignment          {self.alignment}")
        lines += [f"  verified           {v.how}: {v.result} ({v.versions})" for v in self.verified]
        lines += [f"  note               {n}" for n in self.notes]
        return "\n".join(lines)


def in_memory(t: Tensor) -> Tensor:
    """uint8 [bytes]: a dense tensor's bytes in the order in which they lie in memory, whatever its strides say. Of any dtype.

    Kernels that get a pointer read memory; a 6-D view that was made contiguous holds the same values under the same indices, and other memory.
    """
    order = sorted(range(t.dim()), key=lambda axis: -t.stride(axis) if t.shape[axis] > 1 else 0)
    flat = t.permute([a for a in order if t.shape[a] > 1] + [a for a in order if t.shape[a] == 1])
    return flat.contiguous().view(torch.uint8).flatten()
