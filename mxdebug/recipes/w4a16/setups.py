"""The question and the answer: a W4A16 linear layer and its deployment in vLLM's names, and the kernel that vLLM takes for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...errors import MxdebugError
from ..select.selection import Considered
from .capability import FUNCTIONS_SINCE, numbers

# config/kernel.py, LinearBackend: the same names in 0.30 and 0.33.
LINEAR_BACKENDS = ("auto", "cutlass", "flashinfer_cutlass", "flashinfer_cutedsl", "flashinfer_trtllm", "flashinfer_cudnn",
                   "flashinfer_b12x", "b12x", "marlin", "humming", "triton", "deep_gemm", "torch", "aiter", "machete", "fbgemm", "conch",
                   "exllama", "emulation", "xpu", "xpu_woq")
W4A16 = "nvfp4_w4a16"  # the name of this layer type in linear_backend_per_quant


@dataclass(frozen=True)
class LinearSetup:
    """A W4A16 NVFP4 linear layer and its deployment, as far as vLLM's selection reads them, and the dtype, which it does not read.

    sm                        compute capability as one number
    dtype                     of the activations: "bfloat16" or "float16"
    linear_backend            --linear-backend, one of LINEAR_BACKENDS (as in vLLM, - is read as _, capitals as small letters)
    linear_backend_per_quant  overrides by layer type; that of "nvfp4_w4a16" goes before linear_backend
    flashinfer                FlashInfer's version, or whether `has_flashinfer_bf16_fp4` says yes; None: not installed
    humming_installed         comes with vLLM's CUDA requirements; b12x_installed does not: b12x can be imported and says that it runs
    batch_invariant           VLLM_BATCH_INVARIANT=1
    disabled                  VLLM_DISABLED_KERNELS, names of kernel classes
    """

    sm: int
    dtype: str = "bfloat16"
    linear_backend: str = "auto"
    flashinfer: str | bool | None = "0.7.4"
    humming_installed: bool = True
    b12x_installed: bool = False
    batch_invariant: bool = False
    disabled: frozenset[str] = frozenset()
    linear_backend_per_quant: Mapping[str, str] | None = field(default=None, hash=False)

    def __post_init__(self) -> None:
        """Raises MxdebugError on a name that vLLM does not have."""
        if not 50 <= self.sm < 200:
            raise MxdebugError("LinearSetup.sm", "a compute capability as one number, as in 90 or 121", str(self.sm))
        if self.dtype not in ("bfloat16", "float16"):
            raise MxdebugError("LinearSetup.dtype", "bfloat16 or float16", str(self.dtype), "vLLM runs NVFP4 layers in these")
        object.__setattr__(self, "linear_backend", self.linear_backend.lower().replace("-", "_"))
        if isinstance(self.flashinfer, str):
            numbers(self.flashinfer)
        overrides = self.linear_backend_per_quant
        if overrides is not None and not overrides:
            raise MxdebugError("LinearSetup.linear_backend_per_quant", "an override, or None", "none", "vLLM refuses an empty one")
        named = [("linear_backend", self.linear_backend), *(("linear_backend_per_quant", name) for name in (overrides or {}).values())]
        for operand, name in named:
            if name not in LINEAR_BACKENDS:
                raise MxdebugError(f"LinearSetup.{operand}", f"one of {', '.join(LINEAR_BACKENDS)}", str(name))

    @property
    def has_bf16_fp4(self) -> bool:
        """`has_flashinfer_bf16_fp4` (utils/flashinfer.py): whether the functions are there. It does not ask for which GPUs they are."""
        if isinstance(self.flashinfer, str):
            return numbers(self.flashinfer) >= FUNCTIONS_SINCE
        return bool(self.flashinfer)

    @property
    def backend(self) -> str:
        """`_get_linear_backend`: the override of this layer type, else --linear-backend."""
        return (self.linear_backend_per_quant or {}).get(W4A16) or self.linear_backend


@dataclass(frozen=True)
class LinearSelection:
    """What vLLM does with a setup.

    kernel      the kernel class, and path its name here; both None where vLLM refuses to start, `refused` is its message then
    why         the rule that chose or refused
    considered  vLLM's W4A16 kernels in the order of its list, the taken one among them
    logged      the warnings that vLLM logs at selection, in its words
    warnings    what vLLM does not say at selection; `fails` is the one of them that ends the run, or empty
    """

    setup: LinearSetup
    version: str
    kernel: str | None
    path: str | None
    why: str
    considered: tuple[Considered, ...]
    refused: str = ""
    logged: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    fails: str = ""

    @property
    def runs(self) -> bool:
        """vLLM takes a kernel, and no rule known here says that it will fail."""
        return self.path is not None and not self.fails

    def __str__(self) -> str:
        s = self.setup
        version = {"53014": "0.30 (#53014)"}.get(self.version, self.version)
        lines = [f"vLLM {version}, SM{s.sm}, NVFP4 W4A16, {s.dtype}, --linear-backend {s.linear_backend}"
                 + (f", {W4A16} overridden with {s.backend}" if s.backend != s.linear_backend else ""),
                 f"takes {self.path}: {self.why}" if self.path else f"refuses to start: {self.why}"]
        lines += [f"  vLLM raises: {line.rstrip()}" if i == 0 else f"    {line}" for i, line in enumerate(self.refused.splitlines())]
        width = max(len(c.backend) for c in self.considered)
        lines += [f"  {'->' if c.taken else '  '} {c.backend:{width}}  {c.reason}  [{c.source}]" for c in self.considered]
        return "\n".join(lines + [f"  vLLM logs: {words}" for words in self.logged] + [f"  warning: {words}" for words in self.warnings])
