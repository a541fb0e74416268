"""Are all tensors there, of the dtype and shape that their kind has? By names and headers alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ...checkpoints.kinds import GPT_OSS
from ..catalogue import RULES
from ..finding import Finding, make
from ..header import Entry
from ..measure import LONGEST
from ..scene import Scene
from ..tasks import is_number
from ..weights import WORDS, Weight

_BLOCKS = (16, 32)
_MOST_NAMED = 3


def check(scene: Scene) -> Iterator[Finding]:
    """Missing and unknown tensors, dtypes, shapes, sizes of one layer that do not fit together."""
    yield from _missing(scene)
    yield from _inputs(scene)
    yield from _unknown(scene)
    yield from _headers(scene)
    yield from _sizes(scene)


def _missing(scene: Scene) -> Iterator[Finding]:
    quantised = scene.weights.quantised
    names = []
    for w in quantised:
        needed = {"payload": w.kind.payload, "scale": w.kind.scale[0]} | ({"global": w.kind.global_scale} if w.kind.global_scale else {})
        names += [
            (f"{w.module}{'_' if w.kind.name == GPT_OSS else '.'}{leaf}", w.expert) for role, leaf in needed.items() if role not in w.leaves
        ]
    if names:
        yield make(
            RULES["tensors-missing"] if scene.folder.whole else RULES["file-alone"],
            f"{len(names):,} tensors beside others of their module, the first {names[0][0]}",
            (n for n, _ in names),
            experts=(e for _, e in names),
        )
    absent = list(_absent(scene))
    if absent:
        yield make(
            RULES["tensors-missing"] if scene.folder.whole else RULES["file-alone"],
            f"{len(absent):,} projections that other experts or layers have",
            (n for n, _ in absent),
            experts=(e for _, e in absent),
        )


def _inputs(scene: Scene) -> Iterator[Finding]:
    for label, weights in scene.classes:
        without = [w for w in weights if "input" not in w.leaves]
        if weights[0].kind.input_scale and without and len(without) < len(weights):
            yield make(
                RULES["input-missing"] if scene.folder.whole else RULES["file-alone"],
                f"{label}: {len(without):,} of {len(weights):,} have no {weights[0].kind.input_scale}",
                (w.module for w in without),
                len(weights),
                (w.expert for w in without),
            )


def _absent(scene: Scene) -> Iterator[tuple[str, int | None]]:
    """(module, expert) of projections that are not there at all."""
    experts = {parent: found for parent, found in scene.parents.items() if any(w.in_experts for w in found)}
    usual = {w.projection: w.module.rpartition(".")[2] for found in experts.values() for w in found}
    for parent, found in experts.items():
        have = {(w.projection, w.expert) for w in found}
        spelled = usual | {w.projection: w.module.rpartition(".")[2] for w in found}
        # There, but not quantised: no download lacks it.
        plain = {_place(m) for m, leaves in scene.weights.other.items() if m.startswith(f"{parent}.") and leaves.keys() - {"bias"}}
        numbered = [w.expert for w in found if w.expert is not None]
        numbers = range(1 + max(numbered)) if numbered else [None]
        for projection in sorted(usual):
            for e in numbers:
                module = ".".join([parent, *([str(e)] if e is not None else []), spelled[projection]])
                if (projection, e) not in have and _place(module) not in plain:
                    yield module, e


def _place(module: str) -> str:
    """A module's name with its projection in one spelling."""
    head, _, last = module.rpartition(".")
    return f"{head}.{WORDS.get(last, last)}"


def _unknown(scene: Scene) -> Iterator[Finding]:
    if names := [(name, w.expert) for w in scene.weights.quantised for name in w.unknown]:
        yield make(
            RULES["tensors-unknown"],
            f"{len(names):,} tensors beside quantised weights",
            (n for n, _ in names),
            experts=(e for _, e in names),
        )
    others: dict[str, list[str]] = {}
    for module, leaves in scene.weights.other.items():
        if (packed := next((f"{leaf} {e.dtype}" for leaf, e in leaves.items() if e is not None and _quantised(e)), None)) is not None:
            others.setdefault(packed, []).append(module)
    if others:
        found = [m for modules in others.values() for m in modules]
        yield make(
            RULES["not-read"],
            f"{len(found):,} modules, with {', '.join(list(others)[:_MOST_NAMED])}{' and others' if len(others) > _MOST_NAMED else ''}",
            found,
            len(found) + len(scene.weights.quantised),
        )


def _quantised(entry: Entry) -> bool:
    """Whether a tensor holds codes of some format: INT4 in words of 32 bits, FP8, bytes. A vector is a table or a mask."""
    return len(entry.shape) > 1 and (entry.dtype in ("U8", "I8", "I32", "U32") or entry.dtype.startswith(("F8_", "F4", "F6_")))


def _headers(scene: Scene) -> Iterator[Finding]:
    for label, weights in scene.classes:
        found: dict[tuple[str, str], list[Weight]] = {}
        for w in weights:
            for rule, text in _wrong(w):
                found.setdefault((rule, text), []).append(w)
        for (rule, text), those in found.items():
            yield make(RULES[rule], f"{label}: {text}", (w.module for w in those), len(weights), (w.expert for w in those))


def _wrong(w: Weight) -> Iterator[tuple[str, str]]:
    payload, scale, kind = w.known.get("payload"), w.known.get("scale"), w.kind
    if payload is not None and payload.dtype != kind.payload_dtype:
        yield "payload-dtype", f"{payload.dtype} {list(payload.shape)} instead of {kind.payload_dtype}"
    elif payload is not None and w.sizes is None:
        yield "payload-shape", f"payload {list(payload.shape)}"
    elif payload is not None and payload.size // (w.sizes[0] * w.sizes[1]) > LONGEST:
        yield "payload-shape", f"payload {list(payload.shape)}: rows of more than {LONGEST} bytes"
    if scale is not None and scale.dtype not in kind.scale_dtypes:
        yield "scale-dtype", f"{scale.dtype} instead of {' or '.join(kind.scale_dtypes)}"
    for role in ("global", "input"):
        if role in w.known and not is_number(w.known[role]):
            yield f"{role}-bad", f"{w.known[role].dtype} {list(w.known[role].shape)} instead of one F32 number"
    if scale is not None and w.sizes is not None and scale.shape != w.scale_shape:
        yield _shape(w, scale.shape)


def _shape(w: Weight, got: tuple[int, ...]) -> tuple[str, str]:
    """(rule, text) for scales of a shape that does not fit the payload's."""
    e, n, k = w.sizes
    head = (e,) if w.fused else ()
    for block in _BLOCKS:
        if block != w.kind.block and k % block == 0 and got == (*head, n, k // block):
            return "group-size", f"one scale for {block} elements; {w.kind.format} has {w.kind.block}"
    per = 2 if w.kind.packed else 1
    if len(got) == len(head) + 2 and (got[-2] * per, got[-1] * w.kind.block) in ((k, per * n), (k * per, n)):  # bytes, or codes
        return "payload-shape", f"payload {list(w.known['payload'].shape)} is transposed: scales {list(got)} have {got[-2]} rows"
    want = w.scale_shape
    if want is not None and got == (*head, want[-1], want[-2]):
        return (
            "scale-shape",
            f"{list(got)}: transposed, {list(want)} would fit" if not head else f"{list(got)}: axes swapped, {list(want)} would fit",
        )
    if want is not None and got[-2:] == (-(-want[-2] // 128) * 128, -(-want[-1] // 4) * 4):
        return "scale-shape", f"{list(got)}: padded to tiles of 128x4, as kernels read them; a checkpoint has {list(want)}"
    return "scale-shape", f"{list(got)}" + (
        f" instead of {list(want)}" if want is not None else f": K {k} is no multiple of the block of {w.kind.block}"
    )


def _sizes(scene: Scene) -> Iterator[Finding]:
    for parent, weights in scene.parents.items():
        sized = [w for w in weights if w.sizes is not None and w.projection in _HIDDEN]
        if not sized:
            continue
        shapes = {w.module: _HIDDEN[w.projection](w.sizes) for w in sized}
        usual = max(set(shapes.values()), key=list(shapes.values()).count)
        if wrong := [w for w in sized if shapes[w.module] != usual]:
            yield make(
                RULES["shapes-disagree"],
                f"{parent}: (intermediate, hidden) is {usual} by most of its weights, {shapes[wrong[0].module]} by {len(wrong):,}",
                (w.module for w in wrong),
                len(sized),
                (w.expert for w in wrong),
            )


# projection -> (intermediate, hidden) by its (E, N, K)
_UP: Callable[[tuple[int, int, int]], tuple[int, int]] = lambda s: (s[1], s[2])  # noqa: E731
_DOWN: Callable[[tuple[int, int, int]], tuple[int, int]] = lambda s: (s[2], s[1])  # noqa: E731
_HIDDEN = {
    "w1": _UP,
    "w3": _UP,
    "gate_proj": _UP,
    "up_proj": _UP,
    "w2": _DOWN,
    "down_proj": _DOWN,
    "gate_up_proj": lambda s: (s[1] // 2, s[2]),
}
