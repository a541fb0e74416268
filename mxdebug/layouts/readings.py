"""Which axis is which? Every reading of a buffer whose shape alone is known."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from ..errors import MxdebugError


@dataclass(frozen=True)
class Readings:
    """Every way to name the axes of a buffer whose shape alone is known; one name an axis, outermost first."""

    shape: tuple[int, ...]
    sizes: Mapping[str, int]
    candidates: tuple[tuple[str, ...], ...]

    @property
    def ambiguous(self) -> bool:
        return len(self.candidates) > 1

    def only(self) -> tuple[str, ...]:
        """The one reading. Raises MxdebugError where none or more than one fits: then the writer must declare the layout."""
        if len(self.candidates) != 1:
            raise MxdebugError(f"layout of a buffer of shape {list(self.shape)}", "one reading", self._found(),
                               "sizes that are equal; only the writer knows which axis is which (vLLM #48929)" if self.ambiguous
                               else "another buffer, a padded axis, or a size of another rank")
        return self.candidates[0]

    def _found(self) -> str:
        sizes = ", ".join(f"{n} = {s}" for n, s in self.sizes.items())
        return " or ".join(f"[{', '.join(c)}]" for c in self.candidates) or f"none of {sizes}"

    def __str__(self) -> str:
        state = "ambiguous" if self.ambiguous else "one reading" if self.candidates else "no reading"
        return f"shape {list(self.shape)}: {state}: {self._found()}"


def shape_candidates(shape: Sequence[int], /, **sizes: int) -> Readings:
    """Every reading of a shape as axes of these sizes: shape_candidates((8, 8, 16), token=8, head=8, k=16) has two.

    vLLM #48929: MiniMax-M3's top-k buffer is [token, head, k] from SM100's MSA indexer and [head, token, k] from the Triton indexer. The
    shape cannot say which when there are as many tokens as heads, so the writer must declare it. Not every size must be used.
    Raises MxdebugError for sizes below 1.
    """
    if bad := [f"{n} = {s}" for n, s in sizes.items() if s < 1]:
        raise MxdebugError("sizes", "at least 1", ", ".join(bad))
    wanted = tuple(int(s) for s in shape)
    fit = tuple(names for names in itertools.permutations(sizes, len(wanted)) if tuple(sizes[n] for n in names) == wanted)
    return Readings(wanted, MappingProxyType(dict(sizes)), fit)
