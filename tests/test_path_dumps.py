"""Can a dump of every path be read back and diagnosed? Written in FlashInfer's format, strided views and tuples included, then loaded.

Signatures are FlashInfer 0.7.4's own where it is installed; CuTe-DSL's cannot be imported without its compiler, so its text stands here.
"""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from making import call_of
from test_path_faults import right

from mxdebug.calls import load
from mxdebug.checkpoints import CheckpointLayer
from mxdebug.contracts import find
from mxdebug.diagnosis import diagnose
from mxdebug.layouts import GATE_UP, INTERLEAVED
from mxdebug.recipes import RECIPES, Recipe

CUTEDSL = """(x: torch.Tensor, x_sf: Optional[torch.Tensor], token_selected_experts: torch.Tensor, token_final_scales: torch.Tensor, \
w1_weight: torch.Tensor, w1_weight_sf: torch.Tensor, w1_alpha: torch.Tensor, fc2_input_scale: Optional[torch.Tensor], \
w2_weight: torch.Tensor, w2_weight_sf: torch.Tensor, w2_alpha: torch.Tensor, num_experts: int, top_k: int, \
num_local_experts: Optional[int] = None, local_expert_offset: int = 0, output_dtype: torch.dtype = torch.bfloat16, \
use_fused_finalize: bool = True, moe_output: Optional[torch.Tensor] = None, aux_stream: Optional[torch.cuda.Stream] = None, \
enable_pdl: bool = True, activation_type: int = 3, swiglu_alpha: float = 1.0, swiglu_beta: float = 0.0, \
swiglu_limit: float = 3.4028234663852886e+38, situ_beta: Optional[float] = None, situ_linear_beta: Optional[float] = None, *, \
quant_mode: str = 'w4a4', per_token_scale: Optional[torch.Tensor] = None, \
nvfp4_4over6: Optional[NVFP44Over6Config] = <nvfp4_4over6 unset: read FLASHINFER_NVFP4_4OVER6*>) -> torch.Tensor"""


def signature(function: str) -> str:
    if function.startswith("cute_dsl"):
        return CUTEDSL
    pytest.importorskip("flashinfer")
    return str(inspect.signature(getattr(importlib.import_module("flashinfer.fused_moe"), function)))


@pytest.mark.parametrize("r", [pytest.param(r, id=f"{r.path} {r.checkpoint.split(' ')[0]}") for r in RECIPES if "MXFP4_BF16" not in r.path or "TRTLLM" in r.path])
@pytest.mark.parametrize("form", ["torch", "safetensors"])
def test_dump_of_a_right_call_is_right(r: Recipe, form: str, tmp_path: Path) -> None:
    s = right(r.path, r.checkpoint)
    arguments, output = s.build()
    made = call_of(arguments, output, function=r.contract.function, signature=signature(r.contract.function))
    call = load(made.save(tmp_path, form))
    assert find(call.function, call.arguments) is r.contract
    for name, value in arguments.items():
        assert _same(call.arguments[name], value), name
    chosen = CheckpointLayer(0, r.checkpoint, s.layer, INTERLEAVED if r.checkpoint == "gpt-oss" else GATE_UP, {}, {}, frozenset())
    d = diagnose(call, chosen)
    assert d.ok and d.kernel.bit_identical, str(d)


def _same(a: Any, b: Any) -> bool:
    if isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and a.stride() == b.stride() and torch.equal(a.view(torch.uint8) if a.element_size() == 1 else a, b.view(torch.uint8) if b.element_size() == 1 else b)
    if isinstance(b, (list, tuple)):
        return type(a) is type(b) and all(_same(x, y) for x, y in zip(a, b, strict=True))
    return a == b


def test_router_logits_are_routed_as_the_kernel_routes_them() -> None:
    """The monolithic call has logits: top-k of them, then a softmax over the k (Renormalize), weights rounded to bf16."""
    s = right("mxfp4/FLASHINFER_TRTLLM_MXFP4_BF16", "gpt-oss")
    c = s.recipe.contract
    logits = torch.randn(4, s.layer.experts, generator=torch.Generator().manual_seed(4))
    values, ids = logits.topk(2)
    weights = values.softmax(-1).bfloat16().float()
    modular = {**s.arguments(), "topk_ids": (ids.int(), weights)}
    monolithic = {**{k: v for k, v in modular.items() if k != "topk_ids"}, "routing_logits": logits, "routing_method_type": 1, "top_k": 2}
    assert torch.equal(c.emulate(monolithic), c.emulate(modular))
    assert find("trtllm_fp4_block_scale_moe", monolithic) is c
    packed = {**modular, "topk_ids": (ids.int() << 16) | (weights.bfloat16().view(torch.int16).int() & 0xFFFF)}
    assert torch.equal(c.emulate(packed), c.emulate(modular))
