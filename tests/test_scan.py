"""`mxdebug scan`: healthy checkpoints of every kind are clean, and each fault that is put in is found, with its experts and numbers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from making_scan import (
    CT_MXFP4,
    CT_NVFP4,
    EXPERT,
    EXPERTS,
    GPT_OSS,
    KINDS,
    MODELOPT,
    MODELOPT_MXFP8,
    QUARK,
    config,
    probe_weight,
    save,
    tensors,
)
from torch import Tensor

from mxdebug.confusion_files import LETTERS, examine_files, measured_files, table_files
from mxdebug.errors import MxdebugError
from mxdebug.recorded import ROOT
from mxdebug.scan import BROKEN, NOTE, SUSPICIOUS, Finding, Report, measure, scan
from mxdebug.scan.catalogue import RULES
from mxdebug.scan.injections import INJECTIONS

E11 = EXPERT.format(1, 1, "gate_proj")  # layer 1, expert 1
Made, Stated = dict[str, Tensor], dict[str, Any]
Change = Callable[[Made, Stated], object]


def found(report: Report, rule: str) -> list[Finding]:
    return [f for f in report.findings if f.id == rule]


def scanned(folder: Path, kind: str, change: Change, **options: Any) -> Report:
    """A healthy checkpoint, changed, written and scanned."""
    made, stated = tensors(kind), config(kind)
    change(made, stated)
    return scan(save(folder, made, stated), **options)


def nothing(made: Made, stated: Stated) -> None:
    pass


@pytest.mark.parametrize("payload", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_healthy_checkpoint_is_clean(tmp_path: Path, kind: str, payload: bool) -> None:
    report = scan(save(tmp_path, tensors(kind), config(kind), shards=3), payload=payload)
    assert (report.verdict, report.exit_code) == ("CLEAN", 0), str(report)
    assert {f.severity for f in report.findings} <= {NOTE}
    assert any("NVFP4" in s.format for s in report.statistics) == (" 448\n" in str(report))  # E4M3's largest number means nothing for E8M0
    # 2 layers of 4 experts with 3 projections and of 4 attention projections; gpt-oss: 2 layers of 2 fused projections
    assert dict(report.kinds) == {kind: 4 if kind == GPT_OSS else 2 * (4 * 3 + 4)}


@pytest.mark.parametrize("name", ["gptoss-tiny", "gptoss-192", "gptoss-8-experts", "minimax-tiny", "nvfp4-w4a16-tiny"])
def test_checkpoints_that_ship_are_clean(name: str) -> None:
    assert scan(ROOT / "checkpoints" / name, payload=True).verdict == "CLEAN"


@pytest.mark.parametrize("chunk", [1 << 24, 4096])
@pytest.mark.parametrize("kind", KINDS)
def test_statistics_count_every_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, chunk: int) -> None:
    """Against numpy on the whole tensors; in pieces of 4096 bytes too, which end inside tensors and experts."""
    monkeypatch.setattr(measure, "CHUNK", chunk)
    made = tensors(kind)
    report = scan(save(tmp_path, made, config(kind)), payload=True)
    ends = {True: ("_scales", "_blocks"), False: (".weight_scale", ".weight_packed", ".weight")}[kind == GPT_OSS]
    all_scales = [t.view(torch.uint8).numpy().ravel() for n, t in made.items() if n.endswith(ends[0])]
    want = np.bincount(np.concatenate(all_scales), minlength=256)
    assert np.array_equal(np.sum([s.histogram for s in report.statistics], axis=0), want)
    payload = np.concatenate(
        [t.view(torch.uint8).numpy().ravel() for n, t in made.items() if n.endswith(ends[1:]) and t.dtype != torch.bfloat16]
    )
    codes = (
        np.bincount(np.concatenate([payload & 15, payload >> 4]), minlength=16)
        if "8" not in kind.split("FP")[-1] and "mxfp8" not in kind
        else np.bincount(payload, minlength=256)
    )
    assert np.array_equal(np.sum([s.codes for s in report.statistics], axis=0), codes)
    assert sum(s.minus_zero for s in report.statistics) == codes[8 if len(codes) == 16 else 128]


def set_bytes(name: str, places: int, byte: int) -> Change:
    """Put a byte to the first places of a tensor."""

    def change(made: Made, stated: Stated) -> None:
        made[name].view(torch.uint8).view(-1)[:places] = byte

    return change


def put(name: str, value: object) -> Change:
    def change(made: Made, stated: Stated) -> None:
        made[name] = value(made[name]) if callable(value) else torch.tensor(value, dtype=torch.float32).reshape(made[name].shape)

    return change


def state(key: str, value: object) -> Change:
    return lambda made, stated: stated["quantization_config"].__setitem__(key, value)


def of_library(kind: str, rule: str, how: str = "") -> Change:
    """The library's injection for a rule; how: the beginning of its words, where there are several."""
    (injection,) = [i for i in INJECTIONS if i.rule == rule and i.how.startswith(how)]
    return lambda made, stated: injection.inject(made, stated, kind)


SCALE, FUSED = f"{E11}.weight_scale", "model.layers.1.mlp.experts.gate_up_proj_scales"
# What the library puts in: (kind, rule, how, severity, words of the text, experts)
OF_LIBRARY: dict[str, tuple[str, str, str, str, str, tuple[int, ...]]] = {
    "NaN, E4M3": (MODELOPT, "scale-nan", "", BROKEN, "3 of 65,536", (1,)),  # 8 experts x 512 x 256/16
    "NaN, E8M0": (QUARK, "scale-nan", "", BROKEN, "3 of 32,768", (1,)),  # 8 x 512 x 256/32
    "NaN, fused": (GPT_OSS, "scale-nan", "", BROKEN, "3 of 65,536", (1,)),  # 8 x 1024 x 256/32
    "negative": (MODELOPT, "scale-negative", "", BROKEN, "3 of 65,536", (1,)),
    "cast by value": (QUARK, "scale-cast", "", BROKEN, "1 weights", (1,)),
    "constant": (MODELOPT, "scale-constant", "", SUSPICIOUS, "byte 0x38", (1,)),
    "saturated": (MODELOPT, "scale-saturated", "", SUSPICIOUS, "10.0 %", (1,)),  # 820 of 8192
    "divisor zero": (CT_NVFP4, "global-bad", "", BROKEN, "1 of 8 are zero", (1,)),
    "divisor inf": (CT_NVFP4, "input-bad", "", BROKEN, "1 of 8 are inf", (1,)),
    "w1 and w3 differ": (MODELOPT, "w13-differ", "", SUSPICIOUS, "1 of 8 differ, up to 2 times", (1,)),
    "w1 and w3 differ, divisors": (CT_NVFP4, "w13-differ", "", SUSPICIOUS, "up to 2 times", (1,)),
    "q and k differ": (CT_NVFP4, "joined-differ", "", SUSPICIOUS, "1 of 2 differ, up to 4 times", ()),
    "inputs differ": (MODELOPT, "inputs-differ", "", NOTE, "up to 4 times", (1,)),
    "a quiet expert": (MODELOPT, "experts-outlier", "", SUSPICIOUS, "2^16.0", (1,)),
    "a weak expert": (MODELOPT, "scales-outlier", "", SUSPICIOUS, "1 weights' scales are far from those of the layer's other experts, by a factor of 2^-7.3", (1,)),
    "a weak expert, fused": (GPT_OSS, "scales-outlier", "", SUSPICIOUS, "by a factor of 2^-7.0", (1,)),
    "an input scale is missing": (MODELOPT, "input-missing", "", BROKEN, "1 of 8 have no input_scale", (1,)),
    "a global scale is missing": (MODELOPT, "tensors-missing", "no global scale", BROKEN, f"{E11}.weight_scale_2", (1,)),
    "block scales are missing": (GPT_OSS, "tensors-missing", "no block scales", BROKEN, FUSED, ()),
    "payload is missing": (CT_MXFP4, "tensors-missing", "no payload", BROKEN, f"{E11}.weight_packed", (1,)),
    "a projection is missing": (QUARK, "tensors-missing", "neither", BROKEN, "1 projections", (1,)),
    "an expert fewer": (CT_MXFP4, "experts-count", "", BROKEN, "1 layers have 3 experts; config.json states 4", ()),
    "layers are missing": (QUARK, "layers-missing", "", BROKEN, "3 of 5: 2, 3, 4", ()),
    "an unknown tensor": (MODELOPT, "tensors-unknown", "", SUSPICIOUS, "1 tensors", (1,)),
    "fp32 scales": (CT_MXFP4, "scale-dtype", "", BROKEN, "F32 instead of U8 or F8_E8M0", (1,)),
    "transposed scales": (MODELOPT, "scale-shape", "", BROKEN, "transposed, [512, 16] would fit", (1,)),
    "axes swapped": (GPT_OSS, "scale-shape", "", BROKEN, "axes swapped", ()),
    "transposed payload": (MODELOPT, "payload-shape", "payload transposed by bytes", BROKEN, "transposed", (1,)),
    "blocks of 32": (MODELOPT, "group-size", "block scales", BROKEN, "one scale for 32 elements; NVFP4 has 16", (1,)),
    "blocks of 32 by config": (MODELOPT, "group-size", "group_size", BROKEN, "states 32", ()),
    "another intermediate size": (MODELOPT, "shapes-disagree", "", BROKEN, "(512, 256) by most", (1,)),
    "payload int8": (CT_MXFP4, "payload-dtype", "", BROKEN, "I8", (1,)),
    "another kind by config": (CT_MXFP4, "kind-contradiction", "", BROKEN, "32 of 32", (0, 1, 2, 3)),
    "ignored": (MODELOPT, "ignored-but-quantised", "", BROKEN, "1 modules", ()),
    "not quantised": (MODELOPT, "expected-but-unquantised", "", BROKEN, "1 linear modules", ()),
    "no configuration": (MODELOPT, "config-silent", "", SUSPICIOUS, "", ()),
    "a configuration that is not known": (MODELOPT, "config-not-checked", "", NOTE, "quant_method made", ()),
}
# More ways into the same rules: (kind, what is changed, rule, severity, words of the text, experts)
FAULTS: dict[str, tuple[str, Change, str, str, str, tuple[int, ...]]] = {
    **{name: (kind, of_library(kind, rule, how), rule, *rest) for name, (kind, rule, how, *rest) in OF_LIBRARY.items()},
    "NaN, E4M3, negative": (MODELOPT, set_bytes(SCALE, 2, 0xFF), "scale-nan", BROKEN, "2 of 65,536", (1,)),
    "NaN, fused, another expert": (GPT_OSS, set_bytes(FUSED, 4, 0xFF), "scale-nan", BROKEN, "4 of 65,536", (0,)),
    "multiplier NaN": (MODELOPT, put(f"{E11}.weight_scale_2", float("nan")), "global-bad", BROKEN, "are NaN", (1,)),
    "multiplier negative": (MODELOPT, put(f"{E11}.weight_scale_2", -1.0), "global-bad", BROKEN, "are negative", (1,)),
    "multiplier denormal": (MODELOPT, put(f"{E11}.input_scale", 1e-40), "input-bad", BROKEN, "are denormal", (1,)),
    "divisor whose reciprocal is denormal": (CT_NVFP4, put(f"{E11}.weight_global_scale", 3e38), "global-bad", BROKEN, "are denormal", (1,)),
    "multiplier far out": (MODELOPT, put(f"{E11}.weight_scale_2", 1e-23), "global-bad", BROKEN, "are far out", (1,)),
    "not float32": (MODELOPT, put(f"{E11}.weight_scale_2", lambda t: t.bfloat16()), "global-bad", BROKEN, "BF16", (1,)),
    "cast by value, powers of two": (
        QUARK,
        put(SCALE, lambda t: (t.int() - 115).clamp(0, 3).apply_(lambda x: 1 << x).to(torch.uint8)),
        "scale-cast",
        BROKEN,
        "1 weights",
        (1,),
    ),
    "ignored by a glob": (
        MODELOPT,
        state("ignore", ["lm_head", "model.layers.1.self_attn*"]),
        "ignored-but-quantised",
        BROKEN,
        "4 modules",
        (),
    ),
    "ignored by expression": (CT_MXFP4, state("ignore", ["re:model.layers.1.*q_proj"]), "ignored-but-quantised", BROKEN, "1 modules", ()),
    "another algorithm": (MODELOPT, state("quant_algo", "W4A8"), "config-not-checked", NOTE, "W4A8", ()),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_found(tmp_path: Path, name: str) -> None:
    kind, change, rule, severity, words, experts = FAULTS[name]
    report = scanned(tmp_path, kind, change, payload=name == "cast by value")  # all became 0, as the scales of an empty expert are
    findings = found(report, rule)
    assert findings, str(report)
    assert {f.severity for f in findings} == {severity}
    assert any(words in f.text and f.experts == experts for f in findings), [(f.text, f.experts) for f in findings]
    worst = {BROKEN: "BROKEN", SUSPICIOUS: "SUSPICIOUS", NOTE: "CLEAN"}[severity]
    assert report.verdict == worst, str(report)  # and nothing worse is made of it
    assert not any(found(scanned(tmp_path / "healthy", kind, nothing), rule))


def test_the_pieces_of_an_unquantised_module_may_be_on_the_ignore_list(tmp_path: Path) -> None:
    def change(made: Made, stated: Stated) -> None:
        of_library(MODELOPT, "expected-but-unquantised")(made, stated)
        stated["quantization_config"]["ignore"] += ["model.layers.1.self_attn.q_proj"]

    assert scanned(tmp_path, MODELOPT, change).verdict == "CLEAN"


@pytest.mark.parametrize(
    ("kind", "byte", "under"), [(MODELOPT, 0x00, True), (MODELOPT, 0x80, True), (MODELOPT, 0x00, False), (CT_MXFP4, 0x00, None)]
)
def test_zero_scales_matter_only_over_payload(tmp_path: Path, kind: str, byte: int, under: bool | None) -> None:
    """E8M0 has no zero, so that byte 0 is only a note; a block of zeros may have any scale, -0 elements among them."""
    payload = f"{E11}.{'weight_packed' if kind == CT_MXFP4 else 'weight'}"

    def change(made: Made, stated: Stated) -> None:
        set_bytes(SCALE, 3, byte)(made, stated)  # three blocks of row 0
        if not under:
            made[payload][0, :24] = 0x08  # 0 and -0 in 48 elements
        else:
            made[payload][0, :24] = 0
            made[payload][0, 16] = 0x01  # one element that is not zero, in the third block

    lost = found(scanned(tmp_path, kind, change, payload=True), "zero-scale-under-payload")
    assert [f.text.rpartition(": ")[2] for f in lost] == (["1 of 65,536 blocks"] if under else [])
    assert not found(scanned(tmp_path / "scales", kind, change), "zero-scale-under-payload")  # cannot be seen without payload
    assert bool(found(scanned(tmp_path / "zero", kind, change), "e8m0-zero")) == (kind == CT_MXFP4)


def test_zero_weights_and_rows_and_nan_elements(tmp_path: Path) -> None:
    def change(made: Made, stated: Stated) -> None:
        made[f"{E11}.weight"].zero_()
        made[f"{EXPERT.format(0, 2, 'up_proj')}.weight"][5:8] = 0x80  # high nibbles -0

    report = scanned(tmp_path, MODELOPT, change, payload=True)
    assert [f.experts for f in found(report, "payload-zero")] == [(1,)]
    rows = found(report, "payload-rows-zero")
    assert [(f.experts, f.text.partition(": ")[2]) for f in rows] == [((2,), "3 of 4,096 rows (0.1 %)")]  # 8 experts x 512
    nan = scanned(tmp_path / "8", MODELOPT_MXFP8, set_bytes(f"{E11}.weight", 2, 0x7F), payload=True)
    assert [f.text.partition(": ")[2] for f in found(nan, "payload-nan")] == ["2 elements (byte 0x7F or 0xFF)"]


def one_linear(scales: list[int], global_scale: float) -> tuple[Made, Stated]:
    """A single ModelOpt module [1, 16 * len(scales)] with these scale bytes."""
    made = {
        "model.layers.0.self_attn.o_proj.weight": torch.full((1, 8 * len(scales)), 0x22, dtype=torch.uint8),
        "model.layers.0.self_attn.o_proj.weight_scale": torch.tensor([scales], dtype=torch.uint8).view(torch.float8_e4m3fn),
        "model.layers.0.self_attn.o_proj.weight_scale_2": torch.tensor(global_scale),
    }
    return made, {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}


def test_a_fold_counts_subnormal_and_lost_scales(tmp_path: Path) -> None:
    """g = 2^-6. 1.0 (0x38) -> 2^-6: normal. 0.875 (0x36): subnormal. 2^-4 (0x18) -> 2^-10: tie, to even: 0. 2^-3 (0x20): subnormal."""
    report = scan(save(tmp_path, *one_linear([0x38, 0x36, 0x18, 0x20, 0x7D], 2.0**-6)))
    assert [f.text.partition(": ")[2] for f in found(report, "fold-e4m3")] == [
        "40.0 % of the folded block scales would be subnormal, 20.0 % zero"
    ]
    assert (report.verdict, not found(scan(save(tmp_path / "1", *one_linear([0x38, 0x36, 0x18], 1.0))), "fold-e4m3")) == ("CLEAN", True)


def test_marlins_flush_counts_what_its_recipe_flushes(tmp_path: Path) -> None:
    """Largest 2.0 (0x40) is lifted by 2^7 to 256, in (224, 448]; 2^-13 is then the limit, below E4M3's smallest 2^-9: nothing. With 448 the
    factor is 1, and all below 2^-6 (bytes 1 to 7) are lost, 2^-6 (0x08) is not."""
    few, many = (scan(save(tmp_path / str(top), *one_linear([top, 0x01, 0x07, 0x08, 0x38], 1.0))) for top in (0x40, 0x7E))
    assert not found(few, "marlin-flush")
    assert [f.text.partition(": ")[2] for f in found(many, "marlin-flush")] == ["2 of 5 block scales (40.0 %)"]


def test_marlins_flush_is_the_recipes(tmp_path: Path) -> None:
    """The same number as `mxdebug.recipes.marlin`, whose bytes are vLLM's, on random scales of every byte."""
    from mxdebug.formats import NVFP4, BlockTensor
    from mxdebug.recipes.marlin import marlin_recipe
    from mxdebug.reference import Activation, MoELayer

    g = torch.Generator().manual_seed(3)
    made = tensors(MODELOPT)
    for name in [n for n in made if ".experts." in n and n.endswith("weight_scale")]:
        made[name] = torch.randint(1, 0x7F, made[name].shape, generator=g, dtype=torch.uint8).view(torch.float8_e4m3fn)
    report = scan(save(tmp_path, made, config(MODELOPT)))

    def stack(layer: int, name: str) -> BlockTensor:
        payload, scales, g2 = (
            torch.stack([made[f"{EXPERT.format(layer, e, name)}.{leaf}"] for e in range(EXPERTS)])
            for leaf in ("weight", "weight_scale", "weight_scale_2")
        )
        return BlockTensor(payload, scales.view(torch.uint8), NVFP4, g2)

    want = 0
    for layer in range(2):
        made_layer = MoELayer(stack(layer, "gate_proj"), stack(layer, "up_proj"), stack(layer, "down_proj"), Activation("silu"))
        want += sum(marlin_recipe(NVFP4, MODELOPT).plan(made_layer, dtype=torch.bfloat16).losses(made_layer).flushed.values())
    got = sum(
        int(f.text.partition(": ")[2].partition(" of")[0].replace(",", "")) for f in found(report, "marlin-flush") if "experts" in f.text
    )
    assert got == want > 0


def test_e8m0_bytes_that_fp16_flushes(tmp_path: Path) -> None:
    """103 and 112 are flushed, 102 (not a subnormal of FP16 either: the report's range) and 113 are not."""
    report = scanned(tmp_path, CT_MXFP4, lambda m, s: m[SCALE].view(-1)[:4].copy_(torch.tensor([102, 103, 112, 113], dtype=torch.uint8)))
    assert [f.text.partition(": ")[2] for f in found(report, "e8m0-fp16")] == ["2 of 32,768 block scales (below 0.1 %)"]


def experts_of(intermediate: int, hidden: int, kind: str = MODELOPT) -> tuple[Made, Stated]:
    g, made = torch.Generator().manual_seed(0), {}
    for name, n, k in (("gate_proj", intermediate, hidden), ("up_proj", intermediate, hidden), ("down_proj", hidden, intermediate)):
        made |= {f"{EXPERT.format(0, 0, name)}.{leaf}": t for leaf, t in probe_weight(KINDS[kind], g, n, k).items()}
    return made, {"quantization_config": config(kind)["quantization_config"]}


def test_sizes_that_paths_pad_refuse_and_degrees_cut(tmp_path: Path) -> None:
    """704 as in sglang#30887: at TP 2 a rank has 352, which the CUTLASS path refuses and TRT-LLM pads to 384; at TP 8 88: 5.5 blocks."""
    report = scan(save(tmp_path, *experts_of(704, 512)), tp=(1, 2, 8))
    assert report.verdict == "CLEAN"
    assert (
        "TP 2: intermediate size: expected a multiple of 64, got 352, on nvfp4/FLASHINFER_CUTLASS" in found(report, "path-refuses")[0].text
    )
    assert "TP 2: 352 x 512 to 384 x 512, on nvfp4/{FLASHINFER_TRTLLM" in found(report, "path-pads")[0].text
    assert "TP 1: 704" not in found(report, "path-pads")[0].text  # 704 = 11 x 64
    assert "(TP 8: 88 elements a rank)" in found(report, "tp-cuts-block")[0].text
    healthy = scan(save(tmp_path / "healthy", *experts_of(1024, 512)), tp=(1, 2, 8))
    assert not any(found(healthy, rule) for rule in ("path-refuses", "path-pads", "tp-cuts-block"))


# -- the table of which rule finds which injection ---------------------------------------------------------------------------------


def test_every_rule_has_an_injection_and_none_is_missed() -> None:
    assert {i.rule for i in INJECTIONS} == set(RULES) - {"file-alone"} and len({i.name for i in INJECTIONS}) == len(INJECTIONS)
    kept = measured_files()
    assert {kind: {n for n, letter in cells.items() if letter != "-"} for kind, cells in kept.items()} == {
        kind: {i.name for i in INJECTIONS if kind in i.kinds} for kind in KINDS
    }
    assert {letter for cells in kept.values() for letter in cells.values()} <= {"P", "p", "a", "-"}
    assert all(f"  {letter}  {means}" in table_files(kept) for letter, means in LETTERS.items())


@pytest.mark.parametrize("turn", range(len(KINDS)))
def test_a_sample_of_the_table_is_as_it_is_kept(turn: int) -> None:
    """Every injection on one kind that can have it."""
    sample = [(i, i.kinds[n % len(i.kinds)]) for n, i in enumerate(INJECTIONS)][turn :: len(KINDS)]
    assert {(i.name, kind): examine_files(i, kind) for i, kind in sample} == {(i.name, kind): measured_files()[kind][i.name] for i, kind in sample}


def test_an_injection_refuses_kinds_that_cannot_have_it() -> None:
    with pytest.raises(MxdebugError, match="kind for w13-differ: expected one of compressed-tensors nvfp4-pack-quantized, ModelOpt NVFP4, got gpt-oss"):
        of_library(GPT_OSS, "w13-differ")(tensors(GPT_OSS), config(GPT_OSS))
