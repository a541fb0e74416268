"""Which sizes a path or a tensor-parallel degree does not take as they are. Notes: no fault of the file."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ...errors import MxdebugError
from ...formats import MXFP4, NVFP4, BlockFormat, BlockTensor
from ...recipes import RECIPES, Recipe
from ...recipes.marlin import MARLIN_RECIPES
from ...reference import Activation, MoELayer
from ..catalogue import RULES
from ..finding import Finding, make
from ..kinds import QUARK_MXFP4, Kind
from ..scene import Scene
from ..weights import Weight

_W4A16 = 64  # vLLM pads N and K of NVFP4 linear layers for CUTLASS and CuTe-DSL to multiples of it (mxdebug.recipes.w4a16.padding)
_ROWS = frozenset({"w2", "down_proj", "o_proj", "out_proj"})  # parallel along K; all others along N


def check(scene: Scene) -> Iterator[Finding]:
    """Experts by the recipes' own rules, linear layers by the block and CUTLASS's padding."""
    yield from _blocks(scene)
    yield from _paths(scene)
    yield from _linear(scene)


def _blocks(scene: Scene) -> Iterator[Finding]:
    """K of a row-parallel weight is shared among ranks: each must get whole blocks."""
    for label, weights in scene.classes:
        if weights[0].projection in _ROWS:
            for k, those in _by_size(weights, 2).items():
                if cut := [tp for tp in scene.tp if tp > 1 and k % (tp * weights[0].kind.block)]:
                    parts = ", ".join(f"TP {tp}: {k / tp:g}" for tp in cut)
                    yield make(
                        RULES["tp-cuts-block"],
                        f"{label}: K {k} in blocks of {weights[0].kind.block} ({parts} elements a rank)",
                        (w.module for w in those),
                        len(weights),
                    )


def _paths(scene: Scene) -> Iterator[Finding]:
    layers: dict[tuple[str, int, int, bool], list[str]] = {}
    for parent, weights in scene.parents.items():
        if (found := _layer(weights)) is not None:
            layers.setdefault(found, []).append(parent)
    for (name, intermediate, hidden, gated), parents in layers.items():
        pads: dict[str, dict[int, list[str]]] = {}  # what happens -> tensor-parallel degree -> paths
        refuses: dict[str, dict[int, list[str]]] = {}
        form = NVFP4 if "NVFP4" in name.upper() else MXFP4
        for tp in (t for t in scene.tp if intermediate % (t * form.block) == 0):  # others cut a block: `_blocks` says so
            for recipe in (r for r in (*RECIPES, *MARLIN_RECIPES) if r.checkpoint == name):
                layer = _made(form, intermediate // tp, hidden, gated)
                try:
                    padded = (recipe.plan(layer) if isinstance(recipe, Recipe) else recipe.plan(layer, dtype=torch.bfloat16)).padded
                except MxdebugError as error:
                    why = f"{error.operand}: expected {error.expected}, got {error.got}"
                    refuses.setdefault(why, {}).setdefault(tp, []).append(recipe.path)
                    continue
                if padded != (intermediate // tp, hidden):
                    why = f"{intermediate // tp} x {hidden} to {padded[0]} x {padded[1]}"
                    pads.setdefault(why, {}).setdefault(tp, []).append(recipe.path)
        what = f"experts of intermediate size {intermediate}, hidden size {hidden}"
        for rule, found in (("path-pads", pads), ("path-refuses", refuses)):
            if found:
                told = "; ".join(f"TP {tp}: {why}, on {_paths_text(paths)}" for why, by in found.items() for tp, paths in by.items())
                yield make(RULES[rule], f"{what}: {told}", parents, len(parents))


def _paths_text(paths: list[str]) -> str:
    """ "mxfp4/MARLIN", or "mxfp4/{FLASHINFER_..., MARLIN}" of several."""
    start = paths[0].partition("/")[0]
    names = list(dict.fromkeys(p.partition("/")[2] for p in paths))
    return f"{start}/{names[0]}" if len(names) == 1 else f"{start}/{{{', '.join(names)}}}"


def _linear(scene: Scene) -> Iterator[Finding]:
    for label, weights in scene.classes:
        if weights[0].in_experts or not weights[0].kind.e4m3:
            continue
        axis = 2 if weights[0].projection in _ROWS else 1
        for size, those in _by_size(weights, axis).items():
            if tps := [tp for tp in scene.tp if size % tp == 0 and size // tp % _W4A16]:
                yield make(
                    RULES["path-pads"],
                    f"{label}: {'NK'[axis - 1]} {size} at TP {_list(tps)} is no multiple of {_W4A16}: CUTLASS and CuTe-DSL pad it",
                    (w.module for w in those),
                    len(weights),
                )


def _layer(weights: list[Weight]) -> tuple[str, int, int, bool] | None:
    """(checkpoint kind, intermediate, hidden, gated) of a layer of experts; None for others."""
    by = {w.projection: w for w in weights if w.in_experts and w.sizes is not None and w.scale_shape is not None}
    up = by.get("w3") or by.get("gate_up_proj")
    if up is None or up.kind.format == "MXFP8":
        return None
    halves = 2 if up.projection == "gate_up_proj" else 1
    return _recipe_name(up.kind), up.sizes[1] // halves, up.sizes[2], halves == 2 or "w1" in by


def _recipe_name(kind: Kind) -> str:
    """Quark's experts take gpt-oss's padding: vLLM asks the same oracle (mxdebug.recipes.select.rules)."""
    return "gpt-oss" if kind.name == QUARK_MXFP4 else kind.name


def _made(form: BlockFormat, intermediate: int, hidden: int, gated: bool) -> MoELayer:
    """A layer of these sizes without memory."""

    def weight(rows: int, columns: int) -> BlockTensor:
        def empty(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
            return torch.empty(shape, dtype=dtype, device="meta")

        return BlockTensor(
            empty(1, rows, columns // 2), empty(1, rows, columns // form.block), form, empty(1, dtype=torch.float32) if form.outer else None
        )

    return MoELayer(
        weight(intermediate, hidden) if gated else None,
        weight(intermediate, hidden),
        weight(hidden, intermediate),
        Activation("silu" if gated else "relu2"),
    )


def _by_size(weights: list[Weight], axis: int) -> dict[int, list[Weight]]:
    out: dict[int, list[Weight]] = {}
    for w in weights:
        if w.sizes is not None:
            out.setdefault(w.sizes[axis], []).append(w)
    return out


def _list(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
