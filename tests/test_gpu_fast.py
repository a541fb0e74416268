"""On any CUDA GPU: the Triton kernels and strided copies give torch's bytes. `pytest tests -k gpu`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mxdebug import MxdebugError, fast
from mxdebug.formats import E4M3_SCALE, E8M0, E8M0_SM90, FORMATS, BlockTensor
from mxdebug.layouts import LAYOUTS

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available() or fast._gpu() is None, reason="not run here: needs CUDA and Triton")]


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits; NaN has any."""
    nan = b.isnan()
    words = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return torch.equal(a.isnan(), nan) and torch.equal(a.view(words)[~nan], b.view(words)[~nan])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("codec", [E8M0, E8M0_SM90, E4M3_SCALE], ids=lambda c: c.name)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_gpu_dequantise(fmt, codec, dtype: torch.dtype) -> None:
    """All 65,536 pairs of a scale and a payload byte."""
    payload = torch.arange(256, dtype=torch.uint8).repeat(2, 256, fmt.block // 16 or 1)
    columns = payload.shape[-1] * (2 if fmt.packed else 1)
    scales = torch.arange(256, dtype=torch.uint8)[:, None].expand(2, 256, columns // fmt.block).contiguous()
    for g in (torch.tensor(0.0037), torch.tensor([0.71, 3.0e5]), torch.rand(2, 256)) if fmt.outer else (None,):
        want = BlockTensor(payload, scales, fmt, g).dequantise(dtype, codec)
        got = BlockTensor(payload.cuda(), scales.cuda(), fmt, None if g is None else g.cuda()).dequantise(dtype, codec)
        assert got.is_cuda and same(got.cpu(), want)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=lambda layout: layout.name)
@pytest.mark.parametrize("shape", [(3, 384, 160), (2, 2, 192, 352), (1, 256, 96), (100, 6)])
def test_gpu_layouts(layout, shape: tuple[int, ...]) -> None:
    logical = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    try:
        layout.padded(*shape[-2:])
    except MxdebugError:
        pytest.skip("a layout that does not pad")
    want = layout.pack(logical)
    got = layout.pack(logical.cuda())
    assert torch.equal(got.cpu(), want) and torch.equal(layout.unpack(got, *shape[-2:]).cpu(), logical)
