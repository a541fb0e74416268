"""mm_bf16_fp4(backend="cute-dsl"): BF16 activations x NVFP4 weight, in two layouts. vLLM's nvfp4_w4a16/flashinfer_cutedsl (#53014).

Rules: FlashInfer 0.7.4, gemm/gemm_bf16_fp4.py (checks), gemm/gemm_bf16_fp4_cute_dsl.py (`_prepare_cute_dsl_sm100`, `_prepare_cute_dsl_sm12x`,
tactics), gemm/kernels/cute_dsl/dense_gemm_bf16_fp4_sm100.py, dense_gemm_bf16_fp4_sm12x.py, gemv_bf16_fp4_sm12x.py (arithmetic).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..errors import MxdebugError
from ..formats import E4M3_SCALE, NVFP4, S0E5M3
from ..layouts import LINEAR, SM12X_WEIGHT_TILES, TRANSPOSED, SWIZZLE_128x4
from .linear import LinearContract
from .operand import MMA, Arguments, Operand
from .verified import Verified

FUNCTION = "mm_bf16_fp4"
PATH = "nvfp4_w4a16/flashinfer_cutedsl"  # vLLM: linear_backend_per_quant={"nvfp4_w4a16": "flashinfer_cutedsl"}
FP16_LARGEST = 65504.0

_X = Operand("x", "a", "activations", torch.bfloat16, "[M, K]", None, None, None, False, "as they are: only the weight is quantised")
_ALPHA = Operand(
    "alpha",
    "alpha",
    "global scale",
    torch.float32,
    "[1]",
    None,
    None,
    None,
    True,
    "multiplies the sums; 1 where not passed",
    also=(torch.float64, torch.bfloat16, torch.float16),
)


def run(c: LinearContract, arguments: Arguments) -> Tensor:
    """The real kernel, as LinearContract.run."""
    needed = f"{c.path} needs a GPU of {', '.join(f'SM{s}' for s in c.sm)} and flashinfer-python with nvidia-cutlass-dsl"
    if not torch.cuda.is_available():
        raise MxdebugError("this machine", needed, f"no CUDA GPU (torch {torch.__version__})", "use emulate, which runs anywhere")
    major, minor = torch.cuda.get_device_capability()
    if major * 10 + minor not in c.sm:
        raise MxdebugError("this machine", needed, f"{torch.cuda.get_device_name()}, SM{major}{minor}", "use emulate, which runs anywhere")
    try:
        from flashinfer.gemm import mm_bf16_fp4
    except ImportError as error:
        raise MxdebugError("this machine", needed, f"no mm_bf16_fp4 ({error})", "FlashInfer before 0.6.18, or none") from error
    c.see(arguments)  # our errors rather than a GPU's
    a, b, sf, alpha = (None if t is None else t.cuda() for t in (c.get(k, arguments) for k in ("x", "weight", "weight_scale", "alpha")))
    return mm_bf16_fp4(a, b, sf, alpha, backend="cute-dsl")


_SM_COUNTS = range(16, 257, 2)  # of GPUs of SM12x; a call does not say on which it ran


def gemv(n: int, k: int) -> bool:
    """Whether SM12x may take the GEMV for one token of a padded [N, K] weight, on some GPU, tuned or not: 12 to 96 warps a multiprocessor.

    Every MMA tactic multiplies in fp16 (use_fp16_mma = 1); the GEMV in float32. FlashInfer `_select_bf16_fp4_gemv_split`, `_bf16_fp4_gemv_knee_split`,
    `_bf16_fp4_cute_dsl_tactic_configs`.
    """
    warps, tiles = n // 64, k // 16
    if n % 64 or tiles < 4:
        return False
    for sms in _SM_COUNTS:
        blocks = -(-warps // 8)
        knee = min(-(-20 * sms // warps), max(1, min(int(0.95 * sms * 6 / blocks), tiles // 4)))
        if any(12 <= warps * split / sms <= 96 for split in (knee, *(s for s in (1, 2, 4, 8, 16, 32) if 4 * s <= tiles))):
            return True
    return False


_READ = Verified(
    "a reading of the source", "FlashInfer 0.7.4", "dtypes, layouts, arithmetic; the kernel itself needs Blackwell and was not run"
)
_FI = Verified(
    "FlashInfer's own functions on a CPU", "FlashInfer 0.7.4", "prepared bytes equal, decoded weights equal its trace reference's"
)
_CONVERTER = Verified("the engine's converter", "vLLM 0.33", "operands byte-exact against golden tensors")

SM100 = LinearContract(
    path=f"{PATH}/sm100",
    function=FUNCTION,
    flags={"backend": "cute-dsl"},
    sm=(100, 103),
    weights=NVFP4,
    operands=(
        Operand(
            "weight",
            "b",
            "weight payload",
            torch.uint8,
            "[N, K/2]",
            LINEAR,
            None,
            None,
            False,
            "E2M1 codes, even element in the low nibble",
        ),
        Operand(
            "weight_scale",
            "b_descale",
            "weight block scales",
            torch.float8_e4m3fn,
            "[32, 4, N/128, 4, K/64, 1]",
            SWIZZLE_128x4,
            None,
            E4M3_SCALE,
            False,
            "one byte for 16 elements of K, swizzled; a strided view of which the kernel takes the pointer",
            None,
            MMA,
            (torch.uint8,),
        ),
    ),
    inputs=(_X, _ALPHA),
    multiple=(64, 64),
    products=lambda tokens, n, k: (torch.bfloat16, False),
    alignment="vLLM pads N and K to 64; block scales to 128 rows and 4 columns",
    verified=(_CONVERTER, _FI, _READ),
    notes=(
        "nothing checks the strides of b_descale: a view that was made contiguous, by .contiguous(), a state dict or a dump, is read in another order",
        "FlashInfer also lists SM107 here, which vLLM 0.33 does not",
    ),
    _run=run,
)

SM12X = LinearContract(
    path=f"{PATH}/sm12x",
    function=FUNCTION,
    flags={"backend": "cute-dsl"},
    sm=(120, 121),
    weights=NVFP4,
    operands=(
        Operand(
            "weight",
            "b",
            "weight payload",
            torch.int32,
            "[K/16, 2N]",
            SM12X_WEIGHT_TILES,
            None,
            None,
            False,
            "tiles of 64 rows x 16 elements, in the order in which a warp's threads multiply them",
        ),
        Operand(
            "weight_scale",
            "b_descale",
            "weight block scales",
            torch.uint8,
            "[K/16, N]",
            TRANSPOSED,
            None,
            S0E5M3,
            False,
            "the upper bits of the fp16 that equals the E4M3 scale: exact for every scale >= 0, subnormal ones too",
        ),
    ),
    inputs=(_X, _ALPHA),
    multiple=(64, 64),
    products=lambda tokens, n, k: (torch.bfloat16, True) if tokens == 1 and gemv(n, k) else (torch.float16, False),
    alignment="vLLM pads N and K to 64",
    verified=(_CONVERTER, _FI, _READ),
    notes=(
        f"activations are converted to fp16 in registers: beyond {FP16_LARGEST:.0f} they become inf. One token of a large layer may take the GEMV, which does "
        "not convert: then decoding is right and prefill is not",
        "vLLM 0.33 takes SM120 to SM129, FlashInfer 0.7.4 only SM120 and SM121",
        "recoding to S0E5M3 loses nothing here; Marlin's S0E5M3 multiplies by 2^7 and flushes scales below 2^-6 to 0",
    ),
    _run=run,
)

CONTRACTS = (SM100, SM12X)


def by_layout(family: str) -> LinearContract:
    """The contract of "sm100" (SM100, SM103) or "sm12x"."""
    for c in CONTRACTS:
        if c.path.endswith(f"/{family}"):
            return c
    raise MxdebugError("layout family", "sm100 or sm12x", repr(family))
