"""What was measured on a GPU: the records of `mxdebug.verify` that ship with the package, as tables."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import MxdebugError
from ..recorded import ROOT

H200_MXFP4_CUTLASS_BF16 = ROOT / "measured" / "h200_mxfp4_cutlass_bf16.json"
_FIELDS = ("size", "fault", "struck", "elements", "differing", "max_ulps", "truth_relative_l2", "truth_cosine", "truth_norm_ratio")


def load(file: Path = H200_MXFP4_CUTLASS_BF16) -> dict[str, Any] | None:
    """The record in that file; None where this installation has no such file. Raises MxdebugError for a file that is no such record."""
    if not file.exists():
        return None
    record = json.loads(file.read_text())
    if not isinstance(record, dict) or not isinstance(record.get("cases"), list):
        raise MxdebugError(f"record {file.name}", "an object with a list of cases", type(record).__name__, "a file of another kind or version")
    for case in record["cases"]:
        missing = [f for f in _FIELDS if f not in case]
        if missing:
            raise MxdebugError(f"record {file.name}", f"cases with {', '.join(_FIELDS)}", f"one without {', '.join(missing)}", "written by another version of mxdebug")
    return record


def table(record: Mapping[str, Any] | None = None, faults: Sequence[str] | None = None) -> str:
    """One line a case: the fault and what it struck, how far the GPU's output is from what the checkpoint means, and from the emulation.

    record  as `mxdebug.verify.measure` returns it; the one that ships with the package by default
    faults  which faults to show, "none" for right calls; all by default
    """
    record = load() if record is None else record
    if record is None:
        return f"not shown here: {H200_MXFP4_CUTLASS_BF16.name} is not part of this installation"
    cases = [c for c in record["cases"] if faults is None or c["fault"] in faults]
    struck = max([len("struck"), *(len(_struck(c)) for c in cases)])
    fault = max([len("fault"), *(len(c["fault"]) for c in cases)])
    lines = [f"{record['path']}: kernel run on SM{record['sm']}, FlashInfer {record['flashinfer']}, torch {str(record['torch']).split('+')[0]}",
             f"{'':<{fault + struck + 4}}  output against the checkpoint's own   kernel against emulation",
             f"  {'fault':<{fault}}  {'struck':<{struck}}  {'relative L2':>11} {'cosine':>8} {'norm ratio':>10}   differing / elements"]
    for size in dict.fromkeys(c["size"] for c in cases):
        lines.append(size)
        for c in cases:
            if c["size"] == size:
                lines.append(f"  {c['fault']:<{fault}}  {_struck(c):<{struck}}  {_number(c['truth_relative_l2'], 11)} {_number(c['truth_cosine'], 8)} "
                             f"{_number(c['truth_norm_ratio'], 10)}   {c['differing']:>9} / {c['elements']}")
    total, differing = sum(c["elements"] for c in cases), sum(c["differing"] for c in cases)
    most = max((c["max_ulps"] for c in cases if c["differing"]), default=0)
    lines.append(f"kernel and emulation: {total - differing} of {total} elements are bit-identical" + (f"; the others differ by at most {most} ulp" if differing else ""))
    return "\n".join(lines)


def _struck(case: Mapping[str, Any]) -> str:
    return case["struck"] or "-"


def _number(value: float | None, width: int) -> str:
    return f"{'NaN':>{width}}" if value is None or math.isnan(value) else f"{value:>{width}.3f}"


README_FAULTS = ("none", "rows-gate-up", "rows-interleaved", "padding-at-end", "scales-not-folded", "weights-not-interleaved", "nibbles-swapped",
                 "scales-cast-by-value", "experts-rolled", "bias-missing", "swiglu-alpha-lost", "swiglu-beta-lost", "swiglu-limit-lost", "router-squared")


def readme_table(record: Mapping[str, Any]) -> str:
    """The README's table: on the largest layer, each fault on all operands that it can strike; for "none" the call with most tokens."""
    largest = max(record["cases"], key=lambda c: c["elements"])["size"].split(" tokens")[0].rsplit(", ", 1)[0]
    rows = ["| fault | output of the H200 against the checkpoint's own: relative L2 | cosine | norm ratio | kernel = emulation, bit for bit |",
            "|---|---|---|---|---|"]
    for fault in README_FAULTS:
        cases = [c for c in record["cases"] if c["fault"] == fault and c["size"].startswith(largest) and "tp " not in c["size"] and "ep " not in c["size"]]
        if not cases:
            continue
        c = max(cases, key=lambda c: (c["elements"], len(c["struck"])))
        rows.append(f"| `{fault}` | {c['truth_relative_l2']:.3f} | {c['truth_cosine']:.3f} | {c['truth_norm_ratio']:.3f} | "
                    f"{c['elements'] - c['differing']:,} of {c['elements']:,} |")
    return "\n".join(rows)
