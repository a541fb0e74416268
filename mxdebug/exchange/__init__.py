"""Do a token's scales survive the exchange between ranks? A real exchange of quantised tokens, and a diagnosis of one rank's call.

With expert parallelism a token's payload and its block scales travel to the ranks that hold its experts. A kernel that
reads scales swizzled (128x4) needs the swizzle of *the rows that it gets*. A swizzle mixes the bytes of 128 rows and pads
to 128 rows, so it cannot be done before the exchange: the swizzled buffers of several ranks, one behind the other, are the
swizzle of all their rows only where every rank but the last has a multiple of 128 rows, and a single row cannot be cut out
of a swizzled buffer at all. So scales travel linear and are swizzled afterwards.

Public reports: vLLM #42089 (merged) is about one rank: #40960 had hard-coded `is_sf_swizzled_layout=False` for MXFP8 in
`moe_kernel_quantize_input`, so CUTLASS MXFP4-MXFP8 got linear scales; since then `is_scale_swizzled` is passed through. Its
review brought up an older fault under expert parallelism, vLLM #42118 (open; #42133 and #49335 propose fixes): three of the
prepare steps swizzle after the exchange for NVFP4 only. `IMPLEMENTATIONS` says which.
"""

from __future__ import annotations

from .cases import Case, Exchange, Handed
from .examine import BEFORE, LINEAR_READ_SWIZZLED, RIGHT, SWIZZLED_READ_LINEAR, UNKNOWN, ScaleFinding, examine_scales
from .implementations import IMPLEMENTATIONS, NO_SWIZZLE, ORDERS, QUANTISE_AFTER, SWIZZLE_AFTER, SWIZZLE_BEFORE, Implementation
from .processes import exchange, exchange_all
from .quantise import quantise_activations, read_scales, sample_tokens

__all__ = ["BEFORE", "IMPLEMENTATIONS", "LINEAR_READ_SWIZZLED", "NO_SWIZZLE", "ORDERS", "QUANTISE_AFTER", "RIGHT", "SWIZZLED_READ_LINEAR",
           "SWIZZLE_AFTER", "SWIZZLE_BEFORE", "UNKNOWN", "Case", "Exchange", "Handed", "Implementation", "ScaleFinding", "examine_scales",
           "exchange", "exchange_all", "quantise_activations", "read_scales", "sample_tokens"]
