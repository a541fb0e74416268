"""Does every fault of the catalogue do what its record says, and is it named when it is injected?

Singles, on every position and every operand that they can strike; then pairs and triples. A fault that is injected must be named,
on the operands that it struck, as proved where bytes prove it; and nothing else may be named.
"""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from making import CONTRACT, POSITIONS, call_of, checkpoint_layer, diagnosed, found, made_layer, situation
from torch import Tensor

from mxdebug.diagnosis import CONSISTENT, PROVED, Diagnosis, diagnose
from mxdebug.errors import MxdebugError
from mxdebug.faults import (CALL_FAULTS, CHECKPOINT_FAULTS, CUT_FAULT, FAULTS, INPUT_FAULTS, KERNEL_FAULTS, OPERAND_FAULTS, OPERANDS, OUTPUT_FAULTS, PARAMETER_FAULTS, RANK_FAULTS, ROUTING_FAULTS,
                            SCALAR_FAULTS, SCALARS, TWO_CALLS_FAULTS, X_FAULTS,
                            Fault, KernelChange, Situation, fault)
from mxdebug.metrics import compare
from mxdebug.faults.linear_records import NEW_FAULTS
from mxdebug.recipes import RECIPES
from mxdebug.reference import Parallel

FULL = ("gptoss-192", "gptoss-tp1", "8-experts-ep1")  # every operand alone, and all together
BRIEF = ("minimax", "gptoss-192-tp1")  # all together


# -- the records ------------------------------------------------------------------------------------------------


def test_catalogue() -> None:
    assert list(FAULTS) == [f.id for f in (*OPERAND_FAULTS, *SCALAR_FAULTS, *CHECKPOINT_FAULTS, *RANK_FAULTS, CUT_FAULT, *PARAMETER_FAULTS, *CALL_FAULTS, *ROUTING_FAULTS, *X_FAULTS, *INPUT_FAULTS, *OUTPUT_FAULTS,
                                              *KERNEL_FAULTS, *TWO_CALLS_FAULTS, *NEW_FAULTS)]
    groups = (OPERAND_FAULTS, SCALAR_FAULTS, CHECKPOINT_FAULTS, RANK_FAULTS, (CUT_FAULT,), PARAMETER_FAULTS, CALL_FAULTS, ROUTING_FAULTS, X_FAULTS, INPUT_FAULTS, OUTPUT_FAULTS, KERNEL_FAULTS, TWO_CALLS_FAULTS, NEW_FAULTS)
    assert len(FAULTS) == sum(map(len, groups))  # no id twice
    assert len({f.title for f in FAULTS.values()}) == len(FAULTS)
    assert fault("scales-128x4") is FAULTS["scales-128x4"]
    with pytest.raises(MxdebugError, match="fault: expected one of scales-8x4, .*, got 'scales-64x4'. Likely reason: these come near"):
        fault("scales-64x4")


@pytest.mark.parametrize("id", FAULTS)
def test_record_is_complete(id: str) -> None:
    f = FAULTS[id]
    assert f.title and f.gives_away and f.needs and f.fix and f.strikes
    assert set(f.strikes) <= set(OPERANDS) or set(f.strikes) <= set(SCALARS) or f.strikes in (("call",), ("kernel",), ("calls",), ("linear",))
    assert all(len(text) < 160 and "\n" not in text for text in (f.title, f.gives_away, f.needs))
    assert all("#" in r for r in f.reports)
    assert (f.change is not None) == (f in KERNEL_FAULTS)
    if f.slots:  # on every path, the slots that give a fault away belong to no other fault of the same operands
        struck = 0
        for r in RECIPES:
            for gated in (True, False):
                if not gated and "TRTLLM_MXFP4" in r.path:
                    continue
                forms = r.plan(made_layer(1, 512, 192, fmt=r.contract.weights, biases="mxfp4" in r.path, gated=gated)).forms
                for key in set(f.strikes) & set(forms):
                    slots = f.slots(key, forms[key], r.contract)
                    same = [g for g in OPERAND_FAULTS if slots and g.slots and key in g.strikes and g.slots(key, forms[key], r.contract) == slots]
                    assert same == ([f] if slots else [])
                    struck += bool(slots)
        assert struck  # and there is a path that it can strike


def test_a_fault_cannot_strike_what_it_does_not_list() -> None:
    with pytest.raises(MxdebugError, match="operand for fault scales-128x4: expected one of w13_scale, w2_scale, got 'w13'"):
        FAULTS["scales-128x4"].injected(situation("gptoss"), ("w13",))


@pytest.mark.parametrize(("id", "position", "words"), [
    ("padding-at-end", "gptoss", "a size that needs padding"), ("padding-not-zero", "minimax", "a size that needs padding"),
    ("wrong-tp-slice", "gptoss", "tp_size above 1"), ("wrong-ep-slice", "gptoss", "ep_size above 1"),
    ("ep-rank", "gptoss", "ep_size above 1"), ("bias-missing", "minimax", "a checkpoint with biases"),
    ("bias-unexpected", "gptoss", "a checkpoint without biases"), ("contract-broken", "minimax", "a checkpoint with biases")])
def test_a_fault_says_where_it_cannot_strike(id: str, position: str, words: str) -> None:
    with pytest.raises(MxdebugError) as error:
        FAULTS[id].injected(situation(position))
    assert error.value.operand == f"situation for fault {id}" and error.value.expected == words


def test_lost_parameters_need_a_checkpoint_that_states_them() -> None:
    s = situation("minimax")
    plain = replace(s, activation=replace(s.activation, alpha=None, beta=None, limit=None))
    with pytest.raises(MxdebugError, match="a checkpoint that states alpha"):
        FAULTS["swiglu-alpha-lost"].injected(plain)


# -- situations -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("position", POSITIONS)
def test_right_situation_emulates_to_itself(position: str) -> None:
    arguments, output = situation(position).build()
    assert compare(CONTRACT.emulate(arguments), output).bit_identical and torch.isfinite(output).all() and output.any()


def changed(a: dict, b: dict) -> set[str]:
    """Operand keys and argument names in which two calls differ."""
    out = set()
    for o in CONTRACT.operands:
        x, y = o.get(a), o.get(b)
        if (x is None) != (y is None) or (x is not None and not torch.equal(x.flatten(), y.flatten())):
            out.add(o.key)
    covered = {o.argument.partition("[")[0] for o in CONTRACT.operands}
    for name in a.keys() - covered:
        x, y = a[name], b[name]
        same = torch.equal(x, y) if isinstance(x, Tensor) and isinstance(y, Tensor) else x is y or (not isinstance(x, Tensor) and x == y)
        if not same:
            out.add(name)
    return out


@pytest.mark.parametrize("id", [f.id for f in OPERAND_FAULTS])
def test_operand_fault_changes_the_operands_that_it_strikes_and_no_other(id: str) -> None:
    for position, brief in (("gptoss-192-tp1", True), ("8-experts-ep1", False), ("minimax", True)):
        right = situation(position, tokens=1)
        before = right.arguments()
        for keys in subsets(FAULTS[id], brief):
            try:
                after = FAULTS[id].injected(right, keys).arguments()
            except MxdebugError:
                continue
            struck = keys[:1] if id == "operand-of-another-expert" else keys
            assert changed(before, after) <= set(struck) | ({"w13_bias", "w2_bias"} if id == "bias-unexpected" else set())
            assert right.arguments().keys() == after.keys() and changed(before, right.arguments()) == set()  # the right one stays right


@pytest.mark.parametrize("id", [f.id for f in (*PARAMETER_FAULTS, *CALL_FAULTS)])
def test_call_fault_changes_its_argument_only(id: str) -> None:
    s = situation("8-experts-ep1")
    want = {"ep-rank": {"ep_rank"}, "router-squared": {"token_final_scales"},
            "gelu-tanh-as-erf": {"activation_type", "swiglu_alpha", "swiglu_beta", "swiglu_limit"},
            "activation-kind": {"activation_type", "swiglu_alpha", "swiglu_beta", "swiglu_limit"}}.get(id, {"_".join(id.split("-")[:2])})
    assert changed(s.arguments(), FAULTS[id].injected(s).arguments()) == want


@pytest.mark.parametrize("id", [f.id for f in KERNEL_FAULTS if f.id != "kernel-router-on-input"] + [f.id for f in OUTPUT_FAULTS[1:]])
def test_kernel_fault_changes_the_output_only(id: str) -> None:
    s = situation("gptoss-tp1" if id == "kernel-bias-on-every-rank" else "8-experts-ep1", tokens=16)
    right, output = s.build()
    arguments, wrong = FAULTS[id].injected(s).build()
    assert changed(right, arguments) == set() and not torch.equal(wrong, output)


def test_refused_call_is_a_crash_dump() -> None:
    """One bias without the other: the kernel refuses the call, so there is no output."""
    arguments, output = FAULTS["contract-broken"].injected(situation("gptoss")).build()
    assert output is None and arguments["fc2_expert_biases"] is None and arguments["fc1_expert_biases"] is not None
    with pytest.raises(MxdebugError, match="biases"):
        CONTRACT.decode(arguments)


def test_kernel_changes_stack_in_order() -> None:
    twice = KernelChange(router=torch.square).then(KernelChange(router=lambda r: r + 1))
    assert twice.router(torch.tensor(3.0)).item() == 10.0


def test_restricting_a_call_to_tokens_changes_no_number() -> None:
    """The same rows, however experts are renumbered, on whatever rank, with scales of any shape, down to one expert."""
    for position in ("8-experts-ep1", "gptoss", "8-experts-tp1-ep1"):
        arguments, output = situation(position, tokens=20).build()
        flat = {**arguments, "quant_scales": [t.flatten() for t in arguments["quant_scales"]]}
        for a, tokens in itertools.product((arguments, flat), ([0, 3, 7], [5], list(range(20)))):
            small = CONTRACT.see(a, tokens=torch.tensor(tokens))
            assert len(small.x) == len(tokens) and small.layer.experts <= CONTRACT.decode(a).experts
            assert torch.equal(small.emulate(), output[tokens])
    arguments, output = situation("gptoss", tokens=20, top_k=1).build()
    one = CONTRACT.see(arguments, tokens=torch.tensor([4]))
    assert one.layer.experts == 1 and torch.equal(one.emulate(), output[4:5])


# -- what is injected is named: singles -------------------------------------------------------------------------


def subsets(f: Fault, brief: bool = False) -> list[tuple[str, ...]]:
    """All operands that a fault can strike, and (unless brief) each alone."""
    keys = tuple(k for k in f.strikes if k in OPERANDS)
    singles = [(k,) for k in keys] if len(keys) > 1 else []
    if f.id == "operand-of-another-expert":  # strikes one at a time
        return singles[:1] if brief else singles
    return [keys] if brief else [keys, *singles]


@functools.cache
def right(position: str) -> tuple[Situation, dict, Tensor]:
    s = situation(position, tokens=6, few=True)
    return s, *s.build()


def expected(f: Fault, keys: tuple[str, ...], struck: set[str], p: Parallel) -> dict[str, set[str]]:
    """Fault id -> operand keys that a diagnosis must name for a fault that changed `struck`: mostly itself, on all of them."""
    readable = struck - ({"w2_bias"} if p.tp_rank else set())  # the w2 bias is read on tp_rank 0 only
    weights = {"w13", "w13_scale", "w2", "w2_scale"}
    if f.id == "contract-broken" or (f.id == "bias-missing" and len(keys) == 1):
        return {"contract-broken": set()}  # one bias without the other
    if f.id == "bias-unexpected":
        return {f.id: set(keys)} if set(keys) & readable else {}
    if f.id == "ep-rank":
        return {f.id: set(OPERANDS)}  # every operand is another rank's
    if f.id == "experts-rolled" and not weights <= struck:
        return {"operand-of-another-expert": readable} if readable else {}  # out of step with the others
    if f.id == "wrong-ep-slice" and weights <= struck:
        return {"ep-rank": readable}  # all of them: then it is the stated rank that is wrong
    return {f.id: readable} if readable or not struck else {}


# At 4 scale columns (128 elements of w2) a tile of 8x4 is linear: pairs of faults that are the same bytes.
TWINS = {"scales-8x4": "scales-linear", "scales-then-8x4": "scales-8x4-then"}


def check_named(position: str, f: Fault, keys: tuple[str, ...]) -> bool:
    """Inject, diagnose, and check what is named; False where the fault cannot strike here, or changes no byte."""
    s, before, output = right(position)
    try:
        arguments, wrong = f.injected(s, keys).build()
    except MxdebugError as error:
        assert "situation for fault" in error.operand or "rows in order" in error.operand, str(error)
        return False
    differing = changed(before, arguments)
    struck = differing & set(OPERANDS)
    d = diagnose(call_of(arguments, wrong), checkpoint_layer(POSITIONS[position][0]))
    context = f"{position}, {f.id} on {keys}: {d}"
    hidden = s.layer.hidden
    if not differing and torch.equal(wrong, output) or f.id == "padding-not-zero" and torch.equal(wrong[:, :hidden], output[:, :hidden]):
        assert d.ok and not d.findings, context
        return False
    want, got = expected(f, keys, struck, s.parallel), {id: set(k) for id, k in found(d).items()}
    if not want:
        assert d.ok, context
        return True
    strength = CONSISTENT if f.id == "router-squared" or (f.id == "scales-cast-by-value" and not any(
        CONTRACT.operand(k).get(arguments).any() for k in struck)) else PROVED  # zeros are what unwritten memory holds, too
    if s.plan.forms["w2_scale"].padded_columns == 4 and struck == {"w2_scale"}:
        for id, twin in (*TWINS.items(), *((b, a) for a, b in TWINS.items())):
            if f.id == id:
                want = {min(id, twin, key=lambda i: i not in got): struck}
                assert any("at this size the same bytes as" in line for line in d.open), context
    assert got == want, context
    assert d.verdict == ("crash dump" if wrong is None else "wrong"), context
    for finding in d.findings:
        assert finding.strength == strength, context
        assert finding.evidence and finding.where and (finding.fault.title in d.summary or wrong is None), context
        if wrong is not None:
            assert finding.effect is not None and (finding.effect > 0.0 or torch.equal(wrong, output)), context
    return True


def slot_names(f: Fault, key: str) -> set[str]:
    """The slots that a fault fills on this path; empty where the path's kernel reads just that."""
    form = situation("gptoss-192").plan.forms[key]
    return set(f.slots(key, form, CONTRACT) or ())


def strikes_here(f: Fault) -> bool:
    """Whether a fault can strike this path; test_path_faults.py has the others."""
    return f.slots is None or any(slot_names(f, k) for k in f.strikes)


# These need scales that the recorded checkpoints do not have, NVFP4, or top-1 routing: test_probe.py has them.
ELSEWHERE = {"scales-small-flushed", "global-folded-into-blocks", "kernel-router-on-input"}
HERE = [f for f in OPERAND_FAULTS if strikes_here(f) and f.id not in ELSEWHERE]
# GELU needs a checkpoint that means it: test_gelu_by_tanh.
CALLS = [f for f in (*PARAMETER_FAULTS, *CALL_FAULTS) if f.id != "gelu-tanh-as-erf"]
WHERE = [*((p, False) for p in FULL), *((p, True) for p in BRIEF)]


@pytest.mark.parametrize("id", [f.id for f in (*HERE, *CALLS)] + ["contract-broken"])
def test_single_fault_is_named_and_nothing_else(id: str) -> None:
    struck = [check_named(position, FAULTS[id], keys) for position, brief in WHERE for keys in subsets(FAULTS[id], brief)]
    assert sum(struck) >= 1


@pytest.mark.parametrize("position", ["gptoss", "8-experts-ep1"])
@pytest.mark.parametrize("id", [f.id for f in INPUT_FAULTS])
def test_input_that_no_right_layer_is_given_is_named(id: str, position: str) -> None:
    """NaN in the activations or router weights, ids of experts that do not exist: with and without a checkpoint."""
    arguments, output = FAULTS[id].injected(right(position)[0]).build()
    for checkpoint in (None, checkpoint_layer(POSITIONS[position][0])):
        d = diagnose(call_of(arguments, output), checkpoint)
        assert found(d) == {id: ()} and d.verdict == "wrong" and d.findings[0].strength == PROVED, str(d)


def test_gelu_by_tanh() -> None:
    """vLLM 0.33 passes Geglu for GELU_TANH, and the kernel computes GELU by erf (run on an H200): named by the argument."""
    s = FAULTS["gelu-tanh-as-erf"].injected(situation("minimax"))
    d = diagnose(call_of(*s.build()), replace(checkpoint_layer("minimax-tiny"), layer=s.layer))
    assert [(f.id, f.strength) for f in d.findings] == [("gelu-tanh-as-erf", PROVED)] and 0 < d.findings[0].effect < 0.01


# -- pairs and triples ------------------------------------------------------------------------------------------

SLOT = {"experts-rolled": "experts", "operand-of-another-expert": "experts", "wrong-ep-slice": "experts", "wrong-tp-slice": "slice",
        "rows-unnamed": "shuffle", "layout-other": "layout", "bias-missing": "all", "bias-unexpected": "all", "operand-not-loaded": "all", "scales-nan": "all"}
LOSES = {"scales-cast-by-value", "scales-as-e4m3-bytes", "rows-unnamed", "bias-missing", "bias-unexpected", "operand-not-loaded", "scales-nan", "experts-stride"}  # no other fault of that operand can be told any more


def slots_of(f: Fault, key: str | None) -> set[tuple[str, str]]:
    """What a fault takes: two faults that take the same cannot be in one call."""
    if key is not None:
        every = ("layout", "values", "order", "padding", "shuffle", "experts", "slice", "fill")
        return {(key, s) for s in (every if f.id in LOSES else slot_names(f, key) if f.slots else (SLOT[f.id],))}
    if f.id == "ep-rank":  # which rank is wrong, the stated one or an operand's, could not be told
        return {(k, "experts") for k in OPERANDS} | {(k, "slice") for k in OPERANDS}
    if f.id == "activation-kind":
        return {("call", n) for n in ("alpha", "beta", "limit")}
    return {("call", f.id.split("-")[1])}


Stack = tuple[str, list[tuple[Fault, tuple[str, ...]]]]


def _stacks(count: int, size: int) -> Iterator[Stack]:
    """`count` seeded samples of `size` faults that take different slots, at a position where all of them can strike."""
    rng = random.Random(size)
    pool = [(f, (k,)) for f in HERE for k in f.strikes if f.id not in ("bias-missing", "bias-unexpected", "padding-not-zero")]
    pool += [(FAULTS["bias-missing"], ("w13_bias", "w2_bias")), (FAULTS["bias-unexpected"], ("w13_bias", "w2_bias"))]
    pool += [(f, ()) for f in CALLS] * 3
    while count:
        position, chosen = rng.choice((*FULL, "minimax")), rng.sample(pool, size)
        taken = [s for f, keys in chosen for k in (keys or (None,)) for s in slots_of(f, k)]
        if len(set(taken)) < len(taken):
            continue
        try:
            s = right(position)[0]
            for f, keys in chosen:
                before, s = s.arguments(), f.injected(s, keys)
                twin = s.parallel.tp_rank and "w2_scale" in keys and f.id in (*TWINS, *TWINS.values())
                if not changed(before, s.arguments()) or twin or (s.parallel.tp_rank and "w2_bias" in keys):
                    raise MxdebugError(f.id, "a change that the kernel reads", "none")
        except MxdebugError:
            continue
        count -= 1
        yield position, chosen


@functools.cache
def stacks(size: int) -> list[Stack]:
    return list(_stacks({2: 60, 3: 30}[size], size))


@pytest.mark.parametrize(("size", "number"), [*((2, i) for i in range(60)), *((3, i) for i in range(30))])
def test_stacked_faults_are_all_named_and_no_other(size: int, number: int) -> None:
    position, chosen = stacks(size)[number]
    s = right(position)[0]
    for f, keys in chosen:
        s = f.injected(s, keys)
    arguments, wrong = s.build()
    d = diagnose(call_of(arguments, wrong), checkpoint_layer(POSITIONS[position][0]))
    want: dict[str, set[str]] = {}
    for f, keys in chosen:
        struck = set(keys) if keys else set()
        for id, operands in expected(f, keys, struck, s.parallel).items():
            want.setdefault(id, set()).update(operands)
    got, made = {id: set(k) for id, k in found(d).items()}, " + ".join(f"{f.id}({','.join(keys)})" for f, keys in chosen)
    assert got == want and d.verdict == "wrong", f"{position}: {made}: {d}"
    for finding in d.findings:
        assert finding.strength == PROVED or finding.id in ("router-squared", "scales-cast-by-value"), f"{position}: {made}: {d}"


# -- what a kernel would do if it broke its contract ------------------------------------------------------------


def reproduces(d: Diagnosis, s: Situation, wrong: Tensor, at_most: int) -> bool:
    """Whether the named broken computations, injected into the right call, give the output bit for bit; no more than were injected."""
    for finding in d.findings:
        s = finding.fault.injected(s)
    return len(d.findings) <= at_most and compare(s.build()[1], wrong).bit_identical


@pytest.mark.parametrize("position", ["gptoss-tp1", "8-experts-ep1"])
@pytest.mark.parametrize("id", [f.id for f in KERNEL_FAULTS])
def test_broken_kernel_is_named_from_its_output(id: str, position: str) -> None:
    """Operands and parameters are right: only the output can say it. Where another computation gives nearly the same, it is named, too."""
    s, arguments, output = right(position)
    wrong = FAULTS[id].injected(s).build()[1]
    d = diagnose(call_of(arguments, wrong), checkpoint_layer(POSITIONS[position][0]))
    distance = compare(wrong, output)
    if distance.bit_identical:
        assert d.ok and not d.findings
    elif distance.relative_l2 > 2e-3 or not d.ok:  # less may pass for rounding
        assert d.verdict == "wrong" and [f.id for f in d.findings] == [id] and reproduces(d, s, wrong, 1), str(d)
        assert "bit for bit" in d.findings[0].evidence and d.findings[0].effect > 0
        assert (d.findings[0].strength == PROVED) == ("so do" not in d.findings[0].evidence)
    assert distance.bit_identical or id == "kernel-clamp-1" or distance.relative_l2 > 2e-3  # gate capped below: silu is next to 0


def test_every_broken_kernel_shows_somewhere() -> None:
    """So that the test above cannot pass because nothing ever differs."""
    for f in (f for f in KERNEL_FAULTS if f.id not in ELSEWHERE):
        outputs = [(f.injected(right(p)[0]).build()[1], right(p)[2]) for p in ("gptoss-tp1", "8-experts-ep1")]
        assert any(not compare(*pair).bit_identical for pair in outputs), f.id


def kernel_stacks() -> list[tuple[str, ...]]:
    rng = random.Random(7)
    pairs = rng.sample(list(itertools.combinations([f.id for f in KERNEL_FAULTS], 2)), 8)
    return pairs


@pytest.mark.parametrize("ids", kernel_stacks(), ids="+".join)
def test_stacked_broken_kernels_are_reproduced(ids: tuple[str, ...]) -> None:
    position = "8-experts-ep1"
    s, arguments, output = right(position)
    broken = s
    for id in ids:
        broken = FAULTS[id].injected(broken)
    wrong = broken.build()[1]
    d = diagnose(call_of(arguments, wrong), checkpoint_layer(POSITIONS[position][0]))
    if compare(wrong, output).relative_l2 > 2e-3:
        assert d.verdict == "wrong" and d.findings, str(d)
        # a fault of the pair may change nothing here, or next to nothing; then fewer are named
        assert {f.id for f in d.findings} <= set(ids) or reproduces(d, s, wrong, len(ids)), str(d)
        assert compare(functools.reduce(lambda t, f: f.fault.injected(t), d.findings, s).build()[1], wrong).relative_l2 < 1e-3, str(d)
    else:
        assert d.ok or {f.id for f in d.findings} <= set(ids), str(d)


def test_operand_and_kernel_faults_are_told_apart() -> None:
    """Rows in the wrong order, and a kernel that does not apply the limit to what it was given."""
    s, _, _ = right("gptoss-tp1")
    both = FAULTS["kernel-ignores-limit"].injected(FAULTS["rows-gate-up"].injected(s))
    d = diagnosed("gptoss-tp1", both)
    assert found(d) == {"rows-gate-up": ("w13", "w13_scale", "w13_bias"), "kernel-ignores-limit": ()} and d.verdict == "wrong"
    assert all(f.strength == PROVED for f in d.findings)


def test_recipes_of_situations_are_those_of_the_engine() -> None:
    assert all(any(s.recipe is r for r in RECIPES) for s in map(situation, POSITIONS))
    assert {situation(p).recipe.checkpoint for p in POSITIONS} == {r.checkpoint for r in RECIPES if r.contract is CONTRACT}
    assert situation("gptoss-tp1").stated == Parallel(2, 1)
