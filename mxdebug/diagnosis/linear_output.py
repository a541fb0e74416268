"""Evidence from what a linear layer wrote: does it follow from what was passed, and if not, what was done with it?"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ..contracts import LinearContract, LinearSeen
from ..contracts.cutedsl_w4a16 import FP16_LARGEST
from ..faults import FAULTS, LINEAR_FAULTS, LinearRun
from ..metrics import compare
from ..recipes.w4a16.plan import LinearPlan
from ..reference_linear import LinearLayer
from .finding import CONSISTENT, PROVED, Finding


def linear_floor(k: int) -> float:
    """The relative L2 distance that rounding makes between a W4A16 kernel and its emulation, on the average of many numbers.

    Weights are exact in 16 bits, so are products in float32; the order of K additions moves a sum by about K * 2^-24 of it. One result is
    stored, in bf16 with steps of 2^-8: it flips to its neighbour with probability K * 2^-24 / 2^-8 and is off by 2^-8 then, sqrt(K * 2^-32) in all.
    K 384: 3.0e-4; K 2880: 8.2e-4.
    """
    return math.sqrt(k * 2.0**-32)


def follows(got: Tensor, want: Tensor, k: int, size: Tensor | None = None, before: Tensor | None = None) -> bool:
    """Whether an output is the emulated one. NaN and inf must stand in the same places; then two limits must hold, both derived.

    Each token: `linear_floor` of its length, and one step (2^-7) of its largest number, since in a narrow layer a single flip is more than the floor.
    Each number: two sums of the same K products differ by at most 2 * K * 2^-24 of the sum of their absolute values, and each result that was stored
    as bf16 may flip by one step, at most 2^-7 of it. A lost row of small weights is far beyond that, and in the first limit it hides.
    size    [M, N]: the sums of absolute products (LinearSeen.absolute); None: only the first limit
    before  [M, N]: the kernel's output, where a bias was added to it and the result stored once more; None: no bias
    """
    if got.shape != want.shape or not compare(got, want).masks_equal:
        return False
    a, b = (t.double().nan_to_num(0.0, 0.0, 0.0).reshape(-1, t.shape[-1]) for t in (got, want))
    if not b.numel():
        return True
    first = torch.zeros_like(b) if before is None else before.double().nan_to_num(0.0, 0.0, 0.0).reshape(b.shape)
    stored = (b, first) if before is not None else (b,)
    if bool(((a - b).norm(dim=1) > sum(linear_floor(k) * t.norm(dim=1) + 2.0**-7 * t.abs().amax(dim=1) for t in stored)).any()):
        return False
    if size is None:
        return True
    most = 2 * k * 2.0**-24 * size.double().nan_to_num(0.0, 0.0, 0.0).reshape(b.shape)
    return bool(
        ((a - b).abs() <= most + 2.0**-7 * (torch.maximum(a.abs(), b.abs()) + first.abs()) + torch.finfo(torch.bfloat16).tiny).all()
    )


def settled(seen: LinearSeen, fits: Callable[[Tensor], bool]) -> LinearSeen:
    """The call with the tactic that its output shows: for one token on SM12x the GEMV (no conversion to fp16), or the MMA kernel where only that fits.

    fits  whether the recorded output comes from this output of the kernel, [M, N padded]
    """
    if not seen.may_convert or fits(seen.emulate()):
        return seen
    other = replace(seen, products=torch.float16)
    return other if fits(other.emulate()) else seen


def examine_kernel(seen: LinearSeen, output: Tensor, arguments: Mapping[str, object]) -> tuple[bool, list[Finding]]:
    """(whether the kernel's output follows from what was passed, what explains it where it does not). seen: as `settled`."""
    want, k = seen.emulate(), seen.weight.columns
    if follows(output, want, k, seen.absolute()):
        return True, []
    given = arguments.get("out")
    if isinstance(given, Tensor) and given.shape == output.shape and compare(output, given).bit_identical:
        return False, [
            Finding(
                FAULTS["output-unwritten"],
                PROVED,
                "all tokens",
                "the output equals, bit for bit, the memory that the call was given to write into",
            )
        ]
    if not output.any():
        return False, [
            Finding(
                FAULTS["output-unwritten"], CONSISTENT, "all tokens", "every element of the output is zero; the operands do not give zeros"
            )
        ]
    return False, []


def examine_activations(contract: LinearContract, x: Tensor, products: torch.dtype) -> list[Finding]:
    """What the activations say by themselves: NaN or inf, and numbers that become inf where the kernel multiplies in fp16."""
    out, o = [], contract.operand("x")
    bad = ~torch.isfinite(x).all(1)
    if bad.any():
        out.append(
            Finding(
                FAULTS["input-not-finite"],
                PROVED,
                o.argument,
                f"NaN or inf in {int(bad.sum())} of {len(bad)} tokens, the first is token {int(bad.nonzero()[0])}",
            )
        )
    if products == torch.float16 and x.dtype == torch.bfloat16:
        large = torch.isfinite(x) & (x.abs().float() > FP16_LARGEST)
        if large.any():
            token, column = large.nonzero()[0].tolist()
            out.append(
                Finding(
                    FAULTS["activations-beyond-fp16"],
                    PROVED,
                    o.argument,
                    f"{int(large.sum())} of {x.numel()} activations are beyond {FP16_LARGEST:.0f}, the first is "
                    f"{x[token, column].item():g} in token {token}, column {column}",
                )
            )
    return out


def examine_refused(contract: LinearContract, plan: LinearPlan, x: Tensor) -> list[Finding]:
    """Why the kernel refuses activations: their dtype, or the number of columns that they were padded to."""
    out, o, width = [], contract.operand("x"), x.shape[-1]
    if x.dtype != torch.bfloat16:
        out.append(Finding(FAULTS["activations-not-bf16"], PROVED, o.argument, f"{x.dtype} {list(x.shape)}"))
    want, bytes_ = plan.padded[1], plan.weights_padding_bytes
    if width != want and width == plan.k + bytes_:
        out.append(
            Finding(
                FAULTS["x-padded-by-bytes"],
                PROVED,
                o.argument,
                f"{width} columns: {plan.k} and {bytes_}, the weight's padding in bytes; the kernel reads {want}",
            )
        )
    elif width != want and width == plan.k:
        out.append(Finding(FAULTS["x-not-padded"], PROVED, o.argument, f"{width} columns, the layer's own; the kernel reads {want}"))
    return out


def where_off(got: Tensor, want: Tensor, layer: LinearLayer) -> str:
    """In which tokens, columns and parts an output [M, N or more] is further from `want` than one step and the floor, in words; "" where nowhere."""
    a, b = (t[:, : layer.n].double().nan_to_num(1e30, 1e30, -1e30) for t in (got, want))
    off = (a - b).abs() > 2.0**-6 * b.abs() + 2.0**-6 * b.square().mean().sqrt()
    if not off.any():
        return ""
    tokens, columns = off.any(1).nonzero().flatten().tolist(), off.any(0).nonzero().flatten().tolist()
    text = f"it is off in {len(tokens)} of {len(off)} tokens" + (
        f" ({', '.join(map(str, tokens[:6]))}{',...' if len(tokens) > 6 else ''})" if len(tokens) < len(off) else ""
    )
    text += f" and {len(columns)} of {layer.n} columns" + (f" ({columns[0]} to {columns[-1]})" if len(columns) < layer.n else "")
    parts = [name.rpartition(".")[2] for name, p in zip(layer.names, off.split(list(layer.rows), 1)) if p.any()]
    return text + (f", all of them in {', '.join(parts)}" if len(parts) < len(layer.names) else "")


def from_kernel(got: Tensor, kernel: Tensor, bias: Tensor | None, k: int, size: Tensor | None = None) -> bool:
    """Whether a layer's output [M, N] is the kernel's [M, N], with the bias where there is one."""
    return follows(got, kernel if bias is None else kernel + bias, k, size, None if bias is None else kernel)


_WIDTH = re.compile(r"a\.shape\[1\]=(\d+) but .*?(?:encodes K=| is )(\d+)")
_SIZES = re.compile(r"size of tensor a \((\d+)\) must match the size of tensor b \((\d+)\)")


def examine_run(
    contract: LinearContract, run: LinearRun, plan: LinearPlan, seen: LinearSeen | None, bias: Tensor | None
) -> tuple[bool, list[Finding], str]:
    """(whether what the layer handed on follows, findings, what is open). seen: its kernel's call; None where that is refused."""
    n, padded = plan.n, plan.padded[0]
    if run.output is None:
        sizes = _SIZES.search(run.error)
        if sizes and n != padded and {int(s) for s in sizes.groups()} == {n, padded}:
            return (
                False,
                [
                    Finding(
                        FAULTS["bias-before-slice"],
                        PROVED,
                        "output",
                        f"the layer raised: {run.error.splitlines()[0][:160]}; {padded} is N with its padding, {n} without",
                    )
                ],
                "",
            )
        width = _WIDTH.search(run.error)
        if width and int(width[2]) == plan.padded[1]:
            return False, examine_refused(contract, plan, torch.empty(0, int(width[1]), dtype=torch.bfloat16)), ""
        return False, [], f"the layer raised: {run.error.splitlines()[0][:200]}" if run.error else "the layer handed on nothing"
    if seen is None:
        return False, [], "the kernel refuses these arguments, so an output cannot come from them"
    shape, size, kernel, got = tuple(run.x.shape[:-1]), seen.absolute(), seen.emulate(), run.output.reshape(-1, run.output.shape[-1])

    def same(width: int, with_bias: Tensor | None) -> bool:
        return from_kernel(got[:, :width], kernel[:, :width], with_bias, plan.padded[1], size[:, :width])

    width = run.output.shape[-1]
    if width == padded != n:
        held = next((what for what, b in (("with bias", bias), ("without bias", None)) if same(n, b)), None)
        if held is not None:
            return (
                True,
                [
                    Finding(
                        FAULTS["output-not-sliced"],
                        PROVED,
                        "output",
                        f"shape {list(run.output.shape)}, the first {n} of {width} columns are the layer's, {held}",
                    )
                ],
                "",
            )
        return False, [Finding(FAULTS["output-not-sliced"], PROVED, "output", f"shape {list(run.output.shape)} where N is {n}")], ""
    if tuple(run.output.shape) != (*shape, n):
        return False, [], f"the output has shape {list(run.output.shape)}, the layer's is {[*shape, n]}"
    if same(n, bias):
        return True, [], ""
    if bias is not None and same(n, None):
        return (
            True,
            [
                Finding(
                    FAULTS["bias-missing"],
                    PROVED,
                    "output",
                    f"the output is the kernel's without the bias, whose norm is {bias.float().norm():.3f}",
                    advice=LINEAR_FAULTS["bias-missing"].advice,
                )
            ],
            "",
        )
    if bias is not None and from_kernel(got, kernel[:, :n] + bias, bias, plan.padded[1], size[:, :n] + bias.abs().float()):
        return (
            True,
            [
                Finding(
                    FAULTS["bias-twice"],
                    PROVED,
                    "output",
                    f"the output is the kernel's with the bias twice; its norm is {bias.float().norm():.3f}",
                )
            ],
            "",
        )
    alone = torch.zeros_like(run.output) if bias is None else bias.to(run.output.dtype).expand_as(run.output)
    if torch.equal(run.output, alone):
        return (
            False,
            [
                Finding(
                    FAULTS["output-unwritten"],
                    CONSISTENT,
                    "output",
                    "the output is the bias alone: the kernel's own part is zero"
                    if bias is not None
                    else "every element of the output is zero; the operands do not give zeros",
                )
            ],
            "",
        )
    return False, [], ""
