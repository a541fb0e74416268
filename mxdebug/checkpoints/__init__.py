"""What is in the file? MXFP4 and NVFP4 mixtures of experts from safetensors, by the names used in the wild, one layer at a time.

`open_checkpoint` finds the files, `Checkpoint.layer` reads one layer into logical order. Nothing else of the weights is read.
"""

from .checkpoint import Checkpoint, CheckpointLayer, open_checkpoint
from .kinds import COMPRESSED_TENSORS, COMPRESSED_TENSORS_NVFP4, GPT_OSS, KINDS, MODELOPT_NVFP4

__all__ = ["COMPRESSED_TENSORS", "COMPRESSED_TENSORS_NVFP4", "GPT_OSS", "KINDS", "MODELOPT_NVFP4", "Checkpoint", "CheckpointLayer",
           "open_checkpoint"]
