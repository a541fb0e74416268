"""Tokens in front of the exchange: made, quantised as an engine does it; and their scales as a kernel reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MxdebugError
from ..formats import BlockFormat
from ..layouts import Layout, SWIZZLE_128x4
from ..requantise import QUANTISERS


def quantise_activations(x: Tensor, format: BlockFormat, *, swizzled: bool,
                         global_scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Tokens [rows, K] -> (payload uint8, scale bytes uint8), as an engine's activation quantiser hands them on.

    Bytes by FlashInfer's own arithmetic (`requantise.QUANTISERS`). NVFP4 with `global_scale`, the multiplier of the values (vLLM's
    `a1_gscale` is its reciprocal, one for all ranks), which must be given. `swizzled` has no default: a default of True was one of
    vLLM's bugs.
    Linear scales are [rows, K/block]. Swizzled ones have the engine's shapes: MXFP8 flat (FlashInfer `mxfp8_quantize`, vLLM
    `swizzle_mxfp8_scale`); NVFP4 [rows padded to 128, columns padded to 4] (vLLM `scaled_fp4_quant`).
    Raises MxdebugError for another format, a missing or needless global scale, and rows that are no whole number of blocks.
    """
    if format.name not in ("MXFP8", "NVFP4"):
        raise MxdebugError("format of activations", "MXFP8 or NVFP4", format.name)
    if x.dim() != 2:
        raise MxdebugError("activations", "a matrix [tokens, hidden]", f"shape {list(x.shape)}")
    if format.outer != (global_scale is not None):
        want, got = ("one for all ranks", "none") if format.outer else ("none", "one")
        raise MxdebugError(f"{format.name} global scale", want, got,
                           "one from each rank's own maximum would differ between ranks" if format.outer else "only NVFP4 has one")
    q = QUANTISERS[format.name](x, None if global_scale is None else 1 / global_scale)
    return q.payload, _swizzle(q.scales, format) if swizzled else q.scales


def _swizzle(scales: Tensor, format: BlockFormat) -> Tensor:
    flat = SWIZZLE_128x4.pack(scales).flatten()
    return flat.view(SWIZZLE_128x4.padded(*scales.shape)) if format.outer else flat


def sample_tokens(rank: int, rows: int, hidden: int, seed: int) -> Tensor:
    """bf16 [rows, hidden]: tokens of one rank whose block scales differ by row and by block, so that a wrong order of scales shows.

    The blocks' levels are the same on all ranks, as outlier channels are; the rows' levels and the values are not.
    """
    blocks = torch.randint(-3, 4, (-(-hidden // 16),), generator=torch.Generator().manual_seed(seed)).repeat_interleave(16)[:hidden]
    g = torch.Generator().manual_seed(1000 * (seed + 1) + rank)
    levels = torch.randint(-3, 4, (rows, 1), generator=g) + blocks
    return (torch.randn(rows, hidden, generator=g) * torch.exp2(levels.float())).bfloat16()


def read_scales(buffer: Tensor, rows: int, columns: int, layout: Layout) -> tuple[Tensor, Tensor]:
    """(uint8 [rows, columns], bool [rows, columns]): the scale that a kernel reading `layout` finds for each row and block; and
    whether that lies beyond the buffer's end.

    CUTLASS does not check the buffer's size: FlashInfer's `writeSF` (cutlass_fused_moe_kernels.cuh) computes an offset from row and
    column. What lies beyond the end is unknown; the byte given for it is 0xFF, which is NaN in E8M0 and in E4M3.
    """
    flat, offsets = scale_bytes(buffer), layout.index_map(rows, columns).to(buffer.device)
    outside = offsets >= flat.numel()
    return torch.where(outside, 0xFF, flat[offsets.clamp(max=flat.numel() - 1)].int()).to(torch.uint8), outside


def scale_bytes(buffer: Tensor) -> Tensor:
    """uint8, flat: the bytes of a scale buffer of any shape. Raises MxdebugError for another dtype than one of bytes, and for none."""
    if buffer.element_size() != 1 or buffer.numel() == 0:
        raise MxdebugError("scale buffer", "a tensor of bytes (uint8, float8_e4m3fn, float8_e8m0fnu)",
                           f"{buffer.dtype}, shape {list(buffer.shape)}", "view an int32 pack as uint8 first")
    return buffer.contiguous().view(torch.uint8).flatten()
