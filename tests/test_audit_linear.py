"""A linear converter's audit: vLLM's way is right, each way to get it wrong is named."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from mxdebug import MxdebugError
from mxdebug.audit import assert_linear_keeps_contract, audit_linear
from mxdebug.contracts import LINEAR_CONTRACTS
from mxdebug.recipes.vllm import CT_NVFP4, MODELOPT

SM100, SM12X = LINEAR_CONTRACTS


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def vllms(
    family: str,
    *,
    swizzle: int = 1,
    alignment: int = 64,
    takes: Callable[[Tensor], Tensor] = Tensor.max,
    divisor: bool = False,
    contiguous: bool = False,
) -> Callable[[dict[str, Tensor]], tuple[Tensor, Tensor, Tensor]]:
    """vLLM's steps around FlashInfer's own preparation, as an engine would write them: no code of mxdebug."""
    fi = pytest.importorskip("flashinfer.gemm.gemm_bf16_fp4_cute_dsl")

    def convert(p: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        weight, scales = p.get("weight", p.get("weight_packed")), p["weight_scale"]
        n, half = weight.shape
        weight = pad(weight, (0, (_up(2 * half, alignment) - 2 * half) // 2, 0, _up(n, alignment) - n))
        rows, columns = _up(n, 128), _up(scales.shape[1], 4)
        t = pad(scales.view(torch.uint8), (0, columns - scales.shape[1], 0, rows - n))
        for _ in range(swizzle):
            t = t.reshape(rows // 128, 4, 32, columns // 4, 4).permute(0, 3, 2, 1, 4).reshape(rows, columns)
        g = p["weight_scale_2"] if "weight_scale_2" in p else p["weight_global_scale"]
        alpha = takes(g).reshape(1)
        alpha = alpha if "weight_scale_2" in p or divisor else 1.0 / alpha
        weight, t, alpha = (fi._prepare_cute_dsl_sm12x if family == SM12X else fi._prepare_cute_dsl_sm100)(weight, t, alpha, 16)
        return weight, t.contiguous() if contiguous else t, alpha

    return convert


@pytest.mark.parametrize("path", LINEAR_CONTRACTS)
@pytest.mark.parametrize("kind", [MODELOPT, CT_NVFP4])
def test_vllms_way_is_right(path: str, kind: str) -> None:
    assert_linear_keeps_contract(vllms(path), path, kind)
    assert_linear_keeps_contract(lambda p: dict(zip(("weight", "weight_scale", "weight_global_scale"), vllms(path)(p))), path, kind)


@pytest.mark.parametrize(
    ("path", "kind", "broken", "words"),
    [
        (SM100, MODELOPT, {"swizzle": 0}, "scales-linear"),
        (SM12X, MODELOPT, {"swizzle": 0}, "scales-linear"),
        (SM100, CT_NVFP4, {"swizzle": 2}, "scales-twice"),
        (SM12X, CT_NVFP4, {"swizzle": 2}, "scales-twice"),
        (SM100, MODELOPT, {"contiguous": True}, "scales-view-contiguous"),
        (SM12X, CT_NVFP4, {"divisor": True}, "global-inverted"),
        (SM100, MODELOPT, {"takes": Tensor.min}, "global-of-another-part"),
        (SM100, CT_NVFP4, {"takes": Tensor.min}, "global-of-another-part"),
        (SM100, MODELOPT, {"alignment": 32}, "vLLM pads"),
        (SM100, MODELOPT, {"takes": lambda g: g.mean()}, "global-other"),
    ],
)
def test_mistakes_are_named(path: str, kind: str, broken: dict[str, object], words: str) -> None:
    with pytest.raises(AssertionError, match=words):
        assert_linear_keeps_contract(vllms(path, **broken), path, kind)
    assert all(words in line for line in audit_linear(vllms(path, **broken), path, kind))


def test_results_of_another_form() -> None:
    for made in (None, {}, (1, 2), {"w": 1}):
        with pytest.raises(MxdebugError, match="the converter's result"):
            audit_linear(lambda p, made=made: made, SM100, MODELOPT)
    with pytest.raises(MxdebugError, match="one of vllm"):
        audit_linear(vllms(SM100), SM100, "gpt-oss")


def changed(
    path: str, change: Callable[[dict[str, Tensor]], None], **options: object
) -> Callable[[dict[str, Tensor]], tuple[Tensor, Tensor, Tensor]]:
    """vLLM's way on parameters that were changed before."""

    def convert(p: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        change(p)
        return vllms(path, **options)(p)

    return convert


def halves(p: dict[str, Tensor]) -> None:
    for name in ("weight", "weight_packed", "weight_scale"):
        if name in p:
            t = p[name].view(torch.uint8)
            p[name] = torch.cat([t[len(t) // 2 :], t[: len(t) // 2]]).view(p[name].dtype)


def saturated(most: float) -> Callable[[dict[str, Tensor]], None]:
    return lambda p: p.update(weight_scale=p["weight_scale"].float().clamp(max=most).to(torch.float8_e4m3fn))


@pytest.mark.parametrize("path", LINEAR_CONTRACTS)
@pytest.mark.parametrize("kind", [MODELOPT, CT_NVFP4])
def test_wrong_converters_that_look_harmless(path: str, kind: str) -> None:
    zero = lambda p: p.update(
        weight_scale=torch.where(p["weight_scale"].float() == 0, 2.0**-9, p["weight_scale"].float()).to(torch.float8_e4m3fn)
    )  # noqa: E731
    pick = "weight_scale_2" if kind == MODELOPT else "weight_global_scale"
    for broken, words in (
        (changed(path, saturated(240.0)), "no known change"),
        (changed(path, saturated(8.0)), "no known change"),
        (changed(path, zero), "no known change"),
        (changed(path, lambda p: p.update({pick: p[pick][:1]})), "global-"),
        (changed(path, lambda p: p.update({pick: p[pick][-1:]})), "global-"),
        (changed(path, halves), "parts-reordered"),
        (lambda p: 1 / 0, "the converter raised ZeroDivisionError"),
        (lambda p: tuple(t.to("meta") for t in vllms(path)(p)), "on meta"),
    ):
        lines = audit_linear(broken, path, kind)
        assert lines and any(words in line for line in lines), (words, lines)


def test_misaligned_views_are_refused_on_sm100() -> None:
    def shifted(p: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        w, s, a = vllms(SM100)(p)
        buffer = torch.zeros(w.numel() + 1, dtype=torch.uint8)
        buffer[1:] = w.flatten()
        return buffer[1:].view(w.shape), s, torch.cat([a, a])[1:]

    assert any("multiples of 32 bytes" in line and "weight, alpha" in line for line in audit_linear(shifted, SM100, MODELOPT))


def test_right_results_in_other_forms() -> None:
    for path in LINEAR_CONTRACTS:
        assert_linear_keeps_contract(lambda p, path=path: list(vllms(path)(p)), path, MODELOPT)
    with pytest.raises(MxdebugError, match="no alpha among"):
        audit_linear(lambda p: dict(zip(("weight", "weight_scale"), vllms(SM100)(p))), SM100, MODELOPT)


def test_a_path_without_its_layout_names_the_layouts() -> None:
    from mxdebug.contracts import any_contract

    with pytest.raises(MxdebugError, match="flashinfer_cutedsl/sm100, nvfp4_w4a16/flashinfer_cutedsl/sm12x"):
        any_contract("nvfp4_w4a16/flashinfer_cutedsl")
