"""Which path does vLLM take, and why not the others?

Oracle: vLLM's own select functions, executed from the sources of each version on 14,364 setups (tests/data/make_vllm_select.py). Beside
it, setups whose answer is derived here from the rules, with the reason that an engineer must see.
"""

from __future__ import annotations

import functools
import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from mxdebug.errors import MxdebugError
from mxdebug.recipes.select import FIXED_IN, INSTALLED, SMS, VERSIONS, Selection, Setup, select

DATA = Path(__file__).parent / "data"
GPT_OSS = Setup(90, "mxfp4", "gpt-oss", "swigluoai", None, routing="Renormalize")
OTHER = Setup(90, "mxfp4", "mxfp4", "silu", None, routing="DeepSeekV3")
NVFP4 = Setup(90, "nvfp4", "modelopt", "silu", "nvfp4", routing="DeepSeekV3")
COMPRESSED = Setup(90, "mxfp4", "compressed-tensors", "silu", "mxfp4")


@functools.cache
def golden() -> ModuleType:
    """make_vllm_select.py: its setups. It runs no vLLM here."""
    spec = importlib.util.spec_from_file_location("make_vllm_select", DATA / "make_vllm_select.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(selection: Selection, backend: str) -> str:
    """Reason and source that a selection gives for a backend."""
    return next(f"{c.reason} [{c.source}]" for c in selection.considered if c.backend == backend)


# What vLLM 0.33 takes by itself, per SM: 90, 100, 103, 110, 120, 121. From the priority lists:
# gpt-oss: TRT-LLM is for SM10x. Then TRITON, which takes SM90 to SM12x, but on SM12x stands behind MARLIN. FLASHINFER_CUTLASS_MXFP4_BF16
#   comes after TRITON, so it is never taken while triton_kernels, which vLLM brings along, can be imported.
# other: TRT-LLM with MXFP8 on SM10x, DeepGEMM on SM12x too, else MARLIN, ahead of which HUMMING moves on SM90.
# nvfp4: TRT-LLM on SM10x, FlashInfer CUTLASS on SM12x; SM110 is in no FlashInfer list, vLLM's CUTLASS has it; SM90 has none of these.
# compressed-tensors: vLLM's own CUTLASS kernel from SM100 to below SM120, else Marlin.
@pytest.mark.parametrize(("setup", "paths"), [
    (GPT_OSS, ("TRITON", "FLASHINFER_TRTLLM_MXFP4_BF16", "FLASHINFER_TRTLLM_MXFP4_BF16", "TRITON", "MARLIN", "MARLIN")),
    (OTHER, ("HUMMING", "FLASHINFER_TRTLLM_MXFP4_MXFP8", "FLASHINFER_TRTLLM_MXFP4_MXFP8", "MARLIN", "DEEPGEMM_MXFP4", "DEEPGEMM_MXFP4")),
    (NVFP4, ("HUMMING", "FLASHINFER_TRTLLM", "FLASHINFER_TRTLLM", "VLLM_CUTLASS", "FLASHINFER_CUTLASS", "FLASHINFER_CUTLASS")),
    (COMPRESSED, ("MARLIN", "CUTLASS_MXFP4_MXFP4", "CUTLASS_MXFP4_MXFP4", "CUTLASS_MXFP4_MXFP4", "MARLIN", "MARLIN")),
])
def test_what_033_takes_by_itself(setup: Setup, paths: tuple[str, ...]) -> None:
    assert tuple(select(replace(setup, sm=sm)).path for sm in SMS) == tuple(f"{setup.quantisation}/{p}" for p in paths)


@pytest.mark.parametrize(("setup", "version", "path", "experts", "why_not"), [
    # Without triton_kernels the next in the list that takes SM90 with BF16 activations.
    (replace(GPT_OSS, installed=INSTALLED - {"triton_kernels"}), "0.33", "mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16", "FlashInferExperts",
     ("TRITON", "an installation without triton_kernels [OAITritonExperts._supports_current_device")),
    # The monolithic Triton class refuses data parallel, the modular one does not.
    (replace(GPT_OSS, dp=2), "0.33", "mxfp4/TRITON", "OAITritonExperts", ("MARLIN", "comes after TRITON; it too supports")),
    # Asked by name, and with MXFP8 activations, FlashInfer CUTLASS runs on Blackwell: its BF16 variant is for SM90 only.
    (replace(GPT_OSS, sm=120, moe_backend="flashinfer_cutlass", activation_key="mxfp8"), "0.33", "mxfp4/FLASHINFER_CUTLASS_MXFP4_MXFP8",
     "FlashInferExperts", ("FLASHINFER_CUTLASS_MXFP4_BF16", "BF16 activations on SM120 [FlashInferExperts._supports_quant_scheme")),
    # Any other MXFP4 checkpoint asks without filtering by activation key, so the same option reaches it.
    (replace(OTHER, sm=120, moe_backend="flashinfer_cutlass"), "0.33", "mxfp4/FLASHINFER_CUTLASS_MXFP4_MXFP8", "FlashInferExperts",
     ("FLASHINFER_CUTLASS_MXFP4_BF16", "BF16 activations on SM120")),
    # MXFP8 activations that no backend of SM90 has: 0.33 falls back to BF16 variants, 0.30 knew none but emulation, which needs quark.
    (replace(GPT_OSS, activation_key="mxfp8"), "0.33", "mxfp4/TRITON", "OAITritonMxfp4ExpertsMonolithic",
     ("FLASHINFER_CUTLASS_MXFP4_MXFP8", "mxfp8 activations on SM90")),
    (replace(GPT_OSS, activation_key="mxfp8"), "0.30", None, None, ("TRITON", "takes BF16 activations; mxfp8 is asked for")),
    # #48929: FlashInfer CUTLASS takes SWIGLUOAI_UNINTERLEAVE; 0.21 does not even have the activation (below).
    (replace(NVFP4, sm=120, activation="swigluoai_uninterleave", swiglu_limit=7.0), "0.28", "nvfp4/FLASHINFER_CUTLASS", "FlashInferExperts",
     ("FLASHINFER_TRTLLM", "does not support SM120 (it runs on SM100, SM103)")),
    # gpt-oss's interleaved form is none of TRT-LLM NVFP4's activations.
    (replace(NVFP4, sm=100, activation="swigluoai"), "0.33", "nvfp4/FLASHINFER_CUTEDSL", "FlashInferCuteDSLExperts",
     ("FLASHINFER_TRTLLM", "the activation swigluoai [TrtLlmNvFp4ExpertsModular._supports_activation")),
    # GELU_TANH reaches CUTLASS's erf GELU on SM12x: TRT-LLM is not there, CuTe-DSL neither.
    (replace(NVFP4, sm=120, activation="gelu_tanh"), "0.33", "nvfp4/FLASHINFER_CUTLASS", "FlashInferExperts",
     ("FLASHINFER_CUTEDSL", "does not support SM120")),
    # The batched format of DeepEP low latency has one NVFP4 backend, SM10x only; on SM120 there is none.
    (replace(NVFP4, sm=100, dp=2, expert_parallel=True, all2all="deepep_low_latency"), "0.33", "nvfp4/FLASHINFER_CUTEDSL_BATCHED",
     "FlashInferCuteDSLBatchedExperts", ("FLASHINFER_TRTLLM", "the batched format")),
    (replace(NVFP4, sm=120, dp=2, expert_parallel=True, all2all="deepep_low_latency"), "0.33", None, None,
     ("MARLIN", "the batched format")),
    # swiglu_limit takes away what does not clamp, before it is asked.
    (replace(NVFP4, sm=100, dp=2, expert_parallel=True, all2all="deepep_low_latency", swiglu_limit=7.0), "0.33", None, None,
     ("FLASHINFER_CUTEDSL_BATCHED", "does not apply the SwiGLU clamp")),
    # W4A16 has no FlashInfer MoE path: Marlin, on SM90 Humming first.
    (replace(NVFP4, sm=100, activation_key=None), "0.33", "nvfp4/MARLIN", "MarlinExperts",
     ("FLASHINFER_TRTLLM", "nvfp4 weights with BF16 activations")),
    # LoRA: TRT-LLM's own LoRA class only when asked by name, and since 0.33.
    (replace(GPT_OSS, sm=100, lora=True), "0.33", "mxfp4/MARLIN", "MarlinExperts",
     ("FLASHINFER_TRTLLM_MXFP4_BF16", "does not support LoRA")),
    (replace(GPT_OSS, sm=100, lora=True, moe_backend="flashinfer_trtllm"), "0.33", "mxfp4/FLASHINFER_TRTLLM_MXFP4_BF16",
     "TrtLlmMxfp4LoRAExperts", None),
    (replace(GPT_OSS, sm=100, lora=True, moe_backend="flashinfer_trtllm"), "0.30", None, None, None),
    # Humming by expert parallelism: the grouped class. In 0.28 the kind of GEMM did not depend on it, nor did Humming come before Marlin.
    (replace(OTHER, tp=2, expert_parallel=True), "0.33", "mxfp4/HUMMING", "HummingGroupedExperts",
     ("MARLIN", "comes after HUMMING; it too")),
    # One GPU has no expert parallelism, whatever is asked for (FusedMoEParallelConfig.make).
    (replace(OTHER, expert_parallel=True), "0.33", "mxfp4/HUMMING", "HummingIndexedExperts", None),
    (replace(OTHER, tp=2, expert_parallel=True), "0.28", "mxfp4/MARLIN", "MarlinExperts", None),
    # SM110: Triton's window ended below it until 0.30.
    (replace(GPT_OSS, sm=110), "0.30", "mxfp4/MARLIN", "MarlinExperts",
     ("TRITON", "does not support SM110 (it runs on SM90, SM100, SM103)")),
    # DeepGEMM's FP4 kernel came to SM12x after 0.21.
    (replace(OTHER, sm=120), "0.21", "mxfp4/MARLIN", "MarlinExperts", ("DEEPGEMM_MXFP4", "does not support SM120")),
])
def test_path_and_reason(setup: Setup, version: str, path: str | None, experts: str | None, why_not: tuple[str, str] | None) -> None:
    got = select(setup, version)
    assert got.path == path and got.experts[-1:] == ((experts,) if experts else ())
    assert bool(got.refused) == (path is None)
    if why_not:
        assert why_not[1] in row(got, why_not[0]), row(got, why_not[0])


@pytest.mark.parametrize("version", VERSIONS)
def test_vllms_own_select_functions_agree(version: str) -> None:
    """Backend and experts class of every setup; where vLLM raises there is no path."""
    made, stored = golden(), json.loads((DATA / "vllm_select.json").read_text())[version]
    answered = refused_by_us = 0
    for fields, letter in zip(made.setups(), stored["results"], strict=True):
        known = letter != made.UNKNOWN
        want = stored["outcomes"][made.ALPHABET.index(letter)] if known else None
        setup = Setup(**{**fields, "installed": frozenset(fields.get("installed", INSTALLED))})
        try:
            got = select(setup, version)
        except MxdebugError as error:
            # The oracle has arguments that no method or option of this version hands it.
            no_option = error.operand == "Setup.moe_backend" and want == "-"
            assert not known or no_option or (error.operand == "Setup.activation_key" and version == "0.21"), error
            refused_by_us += 1
            continue
        assert known, f"{setup}: vLLM {version} does not have its names, ours answers {got.path}"
        if setup.activation_key == "nvfp4_per_token" and want.split("/")[0] not in ("-", "FLASHINFER_TRTLLM"):
            assert got.path is None and "need FLASHINFER_TRTLLM" in got.refused  # the method refuses what the oracle chose
        else:
            ours = "-" if got.path is None else f"{got.path.split('/')[1]}/{got.experts[-1]}"
            assert ours == want, f"{setup}\n{got}"
        answered += 1
    # 0.33 has every name; the older the version, the fewer setups it can be asked.
    assert (answered, refused_by_us) == {"0.33": (14364, 0), "0.30": (12288, 2076), "0.28": (11328, 3036), "0.21": (4176, 10188)}[version]


@pytest.mark.parametrize("version", VERSIONS)
def test_compressed_tensors_takes_the_native_kernel_where_vllm_says_so(version: str) -> None:
    """CutlassExpertsMxfp4._supports_current_device, executed: from SM100 to SM103, since 0.28 to SM110."""
    native = json.loads((DATA / "vllm_select.json").read_text())[version]["native_mxfp4"]
    assert native == ([100, 103] if version == "0.21" else [100, 103, 110])
    taken = [sm for sm in SMS if select(replace(COMPRESSED, sm=sm), version).path == "mxfp4/CUTLASS_MXFP4_MXFP4"]
    assert taken == native


def test_compressed_tensors_reads_no_other_option() -> None:
    """--moe-backend flashinfer_cutlass does not reach a compressed-tensors MXFP4 checkpoint; b12x does."""
    got = select(replace(COMPRESSED, moe_backend="flashinfer_cutlass"))
    assert got.path == "mxfp4/MARLIN" and got.oracle == "no oracle"
    assert got.notes == ("--moe-backend flashinfer_cutlass is not read by CompressedTensorsW4A4Mxfp4MoEMethod",)
    b12x = replace(COMPRESSED, sm=120, moe_backend="b12x", installed=INSTALLED | {"b12x"}, hidden=2048, intermediate=768)
    assert select(b12x).path == "mxfp4/B12X_MXFP4_MXFP8"
    assert select(b12x, "0.30").path == "mxfp4/B12X_MXFP4_MXFP8"
    # Declared FP8 activations make it another method, which asks as every other MXFP4 checkpoint does.
    fp8 = replace(COMPRESSED, activation_key="fp8_per_token", moe_backend="flashinfer_cutlass")
    assert select(fp8).path == "mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16"


def test_033_checks_compressed_tensors_when_the_kernel_is_made() -> None:
    """make_mxfp4_moe_kernel asks is_supported_config, so LoRA on SM100 stops there; 0.30 went on without a word."""
    got = select(replace(COMPRESSED, sm=100, lora=True))
    assert got.path is None and got.refused.startswith("make_mxfp4_moe_kernel") and "does not support LoRA" in got.refused
    assert not any(c.taken for c in got.considered)
    assert select(replace(COMPRESSED, sm=100, lora=True), "0.30").path == "mxfp4/CUTLASS_MXFP4_MXFP4"


@pytest.mark.parametrize("setup", [GPT_OSS, OTHER, NVFP4, COMPRESSED])
@pytest.mark.parametrize("sm", SMS)
def test_one_backend_is_taken_and_every_row_says_why(setup: Setup, sm: int) -> None:
    got = select(replace(setup, sm=sm))
    assert [f"{setup.quantisation}/{c.backend}" for c in got.considered if c.taken] == [got.path]
    assert all(c.reason and ".py" in c.source for c in got.considered)
    assert len({c.backend for c in got.considered}) == len(got.considered)


def test_order_of_priority() -> None:
    """From _get_priority_backends_for_gpt_oss and prioritize_humming: BF16 variants only, since no activation key is asked for."""
    bf16 = ["FLASHINFER_TRTLLM_MXFP4_BF16", "TRITON", "FLASHINFER_CUTLASS_MXFP4_BF16", "MARLIN", "BATCHED_MARLIN", "HUMMING", "EMULATION"]
    on_90 = ["FLASHINFER_TRTLLM_MXFP4_BF16", "TRITON", "FLASHINFER_CUTLASS_MXFP4_BF16", "HUMMING", "MARLIN", "BATCHED_MARLIN", "EMULATION"]
    on_120 = ["FLASHINFER_TRTLLM_MXFP4_BF16", "FLASHINFER_CUTLASS_MXFP4_BF16", "MARLIN", "BATCHED_MARLIN", "TRITON", "HUMMING", "EMULATION"]
    for sm, order in ((100, bf16), (90, on_90), (120, on_120)):
        assert [c.backend for c in select(replace(GPT_OSS, sm=sm)).considered][:7] == order
    # A requested key brings its variant to the front (0.33).
    assert select(replace(GPT_OSS, sm=100, activation_key="mxfp8")).path == "mxfp4/FLASHINFER_TRTLLM_MXFP4_MXFP8"


def test_without_a_routing_method_both_classes_are_named() -> None:
    got = select(replace(GPT_OSS, sm=100, routing=None))
    assert got.experts == ("TrtLlmMxfp4ExpertsMonolithic", "TrtLlmMxfp4ExpertsModular")
    assert select(replace(GPT_OSS, sm=100, routing="Custom")).experts == ("TrtLlmMxfp4ExpertsModular",)


def test_what_vllm_refuses_is_an_answer() -> None:
    """path None, the engine's reason, no row taken."""
    bf16_on_blackwell = select(replace(GPT_OSS, sm=100, moe_backend="flashinfer_cutlass"))
    assert bf16_on_blackwell.path is None and bf16_on_blackwell.experts == ()
    assert bf16_on_blackwell.refused == "FLASHINFER_CUTLASS_MXFP4_BF16 does not support mxfp4 weights with BF16 activations on SM100"
    assert "cutlass is not supported for MXFP4 MoE" in select(replace(GPT_OSS, moe_backend="cutlass")).refused
    assert "does not apply the SwiGLU clamp" in select(replace(NVFP4, sm=120, moe_backend="flashinfer_b12x", swiglu_limit=7.0)).refused
    per_token = select(replace(NVFP4, sm=100, activation="swigluoai", activation_key="nvfp4_per_token"))
    assert per_token.path is None and "FLASHINFER_CUTEDSL was chosen" in per_token.refused


def test_a_selection_reads_in_a_terminal() -> None:
    text = str(select(GPT_OSS)).splitlines()
    assert text[0] == "vLLM 0.33, SM90, mxfp4, gpt-oss, swigluoai, --moe-backend auto"
    assert text[1] == ("activations not quantised; GptOssMxfp4MoEMethod (quantization/mxfp4.py) asks "
                       "select_mxfp4_moe_backend (fused_moe/oracle/mxfp4.py)")
    assert text[2] == "takes mxfp4/TRITON with OAITritonMxfp4ExpertsMonolithic"
    assert text[4].startswith("  -> TRITON ") and "supports this setup" in text[4]
    assert str(select(replace(GPT_OSS, moe_backend="cutlass"))).splitlines()[2].startswith("refuses to start: moe_backend=cutlass")


@pytest.mark.parametrize("version", ["0.20", "0.27", "0.27.1", "0.29", "0.31", "0.33.1", "0.34", ""])
def test_a_version_whose_rules_were_not_read_is_refused(version: str) -> None:
    with pytest.raises(MxdebugError, match="vLLM version: expected one of"):
        select(GPT_OSS, version)


def test_the_versions_of_the_four_fixes_are_known() -> None:
    assert set(FIXED_IN.values()) | {"0.33"} == set(VERSIONS)
    assert select(GPT_OSS, "0.33.0") == select(GPT_OSS)


@pytest.mark.parametrize(("fields", "operand"), [
    ({"sm": 80}, "Setup.sm"), ({"quantisation": "fp8"}, "Setup.quantisation"), ({"activation": "swiglu"}, "Setup.activation"),
    ({"activation_key": "bf16"}, "Setup.activation_key"), ({"routing": "renormalize"}, "Setup.routing"),
    ({"all2all": "deepep"}, "Setup.all2all"),
    ({"dtype": "float32"}, "Setup.dtype"), ({"tp": 0}, "Setup.tp, dp"), ({"installed": frozenset({"triton"})}, "Setup.installed"),
    ({"checkpoint": "modelopt"}, "Setup.checkpoint"), ({"activation_key": "nvfp4"}, "Setup.activation_key"),
    ({"moe_backend": "flashinfer_cutlass_afp8"}, "Setup.moe_backend"), ({"moe_backend": "aiter"}, "Setup.moe_backend"),
])
def test_a_name_that_vllm_does_not_have(fields: dict[str, object], operand: str) -> None:
    """`flashinfer_cutlass_afp8` stands in map_mxfp4_backend, but --moe-backend does not take it (config/kernel.py, MoEBackend)."""
    with pytest.raises(MxdebugError) as caught:
        select(replace(GPT_OSS, **fields))
    assert caught.value.operand == operand


def test_what_a_rule_reads_must_be_given() -> None:
    b12x = replace(OTHER, sm=120, moe_backend="b12x", installed=INSTALLED | {"b12x"})
    with pytest.raises(MxdebugError, match="hidden, intermediate"):
        select(b12x)
    # 1456 / 2 ranks is no multiple of 32; whole experts under expert parallelism are, but B12X takes none of that.
    assert "728 on a rank" in select(replace(b12x, hidden=3072, intermediate=1456, tp=2)).refused
    with pytest.raises(MxdebugError, match="Setup.activation: expected one that vLLM 0.21 has, got situ"):
        select(replace(OTHER, activation="situ"), "0.21")
