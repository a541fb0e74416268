"""Never a false alarm: right calls of every path and checkpoint kind, other encodings of the same values, other orders of the same sums."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from mxdebug.calls import Call
from mxdebug.diagnosis import diagnose
from mxdebug.errors import MxdebugError
from mxdebug.faults import Situation
from mxdebug.formats import BlockTensor
from mxdebug.probe import probe
from mxdebug.recipes import RECIPES
from mxdebug.reference import Parallel

SETTINGS = (
    {},
    {"parallel": Parallel(2, 0)},
    {"parallel": Parallel(2, 1)},
    {"parallel": Parallel(1, 0, 2, 1)},
    {"parallel": Parallel(1, 0, 4, 2)},
    {"top_k": 1},
    {"gated": False},
)


def doubled(t: BlockTensor | None) -> BlockTensor | None:
    """Another encoding of the same values: blocks whose codes are all 0, 1, 2 or 4 in magnitude, with half the scale and codes twice as large."""
    if t is None:
        return None
    low, high = t.payload & 15, t.payload >> 4
    twice = torch.tensor(
        [0, 2, 4, 5, 6, 7, -1, -1, 8, 10, 12, 13, 14, 15, -1, -1]
    )  # code of twice the value; 0.5 -> 1, 1 -> 2, 1.5 -> 3, 2 -> 4, 3 -> 6
    a, b = twice[low.long()], twice[high.long()]
    blocks = ((a >= 0) & (b >= 0)).unflatten(-1, (-1, t.format.block // 2)).all(-1)
    step = 8 if t.format.outer else 1
    blocks &= t.scales >= (16 if t.format.outer else 2)
    payload = torch.where(blocks.repeat_interleave(t.format.block // 2, -1), a | b << 4, t.payload.long()).to(torch.uint8)
    return replace(t, payload=payload, scales=t.scales - blocks.to(torch.uint8) * step)


def small_codes(s: Situation) -> Situation:
    """The same situation with codes of at most 3 in every third block, so that these have a second encoding."""

    def fewer(t: BlockTensor | None) -> BlockTensor | None:
        if t is None:
            return None
        halves = t.payload.unflatten(-1, (-1, t.format.block // 2)).clone()
        halves[:, :, ::3] &= 0xBB  # clears the top bit of each magnitude: 0, 0.5, 1, 1.5
        return replace(t, payload=halves.flatten(-2))

    layer = replace(s.layer, gate=fewer(s.layer.gate), up=fewer(s.layer.up), down=fewer(s.layer.down))
    return Situation.right(s.recipe, layer, s.x, s.experts, s.router, s.parallel)


def variants(s: Situation) -> Iterator[tuple[str, Situation, dict, Tensor]]:
    """(name, situation whose layer is the checkpoint's, arguments, output): all of them right."""
    arguments, output = s.build()
    yield "as it is", s, arguments, output
    if s.parallel.ep_size == 1:
        other = Situation.right(s.recipe, s.layer, s.x, s.experts.flip(1), s.router.flip(1), s.parallel)
        yield "experts added in the other order", s, arguments, other.build()[1]
    steps = output.clone()
    at = (steps != 0).flatten().nonzero().flatten()[::200]
    steps.view(torch.int16).flatten()[at] += 1
    yield "a rounding now and then", s, arguments, steps
    coarse = s.router.bfloat16().float()
    bf16 = Situation.right(s.recipe, s.layer, s.x, s.experts, coarse, s.parallel)
    yield "a router in bf16", bf16, *bf16.build()
    few = small_codes(s)
    again = replace(few.layer, gate=doubled(few.layer.gate), up=doubled(few.layer.up), down=doubled(few.layer.down))
    encoded = Situation.right(s.recipe, again, s.x, s.experts, s.router, s.parallel)
    assert not torch.equal(again.up.payload, few.layer.up.payload)
    assert torch.equal(again.up.dequantise(), few.layer.up.dequantise())
    yield "another encoding of the same weights", few, *encoded.build()


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.path.rpartition('/')[2]}-{r.checkpoint.split(' ')[0]}")
def test_right_calls_stay_silent(recipe) -> None:
    count = 0
    for seed, settings in enumerate(SETTINGS):
        try:
            s = probe(recipe.path, checkpoint=recipe.checkpoint, seed=seed, **settings)
        except MxdebugError:
            continue  # vLLM has no such layers on this path
        for name, of, arguments, output in variants(s):
            chosen = of.checkpoint()
            told = s.recipe.contract.parallel(arguments).tp_size == s.parallel.tp_size
            d = diagnose(Call.made(of.recipe.contract.function, arguments, output), chosen, tp=None if told else s.parallel)
            only_open = d.verdict == "undecided" and "in which order its activation scales lie" in d.summary
            assert (d.ok or only_open) and not d.findings, f"{recipe.path}, {settings}, {name}: {d}"
            count += 1
            if name != "as it is":
                continue
            alone = diagnose(Call.made(of.recipe.contract.function, arguments, output))
            assert alone.verdict == "undecided" and not alone.findings, f"{recipe.path}, {settings}, {name}: {alone}"
    assert count >= 15  # 14 recipes: more than 200 in all


def test_softmax_before_or_after_the_choice_is_the_same() -> None:
    """Top-k of the softmax, divided by its sum, against softmax over the top-k logits: no difference to be named."""
    from mxdebug.checkpoints.settings import Routing

    g = torch.Generator().manual_seed(3)
    s = probe(RECIPES[0].path)
    logits = torch.randn(len(s.x), 4, generator=g)
    top = logits.topk(2, dim=1)
    before = torch.softmax(logits, 1).gather(1, top.indices)
    for router in (before / before.sum(1, keepdim=True), torch.softmax(top.values, 1)):
        made = Situation.right(s.recipe, s.layer, s.x, top.indices.int(), router)
        d = diagnose(made.call(), replace(made.checkpoint(), routing=Routing(True, None, "norm_topk_prob")))
        assert d.ok and not d.findings, str(d)
