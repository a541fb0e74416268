"""The shipped NVFP4 W4A16 checkpoint: the library writes it again, byte for byte; and the whole way from its files to a named fault."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mxdebug import MxdebugError, open_checkpoint, recorded
from mxdebug.contracts import LINEAR_CONTRACTS
from mxdebug.diagnosis import diagnose_run
from mxdebug.faults import LINEAR_FAULTS, LinearSituation
from mxdebug.formats import E4M3_SCALE
from mxdebug.metrics import compare
from mxdebug.recipes.vllm import CT_NVFP4
from mxdebug.recipes.w4a16 import LinearSetup, layout_family, select_linear
from mxdebug.recipes.w4a16.recipe import linear_recipe

ATTENTION, MLP = "model.layers.0.self_attn.", "model.layers.0.mlp."
QKV = f"{ATTENTION}qkv_proj"
# (N, K, and what vLLM pads them to)
SIZES = {f"{MLP}gate_up_proj": (768, 352, 768, 384), QKV: (200, 352, 256, 384),
         f"{MLP}down_proj": (352, 384, 384, 384), f"{ATTENTION}o_proj": (352, 96, 384, 128)}
PARTS = {QKV: tuple(f"{ATTENTION}{p}_proj" for p in "qkv"), f"{MLP}gate_up_proj": (f"{MLP}gate_proj", f"{MLP}up_proj")}
# Needs joined parts with different global scales, or a layout of the other family: cannot strike this layer.
ABSENT = {"sm100": {"global-of-another-part", "scales-not-recoded", "scales-flushed", "scales-recoded-for-marlin"},
          "sm12x": {"global-of-another-part", "scales-view-contiguous"}}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    pytest.importorskip("compressed_tensors", reason="compressed-tensors writes the checkpoint")
    spec = importlib.util.spec_from_file_location("make_w4a16_checkpoint", Path(__file__).parent / "data" / "make_w4a16_checkpoint.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def written(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor], dict[str, Tensor]]:
    """(folder, tensors as stored, weights as the library decompresses them)."""
    folder = tmp_path_factory.mktemp("written")
    return folder, *script.write(folder)


def situation(folder: Path, path: str, name: str = QKV) -> LinearSituation:
    found = open_checkpoint(folder).linear(name)
    x = torch.randn(2, 3, found.layer.k, generator=torch.Generator().manual_seed(1)).bfloat16()
    return LinearSituation.right(linear_recipe(path, found.kind), found.layer, x)


# -- what is shipped ----------------------------------------------------------------------------------------------------


def test_the_library_writes_the_shipped_files_again(written: tuple[Path, dict[str, Tensor], dict[str, Tensor]]) -> None:
    folder, stored, _ = written
    shipped, again = load_file(recorded.W4A16 / "model.safetensors"), load_file(folder / "model.safetensors")
    assert shipped.keys() == again.keys() == stored.keys() and len(shipped) == 7 * 3 + 3
    for name, t in shipped.items():
        assert t.dtype == again[name].dtype == stored[name].dtype and t.shape == again[name].shape == stored[name].shape
        for other in (again[name], stored[name]):
            assert torch.equal(t.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)), name
    texts = [(f / "config.json").read_text() for f in (recorded.W4A16, folder)]
    versions = [json.loads(text)["quantization_config"]["version"] for text in texts]
    assert texts[0] == texts[1].replace(f'"version": "{versions[1]}"', f'"version": "{versions[0]}"')


def test_package_data_is_small() -> None:
    assert {p.name for p in recorded.W4A16.iterdir()} == {"config.json", "model.safetensors"}
    assert sum(p.stat().st_size for p in recorded.W4A16.iterdir()) < 300_000


def test_it_opens() -> None:
    checkpoint = open_checkpoint(recorded.W4A16)
    assert checkpoint.w4a16 and checkpoint.kind == CT_NVFP4 and checkpoint.layers == () and checkpoint.linear_names == tuple(SIZES)
    assert checkpoint.config["quantization_config"]["config_groups"]["group_0"]["input_activations"] is None
    for name, (n, k, padded_n, padded_k) in SIZES.items():
        layer = checkpoint.linear(name).layer
        assert (layer.n, layer.k, *linear_recipe(next(iter(LINEAR_CONTRACTS)), CT_NVFP4).plan(layer).padded) == (n, k, padded_n, padded_k)
        assert checkpoint.linear_shape(name) == (n, k) and len(layer.global_scales.unique()) == 1
        assert (layer.bias is not None) == (name == QKV) and layer.payload.unique().numel() == 256
    assert checkpoint.linear(QKV).layer.rows == (104, 48, 48)


def test_small_scales_are_there() -> None:
    """Subnormal block scales: all of every ninth row of each part, and some of the others. None is 0, as the library makes none."""
    checkpoint = open_checkpoint(recorded.W4A16)
    for name in checkpoint.linears:
        scales = E4M3_SCALE.decode(checkpoint.linear(name).layer.scales)
        small = scales < 2.0**-6
        rows = torch.zeros(len(scales), dtype=torch.bool)
        rows[4::9] = True
        assert torch.equal(small.all(1), rows) and scales.min() > 0
        assert 0.02 < small[~rows].double().mean() < 0.06
        assert scales[:, 0].unique().numel() > 10 and scales[0].unique().numel() > 4
    assert max(E4M3_SCALE.decode(checkpoint.linear(part).layer.scales).max() for part in PARTS[QKV]) == 448


def test_values_are_those_of_the_library(script: ModuleType, written: tuple[Path, dict[str, Tensor], dict[str, Tensor]]) -> None:
    """Its decompression gives bf16, after two roundings in float32 in another order: for this file that makes no difference in any bit."""
    folder, stored, decompressed = written
    made, biases = script.weights()
    checkpoint = open_checkpoint(folder)
    for name in SIZES:
        layer, parts = checkpoint.linear(name).layer, PARTS.get(name, (name,))
        want, original = (torch.cat([t[part] for part in parts]) for t in (decompressed, made))
        c = compare(layer.weight.dequantise(torch.bfloat16), want)
        assert want.dtype == torch.bfloat16 and c.bit_identical, str(c)
        got = layer.weight.dequantise()
        for rows in (slice(None), slice(4, 104, 9)):  # rows of small scales are coarser
            assert (got[rows] - original[rows].float()).norm() < 0.2 * original[rows].float().norm()
        if layer.bias is not None:
            assert torch.equal(layer.bias, torch.cat([biases[part] for part in parts]))
            assert torch.equal(layer.bias, torch.cat([stored[f"{part}.bias"] for part in parts]))


def test_values_are_those_of_the_library_in_float32(script: ModuleType, written: tuple[Path, dict[str, Tensor], dict[str, Tensor]]) -> None:
    from compressed_tensors.compressors.nvfp4 import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize
    from compressed_tensors.quantization.quant_scheme import NVFP4A16

    folder, stored, _ = written
    for name in SIZES:
        want = []
        for part in PARTS.get(name, (name,)):
            payload, scale, divisor = (stored[f"{part}.{leaf}"] for leaf in ("weight_packed", "weight_scale", "weight_global_scale"))
            elements = unpack_fp4_from_uint8(payload, payload.shape[0], 2 * payload.shape[1], dtype=torch.float32)
            want.append(dequantize(elements, scale.float(), args=NVFP4A16["weights"], global_scale=divisor, dtype=torch.float32))
        got = open_checkpoint(folder).linear(name).layer.weight
        assert torch.allclose(got.dequantise(), torch.cat(want), rtol=2.0**-22, atol=0)


# -- the whole way --------------------------------------------------------------------------------------------------------


def test_from_the_files_to_a_right_result(written: tuple[Path, dict[str, Tensor], dict[str, Tensor]]) -> None:
    folder, _, decompressed = written
    selection = select_linear(LinearSetup(100))
    assert selection.runs and selection.path == "nvfp4_w4a16/flashinfer_cutedsl"
    path = f"{selection.path}/{layout_family(100)}"
    for name in SIZES:
        s = situation(folder, path, name)
        d = diagnose_run(s.run(), open_checkpoint(folder).linear(name), s.recipe.contract)
        assert d.verdict == "right" and not d.findings and d.ok, str(d)
        w = torch.cat([decompressed[part] for part in PARTS.get(name, (name,))]).double()  # the library's values, not this project's
        want = s.x.double() @ w.T + (0 if s.layer.bias is None else s.layer.bias.double())
        assert s.run().output.shape == want.shape and compare(s.run().output.double(), want).relative_l2 < 2.0**-8


@pytest.mark.parametrize("path", LINEAR_CONTRACTS)
@pytest.mark.parametrize("id", LINEAR_FAULTS)
def test_faults_are_named(written: tuple[Path, dict[str, Tensor], dict[str, Tensor]], path: str, id: str) -> None:
    folder, s = written[0], situation(written[0], path)
    found = open_checkpoint(folder).linear(QKV)
    try:
        struck = LINEAR_FAULTS[id].inject(s)
    except MxdebugError:
        assert id in ABSENT[path.rpartition("/")[2]]
        return
    assert id not in ABSENT[path.rpartition("/")[2]]
    # Two faults are the file's own: there, what a diagnosis is given is that file, read.
    d = diagnose_run(struck.run(), replace(found, layer=struck.layer, group=struck.layer.format.block), s.recipe.contract)
    assert {f.id for f in d.findings} == {id} and not d.ok, str(d)
    assert d.finding(id).strength == ("consistent" if id == "output-unwritten" else "proved")
    if id == "scales-flushed":
        assert "22 of 200 rows have no others" in d.finding(id).evidence
