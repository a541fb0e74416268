"""Small checkpoints of every kind that `mxdebug scan` reads: healthy ones, to put faults into."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

GPT_OSS, CT_MXFP4, CT_NVFP4, MODELOPT, QUARK = (
    "gpt-oss",
    "compressed-tensors mxfp4-pack-quantized",
    "compressed-tensors nvfp4-pack-quantized",
    "ModelOpt NVFP4",
    "Quark MXFP4",
)
MODELOPT_MXFP8, CT_MXFP8 = "ModelOpt MXFP8", "compressed-tensors mxfp8-quantized"
KINDS = (GPT_OSS, CT_MXFP4, CT_NVFP4, MODELOPT, QUARK, MODELOPT_MXFP8, CT_MXFP8)
LAYERS, EXPERTS, HIDDEN, INTERMEDIATE = 2, 4, 256, 512
EXPERT = "model.layers.{}.mlp.experts.{}.{}"
ATTENTION = "model.layers.{}.self_attn.{}"


def _bytes(g: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=g, dtype=torch.uint8)


def weight(
    kind: str, g: torch.Generator, n: int, k: int, global_scale: float = 2.0**-10, input_scale: float = 2.0**-9
) -> dict[str, Tensor]:
    """leaf -> tensor of one healthy weight [n, k]: every payload code, scales in the middle of their range that differ by row and block."""
    if kind == GPT_OSS:
        raise ValueError("gpt-oss has fused weights")
    nvfp4, packed = "NVFP4" in kind or "nvfp4" in kind, "MXFP8" not in kind and "mxfp8" not in kind
    payload = _bytes(g, 0, 256, n, k // 2) if packed else _bytes(g, 0, 0x7E, n, k).view(torch.float8_e4m3fn)
    scale = _bytes(g, 0x28, 0x78, n, k // 16).view(torch.float8_e4m3fn) if nvfp4 else _bytes(g, 115, 125, n, k // 32)
    out = {"weight_packed" if kind in (CT_MXFP4, CT_NVFP4) else "weight": payload, "weight_scale": scale}
    if kind == MODELOPT:
        out |= {"weight_scale_2": torch.tensor(global_scale), "input_scale": torch.tensor(input_scale)}
    if kind == CT_NVFP4:
        out |= {"weight_global_scale": torch.tensor([1 / global_scale]), "input_global_scale": torch.tensor([1 / input_scale])}
    return out


def tensors(kind: str, seed: int = 0) -> dict[str, Tensor]:
    """Two layers: four experts, q_proj, k_proj, v_proj, o_proj (gpt-oss: in bf16), a router and norms."""
    g, out = torch.Generator().manual_seed(seed), {}
    for layer in range(LAYERS):
        if kind == GPT_OSS:
            module = f"model.layers.{layer}.mlp.experts."
            for name, n, k in (("gate_up_proj", 2 * INTERMEDIATE, HIDDEN), ("down_proj", HIDDEN, INTERMEDIATE)):
                out[f"{module}{name}_blocks"] = _bytes(g, 0, 256, EXPERTS, n, k // 32, 16)
                out[f"{module}{name}_scales"] = _bytes(g, 115, 125, EXPERTS, n, k // 32)
                out[f"{module}{name}_bias"] = torch.zeros(EXPERTS, n, dtype=torch.bfloat16)
        else:
            for e in range(EXPERTS):
                for name, n, k in (
                    ("gate_proj", INTERMEDIATE, HIDDEN),
                    ("up_proj", INTERMEDIATE, HIDDEN),
                    ("down_proj", HIDDEN, INTERMEDIATE),
                ):
                    out |= {f"{EXPERT.format(layer, e, name)}.{leaf}": t for leaf, t in weight(kind, g, n, k).items()}
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            module = ATTENTION.format(layer, name)
            plain = {"weight": torch.ones(HIDDEN, HIDDEN, dtype=torch.bfloat16)}
            out |= {f"{module}.{leaf}": t for leaf, t in (plain if kind == GPT_OSS else weight(kind, g, HIDDEN, HIDDEN)).items()}
        out[f"model.layers.{layer}.mlp.gate.weight"] = torch.ones(EXPERTS, HIDDEN, dtype=torch.bfloat16)
        out[f"model.layers.{layer}.input_layernorm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    return out | {"lm_head.weight": torch.ones(64, HIDDEN, dtype=torch.bfloat16)}


def config(kind: str) -> dict[str, Any]:
    """config.json with a quantization_config as the exporters write it."""
    group = {"num_bits": 4, "type": "float", "group_size": 16 if kind == CT_NVFP4 else 32}
    compressed = {
        "quant_method": "compressed-tensors",
        "format": kind.partition(" ")[2],
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": group}},
    }
    quantisation = {
        GPT_OSS: {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]},
        MODELOPT: {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.*.mlp.gate"]},
        MODELOPT_MXFP8: {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head", "model.layers.*.mlp.gate"]},
        QUARK: {
            "quant_method": "quark",
            "exclude": ["lm_head"],
            "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32, "qscheme": "per_group"}},
        },
    }.get(kind, compressed)
    return {
        "model_type": "made",
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_local_experts": EXPERTS,
        "quantization_config": quantisation,
    }


def save(folder: Path, made: dict[str, Tensor], stated: dict[str, Any], shards: int = 1) -> Path:
    """Write a checkpoint, with an index where it has several shards, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    names, weight_map = list(made), {}
    for i in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        save_file({n: made[n].contiguous() for n in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(stated))
    return folder
