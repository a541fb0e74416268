"""Marlin's layouts: 4-bit weights in tensor-core tiles, block scales and biases permuted to the order in which a thread reads them.

Marlin is vLLM's weight-only GEMM: 4-bit weights, activations of 16 bits (A16) or 8 bits (A8). The width of the activations
changes the tile, so it changes the layout.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from einops import rearrange
from torch import Tensor

from ..errors import MxdebugError
from .layout import Layout


def _nibbles(order: tuple[int, ...]) -> tuple[int, ...]:
    """`Layout.bits` that sends nibble n of a 32-bit word, its four bits together, to nibble order[n]."""
    return tuple(4 * order[b // 4] + b % 4 for b in range(32))


# A payload byte holds the codes of k and k + 1 in one row. A word holds eight codes that one thread multiplies. Its bytes
# are gathered first; then the nibbles are moved, since the kernel takes a word apart by masks and shifts.
_WEIGHTS_A16 = Layout(
    # 16 k x 64 rows. Thread (c, r): rows 16 j + 8 b + c, k = 8 h + 2 r + l. In the word: first l, then b, then h.
    "Marlin weights A16", "(nt j b c) (kt h r) -> kt nt c r j b h", (("j", 4), ("b", 2), ("c", 8), ("h", 2), ("r", 4)), pads=False,
    bits=_nibbles(tuple(4 * (n % 2) + n // 2 for n in range(8))), source="vLLM gptq_marlin_repack.cu, 4 bits, is_a_8bit false")
_WEIGHTS_A8 = Layout(
    # 32 k x 32 rows. Thread (c, r): rows 16 j + 8 b + c, k = 16 h + 4 r + 2 q + l. A word has one row; in it: first q, then l, then h.
    "Marlin weights A8", "(nt j b c) (kt h r q) -> kt nt c r j b q h",
    (("j", 2), ("b", 2), ("c", 8), ("h", 2), ("r", 4), ("q", 2)), pads=False,
    bits=_nibbles(tuple(4 * (n // 4) + 2 * (n % 2) + n // 2 % 2 for n in range(8))),
    source="vLLM gptq_marlin_repack.cu, 4 bits, is_a_8bit true")
_SCALES_A16 = Layout(
    # [K / block, rows]. Row 32 j + 16 y + 8 x + i: 64 rows as 8 x 8, transposed (get_scale_perms, the first); then the middle two of
    # each four change places (x before y), since the kernel takes four bytes apart by masks and shifts.
    "Marlin scales A16", "(nt j y x i) g -> g nt i j x y", (("j", 2), ("y", 2), ("x", 2), ("i", 8)), pads=False,
    source="vLLM marlin_permute_scales, group-wise, then mxfp4_/nvfp4_marlin_process_scales")
_SCALES_A8 = Layout(
    # [K / block, rows]. 32 rows: pairs l of row 8 a + 2 i + l (get_scale_perms, the second).
    "Marlin scales A8", "(nt a i l) g -> g nt i a l", (("a", 4), ("i", 4), ("l", 2)), pads=False,
    source="vLLM marlin_permute_scales, single")


@dataclass(frozen=True)
class MarlinLayout:
    """The layouts of a 4-bit weight and of its block scales for one width of activations.

    Source: vLLM csrc gptq_marlin_repack.cu; quantization/utils/marlin_utils.py `marlin_permute_scales`.
    """

    name: str
    weights: Layout
    scales: Layout

    def pack(self, payload: Tensor) -> Tensor:
        """uint8 payload [..., N, K/2] -> int32 [..., K/16, 2N].

        Raises MxdebugError where N is no multiple of the tile's rows (A16 64, A8 32) or K of the tile's columns (16, 32).
        """
        n, half = payload.shape[-2:]
        return self.weights.pack(payload).reshape(*payload.shape[:-2], n * half).view(torch.int32).unflatten(-1, (half // 8, 2 * n))

    def unpack(self, words: Tensor) -> Tensor:
        """int32 [..., K/16, 2N] -> uint8 payload [..., N, K/2]: the inverse of `pack`."""
        if words.dtype != torch.int32 or words.dim() < 2:
            raise MxdebugError("Marlin weights", "int32 of shape [..., K/16, 2N]", f"{words.dtype} of shape {list(words.shape)}",
                               "weights that are not packed for Marlin")
        rows, columns = words.shape[-1] // 2, 8 * words.shape[-2]
        return _unpack(self.weights, words.contiguous().view(torch.uint8), words.shape[:-2], rows, columns)

    def pack_scales(self, scales: Tensor) -> Tensor:
        """uint8 scale bytes [..., N, K/block] -> uint8 [..., K/block, N]. The bytes' values are the recipe's matter."""
        n, groups = scales.shape[-2:]
        return self.scales.pack(scales).reshape(*scales.shape[:-2], groups, n)

    def unpack_scales(self, packed: Tensor) -> Tensor:
        """uint8 [..., K/block, N] -> uint8 [..., N, K/block]: the inverse of `pack_scales`."""
        return _unpack(self.scales, packed, packed.shape[:-2], packed.shape[-1], packed.shape[-2])


def _unpack(layout: Layout, physical: Tensor, lead: tuple[int, ...], rows: int, columns: int) -> Tensor:
    return layout.unpack(physical.reshape(-1, rows * columns), rows, columns).reshape(*lead, rows, columns)


MARLIN_A16 = MarlinLayout("Marlin A16", _WEIGHTS_A16, _SCALES_A16)
MARLIN_A8 = MarlinLayout("Marlin A8", _WEIGHTS_A8, _SCALES_A8)


def bias_rows(rows: int) -> Tensor:
    """int64 [rows]: place p of a Marlin bias holds row bias_rows[p]; in blocks of 32, row 8a + 2i + l goes to 8i + 2a + l.

    The same for both widths of activations. Source: vLLM marlin_utils.py `marlin_permute_bias`.
    """
    if rows % 32:
        raise MxdebugError("bias rows for Marlin", "a multiple of 32", str(rows), "pad first")
    return rearrange(torch.arange(rows), "(n a i l) -> (n i a l)", a=4, i=4, l=2)


def pack_bias(bias: Tensor) -> Tensor:
    """Bias [..., rows] of any dtype -> the same in Marlin's order."""
    return bias[..., bias_rows(bias.shape[-1]).to(bias.device)]


def unpack_bias(bias: Tensor) -> Tensor:
    """The inverse of `pack_bias`. The permutation is its own inverse: it swaps two digits of the row number."""
    return pack_bias(bias)
