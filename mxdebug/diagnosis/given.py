"""The call under diagnosis: its contract, its arguments, and what of it can be said without decoding the weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..contracts import Contract, Seen


@dataclass(frozen=True)
class Given:
    """A call that keeps its contract.

    base     the call as the kernel sees it, with the first expert of this rank only
    experts  how many there are on this rank
    """

    contract: Contract
    arguments: Mapping[str, Any]
    base: Seen
    experts: int

    @staticmethod
    def of(contract: Contract, arguments: Mapping[str, Any]) -> Given:
        """Check the call. Raises MxdebugError on a broken contract."""
        base = contract.see(arguments, experts=[0])
        return Given(contract, arguments, base, contract.operand("w13").get(arguments).shape[0])

    @property
    def local(self) -> Tensor:
        """int64 [T, k]: position of each selected expert on this rank; outside 0..experts-1 it is another rank's, or none's."""
        return self.base.experts.long() - self.base.parallel.ep_rank * self.experts

    @property
    def here(self) -> Tensor:
        """bool [T, k]: which slots select an expert of this rank."""
        return (self.local >= 0) & (self.local < self.experts)

    @property
    def memory(self) -> Tensor | None:
        """The memory that the call was given to write into."""
        found = next((t for n in ("output", "moe_output") if isinstance(t := self.arguments.get(n), Tensor)), None)
        return found

    @property
    def k(self) -> int:
        """The longer of the two GEMMs' sums."""
        return max(self.base.layer.hidden, self.base.layer.intermediate)

    def touched(self, tokens: Tensor) -> list[int]:
        """Positions of the experts on this rank that these tokens use; the first where they use none."""
        return self.local[tokens][self.here[tokens]].unique().tolist() or [0]

    def weights(self, tokens: Tensor) -> int:
        """How many weights one emulation of these tokens dequantises."""
        layer = self.base.layer
        return len(self.touched(tokens)) * layer.intermediate * layer.hidden * (3 if layer.gate is not None else 2)

    def see(self, tokens: Tensor) -> Seen:
        """The call for these tokens only, with only the experts that they use: the cost does not grow with all experts."""
        return self.contract.see(self.arguments, tokens=tokens)


