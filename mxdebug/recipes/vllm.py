"""vLLM's recipes for FlashInfer's MoE kernels. Rules: vLLM 0.33.

MXFP4: model_executor/layers/fused_moe/oracle/mxfp4.py; `convert_gpt_oss_weight_to_mxfp4_moe_kernel_format` and
`convert_weight_to_mxfp4_moe_kernel_format` are the converters, `mxfp4_round_up_hidden_size_and_intermediate_size` the padding.
NVFP4: oracle/nvfp4.py `convert_to_nvfp4_moe_kernel_format`, quantization/utils/flashinfer_fp4_moe.py; the experts'
process_weights_after_loading folds the input scales. The calls: experts/flashinfer_cutlass_moe.py, trtllm_*_moe.py, flashinfer_cutedsl_moe.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..contracts import contract
from ..errors import MxdebugError
from ..formats import MXFP4, NVFP4, BlockFormat
from ..layouts import (GATE_UP, GROUPS_64, INTERLEAVED, INTERLEAVED_UP, LINEAR, SHUFFLE_32, SM90_SCALE_FOLD, SM90_WEIGHT_INTERLEAVE, SWIZZLE_128x4, UP_GATE,
                       Layout, RowOrder, RowShuffle)
from ..reference import MoELayer
from .form import Form
from .plan import Plan
from .recipe import Recipe

GPT_OSS, CT_MXFP4 = "gpt-oss", "compressed-tensors mxfp4-pack-quantized"
MODELOPT, CT_NVFP4 = "ModelOpt NVFP4", "compressed-tensors nvfp4-pack-quantized"


@dataclass(frozen=True)
class Steps:
    """What vLLM does on one path.

    order, shuffle    rows of w13, and the permutation of rows on top of it (of all operands)
    payload, scales   layouts of the bytes
    x_scales          layout of the activations' block scales; None: bf16 activations
    multiple          (intermediate, hidden) are padded to these, each half on its own, with zeros
    bias              the dtype of biases; None: no biases on this path
    folds             alpha times the inner activation's scale is passed as one number (TRT-LLM)
    """

    path: str
    format: BlockFormat
    order: RowOrder
    shuffle: RowShuffle | None
    payload: Layout
    scales: Layout
    x_scales: Layout | None
    multiple: tuple[int, int]
    multiple_without_gate: int | None
    bias: torch.dtype | None
    folds: bool = False


STEPS = (
    Steps("mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16", MXFP4, UP_GATE, None, SM90_WEIGHT_INTERLEAVE, SM90_SCALE_FOLD, None, (128, 128), 128, torch.bfloat16),
    Steps("mxfp4/FLASHINFER_CUTLASS_MXFP4_MXFP8", MXFP4, UP_GATE, None, LINEAR, SWIZZLE_128x4, SWIZZLE_128x4, (128, 128), 128, torch.bfloat16),
    Steps("mxfp4/FLASHINFER_TRTLLM_MXFP4_BF16", MXFP4, INTERLEAVED_UP, SHUFFLE_32, LINEAR, SWIZZLE_128x4, None, (128, 256), None, torch.float32),
    Steps("mxfp4/FLASHINFER_TRTLLM_MXFP4_MXFP8", MXFP4, INTERLEAVED_UP, SHUFFLE_32, LINEAR, SWIZZLE_128x4, LINEAR, (128, 256), None, torch.float32),
    Steps("nvfp4/FLASHINFER_CUTLASS", NVFP4, UP_GATE, None, LINEAR, SWIZZLE_128x4, SWIZZLE_128x4, (1, 1), 128, None),
    Steps("nvfp4/FLASHINFER_TRTLLM", NVFP4, INTERLEAVED_UP, SHUFFLE_32, LINEAR, SWIZZLE_128x4, LINEAR, (64, 256), 128, None, folds=True),
    Steps("nvfp4/FLASHINFER_CUTEDSL", NVFP4, GROUPS_64, None, LINEAR, SWIZZLE_128x4, LINEAR, (64, 256), 128, None),
)


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def plan(steps: Steps, layer: MoELayer, file_rows: RowOrder, inputs: MoELayer) -> Plan:
    """The stages of one path for one layer (the part that a rank holds). Raises MxdebugError where vLLM refuses the layer.

    inputs  whose experts' input scales share one maximum
    """
    for name, w in (("w13", layer.up), ("w2", layer.down)):
        if w.format is not steps.format:
            raise MxdebugError(f"{name} weights", steps.format.name, w.format.name, "another quantisation, so another path")
    gated = layer.gate is not None
    if not gated and steps.multiple_without_gate is None:
        raise MxdebugError("layer", "gate and up weights", "a layer without gate", "vLLM 0.33 has no such layers on this path (_supports_no_act_and_mul)")
    if steps.bias is None and (layer.up_bias is not None or layer.down_bias is not None):
        raise MxdebugError("biases", "none on this path", "biases", "vLLM 0.33 passes no biases to this kernel, so they would be lost")
    i, h = layer.intermediate, layer.hidden
    pi = _round_up(i, steps.multiple[0] if gated else steps.multiple_without_gate)
    ph = _round_up(h, steps.multiple[1])
    if steps.path == "nvfp4/FLASHINFER_CUTLASS" and gated and i % 64:
        raise MxdebugError("intermediate size", "a multiple of 64", str(i), "vLLM 0.33 pads block scales only: it refuses gated layers that need padding (NotImplementedError)")

    def matrix(halves: int, rows: int, padded_rows: int, columns: int, padded_columns: int) -> tuple[Form, Form]:
        """The forms of payload and block scales."""
        out = []
        for layout, per in ((steps.payload, 2), (steps.scales, steps.format.block)):
            r, c = halves * padded_rows, padded_columns // per
            out.append(Form(halves, rows, columns // per, padded_rows, c, was=file_rows.name, order=steps.order if halves == 2 else None, layout=layout,
                            shape=(r // 64, c // 4, 16, 16) if layout is SM90_SCALE_FOLD else layout.padded(r, c), shuffle=steps.shuffle))
        return out[0], out[1]

    def bias(halves: int, rows: int, padded_rows: int) -> Form:
        return Form(halves, rows, None, padded_rows, None, was=file_rows.name, order=steps.order if halves == 2 else None, layout=None, dtype=steps.bias,
                    stored=torch.bfloat16 if steps.bias is torch.float32 else None, shuffle=steps.shuffle)

    halves, forms = 2 if gated else 1, {}
    for key, sizes in (("w13", (halves, i, pi, h, ph)), ("w2", (1, h, ph, i, pi))):
        forms[key], forms[f"{key}_scale"] = matrix(*sizes)
        if steps.bias is not None:
            forms[f"{key}_bias"] = bias(*sizes[:3])
    return Plan(steps.path, forms, (pi, ph), steps.x_scales, _scalars(steps, inputs))


def _scalars(steps: Steps, inputs: MoELayer) -> Callable[[MoELayer], dict[str, Tensor]]:
    def mxfp8(layer: MoELayer) -> dict[str, Tensor]:
        ones = torch.ones(layer.experts)
        return {"w13_global": ones, "w2_global": ones}

    def nvfp4(layer: MoELayer) -> dict[str, Tensor]:
        if inputs.w13_input_scale is None or inputs.w2_input_scale is None:
            raise MxdebugError("input scales", "float32 [E] for w13 and for w2", "none", "a W4A16 checkpoint: this path quantises activations too")
        a13, a2 = (s.float().max().expand(layer.experts) for s in (inputs.w13_input_scale, inputs.w2_input_scale))
        # One number for both halves: vLLM warns where they differ and takes w1's (modelopt.py, compressed_tensors_moe_w4a4_nvfp4.py).
        first = layer.up if layer.gate is None else layer.gate
        alpha13, alpha2 = (w.global_scale.float() * a for w, a in ((first, a13), (layer.down, a2)))
        out = {"w13_alpha": alpha13, "w2_alpha": alpha2, "a1_gscale": 1.0 / a13, "a2_gscale": 1.0 / a2, "x_gscale": 1.0 / a13[0]}
        return {**out, "g1_scale_c": alpha13 * out["a2_gscale"] if layer.gate is not None else out["a2_gscale"]} if steps.folds else out

    return nvfp4 if steps.format is NVFP4 else mxfp8 if steps.path.endswith("CUTLASS_MXFP4_MXFP8") else lambda layer: {}


def _forced_by(path: str, kind: str) -> str:
    """How a user gets vLLM to take a path; `mxdebug.recipes.select` has the rules."""
    backend = "_".join(path.partition("/")[2].split("_")[:2]).lower()
    text = f"vllm serve MODEL --moe-backend {backend}"
    if path.endswith("MXFP4_MXFP8"):  # map_mxfp4_backend knows flashinfer_*_afp8, but MoEBackend (config/kernel.py) does not
        text += " with quantization_config.moe.activation=mxfp8"
    if kind == CT_MXFP4:  # CompressedTensorsW4A4Mxfp4MoEMethod asks no oracle
        text += " (checkpoints with dynamic FP8 activations, or quant_method mxfp4 with these tensors; others never get here)"
    return text


_KINDS = {"MXFP4": ((GPT_OSS, INTERLEAVED, "convert_gpt_oss_weight_to_mxfp4_moe_kernel_format"), (CT_MXFP4, GATE_UP, "convert_weight_to_mxfp4_moe_kernel_format")),
          "NVFP4": ((MODELOPT, GATE_UP, "convert_to_nvfp4_moe_kernel_format"), (CT_NVFP4, GATE_UP, "convert_to_nvfp4_moe_kernel_format"))}


def _bound(steps: Steps, kind: str) -> Callable[[MoELayer, RowOrder, MoELayer], Plan]:
    # ModelOpt's input scales are loaded for all experts on every rank (modelopt.py, global_sf_num_experts), compressed-tensors' are not.
    return lambda layer, rows, whole: plan(steps, layer, rows, whole if kind == MODELOPT else layer)


RECIPES = tuple(
    Recipe("vllm", "0.33", steps.path, kind, rows, contract(steps.path),
           forced_by=_forced_by(steps.path, kind), source=source, _plan=_bound(steps, kind))
    for steps in STEPS for kind, rows, source in _KINDS[steps.format.name])
