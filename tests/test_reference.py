"""Does the reference compute what the checkpoint means, and with a kernel's roundings what the GPU computed?

Oracles: the formulas in plain Python loops over float64, gpt-oss's published activation, torch.nn.functional, and outputs that
an H200 wrote (`mxdebug.recorded`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from mxdebug import mufu
from mxdebug.errors import MxdebugError
from mxdebug.formats import E8M0_SM90, MXFP4, MXFP8, NVFP4, BlockFormat, BlockTensor
from mxdebug.metrics import compare
from mxdebug.recorded import call
from mxdebug.reference import CLAMPS, EXACT, GATED, KINDS, Activation, MoELayer, Parallel, Roundings, forward, linear, moe

F64 = torch.float64
CUTLASS = Roundings(*[torch.bfloat16] * 4, accumulate=32, fast_math=True)


# -- layers to test with -------------------------------------------------------------------------------------------


def block_tensor(fmt: BlockFormat, *shape: int, seed: int) -> BlockTensor:
    """Random codes; scales that differ by row and block; for NVFP4 a global scale that differs by expert (a power of two: exact)."""
    gen = torch.Generator().manual_seed(seed)
    *lead, k = shape
    payload = torch.randint(0, 256, (*lead, k // (2 if fmt.packed else 1)), dtype=torch.uint8, generator=gen)
    if not fmt.packed:
        payload = torch.randint(0x20, 0x40, payload.shape, dtype=torch.uint8, generator=gen) | (payload & 0x80)
    if fmt.outer:
        scales = torch.randint(0x28, 0x48, (*lead, k // fmt.block), dtype=torch.uint8, generator=gen)
        return BlockTensor(payload, scales, fmt, 2.0 ** -(4 + torch.arange(lead[0]).float() % 3))
    return BlockTensor(payload, torch.randint(120, 125, (*lead, k // fmt.block), dtype=torch.uint8, generator=gen), fmt)


def make_layer(activation: Activation, *, fmt: BlockFormat = MXFP4, experts: int = 3, intermediate: int = 96, hidden: int = 160,
               biases: bool = True, seed: int = 0) -> MoELayer:
    e, i, h, gen = experts, intermediate, hidden, torch.Generator().manual_seed(seed + 100)
    bias = [torch.randn(e, n, generator=gen).bfloat16() if biases else None for n in (i, i, h)]
    return MoELayer(
        gate=block_tensor(fmt, e, i, h, seed=seed) if activation.gated else None, up=block_tensor(fmt, e, i, h, seed=seed + 1),
        down=block_tensor(fmt, e, h, i, seed=seed + 2), activation=activation,
        gate_bias=bias[0] if activation.gated else None, up_bias=bias[1], down_bias=bias[2])


def oai(experts: int = 3) -> Activation:
    """alpha, beta and limit that differ by expert; the limits are low enough to act."""
    n = torch.arange(experts).float()
    return Activation("swiglu", alpha=1.702 - 0.25 * n, beta=1.0 - 0.5 * n, limit=1.5 + n)


def make_call(layer: MoELayer, tokens: int = 5, k: int = 2, experts: int | None = None, seed: int = 9) -> tuple[Tensor, Tensor, Tensor]:
    """x, selected experts (each row distinct), router weights."""
    gen = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, layer.hidden, generator=gen).bfloat16()
    n = experts or layer.experts
    chosen = torch.stack([torch.randperm(n, generator=gen)[:k] for _ in range(tokens)])
    return x, chosen.int(), torch.rand(tokens, k, generator=gen) + 0.1


# -- the same thing once more, in plain Python ------------------------------------------------------------------------

_E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def _e4m3(code: int) -> float:
    e, m = (code >> 3) & 15, code & 7
    value = math.ldexp(m, -9) if e == 0 else math.ldexp(8 + m, e - 10)
    return -value if code >> 7 else value


def plain_values(t: BlockTensor) -> list[list[list[float]]]:
    """[E][rows][K], from the bytes."""
    payload, scales, f, out = t.payload.tolist(), t.scales.tolist(), t.format, []
    for e, rows in enumerate(payload):
        g = 1.0 if t.global_scale is None else t.global_scale[e].item()
        expert = []
        for r, row in enumerate(rows):
            values = []
            for k in range(t.columns):
                if f.packed:
                    code = (row[k // 2] >> (4 if k % 2 else 0)) & 15
                    element = _E2M1[code & 7] * (-1 if code & 8 else 1)
                else:
                    element = _e4m3(row[k])
                byte = scales[e][r][k // f.block]
                values.append(element * (_e4m3(byte) if f.outer else 2.0 ** (byte - 127)) * g)
            expert.append(values)
        out.append(expert)
    return out


def plain_activation(a: Activation, gate: float | None, up: float, e: int) -> float:
    if a.kind == "relu2":
        return max(up, 0.0) ** 2
    if a.kind == "gelu":
        return gate * 0.5 * (1 + math.erf(gate / math.sqrt(2))) * up
    if a.kind == "gelu_tanh":
        return gate * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))) * up
    alpha = 1.0 if a.alpha is None else a.alpha[e].item()
    beta = 0.0 if a.beta is None else a.beta[e].item()
    limit = math.inf if a.limit is None else a.limit[e].item()
    gate, up = min(gate, limit), min(max(up, -limit), limit)
    return gate / (1 + math.exp(-alpha * gate)) * (up + beta)


def plain_moe(x: Tensor, experts: Tensor, router: Tensor, layer: MoELayer) -> Tensor:
    gate, up, down = (None if t is None else plain_values(t) for t in (layer.gate, layer.up, layer.down))

    def row(weights: list[list[list[float]]], bias: Tensor | None, e: int, r: int, v: list[float]) -> float:
        return math.fsum(w * a for w, a in zip(weights[e][r], v)) + (0.0 if bias is None else bias[e, r].item())

    out = []
    for token in range(len(x)):
        v, y = x[token].tolist(), [0.0] * layer.hidden
        for slot in range(experts.shape[1]):
            e, weight = experts[token, slot].item(), router[token, slot].item()
            act = [plain_activation(layer.activation, None if gate is None else row(gate, layer.gate_bias, e, i, v),
                                    row(up, layer.up_bias, e, i, v), e) for i in range(layer.intermediate)]
            for h in range(layer.hidden):
                y[h] += weight * row(down, layer.down_bias, e, h, act)
        out.append(y)
    return torch.tensor(out, dtype=F64)


@pytest.mark.parametrize(("kind", "fmt"), [*((k, MXFP4) for k in ("oai", "swiglu", "silu", "gelu", "gelu_tanh", "relu2")),
                                           ("oai", MXFP8), ("relu2", MXFP8), ("oai", NVFP4), ("relu2", NVFP4)],
                         ids=lambda v: getattr(v, "name", v))
def test_moe_is_the_formula_in_plain_python(kind: str, fmt: BlockFormat) -> None:
    """In float64 to 1e-12: with every activation, biases, top-2 of 3 experts, router weights. The data exercises the limits."""
    layer = make_layer(oai() if kind == "oai" else Activation(kind), fmt=fmt)
    x, experts, router = make_call(layer, tokens=3)
    got, want = moe(x, experts, router, layer, compute=F64), plain_moe(x, experts, router, layer)
    assert got.dtype == F64 and want.abs().min() > 0
    assert compare(got, want).relative_l2 < 1e-12
    if kind == "oai":
        trace = forward(x, experts, router, layer, parallel=Parallel(), roundings=EXACT, keep=True)
        limit = layer.activation.limit[trace.expert][:, None]
        for beyond in (trace.gate > limit, trace.gate < -limit, trace.up > limit, trace.up < -limit):
            assert 0.02 < beyond.float().mean() < 0.98


def test_without_biases() -> None:
    layer = make_layer(Activation("swiglu"), biases=False)
    x, experts, router = make_call(layer, tokens=2)
    assert compare(moe(x, experts, router, layer, compute=F64), plain_moe(x, experts, router, layer)).relative_l2 < 1e-12


@pytest.mark.parametrize("lost", ["gate_bias", "up_bias", "down_bias"])
def test_each_bias_matters(lost: str) -> None:
    layer = make_layer(oai())
    args = make_call(layer)
    assert compare(moe(*args, replace(layer, **{lost: None})), moe(*args, layer)).relative_l2 > 0.01


def test_computing_in_float32_is_close_to_float64() -> None:
    layer = make_layer(oai())
    args = make_call(layer)
    assert moe(*args, layer).dtype == torch.float32
    assert compare(moe(*args, layer).double(), moe(*args, layer, compute=F64)).relative_l2 < 1e-6


# -- activations --------------------------------------------------------------------------------------------------------


def sigmoid(v: float) -> float:
    return 1 / (1 + math.exp(-v))


def apply(a: Activation, gate: float, up: float, expert: int = 0) -> float:
    return a(torch.tensor([[gate]], dtype=F64), torch.tensor([[up]], dtype=F64), expert).item()


@pytest.mark.parametrize(("gate", "up", "value", "why"), [
    (1.0, 2.0, 1.0 * sigmoid(1.702) * 3.0, "no limit acts"),
    (10.0, 2.0, 7.0 * sigmoid(1.702 * 7) * 3.0, "gate is capped at 7"),
    (-10.0, 2.0, -10.0 * sigmoid(-17.02) * 3.0, "on the upper side only: -10 stays"),
    (1.0, 10.0, 1.0 * sigmoid(1.702) * 8.0, "up is clamped to 7, then beta is added"),
    (1.0, -10.0, 1.0 * sigmoid(1.702) * -6.0, "and to -7 below: -7 + 1"),
    (0.0, 5.0, 0.0, "sigmoid(0) * 0"),
    (2.0, -1.0, 0.0, "up + beta = 0")])
def test_swiglu_by_hand(gate: float, up: float, value: float, why: str) -> None:
    """alpha 1.702, beta 1, limit 7 (gpt-oss)."""
    a = Activation("swiglu", torch.tensor([1.702], dtype=F64), torch.tensor([1.0]), torch.tensor([7.0]))
    assert apply(a, gate, up) == pytest.approx(value, rel=1e-14, abs=1e-300), why


G10, GM10 = 7.0 * sigmoid(7.0), -10.0 * sigmoid(-10.0)   # gate 10 capped; gate -10 free


@pytest.mark.parametrize(("clamp", "free_low_gate", "low_up", "both_high"), [
    ("gate above, up both", GM10, -7.0, G10 * 7),
    ("gate both, up both", -7.0 * sigmoid(-7.0), -7.0, G10 * 7),
    ("gate above, up above", GM10, -10.0, G10 * 7),
    ("gate both, up above", -7.0 * sigmoid(-7.0), -10.0, G10 * 7),
    ("after activation", GM10, -7.0 / sigmoid(1.0), 7.0)])
def test_where_the_limit_acts(clamp: str, free_low_gate: float, low_up: float, both_high: float) -> None:
    """alpha 1, beta 0, limit 7, at (gate, up) = (-10, 1), (1, -10), (10, 10): the first is the right one, the others are known mistakes.
    After activation: silu(1) * -10 = -7.31 is cut to -7, silu(10) * 10 to 7."""
    a = Activation("swiglu", limit=torch.tensor([7.0]), clamp=clamp)
    assert apply(a, -10.0, 1.0) == pytest.approx(free_low_gate, rel=1e-14)
    assert apply(a, 1.0, -10.0) == pytest.approx(sigmoid(1.0) * low_up, rel=1e-14)
    assert apply(a, 10.0, 10.0) == pytest.approx(both_high, rel=1e-14)


def test_clamps_can_be_told_apart() -> None:
    """Two hypotheses that compute the same could never be told apart by a diagnosis."""
    gate, up = (t.flatten()[:, None] for t in torch.meshgrid(torch.linspace(-9, 9, 19), torch.linspace(-9, 9, 19), indexing="ij"))
    outputs = {clamp: Activation("swiglu", limit=torch.tensor([7.0]), clamp=clamp)(gate, up, 0) for clamp in CLAMPS}
    same = [(a, b) for a in CLAMPS for b in CLAMPS if a < b and torch.equal(outputs[a], outputs[b])]
    assert not same


@settings(max_examples=50, deadline=None)
@given(st.floats(-30, 30), st.floats(-30, 30), st.floats(0.1, 3), st.floats(0.5, 20))
def test_swiglu_is_gpt_oss_published_formula(gate: float, up: float, alpha: float, limit: float) -> None:
    """transformers, GptOssExperts: gate.clamp(max=limit); up.clamp(-limit, limit); glu = gate * sigmoid(gate * alpha); (up + 1) * glu."""
    g, u = torch.tensor([[gate]], dtype=F64), torch.tensor([[up]], dtype=F64)
    g, u = g.clamp(min=None, max=limit), u.clamp(min=-limit, max=limit)
    want = ((u + 1) * (g * torch.sigmoid(g * alpha))).item()
    a = Activation("swiglu", *(torch.tensor([v], dtype=F64) for v in (alpha, 1.0, limit)))
    assert apply(a, gate, up) == pytest.approx(want, rel=1e-12, abs=1e-300)


def test_parameters_are_those_of_the_expert() -> None:
    a = Activation("swiglu", alpha=torch.tensor([1.0, 2.0]), beta=torch.tensor([0.0, 3.0]), limit=torch.tensor([9.0, 0.5]))
    assert apply(a, 1.0, 2.0, 0) == pytest.approx(sigmoid(1.0) * 2.0)
    assert apply(a, 1.0, 2.0, 1) == pytest.approx(0.5 * sigmoid(2.0 * 0.5) * (0.5 + 3.0))
    assert (a.parameter("alpha", 1), a.parameter("limit", 0), Activation("swiglu").parameter("beta", 0)) == (2.0, 9.0, None)


@pytest.mark.parametrize("given_", ["alpha", "beta", "limit"])
def test_what_is_not_given_has_its_default(given_: str) -> None:
    """1, 0 and no limit, each on its own."""
    value = {"alpha": 1.702, "beta": 1.0, "limit": 3.0}[given_]
    want = {"alpha": 5.0 * sigmoid(1.702 * 5.0) * 4.0, "beta": 5.0 * sigmoid(5.0) * 5.0, "limit": 3.0 * sigmoid(3.0) * 3.0}[given_]
    assert apply(Activation("swiglu", **{given_: torch.tensor([value], dtype=F64)}), 5.0, 4.0) == pytest.approx(want, rel=1e-14)


def test_silu_is_swiglu_with_neutral_parameters() -> None:
    gate, up = torch.randn(2, 7, 33, dtype=F64, generator=torch.Generator().manual_seed(1)) * 5
    neutral = Activation("swiglu", torch.ones(2), torch.zeros(2), torch.full((2,), math.inf))
    silu = Activation("silu")(gate, up, 0)
    assert torch.equal(neutral(gate, up, 1), Activation("swiglu")(gate, up, 0))
    torch.testing.assert_close(Activation("swiglu")(gate, up, 0), silu, rtol=1e-14, atol=0)
    torch.testing.assert_close(silu, torch.nn.functional.silu(gate) * up, rtol=1e-14, atol=0)


def test_erf_and_tanh_gelu_are_two_functions() -> None:
    """gelu(1) = 0.8413447 by erf and 0.8411920 by tanh: 'GELU_TANH' mapped to an erf kernel shows."""
    assert apply(Activation("gelu"), 1.0, 2.0) == pytest.approx(2 * 0.8413447, abs=1e-6)
    assert apply(Activation("gelu_tanh"), 1.0, 2.0) == pytest.approx(2 * 0.8411920, abs=1e-6)
    gate, up = torch.randn(2, 7, 33, dtype=F64, generator=torch.Generator().manual_seed(1))
    assert torch.equal(Activation("gelu")(gate, up, 0), torch.nn.functional.gelu(gate) * up)
    assert torch.equal(Activation("gelu_tanh")(gate, up, 0), torch.nn.functional.gelu(gate, approximate="tanh") * up)


def test_relu2_has_no_gate() -> None:
    a = Activation("relu2")
    assert not a.gated and all(Activation(k).gated for k in GATED) and set(KINDS) == {*GATED, "relu2"}
    assert a(None, torch.tensor([[-2.0, 0.0, 1.5]]), 0).tolist() == [[0.0, 0.0, 2.25]]


# -- routing -------------------------------------------------------------------------------------------------------------


def test_slots_add_up_weighted() -> None:
    """Top-2 is the weighted sum of two top-1 calls."""
    layer = make_layer(oai())
    x, experts, router = make_call(layer)
    ones = torch.ones(len(x), 1)
    alone = [moe(x, experts[:, s:s + 1], ones, layer, compute=F64) for s in range(2)]
    want = router[:, :1].double() * alone[0] + router[:, 1:].double() * alone[1]
    torch.testing.assert_close(moe(x, experts, router, layer, compute=F64), want, rtol=1e-13, atol=1e-13)


def test_tokens_do_not_touch_each_other() -> None:
    layer = make_layer(oai())
    x, experts, router = make_call(layer, tokens=6)
    whole = moe(x, experts, router, layer, compute=F64)
    order = torch.tensor([4, 0, 5, 2, 1, 3])
    torch.testing.assert_close(moe(x[order], experts[order], router[order], layer, compute=F64), whole[order], rtol=1e-13, atol=1e-13)
    for t in range(6):
        one = slice(t, t + 1)
        torch.testing.assert_close(moe(x[one], experts[one], router[one], layer, compute=F64), whole[one], rtol=1e-13, atol=1e-13)


def test_experts_elsewhere_contribute_nothing() -> None:
    """Ids outside this rank, -1 among them; a NaN router weight there does no harm."""
    layer = make_layer(oai())
    x, experts, router = make_call(layer, tokens=4)
    experts[0] = torch.tensor([-1, 3])
    experts[1, 0] = 7
    router[1, 0] = math.nan
    out = moe(x, experts, router, layer, compute=F64)
    assert (out[0] == 0).all() and torch.isfinite(out).all()
    torch.testing.assert_close(out[1:2], moe(x[1:2], experts[1:2, 1:], router[1:2, 1:], layer, compute=F64), rtol=1e-13, atol=1e-13)


def test_one_expert_twice() -> None:
    layer = make_layer(oai())
    x, experts, router = make_call(layer)
    twice = experts[:, :1].expand(-1, 2)
    want = moe(x, experts[:, :1], router.sum(1, keepdim=True), layer, compute=F64)
    torch.testing.assert_close(moe(x, twice, router, layer, compute=F64), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["swiglu", "relu2"])
def test_the_trace_has_the_pre_activations(kind: str) -> None:
    """Biases added, before any clamp; one row for each (token, slot) that was computed here."""
    layer = make_layer(replace(oai(), kind=kind) if kind == "swiglu" else Activation(kind))
    x, experts, router = make_call(layer, tokens=4)
    experts[2, 1] = -1
    t = forward(x, experts, router, layer, parallel=Parallel(), roundings=EXACT, compute=F64, keep=True)
    assert sorted(zip(t.token.tolist(), t.slot.tolist())) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (3, 0), (3, 1)]
    assert torch.equal(t.expert, experts[t.token, t.slot].long())
    for weight, bias, got in ((layer.gate, layer.gate_bias, t.gate), (layer.up, layer.up_bias, t.up)):
        if weight is None:
            assert got is None
            continue
        want = torch.stack([weight.dequantise(F64)[e] @ x[i].double() + bias[e].double() for i, e in zip(t.token, t.expert)])
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert torch.equal(t.output, moe(x, experts, router, layer, compute=F64))
    none = forward(x, torch.full_like(experts, -1), router, layer, parallel=Parallel(), roundings=EXACT, keep=True)
    assert none.up.shape == (0, 96) and len(none.token) == 0 and (none.output == 0).all()


# -- roundings ------------------------------------------------------------------------------------------------------------


def _cut(value: float) -> np.float32:
    """Towards zero."""
    f = np.float32(value)
    return np.nextafter(f, np.float32(0)) if abs(f.item()) > abs(value) else f


ONE_ROUNDING = {
    "none": EXACT, "gemm1": replace(EXACT, gemm1=torch.bfloat16), "activation": replace(EXACT, activation=torch.bfloat16),
    "gemm2": replace(EXACT, gemm2=torch.bfloat16), "output": replace(EXACT, output=torch.bfloat16),
    "accumulate": replace(EXACT, accumulate=32), "fast math": replace(EXACT, fast_math=True)}


@pytest.mark.parametrize("roundings", [*ONE_ROUNDING.values(), CUTLASS], ids=[*ONE_ROUNDING, "all"])
def test_rounding_points(roundings: Roundings) -> None:
    """One token, two experts, step by step: GEMM1 stored; + bias and activation, stored; GEMM2 stored; + bias, * router, sum; stored.
    With `accumulate` a GEMM adds block by block in float32: the sum of 32 products, cut, times the block's scale. With `fast_math`
    the sigmoid is that of the special function unit, and the router's product is not rounded before it is added."""
    layer = make_layer(oai())
    x, experts, router = make_call(layer, tokens=1)
    r = roundings

    def store(t: Tensor, dtype: torch.dtype | None) -> Tensor:
        return t if dtype is None else t.to(dtype).to(torch.float32)

    def gemm(w: BlockTensor, e: int, v: Tensor) -> Tensor:
        if r.accumulate is None:
            return (w.dequantise(F64)[e] @ v.double()).float()
        values, out = w.dequantise(F64)[e].tolist(), []
        for n, row in enumerate(values):
            total = np.float32(0)
            for b in range(len(row) // 32):
                scale = 2.0 ** (w.scales[e, n, b].item() - 127)
                block = math.fsum(value / scale * a for value, a in zip(row[32 * b:], v[32 * b:32 * b + 32].tolist()))
                total = np.float32(total + _cut(block) * np.float32(scale))
            out.append(total.item())
        return torch.tensor(out)

    total = torch.zeros(layer.hidden)
    for slot in range(2):
        e = int(experts[0, slot])
        gate, up = (store(gemm(w, e, x[0]), r.gemm1) + b[e].float()
                    for w, b in ((layer.gate, layer.gate_bias), (layer.up, layer.up_bias)))
        sigmoid = mufu.sigmoid if r.fast_math else torch.sigmoid
        act = store(layer.activation(gate[None], up[None], e, sigmoid)[0], r.activation)
        y = store(gemm(layer.down, e, act), r.gemm2) + layer.down_bias[e].float()
        if r.fast_math:
            total = (total.double() + y.double() * router[0, slot].double()).float()
        else:
            total = total + y * router[0, slot]
    got = moe(x, experts, router, layer, roundings=roundings)[0]
    assert got.dtype == (torch.float32 if r.output is None else r.output)
    assert compare(got, total if r.output is None else total.to(r.output)).bit_identical
    if roundings is not EXACT:
        assert not torch.equal(got.float(), moe(x, experts, router, layer)[0])  # the rounding can be seen in this data


def test_special_function_unit() -> None:
    """Bounds of the PTX ISA: 2^x to a relative 2^-22, 1/x to 2^-23; exact at powers of two; subnormal results are flushed.
    Bounds only: the recorded calls below come out the same with correctly rounded results."""
    x = torch.cat([torch.randn(4096, generator=torch.Generator().manual_seed(6)) * 20, torch.linspace(-3, 3, 4097)])
    assert ((mufu.ex2(x).double() / torch.exp2(x.double())) - 1).abs().max() < 2.0**-22
    y = 1 + x.abs()
    assert (mufu.rcp(y).double() * y.double() - 1).abs().max() < 2.0**-23
    # |x| < 88: x log2 e is below 2^7, its rounding of at most 2^-18 is an error of the exponent
    assert x.abs().max() < 88 and (mufu.sigmoid(x).double() / torch.sigmoid(x.double()) - 1).abs().max() < 2.0**-17
    assert mufu.ex2(torch.tensor([0.0, 1.0, -1.0, 10.0, -126.0, -127.0])).tolist() == [1, 2, 0.5, 1024, 2.0**-126, 0]
    assert mufu.ex2(torch.tensor([128.0, math.inf, -math.inf])).tolist() == [math.inf, math.inf, 0]
    assert mufu.rcp(torch.tensor([1.0, 4.0, math.inf])).tolist() == [1, 0.25, 0]
    assert mufu.sigmoid(torch.tensor([0.0, 200.0, -200.0])).tolist() == [0.5, 1.0, 0.0]
    assert math.isnan(mufu.sigmoid(torch.tensor(math.nan)).item())
    assert torch.equal(mufu.sigmoid(x[:231]), torch.cat([mufu.sigmoid(v[None]) for v in x[:231]]))  # torch.sigmoid depends on the position


def test_another_reader_of_the_scales() -> None:
    """SM90's kernel reads the scale byte 0x00 as 0: those blocks contribute nothing. OCP: 2^-127, which x = 2^124 makes visible."""
    layer = make_layer(Activation("relu2"), biases=False)
    layer.up.scales[:, :, 1] = 0
    layer.down.scales[:, :7] = 0  # whole rows, so that the outputs 0..6 are nothing but these blocks
    x, experts, router = make_call(layer, tokens=2)
    x[:, 32:64] = 2.0**124
    ocp, sm90 = (moe(x, experts, router, replace(layer, scale=s), compute=F64) for s in (None, E8M0_SM90))
    assert (sm90[:, :7] == 0).all() and (ocp[:, :7] != 0).all()
    assert compare(ocp[:, 7:], sm90[:, 7:]).relative_l2 > 0.01
    x[:, 32:64] = 0
    torch.testing.assert_close(sm90[:, 7:], moe(x, experts, router, layer, compute=F64)[:, 7:], rtol=1e-12, atol=0)


# -- recorded on the H200 ---------------------------------------------------------------------------------------------------


def _load_layer(name: str) -> MoELayer:
    """A recorded call's checkpoint in logical order, read here with nothing but safetensors."""
    tensors = load_file(call(name).checkpoint_path / "model.safetensors")
    first = next(iter(tensors)).split("experts.")[0]
    if "block_sparse_moe" in first:  # one tensor per expert and half
        def stack(half: str) -> BlockTensor:
            parts = [[tensors[f"{first}experts.{e}.{half}.{kind}"] for e in range(4)] for kind in ("weight_packed", "weight_scale")]
            return BlockTensor(*(torch.stack(p) for p in parts), MXFP4)
        gate, up, down, biases = stack("w1"), stack("w3"), stack("w2"), {}
    else:  # gpt-oss: rows g0, u0, g1, u1, ...
        blocks, scales, bias = (tensors[f"{first}experts.gate_up_proj_{n}"] for n in ("blocks", "scales", "bias"))
        gate, up = (BlockTensor(blocks[:, h::2].flatten(2), scales[:, h::2], MXFP4) for h in (0, 1))
        down = BlockTensor(tensors[f"{first}experts.down_proj_blocks"].flatten(2), tensors[f"{first}experts.down_proj_scales"], MXFP4)
        biases = {"gate_bias": bias[:, 0::2], "up_bias": bias[:, 1::2], "down_bias": tensors[f"{first}experts.down_proj_bias"]}
    n = gate.shape[0]
    activation = Activation("swiglu", torch.full((n,), 1.702), torch.full((n,), 1.0), torch.full((n,), 7.0))
    return MoELayer(gate, up, down, activation, scale=E8M0_SM90, **biases)


@pytest.mark.parametrize(("name", "parallel"), [
    ("c01", Parallel()), ("c02", Parallel()), ("c05", Parallel()), ("c09", Parallel()), ("c10", Parallel()),
    ("c12", Parallel(ep_size=2, ep_rank=1)), ("c13", Parallel(tp_size=2, tp_rank=1))], ids=lambda v: v if isinstance(v, str) else "")
def test_outputs_of_the_h200_bit_for_bit(name: str, parallel: Parallel) -> None:
    """The checkpoint through the reference, with the roundings of CUTLASS BF16 x MXFP4, is what the GPU wrote: experts 4..7 on their
    rank (c12), the second half of the intermediate size without the down bias (c13), padding that changes nothing (c10), parameters
    that were not passed (c05)."""
    folder = next(p for p in call(name).path.iterdir() if p.is_dir())
    inputs = torch.load(folder / "inputs.pt", weights_only=True)
    want = torch.load(folder / "outputs.pt", weights_only=True)["result__0"]
    layer = _load_layer(name)
    if name == "c05":
        layer = replace(layer, activation=Activation("swiglu"))
    got = moe(inputs["kwarg_input"], inputs["kwarg_token_selected_experts"], inputs["kwarg_token_final_scales"], layer.part(parallel),
              parallel=parallel, roundings=CUTLASS)
    result = compare(got, want)
    assert result.bit_identical, str(result)


# -- parts of a layer ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["swiglu", "relu2"])
@pytest.mark.parametrize(("tp", "shares"), [(1, [160]), (2, [96, 64]), (3, [64, 64, 32]), (5, [32] * 5)], ids=str)
def test_tensor_parallel_parts_sum_to_the_whole(tp: int, shares: list[int], kind: str) -> None:
    """160 = 5 blocks of 32; the first ranks get ceil(5 / tp) blocks. The down bias is added once, on rank 0."""
    layer = make_layer(oai() if kind == "swiglu" else Activation(kind), intermediate=160, hidden=96)
    args = make_call(layer)
    total, sizes = 0, []
    for rank in range(tp):
        parallel = Parallel(tp_size=tp, tp_rank=rank)
        part = layer.part(parallel)
        sizes.append(part.intermediate)
        total = total + moe(*args, part, parallel=parallel, compute=F64)
    assert sizes == shares
    torch.testing.assert_close(total, moe(*args, layer, compute=F64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("ep", [1, 2, 3, 6])
def test_expert_parallel_parts_sum_to_the_whole(ep: int) -> None:
    """Six experts with different parameters: a rank that starts counting at the wrong expert shows."""
    layer = make_layer(oai(6), experts=6)
    args = make_call(layer, k=3)
    parts = [Parallel(ep_size=ep, ep_rank=rank) for rank in range(ep)]
    assert all(layer.part(p).experts == 6 // ep for p in parts)
    total = sum(moe(*args, layer.part(p), parallel=p, compute=F64) for p in parts)
    torch.testing.assert_close(total, moe(*args, layer, compute=F64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("fmt", [MXFP4, MXFP8, NVFP4], ids=lambda f: f.name)
def test_both_at_once(fmt: BlockFormat) -> None:
    """TP 2 x EP 2; the global scales of NVFP4 go with their experts."""
    layer = make_layer(oai(4), fmt=fmt, experts=4, intermediate=96, hidden=64)
    args = make_call(layer, k=3)
    ranks = [Parallel(2, t, 2, e) for t in range(2) for e in range(2)]
    total = sum(moe(*args, layer.part(p), parallel=p, compute=F64) for p in ranks)
    torch.testing.assert_close(total, moe(*args, layer, compute=F64), rtol=1e-12, atol=1e-12)


def test_a_part_holds_the_slices_that_it_says() -> None:
    layer = make_layer(oai(4), experts=4, intermediate=160)
    part = layer.part(Parallel(tp_size=2, tp_rank=1, ep_size=2, ep_rank=1))
    assert torch.equal(part.up.dequantise(), layer.up.dequantise()[2:, 96:])
    assert torch.equal(part.gate.dequantise(), layer.gate.dequantise()[2:, 96:])
    assert torch.equal(part.down.dequantise(), layer.down.dequantise()[2:, :, 96:])
    assert torch.equal(part.gate_bias, layer.gate_bias[2:, 96:]) and torch.equal(part.up_bias, layer.up_bias[2:, 96:])
    assert torch.equal(part.down_bias, layer.down_bias[2:])  # whole: rank 0 alone adds it
    assert torch.equal(part.activation.alpha, layer.activation.alpha[2:]) and torch.equal(part.activation.limit, layer.activation.limit[2:])
    assert (part.experts, part.intermediate, part.hidden) == (2, 64, 160)


# -- linear layer ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fmt", [MXFP4, NVFP4], ids=lambda f: f.name)
def test_linear_in_plain_python(fmt: BlockFormat) -> None:
    w = block_tensor(fmt, 1, 24, 96, seed=4)
    values = plain_values(w)[0]
    x = torch.randn(2, 3, 96, generator=torch.Generator().manual_seed(5)).bfloat16()
    bias = torch.arange(24).bfloat16()
    want = torch.tensor([[[math.fsum(a * b for a, b in zip(row, v)) + n for n, row in enumerate(values)] for v in t] for t in x.tolist()],
                        dtype=F64)
    got = linear(x, w[0], bias, compute=F64)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(linear(x, w[0], compute=F64) + bias.double(), want, rtol=1e-12, atol=1e-12)
    assert torch.equal(linear(x, w[0], bias, output=torch.bfloat16, compute=F64), want.bfloat16())


def test_linear_with_another_reader() -> None:
    w = block_tensor(MXFP4, 1, 8, 64, seed=4)[0]
    w.scales[:, 0] = 0
    x = torch.full((1, 64), 2.0**100)
    x[:, 32:] = 0
    assert (linear(x, w, scale=E8M0_SM90) == 0).all() and (linear(x, w) != 0).any()


# -- refusals ----------------------------------------------------------------------------------------------------------------------


def _call_with(**changes: object) -> Callable[[], object]:
    def run() -> object:
        layer = make_layer(oai())
        x, experts, router = make_call(layer)
        values = {"x": x, "experts": experts, "router": router, **{k: f(v) for k, f, v in (
            (k, changes[k], {"x": x, "experts": experts, "router": router}[k]) for k in changes)}}
        return moe(values["x"], values["experts"], values["router"], layer)
    return run


@pytest.mark.parametrize(("run", "message"), [
    (lambda: Activation("swish"), "expected one of swiglu"),
    (lambda: Activation("silu", limit=torch.ones(3)), "only swiglu has parameters"),
    (lambda: Activation("swiglu", clamp="both"), "activation clamp"),
    (lambda: Parallel(tp_size=2, tp_rank=2), "0 <= rank < tp_size = 2"),
    (lambda: Parallel(ep_size=2, ep_rank=-1), "ep_rank"),
    (lambda: replace(make_layer(oai()), gate=None), "expected present, got absent"),
    (lambda: replace(make_layer(oai()), activation=Activation("relu2")), "expected absent, got present"),
    (lambda: replace(make_layer(oai()), down=block_tensor(MXFP4, 3, 160, 128, seed=0)), r"down weight \(w2\): expected shape \[3, 160, 96"),
    (lambda: replace(make_layer(oai()), gate=block_tensor(MXFP4, 3, 128, 160, seed=0)), r"gate weight \(w1\)"),
    (lambda: replace(make_layer(oai()), up_bias=torch.zeros(3, 160)), "up bias"),
    (lambda: replace(make_layer(oai()), down_bias=torch.zeros(3, 96)), r"down bias: expected shape \[3, 160\]"),
    (lambda: make_layer(oai(2)), "one for each expert"),
    (lambda: make_layer(oai()).part(Parallel(ep_size=2)), "a multiple of ep_size 2, got 3"),
    (lambda: make_layer(oai(), intermediate=160).part(Parallel(tp_size=4, tp_rank=3)), "holds some of 5 blocks, got rank 3 of 4"),
    (lambda: make_layer(oai()).part(Parallel(tp_size=4, tp_rank=3)), "holds some of 3 blocks"),
    (_call_with(x=lambda x: x[:, :128]), "hidden size padded on one side only"),
    (_call_with(x=lambda x: x[0]), r"shape \[tokens, 160\]"),
    (_call_with(experts=lambda e: e.float()), "integers of shape"),
    (_call_with(experts=lambda e: e[:4]), r"integers of shape \[5, top-k\]"),
    (_call_with(router=lambda r: r[:, :1]), "router weights"),
    (lambda: moe(*make_call(make_layer(oai())), make_layer(oai()), roundings=replace(EXACT, accumulate=16)), "block 32 of MXFP4, got 16"),
    (lambda: linear(torch.zeros(2, 128), block_tensor(MXFP4, 1, 8, 96, seed=0)[0]), "padded weights, unpadded activations"),
])
def test_refusals(run: Callable[[], object], message: str) -> None:
    with pytest.raises(MxdebugError, match=message):
        run()
