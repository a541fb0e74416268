"""mm_bf16_fp4 as a torch operator with a fake implementation, so that torch.compile and FakeTensorMode can trace it without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...contracts import find_linear
from ...contracts.cutedsl_w4a16 import FUNCTION
from ...errors import MxdebugError
from .capability import capability

FLASHINFER, TRITON, EMULATION = (
    "FlashInfer's mm_bf16_fp4",
    "mxdebug's own Triton kernel, not FlashInfer's",
    "mxdebug's emulation on the CPU",
)
Fake = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def implementation(b: Tensor) -> str:
    """Which implementation a prepared weight would run on: FLASHINFER where this GPU has that kernel and layout, else TRITON (SM80 and up), else EMULATION."""
    if b.device.type != "cuda":
        return EMULATION
    major, minor = torch.cuda.get_device_capability(b.device)
    fits = (major == 12) == (b.dtype == torch.int32)
    return FLASHINFER if fits and capability(major * 10 + minor)[0] else TRITON


@torch.library.custom_op("mxdebug::mm_bf16_fp4", mutates_args=())
def mm_bf16_fp4(a: Tensor, b: Tensor, b_descale: Tensor, alpha: Tensor) -> Tensor:
    """bf16 [M, N] = a [M, K] times the prepared weight, times alpha [1]; `implementation` says what computes it.

    b, b_descale as FlashInfer's prepare_bf16_fp4_weights(backend="cute-dsl") leaves them. Raises MxdebugError before anything runs on a GPU
    where the kernel would refuse the call: a not BF16, sizes that do not fit.
    """
    arguments = {"a": a, "b": b, "b_descale": b_descale, "alpha": alpha, "backend": "cute-dsl"}
    c = find_linear(FUNCTION, arguments)
    how = implementation(b)
    if how == EMULATION:
        return c.emulate(arguments)
    c.check(arguments)
    if how == FLASHINFER:
        return c.run(arguments)
    from ...w4a16_triton import mm_bf16_fp4 as ours

    return ours(a, b, b_descale, alpha.float().reshape(1), activations_as_fp16=c.products(a.shape[0], *c.sizes(b))[0] == torch.float16)


@mm_bf16_fp4.register_fake
def mm_bf16_fp4_fake(a: Tensor, b: Tensor, b_descale: Tensor, alpha: Tensor) -> Tensor:
    """The shape of the result without computing it. N is a row of the uint8 weight, and half a column of the int32 tiles."""
    n = b.shape[0] if b.dtype == torch.uint8 else b.shape[1] // 2
    return a.new_empty(a.shape[0], n)


def wrong_fakes(fake: Fake) -> list[str]:
    """What a fake implementation gets wrong, in words, for both layouts, sizes aligned and not, one token and several. An engine's test asserts none."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    from .examples import prepared

    out, cases = [], list(prepared())  # made outside: their sizes depend on data
    with FakeTensorMode() as mode:
        for name, (a, b, b_descale, alpha), want in cases:
            inputs = [mode.from_tensor(t) for t in (a, b, b_descale, alpha)]
            before = [t._version for t in inputs]
            try:
                got = fake(*inputs)
                if [t._version for t in inputs] != before:
                    out.append(f"{name}: it writes into its inputs, the kernel does not")
            except Exception as error:  # an engine's code: whatever it raises is the answer
                out.append(f"{name}: raised {type(error).__name__}: {error}")
                continue
            out += [f"{name}: {text}" for text in _differs(got, want, inputs)]
    return out


def _differs(got: object, want: tuple[int, int], inputs: list[Tensor]) -> list[str]:
    """In what a fake's result is another than the kernel's, in words."""
    if not isinstance(got, Tensor):
        return [f"{type(got).__name__}, the kernel gives a tensor"]
    out = []
    if tuple(got.shape) != want or got.dtype != torch.bfloat16:
        out.append(f"{got.dtype} {list(got.shape)}, the kernel gives torch.bfloat16 {list(want)}")
    if got.device != inputs[0].device:
        out.append(f"on {got.device}, the kernel's result is on {inputs[0].device} as a is")
    if not got.is_contiguous():
        out.append(f"strides {list(got.stride())}, the kernel's result is contiguous")
    if any(torch._C._is_alias_of(got, t) for t in inputs):
        out.append("a view of an input, the kernel's result is new memory")
    return out


def assert_fake(fake: Fake) -> None:
    """For an engine's tests: MxdebugError where a fake implementation of mm_bf16_fp4 gives another shape or dtype than the kernel."""
    if wrong := wrong_fakes(fake):
        raise MxdebugError(
            "fake implementation of mm_bf16_fp4",
            "the shape that the kernel gives: N is b.shape[0] of uint8, b.shape[1] // 2 of int32",
            "\n  " + "\n  ".join(wrong),
        )
