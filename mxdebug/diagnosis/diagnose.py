"""The diagnosis of one call: bytes first, since they give proof; then parameters; then the output."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..calls import Call, load, unrecorded_outputs
from ..checkpoints import Checkpoint, CheckpointLayer, CheckpointLinear, open_checkpoint
from ..checkpoints.settings import Routing
from ..contracts import Contract, LinearContract, Seen, find, find_linear
from ..contracts.activation import read_activation
from ..errors import MxdebugError, brief
from ..exchange import ScaleFinding
from ..faults import FAULTS, INPUT_FAULTS, QUANTISED_WITH
from ..memory import give_back
from ..metrics import compare
from ..recipes import Plan, logical_operand, logical_shape, recipe
from ..reference import EXACT, MoELayer, Parallel, Trace, forward
from ..scan.index import Index
from . import activations, operands, outputs, parameters, placement
from . import scalars as global_scales
from .device import checked, to_device
from .finding import CRASHED, PENDING, PROVED, RIGHT, SUSPECTED, UNDECIDED, UNEXPLAINED, WRONG, Diagnosis, Finding
from .given import Given
from .linear import diagnose_linear
from .linear_elsewhere import besides
from .linear_locate import locate_linear
from .locate import locate, position
from .where import where
from .recover import Source

TOKENS = 64  # at most this many tokens are emulated


def diagnose(call: Call | str | Path, checkpoint: Checkpoint | CheckpointLayer | CheckpointLinear | str | Path | None = None, *, layer: int | None = None,
             engine: str = "vllm", tp: Parallel | tuple[int, int] | None = None, sent: Sequence[Tensor] | None = None, module: str | None = None,
             index: Index | None = None, device: str | torch.device | None = None) -> Diagnosis:
    """Say what is wrong with one recorded call, how sure that is, where, and what to change; or that the call is right.

    call        a Call, or the folder of a FlashInfer dump that holds exactly one
    checkpoint  what the layer should compute (a CheckpointLinear for a call of a linear kernel); without it only the kernel can be checked against its contract
    layer       which layer of the checkpoint; None: found by the rows of the weights (`locate`)
    engine      whose recipe to expect
    tp          the tensor-parallel position (size, rank), for kernels that are not told (TRT-LLM, CuTe-DSL) where the bytes do not show it
    module      for a call of a linear kernel: the layer's name, such as model.layers.0.self_attn.qkv_proj; None: found by the rows of the weight
    sent        what each rank's tokens were before they were quantised, [rows, H] in rank order: it decides in which order scales lie
    index       an index of a MoE checkpoint (`mxdebug scan --index`): layer and tensor-parallel slice are then found by it, not by reading every layer
    device      where a call of experts is computed, such as "cuda"; None: where the call's tensors are. The result is the same
    Raises MxdebugError for a dump or checkpoint that is damaged, foreign, or does not fit the other, and for the module of a call of experts.
    """
    call = call if isinstance(call, Call) else load(call)
    place = None
    if call.status != "pending flush" and find_linear(call.function, call.arguments) is None:
        if module is not None:
            raise MxdebugError("module", "none for a mixture of experts: its layer is stated by its number", brief(module), "--module is about calls of linear kernels; --layer N")
        if index is not None and layer is None:
            place = where(call, index)
            layer, tp = place.layer, tp or (place.parallel if place.parallel.tp_size > 1 else None)
    d = _diagnose(call, checkpoint, layer, engine, tp, sent, module, None if device is None else checked(device))
    if place is not None and checkpoint is None:  # with one, the diagnosis names the layer itself
        d = replace(d, call=(*d.call, ("place", "; ".join(" ".join(line.split()) for line in str(place).splitlines()))))
    lost = f"the outputs could not be read: {call.lost}" if call.lost else ""
    if beside := unrecorded_outputs(call):
        lost = (f"{beside} is there, but the record does not say completed: metadata.jsonl may have been cut off, or the file was; "
                "its outputs were not looked at")
    return replace(d, open=(lost, *d.open)) if lost else d


def _diagnose(call: Call, checkpoint: Checkpoint | CheckpointLayer | CheckpointLinear | str | Path | None, layer: int | None, engine: str,
              tp: Parallel | tuple[int, int] | None, sent: Sequence[Tensor] | None, module: str | None, device: torch.device | None) -> Diagnosis:
    facts = _facts(call)
    if call.status == "pending flush":
        return Diagnosis(PENDING, "FlashInfer recorded this call inside a CUDA graph and never wrote its tensors; that is no crash. Call "
                         "flashinfer.api_logging.flush_graph_dumps() after a replay, let the process end normally, or run the engine in eager mode",
                         (), facts, None, None, None, ("metadata only",), ("everything else: there are no tensors",))
    if (kernel := find_linear(call.function, call.arguments)) is not None:
        return _diagnose_linear(call, kernel, checkpoint, module, layer, (tp.tp_size, tp.tp_rank) if isinstance(tp, Parallel) else tp, facts, engine)
    contract = find(call.function, call.arguments)
    facts = (*facts, ("path", f"{contract.path}, {_verified(contract)}"))
    recorded = call  # where it was loaded: its layer is found there
    scales, unfit = _order_of_scales(call, contract, sent, checkpoint, layer)
    try:
        given = Given.of(contract, call.arguments)
    except MxdebugError as error:
        about_scales = contract.activations is not None and error.operand == contract.operand("x_scale").where
        return _broken_contract(call, facts, error, activations.findings(contract, scales) if about_scales else [])
    if device is not None:
        call = to_device(call, device)
        given = Given.of(contract, call.arguments)
    output = call.outputs[0] if call.outputs else None
    tokens, hidden = given.base.x.shape[0], given.base.columns or given.base.x.shape[1]
    if output is not None and tuple(output.shape) != (tokens, hidden):
        raise MxdebugError("output", f"shape {[tokens, hidden]}", f"shape {list(output.shape)}", "the dump's outputs belong to another call")
    if output is not None and output.dtype != contract.roundings.output:
        raise MxdebugError("output", str(contract.roundings.output), str(output.dtype), "the dump's outputs belong to another call")
    if checkpoint is None:
        d = _without_checkpoint(call, given, facts, output, scales)
        return replace(d, open=(*unfit, *d.open))
    if isinstance(checkpoint, (str, Path)):
        checkpoint = open_checkpoint(checkpoint)
    chosen = _chosen(recorded, checkpoint, layer)
    if device is not None:
        chosen = to_device(chosen, device)
    d = _with_checkpoint(call, given, facts, output, chosen, engine, Parallel(*tp) if isinstance(tp, tuple) else tp, scales)
    d = replace(d, open=(*unfit, *d.open))
    if d.verdict == UNEXPLAINED and layer is not None and isinstance(checkpoint, Checkpoint) and len(checkpoint.layers) > 1:
        try:
            found = locate(recorded, checkpoint)
        except MxdebugError:
            return d
        if found != layer:
            return replace(d, open=(f"layer {found} of this checkpoint holds the rows of this call's weights: try --layer {found}", *d.open))
    return d


def _diagnose_linear(call: Call, kernel: LinearContract, checkpoint: Checkpoint | CheckpointLayer | CheckpointLinear | str | Path | None, module: str | None,
                     layer: int | None, tp: tuple[int, int] | None, facts: tuple[tuple[str, str], ...], engine: str) -> Diagnosis:
    if isinstance(checkpoint, CheckpointLayer):
        raise MxdebugError("checkpoint", "a linear layer", "a mixture of experts", f"{call.function} is a linear kernel")
    if checkpoint is None or isinstance(checkpoint, CheckpointLinear):
        return diagnose_linear(call, kernel, checkpoint, facts, engine)
    opened = open_checkpoint(checkpoint) if isinstance(checkpoint, (str, Path)) else checkpoint
    located = locate_linear(kernel, call.arguments, opened, module=module, layer=layer, tp=tp)
    return besides(diagnose_linear(call, kernel, located.chosen, facts, engine), located, tp, kernel, call.arguments, opened)


def _order_of_scales(call: Call, contract: Contract, sent: Sequence[Tensor] | None, checkpoint: Checkpoint | CheckpointLayer | str | Path | None,
                     layer: int | None) -> tuple[ScaleFinding | None, tuple[str, ...]]:
    """(in which order the activation scales lie, why what was sent could not be used)."""
    if contract.activations is None or sent is None:
        return activations.examine(contract, call.arguments, None), ()
    gscale = None
    try:
        if contract.activations.outer and checkpoint is not None and contract.get("a1_gscale", call.arguments) is None:
            inputs = _chosen(call, checkpoint, layer).layer.w13_input_scale
            gscale = None if inputs is None else 1.0 / inputs.max()
        return activations.examine(contract, call.arguments, sent, gscale), ()
    except MxdebugError as error:
        return activations.examine(contract, call.arguments, None), (f"what was sent does not fit this call: {error}",)


def _chosen(call: Call, checkpoint: Checkpoint | CheckpointLayer | str | Path, layer: int | None) -> CheckpointLayer:
    if isinstance(checkpoint, (str, Path)):
        checkpoint = open_checkpoint(checkpoint)
    return checkpoint if isinstance(checkpoint, CheckpointLayer) else checkpoint.layer(locate(call, checkpoint) if layer is None else layer)


def _verified(contract: Contract) -> str:
    if any("H200" in v.how for v in contract.verified):
        return f"verified for {contract.verified[0].versions}"
    return "a path that mxdebug never compared with a GPU; known from " + " and ".join(f"{v.how} ({v.versions})" for v in contract.verified)


def _facts(call: Call) -> tuple[tuple[str, str], ...]:
    versions = ", ".join(f"{k} {str(v).split(' ')[0]}" for k, v in call.versions.items() if k in ("flashinfer", "torch"))
    return (("call", f"{call.function}, call {call.sequence} of process {call.process}, {call.status}" + (f" ({versions})" if versions else "")),)


def _broken_contract(call: Call, facts: tuple[tuple[str, str], ...], error: MxdebugError, because: list[Finding]) -> Diagnosis:
    finding = Finding(FAULTS["contract-broken"], PROVED, error.operand, f"expected {error.expected}, got {error.got}"
                      + (f"; likely: {error.reason}" if error.reason else ""))
    verdict = CRASHED if call.status == "crashed" else WRONG
    start = _NO_RETURN if verdict == CRASHED else ""
    return Diagnosis(verdict, f"{start}{'T' if start else 't'}he kernel's contract is broken: {error.operand}", tuple(because) or (finding,), facts, None, None, None,
                     ("the arguments against the kernel's contract",), ("everything behind it: correct this first",))


def _without_checkpoint(call: Call, given: Given, facts: tuple[tuple[str, str], ...], output: Tensor | None,
                        scales: ScaleFinding | None) -> Diagnosis:
    findings = [*_from_tokens(given), *activations.findings(given.contract, scales), *global_scales.not_loaded(given), *placement.nan_scales(given), *placement.suspect(given)]
    need = ("whether the operands are the checkpoint's cannot be seen without it: pass --checkpoint DIR", *parameters.skipped(given.base))
    besides = f"; besides: {_titles(findings)}" if findings else ""
    if output is None and call.status == "crashed":
        return Diagnosis(CRASHED, f"{_NO_RETURN}Its arguments keep the kernel's contract{besides}", tuple(findings), facts,
                         None, None, None, ("shapes and dtypes against the contract; router weights",), need)
    if output is None:
        return Diagnosis(UNDECIDED, f"{_NO_OUTPUT}, and there is no checkpoint: only the kernel's contract was checked{besides}", tuple(findings), facts,
                         None, None, None, ("shapes and dtypes against the contract; router weights",), need)
    evidence = outputs.examine(given, output, most_tokens=TOKENS)
    findings = [*evidence.findings, *findings]
    if not evidence.follows and not evidence.findings:
        verdict, summary = UNEXPLAINED, f"{_follows_not(evidence)}{besides}"
    elif findings and all(f.strength == SUSPECTED for f in findings):
        verdict, summary = UNDECIDED, f"the kernel computed exactly what it was given; suspected, no more: {_titles(findings)}"
    elif findings:
        verdict, summary = WRONG, _titles(findings)
    else:
        verdict, summary = UNDECIDED, "the kernel computed exactly what it was given; whether it was given the right bytes needs the checkpoint"
    return Diagnosis(verdict, summary, tuple(findings), facts, evidence.comparison, None, None,
                     (_compared(evidence), evidence.floor, "router weights; the order of block scales by statistics"), (*evidence.open, *activations.remains(scales), *need), follows=evidence.follows)


_NO_RETURN = "inputs without outputs: the call did not return. "
_NO_OUTPUT = "the dump holds no output, so what the kernel computed was not checked"


def _from_tokens(given: Given, routing: Routing = Routing()) -> list[Finding]:
    """What router weights, expert ids and activations say by themselves, or by what config.json says of routing."""
    ids, experts = given.base.experts, given.experts * given.base.parallel.ep_size
    return [*parameters.examine_router(given.base.router, given.contract.operand("router").argument, routing, (ids >= 0) & (ids < experts)),
            *parameters.examine_inputs(given.base, given.contract, given.experts * given.base.parallel.ep_size),
            *activations.zeros(given.contract, given.arguments), *activations.exponents(given.contract, given.arguments)]


def _compared(evidence: outputs.OutputEvidence) -> str:
    return f"the output of {len(evidence.tokens)} of {evidence.total} tokens against an emulation of what was passed"


def _follows_not(evidence: outputs.OutputEvidence) -> str:
    tried = "no known broken computation reproduces it" + ("" if evidence.pairs else ", alone")
    return f"the output does not follow from what was passed{'' if evidence.comparison.masks_equal else ' (NaN or inf in other places)'}, and {tried}"


def _with_checkpoint(call: Call, given: Given, facts: tuple[tuple[str, str], ...], output: Tensor | None, chosen: CheckpointLayer, engine: str,
                     tp: Parallel | None, scales: ScaleFinding | None) -> Diagnosis:
    contract, args, layer = given.contract, call.arguments, chosen.layer
    stated = contract.parallel(args)
    parallel = position(given, layer, recipe(engine, contract.path, chosen.kind), tp)
    part = layer.part(parallel)
    plan = recipe(engine, contract.path, chosen.kind).plan(part, layer)
    here, base = given.experts, given.base
    _check_fit((here, base.layer.intermediate, base.layer.hidden), part, plan, chosen, parallel)
    facts = (*facts, ("layer", f"{chosen.index} of a {chosen.kind} checkpoint: {layer.experts} experts, hidden {layer.hidden}, intermediate "
                      f"{layer.intermediate}, rows {chosen.rows.name}" + _position(parallel, here)))
    source, alpha = Source(layer, parallel), contract.get("w13_alpha", args)
    scaled = None if alpha is None else global_scales.positive(alpha.float().reshape(-1))
    evidence = operands.examine(contract, plan, source, args)
    scalars = global_scales.examine(given, plan, _meant(evidence.findings, part), _other_ranks(plan, layer, parallel), _moved(plan, layer, parallel, evidence))
    if output is not None and (scales is None or scales.by != "senders"):
        scalars = global_scales.unconfirmed(given, scalars)
    findings = [*global_scales.joined([*evidence.findings, *scalars]),
                *parameters.examine_activation(contract, read_activation(contract, args), part.activation, chosen.provenance, scaled),
                *_from_tokens(given, chosen.routing), *activations.findings(contract, scales)]
    if any(f.id == "ep-rank" for f in findings):  # one mistake: then the global scales are that rank's too
        findings = [f for f in findings if f.id != "global-of-another-rank"]
    if {"w13", "w2"} <= evidence.foreign:
        findings = []  # against another layer's weights nothing else means anything
    asked_right = not (findings or evidence.broken or evidence.same_values)  # then what was passed is the right call itself
    kernel = None if output is None else outputs.examine(given, output, most_tokens=TOKENS)
    findings += kernel.findings if kernel else ()

    tokens = outputs.sample_tokens(given, TOKENS) if kernel is None else kernel.tokens
    router, numbers = base.router, plan.scalars(part)
    if any(f.id == "router-squared" for f in findings):
        router = router.sqrt()
    x, gscale = contract.activations_of(args), global_scales.quantised_with(given, findings)
    if gscale is not None:
        x = plan.quantise(x.dequantise() / gscale, numbers)
    touched = given.touched(tokens)
    converted = None if asked_right else _converted(contract, plan, part, args, evidence.equal, touched)
    right = args if converted is None else plan.call(converted, part.activation, x, base.experts, router, stated)
    del converted
    truly = exact(replace(base, router=router), plan, part, parallel, tokens, gscale)
    passed = kernel.trace if kernel else given.see(tokens).trace(keep=True)
    right_trace = passed if asked_right else contract.see(right, tokens=tokens, whole=False).trace(keep=True)
    floor = compare(right_trace.output.double()[:, : part.hidden], truly.output.double())
    seen = output[tokens] if output is not None else passed.output
    truth = compare(seen.double()[:, : part.hidden], truly.output.double())
    if not asked_right:
        right = dict(right)
        for o in contract.operands:
            if findings and not o.key.endswith("bias") and all(o.title in f.where.split(", ") for f in findings):
                o.put(right, None)  # it is large, and in each of the calls below another stands for it
    give_back()
    findings = [_with_effect(f, contract, args, right, tokens, touched, right_trace.output, part.hidden, evidence.alone,
                             passed.output if len(findings) == 1 and not evidence.unexplained else None) for f in findings]
    # Bytes in the padding that meet zeros change nothing: no fault, but worth a line.
    harmless = [f for f in findings if f.id == "padding-not-zero" and f.effect == 0.0]
    findings = [f for f in findings if not any(f is h for h in harmless)]
    order = {"proved": 0, "consistent": 1, "suspected": 2}
    findings.sort(key=lambda f: (order[f.strength], -(f.effect or 0.0)))

    unexplained = [contract.operand(k).title for k in evidence.unexplained]
    if not (asked_right or findings or unexplained) and not outputs.follows(
            *(t.output[:, : part.hidden] for t in (passed, right_trace)), max(part.hidden, part.intermediate), contract.roundings):
        unexplained = [contract.operand(k).title for k in (*evidence.broken, *evidence.same_values)]  # whatever the bytes seemed to say: it is another layer to the kernel
    verdict, summary = _verdict(call, findings, unexplained, {"w13", "w2"} <= evidence.foreign, kernel)
    if verdict == RIGHT and activations.remains(scales):
        verdict, summary = UNDECIDED, f"{summary}; but in which order its activation scales lie, this call alone cannot show"
    checked = [f"{len(evidence.equal)} of {len(evidence.equal) + len(evidence.broken) + len(evidence.same_values)} operands equal vLLM's recipe byte for byte"
               + (f"; {', '.join(contract.operand(k).title for k in evidence.same_values)}: other bytes, the same weights (no fault)" if evidence.same_values else ""),
               "activation and its parameters against config.json; router weights; parallel position"]
    checked += [f"{contract.operand(k).title}: not read on tp_rank {parallel.tp_rank}" for k in evidence.unread]
    checked.append(_compared(kernel) if kernel else "no output was recorded: distances are those of an emulation of what was passed")
    checked += [f"{f.evidence}; it meets zeros and changes nothing (no fault)" for f in harmless]
    if kernel:
        checked.append(kernel.floor)
    if asked_right and kernel and not kernel.follows and not kernel.findings:
        checked.append("operands and parameters are right: look behind the call, at the kernel's version and tactic, at memory that others "
                       "write, at a race (does the same call give the same output?)")
    open_ = [*evidence.open, *activations.remains(scales), *activations.untold(contract, args, scales, numbers.get("x_gscale")),
             *evidence.unexplained.values(), *(kernel.open if kernel else ()), *parameters.skipped(base),
             *parameters.clipped(right_trace, part.activation, given.touched(tokens), numbers.get("a2_gscale")),
             *parameters.vacuity(contract, part, right_trace, base, part.experts)]
    return Diagnosis(verdict, summary, tuple(findings), facts, kernel and kernel.comparison, truth, floor, tuple(checked), tuple(open_),
                     evidence.states, kernel.follows if kernel else None)


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
    if findings and not all(f.strength == SUSPECTED for f in findings):
        return WRONG, _titles(findings)
    if findings:
        start = _NO_OUTPUT if kernel is None else "the kernel computed what it was given"
        return UNDECIDED, f"{start}, and nothing is proved wrong; suspected, no more: {_titles(findings)}"
    if kernel is None:
        return UNDECIDED, f"operands and parameters are the checkpoint's; {_NO_OUTPUT}"
    some = "the output follows" if kernel.tokens.numel() == kernel.total else f"the output of the {kernel.tokens.numel()} of {kernel.total} tokens looked at follows"
    return RIGHT, f"the operands are what the recipe makes of the checkpoint, the parameters are the checkpoint's, and {some} from them"


def _titles(findings: list[Finding] | tuple[Finding, ...]) -> str:
    def operands_of(f: Finding) -> str:
        names = f.where.split(", ")
        return "" if not f.where.startswith("w") else f" ({f.where})" if len(names) < 4 else f" ({names[0]} and {len(names) - 1} more operands)"

    return "; ".join(f.title + operands_of(f) for f in findings)


def _position(p: Parallel, experts: int) -> str:
    out = f"; tp_rank {p.tp_rank} of {p.tp_size}" if p.tp_size > 1 else ""
    return out + (f"; ep_rank {p.ep_rank} of {p.ep_size}, {experts} experts here" if p.ep_size > 1 else "")


def _check_fit(got: tuple[int, int, int], part: MoELayer, plan: Plan, chosen: CheckpointLayer, p: Parallel) -> None:
    want = (part.experts, *plan.padded)
    if got != want:
        raise MxdebugError("call and checkpoint", f"experts, intermediate, hidden {list(want)}: layer {chosen.index}'s part for tp {p.tp_rank}/{p.tp_size}, "
                           f"ep {p.ep_rank}/{p.ep_size}, padded for the kernel", f"{list(got)}", "another checkpoint or layer, or a tensor-parallel position that the kernel is not told: --tp SIZE RANK")


def _other_ranks(plan: Plan, layer: MoELayer, p: Parallel) -> list[Mapping[str, Tensor]]:
    """The global scales that the other expert-parallel ranks are passed."""
    if layer.up.global_scale is None:
        return []
    return [plan.scalars(layer.part(Parallel(p.tp_size, p.tp_rank, p.ep_size, rank))) for rank in range(p.ep_size) if rank != p.ep_rank]


def _moved(plan: Plan, layer: MoELayer, p: Parallel, evidence: operands.OperandEvidence) -> Mapping[str, Tensor] | None:
    """The global scales of the experts that stand here, where they stand in another order."""
    if evidence.experts is None or layer.up.global_scale is None or not any(f.id == "experts-rolled" for f in evidence.findings):
        return None
    return plan.scalars(layer.part(Parallel(p.tp_size, p.tp_rank)).take(list(evidence.experts)))


def _meant(findings: tuple[Finding, ...], part: MoELayer) -> MoELayer:
    """The part whose global scales belong to the operands: the checkpoint's, or what was made of it before the recipe."""
    for f in findings:
        part = f.fault.layer(part) if f.fault.layer else part
    return part


def _converted(contract: Contract, plan: Plan, part: MoELayer, args: Mapping[str, Any], equal: tuple[str, ...], experts: list[int]) -> dict[str, Tensor | None]:
    """The right operands of these experts; what is made for them holds zeros for the others, what a call passes rightly is taken from it."""
    out: dict[str, Tensor | None] = {}
    for key, form in plan.forms.items():
        o = contract.operand(key)
        if key in equal and form.layout is not None:
            out[key] = o.payload(o.get(args)).reshape(part.experts, *form.shape)
        elif logical_shape(part, key) is not None:
            out[key] = form.apply_to_some(functools.partial(logical_operand, part, key), part.experts, experts)
        else:
            out[key] = None
    return {**out, **plan.scalars(part)}


def exact(seen: Seen, plan: Plan, part: MoELayer, parallel: Parallel, tokens: Tensor, gscale: Tensor | None = None) -> Trace:
    """What the checkpoint means for these tokens: the formats' own scale codec, no intermediate rounding.

    gscale: what NVFP4 activations were multiplied with before quantisation, where it is not what the checkpoint says.
    """
    x = seen.x[tokens][:, : part.hidden].double()
    if gscale is not None or (gscale := plan.scalars(part).get("x_gscale")) is not None:
        x = x / gscale.double()  # codes and block scales alone leave the global scale out
    return forward(x, seen.experts[tokens], seen.router[tokens], replace(part, scale=None), parallel=parallel, roundings=EXACT, compute=torch.float64)


def _with_effect(f: Finding, contract: Contract, args: Mapping[str, Any], right: Mapping[str, Any], tokens: Tensor, touched: list[int], right_output: Tensor,
                 hidden: int, alone: Mapping[tuple[str, str], Callable[[list[int]], Tensor | None]], only: Tensor | None) -> Finding:
    """How far this finding alone moves the output: the right call with only this finding's operands or parameters as passed.

    touched: the experts that the tokens use. alone: what makes those to take for operands that have other faults too; None where that cannot be
    made, and the effect is not known.
    only: the emulated output of the call itself, where this is its only finding. Columns of the padding do not count. inf: NaN or inf where the right call has none.
    """
    if f.effect is not None or f.fault in INPUT_FAULTS:  # what comes in wrongly has no right call beside it
        return f
    mixed, struck = dict(right), f.where.split(", ")
    if any(o.key == QUANTISED_WITH and o.title in struck for o in contract.inputs):
        if f.strength == SUSPECTED:
            return f  # whether the tokens were quantised with it is not known, or it is no number
        struck += [contract.operand(k).title for k in ("x", "x_scale")]  # the kernel does not read the number, but what was quantised with it
    for o in (*contract.operands, *contract.inputs):
        if o.title in struck or o.argument in struck:
            if (f.id, o.key) in alone:
                value = alone[f.id, o.key](touched)
                if value is None:
                    return f
                o.put(mixed, o.as_passed(value))
            else:
                name = o.argument.partition("[")[0]
                if name != o.argument:
                    o.put(mixed, o.get(args))
                elif name in args:
                    mixed[name] = args[name]
                else:
                    mixed.pop(name, None)
    if "activation_type" in struck:
        mixed["activation_type"] = args.get("activation_type")
    if all(mixed[k] is right.get(k) for k in mixed):
        return f
    for key, other in (("w13_bias", "w2_bias"), ("w2_bias", "w13_bias")):  # one bias without the other is refused
        if contract.get(key, mixed) is None and (there := contract.get(other, mixed)) is not None:
            rows = contract.operand(key[:-5]).get(mixed).shape[1]
            contract.operand(key).put(mixed, torch.zeros(there.shape[0], rows, dtype=there.dtype, device=there.device))
    if only is not None:
        moved = only
    else:
        try:
            moved = contract.see(mixed, tokens=tokens, whole=False).emulate()
        except MxdebugError:
            return f  # on its own the kernel would refuse it
    give_back()
    distance = compare(moved[:, :hidden], right_output[:, :hidden])
    return replace(f, effect=distance.relative_l2 if distance.masks_equal else math.inf)
