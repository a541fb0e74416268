"""Exercises of notebook 06: data that can show a fault, a criterion that tells right from wrong, and the fault that survives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from . import recorded
from .calls import load
from .checkpoints import open_checkpoint
from .diagnosis.outputs import follows
from .errors import MxdebugError
from .exercises import EXERCISES, Answer, check
from .faults import FAULTS, Situation
from .layouts import INTERLEAVED, SM90_SCALE_FOLD, SWIZZLE_8x4, SWIZZLE_128x4, TRANSPOSED, V_CACHE_4x4
from .metrics import compare
from .recipes import recipe


def _open(answer: Any) -> bool:
    return answer is None or answer is ...


# -- block scales that can show where they stand ------------------------------------------------------------------------

SCALE_SHAPES = ((512, 12), (128, 4), (256, 20))  # w13 of the shipped layer, the smallest that the fold takes twice, another one
WIDEST = 24  # a float32 sum has 24 bits: next to a block that much larger, one counts for nothing


def _swapped(scales: Tensor) -> Tensor:
    return scales.roll(scales.shape[0] // 2, 0)


# What can happen to block scales [rows, columns] that should be folded for SM90: the bytes that the kernel gets instead.
MISTAKES: dict[str, Callable[[Tensor], Tensor]] = {
    "not folded": lambda s: s,
    "folded twice": lambda s: SM90_SCALE_FOLD.pack(SM90_SCALE_FOLD.pack(s).reshape(s.shape)),
    "folded the wrong way round": lambda s: SM90_SCALE_FOLD.unpack(s, *s.shape),
    "transposed": TRANSPOSED.pack,
    "swizzled 128x4": SWIZZLE_128x4.pack,
    "swizzled 8x4": SWIZZLE_8x4.pack,
    "in the V-cache order": V_CACHE_4x4.pack,
    "halves not swapped": lambda s: SM90_SCALE_FOLD.pack(_swapped(s)),
    "rows still g0,u0,g1,u1": lambda s: SM90_SCALE_FOLD.pack(s[INTERLEAVED.indices(len(s) // 2)]),
}


def _shown(scales: Tensor) -> dict[str, float]:
    """Mistake -> how many of the bytes that it moves are other bytes then, as a share."""
    number, out = torch.arange(scales.numel()).reshape(scales.shape), {}
    marks = [(number % 256).to(torch.uint8), (number // 256).to(torch.uint8)]  # layouts take bytes: two say which place it was

    def differs(mistake: Callable[[Tensor], Tensor], t: Tensor) -> Tensor:
        return mistake(t).flatten() != SM90_SCALE_FOLD.pack(t).flatten()

    for name, mistake in MISTAKES.items():
        moved = differs(mistake, marks[0]) | differs(mistake, marks[1])
        out[name] = float(differs(mistake, scales)[moved].double().mean()) if bool(moved.any()) else 1.0  # here it is no mistake
    return out


def _scales(answer: Any = None) -> Answer:
    if _open(answer):
        return Answer(None, "give a function of rows and columns.")
    worst: dict[str, float] = {}
    for rows, columns in SCALE_SHAPES:
        try:
            got = answer(rows, columns)
        except Exception as error:  # whatever a learner's code raises is an answer
            return Answer(False, f"for {rows} x {columns} the function raised {type(error).__name__}: {error}")
        if _open(got):
            return Answer(None, "the function returns nothing yet.\nReturn a uint8 tensor [rows, columns]; byte b is the scale "
                          f"2^(b - 127). Each of these must change at least half of the bytes that it moves: {', '.join(MISTAKES)}.")
        if not isinstance(got, Tensor) or got.dtype != torch.uint8:
            found = str(got.dtype) if isinstance(got, Tensor) else type(got).__name__
            return Answer(False, f"a block scale of MXFP4 is a uint8 byte, this is {found}.")
        if got.shape != (rows, columns):
            return Answer(False, f"for {rows} rows and {columns} columns the function gave the shape {list(got.shape)}.")
        special = int(((got == 0) | (got == 255)).sum())
        if special:
            return Answer(False, f"{special} of {got.numel()} bytes are 0x00 or 0xFF, which this kernel reads as 0 and as inf.\n"
                          "A test with an output full of NaN and zeros sees those, and little else.")
        wide = int((got.amax(1).int() - got.amin(1).int()).max())
        if wide > WIDEST:
            return Answer(False, f"in one row the largest scale is 2^{wide} times the smallest. A float32 sum has 24 bits: next to that "
                          "block the smallest is rounded away, and a test does not see what stands in it.")
        for name, share in _shown(got).items():
            worst[name] = min(worst.get(name, 1.0), share)
    hidden = [name for name, share in worst.items() if share == 0]
    weak = [f"{name} ({share:.0%})" for name, share in worst.items() if 0 < share < 0.5]
    if hidden:
        return Answer(False, f"with these scales nobody can see: {', '.join(hidden)}. Every byte is right all the same.\n"
                      "Two places that a mistake exchanges must hold different bytes. Do yours differ along both axes, at every distance?")
    if weak:
        return Answer(False, "every mistake changes some byte, but these change too few of those that they move: " + ", ".join(weak)
                      + ".\nThe output moves as little. More different values, in no regular order, show more.")
    least = min(worst, key=lambda name: worst[name])
    return Answer(True, f"each of the {len(MISTAKES)} mistakes changes most of the bytes that it moves, in {len(SCALE_SHAPES)} sizes; "
                  f"least seen is '{least}', {worst[least]:.0%}.")


# -- a criterion ------------------------------------------------------------------------------------------------------

K = 384  # of the recorded call c01, and of the notebook's fourth test


@dataclass(frozen=True, eq=False)
class Pair:
    """got and want, bfloat16 [T, H]; right: whether a test must pass; what: where got comes from."""

    what: str
    got: Tensor
    want: Tensor
    right: bool


@functools.cache
def pairs() -> tuple[Pair, ...]:
    """What the H200 wrote in c01 and what it would have written otherwise: right outputs first, then wrong ones."""
    r = recorded.call("c01")
    call, layer = load(r.path), open_checkpoint(r.checkpoint_path).layer()
    s = Situation.right(recipe("vllm", "mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16", layer.kind), layer.layer,
                        *(call.arguments[k] for k in ("input", "token_selected_experts", "token_final_scales")))
    want = call.outputs[0]
    wrong = {id: FAULTS[id].injected(s).build()[1] for id in ("scales-linear", "rows-gate-up", "swiglu-alpha-lost", "bias-missing")}
    flipped = want.clone()
    flipped.view(torch.int16)[[1, 4], [100, 200]] += 1  # two of 2304: one bf16 step
    lost = want.clone()
    lost[2, 5] = float("nan")
    many = want.repeat(340, 1)  # 2040 tokens
    one = many.clone()
    one[777] = (one[777].float() * 1.02).bfloat16()
    small, large = 2.0**-12, 2.0**10  # exact in bf16
    return (
        Pair("the emulation of the right call", s.build()[1], want, True),
        Pair("two numbers of 2304 rounded to the neighbouring bf16 number", flipped, want, True),
        Pair(f"the same, all outputs 2^{-12} times as large", flipped * small, want * small, True),
        Pair(f"the same, all outputs 2^{10} times as large", flipped * large, want * large, True),
        Pair("a number that is NaN in both", lost, lost.clone(), True),
        Pair("a NaN where none belongs", lost, want, False),
        Pair("zeros", torch.zeros_like(want), want, False),
        Pair("every sign wrong", -want, want, False),
        Pair("1.5 times too large", (want.float() * 1.5).bfloat16(), want, False),
        Pair("1 % too large", (want.float() * 1.01).bfloat16(), want, False),
        Pair("columns in the reverse order", want.flip(1), want, False),
        Pair("fault rows-gate-up", wrong["rows-gate-up"], want, False),
        Pair("fault bias-missing", wrong["bias-missing"], want, False),
        Pair("fault swiglu-alpha-lost", wrong["swiglu-alpha-lost"], want, False),
        Pair(f"fault scales-linear, all outputs 2^{-12} times as large", wrong["scales-linear"] * small, want * small, False),
        Pair("one of 2040 tokens is 2 % too large", one, many, False),
    )


def _criterion(answer: Any = None) -> Answer:
    if _open(answer):
        return Answer(None, "give a function of got, want and k.")
    passed, alarms = [], []
    for p in pairs():
        try:
            found = answer(p.got.clone(), p.want.clone(), K)
        except Exception as error:  # whatever a learner's code raises is an answer
            return Answer(False, f"for '{p.what}' the function raised {type(error).__name__}: {error}\n"
                          "Return True or False; got and want are bfloat16 [tokens, hidden].")
        if _open(found):
            return Answer(None, "the function returns nothing yet.\nReturn True where got is what a right kernel may write. Ask in "
                          "this order: do NaN and inf stand in the same places? How far is it, for each token, in relation to "
                          "that token's length? "
                          "mxdebug.diagnosis.floor.rounding_floor(k) says how far rounding alone goes; and in bfloat16 a token's largest number may "
                          "land one step away, which is 2^-7 of it at most.")
        if isinstance(found, Tensor) and found.numel() == 1:
            found = found.item()
        if not isinstance(found, bool) and type(found).__name__ != "bool_":
            return Answer(False, f"the function returned {type(found).__name__} for '{p.what}'; True or False is wanted.")
        if bool(found) and not p.right:
            passed.append(p)
        if not found and p.right:
            alarms.append(p)
    wrong, right = sum(not p.right for p in pairs()), sum(p.right for p in pairs())
    if not passed and not alarms:
        return Answer(True, f"passes all {right} right outputs and none of {wrong} wrong ones: no false alarm, nothing overlooked.")
    lines = [f"{len(passed)} of {wrong} wrong outputs pass, {len(alarms)} of {right} right ones fail."]
    lines += [f"passes: {p.what} ({_numbers(p)})" for p in passed[:3]]
    lines += [f"fails, though it is right: {p.what} ({_numbers(p)})" for p in alarms[:3]]
    return Answer(False, "\n".join(lines))


def _numbers(p: Pair) -> str:
    c = compare(p.got, p.want)
    masks = "" if c.masks_equal else "NaN or inf in other places, elsewhere "
    cosine = f"{c.cosine:.4f}" if c.norm_ratio else "none"  # zeros have no direction
    return f"{masks}relative L2 {c.relative_l2:.4f}, of the worst token {_worst(p):.4f}, cosine {cosine}, norm ratio {c.norm_ratio:.4f}"


def _worst(p: Pair) -> float:
    """The largest relative L2 of a token."""
    return max(compare(a, b).relative_l2 for a, b in zip(p.got, p.want))


# -- the fault that survives --------------------------------------------------------------------------------------------

SURVIVOR = "kernel-fc2-bias-ignored"


def _survivor(answer: Any = None) -> Answer:
    if _open(answer):
        return Answer(None, f"give a call, made with `call` and `made`.\nThe fault is {SURVIVOR}: {FAULTS[SURVIVOR].title}. "
                      "When would its output be the right one, bit for bit? Make a call of which that is not true.")
    if not isinstance(answer, Situation):
        return Answer(False, f"a call as `call(made(...))` makes it is wanted, this is {type(answer).__name__}.")
    s = answer
    try:
        right = Situation.right(s.recipe, s.layer, s.x, s.experts, s.router, s.parallel).build()[1]
        given, broken = s.build()[1], FAULTS[SURVIVOR].injected(s).build()[1]
    except MxdebugError as error:
        return Answer(False, f"this call cannot be made: {error}")
    if given is None or not compare(given, right).bit_identical:
        return Answer(False, "this call is wrong already, without the fault. Start from a right one.")
    if broken is None:
        return Answer(False, "the kernel refuses this call.")
    c, k = compare(broken, right), max(K, s.layer.hidden, s.layer.intermediate)
    if c.bit_identical:
        if s.layer.down_bias is None:
            why = "its layer has no biases, so none can be forgotten."
        elif s.parallel.tp_rank:
            p = s.parallel
            why = f"tensor-parallel rank {p.tp_rank} of {p.tp_size} must not add the down bias anyway: only one rank adds it."
        elif not bool(s.layer.down_bias.any()):
            why = "its down bias is all zeros."
        else:
            why = "no token selects an expert of this rank, or the bias is too small to move a bf16 number."
        return Answer(False, f"with this call the fault stays invisible, bit for bit: {why}")
    if follows(broken, right, k):
        return Answer(False, f"{c.differing} of {c.elements} numbers differ, by a relative L2 of {c.relative_l2:.5f}: no more than "
                      "rounding may do. The bias must be larger, next to the products, so that its loss is beyond the floor.")
    return Answer(True, f"the fault moves the output by a relative L2 of {c.relative_l2:.3f}, and `follows` says no. With this call "
                  "among its own, the fourth test notices this fault, too.")


TESTS_EXERCISES: dict[str, Callable[..., Answer]] = {"tests-scales": _scales, "tests-criterion": _criterion, "tests-survivor": _survivor}
EXERCISES.update(TESTS_EXERCISES)

__all__ = ["MISTAKES", "TESTS_EXERCISES", "Pair", "check", "pairs"]
