"""The command line: what it prints, and its exit codes."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from mxdebug import recorded
from mxdebug.calls import load
from mxdebug.cli import main
from mxdebug.faults import FAULTS
from mxdebug.recipes import swiglu
from mxdebug.recipes.w4a16 import symptoms as linear


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


@pytest.mark.parametrize("name", recorded.CALLS)
def test_diagnose_exit_code(name: str) -> None:
    r = recorded.call(name)
    code, output = run("diagnose", r.path, "--checkpoint", r.checkpoint_path)
    assert code == (0 if r.wrong.startswith("nothing") else 1)
    assert output.startswith("RIGHT:" if code == 0 else "WRONG:")


def test_diagnose_without_checkpoint_is_undecided() -> None:
    code, output = run("diagnose", recorded.call("c04").path)
    assert code == 1 and output.startswith("UNDECIDED:") and "--checkpoint" in output


def test_diagnose_on_a_device() -> None:
    r = recorded.call("c04")
    assert run("diagnose", r.path, "--checkpoint", r.checkpoint_path, "--device", "cpu") == run("diagnose", r.path, "--checkpoint", r.checkpoint_path)
    for device in ("quantum", "meta"):
        code, output = run("diagnose", r.path, "--checkpoint", r.checkpoint_path, "--device", device)
        assert code == 2 and "expected  cpu, or a GPU that torch can use" in output


def test_session_of_several_calls(tmp_path: Path) -> None:
    for name in ("c01", "c04"):
        load(recorded.call(name).path).save(tmp_path)
    code, output = run("diagnose", tmp_path, "--checkpoint", recorded.call("c01").checkpoint_path)
    assert code == 1 and "RIGHT (layer 0)\n" in output and "WRONG:" in output and "2 calls: 1 right, 1 wrong" in output
    code, output = run("diagnose", tmp_path, "--call", "1", "--checkpoint", recorded.call("c01").checkpoint_path)
    assert code == 0 and "WRONG:" not in output


def test_a_number_means_a_call_that_can_be_diagnosed(tmp_path: Path) -> None:
    """FlashInfer counts the calls of each function."""
    call = load(recorded.call("c04").path)
    for function in (call.function, "fp4_quantize"):
        replace(call, function=function).save(tmp_path)
    code, output = run("cut", tmp_path, "--call", call.sequence, "--checkpoint", recorded.call("c04").checkpoint_path, "--out", tmp_path / "small")
    assert code == 0 and "scales-linear" in output, output


def test_every_call_of_a_session_counts(tmp_path: Path) -> None:
    """The wrong call may be the last of many: no exit code 0 for calls that nobody looked at."""
    right, wrong = (load(recorded.call(name).path) for name in ("c01", "c04"))
    for n in range(1, 10):
        replace(right, sequence=n).save(tmp_path)
    replace(wrong, sequence=10).save(tmp_path)
    code, output = run("diagnose", tmp_path, "--checkpoint", recorded.call("c01").checkpoint_path)
    assert code == 1 and "10 calls: 9 right, 1 wrong" in output


@pytest.mark.parametrize("arguments, part", [
    (("diagnose", recorded.ROOT / "kernels"), "6 of mxfp8_quantize"),
    (("diagnose", recorded.ROOT / "checkpoints"), "expected"),
    (("diagnose", recorded.call("c01").path, "--checkpoint", recorded.ROOT / "calls"), "expected"),
    (("diagnose", recorded.call("c01").path, "--checkpoint", recorded.call("c12").checkpoint_path), "call and checkpoint"),
    (("diagnose", recorded.call("c01").path, "--checkpoint", recorded.call("c01").checkpoint_path, "--layer", 7), "layer"),
    (("diagnose", recorded.call("c01").path, "--checkpoint", recorded.call("c01").checkpoint_path, "--engine", "sglang"), "only vllm"),
    (("demo", "c99"), "c01"), (("faults", "nothing"), "`mxdebug faults` lists all"), (("faults", "rows-gate"), "rows-gate-up"),
])
def test_bad_input_is_one_message_and_code_2(arguments: tuple[object, ...], part: str) -> None:
    code, output = run(*arguments)
    assert code == 2 and part in output and "Traceback" not in output


def test_faults_lists_the_catalogue() -> None:
    code, output = run("faults")
    assert code == 0 and all(id in output for id in FAULTS)
    assert "vllm#51038" in run("faults", "scales-linear")[1]


def test_faults_of_linear_layers_are_all_that_were_found_there() -> None:
    output = run("faults", "--linear")[1]
    for id in ("wrong-tp-slice", "contract-broken", "input-not-finite", "operand-of-another-layer", "output-not-sliced"):
        assert f"  {id} " in output, id
    assert "router-squared" not in output


def test_a_crash_dump_that_is_cut_to_nothing_says_why(tmp_path: Path) -> None:
    """Ids for 2 of 6 tokens break the contract only as a whole. What is written can be read by others."""
    call = load(recorded.call("c04").path)
    few = {**call.arguments, "token_selected_experts": call.arguments["token_selected_experts"][:2]}
    replace(call, arguments=few, outputs=(), status="crashed").save(tmp_path)
    code, output = run("cut", tmp_path, "--checkpoint", recorded.call("c04").checkpoint_path, "--out", tmp_path / "cut", "--layer", 0)
    assert code == 0 and "kept      6 of 6 tokens" in output and "why all   there is no output to cut by" in output
    assert (tmp_path / "cut" / "checkpoint" / "model.safetensors").stat().st_mode == (tmp_path / "cut" / "checkpoint" / "config.json").stat().st_mode


def test_what_is_misspelt_is_answered_with_what_is_near() -> None:
    code, output = run("contract", "nvfp4/flashinfer_trtlm")
    assert code == 2 and "likely    perhaps nvfp4/FLASHINFER_TRTLLM\n" in output and "nvfp4_w4a16/flashinfer_cutedsl/sm12x" in output
    code, output = run("faults", "nonexist")
    assert code == 2 and "expected  one of the" in output and len(output) < 300


def test_calls_of_one_name_are_headed_apart(tmp_path: Path) -> None:
    call = load(recorded.call("c01").path)
    for session in ("a", "b"):
        call.save(tmp_path / session)
    output = run("diagnose", tmp_path)[1]
    assert "--- a/2026" in output and "--- b/2026" in output


def test_symptom_takes_a_part_of_a_message_in_any_case() -> None:
    whole = run("symptom", "ValueError: FlashInfer CuTe-DSL W4A16 requires\n BF16 input, got torch.float16")
    assert whole[0] == 0 and "activations-not-bf16" in whole[1]
    assert run("symptom", "requires BF16 input") == run("symptom", "w4a16 REQUIRES bf16") == whole
    code, output = run("symptom", "does not support")
    assert code == 0 and "CutlassNvFp4LinearKernel does not support W4A16\n" in output and "MoEActivation.SWIGLUOAI_UNINTERLEAVE activation\n" in output
    assert run("symptom", "out of memory")[0] == 1 and run("symptom", "model")[0] == 1 and swiglu.symptom("the") is None
    assert run("symptom") == (0, "\n".join(s.message for s in (*swiglu.SYMPTOMS, *linear.SYMPTOMS)) + "\n")


def test_doctor_says_what_is_missing_here() -> None:
    code, output = run("doctor")
    assert code == 0 and "FLASHINFER_LOGLEVEL=10" in output and "--moe-backend flashinfer_cutlass" in output


def test_import_is_cheap_and_loads_no_flashinfer() -> None:
    code = ("import time, torch; t = time.perf_counter(); import mxdebug; import mxdebug.cli; spent = time.perf_counter() - t\n"
            "import sys; assert not any(m.split('.')[0] in ('flashinfer', 'plotly', 'ipywidgets') for m in sys.modules); print(spent)")
    spent = min(float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout) for _ in range(2))
    assert spent < 0.3


def test_diagnose_loads_no_flashinfer() -> None:
    code = ("import sys, mxdebug; from mxdebug import recorded; r = recorded.call('c04')\n"
            "assert not mxdebug.diagnose(r.path, r.checkpoint_path).ok; assert 'flashinfer' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_demo_is_quick_from_a_cold_process() -> None:
    """Printed for the log; the bound is generous because machines are noisy."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "mxdebug.cli", "demo"], check=True, capture_output=True)
    print(f"demo: {time.perf_counter() - start:.1f} s")
    assert time.perf_counter() - start < 30


def test_contract_lists_paths_and_prints_one() -> None:
    run = CliRunner().invoke(main, ["contract"])
    assert run.exit_code == 0 and len(run.output.splitlines()) == 9 and "nvfp4/FLASHINFER_CUTEDSL" in run.output
    one = CliRunner().invoke(main, ["contract", "nvfp4/FLASHINFER_TRTLLM"])
    assert one.exit_code == 0 and "TRT-LLM shuffle in 32" in one.output and "ModelOpt NVFP4" in one.output and "not run" in one.output
    wrong = CliRunner().invoke(main, ["contract", "nvfp4/TRTLLM"])
    assert wrong.exit_code == 2 and "one of mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16" in wrong.output


def test_select_says_what_vllm_takes() -> None:
    run = CliRunner().invoke(main, ["select", "--sm", "100", "--quantisation", "mxfp4", "--checkpoint", "gpt-oss", "--activation", "swigluoai"])
    assert run.exit_code == 0 and "takes mxfp4/FLASHINFER_TRTLLM_MXFP4_BF16" in run.output
    wrong = CliRunner().invoke(main, ["select", "--sm", "80", "--quantisation", "mxfp4", "--checkpoint", "gpt-oss"])
    assert wrong.exit_code == 2 and "one of 90, 100, 103, 110, 120, 121" in wrong.output


def test_audit_of_an_engine_that_is_not_installed() -> None:
    run = CliRunner().invoke(main, ["audit"])
    assert run.exit_code in (0, 1, 2) and ("not installed" in run.output) == (run.exit_code == 2)


def test_what_was_sent_must_be_tokens(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    r = recorded.call("c01")
    empty, odd = tmp_path / "empty.safetensors", tmp_path / "odd.safetensors"
    save_file({}, empty)
    odd.write_bytes(b"no safetensors")
    for file, words in ((empty, "one tensor [rows, H] for each rank"), (odd, "a .safetensors file")):
        code, output = run("diagnose", r.path, "--checkpoint", r.checkpoint_path, "--sent", file)
        assert code == 2 and words in output and "Traceback" not in output
    tokens = tmp_path / "tokens.safetensors"
    save_file({"rank0": torch.zeros(6, 384)}, tokens)
    assert run("diagnose", r.path, "--checkpoint", r.checkpoint_path, "--sent", tokens)[0] == 0  # bf16 activations: nothing to decide
    assert run("diagnose", r.path, "--checkpoint", r.checkpoint_path, "--tp", "0", "0")[0] == 2


@pytest.mark.parametrize("raised, code, said", [(KeyboardInterrupt, 130, "interrupted"), (ZeroDivisionError, 70, "this is an error in mxdebug")])
def test_no_verdict_is_given_where_there_is_none(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, raised: type[BaseException], code: int, said: str) -> None:
    """1 says that something is wrong with a call."""
    def fails(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr("mxdebug.scan.scan", fails)
    monkeypatch.setattr("mxdebug.diagnosis.diagnose", fails)
    monkeypatch.setattr("mxdebug.diagnose", fails)
    r = recorded.call("c04")
    for command in (("scan", r.checkpoint_path, "--resume", tmp_path / "state"), ("diagnose", r.path, "--checkpoint", r.checkpoint_path)):
        got, output = run(*command)
        assert got == code and said in output, output
        assert ("the same command goes on" in output) == (code == 130 and command[0] == "scan")


def test_a_reader_who_has_seen_enough_is_no_error() -> None:
    """As in `mxdebug faults --book | head -0`: no traceback, and no word of an error in mxdebug."""
    with subprocess.Popen([sys.executable, "-m", "mxdebug.cli", "faults", "--book"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        process.stdout.close()  # before it has loaded what it needs to write
        assert process.stderr.read() == "" and process.wait() == 1  # click's own


def test_who_waits_for_a_large_call_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal, and there alone: what is piped stays as it was."""
    r = recorded.call("c04")
    command = ("diagnose", r.path, "--checkpoint", r.checkpoint_path)
    quiet = run(*command)
    monkeypatch.setattr("mxdebug.cli.SLOW", 0)
    assert run(*command) == quiet
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda self: True, raising=False)
    code, output = run(*command)
    told, _, rest = output.partition("\n")
    assert (code, rest) == quiet and told.startswith("mxdebug: reading and diagnosing ") and told.endswith("_call0004, 1 MiB")
