"""What is in the file? MXFP4 and NVFP4 mixtures of experts, and NVFP4 linear layers, from safetensors, by the names used in the wild.

`open_checkpoint` finds the files; `Checkpoint.layer` reads one MoE layer into logical order, `Checkpoint.linear` one
linear layer. Nothing else of the weights is read.
"""

from .checkpoint import Checkpoint, CheckpointLayer, open_checkpoint
from .kinds import COMPRESSED_TENSORS, COMPRESSED_TENSORS_NVFP4, GPT_OSS, KINDS, MODELOPT_NVFP4
from .linears import CheckpointLinear, converted

__all__ = ["COMPRESSED_TENSORS", "COMPRESSED_TENSORS_NVFP4", "GPT_OSS", "KINDS", "MODELOPT_NVFP4", "Checkpoint", "CheckpointLayer",
           "CheckpointLinear", "converted", "open_checkpoint"]
