"""cute_dsl_fused_moe_nvfp4 on SM100: NVFP4 weights and activations in CuTe-DSL kernels. vLLM's nvfp4/FLASHINFER_CUTEDSL.

Rules: FlashInfer 0.7.4, fused_moe/cute_dsl/fused_moe.py, blackwell/blockscaled_contiguous_gather_grouped_gemm_act_fusion.py (GEMM1),
blockscaled_contiguous_grouped_gemm_finalize_fusion.py (GEMM2), cute_dsl/utils.py convert_sf_to_mma_layout (scales).
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import MxdebugError
from ..formats import E4M3_SCALE, NVFP4
from ..layouts import GROUPS_64, LINEAR, SWIZZLE_128x4
from ..reference import Activation, Roundings
from ..requantise import NVFP4_CUTEDSL
from .activation import NUMBERS
from .contract import Contract, Verified
from .moe import Made, not_called, position_by_offset
from .operand import MMA, Arguments, Operand

_KINDS = {"Swiglu": "silu", "GegluTanh": "gelu_tanh", "Relu2": "relu2"}


def _scalar(key: str, argument: str, title: str, shape: str, meaning: str, optional: bool = False) -> Operand:
    return Operand(key, argument, title, torch.float32, shape, None, None, None, optional, meaning)


def _fixed(made: Made) -> dict[str, Any]:
    names = {"silu": "Swiglu", "swiglu": "Swiglu", "gelu_tanh": "GegluTanh", "relu2": "Relu2"}
    if made.activation.kind not in names:
        raise MxdebugError("activation", f"one of {', '.join(names)}", made.activation.kind, "not in this kernel")
    p = made.parallel
    return {"num_experts": made.experts * p.ep_size, "top_k": made.top_k, "num_local_experts": made.experts, "local_expert_offset": made.experts * p.ep_rank,
            "activation_type": NUMBERS[names[made.activation.kind]]}


def _refuses(c: Contract, arguments: Arguments, act: Activation) -> None:
    for name, off in (("per_token_scale", None), ("situ_beta", None), ("situ_linear_beta", None)):
        if arguments.get(name, off) is not off:
            raise MxdebugError(name, "none", "one", "not emulated: SiTU, and one global scale a token")


def _w4a4(arguments: Arguments) -> bool:
    """cute_dsl_fused_moe is called by cute_dsl_fused_moe_nvfp4, so that one call of an engine leaves two dumps."""
    return arguments.get("quant_mode", "w4a4") in ("w4a4", "nvfp4") and not arguments.get("swap_ab", False)


CONTRACT = Contract(
    path="nvfp4/FLASHINFER_CUTEDSL",
    function="cute_dsl_fused_moe_nvfp4",
    flags={},
    sm=(100, 103),
    weights=NVFP4,
    activations=NVFP4,
    operands=(
        Operand("w13", "w1_weight", "w13 payload", torch.uint8, "[E, 2I, H/2]", LINEAR, GROUPS_64, None, False, "64 rows of up, 64 of gate, and so on"),
        Operand("w13_scale", "w1_weight_sf", "w13 block scales", torch.float8_e4m3fn, "[32, 4, 2I/128, 4, H/64, E]", SWIZZLE_128x4, GROUPS_64, E4M3_SCALE, False,
                "rows as the payload's, then swizzled; passed as a strided view", None, MMA, (torch.uint8,)),
        Operand("w2", "w2_weight", "w2 payload", torch.uint8, "[E, H, I/2]", LINEAR, None, None, False, "rows as they are"),
        Operand("w2_scale", "w2_weight_sf", "w2 block scales", torch.float8_e4m3fn, "[32, 4, H/128, 4, I/64, E]", SWIZZLE_128x4, None, E4M3_SCALE, False,
                "swizzled; passed as a strided view", None, MMA, (torch.uint8,)),
    ),
    inputs=(
        Operand("x", "x", "activations", torch.uint8, "[tokens, H/2]", None, None, None, False, "E2M1 codes of NVFP4"),
        Operand("x_scale", "x_sf", "activation scales", torch.float8_e4m3fn, "[T, H/16, 1]", LINEAR, None, E4M3_SCALE, False, "one byte a block of a token, never swizzled", also=(torch.uint8,)),
        _scalar("w13_alpha", "w1_alpha", "w13 alpha", "[E]", "multiplies GEMM1's sums: weight global scale x input global scale"),
        _scalar("a2_gscale", "fc2_input_scale", "1 / w2 input scale", "[1] or [E]", "multiplies the inner activation before it is quantised: 1 / its global scale; only element 0 is read"),
        _scalar("w2_alpha", "w2_alpha", "w2 alpha", "[E]", "multiplies GEMM2's sums: weight global scale x input global scale"),
        Operand("experts", "token_selected_experts", "selected experts", torch.int32, "[T, top-k]", None, None, None, False, "global ids"),
        Operand("router", "token_final_scales", "router weights", torch.float32, "[T, top-k]", None, None, None, False, "multiply the output"),
        *(_scalar(f"swiglu_{n}", f"swiglu_{n}", f"SwiGLU {n}", "one number", what, True) for n, what in (
            ("alpha", "inside the sigmoid"), ("beta", "added to up"), ("limit", "caps gate from above and clamps up"))),
    ),
    kinds=_KINDS,
    roundings=Roundings(gemm1=None, activation=None, gemm2=None, output=torch.bfloat16, fast_math=True, requantise=NVFP4_CUTEDSL, fused=True),
    multiple=(64, 256),
    alignment="H % 256 == 0 and I % 64 == 0 (128 without gate); w13 rows in groups of 64: up, gate, up, gate",
    verified=(
        Verified("the engine's converter", "vLLM 0.33", "operands byte-exact against golden tensors"),
        Verified("a reading of the source", "FlashInfer 0.7.4", "dtypes, layouts, scalars; the kernel itself needs SM100 and was not run"),
    ),
    notes=(
        "the inner activation is requantised inside GEMM1",
        "use_fused_finalize (the default) adds bf16 in no fixed order",
    ),
    position=lambda c, arguments: position_by_offset(arguments, "num_local_experts", optional=True), fixed=_fixed, belongs=_w4a4, refuses=_refuses, _run=not_called, floats=True,
    aliases=("cute_dsl_fused_moe",), first_only=("a2_gscale",))
