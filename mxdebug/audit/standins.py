"""Ours in the place of what needs a GPU: FlashInfer's layout operations, `.cuda()`, and questions about the GPU's architecture.

A stand-in that outlives `replaced` (an engine may cache what it imported) hands its calls to the function that it stood in for.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from ..errors import MxdebugError
from ..layouts import (
    INTERLEAVED,
    LINEAR,
    SHUFFLE_16,
    SHUFFLE_32,
    SM90_SCALE_FOLD,
    SM90_WEIGHT_INTERLEAVE,
    SWIZZLE_128x4,
    cutedsl_sm100_view,
)
from ..requantise import MXFP8_CUDA, NVFP4_CUDA

# Where FlashInfer 0.6 and 0.7 keep these functions, and from where engines import them.
MODULES = (
    "flashinfer",
    "flashinfer.fp4_quantization",
    "flashinfer.fp8_quantization",
    "flashinfer.quantization",
    "flashinfer.quantization.fp4_quantization",
    "flashinfer.quantization.fp8_quantization",
    "flashinfer.fused_moe",
    "flashinfer.fused_moe.core",
    "flashinfer.fused_moe.prepare",
    "flashinfer.utils",
    "flashinfer.cute_dsl",
    "flashinfer.cute_dsl.utils",
)
_active: list[int] = []  # the SM of each `replaced` that is in force, innermost last


# -- FlashInfer's GPU operations ------------------------------------------------------------------------------------


def _swizzle(unswizzled_sf: Tensor, *, out: Tensor | None = None) -> Tensor:
    """block_scale_interleave: uint8 [rows, columns] or [E, rows, columns] -> flat, padded to 128 rows and 4 columns for each expert."""
    if unswizzled_sf.dtype != torch.uint8:
        raise MxdebugError(
            "scales for block_scale_interleave",
            "torch.uint8",
            str(unswizzled_sf.dtype),
            "FlashInfer refuses it: view the scale bytes as uint8",
        )
    packed = SWIZZLE_128x4.pack(unswizzled_sf).flatten()
    return packed if out is None else out.copy_(packed)


def _interleave_weights(weight: Tensor, quant_type: str = "fp4") -> Tensor:
    """interleave_moe_weights_for_sm90_mixed_gemm: uint8 [E, rows, K/2], rows % 16 == 0, K % 64 == 0; "fp4" only."""
    if quant_type != "fp4":
        raise MxdebugError(
            "quant_type of interleave_moe_weights_for_sm90_mixed_gemm", "'fp4'", repr(quant_type), "the interleave of another kernel"
        )
    if weight.dtype != torch.uint8 or weight.dim() != 3:
        raise MxdebugError(
            "weight for interleave_moe_weights_for_sm90_mixed_gemm",
            "torch.uint8 [E, rows, K/2]",
            f"{weight.dtype} {list(weight.shape)}",
            "FlashInfer refuses it",
        )
    return SM90_WEIGHT_INTERLEAVE.pack(weight.contiguous()).reshape(weight.shape)


def _fold_scales(scales: Tensor, group_size: int = 32) -> Tensor:
    """interleave_moe_scales_for_sm90_mixed_gemm: uint8 [E, rows, K/32] -> [E, rows/64, K/128, 16, 16]."""
    if group_size != 32 or scales.dtype != torch.uint8 or scales.dim() != 3:
        raise MxdebugError(
            "scales for interleave_moe_scales_for_sm90_mixed_gemm",
            "torch.uint8 [E, rows, K/32], group_size 32",
            f"{scales.dtype} {list(scales.shape)}, group_size {group_size}",
            "the fold of another kernel",
        )
    e, rows, columns = scales.shape
    return SM90_SCALE_FOLD.pack(scales.contiguous()).reshape(e, rows // 64, columns // 4, 16, 16)


def _mxfp8_quantize(input: Tensor, is_sf_swizzled_layout: bool = True, alignment: int = 32, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    """mxfp8_quantize: [T, K] -> E4M3 codes [T, K to alignment] and flat scale bytes."""
    q = MXFP8_CUDA(torch.nn.functional.pad(input, (0, -input.shape[-1] % alignment)))
    return q.payload.view(torch.float8_e4m3fn), (SWIZZLE_128x4 if is_sf_swizzled_layout else LINEAR).pack(q.scales).flatten()


def _fp4_quantize(
    input: Tensor,
    global_scale: Tensor | None = None,
    sf_vec_size: int = 16,
    sf_use_ue8m0: bool = False,
    is_sf_swizzled_layout: bool = True,
    is_sf_8x4_layout: bool = False,
    *_: Any,
    **__: Any,
) -> tuple[Tensor, Tensor]:
    """fp4_quantize for NVFP4: [T, K] -> codes uint8 [T, K/2] and scale bytes [.., K/16]."""
    if sf_vec_size != 16 or sf_use_ue8m0 or is_sf_8x4_layout:
        raise MxdebugError(
            "fp4_quantize",
            "NVFP4 with scales linear or swizzled 128x4",
            f"sf_vec_size {sf_vec_size}, sf_use_ue8m0 {sf_use_ue8m0}, is_sf_8x4_layout {is_sf_8x4_layout}",
            "no stand-in is written for it",
        )
    q = NVFP4_CUDA(input, torch.ones(()) if global_scale is None else global_scale)
    layout = SWIZZLE_128x4 if is_sf_swizzled_layout else LINEAR
    rows, columns = layout.padded(*q.scales.shape)
    return q.payload, layout.pack(q.scales).reshape(rows, columns)


def _capability(*_: Any, **__: Any) -> tuple[int, int]:
    return divmod(_active[-1], 10)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "block_scale_interleave": _swizzle,
    "nvfp4_block_scale_interleave": _swizzle,
    "interleave_moe_weights_for_sm90_mixed_gemm": _interleave_weights,
    "interleave_moe_scales_for_sm90_mixed_gemm": _fold_scales,
    "mxfp8_quantize": _mxfp8_quantize,
    "fp4_quantize": _fp4_quantize,
    "get_compute_capability": _capability,
}


# -- FlashInfer's CPU functions, for a machine without FlashInfer ---------------------------------------------------


def _shuffled(
    _cache: Any, t: Tensor, epilogue_tile_m: int, num_elts_per_sf: int | None = None, is_gated_act_gemm: bool | None = None
) -> Tensor:
    """get_w2_permute_indices_with_cache."""
    return (SHUFFLE_16 if epilogue_tile_m == 64 else SHUFFLE_32).indices(t.shape[0]).to(t.device)


def _interleaved_shuffled(
    _cache: Any, t: Tensor, epilogue_tile_m: int, num_elts_per_sf: int | None = None, is_gated_act_gemm: bool = True
) -> Tensor:
    """_maybe_get_cached_w3_w1_permute_indices: rows of both halves alternate, then are shuffled."""
    shuffle = _shuffled(None, t, epilogue_tile_m)
    return INTERLEAVED.indices(t.shape[0] // 2).to(t.device)[shuffle] if is_gated_act_gemm else shuffle


def _mma_view(sf: Tensor, m: int, k: int, num_groups: int = 1, sf_vec_size: int = 16) -> Tensor:
    """convert_sf_to_mma_layout."""
    return cutedsl_sm100_view(sf.reshape(num_groups, m // 128, k // sf_vec_size // 4, 32, 4, 4))


_HELPERS: dict[str, Callable[..., Any]] = {
    "get_w2_permute_indices_with_cache": _shuffled,
    "_maybe_get_cached_w3_w1_permute_indices": _interleaved_shuffled,
    "convert_sf_to_mma_layout": _mma_view,
}


# -- putting them in and taking them out ----------------------------------------------------------------------------


def _stays(to: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`Tensor.to` that leaves out a CUDA device among its arguments."""

    def moved(t: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        def is_gpu(v: Any) -> bool:
            return isinstance(v, (str, torch.device)) and str(v).startswith("cuda")

        args = tuple(a for a in args if not is_gpu(a))
        kwargs = {k: v for k, v in kwargs.items() if not is_gpu(v)}
        return to(t, *args, **kwargs) if args or kwargs else t

    return moved


@contextmanager
def replaced(sm: int = 100) -> Iterator[None]:
    """While this holds, a converter written for a GPU of `sm` runs on the CPU.

    FlashInfer's GPU operations (block_scale_interleave under both its names, interleave_moe_weights_for_sm90_mixed_gemm,
    interleave_moe_scales_for_sm90_mixed_gemm, mxfp8_quantize, fp4_quantize) are replaced by ours in every module that has imported
    them; its index functions are CPU code and stay. Tensors and modules stay where they are when `.cuda()` is called, and
    torch's and FlashInfer's compute-capability checks answer `sm`. Where FlashInfer cannot be imported, a stub with these functions
    and its index functions takes its place. Everything is put back at the end, also in modules that were first imported inside.
    The swizzle and both interleaves are byte-exact against the kernels' recorded output; the quantisers are `mxdebug.requantise`'s.
    """
    if _active:  # all is in place already; only the architecture may be another
        _active.append(sm)
        try:
            yield
        finally:
            _active.pop()
        return
    modules = _import()
    pairs = _pairs(modules)
    gpu = [
        (torch.Tensor, "cuda", lambda t, *_, **__: t),
        (torch.Tensor, "to", _stays(torch.Tensor.to)),
        (torch.nn.Module, "cuda", lambda m, *_, **__: m),
        (torch.cuda, "get_device_capability", _capability),
        (torch.cuda, "current_device", lambda: torch.device("cpu")),
    ]
    if hasattr(torch, "accelerator"):
        gpu.append((torch.accelerator, "current_device_index", lambda: torch.device("cpu")))
    with ExitStack() as stack:
        if not modules:
            stubs = _stubs()
            sys.modules.update(stubs)
            stack.callback(lambda: [sys.modules.pop(name, None) for name in stubs])
        for owner, name, new in gpu:
            stack.enter_context(mock.patch.object(owner, name, new))
        _active.append(sm)
        stack.callback(_active.pop)
        stack.callback(_exchange, {id(ours): old for old, ours in pairs})
        _exchange({id(old): ours for old, ours in pairs})
        yield


def _import() -> list[ModuleType]:
    """FlashInfer's modules that exist here; none where FlashInfer cannot be imported."""
    out: list[ModuleType] = []
    for name in MODULES:
        try:
            out.append(importlib.import_module(name))
        except Exception:  # absent, or a FlashInfer whose parts do not load here
            if name == "flashinfer":
                return []
    return out


def _pairs(modules: list[ModuleType]) -> list[tuple[Any, Any]]:
    """(FlashInfer's function, ours). Different functions of one name, if there are any, each get their own."""
    found: dict[int, tuple[str, Any]] = {}
    for name in _OPERATIONS:
        for module in modules:
            old = vars(module).get(name)
            if callable(old):
                found.setdefault(id(old), (name, old))
    return [(old, _stand_in(name, _OPERATIONS[name], old)) for name, old in found.values()]


def _stand_in(name: str, ours: Callable[..., Any], original: Callable[..., Any] | None) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if _active:
            return ours(*args, **kwargs)
        if original is None:
            raise MxdebugError(f"flashinfer.{name}", "FlashInfer", "mxdebug's stub of it", "a function kept from inside replaced()")
        return original(*args, **kwargs)

    if original is not None:
        functools.update_wrapper(call, original)
    call.__name__ = name
    return call


def _exchange(new: dict[int, Any]) -> None:
    """Put other objects in the place of those with these ids, in every module's namespace."""
    for module in list(sys.modules.values()):
        namespace = getattr(module, "__dict__", None)
        if isinstance(namespace, dict) and not new.keys().isdisjoint(map(id, list(namespace.values()))):
            namespace.update({key: new[id(value)] for key, value in namespace.items() if id(value) in new})


def _stubs() -> dict[str, ModuleType]:
    functions = {name: _stand_in(name, ours, None) for name, ours in _OPERATIONS.items()} | _HELPERS
    out: dict[str, ModuleType] = {}
    for name in MODULES:
        module = ModuleType(name, "mxdebug's stub: FlashInfer cannot be imported here")
        module.__spec__, module.__path__ = ModuleSpec(name, None, is_package=True), []
        vars(module).update(functions)
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(out[parent], child, module)
        out[name] = module
    return out
