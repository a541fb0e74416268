"""Exchange tokens between processes of this machine: start them, collect what each rank's kernel would get, leave none behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import MxdebugError
from ..formats import FORMATS, BlockTensor
from .cases import Case, Exchange, Handed, refused_by_vllm
from .quantise import quantise_activations, sample_tokens

_START = "from mxdebug.exchange.ranks import main; main()"


def exchange(world_size: int, rows_per_rank: int | Sequence[int], hidden: int, format: str, *, order: str, implementation: str,
             backend: str = "gloo", seed: int = 0, timeout: float = 120.0) -> Exchange:
    """One exchange between `world_size` processes: `exchange_all` of one `Case`; `rows_per_rank` may be one number for all ranks."""
    rows = (rows_per_rank,) * world_size if isinstance(rows_per_rank, int) else tuple(rows_per_rank)
    if len(rows) != world_size:
        raise MxdebugError("rows_per_rank", f"{world_size} numbers, one for each rank", str(rows_per_rank))
    return exchange_all([Case(rows, hidden, format, order, implementation, seed)], backend=backend, timeout=timeout)[0]


def exchange_all(cases: Sequence[Case], *, backend: str = "gloo", timeout: float = 120.0) -> tuple[Exchange, ...]:
    """Quantise tokens on as many processes of this machine as each case has ranks, and exchange them with torch.distributed as a prepare
    step of vLLM does; one case after the other.

    backend   "gloo", or "nccl" with a GPU for each rank
    timeout   seconds for all cases, after which all processes are ended

    A fresh interpreter forks the ranks (launcher.py says why), so a notebook may call this. The ranks meet in a file and talk over
    127.0.0.1. No process outlives the call and nothing is printed. Raises MxdebugError if a rank fails, dies or does not end.
    """
    if not hasattr(os, "fork"):
        raise MxdebugError("operating system", "one with fork (Linux, macOS)", sys.platform)
    if backend not in ("gloo", "nccl"):
        raise MxdebugError("backend", "gloo or nccl", repr(backend))
    world = max((len(c.rows_per_rank) for c in cases), default=0)
    if backend == "nccl" and torch.cuda.device_count() < world:
        raise MxdebugError("backend nccl", f"a GPU for each of {world} ranks", str(torch.cuda.device_count()), "use gloo, it needs none")
    sent = [_sent(c) for c in cases]
    specs = [{**asdict(c), "backend": backend, "timeout": timeout, "global_scale": s[0].global_scale.item() if s[0].format.outer else None}
             for c, s in zip(cases, sent, strict=True)]
    out = []
    for c, s, results in zip(cases, sent, _run(specs, timeout), strict=True):
        handed = tuple(Handed(rank, r["payload"], r["scales"], r["source"], s[0].scales.shape[1]) for rank, r in enumerate(results))
        out.append(Exchange(c, backend, s[0].format, s, handed, refused_by_vllm(c, s[0].format)))
    return tuple(out)


def _sent(case: Case) -> tuple[BlockTensor, ...]:
    fmt = FORMATS[case.format]
    tokens = [sample_tokens(rank, n, case.hidden, case.seed) for rank, n in enumerate(case.rows_per_rank)]
    scale = torch.stack([t.abs().amax() for t in tokens]).amax().float() / (448 * 6) if fmt.outer else None
    return tuple(BlockTensor(*quantise_activations(t, fmt, swizzled=False, global_scale=scale), fmt, scale) for t in tokens)


def _run(specs: list[dict[str, Any]], timeout: float) -> list[list[dict[str, Tensor]]]:
    """What each rank of each case wrote down."""
    with tempfile.TemporaryDirectory(prefix="mxdebug-exchange-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "specs.json").write_text(json.dumps(specs))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path), "OMP_NUM_THREADS": "1",
                       "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
        with (folder / "log").open("wb") as log:
            launcher = subprocess.Popen([sys.executable, "-c", _START, name], stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                                        env=environment, start_new_session=True)  # a process group of its own: one signal ends all ranks
            try:
                launcher.wait(timeout)
            except subprocess.TimeoutExpired:
                raise MxdebugError("exchange", f"an end within {timeout:g} s", "none; all its processes were ended",
                                   "a busy machine, or a rank that waits for another") from None
            finally:
                if launcher.poll() is None or launcher.returncode < 0:
                    try:
                        os.killpg(launcher.pid, signal.SIGKILL)
                    except ProcessLookupError:
                        pass
                    launcher.wait()
        if launcher.returncode:
            failed = sorted((json.loads(p.read_text()) for p in folder.glob("failed-*.json")), key=lambda f: (not f["killed"], f["time"]))
            got = f"rank {failed[0]['rank']} {failed[0]['how']}" if failed else f"the launcher ended with exit code {launcher.returncode}"
            raise MxdebugError("exchange", "every rank to finish", got, (folder / "log").read_text(errors="replace").strip()[-2000:])
        return [[torch.load(folder / f"case-{i}-rank-{rank}.pt", weights_only=True) for rank in range(len(spec["rows_per_rank"]))]
                for i, spec in enumerate(specs)]
