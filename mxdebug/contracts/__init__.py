"""What does the kernel read? One file per kernel: contract, decode, emulate, run."""

from __future__ import annotations

from ..errors import MxdebugError
from . import cutedsl_nvfp4, cutlass_mxfp4_bf16, cutlass_mxfp4_mxfp8, cutlass_nvfp4, trtllm_fp4
from .contract import Contract, Verified
from .operand import Arguments, Operand
from .seen import Seen

CONTRACTS: dict[str, Contract] = {c.path: c for c in (
    cutlass_mxfp4_bf16.CONTRACT, cutlass_mxfp4_mxfp8.CONTRACT, *trtllm_fp4.CONTRACTS[:2], cutlass_nvfp4.CONTRACT, trtllm_fp4.CONTRACTS[2], cutedsl_nvfp4.CONTRACT)}


def contract(path: str) -> Contract:
    """The contract of a path by vLLM's name; MxdebugError lists those that exist."""
    if path not in CONTRACTS:
        raise MxdebugError("path", f"one of {', '.join(CONTRACTS)}", repr(path), "a recipe only: mxdebug.recipes.marlin" if path.endswith("/MARLIN") else "no contract is written for it yet")
    return CONTRACTS[path]


def find(function: str, arguments: Arguments) -> Contract:
    """The contract that a call falls under; MxdebugError says what was called and what is known."""
    for c in CONTRACTS.values():
        if c.matches(function, arguments):
            return c
    same = [c for c in CONTRACTS.values() if function in (c.function, *c.aliases)]
    flags = {k: arguments.get(k) for c in same for k in c.flags}
    got = f"{function}({', '.join(f'{k}={v}' for k, v in flags.items())})" if same else function
    raise MxdebugError("call", "; ".join(f"{c.function}{''.join(f' with {k}' for k, v in c.flags.items() if v is True)} ({c.path})" for c in CONTRACTS.values()),
                       got, "a call of another kernel; record the MoE call of one of these paths")


__all__ = ["CONTRACTS", "Arguments", "Contract", "Operand", "Seen", "Verified", "contract", "find"]
