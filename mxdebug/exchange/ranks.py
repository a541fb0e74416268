"""What one rank does: quantise its own tokens, exchange payload and scales as a prepare step of vLLM does, order the scales."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import mufu
from ..formats import FORMATS, BlockFormat
from ..layouts import SWIZZLE_128x4
from .implementations import IMPLEMENTATIONS, SWIZZLE_AFTER, SWIZZLE_BEFORE
from .launcher import launch
from .quantise import quantise_activations, sample_tokens


def main() -> None:
    """The launcher's: fork the ranks."""
    mufu.rcp(torch.ones(()))  # the quantisers' table, read here once for all ranks
    launch(_rank)


def _rank(rank: int, spec: dict[str, Any], meet: str, out: Path) -> None:
    """One rank. Saves what its kernel is handed: payload, scales, source (see `Handed`)."""
    from torch import distributed as dist

    fmt, rows, order, name = FORMATS[spec["format"]], spec["rows_per_rank"], spec["order"], spec["implementation"]
    device = torch.device("cuda", rank) if spec["backend"] == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    scale = None if spec["global_scale"] is None else torch.tensor(spec["global_scale"])
    tokens, columns = sample_tokens(rank, rows[rank], spec["hidden"], spec["seed"]), spec["hidden"] // fmt.block
    payload, scales = quantise_activations(tokens, fmt, swizzled=order == SWIZZLE_BEFORE, global_scale=scale)
    dist.init_process_group(spec["backend"], init_method=meet, rank=rank, world_size=len(rows),
                            timeout=timedelta(seconds=spec["timeout"]))
    here = torch.stack([torch.full((rows[rank],), rank), torch.arange(rows[rank])], dim=1)
    tensors = [payload.to(device), scales.to(device), here.to(device)]
    if IMPLEMENTATIONS[name].transport == "all-gather":
        counts = [[n, _scale_count(n, columns, fmt, order), n] for n in rows]
        payload, scales, source = (_all_gatherv(t, [c[i] for c in counts]).cpu() for i, t in enumerate(tensors))
    else:
        if order == SWIZZLE_BEFORE:  # the all-to-all takes a row's bytes by the token's index; rows of padding stay behind
            tensors[1] = tensors[1].view(SWIZZLE_128x4.padded(rows[rank], columns))
        routes = [_routes(r, n, len(rows), spec["seed"]) for r, n in enumerate(rows)]
        slots = max(rows) if name.startswith("flashinfer_nvlink") else 0
        payload, scales, source = (_rows_by_expert(t, routes, rank, slots, fill).cpu() for t, fill in zip(tensors, (0, 0, -1), strict=True))
    dist.barrier()
    dist.destroy_process_group()
    if order == SWIZZLE_AFTER:
        width = scales.shape[1]
        scales = SWIZZLE_128x4.pack(scales).flatten()  # FlashInfer block_scale_interleave and vLLM swizzle_mxfp8_scale give a flat buffer
        if name == "flashinfer_nvlink_one_sided":
            scales = scales.view(-1, width)
    torch.save({"payload": payload, "scales": scales.contiguous(), "source": source}, out)


def _scale_count(rows: int, columns: int, fmt: BlockFormat, order: str) -> int:
    """The length of the first axis of a rank's scales."""
    padded = SWIZZLE_128x4.padded(rows, columns)
    return rows if order != SWIZZLE_BEFORE else padded[0] if fmt.outer else padded[0] * padded[1]


def _all_gatherv(mine: Tensor, counts: list[int]) -> Tensor:
    """Everybody's tensors, one behind the other along dim 0, by a broadcast from each rank, as vLLM's PyNcclCommunicator.all_gatherv."""
    from torch import distributed as dist

    parts = [mine.contiguous() if r == dist.get_rank() else mine.new_empty(n, *mine.shape[1:]) for r, n in enumerate(counts)]
    for r, part in enumerate(parts):
        dist.broadcast(part, src=r)
    return torch.cat(parts)


def _routes(rank: int, rows: int, world: int, seed: int) -> Tensor:
    """bool [rows, world]: the ranks to which each token of `rank` goes. Two experts on every rank, two different experts for each token."""
    g = torch.Generator().manual_seed(7919 * (seed + 1) + rank)
    experts = torch.rand(rows, 2 * world, generator=g).topk(2, dim=1).indices
    return torch.zeros(rows, world, dtype=torch.bool).scatter(1, experts // 2, True)


def _rows_by_expert(mine: Tensor, routes: list[Tensor], rank: int, slots: int, fill: int) -> Tensor:
    """The rows that come to `rank`, by sender; with `slots`, each sender's rows at the start of that many slots, the others `fill`."""
    from torch import distributed as dist

    counts_out, counts_in = routes[rank].sum(0).tolist(), [int(r[:, rank].sum()) for r in routes]
    out = torch.cat([mine[torch.nonzero(routes[rank][:, to]).flatten().to(mine.device)] for to in range(len(routes))])
    got = mine.new_empty(sum(counts_in), mine.shape[1])
    dist.all_to_all_single(got, out.contiguous(), counts_in, counts_out)
    if not slots:
        return got
    parts = got.split(counts_in)
    return torch.cat([torch.cat([p, p.new_full((slots - len(p), p.shape[1]), fill)]) for p in parts])
