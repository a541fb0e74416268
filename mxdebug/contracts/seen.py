"""One call as the kernel sees it: everything decoded, in logical order, under no function's argument names."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..reference import MoELayer, OneByOne, Parallel, Roundings, Trace, forward


@dataclass(frozen=True)
class Seen:
    """The call, decoded.

    x        [T, H] activations; of quantised ones the values that codes and block scales mean, without a global scale
             (that one is part of the GEMM's alpha, and so of the weights' global scale in `layer`)
    experts, router   int [T, k] global expert ids, float32 [T, k]
    layer    the experts of this rank; a OneByOne where they are not decoded yet
    columns  how many columns the kernel writes, where it leaves out the padding of the hidden size; None: all
    """

    x: Tensor
    experts: Tensor
    router: Tensor
    layer: MoELayer | OneByOne
    parallel: Parallel
    roundings: Roundings
    columns: int | None = None

    def trace(self, *, keep: bool = False, compute: torch.dtype = torch.float32, before: Trace | None = None) -> Trace:
        """Emulate with the roundings of the kernel; keep, before: as of `forward`."""
        t = forward(self.x, self.experts, self.router, self.layer, parallel=self.parallel, roundings=self.roundings, compute=compute, keep=keep,
                    before=before)
        return t if self.columns is None else replace(t, output=t.output[:, : self.columns])

    def emulate(self) -> Tensor:
        """The output [T, H] that the kernel writes."""
        return self.trace().output

    @property
    def here(self) -> Tensor:
        """bool [T, k]: which slots select an expert of this rank."""
        local = self.experts.long() - self.parallel.ep_rank * self.layer.experts
        return (local >= 0) & (local < self.layer.experts)

    def pick(self, tokens: Tensor) -> Seen:
        """The same call for some tokens only."""
        return replace(self, x=self.x[tokens], experts=self.experts[tokens], router=self.router[tokens])
