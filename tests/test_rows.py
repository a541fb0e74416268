"""Which row stands where? Every order written out for a small half, and FlashInfer's index functions as oracle."""

from __future__ import annotations

import pytest
import torch

from mxdebug.errors import MxdebugError
from mxdebug.layouts import (GATE_UP, GROUPS_64, INTERLEAVED, INTERLEAVED_SWAPPED, INTERLEAVED_UP, ROW_ORDERS, ROW_SHUFFLES, SHUFFLE_16, SHUFFLE_32, UP_GATE,
                             RowOrder, RowShuffle)

G, U = ["g0", "g1", "g2"], ["u0", "u1", "u2"]
LOGICAL = G + U  # gate (w1), then up (w3)


@pytest.mark.parametrize(("order", "rows"), [
    (GATE_UP, ["g0", "g1", "g2", "u0", "u1", "u2"]),
    (UP_GATE, ["u0", "u1", "u2", "g0", "g1", "g2"]),
    (INTERLEAVED, ["g0", "u0", "g1", "u1", "g2", "u2"]),
    (INTERLEAVED_UP, ["u0", "g0", "u1", "g1", "u2", "g2"])], ids=lambda v: getattr(v, "name", ""))
def test_orders_of_three_rows_written_out(order: RowOrder, rows: list[str]) -> None:
    """Physical row i holds logical row indices[i]. Three, so that no order is its own inverse by accident of size."""
    assert [LOGICAL[i] for i in order.indices(3).tolist()] == rows


def test_groups_of_64() -> None:
    """Half 128: u0..u63, g0..g63, u64..u127, g64..g127; up row u is logical row 128 + u."""
    want = [*range(128, 192), *range(0, 64), *range(192, 256), *range(64, 128)]
    assert GROUPS_64.indices(128).tolist() == want


@pytest.mark.parametrize("order", ROW_ORDERS, ids=lambda o: o.name)
def test_orders_are_different_permutations(order: RowOrder) -> None:
    for half in (64, 192):
        index = order.indices(half)
        assert index.dtype == torch.int64 and sorted(index.tolist()) == list(range(2 * half))
    others = [o for o in ROW_ORDERS if o is not order]
    # 64 rows: groups of 64 are then [w3; w1] itself, which no data can tell apart
    same = [o for o in others if torch.equal(o.indices(64), order.indices(64))]
    assert same == {UP_GATE: [GROUPS_64], GROUPS_64: [UP_GATE]}.get(order, [])
    assert not any(torch.equal(o.indices(128), order.indices(128)) for o in others)


def test_which_halves_fit() -> None:
    assert GROUPS_64.fits(128) and not GROUPS_64.fits(96)
    assert all(o.fits(3) for o in ROW_ORDERS if o is not GROUPS_64)
    with pytest.raises(MxdebugError, match="got 96 rows"):
        GROUPS_64.indices(96)


@pytest.mark.parametrize(("shuffle", "first"), [
    (SHUFFLE_32, [0, 4, 8, 12, 16, 20, 24, 28, 1, 5, 9, 13, 17, 21, 25, 29, 2, 6, 10, 14, 18, 22, 26, 30, 3, 7, 11, 15, 19, 23, 27, 31]),
    (SHUFFLE_16, [0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15])], ids=lambda v: getattr(v, "name", ""))
def test_shuffles_written_out(shuffle: RowShuffle, first: list[int]) -> None:
    """Blocks of 32: old row 4a+b goes to 8b+a, so row 1 holds old row 4. Blocks of 16: 2a+b goes to 8b+a. Each block alone."""
    want = [shuffle.block * n + i for n in range(3) for i in first]
    assert shuffle.indices(3 * shuffle.block).tolist() == want
    inner = shuffle.block // 8
    for old in range(shuffle.block):
        a, b = divmod(old, inner)
        assert want[8 * b + a] == old


def test_which_rows_can_be_shuffled() -> None:
    assert ROW_SHUFFLES == (SHUFFLE_32, SHUFFLE_16)
    assert SHUFFLE_32.fits(64) and not SHUFFLE_32.fits(48) and SHUFFLE_16.fits(48)
    with pytest.raises(MxdebugError, match="a multiple of 32, got 48"):
        SHUFFLE_32.indices(48)


@pytest.mark.parametrize(("shuffle", "epilogue_tile_m"), [(SHUFFLE_32, 128), (SHUFFLE_16, 64)], ids=lambda v: str(getattr(v, "name", v)))
def test_shuffles_as_flashinfer(shuffle: RowShuffle, epilogue_tile_m: int) -> None:
    fi = pytest.importorskip("flashinfer.utils")
    x = torch.zeros(384, 8, dtype=torch.uint8)
    assert torch.equal(shuffle.indices(384), fi.get_shuffle_matrix_a_row_indices(x, epilogue_tile_m))
    assert torch.equal(shuffle.indices(384), fi.get_shuffle_matrix_sf_a_row_indices(x, epilogue_tile_m))


@pytest.mark.parametrize(("shuffle", "epilogue_tile_m"), [(SHUFFLE_32, 128), (SHUFFLE_16, 64)], ids=lambda v: str(getattr(v, "name", v)))
def test_trtllm_rows_from_a_checkpoint_as_flashinfer(shuffle: RowShuffle, epilogue_tile_m: int) -> None:
    """FlashInfer starts from [w3; w1], interleaves and shuffles; we go from [w1; w3] to u0,g0,u1,g1, then shuffle. The same rows."""
    fi = pytest.importorskip("flashinfer.fused_moe.core")
    rows = torch.arange(256)  # logical: gate 0..127, up 128..255
    w3_w1 = rows[UP_GATE.indices(128)]
    interleaved = rows[INTERLEAVED_UP.indices(128)]
    assert torch.equal(w3_w1[fi.get_reorder_rows_for_gated_act_gemm_row_indices(torch.zeros(256, 8))], interleaved)
    permute = fi._maybe_get_cached_w3_w1_permute_indices({}, torch.zeros(256, 8, dtype=torch.uint8), epilogue_tile_m)
    assert torch.equal(w3_w1[permute], interleaved[shuffle.indices(256)])


@pytest.mark.parametrize("order", [o for o in ROW_ORDERS if not o.swap], ids=lambda o: o.name)
def test_groups_are_undone_by_flashinfer(order: RowOrder) -> None:
    """`deinterleave_gated_rows(x, block)` returns the half that comes first on top."""
    fi = pytest.importorskip("flashinfer.fused_moe.core")
    rows = torch.arange(256)[:, None]
    physical = rows[order.indices(128)]
    block = {GATE_UP: 128, UP_GATE: 128, INTERLEAVED: 1, INTERLEAVED_UP: 1, GROUPS_64: 64}[order]
    top_first = torch.cat([rows[128:], rows[:128]]) if order.flip else rows
    assert torch.equal(fi.deinterleave_gated_rows(physical, block), top_first)


def test_halves_of_alternating_rows_swapped() -> None:
    """Four rows of each half: g0,u0,g1,u1,g2,u2,g3,u3 with halves exchanged is g2,u2,g3,u3,g0,u0,g1,u1; u is 4..7."""
    assert INTERLEAVED_SWAPPED.indices(4).tolist() == [2, 6, 3, 7, 0, 4, 1, 5]
