"""Tensor names -> quantised weights: which expert's or module's they are, by the names used in the wild."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from ..checkpoints.kinds import GPT_OSS
from ..checkpoints.names import natural
from .finding import shown
from .header import Entry
from .kinds import HARMLESS, INT4, KINDS, Kind, kinds_of

_LAYER = re.compile(r"(?:^|\.)layers\.(\d{1,6})\.")
_EXPERT = re.compile(r"(.+\.experts|experts)\.(\d{1,6})\.(\w+)")
_FUSED = re.compile(r"(gate_up_proj|down_proj)_(blocks|scales|bias)")
_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)")
_BYTES = ("U8", "I8")
WORDS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2", "w1": "w1", "w2": "w2", "w3": "w3"}
JOINED = ({"q_proj", "k_proj", "v_proj"}, {"gate_proj", "up_proj"}, {"w1", "w3"})
"""Projections that engines join to one linear layer (vLLM: qkv_proj, gate_up_proj)."""
@dataclass(frozen=True)
class Weight:
    """One quantised weight: an expert's projection, all experts' fused projection, or a linear module.

    module      the name without its leaf: "model.layers.0.mlp.experts.3.w1"; fused "model.layers.0.mlp.experts.gate_up_proj"
    parent      "model.layers.0.mlp.experts", or what stands before the last part of a linear module's name
    projection  "w1", "w2", "w3" (however spelled), "gate_up_proj" and "down_proj" where fused; a linear module's last part
    expert      its number; None for fused and linear ones
    leaves      role (payload, scale, global, input, bias) -> tensor name; known: role -> Entry, of those whose bytes can be read
    unknown     names beside them that the kind does not have
    """

    module: str
    parent: str
    projection: str
    expert: int | None
    kind: Kind
    leaves: Mapping[str, str]
    known: Mapping[str, Entry]
    unknown: tuple[str, ...]

    @cached_property
    def label(self) -> str:
        """The class of weights that it belongs to: the name with * for numbers, "model.layers.*.mlp.experts.*.w1"."""
        return shown(_NUMBERS.sub("*", f".{self.module}.").strip("."))

    @property
    def layer(self) -> int | None:
        return layer_of(self.module)

    @property
    def fused(self) -> bool:
        """All experts in one tensor [E, rows, ...]."""
        return self.kind.name == GPT_OSS or ("payload" in self.known and len(self.known["payload"].shape) == 3)

    @property
    def in_experts(self) -> bool:
        return self.expert is not None or self.fused

    @property
    def sizes(self) -> tuple[int, int, int] | None:
        """(E, N, K) by the payload's header; E is 1 unless fused. None where its shape is not the kind's."""
        entry = self.known.get("payload")
        if entry is None or entry.dtype != self.kind.payload_dtype or 0 in entry.shape:
            return None
        shape = entry.shape
        if self.kind.name == GPT_OSS:
            return (shape[0], shape[1], shape[2] * 32) if len(shape) == 4 and shape[3] == 16 else None
        e, n, columns = shape if len(shape) == 3 else (1, *shape) if len(shape) == 2 else (0, 0, 0)
        return (e, n, columns * (2 if self.kind.packed else 1)) if e else None

    @property
    def scale_shape(self) -> tuple[int, ...] | None:
        """The shape that block scales must have next to this payload; None where that is not known."""
        if (sizes := self.sizes) is None or sizes[2] % self.kind.block:
            return None
        e, n, k = sizes
        return (e, n, k // self.kind.block) if self.fused else (n, k // self.kind.block)


@dataclass(frozen=True)
class Weights:
    """quantised: in natural order of their names; other: module -> leaves of modules that are not quantised in a known way."""

    quantised: tuple[Weight, ...]
    other: Mapping[str, Mapping[str, Entry | None]]


def layer_of(name: str) -> int | None:
    """N of "layers.N."; None where there is none."""
    match = _LAYER.search(name)
    return None if match is None else int(match[1])


def find_weights(tensors: Mapping[str, Entry], unread: Iterable[str], stated: str | None) -> Weights:
    """Sort tensors into weights. `unread` exist, but have no Entry; `stated` is the kind to take where names leave a choice."""
    modules: dict[str, dict[str, tuple[str, Entry | None]]] = {}
    for name, entry in (*tensors.items(), *((name, None) for name in unread)):
        module, _, leaf = name.rpartition(".")
        if match := _FUSED.fullmatch(leaf):
            module, leaf = f"{module}.{match[1]}", match[2]
        modules.setdefault(module, {})[leaf] = (name, entry)
    quantised, other = [], {}
    for module, leaves in modules.items():
        kind = _kind(leaves, stated)
        if kind is None:
            other[module] = {leaf: entry for leaf, (_, entry) in leaves.items()}
        else:
            quantised.append(_weight(module, leaves, kind))
    return Weights(tuple(sorted(quantised, key=lambda w: natural(w.module))), other)


def _kind(leaves: Mapping[str, tuple[str, Entry | None]], stated: str | None) -> Kind | None:
    if leaves.keys() & {"blocks", "scales"} and any(name.endswith(("_blocks", "_scales")) for name, _ in leaves.values()):
        return KINDS[GPT_OSS]
    if INT4.items() <= {leaf: entry.dtype for leaf, (_, entry) in leaves.items() if entry is not None}.items():
        return None
    found = kinds_of({leaf: entry for leaf, (_, entry) in leaves.items()})
    if not found and stated in KINDS and "weight" in leaves:
        if _as_stated(KINDS[stated], {leaf: entry for leaf, (_, entry) in leaves.items()}):
            return KINDS[stated]
    elif not found and stated in KINDS and any(KINDS[stated].role(leaf) == "scale" for leaf in leaves):
        return KINDS[stated]
    return KINDS[stated if stated in found else found[0]] if found else None


def _as_stated(kind: Kind, leaves: Mapping[str, Entry | None]) -> bool:
    """Whether a module with a `weight` is of the stated kind, though it is damaged: payload of another dtype or none to look at, or no scales."""
    weight, scales = leaves["weight"], [entry for leaf, entry in leaves.items() if kind.role(leaf) == "scale"]
    if not scales:
        return kind.payload == "weight" and weight is not None and weight.dtype == kind.payload_dtype and len(weight.shape) > 1
    return weight is None or (weight.dtype in _BYTES and any(s is not None and s.dtype in kind.scale_dtypes and len(s.shape) > 1 for s in scales))


def _weight(module: str, leaves: Mapping[str, tuple[str, Entry | None]], kind: Kind) -> Weight:
    roles = {leaf: kind.role(leaf) for leaf in leaves}
    match = _EXPERT.fullmatch(module)
    parent, _, last = module.rpartition(".")
    expert = None if match is None else int(match[2])
    return Weight(
        module,
        match[1] if match else parent,
        WORDS.get(last, last) if match else last,
        expert,
        kind,
        {role: leaves[leaf][0] for leaf, role in roles.items() if role},
        {role: entry for leaf, role in roles.items() if role and (entry := leaves[leaf][1])},
        tuple(leaves[leaf][0] for leaf, role in roles.items() if role is None and leaf not in HARMLESS),
    )
