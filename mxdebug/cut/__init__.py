"""A minimal reproduction, cut out of a recorded call: few tokens and experts, with which the diagnosis still finds the same faults.

`cut` keeps the call's own numbers, `cut_made` puts made ones in their place. Both diagnose what they wrote, and raise where it shows
other faults.
"""

from __future__ import annotations

from .made import cut_made
from .search import Cut, cut

__all__ = ["Cut", "cut", "cut_made"]
