"""The versions whose rules are known: from vLLM 0.33 backwards, what each older one has otherwise."""

from __future__ import annotations

from dataclasses import replace

from ...errors import MxdebugError
from .experts import ANY, APPLY, EXPERTS_033, HUMMING_MXFP4, HUMMING_NVFP4, ONE_SIDED, SM10X, TRTLLM_ROUTING, TWO_SIDED, Experts, schemes_of
from .rules import ASKED_MXFP4_033, ASKED_NVFP4_033, CT_MXFP4, HUMMING_CLASSES, METHODS_033, MOE_EP, NVFP4_ORDER, RULES_033, Rules
from .setups import ACTIVATIONS

# First release whose sources hold the fix. #53014 brought the CuTe-DSL W4A16 linear kernel, which the fourth bug is about.
FIXED_IN = {"#42089": "0.21", "#48929": "0.28", "#51038": "0.28", "#53014": "0.30"}


def _without(table: dict, *names: str) -> dict:
    return {k: v for k, v in table.items() if k not in names}


def _changed(experts: dict[str, Experts], names: tuple[str, ...], **changes: object) -> dict[str, Experts]:
    return experts | {n: replace(experts[n], **changes) for n in names}


# From here backwards: what the older version has otherwise. Read from its sources, and compared with them (tests/data/make_vllm_select.py).
_TRITONS = ("OAITritonExperts", "OAITritonMxfp4ExpertsMonolithic", "UnfusedOAITritonExperts")
_CUTLASSES = ("CutlassExpertsFp4", "CutlassExpertsMxfp4")
_EMULATIONS = ("Nvfp4QuantizationEmulationTritonExperts", "OCP_MXQuantizationEmulationTritonExperts")
_TRTLLM_NVFP4S = ("TrtLlmNvFp4ExpertsModular", "TrtLlmNvFp4ExpertsMonolithic")
_e = _changed(EXPERTS_033, (*_TRTLLM_NVFP4S, "FlashInferCuteDSLExperts"), schemes=schemes_of("nvfp4", "nvfp4"))
_e = _changed(_e, ("TrtLlmNvFp4ExpertsMonolithic",), routing=TRTLLM_ROUTING | {"Simulated"})
_e = _changed(_e, _CUTLASSES, refuses=("expert parallel",))
_e = _changed(_e, _TRITONS, sm=frozenset({90, 100, 103}))
_e = _changed(_e, HUMMING_CLASSES, schemes=_without(HUMMING_MXFP4 | HUMMING_NVFP4, ("nvfp4", "nvfp4_per_token")))
_methods_030 = METHODS_033 | {
    ("mxfp4", "compressed-tensors"): (CT_MXFP4,),
    ("nvfp4", "modelopt"): (replace(METHODS_033["nvfp4", "modelopt"][0], keys=("nvfp4", None)),)}
_030 = replace(
    RULES_033, version="0.30", experts=_e, methods=_methods_030, by_key="only", humming_first=frozenset(),
    triton_after_marlin=frozenset(), asks_router=False, late=False,
    gpt_oss=tuple(b for b in RULES_033.gpt_oss if b not in ("CUTLASS_MXFP4_MXFP4", "HUMMING")), other=RULES_033.other[:-1],
    asked_mxfp4=_without(ASKED_MXFP4_033, *MOE_EP), asked_nvfp4=_without(ASKED_NVFP4_033, *MOE_EP),
    options=RULES_033.options - {"flashinfer_moe_ep_cutedsl"} | {"flashinfer_moe_ep_mega_cutedsl"})

_e = _changed(_e, ("FlashInferCuteDSLExperts",), activations=_e["FlashInferCuteDSLExperts"].activations - {"situ"})
_e = _changed(_e, HUMMING_CLASSES, schemes=_without(_e["HummingIndexedExperts"].schemes, ("mxfp4", "fp8_per_block_dynamic")))
_028 = replace(
    _030, version="0.28", experts=_e, humming_by_ep=False,
    asked_mxfp4=_without(_030.asked_mxfp4, "b12x"), asked_nvfp4=_without(_030.asked_nvfp4, "b12x"),
    options=_030.options - {"b12x", "flashinfer_moe_ep_mega_deep_gemm", "flashinfer_moe_ep_mega_cutedsl"},
    clamped=_030.clamped - {"B12X"})

_OLD = APPLY - {"situ", "swigluoai_uninterleave"}
_e = _changed(_e, ("UnfusedOAITritonExperts",), activations=frozenset({"silu", "gelu", "swigluoai", "swiglustep"}))
_e = _changed(_e, ("TrtLlmMxfp4ExpertsMonolithic",), routing=frozenset({"Renormalize", "RenormalizeNaive"}))
_e = _changed(_e, _TRTLLM_NVFP4S, activations=frozenset({"silu", "relu2_no_mul", "gelu"}))
_e = _changed(_e, ("TrtLlmNvFp4ExpertsMonolithic",), routing=(TRTLLM_ROUTING | {"Simulated"}) - {"Sigmoid"}, logits=None)
_e = _changed(_e, ("FlashInferExperts",), activations=frozenset({"silu", "relu2_no_mul", "swigluoai"}))
_e = _changed(_e, ("FlashInferCuteDSLExperts",), activations=frozenset({"silu"}), non_gated=False)
_e = _changed(_e, _CUTLASSES, activations=_OLD - {"gelu_tanh", "gelu_tanh_no_mul"}, batch_invariant=False)
_e = _changed(_e, ("CutlassExpertsMxfp4", "DeepGemmFP4Experts"), sm=SM10X)
_e = _changed(_e, ("MarlinExperts", "BatchedMarlinExperts"), activations=_OLD, refuses=(TWO_SIDED, ONE_SIDED))
_e = _changed(_e, _EMULATIONS, activations=_OLD, before=None, after=None, lora=True)
# Humming's is_supported_config asked for nothing but the format and the kind of GEMM.
_e = _changed(_e, HUMMING_CLASSES, file="fused_humming_moe.py", schemes=schemes_of("mxfp4", ANY), activations=frozenset(ACTIVATIONS),
              needs=None, lora=True)
_e = _changed(_e, ("BatchedHummingGroupedExperts",), gemm=None)
_021 = replace(
    _028, version="0.21", experts=_e, by_key="no", clamped=None, activations=frozenset(ACTIVATIONS) - {"situ", "swigluoai_uninterleave"},
    routings=RULES_033.routings - {"Sigmoid"}, methods=_methods_030 | {
        ("mxfp4", "gpt-oss"): (replace(METHODS_033["mxfp4", "gpt-oss"][0], keys=(None,)),),
        ("mxfp4", "quark"): (replace(METHODS_033["mxfp4", "quark"][0], keys=(None, "fp8_per_tensor_static")),),
        ("nvfp4", "modelopt"): (replace(METHODS_033["nvfp4", "modelopt"][0], keys=("nvfp4",)),),
        ("nvfp4", "quark"): ()},
    gpt_oss=tuple(b for b in _028.gpt_oss if not b.endswith("MXFP8")), nvfp4_order=tuple(b for b in NVFP4_ORDER if b != "HUMMING"),
    asked_mxfp4=_028.asked_mxfp4 | {
        "flashinfer_trtllm": ("FLASHINFER_TRTLLM_MXFP4_BF16",), "flashinfer_cutlass": ("FLASHINFER_CUTLASS_MXFP4_BF16",)},
    asked_nvfp4=_without(_028.asked_nvfp4, "flashinfer_b12x", "humming"), options=_028.options - {"batched_triton", "flashinfer_b12x"})
VERSIONS: dict[str, Rules] = {r.version: r for r in (_021, _028, _030, RULES_033)}


def rules_of(version: str) -> Rules:
    """The rules of one vLLM release. Raises MxdebugError for one whose sources were not read."""
    known = version.removesuffix(".0") if version.count(".") == 2 else version
    if known not in VERSIONS:
        raise MxdebugError("vLLM version", f"one of {', '.join(f'{v}.0' for v in VERSIONS)}", version,
                           "the rules of selection change between releases")
    return VERSIONS[known]
