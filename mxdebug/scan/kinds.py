"""The kinds of quantised weights that a scan reads, and what each calls its tensors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..checkpoints.kinds import COMPRESSED_TENSORS, COMPRESSED_TENSORS_NVFP4, GPT_OSS, LEAVES, MODELOPT_NVFP4
from .header import Entry

QUARK_MXFP4, MODELOPT_MXFP8, COMPRESSED_TENSORS_MXFP8 = "Quark MXFP4", "ModelOpt MXFP8", "compressed-tensors mxfp8-quantized"


@dataclass(frozen=True)
class Kind:
    """What a kind calls its tensors, and what is in them.

    payload, scale, global_scale, input_scale   the last part of names; None: the kind has none. scale may have several spellings
    payload_dtype  as safetensors spells it; scale_dtypes likewise
    packed         two elements a byte (E2M1); else one (E4M3)
    block          elements that share a scale
    e4m3           block scales are E4M3 (else E8M0)
    divides        global and input scales are stored as divisors
    """

    name: str
    payload: str
    scale: tuple[str, ...]
    payload_dtype: str
    scale_dtypes: tuple[str, ...]
    packed: bool
    block: int
    e4m3: bool
    global_scale: str | None = None
    input_scale: str | None = None
    divides: bool = False

    @property
    def format(self) -> str:
        return "NVFP4" if self.e4m3 else "MXFP4" if self.packed else "MXFP8"

    @property
    def block_bytes(self) -> int:
        """Payload bytes of one block."""
        return self.block // 2 if self.packed else self.block

    def role(self, leaf: str) -> str | None:
        """payload, scale, global, input or bias; None for a leaf that the kind does not have."""
        roles = {self.payload: "payload", self.global_scale: "global", self.input_scale: "input", "bias": "bias"} | {
            s: "scale" for s in self.scale
        }
        return roles.get(leaf)


_E8M0 = ("U8", "F8_E8M0")


def _of(name: str) -> Kind:
    leaves = LEAVES[name]
    return Kind(
        name,
        leaves.payload,
        (leaves.scale,),
        "U8",
        leaves.scale_dtypes,
        True,
        leaves.format.block,
        leaves.format.outer,
        leaves.global_scale,
        leaves.input_scale,
        leaves.divides,
    )


# Quark: vLLM quantization/quark/schemes/quark_ocp_mx.py. MXFP8: vLLM modelopt.py ModelOptMxFp8LinearMethod, and compressed_tensors
# compressors/mxfp8; MiniMax writes weight_scale_inv (vLLM reads it by ModelOpt's rules).
KINDS: Mapping[str, Kind] = {
    k.name: k
    for k in (
        Kind(GPT_OSS, "blocks", ("scales",), "U8", _E8M0, True, 32, False),
        _of(COMPRESSED_TENSORS),
        _of(COMPRESSED_TENSORS_NVFP4),
        _of(MODELOPT_NVFP4),
        Kind(QUARK_MXFP4, "weight", ("weight_scale",), "U8", _E8M0, True, 32, False),
        Kind(MODELOPT_MXFP8, "weight", ("weight_scale", "weight_scale_inv"), "F8_E4M3", _E8M0, False, 32, False),
        Kind(COMPRESSED_TENSORS_MXFP8, "weight", ("weight_scale",), "F8_E4M3", _E8M0, False, 32, False),
    )
}
HARMLESS = frozenset({"weight_shape", "q_scale", "k_scale", "v_scale"})
"""Leaves beside quantised weights that say nothing about them: the unpacked shape, and scales of the KV cache."""

INT4 = {"weight_packed": "I32"}
"""Leaf and dtype of compressed-tensors' INT4, eight codes a word, whose other names are those of its 4-bit floats."""


def kinds_of(leaves: Mapping[str, Entry | None]) -> tuple[str, ...]:
    """The kinds that a module's tensors may belong to, by names and dtypes; none for what is not quantised in a known way.

    An Entry is None where the file says only that the tensor exists.
    """

    def dtype(leaf: str) -> str | None:
        entry = leaves.get(leaf)
        return entry.dtype if entry is not None else None

    if "weight_packed" in leaves:
        e4m3 = "weight_global_scale" in leaves or dtype("weight_scale") == "F8_E4M3"
        return (COMPRESSED_TENSORS_NVFP4,) if e4m3 else (COMPRESSED_TENSORS,)
    if "weight_global_scale" in leaves:
        return (COMPRESSED_TENSORS_NVFP4,)
    if "weight_scale_2" in leaves:
        return (MODELOPT_NVFP4,)
    scale = leaves.get("weight_scale", leaves.get("weight_scale_inv"))
    if "weight" in leaves and scale is not None:
        if dtype("weight") == "U8":
            return (MODELOPT_NVFP4,) if scale.dtype == "F8_E4M3" else (QUARK_MXFP4,)
        if dtype("weight") == "F8_E4M3" and (scale.dtype in _E8M0 or _mx_shape(leaves["weight"], scale)):
            return (MODELOPT_MXFP8, COMPRESSED_TENSORS_MXFP8) if "weight_scale" in leaves else (MODELOPT_MXFP8,)
    return ()


def _mx_shape(weight: Entry | None, scale: Entry) -> bool:
    """Scales of another dtype, but one for each 32 elements: MXFP8 all the same (FP8 in blocks of 128 x 128 has far fewer)."""
    return weight is not None and len(weight.shape) >= 2 and scale.shape == (*weight.shape[:-1], weight.shape[-1] // 32)
