"""Fingerprints of a checkpoint's weights: where does a row of a call belong?

An index is one safetensors file. For each place (a projection of an expert, or a linear module) it keeps the hashes of at most 64 payload
rows spread evenly (`mxdebug.layouts.row_hashes`; logical rows, w1 and w3 apart), and sum and exclusive-or of the hashes of all rows:

    hashes int64 [n], row int32 [n], place int32 [n]     the kept rows
    module, layer, projection, expert, rows int32 [p]    of each place: numbers into the lists of names, -1 where it has no layer or expert
    sum, xor int64 [p]                                   of all its rows' hashes, modulo 2^64
    metadata "mxdebug": JSON {"schema": 1, "modules": [...], "projections": [...], "files": {name: size in bytes}}

A rank of tensor parallelism holds whole rows of w1 and w3 (and of q, k, v, gate, up), but parts of the rows of w2 (and o, down): those are
not found by their hashes. Rows of zeros are alike everywhere and are left out of every answer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from .. import files
from ..errors import MxdebugError
from .folder import Folder
from .measure import Measured
from .weights import Weight, layer_of

SCHEMA, KEY = 1, "mxdebug"
_MOST_BYTES = 1 << 30
_OF_ROWS, _OF_PLACES = (
    {"hashes": torch.int64, "row": torch.int32, "place": torch.int32},
    {
        "module": torch.int32,
        "layer": torch.int32,
        "projection": torch.int32,
        "expert": torch.int32,
        "rows": torch.int32,
        "sum": torch.int64,
        "xor": torch.int64,
    },
)
_WHY = "another file, an interrupted write, or an index of another version: write it again with mxdebug scan --index"


@dataclass(frozen=True)
class Place:
    """A weight of the checkpoint.

    module      "model.layers.3.mlp.experts", or a linear module's whole name; untrusted text
    layer       N of "layers.N", or None
    projection  "w1", "w3", "w2" of experts, or a linear module's last part
    expert      its number, None of a linear module
    rows        how many rows it has; sum, xor: of the hashes of all of them, modulo 2^64 (int64)
    """

    module: str
    layer: int | None
    projection: str
    expert: int | None
    rows: int
    sum: int
    xor: int

    def equals(self, hashes: Tensor) -> bool:
        """Whether int64 [rows] are the hashes of exactly these rows, in whatever order (almost surely)."""
        xor = 0
        for h in hashes.tolist():
            xor ^= h
        return len(hashes) == self.rows and int(hashes.sum()) == self.sum and xor == self.xor


@dataclass(frozen=True)
class Held:
    """A place of which a call has rows: `found` of the `kept` rows that the index knows of it (rows of zeros do not count)."""

    place: Place
    found: int
    kept: int

    @property
    def share(self) -> float:
        return self.found / self.kept


@dataclass(frozen=True)
class Index:
    """An index that was loaded and checked.

    hashes  int64 [n] of the kept rows; row int32 [n]: the row's number in its place; place int32 [n]: position in `places`
    files   file name -> size in bytes when the index was written
    """

    hashes: Tensor
    row: Tensor
    place: Tensor
    places: tuple[Place, ...]
    files: Mapping[str, int]

    def find(self, hashes: Tensor) -> list[Held]:
        """Places of which at least one kept row is among `hashes` (int64, any shape), the fullest first.

        Hash rows of the call's payload once a possible layout is undone (`mxdebug.diagnosis.locate` has the candidates), padding cut.
        """
        solid = self.hashes != 0  # the hash of a row of zeros
        found, kept = (
            torch.bincount(self.place[which], minlength=len(self.places))
            for which in (solid & torch.isin(self.hashes, hashes.flatten()), solid)
        )
        held = [Held(self.places[i], int(found[i]), int(kept[i])) for i in found.nonzero().flatten().tolist()]
        return sorted(held, key=lambda h: -h.share)

    @cached_property
    def layers(self) -> tuple[int, ...]:
        """Numbers of the layers that have a place, ascending."""
        return tuple(sorted({p.layer for p in self.places if p.layer is not None}))

    def stale(self, checkpoint: str | os.PathLike[str]) -> list[str]:
        """What speaks against this index being of the checkpoint as it is now, in words; empty where all file sizes are the same."""
        out = []
        root = Path(checkpoint)
        root = root.parent if root.is_file() else root
        for name, size in self.files.items():
            path = root / name
            now = path.stat().st_size if path.is_file() else None
            if now != size:
                out.append(f"{name} has {now} bytes, had {size}" if now is not None else f"{name} is not there")
        return out


def write_index(path: Path, folder: Folder, weights: Iterable[Weight], measured: Mapping[str, Measured]) -> None:
    """Write the row hashes of all weights that were read. Raises MxdebugError where none was, or the file cannot be written."""
    modules: dict[str, int] = {}
    projections: dict[str, int] = {}
    of_rows: dict[str, list[np.ndarray]] = {key: [] for key in _OF_ROWS}
    of_places: dict[str, list[int]] = {key: [] for key in _OF_PLACES}
    for w in weights:
        module = w.parent if w.in_experts else w.module
        for h in measured[w.module].hashes if w.module in measured else ():
            of_rows["place"].append(np.full(len(h.rows), len(of_places["rows"])))
            of_rows["row"].append(h.rows)
            of_rows["hashes"].append(h.hashes)
            layer, expert = layer_of(w.module), h.expert if w.fused else w.expert
            for key, value in (
                ("module", modules.setdefault(module, len(modules))),
                ("projection", projections.setdefault(h.projection, len(projections))),
                ("layer", -1 if layer is None else layer),
                ("expert", -1 if expert is None else expert),
                ("rows", h.total),
                ("sum", h.sum),
                ("xor", h.xor),
            ):
                of_places[key].append(value)
    if not of_rows["hashes"]:
        raise MxdebugError(str(path), "weights whose payload can be read", "none", "damaged files; the scan without --index says which")
    tensors = {key: torch.from_numpy(np.concatenate(of_rows[key])).to(dtype) for key, dtype in _OF_ROWS.items()}
    tensors |= {key: torch.tensor(of_places[key], dtype=dtype) for key, dtype in _OF_PLACES.items()}
    about = {
        "schema": SCHEMA,
        "modules": list(modules),
        "projections": list(projections),
        "files": {name: size for name, (size, _) in folder.stats.items()},
    }
    try:
        save_file(tensors, path, {KEY: json.dumps(about)})
    except (OSError, SafetensorError) as error:
        raise MxdebugError(str(path), "a file that can be written", str(error)) from error


def load_index(path: str | os.PathLike[str]) -> Index:
    """Read an index. Raises MxdebugError for every other file, and for one whose parts contradict each other: it may be a stranger's."""
    path = Path(path)

    def wrong(expected: str, got: object) -> MxdebugError:
        return MxdebugError(str(path), expected, str(got)[:200], _WHY)

    with files.open_safetensors(path, path.parent, _WHY) as handle:
        if (size := path.stat().st_size) > _MOST_BYTES:
            raise wrong(f"an index of at most {_MOST_BYTES} bytes", size)
        about = _about((handle.metadata() or {}).get(KEY), wrong)
        tensors = {}
        for group in (_OF_ROWS, _OF_PLACES):
            for key, dtype in group.items():
                if key not in handle.keys():
                    raise wrong(f"a tensor {key}", "none")
                t = handle.get_tensor(key).clone()  # a copy does not change when the file does
                first = tensors.get(next(iter(group)), t)
                if t.dtype != dtype or t.dim() != 1 or t.shape != first.shape or not len(t):
                    raise wrong(f"{key} {dtype} of one dimension, as long as {next(iter(group))}", f"{t.dtype} {list(t.shape)}")
                tensors[key] = t
    count = len(tensors["module"])
    for key, low, high in (
        ("place", 0, count),
        ("module", 0, len(about["modules"])),
        ("projection", 0, len(about["projections"])),
        ("layer", -1, 1 << 31),
        ("expert", -1, 1 << 31),
        ("rows", 1, 1 << 31),
        ("row", 0, 1 << 31),
    ):
        if int(tensors[key].min()) < low or int(tensors[key].max()) >= high:
            raise wrong(f"{key} in {low}..{high - 1}", f"{int(tensors[key].min())} to {int(tensors[key].max())}")
    columns = {key: tensors[key].tolist() for key in _OF_PLACES}
    places = tuple(
        Place(about["modules"][m], None if n < 0 else n, about["projections"][p], None if e < 0 else e, r, s, x)
        for m, n, p, e, r, s, x in zip(*columns.values())
    )
    return Index(tensors["hashes"], tensors["row"], tensors["place"].long(), places, about["files"])


def _about(text: object, wrong: Any) -> dict[str, Any]:
    try:
        about = files.parse(text.encode()) if isinstance(text, str) and len(text) <= files.MOST_JSON else None
    except (ValueError, RecursionError) as error:
        raise wrong("JSON metadata", error) from error
    if not isinstance(about, dict) or about.get("schema") != SCHEMA:
        raise wrong(f"an index of schema {SCHEMA}", "no such metadata" if not isinstance(about, dict) else f"schema {about.get('schema')}")
    for key in ("modules", "projections"):
        if not isinstance(about.get(key), list) or not all(isinstance(name, str) for name in about[key]):
            raise wrong(f"{key}: a list of names", type(about.get(key)).__name__)
    sizes = about.get("files")
    if not isinstance(sizes, dict) or not all(
        type(n) is int and not any(c in name for c in "/\\\0") and len(name) < 256 for name, n in sizes.items()
    ):
        raise wrong("files: names in the folder and their sizes", str(sizes))
    return about
