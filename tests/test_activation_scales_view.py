"""Views and exercises of notebook 04: expected rows and bytes written out."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor

from mxdebug.errors import MxdebugError
from mxdebug.exchange import Case, Exchange, Handed, quantise_activations, sample_tokens
from mxdebug.exercises_scales import check, unknown_scales
from mxdebug.formats import MXFP8, BlockTensor
from mxdebug.layouts import LINEAR, SWIZZLE_8x4, SWIZZLE_128x4
from mxdebug.views import activation_scales as view
from mxdebug.views import places


def sent(rank: int, rows: int) -> BlockTensor:
    return BlockTensor(*quantise_activations(sample_tokens(rank, rows, 1024, 0), MXFP8, swizzled=False), MXFP8)


def gathered(counts: tuple[int, ...], order: str) -> Exchange:
    """What an all-gather hands to each rank, without processes."""
    blocks = tuple(sent(r, n) for r, n in enumerate(counts))
    linear = torch.cat([b.scales for b in blocks])
    scales = {"no swizzle": linear, "swizzle after": SWIZZLE_128x4.pack(linear).flatten(),
              "swizzle before": torch.cat([SWIZZLE_128x4.pack(b.scales).flatten() for b in blocks])}[order]
    source = torch.tensor([[r, i] for r, n in enumerate(counts) for i in range(n)])
    handed = tuple(Handed(r, torch.cat([b.payload for b in blocks]), scales, source, 32) for r in range(len(counts)))
    return Exchange(Case(counts, 1024, "MXFP8", order, "naive_dp_ep"), "none", MXFP8, blocks, handed, "")


# -- what is read


def test_reading_counts_what_is_wrong_and_what_is_beyond_the_end() -> None:
    """5 linear rows of 32 are 160 bytes. As 128x4, token r and column c < 4 lie at 16 r + c <= 67, inside; column 4 begins at 512."""
    meant = torch.arange(160, dtype=torch.uint8).view(5, 32) + 60
    r = view.reading(meant, meant, SWIZZLE_128x4, title="t")
    assert int(r.outside.sum()) == 5 * 28 and not r.outside[:, :4].any()
    # token 1, column 2: byte 18, which is token 0's column 18; only token 0's own four are right
    assert r.read[1, 2] == 60 + 18 and r.wrong == 156
    # bytes 16 r + c stand for 32 r + c: too small by 16 r, at token 4 by 64
    assert str(r) == (f"156 of 160 block scales are read wrong (97.5%)\n  too small: 16, too large: 0, by a factor of up to {2**64}\n"
                      "  beyond the end of the buffer: 140")
    right = view.reading(meant, SWIZZLE_128x4.pack(meant), SWIZZLE_128x4, title="t")
    assert right.wrong == 0 and torch.equal(right.read, meant)


def test_a_glyph_for_what_is_beyond_the_end_and_words_of_this_format() -> None:
    scales = sent(0, 5).scales
    figure = view.draw(view.reading(scales, scales, SWIZZLE_128x4, title="t"))
    assert [t.name for t in figure.data if t.name] == [view.BEYOND] and len(figure.data[-1].x) == 140 and figure.layout.showlegend
    assert figure.data[1].z[0][4] is None and figure.data[1].z[0][0] == int(scales[0, 0])
    assert figure.to_json() == view.draw(view.reading(scales, scales, SWIZZLE_128x4, title="t")).to_json()
    padded = view.draw(view.reading(scales, torch.tensor([[0, 255, 120, 121] * 8] * 5, dtype=torch.uint8), LINEAR, title="t"))
    assert {t.name for t in padded.data if t.name} == {"0x00: 2⁻¹²⁷, as padding has", "0xFF: NaN"}  # E8M0
    assert "SM90" not in padded.to_json() and "weights" not in padded.to_json()


def test_the_tile_is_drawn_in_words_of_activations() -> None:
    tile = sent(0, 128).scales[:, :4].contiguous()
    figure = view.draw_tile(places.of_scales(SWIZZLE_128x4, tile, SWIZZLE_128x4.pack(tile), range(128), [(5, 2)], title="t"))
    says = figure.layout.meta["says"]
    assert "numbers of one token" in says and says in [a.text.replace("<br>", " ") for a in figure.layout.annotations]
    assert "weights" not in figure.to_json()


# -- tiles


@pytest.mark.parametrize(("counts", "reads", "gets", "right"), [
    ((28, 172), (((0, 28), (1, 100)), ((1, 72), (None, 56))), (((0, 28), (None, 100)), ((1, 128),), ((1, 44), (None, 84))), 28),
    ((128, 5), (((0, 128),), ((1, 5), (None, 123))), (((0, 128),), ((1, 5), (None, 123))), 133),
    ((100, 100), (((0, 100), (1, 28)), ((1, 72), (None, 56))), (((0, 100), (None, 28)), ((1, 100), (None, 28))), 100)])
def test_tiles(counts: tuple[int, ...], reads: view.Strip, gets: view.Strip, right: int) -> None:
    t = view.tiles(counts)
    assert (t.reads, t.gets, t.right) == (reads, gets, right)
    assert gathered(counts, "swizzle before").wrong_rows(0, SWIZZLE_128x4) == sum(counts) - right


def test_tiles_print_and_draw() -> None:
    t = view.tiles((40, 90))
    assert str(t) == ("40 + 90 tokens, tile by tile:\n  the kernel reads  40 of rank 0, 88 of rank 1 | 2 of rank 1, 126 of padding\n"
                      "  it gets           40 of rank 0, 88 of padding | 90 of rank 1, 38 of padding\n  in their places: 40 of 130")
    figure = view.draw_tiles(t)
    assert [(b.base[0], b.x[0]) for b in figure.data if b.y[0] == 1] == [(0, 40), (40, 88), (128, 2), (130, 126)]
    assert "uid" not in json.dumps(json.loads(figure.to_json()))
    for refused in ((), (3, 0)):
        with pytest.raises(MxdebugError, match="one for each rank"):
            view.tiles(refused)
    with pytest.raises(MxdebugError, match="at most 4"):
        view.draw_tiles(view.tiles((1,) * 5))


# -- several exchanges


def test_summary() -> None:
    s = view.summary([gathered((28, 172), "no swizzle"), gathered((128, 128), "no swizzle"), gathered((28, 172), "swizzle before")])
    assert str(s).split("\n") == [
        "tokens   order           bytes   read    wrong  from one call              with what was sent",
        "28+172   no swizzle       6400   8192  200/200  proved wrong by size       proved wrong by senders",
        "128+128  no swizzle       8192   8192  256/256  suspected wrong            proved wrong by senders",
        "28+172   swizzle before  12288   8192  172/200  proved wrong by zeros      proved wrong by senders"]
    e = gathered((28, 172), "no swizzle")
    other = Handed(1, e.handed[1].payload, e.handed[1].scales.flip(0), e.handed[1].source, 32)
    with pytest.raises(MxdebugError, match="an all-gather"):
        view.summary([Exchange(e.case, e.backend, e.format, e.sent, (e.handed[0], other), "")])


# -- exercises


@pytest.mark.parametrize(("answer", "right", "says"), [
    (None, None, "a number from 0 to 8191"), ("6822", False, "a whole number, this is str"), (True, False, "bool"),
    (8192, False, "is outside"),
    # token 170 = 128 + 32 + 10, column 22 = 5*4 + 2: 4096 + 5*512 + 10*16 + 1*4 + 2
    (6822, True, "elements 704 to 735 of token 170"),
    (170 * 32 + 22, False, "the linear place"), ((21 * 8 + 5) * 32 + 2 * 4 + 2, False, "layout 8x4"),
    (10 * 16 + 4 + 2, False, "inside its tile only"),
    ((5 * 2 + 1) * 512 + 166, False, "all tiles of a column first"),
    (6823, False, "the column is not"), (6822 + 16, False, "the token is not")])
def test_scale_place(answer: object, right: bool | None, says: str) -> None:
    a = check("scale-place", answer)
    assert a.right is right and says in " ".join(str(a).split())


def nvfp4_only(scales: Tensor, format: str, swizzled: bool) -> Tensor:
    return SWIZZLE_128x4.pack(scales) if swizzled and format == "NVFP4" else scales


def by_hand(scales: Tensor, format: str, swizzled: bool) -> Tensor:
    if not swizzled:
        return scales.flatten()
    padded = torch.nn.functional.pad(scales, (0, -scales.shape[1] % 4, 0, -scales.shape[0] % 128))
    return padded.reshape(-1, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 2, 1, 4).flatten()


def other_axes(scales: Tensor, format: str, swizzled: bool) -> Tensor:
    padded = torch.nn.functional.pad(scales, (0, -scales.shape[1] % 4, 0, -scales.shape[0] % 128))
    return padded.reshape(-1, 4, 32, padded.shape[1] // 4, 4).permute(0, 3, 1, 2, 4)


@pytest.mark.parametrize(("answer", "right", "says"), [
    (None, None, "give a function"), (lambda *a: ..., None, "returns nothing yet"), (by_hand, True, "never looks at the format"),
    (nvfp4_only, False, "that is #42118"), (lambda s, f, w: by_hand(s, f, True), False, "breaks a path that worked"),
    (lambda s, f, w: SWIZZLE_8x4.pack(s), False, "right for layout 8x4"), (lambda s, f, w: s, False, "still linear"),
    (other_axes, False, "order of the axes"),
    (lambda s, f, w: s.reshape(-1, 4, 32, s.shape[1] // 4, 4), False, "Pad first"),
    (lambda s, f, w: by_hand(s, f, w).int(), False, "uint8 bytes, this is torch.int32"),
    (lambda s, f, w: torch.cat([by_hand(s, f, w)] * 2), False, "whole tiles of 128 x 4 have 16384"),
    (lambda s, f, w: s.flatten()[:-1], False, "behind the buffer")])
def test_scale_restore(answer: object, right: bool | None, says: str) -> None:
    a = check("scale-restore", answer)
    assert a.right is right and says in " ".join(str(a).split())


@pytest.mark.parametrize(("answer", "right", "says"), [
    ((None, None), None, "Orders: swizzle after, swizzle before, no swizzle"), (("swizzled", "size"), False, "the orders are"),
    (("no swizzle", "size"), False, "12800 bytes; these are 16384"),  # 200 x 64; two tiles rows of 128 x 64
    (("swizzle after", "senders"), False, "of the scales are what was sent"), (("swizzle before", "size"), False, "Both are 16384 bytes"),
    (("swizzle before", "senders"), False, "the call alone is enough"),
    (("swizzle before", "zeros"), True, "1792 scales are 0x00")])  # 28 rows of padding x 64
def test_scale_history(answer: tuple[object, object], right: bool | None, says: str) -> None:
    a = check("scale-history", *answer)
    assert a.right is right and says in " ".join(str(a).split())


def test_the_unknown_buffer_is_two_swizzles_one_behind_the_other() -> None:
    payload, scales, blocks = unknown_scales()
    assert payload.shape == (200, 512) and scales.numel() == 2 * 128 * 64
    assert torch.equal(SWIZZLE_128x4.unpack(scales[: 128 * 64], 100, 64), blocks[0].scales)
