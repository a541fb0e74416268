"""`mxdebug lab`: notebooks are copied, what the user changed stays, and JupyterLab gets what follows `--`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from mxdebug import lab
from mxdebug.cli import main
from mxdebug.errors import MxdebugError

ROOT = Path(__file__).resolve().parent.parent
NAMES = (*sorted(p.name for p in (ROOT / "notebooks").glob("*.ipynb")), "glossary.md")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The arguments of each JupyterLab that would have been started."""
    from jupyterlab.labapp import LabApp

    calls: list[list[str]] = []
    monkeypatch.setattr(LabApp, "launch_instance", lambda argv: calls.append(argv))
    return calls


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(main, ["lab", *map(str, arguments)])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_notebooks_and_glossary_are_copied_and_nothing_else(tmp_path: Path) -> None:
    copied = lab.copy(tmp_path / "a" / "b")
    assert copied.new == NAMES and (copied.same, copied.kept, copied.aside) == ((), (), ())
    assert sorted(p.name for p in copied.folder.iterdir()) == list(NAMES)
    assert all((copied.folder / n).read_bytes() == (ROOT / "notebooks" / n).read_bytes() for n in NAMES)
    assert copied.first == "00_start_here.ipynb"


def test_again_changes_nothing(tmp_path: Path) -> None:
    lab.copy(tmp_path)
    times = {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()}
    assert lab.copy(tmp_path).same == NAMES and lab.copy(tmp_path, fresh=True).same == NAMES
    assert {p.name: p.stat().st_mtime_ns for p in tmp_path.iterdir()} == times


def test_a_changed_notebook_is_kept(tmp_path: Path) -> None:
    lab.copy(tmp_path)
    (tmp_path / NAMES[1]).write_text("mine")
    (tmp_path / NAMES[2]).unlink()
    copied = lab.copy(tmp_path)
    assert copied.kept == (NAMES[1],) and copied.new == (NAMES[2],) and (tmp_path / NAMES[1]).read_text() == "mine"
    assert f"kept   {NAMES[1]}" in str(copied) and "--fresh" in str(copied)


def test_fresh_keeps_every_earlier_one(tmp_path: Path) -> None:
    lab.copy(tmp_path)
    stem = NAMES[1].removesuffix(".ipynb")
    for n, text in ((1, "mine"), (2, "mine again")):
        (tmp_path / NAMES[1]).write_text(text)
        copied = lab.copy(tmp_path, fresh=True)
        assert copied.aside == ((NAMES[1], f"{stem}.bak-{n}.ipynb"),) and copied.new == (NAMES[1],) and copied.kept == ()
        assert f"yours is now {stem}.bak-{n}.ipynb" in str(copied)
    assert (tmp_path / NAMES[1]).read_bytes() == (ROOT / "notebooks" / NAMES[1]).read_bytes()
    assert [(tmp_path / f"{stem}.bak-{n}.ipynb").read_text() for n in (1, 2)] == ["mine", "mine again"]


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    """A notebook that is a link to a file elsewhere: that file is the user's."""
    elsewhere = tmp_path / "elsewhere.ipynb"
    elsewhere.write_text("mine")
    (tmp_path / "nb").mkdir()
    (tmp_path / "nb" / NAMES[0]).symlink_to(elsewhere)
    lab.copy(tmp_path / "nb", fresh=True)
    assert elsewhere.read_text() == "mine" and not (tmp_path / "nb" / NAMES[0]).is_symlink()


def test_opens_jupyterlab_on_the_folder(tmp_path: Path, launched: list[list[str]]) -> None:
    code, output = run(tmp_path / "nb")
    assert code == 0 and f"{len(NAMES)} copied" in output
    assert launched == [[f"--notebook-dir={tmp_path / 'nb'}", "--LabApp.default_url=/lab/tree/00_start_here.ipynb"]]


def test_no_open_prints_the_command(tmp_path: Path, launched: list[list[str]]) -> None:
    code, output = run(tmp_path / "my notebooks", "--no-open")
    assert code == 0 and launched == []
    assert output.splitlines()[-1].startswith("jupyter lab '--notebook-dir=") and (tmp_path / "my notebooks" / NAMES[0]).is_file()


@pytest.mark.parametrize("folder", [(), ("nb",)])
def test_what_follows_two_dashes_is_jupyters(folder: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                             launched: list[list[str]]) -> None:
    """Also options that mxdebug has itself, and with the folder left out: the first of them is not the folder."""
    monkeypatch.chdir(tmp_path)
    code, _ = run(*folder, "--", "--no-browser", "--port", "9999", "--fresh")
    assert code == 0 and launched[0][-4:] == ["--no-browser", "--port", "9999", "--fresh"]
    assert [p.name for p in tmp_path.iterdir()] == [folder[0] if folder else "mxdebug-notebooks"]
    assert run("--no-browser")[0] == 2  # without the dashes it is no option


@pytest.mark.parametrize("folder", ["file", "file/nb", "readonly/nb"])
def test_a_folder_that_cannot_be_written(folder: str, tmp_path: Path, launched: list[list[str]]) -> None:
    (tmp_path / "file").write_text("a file")
    (tmp_path / "readonly").mkdir(mode=0o500)
    if folder.startswith("readonly") and os.access(tmp_path / "readonly", os.W_OK):
        pytest.skip("root writes everywhere")
    with pytest.raises(MxdebugError, match="folder: expected one that can be written"):
        lab.copy(tmp_path / folder)
    code, output = run(tmp_path / folder)
    assert code == 2 and "can be written" in output and "Traceback" not in output and launched == []
    assert (tmp_path / "file").read_text() == "a file"


def test_a_folder_in_a_notebooks_place(tmp_path: Path) -> None:
    (tmp_path / NAMES[0]).mkdir()
    assert lab.copy(tmp_path).kept == (NAMES[0],)


def test_without_notebooks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A package that was installed without its data files, or copied somewhere."""
    monkeypatch.setattr(lab, "__file__", str(tmp_path / "mxdebug" / "lab.py"))
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    with pytest.raises(MxdebugError, match="notebooks: expected share/mxdebug/notebooks"):
        lab.source()
    (tmp_path / lab.INSTALLED).mkdir(parents=True)  # as the wheel of the test below is installed
    (tmp_path / lab.INSTALLED / NAMES[0]).write_text("{}")
    assert lab.source() == tmp_path / lab.INSTALLED


def test_a_wheel_has_all_of_them(tmp_path: Path) -> None:
    """What setuptools makes of pyproject.toml's data-files; a whole wheel would copy 12 MB for the same answer."""
    build = f"import setuptools; setuptools.setup(script_args=['-q', 'install_data', '-d', {str(tmp_path)!r}])"
    made = subprocess.run([sys.executable, "-c", build], cwd=ROOT, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert sorted(p.relative_to(tmp_path) for p in tmp_path.rglob("*") if p.is_file()) == [lab.INSTALLED / n for n in NAMES]
