"""Recover, from the bytes of one operand and the checkpoint, which choices were made on the way: its `Form`, experts and slice."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor

from ..errors import MxdebugError
from ..layouts import LINEAR, ROW_ORDERS, ROW_SHUFFLES, SCALE_LAYOUTS, WEIGHT_LAYOUTS, Composed, Layout, match_rows, row_hashes
from ..recipes import CAST_BY_VALUE, PAD_END, PAD_HALVES, SWAP_NIBBLES, Form, logical_operands
from ..reference import MoELayer, Parallel

UNKNOWN_ORDER = "an order that has no name"


@dataclass(frozen=True)
class Recovered:
    """What one operand turned out to be.

    form       the recovered slots; equal to `expected` where nothing is wrong with them
    experts    the checkpoint's expert that stands at each position; -1: none of them
    tp_rank    whose slice it holds
    explained  the share of experts whose data are explained completely
    permutation  logical row of each physical row where the order has no name (-1: padding), else None
    alternatives how many other readings of the same simplicity explain the data as well, and an example
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

    @property
    def complete(self) -> bool:
        """Whether every expert's data are explained."""
        return self.explained == 1.0


class Source:
    """The checkpoint's layer, cut for each tensor-parallel rank as needed; keys (hashes) of its logical rows are kept."""

    def __init__(self, layer: MoELayer, parallel: Parallel) -> None:
        self.layer, self.parallel = layer, parallel
        self._part = functools.cache(lambda rank: logical_operands(layer.part(Parallel(parallel.tp_size, rank))))
        self._keys = functools.cache(self._row_keys)

    @property
    def expected_experts(self) -> tuple[int, ...]:
        local = self.layer.experts // self.parallel.ep_size
        return tuple(range(self.parallel.ep_rank * local, (self.parallel.ep_rank + 1) * local))

    def ranks(self) -> list[int]:
        """Tensor-parallel ranks, the stated one first."""
        return sorted(range(self.parallel.tp_size), key=lambda r: r != self.parallel.tp_rank)

    def logical(self, key: str, rank: int) -> Tensor | None:
        """[E, rows, columns] or [E, rows] of the whole layer's experts, cut for one rank."""
        return self._part(rank)[key]

    def keys(self, key: str, rank: int, values: object, expert: int) -> Tensor:
        """int64 [rows]: a key of each logical row of one expert, after a change of values."""
        return self._keys(key, rank, values, expert)

    def _row_keys(self, key: str, rank: int, values: object, expert: int) -> Tensor:
        t = self.logical(key, rank)[expert]
        return row_keys(t if values is None else values.apply(t[None])[0])


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
    return best or base


class _Seen:
    """The operand's bytes, as each layout would read them; row keys are kept."""

    def __init__(self, key: str, actual: Tensor, form: Form) -> None:
        self.key, self.form = key, form
        self.rows, self.columns = form.halves * form.padded_rows, form.padded_columns
        self.flat = actual.reshape(actual.shape[0], -1)
        self.keys = functools.cache(self._keys)

    def layouts(self) -> list[Layout | Composed | None]:
        expected = self.form.layout
        if expected is None:
            return [None]
        pool = SCALE_LAYOUTS if self.key.endswith("_scale") else WEIGHT_LAYOUTS
        others = [layout for layout in pool if layout is not expected]
        doubled = [Composed(expected, expected), *(Composed(a, b) for o in others if o is not LINEAR for a, b in ((expected, o), (o, expected)))]
        return [layout for layout in (expected, *others, *doubled) if self._fits(layout)]

    def _fits(self, layout: Layout | Composed) -> bool:
        try:
            return layout.padded(self.rows, self.columns) == (self.rows, self.columns)
        except MxdebugError:
            return False

    def _keys(self, layout: Layout | Composed | None, columns: int | None, expert: int) -> Tensor:
        data = self.flat[expert]
        if layout is None:
            return row_keys(data)
        return row_keys(layout.unpack(data, self.rows, self.columns).reshape(self.rows, self.columns)[:, :columns])


def _forms(seen: _Seen, expected: Form) -> Iterator[tuple[int, Form]]:
    """All forms to try, with the number of slots in which each differs from the expected one."""
    kind = "scale" if seen.key.endswith("_scale") else "bias" if expected.layout is None else "payload"
    values = {"scale": (None, CAST_BY_VALUE), "payload": (None, SWAP_NIBBLES), "bias": (None,)}[kind]
    orders = [o for o in ROW_ORDERS if expected.order and o.fits(expected.padded_rows) and o.fits(expected.rows)] or [None]
    padded = expected.rows != expected.padded_rows and expected.halves > 1
    paddings = (PAD_HALVES, PAD_END) if padded else (expected.padding,)
    shuffles = (None, *(s for s in ROW_SHUFFLES if s.fits(seen.rows)))
    for layout, value, order, padding, shuffle in product(seen.layouts(), values, orders, paddings, shuffles):
        form = replace(expected, layout=layout, values=value, order=order, padding=padding, shuffle=shuffle)
        slots = ("layout", "values", "order", "padding", "shuffle")
        yield sum(getattr(form, s) != getattr(expected, s) for s in slots), form


def _readings(seen: _Seen, expected: Form, source: Source, sample: int) -> Iterator[tuple[int, Form, int, Tensor | None]]:
    """(cost, form, tp rank, permutation) of every reading that explains the sample expert completely."""
    wanted = source.expected_experts[sample] if sample < len(source.expected_experts) else 0
    indices = {}
    fewest = None
    for cost, form in sorted(_forms(seen, expected), key=lambda f: f[0]):
        if fewest is not None and cost > fewest:
            return  # only the simplest readings are wanted
        for rank in source.ranks():
            if source.logical(seen.key, rank) is None or not _cut_fits(source.logical(seen.key, rank), expected):
                continue
            arrangement = (form.order, form.padding, form.shuffle)
            if arrangement not in indices:
                indices[arrangement] = form.row_indices()
            expert = _which_expert(seen, form, rank, indices[arrangement], source, sample, first=wanted)
            if expert is not None:
                total = cost + (rank != source.parallel.tp_rank) + (expert != wanted)
                fewest = total if fewest is None else min(fewest, total)
                yield total, form, rank, None
    if fewest is None and expected.layout is not None:
        yield from _unnamed_orders(seen, expected, source, sample)


def _cut_fits(logical: Tensor, form: Form) -> bool:
    return tuple(logical.shape[1:]) == ((form.halves * form.rows,) if form.columns is None else (form.halves * form.rows, form.columns))


def _agree(found: Tensor, keys: Tensor, rows: Tensor, loose_padding: bool) -> bool:
    """Whether physical row i has the key of logical row rows[i]; padding rows must be zero unless their bytes cannot matter."""
    data = rows >= 0
    if not torch.equal(found[data], keys[rows[data]]):
        return False
    return loose_padding or bool((found[~data] == 0).all())


def _which_expert(seen: _Seen, form: Form, rank: int, rows: Tensor, source: Source, position: int, first: int) -> int | None:
    found = seen.keys(form.layout, form.columns, position)
    loose = seen.key.endswith("_scale")  # the scale of a block of zeros may be anything
    for expert in (first, *(e for e in range(source.layer.experts) if e != first)):
        if _agree(found, source.keys(seen.key, rank, form.values, expert), rows, loose):
            return expert
    return None


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
        if not _cut_fits(source.logical(seen.key, rank), expected):
            continue
        # Short scale rows repeat within an expert, hardly ever in all experts at once: one key from all of them.
        found = _joint([seen.keys(layout, expected.columns, p) for p in range(len(wanted))])
        keys = _joint([source.keys(seen.key, rank, None, e) for e in wanted])
        rows, zero = match_rows(found, keys), found == 0
        if bool(((rows >= 0) | zero).all()) and bool((rows >= 0).any()):
            own = expected.row_indices()  # of several equal rows, the one that stands where it should
            keep = (own >= 0) & (keys[own.clamp(min=0)] == found)
            yield 3 + (layout != expected.layout), replace(expected, layout=layout), rank, torch.where(keep, own, torch.where(zero & (rows < 0), -1, rows))
            return


def _joint(keys: list[Tensor]) -> Tensor:
    out = torch.zeros_like(keys[0])
    for k in keys:
        out = out * 0x5851F42D4C957F2D + k  # modulo 2^64; all-zero rows stay 0
    return out
