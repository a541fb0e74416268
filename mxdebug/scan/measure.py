"""Read the bytes of weights in pieces, and count. Runs in worker processes; what it returns is small.

A piece is at most CHUNK bytes, so a process needs the same memory for every checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .. import files
from ..layouts import row_hashes

CHUNK = 1 << 24
"""Bytes that are read at once. Row hashes need another eight times as much for a moment."""
MOST_ROWS = 64
"""Row hashes that the index keeps of each expert's projection and each linear module."""
_NONZERO = {True: 0x7777777777777777, False: 0x7F7F7F7F7F7F7F7F}  # all bits of an element but its sign, packed and not


@dataclass(frozen=True, slots=True)
class Piece:
    """`size` bytes at `start` of `file`."""

    file: str
    start: int
    size: int


@dataclass(frozen=True)
class Task:
    """What is read of one weight.

    key         the weight's module
    experts     E: payload and scales are split into that many equal parts
    rows        N of one expert; 0 where no payload is read
    packed, block_bytes, zero_scale   elements of 4 bits; payload bytes of a block; the byte of a scale that is zero, or None
    numbers     role -> piece of 4 bytes, float32
    names       of each part's projections in the index: ("w1", "w3") where rows alternate; empty: no row hashes
    """

    key: str
    experts: int
    scale: Piece | None
    payload: Piece | None
    rows: int = 0
    packed: bool = True
    block_bytes: int = 16
    zero_scale: int | None = None
    numbers: tuple[tuple[str, Piece], ...] = ()
    names: tuple[str, ...] = ()

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        return tuple(p for p in (self.scale, self.payload, *(p for _, p in self.numbers)) if p is not None)

    @cached_property
    def size(self) -> int:
        """Bytes to read."""
        return sum(p.size for p in self.pieces)


@dataclass
class Hashes:
    """Row hashes of one projection of one expert: the kept `rows` (int32) and their `hashes` (int64); `total` is the number of all rows.

    sum, xor: of the hashes of all rows, modulo 2^64.
    """

    projection: str
    expert: int
    total: int
    rows: np.ndarray
    hashes: np.ndarray
    sum: int
    xor: int


@dataclass
class Measured:
    """What was counted.

    scales      uint32 or uint64 [E, 256]: how often each scale byte occurs; None where none was read
    payload     the same of payload bytes; zero_rows [E]: rows that are zero throughout; lost [E]: blocks with zero scale and other payload
    numbers     role -> float
    failed      the file could not be read (again)
    """

    key: str
    scales: np.ndarray | None = None
    payload: np.ndarray | None = None
    zero_rows: list[int] = field(default_factory=list)
    lost: list[int] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    hashes: list[Hashes] = field(default_factory=list)
    failed: str = ""


def measure(folder: str, tasks: list[Task]) -> list[Measured]:
    """Measure weights of files in `folder`, each opened once. What cannot be read has `failed` set."""
    reader = _Reader(Path(folder))
    out = []
    try:
        for task in tasks:
            try:
                out.append(_one(reader, task))
            except (OSError, ValueError) as error:  # a file that was cut or removed since its header was read
                out.append(Measured(task.key, failed=str(error)[:200]))
    finally:
        reader.close()
    return out


class _Reader:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, object] = {}
        self._buffers: dict[int, np.ndarray] = {}

    def read(self, piece: Piece, offset: int, size: int, buffer: int = 0) -> Tensor:
        """uint8 [size], valid until the next read into the same buffer."""
        if piece.file not in self._files:
            self._files[piece.file] = files.check(self._folder / piece.file, self._folder).open("rb", buffering=0)
        if buffer not in self._buffers or len(self._buffers[buffer]) < size:
            self._buffers[buffer] = np.empty(size, dtype=np.uint8)
        target, file, got = self._buffers[buffer][:size], self._files[piece.file], 0
        file.seek(piece.start + offset)
        while got < size:
            n = file.readinto(memoryview(target)[got:])
            if not n:
                raise ValueError(f"{piece.file} ends at byte {piece.start + offset + got}")
            got += n
        return torch.from_numpy(target)

    def close(self) -> None:
        for file in self._files.values():
            file.close()


def _one(reader: _Reader, task: Task) -> Measured:
    out = Measured(task.key)
    for role, piece in task.numbers:
        out.numbers[role] = float(reader.read(piece, 0, 4).view(torch.float32)[0])
    if task.scale is not None:
        part = task.scale.size // task.experts
        counts = [sum(_count(reader.read(task.scale, e * part + at, n)) for at, n in _spans(part, CHUNK)) for e in range(task.experts)]
        out.scales = np.stack(counts).astype(_counter(part))
    if task.payload is not None:
        counts = [_payload(reader, task, e, out) for e in range(task.experts)]
        out.payload = np.stack(counts).astype(_counter(task.payload.size))
    return out


def _payload(reader: _Reader, task: Task, expert: int, out: Measured) -> np.ndarray:
    """Counts of one expert's payload bytes; its other numbers are put into `out`."""
    size, scales = task.payload.size // task.experts, task.scale.size // task.experts if task.scale else 0
    columns = size // task.rows
    per_row = columns // task.block_bytes
    counts, zero_rows, lost, hashes = np.zeros(256, dtype=np.int64), 0, 0, []
    rows_at_once = max(1, CHUNK // columns)
    for first, rows in _spans(task.rows, rows_at_once):
        payload = reader.read(task.payload, expert * size + first * columns, rows * columns).view(rows, columns)
        counts += _count(payload.flatten())
        blocks = (payload.numpy().view(np.uint64).reshape(rows, per_row, -1) & np.uint64(_NONZERO[task.packed])).any(-1)
        zero_rows += int((~blocks.any(-1)).sum())
        if scales and task.zero_scale is not None:
            scale = reader.read(task.scale, expert * scales + first * per_row, rows * per_row, buffer=1).numpy().reshape(rows, per_row)
            if task.zero_scale == 0:
                scale = scale & 0x7F  # E4M3's -0 is zero too
            lost += int(((scale == 0) & blocks).sum())
        if task.names:
            hashes.append(row_hashes(payload))
    out.zero_rows.append(zero_rows)
    out.lost.append(lost)
    for i, name in enumerate(task.names):
        out.hashes.append(_kept(name, expert, torch.cat(hashes)[i :: len(task.names)].numpy()))
    return counts


def _kept(projection: str, expert: int, hashes: np.ndarray) -> Hashes:
    rows = np.unique(np.linspace(0, len(hashes) - 1, min(MOST_ROWS, len(hashes))).round().astype(np.int64))
    return Hashes(
        projection, expert, len(hashes), rows.astype(np.int32), hashes[rows], int(hashes.sum()), int(np.bitwise_xor.reduce(hashes))
    )


def _counter(most: int) -> type[np.unsignedinteger]:
    """The dtype that holds counts up to `most`: a large checkpoint has 70,000 weights with 256 counts each."""
    return np.uint32 if most < 1 << 32 else np.uint64


def _count(t: Tensor) -> np.ndarray:
    return torch.bincount(t, minlength=256).numpy()  # on uint8, without a copy: five times as fast as numpy's


def _spans(total: int, most: int) -> Iterator[tuple[int, int]]:
    """(start, size) of parts of at most `most`."""
    return ((at, min(most, total - at)) for at in range(0, total, most))
