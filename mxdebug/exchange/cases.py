"""What is exchanged, and what came of it: records."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import MxdebugError
from ..formats import BlockFormat, BlockTensor
from ..layouts import Layout
from .implementations import IMPLEMENTATIONS, ORDERS, SWIZZLE_BEFORE
from .quantise import read_scales


@dataclass(frozen=True)
class Case:
    """What to exchange. Raises MxdebugError for what cannot be.

    rows_per_rank   tokens on each rank; `sample_tokens(rank, rows, hidden, seed)` makes them
    format          "MXFP8" or "NVFP4"; the global scale of NVFP4 is that of all ranks' tokens, as calibration finds it
    order           "swizzle after", "swizzle before" or "no swizzle"; what vLLM 0.33 does is `IMPLEMENTATIONS[name].order(format)`
    implementation  naive_dp_ep: every rank gets all rows in rank order (`all_gatherv` on dim 0). The others: each token goes to the
                    ranks of its two experts; flashinfer_nvlink_*: into slots, for each sender as many as the rank with most tokens
                    has (unused ones are 0 here, unwritten memory there); deepep_v2: one behind the other
    """

    rows_per_rank: tuple[int, ...]
    hidden: int
    format: str
    order: str
    implementation: str
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.rows_per_rank or min(self.rows_per_rank) < 1:
            raise MxdebugError("rows_per_rank", "numbers >= 1, one for each rank", str(self.rows_per_rank))
        names = tuple(i.name for i in IMPLEMENTATIONS.values() if {i.mxfp8, i.nvfp4} & set(ORDERS))
        for operand, known, got in (("format", ("MXFP8", "NVFP4"), self.format), ("order", ORDERS, self.order),
                                    ("implementation", names, self.implementation)):
            if got not in known:
                raise MxdebugError(operand, f"one of {', '.join(known)}", repr(got), "here only quantised tokens are exchanged")


@dataclass(frozen=True)
class Handed:
    """What one rank's kernel is handed.

    payload   uint8 [rows, K] (MXFP8) or [rows, K/2] (NVFP4)
    scales    uint8, in the shape in which the prepare step hands it on
    source    int64 [rows, 2]: the (rank, row) that each row came from; -1 for a slot that no token filled
    """

    rank: int
    payload: Tensor
    scales: Tensor
    source: Tensor
    columns: int

    def read(self, layout: Layout) -> tuple[Tensor, Tensor]:
        """`read_scales` of this rank's buffer."""
        return read_scales(self.scales, self.payload.shape[0], self.columns, layout)


@dataclass(frozen=True)
class Exchange:
    """One exchange: its case, what each rank sent (`sent`, in logical order), and what each rank's kernel is handed.

    `refused` says what in vLLM itself stops this combination before the kernel is reached; empty where nothing does.
    """

    case: Case
    backend: str
    format: BlockFormat
    sent: tuple[BlockTensor, ...]
    handed: tuple[Handed, ...]
    refused: str

    def expected(self, rank: int) -> tuple[Tensor, Tensor]:
        """(uint8 [rows, columns], bool [rows]): the scales that belong to the rows that `rank` got; and which rows hold a token."""
        h = self.handed[rank]
        filled = h.source[:, 0] >= 0
        out = torch.zeros(h.payload.shape[0], h.columns, dtype=torch.uint8)
        for r, sender in enumerate(self.sent):
            mine = h.source[:, 0] == r
            out[mine] = sender.scales[h.source[mine, 1]]
        return out, filled

    def wrong_rows(self, rank: int, layout: Layout) -> int:
        """How many of the tokens that `rank` got have a scale that is not theirs, for a kernel reading `layout`."""
        expected, filled = self.expected(rank)
        read, outside = self.handed[rank].read(layout)
        return int((((read != expected) | outside).any(-1) & filled).sum())


def refused_by_vllm(case: Case, fmt: BlockFormat) -> str:
    """What of vLLM 0.33 stops this case: mostly, scales that were swizzled before the exchange."""
    if case.implementation == "deepep_v2" and fmt.outer:
        return "NVFP4 travels as bf16 and is quantised afterwards"
    if case.order != SWIZZLE_BEFORE:
        return ""
    if case.implementation == "deepep_v2":
        return "_pack_mxfp8_scale asserts a 2-D tensor, MXFP8's swizzled scales are 1-D"
    if fmt.outer and all(n % 128 == 0 for n in case.rows_per_rank):
        return ""  # a padded matrix with as many rows as the rank has tokens
    if IMPLEMENTATIONS[case.implementation].transport == "rows" and not fmt.outer:
        return "the all-to-all takes 2-D tensors only, MXFP8's swizzled scales are 1-D"
    if case.implementation == "flashinfer_nvlink_one_sided":
        return "moe_a2a_dispatch (FlashInfer nvlink_one_sided_alltoall.cu) checks that the scales have as many rows as the rank has tokens"
    if case.implementation == "flashinfer_nvlink_two_sided" or len(set(case.rows_per_rank)) == 1:
        return ""  # rows are taken by index; or equal counts: all_gatherv forgets the sizes and gathers whatever length each rank has
    return "counts differ between ranks, so all_gatherv (cuda_communicator.py) asserts that a rank sends as many rows as it has tokens"
