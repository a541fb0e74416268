"""Which tokens and experts of a call are enough? Tried from the worst token on, and each try is diagnosed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ..calls import Call
from ..checkpoints import Checkpoint, CheckpointLayer
from ..checkpoints.writing import copy_experts, copy_tensors
from ..contracts import Contract, LinearContract, find, find_linear
from ..diagnosis import Diagnosis, diagnose
from ..diagnosis.diagnose import exact
from ..diagnosis.given import Given
from ..diagnosis.linear_locate import Located, locate_linear
from ..diagnosis.locate import locate, position
from ..diagnosis.outputs import sample_tokens
from ..errors import MxdebugError
from ..recipes import recipe
from ..reference import Parallel
from .folder import README, check_free, readme, write
from .smaller import Places, smaller, smaller_linear

LOOKED_AT = 64  # tokens whose output is compared, to find the worst
ALONE = 4  # tokens that are tried alone
MOST = 16  # tokens that are put together one by one
SHOWN = 16  # numbers of tokens in a sentence
OWN = "Weights, activations and outputs are those that were recorded: look whether you may hand them on."
Faults = frozenset[tuple[str, frozenset[str]]]


@dataclass(frozen=True)
class Cut:
    """What was written.

    folder       with dump, checkpoint and README.txt
    before       the diagnosis of the whole call; after: that of what was written
    tokens       kept, of `of_tokens`: numbers in the call; experts: kept, of `of_experts` (both () and 0 for a linear layer)
    tries        how many cuts were diagnosed
    left_out     findings that made data cannot show, with the reason (`cut_made`)
    """

    folder: Path
    before: Diagnosis
    after: Diagnosis
    tokens: tuple[int, ...]
    of_tokens: int
    experts: tuple[int, ...]
    of_experts: int
    tries: int
    left_out: tuple[tuple[str, str], ...] = ()


def faults(d: Diagnosis, contract: Contract | LinearContract) -> Faults:
    """(fault id, titles of the operands that it struck) of each finding, and the verdict: what a cut must keep."""
    titles = {o.title for o in (*contract.operands, *contract.inputs)}
    return frozenset({(f.id, frozenset(titles & set(f.where.split(", ")))) for f in d.findings} | {(d.verdict, frozenset())})


def cut(
    call: Call, checkpoint: Checkpoint, out: Path, *, layer: int | None = None, module: str | None = None, tp: tuple[int, int] | None = None
) -> Cut:
    """Write a small cut of a call that shows the same faults on the same operands, and the same verdict, into a new folder.

    layer, module, tp   as of `diagnose`
    Raises MxdebugError where call or checkpoint cannot be read, the folder is not empty, or what was written shows other faults.
    """
    check_free(out)
    linear = find_linear(call.function, call.arguments)
    if linear is not None:
        return _cut_linear(call, linear, checkpoint, out, module, layer, tp)
    contract = find(call.function, call.arguments)
    if call.lost:
        raise MxdebugError("cut", "a call whose outputs could be read", call.lost, "diagnose it as it is: its inputs often decide alone")
    w13 = contract.operand("w13").get(call.arguments)
    if w13 is None or not w13.dim() or not len(w13) or not _count(call, contract):
        raise MxdebugError("cut", "a call with tokens and experts", "none", "send the call itself")
    index = locate(call, checkpoint) if layer is None else layer
    chosen = checkpoint.layer(index)
    before = diagnose(call, chosen, tp=tp)
    wanted, ranked = faults(before, contract), _worst_first(call, contract, chosen, tp)
    local = len(w13)
    ranks = chosen.layer.experts // local
    tries = 0

    def attempt(tokens: Sequence[int], positions: Sequence[int]) -> tuple[int, Call | None, Places]:
        """How many faults are missing or new; the cut; its places."""
        nonlocal tries
        tries += 1
        places = Places(tuple(sorted(positions)), local, ranks)
        try:
            made = smaller(call, contract, torch.tensor(sorted(tokens)), places)
            d = diagnose(made, replace(chosen, layer=chosen.layer.take(list(places.experts))), tp=tp)
        except MxdebugError:
            return len(wanted) + 1, None, places  # at this size it is no call of this kernel
        return len(wanted ^ faults(d, contract)), made, places

    def needed(tokens: Sequence[int]) -> set[int]:
        return _positions(call, contract, tokens, local, ranks)

    def best(tokens: Sequence[int]) -> tuple[int, Call | None, Places]:
        """The try with the fewest experts that shows all faults, else the best."""
        found = None
        for positions in _expert_sets(needed(tokens), chosen, local):
            if found is None or attempt_is_new(positions, found):
                tried = attempt(tokens, positions)
                found = tried if found is None or tried[0] < found[0] else found
                if not found[0]:
                    break
        return found

    def attempt_is_new(positions: Sequence[int], found: tuple[int, Call | None, Places]) -> bool:
        return tuple(sorted(positions)) != found[2].positions

    kept, found = _greedy(ranked, best)
    if found[0]:
        kept = list(range(_count(call, contract)))
        found = attempt(kept, range(local))
    if found[0] or found[1] is None:
        raise MxdebugError("cut", _said(wanted), "other faults, whatever is left out", "a fault of the whole call: send the call itself")
    places = found[2]
    after = write(
        out,
        found[1],
        lambda folder: copy_experts(checkpoint, index, places.experts, folder),
        tp,
        "cut",
        lambda d: faults(d, contract) == wanted,
        _said(wanted),
    )
    kept = sorted(kept)
    some = f"{len(places.experts)} of its {chosen.layer.experts} experts, numbered anew"
    text = f"{_some(kept, 'token')} of one call of {contract.path}, and {some}."
    (out / README).write_text(readme(after, text, OWN, tp))
    return Cut(out, before, after, tuple(kept), _count(call, contract), places.experts, chosen.layer.experts, tries)


def _greedy(
    ranked: Sequence[int], best: Callable[..., tuple[int, Call | None, Places]]
) -> tuple[list[int], tuple[int, Call | None, Places]]:
    """One token alone if one will do; else tokens one after the other, each kept if fewer faults are missing with it."""
    first = None
    for token in ranked[:ALONE]:
        found = best([token])
        if found[0] == 0:
            return [token], found
        if first is None or found[0] < first[1][0]:
            first = [token], found
    kept, found = first
    for token in [t for t in ranked[:MOST] if t not in kept]:
        if found[0] == 0:
            break
        more = best([*kept, token])
        if more[0] < found[0]:
            kept, found = [*kept, token], more
    if found[0] and len(ranked) > 1:  # what no single token adds, several may: the order of many scales, a sum over tokens
        size = 2
        while found[0] and size < len(ranked):
            kept, found = list(ranked[:size]), best(ranked[:size])
            size *= 2
    for token in list(kept):
        if found[0] == 0 and len(kept) > 1 and (fewer := best([t for t in kept if t != token]))[0] == 0:
            kept, found = [t for t in kept if t != token], fewer
    return kept, found


def _expert_sets(selected: set[int], chosen: CheckpointLayer, local: int) -> Iterator[set[int]]:
    """Positions to keep: those that the tokens select; with the experts of the largest input scales, which all share; one more; all."""
    yield set(selected)
    largest = {int(t.argmax()) % local for t in (chosen.layer.w13_input_scale, chosen.layer.w2_input_scale) if t is not None}
    if not largest <= selected:
        yield selected | largest
    more = next((p for p in range(local) if p not in selected | largest), None)
    if more is not None:
        yield selected | largest | {more}
    ends = selected | largest | {0, local - 1}
    if len(ends) < local:
        yield ends
    yield set(range(local))


def _positions(call: Call, contract: Contract, tokens: Sequence[int], local: int, ranks: int) -> set[int]:
    """Positions on any rank that the tokens select; the first where they select none, or where what they select cannot be read."""
    try:
        ids = contract.see(call.arguments, experts=[0]).experts
    except MxdebugError:
        return set(range(local))
    ids = ids[[t for t in tokens if t < len(ids)]].long()
    return set((ids[(ids >= 0) & (ids < local * ranks)] % local).tolist()) or {0}


def _count(call: Call, contract: Contract) -> int:
    return len(contract.operand("x").get(call.arguments))


def _worst_first(call: Call, contract: Contract, chosen: CheckpointLayer, tp: tuple[int, int] | None) -> list[int]:
    """Tokens by the distance of their output from what the checkpoint means, relative to its size; in order where there is no output."""
    output = call.outputs[0] if call.outputs else None
    try:
        given = Given.of(contract, call.arguments)
        tokens = sample_tokens(given, LOOKED_AT, output)
        if output is None:
            return tokens.tolist()
        where = position(given, chosen.layer, recipe("vllm", contract.path, chosen.kind), None if tp is None else Parallel(*tp))
        part = chosen.layer.part(where)
        want = exact(given.base, recipe("vllm", contract.path, chosen.kind).plan(part, chosen.layer), part, where, tokens).output
    except MxdebugError:
        return list(range(min(LOOKED_AT, _count(call, contract))))
    return tokens[_off(output[tokens][:, : want.shape[1]], want).argsort(descending=True, stable=True)].tolist()


def _off(got: Tensor, want: Tensor) -> Tensor:
    """float64 [T]: relative L2 of each token, inf where something is not finite."""
    a, b = got.double(), want.double()
    off = (a - b).norm(dim=1) / b.norm(dim=1).clamp(min=1e-300)
    return off.nan_to_num(torch.inf, torch.inf)


def _some(kept: Sequence[int], unit: str) -> str:
    return f"{len(kept)} {unit}{'s' if len(kept) != 1 else ''} ({', '.join(map(str, kept[:SHOWN]))}{', ...' if len(kept) > SHOWN else ''})"


def _said(wanted: Faults) -> str:
    return "the faults of the whole call: " + ", ".join(sorted(id for id, _ in wanted))


def _cut_linear(
    call: Call,
    contract: LinearContract,
    checkpoint: Checkpoint,
    out: Path,
    module: str | None,
    layer: int | None,
    tp: tuple[int, int] | None,
) -> Cut:
    """One token, or as few as show it, and the whole layer: its operands cannot be told apart any further."""
    located: Located = locate_linear(contract, call.arguments, checkpoint, module=module, layer=layer, tp=tp)
    before = diagnose(call, checkpoint, module=module, layer=layer, tp=tp)
    x = contract.operand("x").get(call.arguments)
    count = len(x) if x is not None and x.dim() == 2 else 0
    wanted, tries, found, kept = faults(before, contract), 0, None, []
    alone = faults(diagnose(call, located.chosen, tp=tp), contract)  # without what only the other layers say
    ranked = _worst_linear(call, contract, located) if count else []
    for tokens in [*([t] for t in ranked[:ALONE]), *(ranked[: 2**n] for n in range(1, 7) if 2**n < count), list(range(count))]:
        tries, kept = tries + 1, sorted(tokens)
        try:
            made = smaller_linear(call, contract, torch.tensor(kept)) if len(kept) < count else call
            if faults(diagnose(made, located.chosen, tp=tp), contract) == alone:
                found = made
                break
        except MxdebugError:
            continue
    if found is None:
        raise MxdebugError("cut", _said(wanted), "other faults, whatever is left out", "a fault of the whole call: send the call itself")
    names = [name for operand in located.chosen.names.values() for name in operand]
    after = write(
        out,
        found,
        lambda folder: copy_tensors(checkpoint, names, folder),
        tp,
        "cut",
        lambda d: faults(d, contract) == wanted,
        _said(wanted),
    )
    (out / README).write_text(
        readme(after, f"{_some(kept, 'token')} of one call of {contract.path}, and the whole layer {located.chosen.name}.", OWN, tp)
    )
    return Cut(out, before, after, tuple(kept), count, (), 0, tries)


def _worst_linear(call: Call, contract: LinearContract, located: Located) -> list[int]:
    x, layer = contract.operand("x").get(call.arguments), located.chosen.layer
    tokens = torch.arange(min(LOOKED_AT, len(x)))
    if not call.outputs or x.shape[1] < layer.k:
        return tokens.tolist()
    want = replace(layer, bias=None).forward(x[tokens, : layer.k].double())
    return tokens[_off(call.outputs[0][tokens, : layer.n], want).argsort(descending=True, stable=True)].tolist()
