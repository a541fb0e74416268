"""The byte-level fuzzer: cases by number, in a child process that a case may kill.

Case N of seed S is always the same. The child writes the number of each case before it begins, so that the parent knows which
one killed it.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

TESTS = Path(__file__).parent.parent
PLACE = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # cases are written and thrown away: no need for a disk
KILL = 180.0
"""Seconds of one case after which the child dies, where not even a signal gets through (a loop in C)."""


@dataclass(frozen=True)
class Crash:
    """One case that went wrong: its number, seed folder, what was broken, how it failed (`crash` groups equal ones)."""

    case: int
    name: str
    broken: str
    crash: str
    problem: str


@dataclass(frozen=True)
class Report:
    """What a run found: counts by result, the crashes, (CPU seconds, number) of the slowest case, and wall-clock seconds of the run."""

    results: dict[str, int]
    crashes: list[Crash]
    slowest: tuple[float, int]
    seconds: float


def case(number: int, seed: int, seeds: Path, work: Path) -> tuple[str, str, Path]:
    """Write case `number` into `work`: (seed folder, what was broken, where it is)."""
    from .mutate import break_folder
    from .seeds import NAMES

    r = random.Random(f"{seed}:{number}")
    name = r.choice(NAMES)
    folder = _fresh(work, seeds, name)
    return name, break_folder(folder, seeds, r), folder


def _fresh(work: Path, seeds: Path, name: str) -> Path:
    """An empty `work` with a copy of one seed."""
    shutil.rmtree(work, ignore_errors=True)
    return Path(shutil.copytree(seeds / name, work / name))


def one(number: int, seed: int, seeds: Path, work: Path, given: Path) -> tuple[Crash | None, str, float]:
    """Run one case: (the crash, the result, its CPU seconds). Every fourth goes through the command line.

    seeds   what cases are made of, and what links may lead to; no reader may open it
    given   the same, whole, for what is read besides the folder under attack
    """
    from .guard import attack
    from .seeds import CLI, ENTRIES

    name, broken, folder = case(number, seed, seeds, work)
    entry = (CLI if number % 4 == 3 else ENTRIES)[name]
    out = attack(lambda f: entry(f, given), folder, given)
    return (Crash(number, name, broken, out.crash, out.problem) if out.problem else None), out.result, out.seconds


def child(first: int, last: int, seed: int, place: Path) -> None:
    """Run cases, appending a line for each to place/log: its number before, what came of it after."""
    import torch

    from . import guard, seeds

    torch.set_num_threads(1)
    reference, given = place / "seeds", place / "given"
    for name in seeds.NAMES:  # imports, caches: what is not of a case; and proof that the seeds are whole
        for entry in (seeds.ENTRIES[name], seeds.CLI[name]):
            entry(_fresh(place / "work", reference, name), given)
    guard.install()
    stderr = os.fdopen(os.dup(2), "w")
    with (place / "log").open("a") as log:
        for number in range(first, last):
            log.write(f"{number}\n")
            log.flush()
            faulthandler.dump_traceback_later(KILL, exit=True, file=stderr)
            crash, result, seconds = one(number, seed, reference, place / "work", given)
            faulthandler.cancel_dump_traceback_later()
            log.write(json.dumps([result, seconds, number, crash and asdict(crash)]) + "\n")


def run(cases: int, seed: int, first: int = 0, processes: int = 1) -> Report:
    """Run `cases` cases from number `first` on."""
    from .seeds import make

    began = time.time()
    with tempfile.TemporaryDirectory(prefix="mxdebug-fuzz-", dir=PLACE) as tmp:
        shutil.copytree(make(Path(tmp) / "seeds"), Path(tmp) / "given")
        bounds = [first + cases * i // processes for i in range(processes + 1)]
        parts = []
        for i in range(processes):
            place = Path(tmp) / str(i)
            place.mkdir()
            for shared in ("seeds", "given"):
                (place / shared).symlink_to(Path(tmp) / shared)
            parts.append(_Part(place, bounds[i], bounds[i + 1], seed))
        while any(part.running() for part in parts):
            time.sleep(0.2)
        logs = [json.loads(line) for part in parts for line in (part.place / "log").read_text().splitlines() if line.startswith("[")]
        killed = [crash for part in parts for crash in part.killed]
    results: dict[str, int] = {"killed": len(killed)} if killed else {}
    for result, *_ in logs:
        results[result] = results.get(result, 0) + 1
    crashes = [*killed, *(Crash(**c) for *_, c in logs if c)]
    return Report(results, crashes, max(((s, number) for _, s, number, _ in logs), default=(0.0, -1)), time.time() - began)


class _Part:
    """One child process, started again after the case that killed it."""

    def __init__(self, place: Path, first: int, last: int, seed: int) -> None:
        self.place, self.next, self.last, self.seed = place, first, last, seed
        self.killed: list[Crash] = []
        self._start()

    def _start(self) -> None:
        arguments = f"{self.next}, {self.last}, {self.seed}, Path({str(self.place)!r})"
        code = f"from fuzz.runner import child; from pathlib import Path; child({arguments})"
        self.errors = (self.place / "stderr").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=TESTS,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=self.errors,
            env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "110"},
        )

    def running(self) -> bool:
        code = self.process.poll()
        if code is None:
            return True
        if code == 0:
            return False
        self.errors.seek(0)
        said = self.errors.read()[-1500:]
        lines = (self.place / "log").read_text().splitlines() if (self.place / "log").exists() else []
        if not lines or not lines[-1].isdigit() or int(lines[-1]) < self.next:
            raise RuntimeError(f"the fuzzer itself failed:\n{said}")
        number = int(lines[-1])
        self.killed.append(Crash(number, "?", "?", f"killed: exit {code}", said))
        with (self.place / "log").open("a") as log:
            log.write('{"killed": true}\n')
        self.next = number + 1
        if self.next >= self.last:
            return False
        self._start()
        return True
