"""Does FlashInfer's CuTe-DSL W4A16 GEMM (`mm_bf16_fp4`, backend "cute-dsl") run here?

vLLM's rule: `FlashInferCuteDslNvFp4W4A16LinearKernel.is_supported` (model_executor/kernels/linear/nvfp4/flashinfer.py) and
`has_flashinfer_bf16_fp4` (utils/flashinfer.py), the same in 0.30 and 0.33. FlashInfer's own: `_cute_dsl_bf16_fp4_requirement`
(gemm/gemm_bf16_fp4.py) and `_prepare_cute_dsl` (gemm/gemm_bf16_fp4_cute_dsl.py), read in 0.7.4. They differ in both directions, and a GPU
on which only one of them says yes is answered for with no.

By FlashInfer's wheels the two functions came with 0.6.14 (0.6.13 has neither), then for SM12x; the kernel for SM100 came with 0.6.18
(flashinfer#4466). Between the two, SM100 was given the kernel and the layout of SM12x, while vLLM's rule, which asks for the functions
only, already said yes. vLLM itself has had the kernel since it requires 0.6.18.
"""

from __future__ import annotations

import importlib
import re
import shutil
from importlib.util import find_spec

from ...errors import MxdebugError

FUNCTIONS = ("mm_bf16_fp4", "prepare_bf16_fp4_weights")
FUNCTIONS_SINCE, SM100_SINCE = (0, 6, 14), (0, 6, 18)
BF16_FP4_SMS = (100, 103, 107, 110, 120, 121)  # FlashInfer 0.7.4, supported_compute_capability of _cute_dsl_bf16_fp4_requirement


def numbers(version: str) -> tuple[int, int, int]:
    """The first three numbers of a version, to compare. Raises MxdebugError on a text that does not start with them."""
    if not (found := re.match(r"v?(\d+)\.(\d+)\.(\d+)", version)):
        raise MxdebugError("FlashInfer's version", "three numbers, as in 0.6.18", repr(version))
    return int(found[1]), int(found[2]), int(found[3])


def vllm_lists(sm: int) -> bool:
    """The compute capabilities that vLLM's `is_supported` takes."""
    return sm in (100, 103) or 120 <= sm < 130


def layout_family(sm: int) -> str:
    """Which of its two layouts FlashInfer prepares the weight in. "sm100" (the canonical bytes) or "sm12x" (its own order and scale code).

    `_prepare_cute_dsl`, which raises NotImplementedError on any other GPU. Raises MxdebugError there.
    """
    if sm in (100, 103, 107):  # _cute_dsl_uses_sm100_layout
        return "sm100"
    if sm // 10 == 12:
        return "sm12x"
    raise MxdebugError("sm", "100, 103, 107 or 120 to 129", str(sm), "FlashInfer's _prepare_cute_dsl has no layout for other GPUs")


def _refused(sm: int) -> str | None:
    """Why the kernel does not run on an SM, or None."""
    if sm == 107:
        return "vLLM's list is SM100, SM103 and SM120 to SM129, without SM107, which FlashInfer's own list and layouts have"
    if sm == 110:
        return "SM110 is in FlashInfer 0.7.4's list for the call, but its _prepare_cute_dsl refuses it, and vLLM's list lacks it"
    if not vllm_lists(sm):
        return f"needs SM100, SM103, SM120 or SM121, this is SM{sm}"
    if sm not in BF16_FP4_SMS:
        return (f"SM{sm} passes vLLM's check (SM120 to SM129) and is prepared for, but FlashInfer 0.7.4's mm_bf16_fp4 refuses it at the "
                f"first call (it lists {', '.join(f'SM{s}' for s in BF16_FP4_SMS)})")
    return None


def _vllm_doubts() -> str:
    """`has_flashinfer` in vLLM 0.33 counts FlashInfer as absent where it could not compile. CuTe-DSL itself needs none of it."""
    if find_spec("flashinfer_cubin") is not None:
        return ""
    missing = [program for program in ("nvcc", "ninja") if shutil.which(program) is None]
    if not missing:
        return ""
    return f"; vLLM may take FlashInfer for absent: flashinfer-cubin is not installed, nor {' and '.join(missing)} on PATH"


def capability(sm: int | None = None) -> tuple[bool, str]:
    """Whether the kernel runs with what is installed here on a GPU of this SM (None: this machine's GPU), and why or why not.

    Looks before it imports: `flashinfer.gemm` is imported only where FlashInfer, its cute_dsl package and nvidia-cutlass-dsl are found.
    """
    from ...doctor import gpu, installed  # doctor imports this module

    if sm is None:
        if (found := gpu()) is None:
            return False, "no CUDA GPU; the kernel needs SM100, SM103, SM120 or SM121"
        sm = found[1]
    if (refused := _refused(sm)) is not None:
        return False, refused
    if find_spec("flashinfer") is None:
        return False, "FlashInfer is not installed: pip install flashinfer-python (0.6.18 or newer)"
    version = installed("flashinfer-python") or "of unknown version"
    if find_spec("cutlass") is None:
        return False, f"FlashInfer {version} is installed, nvidia-cutlass-dsl is not, which compiles its kernel; vLLM does not check this"
    try:  # find_spec of a submodule imports its package
        if find_spec("flashinfer.cute_dsl") is None:
            return False, f"FlashInfer {version} has no flashinfer.cute_dsl; the kernel needs 0.6.18 or newer"
        gemm = importlib.import_module("flashinfer.gemm")
    except (ImportError, OSError, AttributeError, RuntimeError) as error:  # a torch that does not fit, a missing library
        return False, f"FlashInfer {version} is installed but cannot be imported: {error}"
    if lacks := [name for name in FUNCTIONS if not hasattr(gemm, name)]:
        return False, f"FlashInfer {version} has no flashinfer.gemm.{' and no '.join(lacks)}; the kernel needs 0.6.18 or newer"
    family = layout_family(sm)
    if family == "sm100" and version[0].isdigit() and numbers(version) < SM100_SINCE:
        return False, (f"FlashInfer {version} gives SM{sm} the kernel and layout of SM12x: the one for SM100 came with 0.6.18; "
                       "vLLM does not check this")
    return True, f"FlashInfer {version} on SM{sm}, layout {family}{_vllm_doubts()}"
