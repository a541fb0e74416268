"""Does `identify` name the layout and row order of bytes, and say so when the data cannot show it?"""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from making import made_bytes
from torch import Tensor

from mxdebug.errors import MxdebugError
from mxdebug.layouts import (GATE_UP, GROUPS_64, INTERLEAVED, INTERLEAVED_UP, LINEAR, ROW_ORDERS, ROW_SHUFFLES, SCALE_LAYOUTS, SHUFFLE_16,
                             SHUFFLE_32, SM12X_WEIGHT_TILES, SM90_SCALE_FOLD, SM90_WEIGHT_INTERLEAVE, SWIZZLE_8x4, SWIZZLE_128x4,
                             TRANSPOSED, UP_GATE, V_CACHE_4x4, WEIGHT_LAYOUTS, Composed, Layout, identify, match_rows, row_hashes)
from mxdebug.recorded import kernel_dumps

NAMED = [o for o in ROW_ORDERS if o is not GATE_UP]


def composed(a: Layout, b: Layout, t: Tensor) -> Tensor:
    return Composed(a, b).pack(t)


# -- every layout -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", SCALE_LAYOUTS, ids=lambda x: x.name)
@pytest.mark.parametrize("shape", [(256, 12), (384, 20), (3, 128, 24)], ids=str)
def test_scale_layouts_are_named(layout: Layout, shape: tuple[int, ...]) -> None:
    """Sizes at which no two layouts are the same map: more columns than a tile, and not 16."""
    t = made_bytes(*shape)
    found = identify(layout.pack(t), t, kind="scales")
    assert (found.name, found.certain, found.reason) == (layout.name, True, "") == (str(found), True, "")
    assert len(found.matches) == 1 and found.matches[0].layout is layout


@pytest.mark.parametrize("layout", WEIGHT_LAYOUTS, ids=lambda x: x.name)
def test_weight_layouts_are_named(layout: Layout) -> None:
    t = made_bytes(3, 128, 96)
    found = identify(layout.pack(t), t, kind="weights")
    assert found.name == str(found) == layout.name and found.certain


@pytest.mark.parametrize(("rows", "columns"), [(33, 5), (160, 9), (200, 30)])
def test_padded_layouts_are_named(rows: int, columns: int) -> None:
    """The 128x4 and 8x4 orders pad; the padding is not part of the matrix and may hold anything."""
    t = made_bytes(2, rows, columns)
    for layout in (SWIZZLE_128x4, SWIZZLE_8x4):
        packed = layout.pack(t)
        assert identify(packed, t, kind="scales").name == layout.name
        filled = layout.pack(torch.nn.functional.pad(t, (0, -columns % 4, 0, -rows % layout.tile[0]), value=7))
        assert identify(filled, t, kind="scales").name == layout.name


@pytest.mark.parametrize("layout", [x for x in SCALE_LAYOUTS if x is not LINEAR], ids=lambda x: x.name)
def test_a_layout_applied_twice(layout: Layout) -> None:
    t = made_bytes(2, 256, 20)
    found = identify(composed(layout, layout, t), t, kind="scales")
    assert found.name == f"{layout.name} applied twice" and found.certain


@pytest.mark.parametrize(("first", "second"), [(SM90_SCALE_FOLD, SWIZZLE_128x4), (SWIZZLE_128x4, SM90_SCALE_FOLD),
                                              (SWIZZLE_8x4, SWIZZLE_128x4), (V_CACHE_4x4, SWIZZLE_8x4),
                                              (SM90_SCALE_FOLD, TRANSPOSED)], ids=lambda x: x.name)
def test_compositions(first: Layout, second: Layout) -> None:
    t = made_bytes(2, 256, 20)
    found = identify(composed(first, second, t), t, kind="scales")
    assert found.name == f"{second.name} of {first.name}" and found.certain


def test_weight_interleave_applied_twice() -> None:
    t = made_bytes(2, 64, 64)
    for second, name in ((SM90_WEIGHT_INTERLEAVE, "SM90 weight interleave applied twice"),
                         (SM12X_WEIGHT_TILES, "SM12x weight tiles of SM90 weight interleave")):
        assert identify(composed(SM90_WEIGHT_INTERLEAVE, second, t), t, kind="weights").name == name


@pytest.mark.parametrize("function", ["block_scale_interleave", "interleave_moe_scales_for_sm90_mixed_gemm",
                                      "interleave_moe_weights_for_sm90_mixed_gemm"])
def test_recorded_kernels_are_named(function: str) -> None:
    """What FlashInfer's own kernels wrote on an H200, from bytes alone."""
    from mxdebug.calls import load

    name, kind = {"block_scale_interleave": ("128x4", "scales"), "interleave_moe_scales_for_sm90_mixed_gemm": ("SM90 scale fold", "scales"),
                  "interleave_moe_weights_for_sm90_mixed_gemm": ("SM90 weight interleave", "weights")}[function]
    assert kernel_dumps(function)
    for dump in kernel_dumps(function):
        call = load(dump)
        logical = next(t for t in call.arguments.values() if isinstance(t, Tensor))
        found = identify(call.outputs[0].view(torch.uint8), logical.view(torch.uint8), kind=kind)
        assert any(m.name == name for m in found.matches) and found.certain, (dump.name, str(found))


# -- row orders -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", NAMED, ids=lambda o: o.name)
@pytest.mark.parametrize("layout", [LINEAR, SM90_SCALE_FOLD, SWIZZLE_128x4], ids=lambda x: x.name)
def test_row_orders_of_scales(order: object, layout: Layout) -> None:
    t = made_bytes(2, 384, 20)
    found = identify(layout.pack(t[:, order.indices(192)]), t, kind="scales")
    assert str(found) == f"{layout.name}, rows {order.name}" and found.certain
    assert torch.equal(found.matches[0].permutation, order.indices(192))


@pytest.mark.parametrize("shuffle", ROW_SHUFFLES, ids=lambda s: s.name)
@pytest.mark.parametrize("order", [None, UP_GATE, INTERLEAVED_UP], ids=lambda o: getattr(o, "name", "as they are"))
def test_row_shuffles_and_orders_of_weights(shuffle: object, order: object) -> None:
    """What TRT-LLM-gen is given: rows ordered, then shuffled."""
    t = made_bytes(2, 128, 64)
    rows = shuffle.indices(128) if order is None else order.indices(64)[shuffle.indices(128)]
    found = identify(SM90_WEIGHT_INTERLEAVE.pack(t[:, rows]), t, kind="weights")
    want = shuffle.name if order is None else f"{order.name} then {shuffle.name}"
    assert found.matches[0].name == f"SM90 weight interleave, rows {want}" and found.certain
    assert torch.equal(found.matches[0].permutation, rows)


def test_groups_of_64_and_halves_are_the_same_map_at_64_rows() -> None:
    """With one group in each half, [u,g] groups of 64 is [w3; w1]."""
    t = made_bytes(128, 20)
    found = identify(t[UP_GATE.indices(64)], t, kind="scales")
    assert found.certain and found.name == "linear, rows [w3; w1]" and f"linear, rows {GROUPS_64.name}" in found.reason


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([LINEAR, SM90_WEIGHT_INTERLEAVE, SM12X_WEIGHT_TILES]), st.sampled_from([64, 128]))
def test_an_unknown_permutation_of_weight_rows_is_recovered(seed: int, layout: Layout, rows: int) -> None:
    t = made_bytes(2, rows, 32, seed=seed)
    permutation = torch.randperm(rows, generator=torch.Generator().manual_seed(seed))
    found = identify(layout.pack(t[:, permutation]), t, kind="weights")
    assert found.name == f"{layout.name}, rows in an unknown order" and torch.equal(found.matches[0].permutation, permutation)


def test_an_unknown_permutation_with_rows_that_repeat_within_an_expert() -> None:
    """Zero rows in one expert only: the permutation is pinned down by the others."""
    t = made_bytes(3, 64, 32)
    t[0, 10:30] = 0
    permutation = torch.randperm(64, generator=torch.Generator().manual_seed(1))
    found = identify(t[:, permutation], t, kind="weights")
    assert found.name == "linear, rows in an unknown order" and torch.equal(found.matches[0].permutation, permutation)


def test_rows_that_are_equal_in_all_experts_still_give_a_permutation() -> None:
    t = made_bytes(2, 64, 32)
    t[:, 10:14] = t[:, 9:10]
    found = identify(t[:, torch.arange(63, -1, -1)], t, kind="weights")
    assert found.name == "linear, rows in an unknown order"
    assert found.matches[0].permutation.sort().values.tolist() == list(range(64))
    assert torch.equal(t[:, found.matches[0].permutation], t.flip(1))


def test_a_row_that_stands_twice_is_no_permutation() -> None:
    """One row lost, another twice: every row is known, but nothing is rearranged."""
    t = made_bytes(2, 64, 32)
    broken = t.clone()
    broken[:, 5] = broken[:, 6]
    found = identify(broken, t, kind="weights")
    assert not found.matches and "not a rearrangement" in str(found)


def test_experts_must_agree() -> None:
    """One map for all experts: where each has its own permutation, nothing is named."""
    t = made_bytes(2, 64, 32)
    mixed = torch.stack([t[0, INTERLEAVED.indices(32)], t[1]])
    assert str(identify(mixed, t, kind="weights")) == "no known layout: the bytes are a rearrangement, but none that mxdebug knows"
    assert identify(torch.stack([t[1], t[0]]), t, kind="weights").name == "unknown"


def test_per_expert() -> None:
    """[E, rows, columns] is laid out expert by expert; physical bytes may have any shape."""
    t = made_bytes(4, 256, 12)
    packed = SM90_SCALE_FOLD.pack(t)
    for physical in (packed, packed.flatten(), packed.reshape(4, -1), packed.reshape(8, -1)):
        assert identify(physical, t, kind="scales").name == "SM90 scale fold"
    # laid out as one tall matrix it is another map where a slab is no whole number of tiles
    tall = made_bytes(2, 64, 12)
    one = SWIZZLE_128x4.pack(tall.reshape(128, 12))
    assert identify(one, tall, kind="scales").name == "unknown"
    assert identify(one, tall.reshape(128, 12), kind="scales").name == "128x4"


# -- what data cannot show --------------------------------------------------------------------------------------


def test_constant_scales_are_ambiguous() -> None:
    """Every layout and every order fits. The print names a few and stays short."""
    t = torch.full((2, 256, 12), 127, dtype=torch.uint8)
    found = identify(t, t, kind="scales")
    assert not found.certain and len(found.matches) > 50
    assert str(found).startswith("SM90 scale fold OR linear OR 128x4 OR ") and len(str(found)) < 200
    assert "cannot tell them apart (1 distinct byte values, 1 distinct rows of 512)" in str(found)


def test_scales_that_differ_by_block_only_hide_the_rows() -> None:
    """All rows alike: the layout may show, the row order cannot."""
    t = made_bytes(1, 20).expand(256, 20).contiguous()
    found = identify(SWIZZLE_128x4.pack(t), t, kind="scales")
    assert not found.certain and "128x4" in {m.layout.name for m in found.matches} and "1 distinct rows of 256" in found.reason
    assert {m.rows for m in found.matches} >= {"as they are", "[w3; w1]", "g0,u0,g1,u1"} and len(str(found)) < 200


def test_16_columns_are_named_as_the_same_map() -> None:
    """128x4 is its own inverse at 16 scale columns: swizzled twice is linear, which no data can tell apart."""
    t = made_bytes(256, 16)
    found = identify(t, t, kind="scales")
    assert found.certain and found.name == "linear" and "the same map at 256 x 16 as" in str(found) and "128x4 applied twice" in str(found)
    assert torch.equal(composed(SWIZZLE_128x4, SWIZZLE_128x4, t).flatten(), t.flatten())
    assert identify(SWIZZLE_128x4.pack(t), t, kind="scales").name == "128x4"


def test_4_columns_are_named_as_the_same_map() -> None:
    """8x4 with one tile in a row is linear."""
    t = made_bytes(128, 4)
    found = identify(SWIZZLE_8x4.pack(t), t, kind="scales")
    assert found.certain and found.name == "linear" and "8x4" in found.reason and len(str(found)) < 200


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from(SCALE_LAYOUTS), st.sampled_from([(128, 8), (256, 4), (256, 16), (512, 12), (64, 20)]),
       st.booleans())
def test_what_is_certain_is_true(seed: int, layout: Layout, shape: tuple[int, int], swap: bool) -> None:
    """Whatever the data: the layout that made the bytes is among the matches, and `certain` only where all matches are one map."""
    few = made_bytes(*shape, seed=seed) % (2 + seed % 5) + 120  # few values, so that accidents happen
    if layout is SWIZZLE_128x4 and shape[0] % 128:
        layout = SWIZZLE_8x4
    rows = UP_GATE.indices(shape[0] // 2) if swap else torch.arange(shape[0])
    found = identify(layout.pack(few[rows]), few, kind="scales")
    probe = made_bytes(*shape, seed=1)
    made = [m.layout.pack(probe[m.permutation]).flatten() for m in found.matches]
    right = [torch.equal(x, layout.pack(probe[rows]).flatten()) for x in made]
    assert any(right)
    assert found.certain == all(right) and str(found) and len(str(found)) < 400


# -- none -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["scales", "weights"])
def test_none(kind: str) -> None:
    t = made_bytes(2, 128, 32)
    other = identify(made_bytes(2, 128, 32, seed=9), t, kind=kind)
    assert not other.matches and not other.certain and other.name == "unknown"
    assert str(other) == ("no known layout: the physical bytes are not a rearrangement of the logical ones: other values, another tensor, "
                          "or another expert")
    flipped = identify(t.flatten(1).flip(1), t, kind=kind)
    assert str(flipped) == "no known layout: the bytes are a rearrangement, but none that mxdebug knows"


def test_a_single_wrong_byte_is_no_match() -> None:
    t = made_bytes(256, 12)
    packed = SM90_SCALE_FOLD.pack(t).flatten()
    packed[1000] ^= 1
    assert not identify(packed, t, kind="scales").matches


def test_layouts_can_be_chosen() -> None:
    t = made_bytes(256, 12)
    assert identify(SWIZZLE_128x4.pack(t), t, kind="scales", layouts=[LINEAR, SM90_SCALE_FOLD]).name == "unknown"
    assert identify(SWIZZLE_128x4.pack(t), t, kind="scales", layouts=[SWIZZLE_128x4]).name == "128x4"


@pytest.mark.parametrize(("physical", "logical", "kind", "words"), [
    (made_bytes(2, 8), made_bytes(2, 8), "bias", "kind: expected one of scales, weights, got 'bias'"),
    (made_bytes(2, 8).float(), made_bytes(2, 8), "scales", "got torch.float32, torch.uint8"),
    (made_bytes(2, 8), made_bytes(2, 8).view(torch.float8_e8m0fnu), "scales", "view the bytes as uint8"),
    (made_bytes(2, 8), made_bytes(16), "scales", r"logical \[rows, columns\]"),
    (made_bytes(2, 8), made_bytes(3, 2, 8), "scales", "physical bytes: expected a multiple of 3 experts, got 16 bytes")])
def test_refusals(physical: Tensor, logical: Tensor, kind: str, words: str) -> None:
    with pytest.raises(MxdebugError, match=words):
        identify(physical, logical, kind=kind)


# -- hashes -----------------------------------------------------------------------------------------------------


def test_row_hashes_tell_rows_apart() -> None:
    """Equal rows have equal hashes; 20,000 random rows, and rows that differ in one bit, have different ones. Zero rows are 0."""
    t = made_bytes(20_000, 7)
    t = t.unique(dim=0)
    assert row_hashes(t).unique().numel() == len(t)
    base = made_bytes(1, 21)
    bits = torch.stack([base[0].clone() for _ in range(168)])
    for i in range(168):
        bits[i, i // 8] ^= 1 << i % 8
    assert torch.cat([row_hashes(bits), row_hashes(base)]).unique().numel() == 169
    assert torch.equal(row_hashes(t), row_hashes(t.clone())) and row_hashes(torch.zeros(2, 9, dtype=torch.uint8)).tolist() == [0, 0]


def test_row_hashes_see_the_order_of_bytes() -> None:
    a, b = [1, 2, 3, 4, 5, 6, 7, 8], [9, 0, 0, 0, 0, 0, 0, 0]
    t = torch.tensor([a + b, b + a], dtype=torch.uint8)
    assert row_hashes(t).unique().numel() == 2


def test_match_rows() -> None:
    known = torch.tensor([5, 7, 5, -3])
    assert match_rows(torch.tensor([-3, 5, 6, 7, 99, -9]), known).tolist() == [3, 0, -1, 1, -1, -1]
    assert match_rows(torch.tensor([1, 2]), torch.zeros(0, dtype=torch.int64)).tolist() == [-1, -1]
    assert SHUFFLE_16.block == 16 and SHUFFLE_32.block == 32


def test_row_hashes_tell_a_word_from_its_complement() -> None:
    """A hash that mixes with an arithmetic shift does not: ~w ^ (~w >> 29) is w ^ (w >> 29)."""
    t = torch.randint(0, 256, (64, 40), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    for first, last in ((0, 40), (8, 16), (32, 40)):
        other = t.clone()
        other[:, first:last] ^= 255
        assert not (row_hashes(t) == row_hashes(other)).any()
    assert row_hashes(torch.full((1, 16), 255, dtype=torch.uint8)).item() != 0
