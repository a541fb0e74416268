"""Where do the bytes lie? Layouts of scale and weight bytes, row orders, and `identify`, which names them from data."""

from .catalogue import (LAYOUTS, LINEAR, MISTAKEN_128x4, SCALE_LAYOUTS, SM12X_WEIGHT_TILES, SM90_SCALE_FOLD, SM90_WEIGHT_INTERLEAVE,
                        SWIZZLE_8x4, SWIZZLE_128x4, TRANSPOSED, V_CACHE_4x4, WEIGHT_LAYOUTS, cutedsl_sm100_view)
from .identify import Identification, Match, identify, match_rows, row_hashes
from .layout import Composed, Layout
from .rows import (GATE_UP, GROUPS_64, INTERLEAVED, INTERLEAVED_SWAPPED, INTERLEAVED_UP, ROW_ORDERS, ROW_SHUFFLES, SHUFFLE_16, SHUFFLE_32,
                   SHUFFLED_TWICE, UP_GATE, RowOrder, RowShuffle)

__all__ = [
    "LAYOUTS", "LINEAR", "MISTAKEN_128x4", "SCALE_LAYOUTS", "SM12X_WEIGHT_TILES", "SM90_SCALE_FOLD", "SM90_WEIGHT_INTERLEAVE", "SWIZZLE_8x4",
    "SWIZZLE_128x4", "TRANSPOSED", "V_CACHE_4x4", "WEIGHT_LAYOUTS", "cutedsl_sm100_view", "Composed", "Layout", "GATE_UP",
    "GROUPS_64", "INTERLEAVED", "INTERLEAVED_SWAPPED", "INTERLEAVED_UP", "ROW_ORDERS", "ROW_SHUFFLES", "SHUFFLED_TWICE", "SHUFFLE_16", "SHUFFLE_32", "UP_GATE",
    "RowOrder", "RowShuffle", "Identification", "Match", "identify", "match_rows", "row_hashes",
]
