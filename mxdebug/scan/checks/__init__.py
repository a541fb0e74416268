"""What is looked at, one theme a file. Each check takes the Scene and yields findings."""

from __future__ import annotations

from collections.abc import Iterator

from ..finding import Finding
from ..scene import Scene
from . import backends, configuration, numbers, payload, scales, sizes, tensors

CHECKS = (configuration.check, tensors.check, scales.check, payload.check, numbers.check, backends.check, sizes.check)


def findings(scene: Scene) -> Iterator[Finding]:
    """All findings of all checks."""
    yield from scene.folder.findings
    yield from scene.stated.findings
    for check in CHECKS:
        yield from check(scene)
