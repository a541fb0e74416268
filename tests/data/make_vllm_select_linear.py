"""Run vLLM's own selection of an NVFP4 W4A16 linear kernel on every setup and keep what it does: vllm_select_linear.json.

    python tests/data/make_vllm_select_linear.py 0.33 SOURCES      (once per version; the entry of that version is replaced)
    python tests/data/make_vllm_select_linear.py 53014 SOURCES     (SOURCES of vLLM 0.30.0, the first release with #53014)

SOURCES is a folder that holds vllm/, as that version's wheel does. vLLM need not be installed: `init_nvfp4_linear_kernel`, the kernel
classes, Humming's priority, the platform's questions about compute capability, and `is_fp4_marlin_supported`, `cutlass_fp4_supported`,
`has_flashinfer_bf16_fp4` are executed from their sources; all else that they import is a stub (vllm_sources.py). What a stub answers, and
with that is not checked here: which packages are there, b12x's own probe, the compiled `cutlass_scaled_mm_supports_fp4`, and which
functions a FlashInfer has, which was read from the wheels of 0.6.13, 0.6.14, 0.6.17 and 0.7.4.

`setups` lists the setups, here and in tests/test_select_linear.py. `taken` is the kernel class, or "-" and vLLM's message; `logged` the
warnings that vLLM logs. Each has the distinct answers and one byte for each setup, an index into them, compressed with zlib, in base64.
"""

from __future__ import annotations

import ast
import base64
import importlib
import importlib.machinery
import importlib.util
import itertools
import json
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

FILE = Path(__file__).parent / "vllm_select_linear.json"
# Where the function of an entry stands. The commit of vLLM's main branch has the same function and list as the 0.30.0 wheel.
SOURCES = {"0.33": {"release": "0.33.0"}, "53014": {"release": "0.30.0", "commit": "006fc8985082388efb440afc595045fb4fa04785"}}
SMS = (70, 75, 80, 90, 100, 103, 107, 110, 120, 121, 129, 130)
BACKENDS = ("auto", "cutlass", "flashinfer_cutlass", "flashinfer_cutedsl", "flashinfer_trtllm", "flashinfer_cudnn", "flashinfer_b12x",
            "b12x", "marlin", "humming", "triton", "deep_gemm", "torch", "aiter", "machete", "fbgemm", "conch", "exllama", "emulation",
            "xpu", "xpu_woq")
FLASHINFERS = (None, "0.6.13", "0.6.14", "0.7.4")
KERNELS = ("FlashInferCuteDslNvFp4W4A16LinearKernel", "MarlinNvFp4LinearKernel", "HummingNvFp4LinearKernel", "B12xNvFp4W4A16LinearKernel")
DISABLED = ((), KERNELS[:1], KERNELS[1:2], KERNELS[2:3], KERNELS)
OVERRIDES = (*({"nvfp4_w4a16": b} for b in ("auto", "flashinfer_cutedsl", "marlin", "humming", "b12x", "cutlass")),
             {"nvfp4_w4a4": "marlin"}, {"mxfp4": "humming", "nvfp4_w4a16": "flashinfer_cutedsl"})
_FLAGS = tuple(itertools.product((True, False), repeat=3))


def setups() -> Iterator[dict[str, Any]]:
    """Keyword arguments of a LinearSetup, in a fixed order; without dtype, which vLLM does not read."""
    def made(sm: int, backend: str, flashinfer: str | None, flags: tuple[bool, ...], **more: object) -> dict[str, Any]:
        return {"sm": sm, "linear_backend": backend, "flashinfer": flashinfer, **more,
                **dict(zip(("humming_installed", "b12x_installed", "batch_invariant"), flags, strict=True))}

    for sm, backend, flags, flashinfer, disabled in itertools.product(SMS, BACKENDS, _FLAGS, FLASHINFERS, DISABLED):
        yield made(sm, backend, flashinfer, flags, disabled=frozenset(disabled))
    backends, flashinfers = ("auto", "marlin", "cutlass"), (None, "0.7.4")
    for sm, backend, flags, flashinfer, overrides in itertools.product(SMS, backends, _FLAGS, flashinfers, OVERRIDES):
        yield made(sm, backend, flashinfer, flags, linear_backend_per_quant=overrides)


NOW = SimpleNamespace(sm=90, flashinfer=None, humming=True, b12x=False)  # what the stubs answer for
_LINEAR, _UTILS = "vllm.model_executor.kernels.linear", "vllm.model_executor.layers.quantization.utils"
_REAL = frozenset({"vllm.platforms.interface", f"{_UTILS}.humming.priority",
                   *(f"{_LINEAR}.nvfp4.{m}" for m in ("base", "flashinfer", "marlin", "b12x", "humming", "cutlass", "emulation"))})
_PACKAGES = (_LINEAR, f"{_LINEAR}.nvfp4")


def _function(file: Path, name: str, **names: object) -> Any:
    """One function of a file, without its decorators, among these names."""
    found = next(f for f in ast.walk(ast.parse(file.read_text())) if isinstance(f, ast.FunctionDef) and f.name == name)
    found.decorator_list = []
    exec(compile(ast.fix_missing_locations(ast.Module([found], [])), file.name, "exec"), names)  # noqa: S102
    return names[name]


class Vllm:
    """The selection of one version, executed from its sources."""

    def __init__(self, sources: Path) -> None:
        import vllm_sources as given

        class Finder(given._Finder):
            """The real packages too."""

            def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
                if name in _PACKAGES:
                    folder = self.sources / name.replace(".", "/")
                    return importlib.util.spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
                return super().find_spec(name, path, target)

        self.log, utils = given.LOG, sources / _UTILS.replace(".", "/")
        sys.meta_path.insert(0, Finder(sources, _REAL))
        interface = importlib.import_module("vllm.platforms.interface")
        platform = type("Cuda", (interface.Platform,), {
            "_enum": interface.PlatformEnum.CUDA, "device_name": "cuda",
            "get_device_capability": classmethod(lambda cls, device_id=0: interface.DeviceCapability(*divmod(NOW.sm, 10)))})()
        given.GIVEN |= {
            "vllm.platforms.current_platform": platform, "vllm.platforms.PlatformEnum": interface.PlatformEnum,
            "vllm.utils.import_utils.has_humming": lambda: NOW.humming,
            "vllm.utils.b12x.get_b12x_blockscaled": lambda: SimpleNamespace(is_supported=lambda: True) if NOW.b12x else None,
            "vllm.utils.b12x.get_b12x_intrinsics": lambda: SimpleNamespace() if NOW.b12x else None,
            "vllm.utils.flashinfer.has_flashinfer_bf16_fp4": _function(
                sources / "vllm/utils/flashinfer.py", "has_flashinfer_bf16_fp4", has_flashinfer_cutedsl=lambda: NOW.flashinfer is not None,
                _get_submodule=lambda module: SimpleNamespace(**(
                    {} if NOW.flashinfer == "0.6.13" else {"mm_bf16_fp4": None, "prepare_bf16_fp4_weights": None}))),
            f"{_UTILS}.marlin_utils_fp4.is_fp4_marlin_supported": _function(
                utils / "marlin_utils_fp4.py", "is_fp4_marlin_supported", current_platform=platform),
            f"{_UTILS}.nvfp4_utils.cutlass_fp4_supported": _function(
                utils / "nvfp4_utils.py", "cutlass_fp4_supported", current_platform=platform,
                cutlass_scaled_mm_supports_fp4=lambda sm: 100 <= sm < 130)}
        if (utils / "humming/priority.py").exists():
            priority = importlib.import_module(f"{_UTILS}.humming.priority")
            given.GIVEN |= {f"{_UTILS}.humming.{f}": getattr(priority, f) for f in ("prefers_humming", "prioritize_humming")}
        self.linear = importlib.import_module(_LINEAR)
        self.config, self.envs = importlib.import_module("vllm.config"), importlib.import_module("vllm.envs")

    def take(self, s: dict[str, Any]) -> tuple[str, list[str]]:
        """The kernel class, or "-" and vLLM's message; and what vLLM logs."""
        NOW.sm, NOW.flashinfer, NOW.humming, NOW.b12x = s["sm"], s["flashinfer"], s["humming_installed"], s["b12x_installed"]
        self.envs.VLLM_BATCH_INVARIANT, self.envs.VLLM_DISABLED_KERNELS = s["batch_invariant"], sorted(s.get("disabled", ()))
        kernels = SimpleNamespace(linear_backend=s["linear_backend"], linear_backend_per_quant=s.get("linear_backend_per_quant"))
        self.config.get_current_vllm_config_or_none = lambda: SimpleNamespace(kernel_config=kernels)
        self.log.warnings.clear()
        try:
            taken = type(self.linear.init_nvfp4_linear_kernel(use_a16=True)).__name__
        except ValueError as refused:
            taken = f"-{refused}"
        return taken, list(self.log.warnings)


def packed(answers: list[Any]) -> dict[str, Any]:
    distinct = list(dict.fromkeys(json.dumps(a) for a in answers))
    index = {a: i for i, a in enumerate(distinct)}
    found = bytes(index[json.dumps(a)] for a in answers)
    return {"distinct": [json.loads(a) for a in distinct], "index": base64.b64encode(zlib.compress(found, 9)).decode()}


def unpacked(stored: dict[str, Any]) -> list[Any]:
    return [stored["distinct"][i] for i in zlib.decompress(base64.b64decode(stored["index"]))]


def main(version: str, sources: str) -> None:
    vllm = Vllm(Path(sources))
    taken, logged = zip(*map(vllm.take, setups()), strict=True)
    golden = json.loads(FILE.read_text()) if FILE.exists() else {}
    golden[version] = {**SOURCES[version], "taken": packed(list(taken)), "logged": packed(list(logged))}
    FILE.write_text(json.dumps(dict(sorted(golden.items())), indent=1) + "\n")
    print(version, len(taken), "setups,", len(golden[version]["taken"]["distinct"]), "answers,", FILE.stat().st_size, "bytes")


if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in SOURCES:
        sys.exit(__doc__)
    main(*sys.argv[1:])
