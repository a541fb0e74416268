"""The 256 bytes of each scale codec as masks and values; from `mxdebug.formats`."""

from __future__ import annotations

import numpy as np
import torch

from ..formats import E4M3_SCALE, E8M0

_BYTES = torch.arange(256, dtype=torch.uint8)
CODE = np.arange(256)
E4M3_VALUE = E4M3_SCALE.decode(_BYTES).double().numpy()
"""float64 [256]: NaN at 0x7F and 0xFF, negative from 0x81 on."""
E8M0_VALUE = E8M0.decode(_BYTES).double().numpy()
NAN = {True: (CODE & 0x7F) == 0x7F, False: CODE == 0xFF}  # by Kind.e4m3, as all that follow
NEGATIVE = {True: (CODE > 0x80) & (CODE != 0xFF), False: np.zeros(256, dtype=bool)}
ZERO = {True: (CODE & 0x7F) == 0, False: np.zeros(256, dtype=bool)}  # E8M0 has no zero
SUBNORMAL = {True: (CODE > 0) & (CODE < 8), False: CODE == 0}  # E8M0's byte 0 is an fp32 subnormal
SATURATED = {True: CODE == 0x7E, False: CODE == 0xFE}
VALUE = {True: E4M3_VALUE, False: E8M0_VALUE}
