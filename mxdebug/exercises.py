"""Did I understand it? Checks for the notebooks' exercises: what would a wrong answer mean? They never show the solution first."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import recorded
from .calls import Call, load
from .checkpoints import CheckpointLayer, open_checkpoint
from .contracts import Contract, find
from .diagnosis import diagnose
from .errors import MxdebugError
from .faults import FAULTS, OPERANDS, Situation
from .layouts import INTERLEAVED, SCALE_LAYOUTS, SM90_SCALE_FOLD, UP_GATE
from .metrics import compare
from .recipes import logical_operands, recipe

WIDTH = 88  # what fits below a cell in a window of 900 pixels


@dataclass(frozen=True)
class Answer:
    """What a check says: right is None where nothing was answered yet."""

    right: bool | None
    text: str

    def __str__(self) -> str:
        word = {None: "NOT ANSWERED YET", True: "RIGHT", False: "NOT YET RIGHT"}[self.right]
        first, *rest = self.text.split("\n")
        lines = textwrap.wrap(f"{word}: {first}", WIDTH, break_on_hyphens=False)
        for text in rest:
            lines += textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
        return "\n".join(lines)

    __repr__ = __str__


def check(exercise: str, *answer: Any) -> Answer:
    """Check an answer: `check("place", 123)`, `check("scales", function)`, `check("c08", operand, fault)`. None or ... is no answer yet."""
    if exercise not in EXERCISES:
        raise MxdebugError("exercise", f"one of {', '.join(EXERCISES)}", repr(exercise))
    return EXERCISES[exercise](*(a.item() if isinstance(a, Tensor) and a.dim() == 0 else a for a in answer))


def _open(answer: Any) -> bool:
    return answer is None or answer is ...


# -- where does one byte lie? ----------------------------------------------------------------------------------------

PLACE_SHAPE, PLACE = (512, 12), (100, 9)


def _place(answer: Any = None) -> Answer:
    (rows, columns), (row, column) = PLACE_SHAPE, PLACE
    if _open(answer):
        return Answer(None, f"replace None by a number from 0 to {rows * columns - 1}.\n"
                      f"Write row {row} as rb*64 + s*16 + f and column {column} as kb*4 + g. Then memory counts rb, kb, f, s, g, "
                      "the last one fastest; rb goes up to 7, kb to 2, f to 15, s to 3, g to 3.")
    if isinstance(answer, bool) or not isinstance(answer, int):
        return Answer(False, f"a byte offset is a whole number, this is {type(answer).__name__}.")
    if not 0 <= answer < rows * columns:
        return Answer(False, f"the matrix has {rows * columns} bytes, 0 to {rows * columns - 1}; {answer} is outside.")
    wanted = SM90_SCALE_FOLD.index_map(rows, columns)
    if int(wanted[row, column]) == answer:
        return Answer(True, "the kernel takes this byte for the scale of elements "
                      f"{column * 32} to {column * 32 + 31} of row {row}.\n" + SM90_SCALE_FOLD.explain(row, column, rows, columns))
    same_size = [layout for layout in SCALE_LAYOUTS if layout.padded(rows, columns) == (rows, columns)]
    named = [layout.name for layout in same_size if int(layout.index_map(rows, columns)[row, column]) == answer]
    there = (wanted == answer).nonzero()[0].tolist()
    meaning = f"byte {answer} is where the kernel looks for row {there[0]}, column {there[1]}."
    if named:
        meaning += f"\nIt is the right place in another layout: {', '.join(named)}. "
        meaning += f"Bytes left like that are fault {_scale_fault(named[0])}."
    elif there[0] == row:
        meaning += "\nThe row is right, the column is not: look at kb and g again."
    elif there[1] == column:
        meaning += "\nThe column is right, the row is not: look at rb, s and f again; s counts 16 rows at a time, f single rows."
    return Answer(False, meaning)


def _scale_fault(layout: str) -> str:
    call, layer = _recorded("c01")
    contract = find(call.function, call.arguments)
    form = recipe("vllm", contract.path, layer.kind).plan(layer.layer).forms["w13_scale"]
    for f in FAULTS.values():
        slots = f.slots("w13_scale", form, contract) if f.slots and "w13_scale" in f.strikes else None
        if slots and getattr(slots.get("layout"), "name", None) == layout:
            return f.id
    return "layout-other"


# -- convert the block scales of w13 ---------------------------------------------------------------------------------


_OWN = "the checkpoint's scales"


def _scales(answer: Any = None) -> Answer:
    if _open(answer):
        return Answer(None, "give a function.")
    call, layer = _recorded("c01")
    contract = find(call.function, call.arguments)
    for name, file in ((_OWN, _file_scales(layer)), ("scales of another size", _made_scales())):
        try:
            got = answer(file.clone())
        except Exception as error:  # whatever a learner's code raises is an answer
            sizes = "" if name == _OWN else "\nA size is written as a number somewhere: take it from scales.shape."
            return Answer(False, f"on {name}, {list(file.shape)}, the function raised {type(error).__name__}: {error}{sizes}")
        if _open(got):
            return Answer(None, "the function returns nothing yet.\nTwo stages: first the rows, which stand as g0,u0,g1,u1 and should be "
                          "all of up, then all of gate; then the fold: its pattern is printed above, one reshape to the axes on its left "
                          "and one permute into the order on its right.")
        if not isinstance(got, Tensor) or got.dtype != torch.uint8:
            found = str(got.dtype) if isinstance(got, Tensor) else type(got).__name__
            return Answer(False, f"the kernel gets uint8 bytes, this is {found}.\n"
                          "Scale bytes are exponents: a cast to another type changes what they mean.")
        if got.numel() != file.numel():
            return Answer(False, f"{file.numel()} bytes went in, {got.numel()} came out, on {name}.\n"
                          "The conversion moves bytes: none is added, none is lost.")
        half = file.shape[1] // 2
        wanted = SM90_SCALE_FOLD.pack(_logical(file)[:, UP_GATE.indices(half)])
        if not torch.equal(got.flatten(), wanted.flatten()):
            return _wrong_scales(got, wanted, name, call, layer, contract)
    return Answer(True, f"byte for byte what the kernel reads, {call.arguments['quant_scales'][0].numel()} bytes of the checkpoint and "
                  "another size too.\nThese are the bytes that stood in the recorded call c01.")


def _wrong_scales(got: Tensor, wanted: Tensor, name: str, call: Call, layer: CheckpointLayer, contract: Contract) -> Answer:
    wrong = int((got.flatten() != wanted.flatten()).sum())
    share = f"{wrong} of {wanted.numel()} bytes are not what the kernel should find there, on {name}."
    if name != _OWN:
        return Answer(False, f"{share}\nThe checkpoint's own scales were right: a size is written as a number somewhere.")
    scales = [got.reshape(wanted.shape[0], *call.arguments["quant_scales"][0].shape[1:]), *call.arguments["quant_scales"][1:]]
    arguments = {**call.arguments, "quant_scales": scales}
    d = diagnose(replace(call, arguments=arguments, outputs=(contract.emulate(arguments),)), layer)
    says = [f"With these bytes a diagnosis says: {f.title} [{f.strength}]" for f in d.findings]
    says = says or ["No known fault leads to these bytes. Undo your steps one by one and compare with what went in."]
    end = f"The model would go on without an error, its output off by relative L2 {d.truth.relative_l2:.3f}."
    return Answer(False, "\n".join([share, *says, end]))


def _file_scales(layer: CheckpointLayer) -> Tensor:
    """w13's block scales in the order of a gpt-oss file: rows g0,u0,g1,u1."""
    logical = logical_operands(layer.layer)["w13_scale"]
    return logical[:, INTERLEAVED.indices(logical.shape[1] // 2)]


def file_scales() -> Tensor:
    """The block scales of w13 as they stand in the shipped gpt-oss checkpoint: uint8 [4, 512, 12], rows g0,u0,g1,u1."""
    return _file_scales(_recorded("c01")[1])


def _logical(file: Tensor) -> Tensor:
    return file[:, torch.argsort(INTERLEAVED.indices(file.shape[1] // 2))]


def _made_scales() -> Tensor:
    return torch.randint(100, 130, (2, 256, 20), generator=torch.Generator().manual_seed(8), dtype=torch.uint8)


# -- name the fault of a recorded call ---------------------------------------------------------------------------------


CHOICES = ("rows-gate-up", "rows-interleaved", "scales-linear", "scales-128x4", "scales-transposed", "weights-linear",
           "nibbles-swapped", "scales-cast-by-value")


def _c08(operand: Any = None, fault: Any = None) -> Answer:
    call, layer = _recorded("c08")
    if _open(operand) or _open(fault):
        return Answer(None, "give an operand and a fault.\nStart with the bytes: which operand differs from what the recipe makes of the "
                      "checkpoint? Then bring it out of its layout and look at its rows.\n"
                      f"Operands: {', '.join(o for o in OPERANDS if not o.endswith('bias'))}\nFaults: {', '.join(CHOICES)}")
    if operand not in OPERANDS:
        return Answer(False, f"there is no operand {operand!r}; there are {', '.join(OPERANDS)}.")
    if fault not in FAULTS:
        return Answer(False, f"there is no fault {fault!r}; there are {', '.join(CHOICES)}.")
    if operand not in FAULTS[fault].strikes:
        return Answer(False, f"fault {fault} cannot strike {operand}; it strikes {', '.join(FAULTS[fault].strikes)}.")
    contract = find(call.function, call.arguments)
    given = call.arguments
    right = Situation.right(recipe("vllm", contract.path, layer.kind), layer.layer, given["input"], given["token_selected_experts"],
                            given["token_final_scales"], contract.parallel(given))
    try:
        arguments, output = FAULTS[fault].injected(right, (operand,)).build()
    except MxdebugError as error:
        return Answer(False, f"this fault cannot be in this call: {error}")
    c = compare(output, call.outputs[0])
    if c.bit_identical:
        return Answer(True, f"injected into the right call, this fault alone reproduces all {c.elements} numbers that the GPU wrote, "
                      f"bit for bit.\nIt is reported as {', '.join(FAULTS[fault].reports)}. What to do: {FAULTS[fault].fix}.")
    pairs = [(o.key, o.get(arguments), o.get(given)) for o in contract.operands if o.get(given) is not None]
    differs = [key for key, predicted, seen in pairs if not torch.equal(predicted.flatten(), seen.flatten())]
    return Answer(False, f"with this fault the kernel would have written something else: {c.differing} of {c.elements} numbers differ, "
                  f"relative L2 {c.relative_l2:.3f}.\nIt also predicts other bytes than were recorded for {', '.join(differs)}.")


def _recorded(name: str) -> tuple[Call, CheckpointLayer]:
    r = recorded.call(name)
    return load(r.path), open_checkpoint(r.checkpoint_path).layer()


EXERCISES: dict[str, Callable[..., Answer]] = {"place": _place, "scales": _scales, "c08": _c08}

from . import exercises_swiglu  # noqa: E402, F401  registers its own; it needs EXERCISES, so it stands last
from . import exercises_start  # noqa: E402, F401  the same
from . import exercises_own  # noqa: E402, F401  the same
from . import exercises_tests  # noqa: E402, F401  the same
