"""Arguments -> what a fused-MoE kernel sees, and back. One reader for all contracts: they differ in data, not in steps."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import MxdebugError
from ..formats import BlockTensor
from ..layouts import LINEAR, Layout
from ..reference import Activation, MoELayer, OneByOne, Parallel
from .activation import read_activation
from .operand import Arguments, Operand, number, shown
from .seen import Seen

if TYPE_CHECKING:
    from .contract import Contract


@dataclass(frozen=True)
class Made:
    """What the arguments that are no tensors depend on: sizes as the kernel gets them, and the call's position and activation."""

    experts: int
    intermediate: int
    hidden: int
    top_k: int
    parallel: Parallel
    activation: Activation


_TOGETHER = 1 << 25  # bytes of experts that are decoded at once


# -- arguments -> Seen ----------------------------------------------------------------------------------------------


def see(c: Contract, arguments: Arguments, tokens: Tensor | None, experts: Sequence[int] | None, whole: bool) -> Seen:
    """As Contract.see."""
    x = activations(c, arguments)
    ids, router = (c.routing or _routing)(c, arguments, x.shape[0])
    act = read_activation(c, arguments)
    w13, w2 = (_bytes(c, arguments, k) for k in ("w13", "w2"))
    e, rows, hidden, intermediate = _sizes(c, arguments, w13, w2, x, act)
    c.refuses(c, arguments, act)
    _check_shapes(c, arguments, act, e, rows, hidden, intermediate)
    parallel = c.parallel(arguments)
    if tokens is not None:
        x, ids, router = (x[tokens] if isinstance(x, Tensor) else x[tokens]), ids[tokens], router[tokens]
        local = ids.long() - parallel.ep_rank * e
        here = (local >= 0) & (local < e)
        experts = local[here].unique().tolist() or [0]
        renumber = torch.full((e,), len(experts), dtype=torch.long, device=ids.device)
        renumber[experts] = torch.arange(len(experts), device=ids.device)
        ids = torch.where(here, renumber[local.clamp(0, e - 1)], len(experts)).to(ids.dtype)
        parallel = Parallel(parallel.tp_size, parallel.tp_rank)
    which = None if experts is None or list(experts) == list(range(e)) else list(experts)
    decode = functools.partial(_layer, c, arguments, act, w13, w2, (e, rows, hidden, intermediate))
    positions = list(range(e)) if which is None else which
    layer = decode(which) if whole else OneByOne(len(positions), intermediate, hidden, lambda i: decode([positions[i]]))
    return Seen(x if isinstance(x, Tensor) else x.dequantise(), ids, router, layer, parallel, c.roundings, c.crops and _columns(arguments, hidden))


def _columns(arguments: Arguments, hidden: int) -> int | None:
    """TRT-LLM writes as many columns as the output that it is given has, or as valid_hidden_size says."""
    given, stated = arguments.get("output"), arguments.get("valid_hidden_size")
    columns = stated if isinstance(stated, int) else given.shape[1] if isinstance(given, Tensor) and given.dim() == 2 else None
    if columns is not None and not 0 < columns <= hidden:
        raise MxdebugError("output", f"at most {hidden} columns", str(columns), "memory of another layer")
    return columns


def position_by_offset(arguments: Arguments, count: str, optional: bool = False) -> Parallel:
    """The position of a kernel that is told of experts only: local_expert_offset, `count` experts here, num_experts in all.

    optional: the kernel takes all experts where the count is not passed.
    """
    total, offset = number(arguments, "num_experts", 0), number(arguments, "local_expert_offset", 0)
    here = number(arguments, count, 0) or (total if optional else 0)
    if here < 1 or total % here or offset % here or offset >= total:
        raise MxdebugError(f"experts of this rank (local_expert_offset, {count}, num_experts)", "equal shares of all experts",
                           f"{offset}, {here}, {total}", "an offset or a count of another rank")
    return Parallel(1, 0, total // here, offset // here)


def not_called(c: Contract, arguments: Arguments) -> Tensor:
    """Contract.run of a kernel that mxdebug does not call itself."""
    raise MxdebugError("this machine", f"{c.path} needs a GPU of {' or '.join(f'SM{s}' for s in c.sm)}", "no way to run it from here",
                       "use emulate, which runs anywhere")


def activations(c: Contract, arguments: Arguments) -> Tensor | BlockTensor:
    """As Contract.activations_of."""
    o = c.operand("x")
    x = o.get(arguments) if isinstance(arguments.get(o.argument), Tensor) else arguments.get(o.argument)
    if not isinstance(x, Tensor) or x.dtype != o.dtype or x.dim() != 2:
        raise MxdebugError(o.where, f"{o.dtype} {o.shape}", shown(x), "a dump of another path")
    if c.activations is None:
        return x
    s = c.operand("x_scale")
    scales = s.get(arguments)
    if scales is None or not s.takes(scales.dtype):
        raise MxdebugError(s.where, f"{s.dtype} {s.shape}", "none" if scales is None else str(scales.dtype),
                           "activations quantised without block scales, or scales cast by value (view them)")
    layout, rows = c.x_layout(arguments), x.shape[0]
    columns = x.shape[1] * (2 if c.activations.packed else 1) // c.activations.block
    pr, pc = layout.padded(rows, columns)
    if scales.numel() != pr * pc:
        raise MxdebugError(s.where, f"{pr * pc} bytes: {rows} tokens x {columns} blocks in layout {layout.name}"
                           + (f", padded to {pr} x {pc}" if (pr, pc) != (rows, columns) else ""), f"{scales.numel()} bytes, shape {list(scales.shape)}",
                           _scale_size(scales.numel(), rows, columns))
    if problem := s.broken_view(scales):
        raise MxdebugError(s.where, "contiguous memory", problem, "a sliced view: kernels take a pointer and assume the strides")
    one = torch.ones((), dtype=torch.float32, device=x.device) if c.activations.outer else None
    return BlockTensor(x.contiguous().view(torch.uint8), layout.unpack(s.payload(scales).flatten(), rows, columns).reshape(rows, columns), c.activations, one)


def _scale_size(size: int, rows: int, columns: int) -> str:
    padded_rows, padded_columns = -(-rows // 128) * 128, -(-columns // 4) * 4
    if size == rows * columns:
        return "linear scales, which this kernel reads as swizzled (vLLM #42093; after an exchange of tokens #42118)"
    if size == padded_rows * padded_columns:
        return "swizzled scales, padded to 128 rows, which this kernel reads as linear"
    if size % (128 * padded_columns) == 0:
        return "scales that were swizzled and padded on several ranks, then joined (vLLM #42118)"
    return "scales of other tokens, or of another block size"


def _routing(c: Contract, arguments: Arguments, tokens: int) -> tuple[Tensor, Tensor]:
    """Expert ids and router weights as the binding checks them. It takes a call without router weights; no engine makes one."""
    (io, ro), found = (c.operand("experts"), c.operand("router")), []
    for o in (io, ro):
        container = arguments.get(o.argument.partition("[")[0])
        found.append(o.get(arguments) if isinstance(container, (Tensor, list, tuple)) else container)
    ids, router = found
    if not isinstance(ids, Tensor) or ids.dtype != io.dtype or ids.dim() != 2 or ids.shape[0] != tokens:
        raise MxdebugError(io.where, f"{io.dtype} [{tokens}, top-k]", shown(ids), "ids that were not cast to int32, or of another call")
    if not isinstance(router, Tensor) or router.dtype != ro.dtype or router.shape != ids.shape:
        raise MxdebugError(ro.where, f"{ro.dtype} {list(ids.shape)}", shown(router), "router weights left in the model's dtype, or of another call")
    return ids, router


def _tensor(c: Contract, arguments: Arguments, key: str) -> Tensor | None:
    o = c.operand(key)
    t = o.get(arguments)
    if t is None:
        if o.optional:
            return None
        raise MxdebugError(o.where, f"{o.dtype} {o.shape}", "none", "an argument of another kernel, or fewer scale tensors than this kernel takes")
    if not o.takes(t.dtype):
        reason = {"w13": "weights viewed as another dtype are another kernel's", "w13_bias": f"biases must be {o.dtype}",
                  "w13_scale": f"scale bytes must be viewed as {o.dtype}, never cast"}.get(key.replace("w2", "w13"), "")
        raise MxdebugError(o.where, str(o.dtype), str(t.dtype), reason)
    return t


def _bytes(c: Contract, arguments: Arguments, key: str) -> Tensor:
    return c.operand(key).payload(_tensor(c, arguments, key))


def _sizes(c: Contract, arguments: Arguments, w13: Tensor, w2: Tensor, x: Tensor | BlockTensor, act: Activation) -> tuple[int, int, int, int]:
    """(experts, rows of w13, hidden, intermediate), checked."""
    if w13.dim() != 3 or w2.dim() != 3 or w13.shape[0] != w2.shape[0] or not w13.shape[0]:
        raise MxdebugError("w13 and w2 payload", "[E, 2I, H/2] and [E, H, I/2]", f"{list(w13.shape)} and {list(w2.shape)}", "not one layer's weights")
    e, rows, hidden, intermediate = w13.shape[0], w13.shape[1], w2.shape[1], 2 * w2.shape[2]
    halves = 2 if act.gated else 1
    if rows != halves * intermediate or w13.shape[2] * 2 != hidden or x.shape[1] != hidden:
        raise MxdebugError(c.operand("w13").where, f"shape [{e}, {halves * intermediate}, {hidden // 2}] for w2 {list(w2.shape)}",
                           f"shape {list(w13.shape)}, activations {list(x.shape)}", "padding on one operand only, or a gated layer read as non-gated")
    return e, rows, hidden, intermediate


def _check_shapes(c: Contract, arguments: Arguments, act: Activation, e: int, rows: int, hidden: int, intermediate: int) -> None:
    for name in ("alpha", "beta", "limit"):
        t = getattr(act, name)
        if t is not None and t.shape[0] != e:
            raise MxdebugError(f"swiglu {name}", f"shape [{e}], one for each expert on this rank", f"shape {list(t.shape)}", "values of all ranks, or one for all experts")
    for name, size, multiple in (("hidden size", hidden, c.multiple[1]), ("intermediate size", intermediate, c.multiple[0])):
        if size % multiple:
            raise MxdebugError(name, f"a multiple of {multiple} ({c.alignment})", str(size), "the layer was not padded")
    for key, r, columns in (("w13_scale", rows, hidden), ("w2_scale", hidden, intermediate)):
        o, scales = c.operand(key), _tensor(c, arguments, key)
        pr, pc = o.layout.padded(r, columns // c.weights.block)
        if scales.numel() * scales.element_size() != e * pr * pc:
            raise MxdebugError(o.where, f"{e * pr * pc} bytes: {e} experts x {pr} rows x {pc} blocks", f"{scales.numel() * scales.element_size()} bytes, "
                               f"shape {list(scales.shape)}", "scales of an unpadded layer, or of another block size; the kernel does not check and reads past the end")
    biases = [_tensor(c, arguments, k) for k in ("w13_bias", "w2_bias")] if any(o.key == "w13_bias" for o in c.operands) else [None, None]
    for key, b, want in (("w13_bias", biases[0], (e, rows)), ("w2_bias", biases[1], (e, hidden))):
        if b is not None and tuple(b.shape) != want:
            raise MxdebugError(c.operand(key).title, f"shape {list(want)}", f"shape {list(b.shape)}", "bias not padded with its weight")
    for o in c.inputs:
        if o.key in ("w13_alpha", "w2_alpha", "a1_gscale", "a2_gscale", "g1_scale_c"):
            t = _tensor(c, arguments, o.key)
            if t is not None and t.numel() not in (1, e):
                raise MxdebugError(o.where, f"{o.shape}, {e} experts on this rank", f"shape {list(t.shape)}", "global scales of all ranks, or of each half")
    for o in (c.operand("x"), *c.operands):
        t = o.get(arguments)
        problem = None if t is None else o.broken_view(t)
        if problem:
            raise MxdebugError(o.where, "contiguous memory", problem,
                               "a transposed or sliced view: FlashInfer 0.7.4 hands the kernel a pointer and no strides (seen on an H200)")


def _layer(c: Contract, arguments: Arguments, act: Activation, w13: Tensor, w2: Tensor, sizes: tuple[int, int, int, int], which: list[int] | None) -> MoELayer:
    e, rows, hidden, intermediate = sizes

    def some(t: Tensor | None) -> Tensor | None:
        return t if t is None or which is None else t[which]

    def per_expert(key: str) -> Tensor | None:
        t = c.get(key, arguments)
        if t is not None and key in c.first_only:
            t = t.reshape(-1)[:1]
        return None if t is None else some(t.float().reshape(-1).expand(e))

    def matrix(key: str, payload: Tensor, r: int, columns: int, alpha: Tensor | None) -> BlockTensor:
        o, s = c.operand(key), c.operand(f"{key}_scale")
        order = _logical_rows(o, act.gated and key == "w13", r)
        scales = s.payload(_tensor(c, arguments, s.key)).reshape(e, -1)
        codes, blocks = (_decoded(layout, t, range(e) if which is None else which, r, n, order)
                         for layout, t, n in ((o.layout, payload, columns // 2), (s.layout, scales, columns // c.weights.block)))
        return BlockTensor(codes, blocks, c.weights, alpha if c.weights.outer else None)

    def bias(key: str, gated: bool, r: int) -> Tensor | None:
        b = some(c.get(key, arguments))
        order = _logical_rows(c.operand(key), gated, r) if b is not None else None
        return b if order is None else b[:, order.to(b.device)]

    alpha13, alpha2, gscale = (per_expert(k) for k in ("w13_alpha", "w2_alpha", "a2_gscale"))
    if (folded := per_expert("g1_scale_c")) is not None:  # TRT-LLM: alpha and the inner activation's scale in one number
        gscale = folded / alpha13 if act.gated else folded
    first = matrix("w13", w13, rows, hidden, alpha13)
    down = matrix("w2", w2, hidden, intermediate, alpha2)
    b13, b2 = (bias(k, act.gated and k == "w13_bias", r) if any(o.key == k for o in c.operands) else None for k, r in (("w13_bias", rows), ("w2_bias", hidden)))
    act = replace(act, **{name: some(getattr(act, name)) for name in ("alpha", "beta", "limit")})
    gate, up = (slice(0, intermediate), slice(intermediate, rows)) if act.gated else (None, slice(0, rows))
    return MoELayer(
        gate=first[:, gate] if gate else None, up=first[:, up], down=down, activation=act,
        gate_bias=b13[:, gate] if gate and b13 is not None else None, up_bias=None if b13 is None else b13[:, up],
        down_bias=b2, scale=c.operand("w13_scale").scale, a2_gscale=gscale)


def _decoded(layout: Layout, t: Tensor, experts: Sequence[int], rows: int, columns: int, order: Tensor | None) -> Tensor:
    """uint8 [experts, rows, columns] in logical order. Of large experts a few at a time, since each step is a copy of them."""
    together = max(1, _TOGETHER // max(1, rows * columns))
    out = None
    for start in range(0, len(experts), together):
        # unpack leaves out the axis of a single expert
        part = layout.unpack(t[list(experts[start : start + together])], rows, columns).reshape(-1, rows, columns)
        part = part if order is None else part[:, order.to(part.device)]
        if len(part) == len(experts):
            return part
        out = part.new_empty(len(experts), rows, columns) if out is None else out
        out[start : start + together] = part
    return t.new_empty(0, rows, columns) if out is None else out


def _logical_rows(o: Operand, gated: bool, rows: int) -> Tensor | None:
    """int64 [rows]: the kernel's row of each logical row ([gate; up] for w13); None where the order is the logical one."""
    order = o.rows.indices(rows // 2) if gated and o.rows is not None else None
    if o.shuffle is not None:
        shuffled = o.shuffle.indices(rows)
        order = shuffled if order is None else order[shuffled]
    return None if order is None else torch.argsort(order)


# -- Seen's parts -> arguments ------------------------------------------------------------------------------------------


def arguments(c: Contract, operands: dict[str, Tensor | None], act: Activation, x: Tensor | BlockTensor, x_layout: Layout | None, experts: Tensor,
              router: Tensor, parallel: Parallel) -> dict[str, Any]:
    """As Contract.arguments."""
    w13, w2 = operands["w13"], operands["w2"]
    out: dict[str, Any] = {**c.flags, **c.fixed(Made(w13.shape[0], 2 * w2.shape[-1], w2.shape[1], experts.shape[1], parallel, act))}
    for o in c.operands:
        t = operands.get(o.key)
        o.put(out, None if t is None else o.as_passed(t))
    values: dict[str, Tensor | None] = {o.key: operands.get(o.key) for o in c.inputs}
    values |= {f"swiglu_{n}": getattr(act, n) for n in ("alpha", "beta", "limit")}
    values |= {"experts": experts.to(torch.int32), "router": router.to(c.operand("router").dtype)}
    if isinstance(x, BlockTensor):
        s = c.operand("x_scale")
        packed = x_layout.pack(x.scales)
        shaped = packed.reshape(x.scales.shape if x_layout is LINEAR else x_layout.padded(*x.scales.shape))
        values |= {"x": x.payload if c.operand("x").dtype == torch.uint8 else x.payload.view(c.operand("x").dtype),
                   "x_scale": _as_scale(shaped, s)}
    else:
        values["x"] = x.to(torch.bfloat16)
    for o in c.inputs:
        t = values[o.key]
        if c.floats and o.key.startswith("swiglu_"):
            out[o.argument] = None if t is None else float(t[0])
        else:
            o.put(out, t)
    return {k: v for k, v in out.items() if not (c.floats and v is None)}


def _as_scale(t: Tensor, o: Operand) -> Tensor:
    t = t.contiguous().view(o.dtype) if o.dtype != torch.uint8 else t
    return t[..., None] if o.shape.endswith(", 1]") else t

