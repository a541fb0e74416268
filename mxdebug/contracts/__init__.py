"""What does the kernel read? One file per kernel: contract, decode, emulate, run."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import NoReturn

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
    return CONTRACTS[path] if path in CONTRACTS else _none(path, CONTRACTS)


def any_contract(path: str) -> Contract | LinearContract:
    """As `contract`, linear kernels among them."""
    layouts = [p for p in LINEAR_CONTRACTS if p.startswith(f"{path}/")]
    if layouts:
        raise MxdebugError("path", f"one of {', '.join(layouts)}", repr(path), "the kernel has a layout for each generation of GPUs")
    return ALL[path] if path in ALL else _none(path, ALL)


def _none(path: str, known: Mapping[str, Contract | LinearContract]) -> NoReturn:
    names = {p.casefold(): p for p in known}
    near = [names[n] for n in difflib.get_close_matches(path.casefold(), names, n=1)]
    reason = "a recipe only: mxdebug.recipes.marlin" if path.endswith("/MARLIN") else f"perhaps {near[0]}" if near else "no contract of that name: `mxdebug contract` lists all"
    raise MxdebugError("path", f"one of {', '.join(known)}", repr(path), reason)


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
