"""The record of one kernel call, and how its arguments get their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor

from . import signature as signatures
from .writing import write

COMPLETED = "completed"
CRASHED = "crashed"  # inputs, but no outputs: the call raised, or hung, or the process died in it, or the disk was full
NEVER = "00000000_000000_000"  # the timestamp of a call that nobody recorded
PENDING = "pending flush"  # recorded while a CUDA graph was captured, and never replayed: FlashInfer wrote no tensors


@dataclass(frozen=True, eq=False, repr=False)
class Call:
    """One call of a FlashInfer function. Two calls are equal only if they are the same object.

    arguments   by parameter name, in the signature's order; tensors on the CPU, `torch.dtype`s, numbers, strings, lists,
                tuples, dicts; enums as `EnumMember`, a str equal to the member's name ("Swiglu"); other objects as `Opaque`.
                A parameter that was not passed has its default, or `UNKNOWN_DEFAULT` where the signature's text does not
                define it. Absent: required parameters that were not passed, and tensors of a call that is "pending flush".
                What no parameter takes (the call was a TypeError) is there too: see `name_arguments`.
    defaulted   the names in `arguments` that were not passed
    outputs     flat, in FlashInfer's order; () if none. A kernel that writes into an argument named `output` finds its
                previous content in `arguments["output"]`.
    status      "completed", "crashed" (inputs, no outputs) or "pending flush" (CUDA graph, tensors never written)
    versions    of flashinfer, torch and python
    sequence    counts the calls of this function in this process, from 1
    timestamp   local time as YYYYMMDD_HHMMSS_mmm
    graph_capture  recorded inside a CUDA graph. FlashInfer copies such tensors after the replay, when the graph may have
                reused the memory of its intermediate results: trust weights and scales, not activations.
    source      the folder that it was read from; None for a call of this process
    lost        why a call that is "completed" has no outputs although the function returned some: their file is missing
                or damaged; "" otherwise
    """

    function: str
    module: str
    arguments: Mapping[str, Any]
    defaulted: frozenset[str]
    outputs: tuple[Tensor, ...]
    status: str
    versions: Mapping[str, str]
    sequence: int
    timestamp: str
    process: int
    graph_capture: bool
    signature: str
    source: Path | None
    lost: str = ""

    @staticmethod
    def made(function: str, arguments: Mapping[str, Any], output: Tensor | None = None, status: str | None = None) -> Call:
        """A call that nobody recorded; without an output it is a crashed one, unless `status` says otherwise.

        Its arguments count as passed by keyword, and its time is `NEVER`, so that it can be saved.
        """
        status = status or (CRASHED if output is None else COMPLETED)
        signature = f"(*, {', '.join(arguments)})" if arguments else "()"
        return Call(function, "", arguments, frozenset(), () if output is None else (output,), status, {}, 1, NEVER, 1, False, signature, None)

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={_brief(value)}" for name, value in self.arguments.items() if name not in self.defaulted)
        return f"Call({self.function}({given}) -> {_brief(self.outputs)}, {self.status})"

    def save(self, folder: Path | str, tensor_format: Literal["torch", "safetensors"] = "torch") -> Path:
        """Write FlashInfer's dump format into a new sub-folder of the session `folder`; returns the sub-folder.

        Defaulted arguments are left out, as in a dump. Where several outputs came nested, they are written as a flat tuple.
        MxdebugError if the sub-folder exists, for a call whose tensors are lost ("pending flush", or `lost`), for a name that is
        no folder name, and for an unknown `tensor_format`. "safetensors" keeps strides in the metadata only, as FlashInfer does.
        """
        return write(self, Path(folder), tensor_format)


def _brief(value: Any) -> str:
    """One word for a value: tensors as dtype[shape]."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_brief(item) for item in value) + "]"
    return repr(value)


def name_arguments(positional: Sequence[Any], keywords: Mapping[str, Any], text: str) -> tuple[dict[str, Any], frozenset[str]]:
    """(arguments by parameter name, names that got their default), from what was passed and the text of the signature.

    A call that the function would reject is named all the same, since that may be what went wrong: what fits no parameter
    keeps its own name, or `arg_<position>`, or `kwarg_<name>` if that name was also given by position. Extra positional
    arguments of a function with `*args` are one tuple under that name.
    """
    parameters = signatures.parse(text)
    passed: dict[str, Any] = {}
    by_position = [p for p in parameters if p.kind in ("positional only", "positional")]
    for i, value in enumerate(positional[: len(by_position)]):
        passed[by_position[i].name] = value
    extra = positional[len(by_position):]
    variadic = next((p.name for p in parameters if p.kind == "variadic"), None)
    if extra and variadic:
        passed[variadic] = tuple(extra)
    elif extra:
        passed.update({f"arg_{len(by_position) + i}": value for i, value in enumerate(extra)})
    for name, value in keywords.items():
        passed[f"kwarg_{name}" if name in passed else name] = value  # also given by position
    defaults = {p.name: p.default for p in parameters if p.has_default and p.name not in passed}
    everything = passed | defaults
    order = [p.name for p in parameters if p.name in everything]
    return {name: everything[name] for name in [*order, *(n for n in everything if n not in order)]}, frozenset(defaults)
