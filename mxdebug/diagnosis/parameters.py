"""Evidence from the call's parameters: the activation, the router weights, and what the data could not have shown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..checkpoints.settings import Routing
from ..contracts import Contract, Seen
from ..faults import FAULTS
from ..formats import E4M3, NVFP4
from ..layouts import SWIZZLE_128x4
from ..reference import Activation, MoELayer, Trace
from .finding import CONSISTENT, PROVED, SUSPECTED, Finding

_NEUTRAL = {"alpha": 1.0, "beta": 0.0, "limit": float("inf")}
_CLASS = {"silu": "swiglu"}  # one formula: silu is swiglu with alpha 1, beta 0 and no limit


def examine_activation(contract: Contract, passed: Activation, wanted: Activation, provenance: Mapping[str, str], scaled: Tensor | None = None) -> list[Finding]:
    """Compare the activation that the call selects with the checkpoint's, parameter by parameter.

    TRT-LLM's limit and beta were divided by a scale and are multiplied again here, which may cost an ulp or two.
    scaled  bool [experts]: where that scale is a positive number; elsewhere nothing can be said of them, and the scale has a finding of its own
    """
    if (passed.kind, wanted.kind) == ("gelu", "gelu_tanh"):
        return [Finding(FAULTS["gelu-tanh-as-erf"], PROVED, "activation_type", f"the call computes {passed.kind} (erf), the checkpoint means {wanted.kind} ({provenance.get('activation', 'config.json')})")]
    if _CLASS.get(passed.kind, passed.kind) != _CLASS.get(wanted.kind, wanted.kind):
        return [Finding(FAULTS["activation-kind"], PROVED, "activation_type", f"the call computes {passed.kind}, the checkpoint means {wanted.kind} ({provenance.get('activation', 'config.json')})")]
    out = []
    for name, neutral in _NEUTRAL.items():
        want, got = getattr(wanted, name), getattr(passed, name)
        told = scaled if contract.clamps_before_scaling and name != "alpha" else None
        if _same(want, got, neutral, contract.clamps_before_scaling, told):
            continue
        source = provenance.get(name, "config.json")
        if want is None:
            out.append(Finding(FAULTS[f"swiglu-{name}-changed"], SUSPECTED, contract.operand(f"swiglu_{name}").argument, f"the call passes {_show(got)}, the checkpoint states none ({source})"))
            continue
        # What the model type implies is not written in the file; but it is a rule of the engine, and the numbers were compared.
        id = f"swiglu-{name}-lost" if got is None else f"swiglu-{name}-changed"
        out.append(Finding(FAULTS[id], PROVED, contract.operand(f"swiglu_{name}").argument, f"the checkpoint means {_show(want)} ({source}); the call passes {_show(got)}"))
    return out


def _same(want: Tensor | None, got: Tensor | None, neutral: float, folded: bool, told: Tensor | None) -> bool:
    if want is None and got is None:
        return True
    n = (want if want is not None else got).shape[0]
    a, b = (torch.full((n,), neutral) if t is None else t.float().cpu() for t in (want, got))
    if told is not None and a.shape == b.shape == told.shape:
        a, b = a[told.cpu()], b[told.cpu()]
    return a.shape == b.shape and (torch.allclose(a, b, rtol=2.0**-22, atol=0.0) if folded else torch.equal(a, b))


def _show(t: Tensor | None) -> str:
    if t is None:
        return "none"
    values = t.float().unique().tolist()
    return f"{values[0]:g} for every expert" if len(values) == 1 else "values by expert: " + ", ".join(f"{v:g}" for v in t.tolist()[:8]) + (",..." if t.numel() > 8 else "")


def examine_router(router: Tensor, argument: str = "router weights", routing: Routing = Routing(), chosen: Tensor | None = None) -> list[Finding]:
    """Router weights against what a right router gives: applied twice, not renormalised, renormalised though they should not be, scaled twice.

    router   [T, k]; chosen: bool [T, k], which slots select an expert that exists
    routing  what config.json says; without it only squares can be told: their roots sum to 1 for every token, the weights themselves do not
    Softmax before or after the choice of experts gives the same renormalised weights: no difference is looked for.
    """
    w = router.double()
    w = w[chosen.all(1)] if chosen is not None else w
    if w.shape[1] < 2 or not w.numel() or (w < 0).any() or not torch.isfinite(w).all():
        return []
    w = w[(w != 0).any(1)]  # padding tokens have none
    if not w.numel():
        return []
    sums, roots = w.sum(1), w.sqrt().sum(1)
    # Renormalised weights sum to 1 within their own rounding: float32, or bf16 where the router ran in it.
    step = 2.0**-8 if torch.equal(router.to(torch.bfloat16).float(), router.float()) else 2.0**-20
    tolerance = w.shape[1] * step

    def all_are(t: Tensor, value: float) -> bool:
        return bool(((t / value - 1).abs() <= tolerance).all())

    def found(id: str, text: str) -> list[Finding]:
        return [Finding(FAULTS[id], CONSISTENT, argument, text)]

    # A few tokens' sums may be 1 by chance, each with a probability of the order of the tolerance.
    telling = tolerance ** w.shape[0] < 1e-5
    spread = f"{sums.min():.3f} .. {sums.max():.3f}"
    if telling and all_are(roots, 1.0) and not bool(((sums - 1).abs() <= tolerance).any()):
        return found("router-squared", f"square roots sum to 1 for all {w.shape[0]} tokens (largest deviation {(roots - 1).abs().max():.1e}), the weights themselves to {spread}")
    factor = routing.factor or 1.0
    if routing.renormalised and not all_are(sums, 1.0) and not all_are(sums, factor):
        if factor != 1.0 and all_are(sums, factor**2):
            return found("router-scaled-twice", f"weights sum to {factor**2:g}, the square of {factor:g} ({routing.where}), for all {w.shape[0]} tokens")
        return found("router-not-renormalised", f"weights sum to {spread}; the model divides them by their sum ({routing.where})")
    if routing.renormalised is False and telling and all_are(sums, 1.0):
        return found("router-renormalised", f"weights sum to 1 for all {w.shape[0]} tokens; the model does not divide them by their sum ({routing.where})")
    return []


def examine_inputs(seen: Seen, contract: Contract, experts: int) -> list[Finding]:
    """Activations, router weights and expert ids that no right layer can be given. experts: of all ranks."""
    out = []
    x, router, ids = seen.x, seen.router, seen.experts
    bad = ~torch.isfinite(x).all(1)
    if bad.any():
        out.append(Finding(FAULTS["input-not-finite"], PROVED, contract.operand("x").argument, f"NaN or inf in {int(bad.sum())} of {len(bad)} tokens, the first is token {int(bad.nonzero()[0])}"))
    bad = (~torch.isfinite(router) | (router < 0)).any(1)
    if not router.any():  # of some tokens: `skipped`
        bad = torch.ones_like(bad)
    if bad.any():
        token = int(bad.nonzero()[0])
        out.append(Finding(FAULTS["router-not-finite"], PROVED, contract.operand("router").argument, f"in {int(bad.sum())} of {len(bad)} tokens; token {token} has "
                           + ", ".join(f"{v:g}" for v in router[token].tolist()[:8])))
    bad = (ids < NOBODY) | (ids >= experts)
    if bad.any():
        token = int(bad.any(1).nonzero()[0])
        out.append(Finding(FAULTS["expert-ids"], PROVED, contract.operand("experts").argument, f"{int(bad.sum())} of {ids.numel()} ids are outside 0 to {experts - 1}, and not {NOBODY} (which skips a slot); token {token} "
                           "selects " + ", ".join(map(str, ids[token].tolist()[:8]))))
    return out


NOBODY = -1  # the expert id by which engines mark a slot that is to be left out


def skipped(seen: Seen) -> list[str]:
    """Slots and tokens marked as left out: by engines, for padding and slots of other ranks, or by a router that lost its numbers."""
    nobody, weightless = int((seen.experts == NOBODY).sum()), int((seen.router == 0).all(1).sum())
    out = []
    if nobody:
        out.append(f"{nobody} of {seen.experts.numel()} expert ids are {NOBODY}: no expert computes these slots in the emulation; "
                   "right for padding and for slots of other ranks only")
    if 0 < weightless < len(seen.router):
        out.append(f"all router weights of {weightless} of {len(seen.router)} tokens are 0, so their output is 0: right for padding only")
    return out


def clipped(trace: Trace, activation: Activation, experts: Sequence[int], gscale: Tensor | None) -> list[str]:
    """Whether a right call clips the inner activation: NVFP4 takes a scale from calibration for it, and no block can be larger than that allows.

    experts: which of this rank's each expert of the trace is; gscale: float32 [experts of this rank], what is multiplied before quantising
    """
    if gscale is None or not trace.up.numel():
        return []
    most = NVFP4.element.max * E4M3.max / gscale.float()
    over, blocks, largest = 0, 0, 0.0
    for e, expert in enumerate(experts):
        amax = activation(*trace.of(e), expert).unflatten(-1, (-1, NVFP4.block)).abs().amax(-1)
        over, blocks = over + int((amax > most[expert]).sum()), blocks + amax.numel()
        largest = max(largest, amax.max().item()) if amax.numel() else largest
    if not over:
        return []
    return [f"{100 * over / blocks:.2g} % of the blocks of the inner activation saturate in a right call: they reach {largest:.3g}, and the checkpoint's input "
            f"scale of w2 holds {most.min():.3g}. That is the checkpoint's, whose calibration saw smaller ones than these tokens give, and no fault of the call"]


def vacuity(contract: Contract, layer: MoELayer, trace: Trace, seen: Seen, local_experts: int) -> list[str]:
    """What the output of this call could not have shown, because its data do not reach it."""
    out = []
    limit = layer.activation.limit
    if limit is not None and trace.up.numel():
        largest = max(t.abs().max().item() for t in (trace.gate, trace.up) if t is not None)
        if largest <= limit.min().item():
            out.append(f"no pre-activation of the sampled tokens reaches the limit {limit.min():g} (largest {largest:.2f}): a lost or misplaced clamp "
                       "would not show in this output (swiglu-limit-lost, kernel-clamp-*, kernel-ignores-limit); the parameter itself was compared")
    touched = int(trace.expert.unique().numel())
    if touched < local_experts:
        out.append(f"the sampled tokens touch {touched} of {local_experts} experts here; the others were compared by bytes only")
    for name, t in (("w13", layer.up.scales), ("w2", layer.down.scales)):
        if t.numel() and t.amin() == t.amax():
            out.append(f"all {name} block scales are equal: a misplaced scale could not show (no fault of scale placement)")
        elif t.shape[-1] == 16 and contract.operand(f"{name}_scale").layout is SWIZZLE_128x4:
            out.append(f"{name} has 16 scale columns, where 128x4 is its own inverse: scales-linear and scales-twice are the same bytes")
    if layer.gate is not None and torch.equal(layer.gate.payload, layer.up.payload) and torch.equal(layer.gate.scales, layer.up.scales):
        out.append("gate and up rows are equal: an exchange of the halves could not show (rows-gate-up, kernel-gate-up-swapped)")
    sums = seen.router[(seen.router != 0).any(1)].double().sum(1)
    if bool(((sums - 1).abs() > 1e-2).any()):
        out.append(f"router weights sum to {sums.min():.3f} to {sums.max():.3f}, not to 1: right only for a model that does not renormalise them")
    ordered = seen.experts.sort(1).values
    if bool(((ordered.diff(dim=1) == 0) & (ordered[:, 1:] != NOBODY)).any()):
        out.append("some tokens select one expert twice")
    if seen.experts.shape[1] == 1:
        out.append("top-1 routing: a router weight of 1 applied twice could not show (router-squared, kernel-router-twice)")
    if any("could not show" in line or "would not show" in line or "same bytes" in line for line in out):
        out.append(f'a call that hides none of this: mxdebug.probe.probe("{contract.path}")')
    return out
