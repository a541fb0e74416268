"""The exercises of notebook 00: right answers, what each wrong one is said to mean, and answers that make no sense."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from mxdebug.exercises import EXERCISES, WIDTH
from mxdebug.exercises_start import BYTE, START_EXERCISES, check, first_bytes
from mxdebug.layouts import SWIZZLE_128x4


def flat(answer: Any) -> str:
    assert max(map(len, str(answer).splitlines())) <= WIDTH
    return " ".join(str(answer).split())


def test_they_are_registered() -> None:
    assert START_EXERCISES.items() <= EXERCISES.items() and len(START_EXERCISES) == 3


# -- one weight by hand -----------------------------------------------------------------------------------------------


def test_the_bytes_by_code_that_is_not_ours() -> None:
    byte, scale = first_bytes()
    assert (byte, scale) == (0xB1, 124)  # as the notebook says them
    element = np.array([byte >> 4], np.uint8).view(ml_dtypes.float4_e2m1fn).astype(np.float64)
    assert element * np.array([scale], np.uint8).view(ml_dtypes.float8_e8m0fnu).astype(np.float64) == -0.1875


# 0xb1 and 124: the high half is code 11, sign 1 and 011, which is -1.5; 2^(124 - 127) = 0.125; -1.5 * 0.125 = -0.1875.
@pytest.mark.parametrize(("answer", "right", "says"), [
    ((), None, "NOT ANSWERED YET: replace None"), ((None,), None, "a code"), ((...,), None, "b - 127"),
    ((-0.1875,), True, "code 11 is -1.5, byte 124 is 2^(124 - 127) = 0.125"), ((torch.tensor(-0.1875),), True, "-0.1875"),
    ((np.float32(-0.1875),), True, "RIGHT"),
    ((0.0625,), False, "fault nibbles-swapped"),              # code 1: 0.5 * 0.125
    ((-1.5,), False, "the scale does not multiply it yet. A kernel without the scales would see this block 8 times too large"),
    ((0.1875,), False, "the size is right, the sign is not"), ((1.5,), False, "without its sign, and without a scale"),
    ((1.375,), False, "11 times the scale: the code taken for its own value"),   # 11 * 0.125
    ((0.375,), False, "3 times the scale: the sign was cut off"), ((-0.375,), False, "-3 times the scale"),
    ((-0.625,), False, "-5 times the scale: two's complement"),                  # 0b1011 = 11 - 16
    ((-186.0,), False, "fault scales-cast-by-value"),                            # -1.5 * 124
    ((-1.5 * 2.0**124,), False, "the exponent is 124 - 127, not 124"), ((-12.0,), False, "turned round"),
    ((-576,), False, "-1.5 times 384: the byte was read as an E4M3"),            # 0 1111 100: 2^8 * 1.5
    ((-0.75,), False, "the scale is 2^2 times what it should be: an exponent off by 2"), ((-0.09375,), False, "2^-1 times"),
    ((0.5,), False, "0.5 would be code 6"), ((0,), False, "0 would be code 0"), ((-0.2,), False, "-0.2 is none of them"),
    ((True,), False, "this is bool"), (("-0.1875",), False, "this is str"), ((float("nan"),), False, "this is nan"),
    ((float("inf"),), False, "this is inf"), (([-0.1875, 0.0625],), False, "this is list"), ((1j,), False, "this is complex"),
    ((torch.zeros(3),), False, "this is Tensor"), ((10**400,), False, "this is int"),
])
def test_weight(answer: tuple[Any, ...], right: bool | None, says: str) -> None:
    got = check("start-weight", *answer)
    assert got.right is right and says in flat(got), str(got)


# -- one byte of a swizzle --------------------------------------------------------------------------------------------


def test_the_byte_by_cublas_own_formula() -> None:
    # cuBLAS, "1D block scaling factors layout": in a tile, (row % 32) * 16 + (row / 32) * 4 + column; tiles go along the row first.
    assert BYTE == 512 * (5 // 4) + (70 % 32) * 16 + (70 // 32) * 4 + 5 % 4 == 617


@pytest.mark.parametrize(("answer", "right", "says"), [
    (None, None, "how many whole tiles"), (..., None, "0 to 1023"),
    (617, True, "m4 2*32 + m32 6"),
    (565, False, "It is the linear place: row after row. Bytes left like that are fault scales-linear."),        # 70 * 8 + 5
    (865, False, "in the SM90 scale fold"),                   # 64 + 6: rb 1*512 + kb 1*256 + f 6*16 + s 0*4 + g 1
    (569, False, "layout 8x4"),                               # mt 8*64 + kt 1*32 + m8 6*4 + k4 1
    (710, False, "the transposed matrix"),                    # 5 * 128 + 70
    (105, False, "One tile of 512 bytes lies before it"),     # 617 - 512
    (793, False, "rows 32 apart stand together"),             # 512 + 70 * 4 + 1
    (618, False, "at byte 618 the kernel looks for the scale of row 70, block 6. The row is right, the block is not"),
    (621, False, "row 102, block 5. The block is right, the row is not"), (0, False, "row 0, block 0"),
    (-1, False, "is outside"), (1024, False, "is outside"), (617.0, False, "this is float"), (True, False, "this is bool"),
    ("617", False, "this is str"), (torch.tensor([617]), False, "this is Tensor"),
])
def test_place(answer: Any, right: bool | None, says: str) -> None:
    got = check("start-place", answer)
    assert got.right is right and says in flat(got), str(got)


def test_one_byte_is_right_and_none_raises() -> None:
    assert [byte for byte in range(1024) if check("start-place", byte).right] == [617]


# -- whose scale stands there -----------------------------------------------------------------------------------------


# Byte 617 of linear rows of 8 bytes: 617 = 77 * 8 + 1.
@pytest.mark.parametrize(("answer", "right", "says"), [
    ((), None, "give a row and a block"), ((None, 1), None, "NOT ANSWERED"), ((77,), None, "NOT ANSWERED"),
    ((77, ...), None, "NOT ANSWERED"),
    ((77, 1), True, "row 70, block 5 are multiplied by the scale of row 77, block 1"), (((77, 1),), True, "RIGHT"),
    (([77, 1],), True, "RIGHT"),
    ((70, 5), False, "if somebody had swizzled"),
    ((35, 5), False, "the other direction: row 35, block 5 gets the scale of row 70, block 5"),  # byte 565 = 512 + 3 * 16 + 1 * 4 + 1
    ((13, 1), False, "lies at byte 105, and that is not where the kernel looks: see exercise 2"),
    ((1, 77), False, "blocks go from 0 to 7; 77 is outside"),
    ((77, 2), False, "lies at byte 618. The kernel looks at another one. The row is right"),
    ((76, 1), False, "lies at byte 609. The kernel looks at another one. Divide"),
    ((128, 1), False, "is outside"), ((-1, 1), False, "is outside"), ((77.0, 1), False, "a row is a whole number, this is float"),
    ((77, "1"), False, "a block is a whole number, this is str"), ((True, 1), False, "this is bool"),
    (((1, 2, 3), 1), False, "this is tuple"),
])
def test_reader(answer: tuple[Any, ...], right: bool | None, says: str) -> None:
    got = check("start-reader", *answer)
    assert got.right is right and says in flat(got), str(got)


def test_the_reader_by_reading() -> None:
    """Mark each linear byte with the place that it belongs to, and read as the kernel does."""
    marks = torch.arange(128 * 8)
    low, high = ((part.to(torch.uint8)) for part in (marks & 255, marks >> 8))
    row, block = (SWIZZLE_128x4.unpack(part, 128, 8)[70, 5].item() for part in (low, high))
    assert divmod(row + 256 * block, 8) == (77, 1)
    right = [(r, b) for r in range(128) for b in range(8) if check("start-reader", r, b).right]
    assert right == [(77, 1)]
