"""Statistics of block scales and payload codes, by class of weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .codes import NAN, NEGATIVE, SATURATED, SUBNORMAL, VALUE, ZERO
from .scene import Group


@dataclass(frozen=True)
class Statistics:
    """One class of weights.

    label, kind, format   such as "model.layers.*.mlp.experts.*.w1", "ModelOpt NVFP4", "NVFP4"
    units       experts' weights and linear modules in it
    blocks      block scales; histogram [256]: of them by byte
    low, high   smallest and largest finite scale that is not zero; None where there is none
    subnormal, zero, nan, negative, saturated   numbers of scales (saturated: E4M3's 448, byte 0x7E; E8M0's 2^127)
    codes       with payload: how often each code occurs, [16] of 4-bit elements (both nibbles together) or [256] of bytes; else None
    minus_zero  with payload: elements that are -0; zero_rows: rows of zeros; lost: blocks with zero scale under other payload
    """

    label: str
    kind: str
    format: str
    units: int
    blocks: int
    histogram: tuple[int, ...]
    low: float | None
    high: float | None
    subnormal: int
    zero: int
    nan: int
    negative: int
    saturated: int
    codes: tuple[int, ...] | None
    minus_zero: int | None
    zero_rows: int | None
    lost: int | None


def statistics(group: Group) -> Statistics:
    """Of one class."""
    e4m3, counts = group.kind.e4m3, group.scales.sum(0)
    there = VALUE[e4m3][(counts > 0) & ~NAN[e4m3] & ~ZERO[e4m3]]
    codes = None if group.payload is None else group.payload.sum(0)

    def number(mask: np.ndarray) -> int:
        return int(counts[mask].sum())

    return Statistics(
        group.label,
        group.kind.name,
        group.kind.format,
        len(group.units),
        int(counts.sum()),
        tuple(counts.tolist()),
        float(np.abs(there).min()) if len(there) else None,
        float(there.max()) if len(there) else None,
        number(SUBNORMAL[e4m3]),
        number(ZERO[e4m3]),
        number(NAN[e4m3]),
        number(NEGATIVE[e4m3]),
        number(SATURATED[e4m3]),
        None if codes is None else tuple(codes.tolist()),
        None if codes is None else int(codes[8 if group.kind.packed else 0x80]),
        None if group.zero_rows is None else int(group.zero_rows.sum()),
        None if group.lost is None else int(group.lost.sum()),
    )
