"""Is every block's sum exact before it is cut, whatever the activations are? Oracle: sums of fractions, without a float in between."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from mxdebug import block_gemm as module
from mxdebug.block_gemm import block_gemm, cut
from mxdebug.formats import E8M0, E8M0_SM90, MXFP4, MXFP8, BlockFormat, BlockTensor

K, N = 96, 40


def weight(fmt: BlockFormat = MXFP4) -> BlockTensor:
    g = torch.Generator().manual_seed(3)
    payload = torch.randint(0, 256 if fmt.packed else 0x7F, (N, K // (2 if fmt.packed else 1)), generator=g, dtype=torch.uint8)
    return BlockTensor(payload, torch.randint(115, 133, (N, K // 32), generator=g, dtype=torch.uint8), fmt)


def activations(binades: int, tokens: int = 3) -> Tensor:
    """bf16 numbers whose exponents differ by up to `binades` within a block."""
    g = torch.Generator().manual_seed(binades)
    return torch.ldexp(torch.randn(tokens, K, generator=g), -torch.randint(0, binades + 1, (tokens, K), generator=g)).bfloat16().float()


def exact(x: Tensor, w: BlockTensor) -> Tensor:
    """The rule, in fractions: sum of one block, dropped to 24 bits towards zero, times the scale, added in float32 in the order of K."""
    elements, scales = w.elements(), E8M0.decode(w.scales)
    out = torch.zeros(len(x), N)
    for t in range(len(x)):
        for n in range(N):
            total = torch.zeros(())
            for b in range(K // 32):
                block = sum((Fraction(a) * Fraction(c) for a, c in zip(x[t, 32 * b: 32 * b + 32].tolist(), elements[n, 32 * b: 32 * b + 32].tolist())),
                            Fraction(0))
                if block:
                    step = Fraction(2) ** (math.frexp(float(block))[1] - 24)
                    if abs(block) < step * 2 ** 23:  # float() rounded up to the next power of two
                        step /= 2
                    block = math.trunc(block / step) * step
                total = total + torch.tensor(float(block)) * scales[n, b]
            out[t, n] = total
    return out


@pytest.mark.parametrize("binades", [0, 6, 20, 36])
def test_equals_exact_sums(binades: int) -> None:
    """0 and 6 binades take one or two parts, 20 two or three, 36 three."""
    x = activations(binades)
    assert torch.equal(block_gemm(x, weight(), E8M0), exact(x, weight()))


def test_parts_are_used_and_hold_what_they_are_made_of() -> None:
    blocks = activations(20).unflatten(-1, (-1, 32)).transpose(0, 1)
    parts = module._parts(blocks)
    assert parts is not None and parts.shape == (3, 9, 32)  # three parts of three tokens
    assert torch.equal(parts.unflatten(1, (3, 3)).double().sum(1), blocks.double())
    assert module._parts(activations(60).unflatten(-1, (-1, 32)).transpose(0, 1)) is None  # 46 bits apart and more: float64 instead


def test_other_arithmetic_gives_the_same() -> None:
    """Where float32 products may be rounded, and for few rows at a time."""
    x = activations(6)
    want = block_gemm(x, weight(), E8M0)
    torch.set_float32_matmul_precision("medium")
    try:
        assert module._parts(x.unflatten(-1, (-1, 32)).transpose(0, 1)) is None
        assert torch.equal(block_gemm(x, weight(), E8M0), want)
    finally:
        torch.set_float32_matmul_precision("highest")


def test_rows_do_not_depend_on_how_many_are_held(monkeypatch: pytest.MonkeyPatch) -> None:
    x, want = activations(6), block_gemm(activations(6), weight(), E8M0)
    monkeypatch.setattr(module, "_SUMS", 1)  # 32 rows at a time: 32 and 8
    assert torch.equal(block_gemm(x, weight(), E8M0), want)


@pytest.mark.parametrize("special", [math.inf, -math.inf, math.nan])
def test_not_finite_activations_reach_every_row_of_their_token(special: float) -> None:
    x = activations(6)
    x[1, 40] = special
    got = block_gemm(x, weight(), E8M0)
    assert torch.isfinite(got[[0, 2]]).all() and not torch.isfinite(got[1]).any()  # 0 * inf is NaN too


def test_eight_bit_elements_and_sm90_scales() -> None:
    """MXFP8 takes float64; a scale byte 0xFF is inf on SM90, so that row is not finite.

    A sum of a block is cut, by 2^-23 of it at most, and each of B additions rounds by 2^-24 of a sum: all of them by no more than
    (B + 2) 2^-24 of the sum of the products' absolute values.
    """
    x, w = activations(6), weight(MXFP8)
    values = w.dequantise(torch.float64)
    off = (block_gemm(x, w, E8M0).double() - x.double() @ values.T).abs()
    assert bool((off <= (w.scales.shape[1] + 2) * 2.0**-24 * (x.double().abs() @ values.abs().T)).all())
    broken = weight()
    broken.scales[7, 1] = 0xFF
    got = block_gemm(x, broken, E8M0_SM90)
    assert not torch.isfinite(got[:, 7]).any() and torch.isfinite(got[:, :7]).all()


def test_cut_drops_towards_zero() -> None:
    """2^24 + 1 has 25 bits: the last one is dropped, for either sign."""
    assert cut(torch.tensor([2.0 ** 24 + 1, -(2.0 ** 24) - 1, 0.1], dtype=torch.float64)).tolist() == [2.0 ** 24, -(2.0 ** 24), 0.09999999403953552]
