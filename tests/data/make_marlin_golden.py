"""Run vLLM 0.33's own converters for its Marlin fallback on made tensors and keep the bytes that come out.

    python tests/data/make_marlin_golden.py SOURCES

SOURCES is a folder that holds vLLM 0.33's sources: SOURCES/vllm/model_executor/layers/... vLLM need not be installed: the
modules of REAL are executed, and of two quantisation methods the function `process_weights_after_loading`; all else is a stub
(vllm_sources.py).
`gptq_marlin_repack` is a CUDA kernel; in its place stands vLLM's own Python form of it, marlin_utils_test.py `marlin_weights`.
The calls of `apply_moe_activation` to torch.ops._C are recorded, as JSON in the metadata of marlin-activations.safetensors.

The inputs are not stored: `made` computes them, here and in tests/test_marlin.py.
"""

from __future__ import annotations

import ast
import builtins
import importlib
import json
import sys
import zlib
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import NamedTuple
from unittest.mock import MagicMock

import torch
from torch import Tensor


class Case(NamedTuple):
    """One conversion. `top`: E4M3 scale bytes are below it; `gated`: whether there is a gate."""

    format: str
    checkpoint: str
    experts: int
    hidden: int
    intermediate: int
    dtype: torch.dtype = torch.bfloat16
    input_dtype: torch.dtype | None = None
    top: int = 0x7F
    gated: bool = True


COMPRESSED_MX, COMPRESSED_NV = "compressed-tensors mxfp4-pack-quantized", "compressed-tensors nvfp4-pack-quantized"
CASES = {
    "mxfp4-gpt-oss": Case("MXFP4", "gpt-oss", 2, 160, 96),
    "mxfp4-plain": Case("MXFP4", "mxfp4", 2, 192, 64),
    "mxfp4-fp8-activations": Case("MXFP4", "mxfp4", 2, 192, 64, input_dtype=torch.float8_e4m3fn),
    "mxfp4-compressed": Case("MXFP4", COMPRESSED_MX, 2, 128, 64),
    "mxfp4-compressed-fp8-activations": Case("MXFP4", COMPRESSED_MX, 2, 128, 64, input_dtype=torch.float8_e4m3fn),
    "nvfp4-modelopt": Case("NVFP4", "ModelOpt NVFP4", 2, 192, 80),
    "nvfp4-modelopt-small-scales": Case("NVFP4", "ModelOpt NVFP4", 2, 128, 64, top=0x30),
    "nvfp4-modelopt-no-gate": Case("NVFP4", "ModelOpt NVFP4", 3, 128, 80, gated=False),
    "nvfp4-compressed-fp16": Case("NVFP4", COMPRESSED_NV, 2, 128, 48, dtype=torch.float16, top=0x30),
}
LAYERS = "vllm.model_executor.layers."
REAL = frozenset({LAYERS + name for name in (
    "fused_moe.oracle.mxfp4", "fused_moe.oracle.nvfp4", "fused_moe.activation", "quantization.utils.marlin_utils",
    "quantization.utils.marlin_utils_fp4", "quantization.utils.marlin_utils_test", "quantization.utils.quant_utils")}
    | {"vllm.utils.math_utils"})


def made_bytes(seed: int, *shape: int) -> Tensor:
    """uint8 of that shape: the upper byte of a multiplicative hash of each element's index. The same on every machine."""
    index = torch.arange(torch.Size(shape).numel(), dtype=torch.int64) + seed * 1_000_003
    mixed = (index ^ (index >> 7)) * 2_654_435_761 % 2**32
    return ((mixed ^ (mixed >> 15)) * 2_246_822_519 % 2**32 >> 24).to(torch.uint8).reshape(shape)


def made(name: str) -> dict[str, Tensor]:
    """One case's tensors in logical order, unpadded: gate (if any), up [E, I, H/2], down [E, H, I/2], *_scale, *_bias, *_divisor.

    Biases (MXFP4, where vLLM loads them) are float32 that bf16 does not hold. NVFP4's global scales, all different, are 1 / divisor.
    """
    c = CASES[name]
    seed = zlib.crc32(name.encode()) % 100_000 * 100  # of the name: a new case does not change the others
    block, mx = (32, True) if c.format == "MXFP4" else (16, False)
    out = {}
    first = (c.intermediate, c.hidden)
    for n, (key, (rows, columns)) in enumerate((("gate", first), ("up", first), ("down", first[::-1]))):
        if key == "gate" and not c.gated:
            continue
        out[key] = made_bytes(seed + 4 * n, c.experts, rows, columns // 2)
        scales = made_bytes(seed + 4 * n + 1, c.experts, rows, columns // block)
        if not mx:
            scales = scales % (c.top - 16 * n)  # other maxima in w13 and in w2
        elif c.input_dtype is not None:
            scales = scales % 250
        out[f"{key}_scale"] = scales
        if mx and c.checkpoint != COMPRESSED_MX:
            pairs = made_bytes(seed + 4 * n + 2, c.experts, rows, 2).double()
            out[f"{key}_bias"] = (pairs @ torch.tensor([1.0, 1 / 300], dtype=torch.float64)).float() / 64 - 2
        if not mx:
            out[f"{key}_divisor"] = made_bytes(seed + 4 * n + 3, c.experts).float() * 3 + 100
    return out


def loaded(name: str, hidden: int, intermediate: int) -> dict[str, Tensor]:
    """w13 and w2 with scales and biases as vLLM allocates them (zeros, these sizes) and loads that kind of checkpoint into them."""
    c, t = CASES[name], made(name)
    block = 32 if c.format == "MXFP4" else 16
    halves = ["gate", "up"] if c.gated else ["up"]
    out: dict[str, Tensor] = {}
    for suffix, per in (("", 2), ("_scale", block), ("_bias", 0)):
        if f"up{suffix}" not in t:
            continue
        dtype = torch.bfloat16 if suffix == "_bias" else torch.uint8
        w13 = torch.zeros(c.experts, len(halves) * intermediate, *((hidden // per,) if per else ()), dtype=dtype)
        w2 = torch.zeros(c.experts, hidden, *((intermediate // per,) if per else ()), dtype=dtype)
        for n, key in enumerate(halves):
            part = t[f"{key}{suffix}"]
            start, step = (n, len(halves)) if c.checkpoint == "gpt-oss" else (n * intermediate, 1)
            rows = slice(start, start + step * (c.intermediate - 1) + 1, step)
            w13[(slice(None), rows, *((slice(part.shape[2]),) if per else ()))] = part.to(dtype)
        down = t[f"down{suffix}"]
        w2[(slice(None), slice(c.hidden), *((slice(down.shape[2]),) if per else ()))] = down.to(dtype)
        out |= {f"w13{suffix}": w13, f"w2{suffix}": w2}
    return out


class Engine:
    """vLLM's modules, executed from their sources."""

    def __init__(self, sources: Path) -> None:
        import vllm_sources

        self.sources = sources
        vllm_sources.find(sources, REAL)
        load = {name.rsplit(".", 1)[1]: importlib.import_module(name) for name in sorted(REAL)}
        self.mxfp4, self.nvfp4, self.activation = load["mxfp4"], load["nvfp4"], load["activation"]
        self.fp4, self.helper, self.utils = load["marlin_utils_fp4"], load["marlin_utils_test"], load["marlin_utils"]
        self.fp4.ops.gptq_marlin_repack = self.repack
        # In place of SM100, on which vLLM refuses FP8 activations for Marlin, and of the quantiser that it prepares for them.
        self.utils.current_platform, self.utils.QuantFP8 = MagicMock(), MagicMock()

    def repack(self, b_q_weight: Tensor, size_k: int, size_n: int, num_bits: int, is_a_8bit: bool) -> Tensor:
        """gptq_marlin_repack: int32 [K/8, N], eight codes of a column in a word, the first lowest -> int32 [K/16, 2N]."""
        codes = torch.stack([b_q_weight >> 4 * i & 15 for i in range(8)], dim=1).reshape(size_k, size_n)
        return self.helper.marlin_weights(codes, size_k, size_n, num_bits, self.helper.get_weight_perm(num_bits, is_a_8bit), is_a_8bit)

    def method(self, file: str, owner: str) -> FunctionType:
        """`process_weights_after_loading` of a quantisation method, without its class. Names that it uses are ours or mocks."""
        tree = ast.parse((self.sources / "vllm/model_executor/layers/quantization" / file).read_text())
        body = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == owner).body
        function = next(n for n in body if isinstance(n, ast.FunctionDef) and n.name == "process_weights_after_loading")
        code = compile(ast.Module([function], []), file, "exec")  # with this module's __future__ flags
        space = {"torch": torch, "is_weights_pre_processed": lambda: False, "replace_parameter": setattr,
                 "convert_to_nvfp4_moe_kernel_format": self.nvfp4.convert_to_nvfp4_moe_kernel_format}
        exec(code, space)  # noqa: S102
        made_function = space["process_weights_after_loading"]
        for name in made_function.__code__.co_names:
            if name not in space and name not in dir(builtins):
                space[name] = MagicMock(name=name)
        return made_function

    def convert(self, name: str) -> dict[str, Tensor]:
        """One case through vLLM's padding and converter."""
        c = CASES[name]
        self.utils.envs.VLLM_MARLIN_INPUT_DTYPE = None if c.input_dtype is None else "fp8"
        return self._nvfp4(name, c) if c.format == "NVFP4" else self._mxfp4(name, c)

    def _mxfp4(self, name: str, c: Case) -> dict[str, Tensor]:
        if c.checkpoint == COMPRESSED_MX:
            t = loaded(name, c.hidden, c.intermediate)
            sizes = SimpleNamespace(num_local_experts=c.experts, hidden_dim=c.hidden, intermediate_size_per_partition=c.intermediate)
            layer = SimpleNamespace(w13_weight=t["w13"], w2_weight=t["w2"], w13_weight_scale=t["w13_scale"], w2_weight_scale=t["w2_scale"],
                                    params_dtype=c.dtype, moe_config=sizes)
            self.fp4.prepare_moe_fp4_layer_for_marlin(layer)
            return {"w13": layer.w13_weight, "w2": layer.w2_weight, "w13_scale": layer.w13_weight_scale, "w2_scale": layer.w2_weight_scale}
        backend = self.mxfp4.Mxfp4MoeBackend.MARLIN
        t = loaded(name, *self.mxfp4.mxfp4_round_up_hidden_size_and_intermediate_size(backend, c.hidden, c.intermediate))
        converter = (self.mxfp4.convert_gpt_oss_weight_to_mxfp4_moe_kernel_format if c.checkpoint == "gpt-oss"
                     else self.mxfp4.convert_weight_to_mxfp4_moe_kernel_format)
        keys = ("w13", "w2", "w13_scale", "w2_scale", "w13_bias", "w2_bias")
        return dict(zip(keys, converter(backend, SimpleNamespace(params_dtype=c.dtype), *(t[k] for k in keys))))

    def _nvfp4(self, name: str, c: Case) -> dict[str, Tensor]:
        t, m = loaded(name, c.hidden, c.intermediate), made(name)
        divisors = torch.stack([m[f"{k}_divisor"] for k in ("gate", "up") if f"{k}_divisor" in m], dim=1), m["down_divisor"]
        layer = SimpleNamespace(
            params_dtype=c.dtype, num_experts=c.experts, hidden_size=c.hidden, intermediate_size_per_partition=c.intermediate,
            w13_weight_scale=t["w13_scale"].view(torch.float8_e4m3fn), w2_weight_scale=t["w2_scale"].view(torch.float8_e4m3fn),
            w13_input_scale=None, w2_input_scale=None, w13_input_global_scale=torch.ones(1), w2_input_global_scale=torch.ones(1),
            _expert_routing_tables=lambda: None)
        if c.checkpoint == COMPRESSED_NV:
            layer.w13_weight_global_scale, layer.w2_weight_global_scale = divisors
            layer.w13_weight_packed, layer.w2_weight_packed = (torch.nn.Parameter(t[k], requires_grad=False) for k in ("w13", "w2"))
            function = self.method("compressed_tensors/compressed_tensors_moe/compressed_tensors_moe_w4a4_nvfp4.py",
                                   "CompressedTensorsW4A4Nvfp4MoEMethod")
        else:
            layer.w13_weight_scale_2, layer.w2_weight_scale_2 = (1.0 / d for d in divisors)
            layer.w13_weight, layer.w2_weight = t["w13"], t["w2"]
            function = self.method("modelopt.py", "ModelOptNvFp4FusedMoE")
        this = MagicMock(nvfp4_backend=self.nvfp4.NvFp4MoeBackend.MARLIN, per_token_activation=False, use_a16=False)
        this.moe.is_act_and_mul = c.gated
        function(this, layer)
        return {"w13": layer.w13_weight, "w2": layer.w2_weight, "w13_scale": layer.w13_weight_scale, "w2_scale": layer.w2_weight_scale,
                "w13_alpha": layer.w13_weight_scale_2, "w2_alpha": layer.w2_weight_scale_2}

    def activations(self) -> list[dict[str, object]]:
        """For activations and configurations: the torch.ops._C function that apply_moe_activation calls, and its numbers."""
        out, module = [], self.activation
        for name in ("SILU", "SWIGLUOAI", "SWIGLUOAI_UNINTERLEAVE"):
            for alpha, beta, limit in ((None, None, None), (None, None, 10.0), (1.5, 0.5, None), (1.5, 0.5, 10.0)):
                quant = SimpleNamespace(gemm1_alpha=None, gemm1_beta=None, gemm1_clamp_limit=None)
                model = SimpleNamespace(swiglu_alpha=alpha, swiglu_beta=beta, swiglu_limit=limit, activation_situ_beta=None,
                                        activation_situ_linear_beta=None)
                library = MagicMock()
                module.torch = SimpleNamespace(ops=SimpleNamespace(_C=library))
                called: list[object] = ["AssertionError", []]
                try:
                    module.apply_moe_activation(module.MoEActivation[name], torch.zeros(2, 4), torch.zeros(2, 8),
                                                activation_config=module.ApplyMoEActivationConfig.from_configs(model, quant))
                    ((op, arguments, _),) = library.mock_calls
                    called = [op, list(arguments[2:])]
                except AssertionError:
                    pass
                module.torch = torch
                out.append({"activation": name, "alpha": alpha, "beta": beta, "limit": limit, "called": called})
        return out


def main(sources: str) -> None:
    from safetensors.torch import save_file

    engine, folder = Engine(Path(sources)), Path(__file__).parent
    for name in CASES:
        operands = {k: t.contiguous() for k, t in engine.convert(name).items()}
        file = folder / f"marlin-{name}.safetensors"
        save_file(operands, file, metadata={"vllm": "0.33"})  # one key: the order of several is random
        print(f"{file.name}: {file.stat().st_size} bytes,", ", ".join(f"{k} {t.dtype} {list(t.shape)}" for k, t in operands.items()))
    save_file({}, folder / "marlin-activations.safetensors", metadata={"calls": json.dumps(engine.activations())})


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    main(sys.argv[1])
