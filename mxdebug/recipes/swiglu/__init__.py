"""Which activation, alpha, beta and limit does vLLM pass on a path, and where did each value come from?

The public report is vLLM #48929, "Fix MiniMax-M3 NVFP4 inference correctness" (July 2026). It has two halves:
1. A model states alpha, beta and limit in config.json. They travel config.json -> layer.swiglu_* -> quantisation method ->
   FusedMoEQuantConfig.gemm1_* -> experts class -> kernel, and every arrow is code that somebody had to write. FlashInfer's
   CUTLASS adapter did not hand on all three; Marlin put plain SiLU's 1 and 0 in place of those that were missing.
2. Two writers leave a top-k buffer as [token, head, k] and as [head, token, k]. The shape does not tell them apart when there are as
   many tokens as heads. See `shape_candidates` (layouts/readings.py).
What the activation itself is on a path: `lands_on` (activations.py).
"""

from ...contracts.activation import PARAMETERS
from ...layouts.readings import Readings, shape_candidates
from .activations import SUPPORTED, Landing, lands_on
from .passed import Passed, Value, parameters
from .rules import FIX, GPT_OSS_ALPHA, GPT_OSS_BETA, GPT_OSS_LIMIT, V033, VERSIONS
from .symptoms import SYMPTOMS, symptom

__all__ = ["FIX", "GPT_OSS_ALPHA", "GPT_OSS_BETA", "GPT_OSS_LIMIT", "PARAMETERS", "SUPPORTED", "SYMPTOMS", "V033", "VERSIONS", "Landing",
           "Passed", "Readings", "Value", "lands_on", "parameters", "shape_candidates", "symptom"]
