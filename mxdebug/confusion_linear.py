"""Which evidence names which fault of a linear layer? The columns of the W4A16 paths in the table of `mxdebug confusion`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor

from .calls import Call
from .checkpoints.writing import save
from .confusion import Case, judged
from .contracts import LINEAR_CONTRACTS
from .diagnosis import Diagnosis, diagnose, diagnose_run
from .errors import MxdebugError
from .evidence import CANNOT, KINDS
from .faults import FAULTS, LINEAR_FAULTS, Fault, LinearSituation
from .faults.linear_faults import LAYER
from .recipes.vllm import MODELOPT
from .recipes.w4a16.examples import made_linear
from .recipes.w4a16.recipe import linear_recipe
from .reference_linear import LinearLayer

LINEAR_PATHS = tuple(LINEAR_CONTRACTS)
# (rows of the joined parts, K, whether their global scales differ): aligned, N unaligned, K unaligned, several parts. All have biases.
_LAYERS = (
    ((128,), 384, False),
    ((104,), 384, False),
    ((128,), 352, False),
    ((104, 48, 48), 352, False),
    ((104, 48, 48), 352, True),
)
_ROWS, _K = (96, 48, 48), 352  # of q, k and v, for faults that the rest of a checkpoint shows


@dataclass(frozen=True)
class Struck:
    """A fault that moves something.

    right     the situation without it
    call      the kernel's call as it was recorded
    together  what that call, or the run of the layer around it, comes to next to the checkpoint
    """

    right: LinearSituation
    call: Call
    together: Callable[[], Diagnosis]


def linear_situations(path: str) -> Iterator[LinearSituation]:
    """Right calls of a linear path, one after the other. x [2, 3, K]."""
    for parts, k, differ in _LAYERS:
        yield _situation(path, made_linear(sum(parts), k, parts=parts, differ=differ))


def struck(fault: Fault, path: str) -> Struck | None:
    """The fault in the first situation in which it moves the layer's output, or stops it; None where it cannot strike the path."""
    if fault.id not in LINEAR_FAULTS:
        return _OTHERS[fault.id](path) if fault.id in _OTHERS else None
    strike = LINEAR_FAULTS[fault.id]
    for s in linear_situations(path):
        try:
            broken = strike.inject(s)
        except MxdebugError:
            continue
        right, run = s.run().output, broken.run()
        if run.output is not None and run.output.shape == right.shape and torch.equal(run.output, right):
            continue
        call, chosen = broken.call(), broken.checkpoint()
        if strike.level == LAYER:  # the kernel's call is right
            return Struck(s, call, lambda: diagnose_run(run, chosen, s.recipe.contract))
        return Struck(s, call, lambda: diagnose(call, chosen))
    return None


def examine_linear(fault: Fault, path: str) -> Case:
    """Strike a linear path with a fault and diagnose it with each kind of evidence."""
    nothing, case = dict.fromkeys(KINDS, CANNOT), struck(fault, path)
    if case is None:
        return Case(fault, path, None, nothing)
    keys, contract = LINEAR_FAULTS[fault.id].strikes if fault.id in LINEAR_FAULTS else (), case.right.recipe.contract
    titles = {o.title for o in (*contract.operands, *contract.inputs) if o.key in keys}
    ways = {"call": lambda: diagnose(case.call), "together": case.together}
    return judged(Case(fault, path, case.right, nothing), ways, titles, moved=True)


def _situation(path: str, layer: LinearLayer) -> LinearSituation:
    x = torch.randn(2, 3, layer.k, generator=torch.Generator().manual_seed(1)).bfloat16()
    return LinearSituation.right(linear_recipe(path, MODELOPT), layer, x)


def _qkv(seed: int = 0) -> LinearLayer:
    return made_linear(sum(_ROWS), _K, parts=_ROWS, differ=False, seed=seed)


# -- faults that no slot of the plan has: of the activations, of the arguments, of another part of the checkpoint ---------------------


def _of_x(path: str, value: float) -> Struck:
    right = _situation(path, _qkv())
    x = right.x.clone()
    x[1, 2, 7] = value
    s = replace(right, x=x)
    call = s.call()
    return Struck(right, call, lambda: diagnose(call, s.checkpoint()))


def _beyond_fp16(path: str) -> Struck | None:
    return _of_x(path, 2.0**17) if _situation(path, _qkv()).plan.sm12x else None  # SM100 multiplies in bf16


def _refused(path: str) -> Struck:
    """A global scale for each joined part, where the kernel takes one number."""
    s = _situation(path, _qkv())
    arguments = s.arguments()
    s.recipe.contract.operand("alpha").put(arguments, s.layer.global_scales)
    call = Call.made(s.recipe.contract.function, arguments)
    return Struck(s, call, lambda: diagnose(call, s.checkpoint()))


def _another_layer(path: str) -> Struck:
    own, other = (_situation(path, _qkv(seed)) for seed in _SEEDS)
    c, arguments = own.recipe.contract, own.arguments()
    c.operand("weight_scale").put(arguments, c.get("weight_scale", other.arguments()))
    call = Call.made(c.function, arguments, c.emulate(arguments))
    return Struck(own, call, lambda: _by_files(call, None))


def _another_rank(path: str) -> Struck:
    s = _situation(path, _qkv().part(2, 0, "rows"))
    call = s.call()
    return Struck(s, call, lambda: _by_files(call, (2, 1)))


_OTHERS: dict[str, Callable[[str], Struck | None]] = {
    "input-not-finite": lambda path: _of_x(path, torch.nan),
    "activations-beyond-fp16": _beyond_fp16,
    "contract-broken": _refused,
    "operand-of-another-layer": _another_layer,
    "wrong-tp-slice": _another_rank,
}
_SEEDS = (0, 4)  # of the two layers of `_by_files`
_CONFIG = {"model_type": "llama", "quantization_config": {"quant_method": "modelopt", "quant_algo": "W4A16_NVFP4", "group_size": 16}}


def _by_files(call: Call, tp: tuple[int, int] | None) -> Diagnosis:
    """The call next to a checkpoint of two layers' q, k and v, as ModelOpt writes it."""
    tensors: dict[str, Tensor] = {}
    for i, seed in enumerate(_SEEDS):
        layer = _qkv(seed)
        parts = zip(*(t.split(_ROWS) for t in (layer.payload, layer.scales.view(torch.float8_e4m3fn), layer.bias)), layer.global_scales)
        for name, of in zip("qkv", parts):
            leaves = zip(("weight", "weight_scale", "bias", "weight_scale_2"), of)
            tensors |= {f"model.layers.{i}.self_attn.{name}_proj.{leaf}": t for leaf, t in leaves}
    with TemporaryDirectory() as folder:
        return diagnose(call, save(Path(folder), tensors, _CONFIG), tp=tp)


def measure_linear(path: str, faults: Iterable[str] | None = None) -> list[Case]:
    """All cases of a linear path: every fault of the catalogue, or these."""
    return [examine_linear(FAULTS[id], path) for id in (FAULTS if faults is None else faults)]
