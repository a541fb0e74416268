"""What an engine's error text says about SwiGLU parameters."""

from __future__ import annotations

from ..symptom import Symptom, fitting

# What vLLM or FlashInfer writes -> what it means. #48929 is the family: parameters that a model states and an engine does not pass.
SYMPTOMS = (
    Symptom(
        "SWIGLUOAI_UNINTERLEAVE requires clamp_limit",
        r"requires (gemm1_)?clamp_limit", (
        "vLLM stopped before the kernel (fused_moe/activation.py apply_moe_activation): SWIGLUOAI_UNINTERLEAVE needs swiglu_limit and none "
        "arrived. The family of vLLM #48929: config.json states it, and the quantisation method does not hand it on (#45624, #51028). "
        "alpha and beta may be lost at the same place; that would not be reported, they become 1 and 0")),
    Symptom(
        "kernel does not support MoEActivation.SWIGLUOAI_UNINTERLEAVE activation",
        r"does not support (MoEActivation\.)?SWIGLUOAI", (
        "vLLM's adapter of this path does not list the activation, though the kernel may compute it: half of vLLM #48929. A version before "
        "the fix, or a path that takes only one of SWIGLUOAI (rows interleaved) and SWIGLUOAI_UNINTERLEAVE")),
    Symptom(
        "Model sets swiglu_limit=7.0, but the explicitly requested moe_backend='flashinfer_b12x' does not apply the SwiGLU clamp",
        r"does not apply the SwiGLU clamp", (
        "vLLM refuses a backend that would lose swiglu_limit (oracle/nvfp4.py select_nvfp4_moe_backend): the loss of vLLM #48929, refused "
        "instead of silent. Choose a backend from the list in the message")),
    Symptom(
        "swiglu_limit must have 16 element(s)",
        r"swiglu_(alpha|beta|limit) must have \d+ element", (
        "FlashInfer's CUTLASS binding wants one float32 for each expert of this rank (checkedActivationScale): the parameters of vLLM "
        "#48929 arrive, but one for each expert of all ranks, or a single number")),
)


def symptom(text: str) -> str | None:
    """What an engine's error text says about SwiGLU parameters; None for text that is not of this family."""
    found = fitting(SYMPTOMS, text)
    return found[0].meaning if found else None
