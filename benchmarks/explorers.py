"""How long a reader waits for the first picture of each explorer, and for each move, on a layer of gpt-oss-20b's size: python benchmarks/explorers.py

32 experts, w13 5760 x 2880 and w2 2880 x 2880 in MXFP4, on vLLM's FLASHINFER_CUTLASS_MXFP4_BF16 path; weights are random, since no time
depends on them. Medians of several rounds, on two threads; wall time, from a control's change to the finished figure.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from mxdebug.calls import Call
from mxdebug.checkpoints import CheckpointLayer
from mxdebug.contracts import contract
from mxdebug.formats import MXFP4, BlockTensor
from mxdebug.layouts import INTERLEAVED
from mxdebug.recipes import recipe
from mxdebug.reference import Activation, MoELayer
from mxdebug.views import call_explorer, compare, format_explorer, layout_explorer, swiglu_explorer

PATH, EXPERTS, SIZE, TOKENS, TOP = "mxfp4/FLASHINFER_CUTLASS_MXFP4_BF16", 32, 2880, 16, 4
FIRST, MOVE, ROUNDS = 0.5, 0.2, 5  # seconds: the goals; how often each is measured
FAULTS = ("scales-linear", "weights-linear", "rows-gate-up", "rows-interleaved", "nibbles-swapped", "scales-transposed", "swiglu-limit-lost", "bias-missing")


def made() -> tuple[Call, CheckpointLayer]:
    """A right call, and the layer that it was made from."""
    g = torch.Generator().manual_seed(0)

    def weight(rows: int, columns: int) -> BlockTensor:
        payload = torch.randint(0, 256, (EXPERTS, rows, columns // 2), generator=g, dtype=torch.uint8)
        return BlockTensor(payload, torch.randint(118, 124, (EXPERTS, rows, columns // 32), generator=g, dtype=torch.uint8), MXFP4)

    def bias(rows: int) -> torch.Tensor:
        return torch.randn(EXPERTS, rows, generator=g).bfloat16()

    activation = Activation("swiglu", *(torch.full((EXPERTS,), v) for v in (1.702, 1.0, 7.0)))
    layer = MoELayer(weight(SIZE, SIZE), weight(SIZE, SIZE), weight(SIZE, SIZE), activation, bias(SIZE), bias(SIZE), bias(SIZE))
    x = torch.randn(TOKENS, SIZE, generator=g).bfloat16()
    ids = torch.stack([torch.randperm(EXPERTS, generator=g)[:TOP] for _ in range(TOKENS)]).int()
    arguments = recipe("vllm", PATH, "gpt-oss").plan(layer).arguments(layer, x, ids, torch.softmax(torch.randn(TOKENS, TOP, generator=g), -1))
    call = Call(contract(PATH).function, "flashinfer", arguments, frozenset(), (), "completed", {}, 1, "", 1, False, "", None)
    return call, CheckpointLayer(0, "gpt-oss", layer, INTERLEAVED, {}, {}, frozenset())


def seconds(run: Callable[[], object]) -> float:
    """Wall time of one run."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def report(name: str, first: Callable[[], object], moves: dict[str, Callable[[object], object]]) -> None:
    """The first picture, and each move."""
    opened = statistics.median(seconds(first) for _ in range(ROUNDS))
    taken: dict[str, list[float]] = {}
    for _ in range(ROUNDS):
        explorer = first()  # a new one each round, so that nothing is kept from the last
        for what, move in moves.items():
            taken.setdefault(what, []).append(seconds(lambda: move(explorer)))
    medians = {what: statistics.median(times) for what, times in taken.items()}
    print(f"{name:<16} {opened:>7.3f}")
    for what, took in medians.items():
        print(f"  {what:<22} {took:>7.3f}")


def main() -> None:
    torch.set_num_threads(2)
    call, layer = made()
    c, meant = contract(PATH), layer.layer.activation
    print(f"seconds to the first picture (goal {FIRST}), and for each move (goal {MOVE})")
    report("call", lambda: call_explorer.Explorer(call, layer),
           {f: lambda e, f=f: e.guess(f) for f in FAULTS} | {"two faults": lambda e: e.guess("rows-gate-up", "scales-linear")})
    report("SwiGLU", lambda: swiglu_explorer.Explorer(c, call.arguments, meant),
           {"limit": lambda e: e.move(limit=5.0), "alpha": lambda e: e.move(alpha=1.2), "beta": lambda e: e.move(beta=0.5),
            "surface": lambda e: e.move(view="surface")})
    report("layout", lambda: layout_explorer.Explorer("128x4", rows=EXPERTS * 2 * SIZE, columns=SIZE // 32, row=37, column=5),
           {"row": lambda e: e.move(row=4000), "offset": lambda e: e.move(offset=99999), "read as": lambda e: e.move(read_as="linear"),
            "another layout": lambda e: e.move(layout="8x4")})
    report("format", lambda: format_explorer.Explorer("MXFP4", number=0.01, outlier=1.0),
           {"outlier": lambda e: e.move(outlier=3.0), "number": lambda e: e.move(number="0.3"), "format": lambda e: e.move(format="MXFP8")})
    print()
    read = c.decode(call.arguments, experts=[3])
    one = layer.layer.take([3])
    views = {"one expert decoded": lambda: c.decode(call.arguments, experts=[3]),
             "w13 against the checkpoint": lambda: compare.draw(compare.of_layers(one, read, "w13", title="w13"))}
    for name, view in views.items():
        print(f"{name:<28} {statistics.median(seconds(view) for _ in range(ROUNDS)):.3f} s")


if __name__ == "__main__":
    main()
