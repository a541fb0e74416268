"""vLLM's recipes. Rules: vLLM 0.33, model_executor/layers/fused_moe/oracle/mxfp4.py.

`convert_gpt_oss_weight_to_mxfp4_moe_kernel_format` and `convert_weight_to_mxfp4_moe_kernel_format` are the converters,
`mxfp4_round_up_hidden_size_and_intermediate_size` the padding, experts/flashinfer_cutlass_moe.py the call.
"""

from __future__ import annotations

import torch

from ..contracts import contract
from ..errors import MxdebugError
from ..formats import MXFP4
from ..layouts import GATE_UP, INTERLEAVED, SM90_SCALE_FOLD, SM90_WEIGHT_INTERLEAVE, UP_GATE, Layout, RowOrder
from ..reference import MoELayer
from .form import Form
from .plan import Plan
from .recipe import Recipe

CUTLASS_MXFP4_BF16 = "mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16"


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def cutlass_mxfp4_bf16(layer: MoELayer, file_rows: RowOrder) -> Plan:
    """The stages of FLASHINFER_CUTLASS_MXFP4_BF16 for one layer (the part that a rank holds)."""
    for name, w in (("w13", layer.up), ("w2", layer.down)):
        if w.format is not MXFP4:
            raise MxdebugError(f"{name} weights", "MXFP4", w.format.name, "another quantisation, so another path")
    if layer.gate is None:
        # The converter swaps the halves of a layer that has none (vLLM 0.33); no such path is verified here.
        raise MxdebugError("layer", "gate and up weights", "a layer without gate", "vLLM 0.33 swaps halves here although there are none")
    i, h = layer.intermediate, layer.hidden
    pi, ph = _round_up(i, 128), _round_up(h, 128)
    def matrix(layout: Layout, halves: int, rows: int, padded_rows: int, per: int, columns: int, padded_columns: int) -> Form:
        r, c = halves * padded_rows, padded_columns // per
        return Form(halves, rows, columns // per, padded_rows, c, was=file_rows.name, order=UP_GATE if halves == 2 else None,
                    layout=layout, shape=(r, c) if layout is SM90_WEIGHT_INTERLEAVE else (r // 64, c // 4, 16, 16))

    def bias(halves: int, rows: int, padded_rows: int) -> Form:
        return Form(halves, rows, None, padded_rows, None, was=file_rows.name, order=UP_GATE if halves == 2 else None,
                    layout=None, dtype=torch.bfloat16)

    return Plan(CUTLASS_MXFP4_BF16, {
        "w13": matrix(SM90_WEIGHT_INTERLEAVE, 2, i, pi, 2, h, ph), "w13_scale": matrix(SM90_SCALE_FOLD, 2, i, pi, MXFP4.block, h, ph),
        "w13_bias": bias(2, i, pi),
        "w2": matrix(SM90_WEIGHT_INTERLEAVE, 1, h, ph, 2, i, pi), "w2_scale": matrix(SM90_SCALE_FOLD, 1, h, ph, MXFP4.block, i, pi),
        "w2_bias": bias(1, h, ph),
    }, padded=(pi, ph))


RECIPES = tuple(
    Recipe("vllm", "0.33", CUTLASS_MXFP4_BF16, kind, rows, contract(CUTLASS_MXFP4_BF16),
           forced_by="vllm serve MODEL --moe-backend flashinfer_cutlass",
           source=source, _plan=cutlass_mxfp4_bf16)
    for kind, rows, source in (
        ("gpt-oss", INTERLEAVED, "convert_gpt_oss_weight_to_mxfp4_moe_kernel_format"),
        ("compressed-tensors mxfp4-pack-quantized", GATE_UP, "convert_weight_to_mxfp4_moe_kernel_format"),
    ))
