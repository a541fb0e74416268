"""Run vLLM's own selection of a MoE backend on many setups and keep what it takes: vllm_select.json.

    python tests/data/make_vllm_select.py 0.33 SOURCES     (once per version; the entry of that version is replaced)

SOURCES is a folder that holds vllm/, as the source distribution of that version does. vLLM need not be installed: the oracles, the experts
classes, the configuration records and the platform's questions about compute capability are executed from their sources; all else that they
import is a stub. What a stub answers, and with that is not checked here: which packages are there, DeepGEMM's and B12X's own probes, and
the compiled `mxfp4_experts_quant_supported`.

`setups` lists the setups, here and in tests/test_select.py. A result is one character, an index into `outcomes`: the backend and the
experts class, or "-" where vLLM raises; "." where the version does not have the activation, the key or the routing method.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.machinery
import importlib.util
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar
from unittest.mock import MagicMock

FILE = Path(__file__).parent / "vllm_select.json"
UNKNOWN = "."
ALPHABET = "-ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
_LAYERS = "vllm.model_executor.layers"
_MOE = f"{_LAYERS}.fused_moe"
_EXPERTS = ("trtllm_mxfp4_moe", "trtllm_nvfp4_moe", "trtllm_lora_moe", "flashinfer_cutlass_moe", "flashinfer_cutedsl_moe", "triton_moe",
            "flashinfer_cutedsl_batched_moe", "flashinfer_b12x_moe", "flashinfer_moe_ep", "cutlass_moe", "gpt_oss_triton_kernels_moe",
            "deep_gemm_moe", "marlin_moe", "fused_humming_moe", "nvfp4_emulation_moe", "ocp_mx_emulation_moe", "lora_experts_mixin")
_REAL = {f"{_MOE}.experts.{e}" for e in _EXPERTS} | {
    f"{_MOE}.{m}" for m in ("oracle.mxfp4", "oracle.nvfp4", "modular_kernel", "config", "activation", "b12x", "flashinfer_moe_ep",
                            "fused_humming_moe", "lora_experts_mixin")} | {
    f"{_LAYERS}.quantization.utils.quant_utils", f"{_LAYERS}.quantization.utils.humming.priority", "vllm.platforms.interface",
    "vllm.scalar_type"}

KINDS = (("mxfp4", "gpt-oss", None), ("mxfp4", "gpt-oss", "mxfp8"), ("mxfp4", "gpt-oss", "fp8_per_token"), ("mxfp4", "mxfp4", None),
         ("mxfp4", "quark", "mxfp4"), ("mxfp4", "quark", "fp8_per_tensor_static"),
         ("nvfp4", "modelopt", "nvfp4"), ("nvfp4", "modelopt", None), ("nvfp4", "modelopt", "nvfp4_per_token"))
SMS = (90, 100, 103, 110, 120, 121)
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "swigluoai", "situ", "swigluoai_uninterleave", "swiglustep",
               "silu_no_mul", "gelu_no_mul", "gelu_tanh_no_mul", "relu2_no_mul")
BACKENDS = ("triton", "triton_unfused", "deep_gemm", "cutlass", "flashinfer_trtllm", "flashinfer_cutlass", "flashinfer_cutedsl",
            "flashinfer_moe_ep_cutedsl", "flashinfer_moe_ep_mega_deep_gemm", "flashinfer_b12x", "b12x", "marlin", "humming", "emulation")
_EP = {"expert_parallel": True}
_ALL = ["flashinfer", "humming", "triton_kernels", "deep_gemm", "b12x", "quark"]
DEPLOYMENTS = (
    {}, {"tp": 2}, {"dp": 2}, {"tp": 2, **_EP}, {"tp": 2, "eplb": True, **_EP}, {"routing": "DeepSeekV3"}, {"routing": "DeepseekV4"},
    {"routing": "Sigmoid"}, {"routing": "Simulated"}, {"lora": True}, {"batch_invariant": True}, {"swiglu_limit": 7.0},
    {"hash_routing": True}, {"routes_adjusted": True}, {"dtype": "float16"}, {"bias": True}, {"experts": 992}, {"experts": 993},
    {"swiglu_alpha": 1.702}, {"eplb": True},
    *({"dp": 2, "all2all": a, **_EP} for a in ("allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency", "nixl_ep",
                                               "flashinfer_nvlink_two_sided", "flashinfer_all2allv", "flashinfer_nvlink_one_sided")),
    *({"installed": sorted(set(_ALL) - {missing})} for missing in _ALL), {"installed": []}, {"installed": ["flashinfer"]},
    {"installed": _ALL, "situ_beta": 4.0, "situ_linear_beta": 25.0}, {"installed": _ALL, "intermediate": 1456},
    {"installed": _ALL, "hidden": 2880},
)
_COMMON = {"routing": "Renormalize", "hidden": 3072, "intermediate": 1536}


def setups() -> Iterator[dict[str, object]]:
    """Keyword arguments of a Setup, in a fixed order."""
    def made(kind: tuple, **fields: object) -> dict[str, object]:
        return {**_COMMON, "quantisation": kind[0], "checkpoint": kind[1], "activation_key": kind[2], **fields}

    for sm, kind, activation in itertools.product(SMS, KINDS, ACTIVATIONS):
        yield made(kind, sm=sm, activation=activation)
    for sm, kind, activation, more in itertools.product(SMS, KINDS, ("silu", "swigluoai", "situ"), DEPLOYMENTS):
        yield made(kind, sm=sm, activation=activation, **more)
    some = ({}, {"installed": _ALL}, {"tp": 2, **_EP}, {"dp": 2, "all2all": "deepep_low_latency", **_EP}, {"lora": True},
            {"swiglu_limit": 7.0}, {"tp": 2, "routing": "DeepseekV4", **_EP},
            *({"installed": _ALL, "activation": a} for a in ("swigluoai", "swigluoai_uninterleave", "relu2_no_mul")))
    for sm, kind, backend, more in itertools.product(SMS, KINDS, BACKENDS, some):
        yield made(kind, sm=sm, moe_backend=backend, **{"activation": "silu", **more})


_KEYS = {"mxfp8": "kMxfp8Dynamic", "mxfp4": "kMxfp4Dynamic", "fp8_per_tensor_static": "kFp8StaticTensorSym",
         "fp8_per_token": "kFp8DynamicTokenSym", "nvfp4": "kNvfp4Dynamic", "nvfp4_per_token": "kNvfp4DynamicToken"}
_REFUSALS = ("does not support", "is not supported for", "backend supports the deployment", "does not apply the SwiGLU clamp")
NOW = SimpleNamespace(sm=90, installed=frozenset(), batch_invariant=False, eplb=False)  # what the stubs answer for


class _Stub(ModuleType):
    """A module of which every attribute exists; `has_*` says whether a package is in the current setup."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name.startswith("has_"):
            package = "flashinfer" if name.startswith("has_flashinfer") else name.removeprefix("has_")
            return lambda: package in NOW.installed
        value = MagicMock(name=f"{self.__name__}.{name}")
        if ".experts." in self.__name__:  # an experts class of ROCm, XPU or CPU
            value.is_supported_config = lambda *args, **kwargs: (False, "another platform")
        setattr(self, name, value)
        return value


class _Envs(ModuleType):
    """vllm.envs with nothing set. Humming's kind of GEMM is None or "auto" then, which its code reads alike."""

    VLLM_HUMMING_MOE_GEMM_TYPE = None

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "is_set":
            return lambda variable: False
        return NOW.batch_invariant if name == "VLLM_BATCH_INVARIANT" else False


class _Finder:
    """Finds vLLM's modules: those of _REAL in the sources where they are there, all others as stubs."""

    def __init__(self, sources: Path) -> None:
        self.sources = sources

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in ("vllm", "humming"):
            return None
        file = self.sources / (name.replace(".", "/") + ".py")
        if name in _REAL and file.exists():
            return importlib.util.spec_from_file_location(name, file)
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return (_Envs if spec.name == "vllm.envs" else _Stub)(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if name == "vllm":
            module.envs = importlib.import_module("vllm.envs")
        if name == "vllm.platforms":
            module.current_platform = self.platform()
        if name == "vllm.config":
            module.get_current_vllm_config = lambda: SimpleNamespace(
                model_config=SimpleNamespace(quantization_config=None), weight_transfer_config=None,
                parallel_config=SimpleNamespace(enable_dbo=False, enable_eplb=NOW.eplb))
        if name == "vllm.config.quantization":
            module.QuantizationConfigArgs = type("QuantizationConfigArgs", (), {})
        if name == "vllm.config.kernel":
            module.FLASHINFER_MOE_EP_CUTEDSL = "flashinfer_moe_ep_cutedsl"
            module.FLASHINFER_MOE_EP_DEEP_GEMM = "flashinfer_moe_ep_mega_deep_gemm"
            module.FLASHINFER_MOE_EP_BACKENDS = frozenset({module.FLASHINFER_MOE_EP_CUTEDSL, module.FLASHINFER_MOE_EP_DEEP_GEMM})
        if name == f"{_LAYERS}.quantization.utils.humming" and (self.sources / name.replace(".", "/") / "priority.py").exists():
            module.prioritize_humming = importlib.import_module(f"{name}.priority").prioritize_humming
        if name == "vllm.utils.deep_gemm":
            platforms = importlib.import_module("vllm.platforms")
            module.is_deep_gemm_supported = lambda: platforms.current_platform.support_deep_gemm() and "deep_gemm" in NOW.installed
        if name == "vllm.utils.b12x":
            module.get_b12x_fused_moe = lambda: SimpleNamespace(is_supported=lambda: True) if "b12x" in NOW.installed else None
        if name == "vllm.utils.import_utils":
            module.get_triton_kernels_version = lambda: None
        if name in ("vllm.utils.humming", "humming.config"):
            kinds = ("INDEXED", "GROUPED_CONTIGUOUS", "GROUPED_MASKED")
            module.GemmType = SimpleNamespace(**{n: SimpleNamespace(value=n.lower()) for n in kinds})
        if name == "vllm._custom_ops":  # csrc/.../mxfp4_experts_quant.cu, built with CUDA 12.9 or later
            module.mxfp4_experts_quant_supported = lambda capability: 100 <= capability < 120
        if name == f"{_MOE}":
            module.FusedMoEConfig = MagicMock()
        if name == "vllm.utils.math_utils":
            module.round_up = lambda x, y: -(-x // y) * y

    def platform(self) -> object:
        """vLLM's Platform on a CUDA device of the current SM, with its CUDA platform's `support_deep_gemm` and `supports_fp8`."""
        interface = importlib.import_module("vllm.platforms.interface")
        cuda = ast.parse((self.sources / "vllm/platforms/cuda.py").read_text())
        wanted = [f for c in cuda.body if isinstance(c, ast.ClassDef) for f in c.body
                  if isinstance(f, ast.FunctionDef) and f.name in ("support_deep_gemm", "supports_fp8")]
        body: dict[str, object] = {}
        exec(compile(ast.fix_missing_locations(ast.Module(wanted, [])), "cuda.py", "exec"), body)  # noqa: S102
        body["_enum"], body["device_name"] = interface.PlatformEnum.CUDA, "cuda"
        body["get_device_capability"] = classmethod(lambda cls, device_id=0: interface.DeviceCapability(*divmod(NOW.sm, 10)))
        return type("Cuda", (interface.Platform,), body)()


class Vllm:
    """The oracles of one version, executed from its sources."""

    def __init__(self, sources: Path) -> None:
        sys.meta_path.insert(0, _Finder(sources))
        self.mxfp4, self.nvfp4, self.config, self.activation = (
            importlib.import_module(f"{_MOE}.{n}") for n in ("oracle.mxfp4", "oracle.nvfp4", "config", "activation"))
        self.keys = importlib.import_module(f"{_LAYERS}.quantization.utils.quant_utils")

    def key(self, name: str | None) -> object:
        return None if name is None else getattr(self.keys, _KEYS[name])

    def knows(self, s: dict[str, object]) -> bool:
        """Whether this version has the activation, the activation key and the routing method at all."""
        key = s["activation_key"]
        return (s["activation"] in {a.value for a in self.activation.MoEActivation} and (key is None or hasattr(self.keys, _KEYS[key]))
                and hasattr(self.config.RoutingMethodType, s["routing"]))

    def take(self, s: dict[str, object]) -> str:
        """Backend and experts class, or "-" where vLLM raises."""
        import torch

        NOW.sm, NOW.installed = s["sm"], frozenset(s.get("installed", ["flashinfer", "humming", "triton_kernels", "deep_gemm"]))
        NOW.batch_invariant, NOW.eplb = s.get("batch_invariant", False), s.get("eplb", False)
        parallel = self.config.FusedMoEParallelConfig.make(s.get("tp", 1), 1, s.get("dp", 1), 1, SimpleNamespace(
            enable_expert_parallel=s.get("expert_parallel", False), all2all_backend=s.get("all2all", "allgather_reducescatter"),
            enable_eplb=s.get("eplb", False)))
        activation = self.activation.MoEActivation.from_str(s["activation"])
        experts = s.get("experts", 128)
        fields = {
            "num_experts": experts, "num_local_experts": experts, "num_logical_experts": experts, "experts_per_token": 4,
            "hidden_dim": s["hidden"], "intermediate_size": s["intermediate"],
            "intermediate_size_per_partition": s["intermediate"] // parallel.tp_size, "activation": activation,
            "is_act_and_mul": not s["activation"].endswith("_no_mul"), "device": "cpu", "max_num_tokens": 8192,
            "routing_method": self.config.RoutingMethodType[s["routing"]], "moe_parallel_config": parallel,
            "in_dtype": getattr(torch, s.get("dtype", "bfloat16")), "moe_backend": s.get("moe_backend", "auto"),
            "has_bias": s["checkpoint"] == "gpt-oss" or s.get("bias", False), "is_lora_enabled": s.get("lora", False),
            "has_hash_routing": s.get("hash_routing", False), "require_decomposed_backend": s.get("routes_adjusted", False),
            "swiglu_limit": s.get("swiglu_limit"), "swiglu_alpha": s.get("swiglu_alpha"),
            "activation_situ_beta": s.get("situ_beta"), "activation_situ_linear_beta": s.get("situ_linear_beta")}
        record = self.config.FusedMoEConfig
        config = record(**{f.name: fields[f.name] for f in dataclasses.fields(record) if f.init and f.name in fields})
        try:
            if s["quantisation"] == "nvfp4":
                backend, experts_class = self.nvfp4.select_nvfp4_moe_backend(config, self.keys.kNvfp4Static, self.key(s["activation_key"]))
            elif s["checkpoint"] == "mxfp4":
                backend, experts_class = self.mxfp4.select_deepseek_v4_mxfp4_moe_backend(config)
            else:
                backend, experts_class = self.mxfp4.select_mxfp4_moe_backend(config, self.key(s["activation_key"]))
        except (ValueError, NotImplementedError) as refused:
            if not any(words in str(refused) for words in _REFUSALS):
                raise
            return "-"
        return f"{backend.name}/{experts_class.__name__}"

    def native_mxfp4(self) -> list[int]:
        """The SMs on which CompressedTensorsW4A4Mxfp4MoEMethod takes CutlassExpertsMxfp4."""
        experts = importlib.import_module(f"{_MOE}.experts.cutlass_moe").CutlassExpertsMxfp4
        out = []
        for NOW.sm in SMS:
            if experts._supports_current_device():
                out.append(NOW.sm)
        return out


def main(version: str, sources: str) -> None:
    vllm = Vllm(Path(sources))
    outcomes, results = ["-"], []
    for s in setups():
        if not vllm.knows(s):
            results.append(UNKNOWN)
            continue
        taken = vllm.take(s)
        if taken not in outcomes:
            outcomes.append(taken)
        results.append(ALPHABET[outcomes.index(taken)])
    golden = json.loads(FILE.read_text()) if FILE.exists() else {}
    golden[version] = {"outcomes": outcomes, "native_mxfp4": vllm.native_mxfp4(), "results": "".join(results)}
    FILE.write_text(json.dumps(dict(sorted(golden.items())), indent=1) + "\n")
    print(version, len(results), "setups,", len(outcomes), "outcomes,", FILE.stat().st_size, "bytes")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
