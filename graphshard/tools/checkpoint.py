"""Read a checkpoint of ``torch.distributed.checkpoint`` (DCP) from an untrusted source.

The metadata is a pickle; unpickling may build metadata objects but call nothing. The metadata is
checked before any tensor is created: each tensor must consist of its chunks, chunks must not
overlap, and each chunk must lie in a file of the folder with all its bytes. Everything else in the
checkpoint is read by ``torch.load(weights_only=True)``.
"""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from .._torch.checkpoint import StorageInfo, read_metadata
from .._torch.nn import unflatten_state_dict

BATCH_BYTES = 1 << 30
"""Bytes of tensors held in memory at a time, unless a single tensor is larger."""


@contextlib.contextmanager
def reading(source: Path) -> Iterator[None]:
    """Raise every error as a ValueError that names ``source``.

    Raises:
        ValueError: any error occurred; torch raises many kinds for a damaged file.
    """
    try:
        yield
    except (Exception, dcp.CheckpointException) as error:
        if isinstance(error, ValueError) and str(error).startswith(f"{source}: "):
            raise
        text = f"{type(error).__name__}: {error}".splitlines()
        raise ValueError(f"{source}: cannot be read: {text[0]}") from error


def without_prefix(names: Iterable[str], prefix: str | None, source: Path) -> dict[str, str]:
    """Return a map from each name to the name without ``prefix``, if it has it.

    Args:
        prefix: name of a module, with or without the trailing dot; None: change nothing.
        source: file or folder that contains the names, for error messages.

    Raises:
        ValueError: no name has the prefix, or two names are equal without it.
    """
    names = list(names)
    if not prefix:
        return dict(zip(names, names))
    prefix = prefix.removesuffix(".") + "."
    renamed = {name: name.removeprefix(prefix) or name for name in names}
    if all(name == new for name, new in renamed.items()):
        raise ValueError(f"{source}: no name begins with {prefix!r}: {', '.join(names[:20])}")
    old_names: dict[str, str] = {}
    for name, new in renamed.items():
        if (other := old_names.setdefault(new, name)) != name:
            raise ValueError(f"{source}: without {prefix!r} {name!r} and {other!r} are one name")
    return renamed


def require(holds: bool, what: str) -> None:
    """Raise an error unless a condition holds.

    Raises:
        ValueError: ``holds`` is false; ``what`` is the message.
    """
    if not holds:
        raise ValueError(what)


class Checkpoint:
    """A checkpoint, with values under the flat names that DCP gives them.

    Args:
        folder: folder of the checkpoint.
        key: read only what is under this key; None: everything.
        prefix: prefix to remove from the names under the key; see :func:`without_prefix`.

    Attributes:
        tensors: size and dtype of each tensor, by flat name.
        others: flat names of all other values.

    Raises:
        ValueError: ``folder`` is not a checkpoint or is damaged, has nothing under ``key``, or has
            no name with ``prefix``.
    """

    def __init__(self, folder: Path, key: str | None, prefix: str | None = None) -> None:
        self._folder = folder
        with reading(folder):
            require((folder / ".metadata").is_file(), f"{folder}: is no checkpoint: no .metadata")
            self._metadata = _checked(read_metadata(folder / ".metadata"), folder)
        entries = self._metadata.state_dict_metadata
        self._paths = self._metadata.planner_data or {name: (name,) for name in entries}
        self._key = key
        chosen = [name for name in entries if not key or self._paths[name][0] == key]
        if not chosen:
            keys = sorted({str(path[0]) for path in self._paths.values()})
            raise ValueError(f"{folder}: has nothing under {key!r}, but {', '.join(keys[:20])}")
        self.tensors = {
            name: entry
            for name in chosen
            if isinstance(entry := entries[name], TensorStorageMetadata)
        }
        self.others = [name for name in chosen if name not in self.tensors]
        # Deduplicated, in order: a dictionary under the key has several flat names.
        self._names = {str(self._own_path(name)[0]): None for name in chosen}
        self._new_names = without_prefix(self._names, prefix, folder)

    def _own_path(self, name: str) -> tuple[object, ...]:
        """Return the path of a value below the key, or the key itself for the key's own value."""
        path = self._paths[name]
        return path[1:] or path if self._key else path

    def short_name(self, name: str) -> str:
        """Return a flat name without the key and the prefix."""
        short = name.removeprefix(f"{self._key}.") if self._key else name
        first = str(self._own_path(name)[0])
        # In an untrusted checkpoint, a flat name may begin differently from its path.
        return self._new_names[first] + short[len(first) :] if short.startswith(first) else short

    def nested(self, flat: Mapping[str, object]) -> object:
        """Rebuild the saved state dict from its values by flat name."""
        with reading(self._folder):
            state = unflatten_state_dict(dict(flat), {name: self._paths[name] for name in flat})
            state = state[self._key] if self._key else state
            if not isinstance(state, dict):
                return state
            return {self._new_names.get(name, name): value for name, value in state.items()}

    def load_others(self) -> dict[str, object]:
        """Return all values that are not tensors, by flat name."""
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
                f"{self._folder}: {name!r} is not made of tensors, numbers, texts and containers "
                "of these, or is damaged; to load it would run code of its own: leave it out by "
                "--key, or load it by torch.distributed.checkpoint if you trust it"
            ) from error

    def load_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield flat names and tensors, in the order of ``tensors``, ``BATCH_BYTES`` at a time."""
        batch: dict[str, torch.Tensor] = {}
        for name, entry in self.tensors.items():
            with reading(self._folder):
                batch[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
            if sum(tensor.nbytes for tensor in batch.values()) >= BATCH_BYTES:
                yield from self._loaded(batch)
                batch = {}
        yield from self._loaded(batch)

    def _loaded(self, batch: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        if batch:
            with reading(self._folder):
                reader = _Reader(self._folder, self._metadata)
                dcp.load(batch, storage_reader=reader, no_dist=True)
        yield from batch.items()


class _Reader(dcp.FileSystemReader):
    """Reads a checkpoint whose metadata was read and checked already."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self._given = metadata

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        return self._given


def _checked(metadata: object, folder: Path) -> Metadata:
    """Check that metadata is consistent and matches the files in ``folder``; return it."""
    require(isinstance(metadata, Metadata), "its .metadata are none of a checkpoint")
    assert isinstance(metadata, Metadata)
    entries, paths, stored = (
        metadata.state_dict_metadata,
        metadata.planner_data,
        metadata.storage_data,
    )
    require(isinstance(entries, dict) and isinstance(stored, dict), "its .metadata lack entries")
    _check_places(stored, folder)
    for name, entry in entries.items():
        require(isinstance(name, str), f"the name {name!r} is no text")
        if isinstance(entry, TensorStorageMetadata):
            _check_tensor(name, entry, stored)
        else:
            require(isinstance(entry, BytesStorageMetadata), f"{name!r} is a {type(entry)}")
            require(MetadataIndex(name) in stored, f"{name!r} is in no file")
    if paths:
        require(isinstance(paths, dict) and entries.keys() <= paths.keys(), "paths are missing")
        for name in entries:
            _check_path(name, paths[name], len(entries))
        _check_one_each([paths[name] for name in entries])
    return metadata


def _check_path(name: str, path: object, num_entries: int) -> None:
    """Check the path of ``name`` in the nested state dict: keys, and indices of lists."""
    require(isinstance(path, tuple) and len(path) > 0, f"{name!r} has the path {path!r}")
    assert isinstance(path, tuple)
    for part in path:
        if not isinstance(part, str):
            # A list grows to its largest index, so bound the index.
            require(_is_size(part) and part < num_entries, f"{name!r} has the path {path!r}")


def _check_one_each(paths: Sequence[tuple[object, ...]]) -> None:
    """Check that no value has the same path as another, or lies inside another."""
    taken = set(paths)
    require(len(taken) == len(paths), "two values have one path")
    for path in paths:
        outer = next((path[:n] for n in range(1, len(path)) if path[:n] in taken), None)
        require(outer is None, f"the path {path!r} is inside of the value at {outer!r}")


def _check_tensor(
    name: str, entry: TensorStorageMetadata, stored: Mapping[object, StorageInfo]
) -> None:
    """Check that a tensor's chunks cover it and are stored in files."""
    dtype, size = entry.properties.dtype, entry.size
    require(isinstance(dtype, torch.dtype) and _is_shape(size), f"{name!r} is {dtype} {size}")
    require(isinstance(entry.chunks, list), f"{name!r} has no chunks")
    for chunk in entry.chunks:
        require(
            isinstance(chunk, ChunkStorageMetadata) and _is_inside(chunk, size),
            f"{name!r} of size {list(size)} has the chunk {chunk}",
        )
        info = stored.get(MetadataIndex(name, chunk.offsets))
        require(info is not None, f"{name!r} at {list(chunk.offsets)} is in no file")
        assert info is not None
        needed = math.prod(chunk.sizes) * dtype.itemsize
        require(
            info.length >= needed or bool(info.transform_descriptors),
            f"{name!r} at {list(chunk.offsets)} needs {needed} bytes, and has {info.length}",
        )
    volume = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
    require(
        volume == math.prod(size) and not _overlap(entry.chunks),
        f"{name!r} of size {list(size)} has chunks that overlap, or some are missing",
    )


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_shape(value: object) -> bool:
    return isinstance(value, tuple) and all(map(_is_size, value))


def _is_inside(chunk: ChunkStorageMetadata, size: Sequence[int]) -> bool:
    """Return whether a chunk is valid and lies inside a tensor of ``size``."""
    if not (_is_shape(chunk.offsets) and _is_shape(chunk.sizes)):
        return False
    if not len(chunk.offsets) == len(chunk.sizes) == len(size):
        return False
    return all(start + length <= of for start, length, of in zip(chunk.offsets, chunk.sizes, size))


def _overlap(chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Return whether any two chunks share an element."""
    full = [chunk for chunk in chunks if math.prod(chunk.sizes)]
    full.sort(key=lambda chunk: chunk.offsets)
    open_chunks: list[ChunkStorageMetadata] = []
    for chunk in full:
        # Earlier chunks that reach into the rows of this one.
        open_chunks = [
            other
            for other in open_chunks
            if not chunk.offsets or other.offsets[0] + other.sizes[0] > chunk.offsets[0]
        ]
        if any(_meet(chunk, other) for other in open_chunks):
            return True
        open_chunks.append(chunk)
    return False


def _meet(one: ChunkStorageMetadata, other: ChunkStorageMetadata) -> bool:
    return all(
        a < b + b_size and b < a + a_size
        for a, a_size, b, b_size in zip(one.offsets, one.sizes, other.offsets, other.sizes)
    )


def _check_places(stored: Mapping[object, object], folder: Path) -> None:
    """Check that each value has its own bytes in a file of ``folder``."""
    places: list[tuple[str, int, int]] = []
    for index, info in stored.items():
        require(
            isinstance(index, MetadataIndex) and isinstance(info, StorageInfo),
            f"its .metadata have a {type(info).__name__} for {index!r}",
        )
        assert isinstance(info, StorageInfo)
        path, start, length = info.relative_path, info.offset, info.length
        require(
            isinstance(path, str) and _is_size(start) and _is_size(length),
            f"{index} is at {start!r}, {length!r} bytes, of {path!r}",
        )
        pure = PurePath(path)
        require(
            not pure.is_absolute() and ".." not in pure.parts and "\0" not in path,
            f"{index} is in {path!r}, which is not in the folder",
        )
        places.append((path, start, start + length))
    sizes = {path: _size_of(folder / path) for path in {place[0] for place in places}}
    before = ("", 0, 0)
    for place in sorted(places):
        path, start, stop = place
        require(stop <= sizes[path], f"{path} ends before byte {stop}: it is truncated")
        require(path != before[0] or start >= before[2], f"{path} has two values at byte {start}")
        before = place


def _size_of(path: Path) -> int:
    require(path.is_file(), f"{path.name} is missing")
    return path.stat().st_size
