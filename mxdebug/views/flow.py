"""One call from the checkpoint to its output: what the recipe does with each operand, who takes it, and what the diagnosis says of it."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go
from torch import Tensor

from ..calls import Call
from ..checkpoints import CheckpointLayer, CheckpointLinear
from ..contracts import Contract, LinearContract, Operand, find, find_linear
from ..contracts.activation import PARAMETERS, read_activation
from ..diagnosis import Diagnosis
from ..diagnosis.finding import DIFFERENT, EQUAL, SAME_VALUES, SUSPECTED, UNREAD, Finding
from ..errors import MxdebugError
from ..faults import QUANTISED_WITH, SCALARS
from ..recipes import recipe
from ..recipes.w4a16.recipe import linear_recipe
from . import figures
from .boxes import Boxes, middle
from .periods import number

RIGHT, WRONG, UNCHECKED, UNDECIDED = "right", "wrong", "not checked", "undecided"
GLYPHS = {RIGHT: "✓", WRONG: "✗", UNCHECKED: "–", UNDECIDED: "?"}
COLOURS = {RIGHT: "#009e73", WRONG: "#d55e00", UNCHECKED: figures.TEXT, UNDECIDED: "#cc79a7"}  # Okabe and Ito's, beside glyph and word

GEMM, GEMM1, ACTIVATION, GEMM2, COMBINE = "GEMM", "GEMM 1", "activation", "GEMM 2", "combine"
_STEP = {"swiglu": ACTIVATION, "a2_gscale": ACTIVATION, "g1_scale_c": ACTIVATION, "w2": GEMM2, "router": COMBINE, "experts": COMBINE}
BEFORE, CONFIG, FILE = "the layer before", "config.json", "checkpoint"


@dataclass(frozen=True)
class Station:
    """One operand on its way.

    key, title   as the contract has them; source: FILE, CONFIG or BEFORE
    stages       what the recipe does with it, in order; empty where that is not known, or nothing
    step         which of the kernel's steps takes it
    verdict      RIGHT, WRONG, UNCHECKED or UNDECIDED; why: in words; findings: their numbers, from 1
    """

    key: str
    title: str
    source: str
    stages: tuple[str, ...]
    step: str
    verdict: str
    why: str
    findings: tuple[int, ...] = ()


@dataclass(frozen=True)
class Flow:
    """The stations by step, and what comes out.

    checkpoint   what the layer is, or "no checkpoint"; its own verdict where a finding is about the file itself, else ""
    output       the verdict of the output: RIGHT if it follows from what was passed; its reason; distance: from the checkpoint's own result
    findings     titles, with strengths, in the diagnosis' order
    """

    title: str
    checkpoint: tuple[str, str]
    stations: tuple[Station, ...]
    output: tuple[str, str]
    distance: str
    verdict: str
    findings: tuple[str, ...]

    @property
    def steps(self) -> tuple[str, ...]:
        """The kernel's steps, in order."""
        return tuple(dict.fromkeys(s.step for s in self.stations))

    def of(self, step: str) -> tuple[Station, ...]:
        """The stations that a step takes."""
        return tuple(s for s in self.stations if s.step == step)

    def computes(self, step: str) -> str:
        """What a step computes, in a line."""
        biased = {s.key for s in self.stations if s.key.endswith("_bias")}
        return {GEMM: "x · weightᵀ · alpha", GEMM1: "x · w13ᵀ" + " + bias" * ("w13_bias" in biased),
                ACTIVATION: self.station("activation").stages[0] if step == ACTIVATION else "",
                GEMM2: "h · w2ᵀ" + " + bias" * ("w2_bias" in biased),
                COMBINE: "sum over the selected experts, times router weights"}[step]

    def station(self, key: str) -> Station:
        """The station of that operand; MxdebugError where there is none."""
        for s in self.stations:
            if s.key == key:
                return s
        raise MxdebugError("operand", f"one of {', '.join(s.key for s in self.stations)}", repr(key))

    def __str__(self) -> str:
        name, own = self.checkpoint
        lines = [name + (f"  {GLYPHS[WRONG]} {own}" if own else "")]
        width = max(len(s.title) for s in self.stations)
        for step in self.steps:
            lines.append(f"  {step}: {self.computes(step)}")
            lines += [f"    {GLYPHS[s.verdict]} {s.title:<{width}}  {s.verdict}: {s.why}" for s in self.of(step)]
        lines.append(f"  output: {GLYPHS[self.output[0]]} {self.output[1]}")
        lines += [f"    {self.distance}"] if self.distance else []
        lines.append(f"verdict: {self.verdict}")
        return "\n".join(lines + [f"  {i}. {t}" for i, t in enumerate(self.findings, 1)])


def flow(call: Call, d: Diagnosis, checkpoint: CheckpointLayer | CheckpointLinear | None = None, *, engine: str = "vllm",
         title: str = "One call, from the checkpoint to its output") -> Flow:
    """The way of a call, with what its diagnosis `d` says of each operand.

    checkpoint  the layer that it was diagnosed against, for the recipe's stages; None: they are left out
    Raises MxdebugError for a call of no kernel that has a contract, and where `d` is no diagnosis.
    """
    if not isinstance(d, Diagnosis):
        raise MxdebugError("diagnosis", "a Diagnosis", type(d).__name__, "make it first: mxdebug.diagnose(call, checkpoint)")
    linear = find_linear(call.function, call.arguments)
    contract = find(call.function, call.arguments) if linear is None else linear
    stages = _stages(contract, call, checkpoint, engine)
    stations = [s for o in (*contract.operands, *contract.inputs) if not o.key.startswith("swiglu_")
                for s in (_station(o, contract, call, d, stages),) if s is not None]
    if isinstance(contract, Contract):
        stations.append(_activation(contract, call, d))
        order = (GEMM1, ACTIVATION, GEMM2, COMBINE)
        stations.sort(key=lambda s: (order.index(s.step), s.source == FILE))
    else:
        stations.sort(key=lambda s: s.source == FILE)
    about = [f.title for f in d.findings if f.where == "checkpoint"]
    name = "no checkpoint"
    if checkpoint is not None:
        layer = f"layer {checkpoint.index}" if isinstance(checkpoint, CheckpointLayer) else checkpoint.name
        name = f"{checkpoint.kind} checkpoint, {layer}"
    elif d.operands:
        name = next((text for label, text in d.call if label == "layer"), "checkpoint")
    distance = ""
    if d.truth is not None:
        what = "from the checkpoint's own" if call.outputs else "of an emulation, from the checkpoint's own"
        right = f" (a right call: {number(d.floor.relative_l2)})" if d.floor else ""
        distance = f"relative L2 {number(d.truth.relative_l2)} {what}{right}"
    return Flow(title, (name, "; ".join(about)), tuple(stations), _output(call, d), distance, d.verdict,
                tuple(f"{f.title} [{f.strength}]" for f in d.findings))


def _stages(contract: Contract | LinearContract, call: Call, checkpoint: CheckpointLayer | CheckpointLinear | None,
            engine: str) -> Mapping[str, tuple[str, ...]]:
    """What the recipe does with each operand, by key."""
    if isinstance(contract, LinearContract):
        if not isinstance(checkpoint, CheckpointLinear):
            return {}
        lines = str(linear_recipe(contract.path, checkpoint.kind, engine).plan(checkpoint.layer)).splitlines()
        return {key: tuple(text.split(" | ")) for key, text in (line.split(None, 1) for line in lines)}
    if not isinstance(checkpoint, CheckpointLayer):
        return {}
    try:
        part = checkpoint.layer.part(contract.parallel(call.arguments))
        plan = recipe(engine, contract.path, checkpoint.kind).plan(part, checkpoint.layer)
    except MxdebugError:
        return {}  # a call that states no position which this layer has; the diagnosis says so
    return {key: tuple(s.name for s in form.stages) for key, form in plan.forms.items()}


def _station(o: Operand, contract: Contract | LinearContract, call: Call, d: Diagnosis,
             stages: Mapping[str, tuple[str, ...]]) -> Station | None:
    """An operand's station; None for an optional one that neither call nor checkpoint has."""
    states, about = dict(d.operands), _about(d, o.title, o.argument, o.where)
    try:
        passed = o.get(call.arguments) is not None
    except MxdebugError:
        passed = True  # something that is no tensor
    if o.optional and not passed and o.key not in states and not about:
        return None
    source = BEFORE if o.key in ("x", "x_scale", "experts", "router") else FILE
    step = GEMM if isinstance(contract, LinearContract) else next((s for start, s in _STEP.items() if o.key.startswith(start)), GEMM1)
    verdict, why = _verdict(o, contract, d, states.get(o.key), about)
    return Station(o.key, o.title, source, stages.get(o.key, ()), step, verdict, why, tuple(i for i, _ in about))


def _about(d: Diagnosis, *names: str) -> list[tuple[int, Finding]]:
    """The findings about an operand, with their numbers."""
    return [(i, f) for i, f in enumerate(d.findings, 1) if f.where in names or not set(f.where.split(", ")).isdisjoint(names)]


def _wrong(about: list[tuple[int, Finding]]) -> tuple[str, str]:
    text = "; ".join(f.title for _, f in about)
    return (UNDECIDED, f"suspected: {text}") if all(f.strength == SUSPECTED for _, f in about) else (WRONG, text)


def _verdict(o: Operand, contract: Contract | LinearContract, d: Diagnosis, state: str | None,
             about: list[tuple[int, Finding]]) -> tuple[str, str]:
    if about:
        return _wrong(about)
    compared = {EQUAL: (RIGHT, "its bytes equal the recipe's"), SAME_VALUES: (RIGHT, "other bytes, the same weights"),
                DIFFERENT: (WRONG, "not what the recipe makes of this checkpoint; no known fault explains it"),
                UNREAD: (UNCHECKED, "the kernel does not read it on this rank")}
    if state is not None:
        return compared[state]
    if d.kernel is None and d.truth is None and not d.operands and any(f.id == "contract-broken" for f in d.findings):
        return UNCHECKED, "the contract is broken elsewhere: correct that first"
    if o.key == "x_scale":
        if any(text.startswith("activation scales:") for text in d.open):
            return UNDECIDED, "this call cannot show in which order they lie"
        return RIGHT, "they lie in the order that the kernel reads"
    looked = {"x": "only NaN and inf are looked for", "experts": "only ids that do not exist are looked for",
              "router": "only their sums are looked at"}
    if o.key in looked:
        return UNCHECKED, looked[o.key]
    if not d.operands:
        return UNCHECKED, "that needs the checkpoint"
    if o.key in (*SCALARS, QUANTISED_WITH, "alpha"):
        return RIGHT, "equals the checkpoint's"
    return UNCHECKED, "no diagnosis looks at it"


def _activation(contract: Contract, call: Call, d: Diagnosis) -> Station:
    """The activation and its parameters, as one station."""
    names = [n for p in PARAMETERS for o in (contract.operand(f"swiglu_{p}"),) for n in (o.argument, o.title)]
    about = _about(d, "activation_type", *names)
    try:
        read = read_activation(contract, call.arguments)
        values = [f"{p} {_value(getattr(read, p))}" for p in PARAMETERS if getattr(read, p) is not None]
        said = f"{read.kind}, {', '.join(values)}" if values else f"{read.kind}, no alpha, beta or limit"
    except MxdebugError as error:
        said = f"{error.operand}: got {error.got}"
    verdict, why = _wrong(about) if about else (RIGHT, "equal the checkpoint's") if d.operands else (UNCHECKED, "that needs the checkpoint")
    return Station("activation", "parameters", CONFIG, (said,), ACTIVATION, verdict, why, tuple(i for i, _ in about))


def _value(t: Tensor) -> str:
    low, high = (f"{v:g}" for v in t.float().aminmax())
    return low if low == high else f"{low} to {high}"


def _output(call: Call, d: Diagnosis) -> tuple[str, str]:
    if not call.outputs:
        return UNCHECKED, f"none was recorded ({call.status})"
    if d.follows is None:
        return UNCHECKED, "it was not compared with an emulation"
    if d.follows:
        return RIGHT, "follows from what was passed"
    because = [f.title for f in d.findings if f.where.startswith(("output", "all tokens"))]
    return WRONG, "does not follow from what was passed" + (f": {'; '.join(because)}" if because else "")


# -- drawing ----------------------------------------------------------------------------------------------------------

LEFT, MIDDLE, RIGHTMOST = (0.0, 0.37), (0.43, 0.79), (0.85, 1.0)  # the columns, of the width
LETTERS, BELOW = 26, 40  # in a line of the left column, and of the box below, so that they fit a window of 900 pixels
TRUNK = -0.022  # from the checkpoint down to what is taken from it
ROW, GAP = 15, 7  # pixels a line, and between boxes


def draw(f: Flow) -> go.Figure:
    """Boxes and arrows: stages, operands with their verdicts, the kernel's steps."""
    says = ("Left: what the recipe does with the checkpoint's tensors. Middle: the operands that the call passed. "
            f"Right: the kernel's steps. Verdict: {f.verdict}" + "".join(f"; {i}: {t}" for i, t in enumerate(f.findings, 1)) + ".")
    left = {s.key: _left(s) for s in f.stations}
    name, own = f.checkpoint
    head = textwrap.wrap(name, LETTERS) + (textwrap.wrap(f"{GLYPHS[WRONG]} {own}", LETTERS) if own else [])
    top, rows = len(head) * ROW + 6 + GAP, {}
    for s in f.stations:
        height = max(2, len(left[s.key])) * ROW + 6
        rows[s.key] = (top, top + height)
        top += height + GAP
    output = textwrap.wrap(f"output {f.output[1]}", BELOW) + textwrap.wrap(f.distance, BELOW)
    bottom = top + 10 + len(output) * ROW + 8
    boxes = Boxes()
    boxes.box(LEFT, (0, len(head) * ROW + 6), head, COLOURS[WRONG] if own else figures.TEXT)
    from_file = [s for s in f.stations if s.source == FILE]
    if from_file:
        boxes.line((LEFT[0], TRUNK), (ROW, ROW))
        boxes.line((TRUNK, TRUNK), (ROW, max(middle(rows[s.key]) for s in from_file)))
    for s in f.stations:
        y = (middle(rows[s.key]),) * 2
        if s.source == FILE:
            boxes.arrow((TRUNK, LEFT[0]), y)
        boxes.box(LEFT, rows[s.key], left[s.key], figures.TEXT, dash="solid" if s.source == FILE else "dot", size=11)
        boxes.arrow((LEFT[1], MIDDLE[0]), y)
        numbers = f" ({', '.join(map(str, s.findings))})" if s.findings else ""
        boxes.box(MIDDLE, rows[s.key], [f"<b>{s.title}</b>", _mark(s.verdict, f" {s.verdict}{numbers}")], hover=s.why, **_frame(s.verdict))
        boxes.arrow((MIDDLE[1], RIGHTMOST[0]), y)
    x = (middle(RIGHTMOST),) * 2
    for step in f.steps:
        mine = [rows[s.key] for s in f.of(step)]
        boxes.box(RIGHTMOST, (mine[0][0], mine[-1][1]), [f"<b>{step}</b>"], figures.TEXT)
        boxes.arrow(x, (mine[-1][1], mine[-1][1] + (GAP if step != f.steps[-1] else GAP + 10)))
    verdict = f.output[0]
    boxes.box((MIDDLE[0], 1.0), (top + 10, bottom), [f"{_mark(verdict)} {output[0]}", *output[1:]], **_frame(verdict))
    figure = figures.figure(f.title, says, plot=int(bottom), below=10, headings=False, left=20)
    boxes.add_to(figure, (-0.03, 1.003), (bottom + 2, -2))
    return figure


def _mark(verdict: str, text: str = "") -> str:
    return f"<b>{GLYPHS[verdict]}{text}</b>"  # the frame has the colour: as text it would be too pale on white


def _frame(verdict: str) -> dict[str, Any]:
    return {"colour": COLOURS[verdict], "dash": "dash" if verdict == UNCHECKED else "solid", "width": 2.5 if verdict == WRONG else 1.5}


def _left(s: Station) -> list[str]:
    """The lines of the left box: where an operand comes from, or the recipe's stages."""
    if s.source != FILE:
        lines = [s.source, *s.stages] if s.source == CONFIG else [s.source]
    else:
        lines = list(s.stages) or ["as it is"]
    return [line for text in lines for line in textwrap.wrap(text, LETTERS + 6)]  # in smaller letters
