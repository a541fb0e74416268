"""Faults of the recipe: one slot of an operand's form is filled otherwise than the kernel reads it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..contracts import Contract
from ..errors import MxdebugError
from ..layouts import (
    GATE_UP,
    GROUPS_64,
    INTERLEAVED,
    INTERLEAVED_SWAPPED,
    INTERLEAVED_UP,
    LINEAR,
    MISTAKEN_128x4,
    ROW_SHUFFLES,
    SHUFFLE_32,
    SHUFFLED_TWICE,
    SM12X_WEIGHT_TILES,
    SM90_SCALE_FOLD,
    SM90_WEIGHT_INTERLEAVE,
    TRANSPOSED,
    UP_GATE,
    Composed,
    Layout,
    RowOrder,
    RowShuffle,
    SWIZZLE_8x4,
    SWIZZLE_128x4,
    V_CACHE_4x4,
)
from ..recipes import PAD_ALL, PAD_END, Form
from ..reference import Parallel
from .fault import OPERANDS, Fault, Situation, Slots, needs
from .slots import BIASES, PAYLOADS, SCALES, W13, slot_fault
from .value_faults import DAMAGE_FAULTS, LAYER_FAULTS, VALUE_FAULTS

_ROWS_NEED = "gate and up rows that differ"
_PLACE_NEEDS = "scales that differ by row and by block; not 16 scale columns for 128x4"
_REORDER = "reorder the rows of payload, block scales and bias alike"


def _order(order: RowOrder) -> Slots:
    """Another order of gate and up, where there are both and the sizes allow it."""
    return lambda key, form, c: {"order": order} if form.order not in (None, order) and order.fits(form.padded_rows) and form.halves == 2 else None


def _order_fault(id: str, title: str, order: RowOrder, fix: str, reports: tuple[str, ...]) -> Fault:
    return slot_fault(id, title, W13, fix + _REORDER, reports, _ROWS_NEED, _order(order))


ROW_ORDER_FAULTS = (
    _order_fault("rows-gate-up", "rows are [w1; w3]", GATE_UP, "", ("vllm#51038", "sglang#32430", "sglang#11081")),
    _order_fault("rows-up-gate", "rows put in the order [w3; w1], which is CUTLASS's", UP_GATE, "", ("vllm#52240",)),
    _order_fault("rows-interleaved", "rows are g0,u0,g1,u1", INTERLEAVED, "de-interleave first: gate = w13[:, 0::2], up = w13[:, 1::2]; then ",
                 ("vllm#51038", "vllm#46641")),
    _order_fault("rows-interleaved-up", "rows put in the order u0,g0,u1,g1, which is TRT-LLM-gen's", INTERLEAVED_UP, "", ("vllm#52240",)),
    _order_fault("rows-groups-64", "rows put in groups of 64 of up and gate, which is CuTe-DSL's order", GROUPS_64, "", ("vllm#52240",)),
    _order_fault("rows-interleaved-swapped", "halves swapped while the rows still alternate g0,u0,g1,u1", INTERLEAVED_SWAPPED,
                 "de-interleave first: gate = w13[:, 0::2], up = w13[:, 1::2]; then ", ("vllm#46641", "vllm#46645")),
    slot_fault("rows-swapped-without-gate", "the halves of w13 swapped in a layer that has no gate", W13,
                "swap halves for gated activations only", ("vllm#51038",), "a layer without gate",
                lambda key, form, c: {"order": UP_GATE} if form.halves == 1 and key in W13 else None),
    slot_fault("padding-at-end", "w13 padded once at its end, so that the gate/up boundary moved", W13,
                "pad each half on its own before joining them", ("vllm#51038",), "an intermediate size that needs padding", lambda key, form, c: {"padding": PAD_END}),
    slot_fault("experts-stride", "experts stand at a stride of their own size; the kernel looks for each at the padded size", (*PAYLOADS, *SCALES),
               "pad every expert on its own before stacking or swizzling them", ("TransformerEngine#2924",), "a size that needs padding, and several experts",
               lambda key, form, c: {"padding": PAD_ALL} if form.layout.padded(form.halves * form.padded_rows, form.padded_columns)[0] != form.halves * form.rows else None),
    *(slot_fault(f"rows-shuffled-{s.block}", f"rows shuffled in blocks of {s.block}, as TRT-LLM-gen's kernels want them", OPERANDS,
                  "do not call shuffle_matrix_a for this kernel", ("sglang#26884", "vllm#52240"), "rows that differ",
                  lambda key, form, c, s=s: {"shuffle": s} if form.shuffle != s else None)
      for s in ROW_SHUFFLES),
    slot_fault("rows-shuffled-twice", "rows shuffled twice", OPERANDS, "permute rows once, by get_w2_permute_indices_with_cache (FlashInfer)",
                ("sglang#26884",), "rows that differ", lambda key, form, c: {"shuffle": SHUFFLED_TWICE} if form.shuffle is SHUFFLE_32 else None),
    slot_fault("rows-not-shuffled", "rows not shuffled", OPERANDS, "permute rows by get_w2_permute_indices_with_cache (FlashInfer), scales and biases too",
                ("sglang#26884", "vllm#52240"), "rows that differ", lambda key, form, c: {"shuffle": None} if form.shuffle is not None else None),
)


def _layout(layout: Layout) -> Slots:
    """Another layout, or this one applied where it is the right one already: nothing."""
    return lambda key, form, c: {"layout": layout} if form.layout not in (None, layout) and _fits(layout, form) else None


def _composed(first: Layout | None, second: Layout | None) -> Slots:
    """Two layouts, one after the other; None stands for the right one."""
    def slots(key: str, form: Form, c: Contract) -> Mapping[str, Any] | None:
        if form.layout is None or LINEAR in (form.layout, first, second) or (first is None) != (second is None) and form.layout in (first, second):
            return None
        both = Composed(first or form.layout, second or form.layout)
        return {"layout": both} if _fits(both, form) else None

    return slots


def _fits(layout: Layout | Composed, form: Form) -> bool:
    """Whether an operand has the same size in a layout; in any other the kernel's contract is broken visibly."""
    size = form.halves * form.padded_rows, form.padded_columns
    try:
        return math.prod(layout.padded(*size)) == math.prod(form.layout.padded(*size))
    except MxdebugError:
        return False


def _scale_layout(id: str, title: str, slots: Slots, reports: tuple[str, ...]) -> Fault:
    return slot_fault(id, title, SCALES, "lay out linear uint8 scales once, as the kernel reads them", reports, _PLACE_NEEDS, slots)


def _weight_layout(id: str, title: str, slots: Slots, reports: tuple[str, ...]) -> Fault:
    return slot_fault(id, title, PAYLOADS, "lay out the packed weights once, as the kernel reads them", reports, "K above 128 and rows that differ", slots)


_OTHER = (("128x4", "swizzled 128x4", SWIZZLE_128x4), ("8x4", "swizzled 8x4", SWIZZLE_8x4), ("fold", "folded for SM90", SM90_SCALE_FOLD))
LAYOUT_FAULTS = (
    _scale_layout("scales-linear", "block scales linear", _layout(LINEAR), ("vllm#51038",)),
    _scale_layout("scales-twice", "block scales swizzled or folded twice", _composed(None, None), ("modular#6600",)),
    _scale_layout("scales-128x4", "block scales swizzled 128x4, which is the SM100 order", _layout(SWIZZLE_128x4), ("vllm#51038",)),
    _scale_layout("scales-8x4", "block scales swizzled 8x4", _layout(SWIZZLE_8x4), ("flashinfer#4574",)),
    _scale_layout("scales-128x4-mistaken", "block scales swizzled 128x4 with a tile's rows split (32, 4) for (4, 32)",
                  lambda key, form, c: {"layout": MISTAKEN_128x4} if form.layout is SWIZZLE_128x4 and _fits(MISTAKEN_128x4, form) else None, ("Fuser#4745",)),
    _scale_layout("scales-sm90-fold", "block scales folded for SM90", _layout(SM90_SCALE_FOLD), ("vllm#51038",)),
    _scale_layout("scales-transposed", "block scales transposed", _layout(TRANSPOSED), ("vllm#47115",)),
    _scale_layout("scales-v-cache", "block scales in the V-cache 4x4 order", _layout(V_CACHE_4x4), ()),
    *(_scale_layout(f"scales-then-{name}", f"block scales laid out as they should be, then {verb} once more", _composed(None, layout), ("modular#6600",))
      for name, verb, layout in _OTHER),
    *(_scale_layout(f"scales-{name}-then", f"block scales {verb}, then laid out as they should be", _composed(layout, None), ("modular#6600",))
      for name, verb, layout in _OTHER),
    _weight_layout("weights-linear", "packed weights linear", _layout(LINEAR), ("vllm#51038", "TensorRT-LLM#12451")),
    _weight_layout("weights-twice", "packed weights interleaved twice", _composed(None, None), ("sglang#28963",)),
    _weight_layout("weights-sm90-interleave", "packed weights interleaved for SM90", _layout(SM90_WEIGHT_INTERLEAVE), ("vllm#51038",)),
    _weight_layout("weights-sm12x-tiles", "packed weights in SM12x's tiles", _layout(SM12X_WEIGHT_TILES), ()),
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
    Fault("experts-rolled", "experts stand in another order than the router numbers them", OPERANDS, _roll,
          "each operand's experts equal other experts of the checkpoint", "at least two experts that differ",
          "load every tensor of an expert into the same slot", ("vllm#45212", "sglang#13162")),
    Fault("operand-of-another-expert", "one operand's experts belong to other experts than the rest of the layer", OPERANDS,
          lambda s, keys: _roll(s, keys[:1]),
          "this operand's experts equal other experts of the checkpoint; its companions are where they belong", "at least two experts that differ",
          "index payload, block scales and bias with the same expert id", ("sglang#21602",)),
    Fault("wrong-tp-slice", "an operand holds the slice of another tensor-parallel rank", OPERANDS, _wrong_slice,
          "the bytes equal another rank's slice of the checkpoint", "tp_size above 1",
          "cut payload, block scales and bias with the same tp_rank", ("vllm#42803",)),
    Fault("wrong-ep-slice", "an operand holds the experts of another expert-parallel rank", OPERANDS, _wrong_experts,
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
    Fault("rows-unnamed", "rows stand in an order that mxdebug has no name for", OPERANDS, _reverse,
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

OPERAND_FAULTS = (*ROW_ORDER_FAULTS, *LAYOUT_FAULTS, *VALUE_FAULTS, *UNNAMED_FAULTS, *EXPERT_FAULTS, *BIAS_FAULTS, *DAMAGE_FAULTS, *LAYER_FAULTS)
