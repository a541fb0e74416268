"""mxdebug: find out why a block-scaled (MXFP4, NVFP4, MXFP8) layer computes garbage.

    import mxdebug
    mxdebug.diagnose("flashinfer_dumps/2026..._call0001", checkpoint="gpt-oss-20b", layer=3)

Rooms: formats (what the bits mean), layouts (where the bytes lie), reference (what the layer computes), contracts (what
the kernel reads), recipes (how the engine gets there), calls and checkpoints (what happened, what is in the file),
faults (what goes wrong), diagnosis (which of them it is), views (what it looks like).
"""

from __future__ import annotations

from .errors import MxdebugError

__version__ = "0.1.0"
__all__ = ["MxdebugError", "__version__", "capture", "capture_runs", "diagnose", "diagnose_run", "load_call", "open_checkpoint", "save_run"]

_LAZY = {"diagnose": ("diagnosis", "diagnose"), "diagnose_run": ("diagnosis", "diagnose_run"), "open_checkpoint": ("checkpoints", "open_checkpoint"),
         "load_call": ("calls", "load"), "capture": ("calls", "capture"), "save_run": ("diagnosis.linear_run", "save_run"),
         "capture_runs": ("diagnosis.linear_run", "capture_runs")}
# The rooms above and what else documents name as mxdebug.ROOM: reachable after `import mxdebug` alone.
_ROOMS = ("audit", "calls", "checkpoints", "confusion", "contracts", "cut", "diagnosis", "evidence", "exchange", "faults", "formats", "glossary",
          "layouts", "metrics", "probe", "recipes", "reference", "report", "scan", "verify", "views")


def __dir__() -> list[str]:
    return sorted({*__all__, *_ROOMS})


def __getattr__(name: str) -> object:
    # Loaded when first used, so that `import mxdebug` costs little more than torch's own import.
    import importlib

    if name in _ROOMS:
        return importlib.import_module(f".{name}", __name__)
    if name in _LAZY:
        module, attribute = _LAZY[name]
        if name.startswith("diagnose"):
            importlib.import_module(".views", __name__)  # registers how a diagnosis looks in a notebook
        return getattr(importlib.import_module(f".{module}", __name__), attribute)
    raise AttributeError(f"module 'mxdebug' has no attribute {name!r}")
