"""A diagnosis makes no second copy of a layer that it does not need, and what is done by a few experts at a time is the same as at once."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from making import CONTRACT, call_of, checkpoint_layer, made_layer, situation
from torch.utils._python_dispatch import TorchDispatchMode

from mxdebug import memory
from mxdebug.contracts import moe
from mxdebug.diagnosis import diagnose
from mxdebug.faults import FAULTS
from mxdebug.layouts import UP_GATE
from mxdebug.recipes import PAD_ALL, form, logical_operand, logical_operands, logical_rows, logical_shape, recipe


class Largest(TorchDispatchMode):
    """The most bytes that one operation made, of payloads and scales; one expert's weights may be numbers for a while."""

    most = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # noqa: ANN001
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in args if isinstance(t, torch.Tensor)}
        if isinstance(out, torch.Tensor) and out.dtype == torch.uint8 and out.untyped_storage().data_ptr() not in given:
            self.most = max(self.most, out.untyped_storage().nbytes())
        return out


@pytest.mark.parametrize("stack, operands", [((), 0.5), (("scales-linear",), 0.5), (("weights-linear", "rows-gate-up"), 1.0)], ids=["clean", "scales", "weights"])
def test_no_operand_is_made_twice(monkeypatch: pytest.MonkeyPatch, stack: tuple[str, ...], operands: float) -> None:
    """Of eight experts: nothing as large as w13 where w13 is right; where it is not, w13 as it should be, and nothing larger."""
    monkeypatch.setattr(moe, "_TOGETHER", 1)
    monkeypatch.setattr(form, "_TOGETHER", 1)
    made = situation("8-experts", few=True)
    arguments, output = functools.reduce(lambda s, f: FAULTS[f].injected(s), stack, made).build()
    w13 = CONTRACT.operand("w13").get(arguments).nbytes
    with Largest() as largest:
        d = diagnose(call_of(arguments, output), checkpoint_layer("gptoss-8-experts"))
    assert {f.id for f in d.findings} == set(stack)
    assert w13 / 16 < largest.most <= operands * w13


def test_decoding_in_parts_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, _ = situation("8-experts").build()
    want = CONTRACT.decode(arguments, experts=[5, 0, 7])
    monkeypatch.setattr(moe, "_TOGETHER", 1)
    got = CONTRACT.decode(arguments, experts=[5, 0, 7])
    for name in ("gate", "up", "down"):
        a, b = getattr(got, name), getattr(want, name)
        assert torch.equal(a.payload, b.payload) and torch.equal(a.scales, b.scales)


def test_a_form_of_some_experts() -> None:
    layer = made_layer(7, 64, 96)
    plan = recipe("vllm", CONTRACT.path, "gpt-oss").plan(layer)
    for key, logical in logical_operands(layer).items():
        half = logical.shape[1] // 2
        some = torch.tensor([0, 3, half - 1, half, logical.shape[1] - 1])  # of gate and of up, the last and the first among them
        assert logical_shape(layer, key) == logical.shape[1:] and torch.equal(logical_rows(layer, key, some), logical[:, some])
        assert torch.equal(logical_operand(layer, key, [6, 2]), logical[[6, 2]]) and torch.equal(logical_operand(layer, key, slice(1, 3)), logical[1:3])
        for f in (plan.forms[key], replace(plan.forms[key], order=UP_GATE) if key.startswith("w13") else plan.forms[key]):
            want = f.apply(logical)
            got = f.apply_to_some(functools.partial(logical_operand, layer, key), 7, [1, 2, 3, 4, 6])
            assert torch.equal(got[[1, 2, 3, 4, 6]], want[[1, 2, 3, 4, 6]]) and not got[[0, 5]].any() and got.dtype == want.dtype
    joined = replace(plan.forms["w13"], padding=PAD_ALL)  # experts that are not each on their own: all of them
    assert torch.equal(joined.apply_to_some(functools.partial(logical_operand, layer, "w13"), 7, [1]), joined.apply(logical_operand(layer, "w13")))


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="not run here: the C library is not glibc")
def test_memory_is_given_back() -> None:
    """Blocks that lie between others which stay: glibc alone would keep them. In a process of its own, whose memory is nobody else's."""
    code = """
import ctypes
from mxdebug.memory import give_back
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
libc.mallopt(-3, 1 << 30)  # M_MMAP_THRESHOLD: no block has a mapping of its own
blocks = [libc.malloc(1 << 20) for _ in range(128)]
for block in blocks:
    ctypes.memset(block, 1, 1 << 20)
for block in blocks[::2]:
    libc.free(block)
def held():
    return next(int(line.split()[1]) >> 10 for line in open("/proc/self/status") if line.startswith("VmRSS"))
before = held()
give_back()
print(before - held())
"""
    assert int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout) > 48  # MiB of 64


def test_where_memory_cannot_be_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory.ctypes, "CDLL", lambda _: object())
    memory._trim.cache_clear()
    try:
        memory.give_back()
    finally:
        memory._trim.cache_clear()
