"""Read pieces of files into memory that is used again."""

from __future__ import annotations

from pathlib import Path
from typing import IO

import numpy as np

from .. import files
from ..errors import MxdebugError


class Pieces:
    """Pieces of files in `folder`, each opened once. A context: leaving it closes them.

    Each `kind` of piece has memory of its own: new pages cost more than reading into them. size: of most pieces.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self._folder, self._size = folder, size
        self._files: dict[str, IO[bytes]] = {}
        self._memory: dict[str, np.ndarray] = {}

    def __enter__(self) -> Pieces:
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()

    def read(self, kind: str, name: str, start: int, size: int) -> np.ndarray:
        """uint8 [size] from byte `start` of a file, valid until the next of this kind. Raises OSError or ValueError where that fails."""
        if name not in self._files:
            try:
                self._files[name] = files.check(self._folder / name, self._folder).open("rb", buffering=0)
            except MxdebugError as error:  # reports name files, not folders
                raise MxdebugError(name, error.expected, error.got, error.reason) from error
        if kind not in self._memory or len(self._memory[kind]) < size:
            self._memory[kind] = np.empty(max(size, self._size), dtype=np.uint8)
        target, file, got = self._memory[kind][:size], self._files[name], 0
        file.seek(start)
        while got < size:
            n = file.readinto(memoryview(target)[got:])
            if not n:
                raise ValueError(f"{name} ends at byte {start + got}")
            got += n
        return target
