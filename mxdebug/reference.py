"""What does the layer compute? Linear layer and mixture of experts in plain PyTorch, with named rounding points.

With `EXACT` roundings this is what the checkpoint means; with a kernel's roundings it is what that kernel computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from . import mufu
from . import fast
from .block_gemm import FEW, block_gemm
from .errors import MxdebugError
from .formats import BlockTensor, ScaleCodec, byte_values
from .requantise import Quantiser


@dataclass(frozen=True)
class Roundings:
    """The dtype in which each intermediate result is stored; None keeps the computing precision.

    accumulate  how many products along K a GEMM sums at a time; each sum is cut to float32 (tensor cores do not round),
                multiplied by the block's scale and added to the float32 total, in the order of K. None: one float64 sum
    fast_math   sigmoid and the weighted sum over experts as nvcc -use_fast_math compiles them
    requantise  how the inner activation is quantised for the second GEMM; None: it is not
    bias_in_gemm  the down bias is added before GEMM2's result is stored, not after
    fused       the router weight is applied in GEMM2, whose result is then rounded and added to the output in `output`'s dtype
    """

    gemm1: torch.dtype | None
    activation: torch.dtype | None
    gemm2: torch.dtype | None
    output: torch.dtype | None
    accumulate: int | None = None
    fast_math: bool = False
    requantise: Quantiser | None = None
    bias_in_gemm: bool = False
    fused: bool = False


EXACT = Roundings(None, None, None, None)


def _store(x: Tensor, dtype: torch.dtype | None) -> Tensor:
    return x if dtype is None else x.to(dtype).to(x.dtype)


# -- activations ------------------------------------------------------------------------------------------------


def _relu2(x: Tensor) -> Tensor:
    return torch.nn.functional.relu(x).square()


_PLAIN: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": torch.nn.functional.gelu,  # erf; what FlashInfer CUTLASS computes for Geglu
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "relu2": _relu2,
}
GATED = ("swiglu", "silu", "gelu", "gelu_tanh")
KINDS = (*GATED, "relu2")
# "gate both, up above": the two sides applied to the wrong halves.
CLAMPS = ("gate above, up both", "gate both, up both", "gate above, up above", "gate both, up above", "after activation")


@dataclass(frozen=True)
class Activation:
    """What stands between the two GEMMs.

    kind    swiglu: gate * sigmoid(alpha * gate) * (up + beta), gate capped at limit, up clamped to [-limit, limit];
            silu, gelu (erf), gelu_tanh: act(gate) * up; relu2: relu(up)^2, a layer without gate
    alpha, beta, limit   float32 [experts], only for swiglu; None means 1, 0, no limit
    clamp   where the limit acts, one of CLAMPS: the first is what FlashInfer, vLLM and gpt-oss do, the others are known mistakes
    """

    kind: str
    alpha: Tensor | None = None
    beta: Tensor | None = None
    limit: Tensor | None = None
    clamp: str = "gate above, up both"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise MxdebugError("activation", f"one of {', '.join(KINDS)}", repr(self.kind))
        if self.kind != "swiglu" and not (self.alpha is None and self.beta is None and self.limit is None):
            raise MxdebugError(f"activation {self.kind}", "no alpha, beta or limit", "some", "only swiglu has parameters")
        if self.clamp not in CLAMPS:
            raise MxdebugError("activation clamp", f"one of {', '.join(CLAMPS)}", repr(self.clamp))

    @property
    def gated(self) -> bool:
        return self.kind in GATED

    def parameter(self, name: str, expert: int) -> float | None:
        """alpha, beta or limit of one expert; None where it was not given."""
        values = getattr(self, name)
        return None if values is None else float(values[expert])

    def __call__(self, gate: Tensor | None, up: Tensor, expert: int, sigmoid: Callable[[Tensor], Tensor] = torch.sigmoid) -> Tensor:
        """[tokens, I] pre-activations of one expert -> [tokens, I]."""
        if not self.gated:
            return _PLAIN[self.kind](up)
        if self.kind == "silu":
            return gate * sigmoid(gate) * up
        if self.kind != "swiglu":
            return _PLAIN[self.kind](gate) * up
        alpha, beta, limit = (self.parameter(n, expert) for n in ("alpha", "beta", "limit"))
        alpha, beta = (1.0 if alpha is None else alpha), (0.0 if beta is None else beta)
        if limit is not None and self.clamp != "after activation":
            gate_side, up_side = self.clamp.split(", ")
            gate = gate.clamp(max=limit) if gate_side == "gate above" else gate.clamp(-limit, limit)
            up = up.clamp(-limit, limit) if up_side == "up both" else up.clamp(max=limit)
        out = gate * sigmoid(gate * alpha) * (up + beta)
        return out.clamp(-limit, limit) if limit is not None and self.clamp == "after activation" else out


# -- layers -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Parallel:
    """Which part of a layer: tensor parallel (slices of the intermediate size) and expert parallel (slices of the experts)."""

    tp_size: int = 1
    tp_rank: int = 0
    ep_size: int = 1
    ep_rank: int = 0

    def __post_init__(self) -> None:
        for name in ("tp", "ep"):
            size, rank = getattr(self, f"{name}_size"), getattr(self, f"{name}_rank")
            if not 0 <= rank < size:
                raise MxdebugError(f"{name}_rank", f"0 <= rank < {name}_size = {size}", str(rank))


INPUT_SCALES = ("w13_input_scale", "w2_input_scale", "a2_gscale")


@dataclass(frozen=True)
class MoELayer:
    """A mixture of experts in logical order, whatever order its file or kernel uses.

    gate, up   BlockTensor [E, I, H]; gate is None for a layer without gate
    down       BlockTensor [E, H, I]
    *_bias     [E, I], [E, I], [E, H] or None
    scale      the codec that the reader applies to block scales; None: the format's own
    w13_input_scale, w2_input_scale   float32 [E], NVFP4 checkpoints: global scale (a multiplier) of the activations of each GEMM
    a2_gscale  float32 [E], as a kernel gets it: what the inner activation is multiplied with before it is quantised to NVFP4
    """

    gate: BlockTensor | None
    up: BlockTensor
    down: BlockTensor
    activation: Activation
    gate_bias: Tensor | None = None
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    scale: ScaleCodec | None = None
    w13_input_scale: Tensor | None = None
    w2_input_scale: Tensor | None = None
    a2_gscale: Tensor | None = None

    def __post_init__(self) -> None:
        e, i, h = self.up.shape
        if self.activation.gated != (self.gate is not None):
            raise MxdebugError("gate weight (w1)", "present" if self.activation.gated else "absent",
                               "absent" if self.gate is None else "present", f"activation {self.activation.kind}")
        for name, t, want in (("gate weight (w1)", self.gate, (e, i, h)), ("down weight (w2)", self.down, (e, h, i)),
                              ("gate bias", self.gate_bias, (e, i)), ("up bias", self.up_bias, (e, i)), ("down bias", self.down_bias, (e, h))):
            if t is not None and tuple(t.shape) != want:
                raise MxdebugError(name, f"shape {list(want)} for up weight {[e, i, h]}", f"shape {list(t.shape)}",
                                   "parts of two layers, or a padded next to an unpadded one")
        for name in ("alpha", "beta", "limit"):
            t = getattr(self.activation, name)
            if t is not None and tuple(t.shape) != (e,):
                raise MxdebugError(f"swiglu {name}", f"shape [{e}], one for each expert", f"shape {list(t.shape)}")
        for name in INPUT_SCALES:
            t = getattr(self, name)
            if t is not None and tuple(t.shape) != (e,):
                raise MxdebugError(name, f"shape [{e}], one for each expert", f"shape {list(t.shape)}")

    @property
    def experts(self) -> int:
        return self.up.shape[0]

    @property
    def intermediate(self) -> int:
        return self.up.shape[1]

    @property
    def hidden(self) -> int:
        return self.up.shape[2]

    def take(self, experts: slice | list[int]) -> MoELayer:
        """Some experts only."""
        def some(t: Any) -> Any:
            return None if t is None else t[experts]

        a = self.activation
        activation = replace(a, alpha=some(a.alpha), beta=some(a.beta), limit=some(a.limit))
        names = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias", *INPUT_SCALES)
        return replace(self, activation=activation, **{n: some(getattr(self, n)) for n in names})

    def one(self, expert: int) -> MoELayer:
        """One expert only, at position 0."""
        return self.take(slice(expert, expert + 1))

    def part(self, p: Parallel) -> MoELayer:
        """The slice that one rank holds.

        Tensor parallel: whole blocks, the first ranks get ceil(blocks / tp_size) (vLLM models/gpt_oss.py); the down bias
        stays whole, since rank 0 alone adds it. Expert parallel: consecutive experts, equally many on each rank.
        """
        if self.experts % p.ep_size:
            raise MxdebugError("experts", f"a multiple of ep_size {p.ep_size}", str(self.experts))
        n, block = self.experts // p.ep_size, self.down.format.block
        share = -(-(self.intermediate // block) // p.tp_size) * block
        rows = slice(p.tp_rank * share, min((p.tp_rank + 1) * share, self.intermediate))
        if rows.start >= self.intermediate:
            raise MxdebugError("tp_rank", f"a rank that holds some of {self.intermediate // block} blocks", f"rank {p.tp_rank} of {p.tp_size}")
        mine = self.take(slice(p.ep_rank * n, (p.ep_rank + 1) * n))
        per_byte = 2 if self.down.format.packed else 1
        down = replace(mine.down, payload=mine.down.payload[..., rows.start // per_byte: rows.stop // per_byte],
                       scales=mine.down.scales[..., rows.start // block: rows.stop // block])

        def cut(t: Any) -> Any:
            return None if t is None else t[:, rows]

        return replace(mine, gate=cut(mine.gate), up=cut(mine.up), down=down, gate_bias=cut(mine.gate_bias), up_bias=cut(mine.up_bias))

    def features(self, blocks: Tensor) -> MoELayer:
        """The layer with some of its intermediate features only: blocks, int64, says which blocks along I. The hidden size stays whole."""
        block, down = self.down.format.block, self.down
        rows = (blocks[:, None] * block + torch.arange(block)).flatten()
        payload = down.payload.unflatten(-1, (-1, block // (2 if down.format.packed else 1)))[..., blocks, :].flatten(-2)

        def some(t: Any) -> Any:
            return None if t is None else t[:, rows]

        return replace(self, gate=some(self.gate), up=some(self.up), down=replace(down, payload=payload, scales=down.scales[..., blocks]),
                       gate_bias=some(self.gate_bias), up_bias=some(self.up_bias))


@dataclass(frozen=True)
class Trace:
    """One forward pass: the output and, for each (token, slot) that an expert here computed, its pre-activations.

    output [T, H]; token, slot, expert int64 [N]; gate (or None) and up float [N, I], biases added, before any clamp.
    """

    output: Tensor
    token: Tensor
    slot: Tensor
    expert: Tensor
    gate: Tensor | None
    up: Tensor

    def of(self, expert: int) -> tuple[Tensor | None, Tensor]:
        """(gate, up) of one expert."""
        here = self.expert == expert
        return None if self.gate is None else self.gate[here], self.up[here]


@dataclass(frozen=True)
class OneByOne:
    """A layer whose experts are made when they are asked for, and not kept: `one` gives the layer of one expert, by its position."""

    experts: int
    intermediate: int
    hidden: int
    one: Callable[[int], MoELayer]


def forward(x: Tensor, experts: Tensor, router: Tensor, layer: MoELayer | OneByOne, *, parallel: Parallel, roundings: Roundings,
            compute: torch.dtype = torch.float32, keep: bool = False, before: Trace | None = None) -> Trace:
    """Run a mixture of experts. No result depends on the order in which a BLAS adds: see `Roundings.accumulate`.

    x        [T, H] activations
    experts  int [T, k] global expert ids; ids outside this rank's ep slice contribute nothing
    router   [T, k] router weights
    layer    the experts of this rank, in logical order
    parallel the down bias is added on tp_rank 0 only; local expert 0 has the global id ep_rank * local experts
    roundings where results are stored in a smaller dtype; `compute` is the precision between the GEMMs
    keep     whether the Trace holds pre-activations
    before   a Trace that does, of the same call with another activation or down weight: its pre-activations are taken, not computed again
    Raises MxdebugError where shapes do not fit.
    """
    _check_call(x, experts, router, layer)
    tokens, slots = experts.shape
    local = experts.long() - parallel.ep_rank * layer.experts
    contributions = torch.zeros(tokens, slots, layer.hidden, dtype=compute, device=x.device)
    kept: list[tuple[Tensor, ...]] = []
    for e in sorted(set(local[(local >= 0) & (local < layer.experts)].tolist())):
        own = layer.one(e)
        token, slot = (local == e).nonzero(as_tuple=True)
        gate, up = _first_gemm(x[token], own, roundings, compute) if before is None else before.of(e)
        act = _store(own.activation(gate, up, 0, mufu.sigmoid if roundings.fast_math else torch.sigmoid), roundings.activation)
        if roundings.requantise is not None:
            act = roundings.requantise(act, None if own.a2_gscale is None else own.a2_gscale[0]).dequantise().to(compute)
        y = _gemm(act, own.down[0], own.scale, roundings, None if roundings.bias_in_gemm else roundings.gemm2, compute)
        if own.down_bias is not None and parallel.tp_rank == 0:
            y = y + own.down_bias[0].to(compute)
        if roundings.bias_in_gemm:
            y = _store(y, roundings.gemm2)
        contributions[token, slot] = y
        if keep:
            kept.append((token, slot, torch.full_like(token, e), *(() if gate is None else (gate,)), up))
    out = torch.zeros_like(contributions[:, 0])
    for k in range(slots):  # in this order: float addition is not associative
        here = ((local[:, k] >= 0) & (local[:, k] < layer.experts))[:, None]
        # float64 holds the product exactly: a fused multiply-add, rounded once. Without fast_math the product is rounded too.
        product = contributions[:, k].double() * router[:, k, None].double()
        added = out.double() + (product if roundings.fast_math else product.to(compute).double())
        if roundings.fused:
            added = out.double() + _store(product.to(compute), roundings.output).double()
        out = torch.where(here, _store(added.to(compute), roundings.output) if roundings.fused else added.to(compute), out)
    if roundings.output is not None:
        out = out.to(roundings.output)
    columns = [torch.cat(c) for c in zip(*kept)] if kept else []
    empty = torch.zeros(0, dtype=torch.long)
    return Trace(out, *(columns[:3] or (empty, empty, empty)),
                 gate=columns[3] if len(columns) == 5 else None, up=columns[-1] if columns else torch.zeros(0, layer.intermediate))


def moe(x: Tensor, experts: Tensor, router: Tensor, layer: MoELayer, *, parallel: Parallel = Parallel(),
        roundings: Roundings = EXACT, compute: torch.dtype = torch.float32) -> Tensor:
    """The output [T, H] of `forward`."""
    return forward(x, experts, router, layer, parallel=parallel, roundings=roundings, compute=compute).output


def linear(x: Tensor, weight: BlockTensor, bias: Tensor | None = None, *, scale: ScaleCodec | None = None,
           output: torch.dtype | None = None, compute: torch.dtype = torch.float32) -> Tensor:
    """A linear layer: x [..., K] @ weight [N, K] transposed + bias [N]; stored as `output` where that is given."""
    if x.shape[-1] != weight.columns:
        raise MxdebugError("activations", f"last dimension {weight.columns}", f"shape {list(x.shape)}", "padded weights, unpadded activations")
    y = x.to(compute) @ weight.dequantise(compute, scale).T
    if bias is not None:
        y = y + bias.to(compute)
    return y if output is None else y.to(output)


def _gemm(x: Tensor, weight: BlockTensor, scale: ScaleCodec | None, r: Roundings, stored: torch.dtype | None, compute: torch.dtype) -> Tensor:
    if r.accumulate is None:
        alpha = weight.global_scale if weight.global_scale is not None and r != EXACT else None
        if alpha is not None:  # kernels scale the sum, not the weights
            weight = replace(weight, global_scale=torch.ones_like(alpha))
        y = _product(x, weight, scale or weight.format.scale).to(compute)
        return _store(y if alpha is None else y * alpha.to(compute), stored)
    if r.accumulate != weight.format.block or weight.format.outer:
        raise MxdebugError("Roundings.accumulate", f"the block {weight.format.block} of {weight.format.name}",
                           str(r.accumulate), "its outer scale is no power of two" if weight.format.outer else "")
    return _store(block_gemm(x, weight, scale or weight.format.scale).to(compute), stored)


def _product(x: Tensor, weight: BlockTensor, scale: ScaleCodec) -> Tensor:
    """x [T, K] @ weight [N, K] transposed, in float64."""
    outer = 1.0 if weight.global_scale is None else weight.global_scale.float()
    if (compiled := fast.on_cpu(weight.payload, weight.scales, x)) is not None and 0 < x.shape[0] <= FEW and (weight.global_scale is None or outer.numel() == 1):
        return compiled.gemm(x.double(), weight.payload, weight.scales, byte_values(weight.format.element).double(), scale.table(), float(outer))
    return x.double() @ weight.dequantise(torch.float64, scale).T


def _first_gemm(x: Tensor, layer: MoELayer, r: Roundings, compute: torch.dtype) -> tuple[Tensor | None, Tensor]:
    out = []
    for weight, bias in ((layer.gate, layer.gate_bias), (layer.up, layer.up_bias)):
        if weight is None:
            out.append(None)
            continue
        h = _gemm(x, weight[0], layer.scale, r, r.gemm1, compute)
        out.append(h if bias is None else h + bias[0].to(compute))
    return out[0], out[1]


def _check_call(x: Tensor, experts: Tensor, router: Tensor, layer: MoELayer) -> None:
    if x.dim() != 2 or x.shape[1] != layer.hidden:
        raise MxdebugError("activations", f"shape [tokens, {layer.hidden}]", f"shape {list(x.shape)}", "hidden size padded on one side only")
    if experts.dim() != 2 or experts.shape[0] != x.shape[0] or experts.is_floating_point():
        raise MxdebugError("selected experts", f"integers of shape [{x.shape[0]}, top-k]", f"{experts.dtype} of shape {list(experts.shape)}")
    if router.shape != experts.shape:
        raise MxdebugError("router weights", f"shape {list(experts.shape)}", f"shape {list(router.shape)}")
