"""trtllm_fp4_block_scale_moe and trtllm_fp4_block_scale_routed_moe on SM100: three contracts of one kernel family, told apart by dtypes.

vLLM's mxfp4/FLASHINFER_TRTLLM_MXFP4_BF16, mxfp4/FLASHINFER_TRTLLM_MXFP4_MXFP8 and nvfp4/FLASHINFER_TRTLLM.
Rules: FlashInfer 0.7.4, csrc/trtllm_fused_moe_kernel_launcher.cu (checks, formats), trtllm_fused_moe_runner.cu (scalars, shuffle),
fused_moe/core.py (index functions); NVIDIA/TensorRT-LLM trtllmGen_bmm_export headers (the GEMMs themselves are closed cubins).
"""

from __future__ import annotations

from typing import Any

import torch

from ..errors import MxdebugError
from ..formats import E4M3_SCALE, E8M0, MXFP4, MXFP8, NVFP4, BlockFormat, ScaleCodec
from ..layouts import INTERLEAVED_UP, LINEAR, SHUFFLE_32, SWIZZLE_128x4
from ..reference import Activation, Roundings
from ..requantise import QUANTISERS
from .activation import NUMBERS
from .contract import Contract, Verified
from .moe import Made, not_called, position_by_offset
from .operand import Arguments, Operand
from .routing import read_routing

FUNCTION = "trtllm_fp4_block_scale_routed_moe"
MONOLITHIC = "trtllm_fp4_block_scale_moe"
# Geglu exists too, but whether it is erf or tanh is not in open code, so it is not emulated.
_KINDS = {"Swiglu": "silu", "Relu2": "relu2"}


def _operands(scales: ScaleCodec, block: int, biases: bool) -> tuple[Operand, ...]:
    w13_rows = "rows u0,g0,u1,g1,..., then shuffled in blocks of 32 (a layer without gate: shuffled only)"
    out = [
        Operand("w13", "gemm1_weights", "w13 payload", torch.uint8, "[E, 2I, H/2]", LINEAR, INTERLEAVED_UP, None, False, w13_rows, SHUFFLE_32),
        Operand("w13_scale", "gemm1_weights_scale", "w13 block scales", torch.float8_e4m3fn, f"[E, 2I, H/{block}]", SWIZZLE_128x4, INTERLEAVED_UP, scales,
                False, "rows as the payload's, then swizzled", SHUFFLE_32),
        Operand("w13_bias", "gemm1_bias", "w13 bias", torch.float32, "[E, 2I]", None, INTERLEAVED_UP, None, True, "rows as the payload's", SHUFFLE_32),
        Operand("w2", "gemm2_weights", "w2 payload", torch.uint8, "[E, H, I/2]", LINEAR, None, None, False, "shuffled in blocks of 32", SHUFFLE_32),
        Operand("w2_scale", "gemm2_weights_scale", "w2 block scales", torch.float8_e4m3fn, f"[E, H, I/{block}]", SWIZZLE_128x4, None, scales, False,
                "rows as the payload's, then swizzled", SHUFFLE_32),
        Operand("w2_bias", "gemm2_bias", "w2 bias", torch.float32, "[E, H]", None, None, None, True, "rows as the payload's; added on every rank", SHUFFLE_32),
    ]
    return tuple(o for o in out if biases or not o.key.endswith("bias"))


def _inputs(activations: BlockFormat | None) -> tuple[Operand, ...]:
    def scalar(key: str, argument: str, title: str, meaning: str, dtype: torch.dtype = torch.float32, optional: bool = False) -> Operand:
        return Operand(key, argument, title, dtype, "[E]", None, None, None, optional, meaning)

    x = {None: (torch.bfloat16, "[tokens, H]", "as the model computes them"), MXFP8: (torch.float8_e4m3fn, "[tokens, H]", "E4M3 elements of MXFP8"),
         NVFP4: (torch.uint8, "[tokens, H/2]", "E2M1 codes of NVFP4")}[activations]
    out = [Operand("x", "hidden_states", "activations", x[0], x[1], None, None, None, False, x[2])]
    if activations is not None:
        codec = E8M0 if activations is MXFP8 else E4M3_SCALE
        out.append(Operand("x_scale", "hidden_states_scale", "activation scales", torch.float8_e4m3fn, f"[T, H/{activations.block}]", LINEAR, None, codec,
                           False, "one byte a block of a token, never swizzled", also=() if activations is NVFP4 else (torch.uint8, torch.float8_e8m0fnu)))
    if activations is NVFP4:
        out += [scalar("g1_scale_c", "output1_scale_scalar", "w13 output scale", "w13 alpha x what the inner activation is multiplied with before it is quantised"),
                scalar("w13_alpha", "output1_scale_gate_scalar", "w13 alpha", "multiplies GEMM1's sums: weight global scale x input global scale"),
                scalar("w2_alpha", "output2_scale_scalar", "w2 alpha", "multiplies GEMM2's sums: weight global scale x input global scale")]
    out += [Operand("experts", "topk_ids[0]", "selected experts", torch.int32, "[T, top-k]", None, None, None, False, "global ids"),
            Operand("router", "topk_ids[1]", "router weights", torch.float32, "[T, top-k]", None, None, None, False, "multiply the output")]
    raw = ", divided by w13 alpha" if activations is NVFP4 else ""
    return (*out, scalar("swiglu_alpha", "gemm1_alpha", "SwiGLU alpha", "inside the sigmoid; 1 where not passed", optional=True),
            scalar("swiglu_beta", "gemm1_beta", "SwiGLU beta", f"added to up{raw}; 0 where not passed", optional=True),
            scalar("swiglu_limit", "gemm1_clamp_limit", "SwiGLU limit", f"caps gate from above and clamps up{raw}; none where not passed", optional=True))


def _fixed(made: Made) -> dict[str, Any]:
    names = {"silu": "Swiglu", "swiglu": "Swiglu", "relu2": "Relu2"}
    if made.activation.kind not in names:
        raise MxdebugError("activation", f"one of {', '.join(names)}", made.activation.kind, "trtllm-gen's Geglu: whether it is erf or tanh is not in open code")
    p = made.parallel
    return {"topk_ids": (), "num_experts": made.experts * p.ep_size, "top_k": made.top_k, "n_group": None, "topk_group": None,
            "intermediate_size": made.intermediate, "local_expert_offset": made.experts * p.ep_rank, "local_num_experts": made.experts,
            "routed_scaling_factor": None, "routing_method_type": 1, "do_finalize": True, "activation_type": NUMBERS[names[made.activation.kind]]}


def _refuses(c: Contract, arguments: Arguments, act: Activation) -> None:
    if arguments.get("do_finalize") is False:
        raise MxdebugError("do_finalize", "True", "False", "the output is then no sum over experts; not emulated")
    stated, intermediate = arguments.get("intermediate_size"), 2 * c.operand("w2").get(arguments).shape[2]
    if stated is not None and stated != intermediate:
        raise MxdebugError("intermediate_size", f"{intermediate}, as w2's columns say", str(stated), "the size before padding, or of all ranks")
    if c.activations is NVFP4 and (arguments.get("gemm1_bias") is not None or arguments.get("gemm2_bias") is not None):
        raise MxdebugError("biases", "none: this kernel adds them before scaling, and no engine passes them", "a bias", "biases of an MXFP4 layer")


def _contract(path: str, weights: BlockFormat, activations: BlockFormat | None) -> Contract:
    dtype = {None: torch.bfloat16, MXFP8: torch.float8_e4m3fn, NVFP4: torch.uint8}[activations]
    return Contract(
        path=path, function=FUNCTION, flags={}, sm=(100, 103), weights=weights, activations=activations,
        operands=_operands(E4M3_SCALE if weights is NVFP4 else E8M0, weights.block, weights is MXFP4),
        inputs=_inputs(activations), kinds=_KINDS,
        roundings=Roundings(gemm1=None, activation=torch.bfloat16 if activations is None else None, gemm2=torch.bfloat16, output=torch.bfloat16,
                            requantise=None if activations is None else QUANTISERS[activations.name], bias_in_gemm=True),
        multiple=(64, 256) if weights is NVFP4 else (128, 256),
        alignment=f"H % 256 == 0 and I % {64 if weights is NVFP4 else 128} == 0; w13 rows are u0,g0,u1,g1,... shuffled in blocks of 32",
        verified=(
            Verified("the engine's converter", "vLLM 0.33", "operands byte-exact against golden tensors"),
            Verified("a reading of the source", "FlashInfer 0.7.4", "dtypes, layouts, scalars; the GEMMs are closed cubins of SM100 and were not run"),
        ),
        notes=(
            "the output has as many columns as the memory that it is given: vLLM passes the hidden size before padding",
            "block scales are passed as float8_e4m3fn" + (", though the bytes are E8M0" if weights is MXFP4 else ""),
            "formats are inferred from element counts: a wrong intermediate_size can turn MXFP4 into NVFP4",
            *(("the inner activation is requantised inside GEMM1; how it rounds is not in open code",) if activations is not None else ()),
        ),
        position=lambda c, arguments: position_by_offset(arguments, "local_num_experts"), fixed=_fixed,
        belongs=lambda arguments: getattr(arguments.get("hidden_states"), "dtype", None) == dtype,
        refuses=_refuses, _run=not_called, clamps_before_scaling=activations is NVFP4, routing=read_routing, aliases=(MONOLITHIC,), crops=True)


CONTRACTS = (
    _contract("mxfp4/FLASHINFER_TRTLLM_MXFP4_BF16", MXFP4, None),
    _contract("mxfp4/FLASHINFER_TRTLLM_MXFP4_MXFP8", MXFP4, MXFP8),
    _contract("nvfp4/FLASHINFER_TRTLLM", NVFP4, NVFP4),
)
