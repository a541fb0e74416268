"""Which modules a configuration excepts from quantisation. Patterns come from a stranger's file: they are matched with a limit of time."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterable

import regex

from ..checkpoints.kinds import COMPRESSED_TENSORS, COMPRESSED_TENSORS_NVFP4
from .kinds import COMPRESSED_TENSORS_MXFP8

_LONGEST, _SECONDS = 1000, 0.05
# Engines rename these words before "layers", and no others: a vision tower's layers are not the language model's.
_PREFIX = re.compile(r"^(?:(?:model|language_model|text_model|backbone)\.)*(?=layers\.)")
_COMPRESSED = (COMPRESSED_TENSORS, COMPRESSED_TENSORS_NVFP4, COMPRESSED_TENSORS_MXFP8)


class Patterns:
    """An ignore list.

    compressed-tensors: names, or "re:" and a regular expression that matches from the start (compressed_tensors/utils/match.py match_name).
    ModelOpt, Quark and gpt-oss: names, or names with * (vLLM modelopt.py is_layer_excluded, quark/utils.py should_ignore_layer).
    `dropped` are those that could not be used.
    """

    def __init__(self, entries: Iterable[str], kind: str | None) -> None:
        self.dropped: list[str] = []
        self._names: set[str] = set()
        self._globs: list[tuple[str, re.Pattern[str]]] = []  # (what stands before the first *, the whole)
        self._expressions: dict[str, regex.Pattern[str]] = {}
        for entry in entries:
            if len(entry) > _LONGEST:
                self.dropped.append(entry)
            elif entry.startswith("re:"):
                try:
                    self._expressions[entry] = regex.compile(entry[3:])
                except (regex.error, RecursionError, OverflowError, MemoryError):
                    self.dropped.append(entry)
            elif "*" in entry and kind not in _COMPRESSED:
                self._globs.append((re.split(r"[*?\[]", entry)[0], re.compile(fnmatch.translate(entry))))
            else:
                self._names.add(entry)
        self._tails = {_tail(name) for name in self._names}

    def names(self, module: str) -> bool:
        """Whether an entry is this module's name or matches it."""
        return (
            module in self._names or any(module.startswith(start) and p.match(module) for start, p in self._globs) or self._matches(module)
        )

    def covers(self, module: str) -> bool:
        """`names`, or an entry names a module that it is part of, or engines may read it so: with another prefix before "layers"."""
        if self.names(module):
            return True
        parts = module.split(".")
        above = [".".join(parts[:n]) for n in range(1, len(parts) + 1)]
        if any(name in self._names or _tail(name) in self._tails for name in above):
            return True
        tail = _tail(module)
        return any(p.match(name) for _, p in self._globs for name in (tail, f"model.{tail}", f"{module}.weight")) or self._matches(
            f"model.{tail}"
        )

    def _matches(self, module: str) -> bool:
        for entry, expression in list(self._expressions.items()):
            try:
                if expression.match(module, timeout=_SECONDS):
                    return True
            except TimeoutError:
                del self._expressions[entry]
                self.dropped.append(entry)
        return False


def _tail(name: str) -> str:
    return _PREFIX.sub("", name, count=1)
