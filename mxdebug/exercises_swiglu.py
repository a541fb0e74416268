"""Exercises of notebook 02: one value by hand, the rule of vLLM #48929, and the setting behind an output."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from . import recorded
from .calls import load
from .checkpoints import open_checkpoint
from .contracts import Seen, find
from .exercises import EXERCISES, Answer, check
from .metrics import compare
from .reference import CLAMPS, Activation

# -- one value by hand ------------------------------------------------------------------------------------------------

GATE, UP = 10.0, -9.0
_M3 = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}


def _output(clamp: str = CLAMPS[0], **given: float) -> float:
    act = Activation("swiglu", **{n: torch.tensor([v], dtype=torch.float64) for n, v in given.items()}, clamp=clamp)
    return act(torch.tensor([GATE], dtype=torch.float64), torch.tensor([UP], dtype=torch.float64), 0).item()


def _mistakes() -> dict[str, float]:
    """What a wrong answer would mean -> its value. Beta lost and beta added too early give one value, where up is beyond the limit."""
    without = {n: {k: v for k, v in _M3.items() if k != n} for n in _M3}
    return {
        "that is the output without any limit: the kernel got no swiglu_limit": _output(**without["limit"]),
        "that is the output without beta: the kernel got none and uses 0, or beta was added before the clamp, which swallows it": _output(
            **without["beta"]
        ),
        "that is plain SiLU: none of the three arrived, as in call c05": _output(),
        "gate is capped, up is not: up is clamped on both sides, so -9 becomes -7": 7.0 * (UP + 1.0),
        "up is clamped, gate is not: gate is capped at 7": GATE * (-7.0 + 1.0),
        "the limit was applied to the product; it belongs to gate and up, before the activation": _output(CLAMPS[-1], **_M3),
        "gate and up are exchanged": _exchanged(),
        "the sign is lost: up is negative here, and stays so": 42.0,
    }


def _exchanged() -> float:
    act = Activation("swiglu", **{n: torch.tensor([v], dtype=torch.float64) for n, v in _M3.items()})
    return act(torch.tensor([UP], dtype=torch.float64), torch.tensor([GATE], dtype=torch.float64), 0).item()


def _value(answer: Any = None) -> Answer:
    if answer is None or answer is ...:
        return Answer(
            None,
            "replace None by a number.\nFirst the clamp, on each of the two by its own rule; then beta; then the product. "
            "sigmoid of 1.702 times anything above 5 is 1.000 to three digits.",
        )
    if isinstance(answer, bool) or not isinstance(answer, (int, float)) or not math.isfinite(answer):
        return Answer(False, f"the output is one finite number, this is {answer if isinstance(answer, float) else type(answer).__name__}.")
    want = _output(**_M3)
    if abs(answer - want) <= 0.05:
        return Answer(
            True,
            f"gate 10 becomes 7, up -9 becomes -7, and (-7 + 1) * 7 * sigmoid(1.702 * 7) = {want:.4f}.\n"
            f"With none of the three passed, the kernel would have computed {_output():.1f}.",
        )
    for meaning, value in _mistakes().items():
        if abs(answer - value) <= 0.05:
            return Answer(False, f"{meaning}.")
    return Answer(
        False, "no known mistake gives this value.\nWrite down gate after the clamp, up after the clamp, up plus beta; then multiply."
    )


# -- the rule of #48929 -----------------------------------------------------------------------------------------------

_CASES: tuple[tuple[dict[str, float], dict[str, float], float | None, str], ...] = (
    ({"gemm1_beta": 0.5}, {"swiglu_beta": 1.0}, 0.5, "Both state beta, and the quantisation config comes first"),
    ({}, {"swiglu_beta": 1.0}, 1.0, "Only the model config states beta, and it must arrive: that it did not is #48929"),
    (
        {},
        {},
        None,
        "Nobody states beta, so nothing is passed. A number here is one that the model never asked for: this is how DeepSeek-V4 "
        "got the constants of gpt-oss",
    ),
    (
        {"gemm1_beta": 0.0},
        {"swiglu_beta": 1.0},
        0.0,
        "The quantisation config states 0, which is a value. `or` takes it for none: ask `is None`",
    ),
    (
        {"gemm1_beta": None},
        {"swiglu_beta": 1.0},
        1.0,
        "The key is there and holds None. That states nothing, so the model config must be asked",
    ),
)


def _resolve(answer: Any = None) -> Answer:
    if answer is None or answer is ...:
        return Answer(None, "give a function.")
    results = []
    for quantisation, model, _, _ in _CASES:
        try:
            results.append(answer(dict(quantisation), dict(model)))
        except Exception as error:  # whatever a learner's code raises is an answer
            return Answer(
                False,
                f"beta({quantisation}, {model}) raised {type(error).__name__}: {error}.\nA config that lacks a key is ordinary: "
                "ask the other config then, and return None where neither knows.",
            )
    if all(r is None or r is ... for r in results):
        return Answer(
            None,
            "the function returns nothing yet.\nTwo places to look, in the order of #48929: "
            "the quantisation config, then the model config.",
        )
    for (quantisation, model, want, meaning), got in zip(_CASES, results):
        if got is not None and (isinstance(got, bool) or not isinstance(got, (int, float))):
            return Answer(False, f"beta({quantisation}, {model}) gave {type(got).__name__}, it must give a number, or None.")
        if got != want:
            return Answer(False, f"beta({quantisation}, {model}) gave {got!r}, it must give {want!r}.\n{meaning}.")
    return Answer(
        True,
        f"all {len(_CASES)} cases, and the value 0 among them.\nThe fix put this rule into FlashInfer's CUTLASS adapter and into Marlin's, "
        "one by one: every adapter that lacks it loses the parameters by itself.",
    )


# -- the setting behind an output -------------------------------------------------------------------------------------

_UNKNOWN = {"alpha": 1.702, "beta": 0.0, "limit": 10.0}


@functools.cache
def _call() -> tuple[Seen, Activation]:
    r = recorded.call("c02")
    call = load(r.path)
    return find(call.function, call.arguments).see(call.arguments), open_checkpoint(r.checkpoint_path).layer().layer.activation


def _emulate(activation: Activation) -> Tensor:
    seen, _ = _call()
    return replace(seen, layer=replace(seen.layer, activation=activation)).emulate()


@functools.cache
def _unknown() -> Tensor:
    return _emulate(_setting(_UNKNOWN, CLAMPS[0]))


def unknown_output() -> Tensor:
    """What the kernel would write for the operands of call c02 with other parameters: bfloat16 [6, 384], emulated, nobody recorded it."""
    return _unknown().clone()


def _setting(given: dict[str, float], clamp: str) -> Activation:
    return Activation(
        "swiglu", **{n: torch.full((_call()[0].layer.experts,), v) for n, v in given.items() if not math.isinf(v)}, clamp=clamp
    )


def _unknown_setting(alpha: Any = None, beta: Any = None, limit: Any = None, clamp: Any = CLAMPS[0]) -> Answer:
    values = dict(zip(_UNKNOWN, (alpha, beta, limit)))
    if any(v is None or v is ... for v in values.values()):
        return Answer(
            None,
            "give alpha, beta and limit.\nMove one slider at a time, and read the line about the recording. "
            "The parameter that matters most "
            "comes first; when all are right, every number has its bits.",
        )
    for name, v in values.items():
        if isinstance(v, bool) or not isinstance(v, (int, float)) or math.isnan(v):
            return Answer(False, f"{name} is a number (math.inf for no limit), this is {v if isinstance(v, float) else type(v).__name__}.")
    if values["limit"] <= 0:
        return Answer(False, f"a limit of {limit:g} leaves nothing of up.")
    if clamp not in CLAMPS:
        return Answer(False, f"there is no clamp {clamp!r}; there are: {'; '.join(CLAMPS)}.")
    want = _unknown()
    c = compare(_emulate(_setting(values, clamp)), want)
    if c.bit_identical:
        return Answer(
            True,
            f"all {c.elements} numbers, bit for bit. config.json states beta 1 and limit 7: "
            "beta did not arrive (0 is what the kernel then uses), "
            "and the limit is another model's.\nOne thing this output cannot tell: "
            "whether gate is capped below, too. sigmoid is so small there "
            "that both give these bits.",
        )
    closer = [
        n for n in _UNKNOWN if compare(_emulate(_setting({**values, n: _UNKNOWN[n]}, clamp)), want).relative_l2 < c.relative_l2 * 0.98
    ]
    hint = (
        f"The largest gain is in {_best(values, clamp, closer, want)}."
        if closer
        else "The numbers are right, or nearly: look at where it clamps."
    )
    return Answer(
        False,
        f"the kernel would have written something else with these: {c.differing} of {c.elements} numbers differ, "
        f"relative L2 {c.relative_l2:.3f}, "
        f"norm ratio {c.norm_ratio:.3f}.\n{hint}",
    )


def _best(values: dict[str, float], clamp: str, names: list[str], want: Tensor) -> str:
    return min(names, key=lambda n: compare(_emulate(_setting({**values, n: _UNKNOWN[n]}, clamp)), want).relative_l2)


SWIGLU_EXERCISES: dict[str, Callable[..., Answer]] = {
    "swiglu-value": _value,
    "swiglu-resolve": _resolve,
    "swiglu-unknown": _unknown_setting,
}
EXERCISES.update(SWIGLU_EXERCISES)

__all__ = ["SWIGLU_EXERCISES", "check", "unknown_output"]
