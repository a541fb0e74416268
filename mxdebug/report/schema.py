"""A diagnosis as JSON, for scripts and continuous integration.

    {"schema": 1,
     "mxdebug": "0.1.0",                      the version that wrote this
     "dump": "flashinfer_dumps",              names only, never a path
     "checkpoint": "gpt-oss-20b" or null,
     "command": "mxdebug diagnose ...",       makes the diagnosis again
     "ok": false,                             every call is right
     "calls": [...]}                          in the order of the dump; one call is a list of one

A call:

    name         of its folder, or of a run's file
    function     "cutlass_fused_moe"; "" for a run of a linear layer
    status       completed, crashed, pending flush, unreadable, missing; run
    versions     {"flashinfer": "0.7.4", "torch": ...} of the dump
    error        null, or {operand, expected, got, reason} where the call could not be read: verdict is then "not read", and what
                 follows it is empty or null
    verdict      right; wrong; wrong, not explained; undecided; crash dump; pending flush; not read
    ok           verdict is "right"
    summary      one sentence
    findings     [{id, title, strength, where, evidence, effect, fix, reports}], strongest first
                 strength: proved, consistent, suspected; where: operands' titles in one text; effect: relative L2 by which this
                 finding alone moves the output, null where it was not computed; reports: ["vllm#51038", ...]
    facts        {"call": ..., "path": ..., "layer": ...}: what was called, and where
    comparisons  {kernel, truth, floor}, each null or the object below
                 kernel: recorded output against the emulation of what was passed; truth: output against what the checkpoint means;
                 floor: the same for a right call
    checked      what was looked at; open: what this data could not have shown, or what stays undecided: lists of sentences
    operands     {"w13": "equal", ...}: equal; other bytes, the same weights; different; not read; {} without a checkpoint
    follows      whether the recorded output follows from what was passed; null where that was not looked at

A comparison:

    elements     numbers compared
    differing    of them are not bit-identical; max_ulps: by up to so many units in the last place; bit_identical: none differs;
                 all three null where bits cannot be compared, as of two dtypes
    masks_equal  NaN, inf and -inf stand in the same places
    cosine, norm_ratio, relative_l2   over elements that are finite in both

JSON has no NaN and no inf: NaN (undefined) is null, inf is the text "inf", and -inf "-inf". New keys may come; the meaning of these
changes only with the number of the schema.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from ..diagnosis import Diagnosis, Finding
from ..errors import MxdebugError
from ..metrics import Comparison
from ..files import write
from ..private import Private
from .record import Entry, Report, mxdebug_version

SCHEMA = 1
Json = dict[str, Any]


def write_json(report: Report, file: Path) -> None:
    """Write a report as JSON (see this module). Raises MxdebugError where the file cannot be written."""
    write(file, json.dumps(as_dict(report), indent=1, allow_nan=False) + "\n", "--json")


def as_dict(report: Report) -> Json:
    """The object that `write_json` writes."""
    hide = report.private
    return {
        "schema": SCHEMA,
        "mxdebug": mxdebug_version(),
        "dump": hide(report.dump.resolve().name),
        "checkpoint": None if report.checkpoint is None else hide(report.checkpoint.resolve().name),
        "command": hide(report.command()),
        "ok": all(e.verdict == "right" for e in report.entries),
        "calls": [_call(e, hide) for e in report.entries],
    }


def _call(e: Entry, hide: Private) -> Json:
    head: Json = {
        "name": hide(e.name),
        "function": hide(e.function),
        "status": e.status,
        "versions": {k: hide(v) for k, v in e.versions.items()},
    }
    if isinstance(e.diagnosis, MxdebugError):
        error = e.diagnosis
        return head | {
            "error": {k: hide(str(getattr(error, k))) for k in ("operand", "expected", "got", "reason")},
            "verdict": e.verdict,
            "ok": False,
            "summary": hide(str(error)),
            "findings": [],
            "facts": {},
            "comparisons": {"kernel": None, "truth": None, "floor": None},
            "checked": [],
            "open": [],
            "operands": {},
            "follows": None,
        }
    d: Diagnosis = e.diagnosis
    return head | {
        "error": None,
        "verdict": d.verdict,
        "ok": d.ok,
        "summary": hide(d.summary),
        "findings": [_finding(f, hide) for f in d.findings],
        "facts": {hide(label): hide(text) for label, text in d.call},
        "comparisons": {k: _comparison(getattr(d, k)) for k in ("kernel", "truth", "floor")},
        "checked": [hide(t) for t in d.checked],
        "open": [hide(t) for t in d.open],
        "operands": {hide(key): state for key, state in d.operands},
        "follows": d.follows,
    }


def _finding(f: Finding, hide: Private) -> Json:
    return {
        "id": f.id,
        "title": hide(f.title),
        "strength": f.strength,
        "where": hide(f.where),
        "evidence": hide(f.evidence),
        "effect": number(f.effect),
        "fix": hide(f.fix),
        "reports": list(f.fault.reports),
    }


def _comparison(c: Comparison | None) -> Json | None:
    if c is None:
        return None
    known = c.differing >= 0
    return {
        "elements": c.elements,
        "differing": c.differing if known else None,
        "max_ulps": c.max_ulps if known else None,
        "bit_identical": c.bit_identical if known else None,
        "masks_equal": c.masks_equal,
        "cosine": number(c.cosine),
        "norm_ratio": number(c.norm_ratio),
        "relative_l2": number(c.relative_l2),
    }


def number(value: float | None) -> float | str | None:
    """A float as JSON has it: NaN is null, inf and -inf are texts."""
    if value is None or math.isnan(value):
        return None
    return value if math.isfinite(value) else "inf" if value > 0 else "-inf"
