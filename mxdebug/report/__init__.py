"""A diagnosis to send to others: one HTML page, or JSON. Neither needs mxdebug to be read, nor says anything of the machine it was made on.

`Report` holds what was asked and what came out; `write_html` and `write_json` write it into a file.
"""

from __future__ import annotations

from .page import write_html
from .record import Entry, Report
from .schema import SCHEMA, as_dict, write_json

__all__ = ["SCHEMA", "Entry", "Report", "as_dict", "write_html", "write_json"]
