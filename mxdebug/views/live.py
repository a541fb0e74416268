"""Run recorded calls again, on the kernel itself, where this machine has the GPU for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..calls import load
from ..contracts import Contract
from ..diagnosis.given import Given
from ..diagnosis.outputs import follows
from ..errors import MxdebugError
from ..metrics import Comparison, compare
from ..recorded import Recorded


@dataclass(frozen=True)
class Rerun:
    """One call run again: this GPU's output against the recorded one.

    follows  no token is further off than the rounding of intermediate results explains
    """

    name: str
    comparison: Comparison
    follows: bool


@dataclass(frozen=True)
class Live:
    """All calls that ran; `not_run` says by name what did not, and why, or is None."""

    kernel: str
    reruns: tuple[Rerun, ...]
    not_run: str | None

    def __str__(self) -> str:
        if self.not_run is not None:
            return f"not run here: {self.not_run}"
        return "\n".join([f"{self.kernel}, run here", *(f"  {r.name}: {r.comparison}" for r in self.reruns)])


def rerun(contract: Contract, calls: Iterable[Recorded]) -> Live:
    """Run the kernel on each call's operands and compare with what was recorded. Runs nothing where this machine cannot run the kernel."""
    kernel = f"{contract.function} on " + ", ".join(f"SM{sm}" for sm in contract.sm)
    done = []
    for recorded in calls:
        call = load(recorded.path)
        try:
            got = contract.run(call.arguments).cpu()
        except MxdebugError as error:
            if error.operand != "this machine":
                raise
            return Live(kernel, (), f"{kernel} ({error.got.split(' (')[0]})")
        comparison = compare(got, call.outputs[0])
        done.append(Rerun(recorded.name, comparison, follows(got, call.outputs[0], Given.of(contract, call.arguments).k, contract.roundings)))
    return Live(kernel, tuple(done), None)
