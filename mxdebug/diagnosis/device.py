"""Bring a call or a layer to another device: every tensor in it, whatever holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from ..errors import MxdebugError

T = TypeVar("T")


def checked(device: str | torch.device) -> torch.device:
    """The device; MxdebugError where this machine has none of that name."""
    try:
        found = torch.device(device)
        torch.empty(1, device=found).item()  # meta has no numbers
    except (RuntimeError, AssertionError) as error:
        raise MxdebugError("device", "cpu, or a GPU that torch can use, such as cuda", repr(str(device)), str(error).partition("\n")[0]) from error
    return found


def to_device(value: T, device: torch.device) -> T:
    """The same, with every tensor on that device: of dataclasses, mappings, lists and tuples."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, Mapping):
        return type(value)({k: to_device(v, device) for k, v in value.items()})
    if isinstance(value, (list, tuple)):
        return type(value)(to_device(v, device) for v in value)
    if is_dataclass(value) and not isinstance(value, type):
        held = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        moved = {name: to_device(v, device) for name, v in held.items()}
        return replace(value, **{name: v for name, v in moved.items() if v is not held[name]}) if any(moved[n] is not held[n] for n in held) else value
    return value
