"""Small NVFP4 models of linear layers to test with: a decoder layer's attention and MLP, as ModelOpt or as compressed-tensors stores it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from making_nvfp4 import COMPRESSED, MODELOPT, save
from torch import Tensor

from mxdebug.formats import NVFP4, quantise

ATTENTION, MLP = "model.layers.0.self_attn.", "model.layers.0.mlp."
QKV, GATE_UP = (f"{ATTENTION}q_proj", f"{ATTENTION}k_proj", f"{ATTENTION}v_proj"), (f"{MLP}gate_proj", f"{MLP}up_proj")
OTHERS = (f"{ATTENTION}o_proj", f"{MLP}down_proj")
JOINED = (QKV, GATE_UP, OTHERS[:1], OTHERS[1:])  # layers that share a global scale, as exporters make them


def shapes(group: int = 16) -> dict[str, tuple[int, int]]:
    """[N, K] of each module. Neither K is a multiple of 64; with blocks of 32 they are other ones, for 32 divides neither 336 nor 208."""
    hidden, intermediate = {16: (336, 208), 32: (352, 224)}[group]
    return {QKV[0]: (96, hidden), QKV[1]: (32, hidden), QKV[2]: (32, hidden), OTHERS[0]: (hidden, 96),
            GATE_UP[0]: (intermediate, hidden), GATE_UP[1]: (intermediate, hidden), OTHERS[1]: (hidden, intermediate)}


def weights(*, group: int = 16, seed: int = 0) -> dict[str, Tensor]:
    """float32 weights before quantisation, by module. Their size differs from row to row and block to block, by a factor e and more."""
    g = torch.Generator().manual_seed(seed)
    out = {}
    for module, (n, k) in shapes(group).items():
        blocks = torch.randn(n, k // group, generator=g).exp().repeat_interleave(group, 1)
        out[module] = 0.02 * torch.randn(n, k, generator=g) * torch.randn(n, 1, generator=g).exp() * blocks
    return out


def divisors(made: dict[str, Tensor], *, differ: bool = False) -> dict[str, Tensor]:
    """float32 [1] by module, 448 * 6 / amax like compressed-tensors' generate_gparam: amax of all joined parts, or (differ) of each."""
    amax = {module: w.abs().amax() for module, w in made.items()}
    shared = {module: module if differ else joined for joined in JOINED for module in joined}
    return {module: (448 * 6 / max(amax[m] for m in made if shared[m] == shared[module])).reshape(1) for module in made}


def tensors(kind: str, *, differ: bool = False, bias: bool = False, group: int = 16, inputs: bool = False,
            seed: int = 0) -> dict[str, Tensor]:
    """The tensors by name. Both kinds hold the same numbers: ModelOpt's multiplier is float32 1 / compressed-tensors' divisor."""
    made, out = weights(group=group, seed=seed), {}
    g = torch.Generator().manual_seed(seed + 1)
    for (module, w), divisor in zip(made.items(), divisors(made, differ=differ).values(), strict=True):
        multiplier = (1.0 / divisor).reshape(())
        q = quantise(w, replace(NVFP4, block=group), global_scale=multiplier)
        scales, input_divisor = q.scales.view(torch.float8_e4m3fn), (torch.rand(1, generator=g) + 0.5) * 2.0**9
        if kind == MODELOPT:
            out |= {f"{module}.weight": q.payload, f"{module}.weight_scale": scales, f"{module}.weight_scale_2": multiplier}
            out |= {f"{module}.input_scale": (1.0 / input_divisor).reshape(())} if inputs else {}
        else:
            out |= {f"{module}.weight_packed": q.payload, f"{module}.weight_scale": scales, f"{module}.weight_global_scale": divisor}
            out |= {f"{module}.input_global_scale": input_divisor} if inputs else {}
        if bias and module in QKV:
            out[f"{module}.bias"] = torch.randn(w.shape[0], generator=g).bfloat16()
    out["lm_head.weight"] = torch.zeros(8, shapes(group)[QKV[0]][1], dtype=torch.bfloat16)  # as most exporters leave it
    return out


def config(kind: str, *, group: int = 16, inputs: bool = False) -> dict[str, Any]:
    """config.json, its quantization_config as the exporters write it; without inputs it says weights only (W4A16)."""
    args: dict[str, Any] = {"num_bits": 4, "type": "float", "group_size": group, "dynamic": False}
    if kind == MODELOPT:
        stated: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "NVFP4" if inputs else "W4A16_NVFP4", "ignore": ["lm_head"]}
        activations = args
    else:
        args = args | {"strategy": "tensor_group", "symmetric": True}
        stated = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized", "ignore": ["lm_head"]}
        activations = args | {"dynamic": "local"}
    hidden, intermediate = shapes(group)[QKV[0]][1], shapes(group)[GATE_UP[0]][0]
    groups = {"group_0": {"weights": args, "input_activations": activations if inputs else None, "targets": ["Linear"]}}
    return {"model_type": "llama", "hidden_act": "silu", "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": 1,
            "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 32, "quantization_config": {**stated, "config_groups": groups}}


def write_modelopt(folder: Path, *, differ: bool = False, bias: bool = False, group: int = 16, inputs: bool = False, seed: int = 0) -> Path:
    """Write config.json and model.safetensors as ModelOpt does, and return the folder, made if it is not there.

    differ: parts of qkv and of gate_up have global scales of their own. bias: q, k, v have one in bf16. inputs: scales of the
    activations too. group: 32 stands for the exporter's mistake, and gives other sizes (`shapes`).
    """
    return save(folder, tensors(MODELOPT, differ=differ, bias=bias, group=group, inputs=inputs, seed=seed),
                config(MODELOPT, group=group, inputs=inputs))


def write_compressed_tensors(folder: Path, *, differ: bool = False, bias: bool = False, group: int = 16, inputs: bool = False,
                             seed: int = 0) -> Path:
    """The same layers, as compressed-tensors stores them; arguments as of `write_modelopt`."""
    return save(folder, tensors(COMPRESSED, differ=differ, bias=bias, group=group, inputs=inputs, seed=seed),
                config(COMPRESSED, group=group, inputs=inputs))
