"""Which tensors belong to which MoE layer, by the names used in the wild.

gpt-oss                 <prefix>layers.N.<module>.experts.{gate_up_proj,down_proj}_{blocks,scales,bias}, all experts in one tensor
the others              <prefix>layers.N.<module>.experts.E.{w1,w2,w3 or gate_proj,down_proj,up_proj}.<leaf>; kinds.LEAVES has the leaves
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import MxdebugError
from .kinds import COMPRESSED_TENSORS, COMPRESSED_TENSORS_NVFP4, GPT_OSS, LEAVES, MODELOPT_NVFP4, SUPPORTED

# Only these words may stand before "layers": "mtp.layers.0" or a vision tower's layers are no layers of the language model.
_EXPERTS = re.compile(r"((?:(?:model|language_model|text_model|backbone)\.)*layers\.(0|[1-9][0-9]{0,5})\.(?:[^.]+\.)*?experts)\.(.+)")
_FUSED = re.compile(r"(?:gate_up_proj|down_proj)_(?:blocks|scales|bias)")
_PER_EXPERT = re.compile(r"(0|[1-9][0-9]{0,5})\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.(\w+)")
_NVFP4 = ("weight_global_scale", "weight_scale_2")
_HARMLESS = ("weight_shape",)  # compressed-tensors: the unpacked shape, which the payload's shape says too
_LEAVES = frozenset(leaf for leaves in LEAVES.values() for leaf in leaves.all)
SPELLINGS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


def natural(name: str) -> list[tuple[bool, int, str]]:
    """A sort key: layer 2 before layer 10. Digits by their number, as far as it is one that int takes whatever the file says."""
    return [(i % 2 == 0, int(part) if i % 2 else 0, part) for i, part in enumerate(re.split(r"([0-9]{1,18})", name))]


@dataclass(frozen=True)
class LayerNames:
    """The expert tensors of one layer.

    module   "model.layers.0.mlp.experts"
    fused    GPT_OSS: "gate_up_proj_blocks" -> tensor name
    single   the other kinds: ("w1", "weight_packed") -> expert -> tensor name
    words    the spelling in the file: "w1" -> "w1" or "gate_proj"
    unknown  names below the module that are neither
    """

    index: int
    kind: str
    module: str
    fused: Mapping[str, str]
    single: Mapping[tuple[str, str], Mapping[int, str]]
    words: Mapping[str, str]
    unknown: tuple[str, ...]

    def pattern(self, words: Iterable[str], leaf: str) -> str:
        """One name for all experts: "model.layers.0.mlp.experts.*.{w1,w3}.weight_packed"."""
        spelled = [self.words[w] for w in words]
        return f"{self.module}.*.{spelled[0] if len(spelled) == 1 else '{' + ','.join(spelled) + '}'}.{leaf}"


def find_layers(names: Iterable[str], path: Path, stated: str, needed: bool = True) -> dict[int, LayerNames]:
    """The MoE layers with quantised experts among tensor `names`, sorted by index; `stated` is the kind that config.json says.

    Layers whose experts are not quantised are left out. `path` is for messages. Raises MxdebugError for another kind than
    the stated one, for two kinds, for NVFP4 experts in fused tensors, for two modules with experts in one layer, for mixed
    spellings, and, if one is `needed`, where there is no such layer.
    """
    modules: dict[str, tuple[int, dict[str, str]]] = {}
    for name in names:
        if match := _EXPERTS.fullmatch(name):
            if stated in (GPT_OSS, COMPRESSED_TENSORS) and name.endswith(_NVFP4):
                raise MxdebugError(f"tensor {name}", f"no global scale next to {stated}; kinds read here: {SUPPORTED}", "a global scale",
                                   "this is NVFP4, not MXFP4")
            modules.setdefault(match[1], (int(match[2]), {}))[1][match[3]] = name
    layers: dict[int, LayerNames] = {}
    for module, (index, rest) in modules.items():
        layer = _sort(index, module, rest, stated)
        if layer is None:
            continue
        if index in layers:
            raise MxdebugError(f"layer {index} of {path}", "one module with experts", f"{layers[index].module} and {module}",
                               "two models in one folder")
        layers[index] = layer
    if not layers and not needed:
        return {}
    if not layers:
        seen = [name for _, rest in modules.values() for name in rest.values()] or list(names)
        raise MxdebugError(f"tensor names of {path}", f"experts or NVFP4 linear layers of a known kind: {SUPPORTED}",
                           ", ".join(sorted(seen)[:3]) or "no tensors",
                           "no MoE layers and no NVFP4 linear layers here, another format, or one shard without its index")
    kinds = {layer.kind for layer in layers.values()}
    if len(kinds) > 1:
        raise MxdebugError(f"tensor names of {path}", "one kind of quantisation", " and ".join(sorted(kinds)),
                           "two checkpoints in one folder")
    if kinds != {stated}:
        raise MxdebugError(f"tensor names of {path}", f"those of {stated}, as quantization_config says (supported: {SUPPORTED})",
                           f"those of {kinds.pop()}", "config.json and weights of two checkpoints")
    return dict(sorted(layers.items()))


def _sort(index: int, module: str, rest: Mapping[str, str], stated: str) -> LayerNames | None:
    fused: dict[str, str] = {}
    single: dict[tuple[str, str], dict[int, str]] = {}
    spelled: dict[str, set[str]] = {}
    unknown: list[str] = []
    for leaf, name in rest.items():
        if _FUSED.fullmatch(leaf):
            fused[leaf] = name
        elif (match := _PER_EXPERT.fullmatch(leaf)) and match[3] in _LEAVES:
            word = next(w for w, long in SPELLINGS.items() if match[2] in (w, long))
            spelled.setdefault(word, set()).add(match[2])
            single.setdefault((word, match[3]), {})[int(match[1])] = name
        elif not leaf.endswith(_HARMLESS):
            unknown.append(name)
    kind = _kind(module, fused, {leaf for _, leaf in single}, stated)
    if kind is None:
        scale = min((name for name in unknown if "scale" in name.removeprefix(module)), default=None)
        if stated in (MODELOPT_NVFP4, COMPRESSED_TENSORS_NVFP4) and not single and scale is not None:
            raise MxdebugError(f"tensor {scale}", f"one tensor an expert and projection, such as {module}.0.up_proj.weight_scale",
                               "another name",
                               "all experts fused into one tensor, as ModelOpt writes gpt-oss; such exports are not read yet")
        return None
    if len({word == found for word, all_found in spelled.items() for found in all_found}) > 1:
        raise MxdebugError(module, "one spelling: w1, w2, w3 or gate_proj, down_proj, up_proj",
                           ", ".join(sorted(set().union(*spelled.values()))), "shards of two exports")
    known = LEAVES[kind].all if kind in LEAVES else ()  # what is a leaf of another kind says nothing in this one
    unknown += [name for (_, leaf), found in single.items() if leaf not in known for name in found.values()]
    words = {word: next(iter(found)) for word, found in spelled.items()}
    return LayerNames(index, kind, module, fused, single, words, tuple(sorted(unknown)))


def _kind(module: str, fused: Mapping[str, str], leaves: set[str], stated: str) -> str | None:
    """The kind that these names belong to; None for experts that are not quantised."""
    found = [GPT_OSS] if any(not leaf.endswith("bias") for leaf in fused) else []
    if "weight_global_scale" in leaves:
        found.append(COMPRESSED_TENSORS_NVFP4)
    elif "weight_packed" in leaves:
        found.append(COMPRESSED_TENSORS)
    if "weight_scale_2" in leaves:
        found.append(MODELOPT_NVFP4)
    if len(found) > 1:
        raise MxdebugError(module, "one kind of quantisation", f"both {found[0]} and {found[1]} names", "two checkpoints in one folder")
    if not found and leaves - {"weight", "bias"}:  # scales without a sign of their kind: the stated one can say what is missing
        return stated if stated in LEAVES else COMPRESSED_TENSORS
    return found[0] if found else None
