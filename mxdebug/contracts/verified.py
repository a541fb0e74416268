"""What a contract was checked against."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Verified:
    """What a contract was checked against: who ran, which version, what was compared."""

    how: str
    versions: str
    result: str
