"""Real calls, recorded by FlashInfer itself on an NVIDIA H200 (SM90), and the tiny checkpoints that they were made from.

They ship with the package: `mxdebug demo`, the notebooks and the tests all read them. Outputs are what the GPU wrote.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from .errors import MxdebugError

ROOT = Path(str(resources.files("mxdebug"))) / "data"
W4A16 = ROOT / "checkpoints" / "nvfp4-w4a16-tiny"  # linear layers, written by compressed-tensors; no call was recorded with them


@dataclass(frozen=True)
class Recorded:
    """One recorded call: its checkpoint, what was done wrong, and the relative L2 distance from the checkpoint's own result."""

    name: str
    checkpoint: str
    wrong: str
    off_by: float | None

    @property
    def path(self) -> Path:
        """The dump folder, as FlashInfer wrote it."""
        return ROOT / "calls" / self.name

    @property
    def checkpoint_path(self) -> Path:
        """The checkpoint folder."""
        return ROOT / "checkpoints" / self.checkpoint


CALLS = {c.name: c for c in (
    Recorded("c01", "gptoss-tiny", "nothing", 0.004),
    Recorded("c02", "minimax-tiny", "nothing", 0.003),
    Recorded("c03", "gptoss-tiny", "rows are [w1; w3] (payload, scales, bias); the kernel reads [w3; w1]", 0.75),
    Recorded("c04", "gptoss-tiny", "w13 scales swapped but not folded for SM90", 1.16),
    Recorded("c05", "minimax-tiny", "alpha, beta and limit not passed", 0.67),
    Recorded("c06", "gptoss-tiny", "both packed weights passed without the SM90 interleave", 1.94),
    Recorded("c07", "gptoss-tiny", "rows are g0,u0,g1,u1 (payload, scales, bias)", 1.61),
    Recorded("c08", "minimax-tiny", "payload in [w3; w1], scales in [w1; w3]", 1.01),
    Recorded("c09", "minimax-tiny", "nothing; one token, top-3", None),
    Recorded("c10", "gptoss-192", "nothing; each half of w13 padded to 256 with zeros, w2's columns too", None),
    Recorded("c11", "gptoss-192", "w13 padded once at its end: the gate/up boundary moves by 64 rows", None),
    Recorded("c12", "gptoss-8-experts", "nothing; ep_size=2, ep_rank=1: experts 4..7 only", None),
    Recorded("c13", "gptoss-tiny", "nothing; tp_size=2, tp_rank=1: second half of the intermediate size", None),
    Recorded("c14", "minimax-tiny", "w13 without the SM90 interleave; 70 tokens", None),
)}


def call(name: str) -> Recorded:
    """The recorded call of that name; MxdebugError lists the names where there is none."""
    if name not in CALLS:
        raise MxdebugError("recorded call", f"one of {', '.join(CALLS)}", repr(name))
    return CALLS[name]


def kernel_dumps(function: str) -> list[Path]:
    """Dump folders of single FlashInfer layout kernels, e.g. `block_scale_interleave`."""
    return sorted(p for p in (ROOT / "kernels").iterdir() if f"_{function}_call" in p.name)
