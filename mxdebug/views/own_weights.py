"""The weights of a call of one's own against the checkpoint: which operands and experts differ, and the views of one of them."""

from __future__ import annotations

import functools
import textwrap
from dataclasses import dataclass, replace

import torch

from ..diagnosis import finding as verdicts
from ..diagnosis.scalars import RELATIVE
from ..errors import MxdebugError
from ..formats import BlockTensor, ScaleCodec
from ..reference import MoELayer
from . import codes, compare
from .own import WIDTH, Own

LISTED = 8  # experts that a line names


@dataclass(frozen=True)
class Differing:
    """Where the weights that a kernel reads are not the checkpoint's.

    operands  titles of all operands that the diagnosis found to differ
    wrong     weight -> for each expert of this rank, in how many of its blocks a code or the scale differs ("w13" and "w2", or "weight")
    total     weight -> blocks of one expert
    """

    operands: tuple[str, ...]
    wrong: dict[str, tuple[int, ...]]
    total: dict[str, int]

    def pick(self, operand: str | None = None, expert: int | None = None) -> tuple[str, int]:
        """(operand, expert) to show: of what is not given, the one with the most wrong blocks, the first of equals."""
        if operand is None:
            operand = max(self.wrong, key=lambda key: self._count(key, expert))
        counts = self.wrong.get({"gate": "w13", "up": "w13", "down": "w2"}.get(operand, operand), (0,))
        return operand, max(range(len(counts)), key=counts.__getitem__) if expert is None else expert

    def _count(self, key: str, expert: int | None) -> float:
        counts = self.wrong[key]
        found = max(counts) if expert not in range(len(counts)) else counts[expert]
        return found / self.total[key]

    def __str__(self) -> str:
        lines = [f"operands that differ: {', '.join(self.operands) or 'none'}"]
        lines += [f"{key}: {self._says(counts, self.total[key], key == 'weight')}" for key, counts in self.wrong.items()]
        return "\n".join(textwrap.fill(line, WIDTH, subsequent_indent="  ", break_on_hyphens=False) for line in lines)

    def _says(self, counts: tuple[int, ...], total: int, alone: bool) -> str:
        bad = sorted((e for e, n in enumerate(counts) if n), key=lambda e: -counts[e])  # the worst first
        if alone:
            return f"{counts[0]:,} of {total:,} blocks differ"
        if not bad:
            return f"equal in all {len(counts)} experts"
        named = ", ".join(f"{e} in {counts[e]:,}" for e in bad[:LISTED]) + (f", and {len(bad) - LISTED} more" if len(bad) > LISTED else "")
        if len(bad) == len(counts) > 1 and len(set(counts)) == 1:
            return f"differs in all {len(counts)} experts, in {counts[0]:,} of {total:,} blocks each"
        return f"differs in {len(bad)} of {len(counts)} experts: expert {named} of {total:,} blocks"


@functools.lru_cache(maxsize=4)
def differing(own: Own) -> Differing:
    """Count all experts' blocks that are not as the checkpoint means them; nothing is counted where the diagnosis found the call right.

    Raises MxdebugError without a checkpoint, and for a call that breaks its kernel's contract or has other sizes than the checkpoint.
    """
    d = own.diagnosis
    titles = tuple(own.kernel.operand(key).title for key, state in d.operands if state == verdicts.DIFFERENT)
    if own.linear:
        meant, read, scale = _weight(own)
        return Differing(titles, {"weight": (_blocks(meant, read, None, scale),)}, {"weight": meant.scales.numel()})
    wrong: dict[str, list[int]] = {"w13": [], "w2": []}
    total = {}
    for expert in range(own.meant.experts):
        if not (d.ok and total):  # one expert says how many blocks there are
            meant_layer, read_layer = _layers(own, expert)
        for key, counts in wrong.items():
            parts = compare.operand_parts(meant_layer, read_layer, key)
            counts.append(0 if d.ok else sum(_blocks(a[0], b[0], meant_layer.scale, read_layer.scale) for a, b in parts))
            total[key] = sum(b.scales.numel() for _, b in parts)
    return Differing(titles, {key: tuple(counts) for key, counts in wrong.items()}, total)


def _blocks(meant: BlockTensor, read: BlockTensor, meant_scale: ScaleCodec | None, read_scale: ScaleCodec | None) -> int:
    """In how many blocks of [rows, K] codes, block scale or global scale differ; beyond the checkpoint's shape the kernel should have 0."""
    rows, columns = read.shape[0] - meant.shape[0], read.columns - meant.columns
    if rows < 0 or columns < 0:
        raise MxdebugError("what the kernel reads", f"at least {list(meant.shape)}", str(list(read.shape)),
                           "another tensor-parallel part: set TP")
    payload, scales = (torch.nn.functional.pad(t, (0, wide.shape[1] - t.shape[1], 0, rows))
                       for t, wide in ((meant.payload, read.payload), (meant.scales, read.scales)))
    codes_differ = (payload != read.payload).unflatten(-1, (read.scales.shape[1], -1)).any(-1)
    a, b = ((codec or meant.format.scale).decode(t) for codec, t in ((meant_scale, scales), (read_scale, read.scales)))
    apart = (a != b) & ~(a.isnan() & b.isnan())
    apart[meant.shape[0]:], apart[:, meant.scales.shape[1]:] = False, False  # a scale of padding scales zeros
    if meant.global_scale is not None:
        one, other = (t.global_scale.float().flatten()[:1] for t in (meant, read))
        if not torch.allclose(one, other, rtol=RELATIVE, atol=0, equal_nan=True):
            apart[: meant.shape[0], : meant.scales.shape[1]] = True
    return int((codes_differ | apart).sum())


def compared(own: Own, operand: str | None = None, expert: int | None = None) -> compare.Compared:
    """A weight as the kernel reads it against the checkpoint.

    operand  "w13", "gate", "up", "down" or "w2" of an expert on this rank, or "weight" of a linear layer
    None stands for the operand, and the expert, of which most differs: `differing`.
    """
    if own.linear:
        meant, read, scale = _weight(own, operand)
        return compare.compare(meant, read, title="The weight: the kernel's eye against the checkpoint", read_scale=scale)
    operand, expert = _picked(own, operand, expert)
    meant_layer, read_layer = _layers(own, expert)
    title = f"{operand} of expert {expert}: the kernel's eye against the checkpoint"
    seen = compare.of_layers(meant_layer, read_layer, operand, title=title)
    worst = replace(seen.worst, blocks=tuple(replace(b, expert=expert) for b in seen.worst.blocks))
    return replace(seen, expert=expert, worst=worst)  # by its own number: one expert alone has the number 0


def counted(own: Own, operand: str | None = None, expert: int | None = None) -> codes.Codes:
    """The codes and block scales of a weight, as they are meant and as they are read; operand and expert as of `compared`."""
    if own.linear:
        meant, read, scale = _weight(own, operand)
        return codes.codes(meant, read, title="Which codes and scales there are", read_scale=scale)
    operand, expert = _picked(own, operand, expert)
    return codes.of_layers(*_layers(own, expert), operand, title=f"Which codes and scales there are in {operand} of expert {expert}")


def _picked(own: Own, operand: str | None, expert: int | None) -> tuple[str, int]:
    """(operand, expert), the worst of what is not given."""
    if expert is not None and (isinstance(expert, bool) or not isinstance(expert, int) or expert not in range(own.meant.experts)):
        raise MxdebugError("EXPERT", f"None, or 0 to {own.meant.experts - 1}", repr(expert), "experts are counted from 0 on each rank")
    if operand is not None and operand not in (compare.W13, *compare.PARTS):
        raise MxdebugError("OPERAND", f"None, or one of {', '.join((compare.W13, *compare.PARTS))}", repr(operand))
    return (operand, expert) if operand is not None and expert is not None else differing(own).pick(operand, expert)


def _layers(own: Own, expert: int) -> tuple[MoELayer, MoELayer]:
    """One expert as it is meant, and as the kernel reads it."""
    return own.meant.take([expert]), own.kernel.decode(own.call.arguments, experts=[expert])


def _weight(own: Own, operand: str | None = None) -> tuple[BlockTensor, BlockTensor, ScaleCodec]:
    """A linear layer's weight as it is meant, as the kernel reads it without padding (of which no global scale is meant), and how."""
    if operand not in (None, "weight"):
        raise MxdebugError("OPERAND", "None or weight", repr(operand), "a linear layer has one weight and no experts")
    seen, meant = own.kernel.see(own.call.arguments), own.meant.weight
    n, k = meant.shape
    w = seen.weight
    read = replace(w, payload=w.payload[:n, : k // 2], scales=w.scales[:n, : k // w.format.block], global_scale=seen.alpha.expand(n))
    return meant, read, seen.scale
