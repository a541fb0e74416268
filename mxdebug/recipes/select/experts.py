"""What each of vLLM's experts classes supports: the record, and the table of vLLM 0.33."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ...errors import MxdebugError
from .setups import ACTIVATIONS, SMS, Setup

SM10X, SM12X, _EVERY = frozenset({100, 103}), frozenset({120, 121}), frozenset(SMS)
ANY = "any"
PARALLEL: dict[str, Callable[[Setup], bool]] = {
    "all2all kernels": lambda s: s.use_all2all,
    "EPLB": lambda s: s.eplb,
    "data parallel": lambda s: s.dp > 1,
    "expert parallel": lambda s: s.use_ep,
    "no expert parallel": lambda s: not s.use_ep,
    "the batched format": lambda s: s.batched,
    "FlashInfer's two-sided NVLink all2all":
        lambda s: s.use_all2all and s.all2all in ("flashinfer_all2allv", "flashinfer_nvlink_two_sided"),
    "FlashInfer's one-sided NVLink all2all": lambda s: s.use_all2all and s.all2all == "flashinfer_nvlink_one_sided",
    "DeepEP high throughput": lambda s: s.use_all2all and s.all2all == "deepep_high_throughput",
}
_MONOLITHIC = ("all2all kernels", "EPLB")
TWO_SIDED, ONE_SIDED = "FlashInfer's two-sided NVLink all2all", "FlashInfer's one-sided NVLink all2all"


@dataclass(frozen=True)
class Experts:
    """What one of vLLM's experts classes supports: the answers of its `_supports_*` methods.

    schemes     (weights, activations) -> the SMs on which that quantisation scheme is taken
    needs       a package without which the device counts as unsupported
    refuses     the parallel configurations that it does not support
    routing     set for a monolithic class (it routes itself): the routing methods that it knows; `logits` the dtypes of router logits
    before      asked before all else (an `is_supported_config` of its own), `after` after all else; words of a refusal, or None
    gemm        Humming's kind of GEMM, compared with the one that Humming prefers (`get_humming_moe_gemm_type`)
    """

    name: str
    file: str
    sm: frozenset[int]
    schemes: dict[tuple[str, str | None], frozenset[int]]
    activations: frozenset[str]
    non_gated: bool = False
    needs: str | None = None
    refuses: tuple[str, ...] = ()
    routing: frozenset[str] | None = None
    logits: frozenset[str] | None = None
    batched: bool = False
    lora: bool = False
    batch_invariant: bool = False
    before: Callable[[Setup, str | None], str | None] | None = None
    after: Callable[[Setup, str | None], str | None] | None = None
    gemm: str | None = None


def schemes_of(weights: str, *keys: str | None, sm: frozenset[int] = _EVERY) -> dict[tuple[str, str | None], frozenset[int]]:
    return {(weights, key): sm for key in keys}


def _b12x(s: Setup, key: str | None) -> str | None:
    """B12xExperts.is_supported_config."""
    if s.bias or s.checkpoint == "gpt-oss":
        return "expert biases"
    if s.activation == "situ" and (s.situ_beta, s.situ_linear_beta) != (4.0, 25.0):
        return "SiTU other than beta 4 and linear beta 25"
    if key is not None and s.activation == "swigluoai_uninterleave":
        return "swigluoai_uninterleave with quantised activations"
    if s.quantisation == "nvfp4":
        return None
    if s.hidden is None or s.intermediate_per_rank is None:
        raise MxdebugError("Setup.hidden, intermediate", "the sizes of one expert", f"{s.hidden}, {s.intermediate}",
                           "B12X's MXFP4 rules read them")
    if s.intermediate_per_rank % 32:
        return f"an intermediate size of {s.intermediate_per_rank} on a rank, not divisible by 32"
    if key == "mxfp8" and s.activation not in ("silu", "situ"):
        return f"{s.activation} with MXFP8 activations"
    if key == "mxfp8" and s.hidden % 256:
        return f"a hidden size of {s.hidden} with MXFP8 activations, not divisible by 256"
    return None


def _moe_ep(s: Setup, key: str | None) -> str | None:
    """flashinfer_moe_ep_unsupported_reasons; weight transfer and dual batch overlap are taken to be off."""
    kernel_is_deep_gemm = s.moe_backend == "flashinfer_moe_ep_mega_deep_gemm"
    reasons = [words for refused, words in (
        (s.quantisation == "nvfp4" and key is None, "A16 activations with NVFP4 weights"),
        (s.dtype != "bfloat16", f"activation dtype {s.dtype}"),
        (s.bias or s.checkpoint == "gpt-oss", "expert bias"),
        (s.swiglu_alpha is not None or s.swiglu_beta is not None, "custom SwiGLU alpha or beta"),
        (kernel_is_deep_gemm and s.routing != "DeepseekV4", f"routing method {s.routing}"),
        (kernel_is_deep_gemm and s.eplb, "EPLB")) if refused]
    return ", ".join(reasons) or None


def _many_experts(s: Setup, key: str | None) -> str | None:
    """TritonExperts.is_supported_config: moe_align_block_size counts fewer than 1024 experts, padded to 32."""
    return None if s.experts is None or -(-s.experts // 32) * 32 < 1024 else f"{s.experts} experts"


APPLY = frozenset(ACTIVATIONS) - {"relu2"}  # fused_moe/activation.py, apply_moe_activation_supported, and the masked form of it
HUMMING_MXFP4 = schemes_of("mxfp4", None, "mxfp4", "mxfp8", "fp8_per_token", "fp8_per_block_dynamic")
HUMMING_NVFP4 = schemes_of("nvfp4", None, "fp8_per_token", "nvfp4", "nvfp4_per_token")
TRTLLM_ROUTING = frozenset({"DeepSeekV3", "Renormalize", "RenormalizeNaive", "Llama4", "SigmoidRenorm", "Sigmoid", "MiniMax2"})
_TRTLLM_MXFP4 = Experts("TrtLlmMxfp4ExpertsModular", "experts/trtllm_mxfp4_moe.py", SM10X, schemes_of("mxfp4", None, "mxfp8"),
                        frozenset({"swigluoai", "silu", "situ"}), needs="flashinfer")
_TRTLLM_NVFP4 = Experts("TrtLlmNvFp4ExpertsModular", "experts/trtllm_nvfp4_moe.py", SM10X, schemes_of("nvfp4", "nvfp4", "nvfp4_per_token"),
                        frozenset({"silu", "relu2_no_mul", "gelu", "gelu_tanh", "swigluoai_uninterleave", "situ"}), non_gated=True,
                        needs="flashinfer")
_TRITON = Experts("OAITritonExperts", "experts/gpt_oss_triton_kernels_moe.py", _EVERY, schemes_of("mxfp4", None), frozenset({"swigluoai"}),
                  needs="triton_kernels")
_CUTLASS = Experts("CutlassExpertsFp4", "experts/cutlass_moe.py", _EVERY - {90}, schemes_of("nvfp4", "nvfp4"), APPLY, non_gated=True,
                   refuses=(TWO_SIDED, "DeepEP high throughput", ONE_SIDED), batch_invariant=True)
_MARLIN = Experts("MarlinExperts", "experts/marlin_moe.py", _EVERY, schemes_of("mxfp4", ANY) | schemes_of("nvfp4", ANY), APPLY,
                  non_gated=True, refuses=(TWO_SIDED,), lora=True)
_HUMMING = Experts("HummingIndexedExperts", "experts/fused_humming_moe.py", _EVERY, HUMMING_MXFP4 | HUMMING_NVFP4, APPLY, non_gated=True,
                   needs="humming", batch_invariant=True, gemm="indexed")
_EMULATION = Experts("Nvfp4QuantizationEmulationTritonExperts", "experts/nvfp4_emulation_moe.py", _EVERY, schemes_of("nvfp4", "nvfp4"),
                     APPLY, non_gated=True, refuses=(TWO_SIDED, ONE_SIDED), batch_invariant=True, after=_many_experts,
                     before=lambda s, key: "bias" if s.bias or s.checkpoint == "gpt-oss" else None)


def _named(*experts: Experts) -> dict[str, Experts]:
    return {e.name: e for e in experts}


EXPERTS_033 = _named(
    _TRTLLM_MXFP4,
    replace(_TRTLLM_MXFP4, name="TrtLlmMxfp4ExpertsMonolithic", refuses=(*_MONOLITHIC, "data parallel"),
            routing=frozenset({"DeepSeekV3", "Renormalize", "RenormalizeNaive"})),
    replace(_TRTLLM_MXFP4, name="TrtLlmMxfp4LoRAExperts", file="experts/trtllm_lora_moe.py", schemes=schemes_of("mxfp4", None),
            activations=frozenset({"swigluoai", "silu"}), refuses=(*_MONOLITHIC, "data parallel"), lora=True),
    _TRTLLM_NVFP4,
    replace(_TRTLLM_NVFP4, name="TrtLlmNvFp4ExpertsMonolithic", refuses=_MONOLITHIC, routing=TRTLLM_ROUTING,
            logits=frozenset({"bfloat16", "float32"})),
    Experts("FlashInferExperts", "experts/flashinfer_cutlass_moe.py", _EVERY - {110},
            schemes_of("mxfp4", None, sm=frozenset({90})) | schemes_of("mxfp4", "mxfp8", sm=_EVERY - {90})
            | schemes_of("nvfp4", "nvfp4", sm=_EVERY - {90}),
            frozenset({"silu", "gelu_tanh", "relu2_no_mul", "swigluoai", "swigluoai_uninterleave"}), non_gated=True, needs="flashinfer"),
    Experts("FlashInferCuteDSLExperts", "experts/flashinfer_cutedsl_moe.py", SM10X, schemes_of("nvfp4", "nvfp4", "nvfp4_per_token"),
            frozenset({"silu", "swigluoai", "swigluoai_uninterleave", "relu2_no_mul", "situ"}), non_gated=True, needs="flashinfer"),
    Experts("FlashInferCuteDSLBatchedExperts", "experts/flashinfer_cutedsl_batched_moe.py", SM10X, schemes_of("nvfp4", "nvfp4"),
            frozenset({"silu"}), needs="flashinfer", batched=True),
    Experts("FlashInferB12xExperts", "experts/flashinfer_b12x_moe.py", SM12X, schemes_of("nvfp4", "nvfp4", None),
            frozenset({"silu", "gelu_tanh", "relu2_no_mul"}), non_gated=True, needs="flashinfer", refuses=("expert parallel",)),
    Experts("B12xExperts", "b12x.py", SM12X, schemes_of("mxfp4", "mxfp8", None) | schemes_of("nvfp4", "nvfp4", "mxfp8", None),
            frozenset({"silu", "situ", "swigluoai_uninterleave", "relu2_no_mul"}), non_gated=True, needs="b12x",
            refuses=("expert parallel", "all2all kernels", "EPLB"), before=_b12x),
    Experts("FlashInferMoeEpExperts", "experts/flashinfer_moe_ep.py", SM10X, schemes_of("mxfp4", ANY) | schemes_of("nvfp4", ANY),
            frozenset({"silu"}), refuses=("no expert parallel", "the batched format"), after=_moe_ep),
    # SM100 to below SM120, in a build with CUDA 12.9 or later: csrc/quantization/fp4/mxfp4_experts_quant.cu.
    replace(_CUTLASS, name="CutlassExpertsMxfp4", sm=frozenset({100, 103, 110}), schemes=schemes_of("mxfp4", "mxfp4"),
            batch_invariant=False),
    _CUTLASS,
    _TRITON,
    replace(_TRITON, name="OAITritonMxfp4ExpertsMonolithic", refuses=(*_MONOLITHIC, "data parallel"),
            routing=frozenset({"Renormalize", "RenormalizeNaive"})),
    replace(_TRITON, name="UnfusedOAITritonExperts", lora=True,
            activations=frozenset({"silu", "gelu", "swigluoai", "swiglustep", "swigluoai_uninterleave"})),
    Experts("DeepGemmFP4Experts", "experts/deep_gemm_moe.py", SM10X | SM12X, schemes_of("mxfp4", "fp8_per_block_dynamic"),
            frozenset({"silu", "swiglustep", "situ"}), needs="deep_gemm", refuses=(TWO_SIDED, ONE_SIDED)),
    _MARLIN,
    replace(_MARLIN, name="BatchedMarlinExperts", batched=True, lora=False),
    _HUMMING,
    replace(_HUMMING, name="HummingGroupedExperts", gemm="grouped_contiguous"),
    replace(_HUMMING, name="BatchedHummingGroupedExperts", batched=True, gemm="grouped_masked"),
    _EMULATION,
    replace(_EMULATION, name="OCP_MXQuantizationEmulationTritonExperts", file="experts/ocp_mx_emulation_moe.py",
            schemes=schemes_of("mxfp4", ANY), lora=True,
            before=lambda s, key: None if "quark" in s.installed else "an installation without amd-quark"),
)
