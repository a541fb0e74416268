"""What some backends do to healthy block scales. Notes: no fault of the file."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ...formats import E4M3
from ..catalogue import RULES
from ..codes import CODE, E4M3_VALUE, NAN
from ..finding import Finding, make, shown
from ..scene import Group, Scene, share

_NORMAL, _LOST = 2.0**-6, 2.0**-10  # E4M3's smallest normal; half its smallest subnormal, which rounds to even: to 0
_FP16_LOST = (CODE >= 103) & (CODE <= 112)  # 2^-24 .. 2^-15: FP16's subnormals (1Cat-vLLM#222)
_POSITIVE = (E4M3_VALUE > 0) & ~NAN[True]


def check(scene: Scene) -> Iterator[Finding]:
    """Folds and flushes, with the share of block scales that they strike."""
    for group in scene.groups:
        yield from (_nvfp4(scene, group) if group.kind.e4m3 else _mx(group))


def _nvfp4(scene: Scene, group: Group) -> Iterator[Finding]:
    multipliers = np.array([scene.multiplier(w, "global") or math.nan for w, _ in group.units])
    usable = (multipliers > 0) & np.isfinite(multipliers)
    # E4M3's positive numbers ascend with their bytes 1 .. 0x7E, so those whose product with g is below a limit are the first ones.
    below = np.concatenate([np.zeros((usable.sum(), 1), dtype=np.int64), group.scales[usable, 1:0x7F].cumsum(1, dtype=np.int64)], axis=1)
    values, rows, g = E4M3_VALUE[1:0x7F], np.arange(usable.sum()), multipliers[usable]
    lost = int(below[rows, np.searchsorted(values, _LOST / g, side="right")].sum())
    subnormal = int(below[rows, np.searchsorted(values, _NORMAL / g)].sum()) - lost
    names = list(dict.fromkeys(w.module for w, _ in group.units))
    if subnormal + lost:
        yield make(
            RULES["fold-e4m3"],
            f"{shown(group.label)}: {share(subnormal, group.blocks)} of the folded block scales would be subnormal, "
            f"{share(lost, group.blocks)} zero",
            names,
            len(names),
        )
    if flushed := _flushed(group):
        yield make(
            RULES["marlin-flush"],
            f"{shown(group.label)}: {flushed:,} of {group.blocks:,} block scales ({share(flushed, group.blocks)})",
            names,
            len(names),
        )


def _flushed(group: Group) -> int:
    """Block scales that become 0 with bf16 activations.

    vLLM multiplies all scales of a layer's projection (of a linear module) by the power of two that lifts the largest above 224, at most
    to 448 (marlin_utils_fp4.py `_nvfp4_compute_scale_factor`, as `mxdebug.recipes.marlin`); S0E5M3 has no number below 2^-6. w13 is one
    tensor there: here gate and up are looked at apart, which differs where their largest scales do.
    """
    together: dict[str, list[int]] = {}
    for i, (w, e) in enumerate(group.units):
        together.setdefault(w.parent if e is not None else w.module, []).append(i)
    flushed = 0
    for rows in together.values():
        counts = group.scales[rows].sum(0)
        if (there := E4M3_VALUE[_POSITIVE & (counts > 0)]).size:
            factor = 2.0 ** (math.frexp(E4M3.max / there.max())[1] - 1)
            flushed += int(counts[_POSITIVE & (E4M3_VALUE * factor < _NORMAL)].sum())
    return flushed


def _mx(group: Group) -> Iterator[Finding]:
    names = list(dict.fromkeys(w.module for w, _ in group.units))
    for rule, mask in (("e8m0-fp16", _FP16_LOST), ("e8m0-zero", CODE == 0)):
        if found := int(group.hits(mask).sum()):
            yield make(
                RULES[rule],
                f"{shown(group.label)}: {found:,} of {group.blocks:,} block scales ({share(found, group.blocks)})",
                names,
                len(names),
            )
