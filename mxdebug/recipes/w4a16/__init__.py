"""NVFP4 weights with BF16 activations in a linear layer (W4A16): does FlashInfer's CuTe-DSL kernel run here, and which one does vLLM take?

Rules: vLLM 0.33.0, and 0.30.0, the first release with #53014, which brought the CuTe-DSL kernel. NVIDIA GPUs only.
"""

from __future__ import annotations

from .capability import capability, layout_family
from .select import LINEAR_VERSIONS, select_linear
from .setups import LINEAR_BACKENDS, LinearSelection, LinearSetup

__all__ = ["LINEAR_BACKENDS", "LINEAR_VERSIONS", "LinearSelection", "LinearSetup", "capability", "layout_family", "select_linear"]
