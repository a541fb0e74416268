"""vLLM's recipe for the W4A16 linear path: which checkpoint kinds, which layouts, how a user gets there.

Rules: vLLM 0.33, kernels/linear/nvfp4/flashinfer.py FlashInferCuteDslNvFp4W4A16LinearKernel; the global scale: modelopt.py KNvfp4Static.process
and compressed_tensors_w4a4_nvfp4.py process_weights_after_loading.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...contracts import LinearContract
from ...contracts.cutedsl_w4a16 import CONTRACTS
from ...errors import MxdebugError
from ...formats import NVFP4
from ...reference_linear import LinearLayer
from .. import check_engine
from ..vllm import CT_NVFP4, MODELOPT
from .plan import LinearPlan

TAKES = {MODELOPT: "max", CT_NVFP4: "min"}


@dataclass(frozen=True)
class LinearRecipe:
    """engine, version, path and checkpoint kind are the key; forced_by: how a user makes the engine take this path; source: its converter."""

    engine: str
    version: str
    path: str
    checkpoint: str
    contract: LinearContract
    forced_by: str
    source: str

    def plan(self, layer: LinearLayer) -> LinearPlan:
        """The slots for one layer, or the part of it that a rank holds. Raises MxdebugError where vLLM refuses the layer."""
        if layer.format.element is not NVFP4.element or layer.format.scale is not NVFP4.scale:
            raise MxdebugError("weight", "NVFP4", layer.format.name, "another quantisation, so another path")
        if layer.k % 16:
            raise MxdebugError(
                "K of the weight", "a multiple of 16", str(layer.k), "vLLM: 'Unsupported model when in features size is not multiple of 16'"
            )
        return LinearPlan(self.contract, layer.n, layer.k, TAKES[self.checkpoint])


LINEAR_RECIPES = tuple(
    LinearRecipe(
        "vllm",
        "0.33",
        c.path,
        kind,
        c,
        "automatic on SM100 and SM103; else --linear-backend flashinfer_cutedsl"
        if c.sm[0] == 100
        else "vllm serve MODEL --linear-backend flashinfer_cutedsl",
        "FlashInferCuteDslNvFp4W4A16LinearKernel.process_weights_after_loading",
    )
    for c in CONTRACTS
    for kind in TAKES
)


def linear_recipe(path: str, checkpoint: str, engine: str = "vllm") -> LinearRecipe:
    """The recipe of a path for a checkpoint kind; MxdebugError lists those that exist."""
    for r in LINEAR_RECIPES:
        if (r.engine, r.path, r.checkpoint) == (engine, path, checkpoint):
            return r
    check_engine(engine)
    known = "; ".join(f"{r.engine} {r.path} of {r.checkpoint}" for r in LINEAR_RECIPES)
    raise MxdebugError("linear recipe", f"one of {known}", f"{engine} {path} of {checkpoint}")
