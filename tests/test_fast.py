"""Every compiled kernel gives the bytes that torch gives, on every format, codec, dtype and layout; and without numba everything works."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from making_values import values_to_round
from torch import Tensor

from mxdebug import MxdebugError, fast, formats, reference
from mxdebug.block_gemm import FEW, block_gemm
from mxdebug.formats import (E2M1, E4M3_SCALE, E8M0, E8M0_SM90, EXPONENT_RULES, FORMATS, MXFP4, MXFP8, NVFP4, S0E5M3, S0E5M3_MARLIN, BlockTensor, quantise,
                             quantise_fast)
from mxdebug.layouts import LAYOUTS, MISTAKEN_128x4
from mxdebug.layouts.moves import blocks_of
from mxdebug.scan import measure

numba = pytest.mark.skipif(find_spec("numba") is None, reason="numba is not installed")


@numba
def test_the_kernels_can_be_imported() -> None:
    """Where they cannot, a warning says so and torch does the work: then nothing here would compare anything."""
    assert fast._cpu() is not None


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@contextmanager
def compiled(monkeypatch: pytest.MonkeyPatch, wanted: bool) -> Iterator[None]:
    """Kernels for tensors of any size, on three threads; or none."""
    threads = torch.get_num_threads()
    with monkeypatch.context() as m:
        m.setattr(fast, "WORTH", 0 if wanted else 1 << 62)
        m.setattr(fast, "PART", 0)
        torch.set_num_threads(3 if wanted else threads)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def both(monkeypatch: pytest.MonkeyPatch, work):
    with compiled(monkeypatch, True):
        got = work()
    with compiled(monkeypatch, False):
        return got, work()


@numba
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", [E8M0, E8M0_SM90, E4M3_SCALE, S0E5M3, S0E5M3_MARLIN], ids=lambda c: c.name)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_dequantise(monkeypatch: pytest.MonkeyPatch, fmt, codec, dtype: torch.dtype) -> None:
    """All 65,536 pairs of a scale and a payload byte, NaN with its bits; a global scale for all, for each expert, for each row."""
    payload = torch.arange(256, dtype=torch.uint8).repeat(2, 256, fmt.block // 16 or 1)
    columns = payload.shape[-1] * (2 if fmt.packed else 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(2, 256, columns // fmt.block).contiguous()
    for g in (torch.tensor(0.0037), torch.tensor([0.71, 3.0e5]), torch.rand(2, 256)) if fmt.outer else (None,):  # 2 parts by one thread after the other, 512 side by side
        t = BlockTensor(payload, scales, fmt, g)
        got, want = both(monkeypatch, lambda: t.dequantise(dtype, codec))
        assert got.dtype == dtype and torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@numba
@pytest.mark.parametrize("shape", [(1, 2), (4, 2), (2,), (4, 1, 1), (4,), ()])
def test_a_global_scale_broadcasts_or_is_refused_alike(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...]) -> None:
    """Over [4, 2, 8, 64]: also where its axes are not the first ones of the payload."""
    t = BlockTensor(drawn(4, 2, 8, 64), drawn(4, 2, 8, 8, seed=1), NVFP4, torch.rand(shape))
    results = []
    for wanted in (True, False):
        with compiled(monkeypatch, wanted):
            try:
                results.append(t.dequantise().view(torch.uint8))
            except RuntimeError:
                results.append(None)
    got, want = results
    assert (got is None) == (want is None) and (got is None or torch.equal(got, want))


@numba
@pytest.mark.parametrize("fmt, rule", [(f, rule) for f in FORMATS.values() for rule in ((None,) if f.outer else EXPONENT_RULES)], ids=lambda v: getattr(v, "name", v))
def test_quantise(monkeypatch: pytest.MonkeyPatch, fmt, rule: str | None) -> None:
    for x in values_to_round():
        if fmt.outer:
            x = torch.where(torch.isfinite(x), x, 0)
            x = x.view(2, -1, 64)
        for g in (None, torch.tensor(0.0037), torch.tensor([7e-4, 3e5])) if fmt.outer else (None,):
            got, want = both(monkeypatch, lambda: quantise(x, fmt, rule=rule, global_scale=g))
            assert torch.equal(got.scales, want.scales) and torch.equal(got.payload, want.payload)
            with compiled(monkeypatch, True):
                assert quantise_fast(x, fmt, rule, want.global_scale) is not None


def test_a_rule_is_a_table_where_no_bin_has_two_steps() -> None:
    """Two scales at once, of which the second has other steps and fewer; then a rule with 255 steps from 1 to 2, where there are 128 bins."""
    scales, most = torch.tensor([[1.0], [0.01]]), torch.tensor([[255.0], [9.0]])
    first, at = fast.step_table(lambda amax: (amax * scales).floor().minimum(most).nan_to_num(255).to(torch.uint8), torch.device("cpu"), torch.float32)
    number = torch.tensor([0.0, 0.99, 1.0, 2.999, 254.5, 255.0, 1e9])
    bits = number.view(torch.int32)
    assert [(f[bits >> 16] + (bits >= a[bits >> 16])).tolist() for f, a in zip(first, at)] == [[0, 0, 1, 2, 254, 255, 255], [0, 0, 0, 0, 2, 2, 9]]
    assert fast.step_table(lambda amax: ((amax.clamp(1, 2) - 1) * 255).nan_to_num(255).to(torch.uint8), torch.device("cpu"), torch.float32) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("g", [None, 1.0, 0.0037, 7e-4, 1e30, 3e38, 1e-38, 1e-45, -1.5])
def test_steps_are_those_that_halving_finds(g: float | None, dtype: torch.dtype) -> None:
    """Under every scale byte; the bounds that halving starts from are all magnitudes here, and four numbers in the library."""
    fmt, outer = (MXFP4, None) if g is None else (NVFP4, torch.tensor([[g]]).double())
    found = formats._table_of(fmt, None if outer is not None else "floor", outer, torch.device("cpu"), dtype)
    if found is None:
        assert g == 1e-45 and dtype == torch.float32  # two scale bytes begin in one bin
        return
    shift = 16 if dtype == torch.bfloat16 else 0
    by = formats.block_divisors(torch.arange(256, dtype=torch.uint8), fmt, outer).reshape(-1, 256, 1).nan_to_num(0).clamp(min=0)
    low, high = torch.zeros(1, 256, 7, dtype=torch.int64), torch.full((1, 256, 7), (0x7F800000 >> shift) + 1)
    for _ in range(32):
        middle = torch.where(high - low > 1, (low + high) // 2, high)
        values = torch.where(middle < high, middle << shift, 0).int().view(torch.float32)
        enough = E2M1.encode(formats._quotients(values.double(), by)) >= torch.arange(1, 8)
        low, high = torch.where(enough | (middle == high), low, middle), torch.where(enough, middle, high)
    assert torch.equal(found[2], torch.where(high > 0x7F800000 >> shift, -1, high).int())


@numba
@pytest.mark.parametrize("g", [0.0, -0.0, float("nan"), float("inf"), -1.5, 1e-45, 3e38])
def test_a_strange_global_scale_is_taken_or_refused_alike(monkeypatch: pytest.MonkeyPatch, g: float) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
        x[3] = 0

        def work() -> tuple[Tensor, Tensor] | str:
            try:
                q = quantise(x, NVFP4, global_scale=torch.tensor(g))
                return q.payload, q.scales
            except MxdebugError as error:
                return str(error)

        got, want = both(monkeypatch, work)
        assert got == want if isinstance(want, str) else all(map(torch.equal, got, want))


@numba
@pytest.mark.parametrize("x", [torch.nn.Parameter(torch.randn(4, 64)), torch.randn(32), torch.randn(64, 4).T.expand(2, 4, 64), torch.randn(4, 64).double() * 1e30,
                               torch.tensor([-(2**31), 5] * 32), torch.rand(4, 64) > 0.5], ids=["parameter", "one block", "strided", "float64", "int64", "bool"])  # fmt: skip
def test_quantise_takes_what_torch_takes(monkeypatch: pytest.MonkeyPatch, x: Tensor) -> None:
    for fmt in (MXFP4, NVFP4):
        got, want = both(monkeypatch, lambda: quantise(x, fmt, rule=None if fmt.outer else "ceil"))
        assert torch.equal(got.scales, want.scales) and torch.equal(got.payload, want.payload)
        assert fmt is MXFP4 or got.global_scale.item() == pytest.approx(x.detach().double().abs().max().item() / 2688, rel=1e-6)


def test_what_is_wrong_with_a_global_scale_is_said() -> None:
    for g, said in ((0.01, "global scale: expected a float32 tensor, got float"), (torch.tensor(float("inf")), "global scale: expected finite numbers")):
        with pytest.raises(MxdebugError, match=said):
            quantise(torch.randn(4, 64), NVFP4, global_scale=g)
    with pytest.raises(MxdebugError, match="values: expected finite numbers"):
        quantise(torch.full((4, 64), float("inf")), NVFP4)
    with pytest.raises(MxdebugError, match="a multiple of 32"):
        quantise(torch.tensor(1.0), MXFP4, rule="floor")


@numba
@pytest.mark.parametrize("own", [replace(MXFP8, block=16), replace(MXFP8, outer=True, scale=E4M3_SCALE), replace(NVFP4, block=32), replace(MXFP4, block=16),
                                 replace(MXFP4, block=64), replace(NVFP4, outer=False)], ids=lambda f: f"{f.name}-{f.block}-{f.outer}")  # fmt: skip
def test_quantise_to_a_format_of_ones_own(monkeypatch: pytest.MonkeyPatch, own) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(40, 192, generator=torch.Generator().manual_seed(0)).to(dtype)
        got, want = both(monkeypatch, lambda: quantise(x, own, rule=None if own.outer else "floor", global_scale=torch.tensor(33.3) if own.outer else None))
        assert torch.equal(got.scales, want.scales) and torch.equal(got.payload, want.payload)


@numba
def test_kernels_are_kept_on_disk() -> None:
    """Another process finds what this one compiled: compiling takes seconds."""
    code = ("import torch; from mxdebug import fast; from mxdebug.formats import MXFP4, quantise; fast.WORTH = 0; quantise(torch.randn(4, 64), MXFP4, rule='ceil');"
            "from mxdebug.fast.cpu_quantise import _packed as kernel; print(sum(kernel.stats.cache_hits.values()), sum(kernel.stats.cache_misses.values()))")
    for _ in range(2):  # once where other tests have compiled them before
        said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        if said == "1 0\n":
            return
    pytest.fail(f"hits and misses: {said}")


@numba
@pytest.mark.parametrize("tokens", [1, 5, FEW])
@pytest.mark.parametrize("fmt", [MXFP4, MXFP8, NVFP4], ids=lambda f: f.name)
def test_products(monkeypatch: pytest.MonkeyPatch, fmt, tokens: int) -> None:
    """Block by block: the same bits. Otherwise: float64 sums in another order, each of K rounded by at most 2^-53 of the sum of magnitudes."""
    k = 320
    x = (torch.randn(tokens, k, generator=torch.Generator().manual_seed(2)) * torch.logspace(-3, 3, k)).bfloat16()
    scales = drawn(50, k // fmt.block, seed=1) % 40 + (40 if fmt.outer else 100)
    w = BlockTensor(drawn(50, k // 2) if fmt.packed else drawn(50, k) % 0x7E, scales, fmt, torch.tensor(0.37) if fmt.outer else None)
    if not fmt.outer:
        for codec in (E8M0, E8M0_SM90):
            got, want = both(monkeypatch, lambda: block_gemm(x, w, codec))
            assert torch.equal(got, want)
    got, want = both(monkeypatch, lambda: reference._product(x.float(), w, fmt.scale))
    magnitudes = x.double().abs() @ w.dequantise(torch.float64).abs().T
    assert bool(((got - want).abs() <= 2 * k * 2.0**-53 * magnitudes).all())


@numba
def test_dequantise_into_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    t = BlockTensor(drawn(4, 64), drawn(4, 4, seed=1), MXFP4)
    for wanted in (True, False):
        out = torch.zeros(4, 128, dtype=torch.bfloat16)
        with compiled(monkeypatch, wanted):
            assert t.dequantise(torch.bfloat16, out=out) is out
        assert torch.equal(out.view(torch.uint8), t.dequantise(torch.bfloat16).view(torch.uint8))
    with pytest.raises(MxdebugError, match="out: expected contiguous torch.float32"):
        t.dequantise(out=out)


@numba
@pytest.mark.parametrize("layout", [*LAYOUTS.values(), MISTAKEN_128x4], ids=lambda layout: layout.name)
@pytest.mark.parametrize("shape", [(4, 384, 160), (2, 2, 192, 352), (1, 256, 96), (100, 6), (3, 128, 2400), (2, 64, 8)])
def test_layouts(monkeypatch: pytest.MonkeyPatch, layout, shape: tuple[int, ...]) -> None:
    logical = drawn(*shape)
    try:
        layout.padded(*shape[-2:])
    except MxdebugError:
        pytest.skip("a layout that does not pad")
    got, want = both(monkeypatch, lambda: layout.pack(logical))
    assert torch.equal(got, want)
    got, want = both(monkeypatch, lambda: layout.unpack(want, *shape[-2:]))
    assert torch.equal(got, want) and torch.equal(got, logical)


@numba
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)
def test_layouts_of_bytes_that_begin_anywhere(monkeypatch: pytest.MonkeyPatch, layout) -> None:
    """A slice of a buffer may begin within a word; and every second row of a matrix is not in one piece."""
    buffer = drawn(2 * 256 * 320 + 16)
    for first in (1, 4, 8):
        slab = buffer[first : first + 256 * 320].view(256, 320)
        for logical in (slab, slab[::2]):
            got, want = both(monkeypatch, lambda: layout.pack(logical))
            assert torch.equal(got, want)
            got, want = both(monkeypatch, lambda: layout.unpack(slab.flatten(), 256, 320))
            assert torch.equal(got, want)


def test_which_layout_moves_in_blocks() -> None:
    """Otherwise the kernel for them is compared with nothing."""
    assert [layout.name for layout in LAYOUTS.values() if blocks_of(layout, 128, 2400, 16) is not None] == ["SM12x weight tiles"]
    blocks = blocks_of(LAYOUTS["SM12x weight tiles"], 128, 2400, 16)
    assert blocks is not None and [t.shape[1] for t in (blocks.outer, blocks.far, blocks.near)] == [4, 150, 16]


@numba
@pytest.mark.parametrize("rows, columns", [(7, 8), (64, 1928), (1000, 160)])
def test_counts(rows: int, columns: int) -> None:
    from mxdebug.fast import cpu_statistics as cpu

    payload, scale = drawn(rows, columns).numpy(), drawn(rows, columns // 8, seed=1).numpy() % 3
    payload[1], payload[2, :8], scale[2, 0], payload[3, :16], scale[3, 0] = 0x80, 0x88, 0, 0, 0
    flat = payload.reshape(-1)
    for packed, count in ((True, cpu.count_codes), (False, cpu.count_bytes)):
        assert np.array_equal(count(flat), measure._count_payload(flat, packed, None))
        task = measure.Task("w", 1, None, None, rows, packed, 8, True)
        assert measure._zeros(payload, scale, task, cpu) == measure._zeros(payload, scale, task, None)
        assert measure._zeros(payload, None, task, cpu) == measure._zeros(payload, None, task, None)
    for some in (flat[:13], flat[:0], np.full(1 << 18, 0xFF, dtype=np.uint8)):  # any number of bytes; and all of one kind
        assert np.array_equal(cpu.count_bytes(some), measure._count(some, None))
    assert cpu.count_codes(some).tolist() == [0] * 15 + [1 << 19]


@pytest.mark.parametrize("state", ["None", "types.ModuleType('numba')"], ids=["absent", "broken"])
def test_without_numba_everything_is_torch(state: str) -> None:
    """Not installed; or installed, and its import gives no njit, as one that refuses this numpy."""
    code = """
import importlib.machinery, sys, types, warnings
warnings.simplefilter("ignore")
sys.modules["numba"] = STATE
if sys.modules["numba"] is not None:
    sys.modules["numba"].__spec__ = importlib.machinery.ModuleSpec("numba", None)
from mxdebug import fast
from mxdebug.formats import MXFP4, BlockTensor
import torch
fast.WORTH = 0
t = BlockTensor(torch.zeros(4, 64, dtype=torch.uint8), torch.full((4, 4), 127, dtype=torch.uint8), MXFP4)
assert fast.on_cpu(t.payload) is None and not t.dequantise().any()
"""
    subprocess.run([sys.executable, "-c", code.replace("STATE", state)], check=True)
