"""A diagnosis as HTML for a notebook. Everything that comes from a file is escaped."""

from __future__ import annotations

from ..diagnosis import finding
from ..diagnosis.finding import RIGHT, STRENGTHS, Diagnosis, Finding, distance
from ..errors import escaped as escape
from ..metrics import plain

# Colours that work on JupyterLab's light and dark themes and for colour-blind readers; the word always stands beside.
_COLOURS = {RIGHT: "#1b7f79", "wrong": "#c4572b"}
_STYLE = "font-family: var(--jp-ui-font-family, sans-serif); max-width: 62em; line-height: 1.45; padding: 0.2em 0.6em"
_CELL = "padding: 0.15em 1em 0.15em 0; text-align: left; vertical-align: top; background: none; border: none"


def _row(label: str, text: str) -> str:
    return (f'<tr style="background: none"><th style="{_CELL}; font-weight: 500; opacity: 0.7; white-space: nowrap">{escape(label)}</th>'
            f'<td style="{_CELL}">{escape(text)}</td></tr>')


def _finding(number: int, f: Finding) -> str:
    rows = [_row("where", f.where), _row("evidence", f.evidence)]
    if f.effect is not None:
        rows.append(_row("effect", f"alone it moves the output by relative L2 {plain(f.effect)}"))
    rows.append(_row("fix", f.fix))
    if f.fault.reports:
        rows.append(_row("reports", ", ".join(f.fault.reports)))
    return (f'<div style="margin: 0.8em 0 0 0; border-left: 3px solid {_COLOURS["wrong"]}; padding-left: 0.9em">'
            f'<b>{number}. {escape(f.title)}</b> <span title="{escape(STRENGTHS[f.strength])}" '
            f'style="border: 1px solid #808080; border-radius: 3px; padding: 0 0.4em; font-size: 85%">{escape(f.strength)}</span>'
            f'<table style="border-collapse: collapse; margin: 0.3em 0 0 0">{"".join(rows)}</table></div>')


def render(d: Diagnosis) -> str:
    """The HTML of a diagnosis: verdict, findings with evidence and fix, then what was checked."""
    colour = _COLOURS.get(d.verdict, _COLOURS["wrong"] if d.findings else "#7a6a00")
    rows = [_row(label, value) for label, value in d.call]
    if d.truth is not None:
        rows.append(_row("output", "from the checkpoint's own result: " + distance(d.truth, d.floor)))
    if d.kernel is not None:
        rows.append(_row("kernel", f"recorded output against emulation of what was passed: {d.kernel}"))
    rows += [_row("checked", text) for text in d.checked] + [_row("open", text) for text in d.open]
    return (f'<div style="{_STYLE}"><div style="font-size: 110%"><b style="color: {colour}">{escape(d.verdict.upper())}</b> '
            f'{escape(d.summary)}</div>{"".join(_finding(i, f) for i, f in enumerate(d.findings, 1))}'
            f'<table style="border-collapse: collapse; margin-top: 0.8em">{"".join(rows)}</table></div>')


finding.HTML.append(render)
