"""Small NVFP4 checkpoints to test with: the same layer for the same seed, as ModelOpt or as compressed-tensors stores it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

MODELOPT, COMPRESSED = "ModelOpt NVFP4", "compressed-tensors nvfp4-pack-quantized"
GATED_MODULE, PLAIN_MODULE = "model.layers.0.mlp.experts", "backbone.layers.1.mixer.experts"  # as Qwen and as Nemotron name theirs


def tensors(kind: str, *, experts: int = 4, hidden: int = 320, intermediate: int = 192, gated: bool = True, differ: bool = True,
            biases: bool = False, inputs: bool = True, seed: int = 0) -> dict[str, Tensor]:
    """One layer's tensors by name. Both kinds hold the same numbers: ModelOpt's multiplier is float32 1 / compressed-tensors' divisor.

    Payloads have every code; block scales lie between 2^-2 and 2^2 and differ by row and block. Global and input scales differ by
    expert; gate and up of an expert have their own (differ), or share them as exporters make them. Weights come out below 0.15.
    inputs: False leaves the input scales out (W4A16). biases: bf16.
    """
    g = torch.Generator().manual_seed(seed)
    out: dict[str, Tensor] = {}
    module, words = (GATED_MODULE, ("gate_proj", "up_proj", "down_proj")) if gated else (PLAIN_MODULE, ("up_proj", "down_proj"))
    for e in range(experts):
        shared: tuple[Tensor, Tensor] | None = None
        for word in words:
            rows, columns = (hidden, intermediate) if word == "down_proj" else (intermediate, hidden)
            payload = torch.randint(0, 256, (rows, columns // 2), generator=g, dtype=torch.uint8)
            scales = torch.randint(0x28, 0x48, (rows, columns // 16), generator=g, dtype=torch.uint8).view(torch.float8_e4m3fn)
            drawn = tuple((torch.rand(1, generator=g) + 0.5) * size for size in (2.0**8, 2.0**9))  # divisors: of the weight, of its input
            if word == "up_proj" and shared is not None and not differ:
                drawn = shared
            shared = drawn
            name = f"{module}.{e}.{word}."
            weight_divisor, input_divisor = drawn
            if kind == MODELOPT:
                out |= {name + "weight": payload, name + "weight_scale": scales}
                out[name + "weight_scale_2"] = (1.0 / weight_divisor).reshape(())
                out |= {name + "input_scale": (1.0 / input_divisor).reshape(())} if inputs else {}
            else:
                out |= {name + "weight_packed": payload, name + "weight_scale": scales, name + "weight_global_scale": weight_divisor}
                out |= {name + "input_global_scale": input_divisor} if inputs else {}
            if biases:
                out[name + "bias"] = torch.randn(rows, generator=g).bfloat16()
    return out


def config(kind: str, *, experts: int = 4, hidden: int = 320, intermediate: int = 192, gated: bool = True,
           inputs: bool = True) -> dict[str, Any]:
    """config.json of such a checkpoint, its quantization_config as the exporters write it."""
    weights: dict[str, Any] = {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False}
    activations = weights
    quantisation = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    if kind == COMPRESSED:
        weights = weights | {"strategy": "tensor_group", "symmetric": True}
        activations = weights | {"dynamic": "local"}
        quantisation = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"]}
    group = {"weights": weights, "input_activations": activations if inputs else None, "targets": ["Linear"]}
    model = ({"model_type": "qwen3_moe", "hidden_act": "silu", "num_experts": experts} if gated else
             {"model_type": "nemotron_h", "mlp_hidden_act": "relu2", "n_routed_experts": experts})
    return {**model, "hidden_size": hidden, "moe_intermediate_size": intermediate,
            "quantization_config": {**quantisation, "config_groups": {"group_0": group}}}


def write(folder: Path, kind: str, *, experts: int = 4, hidden: int = 320, intermediate: int = 192, gated: bool = True, differ: bool = True,
          biases: bool = False, inputs: bool = True, seed: int = 0) -> Path:
    """Write a checkpoint of one layer into `folder`, made if it is not there, and return the folder. `kind` is MODELOPT or COMPRESSED."""
    sizes: dict[str, Any] = dict(experts=experts, hidden=hidden, intermediate=intermediate, gated=gated, inputs=inputs)
    return save(folder, tensors(kind, **sizes, differ=differ, biases=biases, seed=seed), config(kind, **sizes))


def save(folder: Path, made: dict[str, Tensor], stated: dict[str, Any]) -> Path:
    """Write tensors and config.json into `folder`, and return it."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: t.clone(memory_format=torch.contiguous_format) for name, t in made.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(stated))
    return folder
