"""What the block scales of a call's weights say without a checkpoint: NaN codes, and statistics of their order."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..contracts import Contract
from ..errors import MxdebugError
from ..exchange.examine import chance, explained_by_means
from ..faults import FAULTS
from ..faults.slots import SCALES
from ..layouts import LINEAR, SM90_SCALE_FOLD, SWIZZLE_8x4, SWIZZLE_128x4, Layout
from .damage import nan_codes
from .finding import PROVED, SUSPECTED, Finding
from .given import Given

_FAULT = {
    LINEAR.name: "scales-linear",
    SWIZZLE_128x4.name: "scales-128x4",
    SWIZZLE_8x4.name: "scales-8x4",
    SM90_SCALE_FOLD.name: "scales-sm90-fold",
}
_LAYOUTS = (LINEAR, SWIZZLE_128x4, SWIZZLE_8x4, SM90_SCALE_FOLD)
SIGMAS = 8.0  # of the statistic's own scatter; there are at most three other orders of two operands to be mistaken for
EXPERTS = 4  # whose scales are looked at


def nan_scales(given: Given) -> list[Finding]:
    """Block scales of weights that are NaN to the kernel, in whatever order they lie."""
    out = []
    for key in SCALES:
        data, experts = _bytes(given.contract, key, given), given.experts
        nan = torch.isin(data, torch.tensor(nan_codes(given.contract.weights), dtype=torch.uint8, device=data.device))
        if nan.any():
            which = nan.reshape(experts, -1).any(1).nonzero().flatten().tolist()
            out.append(
                Finding(
                    FAULTS["scales-nan"],
                    PROVED,
                    given.contract.operand(key).title,
                    f"{int(nan.sum())} of {nan.numel()} bytes are NaN's code, in expert{'s' if len(which) > 1 else ''} {', '.join(map(str, which[:8]))}",
                )
            )
    return out


def suspect(given: Given) -> list[Finding]:
    """Layouts in which the scales look far more like rows and columns with levels of their own than in the contract's."""
    out = []
    for key in SCALES:
        form, layer = given.contract.operand(key).layout, given.base.layer
        if form is None or form.name not in _FAULT:
            continue
        halves = 1 if layer.gate is None else 2
        rows, k = (halves * layer.intermediate, layer.hidden) if key == "w13_scale" else (layer.hidden, layer.intermediate)
        columns = k // layer.up.format.block
        data = _bytes(given.contract, key, given).reshape(given.experts, -1)[:EXPERTS]
        # Padding is one byte, often 0, and has an order of its own, which in the wrong layout looks like levels of rows: the scales must show theirs
        # without zeros, and also without the byte that is most frequent.
        looked_at = data != 0, (data != 0) & (data != data[data != 0].mode().values) if data.any() else data != 0
        found = [_best(data, counts, rows, columns, form) for counts in looked_at]
        if None in found or found[0][0] is not found[1][0]:
            continue
        best, shares = found[0]
        if best is not form:
            out.append(
                Finding(
                    FAULTS[_FAULT[best.name]],
                    SUSPECTED,
                    given.contract.operand(key).title,
                    f"means of rows and columns explain {100 * shares[best]:.1f} % of these bytes as {best.name}, {100 * shares[form]:.1f} % as {form.name}, "
                    "which the kernel reads; the converted weights next to the checkpoint would decide",
                )
            )
    return out


def _best(data: Tensor, counts: Tensor, rows: int, columns: int, form: Layout) -> tuple[Layout, dict[Layout, float]] | None:
    """(the layout that explains the bytes best, the share that each explains), if it is the contract's or better than that by SIGMAS; else None."""
    number = int(counts.sum()) // len(data)
    shares = {layout: s for layout in _LAYOUTS if (s := _share(data, counts, layout, rows, columns)) is not None}
    if form not in shares or number < rows + columns:
        return None
    best = max(shares, key=lambda layout: shares[layout])
    scatter = chance(rows, columns, number) / len(data) ** 0.5
    return (best, shares) if best is form or shares[best] - shares[form] > SIGMAS * scatter else None


def _share(data: Tensor, counts: Tensor, layout: Layout, rows: int, columns: int) -> float | None:
    try:
        if math.prod(layout.padded(rows, columns)) != data.shape[1]:
            return None
    except MxdebugError:
        return None
    shares = []
    for d, c in zip(data, counts):
        scales, where = (layout.unpack(t, rows, columns).reshape(rows, columns) for t in (d, c.to(torch.uint8)))
        share, left = explained_by_means(scales, where), int(where.sum()) - int(where.any(0).sum()) - int(where.any(1).sum())
        if share is None or left < 1:
            return None
        # As many means as there are rows and columns with scales explain so much by themselves, in a wrong layout more than in the right one.
        shares.append(1 - (1 - share) * (int(where.sum()) - 1) / left)
    return sum(shares) / len(shares)


def _bytes(contract: Contract, key: str, given: Given) -> Tensor:
    return contract.operand(key).payload(contract.get(key, given.arguments))
