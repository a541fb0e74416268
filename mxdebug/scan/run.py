"""Measure all weights: in several threads or processes, with a progress bar, and resumable."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from tqdm import tqdm

from ..errors import MxdebugError
from .folder import Folder
from .measure import Hashes, Measured, Task, measure

_BATCH, _MOST = 1 << 26, 512  # bytes and weights in one batch: smooth progress, little to do again after an interruption
_FEWEST, _THREADS = 2, 8  # threads: one counts while another waits for the disk
_WORTH = 1 << 32  # bytes for which a process pays: it takes seconds to import torch, in which a thread reads as much
_SCHEMA = "mxdebug scan state 2"
_lock, _running, _threads_before = threading.Lock(), 0, 1  # how many scans run in this process, and torch's threads before the first


def run(folder: Folder, tasks: list[Task], processes: int, state: Path | None, progress: bool) -> tuple[dict[str, Measured], int]:
    """(Measured by key, how many of them came from the state file).

    state  a file that is written while the scan runs; what it holds of files whose size and modification time are the same is not read
           again. Raises MxdebugError where it is another kind of file.
    """
    done = {} if state is None else _load(state, folder, tasks)
    left = [t for t in tasks if t.key not in done]
    sink = None if state is None else _open(state)
    bar = tqdm(
        total=sum(t.size for t in tasks),
        initial=sum(t.size for t in tasks) - sum(t.size for t in left),
        unit="B",
        unit_scale=True,
        desc="scan",
        file=sys.stderr,
        disable=not progress,
    )
    try:
        for batch, measured in _measured(folder, list(_batches(left)), processes):
            done |= {m.key: m for m in measured}
            if sink is not None:
                _save(sink, folder, batch, measured)
            bar.update(sum(t.size for t in batch))
    finally:
        bar.close()
        if sink is not None:
            sink.close()
    return done, len(tasks) - len(left)


def _measured(folder: Folder, batches: list[list[Task]], processes: int) -> Iterator[tuple[list[Task], list[Measured]]]:
    with _threads_of_torch_kept(), _pool(processes, sum(t.size for batch in batches for t in batch)) as pool:
        futures = {pool.submit(measure, str(folder.path), batch): batch for batch in batches}
        try:
            for future in as_completed(futures):  # each is saved when it ends, whatever the one before it waits for
                yield futures[future], future.result()
        except BrokenProcessPool as error:
            raise MxdebugError(
                "scan", "processes that end by themselves", "one that was killed", "too little memory: fewer --processes, then --resume"
            ) from error
        finally:
            pool.shutdown(cancel_futures=True)


@contextmanager
def _threads_of_torch_kept() -> Iterator[None]:
    """What a worker sets holds for every thread that first uses torch from then on: the last scan to end sets what was before the first."""
    global _running, _threads_before
    with _lock:
        _threads_before, _running = _threads_before if _running else torch.get_num_threads(), _running + 1
    try:
        yield
    finally:
        with _lock:
            _running -= 1
            if not _running:
                torch.set_num_threads(_threads_before)


def _pool(processes: int, size: int) -> Executor:
    """What reads `size` bytes: threads, which start at once and do not load torch and numba again; processes where they pay, and more are
    wanted than the threads that Python's lock lets work at once."""
    # Of torch's own threads each worker would have a set, and they spin on the cores of the others.
    alone: dict[str, Any] = {"initializer": torch.set_num_threads, "initargs": (1,)}
    paid = min(processes, size // _WORTH)
    if paid > _THREADS:
        return ProcessPoolExecutor(paid, _context(), **alone)
    return ThreadPoolExecutor(min(max(processes, _FEWEST), _THREADS), "mxdebug scan", **alone)


def _context() -> multiprocessing.context.BaseContext:
    """How processes start: not by a fork of this one, whose torch may have threads. Importing torch takes seconds: one does it for all."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([measure.__module__])
    return context


def _batches(tasks: Iterable[Task]) -> Iterator[list[Task]]:
    """Tasks in the order of their files, so that disks read forward."""
    batch: list[Task] = []
    size = 0
    for task in sorted(tasks, key=lambda t: (t.pieces[0].file, t.pieces[0].start)):
        if batch and (len(batch) >= _MOST or size + task.size > _BATCH):
            yield batch
            batch, size = [], 0
        batch.append(task)
        size += task.size
    if batch:
        yield batch


def _identity(folder: Folder, task: Task) -> list[object]:
    """What must be equal for a measurement to hold: the files' sizes and times, and what was read."""
    return [sorted([f, *folder.stats[f]] for f in {p.file for p in task.pieces}), json.loads(json.dumps(asdict(replace(task, names=()))))]


def _save(sink: IO[str], folder: Folder, batch: list[Task], measured: list[Measured]) -> None:
    """One line a weight. A line that an interruption cut off is not JSON, and is read again."""
    tasks = {t.key: t for t in batch}
    for m in measured:
        if not m.failed:
            arrays = {
                key: None if (a := getattr(m, key)) is None else [[[int(b), int(row[b])] for b in np.flatnonzero(row)] for row in a]
                for key in ("scales", "payload")
            }
            line = {
                "schema": _SCHEMA,
                "task": _identity(folder, tasks[m.key]),
                "names": tasks[m.key].names,
                **asdict(replace(m, scales=None, payload=None, hashes=[])),
                **arrays,
                "hashes": [vars(h) | {"rows": h.rows.tolist(), "hashes": h.hashes.tolist()} for h in m.hashes],
            }
            sink.write(json.dumps(line) + "\n")
    sink.flush()


def _open(state: Path) -> IO[str]:
    """The state file, to write on at its end; a line that an interruption cut off is closed."""
    cut = False
    if state.exists() and state.stat().st_size:
        with state.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            cut = file.read(1) != b"\n"
    try:
        sink = state.open("a", encoding="utf-8")
    except OSError as error:
        raise MxdebugError(str(state), "a state file that can be written", str(error)) from error
    sink.write("\n" if cut else "")
    return sink


def _load(state: Path, folder: Folder, tasks: list[Task]) -> dict[str, Measured]:
    if not state.exists():
        return {}
    wanted, out = {t.key: t for t in tasks}, {}
    try:
        with state.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines):
                if number == 0 and _SCHEMA not in line[:60]:
                    raise MxdebugError(str(state), "a state file of mxdebug scan", "another file", "it was left as it is; name a new one")
                if (read := _read(line, folder, wanted)) is not None:
                    out[read.key] = read
    except (OSError, UnicodeDecodeError) as error:
        raise MxdebugError(str(state), "a state file of mxdebug scan", str(error), "it was left as it is; name a new one") from error
    return out


def _read(line: str, folder: Folder, wanted: dict[str, Task]) -> Measured | None:
    """One line of a state file; None where it is damaged, of files that changed, or of what this scan does not read."""
    try:
        data = json.loads(line)
        task = wanted.get(data["key"])
        if task is None or data["task"] != _identity(folder, task) or tuple(data["names"]) != task.names:
            return None
        m = Measured(
            task.key,
            _counts(data["scales"], task.experts, 256),
            _counts(data["payload"], task.experts, 16 if task.packed else 256),
            *([int(n) for n in data[k]] for k in ("zero_rows", "lost")),
            {role: float(data["numbers"][role]) for role, _ in task.numbers},
            [_hashes(h) for h in data["hashes"]],
        )
    except (ValueError, KeyError, TypeError, IndexError, OverflowError, RecursionError):
        return None
    return m


def _hashes(data: dict[str, Any]) -> Hashes:
    rows, hashes = np.array(data["rows"], dtype=np.int32), np.array(data["hashes"], dtype=np.int64)
    return Hashes(str(data["projection"]), int(data["expert"]), int(data["total"]), rows, hashes, int(data["sum"]), int(data["xor"]))


def _counts(data: list[list[list[int]]] | None, experts: int, width: int) -> np.ndarray | None:
    if data is None:
        return None
    out = np.zeros((experts, width), dtype=np.uint64)
    for row, pairs in zip(out, data, strict=True):
        for byte, count in pairs:
            row[byte] = count
    return out
