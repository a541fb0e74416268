"""Does this engine's converter keep the contract? Run it on the CPU, read its result as the kernel does, compare with the checkpoint."""

from __future__ import annotations

from .engines import EngineAudit, audit_vllm, report
from .judge import Audit, Converter, Verdict, assert_keeps_contract, audit
from .layers import loaded, made_layer
from .linear import assert_linear_keeps_contract, audit_linear, loaded_linear
from .standins import replaced

__all__ = [
    "Audit",
    "Converter",
    "EngineAudit",
    "Verdict",
    "assert_keeps_contract",
    "assert_linear_keeps_contract",
    "audit",
    "audit_linear",
    "audit_vllm",
    "loaded",
    "loaded_linear",
    "made_layer",
    "replaced",
    "report",
]
