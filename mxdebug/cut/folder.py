"""The folder of a minimal reproduction: dump, checkpoint and README.txt, without a path of this machine; diagnosed as it was written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

from ..calls import Call, load
from ..checkpoints import open_checkpoint
from ..diagnosis import Diagnosis, diagnose
from ..errors import MxdebugError

DUMP, CHECKPOINT, README = "dump", "checkpoint", "README.txt"


def check_free(folder: Path) -> None:
    """Raise MxdebugError unless the folder is new or empty: nothing of somebody's is overwritten."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise MxdebugError(
            "--out", "a new or an empty folder", f"{folder.name}, which holds something" if folder.is_dir() else f"{folder.name}, a file"
        )


def write(
    folder: Path,
    call: Call,
    checkpoint: Callable[[Path], Path],
    tp: tuple[int, int] | None,
    what: str,
    same: Callable[[Diagnosis], bool],
    wanted: str,
) -> Diagnosis:
    """Write a call and, by `checkpoint`, its layer; read both back and diagnose them. Returns that diagnosis.

    tp: what --tp must say; what: what it is called in an error. Raises MxdebugError, and leaves nothing, unless the diagnosis
    is the `same`.
    """
    there = folder.exists()
    try:
        saved = call.save(folder / DUMP)
        _forget_place(folder / DUMP, saved)
        opened = open_checkpoint(checkpoint(folder / CHECKPOINT))
        d = diagnose(load(folder / DUMP), opened, tp=tp)
        if not same(d):
            raise MxdebugError(
                what, wanted, f"{d.verdict}: {', '.join(f.id for f in d.findings) or 'no fault'}", "a fault that this cannot keep"
            )
    except BaseException:
        for name in (DUMP, CHECKPOINT):
            shutil.rmtree(folder / name, ignore_errors=True)
        if not there and folder.is_dir():
            folder.rmdir()
        raise
    return d


def _forget_place(session: Path, folder: Path) -> None:
    """Records name the folder that they were written to; no reader follows it, and it is nobody's business."""
    for file in (session / "session.jsonl", folder / "metadata.jsonl"):
        records = [json.loads(line) for line in file.read_text().splitlines()]
        file.write_text("".join(json.dumps({**r, "dump_dir": folder.name}) + "\n" for r in records))


def readme(d: Diagnosis, kept: str, numbers: str, tp: tuple[int, int] | None) -> str:
    """README.txt: what this is, and how to run it. kept: what is in it; numbers: whose they are."""
    run = f"mxdebug diagnose {DUMP} --checkpoint {CHECKPOINT}" + (f" --tp {tp[0]} {tp[1]}" if tp is not None else "")
    found = "\n".join(f"  {f.id} [{f.strength}]: {f.title} ({f.where})" for f in d.findings) or "  no fault"
    return (
        f"A minimal reproduction, made by mxdebug.\n\n{kept}\n{numbers}\n\n"
        f"Run it, in this folder; no GPU is needed:\n\n  {run}\n\nIt says: {d.verdict.upper()}\n{found}\n\n"
        f"{DUMP} is a dump as FlashInfer writes it (flashinfer's replay_from_dump reads it, too); {CHECKPOINT} has\n"
        "config.json with what is needed, and one layer in safetensors.\n"
    )


def size(folder: Path) -> int:
    """Bytes of the files below a folder, or of one file."""
    return folder.stat().st_size if folder.is_file() else sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
