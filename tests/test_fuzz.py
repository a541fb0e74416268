"""Bytes broken at random: every case ends in success or in the one error class, in little time and memory, with nothing opened or executed.

MXDEBUG_FUZZ=N runs N cases (20,000 take some 10 minutes in one process), MXDEBUG_FUZZ_SEED chooses others. `python -m fuzz` in tests/
groups what it finds.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fuzz import guard, runner

CASES = int(os.environ.get("MXDEBUG_FUZZ", "1200"))
SEED = int(os.environ.get("MXDEBUG_FUZZ_SEED", "0"))


def test_bytes_broken_at_random() -> None:
    report = runner.run(CASES, SEED, processes=2)
    listed = "\n".join(f"case {c.case} ({c.name}: {c.broken}): {c.crash}\n{c.problem}" for c in report.crashes[:5])
    assert not report.crashes, f"{len(report.crashes)} of {CASES} cases, seed {SEED} (python -m fuzz --only CASE --seed {SEED}):\n{listed}"
    # Mutations must neither break everything at once nor leave everything whole: of 1,500 cases of seed 2, 62 % were refused.
    assert min(report.results["read"], report.results["refused"]) > CASES / 5, report.results


# -- the guard itself: each of these is what no reader may do, and is seen ---------------------------------------------------


class _Runs:
    def __reduce__(self) -> tuple[object, ...]:
        return os.system, ("true",)


def _opens_outside(folder: Path) -> str:
    return (folder.parent / "outside").read_text()


def _follows_a_link(folder: Path) -> str:
    return (folder / "link").read_text()


def _loads_pickles(folder: Path) -> str:
    torch.save({"x": _Runs()}, folder / "x.pt")
    return str(torch.load(folder / "x.pt", weights_only=False))


def _evaluates(folder: Path) -> str:
    return str(eval("1 + 1"))


def _writes(folder: Path) -> str:
    (folder / "new").write_text("x")
    return ""


def _unpacks(folder: Path) -> str:
    return tempfile.mkdtemp(dir=folder)


def _allocates(folder: Path) -> str:
    return str(len(bytearray(2 * guard.MEMORY)))


def _waits(folder: Path) -> str:
    return (folder / "fifo").read_text()


def _reads_natively(folder: Path) -> str:
    import safetensors

    with safetensors.safe_open(str(folder.parent / "outside.safetensors"), "pt") as f:
        return str(f.keys())


DOES: dict[Callable[[Path], str], str] = {
    _opens_outside: "forbidden: open",
    _follows_a_link: "forbidden: open",
    _loads_pickles: "forbidden: ",
    _evaluates: "forbidden: compile",
    _writes: "forbidden: open",
    _unpacks: "forbidden: tempfile.mkdtemp",
    _allocates: "MemoryError",
    _waits: "TooLong",
    _reads_natively: "forbidden: fuzz.safe_open",
    lambda folder: "a \x1b[2J b": "unescaped",
    lambda folder: "\u202e": "unescaped",
    lambda folder: "<table><script>": "unescaped",
    lambda folder: str({}["x"]): "KeyError",
}


@pytest.mark.parametrize("index", range(len(DOES)))
def test_the_guard_sees(index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_file

    monkeypatch.setattr(guard, "SECONDS", 0.1)
    guard.install()
    folder = tmp_path / "given"
    folder.mkdir()
    (tmp_path / "outside").write_text("secret")
    (folder / "link").symlink_to(tmp_path / "outside")
    os.mkfifo(folder / "fifo")
    save_file({"x": torch.zeros(1)}, tmp_path / "outside.safetensors")
    does, crash = list(DOES.items())[index]
    out = guard.attack(does, folder)
    assert out.problem and out.crash.startswith(crash), out
    assert not guard.attack(lambda f: "fine", folder).problem  # and nothing is left of it


# -- the fuzzer itself: a bug put into a reader is found ------------------------------------------------------------------------

BUGS = {
    # torch's own reader with pickles allowed, and without our look into the file
    "pickles run": (
        "mxdebug.calls.tensors.pickled.check = lambda path: None; import torch; load = torch.load; "
        "torch.load = lambda *a, **k: load(*a, **{**k, 'weights_only': False, 'mmap': False})",
        "dump-pt",
        "forbidden: pickle.find_class",
    ),
    # the check of what stands in a file's place left out
    "links followed": ("mxdebug.files.check = lambda path, folder: path", "mxfp4", "forbidden: "),
    # JSON that is taken as it comes
    "JSON unchecked": (
        "import json; mxdebug.checkpoints.checkpoint.read_json = lambda path, folder: json.loads(path.read_text())",
        "mxfp4",
        r"\w+Error in",
    ),
}


@pytest.mark.parametrize("bug", list(BUGS))
def test_a_bug_is_found(bug: str, tmp_path: Path) -> None:
    """In a process of its own: the bug is put in there, and 300 cases of the one seed folder find it."""
    code, name, crash = BUGS[bug]
    script = f"""
import pathlib, re
import mxdebug, mxdebug.calls.tensors, mxdebug.checkpoints, mxdebug.files
from fuzz import guard, runner, seeds
root = pathlib.Path({str(tmp_path)!r})
made, given = seeds.make(root / "seeds"), seeds.make(root / "given")
seeds.NAMES = ({name!r},)
for entry in (seeds.ENTRIES[{name!r}], seeds.CLI[{name!r}]):
    entry(given / {name!r}, given)
{code}
guard.install()
guard.SECONDS = 0.5
for number in range(300):
    crash, _, _ = runner.one(number, 0, made, root / "work", given)
    if crash is not None and re.match({crash!r}, crash.crash):
        print("FOUND", number, crash.crash)
        break
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=runner.TESTS, capture_output=True, text=True, timeout=300, stdin=subprocess.DEVNULL
    )
    assert "FOUND" in done.stdout, done.stdout + done.stderr[-2000:]
