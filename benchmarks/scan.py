"""How fast is `mxdebug scan`, against reading the same bytes with readinto alone; and how much memory does it take?

    python benchmarks/scan.py [GIB] [FOLDER]

makes a ModelOpt NVFP4 checkpoint of GIB (default 3) below FOLDER (default: the folder for temporary files), measures in fresh processes,
and deletes it. "cold" asks the system to forget the files (posix_fadvise DONTNEED); where it does not, cold is warm. On a machine that
others use, "CPU s" (system and user, of all processes) says more than seconds. Memory: of the first process, at most (VmHWM).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

N, K, PROJECTIONS = 2048, 4096, ("gate_proj", "up_proj", "down_proj")
_READ = """
import sys, time, json
pieces = json.load(open(sys.argv[1]))
buffer = memoryview(bytearray(1 << 24))
began, worked, files, total = time.perf_counter(), time.process_time(), {}, 0
for path, start, size in pieces:
    f = files.get(path) or files.setdefault(path, open(path, 'rb', buffering=0))
    f.seek(start)
    while size:
        n = f.readinto(buffer[:min(size, len(buffer))])
        size, total = size - n, total + n
print(total, time.perf_counter() - began, time.process_time() - worked)
"""
_SCAN = """
import os, sys, time
from mxdebug.scan import scan
options = dict(payload='payload' in sys.argv, processes=int(sys.argv[2]), index=sys.argv[1] + '.index' if 'index' in sys.argv else None)
if __name__ == '__main__':
    began, worked = time.perf_counter(), sum(os.times()[:4])
    report = scan(sys.argv[1], **options)
    seconds, worked = time.perf_counter() - began, sum(os.times()[:4]) - worked
    # Not getrusage, which remembers the process that started this one.
    own = next(int(line.split()[1]) for line in open('/proc/self/status') if line.startswith('VmHWM'))
    print(sum(report.read.values()), seconds, worked, own / 1024, report.verdict)
"""


def make(folder: Path, gib: float) -> None:
    """Shards of 512 MiB and less: experts of N x K, each with other bytes."""
    g, weight_map = torch.Generator().manual_seed(0), {}
    per = N * K // 2 + N * K // 16
    experts, shard, part = max(1, int(gib * 2**30 / per / 3)), 0, {}
    for e in range(experts):
        for name in PROJECTIONS:
            n, k = (K, N) if name == "down_proj" else (N, K)
            at = f"model.layers.0.mlp.experts.{e}.{name}."
            part[at + "weight"] = torch.randint(0, 256, (n, k // 2), generator=g, dtype=torch.uint8)
            part[at + "weight_scale"] = torch.randint(0x28, 0x78, (n, k // 16), generator=g, dtype=torch.uint8).view(torch.float8_e4m3fn)
            part |= {at + "weight_scale_2": torch.tensor(2.0**-10), at + "input_scale": torch.tensor(2.0**-9)}
        if len(part) * per / 4 > 2**29 or e == experts - 1:
            file = f"model-{shard:05d}.safetensors"
            save_file(part, folder / file)
            weight_map |= dict.fromkeys(part, file)
            shard, part = shard + 1, {}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}))


def forget(folder: Path) -> None:
    """Ask the system to drop the files from its cache."""
    for path in folder.glob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def pieces(folder: Path, payload: bool) -> list[tuple[str, int, int]]:
    """What the scan reads, in its order."""
    from mxdebug.scan.folder import open_folder
    from mxdebug.scan.tasks import task_of
    from mxdebug.scan.weights import find_weights

    opened = open_folder(folder)
    tasks = [task_of(w, payload, False) for w in find_weights(opened.tensors, (), "ModelOpt NVFP4").quantised]
    return [
        (str(folder / p.file), p.start, p.size)
        for t in sorted(tasks, key=lambda t: (t.pieces[0].file, t.pieces[0].start))
        for p in t.pieces
    ]


def run(code: str, *arguments: str) -> list[str]:
    """The words that a fresh Python prints; from a file, since worker processes import it again."""
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(code)
        file.flush()
        return subprocess.run([sys.executable, file.name, *arguments], capture_output=True, text=True, check=True).stdout.split()


def numbers(cache: str, size: float, seconds: float, worked: float) -> str:
    """Columns of the table."""
    return f"{cache:<5} {size / 2**20:>9.0f} {seconds:>8.2f} {size / 2**30 / seconds:>6.2f} {worked:>6.2f}"


def main() -> None:
    gib, root = float(sys.argv[1]) if len(sys.argv) > 1 else 3.0, sys.argv[2] if len(sys.argv) > 2 else None
    folder = Path(tempfile.mkdtemp(dir=root))
    try:
        make(folder, gib)
        print(f"{sum(p.stat().st_size for p in folder.iterdir()) / 2**30:.2f} GiB, {os.cpu_count()} cores")
        print(f"{'what':<34} {'cache':<5} {'MiB read':>9} {'seconds':>8} {'GiB/s':>6} {'CPU s':>6} {'MiB memory':>11}")
        for payload in (False, True):
            plan = folder / f"pieces{payload}.json"
            plan.write_text(json.dumps(pieces(folder, payload)))
            for cache in ("cold", "warm", "warm"):  # the first "warm" fills the cache where cold did not
                if cache == "cold":
                    forget(folder)
                size, seconds, worked = map(float, run(_READ, str(plan)))
                print(f"{'readinto ' + ('all' if payload else 'scales'):<34} {numbers(cache, size, seconds, worked)}")
            for options in ([], ["payload"], ["payload", "index"])[payload : 1 + 2 * payload]:
                for processes in ("1", "2"):
                    for cache in ("cold", "warm"):
                        if cache == "cold":
                            forget(folder)
                        began = time.perf_counter()
                        size, seconds, worked, peak = map(float, run(_SCAN, str(folder), processes, *options)[:4])
                        wall = time.perf_counter() - began
                        what = f"scan {' '.join('--' + o for o in options)} --processes {processes}".replace("  ", " ")
                        print(
                            f"{what:<34} {numbers(cache, size, seconds, worked)} {peak:>11.0f}   ({wall:.1f} s with imports)",
                            flush=True,
                        )
    finally:
        shutil.rmtree(folder)
        Path(str(folder) + ".index").unlink(missing_ok=True)


if __name__ == "__main__":
    main()
