"""How far from the limit, and from others? Ratios of medians, measured in turns in one run: python benchmarks/speed.py [--device cuda] [SECTION ...]

SECTIONS: dequantise, layouts, quantise, diagnose, import (all by default; scan has a script of its own). The limit of dequantise is the time in which
torch copies a bf16 tensor of the result's size, that of layouts a copy of as many bytes. Peers are measured where they are installed
(pip install compressed-tensors torchao transformers); what is not is said. `times` says how often longer than the limit; below 1 is faster.
Each table is printed when it is complete: six minutes on two cores in all, three of them diagnoses, and two on an H200.
"""

from __future__ import annotations

import argparse
import functools
import gc
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")  # as the command line does: torch reads it when it is loaded

import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from mxdebug import fast  # noqa: E402
from mxdebug.formats import MXFP4, MXFP8, NVFP4, BlockFormat, BlockTensor, quantise
from mxdebug.layouts import SM12X_WEIGHT_TILES, SM90_SCALE_FOLD, SM90_WEIGHT_INTERLEAVE, SWIZZLE_8x4, SWIZZLE_128x4

EXPERTS, ROWS, COLUMNS, ROUNDS, LAUNCHES = 8, 5760, 2880, 9, 20  # gate and up of 8 experts of gpt-oss
Works = dict[str, Callable[[], object]]


def measure(works: Works, device: str, rounds: int = ROUNDS) -> dict[str, float]:
    """Median seconds of each, in turns; a warm-up first, in which kernels are compiled."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for round in range(rounds + 1):
        for name, work in works.items():
            if device == "cuda":
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                begin.record()
                for _ in range(LAUNCHES):  # one after the other, so that the GPU does not wait for Python
                    work()
                end.record()
                torch.cuda.synchronize()
                seconds = begin.elapsed_time(end) / 1e3 / LAUNCHES
            else:
                start = time.perf_counter()
                work()
                seconds = time.perf_counter() - start
            taken[name] += [seconds] if round else []
    return {name: statistics.median(t) for name, t in taken.items()}


def table(title: str, works: Works, limit: str, device: str, rounds: int = ROUNDS) -> None:
    """One line each: milliseconds, and how often the limit."""
    found = measure(works, device, rounds)
    print(f"\n{title:<58}{'ms':>10}{'times':>8}")
    for name, seconds in found.items():
        print(f"  {name:<56}{1e3 * seconds:>10.3f}{seconds / found[limit]:>8.2f}")


def drawn(device: str, *shape: int, low: int = 0, high: int = 256) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8).to(device)


def made(fmt: BlockFormat, device: str, experts: int) -> BlockTensor:
    """Payload of every code; scales that differ by row and block; for NVFP4 a global scale for each expert."""
    low, high = (0x28, 0x78) if fmt.outer else (118, 126)
    payload = drawn(device, experts, ROWS, COLUMNS // (2 if fmt.packed else 1), high=256 if fmt.packed else 0x7E)
    outer = torch.linspace(0.001, 0.002, experts, device=device) if fmt.outer else None
    return BlockTensor(payload, drawn(device, experts, ROWS, COLUMNS // fmt.block, low=low, high=high), fmt, outer)


def plain_mxfp4(payload: Tensor, scales: Tensor, values: Tensor) -> Tensor:
    """The expression that one writes first: both nibbles through a table of 16, times 2^(scale - 127)."""
    codes = torch.stack([payload & 0xF, payload >> 4], -1).flatten(-2)
    return (values[codes.int()].unflatten(-1, (-1, 32)) * torch.exp2(scales.float() - 127)[..., None]).flatten(-2).to(torch.bfloat16)


def peers(t: BlockTensor) -> Iterator[tuple[str, Callable[[], object]]]:
    """Others that dequantise the same MXFP4 tensor to bf16."""
    values = MXFP4.element.table().to(t.payload.device)
    yield "torch, the plain expression", lambda: plain_mxfp4(t.payload, t.scales, values)
    try:
        compiled = torch.compile(plain_mxfp4)
        compiled(t.payload, t.scales, values)
        yield "torch.compile of it", lambda: compiled(t.payload, t.scales, values)
    except Exception as error:
        print(f"  torch.compile: not measured, {type(error).__name__}")
    try:
        from torchao.prototype.mx_formats.mx_tensor import to_dtype

        scales = t.scales.view(torch.float8_e8m0fnu)
        yield "torchao to_dtype", lambda: to_dtype(t.payload, scales, torch.float4_e2m1fn_x2, 32, torch.bfloat16)
    except Exception as error:
        print(f"  torchao: not measured, {type(error).__name__}: {str(error)[:80]}")
    try:
        from transformers.integrations.mxfp4 import convert_moe_packed_tensors

        blocks = t.payload.unflatten(-1, (-1, 16))
        yield "transformers convert_moe_packed_tensors", lambda: convert_moe_packed_tensors(blocks, t.scales, dtype=torch.bfloat16)
    except Exception as error:
        print(f"  transformers: not measured, {type(error).__name__}: {str(error)[:80]}")
    try:
        from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8

        shape = t.payload.shape[0] * t.payload.shape[1], t.payload.shape[2]

        def unpacked() -> Tensor:
            codes = unpack_fp4_from_uint8(t.payload.view(shape), shape[0], 2 * shape[1], dtype=torch.bfloat16)
            return codes.unflatten(-1, (-1, 32)) * torch.exp2(t.scales.float() - 127).bfloat16().view(shape[0], -1, 1)

        unpacked()
        yield "compressed-tensors unpack_fp4_from_uint8, times scales", unpacked
    except Exception as error:
        print(f"  compressed-tensors: not measured, {type(error).__name__}: {str(error)[:80]}")


def dequantise(device: str) -> None:
    """MXFP4, NVFP4 and MXFP8 to bf16, against a copy of the result; MXFP4 against peers."""
    for fmt in (MXFP4, NVFP4, MXFP8):
        t = made(fmt, device, EXPERTS * (4 if device == "cuda" else 1))  # enough work to hide the launch
        out = torch.empty(t.shape, dtype=torch.bfloat16, device=device)
        other = torch.zeros_like(out)
        works: Works = {"copy of the bf16 result": lambda: other.copy_(out), "mxdebug, into memory": lambda: t.dequantise(torch.bfloat16, out=out),
                        "mxdebug, into new memory": lambda: t.dequantise(torch.bfloat16)}
        works |= dict(peers(t)) if fmt is MXFP4 else {}
        table(f"{fmt.name} {list(t.shape)} to bf16", works, "copy of the bf16 result", device, ROUNDS if device == "cuda" else 5)


def layouts(device: str) -> None:
    """Pack and unpack, against a copy of the bytes; the weights of 8 experts, and the scales of 128."""
    for layout, rows, columns in ((SM90_WEIGHT_INTERLEAVE, EXPERTS * ROWS, COLUMNS // 2), (SM12X_WEIGHT_TILES, EXPERTS * ROWS, COLUMNS // 2),
                                  (SWIZZLE_128x4, 128 * ROWS, COLUMNS // 32 // 4 * 4), (SWIZZLE_8x4, 128 * ROWS, COLUMNS // 32 // 4 * 4), (SM90_SCALE_FOLD, 128 * ROWS, 88)):
        t = drawn(device, rows * (4 if device == "cuda" else 1), columns)
        packed, other = layout.pack(t), torch.empty_like(t)
        works: Works = {"copy of the bytes": lambda: other.copy_(t), "copy into new memory": lambda: t.clone(), "mxdebug pack": lambda: layout.pack(t),
                        "mxdebug unpack": lambda: layout.unpack(packed, *t.shape)}
        if device == "cuda" and layout is SWIZZLE_128x4:
            try:
                from flashinfer import block_scale_interleave

                works["FlashInfer block_scale_interleave"] = lambda: block_scale_interleave(t)
                works["FlashInfer block_scale_interleave"]()
            except Exception as error:
                works.pop("FlashInfer block_scale_interleave", None)
                print(f"  FlashInfer: not measured, {type(error).__name__}: {str(error)[:80]}")
        table(f"{layout.name} {len(t)} x {columns}", works, "copy into new memory", device)


def quantisation(device: str) -> None:
    """From bf16, against a copy of it."""
    x = torch.randn(EXPERTS, ROWS, COLUMNS, generator=torch.Generator().manual_seed(0)).bfloat16().to(device)
    x = x.repeat(4 if device == "cuda" else 1, 1, 1)  # enough work to hide the launches
    other = torch.empty_like(x)
    works: Works = {"copy of the bf16 tensor": lambda: other.copy_(x)}
    works |= {f"mxdebug {fmt.name}": functools.partial(quantise, x, fmt, rule=None if fmt.outer else "floor") for fmt in (MXFP4, NVFP4, MXFP8)}
    try:
        from torchao.prototype.mx_formats.mx_tensor import to_mx

        works["torchao to_mx MXFP4"] = lambda: to_mx(x, torch.float4_e2m1fn_x2, 32)
        works["torchao to_mx MXFP4"]()
    except Exception as error:
        works.pop("torchao to_mx MXFP4", None)
        print(f"  torchao: not measured, {type(error).__name__}: {str(error)[:80]}")
    table(f"bf16 {list(x.shape)} to blocks", works, "copy of the bf16 tensor", device, 3)


def diagnosis(device: str) -> None:
    """One call of a layer of gpt-oss-20b's size, and with 128 experts, with its checkpoint; a clean one and faulty ones."""
    import explorers

    from mxdebug.contracts import contract
    from mxdebug.diagnosis import diagnose
    from mxdebug.diagnosis.device import to_device
    from mxdebug.faults import FAULTS, Situation
    from mxdebug.memory import give_back
    from mxdebug.recipes import recipe

    print(f"\n{'diagnose, hidden and intermediate 2880, 16 tokens, top-4':<76}{'seconds':>8}{'GiB more':>10}")
    for explorers.EXPERTS in (32, 128):
        call, chosen = (to_device(made, torch.device(device)) for made in explorers.made())
        c, a = contract(explorers.PATH), call.arguments
        call = replace(call, outputs=(c.emulate(a),))
        s = Situation.right(recipe("vllm", explorers.PATH, "gpt-oss"), chosen.layer, a["input"], a["token_selected_experts"], a["token_final_scales"])
        for stack in ((), ("scales-linear",), ("weights-linear", "rows-gate-up"), ("rows-interleaved",), ("scales-linear", "nibbles-swapped", "swiglu-limit-lost")):
            if stack:
                arguments, output = functools.reduce(lambda s, f: FAULTS[f].injected(s), stack, s).build()
                call = replace(call, arguments=arguments, outputs=(output,))
            seconds, more = math.inf, 0.0
            for _ in range(2):  # kernels are compiled in the first
                gc.collect()
                give_back()
                before = held(device, reset=True)
                start = time.perf_counter()
                d = diagnose(call, chosen)
                seconds, more = min(seconds, time.perf_counter() - start), max(held(device) - before, more)  # nan stays
            what = f"{explorers.EXPERTS} experts, {' + '.join(stack) or 'clean'}: {d.verdict}"
            print(f"  {what:<74}{seconds:>8.2f}{more:>10.2f}", flush=True)
        size = sum(t.nbytes for t in a.values() if isinstance(t, Tensor))
        print(f"  (the call's arguments are {size / 2**30:.2f} GiB, and the checkpoint's as much)")
        del call, chosen, s, a


def held(device: str, reset: bool = False) -> float:
    """GiB that this process has held at most since the last reset, of the GPU's memory there; nan where the system does not say."""
    if device == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated() / 2**30
    try:
        if reset:
            with open("/proc/self/clear_refs", "w") as file:
                file.write("5")
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 2**20
    except OSError:
        return math.nan


def imports(device: str) -> None:
    """A fresh process that imports mxdebug and its diagnosis, against one that imports torch."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}  # as after any installation: compiled once

    def fresh(code: str) -> Callable[[], object]:
        return lambda: subprocess.run([sys.executable, "-c", code], check=True, env=env)

    table("import, in a fresh process", {"torch": fresh("import torch"), "mxdebug": fresh("import mxdebug"),
                                         "mxdebug and all that a diagnosis needs": fresh("import mxdebug; mxdebug.diagnose")}, "torch", "cpu", 5)


SECTIONS = {"dequantise": dequantise, "layouts": layouts, "quantise": quantisation, "diagnose": diagnosis, "import": imports}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("sections", nargs="*", metavar="SECTION")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    kernels = fast.on_gpu if given.device == "cuda" else fast.on_cpu
    large = torch.zeros(fast.WORTH, dtype=torch.uint8, device=given.device)
    name = torch.cuda.get_device_name() if given.device == "cuda" else f"{platform.machine()}, {given.threads} threads"
    print(f"{name}; torch {torch.__version__}; compiled kernels: {'yes' if kernels(large) else 'no'}")
    for section in given.sections or SECTIONS:
        SECTIONS[section](given.device)


if __name__ == "__main__":
    main()
