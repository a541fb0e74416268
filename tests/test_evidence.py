"""Probe data, and each kind of evidence alone: converted weights, a call without a checkpoint, an index."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from mxdebug import recorded
from mxdebug.book import FILES, markdown, record
from mxdebug.calls import Call, load
from mxdebug.confusion import PATHS, cells, examine, injected, situations
from mxdebug.confusion_linear import LINEAR_PATHS, measure_linear
from mxdebug.diagnosis import PROVED, SUSPECTED, diagnose
from mxdebug.diagnosis.floor import follows, rounding_floor
from mxdebug.diagnosis.weights import diagnose_weights, kept
from mxdebug.diagnosis.where import where
from mxdebug.errors import MxdebugError
from mxdebug.evidence import BY_LETTER, OF_RUNS, OUTCOMES, best, measured, table
from mxdebug.faults import FAULTS, KERNEL_FAULTS, LINEAR_FAULTS, Situation, split_evenly
from mxdebug.faults.families import FAMILIES
from mxdebug.formats import MXFP4 as MXFP4_BLOCKS
from mxdebug.formats import BlockTensor
from mxdebug.probe import faults_for, probe
from mxdebug.reference import Activation, MoELayer, Parallel
from mxdebug.scan import load_index, scan
from mxdebug.scan.catalogue import RULES

MXFP4, NVFP4 = PATHS[0], "nvfp4/FLASHINFER_TRTLLM"


# -- probe ------------------------------------------------------------------------------------------------------

# What no output can show on any data of a path, and why.
NOTHING = {
    "padding-at-end": "rows in turn: padding comes to lie at the end in either way",
    "bias-unexpected": "no biases on this path",
    "global-shared-by-halves": "a fault of the checkpoint, not of the call",
    "router-renormalised": "a fault by what config.json says",
}


@pytest.mark.parametrize("path", [MXFP4, NVFP4])
def test_every_fault_moves_the_probe(path: str) -> None:
    """By more than rounding can, in one of the probe's situations; where a fault changes no byte, the reason is written above."""
    still = []
    for f in FAULTS.values():
        case = None if f.strikes in (("linear",), ("calls",)) else injected(f, path)
        if case is None:
            continue
        s, broken, _, wrong = case
        right = s.build()[1]
        if wrong is not None and follows(wrong, right, max(s.layer.hidden, s.layer.intermediate), s.recipe.contract.roundings):
            still.append(f.id)
    gone = {f"kernel-{n}" for n in ("fc1-bias-ignored", "fc2-bias-ignored", "bias-on-every-rank")} if "nvfp4" in path else set()
    assert set(still) - set(NOTHING) <= gone, still


def test_no_two_faults_of_the_kernel_are_alike_on_the_probe() -> None:
    told: set[str] = set()
    for s in situations(MXFP4):  # in each of them, what moves the output moves it in a way of its own
        seen = {s.build()[1].view(torch.int16).numpy().tobytes(): ""}
        for f in KERNEL_FAULTS:
            key = f.injected(s).build()[1].view(torch.int16).numpy().tobytes()
            if seen.get(key) != "":
                assert key not in seen, f"{f.id} and {seen[key]} give the same output"
                seen[key] = f.id
        told |= set(seen.values())
    assert told == {"", *(f.id for f in KERNEL_FAULTS)}


def test_probe_refuses_what_a_path_does_not_have() -> None:
    with pytest.raises(MxdebugError, match="path: expected one of mxfp4/"):
        probe("mxfp4/MARLIN")
    with pytest.raises(MxdebugError):
        probe("mxfp4/FLASHINFER_TRTLLM_MXFP4_BF16", gated=False)
    with pytest.raises(MxdebugError, match=f"checkpoint kind for {NVFP4}: expected one of ModelOpt NVFP4, compressed-tensors .*, got 'gpt-oss'"):
        probe(NVFP4, checkpoint="gpt-oss")
    with pytest.raises(MxdebugError, match="top_k: expected 1 to 2"):
        probe(MXFP4, top_k=9)


def test_faults_of_a_path_and_their_calls(tmp_path: Path) -> None:
    """What README's loop is made of: which faults there are, one put in, its call saved, and diagnosed against its layer."""
    assert [f.id for f in faults_for(NVFP4)] == list(measured()[NVFP4])
    with pytest.raises(MxdebugError, match="path: expected one of mxfp4/"):
        faults_for(LINEAR_PATHS[0])
    s = probe(MXFP4, parallel=(2, 1))
    assert s.parallel == Parallel(2, 1)
    saved = FAULTS["scales-linear"].injected(s, ("w2_scale",)).call().save(tmp_path)
    assert [(f.id, f.where) for f in diagnose(saved, s.checkpoint()).findings] == [("scales-linear", "w2 block scales")]


def test_a_fault_on_an_operand_that_is_not_there() -> None:
    with pytest.raises(MxdebugError, match="operand for fault experts-rolled: expected one of w13, .* this path has no such operand"):
        FAULTS["experts-rolled"].injected(probe(NVFP4), ("w2_bias",))


@pytest.mark.parametrize("path", PATHS)
def test_right_probes_are_right_with_every_kind_of_evidence(path: str) -> None:
    for s in situations(path):
        arguments, output = s.build()
        told = s.recipe.contract.parallel(arguments).tp_size == s.parallel.tp_size
        assert diagnose(Call.made(s.recipe.contract.function, arguments, output), s.checkpoint(), tp=None if told else s.parallel).findings == ()
        alone = diagnose(Call.made(s.recipe.contract.function, arguments, output))
        assert alone.verdict == "undecided" and not alone.findings, str(alone)
        known = kept(s.recipe.contract)
        d = diagnose_weights(
            {k: t for k, t in s.operands().items() if t is not None and k in known}, path, s.checkpoint(), parallel=s.parallel
        )
        assert d.ok and not d.findings, str(d)


# -- the measured table -------------------------------------------------------------------------------------------

SAMPLE = [
    ("scales-off", MXFP4),
    ("scales-small-flushed", MXFP4),
    ("scales-small-flushed", NVFP4),
    ("global-folded-into-blocks", NVFP4),
    ("scales-as-e8m0-bytes", NVFP4),
    ("scales-rounded-up", NVFP4),
    ("global-of-another-rank", NVFP4),
    ("global-not-loaded", NVFP4),
    ("weight-global-squared", NVFP4),
    ("kernel-router-on-input", MXFP4),
    ("experts-stride", MXFP4),
    ("scales-128x4-mistaken", NVFP4),
    ("nibbles-split", MXFP4),
    ("operand-not-loaded", MXFP4),
    ("scales-nan", MXFP4),
    ("x-scales-exponent", NVFP4),
    ("output-tile", MXFP4),
    ("output-partly-unwritten", MXFP4),
    ("router-scaled-twice", MXFP4),
    ("scales-linear", MXFP4),
]


@pytest.mark.parametrize(("id", "path"), SAMPLE, ids=lambda v: v.rpartition("/")[2])
def test_a_sample_of_the_table_is_as_it_is_kept(id: str, path: str) -> None:
    assert examine(FAULTS[id], path).letters == measured()[path][id]


@pytest.mark.parametrize("path", LINEAR_PATHS)
def test_the_columns_of_linear_layers_are_as_they_are_kept(path: str) -> None:
    found = cells(measure_linear(path))[path]
    assert found == measured()[path] and all(letters.startswith("-") and letters[2] in "Pc" for letters in found.values())
    only = {"sm100": {"scales-view-contiguous"}, "sm12x": {"scales-not-recoded", "scales-flushed", "scales-recoded-for-marlin", "activations-beyond-fp16"}}
    elsewhere = set().union(*(faults for name, faults in only.items() if not path.endswith(name)))
    of_linear = {f.id for f in FAULTS.values() if f.strikes == ("linear",)} | set(LINEAR_FAULTS)
    others = {"contract-broken", "input-not-finite", "wrong-tp-slice"}
    # A fake implementation is no part of a call: recipes.w4a16.op.wrong_fakes looks at it.
    assert set(found) == (of_linear | others) - elsewhere - {"fake-shape"}


def test_no_fault_is_called_right_with_call_and_checkpoint() -> None:
    assert set(measured()) == {*PATHS, *LINEAR_PATHS}
    assert [(p, id) for p, cells in measured().items() for id, letters in cells.items() if letters[2] == "X"] == []
    assert {c for cells in measured().values() for letters in cells.values() for c in letters} <= set(BY_LETTER) - {"X"}
    legend = table(measured()).partition("(1)")[0]
    assert all(f"  {o.letter}  {o.means}" in legend for o in OUTCOMES.values())
    assert "one run of the layer and its checkpoint: output-not-sliced" in legend and set(OF_RUNS) < set(measured()[LINEAR_PATHS[0]])
    known = {f.id for f in FAULTS.values() if f.strikes != ("calls",)}
    # w1 and w3 have one global scale in probe data: test_path_faults.py has the other. No evidence of the table holds a fake implementation.
    assert known - set().union(*measured().values()) == {"global-of-other-half", "fake-shape"}


def test_book_holds_every_record() -> None:
    ids = [i for f in FAMILIES for i in f.ids]
    assert sorted(ids) == sorted(FAULTS) and len(set(ids)) == len(ids) and set(FILES) <= set(FAULTS) and set(FILES.values()) <= set(RULES)
    text = markdown()
    assert "[vllm#51038](https://github.com/vllm-project/vllm/issues/51038)" in text and "[NeMo-RL#" not in text
    assert text.count("not 16 scale columns for 128x4") == 1 and text.count("P?P, for example") == 1
    placed = text.partition("### scales-v-cache\n")[2].partition("###")[0]
    assert "**proved by**" not in placed and "**shows on**" not in placed and "**strikes**" in placed  # as the chapter says
    assert all(f"### {id}\n" in text for id in ids) and all(r in text for f in FAULTS.values() for r in f.reports)
    written = (Path(__file__).parent.parent / "docs" / "faults.md").read_text()
    assert written == text + "\n", "write it again: mxdebug faults --book > docs/faults.md"
    assert dict(record("scales-linear"))["evidence"].startswith("converted weights: proves it; a call alone: raises a suspicion")
    assert dict(record("bias-twice"))["evidence"] == "a linear layer's call alone: says nothing; a linear layer's run and checkpoint: proves it"
    assert (best("scales-linear", linear=True)["call"].letter, best("scales-linear", linear=False)["call"].letter) == ("?", "s")


# -- converted weights ----------------------------------------------------------------------------------------------


def operands(s: Situation) -> dict[str, torch.Tensor]:
    known = kept(s.recipe.contract)
    return {k: t for k, t in s.operands().items() if t is not None and k in known}


def test_weights_by_vllms_names_and_from_a_file(tmp_path: Path) -> None:
    s = FAULTS["scales-linear"].injected(probe(MXFP4))
    names = {"w13": "w13_weight", "w13_scale": "w13_weight_scale", "w2": "w2_weight", "w2_scale": "w2_weight_scale"}
    save_file({names.get(k, k): t.contiguous() for k, t in operands(s).items()}, tmp_path / "layer.safetensors")
    d = diagnose_weights(tmp_path / "layer.safetensors", MXFP4, s.checkpoint())
    assert [(f.id, f.strength, f.where) for f in d.findings] == [("scales-linear", PROVED, "w13 block scales, w2 block scales")]
    assert not any(word in str(d) for word in ("router", "token", "output")) and d.open[-1].endswith("record a call (mxdebug doctor)")


def test_global_scales_that_are_not_given_are_not_called_right() -> None:
    s = probe(NVFP4)
    whole = operands(s)
    some = {k: t for k, t in whole.items() if k not in ("w2_alpha", "g1_scale_c")}
    d = diagnose_weights(some, NVFP4, s.checkpoint())
    assert d.verdict == "undecided" and not d.findings
    assert d.summary.endswith("w2 alpha (w2_alpha), w13 output scale (g1_scale_c): not given") and d.open[0].startswith("not given, and so not judged: w2 alpha")
    assert diagnose_weights(whole, NVFP4, s.checkpoint()).verdict == "right"


def test_weights_that_are_none() -> None:
    s = probe(MXFP4)
    with pytest.raises(MxdebugError, match="converted weight w1: expected one of w13,"):
        diagnose_weights({"w1": torch.zeros(1, 2)}, MXFP4, s.checkpoint())
    with pytest.raises(
        MxdebugError, match="converted weights: expected payload and block scales of w13 and w2, got no w13_scale, w2, w2_scale"
    ):
        diagnose_weights({"w13": operands(s)["w13"]}, MXFP4, s.checkpoint())


def test_weights_of_another_model() -> None:
    s = probe(MXFP4)
    larger = replace(s.checkpoint(), layer=s.layer.take([0, 1, 2, 3, 0, 1, 2, 3]))
    with pytest.raises(MxdebugError, match=r"converted weights and checkpoint: expected w13 \[8, .*, got w13 \[4, .*another checkpoint or layer"):
        diagnose_weights(operands(s), MXFP4, larger)
    short = {**operands(s), "w2": operands(s)["w2"][:, :1].contiguous()}  # one operand alone is the conversion's fault
    assert [f.id for f in diagnose_weights(short, MXFP4, s.checkpoint()).findings] == ["contract-broken"]


# -- a call alone ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_scales_without_levels_raise_no_suspicion(seed: int) -> None:
    """Random bytes in the right order: nothing speaks for another one."""
    s = probe(PATHS[1], seed=seed)
    g = torch.Generator().manual_seed(seed)

    def flat(t):
        return replace(t, scales=torch.randint(112, 122, t.scales.shape, generator=g, dtype=torch.uint8))

    layer = replace(s.layer, gate=flat(s.layer.gate), up=flat(s.layer.up), down=flat(s.layer.down))
    right = Situation.right(s.recipe, layer, s.x, s.experts, s.router)
    assert not diagnose(right.call()).findings


def test_suspicion_is_no_more_than_that() -> None:
    s = FAULTS["scales-linear"].injected(probe(MXFP4))
    d = diagnose(s.call())
    assert d.verdict == "undecided" and {f.strength for f in d.findings} == {SUSPECTED} and "suspected, no more" in d.summary


def test_the_floor_is_printed_with_its_derivation() -> None:
    s = probe(MXFP4)
    d = diagnose(s.call(), s.checkpoint())
    k = max(s.plan.padded)
    assert any(
        f"relative L2 of {rounding_floor(k):.1e}" in t and f"sqrt(3 * {k} * 2^-32)" in t and "measured 0.0e+00" in t for t in d.checked
    ), str(d)


# -- where a call belongs -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "parallel"),
    [("c01", Parallel()), ("c04", Parallel()), ("c06", Parallel()), ("c12", Parallel(1, 0, 2, 1)), ("c13", Parallel(2, 1))],
)
def test_recorded_calls_are_found_by_an_index(name: str, parallel: Parallel, tmp_path: Path) -> None:
    """Right and wrong layouts, an expert-parallel and a tensor-parallel rank: by hashes alone."""
    r = recorded.call(name)
    scan(r.checkpoint_path, index=tmp_path / "index")
    found = where(load(r.path), load_index(tmp_path / "index"))
    assert found.layer == 0 and found.parallel == parallel and found.share == 1.0, str(found)
    d = diagnose(r.path, r.checkpoint_path, index=load_index(tmp_path / "index"))
    assert d.verdict == diagnose(r.path, r.checkpoint_path).verdict


def test_every_position_is_looked_at(tmp_path: Path) -> None:
    """Two experts exchanged, also where many are here; without a checkpoint the diagnosis says where the call belongs."""
    r = recorded.call("c02")
    scan(r.checkpoint_path, index=tmp_path / "index")
    call, index = load(r.path), load_index(tmp_path / "index")
    w13 = call.arguments["fc1_expert_weights"][[0, 2, 1, 3]]
    moved = replace(call, arguments={**call.arguments, "fc1_expert_weights": w13})
    assert "2 of 4 positions hold experts in order, from expert 0 on; but position 1 holds expert 2, position 2 holds expert 1\n" in str(where(moved, index))
    assert "; experts 2 of 4 positions hold" in dict(diagnose(moved, index=index).call)["place"]
    many = where(replace(call, arguments={**call.arguments, "fc1_expert_weights": torch.cat([w13, w13])}), index)
    assert many.experts == tuple(enumerate([0, 2, 1, 3, 0, 2, 1, 3]))


def test_the_module_of_a_call_of_experts_is_refused() -> None:
    r = recorded.call("c02")
    with pytest.raises(MxdebugError, match="module: expected none for a mixture of experts"):
        diagnose(r.path, r.checkpoint_path, module="foo")


def test_a_call_of_another_model_is_not_found(tmp_path: Path) -> None:
    scan(recorded.call("c02").checkpoint_path, index=tmp_path / "index")
    with pytest.raises(MxdebugError, match="call and index: expected rows of this call's w13 among those of a layer, got none of them"):
        where(load(recorded.call("c01").path), load_index(tmp_path / "index"))


# -- a cut inside a block -------------------------------------------------------------------------------------------------


def test_an_even_cut_takes_other_scales() -> None:
    """2880 on 8 ranks: 90 blocks, 360 rows a rank; 90 // 8 = 11 columns of scales a rank, those of elements from 352 r on."""
    g = torch.Generator().manual_seed(0)
    down = BlockTensor(*(torch.randint(1, 256, (1, 32, n), generator=g, dtype=torch.uint8) for n in (1440, 90)), MXFP4_BLOCKS)
    up = BlockTensor(*(torch.randint(1, 256, (1, 2880, n), generator=g, dtype=torch.uint8) for n in (16, 1)), MXFP4_BLOCKS)
    part = split_evenly(MoELayer(None, up, down, Activation("relu2")), Parallel(8, 3))
    assert part.up.payload.shape == (1, 384, 16) and torch.equal(part.up.payload[:, :360], up.payload[:, 1080:1440])
    assert torch.equal(part.down.payload[..., :180], down.payload[..., 540:720]) and not part.down.payload[..., 180:].any()
    assert torch.equal(part.down.scales[..., :11], down.scales[..., 33:44]) and not part.down.scales[..., 11:].any()


@pytest.mark.parametrize(("path", "size"), [("mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16", 4), ("mxfp4/FLASHINFER_TRTLLM_MXFP4_BF16", 4),
                                            ("nvfp4/FLASHINFER_TRTLLM", 8)])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_cut_inside_a_block_is_proved_alone_and_with_another_fault(path: str, size: int, rank: int) -> None:
    """Also where the kernel is not told its rank. The scales of w13, 0 after a cast by value, are no proof of that cast."""
    s = probe(path, parallel=Parallel(size, rank))
    assert diagnose(s.call(), s.checkpoint(), tp=s.parallel).findings == ()
    cut = FAULTS["tp-cut-inside-block"].injected(s)
    d = diagnose(cut.call(), s.checkpoint())
    assert {f.id: f.strength for f in d.findings} == {"tp-cut-inside-block": "proved"}, str(d)
    assert f"equal shares of {192 // size}, which are no whole blocks of {s.layer.down.format.block}" in d.findings[0].evidence
    both = FAULTS["nibbles-swapped"].injected(cut, ("w2",))
    assert {f.id for f in diagnose(both.call(), s.checkpoint(), tp=s.parallel).findings} == {"tp-cut-inside-block", "nibbles-swapped"}
    # Where another fault leaves no operand as the cut made it.
    for others in (("experts-rolled",), ("nibbles-swapped", "scales-linear")):
        all_struck = functools.reduce(lambda s, f: FAULTS[f].injected(s), others, cut)
        assert {f.id for f in diagnose(all_struck.call(), s.checkpoint(), tp=s.parallel).findings} == {"tp-cut-inside-block", *others}


@pytest.mark.parametrize(("path", "size", "rank"), [("mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16", 4, 2), ("nvfp4/FLASHINFER_CUTEDSL", 16, 0),
                                                    ("nvfp4/FLASHINFER_CUTEDSL", 8, 6)])
def test_a_rank_whose_share_is_another_one_than_an_even_one(path: str, size: int, rank: int) -> None:
    """Of shares that equal cuts would make inside a block, one of another size: with a right call and with another fault."""
    s = probe(path, parallel=Parallel(size, rank))
    if path == "mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16":  # 160: blocks 2, 2, 1; 40 rows each are 2
        layer = replace(s.layer, **{n: replace(t, payload=t.payload[:, :160], scales=t.scales[:, :160]) for n in ("gate", "up") if (t := getattr(s.layer, n))},
                        down=replace(s.layer.down, payload=s.layer.down.payload[..., :80], scales=s.layer.down.scales[..., :5]),
                        gate_bias=s.layer.gate_bias[:, :160], up_bias=s.layer.up_bias[:, :160])
        s = Situation.right(s.recipe, layer, s.x, s.experts, s.router, s.parallel)
    assert diagnose(s.call(), s.checkpoint(), tp=s.parallel).verdict == "right"
    broken = FAULTS["nibbles-swapped"].injected(s)
    assert {f.id for f in diagnose(broken.call(), s.checkpoint(), tp=s.parallel).findings} == {"nibbles-swapped"}
