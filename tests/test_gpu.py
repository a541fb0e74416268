"""On a real Hopper GPU: the kernel against its emulation, FlashInfer's converters against the recipe. `pytest tests -k gpu`."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from mxdebug import mufu, recorded, verify
from mxdebug.calls import load
from mxdebug.contracts import contract
from mxdebug.diagnosis.outputs import follows
from mxdebug.faults import Situation
from mxdebug.metrics import compare
from mxdebug.recipes import recipe
from mxdebug.reference import Activation

PATH = "mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16"
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HOPPER, reason="not run here: cutlass_fused_moe needs a GPU of SM90")]


@pytest.mark.parametrize("name", recorded.CALLS)
def test_gpu_reproduces_its_recording(name: str) -> None:
    call = load(recorded.call(name).path)
    assert compare(contract(PATH).run(call.arguments).cpu(), call.outputs[0]).bit_identical


@pytest.mark.parametrize("size", [*verify.CLEAN, *verify.FAULTY], ids=lambda s: s.name)
def test_gpu_follows_the_emulation(size: verify.Size) -> None:
    c = contract(PATH)
    arguments = verify.situation(size, recipe("vllm", PATH, "gpt-oss"), "cuda").arguments()
    got, want = c.run(arguments), c.emulate(arguments)
    assert follows(got, want, size.hidden)
    assert compare(got, want).differing <= 1e-3 * got.numel()


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh", "relu2"])
def test_gpu_activations(kind: str) -> None:
    """Geglu is GELU by erf, GegluTanh by tanh (vLLM 0.33 maps GELU_TANH to the first); Relu2 is a layer without gate."""
    size = verify.Size(384, 256, 4, 32, 2)
    s = verify.situation(size, recipe("vllm", PATH, "gpt-oss"), "cuda")
    gated = kind != "relu2"
    layer = replace(s.layer, activation=Activation(kind), **({} if gated else {"gate": None, "gate_bias": None}))
    s = Situation.right(s.recipe, layer, s.x, s.experts, s.router)
    c, arguments = contract(PATH), s.arguments()
    got, want = c.run(arguments), c.emulate(arguments)
    print(kind, compare(got, want))
    assert follows(got, want, size.hidden)
    if kind.startswith("gelu"):
        other = c.see(arguments)
        other = replace(other, layer=replace(other.layer, activation=Activation("gelu" if kind == "gelu_tanh" else "gelu_tanh"))).emulate()
        print("the other GELU:", compare(got, other))
        assert compare(got, other).differing > 10 * compare(got, want).differing


def test_gpu_reciprocals_of_any_size_are_bit_exact() -> None:
    pytest.importorskip("triton")
    from gpu_kernels import rcp_approx

    from mxdebug.requantise import reciprocal

    g = torch.Generator("cuda").manual_seed(1)
    x = torch.rand(1 << 22, generator=g, device="cuda") + 0.5
    x = torch.ldexp(x, torch.randint(-100, 100, x.shape, generator=g, device="cuda"))
    exact = torch.tensor([6.0, 448.0, 1.0, 0.5, 2688.0], device="cuda")
    for t in (x, exact):
        assert torch.equal(reciprocal(t), rcp_approx(t))


def test_gpu_converters_are_byte_exact() -> None:
    assert all(verify.converters().values())


def test_gpu_special_functions_are_bit_exact() -> None:
    triton = pytest.importorskip("triton")
    from gpu_kernels import ex2_approx, rcp_approx

    assert triton is not None
    edges = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 88.0, -88.0, 127.9, -125.9, -126.5, 200.0, -200.0, float("inf"), -float("inf")])
    for x in (torch.randn(1 << 22) * 4, torch.linspace(-30, 30, 1 << 22), torch.rand(1 << 20) * 1e-3, edges):
        x = x.cuda()
        assert torch.equal(mufu.ex2(x), ex2_approx(x))
        above_one = 1.0 + x.abs()
        assert torch.equal(mufu.rcp(above_one), rcp_approx(above_one))
