"""A small layer and tokens on which the faults of the catalogue show: each moves the output, some on a rank or with top-1 routing only."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from .contracts import CONTRACTS
from .errors import MxdebugError
from .evidence import measured
from .faults import FAULTS, Fault, Situation
from .formats import BlockFormat, BlockTensor
from .recipes import RECIPES, Recipe
from .reference import Activation, MoELayer, Parallel

EXPERTS, TOKENS, TOP_K = 4, 12, 2
# Both need padding on most paths; 14 and 6 columns of MX scales, 28 and 12 of NVFP4's: no 16, which hides a swizzle.
HIDDEN, INTERMEDIATE = 448, 192
# (alpha, beta, limit): all three differ from what a kernel computes without them. With gpt-oss's alpha of 1.702 a gate below -7 gives nothing,
# clamped or not, so that a clamp on both sides could not be seen.
SWIGLU = (0.25, 1.0, 7.0)


def probe(
    path: str,
    *,
    checkpoint: str | None = None,
    gated: bool = True,
    parallel: Parallel | tuple[int, int] = Parallel(),
    top_k: int = TOP_K,
    biased: bool = True,
    seed: int = 0,
) -> Situation:
    """A right call of a MoE path on made data that hides nothing.

    path        such as "mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16"; checkpoint: the kind, by default the first that has a recipe
    parallel    this rank's position, or its tensor-parallel (size, rank); 4 experts in all
    biased      biases, where the path has them
    top_k       experts a token, 1 or 2; with 1 the router weights are not 1, so that a weight on the wrong side shows

    Block scales differ by row and by block and reach down to those that a decoder in fp16, or one without subnormals, flushes; activations are large
    in turn, so that pre-activations pass the clamp on both sides. Experts, biases, and global and input scales all differ. Sizes need padding where
    the path pads. Raises MxdebugError for an unknown path, checkpoint kind or number of experts a token, and where the path has no such layers.
    """
    recipes = [r for r in RECIPES if r.path == path and checkpoint in (None, r.checkpoint)]
    if not recipes:
        kinds = [r.checkpoint for r in RECIPES if r.path == path]
        if kinds:
            raise MxdebugError(f"checkpoint kind for {path}", f"one of {', '.join(kinds)}", repr(checkpoint))
        raise MxdebugError("path", f"one of {', '.join(dict.fromkeys(r.path for r in RECIPES))}", repr(path))
    if not 1 <= top_k <= TOP_K:
        raise MxdebugError("top_k", f"1 to {TOP_K}: as many router weights are made for a token", str(top_k))
    if isinstance(parallel, tuple):
        parallel = Parallel(*parallel)
    recipe, g = recipes[0], torch.Generator().manual_seed(seed)
    layer = _layer(recipe, gated, biased, g)
    x = (torch.randn(TOKENS, HIDDEN, generator=g) * _magnitude(recipe.contract.weights)).bfloat16()
    ids = torch.stack([(torch.arange(top_k) + t + t // EXPERTS) % EXPERTS for t in range(TOKENS)]).int()  # every expert, in several pairs
    weights = torch.softmax(torch.randn(TOKENS, TOP_K, generator=g), -1)[:, :top_k]
    return Situation.right(recipe, layer, x, ids, weights.contiguous(), parallel)


def faults_for(path: str) -> list[Fault]:
    """The faults of the catalogue that can strike a MoE path in some situation of the probe, as `mxdebug confusion` found.

    `mxdebug.confusion.injected(fault, path)` puts each into the first situation in which it shows. Raises MxdebugError for another path.
    """
    if path not in CONTRACTS:
        raise MxdebugError("path", f"one of {', '.join(CONTRACTS)}", repr(path))
    return [FAULTS[id] for id in measured()[path]]


def _magnitude(fmt: BlockFormat) -> float:
    """Of the activations: what brings pre-activations of these scales to a standard deviation of 4 to 7, the limit being 7."""
    return 0.6 if fmt.outer else 6 * 2.0**4


def _layer(recipe: Recipe, gated: bool, biased: bool, g: torch.Generator) -> MoELayer:
    fmt, path = recipe.contract.weights, recipe.path
    # CuTe-DSL: whole groups of 64 rows; NVFP4 CUTLASS: no padding is taken, not on two ranks either.
    intermediate = {"nvfp4/FLASHINFER_CUTEDSL": 320, "nvfp4/FLASHINFER_CUTLASS": 384}.get(path, INTERMEDIATE)

    def per_expert(scale: float) -> Tensor:
        return (torch.rand(EXPERTS, generator=g) + 0.5) * scale

    def weight(rows: int, columns: int, global_scale: Tensor | None) -> BlockTensor:
        blocks = columns // fmt.block
        # Rows and blocks have levels of their own, as in real checkpoints: statistics can see an order by them.
        level = torch.randint(0, 5, (EXPERTS, rows, 1), generator=g) + torch.randint(0, 4, (EXPERTS, 1, blocks), generator=g)
        level = level + torch.randint(0, 3, (EXPERTS, rows, blocks), generator=g)
        # E4M3: 0x04 to 0x1F, 2^-7 to 0.12, subnormals among them. E8M0: 2^-17 to 2^-8: some that fp16 flushes, and some that E4M3 holds.
        scales = 3 * level + 4 if fmt.outer else level + 110
        payload = torch.randint(0, 256, (EXPERTS, rows, columns // 2), generator=g, dtype=torch.uint8)
        return BlockTensor(payload, scales.to(torch.uint8), fmt, global_scale)

    g13, g2 = (per_expert(s) if fmt.outer else None for s in (2.0**2, 2.0**-2))
    up, down = weight(intermediate, HIDDEN, g13), weight(HIDDEN, intermediate, g2)
    gate = weight(intermediate, HIDDEN, g13) if gated else None
    act = Activation("swiglu", *(torch.full((EXPERTS,), v) for v in SWIGLU)) if gated else Activation("relu2")

    def bias(rows: int, scale: float) -> Tensor | None:
        return None if not biased or "mxfp4" not in path else (torch.randn(EXPERTS, rows, generator=g) * scale).bfloat16()

    layer = MoELayer(gate, up, down, act, bias(intermediate, 1.0) if gated else None, bias(intermediate, 1.0), bias(HIDDEN, 0.02))
    if fmt.outer:  # what static calibration would state: amax / (448 * 6), by expert
        layer = replace(layer, w13_input_scale=per_expert(4.0) / 2688, w2_input_scale=per_expert(200.0) / 2688)
    return layer
