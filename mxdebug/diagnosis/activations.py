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
_STRENGTH = {"proved": PROVED, "consistent": CONSISTENT, "suspected": SUSPECTED}


def examine(contract: Contract, arguments: Mapping[str, Any], sent: Sequence[Tensor] | None) -> ScaleFinding | None:
    """In which order the call's activation scales lie; None where activations are not quantised, or are no such tensors.

    sent  what each rank's tokens were before quantisation, [rows, H] in rank order; without it sizes, zeros and statistics speak
    """
    if contract.activations is None:
        return None
    x, scales = contract.get("x", arguments), contract.get("x_scale", arguments)
    if x is None or scales is None or x.dim() != 2 or x.dtype != contract.operand("x").dtype or scales.element_size() != 1:
        return None
    known = None if sent is None else [quantised(contract, t, x) for t in sent]
    layout = contract.x_layout(arguments)

    def look(rows_per_rank: list[int] | None) -> ScaleFinding:
        return examine_scales(x, scales, format=contract.activations, contract_layout=layout, sent=known, rows_per_rank=rows_per_rank)

    try:
        alone = contract.parallel(arguments).ep_size == 1
    except MxdebugError:
        alone = False
    first = look([x.shape[0]] if alone and known is None else None)
    # One rank: no exchange, unless the size says otherwise.
    return first if first.holds or known is not None else look(None)


def quantised(contract: Contract, tokens: Tensor, like: Tensor) -> BlockTensor:
    """Tokens [rows, H] padded as `like` and quantised as the engine does it.

    NVFP4's global scale is not in every call; the one that gives the same payload as the call has is the largest input's.
    """
    fmt = contract.activations
    width = like.shape[1] * (2 if fmt.packed else 1)
    if tokens.dim() != 2 or tokens.shape[1] > width:
        raise MxdebugError("sent activations", f"[rows, up to {width}]", f"shape {list(tokens.shape)}", "tokens of another layer")
    tokens = torch.nn.functional.pad(tokens.to(torch.bfloat16), (0, width - tokens.shape[1]))
    if fmt.outer:
        raise MxdebugError("sent activations", f"MXFP8 tokens; {fmt.name} needs the global scale too", fmt.name, "give what was sent, quantised, to mxdebug.exchange.examine_scales")
    return QUANTISERS[fmt.name](tokens)


def findings(contract: Contract, f: ScaleFinding | None) -> list[Finding]:
    """The fault that the order of the scales is; nothing where it is right or open."""
    if f is None or f.verdict not in _FAULT or f.wrong is None and f.status != "suspected":
        return []
    text = f.text.splitlines()
    return [Finding(FAULTS[_FAULT[f.verdict]], _STRENGTH[f.status], contract.operand("x_scale").where, "; ".join(line.strip() for line in text))]


def remains(f: ScaleFinding | None) -> tuple[str, ...]:
    """What the call cannot show about its activation scales."""
    if f is None or f.wrong is not None or f.status in ("proved",) or (f.status == "consistent" and f.verdict == "right"):
        return ()
    orders = " and ".join(f.holds) or "no known order"
    return (f"activation scales: {orders} are equally long here, so this call alone cannot show in which order they lie; what the ranks sent would decide"
            + (f" (suspected by statistics: {f.verdict})" if f.status == "suspected" else ""),)
