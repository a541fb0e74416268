"""What can this machine do? Versions, GPU, and for each path whether its kernel runs here or why not."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from .calls import dump_recipe
from .contracts import CONTRACTS, Contract, cutlass
from .contracts.cutedsl_w4a16 import SM100
from .recipes import RECIPES
from .recipes.w4a16.recipe import LINEAR_RECIPES
from .recipes.w4a16.capability import capability


def installed(package: str) -> str | None:
    """The installed version of a package, without importing it; None where it is absent."""
    try:
        return version(package)
    except PackageNotFoundError:
        # A source tree or an unpacked wheel on the path has no metadata, and works all the same.
        module = package.removesuffix("-python").replace("-", "_")
        return "on the path, version unknown" if find_spec(module) is not None else None


def gpu() -> tuple[str, int] | None:
    """(name, SM) of the first CUDA GPU; None where there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return torch.cuda.get_device_name(), major * 10 + minor


def runs_here(contract: Contract) -> tuple[bool, str]:
    """Whether the kernel of a path runs on this machine, and why not or what it costs. Imports nothing that is missing."""
    found = gpu()
    sms = ", ".join(f"SM{s}" for s in contract.sm)
    emulation = ("Emulation runs here; 0.84 in 10,000 of its outputs differ from an H200's, most by one step" if contract.sm == (90,)
                 else "Emulation runs here; it was not compared with a GPU")
    if contract.function != cutlass.FUNCTION:
        return False, f"needs a GPU of {sms}, and mxdebug does not call this kernel itself. {emulation}"
    if found is None:
        return False, f"needs a GPU of {sms}; this machine has no CUDA GPU. {emulation}"
    if found[1] not in contract.sm:
        return False, f"needs a GPU of {sms}; this machine has {found[0]} (SM{found[1]}). {emulation}"
    if installed("flashinfer-python") is None:
        return False, "needs flashinfer-python: pip install flashinfer-python flashinfer-jit-cache"
    if installed("flashinfer-jit-cache") is None:
        return True, ("FlashInfer would compile its SM90 MoE module first: 248 CUDA files, tens of minutes on many cores, hours on few. "
                      "Install flashinfer-jit-cache of the same version instead")
    return True, "compiled kernels come from flashinfer-jit-cache"


def w4a16() -> list[str]:
    """The section on NVFP4 W4A16 linear layers: does FlashInfer's kernel run here, what does vLLM take, and what stands in for it."""
    ok, why = capability()
    found = gpu()
    sm = found[1] if found else None
    lines = ["", "NVFP4 W4A16 linear (what vLLM takes: mxdebug select-linear)", "  nvfp4_w4a16/flashinfer_cutedsl",
             f"    kernel               {'runs here' if ok else 'does not run here'}: {why}"]
    if ok:
        takes = "takes it by itself" if sm in (100, 103) else "takes Marlin; this one with --linear-backend flashinfer_cutedsl"
        return [*lines, f"    vLLM                 {takes}", *_known()]
    instead = "vLLM takes Humming where it is installed, else Marlin (0.30: Marlin)" if sm == 90 else "vLLM takes Marlin (SM75 and newer)"
    stands_in = ("mxdebug's own Triton kernel runs on this GPU, and the CPU emulation" if sm is not None and sm >= 80
                 else "mxdebug's CPU emulation; its own Triton kernel needs SM80 or newer")
    return [*lines, f"    instead              {instead}", f"    stands in for it     {stands_in}", *_known()]


def _known() -> list[str]:
    """What the two layouts were checked against, and how vLLM is made to take them."""
    lines = [f"    verified             {v.how}, {v.versions}:\n                           {v.result}" for v in SM100.verified]
    ways = {r.forced_by: f"SM{r.contract.sm[0] // 10}x" for r in LINEAR_RECIPES}
    return [*lines, *(f"    to make vLLM take it {way}  [{sm}]" for way, sm in ways.items())]


def report() -> str:
    """The whole report as text."""
    import torch

    found = gpu()
    lines = ["This machine", f"  Python                 {platform.python_version()}", f"  torch                  {torch.__version__}"]
    lines += [f"  {p:<22} {installed(p) or 'not installed'}" for p in ("flashinfer-python", "flashinfer-jit-cache", "vllm")]
    lines += [f"  GPU                    {f'{found[0]}, SM{found[1]}' if found else 'none that CUDA sees'}", ""]
    lines += ["To record the calls of a running engine (workers are other processes: set this where the engine starts)", ""]
    lines += [f"  {line}" for line in dump_recipe().rstrip().splitlines()]
    lines += ["", "  then: mxdebug diagnose flashinfer_dumps --checkpoint MODEL_DIR",
              "  in your own process: with mxdebug.capture() as calls: ...; mxdebug.diagnose(calls[0], MODEL_DIR)", "",
              "Paths (what vLLM takes by itself: mxdebug select; what a kernel reads: mxdebug contract PATH)"]
    for c in CONTRACTS.values():
        ok, why = runs_here(c)
        lines += [f"  {c.path}", f"    kernel               {'runs here' if ok else 'does not run here'}: {why}"]
        lines += [f"    verified             {v.how}, {v.versions}:\n                           {v.result}" for v in c.verified]
        lines += [f"    to make vLLM take it {r.forced_by}  [{r.checkpoint}]" for r in RECIPES if r.path == c.path]
    return "\n".join(lines + w4a16())
