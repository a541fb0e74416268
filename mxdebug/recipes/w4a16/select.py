"""Which kernel does vLLM take for an NVFP4 W4A16 linear layer, and why not the others?

Rules: `init_nvfp4_linear_kernel` (model_executor/kernels/linear/__init__.py) of vLLM 0.33.0, and of 0.30.0, the first release with #53014;
on vLLM's main branch commit 006fc8985082388efb440afc595045fb4fa04785 still has the latter. What each kernel asks for: `is_supported` in
kernels/linear/nvfp4/. Compared with these functions, executed (tests/data/make_vllm_select_linear.py).

Two ways lead to a kernel. VLLM_BATCH_INVARIANT and, at --linear-backend auto, most GPUs force one; nothing else is asked then, not even
VLLM_DISABLED_KERNELS. Everything else walks a list and takes the first kernel that is supported. The two do not agree: on SM12x auto forces
Marlin, and the list begins with CuTe-DSL. A backend without a W4A16 kernel falls back to the list, not to what auto does.

The hole: no `can_implement` says no, and the activations' dtype is asked for nowhere, so that FP16 on SM100 takes a kernel that raises at
the first forward. It is warned of here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ...errors import MxdebugError
from ..select.selection import Considered
from .capability import BF16_FP4_SMS, SM100_SINCE, numbers, vllm_lists
from .setups import LinearSelection, LinearSetup

_INIT = "kernels/linear/__init__.py, init_nvfp4_linear_kernel"


@dataclass(frozen=True)
class _Kernel:
    """A kernel class. `unsupported` is its `is_supported`: vLLM's reason against it, or None; `bf16` how it raises on other activations."""

    name: str
    backend: str
    file: str
    unsupported: Callable[[LinearSetup], str | None]
    bf16: str = ""

    @property
    def source(self) -> str:
        return f"kernels/linear/nvfp4/{self.file}"


def _cutedsl(s: LinearSetup) -> str | None:
    if not vllm_lists(s.sm):
        return "FlashInfer CuTe-DSL W4A16 requires sm_100 or sm_12x"
    return None if s.has_bf16_fp4 else "FlashInfer CuTe-DSL BF16 x FP4 GEMM is unavailable"


def _b12x(s: LinearSetup) -> str | None:
    if s.sm // 10 != 12:
        return "B12X NVFP4 kernels require a Blackwell 12x device"
    return None if s.b12x_installed else "Install the B12X backend with `pip install vllm[b12x]`"


def _humming(s: LinearSetup) -> str | None:
    if not s.humming_installed:
        return "Humming is not installed"
    return None if s.sm >= 75 else "Humming only supported on SM75+"


_CUTEDSL = _Kernel("FlashInferCuteDslNvFp4W4A16LinearKernel", "flashinfer_cutedsl", "flashinfer.py", _cutedsl,
                   "FlashInfer CuTe-DSL W4A16 requires BF16 input, got torch.float16")
_MARLIN = _Kernel("MarlinNvFp4LinearKernel", "marlin", "marlin.py", lambda s: None if s.sm >= 75 else "Marlin FP4 not available")
_B12X = _Kernel("B12xNvFp4W4A16LinearKernel", "b12x", "b12x.py", _b12x, "b12x NVFP4 W4A16 requires BF16 input, got torch.float16")
_HUMMING = _Kernel("HummingNvFp4LinearKernel", "humming", "humming.py", _humming)


@dataclass(frozen=True)
class _Rules:
    """listed: those of _POSSIBLE_NVFP4_KERNELS in a16_kernels, in its order; prefers_humming: the SMs where Humming goes before Marlin."""

    listed: tuple[_Kernel, ...]
    prefers_humming: frozenset[int]


_RULES = {"0.33": _Rules((_CUTEDSL, _MARLIN, _B12X, _HUMMING), frozenset({90})),
          "53014": _Rules((_CUTEDSL, _MARLIN, _HUMMING), frozenset())}
_ALIASES = {"0.33.0": "0.33", "0.30": "53014", "0.30.0": "53014", "#53014": "53014"}
LINEAR_VERSIONS = tuple(_RULES)


def _order(s: LinearSetup, rules: _Rules) -> list[_Kernel]:
    """`prioritize_humming`: Humming directly ahead of Marlin where it is preferred."""
    kernels = list(rules.listed)
    if s.sm in rules.prefers_humming:
        kernels.remove(_HUMMING)
        kernels.insert(kernels.index(_MARLIN), _HUMMING)
    return kernels


def _batch_invariant(s: LinearSetup) -> tuple[str, tuple[str, ...]]:
    """vLLM's refusal and what it logs before. Which kernel it names hangs on a compiled function, `cutlass_scaled_mm_supports_fp4`."""
    kernel, backend, words = ("CutlassNvFp4LinearKernel", "cutlass", "CUTLASS") if 100 <= s.sm < 130 else (
        "EmulationNvFp4LinearKernel", "emulation", "emulation")
    logged = () if s.backend in ("auto", backend) else (
        f"VLLM_BATCH_INVARIANT overrides --linear-backend={s.backend}; using the {words} backend for deterministic execution.",)
    return f"{kernel} does not support W4A16", logged


def _forced(s: LinearSetup, rules: _Rules) -> tuple[_Kernel, str] | None:
    """The kernel that --linear-backend auto forces, and why; None where it walks the list."""
    if s.backend != "auto":
        return None
    if s.sm in (100, 103):
        return (_CUTEDSL if _cutedsl(s) is None else _MARLIN), "auto takes CuTe-DSL on SM100 and SM103 where FlashInfer has it, else Marlin"
    return None if s.sm in rules.prefers_humming else (_MARLIN, "auto takes Marlin on this GPU, CuTe-DSL on SM100 and SM103 only")


def _row(kernel: _Kernel, s: LinearSetup, taken: _Kernel | None, before: str) -> Considered:
    """Why a kernel was not taken; `before` where nothing was asked of it."""
    if kernel is taken:
        return Considered(kernel.name, True, "supports this setup", kernel.source)
    reason = kernel.unsupported(s)
    words = "it supports this setup" if reason is None else f"nor would it run: {reason}"
    return Considered(kernel.name, False, f"{before}; {words}", kernel.source)


def _warnings(s: LinearSetup, taken: _Kernel, forced: bool) -> tuple[tuple[str, ...], str]:
    """What goes wrong after the choice, or beside it; and the one that ends the run."""
    fails, more = "", []
    if taken.bf16 and s.dtype == "float16":
        fails = (f'fails at the first forward with ValueError "{taken.bf16}": the choice does not read the activations\' dtype. '
                 "Take --dtype bfloat16 or --linear-backend marlin")
    elif taken is _CUTEDSL and s.sm not in BF16_FP4_SMS:
        fails = (f"fails at the first forward: vLLM takes SM120 to SM129, FlashInfer 0.7.4's mm_bf16_fp4 only SM120 and SM121 of them. "
                 f"Take --linear-backend marlin on SM{s.sm}")
    elif s.sm < 80 and s.dtype == "bfloat16":
        fails = (f"fails on SM{s.sm} when a worker starts (platforms/cuda.py, check_if_supports_dtype): "
                 '"Bfloat16 is only supported on GPUs with compute capability of at least 8.0"')
    if taken is _CUTEDSL and s.sm < 120 and isinstance(s.flashinfer, str) and numbers(s.flashinfer) < SM100_SINCE:
        more.append(f"FlashInfer {s.flashinfer} gives SM{s.sm} the kernel of SM12x; SM100's came with 0.6.18, which vLLM does not check")
    if forced and taken.name in s.disabled:
        more.append(f"VLLM_DISABLED_KERNELS names {taken.name}, but is not read where auto forces a kernel; --linear-backend is")
    return ((fails, *more) if fails else tuple(more)), fails


def select_linear(setup: LinearSetup, version: str = "0.33") -> LinearSelection:
    """The kernel that vLLM takes. What vLLM refuses is an answer: path None, and its message. Version "53014" is #53014's rule (0.30).

    Raises MxdebugError for a version whose sources were not read.
    """
    version = _ALIASES.get(version, version)
    if version not in _RULES:
        known = ", ".join((*_RULES, *_ALIASES))
        raise MxdebugError("vLLM version", f"one of {known}", version, "the rules of selection change between releases")
    rules, kernels = _RULES[version], _order(setup, _RULES[version])

    def answer(taken: _Kernel | None, why: str, rows: list[Considered], **more: object) -> LinearSelection:
        path = taken and f"nvfp4_w4a16/{taken.backend}"
        return LinearSelection(setup, version, taken and taken.name, path, why, tuple(rows), **more)

    if setup.batch_invariant:
        refused, logged = _batch_invariant(setup)
        rows = [_row(k, setup, None, "VLLM_BATCH_INVARIANT forces another kernel") for k in kernels]
        return answer(None, f"VLLM_BATCH_INVARIANT, and no batch-invariant kernel is W4A16 [{_INIT}]", rows, refused=refused, logged=logged)
    if (forced := _forced(setup, rules)) is not None:
        taken, why = forced
        rows = [_row(k, setup, taken, f"not asked: auto forces {taken.name}") for k in kernels]
        if taken is not _CUTEDSL:  # the one that auto asked before
            rows[0] = _row(_CUTEDSL, setup, taken, "auto takes it on SM100 and SM103 only")
            if setup.sm in (100, 103):
                rows[0] = replace(rows[0], reason=_CUTEDSL.unsupported(setup))
        if (reason := taken.unsupported(setup)) is not None:
            rows = [replace(r, taken=False, reason=reason) if r.taken else r for r in rows]
            return answer(None, f"{why} [{_INIT}]", rows, refused=f"Forced NVFP4 kernel {taken.name} is not supported: {reason}")
        warnings, fails = _warnings(setup, taken, forced=True)
        return answer(taken, f"{why} [{_INIT}]", rows, warnings=warnings, fails=fails)
    return _walk(setup, version, kernels, answer)


def _walk(setup: LinearSetup, version: str, kernels: list[_Kernel], answer: Callable[..., LinearSelection]) -> LinearSelection:
    """The first of the list that is supported and not disabled; of those of --linear-backend only, where it has one."""
    backend, logged, notes = setup.backend, (), ()
    asked = kernels if backend == "auto" else [k for k in kernels if k.backend == backend]
    why = f"--linear-backend {backend}" if backend != "auto" else "auto walks the list where Humming is preferred"
    if not asked:
        asked, why = kernels, f"--linear-backend {backend} has no W4A16 kernel in vLLM {version}: first of the list"
        logged = (f"--linear-backend={backend} has no kernel for this linear layer type; using automatic selection for that layer type.",)
    rows, failures, taken = [], [], None
    for k in kernels:
        reason = k.unsupported(setup)
        if k not in asked:
            rows.append(_row(k, setup, None, f"not asked: --linear-backend {backend}"))
        elif taken is not None:
            rows.append(_row(k, setup, None, f"comes after {taken.name}"))
        elif k.name in setup.disabled:
            failures.append(f" {k.name} disabled by environment variable")
            rows.append(Considered(k.name, False, "disabled by VLLM_DISABLED_KERNELS", k.source))
        elif reason is not None:
            failures.append(f"{k.name}: {reason}")
            rows.append(Considered(k.name, False, reason, k.source))
        else:
            taken = k
            rows.append(_row(k, setup, k, ""))
    if taken is None:
        refused = "Failed to find a kernel that can implement the NVFP4 linear layer. Reasons: \n" + "\n".join(failures)
        return answer(None, f"{why} [{_INIT}]", rows, refused=refused, logged=logged)
    warnings, fails = _warnings(setup, taken, forced=False)
    if logged:
        auto = select_linear(replace(setup, linear_backend="auto", linear_backend_per_quant=None), version).kernel
        if auto != taken.name:
            notes = (f"not what auto does: without --linear-backend {backend} vLLM would take {auto or 'no kernel'}",)
    return answer(taken, f"{why} [{_INIT}]", rows, logged=logged, warnings=(*warnings, *notes), fails=fails)
