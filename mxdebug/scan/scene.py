"""What the checks look at: names, headers, configuration and counts of a checkpoint, together."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from .folder import Folder
from .kinds import Kind
from .measure import Measured
from .stated import Stated
from .weights import Weight, Weights

T = TypeVar("T")
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Group:
    """Weights of one class, with counts.

    label    such as "model.layers.*.mlp.experts.*.w1"
    units    (weight, expert) for each row of counts; expert is None for a linear module
    scales   uint32 or uint64 [n, 256]: how often each scale byte occurs; payload: the same of 4-bit codes [n, 16] or of bytes, or None
    """

    label: str
    kind: Kind
    units: tuple[tuple[Weight, int | None], ...]
    scales: np.ndarray
    payload: np.ndarray | None
    zero_rows: np.ndarray | None
    lost: np.ndarray | None

    @property
    def blocks(self) -> int:
        return int(self.scales.sum())

    def hits(self, mask: np.ndarray) -> np.ndarray:
        """int64 [n]: how many scale bytes of each unit are among `mask` (bool [256])."""
        return self.scales[:, mask].sum(1, dtype=np.int64)


@dataclass(frozen=True)
class Scene:
    """tp: tensor-parallel degrees asked about; payload: whether payloads were read."""

    folder: Folder
    stated: Stated
    weights: Weights
    measured: Mapping[str, Measured]
    tp: tuple[int, ...]
    payload: bool

    @cached_property
    def parents(self) -> dict[str, list[Weight]]:
        """Weights by Weight.parent: the experts of a layer, or the projections of an attention or a dense MLP."""
        return _by(self.weights.quantised, lambda w: w.parent)

    @cached_property
    def classes(self) -> tuple[tuple[str, list[Weight]], ...]:
        """(label, weights) of each class: one label and one kind, since a model may have layers of several kinds."""
        return tuple((label, found) for (label, _), found in _by(self.weights.quantised, lambda w: (w.label, w.kind.name)).items())

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """Classes whose scales were read, with their counts."""
        return tuple(g for label, weights in self.classes for g in self._groups(label, weights))

    def number(self, weight: Weight, role: str) -> float | None:
        """The global or input scale as the file stores it; None where it has none that is one float32."""
        measured = self.measured.get(weight.module)
        return None if measured is None else measured.numbers.get(role)

    def multiplier(self, weight: Weight, role: str) -> float | None:
        """The same as a multiplier: 1.0 / x in float32 where the kind stores divisors."""
        stored = self.number(weight, role)
        if stored is None or not weight.kind.divides:
            return stored
        with np.errstate(divide="ignore", over="ignore"):
            return float(np.float32(1.0) / np.float32(stored))

    def _groups(self, label: str, weights: list[Weight]) -> Iterator[Group]:
        """A class whose scales were read; two groups where the payload of some could not be."""
        read = [(w, m) for w in weights if (m := self.measured.get(w.module)) is not None and m.scales is not None]
        for whole, some in _by(read, lambda pair: pair[1].payload is not None).items():
            yield self._group(label, some, whole)

    def _group(self, label: str, read: list[tuple[Weight, Measured]], whole: bool) -> Group:
        units = tuple((w, e if w.fused and w.sizes is not None else w.expert) for w, m in read for e in range(len(m.scales)))
        zero, lost = (
            np.array([n for _, m in read for n in getattr(m, key)], dtype=np.int64) if whole else None for key in ("zero_rows", "lost")
        )
        return Group(
            label,
            read[0][0].kind,
            units,
            np.concatenate([m.scales for _, m in read]),
            np.concatenate([m.payload for _, m in read]) if whole else None,
            zero,
            lost,
        )


def _by(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    out: dict[K, list[T]] = {}
    for item in items:
        out.setdefault(key(item), []).append(item)
    return out


def share(part: int | float, whole: int) -> str:
    """ "3.2 %", and never "0.0 %" for what is there."""
    percent = 100 * part / whole if whole else 0.0
    return (
        "0 %"
        if not part
        else "100 %"
        if part == whole
        else f"{percent:.1f} %"
        if 0.05 <= percent < 99.95
        else "below 0.1 %"
        if percent < 1
        else "above 99.9 %"
    )
