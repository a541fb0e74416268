"""Do the bits mean what the specifications and three independent libraries say?

Oracles that we did not write: ml_dtypes (codes), gfloat (codes and rounding), torchao (quantisers), FlashInfer (S0E5M3).
Where libraries differ from each other, a test says which one we follow.
"""

from __future__ import annotations

import copy
import math
import pickle
import struct
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mxdebug.errors import MxdebugError
from mxdebug.formats import (E2M1, E4M3, E4M3_SCALE, E5M2, E8M0, E8M0_SM90, EXPONENT_RULES, FORMATS, MXFP4, MXFP8, MXFP8_E5M2, NVFP4,
                             S0E5M3, S0E5M3_MARLIN, BlockFormat, BlockTensor, ElementCodec, ScaleCodec, pack_fp4, quantise,
                             recode_e4m3_to_s0e5m3, recode_e4m3_to_s0e5m3_marlin, shared_exponent, unpack_fp4)

ELEMENTS = (E2M1, E4M3, E5M2)
ML_DTYPE = {"E2M1": "float4_e2m1fn", "E4M3": "float8_e4m3fn", "E5M2": "float8_e5m2"}


@pytest.mark.parametrize("known", [*FORMATS.values(), E2M1, E4M3_SCALE, S0E5M3_MARLIN], ids=lambda v: v.name)
def test_another_process_gets_the_same_format(known: object) -> None:
    """What asks `is NVFP4` must be answered alike for a layer that was sent to a worker."""
    assert pickle.loads(pickle.dumps(known)) is known and copy.deepcopy(known) is known


def test_a_format_of_ones_own_is_pickled_whole() -> None:
    own = replace(NVFP4, block=32)
    assert pickle.loads(pickle.dumps(own)) == own != NVFP4


@pytest.fixture(scope="module")
def ml_dtypes() -> object:
    return pytest.importorskip("ml_dtypes")


@pytest.fixture(scope="module")
def gfloat() -> SimpleNamespace:
    """gfloat with the OCP format of each of our codecs."""
    lib = pytest.importorskip("gfloat")
    formats = pytest.importorskip("gfloat.formats")
    names = {"E2M1": formats.format_info_ocp_e2m1, "E4M3": formats.format_info_ocp_e4m3, "E5M2": formats.format_info_ocp_e5m2,
             "E8M0": formats.format_info_ocp_e8m0}
    return SimpleNamespace(lib=lib, info=names)


@pytest.fixture(scope="module")
def torchao() -> SimpleNamespace:
    """The parts of torchao's MX prototype that serve as oracle."""
    pytest.importorskip("torchao")
    config = pytest.importorskip("torchao.prototype.mx_formats.config")
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    nv = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    kernels = pytest.importorskip("torchao.prototype.mx_formats.kernels")
    mode = config.ScaleCalculationMode
    return SimpleNamespace(mx=mx, nv=nv, kernels=kernels, mode={"floor": mode.FLOOR, "ceil": mode.RCEIL, "even": mode.EVEN})


def bits(x: Tensor | np.ndarray) -> np.ndarray:
    """The float32 bits, so that -0 differs from 0; all NaN become one."""
    values = np.asarray(x, dtype=np.float32)
    return np.where(np.isnan(values), np.uint32(0x7FC00000), np.ascontiguousarray(values).view(np.uint32))


def all_codes(codec: ElementCodec) -> np.ndarray:
    return np.arange(2**codec.bits, dtype=np.uint8)


def all_bf16() -> Tensor:
    """float32 [65536]: every bfloat16."""
    return torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def _below(x: float) -> float:
    return np.nextafter(np.float32(x), np.float32(0)).item()


def _above(x: float) -> float:
    return np.nextafter(np.float32(x), np.float32(np.inf)).item()


# -- element codes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ELEMENTS, ids=lambda c: c.name)
def test_every_code_decodes_as_in_ml_dtypes(codec: ElementCodec, ml_dtypes: object) -> None:
    want = all_codes(codec).view(getattr(ml_dtypes, ML_DTYPE[codec.name])).astype(np.float32)
    np.testing.assert_array_equal(bits(codec.decode(torch.from_numpy(all_codes(codec)))), bits(want))


@pytest.mark.parametrize("codec", ELEMENTS, ids=lambda c: c.name)
def test_every_code_decodes_as_in_gfloat(codec: ElementCodec, gfloat: SimpleNamespace) -> None:
    want = gfloat.lib.decode_ndarray(gfloat.info[codec.name], all_codes(codec).astype(np.int64))
    np.testing.assert_array_equal(bits(codec.table()), bits(want))


def test_e2m1_values_written_out() -> None:
    """OCP MX v1.0: S1 E2 M1, bias 1; code 8 is -0."""
    positive = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    np.testing.assert_array_equal(bits(E2M1.table()), bits(np.array(positive + [-v for v in positive])))


@pytest.mark.parametrize(("codec", "code", "value"), [
    (E4M3, 0x7E, 448.0), (E4M3, 0xFE, -448.0), (E4M3, 0x08, 2.0**-6), (E4M3, 0x01, 2.0**-9), (E4M3, 0x38, 1.0), (E4M3, 0x80, -0.0),
    (E4M3, 0x7F, math.nan), (E4M3, 0xFF, math.nan), (E4M3, 0x78, 256.0),
    (E5M2, 0x7B, 57344.0), (E5M2, 0x7C, math.inf), (E5M2, 0xFC, -math.inf), (E5M2, 0x7D, math.nan), (E5M2, 0x7F, math.nan),
    (E5M2, 0x04, 2.0**-14), (E5M2, 0x01, 2.0**-16), (E5M2, 0x3C, 1.0)])
def test_named_fp8_codes(codec: ElementCodec, code: int, value: float) -> None:
    np.testing.assert_array_equal(bits(codec.decode(torch.tensor([code], dtype=torch.uint8))), bits(np.array([value])))


@pytest.mark.parametrize("codec", ELEMENTS, ids=lambda c: c.name)
def test_max_and_emax_are_those_of_the_table(codec: ElementCodec) -> None:
    finite = codec.table()[torch.isfinite(codec.table())]
    assert codec.max == finite.max().item()
    assert codec.emax == math.floor(math.log2(codec.max))


# -- encoding ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("codec", ELEMENTS, ids=lambda c: c.name)
def test_every_finite_bf16_rounds_as_in_gfloat(codec: ElementCodec, gfloat: SimpleNamespace) -> None:
    """Nearest, ties to even, saturating. bf16 has 8 significant bits: it holds every tie and the neighbours of every tie."""
    x = all_bf16()
    x = x[torch.isfinite(x)]
    assert len(x) == 65536 - 2 * 128  # the exponent 255: inf and 127 NaN, twice
    rounded = gfloat.lib.round_ndarray(gfloat.info[codec.name], x.double().numpy(), rnd=gfloat.lib.RoundMode.TiesToEven, sat=True)
    codes = codec.encode(x)
    np.testing.assert_array_equal(bits(codec.decode(codes)), bits(rounded))
    want = gfloat.lib.encode_ndarray(gfloat.info[codec.name], rounded)
    np.testing.assert_array_equal(codes.numpy(), want.astype(np.uint8))


@pytest.mark.parametrize(("codec", "overflow"), [(E2M1, math.inf), (E4M3, 464.0), (E5M2, 61440.0)], ids=lambda v: getattr(v, "name", ""))
def test_every_bf16_that_does_not_overflow_encodes_as_in_ml_dtypes(codec: ElementCodec, overflow: float, ml_dtypes: object) -> None:
    """ml_dtypes overflows to NaN (E4M3 above 464, halfway to 480) or inf (E5M2 from 61440); here both saturate."""
    x = all_bf16()
    x = x[torch.isfinite(x)]
    inside = x.abs() <= overflow if codec is not E5M2 else x.abs() < overflow
    want = x.numpy().astype(getattr(ml_dtypes, ML_DTYPE[codec.name])).view(np.uint8)
    got = codec.encode(x).numpy()
    np.testing.assert_array_equal(got[inside], want[inside])
    sign = torch.signbit(x).to(torch.uint8).numpy() << (codec.bits - 1)
    largest = int(torch.where(codec.table() == codec.max)[0])
    np.testing.assert_array_equal(got[~inside], (sign | largest)[~inside])
    if codec is not E2M1:
        assert not np.array_equal(got, want)  # the libraries do differ there


@pytest.mark.parametrize(("x", "value"), [
    (0.25, 0.0), (0.75, 1.0), (1.25, 1.0), (1.75, 2.0), (2.5, 2.0), (3.5, 4.0), (5.0, 4.0),   # ties go to the even code
    (5.0 + 2**-20, 6.0), (1e30, 6.0), (math.inf, 6.0), (0.25 + 2**-25, 0.5), (0.75 - 2**-24, 0.5), (2.5 + 2**-22, 3.0)])
def test_e2m1_ties(x: float, value: float) -> None:
    for sign in (1.0, -1.0):
        got = E2M1.decode(E2M1.encode(torch.tensor([sign * x])))
        np.testing.assert_array_equal(bits(got), bits(np.array([sign * value])))


@pytest.mark.parametrize(("midpoint", "low", "high"), [
    (0.25, 0.0, 0.5), (0.75, 0.5, 1.0), (1.25, 1.0, 1.5), (1.75, 1.5, 2.0), (2.5, 2.0, 3.0), (3.5, 3.0, 4.0), (5.0, 4.0, 6.0)])
def test_e2m1_next_to_its_ties(midpoint: float, low: float, high: float) -> None:
    """One float32 below and above each midpoint: these are no ties."""
    x = torch.tensor([_below(midpoint), _above(midpoint)])
    assert E2M1.decode(E2M1.encode(x)).tolist() == [low, high]
    assert E2M1.decode(E2M1.encode(-x)).tolist() == [-low, -high]


def test_e4m3_of_480_saturates() -> None:
    """480 = 1.875 * 2^8 would be code 0x7F, which is NaN: torch 2.13 gives 448 too, ml_dtypes gives NaN."""
    assert E4M3.encode(torch.tensor([480.0, -480.0, math.inf, 464.0, 465.0])).tolist() == [0x7E, 0xFE, 0x7E, 0x7E, 0x7E]


def test_e5m2_infinity_saturates() -> None:
    assert E5M2.encode(torch.tensor([math.inf, -math.inf, 65504.0])).tolist() == [0x7B, 0xFB, 0x7B]


@pytest.mark.parametrize("codec", [E4M3, E5M2], ids=lambda c: c.name)
def test_nan_encodes_to_nan(codec: ElementCodec) -> None:
    codes = codec.encode(torch.tensor([math.nan, 1.0]))
    assert codes[0] == 0x7F and torch.isnan(codec.decode(codes)).tolist() == [True, False]


def test_e2m1_refuses_nan() -> None:
    with pytest.raises(MxdebugError, match="E2M1 has no code for NaN"):
        E2M1.encode(torch.tensor([1.0, math.nan]))


@pytest.mark.parametrize("codec", ELEMENTS, ids=lambda c: c.name)
def test_encode_inverts_decode(codec: ElementCodec) -> None:
    codes = torch.from_numpy(all_codes(codec))
    codes = codes[torch.isfinite(codec.decode(codes))]
    assert torch.equal(codec.encode(codec.decode(codes)), codes)


# -- scale codes ------------------------------------------------------------------------------------------------

BYTES = torch.arange(256, dtype=torch.uint8)


def test_e8m0_as_in_ml_dtypes_and_gfloat(ml_dtypes: object, gfloat: SimpleNamespace) -> None:
    np.testing.assert_array_equal(bits(E8M0.decode(BYTES)), bits(BYTES.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float32)))
    np.testing.assert_array_equal(bits(E8M0.table()), bits(gfloat.lib.decode_ndarray(gfloat.info["E8M0"], np.arange(256))))


def test_e8m0_named_codes() -> None:
    """There is no zero: 0x00 is 2^-127, an fp32 subnormal (bits 0x00400000)."""
    table = E8M0.table()
    assert table[0].item() == 2.0**-127 != 0.0 and bits(table[:1])[0] == 0x00400000
    assert table[127].item() == 1.0 and table[254].item() == 2.0**127 and math.isnan(table[255].item())


def test_e8m0_as_sm90_reads_it() -> None:
    """byte << 23 as fp32 bits: all 256, in plain Python; and where it differs from OCP's E8M0."""
    want = [struct.unpack("<f", struct.pack("<I", b << 23))[0] for b in range(256)]
    got = E8M0_SM90.decode(BYTES)
    np.testing.assert_array_equal(bits(got), bits(np.array(want)))
    assert got[0].item() == 0.0 and got[255].item() == math.inf
    different = [b for b in range(256) if bits(got)[b] != bits(E8M0.table())[b]]
    assert different == [0x00, 0xFF]


def test_nvfp4_scale_is_e4m3() -> None:
    np.testing.assert_array_equal(bits(E4M3_SCALE.table()), bits(E4M3.table()))


def test_s0e5m3_recoding_as_flashinfer() -> None:
    fi = pytest.importorskip("flashinfer.gemm.gemm_bf16_fp4_cute_dsl")
    assert torch.equal(recode_e4m3_to_s0e5m3(BYTES), fi._e4m3_to_s0e5m3(BYTES))


def test_s0e5m3_is_exact_for_every_scale_that_is_not_negative() -> None:
    scales = BYTES[:0x7F]
    assert torch.equal(S0E5M3.decode(recode_e4m3_to_s0e5m3(scales)), E4M3.decode(scales))


@pytest.mark.parametrize(("code", "value"), [(0x00, 0.0), (0x01, 2.0**-17), (0x78, 1.0), (0x7F, 1.875), (0x80, 2.0), (0xF7, 61440.0)])
def test_s0e5m3_named_codes(code: int, value: float) -> None:
    """5 exponent bits with bias 15, 3 mantissa bits: 0x78 = 01111 000 is 1.0; subnormals are multiples of 2^-14 / 8."""
    assert S0E5M3.decode(torch.tensor([code], dtype=torch.uint8)).item() == value
    assert S0E5M3_MARLIN.decode(torch.tensor([code], dtype=torch.uint8)).item() == value / 128


def test_marlin_recoding_loses_exactly_the_subnormal_scales() -> None:
    """The written rule: S0E5M3 of scale * 2^7, where that is below 2 it becomes 0. E4M3's subnormals are 1..7 times 2^-9:
    times 2^7 at most 1.75, so exactly these seven scales vanish; 2^-6 (0x08) is the first to stay."""
    got = recode_e4m3_to_s0e5m3_marlin(BYTES[:0x7F]).tolist()
    for code in range(0x7F):
        scaled = E4M3.table()[code].item() * 128
        if scaled < 2:
            want = 0
        else:
            m, e = math.frexp(scaled)  # scaled = (2m) * 2^(e-1), 2m in [1, 2)
            want = ((e - 1 + 15) << 3) | int((2 * m - 1) * 8)
        assert got[code] == want, hex(code)
    assert [c for c in range(1, 0x7F) if got[c] == 0] == [1, 2, 3, 4, 5, 6, 7]
    assert torch.equal(S0E5M3_MARLIN.decode(torch.tensor(got[8:], dtype=torch.uint8)), E4M3.decode(BYTES[8:0x7F]))


# -- packing ----------------------------------------------------------------------------------------------------


def test_the_even_index_is_in_the_low_nibble() -> None:
    codes = torch.tensor([1, 2, 3, 4, 0xF, 0x0], dtype=torch.uint8)
    assert pack_fp4(codes).tolist() == [0x21, 0x43, 0x0F]
    assert unpack_fp4(torch.tensor([0x21, 0x43, 0x0F], dtype=torch.uint8)).tolist() == codes.tolist()


def test_packing_as_torchao(torchao: SimpleNamespace) -> None:
    payload = torch.arange(256, dtype=torch.uint8).reshape(4, 64)
    assert torch.equal(unpack_fp4(payload), torchao.kernels.unpack_uint4(payload).reshape(4, 128))
    codes = torch.randint(0, 16, (3, 34), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(pack_fp4(codes), torchao.kernels.pack_uint4(codes))
    values = torchao.kernels.f4_unpacked_to_f32(codes)
    np.testing.assert_array_equal(bits(E2M1.decode(codes)), bits(values))


def test_an_odd_number_of_codes_cannot_be_packed() -> None:
    with pytest.raises(MxdebugError, match="even last dimension"):
        pack_fp4(torch.zeros(3, 5, dtype=torch.uint8))


# -- block formats ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fmt", "block", "element", "scale", "outer", "cost"), [
    (MXFP4, 32, "E2M1", "E8M0", False, 4.25), (MXFP8, 32, "E4M3", "E8M0", False, 8.25),
    (MXFP8_E5M2, 32, "E5M2", "E8M0", False, 8.25), (NVFP4, 16, "E2M1", "E4M3", True, 4.5)], ids=lambda v: getattr(v, "name", ""))
def test_format_records(fmt: BlockFormat, block: int, element: str, scale: str, outer: bool, cost: float) -> None:
    assert (fmt.block, fmt.element.name, fmt.scale.name, fmt.outer, fmt.bits_per_element) == (block, element, scale, outer, cost)
    assert FORMATS[fmt.name] is fmt and fmt.packed == (element == "E2M1")


def random_tensor(fmt: BlockFormat, *shape: int, seed: int = 0, low: int = 100, high: int = 150) -> BlockTensor:
    """Random finite payload, scales that differ from row to row and block to block."""
    gen = torch.Generator().manual_seed(seed)
    *lead, k = shape
    payload = torch.randint(0, 256, (*lead, k // (2 if fmt.packed else 1)), dtype=torch.uint8, generator=gen)
    if not fmt.packed:
        payload[~torch.isfinite(fmt.element.decode(payload))] = 0
    if fmt.outer:
        scales = torch.randint(1, 0x7F, (*lead, k // fmt.block), dtype=torch.uint8, generator=gen)
        return BlockTensor(payload, scales, fmt, torch.tensor(0.0031))
    return BlockTensor(payload, torch.randint(low, high, (*lead, k // fmt.block), dtype=torch.uint8, generator=gen), fmt)


@pytest.mark.parametrize("fmt", [MXFP4, MXFP8, MXFP8_E5M2], ids=lambda f: f.name)
def test_dequantise_as_torchao(fmt: BlockFormat, torchao: SimpleNamespace) -> None:
    q = random_tensor(fmt, 24, 320)
    dtype = {"E2M1": torch.float4_e2m1fn_x2, "E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}[fmt.element.name]
    payload = q.payload if fmt.packed else q.payload.view(dtype)
    want = torchao.mx.to_dtype(payload, q.scales.view(torch.float8_e8m0fnu), dtype, 32, torch.float32)
    np.testing.assert_array_equal(bits(q.dequantise()), bits(want))


def test_dequantise_nvfp4_element_by_element() -> None:
    """value(e, r, k) = e2m1 * e4m3(r, k // 16) * g(e), in plain Python; low nibble first; g differs by expert."""
    q = random_tensor(NVFP4, 3, 5, 48)
    g = torch.tensor([0.5, 3.0, 1 / 1024])  # exact products in fp32
    q = BlockTensor(q.payload, q.scales, NVFP4, g)
    got = q.dequantise(torch.float64)
    assert q.shape == got.shape == (3, 5, 48) and q.columns == 48
    for e in range(3):
        for r in range(5):
            for k in range(48):
                nibble = (q.payload[e, r, k // 2].item() >> (4 * (k % 2))) & 0xF
                want = E2M1.table()[nibble].item() * E4M3.table()[q.scales[e, r, k // 16].item()].item() * g[e].item()
                assert got[e, r, k].item() == want


def test_the_reader_decides_what_a_scale_byte_means() -> None:
    """One checkpoint, two readers: SM90's kernel reads 0x00 as 0.0 (OCP: 2^-127) and 0xFF as inf (OCP: NaN)."""
    payload = torch.full((1, 48), 0x72, dtype=torch.uint8)  # low nibble 2 = 1.0, high nibble 7 = 6.0
    q = BlockTensor(payload, torch.tensor([[0x00, 0xFF, 0x80]], dtype=torch.uint8), MXFP4)
    assert q.dequantise()[0, [0, 1]].tolist() == [2.0**-127, 6 * 2.0**-127]
    assert torch.isnan(q.dequantise()[0, 32:64]).all()
    sm90 = q.dequantise(scale=E8M0_SM90)[0]
    assert sm90[:32].tolist() == [0.0] * 32 and sm90[32:64].tolist() == [math.inf] * 32
    assert sm90[64:].tolist() == [2.0, 12.0] * 16


def test_indexing_keeps_blocks_and_global_scales_together() -> None:
    q = random_tensor(NVFP4, 4, 6, 64)
    q = BlockTensor(q.payload, q.scales, NVFP4, torch.tensor([1.0, 2.0, 4.0, 8.0]))
    whole = q.dequantise()
    for index in (2, slice(1, 3), (slice(1, 3), slice(2, 5)), torch.tensor([3, 0])):
        assert torch.equal(q[index].dequantise(), whole[index]), index


# -- quantisation: corner cases, one frozen table ----------------------------------------------------------------


@dataclass(frozen=True)
class Corner:
    """A block [x, -x, 0, ...]: the bytes that each rule must give, derived by hand.

    floor, ceil, even: (scale byte, element code of x). `why` derives them. `torchao_differs`: the rules where torchao gives others.
    """

    name: str
    fmt: BlockFormat
    x: float
    floor: tuple[int, int]
    ceil: tuple[int, int]
    even: tuple[int, int]
    why: str
    torchao_differs: tuple[str, ...] = ()


FLOAT32_MAX = (2 - 2.0**-23) * 2.0**127

# MXFP4: emax 2, max 6; code 7 is 6, code 6 is 4, code 5 is 3. E4M3: emax 8, max 448 = 0x7E.
CORNERS = (
    Corner("zeros", MXFP4, 0.0, (0, 0), (0, 0), (0, 0), "no exponent: the smallest scale; -0 keeps its sign (code 8)"),
    Corner("one", MXFP4, 1.0, (125, 6), (125, 6), (125, 6), "2^0: 0 - 2 = -2, 1/2^-2 = 4; ceil(log2(1/6)) = ceil(-2.58) = -2"),
    Corner("exactly_4", MXFP4, 4.0, (127, 6), (127, 6), (127, 6), "2 - 2 = 0; ceil(log2(4/6)) = ceil(-0.58) = 0"),
    Corner("just_below_4", MXFP4, _below(4.0), (126, 7), (127, 6), (127, 6),
           "floor: 1 - 2 = -1, 7.99 saturates at 6; ceil: 3.99 -> 4; even: the 1-bit mantissa carries to 2^2"),
    Corner("exactly_6", MXFP4, 6.0, (127, 7), (127, 7), (127, 7), "ceil(log2(6/6)) = 0; 6 = 1.5 * 2^2 needs no rounding"),
    Corner("just_above_6", MXFP4, _above(6.0), (127, 7), (128, 5), (127, 7), "ceil: the quotient is above 1: one step up, 3.0000002 -> 3",
           torchao_differs=("ceil",)),  # torchao's float32 log2 of 1 + 2^-23 is 0
    Corner("just_below_7", MXFP4, _below(7.0), (127, 7), (128, 5), (127, 7), "ceil: 3.4999998 -> 3; even: 1.7499 rounds to 1.5"),
    Corner("exactly_7", MXFP4, 7.0, (127, 7), (128, 6), (128, 6), "ceil: 3.5 ties to 4; even: 1.75 is halfway, and half carries up: 2^3"),
    Corner("just_below_8", MXFP4, _below(8.0), (127, 7), (128, 6), (128, 6), "as 7, further up"),
    Corner("smallest_normal_scale", MXFP4, 2.0**-124, (1, 6), (1, 6), (1, 6), "-124 - 2 = -126, byte 1"),
    Corner("lowest_scale", MXFP4, 2.0**-125, (0, 6), (0, 6), (0, 6), "-125 - 2 = -127, byte 0, which is 2^-127 and not zero",
           torchao_differs=EXPONENT_RULES),  # torchao divides by 2^-126 (floor, even) or by 1 (ceil) where the byte is 0
    Corner("below_the_lowest_scale", MXFP4, 2.0**-126, (0, 4), (0, 4), (0, 4), "clamped at byte 0: 2^-126 / 2^-127 = 2, code 4",
           torchao_differs=EXPONENT_RULES),
    Corner("smallest_subnormal", MXFP4, 2.0**-149, (0, 0), (0, 0), (0, 0), "clamped: 2^-149 / 2^-127 = 2^-22 -> 0"),
    Corner("largest_float32", MXFP4, FLOAT32_MAX, (252, 7), (253, 6), (253, 6),
           "floor: 127 - 2 = 125; even: carries to 2^128: 126; ceil: log2(2^128/6) = 125.4 -> 126; 3.99 -> 4"),
    Corner("infinity", MXFP4, math.inf, (253, 7), (254, 7), (253, 7), "the binade 2^128: 126; ceil clamps at 127; 6 * 2^126 reads as inf"),
    Corner("one", MXFP8, 1.0, (119, 0x78), (119, 0x78), (119, 0x78), "0 - 8 = -8: 256 = 0x78; ceil(log2(1/448)) = ceil(-8.8) = -8"),
    Corner("exactly_448", MXFP8, 448.0, (127, 0x7E), (127, 0x7E), (127, 0x7E), "8 - 8 = 0; 448 is the largest"),
    Corner("just_above_448", MXFP8, _above(448.0), (127, 0x7E), (128, 0x76), (127, 0x7E), "ceil: 224.00002 -> 224 = 1.75 * 2^7 = 0x76",
           torchao_differs=("ceil",)),
    Corner("460", MXFP8, 460.0, (127, 0x7E), (128, 0x76), (127, 0x7E), "ceil: 230 -> 224 (steps of 16); even: 1.797 + 1/16 < 2: no carry"),
    Corner("480", MXFP8, 480.0, (127, 0x7E), (128, 0x77), (127, 0x7E), "floor and even: 480 saturates at 448; ceil: 240 = 1.875 * 2^7"),
    Corner("496", MXFP8, 496.0, (127, 0x7E), (128, 0x78), (128, 0x78), "even: 1.9375, halfway to 2, carries; 248 ties to 256 (even)"),
    Corner("just_below_512", MXFP8, _below(512.0), (127, 0x7E), (128, 0x78), (128, 0x78), "255.99 -> 256"),
    Corner("exactly_512", MXFP8, 512.0, (128, 0x78), (128, 0x78), (128, 0x78), "9 - 8 = 1; 256"),
    Corner("largest_float32", MXFP8, FLOAT32_MAX, (246, 0x7E), (247, 0x78), (247, 0x78), "127 - 8 = 119; even carries: 120"),
    Corner("infinity", MXFP8, math.inf, (247, 0x7E), (254, 0x7E), (247, 0x7E), "128 - 8 = 120"),
    Corner("exactly_57344", MXFP8_E5M2, 57344.0, (127, 0x7B), (127, 0x7B), (127, 0x7B), "emax 15: 15 - 15 = 0; 1.75 * 2^15 is the largest"),
    Corner("61440", MXFP8_E5M2, 61440.0, (127, 0x7B), (128, 0x78), (128, 0x78),
           "even: 1.875 is halfway to 2 at 2 mantissa bits and carries; 30720 = 1.875 * 2^14 ties to 2^15 = 0x78"),
)
CORNER_RULES = [pytest.param(c, rule, id=f"{c.fmt.name}-{c.name}-{rule}") for c in CORNERS for rule in EXPONENT_RULES]
CORNER_RULES_OF_TORCHAO = [p for p in CORNER_RULES if p.values[1] not in p.values[0].torchao_differs]


def _corner_block(x: float) -> Tensor:
    block = torch.zeros(1, 64)
    block[0, 32], block[0, 33] = x, -x  # the second block, so that a scale of the wrong block shows
    return block


@pytest.mark.parametrize(("corner", "rule"), CORNER_RULES)
def test_corner_cases(corner: Corner, rule: str) -> None:
    q = quantise(_corner_block(corner.x), corner.fmt, rule=rule)
    scale, code = getattr(corner, rule)
    sign = 1 << (corner.fmt.element.bits - 1)
    assert q.scales.tolist() == [[0, scale]], corner.why
    assert q.codes()[0].tolist() == [0] * 32 + [code, code | sign] + [0] * 30, corner.why


def _torchao_mx(x: Tensor, fmt: BlockFormat, rule: str, torchao: SimpleNamespace) -> tuple[Tensor, Tensor]:
    dtype = {"E2M1": torch.float4_e2m1fn_x2, "E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}[fmt.element.name]
    scales, payload = torchao.mx.to_mx(x.contiguous(), dtype, 32, torchao.mode[rule])
    return scales.view(torch.uint8), payload.view(torch.uint8)


@pytest.mark.parametrize(("corner", "rule"), CORNER_RULES_OF_TORCHAO)
def test_corner_cases_in_torchao(corner: Corner, rule: str, torchao: SimpleNamespace) -> None:
    """The same table against torchao, so that the derivations are not ours alone."""
    block = _corner_block(corner.x)
    scales, payload = _torchao_mx(block, corner.fmt, rule, torchao)
    q = quantise(block, corner.fmt, rule=rule)
    assert torch.equal(q.scales, scales) and torch.equal(q.payload, payload)


@pytest.mark.parametrize("rule", EXPONENT_RULES)
def test_a_block_with_nan_reads_as_nan_and_its_neighbour_does_not(rule: str, torchao: SimpleNamespace) -> None:
    for fmt in (MXFP4, MXFP8):
        q = quantise(_corner_block(math.nan), fmt, rule=rule)
        assert q.scales.tolist() == [[0, 0xFF]]
        assert torch.isnan(q.dequantise()[0, 32:]).all() and (q.dequantise()[0, :32] == 0).all()
        assert torch.equal(_torchao_mx(_corner_block(math.nan), fmt, rule, torchao)[0], q.scales)


def test_a_nan_with_all_mantissa_bits_is_a_nan_under_every_rule() -> None:
    """The rule `even` adds to the bits: 0x7FFFFFFF must not wrap around to -0."""
    nan = torch.tensor([0x7FFFFFFF], dtype=torch.int32).view(torch.float32)
    assert [shared_exponent(nan, e, rule).item() for e in ELEMENTS for rule in EXPONENT_RULES] == [255] * 9


def _exponent_by_hand(amax: float, element: ElementCodec, rule: str) -> int:
    """The definitions in plain Python: frexp is exact, so is comparing doubles with element.max * 2^e."""
    if amax == 0:
        return -127
    m, e = math.frexp(amax)  # amax = (2m) * 2^(e-1), 2m in [1, 2)
    if rule == "floor":
        return e - 1 - element.emax
    if rule == "even":
        unit = 2**element.mantissa_bits
        return e - 1 + (round(2 * m * unit) == 2 * unit) - element.emax  # Python's round ties to even
    return next(k for k in range(e - 20, e + 3) if math.ldexp(element.max, k) >= amax)


@pytest.mark.parametrize("rule", EXPONENT_RULES)
@pytest.mark.parametrize("element", ELEMENTS, ids=lambda c: c.name)
def test_shared_exponent_of_every_positive_bf16(element: ElementCodec, rule: str) -> None:
    amax = all_bf16()[:0x7F80]
    want = [min(max(_exponent_by_hand(a, element, rule), -127), 127) + 127 for a in amax.tolist()]
    assert shared_exponent(amax, element, rule).tolist() == want


# -- quantisation: whole tensors against torchao -----------------------------------------------------------------


def spread(rows: int, cols: int, block: int, seed: int, low: int = -20, high: int = 20) -> Tensor:
    """Gaussian data times a power of two that differs from block to block; some blocks of zeros, some elements."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, cols, generator=gen)
    exponent = torch.randint(low, high + 1, (rows, cols // block), generator=gen)
    x = x * torch.exp2(exponent.float()).repeat_interleave(block, dim=1)
    x[:, :block][::7] = 0
    x[torch.rand(rows, cols, generator=gen) < 0.05] = 0
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", EXPONENT_RULES)
@pytest.mark.parametrize("fmt", [MXFP4, MXFP8, MXFP8_E5M2], ids=lambda f: f.name)
def test_quantise_as_torchao(fmt: BlockFormat, rule: str, dtype: torch.dtype, torchao: SimpleNamespace) -> None:
    """Payload and scales bit for bit, on 3,328 blocks whose scales spread over 40 binades (byte 0 aside, but for zeros)."""
    x = spread(256, 416, 32, seed=3).to(dtype)
    x[5, ::32] = torch.exp2(torch.arange(13.0) - 6).to(dtype)  # powers of two as maxima
    x[5] = torch.where(torch.arange(416) % 32 == 0, x[5], 0)
    q = quantise(x, fmt, rule=rule)
    scales, payload = _torchao_mx(x, fmt, rule, torchao)
    assert len(q.scales.unique()) > 30
    assert torch.equal(q.scales, scales)
    assert torch.equal(q.payload, payload)


def test_the_three_rules_differ() -> None:
    """On Gaussian data: or the tests above could not tell them apart."""
    x = spread(64, 256, 32, seed=4)
    scales = {rule: quantise(x, MXFP4, rule=rule).scales.int() for rule in EXPONENT_RULES}
    for one, other in (("floor", "ceil"), ("floor", "even"), ("even", "ceil")):
        step = scales[other] - scales[one]
        assert set(step.unique().tolist()) == {0, 1} and 0.05 < step.float().mean() < 0.6


@pytest.mark.parametrize("scale", [None, 2.0**-9, 2.0**-3], ids=["amax/2688", "2^-9", "2^-3"])
def test_nvfp4_as_torchao(scale: float | None, torchao: SimpleNamespace) -> None:
    """Where torchao's clamps do not act (block scales in [2^-6, 448]); Gaussian data has no ties, where its reciprocal would show."""
    x = spread(128, 592, 16, seed=5, low=-3, high=0)
    x[x.unflatten(1, (-1, 16)).abs().amax(-1).lt(0.3).repeat_interleave(16, dim=1)] = 0.3
    g = (x.abs().amax() / (448 * 6)) if scale is None else torch.tensor(scale)
    q = quantise(x, NVFP4, global_scale=None if scale is None else g)
    assert q.global_scale.item() == g.item()
    want_scales, want_payload = torchao.nv.nvfp4_quantize(x, 16, g)
    inside = (q.scales >= 0x08) & (q.scales < 0x7E)
    assert inside.float().mean() > 0.9 and len(q.scales.unique()) > 12
    assert torch.equal(q.scales[inside], want_scales.view(torch.uint8)[inside])
    by_block = [p.unflatten(1, (-1, 8))[inside] for p in (q.payload, want_payload)]
    assert torch.equal(*by_block)


@pytest.mark.parametrize(("amax", "scale", "code", "why"), [
    (6.0, 0x38, 7, "6/6 = 1"),
    (2688.0, 0x7E, 7, "2688/6 = 448, the largest block scale"),
    (5376.0, 0x7E, 7, "saturates: 448, and 12 saturates at 6"),
    (6.375, 0x38, 7, "1.0625 ties to 1.0 (even); 6.375 saturates"),
    (7.125, 0x3A, 7, "1.1875 ties between 0x39 (1.125) and 0x3A (1.25): even mantissa; 5.7 -> 6"),
    (6 * 2.0**-9, 0x01, 7, "2^-9, the smallest block scale"),
    (6 * 2.0**-10, 0x00, None, "2^-10 ties to 0: the whole block vanishes (torchao clamps at 2^-6 instead)"),
    (7 * 2.0**-10, 0x01, 6, "1.17 * 2^-10 -> 2^-9; 3.5 ties to 4"),
    (0.0, 0x00, None, "zeros")])
def test_nvfp4_corner_cases(amax: float, scale: int, code: int | None, why: str) -> None:
    """Global scale 1; the block [x, -x, 0, ...] stands second. None: the whole block becomes +0."""
    block = torch.zeros(1, 32)
    block[0, 16], block[0, 17] = amax, -amax
    q = quantise(block, NVFP4, global_scale=torch.tensor(1.0))
    assert q.scales.tolist() == [[0, scale]], why
    assert q.codes()[0, 16:18].tolist() == ([0, 0] if code is None else [code, code | 8]), why


def test_nvfp4_default_global_scale_is_modelopts() -> None:
    """weight_scale_2 = amax / (448 * 6): a multiplier. The largest block then has the block scale 448."""
    x = spread(8, 256, 16, seed=6, low=-4, high=0)
    q = quantise(x, NVFP4)
    assert q.global_scale.item() == (x.abs().amax() / 2688).item()
    assert q.scales.max().item() == 0x7E
    assert quantise(torch.zeros(2, 16), NVFP4).dequantise().tolist() == [[0.0] * 16] * 2


def test_nvfp4_global_scale_by_expert() -> None:
    x = spread(6, 64, 16, seed=7, low=-2, high=0).reshape(2, 3, 64)
    g = torch.tensor([2.0**-8, 2.0**-10])
    q = quantise(x, NVFP4, global_scale=g)
    for e in range(2):
        alone = quantise(x[e], NVFP4, global_scale=g[e])
        assert torch.equal(q.payload[e], alone.payload) and torch.equal(q.scales[e], alone.scales)
    assert not torch.equal(quantise(x, NVFP4, global_scale=g[:1].squeeze()).scales[1], q.scales[1])


# -- statistics -------------------------------------------------------------------------------------------------


def gaussian(*shape: int, seed: int = 11) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def decibel(signal: Tensor, got: Tensor) -> float:
    return 10 * math.log10((signal.double().square().sum() / (signal.double() - got.double()).square().sum()).item())


@pytest.mark.parametrize(("fmt", "rule", "floor"), [
    (MXFP4, "floor", 18.8), (NVFP4, None, 20.5), (MXFP8, "ceil", 31.6), (MXFP8, "floor", 30.6)], ids=lambda v: getattr(v, "name", None))
def test_quantisation_floor_on_gaussian_data(fmt: BlockFormat, rule: str | None, floor: float) -> None:
    """facts: MXFP4 18.8 dB, NVFP4 20.5 dB, MXFP8 31 dB (reports: 0.026 with ceil = 31.7 dB, 0.030 with floor = 30.5 dB)."""
    x = gaussian(256, 2048)
    assert decibel(x, quantise(x, fmt, rule=rule).dequantise()) == pytest.approx(floor, abs=0.3)


def test_gemm_of_two_nvfp4_operands() -> None:
    """17.5 dB, cosine 0.991: two independent errors of 20.5 dB add up to 3 dB more noise."""
    a, b = gaussian(192, 1024, seed=12), gaussian(192, 1024, seed=13)
    want, got = a @ b.T, quantise(a, NVFP4).dequantise() @ quantise(b, NVFP4).dequantise().T
    assert decibel(want, got) == pytest.approx(17.5, abs=0.3)
    assert torch.nn.functional.cosine_similarity(want.flatten(), got.flatten(), dim=0).item() == pytest.approx(0.991, abs=0.001)


@pytest.mark.parametrize(("rule", "clipped", "error"), [("floor", 0.42, 0.114), ("even", 0.27, 0.112), ("ceil", 0.0, 0.118)])
def test_the_rule_shows_in_the_clipped_block_maxima_not_in_the_error(rule: str, clipped: float, error: float) -> None:
    """reports.md C2, MXFP4 on Gaussian weights of standard deviation 0.02: share of block maxima above 6 * scale, relative error."""
    x = gaussian(256, 2048) * 0.02
    q = quantise(x, MXFP4, rule=rule)
    amax = x.unflatten(1, (-1, 32)).abs().amax(-1)
    assert (amax > 6 * E8M0.decode(q.scales)).float().mean().item() == pytest.approx(clipped, abs=0.02)
    assert ((q.dequantise() - x).norm() / x.norm()).item() == pytest.approx(error, abs=0.002)


@pytest.mark.parametrize(("rule", "clipped"), [("floor", math.log2(8 / 6)), ("even", math.log2(7 / 6)), ("ceil", 0.0)])
def test_the_share_of_clipped_maxima_over_all_magnitudes(rule: str, clipped: float) -> None:
    """Where log2 of the maxima is uniform (rows of many magnitudes), `floor` clips maxima in (6, 8) of [4, 8): log2(8/6) = 0.415,
    `even` those in (6, 7): log2(7/6) = 0.222. For one magnitude the share swings with it, between 0.28 and 0.56 for `floor`."""
    x = gaussian(512, 1024) * torch.exp2(torch.rand(512, 1, generator=torch.Generator().manual_seed(1)) * 8)
    q = quantise(x, MXFP4, rule=rule)
    amax = x.unflatten(1, (-1, 32)).abs().amax(-1)
    assert (amax > 6 * E8M0.decode(q.scales)).float().mean().item() == pytest.approx(clipped, abs=0.02)


@pytest.mark.parametrize(("rule", "share"), [("floor", 0.0), ("ceil", 0.13)])
def test_one_value_can_have_two_encodings(rule: str, share: float) -> None:
    """A block whose elements are all at most 3 can be written with the next lower scale and doubled values (1.5 -> 3, 3 -> 6).
    So bytes may differ where values do not: compare dequantised values."""
    q = quantise(gaussian(256, 2048), MXFP4, rule=rule)
    values = E2M1.decode(q.codes()).unflatten(-1, (-1, 32))
    twice = values.abs().amax(-1) <= 3
    assert twice.float().mean().item() == pytest.approx(share, abs=0.01)
    doubled = torch.where(twice[..., None], values * 2, values).flatten(-2)
    other = BlockTensor(pack_fp4(E2M1.encode(doubled)), q.scales - twice.to(torch.uint8), MXFP4)
    assert torch.equal(other.dequantise(), q.dequantise())


# -- laws -------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(data=st.data(), rule=st.sampled_from(EXPONENT_RULES))
def test_mxfp4_requantised_is_unchanged(data: st.DataObject, rule: str) -> None:
    """What MXFP4 can say, every rule says again (values, not bytes). Bytes to 252: above, 6 * 2^126 overflows float32."""
    codes = data.draw(st.lists(st.integers(0, 15), min_size=96, max_size=96))
    scales = data.draw(st.lists(st.integers(0, 252), min_size=3, max_size=3))
    q = BlockTensor(pack_fp4(torch.tensor([codes], dtype=torch.uint8)), torch.tensor([scales], dtype=torch.uint8), MXFP4)
    np.testing.assert_array_equal(bits(quantise(q.dequantise(), MXFP4, rule=rule).dequantise()), bits(q.dequantise()))


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_mxfp8_requantised_with_ceil_is_unchanged(data: st.DataObject) -> None:
    codes = data.draw(st.lists(st.integers(0, 255).filter(lambda c: c & 0x7F != 0x7F), min_size=64, max_size=64))
    scales = data.draw(st.lists(st.integers(20, 246), min_size=2, max_size=2))
    q = BlockTensor(torch.tensor([codes], dtype=torch.uint8), torch.tensor([scales], dtype=torch.uint8), MXFP8)
    np.testing.assert_array_equal(bits(quantise(q.dequantise(), MXFP8, rule="ceil").dequantise()), bits(q.dequantise()))


def test_mxfp8_requantised_with_floor_may_change() -> None:
    """240 = 1.875 * 2^7 alone in its block: floor takes 2^-1, and 480 saturates: 448 * 2^-1 = 224."""
    x = torch.zeros(1, 32)
    x[0, 0] = 240.0
    q = quantise(x, MXFP8, rule="floor")
    assert (q.scales.item(), q.payload[0, 0].item(), q.dequantise()[0, 0].item()) == (126, 0x7E, 224.0)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_nvfp4_requantised_is_unchanged_where_each_block_reaches_6(data: st.DataObject) -> None:
    """Otherwise it need not: a block with the maximum 4 gets the scale 4/6 of the old one, rounded to E4M3."""
    codes = data.draw(st.lists(st.integers(0, 15), min_size=48, max_size=48))
    codes[0], codes[17], codes[47] = 7, 15, 7
    scales = data.draw(st.lists(st.integers(1, 0x7E), min_size=3, max_size=3))
    g = torch.tensor(data.draw(st.floats(2.0**-20, 1.0, width=32)))
    q = BlockTensor(pack_fp4(torch.tensor([codes], dtype=torch.uint8)), torch.tensor([scales], dtype=torch.uint8), NVFP4, g)
    again = quantise(q.dequantise(), NVFP4, global_scale=g)
    assert torch.equal(again.scales, q.scales) and torch.equal(again.payload, q.payload)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=32, max_size=32), st.sampled_from(("ceil", "even", "floor")))
def test_mxfp4_error_bound(values: list[float], rule: str) -> None:
    """Under `ceil` nothing is clipped: the error is at most half the widest step (2) times the scale. `floor` may clip 8 to 6."""
    x = torch.tensor([values])
    q = quantise(x, MXFP4, rule=rule)
    step = E8M0.decode(q.scales).item()
    worst = (q.dequantise() - x).abs().max().item()
    assert worst <= step * (1.0 if rule == "ceil" else 2.0)


def zeros(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


# -- refusals ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("call", "message"), [
    (lambda: quantise(torch.zeros(2, 64), MXFP4), "mxdebug has no default"),
    (lambda: quantise(torch.zeros(2, 64), MXFP8, rule="nearest"), "one of floor, ceil, even"),
    (lambda: quantise(torch.zeros(2, 64), NVFP4, rule="floor"), "none for NVFP4"),
    (lambda: quantise(torch.zeros(2, 48), MXFP4, rule="floor"), "multiple of 32"),
    (lambda: quantise(torch.zeros(2, 24), NVFP4), "multiple of 16"),
    (lambda: quantise(torch.tensor([[math.nan] + [0.0] * 15]), NVFP4), "finite"),
    (lambda: quantise(torch.tensor([[math.inf] + [0.0] * 15]), NVFP4), "finite"),
    (lambda: BlockTensor(zeros(2, 16), torch.zeros(2, 1), MXFP4), "cast by value"),
    (lambda: BlockTensor(torch.zeros(2, 16, dtype=torch.int8), zeros(2, 1), MXFP4), "payload: expected dtype torch.uint8"),
    (lambda: BlockTensor(zeros(2, 16), zeros(2, 2), MXFP4), "another block size"),
    (lambda: BlockTensor(zeros(64, 32), zeros(2, 64), MXFP4), "transposed"),
    (lambda: BlockTensor(zeros(2, 12), zeros(2, 1), MXFP4), "block scales"),
    (lambda: BlockTensor(zeros(2, 16), zeros(2, 2), NVFP4), "a float32 tensor, got none"),
    (lambda: BlockTensor(zeros(2, 16), zeros(2, 1), MXFP4, torch.tensor(1.0)), "none, got one"),
])
def test_refusals(call: object, message: str) -> None:
    with pytest.raises(MxdebugError, match=message):
        call()


def test_errors_carry_their_four_parts() -> None:
    with pytest.raises(MxdebugError) as caught:
        quantise(torch.zeros(2, 48), MXFP4, rule="floor")
    e = caught.value
    assert (e.operand, e.expected, e.got) == ("values", "a last dimension that is a multiple of 32", "shape [2, 48]")
    assert str(e) == f"{e.operand}: expected {e.expected}, got {e.got}. Likely reason: {e.reason}"


@pytest.mark.parametrize("codec", [E8M0, E8M0_SM90, E4M3_SCALE, S0E5M3, S0E5M3_MARLIN], ids=lambda c: c.name)
def test_scale_codecs_keep_shapes_and_name_their_source(codec: ScaleCodec) -> None:
    assert codec.decode(BYTES.reshape(4, 8, 8)).shape == (4, 8, 8) and codec.table().dtype == torch.float32 and codec.source
