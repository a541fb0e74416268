"""Let compressed-tensors write the NVFP4 W4A16 checkpoint that ships with the package: mxdebug/data/checkpoints/nvfp4-w4a16-tiny.

    python tests/data/make_w4a16_checkpoint.py [FOLDER]        (written with compressed-tensors 0.20.1)

The linear layers of one decoder layer. Their sizes are for the conversion, not for a model that runs (13 query heads do not share 6 key
heads): every N and every K says something about padding to 64, see SHAPES. The library computes block and global scales, codes, tensors
and quantization_config. Made here are the weights before it, in float64 and rounded to bf16, so that every CPU gives the same bytes.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import Tensor

ATTENTION, MLP = "model.layers.0.self_attn.", "model.layers.0.mlp."
QKV = (f"{ATTENTION}q_proj", f"{ATTENTION}k_proj", f"{ATTENTION}v_proj")
GATE_UP = (f"{MLP}gate_proj", f"{MLP}up_proj")
O_PROJ, DOWN = f"{ATTENTION}o_proj", f"{MLP}down_proj"
SHARED = (QKV, (O_PROJ,), GATE_UP, (DOWN,))  # one global scale each, as exporters make them
HIDDEN, INTERMEDIATE = 352, 384  # 352 is a multiple of 16 and of 32, not of 64
SHAPES = {  # [N, K]. qkv: N 200 and K need padding; o: both; gate_up: K only; down: N only
    QKV[0]: (104, HIDDEN), QKV[1]: (48, HIDDEN), QKV[2]: (48, HIDDEN), O_PROJ: (HIDDEN, 96),
    GATE_UP[0]: (INTERMEDIATE, HIDDEN), GATE_UP[1]: (INTERMEDIATE, HIDDEN), DOWN: (HIDDEN, INTERMEDIATE)}
CONFIG = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_act": "silu", "hidden_size": HIDDEN,
          "intermediate_size": INTERMEDIATE, "num_hidden_layers": 1, "num_attention_heads": 13, "num_key_value_heads": 6, "head_dim": 8,
          "torch_dtype": "bfloat16"}
FOLDER = Path(__file__).parents[2] / "mxdebug" / "data" / "checkpoints" / "nvfp4-w4a16-tiny"


def weights() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(bf16 weights [N, K] before quantisation, bf16 biases [N] of q, k, v), by module.

    Sizes differ by row and by block of 16. Every ninth row is so small that all its E4M3 block scales are subnormal (2^-9 to 2^-6), and
    so is one block in 25 of the other rows: to see what becomes of them where a kernel's preparation flushes such scales.
    """
    g = torch.Generator().manual_seed(14)
    out: dict[str, Tensor] = {}

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=g, dtype=torch.float64)

    for joined in SHARED:
        made, small, target = {}, {}, {}
        for module in joined:
            n, k = SHAPES[module]
            made[module] = 0.02 * (normal(n, k // 16, 16) * normal(n, 1, 1).exp() * (0.5 * normal(n, k // 16, 1)).exp())
            small[module] = torch.rand(n, k // 16, generator=g, dtype=torch.float64) < 1 / 25
            small[module][4::9] = True
            target[module] = 2.0 ** (-8.6 + 2.4 * torch.rand(n, k // 16, generator=g, dtype=torch.float64))
        amax = max(float(w.abs().amax(2)[~small[m]].max()) for m, w in made.items())
        for module, w in made.items():
            scales = 448 * w.abs().amax(2) / amax  # what the library will make of each block
            factor = torch.where(small[module], target[module] / scales, 1.0)
            out[module] = (w * factor[..., None]).flatten(1).bfloat16()
    return out, {module: (0.5 * normal(SHAPES[module][0])).bfloat16() for module in QKV}


def write(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Let the library write config.json and model.safetensors. Gives (tensors as stored, bf16 weights as it decompresses them)."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme, apply_quantization_config
    from compressed_tensors.quantization.quant_scheme import NVFP4A16
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam
    from safetensors.torch import save_file

    made, biases = weights()
    root = torch.nn.Module()
    for name, w in made.items():
        *path, last = name.split(".")
        at = root
        for step in path:
            if not hasattr(at, step):
                at.add_module(step, torch.nn.Module())
            at = getattr(at, step)
        module = torch.nn.Linear(w.shape[1], w.shape[0], bias=name in biases, dtype=torch.bfloat16)
        module.weight.data.copy_(w)
        if name in biases:
            module.bias.data.copy_(biases[name])
        at.add_module(last, module)
    scheme = QuantizationScheme(targets=["Linear"], **NVFP4A16)
    apply_quantization_config(root, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]), show_progress=False)
    for joined in SHARED:
        low, high = (torch.stack([getattr(made[m].float(), way)() for m in joined]) for way in ("min", "max"))
        divisor = generate_gparam(low.min().reshape(1), high.max().reshape(1))
        for name in joined:
            module, blocks = root.get_submodule(name), made[name].unflatten(-1, (-1, 16))
            scales, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=divisor)
            module.weight_scale.data, module.weight_global_scale.data = scales, divisor.clone()
    compressor = ModelCompressor.from_pretrained_model(root)
    compressor.compress_model(root)
    stored = {name: t.detach().clone().contiguous() for name, t in root.state_dict().items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(CONFIG))
    compressor.update_config(str(folder))
    compressor.decompress_model(root)
    return stored, {name: root.get_submodule(name).weight.detach().clone() for name in made}


if __name__ == "__main__":
    to = Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER
    write(to)
    print(to, *(f"{p.name} {p.stat().st_size}" for p in sorted(to.iterdir())))
