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
_FIELDS = ("size", "fault", "struck", "elements", "differing", "kernel_relative_l2",
           "truth_relative_l2", "truth_cosine", "truth_norm_ratio")


def load(file: Path = H200_MXFP4_CUTLASS_BF16) -> dict[str, Any] | None:
    """The record in that file; None where this installation has no such file. Raises MxdebugError for a file that is no such record."""
    if not file.exists():
        return None
    record = json.loads(file.read_text())
    if not isinstance(record, dict) or not isinstance(record.get("cases"), list):
        raise MxdebugError(f"record {file.name}", "an object with a list of cases", type(record).__name__,
                           "a file of another kind or version")
    for case in record["cases"]:
        missing = [f for f in _FIELDS if f not in case]
        if missing:
            raise MxdebugError(f"record {file.name}", f"cases with {', '.join(_FIELDS)}", f"one without {', '.join(missing)}",
                               "written by another version of mxdebug")
    return record


def table(record: Mapping[str, Any] | None = None, faults: Sequence[str] | None = None, each_operand: bool = True) -> str:
    """One line a case: the fault and what it struck, how far the GPU's output is from the checkpoint's own, and from the emulation.

    record  as `mxdebug.verify.measure` returns it; the one that ships with the package by default
    faults  which faults to show, "none" for right calls; all by default
    each_operand  whether to show a fault also where it strikes one operand alone; if not, the operands are left out of the lines
    """
    record = load() if record is None else record
    if record is None:
        return f"not shown here: {H200_MXFP4_CUTLASS_BF16.name} is not part of this installation"
    cases = [c for c in record["cases"] if faults is None or c["fault"] in faults]
    if not each_operand:
        most = {}
        for c in cases:
            key = (c["size"], c["fault"])
            most[key] = max(most.get(key, 0), len(_operands(c)))
        cases = [c for c in cases if len(_operands(c)) == most[c["size"], c["fault"]]]
    columns = {"fault": [c["fault"] for c in cases], "struck": [c["struck"] or "-" for c in cases], "tokens": [_layer(c)[1] for c in cases]}
    if not each_operand:
        del columns["struck"]
    widths = {name: max([len(name), *map(len, texts)]) for name, texts in columns.items()}
    left = sum(widths.values()) + 2 * len(widths)
    lines = [f"{record['path']}, run on SM{record['sm']}: FlashInfer {record['flashinfer']}, torch {str(record['torch']).split('+')[0]}",
             f"{'':<{left}}  kernel against the checkpoint    against emulation",
             "  " + "  ".join(f"{name:<{w}}" for name, w in widths.items()) + "  relative L2  cosine  norm ratio  bits differ"]
    for layer in dict.fromkeys(_layer(c)[0] for c in cases):
        lines.append(layer)
        for i, c in enumerate(cases):
            if _layer(c)[0] == layer:
                texts = [f"{columns[name][i]:<{w}}" for name, w in widths.items()]
                texts += [_number(c["truth_relative_l2"], 11), _number(c["truth_cosine"], 6), _number(c["truth_norm_ratio"], 10)]
                lines.append("  " + "  ".join(texts) + f"  {c['differing']:>5} of {c['elements']}")
    total, differing = sum(c["elements"] for c in cases), sum(c["differing"] for c in cases)
    furthest = max((c["kernel_relative_l2"] for c in cases), default=0.0)
    lines.append(f"kernel and emulation: {total - differing} of {total} numbers bit-identical; "
                 f"relative L2 of any call at most {furthest:.6f}")
    return "\n".join(lines)


def _operands(case: Mapping[str, Any]) -> list[str]:
    return [name for name in case["struck"].split(", ") if name]


def _layer(case: Mapping[str, Any]) -> tuple[str, str]:
    """A size's name in two: the layer, and the tokens with what else the call states."""
    experts, shape, *rest = case["size"].split(", ")
    return f"{experts}, {shape}", ", ".join(rest)


def _number(value: float | None, width: int) -> str:
    return f"{'NaN':>{width}}" if value is None or math.isnan(value) else f"{value:>{width}.3f}"


README_FAULTS = ("none", "rows-gate-up", "rows-interleaved", "padding-at-end", "scales-linear", "weights-linear", "nibbles-swapped",
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
