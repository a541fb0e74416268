"""The settings of notebook 05's first cell, checked: what each may be, and what is said where it is something else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ..errors import MxdebugError

CHANGE = "change {} in the first cell, and run all cells again"


def wrong(name: str, expected: str, got: str, because: str) -> MxdebugError:
    """The error for a setting; it ends with what to do."""
    return MxdebugError(name, expected, got, f"{because}; {CHANGE.format(name)}")


def of(name: str, error: MxdebugError) -> MxdebugError:
    """The same error, by the name of the setting that led to it."""
    return wrong(name, error.expected, f"{error.got} ({error.operand})", error.reason or "a typo, or a path of another machine")


def folder(name: str, value: Any, expected: str) -> Path:
    """A path. Raises MxdebugError for whatever is none, and for an empty text, which would be the folder that Python runs in."""
    if not isinstance(value, (str, Path)) or not str(value).strip():
        raise wrong(name, expected, repr(value), "no path")
    return Path(value)


def layer(value: Any) -> int | str | None:
    """None, a number from 0 on (also as text), or the name of a module. Raises MxdebugError for anything else."""
    if isinstance(value, str) and value.strip().isdecimal():
        return int(value)
    named = isinstance(value, str) and value.strip() and not value.strip().lstrip("-").isdecimal()
    if value is None or named or (_whole(value) and value >= 0):
        return value
    raise wrong("LAYER", "None, the number of a layer, or the name of a linear module", repr(value), "neither a number nor a name")


def tp(value: Any) -> tuple[int, int] | None:
    """None, or (size, rank), also as a list. Raises MxdebugError for anything else."""
    if value is None:
        return None
    if isinstance(value, (tuple, list)) and len(value) == 2 and all(map(_whole, value)) and 0 <= value[1] < value[0]:
        return value[0], value[1]
    raise wrong("TP", "None, or (size, rank) with 0 <= rank < size", repr(value),
                "a size without a rank, a rank beyond the last, or no numbers")


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
