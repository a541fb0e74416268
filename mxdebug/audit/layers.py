"""Layers that can show a fault, and a checkpoint of them as an engine loads it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from ..contracts import contract
from ..formats import BlockTensor
from ..layouts import RowOrder
from ..recipes import Recipe, logical_operands
from ..reference import Activation, MoELayer

# Neither size is a multiple of what any path pads to, and no operand has 16 scale columns, where 128x4 is its own inverse.
SIZES = (352, 672)
DIVISORS = ("compressed-tensors nvfp4-pack-quantized",)  # checkpoint kinds that hold 1 / global scale


def made_layer(path: str, *, gated: bool = True, seed: int = 0) -> MoELayer:
    """A layer for a path, with which every fault of an operand shows: three experts, intermediate 352 (or 320), hidden 672.

    Block scales differ by row and block, biases by row; NVFP4's global scales by expert, by half and between w13 and w2, its input
    scales by expert and between w13 and w2. Biases where the path takes them. intermediate is 320 for a gated layer of
    nvfp4/FLASHINFER_CUTLASS, for which vLLM pads nothing.
    """
    c, g, experts = contract(path), torch.Generator().manual_seed(seed), 3
    hidden, intermediate = SIZES[1], 320 if path == "nvfp4/FLASHINFER_CUTLASS" and gated else SIZES[0]
    outer = c.weights.outer

    def positive(scale: float) -> Tensor:
        return (torch.rand(experts, generator=g) + 0.5) * scale

    def weight(rows: int, columns: int, scale: float) -> BlockTensor:
        low, high = (0x28, 0x58) if outer else (104, 140)  # E4M3 2^-2 to 2^4; E8M0 2^-23 to 2^13
        scales = torch.randint(low, high, (experts, rows, columns // c.weights.block), generator=g, dtype=torch.uint8)
        payload = torch.randint(0, 256, (experts, rows, columns // 2), generator=g, dtype=torch.uint8)
        return BlockTensor(payload, scales, c.weights, positive(scale) if outer else None)

    def bias(rows: int) -> Tensor | None:
        return None if outer else torch.randn(experts, rows, generator=g).bfloat16()

    gate, up, down = (
        weight(intermediate, hidden, 2.0**-8) if gated else None,
        weight(intermediate, hidden, 2.0**-8),
        weight(hidden, intermediate, 2.0**-10),
    )
    inputs = {"w13_input_scale": positive(2.0**-9), "w2_input_scale": positive(2.0**-7)} if outer else {}
    return MoELayer(
        gate,
        up,
        down,
        Activation("silu" if gated else "relu2"),
        bias(intermediate) if gated else None,
        bias(intermediate),
        bias(hidden),
        **inputs,
    )


def loaded(recipe: Recipe, layer: MoELayer, *, rows: RowOrder | None = None, padded: tuple[int, int] | None = None) -> dict[str, Tensor]:
    """The parameters that a converter starts from: allocated as zeros, and a checkpoint of `layer` loaded into them. New memory each time.

    rows    the order of gate and up in the file; None: the recipe's
    padded  (intermediate, hidden) as allocated; None: as vLLM does, which pads MXFP4 here and leaves NVFP4's padding to the converter

    w13, w2              uint8 [E, rows, K/2]; rows that alternate in the file fill the start, [w1; w3] the start of each half
    w13_scale, w2_scale  [E, rows, K/block]; MXFP4 uint8, NVFP4 float8_e4m3fn
    w13_bias, w2_bias    bfloat16 [E, rows], where the layer has them
    NVFP4, w13_scale_2 [E, halves], w2_scale_2 [E]: global scales, and w13_input_scale [E, halves], w2_input_scale [E] as the file has
    them: multipliers (ModelOpt) or divisors (compressed-tensors)
    """
    fmt, logical = recipe.contract.weights, logical_operands(layer)
    rows = recipe.rows if rows is None else rows
    i, h = layer.intermediate, layer.hidden
    pi, ph = padded or ((i, h) if fmt.outer else recipe.plan(layer).padded)
    alternate = layer.gate is not None and rows.name not in ("[w1; w3]", "[w3; w1]")
    halves = 1 if layer.gate is None else 2

    def allocated(key: str, t: Tensor) -> Tensor:
        per = {"w13": 2, "w2": 2, "w13_scale": fmt.block, "w2_scale": fmt.block}.get(key)
        parts, size = (halves, pi) if key.startswith("w13") else (1, ph)
        columns = () if per is None else (0, (ph if key.startswith("w13") else pi) // per - t.shape[2])
        if parts == 2:
            t = t[:, rows.indices(i)]
        parts, size = (1, 2 * pi) if alternate and parts == 2 else (parts, size)
        t = t.unflatten(1, (parts, -1))
        return pad(t, (*columns, 0, size - t.shape[2])).flatten(1, 2).clone()

    out = {key: allocated(key, t) for key, t in logical.items() if t is not None}
    if fmt.outer:
        for key in ("w13_scale", "w2_scale"):
            out[key] = out[key].view(torch.float8_e4m3fn)
        first = [layer.up] if layer.gate is None else [layer.gate, layer.up]
        scales = {
            "w13_scale_2": torch.stack([w.global_scale for w in first], 1),
            "w2_scale_2": layer.down.global_scale,
            "w13_input_scale": layer.w13_input_scale[:, None].repeat(1, halves),
            "w2_input_scale": layer.w2_input_scale,
        }
        out |= {k: 1.0 / t if recipe.checkpoint in DIVISORS else t.clone() for k, t in scales.items()}
    return out
