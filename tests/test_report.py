"""The page and the JSON of a diagnosis: what is in them, and what must not be."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from making_linear import write_modelopt

from mxdebug import recorded
from mxdebug.calls import load
from mxdebug.checkpoints import open_checkpoint
from mxdebug.cli import main
from mxdebug.diagnosis import Diagnosis, Finding, diagnose
from mxdebug.errors import MxdebugError
from mxdebug.faults import FAULTS, LINEAR_FAULTS, LinearSituation
from mxdebug.metrics import Comparison, compare
from mxdebug.recipes.w4a16.recipe import linear_recipe
from mxdebug.report import SCHEMA, Entry, Report, as_dict
from mxdebug.report.output_picture import cells
from mxdebug.report.page import page
from mxdebug.private import Private
from mxdebug.report.schema import number
from mxdebug.report.svg import LOST

VOID = {"meta", "path", "rect"}
TAGS = {
    "html",
    "head",
    "meta",
    "title",
    "style",
    "body",
    "h1",
    "h2",
    "h3",
    "h4",
    "p",
    "span",
    "section",
    "div",
    "dl",
    "dt",
    "dd",
    "ul",
    "li",
    "b",
    "code",
    "pre",
    "figure",
    "figcaption",
    "svg",
    "path",
    "rect",
    "text",
    "table",
    "thead",
    "tbody",
    "tr",
    "td",
    "th",
    "a",
    "details",
    "summary",
    "footer",
}
ATTRIBUTES = {
    "lang",
    "charset",
    "name",
    "content",
    "http-equiv",
    "class",
    "id",
    "style",
    "viewbox",
    "role",
    "aria-label",
    "href",
    "d",
    "x",
    "y",
    "width",
    "height",
    "rx",
    "text-anchor",
    "transform",
    "shape-rendering",
}


class Parsed(HTMLParser):
    """Tags, attributes and texts of a page; every tag and attribute must be one that is known to be harmless, and be closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS, tag
        for name, value in attrs:
            assert name in ATTRIBUTES, (tag, name)
            assert name != "href" or (tag == "a" and value.startswith("#")), value
            assert "url(" not in (value or ""), value
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            assert "url(" not in data and "@import" not in data
        self.texts.append(data)


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def reported(name: str, tmp_path: Path, *more: object) -> tuple[int, str, dict[str, Any]]:
    """(exit code, page, JSON) of a recorded call."""
    r, html, file = recorded.call(name), tmp_path / "page.html", tmp_path / "page.json"
    code, _ = run("diagnose", r.path, "--checkpoint", r.checkpoint_path, "--html", html, "--json", file, *more)
    return code, html.read_text(), strict(file.read_text())


def strict(text: str) -> dict[str, Any]:
    """JSON as everybody else reads it: no NaN, no Infinity."""
    return json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} in JSON"))


# -- the page ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", recorded.CALLS)
def test_page_of_every_recorded_call(name: str, tmp_path: Path) -> None:
    code, html, data = reported(name, tmp_path)
    text = "".join(Parsed(html).texts)
    (call,) = data["calls"]
    assert code == (0 if call["ok"] else 1) and call["verdict"].upper() in text and call["summary"] in text
    for f in call["findings"]:
        assert f["title"] in text and f["evidence"] in text and f["fix"] in text and f["strength"] in text
    assert "No picture here" not in text and "The output" in text
    assert "default-src 'none'" in html and "prefers-color-scheme:dark" in html and len(html) < 100_000


@pytest.mark.parametrize(
    "name, said",
    [
        # c03 has gate above up where the kernel reads up above gate: none of the 512 rows is in place
        ("c03", "0 of 512 rows are where the kernel reads them"),
        # c11: halves of 192 rows, padded to 256 each. Rows 0 to 191 are up's in both, and 448 to 511 are padding in both: 192 + 64.
        ("c11", "256 of 512 rows are where the kernel reads them"),
        ("c04", "Left: linear, as the bytes were passed. Right: SM90 scale fold"),
        ("c06", "Places of w13 payload"),
    ],
)
def test_pictures_say_where_bytes_went(name: str, said: str, tmp_path: Path) -> None:
    text = "".join(Parsed(reported(name, tmp_path)[1]).texts)
    assert said in text


def test_operands_that_share_a_picture_share_it(tmp_path: Path) -> None:
    html = reported("c07", tmp_path)[1]
    assert "Rows of w13 payload, w13 block scales and w13 bias" in html and html.count("<figure>") == 2  # that, and the output


HOSTILE = "<script>alert(1)</script> \"'><img src=x onerror=alert(2)> \x1b[2J \u202e & &amp; ]]> </style></title>"


def hostile() -> Diagnosis:
    """A diagnosis whose texts are all from somebody who means no good."""
    f = Finding(FAULTS["scales-linear"], "proved", HOSTILE, HOSTILE, math.inf, HOSTILE, HOSTILE)
    nan = Comparison(4, -1, -1, False, math.nan, math.inf, -math.inf)
    return Diagnosis("wrong", HOSTILE, (f,), ((HOSTILE, HOSTILE),), nan, nan, None, (HOSTILE,), (HOSTILE,), ((HOSTILE, HOSTILE),), None)


def test_everything_is_escaped() -> None:
    entries = (
        Entry(HOSTILE, HOSTILE, HOSTILE, hostile(), {"torch": HOSTILE}),
        Entry(HOSTILE, "", "", MxdebugError(HOSTILE, HOSTILE, HOSTILE, HOSTILE)),
    )
    report = Report(entries, Path(HOSTILE.replace("/", "|")), Path("a<b>"), module=HOSTILE)
    for some in (report, replace(report, entries=entries[:1])):
        html = page(some)
        parsed = Parsed(html)
        assert "<script" not in html and "<img" not in html and "\x1b" not in html and "\u202e" not in html
        assert any("<script>alert(1)" in text for text in parsed.texts)  # it is shown, as a text


def secrets(tmp_path: Path) -> tuple[Path, Path]:
    """A dump with a right, a wrong, and a broken call, and a checkpoint, in folders whose names are nobody's business."""
    home = tmp_path / "Jane Doe's secret project"
    dump, model = home / "dumps", home / "models" / "some-model"
    shutil.copytree(recorded.call("c01").checkpoint_path, model)
    for name in ("c01", "c04"):
        load(recorded.call(name).path).save(dump)
    broken = load(recorded.call("c03").path).save(dump)
    (broken / "inputs.pt").unlink()
    return dump, model


def test_no_path_of_this_machine(tmp_path: Path) -> None:
    dump, model = secrets(tmp_path)
    html, file = tmp_path / "r.html", tmp_path / "r.json"
    code, _ = run("diagnose", dump, "--checkpoint", model, "--html", html, "--json", file)
    assert code == 2
    for text in (html.read_text(), file.read_text()):
        assert "secret" not in text and str(tmp_path) not in text and str(Path.home()) + "/" not in text and str(recorded.ROOT) not in text
        assert "mxdebug diagnose dumps --checkpoint some-model" in text
    Parsed(html.read_text())
    data = strict(file.read_text())
    assert [c["verdict"] for c in data["calls"]] == ["right", "not read", "wrong"] and not data["ok"]
    assert data["calls"][1]["error"]["got"] and data["calls"][1]["findings"] == []


@pytest.mark.parametrize("text, hidden", [
    ("/home/me/models/x/config.json: expected JSON", "config.json: expected JSON"),
    ("see '/a/b c' and (/srv/data/x.pt)", "see 'b c' and (x.pt)"),
    ("~/dumps/one, C:\\Users\\me\\x.pt", "one, x.pt"),
    ("nvfp4_w4a16/flashinfer_cutedsl/sm100, tp 0/2, w13/w2 and 3 / 4", "nvfp4_w4a16/flashinfer_cutedsl/sm100, tp 0/2, w13/w2 and 3 / 4"),
    ("https://github.com/vllm-project/vllm", "https://github.com/vllm-project/vllm"),
])  # fmt: skip
def test_paths_become_names(text: str, hidden: str) -> None:
    assert Private.of(Path("/a/b c"))(text) == hidden


def test_levels_of_the_output() -> None:
    """Steps 0.01 (rounding), 0.03, 0.1, 0.3, 1, 3. Each cell is one number: an error of e in a wanted 1 is a relative error of e."""
    want = torch.ones(1, 8, dtype=torch.float64)
    off = torch.tensor([[0.0, 0.005, 0.02, 0.05, 0.2, 0.5, 2.0, 4.0]], dtype=torch.float64)
    levels, pooled, steps = cells(want + off, want, 0.01)
    assert levels == [[0, 0, 1, 2, 3, 4, 5, 6]] and pooled == (1, 1) and steps == (0.01, 0.03, 0.1, 0.3, 1.0, 3.0)
    got = want.clone()
    got[0, 3] = math.nan
    assert cells(got, want, 0.01)[0] == [[0, 0, 0, LOST, 0, 0, 0, 0]]
    both = want.clone()
    both[0, 3] = math.nan
    assert cells(got, both, 0.01)[0] == [[0] * 8]  # NaN is meant there
    # 112 columns are two in each of 56 cells: an error of 3 in one of two ones is sqrt(9 / 2) = 2.1
    wide = torch.ones(1, 112, dtype=torch.float64)
    wrong = wide.clone()
    wrong[0, 5] = 4.0
    assert cells(wrong, wide, 0.01)[0][0][:4] == [0, 0, 5, 0]


# -- JSON -------------------------------------------------------------------------------------------------------------


def test_json_key_by_key(tmp_path: Path) -> None:
    _, _, data = reported("c04", tmp_path)
    assert set(data) == {"schema", "mxdebug", "dump", "checkpoint", "command", "ok", "calls"}
    assert data["schema"] == SCHEMA == 1 and data["dump"] == "c04" and data["checkpoint"] == "gptoss-tiny" and data["ok"] is False
    assert data["command"] == "mxdebug diagnose c04 --checkpoint gptoss-tiny"
    (call,) = data["calls"]
    assert set(call) == {
        "name",
        "function",
        "status",
        "versions",
        "error",
        "verdict",
        "ok",
        "summary",
        "findings",
        "facts",
        "comparisons",
        "checked",
        "open",
        "operands",
        "follows",
    }
    assert call["name"] == "20261129_151620_437_pid425_cutlass_fused_moe_call0004" and call["function"] == "cutlass_fused_moe"
    assert (
        call["status"] == "completed"
        and call["error"] is None
        and call["verdict"] == "wrong"
        and call["ok"] is False
        and call["follows"] is True
    )
    assert call["versions"]["flashinfer"] == "0.7.4" and call["versions"]["torch"] == "2.11.0+cu130"
    d = diagnose(recorded.call("c04").path, recorded.call("c04").checkpoint_path)
    assert (
        call["summary"] == d.summary
        and call["checked"] == list(d.checked)
        and call["open"] == list(d.open)
        and call["facts"] == dict(d.call)
    )
    (found,), (f,) = call["findings"], d.findings
    assert found == {
        "id": "scales-linear",
        "title": f.title,
        "strength": "proved",
        "where": "w13 block scales",
        "evidence": f.evidence,
        "effect": f.effect,
        "fix": f.fix,
        "reports": list(f.fault.reports),
    }
    states = {"w13": "equal", "w13_scale": "different", "w13_bias": "equal", "w2": "equal", "w2_scale": "equal", "w2_bias": "equal"}
    assert call["operands"] == states
    assert set(call["comparisons"]) == {"kernel", "truth", "floor"}
    # 6 tokens of 384; the recorded output is the emulation, bit for bit; what is meant is float64, whose bits cannot be compared with bf16
    assert call["comparisons"]["kernel"] == {
        "elements": 2304,
        "differing": 0,
        "max_ulps": 0,
        "bit_identical": True,
        "masks_equal": True,
        "cosine": d.kernel.cosine,
        "norm_ratio": 1.0,
        "relative_l2": 0.0,
    }
    truth = call["comparisons"]["truth"]
    assert (
        truth["differing"] is None
        and truth["max_ulps"] is None
        and truth["bit_identical"] is None
        and truth["relative_l2"] == d.truth.relative_l2
    )


def test_numbers_that_json_does_not_have() -> None:
    assert [number(v) for v in (None, math.nan, math.inf, -math.inf, 0.5)] == [None, None, "inf", "-inf", 0.5]
    zeros = torch.zeros(2, 4, dtype=torch.bfloat16)
    d = Diagnosis("wrong", "", (), (), compare(zeros, zeros), None, None, (), ())  # the cosine of nothing is NaN
    (call,) = as_dict(Report((Entry("c", "f", "completed", d),), Path("d")))["calls"]
    assert call["comparisons"]["kernel"]["cosine"] is None and call["comparisons"]["truth"] is None
    text = json.dumps(as_dict(Report((Entry("c", "f", "completed", hostile()),), Path("d"))), allow_nan=False)
    (call,) = strict(text)["calls"]
    assert call["findings"][0]["effect"] == "inf" and call["comparisons"]["kernel"]["norm_ratio"] == "inf"
    assert call["comparisons"]["kernel"]["relative_l2"] == "-inf"


def test_exit_code_stays_and_an_unreadable_call_is_written_down(tmp_path: Path) -> None:
    assert reported("c01", tmp_path)[0] == 0 and reported("c04", tmp_path)[0] == 1
    file = tmp_path / "e.json"
    code, _ = run("diagnose", recorded.call("c01").path, "--checkpoint", recorded.call("c12").checkpoint_path, "--json", file)
    (call,) = strict(file.read_text())["calls"]
    assert code == 2 and call["verdict"] == "not read" and call["error"]["operand"] == "call and checkpoint" and call["ok"] is False


def test_a_file_that_cannot_be_written_is_said_before_the_work(tmp_path: Path) -> None:
    r = recorded.call("c01")
    code, output = run("diagnose", r.path, "--checkpoint", r.checkpoint_path, "--json", tmp_path / "none" / "x.json")
    assert code == 2 and "--json" in output and "RIGHT" not in output and "Traceback" not in output


def test_without_a_checkpoint(tmp_path: Path) -> None:
    html, file = tmp_path / "p.html", tmp_path / "p.json"
    assert run("diagnose", recorded.call("c04").path, "--html", html, "--json", file)[0] == 1
    (call,) = strict(file.read_text())["calls"]
    assert call["verdict"] == "undecided" and call["operands"] == {} and call["comparisons"]["truth"] is None
    assert "UNDECIDED" in "".join(Parsed(html.read_text()).texts)


@pytest.mark.parametrize("id", ["scales-linear", "nibbles-swapped"])
def test_linear_layers_have_a_page_too(id: str, tmp_path: Path) -> None:
    from test_linear_diagnosis import SIGNATURE, call_of

    model = write_modelopt(tmp_path / "model")
    layer = open_checkpoint(model).linear("model.layers.0.mlp.down_proj")
    x = torch.randn(5, layer.layer.k, generator=torch.Generator().manual_seed(1)).bfloat16()
    s = LinearSituation.right(linear_recipe("nvfp4_w4a16/flashinfer_cutedsl/sm100", layer.kind), layer.layer, x)
    call_of(*LINEAR_FAULTS[id].inject(s).build(), function="mm_bf16_fp4", signature=SIGNATURE).save(tmp_path / "dump")
    html, file = tmp_path / "p.html", tmp_path / "p.json"
    assert run("diagnose", tmp_path / "dump", "--checkpoint", model, "--html", html, "--json", file)[0] == 1
    text = "".join(Parsed(html.read_text()).texts)
    assert [f["id"] for f in strict(file.read_text())["calls"][0]["findings"]] == [id]
    assert "No picture here" not in text and "Bytes of" in text and "The output" in text


def test_home_and_the_current_folder_are_hidden_with_what_follows() -> None:
    hide = Private.of(Path("/srv/Jane Doe/m"))
    assert hide(f"a link to {Path.home()}/secret/x.pt") == "a link to x.pt"
    assert hide(f"in {Path.cwd()}/secret/y.pt, and {Path.home()}/z/w") == "in y.pt, and w"
    assert hide("got /srv/Jane Doe/m. Likely reason") == "got m. Likely reason"


def test_an_old_file_is_not_taken_for_the_answer(tmp_path: Path) -> None:
    """Where there is no diagnosis, the file of the one before is gone."""
    r, page, data = recorded.call("c01"), tmp_path / "r.html", tmp_path / "r.json"
    options = ("--html", page, "--json", data)
    assert run("diagnose", r.path, "--checkpoint", r.checkpoint_path, *options)[0] == 0
    assert json.loads(data.read_text())["calls"][0]["ok"] and "mxdebug cut" not in page.read_text()  # nothing to be cut from a right call
    (tmp_path / "empty").mkdir()
    assert run("diagnose", tmp_path / "empty", *options)[0] == 2 and not page.exists() and not data.exists()
    (tmp_path / "run.safetensors").write_bytes(b"no file")
    assert run("diagnose", tmp_path / "run.safetensors", "--checkpoint", r.checkpoint_path, *options)[0] == 2
    assert json.loads(data.read_text())["calls"][0]["verdict"] == "not read"
