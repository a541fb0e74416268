"""The launcher's main: fork the ranks of each case, and leave none behind. It needs nothing but the standard library.

Its interpreter is a fresh one that imports torch once (3 seconds; a case takes a fraction of one) and then forks the ranks. A fork of a
notebook's own process would copy the locks of its threads and a CUDA context that cannot be used; spawn would import torch once for each
rank; a forkserver would stay behind.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

# (rank, what to do, file:// address to meet at, file for what it got)
Rank = Callable[[int, dict[str, Any], str, Path], None]


def launch(run: Rank) -> None:
    """Run `run` on each rank of each case of specs.json in the folder sys.argv[1], one case after the other.

    The ranks are forks of this process, which must have no threads. All are ended as soon as one fails; failed-RANK.json says how it did,
    and this process exits with 1.
    """
    folder = Path(sys.argv[1])
    for case, spec in enumerate(json.loads((folder / "specs.json").read_text())):
        ranks: dict[int, int] = {}
        for rank in range(len(spec["rows_per_rank"])):
            pid = os.fork()
            if pid == 0:
                _child(run, case, rank, spec, folder)
            ranks[pid] = rank
        failed = False
        while ranks:
            pid, status = os.waitpid(-1, os.WNOHANG if failed else 0)
            if pid == 0:  # one failed, and the others are alive: they would wait for it
                for other in ranks:
                    os.kill(other, signal.SIGKILL)
                    os.waitpid(other, 0)
                break
            rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
            failed |= code != 0
            if code < 0:  # it could not write down itself why it ended
                _failed(folder, rank, f"was ended by signal {signal.Signals(-code).name}", killed=True)
        if failed:
            sys.exit(1)


def _child(run: Rank, case: int, rank: int, spec: dict[str, Any], folder: Path) -> NoReturn:
    done = False
    try:
        run(rank, spec, f"file://{folder / f'meet-{case}'}", folder / f"case-{case}-rank-{rank}.pt")
        done = True
    finally:  # never back into the launcher's loop
        if not done:
            kind, error, _ = sys.exc_info()
            _failed(folder, rank, f"raised {kind.__name__}: {error}", killed=False)
            traceback.print_exc()
            sys.stderr.flush()
        os._exit(0 if done else 1)


def _failed(folder: Path, rank: int, how: str, *, killed: bool) -> None:
    (folder / f"failed-{rank}.json").write_text(json.dumps({"rank": rank, "how": how, "killed": killed, "time": time.monotonic_ns()}))
