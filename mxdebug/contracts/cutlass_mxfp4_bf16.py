"""cutlass_fused_moe(use_w4_group_scaling=True) on SM90: MXFP4 weights, BF16 activations. vLLM's FLASHINFER_CUTLASS_MXFP4_BF16.

Rules: FlashInfer 0.7.4, moe_gemm_mixed_utils.cu (weights), sm90_mma_array_tma_gmma_rs_warpspecialized_mixed_input_.hpp (scales).
"""

from __future__ import annotations

import torch

from ..formats import E8M0_SM90, MXFP4
from ..layouts import SM90_SCALE_FOLD, SM90_WEIGHT_INTERLEAVE, UP_GATE
from ..reference import Roundings
from . import cutlass
from .contract import Contract, Verified
from .operand import Operand

CONTRACT = Contract(
    path="mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16",
    function=cutlass.FUNCTION,
    flags={**cutlass.FLAGS, "use_w4_group_scaling": True},
    sm=(90,),
    weights=MXFP4,
    activations=None,
    operands=(
        Operand("w13", "fc1_expert_weights", "w13 payload", torch.uint8, "[E, 2I, H/2]", SM90_WEIGHT_INTERLEAVE, UP_GATE, None, False,
                "E2M1 codes, even element in the low nibble before the interleave"),
        Operand("w13_scale", "quant_scales[0]", "w13 block scales", torch.uint8, "[E, 2I/64, H/128, 16, 16]", SM90_SCALE_FOLD, UP_GATE, E8M0_SM90, False,
                "one byte for 32 elements of K"),
        cutlass.biases()[0],
        Operand("w2", "fc2_expert_weights", "w2 payload", torch.uint8, "[E, H, I/2]", SM90_WEIGHT_INTERLEAVE, None, None, False, "as w13"),
        Operand("w2_scale", "quant_scales[1]", "w2 block scales", torch.uint8, "[E, H/64, I/128, 16, 16]", SM90_SCALE_FOLD, None, E8M0_SM90, False, "as w13"),
        cutlass.biases()[1],
    ),
    inputs=cutlass.inputs(Operand("x", "input", "activations", torch.bfloat16, "[tokens, H]", None, None, None, False, "as the model computes them")),
    kinds=cutlass.KINDS,
    roundings=Roundings(gemm1=torch.bfloat16, activation=torch.bfloat16, gemm2=torch.bfloat16, output=torch.bfloat16, accumulate=32, fast_math=True),
    multiple=(128, 128),
    alignment="H % 128 == 0 and I % 128 == 0; w13 rows are [w3; w1]",
    verified=(
        Verified("recorded on an H200", "FlashInfer 0.7.4, torch 2.11", "14 calls, right and wrong ones, every output bit-identical"),
        Verified("run on an H200", "FlashInfer 0.7.4, torch 2.11", "256 calls, clean and with every fault, up to 32 experts of 2880 x 2880 and 512 tokens: "
                 "all but 0.84 in 10,000 outputs bit-identical"),
    ),
    notes=(
        "scale bytes are read as byte << 23: 0x00 is 0.0 and 0xFF is inf",
        "gate is capped at limit from above only, up is clamped to [-limit, limit]",
        "shapes of quant_scales are not checked by the kernel",
    ),
    position=cutlass.position,
    fixed=cutlass.fixed,
    belongs=lambda arguments: True,
    refuses=cutlass.both_biases,
    _run=cutlass.run,
)
