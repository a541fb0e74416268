"""Who hands a model's SwiGLU parameters on in vLLM: quantisation methods and experts classes, as tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...contracts.activation import PARAMETERS

FIX, V033 = "#48929", "0.33"
VERSIONS = (FIX, V033)
GPT_OSS_ALPHA, GPT_OSS_BETA, GPT_OSS_LIMIT = 1.702, 1.0, 7.0  # quantization/mxfp4.py GptOssMxfp4MoEMethod.get_fused_moe_quant_config
_GPT_OSS = {"alpha": GPT_OSS_ALPHA, "beta": GPT_OSS_BETA, "limit": GPT_OSS_LIMIT}


@dataclass(frozen=True)
class Method:
    """A quantisation method of vLLM: which of the layer's parameters it hands on to FusedMoEQuantConfig."""

    name: str
    hands_on: tuple[str, ...] = PARAMETERS
    constants: Mapping[str, float] = field(default_factory=dict)


GPT_OSS_METHOD = Method("quantization/mxfp4.py GptOssMxfp4MoEMethod", (), _GPT_OSS)
_PLAIN = Method("quantization/mxfp4.py Mxfp4MoEMethod", ("limit",))
W4A8 = Method("CompressedTensorsW4A8Mxfp4MoEMethod (an Mxfp4MoEMethod)", ("limit",))
W4A4 = Method("CompressedTensorsW4A4Mxfp4MoEMethod", ())
# (format of the path, quant_method of config.json's quantization_config; "online": quantised while loading) -> method, vLLM 0.33
METHODS: dict[tuple[str, str], Method] = {
    ("mxfp4", "mxfp4"): _PLAIN, ("mxfp4", "fp8"): _PLAIN, ("mxfp4", "compressed-tensors"): W4A4,
    ("mxfp4", "quark"): Method("quark/quark_moe.py QuarkOCP_MX_MoEMethod"),
    ("mxfp4", "online"): Method("online/mxfp4.py Mxfp4OnlineMoEMethod"),
    ("nvfp4", "modelopt"): Method("quantization/modelopt.py ModelOptNvFp4FusedMoE"),
    ("nvfp4", "modelopt_fp4"): Method("quantization/modelopt.py ModelOptNvFp4FusedMoE"),
    ("nvfp4", "compressed-tensors"): Method("CompressedTensorsW4A4Nvfp4MoEMethod"),
    ("nvfp4", "quark"): Method("quark/quark_moe.py QuarkNvfp4MoEMethod"),
    ("nvfp4", "online"): Method("online/nvfp4.py Nvfp4OnlineMoEMethod", ("limit",)),
}


@dataclass(frozen=True)
class Rule:
    """What an experts class makes of FusedMoEQuantConfig and of the model's FusedMoEConfig.

    falls_back  a parameter that the quantisation config lacks is taken from the model config
    whatever    all three are passed whatever the activation; otherwise SILU passes the limit, the two SWIGLUOAI all three
    default     a parameter that neither config gives, and what the default is
    fixed       SWIGLUOAI is computed with these, whatever is configured
    folded      parameters that are divided by g1_alphas, since the kernel applies them before it scales
    """

    source: str
    falls_back: bool = False
    whatever: bool = False
    default: Mapping[str, float] = field(default_factory=dict)
    default_is: str = ""
    fixed: Mapping[str, float] = field(default_factory=dict)
    folded: tuple[str, ...] = ()
    form: str = "float32 [experts of this rank]"


_FI, _MX, _NV = (f"experts/{n}.py" for n in ("flashinfer_cutlass_moe", "trtllm_mxfp4_moe", "trtllm_nvfp4_moe"))
_ONE = "one number for all experts"
MARLIN_RULE = Rule("fused_moe/activation.py apply_moe_activation", falls_back=True, fixed=_GPT_OSS, form=_ONE,
                   default={"alpha": 1.0, "beta": 0.0}, default_is="plain SiLU's value, since neither config gives one")
RULES: dict[tuple[str, str], Rule] = {
    **{(V033, f"mxfp4/FLASHINFER_CUTLASS_MXFP4_{a}"): Rule(f"{_FI} apply", whatever=True) for a in ("BF16", "MXFP8")},
    **{(V033, f"mxfp4/FLASHINFER_TRTLLM_MXFP4_{a}"): Rule(f"{_MX} TrtLlmMxfp4ExpertsBase", whatever=True) for a in ("BF16", "MXFP8")},
    (V033, "nvfp4/FLASHINFER_CUTLASS"): Rule(f"{_FI} apply"),
    (V033, "nvfp4/FLASHINFER_TRTLLM"): Rule(f"{_NV} TrtLlmNvFp4ExpertsBase", falls_back=True, whatever=True, folded=("beta", "limit")),
    (V033, "nvfp4/FLASHINFER_CUTEDSL"): Rule("experts/flashinfer_cutedsl_moe.py apply", form=_ONE),
    # The fix changed FlashInferExperts and MarlinExperts. Its defaults for MXFP4 are for every MXFP4 model, not only for gpt-oss.
    **{(FIX, f"mxfp4/FLASHINFER_CUTLASS_MXFP4_{a}"): Rule(
        f"{_FI} apply", falls_back=True, whatever=True, default=_GPT_OSS,
        default_is=f"vLLM's constant for gpt-oss, given to every MXFP4 model ({_FI}; gone since #48303)") for a in ("BF16", "MXFP8")},
    (FIX, "nvfp4/FLASHINFER_CUTLASS"): Rule(f"{_FI} apply", falls_back=True),
    **{(v, f"{f}/MARLIN"): MARLIN_RULE for v in VERSIONS for f in ("mxfp4", "nvfp4")},
}
