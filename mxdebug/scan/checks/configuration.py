"""Do the weights and the configuration say the same?"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping

from ...checkpoints.kinds import GPT_OSS
from ..catalogue import RULES
from ..finding import Finding, make
from ..header import Entry
from ..kinds import KINDS
from ..scene import Scene
from ..weights import Weight, layer_of

# Linear modules that engines build quantised unless they are told otherwise. Routers, embeddings and norms they leave alone.
_PROJECTIONS = frozenset("q_proj k_proj v_proj o_proj qkv_proj out_proj gate_proj up_proj down_proj gate_up_proj w1 w2 w3".split())
_ELSEWHERE = re.compile(r"vision|visual|audio|mtp|draft|eagle", re.IGNORECASE)  # other models in the same file, often in bf16
_FLOATS = ("BF16", "F16", "F32")


def check(scene: Scene) -> Iterator[Finding]:
    """Kind, block, ignore list, number of experts and layers, hidden size."""
    yield from _kind(scene)
    yield from _ignored(scene)
    yield from _counts(scene)


def _kind(scene: Scene) -> Iterator[Finding]:
    stated, weights = scene.stated, scene.weights.quantised
    if stated.kind is None:
        return
    others: dict[str, list[Weight]] = {}
    for w in weights:
        if w.kind.name != stated.kind:
            others.setdefault(w.kind.name, []).append(w)
    for name, found in others.items():
        yield make(
            RULES["kind-contradiction"],
            f"{len(found):,} of {len(weights):,} quantised weights are {name} by their names and dtypes; "
            f"stated is {stated.kind} ({stated.words})",
            (w.module for w in found),
            len(weights),
            (w.expert for w in found),
        )
    if stated.block is not None and stated.block != KINDS[stated.kind].block:
        yield make(
            RULES["group-size"],
            f"the configuration states {stated.block}; {KINDS[stated.kind].format} has {KINDS[stated.kind].block}",
            ["config.json"],
        )


def _ignored(scene: Scene) -> Iterator[Finding]:
    stated = scene.stated
    if found := [w for w in scene.weights.quantised if stated.ignore.names(w.module) or (w.in_experts and stated.ignore.names(w.parent))]:
        yield make(
            RULES["ignored-but-quantised"],
            f"{len(found):,} modules of the ignore list have payload and scales",
            (w.module for w in found),
            len(scene.weights.quantised),
            (w.expert for w in found),
        )
    if stated.kind is not None and stated.kind != GPT_OSS:  # gpt-oss quantises experts only, whatever is not named
        layers = stated.sizes.get("layers")
        plain = [
            m
            for m, leaves in scene.weights.other.items()
            if _plain(m, leaves, layers) and not stated.ignore.covers(m) and (stated.targets is None or stated.targets.covers(m))
        ]
        if plain:
            yield make(
                RULES["expected-but-unquantised"],
                f"{len(plain):,} linear modules are {'/'.join(_FLOATS)} and not on the ignore list",
                plain,
                len(plain) + len(scene.weights.quantised),
            )
    if stated.ignore.dropped:
        yield make(RULES["pattern-unreadable"], f"{len(stated.ignore.dropped)} patterns", stated.ignore.dropped)


def _plain(module: str, leaves: Mapping[str, Entry | None], layers: int | None) -> bool:
    weight, layer = leaves.get("weight"), layer_of(module)
    return (
        weight is not None
        and weight.dtype in _FLOATS
        and len(weight.shape) == 2
        and module.rpartition(".")[2] in _PROJECTIONS
        and layer is not None
        and not any("scale" in leaf for leaf in leaves)
        and not _ELSEWHERE.search(module)
        and (layers is None or layer < layers)
    )


def _counts(scene: Scene) -> Iterator[Finding]:
    sizes = scene.stated.sizes
    if (stated := sizes.get("experts")) is not None and scene.folder.whole:
        wrong = {
            parent: n
            for parent, found in scene.parents.items()
            if not _ELSEWHERE.search(parent) and (n := _experts(found)) not in (0, stated)
        }
        if wrong:
            yield make(
                RULES["experts-count"], f"{len(wrong)} layers have {_range(wrong.values())} experts; config.json states {stated}", wrong
            )
    if (layers := sizes.get("layers")) is not None and scene.folder.whole:
        present = {layer_of(name) for name in (*scene.folder.tensors, *scene.folder.unread) if not _ELSEWHERE.search(name)}
        absent = sorted(set(range(min(layers, 10_000))) - present)
        if absent and len(present - {None}):
            yield make(RULES["layers-missing"], f"{len(absent)} of {layers}: {_list(absent)}", (f"layers.{n}" for n in absent), layers)
    if (hidden := sizes.get("hidden")) is not None:
        wrong = [
            w
            for w in scene.weights.quantised
            if w.in_experts and w.projection in ("w1", "w3", "gate_up_proj") and w.sizes is not None and w.sizes[2] != hidden
        ]
        if wrong:
            yield make(
                RULES["sizes-and-config"],
                f"experts have K {wrong[0].sizes[2]}; config.json states hidden_size {hidden}",
                (w.module for w in wrong),
            )


def _experts(weights: list[Weight]) -> int:
    numbers = {w.expert for w in weights if w.expert is not None}
    return len(numbers) if numbers else next((w.sizes[0] for w in weights if w.fused and w.sizes is not None), 0)


def _range(numbers: Collection[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _list(numbers: list[int], most: int = 8) -> str:
    return ", ".join(map(str, numbers[:most])) + (f" and {len(numbers) - most} more" if len(numbers) > most else "")
