"""How each rule's fault gets into a checkpoint: one record each, which changes the tensors, the configuration or the files of `probe`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..checkpoints.kinds import COMPRESSED_TENSORS, COMPRESSED_TENSORS_NVFP4, GPT_OSS, MODELOPT_NVFP4
from ..errors import MxdebugError
from .folder import INDEX
from .kinds import KINDS, Kind
from .probe import ATTENTION, EXPERT, EXPERTS, HIDDEN, INTERMEDIATE, LAYERS, probe_config
from .stated import CONFIG

Tensors, Config = dict[str, Tensor], dict[str, Any]
Change = Callable[[Tensors, Config, Kind], object]
SHARDS = 3  # files of the checkpoint whose files are changed
_E, _LAYER = 1, 1  # whose gate projection is struck
_GATE = EXPERT.format(_LAYER, _E, "gate_proj")
_FUSED = f"model.layers.{_LAYER}.mlp.experts.gate_up_proj"
_LINEAR = ATTENTION.format(_LAYER, "q_proj")


@dataclass(frozen=True)
class Injection:
    """A fault of a checkpoint.

    rule      the rule of `catalogue.RULES` that must find it
    how       what is done, in words
    change    (tensors, config, kind): changes the first two in place; or files: changes the folder, written in SHARDS files
    strikes   whether a kind can have it
    experts   the experts that the finding must name, for a kind
    """

    rule: str
    how: str
    change: Change | None = None
    files: Callable[[Path], None] | None = None
    strikes: Callable[[Kind], bool] = lambda kind: True
    experts: Callable[[Kind], tuple[int, ...]] = lambda kind: ()

    @property
    def name(self) -> str:
        return f"{self.rule}: {self.how}"

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds that can have it."""
        return tuple(k.name for k in KINDS.values() if self.strikes(k))

    def inject(self, tensors: Tensors, config: Config, kind: str) -> None:
        """Put it into a checkpoint of `probe_checkpoint`, in place; a fault of the files changes nothing here. MxdebugError where the kind
        cannot have it."""
        if kind not in self.kinds:
            raise MxdebugError(f"kind for {self.rule}", f"one of {', '.join(self.kinds)}", kind, "this fault cannot strike here")
        if self.change is not None:
            self.change(tensors, config, KINDS[kind])


# -- which kinds, which experts -----------------------------------------------------------------------------------------------------


def _fused(kind: Kind) -> bool:
    """One tensor for all experts, and no quantised linear layers."""
    return kind.name == GPT_OSS


def _separate(kind: Kind) -> bool:
    return not _fused(kind)


def _nvfp4(kind: Kind) -> bool:
    return kind.e4m3


def _packed(kind: Kind) -> bool:
    return kind.packed


def _mxfp8(kind: Kind) -> bool:
    return not kind.packed


def _e8m0(kind: Kind) -> bool:
    return not kind.e4m3


def _refused(kind: Kind) -> bool:
    """Some path refuses sizes of this kind: vLLM pads gpt-oss and Quark for every path, and MXFP8 has no recipe here."""
    return kind.name in (COMPRESSED_TENSORS, COMPRESSED_TENSORS_NVFP4, MODELOPT_NVFP4)


def _one(kind: Kind) -> tuple[int, ...]:
    return (_E,)


def _by_header(kind: Kind) -> tuple[int, ...]:
    """A header says nothing of single experts where they share a tensor."""
    return () if _fused(kind) else (_E,)


def _every(kind: Kind) -> tuple[int, ...]:
    return () if _fused(kind) else tuple(range(EXPERTS))


# -- the struck tensor --------------------------------------------------------------------------------------------------------------


def _struck(kind: Kind, role: str) -> str:
    """The name of the tensor with that role (payload, scale, global, input): of layer 1's expert 1's gate, or of all experts'."""
    leaf = {"payload": kind.payload, "scale": kind.scale[0], "global": kind.global_scale, "input": kind.input_scale}[role]
    return f"{_FUSED}_{leaf}" if _fused(kind) else f"{_GATE}.{leaf}"


def _part(tensors: Tensors, kind: Kind, role: str) -> Tensor:
    """uint8: the bytes of the struck expert, to write into."""
    t = tensors[_struck(kind, role)].view(torch.uint8)
    return t[_E] if _fused(kind) else t


def _set(role: str, value: Callable[[Kind], int], places: int | None = 3, step: int = 1) -> Change:
    """Put a byte to the first places of the expert's tensor, or to all."""

    def change(tensors: Tensors, config: Config, kind: Kind) -> None:
        _part(tensors, kind, role).view(-1)[:places:step] = value(kind)

    return change


def _turned(role: str, turn: Callable[[Tensor, Kind], Tensor]) -> Change:
    """Another tensor under the same name."""

    def change(tensors: Tensors, config: Config, kind: Kind) -> None:
        name = _struck(kind, role)
        tensors[name] = turn(tensors[name], kind).contiguous()

    return change


def _scaled(role: str, factor: float, modules: Callable[[str], bool] | None = None) -> Change:
    """Global or input scales times a factor, as multipliers: of the struck expert's gate, or of some modules."""

    def change(tensors: Tensors, config: Config, kind: Kind) -> None:
        leaf = _struck(kind, role).rpartition(".")[2]
        names = [_struck(kind, role)] if modules is None else [n for n in tensors if n.endswith(f".{leaf}") and modules(n)]
        for name in names:
            tensors[name] = tensors[name] * (1 / factor if kind.divides else factor)

    return change


def _number(role: str, value: float) -> Change:
    return _turned(role, lambda t, kind: torch.full_like(t, value))


def _drop(role: str) -> Change:
    return lambda tensors, config, kind: tensors.pop(_struck(kind, role))


def _absent(tensors: Tensors, config: Config, kind: Kind) -> None:
    for role in ("payload", "scale", *(("global", "input") if kind.e4m3 else ())):
        tensors.pop(_struck(kind, role))


# -- the changes --------------------------------------------------------------------------------------------------------------------


def _ignore_list(config: Config) -> list[str]:
    """The list of modules that are not quantised, under whatever name its exporter gives it."""
    stated = config["quantization_config"]
    return next(stated[key] for key in ("ignore", "exclude", "modules_to_not_convert") if key in stated)


def _ignored(tensors: Tensors, config: Config, kind: Kind) -> None:
    _ignore_list(config).append(f"model.layers.{_LAYER}.mlp.experts" if _fused(kind) else _LINEAR)


def _unquantise(tensors: Tensors, config: Config, kind: Kind) -> None:
    """q_proj of layer 1 in bf16."""
    for name in [n for n in tensors if n.startswith(f"{_LINEAR}.")]:
        tensors.pop(name)
    tensors[f"{_LINEAR}.weight"] = torch.ones(HIDDEN, HIDDEN, dtype=torch.bfloat16)


def _other_kind(tensors: Tensors, config: Config, kind: Kind) -> None:
    config["quantization_config"] = probe_config(COMPRESSED_TENSORS if kind.e4m3 else COMPRESSED_TENSORS_NVFP4)["quantization_config"]
    if _fused(kind):  # whose attention is in bf16
        _ignore_list(config).append("re:.*self_attn")


def _group_size(tensors: Tensors, config: Config, kind: Kind) -> None:
    stated = config["quantization_config"]
    groups = [g["weights"] for g in stated.get("config_groups", {}).values()] or [stated]
    for group in groups:
        group["group_size"] = 48 - kind.block  # 32 for 16, 16 for 32


def _fewer_experts(tensors: Tensors, config: Config, kind: Kind) -> None:
    """Layer 0 lacks its last expert."""
    for name in [n for n in tensors if n.startswith("model.layers.0.mlp.experts.")]:
        if _fused(kind):
            tensors[name] = tensors[name][:-1].contiguous()
        elif name.startswith(f"model.layers.0.mlp.experts.{EXPERTS - 1}."):
            tensors.pop(name)


def _fp8(tensors: Tensors, config: Config, kind: Kind) -> None:
    tensors["model.layers.0.mlp.shared.fc.weight"] = torch.ones(HIDDEN, HIDDEN).to(torch.float8_e4m3fn)
    tensors["model.layers.0.mlp.shared.fc.weight_scale"] = torch.ones(1)


def _unknown(tensors: Tensors, config: Config, kind: Kind) -> None:
    tensors[f"{_FUSED if _fused(kind) else _GATE}.weight_zero_point"] = torch.ones(1)


def _other_block(scale: Tensor, kind: Kind) -> Tensor:
    """Every second scale of blocks of 16, each twice of blocks of 32."""
    t = scale.view(torch.uint8)
    return (t[..., ::2] if kind.block == 16 else t.repeat_interleave(2, -1)).contiguous().view(scale.dtype)


def _transposed(codes: bool) -> Callable[[Tensor, Kind], Tensor]:
    """A payload of the shape that it has with rows and columns exchanged: of its codes, or of its bytes with two codes in each."""

    def turn(payload: Tensor, kind: Kind) -> Tensor:
        t = payload.view(torch.uint8).flatten(-2) if _fused(kind) else payload.view(torch.uint8)
        per = 2 if kind.packed and codes else 1
        shape = (*t.shape[:-2], t.shape[-1] * per, t.shape[-2] // per)
        return t.reshape(*shape[:-1], -1, 16) if _fused(kind) else t.reshape(shape).view(payload.dtype)

    return turn


def _numbers(scale: Tensor, kind: Kind) -> Tensor:
    return scale.float() if kind.e4m3 else (scale.float() - 127).exp2()


def _narrower(tensors: Tensors, config: Config, kind: Kind) -> None:
    """Half of the rows of one projection."""
    for role in ("payload", "scale"):
        name = _struck(kind, role)
        axis = 1 if _fused(kind) else 0
        tensors[name] = tensors[name].narrow(axis, 0, tensors[name].shape[axis] // 2).contiguous()


def _intermediate(size: int) -> Change:
    """Experts of a smaller intermediate size: fewer rows of gate and up, fewer columns of down."""

    def change(tensors: Tensors, config: Config, kind: Kind) -> None:
        for name in [n for n in tensors if ".mlp.experts." in n and tensors[n].dim() > 1 and not n.endswith("down_proj_bias")]:
            axis = int(_fused(kind)) + int("down_proj" in name)
            t = tensors[name]
            tensors[name] = t.narrow(axis, 0, t.shape[axis] * size // INTERMEDIATE).contiguous()

    return change


# -- the files ------------------------------------------------------------------------------------------------------------------------


def _shard(folder: Path) -> Path:
    """The second of the files."""
    return folder / f"model-00002-of-{SHARDS:05d}.safetensors"


def _truncate(folder: Path) -> None:
    _shard(folder).write_bytes(_shard(folder).read_bytes()[:-1000])


def _edit_index(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:
    def files(folder: Path) -> None:
        data = json.loads((folder / INDEX).read_text())
        change(data["weight_map"])
        (folder / INDEX).write_text(json.dumps(data))

    return files


def _beside(folder: Path) -> None:
    save_file({"layers.0.attention.wq.weight": torch.ones(2, 2)}, folder / "consolidated.safetensors")


def _copy(folder: Path) -> None:
    (folder / INDEX).unlink()
    (folder / "copy.safetensors").write_bytes(_shard(folder).read_bytes())


def _cut_config(folder: Path) -> None:
    (folder / CONFIG).write_text((folder / CONFIG).read_text()[:-9])


INJECTIONS: tuple[Injection, ...] = (
    Injection("shard-damaged", "the second file ends 1000 bytes early", files=_truncate),
    Injection("file-refused", "the index names ../outside.safetensors", files=_edit_index(lambda m: m.update(a="../outside.safetensors"))),
    Injection("index-disagrees", "the index lacks a tensor", files=_edit_index(lambda m: m.pop("lm_head.weight"))),
    Injection("files-beside", "a file that the index does not name", files=_beside),
    Injection("tensor-twice", "a copy of a file beside it, and no index", files=_copy),
    Injection("config-unreadable", "config.json is cut off", files=_cut_config),
    Injection("config-silent", "no quantization_config", lambda t, c, k: c.pop("quantization_config")),
    Injection("config-not-checked", "another quant_method", lambda t, c, k: c["quantization_config"].update(quant_method="made")),
    Injection("kind-contradiction", "the quantization_config of another kind", _other_kind, experts=_every),
    Injection(
        "group-size",
        "block scales for 32 elements, where the format has 16, or the other way",
        _turned("scale", _other_block),
        experts=_by_header,
    ),
    Injection("group-size", "group_size in config.json is the other one", _group_size),
    Injection("ignored-but-quantised", "a quantised module on the ignore list", _ignored),
    Injection("expected-but-unquantised", "a projection in bf16 that is not on the ignore list", _unquantise, strikes=_separate),
    Injection("experts-count", "a layer lacks its last expert", _fewer_experts),
    Injection("layers-missing", "num_hidden_layers is larger by 3", lambda t, c, k: c.update(num_hidden_layers=LAYERS + 3)),
    Injection("not-read", "a module in FP8 with one scale", _fp8),
    Injection("sizes-and-config", "hidden_size is twice that of the weights", lambda t, c, k: c.update(hidden_size=2 * HIDDEN)),
    Injection("pattern-unreadable", "a broken regular expression on the ignore list", lambda t, c, k: _ignore_list(c).append("re:(")),
    Injection("tensors-missing", "no payload", _drop("payload"), experts=_by_header),
    Injection("tensors-missing", "no block scales", _drop("scale"), experts=_by_header),
    Injection("tensors-missing", "no global scale", _drop("global"), strikes=_nvfp4, experts=_by_header),
    Injection("tensors-missing", "neither payload nor scales", _absent, experts=_by_header),
    Injection("tensors-unknown", "a weight_zero_point", _unknown, experts=_by_header),
    Injection("payload-dtype", "payload as int8", _turned("payload", lambda t, k: t.view(torch.int8)), experts=_by_header),
    Injection("payload-shape", "payload transposed by bytes", _turned("payload", _transposed(codes=False)), experts=_by_header),
    Injection(
        "payload-shape",
        "payload transposed by codes",
        _turned("payload", _transposed(codes=True)),
        strikes=_packed,
        experts=_by_header,
    ),
    Injection("scale-dtype", "block scales as float32 numbers", _turned("scale", _numbers), experts=_by_header),
    Injection("scale-shape", "block scales transposed", _turned("scale", lambda t, k: t.transpose(-1, -2)), experts=_by_header),
    Injection("shapes-disagree", "half of a projection's rows", _narrower, experts=_by_header),
    Injection("scale-nan", "3 block scales are NaN", _set("scale", lambda k: 0x7F if k.e4m3 else 0xFF), experts=_one),
    Injection("scale-negative", "3 block scales are negative", _set("scale", lambda k: 0xB8), strikes=_nvfp4, experts=_one),
    Injection(
        "scale-cast",
        "block scales cast by value",
        lambda t, c, k: _part(t, k, "scale").copy_(_numbers(_part(t, k, "scale"), k)),
        strikes=_e8m0,
        experts=_one,
    ),
    Injection("scale-constant", "all block scales are alike", _set("scale", lambda k: 0x38 if k.e4m3 else 120, None), experts=_one),
    Injection("scale-saturated", "every tenth block scale is 448", _set("scale", lambda k: 0x7E, None, 10), strikes=_nvfp4, experts=_one),
    Injection(
        "scales-outlier",
        "an expert's block scales are 2^-7 of what they were",
        # A step of an E4M3 exponent is 8; none becomes 0, or negative.
        lambda t, c, k: (p := _part(t, k, "scale")).copy_((p.int() - 7 * (8 if k.e4m3 else 1)).clamp(min=1)),
        experts=_one,
    ),
    Injection("zero-scale-under-payload", "3 block scales are 0", _set("scale", lambda k: 0), strikes=_nvfp4, experts=_one),
    Injection("payload-nan", "3 elements are NaN", _set("payload", lambda k: 0x7F), strikes=_mxfp8, experts=_one),
    Injection("payload-zero", "a weight of zeros", _set("payload", lambda k: 0, None), experts=_one),
    Injection("payload-rows-zero", "3 rows of zeros", lambda t, c, k: _part(t, k, "payload")[:3].zero_(), experts=_one),
    Injection("global-bad", "a global scale is zero", _number("global", 0.0), strikes=_nvfp4, experts=_one),
    Injection("input-bad", "an input scale is inf", _number("input", torch.inf), strikes=_nvfp4, experts=_one),
    Injection("input-missing", "one expert has no input scale", _drop("input"), strikes=_nvfp4, experts=_one),
    Injection("w13-differ", "gate's global scale is twice up's", _scaled("global", 2.0), strikes=_nvfp4, experts=_one),
    Injection(
        "joined-differ",
        "q_proj's global scale is four times k_proj's",
        _scaled("global", 4.0, lambda name: name.startswith(f"{_LINEAR}.")),
        strikes=_nvfp4,
    ),
    Injection("inputs-differ", "gate's input scale is four times up's", _scaled("input", 4.0), strikes=_nvfp4, experts=_one),
    Injection(
        "experts-outlier",
        "an expert's input scale is 2^16 times smaller",
        _scaled("input", 2.0**-16),
        strikes=_nvfp4,
        experts=_one,
    ),
    Injection("fold-e4m3", "all global scales are 16 times smaller", _scaled("global", 2.0**-4, lambda name: True), strikes=_nvfp4),
    Injection("marlin-flush", "3 block scales are 2^-9", _set("scale", lambda k: 0x01), strikes=_nvfp4),
    Injection("e8m0-fp16", "3 block scales are 2^-22", _set("scale", lambda k: 105), strikes=_e8m0),
    Injection("e8m0-zero", "3 block scales are 2^-127", _set("scale", lambda k: 0), strikes=_e8m0),
    Injection("tp-cuts-block", "experts of intermediate size 480", _intermediate(480)),
    Injection("path-pads", "experts of intermediate size 256", _intermediate(256), strikes=_packed),
    Injection("path-refuses", "experts of intermediate size 352", _intermediate(352), strikes=_refused),
)
