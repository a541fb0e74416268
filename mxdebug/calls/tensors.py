"""The tensor files of a dump: `inputs` and `outputs`, as `.pt` (torch.save of a dict) or `.safetensors`."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import files
from ..errors import MxdebugError, brief
from . import pickled

DTYPES: dict[str, torch.dtype] = {str(dtype): dtype for dtype in (
    torch.bool, torch.uint8, torch.int8, torch.uint16, torch.int16, torch.uint32, torch.int32, torch.uint64, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz, torch.float8_e8m0fnu, torch.float4_e2m1fn_x2,
)}
"""The dtypes that a dump may name, by their name there."""

SUFFIXES = {"torch": ".pt", "safetensors": ".safetensors"}
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_GAPS = 2**28  # bytes between the elements of a file's tensors that are filled in; more is a slice of a buffer that did not come along
_REPEATED = 2**26  # bytes by which the tensors of a file may be larger than it: engines pass expanded tensors, which repeat their elements


def find(folder: Path, stem: str, tensor_format: str = "torch") -> Path | None:
    """The file `stem` (inputs, outputs) in a dump's folder, in the format that the metadata names or else in the other; None if
    there is none. What stands in its place, such as a link, is not followed here."""
    suffixes = sorted(SUFFIXES.values(), key=lambda suffix: suffix != SUFFIXES.get(tensor_format))
    return next((path for suffix in suffixes if (path := folder / f"{stem}{suffix}").exists()), None)


def read(path: Path, keys: Sequence[str], details: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors of one file, in the order of `keys`, with the shapes, dtypes and strides of the metadata's `tensor_details`.

    A .pt file is mapped into memory: pages are read when they are needed. A .safetensors file has contiguous copies only; they get their
    strides back, unless elements overlapped (an expanded tensor), which stay contiguous.
    MxdebugError for a file that is cut off, lies elsewhere (a link), holds anything but plain tensors, others than the metadata lists, or
    tensors that repeat few elements so often that they would not fit into memory.
    """
    files.check(path, path.parent)
    loaded = _read_safetensors(path) if path.suffix == ".safetensors" else _read_pt(path)
    room = path.stat().st_size + _REPEATED
    if (size := sum(t.numel() * t.element_size() for t in loaded.values())) > room:
        raise MxdebugError(str(path), f"tensors of at most {room} bytes, by the file's size", f"{size} bytes",
                           "strides that repeat elements: a damaged or malicious file")
    if set(loaded) != set(keys):
        lost, extra = sorted(set(keys) - set(loaded)), sorted(map(str, set(loaded) - set(keys)))
        raise MxdebugError(str(path), f"the tensors that the metadata lists: {', '.join(keys)}",
                           "; ".join([f"no {key}" for key in lost] + [f"an unlisted {key}" for key in extra]), "a file of another call")
    tensors, gaps = {}, _GAPS
    for key in keys:
        tensor = loaded[key].detach()  # engines pass nn.Parameters
        shape, dtype, stride = _detail(path, key, details)
        if list(tensor.shape) != shape or tensor.dtype != dtype:
            raise MxdebugError(f"{path}, {key}", f"{dtype} {shape}, as the metadata says", f"{tensor.dtype} {list(tensor.shape)}",
                               "the file and the metadata are of different calls")
        if path.suffix == ".safetensors":
            tensor = restride(tensor, stride, gaps)
            gaps -= _gaps(tensor, tensor.stride())
        tensors[key] = tensor
    return tensors


def _detail(path: Path, key: str, details: Mapping[str, Any]) -> tuple[list[int], torch.dtype, list[int]]:
    detail = details.get(key)
    if not isinstance(detail, dict):
        raise MxdebugError(f"{path.parent / 'metadata.jsonl'}, tensor_details", f"shape, dtype and stride of {key}", "none",
                           "metadata of another tool")
    shape, stride, dtype = detail.get("shape"), detail.get("stride"), detail.get("dtype")
    numbers = isinstance(shape, list) and isinstance(stride, list) and all(type(n) is int and abs(n) < 2**63 for n in [*shape, *stride])
    if not numbers or len(shape) != len(stride) or not isinstance(dtype, str) or dtype not in DTYPES:
        raise MxdebugError(f"{path.parent / 'metadata.jsonl'}, tensor_details.{key}", "shape, dtype and stride", brief(detail, 200),
                           "not written by FlashInfer, or a dtype that this torch does not have")
    return shape, DTYPES[dtype], stride


def _read_pt(path: Path) -> dict[str, Tensor]:
    try:
        pickled.check(path)
        loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except MxdebugError:
        raise
    except Exception as error:  # torch raises RuntimeError, EOFError, KeyError, OSError and more; zipfile and pickletools others
        refused = isinstance(error, pickle.UnpicklingError) and any(word in str(error) for word in ("GLOBAL", "reduce", "Can only"))
        if refused:
            raise MxdebugError(str(path), "plain tensors only", _first_line(error), pickled.CODE) from error
        raise _cut_off(path, error) from error
    if not isinstance(loaded, dict) or not all(isinstance(key, str) and isinstance(t, Tensor) for key, t in loaded.items()):
        raise MxdebugError(str(path), "a dict of tensors", type(loaded).__name__, "not a FlashInfer dump")
    for key, t in loaded.items():
        plain = type(t) in (Tensor, torch.nn.Parameter) and t.layout is torch.strided and t.device.type == "cpu"
        if not plain or t.is_neg() or t.is_conj():
            raise MxdebugError(f"{path}, {key}", "a plain tensor", f"{type(t).__name__}, {t.layout}, {t.device.type}",
                               "not a FlashInfer dump")
    return loaded


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    try:
        return load_file(path, device="cpu")
    except Exception as error:  # SafetensorError derives from Exception only
        raise _cut_off(path, error) from error


def _cut_off(path: Path, error: Exception) -> MxdebugError:
    got = f"{path.stat().st_size} bytes: {type(error).__name__}: {_first_line(error)}"
    return MxdebugError(str(path), f"a whole {path.suffix} file", got,
                        "the dump was cut off while being written (process killed, disk full), or copied in part")


def _first_line(error: Exception) -> str:
    """The line of an error's message that says what was found; torch's begins with advice on how to load unsafely."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next((line for line in lines if "GLOBAL" in line), lines[0] if lines else "no message")[:200]


def write(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a tensor file in the format of the suffix: .pt keeps strides, .safetensors writes contiguous copies."""
    if path.suffix == ".safetensors":
        from safetensors.torch import save_file

        # Copies, because save_file refuses tensors that share memory.
        save_file({key: t.detach().cpu().clone(memory_format=torch.contiguous_format) for key, t in tensors.items()}, path)
    else:
        # torch.save writes the whole storage of a view: a slice of a large buffer would drag all of it along.
        torch.save({key: snapshot_tensor(t) if t.is_cuda or _extent(t.shape, t.stride()) * t.element_size() < t.untyped_storage().nbytes()
                    else t.detach() for key, t in tensors.items()}, path)


def snapshot_tensor(tensor: Tensor) -> Tensor:
    """A copy on the CPU with the same strides (contiguous, where elements overlap)."""
    copy = tensor.detach().to("cpu", copy=True)
    return copy if copy.stride() == tensor.stride() else restride(copy, tensor.stride())


def restride(tensor: Tensor, stride: Sequence[int], gaps: int = _GAPS) -> Tensor:
    """The same values at other strides, gaps filled with zeros; contiguous where such strides make elements overlap.

    Contiguous, too, where the gaps would take more than `gaps` bytes: then it was one slice of a buffer that did not come along.
    """
    if tensor.numel() == 0 or list(tensor.stride()) == list(stride):
        return tensor
    if _may_overlap(tensor.shape, stride) or _gaps(tensor, stride) > gaps:
        return tensor.contiguous()
    # As integers: copies of the narrow floats are not implemented everywhere.
    bits = _BITS.get(tensor.element_size(), tensor.dtype)
    result = torch.zeros(_extent(tensor.shape, stride), dtype=bits).as_strided(tensor.shape, stride)
    return result.copy_(tensor.view(bits)).view(tensor.dtype)


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements of storage a tensor spans."""
    return sum((n - 1) * s for n, s in zip(shape, stride, strict=True)) + 1 if all(shape) else 0


def _gaps(tensor: Tensor, stride: Sequence[int]) -> int:
    """Bytes between its elements at these strides."""
    return (_extent(tensor.shape, stride) - tensor.numel()) * tensor.element_size()


def _may_overlap(shape: Sequence[int], stride: Sequence[int]) -> bool:
    reach = 0
    for step, n in sorted((s, n) for n, s in zip(shape, stride, strict=True) if n > 1):
        if step <= reach:
            return True
        reach += (n - 1) * step
    return any(s < 0 for s in stride)
