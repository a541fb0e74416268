"""How much a weight was padded along K, in a type that cannot be taken for another unit."""

from __future__ import annotations

from typing import NewType

PackedBytes = NewType("PackedBytes", int)  # of a 4-bit payload: two elements each
Elements = NewType("Elements", int)

MULTIPLE = Elements(64)  # vLLM: pad_nvfp4_weight_for_cutlass(weight, alignment=64), rows and columns alike


def round_up(n: int, multiple: int = MULTIPLE) -> int:
    """The smallest multiple that is not below n."""
    return -(-n // multiple) * multiple


def padding_bytes(k: int, multiple: int = MULTIPLE) -> PackedBytes:
    """What a weight of K elements is padded by, in payload bytes. vLLM keeps this number as `weights_padding_cols`, which does not say so."""
    return PackedBytes((round_up(k, multiple) - k) // 2)


def elements_of(padding: PackedBytes) -> Elements:
    """What the activations beside that weight are padded by: two elements for each byte."""
    return Elements(2 * padding)
