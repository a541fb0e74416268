"""A recipe: how an engine brings one kind of checkpoint into the form of one kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..contracts import Contract
from ..layouts import RowOrder
from ..reference import MoELayer
from .plan import Plan


@dataclass(frozen=True)
class Recipe:
    """engine, version, path and checkpoint kind are the key; `rows` is the order of gate and up in the file.

    forced_by  how a user makes the engine take this path
    source     the engine's own converter
    """

    engine: str
    version: str
    path: str
    checkpoint: str
    rows: RowOrder
    contract: Contract
    forced_by: str
    source: str
    _plan: Callable[[MoELayer, RowOrder, MoELayer], Plan] = field(repr=False)

    def plan(self, layer: MoELayer, whole: MoELayer | None = None) -> Plan:
        """The stages for one layer, or for the part of it that a rank holds (`MoELayer.part`).

        whole  with expert parallelism the layer of all ranks: some global scales are the largest of all experts
        """
        return self._plan(layer, self.rows, whole or layer)
