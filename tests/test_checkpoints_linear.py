"""NVFP4 linear layers: files that compressed-tensors itself wrote, values by two other libraries, joined parts, and what is refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import making_nvfp4
import pytest
import torch
from making_linear import (ATTENTION, GATE_UP, MLP, OTHERS, QKV, config, divisors, shapes, tensors, weights, write_compressed_tensors,
                           write_modelopt)
from making_nvfp4 import COMPRESSED, MODELOPT, save
from safetensors.torch import save_file
from torch import Tensor

from mxdebug import recorded
from mxdebug.checkpoints import CheckpointLinear, converted, open_checkpoint
from mxdebug.errors import MxdebugError
from mxdebug.formats import NVFP4

Tensors = dict[str, Tensor]
BOTH = pytest.mark.parametrize("kind", [MODELOPT, COMPRESSED])
WRITE = {MODELOPT: write_modelopt, COMPRESSED: write_compressed_tensors}
LEAVES = {MODELOPT: ("weight", "weight_scale", "weight_scale_2", "input_scale"),
          COMPRESSED: ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")}
WHOLE = {f"{ATTENTION}qkv_proj": QKV, f"{MLP}gate_up_proj": GATE_UP}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """These tensors are tiny: on a busy machine threads that wait for each other take ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def ct() -> SimpleNamespace:
    """The parts of compressed-tensors that serve as writer and as oracle."""
    pytest.importorskip("compressed_tensors")
    from compressed_tensors import compressors, quantization
    from compressed_tensors.compressors.nvfp4 import unpack_fp4_from_uint8
    from compressed_tensors.quantization import quant_scheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.utils import helpers

    return SimpleNamespace(ModelCompressor=compressors.ModelCompressor, quantization=quantization, helpers=helpers,
                           W4A4=quant_scheme.NVFP4, NVFP4A16=quant_scheme.NVFP4A16, dequantize=dequantize, unpack=unpack_fp4_from_uint8)


def ct_model(ct: SimpleNamespace, made: Tensors, scales: Tensors, preset: dict[str, Any]) -> tuple[torch.nn.Module, Any]:
    """A model with these float32 weights and global scales (divisors), compressed by compressed-tensors; and its compressor."""
    root = torch.nn.Module()
    for name, w in made.items():
        *path, last = name.split(".")
        at = root
        for step in path:
            if not hasattr(at, step):
                at.add_module(step, torch.nn.Module())
            at = getattr(at, step)
        at.add_module(last, torch.nn.Linear(*reversed(w.shape), bias=False))
        getattr(at, last).weight.data.copy_(w)
    scheme = ct.quantization.QuantizationScheme(targets=["Linear"], **preset)
    stated = ct.quantization.QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    ct.quantization.apply_quantization_config(root, stated)
    for name, w in made.items():
        module, blocks = root.get_submodule(name), w.unflatten(-1, (-1, 16))
        found, _ = ct.helpers.calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=scales[name])
        module.weight_scale.data = found
        module.weight_global_scale.data = scales[name]
        if hasattr(module, "input_global_scale"):
            module.input_global_scale.data = 3 * scales[name]
    compressor = ct.ModelCompressor.from_pretrained_model(root)
    compressor.compress_model(root)
    return root, compressor


def powers(scales: Tensors) -> Tensors:
    """Divisors rounded down to powers of two: with those every order of multiplication rounds alike, and nothing saturates."""
    return {name: torch.exp2(s.log2().floor()) for name, s in scales.items()}


# -- files and values by other libraries --------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["NVFP4A16", "W4A4"])
def test_a_file_that_compressed_tensors_wrote(tmp_path: Path, ct: SimpleNamespace, preset: str) -> None:
    """Its compressor writes tensors and config.json, its decompressor gives the values, in bf16. With powers of two that is exact."""
    made = weights()
    drawn = divisors(made, differ=True)
    assert all(torch.equal(drawn[name], ct.helpers.generate_gparam(w.min().reshape(1), w.max().reshape(1))) for name, w in made.items())
    scales = powers(drawn)
    model, compressor = ct_model(ct, made, scales, getattr(ct, preset))
    stored = {k: v.clone() for k, v in model.state_dict().items()}
    save_file(stored, tmp_path / "model.safetensors")
    compressor.update_config(str(tmp_path))
    compressor.decompress_model(model)
    checkpoint = open_checkpoint(tmp_path)
    assert (checkpoint.kind, checkpoint.layers, checkpoint.w4a16) == (COMPRESSED, (), preset == "NVFP4A16")
    assert checkpoint.linears == (*sorted(GATE_UP + OTHERS[1:], key=(MLP + "down_proj", *GATE_UP).index),
                                  QKV[1], OTHERS[0], QKV[0], QKV[2])
    for name in (*checkpoint.linears, *WHOLE):
        found, parts = checkpoint.linear(name).layer, WHOLE.get(name, (name,))
        want = torch.cat([model.get_submodule(part).weight for part in parts])
        assert want.dtype == torch.bfloat16 and want.float().abs().amax() > 0.1
        assert torch.equal(found.weight.dequantise(torch.bfloat16), want), name
        original = torch.cat([made[part] for part in parts])
        assert (found.weight.dequantise() - original).norm() < 0.2 * original.norm()  # a swapped nibble, row or part gives 1 and more
        assert torch.equal(found.payload, torch.cat([stored[f"{part}.weight_packed"] for part in parts]))
        assert found.global_scales.tolist() == [1 / float(scales[part]) for part in parts]
        assert (found.input_scales is None) == (preset == "NVFP4A16")
        if found.input_scales is not None:
            assert torch.equal(found.input_scales, torch.cat([1 / (3 * scales[part]) for part in parts]))


@BOTH
def test_values_with_any_global_scale(tmp_path: Path, ct: SimpleNamespace, kind: str) -> None:
    """Three libraries, three orders: compressed-tensors divides the block scale by the divisor (2 roundings, mxdebug 2 with the inverse),
    torchao multiplies both scales first. So 2^-22 and 3 * 2^-24 may lie between them; elements and scales are equal."""
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    stored, args = tensors(COMPRESSED, differ=True), ct.W4A4["weights"]
    checkpoint = open_checkpoint(WRITE[kind](tmp_path, differ=True))
    for name in (*checkpoint.linears, *WHOLE):
        parts, by_ct, by_ao = WHOLE.get(name, (name,)), [], []
        for part in parts:
            payload, scale, divisor = (stored[f"{part}.{leaf}"] for leaf in LEAVES[COMPRESSED][:3])
            elements = ct.unpack(payload, payload.shape[0], 2 * payload.shape[1], dtype=torch.float32)
            by_ct.append(ct.dequantize(elements, scale.float(), args=args, global_scale=divisor, dtype=torch.float32))
            by_ao.append(nvfp4.NVFP4Tensor(payload, scale, 16, torch.float32, (1.0 / divisor).reshape(())).dequantize(torch.float32))
        got = checkpoint.linear(name).layer.weight
        assert torch.allclose(got.dequantise(), torch.cat(by_ct), rtol=2.0**-22, atol=0)
        assert torch.allclose(got.dequantise(), torch.cat(by_ao), rtol=3 * 2.0**-24, atol=0)
        one = replace(got, global_scale=torch.ones(()))
        assert torch.equal(one.dequantise(), torch.cat([nvfp4.NVFP4Tensor(
            stored[f"{p}.weight_packed"], stored[f"{p}.weight_scale"], 16, torch.float32).dequantize(torch.float32) for p in parts]))


@BOTH
def test_values_by_torchao_exactly(tmp_path: Path, kind: str) -> None:
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    t, want = tensors(kind, differ=True), []
    for i, part in enumerate(QKV):
        payload, scale, global_scale, _ = (f"{part}.{leaf}" for leaf in LEAVES[kind])
        t[global_scale].fill_(2.0 ** (-7 - i) if kind == MODELOPT else 2.0 ** (7 + i))
        want.append(nvfp4.NVFP4Tensor(t[payload], t[scale], 16, torch.float32, torch.tensor(2.0 ** (-7 - i))).dequantize(torch.float32))
    layer = read(tmp_path, t, config(kind), f"{ATTENTION}qkv_proj").layer
    assert (layer.n, layer.k) == (160, 336) and torch.equal(layer.weight.dequantise(), torch.cat(want))


@BOTH
def test_blocks_of_32(tmp_path: Path, ct: SimpleNamespace, kind: str) -> None:
    """compressed-tensors' own functions read such a file with the same block."""
    folder, stored = WRITE[kind](tmp_path, group=32, differ=True), tensors(COMPRESSED, group=32, differ=True)
    args = ct.W4A4["weights"].model_copy(update={"group_size": 32})
    found = open_checkpoint(folder).linear(f"{ATTENTION}qkv_proj")
    assert found.group == 32 and found.layer.format == replace(NVFP4, block=32) and found.layer.k == 352
    want = []
    for part in QKV:
        payload, scale, divisor = (stored[f"{part}.{leaf}"] for leaf in LEAVES[COMPRESSED][:3])
        assert scale.shape[1] == 11
        elements = ct.unpack(payload, payload.shape[0], 2 * payload.shape[1], dtype=torch.float32)
        want.append(ct.dequantize(elements, scale.float(), args=args, global_scale=divisor, dtype=torch.float32))
    assert torch.allclose(found.layer.weight.dequantise(), torch.cat(want), rtol=2.0**-22, atol=0)


# -- what a good file reads as ------------------------------------------------------------------------------------


def read(folder: Path, made: Tensors, stated: dict[str, Any], name: str) -> CheckpointLinear:
    return open_checkpoint(save(folder, made, stated)).linear(name)


@BOTH
@pytest.mark.parametrize("change", [{}, {"differ": True, "bias": True, "inputs": True}, {"seed": 1}])
def test_joined(tmp_path: Path, kind: str, change: dict[str, Any]) -> None:
    t, found = tensors(kind, **change), open_checkpoint(WRITE[kind](tmp_path, **change)).linear(f"{ATTENTION}qkv_proj")
    payload, scale, global_scale, input_scale = LEAVES[kind]
    layer, biased = found.layer, "bias" in change
    assert (found.name, found.kind, found.group) == (f"{ATTENTION}qkv_proj", kind, 16)
    assert (layer.format, layer.names, layer.rows) == (NVFP4, QKV, (96, 32, 32))
    assert torch.equal(layer.payload, torch.cat([t[f"{p}.{payload}"] for p in QKV]))
    assert torch.equal(layer.scales, torch.cat([t[f"{p}.{scale}"].view(torch.uint8) for p in QKV]))
    stored = torch.stack([t[f"{p}.{global_scale}"].reshape(()) for p in QKV])
    assert torch.equal(layer.global_scales, stored if kind == MODELOPT else 1.0 / stored) and layer.global_scales.dtype == torch.float32
    assert len(layer.global_scales.unique()) == (3 if "differ" in change else 1)
    operands = {"weight": payload, "weight_scale": scale, "weight_global_scale": global_scale}
    if biased:
        assert layer.bias.dtype == torch.bfloat16 and torch.equal(layer.bias, torch.cat([t[f"{p}.bias"] for p in QKV]))
        stored = torch.stack([t[f"{p}.{input_scale}"].reshape(()) for p in QKV])
        assert torch.equal(layer.input_scales, stored if kind == MODELOPT else 1.0 / stored)
        operands |= {"input_scale": input_scale, "bias": "bias"}
    else:
        assert layer.bias is None and layer.input_scales is None
    assert found.names == {operand: tuple(f"{p}.{leaf}" for p in QKV) for operand, leaf in operands.items()}


def test_single(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_modelopt(tmp_path, bias=True))
    found = checkpoint.linear(QKV[1])
    assert (found.layer.rows, found.names["weight"], found.names["bias"]) == ((32,), f"{QKV[1]}.weight", f"{QKV[1]}.bias")
    assert checkpoint.linear(OTHERS[0]).layer.bias is None
    for name, (n, k) in shapes().items():
        assert checkpoint.linear(name).layer.weight.shape == (n, k)


@pytest.mark.parametrize("change", [{}, {"differ": True, "inputs": True}, {"group": 32}])
def test_both_kinds_store_the_same_layers(tmp_path: Path, change: dict[str, Any]) -> None:
    a, b = (open_checkpoint(write(tmp_path / kind, **change)) for kind, write in WRITE.items())
    assert a.linears == b.linears and a.w4a16 == b.w4a16 == ("inputs" not in change)
    for name in (*a.linears, *WHOLE):
        x, y = a.linear(name).layer, b.linear(name).layer
        assert torch.equal(x.weight.dequantise(), y.weight.dequantise()) and (x.input_scales is None) == (y.input_scales is None)
        assert x.input_scales is None or torch.equal(x.input_scales, y.input_scales)


def test_names_in_the_wild(tmp_path: Path) -> None:
    """Natural order; a module that the file itself calls qkv_proj; w1 and w3; shared experts; scales of the KV cache; no prefix."""
    t = tensors(COMPRESSED)
    ten = {k.replace("layers.0", "layers.10"): v for k, v in t.items() if "layers" in k}
    two = {k.replace("layers.0", "layers.2").replace("gate_proj", "w1").replace("up_proj", "w3"): v for k, v in t.items() if "mlp" in k}
    others = {k.replace(QKV[0], "model.layers.3.self_attn.qkv_proj"): v for k, v in t.items() if k.startswith(QKV[0])}
    others |= {k.replace(GATE_UP[0], "model.layers.3.mlp.shared_experts.gate_proj"): v for k, v in t.items() if k.startswith(GATE_UP[0])}
    others |= {k.replace(GATE_UP[0], "mtp.layers.0.mlp.experts.0.gate_proj"): v for k, v in t.items() if k.startswith(GATE_UP[0])}
    others |= {k.replace(f"{MLP}", ""): v for k, v in t.items() if "mlp" in k} | {f"{QKV[1]}.k_scale": torch.ones(())}
    checkpoint = open_checkpoint(save(tmp_path, t | ten | two | others, config(COMPRESSED)))
    indices = [int(name.split(".")[2]) for name in checkpoint.linears if name.startswith("model")]
    assert indices == sorted(indices) and set(indices) == {0, 2, 3, 10} and not any(".experts." in n for n in checkpoint.linears)
    assert "model.layers.3.mlp.shared_experts.gate_proj" in checkpoint.linears
    assert checkpoint.linears[:3] == ("down_proj", "gate_proj", "model.layers.0.mlp.down_proj")
    assert checkpoint.linear("model.layers.3.self_attn.qkv_proj").names["weight"] == "model.layers.3.self_attn.qkv_proj.weight_packed"
    assert checkpoint.linear("model.layers.2.mlp.gate_up_proj").layer.names == ("model.layers.2.mlp.w1", "model.layers.2.mlp.w3")
    assert checkpoint.linear("gate_up_proj").layer.names == ("gate_proj", "up_proj")
    assert checkpoint.linear(QKV[1]).layer.n == 32


SMALL: dict[str, Any] = dict(experts=2, hidden=64, intermediate=32)


@BOTH
def test_experts_and_linear_layers_in_one_file(tmp_path: Path, kind: str) -> None:
    moe = {k.replace("layers.0", "layers.1"): v for k, v in making_nvfp4.tensors(kind, **SMALL).items()}
    stated = making_nvfp4.config(kind, **SMALL)
    checkpoint = open_checkpoint(save(tmp_path, tensors(kind) | moe, stated))
    assert checkpoint.layers == (1,) and checkpoint.experts == 2 and set(checkpoint.linears) == set(shapes()) and not checkpoint.w4a16
    assert checkpoint.layer().layer.experts == 2 and checkpoint.linear(f"{MLP}gate_up_proj").layer.n == 416


@BOTH
def test_a_block_of_32_is_no_block_of_experts(tmp_path: Path, kind: str) -> None:
    """`layer` refuses it in the words that `open_checkpoint` has where there is nothing else to read."""
    moe = {k.replace("layers.0", "layers.1"): v for k, v in making_nvfp4.tensors(kind, **SMALL).items()}
    stated = making_nvfp4.config(kind, **SMALL) | {"quantization_config": config(kind, group=32)["quantization_config"]}
    checkpoint = open_checkpoint(save(tmp_path / "both", tensors(kind, group=32) | moe, stated))
    assert checkpoint.linear(QKV[0]).group == 32
    with pytest.raises(MxdebugError, match="expected group_size 16, which is NVFP4's, got 32") as from_layer:
        checkpoint.layer()
    with pytest.raises(MxdebugError) as from_open:
        open_checkpoint(save(tmp_path / "moe", moe, stated))
    assert str(from_layer.value).replace("both", "moe") == str(from_open.value)


def test_only_names_are_read_to_open(tmp_path: Path) -> None:
    """The only shard is absent: what an index lists can be opened, and only reading a layer says that it is not there."""
    folder = write_modelopt(tmp_path)
    index = {"weight_map": dict.fromkeys(tensors(MODELOPT), "model-00001-of-00001.safetensors")}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()
    checkpoint = open_checkpoint(folder)
    assert len(checkpoint.linears) == 7
    with pytest.raises(MxdebugError, match="a shard that was not downloaded"):
        checkpoint.linear(QKV[0])


# -- weights only -------------------------------------------------------------------------------------------------

NULL, GIVEN = {"g": {"weights": {}, "input_activations": None}}, {"g": {"weights": {}, "input_activations": {"num_bits": 4}}}
M = {"quant_method": "modelopt"}
C = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}


@pytest.mark.parametrize("inside, beside, want", [
    (M | {"quant_algo": "W4A16_NVFP4"}, None, True), (M | {"quant_algo": "w4a16_nvfp4", "config_groups": GIVEN}, None, True),
    (M | {"quant_algo": "NVFP4"}, None, False), (M | {"quant_algo": "NVFP4", "config_groups": {}}, None, False),
    (M | {"quant_algo": "nvfp4", "config_groups": NULL}, None, True), (M | {"quant_algo": "NVFP4", "config_groups": GIVEN}, None, False),
    (M | {"quant_algo": "NVFP4", "config_groups": NULL | {"h": GIVEN["g"]}}, None, False),
    (M | {"quantization": {"quant_algo": "NVFP4", "config_groups": NULL}}, None, False),  # vLLM looks at the top only
    (M | {"quantization": {"quant_algo": "W4A16_NVFP4"}}, None, True), (None, {"quantization": {"quant_algo": "W4A16_NVFP4"}}, True),
    (None, {"quantization": {"quant_algo": "NVFP4"}}, False), (M | {"quant_algo": "NVFP4"}, {"quant_algo": "W4A16_NVFP4"}, False),
    (C | {"config_groups": NULL}, None, True), (C | {"config_groups": GIVEN}, None, False), (C, None, False),
    (C | {"config_groups": NULL | {"h": GIVEN["g"]}}, None, False)])
def test_w4a16(tmp_path: Path, inside: dict[str, Any] | None, beside: dict[str, Any] | None, want: bool) -> None:
    kind = COMPRESSED if inside is not None and "format" in inside else MODELOPT
    save(tmp_path, tensors(kind), config(kind) | {"quantization_config": inside})
    if beside is not None:
        (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert open_checkpoint(tmp_path).w4a16 is want


def test_mxfp4_is_not_w4a16() -> None:
    """The property is about NVFP4; and gpt-oss has no linear layers that are quantised."""
    checkpoint = open_checkpoint(recorded.ROOT / "checkpoints" / "gptoss-tiny")
    assert checkpoint.w4a16 is False and checkpoint.linears == ()
    with pytest.raises(MxdebugError, match="only NVFP4 linear layers are read"):
        checkpoint.linear("model.layers.0.self_attn.q_proj")


# -- what must be refused -----------------------------------------------------------------------------------------

Change = Callable[[Tensors], Any]


def put(name: str, make: Callable[[Tensor], Tensor]) -> Change:
    return lambda t: t.__setitem__(name, make(t[name]))


def byte(name: str, value: int, *at: int) -> Change:
    def change(t: Tensors) -> None:
        t[name].view(torch.uint8)[at] = value
    return change


def drop(*names: str) -> Change:
    return lambda t: [t.pop(name) for name in names]


Q, K, V = (f"{part}." for part in QKV)
EXTRA = torch.ones(())
REFUSED: dict[str, tuple[str, str, Change, tuple[str, str, str, str]]] = {
    # case: (checkpoint, layer, change, fragments of operand, expected, got, reason)
    "unknown name": (MODELOPT, "layers.0.self_attn.q_proj", lambda t: None,
                     ("name of a linear layer", "7 modules, such as " + QKV[0], "'layers.0.self_attn.q_proj'", "another model")),
    "unknown joined name": (MODELOPT, "model.layers.1.self_attn.qkv_proj", lambda t: None,
                            ("name", ATTENTION + "qkv_proj", "layers.1", "")),
    "part missing": (MODELOPT, ATTENTION + "qkv_proj", lambda t: [t.pop(k) for k in list(t) if k.startswith(K)],
                     (f"parts of {ATTENTION}qkv_proj", ", ".join(QKV), f"no {QKV[1]} next to {QKV[0]}", "incomplete")),
    "not quantised": (COMPRESSED, "lm_head", lambda t: None, ("module lm_head", "weight_packed", "weight", "not quantised")),
    "part not quantised": (MODELOPT, ATTENTION + "qkv_proj",
                           lambda t: drop(V + "weight_scale", V + "weight_scale_2", V + "input_scale")(t),
                           (f"module {QKV[2]}", "weight_scale_2", "weight", "not quantised")),
    "AWQ": (MODELOPT, QKV[0], lambda t: t.__setitem__(Q + "pre_quant_scale", EXTRA),
            (Q + "pre_quant_scale", "known meaning", "not known", "AWQ")),
    "no scale_2": (MODELOPT, QKV[0], drop(Q + "weight_scale_2"),
                   (Q + "weight_scale_2", "a tensor", "no such tensor next to bias, input_scale, weight,", "FP8")),
    "no payload": (COMPRESSED, ATTENTION + "qkv_proj", drop(K + "weight_packed"),
                   (K + "weight_packed", "a tensor", "no such tensor next to bias, input_global_scale, weight_global_scale", "")),
    "not compressed": (COMPRESSED, QKV[0], lambda t: t.__setitem__(Q + "weight", t.pop(Q + "weight_packed").bfloat16()),
                       (Q + "weight_packed", "", "no such tensor next to bias, input_global_scale, weight,", "uncompressed")),
    "bias of one part": (MODELOPT, ATTENTION + "qkv_proj", drop(V + "bias"), (V + "bias", f"as {Q}bias is one", "no such tensor", "")),
    "input scale of one part": (COMPRESSED, ATTENTION + "qkv_proj", drop(Q + "input_global_scale", V + "input_global_scale"),
                                (Q + "input_global_scale", "all parts", "no such", "incomplete")),
    "biases of two dtypes": (MODELOPT, ATTENTION + "qkv_proj", put(K + "bias", lambda b: b.float()),
                             (Q + "bias", "one dtype", "bfloat16, torch.float32", "")),
    "bias of another layer": (MODELOPT, QKV[0], put(Q + "bias", lambda b: b[:32]), (Q + "bias", "shape [96]", "shape [32]", "")),
    "parts of two layers": (MODELOPT, ATTENTION + "qkv_proj",
                            lambda t: [put(V + leaf, lambda p, n=n: p[:, :n])(t) for leaf, n in (("weight", 160), ("weight_scale", 20))],
                            (V + "weight", f"K 336 next to {Q}weight", "K 320", "padded")),
    "K of 8": (MODELOPT, QKV[0], put(Q + "weight", lambda p: p[:, :4]), (Q + "weight", "a multiple of the block of 16", "K 8", "")),
    "transposed scales": (COMPRESSED, QKV[0], put(Q + "weight_scale", lambda s: s.T),
                          (Q + "weight_scale", "shape [96, 21]", "[21, 96]", "transposed")),
    "scales of 32": (MODELOPT, OTHERS[0], put(f"{OTHERS[0]}.weight_scale", lambda s: s[:, :3]),
                     (f"{OTHERS[0]}.weight_scale", "96/16 block scales", "96/32", "group_size 32 in the exporter and 16 in config.json")),
    "u8 scales": (MODELOPT, QKV[0], put(Q + "weight_scale", lambda s: s.view(torch.uint8)), (Q + "weight_scale", "F8_E4M3", "U8", "")),
    "fp8 weight": (MODELOPT, QKV[0], put(Q + "weight", lambda w: w.view(torch.float8_e4m3fn)),
                   (Q + "weight", "U8", "F8_E4M3", "FP8 weights")),
    "NaN": (MODELOPT, ATTENTION + "qkv_proj", byte(K + "weight_scale", 0x7F, 5, 2),
            (f"tensor {K}weight_scale, row 5, block 2", "numbers", "1 NaN (byte 0x7F or 0xFF) in 1 rows of 1 part", "overflow")),
    "negative": (COMPRESSED, QKV[0], byte(Q + "weight_scale", 0x81, 3),
                 (f"{Q}weight_scale, row 3, block 0", "not negative", "21 negative in 1 rows", "")),
    "divisor 0": (COMPRESSED, ATTENTION + "qkv_proj", lambda t: t[K + "weight_global_scale"].fill_(0.0),
                  (f"{K}weight_global_scale, part 1", "divisor above 0", "0.0, reciprocal inf; 1 of 3 parts", "0, inf or NaN")),
    "input scale NaN": (MODELOPT, QKV[0], lambda t: t[Q + "input_scale"].fill_(math.nan),
                        (f"{Q}input_scale, part 0", "multiplier", "nan", "a layer that calibration")),
    "bf16 scale_2": (MODELOPT, QKV[0], put(Q + "weight_scale_2", lambda s: s.bfloat16()),
                     (Q + "weight_scale_2", "one F32 number", "BF16", "")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(tmp_path: Path, case: str) -> None:
    """One layer is damaged: that one is refused, in opening the file and in the others it does not matter."""
    kind, name, change, fragments = REFUSED[case]
    t = tensors(kind, bias=True, inputs=True)
    change(t)
    checkpoint = open_checkpoint(save(tmp_path, t, config(kind, inputs=True)))
    assert checkpoint.linear(f"{MLP}gate_up_proj").layer.n == 416
    with pytest.raises(MxdebugError) as error:
        checkpoint.linear(name)
    e = error.value
    for text, fragment in zip((e.operand, e.expected, e.got, e.reason), fragments, strict=True):
        assert fragment in text, str(e)


@BOTH
def test_config_says_32_and_scales_16(tmp_path: Path, kind: str) -> None:
    stated = config(kind) | {"quantization_config": config(kind, group=32)["quantization_config"]}
    with pytest.raises(MxdebugError, match=r"o_proj\.weight_scale: expected 96/32 block scales.*got 96/16.*16 in the exporter and 32 in"):
        read(tmp_path, tensors(kind), stated, OTHERS[0])
    with pytest.raises(MxdebugError, match=r"got 336/16"):  # 32 does not divide 336: the blocks are to blame all the same
        read(tmp_path, tensors(kind), stated, QKV[0])


def test_config_that_contradicts_itself(tmp_path: Path) -> None:
    stated = config(MODELOPT, group=32)
    stated["quantization_config"]["group_size"] = 16
    with pytest.raises(MxdebugError, match="expected group_size 16, which is NVFP4's, got 32"):
        open_checkpoint(save(tmp_path, tensors(MODELOPT, group=32), stated))


def test_neither_experts_nor_linear_layers(tmp_path: Path) -> None:
    bf16 = {"model.layers.0.self_attn.q_proj.weight": torch.zeros(4, 16, dtype=torch.bfloat16)}
    with pytest.raises(MxdebugError, match="tensor names.*no MoE layers and no NVFP4 linear layers"):
        open_checkpoint(save(tmp_path, bf16, config(MODELOPT)))
    with pytest.raises(MxdebugError, match="those of ModelOpt NVFP4, as .* says, got those of compressed-tensors nvfp4.*such as"):
        open_checkpoint(save(tmp_path, tensors(COMPRESSED), config(MODELOPT)))


def test_no_layer_to_read(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_modelopt(tmp_path))
    for read_it in (checkpoint.layer, lambda: checkpoint.layer(0), lambda: checkpoint.experts):
        with pytest.raises(MxdebugError, match=r"MoE layers, got .*linear layers only.*linear\(name\) reads those"):
            read_it()


# -- layers that a kernel's conversion left -----------------------------------------------------------------------

U8, I32, E4M3, F32 = torch.uint8, torch.int32, torch.float8_e4m3fn, torch.float32
N, WIDTH = 192, 384  # 160 and 336, padded to 64
CONVERTED: dict[str, tuple[dict[str, tuple[torch.dtype, tuple[int, ...]]], str]] = {
    "SM100, 6-D": ({"weight": (U8, (N, WIDTH // 2)), "weight_scale": (E4M3, (32, 4, 2, 4, 6, 1))}, "CuTe-DSL W4A16 on SM100/103"),
    "SM100, 6-D bytes": ({"weight": (U8, (N, WIDTH // 2)), "weight_scale": (U8, (32, 4, 2, 4, 6, 1))}, "CuTe-DSL W4A16 on SM100/103"),
    "SM100, 2-D": ({"weight": (U8, (N, WIDTH // 2)), "weight_scale": (E4M3, (256, 24))}, "CuTe-DSL W4A16 on SM100/103"),
    "SM12x": ({"weight": (I32, (WIDTH // 16, 2 * N)), "weight_scale": (U8, (WIDTH // 16, N))}, "CuTe-DSL W4A16 on SM12x"),
    "Marlin": ({"weight": (I32, (WIDTH // 16, 2 * N)), "weight_scale": (E4M3, (WIDTH // 16, N))}, "Marlin"),
    "W4A4": ({"weight": (U8, (N, WIDTH // 2)), "weight_scale": (E4M3, (256, 24)), "alpha": (F32, ())}, "a W4A4 kernel"),
    "mxdebug's own": ({"weight": (U8, (N, WIDTH // 2)), "weight_scale": (U8, (256, 24)), "mxdebug_converted": (U8, (1,))},
                      "converted by mxdebug for FlashInfer CuTe-DSL W4A16 on SM100/103"),
    "mxdebug's mark alone": ({"weight": (U8, (5, 5)), "mxdebug_converted": (U8, (1,))}, "converted by mxdebug for a kernel"),
}
SPELLED = {U8: "U8", I32: "I32", E4M3: "F8_E4M3", F32: "F32"}


def made_converted(case: str, prefix: str) -> Tensors:
    leaves = CONVERTED[case][0] | {"weight_global_scale": (F32, (1,))}
    return {prefix + leaf: torch.zeros(shape, dtype=dtype) for leaf, (dtype, shape) in leaves.items()}


@pytest.mark.parametrize("case", CONVERTED)
@pytest.mark.parametrize("prefix", ["", "model.layers.0.self_attn.qkv_proj."])
def test_a_converted_layer_is_refused(tmp_path: Path, case: str, prefix: str) -> None:
    leaves, words = CONVERTED[case]
    headers = {leaf: (SPELLED[dtype], shape) for leaf, (dtype, shape) in (leaves | {"weight_global_scale": (F32, (1,))}).items()}
    assert words in converted(headers)
    save_file(made_converted(case, prefix) | {"other.weight": torch.zeros(3)}, tmp_path / "state.safetensors")
    for path in (tmp_path, tmp_path / "state.safetensors"):  # no config.json
        with pytest.raises(MxdebugError, match="a layer as checkpoints store it, got a layer converted.*read the checkpoint") as error:
            open_checkpoint(path)
        assert words in error.value.got and (prefix.rstrip(".") or "the layer") in error.value.operand


@BOTH
@pytest.mark.parametrize("case", CONVERTED)
def test_one_converted_layer_among_others(tmp_path: Path, kind: str, case: str) -> None:
    t = {k: v for k, v in tensors(kind).items() if not k.startswith(Q)} | made_converted(case, Q)
    checkpoint = open_checkpoint(save(tmp_path, t, config(kind)))
    assert checkpoint.linear(QKV[1]).layer.n == 32
    for name in (QKV[0], f"{ATTENTION}qkv_proj"):
        with pytest.raises(MxdebugError) as error:
            checkpoint.linear(name)
        assert CONVERTED[case][1] in error.value.got and QKV[0] in error.value.operand


def test_experts_next_to_converted_layers_are_read(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(save(tmp_path, making_nvfp4.tensors(MODELOPT, **SMALL) | made_converted("SM12x", Q),
                                      making_nvfp4.config(MODELOPT, **SMALL)))
    assert checkpoint.layer().layer.experts == 2 and checkpoint.linears == ()
    with pytest.raises(MxdebugError, match="CuTe-DSL W4A16 on SM12x"):
        checkpoint.linear(QKV[0])


@pytest.mark.parametrize("headers", [
    {"weight": ("U8", (160, 168)), "weight_scale": ("F8_E4M3", (160, 21)), "weight_scale_2": ("F32", ())},
    {"weight_packed": ("U8", (256, 192)), "weight_scale": ("F8_E4M3", (256, 24)), "weight_global_scale": ("F32", (1,))},
    {"weight": ("BF16", (160, 336)), "weight_scale": ("F8_E4M3", (160, 21)), "weight_global_scale": ("F32", (1,))},  # saved uncompressed
    {"weight": ("U8", (160, 168)), "weight_scale": ("F8_E4M3", (160, 21)), "weight_global_scale": ("F32", (1,))},  # not tiled
    {"weight": ("I32", (24, 384)), "weight_scale": ("F32", (24, 192)), "weight_global_scale": ("F32", (1,))},
    {"weight": ("I32", (24, 384)), "weight_scale": ("U8", (24, 384)), "weight_global_scale": ("F32", (1,))},
    {"weight": ("U8", (192,)), "weight_scale": ("U8", (256, 24)), "weight_global_scale": ("F32", (1,))},
    {"weight": ("BF16", (4, 4))}, {}])
def test_what_is_not_converted(headers: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    assert converted(headers) is None


def test_a_state_dict_without_config_of_another_kind(tmp_path: Path) -> None:
    """Nothing converted in it: config.json is asked for, as ever."""
    save_file(tensors(MODELOPT), tmp_path / "state.safetensors")
    with pytest.raises(MxdebugError, match="config.json: expected a file, got no such file"):
        open_checkpoint(tmp_path / "state.safetensors")
