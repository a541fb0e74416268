"""Argument values and what FlashInfer's metadata says about them: live value -> snapshot -> JSON entry -> the same value.

The entries are those of FlashInfer 0.7 `api_logging._extract_value_for_dump`; tensors lie in a file, an entry only has their key.
"""

from __future__ import annotations

import ast
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..errors import MxdebugError, brief
from .tensors import DTYPES, snapshot_tensor


class EnumMember(str):
    """An enum member: a str equal to the member's name. `enum` names its class ("ActivationType"), `value` is None if unknown."""

    enum: str
    value: Any

    def __new__(cls, name: str, enum: str = "", value: Any = None) -> EnumMember:
        self = super().__new__(cls, name)
        self.enum, self.value = enum, value
        return self


@dataclass(frozen=True)
class Opaque:
    """An object of which a dump has only the class's name and the first 1000 characters of its str()."""

    type: str
    repr: str


class _Absent(enum.Enum):
    ABSENT = "a tensor that was passed, but never written"


ABSENT = _Absent.ABSENT

# FlashInfer nests 8 deep; anything deeper is not its.
_DEPTH = 10


def snapshot(value: Any) -> Any:
    """A live argument as a Call keeps it: tensors copied to the CPU, enums as EnumMember, unknown objects as Opaque."""
    if isinstance(value, Tensor):
        return snapshot_tensor(value)
    if isinstance(value, list):
        return [snapshot(item) for item in value]
    if isinstance(value, tuple):
        return tuple(snapshot(item) for item in value)
    if isinstance(value, dict):
        return {snapshot(key): snapshot(item) for key, item in value.items()}
    if isinstance(value, enum.Enum):
        return EnumMember(str(value.name), type(value).__name__, value.value)
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype, Opaque)):
        return value
    return Opaque(type(value).__name__, str(value)[:1000])


def tensors_in(value: Any) -> list[Tensor]:
    """All tensors in nested lists, tuples and dicts, in FlashInfer's order."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = [part for item in value.items() for part in item]
    return [t for item in value for t in tensors_in(item)] if isinstance(value, (list, tuple)) else []


def describe(value: Any, key: str, tensors: dict[str, Tensor]) -> Any:
    """The JSON entry of a snapshot; its tensors are added to `tensors` under `key` and keys made from it."""
    if isinstance(value, Tensor):
        tensors[key] = value
        return {"type": "torch.Tensor", "shape": list(value.shape), "dtype": str(value.dtype), "stride": list(value.stride()),
                "device": str(value.device), "requires_grad": value.requires_grad, "is_contiguous": value.is_contiguous(),
                "tensor_key": key}
    if isinstance(value, (list, tuple)):
        return {"type": "list" if isinstance(value, list) else "tuple", "length": len(value), "truncated": False,
                "items": [describe(item, f"{key}__{i}", tensors) for i, item in enumerate(value)]}
    if isinstance(value, dict):
        items = [{"key": describe(k, f"{key}__key_{i}", tensors), "value": describe(v, f"{key}__value_{i}", tensors)}
                 for i, (k, v) in enumerate(value.items())]
        return {"type": "dict", "length": len(value), "items": items, "truncated": False}
    if isinstance(value, torch.dtype):
        return {"type": "torch.dtype", "value": str(value)}
    if isinstance(value, EnumMember):
        return {"type": "enum", "name": f"{value.enum}.{value}", "value": value.value}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Opaque):
        return {"type": value.type, "repr": value.repr}
    raise MxdebugError(f"argument {key}", "a tensor, dtype, number, string, list, tuple, dict, EnumMember or Opaque", type(value).__name__,
                       "a Call keeps snapshots, not live objects")


def rebuild(entry: Any, tensors: Mapping[str, Tensor] | None, where: str, depth: int = 0) -> Any:
    """The value of a JSON entry. `tensors` None: they were never written, and the result is ABSENT if it held any.

    MxdebugError for entries that FlashInfer does not write, that it cut off, and for tensors that are not in `tensors`.
    """
    if entry is None or isinstance(entry, (bool, int, float, str)):
        return entry
    kind = entry.get("type") if isinstance(entry, dict) else None
    if not isinstance(kind, str) or depth > _DEPTH:
        raise MxdebugError(where, "a value with its type", brief(entry), "not a FlashInfer dump")
    if entry.get("truncated", False) is not False:
        raise MxdebugError(where, "the whole value", f"a {kind} that FlashInfer truncated", "nested too deep to be written")
    if kind == "torch.Tensor":
        return _tensor(entry, tensors, where)
    if kind == "torch.dtype":
        name = entry.get("value")
        if not isinstance(name, str) or name not in DTYPES:
            raise MxdebugError(where, "a dtype that torch has", brief(name))
        return DTYPES[name]
    if kind == "enum":
        name = entry.get("name")
        if not isinstance(name, str) or "." not in name:
            raise MxdebugError(where, "an enum member as Class.member", brief(name))
        return EnumMember(name.split(".", 1)[1], name.split(".", 1)[0], entry.get("value"))
    if "items" in entry:
        return _container(entry, kind, tensors, where, depth)
    if kind in ("list", "tuple", "dict") and isinstance(entry.get("value"), str):
        return _container_from_text(entry["value"], kind, where)
    if isinstance(entry.get("repr"), str):
        return Opaque(kind, entry["repr"])
    raise MxdebugError(where, "a value with its type", brief(entry),
                       "not a FlashInfer dump, or one of a version that mxdebug does not know")


def _tensor(entry: dict[str, Any], tensors: Mapping[str, Tensor] | None, where: str) -> Any:
    key = entry.get("tensor_key")
    if tensors is None:
        return ABSENT
    if not isinstance(key, str) or key not in tensors:
        raise MxdebugError(where, f"a tensor in the dump's file, key {brief(key)}", "none",
                           "the file is of another call, or FlashInfer did not write it")
    return tensors[key]


def _container(entry: dict[str, Any], kind: str, tensors: Mapping[str, Tensor] | None, where: str, depth: int) -> Any:
    items = entry["items"]
    if not isinstance(items, list) or len(items) != entry.get("length"):
        got = f"{len(items)} items" if isinstance(items, list) else "none"
        raise MxdebugError(where, f"a {kind} of {brief(entry.get('length'), 20)} items", got, "the metadata was edited or cut")
    if kind == "dict":
        if not all(isinstance(item, dict) and {"key", "value"} <= item.keys() for item in items):
            raise MxdebugError(where, "a key and a value for each item", brief(items), "not a FlashInfer dump")
        items = [part for item in items for part in (item["key"], item["value"])]
    values = [rebuild(item, tensors, f"{where}[{i}]", depth + 1) for i, item in enumerate(items)]
    if any(value is ABSENT for value in values):
        return ABSENT
    if kind != "dict":
        return values if kind == "list" else tuple(values)  # a subclass of tuple has its own name
    try:
        return dict(zip(values[::2], values[1::2], strict=True))
    except TypeError as error:
        raise MxdebugError(where, "keys that can be hashed", str(error), "not a FlashInfer dump") from error


def _container_from_text(text: str, kind: str, where: str) -> Any:
    """Before 0.7, FlashInfer wrote containers as the first 1000 characters of their str()."""
    if len(text) < 1000:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            pass
    raise MxdebugError(where, f"a {kind} with its items", f"text: {text[:60]!r}",
                       "this FlashInfer wrote containers as text and lost the tensors in them; record with 0.7 or later")
