"""Are the bytes of block scales numbers that a quantiser makes?"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ..catalogue import RULES
from ..codes import CODE, NAN, NEGATIVE, SATURATED, VALUE
from ..finding import Finding, make, shown
from ..scene import Group, Scene, share

_CAST = np.isin(CODE, [0, *(1 << n for n in range(8))])  # uint8 of 2^(c-127): 0 below 1, then powers of two
_MOST_SATURATED = 0.05
"""With weight_scale_2 = amax / 2688 a scale is 448 where a block's amax is above 27/28 of the tensor's (432 rounds up): hardly ever."""
_ZERO = {True: [0x0, 0x8], False: [0x00, 0x80]}
"""Codes of 0 and -0, by whether a byte holds two elements."""
_AWAY, _EXPERTS = 6.0, 4
"""Powers of two by which an expert's scales are far from the others', and experts from which on the others say what is usual. Experts of one layer
differ by a factor of two to four; one that is 64 times off was scaled twice, or calibrated alone."""
_FEW = 256
"""Block scales from which on equal ones are no accident."""


def check(scene: Scene) -> Iterator[Finding]:
    """NaN, negative, saturated, cast by value, all the same."""
    for group in scene.groups:
        e4m3 = group.kind.e4m3
        nan, negative = group.hits(NAN[e4m3]), group.hits(NEGATIVE[e4m3])
        if nan.any():
            yield of(
                group,
                "scale-nan",
                nan,
                f"{nan.sum():,} of {group.blocks:,} block scales are NaN (byte {'0x7F or 0xFF' if e4m3 else '0xFF'})",
            )
        if negative.any():
            yield of(group, "scale-negative", negative, f"{negative.sum():,} of {group.blocks:,} block scales are negative")
        totals = group.scales.sum(1, dtype=np.int64)
        if not e4m3:
            cast = (group.hits(_CAST) == totals) & (totals > 0) & (group.scales[:, 128] < totals) & ~_empty(group, totals)
            if cast.any():
                yield of(group, "scale-cast", cast, f"{cast.sum():,} weights have no bytes but 0 and powers of two")
        saturated = group.hits(SATURATED[e4m3])
        if e4m3 and (many := saturated > _MOST_SATURATED * totals).any():
            worst = int((saturated / np.maximum(totals, 1)).argmax())
            yield of(
                group,
                "scale-saturated",
                many,
                f"up to {share(int(saturated[worst]), int(totals[worst]))} of a weight's block scales are 448",
            )
        far = _far(scene, group)
        if far.any():
            worst = float(far[np.abs(far).argmax()])
            yield of(
                group,
                "scales-outlier",
                far,
                f"{np.count_nonzero(far):,} weights' scales are far from those of the layer's other experts, by a factor of 2^{worst:+.1f}",
            )
        constant = (group.scales.max(1) == totals) & (totals >= _FEW)
        if constant.any():
            yield of(
                group,
                "scale-constant",
                constant,
                f"{constant.sum():,} weights have one value for all their block scales, such as byte "
                f"0x{int(group.scales[int(constant.argmax())].argmax()):02X}",
            )


def _far(scene: Scene, group: Group) -> np.ndarray:
    """float [n]: by how many powers of two a unit's mean log2 of scales is away from the median of its layer's experts; 0 where that is not far."""
    value = np.where(NAN[group.kind.e4m3] | (CODE == 0), 0, VALUE[group.kind.e4m3])
    usable = value > 0
    counts = group.scales[:, usable].astype(np.float64)
    level = counts @ np.log2(value[usable]) / np.maximum(counts.sum(1), 1)
    outer = [scene.multiplier(w, "global") if group.kind.global_scale else 1.0 for w, _ in group.units]
    known = (counts.sum(1) > 0) & np.array([x is not None and 0 < x < np.inf for x in outer])
    level += np.log2([x if ok else 1.0 for x, ok in zip(outer, known)])
    out = np.zeros(len(level))
    parents = np.unique([w.parent for w, _ in group.units], return_inverse=True)[1]
    experts = known & np.array([e is not None for _, e in group.units])
    for parent in range(parents.max() + 1):
        here = experts & (parents == parent)
        if here.sum() >= _EXPERTS:
            away = level[here] - np.median(level[here])
            out[here] = np.where(np.abs(away) > _AWAY, away, 0)
    return out


def _empty(group: Group, totals: np.ndarray) -> np.ndarray:
    """bool [n]: scale bytes are all 0 as those of weights that are all zero are, not as those of small numbers cast by value.

    The payload tells them apart; where it was not read, one weight among others may be empty, and a class of them is not.
    """
    zero = group.scales[:, 0] == totals
    if group.payload is not None:
        return zero & all_zero(group)
    return zero & (not zero.all())


def all_zero(group: Group) -> np.ndarray:
    """bool [n]: units whose payload, which must have been read, is zero throughout."""
    return group.payload[:, _ZERO[group.kind.packed]].sum(1) == group.payload.sum(1)


def of(group: Group, rule: str, which: np.ndarray, text: str) -> Finding:
    """A finding about those units of a group that are not zero in `which` [n]."""
    units = [group.units[i] for i in np.flatnonzero(which)]
    return make(
        RULES[rule],
        f"{shown(group.label)}: {text}",
        (w.module for w, _ in units),
        len({w.module for w, _ in group.units}),
        (e for _, e in units),
    )
