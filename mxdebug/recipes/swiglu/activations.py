"""Which function does a kernel compute when vLLM asks for an activation? vLLM 0.33 with FlashInfer 0.7.4.

Activations are called by vLLM's names (MoEActivation), kernels' functions by FlashInfer's (ActivationType).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ...errors import MxdebugError

OAI = ("SWIGLUOAI", "SWIGLUOAI_UNINTERLEAVE")
_CUTLASS = {"SILU": "Swiglu", "GELU_TANH": "Geglu", "RELU2_NO_MUL": "Relu2", **dict.fromkeys(OAI, "Swiglu")}
_TRTLLM_MXFP4 = {"SILU": "Swiglu", "SWIGLUOAI": "Swiglu", "SITU": "Situ"}
_TRTLLM_NVFP4 = {"SILU": "Swiglu", "SWIGLUOAI_UNINTERLEAVE": "Swiglu", "GELU": "Geglu", "GELU_TANH": "Geglu",
                 "RELU2_NO_MUL": "Relu2", "SITU": "Situ"}
_CUTEDSL = {"SILU": "Swiglu", "SITU": "Swiglu", "RELU2_NO_MUL": "Relu2", **dict.fromkeys(OAI, "Swiglu")}
_MARLIN = dict.fromkeys(("SILU", "GELU", "GELU_TANH", "SITU", *OAI, "SWIGLUSTEP",
                         "SILU_NO_MUL", "GELU_NO_MUL", "GELU_TANH_NO_MUL", "RELU2_NO_MUL"))

# path -> activation that vLLM 0.33 accepts -> FlashInfer's ActivationType; None: Marlin, whose activation is an operation of vLLM.
# Rules: `_supports_activation` of each class in fused_moe/experts/, quantization/utils/flashinfer_utils.py activation_to_flashinfer_type.
SUPPORTED: Mapping[str, Mapping[str, str | None]] = MappingProxyType({
    "mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16": _CUTLASS, "mxfp4/FLASHINFER_CUTLASS_MXFP4_MXFP8": _CUTLASS,
    "mxfp4/FLASHINFER_TRTLLM_MXFP4_BF16": _TRTLLM_MXFP4, "mxfp4/FLASHINFER_TRTLLM_MXFP4_MXFP8": _TRTLLM_MXFP4,
    "nvfp4/FLASHINFER_CUTLASS": _CUTLASS, "nvfp4/FLASHINFER_TRTLLM": _TRTLLM_NVFP4, "nvfp4/FLASHINFER_CUTEDSL": _CUTEDSL,
    "mxfp4/MARLIN": _MARLIN, "nvfp4/MARLIN": _MARLIN})

_MEANS = {"SILU": "silu", "GELU": "gelu", "GELU_TANH": "gelu_tanh", "RELU2_NO_MUL": "relu2", **dict.fromkeys(OAI, "swiglu")}
_ERF = "fused_moe/cutlass_backend/cutlass_fused_moe_kernels.cuh doActivation: Geglu is cutlass GELU (erf), GegluTanh is GELU_taylor (tanh)"
_PHI = ("trtllm/batched_gemm/KernelRunner.h: GeGlu is gate * phi(gate) * up, and for Gelu the same header writes phi with tanh; "
        "the kernel itself is a binary and was not measured")


@dataclass(frozen=True)
class Landing:
    """What a kernel computes when vLLM asks it for `activation`.

    flashinfer_type  ActivationType; None: Marlin does not ask FlashInfer
    kind             the kind of `reference.Activation` that it computes; a swiglu that is passed no parameter is silu
    mismatch         how that differs from what the activation means; None: it does not
    source           where this was read
    """

    path: str
    activation: str
    flashinfer_type: str | None
    kind: str
    mismatch: str | None
    source: str

    def __str__(self) -> str:
        head = f"{self.path}: {self.activation} -> {self.flashinfer_type or 'an operation of vLLM'}, computes {self.kind} ({self.source})"
        return head if self.mismatch is None else f"{head}\n  mismatch: {self.mismatch}"


def lands_on(path: str, activation: str) -> Landing:
    """What `activation` (a name of vLLM's MoEActivation) computes on a path of vLLM 0.33 with FlashInfer 0.7.4.

    Raises MxdebugError for a path or an activation that vLLM does not accept there, and for one that no reference computes.
    """
    accepted = _accepted(path, activation)
    if activation not in _MEANS:
        raise MxdebugError(f"activation of {path}", f"one of {', '.join(a for a in accepted if a in _MEANS)}", activation,
                           "vLLM accepts it here, but no reference for it is written")
    kind, mismatch, source = _MEANS[activation], None, "fused_moe/experts/ and activation_to_flashinfer_type"
    if accepted is _MARLIN:
        source = "fused_moe/activation.py apply_moe_activation"
    elif accepted[activation] == "Geglu" and accepted is _CUTLASS:
        kind, source = "gelu", _ERF
        mismatch = ("the checkpoint means GELU with tanh, vLLM asks for Geglu, which is the erf GELU in CUTLASS; "
                    "FlashInfer's name for what was meant is GegluTanh (vLLM #45354, #56839)")
    elif accepted[activation] == "Geglu":
        kind, source = "gelu_tanh", _PHI
        if activation == "GELU":
            mismatch = "GELU (erf) and GELU_TANH land on the same Geglu, so it cannot be right for both; read as the tanh form"
    elif path == "nvfp4/FLASHINFER_CUTLASS" and activation == "SWIGLUOAI":
        source = "quantization/utils/flashinfer_fp4_moe.py reorder_w1w3_to_w3w1"
        mismatch = ("the function is right, the rows are not: SWIGLUOAI means rows gate, up, gate, up, and this path's converter "
                    "swaps halves (CuTe-DSL's takes them apart first); see vLLM #46641")
    return Landing(path, activation, accepted[activation], kind, mismatch, source)


def _accepted(path: str, activation: str) -> Mapping[str, str | None]:
    if path not in SUPPORTED:
        raise MxdebugError("path", f"one of {', '.join(SUPPORTED)}", path)
    if activation not in SUPPORTED[path]:
        raise MxdebugError(f"activation of {path}", f"one of {', '.join(SUPPORTED[path])}", activation,
                           "vLLM does not take this path for it (_supports_activation)")
    return SUPPORTED[path]
