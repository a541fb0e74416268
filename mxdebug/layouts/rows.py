"""Row orders: which logical row of w13 stands in which physical row. Logical order is gate (w1), then up (w3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from ..errors import MxdebugError


@dataclass(frozen=True)
class RowOrder:
    """An order of the rows of w13, written as an einops pattern over (half, row): half 0 is gate, half 1 is up.

    `flip` puts up first; `swap` then exchanges the two halves of all rows, whatever is in them. Padding rows, if any, are those that the caller adds to each half before ordering.
    """

    name: str
    pattern: str
    sizes: tuple[tuple[str, int], ...] = ()
    flip: bool = False
    who: str = ""
    swap: bool = False

    def indices(self, half: int) -> Tensor:
        """int64 [2 * half]: physical row i holds logical row indices[i] of [gate; up]."""
        try:
            logical = torch.arange(2 * half).reshape(2, half)
            order = rearrange(logical.flip(0) if self.flip else logical, self.pattern, **dict(self.sizes))
        except Exception as error:
            raise MxdebugError(f"rows in order {self.name}", f"a half that is a multiple of {dict(self.sizes)}",
                               f"{half} rows", "this order works on whole groups") from error
        return order.roll(half) if self.swap else order

    def fits(self, half: int) -> bool:
        """Whether `half` rows can be put into this order."""
        return all(half % size == 0 for _, size in self.sizes)


GATE_UP = RowOrder("[w1; w3]", "h i -> (h i)", who="gate, then up: most checkpoints")
UP_GATE = RowOrder("[w3; w1]", "h i -> (h i)", flip=True, who="up, then gate: FlashInfer CUTLASS and TRT-LLM")
INTERLEAVED = RowOrder("g0,u0,g1,u1", "h i -> (i h)", who="gpt-oss checkpoints")
INTERLEAVED_UP = RowOrder("u0,g0,u1,g1", "h i -> (i h)", flip=True, who="TRT-LLM-gen before its row shuffle")
GROUPS_64 = RowOrder("[u,g] groups of 64", "h (n g) -> (n h g)", (("g", 64),), flip=True, who="NVFP4 FLASHINFER_CUTEDSL")
INTERLEAVED_SWAPPED = RowOrder("g0,u0,g1,u1 with its halves swapped", "h i -> (i h)", swap=True,
                               who="vLLM 0.33's NVFP4 CUTLASS converter on alternating rows: no kernel reads this")
ROW_ORDERS = (GATE_UP, UP_GATE, INTERLEAVED, INTERLEAVED_UP, GROUPS_64, INTERLEAVED_SWAPPED)


@dataclass(frozen=True)
class RowShuffle:
    """A permutation of rows within blocks, on top of a row order: in each block, old row (block/8)*a + b goes to 8*b + a."""

    name: str
    block: int
    who: str

    def indices(self, rows: int) -> Tensor:
        """int64 [rows]: physical row i holds the row indices[i] of the order before."""
        if rows % self.block:
            raise MxdebugError(f"rows for {self.name}", f"a multiple of {self.block}", str(rows), "pad first")
        inner = self.block // 8  # FlashInfer: 4 for blocks of 32 rows, 2 for blocks of 16
        return rearrange(torch.arange(rows), "(n a b) -> (n b a)", a=8, b=inner)

    def fits(self, rows: int) -> bool:
        """Whether `rows` rows can be shuffled."""
        return rows % self.block == 0


@dataclass(frozen=True)
class Twice(RowShuffle):
    """A shuffle that was applied to rows that were shuffled already."""

    def indices(self, rows: int) -> Tensor:
        once = super().indices(rows)
        return once[once]


SHUFFLE_32 = RowShuffle("TRT-LLM shuffle in 32", 32, "FlashInfer shuffle_matrix_a, epilogue_tile_m 128: old row 4a+b goes to 8b+a")
SHUFFLE_16 = RowShuffle("TRT-LLM shuffle in 16", 16, "FlashInfer shuffle_matrix_a, epilogue_tile_m 64: old row 2a+b goes to 8b+a")
SHUFFLED_TWICE = Twice("TRT-LLM shuffle in 32, twice", 32, "a mistake: no kernel reads this")
ROW_SHUFFLES = (SHUFFLE_32, SHUFFLE_16)
