"""Name the layout and the row order that map one matrix of bytes onto another; or say why that cannot be known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from ..errors import MxdebugError
from ..formats import words
from .catalogue import LINEAR, SCALE_LAYOUTS, WEIGHT_LAYOUTS
from .layout import Composed, Layout
from .rows import GATE_UP, ROW_ORDERS, ROW_SHUFFLES

AnyLayout = Layout | Composed


def row_hashes(t: Tensor) -> Tensor:
    """int64 [...]: a 64-bit hash of each row of uint8 [..., columns]. Equal rows have equal hashes; others differ almost surely."""
    columns = t.shape[-1]
    pad = -columns % 8
    eights = words(torch.nn.functional.pad(t, (0, pad)) if pad else t, torch.int64)
    # Multiply-and-add modulo 2^64 with fixed odd numbers; the first step mixes high bits into low ones.
    generator = torch.Generator().manual_seed(0x6D78)
    factors = torch.randint(-(2**62), 2**62, (eights.shape[-1],), generator=generator, dtype=torch.int64).to(t.device) * 2 + 1
    # Without the sign's copies: with them a word and its complement would mix to the same.
    mixed = eights ^ ((eights >> 29) & ((1 << 35) - 1))
    return (mixed * factors).sum(-1)


def match_rows(found: Tensor, known: Tensor) -> Tensor:
    """For each hash in `found` [n] the first position of the same hash in `known` [m], or -1. int64 [n]."""
    if known.numel() == 0:
        return torch.full_like(found, -1)
    order = torch.argsort(known, stable=True)
    sorted_known = known[order]
    at = torch.searchsorted(sorted_known, found).clamp(max=known.numel() - 1)
    return torch.where(sorted_known[at] == found, order[at], -1)


@dataclass(frozen=True)
class Match:
    """One explanation: physical row i, after undoing `layout`, holds logical row permutation[i]."""

    layout: AnyLayout
    rows: str
    permutation: Tensor

    @property
    def name(self) -> str:
        return self.layout.name if self.rows == "as they are" else f"{self.layout.name}, rows {self.rows}"


@dataclass(frozen=True)
class Identification:
    """All explanations, simplest first. `reason` says why there are several or none.

    `certain` is True where all matches are one and the same map at this shape.
    """

    matches: tuple[Match, ...]
    certain: bool
    reason: str

    @property
    def name(self) -> str:
        """The simplest explanation's name, or 'unknown'."""
        return self.matches[0].name if self.matches else "unknown"

    def __str__(self) -> str:
        if not self.matches:
            return f"no known layout: {self.reason}"
        if self.certain:
            return self.name + (f" ({self.reason})" if self.reason else "")
        more = f" OR {len(self.matches) - 3} more" if len(self.matches) > 3 else ""
        return " OR ".join(m.name for m in self.matches[:3]) + more + f": {self.reason}"


def identify(physical: Tensor, logical: Tensor, *, kind: str, layouts: Sequence[Layout] | None = None) -> Identification:
    """Which layout, composition of two, and row order turns `logical` into `physical`?

    physical  uint8 bytes of any shape: [E, ...] where logical has experts, one slab where it has none
    logical   uint8 [rows, columns] or [E, rows, columns], in the order of the checkpoint
    kind      "scales" or "weights": which layouts to consider; weights are also searched for unknown row permutations
    Raises MxdebugError where shapes or dtypes do not fit.
    """
    pools = {"scales": SCALE_LAYOUTS, "weights": WEIGHT_LAYOUTS}
    if kind not in pools:
        raise MxdebugError("kind", f"one of {', '.join(pools)}", repr(kind))
    if physical.dtype != torch.uint8 or logical.dtype != torch.uint8 or logical.dim() not in (2, 3):
        raise MxdebugError("physical and logical", "uint8, logical [rows, columns] or [E, rows, columns]",
                           f"{physical.dtype}, {logical.dtype} {list(logical.shape)}", "view the bytes as uint8")
    logical = logical if logical.dim() == 3 else logical[None]
    experts, rows, columns = logical.shape
    if physical.numel() % experts:
        raise MxdebugError("physical bytes", f"a multiple of {experts} experts", f"{physical.numel()} bytes")
    flat = physical.reshape(experts, -1)
    matches: list[Match] = []
    for layout in _candidates(layouts or pools[kind], rows, columns, flat.shape[1]):
        seen = layout.unpack(flat, rows, columns).reshape(experts, rows, columns)
        for name, permutation in _row_matches(seen, logical, unknown=kind == "weights"):
            matches.append(Match(layout, name, permutation))
    matches.sort(key=lambda m: isinstance(m.layout, Composed) + (m.rows != "as they are") + (m.rows == "in an unknown order"))
    # An unknown permutation explains nothing that a named order explains already.
    named = [m for m in matches if m.rows != "in an unknown order"]
    matches = named or matches
    if not matches:
        return Identification((), False, _why_none(flat, logical))
    same = [m for m in matches[1:] if not _same_map(m, matches[0], rows, columns)]
    if same:
        values = int(torch.unique(logical).numel())
        return Identification(tuple(matches), False, f"this data cannot tell them apart ({values} distinct byte values, "
                              f"{int(torch.unique(row_hashes(logical)).numel())} distinct rows of {experts * rows})")
    also = [m.name for m in matches[1:4]]
    reason = f"the same map at {rows} x {columns} as {', '.join(also)}" if also else ""
    return Identification(tuple(matches), True, reason)


def _candidates(pool: Sequence[Layout], rows: int, columns: int, size: int) -> list[AnyLayout]:
    def fits(layout: AnyLayout) -> bool:
        try:
            pr, pc = layout.padded(rows, columns)
        except MxdebugError:
            return False
        return pr * pc == size

    single = [layout for layout in pool if fits(layout)]
    pairs = [Composed(a, b) for a, b in product(pool, repeat=2) if LINEAR not in (a, b)]
    return [*single, *(c for c in pairs if fits(c))]


def _row_matches(seen: Tensor, logical: Tensor, unknown: bool) -> list[tuple[str, Tensor]]:
    rows = logical.shape[1]
    out = []
    if torch.equal(seen, logical):
        out.append(("as they are", torch.arange(rows)))
    orders = [(o.name, o.indices(rows // 2)) for o in ROW_ORDERS if o is not GATE_UP and rows % 2 == 0 and o.fits(rows // 2)]
    shuffles = [(s.name, s.indices(rows)) for s in ROW_SHUFFLES if s.fits(rows)]
    both = [(f"{o} then {s}", oi[si]) for (o, oi), (s, si) in product(orders, shuffles)]
    for name, permutation in (*orders, *shuffles, *both):
        if torch.equal(seen[0], logical[0, permutation]) and torch.equal(seen, logical[:, permutation]):
            out.append((name, permutation))
    if unknown and not out:
        # One key for a row of all experts at once: rows that are equal in one expert hardly ever are in all.
        found, known = (row_hashes(t.transpose(0, 1).reshape(rows, -1)) for t in (seen, logical))
        permutation = torch.empty(rows, dtype=torch.int64, device=found.device)
        permutation[found.argsort(stable=True)] = known.argsort(stable=True)  # pairs equal rows in turn, so that no row counts twice
        if torch.equal(seen, logical[:, permutation]):
            out.append(("in an unknown order", permutation))
    return out


def _same_map(a: Match, b: Match, rows: int, columns: int) -> bool:
    """Whether two matches place every byte alike at this shape: pack three random matrices and look."""
    probe = torch.randint(0, 256, (3, rows, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    return torch.equal(a.layout.pack(probe[:, a.permutation]).flatten(), b.layout.pack(probe[:, b.permutation]).flatten())


def _why_none(flat: Tensor, logical: Tensor) -> str:
    a, b = (torch.bincount(t.flatten().int(), minlength=256) for t in (flat, logical))
    if (b > a).any():
        return "the physical bytes are not a rearrangement of the logical ones: other values, another tensor, or another expert"
    return "the bytes are a rearrangement, but none that mxdebug knows"
