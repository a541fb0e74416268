"""What can be seen in a checkpoint alone: damaged files, missing tensors, scales that no quantiser makes, what engines will make of them.

`scan` reads headers, block scales and global scales of a checkpoint of any size; with payload=True the payloads too. Its Report prints
itself; `to_json` and `to_html` write it. `load_index` reads the row hashes that scan(index=...) wrote: which layer and expert does a row
belong to?
"""

from . import injections
from .finding import BROKEN, NOTE, SUSPICIOUS, Finding, Rule
from .index import Held, Index, Place, load_index
from .page import to_html
from .record import to_json
from .report import Report
from .scan import scan
from .statistics import Statistics

__all__ = [
    "BROKEN",
    "NOTE",
    "SUSPICIOUS",
    "Finding",
    "Held",
    "Index",
    "Place",
    "Report",
    "Rule",
    "Statistics",
    "injections",
    "load_index",
    "scan",
    "to_html",
    "to_json",
]
