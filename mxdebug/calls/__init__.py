"""What happened? One recorded kernel call, as an engine made it: read from FlashInfer's dumps, or caught in this process.

`scan` lists the calls in a folder, `load` reads one, `capture` records calls of this process, `dump_recipe` says how to
make an engine write its calls down. Whatever the source, a `Call` has its arguments by parameter name.

A dump is untrusted: nothing in it is executed, no name in it is looked up outside fixed tables, no path in it is followed.
"""

from __future__ import annotations

from .call import COMPLETED, CRASHED, PENDING, Call
from .capturing import capture, dump_recipe
from .reading import MISSING, UNREADABLE, Recording, load, scan, unrecorded_outputs
from .signature import UNKNOWN_DEFAULT
from .values import EnumMember, Opaque

__all__ = ["COMPLETED", "CRASHED", "MISSING", "PENDING", "UNKNOWN_DEFAULT", "UNREADABLE", "Call", "EnumMember", "Opaque", "Recording",
           "capture", "dump_recipe", "load", "scan", "unrecorded_outputs"]
