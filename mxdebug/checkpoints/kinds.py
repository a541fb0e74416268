"""The kinds of quantised experts that are read, and what each calls its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..formats import MXFP4, NVFP4, BlockFormat
from ..recipes.vllm import CT_MXFP4, CT_NVFP4, GPT_OSS, MODELOPT

COMPRESSED_TENSORS, MODELOPT_NVFP4, COMPRESSED_TENSORS_NVFP4 = CT_MXFP4, MODELOPT, CT_NVFP4
KINDS = (GPT_OSS, COMPRESSED_TENSORS, MODELOPT_NVFP4, COMPRESSED_TENSORS_NVFP4)
SUPPORTED = ('quant_method "mxfp4" with gpt-oss names (*_proj_blocks, *_proj_scales); "compressed-tensors" '
             'with format "mxfp4-pack-quantized" (weight_packed, weight_scale) or "nvfp4-pack-quantized" (weight_global_scale too); '
             '"modelopt" with quant_algo "NVFP4" (weight, weight_scale, weight_scale_2)')


@dataclass(frozen=True)
class Leaves:
    """The last part of the names of a kind that has one tensor an expert and projection.

    payload       uint8 [N, K/2]
    scale         block scales [N, K/block] in one of `scale_dtypes`, as safetensors spells them
    global_scale  float32, one number: the global scale of the weight. None: the format has none
    input_scale   float32, one number: the global scale of the activations. None: the format has none
    divides       both are stored as divisors, not as multipliers
    """

    format: BlockFormat
    payload: str
    scale: str
    scale_dtypes: tuple[str, ...]
    global_scale: str | None = None
    input_scale: str | None = None
    divides: bool = False

    @property
    def all(self) -> tuple[str, ...]:
        """Every leaf that the kind knows; biases are common to all kinds."""
        return tuple(leaf for leaf in (self.payload, self.scale, self.global_scale, self.input_scale, "bias") if leaf is not None)


# Divisor or multiplier: vLLM compressed_tensors_moe_w4a4_nvfp4.py process_weights_after_loading inverts, modelopt.py's does not.
LEAVES: Mapping[str, Leaves] = {
    COMPRESSED_TENSORS: Leaves(MXFP4, "weight_packed", "weight_scale", ("U8", "F8_E8M0")),
    MODELOPT_NVFP4: Leaves(NVFP4, "weight", "weight_scale", ("F8_E4M3",), "weight_scale_2", "input_scale"),
    COMPRESSED_TENSORS_NVFP4: Leaves(NVFP4, "weight_packed", "weight_scale", ("F8_E4M3",), "weight_global_scale", "input_global_scale",
                                     divides=True),
}
