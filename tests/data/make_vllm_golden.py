"""Run vLLM 0.33's own converters for FLASHINFER_CUTLASS_MXFP4_BF16 on made tensors and keep the bytes that come out.

    python tests/data/make_vllm_golden.py SOURCES

SOURCES is a folder that holds vLLM 0.33's sources: SOURCES/vllm/model_executor/layers/fused_moe/oracle/mxfp4.py and its
neighbours. vLLM need not be installed: of its modules only the converters, `swap_w13_to_w31` and `round_up` are executed, all else
that they import is a stub. FlashInfer must be installed; its scale interleave runs on the CPU as it is. Its weight interleave
is a CUDA kernel, in whose place stands SM90_WEIGHT_INTERLEAVE.pack, which is byte-exact against that kernel's recorded output
(tests/test_layouts.py).

The inputs are not stored: `made` computes them, here and in tests/test_recipes.py.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from unittest.mock import MagicMock

import torch
from torch import Tensor

GPT_OSS, COMPRESSED = "gpt-oss", "compressed-tensors mxfp4-pack-quantized"
# name: checkpoint kind, experts, hidden, intermediate. Two need padding in both directions, one in none.
CASES = {
    "gpt-oss-unaligned": (GPT_OSS, 3, 160, 96),
    "gpt-oss-aligned": (GPT_OSS, 2, 256, 128),
    "compressed-unaligned": (COMPRESSED, 2, 160, 192),
}
BACKEND = "FLASHINFER_CUTLASS_MXFP4_BF16"
_REAL = ("vllm.model_executor.layers.fused_moe.oracle.mxfp4", "vllm.model_executor.layers.quantization.utils.flashinfer_utils",
         "vllm.utils.math_utils")


def made_bytes(seed: int, *shape: int) -> Tensor:
    """uint8 of that shape: the upper byte of a multiplicative hash of each element's index. The same on every machine."""
    count = torch.Size(shape).numel()
    index = torch.arange(count, dtype=torch.int64) + seed * 1_000_003
    mixed = (index ^ (index >> 7)) * 2_654_435_761 % 2**32
    return ((mixed ^ (mixed >> 15)) * 2_246_822_519 % 2**32 >> 24).to(torch.uint8).reshape(shape)


def made(name: str) -> dict[str, Tensor]:
    """The tensors of one case in logical order, unpadded: gate, up [E, I, H/2], down [E, H, I/2], *_scale, *_bias.

    Biases are float32 that bf16 does not hold, except gpt-oss's w2 bias: vLLM's converter returns it as the parameter that it
    was loaded into, which is bf16.
    """
    kind, e, h, i = CASES[name]
    seed = 100 * list(CASES).index(name)
    out = {}
    for n, (key, rows, columns) in enumerate((("gate", i, h), ("up", i, h), ("down", h, i))):
        out[key] = made_bytes(seed + 3 * n, e, rows, columns // 2)
        out[f"{key}_scale"] = made_bytes(seed + 3 * n + 1, e, rows, columns // 32)
        bias = (made_bytes(seed + 3 * n + 2, e, rows, 2).double() @ torch.tensor([1.0, 1 / 300], dtype=torch.float64)).float() / 64 - 2
        out[f"{key}_bias"] = bias.bfloat16() if (kind, key) == (GPT_OSS, "down") else bias
    return out


def loaded(name: str, padded_hidden: int, padded_intermediate: int) -> dict[str, Tensor]:
    """The parameters as vLLM allocates them (zeros, padded) and loads a checkpoint of that kind into them.

    gpt-oss's rows alternate in the file and fill the first 2 * I rows; a compressed-tensors layer loads w1 into the first half
    and w3 into the second, each from its start.
    """
    kind, e, h, i = CASES[name]
    t = made(name)
    out: dict[str, Tensor] = {}
    for suffix, columns, padded in (("", h // 2, padded_hidden // 2), ("_scale", h // 32, padded_hidden // 32), ("_bias", None, None)):
        gate, up = t[f"gate{suffix}"], t[f"up{suffix}"]
        w13 = torch.zeros(e, 2 * padded_intermediate, *(() if padded is None else (padded,)), dtype=gate.dtype)
        cut = () if columns is None else (slice(0, columns),)
        if kind == GPT_OSS:
            w13[(slice(None), slice(0, 2 * i, 2), *cut)] = gate
            w13[(slice(None), slice(1, 2 * i, 2), *cut)] = up
        else:
            w13[(slice(None), slice(0, i), *cut)] = gate
            w13[(slice(None), slice(padded_intermediate, padded_intermediate + i), *cut)] = up
        out[f"w13{suffix}"] = w13
    for suffix, columns, padded in (("", i // 2, padded_intermediate // 2), ("_scale", i // 32, padded_intermediate // 32)):
        w2 = torch.zeros(e, padded_hidden, padded, dtype=torch.uint8)
        w2[:, :h, :columns] = t[f"down{suffix}"]
        out[f"w2{suffix}"] = w2
    out["w2_bias"] = torch.zeros(e, padded_hidden, dtype=t["down_bias"].dtype)
    out["w2_bias"][:, :h] = t["down_bias"]
    return out


class _Stub(ModuleType):
    """A module of which every attribute exists. `X | None` in an annotation must work, so attributes are mocks."""

    __path__: list[str] = []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        value = MagicMock(name=f"{self.__name__}.{name}")
        setattr(self, name, value)
        return value


class _Finder:
    """Finds vLLM's modules: those of _REAL in the sources, all others as stubs."""

    def __init__(self, sources: Path) -> None:
        self.sources = sources

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] != "vllm":
            return None
        if name in _REAL:
            return importlib.util.spec_from_file_location(name, self.sources / (name.replace(".", "/") + ".py"))
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "vllm.platforms":
            module.current_platform.is_rocm.return_value = False
        if module.__name__ == "vllm.utils.import_utils":
            module.get_triton_kernels_version.return_value = None


def vllm_oracle(sources: Path) -> ModuleType:
    """vLLM's oracle/mxfp4.py, executed from its source."""
    sys.meta_path.insert(0, _Finder(sources))
    return importlib.import_module(_REAL[0])


def convert(oracle: ModuleType, name: str) -> dict[str, Tensor]:
    """One case through vLLM's padding and converter: operands as FlashInfer's kernel gets them."""
    kind, _, hidden, intermediate = CASES[name]
    backend = oracle.Mxfp4MoeBackend[BACKEND]
    hidden, intermediate = oracle.mxfp4_round_up_hidden_size_and_intermediate_size(backend, hidden, intermediate)
    t = loaded(name, hidden, intermediate)
    converter = oracle.convert_gpt_oss_weight_to_mxfp4_moe_kernel_format if kind == GPT_OSS else oracle.convert_weight_to_mxfp4_moe_kernel_format
    w13, w2, w13_scale, w2_scale, w13_bias, w2_bias = converter(
        backend, torch.nn.Module(), t["w13"], t["w2"], t["w13_scale"], t["w2_scale"], w13_bias=t["w13_bias"], w2_bias=t["w2_bias"])
    return {"w13": w13, "w13_scale": w13_scale, "w13_bias": w13_bias, "w2": w2, "w2_scale": w2_scale, "w2_bias": w2_bias}


def main(sources: str) -> None:
    import flashinfer
    import flashinfer.fused_moe
    from safetensors.torch import save_file

    from mxdebug.layouts import SM90_WEIGHT_INTERLEAVE

    def interleave(weight: Tensor, kind: str) -> Tensor:
        if kind != "fp4":
            raise ValueError(kind)
        return SM90_WEIGHT_INTERLEAVE.pack(weight).reshape(weight.shape)

    flashinfer.fused_moe.interleave_moe_weights_for_sm90_mixed_gemm = interleave
    oracle = vllm_oracle(Path(sources))
    for name in CASES:
        operands = {k: t.contiguous() for k, t in convert(oracle, name).items()}
        file = Path(__file__).parent / f"vllm-{name}.safetensors"
        save_file(operands, file, metadata={"made_by": "make_vllm_golden.py", "vllm": "0.33", "flashinfer": flashinfer.__version__})
        print(f"{file.name}: {file.stat().st_size} bytes,", ", ".join(f"{k} {list(t.shape)}" for k, t in operands.items()))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
