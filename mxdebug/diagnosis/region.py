"""Where is an output wrong? Tokens and columns outside which it follows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..reference import Roundings
from .floor import follows, rounding_floor

TILES = (256, 192, 128, 64, 32, 16, 8)  # sizes of output tiles along columns


@dataclass(frozen=True)
class Region:
    """mask: bool [T, H], a rectangle of tokens x columns outside which an output follows; tokens, columns: its sides."""

    mask: Tensor
    tokens: Tensor
    columns: Tensor

    @property
    def tile(self) -> int | None:
        """The largest tile size of which the columns are whole tiles; None where they are not, or where all columns are wrong."""
        first, last = int(self.columns[0]), int(self.columns[-1]) + 1
        return None if last - first == self.mask.shape[1] else next((t for t in TILES if first % t == 0 and last % t == 0), None)

    def text(self, of: Tensor) -> str:
        """The region in words; of: the call's numbers of the tokens that were looked at."""
        first, last = int(self.columns[0]), int(self.columns[-1])
        tile = "" if self.tile is None else f" (whole tiles of {self.tile})"
        rows = of[self.tokens].tolist()
        which = (
            f"all {len(of)} tokens"
            if len(rows) == len(of) > 1
            else f"token {rows[0]}"
            if len(rows) == 1
            else f"{len(rows)} of {len(of)} tokens ({', '.join(map(str, rows[:6]))}{',...' if len(rows) > 6 else ''})"
        )
        return f"{which}, columns {first} to {last} of {self.mask.shape[1]}{tile}"


def wrong_region(got: Tensor, want: Tensor, k: int, roundings: Roundings | None = None) -> Region | None:
    """The smallest rectangle outside which `got` follows `want`; None where that is more than half of the output, or everything follows.

    An element counts as wrong beyond what rounding can do to it: 2^-6 of itself plus the floor of its token.
    """
    a, b = got.double(), want.double()
    same = (a == b) | (torch.isnan(a) & torch.isnan(b))
    allowed = 2.0**-6 * b.abs() + 4 * rounding_floor(k, roundings) * b.nan_to_num(0.0, 0.0, 0.0).square().mean(1, keepdim=True).sqrt()
    wrong = ~same & ~((a - b).abs() <= allowed)
    if not wrong.any():
        return None
    tokens, columns = wrong.any(1).nonzero().flatten(), wrong.any(0).nonzero().flatten()
    columns = torch.arange(int(columns[0]), int(columns[-1]) + 1, device=columns.device)
    mask = torch.zeros_like(wrong)
    mask[tokens[:, None], columns] = True
    if mask.float().mean() > 0.5 or not follows(torch.where(mask, want, got), want, k, roundings):
        return None
    return Region(mask, tokens, columns)
