"""What an engine's error text, or a line of its log, says about an NVFP4 W4A16 linear layer."""

from __future__ import annotations

from ..symptom import Symptom, fitting

# What vLLM 0.33 or FlashInfer 0.7.4 writes -> what it means, and which entry of `mxdebug faults` it is.
SYMPTOMS = (
    Symptom(
        "FlashInfer CuTe-DSL W4A16 requires BF16 input, got torch.float16",
        r"W4A16 requires BF16 input",
        (
            "vLLM stopped at the first forward, while it profiles memory (apply_weights of the CuTe-DSL or b12x W4A16 kernel): the model runs in FP16 and this kernel takes BF16 only. "
            "vLLM does not look at the dtype when it selects the kernel (activations-not-bf16). Serve with --dtype bfloat16, or --linear-backend marlin; "
            "`mxdebug select-linear --sm SM --dtype float16` says it beforehand"
        ),
    ),
    Symptom(
        "a.shape[1]=368 but b.shape=(256, 192) encodes K=384",
        r"a\.shape\[1\]=\d+ but .*(encodes K=|k inferred)",
        (
            "FlashInfer refuses activations whose width is not the weight's padded K: padded by payload bytes where elements are meant (x-padded-by-bytes: the "
            "first number is K plus half of the padding), or not padded (x-not-padded)"
        ),
    ),
    Symptom(
        "b_descale has 2816 bytes but the 128x4-swizzled layout for N=256, K_sf=24 requires at least 6144",
        r"b_descale has \d+ bytes but the 128x4-swizzled layout",
        (
            "FlashInfer's prepare_bf16_fp4_weights got fewer scale bytes than the padded weight has blocks: linear scales that were never padded to 128 rows and "
            "4 columns (scales-linear), or a checkpoint with one scale for 32 elements (group-32-as-16)"
        ),
    ),
    Symptom(
        "cute-dsl bf16 x fp4 on SM100 expects the torch.uint8 weight returned by prepare_bf16_fp4_weights(..., backend='cute-dsl'); got torch.int32.",
        r"cute-dsl bf16 x fp4 on SM\d+ expects the torch\.\w+ weight",
        (
            "the weight was prepared for the other architecture, or not at all: SM100 and SM103 take the uint8 payload, SM12x int32 tiles. Often a state dict that "
            "was saved after loading, on another GPU; convert again from the checkpoint"
        ),
    ),
    Symptom(
        "In NVFP4 linear, the global weight scale differs across parallel layers (e.g. q_proj, k_proj, v_proj). This will likely reduce accuracy.",
        r"In NVFP4 linear, the (global weight scale differs|weight global scale is different)",
        (
            "only a warning, and a real fault: joined projections (q, k, v; gate, up) have different global scales, and the kernel takes one number for all "
            "(global-shared-by-parts). `mxdebug diagnose` prints by how much each part is off"
        ),
    ),
    Symptom(
        "CutlassNvFp4LinearKernel does not support W4A16",
        r"(Cutlass|Emulation)NvFp4LinearKernel does not support W4A16",
        (
            "VLLM_BATCH_INVARIANT forces a kernel that quantises activations, and refuses weight-only layers; no backend can be chosen beside it"
        ),
    ),
    Symptom(
        "NVFP4 weight_scale for layer model.layers.0.mlp.down_proj was never loaded",
        r"NVFP4 weight_scale for layer .* was never loaded",
        (
            "the file has no block scales for this layer: it is stored unquantised and should be in the ignore list, or the names do not match"
        ),
    ),
    Symptom(
        "Dropping input_scale from a weight-only W4A16",
        r"Dropping input_scale from a weight-only W4A16",
        "harmless: the file has an input scale, and W4A16 does not quantise activations",
    ),
    Symptom(
        "The size of tensor a (256) must match the size of tensor b (200) at non-singleton dimension 1",
        r"The size of tensor a \(\d+\) must match the size of tensor b \(\d+\) at non-singleton dimension 1",
        (
            "if the larger number is N rounded up to 64 and the smaller is N: the bias was added before the padded output was cut to N (bias-before-slice)"
        ),
    ),
)


def symptom(text: str) -> str | None:
    """What the text says about an NVFP4 W4A16 linear layer; None for text that is not of this family."""
    found = fitting(SYMPTOMS, text)
    return found[0].meaning if found else None
