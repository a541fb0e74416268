"""Exercises of notebook 04: one byte by hand, the step after the exchange, and a buffer whose history nobody wrote down."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .errors import MxdebugError
from .exchange import NO_SWIZZLE, ORDERS, SWIZZLE_AFTER, quantise_activations, sample_tokens
from .exercises import EXERCISES, Answer, check
from .formats import NVFP4, BlockTensor
from .layouts import SCALE_LAYOUTS, SWIZZLE_8x4, SWIZZLE_128x4, TRANSPOSED, Layout


def _open(answer: Any) -> bool:
    return answer is None or answer is ...


# -- one byte by hand -------------------------------------------------------------------------------------------------

SHAPE, PLACE = (200, 32), (170, 22)


def _place(answer: Any = None) -> Answer:
    (rows, columns), (row, column) = SHAPE, PLACE
    padded = SWIZZLE_128x4.padded(rows, columns)
    size = padded[0] * padded[1]
    if _open(answer):
        return Answer(None, f"replace None by a number from 0 to {size - 1}.\n"
                      f"Write token {row} as mt*128 + m4*32 + m32 and column {column} as kt*4 + k4. Then memory counts "
                      "mt, kt, m32, m4, k4, the last one fastest. "
                      f"kt goes up to {columns // 4 - 1}, m32 to 31, m4 and k4 to 3.")
    if isinstance(answer, bool) or not isinstance(answer, int):
        return Answer(False, f"a byte offset is a whole number, this is {type(answer).__name__}.")
    if not 0 <= answer < size:
        return Answer(False, f"the buffer has {size} bytes, 0 to {size - 1}; {answer} is outside.")
    if int(SWIZZLE_128x4.index_map(rows, columns)[row, column]) == answer:
        beyond = f"\nLinear scales of {rows} tokens have {rows * columns} bytes: a kernel that is handed those reads beyond their end here."
        return Answer(True, f"here the kernel looks for the scale of elements {column * 32} to {column * 32 + 31} of token {row}.\n"
                      + SWIZZLE_128x4.explain(row, column, rows, columns) + beyond)
    there = (SWIZZLE_128x4.index_map(*padded) == answer).nonzero()[0].tolist()
    whose = "padding (no token has that row)" if there[0] >= rows else f"token {there[0]}, column {there[1]}"
    others = {"the linear place": row * columns + column,
              "the place in layout 8x4": int(SWIZZLE_8x4.index_map(rows, columns)[row, column]),
              "the place in the transposed matrix": int(TRANSPOSED.index_map(rows, columns)[row, column]),
              "the place inside its tile only; the tiles before it are missing": _in_tile(row, column),
              "the place if memory counted all tiles of a column first; it counts the columns of a row of tiles":
              (column // 4 * (padded[0] // 128) + row // 128) * 512 + _in_tile(row, column)}
    named = [f"It is {name}." for name, value in others.items() if value == answer]
    if not named and there[0] == row:
        named = ["The token is right, the column is not: look at kt and k4."]
    elif not named and there[1] == column:
        named = ["The column is right, the token is not: look at mt, m4 and m32; m4 counts 32 tokens at a time."]
    return Answer(False, "\n".join([f"byte {answer} is where the kernel looks for {whose}.", *named]))


def _in_tile(row: int, column: int) -> int:
    return row % 32 * 16 + row % 128 // 32 * 4 + column % 4


# -- the step after the exchange --------------------------------------------------------------------------------------

# (format, tokens, columns, swizzled)
_CASES = (("NVFP4", 200, 64, True), ("MXFP8", 256, 32, True), ("MXFP8", 200, 32, True), ("MXFP8", 33, 6, True), ("MXFP8", 200, 32, False))


def _restore(answer: Any = None) -> Answer:
    if _open(answer):
        return Answer(None, "give a function.")
    g = torch.Generator().manual_seed(4)
    for format, rows, columns, swizzled in _CASES:
        scales = torch.randint(100, 140, (rows, columns), generator=g, dtype=torch.uint8)
        what = f"{format}, {rows} x {columns}, for a kernel that reads {'swizzled' if swizzled else 'linear'}"
        try:
            got = answer(scales.clone(), format, swizzled)
        except Exception as error:  # whatever a learner's code raises is an answer
            return Answer(False, f"on {what}, the function raised {type(error).__name__}: {error}\n"
                          "Pad first, to a multiple of 128 rows and of 4 columns; then a reshape to five axes fits any size.")
        if _open(got):
            return Answer(None, "the function returns nothing yet.\n"
                          "Pad with zeros to whole tiles; one reshape to the axes mt, m4, m32, kt, k4; "
                          "one permute; then flat. And for a kernel that reads linear scales, nothing of it.")
        if not isinstance(got, Tensor) or got.dtype != torch.uint8:
            return Answer(False, f"the kernel gets uint8 bytes, this is {got.dtype if isinstance(got, Tensor) else type(got).__name__}.")
        want = SWIZZLE_128x4.pack(scales).flatten() if swizzled else scales.flatten()
        if not torch.equal(got.flatten(), want):
            return Answer(False, f"on {what}: {_meaning(got.flatten(), scales, want, format, swizzled)}")
    return Answer(True, f"all {len(_CASES)} cases: both formats, sizes that fill their tiles and sizes that do not, and a kernel that "
                  "reads linear scales.\nThe function never looks at the format: that is the difference from the code behind vLLM #42118.")


def _meaning(got: Tensor, scales: Tensor, want: Tensor, format: str, swizzled: bool) -> str:
    if not swizzled and got.numel() > want.numel() and torch.equal(got, _padded(scales)):
        return "these scales are in the right order, but padded: a kernel that reads linear scales takes the rows one behind the other, so the padding moves them."
    if not swizzled:
        return ("these scales were swizzled. TRT-LLM and CuTe-DSL read them linear: this breaks a path that worked.\n"
                "`swizzled` says what the kernel reads.")
    if torch.equal(got, scales.flatten()):
        if format == "MXFP8":
            return ("these scales are still linear.\nSwizzled for NVFP4 and not for MXFP8: that is #42118. A token's scales would be those "
                    "of others; where rows are no multiple of 128, the kernel also reads beyond the end.")
        return "these scales are still linear. The kernel takes them for swizzled."
    named = [f"They are right for layout {layout.name}." for layout in SCALE_LAYOUTS if _packed(layout, scales, got)]
    if got.numel() < want.numel():
        return (f"{got.numel()} bytes, and the kernel reads {want.numel()}: whole tiles of 128 x 4. Nothing checks the size; "
                f"what lies in the {want.numel() - got.numel()} bytes behind the buffer becomes scales.\n"
                + (named[0] if named else "Pad with zeros first."))
    if got.numel() > want.numel():
        return f"{got.numel()} bytes, and whole tiles of 128 x 4 have {want.numel()}."
    return (f"{int((got != want).sum())} of {want.numel()} bytes are not what the kernel should find there.\n"
            + (named[0] if named else "Look at the order of the axes: memory counts mt, kt, m32, m4, k4."))


def _padded(scales: Tensor) -> Tensor:
    rows, columns = SWIZZLE_128x4.padded(*scales.shape)
    return torch.nn.functional.pad(scales, (0, columns - scales.shape[1], 0, rows - scales.shape[0])).flatten()


def _packed(layout: Layout, scales: Tensor, got: Tensor) -> bool:
    try:
        return torch.equal(layout.pack(scales).flatten(), got)
    except MxdebugError:  # the layout does not take this size
        return False


# -- a buffer whose history nobody wrote down -------------------------------------------------------------------------

_RANKS = (100, 100)


@functools.cache
def _unknown() -> tuple[Tensor, Tensor, tuple[BlockTensor, ...]]:
    g = torch.tensor(2.0**-6)
    tokens = [sample_tokens(rank, n, 1024, 11) for rank, n in enumerate(_RANKS)]
    sent = tuple(BlockTensor(*quantise_activations(t, NVFP4, swizzled=False, global_scale=g), NVFP4, g) for t in tokens)
    return torch.cat([b.payload for b in sent]), torch.cat([SWIZZLE_128x4.pack(b.scales).flatten() for b in sent]), sent


def unknown_scales() -> tuple[Tensor, Tensor, tuple[BlockTensor, ...]]:
    """(payload, scales, what the two ranks sent) of an NVFP4 call: 200 tokens of 1024 elements, for a kernel that reads 128x4."""
    return _unknown()


EVIDENCE = ("size", "zeros", "senders")


def _history(order: Any = None, evidence: Any = None) -> Answer:
    payload, scales, sent = _unknown()
    if _open(order) or _open(evidence):
        return Answer(None, f"give an order and the evidence.\nOrders: {', '.join(ORDERS)}\nEvidence: {', '.join(EVIDENCE)}\n"
                      "Ask examine_scales first without what was sent, and read every line that it prints. NVFP4 has one scale "
                      "for 16 elements.")
    if order not in ORDERS or evidence not in EVIDENCE:
        return Answer(False, f"the orders are {', '.join(ORDERS)}; the evidence is one of {', '.join(EVIDENCE)}.")
    size, rows, columns = scales.numel(), len(payload), sent[0].scales.shape[1]
    n, first = SWIZZLE_128x4.tile[0], _RANKS[0]
    if order == NO_SWIZZLE:
        return Answer(False, f"{rows} x {columns} linear scales are {rows * columns} bytes; these are {size}.")
    if order == SWIZZLE_AFTER:
        found = SWIZZLE_128x4.unpack(scales, rows, columns) == torch.cat([b.scales for b in sent])
        return Answer(False, f"the size would fit, {size} bytes. But read as the swizzle of all {rows} rows, only "
                      f"{100 * found.double().mean():.1f} % of the scales are what was sent.")
    if evidence == "size":
        return Answer(False, f"the order is right, the reason is not: two ranks of {first} tokens fill two tiles of {n} rows, "
                      f"and so do {rows} tokens. Both are {size} bytes.")
    if evidence == "senders":
        return Answer(False, "the order is right, and what was sent would prove it. But you need less than that: the call alone is enough.")
    zeros = int((SWIZZLE_128x4.unpack(scales, rows, columns) == 0).sum())
    return Answer(True, f"each rank swizzled its {first} rows before the exchange. The kernel then takes padding for the scales of "
                  f"rank 1's first {n - first} tokens, and for each of its others the scales of the token {n - first} rows before.\n"
                  f"The size cannot tell. But {zeros} scales are 0x00, as padding is, and their blocks are not zero: "
                  "no quantiser does that.")


SCALES_EXERCISES: dict[str, Callable[..., Answer]] = {"scale-place": _place, "scale-restore": _restore, "scale-history": _history}
EXERCISES.update(SCALES_EXERCISES)

__all__ = ["SCALES_EXERCISES", "check", "unknown_scales"]
