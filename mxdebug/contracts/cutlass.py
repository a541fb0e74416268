"""What FlashInfer's three cutlass_fused_moe contracts share: argument names, the bias rule, and how the call states its position.

Rules: FlashInfer 0.7.4, csrc/fused_moe/cutlass_backend/flashinfer_cutlass_fused_moe_binding.cu (checks), cutlass_fused_moe_kernels.cuh.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import MxdebugError
from ..formats import ScaleCodec
from ..layouts import LINEAR, SWIZZLE_128x4, UP_GATE, Layout
from ..reference import Activation, Parallel
from .contract import Contract
from .moe import Made
from .operand import Arguments, Operand, number

FUNCTION = "cutlass_fused_moe"
FLAGS = {"use_w4_group_scaling": False, "use_mxfp8_act_scaling": False, "use_deepseek_fp8_block_scale": False,
         "use_wfp4afp8_humming": False, "use_packed_weights": False, "min_latency_mode": False, "backend": "cutlass"}
# ActivationType -> reference.Activation.kind; Geglu is the erf GELU here
KINDS = {"Swiglu": "silu", "SwigluBias": "swiglu", "Geglu": "gelu", "GegluTanh": "gelu_tanh", "Relu2": "relu2"}


def biases() -> tuple[Operand, Operand]:
    """The two bias operands: both bf16, or neither."""
    return (Operand("w13_bias", "fc1_expert_biases", "w13 bias", torch.bfloat16, "[E, 2I]", None, UP_GATE, None, True, "added before the activation"),
            Operand("w2_bias", "fc2_expert_biases", "w2 bias", torch.bfloat16, "[E, H]", None, None, None, True,
                    "added before the router weight, on tp_rank 0 only"))


def block_scaled(codec: ScaleCodec, block: int, w13_scale: str, w2_scale: str, rows: str, hidden: str) -> tuple[Operand, ...]:
    """The layer as the SM100 kernels read it: payload as it is, viewed as int64; scales swizzled 128x4 by expert, viewed as int32.

    w13_scale, w2_scale: their arguments; rows, hidden: their sizes in words, as padded for the swizzle.
    """
    b13, b2 = biases()
    return (
        Operand("w13", "fc1_expert_weights", "w13 payload", torch.int64, "[E, 2I, H/16]", LINEAR, UP_GATE, None, False,
                "E2M1 codes, even element in the low nibble, viewed as int64"),
        Operand("w13_scale", w13_scale, "w13 block scales", torch.int32, f"[E, {rows}, H/{4 * block}]", SWIZZLE_128x4, UP_GATE, codec, False,
                f"one byte for {block} elements of K; both halves are one matrix of 2I rows"),
        b13,
        Operand("w2", "fc2_expert_weights", "w2 payload", torch.int64, "[E, H, I/16]", LINEAR, None, None, False, "as w13"),
        Operand("w2_scale", w2_scale, "w2 block scales", torch.int32, f"[E, {hidden}, I/{4 * block}]", SWIZZLE_128x4, None, codec, False, "as w13"),
        b2)


def inputs(x: Operand, *others: Operand) -> tuple[Operand, ...]:
    """Tokens, router and SwiGLU parameters, with the activations' operand in front."""
    return (x, *others,
            Operand("experts", "token_selected_experts", "selected experts", torch.int32, "[T, top-k]", None, None, None, False, "global ids"),
            Operand("router", "token_final_scales", "router weights", torch.float32, "[T, top-k]", None, None, None, False, "multiply the output"),
            *(Operand(f"swiglu_{n}", f"swiglu_{n}", f"SwiGLU {n}", torch.float32, "[E]", None, None, None, True, what) for n, what in (
                ("alpha", "inside the sigmoid; 1 where not passed"), ("beta", "added to up; 0 where not passed"),
                ("limit", "caps gate from above and clamps up; none where not passed"))))


def x_scale(layout: Layout, shape: str, codec: Any) -> Operand:
    """The block scales of quantised activations."""
    return Operand("x_scale", "input_sf", "activation scales", torch.uint8, shape, layout, None, codec, False, "one byte a block of a token; see swizzled_input_sf",
                   also=(torch.float8_e4m3fn, torch.float8_e8m0fnu))


def position(c: Contract, arguments: Arguments) -> Parallel:
    """tp_size, tp_rank, ep_size, ep_rank are arguments."""
    return Parallel(*(number(arguments, k, d) for k, d in (("tp_size", 1), ("tp_rank", 0), ("ep_size", 1), ("ep_rank", 0))))


def fixed(made: Made) -> dict[str, Any]:
    """The arguments that are no tensors."""
    names = {"silu": "Swiglu", "swiglu": "Swiglu", "gelu": "Geglu", "gelu_tanh": "GegluTanh", "relu2": "Relu2"}
    if made.activation.kind not in names:
        raise MxdebugError("activation", f"one of {', '.join(names)}", made.activation.kind, "not in this kernel")
    p = made.parallel
    return {"activation_type": names[made.activation.kind], "output_dtype": torch.bfloat16,
            "tp_size": p.tp_size, "tp_rank": p.tp_rank, "ep_size": p.ep_size, "ep_rank": p.ep_rank}


def both_biases(c: Contract, arguments: Arguments, act: Activation) -> None:
    """FlashInfer takes both biases or neither."""
    b13, b2 = (c.operand(k).get(arguments) for k in ("w13_bias", "w2_bias"))
    if (b13 is None) != (b2 is None):
        raise MxdebugError("biases", "both fc1_expert_biases and fc2_expert_biases, or neither", "one of them",
                           "FlashInfer refuses this call ('Back optional access'); pass zeros for the other")


def run(c: Contract, arguments: Arguments) -> Tensor:
    """The real kernel, as Contract.run."""
    gpus = {(90,): "SM90 (H100, H200)"}.get(c.sm, " or ".join(f"SM{s}" for s in c.sm))
    exact = "use emulate, which is bit-exact and runs anywhere" if c.sm == (90,) else "use emulate, which runs anywhere"
    needed = f"{c.path} needs a GPU of {gpus} and flashinfer-python with flashinfer-jit-cache"
    if not torch.cuda.is_available():
        raise MxdebugError("this machine", needed, f"no CUDA GPU (torch {torch.__version__})", exact)
    major, minor = torch.cuda.get_device_capability()
    if (major * 10 + minor) not in c.sm:
        raise MxdebugError("this machine", needed, f"{torch.cuda.get_device_name()}, SM{major}{minor}", exact)
    try:
        from flashinfer.fused_moe import cutlass_fused_moe
        from flashinfer.fused_moe.core import ActivationType
    except ImportError as error:
        raise MxdebugError("this machine", needed, f"no flashinfer ({error})", "pip install flashinfer-python flashinfer-jit-cache") from error

    def on_gpu(v: object) -> object:
        if isinstance(v, Tensor):
            return v.cuda()
        return [on_gpu(i) for i in v] if isinstance(v, (list, tuple)) else v

    names = {o.argument.partition("[")[0] for o in (*c.operands, *c.inputs)} | {"tp_size", "tp_rank", "ep_size", "ep_rank", "swizzled_input_sf"}
    kept = {k: on_gpu(arguments[k]) for k in names if arguments.get(k) is not None}
    # Every element must come from the kernel: start from NaN, so that unwritten memory shows.
    output = torch.full((kept["input"].shape[0], kept["fc2_expert_weights"].shape[1]), torch.nan, dtype=torch.bfloat16, device="cuda")
    kind = arguments.get("activation_type", "Swiglu")
    if getattr(kind, "name", kind) != "Swiglu":
        kept["activation_type"] = ActivationType[getattr(kind, "name", kind)]
    cutlass_fused_moe(**kept, output=output, output_dtype=torch.bfloat16, **{k: v for k, v in c.flags.items() if v is True})
    torch.cuda.synchronize()
    return output
