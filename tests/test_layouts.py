"""Do the bytes lie where the real kernels put them?

Oracles that we did not write: outputs of FlashInfer's layout kernels recorded on an H200, FlashInfer's and torchao's functions that run
on the CPU, and the published index formulas in plain Python. Sizes have several tiles in both directions and, where a
layout pads, do not fill them; scale matrices are never only 16 columns wide, except where that is the point.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from mxdebug.errors import MxdebugError
from mxdebug.formats import NVFP4, BlockTensor, quantise, words
from mxdebug.layouts import (LAYOUTS, LINEAR, SCALE_LAYOUTS, SM12X_WEIGHT_TILES, SM90_SCALE_FOLD, SM90_WEIGHT_INTERLEAVE, SWIZZLE_8x4,
                             SWIZZLE_128x4, TRANSPOSED, V_CACHE_4x4, WEIGHT_LAYOUTS, Composed, Layout, cutedsl_sm100_view, row_hashes)
from mxdebug.recipes import SWAP_NIBBLES
from mxdebug.recorded import kernel_dumps


def random_bytes(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


# -- the published formulas, in plain Python ---------------------------------------------------------------------


def _offset_linear(r: int, c: int, rows: int, cols: int) -> int:
    return r * cols + c


def _offset_128x4(r: int, c: int, rows: int, cols: int) -> int:
    c4 = -(-cols // 4)
    return ((r // 128) * c4 + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4


def _offset_8x4(r: int, c: int, rows: int, cols: int) -> int:
    c4 = -(-cols // 4)
    return ((r // 8) * c4 + c // 4) * 32 + (r % 8) * 4 + c % 4


def _offset_fold(r: int, c: int, rows: int, cols: int) -> int:
    """`(rb s f) (kb g) -> rb kb f (s g)`, s = 4, f = 16, g = 4: in a 64 x 4 tile, 16 lines of 16 bytes."""
    rb, s, f = r // 64, r % 64 // 16, r % 16
    return (rb * (cols // 4) + c // 4) * 256 + f * 16 + s * 4 + c % 4


def _offset_v_cache(t: int, s: int, tokens: int, cols: int) -> int:
    return (t // 4) * 4 * cols + s * 4 + t % 4


def _offset_transposed(r: int, c: int, rows: int, cols: int) -> int:
    return c * rows + r


def _offset_sm12x(n: int, kb: int, rows: int, cols: int) -> int:
    """From the comments of FlashInfer's `_cute_dsl_pack_fp4_weight`: tiles of 64 (N) x 8 bytes (K), K tiles outermost; 128 int32 a tile,
    number 64 * warp + 2 * lane + u. Byte 0..3 of an int32: bytes k, k+4 of column n, then of n + 16; u = 1 adds 32."""
    tile, n_in, k_in = (kb // 8) * (rows // 64) + n // 64, n % 64, kb % 8
    u, second, warp = n_in // 32, n_in % 32 // 16, n_in % 16 // 8
    lane = (n_in % 8) * 4 + k_in % 4
    return tile * 512 + (64 * warp + 2 * lane + u) * 4 + 2 * second + k_in // 4


def _offset_sm90_weight(r: int, c: int, rows: int, cols: int) -> int:
    """Where the CUDA kernel puts a byte before it permutes bits: found by running its loop (below) on byte numbers."""
    return _sm90_byte_positions(rows, cols)[r * cols + c]


# The kernel of moe_gemm_mixed_utils.cu, transcribed statement by statement. `cols` counts FP4 values there.
_SM90_SHIFTS = (
    (0b00000000000000000000000010000000, 24), (0b00000000000000000000000001110000, 18),
    (0b00000000000000000000000000001000, 12), (0b00000000000000000000000000000111, 6),
    (0b00000000000000001000000000000000, 13), (0b00000000000000000111000000000000, 7),
    (0b00000000000000000000100000000000, 1), (0b00000000000000000000011100000000, -5),
    (0b00000000100000000000000000000000, 2), (0b00000000011100000000000000000000, -4),
    (0b00000000000010000000000000000000, -10), (0b00000000000001110000000000000000, -16),
    (0b10000000000000000000000000000000, -1), (0b00010000000000000000000000000000, 1),
    (0b01100000000000000000000000000000, -3), (0b00001000000000000000000000000000, -13),
    (0b00000001000000000000000000000000, -11), (0b00000110000000000000000000000000, -15))


def _sm90_words(rows: int, cols: int) -> list[tuple[int, tuple[int, int, int, int]]]:
    """(first destination byte, the four source bytes) of each 32-bit word, in the kernel's own index arithmetic."""
    words = []
    cols *= 2  # bytes -> FP4 values
    for block_id in range(rows // 2):
        for partition_id in range(cols // 64):
            for lane_id in range(16):
                row_id = block_id // 8 * 16 + block_id % 8
                mma_id = lane_id // 4
                dst_row_id = row_id + (mma_id % 2) * 8
                interleaved_lane_id = lane_id // 8 * 16 + (lane_id % 4) * 4
                col_id = partition_id * 32 + mma_id * 8 + lane_id % 4
                dst_col_id = partition_id * 32 + interleaved_lane_id
                first = row_id * cols // 2 + col_id
                second = (row_id + 8) * cols // 2 + col_id
                words.append((dst_row_id * cols // 2 + dst_col_id, (first, second, first + 4, second + 4)))
    return words


@functools.cache
def _sm90_byte_positions(rows: int, cols: int) -> dict[int, int]:
    return {source: dst + i for dst, sources in _sm90_words(rows, cols) for i, source in enumerate(sources)}


def _sm90_kernel(weight: Tensor) -> Tensor:
    """The whole kernel on one [rows, bytes] matrix, bits included."""
    rows, cols = weight.shape
    source, out = weight.flatten().tolist(), [0] * (rows * cols)
    for dst, sources in _sm90_words(rows, cols):
        raw = sum(source[s] << (8 * i) for i, s in enumerate(sources))
        word = 0
        for mask, shift in _SM90_SHIFTS:
            word |= (raw & mask) << shift if shift > 0 else (raw & mask) >> -shift
        assert word < 2**32
        out[dst:dst + 4] = word.to_bytes(4, "little")
    return torch.tensor(out, dtype=torch.uint8).reshape(rows, cols)


Formula = Callable[[int, int, int, int], int]
FORMULAS: list[tuple[Layout, Formula, tuple[int, int]]] = [
    (LINEAR, _offset_linear, (37, 53)), (SWIZZLE_128x4, _offset_128x4, (256, 24)), (SWIZZLE_128x4, _offset_128x4, (300, 37)),
    (SWIZZLE_128x4, _offset_128x4, (33, 5)), (SWIZZLE_8x4, _offset_8x4, (24, 12)), (SWIZZLE_8x4, _offset_8x4, (21, 22)),
    (SM90_SCALE_FOLD, _offset_fold, (192, 28)), (V_CACHE_4x4, _offset_v_cache, (20, 8)), (V_CACHE_4x4, _offset_v_cache, (12, 7)),
    (TRANSPOSED, _offset_transposed, (19, 44)), (SM12X_WEIGHT_TILES, _offset_sm12x, (192, 40)),
    (SM90_WEIGHT_INTERLEAVE, _offset_sm90_weight, (48, 96))]
FORMULA_IDS = [f"{layout.name} {rows}x{cols}" for layout, _, (rows, cols) in FORMULAS]


def test_every_layout_has_a_formula() -> None:
    assert {layout.name for layout, _, _ in FORMULAS} == set(LAYOUTS)
    assert set(LAYOUTS.values()) == {*SCALE_LAYOUTS, *WEIGHT_LAYOUTS}


@pytest.mark.parametrize(("layout", "formula", "size"), FORMULAS, ids=FORMULA_IDS)
def test_index_map_is_the_published_formula(layout: Layout, formula: Formula, size: tuple[int, int]) -> None:
    rows, cols = size
    want = [[formula(r, c, rows, cols) for c in range(cols)] for r in range(rows)]
    assert layout.index_map(rows, cols).tolist() == want


@pytest.mark.parametrize(("layout", "formula", "size"), FORMULAS, ids=FORMULA_IDS)
def test_packed_bytes_lie_where_the_formula_says(layout: Layout, formula: Formula, size: tuple[int, int]) -> None:
    """Expert by expert; bytes that no logical byte claims are the fill."""
    rows, cols = size
    x = random_bytes(2, rows, cols, seed=1)
    plain = replace(layout, bits=None)  # the bits are tested against the kernel below
    pr, pc = plain.padded(rows, cols)
    want = torch.zeros(2, pr * pc, dtype=torch.uint8)
    for e in range(2):
        for r in range(rows):
            for c in range(cols):
                want[e, formula(r, c, rows, cols)] = x[e, r, c]
    assert torch.equal(plain.pack(x).reshape(2, -1), want)


@pytest.mark.parametrize(("layout", "tile"), [
    (LINEAR, (1, 1)), (TRANSPOSED, (1, 1)), (SWIZZLE_128x4, (128, 4)), (SWIZZLE_8x4, (8, 4)), (SM90_SCALE_FOLD, (64, 4)),
    (V_CACHE_4x4, (4, 1)), (SM90_WEIGHT_INTERLEAVE, (16, 32)), (SM12X_WEIGHT_TILES, (64, 8))], ids=lambda v: getattr(v, "name", ""))
def test_tiles(layout: Layout, tile: tuple[int, int]) -> None:
    assert layout.tile == tile
    assert layout.padded(3 * tile[0], 5 * tile[1]) == (3 * tile[0], 5 * tile[1])


@pytest.mark.parametrize(("layout", "size", "shape"), [
    (SWIZZLE_128x4, (300, 37), (3, 10, 32, 4, 4)), (SWIZZLE_8x4, (21, 22), (3, 6, 8, 4)), (SM90_SCALE_FOLD, (128, 12), (2, 3, 16, 4, 4)),
    (TRANSPOSED, (5, 7), (7, 5)), (LINEAR, (5, 7), (5, 7)), (V_CACHE_4x4, (12, 7), (3, 7, 4))], ids=lambda v: getattr(v, "name", ""))
def test_physical_shapes(layout: Layout, size: tuple[int, int], shape: tuple[int, ...]) -> None:
    assert layout.physical_shape(*size) == shape == tuple(layout.pack(random_bytes(*size)).shape)
    assert layout.pack(random_bytes(3, *size)).shape == (3, *shape)


# -- recorded on the H200 ----------------------------------------------------------------------------------------


def _recorded(function: str) -> list[tuple[Tensor, Tensor]]:
    out = []
    for folder in kernel_dumps(function):
        given_ = torch.load(folder / "inputs.pt", weights_only=True)["arg_0"]
        out.append((given_, torch.load(folder / "outputs.pt", weights_only=True)["result"]))
    return out


RECORDED = [(SWIZZLE_128x4, "block_scale_interleave", [(2, 160, 6), (256, 32), (33, 5)]),
            (SM90_SCALE_FOLD, "interleave_moe_scales_for_sm90_mixed_gemm", [(2, 128, 12)]),
            (SM90_WEIGHT_INTERLEAVE, "interleave_moe_weights_for_sm90_mixed_gemm", [(2, 32, 128)])]


@pytest.mark.parametrize(("layout", "function", "shapes"), RECORDED, ids=[f for _, f, _ in RECORDED])
def test_bytes_of_the_h200_kernels(layout: Layout, function: str, shapes: list[tuple[int, ...]]) -> None:
    calls = _recorded(function)
    assert [tuple(x.shape) for x, _ in calls] == shapes
    for logical, physical in calls:
        assert len(logical.unique()) > 100  # data in which a misplaced byte shows
        assert torch.equal(layout.pack(logical).flatten(), physical.flatten())
        back = layout.unpack(physical, *logical.shape[-2:])
        assert back.shape == logical.shape and torch.equal(back, logical)


def test_no_other_layout_gives_the_recorded_bytes() -> None:
    """The recordings can tell the layouts apart."""
    for right, function, _ in RECORDED:
        for logical, physical in _recorded(function):
            for layout in LAYOUTS.values():
                tr, tc = layout.tile
                fits = layout.pads or (logical.shape[-2] % tr == 0 and logical.shape[-1] % tc == 0)
                same = fits and torch.equal(layout.pack(logical).flatten(), physical.flatten())
                assert same == (layout is right), (function, layout.name)


def test_a_3d_tensor_is_padded_and_swizzled_expert_by_expert() -> None:
    """Recorded: [2, 160, 6] becomes 2 * 256 * 8 bytes, the second expert from 2048 on; [320, 6] would become 384 * 8."""
    logical, physical = _recorded("block_scale_interleave")[0]
    assert physical.numel() == 4096
    for e in range(2):
        assert torch.equal(SWIZZLE_128x4.pack(logical[e]).flatten(), physical.flatten()[2048 * e:2048 * (e + 1)])
    assert SWIZZLE_128x4.pack(logical.flatten(0, 1)).numel() == 384 * 8


# -- the SM90 weight interleave, bit by bit ----------------------------------------------------------------------


@pytest.mark.parametrize("size", [(16, 32), (48, 96)], ids=str)
def test_sm90_weight_interleave_against_the_transcribed_kernel(size: tuple[int, int]) -> None:
    """One tile, and 3 x 3 tiles."""
    x = random_bytes(*size, seed=2)
    assert torch.equal(SM90_WEIGHT_INTERLEAVE.pack(x).reshape(size), _sm90_kernel(x))


def test_the_transcription_is_right_on_the_recording() -> None:
    """So that the test above does not compare two copies of one mistake."""
    logical, physical = _recorded("interleave_moe_weights_for_sm90_mixed_gemm")[0]
    for e in range(2):
        assert torch.equal(_sm90_kernel(logical[e]), physical[e])


def test_sm90_bits_are_a_bijection_that_scatters_each_code() -> None:
    assert sorted(SM90_WEIGHT_INTERLEAVE.bits) == list(range(32))
    for nibble in range(8):
        targets = [SM90_WEIGHT_INTERLEAVE.bits[4 * nibble + b] for b in range(4)]
        assert targets != list(range(targets[0], targets[0] + 4))  # the sign leaves the other three


def test_explain_names_the_bits_where_they_are() -> None:
    """Pack a matrix with a single bit set; find it where `explain` says."""
    rows, cols = 32, 64
    for r, c in ((0, 0), (9, 5), (23, 46), (31, 63)):
        text = SM90_WEIGHT_INTERLEAVE.explain(r, c, rows, cols)
        word = int(re.search(r"of word (\d+);", text).group(1))
        for label, first in (("low", 0), ("high", 4)):
            moves = re.search(rf"{label} nibble: (.*)", text).group(1).split(", ")
            assert [m[0] for m in moves] == ["S", "E", "E", "M"]
            for bit, move in zip((3, 2, 1, 0), moves):
                x = torch.zeros(rows, cols, dtype=torch.uint8)
                x[r, c] = 1 << (first + bit)
                words = SM90_WEIGHT_INTERLEAVE.pack(x).flatten().view(torch.int32).tolist()
                assert [i for i, w in enumerate(words) if w] == [word]
                assert words[word] & 0xFFFFFFFF == 1 << int(move.split()[-1])


# -- against functions that run on the CPU -------------------------------------------------------------------------


def test_128x4_as_torchao() -> None:
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils")
    for rows, cols in ((256, 24), (300, 37), (33, 5), (1, 1)):
        x = random_bytes(rows, cols, seed=rows)
        assert torch.equal(SWIZZLE_128x4.pack(x).flatten(), utils.to_blocked(x))


def test_128x4_is_unswizzled_as_by_flashinfer() -> None:
    fi = pytest.importorskip("flashinfer.gemm.gemm_bf16_fp4")
    for rows, cols in ((256, 24), (320, 37), (33, 5)):
        physical = random_bytes(*SWIZZLE_128x4.physical_shape(rows, cols), seed=cols)
        assert torch.equal(SWIZZLE_128x4.unpack(physical, rows, cols), fi._unswizzle_sf_128x4(physical, rows, cols))


def test_sm90_scale_fold_as_flashinfer() -> None:
    fi = pytest.importorskip("flashinfer.fused_moe.prepare")
    x = random_bytes(3, 192, 28)
    want = fi.interleave_moe_scales_for_sm90_mixed_gemm(x, 32)
    assert want.shape == (3, 3, 7, 16, 16)
    assert torch.equal(SM90_SCALE_FOLD.pack(x).reshape(want.shape), want)
    assert torch.equal(SM90_SCALE_FOLD.unpack(want, 192, 28), x)


def test_sm12x_weight_tiles_as_flashinfer() -> None:
    """FlashInfer takes [K/2, N] and returns int32 [K/16, 2N]."""
    fi = pytest.importorskip("flashinfer.gemm.gemm_bf16_fp4_cute_dsl")
    n, k_bytes = 192, 40
    x = random_bytes(n, k_bytes)
    want = fi._cute_dsl_pack_fp4_weight(x.T.contiguous())
    assert want.shape == (k_bytes // 8, 2 * n)
    assert torch.equal(SM12X_WEIGHT_TILES.pack(x).flatten().view(torch.int32).reshape(want.shape), want)


def test_sm12x_scales_as_flashinfer() -> None:
    """Unswizzle, transpose (recoding is tested with the formats)."""
    fi = pytest.importorskip("flashinfer.gemm.gemm_bf16_fp4_cute_dsl")
    n, k = 192, 640
    scales = random_bytes(n, k // 16)
    swizzled = SWIZZLE_128x4.pack(scales)
    _, want, _ = fi._prepare_cute_dsl_sm12x(random_bytes(n, k // 2), swizzled, None, 16)
    assert torch.equal(TRANSPOSED.pack(fi._e4m3_to_s0e5m3(scales)), want)


@pytest.mark.parametrize("groups", [1, 3])
def test_cutedsl_view_as_flashinfer(groups: int) -> None:
    """The same strided view of the same memory: no byte moves."""
    fi = pytest.importorskip("flashinfer.cute_dsl.utils")
    rows, cols = 256, 12
    scales = random_bytes(groups, rows, cols) if groups > 1 else random_bytes(rows, cols)
    physical = SWIZZLE_128x4.pack(scales)
    want = fi.convert_sf_to_mma_layout(physical, m=rows, k=cols * 16, num_groups=groups, sf_vec_size=16)
    got = cutedsl_sm100_view(physical)
    assert got.shape == want.shape == (32, 4, 2, 4, 3, groups)
    assert got.stride() == want.stride() and got.data_ptr() == physical.data_ptr() == want.data_ptr()
    r, c = 173, 9  # row 173: tile 1, 45 inside it, outer 45 % 32 = 13, inner 45 // 32 = 1; column 9: tile 2, 1
    assert got[13, 1, 1, 1, 2, groups - 1] == scales.reshape(groups, rows, cols)[groups - 1, r, c]


# -- laws ----------------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(LAYOUTS)), batch=st.lists(st.integers(1, 3), max_size=2))
def test_unpack_inverts_pack(data: st.DataObject, name: str, batch: list[int]) -> None:
    layout = LAYOUTS[name]
    tr, tc = layout.tile
    if layout.pads:
        rows, cols = data.draw(st.integers(1, 2 * tr + 3)), data.draw(st.integers(1, 9 * tc))
    else:
        rows, cols = tr * data.draw(st.integers(1, 3)), tc * data.draw(st.integers(1, 9))
    x = random_bytes(*batch, rows, cols, seed=data.draw(st.integers(0, 2**31)))
    physical = layout.pack(x)
    back = layout.unpack(physical, rows, cols)
    assert back.shape == x.shape and torch.equal(back, x)
    assert physical.numel() == math.prod(batch) * math.prod(layout.padded(rows, cols))
    flat = layout.unpack(physical.flatten(), rows, cols)  # a flat buffer shows how many slabs there are, not how they are arranged
    assert torch.equal(flat.reshape(x.shape), x)
    index = layout.index_map(rows, cols)
    assert len(index.unique()) == rows * cols and index.max() < math.prod(layout.padded(rows, cols))
    if layout.bits is None:
        assert torch.equal(physical.reshape(-1, math.prod(layout.padded(rows, cols)))[0][index], x.reshape(-1, rows, cols)[0])


@settings(max_examples=60, deadline=None)
@given(data=st.data(), name=st.sampled_from(sorted(LAYOUTS)))
def test_explain_derives_the_offset_of_index_map(data: st.DataObject, name: str) -> None:
    """Not only the result: each digit times its weight must add up to row, column and offset."""
    layout = LAYOUTS[name]
    tr, tc = layout.tile
    rows = data.draw(st.integers(1, 2 * tr + 3)) if layout.pads else 3 * tr
    cols = data.draw(st.integers(1, 30)) if layout.pads else 5 * tc
    r, c = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, cols - 1))
    text = layout.explain(r, c, rows, cols)
    offset = layout.index_map(rows, cols)[r, c].item()
    terms, result = re.search(r"^offset = (.*) = (\d+)$", text, re.M).groups()
    assert _sum(terms) == int(result) == offset
    assert _sum(re.search(rf"^row {r} = (.*)$", text, re.M).group(1)) == r
    assert _sum(re.search(rf"^column {c} = (.*)$", text, re.M).group(1)) == c
    assert ("is padded to" in text) == (layout.padded(rows, cols) != (rows, cols))


def _sum(text: str) -> int:
    """'mt 1*256 + m4 3' -> 259."""
    total = 0
    for part in text.split(" + "):
        digit, _, weight = part.split(" ")[-1].partition("*")
        total += int(digit) * int(weight or 1)
    return total


def test_explain_word_by_word() -> None:
    """The example of the notebooks: row 173 of 300 is 128 + 1*32 + 13, column 9 is 2*4 + 1."""
    assert SWIZZLE_128x4.explain(173, 9, 300, 37).splitlines() == [
        "128x4: (mt m4 m32) (kt k4) -> mt kt m32 m4 k4",
        "300 x 37 is padded to 384 x 40 with 0",
        "row 173 = mt 1*128 + m4 1*32 + m32 13",
        "column 9 = kt 2*4 + k4 1",
        "offset = mt 1*5120 + kt 2*512 + m32 13*16 + m4 1*4 + k4 1*1 = 6357",
        "linear would be 173*37 + 9 = 6410"]


def test_padding_is_filled_and_dropped_again() -> None:
    """NVFP4 pads scales with 0, vLLM's TRT-LLM MXFP8 with 127."""
    x = torch.full((33, 5), 9, dtype=torch.uint8)
    for fill in (0, 127):
        physical = replace(SWIZZLE_128x4, fill=fill).pack(x).flatten()
        assert physical.numel() == 128 * 8
        assert int((physical == 9).sum()) == 33 * 5 and int((physical == fill).sum()) == 128 * 8 - 33 * 5
        assert torch.equal(SWIZZLE_128x4.unpack(physical, 33, 5), x)


@pytest.mark.parametrize("shape", [(1, 2, 2, 32, 4, 4), (1, 1, 2, 2, 32, 4, 4), (2, 1, 2, 2, 32, 4, 4)], ids=str)
def test_an_axis_of_one_expert_is_kept(shape: tuple[int, ...]) -> None:
    assert SWIZZLE_128x4.unpack(random_bytes(*shape), 160, 6).shape == (*shape[:-5], 160, 6)


def test_bytes_under_the_padded_2d_shape() -> None:
    """vLLM's swizzle_blockscale returns the 128x4 bytes as [E, padded rows, padded columns]."""
    x = random_bytes(1, 160, 6)
    assert torch.equal(SWIZZLE_128x4.unpack(SWIZZLE_128x4.pack(x).reshape(1, 256, 8), 160, 6), x)


# -- the degenerate case, and applying a layout twice ---------------------------------------------------------------


def test_16_columns_are_the_degenerate_case() -> None:
    """A row of tiles has the digits m4 m32 kt k4 in linear order and kt m32 m4 k4 in 128x4: m4 and kt change places. With 16 scale
    columns (K = 256 for NVFP4, 512 for MX) kt has 4 values like m4, so doing it twice does nothing: swizzling where one should
    unswizzle gives the right bytes, there and only there. A test with 16 columns alone proves nothing."""
    def is_its_own_inverse(rows: int, cols: int) -> bool:
        p = SWIZZLE_128x4.index_map(rows, cols).flatten()
        return torch.equal(p[p], torch.arange(rows * cols))

    assert [cols for cols in range(4, 132, 4) if is_its_own_inverse(128, cols)] == [16]
    assert is_its_own_inverse(256, 16) and is_its_own_inverse(384, 16)
    assert not is_its_own_inverse(256, 32)


def test_swizzled_twice() -> None:
    twice = Composed(SWIZZLE_128x4, SWIZZLE_128x4)
    assert twice.name == "128x4 applied twice"
    for cols, unharmed in ((16, True), (24, False), (32, False)):
        x = random_bytes(2, 256, cols, seed=cols)
        physical = twice.pack(x)
        assert torch.equal(physical.flatten(), x.flatten()) == unharmed
        assert torch.equal(twice.unpack(physical, 256, cols), x)


def test_composed_is_one_layout_after_the_other() -> None:
    """In plain Python: the byte at (r, c) goes to o = fold(r, c), is read as (o // 28, o % 28), and goes to 128x4 of that.
    192 rows: the second layout pads, the first does not."""
    both = Composed(SM90_SCALE_FOLD, SWIZZLE_128x4)
    assert both.name == "128x4 of SM90 scale fold" and both.padded(192, 28) == (256, 28)
    x = random_bytes(192, 28, seed=4)
    want = torch.zeros(256 * 28, dtype=torch.uint8)
    for r in range(192):
        for c in range(28):
            o = _offset_fold(r, c, 192, 28)
            want[_offset_128x4(o // 28, o % 28, 192, 28)] = x[r, c]
    physical = both.pack(x)
    assert torch.equal(physical.flatten(), want)
    assert torch.equal(both.unpack(physical, 192, 28), x)
    batch = random_bytes(3, 192, 28, seed=5)
    assert torch.equal(both.unpack(both.pack(batch), 192, 28), batch)


# -- what hides a fault ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "cosine"), [("gaussian", 0.95), ("uniform", 0.996), ("spread", None)])
def test_iid_data_hides_a_wrong_swizzle(kind: str, cosine: float | None) -> None:
    """NVFP4 scales in linear order, read as 128x4: cosine 0.95 on Gaussian, 0.996 on uniform weights. Where scales differ by
    row and block it shows: below 0.8."""
    gen = torch.Generator().manual_seed(3)
    w = torch.rand(256, 1024, generator=gen) * 2 - 1 if kind == "uniform" else torch.randn(256, 1024, generator=gen)
    if kind == "spread":
        w = w * torch.exp2(torch.randn(256, 1, generator=gen)) * torch.exp2(torch.randn(256, 64, generator=gen)).repeat_interleave(16, 1)
    q = quantise(w, NVFP4)
    wrong = BlockTensor(q.payload, SWIZZLE_128x4.unpack(q.scales, 256, 64), NVFP4, q.global_scale)
    got = torch.nn.functional.cosine_similarity(wrong.dequantise().flatten(), q.dequantise().flatten(), dim=0).item()
    if cosine is None:
        assert got < 0.8
    else:
        assert got == pytest.approx(cosine, abs=0.01 if kind == "gaussian" else 0.002)


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("call", "message"), [
    (lambda: SWIZZLE_128x4.pack(torch.zeros(128, 4)), "view it as uint8 first"),
    (lambda: SWIZZLE_128x4.pack(torch.zeros(128, 4, dtype=torch.uint8).view(torch.float8_e4m3fn)), "dtype torch.uint8"),
    (lambda: SWIZZLE_128x4.unpack(torch.zeros(128, 4, dtype=torch.int8), 128, 4), "dtype torch.uint8"),
    (lambda: LINEAR.pack(random_bytes(12)), "at least two dimensions"),
    (lambda: SWIZZLE_128x4.unpack(random_bytes(160 * 6), 160, 6), "a multiple of 2048 bytes"),
    (lambda: SWIZZLE_128x4.unpack(random_bytes(3, 1000), 128, 8), "rows or columns not padded"),
    (lambda: SM90_SCALE_FOLD.pack(random_bytes(2, 96, 12)), "rows % 64 == 0 and columns % 4 == 0, got 96 x 12"),
    (lambda: SM90_SCALE_FOLD.pack(random_bytes(2, 128, 10)), "this layout does not pad"),
    (lambda: SM90_WEIGHT_INTERLEAVE.pack(random_bytes(24, 32)), "rows % 16 == 0"),
    (lambda: SM90_WEIGHT_INTERLEAVE.pack(random_bytes(16, 48)), "columns % 32 == 0"),
    (lambda: SM12X_WEIGHT_TILES.pack(random_bytes(32, 8)), "rows % 64 == 0"),
    (lambda: V_CACHE_4x4.unpack(random_bytes(6, 8), 6, 8), "rows % 4 == 0"),
    (lambda: SWIZZLE_128x4.explain(160, 0, 160, 6), r"\(160, 0\)"),
    (lambda: SWIZZLE_128x4.explain(0, -1, 160, 6), "inside 160 x 6"),
    (lambda: Layout("bad", "r -> r", (), False, "").pack(random_bytes(2, 2)), "two logical axes"),
])
def test_refusals(call: Callable[[], object], message: str) -> None:
    with pytest.raises(MxdebugError, match=message):
        call()


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_inputs_are_left_alone(layout: Layout) -> None:
    """Also where the input is a view with odd strides."""
    tr, tc = layout.tile
    x = random_bytes(3 * tc, 2 * tr, seed=8).T
    before = x.clone()
    physical = layout.pack(x)
    kept = physical.clone()
    assert torch.equal(layout.unpack(physical, 2 * tr, 3 * tc), before)
    assert torch.equal(x, before) and torch.equal(physical, kept)
    assert physical.is_contiguous()


# -- buffers that start and go on anywhere -----------------------------------------------------------------------------------


def within(t: Tensor, before: int, after: int) -> Tensor:
    """Each slab of t [E, ...] as a view into a larger buffer: `before` bytes, the slab, `after` bytes."""
    flat = t.reshape(t.shape[0], -1)
    buffer = torch.full((t.shape[0], before + flat.shape[1] + after), 0xEE, dtype=torch.uint8)
    buffer[:, before: before + flat.shape[1]] = flat
    return buffer[:, before: before + flat.shape[1]]


@pytest.mark.parametrize(("before", "after"), [(1, 0), (0, 1), (3, 2), (0, 8)])
@pytest.mark.parametrize("layout", list(LAYOUTS.values()), ids=lambda layout: layout.name)
def test_slabs_may_be_views_of_a_larger_buffer(layout: Layout, before: int, after: int) -> None:
    """Bytes are moved as words where they stay together; a view need not start at a word, nor its slabs follow each other by whole words."""
    for experts in (1, 3):
        logical = torch.randint(0, 256, (experts, 256, 128), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
        physical = layout.pack(logical)
        assert torch.equal(layout.unpack(within(physical, before, after), 256, 128).reshape(logical.shape), logical)
        assert torch.equal(layout.pack(within(logical, before, after).unflatten(1, (256, 128))), physical)


@pytest.mark.parametrize("read", [row_hashes, SWAP_NIBBLES.apply, lambda t: words(t, torch.int64)], ids=["row_hashes", "Values", "words"])
def test_words_are_read_from_anywhere(read: Callable[[Tensor], Tensor]) -> None:
    t = torch.randint(0, 256, (2, 3, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    for before, after in ((1, 0), (0, 1), (3, 2)):
        view = within(t, before, after).unflatten(1, (3, 64))
        assert torch.equal(read(view), read(t)) and torch.equal(read(view[1]), read(t[1]))
