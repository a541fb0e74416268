"""Does an experts class run here, and if not, which of its methods says so?"""

from __future__ import annotations

from collections.abc import Iterator

from ...errors import MxdebugError
from .experts import ANY, PARALLEL, Experts
from .rules import Rules
from .setups import ROUTINGS, Setup


def refusals(e: Experts, s: Setup, key: str | None, rules: Rules) -> Iterator[tuple[str, str]]:
    """All that an experts class does not support, as (method, words), in the order in which `is_supported_config` asks."""
    if e.before and (words := e.before(s, key)):
        yield "is_supported_config", words
    if s.sm not in e.sm:
        yield "_supports_current_device", f"SM{s.sm} (it runs on {', '.join(f'SM{n}' for n in sorted(e.sm))})"
    if e.needs and e.needs not in s.installed:
        yield "_supports_current_device", f"an installation without {e.needs}"
    if s.activation.endswith("_no_mul") and not e.non_gated:
        yield "_supports_no_act_and_mul", "a layer without gate"
    if s.activation not in e.activations:
        yield "_supports_activation", f"the activation {s.activation}"
    if s.sm not in e.schemes.get((s.quantisation, key), e.schemes.get((s.quantisation, ANY), frozenset())):
        yield "_supports_quant_scheme", f"{s.quantisation} weights with {key or 'BF16'} activations on SM{s.sm}"
    for name in e.refuses:
        if PARALLEL[name](s):
            yield "_supports_parallel_config", name
    if e.routing is not None and rules.asks_router and s.hash_routing:
        yield "_supports_hash_routing", "hash routing"
    if e.routing is not None and rules.asks_router and s.routes_adjusted:
        yield "is_supported_config", "routes adjusted after routing"
    if e.routing is not None and s.routing is not None and s.routing not in e.routing:
        yield "_supports_routing_method", f"the routing method {s.routing}"
    if e.logits is not None and s.dtype not in e.logits:
        yield "_supports_router_logits_dtype", f"router logits in {s.dtype}"
    if s.batched != e.batched:
        yield "activation_format", "the batched format" if s.batched else "the standard format (it takes the batched one)"
    if s.batch_invariant and not e.batch_invariant:
        yield "_supports_batch_invariance", "batch invariance"
    if s.lora and not e.lora:
        yield "supports_lora", "LoRA"
    preferred = "grouped_contiguous" if s.use_ep and rules.humming_by_ep else "indexed"
    if e.gemm is not None and e.gemm != preferred:
        yield "is_supported_config", f"{preferred} GEMM, which Humming prefers here (it is {e.gemm})"
    if e.after and (words := e.after(s, key)):
        yield "is_supported_config", words


def judge(classes: tuple[str, ...], s: Setup, key: str | None, rules: Rules) -> tuple[tuple[str, ...], str, str]:
    """A backend's classes in order: (classes that run, none where all refuse; the words; the source of the words)."""
    by_routing: tuple[str, ...] = ()
    words, source = [], ""
    for name in classes:
        e = rules.experts[name]
        if (refusal := next(refusals(e, s, key, rules), None)) is None:
            if e.routing is not None and s.routing is None:
                by_routing += (name,)
                continue
            return (*by_routing, name), "supports this setup", f"{name}.is_supported_config, fused_moe/{e.file}"
        source = f"{name}.{refusal[0]}, fused_moe/{e.file}"
        words.append(f"does not support {refusal[1]}")
    if by_routing:
        raise MxdebugError("Setup.routing", f"one of {', '.join(ROUTINGS)}", "None", f"only {by_routing[0]} is left, and it asks")
    distinct = list(dict.fromkeys(words))
    return (), distinct[0] if len(distinct) == 1 else "; ".join(f"{n} {w}" for n, w in zip(classes, words)), source
