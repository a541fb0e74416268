"""Which layer of a checkpoint does a call belong to? Dumps do not say; the rows of the weights do."""

from __future__ import annotations

from itertools import product

import torch

from ..calls import Call
from ..checkpoints import Checkpoint
from ..contracts import find
from ..errors import MxdebugError
from ..faults import cuts_block, split_evenly
from ..layouts import WEIGHT_LAYOUTS, Composed, row_hashes
from ..recipes import SWAP_NIBBLES, Recipe, logical_operands
from ..reference import MoELayer, Parallel
from .given import Given


def locate(call: Call, checkpoint: Checkpoint) -> int:
    """The layer whose w13 rows are in the call, in whatever order and layout.

    Compares hashes of the rows of a few experts, which survive every reordering of rows and experts; a layer counts
    where at least half of an expert's rows are found. Raises MxdebugError where no layer or several fit.
    """
    if len(checkpoint.layers) == 1:
        return checkpoint.layers[0]
    if not checkpoint.layers:
        raise MxdebugError("checkpoint", f"one with experts, since {call.function} is a MoE kernel", f"{checkpoint.path}, which has linear layers only", "the model folder of another call")
    contract = find(call.function, call.arguments)
    passed = contract.operand("w13").get(call.arguments)
    if passed is None or passed.dim() != 3:
        raise MxdebugError("w13 payload", "[E, 2I, H/2]", "none" if passed is None else f"shape {list(passed.shape)}", "state the layer: --layer N")
    payload = contract.operand("w13").payload(passed)
    first = contract.parallel(call.arguments).ep_rank * payload.shape[0]
    shares = {}
    for index in checkpoint.layers:
        rows = checkpoint.layer(index, experts=slice(first, first + 1)).layer.up.payload[0]
        columns = rows.shape[-1]
        known = torch.cat([row_hashes(rows), row_hashes(SWAP_NIBBLES.apply(rows))])
        shares[index] = max(
            torch.isin(row_hashes(layout.unpack(payload[position], payload.shape[1], payload.shape[2])[:, :columns]), known).float().sum().item() / len(rows)
            for layout in (*WEIGHT_LAYOUTS, Composed(WEIGHT_LAYOUTS[0], WEIGHT_LAYOUTS[0]))
            for position in (0, 1, payload.shape[0] - 1) if position < payload.shape[0])
    fits = [i for i, share in shares.items() if share >= 0.5]
    if len(fits) != 1:
        raise MxdebugError("layer", f"one of {', '.join(map(str, checkpoint.layers))} that holds the call's weights",
                           "none" if not fits else f"several: {', '.join(map(str, fits))}",
                           "another checkpoint, or weights that were requantised; state the layer with --layer N" if not fits else "layers with equal weights; state --layer N")
    return fits[0]


MOST_RANKS = 64


def position(given: Given, layer: MoELayer, recipe: Recipe, tp: Parallel | None = None) -> Parallel:
    """Where this rank stands: its tensor-parallel part as `tp` states it, else as the call's bytes or arguments do; the rest as the call states it."""
    stated = given.base.parallel
    tp = tp or tensor_parallel(given, layer, recipe) or stated
    return Parallel(tp.tp_size, tp.tp_rank, stated.ep_size, stated.ep_rank)


def tensor_parallel(given: Given, layer: MoELayer, recipe: Recipe) -> Parallel | None:
    """The tensor-parallel position of a call whose kernel is not told, by the bytes of w2 or w13 of one expert; None where it is told, where
    the whole layer fits, or where no rank's bytes are the call's."""
    contract, stated = given.contract, given.base.parallel
    if "tp_size" in given.arguments or stated.tp_size > 1 or given.base.layer.intermediate >= layer.intermediate:
        return None
    first = stated.ep_rank * given.experts
    if first >= layer.experts:
        return None
    one = layer.take(slice(first, first + 1))
    for size in range(2, MOST_RANKS + 1):
        for rank in range(size):
            p = Parallel(size, rank)
            try:
                parts = [one.part(p), *([split_evenly(one, p)] if cuts_block(one, p) else [])]
                plan = recipe.plan(parts[0])
            except MxdebugError:
                continue
            if plan.padded != (given.base.layer.intermediate, given.base.layer.hidden):
                break
            for part, key in product(parts, ("w2", "w13")):
                want = plan.forms[key].apply(logical_operands(part)[key])
                if torch.equal(want.flatten(), contract.operand(key).payload(contract.get(key, given.arguments))[0].flatten()):
                    return p
    return None
