"""Exercises of notebook 03: two units of one padding, the bytes of the block scales, and a run in which two things are wrong."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from . import recorded
from .checkpoints import CheckpointLinear, open_checkpoint
from .contracts.cutedsl_w4a16 import by_layout
from .diagnosis import Finding, diagnose_run
from .errors import MxdebugError
from .exercises import EXERCISES, Answer, check
from .faults import LINEAR_FAULTS, LinearRun, LinearSituation, linear_fault
from .faults.linear_situation import refusal
from .layouts import SWIZZLE_128x4
from .layouts.catalogue import cutedsl_sm100_view
from .metrics import compare
from .recipes.vllm import MODELOPT
from .recipes.w4a16.examples import made_linear
from .recipes.w4a16.padding import elements_of
from .recipes.w4a16.recipe import linear_recipe


@functools.cache
def _layer() -> tuple[CheckpointLinear, LinearSituation, Tensor]:
    """qkv_proj of the shipped checkpoint, the right situation on SM100 for six tokens, and its output [2, 3, 200]."""
    found = open_checkpoint(recorded.W4A16).linear("model.layers.0.self_attn.qkv_proj")
    x = torch.randn(2, 3, found.layer.k, generator=torch.Generator().manual_seed(3)).bfloat16()
    s = LinearSituation.right(linear_recipe(by_layout("sm100").path, found.kind), found.layer, x)
    return found, s, s.run().output


def _findings(run: LinearRun) -> tuple[Finding, ...]:
    return diagnose_run(run, _layer()[0], _layer()[1].recipe.contract).findings


def _open(answer: Any) -> bool:
    return answer is None or answer is ...


def _off(got: Tensor) -> str:
    if bad := int((~torch.isfinite(got)).sum()):
        return f"NaN or inf in {bad} of {got.numel()} numbers"
    c = compare(got.double(), _layer()[2].double())
    return f"relative L2 {c.relative_l2:.3f}, cosine {c.cosine:.3f}, norm ratio {c.norm_ratio:.3f}"


# -- two units of one padding -----------------------------------------------------------------------------------------

PADDING_K = 2896  # not the notebook's layer, whose numbers stand there


@functools.cache
def _wide() -> LinearSituation:
    """A right situation of a made layer with that K, on SM100."""
    layer = made_linear(64, PADDING_K)
    return LinearSituation.right(linear_recipe(by_layout("sm100").path, MODELOPT), layer, torch.zeros(1, PADDING_K))


def _refused(elements: int) -> str:
    s = _wide()
    x = torch.zeros(1, s.plan.k + elements, dtype=torch.bfloat16)
    return f"FlashInfer says then: {refusal(s.recipe, s.recipe.contract.arguments(s.plan.convert(s.layer), x))}"


def _padding(kept: Any = None, elements: Any = None) -> Answer:
    plan = _wide().plan
    k, want, wanted = plan.k, plan.weights_padding_bytes, elements_of(plan.weights_padding_bytes)
    if isinstance(kept, (tuple, list)) and len(kept) == 2 and elements is None:
        kept, elements = kept
    if _open(kept) or _open(elements):
        return Answer(None, "give two numbers: what weights_padding_cols holds, and by how many elements a row of activations is padded.\n"
                      f"K is {k}, the kernel wants a multiple of 64. weights_padding_cols counts columns of the tensor that is padded: what is its dtype?")
    for what, n in (("weights_padding_cols", kept), ("the padding of activations", elements)):
        if isinstance(n, bool) or not isinstance(n, int):
            return Answer(False, f"{what} is a whole number, this is {type(n).__name__}.")
        if not 0 <= n < k:
            return Answer(False, f"{what} is 0 or more, and less than K, which is {k}; this is {n}.")
    if (kept, elements) == (want, wanted):
        return Answer(True, f"a payload row gets {kept} bytes; a row of activations becomes {k} + 2 * {kept} = {plan.padded[1]} elements.\n"
                      "One padding in two units, and the name of the number says neither: here each has a type, PackedBytes and Elements.")
    lines = ["weights_padding_cols is right; the activations are not."]
    if kept == wanted:
        lines = [f"{kept} is what K lacks in elements, and not what weights_padding_cols holds. The original counts columns of the packed weight, and "
                 "doubles that number for activations: with this one the factor between them would be taken twice."]
    elif kept != want:
        multiple = "no multiple of 64, and the kernel refuses the weight" if (k + 2 * kept) % 64 else "a multiple of 64, not the next one"
        lines = [f"with weights_padding_cols {kept} the weight has {k // 2 + kept} bytes a row, so K {k + 2 * kept}: {multiple}."]
    if elements != wanted:
        named = {want: "padded by the number of bytes, each of which holds two elements: that is fault x-padded-by-bytes.",
                 0: "left as they are while the weight was padded: that is fault x-not-padded.",
                 2 * wanted: "padded by double of what K lacks: the factor between bytes and elements was taken twice."}
        lines += [f"The activations would be {named.get(elements, f'{k} + {elements} elements wide, which is not the padded weight.')}", _refused(elements)]
    elif kept != want:
        lines.append("The number of elements is right.")
    return Answer(False, "\n".join(dict.fromkeys(lines)))


# -- the bytes of the block scales ------------------------------------------------------------------------------------


def linear_scales() -> Tensor:
    """The block scales of qkv_proj as they stand in the shipped checkpoint, E4M3 as bytes: uint8 [200, 22]."""
    return _layer()[0].layer.scales.clone()


def _prepare(answer: Any = None) -> Answer:
    if _open(answer):
        return Answer(None, "give a function.")
    other = torch.randint(8, 120, (300, 9), generator=torch.Generator().manual_seed(6), dtype=torch.uint8)
    for name, linear in (("the checkpoint's scales", linear_scales()), ("scales of another size", other)):
        what = f"on {name}, {list(linear.shape)}"
        try:
            got = answer(linear.clone())
            got = got.detach().cpu().contiguous() if isinstance(got, Tensor) else got
        except Exception as error:  # whatever a learner's code raises is an answer
            hint = "" if linear is not other else "\nA size is written as a number somewhere."
            if isinstance(error, RuntimeError) and "shape" in str(error):
                hint = hint or "\nPad first: the axes of the pattern only fit whole tiles."
            return Answer(False, f"{what}, the function raised {type(error).__name__}: {error}{hint}")
        if _open(got):
            return Answer(None, "the function returns nothing yet. What must the shape be before a tile fits, and which axis of the pattern runs fastest in memory?")
        if not isinstance(got, Tensor) or got.dtype != torch.uint8:
            return Answer(False, f"the result is uint8 bytes, this is {got.dtype if isinstance(got, Tensor) else type(got).__name__}.\n"
                          "The bytes are E4M3 numbers already: they move, and none changes.")
        rows, columns = SWIZZLE_128x4.padded(*linear.shape)
        padded = pad(linear, (0, columns - linear.shape[1], 0, rows - linear.shape[0]))
        if got.numel() != padded.numel():
            return Answer(False, f"{what}: {_size(got, linear, padded)}")
        want = SWIZZLE_128x4.pack(padded).flatten()
        if not torch.equal(got.flatten(), want):
            wrong = f"{int((got.flatten() != want).sum())} of {want.numel()} bytes are not what the kernel should find there, {what}."
            more = _meaning(got.flatten(), padded) if linear is not other else "The checkpoint's were right: a size is written as a number."
            return Answer(False, f"{wrong}\n{more}")
        if got.shape != padded.shape:
            return Answer(False, f"{what}: the bytes are right, in a tensor of shape {list(got.shape)}.\nFlashInfer looks at their number "
                          f"only and would take them. vLLM's function gives {[rows, columns]}.")
    s = _layer()[1]
    return Answer(True, "byte for byte what vLLM's swizzle_blockscale gives, for this checkpoint and for another size.\n"
                  f"For SM100 prepare_bf16_fp4_weights makes them a view {list(s.plan.convert_scales(s.layer).shape)}: no byte moves.")


def _size(got: Tensor, linear: Tensor, padded: Tensor) -> str:
    """What another number of bytes means. FlashInfer counts whole tiles, so that it refuses every one of them."""
    why = {linear.numel(): "As many as went in: nothing was padded. "}
    why |= dict.fromkeys((linear.shape[0] * padded.shape[1], padded.shape[0] * linear.shape[1]), "One axis was padded, the other was not. ")
    return (f"{got.numel()} bytes, and whole tiles of 128 x 4 have {padded.numel()}.\n{why.get(got.numel(), '')}FlashInfer counts them and "
            f"refuses {'fewer' if got.numel() < padded.numel() else 'more'}: an error before anything is computed, which is the good case.")


def _meaning(got: Tensor, padded: Tensor) -> str:
    """What bytes of the right number that stand in wrong places are, and what the layer makes of them."""
    s, (rows, columns) = _layer()[1], padded.shape
    view = cutedsl_sm100_view(got.reshape(rows // 128, columns // 4, 32, 4, 4).view(torch.float8_e4m3fn))
    operands = {**s.plan.convert(s.layer), "weight_scale": view}
    out = s.plan.finish(s.recipe.contract.emulate(s.plan.arguments(operands, s.x)), tuple(s.x.shape[:-1]), s.layer.bias)
    says = [f"With these bytes a diagnosis says {f.id}: {f.title} [{f.strength}]." for f in _findings(LinearRun(operands, s.x, out))]
    others = {"These are the padded scales, transposed: memory runs along N.": padded.T,
              "They were taken out of layout 128x4, not put into it: the same axes, and the opposite permute.":
              SWIZZLE_128x4.unpack(padded.flatten(), rows, columns)}
    says = says or [text for text, t in others.items() if torch.equal(got, t.flatten())]
    if not says:
        want = SWIZZLE_128x4.pack(padded).flatten()
        at = int((got != want).nonzero()[0])
        row, column = divmod(int((SWIZZLE_128x4.index_map(rows, columns) == at).flatten().nonzero()[0]), columns)
        says = [f"The first wrong one is byte {at}: the kernel looks there for row {row}, column {column}. Split these two as the left side of the pattern does, and "
                "count memory as the right side does."]
    if torch.equal(out, _layer()[2]):
        return "\n".join([*says, "The output would be the same, since these bytes meet zeros; but they are not what vLLM's function gives."])
    return "\n".join([*says, f"Nothing would raise, and the layer's output would be off: {_off(out)}."])


# -- a run in which two things are wrong ------------------------------------------------------------------------------

# Index by index the scales of the first are right, only their memory is not; with the second repaired the output is nearly as wrong.
_HIDDEN = ("scales-view-contiguous", "bias-missing")


@functools.cache
def _mystery() -> LinearRun:
    s = _layer()[1]
    for id in _HIDDEN:
        s = linear_fault(id).inject(s)
    return s.run()


def mystery() -> LinearRun:
    """One run of qkv_proj on SM100 for x [2, 3, 352]: operands, activations, output [2, 3, 200]. Two faults were put into it."""
    run = _mystery()
    return LinearRun({key: t.clone() for key, t in run.operands.items()}, run.x.clone(), run.output.clone())


def _named(*answer: Any) -> Answer:
    ids = list(answer[0]) if len(answer) == 1 and isinstance(answer[0], (tuple, list, set, frozenset)) else list(answer)
    if not ids or any(map(_open, ids)):
        return Answer(None, f"give the ids of two faults.\nFaults: {', '.join(LINEAR_FAULTS)}")
    if unknown := [id for id in ids if not isinstance(id, str) or id not in LINEAR_FAULTS]:
        return Answer(False, f"there is no fault {unknown[0]!r} of a linear layer.\nFaults: {', '.join(LINEAR_FAULTS)}")
    ids, s = list(dict.fromkeys(ids)), _layer()[1]
    if set(ids) == set(_HIDDEN):
        lines = [f"{f.id} alone gives {_off(linear_fault(f.id).inject(s).run().output)}. What to do: {f.fix}."
                 for f in _findings(_mystery())]
        return Answer(True, "\n".join(["put into the right layer, these two give every byte of the operands and of the output.", *lines,
                                       "Index by index the scales were right: the kernel reads memory, and == does not."]))
    lines = [f"{id} is in this run." if id in _HIDDEN else _not_there(id) for id in ids]
    if not set(_HIDDEN) <= set(ids):
        lines.append("Something is left that your answer does not explain. Ask two things, one after the other: "
                     "are all operands right, in memory? Does the output follow from what was passed?")
    return Answer(False, "\n".join(lines))


def _not_there(id: str) -> str:
    """What a fault that is not in the run would have done."""
    s, run, fault = _layer()[1], _mystery(), LINEAR_FAULTS[id]
    if fault.level == "checkpoint" or fault.layer is not None:
        return f"{id} would be in the file. This one has one global scale for all parts, and a block scale for 16 elements."
    try:
        other = fault.inject(s).run()
    except MxdebugError as error:
        return f"{id} cannot be in this run: it needs {error.expected}."
    if other.output is None:
        return f"{id} is not in it: the layer would have raised \"{other.error}\"."
    if other.output.shape != run.output.shape:
        return f"{id} is not in it: the output would have {other.output.shape[-1]} columns, and it has {run.output.shape[-1]}."
    struck = [key for key in fault.strikes if key in run.operands]
    return f"{id} is not in it. Alone it gives {_off(other.output)}{f', and other bytes of {chr(32).join(struck)}' if struck else ''}."


W4A16_EXERCISES: dict[str, Callable[..., Answer]] = {"padding": _padding, "prepare": _prepare, "mystery": _named}
EXERCISES.update(W4A16_EXERCISES)

__all__ = ["W4A16_EXERCISES", "check", "linear_scales", "mystery"]
