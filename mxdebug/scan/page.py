"""A report as one HTML page: no scripts, nothing loaded from elsewhere, everything from the checkpoint escaped, no path of this machine."""

from __future__ import annotations

from pathlib import Path

from ..errors import escaped as escape
from ..private import Private
from .finding import MEANINGS, Finding, shown
from .report import Report
from .scene import share
from .statistics import Statistics

_STYLE = """
:root { color-scheme: light dark; --back: #fdfdfc; --text: #1d1f21; --weak: #6b6f76; --line: #d9dbde;
  --broken: #b3261e; --suspicious: #8a5a00; --note: #2d5f8a; --clean: #1b7f79 }
@media (prefers-color-scheme: dark) { :root { --back: #16181b; --text: #e6e7e9; --weak: #9aa0a8; --line: #34383e;
  --broken: #ff8a7f; --suspicious: #e5b450; --note: #86b8e6; --clean: #5fc9c1 } }
body { background: var(--back); color: var(--text); font: 15px/1.5 system-ui, sans-serif; max-width: 70em;
  margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em; margin: 0 } h2 { font-size: 1.1em; margin: 2em 0 0.5em }
.weak { color: var(--weak) } .broken { color: var(--broken) } .suspicious { color: var(--suspicious) }
.note { color: var(--note) } .clean { color: var(--clean) }
section { border-left: 3px solid var(--line); padding-left: 1em; margin: 1.2em 0 } section p { margin: 0.2em 0 }
main { overflow-x: auto } table { border-collapse: collapse; width: 100% }
th, td { text-align: right; padding: 0.15em 0.6em; border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums }
th:first-child, td:first-child { text-align: left; overflow-wrap: anywhere }
code { overflow-wrap: anywhere } svg { display: block; color: var(--note) } details { margin: 0.2em 0 }
"""
_MOST_NAMES = 200


def to_html(report: Report) -> str:
    """The whole page."""
    hide = Private.of(Path(report.path))
    name = escape(hide(shown(report.path)))
    findings = "".join(_rule(fs, hide) for fs in report.by_rule()) or '<p class="weak">No findings.</p>'
    legend = " ".join(f'<b class="{s}">{s}</b> {escape(m)}.' for s, m in MEANINGS.items())
    kinds = ", ".join(f"{n:,} {kind}" for kind, n in report.kinds.items())
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(report.verdict)}: {name}</title><style>{_STYLE}</style></head><body>"
        f'<h1><span class="{report.verdict.lower()}">{escape(report.verdict)}</span> {name}</h1>'
        f"<p>{escape(report.counts())}. Stated {escape(report.stated)}; weights {escape(kinds)}.</p>"
        f'<p class="weak">Read {escape(report.was_read())}.</p><h2>Findings</h2>{findings}<p class="weak">{legend}</p>'
        f"<h2>Block scales by class of weights</h2><main>{_table(report.statistics)}</main></body></html>\n"
    )


def _rule(findings: list[Finding], hide: Private) -> str:
    rule = findings[0].rule
    texts = "".join(f"<li>{escape(hide(f.text))}{_experts(f)}</li>" for f in findings)
    names = list(dict.fromkeys(n for f in findings for n in f.tensors))
    total = sum(f.count for f in findings)
    more = f" and {total - _MOST_NAMES:,} more" if total > _MOST_NAMES else ""
    reports = f"<p class='weak'>Reports: {escape(', '.join(rule.reports))}</p>" if rule.reports else ""
    return (
        f'<section><p><b class="{rule.severity}">{rule.severity}</b> <b>{escape(rule.title)}</b> '
        f'<span class="weak">{escape(rule.id)}</span></p><ul>{texts}</ul>'
        f"<p>Means: {escape(rule.means)}.</p><p>Fix: {escape(rule.fix)}.</p>{reports}"
        f"<details><summary>{total:,} tensors</summary><p><code>{escape(', '.join(names[:_MOST_NAMES]))}</code>{more}</p></details>"
        "</section>"
    )


def _experts(f: Finding) -> str:
    return (
        f' <span class="weak">experts {escape(", ".join(map(str, f.experts[:40])))}{" ..." if len(f.experts) > 40 else ""}</span>'
        if f.experts
        else ""
    )


def _table(statistics: tuple[Statistics, ...]) -> str:
    head = "".join(
        f"<th>{h}</th>"
        for h in ("class", "weights", "blocks", "smallest", "largest", "subnormal", "zero", "NaN", "by byte, 0x00 to 0xFF (logarithmic)")
    )
    rows = "".join(_row(s) for s in statistics)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _row(s: Statistics) -> str:
    numbers = (
        f"{s.units:,}",
        f"{s.blocks:,}",
        _number(s.low),
        _number(s.high),
        *(share(n, s.blocks) for n in (s.subnormal, s.zero, s.nan)),
    )
    cells = "".join(f"<td>{n}</td>" for n in numbers)
    return f"<tr><td>{escape(shown(s.label))}<br><span class='weak'>{escape(s.kind)}</span></td>{cells}<td>{_bars(s)}</td></tr>"


def _number(x: float | None) -> str:
    return "-" if x is None else f"{x:.3g}"


def _bars(s: Statistics) -> str:
    """The histogram: height is the number of digits, so that single scales are seen beside millions."""
    top = max(len(str(n)) for n in s.histogram)
    bars = ""
    for byte, n in enumerate(s.histogram):
        if n:
            height = 32 * len(str(n)) / top
            bars += f'<rect x="{byte}" y="{32 - height:.1f}" width="1" height="{height:.1f}"><title>0x{byte:02X}: {n:,}</title></rect>'
    return f'<svg viewBox="0 0 256 32" width="256" height="32" fill="currentColor" role="img" aria-label="scale bytes">{bars}</svg>'
