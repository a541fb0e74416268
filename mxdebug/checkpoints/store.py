"""Which file holds which tensor, and how one of them is read without the rest."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from ..errors import MxdebugError, brief
from ..files import open_safetensors, read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass(frozen=True)
class Store:
    """The tensors of a checkpoint. `files` maps each name to its file in `folder`; `listed_in` is the index that says so, if any."""

    files: Mapping[str, Path]
    folder: Path
    listed_in: Path | None = None

    @contextmanager
    def reader(self) -> Iterator[Reader]:
        """A Reader; the files that it opened are closed again at the end."""
        with ExitStack() as stack:
            yield Reader(self, stack)


class Reader:
    """Reads single tensors, or some of their experts. Opens a file at the first tensor asked of it; data of others stays on disk."""

    def __init__(self, store: Store, stack: ExitStack) -> None:
        self._store, self._stack = store, stack
        self._handles: dict[Path, Any] = {}

    def _slice(self, name: str) -> Any:
        path = self._store.files[name]
        if path not in self._handles:
            self._handles[path] = self._stack.enter_context(_open(path, self._store.listed_in, self._store.folder))
        try:
            return self._handles[path].get_slice(name)
        except SafetensorError as error:
            raise MxdebugError(f"tensor {name}", f"in {path.name}, where {INDEX} puts it", "no such tensor there",
                               "index and shards of two different downloads") from error

    def header(self, name: str) -> tuple[str, tuple[int, ...]]:
        """(dtype as safetensors spells it: U8, F8_E8M0, BF16 ..., shape), without reading data."""
        s = self._slice(name)
        return s.get_dtype(), tuple(s.get_shape())

    def read(self, name: str, part: slice | EllipsisType = ..., rows: Tensor | None = None) -> Tensor:
        """`part` of the first axis of a tensor (all of it, scalars too, without) and `rows` (int64) of its second, in memory of its own.

        safetensors gives views of the mapped file; a copy does not change, nor end the process, when the file does.
        float8_e8m0fnu and float8_e4m3fn come as their bytes in uint8, never by value.
        """
        try:
            t = self._slice(name)[part]
            t = t.view(torch.uint8) if t.dtype in (torch.float8_e8m0fnu, torch.float8_e4m3fn) else t
            return t.clone() if rows is None else t[:, rows]
        except (SafetensorError, RuntimeError, OSError, MemoryError) as error:
            raise MxdebugError(f"tensor {name}", "readable data", str(error),
                               "a damaged file, or one that is larger than this machine's memory") from error


def open_store(path: Path) -> Store:
    """Find the safetensors files of a folder, or take the one file that `path` is.

    A folder: the shards of model.safetensors.index.json; else model.safetensors; else every *.safetensors in it.
    Raises MxdebugError for no files, a name in two files, two sets of weights, unreadable headers, an index that points elsewhere.
    Shards of an index are opened when a tensor of theirs is read, so one layer can be looked at with the other shards absent.
    """
    if path.is_file():
        if path.suffix != ".safetensors":
            raise MxdebugError(str(path), "a folder or a .safetensors file", f"a file {path.suffix or 'without suffix'}",
                               "only safetensors is read: other formats can run code or hide the dtype")
        return _from_files([path], path.resolve().parent)  # the one file that was asked for may be a link
    if not path.is_dir():
        raise MxdebugError(str(path), "a folder with config.json and safetensors, or a .safetensors file", "no such path",
                           "a model name instead of a local path, or a typo")
    if (path / INDEX).exists():
        store = _from_index(path / INDEX)
        if (path / SINGLE).exists() and path / SINGLE not in store.files.values():
            raise MxdebugError(str(path), f"one set of weights: {SINGLE} or {INDEX}", f"both, and the index does not list {SINGLE}",
                               "two downloads in one folder; engines differ in which they load")
        return store
    files = [path / SINGLE] if (path / SINGLE).exists() else sorted(path.glob("*.safetensors"))
    if not files:
        raise MxdebugError(str(path), f"{INDEX}, {SINGLE} or other *.safetensors", "none of them", "weights not downloaded")
    return _from_files(files, path)


def _from_files(files: list[Path], folder: Path) -> Store:
    found: dict[str, Path] = {}
    for path in files:
        with _open(path, None, folder) as handle:
            for name in handle.keys():
                if name in found:
                    raise MxdebugError(f"tensor {name}", "in one file", f"in {found[name].name} and {path.name}",
                                       "two sets of weights in one folder")
                found[name] = path
    return Store(found, folder)


def _from_index(index: Path) -> Store:
    weight_map = read_json(index, index.parent).get("weight_map")
    if not isinstance(weight_map, dict):
        raise MxdebugError(f"weight_map of {index}", "an object: tensor name to file name", type(weight_map).__name__, "a damaged index")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not file.endswith(".safetensors") or "/" in file or "\\" in file or "\0" in file:
            # A checkpoint comes from strangers: it must not choose which files of this machine are opened.
            raise MxdebugError(f"file of tensor {name} in {index}", "the name of a .safetensors file in the same folder", brief(file),
                               "an index of another folder, or a malicious one")
    return Store({name: index.parent / file for name, file in weight_map.items()}, index.parent, index)


@contextmanager
def _open(path: Path, listed_in: Path | None, folder: Path) -> Iterator[Any]:
    if not os.path.exists(path):  # unlike Path.exists, False for a name that no file can have
        raise MxdebugError(str(path), f"a file, since {listed_in.name} lists it" if listed_in else "a file", "no file",
                           "a shard that was not downloaded")
    with open_safetensors(path, folder, "an interrupted download, or a Git LFS pointer in its place") as handle:
        yield handle
