"""A call with some of its tokens and some of its experts, every byte of them as it was recorded."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..calls import Call
from ..contracts import Contract, LinearContract, Operand
from ..contracts.moe import Made
from ..contracts.operand import MMA
from ..errors import MxdebugError
from ..layouts import LINEAR
from ..reference import Activation, Parallel

_MEMORY = ("output", "moe_output")  # what the kernel is given to write into
_COUNTS = ("num_experts", "local_num_experts", "num_local_experts", "local_expert_offset")
_BY_TOKEN = ("routing_logits", "per_token_scale")
_BY_ALL_EXPERTS = {"routing_logits": 1, "routing_bias": 0}


@dataclass(frozen=True)
class Places:
    """Which experts are kept: `positions` on each rank, of `local` there are, on `ranks` expert-parallel ranks.

    The same positions are kept on every rank, so that all ranks stay equally large, and an expert of a rank stays one of that rank.
    """

    positions: tuple[int, ...]
    local: int
    ranks: int

    @property
    def experts(self) -> tuple[int, ...]:
        """The checkpoint's experts that are kept, in the order of their new numbers."""
        return tuple(rank * self.local + p for rank in range(self.ranks) for p in self.positions)

    @property
    def all(self) -> bool:
        return len(self.positions) == self.local

    def renumber(self, ids: Tensor) -> Tensor:
        """Expert ids -> their new numbers. Ids that are no expert's stay so: below 0 as they are, others as far beyond the last one."""
        new = {e: i for i, e in enumerate(self.experts)}
        total, kept = self.local * self.ranks, len(self.experts)
        return torch.tensor(
            [[new[i] if 0 <= i < total else i if i < 0 else kept + i - total for i in row] for row in ids.tolist()], dtype=ids.dtype
        )


def smaller(call: Call, contract: Contract, tokens: Tensor, places: Places) -> Call:
    """The call of these tokens (int64, ascending) with these experts; every expert that they select on any rank must be among them.

    Raises MxdebugError where the call breaks its contract so that its tokens cannot be told apart.
    """
    args: dict[str, Any] = {k: v for k, v in call.arguments.items() if not isinstance(v, Tensor) or k in _known(contract)}
    every = tokens.numel() == _tokens(contract, args)
    if not places.all:
        for o in (*contract.operands, *contract.inputs):
            t = None if o.key in ("x", "x_scale", "experts", "router") else _get(o, args)
            if t is not None and (o in contract.operands or t.numel() > 1):
                o.put(args, _experts(o, t, places))
        stated = contract.parallel(call.arguments)
        args |= _counts(contract, args, len(places.positions), stated)
        for name, axis in _BY_ALL_EXPERTS.items():
            if isinstance(t := args.get(name), Tensor):
                args[name] = t.index_select(axis, torch.tensor(places.experts))
    if not every:
        _pick_tokens(contract, call.arguments, args, tokens)
    if not places.all:
        _renumber(contract, args, places)
    outputs = tuple(_rows("output", t, tokens) for t in call.outputs[:1])
    return replace(call, arguments=args, defaulted=frozenset(n for n in call.defaulted if n in args and n not in _COUNTS), outputs=outputs)


def smaller_linear(call: Call, contract: LinearContract, tokens: Tensor) -> Call:
    """The call of a linear kernel with these tokens, and the whole weight."""
    o = contract.operand("x")
    args, x = dict(call.arguments), o.get(call.arguments)
    if x is None or x.dim() != 2:
        raise MxdebugError(o.where, o.shape, "none" if x is None else f"shape {list(x.shape)}", "its tokens cannot be told apart")
    o.put(args, x[tokens].clone())
    for name in ("out", *_MEMORY):
        if isinstance(t := args.get(name), Tensor) and t.dim() == 2 and len(t) == len(x):
            args[name] = t[tokens].clone()
    return replace(call, arguments=args, outputs=tuple(t[tokens].clone() for t in call.outputs[:1]))


def _known(contract: Contract) -> set[str]:
    """The arguments that a diagnosis reads; other tensors, such as a workspace, are left out."""
    return {o.argument.partition("[")[0] for o in (*contract.operands, *contract.inputs)} | {
        *_MEMORY,
        *_BY_TOKEN,
        *_BY_ALL_EXPERTS,
        "topk_ids",
    }


def _get(o: Operand, args: dict[str, Any]) -> Tensor | None:
    value = args.get(o.argument.partition("[")[0])
    return o.get(args) if isinstance(value, (Tensor, list, tuple)) else None


def _tokens(contract: Contract, args: dict[str, Any]) -> int:
    x = _get(contract.operand("x"), args)
    if x is None or x.dim() != 2:
        raise MxdebugError(contract.operand("x").where, contract.operand("x").shape, "another value", "its tokens cannot be told apart")
    return len(x)


def _experts(o: Operand, t: Tensor, places: Places) -> Tensor:
    """The part of an operand that belongs to the kept experts, with the dtype and the view that it had."""
    at = torch.tensor(places.positions)
    if o.view == MMA and t.dim() == 6 and t.shape[5] == places.local:
        return t.permute(5, 2, 4, 0, 1, 3)[at].contiguous().permute(3, 4, 1, 5, 2, 0)
    if t.dim() and t.shape[0] == places.local:
        return t[at]
    if t.numel() % places.local:
        raise MxdebugError(
            o.where, f"an equal share for each of {places.local} experts", f"shape {list(t.shape)}", "its experts cannot be told apart"
        )
    return t.reshape(places.local, -1)[at]


def _counts(contract: Contract, args: dict[str, Any], here: int, stated: Parallel) -> dict[str, Any]:
    made = contract.fixed(Made(here, 0, 0, 1, stated, Activation("silu")))
    return {k: made[k] for k in _COUNTS if k in made and args.get(k) is not None}


def _pick_tokens(contract: Contract, before: dict[str, Any], args: dict[str, Any], tokens: Tensor) -> None:
    x = contract.operand("x")
    if contract.activations is not None:
        s = contract.operand("x_scale")
        layout, old = contract.x_layout(before), s.get(before)
        scales = contract.activations_of(before).scales[tokens]
        packed = layout.pack(scales).reshape(scales.shape if layout is LINEAR else layout.padded(*scales.shape))
        packed = packed.contiguous() if old.dtype == torch.uint8 else packed.contiguous().view(old.dtype)
        s.put(args, packed[..., None] if old.dim() == 3 else packed)
    x.put(args, _rows(x.where, x.get(before), tokens))
    for name in (*_MEMORY, *_BY_TOKEN, "topk_ids"):
        if isinstance(t := args.get(name), Tensor) and t.dim() == 2:
            args[name] = _rows(name, t, tokens)
    for key in ("experts", "router"):
        o = contract.operand(key)
        if isinstance(before.get(o.argument.partition("[")[0]), (list, tuple)) or "[" not in o.argument:
            if (t := _get(o, args)) is not None:
                o.put(args, _rows(o.where, t, tokens))


def _rows(name: str, t: Tensor, tokens: Tensor) -> Tensor:
    """The tokens' rows of an argument; MxdebugError where it has not as many."""
    if int(tokens.max()) >= len(t):
        raise MxdebugError(name, "a row for each token", f"shape {list(t.shape)}", "its tokens cannot be told apart")
    return t[tokens].clone()


def _renumber(contract: Contract, args: dict[str, Any], places: Places) -> None:
    o = contract.operand("experts")
    packed = args.get("topk_ids")
    if isinstance(packed, Tensor) and "[" in o.argument:  # id << 16 | the bits of a bf16 weight
        args["topk_ids"] = (places.renumber(packed >> 16) << 16) | (packed & 0xFFFF)
    elif (ids := _get(o, args)) is not None:
        o.put(args, places.renumber(ids))
