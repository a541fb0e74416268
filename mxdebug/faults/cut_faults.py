"""A tensor-parallel cut inside a block: every tensor divided evenly by its own shape, so that a rank's scales are not those of its elements."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from ..reference import MoELayer, Parallel
from .fault import Fault, Situation, needs

PAYLOAD_AND_SCALES = ("w13", "w13_scale", "w13_bias", "w2", "w2_scale")


def cuts_block(layer: MoELayer, p: Parallel) -> bool:
    """Whether equal shares of the intermediate size end inside a block of w2, and take up as many blocks as this rank's right share.

    Of 2880 on 8 ranks the last has 6 blocks by right and 12 by equal shares: there a kernel's sizes tell the two apart.
    """
    if p.tp_size == 1 or layer.intermediate % p.tp_size or layer.intermediate // p.tp_size % layer.down.format.block == 0:
        return False
    blocks, rows = layer.intermediate // layer.down.format.block, layer.intermediate // p.tp_size
    most = -(-blocks // p.tp_size)  # as `MoELayer.part` shares them
    return min(most, blocks - p.tp_rank * most) == -(-rows // layer.down.format.block)


def split_evenly(layer: MoELayer, p: Parallel) -> MoELayer:
    """One rank's slice as `narrow(rank * (n // size), n // size)` of each tensor makes it, in buffers of zeros of whole blocks.

    Of I = 2880 on 8 ranks: rows 360 r to 360 r + 359, and columns 11 r to 11 r + 10 of w2's 90 block scales, which are those of elements from
    352 r on. A right cut (`MoELayer.part`) gives whole blocks, fewer of them to the last rank.
    """
    mine = layer.take(slice(p.ep_rank * layer.experts // p.ep_size, (p.ep_rank + 1) * layer.experts // p.ep_size))
    fmt, rows = mine.down.format, layer.intermediate // p.tp_size
    blocks, columns = -(-rows // fmt.block), layer.intermediate // fmt.block // p.tp_size

    def share(t: Tensor, axis: int, each: int, size: int) -> Tensor:
        out = t.new_zeros(*t.shape[:axis], size, *t.shape[axis + 1 :])
        out.narrow(axis, 0, each).copy_(t.narrow(axis, p.tp_rank * each, each))
        return out

    def cut(t: object) -> object:
        if t is None:
            return None
        if isinstance(t, Tensor):
            return share(t, 1, rows, blocks * fmt.block)
        return replace(t, **{key: share(getattr(t, key), 1, rows, blocks * fmt.block) for key in ("payload", "scales")})

    per_byte = 2 if fmt.packed else 1
    down = replace(
        mine.down,
        payload=share(mine.down.payload, 2, rows // per_byte, blocks * fmt.block // per_byte),
        scales=share(mine.down.scales, 2, columns, blocks),
    )
    return replace(mine, gate=cut(mine.gate), up=cut(mine.up), down=down, gate_bias=cut(mine.gate_bias), up_bias=cut(mine.up_bias))


def _inject(s: Situation, keys: tuple[str, ...]) -> Situation:
    needs(cuts_block(s.layer, s.parallel), CUT_FAULT.id, "equal shares of the intermediate size that are no whole blocks, and a rank that is not the last")
    return replace(s, cut=split_evenly)


CUT_FAULT = Fault(
    "tp-cut-inside-block",
    "the layer was cut among ranks inside a block, so that elements and block scales of a rank are not each other's",
    PAYLOAD_AND_SCALES,
    _inject,
    "the bytes equal the checkpoint's, each tensor cut into equal shares by its own shape",
    "an intermediate size whose share is no multiple of the block; on rank 0 only the last block is wrong",
    "cut along whole blocks, ceil(blocks / tp_size) for each rank, and pad after the cut",
    ("sglang#9473",),
)
