"""The same faults with made numbers: nothing of a user's weights or activations is in it, so that anybody may have it.

The faults that a diagnosis found are injected (`Fault.injected`) into a situation of the same path, checkpoint kind and position.
The output is that of the emulation, for no kernel ran on these numbers.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from ..calls import Call
from ..checkpoints import Checkpoint, CheckpointLayer, open_checkpoint
from ..checkpoints.kinds import GPT_OSS, LEAVES
from ..checkpoints.writing import EXPERTS, save, small_config
from ..contracts import Contract, find, find_linear
from ..diagnosis import Diagnosis, Finding, diagnose
from ..diagnosis.given import Given
from ..diagnosis.locate import locate, position
from ..errors import MxdebugError
from ..faults import SCALARS, Fault, Situation
from ..recipes import recipe
from ..reference import Parallel
from .folder import README, check_free, readme, write
from .search import Cut

MOST_EXPERTS = 4  # on a rank
# 512 and what is beyond a multiple of 256: all kernels pad to multiples of 256 at most, so what was padded is padded, by as much. Less than
# 512 would give NVFP4 16 scale columns, where a swizzle is its own inverse.
SMALL, STEP = 512, 256
DIFFER = ("global-shared-by-halves", "global-of-other-half")  # show where w1 and w3 have global scales of their own
FLUSHED = "scales-small-flushed"  # shows where some scales are small
MAGNITUDE = 3.0  # of the activations: pre-activations then reach beyond a limit of 7


def cut_made(
    call: Call, checkpoint: Checkpoint, out: Path, *, layer: int | None = None, module: str | None = None, tp: tuple[int, int] | None = None
) -> Cut:
    """Write a call with made numbers that shows the faults which the diagnosis of this one finds, into a new folder.

    Arguments as of `cut`. Findings that cannot be injected are left out, and listed in the result with the reason. Raises MxdebugError
    where that leaves none, and where what was written shows other faults.
    """
    check_free(out)
    if find_linear(call.function, call.arguments) is not None:
        raise MxdebugError(
            "--probe-data", "a call of a mixture of experts", f"a call of {call.function}", "not made for linear layers yet: cut it without"
        )
    contract = find(call.function, call.arguments)
    index = locate(call, checkpoint) if layer is None else layer
    chosen = checkpoint.layer(index)
    before = diagnose(call, chosen, tp=tp)
    where = _position(call, contract, chosen, tp)
    tries, problem, left_out = 0, "", ()
    for small, tokens in ((True, 4), (True, 16), (False, 4), (True, 130)):
        tries += 1
        with tempfile.TemporaryDirectory() as folder:
            opened = open_checkpoint(_write_made(checkpoint, index, chosen, where, small, before, Path(folder)))
            made, kept, left_out = _injected(contract, opened, where, before, tokens, _top_k(call, contract))
            if not kept:
                raise MxdebugError(
                    "--probe-data",
                    "a finding that can be injected",
                    before.verdict + "".join(f"; {id}: {why}" for id, why in left_out),
                    "made numbers show known faults only: cut the call without --probe-data",
                )
            recorded = _call(call, made)
            wanted = frozenset((f.id, _struck(f, contract)) for f in kept)
            try:
                after = write(
                    out,
                    recorded,
                    lambda to: _write_made(checkpoint, index, chosen, where, small, before, to),
                    tp,
                    "--probe-data",
                    lambda d: frozenset((f.id, _struck(f, contract)) for f in d.findings) == wanted,
                    ", ".join(sorted(f.id for f in kept)),
                )
            except MxdebugError as error:
                problem = problem or error.got
                continue
        numbers = (
            "Weights and activations are made (random), none is a model's. The output is mxdebug's emulation, not a recording."
        )
        sizes = f"{made.layer.experts} experts, hidden {made.layer.hidden}, intermediate {made.layer.intermediate}"
        kind = f"One call of {contract.path}, {len(made.x)} tokens, {sizes}."
        (out / README).write_text(readme(after, kind, numbers, tp))
        return Cut(
            out,
            before,
            after,
            tuple(range(len(made.x))),
            len(made.x),
            tuple(range(made.layer.experts)),
            made.layer.experts,
            tries,
            left_out,
        )
    raise MxdebugError(
        "--probe-data",
        ", ".join(f.id for f in before.findings),
        problem,
        "a fault that made numbers do not show: cut the call without --probe-data",
    )


def _struck(f: Finding, contract: Contract) -> frozenset[str]:
    return frozenset({o.title for o in (*contract.operands, *contract.inputs)} & set(f.where.split(", ")))


def _position(call: Call, contract: Contract, chosen: CheckpointLayer, tp: tuple[int, int] | None) -> Parallel:
    try:
        given = Given.of(contract, call.arguments)
        return position(given, chosen.layer, recipe("vllm", contract.path, chosen.kind), None if tp is None else Parallel(*tp))
    except MxdebugError:
        return contract.parallel(call.arguments)


def _top_k(call: Call, contract: Contract) -> int:
    try:
        return contract.see(call.arguments, experts=[0]).experts.shape[1]
    except MxdebugError:
        return 2


def _injected(
    contract: Contract, made: Checkpoint, where: Parallel, before: Diagnosis, tokens: int, top_k: int
) -> tuple[Situation, list[Finding], tuple[tuple[str, str], ...]]:
    """(the situation with every fault that can be injected, these findings, (id, reason) of the others)."""
    chosen, g = made.layer(made.layers[0]), torch.Generator().manual_seed(1)
    total = chosen.layer.experts
    x = (MAGNITUDE * torch.randn(tokens, chosen.layer.hidden, generator=g)).bfloat16()
    ids = torch.stack([torch.randperm(total, generator=g)[: min(top_k, total)] for _ in range(tokens)]).int()
    router = torch.softmax(torch.randn(ids.shape, generator=g), -1)
    s = Situation.right(recipe("vllm", contract.path, chosen.kind), chosen.layer, x, ids, router, where)
    kept, left_out = [], []
    for f in before.findings:
        try:
            fault: Fault = f.fault
            struck = _keys(f, contract, s)
            s = s if f.id == DIFFER[0] else fault.injected(s, struck or None)
            s.build()
        except (MxdebugError, RuntimeError, IndexError, KeyError, AttributeError) as error:
            left_out.append((f.id, str(error)))
        else:
            kept.append(f)
    return s, kept, tuple(left_out)


def _keys(f: Finding, contract: Contract, s: Situation) -> tuple[str, ...]:
    """The operands that a finding names, of those that its fault can strike."""
    titles = {o.title: o.key for o in (*contract.operands, *contract.inputs)}
    named = [titles[t] for t in f.where.split(", ") if t in titles]
    return tuple(k for k in named if k in f.fault.strikes and (k in s.plan.forms or k in SCALARS))


def _call(call: Call, s: Situation) -> Call:
    """The situation's call, with versions and, of the same function, the signature of the recorded one."""
    made = s.call()
    return replace(made, module=call.module, versions=call.versions, signature=call.signature if call.function == made.function else made.signature)


# -- the checkpoint -----------------------------------------------------------------------------------------------------


def _sizes(chosen: CheckpointLayer, where: Parallel, small: bool) -> tuple[int, int]:
    """(intermediate, hidden)."""

    def less(n: int) -> int:
        return SMALL + n % STEP if small and n > SMALL + STEP else n

    i, h, tp = chosen.layer.intermediate, chosen.layer.hidden, where.tp_size
    return (less(i // tp) * tp if i % tp == 0 else i), less(h)


def _write_made(
    checkpoint: Checkpoint, index: int, chosen: CheckpointLayer, where: Parallel, small: bool, before: Diagnosis, folder: Path
) -> Path:
    """A checkpoint of the same kind, with made tensors under the names of layer `index`."""
    experts = min(MOST_EXPERTS, chosen.layer.experts // where.ep_size) * where.ep_size
    i, h = _sizes(chosen, where, small)
    ids = {f.id for f in before.findings}
    tensors = dict(_tensors(checkpoint, index, experts, i, h, bool(ids & set(DIFFER)), FLUSHED in ids))
    sizes = {"hidden_size": h, "intermediate_size": i, "moe_intermediate_size": i}
    return save(folder, tensors, *small_config(checkpoint, {**{k: experts for k in EXPERTS}, **sizes}))


def _tensors(checkpoint: Checkpoint, index: int, experts: int, i: int, h: int, differ: bool, tiny: bool) -> Iterator[tuple[str, Tensor]]:
    """Tensors by name: codes of every kind, block scales that differ by row and block, global scales by expert, and (differ) by half."""
    names, g = checkpoint._names[index], torch.Generator().manual_seed(0)
    outer = names.kind != GPT_OSS and LEAVES[names.kind].format.outer
    low, high = (0x04 if tiny else 0x28, 0x48) if outer else (100 if tiny else 116, 124)  # E4M3 from 2^-2 to 2^2; E8M0 from 2^-11 to 2^-4

    def codes(*shape: int) -> Tensor:
        return torch.randint(0, 256, shape, generator=g, dtype=torch.uint8)

    def scales(*shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=g, dtype=torch.uint8)

    if names.kind == GPT_OSS:
        for projection, rows, columns in (("gate_up_proj", 2 * i, h), ("down_proj", h, i)):
            yield names.fused[f"{projection}_blocks"], codes(experts, rows, columns // 32, 16)
            yield names.fused[f"{projection}_scales"], scales(experts, rows, columns // 32)
            if (bias := names.fused.get(f"{projection}_bias")) is not None:
                yield bias, torch.randn(experts, rows, generator=g).bfloat16()
        return
    leaves = LEAVES[names.kind]
    words = [w for w in ("w1", "w3", "w2") if (w, leaves.payload) in names.single]
    with checkpoint._store.reader() as reader:
        stored = {key: reader.header(found[min(found)]) for key, found in names.single.items()}
    for e in range(experts):
        shared: tuple[float, float] = (1.0, 1.0)
        for word in words:
            rows, columns = (h, i) if word == "w2" else (i, h)
            drawn = tuple((torch.rand(2, generator=g) + 0.5).tolist())
            shared = shared if word == "w3" and "w1" in words and not differ else drawn
            # A weight of some hundredths; an input as large as activations get: the largest block scale times the largest code is 448 * 6.
            numbers = {leaves.global_scale: shared[0] * 2.0**-6, leaves.input_scale: shared[1] * (120.0 if word == "w2" else 13.5) / 2688}
            for leaf in leaves.all:
                if (word, leaf) not in names.single:
                    continue
                dtype, shape = stored[word, leaf]
                name = f"{names.module}.{e}.{names.words[word]}.{leaf}"
                if leaf == leaves.payload:
                    yield name, codes(rows, columns // 2)
                elif leaf == leaves.scale:
                    t = scales(rows, columns // leaves.format.block)
                    yield name, t if dtype == "U8" else t.view(torch.float8_e4m3fn if outer else torch.float8_e8m0fnu)
                elif leaf == "bias":
                    yield name, torch.randn(rows, generator=g).to({"BF16": torch.bfloat16, "F16": torch.float16}.get(dtype, torch.float32))
                else:
                    value = 1.0 / numbers[leaf] if leaves.divides else numbers[leaf]
                    yield name, torch.full(shape, value, dtype=torch.float32)
