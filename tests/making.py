"""Calls to test with: right ones of every recorded checkpoint and position, made on the CPU, and how to turn them into a `Call`."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from mxdebug import recorded
from mxdebug.calls import Call
from mxdebug.checkpoints import CheckpointLayer, open_checkpoint
from mxdebug.contracts import Contract, contract
from mxdebug.diagnosis import Diagnosis, diagnose
from mxdebug.faults import Situation
from mxdebug.formats import MXFP4, BlockFormat, BlockTensor
from mxdebug.recipes import recipe
from mxdebug.reference import Activation, MoELayer, Parallel

PATH = "mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16"
GPT_OSS, COMPRESSED = "gpt-oss", "compressed-tensors mxfp4-pack-quantized"
CONTRACT: Contract = contract(PATH)

# Name -> checkpoint and parallel position. Both checkpoint kinds, padding, both axes of parallelism, several ranks of each.
POSITIONS = {
    "gptoss": ("gptoss-tiny", Parallel()),
    "minimax": ("minimax-tiny", Parallel()),
    "gptoss-192": ("gptoss-192", Parallel()),
    "8-experts": ("gptoss-8-experts", Parallel()),
    "gptoss-tp0": ("gptoss-tiny", Parallel(2, 0)),
    "gptoss-tp1": ("gptoss-tiny", Parallel(2, 1)),
    "minimax-tp1": ("minimax-tiny", Parallel(2, 1)),
    "gptoss-192-tp1": ("gptoss-192", Parallel(2, 1)),
    "8-experts-ep1": ("gptoss-8-experts", Parallel(1, 0, 2, 1)),
    "minimax-ep1": ("minimax-tiny", Parallel(1, 0, 2, 1)),
    "8-experts-tp1-ep1": ("gptoss-8-experts", Parallel(2, 1, 2, 1)),
}


DATA = Path(__file__).parent / "data"


@functools.cache
def golden() -> ModuleType:
    """make_vllm_golden.py: its cases and made inputs. It runs no vLLM here."""
    spec = importlib.util.spec_from_file_location("make_vllm_golden", DATA / "make_vllm_golden.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@functools.cache
def checkpoint_layer(name: str) -> CheckpointLayer:
    """A recorded checkpoint's only layer."""
    return open_checkpoint(recorded.ROOT / "checkpoints" / name).layer()


def situation(position: str, *, tokens: int = 12, top_k: int = 2, seed: int = 0, magnitude: float = 3.0, few: bool = False) -> Situation:
    """A right call. At magnitude 3 pre-activations go beyond the limit of 7 on both sides, so that a lost limit shows.

    few: use only the first two experts of this rank, and one of another rank; emulation is then twice as fast.
    """
    name, parallel = POSITIONS[position]
    chosen = checkpoint_layer(name)
    g = torch.Generator().manual_seed(seed)
    x = (torch.randn(tokens, chosen.layer.hidden, generator=g) * magnitude).bfloat16()
    total, local = chosen.layer.experts, chosen.layer.experts // parallel.ep_size
    first = parallel.ep_rank * local
    pool = torch.tensor(sorted({first, first + 1, (first + local) % total} if few else range(total)))
    ids = torch.zeros(tokens, top_k, dtype=torch.int32)
    for token in range(tokens):
        ids[token] = pool[torch.randperm(len(pool), generator=g)[:top_k]]
    router = torch.softmax(torch.randn(tokens, top_k, generator=g), -1)
    return Situation.right(recipe("vllm", PATH, chosen.kind), chosen.layer, x, ids, router, parallel)


def call_of(arguments: Mapping[str, Any], output: Tensor | None, **changes: Any) -> Call:
    """A `Call` with these arguments; without an output it is a crash dump."""
    call = dict(function="cutlass_fused_moe", module="flashinfer.fused_moe.core", arguments=arguments, defaulted=frozenset(),
                outputs=() if output is None else (output,), status="crashed" if output is None else "completed",
                versions={"flashinfer": "0.7.4", "torch": "2.11"}, sequence=1, timestamp="20260101_000000_000", process=1,
                graph_capture=False, signature=f"(*, {', '.join(arguments)})" if arguments else "()", source=None)
    return Call(**{**call, **changes})


def diagnosed(position: str, made: Situation, **changes: Any) -> Diagnosis:
    """Build a situation's call and diagnose it against the position's checkpoint."""
    return diagnose(call_of(*made.build(), **changes), checkpoint_layer(POSITIONS[position][0]))


def found(d: Diagnosis) -> dict[str, tuple[str, ...]]:
    """Fault id -> the keys of the operands that a diagnosis says it struck (none for parameters and the kernel)."""
    titles = {o.title: o.key for o in CONTRACT.operands}
    return {f.id: tuple(titles[t] for t in f.where.split(", ") if t in titles) for f in d.findings}


def made_bytes(*shape: int, seed: int = 0) -> Tensor:
    """Random bytes."""
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def made_layer(experts: int, hidden: int, intermediate: int, *, seed: int = 0, biases: bool = True,
               dtype: torch.dtype = torch.float32, fmt: BlockFormat = MXFP4, gated: bool = True) -> MoELayer:
    """A layer of random codes, with scales within a few powers of two that differ by row and block, and biases in `dtype`.

    NVFP4: E4M3 scales between 2^-2 and 2^2, global and input scales that differ by expert, and by half.
    """
    g = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int) -> BlockTensor:
        low, high = (0x28, 0x48) if fmt.outer else (116, 124)
        scales = torch.randint(low, high, (experts, rows, columns // fmt.block), generator=g, dtype=torch.uint8)
        payload = torch.randint(0, 256, (experts, rows, columns // 2), generator=g, dtype=torch.uint8)
        return BlockTensor(payload, scales, fmt, per_expert(2.0**-8) if fmt.outer else None)

    def per_expert(scale: float) -> Tensor:
        return (torch.rand(experts, generator=g) + 0.5) * scale

    def bias(rows: int) -> Tensor | None:
        return torch.randn(experts, rows, generator=g).to(dtype) if biases else None

    act = Activation("swiglu", *(torch.full((experts,), v) for v in (1.702, 1.0, 7.0))) if gated else Activation("relu2")
    gate, up, down = weight(intermediate, hidden) if gated else None, weight(intermediate, hidden), weight(hidden, intermediate)
    inputs = {"w13_input_scale": per_expert(2.0**-9), "w2_input_scale": per_expert(2.0**-8)} if fmt.outer else {}
    return MoELayer(gate, up, down, act, bias(intermediate) if gated else None, bias(intermediate), bias(hidden), **inputs)


def padded(layer: MoELayer, intermediate: int, hidden: int, bias_dtype: torch.dtype = torch.bfloat16) -> MoELayer:
    """The same layer with zeros added to both sizes and biases rounded: what a kernel can see of it at best."""

    def weight(t: BlockTensor | None, rows: int, columns: int) -> BlockTensor | None:
        def pad(u: Tensor, width: int) -> Tensor:
            return torch.nn.functional.pad(u, (0, width - u.shape[2], 0, rows - u.shape[1]))

        return t and BlockTensor(pad(t.payload, columns // 2), pad(t.scales, columns // t.format.block), t.format, t.global_scale)

    def bias(t: Tensor | None, rows: int) -> Tensor | None:
        return None if t is None else torch.nn.functional.pad(t.to(bias_dtype), (0, rows - t.shape[1]))

    return replace(layer, gate=weight(layer.gate, intermediate, hidden), up=weight(layer.up, intermediate, hidden),
                   down=weight(layer.down, hidden, intermediate), gate_bias=bias(layer.gate_bias, intermediate),
                   up_bias=bias(layer.up_bias, intermediate), down_bias=bias(layer.down_bias, hidden))


def assert_same_layer(got: MoELayer, want: MoELayer) -> None:
    """Every byte of the weights, every bit of the biases, every parameter."""
    for name in ("gate", "up", "down"):
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None), name
        assert a is None or (torch.equal(a.payload, b.payload) and torch.equal(a.scales, b.scales)), name
        if a is not None and a.global_scale is not None:
            assert torch.equal(a.global_scale, b.global_scale), name
    for name in ("gate_bias", "up_bias", "down_bias"):
        a, b = getattr(got, name), getattr(want, name)
        assert (a is None) == (b is None) and (a is None or (a.dtype == b.dtype and torch.equal(a, b))), name
    assert got.activation.kind == want.activation.kind
    for name in ("alpha", "beta", "limit"):
        a, b = getattr(got.activation, name), getattr(want.activation, name)
        assert (a is None) == (b is None) and (a is None or torch.equal(a, b)), name
