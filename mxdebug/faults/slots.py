"""Faults that fill one slot of an operand's form otherwise than the kernel reads it: how they are made and struck."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..recipes import PAD_ALL
from .fault import Fault, Situation, Slots, needs

W13 = ("w13", "w13_scale", "w13_bias")
PAYLOADS, SCALES, BIASES = ("w13", "w2"), ("w13_scale", "w2_scale"), ("w13_bias", "w2_bias")


def _inject(id: str, slots: Slots) -> Callable[[Situation, tuple[str, ...]], Situation]:
    def inject(situation: Situation, keys: tuple[str, ...]) -> Situation:
        forms = {k: situation.plan.forms[k] for k in keys if k in situation.plan.forms}
        changes = {k: slots(k, form, situation.recipe.contract) for k, form in forms.items()}
        needs(all(changes.values()) and bool(changes), id, "a kernel that reads these operands in another form")
        if any({"padding", "fill"} & set(c) for c in changes.values()) and PAD_ALL not in (c.get("padding") for c in changes.values()):
            needs(any((f.rows, f.columns) != (f.padded_rows, f.padded_columns) for f in forms.values()), id, "a size that needs padding")
            needs(
                "fill" in changes[keys[0]] or all(f.rows != f.padded_rows for f in forms.values()),
                id,
                "an intermediate size that needs padding",
            )
        out = situation
        for k, change in changes.items():
            out = out.edit((k,), lambda form, change=change: change)
        return out

    return inject


def slot_fault(
    id: str,
    title: str,
    strikes: tuple[str, ...],
    fix: str,
    reports: tuple[str, ...],
    needed: str,
    slots: Slots,
    variants: tuple[Any, ...] = (),
) -> Fault:
    return Fault(
        id,
        title,
        strikes,
        _inject(id, slots),
        "the operand's bytes equal the checkpoint's in this form, and in no simpler one",
        needed,
        fix,
        reports,
        slots=slots,
        variants=variants,
    )
