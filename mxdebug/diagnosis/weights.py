"""Evidence from converted weights alone: a layer's operands as the engine made them, next to the checkpoint, without any call."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..calls import Call
from ..calls.call import COMPLETED
from ..checkpoints import Checkpoint, CheckpointLayer, open_checkpoint
from ..contracts import Contract, contract
from ..contracts.operand import Operand
from ..errors import MxdebugError
from ..faults import OPERANDS, QUANTISED_WITH, SCALARS
from ..files import open_safetensors
from ..reference import MoELayer, Parallel
from ..recipes import recipe
from .diagnose import diagnose
from .finding import RIGHT, UNDECIDED, Diagnosis

# vLLM's parameter names on a FusedMoE layer -> operand keys.
VLLM = {"w13_weight": "w13", "w13_weight_scale": "w13_scale", "w2_weight": "w2", "w2_weight_scale": "w2_scale"}


def diagnose_weights(
    weights: Mapping[str, Tensor] | str | os.PathLike[str],
    path: str,
    checkpoint: Checkpoint | CheckpointLayer | str | Path,
    *,
    layer: int | None = None,
    engine: str = "vllm",
    parallel: Parallel = Parallel(),
) -> Diagnosis:
    """Say what is wrong with a layer's converted weights; nothing is said of activations, routing, parameters or the kernel.

    weights     operand key (w13, w13_scale, w13_bias, w2, w2_scale, w2_bias, w13_alpha, w2_alpha, a1_gscale, a2_gscale, g1_scale_c) or vLLM's parameter name
                (w13_weight, w13_weight_scale, ...) -> the tensor that the engine holds after loading; or a .safetensors file of them. Strides count:
                a file keeps none, so save contiguous memory
    path        the kernel that they are for, such as "mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16"
    parallel    the rank's position
    Raises MxdebugError for operands that are missing, unknown, no tensors, or of another layer's sizes.
    """
    c = contract(path)
    given = _operands(weights if isinstance(weights, Mapping) else load_weights(weights), c)
    opened = open_checkpoint(checkpoint) if isinstance(checkpoint, (str, Path)) else checkpoint
    chosen = opened if isinstance(opened, CheckpointLayer) else opened.layer(layer)
    part = chosen.layer.part(parallel)
    plan = recipe(engine, path, chosen.kind).plan(part, chosen.layer)
    right = plan.convert(part)
    _check_fit(given, right, part, chosen, parallel)
    # A call around them, for what bytes alone do not tell: whether what lies in the padding reaches the result.
    tokens, first = min(4, part.experts), parallel.ep_rank * part.experts
    x = plan.quantise(torch.randn(tokens, part.hidden, generator=torch.Generator().manual_seed(0)), right)
    arguments = plan.call(
        {**{k: None for k in right}, **{k: t for k, t in right.items() if k not in plan.forms}, **given},
        part.activation,
        x,
        torch.arange(first, first + tokens, dtype=torch.int32)[:, None],
        torch.ones(tokens, 1),
        parallel,
    )
    call = Call.made(c.function, arguments, status=COMPLETED)
    told = c.parallel(arguments).tp_size == parallel.tp_size
    absent = [k for k, t in right.items() if t is not None and k not in plan.forms and k in kept(c) and k not in given]
    return _of_weights(diagnose(call, chosen, engine=engine, tp=None if told else parallel), given, absent, c, chosen)


def _of_weights(d: Diagnosis, given: Mapping[str, Tensor], absent: Sequence[str], c: Contract, chosen: CheckpointLayer) -> Diagnosis:
    """The diagnosis without what it says of the made call around the weights. absent: global scales in whose place the right ones stood."""
    names = ", ".join(kept(c)[k].title for k in given)
    facts = (("weights", f"{names} of layer {chosen.index}, as the engine holds them"), ("path", c.path))
    missing = ", ".join(f"{kept(c)[k].title} ({k})" for k in absent)
    unseen = (f"not given, and so not judged: {missing}",) if absent else ()
    need = "activations, routing, parameters and the kernel itself: record a call (mxdebug doctor)"
    checked = tuple(t for t in d.checked if "operands equal" in t or "not read" in t or "no fault" in t)
    open_ = tuple(t for t in d.open if not any(w in t for w in ("token", "router", "top-1", "output", "limit", "a call that hides")))
    d = replace(
        d,
        call=facts,
        checked=checked,
        open=(*unseen, *open_, need),
        truth=None,
        floor=None,
        kernel=None,
        follows=None,
        findings=tuple(replace(f, effect=None) for f in d.findings),
    )
    if d.verdict in (RIGHT, UNDECIDED) and not d.findings:
        what = "the converted weights are what the recipe makes of the checkpoint"
        return replace(d, verdict=UNDECIDED if absent else RIGHT, summary=f"{what}; {missing}: not given" if absent else what)
    return d


def _check_fit(given: Mapping[str, Tensor], right: Mapping[str, Tensor | None], part: MoELayer, chosen: CheckpointLayer, p: Parallel) -> None:
    """Raise MxdebugError where the payloads are of other experts or sizes than the layer's. Sizes before padding fit too: a path that does not pad
    is a fault of the conversion, which the contract names."""
    logical = {"w13": part.up.payload.numel() * (1 if part.gate is None else 2), "w2": part.down.payload.numel()}
    if any(len(given[k]) == part.experts and given[k].nbytes in (right[k].nbytes, n) for k, n in logical.items()):
        return
    shapes = ", ".join(f"{k} {list(given[k].shape)}" for k in logical)
    want = ", ".join(f"{k} {list(right[k].shape)}" for k in logical)
    raise MxdebugError(
        "converted weights and checkpoint",
        f"{want}: layer {chosen.index}'s part for tp {p.tp_rank}/{p.tp_size}, ep {p.ep_rank}/{p.ep_size}",
        shapes,
        "another checkpoint or layer, or another position: --tp SIZE RANK, --ep SIZE RANK",
    )


def kept(c: Contract) -> dict[str, Operand]:
    """What of a kernel's operands an engine keeps with the layer: weights, scales, biases, global scales."""
    return {o.key: o for o in (*c.operands, *c.inputs) if o.key in (*OPERANDS, *SCALARS, QUANTISED_WITH)}


def _operands(weights: Mapping[str, Tensor], c: Contract) -> dict[str, Tensor]:
    known = kept(c)
    out: dict[str, Tensor] = {}
    for name, t in weights.items():
        key = VLLM.get(name.rpartition(".")[2], name.rpartition(".")[2])
        if key not in known:
            raise MxdebugError(
                f"converted weight {name}", f"one of {', '.join(known)}, or vLLM's w13_weight, w13_weight_scale, ...", "another name"
            )
        if not isinstance(t, Tensor) or not t.dim():
            raise MxdebugError(
                f"converted weight {name}", "a tensor [experts, ...]", type(t).__name__ if not isinstance(t, Tensor) else "a scalar"
            )
        o = known[key]
        # A file keeps no strides: the 6-D view of CuTe-DSL comes as it is or as the bytes under it.
        out[key] = t if t.element_size() != 1 else o.payload(t) if o.view == "plain" or t.dim() == 6 else t.contiguous().view(torch.uint8)
    if missing := [k for k in ("w13", "w13_scale", "w2", "w2_scale") if k not in out]:
        raise MxdebugError(
            "converted weights", "payload and block scales of w13 and w2", f"no {', '.join(missing)}", "save all of one layer's parameters"
        )
    return out


def load_weights(file: str | os.PathLike[str]) -> dict[str, Tensor]:
    """The tensors of a .safetensors file. Raises MxdebugError for any other file."""
    path = Path(file)
    with open_safetensors(path, path.resolve().parent, "not a .safetensors file, or cut off") as f:
        return {name: f.get_tensor(name) for name in f.keys()}
