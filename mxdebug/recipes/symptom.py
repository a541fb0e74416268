"""A message that an engine writes, and what it means."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Symptom:
    """message: as vLLM 0.33 or FlashInfer 0.7.4 writes it, with one filling of its variable parts; pattern: what every filling has."""

    message: str
    pattern: str
    meaning: str

    def fits(self, text: str) -> bool:
        """Whether a text holds this message, or is a part of it of two words and more; case and line ends do not count."""
        words = text.split()
        line = " ".join(words)
        return bool(re.search(self.pattern, line, re.IGNORECASE)) or len(words) > 1 and line.casefold() in self.message.casefold()


def fitting(symptoms: Sequence[Symptom], text: str) -> list[Symptom]:
    """The messages that a text holds or is a part of, in order."""
    return [s for s in symptoms if s.fits(text)]
