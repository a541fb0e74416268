"""Faults of global scales: what is passed as a GEMM's alpha, or as the factor before the inner activation is quantised."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..reference import MoELayer, Parallel
from .fault import QUANTISED_WITH, SCALARS, Fault, Situation, needs

ALPHAS = ("w13_alpha", "w2_alpha")
Change = Callable[[str, Mapping[str, Tensor], MoELayer], "Tensor | None"]


@dataclass(frozen=True)
class ScalarFault(Fault):
    """A Fault with the change that it makes: (key, right scalars by key, this rank's part) -> what is passed instead, or None."""

    passed: Change = lambda key, right, layer: None


def input_scale(key: str, layer: MoELayer) -> Tensor:
    """float32 [E]: the checkpoint's input scale that belongs to a key."""
    return (layer.w2_input_scale if key in ("w2_alpha", "a2_gscale", "g1_scale_c") else layer.w13_input_scale).float()


def _shared(key: str, right: Mapping[str, Tensor]) -> Tensor:
    """float32 [E]: the largest input scale, which serves all experts."""
    return 1.0 / right[QUANTISED_WITH if key in ("w13_alpha", QUANTISED_WITH) else "a2_gscale"]


def _weight(key: str, layer: MoELayer) -> Tensor:
    first = layer.up if layer.gate is None else layer.gate
    return (layer.down if key == "w2_alpha" else first).global_scale.float()


def _make(id: str, title: str, strikes: tuple[str, ...], passed: Change, needed: str, fix: str, reports: tuple[str, ...] = ()) -> ScalarFault:
    def inject(s: Situation, keys: tuple[str, ...]) -> Situation:
        part = s.layer.part(s.parallel)
        right = s.plan.scalars(part)
        keys = tuple(k for k in keys if k in right)
        changes = {k: passed(k, right, part) for k in keys}
        needs(bool(keys) and all(t is not None and not torch.allclose(t, right[k], rtol=2.0**-20) for k, t in changes.items()), id, needed)
        old = s.plan.scalars
        return replace(s, plan=replace(s.plan, scalars=lambda layer: {**old(layer), **{k: passed(k, right, part) if t is None else t for k, t in changes.items()}}))

    return ScalarFault(id, title, strikes, inject, "the numbers equal the checkpoint's under this change", needed, fix, reports, passed=passed)


def _unfolded(key: str, right: Mapping[str, Tensor], layer: MoELayer) -> Tensor | None:
    if key == "g1_scale_c":
        return right["w13_alpha"] if layer.gate is not None else None
    return _weight(key, layer)


def _each_expert(key: str, right: Mapping[str, Tensor], layer: MoELayer) -> Tensor | None:
    own, shared = input_scale(key, layer), _shared(key, right)
    return right[key] * own / shared if key in ALPHAS else right[key] * shared / own


_NEED = "an NVFP4 checkpoint"
_FIX = "alpha is weight global scale x input global scale, both as multipliers; the inner activation is multiplied with 1 / its global scale"
SCALAR_FAULTS = (
    _make("global-inverted", "a global scale is inverted: a divisor where a multiplier belongs, or the other way round", SCALARS,
          lambda key, right, layer: 1.0 / right[key], _NEED, _FIX, ("vllm#39764",)),
    _make("global-missing", "a global scale is missing: 1 is passed", SCALARS, lambda key, right, layer: torch.ones_like(right[key]), _NEED, _FIX),
    _make("weight-global-inverted", "the weights' global scale is inverted: compressed-tensors stores a divisor, ModelOpt a multiplier", ALPHAS,
          lambda key, right, layer: right[key] / _weight(key, layer) ** 2, _NEED, "multiply by 1 / weight_global_scale, or by weight_scale_2"),
    _make("weight-global-missing", "alpha holds the input scale only, not the weights' global scale", ALPHAS,
          lambda key, right, layer: right[key] / _weight(key, layer), _NEED, _FIX),
    _make("input-scale-not-folded", "the input scale is not folded in", (*ALPHAS, "g1_scale_c"), _unfolded, _NEED, _FIX),
    _make("input-scale-twice", "the input scale is folded in twice", SCALARS,
          lambda key, right, layer: right[key] * _shared(key, right) if key in ALPHAS else right[key] / _shared(key, right), _NEED,
          "fold once: process_weights_after_loading runs again when weights are reloaded"),
    _make("input-scale-of-each-expert", "each expert's own input scale is used; activations are quantised once, with the largest", SCALARS, _each_expert,
          "input scales that differ by expert", "take the maximum over experts for both"),
    _make("global-of-other-half", "the global scale of w3 is taken for both halves; the recipe takes w1's", ("w13_alpha",),
          lambda key, right, layer: None if layer.gate is None else right[key] * layer.up.global_scale.float() / layer.gate.global_scale.float(),
          "w1 and w3 with global scales that differ", "requantise w1 and w3 to one global scale when they are joined"),
    _make("weight-global-squared", "the weights' global scale is multiplied in twice", ALPHAS, lambda key, right, layer: right[key] * _weight(key, layer),
          _NEED, "multiply by it once: as alpha, and nowhere else", ("charlie12345/ROCmFPX#85",)),
    _make("global-of-another-expert", "global scales of other experts", SCALARS, lambda key, right, layer: right[key].roll(1),
          "global scales that differ by expert", "index global scales with the same expert ids as the weights"),
)


def _apart(s: Situation, keys: tuple[str, ...]) -> Situation:
    needs(s.layer.gate is not None and s.layer.up.global_scale is not None, "global-shared-by-halves", "an NVFP4 layer with gate")
    return replace(s, layer=replace(s.layer, up=replace(s.layer.up, global_scale=s.layer.gate.global_scale * 2)))


_SHARED = Fault(
    "global-shared-by-halves", "w1 and w3 have different global scales, and the kernel takes one number for both", ("w13_alpha",), _apart,
    "the checkpoint's global scales of w1 and w3", "a checkpoint whose w1 and w3 were quantised apart", "requantise w1 and w3 to one global scale when they are joined")
_OTHER = _make("global-other", "a global scale has another value than the checkpoint's", SCALARS, lambda key, right, layer: right[key] * 1.5, _NEED, _FIX)
_NOT_LOADED = _make(
    "global-not-loaded", "a global scale is no positive number: memory that was never written", SCALARS, lambda key, right, layer: _nobody(right[key]), _NEED,
    "fill scale slots with NaN before loading and check them afterwards; a missing input scale needs calibration or a bound", ("vllm#45212", "sglang#13162", "compressed-tensors#595"))
CHECKPOINT_FAULTS = (_SHARED, _OTHER, _NOT_LOADED)


def _nobody(t: Tensor) -> Tensor:
    """The last expert's number as fresh memory may have it: 0."""
    out = t.clone()
    out[-1] = 0.0
    return out


def _another_rank(s: Situation, keys: tuple[str, ...]) -> Situation:
    p = s.parallel
    needs(p.ep_size > 1, "global-of-another-rank", "ep_size above 1")
    other = s.plan.scalars(s.layer.part(Parallel(p.tp_size, p.tp_rank, p.ep_size, (p.ep_rank + 1) % p.ep_size)))
    old = s.plan.scalars
    keys = tuple(k for k in keys if k in other)
    needs(bool(keys), "global-of-another-rank", _NEED)
    return replace(s, plan=replace(s.plan, scalars=lambda layer: {**old(layer), **{k: other[k] for k in keys}}))


RANK_FAULTS = (
    Fault("global-of-another-rank", "global scales of another expert-parallel rank's experts", SCALARS, _another_rank, "the numbers equal those of another rank's experts",
          "ep_size above 1, and global scales that differ by expert", "slice global scales with the ep_rank whose experts were loaded", ("sglang#21602",)),
)
