"""Execute modules of vLLM 0.33 from a folder of its sources, on a machine that has neither vLLM nor a GPU.

The modules in REAL, or those that a script names, are vLLM's own code. All else that they import is a stub: a class for a CamelCase
name, which may be a base, a mock for any other name, or one of the stand-ins in GIVEN.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar
from unittest.mock import MagicMock

import torch
from torch import Tensor

LAYERS = "vllm.model_executor.layers"
FUSED, QUANT = f"{LAYERS}.fused_moe", f"{LAYERS}.quantization"
COMPRESSED_MOE = f"{QUANT}.compressed_tensors.compressed_tensors_moe"
REAL = frozenset({
    "vllm.utils.math_utils", f"{FUSED}.activation", f"{FUSED}.config", f"{FUSED}.modular_kernel", f"{FUSED}.fused_moe_method_base",
    f"{FUSED}.routed_experts", f"{FUSED}.oracle.mxfp4", f"{FUSED}.oracle.nvfp4", f"{FUSED}.experts.flashinfer_cutlass_moe",
    f"{FUSED}.experts.trtllm_mxfp4_moe", f"{FUSED}.experts.trtllm_nvfp4_moe", f"{FUSED}.experts.flashinfer_cutedsl_moe",
    f"{QUANT}.mxfp4", f"{QUANT}.modelopt", f"{COMPRESSED_MOE}.compressed_tensors_moe_w4a4_nvfp4",
    f"{COMPRESSED_MOE}.compressed_tensors_moe_w4a8_mxfp4", f"{QUANT}.utils.flashinfer_utils", f"{QUANT}.utils.flashinfer_fp4_moe",
    f"{QUANT}.utils.nvfp4_utils", f"{QUANT}.utils.quant_utils"})


class _Layer(torch.nn.Module):
    """In place of PluggableLayer."""

    @staticmethod
    def register(name: str) -> Callable[[type], type]:
        return lambda cls: cls


class _Log:
    """In place of vLLM's loggers: keeps the warnings."""

    def __init__(self) -> None:
        self.warnings: list[str] = []

    def warning_once(self, message: str, *values: object) -> None:
        self.warnings.append(message % values)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: None


class Recorder:
    """In place of FlashInfer's MoE functions: keeps the last call's function and arguments."""

    def __init__(self) -> None:
        self.function, self.arguments = "", {}

    def stand_in(self, function: str) -> Callable[..., None]:
        def call(**arguments: object) -> None:
            self.function, self.arguments = function, arguments
        return call


def _set_attributes(t: Tensor, attributes: dict[str, object] | None) -> None:
    """In place of set_weight_attrs."""
    for key, value in (attributes or {}).items():
        setattr(t, key, value)


def _parameter(data: Tensor, **attributes: object) -> torch.nn.Parameter:
    """In place of vLLM's parameter classes."""
    parameter = torch.nn.Parameter(data, requires_grad=False)
    _set_attributes(parameter, attributes)
    return parameter


def _replace(layer: torch.nn.Module, name: str, data: Tensor) -> None:
    """In place of replace_parameter."""
    setattr(layer, name, torch.nn.Parameter(data.data, requires_grad=False))


def _sm100() -> MagicMock:
    """In place of current_platform: a machine of SM100."""
    platform = MagicMock(name="SM100")
    for name, value in {"is_rocm": False, "is_xpu": False, "is_cpu": False, "is_fp8_fnuz": False, "is_cuda": True, "is_cuda_alike": True,
                        "fp8_dtype": torch.float8_e4m3fn}.items():
        getattr(platform, name).return_value = value
    platform.is_device_capability = platform.is_device_capability_family = lambda sm: sm == 100
    platform.has_device_capability = lambda sm: sm <= 100
    return platform


LOG, RECORDER = _Log(), Recorder()
GIVEN: dict[str, object] = {
    "vllm.logger.init_logger": lambda name: LOG,
    "vllm.platforms.current_platform": _sm100(),
    "vllm.envs.VLLM_BATCH_INVARIANT": False,
    "vllm.utils.import_utils.get_triton_kernels_version": lambda: None,
    "vllm.utils.flashinfer.flashinfer_cutlass_fused_moe": RECORDER.stand_in("cutlass_fused_moe"),
    "vllm.utils.flashinfer.flashinfer_cute_dsl_fused_moe_nvfp4": RECORDER.stand_in("cute_dsl_fused_moe_nvfp4"),
    "vllm._aiter_ops.rocm_aiter_ops": SimpleNamespace(is_fused_moe_enabled=lambda: False,
                                                      is_fusion_moe_shared_experts_enabled=lambda: False),
    "vllm.model_executor.custom_op.PluggableLayer": _Layer,
    "vllm.model_executor.parameter.ModelWeightParameter": _parameter,
    "vllm.model_executor.parameter.PerTensorScaleParameter": _parameter,
    "vllm.model_executor.utils.replace_parameter": _replace,
    "vllm.model_executor.utils.set_weight_attrs": _set_attributes,
    "vllm.model_executor.utils.is_weights_pre_processed": lambda: False,
    f"{FUSED}.utils.fi_moe_largest_bucket": lambda config: 8,
    f"{FUSED}.all2all_utils.maybe_roundup_layer_hidden_size": lambda hidden, *_: hidden,
}
# What vLLM's packages hand on from modules of theirs.
_FORWARDED = {
    f"{FUSED}.RoutedExperts": f"{FUSED}.routed_experts.RoutedExperts",
    f"{FUSED}.FusedMoeWeightScaleSupported": f"{FUSED}.routed_experts.FusedMoeWeightScaleSupported",
    f"{FUSED}.FusedMoEMethodBase": f"{FUSED}.fused_moe_method_base.FusedMoEMethodBase",
    f"{COMPRESSED_MOE}.CompressedTensorsMoEMethod": f"{FUSED}.fused_moe_method_base.FusedMoEMethodBase",  # adds only the choice of a method
}


class _StubType(type):
    """The type of stub classes: every attribute exists."""

    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock(name=name)


class _Stub(ModuleType):
    """A module of which every attribute exists. `X | None` in an annotation must work: classes and mocks can do that."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        full = f"{self.__name__}.{name}"
        if full in GIVEN:
            value = GIVEN[full]
        elif full in _FORWARDED:
            module, _, there = _FORWARDED[full].rpartition(".")
            value = getattr(importlib.import_module(module), there)
        elif full in self.__spec__.loader.real:
            value = importlib.import_module(full)
        elif name[0].isupper() and not name.isupper():
            value = _StubType(name, (), {})
        else:
            value = MagicMock(name=full)
        setattr(self, name, value)
        return value


class _Finder:
    """Finds vLLM's modules: those of `real` in the sources, all others as stubs."""

    def __init__(self, sources: Path, real: frozenset[str]) -> None:
        self.sources, self.real = sources, real

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != "vllm":
            return None
        if name in self.real:
            return importlib.util.spec_from_file_location(name, self.sources / (name.replace(".", "/") + ".py"))
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def find(sources: Path, real: frozenset[str] = REAL) -> None:
    """From here on `import vllm...` executes the sources of the modules `real`."""
    sys.meta_path.insert(0, _Finder(sources, real))


def install(sources: Path) -> None:
    """`find`; and FlashInfer's GPU operations and moves to a GPU stay on the CPU.

    FlashInfer's index functions and its SM90 scale interleave run on a CPU as they are. Its swizzle and its SM90 weight interleave are
    CUDA kernels, in whose place stand SWIZZLE_128x4.pack and SM90_WEIGHT_INTERLEAVE.pack (byte-exact against those kernels' recorded
    output: tests/test_layouts.py). Its MoE functions are RECORDER.
    """
    import flashinfer
    import flashinfer.fp4_quantization
    import flashinfer.fused_moe

    from mxdebug.layouts import SM90_WEIGHT_INTERLEAVE, SWIZZLE_128x4

    def interleave(weight: Tensor, kind: str) -> Tensor:
        if kind != "fp4":
            raise ValueError(kind)
        return SM90_WEIGHT_INTERLEAVE.pack(weight).reshape(weight.shape)

    def swizzle(scales: Tensor) -> Tensor:
        return SWIZZLE_128x4.pack(scales).flatten()

    flashinfer.fused_moe.interleave_moe_weights_for_sm90_mixed_gemm = interleave
    for module in (flashinfer, flashinfer.fp4_quantization):
        module.block_scale_interleave = module.nvfp4_block_scale_interleave = swizzle
    for module in (flashinfer, flashinfer.fused_moe):
        module.trtllm_fp4_block_scale_routed_moe = RECORDER.stand_in("trtllm_fp4_block_scale_routed_moe")
    Tensor.cuda = lambda t: t  # vLLM's swizzle_blockscale ends with it
    torch.accelerator.current_device_index = lambda: "cpu"
    find(sources)
