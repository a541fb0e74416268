"""The diagnosis of one call: bytes first, since they give proof; then parameters; then the output."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..calls import Call, load
from ..checkpoints import Checkpoint, CheckpointLayer, open_checkpoint
from ..contracts import Contract, find
from ..contracts.cutlass_mxfp4_bf16 import activation as passed_activation
from ..errors import MxdebugError
from ..faults import FAULTS
from ..metrics import compare
from ..recipes import Plan, recipe
from ..reference import EXACT, MoELayer, Parallel, Trace, forward
from . import operands, outputs, parameters
from .finding import CRASHED, PENDING, PROVED, RIGHT, UNDECIDED, UNEXPLAINED, WRONG, Diagnosis, Finding
from .locate import locate
from .recover import Source

TOKENS = 64  # at most this many tokens are emulated


def diagnose(call: Call | str | Path, checkpoint: Checkpoint | CheckpointLayer | str | Path | None = None, *, layer: int | None = None,
             engine: str = "vllm") -> Diagnosis:
    """Say what is wrong with one recorded call, how sure that is, where, and what to change; or that the call is right.

    call        a Call, or the folder of a FlashInfer dump that holds exactly one
    checkpoint  what the layer should compute; without it only the kernel can be checked against its contract
    layer       which layer of the checkpoint; None: found by the rows of the weights (`locate`)
    engine      whose recipe to expect
    Raises MxdebugError for a dump or checkpoint that is damaged, foreign, or does not fit the other.
    """
    call = call if isinstance(call, Call) else load(call)
    facts = _facts(call)
    if call.status == "pending flush":
        return Diagnosis(PENDING, "FlashInfer recorded this call inside a CUDA graph and never wrote its tensors; that is no crash. Call "
                         "flashinfer.api_logging.flush_graph_dumps() after a replay, let the process end normally, or run the engine in eager mode",
                         (), facts, None, None, None, ("metadata only",), ("everything else: there are no tensors",))
    contract = find(call.function, call.arguments)
    facts = (*facts, ("path", f"{contract.path}, verified for {contract.verified[0].versions}"))
    try:
        decoded = contract.decode(call.arguments, experts=[0])  # checks the whole call; one expert shows the sizes
    except MxdebugError as error:
        return _broken_contract(call, facts, error)
    output = call.outputs[0] if call.outputs else None
    if output is not None and tuple(output.shape) != (call.arguments["input"].shape[0], decoded.hidden):
        raise MxdebugError("output", f"shape {[call.arguments['input'].shape[0], decoded.hidden]}", f"shape {list(output.shape)}", "the dump's outputs belong to another call")
    if output is not None and output.dtype != contract.roundings.output:
        raise MxdebugError("output", str(contract.roundings.output), str(output.dtype), "the dump's outputs belong to another call")
    if checkpoint is None:
        return _without_checkpoint(call, contract, facts, output)
    if isinstance(checkpoint, (str, Path)):
        checkpoint = open_checkpoint(checkpoint)
    chosen = checkpoint if isinstance(checkpoint, CheckpointLayer) else checkpoint.layer(locate(call, checkpoint) if layer is None else layer)
    d = _with_checkpoint(call, contract, decoded, facts, output, chosen, engine)
    if d.verdict == UNEXPLAINED and layer is not None and isinstance(checkpoint, Checkpoint) and len(checkpoint.layers) > 1:
        try:
            found = locate(call, checkpoint)
        except MxdebugError:
            return d
        if found != layer:
            return replace(d, open=(f"layer {found} of this checkpoint holds the rows of this call's weights: try --layer {found}", *d.open))
    return d


def _facts(call: Call) -> tuple[tuple[str, str], ...]:
    versions = ", ".join(f"{k} {str(v).split(' ')[0]}" for k, v in call.versions.items() if k in ("flashinfer", "torch"))
    return (("call", f"{call.function}, call {call.sequence} of process {call.process}, {call.status}" + (f" ({versions})" if versions else "")),)


def _broken_contract(call: Call, facts: tuple[tuple[str, str], ...], error: MxdebugError) -> Diagnosis:
    finding = Finding(FAULTS["contract-broken"], PROVED, error.operand, f"expected {error.expected}, got {error.got}"
                      + (f"; likely: {error.reason}" if error.reason else ""))
    verdict = CRASHED if call.status == "crashed" else WRONG
    start = _NO_RETURN if verdict == CRASHED else ""
    return Diagnosis(verdict, f"{start}{'T' if start else 't'}he kernel's contract is broken: {error.operand}", (finding,), facts, None, None, None,
                     ("the arguments against the kernel's contract",), ("everything behind it: correct this first",))


def _without_checkpoint(call: Call, contract: Contract, facts: tuple[tuple[str, str], ...], output: Tensor | None) -> Diagnosis:
    here = contract.operand("w13").get(call.arguments).shape[0] * contract.parallel(call.arguments).ep_size
    findings = [*parameters.examine_router(call.arguments["token_final_scales"]), *parameters.examine_inputs(call.arguments, here)]
    need = "whether the operands are the checkpoint's cannot be seen without it: pass --checkpoint DIR"
    besides = f"; besides: {_titles(findings)}" if findings else ""
    if output is None and call.status == "crashed":
        return Diagnosis(CRASHED, f"{_NO_RETURN}Its arguments keep the kernel's contract{besides}", tuple(findings), facts,
                         None, None, None, ("shapes and dtypes against the contract; router weights",), (need,))
    if output is None:
        return Diagnosis(UNDECIDED, f"{_NO_OUTPUT}, and there is no checkpoint: only the kernel's contract was checked{besides}", tuple(findings), facts,
                         None, None, None, ("shapes and dtypes against the contract; router weights",), (need,))
    evidence = outputs.examine(contract, call.arguments, output, most_tokens=TOKENS)
    findings = [*evidence.findings, *findings]
    if not evidence.follows and not evidence.findings:
        verdict, summary = UNEXPLAINED, f"{_follows_not(evidence)}{besides}"
    elif findings:
        verdict, summary = WRONG, _titles(findings)
    else:
        verdict, summary = UNDECIDED, "the kernel computed exactly what it was given; whether it was given the right bytes needs the checkpoint"
    return Diagnosis(verdict, summary, tuple(findings), facts, evidence.comparison, None, None,
                     (_compared(evidence, call.arguments), "router weights"), (*evidence.open, need))


_NO_RETURN = "inputs without outputs: the call did not return. "
_NO_OUTPUT = "the dump holds no output, so what the kernel computed was not checked"


def _compared(evidence: outputs.OutputEvidence, args: Mapping[str, Any]) -> str:
    return f"the output of {len(evidence.tokens)} of {args['input'].shape[0]} tokens against an emulation of what was passed"


def _follows_not(evidence: outputs.OutputEvidence) -> str:
    tried = "no known broken computation reproduces it" + ("" if evidence.pairs else ", alone")
    return f"the output does not follow from what was passed{'' if evidence.comparison.masks_equal else ' (NaN or inf in other places)'}, and {tried}"


def _with_checkpoint(call: Call, contract: Contract, decoded: MoELayer, facts: tuple[tuple[str, str], ...], output: Tensor | None,
                     chosen: CheckpointLayer, engine: str) -> Diagnosis:
    args, layer = call.arguments, chosen.layer
    parallel = contract.parallel(args)
    part = layer.part(parallel)
    plan = recipe(engine, contract.path, chosen.kind).plan(part)
    here = contract.operand("w13").get(args).shape[0]
    _check_fit((here, decoded.intermediate, decoded.hidden), part, plan, chosen, parallel)
    facts = (*facts, ("layer", f"{chosen.index} of a {chosen.kind} checkpoint: {layer.experts} experts, hidden {layer.hidden}, intermediate "
                      f"{layer.intermediate}, rows {chosen.rows.name}" + _position(parallel, here)))
    source = Source(layer, parallel)
    evidence = operands.examine(contract, plan, source, args)
    findings = [*evidence.findings, *parameters.examine_activation(passed_activation(args), part.activation, chosen.stated, chosen.provenance),
                *parameters.examine_router(args["token_final_scales"]), *parameters.examine_inputs(args, here * parallel.ep_size)]
    if {"w13", "w2"} <= evidence.foreign:
        findings = []  # against another layer's weights nothing else means anything
    asked_right = not (findings or evidence.broken or evidence.same_values)  # then what was passed is the right call itself
    kernel = None if output is None else outputs.examine(contract, args, output, most_tokens=TOKENS)
    findings += kernel.findings if kernel else ()

    tokens = outputs.sample_tokens(contract, args, TOKENS) if kernel is None else kernel.tokens
    router = args["token_final_scales"]
    if any(f.id == "router-squared" for f in findings):
        router = router.sqrt()
    right = args if asked_right else plan.call(_convert(plan, part, outputs.touched(contract, args, tokens)), part, args["input"][:, : part.hidden], args["token_selected_experts"], router, parallel)
    exact = _exact({**args, "token_final_scales": router}, part, parallel, tokens)
    passed = kernel.trace if kernel else contract.trace(outputs.restrict(contract, args, tokens), keep=True)
    right_trace = passed if asked_right else contract.trace(outputs.restrict(contract, right, tokens), keep=True)
    floor = compare(right_trace.output.double()[:, : part.hidden], exact.output.double())
    seen = output[tokens] if output is not None else passed.output
    truth = compare(seen.double()[:, : part.hidden], exact.output.double())
    findings = [_with_effect(f, contract, args, right, tokens, right_trace.output, part.hidden, evidence.alone,
                             passed.output if len(findings) == 1 and not evidence.unexplained else None) for f in findings]
    # Bytes in the padding that meet zeros change nothing: no fault, but worth a line.
    harmless = [f for f in findings if f.id == "padding-not-zero" and f.effect == 0.0]
    findings = [f for f in findings if not any(f is h for h in harmless)]
    order = {"proved": 0, "consistent": 1, "suspected": 2}
    findings.sort(key=lambda f: (order[f.strength], -(f.effect or 0.0)))

    unexplained = [contract.operand(k).title for k in evidence.unexplained]
    verdict, summary = _verdict(call, findings, unexplained, {"w13", "w2"} <= evidence.foreign, kernel)
    checked = [f"{len(evidence.equal)} of {len(evidence.equal) + len(evidence.broken) + len(evidence.same_values)} operands equal vLLM's recipe byte for byte"
               + (f"; {', '.join(contract.operand(k).title for k in evidence.same_values)}: other bytes, the same weights (no fault)" if evidence.same_values else ""),
               "activation and its parameters against config.json; router weights; parallel position"]
    checked += [f"{contract.operand(k).title}: not read on tp_rank {parallel.tp_rank}" for k in evidence.unread]
    checked.append(_compared(kernel, args) if kernel else "no output was recorded: distances are those of an emulation of what was passed")
    checked += [f"{f.evidence}; it meets zeros and changes nothing (no fault)" for f in harmless]
    if asked_right and kernel and not kernel.follows and not kernel.findings:
        checked.append("operands and parameters are right: look behind the call, at the kernel's version and tactic, at memory that others "
                       "write, at a race (does the same call give the same output?)")
    open_ = [*evidence.open, *evidence.unexplained.values(), *(kernel.open if kernel else ()),
             *parameters.vacuity(part, right_trace, args, part.experts)]
    return Diagnosis(verdict, summary, tuple(findings), facts, kernel and kernel.comparison, truth, floor, tuple(checked), tuple(open_))


def _verdict(call: Call, findings: list[Finding], unexplained: list[str], foreign: bool, kernel: outputs.OutputEvidence | None) -> tuple[str, str]:
    besides = f"; besides: {_titles(findings)}" if findings else ""
    none_known = f"{', '.join(unexplained)}: not what the recipe makes of this checkpoint, and no known fault explains it"
    if foreign:
        none_known = ("none of this call's weights are this layer's, in any order or layout: another layer or checkpoint, or weights that were "
                      "requantised or never loaded")
    if call.status == "crashed":
        if unexplained:
            return CRASHED, f"{_NO_RETURN}{none_known}{besides}"
        return CRASHED, _NO_RETURN + (_titles(findings) if findings else "Its arguments are right: look at the kernel, the driver and memory")
    if unexplained:
        contradicts = ""
        if kernel and not kernel.follows and not foreign:
            contradicts = "; nor does the recorded output follow from it: the dumped operand is not what the kernel read, or changed before it was written down"
        return UNEXPLAINED, none_known + contradicts + besides
    if kernel and not kernel.follows and not kernel.findings:
        return UNEXPLAINED, _follows_not(kernel) + besides
    if findings:
        return WRONG, _titles(findings)
    if kernel is None:
        return UNDECIDED, f"operands and parameters are the checkpoint's; {_NO_OUTPUT}"
    some = "the output follows" if kernel.tokens.numel() == kernel.total else f"the output of the {kernel.tokens.numel()} of {kernel.total} tokens looked at follows"
    return RIGHT, f"the operands are what the recipe makes of the checkpoint, the parameters are the checkpoint's, and {some} from them"


def _titles(findings: list[Finding] | tuple[Finding, ...]) -> str:
    def operands_of(f: Finding) -> str:
        names = f.where.split(", ")
        return "" if not f.where.startswith("w") else f" ({f.where})" if len(names) < 4 else f" ({names[0]} and {len(names) - 1} more operands)"

    return "; ".join(f.fault.title + operands_of(f) for f in findings)


def _position(p: Parallel, experts: int) -> str:
    out = f"; tp_rank {p.tp_rank} of {p.tp_size}" if p.tp_size > 1 else ""
    return out + (f"; ep_rank {p.ep_rank} of {p.ep_size}, {experts} experts here" if p.ep_size > 1 else "")


def _check_fit(got: tuple[int, int, int], part: MoELayer, plan: Plan, chosen: CheckpointLayer, p: Parallel) -> None:
    want = (part.experts, *plan.padded)
    if got != want:
        raise MxdebugError("call and checkpoint", f"experts, intermediate, hidden {list(want)}: layer {chosen.index}'s part for tp {p.tp_rank}/{p.tp_size}, "
                           f"ep {p.ep_rank}/{p.ep_size}, padded to 128", f"{list(got)}", "another checkpoint or layer, or a parallel position that the call does not state")


def _convert(plan: Plan, part: MoELayer, experts: list[int]) -> dict[str, Tensor | None]:
    """The converted operands of `part`, of these experts only; the others are zeros that nobody reads."""
    def some(t: Any) -> Any:
        return None if t is None else t[experts]

    a = part.activation
    picked = replace(part, gate=some(part.gate), up=some(part.up), down=some(part.down), gate_bias=some(part.gate_bias), up_bias=some(part.up_bias),
                     down_bias=some(part.down_bias), activation=replace(a, alpha=some(a.alpha), beta=some(a.beta), limit=some(a.limit)))
    out: dict[str, Tensor | None] = {}
    for key, t in plan.convert(picked).items():
        out[key] = None if t is None else torch.zeros(part.experts, *t.shape[1:], dtype=t.dtype)
        if t is not None:
            out[key][experts] = t
    return out


def _exact(args: Mapping[str, Any], part: MoELayer, parallel: Parallel, tokens: Tensor) -> Trace:
    """What the checkpoint means for these tokens: the formats' own scale codec, no intermediate rounding."""
    return forward(args["input"][tokens][:, : part.hidden], args["token_selected_experts"][tokens], args["token_final_scales"][tokens],
                   replace(part, scale=None), parallel=parallel, roundings=EXACT, compute=torch.float64)


_ARGUMENT_OF = {"swiglu_alpha", "swiglu_beta", "swiglu_limit", "activation_type", "token_final_scales"}


def _with_effect(f: Finding, contract: Contract, args: Mapping[str, Any], right: Mapping[str, Any], tokens: Tensor, right_output: Tensor,
                 hidden: int, alone: Mapping[tuple[str, str], Tensor | None], only: Tensor | None) -> Finding:
    """How far this finding alone moves the output: the right call with only this finding's operands or parameters as passed.

    alone: what to take for operands that have other faults too; None where that cannot be made, and the effect is not known.
    only: the emulated output of the call itself, where this is its only finding. Columns of the padding do not count. inf: NaN or inf where the right call has none.
    """
    if f.effect is not None:
        return f
    mixed = dict(right)
    for operand in contract.operands:
        if operand.title not in f.where.split(", "):
            continue
        name, _, index = operand.argument.partition("[")
        value = alone.get((f.id, operand.key), operand.get(args))
        if (f.id, operand.key) in alone and value is None:
            return f
        if index:
            scales = list(mixed[name])
            scales[int(index[:-1])] = value
            mixed[name] = scales
        else:
            mixed[name] = value
    for name in _ARGUMENT_OF & {f.where}:
        mixed[name] = args.get(name)
    if all(mixed[k] is right.get(k) for k in mixed):
        return f
    for weight, bias, other in (("fc1_expert_weights", "fc1_expert_biases", "fc2_expert_biases"), ("fc2_expert_weights", "fc2_expert_biases", "fc1_expert_biases")):
        if mixed.get(bias) is None and mixed.get(other) is not None:  # one bias without the other is refused
            mixed[bias] = torch.zeros(mixed[weight].shape[:2], dtype=mixed[other].dtype)
    if only is not None:
        moved = only
    else:
        try:
            moved = contract.emulate(outputs.restrict(contract, mixed, tokens))
        except MxdebugError:
            return f  # on its own the kernel would refuse it
    distance = compare(moved[:, :hidden], right_output[:, :hidden])
    return replace(f, effect=distance.relative_l2 if distance.masks_equal else math.inf)
