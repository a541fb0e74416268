"""An opened checkpoint, and one of its MoE layers in logical order."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..errors import MxdebugError
from ..files import read_json
from ..layouts.rows import GATE_UP, INTERLEAVED, RowOrder
from ..reference import MoELayer
from .kinds import COMPRESSED_TENSORS_NVFP4, GPT_OSS, LEAVES, MODELOPT_NVFP4
from .linears import (JOINED, CheckpointLinear, Modules, check_kind, find_linears, find_modules, joined_names, read_linear, refuse_converted,
                      shape_of)
from .names import LayerNames, find_layers
from .settings import HF_QUANT_CONFIG, Config, Quantisation, Routing, read_activation, read_routing, stated_experts, stated_quantisation
from .store import Reader, Store, open_store
from .weights import Weight, fused_experts, read_fused, read_single, single_experts


@dataclass(frozen=True)
class CheckpointLayer:
    """One MoE layer as the file has it, rows put into logical order.

    index       N of model.layers.N
    kind        one of KINDS
    layer       gate, up [E, I, H], down [E, H, I] in MXFP4 or NVFP4; biases in the file's dtype; alpha, beta, limit float32 [E] or None.
                NVFP4: global scales and input scales are float32 [E] multipliers, whatever the file stores. w13_input_scale is the
                larger of w1's and w3's, for vLLM takes the maximum over both halves and all experts (flashinfer_fp4_moe.py
                prepare_nvfp4_moe_layer_for_fi_or_cutlass, quant_utils.py amax_for_moe_activation_quant). None in W4A16 files
    rows        the order of gate and up rows in the file: INTERLEAVED (gpt-oss) or GATE_UP (tensors of their own)
    names       w13, w13_scale, w13_global_scale, w13_input_scale, w13_bias, and the same of w2 -> tensor name; with one tensor an expert
                a pattern, such as "model.layers.0.mlp.experts.*.{w1,w3}.weight_packed". Operands that are absent have no entry.
    provenance  where activation, alpha, beta and limit came from, e.g. "config.json swiglu_limit"
    stated      those of alpha, beta, limit that config.json states itself
    routing     what config.json says of the router weights
    """

    index: int
    kind: str
    layer: MoELayer
    rows: RowOrder
    names: Mapping[str, str]
    provenance: Mapping[str, str]
    stated: frozenset[str]
    routing: Routing = Routing()


@dataclass(frozen=True)
class Checkpoint:
    """An opened checkpoint: names are known, weights are read by `layer` and `linear`.

    path    the folder or file
    config  config.json as it is; unchecked
    kind    one of KINDS
    """

    path: Path
    config: dict[str, Any] = field(repr=False)
    kind: str
    _settings: Config = field(repr=False)
    _store: Store = field(repr=False)
    _names: Mapping[int, LayerNames] = field(repr=False)
    _quantisation: Quantisation = field(repr=False)
    _modules: Modules = field(repr=False)

    @property
    def layers(self) -> tuple[int, ...]:
        """Indices of the MoE layers with quantised experts, ascending."""
        return tuple(self._names)

    @property
    def linears(self) -> tuple[str, ...]:
        """Modules that are NVFP4 linear layers, such as "model.layers.0.self_attn.q_proj", in natural order; experts are not among them."""
        return find_linears(self._modules, self.kind)

    @property
    def linear_names(self) -> tuple[str, ...]:
        """What engines run: the joined layers by vLLM's names, and those of `linears` that are not part of one."""
        joined = joined_names(self.linears)
        parts = {f"{name.rpartition('.')[0]}.{part}".lstrip(".") for name in joined for spelling in JOINED[name.rpartition(".")[2]] for part in spelling}
        return (*joined, *(name for name in self.linears if name not in parts))

    def linear_shape(self, name: str) -> tuple[int, int] | None:
        """(N, K) of a linear layer, by headers alone; None where it is damaged or unknown, which `linear` then says."""
        with self._store.reader() as reader:
            return shape_of(name, self._modules, self.kind, reader)

    @property
    def w4a16(self) -> bool:
        """Whether NVFP4 weights meet 16-bit activations, by what the configuration says and vLLM 0.33 makes of it."""
        return self._quantisation.w4a16

    def linear(self, name: str) -> CheckpointLinear:
        """Read one of `linears`, or the parts of vLLM's "...qkv_proj" or "...gate_up_proj"; only their tensors are read.

        Raises MxdebugError for an unknown name, and for what `linears.read_linear` says: damaged, unquantised or converted layers.
        """
        if self.kind not in (MODELOPT_NVFP4, COMPRESSED_TENSORS_NVFP4):
            raise MxdebugError("kind of a linear layer", f"{MODELOPT_NVFP4} or {COMPRESSED_TENSORS_NVFP4}", self.kind,
                               "only NVFP4 linear layers are read")
        with self._store.reader() as reader:
            return read_linear(name, self._modules, self.kind, self._quantisation.nvfp4, reader)

    @property
    def experts(self) -> int:
        """Number of experts of the first MoE layer. Raises MxdebugError where the file and config.json differ."""
        first = self._names[self._index(next(iter(self.layers), None))]
        with self._store.reader() as reader:
            return self._count(first, reader)

    def layer(self, index: int | None = None, experts: slice | None = None) -> CheckpointLayer:
        """Read one layer; only its tensors, and only `experts` of them (a slice within 0..E with step 1), are read.

        index may be left out where there is exactly one MoE layer.
        Raises MxdebugError for an unknown index, tensors that are missing, of another dtype or shape than the format has,
        NaN or negative block scales in the experts read, global or input scales that are not finite and above zero, input scales that
        only some experts have, an activation that cannot be known, and a block of 32 in config.json.
        """
        names = self._names[self._index(index)]
        if self._quantisation.refusal is not None:
            raise self._quantisation.refusal
        if names.unknown:
            raise MxdebugError(f"tensor {names.unknown[0]}", f"only tensors of a known meaning next to those of {names.kind}",
                               "a name that is not known", "zero points, another format, or a newer exporter")
        with self._store.reader() as reader:
            part = _part(experts, self._count(names, reader), names.module)
            settings = read_activation(self._settings, self.kind, part.stop - part.start)
            gated, biased = settings.activation.gated, self._settings.model_type == "gpt_oss"
            read = read_fused if names.kind == GPT_OSS else read_single
            weights: dict[str, Weight] = read(names, reader, part, gated, biased)
        gate, up, down = weights.get("w1"), weights["w3"], weights["w2"]
        layer = MoELayer(gate and gate.tensor, up.tensor, down.tensor, settings.activation,
                         gate_bias=gate and gate.bias, up_bias=up.bias, down_bias=down.bias,
                         w13_input_scale=_larger(gate and gate.input_scale, up.input_scale), w2_input_scale=down.input_scale)
        return CheckpointLayer(names.index, names.kind, layer, INTERLEAVED if names.kind == GPT_OSS else GATE_UP,
                               _operands(names), settings.provenance, settings.stated, read_routing(self._settings))

    def _index(self, index: int | None) -> int:
        if not self.layers:
            raise MxdebugError("layer index", "a checkpoint with MoE layers", f"{self.path}, which has linear layers only",
                               "linear(name) reads those")
        known = ", ".join(map(str, self.layers))
        if index is None:
            if len(self.layers) == 1:
                return self.layers[0]
            raise MxdebugError("layer index", f"one of {known}", "none", f"{self.path} has {len(self.layers)} MoE layers")
        if not isinstance(index, int) or isinstance(index, bool) or index not in self._names:
            raise MxdebugError("layer index", f"one of {known}", repr(index),
                               "a layer without quantised experts, or an index beyond the last")
        return index

    def _count(self, names: LayerNames, reader: Reader) -> int:
        stated = stated_experts(self._settings)
        count = fused_experts(names, reader) if names.kind == GPT_OSS else single_experts(names)
        if stated is not None and stated[0] != count:
            raise MxdebugError(names.module, f"{stated[0]} experts, as {stated[1]} says", str(count),
                               "an incomplete download, one rank's share of the experts, or the config.json of another model")
        return count


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a checkpoint: a folder with config.json and safetensors, or one .safetensors file with config.json beside it.

    Reads config.json (and hf_quant_config.json beside it), the index if there is one, else the headers of the files; no weights.
    Raises MxdebugError where files are missing or damaged, the kind of quantisation is not supported or contradicts the names, there is
    neither a MoE layer nor an NVFP4 linear one, or all layers are converted for a kernel already (such a file needs no config.json).
    """
    path = Path(path)
    store = open_store(path)
    modules = find_modules(store.files)
    refuse_converted(modules, store, path)  # first: a state dict that somebody saved has no config.json
    folder = path if path.is_dir() else path.parent
    beside = folder / HF_QUANT_CONFIG
    config = Config(folder / "config.json", read_json(folder / "config.json", folder), read_json(beside, folder) if beside.exists() else None)
    stated = stated_quantisation(config)
    linears = find_linears(modules, stated.kind)
    if stated.refusal is not None and not linears:
        raise stated.refusal
    layers = find_layers(store.files, path, stated.kind, needed=False)
    if not layers and not linears:
        check_kind(modules, path, stated.kind)
        find_layers(store.files, path, stated.kind)
    return Checkpoint(path, config.data, stated.kind, config, store, layers, stated, modules)


def _larger(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None or b is None else torch.maximum(a, b)


def _part(experts: slice | None, count: int, module: str) -> slice:
    if experts is None:
        return slice(0, count)
    if isinstance(experts, slice) and experts.step in (None, 1):
        start = 0 if experts.start is None else experts.start
        stop = count if experts.stop is None else experts.stop
        # Python would cut a slice that reaches too far; fewer experts than asked for would then pass unseen.
        if isinstance(start, int) and isinstance(stop, int) and 0 <= start < stop <= count:
            return slice(start, stop)
    raise MxdebugError(f"experts of {module}", f"a slice within 0..{count}, not empty, step 1", repr(experts),
                       "one expert's number instead of a slice, or another number of experts")


def _operands(names: LayerNames) -> dict[str, str]:
    out: dict[str, str] = {}
    if names.kind == GPT_OSS:
        for operand, projection in (("w13", "gate_up_proj"), ("w2", "down_proj")):
            for suffix, leaf in (("", "blocks"), ("_scale", "scales"), ("_bias", "bias")):
                if f"{projection}_{leaf}" in names.fused:
                    out[operand + suffix] = names.fused[f"{projection}_{leaf}"]
        return out
    leaves = LEAVES[names.kind]
    for operand, words in (("w13", ("w1", "w3")), ("w2", ("w2",))):
        for suffix, leaf in (("", leaves.payload), ("_scale", leaves.scale), ("_global_scale", leaves.global_scale),
                             ("_input_scale", leaves.input_scale), ("_bias", "bias")):
            if present := [w for w in words if (w, leaf) in names.single]:
                out[operand + suffix] = names.pattern(present, leaf)
    return out
