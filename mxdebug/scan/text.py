"""A report for a terminal, at most 110 characters wide."""

from __future__ import annotations

import textwrap

from .finding import NOTE, Finding, shown
from .report import Report
from .scene import share
from .statistics import Statistics

WIDTH, _TEXTS, _NAMES, _EXPERTS = 110, 6, 3, 12


def render(report: Report) -> str:
    """Verdict, findings, statistics, what was read."""
    lines = _wrap(f"{report.verdict}: {shown(report.path)}: {report.counts()}", "", "  ")
    lines += _wrap(
        f"stated {report.stated or 'nothing'}; weights {', '.join(f'{n:,} {kind}' for kind, n in report.kinds.items())}", "  ", "  "
    ) + [""]
    for number, findings in enumerate(report.by_rule(), 1):
        lines += [*_rule(number, findings), ""]
    lines += _table(report.statistics)
    resumed = f"; {report.resumed:,} weights came from the state file" if report.resumed else ""
    return "\n".join([*lines, *_wrap(f"read {report.was_read()}{resumed}", "", "  ")])


def _rule(number: int, findings: list[Finding]) -> list[str]:
    rule = findings[0].rule
    lines = _wrap(f"{number}. [{rule.severity}] {rule.title}  ({rule.id})", "", "   ")
    for f in findings[:_TEXTS]:
        lines += _wrap(f.text, "   - ", "     ")
    if len(findings) > _TEXTS:
        lines.append(f"   - and {len(findings) - _TEXTS} more like these (all in --json)")
    names = list(dict.fromkeys(n for f in findings for n in f.tensors))
    total = sum(f.count for f in findings)
    if rule.severity != NOTE:
        lines += _labelled(
            "tensors", f"{total:,}: " + ", ".join(names[:_NAMES]) + (f" and {total - _NAMES:,} more" if total > _NAMES else "")
        )
    experts = sorted({e for f in findings for e in f.experts})
    if experts and rule.severity != NOTE:
        lines += _labelled(
            "experts", ", ".join(map(str, experts[:_EXPERTS])) + (f" and {len(experts) - _EXPERTS} more" if len(experts) > _EXPERTS else "")
        )
    lines += _labelled("means", rule.means) + _labelled("fix", rule.fix)
    return lines + (_labelled("reports", ", ".join(rule.reports)) if rule.reports else [])


def _table(statistics: tuple[Statistics, ...]) -> list[str]:
    if not statistics:
        return []
    e4m3 = any(s.format == "NVFP4" for s in statistics)  # whose largest number is 448
    lines = [f"{'block scales of':<44} {'weights':>7} {'blocks':>14} {'smallest':>9} {'largest':>9} {'subnorm.':>8} {'zero':>6}" + (f" {'448':>6}" if e4m3 else "")]
    for s in statistics:
        low, high = ("-" if x is None else f"{x:.3g}" for x in (s.low, s.high))
        lines.append(
            f"{_cut(s.label, 44):<44} {s.units:>7,} {s.blocks:>14,} {low:>9} {high:>9} "
            f"{_short(s.subnormal, s.blocks):>8} {_short(s.zero, s.blocks):>6}"
            + (f" {_short(s.saturated, s.blocks) if s.format == 'NVFP4' else '-':>6}" if e4m3 else "")
        )
    if any(s.codes is not None for s in statistics):
        lines += ["", f"{'payload of':<44} {'-0':>12} {'zero rows':>12}  most and least frequent code"]
        for s in (s for s in statistics if s.codes is not None):
            elements, used = sum(s.codes), sorted((n, code) for code, n in enumerate(s.codes) if n)
            width = 1 if len(s.codes) == 16 else 2
            ends = (
                ""
                if not used
                else f"0x{used[-1][1]:0{width}X} {share(used[-1][0], elements)}, 0x{used[0][1]:0{width}X} {share(used[0][0], elements)}"
            )
            lines.append(f"{_cut(s.label, 44):<44} {share(s.minus_zero, elements):>12} {s.zero_rows:>12,}  {ends}")
    return [*lines, ""]


def _cut(label: str, width: int) -> str:
    """The end of a long label says more than its beginning."""
    label = shown(label)
    return label if len(label) <= width else "..." + label[3 - width :]


def _short(part: int, whole: int) -> str:
    return "-" if not part else "<0.1%" if part < 0.0005 * whole else f"{100 * part / whole:.1f}%"


def _labelled(label: str, text: str) -> list[str]:
    return _wrap(text, f"   {label:<8} ", " " * 12)


def _wrap(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False)
