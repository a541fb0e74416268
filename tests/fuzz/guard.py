"""Run one attack, and see what it did: what it raised, opened, executed, and whether it took too much time or memory."""

from __future__ import annotations

import functools
import contextlib
import io
import os
import re
import resource
import signal
import sys
import sysconfig
import time
import traceback
import unicodedata
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors

SECONDS = 10.0
"""CPU time of one case. The longest honest work is a diagnosis of an output that nothing explains, for which every known broken computation
is emulated: 3.3 s, the slowest of 7,234 cases. Three times that, for a slower machine."""
MEMORY = 1 << 30
"""Bytes of address space of one case, above what the process has when it begins."""

# Any of these, by prefix, means that input was executed or that the machine was touched.
_FORBIDDEN = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "os.spawn",
    "os.fork",
    "os.remove",
    "os.rename",
    "os.rmdir",
    "os.mkdir",
    "os.symlink",
    "os.link",
    "os.truncate",
    "os.chmod",
    "os.putenv",
    "os.startfile",
    "subprocess.",
    "socket.",
    "shutil.",
    "tempfile.",
    "pickle.find_class",
    "ctypes.",
    "exec",
    "marshal.",
    "code.__new__",
    "webbrowser.",
    "pty.",
    "urllib.",
    "ftplib.",
    "sqlite3.",
    "builtins.input",
)
_OWN = tuple(
    {
        os.path.realpath(p)
        for p in (
            sys.prefix,
            sys.base_prefix,
            *sysconfig.get_paths().values(),
            Path(__file__).parents[2] / "mxdebug",
            "/usr/share/zoneinfo",
            "/dev/null",
        )
    }
)


class TooLong(BaseException):
    """Raised by the alarm; no `except Exception` can swallow it."""


@dataclass
class Outcome:
    """What one attack did. `problem` is "" where it succeeded or raised the one error class; `crash` says where, to group equal ones."""

    result: str = ""
    problem: str = ""
    crash: str = ""
    seconds: float = 0.0
    events: list[str] = field(default_factory=list)


_watched: tuple[tuple[str, ...], list[str]] | None = None


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    global _watched
    if _watched is None:
        return
    (allowed, events), _watched = _watched, None  # what the hook itself does is not watched
    try:
        if event in ("open", "os.listdir", "os.scandir", "fuzz.safe_open") and isinstance(arguments[0], (str, bytes, os.PathLike)):
            place = os.path.realpath(os.fsdecode(arguments[0]))
            if not any(place == p or place.startswith(p + "/") for p in allowed) or (
                event == "open" and re.search(r"[wax+]", arguments[1] or "")
            ):
                events.append(f"{event} {place}"[:300])
        elif event.startswith(_FORBIDDEN) or (
            event == "compile" and arguments[1] not in ("<unknown>", None)
        ):  # ast.literal_eval parses only
            if not _importing():
                events.append(f"{event} {arguments!r}"[:300])
    finally:
        _watched = (allowed, events)


def _importing() -> bool:
    """Whether Python is importing a module of its own paths: torch and its like do so at first use."""
    frame: Any = sys._getframe()
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


@functools.cache
def install() -> None:
    """Add the audit hook, and make safetensors say what it opens (it does so in Rust, unseen by Python)."""
    real = safetensors.safe_open

    def safe_open(filename: Any, *args: Any, **kwargs: Any) -> Any:
        sys.audit("fuzz.safe_open", filename)
        return real(filename, *args, **kwargs)

    for name, module in list(sys.modules.items()):
        if name.startswith(("mxdebug", "safetensors")) and getattr(module, "safe_open", None) is real:
            module.safe_open = safe_open
    sys.addaudithook(_hook)


def _alarm(*_: Any) -> None:
    raise TooLong


@contextlib.contextmanager
def limits() -> Iterator[None]:
    """Bounded address space, CPU time, and wall-clock time (12 times SECONDS: other processes may have the CPU)."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = [(s, signal.signal(s, _alarm)) for s in (signal.SIGALRM, signal.SIGPROF)]
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    signal.setitimer(signal.ITIMER_REAL, 12 * SECONDS)
    signal.setitimer(signal.ITIMER_PROF, SECONDS)
    try:
        yield
    finally:
        for timer in (signal.ITIMER_REAL, signal.ITIMER_PROF):
            signal.setitimer(timer, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        for s, handler in before:
            signal.signal(s, handler)


def attack(target: Callable[[Path], str], folder: Path, *given: Path) -> Outcome:
    """Run `target(folder)` watched and limited; only `folder`, and the folders that are `given` besides, may be opened.

    The target returns what it printed, in which nothing may reach a terminal or page unescaped.
    """
    global _watched
    from mxdebug.errors import MxdebugError

    out = Outcome()
    allowed = (*(os.path.realpath(f) for f in (folder, *given)), *_OWN)
    began = time.process_time()
    with limits(), warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        warnings.simplefilter("ignore")
        _watched = (allowed, out.events)
        try:
            text, out.result = target(folder), "read"
        except MxdebugError as error:
            text, out.result = "\n".join(map(str, (error, error.operand, error.expected, error.got, error.reason))), "refused"
        except (Exception, TooLong, MemoryError) as error:
            _watched = None
            text, out.result = "", "crashed"
            out.crash, out.problem = _place(error), f"{type(error).__name__}: {str(error)[:300]}\n{_trace(error)}"
        finally:
            _watched = None
    out.seconds = time.process_time() - began
    if out.events:
        out.crash, out.problem = "forbidden: " + out.events[0].split()[0], "\n".join(out.events[:5])
    elif not out.problem and (raw := unescaped(text)):
        out.crash, out.problem = "unescaped", raw
    elif not out.problem and out.seconds > SECONDS:
        out.crash, out.problem = f"slow: {out.result}", f"{out.seconds:.1f} s of CPU; {text[:300]}"
    return out


def unescaped(text: str) -> str:
    """What of a text must not reach a terminal or page: control, bidirectional and other invisible characters, halves of surrogates,
    markup; and lengths that no one reads."""
    bad = sorted({f"U+{ord(c):04X}" for c in set(text) if c not in "\n\t" and unicodedata.category(c) in ("Cc", "Cf", "Cs")})
    if "<script" in text and "<table" in text:  # in HTML; in a terminal it is a word
        bad.append("<script")
    return " ".join(bad) or (f"{len(text)} characters" if len(text) > 200_000 else "")


def _frames(error: BaseException) -> list[traceback.FrameSummary]:
    return traceback.extract_tb(error.__traceback__)


def _place(error: BaseException) -> str:
    own = [f for f in _frames(error) if "/mxdebug/" in f.filename]
    at = f"{own[-1].filename.rpartition('/mxdebug/')[2]}:{own[-1].name}" if own else "?"
    return f"{type(error).__name__} in {at}"


def _trace(error: BaseException) -> str:
    return "\n".join(f"  {f.filename.rpartition('/mxdebug/')[2]}:{f.lineno} {f.name}: {f.line}" for f in _frames(error)[-6:])
