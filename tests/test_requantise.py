"""Quantisation as kernels compute it: against exact quantisers, and at the edges that the sources state."""

from __future__ import annotations

import ml_dtypes
import pytest
import torch

from mxdebug.errors import MxdebugError
from mxdebug.formats import MXFP8, quantise, unpack_fp4
from mxdebug.requantise import MXFP8_CUDA, NVFP4_CUDA, NVFP4_CUTEDSL, QUANTISERS, reciprocal


def values(seed: int = 0, rows: int = 64, columns: int = 256) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(rows, columns, generator=g) * torch.exp2(torch.randint(-12, 12, (rows, 1), generator=g).float())).bfloat16()


def test_mxfp8_is_the_exact_quantiser_that_rounds_exponents_up() -> None:
    """One product with 1/448 can tip a block only where amax is 448 * 2^k exactly; random bf16 data has none."""
    x = values()
    got, want = MXFP8_CUDA(x), quantise(x.float(), MXFP8, rule="ceil")
    assert torch.equal(got.scales, want.scales) and torch.equal(got.payload, want.payload)


@pytest.mark.parametrize(("amax", "code"), [(448.0, 127), (449.0, 128), (224.0, 126), (0.0, 0), (448.0 * 2.0**-127, 0), (448.0 * 2.0**-126, 1)])
def test_mxfp8_scale_of_a_block(amax: float, code: int) -> None:
    """448 * 2^k has the scale 2^k, anything above it the next power; up to 448 * 2^-127 the code is 0 and the payload becomes 0."""
    x = torch.zeros(1, 32)
    x[0, 5] = amax
    q = MXFP8_CUDA(x)
    assert q.scales.item() == code and (q.payload.any().item() == (code > 0))


@pytest.mark.parametrize("seed", range(32))
@pytest.mark.parametrize("quantiser", [NVFP4_CUDA, NVFP4_CUTEDSL], ids=lambda q: q.name)
def test_nvfp4_is_the_exact_quantiser_but_next_to_a_tie(quantiser: object, seed: int) -> None:
    """ml_dtypes rounds to nearest even. Two approximate reciprocals, within 2^-22 each, and four products and sums in float32 move a value
    by at most 2 x 2^-22 + 4 x 2^-24 < 2^-20 of itself: what is written lies between the roundings of a value less that and plus that."""
    x = values(seed)
    g = 448 * 6 / x.float().abs().max() / (1 + seed / 64)  # bf16 has few mantissas: many g, so that some block lies near a tie
    got = quantiser(x, g)

    def around(value: torch.Tensor, dtype: type) -> list[torch.Tensor]:
        return [torch.from_numpy((value * (1 + by)).numpy().astype(dtype).astype("float64")) for by in (-(2.0**-20), 2.0**-20)]

    blocks = x.double().unflatten(1, (-1, 16))
    scales = got.scales.view(torch.float8_e4m3fn).double()
    low, high = around(blocks.abs().amax(2) * g.double() / 6, ml_dtypes.float8_e4m3fn)
    assert (low <= scales).all() and (scales <= high).all()

    used = scales != 0
    codes = torch.from_numpy(unpack_fp4(got.payload).numpy().view(ml_dtypes.float4_e2m1fn).astype("float64")).unflatten(1, (-1, 16))[used]
    exact = (blocks * g.double() / scales[..., None])[used]
    low, high = around(exact.abs(), ml_dtypes.float4_e2m1fn)
    assert (low <= codes.abs()).all() and (codes.abs() <= high).all() and (codes * exact >= 0).all()


def test_cuda_and_cutedsl_differ_where_a_scale_is_zero() -> None:
    """Too small for E4M3: the scale is 0; CUDA code writes codes 0, CuTe-DSL's saturate; both mean 0."""
    x = torch.full((1, 16), 1e-6)
    g = torch.tensor(1.0)
    a, b = NVFP4_CUDA(x, g), NVFP4_CUTEDSL(x, g)
    assert not a.scales.any() and not b.scales.any() and not a.payload.any() and b.payload.tolist() == [[0x77] * 8]
    assert not a.dequantise().any() and not b.dequantise().any()


def test_reciprocal_is_within_one_step() -> None:
    x = torch.rand(4096) * 100 + 1e-3
    assert ((reciprocal(x) * x - 1).abs() < 2**-22).all() and reciprocal(torch.tensor(0.25)).item() == 4.0


def test_what_is_refused() -> None:
    x = torch.zeros(2, 48)
    with pytest.raises(MxdebugError, match="activation global scale: expected none for MXFP8, got one"):
        MXFP8_CUDA(torch.zeros(2, 64), torch.tensor(1.0))
    with pytest.raises(MxdebugError, match="activation global scale: expected a float32 scalar for NVFP4, got none"):
        NVFP4_CUDA(x)
    with pytest.raises(MxdebugError, match="a last dimension that is a multiple of 32"):
        QUANTISERS["MXFP8"](x)
