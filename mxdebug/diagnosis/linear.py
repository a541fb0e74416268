"""The diagnosis of a linear layer: of one recorded call of its kernel, or of one run of the engine's layer around it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ..calls import Call
from ..checkpoints import CheckpointLinear
from ..contracts import LinearContract, LinearSeen
from ..errors import MxdebugError
from ..faults import FAULTS, LinearRun
from ..metrics import compare
from ..recipes.w4a16.plan import LinearPlan
from ..recipes.w4a16.recipe import linear_recipe
from .finding import CRASHED, DIFFERENT, EQUAL, PROVED, SAME_VALUES, UNDECIDED, UNEXPLAINED, WRONG, Diagnosis, Finding
from .linear_operands import OperandEvidence, examine, examine_alpha
from .linear_output import examine_activations, examine_kernel, examine_refused, examine_run, from_kernel, settled, where_off
from .linear_verdict import NO_OUTPUT, distances, vacuity, verdict_of

Facts = tuple[tuple[str, str], ...]


def diagnose_linear(call: Call, contract: LinearContract, chosen: CheckpointLinear | None, facts: Facts, engine: str = "vllm") -> Diagnosis:
    """As `diagnose`, for a call of a linear kernel. chosen: the checkpoint's layer, or the part of it that this rank holds; None without a checkpoint."""
    facts = (
        *facts,
        (
            "path",
            f"{contract.path}, a path that mxdebug never compared with a GPU; known from " + " and ".join(v.how for v in contract.verified),
        ),
    )
    arguments, output = call.arguments, call.outputs[0] if call.outputs else None
    try:
        seen, broken = contract.see(arguments), None
    except MxdebugError as error:
        seen, broken = None, error
    if (
        seen is not None
        and output is not None
        and (tuple(output.shape) != (seen.x.shape[0], seen.weight.shape[0]) or output.dtype != torch.bfloat16)
    ):
        raise MxdebugError(
            "output",
            f"torch.bfloat16 {[seen.x.shape[0], seen.weight.shape[0]]}",
            f"{output.dtype} {list(output.shape)}",
            "the dump's outputs belong to another call",
        )
    if chosen is None:
        return _without_checkpoint(call, contract, seen, broken, output, facts)
    return _judged(contract, chosen, arguments, seen, broken, output, facts, engine, crashed=call.status == "crashed")


def diagnose_run(run: LinearRun, chosen: CheckpointLinear, contract: LinearContract, engine: str = "vllm") -> Diagnosis:
    """Diagnose one run of an engine's converted layer: its operands, what it was given and what it handed on.

    That shows what no dump of the kernel can: an output that was not cut to N, a bias in the wrong place. Raises MxdebugError for operands that are
    not this contract's.
    """
    plan = linear_recipe(contract.path, chosen.kind, engine).plan(chosen.layer)
    _check_run(run, plan)
    arguments = contract.arguments(run.operands, plan.edit(x_dtype=run.x.dtype).activations(run.x))
    facts = (("run", f"one run of a converted layer, x {list(run.x.shape)}"), ("path", contract.path))
    try:
        seen, broken = contract.see(arguments), None
    except MxdebugError as error:
        seen, broken = None, error
    return _judged(contract, chosen, arguments, seen, broken, run.output, facts, engine, crashed=run.output is None, run=run)


def _check_run(run: LinearRun, plan: LinearPlan) -> None:
    """Raise where a run is not one of this layer's at all."""
    if run.x.dim() < 1 or run.x.shape[-1] != plan.k:
        raise MxdebugError(
            "activations of the run", f"shape [..., {plan.k}]", f"shape {list(run.x.shape)}", "another layer's, or padded already"
        )
    if run.output is not None and (
        run.output.dim() < 1 or not run.output.shape[-1] or run.output.numel() != run.x.numel() // plan.k * run.output.shape[-1]
    ):
        raise MxdebugError(
            "output of the run", f"a row for each of {run.x.numel() // plan.k} tokens", f"shape {list(run.output.shape)}", "another run's"
        )
    if run.output is not None and run.output.dtype != torch.bfloat16 and run.x.dtype == torch.bfloat16:
        raise MxdebugError("output of the run", "torch.bfloat16", str(run.output.dtype), "cast after the layer, or another layer's")


def _judged(
    contract: LinearContract,
    chosen: CheckpointLinear,
    arguments: Mapping[str, object],
    seen: LinearSeen | None,
    broken: MxdebugError | None,
    output: Tensor | None,
    facts: Facts,
    engine: str,
    *,
    crashed: bool,
    run: LinearRun | None = None,
) -> Diagnosis:
    layer, recipe = chosen.layer, linear_recipe(contract.path, chosen.kind, engine)
    plan = recipe.plan(layer)
    _check_fit(contract, arguments, plan, chosen)
    facts = (
        *facts,
        (
            "layer",
            f"{chosen.name} of a {chosen.kind} checkpoint: N {layer.n}"
            + (
                f" ({', '.join(f'{name.rsplit(chr(46))[-1]} {r}' for name, r in zip(layer.names, layer.rows))})"
                if len(layer.rows) > 1
                else ""
            )
            + f", K {layer.k}",
        ),
    )
    evidence = examine(contract, recipe, layer, arguments, seen)
    folded = any(f.id == "global-folded-into-blocks" for e in evidence.explained.values() for f in e.stack)
    numbers = examine_alpha(contract, plan, layer, arguments, folded)
    # The same weights may be written with another alpha; that joined parts share one number is the checkpoint's fault all the same.
    findings = [*evidence.findings, *(f for f in numbers if not evidence.same_values or f.id == "global-shared-by-parts")]
    x = contract.get("x", arguments)
    findings += examine_refused(contract, plan, x) if x is not None and x.dim() == 2 and seen is None else []
    if seen is not None:
        seen = _tactic(seen, output, layer.bias if run is not None else None)
        findings += examine_activations(contract, x, seen.products)
    if evidence.foreign:
        findings = []
    if broken is not None and not findings:
        findings = [
            Finding(
                FAULTS["contract-broken"],
                PROVED,
                broken.operand,
                f"expected {broken.expected}, got {broken.got}" + (f"; likely: {broken.reason}" if broken.reason else ""),
            )
        ]
    kernel = None if seen is None else seen.emulate()
    open_ = [*evidence.open]
    if run is not None:
        holds, more, note = examine_run(contract, run, plan, seen, layer.bias)
        open_ += [note] if note and not findings else []
        if not holds and run.output is not None and "(columns of" in chosen.name:
            open_.append(
                "a layer that is cut along K hands on the sum over all ranks; record it before the all-reduce, at quant_method.apply (mxdebug.capture_runs does)"
            )
    else:
        holds, more = (True, []) if output is None or seen is None else examine_kernel(seen, output, arguments)
    findings += more
    if not holds and kernel is not None and output is not None and output.shape[-1] in (plan.n, plan.padded[0]) and output.numel():
        flat = output.reshape(-1, output.shape[-1])
        want = kernel[:, : plan.n] if run is None or layer.bias is None else kernel[:, : plan.n] + layer.bias
        open_ += [f"the output: {text}"] if (text := where_off(flat, want, layer)) else []
    findings, comparison, truth, floor = distances(
        contract,
        recipe,
        plan,
        layer,
        arguments,
        kernel,
        output,
        findings,
        run,
        tuple(evidence.explained.values()),
        bool(evidence.unexplained),
    )
    order = {"proved": 0, "consistent": 1, "suspected": 2}
    findings.sort(key=lambda f: (order[f.strength], -(f.effect or 0.0)))
    verdict, summary = verdict_of(findings, evidence, holds, crashed, output is not None, broken, run is not None)
    equal = [k for k, e in evidence.explained.items() if not e.stack and k not in evidence.same_values]
    checked = [
        f"{len(equal)} of 2 operands equal vLLM's recipe byte for byte"
        + (
            "; " + ", ".join(contract.operand(k).title for k in evidence.same_values) + ": other bytes, the same weights (no fault)"
            if evidence.same_values
            else ""
        ),
        "the global scale against the checkpoint's; the activations' dtype, width and size",
    ]
    if run is not None:
        checked.append(
            "what the layer handed on against an emulation of its kernel, cut to N, with the bias"
            if layer.bias is not None
            else "what the layer handed on against an emulation of its kernel, cut to N"
        )
    elif output is not None and seen is not None:
        checked.append(f"the output of all {seen.x.shape[0]} tokens against an emulation of what was passed")
    open_ += [*evidence.unexplained.values(), *vacuity(plan, layer, seen, run)]
    return Diagnosis(verdict, summary, tuple(findings), facts, comparison, truth, floor, tuple(checked), tuple(t for t in open_ if t),
                     _states(evidence), holds if output is not None and seen is not None else None)


def _without_checkpoint(
    call: Call, contract: LinearContract, seen: LinearSeen | None, broken: MxdebugError | None, output: Tensor | None, facts: Facts
) -> Diagnosis:
    need = "whether the operands are the checkpoint's cannot be seen without it: pass --checkpoint DIR"
    if seen is None:
        assert broken is not None
        x = contract.get("x", call.arguments)
        id = "activations-not-bf16" if x is not None and x.dtype == torch.float16 else "contract-broken"
        finding = Finding(
            FAULTS[id],
            PROVED,
            broken.operand,
            f"expected {broken.expected}, got {broken.got}" + (f"; likely: {broken.reason}" if broken.reason else ""),
        )
        verdict = CRASHED if call.status == "crashed" else WRONG
        return Diagnosis(
            verdict,
            f"the kernel's contract is broken: {broken.operand}",
            (finding,),
            facts,
            None,
            None,
            None,
            ("the arguments against the kernel's contract",),
            ("everything behind it: correct this first", need),
        )
    seen = _tactic(seen, output, None)
    findings = examine_activations(contract, seen.x, seen.products)
    checked = ["shapes and dtypes against the contract; the activations"]
    if output is None:
        verdict = CRASHED if call.status == "crashed" else UNDECIDED
        return Diagnosis(
            verdict,
            f"{NO_OUTPUT}, and there is no checkpoint: only the kernel's contract was checked",
            tuple(findings),
            facts,
            None,
            None,
            None,
            tuple(checked),
            (need,),
        )
    holds, more = examine_kernel(seen, output, call.arguments)
    findings += more
    comparison = compare(output, seen.emulate())
    if not holds and not findings:
        verdict, summary = UNEXPLAINED, "the output does not follow from what was passed, and no known broken computation reproduces it"
    elif findings:
        verdict, summary = WRONG, "; ".join(f.title for f in findings)
    else:
        verdict, summary = (
            UNDECIDED,
            "the kernel computed exactly what it was given; whether it was given the right bytes needs the checkpoint",
        )
    return Diagnosis(
        verdict,
        summary,
        tuple(findings),
        facts,
        comparison,
        None,
        None,
        (*checked, "the output against an emulation of what was passed"),
        (need,),
        follows=holds,
    )


def _states(evidence: OperandEvidence) -> tuple[tuple[str, str], ...]:
    """As `Diagnosis.operands` has it."""
    right = [k for k, e in evidence.explained.items() if not e.stack]
    return tuple((k, SAME_VALUES if k in evidence.same_values else EQUAL if k in right else DIFFERENT) for k in (*evidence.explained, *evidence.unexplained))


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
        raise MxdebugError(
            "call and checkpoint",
            f"N, K {list(plan.padded)}: {chosen.name}, padded for the kernel",
            f"{list(got)}",
            "another layer, or one rank's part of this one: --tp SIZE RANK",
        )
