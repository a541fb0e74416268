"""How does the engine get there? One file per engine: its recipes, stage by stage."""

from __future__ import annotations

from ..errors import MxdebugError
from . import marlin, vllm
from .plan import Plan, logical_operand, logical_operands, logical_rows, logical_shape
from .recipe import Recipe
from .form import PAD_ALL, PAD_END, PAD_HALVES, Form
from .stages import Experts, Lay, PadAll, PadEnd, PadHalves, Rows, Shuffle, Stage, ToDtype
from .values import (CAST_BY_VALUE, CAST_E4M3_BY_VALUE, CAST_TO_E4M3, E4M3_AS_E8M0, E4M3_FLUSHED, E4M3_ROUNDED_UP, E4M3_SHIFTED, E8M0_AS_E4M3, E8M0_FLUSHED,
                     E8M0_SHIFTED, SWAP_NIBBLES, SplitHalves, Values)

RECIPES: tuple[Recipe, ...] = vllm.RECIPES


def check_engine(engine: str) -> None:
    """Raise MxdebugError for an engine that no recipe is of."""
    engines = dict.fromkeys(r.engine for r in RECIPES)
    if engine not in engines:
        raise MxdebugError("engine", f"one of {', '.join(engines)}" if len(engines) > 1 else f"only {next(iter(engines))}", repr(engine), "no recipe of another is written")


def recipe(engine: str, path: str, checkpoint: str) -> Recipe:
    """The recipe of an engine for a path and a checkpoint kind.

    Raises MxdebugError with the recipes that come nearest where there is none: this branch was missing in vLLM (#51038), and a
    conversion that is left out silently is flashinfer#3334.
    """
    for r in RECIPES:
        if (r.engine, r.path, r.checkpoint) == (engine, path, checkpoint):
            return r
    check_engine(engine)
    near = [r for r in RECIPES if (r.engine, r.path) == (engine, path)] or [r for r in RECIPES if r.checkpoint == checkpoint] or RECIPES
    known = "; ".join(f"{r.engine} {r.version} {r.path} for {r.checkpoint}" for r in near)
    raise MxdebugError("recipe", f"one of: {known}", f"{engine} {path} for {checkpoint}", "no conversion is written for this combination")


__all__ = [
    "CAST_BY_VALUE", "CAST_E4M3_BY_VALUE", "CAST_TO_E4M3", "E4M3_AS_E8M0", "E4M3_FLUSHED", "E4M3_ROUNDED_UP", "E4M3_SHIFTED", "E8M0_AS_E4M3",
    "E8M0_FLUSHED", "E8M0_SHIFTED", "PAD_ALL", "PAD_END", "PAD_HALVES", "RECIPES", "SWAP_NIBBLES", "Experts", "Form", "Lay", "PadAll", "PadEnd",
    "PadHalves", "Plan", "Recipe", "Rows", "Shuffle", "SplitHalves", "Stage", "ToDtype", "Values", "check_engine", "logical_operand",
    "logical_operands", "logical_rows", "logical_shape", "marlin", "recipe",
]
