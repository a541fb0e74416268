"""Which tensors belong to which MoE layer, by the names used in the wild.

gpt-oss                 <prefix>layers.N.<module>.experts.{gate_up_proj,down_proj}_{blocks,scales,bias}, all experts in one tensor
compressed-tensors      <prefix>layers.N.<module>.experts.E.{w1,w2,w3 or gate_proj,down_proj,up_proj}.{weight_packed,weight_scale,bias}
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import MxdebugError
from .settings import COMPRESSED_TENSORS, GPT_OSS, SUPPORTED

# Only these words may stand before "layers": "mtp.layers.0" or a vision tower's layers are no layers of the language model.
_EXPERTS = re.compile(r"((?:(?:model|language_model|text_model|backbone)\.)*layers\.(0|[1-9][0-9]{0,5})\.(?:[^.]+\.)*?experts)\.(.+)")
_FUSED = re.compile(r"(?:gate_up_proj|down_proj)_(?:blocks|scales|bias)")
_PER_EXPERT = re.compile(r"(0|[1-9][0-9]{0,5})\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.(weight_packed|weight_scale|bias)")
_NVFP4 = ("weight_global_scale", "weight_scale_2")
_HARMLESS = ("weight_shape",)  # compressed-tensors: the unpacked shape, which the payload's shape says too
SPELLINGS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}


@dataclass(frozen=True)
class LayerNames:
    """The expert tensors of one layer.

    module   "model.layers.0.mlp.experts"
    fused    GPT_OSS: "gate_up_proj_blocks" -> tensor name
    single   COMPRESSED_TENSORS: ("w1", "weight_packed") -> expert -> tensor name
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


def find_layers(names: Iterable[str], path: Path) -> dict[int, LayerNames]:
    """The MoE layers with MXFP4 experts among tensor `names`, sorted by index. `path` is for messages.

    Layers whose experts are not quantised are left out. Raises MxdebugError for NVFP4, for two kinds, for two modules with
    experts in one layer, for mixed spellings, and where there is no such layer.
    """
    modules: dict[str, tuple[int, dict[str, str]]] = {}
    for name in names:
        if match := _EXPERTS.fullmatch(name):
            if name.endswith(_NVFP4):
                raise MxdebugError(f"tensor {name}", f"no global scale; kinds read here: {SUPPORTED}", "a global scale",
                                   "this is NVFP4, not MXFP4")
            modules.setdefault(match[1], (int(match[2]), {}))[1][match[3]] = name
    layers: dict[int, LayerNames] = {}
    for module, (index, rest) in modules.items():
        layer = _sort(index, module, rest)
        if layer is None:
            continue
        if index in layers:
            raise MxdebugError(f"layer {index} of {path}", "one module with experts", f"{layers[index].module} and {module}",
                               "two models in one folder")
        layers[index] = layer
    if not layers:
        seen = [name for _, rest in modules.values() for name in rest.values()] or list(names)
        raise MxdebugError(f"tensor names of {path}", f"experts of a known kind: {SUPPORTED}", ", ".join(sorted(seen)[:3]) or "no tensors",
                           "no MoE layers here, another format, or one shard without its index")
    kinds = {layer.kind for layer in layers.values()}
    if len(kinds) > 1:
        raise MxdebugError(f"tensor names of {path}", "one kind of quantisation", " and ".join(sorted(kinds)),
                           "two checkpoints in one folder")
    return dict(sorted(layers.items()))


def _sort(index: int, module: str, rest: Mapping[str, str]) -> LayerNames | None:
    fused: dict[str, str] = {}
    single: dict[tuple[str, str], dict[int, str]] = {}
    spelled: dict[str, set[str]] = {}
    unknown: list[str] = []
    for leaf, name in rest.items():
        if _FUSED.fullmatch(leaf):
            fused[leaf] = name
        elif match := _PER_EXPERT.fullmatch(leaf):
            word = next(w for w, long in SPELLINGS.items() if match[2] in (w, long))
            spelled.setdefault(word, set()).add(match[2])
            single.setdefault((word, match[3]), {})[int(match[1])] = name
        elif not leaf.endswith(_HARMLESS):
            unknown.append(name)
    has_fused = any(not leaf.endswith("bias") for leaf in fused)
    has_single = any(leaf != "bias" for _, leaf in single)
    if not has_fused and not has_single:
        return None
    if has_fused and has_single:
        raise MxdebugError(module, "one kind of quantisation", f"both {GPT_OSS} and {COMPRESSED_TENSORS} names",
                           "two checkpoints in one folder")
    if len({word == found for word, all_found in spelled.items() for found in all_found}) > 1:
        raise MxdebugError(module, "one spelling: w1, w2, w3 or gate_proj, down_proj, up_proj",
                           ", ".join(sorted(set().union(*spelled.values()))), "shards of two exports")
    words = {word: next(iter(found)) for word, found in spelled.items()}
    return LayerNames(index, GPT_OSS if has_fused else COMPRESSED_TENSORS, module, fused, single, words, tuple(sorted(unknown)))
