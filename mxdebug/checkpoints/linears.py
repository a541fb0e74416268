"""Which tensors belong to which NVFP4 linear layer, and one layer of them in logical order; what a kernel's conversion left is refused.

kinds.LEAVES has the tensors of a module, such as model.layers.0.self_attn.q_proj.weight_packed. Engines join some modules by their rows.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import MxdebugError
from ..formats import BlockFormat
from ..reference_linear import LinearLayer
from .kinds import COMPRESSED_TENSORS_NVFP4, LEAVES, MODELOPT_NVFP4
from .names import natural
from .scalars import WHY_INPUT_LINEAR, WHY_WEIGHT, read_scalars
from .store import Reader, Store
from .weights import BIAS, PAYLOAD, check_header, check_scales

Modules = Mapping[str, Mapping[str, str]]  # module -> leaf -> tensor name
# vLLM's names, packed_modules_mapping of models/llama.py; Mistral's files spell gate and up w1 and w3.
JOINED = {"qkv_proj": (("q_proj", "k_proj", "v_proj"),), "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3"))}
_SIGNS = {MODELOPT_NVFP4: {"weight_scale_2"}, COMPRESSED_TENSORS_NVFP4: {"weight_packed", "weight_global_scale"}}
# compressed-tensors: the unpacked shape. Both: scales of the KV cache, which stand next to the projection that fills it.
_HARMLESS = {"weight_shape", "q_scale", "k_scale", "v_scale"}
_MARK = "mxdebug_converted"  # in state dicts of the modules that mxdebug itself converted
_NOT_CONVERTED = {"weight_packed", "weight_scale_2"}
_UNCONVERTED = (*_NOT_CONVERTED, "_proj_blocks")  # the same of experts, whatever their kind
_BLOCKS = (16, 32)
_MOST_COMPARED = 4000  # names that a mistyped one is compared with, at 50 us each


@dataclass(frozen=True)
class CheckpointLinear:
    """One linear layer, or some that engines join, as the file has them.

    name   as asked for: a module of the file, or "...qkv_proj", "...gate_up_proj" for its parts
    kind   MODELOPT_NVFP4 or COMPRESSED_TENSORS_NVFP4
    layer  weight [N, K]; global and input scales float32 multipliers, whatever the file stores
    names  weight, weight_scale, weight_global_scale, input_scale, bias -> tensor name, or a tuple of them where the file has several
           parts. Operands that are absent have no entry.
    group  elements that share a block scale: 16, or 32 where config.json and the scales both say so (layer.format.block)
    """

    name: str
    kind: str
    layer: LinearLayer
    names: Mapping[str, str | tuple[str, ...]]
    group: int


def find_modules(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """Tensor names by module; experts' tensors are left out, whatever model they are of (names.py sorts the language model's)."""
    modules: dict[str, dict[str, str]] = {}
    for name in names:
        module, _, leaf = name.rpartition(".")
        if "experts" not in module or "experts" not in module.split("."):  # shared_experts is a dense MLP
            modules.setdefault(module, {})[leaf] = name
    return modules


def find_linears(modules: Modules, kind: str) -> tuple[str, ...]:
    """Modules with NVFP4 weights, by names alone, in natural order. What is listed can still be damaged, which `read_linear` says."""
    found = [module for module, leaves in modules.items() if _SIGNS.get(kind, set()) & leaves.keys()]
    return tuple(sorted(found, key=natural))


def joined_names(linears: Iterable[str]) -> tuple[str, ...]:
    """vLLM's names of the layers that it joins, for those of them whose parts are all there."""
    known = set(linears)
    ends = {(module.rpartition(".")[0], end) for module in known for end, spellings in JOINED.items() if any(module.rpartition(".")[2] == parts[0] for parts in spellings)}
    return tuple(sorted(f"{before}.{end}".lstrip(".") for before, end in ends
                        if any(all(f"{before}.{part}".lstrip(".") in known for part in parts) for parts in JOINED[end])))


def shape_of(name: str, modules: Modules, kind: str, reader: Reader) -> tuple[int, int] | None:
    """(N, K) of a layer by its payloads' headers alone; None where they are not those of one layer, which `read_linear` then says."""
    payload = LEAVES[kind].payload
    try:
        shapes = [check_header(reader, modules[part][payload], PAYLOAD, 2) for part in _parts(name, modules, kind)]
    except (MxdebugError, KeyError):
        return None
    return (sum(n for n, _ in shapes), 2 * shapes[0][1]) if len({half for _, half in shapes}) == 1 else None


def check_kind(modules: Modules, path: Path, stated: str) -> None:
    """Raise where there are linear layers, though not of the `stated` kind: for a file that has nothing of that kind."""
    for kind in _SIGNS:
        if kind != stated and (others := [module for module in find_linears(modules, kind) if not _suspect(modules[module])]):
            raise MxdebugError(f"tensor names of {path}", f"those of {stated}, as quantization_config says",
                               f"those of {kind}, such as {others[0]}", "config.json and weights of two checkpoints")


def refuse_converted(modules: Modules, store: Store, path: Path) -> None:
    """Raise where all quantised layers of a file are converted ones. Reads headers only where the names leave no other reading."""
    suspects = [module for module, leaves in modules.items() if _suspect(leaves)]
    if suspects and not any(name.endswith(_UNCONVERTED) for name in store.files):
        with store.reader() as reader:
            found = [_converted(modules[module], reader) for module in suspects]
        if all(found):
            raise _is_converted(f"{suspects[0] or 'the layer'} of {path}", str(found[0]))


def read_linear(name: str, modules: Modules, kind: str, fmt: BlockFormat, reader: Reader) -> CheckpointLinear:
    """The layer `name` of `kind`; `fmt` is NVFP4 with the block that config.json states. Only its tensors are read.

    Raises MxdebugError for a name that is neither a module nor joined ones, a layer that is not quantised or already converted, tensors
    that are missing or of an unknown meaning, other dtypes and shapes, scales of another block than `fmt`'s, K that is no multiple of it,
    parts that differ in K or of which only some have a bias or an input scale, NaN or negative block scales, and global or input scales
    that are not finite and above zero.
    """
    parts, leaves = _parts(name, modules, kind), LEAVES[kind]
    for part in parts:
        _check_names(part, modules[part], kind, reader)
    names = {operand: tuple(modules[part][leaf] for part in parts if leaf in modules[part])
             for operand, leaf in (("weight", leaves.payload), ("weight_scale", leaves.scale), ("weight_global_scale", leaves.global_scale),
                                   ("input_scale", leaves.input_scale), ("bias", "bias"))}
    names = {operand: found for operand, found in names.items() if found}
    for operand in ("input_scale", "bias"):
        if len(names.get(operand, parts)) != len(parts):
            leaf = leaves.input_scale if operand == "input_scale" else "bias"
            without = next(part for part in parts if leaf not in modules[part])
            raise MxdebugError(f"{without}.{leaf}", f"a tensor, as {names[operand][0]} is one: all parts of {name} have it, or none",
                               "no such tensor", "an incomplete export, or projections of two exports")
    shapes = [_shape(modules[part], kind, fmt, reader) for part in parts]
    for payload, (_, columns) in zip(names["weight"], shapes, strict=True):
        if columns != shapes[0][1]:
            raise MxdebugError(f"tensor {payload}", f"K {shapes[0][1]} next to {names['weight'][0]}", f"K {columns}",
                               "projections of two layers, or a padded next to an unpadded one")
    read = {operand: [reader.read(n) for n in names[operand]] for operand in ("weight", "weight_scale", "bias") if operand in names}
    for n, scales in zip(names["weight_scale"], read["weight_scale"], strict=True):
        check_scales(scales[None], fmt, lambda _, n=n: n, "part")
    if len({t.dtype for t in read.get("bias", ())}) > 1:  # torch.cat would convert them to a common dtype
        raise MxdebugError(f"tensor {names['bias'][0]}", "one dtype for all parts", ", ".join(sorted({str(t.dtype) for t in read["bias"]})),
                           "projections of two exports")
    scalars = {operand: read_scalars(dict(enumerate(names[operand])), reader, slice(0, len(parts)), leaves.divides, why, "part")
               for operand, why in (("weight_global_scale", WHY_WEIGHT), ("input_scale", WHY_INPUT_LINEAR)) if operand in names}
    layer = LinearLayer(torch.cat(read["weight"]), torch.cat(read["weight_scale"]), fmt, parts, tuple(rows for rows, _ in shapes),
                        scalars["weight_global_scale"], torch.cat(read["bias"]) if "bias" in read else None, scalars.get("input_scale"))
    return CheckpointLinear(name, kind, layer, {o: found[0] if parts == (name,) else found for o, found in names.items()}, fmt.block)


def converted(headers: Mapping[str, tuple[str, tuple[int, ...]]]) -> str | None:
    """In words, which kernel's conversion a module's tensors are from; None where they are not, as for a checkpoint's layer.

    `headers`: leaf -> (dtype as safetensors spells it, shape). Conversions rename nothing and add nothing that says so, but no checkpoint
    has uint8 or int32 `weight` with `weight_global_scale`. Sources: vLLM kernels/linear/nvfp4/flashinfer.py and FlashInfer
    gemm_bf16_fp4_cute_dsl.py _prepare_cute_dsl_sm100, _sm12x; vLLM marlin_utils_fp4.py prepare_fp4_layer_for_marlin.
    """
    by = " by mxdebug" if _MARK in headers else ""
    if not by and not _suspect(headers):
        return None
    what = _layout(headers)
    if what is None and not by:
        return None  # such as an export that was not compressed: bf16 weights next to their scales
    return f"a layer converted{by} for {what or 'a kernel'}"


def _layout(headers: Mapping[str, tuple[str, tuple[int, ...]]]) -> str | None:
    (dtype, weight), (scale_dtype, scale) = (headers.get(leaf, ("", ())) for leaf in ("weight", "weight_scale"))
    if len(weight) != 2 or 0 in weight:
        return None
    if dtype == "I32" and scale == (weight[0], weight[1] // 2) and weight[1] % 2 == 0:
        return {"U8": f"FlashInfer CuTe-DSL W4A16 on SM12x: int32 [K/16, 2N] {list(weight)}, scales S0E5M3 [K/16, N]",
                "F8_E4M3": f"Marlin: int32 [K/16, 2N] {list(weight)}, scales S0E5M3 under the name of E4M3"}.get(scale_dtype)
    if dtype != "U8" or scale_dtype not in ("U8", "F8_E4M3"):
        return None
    n, k = weight[0], 2 * weight[1]
    tiles, columns = -(-n // 128), -(-k // 16)
    if scale not in ((32, 4, tiles, 4, -(-columns // 4), 1), (128 * tiles, 4 * -(-columns // 4))):
        return None
    # Both leave padded weights and 128x4 scales; W4A4 leaves the product of its two global scales too.
    kernel = "a W4A4 kernel (alpha is there)" if "alpha" in headers else "FlashInfer CuTe-DSL W4A16 on SM100/103"
    return f"{kernel}: weight padded to {[n, k]} elements, scales in 128x4 tiles {list(scale)}"


def _suspect(leaves: Iterable[str]) -> bool:
    """By names alone: a layer that may be a converted one."""
    have = set(leaves)
    return _MARK in have or ({"weight", "weight_scale", "weight_global_scale"} <= have and not _NOT_CONVERTED & have)


def _converted(leaves: Mapping[str, str], reader: Reader) -> str | None:
    return converted({leaf: reader.header(name) for leaf, name in leaves.items()}) if _suspect(leaves) else None


def _is_converted(where: str, what: str) -> MxdebugError:
    return MxdebugError(where, "a layer as checkpoints store it", what,
                        "a state dict saved after the engine had loaded the model; read the checkpoint that it was loaded from")


def _parts(name: str, modules: Modules, kind: str) -> tuple[str, ...]:
    if isinstance(name, str) and name in modules:
        return (name,)
    before, _, last = str(name).rpartition(".")
    joined = [tuple(f"{before}.{part}".lstrip(".") for part in parts) for parts in JOINED.get(last, ())]
    for parts in joined:
        if all(part in modules for part in parts):
            return parts
    for parts in joined:
        if some := [part for part in parts if part in modules]:
            missing = next(part for part in parts if part not in modules)
            raise MxdebugError(f"parts of {name}", ", ".join(parts), f"no {missing} next to {some[0]}", "an incomplete download or export")
    known = find_linears(modules, kind)
    near = difflib.get_close_matches(str(name), [*joined_names(known), *known][:_MOST_COMPARED], n=3)
    such = f", such as {', '.join(near or known[:3])}" if known else ""
    raise MxdebugError("name of a linear layer", f"one of {len(known)} modules{such}", repr(name),
                       "a name of another model, or of a module that holds layers" if known else "a file whose linear layers are not NVFP4")


def _check_names(module: str, leaves: Mapping[str, str], kind: str, reader: Reader) -> None:
    """Raise where the names of one module are not those of a layer of the kind."""
    known = LEAVES[kind]
    if (what := _converted(leaves, reader)) is not None:
        raise _is_converted(f"module {module}", what)
    if not leaves.keys() & set(known.all) - {"weight", "bias"}:
        raise MxdebugError(f"module {module}", f"the tensors of {kind}: {', '.join(known.all[:3])}", ", ".join(sorted(leaves)),
                           "a layer that is not quantised, or another format")
    for leaf in (known.payload, known.scale, known.global_scale):
        if leaf not in leaves:
            raise MxdebugError(f"{module}.{leaf}", "a tensor", f"no such tensor next to {', '.join(sorted(leaves))}",
                               "an incomplete download or export, another format (FP8 has no second scale), or a layer saved uncompressed")
    if unknown := sorted(leaves.keys() - set(known.all) - _HARMLESS):
        raise MxdebugError(f"tensor {leaves[unknown[0]]}", f"only tensors of a known meaning next to those of {kind}",
                           "a name that is not known", "zero points, AWQ, another format, or a newer exporter")


def _shape(leaves: Mapping[str, str], kind: str, fmt: BlockFormat, reader: Reader) -> tuple[int, int]:
    """(N, K) of one part, every header but the scalars' checked."""
    known = LEAVES[kind]
    payload, scale = leaves[known.payload], leaves[known.scale]
    n, half = check_header(reader, payload, PAYLOAD, 2)
    k = 2 * half
    blocks = check_header(reader, scale, known.scale_dtypes, 2)
    for other in _BLOCKS:
        if other != fmt.block and k % other == 0 and blocks == (n, k // other):
            raise MxdebugError(f"tensor {scale}", f"{k}/{fmt.block} block scales a row, as config.json says or leaves to the format",
                               f"{k}/{other}: one for {other} elements",
                               f"group_size {other} in the exporter and {fmt.block} in config.json (TensorRT-LLM issue 19091)")
    if k % fmt.block:
        raise MxdebugError(f"tensor {payload}", f"K a multiple of the block of {fmt.block}",
                           f"K {k} (shape {[n, half]}, two elements a byte)", "a slice that cuts a block, or a transposed tensor")
    check_header(reader, scale, known.scale_dtypes, 2, (n, k // fmt.block), payload)
    if "bias" in leaves:
        check_header(reader, leaves["bias"], BIAS, 1, (n,), payload)
    return n, k
