"""Which kernel does vLLM take for an NVFP4 W4A16 linear layer, does FlashInfer's run here, and what fails only at run time?

Oracle: vLLM's own `init_nvfp4_linear_kernel` and kernel classes, executed from the sources of 0.33.0 and 0.30.0 on 44,928 setups each
(tests/data/make_vllm_select_linear.py). What vLLM does not say at selection is read from its kernels' `apply_weights` and from FlashInfer.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from click.testing import CliRunner

import mxdebug.doctor
from mxdebug.cli import main
from mxdebug.errors import MxdebugError
from mxdebug.recipes.w4a16 import LINEAR_VERSIONS, LinearSetup, capability, layout_family, select_linear

cap = importlib.import_module("mxdebug.recipes.w4a16.capability")
DATA = Path(__file__).parent / "data"
CUTEDSL, MARLIN, HUMMING, B12X = ("FlashInferCuteDslNvFp4W4A16LinearKernel", "MarlinNvFp4LinearKernel", "HummingNvFp4LinearKernel",
                                  "B12xNvFp4W4A16LinearKernel")
PATHS = {CUTEDSL: "nvfp4_w4a16/flashinfer_cutedsl", MARLIN: "nvfp4_w4a16/marlin", HUMMING: "nvfp4_w4a16/humming", B12X: "nvfp4_w4a16/b12x"}


@functools.cache
def golden() -> ModuleType:
    """make_vllm_select_linear.py: its setups. It runs no vLLM here."""
    spec = importlib.util.spec_from_file_location("make_vllm_select_linear", DATA / "make_vllm_select_linear.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("version", LINEAR_VERSIONS)
def test_vllms_own_select_function_agrees(version: str) -> None:
    """Kernel class, or vLLM's message where it raises, and what vLLM logs: every combination, in both dtypes, which vLLM does not read."""
    made, stored = golden(), json.loads((DATA / "vllm_select_linear.json").read_text())[version]
    taken, logged = made.unpacked(stored["taken"]), made.unpacked(stored["logged"])
    compared = 0
    for fields, want, words in zip(made.setups(), taken, logged, strict=True):
        got = [select_linear(LinearSetup(**fields, dtype=d), version) for d in ("bfloat16", "float16")]
        assert [g.kernel or f"-{g.refused}" for g in got] == [want, want], f"{fields}\n{got[0]}"
        assert [list(g.logged) for g in got] == [words, words], f"{fields}\n{got[0]}"
        assert got[0].path == PATHS.get(want) and [c.backend for c in got[0].considered if c.taken] == [want][:got[0].path is not None]
        assert all(c.reason for c in got[0].considered)
        compared += 1
    assert compared == 44928 and stored.get("commit", "")[:9] == {"0.33": "", "53014": "006fc8985"}[version]


# By itself, with FlashInfer and Humming installed. 0.30 (#53014): CuTe-DSL on SM100 and SM103, otherwise Marlin. 0.33: Humming on SM90.
@pytest.mark.parametrize(("version", "kernels"), [("0.33", (MARLIN, MARLIN, HUMMING, CUTEDSL, CUTEDSL, MARLIN, MARLIN, MARLIN)),
                                                  ("53014", (MARLIN, MARLIN, MARLIN, CUTEDSL, CUTEDSL, MARLIN, MARLIN, MARLIN))])
def test_what_vllm_takes_by_itself(version: str, kernels: tuple[str, ...]) -> None:
    assert tuple(select_linear(LinearSetup(sm), version).kernel for sm in (80, 89, 90, 100, 103, 110, 120, 121)) == kernels
    for older in ("0.6.13", None, False):
        assert {select_linear(LinearSetup(sm, flashinfer=older), version).kernel for sm in (100, 103)} == {MARLIN}
    assert select_linear(LinearSetup(90, humming_installed=False), version).kernel == MARLIN


@pytest.mark.parametrize("version", LINEAR_VERSIONS)
@pytest.mark.parametrize(("backend", "kernel"), [("flashinfer_cutedsl", CUTEDSL), ("marlin", MARLIN), ("humming", HUMMING)])
def test_an_explicit_backend_is_taken_or_refused(version: str, backend: str, kernel: str) -> None:
    got = select_linear(LinearSetup(121, linear_backend=backend), version)
    assert got.kernel == kernel and got.why.startswith(f"--linear-backend {backend} [") and got.runs
    refused = select_linear(LinearSetup(70, linear_backend=backend), version)
    assert refused.path is None and not refused.runs and kernel in refused.refused and "Reasons: \n" in refused.refused
    if backend == "flashinfer_cutedsl":
        old = select_linear(LinearSetup(100, linear_backend=backend, flashinfer="0.6.13"), version)
        assert old.path is None and "FlashInfer CuTe-DSL BF16 x FP4 GEMM is unavailable" in old.refused


def test_a_backend_without_a_w4a16_kernel_walks_the_list_and_not_what_auto_does() -> None:
    """On SM12x auto forces Marlin; the list begins with CuTe-DSL."""
    assert select_linear(LinearSetup(121)).kernel == MARLIN
    got = select_linear(LinearSetup(121, linear_backend="cutlass"))
    assert got.kernel == CUTEDSL and "has no kernel for this linear layer type" in got.logged[0]
    assert got.warnings == (f"not what auto does: without --linear-backend cutlass vLLM would take {MARLIN}",) and got.runs
    assert select_linear(LinearSetup(100, linear_backend="cutlass")).warnings == ()
    # b12x has a W4A16 kernel since a version after 0.30; there it falls back like the others.
    b12x = LinearSetup(121, linear_backend="b12x", b12x_installed=True)
    assert select_linear(b12x).kernel == B12X and select_linear(b12x, "0.30").kernel == CUTEDSL


@pytest.mark.parametrize(("setup", "words"), [
    (LinearSetup(100, "float16"), "FlashInfer CuTe-DSL W4A16 requires BF16 input, got torch.float16"),
    (LinearSetup(121, "float16", "flashinfer_cutedsl"), "FlashInfer CuTe-DSL W4A16 requires BF16 input, got torch.float16"),
    (LinearSetup(120, "float16", "b12x", b12x_installed=True), "b12x NVFP4 W4A16 requires BF16 input, got torch.float16"),
    (LinearSetup(122, linear_backend="flashinfer_cutedsl"), "only SM120 and SM121"),
    (LinearSetup(75), "at least 8.0"),
])
def test_what_fails_only_at_run_time_is_warned_of_at_selection(setup: LinearSetup, words: str) -> None:
    got = select_linear(setup)
    assert got.path is not None and words in got.fails and got.fails in got.warnings and not got.runs
    assert f"warning: {got.fails}" in str(got)


@pytest.mark.parametrize("setup", [LinearSetup(100), LinearSetup(75, "float16"), LinearSetup(90, "float16"), LinearSetup(121, "float16"),
                                   LinearSetup(100, "float16", "marlin"), LinearSetup(120, linear_backend="b12x", b12x_installed=True),
                                   LinearSetup(121, linear_backend="flashinfer_cutedsl"), LinearSetup(100, "float16", flashinfer=None)])
def test_no_warning_without_a_cause(setup: LinearSetup) -> None:
    assert select_linear(setup).runs and select_linear(setup).warnings == ()


def test_batch_invariance_refuses_w4a16() -> None:
    got = select_linear(LinearSetup(100, batch_invariant=True))
    assert (got.path, got.refused) == (None, "CutlassNvFp4LinearKernel does not support W4A16") and not any(c.taken for c in got.considered)
    assert select_linear(LinearSetup(90, batch_invariant=True)).refused == "EmulationNvFp4LinearKernel does not support W4A16"


def test_a_disabled_kernel_is_taken_all_the_same_where_auto_forces_it() -> None:
    got = select_linear(LinearSetup(100, disabled=frozenset({CUTEDSL})))
    assert got.kernel == CUTEDSL and "is not read where auto forces a kernel" in got.warnings[0] and got.runs
    assert select_linear(LinearSetup(121, linear_backend="cutlass", disabled=frozenset({CUTEDSL}))).kernel == MARLIN


def test_flashinfer_between_its_two_kernels() -> None:
    """0.6.14 to 0.6.17 have the functions that vLLM asks for, and not yet the kernel for SM100."""
    for version, warned in (("0.6.14", 1), ("0.6.17", 1), ("0.6.18", 0), ("0.7.4", 0)):
        got = select_linear(LinearSetup(100, flashinfer=version))
        assert got.kernel == CUTEDSL and len(got.warnings) == warned and got.runs, version
    assert select_linear(LinearSetup(121, linear_backend="flashinfer_cutedsl", flashinfer="0.6.17")).warnings == ()


def test_the_override_of_this_layer_type_goes_first() -> None:
    got = select_linear(LinearSetup(100, linear_backend="cutlass", linear_backend_per_quant={"nvfp4_w4a16": "humming"}))
    assert got.kernel == HUMMING and "nvfp4_w4a16 overridden with humming" in str(got)
    assert LinearSetup(90, linear_backend="FlashInfer-CuteDSL").linear_backend == "flashinfer_cutedsl"
    assert hash(LinearSetup(90, linear_backend_per_quant={"nvfp4_w4a16": "humming"}))


@pytest.mark.parametrize(("fields", "operand"), [
    ({"sm": 9}, "LinearSetup.sm"), ({"dtype": "float32"}, "LinearSetup.dtype"), ({"linear_backend": "cute"}, "LinearSetup.linear_backend"),
    ({"flashinfer": "new"}, "FlashInfer's version"), ({"linear_backend_per_quant": {}}, "LinearSetup.linear_backend_per_quant"),
    ({"linear_backend_per_quant": {"nvfp4_w4a16": "Marlin"}}, "LinearSetup.linear_backend_per_quant"),
])
def test_a_name_that_vllm_does_not_have(fields: dict[str, object], operand: str) -> None:
    with pytest.raises(MxdebugError) as caught:
        LinearSetup(**{"sm": 90, **fields})
    assert caught.value.operand == operand


def test_versions() -> None:
    assert select_linear(LinearSetup(90), "0.30.0") == select_linear(LinearSetup(90), "#53014") == select_linear(LinearSetup(90), "53014")
    with pytest.raises(MxdebugError, match="vLLM version: expected one of 0.33, 53014"):
        select_linear(LinearSetup(90), "0.28")


def test_a_selection_reads_in_a_terminal() -> None:
    text = str(select_linear(LinearSetup(100, "float16"))).splitlines()
    assert text[0] == "vLLM 0.33, SM100, NVFP4 W4A16, float16, --linear-backend auto"
    assert text[1].startswith("takes nvfp4_w4a16/flashinfer_cutedsl: auto takes CuTe-DSL on SM100 and SM103")
    assert text[2].startswith(f"  -> {CUTEDSL}  supports this setup  [kernels/linear/nvfp4/flashinfer.py]")
    assert "vLLM 0.30 (#53014)" in str(select_linear(LinearSetup(90), "53014"))
    refused = str(select_linear(LinearSetup(100, linear_backend="flashinfer_cutedsl", flashinfer=None))).splitlines()
    assert refused[1].startswith("refuses to start: --linear-backend flashinfer_cutedsl")
    assert refused[2].startswith("  vLLM raises: Failed to find")


# capability

GEMM = SimpleNamespace(mm_bf16_fp4=None, prepare_bf16_fp4_weights=None)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch):
    """A machine with these packages and functions; what is imported is noted, and nothing is really imported."""
    def made(*, has: tuple[str, ...] = ("flashinfer", "flashinfer.cute_dsl", "cutlass", "flashinfer_cubin"), gemm: object = GEMM,
             version: str | None = "0.7.4", gpu: tuple[str, int] | None = None) -> list[str]:
        imported: list[str] = []

        def load(name: str) -> object:
            imported.append(name)
            if isinstance(gemm, Exception):
                raise gemm
            return gemm

        monkeypatch.setattr(cap, "find_spec", lambda name: SimpleNamespace() if name in has else None)
        monkeypatch.setattr(cap, "importlib", SimpleNamespace(import_module=load))
        monkeypatch.setattr(cap.shutil, "which", lambda program: None)
        monkeypatch.setattr(mxdebug.doctor, "installed", lambda package: version)
        monkeypatch.setattr(mxdebug.doctor, "gpu", lambda: gpu)
        return imported

    return made


def test_it_runs_where_all_is_there(machine) -> None:
    imported = machine(gpu=("NVIDIA B200", 100))
    assert capability() == (True, "FlashInfer 0.7.4 on SM100, layout sm100") and imported == ["flashinfer.gemm"]
    assert [capability(sm)[0] for sm in (100, 103, 120, 121)] == [True] * 4
    machine(has=("flashinfer", "flashinfer.cute_dsl", "cutlass"))
    ok, reason = capability(121)
    assert ok and reason == ("FlashInfer 0.7.4 on SM121, layout sm12x; vLLM may take FlashInfer for absent: flashinfer-cubin is not "
                             "installed, nor nvcc and ninja on PATH")


@pytest.mark.parametrize(("sm", "words"), [
    (None, "no CUDA GPU"), (90, "this is SM90"), (107, "without SM107, which FlashInfer's own list and layouts have"),
    (110, "_prepare_cute_dsl refuses"), (122, "SM122 passes vLLM's check"), (129, "SM129 passes vLLM's check"), (130, "this is SM130"),
])
def test_gpus_on_which_it_does_not_run(machine, sm: int | None, words: str) -> None:
    imported = machine()
    ok, reason = capability(sm)
    assert not ok and words in reason and imported == []


@pytest.mark.parametrize(("has", "words"), [
    ((), "FlashInfer is not installed"), (("flashinfer", "flashinfer.cute_dsl"), "nvidia-cutlass-dsl is not"),
    (("flashinfer", "cutlass"), "FlashInfer 0.7.4 has no flashinfer.cute_dsl"),
])
def test_nothing_missing_is_imported(machine, has: tuple[str, ...], words: str) -> None:
    imported = machine(has=has)
    ok, reason = capability(100)
    assert not ok and words in reason and imported == []


@pytest.mark.parametrize(("gemm", "version", "words"), [
    (SimpleNamespace(), "0.6.13", "FlashInfer 0.6.13 has no flashinfer.gemm.mm_bf16_fp4 and no prepare_bf16_fp4_weights"),
    (SimpleNamespace(mm_bf16_fp4=None), "0.6.13", "0.6.13 has no flashinfer.gemm.prepare_bf16_fp4_weights"),
    (GEMM, "0.6.17", "0.6.17 gives SM100 the kernel and layout of SM12x"),
    (ImportError("libcudart"), "0.7.4", "cannot be imported: libcudart"),
])
def test_an_older_or_broken_flashinfer(machine, gemm: object, version: str, words: str) -> None:
    machine(gemm=gemm, version=version)
    ok, reason = capability(100)
    assert not ok and words in reason
    assert capability(121)[0] == (gemm is GEMM)  # the kernel for SM12x is older


def test_without_flashinfer_capability_imports_nothing_of_it() -> None:
    """In a process of its own, with FlashInfer hidden. Whatever else is there, the answer is no, with a reason."""
    code = ("import sys, importlib.machinery as m\nreal = m.PathFinder.find_spec\n"
            "hidden = lambda n: n.split('.')[0] == 'flashinfer'\n"
            "m.PathFinder.find_spec = classmethod(lambda c, n, p=None, t=None: None if hidden(n) else real(n, p, t))\n"
            "from mxdebug.recipes.w4a16 import capability\nprint(capability(100))\n"
            "assert not any(n.split('.')[0] in ('flashinfer', 'cutlass') for n in sys.modules)")
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("(False, 'FlashInfer is not installed")


def test_layout_family() -> None:
    assert [layout_family(sm) for sm in (100, 103, 107, 120, 121)] == ["sm100", "sm100", "sm100", "sm12x", "sm12x"]
    for sm in (90, 110, 130):
        with pytest.raises(MxdebugError, match="sm: expected"):
            layout_family(sm)


def test_flashinfers_own_list_is_the_one_read() -> None:
    """The installed FlashInfer's list for the call, where it is 0.7.4."""
    if mxdebug.doctor.installed("flashinfer-python") != "0.7.4":
        pytest.skip("FlashInfer 0.7.4 is not installed")
    source = Path(importlib.util.find_spec("flashinfer").submodule_search_locations[0], "gemm/gemm_bf16_fp4.py").read_text()
    decorator = source.split("def _cute_dsl_bf16_fp4_requirement")[0].rsplit("@supported_compute_capability(", 1)[1]
    assert tuple(json.loads(decorator.split(")")[0])) == cap.BF16_FP4_SMS


# The command line and the doctor


@pytest.mark.parametrize(("arguments", "code", "words"), [
    (["--sm", "100"], 0, "takes nvfp4_w4a16/flashinfer_cutedsl"),
    (["--sm", "100", "--dtype", "float16"], 1, "requires BF16 input, got torch.float16"),
    (["--sm", "100", "--flashinfer", "none", "--dtype", "float16"], 0, "takes nvfp4_w4a16/marlin"),
    (["--sm", "100", "--linear-backend", "flashinfer_cutedsl", "--flashinfer", "0.6.13"], 1, "BF16 x FP4 GEMM is unavailable"),
    (["--sm", "90", "--no-humming"], 0, "takes nvfp4_w4a16/marlin"), (["--sm", "90"], 0, "takes nvfp4_w4a16/humming"),
    (["--sm", "90", "--version", "53014"], 0, "takes nvfp4_w4a16/marlin"),
    (["--sm", "120", "--linear-backend", "b12x", "--b12x"], 0, "takes nvfp4_w4a16/b12x"),
    (["--sm", "120", "--linear-backend", "cutlass"], 0, "warning: not what auto does"),
    (["--sm", "100", "--batch-invariant"], 1, "CutlassNvFp4LinearKernel does not support W4A16"),
    (["--sm", "100", "--linear-backend", "cute"], 2, "LinearSetup.linear_backend"),
    (["--sm", "100", "--version", "0.28"], 2, "vLLM version"),
])
def test_the_command(arguments: list[str], code: int, words: str) -> None:
    run = CliRunner().invoke(main, ["select-linear", *arguments])
    assert run.exit_code == code and words in run.output, run.output


@pytest.mark.parametrize(("gpu", "words"), [
    (None, ("does not run here: no CUDA GPU", "vLLM takes Marlin", "CPU emulation")),
    (("NVIDIA H200", 90), ("does not run here: needs SM100", "vLLM takes Humming where it is installed, else Marlin",
                           "Triton kernel runs on this GPU")),
    (("Tesla T4", 75), ("this is SM75", "needs SM80", "CPU emulation")),
    (("NVIDIA B200", 100), ("runs here: FlashInfer 0.7.4 on SM100", "vLLM                 takes it by itself")),
    (("NVIDIA GB10", 121), ("runs here: FlashInfer 0.7.4 on SM121", "--linear-backend flashinfer_cutedsl")),
])
def test_doctor_has_a_section(machine, gpu: tuple[str, int] | None, words: tuple[str, ...]) -> None:
    machine(gpu=gpu)
    section = mxdebug.doctor.report().split("NVFP4 W4A16 linear")[1]
    assert all(w in section for w in words), section
