"""Exercises of notebook 00: one weight by hand, one byte of a swizzle, and whose scale stands there if nobody swizzled."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from .exercises import EXERCISES, Answer, _recorded, check
from .formats import E2M1, E4M3_SCALE, E8M0
from .layouts import SM90_SCALE_FOLD, SWIZZLE_8x4, SWIZZLE_128x4, TRANSPOSED


def _open(answer: Any) -> bool:
    return answer is None or answer is ...


# -- one weight by hand -----------------------------------------------------------------------------------------------

ROW, BLOCK = 0, 10  # of gate of expert 0; payload byte 0xb1, scale byte 124


@functools.cache
def first_bytes() -> tuple[int, int]:
    """(first payload byte, scale byte) of one block of the shipped gpt-oss checkpoint, MXFP4."""
    gate = _recorded("c01")[1].layer.gate
    return int(gate.payload[0, ROW, BLOCK * 16]), int(gate.scales[0, ROW, BLOCK])


def _value(code: int) -> float:
    return float(E2M1.table()[code])


def _weight(answer: Any = None) -> Answer:
    byte, scale_byte = first_bytes()
    if _open(answer):
        return Answer(None, "replace None by a number.\nThe high half of the byte is a code; the table of the 16 codes says its value. "
                      "The scale byte b means 2^(b - 127).")
    try:
        got = None if isinstance(answer, (bool, str)) else float(answer)
    except Exception:  # whatever a learner gives is an answer
        got = None
    if got is None or not math.isfinite(got):
        return Answer(False, f"a weight is a number, this is {answer if isinstance(answer, float) else type(answer).__name__}.")
    low, high = byte & 15, byte >> 4
    scale = float(E8M0.decode(torch.tensor([scale_byte], dtype=torch.uint8)))
    if math.isclose(got, _value(high) * scale, rel_tol=1e-6):
        return Answer(True, f"code {high} is {_value(high):g}, byte {scale_byte} is 2^({scale_byte} - 127) = {scale:g}, and the weight is "
                      f"{_value(high) * scale:g}.\nA kernel does nothing else, some billion times a token.")
    said = [says for value, says in _readings(low, high, scale_byte, scale) if math.isclose(got, value, rel_tol=1e-6)]
    return Answer(False, said[0] if said else _other(got, high, scale))


def _readings(low: int, high: int, b: int, scale: float) -> list[tuple[float, str]]:
    """Known ways to read the two bytes wrong: (what comes out, what that means for a kernel)."""
    v = _value(high)
    e4m3 = float(E4M3_SCALE.decode(torch.tensor([b], dtype=torch.uint8)))
    value = "the code taken for its own value. Codes are no integers: the table says what each stands for."
    return [
        (_value(low) * scale, "that is the weight in the low half, the one before it: the element with the even index is there.\n"
         "A kernel that takes the halves the other way round exchanges all neighbours: fault nibbles-swapped."),
        (v, "that is the code's value alone; the scale does not multiply it yet.\n"
         f"A kernel without the scales would see this block {1 / scale:g} times too large, and others by another factor."),
        (-v * scale, "the size is right, the sign is not. The highest of the four bits is the sign: codes 8 to 15 are negative."),
        (-v, "the size of the code's value without its sign, and without a scale.\n"
         "The highest of the four bits is the sign, and the scale multiplies."),
        (high * scale, f"{high} times the scale: {value}"),
        ((high & 7) * scale, f"{high & 7} times the scale: the sign was cut off, and {value}"),
        (-(high & 7) * scale, f"-{high & 7} times the scale: sign and number, and {value}"),
        ((high - 16) * scale, f"{high - 16} times the scale: two's complement, as for integers, and {value}"),
        (v * b, f"{v:g} times {b}: the byte taken for a number, and it is an exponent.\n"
         "Engines do that with a cast to float: fault scales-cast-by-value."),
        (v * 2.0**b, f"the exponent is {b} - 127, not {b}. The byte counts from 2^-127, so that it needs no sign."),
        (v * 2.0 ** (127 - b), f"the exponent is turned round: it is {b} - 127, not 127 - {b}. Small weights have bytes below 127."),
        (v * e4m3, f"{v:g} times {e4m3:g}: the byte was read as an E4M3, which is what NVFP4 has. MXFP4's scale byte is an exponent."),
    ]


def _other(got: float, high: int, scale: float) -> str:
    off = math.log2(got / (_value(high) * scale)) if got * _value(high) > 0 else math.nan
    if math.isfinite(off) and abs(off - round(off)) < 1e-6:
        return (f"the code is right, the scale is 2^{round(off)} times what it should be: an exponent off by {abs(round(off))}.\n"
                "Each step of the scale byte is a factor of two, for all 32 weights of the block.")
    codes = [c for c in range(16) if math.isclose(got, _value(c) * scale, rel_tol=1e-6)]
    if codes:
        return f"the scale is right. The code is not: {got:g} would be code {codes[0]}. Look at the high half of the byte again."
    return (f"with this scale a weight is one of 15 numbers, and {got:g} is none of them.\n"
            "Two steps: the code's value from the table, then times 2^(b - 127).")


# -- one byte of a swizzle --------------------------------------------------------------------------------------------

SHAPE, PLACE = (128, 8), (70, 5)
BYTE = int(SWIZZLE_128x4.index_map(*SHAPE)[PLACE])


def _wrong_places() -> dict[int, str]:
    (row, column), columns = PLACE, SHAPE[1]
    fold, eight, turned = (int(layout.index_map(*SHAPE)[PLACE]) for layout in (SM90_SCALE_FOLD, SWIZZLE_8x4, TRANSPOSED))
    return {
        row * columns + column: "It is the linear place: row after row. Bytes left like that are fault scales-linear.",
        fold: "It is the place in the SM90 scale fold, the swizzle of another kernel.",
        eight: "It is the place in layout 8x4, the swizzle of another kernel.",
        turned: "It is the place column after column: the transposed matrix.",
        row % 32 * 16 + row // 32 * 4 + column % 4: "It is the place inside the tile. One tile of 512 bytes lies before it.",
        column // 4 * 512 + row * 4 + column % 4: "The tile is right; in it this counts row after row, and rows 32 apart stand together.",
    }


def _place(answer: Any = None) -> Answer:
    (row, column), (rows, columns) = PLACE, SHAPE
    if _open(answer):
        return Answer(None, f"replace None by a number from 0 to {rows * columns - 1}.\nThree steps: how many whole tiles of 512 bytes "
                      "lie before it? In which line of 16 bytes is it (row modulo 32)? Where in the line (row // 32 picks a group of 4, "
                      "the block one of the 4)?")
    if isinstance(answer, bool) or not isinstance(answer, int):
        return Answer(False, f"a byte offset is a whole number, this is {type(answer).__name__}.")
    if not 0 <= answer < rows * columns:
        return Answer(False, f"the scales have {rows * columns} bytes, 0 to {rows * columns - 1}; {answer} is outside.")
    if answer == BYTE:
        return Answer(True, f"here the kernel looks for the scale of row {row}, block {column}.\n"
                      + SWIZZLE_128x4.explain(row, column, rows, columns))
    there = _holds(answer, swizzled=True)
    meaning = f"at byte {answer} the kernel looks for the scale of row {there[0]}, block {there[1]}."
    named = _wrong_places().get(answer)
    if named is None and there[0] == row:
        named = "The row is right, the block is not: the tile is block // 4, and the byte in its group of 4 is block modulo 4."
    elif named is None and there[1] == column:
        named = "The block is right, the row is not: the line is row modulo 32, and the group of 4 in it is row // 32."
    return Answer(False, meaning + (f"\n{named}" if named else ""))


def _holds(byte: int, swizzled: bool) -> tuple[int, int]:
    """(row, block) whose scale lies at that byte."""
    if not swizzled:
        return divmod(byte, SHAPE[1])
    row, column = (SWIZZLE_128x4.index_map(*SHAPE) == byte).nonzero()[0].tolist()
    return row, column


# -- whose scale stands there -----------------------------------------------------------------------------------------


def _reader(row: Any = None, column: Any = None) -> Answer:
    if isinstance(row, (tuple, list)) and len(row) == 2 and column is None:
        row, column = row
    if _open(row) or _open(column):
        return Answer(None, f"give a row and a block.\nLinear means row after row, {SHAPE[1]} bytes each. The byte is that of exercise 2.")
    for what, value, size in (("row", row, SHAPE[0]), ("block", column, SHAPE[1])):
        if isinstance(value, bool) or not isinstance(value, int):
            return Answer(False, f"a {what} is a whole number, this is {type(value).__name__}.")
        if not 0 <= value < size:
            return Answer(False, f"{what}s go from 0 to {size - 1}; {value} is outside.")
    (r, c), right = PLACE, _holds(BYTE, swizzled=False)
    if (row, column) == right:
        return Answer(True, f"the numbers of row {r}, block {c} are multiplied by the scale of row {row}, block {column}.\n"
                      "It is a valid scale of about the right size, so nothing complains.")
    if (row, column) == PLACE:
        return Answer(False, "that would be so if somebody had swizzled. Here the bytes lie row after row, and the kernel looks at the "
                      "same byte as before.")
    if (row, column) == _holds(r * SHAPE[1] + c, swizzled=True):
        return Answer(False, f"that is the other direction: row {row}, block {column} gets the scale of row {r}, block {c}.")
    byte = row * SHAPE[1] + column
    if byte in _wrong_places():
        return Answer(False, f"row {row}, block {column} lies at byte {byte}, and that is not where the kernel looks: see exercise 2.")
    if (row, column) == right[::-1]:
        return Answer(False, "these are the right two numbers, the other way round: first the row, then the block.")
    says = "Divide the byte of exercise 2 by the bytes of a row."
    if row == right[0]:
        says = "The row is right: look at the rest of the division."
    return Answer(False, f"in linear order row {row}, block {column} lies at byte {byte}. The kernel looks at another one.\n{says}")


START_EXERCISES: dict[str, Callable[..., Answer]] = {"start-weight": _weight, "start-place": _place, "start-reader": _reader}
EXERCISES.update(START_EXERCISES)

__all__ = ["START_EXERCISES", "check", "first_bytes"]
