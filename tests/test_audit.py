"""Does the audit call right converters right, and name what is wrong with wrong ones? Converters of our own; the real vLLM where it is.

The real vLLM runs where it is installed, or from a folder of its sources: MXDEBUG_VLLM=FOLDER, where FOLDER/vllm/... are the files. Then
what those files import besides is stubbed (data/vllm_sources.py), so that vLLM's dependencies are not needed.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from mxdebug.audit import assert_keeps_contract, audit, audit_vllm, engines, loaded, made_layer, replaced, report, standins
from mxdebug.errors import MxdebugError
from mxdebug.faults import FAULTS, OPERAND_FAULTS, SCALAR_FAULTS
from mxdebug.layouts import INTERLEAVED
from mxdebug.recipes import RECIPES, Recipe, recipe
from mxdebug.reference import MoELayer

flashinfer = pytest.importorskip("flashinfer")
SM90, TRTLLM_NVFP4 = "mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16", "nvfp4/FLASHINFER_TRTLLM"
GPT_OSS, COMPRESSED, MODELOPT, DIVISORS = (
    "gpt-oss",
    "compressed-tensors mxfp4-pack-quantized",
    "ModelOpt NVFP4",
    "compressed-tensors nvfp4-pack-quantized",
)
ALL = [pytest.param(r, id=f"{r.path} {r.checkpoint.split(' ')[0]}") for r in RECIPES]
ONE_A_PATH = [p for p in ALL if p.values[0].checkpoint in (GPT_OSS, MODELOPT)]
Operands = Mapping[str, "Tensor | None"]


def ours(r: Recipe, layer: MoELayer, **edits: Mapping[str, object]) -> Operands:
    """What mxdebug's recipe makes of a layer, with slots of some operands' forms filled otherwise."""
    plan = r.plan(layer)
    for key, slots in edits.items():
        plan = plan.edit(key, **slots)
    return plan.convert(layer)


def made(r: Recipe, layer: MoELayer, **edits: Mapping[str, object]) -> dict[str, Tensor | None]:
    return {k: t for k, t in ours(r, layer, **edits).items() if k not in ("x_gscale", "w13_global", "w2_global")}


@pytest.fixture
def cpu() -> Iterator[None]:
    """One `replaced` around a test's many audits, which saves looking through all modules for each."""
    with replaced():
        yield


# -- converters of our own, written like an engine's ----------------------------------------------------------------


def sm90(t: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """gpt-oss for SM90: de-interleave, up first, weave and fold."""
    from flashinfer.fused_moe import interleave_moe_scales_for_sm90_mixed_gemm as fold
    from flashinfer.fused_moe import interleave_moe_weights_for_sm90_mixed_gemm as weave

    up_gate = {k: torch.cat([t[k][:, 1::2], t[k][:, 0::2]], 1).cuda() for k in ("w13", "w13_scale", "w13_bias")}
    return {
        "w13": weave(up_gate["w13"], "fp4"),
        "w13_scale": fold(up_gate["w13_scale"]),
        "w13_bias": up_gate["w13_bias"],
        "w2": weave(t["w2"], "fp4"),
        "w2_scale": fold(t["w2_scale"]),
        "w2_bias": t["w2_bias"],
    }


def trtllm_nvfp4(t: dict[str, Tensor]) -> dict[str, Tensor | None]:
    """ModelOpt for TRT-LLM: pad, alternate up and gate, shuffle, swizzle, fold the scales. FlashInfer's own index functions."""
    from flashinfer import nvfp4_block_scale_interleave
    from flashinfer.fused_moe.core import get_w2_permute_indices_with_cache

    e, i, h = t["w13"].shape[0], t["w13"].shape[1] // 2, t["w2"].shape[1]
    pi, ph = -(-i // 64) * 64, -(-h // 256) * 256
    out: dict[str, Tensor | None] = {}
    for key, per in (("w13", 2), ("w13_scale", 16), ("w2", 2), ("w2_scale", 16)):
        x, k = t[key].view(torch.uint8), pi if key.startswith("w2") else ph
        if key.startswith("w13"):
            gate, up = (torch.nn.functional.pad(half, (0, k // per - x.shape[2], 0, pi - i)) for half in x.chunk(2, 1))
            x = torch.stack([up, gate], 2).flatten(1, 2)
        else:
            x = torch.nn.functional.pad(x, (0, k // per - x.shape[2], 0, ph - h))
        rows = get_w2_permute_indices_with_cache({}, x[0], 128, num_elts_per_sf=16 if per == 16 else None)
        x = x[:, rows]
        out[key] = nvfp4_block_scale_interleave(x).view(torch.float8_e4m3fn) if per == 16 else x
    a13, a2 = t["w13_input_scale"].max(), t["w2_input_scale"].max()
    alpha13, alpha2 = t["w13_scale_2"][:, 0] * a13, t["w2_scale_2"] * a2
    return {**out, "w13_alpha": alpha13, "w2_alpha": alpha2, "a2_gscale": (1 / a2).repeat(e), "g1_scale_c": alpha13 / a2}


def test_right_converters_are_right() -> None:
    assert_keeps_contract(sm90, SM90)
    assert_keeps_contract(trtllm_nvfp4, TRTLLM_NVFP4, checkpoint=MODELOPT)
    found = audit(trtllm_nvfp4, TRTLLM_NVFP4)
    assert [v.operand for v in found.verdicts] == ["w13", "w13_scale", "w2", "w2_scale", "g1_scale_c", "w13_alpha", "w2_alpha"]
    assert found.outcome == "right" and found.checkpoint == MODELOPT and found.open == () and found.faults == {}


def test_a_forgotten_fold_is_named_with_its_operand() -> None:
    def forgets(t: dict[str, Tensor]) -> Operands:
        return {**sm90(t), "w13_scale": torch.cat([t["w13_scale"][:, 1::2], t["w13_scale"][:, 0::2]], 1)}

    with pytest.raises(AssertionError) as error:
        assert_keeps_contract(forgets, SM90)
    assert str(error.value).splitlines() == [
        f"{SM90}, gpt-oss, 3 experts, hidden 672, intermediate 352: wrong  (forgets)",
        "  right  w13 payload, w13 bias, w2 payload, w2 block scales, w2 bias",
        "  wrong  w13 block scales: block scales linear; the kernel reads the SM90 fold [scales-linear]. "
        "Fix: call interleave_moe_scales_for_sm90_mixed_gemm once, on linear uint8 scales",
    ]


def test_a_converter_for_another_checkpoint_kind() -> None:
    """The gpt-oss converter on [w1; w3]: every second row of gate, then of up, is no order with a name."""
    found = audit(sm90, SM90, checkpoint=COMPRESSED)
    assert found.faults == {"rows-unnamed": ("w13", "w13_scale", "w13_bias")} and found.verdict("w2").right


def test_a_converter_may_work_in_place() -> None:
    """As vLLM's reorder_w1w3_to_w3w1: the checkpoint that its result is compared with must not change along."""

    def spoils(t: dict[str, Tensor]) -> Operands:
        for x in t.values():
            x.zero_()
        return {k: t[k] for k in ("w13", "w13_scale", "w13_bias", "w2", "w2_scale", "w2_bias")}

    found = audit(spoils, SM90)
    assert found.outcome == "wrong" and all(not v.right for v in found.verdicts)
    layer = made_layer("nvfp4/FLASHINFER_CUTEDSL")
    before = [w.payload.clone() for w in (layer.gate, layer.up, layer.down)]
    r = recipe("vllm", "nvfp4/FLASHINFER_CUTEDSL", MODELOPT)
    for x in loaded(r, layer).values():
        x.zero_()
    assert all(torch.equal(w.payload, b) for w, b in zip((layer.gate, layer.up, layer.down), before))


def test_what_is_not_there_or_no_bytes() -> None:
    def check(key: str, value: object, text: str, fault: tuple[str, ...] = ()) -> None:
        found = audit(lambda t: {**sm90(t), key: value(t) if callable(value) else value}, SM90)
        assert [v.operand for v in found.wrong] == [key] and found.verdict(key).faults == fault
        assert text in found.verdict(key).text

    check("w2_bias", None, "a bias of the checkpoint is not passed", ("bias-missing",))
    check("w2_scale", None, "the converter returns none; expected a tensor")
    # 768 x 384/32 for each of 3 experts is 27648 bytes; unpadded 672 x 11 is 22176.
    check("w2_scale", lambda t: t["w2_scale"][:, :672, :11], "expected 27648 bytes as [3, 12, 3, 16, 16], got 22176")
    check("w2_scale", lambda t: t["w2_scale"].float(), "got numbers of torch.float32: bytes must be viewed, never cast")
    check("w13_bias", lambda t: sm90(t)["w13_bias"].float(), "expected torch.bfloat16 [3, 768], got torch.float32 [3, 768]")
    with pytest.raises(MxdebugError, match="a mapping with w13.*a tuple"):
        audit(lambda t: tuple(t.values()), SM90)
    with pytest.raises(MxdebugError, match="got bias_of_w2"):
        audit(lambda t: {**sm90(t), "bias_of_w2": None}, SM90)
    with pytest.raises(ZeroDivisionError):  # a converter's own errors pass through
        audit(lambda t: 1 // 0, SM90)
    with pytest.raises(MxdebugError, match="no conversion is written"):
        audit(sm90, SM90, checkpoint="GGUF")


# -- every path -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("r", ALL)
def test_our_own_recipe_is_right_on_every_path(r: Recipe, cpu: None) -> None:
    for gated in (True, False):
        if gated or "TRTLLM_MXFP4" not in r.path:  # vLLM has no such layers there
            layer = made_layer(r.path, gated=gated)
            found = audit(lambda t, layer=layer: made(r, layer), r.path, layer, checkpoint=r.checkpoint)
            assert found.ok, str(found)


@pytest.mark.parametrize("r", ONE_A_PATH)
def test_faults_are_named_on_every_path(r: Recipe, cpu: None) -> None:
    """One fault of each kind that the path can have, in the block scales of w2 and in all of w13."""
    layer = made_layer(r.path)
    plan, tried = r.plan(layer), 0
    w13 = tuple(k for k in plan.forms if k.startswith("w13"))
    for id, keys in (
        ("scales-linear", ("w2_scale",)),
        ("scales-transposed", ("w13_scale",)),
        ("rows-gate-up", w13),
        ("rows-interleaved", w13[:1]),
        ("rows-shuffled-16", ("w2",)),
        ("padding-not-zero", ("w2", "w2_scale")),
        ("scales-cast-by-value", ("w2_scale",)),
        ("nibbles-swapped", ("w13",)),
    ):
        fault = FAULTS[id]
        slots = {k: fault.slots(k, plan.forms[k], r.contract) for k in keys}
        if not all(slots.values()) or (id == "padding-not-zero" and plan.padded == (layer.intermediate, layer.hidden)):
            continue
        found = audit(lambda t, slots=slots: made(r, layer, **slots), r.path, layer, checkpoint=r.checkpoint)
        assert found.faults == {id: keys}, f"{id}: {found}"
        tried += 1
    assert tried >= 5


def test_every_named_fault_of_one_path(cpu: None) -> None:
    """Every fault of the catalogue that changes a slot, on the first operand that it can strike."""
    r = recipe("vllm", SM90, GPT_OSS)
    layer = made_layer(SM90)
    forms = r.plan(layer).forms
    tried = set()
    for fault in OPERAND_FAULTS:
        for key in fault.strikes if fault.slots else ():
            if key == "w2_bias" or not (slots := fault.slots(key, forms[key], r.contract)):
                continue
            struck = (
                {k: fault.slots(k, forms[k], r.contract) for k in (key, f"{key}_scale")} if fault.id == "padding-not-zero" else {key: slots}
            )
            found = audit(lambda t, struck=struck: made(r, layer, **struck), SM90, layer)
            assert [v.operand for v in found.wrong] == list(struck) and fault.id in found.faults, f"{fault.id} in {key}: {found}"
            tried.add(fault.id)
            break  # on which operands a fault is found is a matter of tests/test_faults.py
    assert {"scales-128x4", "scales-twice", "weights-linear", "padding-at-end", "rows-gate-up"} <= tried and len(tried) >= 18


def test_halves_swapped_without_gate() -> None:
    """What vLLM 0.33 does on both MXFP4 CUTLASS paths, by its own stages."""
    r = recipe("vllm", SM90, COMPRESSED)
    layer = made_layer(SM90, gated=False)
    slots = {k: FAULTS["rows-swapped-without-gate"].slots(k, r.plan(layer).forms[k], r.contract) for k in ("w13", "w13_scale", "w13_bias")}
    found = audit(lambda t: made(r, layer, **slots), SM90, layer, checkpoint=COMPRESSED)
    assert found.faults == {"rows-swapped-without-gate": ("w13", "w13_scale", "w13_bias")}


@pytest.mark.parametrize("r", [p for p in ONE_A_PATH if p.values[0].contract.weights.outer])
def test_global_scales(r: Recipe, cpu: None) -> None:
    layer = made_layer(r.path)
    right = r.plan(layer).scalars(layer)
    read = {o.key for o in r.contract.inputs}
    for fault in SCALAR_FAULTS:
        for key in [k for k in fault.strikes if k in right and k in read][:2]:
            value = fault.passed(key, right, layer)
            if value is None or torch.allclose(value, right[key], rtol=2.0**-20):
                continue
            found = audit(lambda t, key=key, value=value: {**made(r, layer), key: value}, r.path, layer, checkpoint=r.checkpoint)
            assert [v.operand for v in found.wrong] == [key], f"{fault.id} in {key}: {found}"
            named = found.verdict(key)
            assert fault.id in named.faults or f"{fault.id} would give" in named.text or f", {fault.id}" in named.text, (
                f"{fault.id} in {key}: {found}"
            )
    without = audit(lambda t: {k: v for k, v in made(r, layer).items() if k != "w2_alpha"}, r.path, layer, checkpoint=r.checkpoint)
    assert not without.ok and [v.operand for v in without.wrong] == ["w2_alpha"]
    told = audit(lambda t: {k: v for k, v in made(r, layer).items() if k != "w2_alpha"}, r.path, layer, checkpoint=r.checkpoint, elsewhere=("w2_alpha",))
    assert told.ok and "w2 alpha: made elsewhere; not looked at" in told.open
    assert any("global-shared-by-halves" in line for line in told.open)  # w1's and w3's differ in this layer
    one = audit(lambda t: {**made(r, layer), **({"a2_gscale": right["a2_gscale"][0]} if "a2_gscale" in read else {})}, r.path, layer, checkpoint=r.checkpoint)
    assert one.ok, str(one)
    if "a1_gscale" in read:  # read by nobody behind the quantiser, and wrong all the same
        inverted = audit(lambda t: {**made(r, layer), "a1_gscale": 1 / right["a1_gscale"]}, r.path, layer, checkpoint=r.checkpoint)
        assert inverted.faults == {"global-inverted": ("a1_gscale",)}
    column = audit(lambda t: {**made(r, layer), "w2_alpha": right["w2_alpha"][:, None]}, r.path, layer, checkpoint=r.checkpoint)
    assert [v.operand for v in column.wrong] == ["w2_alpha"]


def test_strides_and_devices(cpu: None) -> None:
    """Kernels take a pointer: a transposed view of the right values is wrong. `.to("cuda")` stays on the CPU inside an audit."""
    r = recipe("vllm", SM90, GPT_OSS)
    layer = made_layer(SM90)

    def strided(t: dict[str, Tensor]) -> dict[str, Tensor]:
        out = made(r, layer)
        return {**out, "w13": out["w13"].to("cuda").transpose(1, 2).contiguous().transpose(1, 2)}

    found = audit(strided, SM90, layer, checkpoint=GPT_OSS)
    assert [v.operand for v in found.wrong] == ["w13"] and "not contiguous" in found.verdict("w13").text
    with replaced():
        assert torch.zeros(1).to("cuda", torch.float16).dtype == torch.float16 and torch.zeros(1).to(device="cuda").device.type == "cpu"


# -- what the converter is given ------------------------------------------------------------------------------------


def test_loaded_mxfp4() -> None:
    layer = made_layer(SM90)  # 352 rows of K 672, padded to 384 and 768
    gate, up = layer.gate.payload, layer.up.payload
    t = loaded(recipe("vllm", SM90, GPT_OSS), layer)
    assert (
        t["w13"].shape == (3, 768, 384)
        and t["w13_scale"].shape == (3, 768, 24)
        and t["w2"].shape == (3, 768, 192)
        and t["w2_bias"].shape == (3, 768)
    )
    assert torch.equal(t["w13"][:, 0:704:2, :336], gate) and torch.equal(t["w13"][:, 1:704:2, :336], up)
    assert not t["w13"][:, 704:].any() and not t["w13"][:, :, 336:].any() and t["w13_bias"].dtype == torch.bfloat16
    t = loaded(recipe("vllm", SM90, COMPRESSED), layer)
    assert torch.equal(t["w13"][:, :352, :336], gate) and torch.equal(t["w13"][:, 384:736, :336], up) and not t["w13"][:, 352:384].any()
    t = loaded(recipe("vllm", SM90, COMPRESSED), layer, padded=(512, 1024))
    assert t["w13"].shape == (3, 1024, 512) and torch.equal(t["w13_bias"][:, 512:864], layer.up_bias)


def test_loaded_nvfp4() -> None:
    layer = made_layer(TRTLLM_NVFP4)
    t = loaded(recipe("vllm", TRTLLM_NVFP4, MODELOPT), layer, rows=INTERLEAVED)
    assert t["w13"].shape == (3, 704, 336) and t["w13_scale"].dtype == torch.float8_e4m3fn and "w13_bias" not in t
    assert torch.equal(t["w13"][:, 1::2], layer.up.payload)
    assert torch.equal(t["w13_scale_2"], torch.stack([layer.gate.global_scale, layer.up.global_scale], 1))
    d = loaded(recipe("vllm", TRTLLM_NVFP4, DIVISORS), layer)
    assert torch.equal(d["w2_scale_2"], 1 / t["w2_scale_2"]) and torch.equal(d["w13_input_scale"], 1 / t["w13_input_scale"])


@pytest.mark.parametrize("path", sorted({r.path for r in RECIPES}))
def test_made_layers_can_show_faults(path: str) -> None:
    layer = made_layer(path)
    columns = [w.scales.shape[2] for w in (layer.up, layer.down)]
    padded = [-(-c // 4) * 4 for c in columns]
    assert 16 not in columns + padded and layer.hidden > 128 and layer.intermediate % 128
    assert (layer.intermediate % 64 != 0) != (path == "nvfp4/FLASHINFER_CUTLASS")
    for w in (layer.gate, layer.up, layer.down):
        assert (w.scales != w.scales[:, :1]).any() and (w.scales != w.scales[:, :, :1]).any() and (w.payload[0] != w.payload[1]).any()
    if layer.up.format.outer:
        every = torch.cat([w.global_scale for w in (layer.gate, layer.up, layer.down)] + [layer.w13_input_scale, layer.w2_input_scale])
        assert every.unique().numel() == every.numel()


# -- stand-ins ------------------------------------------------------------------------------------------------------


def test_stand_ins_lay_bytes_where_the_kernels_do() -> None:
    one = torch.zeros(2, 130, 6, dtype=torch.uint8)
    one[1, 33, 2] = 7
    woven = torch.zeros(1, 64, 8, dtype=torch.uint8)
    woven[0, 17, 1] = 7
    with replaced():
        swizzled = flashinfer.block_scale_interleave(one)
        folded = flashinfer.fused_moe.interleave_moe_scales_for_sm90_mixed_gemm(woven)
        with pytest.raises(MxdebugError, match="view the scale bytes as uint8"):
            flashinfer.block_scale_interleave(one.view(torch.float8_e4m3fn))
    # 130 x 6 is padded to 256 x 8 = 2048 bytes an expert; row 33, column 2: 33%32 * 16 + 33//32 * 4 + 2 = 22.
    assert swizzled.shape == (4096,) and swizzled.nonzero().flatten().tolist() == [2048 + 22]
    # e (rb s f) (kb g) -> e rb kb f (s g) with f = 16, g = 4: row 17 is s = 1, f = 1.
    assert folded.shape == (1, 1, 2, 16, 16) and folded[0, 0, 0, 1, 1 * 4 + 1] == 7


def test_everything_is_put_back() -> None:
    """In modules that imported FlashInfer's functions before and inside, and in an engine's cache."""
    original, cuda = flashinfer.block_scale_interleave, Tensor.__dict__.get("cuda")
    before, inside = ModuleType("an_engine"), ModuleType("another_engine")
    before.swizzle = original
    sys.modules.update({"an_engine": before, "another_engine": inside})
    scales = torch.zeros(128, 4, dtype=torch.uint8)
    try:
        with replaced(sm=90):
            from flashinfer.utils import get_compute_capability

            inside.swizzle = cached = flashinfer.nvfp4_block_scale_interleave
            assert before.swizzle is cached is flashinfer.quantization.fp4_quantization.block_scale_interleave is not original
            assert before.swizzle(scales).shape == (512,) and scales.cuda() is scales
            assert torch.cuda.get_device_capability() == (9, 0) == get_compute_capability(scales.device)
            with replaced(sm=120):
                assert torch.cuda.get_device_capability() == (12, 0)
            assert before.swizzle is cached and torch.cuda.get_device_capability() == (9, 0)
    finally:
        del sys.modules["an_engine"], sys.modules["another_engine"]
    assert flashinfer.block_scale_interleave is original is before.swizzle and Tensor.__dict__.get("cuda") is cuda
    with pytest.raises(ValueError, match="cuda device"):
        cached(scales)  # kept beyond the end, it is FlashInfer's again
    with pytest.raises(RuntimeError), replaced():
        raise RuntimeError
    assert flashinfer.block_scale_interleave is original


def test_modules_first_imported_inside_are_put_back() -> None:
    inside = ModuleType("late_engine")
    try:
        with replaced():
            inside.swizzle = flashinfer.block_scale_interleave
            sys.modules["late_engine"] = inside
        assert inside.swizzle is flashinfer.block_scale_interleave
    finally:
        del sys.modules["late_engine"]


def test_quantisers() -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    with replaced():
        q, s = flashinfer.mxfp8_quantize(x, False)
        p, t = flashinfer.fp4_quantize(x, torch.tensor(100.0))
    assert (q.dtype, q.shape, s.shape, s.dtype) == (torch.float8_e4m3fn, (5, 64), (10,), torch.uint8)
    values = q.float().unflatten(1, (2, 32)) * torch.exp2(s.reshape(5, 2, 1).float() - 127)
    assert (values.flatten(1) - x.float()).abs().max() < 2.0**-3  # a step of E4M3 below 4 is at most 2^-2: half of it
    assert (p.shape, t.shape) == ((5, 32), (128, 4))


def test_without_flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stub takes its place; its index functions agree with FlashInfer's, and it is gone afterwards."""
    from flashinfer.fused_moe import core

    rows = torch.zeros(256, 32, dtype=torch.uint8)
    want = [
        core.get_w2_permute_indices_with_cache({}, rows, 128),
        core._maybe_get_cached_w3_w1_permute_indices({}, rows, 128),
        core._maybe_get_cached_w3_w1_permute_indices({}, rows, 128, is_gated_act_gemm=False),
    ]
    for name in [n for n in sys.modules if n.split(".")[0] == "flashinfer"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(standins, "_import", list)
    with replaced():
        from flashinfer.fused_moe.core import _maybe_get_cached_w3_w1_permute_indices as interleaved
        from flashinfer.fused_moe.core import get_w2_permute_indices_with_cache as shuffled

        assert "stub" in sys.modules["flashinfer"].__doc__
        got = [shuffled({}, rows, 128), interleaved({}, rows, 128), interleaved({}, rows, 128, is_gated_act_gemm=False)]
    assert all(torch.equal(a, b) for a, b in zip(got, want)) and "flashinfer" not in sys.modules
    assert_keeps_contract(sm90, SM90)
    assert_keeps_contract(trtllm_nvfp4, TRTLLM_NVFP4)
    assert "flashinfer" not in sys.modules


# -- vLLM -----------------------------------------------------------------------------------------------------------


def test_an_engine_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    text, ok = report("vllm")
    assert ok is None and text.startswith("vLLM is not installed here, so none of its converters ran")
    with pytest.raises(MxdebugError, match="expected one of vllm, got 'sglang'"):
        report("sglang")


def test_an_engine_that_cannot_be_imported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("import a_module_that_is_not_there")
    for name in [n for n in sys.modules if n.split(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(tmp_path)
    found = audit_vllm()
    assert found.ok is None and "cannot be imported, so none ran: ModuleNotFoundError: No module named 'a_module_that_is_not_there'" in str(
        found
    )


def test_an_engine_of_another_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its converters are missing: each path says so, nothing is raised, and the version is named."""
    empty, activations = ModuleType("oracle"), ModuleType("activation")
    activations.MoEActivation = {"SILU": 1, "SWIGLUOAI": 2, "RELU2_NO_MUL": 3}
    monkeypatch.setattr(engines, "find_spec", lambda name: importlib.util.spec_from_loader(name, None, origin="elsewhere"))
    monkeypatch.setattr(engines, "version", lambda name: "0.40.1")
    monkeypatch.setattr(
        engines.importlib,
        "import_module",
        lambda name: (
            activations if name.endswith("activation") else empty if "oracle" in name else importlib.__import__(name, fromlist=["x"])
        ),
    )
    found = audit_vllm(("nvfp4/FLASHINFER_CUTLASS",))
    assert found.message.startswith("vLLM 0.40.1 (elsewhere)") and "recipes are those of 0.33" in found.message
    assert found.ok is False and {a.outcome for a in found.audits} == {"failed"} and "AttributeError" in str(found)


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The real vLLM, or a skip that says that it did not run."""
    sources = os.environ.get("MXDEBUG_VLLM")
    if not sources:
        if importlib.util.find_spec("vllm") is None:
            pytest.skip("vLLM's own converters DID NOT RUN: vLLM is not installed, and MXDEBUG_VLLM names no folder of its sources")
        yield
        return
    spec = importlib.util.spec_from_file_location("vllm_sources", Path(__file__).parent / "data" / "vllm_sources.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "meta_path", [*sys.meta_path])
    module.find(Path(sources))
    kept = {n: m for n, m in sys.modules.items() if n.split(".")[0] == "vllm"}
    yield
    for name in [n for n in sys.modules if n.split(".")[0] == "vllm"]:
        del sys.modules[name]
    sys.modules.update(kept)


def test_vllm_0_33(vllm: None) -> None:
    """Right but for two: non-gated MXFP4 CUTLASS swaps halves that are not there; NVFP4 CUTLASS does not undo alternating rows."""
    found = audit_vllm()
    wrong = {(a.path, a.checkpoint, a.layer): a.faults for a in found.audits if a.outcome == "wrong"}
    swapped = {"rows-swapped-without-gate": ("w13", "w13_scale", "w13_bias")}
    no_order = {"rows-interleaved-swapped": ("w13", "w13_scale")}
    assert wrong == {
        (SM90, COMPRESSED, "RELU2_NO_MUL, no gate"): swapped,
        ("mxfp4/FLASHINFER_CUTLASS_MXFP4_MXFP8", COMPRESSED, "RELU2_NO_MUL, no gate"): swapped,
        ("nvfp4/FLASHINFER_CUTLASS", MODELOPT, "SWIGLUOAI, rows g0,u0,g1,u1"): no_order,
        ("nvfp4/FLASHINFER_CUTLASS", DIVISORS, "SWIGLUOAI, rows g0,u0,g1,u1"): no_order,
    }, str(found)
    refused = {(a.path, a.layer) for a in found.audits if a.refused}
    assert refused == {
        ("mxfp4/FLASHINFER_TRTLLM_MXFP4_BF16", "RELU2_NO_MUL, no gate"),
        ("mxfp4/FLASHINFER_TRTLLM_MXFP4_MXFP8", "RELU2_NO_MUL, no gate"),
        (TRTLLM_NVFP4, "SWIGLUOAI, rows g0,u0,g1,u1"),
    }
    assert not [a for a in found.audits if a.failed] and found.ok is False and len(found.audits) == 30
    for a in found.audits:  # global scales too, where there are any
        assert not a.verdicts or a.path.startswith("mxfp4") or {"w13_alpha", "w2_alpha"} <= {v.operand for v in a.verdicts}


def test_a_linear_path_is_sent_to_its_own_check() -> None:
    for path in ("nvfp4_w4a16/flashinfer_cutedsl/sm100", "nvfp4_w4a16/flashinfer_cutedsl"):
        with pytest.raises(MxdebugError, match="assert_linear_keeps_contract"):
            assert_keeps_contract(dict, path)
