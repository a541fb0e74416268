"""What is in the file? MXFP4 mixtures of experts from safetensors, by the names used in the wild, one layer at a time.

`open_checkpoint` finds the files, `Checkpoint.layer` reads one layer into logical order. Nothing else of the weights is read.
"""

from .checkpoint import Checkpoint, CheckpointLayer, open_checkpoint
from .settings import COMPRESSED_TENSORS, GPT_OSS, KINDS

__all__ = ["COMPRESSED_TENSORS", "GPT_OSS", "KINDS", "Checkpoint", "CheckpointLayer", "open_checkpoint"]
