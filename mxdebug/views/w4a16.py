"""The W4A16 kernels on a GPU: what was recorded on an H200, and the same again on the GPU that is here."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..contracts import LINEAR_CONTRACTS
from ..diagnosis.linear_output import follows, linear_floor
from ..errors import MxdebugError
from ..faults import LinearSituation
from ..metrics import Comparison, compare
from ..recipes.w4a16.op import FLASHINFER, TRITON, implementation, mm_bf16_fp4
from ..recorded import ROOT

H200_TRITON = ROOT / "measured" / "h200_w4a16_triton.json"
_FIELDS = ("M", "N", "K", "layout", "activations_as_fp16", "elements", "differing", "relative_l2", "floor")


def load(file: Path = H200_TRITON) -> dict[str, Any]:
    """The record. Raises MxdebugError for a file that is no such record."""
    record = json.loads(file.read_text())
    if (
        not isinstance(record, dict)
        or not isinstance(record.get("cases"), list)
        or any(f not in c for c in record["cases"] for f in _FIELDS)
    ):
        raise MxdebugError(
            f"record {file.name}", f"cases with {', '.join(_FIELDS)}", "something else", "written by another version of mxdebug"
        )
    return record


def table(record: Mapping[str, Any] | None = None, least: int = 0) -> str:
    """A line a size and layout: mxdebug's own Triton kernel on an H200 against FlashInfer's trace reference. least: only layers of N from there on."""
    record = load() if record is None else record
    lines = [
        f"mxdebug's own Triton kernel (not FlashInfer's) on SM{record['sm']}: torch {str(record['torch']).split('+')[0]}, triton {record['triton']}",
        f"  {'layout':<6} {'tokens':>6} {'N':>5} {'K':>5}  {'bits differ':>20}  {'relative L2':>11}  {'floor':>8}",
    ]
    for c in record["cases"]:
        if c["N"] < least:
            continue
        lines.append(
            f"  {c['layout']:<6} {c['M']:>6} {c['N']:>5} {c['K']:>5}  {c['differing']:>8} of {c['elements']:>8}  {c['relative_l2']:>11.1e}  {c['floor']:>8.1e}"
            + ("  activations as fp16" if c["activations_as_fp16"] else "")
        )
    elements, differing = (sum(c[k] for c in record["cases"]) for k in ("elements", "differing"))
    lines.append(
        f"  in all {len(record['cases'])} cases, smaller ones among them, {elements - differing} of {elements} outputs are bit-identical;\n"
        f"  relative L2 is at most {max(c['relative_l2'] / c['floor'] for c in record['cases']):.2f} of the floor"
    )
    return "\n".join(lines)


@dataclass(frozen=True)
class Live:
    """What this machine's GPU gave for some calls, by name; `what` computed it; `not_run` says by name what did not run, and why."""

    what: str
    comparisons: tuple[tuple[str, Comparison, bool], ...]
    not_run: tuple[str, ...]

    @property
    def ok(self) -> bool:
        """Whether every output follows from what was passed."""
        return all(good for *_, good in self.comparisons)

    def __str__(self) -> str:
        lines = [f"{self.what}, run here"] if self.comparisons else []
        lines += [f"  {name}: {'follows' if good else 'DOES NOT FOLLOW'}: {c}" for name, c, good in self.comparisons]
        return "\n".join((*lines, *(f"not run here: {t}" for t in self.not_run)))


def live(calls: Sequence[tuple[str, LinearSituation]]) -> Live:
    """Run calls, right or wrong ones, on this GPU and compare with the emulation: FlashInfer's kernel where it is one of its GPUs, else our Triton kernel."""
    kernels = "; ".join(f"{c.function} on {', '.join(f'SM{s}' for s in c.sm)}" for c in LINEAR_CONTRACTS.values())
    if not torch.cuda.is_available():
        return Live("", (), (f"FlashInfer's {kernels}: no CUDA GPU", "mxdebug's own Triton kernel: no CUDA GPU (it needs SM80 or later)"))
    out, used, refused = [], set(), []
    for name, s in calls:
        a, b, scales, alpha = (s.arguments()[n].cuda() for n in ("a", "b", "b_descale", "alpha"))
        how = implementation(b)
        if how == TRITON and s.plan.view == "contiguous":
            refused.append(f"{name}: our kernel takes the strided view only")
            continue
        used.add(how)
        got, want = mm_bf16_fp4(a, b, scales, alpha).cpu(), s.recipe.contract.emulate(s.arguments())
        out.append((name, compare(got, want), follows(got, want, s.plan.padded[1], s.recipe.contract.see(s.arguments()).absolute())))
    missing = [] if FLASHINFER in used else [f"FlashInfer's {kernels}: this is {torch.cuda.get_device_name()}"]
    return Live(" and ".join(sorted(used)), tuple(out), (*missing, *refused))


def floor_of(k: int) -> str:
    """The floor for one K, with its derivation in one line."""
    return f"K {k}: sqrt(K * 2^-24 * 2^-8) = {linear_floor(k):.1e}"
