"""How fast can it be? Compiled kernels, where numba (CPU) or Triton (GPU) is installed: the same bytes as torch's (but for sums of float64, which are
added in another order), nearer to the memory's speed.

`mxdebug[fast]` installs numba; torch brings Triton on Linux with CUDA. Without them, and for small tensors, for which compiling or loading a kernel
does not pay, everything is done by torch. MXDEBUG_FAST=0 says so too. tests/test_fast.py compares every kernel bit for bit.
"""

from __future__ import annotations

import functools
import importlib
import os
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from types import ModuleType

import torch
from torch import Tensor

from .steps import least_with as least_with
from .steps import step_table as step_table

WORTH = 1 << 21
"""Bytes from which on a kernel pays: below, torch takes milliseconds, and loading numba half a second."""
PART = 1 << 16
"""Bytes of one expert from which on a table of its own pays."""
_NAME = "mxdebug kernels"


def on_cpu(*tensors: Tensor) -> ModuleType | None:
    """The module of numba kernels where it can work on these tensors: contiguous ones on the CPU, the first of at least WORTH bytes."""
    if any(t.device.type != "cpu" or not t.is_contiguous() for t in tensors):
        return None
    return _cpu() if tensors[0].nbytes >= WORTH else None


def to_count(size: int) -> ModuleType | None:
    """The module of numba kernels that count bytes, where there are so many."""
    return _statistics() if size >= WORTH else None


def on_gpu(*tensors: Tensor) -> ModuleType | None:
    """The module of Triton kernels where it can work on these tensors: contiguous ones on one CUDA device."""
    if any(t.device.type != "cuda" or not t.is_contiguous() for t in tensors):
        return None
    return _gpu()


@functools.cache
def _cpu() -> ModuleType | None:
    return _module("cpu", "numba")


@functools.cache
def _statistics() -> ModuleType | None:
    return _module("cpu_statistics", "numba")


@functools.cache
def _gpu() -> ModuleType | None:
    return _module("gpu", "triton")


def _module(name: str, needs: str) -> ModuleType | None:
    if os.environ.get("MXDEBUG_FAST") == "0" or find_spec(needs) is None:
        return None
    try:
        return importlib.import_module(f".{name}", __name__)
    except Exception as error:  # installed, and not to be used: numba refuses a newer numpy, say
        warnings.warn(f"{needs} cannot be used, torch does its work: {error}", RuntimeWarning, stacklevel=2)
        return None


def spread(work: Callable[[int, int], object], total: int) -> None:
    """Call work(first, end) for parts of range(total), on as many threads as torch uses; on this one where it is itself one of them. The kernels release
    Python's lock."""
    threads = min(torch.get_num_threads(), total)
    if threads <= 1 or threading.current_thread().name.startswith(_NAME):
        work(0, total)
        return
    parts = min(8 * threads, total)  # a thread that comes late, since torch's own still spin on its core, takes fewer of them
    bounds = [i * total // parts for i in range(parts + 1)]
    for done in [_pool(threads).submit(work, a, b) for a, b in zip(bounds, bounds[1:])]:
        done.result()


@functools.cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix=_NAME)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pool.cache_clear)  # a child has the pool, but not its threads
