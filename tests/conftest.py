"""Settings for all tests."""

from __future__ import annotations

import torch

torch.set_num_threads(1)  # tiny layers: more threads only wait for each other, the longer the busier the machine
