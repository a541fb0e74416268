"""The catalogue's records of faults that only linear layers have; `linear_faults` says how they strike."""

from __future__ import annotations

from collections.abc import Callable

from ..errors import MxdebugError
from .fault import Fault, Situation


def _not_moe(id: str) -> Callable[[Situation, tuple[str, ...]], Situation]:
    def inject(s: Situation, keys: tuple[str, ...]) -> Situation:
        raise MxdebugError(
            f"situation for fault {id}",
            "a linear layer",
            "a mixture of experts",
            "this fault strikes linear layers: mxdebug.faults.linear_fault",
        )

    return inject


def _new(id: str, title: str, gives_away: str, needed: str, fix: str, reports: tuple[str, ...] = ()) -> Fault:
    return Fault(id, title, ("linear",), _not_moe(id), gives_away, needed, fix, reports)


_BYTES = "the operand's bytes equal the checkpoint's under this change, and under no simpler one"
NEW_FAULTS = (
    _new(
        "parts-reordered",
        "joined projections stand in another order",
        _BYTES,
        "parts that differ",
        "join the projections in the order in which the model splits the output",
    ),
    _new(
        "scales-view-contiguous",
        "the 6-D view of the block scales was made contiguous, and the kernel reads memory by pointer",
        "the operand's memory holds the right values in the order of their indices",
        "scales that differ by row and block",
        "never call .contiguous() on it, nor load it from a file that keeps no strides: run prepare_bf16_fp4_weights again on the 128x4 bytes",
    ),
    _new(
        "scales-not-recoded",
        "block scales left as E4M3, where SM12x's kernel reads S0E5M3",
        _BYTES,
        "any scales: each is read as another number",
        "pass what prepare_bf16_fp4_weights(backend='cute-dsl') returns on that GPU",
    ),
    _new(
        "scales-flushed",
        "block scales below 2^-6 became 0 when they were recoded to S0E5M3",
        _BYTES,
        "block scales below 2^-6 (subnormal E4M3)",
        "recode by the upper bits of the fp16 of the same value, which is exact; or quantise so that no block scale is that small",
    ),
    _new(
        "scales-recoded-for-marlin",
        "block scales in Marlin's S0E5M3 (times 2^7, small ones 0), where SM12x's kernel reads plain S0E5M3",
        _BYTES,
        "any scales",
        "prepare for the kernel that runs: Marlin's 2^7 is divided out in Marlin's global scale only",
    ),
    _new(
        "group-32-as-16",
        "a checkpoint with one block scale for 32 elements was read as one for 16",
        "the file has K/32 scale columns, the kernel reads K/16",
        "a checkpoint of group size 32",
        "refuse it: NVFP4's kernels read blocks of 16; requantise, or repeat every scale twice",
        ("TensorRT-LLM#19091",),
    ),
    _new(
        "global-squared",
        "the global scale is squared: multiplied in twice",
        "the number equals the checkpoint's squared",
        "any global scale but 1",
        "multiply by it once: as alpha, and nowhere else",
    ),
    _new(
        "global-rounded",
        "the global scale was rounded to bf16 or fp16 on the way",
        "the number equals the checkpoint's, rounded",
        "a global scale that 16 bits do not hold",
        "keep it float32: a cast of the whole module to bf16 catches it too",
    ),
    _new(
        "operand-of-another-layer",
        "an operand is another layer's",
        "its bytes, or its number, equal another layer's of the checkpoint",
        "layers of equal size that differ",
        "load payload, block scales and global scale of a layer together",
    ),
    _new(
        "bias-twice",
        "the bias was added twice",
        "the output equals the kernel's with the bias added twice",
        "a checkpoint with biases",
        "add it once, after the cut to N",
    ),
    _new(
        "global-of-another-part",
        "the global scale of another joined part is passed for all",
        "the number equals another part's",
        "joined parts whose global scales differ",
        "ModelOpt: the largest weight_scale_2; compressed-tensors: 1 / the largest weight_global_scale, as vLLM does; better one shared scale in the checkpoint",
    ),
    _new(
        "global-shared-by-parts",
        "joined projections have different global scales, and the kernel takes one number for all",
        "the checkpoint's global scales",
        "projections that were quantised apart",
        "quantise the joined projections with one shared global scale; vLLM only warns",
    ),
    _new(
        "activations-not-bf16",
        "activations are not BF16 (FP16, say), and the kernel takes BF16 only",
        "the dtype of the activations",
        "any",
        "--dtype bfloat16, or --linear-backend marlin; vLLM does not look at the dtype when it selects the kernel",
        ("vllm#53014",),
    ),
    _new(
        "activations-beyond-fp16",
        "activations beyond 65504 become inf: SM12x's kernel multiplies in fp16",
        "the activations themselves; the GEMV for one token does not convert",
        "an activation beyond 65504, and more than one token",
        "serve the layer with Marlin or on SM100, or scale the activations down (they are often outliers of one channel)",
    ),
    _new(
        "x-padded-by-bytes",
        "activations were padded by the weight's padding in bytes; it must be elements, two for each byte",
        "the width of the activations",
        "K that is no multiple of 64",
        "pad x by 2 * weights_padding (vLLM's weights_padding_cols counts payload bytes)",
        ("vllm#53014",),
    ),
    _new(
        "x-not-padded",
        "activations were not padded along K as the weight was",
        "the width of the activations",
        "K that is no multiple of 64",
        "pad x with zeros to the weight's K",
    ),
    _new(
        "output-not-sliced",
        "the output still has the weight's padding rows as columns",
        "the width of the output; its first N columns are right",
        "N that is no multiple of 64",
        "take the first N columns, then add the bias",
    ),
    _new(
        "bias-before-slice",
        "the bias was added before the output was cut to N",
        "the error: sizes of bias and padded output differ",
        "a bias, and N that is no multiple of 64",
        "cut the output to N first, then add the bias [N]",
        ("vllm#53014",),
    ),
    _new(
        "fake-shape",
        "the fake implementation gives another shape than the kernel",
        "recipes.w4a16.op.wrong_fakes, for both layouts",
        "tracing (torch.compile), both layouts",
        "N is b.shape[0] of the uint8 weight and b.shape[1] // 2 of the int32 tiles",
        ("vllm#53014",),
    ),
)
