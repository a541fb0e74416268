"""Somebody's own dump: all calls in it, and one of them with everything that can be found out about it.

What a call does not have (no checkpoint, no output, a broken contract) raises MxdebugError where it is asked for, and says what is missing;
`where_it_applies` prints that in the place of a view.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import recorded
from ..calls import MISSING, PENDING, UNREADABLE, Call, Recording, scan
from ..checkpoints import Checkpoint, CheckpointLayer, CheckpointLinear, open_checkpoint
from ..contracts import ALL, Contract, LinearContract, LinearSeen, Operand, Seen, find, find_linear
from ..diagnosis import Diagnosis, diagnose
from ..diagnosis.diagnose import exact
from ..diagnosis.given import Given
from ..diagnosis.linear_locate import locate_linear
from ..diagnosis.linear_operands import memory, refined
from ..diagnosis.locate import locate, position
from ..diagnosis.outputs import sample_tokens
from ..errors import MxdebugError
from ..recipes import Plan, recipe
from ..recipes.w4a16.plan import LinearPlan
from ..recipes.w4a16.recipe import linear_recipe
from ..reference import MoELayer, Parallel
from ..reference_linear import LinearLayer
from . import own_settings

WIDTH = 88  # what fits below a cell in a window of 900 pixels
TOKENS = 16  # at most this many are emulated
MOST = 6     # calls that are diagnosed at once
LISTED = 40  # calls that a table shows
_FUNCTIONS = {f for c in ALL.values() for f in (c.function, *c.aliases)}
NO_CHECKPOINT = MxdebugError("CHECKPOINT", "the folder of the model", "none", "CHECKPOINT is None in the first cell")


_said: list[str] = []  # the reasons that were printed in full


@contextmanager
def where_it_applies(what: str) -> Iterator[None]:
    """Run a view; where the call does not have what it shows, print that by name instead. Other exceptions are raised.

    A reason is printed in full when it is first met.
    """
    try:
        yield
    except MxdebugError as error:
        reason = f" {error}" if str(error) not in _said else f" The reason is above: {Path(error.operand).name}."
        _said.append(str(error))
        print(textwrap.fill(f"{what}: not for this call.{reason}", WIDTH, subsequent_indent="  ", break_on_hyphens=False))


def shipped_dump(*names: str) -> Path:
    """A dump folder as FlashInfer writes it, with some of the calls that ship with mxdebug; it is gone when Python ends."""
    folder = Path(tempfile.mkdtemp(prefix="flashinfer_dumps_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    for name in names or ("c01", "c07", "c13"):
        for call in recorded.call(name).path.iterdir():
            if call.is_dir():
                shutil.copytree(call, folder / call.name)
    return folder


def shipped_checkpoint(name: str = "c07") -> Path:
    """The folder of the small model that a shipped call was made from."""
    return recorded.call(name).checkpoint_path


# -- one call -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Own:
    """One recorded call. Each property is computed when it is first asked for, and raises MxdebugError where it cannot be known.

    number      its place in the table
    checkpoint  an opened one, or why there is none
    layer       number of a MoE layer, or name of a linear module; None: found by the weights
    tp          tensor-parallel (size, rank), for kernels that are not told
    """

    number: int
    recording: Recording
    checkpoint: Checkpoint | MxdebugError
    layer: int | str | None = None
    tp: tuple[int, int] | None = None

    @functools.cached_property
    def call(self) -> Call:
        """The call; its tensors are read when they are used."""
        return self.recording.load()

    @functools.cached_property
    def kernel(self) -> Contract | LinearContract:
        """The contract that the call falls under."""
        call = self.call
        if call.status == PENDING:
            raise MxdebugError("tensors of the call", "inputs", "none", "recorded inside a CUDA graph, never flushed: use eager mode")
        return find_linear(call.function, call.arguments) or find(call.function, call.arguments)

    @property
    def linear(self) -> bool:
        """Whether this is a call of a linear kernel, with one weight and no experts."""
        return isinstance(self.kernel, LinearContract)

    @functools.cached_property
    def diagnosis(self) -> Diagnosis:
        """What is wrong with the call. A checkpoint that cannot be opened is an error; none at all is not."""
        if self.call.status == PENDING or self.checkpoint is NO_CHECKPOINT:
            return diagnose(self.call)
        module, layer = self._stated
        return diagnose(self.call, self._opened, tp=self.tp, module=module, layer=layer)

    @property
    def _stated(self) -> tuple[str | None, int | None]:
        """(module, number) that `layer` states. Raises MxdebugError for a module's name and a call of experts."""
        if not isinstance(self.layer, str):
            return None, self.layer
        if not self.linear:
            raise own_settings.wrong("LAYER", "None or the number of a layer, for a call of experts", repr(self.layer),
                                     "the name of a linear module")
        return self.layer, None

    @property
    def _opened(self) -> Checkpoint:
        if isinstance(self.checkpoint, MxdebugError):
            raise self.checkpoint
        return self.checkpoint

    @functools.cached_property
    def chosen(self) -> CheckpointLayer | CheckpointLinear:
        """The layer of the checkpoint that the call holds, found as `diagnose` finds it."""
        opened, (module, layer) = self._opened, self._stated
        if self.linear:
            return locate_linear(self.kernel, self.call.arguments, opened, module=module, layer=layer, tp=self.tp).chosen
        return opened.layer(locate(self.call, opened) if layer is None else layer)

    @functools.cached_property
    def meant(self) -> MoELayer | LinearLayer:
        """The part of that layer that this rank should hold."""
        return refined(self.chosen.layer) if self.linear else self.chosen.layer.part(self._position)

    @functools.cached_property
    def _given(self) -> Given:
        return Given.of(self.kernel, self.call.arguments)

    @functools.cached_property
    def _position(self) -> Parallel:
        tp = Parallel(*self.tp) if self.tp else None
        return position(self._given, self.chosen.layer, recipe("vllm", self.kernel.path, self.chosen.kind), tp)

    @functools.cached_property
    def plan(self) -> Plan | LinearPlan:
        """vLLM's recipe for this layer. Raises MxdebugError also where the call has other sizes than the recipe makes."""
        if self.linear:
            plan = linear_recipe(self.kernel.path, self.chosen.kind).plan(self.chosen.layer)
            want, got = plan.padded, tuple(self.kernel.see(self.call.arguments).weight.shape)
        else:
            plan = recipe("vllm", self.kernel.path, self.chosen.kind).plan(self.meant, self.chosen.layer)
            base = self._given.base.layer
            want, got = (self.meant.experts, *plan.padded), (self._given.experts, base.intermediate, base.hidden)
        if tuple(want) != tuple(got):
            raise MxdebugError("sizes of the call", str(list(want)), str(list(got)),
                               "another layer or checkpoint, or a position that the kernel is not told: set TP")
        return plan

    @functools.cached_property
    def right(self) -> dict[str, Any]:
        """The arguments that the call should have had, by the recipe. Tokens and router weights are those that were passed."""
        c, args, plan = self.kernel, self.call.arguments, self.plan
        if self.linear:
            return c.arguments(plan.convert(self.meant), plan.activations(c.get("x", args)[:, : plan.k]))
        operands, base = plan.convert(self.meant), self._given.base
        return plan.call(operands, self.meant.activation, c.activations_of(args), base.experts, base.router, c.parallel(args))

    @functools.cached_property
    def tokens(self) -> Tensor:
        """int64: the tokens that are emulated, spread over the call; those with something odd in their output come first."""
        if self.linear:
            return torch.arange(min(TOKENS, len(self.kernel.get("x", self.call.arguments))))
        return sample_tokens(self._given, TOKENS, self.call.outputs[0] if self.call.outputs else None)

    def see(self, arguments: Mapping[str, Any] | None = None) -> Seen | LinearSeen:
        """What the kernel sees, of `tokens` only; arguments: other ones than the call's."""
        arguments = self.call.arguments if arguments is None else arguments
        if not self.linear:
            return self.kernel.see(arguments, tokens=self.tokens)
        seen = self.kernel.see(arguments)
        return replace(seen, x=seen.x[self.tokens])

    @functools.cached_property
    def meant_output(self) -> Tensor:
        """float64 [tokens, N or H]: what the checkpoint means for `tokens`, without rounding on the way."""
        layer, plan = self.meant, self.plan
        if self.linear:
            return replace(layer, bias=None).forward(self.kernel.get("x", self.call.arguments)[self.tokens, : layer.k].double())
        return exact(self._given.base, plan, layer, self._position, self.tokens).output

    @property
    def output(self) -> Tensor:
        """The rows of `tokens` in the output that was recorded."""
        if not self.call.outputs:
            raise MxdebugError("output", "what the kernel wrote", "none in the dump", f"the call is {self.call.status}")
        return self.call.outputs[0][self.tokens]


def passed(o: Operand, arguments: Mapping[str, Any]) -> Tensor | float | None:
    """What a call has for an operand; a number, where its kernel takes SwiGLU's parameters as such."""
    value = arguments.get(o.argument)
    return value if isinstance(value, (int, float)) else o.get(arguments)


def same(own: Own, o: Operand, a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two calls hold the same bytes for an operand, as its kernel reads them."""
    x, y = passed(o, a), passed(o, b)
    if not isinstance(x, Tensor) or not isinstance(y, Tensor):
        return not isinstance(x, Tensor) and not isinstance(y, Tensor) and x == y
    x, y = (t.reshape(-1) if t.dim() == 0 else t for t in (x, y))
    return torch.equal(*((memory(t) if own.linear else o.payload(t).flatten()) for t in (x, y)))


# -- all calls ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Dump:
    """All calls in a folder, in the order in which they were made. `str` is a table; no weight is read for it."""

    calls: tuple[Own, ...]

    def __str__(self) -> str:
        lines = [("no", "function", "status", "MB", "path", "tokens", "sizes")]
        for own in self.calls[:LISTED]:
            r = own.recording
            lines.append((str(own.number), r.function or "?", r.status, f"{r.size / 1e6:.1f}", *_sizes(own)))
        left = len(self.calls) - LISTED
        return columns(lines) + (f"\nand {left} more" if left > 0 else "")

    def verdicts(self, most: int = MOST) -> str:
        """A line for each of the first calls: its verdict, and what is wrong. This reads weights: some seconds for a large layer."""
        says: dict[tuple[str, int | None], list[str]] = {}
        looked_at = self._known[:most]
        for own in looked_at:
            try:
                d = own.diagnosis
                key = d.verdict.upper() + ("" if d.ok else f": {d.summary}"), own.number
            except MxdebugError as error:
                key = f"NOT READ: {error}", None  # calls that cannot be read for one reason share its lines
            says.setdefault(key, []).append(str(own.number))
        lines = [textwrap.fill(f"call{'s' if len(numbers) > 1 else ''} {', '.join(numbers)}: {text}", WIDTH, subsequent_indent="  ",
                               break_on_hyphens=False) for (text, _), numbers in says.items()]
        left = len(self._known) - len(looked_at)
        return "\n".join(lines + ([f"{left} more were not looked at: verdicts(most={len(self._known)})"] if left else []))

    @property
    def _known(self) -> list[Own]:
        """The calls of kernels that have a contract; all, where there is none of these."""
        return [own for own in self.calls if own.recording.function in _FUNCTIONS] or list(self.calls)

    def pick(self, number: int | None = None, most: int = MOST) -> Own:
        """The call of that number. None: of the first `most` the first that is not right, else the first that can be read."""
        if number is not None:
            if isinstance(number, bool) or not isinstance(number, int) or number not in range(len(self.calls)):
                raise MxdebugError("CALL", f"None, or a number from 0 to {len(self.calls) - 1}", repr(number),
                                   "the table's first column has them; change CALL in this cell, and run it and those below again")
            return self.calls[number]
        read: list[Own] = []
        for own in self._known[:most]:
            try:
                if not own.diagnosis.ok:
                    return own
                read.append(own)
            except MxdebugError:
                continue
        return read[0] if read else self._known[0]

    def twins(self, own: Own) -> list[Own]:
        """Other calls of the same kernel on the same tokens: recorded after a fix, for example."""
        found, x = [], own.kernel.operand("x").get(own.call.arguments)
        for other in self.calls:
            try:
                t = own.kernel.operand("x").get(other.call.arguments) if other is not own and other.kernel is own.kernel else None
            except MxdebugError:
                continue
            if t is not None and other.call.outputs and t.shape == x.shape and t.dtype == x.dtype and torch.equal(memory(t), memory(x)):
                found.append(other)
        return found


def open_dump(dump: str | Path, checkpoint: str | Path | None = None, *, layer: int | str | None = None,
              tp: tuple[int, int] | None = None) -> Dump:
    """List the calls in a folder.

    checkpoint  the folder of the model, or None; layer, tp: as of `Own`
    Raises MxdebugError, by the name of the setting, where there are no calls, and for a value that a setting cannot have. A checkpoint that
    cannot be opened, or does not fit, is said where it is needed: much can be seen without it.
    """
    where, layer, tp = own_settings.folder("DUMP", dump, "the folder of a dump"), own_settings.layer(layer), own_settings.tp(tp)
    opened: Checkpoint | MxdebugError = NO_CHECKPOINT
    if checkpoint is not None:
        model = own_settings.folder("CHECKPOINT", checkpoint, "None, or the folder of the model")
        try:
            opened = open_checkpoint(model)
        except MxdebugError as error:
            opened = own_settings.of("CHECKPOINT", error)
    try:
        return Dump(tuple(Own(i, r, opened, layer, tp) for i, r in enumerate(scan(where))))
    except MxdebugError as error:
        raise own_settings.of("DUMP", error) from None


def columns(lines: list[tuple[str, ...]]) -> str:
    """Lines of equally many texts, one below the other."""
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(f"{text:<{w}}" for text, w in zip(line, widths)).rstrip() for line in lines)


def _sizes(own: Own) -> tuple[str, str, str]:
    """(path, tokens, sizes), by dtypes and shapes alone; a .pt file is mapped, not read."""
    try:
        if own.recording.status in (UNREADABLE, MISSING) or own.recording.function not in _FUNCTIONS:
            return "cannot be read" if own.recording.problem else "no path of mxdebug's", "", ""
        c, args = own.kernel, own.call.arguments
        shapes = {o.key: list(t.shape) for o in (*c.operands, *c.inputs) if (t := o.get(args)) is not None}
        weights = ", ".join(f"{key} {shapes[key]}" for key in ("w13", "w2", "weight") if key in shapes)
        return c.path, str(shapes["x"][0]) if "x" in shapes else "?", weights
    except MxdebugError as error:
        return f"not known: {error.operand}", "", ""
