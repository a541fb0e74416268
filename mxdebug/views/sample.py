"""As much of a call as can be computed while somebody waits: the whole of a small call, a part of one expert's of a large one."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..contracts import Seen
from ..diagnosis.given import Given
from ..errors import MxdebugError
from ..reference import Parallel

MOST = 2 * 10**7  # multiplications with a weight: a fraction of a second. One token of gpt-oss-20b takes 10^8
FEATURES = 512    # of a large call, so many intermediate features are computed, in blocks spread from the first to the last


@dataclass(frozen=True, eq=False)
class Sample:
    """A part of a call, itself a call as its kernel sees it.

    seen     the call; in a part, one token, some intermediate features of one expert, which has the id 0
    token, slot, expert   which (token, slot) is shown, and its expert's place on this rank; in a whole call the first that this rank computes
    whole    whether all tokens and slots are there
    tokens, slots   how many the call has; rows: how many (token, slot) this rank computes
    blocks   int64, which blocks of the `features` intermediate features are computed; None: all
    """

    seen: Seen
    token: int
    slot: int
    expert: int
    whole: bool
    tokens: int
    slots: int
    rows: int
    blocks: Tensor | None = None
    features: int = 0

    def cut(self, seen: Seen) -> Seen:
        """The same intermediate features of a call of this sample's token and expert."""
        return seen if self.blocks is None else replace(seen, layer=seen.layer.features(self.blocks))

    def __str__(self) -> str:
        if self.whole:
            return f"the whole call, {self.tokens} tokens"
        expert = f"expert {self.expert} adds"
        if self.blocks is not None:
            expert = f"{len(self.blocks) * self.seen.layer.down.format.block} of {self.features} features of expert {self.expert} add"
        return f"token {self.token} of {self.tokens}, slot {self.slot} of {self.slots}: what {expert} to it, before the router weight"



def sample(given: Given, row: int = 0) -> Sample:
    """row: which (token, slot) that an expert of this rank computes, in the order of a Trace: by expert, then by token.

    Raises MxdebugError where there is no such row.
    """
    contract, first, local = given.contract, given.base, given.local
    ids, router, here = first.experts, first.router, given.here.nonzero()
    here = here[torch.argsort(local[given.here], stable=True)]
    if not 0 <= row < len(here):
        raise MxdebugError("row", f"0 to {len(here) - 1}, a token and slot that this rank computes", str(row),
                           "no token selects an expert of this rank" if not len(here) else "")
    token, slot = here[row].tolist()
    expert = int(local[token, slot])
    weights = (3 if first.layer.gate is not None else 2) * first.layer.intermediate * first.layer.hidden
    if len(here) * weights <= MOST:
        return Sample(contract.see(given.arguments), token, slot, expert, True, *ids.shape, len(here))
    seen = first if expert == 0 else contract.see(given.arguments, experts=[expert])
    one = replace(seen, x=seen.x[token: token + 1], experts=torch.zeros(1, 1, dtype=ids.dtype), router=torch.ones(1, 1, dtype=router.dtype),
                  parallel=Parallel(seen.parallel.tp_size, seen.parallel.tp_rank))
    features, block = one.layer.intermediate, one.layer.down.format.block
    blocks = None if features <= FEATURES else torch.linspace(0, features // block - 1, FEATURES // block).round().long()
    part = Sample(one, token, slot, expert, False, *ids.shape, len(here), blocks, features)
    return replace(part, seen=part.cut(one))
