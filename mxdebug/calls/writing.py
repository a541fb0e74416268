"""Write a Call as FlashInfer writes it, so that `load` and FlashInfer's own `replay_from_dump` read it back.

Source: FlashInfer 0.7.4 `api_logging._dump_function_inputs` and `_dump_function_outputs`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..errors import MxdebugError
from . import signature as signatures
from . import tensors as files
from .values import describe

if TYPE_CHECKING:
    from .call import Call

DUMP_NAME = re.compile(r"(?P<timestamp>\d{8}_\d{6}_\d{3})_pid(?P<process>\d+)_(?P<function>[^/\\\0]+)_call(?P<sequence>\d{4,})")
"""The name of a call's folder."""


def dump_name(timestamp: str, process: int, function: str, sequence: int) -> str:
    """The folder name that FlashInfer gives to a call."""
    return f"{timestamp}_pid{process}_{function}_call{sequence:04d}"


def write(call: Call, session: Path, tensor_format: str) -> Path:
    """Write one call into its own new folder below `session`, and its records into `session.jsonl`; returns the folder."""
    if tensor_format not in files.SUFFIXES:
        raise MxdebugError("tensor_format", " or ".join(files.SUFFIXES), repr(tensor_format))
    if call.status not in ("completed", "crashed"):
        raise MxdebugError("call", "one whose tensors are known", f"status {call.status!r}", "FlashInfer never wrote its tensors")
    if call.lost:
        raise MxdebugError("call", "one whose tensors are known", "lost outputs", call.lost)
    name = dump_name(call.timestamp, call.process, call.function, call.sequence)
    if not DUMP_NAME.fullmatch(name):
        raise MxdebugError("call", "timestamp, process, function and sequence that make FlashInfer's folder name", repr(name))
    inputs: dict[str, Tensor] = {}
    input_metadata = _describe_all(_keys(call), inputs)
    outputs = {f"result_{i}" if len(call.outputs) > 1 else "result": t for i, t in enumerate(call.outputs)}
    folder = session / name
    try:
        folder.mkdir(parents=True)
    except OSError as error:
        raise MxdebugError(str(folder), "a folder that can be made", str(error),
                           "the call was already saved here, or no permission") from error

    # The order of FlashInfer: inputs and their record first, so that a crash in between leaves a readable dump.
    if inputs:
        _write_tensors(folder / f"inputs{files.SUFFIXES[tensor_format]}", inputs)
    size = _size(inputs)
    metadata: dict[str, Any] = {
        "function_name": call.function, "module": call.module, "call_sequence": call.sequence, "timestamp": call.timestamp,
        "process_id": call.process, "input_metadata": input_metadata, "output_metadata": {},
        "tensor_info": {"input_tensor_keys": list(inputs), "output_tensor_keys": [],
                        "input_size_bytes": size, "input_size_mb": size / 2**20},
        "tensor_details": _details(inputs), "tensor_format": tensor_format, "function_signature": call.signature,
        "versions": dict(call.versions), "execution_status": "inputs_saved", "graph_capture": call.graph_capture, "dump_dir": str(folder),
    }
    _append(folder, session, metadata)
    if call.status == "completed":
        if outputs:
            _write_tensors(folder / f"outputs{files.SUFFIXES[tensor_format]}", outputs)
        metadata["output_metadata"] = {} if outputs else {"result": None}
        metadata["tensor_info"] |= {
            "output_tensor_keys": list(outputs), "output_size_bytes": _size(outputs), "output_size_mb": _size(outputs) / 2**20,
            "total_size_bytes": size + _size(outputs), "total_size_mb": (size + _size(outputs)) / 2**20}
        metadata["tensor_details"] |= _details(outputs)
        metadata["execution_status"] = "completed"
        _append(folder, session, metadata)
    return folder


def _keys(call: Call) -> dict[str, Any]:
    """What was passed, by FlashInfer's keys: by keyword where the signature allows, so that defaults in between can stay out."""
    parameters = signatures.parse(call.signature)
    defaults = {p.name: p.default for p in parameters}
    # A defaulted argument that somebody changed since is no default any more.
    passed = {name: value for name, value in call.arguments.items()
              if name not in call.defaulted or isinstance(value, Tensor) or not _same(value, defaults.get(name))}
    variadic = next((p.name for p in parameters if p.kind == "variadic"), None)
    last = max((i for i, p in enumerate(parameters) if p.kind == "positional only" and p.name in passed), default=-1)
    if passed.get(variadic) or any(re.fullmatch(r"arg_\d+", name) for name in passed):
        last = len(parameters)  # what follows the last positional parameter needs all of them before it
    keys: dict[str, Any] = {}
    for p in parameters[: last + 1]:
        if p.kind in ("positional only", "positional"):
            if p.name not in call.arguments:
                raise MxdebugError(f"argument {p.name}", "a value", "none", "a later argument is passed by position")
            keys[f"arg_{len(keys)}"] = call.arguments[p.name]
            passed.pop(p.name, None)
    for value in passed.pop(variadic, ()):
        keys[f"arg_{len(keys)}"] = value
    return keys | {name if re.fullmatch(r"arg_\d+|kwarg_.+", name) else f"kwarg_{name}": value for name, value in passed.items()}


def _same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and value == default)


def _describe_all(keys: dict[str, Any], tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Entries by key, as in the metadata: a tensor that is an argument itself has no entry, only a place in the file."""
    entries = {}
    for key, value in keys.items():
        entry = describe(value, key, tensors)
        if not isinstance(value, Tensor):
            entries[key] = entry
    return entries


def _details(tensors: dict[str, Tensor]) -> dict[str, Any]:
    return {key: {"shape": list(t.shape), "dtype": str(t.dtype), "stride": list(t.stride()), "device": str(t.device)}
            for key, t in tensors.items()}


def _size(tensors: dict[str, Tensor]) -> int:
    return sum(t.element_size() * t.nelement() for t in tensors.values())


def _write_tensors(path: Path, tensors: dict[str, Tensor]) -> None:
    try:
        files.write(path, tensors)
    except Exception as error:  # torch and safetensors raise RuntimeError, OSError, KeyError, SafetensorError
        raise MxdebugError(str(path), "a file that can be written", f"{type(error).__name__}: {error}",
                           "the disk is full, or the format has no such dtype") from error


def _append(folder: Path, session: Path, metadata: dict[str, Any]) -> None:
    for path in (folder / "metadata.jsonl", session / "session.jsonl"):
        with path.open("a") as file:
            file.write(json.dumps(metadata) + "\n")
