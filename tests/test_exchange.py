"""Do scales survive the exchange? Real processes, and every expected byte from the 128x4 formula written out here."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mxdebug.errors import MxdebugError
from mxdebug.exchange import IMPLEMENTATIONS, ORDERS, Case, Exchange, examine_scales, exchange, exchange_all, launcher, processes
from mxdebug.exchange.examine import BEFORE, LINEAR_READ_SWIZZLED, RIGHT, SWIZZLED_READ_LINEAR, UNKNOWN
from mxdebug.exchange.quantise import quantise_activations, read_scales, sample_tokens
from mxdebug.formats import MXFP4, MXFP8, NVFP4, BlockFormat, BlockTensor, quantise
from mxdebug.layouts import LINEAR, SWIZZLE_128x4

G = torch.tensor(0.03125)  # a global scale, 2^-5


def up(n: int, to: int) -> int:
    return -(-n // to) * to


def swizzled(scales: Tensor) -> Tensor:
    """The flat 128x4 bytes of scales [R, C]: (r, c) goes to ((r/128)*C4 + c/4)*512 + (r%32)*16 + ((r%128)/32)*4 + c%4; the rest is 0."""
    rows, columns = scales.shape
    r, c = torch.arange(rows)[:, None], torch.arange(columns)[None, :]
    c4 = up(columns, 4) // 4
    out = torch.zeros(up(rows, 128) * up(columns, 4), dtype=torch.uint8)
    out[((r // 128) * c4 + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4] = scales
    return out


def sent(rows: list[int], hidden: int, fmt: BlockFormat, seed: int = 0) -> list[BlockTensor]:
    g = G if fmt.outer else None
    return [BlockTensor(*quantise_activations(sample_tokens(r, n, hidden, seed), fmt, swizzled=False, global_scale=g), fmt, g)
            for r, n in enumerate(rows)]


def gathered(blocks: list[BlockTensor]) -> tuple[Tensor, Tensor]:
    return torch.cat([b.payload for b in blocks]), torch.cat([b.scales for b in blocks])


# -- quantising


def test_mxfp8_bytes_by_hand() -> None:
    """RCEIL: amax 448 -> 2^0 (byte 127); 449 -> the next power, 2^1 (128); 3.5 = 448/128 -> 2^-7 (120). FlashInfer's rule, not floor's."""
    x = torch.zeros(3, 32)
    x[0, 5], x[1, 5], x[2, 5] = 448.0, 449.0, -3.5
    payload, scales = quantise_activations(x, MXFP8, swizzled=False)
    assert scales.tolist() == [[127], [128], [120]]
    assert payload[:, 5].tolist() == [0x7E, 0x76, 0xFE]  # 448; 224.5 -> 224 = 1.75 * 2^7 (exponent 14, mantissa 6); -448
    _, flat = quantise_activations(x, MXFP8, swizzled=True)
    assert flat.shape == (128 * 4,) and flat.nonzero().flatten().tolist() == [0, 16, 32]  # row r, r < 32: r * 16


def test_nvfp4_bytes_by_hand() -> None:
    """g = 2^-5: amax 6 * 2^-5 gives the E4M3 scale 1.0 = 0x38, and 6 is code 7; 12 * 2^-5 gives 2.0 = 0x40."""
    x = torch.zeros(2, 32)
    x[0, 0], x[1, 17] = 6 * 2**-5, -12 * 2**-5
    payload, scales = quantise_activations(x, NVFP4, swizzled=False, global_scale=G)
    assert scales.tolist() == [[0x38, 0], [0, 0x40]]
    assert payload[0, 0] == 0x07 and payload[1, 8] == 0xF0  # element 17: byte 8, high nibble
    _, padded = quantise_activations(x, NVFP4, swizzled=True, global_scale=G)
    assert padded.shape == (128, 4) and padded.flatten().nonzero().flatten().tolist() == [0, 17]


def test_nvfp4_is_quantised_as_the_kernel_does_not_by_exact_rounding() -> None:
    """g = 15/64: 1/g in float32 is 4.266667, above 64/15, so the kernel's reciprocal of it is 0.23437499, below g, and that one's is again
    4.266667. 2.5 * g times that is one ulp above the tie 2.5 and becomes 3 (code 5); exact rounding of the tie gives 2 (code 4)."""
    g = torch.tensor(15 / 64)
    x = torch.zeros(1, 16)
    x[0, 0], x[0, 1] = 6 * g, 2.5 * g
    payload, scales = quantise_activations(x, NVFP4, swizzled=False, global_scale=g)
    assert scales.tolist() == [[0x38]] and payload[0, 0] == 0x57
    assert quantise(x, NVFP4, global_scale=g).payload[0, 0] == 0x47


@pytest.mark.parametrize("fmt", [MXFP8, NVFP4], ids=lambda f: f.name)
@pytest.mark.parametrize(("rows", "hidden"), [(128, 1024), (200, 1056), (1, 512)])
def test_swizzled_is_the_formula_applied_to_linear(fmt: BlockFormat, rows: int, hidden: int) -> None:
    x, g = sample_tokens(0, rows, hidden, 3), G if fmt.outer else None
    payload, linear = quantise_activations(x, fmt, swizzled=False, global_scale=g)
    same, other = quantise_activations(x, fmt, swizzled=True, global_scale=g)
    assert torch.equal(payload, same) and torch.equal(other.flatten(), swizzled(linear))
    assert list(other.shape) == ([up(rows, 128), up(hidden // 16, 4)] if fmt.outer else [up(rows, 128) * up(hidden // 32, 4)])


def test_swizzled_has_no_default_and_global_scale_is_not_guessed() -> None:
    x = torch.ones(2, 64)
    with pytest.raises(TypeError, match="swizzled"):
        quantise_activations(x, MXFP8)  # type: ignore[call-arg]
    for fmt, g in ((NVFP4, None), (MXFP8, G)):
        with pytest.raises(MxdebugError, match="global scale"):
            quantise_activations(x, fmt, swizzled=False, global_scale=g)
    with pytest.raises(MxdebugError, match="MXFP8 or NVFP4"):
        quantise_activations(x, MXFP4, swizzled=False)
    with pytest.raises(MxdebugError, match="matrix"):
        quantise_activations(x[0], MXFP8, swizzled=False)


def test_sample_tokens_can_show_a_wrong_order() -> None:
    scales = quantise_activations(sample_tokens(0, 256, 1024, 0), MXFP8, swizzled=False)[1]
    assert (scales.float().std(0) > 0).all() and (scales.float().std(1) > 0).all()
    assert not torch.equal(sample_tokens(0, 4, 64, 0), sample_tokens(1, 4, 64, 0))


# -- reading


def test_reading_linear_bytes_as_swizzled_goes_beyond_the_end() -> None:
    """200 x 32 linear bytes: the last whole 128x4 tile row starts at 128 * 32 = 4096, ends at 8192, the buffer at 6400."""
    linear = torch.arange(6400).remainder(251).to(torch.uint8).view(200, 32)
    read, outside = read_scales(linear, 200, 32, SWIZZLE_128x4)
    # row 130, column 9: tile row 1, tile column 2, (1*8 + 2)*512 + 2*16 + 0*4 + 1 = 5153
    assert read[130, 9] == 5153 % 251 and not outside[130, 9]
    # row 199, column 31: (8 + 7)*512 + 7*16 + 2*4 + 3 = 7803, beyond
    assert outside[199, 31] and read[199, 31] == 0xFF
    assert not outside[:128].any() and outside[128:].any()
    assert torch.equal(read_scales(linear, 200, 32, LINEAR)[0], linear)
    assert read_scales(linear.flatten()[:-1], 200, 32, LINEAR)[1].nonzero().tolist() == [[199, 31]]


# -- the exchange, with real processes


def check_reading(e: Exchange, rank: int) -> None:
    """The kernel's reading, position by position: the byte at the formula's offset."""
    h = e.handed[rank]
    flat, (read, outside) = h.scales.flatten(), h.read(SWIZZLE_128x4)
    c4 = up(h.columns, 4) // 4
    for r in {0, 31, 32, 127, 128, h.payload.shape[0] - 1}:
        for c in {0, 5, h.columns - 1}:
            if r < h.payload.shape[0]:
                at = ((r // 128) * c4 + c // 4) * 512 + (r % 32) * 16 + ((r % 128) // 32) * 4 + c % 4
                assert outside[r, c] == (at >= len(flat)) and (outside[r, c] or read[r, c] == flat[at])


CASES = {
    "mxfp8 before": Case((28, 172), 1024, "MXFP8", "swizzle before", "naive_dp_ep"),
    "nvfp4 before, multiples": Case((128, 256), 1024, "NVFP4", "swizzle before", "naive_dp_ep"),
    "nvfp4 after": Case((28, 172), 1024, "NVFP4", "swizzle after", "naive_dp_ep"),
    "mxfp8 in vLLM 0.33": Case((40, 40, 40, 40), 1024, "MXFP8", IMPLEMENTATIONS["naive_dp_ep"].order("MXFP8"), "naive_dp_ep"),
    "nvfp4 rows before": Case((128,) * 4, 1024, "NVFP4", "swizzle before", "flashinfer_nvlink_one_sided"),
    "nvfp4 rows after": Case((50, 131), 1024, "NVFP4", "swizzle after", "flashinfer_nvlink_one_sided"),
    "mxfp8 rows, two-sided": Case((50, 131), 1024, "MXFP8", "no swizzle", "flashinfer_nvlink_two_sided"),
    "mxfp8 deepep_v2": Case((50, 131), 1024, "MXFP8", IMPLEMENTATIONS["deepep_v2"].order("MXFP8"), "deepep_v2"),
    "mxfp8 16 columns": Case((64, 64), 512, "MXFP8", "no swizzle", "naive_dp_ep"),
}


@pytest.fixture(scope="module")
def ran() -> dict[str, Exchange]:
    """All cases, each with its own processes."""
    return dict(zip(CASES, exchange_all(list(CASES.values())), strict=True))


@pytest.mark.parametrize(("name", "wrong"), [
    # 28 + 172 = 200 rows. 128x4 of each rank: 1 + 2 = 3 tiles of 128 rows, 2 are right. Rank 0's 28 rows stand right, the others do not.
    ("mxfp8 before", 172), ("nvfp4 before, multiples", 0), ("nvfp4 after", 0)])
def test_all_gather_of_two_processes(ran: dict[str, Exchange], name: str, wrong: int) -> None:
    e = ran[name]
    fmt, rows, order = e.case.format, e.case.rows_per_rank, e.case.order
    linear = torch.cat([s.scales for s in e.sent])
    want = torch.cat([swizzled(s.scales) for s in e.sent]) if order == "swizzle before" else swizzled(linear)
    for h in e.handed:
        assert torch.equal(h.payload, torch.cat([s.payload for s in e.sent]))
        assert torch.equal(h.scales.flatten(), want)
        assert h.source.tolist() == [[r, i] for r, n in enumerate(rows) for i in range(n)]
        assert e.wrong_rows(h.rank, SWIZZLE_128x4) == wrong
        check_reading(e, h.rank)
    if fmt == "MXFP8":
        assert list(e.handed[0].scales.shape) == [3 * 128 * 32] and "asserts" in e.refused
    else:  # before: the padded shape of NVFP4; after: a flat buffer
        assert list(e.handed[0].scales.shape) == ([384, 64] if order == "swizzle before" else [256 * 64]) and e.refused == ""


def test_what_vllm_0_33_does_with_mxfp8_on_four_processes(ran: dict[str, Exchange]) -> None:
    """#42118: naive_dp_ep hands linear MXFP8 scales to CUTLASS. 4 ranks of 40: 160 rows, 5120 bytes where 256 * 32 = 8192 are read."""
    e = ran["mxfp8 in vLLM 0.33"]
    assert e.case.order == "no swizzle" and e.refused == "" and [list(h.scales.shape) for h in e.handed] == [[160, 32]] * 4
    assert torch.equal(e.handed[3].scales, torch.cat([s.scales for s in e.sent]))
    outside = e.handed[0].read(SWIZZLE_128x4)[1]
    assert outside[128:].any() and not outside[:128].any()
    assert e.wrong_rows(0, SWIZZLE_128x4) > 150 and e.wrong_rows(0, LINEAR) == 0
    f = examine_scales(e.handed[0].payload, e.handed[0].scales, format=MXFP8, contract_layout=SWIZZLE_128x4, sent=e.sent)
    assert (f.verdict, f.status, f.wrong) == (LINEAR_READ_SWIZZLED, "proved", True)


def test_rows_by_expert_on_four_processes(ran: dict[str, Exchange]) -> None:
    """A single row cannot be cut out of a swizzled buffer, not even where every count is a multiple of 128."""
    e = ran["nvfp4 rows before"]
    assert e.refused == ""
    cut = [swizzled(s.scales).view(128, 64) for s in e.sent]
    for h in e.handed:
        assert h.payload.shape == (512, 512) and h.scales.shape == (512, 64)  # 4 senders x 128 slots
        filled = h.source[:, 0] >= 0
        assert 0 < int(filled.sum()) < 512
        for r in range(4):
            mine = h.source[r * 128:(r + 1) * 128]
            got = int((mine[:, 0] == r).sum())
            assert (mine[:got, 0] == r).all() and (mine[got:] == -1).all()  # a sender's rows first, then its empty slots
            at = slice(r * 128, r * 128 + got)
            assert torch.equal(h.payload[at], e.sent[r].payload[mine[:got, 1]])
            assert torch.equal(h.scales[at], cut[r][mine[:got, 1]])
        assert e.wrong_rows(h.rank, SWIZZLE_128x4) == int(filled.sum())
        check_reading(e, h.rank)
        f = examine_scales(h.payload, h.scales, format=NVFP4, contract_layout=SWIZZLE_128x4, sent=e.sent)
        assert (f.verdict, f.status, f.by, f.wrong) == (BEFORE, "proved", "senders", True)
    # every token arrives on each rank of its experts, once
    arrived = [tuple(p) for h in e.handed for p in h.source.tolist() if p[0] >= 0]
    assert {p for p in arrived} == {(r, i) for r in range(4) for i in range(128)} and len(arrived) <= 2 * 4 * 128


@pytest.mark.parametrize("name", ["mxfp8 deepep_v2", "nvfp4 rows after"])
def test_rows_swizzled_after_are_right(ran: dict[str, Exchange], name: str) -> None:
    e = ran[name]
    fmt, slots = e.format, 2 * 131 if name == "nvfp4 rows after" else None
    for h in e.handed:
        expected, filled = e.expected(h.rank)
        assert h.payload.shape[0] == slots if slots else filled.all()
        assert torch.equal(h.scales.flatten(), swizzled(expected)) and e.wrong_rows(h.rank, SWIZZLE_128x4) == 0
        assert h.scales.dim() == (2 if slots else 1)  # flashinfer_nvlink_one_sided views the flat buffer as [-1, columns]
        f = examine_scales(h.payload, h.scales, format=fmt, contract_layout=SWIZZLE_128x4, sent=e.sent)
        assert (f.verdict, f.status, f.wrong, f.holds) == (RIGHT, "proved", False, ("128x4",))


def test_rows_that_nobody_swizzles(ran: dict[str, Exchange]) -> None:
    for h in ran["mxfp8 rows, two-sided"].handed:
        expected, filled = ran["mxfp8 rows, two-sided"].expected(h.rank)
        assert h.payload.shape[0] == 2 * 131 and torch.equal(h.scales, expected) and int(filled.sum()) < 181 + 1
        f = examine_scales(h.payload, h.scales, format=MXFP8, contract_layout=SWIZZLE_128x4, sent=ran["mxfp8 rows, two-sided"].sent)
        assert (f.verdict, f.status, f.wrong) == (LINEAR_READ_SWIZZLED, "proved", True)


@pytest.mark.parametrize(("rows", "fmt", "order", "implementation", "refused"), [
    ((40, 40), "MXFP8", "swizzle before", "naive_dp_ep", ""),  # equal counts: all_gatherv asserts nothing
    ((40, 41), "MXFP8", "swizzle before", "naive_dp_ep", "all_gatherv"),
    ((40, 41), "NVFP4", "swizzle before", "naive_dp_ep", "all_gatherv"),
    ((128, 256), "NVFP4", "swizzle before", "naive_dp_ep", ""), ((128, 256), "MXFP8", "swizzle before", "naive_dp_ep", "all_gatherv"),
    ((128, 128), "MXFP8", "swizzle before", "flashinfer_nvlink_two_sided", "2-D"),
    ((40, 41), "NVFP4", "swizzle before", "flashinfer_nvlink_one_sided", "moe_a2a_dispatch"),
    ((40, 41), "NVFP4", "swizzle before", "flashinfer_nvlink_two_sided", ""), ((40, 41), "NVFP4", "no swizzle", "naive_dp_ep", ""),
    ((40, 41), "MXFP8", "swizzle before", "deepep_v2", "_pack_mxfp8_scale"), ((40, 41), "NVFP4", "no swizzle", "deepep_v2", "bf16")])
def test_what_vllm_itself_refuses(monkeypatch: pytest.MonkeyPatch, rows: tuple[int, int], fmt: str, order: str, implementation: str,
                                  refused: str) -> None:
    empty = {"payload": torch.zeros(1), "scales": torch.zeros(1), "source": torch.zeros(1)}
    monkeypatch.setattr(processes, "_run", lambda specs, timeout: [[empty, empty]])
    e = exchange(2, rows, 128, fmt, order=order, implementation=implementation)
    assert refused in e.refused and bool(refused) == bool(e.refused)


def test_sixteen_columns_through_the_exchange(ran: dict[str, Exchange]) -> None:
    e = ran["mxfp8 16 columns"]  # 64 + 64 rows: sizes agree
    assert list(e.handed[1].scales.shape) == [128, 16] and e.wrong_rows(1, SWIZZLE_128x4) > 120
    assert torch.equal(e.handed[1].read(SWIZZLE_128x4)[0].flatten(), swizzled(torch.cat([s.scales for s in e.sent])))


# -- processes that do not end well


def alive() -> set[str]:
    """Command lines of the launchers and ranks that are alive."""
    found = set()
    for p in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = p.read_bytes()
        except OSError:
            continue
        if b"mxdebug-exchange-" in line:
            found.add(f"{p.parent.name} {line!r}")
    return found


# The launcher by itself, without torch; rank 1 ends as the test wants, rank 0 would wait for it.
START = f"""import os, runpy, signal, time
launch = runpy.run_path({launcher.__file__!r})["launch"]
launch(lambda rank, *_: BAD if rank == 1 else time.sleep(600))"""


@pytest.mark.parametrize(("start", "message"), [
    (START.replace("BAD", "os.kill(os.getpid(), signal.SIGKILL)"), "rank 1 was ended by signal SIGKILL"),
    (START.replace("BAD", "{}['missing']"), "rank 1 raised KeyError: 'missing'"),
    ("raise SystemExit(3)", "the launcher ended with exit code 3")], ids=["killed", "raised", "launcher"])
def test_a_rank_that_dies_is_an_error_and_nothing_stays_behind(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
                                                              start: str, message: str) -> None:
    monkeypatch.setattr(processes, "_START", start)
    with pytest.raises(MxdebugError, match=message):
        exchange(2, 4, 64, "MXFP8", order="no swizzle", implementation="naive_dp_ep", timeout=30)
    if os.path.isdir("/proc"):
        assert alive() == set()
    assert capfd.readouterr() == ("", "")


def test_a_rank_that_hangs_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "_START", "import os, time; [os.fork() for _ in range(2)]; time.sleep(600)")
    started = time.monotonic()
    with pytest.raises(MxdebugError, match="an end within 1 s"):
        exchange(2, 4, 64, "MXFP8", order="no swizzle", implementation="naive_dp_ep", timeout=1)
    assert time.monotonic() - started < 20
    time.sleep(0.2)
    if os.path.isdir("/proc"):
        assert alive() == set()


@pytest.mark.parametrize(("change", "operand"), [
    ({"rows_per_rank": [4]}, "rows_per_rank"), ({"rows_per_rank": [4, 0]}, "rows_per_rank"), ({"format": "MXFP4"}, "format"),
    ({"order": "quantise after"}, "order"), ({"implementation": "mori"}, "implementation"), ({"backend": "mpi"}, "backend")])
def test_wrong_arguments_start_nothing(monkeypatch: pytest.MonkeyPatch, change: dict[str, object], operand: str) -> None:
    monkeypatch.setattr(processes, "_run", lambda *a: pytest.fail("started"))
    arguments = {"world_size": 2, "rows_per_rank": 4, "hidden": 64, "format": "MXFP8", "order": ORDERS[0], "implementation": "naive_dp_ep"}
    with pytest.raises(MxdebugError) as error:
        exchange(**(arguments | change))  # type: ignore[arg-type]
    assert error.value.operand == operand


# -- the diagnosis


FORMATS = pytest.mark.parametrize("fmt", [MXFP8, NVFP4], ids=lambda f: f.name)


@FORMATS
def test_size_shows_linear_where_rows_are_no_multiple_of_128(fmt: BlockFormat) -> None:
    """200 rows x C: linear 200 C bytes, 128x4 256 C. Rows cut out of swizzled buffers are 200 C too: not proved which, but proved wrong."""
    payload, scales = gathered(sent([100, 100], 2048, fmt))
    c = 2048 // fmt.block
    f = examine_scales(payload, scales, format=fmt, contract_layout=SWIZZLE_128x4)
    assert (f.verdict, f.status, f.by, f.wrong, f.got) == (LINEAR_READ_SWIZZLED, "consistent", "size", True, 200 * c)
    assert dict(f.sizes)["linear"] == 200 * c and dict(f.sizes)["128x4"] == 256 * c
    assert f"reads up to {56 * c} bytes beyond the end" in f.text and "proved that it is not 128x4 of these rows" in str(f)
    alone = examine_scales(payload, scales, format=fmt, contract_layout=SWIZZLE_128x4, rows_per_rank=[200])
    assert (alone.verdict, alone.status) == (LINEAR_READ_SWIZZLED, "proved")  # no exchange: nobody cut rows
    assert examine_scales(payload, scales, format=fmt, contract_layout=LINEAR).wrong is None


@FORMATS
def test_size_shows_swizzled_before(fmt: BlockFormat) -> None:
    """28 + 172 rows: 128 + 256 = 384 rows of scales where 256 are right."""
    blocks = sent([28, 172], 2048, fmt)
    payload, _ = gathered(blocks)
    buffer = torch.cat([swizzled(b.scales) for b in blocks])
    c = 2048 // fmt.block
    for layout in (SWIZZLE_128x4, LINEAR):
        f = examine_scales(payload, buffer, format=fmt, contract_layout=layout, rows_per_rank=[28, 172])
        assert (f.verdict, f.status, f.by, f.wrong) == (BEFORE, "proved", "zeros", True)
        assert dict(f.sizes)["128x4 of each rank"] == 384 * c == f.got
    unknown = examine_scales(payload, buffer, format=fmt, contract_layout=SWIZZLE_128x4)
    assert (unknown.verdict, unknown.status, unknown.wrong) == (BEFORE, "proved", True)
    assert "3 tiles of 128 rows and 2 hold all rows" in unknown.text
    # Padding that nobody zeroed proves nothing, and the buffer could be a larger workspace.
    dirty = torch.where(buffer == 0, 100, buffer)
    f = examine_scales(payload, dirty, format=fmt, contract_layout=SWIZZLE_128x4, rows_per_rank=[28, 172])
    assert (f.verdict, f.status, f.by, f.wrong) == (BEFORE, "consistent", "size", None)
    # Rows 28.. as slots that nobody wrote: their scales are not asked.
    f = examine_scales(payload, buffer, format=fmt, contract_layout=SWIZZLE_128x4, filled=torch.arange(200) < 28)
    assert (f.verdict, f.status, f.wrong) == (BEFORE, "consistent", None)
    short = examine_scales(payload, buffer[:99], format=fmt, contract_layout=SWIZZLE_128x4)
    assert (short.verdict, short.status, short.by, short.wrong) == (UNKNOWN, "undecided", "size", True)
    odd = examine_scales(payload, dirty[:-1], format=fmt, contract_layout=SWIZZLE_128x4)
    assert (odd.verdict, odd.status, odd.wrong) == (UNKNOWN, "undecided", None)


@FORMATS
def test_equal_sizes_of_before_and_after_are_told_apart_by_their_padding(fmt: BlockFormat) -> None:
    """100 + 100 rows: 2 * 128 = 256, and 200 is padded to 256. Rows 100..127 then read rank 0's padding: 28 * C blocks of scale 0x00."""
    blocks = sent([100, 100], 2048, fmt)
    payload, scales = gathered(blocks)
    before, after = torch.cat([swizzled(b.scales) for b in blocks]), swizzled(scales)
    assert len(before) == len(after)
    f = examine_scales(payload, before, format=fmt, contract_layout=SWIZZLE_128x4)
    assert (f.verdict, f.status, f.by, f.wrong) == (BEFORE, "proved", "zeros", True)
    assert f"{28 * 2048 // fmt.block} blocks that are not zero would have the scale 0x00" in f.text
    known = examine_scales(payload, after, format=fmt, contract_layout=SWIZZLE_128x4, rows_per_rank=[100, 100])
    assert (known.verdict, known.status, known.wrong) == (RIGHT, "consistent", None)  # the other order is what reads padding now
    # read linearly, the first 200 rows of bytes hold padding of the second tile row
    read_linear = examine_scales(payload, after, format=fmt, contract_layout=LINEAR, rows_per_rank=[100, 100])
    assert (read_linear.verdict, read_linear.status, read_linear.wrong) == (SWIZZLED_READ_LINEAR, "proved", True)


@FORMATS
@pytest.mark.parametrize("as_tokens", [False, True])
def test_multiples_of_128_only_the_senders_decide(fmt: BlockFormat, as_tokens: bool) -> None:
    blocks = sent([128, 256], 1056, fmt)  # 33 and 66 scale columns: padded to 36 and 68
    if fmt.outer:
        blocks = sent([128, 256], 1024, fmt)
    payload, scales = gathered(blocks)
    hidden = blocks[0].columns
    senders = [sample_tokens(r, n, hidden, 0) for r, n in enumerate((128, 256))] if as_tokens else blocks
    g = G if fmt.outer else None
    buffers = {"linear": scales, "128x4": swizzled(scales)}
    for lies, buffer in buffers.items():
        for layout, reads in ((LINEAR, "linear"), (SWIZZLE_128x4, "128x4")):
            f = examine_scales(payload, buffer, format=fmt, contract_layout=layout, sent=senders, global_scale=g)
            want = RIGHT if lies == reads else {"linear": LINEAR_READ_SWIZZLED, "128x4": SWIZZLED_READ_LINEAR}[lies]
            assert (f.verdict, f.status, f.by, f.wrong) == (want, "proved", "senders", lies != reads)
            assert "384 of 384 rows are known" in f.text
            if fmt.outer:  # sizes agree: suspicion at most
                alone = examine_scales(payload, buffer, format=fmt, contract_layout=layout)
                assert (alone.verdict, alone.status, alone.by, alone.wrong) == (want, "suspected", "statistics", None)
                assert "only what the senders sent decides" in alone.text


def test_senders_prove_what_the_size_leaves_open() -> None:
    blocks = sent([100, 100], 1024, MXFP8)
    payload, scales = gathered(blocks)
    cut = torch.cat([swizzled(b.scales).view(128, 32)[:100] for b in blocks])
    each = torch.cat([swizzled(b.scales) for b in blocks])
    for buffer, verdict, holds in ((scales, LINEAR_READ_SWIZZLED, "linear"), (each, BEFORE, "128x4 of each rank"),
                                   (cut, BEFORE, "single rows of each rank's 128x4"), (swizzled(scales), RIGHT, "128x4")):
        f = examine_scales(payload, buffer, format=MXFP8, contract_layout=SWIZZLE_128x4, sent=blocks)
        assert (f.verdict, f.status, f.by, f.holds) == (verdict, "proved", "senders", (holds,))
    damaged = swizzled(scales)
    damaged[0] ^= 1
    f = examine_scales(payload, damaged, format=MXFP8, contract_layout=SWIZZLE_128x4, sent=blocks)
    assert (f.verdict, f.status, f.holds) == (UNKNOWN, "undecided", ()) and "128x4 100.0 %" in f.text


def test_rows_in_another_order_with_doubles() -> None:
    """Rows are found by their payload; a payload that two senders share, with different scales, decides nothing."""
    blocks = sent([128, 128], 1024, MXFP8)
    doubled = BlockTensor(torch.cat([blocks[0].payload[:1], blocks[1].payload[1:]]), blocks[1].scales, MXFP8)
    payload, scales = gathered([blocks[0], doubled])
    order = torch.randperm(256, generator=torch.Generator().manual_seed(5))
    f = examine_scales(payload[order], swizzled(scales[order]), format=MXFP8, contract_layout=SWIZZLE_128x4, sent=[blocks[0], doubled])
    assert (f.verdict, f.status) == (RIGHT, "proved") and "254 of 256 rows are known" in f.text


def test_sixteen_columns_are_their_own_inverse() -> None:
    """512 elements in blocks of 32: 4 column tiles change places with the 4 row groups. The same garbage is read both ways."""
    blocks = sent([128, 128], 512, MXFP8)
    payload, scales = gathered(blocks)
    assert torch.equal(swizzled(scales), read_scales(scales, 256, 16, SWIZZLE_128x4)[0].flatten())
    assert not torch.equal(swizzled(scales).view(256, 16), scales)
    f = examine_scales(payload, scales, format=MXFP8, contract_layout=SWIZZLE_128x4, sent=blocks)
    assert (f.verdict, f.status) == (LINEAR_READ_SWIZZLED, "proved") and "its own inverse" in f.text
    f = examine_scales(payload, swizzled(scales), format=MXFP8, contract_layout=LINEAR, sent=blocks)
    assert (f.verdict, f.status) == (SWIZZLED_READ_LINEAR, "proved")


def test_constant_scales_show_nothing() -> None:
    blocks = [BlockTensor(b.payload, torch.full_like(b.scales, 121), MXFP8) for b in sent([128, 128], 1024, MXFP8)]
    payload, scales = gathered(blocks)
    alone = examine_scales(payload, scales, format=MXFP8, contract_layout=SWIZZLE_128x4)
    assert (alone.verdict, alone.status, alone.wrong) == (UNKNOWN, "undecided", None) and "all scales are the same byte" in alone.text
    f = examine_scales(payload, scales, format=MXFP8, contract_layout=SWIZZLE_128x4, sent=blocks)
    assert f.verdict == RIGHT and "linear" in f.holds and "cannot show that fault, they are all the same" in f.text
    short = [b[:100] for b in blocks]  # 200 rows, linear: the reading goes beyond the end, so it is wrong all the same
    f = examine_scales(*gathered(short), format=MXFP8, contract_layout=SWIZZLE_128x4, sent=short)
    assert (f.verdict, f.status, f.wrong) == (LINEAR_READ_SWIZZLED, "proved", True)


@FORMATS
def test_blocks_of_zeros_of_either_sign_may_have_scale_0(fmt: BlockFormat) -> None:
    """A quantiser gives them 0x00; that is no padding. Read in another order, the scales 0x00 of these 4 (8) blocks go to other blocks."""
    x = sample_tokens(0, 128, 1024, 0)
    x[7, :64] = x[8, :64] = 0.0
    payload, scales = quantise_activations(x, fmt, swizzled=False, global_scale=G if fmt.outer else None)
    assert not scales[7:9, : 64 // fmt.block].any()
    payload[8, : 32 if fmt.outer else 64] = 0x88 if fmt.outer else 0x80  # some quantisers keep the sign
    f = examine_scales(payload, swizzled(scales), format=fmt, contract_layout=SWIZZLE_128x4)
    assert (f.verdict, f.status, f.wrong) == (UNKNOWN, "undecided", None) and "linear" not in f.holds and "128x4" in f.holds
    assert f"not linear: {4 * 32 // fmt.block} blocks" in f.text and "not 128x4" not in f.text


def test_scales_without_any_order_are_not_suspected() -> None:
    payload, scales = gathered(sent([256], 2048, MXFP8))
    noise = torch.randint(100, 140, scales.shape, generator=torch.Generator().manual_seed(1)).to(torch.uint8)
    f = examine_scales(payload, noise, format=MXFP8, contract_layout=SWIZZLE_128x4)
    assert (f.verdict, f.status, f.wrong) == (UNKNOWN, "undecided", None)


def test_views_of_bytes_are_read_as_bytes() -> None:
    blocks = sent([128], 1024, NVFP4)
    f = examine_scales(blocks[0].payload, blocks[0].scales.view(torch.float8_e4m3fn), format=NVFP4, contract_layout=LINEAR, sent=blocks)
    assert (f.verdict, f.status) == (RIGHT, "proved")


def test_what_examine_refuses() -> None:
    blocks = sent([4], 64, MXFP8)
    payload, scales = gathered(blocks)
    for changed in ({"contract_layout": None}, {"payload": payload[0]}, {"payload": payload[:, :40]}, {"scales": scales.int()},
                    {"sent": sent([4], 128, MXFP8)}, {"sent": sent([4], 64, NVFP4)}, {"sent": sent([4], 64, MXFP8, seed=9)}):
        arguments = {"payload": payload, "scales": scales, "format": MXFP8, "contract_layout": LINEAR, "sent": blocks} | changed
        with pytest.raises(MxdebugError):
            examine_scales(arguments.pop("payload"), arguments.pop("scales"), **arguments)


def test_the_table_of_implementations() -> None:
    """What #42118 says, and that deepep_v2 does it right; names are vLLM's files."""
    broken = {n for n, i in IMPLEMENTATIONS.items() if i.mxfp8 == "no swizzle"}
    assert broken == {"naive_dp_ep", "flashinfer_nvlink_one_sided", "flashinfer_nvlink_two_sided"}
    assert all(IMPLEMENTATIONS[n].order("NVFP4") == "swizzle after" for n in broken)
    assert IMPLEMENTATIONS["deepep_v2"].order("MXFP8") == "swizzle after"
    assert all(i.source.startswith(f"{n}.py: ") for n, i in IMPLEMENTATIONS.items())
    with pytest.raises(MxdebugError, match="MXFP8 or NVFP4"):
        IMPLEMENTATIONS["deepep_v2"].order("MXFP4")
