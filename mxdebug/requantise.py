"""How kernels quantise activations: MXFP8 and NVFP4 as FlashInfer's code computes them, approximate reciprocals included.

`formats.quantise` rounds exactly; these follow the kernels' order of float32 operations. Their reciprocals are rcp.approx.ftz, whose
results are those of an H200 here (`mufu`); whether SM100's are the same was not measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from . import mufu
from .errors import MxdebugError
from .formats import E2M1, E4M3, MXFP8, NVFP4, BlockFormat, BlockTensor, pack_fp4


@dataclass(frozen=True)
class Quantiser:
    """A kernel's way from values to a block format. gscale: whether values are multiplied with a global scale first."""

    name: str
    format: BlockFormat
    source: str
    _run: Callable[[Tensor, Tensor, Tensor | None], BlockTensor] = field(repr=False)

    def __call__(self, x: Tensor, gscale: Tensor | None = None) -> BlockTensor:
        """x [T, K] -> its codes and block scales; the global scale of the result is 1, since kernels have that factor in the GEMM's alpha.

        gscale  float32 scalar, NVFP4 only: what x is multiplied with before quantisation (448 * 6 / amax)
        Raises MxdebugError for a gscale too many or too few, and for K that is no whole number of blocks.
        """
        if self.format.outer != (gscale is not None):
            raise MxdebugError("activation global scale", f"{'a float32 scalar' if self.format.outer else 'none'} for {self.format.name}",
                               "none" if gscale is None else "one")
        if x.shape[-1] % self.format.block:
            raise MxdebugError("activations", f"a last dimension that is a multiple of {self.format.block}", f"shape {list(x.shape)}")
        blocks = x.float().unflatten(-1, (-1, self.format.block))
        return self._run(blocks, blocks.abs().amax(-1), None if gscale is None else gscale.float().to(x.device))


def reciprocal(x: Tensor) -> Tensor:
    """rcp.approx.ftz of finite positive float32 values of any size."""
    mantissa, exponent = torch.frexp(x.double())
    return torch.ldexp(mufu.rcp((2 * mantissa).float().clamp(min=1.0)).double(), 1 - exponent).float()


def _mxfp8(blocks: Tensor, amax: Tensor, gscale: Tensor | None) -> BlockTensor:
    s = amax * mufu.rcp(torch.tensor(448.0, device=amax.device))
    # Rounded up to a power of two: the exponent, one more where any fraction bit is set; what is at most 2^-127 becomes code 0.
    bits = s.view(torch.int32)
    code = ((bits >> 23) & 0xFF) + ((bits & 0x7FFFFF) != 0).int()
    code = torch.where(s <= 2.0**-127, 0, code).clamp(max=254)
    code = torch.where(torch.isnan(s), 255, code)
    inverse = torch.where((code == 0) | (code >= 254), 0.0, torch.ldexp(torch.ones_like(s), 127 - code))
    codes = E4M3.encode((blocks * inverse[..., None]).clamp(-448.0, 448.0).flatten(-2))
    return BlockTensor(codes, code.to(torch.uint8), MXFP8)


def _nvfp4(blocks: Tensor, scales: Tensor, inverse: Tensor) -> BlockTensor:
    codes = E2M1.encode((blocks * inverse[..., None]).nan_to_num(0.0).flatten(-2))  # the instruction turns NaN into a number
    return BlockTensor(pack_fp4(codes), scales, NVFP4, torch.ones((), dtype=torch.float32, device=blocks.device))


def _nvfp4_cuda(blocks: Tensor, amax: Tensor, g: Tensor) -> BlockTensor:
    scales = E4M3.encode(g * (amax * mufu.rcp(torch.tensor(6.0, device=amax.device))))
    decoded = E4M3.decode(scales)
    return _nvfp4(blocks, scales, torch.where(decoded != 0, reciprocal(decoded * reciprocal(g)), 0.0))


def _nvfp4_cutedsl(blocks: Tensor, amax: Tensor, g: Tensor) -> BlockTensor:
    scales = E4M3.encode(amax * torch.tensor(1.0 / 6.0, device=amax.device) * g)
    decoded = E4M3.decode(scales)
    return _nvfp4(blocks, scales, torch.where(decoded != 0, reciprocal(decoded) * g, torch.finfo(torch.float32).max))


_CUDA = "FlashInfer 0.7.4, csrc/nv_internal/tensorrt_llm/kernels/quantization_utils.cuh"
MXFP8_CUDA = Quantiser("MXFP8, exponent rounded up", MXFP8, f"{_CUDA} cvt_warp_fp16_to_mxfp8", _mxfp8)
NVFP4_CUDA = Quantiser("NVFP4", NVFP4, f"{_CUDA} cvt_warp_fp16_to_fp4", _nvfp4_cuda)
NVFP4_CUTEDSL = Quantiser("NVFP4 of CuTe-DSL", NVFP4, "FlashInfer 0.7.4, fused_moe/cute_dsl/blackwell/"
                          "blockscaled_contiguous_gather_grouped_gemm_act_fusion.py, epilogue", _nvfp4_cutedsl)
# What engines quantise activations with in front of a kernel: flashinfer mxfp8_quantize, fp4_quantize.
QUANTISERS = {MXFP8.name: MXFP8_CUDA, NVFP4.name: NVFP4_CUDA}
