"""Get hold of calls: record those of this process, or ask FlashInfer to write down those of an engine's workers."""

from __future__ import annotations

import datetime
import functools
import importlib
import inspect
import itertools
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from ..errors import MxdebugError
from .call import COMPLETED, CRASHED, PENDING, Call, name_arguments
from .signature import UNAVAILABLE
from .values import snapshot, tensors_in

_MODULES = ("flashinfer.fused_moe", "flashinfer")
# The kernels of vLLM's FlashInfer MoE paths. cute_dsl_fused_moe_nvfp4 calls cute_dsl_fused_moe, which is left out: one call is one call.
MOE = ("cutlass_fused_moe", "trtllm_fp4_block_scale_moe", "trtllm_fp4_block_scale_routed_moe", "cute_dsl_fused_moe_nvfp4")
KERNELS = (*MOE, "mm_bf16_fp4")  # and of its W4A16 linear path


@contextmanager
def capture(*functions: str) -> Iterator[list[Call]]:
    """Record the calls that this process makes to FlashInfer functions while the block runs; yields the list that they are added to.

    functions   names as in `flashinfer.fused_moe` or `flashinfer`, or with their module ("flashinfer.gemm.mm_fp4");
                those of `KERNELS` that this FlashInfer has if none are given. MxdebugError, before anything is patched, for a name that does not exist.

    Inputs are copied to the CPU before the call (the kernel writes into `output`), outputs after it. A call that raises, or whose
    outputs cannot be copied because the kernel failed, is recorded as "crashed" and raises on. A call inside a CUDA graph capture
    cannot be copied: it is "pending flush", without tensors.

    The function is replaced in every module that has it as a global, and put back on exit. References that are not a module's global
    (closures, partials, caches, tables) are not found: enter before the engine takes such a reference, e.g. before its first forward
    pass. Other processes, such as an engine's workers, need `dump_recipe`.
    """
    originals = [_find(name) for name in functions] or [f for f in map(_there, KERNELS) if f is not None]
    calls: list[Call] = []
    recorders = [(original, _recorder(original, calls)) for original in dict.fromkeys(originals)]
    try:
        for original, recorder in recorders:
            _swap(original, recorder)
        yield calls
    finally:
        for original, recorder in recorders:  # also in modules that were imported meanwhile
            _swap(recorder, original)


def _find(name: str) -> Callable[..., Any]:
    """The function of that name. Imports FlashInfer."""
    module, _, attribute = name.rpartition(".")
    looked_for = []
    for place in (module,) if module else _MODULES:
        looked_for.append(f"{place}.{attribute}")
        try:
            found = getattr(importlib.import_module(place), attribute, None)
        except ImportError as error:
            looked_for[-1] += f" ({error})"
            continue
        if inspect.isroutine(found):
            return found
    raise MxdebugError("function to capture", "a function of FlashInfer", f"none for {name!r}; looked for {', '.join(looked_for)}",
                       "a typing error, another FlashInfer version, or FlashInfer is not installed")


def _there(name: str) -> Callable[..., Any] | None:
    """As `_find`; None where this FlashInfer has no such function, or not the parts that it needs."""
    try:
        return _find(name)
    except MxdebugError:
        return None


def _swap(old: Callable[..., Any], new: Callable[..., Any]) -> None:
    """Put `new` wherever a module's globals hold `old`."""
    for module in list(sys.modules.values()):
        # Straight from __dict__: getattr would trigger lazy imports in modules that have them.
        namespace = getattr(module, "__dict__", None)
        if isinstance(namespace, dict):
            for name in [name for name, value in list(namespace.items()) if value is old]:
                namespace[name] = new


def _recorder(function: Callable[..., Any], calls: list[Call]) -> Callable[..., Any]:
    counter = itertools.count(1)
    try:
        signature = str(inspect.signature(function))
    except ValueError:  # a builtin without one
        signature = UNAVAILABLE

    def record(named: tuple[Mapping[str, Any], frozenset[str]], status: str, outputs: list[torch.Tensor], began: tuple[int, str]) -> None:
        versions = {"flashinfer": str(getattr(sys.modules.get("flashinfer"), "__version__", UNAVAILABLE)),
                    "torch": str(torch.__version__), "python": sys.version}
        calls.append(Call(
            function=function.__name__, module=str(function.__module__), arguments=named[0], defaulted=named[1], outputs=tuple(outputs),
            status=status, versions=versions, sequence=began[0], timestamp=began[1], process=os.getpid(),
            graph_capture=status == PENDING, signature=signature, source=None))

    @functools.wraps(function)
    def recorder(*args: Any, **kwargs: Any) -> Any:
        began = next(counter), datetime.datetime.now().strftime("%Y%m%d_%H%M%S_%f")[:-3]
        if _capturing_graph():
            arguments, defaulted = name_arguments(args, kwargs, signature)
            record(({name: snapshot(v) for name, v in arguments.items() if not tensors_in(v)}, defaulted), PENDING, [], began)
            return function(*args, **kwargs)
        named = name_arguments([snapshot(v) for v in args], {name: snapshot(v) for name, v in kwargs.items()}, signature)
        try:
            result = function(*args, **kwargs)
            # A kernel runs on after the call returned; where it fails, this copy is what raises.
            outputs = tensors_in(snapshot(result))
        except BaseException:
            record(named, CRASHED, [], began)
            raise
        record(named, COMPLETED, outputs, began)
        return result

    return recorder


def _capturing_graph() -> bool:
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def dump_recipe(function: str = ",".join(KERNELS), folder: str = "flashinfer_dumps") -> str:
    """The shell lines that make FlashInfer write down an engine's calls, also those of its worker processes; `scan(folder)` reads them.

    `function` is a name or pattern (fnmatch; several with commas). A relative `folder` is taken from where the shell stands.
    Source: FlashInfer 0.7.4 `api_logging`, where each of these variables is read, once, on import.
    """
    where = shlex.quote(folder) if folder.startswith("/") else f'"$PWD"/{shlex.quote(folder)}'
    if not re.sub(r"[,\s]", "", function):
        raise MxdebugError("function", "a name or pattern", repr(function), "without one FlashInfer would write every call it gets")
    return f"""\
# Set these before the engine starts: its workers inherit them, and FlashInfer reads them once, when it is imported.
# 10 is the only level that writes tensors.
export FLASHINFER_LOGLEVEL=10
# Absolute, because a worker may run in another folder. All workers share it: the process id is in each call's name.
export FLASHINFER_DUMP_DIR={where}
# Without a pattern every FlashInfer call is written.
export FLASHINFER_DUMP_INCLUDE={shlex.quote(function)}
# Calls a process. The first ones are kept, and those are warm-up: one for each MoE layer and forward pass, of mm_bf16_fp4 four and more a layer.
export FLASHINFER_DUMP_MAX_COUNT=200
# GiB a process. Each call brings its layer's weights along; when this is full, later calls are skipped with no more than a warning.
export FLASHINFER_DUMP_MAX_SIZE_GB=100
# 0 writes .pt files, which keep strides; 1 writes .safetensors: contiguous copies, the strides only in the metadata.
export FLASHINFER_DUMP_SAFETENSORS=0
# No CUDA graphs: a captured call runs without Python, so FlashInfer sees no further call, and copies tensors late, after the replay.
vllm serve MODEL --enforce-eager
"""
