"""Scan a checkpoint: find its weights, count their bytes, compare with what its configuration states."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

from ..errors import MxdebugError
from .checks import findings
from .finding import SEVERITIES, shown
from .folder import open_folder
from .index import write_index
from .report import Report
from .run import run
from .scene import Scene
from .stated import read_stated
from .statistics import statistics
from .tasks import task_of
from .weights import find_weights

TP = (1, 2, 4, 8)


def scan(
    path: str | os.PathLike[str],
    *,
    payload: bool = False,
    tp: tuple[int, ...] = TP,
    processes: int = 1,
    resume: str | os.PathLike[str] | None = None,
    index: str | os.PathLike[str] | None = None,
    progress: bool = False,
) -> Report:
    """Everything that can be seen in a checkpoint without a GPU and without an engine.

    path       a folder with safetensors (and config.json), or one .safetensors file
    payload    read the payloads too: code statistics, zero scales under other payload, zero weights
    tp         tensor-parallel degrees to check sizes for
    processes  how many read and count at once, two at least: up to 8 are threads of this process, which start at once; more are processes,
               where each has 4 GiB to read. Each has a few MiB of buffers, and the first process keeps a few kB for each weight.
               Other threads that first use torch while they work get one of its threads each
    resume     a file that keeps what was measured; of an interrupted scan only the rest is read, and files whose size or time changed again
    index      a file to write row hashes of all weights to (`mxdebug.scan.load_index` reads it); reads the payloads
    progress   a progress bar on stderr

    Damaged files are findings. Raises MxdebugError only where nothing can be scanned: no files, none that can be read, no weights of a
    known kind; and where `resume` is another kind of file.
    """
    if any(n < 1 for n in tp):
        raise MxdebugError("tp", "degrees of 1 and more", ", ".join(map(str, tp)))
    path = Path(path)
    folder = open_folder(path)
    stated = read_stated(folder.path)
    weights = find_weights(folder.tensors, folder.unread, stated.kind)
    if not weights.quantised:
        some = ", ".join(shown(n) for n in sorted(folder.tensors)[:3]) or "no tensors"
        raise MxdebugError(
            str(path),
            "weights in MXFP4, NVFP4 or MXFP8, by the names of gpt-oss, compressed-tensors, ModelOpt or Quark",
            some,
            "an unquantised checkpoint, or another format",
        )
    tasks = [t for w in weights.quantised if (t := task_of(w, payload, index is not None)) is not None]
    measured, resumed = run(folder, tasks, processes, None if resume is None else Path(resume), progress)
    scene = Scene(folder, stated, weights, measured, tp, payload or index is not None)
    read = {
        "headers": folder.read,
        "scales": sum(t.size for t in tasks) - (data := sum(t.payload.size for t in tasks if t.payload)),
        "payload": data,
    }
    if index is not None:
        write_index(Path(index), folder, weights.quantised, measured)
    return Report(
        str(path),
        stated.words,
        Counter(w.kind.name for w in weights.quantised),
        tuple(sorted(findings(scene), key=lambda f: SEVERITIES.index(f.severity))),
        tuple(statistics(g) for g in scene.groups),
        read,
        folder.size,
        len(folder.stats),
        len(folder.tensors),
        resumed,
        scene.payload,
        tp,
    )
