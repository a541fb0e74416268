"""Every fault of the W4A16 linear path, put in and named: by the kernel's call, by one run of the layer, alone and stacked; and no false alarm."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from making import call_of

from mxdebug import MxdebugError, open_checkpoint
from mxdebug.checkpoints import CheckpointLinear
from mxdebug.contracts import LINEAR_CONTRACTS
from mxdebug.contracts.cutedsl_w4a16 import by_layout
from mxdebug.diagnosis import Diagnosis, diagnose, diagnose_run
from mxdebug.diagnosis.linear_operands import memory
from mxdebug.diagnosis.linear_output import follows, linear_floor
from mxdebug.diagnosis.linear_run import load_run, save_run
from mxdebug.faults import FAULTS, LINEAR_FAULTS, LinearRun, LinearSituation, linear_fault
from mxdebug.formats import NVFP4
from mxdebug.recipes.vllm import CT_NVFP4, MODELOPT
from mxdebug.recipes.w4a16.examples import made_linear
from mxdebug.recipes.w4a16.recipe import linear_recipe

PATHS, KINDS = tuple(LINEAR_CONTRACTS), (MODELOPT, CT_NVFP4)
# (parts, K): aligned, N unaligned, K unaligned, both
SIZES = (((64, 64), 384), ((72, 40, 48), 320), ((128,), 352), ((104, 48, 48), 352))
SIGNATURE = (
    "(a: torch.Tensor, b: torch.Tensor, b_descale: torch.Tensor, alpha: Optional[torch.Tensor] = None, *, backend: Literal['cudnn', 'cute-dsl'], "
    "out_dtype: Optional[torch.dtype] = None, out: Optional[torch.Tensor] = None, block_size: int = 16, enable_pdl: bool = True) -> torch.Tensor"
)
LAYER_LEVEL = {id for id, f in LINEAR_FAULTS.items() if f.level == "layer"}


def situation(
    path: str,
    kind: str = MODELOPT,
    parts: tuple[int, ...] = (104, 48, 48),
    k: int = 352,
    *,
    differ: bool = False,
    bias: bool = True,
    seed: int = 0,
) -> LinearSituation:
    layer = made_linear(sum(parts), k, parts=parts, differ=differ, bias=bias, seed=seed)
    x = torch.randn(2, 3, k, generator=torch.Generator().manual_seed(seed + 1)).bfloat16()
    return LinearSituation.right(linear_recipe(path, kind), layer, x)


def chosen(s: LinearSituation) -> CheckpointLinear:
    return CheckpointLinear("model.layers.0.self_attn.qkv_proj", s.recipe.checkpoint, s.layer, {}, s.layer.format.block)


def of_call(s: LinearSituation, **changes: Any) -> Diagnosis:
    arguments, output = s.build()
    return diagnose(call_of({**arguments, **changes}, output, function="mm_bf16_fp4"), chosen(s))


def of_run(s: LinearSituation) -> Diagnosis:
    return diagnose_run(s.run(), chosen(s), s.recipe.contract)


def ids(d: Diagnosis) -> set[str]:
    return {f.id for f in d.findings}


# -- no false alarm ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("parts, k", SIZES)
def test_right_calls_and_runs_are_right(path: str, kind: str, parts: tuple[int, ...], k: int) -> None:
    for bias in (True, False):
        s = situation(path, kind, parts, k, bias=bias)
        for d in (of_call(s), of_run(s)):
            assert d.verdict == "right" and not d.findings and d.ok, str(d)
            assert d.truth.relative_l2 == d.floor.relative_l2 <= 2.0**-8
        assert of_call(s).kernel.bit_identical


@pytest.mark.parametrize("path", PATHS)
def test_rounding_is_no_fault(path: str) -> None:
    """A sum that was added in another order: float32 blocks of 16 in sequence, then alpha."""
    s = situation(path)
    arguments, _ = s.build()
    seen = s.recipe.contract.see(arguments)
    w, x = seen.weight.dequantise(torch.float32, seen.scale), seen.x.float()
    total = torch.zeros(x.shape[0], w.shape[0])
    for b in range(0, x.shape[1], 16):
        total = total + x[:, b : b + 16] @ w[:, b : b + 16].T
    other = (total * seen.alpha).bfloat16()
    assert follows(other, seen.emulate(), 384, seen.absolute())
    assert diagnose(call_of(arguments, other, function="mm_bf16_fp4"), chosen(s)).verdict == "right"


def test_floor_is_derived() -> None:
    assert linear_floor(384) == pytest.approx((384 * 2.0**-24 * 2.0**-8) ** 0.5) == pytest.approx(3.0e-4, rel=0.02)
    assert linear_floor(2880) == pytest.approx(8.2e-4, rel=0.01)


@pytest.mark.parametrize("path", PATHS)
def test_other_encodings_of_the_same_weights_are_no_fault(path: str) -> None:
    """Codes 0 and 8 are 0 and -0: the same weight, another byte. A scale over a block of zeros may be anything."""
    s = situation(path)
    payload = s.layer.payload.clone()
    payload[3, :8] = 0
    layer = replace(s.layer, payload=payload)
    other_payload, other_scales = payload.clone(), layer.scales.clone()
    other_payload[3, :8], other_scales[3, 0] = 0x88, 0x11
    base = LinearSituation.right(s.recipe, layer, s.x)
    twin = LinearSituation.right(s.recipe, replace(layer, payload=other_payload, scales=other_scales), s.x)
    arguments, output = twin.build()
    d = diagnose(call_of(arguments, output, function="mm_bf16_fp4"), chosen(base))
    assert d.verdict == "right" and "no fault" in d.checked[0], str(d)


# -- every fault is named -----------------------------------------------------------------------------------------------


def _able(id: str, path: str, kind: str, parts: tuple[int, ...], k: int) -> LinearSituation | None:
    s = situation(path, kind, parts, k, differ=id == "global-of-another-part")
    try:
        return LINEAR_FAULTS[id].inject(s)
    except MxdebugError:
        return None


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("id", LINEAR_FAULTS)
def test_faults_are_named(id: str, kind: str, path: str) -> None:
    struck = 0
    for parts, k in SIZES:
        s = _able(id, path, kind, parts, k)
        if s is None:
            continue
        struck += 1
        expected = {id} | ({"global-shared-by-parts"} if id == "global-of-another-part" else set())
        d = of_run(s)
        assert ids(d) == expected and not d.ok, str(d)
        assert d.finding(id).strength == ("consistent" if id == "output-unwritten" else "proved")
        d = of_call(s)
        if id in LAYER_LEVEL:
            assert d.verdict == "right" and any(
                "record one run of the layer" in t for t in d.open
            )  # the call is right, and says what it cannot show
        else:
            assert ids(d) == expected and not d.ok, str(d)
            if s.build()[1] is None:
                assert d.verdict == "crash dump"
            elif LINEAR_FAULTS[id].level in ("operand", "call", "checkpoint"):
                if id == "scales-flushed":  # less than rounding in all, and everything in a row of small weights
                    assert not s.build()[1][:, 4].any() and "rows have no others" in d.findings[0].evidence
                    continue
                assert d.finding(id).effect > 2 * d.floor.relative_l2 or id in (
                    "global-shared-by-parts",
                    "global-of-another-part",
                    "global-rounded",
                )
                assert d.truth.relative_l2 > 2 * 2.0**-9 or id == "global-rounded"
    only = {"sm100": ("scales-not-recoded", "scales-flushed", "scales-recoded-for-marlin"), "sm12x": ("scales-view-contiguous",)}
    assert (struck == 0) == (id in only[path.rpartition("/")[2]]), struck


def test_catalogue_has_every_fault_that_can_strike() -> None:
    assert set(LINEAR_FAULTS) <= set(FAULTS) and {"fake-shape", "activations-beyond-fp16"} <= set(FAULTS)
    for id in LINEAR_FAULTS:
        f = FAULTS[id]
        assert f.title and f.fix and f.gives_away and f.needs and linear_fault(id).id == id
    with pytest.raises(MxdebugError, match="one of nibbles-swapped"):
        linear_fault("none")


@pytest.mark.parametrize("path", PATHS)
def test_numbers_of_the_faults(path: str) -> None:
    """What a global scale does to the output is known in advance: the ratio of the two, and nothing to the cosine."""
    s = situation(path)
    g = float(s.plan.global_scale(s.layer))
    for id, factor in (("global-missing", 1 / g), ("global-inverted", g**-2), ("global-other", 1.5)):
        d = of_call(LINEAR_FAULTS[id].inject(s))
        assert d.truth.norm_ratio == pytest.approx(factor, rel=2.0**-7) and d.truth.cosine > 0.99999
        assert d.finding(id).effect == pytest.approx(abs(factor - 1), rel=2.0**-7)


def _pairs() -> list[tuple[str, ...]]:
    operand = [id for id, f in LINEAR_FAULTS.items() if f.level in ("operand", "call") and "x" not in f.strikes and f.layer is None]
    pairs = [p for p in itertools.combinations(operand, 2) if not set(LINEAR_FAULTS[p[0]].slots) & set(LINEAR_FAULTS[p[1]].slots)]
    triples = [
        t
        for t in itertools.combinations(operand, 3)
        if sum(len(LINEAR_FAULTS[i].slots) for i in t) == len({s for i in t for s in LINEAR_FAULTS[i].slots})
    ]
    return [*pairs, *random.Random(3).sample(triples, 40)]


@pytest.mark.parametrize("path", PATHS)
def test_stacked_faults_are_named_each(path: str) -> None:
    done = 0
    for stack in _pairs():
        if "global-folded-into-blocks" in stack and any("scalar" in LINEAR_FAULTS[i].slots for i in stack):
            continue  # a scalar fault on a number that is not passed any more
        s = situation(path, differ="global-of-another-part" in stack)
        try:
            for id in stack:
                s = LINEAR_FAULTS[id].inject(s)
        except MxdebugError:
            continue
        done += 1
        d = of_call(s)
        got = ids(d) - {"global-shared-by-parts"}
        if got != set(stack):  # a stack that is no deeper and gives the same bytes: no data can tell them apart
            twin = situation(path, differ="global-of-another-part" in stack)
            for id in got:
                twin = LINEAR_FAULTS[id].inject(twin)
            assert len(got) <= len(stack)
            for key, t in s.run().operands.items():
                assert torch.equal(memory(t), memory(twin.run().operands[key])), (stack, str(d))
    assert done > 40


@pytest.mark.parametrize("path", PATHS)
def test_refused_calls_still_have_their_operands_examined(path: str) -> None:
    s = LINEAR_FAULTS["activations-not-bf16"].inject(LINEAR_FAULTS["scales-linear"].inject(situation(path)))
    assert ids(of_call(s)) == {"activations-not-bf16", "scales-linear"} == ids(of_run(s))
    assert of_call(s).verdict == "crash dump"


# -- what cannot be named is said so -------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("key", ["b", "b_descale"])
def test_one_changed_byte_is_unexplained(path: str, key: str) -> None:
    s = situation(path)
    arguments, _ = s.build()
    t = arguments[key]
    flat = t.as_strided((t.numel(),), (1,)).clone().view(torch.uint8)
    flat[11] ^= 0x05
    changed = flat.view(t.dtype).as_strided(t.shape, t.stride())
    arguments = {**arguments, key: changed}
    d = diagnose(call_of(arguments, s.recipe.contract.emulate(arguments), function="mm_bf16_fp4"), chosen(s))
    assert d.verdict == "wrong, not explained" and not d.findings
    assert any("199 of 200 rows" in t for t in d.open), str(d)


@pytest.mark.parametrize("path", PATHS)
def test_another_layers_weight_is_foreign(path: str) -> None:
    s, other = situation(path), situation(path, seed=5)
    arguments, output = other.build()
    d = diagnose(call_of(arguments, output, function="mm_bf16_fp4"), chosen(s))
    assert d.verdict == "wrong, not explained" and "no row of this call's weight is this layer's" in d.summary


@pytest.mark.parametrize("path", PATHS)
def test_output_that_does_not_follow(path: str) -> None:
    s = situation(path)
    arguments, output = s.build()
    d = diagnose(call_of(arguments, output * 1.25, function="mm_bf16_fp4"), chosen(s))
    assert d.verdict == "wrong, not explained" and "does not follow" in d.summary
    memory = torch.randn(output.shape, generator=torch.Generator().manual_seed(9)).bfloat16()
    d = diagnose(call_of({**arguments, "out": memory}, memory.clone(), function="mm_bf16_fp4"), chosen(s))
    assert d.finding("output-unwritten").strength == "proved"
    with pytest.raises(MxdebugError, match="belong to another call"):
        diagnose(call_of(arguments, output[:, :64], function="mm_bf16_fp4"), chosen(s))


def test_activations_beyond_fp16() -> None:
    for path in PATHS:
        s = situation(path)
        x = s.x.clone()
        x[1, 2, 7] = 2.0**17
        d = of_call(replace(s, x=x))
        if path.endswith("sm12x"):
            assert ids(d) == {"activations-beyond-fp16"} and not d.truth.masks_equal and "token 5, column 7" in d.findings[0].evidence
        else:
            assert d.verdict == "right"
    # One token: a small layer is always computed in fp16, a large one may take the GEMV, and the output shows which it was.
    for parts, k, large in (((104, 48, 48), 352, False), ((1024,), 1024, True)):
        s = situation(PATHS[1], parts=parts, k=k, bias=False)
        x = s.x[:1, :1].clone()
        x[0, 0, 7] = 2.0**17
        one = replace(s, x=x)
        arguments, output = one.build()
        d = of_call(one)
        assert ids(d) == (set() if large else {"activations-beyond-fp16"}) and bool(torch.isfinite(output).all()) == large, str(d)
        if large:
            converted = replace(s.recipe.contract.see(arguments), products=torch.float16).emulate()
            d = diagnose(call_of(arguments, converted, function="mm_bf16_fp4"), chosen(s))
            assert ids(d) == {"activations-beyond-fp16"}, str(d)
            assert ids(diagnose_run(LinearRun(one.run().operands, x, converted.reshape(1, 1, -1)), chosen(s), s.recipe.contract)) == {
                "activations-beyond-fp16"
            }


@pytest.mark.parametrize("path", PATHS)
def test_lost_rows_of_small_weights_do_not_follow(path: str) -> None:
    """They hide in every number over a token; in the limit for each number they do not."""
    s = situation(path, bias=False)
    arguments, output = s.build()
    lost = output.clone()
    lost[:, 4] = 0
    seen = s.recipe.contract.see(arguments)
    assert output[:, 4].any() and follows(lost, output, 384) and not follows(lost, output, 384, seen.absolute())
    assert diagnose(call_of(arguments, lost, function="mm_bf16_fp4"), chosen(s)).verdict == "wrong, not explained"
    assert (
        diagnose_run(replace(s.run(), output=lost[:, :200].reshape(2, 3, 200)), chosen(s), s.recipe.contract).verdict
        == "wrong, not explained"
    )


def test_nan_in_activations() -> None:
    s = situation(PATHS[0])
    x = s.x.clone()
    x[0, 1, 0] = torch.nan
    assert ids(of_call(replace(s, x=x))) == {"input-not-finite"}


def test_without_a_checkpoint() -> None:
    for path in PATHS:
        s = situation(path)
        arguments, output = s.build()
        d = diagnose(call_of(arguments, output, function="mm_bf16_fp4"))
        assert d.verdict == "undecided" and "--checkpoint" in d.open[-1]
        arguments, output = LINEAR_FAULTS["activations-not-bf16"].inject(s).build()
        assert ids(diagnose(call_of(arguments, output, function="mm_bf16_fp4"))) == {"activations-not-bf16"}
        arguments, output = LINEAR_FAULTS["x-not-padded"].inject(s).build()
        assert ids(diagnose(call_of(arguments, output, function="mm_bf16_fp4"))) == {"contract-broken"}
        arguments, output = s.build()
        assert diagnose(call_of(arguments, torch.zeros_like(output), function="mm_bf16_fp4")).finding("output-unwritten")


def test_vacuity_is_said() -> None:
    s = situation(PATHS[0], parts=(128,), k=256)
    flat = replace(s.layer, scales=torch.full_like(s.layer.scales, 0x38))
    d = of_call(LinearSituation.right(s.recipe, flat, s.x))
    for text in ("all block scales are equal", "its own inverse", "nothing was padded"):
        assert any(text in t for t in d.open), text


def test_group_32_without_a_fault() -> None:
    """A checkpoint with one scale for 32 elements whose scales were repeated: right on a kernel that reads blocks of 16."""
    for path in PATHS:
        s = situation(path)
        coarse = LINEAR_FAULTS["group-32-as-16"].layer(s.layer)
        repeated = replace(coarse, scales=coarse.scales.repeat_interleave(2, 1), format=NVFP4)
        arguments, output = LinearSituation.right(s.recipe, repeated, s.x).build()
        d = diagnose(call_of(arguments, output, function="mm_bf16_fp4"), replace(chosen(s), layer=coarse, group=32))
        assert d.verdict == "right", str(d)


# -- runs as files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    "id", ["none", "scales-view-contiguous", "output-not-sliced", "bias-before-slice", "global-missing", "activations-not-bf16"]
)
def test_a_run_comes_back_from_its_file(path: str, id: str, tmp_path: Path) -> None:
    s = situation(path)
    try:
        s = s if id == "none" else LINEAR_FAULTS[id].inject(s)
    except MxdebugError:
        pytest.skip("not in this layout")
    run = s.run()
    layer = torch.nn.Module()
    layer.weight, layer.weight_scale, layer.weight_global_scale = (run.operands[k] for k in ("weight", "weight_scale", "alpha"))
    file = save_run(tmp_path / "run.safetensors", layer, run.x, run.output, run.error)
    back, contract = load_run(file)
    assert contract.path == path and back.error == run.error
    a, b = diagnose_run(back, chosen(s), contract), of_run(s)
    assert str(a) == str(b)
    assert ids(a) == (set() if id == "none" else {id})


def test_other_files_are_refused(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from mxdebug.recipes.w4a16.converted import ConvertedLinear

    state = ConvertedLinear.convert(made_linear(128, 336), "sm100", MODELOPT).state_dict()
    save_file({k: v.contiguous() for k, v in state.items()}, tmp_path / "state.safetensors")
    with pytest.raises(MxdebugError, match="a state dict of a converted layer"):
        load_run(tmp_path / "state.safetensors")
    (tmp_path / "no.safetensors").write_bytes(b"abc")
    for name in ("no.safetensors", "missing.safetensors"):
        with pytest.raises(MxdebugError, match="that mxdebug.save_run wrote"):
            load_run(tmp_path / name)
    names = {"weight": "weight", "weight_scale": "weight_scale", "alpha": "weight_global_scale"}
    tensors = {names[k]: v.contiguous() for k, v in situation(PATHS[0]).run().operands.items()} | {"x": torch.zeros(1, 352)}
    save_file(tensors, tmp_path / "odd.safetensors", {"mxdebug": "linear run 1", "weight_scale_strides": "1,1,1,1,1,1"})
    with pytest.raises(MxdebugError, match="strides of weight_scale"):
        load_run(tmp_path / "odd.safetensors")
    save_file({**tensors, "weight": torch.zeros(4, 4)}, tmp_path / "odd.safetensors", {"mxdebug": "linear run 1"})
    with pytest.raises(MxdebugError, match="a layer of another kernel"):
        load_run(tmp_path / "odd.safetensors")
    with pytest.raises(MxdebugError, match="not converted yet"):
        save_run(tmp_path / "x.safetensors", torch.nn.Linear(4, 4), torch.zeros(1, 4), None)


def test_a_run_that_raised_something_else() -> None:
    s = situation(PATHS[0])
    run = s.run()
    d = diagnose_run(LinearRun(run.operands, run.x, None, "CUDA error: an illegal memory access"), chosen(s), by_layout("sm100"))
    assert d.verdict == "crash dump" and not d.findings and any("illegal memory" in t for t in d.open)
    d = diagnose_run(LinearRun(run.operands, run.x, run.output * 2), chosen(s), by_layout("sm100"))
    assert d.verdict == "wrong, not explained"


# -- from a checkpoint in the file's own names --------------------------------------------------------------------------


@pytest.fixture(scope="module", params=["modelopt", "compressed-tensors"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    from making_linear import write_compressed_tensors, write_modelopt

    write = {"modelopt": write_modelopt, "compressed-tensors": write_compressed_tensors}[request.param]
    return write(tmp_path_factory.mktemp("model") / request.param, bias=True)


def _calls(model: Path, name: str, path: str) -> LinearSituation:
    found = open_checkpoint(model).linear(name)
    x = torch.randn(5, found.layer.k, generator=torch.Generator().manual_seed(1)).bfloat16()
    return LinearSituation.right(linear_recipe(path, found.kind), found.layer, x)


@pytest.mark.parametrize("path", PATHS)
def test_the_layer_is_found_by_its_rows(model: Path, path: str) -> None:
    names = open_checkpoint(model).linear_names
    assert names == (
        "model.layers.0.mlp.gate_up_proj",
        "model.layers.0.self_attn.qkv_proj",
        "model.layers.0.mlp.down_proj",
        "model.layers.0.self_attn.o_proj",
    )
    for name in names:
        s = _calls(model, name, path)
        for id in ("none", "nibbles-swapped", "parts-reordered", "scales-linear"):
            try:
                arguments, output = (s if id == "none" else LINEAR_FAULTS[id].inject(s)).build()
            except MxdebugError:
                continue
            d = diagnose(call_of(arguments, output, function="mm_bf16_fp4"), model)
            assert ids(d) == (set() if id == "none" else {id}) and name in dict(d.call)["layer"], str(d)
            assert str(diagnose(call_of(arguments, output, function="mm_bf16_fp4"), model, module=name)) == str(d)


@pytest.mark.parametrize("path", PATHS)
def test_tensor_parallel_parts_are_found(model: Path, path: str) -> None:
    for name, axis in (("model.layers.0.self_attn.qkv_proj", "rows"), ("model.layers.0.self_attn.o_proj", "columns")):
        whole = _calls(model, name, path)
        for rank in (0, 1):
            part = whole.layer.part(2, rank, axis)
            s = LinearSituation.right(whole.recipe, part, whole.x[:, : part.k])
            for broken in (s, LINEAR_FAULTS["scales-twice"].inject(s)):
                arguments, output = broken.build()
                for tp in (None, (2, rank)):
                    d = diagnose(call_of(arguments, output, function="mm_bf16_fp4"), model, tp=tp)
                    assert ids(d) == (set() if broken is s else {"scales-twice"}) and f"rank {rank} of 2" in dict(d.call)["layer"], str(d)


def test_repeated_key_and_value_heads_are_found(model: Path) -> None:
    """Four ranks, one key and value head in two shares: ranks 0 and 1 hold the same, 2 and 3."""
    whole = _calls(model, "model.layers.0.self_attn.qkv_proj", PATHS[0])
    q, k, v = whole.layer.rows
    for rank in range(4):
        part = whole.layer.part(4, rank, "rows", kv=2)
        assert part.rows == (q // 4, k // 2, v // 2)
        assert torch.equal(
            part.payload[q // 4 : q // 4 + k // 2], whole.layer.payload[q + rank // 2 * (k // 2) : q + (rank // 2 + 1) * (k // 2)]
        )
        arguments, output = LinearSituation.right(whole.recipe, part, whole.x).build()
        for tp in (None, (4, rank)):
            d = diagnose(call_of(arguments, output, function="mm_bf16_fp4"), model, tp=tp)
            assert d.verdict == "right" and f"rank {rank} of 4, keys and values in 2 shares" in dict(d.call)["layer"], str(d)


def test_a_call_of_no_layer(model: Path, tmp_path: Path) -> None:
    s = situation(PATHS[0], parts=(160,), k=336)
    arguments, output = s.build()
    call = call_of(arguments, output, function="mm_bf16_fp4")
    with pytest.raises(MxdebugError, match="none of the 1 of that size.*--module"):
        diagnose(call, model)
    with pytest.raises(MxdebugError, match="linear layer|qkv_proj"):
        diagnose(call, model, module="model.layers.0.self_attn.qkv")
    with pytest.raises(MxdebugError, match="call and checkpoint"):
        diagnose(call, model, module="model.layers.0.mlp.down_proj")
    assert diagnose(call, model, module="model.layers.0.self_attn.qkv_proj").verdict == "wrong, not explained"
    with pytest.raises(MxdebugError, match="a linear kernel"):
        from making import checkpoint_layer

        diagnose(call, checkpoint_layer("gptoss-tiny"))


def test_moe_call_against_a_linear_checkpoint(model: Path) -> None:
    from making import situation as moe

    with pytest.raises(MxdebugError, match="linear layers only"):
        diagnose(call_of(*moe("gptoss").build()), model)


@pytest.mark.parametrize("path", PATHS)
def test_dumps_and_runs_from_a_terminal(model: Path, path: str, tmp_path: Path) -> None:
    from click.testing import CliRunner

    from mxdebug.cli import main

    s = LINEAR_FAULTS["scales-linear"].inject(_calls(model, "model.layers.0.self_attn.qkv_proj", path))
    arguments, output = s.build()
    call_of(arguments, output, function="mm_bf16_fp4", module="flashinfer.gemm.gemm_bf16_fp4", signature=SIGNATURE).save(
        tmp_path / "dumps", "safetensors"
    )  # keeps no strides
    out = CliRunner().invoke(main, ["diagnose", str(tmp_path / "dumps"), "--checkpoint", str(model)])
    assert out.exit_code == 1 and "WRONG: block scales linear" in out.output and "qkv_proj" in out.output, out.output
    run = LINEAR_FAULTS["output-not-sliced"].inject(_calls(model, "model.layers.0.self_attn.qkv_proj", path)).run()
    names = {"weight": "weight", "weight_scale": "weight_scale", "alpha": "weight_global_scale"}
    file = save_run(tmp_path / "run.safetensors", {names[k]: t for k, t in run.operands.items()}, run.x, run.output)
    out = CliRunner().invoke(main, ["diagnose", str(file), "--checkpoint", str(model)])
    assert out.exit_code == 1 and "the output still has the weight's padding rows" in out.output, out.output
    assert CliRunner().invoke(main, ["diagnose", str(file)]).exit_code == 2
    out = CliRunner().invoke(main, ["contract", path])
    assert out.exit_code == 0 and path in out.output and "flashinfer_cutedsl" in out.output


@pytest.mark.parametrize("path", PATHS)
def test_flashinfers_own_function_is_captured(path: str) -> None:
    """On a machine without Blackwell the call raises: a crash dump, whose arguments are right or not all the same, strides kept."""
    flashinfer = pytest.importorskip("flashinfer")
    from mxdebug.calls import capture

    if torch.cuda.is_available():
        pytest.skip("what FlashInfer says without a GPU")
    s = situation(path)
    for id in ("none", "scales-view-contiguous", "global-missing"):
        try:
            broken = s if id == "none" else LINEAR_FAULTS[id].inject(s)
        except MxdebugError:
            continue
        with capture("mm_bf16_fp4") as calls, pytest.raises(Exception):  # noqa: B017 - whatever FlashInfer raises here
            flashinfer.gemm.mm_bf16_fp4(**broken.arguments())
        assert [c.status for c in calls] == ["crashed"]
        d = diagnose(calls[0], chosen(s))
        assert d.verdict == "crash dump" and ids(d) == (set() if id == "none" else {id}), str(d)


# -- where the rest of the checkpoint knows more --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def layers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two equally large layers: the second one's tensors are of another seed."""
    from making_linear import config, tensors
    from making_nvfp4 import MODELOPT as KIND
    from making_nvfp4 import save

    made = tensors(KIND, bias=True)
    made |= {name.replace("layers.0", "layers.1"): t for name, t in tensors(KIND, bias=True, seed=4).items() if "layers.0" in name}
    return save(tmp_path_factory.mktemp("two") / "layers", made, config(KIND))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("keys", [("weight_scale",), ("weight_scale", "alpha"), ("alpha",)])
def test_operands_of_another_layer(layers: Path, path: str, keys: tuple[str, ...]) -> None:
    own, other = (_calls(layers, f"model.layers.{i}.self_attn.qkv_proj", path) for i in (0, 1))
    arguments, _ = own.build()
    for key in keys:
        own.recipe.contract.operand(key).put(arguments, own.recipe.contract.get(key, other.build()[0]))
    d = diagnose(call_of(arguments, own.recipe.contract.emulate(arguments), function="mm_bf16_fp4"), layers)
    f = d.finding("operand-of-another-layer")
    assert d.verdict == "wrong" and ids(d) == {"operand-of-another-layer"} and f.strength == "proved", str(d)
    assert "layers.1" in f.evidence and len(f.where.split(", ")) == len(keys) and "layers.0" in dict(d.call)["layer"]


@pytest.mark.parametrize("path", PATHS)
def test_another_ranks_weight(model: Path, path: str) -> None:
    for name, axis in (("model.layers.0.self_attn.qkv_proj", "rows"), ("model.layers.0.self_attn.o_proj", "columns")):
        whole = _calls(model, name, path)
        part = whole.layer.part(2, 0, axis)
        arguments, output = LinearSituation.right(whole.recipe, part, whole.x[:, : part.k]).build()
        call = call_of(arguments, output, function="mm_bf16_fp4")
        for module in (None, name, name.rpartition(".")[2]):
            d = diagnose(call, model, tp=(2, 1), module=module)
            assert ids(d) == {"wrong-tp-slice"} and d.verdict == "wrong" and "rank 0 of 2" in d.findings[-1].evidence, str(d)
        d = diagnose(call, model)
        assert d.verdict == "right" and any("--tp SIZE RANK checks" in t for t in d.open)


def test_stated_positions_that_cannot_be(model: Path) -> None:
    s = _calls(model, "model.layers.0.self_attn.qkv_proj", PATHS[0])
    call = call_of(*s.build(), function="mm_bf16_fp4")
    with pytest.raises(MxdebugError, match="call and --tp"):
        diagnose(call, model, tp=(2, 1), module="model.layers.0.self_attn.qkv_proj")
    with pytest.raises(MxdebugError, match="0 <= RANK < SIZE"):
        diagnose(call, model, tp=(2, 2))
    with pytest.raises(MxdebugError, match="--layer"):
        diagnose(call, model, layer=7)


@pytest.mark.parametrize("path", PATHS)
def test_modules_that_were_not_joined(model: Path, path: str) -> None:
    for name in ("q_proj", "k_proj"):
        s = _calls(model, f"model.layers.0.self_attn.{name}", path)
        d = diagnose(call_of(*s.build(), function="mm_bf16_fp4"), model)
        assert d.verdict == "right" and name in dict(d.call)["layer"], str(d)


# -- other mistakes than the catalogue's own injections --------------------------------------------------------------------


@pytest.mark.parametrize("path", PATHS)
def test_parts_in_any_order(path: str) -> None:
    s = situation(path)
    for order, words in (("0,2,1", "part0, part2, part1"), ("1,0,2", "part1, part0, part2"), ("2,0,1", "part2, part0, part1")):
        d = of_run(s.edit(order=order))
        assert ids(d) == {"parts-reordered"} and words in d.findings[0].evidence, str(d)
    both = of_run(LINEAR_FAULTS["scales-linear"].inject(s.edit(order="0,2,1")))
    assert ids(both) == {"parts-reordered", "scales-linear"}
    halves = situation(path, parts=(96, 96))
    d = of_run(halves.edit(order="interleaved"))
    assert ids(d) == {"parts-reordered"} and "a row of each in turn" in d.findings[0].evidence


@pytest.mark.parametrize("path", PATHS)
def test_global_scales_that_were_rounded_or_squared(path: str) -> None:
    s = situation(path)
    for how, id in (("rounded to bf16", "global-rounded"), ("rounded to fp16", "global-rounded"), ("squared", "global-squared")):
        assert ids(of_call(s.edit(scalar=how))) == {id}


@pytest.mark.parametrize("path", PATHS)
def test_it_says_where_an_output_is_off(path: str) -> None:
    s = situation(path)
    arguments, output = s.build()
    for change, words in (
        (lambda t: t[2].zero_(), "1 of 6 tokens (2)"),
        (lambda t: t[:, 152:200].zero_(), "all of them in part2"),
        (lambda t: t[1, 7].fill_(torch.nan), "1 of 200 columns (7 to 7), all of them in part0"),
    ):
        wrong = output.clone()
        change(wrong)
        d = diagnose(call_of(arguments, wrong, function="mm_bf16_fp4"), chosen(s))
        assert d.verdict == "wrong, not explained" and any(words in t for t in d.open), str(d)


@pytest.mark.parametrize("path", PATHS)
def test_dtypes_and_shapes_that_engines_refuse(path: str) -> None:
    s = situation(path)
    run, c = s.run(), s.recipe.contract
    for dtype in (torch.float16, torch.float32, torch.float64, torch.int64):
        assert ids(diagnose_run(replace(run, x=run.x.to(dtype)), chosen(s), c)) == {"activations-not-bf16"}
    with pytest.raises(MxdebugError, match="output of the run: expected torch.bfloat16"):
        diagnose_run(replace(run, output=run.output.half()), chosen(s), c)
    for broken in (
        replace(run, x=run.x[0, 0, 0]),
        replace(run, x=torch.zeros(0)),
        replace(run, output=run.output[0, 0, 0]),
        replace(run, output=torch.zeros(0)),
        replace(run, output=torch.zeros(3, 0, dtype=torch.bfloat16)),
    ):
        with pytest.raises(MxdebugError, match="of the run"):
            diagnose_run(broken, chosen(s), c)
    for alpha in (torch.ones(3), torch.ones(0)):
        assert ids(diagnose_run(replace(run, operands={**run.operands, "alpha": alpha}), chosen(s), c)) == {"contract-broken"}
    arguments, _ = s.build()
    wide = torch.randn(6, 800).bfloat16()[:, :384]
    for change in ({"a": arguments["a"][0]}, {"a": wide}, {"b_descale": arguments["b_descale"].float()}, {"alpha": torch.ones(3)}):
        d = diagnose(call_of({**arguments, **change}, None, function="mm_bf16_fp4"), chosen(s))
        assert d.verdict == "crash dump" and ids(d) == {"contract-broken"}, str(d)


def test_warm_up_calls_say_that_they_show_nothing() -> None:
    s = situation(PATHS[0])
    d = of_call(replace(s, x=torch.zeros(2, 352)))
    assert d.verdict == "right" and any("all activations are zero" in t for t in d.open)
    d = of_call(replace(s, x=torch.zeros(0, 352)))
    assert d.verdict == "right" and any("no tokens" in t for t in d.open)


# -- recorded inside an engine ----------------------------------------------------------------------------------------------


class _Method:
    """As vLLM's quantisation methods: apply(layer, x, bias)."""

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return layer.run(x)


class _Parallel(torch.nn.Module):
    """As vLLM's row-parallel layers: adds up over ranks after quant_method.apply, and hands on (output, bias)."""

    def __init__(self, s: LinearSituation, method: _Method) -> None:
        super().__init__()
        operands = s.run().operands
        self.weight, self.weight_scale, self.weight_global_scale = operands["weight"], operands["weight_scale"], operands["alpha"]
        self.quant_method, self._s = method, s

    def run(self, x: torch.Tensor) -> torch.Tensor:
        run = replace(self._s, x=x).run()
        if run.output is None:
            raise ValueError(run.error)
        return run.output

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, None]:
        return self.quant_method.apply(self, x, None) * 2, None


@pytest.mark.parametrize("path", PATHS)
def test_runs_are_captured_where_the_engine_applies_its_method(path: str, tmp_path: Path) -> None:
    from mxdebug import capture_runs

    s, method = situation(path), _Method()
    model = torch.nn.ModuleDict(
        {
            "a": _Parallel(s, method),
            "b": _Parallel(LINEAR_FAULTS["global-missing"].inject(s), method),
            "c": _Parallel(LINEAR_FAULTS["x-not-padded"].inject(s), _Method()),
            "other": torch.nn.Linear(2, 2),
        }
    )
    with capture_runs(model, tmp_path / "runs") as files:
        for name in ("a", "b", "a"):
            model[name](s.x)
        with pytest.raises(ValueError, match="but"):
            model["c"](s.x)
    assert sorted(f.name.partition("-")[0] for f in files) == ["a", "b", "c"] and "apply" not in vars(method)
    said = {f.name[0]: ids(diagnose_run(load_run(f)[0], chosen(s), s.recipe.contract)) for f in files}
    assert said == {"a": set(), "b": {"global-missing"}, "c": {"x-not-padded"}}
    with pytest.raises(MxdebugError, match="not converted yet"), capture_runs(torch.nn.Linear(2, 2), tmp_path):
        pass
    save_run(tmp_path / "t.safetensors", model["a"], s.x, (s.run().output, None))
    assert ids(diagnose_run(load_run(tmp_path / "t.safetensors")[0], chosen(s), s.recipe.contract)) == set()
    with pytest.raises(MxdebugError, match="output of the run"):
        save_run(tmp_path / "t.safetensors", model["a"], s.x, "text")
