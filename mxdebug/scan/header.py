"""The header of a safetensors file, read without its data and without trust.

Format: 8 bytes little-endian length, then JSON {name: {dtype, shape, data_offsets}}, then data without holes
(https://github.com/huggingface/safetensors, "Format"). The library's own reader maps the whole file and gives no offsets; to stream bytes
into histograms one needs the places.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from .. import files
from ..errors import MxdebugError

BITS = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "U16": 16,
    "I16": 16,
    "F16": 16,
    "BF16": 16,
    "U32": 32,
    "I32": 32,
    "F32": 32,
    "U64": 64,
    "I64": 64,
    "F64": 64,
    "C64": 64,
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
}
MOST_HEADER = 1 << 26
"""Bytes of one header, and of all headers of a folder: their names must fit into memory. 300,000 tensors have about 40 MiB."""
_DAMAGED = "an interrupted download, a Git LFS pointer in its place, or a damaged file"


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies: `size` bytes at `start` of `file` (a name in the folder). dtype as safetensors spells it: U8, F8_E8M0 ..."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


@dataclass(frozen=True)
class Header:
    """tensors: name -> Entry; size: of the file; read: bytes of the header; cut: names whose bytes end after the file does."""

    tensors: dict[str, Entry]
    size: int
    read: int
    cut: tuple[str, ...]


def read_header(path: Path, folder: Path, most: int = MOST_HEADER) -> Header:
    """The header of one file in `folder`.

    Raises MxdebugError for a file that is none, or whose header contradicts itself or has more than `most` bytes.
    A file that ends too early is no error here: `cut` says which tensors it lacks.
    """

    def damaged(expected: str, got: str, reason: str = _DAMAGED) -> MxdebugError:
        return MxdebugError(str(path), expected, got, reason)

    try:
        with files.check(path, folder).open("rb") as file:
            size = path.stat().st_size
            first = file.read(8)
            length = int.from_bytes(first, "little")
            if len(first) < 8 or length > size - 8:
                raise damaged("a safetensors file", f"{size} bytes, whose first 8 say that the header has {length}")
            if length > most:
                raise damaged(
                    f"a header of at most {most} bytes",
                    f"{length} bytes",
                    "another file under this name, or more tensors than fit into memory",
                )
            raw = file.read(length)
    except OSError as error:
        raise damaged("a file that can be read", f"{type(error).__name__} ({error.strerror})") from error
    try:
        data = files.parse(raw, once=True)
    except (ValueError, RecursionError) as error:
        raise damaged("a header in JSON", str(error)[:200]) from error
    if not isinstance(data, dict):
        raise damaged("a JSON object as header", type(data).__name__)
    tensors: dict[str, Entry] = {}
    for name, entry in data.items():
        if name != "__metadata__":
            tensors[name] = _entry(
                entry, path.name, 8 + length, lambda got, name=name: damaged(f"a sound entry of tensor {name[:200]!r}", got)
            )
    end = 8 + length
    for name, entry in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].size)):
        if entry.start != end:
            raise damaged(
                "tensors one after the other, without hole or overlap", f"tensor {name[:200]!r} at byte {entry.start} instead of {end}"
            )
        end += entry.size
    if end < size:
        raise damaged("tensors that fill the file", f"{size - end} bytes after the last tensor")
    return Header(tensors, size, 8 + length, tuple(name for name, e in tensors.items() if e.start + e.size > size))


def _entry(entry: object, file: str, data: int, damaged: Callable[[str], MxdebugError]) -> Entry:
    if not isinstance(entry, dict):
        raise damaged(type(entry).__name__)
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in BITS:
        raise damaged(f"dtype {str(dtype)[:40]!r}")
    for what, numbers in (("shape", shape), ("data_offsets", offsets)):
        if not isinstance(numbers, list) or len(numbers) > 8 or any(type(n) is not int or not 0 <= n < 1 << 60 for n in numbers):
            raise damaged(f"{what} {str(numbers)[:80]}")
    if len(offsets) != 2 or 8 * (offsets[1] - offsets[0]) != math.prod(shape) * BITS[dtype]:
        raise damaged(f"{dtype} {shape} in bytes {offsets}")
    return Entry(file, dtype, tuple(shape), data + offsets[0], offsets[1] - offsets[0])
