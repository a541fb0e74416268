"""Does this engine's converter keep the contract? Run it on the CPU, read its result as the kernel does, compare with the checkpoint."""

from __future__ import annotations

from .engines import EngineAudit, audit_vllm, report
from .judge import Audit, Converter, Verdict, assert_keeps_contract, audit
from .layers import loaded, made_layer
from .standins import replaced

__all__ = [
    "Audit",
    "Converter",
    "EngineAudit",
    "Verdict",
    "assert_keeps_contract",
    "audit",
    "audit_vllm",
    "loaded",
    "made_layer",
    "replaced",
    "report",
]
