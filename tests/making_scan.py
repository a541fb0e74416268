"""The library's healthy checkpoints, under short names: `mxdebug.scan.probe` makes them."""

from __future__ import annotations

from mxdebug.checkpoints.kinds import COMPRESSED_TENSORS as CT_MXFP4
from mxdebug.checkpoints.kinds import COMPRESSED_TENSORS_NVFP4 as CT_NVFP4
from mxdebug.checkpoints.kinds import GPT_OSS
from mxdebug.checkpoints.kinds import MODELOPT_NVFP4 as MODELOPT
from mxdebug.scan.kinds import COMPRESSED_TENSORS_MXFP8 as CT_MXFP8
from mxdebug.scan.kinds import KINDS, MODELOPT_MXFP8
from mxdebug.scan.kinds import QUARK_MXFP4 as QUARK
from mxdebug.scan.probe import EXPERT, EXPERTS, INTERMEDIATE, probe_weight
from mxdebug.scan.probe import probe_config as config
from mxdebug.scan.probe import probe_tensors as tensors
from mxdebug.scan.probe import save_shards as save

__all__ = [
    "CT_MXFP4",
    "CT_MXFP8",
    "CT_NVFP4",
    "EXPERT",
    "EXPERTS",
    "GPT_OSS",
    "INTERMEDIATE",
    "KINDS",
    "MODELOPT",
    "MODELOPT_MXFP8",
    "QUARK",
    "config",
    "probe_weight",
    "save",
    "tensors",
]
