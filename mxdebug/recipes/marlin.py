"""vLLM's Marlin fallback for MXFP4 and NVFP4: what it makes of a layer. What it computes between the GEMMs: marlin_activations.py.

A recipe only: no contract stands behind it. Rules: vLLM 0.33, quantization/utils/marlin_utils_fp4.py (the converters),
fused_moe/oracle/mxfp4.py and nvfp4.py (padding, quantisation config), fused_moe/experts/marlin_moe.py (the call).

Everything that is lost is lost in `MarlinPlan.canonical`; what follows only moves bytes and has an inverse.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import MxdebugError
from ..formats import E4M3, E4M3_SCALE, MXFP4, NVFP4, S0E5M3_MARLIN, BlockFormat, BlockTensor, recode_e4m3_to_s0e5m3_marlin
from ..layouts import GATE_UP, INTERLEAVED, RowOrder
from ..layouts.marlin import MARLIN_A8, MARLIN_A16, MarlinLayout, pack_bias, unpack_bias
from ..reference import MoELayer
from .marlin_activations import MARLIN_ACTIVATIONS, MarlinActivation

# Marlin shifts a code into a 16-bit float without correcting the exponent's bias, which divides by 2^(2^(e-1) - 2), e the float's
# exponent bits; S0E5M3 multiplies by 2^7. The global scale takes up both (nvfp4_marlin_process_global_scale).
_ALPHA_FACTOR = {torch.bfloat16: 2.0 ** (126 - 7), torch.float16: 2.0 ** (14 - 7)}
_FP8_EXPONENT = 6  # the same for MXFP4 and FP8 activations: 2^3 - 2^1, added to each E8M0 byte (mxfp4_marlin_process_scales)


@dataclass(frozen=True)
class MarlinLosses:
    """What a layer loses on its way into Marlin's form.

    scale_factor  "w13", "w2" -> the power of two that block scales are multiplied by and the global scale is divided by: no loss
    flushed       "w13", "w2" -> how many block scales above zero become 0
    negative      "w13", "w2" -> how many block scales below zero become 0
    up_factor     float32 [E]: what gate's global scale, used for both halves, makes of up's numbers (1.0 is right); None: no halves
    """

    scale_factor: Mapping[str, float]
    flushed: Mapping[str, int]
    negative: Mapping[str, int]
    up_factor: Tensor | None


@dataclass(frozen=True)
class MarlinRecipe:
    """How vLLM 0.33 brings one kind of checkpoint into Marlin's form; path and checkpoint are the key.

    rows       the order of gate and up in the file; Marlin keeps it
    align      (intermediate, hidden): multiples to which vLLM allocates; None: nothing is allocated beyond the layer
    biases     whether the layer has room for them
    fp8_aware  whether the converter knows of VLLM_MARLIN_INPUT_DTYPE=fp8. Where it does not, the kernel reads another layout
               than it was given
    source     vLLM's quantisation method and converter
    """

    path: str
    checkpoint: str
    format: BlockFormat
    rows: RowOrder
    align: tuple[int, int] | None
    biases: bool
    fp8_aware: bool
    source: str

    def plan(self, layer: MoELayer, *, dtype: torch.dtype, input_dtype: torch.dtype | None = None) -> MarlinPlan:
        """What happens to one layer (the part that a rank holds).

        dtype        the model's dtype; MXFP4 has kernels for bfloat16 only, NVFP4 for float16 too
        input_dtype  torch.float8_e4m3fn for VLLM_MARLIN_INPUT_DTYPE=fp8 (MXFP4 only; SM89, SM12x), None otherwise
        Raises MxdebugError for what vLLM or its kernel refuses.
        """
        self._check(layer, dtype, input_dtype)
        reads = MARLIN_A16 if input_dtype is None else MARLIN_A8
        return MarlinPlan(self, dtype, self._padded(layer), layout=reads if self.fp8_aware else MARLIN_A16, reads=reads)

    def _padded(self, layer: MoELayer) -> tuple[int, int]:
        i, h = layer.intermediate, layer.hidden
        if self.format is NVFP4:  # prepare_nvfp4_moe_layer_for_marlin
            if h % 64:
                raise MxdebugError("hidden size", "a multiple of 64", str(h), "vLLM pads only the intermediate size for NVFP4 on Marlin")
            return _round_up(i, 128 if h % 128 else 64), h
        if self.align is not None:  # mxfp4_round_up_hidden_size_and_intermediate_size
            return _round_up(i, self.align[0]), _round_up(h, self.align[1])
        for name, n, k in (("w13", 2 * i, h), ("w2", h, i)):
            if not ((n % 64 == 0 and k % 128 == 0) or (n % 128 == 0 and k % 64 == 0)):
                raise MxdebugError(f"{name} size", "multiples of 64 x 128 or of 128 x 64", f"{n} x {k}",
                                   f"vLLM does not pad {self.checkpoint} for Marlin, and no kernel has a tile for it")
        return i, h

    def _check(self, layer: MoELayer, dtype: torch.dtype, input_dtype: torch.dtype | None) -> None:
        for name, weights in _parts(layer).items():
            for w in weights:
                if w.format is not self.format:
                    raise MxdebugError(f"{name} weights", self.format.name, w.format.name, f"another path than {self.path}")
        dtypes = (torch.bfloat16,) if self.format is MXFP4 else (torch.bfloat16, torch.float16)
        if dtype not in dtypes:
            raise MxdebugError("dtype", " or ".join(map(str, dtypes)), str(dtype), f"Marlin has no other kernel for {self.format.name}")
        if input_dtype is not None and (self.format is NVFP4 or input_dtype != torch.float8_e4m3fn):
            raise MxdebugError("input_dtype", "None" if self.format is NVFP4 else "None or torch.float8_e4m3fn", str(input_dtype),
                               "vLLM refuses these activations for this format")
        if layer.gate is None and self.format is MXFP4:
            raise MxdebugError("layer", "gate and up weights", "a layer without gate", "vLLM's converter takes two halves for granted")
        given = [b is not None for b in (layer.gate_bias, layer.up_bias, layer.down_bias)]
        if any(given) and not (self.biases and all(given)):
            raise MxdebugError("biases", "all three or none" if self.biases else "none", f"{sum(given)} of 3",
                               "" if self.biases else f"vLLM has no bias for {self.checkpoint} on Marlin")
        if input_dtype is not None and self.fp8_aware:
            top = max(int(w.scales.max()) for weights in _parts(layer).values() for w in weights)
            if top > 255 - _FP8_EXPONENT:
                raise MxdebugError("block scales", f"E8M0 bytes up to {255 - _FP8_EXPONENT}", str(top),
                                   f"vLLM adds {_FP8_EXPONENT} for FP8 activations")


@dataclass(frozen=True)
class MarlinPlan:
    """A recipe applied to one layer. `padded` is (intermediate, hidden) as the kernel gets them.

    layout  what the converter lays out; reads: what the kernel reads. They differ only by a fault of vLLM: see `fp8_aware`
    """

    recipe: MarlinRecipe
    dtype: torch.dtype
    padded: tuple[int, int]
    layout: MarlinLayout
    reads: MarlinLayout

    def convert(self, layer: MoELayer) -> dict[str, Tensor | None]:
        """The operands as vLLM hands them to Marlin; None where there is none.

        w13, w2              int32 [E, H/16, 2 * rows of w13], [E, I/16, 2 H]; H and I padded
        w13_scale, w2_scale  [E, H/block, rows], [E, I/block, H]; float8_e8m0fnu (MXFP4) or float8_e4m3fn holding S0E5M3 (NVFP4)
        w13_alpha, w2_alpha  float32 [E], NVFP4 only
        w13_bias, w2_bias    bfloat16 [E, rows], [E, H], MXFP4 only

        Scales of activations are not among them: Marlin does not quantise its input to NVFP4.
        """
        layer = self.canonical(layer)
        i, h = self.padded
        halves = [w for w in (layer.gate, layer.up) if w is not None]
        return {
            "w13": self.layout.pack(self._rows([w.payload for w in halves], h // 2)),
            "w13_scale": self._scales(self._rows([w.scales for w in halves], h // self.recipe.format.block)),
            "w13_alpha": self._alpha(layer.up),
            "w13_bias": None if layer.up_bias is None else pack_bias(self._rows([layer.gate_bias, layer.up_bias])),
            "w2": self.layout.pack(_pad(layer.down.payload, h, i // 2)),
            "w2_scale": self._scales(_pad(layer.down.scales, h, i // self.recipe.format.block)),
            "w2_alpha": self._alpha(layer.down),
            "w2_bias": None if layer.down_bias is None else pack_bias(_pad(layer.down_bias, h)),
        }

    def undo(self, operands: Mapping[str, Tensor | None], layer: MoELayer) -> MoELayer:
        """The logical layer that these operands say; `layer` gives sizes and activation. undo(convert(x)) is canonical(x)."""
        i, h, fmt = layer.intermediate, layer.hidden, self.recipe.format
        w13, s13 = self.layout.unpack(operands["w13"]), self._unscaled(operands["w13_scale"])
        w2, s2 = self.layout.unpack(operands["w2"]), self._unscaled(operands["w2_scale"])
        alphas = {key: a if a is None else a / _ALPHA_FACTOR[self.dtype] for key, a in operands.items() if key.endswith("alpha")}
        count = 1 if layer.gate is None else 2
        halves = [BlockTensor(p[:, :i, : h // 2], s[:, :i, : h // fmt.block], fmt, alphas["w13_alpha"])
                  for p, s in zip(self._halves(w13, count), self._halves(s13, count))]
        b13, b2 = (None if operands[key] is None else unpack_bias(operands[key]) for key in ("w13_bias", "w2_bias"))
        biases = [None] * count if b13 is None else [b[:, :i] for b in self._halves(b13, count)]
        return replace(layer, gate=halves[0] if count == 2 else None, up=halves[-1],
                       down=BlockTensor(w2[:, :h, : i // 2], s2[:, :h, : i // fmt.block], fmt, alphas["w2_alpha"]),
                       gate_bias=biases[0] if count == 2 else None, up_bias=biases[-1],
                       down_bias=None if b2 is None else b2[:, :h])

    def canonical(self, layer: MoELayer) -> MoELayer:
        """What is left of a layer: the same numbers, up to what `losses` counts and the rounding of biases to bfloat16.

        MXFP4: weights as they are. NVFP4: w13 and w2 each have their block scales multiplied and their global scales divided by
        one power of two (bfloat16 only); scales below 2^-6 after that, and below zero, become 0; up takes over gate's
        global scale, the first of the two that vLLM keeps (ModelOptNvFp4FusedMoE and CompressedTensorsW4A4Nvfp4MoEMethod,
        process_weights_after_loading: `[:, 0]`, with a warning where they differ).
        """
        if self.recipe.format is NVFP4:
            factors = self._factors(layer)
            first = layer.up if layer.gate is None else layer.gate
            layer = replace(layer, gate=None if layer.gate is None else self._normalised(layer.gate, factors["w13"], first),
                            up=self._normalised(layer.up, factors["w13"], first),
                            down=self._normalised(layer.down, factors["w2"], layer.down))
        biases = {name: getattr(layer, name) for name in ("gate_bias", "up_bias", "down_bias")}
        return replace(layer, **{name: None if b is None else b.to(torch.bfloat16) for name, b in biases.items()})

    def losses(self, layer: MoELayer) -> MarlinLosses:
        """What `canonical` does to block and global scales."""
        parts = _parts(layer)
        if self.recipe.format is not NVFP4:
            return MarlinLosses(dict.fromkeys(parts, 1.0), dict.fromkeys(parts, 0), dict.fromkeys(parts, 0), None)
        factors = self._factors(layer)
        values = {key: E4M3_SCALE.decode(torch.cat([w.scales.flatten() for w in ws])) for key, ws in parts.items()}
        flushed = {key: int(((v > 0) & (v * factors[key] < 2.0**-6)).sum()) for key, v in values.items()}
        up = None if layer.gate is None else (layer.gate.global_scale / layer.up.global_scale).float().expand(layer.experts)
        return MarlinLosses(factors, flushed, {key: int((v < 0).sum()) for key, v in values.items()}, up)

    def _factors(self, layer: MoELayer) -> dict[str, float]:
        return {key: _scale_factor(ws, self.dtype) for key, ws in _parts(layer).items()}

    def _normalised(self, weight: BlockTensor, factor: float, first: BlockTensor) -> BlockTensor:
        """Scales times `factor`, with 0 where S0E5M3 flushes; `first`'s global scale divided by it. E4M3 holds the product: at most 448."""
        scaled = E4M3.encode(E4M3_SCALE.decode(weight.scales) * factor)
        kept = E4M3.encode(S0E5M3_MARLIN.decode(recode_e4m3_to_s0e5m3_marlin(scaled)))
        alpha = first.global_scale.float() * _ALPHA_FACTOR[self.dtype] / factor  # in vLLM's order: beyond float32 it is inf
        return replace(weight, scales=kept, global_scale=(alpha / _ALPHA_FACTOR[self.dtype]).expand(weight.shape[0]).contiguous())

    def _rows(self, halves: list[Tensor], columns: int | None = None) -> Tensor:
        """Pad each half on its own with zeros, and put the rows into the file's order."""
        i = self.padded[0]
        t = torch.cat([_pad(half, i, columns) for half in halves], dim=1)
        return t if len(halves) == 1 else t[:, self.recipe.rows.indices(i).to(t.device)]

    def _halves(self, t: Tensor, count: int) -> list[Tensor]:
        """The inverse of `_rows`, but for the padding."""
        i = self.padded[0]
        return [t] if count == 1 else list(t[:, torch.argsort(self.recipe.rows.indices(i)).to(t.device)].split(i, dim=1))

    def _scales(self, scales: Tensor) -> Tensor:
        if self.recipe.format is NVFP4:
            return self.layout.pack_scales(recode_e4m3_to_s0e5m3_marlin(scales)).view(torch.float8_e4m3fn)
        return self.layout.pack_scales(scales + self._exponent).view(torch.float8_e8m0fnu)

    def _unscaled(self, packed: Tensor) -> Tensor:
        scales = self.layout.unpack_scales(packed.view(torch.uint8))
        return E4M3.encode(S0E5M3_MARLIN.decode(scales)) if self.recipe.format is NVFP4 else scales - self._exponent

    @property
    def _exponent(self) -> int:
        return _FP8_EXPONENT if self.layout is MARLIN_A8 else 0

    def _alpha(self, weight: BlockTensor) -> Tensor | None:
        return None if weight.global_scale is None else weight.global_scale * _ALPHA_FACTOR[self.dtype]


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _pad(t: Tensor, rows: int, columns: int | None = None) -> Tensor:
    """[E, rows(, columns)] -> the same, with zeros at the end of both."""
    widths = () if columns is None else (0, columns - t.shape[2])
    return torch.nn.functional.pad(t, (*widths, 0, rows - t.shape[1]))


def _parts(layer: MoELayer) -> dict[str, list[BlockTensor]]:
    return {"w13": [w for w in (layer.gate, layer.up) if w is not None], "w2": [layer.down]}


def _scale_factor(weights: list[BlockTensor], dtype: torch.dtype) -> float:
    """The power of two that lifts the largest scale of all experts above 224, at most to 448; 1 for float16.

    Source: vLLM marlin_utils_fp4.py `_nvfp4_compute_scale_factor`.
    """
    top = max(float(E4M3_SCALE.decode(w.scales).nan_to_num(0.0).max()) for w in weights)
    if dtype == torch.float16 or top <= 0:
        return 1.0
    return 2.0 ** (math.frexp(E4M3.max / top)[1] - 1)


_PADDED, _COMPRESSED = (128, 256), "compressed-tensors "  # mxfp4_round_up_hidden_size_and_intermediate_size, on CUDA
MARLIN_RECIPES = (
    MarlinRecipe("mxfp4/MARLIN", "gpt-oss", MXFP4, INTERLEAVED, _PADDED, biases=True, fp8_aware=True,
                 source="GptOssMxfp4MoEMethod, prepare_moe_mxfp4_layer_for_marlin"),
    MarlinRecipe("mxfp4/MARLIN", "mxfp4", MXFP4, GATE_UP, _PADDED, biases=True, fp8_aware=True,
                 source="Mxfp4MoEMethod, prepare_moe_mxfp4_layer_for_marlin"),
    MarlinRecipe("mxfp4/MARLIN", _COMPRESSED + "mxfp4-pack-quantized", MXFP4, GATE_UP, None, biases=False, fp8_aware=False,
                 source="CompressedTensorsW4A4Mxfp4MoEMethod, prepare_moe_fp4_layer_for_marlin"),
    MarlinRecipe("nvfp4/MARLIN", "ModelOpt NVFP4", NVFP4, GATE_UP, None, biases=False, fp8_aware=False,
                 source="ModelOptNvFp4FusedMoE, prepare_nvfp4_moe_layer_for_marlin"),
    MarlinRecipe("nvfp4/MARLIN", _COMPRESSED + "nvfp4-pack-quantized", NVFP4, GATE_UP, None, biases=False, fp8_aware=False,
                 source="CompressedTensorsW4A4Nvfp4MoEMethod, prepare_nvfp4_moe_layer_for_marlin"),
)


def marlin_recipe(format: BlockFormat, checkpoint: str) -> MarlinRecipe:
    """The recipe for a format and a checkpoint kind. Raises MxdebugError with those that exist."""
    for r in MARLIN_RECIPES:
        if r.format is format and r.checkpoint == checkpoint:
            return r
    known = "; ".join(f"{r.format.name} of {r.checkpoint}" for r in MARLIN_RECIPES)
    raise MxdebugError("Marlin recipe", f"one of: {known}", f"{format.name} of {checkpoint}")


def marlin_operands(layer: MoELayer, *, format: BlockFormat, checkpoint: str, dtype: torch.dtype,
                    input_dtype: torch.dtype | None = None) -> dict[str, Tensor | None]:
    """The operands of vLLM's Marlin fallback for one layer: `marlin_recipe`, `MarlinRecipe.plan`, `MarlinPlan.convert` in one call."""
    return marlin_recipe(format, checkpoint).plan(layer, dtype=dtype, input_dtype=input_dtype).convert(layer)


__all__ = ["MARLIN_ACTIVATIONS", "MARLIN_RECIPES", "MarlinActivation", "MarlinLosses", "MarlinPlan", "MarlinRecipe", "marlin_operands",
           "marlin_recipe"]
