"""On a GPU of SM80 or later: our own Triton kernel against the emulation, right calls and every fault; the operator compiled. `pytest tests -k gpu`."""

from __future__ import annotations

import pytest
import torch

from mxdebug import MxdebugError
from mxdebug.contracts import LINEAR_CONTRACTS
from mxdebug.contracts.cutedsl_w4a16 import by_layout
from mxdebug.diagnosis.linear_output import follows
from mxdebug.faults import LINEAR_FAULTS, LinearSituation
from mxdebug.metrics import compare
from mxdebug.recipes.vllm import CT_NVFP4, MODELOPT
from mxdebug.recipes.w4a16.converted import ConvertedLinear
from mxdebug.recipes.w4a16.examples import SIZES, made_linear
from mxdebug.recipes.w4a16.op import TRITON, implementation, mm_bf16_fp4
from mxdebug.recipes.w4a16.recipe import linear_recipe

ABLE = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not ABLE, reason="not run here: mxdebug's Triton kernel for W4A16 needs a GPU of SM80 or later"),
]


def on_gpu(s: LinearSituation) -> torch.Tensor:
    arguments = s.arguments()
    a, b, scales, alpha = (arguments[n] for n in ("a", "b", "b_descale", "alpha"))
    moved = scales.as_strided((scales.numel(),), (1,)).cuda().as_strided(scales.shape, scales.stride())  # memory as it lies
    return mm_bf16_fp4(a.cuda(), b.cuda(), moved, alpha.cuda()).cpu()


def absolute(s: LinearSituation) -> torch.Tensor:
    return s.recipe.contract.see(s.arguments()).absolute()


@pytest.mark.parametrize("path", LINEAR_CONTRACTS)
@pytest.mark.parametrize("n, k", [*SIZES, (2880, 2880), (5120, 2944)])
@pytest.mark.parametrize("tokens", [1, 7, 256])
def test_gpu_right_calls(path: str, n: int, k: int, tokens: int) -> None:
    layer = made_linear(n, k)
    s = LinearSituation.right(
        linear_recipe(path, MODELOPT), layer, torch.randn(tokens, k, generator=torch.Generator().manual_seed(1)).bfloat16()
    )
    got, want = on_gpu(s), s.build()[1]
    c = compare(got, want)
    print(path[-5:], n, k, tokens, c)
    assert follows(got, want, s.plan.padded[1], absolute(s)) and c.differing <= 0.02 * c.elements


@pytest.mark.parametrize("path", LINEAR_CONTRACTS)
@pytest.mark.parametrize("kind", [MODELOPT, CT_NVFP4])
def test_gpu_gives_the_same_garbage(path: str, kind: str) -> None:
    done = 0
    for parts, k in (((104, 48, 48), 352), ((1440, 720, 720), 2880)):
        layer = made_linear(sum(parts), k, parts=parts, differ=False)
        base = LinearSituation.right(
            linear_recipe(path, kind), layer, torch.randn(33, k, generator=torch.Generator().manual_seed(2)).bfloat16()
        )
        for id, f in LINEAR_FAULTS.items():
            try:
                s = f.inject(base)
            except MxdebugError:
                continue
            want = s.build()[1]
            if want is None or f.kernel:
                continue  # refused, or not about the kernel
            if s.plan.view == "contiguous":
                with pytest.raises(MxdebugError, match="it was copied"):  # our kernel looks at strides; FlashInfer's does not
                    on_gpu(s)
                continue
            done += 1
            got = on_gpu(s)
            assert follows(got, want, s.plan.padded[1], absolute(s)), (id, compare(got, want))
    assert done >= 20


@pytest.mark.parametrize("family", ["sm100", "sm12x"])
def test_gpu_operator_compiles_in_one_graph(family: str) -> None:
    for n, k in SIZES:
        layer, x = made_linear(n, k), torch.randn(2, 3, k, generator=torch.Generator().manual_seed(3)).bfloat16()
        here = ConvertedLinear.convert(layer, family, MODELOPT)
        there = ConvertedLinear(
            {"weight": here.weight.cuda(), "weight_scale": here.weight_scale.cuda(), "alpha": here.weight_global_scale.cuda()},
            n,
            k,
            family,
            layer.bias.cuda(),
        )
        assert there.weight_scale.stride() == here.weight_scale.stride()
        if torch.cuda.get_device_capability()[0] == 9:
            assert implementation(there.weight) == TRITON
        compiled = torch.compile(there, fullgraph=True)(x.cuda())
        assert torch.equal(compiled, there(x.cuda())) and follows(compiled.cpu(), here(x), by_layout(family).sizes(here.weight)[1])
        with pytest.raises(MxdebugError, match="bfloat16"):
            there(x.half().cuda())
        torch._dynamo.reset()
