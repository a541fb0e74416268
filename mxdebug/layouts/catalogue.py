"""The layouts in use, as records. Each is byte-exact against the kernel or the function that its `source` names."""

from __future__ import annotations

from torch import Tensor

from .layout import Layout

LINEAR = Layout("linear", "r c -> r c", (), pads=False, source="row-major, as checkpoints store it")

SWIZZLE_128x4 = Layout(
    "128x4", "(mt m4 m32) (kt k4) -> mt kt m32 m4 k4", (("m4", 4), ("m32", 32), ("k4", 4)), pads=True,
    source="FlashInfer block_scale_interleave; NVIDIA cuBLAS 1D block scaling factors layout")

SWIZZLE_8x4 = Layout(
    "8x4", "(mt m8) (kt k4) -> mt kt m8 k4", (("m8", 8), ("k4", 4)), pads=True,
    source="FlashInfer SfLayout.layout_8x4, trtllm-gen kernels for few tokens")

SM90_SCALE_FOLD = Layout(
    "SM90 scale fold", "(rb s f) (kb g) -> rb kb f s g", (("s", 4), ("f", 16), ("g", 4)), pads=False,
    source="FlashInfer interleave_moe_scales_for_sm90_mixed_gemm, uint8 scales, group 32: K a multiple of 128")

V_CACHE_4x4 = Layout(
    "V-cache 4x4", "(tt t4) s -> tt s t4", (("t4", 4),), pads=False,
    source="trtllm-gen NVFP4 KV cache: the V scales of one page and head, tokens x scale columns")

TRANSPOSED = Layout("transposed", "r c -> c r", (), pads=False,
                    source="FlashInfer _prepare_cute_dsl_sm12x: scales as [K/16, N] (recoded to S0E5M3)")

# Where each field of the eight 4-bit codes in a word goes, from moe_gemm_mixed_utils.cu. One entry a line of the
# kernel: (mask of source bits, left shift). Sign, exponent and mantissa move apart so that two instructions turn four
# codes into bf16 without a table.
_FP4_MOVES = (
    (0x00000080, 24), (0x00000070, 18), (0x00000008, 12), (0x00000007, 6),
    (0x00008000, 13), (0x00007000, 7), (0x00000800, 1), (0x00000700, -5),
    (0x00800000, 2), (0x00700000, -4), (0x00080000, -10), (0x00070000, -16),
    (0x80000000, -1), (0x10000000, 1), (0x60000000, -3), (0x08000000, -13), (0x01000000, -11), (0x06000000, -15),
)
_FP4_BITS = tuple(next(b + shift for mask, shift in _FP4_MOVES if mask >> b & 1) for b in range(32))

SM90_WEIGHT_INTERLEAVE = Layout(
    # Tiles of 16 rows x 32 bytes. h: row r or r + 8; q: the byte or the one 4 further; both are woven into one word.
    "SM90 weight interleave", "(rb h r8) (p mh ml q l4) -> rb ml r8 p mh l4 q h",
    (("h", 2), ("r8", 8), ("mh", 2), ("ml", 2), ("q", 2), ("l4", 4)), pads=False, bits=_FP4_BITS, compiled="sm90_weights",
    source="FlashInfer interleave_moe_weights_for_sm90_mixed_gemm('fp4'), moe_gemm_mixed_utils.cu")

SM12X_WEIGHT_TILES = Layout(
    # Tiles of 64 rows (N) x 8 bytes (K); read as int32 the result is [K/16, 2N].
    "SM12x weight tiles", "(nt u bh w c) (kt kb rh) -> kt nt w c rh u bh kb",
    (("u", 2), ("bh", 2), ("w", 2), ("c", 8), ("kb", 2), ("rh", 4)), pads=False,
    source="FlashInfer _cute_dsl_pack_fp4_weight")

MISTAKEN_128x4 = Layout(
    "128x4 with rows split (32, 4)", "(mt m32 m4) (kt k4) -> mt kt m32 m4 k4", (("m32", 32), ("m4", 4), ("k4", 4)), pads=True,
    source="a mistake of references (NVIDIA Fuser pull request 4745): no kernel reads this")

SCALE_LAYOUTS = (SM90_SCALE_FOLD, LINEAR, SWIZZLE_128x4, SWIZZLE_8x4, TRANSPOSED, V_CACHE_4x4)
WEIGHT_LAYOUTS = (SM90_WEIGHT_INTERLEAVE, LINEAR, SM12X_WEIGHT_TILES)
LAYOUTS = {layout.name: layout for layout in (*SCALE_LAYOUTS, *WEIGHT_LAYOUTS)}


def cutedsl_sm100_view(physical: Tensor) -> Tensor:
    """The 6-D strided view of 128x4 scale bytes that CuTe-DSL's SM100/103 kernels take; no byte moves.

    uint8 [groups, mt, kt, 32, 4, 4] or [mt, kt, 32, 4, 4] -> view [32, 4, mt, 4, kt, groups].
    Source: FlashInfer convert_sf_to_mma_layout.
    """
    return physical.reshape(-1, *physical.shape[-5:]).permute(3, 4, 1, 5, 2, 0)
