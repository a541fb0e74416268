"""Faults of the activations' block scales: their order, their exponent, zeros."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace

import torch
from torch import Tensor

from ..formats import BlockTensor
from ..layouts import LINEAR, Layout, SWIZZLE_128x4
from ..recipes import E4M3_SHIFTED, Plan
from .fault import Fault, Situation, needs


def _x_layout(s: Situation, wanted: Layout) -> Situation:
    layout = s.recipe.contract.x_layout({})
    needs(layout not in (None, wanted), "x-scales", f"a kernel that reads activation scales otherwise than {wanted.name}")
    return replace(s, plan=replace(s.plan, x_layout=wanted))


class _EachRank(Layout):
    """Swizzled by two ranks that hold half of the rows each, padded, and joined."""

    def pack(self, logical: Tensor) -> Tensor:
        half = logical.shape[0] // 2
        return torch.cat([SWIZZLE_128x4.pack(part).flatten() for part in (logical[:half], logical[half:])])

    def padded(self, rows: int, cols: int) -> tuple[int, int]:
        return sum(SWIZZLE_128x4.padded(n, cols)[0] for n in (rows // 2, rows - rows // 2)), SWIZZLE_128x4.padded(rows, cols)[1]


_X = "with expert parallelism send linear scales and swizzle after the exchange; say swizzled or not at every call, without a default"


def _zero_scale(s: Situation) -> Situation:
    """The third block of the first token is quantised with the scale 0."""
    needs(s.recipe.contract.activations is not None, "x-scales-zero", "activations that are quantised")
    return replace(s, plan=replace(s.plan, x_layout=_Zeroed(s.plan.x_layout)))


class _Zeroed(Layout):
    """A layout that loses one byte."""

    def __init__(self, of: Layout) -> None:
        super().__init__(of.name, of.pattern, of.sizes, of.pads, of.source)

    def pack(self, logical: Tensor) -> Tensor:
        logical = logical.clone()
        logical[0, 2] = 0
        return super().pack(logical)


X_FAULTS = (
    Fault(
        "x-scales-zero",
        "activation scales are 0 under activations that are not",
        ("call",),
        lambda s, keys: _zero_scale(s),
        "fewer scales that are not 0 than blocks that are not",
        "any call with quantised activations",
        "look at what quantised the activations: memory that was not written, a global scale that is too small, or a kernel of another architecture",
        ("flashinfer#2952",),
    ),
    Fault(
        "x-scales-linear",
        "activation scales are linear; the kernel reads them swizzled 128x4",
        ("call",),
        lambda s, keys: _x_layout(s, LINEAR),
        "the buffer's size where rows are no multiple of 128; else the senders' activations",
        "scales that differ by row and column",
        _X,
        ("vllm#42093", "vllm#42118"),
    ),
    Fault(
        "x-scales-swizzled",
        "activation scales are swizzled 128x4; the kernel reads them linear",
        ("call",),
        lambda s, keys: _x_layout(s, SWIZZLE_128x4),
        "the buffer's size where rows are no multiple of 128; else the senders' activations",
        "scales that differ by row and column",
        _X,
        ("vllm#42089",),
    ),
    Fault(
        "x-scales-before-exchange",
        "activation scales were swizzled on each rank, before the exchange of tokens",
        ("call",),
        lambda s, keys: _x_layout(
            s, _EachRank("128x4 of each rank", SWIZZLE_128x4.pattern, SWIZZLE_128x4.sizes, pads=True, source="vLLM naive_dp_ep.py")
        ),
        "the buffer's size, zeros where padding came to lie, or the senders' activations",
        "ranks whose rows are no multiple of 128",
        _X,
        ("vllm#42118",),
    ),
    Fault(
        "x-scales-exponent",
        "activation scales are powers of two larger than the block's largest element asks for",
        ("call",),
        lambda s, keys: _coarse(s),
        "hardly any block's largest code is above half of the format's largest",
        "any call with quantised activations",
        "subtract the element's largest exponent (8 for E4M3, 2 for E2M1) from the shared one, and round it up: RCEIL",
        ("vllm#53110", "vllm#43557", "aiter#3212", "mlx#4353"),
    ),
)


class _Coarse(Plan):
    """A plan whose activations are quantised with scales that are 2^5 too large (NVFP4: 2^2, since E2M1 has no more room)."""

    def quantise(self, x: Tensor, operands: Mapping[str, Tensor | None]) -> Tensor | BlockTensor:
        q = super().quantise(x, operands)
        d = 2 if q.format.packed else 5
        values = q.elements() * 2.0**-d
        if q.format.packed:
            codes = q.format.element.encode(values).unflatten(-1, (-1, 2))
            return replace(q, payload=codes[..., 0] | codes[..., 1] << 4, scales=E4M3_SHIFTED[d].apply(q.scales))
        return replace(q, payload=q.format.element.encode(values), scales=(q.scales + d).clamp(max=254))


def _coarse(s: Situation) -> Situation:
    needs(s.recipe.contract.activations is not None, "x-scales-exponent", "activations that are quantised")
    return replace(s, plan=_Coarse(**{f.name: getattr(s.plan, f.name) for f in fields(s.plan)}))
