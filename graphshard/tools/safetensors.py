"""Read and write safetensors files: https://github.com/huggingface/safetensors.

length of the header (8 bytes) | header (JSON) | bytes of all tensors
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Iterator, Mapping
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch

from .checkpoint import Checkpoint, require

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""Names of dtypes in the format."""
_MAX_HEADER = 100_000_000
"""Largest header in bytes, as limited by the format."""
_NOTES = "__metadata__"
"""Name of the header entry that is not a tensor."""


def write_safetensors(checkpoint: Checkpoint, path: Path) -> None:
    """Write a checkpoint as a safetensors file.

    Raises:
        ValueError: the checkpoint has a value that is not a tensor, or a dtype or name that the
            format does not support.
    """
    if checkpoint.others:
        raise ValueError(
            f"a safetensors file holds tensors alone, and {checkpoint.others[0]!r} is none: choose "
            "a key (--key model), or write a .pt file"
        )
    text = json.dumps(_header(checkpoint)).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in checkpoint.load_tensors():
            # Not through numpy, which need not be installed.
            file.write((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


def _header(checkpoint: Checkpoint) -> dict[str, object]:
    """Return dtype, shape and byte range of each tensor, by name."""
    header: dict[str, object] = {_NOTES: {"format": "pt"}}
    start = 0
    for name, entry in checkpoint.tensors.items():
        dtype, short = entry.properties.dtype, checkpoint.short_name(name)
        if dtype not in DTYPES:
            raise ValueError(f"{name!r} is {dtype}: a safetensors file has no such dtype")
        require(short != _NOTES, f"{name!r}: a safetensors file has something else of this name")
        require(short not in header, f"{name!r}: another tensor is called {short!r}, too")
        stop = start + math.prod(entry.size) * dtype.itemsize
        offsets = [start, stop]
        header[short] = {
            "dtype": DTYPES[dtype],
            "shape": list(entry.size),
            "data_offsets": offsets,
        }
        start = stop
    return header


class Place(NamedTuple):
    """A tensor and its byte range, relative to the end of the header."""

    start: int
    stop: int
    dtype: torch.dtype
    shape: list[int]


class SafetensorsFile:
    """A file with a checked header; tensors are read on demand.

    Attributes:
        tensors: places of the tensors, by name.

    Raises:
        ValueError: the header is invalid.
        Exception: any other error that a damaged file may cause.
    """

    def __init__(self, path: Path) -> None:
        self._path, size = path, path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            self._begin = 8 + length
            fits = length <= _MAX_HEADER and self._begin <= size
            require(fits, f"has no header of {length} bytes")
            header = json.loads(file.read(length), object_pairs_hook=_distinct)
        require(isinstance(header, dict), "its header is no JSON object")
        self.tensors = {name: _place(name, of) for name, of in header.items() if name != _NOTES}
        _check_ranges(self.tensors, size - self._begin)

    def read(self, name: str, rows: slice | None = None) -> torch.Tensor:
        """Read a tensor, or some of its rows, into new host memory; read nothing else.

        Args:
            rows: slice of the first dim with a step of 1; None: the whole tensor.

        Raises:
            ValueError: the file has become shorter.
        """
        place = self.tensors[name]
        shape, start = list(place.shape), self._begin + place.start
        if rows is not None:
            first, last, _ = rows.indices(shape[0])
            shape[0] = max(last - first, 0)
            start += first * math.prod(shape[1:]) * place.dtype.itemsize
        num_bytes = math.prod(shape) * place.dtype.itemsize
        # Explicitly on the CPU: the default device may be another.
        data = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
        with self._path.open("rb", buffering=0) as file:
            file.seek(start)
            _fill(file, data, self._path)
        return data.view(place.dtype).view(shape)

    def mapped(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield names and tensors, mapped from the file, or copied if misaligned in it."""
        size, begin = self._path.stat().st_size, self._begin
        data = torch.from_file(str(self._path), shared=False, size=size, dtype=torch.uint8)
        for name, place in self.tensors.items():
            stored = data[begin + place.start : begin + place.stop]
            aligned = (begin + place.start) % place.dtype.itemsize == 0
            yield name, (stored if aligned else stored.clone()).view(place.dtype).view(place.shape)


def _fill(file: FileIO, data: torch.Tensor, path: Path) -> None:
    """Fill ``data`` from ``file``; one system call reads at most 2 GB."""
    done = 0
    while done < data.numel():
        # Not through numpy, which need not be installed.
        rest = (ctypes.c_char * (data.numel() - done)).from_address(data.data_ptr() + done)
        count = file.readinto(rest)
        require(bool(count), f"{path} ends early: it became shorter while it was read")
        done += count or 0


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object; raise ValueError if a name occurs twice."""
    names = dict(pairs)
    require(len(names) == len(pairs), "its header has a name twice")
    return names


def _place(name: str, entry: Any) -> Place:
    """Return the checked header entry of one tensor."""
    dtypes = {of: dtype for dtype, of in DTYPES.items()}
    require(isinstance(entry, Mapping), f"{name!r} is {entry!r}")
    dtype, shape, offsets = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    require(isinstance(dtype, str) and dtype in dtypes, f"{name!r} has the dtype {dtype!r}")
    require(_are_sizes(shape), f"{name!r} has the shape {shape!r}")
    require(
        _are_sizes(offsets) and len(offsets) == 2 and offsets[0] <= offsets[1],
        f"{name!r} has the offsets {offsets!r}",
    )
    place = Place(offsets[0], offsets[1], dtypes[dtype], shape)
    size = math.prod(shape) * place.dtype.itemsize
    require(place.stop - place.start == size, f"{name!r} needs {size} bytes, not {offsets}")
    return place


def _are_sizes(values: object) -> bool:
    """Return whether these are sizes in JSON: a list of non-negative integers."""
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_ranges(entries: Mapping[str, Place], size: int) -> None:
    """Check that the tensors cover all ``size`` bytes after the header without overlap."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1][:2]):
        require(entry.start == end, f"{name!r} begins at byte {entry.start}, not at {end}")
        end = entry.stop
    require(end == size, f"its tensors have {end} bytes, and the file {size}")
