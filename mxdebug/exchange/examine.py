"""In which order do one rank's activation scales lie? By size, by padding, by what the senders sent, or by statistics."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import MxdebugError
from ..formats import BlockFormat, BlockTensor
from ..layouts import LINEAR, Layout, SWIZZLE_128x4, match_rows, row_hashes
from .quantise import quantise_activations, scale_bytes

RIGHT, UNKNOWN = "right", "unknown"
BEFORE = "swizzled before the exchange"
LINEAR_READ_SWIZZLED = "linear handed to a kernel that reads swizzled"
SWIZZLED_READ_LINEAR = "swizzled handed to a kernel that reads linear"

# The orders in which the bytes can lie.
_LINEAR, _WHOLE, _PER_RANK, _ROWS = "linear", "128x4", "128x4 of each rank", "single rows of each rank's 128x4"
_INSIDE = "linear at the start of a buffer for 128x4"  # looked for where the padding says that it is not 128x4: the size is the same


@dataclass(frozen=True)
class ScaleFinding:
    """What one rank's scale buffer is.

    verdict   RIGHT, BEFORE, LINEAR_READ_SWIZZLED, SWIZZLED_READ_LINEAR or UNKNOWN
    status    of that verdict: "proved" (nothing else is left), "consistent" (something else in `holds` is left), "suspected" (statistics
              only) or "undecided"
    by        "size", "zeros", "senders", "statistics", or "" where nothing decides
    wrong     True: proved that the kernel reads other scales than the tokens'; False: proved that it does not; None: open
    holds     the orders of bytes that are left
    got       bytes in the buffer
    sizes     (order of bytes, its size) for each order whose size is known
    """

    verdict: str
    status: str
    by: str
    wrong: bool | None
    holds: tuple[str, ...]
    got: int
    sizes: tuple[tuple[str, int], ...]
    text: str

    def __str__(self) -> str:
        return self.text


def examine_scales(payload: Tensor, scales: Tensor, *, format: BlockFormat, contract_layout: Layout,
                   sent: Sequence[BlockTensor | Tensor] | None = None, rows_per_rank: Sequence[int] | None = None,
                   filled: Tensor | None = None, global_scale: Tensor | None = None) -> ScaleFinding:
    """Say in which order one rank's activation scales lie, from its call alone or with what the ranks sent.

    payload   [rows, K] (MXFP8) or [rows, K/2] (NVFP4), one-byte dtype; `scales` the buffer that goes with it, any shape
    contract_layout   LINEAR or SWIZZLE_128x4: how the kernel reads it
    sent      what each rank sent, in rank order: BlockTensors, or tokens [rows, K], quantised here (NVFP4 with `global_scale`)
    rows_per_rank   the token count of each rank, where it is known without `sent`; one number says that there was no exchange

    filled    bool [rows]: the rows that hold a token, if others are slots that nobody wrote (their expert ids are invalid)

    128x4 pads to 128 rows, so the size tells linear from swizzled unless the row count is a multiple of 128, and a buffer that is too
    short is a proof. The size does not tell the swizzle of all rows from the ranks' swizzles one behind the other where both are as
    long (two ranks of 100 rows: 2 * 128 = 256, and 200 is padded to 256), nor linear scales from rows cut one by one out of swizzled
    buffers. Padding betrays itself: a quantiser gives the scale 0x00 to a block of zeros only (MXFP8: below 2^-118). Otherwise the
    senders' scales decide, byte by byte for the rows whose payload is found among theirs. Without them there are statistics, and
    suspicion.
    Raises MxdebugError for another layout, a payload or senders that do not fit, and senders of whose rows none arrived.
    """
    rows, columns, payload = _geometry(payload, format)
    if contract_layout not in (LINEAR, SWIZZLE_128x4):
        raise MxdebugError("contract layout", "LINEAR or SWIZZLE_128x4", getattr(contract_layout, "name", repr(contract_layout)))
    flat = scale_bytes(scales)
    blocks = None if sent is None else [_as_blocks(s, format, global_scale, columns) for s in sent]
    counts = rows_per_rank if blocks is None else [b.shape[0] for b in blocks]
    orders = _orders(rows, columns, counts, blocks is not None and torch.equal(torch.cat([b.payload for b in blocks]), payload))
    contract = _LINEAR if contract_layout is LINEAR else _WHOLE
    lines = [f"{format.name} scales of {rows} rows x {columns} columns for a kernel that reads {contract}: {flat.numel()} bytes",
             *(f"  {name}: {size} bytes{' = got' if size == flat.numel() else ''}" for name, (size, _) in orders.items())]
    if columns == 16:
        lines.append("  16 columns: 128x4 is its own inverse, so linear read as swizzled and swizzled read as linear give the same output")
    if blocks is None:
        found = _by_call(payload, flat, orders, contract, format, counts, filled, lines)
    else:
        found = _by_senders(payload, flat, blocks, orders, contract, lines)
    verdict, status, by, wrong, holds = found
    lines.append(f"  {verdict}: {status}{f' by the {by}' if by else ''}"
                 + (f"; proved that it is not {contract} of these rows" if wrong and status != "proved" else ""))
    sizes = tuple((name, size) for name, (size, _) in orders.items())
    return ScaleFinding(verdict, status, by, wrong, tuple(holds), flat.numel(), sizes, "\n".join(lines))


_Found = tuple[str, str, str, "bool | None", list[str]]  # verdict, status, by, wrong, holds


def _conclude(holds: list[str], contract: str, by: str) -> _Found:
    """The verdict where the contract's order is excluded: the simplest order that is left."""
    names = {_LINEAR: LINEAR_READ_SWIZZLED, _INSIDE: LINEAR_READ_SWIZZLED, _WHOLE: SWIZZLED_READ_LINEAR}
    verdicts = [names.get(h, BEFORE) for h in holds]
    if not holds:
        return UNKNOWN, "undecided", by, True, holds
    return verdicts[0], "proved" if len(set(verdicts)) == 1 else "consistent", by, True, holds


def _geometry(payload: Tensor, format: BlockFormat) -> tuple[int, int, Tensor]:
    if payload.dim() != 2 or payload.element_size() != 1 or not payload.numel():
        raise MxdebugError("payload", "a matrix of bytes", f"{payload.dtype}, shape {list(payload.shape)}")
    elements = payload.shape[1] * (2 if format.packed else 1)
    if elements % format.block:
        raise MxdebugError("payload", f"rows of a multiple of {format.block} elements", f"{elements} elements", f"not {format.name}")
    return payload.shape[0], elements // format.block, payload.contiguous().view(torch.uint8)


def _as_blocks(sent: BlockTensor | Tensor, format: BlockFormat, global_scale: Tensor | None, columns: int) -> BlockTensor:
    if isinstance(sent, Tensor):
        sent = BlockTensor(*quantise_activations(sent, format, swizzled=False, global_scale=global_scale), format, global_scale)
    if sent.format != format or list(sent.scales.shape[1:]) != [columns]:
        raise MxdebugError("sent activations", f"{format.name} with {columns} scale columns",
                           f"{sent.format.name}, scales {list(sent.scales.shape)}", "another layer, or scales that are padded or swizzled")
    return sent


def _orders(rows: int, columns: int, counts: Sequence[int] | None, gathered: bool) -> dict[str, tuple[int, Tensor | None]]:
    """For each order of bytes its size, and the offset of each scale [rows, columns] where that does not need the senders.

    `gathered`: all ranks' rows in rank order. As many rows as all ranks have could also be slots of an all-to-all.
    """
    padded = SWIZZLE_128x4.padded(rows, columns)
    out: dict[str, tuple[int, Tensor | None]] = {_LINEAR: (rows * columns, LINEAR.index_map(rows, columns)),
                                                 _WHOLE: (padded[0] * padded[1], SWIZZLE_128x4.index_map(rows, columns))}
    if counts is not None and len(counts) == 1:
        return out  # no exchange
    if counts is not None and sum(counts) == rows:
        sizes = [SWIZZLE_128x4.padded(n, columns)[0] * padded[1] for n in counts]
        maps = [SWIZZLE_128x4.index_map(n, columns) + sum(sizes[:i]) for i, n in enumerate(counts)]
        if not torch.equal(torch.cat(maps), out[_WHOLE][1]):  # else all ranks but the last end on a multiple of 128: the same bytes
            out[_PER_RANK] = (sum(sizes), torch.cat(maps))
        if gathered and all(n % 128 == 0 for n in counts):
            return out  # single rows in rank order, none of padding left out: the same bytes again
    out[_ROWS] = (rows * padded[1], None)
    return out


def _by_call(payload: Tensor, flat: Tensor, orders: dict[str, tuple[int, Tensor | None]], contract: str, format: BlockFormat,
             counts: Sequence[int] | None, filled: Tensor | None, lines: list[str]) -> _Found:
    got, whole = flat.numel(), orders[_WHOLE][0]
    fits = [name for name, (size, _) in orders.items() if size == got]
    tile = whole // -(-len(payload) // 128)
    if counts is None and got % tile == 0 and (got > whole or (got == whole and len(payload) % 128)):
        lines.append(f"  {got // tile} tiles of 128 rows and {whole // tile} hold all rows: as long as {_PER_RANK} for some row counts")
        fits.append(_PER_RANK)
    used = (payload & (0x77 if format.packed else 0x7F)) != 0  # without the signs: -0 is 0
    used = used.unflatten(1, (-1, format.block // (2 if format.packed else 1))).any(-1)
    if filled is not None:
        used &= filled[:, None]
    padded = []
    # Whatever the order, a block that is not zero needs a scale that is not: with fewer of those, zeros are no padding out of place.
    lost = int(used.sum()) > int((flat != 0).sum())
    if lost:
        lines.append(f"  {int((flat != 0).sum())} scales are not 0x00, {int(used.sum())} blocks are not zero: no order explains that; scales were zeroed, or never written")
    for name in () if lost else dict.fromkeys((*fits, contract)):
        size, offsets = orders.get(name, (0, None))
        zeros = 0 if offsets is None or size > got else int(((flat[offsets] == 0) & used).sum())
        if zeros:
            lines.append(f"  not {name}: {zeros} blocks that are not zero would have the scale 0x00, as padding has")
            padded.append(name)
    fits = [name for name in fits if name not in padded]
    if contract == _WHOLE and _WHOLE in padded and got == whole and _inside(flat, used, tile // 128):
        lines.append(f"  {_INSIDE}: no block that is not zero has the scale 0x00 then, and all behind the rows is 0x00")
        fits.insert(0, _INSIDE)
    missing = orders[contract][0] - got
    if missing > 0:
        lines.append(f"  too short: a kernel that reads {contract} reads up to {missing} bytes beyond the end")
    if len(fits) > 1:
        lines.append(f"  {' and '.join(fits)} are equally long: only what the senders sent decides")
    if missing > 0 or contract in padded:
        return _conclude(fits, contract, "size" if missing > 0 else "zeros")
    if contract not in fits:
        lines.append(f"  longer than {contract} of these rows, which is no proof: it could be a larger workspace")
        return _conclude(fits, contract, "")[0], "consistent" if fits else "undecided", "size", None, fits
    if fits == [contract]:
        return RIGHT, "consistent", "size", None, fits
    tokens = used.any(1)
    shares = {name: explained_by_means(flat[orders[name][1][tokens]]) for name in fits if name in orders and orders[name][1] is not None}
    if any(s is None for s in shares.values()):
        lines.append("  all scales are the same byte: no order can be told from another")
        return UNKNOWN, "undecided", "", None, fits
    lines.append("  explained by row and column means: " + ", ".join(f"{n} {100 * s:.1f} %" for n, s in shares.items()))
    ranked = sorted(shares, key=lambda n: -shares[n])
    if len(ranked) > 1 and shares[ranked[0]] - shares[ranked[1]] > 5 * chance(int(tokens.sum()), used.shape[1]):
        verdict = RIGHT if ranked[0] == contract else _conclude(ranked[:1], contract, "")[0]
        return verdict, "suspected", "statistics", None, fits
    return UNKNOWN, "undecided", "", None, fits


def _inside(flat: Tensor, used: Tensor, width: int) -> bool:
    """Whether scales stand row by row, `width` bytes or just the used columns apart, where all blocks [rows, columns] in use need one, and nowhere else."""
    rows, columns = used.shape
    for stride in {width, columns}:
        there = torch.zeros_like(flat, dtype=torch.bool)
        at = torch.arange(rows)[:, None] * stride + torch.arange(columns)
        there[at] = True
        if bool((flat[at] != 0)[used].all()) and not flat[~there].any():
            return True
    return False


def explained_by_means(scales: Tensor, counts: Tensor | None = None) -> float | None:
    """R^2 of row and column means. Scale bytes are nearly logarithms, and rows and channels have levels of their own: the right order
    shows them. counts [rows, columns]: the bytes to look at, where it is not all. None where all these bytes are the same."""
    weight = torch.ones(scales.shape, dtype=torch.float64) if counts is None else counts.double()
    x, total = scales.double(), weight.sum()
    centred = (x - (x * weight).sum() / total.clamp(min=1)) * weight
    spread, rest = centred.square().sum(), centred
    for _ in range(1 if counts is None else _ROUNDS):  # means of a full table are the fit; of one with gaps they are found by turns
        for axis in (0, 1):
            rest = (rest - rest.sum(axis, keepdim=True) / weight.sum(axis, keepdim=True).clamp(min=1)) * weight
    return float(1 - rest.square().sum() / spread) if spread > 0 else None


_ROUNDS = 8


def chance(rows: int, columns: int, number: int | None = None) -> float:
    """The standard deviation of that R^2 for scales without any order: it is then Beta(p/2, (n-1-p)/2) for p means of n scales, of all or `number`."""
    n, p = rows * columns if number is None else number, rows + columns - 2
    return (2 * p * (n - 1 - p) / ((n - 1) ** 2 * (n + 1))) ** 0.5


def _by_senders(payload: Tensor, flat: Tensor, blocks: list[BlockTensor], orders: dict[str, tuple[int, Tensor | None]], contract: str,
                lines: list[str]) -> _Found:
    at = _sender_rows(payload, torch.cat([b.payload for b in blocks]))
    found, scales = at >= 0, torch.cat([b.scales for b in blocks])
    lines.append(f"  {int(found.sum())} of {len(at)} rows are known from the senders")
    holds, shares = [], []
    for name, (_, offsets) in orders.items():
        expected = scales
        if offsets is None:  # a row's place in a swizzled buffer, taken by the token's index as if the buffer still had rows
            expected = torch.cat([SWIZZLE_128x4.pack(b.scales).reshape(-1, orders[_ROWS][0] // len(at))[: b.shape[0]] for b in blocks])
            offsets = torch.arange(orders[_ROWS][0]).view(len(at), -1)
        offsets = offsets[found]
        equal = (flat[offsets.clamp(max=flat.numel() - 1)] == expected[at[found]]) & (offsets < flat.numel())
        shares.append(f"{name} {100 * equal.double().mean():.1f} %")
        if equal.all():
            holds.append(name)
    lines.append(f"  bytes as sent if the order is {', '.join(shares)}")
    if contract not in holds:
        return _conclude(holds, contract, "senders") if holds else (UNKNOWN, "undecided", "", None, holds)
    if len(holds) > 1:
        lines.append(f"  {' and '.join(h for h in holds if h != contract)} would be the same bytes: these scales cannot show that fault"
                     + (", they are all the same" if bool((scales == scales[0, 0]).all()) else ""))
    return RIGHT, "proved", "senders", False, holds


def _sender_rows(payload: Tensor, known: Tensor) -> Tensor:
    """int64 [rows]: which of the senders' rows each row of the payload is; -1 where it is none, or where several are equal."""
    if torch.equal(known, payload):
        return torch.arange(len(known))  # all rows in rank order: equal ones do no harm
    hashes = row_hashes(known)
    _, group, count = torch.unique(hashes, return_inverse=True, return_counts=True)
    at = match_rows(row_hashes(payload), hashes)
    at = torch.where((at >= 0) & (count[group][at.clamp(min=0)] == 1), at, -1)  # equal payloads can have different scales
    if (at < 0).all():
        raise MxdebugError("sent activations", "rows whose payload arrived", "no row in common with the payload",
                           "other ranks or another step; or tokens that the engine quantised otherwise: give what it sent")
    return at
