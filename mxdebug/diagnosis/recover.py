"""Recover, from the bytes of one operand and the checkpoint, which choices were made on the way: its `Form`, experts and slice."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import combinations, product
from typing import Any

import torch
from torch import Tensor

from ..errors import MxdebugError
from ..layouts import (LINEAR, MISTAKEN_128x4, ROW_ORDERS, ROW_SHUFFLES, SCALE_LAYOUTS, SHUFFLED_TWICE, SWIZZLE_128x4, UP_GATE, WEIGHT_LAYOUTS, Composed,
                       Layout, row_hashes)
from ..memory import give_back
from ..recipes import (CAST_BY_VALUE, CAST_E4M3_BY_VALUE, CAST_TO_E4M3, E4M3_AS_E8M0, E4M3_FLUSHED, E4M3_ROUNDED_UP, E4M3_SHIFTED, E8M0_AS_E4M3, E8M0_FLUSHED,
                       E8M0_SHIFTED, PAD_ALL, PAD_END, PAD_HALVES, SWAP_NIBBLES, Form, SplitHalves, logical_operand, logical_rows, logical_shape)
from ..reference import MoELayer, Parallel


@dataclass(frozen=True)
class Recovered:
    """What one operand turned out to be.

    form       the recovered slots; equal to `expected` where nothing is wrong with them
    experts    the checkpoint's expert that stands at each position; -1: none of them
    tp_rank    whose slice it holds
    explained  the share of experts whose data are explained completely
    permutation  logical row of each physical row where the order has no name (-1: padding), else None
    alternatives other readings of the same simplicity that explain the data as well
    made_from  the fault by which the checkpoint was changed before the recipe, if it was
    """

    key: str
    form: Form
    expected: Form
    experts: tuple[int, ...]
    expected_experts: tuple[int, ...]
    tp_rank: int
    expected_tp_rank: int
    explained: float
    permutation: Tensor | None = None
    alternatives: tuple[Form, ...] = ()
    made_from: str = ""

    @property
    def complete(self) -> bool:
        """Whether every expert's data are explained."""
        return self.explained == 1.0


class Source:
    """The checkpoint's layer, cut for each tensor-parallel rank as needed; keys (hashes) of its logical rows are kept."""

    def __init__(self, layer: MoELayer, parallel: Parallel, cut: Callable[[MoELayer, Parallel], MoELayer] = MoELayer.part) -> None:
        self.layer, self.parallel, self.even = layer, parallel, cut is not MoELayer.part
        self._part = functools.cache(lambda rank: cut(layer, Parallel(parallel.tp_size, rank)))
        self._keys = functools.cache(self._row_keys)
        self.few_keys = functools.cache(self._few_keys)
        self._all_keys = functools.cache(lambda *which: torch.stack([self._keys(*which, e) for e in range(layer.experts)]))

    @property
    def expected_experts(self) -> tuple[int, ...]:
        local = self.layer.experts // self.parallel.ep_size
        return tuple(range(self.parallel.ep_rank * local, (self.parallel.ep_rank + 1) * local))

    def ranks(self) -> list[int]:
        """Tensor-parallel ranks that hold some of the layer, the stated one first."""
        blocks, size = self.layer.intermediate // self.layer.down.format.block, self.parallel.tp_size
        share = blocks / size if self.even else -(-blocks // size)
        return sorted((r for r in range(size) if r * share < blocks), key=lambda r: r != self.parallel.tp_rank)

    def logical(self, key: str, rank: int, experts: slice | list[int] = slice(None)) -> Tensor | None:
        """[E, rows, columns] or [E, rows] of the whole layer's experts, or of some of them, cut for one rank. Ask for few: they may be copied."""
        return logical_operand(self._part(rank), key, experts)

    def shape(self, key: str, rank: int) -> tuple[int, ...] | None:
        """One expert's in `logical`; None where the checkpoint has no such operand."""
        return logical_shape(self._part(rank), key)

    def keys(self, key: str, rank: int, values: object, expert: int) -> Tensor:
        """int64 [rows]: a key of each logical row of one expert, after a change of values."""
        return self._keys(key, rank, values, expert)

    def all_keys(self, key: str, rank: int, values: object) -> Tensor:
        """int64 [E, rows]: those of all experts."""
        return self._all_keys(key, rank, values)

    def _few_keys(self, key: str, rank: int, values: object) -> Tensor:
        """int64 [E, up to 8]: keys of a few rows, spread over each expert."""
        rows = self.shape(key, rank)[0]
        t = logical_rows(self._part(rank), key, torch.linspace(0, rows - 1, min(8, rows)).long())
        return row_keys(t if values is None else values.apply(t))

    def _row_keys(self, key: str, rank: int, values: object, expert: int) -> Tensor:
        t = self.logical(key, rank, slice(expert, expert + 1))
        return row_keys((t if values is None else values.apply(t))[0])


def row_keys(t: Tensor) -> Tensor:
    """Keys of rows: hashes of byte rows, or the bits of a bias rounded to bf16 (where -0 is 0). Zeros have the key 0."""
    if t.dtype == torch.uint8:
        return row_hashes(t)
    bits = t.to(torch.bfloat16).view(torch.int16).long()
    return torch.where(bits == -32768, 0, bits)


def recover(key: str, actual: Tensor, expected: Form, source: Source) -> Recovered:
    """Explain the operand `actual` [E, ...] by the simplest change of `expected`; `Recovered.explained` says how far that went."""
    seen = _Seen(key, actual, expected)
    base = Recovered(key, expected, expected, (-1,) * actual.shape[0], source.expected_experts, source.parallel.tp_rank, source.parallel.tp_rank, 0.0)
    best: Recovered | None = None
    for sample in sorted({0, actual.shape[0] - 1}):
        readings = list(_readings(seen, expected, source, sample))
        if not readings:
            continue
        fewest = min(cost for cost, *_ in readings)
        simplest = [r for r in readings if r[0] == fewest]
        for _, form, rank, permutation in simplest[:4]:
            experts = _experts(seen, form, rank, permutation, source)
            found = replace(base, form=form, experts=experts, tp_rank=rank, permutation=permutation,
                            explained=sum(e >= 0 for e in experts) / len(experts), alternatives=tuple(r[1] for r in simplest if r[1] != form))
            if best is None or found.explained > best.explained:
                best = found
        if best and best.complete:
            break
    best = _confirmed(seen, best, source) if best else base
    best = best if best.complete else _strided(seen, best, source) or best
    give_back()
    return best


def _strided(seen: _Seen, r: Recovered, source: Source) -> Recovered | None:
    """The reading in which experts stand one behind the other without padding: the first is then where it should be, the others are not."""
    if r.form.layout is None or len(r.experts) < 2 or r.experts[0] < 0 or seen.flat.dtype != torch.uint8:
        return None
    for form in (r.form, *r.alternatives):
        form = replace(form, padding=PAD_ALL)
        try:
            want = form.apply(source.logical(seen.key, r.tp_rank, list(r.expected_experts)))
        except MxdebugError:
            continue
        if want.shape[0] == len(seen.flat) and torch.equal(want.reshape(len(want), -1), seen.flat):
            return replace(r, form=form, experts=r.expected_experts, explained=1.0, alternatives=())
    return None


def _confirmed(seen: _Seen, r: Recovered, source: Source) -> Recovered:
    """Keys of rows are hashes, and a hash is no proof: leave out the experts whose bytes are others after all. Padding is not looked at."""
    if r.permutation is not None:
        return r
    rows = r.form.row_indices()
    data = rows >= 0

    def same(position: int, expert: int) -> bool:
        want = r.form.apply(source.logical(seen.key, r.tp_rank, slice(expert, expert + 1))).reshape(-1).to(seen.flat.dtype)
        if torch.equal(want, seen.flat[position]):
            return True
        if r.form.layout is None:
            return torch.equal(row_keys(want)[data], row_keys(seen.flat[position])[data])
        a, b = (r.form.layout.unpack(t, seen.rows, seen.columns).reshape(seen.rows, seen.columns)[data] for t in (want, seen.flat[position]))
        return torch.equal(a[:, : r.form.columns], b[:, : r.form.columns])

    experts = tuple(e if e >= 0 and same(p, e) else -1 for p, e in enumerate(r.experts))
    return replace(r, experts=experts, explained=sum(e >= 0 for e in experts) / len(experts))


def rows_in_place(key: str, actual: Tensor, form: Form, source: Source, position: int) -> tuple[int, int, int, int, int]:
    """What stands in one expert of an operand that no reading explains, read in `form`.

    (rows of the checkpoint that should be here, those in place, those that stand in another place, rows of zeros in their stead,
    the first physical row that is none of the checkpoint's or -1); for a bias values count as rows.
    """
    found = _Seen(key, actual, form).keys(form.layout, form.columns, position)
    keys = source.keys(key, source.parallel.tp_rank, form.values, source.expected_experts[position])
    rows = form.row_indices()
    data = rows >= 0
    want = torch.where(data, keys[rows.clamp(min=0)], 0)
    moved, foreign = (found != want) & (found != 0) & torch.isin(found, keys), (found != 0) & ~torch.isin(found, keys)
    return (int(data.sum()), int((data & (found == want)).sum()), int(moved.sum()), int((data & (found == 0) & (want != 0)).sum()),
            int(foreign.nonzero()[0]) if foreign.any() else -1)


def padding_not_zero(key: str, actual: Tensor, r: Recovered) -> tuple[int, int]:
    """(bytes, or values of a bias, in the padding that are not zero; how many there are in the padding), over all experts."""
    seen, rows = _Seen(key, actual, r.form), r.form.row_indices() if r.permutation is None else r.permutation
    bad = total = 0
    for data in seen.flat:
        if r.form.layout is not None:
            data = r.form.layout.unpack(data, seen.rows, seen.columns).reshape(seen.rows, seen.columns)
        for part in (data[rows < 0], data[rows >= 0][:, r.form.columns:] if r.form.columns is not None else data[:0]):
            bad, total = bad + int(part.count_nonzero()), total + part.numel()
    return bad, total


class _Seen:
    """The operand's bytes, as each layout would read them; row keys are kept."""

    def __init__(self, key: str, actual: Tensor, form: Form) -> None:
        self.key, self.form = key, form
        self.rows, self.columns = form.halves * form.padded_rows, form.padded_columns
        self.flat = actual.reshape(actual.shape[0], -1)
        self.keys = functools.cache(self._keys)
        self.present: dict[tuple[object, ...], bool] = {}

    def layouts(self) -> list[Layout | Composed | None]:
        expected = self.form.layout
        if expected is None:
            return [None]
        pool = SCALE_LAYOUTS if self.key.endswith("_scale") else WEIGHT_LAYOUTS
        others = [layout for layout in pool if layout is not expected]
        others += [MISTAKEN_128x4] if expected is SWIZZLE_128x4 else []
        doubled = [] if expected is LINEAR else [Composed(expected, expected), *(Composed(a, b) for o in others if o is not LINEAR for a, b in ((expected, o), (o, expected)))]
        return [layout for layout in (expected, *others, *doubled) if self._fits(layout)]

    def _fits(self, layout: Layout | Composed) -> bool:
        try:
            return math.prod(layout.padded(self.rows, self.columns)) == self.flat.shape[1]
        except MxdebugError:
            return False

    def _keys(self, layout: Layout | Composed | None, columns: int | None, expert: int) -> Tensor:
        data = self.flat[expert]
        if layout is None:
            return row_keys(data)
        return row_keys(layout.unpack(data, self.rows, self.columns).reshape(self.rows, self.columns)[:, :columns])


# What is tried for block scales of E8M0, and of E4M3.
_SCALE_VALUES = {False: (CAST_BY_VALUE, CAST_TO_E4M3, E8M0_AS_E4M3, E8M0_FLUSHED, *E8M0_SHIFTED.values()),
                 True: (CAST_E4M3_BY_VALUE, CAST_BY_VALUE, CAST_TO_E4M3, E4M3_AS_E8M0, E4M3_ROUNDED_UP, E4M3_FLUSHED, *E4M3_SHIFTED.values())}


SLOTS = ("layout", "values", "order", "padding", "shuffle")


def _options(seen: _Seen, expected: Form, source: Source) -> dict[str, list[Any]]:
    """What each slot may be, other than expected."""
    kind = "scale" if seen.key.endswith("_scale") else "bias" if expected.layout is None else "payload"
    fmt = source.layer.up.format
    values = {"scale": (None, *_SCALE_VALUES[fmt.outer]), "payload": (None, SWAP_NIBBLES, SplitHalves(fmt.block)), "bias": (None,)}[kind]
    orders = [o for o in ROW_ORDERS if expected.order] or [None, *([UP_GATE] if seen.key.startswith("w13") else [])]
    padded = expected.rows != expected.padded_rows and expected.halves > 1
    paddings = (PAD_HALVES, PAD_END) if padded else (expected.padding,)
    shuffles = (None, *(s for s in (*ROW_SHUFFLES, *([SHUFFLED_TWICE] if expected.shuffle else [])) if s.fits(seen.rows)))
    return {slot: [o for o in options if o != getattr(expected, slot)] for slot, options in zip(SLOTS, (seen.layouts(), values, orders, paddings, shuffles))}


def _forms(options: Mapping[str, list[Any]], expected: Form, cost: int, present: Callable[[Any, Any], list[int]]) -> Iterator[Form]:
    """All forms that differ from the expected one in `cost` slots. present: the ranks whose rows stand anywhere, read in a layout and with a change of values;
    it is asked before the orders of such a reading are gone through, which are many."""
    for slots in combinations(options, cost):
        places = [slot for slot in slots if slot in ("layout", "values")]
        for where in product(*(options[slot] for slot in places)):
            read = replace(expected, **dict(zip(places, where)))
            if not present(read.layout, read.values):
                continue
            for choice in product(*(options[slot] for slot in slots[len(places):])):
                form = replace(read, **dict(zip(slots[len(places):], choice)))
                # rows are ordered after each half was padded, or before the end is
                if form.order is None or form.order.fits(form.padded_rows if form.padding == PAD_HALVES else form.rows):
                    yield form


def _readings(seen: _Seen, expected: Form, source: Source, sample: int) -> Iterator[tuple[int, Form, int, Tensor | None]]:
    """(cost, form, tp rank, permutation) of every reading that explains the sample expert completely."""
    wanted = source.expected_experts[sample] if sample < len(source.expected_experts) else 0
    indices = {}
    fewest = None
    ranks = [r for r in source.ranks() if _cut_fits(source.shape(seen.key, r), expected)]
    options = _options(seen, expected, source)

    def present(layout: Any, values: Any) -> list[int]:
        """The ranks of whose slices rows stand there; no order of rows helps the others."""
        return [r for r in ranks if _present(seen, layout, values, r, source, sample)]

    for cost in range(len(options) + 1):
        if fewest is not None and cost > fewest:
            return  # only the simplest readings are wanted
        for form in _forms(options, expected, cost, present):
            arrangement = (form.order, form.padding, form.shuffle)
            if arrangement not in indices:
                indices[arrangement] = form.row_indices()
            for rank in present(form.layout, form.values):
                expert = _which_expert(seen, form, rank, indices[arrangement], source, sample, first=wanted)
                if expert is not None:
                    total = cost + (rank != source.parallel.tp_rank) + (expert != wanted)
                    fewest = total if fewest is None else min(fewest, total)
                    yield total, form, rank, None
    if fewest is None:
        yield from _unnamed_orders(seen, expected, source, sample)


def _present(seen: _Seen, layout: Any, values: Any, rank: int, source: Source, position: int) -> bool:
    """Whether a few rows of some expert stand anywhere in this one, read in a layout and with a change of values: cheap, and needed by every order."""
    which = (layout, position, values, rank)
    if which not in seen.present:
        found = seen.keys(layout, seen.form.columns, position)
        seen.present[which] = bool(torch.isin(source.few_keys(seen.key, rank, values), found).all(1).any())
    return seen.present[which]


def _cut_fits(logical: tuple[int, ...] | None, form: Form) -> bool:
    return logical == ((form.halves * form.rows,) if form.columns is None else (form.halves * form.rows, form.columns))


def _which_expert(seen: _Seen, form: Form, rank: int, rows: Tensor, source: Source, position: int, first: int) -> int | None:
    """The expert whose logical row rows[i] stands in physical row i, for every i; `first` if it does. What stands in padding is another question."""
    data = rows >= 0
    found, rows = seen.keys(form.layout, form.columns, position)[data], rows[data]
    if form.values is not None and not found.any() and seen.flat[position].any():
        return None  # a change of values that leaves zeros alone says nothing of the bytes that are there
    if torch.equal(found, source.keys(seen.key, rank, form.values, first)[rows]):
        return first
    if not found.any():
        return None  # zeros are nobody's: memory that was never written has them, too
    fits = (source.all_keys(seen.key, rank, form.values)[:, rows] == found).all(1).nonzero()
    return int(fits[0]) if fits.numel() else None


def _experts(seen: _Seen, form: Form, rank: int, permutation: Tensor | None, source: Source) -> tuple[int, ...]:
    rows = form.row_indices() if permutation is None else permutation
    wanted = source.expected_experts
    out = []
    for position in range(seen.flat.shape[0]):
        first = wanted[position] if position < len(wanted) else 0
        expert = _which_expert(seen, form, rank, rows, source, position, first)
        out.append(-1 if expert is None else expert)
    return tuple(out)


def _unnamed_orders(seen: _Seen, expected: Form, source: Source, sample: int) -> Iterator[tuple[int, Form, int, Tensor]]:
    """Readings in which the rows are a permutation of the rows that has no name, the same for every expert."""
    wanted = source.expected_experts
    if len(wanted) != seen.flat.shape[0]:
        return
    for layout, rank in product(seen.layouts(), source.ranks()):
        if not _cut_fits(source.shape(seen.key, rank), expected):
            continue
        # Short scale rows repeat within an expert, hardly ever in all experts at once: one key from all of them.
        found = _joint([seen.keys(layout, expected.columns, p) for p in range(len(wanted))])
        keys = _joint([source.keys(seen.key, rank, None, e) for e in wanted])
        # Every row of the checkpoint once, and zeros: rows that were lost, or stand twice, are no other order.
        if not found.any() or not torch.equal(found[found != 0].sort().values, keys[keys != 0].sort().values):
            continue
        own = expected.row_indices().to(keys.device)  # of several equal rows, the one that stands where it should
        rows = torch.where((own >= 0) & (keys[own.clamp(min=0)] == found), own, -1)
        left = torch.ones(len(keys), dtype=torch.bool, device=keys.device)
        left[rows[rows >= 0]] = False
        here, there = ((rows < 0) & (found != 0)).nonzero().flatten(), (left & (keys != 0)).nonzero().flatten()
        rows[here[found[here].argsort(stable=True)]] = there[keys[there].argsort(stable=True)]
        yield 3 + (layout != expected.layout), replace(expected, layout=layout), rank, rows
        return


def _joint(keys: list[Tensor]) -> Tensor:
    out = torch.zeros_like(keys[0])
    for k in keys:
        out = out * 0x5851F42D4C957F2D + k  # modulo 2^64; all-zero rows stay 0
    return out
