"""Evidence from quantised activations: do their block scales lie as the kernel reads them?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..contracts import Contract
from ..errors import MxdebugError
from ..exchange import BEFORE, LINEAR_READ_SWIZZLED, SWIZZLED_READ_LINEAR, ScaleFinding, examine_scales
from ..faults import FAULTS
from ..formats import BlockTensor
from ..requantise import QUANTISERS
from .finding import CONSISTENT, PROVED, SUSPECTED, Finding

_FAULT = {LINEAR_READ_SWIZZLED: "x-scales-linear", SWIZZLED_READ_LINEAR: "x-scales-swizzled", BEFORE: "x-scales-before-exchange"}
_LAY = "see how the scales are laid out where the activations are quantised: each block's must stand where the kernel reads it"
_STRENGTH = {"proved": PROVED, "consistent": CONSISTENT, "suspected": SUSPECTED}


def zeros(contract: Contract, arguments: Mapping[str, Any]) -> list[Finding]:
    """Block scales of 0 under codes that are not zero, where there are more of them than any order of the bytes explains."""
    if contract.activations is None:
        return []
    x, buffer = contract.activations_of(arguments), contract.get("x_scale", arguments).view(torch.uint8)
    used = (x.elements() != 0).unflatten(-1, (-1, x.format.block)).any(-1)
    lost = used & (x.scales == 0)
    if not lost.any() or int((buffer != 0).sum()) >= int(used.sum()):
        return []
    row, column = lost.nonzero()[0].tolist()
    return [Finding(FAULTS["x-scales-zero"], SUSPECTED, contract.operand("x_scale").where,
                    f"{int(lost.sum())} of {int(used.sum())} blocks that are not zero have the scale 0, the first is token {row}, block {column}")]


FEW_BLOCKS = 64  # with fewer, a share says little


def exponents(contract: Contract, arguments: Mapping[str, Any]) -> list[Finding]:
    """Block scales larger than the codes need. Every rule in use puts a block's largest code above half of the format's largest number (ceil: above half;
    floor and even: above half, or clipped; NVFP4 divides by it): a block below that has lost a bit, and with 19 of 20 so it is no rounding."""
    if contract.activations is None:
        return []
    x = contract.activations_of(arguments)
    largest = x.elements().abs().unflatten(-1, (-1, x.format.block)).amax(-1)
    largest = largest[largest > 0]
    half = x.format.element.max / 2
    below = int((largest < half).sum())
    if largest.numel() < FEW_BLOCKS or below < 0.95 * largest.numel():
        return []
    return [Finding(FAULTS["x-scales-exponent"], SUSPECTED, contract.operand("x_scale").where,
                    f"the largest code of {below} of {largest.numel()} blocks is below {half:g}, half of {x.format.element.name}'s largest; the median is {largest.median():g}")]


def examine(contract: Contract, arguments: Mapping[str, Any], sent: Sequence[Tensor] | None, gscale: Tensor | None = None) -> ScaleFinding | None:
    """In which order the call's activation scales lie; None where activations are not quantised, or are no such tensors.

    sent  what each rank's tokens were before quantisation, [rows, H] in rank order; without it sizes, zeros and statistics speak
    gscale  what NVFP4 activations were multiplied with before quantisation, where the call does not hold it
    """
    if contract.activations is None:
        return None
    x, scales = contract.get("x", arguments), contract.get("x_scale", arguments)
    if x is None or scales is None or x.dim() != 2 or x.dtype != contract.operand("x").dtype or scales.element_size() != 1:
        return None
    known = None if sent is None else [quantised(contract, t, x, _gscale(contract, arguments, gscale)) for t in sent]
    layout = contract.x_layout(arguments)

    def look(rows_per_rank: list[int] | None) -> ScaleFinding:
        return examine_scales(x, scales, format=contract.activations, contract_layout=layout, sent=known, rows_per_rank=rows_per_rank)

    try:
        alone = contract.parallel(arguments).ep_size == 1
    except MxdebugError:
        alone = False
    first = look([x.shape[0]] if alone and known is None else None)
    # One rank: no exchange, unless the size says otherwise; zeros only say that some other order was taken.
    return first if first.holds or known is not None or first.by == "zeros" else look(None)


def _gscale(contract: Contract, arguments: Mapping[str, Any], known: Tensor | None) -> Tensor | None:
    """The factor before quantisation to NVFP4: the call's own, else the checkpoint's."""
    if not contract.activations.outer:
        return None
    passed = contract.get("a1_gscale", arguments)
    return passed.float().reshape(-1)[0] if passed is not None else known


def quantised(contract: Contract, tokens: Tensor, like: Tensor, gscale: Tensor | None) -> BlockTensor:
    """Tokens [rows, H] padded as `like` and quantised as the engine does it."""
    fmt = contract.activations
    width = like.shape[1] * (2 if fmt.packed else 1)
    if tokens.dim() != 2 or not tokens.is_floating_point() or not width // 2 < tokens.shape[1] <= width:
        raise MxdebugError("sent activations", f"numbers [rows, {width}] (less its padding), before quantisation", f"{tokens.dtype} {list(tokens.shape)}",
                           "tokens of another layer, or quantised ones")
    tokens = torch.nn.functional.pad(tokens.to(torch.bfloat16), (0, width - tokens.shape[1]))
    if fmt.outer and gscale is None:
        raise MxdebugError("sent activations", f"a checkpoint: {fmt.name} needs the input's global scale, which this kernel is not told", "none", "pass --checkpoint")
    return QUANTISERS[fmt.name](tokens, gscale)


def findings(contract: Contract, f: ScaleFinding | None) -> list[Finding]:
    """The fault that the order of the scales is; nothing where it is right or open.

    Size and zeros prove that the order is not the kernel's; which one it is they leave to the known ones, so that only the senders prove it.
    Where zeros leave none of them, it is the zeros that are reported.
    """
    if f is None or f.wrong is None and f.status != "suspected":
        return []
    lines, where = [line.strip() for line in f.text.splitlines()], contract.operand("x_scale").where
    if f.verdict not in _FAULT:
        text = "; ".join([*lines[:-1], "no known order of the bytes explains that"])
        return [Finding(FAULTS["x-scales-zero"], CONSISTENT, where, text, advice=_LAY)] if f.by == "zeros" else []
    if f.status == "proved" and f.by != "senders":
        lines[-1] = f"proved by the {f.by}: this is not the order that the kernel reads; {f.holds[0]} is the only known one that is left, which does not prove it"
        return [Finding(FAULTS[_FAULT[f.verdict]], CONSISTENT, where, "; ".join(lines))]
    return [Finding(FAULTS[_FAULT[f.verdict]], _STRENGTH[f.status], where, "; ".join(lines))]


def untold(contract: Contract, arguments: Mapping[str, Any], f: ScaleFinding | None, gscale: Tensor | None) -> tuple[str, ...]:
    """That a kernel is not told what NVFP4 activations were multiplied with before quantisation, and no sender said it. gscale: what the checkpoint says."""
    if gscale is None or contract.get("a1_gscale", arguments) is not None or f is not None and f.by == "senders":
        return ()
    return (f"with which global scale the tokens were quantised is not in this call: w13 alpha takes them for multiplied with {float(gscale):.4g}; "
            "what was sent (--sent) would tell",)


def remains(f: ScaleFinding | None) -> tuple[str, ...]:
    """What the call cannot show about its activation scales.

    Scales that each rank swizzled are not counted: where padding came to lie among the rows it would read as 0, and none does.
    """
    if f is None or f.wrong is not None or not {"linear", "128x4"} <= set(f.holds):
        return ()
    orders = " and ".join(h for h in f.holds if h in ("linear", "128x4"))
    return (f"activation scales: {orders} are equally long here, so this call alone cannot show in which order they lie; what the ranks sent would decide"
            + (f" (suspected by statistics: {f.verdict})" if f.status == "suspected" else ""),)
