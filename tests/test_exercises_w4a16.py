"""The exercises of notebook 03: right answers, what each wrong one is said to mean, and answers that make no sense."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from mxdebug import MxdebugError, open_checkpoint, recorded
from mxdebug.contracts.cutedsl_w4a16 import by_layout
from mxdebug.diagnosis import diagnose_run
from mxdebug.exercises import WIDTH
from mxdebug.exercises_w4a16 import W4A16_EXERCISES, check, linear_scales, mystery
from mxdebug.faults import LINEAR_FAULTS
from mxdebug.recipes.w4a16.recipe import linear_recipe

FOUND = open_checkpoint(recorded.W4A16).linear("model.layers.0.self_attn.qkv_proj")
SOLUTION = ("scales-view-contiguous", "bias-missing")


def flat(answer: Any) -> str:
    assert max(map(len, str(answer).splitlines())) <= WIDTH
    return " ".join(str(answer).split())


# -- padding --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("answer", "right", "says"), [
    ((), None, "what is its dtype?"), ((None, 48), None, "NOT ANSWERED"), ((24, ...), None, "NOT ANSWERED"),
    ((24,), None, "NOT ANSWERED"), (((24, None),), None, "NOT ANSWERED"),
    ((24, 48), True, "2896 + 2 * 24 = 2944 elements"), (((24, 48),), True, "PackedBytes and Elements"),
    ((24, 24), False, "fault x-padded-by-bytes. FlashInfer says then: a.shape[1]=2920 but b.shape=(64, 1472) encodes K=2944"),
    ((24, 0), False, "fault x-not-padded. FlashInfer says then: a.shape[1]=2896 but"),
    ((24, 96), False, "was taken twice. FlashInfer says then: a.shape[1]=2992 but"),
    ((48, 48), False, "the factor between them would be taken twice. The number of elements is right."),
    ((48, 24), False, "fault x-padded-by-bytes"), ((48, 0), False, "fault x-not-padded"),
    ((0, 0), False, "K 2896: no multiple of 64, and the kernel refuses the weight"),
    ((56, 112), False, "K 3008: a multiple of 64, not the next"),
    ((24, 5), False, "2896 + 5 elements wide, which is not the padded weight"), ((8, 48), False, "the weight has 1456 bytes a row, so K 2912"),
    ((True, 48), False, "this is bool"), ((24, "48"), False, "the padding of activations is a whole number, this is str"),
    ((24.0, 48), False, "this is float"), ((-24, 48), False, "this is -24"), ((24, 10**15), False, "less than K, which is 2896"),
    ((torch.tensor(24), 48), True, "2944 elements"), ((torch.tensor([24]), 48), False, "this is Tensor"), (([1, 2, 3], 4), False, "this is list"),
])
def test_padding(answer: tuple[Any, ...], right: bool | None, says: str) -> None:
    got = check("padding", *answer)
    assert got.right is right and says in flat(got), str(got)


def test_no_pair_of_numbers_raises_and_one_is_right() -> None:
    right = [pair for pair in itertools.product((*range(0, 70, 4), 2895), repeat=2) if check("padding", *pair).right]
    assert right == [(24, 48)]


# -- prepare --------------------------------------------------------------------------------------------------------------


def padded(t: Tensor) -> Tensor:
    out = torch.zeros(-(-t.shape[0] // 128) * 128, -(-t.shape[1] // 4) * 4, dtype=torch.uint8)
    out[: t.shape[0], : t.shape[1]] = t
    return out


def axes(t: Tensor, *order: int) -> Tensor:
    p = padded(t)
    return p.reshape(p.shape[0] // 128, 4, 32, p.shape[1] // 4, 4).permute(order).reshape(p.shape)


def solution(t: Tensor) -> Tensor:
    return axes(t, 0, 3, 2, 1, 4)


def backwards(t: Tensor) -> Tensor:
    p = padded(t)
    return p.reshape(p.shape[0] // 128, p.shape[1] // 4, 32, 4, 4).permute(0, 3, 2, 1, 4).reshape(p.shape)


def reordered(t: Tensor) -> Tensor:
    return solution(torch.cat([t[152:], t[104:152], t[:104]]) if len(t) == 200 else t)


def inplace(t: Tensor) -> Tensor:
    out = solution(t)
    t.zero_()
    return out


@pytest.mark.parametrize(("answer", "right", "says"), [
    (None, None, "give a function"), (..., None, "give a function"), (lambda t: None, None, "returns nothing yet"),
    (lambda t: ..., None, "which axis of the pattern runs fastest"), (solution, True, "[32, 4, 2, 4, 6, 1]: no byte moves"), (inplace, True, "another size"),
    (lambda t: solution(t).flatten(), False, "the bytes are right, in a tensor of shape [6144]"),
    (padded, False, "scales-linear: block scales linear [proved]. Nothing would raise, and the layer's output would be off: relative"),
    (lambda t: solution(solution(t)), False, "scales-twice"), (reordered, False, "parts-reordered"),
    (lambda t: solution(t.view(torch.float8_e4m3fn).to(torch.uint8)), False, "scales-cast-by-value"),
    (lambda t: padded(t).T, False, "transposed: memory runs along N"), (backwards, False, "the opposite permute"),
    (lambda t: axes(t, 0, 3, 1, 2, 4), False, "The first wrong one is byte 4: the kernel looks there for row 32, column 0"),
    (lambda t: torch.full_like(solution(t), 0x7F), False, "NaN or inf in 1200 of 1200 numbers"),
    (lambda t: torch.zeros_like(solution(t)), False, "4400 of 6144 bytes"),
    (lambda t: t, False, "4400 bytes, and whole tiles of 128 x 4 have 6144. As many as went in: nothing was padded. FlashInfer"),
    (lambda t: t, False, "refuses fewer"),
    (lambda t: padded(t)[: len(t)], False, "One axis was padded, the other was not"),
    (lambda t: padded(t)[:, :22], False, "One axis was padded"),
    (lambda t: torch.zeros(512, 24, dtype=torch.uint8), False, "refuses more"), (lambda t: t[:0], False, "0 bytes"),
    (lambda t: solution(t).float(), False, "this is torch.float32"),
    (lambda t: solution(t).view(torch.float8_e4m3fn), False, "float8_e4m3fn"),
    (lambda t: [1], False, "this is list"), (lambda t: solution(t).numpy(), False, "this is ndarray"),
    (lambda: 3, False, "raised TypeError"), ("abc", False, "raised TypeError"), (3, False, "raised TypeError"),
    (lambda t: torch.zeros(256, 24, dtype=torch.uint8, device="meta"), False, "raised NotImplementedError"),
    (lambda t: solution(t).reshape(256, 24), False, "on scales of another size, [300, 9], the function raised RuntimeError"),
    (lambda t: solution(t) if len(t) == 200 else padded(t), False, "The checkpoint's were right: a size is written as a number"),
])
def test_prepare(answer: Any, right: bool | None, says: str) -> None:
    got = check("prepare", answer)
    assert got.right is right and says in flat(got), str(got)


def test_linear_scales_are_the_file_s() -> None:
    assert linear_scales().shape == (200, 22) and torch.equal(linear_scales(), FOUND.layer.scales)
    linear_scales().zero_()
    assert linear_scales().any()


def test_the_solution_is_the_recipe_s() -> None:
    s = linear_recipe(by_layout("sm100").path, FOUND.kind).plan(FOUND.layer).convert_scales(FOUND.layer)
    assert torch.equal(s.view(torch.uint8).permute(2, 4, 0, 1, 3, 5).flatten(), solution(linear_scales()).flatten())


# -- mystery --------------------------------------------------------------------------------------------------------------


def test_what_the_mystery_is() -> None:
    """A diagnosis names both; a comparison of values, index by index, finds the scales right."""
    run, contract = mystery(), by_layout("sm100")
    d = diagnose_run(run, FOUND, contract)
    assert {f.id for f in d.findings} == set(SOLUTION) and all(f.strength == "proved" for f in d.findings)
    right = linear_recipe(contract.path, FOUND.kind).plan(FOUND.layer).convert(FOUND.layer)
    assert all(torch.equal(t.float(), right[key].float()) for key, t in run.operands.items())
    assert run.output.shape == (2, 3, 200) and run.x.shape == (2, 3, 352) and not run.error
    run.output.zero_(), run.x.zero_(), run.operands["alpha"].zero_()
    assert mystery().output.any() and mystery().x.any() and mystery().operands["alpha"].any()


@pytest.mark.parametrize(("answer", "right", "says"), [
    ((), None, "Faults: nibbles-swapped"), ((None,), None, "give the ids"), (("bias-missing", ...), None, "give the ids"),
    (([],), None, "give the ids"),
    (SOLUTION, True, "cut to N"), (SOLUTION[::-1], True, "never call .contiguous()"), ((set(SOLUTION),), True, "the kernel reads memory"),
    ((*SOLUTION, SOLUTION[0]), True, "every byte"),
    (("bias-missing",), False, "bias-missing is in this run. Something is left"), (("scales-view-contiguous",), False, "does not explain"),
    (("bias-missing", "output-not-sliced"), False, "the output would have 256 columns, and it has 200"),
    (("scales-linear", "bias-missing"), False, "scales-linear is not in it. Alone it gives relative L2 0.9"),
    (("scales-linear", "x-not-padded"), False, "encodes K=384\""),
    (("bias-before-slice",), False, "would have raised \"The size of tensor a (256)"),
    (("scales-flushed",), False, "cannot be in this run: it needs SM12x"), (("global-shared-by-parts",), False, "would be in the file"),
    (("group-32-as-16",), False, "a block scale for 16 elements"), (("nibbles-swapped",), False, "and other bytes of weight."),
    ((*SOLUTION, "global-other"), False, "global-other is not in it. Alone it gives relative L2 0.4"),
    (("no-such",), False, "there is no fault 'no-such'"), ((3,), False, "there is no fault 3"), (([[1]],), False, "there is no fault [1]"),
    (({"a": 1},), False, "there is no fault {'a': 1}"), ((torch.zeros(2),), False, "there is no fault tensor"),
])
def test_mystery(answer: tuple[Any, ...], right: bool | None, says: str) -> None:
    got = check("mystery", *answer)
    assert got.right is right and says in flat(got), str(got)


def test_a_wrong_answer_does_not_show_the_right_one() -> None:
    for pair in itertools.combinations(LINEAR_FAULTS, 2):
        got = check("mystery", *pair)
        assert (got.right is True) == (set(pair) == set(SOLUTION))
        if not got.right:
            assert not {id for id in SOLUTION if id in str(got)} - set(pair)


def test_they_are_registered() -> None:
    with pytest.raises(MxdebugError, match="padding, prepare, mystery"):
        check("c99")
    assert tuple(W4A16_EXERCISES) == ("padding", "prepare", "mystery")
