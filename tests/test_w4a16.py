"""The W4A16 linear path: contract and recipe against vLLM's and FlashInfer's own functions, the laws, the operator, the converted module."""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from mxdebug import MxdebugError, open_checkpoint
from mxdebug.contracts import ALL, LINEAR_CONTRACTS, any_contract, find_linear
from mxdebug.contracts.cutedsl_w4a16 import _SM_COUNTS, PATH, by_layout, gemv
from mxdebug.diagnosis.linear_output import follows, linear_floor
from mxdebug.faults import LINEAR_FAULTS, LinearSituation
from mxdebug.formats import E4M3_SCALE, NVFP4, S0E5M3, recode_e4m3_to_s0e5m3
from mxdebug.metrics import compare
from mxdebug.recipes.vllm import CT_NVFP4, MODELOPT
from mxdebug.recipes.w4a16.converted import MARK, ConvertedLinear
from mxdebug.recipes.w4a16.examples import SIZES, made_linear
from mxdebug.recipes.w4a16.op import assert_fake, mm_bf16_fp4_fake, wrong_fakes
from mxdebug.recipes.w4a16.padding import PackedBytes, elements_of, padding_bytes
from mxdebug.recipes.w4a16.recipe import LINEAR_RECIPES, linear_recipe
from mxdebug.reference_linear import LinearLayer

DATA = Path(__file__).parent / "data"
FAMILIES = ("sm100", "sm12x")


@functools.cache
def maker() -> ModuleType:
    """make_w4a16_golden.py: its cases and made layers. It runs no vLLM here."""
    spec = importlib.util.spec_from_file_location("make_w4a16_golden", DATA / "make_w4a16_golden.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def kept() -> dict[str, Tensor]:
    return load_file(DATA / "vllm-w4a16-linear.safetensors")


def raw(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8) if t.dtype != torch.uint8 else t


CASES = tuple(maker().CASES)


# -- vLLM's own conversion and forward -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", CASES)
def test_conversion_is_vllms_byte_for_byte(name: str) -> None:
    kind, family, *_ = maker().CASES[name]
    layer, x, _ = maker().made(name)
    want = {key.partition(".")[2]: t for key, t in kept().items() if key.startswith(name + ".")}
    assert torch.equal(layer.payload, want["payload"]) and torch.equal(layer.scales, want["scales"])  # the layers that vLLM converted
    plan = linear_recipe(by_layout(family).path, kind).plan(layer)
    got = plan.convert(layer)
    for key, name_ in (("weight", "weight"), ("weight_scale", "weight_scale"), ("alpha", "weight_global_scale")):
        assert got[key].dtype == want[name_].dtype and torch.equal(raw(got[key]), raw(want[name_])), key
    assert list(got["weight_scale"].stride()) == want["strides"].tolist()
    assert plan.weights_padding_bytes == int(want["weights_padding_cols"])
    # vLLM's forward around FlashInfer's trace reference
    ours = ConvertedLinear.convert(layer, family, kind)(x)
    assert ours.shape == want["output"].shape and follows(ours, want["output"], plan.padded[1])
    c = compare(ours, want["output"])
    assert c.cosine > 1 - linear_floor(plan.padded[1]) and abs(c.norm_ratio - 1) < linear_floor(plan.padded[1])


def test_golden_cases_can_show_a_fault() -> None:
    for name in CASES:
        layer, *_ = maker().made(name)
        assert len(layer.scales.unique()) > 20 and len(layer.scales.unique(dim=0)) == layer.n and layer.k > 256 and layer.k // 16 != 16


@pytest.mark.parametrize("n, k", SIZES)
def test_preparation_is_flashinfers(n: int, k: int) -> None:
    fi = pytest.importorskip("flashinfer.gemm.gemm_bf16_fp4_cute_dsl")
    from flashinfer.gemm.gemm_bf16_fp4 import _unswizzle_sf_128x4
    from flashinfer.trace.templates import gemm as traces

    layer = made_linear(n, k)
    for family in FAMILIES:
        plan = linear_recipe(by_layout(family).path, MODELOPT).plan(layer)
        operands, (rows, columns) = plan.convert(layer), plan.padded
        padded = torch.nn.functional.pad(layer.payload, (0, columns // 2 - k // 2, 0, rows - n))
        scales = torch.nn.functional.pad(layer.scales, (0, columns // 16 - k // 16, 0, -(-n // 128) * 128 - n))
        swizzled = by_layout("sm100").operand("weight_scale").layout.pack(scales).flatten()
        assert torch.equal(_unswizzle_sf_128x4(swizzled, rows, columns // 16), scales[:rows])
        want = (fi._prepare_cute_dsl_sm12x if family == "sm12x" else fi._prepare_cute_dsl_sm100)(padded, swizzled, operands["alpha"], 16)
        assert torch.equal(want[0], operands["weight"]) and torch.equal(want[1], operands["weight_scale"].view(torch.uint8))
        arguments = plan.arguments(operands, torch.randn(5, k, generator=torch.Generator().manual_seed(1)))
        reference = traces._mm_bf16_fp4_cute_dsl_reference if family == "sm12x" else traces._mm_bf16_fp4_cute_dsl_sm100_reference
        assert follows(
            plan.contract.emulate(arguments),
            reference(*(arguments[a] for a in ("a", "b", "b_descale", "alpha"))).to(torch.bfloat16),
            columns,
            plan.contract.see(arguments).absolute(),
        )


# -- laws -----------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 300), st.integers(1, 40), st.sampled_from(LINEAR_RECIPES), st.integers(1, 3), st.integers(0, 2**31))
def test_laws(n: int, blocks: int, recipe: object, parts: int, seed: int) -> None:
    """decode(recipe(x)) == canonical(x), and recipe(decode(y)) == y."""
    parts = min(parts, n)
    rows = (*[1] * (parts - 1), n - parts + 1)
    layer = made_linear(n, 16 * blocks, parts=rows, seed=seed)
    plan = recipe.plan(layer)
    operands, want = plan.convert(layer), plan.canonical(layer)
    seen = plan.contract.see(plan.arguments(operands, torch.zeros(1, layer.k)))
    decoded = seen.weight.dequantise(torch.float64, seen.scale) * seen.alpha.double()
    assert torch.equal(
        decoded[:n, : layer.k], want.weight.dequantise(torch.float64) / want.global_scales[0].double() * seen.alpha.double()
    ) or torch.equal(decoded[:n, : layer.k].float(), want.weight.dequantise())
    assert not decoded[n:].any() and not decoded[:, layer.k :].any()
    back = plan.invert(operands, layer)
    assert (
        torch.equal(back.payload, layer.payload)
        and torch.equal(back.scales, layer.scales)
        and torch.equal(back.global_scales, want.global_scales)
    )
    again = plan.convert(back)
    assert all(torch.equal(raw(again[key]), raw(operands[key])) for key in operands)


def test_global_scale_of_joined_parts() -> None:
    """ModelOpt stores multipliers, of which vLLM takes the largest; compressed-tensors divisors, of which it takes the largest too: the smallest multiplier."""
    layer = replace(made_linear(128, 384, parts=(64, 64)), global_scales=torch.tensor([0.25, 0.5]))
    for kind, want in ((MODELOPT, 0.5), (CT_NVFP4, 0.25)):
        for path in LINEAR_CONTRACTS:
            assert linear_recipe(path, kind).plan(layer).global_scale(layer).tolist() == [want]


def test_s0e5m3_of_flashinfer_is_exact() -> None:
    """All 127 E4M3 scales that are not negative, by the values of torch's own cast; Marlin's recoding loses the seven subnormal ones and is 2^7 larger."""
    codes = torch.arange(127, dtype=torch.uint8)
    values = codes.view(torch.float8_e4m3fn).float()
    assert torch.equal(S0E5M3.decode(recode_e4m3_to_s0e5m3(codes)), values)
    plan = linear_recipe(by_layout("sm12x").path, MODELOPT).plan(made_linear(64, 64))
    layer = replace(made_linear(64, 64), scales=codes[:64].reshape(64, 1).repeat(1, 4).contiguous())
    for how, lost in (("exact", 0), ("small scales flushed", 7)):
        got = S0E5M3.decode(plan.edit(recode=how).convert_scales(layer))[0]
        assert int(((got == 0) & (values[:64] > 0)).sum()) == lost
        assert torch.equal(got[8:], values[8:64])
    marlin = S0E5M3.decode(plan.edit(recode="Marlin's").convert_scales(layer))[0]
    assert torch.equal(marlin[8:], values[8:64] * 128) and not marlin[:8].any()


def test_padding_has_a_unit() -> None:
    assert padding_bytes(336) == 24 and elements_of(PackedBytes(24)) == 48 and padding_bytes(384) == 0
    plan = linear_recipe(by_layout("sm100").path, MODELOPT).plan(made_linear(128, 336))
    assert plan.activations(torch.ones(1, 336)).shape == (1, 384)


# -- the contract ----------------------------------------------------------------------------------------------------


def arguments(family: str, n: int = 100, k: int = 336, tokens: int = 3) -> dict[str, object]:
    layer = made_linear(n, k)
    plan = linear_recipe(by_layout(family).path, MODELOPT).plan(layer)
    return plan.arguments(plan.convert(layer), torch.randn(tokens, k, generator=torch.Generator().manual_seed(0)))


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_find_their_contract(family: str) -> None:
    args = arguments(family)
    assert find_linear("mm_bf16_fp4", args).path == f"{PATH}/{family}"
    assert find_linear("cutlass_fused_moe", {}) is None
    with pytest.raises(MxdebugError, match="another backend"):
        find_linear("mm_bf16_fp4", {**args, "backend": "cudnn"})
    with pytest.raises(MxdebugError, match="sm100 or sm12x"):
        by_layout("sm90")
    with pytest.raises(MxdebugError, match="one of "):
        any_contract("nvfp4_w4a16/none")
    assert all(str(c).startswith(path) for path, c in ALL.items())


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "change, match",
    [
        ({"a": lambda t: t.half()}, r"activations \(a\): expected torch.bfloat16.*got torch.float16.*FP16"),
        ({"a": lambda t: t[:, :360]}, r"shape \[M, 384\].*\[3, 360\].*payload bytes"),
        ({"a": lambda t: t[0]}, r"shape \[M, 384\]"),
        ({"b": lambda t: t.T.contiguous()}, "multiple of 64|K 320|K 1536|bytes"),
        ({"b": lambda t: t[None]}, "several experts"),
        ({"b": lambda t: t[:, ::2]}, "multiple of 64|bytes|strides|shape"),
        ({"b_descale": lambda t: t.float()}, "cast by value"),
        ({"b_descale": lambda t: t[:16]}, "bytes for N 128"),
        ({"b_descale": lambda t: None}, "got none"),
        ({"alpha": lambda t: t.repeat(2)}, "one for each|one number"),
        ({"alpha": lambda t: t.int()}, "global scale of another dtype"),
    ],
)
def test_refused_calls(family: str, change: dict, match: str) -> None:
    args = arguments(family)
    ((key, f),) = change.items()
    with pytest.raises(MxdebugError, match=match):
        by_layout(family).emulate({**args, key: f(args[key])})


def test_a_view_that_was_made_contiguous_is_read_as_memory_has_it() -> None:
    c, args = by_layout("sm100"), arguments("sm100")
    wrong = {**args, "b_descale": args["b_descale"].contiguous()}
    assert torch.equal(wrong["b_descale"].view(torch.uint8), args["b_descale"].view(torch.uint8))  # the same values under the same indices
    assert compare(c.emulate(wrong), c.emulate(args)).relative_l2 > 0.5
    flat = {**args, "b_descale": args["b_descale"].permute(5, 2, 4, 0, 1, 3).reshape(128, 24)}  # vLLM's 2-D bytes: a pointer is a pointer
    assert torch.equal(c.emulate(flat), c.emulate(args))


def test_alpha_may_be_left_out_and_multiplies_the_sums() -> None:
    for family in FAMILIES:
        c, args = by_layout(family), arguments(family)
        assert torch.equal(c.emulate({**args, "alpha": None}), c.emulate({**args, "alpha": torch.ones(1)}))
        assert torch.equal(c.emulate({**args, "alpha": args["alpha"] * 2}), c.emulate(args) * 2)


def test_sm12x_multiplies_in_fp16_but_for_one_token_of_a_large_layer() -> None:
    for n, tokens, finite in ((100, 3, False), (100, 1, False), (1024, 3, False), (1024, 1, True)):
        k = 336 if n == 100 else 1024
        args = arguments("sm12x", n=n, k=k, tokens=tokens)
        args["a"][0, 5] = 2.0**17
        assert bool(torch.isfinite(by_layout("sm12x").emulate(args)[0]).all()) == finite
        args = arguments("sm100", n=n, k=k, tokens=tokens)
        args["a"][0, 5] = 2.0**17
        assert bool(torch.isfinite(by_layout("sm100").emulate(args)).all())


def test_gemv_is_where_flashinfer_takes_it() -> None:
    fi = pytest.importorskip("flashinfer.gemm.gemm_bf16_fp4_cute_dsl")
    sizes = torch.randint(1, 400, (200, 2), generator=torch.Generator().manual_seed(0)).tolist()
    for n, k in ((256, 384), (5760, 2880), (512, 2048), *((64 * a, 64 * b) for a, b in sizes)):
        untuned = any(fi._select_bf16_fp4_gemv_split(n, k, 12, sms) is not None for sms in _SM_COUNTS)
        tuned = any(
            c[7] == "gemv" and 12 <= n // 64 * c[5] / sms <= 96
            for sms in _SM_COUNTS
            for c in fi._bf16_fp4_cute_dsl_tactic_configs(n, k, sms)
        )
        assert gemv(n, k) == (untuned or tuned), (n, k)
    assert not gemv(256, 384) and gemv(5760, 2880)


def test_run_says_what_is_missing() -> None:
    if torch.cuda.is_available() and torch.cuda.get_device_capability()[0] >= 10:
        pytest.skip("this machine has the GPU")
    for family in FAMILIES:
        with pytest.raises(MxdebugError, match="this machine: expected .* needs a GPU of SM"):
            by_layout(family).run(arguments(family))


def test_refused_layers() -> None:
    r = LINEAR_RECIPES[0]
    with pytest.raises(MxdebugError, match="multiple of 16"):
        r.plan(
            LinearLayer(
                torch.zeros(64, 12, dtype=torch.uint8),
                torch.zeros(64, 3, dtype=torch.uint8),
                replace(NVFP4, block=8),
                ("w",),
                (64,),
                torch.ones(1),
            )
        )
    coarse = LinearLayer(
        torch.zeros(64, 32, dtype=torch.uint8), torch.ones(64, 2, dtype=torch.uint8), replace(NVFP4, block=32), ("w",), (64,), torch.ones(1)
    )
    with pytest.raises(MxdebugError, match="group size: expected 16"):
        r.plan(coarse).convert(coarse)
    with pytest.raises(MxdebugError, match="one of vllm"):
        linear_recipe("nvfp4_w4a16/none", MODELOPT)


# -- the operator ----------------------------------------------------------------------------------------------------


def test_fake_gives_the_kernels_shape() -> None:
    assert wrong_fakes(mm_bf16_fp4_fake) == [] and wrong_fakes(torch.ops.mxdebug.mm_bf16_fp4) == []
    assert_fake(mm_bf16_fp4_fake)


@pytest.mark.parametrize(
    "broken, layout",
    [
        (lambda a, b, s, g: a.new_empty(a.shape[0], b.shape[0]), "sm12x"),
        (lambda a, b, s, g: a.new_empty(a.shape[0], b.shape[1] // 2), "sm100"),
        (
            lambda a, b, s, g: a.new_empty(a.shape[0], b.shape[0] if b.dtype == torch.uint8 else b.shape[1] // 2, dtype=torch.float32),
            "torch.float32",
        ),
        (lambda a, b, s, g: 1 / 0, "ZeroDivisionError"),
        (lambda a, b, s, g: None, "NoneType"),
        (lambda a, b, s, g: mm_bf16_fp4_fake(a, b, s, g).to("meta"), "on meta"),
        (lambda a, b, s, g: mm_bf16_fp4_fake(a, b, s, g).T.contiguous().T, "strides"),
        (lambda a, b, s, g: mm_bf16_fp4_fake(a.mul_(0), b, s, g), "writes into"),
        (lambda a, b, s, g: a[:, : mm_bf16_fp4_fake(a, b, s, g).shape[1]], "a view of an input"),
    ],
)
def test_wrong_fakes_are_named(broken: object, layout: str) -> None:
    with pytest.raises(MxdebugError, match=layout):
        assert_fake(broken)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("n, k", SIZES)
def test_traces_without_a_graph_break(family: str, n: int, k: int) -> None:
    module, x = (
        ConvertedLinear.convert(made_linear(n, k), family, MODELOPT),
        torch.randn(2, 3, k, generator=torch.Generator().manual_seed(2)).bfloat16(),
    )
    assert torch.equal(torch.compile(module, fullgraph=True, backend="aot_eager")(x), module(x))
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = module(mode.from_tensor(x))
    assert tuple(fake.shape) == (2, 3, n) and fake.dtype == torch.bfloat16
    torch._dynamo.reset()


@pytest.mark.parametrize("family", FAMILIES)
def test_operator_is_registered_well(family: str) -> None:
    args = arguments(family)
    torch.library.opcheck(torch.ops.mxdebug.mm_bf16_fp4, (args["a"], args["b"], args["b_descale"].view(torch.uint8), args["alpha"]))


def test_fp16_is_refused_before_anything_is_computed() -> None:
    module = ConvertedLinear.convert(made_linear(128, 336), "sm100", MODELOPT)
    with pytest.raises(
        MxdebugError, match="expected torch.bfloat16, got torch.float16.*vLLM selects this kernel without looking at the dtype"
    ):
        module(torch.randn(2, 336).half())
    with pytest.raises(MxdebugError, match="padded already"):
        module(torch.randn(2, 384).bfloat16())
    module.weight = torch.empty(0, device="meta")  # nothing may look at it
    with pytest.raises(MxdebugError, match="bfloat16"):
        module(torch.randn(2, 336).half())


# -- the converted module ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_state_dict_comes_back_and_is_no_checkpoint(family: str, tmp_path: Path) -> None:
    layer = made_linear(160, 336)
    module, x = ConvertedLinear.convert(layer, family, MODELOPT), torch.randn(4, 336, generator=torch.Generator().manual_seed(3)).bfloat16()
    file = tmp_path / "layer.safetensors"
    save_file({k: v.contiguous() for k, v in module.state_dict().items()}, file)  # a file keeps no strides
    with safe_open(file, "pt") as f:
        assert MARK in f.keys()
    back = ConvertedLinear.from_state_dict(load_file(file))
    assert torch.equal(back(x), module(x)) and back.weight_scale.stride() == module.weight_scale.stride()
    assert (back.n, back.k, back.weights_padding_bytes, back.activations_padding) == (160, 336, 24, 48)
    with pytest.raises(MxdebugError, match="a layer converted by mxdebug for FlashInfer CuTe-DSL W4A16"):
        open_checkpoint(file)
    torch.save(module.state_dict(), tmp_path / "layer.pt")
    assert torch.equal(ConvertedLinear.from_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))(x), module(x))


def test_other_state_dicts_are_refused() -> None:
    module = ConvertedLinear.convert(made_linear(128, 336), "sm100", MODELOPT)
    state = module.state_dict()
    for broken, match in (
        ({k: v for k, v in state.items() if k != MARK}, "a checkpoint's tensors"),
        ({**state, MARK: torch.tensor([1, 90, 1, 1])}, "a checkpoint's tensors"),
        ({**state, "weight_scale": state["weight_scale"].flatten()}, "6-D view"),
        ({**state, "weight": state["weight"][:64]}, "tensors of two layers"),
    ):
        with pytest.raises(MxdebugError, match=match):
            ConvertedLinear.from_state_dict(broken)


def test_forward_is_what_the_checkpoint_means_up_to_rounding() -> None:
    """One bf16 result, and the bias added in bf16: each at most half a step of 2^-8, so 2^-8 together at most."""
    for family in FAMILIES:
        for n, k in SIZES:
            layer, x = made_linear(n, k), torch.randn(7, k, generator=torch.Generator().manual_seed(4)).bfloat16()
            c = compare(ConvertedLinear.convert(layer, family, MODELOPT)(x).double(), layer.forward(x))
            assert c.relative_l2 <= 2.0**-8 and c.cosine >= 1 - 2.0**-16 and abs(c.norm_ratio - 1) <= 2.0**-8


def test_made_layers_have_every_scale() -> None:
    scales = made_linear(160, 320).scales
    assert scales.unique().tolist() == list(range(127))
    values = E4M3_SCALE.decode(scales)
    assert values.min() == 0 and values[values > 0].min() == 2.0**-9 and values.max() == 448
    factors = made_linear(96, 320, parts=(32, 32, 32)).global_scales
    assert factors.argmax() == 1 and factors.argmin() == 2


# -- what engines say -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("ValueError: FlashInfer CuTe-DSL W4A16 requires BF16 input, got torch.float16", "activations-not-bf16"),
        ("ValueError: b12x NVFP4 W4A16 requires BF16 input, got torch.float16", "activations-not-bf16"),
        ("ValueError: a.shape[1]=368 but b.shape=(256, 192) encodes K=384", "x-padded-by-bytes"),
        ("ValueError: a.shape[1]=352 but k inferred from prepared b.shape=(24, 512) is 384", "x-not-padded"),
        ("ValueError: b_descale has 2816 bytes but the 128x4-swizzled layout for N=256, K_sf=24 requires at least 6144", "group-32-as-16"),
        (
            "ValueError: cute-dsl bf16 x fp4 on SM100 expects the torch.uint8 weight returned by prepare_bf16_fp4_weights(..., backend='cute-dsl'); got torch.int32.",
            "state dict",
        ),
        (
            "In NVFP4 linear, the global weight scale differs across parallel layers (e.g. q_proj, k_proj, v_proj). This will likely reduce accuracy.",
            "global-shared-by-parts",
        ),
        (
            "In NVFP4 linear, the weight global scale is different for parallel layers (e.g. q_proj, k_proj, v_proj).",
            "global-shared-by-parts",
        ),
        ("ValueError: CutlassNvFp4LinearKernel does not support W4A16", "BATCH_INVARIANT"),
        (
            "RuntimeError: The size of tensor a (256) must match the size of tensor b (200) at non-singleton dimension 1",
            "bias-before-slice",
        ),
    ],
)
def test_symptoms(text: str, fault: str) -> None:
    from click.testing import CliRunner

    from mxdebug.cli import main

    out = CliRunner().invoke(main, ["symptom", text])
    assert out.exit_code == 0 and fault in out.output, out.output


def test_symptoms_are_what_flashinfer_says() -> None:
    """Its own refusals on a CPU, word for word."""
    gemm = pytest.importorskip("flashinfer.gemm.gemm_bf16_fp4")
    from mxdebug.recipes.w4a16.symptoms import symptom

    with pytest.raises(ValueError, match="b_descale has") as error:
        gemm.prepare_bf16_fp4_weights(
            torch.zeros(256, 192, dtype=torch.uint8), torch.zeros(200, 22, dtype=torch.uint8), None, backend="cute-dsl"
        )
    assert "group-32-as-16" in symptom(str(error.value))


def test_weights_beyond_fp16_are_inf_on_sm12x() -> None:
    """Scales in Marlin's code are 2^7 too large to SM12x: 6 * 448 * 2^7 = 344064 is above 65504, and half2_mul makes it inf.

    On an H200 the Triton kernel, which multiplies in fp16 as well, gave NaN in the same places (bf16 outputs of 200 x 352, 33 tokens).
    """
    layer = made_linear(200, 352, parts=(104, 48, 48), differ=False)
    x = torch.randn(33, 352, generator=torch.Generator().manual_seed(2)).bfloat16()
    base = LinearSituation.right(linear_recipe("nvfp4_w4a16/flashinfer_cutedsl/sm12x", MODELOPT), layer, x)
    seen = base.recipe.contract.see((s := LINEAR_FAULTS["scales-recoded-for-marlin"].inject(base)).arguments())
    weights = seen.weight.dequantise(torch.float64, seen.scale)
    struck = (weights.abs() > 65504).any(1)
    output = s.build()[1]
    assert struck.any() and not struck.all()
    assert not torch.isfinite(output[:, struck]).any() and torch.isfinite(output[:, ~struck]).all()
    assert torch.isfinite(base.build()[1]).all()
