"""Read pieces of files on another thread, while those before are looked at."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import IO

import numpy as np
import torch
from torch import Tensor

from .. import files

Read = tuple[str, int, int]  # file, start, size
_MOST = 3  # pieces that are read before they are asked for
_KEPT = 2  # a weight's scales and payload are looked at together
_END = -1  # the key of what is said at the end


class Ahead:
    """Pieces of files in `folder`, in the order of `reads`, each with the key of what it is for. A context: leaving it stops reading.

    A piece that cannot be read is an error for its key, whose other pieces are left out. buffer: the size of most pieces.
    """

    def __init__(self, folder: Path, reads: Iterable[tuple[int, Read]], buffer: int) -> None:
        self._folder, self._reads, self._size = folder, iter(reads), buffer
        self._files: dict[str, IO[bytes]] = {}
        self._done: queue.Queue[tuple[int, np.ndarray | Exception]] = queue.Queue(_MOST)
        self._given: list[np.ndarray] = []  # to the caller, who may still look at the last _KEPT of them
        self._free: queue.SimpleQueue[np.ndarray] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="mxdebug reads")

    def __enter__(self) -> Ahead:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        while self._thread.is_alive():
            try:
                self._done.get(timeout=0.01)
            except queue.Empty:
                continue
        for file in self._files.values():
            file.close()

    def next(self, key: int) -> Tensor:
        """uint8: the next piece that is for `key`, valid until _KEPT more were taken. Raises OSError or ValueError where it, or one before it, could
        not be read, and whatever ended the reading before it."""
        while True:
            of, piece = self._done.get()
            if of == _END:
                self._done.put((of, piece))  # for who asks next
            if of in (key, _END):
                if isinstance(piece, Exception):
                    raise piece
                self._given.append(piece)
                if len(self._given) > _KEPT:
                    self._free.put(self._given.pop(0).base)
                return torch.from_numpy(piece)

    def _run(self) -> None:
        failed, end = _END, RuntimeError("nothing is left to read")
        try:
            for key, read in self._reads:
                if self._stop.is_set():
                    break
                if key != failed:
                    try:
                        self._done.put((key, self._read(*read)))
                    except Exception as error:
                        failed = key
                        self._done.put((key, error))
        except Exception as error:  # of `reads`: whatever it is, it must not leave the other thread waiting
            end = error
        if not self._stop.is_set():
            self._done.put((_END, end))

    def _read(self, name: str, start: int, size: int) -> np.ndarray:
        if name not in self._files:
            self._files[name] = files.check(self._folder / name, self._folder).open("rb", buffering=0)
        target, file, got = self._buffer(size), self._files[name], 0
        file.seek(start)
        while got < size:
            n = file.readinto(memoryview(target)[got:])
            if not n:
                raise ValueError(f"{name} ends at byte {start + got}")
            got += n
        return target

    def _buffer(self, size: int) -> np.ndarray:
        """uint8 [size], in memory that was used before where that is large enough: new pages cost more than reading into them."""
        whole = np.empty(0, dtype=np.uint8) if self._free.empty() else self._free.get()  # this thread alone takes from it
        return (whole if len(whole) >= size else np.empty(max(size, self._size), dtype=np.uint8))[:size]
