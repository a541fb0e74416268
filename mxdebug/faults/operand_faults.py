"""Faults of the recipe: one slot of an operand's form is filled otherwise than the kernel reads it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..layouts import (GATE_UP, GROUPS_64, INTERLEAVED, INTERLEAVED_UP, LINEAR, ROW_SHUFFLES, SM12X_WEIGHT_TILES, SM90_SCALE_FOLD,
                       SM90_WEIGHT_INTERLEAVE, SWIZZLE_8x4, SWIZZLE_128x4, TRANSPOSED, V_CACHE_4x4, Composed, Layout, RowShuffle)
from ..recipes import CAST_BY_VALUE, PAD_END, SWAP_NIBBLES
from ..reference import Parallel
from .fault import Fault, Situation, needs

W13 = ("w13", "w13_scale", "w13_bias")
PAYLOADS, SCALES, BIASES = ("w13", "w2"), ("w13_scale", "w2_scale"), ("w13_bias", "w2_bias")
EVERY = ("w13", "w13_scale", "w13_bias", "w2", "w2_scale", "w2_bias")


def _slots(id: str, slots: Mapping[str, Any]) -> Callable[[Situation, tuple[str, ...]], Situation]:
    def inject(situation: Situation, keys: tuple[str, ...]) -> Situation:
        if {"padding", "fill"} & set(slots):
            forms = [situation.plan.forms[k] for k in keys]
            needs(any((f.rows, f.columns) != (f.padded_rows, f.padded_columns) for f in forms), id, "a size that needs padding")
            needs("fill" in slots or all(f.rows != f.padded_rows for f in forms), id, "an intermediate size that needs padding")
        return situation.edit(keys, lambda form: slots)

    return inject


def _slot_fault(id: str, title: str, strikes: tuple[str, ...], fix: str, reports: tuple[str, ...], needs: str, **slots: Any) -> Fault:
    return Fault(id, title, strikes, _slots(id, slots), "the operand's bytes equal the checkpoint's in this form, and in no simpler one",
                 needs, fix, reports, slots=slots)


_ROWS_NEED = "gate and up rows that differ"
_PLACE_NEEDS = "scales that differ by row and by block; not 16 scale columns for 128x4"
_REORDER = "reorder the rows of payload, block scales and bias alike: torch.cat([up, gate], dim=1)"

ROW_ORDER_FAULTS = (
    _slot_fault("rows-gate-up", "rows left as [w1; w3]; the kernel reads [w3; w1]", W13, _REORDER,
                ("vllm#51038", "sglang#32430", "sglang#11081"), _ROWS_NEED, order=GATE_UP),
    _slot_fault("rows-interleaved", "rows left as g0,u0,g1,u1; the kernel reads [w3; w1]", W13,
                "de-interleave first: gate = w13[:, 0::2], up = w13[:, 1::2]; then " + _REORDER, ("vllm#51038", "vllm#46641"), _ROWS_NEED, order=INTERLEAVED),
    _slot_fault("rows-interleaved-up", "rows put in the order u0,g0,u1,g1, which is TRT-LLM-gen's; the kernel reads [w3; w1]", W13,
                _REORDER, ("vllm#52240",), _ROWS_NEED, order=INTERLEAVED_UP),
    _slot_fault("rows-groups-64", "rows put in groups of 64 of up and gate, which is CuTe-DSL's order; the kernel reads [w3; w1]", W13,
                _REORDER, ("vllm#52240",), _ROWS_NEED, order=GROUPS_64),
    _slot_fault("padding-at-end", "w13 padded once at its end, so that the gate/up boundary moved", W13,
                "pad each half on its own before joining them", ("vllm#51038",), "an intermediate size that needs padding", padding=PAD_END),
    *(_slot_fault(f"rows-shuffled-{s.block}", f"rows shuffled in blocks of {s.block}, as TRT-LLM-gen's kernels want them", EVERY,
                  "do not call shuffle_matrix_a for the CUTLASS kernel", ("sglang#26884", "vllm#52240"), "rows that differ", shuffle=s)
      for s in ROW_SHUFFLES),
)


def _scale_layout(id: str, title: str, layout: Layout | Composed, reports: tuple[str, ...]) -> Fault:
    return _slot_fault(id, title, SCALES, "call interleave_moe_scales_for_sm90_mixed_gemm once, on linear uint8 scales", reports, _PLACE_NEEDS, layout=layout)


def _weight_layout(id: str, title: str, layout: Layout | Composed, reports: tuple[str, ...]) -> Fault:
    return _slot_fault(id, title, PAYLOADS, "call interleave_moe_weights_for_sm90_mixed_gemm(weight, 'fp4') once", reports,
                       "K above 128 and rows that differ", layout=layout)


LAYOUT_FAULTS = (
    _scale_layout("scales-not-folded", "block scales linear; the kernel reads the SM90 fold", LINEAR, ("vllm#51038",)),
    _scale_layout("scales-folded-twice", "block scales folded twice for SM90", Composed(SM90_SCALE_FOLD, SM90_SCALE_FOLD), ("modular#6600",)),
    _scale_layout("scales-128x4", "block scales swizzled 128x4, which is the SM100 order; the kernel reads the SM90 fold", SWIZZLE_128x4, ("vllm#51038",)),
    _scale_layout("scales-8x4", "block scales swizzled 8x4; the kernel reads the SM90 fold", SWIZZLE_8x4, ("flashinfer#4574",)),
    _scale_layout("scales-transposed", "block scales transposed; the kernel reads the SM90 fold", TRANSPOSED, ("vllm#47115",)),
    _scale_layout("scales-v-cache", "block scales in the V-cache 4x4 order; the kernel reads the SM90 fold", V_CACHE_4x4, ()),
    *(_scale_layout(f"scales-{name}-of-fold", f"block scales folded for SM90, then swizzled {name}", Composed(SM90_SCALE_FOLD, layout), ("modular#6600",))
      for name, layout in (("128x4", SWIZZLE_128x4), ("8x4", SWIZZLE_8x4))),
    *(_scale_layout(f"scales-fold-of-{name}", f"block scales swizzled {name}, then folded for SM90", Composed(layout, SM90_SCALE_FOLD), ("modular#6600",))
      for name, layout in (("128x4", SWIZZLE_128x4), ("8x4", SWIZZLE_8x4))),
    _weight_layout("weights-not-interleaved", "packed weights without the SM90 interleave", LINEAR, ("vllm#51038", "TensorRT-LLM#12451")),
    _weight_layout("weights-interleaved-twice", "packed weights interleaved twice for SM90",
                   Composed(SM90_WEIGHT_INTERLEAVE, SM90_WEIGHT_INTERLEAVE), ("sglang#28963",)),
    _weight_layout("weights-sm12x-tiles", "packed weights in SM12x's tiles; the kernel reads the SM90 interleave", SM12X_WEIGHT_TILES, ()),
)


VALUE_FAULTS = (
    _slot_fault("padding-not-zero", "the padding holds other bytes than zeros", EVERY, "zero the padded buffer before loading (torch.zeros, not torch.empty)",
                ("sglang#9346", "Primus-Turbo#383", "Lvllm#110"), "padding of w13 and of w2 that meet, both with scales that are not zero", fill=0x77),
    _slot_fault("nibbles-swapped", "the two codes of each byte are swapped: element 2i must be in the low nibble", PAYLOADS,
                "swap back: (b & 15) << 4 | b >> 4; or correct the packer", ("torchao#3123", "triton#5197", "imp#567"), "any weights", values=SWAP_NIBBLES),
    _slot_fault("scales-cast-by-value", "block scales cast by value: the number 2^(b-127) became the byte, not its exponent", SCALES,
                "reinterpret: scale.view(torch.uint8), never .to(torch.uint8)", ("vllm#51419",), "scales below 1 (they become 0)", values=CAST_BY_VALUE),
)


def _roll(situation: Situation, keys: tuple[str, ...]) -> Situation:
    n = situation.local_experts
    needs(n > 1, "experts-rolled", "several experts")
    return situation.edit(keys, lambda form: {"experts": tuple((e + 1) % n for e in range(n))})


def _wrong_slice(situation: Situation, keys: tuple[str, ...]) -> Situation:
    p = situation.parallel
    needs(p.tp_size > 1, "wrong-tp-slice", "tp_size above 1")
    other = Parallel(p.tp_size, (p.tp_rank + 1) % p.tp_size, p.ep_size, p.ep_rank)
    return replace(situation, slices={**situation.slices, **{k: other for k in keys}})


def _wrong_experts(situation: Situation, keys: tuple[str, ...]) -> Situation:
    p = situation.parallel
    needs(p.ep_size > 1, "wrong-ep-slice", "ep_size above 1")
    other = Parallel(p.tp_size, p.tp_rank, p.ep_size, (p.ep_rank + 1) % p.ep_size)
    return replace(situation, slices={**situation.slices, **{k: other for k in keys}})


# Recognised in code: what they change is not one value of one slot.
EXPERT_FAULTS = (
    Fault("experts-rolled", "experts stand in another order than the router numbers them", EVERY, _roll,
          "each operand's experts equal other experts of the checkpoint", "at least two experts that differ",
          "load every tensor of an expert into the same slot", ("vllm#45212", "sglang#13162")),
    Fault("operand-of-another-expert", "one operand's experts belong to other experts than the rest of the layer", EVERY,
          lambda s, keys: _roll(s, keys[:1]),
          "this operand's experts equal other experts of the checkpoint; its companions are where they belong", "at least two experts that differ",
          "index payload, block scales and bias with the same expert id", ("sglang#21602",)),
    Fault("wrong-tp-slice", "an operand holds the slice of another tensor-parallel rank", EVERY, _wrong_slice,
          "the bytes equal another rank's slice of the checkpoint", "tp_size above 1",
          "cut payload, block scales and bias with the same tp_rank", ("vllm#42803",)),
    Fault("wrong-ep-slice", "an operand holds the experts of another expert-parallel rank", EVERY, _wrong_experts,
          "the bytes equal another rank's experts in the checkpoint", "ep_size above 1",
          "slice experts with the ep_rank that is passed to the kernel", ("sglang#21602",)),
)


def _reverse(situation: Situation, keys: tuple[str, ...]) -> Situation:
    """An order that no kernel uses, for trying out that it is recovered: rows reversed in blocks of 7."""
    return situation.edit(keys, lambda form: {"shuffle": _Odd()})


class _Odd(RowShuffle):
    def __init__(self) -> None:
        super().__init__("an order without a name", 1, "made up")

    def indices(self, rows: int) -> Tensor:
        return torch.cat([b.flip(0) for b in torch.arange(rows).split(7)])


def _other_layout(situation: Situation, keys: tuple[str, ...]) -> Situation:
    return situation.edit(keys, lambda form: {"layout": Composed(V_CACHE_4x4, form.layout)})


UNNAMED_FAULTS = (
    Fault("rows-unnamed", "rows stand in an order that mxdebug has no name for", EVERY, _reverse,
          "every row of the checkpoint's expert stands in the operand, in another place", "rows that differ",
          "apply the inverse of the printed permutation, or find the step that permutes rows"),
    Fault("layout-other", "bytes lie in a composition of layouts that no known step makes", SCALES, _other_layout,
          "the operand's bytes equal the checkpoint's in this form", _PLACE_NEEDS, "leave out the layout step that the contract does not ask for"),
)


def _drop(situation: Situation, keys: tuple[str, ...]) -> Situation:
    needs(situation.layer.down_bias is not None, "bias-missing", "a checkpoint with biases")
    return replace(situation, dropped=situation.dropped | set(keys))


def _add_bias(situation: Situation, keys: tuple[str, ...]) -> Situation:
    layer = situation.layer
    needs(layer.down_bias is None and layer.gate is not None, "bias-unexpected", "a checkpoint without biases")
    first, second = (torch.full((layer.experts, rows), float(key in keys), dtype=torch.bfloat16)
                     for key, rows in (("w13_bias", layer.intermediate), ("w2_bias", layer.hidden)))
    return replace(situation, layer=replace(layer, gate_bias=first, up_bias=first, down_bias=second))


BIAS_FAULTS = (
    Fault("bias-missing", "a bias of the checkpoint is not passed (or is all zeros)", BIASES, _drop,
          "the checkpoint has a bias, the call has none", "a checkpoint with biases", "pass fc1_expert_biases and fc2_expert_biases",
          ("ATOM#2292", "vllm#46641")),
    Fault("bias-unexpected", "a bias is passed that the checkpoint does not have", BIASES, _add_bias,
          "the call has a bias that is not zero, the checkpoint has none", "a checkpoint without biases",
          "pass no biases, or zeros; memory that was allocated for them and never written is not zero"),
)

OPERAND_FAULTS = (*ROW_ORDER_FAULTS, *LAYOUT_FAULTS, *VALUE_FAULTS, *UNNAMED_FAULTS, *EXPERT_FAULTS, *BIAS_FAULTS)
