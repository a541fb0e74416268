"""Faults of the W4A16 linear path: one slot of its plan filled otherwise, one record each. Ids that MoE paths have too mean the same here."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Any

import torch

from ..errors import MxdebugError
from ..formats import E4M3_SCALE, NVFP4
from ..recipes.w4a16.plan import FLUSHED_BELOW
from ..reference_linear import LinearLayer
from .linear_situation import LinearSituation

OPERAND, CALL, LAYER, CHECKPOINT, KERNEL = "operand", "call", "layer", "checkpoint", "kernel"


@dataclass(frozen=True, eq=False)
class LinearFault:
    """How a fault of the catalogue strikes a linear layer.

    id       the catalogue's
    level    where it leaves its trace: an operand's bytes, the call, the layer's output, the checkpoint itself, the kernel's output
    strikes  the operands or inputs that it changes
    slots    the plan's slots that it fills otherwise
    fits     why it cannot strike this situation, or None; layer: the checkpoint in which it strikes, where that is another one
    kernel   what the kernel hands back instead of its output
    variants other fillings of the same slots that are the same fault, for a situation
    """

    id: str
    level: str
    strikes: tuple[str, ...]
    slots: Mapping[str, Any]
    fits: Callable[[LinearSituation], str | None] = lambda s: None
    layer: Callable[[LinearLayer], LinearLayer] | None = None
    kernel: str = ""
    variants: Callable[[LinearSituation], Iterable[Mapping[str, Any]]] = lambda s: ()

    @property
    def advice(self) -> str:
        """What to change: in the words of this path where the catalogue's are about a MoE kernel."""
        return FIXES.get(self.id, "")

    def inject(self, s: LinearSituation) -> LinearSituation:
        """The situation with this fault. Raises MxdebugError where it cannot strike."""
        if (why := self.fits(s)) is not None:
            raise MxdebugError(f"situation for fault {self.id}", why, "none of that", "this fault cannot strike here")
        layer = s.layer if self.layer is None else self.layer(s.layer)
        return replace(s, layer=layer, kernel=self.kernel or s.kernel).edit(**self.slots)


_SWIZZLE = "swizzle the linear scales once (vLLM swizzle_blockscale), then prepare_bf16_fp4_weights(..., backend='cute-dsl')"
_ALPHA = "pass weight_scale_2 (ModelOpt, a multiplier) or 1 / weight_global_scale (compressed-tensors, a divisor) as alpha"
FIXES = {
    "scales-linear": _SWIZZLE,
    "scales-twice": _SWIZZLE,
    "global-inverted": _ALPHA,
    "global-missing": _ALPHA,
    "global-other": _ALPHA,
    "global-squared": _ALPHA,
    "bias-missing": "add the layer's bias to the output after it was cut to N",
}


def coarser(layer: LinearLayer) -> LinearLayer:
    """The layer as a checkpoint with one scale for 32 elements has it: the larger of two scales, the same codes."""
    if layer.format.block == 32:
        return layer
    scales = layer.scales.unflatten(1, (-1, 2)).amax(2)  # bytes of E4M3 that are not negative sort as their values do
    return replace(layer, scales=scales, format=replace(NVFP4, block=32))


def _apart(layer: LinearLayer) -> LinearLayer:
    g = layer.global_scales
    return replace(layer, global_scales=g * 4.0 ** torch.arange(len(g))) if len(g.unique()) == 1 else layer


def _when(condition: Callable[[LinearSituation], bool], needed: str) -> Callable[[LinearSituation], str | None]:
    return lambda s: None if condition(s) else needed


def _small_scales(s: LinearSituation) -> bool:
    values = E4M3_SCALE.decode(s.layer.scales)
    return s.plan.sm12x and bool(((values > 0) & (values < FLUSHED_BELOW)).any())


def _parts_equal_rows(s: LinearSituation) -> bool:
    return len(s.layer.rows) > 1


def _orders(s: LinearSituation) -> Iterable[Mapping[str, Any]]:
    """Every other order of the parts; of two equally long ones also row by row in turn, as some files have gate and up."""
    count = len(s.layer.rows)
    for order in permutations(range(count)) if count <= 4 else ():
        if order not in (tuple(range(count)), tuple(range(count))[::-1]):
            yield {"order": ",".join(map(str, order))}
    if count > 1 and len(set(s.layer.rows)) == 1:
        yield {"order": "interleaved"}


def _rounds(s: LinearSituation) -> bool:
    right = s.plan.edit(scalar="one for all parts").global_scale(s.layer)
    return not torch.equal(right.bfloat16().float(), right)


_SM12X = _when(lambda s: s.plan.sm12x, "the layout of SM12x, whose scales are recoded")
_PADDED_K, _PADDED_N = (
    _when(lambda s, i=i: s.plan.padded[i] != (s.plan.n, s.plan.k)[i], f"{'NK'[i]} that is no multiple of 64") for i in (1, 0)
)
_PARTS = _when(_parts_equal_rows, "joined parts")
_APART = _when(lambda s: len(s.layer.global_scales.unique()) > 1, "joined parts whose global scales differ")

LINEAR_FAULTS: dict[str, LinearFault] = {
    f.id: f
    for f in (
        LinearFault("nibbles-swapped", OPERAND, ("weight",), {"payload": "nibbles swapped"}),
        LinearFault("parts-reordered", OPERAND, ("weight", "weight_scale"), {"order": "reversed"}, _PARTS, variants=_orders),
        LinearFault("scales-linear", OPERAND, ("weight_scale",), {"swizzles": 0}),
        LinearFault("scales-twice", OPERAND, ("weight_scale",), {"swizzles": 2}),
        LinearFault(
            "scales-view-contiguous",
            OPERAND,
            ("weight_scale",),
            {"view": "contiguous"},
            _when(lambda s: not s.plan.sm12x, "the layout of SM100, whose scales are a strided view"),
        ),
        LinearFault("scales-cast-by-value", OPERAND, ("weight_scale",), {"scale_values": "cast by value"}),
        LinearFault("scales-not-recoded", OPERAND, ("weight_scale",), {"recode": "left as E4M3"}, _SM12X),
        LinearFault(
            "scales-flushed",
            OPERAND,
            ("weight_scale",),
            {"recode": "small scales flushed"},
            _when(_small_scales, "SM12x, and scales below 2^-6"),
        ),
        LinearFault("scales-recoded-for-marlin", OPERAND, ("weight_scale",), {"recode": "Marlin's"}, _SM12X),
        LinearFault(
            "group-32-as-16",
            OPERAND,
            ("weight_scale",),
            {"group": 32},
            _when(lambda s: s.layer.k % 32 == 0, "K that is a multiple of 32"),
            layer=coarser,
        ),
        LinearFault("global-folded-into-blocks", OPERAND, ("weight_scale", "alpha"), {"scale_values": "global scale folded in"}),
        LinearFault("global-inverted", CALL, ("alpha",), {"scalar": "inverted"}),
        LinearFault("global-missing", CALL, ("alpha",), {"scalar": "missing"}),
        LinearFault("global-of-another-part", CALL, ("alpha",), {"scalar": "another part's"}, _APART),
        LinearFault("global-squared", CALL, ("alpha",), {"scalar": "squared"}),
        LinearFault(
            "global-rounded",
            CALL,
            ("alpha",),
            {"scalar": "rounded to bf16"},
            _when(_rounds, "a global scale that bf16 does not hold"),
            variants=lambda s: ({"scalar": "rounded to fp16"},),
        ),
        LinearFault("global-other", CALL, ("alpha",), {"scalar": "not that of the file"}),
        LinearFault("global-shared-by-parts", CHECKPOINT, ("alpha",), {}, _PARTS, layer=_apart),
        LinearFault("activations-not-bf16", CALL, ("x",), {"x_dtype": torch.float16}),
        LinearFault("x-padded-by-bytes", CALL, ("x",), {"x_pad": "bytes"}, _PADDED_K),
        LinearFault("x-not-padded", CALL, ("x",), {"x_pad": "none"}, _PADDED_K),
        LinearFault(
            "output-not-sliced",
            LAYER,
            ("output",),
            {"sliced": False, "bias": "missing"},
            _when(lambda s: s.plan.padded[0] != s.plan.n, "N that is no multiple of 64"),
        ),
        LinearFault(
            "bias-before-slice",
            LAYER,
            ("output",),
            {"bias": "before the slice"},
            _when(lambda s: s.plan.padded[0] != s.plan.n and s.layer.bias is not None, "N that is no multiple of 64, and a bias"),
        ),
        LinearFault(
            "bias-twice", LAYER, ("output",), {"bias": "twice"}, _when(lambda s: s.layer.bias is not None, "a checkpoint with biases")
        ),
        LinearFault(
            "bias-missing", LAYER, ("output",), {"bias": "missing"}, _when(lambda s: s.layer.bias is not None, "a checkpoint with biases")
        ),
        LinearFault("output-unwritten", KERNEL, ("output",), {}, kernel="memory"),
    )
}


def linear_fault(id: str) -> LinearFault:
    """How that fault strikes linear layers; MxdebugError lists those that do."""
    if id not in LINEAR_FAULTS:
        raise MxdebugError("fault of a linear layer", f"one of {', '.join(LINEAR_FAULTS)}", repr(id))
    return LINEAR_FAULTS[id]
