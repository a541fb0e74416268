"""Checks for the exercises of notebook 05: a call that nobody has seen yet, and what to tell the maintainers of an engine."""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from . import recorded
from .calls import load
from .checkpoints import open_checkpoint
from .contracts import CONTRACTS, Contract, contract
from .exercises import EXERCISES, Answer, check
from .faults import FAULTS, Situation
from .recipes import recipe
from .views.own import Own, open_dump

_CALL = "c01"
_BF16, _MXFP8 = "mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16", "mxfp4/FLASHINFER_CUTLASS_MXFP4_MXFP8"


@functools.cache
def _situation(path: str) -> Situation:
    """A right call of that path: the layer and the tokens of the recorded call c01."""
    r = recorded.call(_CALL)
    given, layer = load(r.path).arguments, open_checkpoint(r.checkpoint_path).layer()
    return Situation.right(recipe("vllm", path, layer.kind), layer.layer, given["input"], given["token_selected_experts"],
                           given["token_final_scales"])


# -- an unknown call --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Passed:
    """What was passed to a function: names and values; tensors print as dtype and shape."""

    function: str
    arguments: dict[str, Any]

    def __str__(self) -> str:
        width = max(map(len, self.arguments))
        return "\n".join([f"{self.function}(", *(f"  {name:<{width}}  {_brief(value)}" for name, value in self.arguments.items()), ")"])

    __repr__ = __str__


def _brief(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return "; ".join(map(_brief, value)) if isinstance(value, (list, tuple)) else str(value)


@functools.cache
def unknown_call() -> Passed:
    """A call of which nothing is known but its function and its arguments. It was made here, nobody recorded it."""
    c = contract(_MXFP8)
    arguments = _situation(_MXFP8).arguments()
    tokens, columns = arguments["input"].shape[0], arguments["input"].shape[1] // 32
    arguments["input_sf"] = c.operand("x_scale").layout.unpack(arguments["input_sf"].flatten(), tokens, columns).reshape(tokens, columns)
    return Passed(c.function, {k: v for k, v in arguments.items() if v is not False and not k.startswith(("tp_", "ep_", "swiglu_"))})


def _unknown(path: Any = None, operand: Any = None) -> Answer:
    if _open(path) or _open(operand):
        return Answer(None, "give a path and an operand.\nThe path: which contracts have this function, and which of them these flags and "
                            "this dtype of the activations? The operand: go through the contract line by line and work out each shape. "
                            "There are 6 tokens; H is 384, I is 256, E is 4.")
    if not isinstance(path, str) or path not in CONTRACTS:
        return Answer(False, f"there is no path {path!r}; there are {', '.join(CONTRACTS)}.")
    call, c = unknown_call(), contract(path)
    if path != _MXFP8:
        return Answer(False, f"not that path: {_differs(call, c)}.")
    found = next((o for o in (*c.operands, *c.inputs) if operand in (o.key, o.argument, o.title)), None)
    if found is None:
        return Answer(False, f"there is no operand {operand!r}; there are {', '.join(o.key for o in (*c.operands, *c.inputs))}.")
    t, layout, want = found.get(call.arguments), found.layout, c.operand("x_scale")
    if found is want:
        size = _situation(_MXFP8).arguments()["input_sf"].numel()
        return Answer(True, f"{t.numel()} bytes were passed. The layout {layout.name} fills tiles of {layout.tile[0]} rows, so for 6 "
                            f"tokens the kernel reads {size}: it takes scales from beyond the end of the buffer.\nNo weight is wrong. "
                            "Either the engine swizzles these scales, or it says swizzled_input_sf=False. Notebook 04 is about this fault: "
                            f"{', '.join(FAULTS['x-scales-linear'].reports)}.")
    if t is None:
        return Answer(False, f"{found.title} was not passed, and need not be.")
    return Answer(False, f"{found.title}: {_brief(t)} is what the contract wants ({found.shape}), and its bytes are the recipe's.\n"
                         "Look for a tensor with fewer bytes than its layout fills. A layout pads rows and columns to whole tiles.")


def _differs(call: Passed, c: Contract) -> str:
    """Why a call is not one of this contract's, in words that do not name the right one."""
    if call.function not in (c.function, *c.aliases):
        return f"its kernel is {c.function}, and this is a call of {call.function}"
    flags = [f"{k}={v}" for k, v in c.flags.items() if v is True and call.arguments.get(k) is not True]
    if flags:
        return f"its kernel is called with {', '.join(flags)}, and this call was not"
    scales = len([o for o in (*c.operands, *c.inputs) if o.argument.startswith("quant_scales")])
    return f"its kernel takes {scales} quant_scales, and here are {len(call.arguments['quant_scales'])}"


# -- what to tell the maintainers ---------------------------------------------------------------------------------------

CHECKS = {
    "reads": "the server's answers read well again",
    "finite": "no NaN and no inf in the layer's output",
    "shape": "the operand has the dtype and the shape that the contract states",
    "cosine": "the cosine of the output and the checkpoint's own is above 0.98",
    "bytes": "the operand equals what the recipe makes of the checkpoint, byte for byte",
}
_OPERAND, _STAGE, _PROOF = "w13_bias", "rows", "bytes"


@functools.cache
def made_call() -> Own:
    """A wrong call, written as FlashInfer would and read back. Its output is emulated, nobody recorded it."""
    s = FAULTS["rows-gate-up"].injected(_situation(_BF16), (_OPERAND,))
    arguments, output = s.build()
    base = load(recorded.call(_CALL).path)
    folder = tempfile.mkdtemp(prefix="mxdebug_exercise_")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    replace(base, arguments={**base.arguments, **arguments}, outputs=(output.bfloat16(),)).save(folder)
    return open_dump(folder, recorded.call(_CALL).checkpoint_path).calls[0]


def _maintainers(operand: Any = None, stage: Any = None, proof: Any = None) -> Answer:
    if _open(operand) or _open(stage) or _open(proof):
        return Answer(None, "give an operand, a stage and a check.\nThe line 'where' of the finding names the operand, its title the order "
                            "that was found. The lines of the plan are the stages, in their order. For the check: which one would this "
                            "wrong call not pass?")
    own = made_call()
    forms, d = own.plan.forms, own.diagnosis
    if not isinstance(operand, str) or operand not in forms:
        return Answer(False, f"there is no operand {operand!r} in this recipe; there are {', '.join(forms)}.")
    if operand != _OPERAND:
        return Answer(False, f"{operand} has the bytes that the recipe makes, all of its stages were done.\nRead the line 'where' again.")
    stages = [s.name for s in forms[operand].stages]
    word = stage.strip().lower() if isinstance(stage, str) else ""
    named = [name for name in stages if word and name.lower().startswith(word)]
    if not named:
        return Answer(False, f"{operand} has no stage {stage!r}; it has: {'; '.join(stages)}.")
    if not named[0].startswith(_STAGE):
        return Answer(False, f"the bias that was passed is {own.call.arguments['fc1_expert_biases'].dtype}: '{named[0]}' was done.\n"
                             "The finding's title says what was found, and what the kernel reads.")
    if proof not in CHECKS:
        return Answer(False, f"there is no check {proof!r}; there are {', '.join(CHECKS)}.")
    if proof == _PROOF:
        return Answer(True, "payload and block scales were brought into the order [w3; w1], the bias only into [w1; w3]. The output is off "
                            f"by relative L2 {d.truth.relative_l2:.3f}, with a cosine of {d.truth.cosine:.3f}.\nEqual bytes prove the fix, "
                            "in a test of the converter alone: no GPU, no prompt, no tolerance (mxdebug.audit.assert_keeps_contract).")
    t = own.call.arguments["fc1_expert_biases"]
    meaning = {
        "reads": f"the output of this layer is off by {d.truth.relative_l2:.0%} of its length. Whether a text shows that depends on the "
                 "prompt; one that reads well says nothing about the next.",
        "finite": "the wrong call has neither: it passes this check as it is.",
        "shape": f"the wrong operand is {_brief(t)}, as the contract states: it passes this check as it is.",
        "cosine": f"the wrong call has {d.truth.cosine:.3f}: it passes this check as it is.",
    }[proof]
    return Answer(False, f"operand and stage are right. The check '{CHECKS[proof]}' proves no fix: {meaning}")


def _open(answer: Any) -> bool:
    return answer is None or answer is ...


OWN_EXERCISES: dict[str, Callable[..., Answer]] = {"own-unknown": _unknown, "own-maintainers": _maintainers}
EXERCISES.update(OWN_EXERCISES)

__all__ = ["CHECKS", "OWN_EXERCISES", "check", "made_call", "unknown_call"]
