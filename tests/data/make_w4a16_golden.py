"""Run vLLM's own conversion and forward of NVFP4 W4A16 linear layers on made layers and keep what they leave: vllm-w4a16-linear.safetensors.

    python tests/data/make_w4a16_golden.py SOURCES        (a folder that holds vllm/, as the 0.33.0 wheel does)

Executed from vLLM's sources: KNvfp4Static.process (ModelOpt's global scale), CompressedTensorsW4A4Fp4.process_weights_after_loading,
FlashInferCuteDslNvFp4W4A16LinearKernel (process_weights_after_loading, apply_weights), pad_nvfp4_weight_for_cutlass, swizzle_blockscale,
slice_nvfp4_output. FlashInfer's preparation is FlashInfer's own, on the CPU, for both layouts. Its GEMM needs Blackwell; in its place stands
FlashInfer's trace reference of that layout, so `output` is vLLM's forward around an implementation that is not mxdebug's.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor

FILE = Path(__file__).parent / "vllm-w4a16-linear.safetensors"
MODELOPT, COMPRESSED = "ModelOpt NVFP4", "compressed-tensors nvfp4-pack-quantized"
# name: checkpoint kind, layout, rows of the parts, K, whether the parts' global scales differ, bias
CASES = {
    f"{family}-{name}": (kind, family, parts, k, differ, bias)
    for family in ("sm100", "sm12x")
    for name, kind, parts, k, differ, bias in (
        ("aligned", MODELOPT, (128,), 384, False, False), ("n-unaligned", MODELOPT, (72, 40, 48), 320, True, True),
        ("k-unaligned", COMPRESSED, (128,), 336, False, True), ("both-unaligned", COMPRESSED, (104, 96), 352, True, False))}


def made(name: str) -> tuple[object, Tensor, Tensor]:
    """(the layer, activations bf16 [2, 3, K], float32 [parts] as a file of the case's kind stores the global scales)."""
    from dataclasses import replace

    from mxdebug.recipes.w4a16.examples import made_linear

    kind, _, parts, k, differ, bias = CASES[name]
    x = torch.randn(2, 3, k, generator=torch.Generator().manual_seed(7)).bfloat16()
    layer = made_linear(sum(parts), k, parts=parts, differ=differ, bias=bias, seed=len(parts))
    if kind == MODELOPT:
        return layer, x, layer.global_scales
    divisors = 1.0 / layer.global_scales
    return replace(layer, global_scales=1.0 / divisors), x, divisors


def main(sources: Path) -> None:
    import vllm_sources as given

    linear, quant = "vllm.model_executor.kernels.linear.nvfp4", "vllm.model_executor.layers.quantization"
    real = frozenset({*given.REAL, f"{linear}.base", f"{linear}.flashinfer",
                      f"{quant}.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4"})
    import flashinfer.gemm.gemm_bf16_fp4_cute_dsl as cute_dsl
    from flashinfer.trace.templates import gemm as traces
    from safetensors.torch import save_file

    Tensor.cuda = lambda t: t  # vLLM's swizzle_blockscale ends with it
    now = SimpleNamespace(family="sm100")

    def prepare(b: Tensor, b_descale: Tensor, alpha: Tensor, *, backend: str) -> tuple[Tensor, Tensor, Tensor]:
        assert backend == "cute-dsl"
        return (cute_dsl._prepare_cute_dsl_sm12x if now.family == "sm12x" else cute_dsl._prepare_cute_dsl_sm100)(b, b_descale, alpha, 16)

    @torch.library.custom_op("vllm::flashinfer_mm_bf16_fp4", mutates_args=())
    def gemm(a: Tensor, b: Tensor, b_scale: Tensor, global_scale: Tensor) -> Tensor:
        reference = traces._mm_bf16_fp4_cute_dsl_reference if b.dtype == torch.int32 else traces._mm_bf16_fp4_cute_dsl_sm100_reference
        return reference(a, b, b_scale, global_scale).to(torch.bfloat16)

    given.GIVEN["vllm.utils.flashinfer.flashinfer_prepare_bf16_fp4_weights"] = prepare
    given.find(sources, real)
    from vllm.model_executor.kernels.linear.nvfp4.flashinfer import FlashInferCuteDslNvFp4W4A16LinearKernel as Kernel
    from vllm.model_executor.layers.quantization.compressed_tensors.schemes.compressed_tensors_w4a4_nvfp4 import CompressedTensorsW4A4Fp4
    from vllm.model_executor.layers.quantization.modelopt import WEIGHT, KNvfp4Static

    kernel, kept = Kernel.__new__(Kernel), {}
    for name, (kind, family, parts, k, *_) in CASES.items():
        now.family = family
        layer, x, stored = made(name)
        module = torch.nn.Module()
        module.output_size_per_partition, module.input_size_per_partition = sum(parts), k
        module.weight_scale = torch.nn.Parameter(layer.scales.view(torch.float8_e4m3fn), requires_grad=False)
        payload = torch.nn.Parameter(layer.payload.clone(), requires_grad=False)
        if kind == MODELOPT:
            module.weight, module.weight_scale_2 = payload, torch.nn.Parameter(stored.clone(), requires_grad=False)
            KNvfp4Static().process(module, WEIGHT)
            kernel.process_weights_after_loading(module)
        else:
            module.weight_packed, module.weight_global_scale = payload, torch.nn.Parameter(stored.clone(), requires_grad=False)
            scheme = CompressedTensorsW4A4Fp4.__new__(CompressedTensorsW4A4Fp4)
            scheme.use_a16, scheme.kernel = True, kernel
            scheme.process_weights_after_loading(module)
        kept |= {f"{name}.payload": layer.payload, f"{name}.scales": layer.scales, f"{name}.weight": module.weight.data,
                 f"{name}.weight_scale": module.weight_scale.data.contiguous(), f"{name}.strides": torch.tensor(module.weight_scale.data.stride()),
                 f"{name}.weight_global_scale": module.weight_global_scale.data, f"{name}.weights_padding_cols": torch.tensor(module.weights_padding_cols),
                 f"{name}.output": kernel.apply_weights(module, x, layer.bias)}
        print(name, {key.partition(".")[2]: list(t.shape) for key, t in kept.items() if key.startswith(name)})
    save_file({key: t.contiguous() for key, t in kept.items()}, FILE, {"vllm": "0.33.0", "flashinfer": "0.7.4"})
    print(f"{FILE.name}: {FILE.stat().st_size} bytes")
    print("vLLM's fake implementation:", _fake(sources) or "right")


def _fake(sources: Path) -> list[str]:
    """What mxdebug says of vLLM's own fake implementation."""
    from mxdebug.recipes.w4a16.op import wrong_fakes

    tree = ast.parse((sources / "vllm/utils/flashinfer.py").read_text())
    function = next(f for f in ast.walk(tree) if isinstance(f, ast.FunctionDef) and f.name == "flashinfer_mm_bf16_fp4_fake")
    function.decorator_list, names = [], {"torch": torch}
    exec(compile(ast.fix_missing_locations(ast.Module([function], [])), "flashinfer.py", "exec"), names)  # noqa: S102
    return wrong_fakes(names[function.name])


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[2])]
    main(Path(sys.argv[1]))
