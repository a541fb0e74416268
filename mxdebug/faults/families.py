"""The catalogue as a book: its chapters, what each is about, and which faults stand in it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Family:
    """A chapter: title, what it is about in words for a newcomer, and the beginnings of the ids that belong to it."""

    title: str
    about: str
    ids: tuple[str, ...]


FAMILIES = (
    Family(
        "Scale values",
        "Every block of 16 or 32 weights shares one scale byte. The byte is copied, cast, rounded or scaled on the way to the kernel, and "
        "each of these can turn it into another number. One wrong rule makes every weight of the block wrong by one factor.",
        (
            "scales-cast-by-value",
            "scales-cast-to-e4m3",
            "scales-as-e4m3-bytes",
            "scales-as-e8m0-bytes",
            "scales-off",
            "scales-rounded-up",
            "scales-small-flushed",
            "scales-nan",
            "global-folded-into-blocks",
            "scales-flushed",
            "scales-recoded-for-marlin",
            "scales-not-recoded",
            "group-32-as-16",
            "x-scales-exponent",
            "x-scales-zero",
        ),
    ),
    Family(
        "Scale placement",
        "Kernels want the scale bytes in an order of their own: linear, swizzled in tiles of 128 x 4, folded, transposed. The bytes are all there, and in "
        "the wrong places each block gets another block's scale.",
        (
            "scales-linear",
            "scales-twice",
            "scales-128x4",
            "scales-8x4",
            "scales-128x4-mistaken",
            "scales-sm90-fold",
            "scales-transposed",
            "scales-v-cache",
            "scales-then-128x4",
            "scales-then-8x4",
            "scales-then-fold",
            "scales-128x4-then",
            "scales-8x4-then",
            "scales-fold-then",
            "scales-view-contiguous",
            "layout-other",
            "x-scales-linear",
            "x-scales-swizzled",
            "x-scales-before-exchange",
            "experts-stride",
        ),
    ),
    Family(
        "Row order",
        "Gate and up rows stand in one tensor, in halves, in turn, or in groups, and some kernels want them shuffled besides. In the wrong order the layer multiplies "
        "rows that do not belong together.",
        (
            "rows-gate-up",
            "rows-up-gate",
            "rows-interleaved",
            "rows-interleaved-up",
            "rows-groups-64",
            "rows-interleaved-swapped",
            "rows-swapped-without-gate",
            "rows-shuffled-32",
            "rows-shuffled-16",
            "rows-shuffled-twice",
            "rows-not-shuffled",
            "rows-unnamed",
            "kernel-gate-up-swapped",
            "parts-reordered",
        ),
    ),
    Family(
        "Payload and nibbles",
        "Two 4-bit codes share a byte, and kernels permute bytes, even bits, to unpack them fast.",
        (
            "weights-linear",
            "weights-twice",
            "weights-sm90-interleave",
            "weights-sm12x-tiles",
            "nibbles-swapped",
            "nibbles-split",
            "kernel-nibbles-swapped",
            "operand-not-loaded",
        ),
    ),
    Family(
        "Global scales",
        "NVFP4 has one more scale for a whole tensor or expert, a multiplier in some files and a divisor in others, folded with the activations' own.",
        (
            "global-inverted",
            "global-missing",
            "weight-global-inverted",
            "weight-global-missing",
            "weight-global-squared",
            "global-squared",
            "global-rounded",
            "input-scale-not-folded",
            "input-scale-twice",
            "input-scale-of-each-expert",
            "global-of-other-half",
            "global-of-another-expert",
            "global-of-another-rank",
            "global-of-another-part",
            "global-shared-by-halves",
            "global-shared-by-parts",
            "global-not-loaded",
            "global-other",
        ),
    ),
    Family(
        "Padding, experts and ranks",
        "Sizes are padded to whole tiles, and layers are cut among GPUs. What fills the padding, where the cut goes and who has which expert must be "
        "the same for every operand.",
        (
            "padding-at-end",
            "padding-not-zero",
            "experts-rolled",
            "operand-of-another-expert",
            "wrong-tp-slice",
            "tp-cut-inside-block",
            "wrong-ep-slice",
            "ep-rank",
            "kernel-ep-rank-ignored",
            "x-padded-by-bytes",
            "x-not-padded",
            "output-not-sliced",
            "operand-of-another-layer",
        ),
    ),
    Family(
        "Activation",
        "SwiGLU has a slope, an offset and a limit in some models. A kernel that is not told computes another function, which mostly shows in large values.",
        (
            "swiglu-alpha-lost",
            "swiglu-beta-lost",
            "swiglu-limit-lost",
            "swiglu-alpha-changed",
            "swiglu-beta-changed",
            "swiglu-limit-changed",
            "gelu-tanh-as-erf",
            "activation-kind",
            "kernel-clamp-1",
            "kernel-clamp-2",
            "kernel-clamp-3",
            "kernel-clamp-4",
            "kernel-ignores-alpha",
            "kernel-ignores-beta",
            "kernel-ignores-limit",
            "activations-not-bf16",
            "activations-beyond-fp16",
        ),
    ),
    Family(
        "Routing",
        "A router picks experts and weights for each token. The weights must be applied once, on one side, and sum to what the model means.",
        (
            "router-squared",
            "router-not-renormalised",
            "router-renormalised",
            "router-scaled-twice",
            "router-not-finite",
            "expert-ids",
            "kernel-router-twice",
            "kernel-router-on-input",
            "kernel-router-ignored",
        ),
    ),
    Family(
        "Bias",
        "Biases are added once, on one rank, in the dtype and order that the kernel reads.",
        (
            "bias-missing",
            "bias-unexpected",
            "kernel-fc1-bias-ignored",
            "kernel-fc2-bias-ignored",
            "kernel-bias-on-every-rank",
            "bias-twice",
            "bias-before-slice",
        ),
    ),
    Family(
        "Output and kernel",
        "What was passed is right, or breaks the contract openly, and the output still is wrong: look at the kernel, its tactic, memory and time.",
        (
            "contract-broken",
            "input-not-finite",
            "output-unwritten",
            "output-partly-unwritten",
            "output-tile",
            "output-varies",
            "output-depends-on-batch",
            "output-stale",
            "fake-shape",
        ),
    ),
)
