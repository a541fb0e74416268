"""Faults of the call and of the kernel: parameters lost or changed, ranks misstated, and computations that break the contract."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from ..contracts import Seen
from ..contracts.activation import PARAMETERS
from ..formats import BlockTensor
from ..recipes import SWAP_NIBBLES
from ..reference import CLAMPS, Activation, MoELayer, Parallel
from .fault import Fault, KernelChange, Situation, full_like_first, needs

SCALING = 2.5  # routed_scaling_factor of DeepSeek-V3, for trying it out
_NEUTRAL = {"alpha": 1.0, "beta": 0.0, "limit": float("inf")}


def _without(activation: Activation, *names: str) -> Activation:
    """The activation that FlashInfer computes when these parameters are not passed."""
    left = replace(activation, **{n: None for n in names})
    return left if any(getattr(left, n) is not None for n in PARAMETERS) else Activation("silu")


def _lose(*names: str) -> Callable[[Situation, tuple[str, ...]], Situation]:
    def inject(s: Situation, keys: tuple[str, ...]) -> Situation:
        needs(any(getattr(s.activation, n) is not None for n in names), f"swiglu-{names[0]}-lost", f"a checkpoint that states {', '.join(names)}")
        return replace(s, activation=_without(s.activation, *names))

    return inject


def _set(name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Situation, tuple[str, ...]], Situation]:
    def inject(s: Situation, keys: tuple[str, ...]) -> Situation:
        old = getattr(s.activation, name)
        old = full_like_first(_NEUTRAL[name], s.local_experts) if old is None else old
        return replace(s, activation=replace(s.activation, kind="swiglu", **{name: change(old)}))

    return inject


def _gelu(s: Situation) -> Situation:
    needs(s.layer.gate is not None, "gelu-tanh-as-erf", "a layer with gate")
    return replace(s, layer=replace(s.layer, activation=Activation("gelu_tanh")), activation=Activation("gelu"))


_PASS = "pass swiglu_alpha, swiglu_beta and swiglu_limit as float32 [experts on this rank]"
_NEEDS = {"alpha": "pre-activations of a few units", "beta": "any tokens", "limit": "a pre-activation beyond the limit"}
PARAMETER_FAULTS = (
    *(Fault(f"swiglu-{n}-lost", f"swiglu_{n} is not passed", ("call",), _lose(n), f"the checkpoint states {n}, the call has none", _NEEDS[n], _PASS,
            ("vllm#48929", "vllm#49941")) for n in PARAMETERS),
    *(Fault(f"swiglu-{n}-changed", f"swiglu_{n} has another value than the checkpoint states", ("call",), _set(n, change),
            f"the two values of {n} differ", _NEEDS[n], _PASS, ("vllm#46816",))
      for n, change in (("alpha", lambda t: t * 0 + 1.0), ("beta", lambda t: t * 0), ("limit", lambda t: t * 0 + 2.0))),
    Fault("gelu-tanh-as-erf", "the checkpoint means GELU by tanh, the kernel computes it by erf", ("call",),
          lambda s, keys: _gelu(s), "activation_type Geglu against config.json's gelu_pytorch_tanh", "any tokens",
          "pass GegluTanh where the kernel has it; vLLM 0.33 maps GELU_TANH to Geglu (activation_to_flashinfer_type), which is erf in CUTLASS", ("vllm#45354",)),
    Fault("activation-kind", "the call asks for another activation than the checkpoint states", ("call",),
          lambda s, keys: replace(s, activation=Activation("gelu")), "activation_type against config.json's hidden_act", "any tokens",
          "map the activation by name; raise on names that are not mapped", ("vllm#45738",)),
)


def _misstate(s: Situation, keys: tuple[str, ...]) -> Situation:
    p = s.stated
    needs(p.ep_size > 1, "ep-rank", "ep_size above 1")
    return replace(s, stated=Parallel(p.tp_size, p.tp_rank, p.ep_size, (p.ep_rank + 1) % p.ep_size))


CALL_FAULTS = (
    Fault("ep-rank", "ep_rank numbers the experts from the wrong rank", ("call",), _misstate,
          "all operands hold the experts of one rank, the call states another", "ep_size above 1; tokens routed to both ranks",
          "pass the ep_rank whose experts were loaded", ("vllm-gaudi#1796", "vllm#28715")),
    Fault("router-squared", "router weights are squared (applied twice)", ("call",),
          lambda s, keys: replace(s, router=s.router.float().square()),
          "the square roots of the router weights sum to 1 for every token, the weights themselves do not", "top-k above 1, renormalised routing",
          "apply the router weight once", ("vllm#22513",)),
)
# What config.json says of routing gives these away; nothing else does.
ROUTING_FAULTS = (
    Fault("router-not-renormalised", "router weights were not divided by their sum, as the model does", ("call",),
          lambda s, keys: replace(s, router=s.router * torch.linspace(0.4, 0.9, len(s.router))[:, None]), "config.json says norm_topk_prob, and no token's weights sum to 1",
          "top-k above 1, a model that says so", "hand renormalize=True to the router, or RoutingMethodType.Renormalize to the kernel", ("flashinfer#2889", "sglang#24321")),
    Fault("router-renormalised", "router weights were divided by their sum, which the model does not do", ("call",), lambda s, keys: s,
          "config.json denies norm_topk_prob, and every token's weights sum to 1", "top-k above 1, a model that says so",
          "hand renormalize=False to the router, or RoutingMethodType.Default to the kernel", ("flashinfer#2889",)),
    Fault("router-scaled-twice", "routed_scaling_factor was applied twice", ("call",), lambda s, keys: replace(s, router=s.router * SCALING**2),
          "every token's weights sum to the square of config.json's factor", "a model with routed_scaling_factor",
          "apply it in the router or behind the experts, not in both", ("vllm#22513", "sglang#22513", "vllm#43769")),
)



def _break(s: Situation, keys: tuple[str, ...]) -> Situation:
    """One bias without the other, which FlashInfer refuses: the call leaves a crash dump."""
    needs(s.layer.down_bias is not None, "contract-broken", "a checkpoint with biases")
    return replace(s, dropped=s.dropped | {"w2_bias"})


def _first(t: Tensor, value: float) -> Tensor:
    out = t.clone()
    out[0, 0] = value
    return out


INPUT_FAULTS = (
    Fault("input-not-finite", "the activations hold NaN or inf already", ("call",), lambda s, keys: replace(s, x=_first(s.x, float("nan"))),
          "NaN or inf in the input of the call", "any call", "look upstream: this call only passes it on", ("flashinfer#2595",)),
    Fault("router-not-finite", "router weights are NaN, inf, negative or all zero", ("call",), lambda s, keys: replace(s, router=_first(s.router, float("nan"))),
          "the router weights of the call", "any call", "look at the router: logits, softmax and scaling, in float32", ("vllm#37605",)),
    Fault("expert-ids", "tokens select experts that do not exist", ("call",), lambda s, keys: replace(s, experts=_first(s.experts, s.layer.experts)),
          "ids outside 0 .. experts - 1; the kernel leaves these slots out", "any call", "map ids with the placement that is in use (expert map, EPLB)",
          ("sglang#13162", "vllm-gaudi#1796")),
)


def _part(s: Situation, change: Callable[[Tensor], Tensor | float]) -> Situation:
    """One tile of 64 columns of every other token, changed after the kernel."""
    def after(out: Tensor) -> Tensor:
        out = out.clone()
        out[::2, 64:128] = change(out[::2, 64:128])
        return out

    return replace(s, kernel=s.kernel.then(KernelChange(after=after)))


OUTPUT_FAULTS = (
    Fault("contract-broken", "an argument breaks the kernel's contract", ("call",), _break,
          "shapes, dtypes or presence of arguments against the contract", "any call", "see what was expected and what was passed"),
    Fault("output-unwritten", "the kernel did not write its output", ("kernel",), lambda s, keys: replace(s, kernel=s.kernel.then(KernelChange(router=torch.zeros_like))),
          "the output equals the memory that it was to be written into, or is all zeros", "operands that do not give zeros",
          "a kernel built for another architecture, or a launch that failed silently: run with CUDA_LAUNCH_BLOCKING=1, check the build", ("flashinfer#4569", "flashinfer#2952")),
    Fault("output-partly-unwritten", "the kernel did not write a part of its output", ("kernel",), lambda s, keys: _part(s, lambda t: 0.0),
          "tokens or columns equal the memory that they were to be written into, or are zero; the rest follows", "operands that do not give zeros",
          "tell the kernel its valid sizes, or pad so that whole tiles are written; try another tactic (autotune off)", ("flashinfer#2372", "FlyDSL#932", "flashinfer#3398")),
    Fault("output-tile", "a part of the output is wrong, the rest follows from what was passed", ("kernel",), lambda s, keys: _part(s, lambda t: -t),
          "the tokens and columns outside which the output follows", "tokens enough for several tiles",
          "pin another tactic or tile (autotune off), compare FlashInfer versions; report M, N, K and the tile to the kernel's authors",
          ("flashinfer#3227", "flashinfer#4486", "flashinfer#3192", "cutlass#3568")),
)


def _fewer(s: Situation) -> Situation:
    """The first half of the tokens, and another output for them."""
    half = slice(0, max(1, len(s.x) // 2))
    return _part(replace(s, x=s.x[half], experts=s.experts[half], router=s.router[half]), lambda t: -t)


def _stale(s: Situation) -> Situation:
    """Other tokens, and the output of those before."""
    old = s.build()[1]
    return replace(s, x=s.x.flip(0) * 0.5, kernel=s.kernel.then(KernelChange(after=lambda out: out if old is None else old.clone())))


_RACE = "repeat with CUDA_LAUNCH_BLOCKING=1 and without PDL (programmatic dependent launch), autotuning and CUDA graphs, one at a time: what makes it stop is the cause"
TWO_CALLS_FAULTS = (
    Fault("output-varies", "the same call gives another output, by more than sums in another order can", ("calls",), lambda s, keys: _part(s, lambda t: -t),
          "two calls with equal arguments whose outputs differ by more than rounding", "two calls with the same inputs", _RACE,
          ("TensorRT-LLM#14668", "flashinfer#3361", "flashinfer#4588")),
    Fault("output-depends-on-batch", "a token's output changes with the tokens beside it", ("calls",), lambda s, keys: _fewer(s),
          "two calls that share tokens, whose outputs for them differ by more than rounding", "two calls with a token in common",
          "find the M at which it changes: another tile or tactic runs there; pin it, or report M, N, K", ("flashinfer#3559", "flashinfer#3398", "flashinfer#4574")),
    Fault("output-stale", "the output is that of an earlier call", ("calls",), lambda s, keys: _stale(s),
          "an output equals another call's, whose tokens were others", "two calls with other tokens",
          "a buffer that is reused before it was written: synchronise, or take fresh memory; with CUDA graphs copy inputs into the captured ones", ("sglang#28676", "imp#115")),
)


# -- what a kernel would compute if it broke its contract; recognised by reproducing the output bit for bit ------------------


def _activation(change: Callable[[Activation], Activation]) -> KernelChange:
    return KernelChange(layer=lambda layer: replace(layer, activation=change(layer.activation)))


def _kernel(id: str, title: str, change: KernelChange, fix: str, reports: tuple[str, ...] = (), needs: str = "any tokens") -> Fault:
    return Fault(id, title, ("kernel",), lambda s, keys: replace(s, kernel=s.kernel.then(change)),
                 "the output is reproduced bit for bit under this change and not by the contract", needs, fix, reports, change=change)


def _swap_halves(layer: MoELayer) -> MoELayer:
    return layer if layer.gate is None else replace(layer, gate=layer.up, up=layer.gate, gate_bias=layer.up_bias, up_bias=layer.gate_bias)


def _nibbles(layer: MoELayer) -> MoELayer:
    def swap(t: BlockTensor | None) -> BlockTensor | None:
        return None if t is None else replace(t, payload=SWAP_NIBBLES.apply(t.payload))

    return replace(layer, gate=swap(layer.gate), up=swap(layer.up), down=swap(layer.down))


def _without_bias(*names: str) -> KernelChange:
    return KernelChange(layer=lambda layer: replace(layer, **{n: None for n in names}))


def _router_on_input(seen: Seen) -> Seen:
    """Top-1 only: with more experts a token no single input is left to be multiplied."""
    return seen if seen.router.shape[1] != 1 else replace(seen, x=(seen.x.float() * seen.router).to(seen.x.dtype), router=torch.ones_like(seen.router))


_KERNEL_FIX = "the operands are right for the contract: another kernel or version computed this; compare FlashInfer versions"
KERNEL_FAULTS = (
    *(_kernel(f"kernel-clamp-{i}", f"the clamp acts elsewhere: {clamp}; the contract says {CLAMPS[0]}", _activation(lambda a, c=clamp: replace(a, clamp=c) if a.kind == "swiglu" else a),
              _KERNEL_FIX, ("vllm#48929",), "pre-activations beyond the limit on the side that differs") for i, clamp in enumerate(CLAMPS) if i),
    *(_kernel(f"kernel-ignores-{n}", f"swiglu_{n} is passed but not applied", _activation(lambda a, n=n: _without(a, n) if a.kind == "swiglu" else a),
              _KERNEL_FIX, ("vllm#45738", "tokenspeed#1647"), _NEEDS[n]) for n in PARAMETERS),
    _kernel("kernel-gate-up-swapped", "the kernel takes the first half of w13 as gate", KernelChange(layer=_swap_halves), _KERNEL_FIX, ("sglang#32430",)),
    _kernel("kernel-nibbles-swapped", "the kernel takes the high nibble as the even element", KernelChange(layer=_nibbles), _KERNEL_FIX, ("triton#5197",)),
    _kernel("kernel-router-twice", "the router weight is applied twice to the output", KernelChange(router=torch.square),
            "apply the router weight once: in the kernel or in finalize", ("vllm#22513",), "top-k above 1"),
    _kernel("kernel-router-on-input", "the router weight multiplies the expert's input, not its output", KernelChange(seen=_router_on_input),
            "apply_router_weight_on_input only for models that mean it (Llama 4)", ("llm-compressor#1907",), "top-1 routing, router weights other than 1"),
    _kernel("kernel-router-ignored", "the router weight is not applied", KernelChange(router=torch.ones_like), _KERNEL_FIX),
    _kernel("kernel-fc1-bias-ignored", "the w13 bias is passed but not added", _without_bias("gate_bias", "up_bias"), _KERNEL_FIX, ("ATOM#2292",)),
    _kernel("kernel-fc2-bias-ignored", "the w2 bias is passed but not added", _without_bias("down_bias"), _KERNEL_FIX, ("ATOM#2292",)),
    _kernel("kernel-bias-on-every-rank", "the w2 bias is added on this tensor-parallel rank too, not on rank 0 only",
            KernelChange(parallel=lambda p: Parallel(p.tp_size, 0, p.ep_size, p.ep_rank)), "add the w2 bias on tp_rank 0 only"),
    _kernel("kernel-ep-rank-ignored", "experts are numbered from 0, not from ep_rank * local experts",
            KernelChange(parallel=lambda p: Parallel(p.tp_size, p.tp_rank, p.ep_size, 0)), "pass ep_rank to the kernel", ("vllm-gaudi#1796",)),
)
