"""One converter, one path, one layer: run, decode, compare, name what is wrong with which operand."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..contracts import LINEAR_CONTRACTS, Contract, Operand
from ..diagnosis import Finding, Source
from ..diagnosis import operands as operand_evidence
from ..diagnosis import scalars as scalar_evidence
from ..diagnosis.given import Given
from ..errors import MxdebugError
from ..faults import FAULTS, OPERANDS, QUANTISED_WITH, SCALARS
from ..layouts import RowOrder
from ..recipes import RECIPES, Plan, Recipe, recipe
from ..reference import MoELayer, Parallel
from .layers import loaded, made_layer
from .standins import replaced

# Loaded parameters (see layers.loaded) -> operands by key: w13, w13_scale, w2, w2_scale; w13_bias and w2_bias where there are any;
# NVFP4's w13_alpha, w2_alpha, a2_gscale, g1_scale_c where the converter makes them.
Converter = Callable[[dict[str, Tensor]], Mapping[str, "Tensor | None"]]


@dataclass(frozen=True)
class Verdict:
    """What became of one operand. faults: ids of the catalogue, empty where it is right or where no known fault explains it."""

    operand: str
    title: str
    right: bool
    text: str = ""
    faults: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.title}: " + ("right" if self.right else f"wrong: {self.text}")


@dataclass(frozen=True)
class Audit:
    """The answer for one converter, path and layer.

    layer     the layer in words
    verdicts  one for each operand that the converter makes
    open      what was not looked at, or stays ambiguous
    refused   why the engine takes no such layer here; then there are no verdicts
    failed    how the converter ended without a result; then there are no verdicts
    """

    path: str
    checkpoint: str
    converter: str
    layer: str
    verdicts: tuple[Verdict, ...] = ()
    open: tuple[str, ...] = ()
    refused: str = ""
    failed: str = ""

    @property
    def ok(self) -> bool:
        """Whether every operand is what the kernel must get."""
        return bool(self.verdicts) and all(v.right for v in self.verdicts)

    @property
    def wrong(self) -> tuple[Verdict, ...]:
        return tuple(v for v in self.verdicts if not v.right)

    def verdict(self, operand: str) -> Verdict:
        """The verdict of an operand by its key; MxdebugError lists the keys."""
        for v in self.verdicts:
            if v.operand == operand:
                return v
        raise MxdebugError("operand", f"one of {', '.join(v.operand for v in self.verdicts)}", repr(operand))

    @property
    def faults(self) -> dict[str, tuple[str, ...]]:
        """Fault id -> keys of the operands that it struck."""
        ids = dict.fromkeys(f for v in self.verdicts for f in v.faults)
        return {f: tuple(v.operand for v in self.verdicts if f in v.faults) for f in ids}

    @property
    def outcome(self) -> str:
        return "refused" if self.refused else "failed" if self.failed else "right" if self.ok else "wrong"

    def __str__(self) -> str:
        head = f"{self.path}, {self.checkpoint}, {self.layer}: {self.outcome}  ({self.converter})"
        if self.refused or self.failed:
            return f"{head}\n  {self.refused or self.failed}"
        rights = [v.title for v in self.verdicts if v.right]
        return "\n".join(
            [
                head,
                *(f"  right  {', '.join(rights)}" for _ in rights[:1]),
                *(f"  {line}" for line in self.lines),
                *(f"  open   {t}" for t in self.open),
            ]
        )

    @property
    def lines(self) -> tuple[str, ...]:
        """What is wrong, a line for each distinct text, with the operands that share it."""
        texts = dict.fromkeys(v.text for v in self.wrong)
        return tuple(f"wrong  {', '.join(v.title for v in self.wrong if v.text == text)}: {text}" for text in texts)


def audit(
    converter: Converter,
    path: str,
    layer: MoELayer | None = None,
    *,
    checkpoint: str | None = None,
    engine: str = "vllm",
    rows: RowOrder | None = None,
    padded: tuple[int, int] | None = None,
    elsewhere: Sequence[str] = (),
    name: str | None = None,
) -> Audit:
    """Run a converter on the CPU and say of each operand whether it is what the path's kernel must get, or which fault it has.

    converter   loaded parameters by key -> operands by key, in any dtype and shape that holds the same bytes (`layers.loaded` says what
                it is given; wrap an engine's own signature in a lambda). It runs inside `replaced`, on tensors of its own
    path        vLLM's name, as in mxdebug.contracts
    layer       what the checkpoint holds; None: `made_layer(path)`, with which every fault shows
    checkpoint  a checkpoint kind for which there is a recipe of `engine`; None: the path's first
    rows        the order of gate and up in the file, where it is not that of this kind
    padded      (intermediate, hidden) that the engine allocates, where they are not vLLM's
    elsewhere   keys of global scales that other code makes; without that a missing one is wrong
    Raises MxdebugError for an unknown path or kind, and for a result with no operands in it; what the converter raises passes through.
    """
    if any(p == path or p.startswith(f"{path}/") for p in LINEAR_CONTRACTS):
        raise MxdebugError("path", "one of a mixture of experts", path, "this is a linear layer's: audit_linear and assert_linear_keeps_contract")
    if checkpoint is None:
        checkpoint = next((r.checkpoint for r in RECIPES if (r.engine, r.path) == (engine, path)), "")
    r = recipe(engine, path, checkpoint)
    own, layer = layer is not None, made_layer(path) if layer is None else layer
    plan, given = r.plan(layer), loaded(r, layer, rows=rows, padded=padded)
    with replaced(r.contract.sm[0]):
        made = converter(given)
    if not isinstance(made, Mapping) or not {"w13", "w2"} <= set(made):
        got = ", ".join(map(str, made)) if isinstance(made, Mapping) else type(made).__name__
        raise MxdebugError(
            "the converter's result",
            "a mapping with w13, w13_scale, w2, w2_scale",
            got,
            "a tuple: name its items in a lambda around the converter",
        )
    known = {*OPERANDS, *SCALARS, QUANTISED_WITH}
    if odd := [k for k in made if k not in known]:
        raise MxdebugError("the converter's result", f"keys among {', '.join(sorted(known))}", ", ".join(map(str, odd)))
    what = f"{layer.experts} experts, hidden {layer.hidden}, intermediate {layer.intermediate}" + (
        "" if layer.gate is not None else ", no gate"
    )
    if rows is not None and rows != r.rows:
        what += f", rows {rows.name}"
    verdicts, open_ = _judge(r, plan, layer, made, elsewhere, own)
    return Audit(path, checkpoint, name or getattr(converter, "__name__", "converter"), what, verdicts, open_)


def assert_keeps_contract(converter: Converter, path: str, layer: MoELayer | None = None, **options: Any) -> None:
    """For an engine's own tests: AssertionError with the readable audit unless every operand is right. Options as in `audit`."""
    __tracebackhide__ = True
    found = audit(converter, path, layer, **options)
    if not found.ok:
        raise AssertionError(str(found))


# -- reading the result ---------------------------------------------------------------------------------------------


def _judge(r: Recipe, plan: Plan, layer: MoELayer, made: Mapping[str, Tensor | None], elsewhere: Sequence[str],
           given: bool) -> tuple[tuple[Verdict, ...], tuple[str, ...]]:
    c, right = r.contract, plan.convert(layer)
    operands, unreadable, open_ = dict(right), {}, []
    for o in _read(c, right, made):
        form = plan.forms.get(o.key)
        linear = 0 if form is None or not o.key.endswith("_scale") else layer.experts * form.halves * form.padded_rows * form.padded_columns
        if o.key in elsewhere and made.get(o.key) is None:
            open_.append(f"{o.title}: made elsewhere; not looked at")
        elif isinstance(t := _bytes(o, made.get(o.key), right[o.key], linear), Tensor):
            operands[o.key] = t
        else:  # judged by its size or dtype alone; the right operand stands in, so that the others can be read
            unreadable[o.key] = t
    x = plan.quantise(torch.zeros(1, layer.hidden), right)
    arguments = plan.call(operands, layer.activation, x, torch.zeros(1, 1, dtype=torch.int32), torch.ones(1, 1))
    evidence = operand_evidence.examine(c, plan, Source(layer, Parallel()), arguments)
    findings = [
        *evidence.findings,
        *(f for f in scalar_evidence.joined(scalar_evidence.examine(Given.of(c, arguments), plan, layer)) if f.id != "global-shared-by-halves"),
    ]  # that one is the checkpoint's
    verdicts = []
    for o in _read(c, right, made):
        if o.key in unreadable:
            verdicts.append(unreadable[o.key])
        elif o.key in evidence.unexplained:
            verdicts.append(Verdict(o.key, o.title, False, evidence.unexplained[o.key].removeprefix(f"{o.title}: "), _ids(findings, o)))
        elif o.key not in elsewhere or made.get(o.key) is not None:
            mine = [f for f in findings if o.title in f.where.split(", ")]
            verdicts.append(
                Verdict(o.key, o.title, not mine and o.key not in evidence.broken, "; ".join(_words(f, o) for f in mine), _ids(findings, o))
            )
    if given and layer.gate is not None and layer.gate.global_scale is not None and not torch.equal(layer.gate.global_scale, layer.up.global_scale):
        open_.append("this layer's w1 and w3 have different global scales: the recipe takes w1's for both, which is wrong for w3 [global-shared-by-halves]")
    open_ += [f"{c.operand(k).title}: other bytes than the recipe's, the same weights" for k in evidence.same_values]
    titles = {v.title for v in verdicts if not v.right}
    return tuple(verdicts), (*open_, *(t for t in evidence.open if t.split(": ")[0] in titles))


def _read(c: Contract, right: Mapping[str, Tensor | None], made: Mapping[str, Tensor | None]) -> Iterator[Operand]:
    """The operands that the kernel reads of this layer: weights, scales, biases, global scales; and what the engine quantises activations with, where it is made."""
    yield from (o for o in c.operands if right.get(o.key) is not None)
    yield from (o for o in c.inputs if o.key in right and (o.key in SCALARS or o.key == QUANTISED_WITH and made.get(o.key) is not None))


def _ids(findings: list[Finding], o: Operand) -> tuple[str, ...]:
    return tuple(f.id for f in findings if o.title in f.where.split(", "))


def _words(f: Finding, o: Operand) -> str:
    detail = (
        f"; {f.evidence}"
        if o.key in (*SCALARS, QUANTISED_WITH) or f.id in ("rows-unnamed", "layout-other", "padding-not-zero", "operand-of-another-expert")
        else ""
    )
    return f"{f.title} [{f.id}]{detail}. Fix: {f.fix}"


def _bytes(o: Operand, t: Tensor | None, right: Tensor, linear: int) -> Tensor | Verdict:
    """The converter's tensor in the shape and dtype that the contract starts from, or what is wrong with it. linear: bytes of linear scales."""
    if t is None and o.optional:
        fault = FAULTS["bias-missing"]
        return Verdict(o.key, o.title, False, f"{fault.title} [{fault.id}]. Fix: {fault.fix}", (fault.id,))
    if not isinstance(t, Tensor):
        return Verdict(o.key, o.title, False, f"the converter returns {'none' if t is None else type(t).__name__}; expected a tensor")
    t = t.detach()
    strided = f"not contiguous: shape {list(t.shape)} with strides {list(t.stride())}; kernels take a pointer and no strides"
    if right.is_floating_point():  # biases and global scales: values, not bytes
        if t.dtype == right.dtype and t.numel() == 1 and " or " in o.shape:  # one number for all experts
            return t.reshape(-1).expand(right.shape).contiguous()
        if t.dtype != right.dtype or t.numel() != right.numel() or o.key in SCALARS and t.dim() != 1:
            return Verdict(o.key, o.title, False, f"expected {right.dtype} {list(right.shape)}, got {t.dtype} {list(t.shape)}")
        return t.reshape(right.shape) if t.is_contiguous() else Verdict(o.key, o.title, False, strided)
    if t.is_floating_point() and t.element_size() > 1:
        return Verdict(o.key, o.title, False, f"expected {right.numel()} bytes, got numbers of {t.dtype}: bytes must be viewed, never cast")
    flat = o.payload(t) if t.dim() == 6 else t.contiguous().view(torch.uint8)
    if flat.numel() != right.numel():
        return Verdict(
            o.key,
            o.title,
            False,
            f"expected {right.numel()} bytes as {list(right.shape)}, got {flat.numel()} as {t.dtype} {list(t.shape)}: "
            + ("as many as linear scales have: not swizzled [scales-linear]" if flat.numel() == linear else "another size, padding left out, or padded otherwise"),
            ("scales-linear",) if flat.numel() == linear else (),
        )
    if t.dim() != 6 and not t.is_contiguous():
        return Verdict(o.key, o.title, False, strided)
    return flat.reshape(right.shape)
