"""Small healthy checkpoints of every kind that `mxdebug scan` reads: to put faults into."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..checkpoints.kinds import COMPRESSED_TENSORS_NVFP4, GPT_OSS, MODELOPT_NVFP4
from .folder import INDEX
from .kinds import KINDS, MODELOPT_MXFP8, QUARK_MXFP4, Kind
from .stated import CONFIG

LAYERS, EXPERTS, HIDDEN, INTERMEDIATE = 2, 4, 256, 512
EXPERT = "model.layers.{}.mlp.experts.{}.{}"
ATTENTION = "model.layers.{}.self_attn.{}"
PROJECTIONS = {"gate_proj": (INTERMEDIATE, HIDDEN), "up_proj": (INTERMEDIATE, HIDDEN), "down_proj": (HIDDEN, INTERMEDIATE)}  # [N, K]


def probe_checkpoint(kind: str, seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(tensors by name, config.json) of a healthy checkpoint of one of `kinds.KINDS`: two layers of four experts, q_proj, k_proj, v_proj and
    o_proj (gpt-oss: in bf16), a router and norms."""
    return probe_tensors(kind, seed), probe_config(kind)


def probe_weight(
    kind: Kind, g: torch.Generator, n: int, k: int, global_scale: float = 2.0**-10, input_scale: float = 2.0**-9
) -> dict[str, Tensor]:
    """leaf -> tensor of one healthy weight [n, k]: every payload code, scales in the middle of their range that differ by row and block."""
    payload = _bytes(g, 0, 256, n, k // 2) if kind.packed else _bytes(g, 0, 0x7E, n, k).view(torch.float8_e4m3fn)
    scale = _bytes(g, 0x28, 0x78, n, k // 16).view(torch.float8_e4m3fn) if kind.e4m3 else _bytes(g, 115, 125, n, k // 32)
    out = {kind.payload: payload, kind.scale[0]: scale}
    for leaf, number in ((kind.global_scale, global_scale), (kind.input_scale, input_scale)):
        if leaf is not None:
            out[leaf] = torch.tensor([1 / number]) if kind.divides else torch.tensor(number)
    return out


def save_shards(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any], shards: int = 1) -> Path:
    """Write a checkpoint, with an index where it has several shards, and return the folder, made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    names, weight_map = list(tensors), {}
    for i in range(shards):
        file = "model.safetensors" if shards == 1 else f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = names[i * len(names) // shards : (i + 1) * len(names) // shards]
        save_file({n: tensors[n].contiguous() for n in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        (folder / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    (folder / CONFIG).write_text(json.dumps(config))
    return folder


def _bytes(g: torch.Generator, low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=g, dtype=torch.uint8)


def probe_tensors(kind: str, seed: int = 0) -> dict[str, Tensor]:
    """The tensors of `probe_checkpoint`."""
    g, out = torch.Generator().manual_seed(seed), {}
    fused = kind == GPT_OSS
    for layer in range(LAYERS):
        if fused:
            module = f"model.layers.{layer}.mlp.experts."
            for name, n, k in (("gate_up_proj", 2 * INTERMEDIATE, HIDDEN), ("down_proj", HIDDEN, INTERMEDIATE)):
                out[f"{module}{name}_blocks"] = _bytes(g, 0, 256, EXPERTS, n, k // 32, 16)
                out[f"{module}{name}_scales"] = _bytes(g, 115, 125, EXPERTS, n, k // 32)
                out[f"{module}{name}_bias"] = torch.zeros(EXPERTS, n, dtype=torch.bfloat16)
        else:
            for e in range(EXPERTS):
                for name, shape in PROJECTIONS.items():
                    out |= {f"{EXPERT.format(layer, e, name)}.{leaf}": t for leaf, t in probe_weight(KINDS[kind], g, *shape).items()}
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            plain = {"weight": torch.ones(HIDDEN, HIDDEN, dtype=torch.bfloat16)}
            leaves = plain if fused else probe_weight(KINDS[kind], g, HIDDEN, HIDDEN)
            out |= {f"{ATTENTION.format(layer, name)}.{leaf}": t for leaf, t in leaves.items()}
        out[f"model.layers.{layer}.mlp.gate.weight"] = torch.ones(EXPERTS, HIDDEN, dtype=torch.bfloat16)
        out[f"model.layers.{layer}.input_layernorm.weight"] = torch.ones(HIDDEN, dtype=torch.bfloat16)
    return out | {"lm_head.weight": torch.ones(64, HIDDEN, dtype=torch.bfloat16)}


def probe_config(kind: str) -> dict[str, Any]:
    """The config.json of `probe_checkpoint`, with a quantization_config as the exporters write it."""
    group = {"num_bits": 4, "type": "float", "group_size": 16 if kind == COMPRESSED_TENSORS_NVFP4 else 32}
    compressed = {
        "quant_method": "compressed-tensors",
        "format": kind.partition(" ")[2],
        "ignore": ["lm_head", "re:.*mlp.gate$"],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": group}},
    }
    modelopt = {"quant_method": "modelopt", "ignore": ["lm_head", "model.layers.*.mlp.gate"]}
    quantisation = {
        GPT_OSS: {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]},
        MODELOPT_NVFP4: {**modelopt, "quant_algo": "NVFP4"},
        MODELOPT_MXFP8: {**modelopt, "quant_algo": "MXFP8"},
        QUARK_MXFP4: {
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
