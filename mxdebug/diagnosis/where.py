"""Where does a call belong? Layer, expert offset and tensor-parallel slice, by hashes of rows from an index that `mxdebug scan --index` wrote.

A dump carries none of them. Rows of w13 are whole on every rank, so their hashes survive every reordering of rows and experts; the layouts of the
catalogue are undone first. Which of the rows are here says which slice of the intermediate size this rank holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..calls import Call
from ..contracts import find
from ..errors import MxdebugError
from ..layouts import WEIGHT_LAYOUTS, Composed, Layout, row_hashes
from ..recipes import SWAP_NIBBLES
from ..reference import Parallel
from ..scan.index import Index, Place

ENOUGH = 0.5  # the share of an expert's rows, known to the index and in the slice, that must be found
MOST_RANKS = 64


@dataclass(frozen=True)
class Whereabouts:
    """layer: its number; module: the experts' name; parallel: sizes and ranks that the bytes show; experts: the checkpoint's expert at each of the
    `positions` where one was found; share: how many of the rows that should be here were found; layout: in which order the bytes lie; swapped:
    nibbles are."""

    layer: int | None
    module: str
    parallel: Parallel
    experts: tuple[tuple[int, int], ...]
    positions: int
    share: float
    layout: str
    swapped: bool

    def __str__(self) -> str:
        p = self.parallel
        lines = [
            f"layer {self.layer} ({self.module}), by {100 * self.share:.0f} % of the rows of w13 that an index keeps",
            f"  tensor parallelism  rank {p.tp_rank} of {p.tp_size}",
            f"  expert parallelism  rank {p.ep_rank} of {p.ep_size}",
            "  experts             " + self._experts(),
            f"  w13 payload         {self.layout}" + (", the codes of each byte swapped" if self.swapped else ""),
        ]
        return "\n".join(lines)

    def _experts(self) -> str:
        """Which positions hold experts in order; then those that do not."""
        offset = Counter(e - here for here, e in self.experts).most_common(1)[0][0]
        ordered = sum(e - here == offset for here, e in self.experts)
        text = f"{ordered} of {self.positions} positions hold experts in order, from expert {offset} on"
        others = [f"position {here} holds expert {e}" for here, e in self.experts if e - here != offset]
        others += [f"position {here} holds none that is known" for here in sorted(set(range(self.positions)) - {here for here, _ in self.experts})]
        return "; but ".join([text, ", ".join(others)]) if others else text


def where(call: Call, index: Index) -> Whereabouts:
    """Find a MoE call's place in a model. Only hashes are compared; `diagnose` then compares bytes.

    Raises MxdebugError where nothing fits (another checkpoint, weights that were requantised or never loaded), or several layers do.
    """
    contract = find(call.function, call.arguments)
    passed = contract.operand("w13").get(call.arguments)
    if passed is None or passed.dim() != 3:
        raise MxdebugError(
            "w13 payload",
            "[E, rows, columns]",
            "none" if passed is None else f"shape {list(passed.shape)}",
            "a linear kernel's call: --module",
        )
    payload = contract.operand("w13").payload(passed)
    payload = payload.reshape(payload.shape[0], -1)
    rows, columns = passed.shape[1], payload.shape[1] // passed.shape[1]
    positions = sorted({0, 1, len(payload) // 2, len(payload) - 1} & set(range(len(payload))))  # enough to tell the layout
    best: tuple[float, Layout | Composed, bool, list[tuple[int, Place, Tensor, float]]] | None = None

    def found(layout: Layout | Composed, swapped: bool, positions: Iterable[int]) -> list[tuple[int, Place, Tensor, float]]:
        seen = ((p, layout.unpack(payload[p], rows, columns).reshape(rows, columns)) for p in positions)
        return [hit for p, t in seen if (hit := _best(p, row_hashes(SWAP_NIBBLES.apply(t) if swapped else t), index))]

    for layout in (*WEIGHT_LAYOUTS, Composed(WEIGHT_LAYOUTS[0], WEIGHT_LAYOUTS[0])):
        for swapped in (False, True):
            try:
                hits = found(layout, swapped, positions)
            except MxdebugError:
                break  # sizes that this layout does not have
            score = sum(h[3] for h in hits)
            if hits and (best is None or score > best[0]):
                best = score, layout, swapped, hits
    if best is None:
        raise MxdebugError(
            "call and index",
            "rows of this call's w13 among those of a layer",
            "none of them",
            "another checkpoint, weights that were requantised (other codes), or never loaded",
        )
    _, layout, swapped, hits = best
    hits = sorted([*hits, *found(layout, swapped, sorted(set(range(len(payload))) - set(positions)))], key=lambda hit: hit[0])
    modules = Counter((place.module, place.layer) for _, place, _, _ in hits)
    if len(modules) > 1:
        raise MxdebugError(
            "layer",
            "one that holds the call's weights",
            "several: " + ", ".join(f"{m} ({n} experts)" for (m, _), n in modules.items()),
            "layers with equal weights, or operands of two layers in one call: state --layer N",
        )
    ((module, layer),) = modules
    count = 1 + max(p.expert for p in index.places if p.module == module and p.expert is not None)
    offsets = Counter((place.expert or 0) - position for position, place, _, _ in hits)
    offset, local = offsets.most_common(1)[0][0], len(payload)
    ep = (count // local, offset // local) if local < count and offset % local == 0 and count % local == 0 else (1, 0)
    slices = Counter(s for _, place, found, _ in hits if (s := _slice(place, found, index)))
    tp = slices.most_common(1)[0][0] if slices else (1, 0)
    return Whereabouts(
        layer,
        module,
        Parallel(*tp, *ep),
        tuple((position, place.expert or 0) for position, place, _, _ in hits),
        len(payload),
        sum(h[3] for h in hits) / len(hits),
        layout.name,
        swapped,
    )


def _best(position: int, hashes: Tensor, index: Index) -> tuple[int, Place, Tensor, float] | None:
    """(position, place, the rows found, share of those in the slice) of the up or gate weight of which most rows are among `hashes`."""
    hits = index.hashes != 0
    hits &= torch.isin(index.hashes, hashes)
    counts = torch.bincount(index.place[hits], minlength=len(index.places))
    for i in counts.argsort(descending=True)[:4].tolist():
        place = index.places[i]
        if counts[i] < 2 or place.projection not in ("w1", "w3"):
            continue
        found = index.row[hits & (index.place == i)].long().sort().values
        kept = index.row[(index.place == i) & (index.hashes != 0)].long()
        within = kept[(kept >= found[0]) & (kept <= found[-1])]
        if len(found) >= ENOUGH * len(within):
            return position, place, found, len(found) / len(within)
    return None


def _slice(place: Place, found: Tensor, index: Index) -> tuple[int, int] | None:
    """(size, rank) of the tensor-parallel cut whose rows these are: the finest that holds them all, with nearly all rows of it that the index keeps."""
    i = index.places.index(place)
    kept = index.row[(index.place == i) & (index.hashes != 0)].long()
    for size in range(MOST_RANKS, 0, -1):
        if place.rows % size:
            continue
        width = place.rows // size
        rank = int(found[0]) // width
        inside = kept[(kept >= rank * width) & (kept < (rank + 1) * width)]
        if int(found[-1]) < (rank + 1) * width and len(found) >= 0.9 * len(inside):
            return size, rank
    return None
