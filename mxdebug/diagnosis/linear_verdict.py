"""What it comes to: distances of a linear layer's output, the verdict in a sentence, and what the data could not have shown."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..contracts import LinearContract, LinearSeen
from ..errors import MxdebugError
from ..faults import LINEAR_FAULTS, LinearRun
from ..metrics import compare
from ..recipes.w4a16.plan import LinearPlan
from ..recipes.w4a16.recipe import LinearRecipe
from ..reference_linear import LinearLayer
from .finding import CRASHED, RIGHT, UNDECIDED, UNEXPLAINED, WRONG, Finding
from .linear_operands import Explained, OperandEvidence, converted, refined

NO_OUTPUT = "the dump holds no output, so what the kernel computed was not checked"


def distances(
    contract: LinearContract,
    recipe: LinearRecipe,
    plan: LinearPlan,
    layer: LinearLayer,
    arguments: Mapping[str, object],
    kernel: Tensor | None,
    output: Tensor | None,
    findings: list[Finding],
    run: LinearRun | None,
    fillings: Iterable[Explained],
    unexplained: bool,
) -> tuple[list[Finding], object, object, object]:
    """Findings with their effects; recorded output against emulation; output against what the checkpoint means; the same of a right call."""
    x = contract.get("x", arguments)
    logical = run.x.reshape(-1, run.x.shape[-1]) if run is not None else None if x is None or x.dim() != 2 else x[:, : plan.k]
    if logical is None or logical.dim() != 2 or logical.shape[1] < plan.k or not logical.is_floating_point():
        return findings, None, None, None
    plain = refined(layer)
    bias = layer.bias if run is not None else None
    exact = replace(plain, bias=None if bias is None else bias).forward(logical)

    def output_of(p: LinearPlan, alpha: Tensor | None = None) -> Tensor:
        operands = {
            "weight": converted(p, "weight", layer),
            "weight_scale": converted(p, "weight_scale", layer),
            "alpha": p.global_scale(layer) if alpha is None else alpha,
        }
        out = contract.emulate(p.arguments(operands, logical))[:, : plan.n]
        return out if bias is None else out + bias

    right = (
        output_of(plan) if findings or unexplained or kernel is None or bias is not None else kernel[:, : plan.n]
    )  # nothing found: what was passed is the right call
    floor = compare(right.double(), exact)
    seen_output = output if output is not None else kernel
    flat = None if seen_output is None else seen_output.reshape(-1, seen_output.shape[-1])[:, : plan.n]
    if flat is not None and output is None and bias is not None:
        flat = flat + bias
    truth = None if flat is None or flat.shape != exact.shape else compare(flat.double(), exact)
    comparison = compare(output, kernel) if output is not None and kernel is not None and run is None else None
    out = []
    for f in findings:
        struck = LINEAR_FAULTS.get(f.id)
        if f.id == "global-shared-by-parts":
            f = replace(f, effect=floor.relative_l2)
        elif f.id == "bias-missing" and bias is not None:
            f = replace(f, effect=compare(right.double() - bias.double(), right.double()).relative_l2)
        elif f.id in ("global-other", "global-rounded"):
            passed = contract.get("alpha", arguments)
            f = replace(
                f, effect=compare(output_of(plan, torch.ones(1) if passed is None else passed.float().reshape(1)), right).relative_l2
            )
        elif struck is not None and struck.slots and struck.level in ("operand", "call") and "x" not in struck.strikes:
            filling = next((e.fillings[f.id] for e in fillings if f.id in e.fillings), struck.slots)
            distance = compare(output_of(plan.edit(**filling)), right)
            f = replace(f, effect=distance.relative_l2 if distance.masks_equal else float("inf"))
        out.append(f)
    return out, comparison, truth, floor


def verdict_of(
    findings: list[Finding], evidence: OperandEvidence, holds: bool, crashed: bool, has_output: bool, broken: MxdebugError | None, run: bool
) -> tuple[str, str]:
    titles = "; ".join(f.title for f in findings)
    besides = f"; besides: {titles}" if findings else ""
    unexplained = (
        "weight and block scales are"
        if len(evidence.unexplained) == 2
        else "the weight is"
        if "weight" in evidence.unexplained
        else "the block scales are"
    )
    if evidence.foreign:
        return (
            UNEXPLAINED,
            "no row of this call's weight is this layer's: another layer or checkpoint, or weights that were requantised or never loaded",
        )
    if evidence.unexplained and not crashed:
        return UNEXPLAINED, f"{unexplained} not what the recipe makes of this checkpoint, and no known fault explains it{besides}"
    if crashed:
        what = "the layer raised. " if run else "inputs without outputs: the call did not return. "
        return (WRONG if run and findings else CRASHED), what + (
            titles or "its arguments are right: look at the kernel, the driver and memory"
        )
    if broken is not None:
        return WRONG, titles
    if not holds and not any(f.id in ("output-unwritten", "output-not-sliced", "bias-missing", "bias-before-slice") for f in findings):
        return UNEXPLAINED, f"the output does not follow from what was passed, and no known broken computation reproduces it{besides}"
    if findings:
        return WRONG, titles
    if not has_output:
        return UNDECIDED, f"operands and global scale are the checkpoint's; {NO_OUTPUT}"
    return (
        RIGHT,
        "the operands are what the recipe makes of the checkpoint, the global scale is the checkpoint's, and the output follows from them",
    )


def vacuity(plan: LinearPlan, layer: LinearLayer, seen: LinearSeen | None, run: LinearRun | None) -> list[str]:
    """What this data could not have shown."""
    out = []
    x = None if seen is None else seen.x
    if x is not None and (not x.numel() or not x.any()):
        out.append(
            "no tokens: the output says nothing"
            if not x.numel()
            else "all activations are zero, as warm-up calls have them: the output says nothing; operands were compared by bytes"
        )
    if layer.scales.numel() and layer.scales.amin() == layer.scales.amax():
        out.append("all block scales are equal: a misplaced scale could not show")
    if layer.k // 16 == 16:
        out.append("16 scale columns: the 128x4 map is its own inverse there, so that a swizzle and its undoing look alike")
    if plan.padded == (plan.n, plan.k):
        out.append("N and K are multiples of 64: nothing was padded, so no mistake of padding could show")
    if len(layer.rows) > 1 and len(layer.global_scales.unique()) == 1:
        out.append("the joined parts share one global scale: a number of another part could not show")
    if run is None:
        out.append(
            "what the layer does with the kernel's output (cut to N, bias) is not in the call: record one run of the layer (mxdebug.capture_runs), and mxdebug diagnose FILE shows it"
        )
    return out
