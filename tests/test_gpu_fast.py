"""On any CUDA GPU: the Triton kernels and strided copies give torch's bytes. `pytest tests -k gpu`."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from making_values import values_to_round
from torch import Tensor

from mxdebug import MxdebugError, fast
from mxdebug.formats import E4M3_SCALE, E8M0, E8M0_SM90, EXPONENT_RULES, FORMATS, BlockTensor, quantise, quantise_fast
from mxdebug.layouts import LAYOUTS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available() or find_spec("triton") is None, reason="not run here: needs CUDA and Triton")]


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits; NaN has any."""
    nan = b.isnan()
    words = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.isnan(), nan) and torch.equal(a.view(words)[~nan], b.view(words)[~nan])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", [E8M0, E8M0_SM90, E4M3_SCALE], ids=lambda c: c.name)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_gpu_dequantise(monkeypatch: pytest.MonkeyPatch, fmt, codec, dtype: torch.dtype) -> None:
    """All pairs of a payload byte and a scale byte; a global scale for all, for each expert, for each row."""
    monkeypatch.setattr(fast, "PART", 0)
    payload = torch.arange(256, dtype=torch.uint8).repeat(2, 257, fmt.block // 16 or 1)  # 2 x 257 rows: no whole number of programs
    columns = payload.shape[-1] * (2 if fmt.packed else 1)
    scales = (torch.arange(257) % 256).to(torch.uint8)[:, None].expand(2, 257, columns // fmt.block).contiguous()
    for g in (torch.tensor(0.0037), torch.tensor([0.71, 3.0e5]), torch.rand(2, 257)) if fmt.outer else (None,):
        want = BlockTensor(payload, scales, fmt, g).dequantise(dtype, codec)
        got = BlockTensor(payload.cuda(), scales.cuda(), fmt, None if g is None else g.cuda()).dequantise(dtype, codec)
        assert got.is_cuda and same(got.cpu(), want)


@pytest.mark.parametrize("fmt, rule", [(f, rule) for f in FORMATS.values() for rule in ((None,) if f.outer else EXPONENT_RULES)], ids=lambda v: getattr(v, "name", v))
def test_gpu_quantise(monkeypatch: pytest.MonkeyPatch, fmt, rule: str | None) -> None:
    monkeypatch.setattr(fast, "PART", 0)
    for x in values_to_round():
        if x.dtype == torch.float16:  # CUDA makes one NaN of all when it widens them
            x = torch.where(x.isnan(), x.abs(), x)
        if fmt.outer:
            x = torch.where(torch.isfinite(x), x, 0).view(2, -1, 64)
        for g in (None, torch.tensor(0.0037), torch.tensor([7e-4, 3e5])) if fmt.outer else (None,):
            want, got = quantise(x, fmt, rule=rule, global_scale=g), quantise(x.cuda(), fmt, rule=rule, global_scale=None if g is None else g.cuda())
            assert torch.equal(got.scales.cpu(), want.scales) and torch.equal(got.payload.cpu(), want.payload)
            assert quantise_fast(x.cuda(), fmt, rule, got.global_scale) is not None


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)
@pytest.mark.parametrize("shape", [(3, 384, 160), (2, 2, 192, 352), (1, 48, 96), (100, 6), (3, 128, 2400), (2, 64, 8)])
def test_gpu_layouts(layout, shape: tuple[int, ...]) -> None:
    logical = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    try:
        layout.padded(*shape[-2:])
    except MxdebugError:
        pytest.skip("a layout that does not pad")
    want = layout.pack(logical)
    got = layout.pack(logical.cuda())
    assert torch.equal(got.cpu(), want) and torch.equal(layout.unpack(got, *shape[-2:]).cpu(), logical)


def test_gpu_interleave_of_more_than_2_gib() -> None:
    """Offsets beyond 32 bits: the last tiles are those of a small matrix."""
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("not run here: needs 12 GiB")
    layout = LAYOUTS["SM90 weight interleave"]
    large = torch.zeros(1, 1 << 20, 4096, dtype=torch.uint8, device="cuda")  # 4 GiB
    last = torch.randint(0, 256, (1, 16, 4096), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    large[:, -16:] = last.cuda()
    packed = layout.pack(large).reshape(-1)
    assert torch.equal(packed[-last.numel():].cpu(), layout.pack(last).flatten()) and torch.equal(layout.unpack(packed, 1 << 20, 4096)[-16:].cpu(), last[0])
