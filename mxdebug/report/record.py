"""What a report is made of: the calls, each with its diagnosis, and the options that they were diagnosed with."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

from ..calls import Call, Recording
from ..diagnosis import Diagnosis
from ..errors import MxdebugError
from ..files import check_writable
from ..private import Private

if TYPE_CHECKING:
    from ..checkpoints import Checkpoint


def mxdebug_version() -> str:
    """The installed version, "unknown" in a source tree that was never installed."""
    try:
        return version("mxdebug")
    except PackageNotFoundError:
        return "unknown"


@dataclass(frozen=True, eq=False)
class Entry:
    """One call, or one run of a linear layer.

    name       of its folder or file, without the path
    diagnosis  or why there is none
    versions   of flashinfer, torch and python, as the dump's metadata have them; {} for a run
    recording  where the call's tensors are, for the pictures; None for a run
    """

    name: str
    function: str
    status: str
    diagnosis: Diagnosis | MxdebugError
    versions: Mapping[str, str] = field(default_factory=dict)
    recording: Recording | None = None

    @staticmethod
    def of(recording: Recording, diagnosis: Diagnosis | MxdebugError, call: Call | None) -> Entry:
        """The entry of a recorded call; call: None where it could not be read."""
        return Entry(
            recording.source.name,
            recording.function,
            recording.status if call is None else call.status,
            diagnosis,
            {} if call is None else call.versions,
            recording,
        )

    @property
    def verdict(self) -> str:
        """The diagnosis' verdict, or "not read"."""
        return "not read" if isinstance(self.diagnosis, MxdebugError) else self.diagnosis.verdict


@dataclass(frozen=True, eq=False)
class Report:
    """entries, and what was asked: the options of `mxdebug diagnose`, each None where it was not given."""

    entries: tuple[Entry, ...]
    dump: Path
    checkpoint: Path | None = None
    layer: int | None = None
    module: str | None = None
    tp: tuple[int, int] | None = None
    sent: Path | None = None
    engine: str = "vllm"
    call: str | None = None
    index: Path | None = None

    @property
    def private(self) -> Private:
        """What hides this machine's paths."""
        return Private.of(self.dump, self.checkpoint, self.sent, self.index)

    def command(self, entry: Entry | None = None, verb: str = "diagnose") -> str:
        """The line that does it again, with names of files and folders only; entry: for that call alone; verb: "diagnose" or "cut"."""
        several = entry is not None and len(self.entries) > 1
        options: list[tuple[str, object]] = [
            ("--checkpoint", self.checkpoint and self.checkpoint.resolve().name),
            ("--layer", self.layer),
            ("--module", self.module),
            ("--call", entry.name if several else self.call),
        ]
        if verb == "diagnose":
            options += [("--index", self.index and self.index.name), ("--sent", self.sent and self.sent.name), ("--engine", None if self.engine == "vllm" else self.engine)]
        words = ["mxdebug", verb, self.dump.resolve().name]
        words += [word for name, value in options if value is not None for word in (name, str(value))]
        return shlex.join(words + (["--tp", *map(str, self.tp)] if self.tp is not None else []))


def write_all(report: Report, html: Path | None, json: Path | None, checkpoint: Checkpoint | None = None) -> None:
    """Write the files that were asked for. Of a report without entries only whether they can be written is checked; old ones are removed, so
    that none is taken for the answer where there is none."""
    for file, option in ((html, "--html"), (json, "--json")):
        if file is not None:
            check_writable(file, option)
            if not report.entries:
                file.unlink(missing_ok=True)
    if html is not None and report.entries:
        from .page import write_html

        write_html(report, html, checkpoint)
    if json is not None and report.entries:
        from .schema import write_json

        write_json(report, json)
