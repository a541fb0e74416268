"""A minimal reproduction, cut out of a recorded call: the fewest tokens and experts with which the diagnosis still finds the same faults.

`cut` keeps the call's own numbers, `probe` puts made ones in their place. Both diagnose what they wrote, and raise where it shows
other faults.
"""

from __future__ import annotations

from .made import probe
from .search import Cut, cut

__all__ = ["Cut", "cut", "probe"]
