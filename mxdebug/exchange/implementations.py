"""Which prepare step of vLLM swizzles scales, and when? One row each, read from vLLM 0.33."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import MxdebugError

SWIZZLE_AFTER, SWIZZLE_BEFORE, NO_SWIZZLE, QUANTISE_AFTER = "swizzle after", "swizzle before", "no swizzle", "quantise after"
ORDERS = (SWIZZLE_AFTER, SWIZZLE_BEFORE, NO_SWIZZLE)


@dataclass(frozen=True)
class Implementation:
    """One prepare step of vLLM 0.33, for a kernel that reads scales swizzled (`is_scale_swizzled`). Read from the source, not run.

    transport   "all-gather": every rank gets all rows; "rows": each token goes to the ranks of its experts; "none"
    mxfp8, nvfp4   one of ORDERS, "quantise after" (the tokens travel as bf16), or why there is nothing to say
    source      file under vllm/model_executor/layers/fused_moe/prepare_finalize, and function
    """

    name: str
    transport: str
    mxfp8: str
    nvfp4: str
    source: str
    note: str = ""

    def order(self, format: str) -> str:
        """What this step does with the scales of "MXFP8" or "NVFP4"."""
        if format not in ("MXFP8", "NVFP4"):
            raise MxdebugError("format", "MXFP8 or NVFP4", repr(format))
        return self.mxfp8 if format == "MXFP8" else self.nvfp4


IMPLEMENTATIONS: dict[str, Implementation] = {i.name: i for i in (
    Implementation("naive_dp_ep", "all-gather", NO_SWIZZLE, SWIZZLE_AFTER,
                   "naive_dp_ep.py: _quantize_and_setup_dispatch, _unwrap_scale_and_prepare_for_moe",
                   "swizzles after the exchange only if quant_dtype is nvfp4 (#42118)"),
    Implementation("flashinfer_nvlink_one_sided", "rows", NO_SWIZZLE, SWIZZLE_AFTER,
                   "flashinfer_nvlink_one_sided.py: FlashInferNVLinkOneSidedPrepareAndFinalize.prepare",
                   "as naive_dp_ep; hands the swizzled buffer on under the shape [-1, scale columns]"),
    Implementation("flashinfer_nvlink_two_sided", "rows", NO_SWIZZLE, SWIZZLE_AFTER,
                   "flashinfer_nvlink_two_sided.py: flashinfer_alltoall_dispatch", "as naive_dp_ep"),
    Implementation("deepep_v2", "rows", SWIZZLE_AFTER, QUANTISE_AFTER,
                   "deepep_v2.py: prepare_async, _pack_mxfp8_scale, _unpack_mxfp8_scale, _receiver",
                   "MXFP8 scales travel linear, four to an int32, and are swizzled by swizzle_mxfp8_scale if is_scale_swizzled"),
    Implementation("deepep_ht", "rows", QUANTISE_AFTER, QUANTISE_AFTER, "deepep_ht.py: prepare_async, _receiver",
                   "with a block shape, which MXFP8 of fp8 checkpoints has ([1, 32]), prepare_async quantises before and leaves "
                   "is_scale_swizzled at its default True, though that configuration says False"),
    Implementation("deepep_ll", "rows", QUANTISE_AFTER, "by the kernel: bf16 travels, or DeepEP quantises", "deepep_ll.py: _do_quant",
                   "is_scale_swizzled is left at its default True for MXFP8"),
    Implementation("nixl_ep", "rows", QUANTISE_AFTER, "by the kernel: bf16 travels", "nixl_ep.py: _do_quant",
                   "is_scale_swizzled is left at its default True for MXFP8"),
    Implementation("batched", "none", "by expert", "by expert", "batched.py: BatchedPrepareAndFinalize.prepare",
                   "no exchange; is_scale_swizzled is left at its default True, the result goes into a float32 buffer per expert"),
    Implementation("mori", "rows", "unsupported", "unsupported", "mori.py: MoriPrepareAndFinalize.prepare",
                   "AMD: FP8 and MXFP4 travel with linear scales; no kernel there reads 128x4"),
    Implementation("moonep", "rows", "refused", "refused", "moonep.py: MoonEPPrepareAndFinalize.prepare", "bf16 only"),
    Implementation("passthrough", "none", "by the kernel", "by the kernel", "passthrough.py: PassThroughPrepareAndFinalize.prepare",
                   "the kernel exchanges tokens itself"),
    Implementation("no_dp_ep", "none", "in one step", "in one step", "no_dp_ep.py: _quantize_input",
                   "no exchange: quantised straight into the layout that the configuration names (since #42089 for MXFP8 too)"),
)}
