"""cutlass_fused_moe on SM100 with NVFP4 weights and activations. vLLM's nvfp4/FLASHINFER_CUTLASS.

Rules: FlashInfer 0.7.4, flashinfer_cutlass_fused_moe_binding.cu (getQuantParams, NVFP4: six quant_scales), cutlass_fused_moe_kernels.cuh
(expandInputRows, doActivation), quantization_utils.cuh (cvt_warp_fp16_to_fp4), moe_gemm_kernels.h (padding of block scales).
"""

from __future__ import annotations


import torch

from ..errors import MxdebugError
from ..formats import E4M3_SCALE, NVFP4
from ..layouts import SWIZZLE_128x4
from ..reference import Activation, Roundings
from ..requantise import NVFP4_CUDA
from . import cutlass
from .contract import Contract, Verified
from .operand import Arguments, Operand


def _six_scales(arguments: Arguments) -> bool:
    scales, weights = arguments.get("quant_scales"), arguments.get("fc1_expert_weights")
    return isinstance(scales, (list, tuple)) and len(scales) == 6 and getattr(weights, "dtype", None) in (torch.int64, torch.uint8)


def _scalar(key: str, argument: str, title: str, shape: str, meaning: str) -> Operand:
    return Operand(key, argument, title, torch.float32, shape, None, None, None, False, meaning)


def _refuses(c: Contract, arguments: Arguments, act: Activation) -> None:
    cutlass.both_biases(c, arguments, act)
    intermediate = c.operand("w2").get(arguments).shape[2] * 16
    if not act.gated and 1 <= intermediate % 128 <= 64:
        raise MxdebugError("intermediate size", "I % 128 in 0, 65..127 for a layer without gate", str(intermediate),
                           "FlashInfer 0.7.4 checks w13's block scales for rows padded to 64 and reads them as padded to 128")



CONTRACT = Contract(
    path="nvfp4/FLASHINFER_CUTLASS",
    function=cutlass.FUNCTION,
    flags=cutlass.FLAGS,
    sm=(100, 103, 120, 121),
    weights=NVFP4,
    activations=NVFP4,
    operands=cutlass.block_scaled(E4M3_SCALE, 16, "quant_scales[1]", "quant_scales[4]", "2I to 128", "H to 128"),
    inputs=cutlass.inputs(
        Operand("x", "input", "activations", torch.uint8, "[tokens, H/2]", None, None, None, False, "E2M1 codes of NVFP4"),
        cutlass.x_scale(SWIZZLE_128x4, "[T to 128, H/16]", E4M3_SCALE),
        _scalar("a1_gscale", "quant_scales[0]", "1 / w13 input scale", "[E] or []", "multiplies bf16 activations before the kernel quantises them; not read for quantised ones"),
        _scalar("w13_alpha", "quant_scales[2]", "w13 alpha", "[E]", "multiplies GEMM1's sums: weight global scale x input global scale"),
        _scalar("a2_gscale", "quant_scales[3]", "1 / w2 input scale", "[E] or []", "multiplies the inner activation before it is quantised: 1 / its global scale"),
        _scalar("w2_alpha", "quant_scales[5]", "w2 alpha", "[E]", "multiplies GEMM2's sums: weight global scale x input global scale")),
    kinds=cutlass.KINDS,
    roundings=Roundings(gemm1=torch.bfloat16, activation=torch.bfloat16, gemm2=torch.bfloat16, output=torch.bfloat16, fast_math=True, requantise=NVFP4_CUDA),
    multiple=(32, 32),
    alignment="H % 32 == 0 and I % 32 == 0, block scales padded to 128 rows and 4 columns; w13 rows are [w3; w1]",
    verified=(
        Verified("the engine's converter", "vLLM 0.33", "operands byte-exact against golden tensors"),
        Verified("a reading of the source", "FlashInfer 0.7.4", "dtypes, layouts, order of roundings; the kernel itself needs SM100 and was not run"),
    ),
    notes=(
        "swizzled_input_sf says how activation scales lie: True (the default) 128x4 over all tokens, False linear",
        "the inner activation is requantised to NVFP4 with approximate reciprocals; FLASHINFER_NVFP4_4OVER6 and "
        "FLASHINFER_DISABLE_FP4_QUANT_FAST_MATH change how, and no dump shows them",
        "a tuned call may fuse the weighted sum into GEMM2; then bf16 is added in no fixed order",
    ),
    position=cutlass.position,
    fixed=cutlass.fixed,
    belongs=_six_scales,
    refuses=_refuses,
    _run=cutlass.run,
)
