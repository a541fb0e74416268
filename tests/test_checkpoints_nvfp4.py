"""NVFP4 checkpoints: both conventions of global scales, other libraries' files and values, and everything that must be refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from making import assert_same_layer
from making_nvfp4 import COMPRESSED, GATED_MODULE, MODELOPT, PLAIN_MODULE, config, save, tensors, write
from torch import Tensor

from mxdebug.checkpoints import COMPRESSED_TENSORS_NVFP4, KINDS, MODELOPT_NVFP4, CheckpointLayer, open_checkpoint
from mxdebug.errors import MxdebugError
from mxdebug.formats import NVFP4
from mxdebug.layouts import GATE_UP

Tensors = dict[str, Tensor]
E = GATED_MODULE + "."
BOTH = pytest.mark.parametrize("kind", [MODELOPT, COMPRESSED])
SMALL: dict[str, Any] = dict(experts=2, hidden=64, intermediate=32)
LEAVES = {MODELOPT: ("weight", "weight_scale", "weight_scale_2", "input_scale"),
          COMPRESSED: ("weight_packed", "weight_scale", "weight_global_scale", "input_global_scale")}


def read(folder: Path, made: Tensors, stated: dict[str, Any], **part: Any) -> CheckpointLayer:
    return open_checkpoint(save(folder, made, stated)).layer(**part)


# -- what a good file reads as ------------------------------------------------------------------------------------


def test_names_of_the_kinds() -> None:
    """Recipes find their checkpoints by these strings."""
    assert (MODELOPT_NVFP4, COMPRESSED_TENSORS_NVFP4) == ("ModelOpt NVFP4", "compressed-tensors nvfp4-pack-quantized") == KINDS[2:]


@BOTH
def test_layer(tmp_path: Path, kind: str) -> None:
    checkpoint = open_checkpoint(write(tmp_path, kind))
    assert (checkpoint.kind, checkpoint.layers, checkpoint.experts) == (kind, (0,), 4)
    found, t = checkpoint.layer(), tensors(kind)
    m = found.layer
    assert (found.kind, found.rows, m.activation.kind, m.gate_bias, m.up_bias, m.down_bias) == (kind, GATE_UP, "silu", None, None, None)
    assert found.provenance["activation"] == "config.json hidden_act silu"
    assert (m.gate.shape, m.up.shape, m.down.shape) == ((4, 192, 320), (4, 192, 320), (4, 320, 192))
    payload, scale, global_scale, input_scale = LEAVES[kind]

    def multiplier(e: int, word: str, leaf: str) -> Tensor:
        stored = t[f"{E}{e}.{word}.{leaf}"].reshape(())
        return stored if kind == MODELOPT else 1.0 / stored

    for word, w in (("gate_proj", m.gate), ("up_proj", m.up), ("down_proj", m.down)):
        assert w.format is NVFP4 and w.scales.dtype == torch.uint8 and w.payload.is_contiguous()
        assert (w.global_scale.dtype, w.global_scale.shape) == (torch.float32, (4,))
        for e in range(4):
            assert torch.equal(w.payload[e], t[f"{E}{e}.{word}.{payload}"])
            assert torch.equal(w.scales[e], t[f"{E}{e}.{word}.{scale}"].view(torch.uint8))
            assert torch.equal(w.global_scale[e], multiplier(e, word, global_scale))
    for e in range(4):
        assert m.w13_input_scale[e] == max(multiplier(e, "gate_proj", input_scale), multiplier(e, "up_proj", input_scale))
        assert m.w2_input_scale[e] == multiplier(e, "down_proj", input_scale)
    assert m.w13_input_scale.dtype == m.w2_input_scale.dtype == torch.float32 and len(m.w13_input_scale.unique()) == 4
    assert found.names == {
        "w13": f"{E}*.{{gate_proj,up_proj}}.{payload}", "w13_scale": f"{E}*.{{gate_proj,up_proj}}.weight_scale",
        "w13_global_scale": f"{E}*.{{gate_proj,up_proj}}.{global_scale}", "w13_input_scale": f"{E}*.{{gate_proj,up_proj}}.{input_scale}",
        "w2": f"{E}*.down_proj.{payload}", "w2_scale": f"{E}*.down_proj.weight_scale",
        "w2_global_scale": f"{E}*.down_proj.{global_scale}", "w2_input_scale": f"{E}*.down_proj.{input_scale}"}


@pytest.mark.parametrize("change", [{}, {"gated": False}, {"biases": True}, {"inputs": False}, {"differ": False}, {"seed": 1}])
def test_both_kinds_store_the_same_layer(tmp_path: Path, change: dict[str, Any]) -> None:
    a, b = (open_checkpoint(write(tmp_path / kind, kind, **SMALL, **change)).layer().layer for kind in (MODELOPT, COMPRESSED))
    assert_same_layer(a, b)
    for name in ("w13_input_scale", "w2_input_scale"):
        x, y = getattr(a, name), getattr(b, name)
        assert (x is None and y is None) if change.get("inputs") is False else torch.equal(x, y)
    if change.get("gated", True):
        assert torch.equal(a.gate.global_scale, a.up.global_scale) == (change.get("differ") is False)


def test_divisors_are_inverted_in_float32(tmp_path: Path) -> None:
    """1 / 3 in float32 is 11184811 / 2^25 (0.333333343...), in float64 another number; 1 / 2688 likewise is 12782641 / 2^35.

    w13's input scale is the larger multiplier, so the smaller divisor: 1 / 2 and not 1 / 8.
    """
    t = tensors(COMPRESSED, **SMALL)
    t[E + "0.gate_proj.weight_global_scale"].fill_(3.0)
    t[E + "1.down_proj.weight_global_scale"].fill_(2688.0)
    t[E + "0.gate_proj.input_global_scale"].fill_(2.0)
    t[E + "0.up_proj.input_global_scale"].fill_(8.0)
    t[E + "1.gate_proj.input_global_scale"].fill_(16.0)
    t[E + "1.up_proj.input_global_scale"].fill_(4.0)
    m = read(tmp_path, t, config(COMPRESSED, **SMALL)).layer
    assert float(m.gate.global_scale[0]) == 11184811 / 2**25 and float(m.down.global_scale[1]) == 12782641 / 2**35
    assert m.w13_input_scale.tolist() == [0.5, 0.25]


@BOTH
def test_value_by_hand(tmp_path: Path, kind: str) -> None:
    """Byte 0x72: the low nibble is 1.0 (code 2) and stands first, the high one 6.0 (code 7). E4M3 0x3C is 1.5, global scale 1 / 4.

    So 1.0 * 1.5 / 4 = 0.375 and 6.0 * 1.5 / 4 = 2.25; block 1, under 0x80 (-0), is zero.
    """
    t = tensors(kind, **SMALL)
    payload, scale, global_scale, _ = (f"{E}1.up_proj.{leaf}" for leaf in LEAVES[kind])
    t[payload].fill_(0x72)
    t[scale] = torch.full((32, 4), 0x3C, dtype=torch.uint8)
    t[scale][:, 1] = 0x80
    t[scale] = t[scale].view(torch.float8_e4m3fn)
    t[global_scale].fill_(0.25 if kind == MODELOPT else 4.0)
    values = read(tmp_path, t, config(kind, **SMALL)).layer.up[1].dequantise()
    assert values[5, :4].tolist() == [0.375, 2.25, 0.375, 2.25] and (values[:, 16:32] == 0).all() and (values[:, 32:] != 0).all()


@BOTH
def test_layer_without_gate(tmp_path: Path, kind: str) -> None:
    """Nemotron: up and down alone, relu2; w13 is up."""
    found = open_checkpoint(write(tmp_path, kind, gated=False, biases=True, **SMALL)).layer()
    m, t = found.layer, tensors(kind, gated=False, biases=True, **SMALL)
    assert m.gate is None and m.gate_bias is None and m.activation.kind == "relu2" and found.index == 1
    scale = t[f"{PLAIN_MODULE}.1.up_proj.{LEAVES[kind][3]}"].reshape(())
    assert m.w13_input_scale[1] == (scale if kind == MODELOPT else 1.0 / scale)
    assert found.names["w13_input_scale"] == f"{PLAIN_MODULE}.*.up_proj.{LEAVES[kind][3]}"
    assert found.provenance["activation"] == "config.json mlp_hidden_act relu2"


@BOTH
def test_biases_and_a_part_of_the_experts(tmp_path: Path, kind: str) -> None:
    checkpoint = open_checkpoint(write(tmp_path, kind, biases=True, experts=4, hidden=64, intermediate=32))
    whole, part = checkpoint.layer().layer, checkpoint.layer(experts=slice(1, 3)).layer
    assert_same_layer(part, whole.take(slice(1, 3)))
    assert torch.equal(part.w13_input_scale, whole.w13_input_scale[1:3]) and torch.equal(part.w2_input_scale, whole.w2_input_scale[1:3])
    t = tensors(kind, biases=True, experts=4, hidden=64, intermediate=32)
    assert torch.equal(part.gate_bias[0], t[E + "1.gate_proj.bias"]) and part.down_bias.dtype == torch.bfloat16


@BOTH
def test_weights_only(tmp_path: Path, kind: str) -> None:
    found = open_checkpoint(write(tmp_path, kind, inputs=False, **SMALL)).layer()
    assert found.layer.w13_input_scale is None and found.layer.w2_input_scale is None
    assert "w13_global_scale" in found.names and not any("input" in key for key in found.names)


@BOTH
def test_scalars_of_either_shape_and_short_names(tmp_path: Path, kind: str) -> None:
    """[] and [1] are one number each (vLLM loads both); w1, w3, w2 are gate_proj, up_proj, down_proj."""
    t = tensors(kind, **SMALL)
    other = {k: v.reshape([1] if v.dim() == 0 else []) if v.numel() == 1 else v for k, v in t.items()}
    for long, short in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
        other = {k.replace(long, short): v for k, v in other.items()}
    a, b = (read(tmp_path / n, x, config(kind, **SMALL)) for n, x in (("a", t), ("b", other)))
    assert_same_layer(a.layer, b.layer)
    assert torch.equal(a.layer.w13_input_scale, b.layer.w13_input_scale) and b.names["w13"] == f"{E}*.{{w1,w3}}.{LEAVES[kind][0]}"


@BOTH
def test_layers_that_are_not_quantised_are_left_out(tmp_path: Path, kind: str) -> None:
    t = tensors(kind, **SMALL)
    bf16 = torch.zeros(32, 64, dtype=torch.bfloat16)
    others = {"model.layers.3.mlp.experts.0.up_proj.weight": bf16, "model.layers.3.mlp.experts.0.up_proj.bias": bf16,
              "model.layers.5.mlp.experts.0.up_proj.weight": bf16, "model.layers.5.mlp.experts.0.up_proj.weight_scale_inv": bf16,  # FP8
              "model.layers.4.mlp.experts.gate_up_proj": bf16, "model.layers.4.mlp.experts.down_proj": bf16,
              "model.layers.0.mlp.shared_experts.up_proj.weight": bf16, "model.layers.1.mlp.up_proj.weight_scale": bf16}
    second = {k.replace("layers.0", "layers.2"): v.clone() for k, v in t.items()}
    checkpoint = open_checkpoint(save(tmp_path, t | others | second, config(kind, **SMALL)))
    assert checkpoint.layers == (0, 2)
    assert_same_layer(checkpoint.layer(0).layer, checkpoint.layer(2).layer)


# -- values by other libraries ------------------------------------------------------------------------------------


@pytest.mark.parametrize("global_scale, exact", [(2.0**-7, True), (None, False)])
def test_against_torchao(tmp_path: Path, global_scale: float | None, exact: bool) -> None:
    """torchao quantises and reads back; its codes and scales are the file's.

    It multiplies block scale and global scale first. With a global scale that is no power of two that rounds twice, mxdebug's
    order once: three half ulps of float32, 3 * 2^-24, may lie between them.
    """
    nvfp4 = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    g = torch.Generator().manual_seed(3)
    t, want = tensors(MODELOPT, **SMALL), {}
    for e in range(2):
        for word, shape in (("gate_proj", (32, 64)), ("up_proj", (32, 64)), ("down_proj", (64, 32))):
            x = torch.randn(shape, generator=g) * torch.exp2(torch.randint(-3, 4, (shape[0], 1), generator=g).float())
            scale = x.abs().amax() / 2688 if global_scale is None else torch.tensor(global_scale)
            q = nvfp4.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=scale)
            name = f"{E}{e}.{word}."
            t |= {name + "weight": q.qdata, name + "weight_scale": q.scale, name + "weight_scale_2": scale}
            want[e, word] = q.dequantize(torch.float32)
    m = read(tmp_path, t, config(MODELOPT, **SMALL)).layer
    for (e, word), v in want.items():
        got = {"gate_proj": m.gate, "up_proj": m.up, "down_proj": m.down}[word][e].dequantise()
        assert v.abs().max() > 1 and torch.equal(got, v) if exact else torch.allclose(got, v, rtol=3 * 2.0**-24, atol=0), (e, word)


def test_against_compressed_tensors(tmp_path: Path) -> None:
    """A file written by compressed-tensors' own compressor, read back by its own functions.

    It divides the block scale by the divisor first, then multiplies: two roundings. mxdebug inverts the divisor and multiplies: two
    as well. So four half ulps of float32, 2^-22, may lie between them.
    """
    pytest.importorskip("compressed_tensors")
    from compressed_tensors.compressors.nvfp4 import NVFP4PackedCompressor, unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.quant_scheme import NVFP4 as SCHEME
    from compressed_tensors.quantization.utils.helpers import calculate_qparams, generate_gparam

    scheme = QuantizationScheme(targets=["Linear"], **SCHEME)
    g, t, want = torch.Generator().manual_seed(4), {}, {}
    for e in range(2):
        for word, shape in (("gate_proj", (32, 64)), ("up_proj", (32, 64)), ("down_proj", (64, 32))):
            x = torch.randn(shape, generator=g)
            blocks, divisor = x.unflatten(-1, (-1, 16)), generate_gparam(x.min().reshape(1), x.max().reshape(1))
            scale, _ = calculate_qparams(blocks.amin(-1), blocks.amax(-1), scheme.weights, global_scale=divisor)
            made = NVFP4PackedCompressor.compress({"weight": x, "weight_scale": scale, "weight_global_scale": divisor}, scheme)
            t |= {f"{E}{e}.{word}.{leaf}": v for leaf, v in made.items()} | {f"{E}{e}.{word}.input_global_scale": divisor}
            elements = unpack_fp4_from_uint8(made["weight_packed"], *shape, dtype=torch.float32)
            scale = made["weight_scale"].float()
            want[e, word] = elements, dequantize(elements, scale, args=scheme.weights, global_scale=divisor, dtype=torch.float32)
    m = read(tmp_path, t, config(COMPRESSED, **SMALL)).layer
    for (e, word), (elements, values) in want.items():
        w = {"gate_proj": m.gate, "up_proj": m.up, "down_proj": m.down}[word][e]
        assert values.abs().max() > 1 and torch.equal(w.elements(), elements)
        assert torch.allclose(w.dequantise(), values, rtol=2.0**-22, atol=0)


# -- quantisation that is stated ----------------------------------------------------------------------------------


def quantised(**change: Any) -> dict[str, Any]:
    return {k: v for k, v in (config(MODELOPT, **SMALL)["quantization_config"] | change).items() if v is not ...}


HF = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16,
                                                         "exclude_modules": ["lm_head"]}}


@pytest.mark.parametrize("inside, beside", [
    (quantised(quant_method="modelopt_fp4"), None), (quantised(quant_algo="nvfp4"), None), (quantised(quant_algo="W4A16_NVFP4"), None),
    (quantised(config_groups=...), None), ({"quant_method": "modelopt"} | HF, None), (None, HF), (quantised(), HF),
    (None, {"quant_algo": "NVFP4"})])
def test_modelopt_is_stated(tmp_path: Path, inside: dict[str, Any] | None, beside: dict[str, Any] | None) -> None:
    stated = config(MODELOPT, **SMALL)
    stated.pop("quantization_config")
    folder = save(tmp_path, tensors(MODELOPT, **SMALL), stated if inside is None else stated | {"quantization_config": inside})
    if beside is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    assert open_checkpoint(folder).kind == MODELOPT
    assert open_checkpoint(folder / "model.safetensors").layer().kind == MODELOPT


def algo(name: Any) -> dict[str, Any]:
    return {"quantization": {"quant_algo": name}}


@pytest.mark.parametrize("inside, beside, match", [
    (None, None, "quantization_config of .*got none"),
    (quantised(quant_algo="FP8"), None, "got ModelOpt's quant_algo 'FP8'"),
    (quantised(quant_algo="NVFP4_AWQ"), None, "quant_algo 'NVFP4_AWQ'"),
    (quantised(quant_algo="MIXED_PRECISION"), None, "'MIXED_PRECISION'.*one format a layer"),
    (quantised(quant_algo=...), None, "quant_algo None"),
    (quantised(quant_algo=["NVFP4"]), None, r"quant_algo \['NVFP4'\]"),
    (quantised(quantization=3), None, "expected an object, got int 3"),
    (quantised(group_size=32), None, "group_size of .*expected 16, which is NVFP4's, got 32"),
    (quantised(config_groups={"g": {"weights": {"group_size": 32}}}), None, "expected group_size 16, which is NVFP4's, got 32.*MXFP4"),
    (quantised(config_groups={"g": {"weights": {"num_bits": 8}}}), None, "expected num_bits 4"),
    (quantised(config_groups=3), None, "expected objects with weights"),
    (None, algo("FP8"), "hf_quant_config.json: .*quant_algo 'FP8'"),
    (None, {"quantization": []}, "expected an object, got list"),
    (quantised(), algo("FP8"), "hf_quant_config.json: .*quant_algo 'FP8'"),
    ({"quant_method": "mxfp4"}, algo("NVFP4"), "expected ModelOpt NVFP4, as hf_quant_config.json says, got gpt-oss"),
    ({"quant_method": "mxfp4"}, None, "expected no global scale next to gpt-oss"),
    ({"quant_method": "compressed-tensors", "format": "mixed-precision"}, None, "format 'mixed-precision'"),
    ({"quant_method": "compressed-tensors", "format": ["nvfp4-pack-quantized"]}, None, r"format \['nvfp4-pack-quantized'\]"),
    ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, None,
     "expected those of compressed-tensors nvfp4.*got those of ModelOpt NVFP4")])
def test_stated_kind_is_refused(tmp_path: Path, inside: Any, beside: Any, match: str) -> None:
    folder = save(tmp_path, tensors(MODELOPT, **SMALL), config(MODELOPT, **SMALL) | {"quantization_config": inside})
    if beside is not None:
        (folder / "hf_quant_config.json").write_text(json.dumps(beside))
    with pytest.raises(MxdebugError, match=match):
        open_checkpoint(folder)


# -- tensors that must be refused ---------------------------------------------------------------------------------

Change = Callable[[Tensors], Any]


def put(name: str, make: Callable[[Tensor], Tensor]) -> Change:
    return lambda t: t.__setitem__(E + name, make(t[E + name]))


def fill(name: str, value: float) -> Change:
    return lambda t: t[E + name].fill_(value)


def drop(*endings: str) -> Change:
    return lambda t: [t.pop(k) for k in list(t) if k.endswith(endings)]


def byte(name: str, value: int, *at: int) -> Change:
    def change(t: Tensors) -> None:
        t[E + name].view(torch.uint8)[at] = value
    return change


def rename(before: str, after: str) -> Change:
    return lambda t: [t.__setitem__(k.replace(before, after), t.pop(k)) for k in list(t) if before in k]


def fused(t: Tensors) -> None:
    """As ModelOpt writes gpt-oss: experts.gate_up_proj, experts.gate_up_proj_weight_scale, ..._weight_scale_2, ..._bias."""
    t.clear()
    for p in ("gate_up_proj", "down_proj"):
        t |= {f"{E}{p}": torch.zeros(2, 32, 32, dtype=torch.uint8), f"{E}{p}_weight_scale": torch.zeros(2, 4, 64).to(torch.float8_e4m3fn),
              f"{E}{p}_weight_scale_2": torch.ones(()), f"{E}{p}_input_scale": torch.ones(()), f"{E}{p}_bias": torch.zeros(2, 64)}


M, C = MODELOPT, COMPRESSED
BYTE = torch.zeros(1, dtype=torch.uint8)
UNREACHED = "calibration never reached"
REFUSED: dict[str, tuple[str, Change, tuple[str, str, str, str]]] = {
    # case: (checkpoint, change, fragments of operand, expected, got, reason)
    "input divisor 0": (C, fill("1.down_proj.input_global_scale", 0.0),
                        (E + "1.down_proj.input_global_scale, expert 1", "divisor above 0", "0.0, reciprocal inf; 1 of 2", UNREACHED)),
    "input divisor inf": (C, fill("0.gate_proj.input_global_scale", math.inf),
                          ("0.gate_proj.input_global_scale", "", "inf, reciprocal 0.0", UNREACHED)),
    "input scale 0": (M, fill("1.up_proj.input_scale", 0.0), ("1.up_proj.input_scale, expert 1", "multiplier above 0", "0.0", UNREACHED)),
    "input scale NaN": (M, fill("1.up_proj.input_scale", math.nan), ("1.up_proj.input_scale", "finite multiplier", "nan", UNREACHED)),
    "input scale negative": (M, fill("0.down_proj.input_scale", -0.5), ("0.down_proj.input_scale, expert 0", "above 0", "-0.5", "")),
    "divisor 0": (C, fill("1.up_proj.weight_global_scale", 0.0),
                  ("1.up_proj.weight_global_scale, expert 1", "divisor", "0.0, reciprocal inf", "0, inf")),
    "divisor -0": (C, fill("1.up_proj.weight_global_scale", -0.0),
                   ("1.up_proj.weight_global_scale", "above 0", "-0.0, reciprocal -inf", "")),
    "divisor negative": (C, fill("0.up_proj.weight_global_scale", -3.0), ("0.up_proj.weight_global_scale", "above 0", "-3.0", "")),
    "divisor NaN": (C, fill("0.up_proj.weight_global_scale", math.nan), ("0.up_proj.weight_global_scale", "finite", "nan", "NaN")),
    "divisor without reciprocal": (C, fill("0.up_proj.weight_global_scale", 1e-39),
                                   ("0.up_proj.weight_global_scale", "reciprocal is finite", "inf", "")),
    "scale_2 0": (M, fill("1.gate_proj.weight_scale_2", 0.0),
                  ("1.gate_proj.weight_scale_2, expert 1", "multiplier above 0", "0.0", "0, inf or NaN")),
    "scale_2 inf": (M, fill("1.gate_proj.weight_scale_2", math.inf), ("1.gate_proj.weight_scale_2", "finite", "inf, reciprocal 0.0", "")),
    "bf16 global scale": (C, put("0.up_proj.weight_global_scale", lambda s: s.bfloat16()),
                          ("0.up_proj.weight_global_scale", "one F32 number", "BF16 of shape [1]", "")),
    "f64 input scale": (M, put("0.up_proj.input_scale", lambda s: s.double()), ("0.up_proj.input_scale", "F32", "F64 of shape []", "")),
    "global scale a row": (M, put("1.up_proj.weight_scale_2", lambda s: s.expand(32)),
                           ("1.up_proj.weight_scale_2", "shape [] or [1]", "F32 of shape [32]", "")),
    "NaN block scale": (M, byte("1.down_proj.weight_scale", 0x7F, 5, 1),
                        (E + "1.down_proj.weight_scale, expert 1, row 5, block 1", "scales that are numbers",
                         "1 NaN (byte 0x7F or 0xFF) in 1 rows", "overflow")),
    "-NaN block scale": (C, byte("0.down_proj.weight_scale", 0xFF, 7),
                         ("0.down_proj.weight_scale, expert 0, row 7, block 0", "", "2 NaN", "")),
    "negative block scale": (C, byte("0.up_proj.weight_scale", 0x81, 3, 2),
                             ("0.up_proj.weight_scale, expert 0, row 3, block 2", "not negative", "1 negative in 1 rows", "another")),
    "most negative block scale": (M, byte("0.up_proj.weight_scale", 0xFE, 0),
                                  ("0.up_proj.weight_scale", "not negative", "4 negative in 1 rows", "")),
    "u8 block scales": (M, put("0.up_proj.weight_scale", lambda s: s.view(torch.uint8)),
                        ("0.up_proj.weight_scale", "dtype F8_E4M3", "U8", "MXFP4")),
    "e8m0 block scales": (C, put("0.up_proj.weight_scale", lambda s: s.view(torch.float8_e8m0fnu)),
                          ("0.up_proj.weight_scale", "F8_E4M3", "F8_E8M0", "MXFP4")),
    "f32 block scales": (C, put("0.up_proj.weight_scale", lambda s: s.float()), ("0.up_proj.weight_scale", "F8_E4M3", "F32", "")),
    "bf16 weight": (M, put("1.up_proj.weight", lambda p: p.bfloat16()), ("1.up_proj.weight", "U8", "BF16", "not quantised")),
    "fp8 weight": (M, put("1.up_proj.weight", lambda p: p.view(torch.float8_e4m3fn)), ("1.up_proj.weight", "U8", "F8_E4M3", "FP8 weights")),
    "blocks of 32": (M, put("0.up_proj.weight_scale", lambda s: s[:, :2]),
                     ("0.up_proj.weight_scale", "shape [32, 4]", "shape [32, 2]", "another block size")),
    "transposed scales": (C, put("0.up_proj.weight_scale", lambda s: s.T),
                          ("0.up_proj.weight_scale", "shape [32, 4]", "shape [4, 32]", "transposed")),
    "K of 8": (M, put("0.up_proj.weight", lambda p: p[:, :4]), ("0.up_proj.weight", "a multiple of the block of 16", "K 8", "")),
    "experts of two shapes": (M, put("1.up_proj.weight", lambda p: p[:16]), ("1.up_proj.weight", "shape [32, 32]", "shape [16, 32]", "")),
    "down unlike up": (M, lambda t: [put(f"{e}.down_proj.{leaf}", lambda p: p[:32])(t) for e in (0, 1) for leaf in LEAVES[M][:2]],
                       (E + "*.down_proj.weight", "[64, 32]", "[32, 32]", "two layers")),
    "some input scales": (M, drop("1.up_proj.input_scale"),
                          (E + "1.up_proj.input_scale", "each expert 0..1", "none for expert 1; 1 of 2 missing", UNREACHED)),
    "no input scale of down": (C, drop("down_proj.input_global_scale"),
                               ("0.down_proj.input_global_scale", "", "2 of 2 missing", "vLLM issue 45212")),
    "no global scale of down": (M, drop("down_proj.weight_scale_2"),
                                ("0.down_proj.weight_scale_2", "each expert", "2 of 2 missing", "incomplete")),
    "no block scales of down": (C, drop("down_proj.weight_scale"),
                                ("0.down_proj.weight_scale", "each expert", "2 of 2 missing", "incomplete")),
    "no scale_2 at all": (M, drop("weight_scale_2"), ("weight_scale_2", "each expert", "2 of 2 missing", "")),
    "only input scales left": (M, drop("weight_scale_2", "weight_scale"), ("weight_scale", "each expert", "2 of 2 missing", "")),
    "no divisors at all": (C, drop("weight_global_scale"),
                           ("tensor names", "nvfp4-pack", "those of compressed-tensors mxfp4", "two checkpoints")),
    "only input divisors left": (C, drop("weight_global_scale", "weight_scale", "weight_packed"),
                                 ("weight_packed", "each expert", "2 of 2 missing", "")),
    "last expert missing": (M, lambda t: [t.pop(k) for k in list(t) if ".1." in k],
                            (GATED_MODULE, "2 experts, as config.json num_experts says", "1", "")),
    "both kinds in a layer": (M, lambda t: t.__setitem__(E + "0.up_proj.weight_global_scale", BYTE),
                              (GATED_MODULE, "one kind", "both", "two checkpoints")),
    "both kinds": (M, lambda t: t.update({k.replace("layers.0", "layers.1"): v for k, v in tensors(C, **SMALL).items()}),
                   ("tensor names", "one kind", " and ", "")),
    "a leaf of the other kind": (M, lambda t: t.__setitem__(E + "0.up_proj.input_global_scale", BYTE),
                                 ("input_global_scale", "known meaning", "not known", "")),
    "weight next to weight_packed": (C, lambda t: t.__setitem__(E + "0.up_proj.weight", BYTE),
                                     ("0.up_proj.weight", "next to those of compressed-tensors nvfp4", "", "")),
    "AWQ": (M, lambda t: t.__setitem__(E + "0.up_proj.pre_quant_scale", BYTE), ("pre_quant_scale", "known meaning", "not known", "")),
    "kind of the config alone": (M, lambda t: [t.clear(), t.update(tensors(C, **SMALL))],
                                 ("tensor names", "those of ModelOpt NVFP4", "those of compressed-tensors nvfp4", "two checkpoints")),
    "fused": (M, fused, (E + "down_proj_input_scale", "one tensor an expert and projection", "another name", "not read yet")),
    "fused next to single": (M, lambda t: t.__setitem__(E + "gate_up_proj_weight_scale_2", torch.ones(())),
                             ("gate_up_proj_weight_scale_2", "known meaning", "", "")),
    "expert number last": (M, lambda t: [rename(f".{e}.{w}_proj.", f".{w}_proj.{e}.")(t) for e in (0, 1) for w in ("gate", "up", "down")],
                           ("_proj.", "one tensor an expert and projection", "another name", "")),
    "only experts without scales": (M, drop("scale", "scale_2"), ("tensor names", "weight_scale_2", "weight", "another format")),
    "mixed spelling": (M, rename("0.gate_proj.weight_scale_2", "0.w1.weight_scale_2"),
                       (GATED_MODULE, "one spelling", "gate_proj", "two exports")),
    "no scale_2 of two": (M, drop("down_proj.weight_scale_2", "up_proj.weight_scale_2"),
                                     ("up_proj.weight_scale_2", "each expert", "", "")),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_tensors(tmp_path: Path, case: str) -> None:
    kind, change, fragments = REFUSED[case]
    t = tensors(kind, **SMALL)
    assert read(tmp_path / "good", t, config(kind, **SMALL)).layer.experts == 2  # so that the change is to blame
    change(t)
    with pytest.raises(MxdebugError) as error:
        read(tmp_path / "bad", t, config(kind, **SMALL))
    e = error.value
    for text, fragment in zip((e.operand, e.expected, e.got, e.reason), fragments, strict=True):
        assert fragment in text, str(e)


def test_gate_of_a_model_without_gate(tmp_path: Path) -> None:
    stated = config(MODELOPT, **SMALL) | {"hidden_act": "relu2"}
    with pytest.raises(MxdebugError, match=r"\*\.gate_proj\..*: expected no gate tensors"):
        read(tmp_path, tensors(MODELOPT, **SMALL), stated)


def test_what_is_wrong_in_other_experts_does_not_matter(tmp_path: Path) -> None:
    t = tensors(COMPRESSED, **SMALL)
    t[E + "1.up_proj.input_global_scale"].fill_(0.0)
    checkpoint = open_checkpoint(save(tmp_path, t, config(COMPRESSED, **SMALL)))
    assert checkpoint.layer(experts=slice(0, 1)).layer.experts == 1
    with pytest.raises(MxdebugError, match=r"1\.up_proj\.input_global_scale, expert 1: .*1 of 1 experts"):
        checkpoint.layer(experts=slice(1, 2))
    t[E + "1.up_proj.weight_scale"].view(torch.uint8)[0] = 0x7F
    with pytest.raises(MxdebugError, match="expert 1, row 0, block 0"):
        open_checkpoint(save(tmp_path, t, config(COMPRESSED, **SMALL))).layer(experts=slice(1, 2))
