"""Files of the format safetensors: https://github.com/huggingface/safetensors.

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
"""The names that the format has for dtypes."""
_MAX_HEADER = 100_000_000
"""Bytes of a header; the format's own limit."""
_NOTES = "__metadata__"
"""The entry of a header that is no tensor."""


def write_safetensors(checkpoint: Checkpoint, path: Path) -> None:
    """Write the length of a JSON header, the header, and the bytes of all tensors."""
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
            # numpy, which could lend its memory, need not be installed.
            file.write((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


def _header(checkpoint: Checkpoint) -> dict[str, object]:
    """Return dtype, shape and range of bytes of every tensor, by name."""
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
    """A tensor, and the bytes behind the header that it has."""

    start: int
    stop: int
    dtype: torch.dtype
    shape: list[int]


class SafetensorsFile:
    """A file whose header was read and checked; its tensors are read when they are asked for.

    Attributes:
        tensors: what its tensors are, by name.

    Raises:
        Exception: of any kind, if the file is damaged; a ``ValueError`` where its header is wrong.
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
        """Return a tensor, or some of its rows, in new memory of the host; nothing else is read.

        Args:
            rows: of the first dim, with a step of 1; None: all of the tensor.

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
        data = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")  # whatever the default is
        with self._path.open("rb", buffering=0) as file:
            file.seek(start)
            _fill(file, data, self._path)
        return data.view(place.dtype).view(shape)

    def mapped(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield name and tensor, mapped from the file unless it is not aligned there."""
        size, begin = self._path.stat().st_size, self._begin
        data = torch.from_file(str(self._path), shared=False, size=size, dtype=torch.uint8)
        for name, place in self.tensors.items():
            stored = data[begin + place.start : begin + place.stop]
            aligned = (begin + place.start) % place.dtype.itemsize == 0
            yield name, (stored if aligned else stored.clone()).view(place.dtype).view(place.shape)


def _fill(file: FileIO, data: torch.Tensor, path: Path) -> None:
    """Read bytes into memory; one call of the system returns at most 2 GB."""
    done = 0
    while done < data.numel():
        # numpy, which could lend its memory, need not be installed.
        rest = (ctypes.c_char * (data.numel() - done)).from_address(data.data_ptr() + done)
        count = file.readinto(rest)
        require(bool(count), f"{path} ends early: it became shorter while it was read")
        done += count or 0


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return a JSON object, in which no name may be there twice."""
    names = dict(pairs)
    require(len(names) == len(pairs), "its header has a name twice")
    return names


def _place(name: str, entry: Any) -> Place:
    """Return what the header says of one tensor."""
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
    """Return whether these are what JSON has for sizes: a list of integers, none negative."""
    return isinstance(values, list) and all(type(value) is int and value >= 0 for value in values)


def _check_ranges(entries: Mapping[str, Place], size: int) -> None:
    """Check that the tensors have all ``size`` bytes behind the header, and share none."""
    end = 0
    for name, entry in sorted(entries.items(), key=lambda item: item[1][:2]):
        require(entry.start == end, f"{name!r} begins at byte {entry.start}, not at {end}")
        end = entry.stop
    require(end == size, f"its tensors have {end} bytes, and the file {size}")
