"""A report as JSON, for machines.

Schema 1 (keys are only ever added without a new number):

    schema      1
    mxdebug     version that wrote it
    path        the checkpoint as it was given
    verdict     "CLEAN", "SUSPICIOUS" or "BROKEN"; exit_code 0, 1 or 2
    stated      the quantisation that the configuration states, in words
    kinds       {kind: number of weights}
    tp          [tensor-parallel degrees that were asked about]
    payload     whether payloads were read
    read        {"headers", "scales", "payload": bytes}; size: bytes of all files; files, tensors: how many; resumed: weights that the
                state file had
    findings    [{id, severity ("broken", "suspicious", "note"), title, text, tensors (at most 1000 names), count (of all), of (of how many
                could have it, or null), experts [numbers], means, fix, reports [ids]}], most serious first
    statistics  [the fields of mxdebug.scan.statistics.Statistics], one a class of weights; histogram has 256 counts by scale byte

Numbers that are not finite do not occur.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

from .. import __version__
from .finding import Finding, shown
from .report import Report

SCHEMA = 1


def record(report: Report) -> dict[str, Any]:
    """The report as plain objects."""
    return {
        "schema": SCHEMA,
        "mxdebug": __version__,
        "path": report.path,
        "verdict": report.verdict,
        "exit_code": report.exit_code,
        "stated": report.stated,
        "kinds": dict(report.kinds),
        "tp": list(report.tp),
        "payload": report.payload,
        "read": dict(report.read),
        "size": report.size,
        "files": report.files,
        "tensors": report.tensors,
        "resumed": report.resumed,
        "findings": [_finding(f) for fs in report.by_rule() for f in fs],
        "statistics": [asdict(s) | {"label": shown(s.label)} for s in report.statistics],
    }


def to_json(report: Report) -> str:
    """`record` as text, ASCII only."""
    return json.dumps(record(report), indent=1, allow_nan=False) + "\n"


def _finding(f: Finding) -> dict[str, Any]:
    return {
        "id": f.id,
        "severity": f.severity,
        "title": f.rule.title,
        "text": f.text,
        "tensors": list(f.tensors),
        "count": f.count,
        "of": f.of,
        "experts": list(f.experts),
        "means": f.rule.means,
        "fix": f.rule.fix,
        "reports": list(f.rule.reports),
    }
