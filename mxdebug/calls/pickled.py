"""What a .pt file may hold, checked before torch opens it: a dict of plain tensors, and nothing that is built by calling something.

`torch.load(weights_only=True)` refuses code, too, and is asked after this; but it unpacks tar archives of torch's first format, inflates
compressed members, and calls what its own list allows (bytearray(10**10) is on it). A dump needs none of that.
"""

from __future__ import annotations

import pickletools
import re
import zipfile
from pathlib import Path

from ..errors import MxdebugError

_MOST_PICKLE = 1 << 18  # a tensor takes some 200 bytes of it, a call has 30
_GLOBALS = re.compile(r"torch\._utils _rebuild_(?:tensor_v2|tensor_v3|parameter)|collections OrderedDict|torch\.storage UntypedStorage|"
                      r"torch (?:[A-Z]\w+Storage|(?:bfloat|float|u?int|complex)\d\w*|bool)")
_OPCODES = frozenset("""
    PROTO STOP MARK GLOBAL REDUCE BINPERSID BINPUT LONG_BINPUT BINGET LONG_BINGET NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1
    BINFLOAT BINUNICODE EMPTY_DICT SETITEM SETITEMS EMPTY_TUPLE TUPLE TUPLE1 TUPLE2 TUPLE3 EMPTY_LIST APPEND APPENDS""".split())
CODE = "not a FlashInfer dump: holds code, or objects that only code can rebuild; none of it was run"


def check(path: Path) -> None:
    """MxdebugError for a file that holds anything but stored tensors. Raises OSError and zipfile.BadZipFile where it is damaged.

    Source: torch.save since 1.6, a zip of uncompressed members, NAME/data.pkl in pickle's protocol 2.
    """
    with path.open("rb") as file:
        if file.read(1) == b"\x80":
            raise MxdebugError(str(path), "torch's zip format", "a bare pickle, or torch's format before 1.6", CODE)
    with zipfile.ZipFile(path) as archive:
        members = archive.infolist()
        if any(m.compress_type != zipfile.ZIP_STORED for m in members) or sum(m.file_size for m in members) > path.stat().st_size:
            raise MxdebugError(str(path), "uncompressed members, as torch.save writes them", "compressed or overlapping ones", "a zip bomb")
        pickles = [m for m in members if m.filename.lower().endswith(".pkl")]
        if len(pickles) != 1 or not pickles[0].filename.endswith("/data.pkl") or pickles[0].file_size > _MOST_PICKLE:
            raise MxdebugError(str(path), f"one data.pkl of at most {_MOST_PICKLE} bytes",
                               ", ".join(f"{m.filename[:80]} ({m.file_size} bytes)" for m in pickles[:3]) or "none",
                               "not a FlashInfer dump")
        data = archive.read(pickles[0])
    for opcode, argument, _ in pickletools.genops(data):
        if opcode.name not in _OPCODES or (opcode.name == "GLOBAL" and not _GLOBALS.fullmatch(argument)):
            what = argument if opcode.name == "GLOBAL" else f"opcode {opcode.name}"
            raise MxdebugError(str(path), "plain tensors only", str(what)[:200], CODE)
