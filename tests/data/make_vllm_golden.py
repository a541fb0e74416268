"""Run vLLM 0.33's own weight converters on made tensors and keep what the FlashInfer kernels would get.

    python tests/data/make_vllm_golden.py SOURCES

SOURCES is a folder that holds vLLM 0.33's sources: SOURCES/vllm/model_executor/layers/... vLLM need not be installed and no GPU be there:
vllm_sources.py says which of vLLM's modules are executed and what stands in for the rest. FlashInfer must be installed.
The inputs are not stored: `made` computes them, here and in the tests. A file whose contents come out the same is left as it is.

CASES, path mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16
-----------------------------------------------
vLLM's padding and converter on the parameters of `loaded`: vllm-NAME.safetensors with w13, w13_scale, w13_bias, w2, w2_scale, w2_bias.

PATH_CASES, all other paths
---------------------------
vLLM's own layer from end to end: RoutedExperts allocates and loads, its method's process_weights_after_loading converts and folds, the
experts' apply calls the kernel, where a recorder notes the arguments. Names are format-path-checkpoint-what: aligned and unaligned sizes,
non-gated, interleaved (gate and up rows alternate in the checkpoint), differ (w1 and w3 have global scales of their own).
vllm-NAME.safetensors holds what is not None of

    w13, w2                  uint8 [E, rows, K/2]
    w13_scale, w2_scale      under the shape that vLLM gives them (CUTEDSL: before the 6-D view that the kernel gets).
                             NVFP4 float8_e4m3fn; MXFP4 CUTLASS uint8; MXFP4 TRTLLM float8_e4m3fn, which holds E8M0 bytes
    w13_bias, w2_bias        MXFP4 only, [E, rows]. CUTLASS bfloat16; TRTLLM float32, of values that loading rounded to bf16
    w13_alpha, w2_alpha      float32 [E]. NVFP4: g1_alphas, g2_alphas, input scale folded in. MXFP4 CUTLASS: fake_input_scale, ones for both
    a1_gscale, a2_gscale     float32 [E]. NVFP4: 1 / the largest input scale, for the quantiser of the input and of the inner activation
    g1_scale_c               float32 [E]. NVFP4 TRTLLM: output1_scale_scalar
    swiglu_alpha, _beta, _limit  float32 [E] as the kernel gets them; 0-d where it takes a number (CUTEDSL)

Metadata: `paths` (JSON list; MXFP4 TRTLLM has one converter for two paths, with equal results), `activation_scales_swizzled` (JSON object
by path; null: activations are bf16), `warnings` (JSON list of what vLLM logged), `function` (FlashInfer's) and `call` (JSON object: for
each argument that is one of the tensors above "operand", and "dtype", "shape", "stride" after vLLM's views; numbers, flags and None as
they are).
vllm-refusals.json: what vLLM answers to the cases of REFUSED.

How a checkpoint is loaded (V is vllm/model_executor/layers)
------------------------------------------------------------
gpt-oss: V/quantization/mxfp4.py GptOssMxfp4MoEMethod. Fused tensors, rows g0,u0,g1,u1, go into the start of zeroed parameters, padded by
  mxfp4_round_up_hidden_size_and_intermediate_size (V/fused_moe/oracle/mxfp4.py); biases into bf16. SwiGLU is 1.702, 1.0, 7.0 whatever
  the layer says. A layer without biases fails an assertion in the converter.
compressed-tensors mxfp4-pack-quantized: with dynamic FP8 activations in its config CompressedTensorsW4A8Mxfp4MoEMethod, which is
  Mxfp4MoEMethod but for `weight_packed` (without them CompressedTensorsW4A4Mxfp4MoEMethod, which never chooses these paths). w1 and w3
  go into the start of their own padded halves, biases into bf16. Of the layer's SwiGLU parameters only the limit is passed on.
ModelOpt NVFP4: V/quantization/modelopt.py ModelOptNvFp4FusedMoE. weight_scale_2 and input_scale are multipliers, held as [E, 2]; of
  weight_scale_2 w1's is taken, and where w3's is not close a warning logged. Nothing is padded before the converter.
compressed-tensors nvfp4-pack-quantized: V/quantization/compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_w4a4_nvfp4.py
  CompressedTensorsW4A4Nvfp4MoEMethod. weight_global_scale and input_global_scale are divisors; w1's weight_global_scale is taken, with
  the same warning under its own name; then all are inverted, 1 / divisor.
NVFP4, both: the largest input scale of all experts and of w1 and w3 serves all (amax_for_moe_activation_quant), a_gscale is 1 / it
  (make_nvfp4_moe_quant_config), and the experts' process_weights_after_loading multiplies it into the alphas in place.
A non-gated layer's up projection is loaded as w1, the only part of its w13.
"""

from __future__ import annotations

import importlib
import json
import sys
import zlib
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

import torch
from torch import Tensor

HERE = Path(__file__).parent
GPT_OSS, COMPRESSED = "gpt-oss", "compressed-tensors mxfp4-pack-quantized"
MODELOPT, COMPRESSED_NVFP4 = "ModelOpt NVFP4", "compressed-tensors nvfp4-pack-quantized"
# name: checkpoint kind, experts, hidden, intermediate. Two need padding in both directions, one in none.
CASES = {
    "gpt-oss-unaligned": (GPT_OSS, 3, 160, 96),
    "gpt-oss-aligned": (GPT_OSS, 2, 256, 128),
    "compressed-unaligned": (COMPRESSED, 2, 160, 192),
}
BACKEND = "FLASHINFER_CUTLASS_MXFP4_BF16"

CUTLASS_MXFP8 = ("mxfp4/FLASHINFER_CUTLASS_MXFP4_MXFP8",)
TRTLLM_MXFP4 = ("mxfp4/FLASHINFER_TRTLLM_MXFP4_MXFP8", "mxfp4/FLASHINFER_TRTLLM_MXFP4_BF16")
CUTLASS, TRTLLM, CUTEDSL = ("nvfp4/FLASHINFER_CUTLASS",), ("nvfp4/FLASHINFER_TRTLLM",), ("nvfp4/FLASHINFER_CUTEDSL",)
OAI = (1.5, 0.75, 6.5)  # not gpt-oss's numbers, so that its constants in their place would be seen


class PathCase(NamedTuple):
    """One layer for paths that share a converter. No dataclass: those cannot be made in a module that is not in sys.modules.

    activation is vLLM's name; "swigluoai" means that gate and up rows alternate in the checkpoint. swiglu is the layer's
    (alpha, beta, limit). differ says whether w1 and w3 have global scales of their own (NVFP4), bias whether there are biases (MXFP4).
    """

    paths: tuple[str, ...]
    kind: str
    experts: int
    hidden: int
    intermediate: int
    activation: str = "silu"
    swiglu: tuple[float | None, float | None, float | None] = (None, None, None)
    differ: bool = False
    bias: bool = True

    @property
    def gated(self) -> bool:
        return not self.activation.endswith("_no_mul")

    @property
    def nvfp4(self) -> bool:
        return self.paths[0].startswith("nvfp4/")


PATH_CASES = {
    "mxfp4-cutlass-mxfp8-gpt-oss-aligned": PathCase(CUTLASS_MXFP8, GPT_OSS, 3, 128, 128, "swigluoai", OAI),
    "mxfp4-cutlass-mxfp8-gpt-oss-unaligned": PathCase(CUTLASS_MXFP8, GPT_OSS, 2, 320, 96, "swigluoai"),
    "mxfp4-cutlass-mxfp8-compressed-aligned": PathCase(CUTLASS_MXFP8, COMPRESSED, 2, 128, 128, bias=False),
    "mxfp4-cutlass-mxfp8-compressed-unaligned": PathCase(CUTLASS_MXFP8, COMPRESSED, 2, 160, 96, swiglu=OAI),
    "mxfp4-cutlass-mxfp8-compressed-non-gated": PathCase(CUTLASS_MXFP8, COMPRESSED, 2, 320, 96, "relu2_no_mul"),
    "mxfp4-trtllm-gpt-oss-aligned": PathCase(TRTLLM_MXFP4, GPT_OSS, 3, 256, 128, "swigluoai"),
    "mxfp4-trtllm-gpt-oss-unaligned": PathCase(TRTLLM_MXFP4, GPT_OSS, 2, 160, 96, "swigluoai"),
    "mxfp4-trtllm-compressed-aligned": PathCase(TRTLLM_MXFP4, COMPRESSED, 2, 256, 128, bias=False),
    "mxfp4-trtllm-compressed-unaligned": PathCase(TRTLLM_MXFP4, COMPRESSED, 2, 544, 96, swiglu=OAI),
    "nvfp4-cutlass-modelopt-aligned": PathCase(CUTLASS, MODELOPT, 2, 320, 64, "swigluoai_uninterleave", OAI),
    "nvfp4-cutlass-modelopt-hidden-unaligned": PathCase(CUTLASS, MODELOPT, 2, 336, 64, swiglu=OAI, differ=True),
    "nvfp4-cutlass-modelopt-interleaved": PathCase(CUTLASS, MODELOPT, 2, 128, 64, "swigluoai", OAI),
    "nvfp4-cutlass-modelopt-non-gated": PathCase(CUTLASS, MODELOPT, 2, 320, 96, "relu2_no_mul"),
    "nvfp4-cutlass-compressed-differ": PathCase(CUTLASS, COMPRESSED_NVFP4, 3, 320, 64, differ=True),
    "nvfp4-trtllm-modelopt-aligned": PathCase(TRTLLM, MODELOPT, 2, 512, 64),
    "nvfp4-trtllm-modelopt-unaligned": PathCase(TRTLLM, MODELOPT, 2, 320, 96, "swigluoai_uninterleave", OAI),
    "nvfp4-trtllm-modelopt-non-gated": PathCase(TRTLLM, MODELOPT, 2, 320, 96, "relu2_no_mul"),
    "nvfp4-trtllm-compressed-differ": PathCase(TRTLLM, COMPRESSED_NVFP4, 3, 160, 32, swiglu=OAI, differ=True),
    "nvfp4-cutedsl-modelopt-aligned": PathCase(CUTEDSL, MODELOPT, 2, 256, 128, swiglu=OAI),
    "nvfp4-cutedsl-modelopt-unaligned": PathCase(CUTEDSL, MODELOPT, 2, 320, 96, "swigluoai_uninterleave", OAI),
    "nvfp4-cutedsl-modelopt-interleaved": PathCase(CUTEDSL, MODELOPT, 2, 256, 64, "swigluoai", OAI),
    "nvfp4-cutedsl-modelopt-non-gated": PathCase(CUTEDSL, MODELOPT, 2, 320, 96, "relu2_no_mul"),
    "nvfp4-cutedsl-compressed-differ": PathCase(CUTEDSL, COMPRESSED_NVFP4, 3, 160, 32, differ=True),
}
REFUSED = {
    "mxfp4-cutlass-mxfp8-gpt-oss-no-bias": PathCase(CUTLASS_MXFP8, GPT_OSS, 2, 128, 128, "swigluoai", bias=False),
    "mxfp4-trtllm-gpt-oss-no-bias": PathCase(TRTLLM_MXFP4, GPT_OSS, 2, 256, 128, "swigluoai", bias=False),
    "mxfp4-trtllm-compressed-non-gated": PathCase(TRTLLM_MXFP4, COMPRESSED, 2, 256, 128, "relu2_no_mul"),
    "mxfp4-trtllm-compressed-uninterleave": PathCase(TRTLLM_MXFP4, COMPRESSED, 2, 256, 128, "swigluoai_uninterleave"),
    "nvfp4-cutlass-modelopt-unaligned": PathCase(CUTLASS, MODELOPT, 2, 320, 96),
    "nvfp4-trtllm-modelopt-interleaved": PathCase(TRTLLM, MODELOPT, 2, 256, 64, "swigluoai", OAI),
    "nvfp4-cutedsl-modelopt-gelu-tanh": PathCase(CUTEDSL, MODELOPT, 2, 256, 64, "gelu_tanh"),
}


# -- made inputs ----------------------------------------------------------------------------------------------------


def made_bytes(seed: int, *shape: int) -> Tensor:
    """uint8 of that shape: the upper byte of a multiplicative hash of each element's index. The same on every machine."""
    count = torch.Size(shape).numel()
    index = torch.arange(count, dtype=torch.int64) + seed * 1_000_003
    mixed = (index ^ (index >> 7)) * 2_654_435_761 % 2**32
    return ((mixed ^ (mixed >> 15)) * 2_246_822_519 % 2**32 >> 24).to(torch.uint8).reshape(shape)


def made_values(seed: int, *shape: int, least: float) -> Tensor:
    """float32 of that shape in [least, 2 * least) that bf16 does not hold; exact where `least` is a power of two."""
    high, low = made_bytes(seed, 2, *shape).double()
    return ((1 + high / 256 + low / 65536) * least).float()


def made(name: str) -> dict[str, Tensor]:
    """The tensors of one case in logical order, unpadded: gate, up [E, I, H/2], down [E, H, I/2], *_scale, *_bias [E, rows].

    CASES: biases are float32 that bf16 does not hold, except gpt-oss's w2 bias: vLLM's converter returns it as the parameter that it
    was loaded into, which is bf16. PATH_CASES and REFUSED: all biases are such float32, and a non-gated layer has no gate. MXFP4's scales
    are E8M0 without NaN; NVFP4's E4M3 >= 0 without NaN, and *_scale_2 and *_input_scale, float32 [E], are as the checkpoint
    has them: multipliers (ModelOpt) or divisors (compressed-tensors).
    """
    if name not in CASES:
        return _made_path_case(name)
    kind, e, h, i = CASES[name]
    seed = 100 * list(CASES).index(name)
    out = {}
    for n, (key, rows, columns) in enumerate((("gate", i, h), ("up", i, h), ("down", h, i))):
        out[key] = made_bytes(seed + 3 * n, e, rows, columns // 2)
        out[f"{key}_scale"] = made_bytes(seed + 3 * n + 1, e, rows, columns // 32)
        bias = (made_bytes(seed + 3 * n + 2, e, rows, 2).double() @ torch.tensor([1.0, 1 / 300], dtype=torch.float64)).float() / 64 - 2
        out[f"{key}_bias"] = bias.bfloat16() if (kind, key) == (GPT_OSS, "down") else bias
    return out


def _made_path_case(name: str) -> dict[str, Tensor]:
    case = {**PATH_CASES, **REFUSED}[name]
    e, h, i = case.experts, case.hidden, case.intermediate
    first = 1000 + zlib.crc32(name.encode()) % 10_000 * 100  # of the name: a new case does not change the others
    out = {}
    for seed, key, rows, columns in ((first, "gate", i, h), (first + 10, "up", i, h), (first + 20, "down", h, i)):
        if key == "gate" and not case.gated:
            continue
        out[key] = made_bytes(seed, e, rows, columns // 2)
        codes = made_bytes(seed + 1, e, rows, columns // (16 if case.nvfp4 else 32))
        if case.nvfp4:
            divisors = case.kind == COMPRESSED_NVFP4
            out[f"{key}_scale"] = (codes % 0x7F).view(torch.float8_e4m3fn)
            out[f"{key}_scale_2"] = made_values(seed + 2, e, least=2**10 if divisors else 2**-12)
            out[f"{key}_input_scale"] = made_values(seed + 3, e, least=2**7 if divisors else 2**-8)
        else:
            out[f"{key}_scale"] = codes % 0xFF
            if case.bias:
                out[f"{key}_bias"] = made_values(seed + 2, e, rows, least=2) * (1 - 2 * (made_bytes(seed + 3, e, rows) % 2).float())
    if case.nvfp4 and case.gated and not case.differ:
        out["gate_scale_2"] = out["up_scale_2"]
    return out


def loaded(name: str, padded_hidden: int, padded_intermediate: int) -> dict[str, Tensor]:
    """The parameters as vLLM allocates them (zeros, padded) and loads a checkpoint of that kind into them.

    gpt-oss's rows alternate in the file and fill the first 2 * I rows; a compressed-tensors layer loads w1 into the first half
    and w3 into the second, each from its start.
    """
    kind, e, h, i = CASES[name]
    t = made(name)
    out: dict[str, Tensor] = {}
    for suffix, columns, padded in (("", h // 2, padded_hidden // 2), ("_scale", h // 32, padded_hidden // 32), ("_bias", None, None)):
        gate, up = t[f"gate{suffix}"], t[f"up{suffix}"]
        w13 = torch.zeros(e, 2 * padded_intermediate, *(() if padded is None else (padded,)), dtype=gate.dtype)
        cut = () if columns is None else (slice(0, columns),)
        if kind == GPT_OSS:
            w13[(slice(None), slice(0, 2 * i, 2), *cut)] = gate
            w13[(slice(None), slice(1, 2 * i, 2), *cut)] = up
        else:
            w13[(slice(None), slice(0, i), *cut)] = gate
            w13[(slice(None), slice(padded_intermediate, padded_intermediate + i), *cut)] = up
        out[f"w13{suffix}"] = w13
    for suffix, columns, padded in (("", i // 2, padded_intermediate // 2), ("_scale", i // 32, padded_intermediate // 32)):
        w2 = torch.zeros(e, padded_hidden, padded, dtype=torch.uint8)
        w2[:, :h, :columns] = t[f"down{suffix}"]
        out[f"w2{suffix}"] = w2
    out["w2_bias"] = torch.zeros(e, padded_hidden, dtype=t["down_bias"].dtype)
    out["w2_bias"][:, :h] = t["down_bias"]
    return out


# -- vLLM -----------------------------------------------------------------------------------------------------------


def convert(oracle: ModuleType, name: str) -> dict[str, Tensor]:
    """One of CASES through vLLM's padding and converter: operands as FlashInfer's kernel gets them."""
    kind, _, hidden, intermediate = CASES[name]
    backend = oracle.Mxfp4MoeBackend[BACKEND]
    hidden, intermediate = oracle.mxfp4_round_up_hidden_size_and_intermediate_size(backend, hidden, intermediate)
    t = loaded(name, hidden, intermediate)
    converter = getattr(oracle, f"convert_{'gpt_oss_' if kind == GPT_OSS else ''}weight_to_mxfp4_moe_kernel_format")
    w13, w2, w13_scale, w2_scale, w13_bias, w2_bias = converter(
        backend, torch.nn.Module(), t["w13"], t["w2"], t["w13_scale"], t["w2_scale"], w13_bias=t["w13_bias"], w2_bias=t["w2_bias"])
    return {"w13": w13, "w13_scale": w13_scale, "w13_bias": w13_bias, "w2": w2, "w2_scale": w2_scale, "w2_bias": w2_bias}


class _Method(NamedTuple):
    """vLLM's method for a checkpoint kind: its module and class, where and how it selects a backend, what the parameters are called."""

    module: str
    name: str
    selects_in: str
    selects_by: str
    quantisation: str
    parameters: dict[str, str]


_QUANT = "vllm.model_executor.layers.quantization"
_COMPRESSED_MOE = f"{_QUANT}.compressed_tensors.compressed_tensors_moe.compressed_tensors_moe"
_METHODS = {
    GPT_OSS: _Method(f"{_QUANT}.mxfp4", "GptOssMxfp4MoEMethod", f"{_QUANT}.mxfp4", "select_mxfp4_moe_backend", "gpt_oss_mxfp4",
                     {"": "weight", "_scale": "weight_scale", "_bias": "bias"}),
    COMPRESSED: _Method(f"{_COMPRESSED_MOE}_w4a8_mxfp4", "CompressedTensorsW4A8Mxfp4MoEMethod", f"{_QUANT}.mxfp4",
                        "select_deepseek_v4_mxfp4_moe_backend", "compressed-tensors",
                        {"": "weight_packed", "_scale": "weight_scale", "_bias": "bias"}),
    MODELOPT: _Method(f"{_QUANT}.modelopt", "ModelOptNvFp4FusedMoE", f"{_QUANT}.modelopt", "select_nvfp4_moe_backend", "modelopt_fp4",
                      {"": "weight", "_scale": "weight_scale", "_scale_2": "weight_scale_2", "_input_scale": "input_scale"}),
    COMPRESSED_NVFP4: _Method(f"{_COMPRESSED_MOE}_w4a4_nvfp4", "CompressedTensorsW4A4Nvfp4MoEMethod", f"{_COMPRESSED_MOE}_w4a4_nvfp4",
                              "select_nvfp4_moe_backend", "compressed-tensors",
                              {"": "weight_packed", "_scale": "weight_scale", "_scale_2": "weight_global_scale",
                               "_input_scale": "input_global_scale"}),
}


def new_layer(case: PathCase, path: str) -> torch.nn.Module:
    """vLLM's RoutedExperts on one rank with its own method, parameters allocated. Raises what vLLM raises.

    Where vLLM's experts class does not support the layer, NotImplementedError with vLLM's reason.
    """
    from vllm.model_executor.layers.fused_moe import config, modular_kernel, routed_experts
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.quantization.utils import quant_utils

    oracle = importlib.import_module(f"vllm.model_executor.layers.fused_moe.oracle.{path.split('/')[0]}")
    backend = (oracle.NvFp4MoeBackend if case.nvfp4 else oracle.Mxfp4MoeBackend)[path.split("/")[1]]
    experts = next(c for c in oracle.backend_to_kernel_cls(backend) if not c.is_monolithic())
    alpha, beta, limit = case.swiglu
    one_rank = config.FusedMoEParallelConfig(tp_size=1, pcp_size=1, dp_size=1, ep_size=1, tp_rank=0, pcp_rank=0, dp_rank=0, ep_rank=0,
                                             sp_size=1, use_ep=False, all2all_backend="", enable_eplb=False)
    moe = config.FusedMoEConfig(
        num_experts=case.experts, experts_per_token=1, hidden_dim=case.hidden, intermediate_size=case.intermediate,
        num_local_experts=case.experts, num_logical_experts=case.experts, activation=MoEActivation(case.activation), device="cpu",
        routing_method=config.RoutingMethodType.Renormalize, moe_parallel_config=one_rank, in_dtype=torch.bfloat16, max_num_tokens=8,
        has_bias=case.bias and not case.nvfp4, swiglu_limit=limit, swiglu_alpha=alpha, swiglu_beta=beta)
    keys = (quant_utils.kNvfp4Static, quant_utils.kNvfp4Dynamic) if case.nvfp4 else (
        quant_utils.kMxfp4Static, None if path.endswith("_BF16") else quant_utils.kMxfp8Dynamic)
    supported, reason = experts.is_supported_config(experts, moe, *keys, modular_kernel.FusedMoEActivationFormat.Standard)
    if not supported:
        raise NotImplementedError(reason)

    m = _METHODS[case.kind]
    method_type = getattr(importlib.import_module(m.module), m.name)
    setattr(importlib.import_module(m.selects_in), m.selects_by, lambda *_, **__: (backend, experts))
    quantisation = SimpleNamespace(get_name=lambda: m.quantisation, quant_method="NVFP4", moe_activation_override=None,
                                   is_checkpoint_nvfp4_serialized=True, group_size=16)
    method = method_type(quantisation, moe) if case.kind == MODELOPT else method_type(moe)
    routed_experts.resolve_quant_method = lambda *_: method
    modular_kernel.FusedMoEKernel = lambda prepare_finalize, fused_experts: SimpleNamespace(fused_experts=fused_experts)
    all_here = SimpleNamespace(local_num_experts=case.experts, placement_strategy="linear", expert_map=None, expert_mask=None,
                               routing_tables=None, num_fused_shared_experts=0, map_global_to_local=lambda expert: expert)
    return routed_experts.RoutedExperts(
        "experts", torch.bfloat16, moe, quantisation, all_here, ckpt_up_proj_name="up_proj" if case.gated else None,
        swiglu_limit=limit, swiglu_alpha=alpha, swiglu_beta=beta)


def load(layer: torch.nn.Module, case: PathCase, t: dict[str, Tensor]) -> None:
    """Load a checkpoint of `t` through vLLM's own loaders."""
    for suffix, parameter in _METHODS[case.kind].parameters.items():
        if f"up{suffix}" not in t:
            continue
        gate, up, down = (t.get(f"{key}{suffix}") for key in ("gate", "up", "down"))
        if case.activation == "swigluoai" and up[0].ndim:  # alternating rows: a fused tensor, halves of which are loaded as w1 and w3
            gate, up = torch.stack([gate, up], 2).flatten(1, 2).chunk(2, 1)
        w13, w2 = (getattr(layer, f"{w}_{parameter}") for w in ("w13", "w2"))
        if case.kind == GPT_OSS:
            w13.weight_loader(w13, torch.cat([gate, up], 1), f"w13_{parameter}", None, None)
            w2.weight_loader(w2, down, f"w2_{parameter}", None, None)
            continue
        for e in range(case.experts):
            for shard, value in (("w1", gate), ("w3", up)) if case.gated else (("w1", up),):
                w13.weight_loader(w13, value[e], f"w13_{parameter}", shard, e)
            w2.weight_loader(w2, down[e], f"w2_{parameter}", "w2", e)


def run(name: str, path: str) -> tuple[dict[str, Tensor], dict[str, object]]:
    """One of PATH_CASES through vLLM on one of its paths: operands, and what goes into the metadata."""
    from vllm_sources import LOG, RECORDER

    case = {**PATH_CASES, **REFUSED}[name]
    LOG.warnings.clear()
    layer = new_layer(case, path)
    load(layer, case, made(name))
    layer.quant_method.process_weights_after_loading(layer)
    experts = layer.quant_method.moe_kernel.fused_experts
    config, hidden = experts.quant_config, layer.moe_config.hidden_dim
    x = {  # one token, to see the call
        "nvfp4": (torch.zeros(1, hidden // 2, dtype=torch.uint8), torch.zeros(1, hidden // 16, dtype=torch.float8_e4m3fn)),
        "mxfp8": (torch.zeros(1, hidden, dtype=torch.float8_e4m3fn), torch.zeros(1, hidden // 32, dtype=torch.uint8)),
        None: (torch.zeros(1, hidden, dtype=torch.bfloat16), None)}[config.quant_dtype]
    experts.apply(
        output=torch.zeros(1, hidden, dtype=torch.bfloat16), hidden_states=x[0], w1=layer.w13_weight, w2=layer.w2_weight,
        topk_weights=torch.ones(1, 1), topk_ids=torch.zeros(1, 1, dtype=torch.int32), activation=layer.activation,
        global_num_experts=case.experts, expert_map=None, a1q_scale=x[1], a2_scale=None, workspace13=None, workspace2=None,
        expert_tokens_meta=None, apply_router_weight_on_input=False)
    arguments = RECORDER.arguments
    ones = getattr(experts, "fake_input_scale", None)
    operands = {"w13": layer.w13_weight, "w13_scale": layer.w13_weight_scale, "w13_bias": config.w1_bias,
                "w2": layer.w2_weight, "w2_scale": layer.w2_weight_scale, "w2_bias": config.w2_bias,
                "w13_alpha": config.g1_alphas if ones is None else ones, "w2_alpha": config.g2_alphas if ones is None else ones,
                "a1_gscale": config.a1_gscale, "a2_gscale": config.a2_gscale, "g1_scale_c": getattr(experts, "g1_scale_c", None)}
    for key in ("alpha", "beta", "limit"):
        names = (f"swiglu_{key}", "gemm1_clamp_limit" if key == "limit" else f"gemm1_{key}")
        value = next((arguments[n] for n in names if arguments.get(n) is not None), None)
        operands[f"swiglu_{key}"] = torch.tensor(value) if isinstance(value, float) else value
    operands = {k: t.detach() for k, t in operands.items() if t is not None}
    return operands, {"activation_scales_swizzled": None if config.quant_dtype is None else config.is_scale_swizzled,
                      "warnings": list(LOG.warnings), "function": RECORDER.function, "call": _described(arguments, operands)}


def _described(arguments: dict[str, object], operands: dict[str, Tensor]) -> dict[str, object]:
    """The call's arguments for JSON, without activations and routing: those were made up here."""
    names = {t.data_ptr(): k for k, t in reversed(operands.items())}
    out: dict[str, object] = {}
    for name, value in arguments.items():
        if name in ("input_sf", "hidden_states_scale", "tune_max_num_tokens", "top_k"):
            continue
        for key, item in ((f"{name}[{i}]", v) for i, v in enumerate(value)) if isinstance(value, list) else ((name, value),):
            if isinstance(item, Tensor) and item.data_ptr() in names:
                out[key] = {"operand": names[item.data_ptr()], "dtype": str(item.dtype).removeprefix("torch."),
                            "shape": list(item.shape), "stride": list(item.stride())}
            elif isinstance(item, torch.dtype):
                out[key] = str(item).removeprefix("torch.")
            elif item is None or isinstance(item, (bool, float)):
                out[key] = item
            elif isinstance(item, int):
                out[key] = int(item)
    return out


# -- files ----------------------------------------------------------------------------------------------------------


def _file_bytes(operands: dict[str, Tensor], metadata: dict[str, str] | None = None) -> bytes:
    from safetensors.torch import save

    return save({k: t.contiguous().clone() for k, t in operands.items()}, metadata)  # a file holds no two names of one tensor


def keep(name: str, operands: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write vllm-NAME.safetensors, unless it holds just that: the order of metadata in such a file differs from run to run."""
    from safetensors import safe_open

    file = HERE / f"vllm-{name}.safetensors"
    kept = False
    if file.exists():
        with safe_open(file, "pt") as f:
            kept = f.metadata() == metadata and _file_bytes({k: f.get_tensor(k) for k in f.keys()}) == _file_bytes(operands)
    if not kept:
        file.write_bytes(_file_bytes(operands, metadata))
    print(f"{file.name}: {file.stat().st_size} bytes, {'as it was' if kept else 'written'},",
          ", ".join(f"{k} {list(t.shape)}" for k, t in operands.items()))


def main(sources: str) -> None:
    import flashinfer
    import vllm_sources

    vllm_sources.install(Path(sources))
    versions = {"made_by": "make_vllm_golden.py", "vllm": "0.33", "flashinfer": flashinfer.__version__}
    oracle = importlib.import_module("vllm.model_executor.layers.fused_moe.oracle.mxfp4")
    for name in CASES:
        keep(name, convert(oracle, name), versions)
    for name, case in PATH_CASES.items():
        runs = {path: run(name, path) for path in case.paths}
        operands, facts = runs[case.paths[0]]
        swizzled = {path: facts.pop("activation_scales_swizzled") for path, (_, facts) in runs.items()}
        for path, (others, other_facts) in runs.items():
            if other_facts != facts or _file_bytes(others) != _file_bytes(operands):
                raise AssertionError(f"{name}: {path} gets other operands than {case.paths[0]}")
        described = {"paths": case.paths, "activation_scales_swizzled": swizzled, **facts}
        keep(name, operands, {**versions, **{k: v if isinstance(v, str) else json.dumps(v) for k, v in described.items()}})
    refusals = {}
    for name, case in REFUSED.items():
        try:
            run(name, case.paths[0])
        except (NotImplementedError, AssertionError) as error:
            refusals[name] = {"path": case.paths[0], "error": type(error).__name__, "message": " ".join(map(str, error.args))}
        else:
            raise AssertionError(f"{name}: vLLM does not refuse it")
    (HERE / "vllm-refusals.json").write_text(json.dumps(refusals, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
