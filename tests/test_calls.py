"""Calls: the shipped dumps, FlashInfer's own writer and reader as oracles, every way in which a dump can be broken, and capture."""

from __future__ import annotations

import copy
import enum
import importlib.util
import inspect
import json
import os
import pickle
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from mxdebug import calls, recorded
from mxdebug.calls import COMPLETED, CRASHED, MISSING, PENDING, UNKNOWN_DEFAULT, UNREADABLE, Call, EnumMember, Opaque
from mxdebug.calls.signature import parse
from mxdebug.errors import MxdebugError

SIGNATURE = "(x: torch.Tensor, scales: List[torch.Tensor], n: int = 1, *, mode: Optional[str] = None, output=None) -> torch.Tensor"


def make_call(**changes: Any) -> Call:
    """A small call with a transposed tensor, tensors in a list, and two parameters left at their defaults."""
    x = torch.arange(12, dtype=torch.float32).reshape(3, 4).T
    values = dict(
        function="toy", module="flashinfer.toy",
        arguments={"x": x, "scales": [torch.tensor([7], dtype=torch.uint8), x], "n": 1, "mode": None,
                   "output": torch.zeros(2, 2, dtype=torch.bfloat16)},
        defaulted=frozenset({"n", "mode"}), outputs=(torch.ones(2, 2, dtype=torch.bfloat16), torch.tensor([3], dtype=torch.int32)),
        status=COMPLETED, versions={"flashinfer": "0.7.4", "torch": "2", "python": "3"}, sequence=1, timestamp="20260101_000000_001",
        process=42, graph_capture=False, signature=SIGNATURE, source=None)
    return Call(**(values | changes))


def same(a: Any, b: Any) -> bool:
    """Equal values, and for tensors equal dtype, strides and bytes."""
    if isinstance(a, torch.Tensor):
        return (isinstance(b, torch.Tensor) and a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
                and torch.equal(a.contiguous().flatten().view(torch.uint8), b.contiguous().flatten().view(torch.uint8)))
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return isinstance(b, dict) and same(list(a), list(b)) and same(list(a.values()), list(b.values()))
    return type(a) is type(b) and a == b


def edit(folder: Path, change: Callable[[dict[str, Any]], Any]) -> Path:
    """Apply a change to the last record of a dump."""
    path = folder / "metadata.jsonl"
    lines = path.read_text().splitlines()
    record = json.loads(lines[-1])
    change(record)
    path.write_text("\n".join([*lines[:-1], json.dumps(record)]) + "\n")
    return folder


# ---------------------------------------------------------------- the shipped dumps


@pytest.mark.parametrize("name", list(recorded.CALLS))
def test_shipped_calls(name: str) -> None:
    call = calls.load(recorded.call(name).path)
    a = call.arguments
    assert (call.function, call.module, call.status) == ("cutlass_fused_moe", "flashinfer.fused_moe.core", COMPLETED)
    tokens, hidden = a["input"].shape
    assert a["input"].dtype == torch.bfloat16 and a["fc1_expert_weights"].dtype == torch.uint8
    assert a["fc2_expert_weights"].shape[1] == hidden and a["output"].shape == call.outputs[0].shape == (tokens, hidden)
    assert isinstance(a["quant_scales"], list) and [t.dtype for t in a["quant_scales"]] == [torch.uint8] * 2
    assert a["output_dtype"] is torch.bfloat16 and a["use_w4_group_scaling"] is True
    assert a["activation_type"] == "Swiglu" and a["swizzled_input_sf"] is True and a["backend"] == "cutlass"
    assert a["nvfp4_4over6"] is UNKNOWN_DEFAULT and a["input_sf"] is None and a["tune_max_num_tokens"] == 8192
    assert {"activation_type", "swizzled_input_sf", "nvfp4_4over6", "backend"} <= call.defaulted
    assert not {"input", "quant_scales", "output_dtype", "use_w4_group_scaling", "output"} & call.defaulted
    assert (a["tp_size"], a["tp_rank"], "tp_size" in call.defaulted) == ((2, 1, False) if name == "c13" else (1, 0, True))
    assert (a["ep_size"], a["ep_rank"], "ep_size" in call.defaulted) == ((2, 1, False) if name == "c12" else (1, 0, True))
    assert list(a) == [p.name for p in parse(call.signature)]
    assert call.versions["flashinfer"] == "0.7.4" and call.graph_capture is False


def test_first_shipped_call_exactly() -> None:
    call = calls.load(recorded.call("c01").path)
    assert (call.sequence, call.timestamp, call.process) == (1, "20261129_151620_079", 425)
    assert [tuple(t.shape) for t in call.outputs] == [(6, 384), (1,), (4, 6), (4,)]
    assert [tuple(t.shape) for t in call.arguments["quant_scales"]] == [(4, 8, 3, 16, 16), (4, 6, 2, 16, 16)]
    raw = torch.load(call.source / "inputs.pt", weights_only=True)
    assert same(call.arguments["fc1_expert_weights"], raw["kwarg_fc1_expert_weights"])
    assert same(call.arguments["quant_scales"][1], raw["kwarg_quant_scales__1"])
    assert repr(call).startswith("Call(cutlass_fused_moe(input=bfloat16[6, 384], ") and "tp_size" not in repr(call)


def test_passing_none_is_not_a_default() -> None:
    call = calls.load(recorded.call("c05").path)
    assert call.arguments["swiglu_alpha"] is None and "swiglu_alpha" not in call.defaulted


def test_scan_shipped_kernels_by_position() -> None:
    found = calls.scan(recorded.ROOT / "kernels")
    assert [(r.timestamp, r.process, r.sequence) for r in found] == sorted((r.timestamp, r.process, r.sequence) for r in found)
    assert len(found) == 11 and {r.status for r in found} == {COMPLETED}
    first = found[0].load()
    assert first.function == "mxfp8_quantize" and first.arguments["input"].shape == (1, 192)
    assert first.arguments["is_sf_swizzled_layout"] is True and "is_sf_swizzled_layout" not in first.defaulted
    assert found[1].load().arguments["is_sf_swizzled_layout"] is False
    assert len(first.outputs) == 2 and first.outputs[0].dtype == torch.float8_e4m3fn


def test_scan_folder_of_sessions() -> None:
    found = calls.scan(recorded.ROOT / "calls")
    assert len(found) == 14 and all(r.size > 100_000 and r.source.name.startswith(r.timestamp) for r in found)
    with pytest.raises(MxdebugError, match=r"(?s)exactly one call, got 14:.*pid425_cutlass_fused_moe_call0001 \(completed\)"):
        calls.load(recorded.ROOT / "calls")


# ---------------------------------------------------------------- signatures


@pytest.mark.parametrize(("text", "expected"), [
    ("()", []),
    ("<unavailable>", []),
    ("(a, /, b: int = 3, *args, c: Literal['x,y', 'z'] = 'it\\'s, (', **kw) -> Dict[str, int]",
     [("a", "positional only", ...), ("b", "positional", 3), ("args", "variadic", ...), ("c", "keyword only", "it's, ("),
      ("kw", "variadic keyword", ...)]),
    ("(a=-1.5, b=None, *, c=True, d=(1, 2), e=inf)",
     [("a", "positional", -1.5), ("b", "positional", None), ("c", "keyword only", True), ("d", "keyword only", (1, 2)),
      ("e", "keyword only", float("inf"))]),
    ("(a: flashinfer.enums.Activation = Activation.Swiglu, b: Layout = <Layout.L128x4: 0>, c=torch.bfloat16)",
     [("a", "positional", "Swiglu"), ("b", "positional", "L128x4"), ("c", "positional", torch.bfloat16)]),
    ("(a: X[Y] = <a unset: read, 'A*>, b=<object at 0x7f00>, c=<function <lambda> at 0x1>, d=C(x=1, y='a'), e=torch.strided)",
     [(name, "positional", UNKNOWN_DEFAULT) for name in "abcde"]),
    ("(a=__import__('os').system('false'), b=[x for x in ()])", [(name, "positional", UNKNOWN_DEFAULT) for name in "ab"]),
])
def test_signature(text: str, expected: list[tuple[str, str, Any]]) -> None:
    assert [(p.name, p.kind, p.default if p.has_default else ...) for p in parse(text)] == expected


def test_signature_of_python() -> None:
    def f(a: int, b: str = "x", *c: Any, d: float = 1e-3, e: list[tuple[int, ...]] = [(1,)], **g: Any) -> dict[str, int]:  # noqa: B006
        raise NotImplementedError

    assert [(p.name, p.default if p.has_default else ...) for p in parse(str(inspect.signature(f)))] == [
        ("a", ...), ("b", "x"), ("c", ...), ("d", 1e-3), ("e", [(1,)]), ("g", ...)]


@pytest.mark.parametrize("text", ["", "x", "(a", "(a]", "(a: 'x)", "(1a)", "(a b)", "(lambda: 0)()"])
def test_bad_signature(text: str) -> None:
    with pytest.raises(MxdebugError, match="function signature"):
        parse(text)


def test_unknown_default_is_no_value() -> None:
    with pytest.raises(MxdebugError, match="was not passed"):
        bool(UNKNOWN_DEFAULT)
    assert copy.deepcopy(UNKNOWN_DEFAULT) is UNKNOWN_DEFAULT and repr(UNKNOWN_DEFAULT) == "UNKNOWN_DEFAULT"


# ---------------------------------------------------------------- save and load

ROUND_TRIPS = {
    "plain": {},
    "crashed": {"status": CRASHED, "outputs": ()},
    "one output": {"outputs": (torch.ones(3),)},
    "no output": {"outputs": ()},
    "no tensors": {"arguments": {"x": None, "scales": [], "n": 1, "mode": None}, "outputs": (), "defaulted": frozenset({"n", "mode"}),
                   "signature": SIGNATURE.replace(", output=None", "")},
    "kinds of values": {"arguments": {
        "x": {"a": (1, torch.tensor(2.0)), 3: [[torch.empty(0, 4)]]}, "scales": [torch.float8_e4m3fn, float("inf"), "s", True],
        "n": EnumMember("Swiglu", "ActivationType", 3), "mode": Opaque("Config", "Config(a=1)"), "output": ()}, "defaulted": frozenset()},
    "sliced": {"arguments": {"x": torch.arange(40, dtype=torch.int16).reshape(4, 10)[:, 2:5], "scales": [], "n": 1, "mode": None,
                             "output": None}, "defaulted": frozenset({"n", "mode", "output"})},
    "narrow floats": {"outputs": (torch.arange(256, dtype=torch.uint8).view(torch.float8_e8m0fnu).reshape(16, 16).T,
                                  torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn),
                                  torch.arange(16, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))},
    "too many arguments": {"arguments": {"x": 1, "scales": 2, "n": 3, "mode": None, "output": None, "arg_5": torch.ones(1), "lost": 5},
                           "signature": SIGNATURE.replace("*, ", ""),
                           "defaulted": frozenset(), "status": CRASHED, "outputs": ()},
    "variadic": {"signature": "(a, b=2, *c, d=4, **e)", "arguments": {"a": torch.ones(1), "b": 2, "c": (5, torch.ones(2)), "d": 4, "f": 6},
                 "defaulted": frozenset({"d"})},
    "positional only": {"signature": "(a, b=2, /, c=3)", "arguments": {"a": 1, "b": 2, "c": 4}, "defaulted": frozenset({"b"})},
    "unknown default": {"signature": "(a=<object at 0x1>, b=E.x)", "arguments": {"a": UNKNOWN_DEFAULT, "b": EnumMember("x", "E")},
                        "defaulted": frozenset({"a", "b"})},
}


@pytest.mark.parametrize("tensor_format", ["torch", "safetensors"])
@pytest.mark.parametrize("name", list(ROUND_TRIPS))
def test_round_trip(tmp_path: Path, name: str, tensor_format: str) -> None:
    call = make_call(**ROUND_TRIPS[name])
    folder = call.save(tmp_path / "session", tensor_format)
    back = calls.load(folder)
    assert folder == tmp_path / "session" / "20260101_000000_001_pid42_toy_call0001" == back.source
    assert same(dict(back.arguments), dict(call.arguments)) and same(back.outputs, call.outputs)
    for field in ("function", "module", "defaulted", "status", "versions", "sequence", "timestamp", "process", "graph_capture",
                  "signature"):
        assert getattr(back, field) == getattr(call, field), field
    written = {path.suffix for path in folder.iterdir()} - {".jsonl"}
    assert written <= {{"torch": ".pt", "safetensors": ".safetensors"}[tensor_format]}
    assert len((folder / "metadata.jsonl").read_text().splitlines()) == (2 if call.status == COMPLETED else 1)
    assert (tmp_path / "session" / "session.jsonl").read_text() == (folder / "metadata.jsonl").read_text()


def test_enum_keeps_class_and_value(tmp_path: Path) -> None:
    member = calls.load(make_call(**ROUND_TRIPS["kinds of values"]).save(tmp_path)).arguments["n"]
    assert (member, member.enum, member.value) == ("Swiglu", "ActivationType", 3)


@pytest.mark.parametrize("tensor_format", ["torch", "safetensors"])
def test_shipped_call_round_trip(tmp_path: Path, tensor_format: str) -> None:
    call = calls.load(recorded.call("c01").path)
    back = calls.load(call.save(tmp_path, tensor_format))
    assert same(dict(back.arguments), dict(call.arguments)) and same(back.outputs, call.outputs) and back.defaulted == call.defaulted


def test_save_does_not_drag_the_storage_along(tmp_path: Path) -> None:
    folder = make_call(outputs=(torch.zeros(1_000_000)[10:20],)).save(tmp_path)
    assert (folder / "outputs.pt").stat().st_size < 10_000


def test_save_writes_a_default_that_was_changed(tmp_path: Path) -> None:
    changed = make_call(arguments={**make_call().arguments, "n": 2})  # defaulted still names n
    back = calls.load(changed.save(tmp_path))
    assert back.arguments["n"] == 2 and back.defaulted == {"mode"}


@pytest.mark.parametrize(("shape", "stride", "kept"), [
    ([3, 4], [1, 3], True), ([3, 4], [20, 2], True), ([3, 4], [0, 1], False), ([3, 4], [2, 1], False), ([3, 4], [-4, 1], False),
    ([3, 4], [2**40, 1], False), ([1, 12], [99, 1], True), ([1, 12], [-1, 1], False)])
def test_safetensors_strides(tmp_path: Path, shape: list[int], stride: list[int], kept: bool) -> None:
    values = torch.arange(12).reshape(shape)
    folder = make_call(outputs=(values,)).save(tmp_path, "safetensors")
    edit(folder, lambda record: record["tensor_details"]["result"].update(stride=stride))
    out = calls.load(folder).outputs[0]
    assert torch.equal(out, values) and list(out.stride()) == (stride if kept else [shape[1], 1])


@pytest.mark.parametrize(("changes", "tensor_format", "message"), [
    ({"status": PENDING}, "torch", "never wrote its tensors"),
    ({"function": "../../etc"}, "torch", "folder name"),
    ({"timestamp": "now"}, "torch", "folder name"),
    ({}, "npz", "torch or safetensors"),
    ({"arguments": {"x": object()}}, "torch", "snapshots, not live objects"),
    ({"outputs": (torch.zeros(1, dtype=torch.complex128),)}, "safetensors", "no such dtype")])
def test_save_refuses(tmp_path: Path, changes: dict[str, Any], tensor_format: str, message: str) -> None:
    with pytest.raises(MxdebugError, match=message):
        make_call(**changes).save(tmp_path, tensor_format)


def test_save_never_overwrites(tmp_path: Path) -> None:
    make_call().save(tmp_path)
    with pytest.raises(MxdebugError, match="already saved"):
        make_call().save(tmp_path)


# ---------------------------------------------------------------- sessions


@pytest.fixture
def session(tmp_path: Path) -> Path:
    """Three calls of two processes, saved out of order."""
    folder = tmp_path / "session"
    make_call(sequence=2, timestamp="20260101_000000_002").save(folder)
    make_call(sequence=1, process=43, timestamp="20260101_000000_001", status=CRASHED, outputs=()).save(folder, "safetensors")
    make_call(sequence=1).save(folder)
    return folder


@pytest.mark.parametrize("name", ["", "session.jsonl"])
def test_scan_session(session: Path, name: str) -> None:
    moved = session.rename(session.parent / "copied")  # dump_dir in the records points nowhere now
    found = calls.scan(moved / name)
    assert [(r.process, r.sequence, r.status) for r in found] == [(42, 1, COMPLETED), (43, 1, CRASHED), (42, 2, COMPLETED)]
    for r in found:
        assert r.function == "toy" and r.size == sum(f.stat().st_size for f in r.source.iterdir())
        assert r.load().process == r.process


def test_load_from_session_with_one_call(session: Path) -> None:
    for r in calls.scan(session)[1:]:
        shutil.rmtree(r.source)
    for path in (session, session / "session.jsonl", next(session.glob("*_pid*")) / "metadata.jsonl"):
        assert calls.load(path).sequence == 1
    statuses = [r.status for r in calls.scan(session / "session.jsonl")]
    assert statuses == [COMPLETED, MISSING, MISSING]
    with pytest.raises(MxdebugError, match="not copied along"):
        calls.scan(session / "session.jsonl")[1].load()


def test_renamed_folder_is_not_missing(session: Path) -> None:
    calls.scan(session)[0].source.rename(session / "the bad one")
    assert [r.status for r in calls.scan(session / "session.jsonl")] == [COMPLETED, CRASHED, COMPLETED]


def test_session_lists_broken_calls_and_skips_torn_lines(session: Path) -> None:
    listing = session / "session.jsonl"
    lines = listing.read_text().splitlines()
    torn = lines[0].replace('"process_id": 42', '"process_id": 99, "function_name": "../../toy"')  # names a path outside
    listing.write_text("\n".join([lines[0][:100], "[1]", *lines[1:], torn, lines[1][:50]]))
    (session / "20260101_000000_003_pid44_toy_call0007").mkdir()  # the process died before the metadata
    (session / "unrelated").mkdir()
    calls.scan(session)[2].source.joinpath("metadata.jsonl").write_text("{")
    found = calls.scan(listing)
    assert [(r.process, r.sequence, r.status) for r in found] == [
        (42, 1, COMPLETED), (43, 1, CRASHED), (42, 2, UNREADABLE), (44, 7, UNREADABLE)]
    assert "cut off" in found[2].problem and "process ended" in found[3].problem
    for r in found[2:]:
        with pytest.raises(MxdebugError, match="metadata.jsonl"):
            r.load()


def test_load_does_not_choose(session: Path) -> None:
    with pytest.raises(MxdebugError) as error:
        calls.load(session)
    assert error.value.got.count("_toy_call") == 3 and "(crashed)" in error.value.got


# ---------------------------------------------------------------- statuses


def pending(record: dict[str, Any]) -> None:
    record["execution_status"], record["graph_capture"] = "graph_capture_pending_flush", True


def test_crash_ignores_outputs_that_no_record_confirms(tmp_path: Path) -> None:
    folder = make_call().save(tmp_path)
    path = folder / "metadata.jsonl"
    path.write_text(path.read_text().splitlines()[0])
    (folder / "outputs.pt").write_bytes(b"PK")
    call = calls.load(folder)
    assert (call.status, call.outputs) == (CRASHED, ()) and call.arguments["x"].shape == (4, 3)


def test_pending_flush(tmp_path: Path) -> None:
    folder = edit(make_call().save(tmp_path), pending)
    (folder / "inputs.pt").unlink()
    (folder / "outputs.pt").unlink()
    call = calls.load(folder)
    assert (call.status, call.outputs, call.graph_capture) == (PENDING, (), True)
    # Passed, but lost: absent, and not taken for defaults.
    assert dict(call.arguments) == {"n": 1, "mode": None} and call.defaulted == {"n", "mode"}
    assert calls.scan(folder)[0].status == PENDING


@pytest.mark.parametrize(("lost", "status"), [((), COMPLETED), (("outputs.pt",), CRASHED)])
def test_pending_flush_with_files(tmp_path: Path, lost: tuple[str, ...], status: str) -> None:
    folder = edit(make_call().save(tmp_path), pending)
    for name in lost:
        (folder / name).unlink()
    call = calls.load(folder)
    assert call.status == status and call.arguments["x"].shape == (4, 3) and len(call.outputs) == (2 if status == COMPLETED else 0)


# ---------------------------------------------------------------- broken dumps


class Evil:
    """Pickles to a call of open(marker, "w")."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.marker), "w")


def test_code_is_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    folder = make_call().save(tmp_path / "s")
    torch.save({"kwarg_x": Evil(marker)}, folder / "inputs.pt")
    with pytest.raises(MxdebugError, match="not a FlashInfer dump: holds code"):
        calls.load(folder)
    (folder / "inputs.pt").write_bytes(pickle.dumps({"kwarg_x": Evil(marker)}, protocol=2))
    with pytest.raises(MxdebugError, match="not a FlashInfer dump: holds code"):
        calls.load(folder)
    assert not marker.exists()
    pickle.loads(pickle.dumps(Evil(marker))).close()
    assert marker.exists()  # so the trap works


def test_signature_is_not_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    text = f"(x, scales, output, n=open({str(marker)!r}, 'w'))"
    folder = edit(make_call().save(tmp_path / "s"), lambda record: record.update(function_signature=text))
    assert calls.load(folder).arguments["n"] is UNKNOWN_DEFAULT and not marker.exists()


def cut(name: str, keep: float) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(len(data) * keep)])
    return damage


def replace_file(name: str, content: Any) -> Callable[[Path], None]:
    return lambda folder: torch.save(content, folder / name)


def record_change(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda folder: edit(folder, change) and None


def without(*keys: str) -> Callable[[Path], None]:
    def change(record: dict[str, Any]) -> None:
        for key in keys[:-1]:
            record = record[key]
        del record[keys[-1]]
    return record_change(change)


def entry(**value: Any) -> Callable[[Path], None]:
    return record_change(lambda r: r["input_metadata"].update(kwarg_extra=value))


X = torch.arange(12, dtype=torch.float32).reshape(3, 4).T
INPUTS = {"kwarg_x": X, "kwarg_scales__0": torch.tensor([7], dtype=torch.uint8), "kwarg_scales__1": X,
          "kwarg_output": torch.zeros(2, 2, dtype=torch.bfloat16)}

BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "inputs missing": (lambda f: (f / "inputs.pt").unlink(), r"inputs\.pt or inputs\.safetensors .* copied in part"),
    "inputs empty": (cut("inputs.pt", 0), "cut off while being written"),
    "inputs halved": (cut("inputs.pt", 0.5), "cut off while being written"),
    "inputs without end": (cut("inputs.pt", 0.98), "cut off while being written"),
    "inputs are text": (lambda f: (f / "inputs.pt").write_text("hello"), r"inputs\.pt"),
    "inputs are a tensor": (replace_file("inputs.pt", torch.ones(1)), "a dict of tensors"),
    "inputs hold numbers": (replace_file("inputs.pt", {"kwarg_x": 1}), "a dict of tensors"),
    "a tensor missing": (replace_file("inputs.pt", {k: v for k, v in INPUTS.items() if k != "kwarg_x"}), "got no kwarg_x"),
    "a tensor too many": (replace_file("inputs.pt", INPUTS | {"kwarg_z": X}), "an unlisted kwarg_z"),
    "another shape": (replace_file("inputs.pt", INPUTS | {"kwarg_x": X.T}), r"torch.float32 \[4, 3\].* got torch.float32 \[3, 4\]"),
    "another dtype": (replace_file("inputs.pt", INPUTS | {"kwarg_x": X.int()}), "got torch.int32"),
    "sparse": (replace_file("inputs.pt", INPUTS | {"kwarg_x": X.to_sparse()}), "_rebuild_sparse_tensor.* objects that only code"),
    "no metadata": (lambda f: (f / "metadata.jsonl").unlink(), "metadata.*no such file.*process ended"),
    "metadata empty": (lambda f: (f / "metadata.jsonl").write_text(""), "an empty file.*cut off"),
    "metadata cut off": (lambda f: (f / "metadata.jsonl").write_text('{"function_name": "to'), "no complete record.*cut off"),
    "metadata no object": (lambda f: (f / "metadata.jsonl").write_text("[1, 2]\n3\n"), "no complete record"),
    "metadata too deep": (lambda f: (f / "metadata.jsonl").write_text("[" * 100_000), "no complete record"),
    "metadata binary": (lambda f: (f / "metadata.jsonl").write_bytes(bytes(range(256))), "no complete record"),
    "no function name": (without("function_name"), "of another type: function_name.*emptied while a CUDA graph"),
    "no sequence": (without("call_sequence"), "call_sequence"),
    "no input_metadata": (without("input_metadata"), "input_metadata"),
    "no tensor_details": (without("tensor_details"), "tensor_details"),
    "no tensor_info": (without("tensor_info"), "tensor_info"),
    "no list of tensors": (without("tensor_info", "input_tensor_keys"), r"tensor_info\.input_tensor_keys"),
    "no details of one": (without("tensor_details", "kwarg_x"), "stride of kwarg_x"),
    "no stride": (without("tensor_details", "kwarg_x", "stride"), "tensor_details.kwarg_x"),
    "dtype no dtype": (record_change(lambda r: r["tensor_details"]["kwarg_x"].update(dtype="torch.load")), "a dtype that this torch does"),
    "status unknown": (record_change(lambda r: r.update(execution_status="done")), "execution_status.*inputs_saved or completed"),
    "signature broken": (record_change(lambda r: r.update(function_signature="(x")), "function signature"),
    "list truncated": (record_change(lambda r: r["input_metadata"]["kwarg_scales"].update(truncated=True)), "truncated"),
    "list too short": (record_change(lambda r: r["input_metadata"]["kwarg_scales"].update(length=3)), "a list of 3 items, got 2 items"),
    "list not typed": (record_change(lambda r: r["input_metadata"].update(kwarg_extra=[1, 2])), "a value with its type"),
    "tensor key unknown": (record_change(lambda r: r["input_metadata"]["kwarg_scales"]["items"][0].update(tensor_key="z")), "key 'z'"),
    "tensor key a list": (record_change(lambda r: r["input_metadata"]["kwarg_scales"]["items"][0].update(tensor_key=[1])), r"key \[1\]"),
    "argument key strange": (record_change(lambda r: r["input_metadata"].update(extra=1)), r"arg_0, arg_1, .* got .*extra"),
    "argument missing by position": (record_change(lambda r: r["input_metadata"].update(arg_1=1)), "keys are missing"),
    "dtype value no dtype": (entry(type="torch.dtype", value="torch.hub"), "a dtype that torch has"),
    "enum without class": (entry(type="enum", name="Swiglu"), "Class.member"),
    "dict key unhashable": (entry(type="dict", length=1, items=[{"key": {"type": "list", "length": 0, "items": []}, "value": 1}]),
                            "hashed"),
    "dict without values": (entry(type="dict", length=1, items=[{"key": 1}]), "a key and a value"),
    "value of no kind": (entry(type="thing"), "a value with its type"),
    "old text list with tensors": (entry(type="list", value="[tensor([1.])]"), "lost the tensors"),
    "old text list cut off": (entry(type="list", value="(" + "1, " * 332 + "10)"), "lost the tensors"),
}

# What was passed is there: the call is read, without outputs.
LOST: dict[str, tuple[Callable[[Path], Any], str]] = {
    "outputs missing": (lambda f: (f / "outputs.pt").unlink(), r"outputs\.pt or outputs\.safetensors .* copied in part"),
    "outputs halved": (cut("outputs.pt", 0.5), r"outputs\.pt.* cut off while being written"),
    "outputs are a folder": (lambda f: [(f / "outputs.pt").unlink(), (f / "outputs.pt").mkdir()], r"outputs\.pt: expected a file, got a folder"),
    "outputs of another call": (replace_file("outputs.pt", {"result_0": torch.ones(3)}), "a file of another call"),
    "outputs of another shape": (replace_file("outputs.pt", {"result_0": torch.ones(3), "result_1": torch.tensor([3], dtype=torch.int32)}),
                                 "of different calls"),
    "result truncated": (record_change(lambda r: r["output_metadata"].update(result={"type": "list", "truncated": True})), "truncated"),
}


@pytest.mark.parametrize("name", list(LOST))
def test_lost_outputs_leave_a_call_with_its_arguments(tmp_path: Path, name: str) -> None:
    damage, message = LOST[name]
    folder = make_call().save(tmp_path)
    whole = calls.load(folder)
    assert whole.lost == "" and len(whole.outputs) == 2
    damage(folder)
    call = calls.load(folder)
    assert (call.status, call.outputs) == (COMPLETED, ()) and same(dict(call.arguments), dict(whole.arguments))
    assert re.search(f"(?s){message}", call.lost), call.lost
    with pytest.raises(MxdebugError, match="expected one whose tensors are known, got lost outputs"):
        call.save(tmp_path / "again")  # it would be written as a call that returned None


@pytest.mark.parametrize("name", list(BROKEN))
def test_broken(tmp_path: Path, name: str) -> None:
    damage, message = BROKEN[name]
    folder = make_call().save(tmp_path)
    calls.load(folder)  # whole so far
    damage(folder)
    with pytest.raises(MxdebugError, match=f"(?s){message}") as error:
        calls.load(folder)
    e = error.value
    assert e.operand and e.expected and e.got
    if (folder / "metadata.jsonl").exists() and "metadata" not in name:
        assert calls.scan(tmp_path)  # one broken call does not hide a session


@pytest.mark.parametrize("keep", [0, 0.5, 0.9])
def test_broken_safetensors(tmp_path: Path, keep: float) -> None:
    folder = make_call().save(tmp_path, "safetensors")
    cut("inputs.safetensors", keep)(folder)
    with pytest.raises(MxdebugError, match="cut off while being written"):
        calls.load(folder)


def test_broken_last_line_is_ignored(tmp_path: Path) -> None:
    folder = make_call().save(tmp_path)
    path = folder / "metadata.jsonl"
    whole = path.read_text()
    path.write_text(whole + whole[:200])
    assert calls.load(folder).status == COMPLETED
    path.write_text(whole[: len(whole) - 50])  # the record of the outputs is the one cut off
    assert calls.load(folder).status == CRASHED


def test_old_text_list_without_tensors(tmp_path: Path) -> None:
    folder = make_call().save(tmp_path)
    entry(type="list", value="[1, 2]")(folder)
    assert calls.load(folder).arguments["extra"] == [1, 2]


def test_older_file_format(tmp_path: Path) -> None:
    """No FlashInfer wrote it, and torch unpacks a tar archive in its place, links and all."""
    folder = make_call().save(tmp_path)
    torch.save(INPUTS, folder / "inputs.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(MxdebugError, match="torch's format before 1.6"):
        calls.load(folder)


def test_parameters_become_plain_tensors(tmp_path: Path) -> None:
    folder = make_call().save(tmp_path)
    torch.save(INPUTS | {"kwarg_x": torch.nn.Parameter(X)}, folder / "inputs.pt")
    x = calls.load(folder).arguments["x"]
    assert type(x) is torch.Tensor and not x.requires_grad


@pytest.mark.parametrize(("name", "message"), [
    ("", "not a FlashInfer dump, or nothing was recorded"), ("nowhere", "no such file"), ("inputs.pt", "give the folder"),
    ("session.jsonl", "nothing was recorded")])
def test_foreign_path(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "notes").mkdir()
    if "." in name:
        (tmp_path / name).write_text("{}\n")
    for read in (calls.scan, calls.load):
        with pytest.raises(MxdebugError, match=message):
            read(tmp_path / name)


# ---------------------------------------------------------------- FlashInfer's own writer and reader

API_LOGGING = next((Path(place) / "api_logging.py" for spec in [importlib.util.find_spec("flashinfer")] if spec
                    for place in spec.submodule_search_locations or []), None)
needs_flashinfer = pytest.mark.skipif(API_LOGGING is None, reason="FlashInfer is not installed")

# Only api_logging.py of FlashInfer: importing the package takes many seconds.
WRITER = """
import enum, importlib.util, os, sys, types
import torch
package = types.ModuleType("flashinfer"); package.__path__ = [os.path.dirname(sys.argv[1])]; sys.modules["flashinfer"] = package

class Kind(enum.IntEnum):
    Swiglu = 3

class Config:
    def __str__(self): return "Config(size=8)"

def log(folder, safetensors):
    os.environ |= {"FLASHINFER_LOGLEVEL": "10", "FLASHINFER_DUMP_DIR": folder, "FLASHINFER_DUMP_SAFETENSORS": safetensors}
    spec = importlib.util.spec_from_file_location("flashinfer.api_logging", sys.argv[1])
    module = importlib.util.module_from_spec(spec); sys.modules[spec.name] = module; spec.loader.exec_module(module)
    return module

def toy(x, scales, kind=Kind.Swiglu, *, dtype=torch.bfloat16, table=None, config=None, output=None):
    if kind == "bad": raise RuntimeError("kernel")
    output.copy_(x.float() * 2)
    return [output, (x.T, {"n": scales[1]})]

def silent(x):
    x.mul_(2)

x = torch.arange(12, dtype=torch.float32).reshape(3, 4).T
scales = [torch.arange(256, dtype=torch.uint8), torch.arange(6).to(torch.float8_e4m3fn).reshape(2, 3)]
for name in ("torch", "safetensors"):
    api = log(os.path.join(sys.argv[2], name), str(int(name == "safetensors")))
    f = api.flashinfer_api(toy)
    f(x, scales, output=torch.full((4, 3), 9.0))
    f(x=x[:2, 1:], scales=scales, kind=Kind.Swiglu, dtype=torch.float16, table={"a": (x, 1)}, config=Config(),
      output=torch.full((2, 2), 9.0))
    try: f(x, scales, "bad")
    except RuntimeError: pass
    try: f(x, scales, 1, 2, wrong=3)
    except TypeError: pass
api = log(os.path.join(sys.argv[2], "graph"), "0")
api._is_current_stream_capturing = lambda: True
out = torch.full((4, 3), 9.0)
f, g = api.flashinfer_api(toy), api.flashinfer_api(silent)
f(x, scales, output=out); g(out)
api.flush_graph_dumps(); x += 100; api.flush_graph_dumps()
api.clear_graph_dumps()
f(x, scales, output=out)  # no replay
sys.stdout.flush(); os._exit(0)  # a normal exit would flush it
"""


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sessions that FlashInfer wrote: torch, safetensors, graph."""
    folder = tmp_path_factory.mktemp("written")
    (folder / "write.py").write_text(WRITER)
    environment = {k: v for k, v in os.environ.items() if not k.startswith("FLASHINFER")}
    done = subprocess.run([sys.executable, folder / "write.py", API_LOGGING, folder], env=environment, capture_output=True, text=True)
    assert done.returncode == 0 and "Failed to dump" not in done.stdout, done.stdout + done.stderr
    return folder


@needs_flashinfer
@pytest.mark.parametrize("tensor_format", ["torch", "safetensors"])
def test_written_by_flashinfer(written: Path, tensor_format: str) -> None:
    found = calls.scan(written / tensor_format)
    assert [(r.function, r.sequence, r.status) for r in found] == [
        ("toy", 1, COMPLETED), ("toy", 2, COMPLETED), ("toy", 3, CRASHED), ("toy", 4, CRASHED)]
    by_position, by_name, raised, rejected = (r.load() for r in found)
    x = torch.arange(12, dtype=torch.float32).reshape(3, 4).T
    scales = [torch.arange(256, dtype=torch.uint8), torch.arange(6).to(torch.float8_e4m3fn).reshape(2, 3)]

    assert by_position.module == "__main__" and by_position.process > 0 and not by_position.graph_capture
    assert {"flashinfer", "torch", "python"} <= by_position.versions.keys()
    expected = {"x": x, "scales": scales, "kind": EnumMember("Swiglu", "Kind"), "dtype": torch.bfloat16, "table": None, "config": None,
                "output": torch.full((4, 3), 9.0)}  # as it was before the call
    assert same(dict(by_position.arguments), expected)
    assert by_position.defaulted == {"kind", "dtype", "table", "config"}
    assert same(by_position.outputs, ((x * 2).contiguous(), x.T, scales[1]))

    part = x[:2, 1:]
    assert part.stride() == (1, 4)
    expected = {"x": part, "scales": scales, "kind": EnumMember("Swiglu", "Kind"), "dtype": torch.float16, "table": {"a": (x, 1)},
                "config": Opaque("Config", "Config(size=8)"), "output": torch.full((2, 2), 9.0)}
    assert same(dict(by_name.arguments), expected) and by_name.defaulted == frozenset()
    assert by_name.arguments["kind"].value == 3

    assert raised.outputs == () and raised.arguments["kind"] == "bad" and raised.arguments["output"] is None
    assert rejected.arguments["arg_3"] == 2 and rejected.arguments["wrong"] == 3  # what made it a TypeError


@needs_flashinfer
def test_graph_written_by_flashinfer(written: Path) -> None:
    found = calls.scan(written / "graph" / "session.jsonl")
    assert sorted((r.function, r.sequence, r.flush, r.status, r.graph_capture) for r in found) == [
        ("silent", 1, 1, COMPLETED, True), ("silent", 1, 2, COMPLETED, True),  # no output tensors: FlashInfer leaves "inputs_saved"
        ("toy", 1, 1, COMPLETED, True), ("toy", 1, 2, COMPLETED, True), ("toy", 2, 0, PENDING, True)]
    toys = [r for r in found if r.function == "toy"]
    first, second = toys[0].load(), toys[1].load()
    assert torch.equal(second.arguments["x"], first.arguments["x"] + 100)
    assert toys[1].source.parent.name == "graph_flushes" and len(first.outputs) == 3
    never = toys[2].load()
    assert never.outputs == () and not {"x", "scales", "output"} & never.arguments.keys() and never.arguments["kind"] == "Swiglu"
    with pytest.raises(MxdebugError, match="exactly one call, got 2"):
        calls.load(toys[0].source.parent.parent)
    assert calls.load(toys[0].source).source == toys[0].source


@needs_flashinfer
def test_last_flush_without_snapshot_is_listed(written: Path, tmp_path: Path) -> None:
    base = shutil.copytree(calls.scan(written / "graph")[0].source.parent.parent, tmp_path / "copy")
    shutil.rmtree(base / "graph_flushes" / "flush_0002")
    assert [(r.flush, r.status) for r in calls.scan(base)] == [(0, COMPLETED), (1, COMPLETED)]
    (base / "graph_flushes" / "flush_0001" / "metadata.jsonl").unlink()
    (base / "metadata.jsonl").write_text("")
    assert [(r.flush, r.status) for r in calls.scan(base)] == [(0, UNREADABLE), (1, UNREADABLE)]


@needs_flashinfer
@pytest.mark.parametrize("tensor_format", ["torch", "safetensors"])
def test_read_by_flashinfer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tensor_format: str) -> None:
    monkeypatch.setenv("FLASHINFER_LOGLEVEL", "0")
    spec = importlib.util.spec_from_file_location("mxdebug_test_api_logging", API_LOGGING)
    api = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(api)
    call = make_call()
    replayed = api.replay_from_dump(str(call.save(tmp_path, tensor_format)), compare_outputs=True, device="cpu")
    assert replayed["args"] == [] and replayed["kwargs"].keys() == {"x", "scales", "output"}
    assert torch.equal(replayed["kwargs"]["x"], call.arguments["x"])
    assert same(replayed["kwargs"]["scales"][0], call.arguments["scales"][0])
    assert [same(replayed["expected_tensors"][f"result_{i}"], call.outputs[i]) for i in range(2)] == [True, True]


# ---------------------------------------------------------------- capture


class Activation(enum.IntEnum):
    Swiglu = 3


def _moe(input: torch.Tensor, quant_scales: list[torch.Tensor], activation: Activation = Activation.Swiglu, *,
         output: torch.Tensor | None = None, config: Any = None) -> list[torch.Tensor]:
    if input.numel() == 0:
        raise RuntimeError("no tokens")
    output.copy_(input * 2)
    return [output, quant_scales[0]]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[types.SimpleNamespace]:
    """FlashInfer replaced by modules whose function is `_moe`, and an engine that had imported it before."""
    def cutlass_fused_moe(*args: Any, **kwargs: Any) -> Any:
        return _moe(*args, **kwargs)

    cutlass_fused_moe.__wrapped__ = _moe  # as FlashInfer's decorator does
    modules = {name: types.ModuleType(name) for name in ("flashinfer", "flashinfer.fused_moe", "engine")}
    modules["flashinfer"].__version__ = "9.9"
    modules["flashinfer.fused_moe"].cutlass_fused_moe = cutlass_fused_moe
    modules["flashinfer.fused_moe"].CONSTANT = 1
    modules["engine"].moe_under_another_name = modules["engine"].moe_twice = cutlass_fused_moe
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield types.SimpleNamespace(moe=modules["flashinfer.fused_moe"], engine=modules["engine"], original=cutlass_fused_moe)
    assert modules["flashinfer.fused_moe"].cutlass_fused_moe is modules["engine"].moe_under_another_name is cutlass_fused_moe
    assert modules["engine"].moe_twice is cutlass_fused_moe


def test_capture(fake: types.SimpleNamespace, tmp_path: Path) -> None:
    x, scales, out = torch.arange(6.0).reshape(2, 3).T, [torch.ones(2, dtype=torch.uint8)], torch.full((3, 2), 9.0)
    with calls.capture() as caught:
        assert fake.original not in (fake.moe.cutlass_fused_moe, fake.engine.moe_under_another_name, fake.engine.moe_twice)
        fake.engine.moe_under_another_name(x, scales, output=out)
        result = fake.moe.cutlass_fused_moe(input=x, quant_scales=scales, activation=Activation.Swiglu, output=out,
                                            config=types.SimpleNamespace(a=1))
        assert result[0] is out
        x.fill_(-1)
    fake.moe.cutlass_fused_moe(x, scales, output=out)  # not recorded any more
    first, second = caught
    assert first.function == "cutlass_fused_moe" and first.status == COMPLETED and (first.sequence, second.sequence) == (1, 2)
    assert first.versions["flashinfer"] == "9.9" and first.process == os.getpid() and first.source is None
    assert first.arguments["input"].tolist() == [[0, 3], [1, 4], [2, 5]] and first.arguments["input"].stride() == (1, 3)
    assert (first.arguments["output"] == 9).all()  # before the kernel wrote into it
    assert torch.equal(first.outputs[0], first.arguments["input"] * 2) and len(first.outputs) == 2
    assert first.arguments["activation"] == "Swiglu" and first.defaulted == {"activation", "config"}
    assert second.arguments["activation"].value == 3 and second.defaulted == frozenset()
    assert (second.arguments["output"] == first.outputs[0]).all()
    assert second.arguments["config"] == Opaque("SimpleNamespace", "namespace(a=1)")
    assert same(dict(calls.load(second.save(tmp_path)).arguments), dict(second.arguments))


def test_capture_sees_modules_imported_meanwhile(fake: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    late = types.ModuleType("late")
    monkeypatch.setitem(sys.modules, "late", late)
    with calls.capture("cutlass_fused_moe", "flashinfer.fused_moe.cutlass_fused_moe") as caught:  # twice the same
        late.f = fake.moe.cutlass_fused_moe
        late.f(torch.ones(1), [torch.ones(1)], output=torch.ones(1))
    assert late.f is fake.original and len(caught) == 1


def test_capture_of_a_call_that_raises(fake: types.SimpleNamespace) -> None:
    caught: list[Call] = []
    with pytest.raises(RuntimeError, match="no tokens"), calls.capture() as caught:
        fake.moe.cutlass_fused_moe(torch.empty(0), [], output=torch.ones(1))
    assert [(c.status, c.outputs) for c in caught] == [(CRASHED, ())] and caught[0].arguments["input"].shape == (0,)
    with pytest.raises(TypeError), calls.capture() as caught:
        fake.moe.cutlass_fused_moe(torch.ones(1), [], surprise=1)
    assert caught[0].arguments["surprise"] == 1


def test_capture_keeps_strides_with_gaps(fake: types.SimpleNamespace) -> None:
    wide = torch.arange(20.0).reshape(2, 10)
    with calls.capture() as caught:
        fake.moe.cutlass_fused_moe(wide[:, 2:4], [wide[:1].expand(3, 10)], output=torch.ones(2, 2))
    assert same(caught[0].arguments["input"], wide[:, 2:4])
    assert caught[0].arguments["quant_scales"][0].stride() == (10, 1)  # elements overlapped


def test_capture_nests(fake: types.SimpleNamespace) -> None:
    with calls.capture() as outer:
        with calls.capture() as inner:
            fake.moe.cutlass_fused_moe(torch.ones(1), [torch.ones(1)], output=torch.ones(1))
        fake.moe.cutlass_fused_moe(torch.ones(1), [torch.ones(1)], output=torch.ones(1))
    assert (len(outer), len(inner)) == (2, 1)


def test_capture_inside_a_cuda_graph(fake: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with calls.capture() as caught:
        fake.moe.cutlass_fused_moe(torch.ones(1), [torch.ones(1)], output=torch.ones(1))
    assert (caught[0].status, caught[0].graph_capture, caught[0].outputs) == (PENDING, True, ())
    assert caught[0].arguments.keys() == {"activation", "config"}


@pytest.mark.parametrize("name", ["no_such_moe", "flashinfer.fused_moe.no_such_moe", "flashinfer.no_such.moe", "CONSTANT"])
def test_capture_of_unknown_name_patches_nothing(fake: types.SimpleNamespace, name: str) -> None:
    with pytest.raises(MxdebugError, match="looked for flashinfer"), calls.capture("cutlass_fused_moe", name):
        pytest.fail("entered")
    assert fake.moe.cutlass_fused_moe is fake.original


# ---------------------------------------------------------------- the recipe for a dump


@pytest.mark.parametrize(("arguments", "expected"), [
    ((), ("cutlass_fused_moe,trtllm_fp4_block_scale_moe,trtllm_fp4_block_scale_routed_moe,cute_dsl_fused_moe_nvfp4,mm_bf16_fp4", "{cwd}/flashinfer_dumps")),
    (("*moe*,mm_fp4", "/tmp/my dumps; rm -rf $HOME"), ("*moe*,mm_fp4", "/tmp/my dumps; rm -rf $HOME")),
    (("a'b", "sub/d'"), ("a'b", "{cwd}/sub/d'"))])
def test_dump_recipe(tmp_path: Path, arguments: tuple[str, ...], expected: tuple[str, str]) -> None:
    recipe = calls.dump_recipe(*arguments)
    script = f"vllm() {{ env; echo ARGS=\"$*\"; }}\n{recipe}"
    done = subprocess.run(["bash", "-euc", script], cwd=tmp_path, env={"PATH": os.environ["PATH"]}, stdout=subprocess.PIPE, text=True,
                          check=True)
    seen = dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)
    assert (seen["FLASHINFER_DUMP_INCLUDE"], seen["FLASHINFER_DUMP_DIR"]) == (expected[0], expected[1].format(cwd=tmp_path))
    assert seen["FLASHINFER_LOGLEVEL"] == "10" and int(seen["FLASHINFER_DUMP_MAX_COUNT"]) and float(seen["FLASHINFER_DUMP_MAX_SIZE_GB"])
    assert seen["FLASHINFER_DUMP_SAFETENSORS"] == "0" and "--enforce-eager" in seen["ARGS"]


@needs_flashinfer
def test_dump_recipe_names_variables_that_flashinfer_reads() -> None:
    source = API_LOGGING.read_text()
    names = [line.split()[1].split("=")[0] for line in calls.dump_recipe().splitlines() if line.startswith("export ")]
    assert len(names) == 6 and all(f'os.environ.get("{name}"' in source for name in names)


def test_dump_recipe_needs_a_function() -> None:
    with pytest.raises(MxdebugError, match="every call"):
        calls.dump_recipe(" , ")
