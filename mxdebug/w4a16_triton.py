"""A second, independent NVFP4 W4A16 linear layer: a small Triton kernel that reads the bytes FlashInfer's cute-dsl kernels read.

It shares no code with `mxdebug.layouts`, `mxdebug.formats` or the PyTorch emulation: addresses and values are worked out below, from

- flashinfer 0.7.4, gemm/gemm_bf16_fp4_cute_dsl.py: `_prepare_cute_dsl_sm100`, `_prepare_cute_dsl_sm12x`, `_cute_dsl_pack_fp4_weight`,
  `_e4m3_to_s0e5m3`; cute_dsl/utils.py: `convert_sf_to_mma_layout`;
- OCP Microscaling Formats 1.0, 5.3.1 and 5.3.3: E4M3 (OCP 8-bit floating point) and E2M1.

Not tuned: each thread fetches the byte of its own element. Needs an NVIDIA GPU of SM80 or newer, or Triton's interpreter, which runs on a
CPU where TRITON_INTERPRET=1 is set before Triton is imported. Importing this module needs no Triton.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from .errors import MxdebugError

tl: Any = None  # triton.language, once a kernel is asked for: Triton finds it among this module's globals


def _kernel(a, b, scales, alpha, c, M, N, K, ROWS: tl.constexpr, BLOCK: tl.constexpr,
            SM100: tl.constexpr, FP16: tl.constexpr, INTERPRETED: tl.constexpr):
    """One program computes c[m, n] for ROWS tokens and BLOCK (64) output features, in steps of BLOCK input features.

    a       bf16 [M, K]
    b       SM100: uint8 [N, K/2], else int32 [K/16, 2N]
    scales  uint8. SM100: E4M3 in 128x4 order, else S0E5M3 [K/16, N]
    alpha   float32 [1]
    c       bf16 [M, N]; float32 where interpreted

    INTERPRETED: Triton's interpreter (3.9.0) multiplies the bits of bfloat16 as if they were whole numbers (create_dot), and cuts bits off
    where it should round to bfloat16 (create_fp_trunc). There the factors are turned into float32, and the result stays it.
    """
    m = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    n = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)[None, :]
    total = tl.zeros((ROWS, BLOCK), dtype=tl.float32)
    for start in range(0, K, BLOCK):
        step = start + tl.arange(0, BLOCK)
        x = tl.load(a + m * K + step[None, :], mask=m < M, other=0.0)
        k = step[:, None]

        # Where the code and its scale are: [BLOCK k, BLOCK n].
        if SM100:
            # Rows as in the checkpoint, two elements a byte. Scales in blocks of 128 rows x 4 columns (512 bytes), one row of blocks after
            # the other; within one, row r is the r//32'th group of four bytes in the r%32'th line of 16 bytes.
            code = tl.load(b + n * (K // 2) + k // 2).to(tl.int32) >> k % 2 * 4
            column = k // 16
            block = n // 128 * ((K // 16 + 3) // 4) + column // 4
            scale = tl.load(scales + block * 512 + n % 32 * 16 + n % 128 // 32 * 4 + column % 4).to(tl.int32)
        else:
            # Tiles of 16 k x 64 n, 128 words each, those of the same 16 k next to each other. A tile is what 2 x 32 lanes of an MMA hold:
            # n = 32 h + 16 i + 8 w + c and k = 8 j + 2 r + (0, 1) lie in word 64 w + 2 lane + h, lane = 4 c + r, byte 2 i + j.
            within = n % 64
            lane = within % 8 * 4 + k % 8 // 2
            word = k // 16 * (2 * N) + n // 64 * 128 + within % 16 // 8 * 64 + lane * 2 + within // 32
            byte = within % 32 // 16 * 2 + k % 16 // 8
            code = tl.load(b + word) >> (byte * 8 + k % 2 * 4).to(tl.int32)
            scale = tl.load(scales + k // 16 * N + n).to(tl.int32)

        # E2M1: sign, two exponent bits, one bit of mantissa. Twice the value is a whole number: 0 1 | 2 3 | 4 6 | 8 12.
        exponent, mantissa = code >> 1 & 3, code & 1
        twice = tl.where(exponent == 0, mantissa, (2 + mantissa) << tl.maximum(exponent, 1) - 1)
        twice = tl.where((code & 8) != 0, -twice, twice).to(tl.float32)

        # Both scale formats are parts of a float16. S0E5M3: all but the sign and the last seven bits of the mantissa. E4M3 likewise, with a
        # sign, and an exponent whose bias is 7, not 15: the float16 is the value * 2^-8, subnormals included. 0x7F and 0xFF are NaN.
        if SM100:
            bits = (scale & 0x7F) << 7 | (scale & 0x80) << 8
            factor = bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32) * 256.0
            factor = tl.where((scale & 0x7F) == 0x7F, float("nan"), factor)
        else:
            factor = (scale << 7).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)

        w = twice * 0.5 * factor  # two and four significant bits: exact in bfloat16, and in float16 up to 65504
        if FP16:
            total = tl.dot(x.to(tl.float32).to(tl.float16), w.to(tl.float16), acc=total)
        elif INTERPRETED:
            total = tl.dot(x.to(tl.float32), w.to(tl.bfloat16).to(tl.float32), acc=total, input_precision="ieee")
        else:
            total = tl.dot(x, w.to(tl.bfloat16), acc=total)
    tl.store(c + m * N + n, (total * tl.load(alpha)).to(c.dtype.element_ty), mask=m < M)


@cache
def _compiled() -> Any:
    """`_kernel` under triton.jit. MxdebugError where Triton is missing."""
    global tl
    try:
        import triton
        import triton.language
    except ImportError as e:
        raise MxdebugError("this machine", "Triton", str(e), "torch for CPU comes without it: pip install triton") from e
    tl = triton.language
    return triton.jit(_kernel)


def mm_bf16_fp4(a: Tensor, b: Tensor, b_descale: Tensor, alpha: Tensor, activations_as_fp16: bool = False) -> Tensor:
    """bf16(alpha * a @ w^T), the sum in float32, of the operands as flashinfer.mm_bf16_fp4(backend="cute-dsl") takes them -> bf16 [M, N].

    a          bf16 [M, K], contiguous; M arbitrary, N and K multiples of 64
    b          as prepared for SM100/103: uint8 [N, K/2], E2M1, the even element in the low nibble;
               for SM12x: int32 [K/16, 2N], see `_cute_dsl_pack_fp4_weight`
    b_descale  SM100/103: uint8 or float8_e4m3fn [32, 4, ceil(N/128), 4, K/64, 1], a strided view of bytes in 128x4 order;
               SM12x: uint8 [K/16, N], S0E5M3: the float16 with the bits byte << 7
    alpha      float32 [1]
    activations_as_fp16   convert both operands of the product to float16 first, as SM12x's tiled kernel does (its GEMV for M = 1 does
               not): inf above 65504, fewer bits below 2^-14. The caller knows which

    MxdebugError where an operand is another, and where this machine runs no Triton.
    """
    sm100 = b.dtype == torch.uint8
    m, n, k = _sizes(a, b, b_descale, alpha, sm100)
    kernel = _compiled()
    if not (interpreted := type(kernel).__name__ == "InterpretedFunction"):
        _check_gpu(a)
    out = torch.empty(m, n, dtype=torch.float32 if interpreted else torch.bfloat16, device=a.device)
    if not m:
        return out.bfloat16()
    if sm100:
        b_descale = b_descale.view(torch.uint8).permute(5, 2, 4, 0, 1, 3)  # the order of the memory; nothing is moved
    rows, block = 16 if m <= 16 else 64, 64
    grid = n // block, -(-m // rows)
    flags = {"SM100": sm100, "FP16": activations_as_fp16, "INTERPRETED": interpreted}
    with torch.cuda.device_of(a):
        kernel[grid](a, b, b_descale, alpha, out, m, n, k, ROWS=rows, BLOCK=block, **flags)
    return out.bfloat16()


def _sizes(a: Tensor, b: Tensor, b_descale: Tensor, alpha: Tensor, sm100: bool) -> tuple[int, int, int]:
    """M, N, K, all checked. MxdebugError names the operand that does not fit."""
    if a.dtype != torch.bfloat16 or a.dim() != 2 or not a.is_contiguous():
        raise MxdebugError("a", "contiguous bfloat16 [M, K]", _said(a), "activations are not quantised on this path")
    m, k = a.shape
    if b.dtype not in (torch.uint8, torch.int32) or b.dim() != 2 or not b.is_contiguous():
        expected = "contiguous uint8 [N, K/2] (SM100/103) or int32 [K/16, 2N] (SM12x)"
        raise MxdebugError("b", expected, _said(b), "not what prepare_bf16_fp4_weights returns")
    n = b.shape[0] if sm100 else b.shape[1] // 2
    if k % 64 or n % 64 or not k or not n:
        raise MxdebugError("a, b", "N and K multiples of 64", f"N {n}, K {k}", "the weight was not padded")
    if tuple(b.shape) != (want := (n, k // 2) if sm100 else (k // 16, 2 * n)):
        raise MxdebugError("b", f"shape {list(want)}", _said(b), "another layer's weight, or one that was prepared for the other GPUs")
    shape, dtypes = (k // 16, n), (torch.uint8,)
    if sm100:
        shape, dtypes = (32, 4, -(-n // 128), 4, k // 64, 1), (torch.uint8, torch.float8_e4m3fn)
    if b_descale.dtype not in dtypes or tuple(b_descale.shape) != shape:
        expected = f"{' or '.join(map(str, dtypes))} {list(shape)}"
        raise MxdebugError("b_descale", expected, _said(b_descale), "scales prepared for the other GPUs, or not at all")
    if not (b_descale.permute(5, 2, 4, 0, 1, 3) if sm100 else b_descale).is_contiguous():
        expected = "a view of bytes in 128x4 order" if sm100 else "contiguous bytes"
        raise MxdebugError("b_descale", expected, _said(b_descale), "it was copied, or sliced")
    if alpha.dtype != torch.float32 or tuple(alpha.shape) != (1,):
        raise MxdebugError("alpha", "float32 [1]", _said(alpha), "the global scale is a multiplier in float32")
    if len(devices := {t.device for t in (a, b, b_descale, alpha)}) > 1:
        raise MxdebugError("operands", "one device", ", ".join(sorted(map(str, devices))), "some were not moved")
    return m, n, k


def _check_gpu(a: Tensor) -> None:
    """MxdebugError where the compiled kernel cannot run on the device of `a`."""
    if not a.is_cuda:
        reason = "move them, or set TRITON_INTERPRET=1 before Triton is imported"
        raise MxdebugError("this machine", "operands on an NVIDIA GPU, or Triton's interpreter", f"operands on {a.device}", reason)
    if (sm := torch.cuda.get_device_capability(a.device)) < (8, 0):
        raise MxdebugError("this machine", "SM80 or newer", f"SM{sm[0]}{sm[1]}", "older GPUs multiply no bfloat16")


def _said(t: Tensor) -> str:
    """dtype, shape and strides of a tensor, for messages."""
    return f"{t.dtype} {list(t.shape)}, strides {list(t.stride())}"
