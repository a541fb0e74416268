"""Which path does vLLM take, and why not the others? MoE layers of MXFP4 and NVFP4 checkpoints on NVIDIA GPUs, SM90 to SM121.

Rules: the source distributions of vLLM 0.21.0, 0.28.0, 0.30.0 and 0.33.0. Below vllm/model_executor/layers: fused_moe/oracle/mxfp4.py and
nvfp4.py (priority and choice), fused_moe/experts/*.py, b12x.py and flashinfer_moe_ep.py (what each experts class supports),
fused_moe/modular_kernel.py `FusedMoEExperts.is_supported_config` (in which order that is asked), quantization/ (which method asks which
oracle). No other version is answered for: rules change between releases, and a patch release can change them too.

The versions are those in which the four public bugs were fixed first (FIXED_IN), and 0.33. Of these fixes only #48929 changed
a rule of selection (FlashInfer CUTLASS takes SWIGLUOAI_UNINTERLEAVE); the rest of what differs between versions came with other changes.

Left out: ROCm, XPU and CPU; AutoRound and online quantisation; NVFP4 linear layers (#53014); the DeepSeek-V4 megakernel models outside the
oracles; environment variables, which are taken to be unset (in 0.21 they alone chose MXFP8 activations for gpt-oss).
"""

from __future__ import annotations

from .experts import Experts
from .oracles import select
from .rules import Method, Rules
from .selection import Considered, Selection
from .setups import ACTIVATION_KEYS, ACTIVATIONS, ALL2ALL, INSTALLED, ROUTINGS, SMS, Setup
from .versions import FIXED_IN, VERSIONS, rules_of

__all__ = ["ACTIVATIONS", "ACTIVATION_KEYS", "ALL2ALL", "FIXED_IN", "INSTALLED", "ROUTINGS", "SMS", "VERSIONS", "Considered", "Experts",
           "Method", "Rules", "Selection", "Setup", "rules_of", "select"]
