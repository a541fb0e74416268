"""Which tensors a checkpoint folder has, by the headers of its files; what is damaged becomes a finding, and the rest is scanned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from .. import files
from ..errors import MxdebugError
from .catalogue import RULES
from .finding import Finding, make
from .header import MOST_HEADER, Entry, read_header

INDEX, SUFFIX = "model.safetensors.index.json", ".safetensors"


@dataclass(frozen=True)
class Folder:
    """The tensors of a checkpoint.

    path      the folder
    tensors   name -> Entry, of every file that could be read, without the tensors that a truncated file lacks
    unread    names that exist, by the index or a header, but whose bytes cannot be read
    stats     file -> (size in bytes, modification time in nanoseconds)
    read      bytes of headers that were read
    findings  what is wrong with the files
    whole     a folder, not one file of it: whatever is absent is missing
    """

    path: Path
    tensors: dict[str, Entry]
    unread: frozenset[str]
    stats: dict[str, tuple[int, int]]
    read: int
    findings: tuple[Finding, ...]
    whole: bool

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(size for size, _ in self.stats.values())


def open_folder(path: Path) -> Folder:
    """The files of a folder, or one .safetensors file.

    A folder: the files of model.safetensors.index.json; without it every *.safetensors. Raises MxdebugError where there is no file at all,
    or none that can be read.
    """
    if path.is_file() and path.suffix == SUFFIX:
        return _read(path.parent, [path.name], None, [], whole=False)
    if not path.is_dir():
        raise MxdebugError(
            str(path),
            "a folder with *.safetensors, or a .safetensors file",
            "another kind of file" if path.exists() else "no such path",
            "a model name instead of a local path, or a typo",
        )
    present = sorted(p.name for p in path.iterdir() if p.name.endswith(SUFFIX))
    found: list[Finding] = []
    listed: dict[str, str] | None = None
    if (path / INDEX).exists():
        try:
            listed = _index(files.read_json(path / INDEX, path), found)
        except MxdebugError as error:
            found.append(
                make(RULES["index-disagrees"], f"{INDEX} cannot be read: {error.got}; every {SUFFIX} file was scanned instead", [INDEX])
            )
    names = present if listed is None else sorted(set(listed.values()))
    if not names and listed is not None:
        raise MxdebugError(f"weight_map of {INDEX}", f"names of tensors and their {SUFFIX} files", "none that can be used", "a damaged index")
    if not names:
        raise MxdebugError(str(path), f"*{SUFFIX} files", "none", "weights not downloaded, or another format")
    if listed is not None and (extra := sorted(set(present) - set(names))):
        found.append(make(RULES["files-beside"], f"{len(extra)} {SUFFIX} files are not in the index; they were not read", extra))
    return _read(path, names, listed, found)


def _index(data: dict[str, object], found: list[Finding]) -> dict[str, str]:
    """tensor -> file, where that is a name in the same folder: a checkpoint must not choose which files of this machine are opened."""
    weight_map = data.get("weight_map")
    if not isinstance(weight_map, dict):
        raise MxdebugError(f"weight_map of {INDEX}", "an object", type(weight_map).__name__, "a damaged index")
    good = {
        name: file
        for name, file in weight_map.items()
        if isinstance(file, str) and file.endswith(SUFFIX) and not any(c in file for c in "/\\\0") and len(file) < 256
    }
    if refused := [name for name in weight_map if name not in good]:
        found.append(
            make(
                RULES["file-refused"],
                f"{len(refused)} tensors are said to be in {str(weight_map[refused[0]])[:80]!r} and such",
                refused,
                len(weight_map),
            )
        )
    return good


def _read(path: Path, names: list[str], listed: dict[str, str] | None, found: list[Finding], whole: bool = True) -> Folder:
    tensors: dict[str, Entry] = {}
    unread: set[str] = set()
    stats: dict[str, tuple[int, int]] = {}
    twice: list[str] = []
    read, errors = 0, []
    for file in names:
        try:
            header = read_header(path / file, path, MOST_HEADER - read)
        except MxdebugError as error:
            errors.append(error)
            found.append(make(RULES["shard-damaged"], f"{file}: expected {error.expected}, got {error.got}", [file], len(names)))
            continue
        status = (path / file).stat()
        stats[file], read = (status.st_size, status.st_mtime_ns), read + header.read
        twice += [name for name in header.tensors if name in tensors]
        tensors |= header.tensors
        if header.cut:
            unread.update(header.cut)
            lacks = max(e.start + e.size for e in header.tensors.values()) - header.size
            found.append(
                make(
                    RULES["shard-damaged"],
                    f"{file} ends {lacks} bytes too early: {len(header.cut)} of its {len(header.tensors)} tensors are not whole",
                    [file],
                    len(names),
                )
            )
    if not stats:
        raise errors[0]
    if twice:
        found.append(
            make(RULES["tensor-twice"], f"{len(twice)} tensors; {tensors[twice[0]].file} is one of the files", twice, len(tensors))
        )
    if listed is not None:
        unread.update(name for name, file in listed.items() if file not in stats)
        absent = [name for name, file in listed.items() if file in stats and (name not in tensors or tensors[name].file != file)]
        if absent:
            found.append(
                make(RULES["index-disagrees"], f"{len(absent)} tensors are not in the file that the index names", absent, len(listed))
            )
        if extra := [name for name in tensors if name not in listed]:
            found.append(make(RULES["index-disagrees"], f"{len(extra)} tensors are in a file but not in the index", extra, len(tensors)))
    for name in unread:
        tensors.pop(name, None)
    return Folder(path, tensors, frozenset(unread), stats, read, tuple(found), whole)
