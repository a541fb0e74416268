"""How one version of vLLM selects: the record of its rules, and vLLM 0.33's."""

from __future__ import annotations

from dataclasses import dataclass

from .experts import EXPERTS_033, SM12X, Experts
from .setups import ACTIVATIONS, ROUTINGS


@dataclass(frozen=True)
class Method:
    """The quantisation method of a checkpoint kind: which oracle it asks, and with which activation keys."""

    name: str
    file: str
    oracle: str
    keys: tuple[str | None, ...]


_MXFP4_KEYS = (None, "mxfp8", "mxfp4", "fp8_per_tensor_static", "fp8_per_token", "fp8_per_block_dynamic")
GPT_OSS_ORACLE, OTHER_ORACLE, NVFP4_ORACLE = "select_mxfp4_moe_backend", "select_deepseek_v4_mxfp4_moe_backend", "select_nvfp4_moe_backend"
_CT = "quantization/compressed_tensors/compressed_tensors_moe/compressed_tensors_moe"
CT_MXFP4 = Method("CompressedTensorsW4A4Mxfp4MoEMethod", f"{_CT}_w4a4_mxfp4.py", "", (None, "mxfp4"))
METHODS_033 = {
    ("mxfp4", "gpt-oss"): (Method("GptOssMxfp4MoEMethod", "quantization/mxfp4.py", GPT_OSS_ORACLE, _MXFP4_KEYS),),
    ("mxfp4", "mxfp4"): (Method("Mxfp4MoEMethod", "quantization/mxfp4.py", OTHER_ORACLE, (None,)),),
    ("mxfp4", "compressed-tensors"): (
        CT_MXFP4, Method("CompressedTensorsW4A8Mxfp4MoEMethod", f"{_CT}_w4a8_mxfp4.py", OTHER_ORACLE,
                          ("mxfp8", "fp8_per_token", "fp8_per_block_dynamic"))),
    ("mxfp4", "quark"): (Method("QuarkOCP_MX_MoEMethod", "quantization/quark/quark_moe.py", GPT_OSS_ORACLE,
                                (None, "fp8_per_tensor_static", "mxfp4")),),
    ("nvfp4", "modelopt"): (Method("ModelOptNvFp4FusedMoE", "quantization/modelopt.py", NVFP4_ORACLE, ("nvfp4", None, "nvfp4_per_token")),),
    ("nvfp4", "compressed-tensors"): (
        Method("CompressedTensorsW4A4Nvfp4MoEMethod", f"{_CT}_w4a4_nvfp4.py", NVFP4_ORACLE, ("nvfp4", None)),),
    ("nvfp4", "quark"): (Method("QuarkNvfp4MoEMethod", "quantization/quark/quark_moe.py", NVFP4_ORACLE, ("nvfp4",)),),
}


@dataclass(frozen=True)
class Rules:
    """One version's selection.

    mxfp4, nvfp4     backend -> its experts classes, in order
    gpt_oss, other   priority of select_mxfp4_moe_backend and of select_deepseek_v4_mxfp4_moe_backend; `nvfp4_order` of NVFP4's
    asked_mxfp4      --moe-backend -> the backends it may mean; `asked_nvfp4` likewise
    options          all values of --moe-backend that name an NVIDIA path
    clamped          NVFP4 backends that apply swiglu_limit; the others are passed over where it is set. None: 0.21 does not ask
    humming_first    SMs on which HUMMING moves ahead of MARLIN (prioritize_humming); `triton_after_marlin` those on which TRITON moves
                     behind it (_get_priority_backends_for_gpt_oss)
    humming_by_ep    whether Humming prefers another kind of GEMM with expert parallelism
    asks_router      whether monolithic classes are asked about hash routing and adjusted routes
    late             0.33: TrtLlmMxfp4LoRAExperts, and make_mxfp4_moe_kernel asks again what a method chose without an oracle
    by_key           how a requested activation key filters MXFP4 backends: "no" (0.21), "only" matching ones, or these "first", then BF16
    """

    version: str
    experts: dict[str, Experts]
    methods: dict[tuple[str, str], tuple[Method, ...]]
    mxfp4: dict[str, tuple[str, ...]]
    nvfp4: dict[str, tuple[str, ...]]
    gpt_oss: tuple[str, ...]
    other: tuple[str, ...]
    nvfp4_order: tuple[str, ...]
    asked_mxfp4: dict[str, tuple[str, ...]]
    asked_nvfp4: dict[str, str]
    options: frozenset[str]
    clamped: frozenset[str] | None
    by_key: str
    activations: frozenset[str] = frozenset(ACTIVATIONS)
    routings: frozenset[str | None] = frozenset({None, *ROUTINGS})
    humming_first: frozenset[int] = frozenset()
    triton_after_marlin: frozenset[int] = frozenset()
    humming_by_ep: bool = True
    asks_router: bool = True
    late: bool = True


HUMMING_CLASSES = ("BatchedHummingGroupedExperts", "HummingGroupedExperts", "HummingIndexedExperts")
_TRTLLM_MXFP4_CLASSES = ("TrtLlmMxfp4ExpertsMonolithic", "TrtLlmMxfp4ExpertsModular")
KEY_OF = {"DEEPGEMM_MXFP4": "fp8_per_block_dynamic", "B12X_MXFP4_MXFP8": "mxfp8", "FLASHINFER_TRTLLM_MXFP4_MXFP8": "mxfp8",
           "FLASHINFER_CUTLASS_MXFP4_MXFP8": "mxfp8", "CUTLASS_MXFP4_MXFP4": "mxfp4"}  # _backend_activation_key; all others None
_MXFP4_033 = {
    "B12X_MXFP4_MXFP8": ("B12xExperts",), "B12X_MXFP4_BF16": ("B12xExperts",), "DEEPGEMM_MXFP4": ("DeepGemmFP4Experts",),
    "FLASHINFER_TRTLLM_MXFP4_MXFP8": _TRTLLM_MXFP4_CLASSES, "FLASHINFER_TRTLLM_MXFP4_BF16": _TRTLLM_MXFP4_CLASSES,
    "FLASHINFER_CUTLASS_MXFP4_MXFP8": ("FlashInferExperts",), "FLASHINFER_CUTLASS_MXFP4_BF16": ("FlashInferExperts",),
    "CUTLASS_MXFP4_MXFP4": ("CutlassExpertsMxfp4",), "BATCHED_MARLIN": ("BatchedMarlinExperts",), "MARLIN": ("MarlinExperts",),
    "TRITON": ("OAITritonMxfp4ExpertsMonolithic", "OAITritonExperts"), "TRITON_UNFUSED": ("UnfusedOAITritonExperts",),
    "EMULATION": ("OCP_MXQuantizationEmulationTritonExperts",), "HUMMING": HUMMING_CLASSES,
    "FLASHINFER_MOE_EP_CUTEDSL": ("FlashInferMoeEpExperts",), "FLASHINFER_MOE_EP_DEEP_GEMM": ("FlashInferMoeEpExperts",)}
_NVFP4_033 = {
    "B12X": ("B12xExperts",), "FLASHINFER_TRTLLM": ("TrtLlmNvFp4ExpertsMonolithic", "TrtLlmNvFp4ExpertsModular"),
    "FLASHINFER_CUTLASS": ("FlashInferExperts",), "FLASHINFER_CUTEDSL": ("FlashInferCuteDSLExperts",),
    "FLASHINFER_CUTEDSL_BATCHED": ("FlashInferCuteDSLBatchedExperts",), "FLASHINFER_B12X": ("FlashInferB12xExperts",),
    "VLLM_CUTLASS": ("CutlassExpertsFp4",), "MARLIN": ("MarlinExperts",), "HUMMING": HUMMING_CLASSES,
    "EMULATION": ("Nvfp4QuantizationEmulationTritonExperts",), "FLASHINFER_MOE_EP_CUTEDSL": ("FlashInferMoeEpExperts",)}
ASKED_MXFP4_033 = {
    "b12x": ("B12X_MXFP4_MXFP8", "B12X_MXFP4_BF16"), "deep_gemm": ("DEEPGEMM_MXFP4",),
    "flashinfer_trtllm": ("FLASHINFER_TRTLLM_MXFP4_BF16", "FLASHINFER_TRTLLM_MXFP4_MXFP8"),
    "flashinfer_cutlass": ("FLASHINFER_CUTLASS_MXFP4_BF16", "FLASHINFER_CUTLASS_MXFP4_MXFP8"),
    "flashinfer_moe_ep_cutedsl": ("FLASHINFER_MOE_EP_CUTEDSL",), "flashinfer_moe_ep_mega_deep_gemm": ("FLASHINFER_MOE_EP_DEEP_GEMM",),
    "triton": ("TRITON",), "triton_unfused": ("TRITON_UNFUSED",), "humming": ("HUMMING",), "marlin": ("MARLIN",),
    "emulation": ("EMULATION",)}
ASKED_NVFP4_033 = {
    "b12x": "B12X", "cutlass": "VLLM_CUTLASS", "flashinfer_trtllm": "FLASHINFER_TRTLLM", "flashinfer_cutlass": "FLASHINFER_CUTLASS",
    "flashinfer_cutedsl": "FLASHINFER_CUTEDSL", "flashinfer_moe_ep_cutedsl": "FLASHINFER_MOE_EP_CUTEDSL",
    "flashinfer_b12x": "FLASHINFER_B12X", "marlin": "MARLIN", "humming": "HUMMING", "emulation": "EMULATION"}
MOE_EP = ("flashinfer_moe_ep_cutedsl", "flashinfer_moe_ep_mega_deep_gemm")
NVFP4_ORDER = ("FLASHINFER_TRTLLM", "FLASHINFER_CUTEDSL", "FLASHINFER_CUTEDSL_BATCHED", "FLASHINFER_CUTLASS", "VLLM_CUTLASS", "MARLIN",
                "HUMMING", "EMULATION")

RULES_033 = Rules(
    "0.33", EXPERTS_033, METHODS_033, _MXFP4_033, _NVFP4_033,
    gpt_oss=("FLASHINFER_TRTLLM_MXFP4_BF16", "FLASHINFER_TRTLLM_MXFP4_MXFP8", "TRITON", "FLASHINFER_CUTLASS_MXFP4_BF16",
             "FLASHINFER_CUTLASS_MXFP4_MXFP8", "CUTLASS_MXFP4_MXFP4", "MARLIN", "BATCHED_MARLIN", "HUMMING", "EMULATION"),
    other=("FLASHINFER_TRTLLM_MXFP4_MXFP8", "DEEPGEMM_MXFP4", "MARLIN", "BATCHED_MARLIN", "HUMMING"),
    nvfp4_order=NVFP4_ORDER, asked_mxfp4=ASKED_MXFP4_033, asked_nvfp4=ASKED_NVFP4_033,
    options=frozenset({"batched_triton", "deep_gemm_mega_moe", *ASKED_MXFP4_033, *ASKED_NVFP4_033}),
    clamped=frozenset(_NVFP4_033) - {"FLASHINFER_CUTEDSL_BATCHED", "FLASHINFER_B12X"}, by_key="first",
    humming_first=frozenset({90}), triton_after_marlin=SM12X)
