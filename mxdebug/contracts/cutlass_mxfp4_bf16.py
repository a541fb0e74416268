"""cutlass_fused_moe(use_w4_group_scaling=True) on SM90: MXFP4 weights, BF16 activations. vLLM's FLASHINFER_CUTLASS_MXFP4_BF16.

Rules: FlashInfer 0.7.4, csrc/fused_moe/cutlass_backend/flashinfer_cutlass_fused_moe_binding.cu (checks),
moe_gemm_mixed_utils.cu (weights), sm90_mma_array_tma_gmma_rs_warpspecialized_mixed_input_.hpp (scales).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..errors import MxdebugError
from ..formats import E8M0_SM90, MXFP4, BlockTensor
from ..layouts import SM90_SCALE_FOLD, SM90_WEIGHT_INTERLEAVE, UP_GATE
from ..reference import Activation, MoELayer, Roundings
from .contract import Arguments, Contract, Operand, Verified

_ACTIVATIONS = {"Swiglu": "silu", "SwigluBias": "swiglu", "Geglu": "gelu", "GegluTanh": "gelu_tanh", "Relu2": "relu2"}


def _operand(contract: Contract, arguments: Arguments, key: str) -> Tensor | None:
    o = contract.operand(key)
    t = o.get(arguments)
    where = f"{o.title} ({o.argument})"
    if t is None:
        if o.optional:
            return None
        raise MxdebugError(where, f"{o.dtype} {o.shape}", "none", "an argument of another kernel, or quant_scales with fewer than two tensors")
    if t.dtype != o.dtype:
        reason = {"w13": "weights viewed as int64 are another kernel's (NVFP4, MXFP8)", "w13_bias": "biases must have the output dtype",
                  "w13_scale": "scale bytes must be viewed as uint8, never cast"}.get(key.replace("w2", "w13"), "")
        raise MxdebugError(where, str(o.dtype), str(t.dtype), reason)
    return t


def activation(arguments: Arguments) -> Activation:
    """The activation that the call's arguments select. Any of alpha, beta, limit turns Swiglu into SwigluBias (FlashInfer)."""
    name = arguments.get("activation_type", "Swiglu")
    name = getattr(name, "name", name)
    parameters = {k: arguments.get(f"swiglu_{k}") for k in ("alpha", "beta", "limit")}
    for k, t in parameters.items():
        if t is not None and (not isinstance(t, Tensor) or t.dtype != torch.float32 or t.dim() != 1):
            raise MxdebugError(f"swiglu_{k}", "torch.float32 [experts on this rank]", _shown(t),
                               "a Python float where the kernel takes one value for each expert")
    given = any(t is not None for t in parameters.values())
    if name not in _ACTIVATIONS:
        raise MxdebugError("activation_type", f"one of {', '.join(_ACTIVATIONS)}", str(name), "not emulated for this kernel")
    if name in ("Swiglu", "SwigluBias") and (given or name == "SwigluBias"):
        return Activation("swiglu", **parameters)
    return Activation(_ACTIVATIONS[name])


def _shown(value: object) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _check_tokens(arguments: Arguments, tokens: int) -> None:
    """Expert ids and router weights as the binding checks them. It takes a call without router weights; no engine makes one."""
    ids, router = arguments.get("token_selected_experts"), arguments.get("token_final_scales")
    if not isinstance(ids, Tensor) or ids.dtype != torch.int32 or ids.dim() != 2 or ids.shape[0] != tokens:
        raise MxdebugError("selected experts (token_selected_experts)", f"torch.int32 [{tokens}, top-k]", _shown(ids),
                           "ids that were not cast to int32, or of another call")
    if not isinstance(router, Tensor) or router.dtype != torch.float32 or router.shape != ids.shape:
        raise MxdebugError("router weights (token_final_scales)", f"torch.float32 {list(ids.shape)}", _shown(router),
                           "router weights left in the model's dtype, or of another call")


def _decode(contract: Contract, arguments: Arguments, which: Sequence[int] | None) -> MoELayer:
    x = arguments.get("input")
    if not isinstance(x, Tensor) or x.dtype != torch.bfloat16 or x.dim() != 2:
        raise MxdebugError("activations (input)", "torch.bfloat16 [tokens, H]", _shown(x), "a dump of another path")
    _check_tokens(arguments, x.shape[0])
    act = activation(arguments)
    w13, w2 = (_operand(contract, arguments, k) for k in ("w13", "w2"))
    if w13.dim() != 3 or w2.dim() != 3 or w13.shape[0] != w2.shape[0]:
        raise MxdebugError("w13 and w2 payload", "[E, 2I, H/2] and [E, H, I/2]", f"{list(w13.shape)} and {list(w2.shape)}", "not one layer's weights")
    experts, rows, hidden = w13.shape[0], w13.shape[1], w2.shape[1]
    intermediate = 2 * w2.shape[2]
    halves = 2 if act.gated else 1
    if rows != halves * intermediate or w13.shape[2] * 2 != hidden or x.shape[1] != hidden:
        raise MxdebugError("w13 payload (fc1_expert_weights)", f"shape [{experts}, {halves * intermediate}, {hidden // 2}] for w2 {list(w2.shape)}",
                           f"shape {list(w13.shape)}, activations {list(x.shape)}", "padding on one operand only, or a gated layer read as non-gated")
    for name in ("alpha", "beta", "limit"):
        t = getattr(act, name)
        if t is not None and t.shape[0] != experts:
            raise MxdebugError(f"swiglu {name}", f"shape [{experts}], one for each expert on this rank", f"shape {list(t.shape)}", "values of all ranks, or one for all experts")
    for name, size in (("hidden size", hidden), ("intermediate size", intermediate)):
        if size % 128:
            raise MxdebugError(name, "a multiple of 128 (the scale fold works on 128 columns)", str(size), "the layer was not padded")

    def some(t: Tensor | None) -> Tensor | None:
        return t if t is None or which is None else t[list(which)]

    def weight(key: str, payload: Tensor, rows: int, columns: int) -> BlockTensor:
        scales = _operand(contract, arguments, f"{key}_scale")
        if scales.numel() != experts * rows * columns // MXFP4.block:
            o = contract.operand(f"{key}_scale")
            raise MxdebugError(f"{o.title} ({o.argument})", f"{experts * rows * columns // MXFP4.block} bytes: {experts} experts x {rows} rows x "
                               f"{columns // MXFP4.block} blocks", f"{scales.numel()} bytes, shape {list(scales.shape)}",
                               "scales of an unpadded layer, or of another block size; the kernel does not check and reads past the end")
        codes = SM90_WEIGHT_INTERLEAVE.unpack(some(payload).contiguous(), rows, columns // 2)
        blocks = SM90_SCALE_FOLD.unpack(some(scales.reshape(experts, -1)), rows, columns // MXFP4.block)
        # unpack leaves out the axis of a single expert: a rank, or a sample of tokens, may well have only one
        return BlockTensor(codes.reshape(-1, rows, columns // 2), blocks.reshape(-1, rows, columns // MXFP4.block), MXFP4)

    first, down = weight("w13", w13, rows, hidden), weight("w2", w2, hidden, intermediate)
    b13, b2 = _operand(contract, arguments, "w13_bias"), _operand(contract, arguments, "w2_bias")
    if (b13 is None) != (b2 is None):
        raise MxdebugError("biases", "both fc1_expert_biases and fc2_expert_biases, or neither", "one of them",
                           "FlashInfer refuses this call ('Back optional access'); pass zeros for the other")
    for key, b, want in (("w13_bias", b13, (experts, rows)), ("w2_bias", b2, (experts, hidden))):
        if b is not None and tuple(b.shape) != want:
            raise MxdebugError(f"{contract.operand(key).title}", f"shape {list(want)}", f"shape {list(b.shape)}", "bias not padded with its weight")
    for title, t in (("activations (input)", x), *((f"{o.title} ({o.argument})", o.get(arguments)) for o in contract.operands)):
        if t is not None and not t.is_contiguous():
            raise MxdebugError(title, "contiguous memory", f"shape {list(t.shape)} with strides {list(t.stride())}",
                               "a transposed or sliced view: FlashInfer 0.7.4 hands the kernel a pointer and no strides (seen on an H200)")
    b13, b2 = some(b13), some(b2)
    act = replace(act, **{name: some(getattr(act, name)) for name in ("alpha", "beta", "limit")})
    up, gate = (slice(0, intermediate), slice(intermediate, rows) if act.gated else None)
    return MoELayer(
        gate=first[:, gate] if gate else None, up=first[:, up], down=down, activation=act,
        gate_bias=b13[:, gate] if gate and b13 is not None else None, up_bias=None if b13 is None else b13[:, up],
        down_bias=b2, scale=E8M0_SM90)


def _run(contract: Contract, arguments: Arguments) -> Tensor:
    needed = f"{contract.path} needs a GPU of SM90 (H100, H200) and flashinfer-python with flashinfer-jit-cache"
    if not torch.cuda.is_available():
        raise MxdebugError("this machine", needed, f"no CUDA GPU (torch {torch.__version__})", "use emulate, which is bit-exact and runs anywhere")
    major, minor = torch.cuda.get_device_capability()
    if (major * 10 + minor) not in contract.sm:
        raise MxdebugError("this machine", needed, f"{torch.cuda.get_device_name()}, SM{major}{minor}", "use emulate, which is bit-exact and runs anywhere")
    try:
        from flashinfer.fused_moe import cutlass_fused_moe
    except ImportError as error:
        raise MxdebugError("this machine", needed, f"no flashinfer ({error})", "pip install flashinfer-python flashinfer-jit-cache") from error

    def on_gpu(v: object) -> object:
        if isinstance(v, Tensor):
            return v.cuda()
        return [on_gpu(i) for i in v] if isinstance(v, (list, tuple)) else v

    names = ("input", "token_selected_experts", "token_final_scales", "fc1_expert_weights", "fc2_expert_weights", "quant_scales",
             "fc1_expert_biases", "fc2_expert_biases", "swiglu_alpha", "swiglu_beta", "swiglu_limit", "tp_size", "tp_rank", "ep_size", "ep_rank")
    kept = {k: on_gpu(arguments[k]) for k in names if arguments.get(k) is not None}
    # Every element must come from the kernel: start from NaN, so that unwritten memory shows.
    output = torch.full((kept["input"].shape[0], kept["fc2_expert_weights"].shape[1]), torch.nan, dtype=torch.bfloat16, device="cuda")
    kind = arguments.get("activation_type", "Swiglu")
    if getattr(kind, "name", kind) != "Swiglu":
        from flashinfer.fused_moe.core import ActivationType

        kept["activation_type"] = ActivationType[getattr(kind, "name", kind)]
    cutlass_fused_moe(**kept, output=output, output_dtype=torch.bfloat16, use_w4_group_scaling=True)
    torch.cuda.synchronize()
    return output


CONTRACT = Contract(
    path="mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16",
    function="cutlass_fused_moe",
    flags={"use_w4_group_scaling": True, "use_mxfp8_act_scaling": False, "use_deepseek_fp8_block_scale": False,
           "use_wfp4afp8_humming": False, "use_packed_weights": False, "min_latency_mode": False, "backend": "cutlass"},
    sm=(90,),
    operands=(
        Operand("w13", "fc1_expert_weights", "w13 payload", torch.uint8, "[E, 2I, H/2]", SM90_WEIGHT_INTERLEAVE, UP_GATE, None, False,
                "E2M1 codes, even element in the low nibble before the interleave"),
        Operand("w13_scale", "quant_scales[0]", "w13 block scales", torch.uint8, "[E, 2I/64, H/128, 16, 16]", SM90_SCALE_FOLD, UP_GATE, E8M0_SM90, False,
                "one byte for 32 elements of K"),
        Operand("w13_bias", "fc1_expert_biases", "w13 bias", torch.bfloat16, "[E, 2I]", None, UP_GATE, None, True, "added before the activation"),
        Operand("w2", "fc2_expert_weights", "w2 payload", torch.uint8, "[E, H, I/2]", SM90_WEIGHT_INTERLEAVE, None, None, False, "as w13"),
        Operand("w2_scale", "quant_scales[1]", "w2 block scales", torch.uint8, "[E, H/64, I/128, 16, 16]", SM90_SCALE_FOLD, None, E8M0_SM90, False, "as w13"),
        Operand("w2_bias", "fc2_expert_biases", "w2 bias", torch.bfloat16, "[E, H]", None, None, None, True,
                "added before the router weight, on tp_rank 0 only"),
    ),
    roundings=Roundings(gemm1=torch.bfloat16, activation=torch.bfloat16, gemm2=torch.bfloat16, output=torch.bfloat16, accumulate=32, fast_math=True),
    alignment="H % 128 == 0 and I % 128 == 0; w13 rows are [w3; w1]",
    verified=(
        Verified("recorded on an H200", "FlashInfer 0.7.4, torch 2.11", "14 calls, right and wrong ones, every output bit-identical"),
        Verified("run on an H200", "FlashInfer 0.7.4, torch 2.11", "229 calls, clean and with every fault, up to 32 experts of 2880 x 2880 and 512 tokens: "
                 "all but 0.87 in 10,000 outputs bit-identical"),
    ),
    notes=(
        "scale bytes are read as byte << 23: 0x00 is 0.0 and 0xFF is inf",
        "gate is capped at limit from above only, up is clamped to [-limit, limit]",
        "shapes of quant_scales are not checked by the kernel",
    ),
    _decode=_decode,
    _run=_run,
)
