"""Run a path's real kernel on this machine's GPU, clean and with every fault, and compare it with the emulation bit for bit."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from .contracts import Contract, contract
from .errors import MxdebugError
from .faults import FAULTS, INPUT_FAULTS, OPERANDS, Situation
from .formats import MXFP4, BlockTensor
from .metrics import Comparison, compare
from .recipes import Recipe, recipe
from .reference import EXACT, Activation, MoELayer, Parallel, forward


@dataclass(frozen=True)
class Size:
    """One shape of layer and call."""

    hidden: int
    intermediate: int
    experts: int
    tokens: int
    top_k: int
    parallel: Parallel = Parallel()

    @property
    def name(self) -> str:
        p = self.parallel
        return (f"{self.experts} experts, {self.hidden} x {self.intermediate}, {self.tokens} tokens, top-{self.top_k}"
                + (f", tp {p.tp_rank}/{p.tp_size}" if p.tp_size > 1 else "") + (f", ep {p.ep_rank}/{p.ep_size}" if p.ep_size > 1 else ""))


CLEAN = (
    *(Size(2880, 2880, 32, t, 4) for t in (1, 2, 7, 64, 512)),
    Size(384, 192, 4, 5, 2), Size(1024, 768, 8, 37, 3), Size(2880, 2880, 32, 33, 4, Parallel(2, 1)), Size(2880, 2880, 32, 33, 4, Parallel(1, 0, 4, 2)),
)
FAULTY = (Size(2880, 2880, 32, 16, 4), Size(384, 192, 4, 24, 2))


@dataclass(frozen=True)
class Case:
    """One run: fault id (or "none") and the operands it struck; kernel against emulation; kernel against what the checkpoint means."""

    size: str
    fault: str
    struck: str
    elements: int
    differing: int
    max_ulps: int
    masks_equal: bool
    kernel_relative_l2: float
    truth_relative_l2: float
    truth_cosine: float
    truth_norm_ratio: float


def made_layer(size: Size, device: str, seed: int) -> MoELayer:
    """A layer in which every fault can show: random codes, scales that differ by row and by block, biases, gpt-oss's SwiGLU."""
    g = torch.Generator().manual_seed(seed)

    def weight(rows: int, columns: int) -> BlockTensor:
        # Each block holds a large code, as a quantiser leaves it; scales spread over 2^-10 .. 2^-4, by row and by block.
        payload = torch.randint(0, 256, (size.experts, rows, columns // 2), generator=g, dtype=torch.uint8)
        payload[..., ::16] = payload[..., ::16] | 0x06
        scales = 117 + torch.randint(0, 5, (size.experts, rows, 1), generator=g) + torch.randint(0, 3, (size.experts, rows, columns // 32), generator=g)
        return BlockTensor(payload.to(device), scales.to(torch.uint8).to(device), MXFP4)

    def bias(rows: int) -> torch.Tensor:
        return torch.randn(size.experts, rows, generator=g).to(torch.bfloat16).to(device)

    i, h = size.intermediate, size.hidden
    swiglu = Activation("swiglu", *(torch.full((size.experts,), v, device=device) for v in (1.702, 1.0, 7.0)))
    return MoELayer(weight(i, h), weight(i, h), weight(h, i), swiglu, bias(i), bias(i), bias(h))


def situation(size: Size, recipe: Recipe, device: str = "cpu", seed: int = 0) -> Situation:
    """A right call of that size on made data."""
    g = torch.Generator().manual_seed(seed + 1)
    x = torch.randn(size.tokens, size.hidden, generator=g).to(torch.bfloat16).to(device)
    logits = torch.randn(size.tokens, size.experts, generator=g)
    router, ids = logits.softmax(-1).topk(size.top_k)
    return Situation.right(recipe, made_layer(size, device, seed), x, ids.int().to(device), (router / router.sum(-1, keepdim=True)).to(device), size.parallel)


def cases(path: str, device: str = "cuda") -> Iterator[Case]:
    """Run everything. Raises MxdebugError where this machine cannot run the kernel."""
    c, r = contract(path), recipe("vllm", path, "gpt-oss")
    for size in CLEAN:
        yield _case(size, situation(size, r, device), c, "none", ())
    for size in FAULTY:
        base = situation(size, r, device)
        for f in FAULTS.values():
            if f.strikes == ("kernel",) or f.id == "contract-broken" or f in INPUT_FAULTS:
                continue  # input from upstream says nothing of a layout; what a kernel would do if it broke its contract cannot be asked of a real one
            keys = tuple(k for k in f.strikes if k in OPERANDS)
            both_biases = f.id == "bias-missing"
            for struck in dict.fromkeys([keys, *(() if both_biases else ((k,) for k in keys))]):
                try:
                    broken = f.injected(base, struck)
                    yield _case(size, broken, c, f.id, struck)
                except MxdebugError:
                    continue  # this fault cannot strike at this size (no padding, one rank, unaligned groups)


def _case(size: Size, s: Situation, c: Contract, fault: str, struck: tuple[str, ...]) -> Case:
    arguments = s.arguments()
    got = c.run(arguments)
    same: Comparison = compare(got, c.emulate(arguments))
    right = forward(s.x, s.experts, s.router if fault != "router-squared" else s.router.sqrt(), s.layer.part(s.parallel), parallel=s.parallel,
                    roundings=EXACT, compute=torch.float64).output
    truth = compare(got.double()[:, : s.layer.hidden], right.double())
    return Case(size.name, fault, ", ".join(struck), same.elements, same.differing, same.max_ulps, same.masks_equal, same.relative_l2,
                truth.relative_l2, truth.cosine, truth.norm_ratio)


def converters(device: str = "cuda") -> dict[str, bool]:
    """FlashInfer's own layout kernels against ours, byte for byte, on a padded gpt-oss-20b layer's shapes."""
    from flashinfer import block_scale_interleave
    from flashinfer.fused_moe import interleave_moe_scales_for_sm90_mixed_gemm, interleave_moe_weights_for_sm90_mixed_gemm

    from .layouts import SM90_SCALE_FOLD, SM90_WEIGHT_INTERLEAVE, SWIZZLE_128x4

    g = torch.Generator(device).manual_seed(5)
    weight = torch.randint(0, 256, (4, 5888, 1472), generator=g, dtype=torch.uint8, device=device)
    scale = torch.randint(0, 256, (4, 5888, 92), generator=g, dtype=torch.uint8, device=device)
    odd = torch.randint(0, 256, (3, 161, 23), generator=g, dtype=torch.uint8, device=device)
    pairs = {
        "interleave_moe_weights_for_sm90_mixed_gemm": (interleave_moe_weights_for_sm90_mixed_gemm(weight, "fp4"), SM90_WEIGHT_INTERLEAVE.pack(weight)),
        "interleave_moe_scales_for_sm90_mixed_gemm": (interleave_moe_scales_for_sm90_mixed_gemm(scale), SM90_SCALE_FOLD.pack(scale)),
        "block_scale_interleave, unaligned": (block_scale_interleave(odd), SWIZZLE_128x4.pack(odd)),
    }
    return {name: torch.equal(a.flatten(), b.flatten()) for name, (a, b) in pairs.items()}


def measure(path: str, commit: str) -> dict[str, Any]:
    """Everything as one record for a file: where it ran, with which versions, at which commit, and all cases."""
    from .doctor import runs_here

    ok, why = runs_here(contract(path))
    if not ok:
        raise MxdebugError("this machine", f"one that runs {path}", "one that does not", why)
    import flashinfer

    done = [asdict(c) for c in cases(path)]
    return {"path": path, "commit": commit, "gpu": torch.cuda.get_device_name(), "sm": "".join(map(str, torch.cuda.get_device_capability())),
            "torch": torch.__version__, "cuda": torch.version.cuda, "flashinfer": flashinfer.__version__, "python": platform.python_version(),
            "converters": converters(), "cases": done}


def write(path: str, commit: str, file: Path) -> dict[str, Any]:
    """Measure and write the record as JSON."""
    record = measure(path, commit)
    file.write_text(json.dumps(record, indent=1) + "\n")
    return record


def summary(record: dict[str, Any]) -> str:
    """A measured record in a few lines."""
    done = record["cases"]
    elements, differing = sum(c["elements"] for c in done), sum(c["differing"] for c in done)
    clean = [c for c in done if c["fault"] == "none"]
    wrong = [c for c in done if c["fault"] != "none"]
    return "\n".join((
        f"{record['path']} on {record['gpu']} (SM{record['sm']}), FlashInfer {record['flashinfer']}, torch {record['torch']}, at {record['commit']}",
        f"{len(clean)} clean and {len(wrong)} wrong calls: {elements - differing} of {elements} outputs bit-identical to the emulation "
        f"({1e4 * differing / elements:.2f} in 10,000 differ), largest relative L2 {max(c['kernel_relative_l2'] for c in done):.1e}",
        f"NaN and inf in the same places: {'yes' if all(c['masks_equal'] for c in done) else 'NO'}",
        f"layout kernels byte-exact: {', '.join(f'{k} {v}' for k, v in record['converters'].items())}",
        f"clean calls are {max(c['truth_relative_l2'] for c in clean):.4f} or less from the checkpoint's own result, "
        f"wrong ones {min(c['truth_relative_l2'] for c in wrong):.4f} to {max(c['truth_relative_l2'] for c in wrong):.2f}",
    ))
