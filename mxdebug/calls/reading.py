"""Find and read calls that FlashInfer dumped at FLASHINFER_LOGLEVEL=10.

A session folder (FLASHINFER_DUMP_DIR) holds one folder a call, and `session.jsonl` with the records of all:

    20261129_151620_079_pid425_cutlass_fused_moe_call0001/
        metadata.jsonl     a record before the call ("inputs_saved"), one after it ("completed"); the last complete line counts
        inputs.pt          tensor arguments by key, or inputs.safetensors
        outputs.pt
        graph_flushes/flush_0001/   the same three again, a snapshot after each replay of a captured CUDA graph

Source: FlashInfer 0.7.4 `api_logging`. Dumps get copied, so folders are found where they are, never by the `dump_dir` in a record.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import files as strangers
from ..errors import MxdebugError, brief
from . import tensors as files
from .call import COMPLETED, CRASHED, PENDING, Call, name_arguments
from .values import ABSENT, rebuild
from .writing import DUMP_NAME, dump_name

UNREADABLE = "unreadable"
MISSING = "missing"
_LISTED = 20
_MOST_RECORDS, _MOST_LINES = 1 << 27, 1 << 16  # bytes and lines of a .jsonl file: one call takes two records of some 10 kB


@dataclass(frozen=True)
class Recording:
    """The header of a recorded call, read without its tensors; `load()` reads the call.

    status      that of the Call; or "unreadable", where the metadata is broken (`problem` says how), or "missing", for a call that
                session.jsonl lists while its folder is not there
    source      the call's folder, or one of its graph_flushes
    size        bytes of the files in it
    flush       number of the snapshot among those of the same call; 0 for none
    """

    function: str
    status: str
    sequence: int
    timestamp: str
    process: int
    source: Path
    size: int
    graph_capture: bool = False
    flush: int = 0
    problem: str = ""

    def load(self) -> Call:
        """The call with its tensors. MxdebugError if anything of it is missing, cut off or inconsistent."""
        if self.status == MISSING:
            raise MxdebugError(str(self.source), "the folder of a call that session.jsonl lists", "no such folder", self.problem)
        if self.status == UNREADABLE and self.source.is_symlink():
            raise _link(self.source)
        return _read_call(self.source)


def load(path: Path | str) -> Call:
    """The one call at `path`: a call's folder, a session with one call in it, a metadata.jsonl or session.jsonl.

    MxdebugError if there is no call, or more than one (it lists them), or if any part of the dump is broken.
    """
    there = [recording for recording in scan(path) if recording.status != MISSING]
    if len(there) != 1:
        listed = [f"{r.source} ({r.status})" for r in there[:_LISTED]]
        listed += [f"and {len(there) - _LISTED} more"] if len(there) > _LISTED else []
        raise MxdebugError(str(path), "exactly one call", "\n  ".join([f"{len(there)}:", *listed]),
                           "a whole session: load one of these, or scan() it" if there else "the calls' folders were not copied along")
    return there[0].load()


def scan(path: Path | str) -> list[Recording]:
    """The calls at `path`, sorted by (timestamp, process, sequence): a call's folder, a session folder (or a folder of sessions), or the
    metadata.jsonl or session.jsonl in one.

    Each snapshot in graph_flushes is a recording of its own; their call's folder only repeats the last, and is listed if that is not so.
    Broken calls are listed as "unreadable"; session.jsonl lists calls of which the folder is gone as "missing".
    MxdebugError if nothing is there, or if `path` is itself a broken call.
    """
    path = Path(path)
    try:
        if path.is_file() and path.name not in ("metadata.jsonl", "session.jsonl"):
            raise MxdebugError(str(path), "a dump's folder, metadata.jsonl or session.jsonl", "another file",
                               "tensors alone say nothing about the call: give the folder that the file lies in")
        if path.is_file():
            folder = path.parent
            found = _session(folder, listing=path) if path.name == "session.jsonl" else _call(folder)
        elif path.is_dir():
            found = _call(path) if _is_call(path) else _session(path)
        else:
            raise MxdebugError(str(path), "a folder with FlashInfer dumps", "no such file or folder")
    except OSError as error:
        raise MxdebugError(str(path), "a folder that can be read", str(error)) from error
    if not found:
        raise MxdebugError(str(path), "folders like 20261129_151620_079_pid425_cutlass_fused_moe_call0001 with a metadata.jsonl", "none",
                           "not a FlashInfer dump, or nothing was recorded: see mxdebug.calls.dump_recipe()")
    return sorted(found, key=lambda r: (r.timestamp, r.process, r.sequence, r.function, r.flush))


def _is_call(folder: Path) -> bool:
    return (folder / "metadata.jsonl").is_file() or DUMP_NAME.fullmatch(folder.name) is not None or files.find(folder, "inputs") is not None


def _session(folder: Path, listing: Path | None = None, depth: int = 2) -> list[Recording]:
    """The calls in the folders below; `depth` 2 also finds sessions side by side, one for each rank or run. Links are not followed."""
    found: list[Recording] = []
    for child in sorted(folder.iterdir()):
        if child.is_symlink():
            if child.is_dir():
                found.append(_unreadable(child, _link(child), size=0))
        elif child.is_dir() and _is_call(child):
            try:
                found += _call(child)
            except MxdebugError as error:
                found.append(_unreadable(child, error))
        elif child.is_dir() and depth > 1:
            found += _session(child, depth=depth - 1)
    # Matched by what identifies a call, not by folder name: a renamed folder is not missing.
    return found + (_missing(listing, {(r.timestamp, r.process, r.function, r.sequence) for r in found}) if listing else [])


def _link(folder: Path) -> MxdebugError:
    return MxdebugError(str(folder), "a folder", "a link", "a stranger could have made it, to any folder: give the folder that it leads to")


def _missing(listing: Path, found: set[tuple[Any, ...]]) -> list[Recording]:
    """Calls in session.jsonl that are not among those found. Lines that cannot be read are skipped: workers that share the file can
    tear each other's lines, and each call's own metadata.jsonl says the same."""
    missing = {}
    for record in _records(listing):
        key = tuple(record.get(name) for name in ("timestamp", "process_id", "function_name", "call_sequence"))
        if [type(part) for part in key] == [str, int, str, int] and key not in found:
            name = dump_name(key[0], key[1], key[2], key[3])
            if DUMP_NAME.fullmatch(name):
                missing[key] = Recording(key[2], MISSING, key[3], key[0], key[1], listing.parent / name, 0,
                                         problem="the call's folder was deleted, or not copied along with session.jsonl")
    return list(missing.values())


def _call(folder: Path) -> list[Recording]:
    """The recordings in one call's folder: itself, and the snapshots of its graph replays."""
    snapshots: list[Recording] = []
    flushes = folder / "graph_flushes"
    for child in sorted(flushes.iterdir()) if flushes.is_dir() and not flushes.is_symlink() else []:
        if child.is_dir() and not child.is_symlink() and _flush(child):
            try:
                snapshots.append(_header(child))
            except MxdebugError as error:
                snapshots.append(_unreadable(child, error))
    try:
        metadata = _metadata(folder)
        # FlashInfer writes each flush twice, here and as a snapshot: the last of them is not another call.
        repeats = any(s.flush and s.flush == metadata.get("graph_capture_flush_index") for s in snapshots)
        return snapshots if repeats else [_header(folder), *snapshots]
    except MxdebugError as error:
        if not snapshots:
            raise
        return [_unreadable(folder, error), *snapshots]


def _header(folder: Path) -> Recording:
    m = _metadata(folder)
    return Recording(m["function_name"], _status(m, folder), m["call_sequence"], m["timestamp"], m["process_id"], folder,
                     _size(folder), m.get("graph_capture") is True, _flush(folder))


def _flush(folder: Path) -> int:
    match = re.fullmatch(r"flush_(\d{1,9})", folder.name)
    return int(match[1]) if match else 0


def _unreadable(folder: Path, error: MxdebugError, size: int | None = None) -> Recording:
    name = DUMP_NAME.fullmatch(folder.name) or DUMP_NAME.fullmatch(folder.parent.parent.name)
    blank = Recording("", UNREADABLE, 0, "", 0, folder, _size(folder) if size is None else size, flush=_flush(folder), problem=str(error))
    if name is None:
        return blank
    return replace(blank, function=name["function"], sequence=int(name["sequence"]), timestamp=name["timestamp"],
                   process=int(name["process"]))


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir() if file.is_file())


def _records(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a .jsonl file that are whole JSON objects, the last one first."""
    data = strangers.read(path, path.parent, _MOST_RECORDS)
    if (lines := data.count(b"\n")) > _MOST_LINES:
        raise MxdebugError(str(path), f"at most {_MOST_LINES} records", f"{lines} lines", "not written by FlashInfer")
    for line in reversed(data.split(b"\n")):
        try:
            record = strangers.parse(line)
        except (ValueError, RecursionError):
            continue  # cut off by a crash
        if isinstance(record, dict):
            yield record


_REQUIRED: dict[str, type] = {
    "function_name": str, "module": str, "call_sequence": int, "timestamp": str, "process_id": int, "input_metadata": dict,
    "output_metadata": dict, "tensor_info": dict, "tensor_details": dict, "function_signature": str, "versions": dict,
    "execution_status": str,
}
_STATUSES = ("inputs_saved", "completed", "graph_capture_pending_flush")


def _metadata(folder: Path) -> dict[str, Any]:
    """The last complete record of a call, with all the keys that `_REQUIRED` names."""
    path = folder / "metadata.jsonl"
    if not path.exists():
        raise MxdebugError(str(path), "the call's metadata", "no such file",
                           "not a FlashInfer dump, or the process ended before it was written")
    metadata = next(_records(path), None)
    if metadata is None:
        raise MxdebugError(str(path), "a JSON record a line", "no complete record" if path.stat().st_size else "an empty file",
                           "the dump was cut off while being written (process killed, disk full)")
    wrong = [key for key, kind in _REQUIRED.items() if not isinstance(metadata.get(key), kind)]
    for key in ("input_tensor_keys", "output_tensor_keys") if "tensor_info" not in wrong else ():
        names = metadata["tensor_info"].get(key)
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            wrong.append(f"tensor_info.{key}")
    if wrong:
        raise MxdebugError(str(path), "FlashInfer's keys, each of its type", f"missing or of another type: {', '.join(wrong)}",
                           "another tool's file; or the folder was emptied while a CUDA graph still flushed into it")
    if metadata["execution_status"] not in _STATUSES:
        raise MxdebugError(f"{path}, execution_status", " or ".join(_STATUSES), brief(metadata["execution_status"]))
    return metadata


def _status(metadata: Mapping[str, Any], folder: Path) -> str:
    """What became of the call, by its record and, for a CUDA graph's, by the files that are there.

    Outputs count once the record says "completed": before that, a file with them may be cut off, or be that of an earlier flush.
    """
    info, recorded = metadata["tensor_info"], metadata["execution_status"]
    returned = bool(metadata["output_metadata"] or info["output_tensor_keys"])
    if recorded == "completed":
        return COMPLETED
    if recorded == "inputs_saved":
        # A flush without output tensors ends so although the captured call had returned.
        return COMPLETED if metadata.get("graph_capture_flushed") is True and returned and not info["output_tensor_keys"] else CRASHED
    absent = {stem for stem, keys in (("inputs", info["input_tensor_keys"]), ("outputs", info["output_tensor_keys"]))
              if keys and files.find(folder, stem) is None}
    if not absent:
        return COMPLETED if returned else CRASHED
    return PENDING if "inputs" in absent or not info["input_tensor_keys"] else CRASHED


def _read_call(folder: Path) -> Call:
    m = _metadata(folder)
    status, info = _status(m, folder), m["tensor_info"]
    inputs = None if status == PENDING else _tensors(m, folder, "inputs", info["input_tensor_keys"])
    where = str(folder / "metadata.jsonl")
    outputs, lost = {}, ""
    if status == COMPLETED:
        try:
            outputs = _tensors(m, folder, "outputs", info["output_tensor_keys"])
            for key, entry in m["output_metadata"].items():  # raises for results that FlashInfer cut off or wrote as text
                rebuild(entry, outputs, f"{where}, {key}")
        except MxdebugError as error:  # what was passed can decide all the same
            outputs, lost = {}, str(error)
    positional, keywords = _passed(m["input_metadata"], info["input_tensor_keys"], inputs, where)
    arguments, defaulted = name_arguments(positional, keywords, m["function_signature"])
    return Call(
        function=m["function_name"], module=m["module"], arguments={n: v for n, v in arguments.items() if v is not ABSENT},
        defaulted=defaulted, outputs=tuple(outputs.values()), status=status, versions={k: str(v) for k, v in m["versions"].items()},
        sequence=m["call_sequence"], timestamp=m["timestamp"], process=m["process_id"], graph_capture=m.get("graph_capture") is True,
        signature=m["function_signature"], source=folder, lost=lost)


def unrecorded_outputs(call: Call) -> str:
    """The name of a file of outputs that lies beside a call which, by its record, did not return; "" for none. Such a file is not read: see `_status`."""
    path = files.find(call.source, "outputs") if call.status == CRASHED and call.source is not None else None
    return "" if path is None else path.name


def _tensors(metadata: Mapping[str, Any], folder: Path, stem: str, keys: list[str]) -> dict[str, Any]:
    if not keys:
        return {}  # FlashInfer writes no file then
    path = files.find(folder, stem, str(metadata.get("tensor_format")))
    if path is None:
        raise MxdebugError(str(folder), f"{stem}.pt or {stem}.safetensors with {', '.join(keys)}", "neither",
                           "the folder was copied in part, or the process ended while the file was being written")
    return files.read(path, keys, metadata["tensor_details"])


def _passed(
    entries: Mapping[str, Any], tensor_keys: list[str], tensors: Mapping[str, Any] | None, where: str,
) -> tuple[list[Any], dict[str, Any]]:
    """(positional, by keyword) as they were passed. A tensor that is an argument itself has no entry; one in a list is named by the
    list's."""
    values = {key: rebuild(entry, tensors, f"{where}, {key}") for key, entry in entries.items()}
    nested = set(_nested_keys(list(entries.values())))
    values |= {key: ABSENT if tensors is None else tensors[key] for key in tensor_keys if key not in nested}
    positional = {int(key[4:]): value for key, value in values.items() if re.fullmatch(r"arg_[0-9]{1,6}", key)}
    keywords = {key[6:]: value for key, value in values.items() if key.startswith("kwarg_") and len(key) > 6}
    strange = [key for key in values if not (re.fullmatch(r"arg_[0-9]{1,6}", key) or key.startswith("kwarg_"))]
    if strange or sorted(positional) != list(range(len(positional))):
        raise MxdebugError(where, "arguments arg_0, arg_1, ... and kwarg_<name>", ", ".join(values),
                           "not a FlashInfer dump, or keys are missing")
    return [positional[i] for i in range(len(positional))], keywords


def _nested_keys(entries: list[Any]) -> list[str]:
    """The tensor keys that entries name: `rebuild` has been through them, so they are as deep as it allows."""
    keys: list[str] = []
    for entry in entries:
        if not isinstance(entry, dict):
            continue
        if entry.get("type") == "torch.Tensor":
            keys += [entry["tensor_key"]] if isinstance(entry.get("tensor_key"), str) else []
        elif isinstance(items := entry.get("items"), list):
            pairs = entry["type"] == "dict"
            keys += _nested_keys([part for item in items for part in ((item["key"], item["value"]) if pairs else (item,))])
    return keys
