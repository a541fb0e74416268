"""python -m fuzz --cases N --seed S [--first F] [--processes P] [--only CASE]: print what was found, grouped."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from . import runner


def main() -> None:
    parser = argparse.ArgumentParser()
    for name, default in (("cases", 1000), ("seed", 0), ("first", 0), ("processes", 1), ("only", -1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    a = parser.parse_args()
    if a.only >= 0:
        from . import guard, seeds

        guard.install()
        place = Path(tempfile.mkdtemp(prefix="mxdebug-case-"))
        print(place, runner.one(a.only, a.seed, seeds.make(place / "seeds"), place / "work", seeds.make(place / "given")))
        return
    report = runner.run(a.cases, a.seed, a.first, a.processes)
    groups: dict[str, list[runner.Crash]] = {}
    for c in report.crashes:
        groups.setdefault(c.crash, []).append(c)
    for crash, members in sorted(groups.items(), key=lambda g: -len(g[1])):
        first = members[0]
        print(f"== {len(members)} x {crash}: cases {[m.case for m in members[:5]]}; {first.name}, {first.broken}\n{first.problem}\n")
    print(
        f"{a.cases} cases, seed {a.seed}: {report.results}; {len(report.crashes)} crashes in {len(groups)} groups; "
        f"slowest {report.slowest[0]:.2f} s of CPU (case {report.slowest[1]}); {report.seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
