"""Every compiled kernel gives the bytes that torch gives, on every format, codec, dtype and layout; and without numba everything works."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from making_values import values_to_round
from torch import Tensor

from mxdebug import MxdebugError, fast, reference
from mxdebug.block_gemm import FEW, block_gemm
from mxdebug.formats import (E4M3_SCALE, E8M0, E8M0_SM90, EXPONENT_RULES, FORMATS, MXFP4, MXFP8, NVFP4, S0E5M3, S0E5M3_MARLIN, BlockTensor, quantise,
                             quantise_fast)
from mxdebug.layouts import LAYOUTS, MISTAKEN_128x4
from mxdebug.scan import measure

numba = pytest.mark.skipif(fast._cpu() is None, reason="numba is not installed")


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
    for g in (torch.tensor(0.0037), torch.tensor([0.71, 3.0e5]), torch.rand(2, 256)) if fmt.outer else (None,):
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
    """2^-8 of a number is the size of its bin: a rule with finer steps has two in some."""
    def counts(places: int):
        return lambda amax: (amax * 2.0**places).floor().clamp(max=255).nan_to_num(255).to(torch.uint8)

    first, at = fast.steps(counts(0), torch.device("cpu"), torch.float32)
    number = torch.tensor([0.0, 0.99, 1.0, 2.999, 254.5, 255.0, 1e9])
    bits = number.view(torch.int32)
    assert (first[0][bits >> 16] + (bits >= at[0][bits >> 16])).tolist() == [0, 0, 1, 2, 254, 255, 255]
    assert fast.steps(lambda amax: (amax * 256).remainder(256).to(torch.uint8), torch.device("cpu"), torch.float32) is None


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
@pytest.mark.parametrize("shape", [(4, 384, 160), (2, 2, 192, 352), (1, 256, 96), (100, 6)])
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
@pytest.mark.parametrize("rows, columns", [(7, 8), (64, 1928), (1000, 160)])
def test_counts(rows: int, columns: int) -> None:
    from mxdebug.fast import cpu

    payload, scale = drawn(rows, columns).numpy(), drawn(rows, columns // 8, seed=1).numpy() % 3
    payload[1], payload[2, :8], scale[2, 0], payload[3, :16], scale[3, 0] = 0x80, 0x88, 0, 0, 0
    flat = torch.from_numpy(payload).flatten()
    for packed, count in ((True, cpu.count_codes), (False, cpu.count_bytes)):
        assert np.array_equal(count(flat.numpy()), measure._count_payload(flat, packed, None))
        task = measure.Task("w", 1, None, None, rows, packed, 8, True)
        assert measure._zeros(payload, scale, task, cpu) == measure._zeros(payload, scale, task, None)
        assert measure._zeros(payload, None, task, cpu) == measure._zeros(payload, None, task, None)


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
