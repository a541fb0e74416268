"""Large layers in little memory: what was freed goes back to the system."""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable


def give_back() -> None:
    """Ask the C library for what it keeps of freed memory: glibc keeps blocks of up to 32 MiB, half a GiB in a diagnosis. Nothing elsewhere."""
    _trim()()


@functools.cache
def _trim() -> Callable[[], object]:
    try:
        return functools.partial(ctypes.CDLL(None).malloc_trim, 0) if sys.platform == "linux" else lambda: None
    except (OSError, AttributeError):  # not glibc
        return lambda: None
