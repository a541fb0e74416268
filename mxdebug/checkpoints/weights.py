"""Tensors of one layer's experts -> weights in logical order, each dtype and shape checked before data is read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import MxdebugError
from ..formats import MXFP4, BlockFormat, BlockTensor
from ..layouts.rows import INTERLEAVED
from .kinds import LEAVES
from .names import SPELLINGS, LayerNames
from .scalars import WHY_INPUT, WHY_NO_INPUT, WHY_WEIGHT, read_scalars
from .store import Reader

_HALF_BLOCK = MXFP4.block // 2  # payload bytes of one block
PAYLOAD = ("U8",)
_SCALES = ("U8", "F8_E8M0")
BIAS = ("BF16", "F16", "F32")
_WHY_DTYPE = {
    "F8_E4M3": "NVFP4 scales or FP8 weights, or E8M0 bytes under another dtype",
    "F8_E8M0": "MXFP4 scales",
    "U8": "bytes that the file does not call E4M3; they may be MXFP4 scales",
    "F32": "scales stored as numbers; cast by value into bytes they turn to garbage (vLLM issue 51419)",
    "BF16": "a layer that is not quantised, or scales stored as numbers",
    "F16": "a layer that is not quantised, or scales stored as numbers",
}


@dataclass(frozen=True)
class Weight:
    """tensor [E, rows, K]; bias [E, rows] in the file's dtype, or None; input_scale float32 [E], a multiplier, or None."""

    tensor: BlockTensor
    bias: Tensor | None
    input_scale: Tensor | None = None


def fused_experts(names: LayerNames, reader: Reader) -> int:
    """E from the header of gate_up_proj_blocks."""
    return _blocks(names, reader, "gate_up_proj")[0]


def read_fused(names: LayerNames, reader: Reader, part: slice, gated: bool, biased: bool) -> dict[str, Weight]:
    """gpt-oss: w1, w3, w2 of the experts in `part` (global indices).

    gate_up_proj [E, 2I, H/32, 16] has rows g0,u0,g1,u1 (transformers models/gpt_oss); the last two axes are one payload row.
    """
    if not gated:
        raise MxdebugError(f"tensor {_need(names, 'gate_up_proj_blocks')}", "an activation with gate", "one without",
                           "config.json of another model")
    e, rows, blocks = _blocks(names, reader, "gate_up_proj")
    if rows % 2:
        raise MxdebugError(f"tensor {names.fused['gate_up_proj_blocks']}", "an even number of rows: gate and up in turn", str(rows),
                           "a slice of another tensor")
    half = rows // 2
    down = _blocks(names, reader, "down_proj")
    if half % MXFP4.block or down != (e, blocks * MXFP4.block, half // MXFP4.block):
        raise MxdebugError(f"tensor {names.fused['down_proj_blocks']}",
                           f"shape [{e}, {blocks * MXFP4.block}, {half}/{MXFP4.block}, {_HALF_BLOCK}] "
                           f"next to gate_up_proj {[e, rows, blocks, _HALF_BLOCK]}",
                           f"shape {[*down, _HALF_BLOCK]}", "parts of two layers, or a padded next to an unpadded one")
    logical = INTERLEAVED.indices(half).argsort()  # logical row i stands in physical row logical[i]
    has_bias = {p: f"{p}_bias" in names.fused for p in ("gate_up_proj", "down_proj")}
    if len(set(has_bias.values())) > 1 or (biased and not all(has_bias.values())):
        missing = next(p for p, has in has_bias.items() if not has)
        raise MxdebugError(f"{names.module}.{missing}_bias", "a tensor: both projections have a bias, or neither; gpt-oss has both",
                           "no such tensor", "an export that dropped biases")
    for projection in ("gate_up_proj", "down_proj"):  # before de-interleaving: rows are reported as the file counts them
        scales = names.fused[f"{projection}_scales"]
        check_scales(reader.read(scales, part), MXFP4, _expert(part.start, lambda _: scales), "experts")
    return {"w1": _read_fused(names, reader, part, "gate_up_proj", logical[:half]),
            "w3": _read_fused(names, reader, part, "gate_up_proj", logical[half:]),
            "w2": _read_fused(names, reader, part, "down_proj", None)}


def _read_fused(names: LayerNames, reader: Reader, part: slice, projection: str, order: Tensor | None) -> Weight:
    payload = reader.read(names.fused[f"{projection}_blocks"], part, order).flatten(-2)
    scales = reader.read(names.fused[f"{projection}_scales"], part, order)
    bias_name = names.fused.get(f"{projection}_bias")
    return Weight(BlockTensor(payload, scales, MXFP4), None if bias_name is None else reader.read(bias_name, part, order))


def _blocks(names: LayerNames, reader: Reader, projection: str) -> tuple[int, int, int]:
    """(E, rows, blocks in a row) of a fused projection, its three headers checked."""
    blocks_name = _need(names, f"{projection}_blocks")
    shape = check_header(reader, blocks_name, PAYLOAD, 4)
    if shape[3] != _HALF_BLOCK:
        raise MxdebugError(f"tensor {blocks_name}", f"a last dimension of {_HALF_BLOCK} bytes, which is {MXFP4.block} elements",
                           f"shape {list(shape)}", "another block size (8 bytes is NVFP4's), or a tensor already in a kernel's layout")
    check_header(reader, _need(names, f"{projection}_scales"), _SCALES, 3, shape[:3], blocks_name)
    if f"{projection}_bias" in names.fused:
        check_header(reader, names.fused[f"{projection}_bias"], BIAS, 2, shape[:2], blocks_name)
    return shape[0], shape[1], shape[2]


def _need(names: LayerNames, leaf: str) -> str:
    if leaf not in names.fused:
        raise MxdebugError(f"{names.module}.{leaf}", "a tensor", "no such tensor", "an incomplete download or export")
    return names.fused[leaf]


def single_experts(names: LayerNames) -> int:
    """E, one more than the highest expert among the names."""
    return 1 + max(max(experts) for experts in names.single.values())


def read_single(names: LayerNames, reader: Reader, part: slice, gated: bool, biased: bool) -> dict[str, Weight]:
    """The other kinds: w1 (if gated), w3, w2 of the experts in `part`, one tensor an expert stacked to [E, rows, K].

    Input scales are all there, or none is (W4A16).
    """
    leaves, words = LEAVES[names.kind], ("w1", "w3", "w2") if gated else ("w3", "w2")
    if not gated and any(word == "w1" for word, _ in names.single):
        leaf = next(leaf for word, leaf in names.single if word == "w1")
        raise MxdebugError(names.pattern(["w1"], leaf), "no gate tensors, since the activation has no gate", "some",
                           "config.json of another model")
    with_bias = biased or any((word, "bias") in names.single for word in words)
    with_input = any((word, leaves.input_scale) in names.single for word in words)
    needed = [leaves.payload, leaves.scale, leaves.global_scale, leaves.input_scale if with_input else None, "bias" if with_bias else None]
    for word in words:
        for leaf in filter(None, needed):
            _all_experts(names, word, leaf, WHY_NO_INPUT if leaf == leaves.input_scale else "an incomplete download or export")
    shapes = {word: _single_shape(names, reader, part, word, with_bias) for word in words}
    rows, columns = shapes["w3"]
    for word, want in (("w1", (rows, columns)), ("w2", (columns, rows))):
        if shapes.get(word, want) != want:
            raise MxdebugError(names.pattern([word], leaves.payload),
                               f"{list(want)} elements next to {names.words['w3']} {[rows, columns]}", f"{list(shapes[word])}",
                               "parts of two layers, or a padded next to an unpadded one")
    return {word: _read_single(names, reader, part, word, with_bias, with_input) for word in words}


def _all_experts(names: LayerNames, word: str, leaf: str, reason: str) -> None:
    have, count = names.single.get((word, leaf), {}), single_experts(names)
    missing = next((e for e in range(count) if e not in have), None)
    if missing is not None:
        spelled = names.words.get(word, f"{word} (or {SPELLINGS[word]})")
        raise MxdebugError(f"{names.module}.{missing}.{spelled}.{leaf}", f"a tensor for each expert 0..{count - 1}",
                           f"none for expert {missing}; {count - len(have)} of {count} missing", reason)


def _single_shape(names: LayerNames, reader: Reader, part: slice, word: str, with_bias: bool) -> tuple[int, int]:
    """(rows, K) of one projection, every header of the experts in `part` checked."""
    leaves = LEAVES[names.kind]
    payloads, scales, block = names.single[word, leaves.payload], names.single[word, leaves.scale], leaves.format.block
    first: tuple[int, ...] | None = None
    for e in range(part.start, part.stop):
        shape = check_header(reader, payloads[e], PAYLOAD, 2, first, payloads[part.start])
        first = shape
        rows, columns = shape[0], 2 * shape[1]
        if columns % block:
            raise MxdebugError(f"tensor {payloads[e]}", f"K a multiple of the block of {block}",
                               f"K {columns} (shape {list(shape)}, two elements a byte)",
                               "a slice that cuts a block, or a transposed tensor")
        check_header(reader, scales[e], leaves.scale_dtypes, 2, (rows, columns // block), payloads[e])
        if with_bias:
            check_header(reader, names.single[word, "bias"][e], BIAS, 1, (rows,), payloads[e])
    return rows, columns


def _read_single(names: LayerNames, reader: Reader, part: slice, word: str, with_bias: bool, with_input: bool) -> Weight:
    leaves = LEAVES[names.kind]

    def stack(leaf: str) -> Tensor:
        tensors = [reader.read(names.single[word, leaf][e]) for e in range(part.start, part.stop)]
        if len({t.dtype for t in tensors}) > 1:  # torch.stack would convert them to a common dtype
            raise MxdebugError(names.pattern([word], leaf), "one dtype for all experts",
                               ", ".join(sorted({str(t.dtype) for t in tensors})), "shards of two exports")
        return torch.stack(tensors)

    def scalars(leaf: str | None, why: str) -> Tensor | None:
        return None if leaf is None else read_scalars(names.single[word, leaf], reader, part, leaves.divides, why)

    scales = stack(leaves.scale)
    check_scales(scales, leaves.format, _expert(part.start, names.single[word, leaves.scale].__getitem__), "experts")
    tensor = BlockTensor(stack(leaves.payload), scales, leaves.format, scalars(leaves.global_scale, WHY_WEIGHT))
    return Weight(tensor, stack("bias") if with_bias else None, scalars(leaves.input_scale if with_input else None, WHY_INPUT))


def check_header(reader: Reader, name: str, dtypes: tuple[str, ...], dimensions: int, shape: tuple[int, ...] | None = None,
            beside: str = "") -> tuple[int, ...]:
    """The shape of a tensor, after checking its dtype and shape; `beside` is the tensor that demands `shape`."""
    dtype, got = reader.header(name)
    if dtype not in dtypes:
        raise MxdebugError(f"tensor {name}", f"dtype {' or '.join(dtypes)}", dtype, _WHY_DTYPE.get(dtype, "another format under this name"))
    if len(got) != dimensions or 0 in got:
        raise MxdebugError(f"tensor {name}", f"{dimensions} dimensions, none empty", f"shape {list(got)}",
                           "another format, or a tensor already in a kernel's layout")
    if shape is not None and got != shape:
        raise MxdebugError(f"tensor {name}", f"shape {list(shape)} next to {beside}", f"shape {list(got)}",
                           "another block size, a transposed tensor, parts of two layers, or scales already in a kernel's layout")
    return got


def _expert(first: int, name: Callable[[int], str]) -> Callable[[int], str]:
    """For messages: which tensor and expert is the e-th of those read, whose first is expert `first`; `name` gives an expert's tensor."""
    return lambda e: f"{name(first + e)}, expert {first + e}"


def check_scales(scales: Tensor, fmt: BlockFormat, place: Callable[[int], str], those: str) -> None:
    """Raise where a block scale [E or parts, rows, blocks] is NaN, or below zero (E4M3; its byte 0x80 is -0, which is zero).

    `place` says which tensor the e-th is, `those` what they are; both are for messages.
    """
    nan, expected, found = ((scales & 0x7F) == 0x7F, "E4M3 scales that are numbers", "NaN (byte 0x7F or 0xFF)") if fmt.outer else \
        (scales == 0xFF, "E8M0 scales below 0xFF", "NaN (byte 0xFF)")
    checks = [(nan, expected, found, "an overflow in the quantiser, or uninitialised padding")]
    if fmt.outer:
        checks.append((scales > 0x80, "E4M3 scales that are not negative", "negative", "bytes of another tensor under this name"))
    for wrong, expected, found, reason in checks:
        where = wrong.nonzero()
        if len(where):
            e, row, column = where[0].tolist()
            raise MxdebugError(f"tensor {place(e)}, row {row}, block {column}", expected,
                               f"{len(where)} {found} in {len(where[:, :2].unique(dim=0))} rows of {len(scales)} {those}", reason)
