"""cutlass_fused_moe(use_mxfp8_act_scaling=True) on SM100: MXFP4 weights, MXFP8 activations. vLLM's FLASHINFER_CUTLASS_MXFP4_MXFP8.

Rules: FlashInfer 0.7.4, flashinfer_cutlass_fused_moe_binding.cu (getQuantParams, MXFP8 x MXFP4), cutlass_fused_moe_kernels.cuh
(expandInputRows, doActivation), quantization_utils.cuh (get_sf_out_offset_128x4, cvt_warp_fp16_to_mxfp8).
"""

from __future__ import annotations

import torch

from ..formats import E8M0, MXFP4, MXFP8
from ..layouts import SWIZZLE_128x4
from ..reference import Roundings
from ..requantise import MXFP8_CUDA
from . import cutlass
from .contract import Contract, Verified
from .operand import Operand

_UNREAD = "checked for shape and dtype, then never read: any value gives the same output"
CONTRACT = Contract(
    path="mxfp4/FLASHINFER_CUTLASS_MXFP4_MXFP8",
    function=cutlass.FUNCTION,
    flags={**cutlass.FLAGS, "use_mxfp8_act_scaling": True},
    sm=(100, 103, 120, 121),
    weights=MXFP4,
    activations=MXFP8,
    operands=cutlass.block_scaled(E8M0, 32, "quant_scales[0]", "quant_scales[2]", "2I", "H"),
    inputs=cutlass.inputs(
        Operand("x", "input", "activations", torch.float8_e4m3fn, "[tokens, H]", None, None, None, False, "E4M3 elements of MXFP8"),
        cutlass.x_scale(SWIZZLE_128x4, "[T to 128, H/32]", E8M0),
        Operand("w13_global", "quant_scales[1]", "w13 global scale", torch.float32, "[E]", None, None, None, False, _UNREAD),
        Operand("w2_global", "quant_scales[3]", "w2 global scale", torch.float32, "[E]", None, None, None, False, _UNREAD)),
    kinds=cutlass.KINDS,
    roundings=Roundings(gemm1=torch.bfloat16, activation=torch.bfloat16, gemm2=torch.bfloat16, output=torch.bfloat16, fast_math=True, requantise=MXFP8_CUDA),
    multiple=(128, 128),
    alignment="H % 128 == 0 and I % 128 == 0; w13 rows are [w3; w1]",
    verified=(
        Verified("the engine's converter", "vLLM 0.33", "operands byte-exact against golden tensors"),
        Verified("a reading of the source", "FlashInfer 0.7.4", "dtypes, layouts, order of roundings; the kernel itself needs SM100 and was not run"),
    ),
    notes=(
        "swizzled_input_sf says how activation scales lie: True (the default) 128x4 over all tokens, False linear",
        "the inner activation is requantised to MXFP8: exponent rounded up (ceil), a block of at most 448 * 2^-127 becomes 0",
        "a tuned call may fuse the weighted sum into GEMM2; then bf16 is added in no fixed order",
    ),
    position=cutlass.position,
    fixed=cutlass.fixed,
    belongs=lambda arguments: True,
    refuses=cutlass.both_biases,
    _run=cutlass.run,
)
