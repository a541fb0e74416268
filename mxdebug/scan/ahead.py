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


class Ahead:
    """Pieces of files in `folder`, in the order of `reads`, each with the key of what it is for. A context: leaving it stops reading.

    A piece that cannot be read is an error for its key, whose other pieces are left out.
    """

    def __init__(self, folder: Path, reads: Iterable[tuple[int, Read]]) -> None:
        self._folder, self._reads = folder, iter(reads)
        self._files: dict[str, IO[bytes]] = {}
        self._done: queue.Queue[tuple[int, Tensor | Exception]] = queue.Queue(_MOST)
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
        """uint8: the next piece that is for `key`. Raises OSError or ValueError where it, or one before it, could not be read."""
        while True:
            of, piece = self._done.get()
            if of == key:
                if isinstance(piece, Exception):
                    raise piece
                return piece

    def _run(self) -> None:
        failed = -1
        for key, read in self._reads:
            if self._stop.is_set():
                return
            if key != failed:
                try:
                    self._done.put((key, self._read(*read)))
                except Exception as error:  # whatever it is, it must not leave the other thread waiting
                    failed = key
                    self._done.put((key, error))

    def _read(self, name: str, start: int, size: int) -> Tensor:
        if name not in self._files:
            self._files[name] = files.check(self._folder / name, self._folder).open("rb", buffering=0)
        target, file, got = np.empty(size, dtype=np.uint8), self._files[name], 0
        file.seek(start)
        while got < size:
            n = file.readinto(memoryview(target)[got:])
            if not n:
                raise ValueError(f"{name} ends at byte {start + got}")
            got += n
        return torch.from_numpy(target)
