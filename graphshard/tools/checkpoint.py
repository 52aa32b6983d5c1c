"""Read a checkpoint of ``torch.distributed.checkpoint`` (DCP) from an untrusted source.

torch's ``dcp_to_torch_save`` unpickles everything, and holds all tensors in memory. Here,
unpickling the metadata can only build metadata objects, the metadata is checked before any tensor
is created, and the rest is read by ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from .._torch.checkpoint import StorageInfo, is_within, overlap, read_metadata
from .._torch.nn import unflatten_state_dict

BATCH_BYTES = 1 << 30  # a batch of tensors is loaded once it has at least this size


@contextlib.contextmanager
def reading(source: Path) -> Iterator[None]:
    """Convert every error to a ValueError that names ``source``."""
    try:
        yield
    except (Exception, dcp.CheckpointException) as error:  # damaged files raise many types
        if isinstance(error, ValueError) and str(error).startswith(f"{source}: "):
            raise
        text = f"{type(error).__name__}: {error}".splitlines()
        raise ValueError(f"{source}: cannot be read: {text[0]}") from error


def without_prefix(names: Iterable[str], prefix: str | None, source: Path) -> dict[str, str]:
    """Map each name to the name without ``prefix``, or to itself if it lacks the prefix.

    Args:
        prefix: name of a module, with or without the trailing dot (None: no change).
        source: file or folder that contains the names, for error messages.

    Raises:
        ValueError: no name has the prefix, or removing it makes two names equal.
    """
    names = list(names)
    if not prefix:
        return dict(zip(names, names))
    prefix = prefix.removesuffix(".") + "."
    renamed = {
        name: (name.removeprefix(prefix) or name) if isinstance(name, str) else name
        for name in names
    }
    if all(name == new for name, new in renamed.items()):
        some = ", ".join(map(str, names[:20]))
        raise ValueError(f"{source}: no name starts with {prefix!r}; names include {some}")
    old_names: dict[str, str] = {}
    for name, new in renamed.items():
        if (other := old_names.setdefault(new, name)) != name:
            raise ValueError(
                f"{source}: without the prefix {prefix!r}, {other!r} and {name!r} have the same "
                "name: choose another prefix, or none"
            )
    return renamed


def require(holds: bool, what: str) -> None:
    """Raise a ValueError with the message ``what`` unless ``holds``."""
    if not holds:
        raise ValueError(what)


class Checkpoint:
    """A checkpoint whose values are accessed by DCP's flat names.

    Args:
        key: top-level key to read (None: all keys).
        prefix: prefix to remove from the names under the key; see :func:`without_prefix`.

    Attributes:
        tensors: size and dtype of each tensor, keyed by flat name.
        others: flat names of all other values.

    Raises:
        ValueError: ``folder`` is not a checkpoint, is damaged or has nothing under ``key``, or
            ``prefix`` cannot be removed (see :func:`without_prefix`).
    """

    def __init__(self, folder: Path, key: str | None, prefix: str | None = None) -> None:
        self._folder, self._key = folder, key
        with reading(folder):
            require(
                (folder / ".metadata").is_file(),
                f"{folder}: not a checkpoint, or an incomplete one: it has no .metadata; pass a "
                "folder that torch.distributed.checkpoint has written completely",
            )
            self._metadata = _checked(read_metadata(folder / ".metadata"), folder)
        entries = self._metadata.state_dict_metadata
        paths = self._metadata.planner_data or {name: (name,) for name in entries}
        chosen = [name for name in entries if not key or paths[name][0] == key]
        if not chosen:
            keys = sorted({str(path[0]) for path in paths.values()})
            if not keys:
                raise ValueError(f"{folder}: the checkpoint is empty")
            raise ValueError(f"{folder}: no key {key!r}; keys include {', '.join(keys[:20])}")
        self.tensors = {n: e for n in chosen if isinstance(e := entries[n], TensorStorageMetadata)}
        self.others = [name for name in chosen if name not in self.tensors]
        self._paths = {name: paths[name] for name in chosen}
        # First part of each path below the key; the key itself if its value is not a container.
        below = {n: p[1:] or p if key else p for n, p in self._paths.items()}
        self._first = {name: str(path[0]) for name, path in below.items()}
        self._new_names = without_prefix(dict.fromkeys(self._first.values()), prefix, folder)

    def short_name(self, name: str) -> str:
        """Return a flat name without the key and the prefix."""
        short = name.removeprefix(f"{self._key}.") if self._key else name
        first = self._first[name]
        # In an untrusted checkpoint, a flat name need not start with the first part of its path.
        return self._new_names[first] + short[len(first) :] if short.startswith(first) else short

    def nested(self, flat: Mapping[str, object]) -> object:
        """Rebuild the nested value under the key from ``flat``; its names lose the prefix."""
        with reading(self._folder):
            state: Any = unflatten_state_dict(dict(flat), self._paths)
            if self._key:
                state = state[self._key]
            if not isinstance(state, dict):
                return state
            return {self._new_names.get(name, name): value for name, value in state.items()}

    def load_others(self) -> dict[str, object]:
        with reading(self._folder):
            return {name: self._load_value(name) for name in self.others}

    def _load_value(self, name: str) -> object:
        info: StorageInfo = self._metadata.storage_data[MetadataIndex(name)]
        with (self._folder / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            stored = io.BytesIO(file.read(info.length))
        try:
            return torch.load(stored, map_location="cpu", weights_only=True)
        except Exception as error:
            raise ValueError(
                f"{self._folder}: {name!r} is damaged, or holds objects that could run code when "
                "loaded, that is, other than tensors, numbers, strings and containers: convert "
                "another top-level key (--key model, for example), or load the checkpoint with "
                "torch.distributed.checkpoint if you trust it"
            ) from error

    def load_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield flat names and tensors, in the order of ``tensors``; load them in batches."""
        batch: dict[str, torch.Tensor] = {}
        num_bytes = 0
        for name, entry in self.tensors.items():
            with reading(self._folder):
                batch[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
            num_bytes += batch[name].nbytes
            if num_bytes >= BATCH_BYTES:
                yield from self._loaded(batch)
                batch, num_bytes = {}, 0
        yield from self._loaded(batch)

    def _loaded(self, batch: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        if batch:
            with reading(self._folder):
                reader = _Reader(self._folder, self._metadata)
                dcp.load(batch, storage_reader=reader, no_dist=True)
        yield from batch.items()


class _Reader(dcp.FileSystemReader):
    """A reader of a checkpoint whose metadata was already read and checked."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._checked = metadata

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self._checked


def _checked(metadata: object, folder: Path) -> Metadata:
    """Check that metadata is consistent and matches the files in ``folder``; return it."""
    require(isinstance(metadata, Metadata), ".metadata does not hold checkpoint metadata")
    assert isinstance(metadata, Metadata)
    entries, stored = metadata.state_dict_metadata, metadata.storage_data
    require(isinstance(entries, dict) and isinstance(stored, dict), ".metadata has no entries")
    _check_locations(stored, folder)
    for name, entry in entries.items():
        require(isinstance(name, str), f"name {name!r} is not a string")
        if isinstance(entry, TensorStorageMetadata):
            _check_tensor(name, entry, stored)
        else:
            require(
                isinstance(entry, BytesStorageMetadata),
                f"{name!r} has unknown metadata: {type(entry)}",
            )
            require(MetadataIndex(name) in stored, f"{name!r} is in no file")
    if metadata.planner_data:
        _check_paths(list(entries), metadata.planner_data)
    return metadata


def _check_paths(names: Sequence[str], paths: object) -> None:
    # Paths of values in the nested state dict consist of dictionary keys and list indices.
    require(isinstance(paths, dict) and paths.keys() >= set(names), "paths are missing")
    assert isinstance(paths, dict)
    for name in names:
        path = paths[name]
        # A list grows to its largest index, so bound the index.
        is_path = isinstance(path, tuple) and all(
            isinstance(part, str) or (_is_size(part) and part < len(names)) for part in path
        )
        require(is_path and len(path) > 0, f"{name!r} has an invalid path: {path!r}")
    taken = {paths[name] for name in names}
    require(len(taken) == len(names), "two values have the same path")
    for path in taken:
        outer = next((path[:n] for n in range(1, len(path)) if path[:n] in taken), None)
        require(outer is None, f"path {path!r} is inside the value at {outer!r}")


def _check_tensor(
    name: str, entry: TensorStorageMetadata, stored: Mapping[object, StorageInfo]
) -> None:
    dtype, size = entry.properties.dtype, entry.size
    is_valid = isinstance(dtype, torch.dtype) and _is_shape(size)
    require(is_valid, f"{name!r} has an invalid dtype or size: {dtype}, {size}")
    require(isinstance(entry.chunks, list), f"{name!r} has no chunks")
    for chunk in entry.chunks:
        require(
            isinstance(chunk, ChunkStorageMetadata) and _is_inside(chunk, size),
            f"{name!r} of size {list(size)} has an invalid chunk: {chunk}",
        )
        info = stored.get(MetadataIndex(name, chunk.offsets))
        require(info is not None, f"{name!r} at {list(chunk.offsets)} is in no file")
        assert info is not None
        needed = math.prod(chunk.sizes) * dtype.itemsize
        require(
            info.length >= needed or bool(info.transform_descriptors),
            f"{name!r} at {list(chunk.offsets)} needs {needed} bytes, but has {info.length}",
        )
    volume = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
    require(
        volume == math.prod(size) and not _any_overlap(entry.chunks),
        f"{name!r} of size {list(size)} has missing or overlapping chunks",
    )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple) and all(map(_is_size, value))


def _is_inside(chunk: ChunkStorageMetadata, size: torch.Size) -> bool:
    return (
        _is_shape(chunk.offsets)
        and _is_shape(chunk.sizes)
        and len(chunk.offsets) == len(chunk.sizes) == len(size)
        and is_within(size, chunk)
    )


def _any_overlap(chunks: Sequence[ChunkStorageMetadata]) -> bool:
    full = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    full.sort(key=lambda chunk: chunk.offsets)
    active: list[ChunkStorageMetadata] = []  # earlier chunks that extend to the current first row
    for chunk in full:
        row = chunk.offsets[:1]  # empty for a scalar
        active = [c for c in active if not row or c.offsets[0] + c.sizes[0] > row[0]]
        if any(overlap(chunk, other) for other in active):
            return True
        active.append(chunk)
    return False


def _check_locations(stored: Mapping[object, object], folder: Path) -> None:
    """Check that each value has its own bytes in a file of ``folder``."""
    ranges: list[tuple[str, int, int]] = []
    for index, info in stored.items():
        require(
            isinstance(index, MetadataIndex) and isinstance(info, StorageInfo),
            f".metadata has a {type(info).__name__} for {index!r}",
        )
        assert isinstance(info, StorageInfo)
        path, start, length = info.relative_path, info.offset, info.length
        require(
            isinstance(path, str) and _is_size(start) and _is_size(length),
            f"{index} has an invalid location: {length!r} bytes at {start!r} of {path!r}",
        )
        pure = PurePath(path)
        require(
            not pure.is_absolute() and ".." not in pure.parts and "\0" not in path,
            f"{index} is in {path!r}, outside of the folder",
        )
        ranges.append((path, start, start + length))
    sizes: dict[str, int] = {}
    end_of: dict[str, int] = {}  # end of the last checked value, keyed by file
    for path, start, stop in sorted(ranges):
        if path not in sizes:
            require((folder / path).is_file(), f"{path} is missing")
            sizes[path] = (folder / path).stat().st_size
        require(stop <= sizes[path], f"{path} ends before byte {stop}: it is truncated")
        require(start >= end_of.get(path, 0), f"{path} has two values at byte {start}")
        end_of[path] = stop
