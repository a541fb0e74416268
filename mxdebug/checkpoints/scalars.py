"""NVFP4's one-number tensors: global scales of weights and of activations, as multipliers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import MxdebugError
from .store import Reader

WHY_WEIGHT = "a weight whose calibration gave 0, inf or NaN, or a tensor that the exporter never filled"
WHY_INPUT = ("an expert that calibration never reached, or whose activations were all zero there (vLLM issue 45212, compressed-tensors "
             "pull request 595); engines invert the number unseen, and tokens routed to the expert become inf or NaN")
WHY_INPUT_LINEAR = "a layer that calibration never reached, or whose activations were all zero there"
WHY_NO_INPUT = "experts that calibration never reached are exported without (vLLM issue 45212); vLLM then uses what it finds in memory"


def read_scalars(tensors: Mapping[int, str], reader: Reader, part: slice, divides: bool, why: str, one: str = "expert") -> Tensor:
    """float32 [E] multipliers of the experts in `part`, one tensor of shape [] or [1] each.

    A divisor d becomes 1.0 / d in float32, as vLLM computes it (compressed_tensors_moe_w4a4_nvfp4.py process_weights_after_loading).
    Raises MxdebugError for other dtypes and shapes, and where the number or its reciprocal is not a finite number above zero:
    kernels use both. `why` is the likely reason then, `one` what the message calls each: linear layers have parts.
    """
    names = [tensors[e] for e in range(part.start, part.stop)]
    for name in names:
        dtype, shape = reader.header(name)
        if dtype != "F32" or shape not in ((), (1,)):
            raise MxdebugError(f"tensor {name}", "one F32 number, shape [] or [1]", f"{dtype} of shape {list(shape)}",
                               "block scales or another format under this name, or an export that rounds scales with the weights")
    stored = torch.cat([reader.read(name).reshape(1) for name in names])
    inverse = 1.0 / stored
    good = (stored > 0) & (inverse > 0) & stored.isfinite() & inverse.isfinite()
    if not good.all():
        e = int((~good).nonzero()[0])
        what = "divisor" if divides else "multiplier"
        raise MxdebugError(f"tensor {names[e]}, {one} {part.start + e}", f"a finite {what} above 0 whose reciprocal is finite",
                           f"{float(stored[e])}, reciprocal {float(inverse[e])}; {int((~good).sum())} of {len(names)} {one}s", why)
    return inverse if divides else stored
