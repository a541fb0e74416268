"""Is each fault of the catalogue named on each path that it can strike? Injected into calls of every kernel, gated and not.

A fault must be named on just the operands that it struck, proved where bytes prove it, and nothing else; a clean call of every path is right.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from making import call_of, made_layer
from torch import Tensor

from mxdebug.checkpoints import CheckpointLayer
from mxdebug.diagnosis import CONSISTENT, PROVED, SUSPECTED, Diagnosis, diagnose
from mxdebug.diagnosis.outputs import follows
from mxdebug.diagnosis.weights import diagnose_weights
from mxdebug.errors import MxdebugError
from mxdebug.faults import (CALL_FAULTS, FAULTS, INPUT_FAULTS, KERNEL_FAULTS, OPERAND_FAULTS, OPERANDS, PARAMETER_FAULTS, SCALAR_FAULTS, SCALARS, Fault, Situation)
from mxdebug.layouts import GATE_UP, INTERLEAVED
from mxdebug.recipes import RECIPES, Recipe
from mxdebug.reference import MoELayer, Parallel

OTHERS = [r for r in RECIPES if "CUTLASS_MXFP4_BF16" not in r.path]
ALL = [pytest.param(r, id=f"{r.path} {r.checkpoint.split(' ')[0]}") for r in OTHERS]
ONE = [pytest.param(r, id=r.path) for r in OTHERS if r.checkpoint in ("gpt-oss", "ModelOpt NVFP4")]


@functools.cache
def layer_of(path: str, gated: bool = True, experts: int = 3) -> MoELayer:
    """A layer of the path: sizes that it pads where it does, global and input scales that fit the data, equal for both halves."""
    r = next(r for r in OTHERS if r.path == path)
    i, h = {"nvfp4/FLASHINFER_CUTLASS": (192, 448), "nvfp4/FLASHINFER_CUTEDSL": (320, 448)}.get(path, (192, 448))
    layer = made_layer(experts, h, i, fmt=r.contract.weights, biases="mxfp4" in path, gated=gated, dtype=torch.bfloat16, seed=5)
    if layer.up.global_scale is None:
        return layer
    scales = torch.tensor([1.0, 1.3, 0.8])[:experts]
    for name in ("gate", "up"):  # so that pre-activations go beyond the limit
        if (w := getattr(layer, name)) is not None:
            layer = replace(layer, **{name: replace(w, global_scale=w.global_scale * 8)})
    layer = replace(layer, w13_input_scale=scales * 4.0 / 2688, w2_input_scale=scales.flip(0) * 60.0 / 2688)
    return layer if layer.gate is None else replace(layer, up=replace(layer.up, global_scale=layer.gate.global_scale))


@functools.cache
def right(path: str, kind: str, gated: bool = True, p: Parallel = Parallel(), tokens: int = 4) -> Situation:
    r = next(r for r in OTHERS if (r.path, r.checkpoint) == (path, kind))
    layer = layer_of(path, gated, 4 if p.ep_size > 1 and "mxfp4" in path else 3)
    g = torch.Generator().manual_seed(1)
    x = (torch.randn(tokens, layer.hidden, generator=g)).bfloat16()
    ids = torch.stack([torch.randperm(layer.experts, generator=g)[:2] for _ in range(tokens)]).int()
    return Situation.right(r, layer, x, ids, torch.softmax(torch.randn(tokens, 2, generator=g), -1), p)


def diagnosed(s: Situation, arguments: dict, output: Tensor | None, sent: list[Tensor] | None = None) -> Diagnosis:
    c = s.recipe.contract
    chosen = CheckpointLayer(0, s.recipe.checkpoint, s.layer, INTERLEAVED if s.recipe.checkpoint == "gpt-oss" else GATE_UP, {}, {}, frozenset())
    tp = s.parallel if s.parallel.tp_size > 1 and "CUTLASS" not in c.path else None
    return diagnose(call_of(arguments, output, function=c.function), chosen, tp=tp, sent=sent)


def found(d: Diagnosis, s: Situation) -> dict[str, set[str]]:
    titles = {o.title: o.key for o in (*s.recipe.contract.operands, *s.recipe.contract.inputs)}
    return {f.id: {titles[t] for t in f.where.split(", ") if titles.get(t) in (*OPERANDS, *SCALARS)} for f in d.findings}


@pytest.mark.parametrize("r", ALL)
def test_clean_calls_are_right(r: Recipe) -> None:
    for gated in (True, False):
        if not gated and "TRTLLM_MXFP4" in r.path:
            continue
        for p in (Parallel(), Parallel(2, 0), Parallel(2, 1), Parallel(1, 0, 3, 1) if "nvfp4" in r.path else Parallel()) if r.path != "nvfp4/FLASHINFER_CUTLASS" or not gated else (Parallel(),):
            s = right(r.path, r.checkpoint, gated, p)
            d = diagnosed(s, *s.build())
            assert d.ok and not d.findings, str(d)


def changed(s: Situation, a: dict, b: dict) -> set[str]:
    """Operand keys in which two calls differ."""
    out = set()
    for o in (*s.recipe.contract.operands, *s.recipe.contract.inputs):
        x, y = o.get(a) if isinstance(a.get(o.argument.partition("[")[0]), (Tensor, list, tuple)) else None, None
        y = o.get(b) if isinstance(b.get(o.argument.partition("[")[0]), (Tensor, list, tuple)) else None
        if (x is None) != (y is None) or (x is not None and (x.shape != y.shape or not torch.equal(o.payload(x) if o.key in OPERANDS and not o.key.endswith("bias") else x,
                                                                                                      o.payload(y) if o.key in OPERANDS and not o.key.endswith("bias") else y))):
            out.add(o.key)
    return out


_CLEAN: dict[int, tuple[Situation, tuple[dict, Tensor | None]]] = {}


def _built(s: Situation) -> tuple[dict, Tensor | None]:
    """A situation's clean call, built once; kept with it, so that no other gets its id."""
    if id(s) not in _CLEAN:
        _CLEAN[id(s)] = s, s.build()
    return _CLEAN[id(s)][1]


def check(s: Situation, f: Fault, keys: tuple[str, ...] | None) -> bool:
    """Inject, diagnose, and check what is named; False where the fault cannot strike here, or changes no byte."""
    before, output = _built(s)
    try:
        broken = f.injected(s, keys)
        arguments, wrong = broken.build()
    except MxdebugError:
        return False
    struck = changed(s, before, arguments) & {*OPERANDS, *SCALARS}
    d = diagnosed(s, arguments, wrong)
    context = f"{s.recipe.path}, {f.id} on {keys} (struck {struck}): {d}"
    if not struck and wrong is not None and torch.equal(wrong, output):
        assert d.ok, context
        return False
    if f.id == "padding-not-zero" and d.ok:  # it meets zeros
        return False
    if wrong is None:
        assert [x.id for x in d.findings] == ["contract-broken"], context
        return True
    got = found(d, s)
    want = {f.id: struck & set(f.strikes) if f.strikes != ("call",) else set()}  # folding changes alpha too, which the bytes speak for
    if "CUTEDSL" in s.recipe.path and f.id in ("swiglu-alpha-changed", "swiglu-beta-changed"):
        want = {f.id.replace("changed", "lost"): set()}  # one number with a default: 1 and 0 are "not passed"
    if f.id == "experts-rolled" and not {k for k in s.plan.forms if "bias" not in k} <= struck:
        want = {"operand-of-another-expert": struck}
    if got != want and set(got) != {f.id}:
        # At some sizes two faults are the same bytes; then the diagnosis must name this one too.
        said = [line for line in d.open if "same bytes as" in line or "other reading" in line]
        said += [x.evidence for x in d.findings if "same numbers" in x.evidence]
        name = {"scales-twice": "applied twice"}.get(f.id, f.id)  # a form is told by its steps
        assert any(name in line for line in said), context
        return True
    assert got == want, context
    assert d.verdict == "wrong", context
    assert all(x.effect is None or x.effect > 0 for x in d.findings), context
    return True


@pytest.mark.parametrize("r", ONE)
def test_operand_faults_are_named(r: Recipe) -> None:
    named = set()
    for gated in (True, False):
        if not gated and "TRTLLM_MXFP4" in r.path:
            continue
        s = right(r.path, r.checkpoint, gated)
        for n, f in enumerate(OPERAND_FAULTS):
            keys = tuple(k for k in f.strikes if k in s.plan.forms)
            # All operands together, and one alone, another one for each fault; test_faults.py has every one on the first path.
            if keys and check(s, f, keys):
                named.add(f.id)
            turn = n % len(keys) if keys else 0
            if len(keys) > 1 and any(check(s, f, (k,)) for k in (*keys[turn:], *keys[:turn])):
                named.add(f.id)
    expected = {"experts-rolled", "operand-of-another-expert", "nibbles-swapped", "scales-linear", "scales-twice", "scales-8x4", "scales-cast-by-value",
                "weights-sm90-interleave", "rows-unnamed"}
    assert expected <= named, expected - named
    assert ("rows-not-shuffled" in named) == ("TRTLLM" in r.path)
    assert ("rows-swapped-without-gate" in named) == ("TRTLLM_MXFP4" not in r.path)
    assert ("rows-up-gate" in named) == ("CUTLASS" not in r.path) and "rows-gate-up" in named


@pytest.mark.parametrize("r", [p for p in ONE if "nvfp4" in p.values[0].path])
def test_global_scale_faults_are_named(r: Recipe) -> None:
    named = set()
    for gated in (True, False):
        s = right(r.path, r.checkpoint, gated)
        for f in SCALAR_FAULTS:
            for key in f.strikes:
                if check(s, f, (key,)):
                    named.add(f.id)
    assert named >= {f.id for f in SCALAR_FAULTS} - {"global-of-other-half"}


def test_a_scale_that_only_the_caller_read_is_a_suspicion_until_a_sender_speaks() -> None:
    """The kernel does not read quant_scales[0] for quantised activations: the output is the right one's, and no proof of another number is in the call."""
    s = right("nvfp4/FLASHINFER_CUTLASS", "ModelOpt NVFP4")
    for stack in ((), ("global-other",)):
        arguments = dict((FAULTS[stack[0]].injected(s, ("w2_alpha",)) if stack else s).arguments())
        arguments["quant_scales"] = [arguments["quant_scales"][0] * 0.5, *arguments["quant_scales"][1:]]
        d = diagnosed(s, arguments, s.recipe.contract.emulate(arguments))
        assert [(f.strength, f.where, f.effect is None) for f in d.findings] == [*([(PROVED, "w2 alpha", False)] if stack else []), (SUSPECTED, "1 / w13 input scale", True)], str(d)
        assert d.verdict == ("wrong" if stack else "undecided") and (stack or d.truth.relative_l2 == pytest.approx(d.floor.relative_l2))


def test_tokens_that_were_quantised_with_another_scale_are_named() -> None:
    """What they were before says so: `sent`. Without it the number is a suspicion; among converted weights it is the engine's own."""
    s = right("nvfp4/FLASHINFER_CUTLASS", "ModelOpt NVFP4")
    made = s.plan.scalars(s.layer)
    for factor, want, strength in ((0.5, "global-other", CONSISTENT), (1 / made["a1_gscale"] ** 2, "global-inverted", CONSISTENT), (0.0, "global-not-loaded", SUSPECTED)):
        a1 = made["a1_gscale"] * factor
        plan = replace(s.plan, scalars=lambda layer: {**made, "a1_gscale": a1, "x_gscale": a1[0]})
        d = diagnosed(s, *replace(s, plan=plan).build(), sent=[s.x])
        assert [(f.id, f.strength, f.where) for f in d.findings] == [(want, strength, "1 / w13 input scale")], str(d)
        assert d.verdict == ("undecided" if strength == SUSPECTED else "wrong")
        assert (d.findings[0].effect or 0) > 0.3 and d.truth.relative_l2 > 2 * d.floor.relative_l2 if strength == CONSISTENT else d.findings[0].effect is None
        weights = {k: t for k, t in {**s.operands(), "a1_gscale": a1}.items() if t is not None and k != "x_gscale"}
        chosen = CheckpointLayer(0, "ModelOpt NVFP4", s.layer, GATE_UP, {}, {}, frozenset())
        assert [f.id for f in diagnose_weights(weights, s.recipe.path, chosen).findings] == [want]


def test_an_inner_activation_that_saturates_is_said() -> None:
    """Nothing is wrong with the call: the checkpoint's input scale of w2 is too small for these tokens."""
    s = right("nvfp4/FLASHINFER_CUTLASS", "ModelOpt NVFP4")
    small = Situation.right(s.recipe, replace(s.layer, w2_input_scale=s.layer.w2_input_scale / 20), s.x, s.experts, s.router)
    for made, want in ((s, False), (small, True)):
        d = diagnosed(made, *made.build())
        assert d.ok and any("of the inner activation saturate" in line for line in d.open) == want, str(d)
    assert any(f"holds {s.layer.w2_input_scale.max().item() / 20 * 2688:.3g}." in line for line in d.open) and d.floor.relative_l2 > 0.2


@pytest.mark.parametrize("r", [p for p in ONE if "nvfp4" in p.values[0].path])
def test_experts_that_changed_places_with_all_that_is_theirs(r: Recipe) -> None:
    """Operands and global scales alike: one fault. Scales that are neither the checkpoint's nor those experts' are another."""
    s = right(r.path, r.checkpoint)
    order, made = [0, 2, 1], s.plan.scalars(s.layer)
    plan = s.plan
    for key in plan.forms:
        plan = plan.edit(key, experts=tuple(order))
    for factor, want in ((1.0, {"experts-rolled"}), (1.5, {"experts-rolled", "global-other"})):
        scalars = {k: t if not t.dim() else t[order] * (factor if k == "w2_alpha" else 1.0) for k, t in made.items()}
        d = diagnosed(s, *replace(s, plan=replace(plan, scalars=lambda layer: scalars)).build())
        assert {f.id for f in d.findings} == want and "w13 alpha" in d.finding("experts-rolled").where, str(d)
        assert "the numbers of the experts that stand here" in d.finding("experts-rolled").evidence
    assert d.finding("global-other").where == "w2 alpha"


@pytest.mark.parametrize("keys", [None, ("w13_alpha",)])
def test_scale_that_was_never_loaded_is_not_blamed_on_limit_and_beta(keys: tuple[str, ...] | None) -> None:
    """TRT-LLM takes both divided by w13 alpha: where that is 0 they cannot be told, and only the scale is wrong."""
    s = right("nvfp4/FLASHINFER_TRTLLM", "ModelOpt NVFP4")
    d = diagnosed(s, *FAULTS["global-not-loaded"].injected(s, keys).build())
    assert [f.id for f in d.findings] == ["global-not-loaded"], str(d)
    made = FAULTS["swiglu-limit-changed"].injected(FAULTS["global-not-loaded"].injected(s, keys))
    assert {f.id for f in diagnosed(s, *made.build()).findings} == {"global-not-loaded", "swiglu-limit-changed"}  # the other experts' limit is still compared


@pytest.mark.parametrize("r", ONE)
def test_call_and_parameter_faults_are_named(r: Recipe) -> None:
    s = right(r.path, r.checkpoint)
    named = {f.id for f in (*PARAMETER_FAULTS, *CALL_FAULTS) if f.id != "gelu-tanh-as-erf" and check(s, f, None)}
    assert {f"swiglu-{n}-{how}" for n in ("alpha", "beta", "limit") for how in ("lost", "changed")} <= named
    assert "router-squared" in named


@pytest.mark.parametrize("r", ONE)
def test_broken_computations_are_named(r: Recipe) -> None:
    """Each computation that breaks the contract is named, alone or among those that give the same numbers; or its effect is below the
    rounding floor, and the call passes."""
    named = set()
    for f in KERNEL_FAULTS:
        p = Parallel(1, 0, 3, 1) if f.id == "kernel-ep-rank-ignored" and "nvfp4" in r.path else Parallel()
        s = right(r.path, r.checkpoint, True, p, 4)
        arguments, wrong = f.injected(s).build()
        clean = _built(s)[1]
        if torch.equal(wrong, clean):
            continue  # nothing that it could change: no biases, one rank
        d = diagnosed(s, arguments, wrong)
        if follows(wrong, clean, s.plan.padded[1], r.contract.roundings):
            assert d.ok, str(d)
            continue
        assert any(f.id == x.id or f.id in x.evidence for x in d.findings), f"{f.id}: {d}"
        assert {x.id for x in d.findings} <= {x.id for x in KERNEL_FAULTS}, str(d)
        named.add(f.id)
    assert named >= {"kernel-gate-up-swapped", "kernel-router-twice", "kernel-router-ignored", "kernel-nibbles-swapped", "kernel-ignores-beta"}
    assert ("kernel-fc1-bias-ignored" in named) == ("mxfp4" in r.path) and ("kernel-ep-rank-ignored" in named) == ("nvfp4" in r.path)


@pytest.mark.parametrize("r", ONE)
def test_input_and_output_faults_are_named(r: Recipe) -> None:
    s = right(r.path, r.checkpoint)
    for f in (*INPUT_FAULTS, FAULTS["output-unwritten"]):
        if f.id == "input-not-finite" and r.contract.activations is not None:
            continue  # NaN does not survive quantisation as NaN in every format
        arguments, output = f.injected(s).build()
        assert {x.id for x in diagnosed(s, arguments, output).findings} == {f.id}, f.id


def test_global_scales_that_differ_by_half_are_said() -> None:
    """w3's global scale is twice w1's, and the kernel takes one: the recipe itself loses that, so the call is not right."""
    s = right("nvfp4/FLASHINFER_CUTLASS", "ModelOpt NVFP4")
    layer = replace(s.layer, up=replace(s.layer.up, global_scale=s.layer.gate.global_scale * 2))
    s = Situation.right(s.recipe, layer, s.x, s.experts, s.router)
    d = diagnosed(s, *s.build())
    assert [f.id for f in d.findings] == ["global-shared-by-halves"] and d.findings[0].strength == PROVED and "2 times w1's" in d.findings[0].evidence
    assert d.truth.relative_l2 > d.floor.relative_l2 * 0.99 and d.truth.relative_l2 > 0.15


def test_global_scale_of_the_other_half_is_named() -> None:
    s = right("nvfp4/FLASHINFER_TRTLLM", "ModelOpt NVFP4")
    layer = replace(s.layer, up=replace(s.layer.up, global_scale=s.layer.gate.global_scale * torch.tensor([1.5, 0.5, 2.0])))
    s = Situation.right(s.recipe, layer, s.x, s.experts, s.router)
    d = diagnosed(s, *FAULTS["global-of-other-half"].injected(s, ("w13_alpha",)).build())
    assert {f.id for f in d.findings} >= {"global-of-other-half", "global-shared-by-halves"}


# -- activation scales --------------------------------------------------------------------------------------------

SWIZZLED = "mxfp4/FLASHINFER_CUTLASS_MXFP4_MXFP8", "gpt-oss"
TWO_RANKS = Parallel(1, 0, 2, 0)


def completed(s: Situation) -> Diagnosis:
    """The diagnosis of a call that returned something, since the kernels do not check the size of this buffer."""
    arguments, output = s.build()
    tokens = len(s.x)
    return diagnosed(s, arguments, torch.ones(tokens, s.plan.padded[1], dtype=torch.bfloat16) if output is None else output)


@pytest.mark.parametrize(("id", "tokens", "strength", "words"), [
    ("x-scales-linear", 6, "consistent", "too short"), ("x-scales-linear", 200, "consistent", "too short"),
    ("x-scales-linear", 128, "consistent", "not 128x4"),
    ("x-scales-before-exchange", 6, "consistent", "2 tiles of 128 rows and 1 hold all rows"), ("x-scales-before-exchange", 200, "consistent", "the scale 0x00, as padding has")])
def test_order_of_activation_scales_is_named(id: str, tokens: int, strength: str, words: str) -> None:
    """By size; where the size fits, by padding: 448 columns of elements are padded to 512, whose scales are 0x00."""
    s = FAULTS[id].injected(right(*SWIZZLED, True, TWO_RANKS, tokens))
    d = completed(s)
    assert [(f.id, f.strength) for f in d.findings] == [(id, strength)] and words in d.findings[0].evidence, str(d)
    assert d.verdict == "wrong" and ": proved by" not in d.findings[0].evidence, str(d)


@pytest.mark.parametrize("p", [Parallel(), TWO_RANKS])
def test_linear_scales_in_a_buffer_for_swizzled_ones(p: Parallel) -> None:
    """The size is right then: that no rank swizzled them shows in the zeros. With one rank no exchange is accused; bytes in no order are called just that."""
    s = right(*SWIZZLED, True, p, 6)
    arguments, _ = s.build()
    scales, linear = arguments["input_sf"], torch.zeros(128, 16, dtype=torch.uint8)
    linear[:6] = s.recipe.contract.activations_of(arguments).scales
    for buffer, id, words in ((linear, "x-scales-linear", "linear at the start of a buffer for 128x4"), (scales.flatten().roll(1), "x-scales-zero", "no known order")):
        if id == "x-scales-zero" and p is TWO_RANKS:
            continue  # there it could be the ranks' own swizzles
        made = {**arguments, "input_sf": buffer.reshape(scales.shape)}
        d = diagnosed(s, made, s.recipe.contract.emulate(made))
        assert [(f.id, f.strength) for f in d.findings] == [(id, CONSISTENT)] and words in d.findings[0].evidence and d.verdict == "wrong", str(d)


def test_kernel_that_reads_linear_scales_is_handed_swizzled_ones() -> None:
    s = FAULTS["x-scales-swizzled"].injected(right("nvfp4/FLASHINFER_TRTLLM", "ModelOpt NVFP4", tokens=200))
    assert [f.id for f in completed(s).findings] == ["x-scales-swizzled"]


def test_only_the_senders_decide_where_rows_fill_the_tiles() -> None:
    """128 rows, 512 columns without padding, no level of rows or columns: the call alone cannot tell, what was sent does."""
    layer = made_layer(2, 512, 256, biases=True, dtype=torch.bfloat16)
    r = next(r for r in OTHERS if (r.path, r.checkpoint) == SWIZZLED)
    g = torch.Generator().manual_seed(2)
    x = (torch.randn(128, 512, generator=g) * torch.rand(128, 512, generator=g).exp2()).bfloat16()
    s = Situation.right(r, layer, x, torch.zeros(128, 1).int(), torch.ones(128, 1))
    chosen = CheckpointLayer(0, "gpt-oss", layer, INTERLEAVED, {}, {}, frozenset())
    for made, want in ((s, []), (FAULTS["x-scales-linear"].injected(s), ["x-scales-linear"])):
        call = call_of(*made.build())
        alone, told = diagnose(call, chosen), diagnose(call, chosen, sent=[x])
        assert not alone.findings and any("equally long" in line for line in alone.open) and alone.verdict == "undecided", str(alone)
        assert [f.id for f in told.findings] == want and not any("equally long" in line for line in told.open), str(told)
        assert told.verdict == ("wrong" if want else "right") and (not want or told.findings[0].strength == PROVED)
        astray = diagnose(call, chosen, sent=[x[:, :200]])
        assert astray.verdict == "undecided" and "what was sent does not fit this call" in astray.open[0]


def test_senders_of_nvfp4_tokens_decide_with_the_global_scale_of_call_or_checkpoint() -> None:
    """CUTLASS is told a1_gscale; TRT-LLM is not: there the checkpoint's largest input scale is taken."""
    for path, id in (("nvfp4/FLASHINFER_CUTLASS", "x-scales-linear"), ("nvfp4/FLASHINFER_TRTLLM", "x-scales-swizzled")):
        s = right(path, "ModelOpt NVFP4", True, Parallel(), 128)
        x = (s.x.float() * torch.rand(128, 1, generator=torch.Generator().manual_seed(1))).bfloat16()
        s = replace(s, x=x)
        chosen = CheckpointLayer(0, "ModelOpt NVFP4", s.layer, GATE_UP, {}, {}, frozenset())
        for made, want in ((s, set()), (FAULTS[id].injected(s), {id})):
            arguments, output = made.build()
            output = torch.ones(128, made.plan.padded[1], dtype=torch.bfloat16) if output is None else output
            d = diagnose(call_of(arguments, output, function=s.recipe.contract.function), chosen, sent=[x])
            assert {f.id for f in d.findings} == want and (want or d.ok), str(d)
            unsent = diagnose(call_of(arguments, output, function=s.recipe.contract.function), chosen)
            said = [any("with which global scale the tokens were quantised" in line for line in t.open) for t in (d, unsent)]
            assert want or said == [False, "TRTLLM" in path], str(unsent)


@pytest.mark.parametrize("r", [p for p in ONE if p.values[0].contract.activations is not None])
def test_scales_of_zero_are_no_order(r: Recipe) -> None:
    """One scale byte is 0 under codes that are not: suspected as what it is, and never taken for padding out of place."""
    s = FAULTS["x-scales-zero"].injected(right(r.path, r.checkpoint))
    d = diagnosed(s, *s.build())
    assert [(f.id, f.strength) for f in d.findings] == [("x-scales-zero", "suspected")] and "the first is token 0, block 2" in d.findings[0].evidence, str(d)
    assert d.verdict == "undecided" and "suspected, no more: activation scales are 0" in d.summary, str(d)


@pytest.mark.parametrize("r", ONE)
def test_gelu_by_tanh_on_a_kernel_that_computes_erf(r: Recipe) -> None:
    """vLLM 0.33 maps GELU_TANH to Geglu; CUTLASS computes it with erf. The outputs differ by little: it is the argument that proves it."""
    s = right(r.path, r.checkpoint)
    if "CUTLASS" not in r.path:
        with pytest.raises(MxdebugError, match="activation: expected one of silu"):
            FAULTS["gelu-tanh-as-erf"].injected(s).arguments()
        return
    made = FAULTS["gelu-tanh-as-erf"].injected(s)
    d = diagnosed(made, *made.build())
    assert [f.id for f in d.findings] == ["gelu-tanh-as-erf"] and d.findings[0].strength == PROVED


@pytest.mark.parametrize("r", [p for p in ONE if p.values[0].path != "nvfp4/FLASHINFER_CUTLASS"])
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_tensor_parallel_position_is_found_where_the_kernel_is_not_told(r: Recipe, rank: int) -> None:
    """By the bytes of w2, or of w13 where w2 is wrong; where both are wrong the size alone remains, and the error says what to state."""
    s = right(r.path, r.checkpoint, True, Parallel(3, rank))
    c, chosen = r.contract, CheckpointLayer(0, r.checkpoint, s.layer, INTERLEAVED if r.checkpoint == "gpt-oss" else GATE_UP, {}, {}, frozenset())
    for made, want in ((s, set()), (FAULTS["nibbles-swapped"].injected(s, ("w2",)), {"nibbles-swapped"})):
        d = diagnose(call_of(*made.build(), function=c.function), chosen)
        assert {f.id for f in d.findings} == want and f"tp_rank {rank} of 3" in dict(d.call)["layer"], str(d)
    if "CUTLASS" not in r.path:
        both = FAULTS["nibbles-swapped"].injected(s)
        with pytest.raises(MxdebugError, match="--tp SIZE RANK"):
            diagnose(call_of(*both.build(), function=c.function), chosen)
        assert {f.id for f in diagnose(call_of(*both.build(), function=c.function), chosen, tp=Parallel(3, rank)).findings} == {"nibbles-swapped"}


def test_output_without_the_padding_of_the_hidden_size() -> None:
    """vLLM hands TRT-LLM an output of 448 columns where the kernel computes 512; the other 64 are not written anywhere."""
    for path, kind in (("mxfp4/FLASHINFER_TRTLLM_MXFP4_MXFP8", "gpt-oss"), ("mxfp4/FLASHINFER_TRTLLM_MXFP4_BF16", "gpt-oss")):
        s = right(path, kind)
        arguments, output = s.build()
        assert output.shape[1] == 512 and not output[:, 448:].any()
        cropped = {**arguments, "output": torch.zeros(len(output), 448, dtype=torch.bfloat16)}
        assert diagnosed(s, cropped, output[:, :448]).ok
        broken, wrong = FAULTS["rows-not-shuffled"].injected(s, ("w2",)).build()
        d = diagnosed(s, {**broken, "output": cropped["output"]}, wrong[:, :448])
        assert [f.id for f in d.findings] == ["rows-not-shuffled"] and d.findings[0].effect > 0.5
        with pytest.raises(MxdebugError, match="output: expected shape .*448"):
            diagnosed(s, cropped, output)
