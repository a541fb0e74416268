"""The answer: the path that vLLM takes, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass

from .setups import Setup


@dataclass(frozen=True)
class Considered:
    """One backend: taken or not, why, and the class and method that say so."""

    backend: str
    taken: bool
    reason: str
    source: str


@dataclass(frozen=True)
class Selection:
    """What vLLM does with a setup.

    path        by its qualified name, or None where vLLM refuses to start; `refused` says why then
    experts     the experts class that runs; two where only the routing method decides between them and it is not given
    considered  every backend in the order of priority; then those passed over before they were asked, then those that only
                --moe-backend reaches
    method      the quantisation method of the checkpoint kind and its file; `oracle` the function that chooses
    notes       what the table does not show
    """

    setup: Setup
    version: str
    path: str | None
    experts: tuple[str, ...]
    considered: tuple[Considered, ...]
    method: str
    oracle: str
    refused: str = ""
    notes: tuple[str, ...] = ()

    def __str__(self) -> str:
        s = self.setup
        lines = [f"vLLM {self.version}, SM{s.sm}, {s.quantisation}, {s.checkpoint}, {s.activation}, --moe-backend {s.moe_backend}",
                 f"activations {s.activation_key or 'not quantised'}; {self.method} asks {self.oracle}"]
        lines.append(f"takes {self.path} with {' or '.join(self.experts)}" if self.path else f"refuses to start: {self.refused}")
        width = max((len(c.backend) for c in self.considered), default=0)
        lines += [f"  {'->' if c.taken else '  '} {c.backend:{width}}  {c.reason}  [{c.source}]" for c in self.considered]
        return "\n".join(lines + [f"  note: {n}" for n in self.notes])
