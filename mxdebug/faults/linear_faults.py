"""Faults of the W4A16 linear path: one slot of its plan filled otherwise, one record each. Ids that MoE paths have too mean the same here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import MxdebugError
from ..formats import E4M3_SCALE, NVFP4
from ..recipes.w4a16.plan import FLUSHED_BELOW
from ..reference_linear import LinearLayer
from .fault import Fault, Situation
from .linear_situation import LinearSituation

OPERAND, CALL, LAYER, CHECKPOINT, KERNEL = "operand", "call", "layer", "checkpoint", "kernel"


@dataclass(frozen=True)
class LinearFault:
    """How a fault of the catalogue strikes a linear layer.

    id       the catalogue's
    level    where it leaves its trace: an operand's bytes, the call, the layer's output, the checkpoint itself, the kernel's output
    strikes  the operands or inputs that it changes
    slots    the plan's slots that it fills otherwise
    fits     why it cannot strike this situation, or None; layer: the checkpoint in which it strikes, where that is another one
    kernel   what the kernel hands back instead of its output
    """

    id: str
    level: str
    strikes: tuple[str, ...]
    slots: Mapping[str, Any]
    fits: Callable[[LinearSituation], str | None] = lambda s: None
    layer: Callable[[LinearLayer], LinearLayer] | None = None
    kernel: str = ""

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
FIXES = {"scales-linear": _SWIZZLE, "scales-twice": _SWIZZLE, "global-inverted": _ALPHA, "global-missing": _ALPHA, "global-other": _ALPHA,
         "bias-missing": "add the layer's bias to the output after it was cut to N"}


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


_SM12X = _when(lambda s: s.plan.sm12x, "the layout of SM12x, whose scales are recoded")
_PADDED_K, _PADDED_N = (_when(lambda s, i=i: s.plan.padded[i] != (s.plan.n, s.plan.k)[i], f"{'NK'[i]} that is no multiple of 64") for i in (1, 0))
_PARTS = _when(_parts_equal_rows, "joined parts")
_APART = _when(lambda s: len(s.layer.global_scales.unique()) > 1, "joined parts whose global scales differ")

LINEAR_FAULTS: dict[str, LinearFault] = {f.id: f for f in (
    LinearFault("nibbles-swapped", OPERAND, ("weight",), {"payload": "nibbles swapped"}),
    LinearFault("parts-reordered", OPERAND, ("weight", "weight_scale"), {"order": "reversed"}, _PARTS),
    LinearFault("scales-linear", OPERAND, ("weight_scale",), {"swizzles": 0}),
    LinearFault("scales-twice", OPERAND, ("weight_scale",), {"swizzles": 2}),
    LinearFault("scales-view-contiguous", OPERAND, ("weight_scale",), {"view": "contiguous"},
                _when(lambda s: not s.plan.sm12x, "the layout of SM100, whose scales are a strided view")),
    LinearFault("scales-cast-by-value", OPERAND, ("weight_scale",), {"scale_values": "cast by value"}),
    LinearFault("scales-not-recoded", OPERAND, ("weight_scale",), {"recode": "left as E4M3"}, _SM12X),
    LinearFault("scales-flushed", OPERAND, ("weight_scale",), {"recode": "small scales flushed"}, _when(_small_scales, "SM12x, and scales below 2^-6")),
    LinearFault("scales-recoded-for-marlin", OPERAND, ("weight_scale",), {"recode": "Marlin's"}, _SM12X),
    LinearFault("group-32-as-16", OPERAND, ("weight_scale",), {"group": 32}, _when(lambda s: s.layer.k % 32 == 0, "K that is a multiple of 32"), layer=coarser),
    LinearFault("global-folded-into-blocks", OPERAND, ("weight_scale", "alpha"), {"scale_values": "global scale folded in"}),
    LinearFault("global-inverted", CALL, ("alpha",), {"scalar": "inverted"}),
    LinearFault("global-missing", CALL, ("alpha",), {"scalar": "missing"}),
    LinearFault("global-of-another-part", CALL, ("alpha",), {"scalar": "another part's"}, _APART),
    LinearFault("global-other", CALL, ("alpha",), {"scalar": "not that of the file"}),
    LinearFault("global-shared-by-parts", CHECKPOINT, ("alpha",), {}, _PARTS, layer=_apart),
    LinearFault("activations-fp16", CALL, ("x",), {"x_dtype": torch.float16}),
    LinearFault("x-padded-by-bytes", CALL, ("x",), {"x_pad": "bytes"}, _PADDED_K),
    LinearFault("x-not-padded", CALL, ("x",), {"x_pad": "none"}, _PADDED_K),
    LinearFault("output-not-sliced", LAYER, ("output",), {"sliced": False, "bias": "missing"},
                _when(lambda s: s.plan.padded[0] != s.plan.n, "N that is no multiple of 64")),
    LinearFault("bias-before-slice", LAYER, ("output",), {"bias": "before the slice"},
                _when(lambda s: s.plan.padded[0] != s.plan.n and s.layer.bias is not None, "N that is no multiple of 64, and a bias")),
    LinearFault("bias-missing", LAYER, ("output",), {"bias": "missing"}, _when(lambda s: s.layer.bias is not None, "a checkpoint with biases")),
    LinearFault("output-unwritten", KERNEL, ("output",), {}, kernel="memory"),
)}


def _not_moe(id: str) -> Callable[[Situation, tuple[str, ...]], Situation]:
    def inject(s: Situation, keys: tuple[str, ...]) -> Situation:
        raise MxdebugError(f"situation for fault {id}", "a linear layer", "a mixture of experts", "this fault strikes linear layers: mxdebug.faults.linear_fault")

    return inject


def _new(id: str, title: str, gives_away: str, needed: str, fix: str, reports: tuple[str, ...] = ()) -> Fault:
    return Fault(id, title, ("linear",), _not_moe(id), gives_away, needed, fix, reports)


_BYTES = "the operand's bytes equal the checkpoint's under this change, and under no simpler one"
NEW_FAULTS = (
    _new("parts-reordered", "joined projections stand in another order", _BYTES, "parts that differ", "join the projections in the order in which the model splits the output"),
    _new("scales-view-contiguous", "the 6-D view of the block scales was made contiguous, and the kernel reads memory by pointer",
         "the operand's memory holds the right values in the order of their indices", "scales that differ by row and block",
         "never call .contiguous() on it, nor load it from a file that keeps no strides: run prepare_bf16_fp4_weights again on the 128x4 bytes"),
    _new("scales-not-recoded", "block scales left as E4M3, where SM12x's kernel reads S0E5M3", _BYTES, "any scales: each is read as another number",
         "pass what prepare_bf16_fp4_weights(backend='cute-dsl') returns on that GPU"),
    _new("scales-flushed", "block scales below 2^-6 became 0 when they were recoded to S0E5M3", _BYTES, "block scales below 2^-6 (subnormal E4M3)",
         "recode by the upper bits of the fp16 of the same value, which is exact; or quantise so that no block scale is that small"),
    _new("scales-recoded-for-marlin", "block scales in Marlin's S0E5M3 (times 2^7, small ones 0), where SM12x's kernel reads plain S0E5M3", _BYTES, "any scales",
         "prepare for the kernel that runs: Marlin's 2^7 is divided out in Marlin's global scale only"),
    _new("group-32-as-16", "a checkpoint with one block scale for 32 elements was read as one for 16", "the file has K/32 scale columns, the kernel reads K/16",
         "a checkpoint of group size 32", "refuse it: NVFP4's kernels read blocks of 16; requantise, or repeat every scale twice", ("TensorRT-LLM#19091",)),
    _new("global-folded-into-blocks", "the global scale was multiplied into the E4M3 block scales, most of which became subnormal or 0, and 1 is passed", _BYTES,
         "a global scale far from 1", "pass the global scale as alpha: E4M3 has no room for it"),
    _new("global-of-another-part", "the global scale of another joined part is passed for all", "the number equals another part's", "joined parts whose global scales differ",
         "ModelOpt: the largest weight_scale_2; compressed-tensors: 1 / the largest weight_global_scale, as vLLM does; better one shared scale in the checkpoint"),
    _new("global-shared-by-parts", "joined projections have different global scales, and the kernel takes one number for all", "the checkpoint's global scales",
         "projections that were quantised apart", "quantise the joined projections with one shared global scale; vLLM only warns"),
    _new("activations-fp16", "activations are FP16, and the kernel takes BF16 only", "the dtype of the activations", "any",
         "--dtype bfloat16, or --linear-backend marlin; vLLM does not look at the dtype when it selects the kernel", ("vllm#53014",)),
    _new("activations-beyond-fp16", "activations beyond 65504 become inf: SM12x's kernel multiplies in fp16", "the activations themselves; the GEMV for one token does not convert",
         "an activation beyond 65504, and more than one token", "serve the layer with Marlin or on SM100, or scale the activations down (they are often outliers of one channel)"),
    _new("x-padded-by-bytes", "activations were padded by the weight's padding in bytes; it must be elements, two for each byte", "the width of the activations",
         "K that is no multiple of 64", "pad x by 2 * weights_padding (vLLM's weights_padding_cols counts payload bytes)", ("vllm#53014",)),
    _new("x-not-padded", "activations were not padded along K as the weight was", "the width of the activations", "K that is no multiple of 64",
         "pad x with zeros to the weight's K"),
    _new("output-not-sliced", "the output still has the weight's padding rows as columns", "the width of the output; its first N columns are right", "N that is no multiple of 64",
         "take the first N columns, then add the bias"),
    _new("bias-before-slice", "the bias was added before the output was cut to N", "the error: sizes of bias and padded output differ", "a bias, and N that is no multiple of 64",
         "cut the output to N first, then add the bias [N]", ("vllm#53014",)),
    _new("fake-shape", "the fake implementation gives another shape than the kernel", "recipes.w4a16.op.wrong_fakes, for both layouts", "tracing (torch.compile), both layouts",
         "N is b.shape[0] of the uint8 weight and b.shape[1] // 2 of the int32 tiles", ("vllm#53014",)),
)


def linear_fault(id: str) -> LinearFault:
    """How that fault strikes linear layers; MxdebugError lists those that do."""
    if id not in LINEAR_FAULTS:
        raise MxdebugError("fault of a linear layer", f"one of {', '.join(LINEAR_FAULTS)}", repr(id))
    return LINEAR_FAULTS[id]
