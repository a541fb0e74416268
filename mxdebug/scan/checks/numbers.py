"""Global scales of weights and of activations: are they usable numbers, and do those agree that engines take for one?"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from ..catalogue import RULES
from ..finding import Finding, make, shown
from ..scene import Scene
from ..weights import JOINED, Weight

_SMALLEST_NORMAL = 2.0**-126
_FAR = (2.0**-60, 2.0**20)
"""A multiplier is amax / 2688. Beyond these amax is below 2^-48 or above 2^31: memory's content, or a dead expert (flashinfer#2595)."""
_SPREAD = 2.0**15
"""448 / 2^-6: with a global scale too large by more than this, block scales fall below E4M3's normal numbers."""


def check(scene: Scene) -> Iterator[Finding]:
    """Unusable numbers, joined weights that differ, experts that are far apart."""
    for label, weights in scene.classes:
        for role in ("global", "input"):
            yield from _bad(scene, label, weights, role)
    yield from _joined(scene)
    yield from _outliers(scene)


def why_bad(stored: float, multiplier: float) -> str | None:
    """In a word, why a global or input scale cannot be used; None where it can. Engines use the number and its reciprocal."""
    for x in (stored, multiplier):
        if math.isnan(x):
            return "NaN"
        if math.isinf(x) and x == stored:
            return "inf"
    if stored == 0:
        return "zero"
    if stored < 0:
        return "negative"
    if stored < _SMALLEST_NORMAL or math.isinf(multiplier) or multiplier < _SMALLEST_NORMAL:
        return "denormal"
    return None if _FAR[0] <= multiplier <= _FAR[1] else "far out"


def _bad(scene: Scene, label: str, weights: list[Weight], role: str) -> Iterator[Finding]:
    found: dict[str, list[tuple[Weight, float]]] = {}
    having = 0
    for w in weights:
        if (stored := scene.number(w, role)) is not None:
            having += 1
            if (why := why_bad(stored, scene.multiplier(w, role))) is not None:
                found.setdefault(why, []).append((w, stored))
    for why, those in found.items():
        yield make(
            RULES[f"{role}-bad"],
            f"{shown(label)}: {len(those):,} of {having:,} are {why}, such as {those[0][1]:.4g}",
            (w.leaves[role] for w, _ in those),
            having,
            (w.expert for w, _ in those),
        )


def _joined(scene: Scene) -> Iterator[Finding]:
    """gate and up of experts, q, k and v, gate and up of a dense MLP."""
    for role, experts_rule, linear_rule in (("global", "w13-differ", "joined-differ"), ("input", "inputs-differ", "inputs-differ")):
        found: dict[tuple[str, str], list[tuple[float, list[Weight]]]] = {}
        of: dict[tuple[str, str], int] = {}
        for parts in _parts(scene):
            values = [x for w in parts if (x := scene.multiplier(w, role)) is not None and 0 < x < math.inf]
            if len(values) == len(parts):
                key = (experts_rule if parts[0].expert is not None else linear_rule, parts[0].label.rpartition(".")[0])
                of[key] = of.get(key, 0) + 1
                if max(values) != min(values):
                    found.setdefault(key, []).append((max(values) / min(values), parts))
        for (rule, label), those in found.items():
            ratio, parts = max(those, key=lambda found: found[0])
            names = ", ".join(f"{w.projection} {scene.multiplier(w, role):.4g}" for w in parts)
            yield make(
                RULES[rule],
                f"{shown(label)}: {len(those):,} of {of[rule, label]:,} differ, up to {ratio:.4g} times "
                f"({names}, in {shown(parts[0].module)})",
                (w.leaves[role] for _, ps in those for w in ps),
                None,
                (w.expert for _, ps in those for w in ps),
            )


def _parts(scene: Scene) -> Iterator[list[Weight]]:
    for weights in scene.parents.values():
        by: dict[int | None, dict[str, Weight]] = {}
        for w in weights:
            by.setdefault(w.expert, {})[w.projection] = w
        for expert, of in by.items():
            for names in [{"w1", "w3"}] if expert is not None else JOINED:
                if len(have := sorted(names & of.keys())) > 1:
                    yield [of[name] for name in have]


def _outliers(scene: Scene) -> Iterator[Finding]:
    for parent, weights in scene.parents.items():
        for role in ("global", "input"):
            for projection in sorted({w.projection for w in weights if w.expert is not None}):
                of = [
                    (x, w)
                    for w in weights
                    if w.projection == projection and (x := scene.multiplier(w, role)) is not None and 0 < x < math.inf
                ]
                if len(of) > 1 and (spread := max(x for x, _ in of) / min(x for x, _ in of)) > _SPREAD:
                    middle = float(np.median([x for x, _ in of]))
                    quiet = [w for x, w in of if middle / x > _SPREAD] or [min(of, key=lambda o: o[0])[1]]
                    yield make(
                        RULES["experts-outlier"],
                        f"{shown(parent)}, {projection}, {role} scales: largest / smallest is 2^{math.log2(spread):.1f}",
                        (w.leaves[role] for w in quiet),
                        len(of),
                        (w.expert for w in quiet),
                    )
