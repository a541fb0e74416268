"""What does the kernel read? One file per kernel: contract, decode, emulate, run."""

from __future__ import annotations

from ..errors import MxdebugError
from . import cutedsl_nvfp4, cutedsl_w4a16, cutlass_mxfp4_bf16, cutlass_mxfp4_mxfp8, cutlass_nvfp4, trtllm_fp4
from .contract import Contract
from .linear import LinearContract, LinearSeen
from .operand import Arguments, Operand
from .seen import Seen
from .verified import Verified

CONTRACTS: dict[str, Contract] = {c.path: c for c in (
    cutlass_mxfp4_bf16.CONTRACT, cutlass_mxfp4_mxfp8.CONTRACT, *trtllm_fp4.CONTRACTS[:2], cutlass_nvfp4.CONTRACT, trtllm_fp4.CONTRACTS[2], cutedsl_nvfp4.CONTRACT)}
LINEAR_CONTRACTS: dict[str, LinearContract] = {c.path: c for c in cutedsl_w4a16.CONTRACTS}
ALL: dict[str, Contract | LinearContract] = {**CONTRACTS, **LINEAR_CONTRACTS}


def contract(path: str) -> Contract:
    """The contract of a path by vLLM's name; MxdebugError lists those that exist."""
    if path not in CONTRACTS:
        raise MxdebugError("path", f"one of {', '.join(CONTRACTS)}", repr(path), "a recipe only: mxdebug.recipes.marlin" if path.endswith("/MARLIN") else "no contract is written for it yet")
    return CONTRACTS[path]


def any_contract(path: str) -> Contract | LinearContract:
    """As `contract`, linear kernels among them."""
    layouts = [p for p in LINEAR_CONTRACTS if p.startswith(f"{path}/")]
    if layouts:
        raise MxdebugError("path", f"one of {', '.join(layouts)}", repr(path), "the kernel has a layout for each generation of GPUs")
    return LINEAR_CONTRACTS[path] if path in LINEAR_CONTRACTS else contract(path)


def find_linear(function: str, arguments: Arguments) -> LinearContract | None:
    """The linear contract that a call falls under; None for other functions. Raises MxdebugError for a linear call of a backend that is not known."""
    same = [c for c in LINEAR_CONTRACTS.values() if function in (c.function, *c.aliases)]
    for c in same:
        if c.matches(function, arguments):
            return c
    if not same:
        return None
    b = arguments.get("b")
    raise MxdebugError("call", "; ".join(f"{c.function}(backend='cute-dsl') with b {c.operand('weight').dtype} ({c.path})" for c in same),
                       f"{function}(backend={arguments.get('backend')!r}) with b {getattr(b, 'dtype', type(b).__name__)}",
                       "another backend's layout, or a weight that was not prepared for this one")


def find(function: str, arguments: Arguments) -> Contract:
    """The MoE contract that a call falls under; MxdebugError says what was called and what is known."""
    for c in CONTRACTS.values():
        if c.matches(function, arguments):
            return c
    same = [c for c in CONTRACTS.values() if function in (c.function, *c.aliases)]
    flags = {k: arguments.get(k) for c in same for k in c.flags}
    got = f"{function}({', '.join(f'{k}={v}' for k, v in flags.items())})" if same else function
    raise MxdebugError("call", "; ".join(f"{c.function}{''.join(f' with {k}' for k, v in c.flags.items() if v is True)} ({c.path})" for c in CONTRACTS.values()),
                       got, "a call of another kernel; record the MoE call of one of these paths")


__all__ = ["ALL", "CONTRACTS", "LINEAR_CONTRACTS", "Arguments", "Contract", "LinearContract", "LinearSeen", "Operand", "Seen", "Verified", "any_contract", "contract",
           "find", "find_linear"]
