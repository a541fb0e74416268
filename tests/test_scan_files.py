"""`mxdebug scan` on damaged, hostile and large folders; its state file, its processes and what it writes."""

from __future__ import annotations

import html.parser
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from making_scan import CT_MXFP4, CT_MXFP8, EXPERT, GPT_OSS, KINDS, MODELOPT, MODELOPT_MXFP8, QUARK, config, save, tensors
from safetensors.torch import save_file

from mxdebug import fast
from mxdebug.cli import main
from mxdebug.errors import MxdebugError
from mxdebug.scan import Report, load_index, scan, to_html, to_json
from mxdebug.scan import run as running
from mxdebug.scan.folder import INDEX
from mxdebug.scan.patterns import Patterns
from mxdebug.scan.pieces import Pieces

SHARD = "model-00002-of-00003.safetensors"


def found(report: Report, rule: str) -> list[str]:
    return [f.text for f in report.findings if f.id == rule]


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return save(tmp_path / "checkpoint", tensors(MODELOPT), config(MODELOPT), shards=3)


def header(folder: Path, text: bytes, name: str = SHARD, length: int | None = None) -> None:
    (folder / name).write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text)


# -- damaged and hostile folders --------------------------------------------------------------------------------------------------


def test_a_truncated_shard_is_a_finding_and_the_rest_is_scanned(sharded: Path) -> None:
    whole = scan(sharded)
    data = (sharded / SHARD).read_bytes()
    (sharded / SHARD).write_bytes(data[:-1000])
    report = scan(sharded)
    assert report.verdict == "BROKEN" and found(report, "shard-damaged")[0].startswith(f"{SHARD} ends 1000 bytes too early: ")
    assert not found(report, "tensors-missing")  # they exist, though they cannot be read
    assert 0 < whole.tensors - report.tensors < 40
    assert sum(s.blocks for s in report.statistics) > 0.8 * sum(s.blocks for s in whole.statistics)


HEADERS = {
    "Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
    "empty": b"",
    "no JSON": b"{",
    "a list": b"[]",
    "deep": b"[" * 100_000,
    "a key twice": b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
    "longer": b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
    "a hole": b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,2]}}',
    "backwards": b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[1,0]}}',
    "other size": b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
    "unknown dtype": b'{"a":{"dtype":"Q4","shape":[1],"data_offsets":[0,1]}}',
    "huge shape": b'{"a":{"dtype":"U8","shape":[99999999999999999999],"data_offsets":[0,1]}}',
    "true": b'{"a":{"dtype":"U8","shape":[true],"data_offsets":[0,1]}}',
    "negative": b'{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,-1]}}',
    "overlap": b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"b":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}',
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_damaged_header_is_a_finding(sharded: Path, name: str) -> None:
    header(sharded, HEADERS[name])
    if name in ("Git LFS pointer", "empty"):
        (sharded / SHARD).write_bytes(HEADERS[name])
    else:
        with (sharded / SHARD).open("ab") as file:
            file.write(bytes(4))  # so that no tensor ends after the file, which is another finding
    report = scan(sharded)
    assert (report.verdict, len(found(report, "shard-damaged"))) == ("BROKEN", 1)
    words = {
        "a hole": "without hole",
        "overlap": "without hole",
        "other size": "F32 [2] in bytes [0, 4]",
        "true": "shape [True]",
        "longer": "3 bytes after",
    }
    assert words.get(name, "") in found(report, "shard-damaged")[0]


def test_a_header_that_claims_more_than_the_file_has_is_not_read(sharded: Path) -> None:
    header(sharded, b"{}", length=1 << 50)
    assert "say that the header has" in found(scan(sharded), "shard-damaged")[0]


def test_an_index_may_not_name_files_elsewhere(sharded: Path, tmp_path: Path) -> None:
    outside = save(tmp_path / "outside", {"secret": torch.ones(1)}, {}) / "model.safetensors"
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"] |= {"a": "../outside/model.safetensors", "b": str(outside), "c": "link.safetensors", "d": 7}
    (sharded / INDEX).write_text(json.dumps(index))
    (sharded / "link.safetensors").symlink_to(outside)
    report = scan(sharded)
    assert found(report, "file-refused") == ["3 tensors are said to be in '../outside/model.safetensors' and such"]
    assert [t.partition(":")[0] for t in found(report, "shard-damaged")] == ["link.safetensors"]  # a link that leads out of the folder
    assert report.files == 3


def test_a_shard_that_is_missing_and_one_too_many(sharded: Path) -> None:
    (sharded / SHARD).rename(sharded / "another.safetensors")
    report = scan(sharded)
    assert (
        "no such file" in found(report, "shard-damaged")[0]
        and "1 .safetensors files are not in the index" in found(report, "files-beside")[0]
    )


def test_a_fifo_does_not_hang(sharded: Path) -> None:
    (sharded / SHARD).unlink()
    os.mkfifo(sharded / SHARD)
    assert found(scan(sharded), "shard-damaged")


def test_index_and_files_disagree(sharded: Path) -> None:
    index = json.loads((sharded / INDEX).read_text())
    index["weight_map"].pop("lm_head.weight")
    index["weight_map"]["another.weight"] = SHARD
    (sharded / INDEX).write_text(json.dumps(index))
    assert sorted(found(scan(sharded), "index-disagrees")) == [
        "1 tensors are in a file but not in the index",
        "1 tensors are not in the file that the index names",
    ]


def test_a_tensor_in_two_files(tmp_path: Path) -> None:
    made = tensors(QUARK)
    save(tmp_path, made, config(QUARK))
    (tmp_path / "copy.safetensors").write_bytes((tmp_path / "model.safetensors").read_bytes())
    assert found(scan(tmp_path), "tensor-twice")[0].startswith(f"{len(made)} tensors")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[",
        b"[]",
        b'{"quantization_config": 7}',
        b'{"quantization_config": {"ignore": 7, "config_groups": [1], "format": []}}',
        b'{"text_config": [], "num_hidden_layers": -1, "hidden_size": true}',
        b"\xff",
        b"[" * 100_000,
    ],
)
def test_any_configuration_is_survived(sharded: Path, content: bytes) -> None:
    (sharded / "config.json").write_bytes(content)
    assert any(found(scan(sharded), rule) for rule in ("config-unreadable", "config-silent", "config-not-checked"))


def test_two_configurations_that_contradict_each_other(sharded: Path) -> None:
    (sharded / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "MXFP8"}}))
    assert "hf_quant_config.json quant_algo MXFP8" in found(scan(sharded), "kind-contradiction")[0]


def test_a_pattern_cannot_take_forever() -> None:
    patterns = Patterns(["re:(a|aa)+$", "re:(", "x" * 2000, "re:model.*q_proj"], CT_MXFP4)
    assert not patterns.names("a" * 40 + "b") and patterns.names("model.layers.0.q_proj")
    assert set(patterns.dropped) == {"re:(a|aa)+$", "re:(", "x" * 2000}


@pytest.mark.parametrize(
    ("kind", "entry", "name", "names", "covers"),
    [
        (MODELOPT, "model.layers.1*", "model.layers.10.q", True, True),
        (MODELOPT, "model.layers.*.q", "model.layers.0.q.a", False, False),
        (QUARK, "model.layers.0", "model.layers.0.q", False, True),  # a module above: Quark and gpt-oss mean what is below it
        (CT_MXFP4, "re:.*gate", "m.gate_proj", True, True),  # as compressed-tensors: from the start, not to the end
        (CT_MXFP4, "language_model.model.layers.0.q", "model.language_model.layers.0.q", False, True),
        (CT_MXFP4, "vision_tower.encoder.layers.0.q", "model.layers.0.q", False, False),  # a tower's layers are others
        (CT_MXFP4, "lm_head", "lm_head.x", False, True),
        (CT_MXFP4, "lm_head", "model.lm_header", False, False),
    ],
)
def test_patterns(kind: str, entry: str, name: str, names: bool, covers: bool) -> None:
    assert (Patterns([entry], kind).names(name), Patterns([entry], kind).covers(name)) == (names, covers)


@pytest.mark.parametrize("what", ["nothing", "empty", "unquantised", "text", "all damaged"])
def test_where_nothing_can_be_scanned(tmp_path: Path, what: str) -> None:
    if what == "unquantised":
        save(tmp_path, {"lm_head.weight": torch.ones(2, 2)}, {})
    if what == "all damaged":
        (tmp_path / "model.safetensors").write_bytes(b"x")
    path = {"nothing": tmp_path / "no", "text": Path(__file__)}.get(what, tmp_path)
    with pytest.raises(MxdebugError):
        scan(path)
    assert CliRunner().invoke(main, ["scan", str(path), "--quiet"]).exit_code == 3


# -- processes and the state file -------------------------------------------------------------------------------------------------


@pytest.fixture
def in_processes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Scans of small batches for which processes pay; a number for each time that they were started."""
    for name, value in (("_BATCH", 1 << 18), ("_WORTH", 1 << 18), ("_THREADS", 1)):
        monkeypatch.setattr(running, name, value)
    contexts, context = [], running._context
    monkeypatch.setattr(running, "_context", lambda: contexts.append(1) or context())
    return contexts


def dies(folder: str, tasks: list[Any]) -> None:
    os._exit(1)


def test_several_processes_find_the_same(sharded: Path, in_processes: list[int], tmp_path: Path) -> None:
    one, two = (json.loads(to_json(scan(sharded, payload=True, processes=n, index=tmp_path / f"{n}"))) for n in (1, 2))
    assert in_processes == [1]  # two processes were started once
    assert one == two and (tmp_path / "1").read_bytes() == (tmp_path / "2").read_bytes()


def test_a_process_that_ends_by_itself_is_said(sharded: Path, in_processes: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "measure", dies)
    with pytest.raises(MxdebugError, match="processes that end by themselves"):
        scan(sharded, payload=True, processes=2)


def test_several_threads_find_the_same(sharded: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With numba too, if it is there; and torch has as many threads as before, in this one and in those to come."""
    monkeypatch.setattr(running, "_BATCH", 1 << 18)
    measure, names = running.measure, set()
    monkeypatch.setattr(running, "measure", lambda *a: names.add(threading.current_thread().name) or time.sleep(0.01) or measure(*a))
    reports, before = [], torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for n, worth in ((1, 1 << 62), (3, 1 << 62), (3, 0)):
            monkeypatch.setattr(fast, "WORTH", worth)
            reports.append(to_json(scan(sharded, payload=True, processes=n, index=tmp_path / f"{len(reports)}")))
            with ThreadPoolExecutor(1) as pool:
                assert (torch.get_num_threads(), pool.submit(torch.get_num_threads).result()) == (3, 3)
    finally:
        torch.set_num_threads(before)
    assert len(names) == 3 and len(set(reports)) == 1  # two threads, then three of the same names
    assert len({(tmp_path / f"{i}").read_bytes() for i in range(3)}) == 1


def test_an_interrupted_scan_goes_on(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_BATCH", 1 << 17)
    state, calls, measure = tmp_path / "state", [], running.measure

    def stops(folder, tasks):
        calls.append(len(tasks))
        if len(calls) == 4:
            raise KeyboardInterrupt
        return measure(folder, tasks)

    monkeypatch.setattr(running, "measure", stops)
    monkeypatch.setattr(running, "_THREADS", 1)
    with pytest.raises(KeyboardInterrupt):
        scan(sharded, payload=True, resume=state)
    done = sum(calls[:3])
    with state.open("a") as file:
        file.write('{"schema": "mxdebug scan state 1", "key": "cut o')  # as an interruption while writing leaves it
    report = scan(sharded, payload=True, resume=state)
    assert report.resumed == done > 0
    want = json.loads(to_json(scan(sharded, payload=True)))
    assert json.loads(to_json(report)) | {"resumed": 0} == want
    assert scan(sharded, payload=True, resume=state).resumed == 32  # all: 2 layers of 4 x 3 experts' and 4 attention weights


def test_an_interruption_leaves_what_has_not_begun(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_BATCH", 1)
    calls = []

    def stops(folder, tasks):
        calls.append(tasks)
        time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr(running, "measure", stops)
    with pytest.raises(KeyboardInterrupt):
        scan(sharded, payload=True, processes=2)
    assert len(calls) < 32


def test_what_ends_is_saved_while_another_batch_is_slow(sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(running, "_BATCH", 1)
    state, measure, saved = tmp_path / "state", running.measure, []

    def first_waits(folder, tasks):
        if not saved:
            saved.append(0)
            until = time.monotonic() + 20
            while saved[0] < 20 and time.monotonic() < until:
                time.sleep(0.005)
                saved[0] = state.read_text().count("\n")
        return measure(folder, tasks)

    monkeypatch.setattr(running, "measure", first_waits)
    assert scan(sharded, payload=True, resume=state).verdict == "CLEAN"
    assert saved[0] >= 20 and state.read_text().count("\n") == 32


def test_a_scan_within_another_leaves_torchs_threads(sharded: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The second begins while the first one's workers have one thread each, and ends after it."""
    before, measure = torch.get_num_threads(), running.measure
    second = tmp_path / "second"
    second.symlink_to(sharded)
    begun = {str(p): threading.Event() for p in (sharded, second)}
    first_ended = threading.Event()

    def in_turn(folder, tasks):
        begun[folder].set()
        assert (first_ended if folder == str(second) else begun[str(second)]).wait(20)
        return measure(folder, tasks)

    monkeypatch.setattr(running, "measure", in_turn)
    torch.set_num_threads(3)
    try:
        with ThreadPoolExecutor(2) as pool:
            a = pool.submit(scan, sharded, payload=True)
            a.add_done_callback(lambda _: first_ended.set())
            assert begun[str(sharded)].wait(20)
            assert pool.submit(scan, second, payload=True).result().verdict == a.result().verdict == "CLEAN"
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.get_num_threads).result() == 3
    finally:
        torch.set_num_threads(before)


def test_a_changed_shard_is_read_again(sharded: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert scan(sharded, resume=state).verdict == "CLEAN"
    # One NaN at the same size: only the modification time tells.
    names = [
        n for n, file in json.loads((sharded / INDEX).read_text())["weight_map"].items() if file == SHARD and n.endswith("weight_scale")
    ]
    data = bytearray((sharded / SHARD).read_bytes())
    start = (
        8 + int.from_bytes(data[:8], "little") + json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])[names[0]]["data_offsets"][0]
    )
    data[start] = 0x7F
    (sharded / SHARD).write_bytes(data)
    os.utime(sharded / SHARD, ns=(1, 1))
    report = scan(sharded, resume=state)
    assert len(found(report, "scale-nan")) == 1 and 0 < report.resumed < 32


def test_what_was_not_read_before_is_read(sharded: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    scan(sharded, resume=state)
    report = scan(sharded, payload=True, resume=state)
    assert report.resumed == 0 and all(s.codes for s in report.statistics)


def test_another_file_is_no_state_file(sharded: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("mine\n")
    with pytest.raises(MxdebugError, match="state file"):
        scan(sharded, resume=tmp_path / "notes")
    assert (tmp_path / "notes").read_text() == "mine\n"


def test_a_file_that_shrinks_while_it_is_read_is_a_finding(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measure = running.measure

    def cut(folder, tasks):
        (sharded / SHARD).write_bytes((sharded / SHARD).read_bytes()[:9000])
        return measure(folder, tasks)

    monkeypatch.setattr(running, "measure", cut)
    assert any("could not be read" in t for t in found(scan(sharded), "shard-damaged"))


# -- what is written --------------------------------------------------------------------------------------------------------------

HOSTILE = "model.layers.0.<script>alert(1)</script>\x1b[31m\n\u202e&'\".q_proj"


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    made = tensors(MODELOPT)
    for leaf in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
        made[f"{HOSTILE}.{leaf}"] = made[f"model.layers.0.self_attn.q_proj.{leaf}"].clone()
    made[f"{HOSTILE}.weight_scale"].view(torch.uint8).fill_(0x7F)
    return save(tmp_path / "hostile", made, config(MODELOPT))


def test_names_cannot_act_in_a_terminal_or_a_page(hostile: Path) -> None:
    report = scan(hostile, payload=True)
    assert report.verdict == "BROKEN" and all(c.isprintable() or c == "\n" for c in str(report)) and "\\x1b[31m" in str(report)

    class Page(html.parser.HTMLParser):
        tags: list[str] = []

        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            self.tags.append(tag)
            assert not any(name in ("src", "href") or name.startswith("on") for name, _ in attrs)

    page = to_html(report)
    Page().feed(page)
    assert {"html", "table", "svg", "style"} <= set(Page.tags) and "script" not in Page.tags and "link" not in Page.tags
    assert "&lt;script&gt;" in page and "http" not in page.replace("http-equiv", "") and "prefers-color-scheme" in page


@pytest.mark.parametrize("kind", [GPT_OSS, MODELOPT])
def test_the_text_is_narrow_and_begins_with_the_verdict(tmp_path: Path, kind: str) -> None:
    made = tensors(kind)
    for name in [n for n in made if n.endswith(("weight_scale", "_scales"))]:
        made[name].view(torch.uint8).view(-1)[:5] = 0xFF
    text = str(scan(save(tmp_path, made, config(kind)), payload=True))
    assert text.startswith("BROKEN: ") and max(map(len, text.splitlines())) <= 110
    assert text.index("[broken]") < text.index("[note]") and text.splitlines()[-1].startswith(("read ", "  "))


def test_the_json_has_what_its_schema_says(hostile: Path) -> None:
    data = json.loads(to_json(scan(hostile, tp=(1, 3))))
    assert list(data) == [
        "schema",
        "mxdebug",
        "path",
        "verdict",
        "exit_code",
        "stated",
        "kinds",
        "tp",
        "payload",
        "read",
        "size",
        "files",
        "tensors",
        "resumed",
        "findings",
        "statistics",
    ]
    assert (data["schema"], data["verdict"], data["exit_code"], data["tp"], data["payload"]) == (1, "BROKEN", 2, [1, 3], False)
    assert list(data["findings"][0]) == ["id", "severity", "title", "text", "tensors", "count", "of", "experts", "means", "fix", "reports"]
    assert list(data["statistics"][0]) == [
        "label",
        "kind",
        "format",
        "units",
        "blocks",
        "histogram",
        "low",
        "high",
        "subnormal",
        "zero",
        "nan",
        "negative",
        "saturated",
        "codes",
        "minus_zero",
        "zero_rows",
        "lost",
    ]
    assert [f["severity"] for f in data["findings"]] == sorted(
        (f["severity"] for f in data["findings"]), key=["broken", "suspicious", "note"].index
    )
    assert data["read"]["payload"] == 0 < data["read"]["scales"] < data["size"]


def test_read_says_the_bytes_that_were_read(sharded: Path) -> None:
    made = tensors(MODELOPT)
    scales = sum(t.nbytes for n, t in made.items() if "weight_scale" in n or "input_scale" in n)
    payload = sum(t.nbytes for t in made.values() if t.dtype == torch.uint8)
    assert scan(sharded).read["scales"] == scan(sharded, payload=True).read["scales"] == scales
    assert (scan(sharded).read["payload"], scan(sharded, payload=True).read["payload"]) == (0, payload)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({}, 0),
        ({f"{EXPERT.format(0, 0, 'up_proj')}.weight_scale_2": 2.0**-8}, 1),
        ({f"{EXPERT.format(0, 0, 'up_proj')}.weight_scale_2": 0.0}, 2),
    ],
)
def test_exit_codes_and_files(tmp_path: Path, change: dict[str, float], code: int) -> None:
    folder = save(tmp_path / "c", tensors(MODELOPT) | {n: torch.tensor(v) for n, v in change.items()}, config(MODELOPT))
    result = CliRunner().invoke(
        main, ["scan", str(folder), "--json", str(tmp_path / "j"), "--html", str(tmp_path / "h"), "--tp", "2", "--payload"]
    )
    assert result.exit_code == code and json.loads((tmp_path / "j").read_text())["exit_code"] == code
    assert result.stdout.startswith(("CLEAN", "SUSPICIOUS", "BROKEN")[code]) and "scan:" in result.stderr  # the progress bar
    assert (tmp_path / "h").read_text().startswith("<!DOCTYPE html>")


@pytest.mark.parametrize("options", [["--tp", "0"], ["--nothing"], ["--processes", "x"], ["--json", "/nowhere/j"]])
def test_wrong_options_are_no_verdict(sharded: Path, options: list[str]) -> None:
    assert CliRunner().invoke(main, ["scan", str(sharded), "--quiet", *options]).exit_code == 3


def test_every_kind_of_a_mixed_class_is_looked_at(tmp_path: Path) -> None:
    """Layer 0 in MXFP4, layer 1 in MXFP8: the NaN scales of layer 1 are found, though the first weights of that name are of another kind."""
    made = {n: t for n, t in tensors(CT_MXFP4).items() if ".layers.1." not in n}
    made |= {n: t for n, t in tensors(CT_MXFP8).items() if ".layers.1." in n}
    made[f"{EXPERT.format(1, 2, 'up_proj')}.weight_scale"][:] = 0xFF
    report = scan(save(tmp_path / "c", made, config(CT_MXFP4)))
    (nan,) = [f for f in report.findings if f.id == "scale-nan"]
    assert nan.experts == (2,) and nan.tensors == (EXPERT.format(1, 2, "up_proj"),)
    assert sum("up_proj" in s.label or s.label.endswith("w3") for s in report.statistics) == 2


def test_a_weight_that_cannot_be_read_hides_no_other(tmp_path: Path) -> None:
    made = tensors(MODELOPT_MXFP8)
    made[f"{EXPERT.format(0, 0, 'up_proj')}.weight"].view(torch.uint8)[:3, :3] = 0x7F
    broken = f"{EXPERT.format(0, 1, 'up_proj')}.weight"
    made[broken] = made[broken].view(torch.uint8).T.contiguous().view(torch.float8_e4m3fn)
    report = scan(save(tmp_path / "c", made, config(MODELOPT_MXFP8)), payload=True)
    assert {"payload-nan"} <= {f.id for f in report.findings}, str(report)


def test_fused_experts_without_payload_are_a_finding(tmp_path: Path) -> None:
    made = {n: t for n, t in tensors(GPT_OSS).items() if not n.endswith("0.mlp.experts.down_proj_blocks")}
    made["model.layers.0.mlp.experts.gate_up_proj_scales"][3, 0, 0] = 0xFF
    report = scan(save(tmp_path / "c", made, config(GPT_OSS)))
    assert report.verdict == "BROKEN" and [f.experts for f in report.findings if f.id == "scale-nan"] == [(3,)]


def test_the_callers_threads_stay(tmp_path: Path) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        scan(save(tmp_path / "c", tensors(MODELOPT), config(MODELOPT)))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("option", ["--json", "--html", "--index", "--resume"])
def test_a_file_that_cannot_be_written_is_said_before_anything_is_read(option: str, tmp_path: Path) -> None:
    folder = save(tmp_path / "c", tensors(MODELOPT), config(MODELOPT))
    out = CliRunner().invoke(main, ["scan", str(folder), "--quiet", option, str(tmp_path / "nowhere" / "f")])
    assert out.exit_code == 3 and option in out.output and "whose folder does not exist" in out.output and "MODEL" not in out.output


def test_a_page_has_no_path_of_this_machine(tmp_path: Path) -> None:
    folder = save(tmp_path / "secret" / "model-7", tensors(MODELOPT), config(MODELOPT), shards=2)
    (folder / "model-00001-of-00002.safetensors").unlink()
    page = to_html(scan(folder))
    assert "model-7" in page and str(tmp_path) not in page and "secret" not in page


def test_degrees_below_one_are_refused(tmp_path: Path) -> None:
    with pytest.raises(MxdebugError, match="tp: expected degrees of 1 and more, got 0"):
        scan(save(tmp_path / "c", tensors(MODELOPT), config(MODELOPT)), tp=(0,))


def test_an_index_of_one_file_is_not_stale(tmp_path: Path) -> None:
    folder = save(tmp_path / "c", tensors(MODELOPT), config(MODELOPT))
    scan(folder / "model.safetensors", index=tmp_path / "i")
    assert load_index(tmp_path / "i").stale(folder / "model.safetensors") == []


# -- what looks wrong and is not ----------------------------------------------------------------------------------------


def changed(folder: Path, kind: str, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], object], shards: int = 1) -> Path:
    made, stated = tensors(kind), config(kind)
    change(made, stated)
    return save(folder, made, stated, shards)


@pytest.mark.parametrize("kind", KINDS)
def test_one_shard_alone_is_not_broken(tmp_path: Path, kind: str) -> None:
    """Cut after a third of the tensors, a weight loses its scale to the next file."""
    save(tmp_path, tensors(kind), config(kind), shards=3)
    reports = [scan(tmp_path / f"model-{i:05d}-of-00003.safetensors") for i in (1, 2, 3)]
    assert {r.verdict for r in reports} == {"CLEAN"}, [str(r) for r in reports]
    assert scan(tmp_path).verdict == "CLEAN" and not found(scan(tmp_path), "file-alone")


@pytest.mark.parametrize("projection", ["gate_proj", "down_proj"])
@pytest.mark.parametrize("layer", [0, 1])
def test_a_projection_in_bf16_is_not_missing(tmp_path: Path, projection: str, layer: int) -> None:
    def change(made: dict[str, torch.Tensor], stated: dict[str, Any]) -> None:
        for e in range(4):
            module = EXPERT.format(layer, e, projection)
            for leaf in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
                made.pop(f"{module}.{leaf}")
            made[f"{module}.weight"] = torch.ones(8, 8, dtype=torch.bfloat16)
        stated["quantization_config"]["ignore"].append(f"model.layers.{layer}.mlp.experts.*.{projection}")

    report = scan(changed(tmp_path, MODELOPT, change))
    assert report.verdict == "CLEAN", str(report)
    (tmp_path / "model.safetensors").unlink()
    report = scan(changed(tmp_path, MODELOPT, lambda m, s: [change(m, s), m.pop(f"{EXPERT.format(layer, 2, projection)}.weight")]))
    assert "1 projections that other experts or layers have" in found(report, "tensors-missing")[0], str(report)


def test_files_beside_the_index_are_a_note(sharded: Path) -> None:
    save_file({"layers.0.w1.weight": torch.zeros(2, 2)}, sharded / "consolidated.safetensors")
    report = scan(sharded)
    assert report.verdict == "CLEAN" and "1 .safetensors files are not in the index" in found(report, "files-beside")[0]


@pytest.mark.parametrize(
    ("leaves", "said"),
    [
        ({"weight_packed": torch.zeros(8, 4, dtype=torch.int32), "weight_scale": torch.ones(8, 1)}, "weight_packed I32"),  # INT4
        ({"qweight": torch.zeros(8, 4, dtype=torch.int32), "qzeros": torch.zeros(1, 4, dtype=torch.int32)}, "qweight I32"),  # AWQ, GPTQ
        ({"weight": torch.zeros(8, 8).to(torch.float8_e4m3fn), "weight_scale": torch.ones(())}, "weight F8_E4M3"),  # one scale a tensor
        ({"gate_up_proj": torch.zeros(2, 8, 8, dtype=torch.uint8)}, "gate_up_proj U8"),  # fused, by a name that is not known
    ],
)
def test_what_is_not_read_is_said(tmp_path: Path, leaves: dict[str, torch.Tensor], said: str) -> None:
    folder = changed(tmp_path, MODELOPT, lambda m, s: m.update({f"model.layers.1.other.{leaf}": t for leaf, t in leaves.items()}))
    assert [t for t in found(scan(folder), "not-read")] == [f"1 modules, with {said}"] and scan(folder).verdict == "CLEAN"


@pytest.mark.parametrize("payload", [False, True])
def test_an_empty_expert_was_not_cast(tmp_path: Path, payload: bool) -> None:
    """The scale of a block of zeros is 2^-127, byte 0; a cast leaves 0 too, over weights that are not."""
    name = EXPERT.format(1, 1, "gate_proj")

    def empty(made: dict[str, torch.Tensor], stated: dict[str, Any]) -> None:
        made[f"{name}.weight"].zero_()
        made[f"{name}.weight_scale"].zero_()

    def cast(made: dict[str, torch.Tensor], stated: dict[str, Any]) -> None:
        for n in (n for n in made if n.endswith("gate_proj.weight_scale")):
            made[n].zero_()

    report = scan(changed(tmp_path / "empty", QUARK, empty), payload=payload)
    assert report.verdict == "SUSPICIOUS" and not found(report, "scale-cast"), str(report)
    assert found(scan(changed(tmp_path / "cast", QUARK, cast), payload=payload), "scale-cast")


def test_pieces_are_read_into_the_same_memory(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"12345678")
    with Pieces(tmp_path, 4) as pieces:
        first, second = pieces.read("scale", "a", 0, 4), pieces.read("payload", "a", 4, 4)
        assert (bytes(first), bytes(second)) == (b"1234", b"5678")
        assert bytes(pieces.read("scale", "a", 2, 2)) == b"34" and bytes(first) == b"3434" and bytes(second) == b"5678"
        assert bytes(pieces.read("scale", "a", 0, 8)) == b"12345678"  # longer than most
        with pytest.raises(ValueError, match="a ends at byte 8"):
            pieces.read("scale", "a", 4, 8)
        with pytest.raises(MxdebugError, match="no such file"):
            pieces.read("scale", "b", 0, 1)


def test_all_files_that_change_while_they_are_read_are_named(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By their names, not their folders."""
    files, measure = sorted(sharded.glob("*.safetensors")), running.measure

    def damaged(folder, tasks):
        files[0].unlink(missing_ok=True)
        with files[1].open("r+b") as file:
            file.truncate(20_000)
        return measure(folder, tasks)

    monkeypatch.setattr(running, "measure", damaged)
    report = scan(sharded, payload=True)
    text = next(str(f) for f in report.findings if f.id == "shard-damaged")
    assert report.exit_code == 2 and f"{files[1].name} ends at byte 20000" in text and f"{files[0].name}: expected a file, got no such file" in text
    assert str(sharded) not in text


def test_an_index_without_files_is_named(tmp_path: Path) -> None:
    (tmp_path / INDEX).write_text('{"weight_map": {}}')
    with pytest.raises(MxdebugError, match="weight_map of model.safetensors.index.json"):
        scan(tmp_path)
