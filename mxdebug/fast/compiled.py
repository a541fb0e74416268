"""Numba's compiler as the kernels for the CPU want it, and torch's memory as it takes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numba import njit
from torch import Tensor

WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """`function`, compiled at its first call and kept on disk where there is a folder for it."""
    options = {"nogil": True, "boundscheck": False, "error_model": "numpy", **options}
    try:
        return njit(cache=True, **options)(function)
    except RuntimeError:  # no folder to keep it in, as in a container that cannot be written to
        return njit(**options)(function)


def data(t: Tensor) -> np.ndarray:
    """The bytes of a contiguous tensor, uint8 [..., n * size of its dtype]."""
    return t.view(torch.uint8).numpy()
