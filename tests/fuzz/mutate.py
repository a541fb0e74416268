"""Ways to break a file: bytes, the structure that checksums and lengths would otherwise hide, and what stands in the file's place."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

INTEGERS = (0, 1, 2, 7, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
# What stands in a JSON value's place. Names first: paths, markup, terminal escapes, bidirectional marks, half a surrogate, digits that
# int() refuses.
VALUES = (
    '"../x.safetensors"',
    '"/etc/passwd"',
    '"/dev/zero"',
    '"model.safetensors/../../x"',
    '"\\u0000"',
    '"a\\u0000.safetensors"',
    f'"{"n" * 5000}"',
    '"<script>alert(1)</script>"',
    '"\\"><img src=x onerror=alert(1)>"',
    '"\\u001b[2J\\u001b]0;x\\u0007"',
    '"\\u202egnp.exe"',
    '"\\ud800"',
    '"\\u0085"',
    '"\\u00b2"',
    '"E\\u0301"',
    '"torch.load"',
    "\"__import__('os').system('x')\"",
    '"torch.float4_e2m1fn_x2"',
    '"torch.complex64"',
    '"\\n\\n"',
    '""',
    "NaN",
    "Infinity",
    "-Infinity",
    "1e999",
    "-0.0",
    "1" + "0" * 400,
    "9" * 5000,
    "-1",
    "0",
    "1",
    "3",
    "1.5",
    "true",
    "false",
    "null",
    "[]",
    "{}",
    "2147483648",
    "9223372036854775808",
    "1000000000000",
    "[" * 900 + "]" * 900,
    "[" * 50_000,
    '{"a":' * 400 + "1" + "}" * 400,
    "[1,2,3]",
    '{"type": []}',
    '{"type": "enum", "name": "A.b", "value": ' + "[" * 800 + "]" * 800 + "}",
    '{"type": "list", "length": 1, "items": [{"type": "list", "value": "[]"}]}',
    '{"type": "dict", "value": "{[]: 1}"}',
    '{"type": "torch.Tensor", "tensor_key": "kwarg_output"}',
    '{"type": "torch.dtype", "value": "torch.float32"}',
    '{"type": "tuple", "value": "' + "(" * 300 + ")" * 300 + '"}',
)
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null|[{}\[\]:,]')


def _flip(data: bytes, r: random.Random, _: bytes) -> bytes:
    out = bytearray(data)
    for _unused in range(r.choice((1, 1, 2, 8))):
        if out:
            out[_place(r, len(out))] ^= 1 << r.randrange(8)
    return bytes(out)


def _place(r: random.Random, size: int) -> int:
    """Mostly in the first or last bytes, where the lengths and headers are."""
    near = min(size, r.choice((16, 256, 4096)))
    return r.choice((r.randrange(near), size - 1 - r.randrange(near), r.randrange(size)))


def _insert(data: bytes, r: random.Random, _: bytes) -> bytes:
    at = _place(r, len(data) or 1)
    return (
        data[:at]
        + r.choice((r.randbytes(r.randrange(1, 40)), b"\0" * r.randrange(1, 4096), b"\xff\xfe", b"\xc3\x28", b"[" * 3000, b"\x80\x02"))
        + data[at:]
    )


def _delete(data: bytes, r: random.Random, _: bytes) -> bytes:
    at = _place(r, len(data) or 1)
    return data[:at] + data[at + r.choice((1, 2, 8, 100, 5000)) :]


def _truncate(data: bytes, r: random.Random, _: bytes) -> bytes:
    return data[: _place(r, len(data) or 1)]


def _splice(data: bytes, r: random.Random, other: bytes) -> bytes:
    return data[: _place(r, len(data) or 1)] + other[_place(r, len(other) or 1) :]


def _repeat(data: bytes, r: random.Random, _: bytes) -> bytes:
    at, size = _place(r, len(data) or 1), r.choice((1, 16, 300))
    return data[:at] + data[at : at + size] * r.choice((2, 10, 300)) + data[at + size :]


def _integer(data: bytes, r: random.Random, _: bytes) -> bytes:
    size = r.choice((1, 2, 4, 8))
    at = 0 if r.random() < 0.3 else _place(r, len(data) or 1)
    return data[:at] + (r.choice(INTEGERS) & (2 ** (8 * size) - 1)).to_bytes(size, r.choice(("little", "big"))) + data[at + size :]


def _utf16(data: bytes, r: random.Random, _: bytes) -> bytes:
    return data[:20_000].decode("latin-1").encode(r.choice(("utf-16", "utf-8-sig", "utf-32", "utf-7")))


def json_bytes(data: bytes, r: random.Random, _: bytes = b"") -> bytes:
    """JSON with some of its values, keys or marks replaced, dropped or doubled: valid in most cases."""
    for _unused in range(r.choice((1, 1, 2, 4))):
        tokens = list(_TOKEN.finditer(data))
        if not tokens:
            return data
        t = r.choice(tokens)
        how = r.randrange(8)
        value = r.choice(VALUES).encode()
        if how == 0:  # another token of the same file
            value = r.choice(tokens)[0]
        elif how == 1:  # a key twice
            value = t[0] + b":1," + t[0]
        elif how == 2:
            value = b""
        data = data[: t.start()] + value + data[t.end() :]
    return data


def pickle_bytes(data: bytes, r: random.Random, other: bytes) -> bytes:
    """A .pt file with a broken data.pkl whose checksum is right."""
    return _rezip(data, lambda name, content: r.choice(BYTES)(content, r, other[:2000]) if name.endswith("data.pkl") else content, r)


def _rezip(data: bytes, change: Callable[[str, bytes], bytes], r: random.Random) -> bytes:
    from io import BytesIO

    out = BytesIO()
    try:
        with (
            zipfile.ZipFile(BytesIO(data)) as old,
            zipfile.ZipFile(out, "w", r.choice((zipfile.ZIP_STORED,) * 5 + (zipfile.ZIP_DEFLATED,))) as new,
        ):
            for m in old.infolist():
                new.writestr(m.filename, change(m.filename, old.read(m)))
    except Exception:  # an earlier mutation broke it
        return data
    return out.getvalue()


def header_bytes(data: bytes, r: random.Random, other: bytes) -> bytes:
    """A safetensors file with a broken header whose length is right."""
    size = int.from_bytes(data[:8], "little")
    header = r.choice((json_bytes, json_bytes, _offsets, _flip))(data[8 : 8 + size], r, other)
    return struct.pack("<Q", len(header)) + header + data[8 + size :]


def _offsets(header: bytes, r: random.Random, _: bytes) -> bytes:
    """Lies about shape, dtype and offsets, of one tensor."""
    try:
        h = json.loads(header)
        entry = h[r.choice([k for k in h if k != "__metadata__"])]
        key = r.choice(("dtype", "shape", "data_offsets", "both"))
        if key in ("dtype", "both"):
            entry["dtype"] = r.choice(
                ("F4", "F6_E2M3", "F8_E8M0", "F8_E4M3", "F8_E5M2", "U8", "I8", "BOOL", "F16", "BF16", "F32", "F64", "C64", "U16", "I64")
            )
        if key in ("shape", "both"):
            entry["shape"] = r.choice(
                ([], [0], [2**63], [2**32, 2**32], [*entry["shape"], 1], entry["shape"][::-1], entry["shape"] * 2, [-1], [1] * 70)
            )
        if key == "data_offsets":
            a, b = entry["data_offsets"]
            entry["data_offsets"] = r.choice(([b, a], [a, a], [a, 2**63], [-1, b], [a + 1, b + 1], [0, b], [a]))
        return json.dumps(h).encode()
    except (ValueError, KeyError, TypeError, IndexError):
        return header


BYTES = (_flip, _insert, _delete, _truncate, _splice, _repeat, _integer)


def _place_of(path: Path, away: Path, r: random.Random, outside: Path) -> None:
    """Put something else in the file's place."""
    links = () if path.parent.name in ("run", "sent") else ("link", "zero")  # those files are named by the user, who may name a link
    how = r.choice(
        (*links, "fifo", "folder", "sparse", "empty", "gone", "loop", "twin", *(("parent",) if path.parent.parent.name == "dumps" else ()))
    )
    copy = path.read_bytes() if how == "twin" else b""
    path.unlink()
    if how == "link":  # to a whole file of the same kind, so that it would be read
        path.symlink_to(r.choice(sorted(outside.rglob(f"*{path.suffix}")) or [Path("/etc/passwd")]))
    elif how == "zero":
        path.symlink_to(r.choice(("/dev/zero", "/dev/stdin", "/proc/self/mem", "/etc/passwd")))
    elif how == "loop":
        path.symlink_to(path.name)
    elif how == "fifo":
        os.mkfifo(path)
    elif how == "folder":
        path.mkdir()
    elif how == "sparse":
        with path.open("wb") as f:
            f.write(r.choice((b"", b"PK\x03\x04", b"\x80\x02", b'{"a": 1, "b": "', struct.pack("<Q", 2**40))))
            f.truncate(10 * 2**40)
    elif how == "empty":
        path.touch()
    elif how == "twin":
        path.with_name(path.name.upper()).write_bytes(copy)
    elif how == "parent":  # the whole folder elsewhere, and a link in its place
        shutil.rmtree(away, ignore_errors=True)
        shutil.copytree(path.parent, away, symlinks=True)
        shutil.rmtree(path.parent)
        path.parent.symlink_to(away)


def break_folder(folder: Path, outside: Path, r: random.Random) -> str:
    """Break one to three files below `folder`; returns what was done. `outside` has whole seeds that no reader of `folder` may open."""
    done = []
    for _ in range(r.choice((1, 1, 1, 2, 3))):
        files = sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink() and p.stat().st_size < 1 << 30)
        if not files:
            break
        path = r.choice(files)
        if r.random() < 0.06:
            _place_of(path, folder.parent / "away", r, outside)
            done.append(f"{path.name}: replaced")
            continue
        data, other = path.read_bytes(), r.choice(files).read_bytes()
        structured = {".pt": pickle_bytes, ".safetensors": header_bytes}.get(path.suffix, json_bytes)
        change = r.choice((structured, structured, r.choice((*BYTES, _utf16) if path.suffix.startswith(".json") else BYTES)))
        path.write_bytes(change(data, r, other))
        done.append(f"{path.name}: {change.__name__.strip('_')}")
    return ", ".join(done)
