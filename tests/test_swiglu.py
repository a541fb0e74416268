"""Does vLLM pass what a model means, and do we say where each value came from?

Expected values are read from the sources named beside them (vLLM 0.33; FlashInfer 0.7.4; vLLM #48929 as merged).
MiniMax-M3 states alpha 1.702, beta 1, limit 7; gpt-oss states a limit only; DeepSeek-V4 states limit 10 with SILU.
"""

from __future__ import annotations

import ast
import importlib.util
import re
from pathlib import Path

import pytest
import torch

from mxdebug.checkpoints.settings import GPT_OSS, Config, read_activation
from mxdebug.errors import MxdebugError
from mxdebug.recipes.swiglu import FIX, SUPPORTED, SYMPTOMS, V033, VERSIONS, Passed, lands_on, parameters, shape_candidates, symptom

M3 = {"swiglu_alpha": 1.702, "swiglu_beta": 1.0, "swiglu_limit": 7.0}
UN = "SWIGLUOAI_UNINTERLEAVE"
CUTLASS_MXFP4 = [p for p in SUPPORTED if "CUTLASS_MXFP4" in p]
TRTLLM_MXFP4 = [p for p in SUPPORTED if "TRTLLM_MXFP4" in p]
MARLIN = ["mxfp4/MARLIN", "nvfp4/MARLIN"]
METHODS = {"mxfp4": ("mxfp4", "fp8", "compressed-tensors", "quark", "online"),
           "nvfp4": ("modelopt", "modelopt_fp4", "compressed-tensors", "quark", "online")}


def passed(path: str, activation: str, method: str | None, model: dict | None = None, *, version: str = V033,
           model_type: str = "minimax_m3_text", **carried: float) -> Passed:
    quant = {**({"quant_method": method} if method else {}), **carried}
    return parameters(path, activation=activation, quant_config=quant or None, model_config=M3 if model is None else model,
                      model_type=model_type, version=version)


def values(p: Passed) -> tuple[float | None, ...]:
    return p.alpha.value, p.beta.value, p.limit.value


# -- vLLM 0.33 --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", CUTLASS_MXFP4 + TRTLLM_MXFP4 + ["mxfp4/MARLIN"])
def test_gpt_oss_constants_ignore_the_config(path: str) -> None:
    # GptOssMxfp4MoEMethod.get_fused_moe_quant_config writes 1.702, 1.0, 7.0; Marlin's swigluoai_and_mul has them in the operation.
    p = passed(path, "SWIGLUOAI", "mxfp4", {"swiglu_limit": 9.0}, model_type="gpt_oss")
    assert values(p) == (1.702, 1.0, 7.0)
    assert p.unused == ("limit",)
    where = "fixed in swigluoai_and_mul" if "MARLIN" in path else "vLLM's constant for gpt-oss (quantization/mxfp4.py GptOssMxfp4MoEMethod)"
    assert all(v.source.startswith(where) for v in (p.alpha, p.beta, p.limit))
    assert "unused: config.json states swiglu_limit 9, the kernel computes with 7" in p.explain()


def test_the_constants_are_for_gpt_oss_only() -> None:
    p = passed(CUTLASS_MXFP4[0], "SILU", "mxfp4", {"swiglu_limit": 10.0}, model_type="deepseek_v4")
    assert values(p) == (None, None, 10.0)
    assert p.unused == ()


@pytest.mark.parametrize("path", ["nvfp4/FLASHINFER_CUTLASS", "nvfp4/FLASHINFER_CUTEDSL", "nvfp4/MARLIN"])
def test_nvfp4_silu_passes_the_limit_only(path: str) -> None:
    p = passed(path, "SILU", "modelopt")
    assert values(p) == (None, None, 7.0)
    assert p.alpha.source.startswith("not passed: SILU passes the limit only (")
    assert p.unused == ("alpha", "beta")
    assert values(passed(path, UN, "modelopt")) == (1.702, 1.0, 7.0)


@pytest.mark.parametrize("path", CUTLASS_MXFP4 + ["nvfp4/FLASHINFER_TRTLLM"])
def test_these_pass_all_three_for_silu_too(path: str) -> None:
    # FlashInferExperts.apply sets all three again in its mxfp4 branch; TrtLlmNvFp4ExpertsBase never looks at the activation.
    assert values(passed(path, "SILU", "quark")) == (1.702, 1.0, 7.0)


@pytest.mark.parametrize(("path", "method", "want"), [
    # Mxfp4MoEMethod hands on swiglu_limit alone, and FlashInferExperts of 0.33 asks nobody else: #48929 once more, for MXFP4.
    (CUTLASS_MXFP4[0], "mxfp4", (None, None, 7.0)), (CUTLASS_MXFP4[1], "compressed-tensors", (None, None, 7.0)),
    (CUTLASS_MXFP4[0], "quark", (1.702, 1.0, 7.0)), (CUTLASS_MXFP4[0], "online", (1.702, 1.0, 7.0)),
    # Nvfp4OnlineMoEMethod hands on the limit alone. TRT-LLM and Marlin fall back to the model config, the others do not.
    ("nvfp4/FLASHINFER_CUTLASS", "online", (None, None, 7.0)), ("nvfp4/FLASHINFER_CUTEDSL", "online", (None, None, 7.0)),
    ("nvfp4/FLASHINFER_TRTLLM", "online", (1.702, 1.0, 7.0)), ("nvfp4/MARLIN", "online", (1.702, 1.0, 7.0)),
    # CompressedTensorsW4A4Mxfp4MoEMethod hands on nothing; Marlin's fallback brings all three.
    ("mxfp4/MARLIN", "compressed-tensors", (1.702, 1.0, 7.0)),
])
def test_what_each_method_hands_on(path: str, method: str, want: tuple[float | None, ...]) -> None:
    p = passed(path, UN, method)
    assert values(p) == want
    assert p.unused == tuple(n for n, v in zip(("alpha", "beta", "limit"), want) if v is None)
    if want[0] is None:
        assert "does not hand on swiglu_alpha; the model config is not asked" in p.alpha.source
        assert p.computes(2).alpha is None


def test_provenance_names_the_place_in_config_json() -> None:
    p = passed("nvfp4/MARLIN", UN, "online", {"text_config": M3})
    assert p.limit.source == "config.json text_config.swiglu_limit, handed on by online/nvfp4.py Nvfp4OnlineMoEMethod"
    assert p.alpha.source == ("config.json text_config.swiglu_alpha, by way of the model config: online/nvfp4.py Nvfp4OnlineMoEMethod "
                              "does not hand on swiglu_alpha (fused_moe/activation.py apply_moe_activation)")


def test_compressed_tensors_marlin_depends_on_the_activations_bits() -> None:
    # CompressedTensorsMoEMethod.get_moe_method asks for 8-bit inputs first; that method is an Mxfp4MoEMethod and hands on the limit.
    def limit(bits: int | None) -> str:
        inputs = None if bits is None else {"num_bits": bits}
        groups = {"group_0": {"weights": {"num_bits": 4}, "input_activations": inputs}}
        return parameters("mxfp4/MARLIN", activation="SILU", quant_config={"quant_method": "compressed-tensors", "config_groups": groups},
                          model_config=M3, model_type=None, version=V033).limit.source

    assert "handed on by CompressedTensorsW4A8Mxfp4MoEMethod" in limit(8)
    for bits in (None, 4):
        assert "CompressedTensorsW4A4Mxfp4MoEMethod does not hand on swiglu_limit" in limit(bits)


def test_marlin_needs_a_limit_and_says_so_as_vllm_does() -> None:
    for path in MARLIN:
        with pytest.raises(MxdebugError, match="requires clamp_limit") as error:
            passed(path, UN, "quark", {"swiglu_alpha": 1.702})
        assert symptom(str(error.value)) is not None
        p = passed(path, UN, "quark", {"swiglu_limit": 7.0})
        assert values(p) == (1.0, 0.0, 7.0)  # ApplyMoEActivationConfig.from_configs
        assert p.alpha.source == "plain SiLU's value, since neither config gives one"


# -- #48929 -----------------------------------------------------------------------------------------------------

OWN = {"gemm1_alpha": 2.0, "gemm1_beta": 0.5, "gemm1_clamp_limit": 6.0}  # the values of the fix's own test


@pytest.mark.parametrize("path", [*CUTLASS_MXFP4, "nvfp4/FLASHINFER_CUTLASS", *MARLIN])
def test_the_fix_takes_quantisation_config_then_model_config(path: str) -> None:
    assert values(passed(path, UN, None, version=FIX)) == (1.702, 1.0, 7.0)
    p = passed(path, UN, None, version=FIX, **OWN)
    assert values(p) == (2.0, 0.5, 6.0)
    assert p.limit.source == "quantisation config, gemm1_clamp_limit"
    mixed = passed(path, UN, None, version=FIX, gemm1_alpha=2.0)
    assert values(mixed) == (2.0, 1.0, 7.0)
    assert mixed.limit.source.startswith("config.json swiglu_limit, by way of the model config")


def test_the_fix_gives_gpt_oss_constants_to_every_mxfp4_model_and_to_no_nvfp4_one() -> None:
    mxfp4 = passed(CUTLASS_MXFP4[1], "SILU", None, {"swiglu_limit": 10}, version=FIX, model_type="deepseek_v4")
    assert values(mxfp4) == (1.702, 1.0, 10.0)  # wrong for DeepSeek-V4, which is plain SiLU with a limit; #48303 took it out
    assert "given to every MXFP4 model" in mxfp4.alpha.source
    assert values(passed("nvfp4/FLASHINFER_CUTLASS", UN, None, {}, version=FIX)) == (None, None, None)


def test_the_fix_silu_passes_the_limit_only_on_nvfp4() -> None:
    assert values(passed("nvfp4/FLASHINFER_CUTLASS", "SILU", None, version=FIX)) == (None, None, 7.0)
    assert values(passed("nvfp4/FLASHINFER_CUTLASS", "SWIGLUOAI", None, version=FIX)) == (1.702, 1.0, 7.0)


def test_033_no_longer_falls_back_on_cutlass() -> None:
    # The difference between the two versions in one line: nothing in the quantisation config but a limit, all three in the model's.
    for path in ("nvfp4/FLASHINFER_CUTLASS", *CUTLASS_MXFP4):
        assert values(passed(path, UN, None, version=FIX, gemm1_clamp_limit=7.0)) == (1.702, 1.0, 7.0)
        assert values(passed(path, UN, None, version=V033, gemm1_clamp_limit=7.0)) == (None, None, 7.0)


# -- what the kernel gets ---------------------------------------------------------------------------------------


def test_tensors_are_float32_one_for_each_expert() -> None:
    t = passed(CUTLASS_MXFP4[0], "SWIGLUOAI", "mxfp4", {}, model_type="gpt_oss").tensors(3)
    assert {n: (v.dtype, v.tolist()) for n, v in t.items()} == {
        "alpha": (torch.float32, [torch.tensor(1.702).item()] * 3), "beta": (torch.float32, [1.0] * 3), "limit": (torch.float32, [7.0] * 3)}
    assert passed("nvfp4/FLASHINFER_CUTLASS", "SILU", "modelopt").tensors(2)["alpha"] is None


def test_trtllm_nvfp4_divides_limit_and_beta_by_g1_alphas() -> None:
    p = passed("nvfp4/FLASHINFER_TRTLLM", UN, "modelopt")
    t = p.tensors(2, torch.tensor([0.5, 2.0]))
    assert t["limit"].tolist() == [14.0, 3.5]  # 7 / 0.5, 7 / 2
    assert t["beta"].tolist() == [2.0, 0.5]  # 1 / 0.5, 1 / 2
    assert t["alpha"].tolist() == [torch.tensor(1.702).item()] * 2  # applied to the scaled gate
    assert values(p) == (1.702, 1.0, 7.0)
    assert "divided by g1_alphas" in p.explain()


def test_folding_is_the_same_function() -> None:
    # The kernel clamps and shifts raw sums x, then scales by g: g * (clamp(x, limit/g) + beta/g) == clamp(g x, limit) + beta.
    # Exact where g is a power of two.
    p, g = passed("nvfp4/FLASHINFER_TRTLLM", UN, "modelopt"), torch.tensor([0.25, 4.0])
    t, x = p.tensors(2, g), torch.linspace(-64, 64, 257)
    for e in range(2):
        limit, beta = t["limit"][e], t["beta"][e]
        assert torch.equal(g[e] * (x.clamp(-limit, limit) + beta), (g[e] * x).clamp(-7.0, 7.0) + 1.0)


@pytest.mark.parametrize("g", [None, torch.tensor([1.0, 0.0]), torch.tensor([1.0, float("nan")]), torch.ones(3), torch.ones(2).double()])
def test_g1_alphas_must_be_known(g: torch.Tensor | None) -> None:
    with pytest.raises(MxdebugError, match="g1_alphas"):
        passed("nvfp4/FLASHINFER_TRTLLM", UN, "modelopt").tensors(2, g)


def test_g1_alphas_are_refused_where_nothing_is_folded() -> None:
    with pytest.raises(MxdebugError, match="g1_alphas for nvfp4/FLASHINFER_CUTLASS: expected none"):
        passed("nvfp4/FLASHINFER_CUTLASS", UN, "modelopt").tensors(2, torch.ones(2))


def test_a_layer_without_gate_has_no_parameters() -> None:
    p = passed("nvfp4/FLASHINFER_TRTLLM", "RELU2_NO_MUL", "modelopt")
    assert values(p) == (None, None, None)
    assert p.computes(2).kind == "relu2"


def test_computes_is_what_the_checkpoint_means_for_gpt_oss() -> None:
    config = Config(Path("gpt-oss/config.json"), {"model_type": "gpt_oss", "hidden_act": "silu", "swiglu_limit": 7.0})
    meant = read_activation(config, GPT_OSS, 4).activation
    for path in (*CUTLASS_MXFP4, *TRTLLM_MXFP4, "mxfp4/MARLIN"):
        got = passed(path, "SWIGLUOAI", "mxfp4", {"swiglu_limit": 7.0}, model_type="gpt_oss").computes(4)
        assert got.kind == meant.kind
        assert all(torch.equal(getattr(got, n), getattr(meant, n)) for n in ("alpha", "beta", "limit"))


def test_lost_parameters_leave_plain_silu() -> None:
    assert passed("nvfp4/FLASHINFER_CUTLASS", UN, "modelopt", {}).computes(2).kind == "silu"
    assert passed("nvfp4/FLASHINFER_CUTLASS", "SILU", "modelopt", {"swiglu_limit": 7.0}).computes(2).kind == "swiglu"


def test_parameters_of_gelu() -> None:
    # CUTLASS's GLUAdaptor ignores them, though MXFP4 passes them; TRT-LLM's GeGlu applies them, which no reference does.
    p = passed(CUTLASS_MXFP4[0], "GELU_TANH", "quark")
    assert values(p) == (1.702, 1.0, 7.0)
    assert p.unused == ("alpha", "beta", "limit")
    assert p.computes(2).kind == "gelu"
    with pytest.raises(MxdebugError, match="parameters of GELU_TANH"):
        passed("nvfp4/FLASHINFER_TRTLLM", "GELU_TANH", "modelopt").computes(2)


@pytest.mark.parametrize("path", SUPPORTED)
def test_every_value_says_where_it_came_from(path: str) -> None:
    seen = 0
    for version in VERSIONS:
        for activation in SUPPORTED[path]:
            for method in METHODS[path.split("/")[0]]:
                for model in ({}, {"swiglu_limit": 7.0}, M3):
                    try:
                        p = passed(path, activation, method, model, version=version)
                    except MxdebugError:
                        continue
                    seen += 1
                    for v in (p.alpha, p.beta, p.limit):
                        assert v.source.startswith("not passed: ") == (v.value is None), (p.explain(), v)
                    assert str(p).splitlines()[0] == f"{path}, {activation}, vLLM {version}; the kernel takes {p.form}"
    assert seen >= 15


def test_explain() -> None:
    assert passed(CUTLASS_MXFP4[0], UN, "mxfp4").explain() == """\
mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16, SWIGLUOAI_UNINTERLEAVE, vLLM 0.33; the kernel takes float32 [experts of this rank]
  alpha -      not passed: quantization/mxfp4.py Mxfp4MoEMethod does not hand on swiglu_alpha; the model config is not asked \
(experts/flashinfer_cutlass_moe.py apply)
  beta  -      not passed: quantization/mxfp4.py Mxfp4MoEMethod does not hand on swiglu_beta; the model config is not asked \
(experts/flashinfer_cutlass_moe.py apply)
  limit 7      config.json swiglu_limit, handed on by quantization/mxfp4.py Mxfp4MoEMethod
  unused: config.json states swiglu_alpha 1.702, the kernel computes with 1
  unused: config.json states swiglu_beta 1, the kernel computes with 0"""


@pytest.mark.parametrize(("change", "match"), [
    ({"path": "mxfp4/FLASHINFER_CUTLASS"}, "path: expected one of"),
    ({"activation": "SWIGLUSTEP"}, "vLLM does not take this path"),
    ({"activation": "swigluoai"}, "vLLM does not take this path"),
    ({"path": "nvfp4/FLASHINFER_TRTLLM", "activation": "SITU"}, "no reference"),
    ({"path": "nvfp4/MARLIN", "activation": "SWIGLUSTEP"}, "no reference"),
    ({"version": "0.34"}, "version: expected one of 0.33, #48929 for"),
    ({"path": "nvfp4/FLASHINFER_CUTEDSL", "version": FIX}, "changed FlashInfer CUTLASS and Marlin only"),
    ({"quant_config": None}, "quant_method"),
    ({"quant_config": {"quant_method": "awq"}}, "quant_method"),
    ({"quant_config": {"quant_method": "modelopt", "swiglu_limit": 7.0}}, "vLLM reads no swiglu_"),
    ({"quant_config": {"gemm1_alpha": "1.7"}}, "gemm1_alpha: expected a finite float32"),
    ({"quant_config": {"gemm1_alpha": True}}, "gemm1_alpha: expected a finite float32"),
    ({"model_config": {"swiglu_limit": float("nan")}}, "swiglu_limit: expected a finite float32"),
    ({"model_config": {"swiglu_limit": 10**400}}, "swiglu_limit: expected a finite float32"),
    ({"model_config": {"swiglu_limit": 7.0, "text_config": {"swiglu_limit": 8.0}}}, "expected one value"),
    ({"model_config": {"swiglu_limit": "7"}}, "swiglu_limit: expected a finite float32"),
])
def test_refused(change: dict, match: str) -> None:
    call = {"path": "nvfp4/FLASHINFER_CUTLASS", "activation": UN, "quant_config": {"quant_method": "modelopt"}, "model_config": M3,
            "model_type": None, "version": V033, **change}
    with pytest.raises(MxdebugError, match=re.escape(match)):
        parameters(call.pop("path"), **call)


# -- activations ------------------------------------------------------------------------------------------------


def test_what_each_path_accepts() -> None:
    # _supports_activation of FlashInferExperts, TrtLlmMxfp4ExpertsBase, TrtLlmNvFp4ExpertsBase, FlashInferCuteDSLExperts; Marlin takes
    # what apply_moe_activation computes.
    cutlass = {"SILU", "GELU_TANH", "RELU2_NO_MUL", "SWIGLUOAI", UN}
    marlin = {"SILU", "GELU", "GELU_TANH", "SITU", "SWIGLUOAI", UN, "SWIGLUSTEP", "SILU_NO_MUL", "GELU_NO_MUL", "GELU_TANH_NO_MUL",
              "RELU2_NO_MUL"}
    want = {"mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16": cutlass, "mxfp4/FLASHINFER_CUTLASS_MXFP4_MXFP8": cutlass,
            "mxfp4/FLASHINFER_TRTLLM_MXFP4_BF16": {"SILU", "SWIGLUOAI", "SITU"}, "mxfp4/MARLIN": marlin,
            "mxfp4/FLASHINFER_TRTLLM_MXFP4_MXFP8": {"SILU", "SWIGLUOAI", "SITU"}, "nvfp4/FLASHINFER_CUTLASS": cutlass,
            "nvfp4/FLASHINFER_TRTLLM": {"SILU", "RELU2_NO_MUL", "GELU", "GELU_TANH", UN, "SITU"},
            "nvfp4/FLASHINFER_CUTEDSL": {"SILU", "SWIGLUOAI", UN, "RELU2_NO_MUL", "SITU"}, "nvfp4/MARLIN": marlin}
    assert {p: set(a) for p, a in SUPPORTED.items()} == want


@pytest.mark.parametrize("path", [*CUTLASS_MXFP4, "nvfp4/FLASHINFER_CUTLASS"])
def test_gelu_tanh_lands_on_cutlass_erf_gelu(path: str) -> None:
    landing = lands_on(path, "GELU_TANH")
    assert (landing.flashinfer_type, landing.kind) == ("Geglu", "gelu")
    assert "erf" in landing.mismatch and "GegluTanh" in landing.mismatch
    assert "mismatch: " in str(landing)


def test_trtllm_has_one_geglu_for_two_gelus() -> None:
    tanh, erf = (lands_on("nvfp4/FLASHINFER_TRTLLM", a) for a in ("GELU_TANH", "GELU"))
    assert tanh.flashinfer_type == erf.flashinfer_type == "Geglu"
    assert tanh.kind == erf.kind == "gelu_tanh"
    assert tanh.mismatch is None and "cannot be right for both" in erf.mismatch
    assert "was not measured" in tanh.source


def test_marlin_computes_what_is_meant() -> None:
    want = {"SILU": "silu", "GELU": "gelu", "GELU_TANH": "gelu_tanh", "SWIGLUOAI": "swiglu", UN: "swiglu", "RELU2_NO_MUL": "relu2"}
    for path in MARLIN:
        assert {a: lands_on(path, a).kind for a in want} == want
        assert all((lands_on(path, a).flashinfer_type, lands_on(path, a).mismatch) == (None, None) for a in want)


def test_only_these_landings_are_mismatches() -> None:
    found = set()
    for path, accepted in SUPPORTED.items():
        for activation in accepted:
            try:
                landing = lands_on(path, activation)
            except MxdebugError:
                continue
            if landing.mismatch:
                found.add((path, activation))
    assert found == {*((p, "GELU_TANH") for p in [*CUTLASS_MXFP4, "nvfp4/FLASHINFER_CUTLASS"]), ("nvfp4/FLASHINFER_TRTLLM", "GELU"),
                     ("nvfp4/FLASHINFER_CUTLASS", "SWIGLUOAI")}  # the last for its rows


def flashinfer_folder() -> Path:
    spec = importlib.util.find_spec("flashinfer")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("FlashInfer is not installed: its sources were not asked")
    return Path(spec.submodule_search_locations[0])


def test_flashinfer_has_these_types() -> None:
    tree = ast.parse((flashinfer_folder() / "tllm_enums.py").read_text())
    names = {t.id for c in ast.walk(tree) if isinstance(c, ast.ClassDef) and c.name == "ActivationType"
             for a in c.body if isinstance(a, ast.Assign) for t in a.targets}
    assert {t for accepted in SUPPORTED.values() for t in accepted.values() if t} | {"GegluTanh", "SwigluBias"} <= names


def test_flashinfer_cutlass_geglu_is_erf() -> None:
    text = (flashinfer_folder() / "data/csrc/fused_moe/cutlass_backend/cutlass_fused_moe_kernels.cuh").read_text()
    adaptor = dict(re.findall(r"ActivationType::(Geglu\w*)\s*\?[^?]*?GLUAdaptor<cutlass::epilogue::thread::(\w+)>", text))
    assert adaptor == {"Geglu": "GELU", "GegluTanh": "GELU_taylor"}  # doGatedActivation
    activation = (flashinfer_folder() / "data/cutlass/include/cutlass/epilogue/thread/activation.h").read_text()
    float_gelu = activation.split("struct GELU<float> {", 1)[1].split("};", 1)[0]
    assert "erff(" in float_gelu and "tanh" not in float_gelu


# -- symptoms ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("text", "says"), [
    ("RuntimeError: Worker failed with error 'SWIGLUOAI_UNINTERLEAVE requires clamp_limit'", "does not hand it on"),
    ("ValueError: SWIGLUOAI_UNINTERLEAVE requires gemm1_clamp_limit", "does not hand it on"),
    ("... since kernel does not support MoEActivation.SWIGLUOAI_UNINTERLEAVE activation.", "does not list the activation"),
    ("Model sets swiglu_limit=7.0, but the explicitly requested moe_backend='x' does not apply the SwiGLU clamp.", "refuses"),
    ("swiglu_limit must have 16 element(s).", "each expert of this rank"),
])
def test_symptom(text: str, says: str) -> None:
    meaning = symptom(text)
    assert meaning is not None and says in meaning and "#48929" in meaning


def test_other_errors_are_no_symptom() -> None:
    for text in ("", "CUDA out of memory", "ClampedRelu2 requires a model-wide scalar clamped_relu2_limit tensor.",
                 "kernel does not support MoEActivation.GELU activation"):
        assert symptom(text) is None
    assert len(SYMPTOMS) == 4


# -- the layout that was guessed --------------------------------------------------------------------------------


def test_a_square_buffer_has_two_readings() -> None:
    r = shape_candidates((4, 4, 16), token=4, head=4, k=16)
    assert r.candidates == (("token", "head", "k"), ("head", "token", "k"))
    assert r.ambiguous
    assert str(r) == "shape [4, 4, 16]: ambiguous: [token, head, k] or [head, token, k]"
    with pytest.raises(MxdebugError, match="only the writer knows"):
        r.only()


def test_the_two_readings_are_different_bytes() -> None:
    # What the reader of the wrong one gets: head 1's blocks for token 0 are token 1's for head 0. Only the diagonal survives.
    buffer = torch.arange(4 * 4).view(4, 4)  # written as [token, head]
    assert (buffer == buffer.T).sum().item() == 4


def test_one_reading() -> None:
    r = shape_candidates((3, 4, 16), token=3, head=4, k=16)
    assert not r.ambiguous and r.only() == ("token", "head", "k")
    assert shape_candidates((4, 3, 16), token=3, head=4, k=16).only() == ("head", "token", "k")
    assert shape_candidates((4, 16), token=3, head=4, k=16).only() == ("head", "k")  # not every size must be used


def test_three_equal_sizes_have_six_readings_and_two_batches_need_not_show_it() -> None:
    assert len(shape_candidates((16, 16, 16), token=16, head=16, k=16).candidates) == 6
    ambiguous = [t for t in range(1, 65) if shape_candidates((t, 4, 16), token=t, head=4, k=16).ambiguous]
    assert ambiguous == [4, 16]  # as many tokens as heads, or as k: every other batch of 1 to 64 tokens works


def test_no_reading() -> None:
    r = shape_candidates((9, 4, 16), token=3, head=4, k=16)
    assert r.candidates == () and not r.ambiguous
    assert str(r) == "shape [9, 4, 16]: no reading: none of token = 3, head = 4, k = 16"
    with pytest.raises(MxdebugError, match="expected one reading, got none of token = 3"):
        r.only()
    assert shape_candidates((3, 4, 16, 1), token=3, head=4, k=16).candidates == ()


def test_a_size_below_one_is_refused() -> None:
    with pytest.raises(MxdebugError, match="token = 0"):
        shape_candidates((0, 4), token=0, head=4)
