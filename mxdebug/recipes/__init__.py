"""How does the engine get there? One file per engine: its recipes, stage by stage."""

from __future__ import annotations

from ..errors import MxdebugError
from . import vllm
from .plan import Plan, logical_operands
from .recipe import Recipe
from .form import PAD_END, PAD_HALVES, Form
from .stages import CAST_BY_VALUE, CAST_E4M3_BY_VALUE, CAST_TO_E4M3, SWAP_NIBBLES, Experts, Lay, PadEnd, PadHalves, Rows, Shuffle, Stage, ToDtype, Values

RECIPES: tuple[Recipe, ...] = vllm.RECIPES


def recipe(engine: str, path: str, checkpoint: str) -> Recipe:
    """The recipe of an engine for a path and a checkpoint kind.

    Raises MxdebugError with the recipes that come nearest where there is none: this branch was missing in vLLM (#51038), and a
    conversion that is left out silently is flashinfer#3334.
    """
    for r in RECIPES:
        if (r.engine, r.path, r.checkpoint) == (engine, path, checkpoint):
            return r
    near = [r for r in RECIPES if (r.engine, r.path) == (engine, path)] or [r for r in RECIPES if r.checkpoint == checkpoint] or RECIPES
    known = "; ".join(f"{r.engine} {r.version} {r.path} for {r.checkpoint}" for r in near)
    raise MxdebugError("recipe", f"one of: {known}", f"{engine} {path} for {checkpoint}", "no conversion is written for this combination")


__all__ = ["CAST_BY_VALUE", "CAST_E4M3_BY_VALUE", "CAST_TO_E4M3", "PAD_END", "PAD_HALVES", "RECIPES", "SWAP_NIBBLES", "Experts", "Form", "Lay", "PadEnd", "PadHalves", "Plan", "Recipe", "Rows", "Shuffle", "Stage", "ToDtype", "Values", "logical_operands", "recipe"]
