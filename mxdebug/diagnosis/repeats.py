"""Evidence from two calls: the same inputs must give the same output, and a token's output must not depend on the other tokens.

FlashInfer's fused finalise adds experts by atomics, so that float32 sums come in another order every time: that is no fault. What it can do is
bounded: a sum of k products in another order is off by k * 2^-24 of the sum of their magnitudes, and the bf16 result then by one step at most.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..calls import Call
from ..contracts import Contract, find
from ..errors import MxdebugError
from ..faults import FAULTS
from ..layouts import match_rows, row_hashes
from ..metrics import Comparison, compare
from .finding import PROVED, RIGHT, WRONG, Diagnosis, Finding
from .given import Given
from .floor import follows
from .region import wrong_region

_OUTPUTS = ("output", "moe_output", "out")  # memory that a call writes into is no input
_TOKENS = ("x", "x_scale", "experts", "router")
_HINTS = ("tune_max_num_tokens",)  # of the autotuner; it grows with the batch and changes no number


@dataclass(frozen=True)
class _Pair:
    """Outputs of tokens that both calls have; same: every argument is equal; tokens: their numbers in both calls."""

    first: Tensor
    second: Tensor
    same: bool
    tokens: tuple[Tensor, Tensor]


def compare_calls(first: Call, second: Call) -> Diagnosis:
    """Say whether two recorded calls of one kernel on the same weights contradict each other. No checkpoint is needed.

    Three faults show so: the same call gives another output (output-varies), a token's output changes with the tokens beside it
    (output-depends-on-batch), another call gives the output of the first (output-stale). Sums in another order are told apart by their size.
    Raises MxdebugError for calls of two kernels, without outputs, on other weights, or without a token in common.
    """
    contract, other = (find(c.function, c.arguments) for c in (first, second))
    if contract.path != other.path:
        raise MxdebugError("two calls", f"of one kernel ({contract.path})", other.path)
    if not first.outputs or not second.outputs:
        raise MxdebugError("two calls", "with recorded outputs", "one without", first.lost or second.lost or "a call that crashed, or inputs only (log level)")
    for o in contract.operands:
        a, b = o.get(first.arguments), o.get(second.arguments)
        if (a is None) != (b is None) or (a is not None and not same_bits(a, b)):
            raise MxdebugError(
                f"two calls' {o.title}", "the same tensor in both", "different ones", "calls of two layers: pick two of one layer (--calls A B)"
            )
    if other := _other_argument(contract, first, second):
        raise MxdebugError(
            f"two calls' {other}",
            "the same in both",
            "different",
            "another setting is another computation: pick two calls that differ in their tokens at most",
        )
    pair = _common(contract, first, second)
    k = Given.of(contract, first.arguments).k
    # One kernel twice: unlike an emulation it stores the same results at the same points. With other tokens another tile may run, which sums K in
    # another order, so that requantised activations can flip; with the same ones only the sum over experts varies.
    roundings = None if pair.same else replace(contract.roundings, activation=contract.roundings.activation or torch.bfloat16)
    facts = (
        (
            "calls",
            f"{first.function}, {first.sequence} and {second.sequence}: {len(first.outputs[0])} and {len(second.outputs[0])} tokens, {len(pair.first)} in common",
        ),
        ("path", contract.path),
    )
    distance = compare(pair.second, pair.first)
    stale = not pair.same and _stale(contract, first, second)
    if stale:
        return _wrong(
            "output-stale",
            "all tokens",
            "the second call's output is the first one's, bit for bit, though its tokens are others",
            facts,
        )
    if distance.bit_identical:
        what = "the same call gives the same bits" if pair.same else "the tokens that both have get the same bits"
        return Diagnosis(
            RIGHT,
            f"{what}: nothing varies between these two",
            (),
            facts,
            None,
            None,
            None,
            ("outputs bit by bit",),
            _open(pair),
        )
    if follows(pair.second, pair.first, k, roundings):
        return Diagnosis(
            RIGHT,
            f"the outputs differ by sums in another order only: {distance.differing} of {distance.elements} elements, by up to {distance.max_ulps} ulp",
            (),
            facts,
            None,
            None,
            None,
            (f"distance against the floor of rounding: {distance}",),
            _open(pair),
        )
    at = wrong_region(pair.second, pair.first, k, roundings)
    where = "all tokens" if at is None else at.text(pair.tokens[0])
    guilty = _which(contract, first, second, pair, k)
    id = "output-varies" if pair.same else "output-depends-on-batch"
    return _wrong(id, where, f"{distance}{guilty}", facts, distance)


def _wrong(id: str, where: str, evidence: str, facts: tuple[tuple[str, str], ...], distance: Comparison | None = None) -> Diagnosis:
    """distance: between the outputs; None where they are the same, and should not be."""
    effect = None if distance is None else distance.relative_l2 if distance.masks_equal else float("inf")
    finding = Finding(FAULTS[id], PROVED, where, evidence, effect=effect)
    return Diagnosis(
        WRONG,
        FAULTS[id].title,
        (finding,),
        facts,
        None,
        None,
        None,
        ("arguments of both calls byte by byte; outputs of the tokens that both have",),
        (),
    )


def _open(pair: _Pair) -> tuple[str, ...]:
    more = "two calls that agree may both be wrong: diagnose one of them against the checkpoint"
    return (more,) if pair.same else (more, f"only tokens that both calls have were compared: {len(pair.first)}")


def same_bits(a: Any, b: Any) -> bool:
    """Whether two arguments are equal, tensors bit by bit; NaN equals NaN."""
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(same_bits(x, y) for x, y in zip(a, b))
    return type(a) is type(b) and (a == b or a != a)


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.uint8) if t.dim() else t.reshape(1).contiguous().view(torch.uint8)


def _other_argument(contract: Contract, first: Call, second: Call) -> str | None:
    """The name of an argument that is neither of the tokens nor memory for the output, and differs; None where none does."""
    tokens = {o.argument.partition("[")[0] for o in contract.inputs if o.key in _TOKENS}
    names = [n for n in dict.fromkeys((*first.arguments, *second.arguments)) if n not in (*_OUTPUTS, *_HINTS, *tokens)]
    return next((n for n in names if not same_bits(first.arguments.get(n), second.arguments.get(n))), None)


def _common(contract: Contract, first: Call, second: Call) -> _Pair:
    inputs = [c.arguments for c in (first, second)]
    names = {n for a in inputs for n in a if n not in _OUTPUTS}
    same = all(same_bits(inputs[0].get(n), inputs[1].get(n)) for n in names)
    out = first.outputs[0], second.outputs[0]
    if same:
        everything = torch.arange(len(out[0]))
        return _Pair(*out, True, (everything, everything))
    keys = [_tokens(contract, a) for a in inputs]
    at = match_rows(keys[1], keys[0])
    mine = (at >= 0).nonzero().flatten()
    if not mine.numel():
        if out[0].shape == out[1].shape and torch.equal(out[0], out[1]):
            return _Pair(out[0][:0], out[1][:0], False, (mine, mine))
        raise MxdebugError(
            "two calls",
            "at least one token with the same activations, experts and router weights in both",
            "none",
            "other prompts; send the same prompt alone and together with others",
        )
    return _Pair(out[0][at[mine]], out[1][mine], False, (at[mine], mine))


def _tokens(contract: Contract, arguments: Mapping[str, Any]) -> Tensor:
    """int64 [T]: a key of each token's activations, experts and router weights."""
    seen = contract.see(arguments, experts=[0])
    parts: Sequence[Tensor] = (seen.x.float(), seen.experts.int(), seen.router.float())
    return row_hashes(torch.cat([_bits(p).reshape(len(p), -1) for p in parts], 1))


def _stale(contract: Contract, first: Call, second: Call) -> bool:
    a, b = first.outputs[0], second.outputs[0]
    if a.shape != b.shape or not torch.equal(a, b) or not a.any():
        return False
    return not torch.equal(_tokens(contract, first.arguments), _tokens(contract, second.arguments))


def _which(contract: Contract, first: Call, second: Call, pair: _Pair, k: int) -> str:
    """Which of the two outputs follows from what was passed, by the emulation of up to 16 common tokens."""
    chosen = torch.linspace(0, len(pair.first) - 1, min(16, len(pair.first))).long()
    verdicts = []
    for call, tokens, out in ((first, pair.tokens[0], pair.first), (second, pair.tokens[1], pair.second)):
        emulated = contract.see(call.arguments, tokens=tokens[chosen]).emulate()
        verdicts.append(follows(out[chosen], emulated, k, contract.roundings))
    names = [
        f"call {c.sequence}'s output {'follows' if v else 'does not follow'} from what was passed"
        for c, v in zip((first, second), verdicts)
    ]
    return f"; of {len(chosen)} tokens emulated, {' and '.join(names)}"
