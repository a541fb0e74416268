"""What do the bits mean? Element codecs, scale codecs, and the block formats made of them.

A *codec* says which number a code stands for. A *block format* says which element codec, which scale codec and how
many elements share one block scale. Which scale codec a kernel really applies belongs to the kernel's contract
(SM90's MXFP4 kernel reads the E8M0 byte 0x00 as 0.0, not as 2^-127), so `dequantise` takes it as an argument.

Values: OCP Microscaling Formats (MX) v1.0 for E2M1, E4M3, E5M2, E8M0; NVIDIA for NVFP4.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from . import fast
from .errors import MxdebugError


E2M1_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)
"""Between neighbours of E2M1's magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6."""


class _Named:
    """What this module defines is pickled as its name: in another process, too, `is` says which format it is."""

    def __reduce_ex__(self, protocol: int) -> str | tuple:
        return next((name for name, value in globals().items() if value is self), None) or super().__reduce_ex__(protocol)


@dataclass(frozen=True)
class ElementCodec(_Named):
    """A sign-exponent-mantissa element type; every number below follows from these fields.

    `max` is the largest finite value, `emax` the exponent of its binade. Codes have the sign in the top bit.
    """

    name: str
    bits: int
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    emax: int

    def table(self) -> Tensor:
        """float32 [2**bits]: the value of each code (NaN and inf where the type has them)."""
        return _element_table(self)

    def decode(self, codes: Tensor) -> Tensor:
        """uint8 codes of any shape -> float32 values of the same shape."""
        return self.table().to(codes.device)[codes.long()]

    def encode(self, x: Tensor) -> Tensor:
        """Values -> uint8 codes: round to nearest, ties to the even code, saturate at +-max; -0 keeps its sign.

        NaN becomes the NaN code 0x7F where the type has one; E2M1 has none and raises MxdebugError.
        """
        x = x.float()
        magnitude = x.abs()
        if self.bits == 4:
            if torch.isnan(x).any():
                raise MxdebugError("values", "finite numbers", "NaN", f"{self.name} has no code for NaN")
            code = torch.zeros_like(x, dtype=torch.uint8)
            for upper in range(1, 8):
                code += _reaches(magnitude, upper)
            return code | (torch.signbit(x).to(torch.uint8) << 3)
        dtype = {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}[self.name]
        code = magnitude.clamp(max=self.max).to(dtype).view(torch.uint8)
        code = torch.where(torch.isnan(x), torch.full_like(code, 0x7F), code)
        return code | (torch.signbit(x).to(torch.uint8) << 7)


def _reaches(magnitude: Tensor, code: int) -> Tensor:
    """Whether magnitudes round to this code of E2M1, 1 to 7, or a larger one: at a tie the even code wins."""
    midpoint = E2M1_MIDPOINTS[code - 1]
    return magnitude >= midpoint if code % 2 == 0 else magnitude > midpoint


@functools.cache
def _element_table(codec: ElementCodec) -> Tensor:
    code = torch.arange(2**codec.bits, dtype=torch.int32)
    mantissa = code & (2**codec.mantissa_bits - 1)
    exponent = (code >> codec.mantissa_bits) & (2**codec.exponent_bits - 1)
    sign = 1.0 - 2.0 * (code >> (codec.bits - 1)).double()
    fraction = mantissa.double() / 2**codec.mantissa_bits
    normal = exponent > 0
    value = torch.where(normal, 1 + fraction, fraction) * torch.exp2(torch.where(normal, exponent, 1).double() - codec.bias)
    if codec.name == "E4M3":
        value[(code & 0x7F) == 0x7F] = torch.nan
    if codec.name == "E5M2":
        value[exponent == 31] = torch.where(mantissa[exponent == 31] == 0, torch.inf, torch.nan).double()
    return (sign * value).float()


E2M1 = ElementCodec("E2M1", bits=4, exponent_bits=2, mantissa_bits=1, bias=1, max=6.0, emax=2)
E4M3 = ElementCodec("E4M3", bits=8, exponent_bits=4, mantissa_bits=3, bias=7, max=448.0, emax=8)
E5M2 = ElementCodec("E5M2", bits=8, exponent_bits=5, mantissa_bits=2, bias=15, max=57344.0, emax=15)


@dataclass(frozen=True)
class ScaleCodec(_Named):
    """How one scale byte is read as a number: `table()` is float32 [256]. `source` says who reads it so."""

    name: str
    source: str
    _read: Callable[[Tensor], Tensor] = field(repr=False)

    def table(self) -> Tensor:
        """float32 [256]: the value of each byte."""
        return _scale_table(self)

    def decode(self, codes: Tensor) -> Tensor:
        """uint8 bytes of any shape -> float32 values of the same shape."""
        return self.table().to(codes.device)[codes.long()]


@functools.cache
def _scale_table(codec: ScaleCodec) -> Tensor:
    return codec._read(torch.arange(256, dtype=torch.int32))


def _read_e8m0(code: Tensor) -> Tensor:
    value = torch.exp2(code.double() - 127)
    value[255] = torch.nan
    return value.float()  # 0x00 is 2^-127, an fp32 subnormal


E8M0 = ScaleCodec("E8M0", "OCP MX v1.0: 2^(byte-127); 0xFF is NaN; there is no zero", _read_e8m0)
E8M0_SM90 = ScaleCodec(
    "E8M0_SM90",
    "FlashInfer sm90_mma_array_tma_gmma_rs_warpspecialized_mixed_input_.hpp: byte << 23 as fp32 bits; 0x00 is 0.0, 0xFF is inf",
    lambda code: (code << 23).view(torch.float32),
)
E4M3_SCALE = ScaleCodec("E4M3", "NVFP4: an E4M3 number, >= 0 in practice; 0x7F is NaN", lambda code: E4M3.table().clone())
S0E5M3 = ScaleCodec(
    "S0E5M3",
    "FlashInfer gemm_bf16_fp4_cute_dsl.py (SM12x): the fp16 with bits byte << 7",
    lambda code: (code << 7).to(torch.int16).view(torch.float16).float(),
)
S0E5M3_MARLIN = ScaleCodec(
    "S0E5M3_MARLIN",
    "vLLM marlin_utils_fp4.py nvfp4_marlin_process_scales: S0E5M3 of scale * 2^7, so the value is 2^-7 of it",
    lambda code: (code << 7).to(torch.int16).view(torch.float16).float() / 128,
)


def recode_e4m3_to_s0e5m3(scales: Tensor) -> Tensor:
    """E4M3 scale bytes -> S0E5M3 bytes as SM12x's CuTe-DSL kernel wants them. Exact for every scale >= 0.

    Source: FlashInfer `_e4m3_to_s0e5m3`: the upper bits of the fp16 of the same value; the sign is dropped.
    """
    half = scales.contiguous().view(torch.float8_e4m3fn).half()  # torch's own cast: it gives NaN the bits that FlashInfer gets
    return ((half.view(torch.int16).int() >> 7) & 0xFF).to(torch.uint8)


def recode_e4m3_to_s0e5m3_marlin(scales: Tensor) -> Tensor:
    """E4M3 scale bytes -> Marlin's S0E5M3 bytes. Lossy: where scale * 2^7 < 2 the scale becomes 0.

    Source: vLLM `nvfp4_marlin_process_scales` with scale_factor 1.
    """
    value = scales.contiguous().view(torch.float8_e4m3fn).half() * 128
    value[value < 2] = 0
    return ((value.view(torch.int16).int() >> 7) & 0xFF).to(torch.uint8)


@dataclass(frozen=True)
class BlockFormat(_Named):
    """`block` elements along the last axis share one block scale; `outer` says that a float32 global scale multiplies all."""

    name: str
    block: int
    element: ElementCodec
    scale: ScaleCodec
    outer: bool

    @property
    def bits_per_element(self) -> float:
        """Storage cost with the block scale's share, without the outer scale."""
        return self.element.bits + 8 / self.block

    @property
    def packed(self) -> bool:
        """Two elements a byte, the even index in the low nibble."""
        return self.element.bits == 4


MXFP4 = BlockFormat("MXFP4", 32, E2M1, E8M0, outer=False)
MXFP8 = BlockFormat("MXFP8", 32, E4M3, E8M0, outer=False)
MXFP8_E5M2 = BlockFormat("MXFP8_E5M2", 32, E5M2, E8M0, outer=False)
NVFP4 = BlockFormat("NVFP4", 16, E2M1, E4M3_SCALE, outer=True)
FORMATS = {f.name: f for f in (MXFP4, MXFP8, MXFP8_E5M2, NVFP4)}


def words(t: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes of uint8 [..., n] as words [..., n / size of dtype]; n is a multiple of that size.

    They are copied where they are not contiguous, or start within a word, as a slice of a buffer may: torch views neither.
    """
    t = t.contiguous()
    return (t.clone() if t.storage_offset() % dtype.itemsize else t).view(dtype)


def pack_fp4(codes: Tensor) -> Tensor:
    """uint8 codes 0..15 [..., K] -> uint8 payload [..., K/2]; the even index goes to the low nibble."""
    if codes.shape[-1] % 2:
        raise MxdebugError("E2M1 codes", "an even last dimension", f"shape {list(codes.shape)}", "two codes share a byte")
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_fp4(payload: Tensor) -> Tensor:
    """uint8 payload [..., K/2] -> uint8 codes 0..15 [..., K]."""
    return torch.stack([payload & 0x0F, payload >> 4], dim=-1).flatten(-2)


@dataclass(frozen=True)
class BlockTensor:
    """A quantised tensor in logical order: row r, element k of the payload has block scale (r, k // block).

    payload  uint8 [..., K/2] (4-bit elements) or [..., K] (8-bit elements)
    scales   uint8 [..., K/block], bytes of the format's scale codec
    global_scale  float32 multiplier, scalar or [...] over leading axes; None where the format has none
    """

    payload: Tensor
    scales: Tensor
    format: BlockFormat
    global_scale: Tensor | None = None

    def __post_init__(self) -> None:
        f = self.format
        for name, t in (("payload", self.payload), ("block scales", self.scales)):
            if t.dtype != torch.uint8:
                reason = "a scale cast by value or viewed as a float" if name == "block scales" else ""
                raise MxdebugError(f"{f.name} {name}", "dtype torch.uint8", str(t.dtype), reason)
        if f.outer != (self.global_scale is not None):
            raise MxdebugError(f"{f.name} global scale", "a float32 tensor" if f.outer else "none",
                               "none" if f.outer else "one", "mixing up NVFP4 and MX formats")
        want = [*self.payload.shape[:-1], self.columns // f.block]
        if self.columns % f.block or list(self.scales.shape) != want:
            raise MxdebugError(
                f"{f.name} block scales", f"shape {want}, one for {f.block} elements of payload {list(self.payload.shape)}",
                f"shape {list(self.scales.shape)}", "another block size, a transposed tensor, or scales already in a kernel's layout")

    @property
    def columns(self) -> int:
        """K, the number of elements in a row."""
        return self.payload.shape[-1] * (2 if self.format.packed else 1)

    @property
    def shape(self) -> tuple[int, ...]:
        """The logical shape [..., K]."""
        return (*self.payload.shape[:-1], self.columns)

    def codes(self) -> Tensor:
        """uint8 element codes [..., K]."""
        return unpack_fp4(self.payload) if self.format.packed else self.payload

    def elements(self) -> Tensor:
        """float32 [..., K]: the elements' values without any scale."""
        return _dequantise_elements(self.payload, self.format)

    def dequantise(self, dtype: torch.dtype = torch.float32, scale: ScaleCodec | None = None, out: Tensor | None = None) -> Tensor:
        """Values [..., K]: element * block scale (* global scale), computed in float32.

        `scale` replaces the format's scale codec by the one that a kernel reads with. `out` takes the values, contiguous [..., K] of that dtype;
        it is what is returned. Raises MxdebugError for another `out`.
        """
        codec = scale or self.format.scale
        if out is not None and (out.shape != self.shape or out.dtype != dtype or not out.is_contiguous() or out.device != self.payload.device):
            raise MxdebugError("out", f"contiguous {dtype} {list(self.shape)} on {self.payload.device}", f"{out.dtype} {list(out.shape)} on {out.device}")
        if (made := dequantise_fast(self, dtype, codec, out)) is not None:
            return made
        values = self.elements().unflatten(-1, (-1, self.format.block))
        values = (values * codec.decode(self.scales).unsqueeze(-1)).flatten(-2)
        if self.global_scale is not None:
            g = self.global_scale.float().to(values.device)
            values = values * g.reshape(*g.shape, *[1] * (values.dim() - g.dim()))
        return values.to(dtype) if out is None else out.copy_(values)

    def __getitem__(self, index: object) -> BlockTensor:
        """Select along leading axes (experts, rows); the last axis, and so the blocks, stays whole."""
        g = self.global_scale
        if g is not None and g.dim() > 0:
            g = g[index[: g.dim()] if isinstance(index, tuple) else index]
        return replace(self, payload=self.payload[index], scales=self.scales[index], global_scale=g)


MANY = 8
"""Global scales from which on threads share them out, and not the rows of each."""


def _of_parts(g: Tensor, t: Tensor) -> bool:
    """Whether each entry of a global scale is for a part of t's leading axes, or one is for all; else it broadcasts otherwise, or does not fit."""
    return g.dim() < t.dim() and (g.numel() == 1 or g.shape == t.shape[: g.dim()])


def dequantise_fast(t: BlockTensor, dtype: torch.dtype, codec: ScaleCodec, out: Tensor | None) -> Tensor | None:
    """As `BlockTensor.dequantise`, by a compiled kernel; None where there is none for this tensor. The bytes are the same."""
    g = t.global_scale
    if g is not None and (g.requires_grad or not _of_parts(g, t.payload)):
        return None
    outer = None if g is None else g.float().flatten().to(t.payload.device)
    parts = 1 if outer is None else len(outer)
    if dtype.itemsize not in (2, 4) or not dtype.is_floating_point or parts == 0 or t.payload.numel() // parts < fast.PART:
        return None
    if (compiled := fast.on_cpu(t.payload, t.scales)) is None:
        gpu = fast.on_gpu(t.payload, t.scales)
        return None if gpu is None else gpu.dequantise(t, dtype, codec, outer, out)
    out = torch.empty(t.shape, dtype=dtype) if out is None else out
    payload, scales, values = (x.reshape(parts, -1, x.shape[-1]) for x in (t.payload, t.scales, out))

    def some(first: int, end: int) -> None:
        for i in range(first, end):  # the values of every payload byte under every scale byte are one table, and small
            table = _products(t.format, codec, dtype) if outer is None else _multiplied(_products(t.format, codec, torch.float32), outer[i], dtype)
            compiled.look_up(payload[i], scales[i], table, values[i])

    if parts >= MANY:  # each thread makes its tables itself
        fast.spread(some, parts)
    else:
        some(0, parts)
    return out


@functools.cache
def _products(fmt: BlockFormat, codec: ScaleCodec, dtype: torch.dtype) -> Tensor:
    """[256, 256, elements of a byte]: the value of each payload byte under each scale byte."""
    return (byte_values(fmt.element) * codec.table()[:, None, None]).to(dtype)


def _multiplied(table: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """table * factor, in parts so small that torch does not wake its threads: they spin for milliseconds after, on the cores of those that follow."""
    return torch.cat([(part * factor).to(dtype) for part in table.split(32)])


@functools.cache
def byte_values(element: ElementCodec) -> Tensor:
    """float32 [256, elements of a byte]: what the codes in each payload byte stand for; of two the low nibble first."""
    table = element.table()
    return table[:, None] if element.bits == 8 else torch.stack([table.repeat(16), table.repeat_interleave(16)], dim=-1)


def _dequantise_elements(payload: Tensor, fmt: BlockFormat) -> Tensor:
    if not fmt.packed:
        return fmt.element.table().to(payload.device)[payload.long()]
    return torch.nn.functional.embedding(payload.int(), byte_values(fmt.element).to(payload.device)).flatten(-2)


EXPONENT_RULES = ("floor", "ceil", "even")


def _quotient(x: Tensor, by: float) -> Tensor:
    """x / by, rounded once. By a Python number torch divides on CUDA as a multiplication with the rounded inverse."""
    return x / torch.full((1,) * x.dim(), by, dtype=x.dtype, device=x.device)


def shared_exponent(amax: Tensor, element: ElementCodec, rule: str) -> Tensor:
    """E8M0 bytes for block maxima `amax` (float32, any shape) by a named rule.

    floor  floor(log2 amax) - emax                       OCP MX v1.0, gpt-oss, torchao's default
    ceil   ceil(log2(amax / max element))                called RCEIL; vLLM's and FlashInfer's quantisers
    even   floor(log2 of amax rounded to the element's mantissa) - emax

    Clamped to 0x00..0xFE; NaN gives 0xFF; a block of zeros gives 0x00; inf counts as the binade above the largest
    float32 (so the block reads as inf again, and torchao's bytes are the same).
    """
    if rule not in EXPONENT_RULES:
        raise MxdebugError("exponent rule", f"one of {', '.join(EXPONENT_RULES)}", repr(rule))
    amax = amax.float()
    nan = torch.isnan(amax)
    if rule == "ceil":
        # Exact in float64: m in [0.5, 1), so amax/max is a power of two only where m is exactly 0.5.
        m, e = torch.frexp(_quotient(amax.double(), element.max))
        exponent = torch.where(m == 0.5, e - 1, e)
    else:
        if rule == "even":
            # Adding half a unit of the last mantissa place to the bits carries into the exponent exactly where the
            # maximum rounds up to the next power of two (torchao ScaleCalculationMode.EVEN). Only the exponent is kept:
            # above the largest binade stands inf, not a NaN.
            amax = ((amax.view(torch.int32) + (1 << (23 - element.mantissa_bits - 1))) & 0x7F800000).view(torch.float32)
        exponent = torch.frexp(amax.double())[1] - 1 - element.emax
    exponent = torch.where(torch.isinf(amax), 128 - (0 if rule == "ceil" else element.emax), exponent)
    exponent = torch.where(amax == 0, -127, exponent).clamp(-127, 127)
    return torch.where(nan, 255, exponent + 127).to(torch.uint8)


def quantise(x: Tensor, fmt: BlockFormat, *, rule: str | None = None, global_scale: Tensor | None = None) -> BlockTensor:
    """Quantise values [..., K] (K a multiple of the block) along the last axis.

    MX formats: `rule` names the shared-exponent rule and must be given (`floor`, `ceil` or `even`).
    NVFP4: `rule` must be None (its block scale is the E4M3 nearest to amax / 6 / global scale); `global_scale` is the
    float32 multiplier, by default amax(x) / (448 * 6), as ModelOpt stores it in `weight_scale_2`.
    Elements round to nearest, ties to even. Raises MxdebugError for unaligned K, a missing rule, non-finite values in NVFP4.
    """
    if x.dim() == 0 or x.shape[-1] % fmt.block:
        raise MxdebugError("values", f"a last dimension that is a multiple of {fmt.block}", f"shape {list(x.shape)}",
                           f"{fmt.name} shares one scale among {fmt.block} elements; pad first, on purpose")
    finite: bool | Tensor = True
    if fmt.outer:
        if rule is not None:
            raise MxdebugError("exponent rule", f"none for {fmt.name}", repr(rule), "its block scales are E4M3, not powers of two")
        ends = torch.stack((x if x.is_floating_point() else x.float()).aminmax()).abs() if x.numel() else torch.zeros(1, device=x.device)
        finite = torch.isfinite(ends).all()
        if not isinstance(global_scale, Tensor | None):
            raise MxdebugError("global scale", "a float32 tensor", type(global_scale).__name__)
        if global_scale is None:
            global_scale = _quotient(ends.amax().float(), E4M3.max * E2M1.max).clamp(min=torch.finfo(torch.float32).tiny)
    elif rule not in EXPONENT_RULES:
        raise MxdebugError("exponent rule", f"one of {', '.join(EXPONENT_RULES)}", "none" if rule is None else repr(rule),
                           "quantisers differ here, so mxdebug has no default" if rule is None else "")
    made = quantise_fast(x, fmt, rule, global_scale)
    if not finite:  # asked so late since a GPU answers only when it has done all before
        raise MxdebugError("values", "finite numbers", "NaN or inf", "an overflow upstream")
    if made is not None:
        return made
    if global_scale is not None and not global_scale.isfinite().all():
        raise MxdebugError("global scale", "finite numbers", "NaN or inf", "a scale that was never loaded, or not made from the values")
    blocks = x.double().unflatten(-1, (-1, fmt.block))
    amax = blocks.abs().amax(dim=-1)
    outer = None if global_scale is None else global_scale.double().reshape(*global_scale.shape, *[1] * (amax.dim() - global_scale.dim()))
    scales = block_scales(amax, fmt, rule, outer)
    by = block_divisors(scales, fmt, outer)[..., None]
    codes = fmt.element.encode(_quotients(blocks, by)).flatten(-2)
    return BlockTensor(pack_fp4(codes) if fmt.packed else codes, scales, fmt, global_scale)


def block_scales(amax: Tensor, fmt: BlockFormat, rule: str | None, outer: Tensor | None) -> Tensor:
    """uint8: the scale bytes of blocks with these maxima, by an exponent rule or under a global scale, float64, that broadcasts."""
    if outer is None:
        return shared_exponent(amax.float(), fmt.element, str(rule))
    return E4M3.encode((_quotient(amax.double(), fmt.element.max) / outer).float())


def block_divisors(scales: Tensor, fmt: BlockFormat, outer: Tensor | None) -> Tensor:
    """float64: what elements under these scale bytes are divided by; 0 where they become zeros."""
    if outer is not None:
        return fmt.scale.decode(scales).double() * outer
    power = torch.exp2(scales.double() - 127)
    return torch.where(scales == 255, 0.0, power) if fmt.packed else power  # such a block reads as NaN through its scale


def _quotients(values: Tensor, by: Tensor) -> Tensor:
    """float32: what is rounded to codes, of float64 values and divisors that broadcast; 0 where the divisor is."""
    return torch.where(by == 0, 0.0, values / torch.where(by == 0, 1.0, by)).float()


def quantise_fast(x: Tensor, fmt: BlockFormat, rule: str | None, global_scale: Tensor | None) -> BlockTensor | None:
    """As `quantise`, by a compiled kernel; None where there is none for these values. The bytes are the same."""
    x, g = x.detach(), None if global_scale is None else global_scale.detach()
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32) or x.numel() == 0 or fmt.outer != (g is not None):
        return None
    if fmt.block not in (16, 32) or not fmt.packed and (fmt.outer or fmt.block == 16):
        return None
    if g is not None:
        # A table takes as long as quantising some 100,000 numbers by torch.
        if not _of_parts(g, x) or g.device != x.device or x.nbytes // g.numel() < 16 * fast.PART:
            return None
    compiled = fast.on_cpu(x) or fast.on_gpu(x)
    if compiled is None:
        return None
    x = x.float() if x.dtype == torch.float16 else x
    table = _table(fmt, rule, x.device, x.dtype) if g is None else _table_of(fmt, None, g.double().reshape(-1, 1), x.device, x.dtype)
    if table is None or g is not None and not (g.isfinite() & (g != 0)).all():  # asked so late as in `quantise`
        return None
    return BlockTensor(*compiled.quantise(x, fmt, *table), fmt, global_scale)


def _table_of(fmt: BlockFormat, rule: str | None, outer: Tensor | None, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor] | None:
    """What the kernels' `quantise` wants of a rule, or of each global scale of float64 [parts, 1]."""
    found = fast.step_table(lambda amax: block_scales(amax, fmt, rule, outer), device, dtype)
    if found is None:
        return None
    by = block_divisors(torch.arange(256, dtype=torch.uint8, device=device), fmt, outer).reshape(-1, 256)
    if not fmt.packed:
        return *found, (1 / by).float()  # powers of two
    by = by.nan_to_num(0).clamp(min=0)[..., None]  # no block has the byte that is NaN, nor one of another sign than its global scale

    def reaches(x: Tensor) -> Tensor:
        return torch.stack([_reaches(q, code) for code, q in enumerate(_quotients(x.double(), by).unbind(-1), start=1)], -1)

    return *found, fast.least_with(reaches, by * torch.tensor(E2M1_MIDPOINTS, device=device), dtype)


@functools.cache
def _table(fmt: BlockFormat, rule: str | None, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor] | None:
    return _table_of(fmt, rule, None, device, dtype)
