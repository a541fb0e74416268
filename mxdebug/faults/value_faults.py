"""Faults of what the bytes of an operand say: cast, scaled, flushed, folded, regrouped, never loaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..contracts import Contract
from ..formats import E4M3_SCALE, BlockTensor
from ..layouts import Layout
from ..recipes import (
    CAST_BY_VALUE,
    CAST_E4M3_BY_VALUE,
    CAST_TO_E4M3,
    E4M3_AS_E8M0,
    E4M3_FLUSHED,
    E4M3_ROUNDED_UP,
    E4M3_SHIFTED,
    E8M0_AS_E4M3,
    E8M0_FLUSHED,
    E8M0_SHIFTED,
    SWAP_NIBBLES,
    SplitHalves,
    Values,
)
from ..reference import MoELayer
from .fault import OPERANDS, Fault, Situation, Slots, needs
from .slots import PAYLOADS, SCALES, slot_fault


def _values(mx: Values | None, nv: Values | None) -> Slots:
    """One change for E8M0 scales, another for NVFP4's E4M3."""
    return lambda key, form, c: None if (v := nv if c.weights.outer else mx) is None else {"values": v}


VALUE_FAULTS = (
    slot_fault(
        "padding-not-zero",
        "the padding holds other bytes than zeros",
        OPERANDS,
        "zero the padded buffer before loading (torch.zeros, not torch.empty)",
        ("sglang#9346", "Primus-Turbo#383", "Lvllm#110"),
        "padding of w13 and of w2 that meet, both with scales that are not zero",
        lambda key, form, c: {"fill": 0x77},
    ),
    slot_fault(
        "nibbles-swapped",
        "the two codes of each byte are swapped: element 2i must be in the low nibble",
        PAYLOADS,
        "swap back: (b & 15) << 4 | b >> 4; or correct the packer",
        ("torchao#3123", "triton#5197", "imp#567"),
        "any weights",
        lambda key, form, c: {"values": SWAP_NIBBLES},
    ),
    slot_fault(
        "scales-cast-by-value",
        "block scales cast by value: the number that a scale means became its byte",
        SCALES,
        "reinterpret: scale.view(torch.uint8), never .to(torch.uint8)",
        ("vllm#51419",),
        "scales below 1 (they become 0)",
        lambda key, form, c: {"values": CAST_E4M3_BY_VALUE if c.weights.outer else CAST_BY_VALUE},
    ),
    slot_fault(
        "scales-cast-to-e4m3",
        "block scales cast by value to float8_e4m3fn: the byte became a number",
        SCALES,
        "reinterpret: scale.view(torch.float8_e4m3fn), never .to(torch.float8_e4m3fn)",
        ("vllm#51419",),
        "any scales that differ",
        lambda key, form, c: {"values": CAST_TO_E4M3} if c.operand(key).dtype == torch.float8_e4m3fn else None,
    ),
    slot_fault(
        "nibbles-split",
        "the codes of a block are stored as GGML does: byte j holds elements j and j + half, read as 2j and 2j + 1",
        PAYLOADS,
        "regroup when reading: low nibbles first, then high ones",
        ("imp#567",),
        "any weights",
        lambda key, form, c: {"values": SplitHalves(c.weights.block)},
    ),
    slot_fault(
        "scales-off",
        "block scales are off by a power of two",
        SCALES,
        "use one rule for the shared exponent, and one bias: exponent bytes are 127 + log2(scale)",
        ("vllm#53110", "vllm#43557", "aiter#3212"),
        "any weights",
        _values(E8M0_SHIFTED[1], E4M3_SHIFTED[1]),
        tuple(v for table in (E8M0_SHIFTED, E4M3_SHIFTED) for v in table.values()),
    ),
    slot_fault(
        "scales-as-e4m3-bytes",
        "block scales stored as E4M3 numbers, read as E8M0 exponents",
        SCALES,
        "store exponents: the byte of a scale is 127 + log2(scale)",
        ("vllm#51419",),
        "any scales",
        _values(E8M0_AS_E4M3, None),
    ),
    slot_fault(
        "scales-as-e8m0-bytes",
        "block scales rounded up to powers of two and stored as exponents, read as E4M3 numbers",
        SCALES,
        "NVFP4's scales are E4M3: leave them as they are",
        ("sglang#28662",),
        "any scales",
        _values(None, E4M3_AS_E8M0),
    ),
    slot_fault(
        "scales-rounded-up",
        "block scales rounded up to powers of two, under codes that were made for the old ones",
        SCALES,
        "requantise the codes too, or leave the scales: sglang's requant_weight_ue8m0 does both",
        ("vllm#22399", "sglang#28662"),
        "scales that are no powers of two",
        _values(None, E4M3_ROUNDED_UP),
    ),
    slot_fault(
        "scales-small-flushed",
        "small block scales became 0: E4M3 below 2^-6, E8M0 of 2^-15 and less",
        SCALES,
        "decode scales in a type that holds them: fp32 or bf16, or fp16 with its subnormals",
        ("1Cat-vLLM#222",),
        "scales that small",
        _values(E8M0_FLUSHED, E4M3_FLUSHED),
    ),
)


class _Damaged(Layout):
    """A layout in which some bytes of every third row of the last expert have another value."""

    def __init__(self, of: Layout, value: int) -> None:
        super().__init__(of.name, of.pattern, of.sizes, of.pads, of.source, of.bits)
        object.__setattr__(self, "_value", value)

    def pack(self, logical: Tensor) -> Tensor:
        logical = logical.clone()
        logical[-1, ::3, 1::2] = self._value
        return super().pack(logical)


def _damage(value: Callable[[Contract], int]) -> Callable[[Situation, tuple[str, ...]], Situation]:
    def inject(s: Situation, keys: tuple[str, ...]) -> Situation:
        return s.edit(keys, lambda form: {"layout": _Damaged(form.layout, value(s.recipe.contract))})

    return inject


DAMAGE_FAULTS = (
    Fault(
        "operand-not-loaded",
        "a part of an operand was never loaded: its bytes are zero, or all the same",
        (*PAYLOADS, *SCALES),
        _damage(lambda c: 0),
        "bytes are 0 where the checkpoint's are not, and all others are the checkpoint's",
        "weights that are not zero",
        "count what the loader copies against what the checkpoint holds, by expert; fill buffers with NaN codes before loading",
        ("vllm#45212", "Lvllm#110", "imp#115"),
    ),
    Fault(
        "scales-nan",
        "block scales are NaN where the checkpoint's are numbers",
        SCALES,
        _damage(lambda c: 0x7F if c.weights.outer else 0xFF),
        "bytes are NaN's code where the checkpoint's are not, and all others are the checkpoint's",
        "any tokens that reach that expert",
        "look for memory that was never written, or a scale that overflowed when it was converted",
        ("flashinfer#2861", "TransformerEngine#3070"),
    ),
)


def fold(layer: MoELayer) -> MoELayer:
    """The layer with each global scale multiplied into its block scales, rounded to E4M3, and 1 in its place."""

    def folded(t: BlockTensor | None) -> BlockTensor | None:
        if t is None or t.global_scale is None:
            return t
        scales = E4M3_SCALE.decode(t.scales) * t.global_scale.float().reshape(-1, 1, 1)
        return replace(t, scales=scales.to(torch.float8_e4m3fn).view(torch.uint8), global_scale=torch.ones_like(t.global_scale))

    return replace(layer, gate=folded(layer.gate), up=folded(layer.up), down=folded(layer.down))


def _fold(s: Situation, keys: tuple[str, ...]) -> Situation:
    needs(s.layer.up.global_scale is not None, "global-folded-into-blocks", "an NVFP4 checkpoint")
    return replace(s, layer=fold(s.layer))


LAYER_FAULTS = (
    Fault(
        "global-folded-into-blocks",
        "the global scale was multiplied into the E4M3 block scales, most of which became subnormal or 0, and 1 is passed",
        SCALES,
        _fold,
        "the operand's bytes equal the checkpoint's under this change, and under no simpler one",
        "a global scale far from 1",
        "pass the global scale as alpha: E4M3 has no room for it",
        ("vllm#48536", "mlx-node#120"),
        layer=fold,
    ),
)
