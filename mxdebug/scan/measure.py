"""Read the bytes of weights in pieces, and count. Runs in worker threads and processes; what it returns is small.

A piece is at most CHUNK bytes or one row, so a worker needs the same memory for every checkpoint.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from .. import fast
from ..layouts import row_hashes
from .codes import ZERO
from .pieces import Pieces

CHUNK = 1 << 21
"""Bytes that are read at once: few enough to be counted before they leave the cache, so many that Python takes little of the time. Row
hashes need another eight times as much for a moment."""
LONGEST = 1 << 22
"""Bytes of the longest row of payload that is read."""
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
    packed, block_bytes, e4m3   elements of 4 bits; payload bytes of a block; scales that can be zero
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
    e4m3: bool = False
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
    payload     the same [E, 16] of the codes of packed payload, [E, 256] of bytes where an element is one; zero_rows [E]: rows that are zero throughout; lost [E]: blocks with zero scale and other payload
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
    compiled = fast.to_count(sum(t.payload.size for t in tasks if t.payload is not None))  # scales alone do not pay for loading numba
    out = []
    with Pieces(Path(folder), CHUNK) as pieces:
        for task in tasks:
            try:
                out.append(_one(pieces, task, compiled))
            except (OSError, ValueError) as error:  # a file that was cut or removed since its header was read
                out.append(Measured(task.key, failed=str(error)[:200]))
    return out


def _parts(task: Task, expert: int) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """((start, size) of scales, the same of payload) in pieces of at most CHUNK bytes: whole rows where payload is read."""
    scales = task.scale.size // task.experts if task.scale else 0
    if task.payload is None:
        yield from (((expert * scales + at, n), (0, 0)) for at, n in _spans(scales, CHUNK))
        return
    size = task.payload.size // task.experts
    columns, per_row = size // task.rows, scales // task.rows
    for first, rows in _spans(task.rows, max(1, CHUNK // columns)):
        yield (expert * scales + first * per_row, rows * per_row), (expert * size + first * columns, rows * columns)


def _one(pieces: Pieces, task: Task, compiled: ModuleType | None) -> Measured:
    out = Measured(task.key)
    for role, piece in task.numbers:
        out.numbers[role] = float(pieces.read("number", piece.file, piece.start, 4).view(np.float32)[0])
    scales, payloads = [], []
    for expert in range(task.experts):
        of_scales, of_payload = np.zeros(256, dtype=np.int64), np.zeros(16 if task.packed else 256, dtype=np.int64)
        zero_rows, lost, hashes = 0, 0, []
        for (scale_at, scale_size), (at, size) in _parts(task, expert):
            scale = _read(pieces, "scale", task.scale, scale_at, scale_size)
            of_scales += (in_scales := _count(scale, compiled))
            if task.payload is None:
                continue
            rows = size * task.experts * task.rows // task.payload.size
            payload = _read(pieces, "payload", task.payload, at, size).reshape(rows, -1)
            of_payload += _count_payload(payload, task.packed, compiled)
            asked = in_scales[ZERO[task.e4m3]].any()  # nearly never: then there is no block to look at
            of_rows, of_blocks = _zeros(payload, scale.reshape(rows, -1) if asked else None, task, compiled)
            zero_rows, lost = zero_rows + of_rows, lost + of_blocks
            if task.names:
                hashes.append(row_hashes(torch.from_numpy(payload)))
        scales.append(of_scales)
        if task.payload is not None:
            payloads.append(of_payload)
            out.zero_rows.append(zero_rows)
            out.lost.append(lost)
        for i, name in enumerate(task.names):
            out.hashes.append(_kept(name, expert, torch.cat(hashes)[i :: len(task.names)].numpy()))
    if task.scale is not None:
        out.scales = np.stack(scales).astype(_counter(task.scale.size))
    if task.payload is not None:
        out.payload = np.stack(payloads).astype(_counter(2 * task.payload.size))
    return out


def _read(pieces: Pieces, kind: str, piece: Piece | None, at: int, size: int) -> np.ndarray:
    return np.empty(0, dtype=np.uint8) if piece is None else pieces.read(kind, piece.file, piece.start + at, size)


def _kept(projection: str, expert: int, hashes: np.ndarray) -> Hashes:
    rows = np.unique(np.linspace(0, len(hashes) - 1, min(MOST_ROWS, len(hashes))).round().astype(np.int64))
    return Hashes(
        projection, expert, len(hashes), rows.astype(np.int32), hashes[rows], int(hashes.sum()), int(np.bitwise_xor.reduce(hashes))
    )


def _counter(most: int) -> type[np.unsignedinteger]:
    """The dtype that holds counts up to `most`: a large checkpoint has 70,000 weights with 256 counts each."""
    return np.uint32 if most < 1 << 32 else np.uint64


def _count_payload(payload: np.ndarray, packed: bool, compiled: ModuleType | None) -> np.ndarray:
    """int64 [16] of codes, [256] of bytes."""
    flat = payload.reshape(-1)
    if packed and compiled is not None:
        return compiled.count_codes(flat)
    counts = _count(flat, compiled)
    square = counts.reshape(16, 16)  # byte = 16 * high nibble + low nibble
    return square.sum(0) + square.sum(1) if packed else counts


def _zeros(payload: np.ndarray, scale: np.ndarray | None, task: Task, compiled: ModuleType | None) -> tuple[int, int]:
    """(rows of zeros, blocks with a zero scale and other payload), of uint8 [rows, n] and [rows, blocks]; scale None: none is zero."""
    if scale is None:
        scale = np.empty((len(payload), 0), dtype=np.uint8)
    if compiled is not None:
        return compiled.count_zeros(payload, scale, ZERO[True], _NONZERO[task.packed])
    blocks = (payload.view(np.uint64).reshape(len(payload), payload.shape[1] // task.block_bytes, -1) & np.uint64(_NONZERO[task.packed])).any(-1)
    return int((~blocks.any(-1)).sum()), int((ZERO[True][scale] & blocks).sum()) if scale.size else 0


def _count(some: np.ndarray, compiled: ModuleType | None) -> np.ndarray:
    """int64 [256] of uint8 [n]."""
    if compiled is not None:
        return compiled.count_bytes(some)
    # On uint8, without a copy: five times as fast as numpy's.
    return torch.bincount(torch.from_numpy(some), minlength=256).numpy()


def _spans(total: int, most: int) -> Iterator[tuple[int, int]]:
    """(start, size) of parts of at most `most`."""
    return ((at, min(most, total - at)) for at in range(0, total, most))
