"""Hostile and contradictory input by name: what the fuzzers found, minimised, and what they are unlikely to come upon.

One line says why a case is there, where its name does not."""

from __future__ import annotations

import collections
import io
import json
import os
import pickle
import shutil
import struct
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from fuzz import guard, seeds
from safetensors import safe_open

from mxdebug import MxdebugError, calls, diagnose, files, open_checkpoint, recorded
from mxdebug.checkpoints import linears
from mxdebug.cli import main


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Every seed; nobody changes it. Read once, so that imports and caches are no part of a case."""
    made = seeds.make(tmp_path_factory.mktemp("whole") / "seeds")
    for name in seeds.NAMES:
        seeds.ENTRIES[name](made / name, made)
    guard.install()
    return made


def attacked(name: str, whole: Path, tmp_path: Path, damage: Callable[[Path], Any]) -> tuple[guard.Outcome, Path]:
    """(what reading a damaged copy of a seed did, the copy). `damage` gets the folder with the files in it."""
    folder = Path(shutil.copytree(whole / name, tmp_path / name))
    damage(next(p.parent for p in sorted(folder.rglob("*")) if p.suffix in (".pt", ".safetensors")))
    return guard.attack(lambda f: seeds.ENTRIES[name](f, whole), folder, whole), folder


# -- .pt files -----------------------------------------------------------------------------------------------------------------


class Calls:
    """Pickles to a call of `function`."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self.what = function, arguments

    def __reduce__(self) -> Any:
        return self.what


class _Subclass(torch.Tensor):
    pass


def _saved(content: Any) -> bytes:
    out = io.BytesIO()
    torch.save(content, out)
    return out.getvalue()


def _with_pickle(data: bytes, pickled: bytes, method: int = zipfile.ZIP_STORED, twice: bool = False) -> bytes:
    """A .pt file with another data.pkl."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w", method) as new:
        for m in old.infolist():
            new.writestr(m.filename, pickled if m.filename.endswith("data.pkl") else old.read(m))
        if twice:
            new.writestr("other/data.pkl", pickled)
    return out.getvalue()


def _strided(size: tuple[int, ...], stride: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> bytes:
    """A tensor of 4 elements that claims another size and strides."""

    def reduce(self: torch.Tensor, protocol: int) -> Any:
        storage = torch.storage.TypedStorage(wrap_storage=self.untyped_storage(), dtype=self.dtype, _internal=True)
        return torch._utils._rebuild_tensor_v2, (storage, 0, size, stride, False, collections.OrderedDict())

    with monkeypatch.context() as m:
        m.setattr(torch.Tensor, "__reduce_ex__", reduce)
        return _saved({"x": torch.zeros(4)})


def _tar() -> bytes:
    """torch's first format: it would be unpacked into a temporary folder, and its link followed."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        member = tarfile.TarInfo("storages")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(member)
    return out.getvalue()


X = torch.zeros(4)
HOLDS = "holds code, or objects that only code can rebuild"
PT: dict[str, tuple[Callable[[pytest.MonkeyPatch], bytes], str]] = {
    "os.system": (lambda m: _saved({"x": Calls(os.system, "true")}), f"posix system.*{HOLDS}"),
    "eval": (lambda m: _saved({"x": Calls(eval, "1")}), f"builtin.* eval.*{HOLDS}"),
    # torch's own list allows these two, and calls them: memory, and a module of the attacker's choice out of the standard library
    "bytearray of 10 GB": (lambda m: _saved({"x": Calls(bytearray, 10**10)}), f"bytearray.*{HOLDS}"),
    "a codec by name": (lambda m: _saved({"x": Calls(__import__("_codecs").encode, "x", "bz2")}), f"_codecs encode.*{HOLDS}"),
    "bare pickle": (lambda m: pickle.dumps({"x": Calls(os.system, "true")}, 2), f"a bare pickle.*{HOLDS}"),
    "protocol 4": (lambda m: _with_pickle(_saved({"x": X}), pickle.dumps({"x": Calls(os.system, "true")}, 4)), f"opcode .*{HOLDS}"),
    "INST": (lambda m: _with_pickle(_saved({"x": X}), b"(S'true'\nios\nsystem\n."), f"opcode .*{HOLDS}"),
    "persistent id that is none": (lambda m: _with_pickle(_saved({"x": X}), b"\x80\x02X\x01\x00\x00\x00xQ."), "a whole .pt file"),
    "older format": (lambda m: _older(), f"torch's format before 1.6.*{HOLDS}"),
    "tar with a link": (lambda m: _tar(), "a whole .pt file.*BadZipFile"),
    "deflated members": (lambda m: _with_pickle(_saved({"x": X}), b"\0" * 10**7, zipfile.ZIP_DEFLATED), "a zip bomb"),
    "pickle of 10 MB": (lambda m: _with_pickle(_saved({"x": X}), b"]" * 10**7), "one data.pkl of at most"),
    "two pickles": (lambda m: _with_pickle(_saved({"x": X}), b"\x80\x02}.", twice=True), "one data.pkl of at most"),
    # 16 bytes that say they are 4 TiB: whoever compares or copies it has to wait, or runs out of memory
    "elements repeated": (lambda m: _strided((2**40,), (0,), m), "strides that repeat elements"),
    "larger than its storage": (lambda m: _strided((1000,), (1,), m), "a whole .pt file"),
    "negative strides": (lambda m: _strided((2, 2), (-1, 1), m), "a whole .pt file"),
    "meta": (lambda m: _saved({"x": torch.zeros(4, device="meta")}), HOLDS),
    "sparse": (lambda m: _saved({"x": X.to_sparse()}), HOLDS),
    "quantised": (lambda m: _saved({"x": torch.quantize_per_tensor(X, 1.0, 0, torch.qint8)}), HOLDS),
    "nested": (lambda m: _saved({"x": torch.nested.nested_tensor([X, X])}), HOLDS),
    "subclass": (lambda m: _saved({"x": X.as_subclass(_Subclass)}), HOLDS),
    "negated view": (lambda m: _saved({"x": torch._neg_view(X)}), "a plain tensor"),
    "empty": (lambda m: b"", "a whole .pt file"),
}


def _older() -> bytes:
    out = io.BytesIO()
    torch.save({"x": X}, out, _use_new_zipfile_serialization=False)
    return out.getvalue()


@pytest.mark.parametrize("name", list(PT))
def test_pt(name: str, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As inputs it is refused, by name; as outputs it costs the outputs alone. Neither is ever executed."""
    make, message = PT[name]
    data = make(monkeypatch)
    out, folder = attacked("dump-pt", whole, tmp_path, lambda f: (f / "inputs.pt").write_bytes(data))
    assert (out.result, out.problem) == ("refused", "")
    with pytest.raises(MxdebugError, match=f"(?s){message}"):
        calls.load(folder)
    out, folder = attacked("dump-pt", whole, tmp_path / "2", lambda f: (f / "outputs.pt").write_bytes(data))
    assert (out.result, out.problem) == ("read", "")
    call = calls.load(folder)
    assert call.outputs == () and call.lost and call.arguments["input"].shape == (1, 384)


def test_code_would_run_without_us(tmp_path: Path) -> None:
    """The traps are traps: Python's own reader runs them."""
    marker = tmp_path / "ran"
    pickle.loads(pickle.dumps(Calls(os.mkdir, str(marker))))
    assert marker.is_dir()


# -- safetensors ---------------------------------------------------------------------------------------------------------------


def _header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = sorted(folder.glob("*.safetensors"))[0]
        data = path.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        made = change(header)
        text = json.dumps(header).encode() if not isinstance(made, bytes) else made
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])

    return damage


def _first(**values: Any) -> Callable[[Path], None]:
    return _header(lambda h: next(v for k, v in h.items() if k != "__metadata__").update(values))


def _length(value: int) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = sorted(folder.glob("*.safetensors"))[0]
        path.write_bytes(struct.pack("<Q", value) + path.read_bytes()[8:])

    return damage


SAFETENSORS: dict[str, Callable[[Path], Any]] = {
    "length 2^63": _length(2**63),
    "length 2^64 - 1": _length(2**64 - 1),
    "length 0": _length(0),
    "offsets overlap": _header(
        lambda h: (
            [v.update(data_offsets=[0, v["data_offsets"][1] - v["data_offsets"][0]]) for k, v in h.items() if k != "__metadata__"] and None
        )
    ),
    "offsets beyond the end": _first(data_offsets=[0, 2**40]),
    "offsets negative": _first(data_offsets=[-1, 5]),
    "offsets turned": _first(data_offsets=[9, 2]),
    "shape overflows": _first(shape=[2**62, 2**62]),
    "shape negative": _first(shape=[-1]),
    "dtype unknown": _first(dtype="Q4_K"),
    "a dtype torch has no name for": _first(dtype="F6_E2M3"),
    "not JSON": _header(lambda h: b"x" * 100),
    "deep": _header(lambda h: b"[" * 100_000),
    "not UTF-8": _header(lambda h: b'{"\xc3\x28":1}'),
    "no tensors": _header(lambda h: b"{}"),
}


@pytest.mark.parametrize("seed", ["dump-safetensors", "gpt-oss", "nvfp4-linear", "run", "sent"])
@pytest.mark.parametrize("name", list(SAFETENSORS))
def test_safetensors(name: str, seed: str, whole: Path, tmp_path: Path) -> None:
    out, _ = attacked(seed, whole, tmp_path, SAFETENSORS[name])
    assert (out.result, out.problem) == ("refused", "")


# -- what stands in a file's place ---------------------------------------------------------------------------------------------


def _replace(path: Path, how: str, outside: Path) -> None:
    path.unlink()
    if how == "link":
        path.symlink_to(outside)
    elif how == "fifo":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    elif how == "zero":
        path.symlink_to("/dev/zero")
    elif how == "loop":
        path.symlink_to(path.name)
    elif how == "sparse":
        with path.open("wb") as f:
            f.truncate(10 * 2**40)


@pytest.mark.parametrize("how", ["link", "fifo", "folder", "zero", "loop", "sparse"])
@pytest.mark.parametrize(
    ("seed", "file"),
    [
        ("dump-pt", "inputs.pt"),
        ("dump-pt", "metadata.jsonl"),
        ("dump-safetensors", "inputs.safetensors"),
        ("gpt-oss", "config.json"),
        ("gpt-oss", "model.safetensors"),
        ("mxfp4", "model.safetensors.index.json"),
        ("mxfp4", "model-00002-of-00002.safetensors"),
        ("modelopt-linear", "model.safetensors"),
        ("run", "run.safetensors"),
        ("sent", "sent.safetensors"),
    ],
)
def test_in_the_place_of_a_file(seed: str, file: str, how: str, whole: Path, tmp_path: Path) -> None:
    """A FIFO was waited for, /dev/zero and sparse files read until memory ended, links out of the folder followed.

    A file that the user named may be a link. `outside` is whole, so that it would be read, were it opened.
    """
    if how in ("link", "zero") and seed in ("run", "sent"):
        pytest.skip("named by the user")
    outside = Path(shutil.copytree(whole, tmp_path / "outside"))
    out, _ = attacked(seed, whole, tmp_path, lambda f: _replace(f / file, how, next((outside / seed).rglob(file))))
    # A loop in the index's place is no index; without one the shards are found by their names.
    assert (out.result, out.problem) == ("read" if (how, file) == ("loop", "model.safetensors.index.json") else "refused", "")


def test_a_hugging_face_cache_is_read(whole: Path, tmp_path: Path) -> None:
    """Its files are links out of the folder, into the blobs beside it; one that leads elsewhere is refused all the same."""
    blobs, snapshot = tmp_path / "models--x" / "blobs", tmp_path / "models--x" / "snapshots" / "0abc"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, file in enumerate(sorted((whole / "gpt-oss" / "model").iterdir())):
        shutil.copyfile(file, blobs / f"{i}")
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{i}")
    assert open_checkpoint(snapshot).layer().index == 0
    shutil.copyfile(snapshot / "config.json", tmp_path / "models--x" / "config.json")
    (snapshot / "config.json").unlink()
    (snapshot / "config.json").symlink_to("../../config.json")
    with pytest.raises(MxdebugError, match="a link that leads out of the folder"):
        open_checkpoint(snapshot)


def test_a_folder_of_the_user_may_be_a_link(whole: Path, tmp_path: Path) -> None:
    (tmp_path / "m").symlink_to(whole / "gpt-oss" / "model")
    (tmp_path / "one.safetensors").symlink_to(whole / "gpt-oss" / "model" / "model.safetensors")
    shutil.copyfile(whole / "gpt-oss" / "model" / "config.json", tmp_path / "config.json")
    assert open_checkpoint(tmp_path / "m").layers == open_checkpoint(tmp_path / "one.safetensors").layers == (0,)
    assert open_checkpoint(tmp_path / "one.safetensors").layer().index == 0


def test_a_link_among_dumps_is_listed_and_not_followed(whole: Path, tmp_path: Path) -> None:
    """scan() went through whatever it led to, two levels deep."""
    session = tmp_path / "session"
    session.mkdir()
    call = next((whole / "dump-pt" / "dumps").glob("2*"))
    (session / call.name).symlink_to(call)
    (session / "all").symlink_to("/")
    found = calls.scan(session)
    assert [r.status for r in found] == ["unreadable"] * 2 and all("expected a folder, got a link" in r.problem for r in found)
    for r in found:
        with pytest.raises(MxdebugError, match="got a link"):
            r.load()
    assert calls.load(session / call.name).status == "completed"  # named by the user


# -- JSON ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"a": 1, "a": 2}', "the key 'a' twice"),
        ('{"a": ' + "9" * 5000 + "}", "Exceeds the limit"),
        ("[" * 10**5, "recursion"),
        ("[]", "a JSON object"),
        ('{"a": [' + "[]," * 2**20 + "0]}", "values"),
        ("", "JSON"),
        ('{"a": "\xff', "JSON"),
    ],
)
def test_json(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(MxdebugError, match=f"(?s){message}"):
        files.read_json(tmp_path / "x.json", tmp_path)


def _metadata(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "metadata.jsonl"
        record = json.loads(path.read_text().splitlines()[-1])
        change(record)
        path.write_text(json.dumps(record) + "\n")

    return damage


def _deep(levels: int) -> Any:
    return [] if levels == 0 else [_deep(levels - 1)]


METADATA: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    # each level of JSON took two of Python's
    "deep value of an enum": (
        lambda r: r["input_metadata"].update(kwarg_backend={"type": "enum", "name": "A.cutlass", "value": _deep(600)}),
        "read",
    ),
    "a size that is a name": (
        lambda r: r["input_metadata"].update(kwarg_tp_size={"type": "enum", "name": "A.b", "value": 2}),
        "read",
    ),  # as a broken contract
    "strides that are no numbers": (lambda r: r["tensor_details"]["kwarg_input"].update(stride=[True, 1]), "refused"),
    "deep value of no type": (lambda r: r["input_metadata"].update(kwarg_tp_size=_deep(900)), "refused"),
    "strides beyond int64": (lambda r: r["tensor_details"]["kwarg_input"].update(stride=[2**70, 1]), "refused"),
    "shape of another": (lambda r: r["tensor_details"]["kwarg_input"].update(shape=[2, 96]), "refused"),
    "half a surrogate": (lambda r: r.update(function_name="\ud800"), "refused"),
    "terminal escapes": (lambda r: r.update(function_name="\x1b[2J\x1b]0;x\x07"), "refused"),
    "an argument twice": (lambda r: r["input_metadata"].update(arg_0=1), "read|refused"),
    "ranks beyond all numbers": (lambda r: r["input_metadata"].update(kwarg_tp_size=10**30, kwarg_tp_rank=10**29), "refused"),
    "ranks of nobody": (lambda r: r["input_metadata"].update(kwarg_ep_size=0, kwarg_ep_rank=-1), "refused|read"),
}


@pytest.mark.parametrize("name", list(METADATA))
def test_metadata(name: str, whole: Path, tmp_path: Path) -> None:
    change, results = METADATA[name]
    out, folder = attacked("dump-pt", whole, tmp_path, _metadata(change))
    assert out.result in results.split("|") and not out.problem, out
    ran = CliRunner().invoke(main, ["diagnose", str(folder)])
    assert isinstance(ran.exception, (SystemExit, type(None))) and not guard.unescaped(ran.output)


@pytest.mark.parametrize("module", ["model.layers.\u00b2.q_proj", f"model.layers.{'9' * 5000}.q_proj", "model.layers.\u0663.q_proj"])
def test_digits_that_int_refuses(module: str) -> None:
    """Sorted by number: a superscript is a digit but no number, and Python converts no more than 4300 of them."""
    names = [f"{m}.weight_scale_2" for m in (module, "model.layers.10.q_proj", "model.layers.9.q_proj")]
    found = linears.find_linears(linears.find_modules(names), linears.MODELOPT_NVFP4)
    assert [m for m in found if m != module] == ["model.layers.9.q_proj", "model.layers.10.q_proj"] and module in found


# -- contradictions ------------------------------------------------------------------------------------------------------------


def test_the_output_of_another_call(whole: Path, tmp_path: Path) -> None:
    """Its shape fits neither the metadata nor the call: what was passed still decides."""
    other = next(recorded.call("c01").path.glob("2*")) / "outputs.pt"
    out, folder = attacked("dump-pt", whole, tmp_path, lambda f: shutil.copyfile(other, f / "outputs.pt"))
    assert out.result == "read" and not out.problem
    d = diagnose(folder / "dumps", whole / "mxfp4" / "model")
    assert d.verdict == "undecided" and "operands and parameters are the checkpoint's" in d.summary
    assert d.open[0].startswith("the outputs could not be read: ") and "different calls" in d.open[0]
    assert "the outputs could not be read" in str(d) and "the outputs could not be read" in d._repr_html_()


@pytest.mark.parametrize("damage", ["missing", "cut off", "a folder"])
def test_lost_outputs_and_the_inputs_decide(damage: str, tmp_path: Path) -> None:
    """c04 was called with block scales that were not folded: its inputs prove it, with or without what came out."""
    r = recorded.call("c04")
    shutil.copytree(r.path, tmp_path / "c04", copy_function=shutil.copyfile)
    file = next((tmp_path / "c04").rglob("outputs.pt"))
    half = file.read_bytes()[:1000]
    file.unlink()
    if damage == "cut off":
        file.write_bytes(half)
    elif damage == "a folder":
        file.mkdir()
    d, with_output = diagnose(tmp_path / "c04", r.checkpoint_path), diagnose(r.path, r.checkpoint_path)
    assert d.verdict == "wrong" and [(f.id, f.strength, f.where) for f in d.findings] == [
        (f.id, f.strength, f.where) for f in with_output.findings
    ]
    assert d.open[0].startswith("the outputs could not be read: ") and d.follows is None and with_output.follows is True
    assert diagnose(calls.load(tmp_path / "c04")).open[0].startswith("the outputs could not be read: ")  # without a checkpoint as well


def test_two_calls_of_one_number_are_two_calls(whole: Path, tmp_path: Path) -> None:
    session = tmp_path / "s"
    one = next((whole / "dump-pt" / "dumps").glob("2*"))
    for name in (one.name, one.name.replace("pid", "pid9")):
        shutil.copytree(one, session / name)
    assert [(r.status, r.sequence) for r in calls.scan(session)] == [("completed", 1)] * 2
    with pytest.raises(MxdebugError, match="exactly one call, got 2"):
        calls.load(session)


@pytest.mark.parametrize("stated", [3, 10**12, -1, 0, 1.0, "4", True, None, [4]])
def test_experts_that_nobody_has(stated: Any, whole: Path, tmp_path: Path) -> None:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "num_local_experts": stated}))

    out, _ = attacked("gpt-oss", whole, tmp_path, change)
    assert (out.result, out.problem) == ("read" if stated is None else "refused", "")


# -- what is shown -------------------------------------------------------------------------------------------------------------

BAD = "\x1b[2J\x1b]0;x\x07<script>alert(1)</script>\u202e\ud800\x00\"'&\x85"


def test_errors_are_printable() -> None:
    error = MxdebugError(BAD, BAD, BAD * 1000, BAD)
    assert (
        not any(guard.unescaped(t) for t in (str(error), error.operand, error.expected, error.got, error.reason))
        and len(str(error)) < 20_000
    )
    assert "\\x1b[2J" in error.operand and "\\u202e" in error.operand and "\\ud800" in error.operand
    str(error).encode()  # half a surrogate cannot be encoded: printing it would raise


def test_a_diagnosis_is_printable_and_escaped(whole: Path) -> None:
    """A name may stand anywhere in it: in the call, what was checked, what is open, a finding's place and evidence."""
    from dataclasses import replace

    r = recorded.call("c04")
    d = diagnose(r.path, r.checkpoint_path)
    d = replace(
        d,
        summary=BAD,
        call=((BAD, BAD),),
        checked=(BAD,),
        open=(BAD,),
        findings=tuple(replace(f, where=BAD, evidence=BAD, advice=BAD) for f in d.findings),
    )
    page = d._repr_html_()
    assert not guard.unescaped(str(d)) and not guard.unescaped(repr(d)) and not guard.unescaped(page)
    assert page.count("&lt;script&gt;") >= 6 and "<script" not in page and "alert(1)" in page
    (str(d) + page).encode()


def test_a_name_of_a_file_is_one_line_and_says_nothing_of_links(tmp_path: Path) -> None:
    """A line of its own could look like a verdict; the target of a link is nobody's business."""
    error = MxdebugError("tensor x\n\nRIGHT: all is well", "a", "b")
    assert "\n" not in str(error) and "x\\n\\nRIGHT" in str(error)
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "w.json").write_text("{}")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "w.json").symlink_to(tmp_path / "secret" / "w.json")
    with pytest.raises(MxdebugError, match="got a link that leads elsewhere") as caught:
        files.read_json(tmp_path / "model" / "w.json", tmp_path / "model")
    assert "secret" not in str(caught.value)


def test_a_name_that_no_file_can_have(tmp_path: Path) -> None:
    """An index may say anything: 300 characters are too many for a name, and an error of ours says so."""
    model = tmp_path / "model"
    shutil.copytree(recorded.call("c09").checkpoint_path, model)
    (shard,) = model.glob("*.safetensors")
    with safe_open(str(shard), "pt") as f:
        names = list(f.keys())
    shard.unlink()
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {n: "n" * 300 + ".safetensors" for n in names}}))
    with pytest.raises(MxdebugError, match="no file"):
        open_checkpoint(model).layer()


# -- every command -------------------------------------------------------------------------------------------------------------

MOE = ["select", "--sm", "100", "--quantisation", "mxfp4", "--checkpoint", "gpt-oss"]
DIAGNOSE = ["diagnose", "C09"]
COMMANDS: list[list[str]] = [
    *([c, BAD] for c in ("demo", "faults", "contract", "glossary", "nothing")),
    ["contract", "nvfp4_w4a16/"],
    [*MOE[:-1], BAD],
    [*MOE, "--activation", BAD],
    [*MOE, "--activations", BAD],
    [*MOE, "--moe-backend", BAD],
    [*MOE, "--version", BAD],
    [*MOE, "--tp", "x"],
    ["select-linear", "--sm", "100", "--flashinfer", BAD],
    ["select-linear", "--sm", "100", "--flashinfer", "\u00b2"],
    ["select-linear", "--sm", "-5"],
    ["select-linear", "--sm", "100", "--flashinfer", "9" * 5000],
    ["select-linear", "--sm", "100", "--linear-backend", BAD],
    ["audit", "--engine", BAD],
    ["verify", "--path", BAD, "--out", "/nonexistent/x"],
    ["diagnose", "/dev/zero"],
    ["diagnose", "/dev/null"],
    ["diagnose", "FIFO"],
    ["diagnose", "FOLDER"],
    *([*DIAGNOSE, option, "FIFO"] for option in ("--checkpoint", "--sent")),
    *([*DIAGNOSE, option, "/dev/zero"] for option in ("--checkpoint", "--sent")),
    *([*DIAGNOSE, "--call", text] for text in (BAD, "\u00b2", "9" * 5000)),
    *(["cut", "C09", "--checkpoint", "MODEL", "--out", "OUT", "--call", text] for text in (BAD, "\u00b2", "9" * 5000)),
    *([*DIAGNOSE, "--index", text] for text in ("FIFO", "/dev/zero")),
    *(["where", "C09", "--index", text] for text in ("FIFO", "/dev/zero")),
    *(["weights", text, "--path", "mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16", "--checkpoint", "MODEL"] for text in ("FIFO", "/dev/zero")),
    ["repeats", "C09"],
    ["repeats", "FOLDER"],
    ["repeats", "C09", "--calls", "\u00b2", BAD],
    ["confusion", "--path", BAD],
    *(
        [*DIAGNOSE, "--checkpoint", "MODEL", *more]
        for more in (["--tp", "0", "0"], ["--tp", "-1", "5"], ["--layer", "-1"], ["--layer", "9" * 30], ["--engine", BAD])
    ),
]


@pytest.mark.parametrize("index", range(len(COMMANDS)))
def test_commands_end_with_code_2_and_one_message(index: int, tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo.safetensors")
    known = {
        "C09": recorded.call("c09").path,
        "MODEL": recorded.call("c09").checkpoint_path,
        "FIFO": tmp_path / "fifo.safetensors",
        "FOLDER": tmp_path / "folder",
        "OUT": tmp_path / "out",
    }
    with guard.limits():
        out = CliRunner().invoke(main, [str(known.get(a, a)).replace("\x00", "").replace("\ud800", "") for a in COMMANDS[index]])
    assert out.exit_code == 2 and isinstance(out.exception, SystemExit), (out.exit_code, out.exception)
    assert "Traceback" not in out.output and 0 < len(out.output) < 30_000 and not guard.unescaped(out.output), out.output
