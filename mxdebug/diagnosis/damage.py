"""An operand that no reading explains: are its bytes the checkpoint's, but for some that are zero, or NaN's code, or all the same?"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..formats import BlockFormat
from .finding import CONSISTENT, PROVED
from .recover import Recovered, Source

NOT_LOADED, NAN = "operand-not-loaded", "scales-nan"


def nan_codes(fmt: BlockFormat) -> tuple[int, ...]:
    """The bytes that are NaN as block scales of a format."""
    return tuple(torch.isnan(fmt.scale.table()).nonzero().flatten().tolist())


@dataclass(frozen=True)
class Damage:
    """fault: NOT_LOADED or NAN; strength and text of the evidence."""

    fault: str
    strength: str
    text: str


def find_damage(actual: Tensor, r: Recovered, source: Source, nan: tuple[int, ...]) -> Damage | None:
    """What happened to the experts of an operand that have no explanation; None where it is not one thing.

    actual  [E, bytes]; nan: the bytes that mean NaN, none for payloads
    """
    lost = [p for p, e in enumerate(r.experts) if e < 0]
    rank = source.parallel.tp_rank
    if not lost or source.shape(r.key, rank) is None or actual.dtype != torch.uint8 or r.form.layout is None or len(r.expected_experts) != len(actual):
        return None
    which = (
        "every expert"
        if len(lost) == len(actual)
        else f"expert{'s' if len(lost) > 1 else ''} {', '.join(map(str, lost[:8]))}{',...' if len(lost) > 8 else ''}"
    )
    if len({int(actual[p][0]) for p in lost}) == 1 and all(bool((actual[p] == actual[p][0]).all()) for p in lost):
        return Damage(
            NOT_LOADED,
            CONSISTENT,
            f"every byte of {which} is 0x{int(actual[lost[0]][0]):02x}, as of memory that was never written or was filled",
        )
    form = r.form if r.explained else r.expected
    bad = total = 0
    values: set[int] = set()
    for p in lost:
        expert = r.expected_experts[p]
        want, got = form.apply(source.logical(r.key, rank, slice(expert, expert + 1))).reshape(-1), actual[p]
        if want.numel() != got.numel():
            return None
        if form.layout.bits:  # then a byte of memory is no byte of the operand
            want, got = (form.layout.unpack(t, form.halves * form.padded_rows, form.padded_columns).flatten() for t in (want, got))
        differ = want != got
        values |= set(got[differ].unique().tolist())
        bad, total = bad + int(differ.sum()), total + want.numel()
    if values == {0}:
        return Damage(
            NOT_LOADED,
            PROVED,
            f"{bad} of {total} bytes of {which} are zero where the checkpoint's are not, all others are the checkpoint's",
        )
    if values and values <= set(nan):
        return Damage(NAN, PROVED, f"{bad} of {total} scales of {which} are NaN, all others are the checkpoint's")
    return None
