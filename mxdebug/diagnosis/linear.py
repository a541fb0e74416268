"""The diagnosis of a linear layer: of one recorded call of its kernel, or of one run of the engine's layer around it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..calls import Call
from ..checkpoints import CheckpointLinear
from ..contracts import LinearContract, LinearSeen
from ..errors import MxdebugError
from ..faults import FAULTS, LINEAR_FAULTS, LinearRun
from ..metrics import compare
from ..recipes.w4a16.plan import LinearPlan
from ..recipes.w4a16.recipe import LinearRecipe, linear_recipe
from ..reference_linear import LinearLayer
from .finding import CRASHED, PROVED, RIGHT, UNDECIDED, UNEXPLAINED, WRONG, Diagnosis, Finding
from .linear_operands import OperandEvidence, converted, examine, examine_alpha, refined
from .linear_output import examine_activations, examine_kernel, examine_refused, examine_run, from_kernel, settled

Facts = tuple[tuple[str, str], ...]
_NO_OUTPUT = "the dump holds no output, so what the kernel computed was not checked"


def diagnose_linear(call: Call, contract: LinearContract, chosen: CheckpointLinear | None, facts: Facts, engine: str = "vllm") -> Diagnosis:
    """As `diagnose`, for a call of a linear kernel. chosen: the checkpoint's layer, or the part of it that this rank holds; None without a checkpoint."""
    facts = (*facts, ("path", f"{contract.path}, a path that mxdebug never compared with a GPU; known from " + " and ".join(v.how for v in contract.verified)))
    arguments, output = call.arguments, call.outputs[0] if call.outputs else None
    try:
        seen, broken = contract.see(arguments), None
    except MxdebugError as error:
        seen, broken = None, error
    if seen is not None and output is not None and (tuple(output.shape) != (seen.x.shape[0], seen.weight.shape[0]) or output.dtype != torch.bfloat16):
        raise MxdebugError("output", f"torch.bfloat16 {[seen.x.shape[0], seen.weight.shape[0]]}", f"{output.dtype} {list(output.shape)}", "the dump's outputs belong to another call")
    if chosen is None:
        return _without_checkpoint(call, contract, seen, broken, output, facts)
    return _judged(contract, chosen, arguments, seen, broken, output, facts, engine, crashed=call.status == "crashed")


def diagnose_run(run: LinearRun, chosen: CheckpointLinear, contract: LinearContract, engine: str = "vllm") -> Diagnosis:
    """Diagnose one run of an engine's converted layer: its operands, what it was given and what it handed on.

    That shows what no dump of the kernel can: an output that was not cut to N, a bias in the wrong place. Raises MxdebugError for operands that are
    not this contract's.
    """
    plan = linear_recipe(contract.path, chosen.kind, engine).plan(chosen.layer)
    wide = run.x.dtype if run.x.dtype == torch.float16 else torch.bfloat16
    arguments = contract.arguments(run.operands, plan.edit(x_dtype=wide).activations(run.x))
    facts = (("run", f"one run of a converted layer, x {list(run.x.shape)}"), ("path", contract.path))
    try:
        seen, broken = contract.see(arguments), None
    except MxdebugError as error:
        seen, broken = None, error
    return _judged(contract, chosen, arguments, seen, broken, run.output, facts, engine, crashed=run.output is None, run=run)


def _judged(contract: LinearContract, chosen: CheckpointLinear, arguments: Mapping[str, object], seen: LinearSeen | None, broken: MxdebugError | None,
            output: Tensor | None, facts: Facts, engine: str, *, crashed: bool, run: LinearRun | None = None) -> Diagnosis:
    layer, recipe = chosen.layer, linear_recipe(contract.path, chosen.kind, engine)
    plan = recipe.plan(layer)
    _check_fit(contract, arguments, plan, chosen)
    facts = (*facts, ("layer", f"{chosen.name} of a {chosen.kind} checkpoint: N {layer.n}"
                      + (f" ({', '.join(f'{name.rsplit(chr(46))[-1]} {r}' for name, r in zip(layer.names, layer.rows))})" if len(layer.rows) > 1 else "") + f", K {layer.k}"))
    evidence = examine(contract, recipe, layer, arguments, seen)
    folded = any(f.id == "global-folded-into-blocks" for e in evidence.explained.values() for f in e.stack)
    numbers = examine_alpha(contract, plan, layer, arguments, folded)
    # The same weights may be written with another alpha; that joined parts share one number is the checkpoint's fault all the same.
    findings = [*evidence.findings, *(f for f in numbers if not evidence.same_values or f.id == "global-shared-by-parts")]
    x = contract.get("x", arguments)
    findings += examine_refused(contract, plan, x) if x is not None and seen is None else []
    if seen is not None:
        seen = _tactic(seen, output, layer.bias if run is not None else None)
        findings += examine_activations(contract, x, seen.products)
    if evidence.foreign:
        findings = []
    if broken is not None and not findings:
        findings = [Finding(FAULTS["contract-broken"], PROVED, broken.operand, f"expected {broken.expected}, got {broken.got}" + (f"; likely: {broken.reason}" if broken.reason else ""))]
    kernel = None if seen is None else seen.emulate()
    open_ = [*evidence.open]
    if run is not None:
        holds, more, note = examine_run(contract, run, plan, seen, layer.bias)
        open_ += [note] if note and not findings else []
    else:
        holds, more = (True, []) if output is None or seen is None else examine_kernel(seen, output, arguments)
    findings += more
    findings, comparison, truth, floor = _distances(contract, recipe, plan, layer, arguments, kernel, output, findings, run)
    order = {"proved": 0, "consistent": 1, "suspected": 2}
    findings.sort(key=lambda f: (order[f.strength], -(f.effect or 0.0)))
    verdict, summary = _verdict(findings, evidence, holds, crashed, output is not None, broken, run is not None)
    equal = [k for k, e in evidence.explained.items() if not e.stack and k not in evidence.same_values]
    checked = [f"{len(equal)} of 2 operands equal vLLM's recipe byte for byte" + ("; " + ", ".join(contract.operand(k).title for k in evidence.same_values)
               + ": other bytes, the same weights (no fault)" if evidence.same_values else ""), "the global scale against the checkpoint's; the activations' dtype, width and size"]
    if run is not None:
        checked.append("what the layer handed on against an emulation of its kernel, cut to N, with the bias" if layer.bias is not None else "what the layer handed on against an emulation of its kernel, cut to N")
    elif output is not None and seen is not None:
        checked.append(f"the output of all {seen.x.shape[0]} tokens against an emulation of what was passed")
    open_ += [*evidence.unexplained.values(), *_vacuity(plan, layer, seen, run)]
    return Diagnosis(verdict, summary, tuple(findings), facts, comparison, truth, floor, tuple(checked), tuple(t for t in open_ if t))


def _without_checkpoint(call: Call, contract: LinearContract, seen: LinearSeen | None, broken: MxdebugError | None, output: Tensor | None, facts: Facts) -> Diagnosis:
    need = "whether the operands are the checkpoint's cannot be seen without it: pass --checkpoint DIR"
    if seen is None:
        assert broken is not None
        x = contract.get("x", call.arguments)
        id = "activations-fp16" if x is not None and x.dtype == torch.float16 else "contract-broken"
        finding = Finding(FAULTS[id], PROVED, broken.operand, f"expected {broken.expected}, got {broken.got}" + (f"; likely: {broken.reason}" if broken.reason else ""))
        verdict = CRASHED if call.status == "crashed" else WRONG
        return Diagnosis(verdict, f"the kernel's contract is broken: {broken.operand}", (finding,), facts, None, None, None, ("the arguments against the kernel's contract",),
                         ("everything behind it: correct this first", need))
    seen = _tactic(seen, output, None)
    findings = examine_activations(contract, seen.x, seen.products)
    checked = ["shapes and dtypes against the contract; the activations"]
    if output is None:
        verdict = CRASHED if call.status == "crashed" else UNDECIDED
        return Diagnosis(verdict, f"{_NO_OUTPUT}, and there is no checkpoint: only the kernel's contract was checked", tuple(findings), facts, None, None, None, tuple(checked), (need,))
    holds, more = examine_kernel(seen, output, call.arguments)
    findings += more
    comparison = compare(output, seen.emulate())
    if not holds and not findings:
        verdict, summary = UNEXPLAINED, "the output does not follow from what was passed, and no known broken computation reproduces it"
    elif findings:
        verdict, summary = WRONG, "; ".join(f.title for f in findings)
    else:
        verdict, summary = UNDECIDED, "the kernel computed exactly what it was given; whether it was given the right bytes needs the checkpoint"
    return Diagnosis(verdict, summary, tuple(findings), facts, comparison, None, None, (*checked, "the output against an emulation of what was passed"), (need,))


def _tactic(seen: LinearSeen, output: Tensor | None, bias: Tensor | None) -> LinearSeen:
    """`settled` by the output of a call, [M, N padded], or of a layer's run, [..., N], with its bias."""
    if output is None:
        return seen
    flat = output.reshape(-1, output.shape[-1])
    return settled(seen, lambda t: from_kernel(flat, t[:, : flat.shape[1]], bias, seen.weight.columns))


def _check_fit(contract: LinearContract, arguments: Mapping[str, object], plan: LinearPlan, chosen: CheckpointLinear) -> None:
    b = contract.get("weight", arguments)
    got = None if b is None or b.dtype != contract.operand("weight").dtype else contract.sizes(b)
    if got is not None and got != plan.padded:
        raise MxdebugError("call and checkpoint", f"N, K {list(plan.padded)}: {chosen.name}, padded for the kernel", f"{list(got)}",
                           "another layer, or one rank's part of this one: --tp SIZE RANK")


def _distances(contract: LinearContract, recipe: LinearRecipe, plan: LinearPlan, layer: LinearLayer, arguments: Mapping[str, object], kernel: Tensor | None,
               output: Tensor | None, findings: list[Finding], run: LinearRun | None) -> tuple[list[Finding], object, object, object]:
    """Findings with their effects; recorded output against emulation; output against what the checkpoint means; the same of a right call."""
    x = contract.get("x", arguments)
    logical = run.x.reshape(-1, run.x.shape[-1]) if run is not None else None if x is None else x[:, : plan.k]
    if logical is None or logical.shape[1] < plan.k:
        return findings, None, None, None
    plain = refined(layer)
    bias = layer.bias if run is not None else None
    exact = replace(plain, bias=None if bias is None else bias).forward(logical)

    def output_of(p: LinearPlan, alpha: Tensor | None = None) -> Tensor:
        operands = {"weight": converted(p, "weight", layer), "weight_scale": converted(p, "weight_scale", layer), "alpha": p.global_scale(layer) if alpha is None else alpha}
        out = contract.emulate(p.arguments(operands, logical))[:, : plan.n]
        return out if bias is None else out + bias

    right = output_of(plan)
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
        elif f.id == "global-other":
            passed = contract.get("alpha", arguments)
            f = replace(f, effect=compare(output_of(plan, torch.ones(1) if passed is None else passed.float().reshape(1)), right).relative_l2)
        elif struck is not None and struck.slots and struck.level in ("operand", "call") and "x" not in struck.strikes:
            distance = compare(output_of(plan.edit(**struck.slots)), right)
            f = replace(f, effect=distance.relative_l2 if distance.masks_equal else float("inf"))
        out.append(f)
    return out, comparison, truth, floor


def _verdict(findings: list[Finding], evidence: OperandEvidence, holds: bool, crashed: bool, has_output: bool, broken: MxdebugError | None, run: bool) -> tuple[str, str]:
    titles = "; ".join(f.title for f in findings)
    besides = f"; besides: {titles}" if findings else ""
    unexplained = "weight and block scales are" if len(evidence.unexplained) == 2 else "the weight is" if "weight" in evidence.unexplained else "the block scales are"
    if evidence.foreign:
        return UNEXPLAINED, "no row of this call's weight is this layer's: another layer or checkpoint, or weights that were requantised or never loaded"
    if evidence.unexplained and not crashed:
        return UNEXPLAINED, f"{unexplained} not what the recipe makes of this checkpoint, and no known fault explains it{besides}"
    if crashed:
        what = "the layer raised. " if run else "inputs without outputs: the call did not return. "
        return (WRONG if run and findings else CRASHED), what + (titles or "its arguments are right: look at the kernel, the driver and memory")
    if broken is not None:
        return WRONG, titles
    if not holds and not any(f.id in ("output-unwritten", "output-not-sliced", "bias-missing", "bias-before-slice") for f in findings):
        return UNEXPLAINED, f"the output does not follow from what was passed, and no known broken computation reproduces it{besides}"
    if findings:
        return WRONG, titles
    if not has_output:
        return UNDECIDED, f"operands and global scale are the checkpoint's; {_NO_OUTPUT}"
    return RIGHT, "the operands are what the recipe makes of the checkpoint, the global scale is the checkpoint's, and the output follows from them"


def _vacuity(plan: LinearPlan, layer: LinearLayer, seen: LinearSeen | None, run: LinearRun | None) -> list[str]:
    """What this data could not have shown."""
    out = []
    if layer.scales.unique().numel() == 1:
        out.append("all block scales are equal: a misplaced scale could not show")
    if layer.k // 16 == 16:
        out.append("16 scale columns: the 128x4 map is its own inverse there, so that a swizzle and its undoing look alike")
    if plan.padded == (plan.n, plan.k):
        out.append("N and K are multiples of 64: nothing was padded, so no mistake of padding could show")
    if len(layer.rows) > 1 and len(layer.global_scales.unique()) == 1:
        out.append("the joined parts share one global scale: a number of another part could not show")
    if run is None:
        out.append("what the layer does with the kernel's output (cut to N, bias) is not in the call: mxdebug.diagnose_run shows it")
    return out
