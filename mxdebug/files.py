"""Files from strangers: which of them are opened, and how much of them is read; and files that are written for the user.

A dump or a checkpoint is a folder that somebody else filled. Only regular files that lie in it are opened (a FIFO would never end, and a
link can name any file of this machine), and of JSON no more than fits into memory, whatever size the file claims.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from .errors import MxdebugError

MOST_JSON = 1 << 26
"""Bytes of a JSON file. The index of a model with 300,000 tensors has half of that."""
_MOST_MARKS = 1 << 20  # commas and opening brackets: each value takes up to 240 bytes of memory, and as few as 2 in the file


def check(path: Path, folder: Path) -> Path:
    """`path` again. MxdebugError unless it is a regular file, and lies in `folder` once links are followed.

    In a Hugging Face cache models--NAME/snapshots/REVISION holds links into models--NAME/blobs: those are followed as well.
    """
    try:
        regular, there, root, target = path.is_file(), path.exists(), folder.resolve(), path.resolve()
    except (OSError, RuntimeError, ValueError) as error:  # a loop of links, a name that no file can have
        raise MxdebugError(str(path), "a file that can be read", str(error)) from error
    if not regular:
        raise MxdebugError(str(path), "a file", "a folder, FIFO or device" if there else "no such file",
                           "not downloaded, or not copied along")
    allowed = [root, root.parent.parent / "blobs"] if root.parent.name == "snapshots" else [root]
    if not any(target.is_relative_to(place) for place in allowed):
        raise MxdebugError(str(path), f"a file in {folder}", "a link that leads elsewhere",
                           "a link that leads out of the folder is not followed, for a stranger could have made it: "
                           "put the file there itself")
    return path


def read(path: Path, folder: Path, most: int = MOST_JSON) -> bytes:
    """The content of a file, as `check` allows it. MxdebugError, too, where it has more than `most` bytes or cannot be read."""
    try:
        with check(path, folder).open("rb") as file:
            data = file.read(most + 1)
            if len(data) > most:
                raise MxdebugError(str(path), f"at most {most} bytes of JSON", f"{path.stat().st_size} bytes",
                                   "another file under this name")
    except OSError as error:
        raise MxdebugError(str(path), "a file that can be read", f"{type(error).__name__} ({error.strerror})") from error
    return data


def parse(data: bytes, once: bool = False) -> Any:
    """JSON of a bounded size in memory. ValueError or RecursionError for anything else; `once`: also where an object has a key twice."""
    if sum(data.count(mark) for mark in (b",", b"[", b"{")) > _MOST_MARKS:
        raise ValueError(f"more than {_MOST_MARKS} values")
    return json.loads(data, object_pairs_hook=_once if once else None)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))
        raise ValueError(f"the key {twice[:80]!r} twice; readers differ in which value they take")
    return made


def read_json(path: Path, folder: Path) -> dict[str, Any]:
    """The object in a JSON file. MxdebugError where `read` raises, and for no JSON, a key twice, or no object at the top."""
    try:
        data = parse(read(path, folder), once=True)
    except MxdebugError:  # which is a ValueError
        raise
    except (ValueError, RecursionError, MemoryError) as error:  # bad UTF-8 and bad JSON are both ValueError
        raise MxdebugError(str(path), "JSON", f"something else ({error})", "an interrupted download, or a Git LFS pointer") from error
    if not isinstance(data, dict):
        raise MxdebugError(str(path), "a JSON object", type(data).__name__, "another file under this name")
    return data


@contextmanager
def open_safetensors(path: Path, folder: Path, reason: str) -> Iterator[Any]:
    """safetensors' handle of a file, as `check` allows it. MxdebugError, with the likely `reason`, where its header is damaged."""
    try:
        handle = safe_open(str(check(path, folder)), framework="pt")
    except MxdebugError:
        raise
    except (SafetensorError, OSError, ValueError, RuntimeError, MemoryError) as error:
        raise MxdebugError(str(path), "a whole safetensors file", str(error), reason) from error
    with handle:
        yield handle


def check_writable(file: Path, option: str) -> None:
    """MxdebugError where no file can be written there. Asked before a diagnosis that takes minutes, not after it."""
    if file.is_dir() or not file.resolve().parent.is_dir():
        raise MxdebugError(
            option, "a file in a folder that exists", f"{file.name}, {'a folder' if file.is_dir() else 'whose folder does not exist'}"
        )


def write(file: Path, text: str, option: str) -> None:
    """Write text as UTF-8; MxdebugError where that fails."""
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise MxdebugError(
            option, "a file that can be written", f"{file.name}: {error.strerror}", "no permission, or the disk is full"
        ) from error
