"""``python -m graphshard consolidate``: turn a checkpoint of ``torch.distributed.checkpoint`` (DCP)
into one file, or such a file into a checkpoint.

    consolidate DIR OUT.pt            torch.load(OUT.pt) is the state dict that was saved, unsharded
    consolidate DIR OUT.safetensors   tensors alone, by the names that DCP gave them
    consolidate FILE DIR              a checkpoint that any number of ranks loads

Tensors are read a gigabyte at a time, whatever the size of the checkpoint, and go to a file beside
the target, which gets its name when it is whole. One process does it, without a process group.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from .._torch.nn import unflatten_state_dict
from ..files import whole

BATCH_BYTES = 1 << 30
"""Bytes of tensors that are in memory at a time, unless one tensor alone has more."""
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
"""The names that the format has for dtypes: https://github.com/huggingface/safetensors."""


def consolidate(source: str | Path, target: str | Path, key: str | None = None) -> None:
    """Write the checkpoint ``source`` as the file ``target``, or such a file as a checkpoint.

    Args:
        source: the folder of a checkpoint, or a file: .pt, .pth or .safetensors.
        target: a file with one of these suffixes, or a folder.
        key: write only what the state dict has under this key, such as "model"; None: everything.

    Raises:
        ValueError: ``source`` does not exist, ``target`` does, or it cannot hold the contents.
    """
    source, target = Path(source), Path(target)
    if target.exists():
        raise ValueError(f"{target}: exists already; remove it, or give another name")
    if source.is_dir():
        write = _writer(target)
        checkpoint = _Checkpoint(source, key)
        with _new(target) as scratch:
            write(checkpoint, scratch)
    elif source.is_file():
        state = _read(source)
        state = _under(state, key, source) if key else state
        with _new(target) as scratch:
            dcp.save(state, checkpoint_id=scratch, no_dist=True)
    else:
        raise ValueError(f"{source}: there is no such checkpoint or file")


def _new(target: Path) -> AbstractContextManager[Path]:
    """Make the folder of ``target``, and return the scratch path for :func:`whole`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return whole(target)


def _writer(target: Path) -> Callable[[_Checkpoint, Path], None]:
    """Return the function that writes a file with the suffix of ``target``."""
    writers = {".pt": _write_pt, ".pth": _write_pt, ".safetensors": _write_safetensors}
    if target.suffix not in writers:
        raise ValueError(f"{target}: must end in one of {', '.join(writers)}")
    return writers[target.suffix]


class _Checkpoint:
    """A DCP checkpoint, by the flat names that DCP gives to the values of a state dict.

    Args:
        key: leaves out all that is not under this key; None: nothing.

    Attributes:
        tensors: size and dtype of every tensor, by flat name.
        others: flat names of all other values.
    """

    def __init__(self, folder: Path, key: str | None) -> None:
        self._folder = folder
        try:
            self._metadata: Metadata = dcp.FileSystemReader(folder).read_metadata()
        except (OSError, RuntimeError) as error:
            raise ValueError(
                f"{folder}: is no checkpoint of torch.distributed.checkpoint: {error}"
            ) from error
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

    def short_name(self, name: str) -> str:
        """Return a flat name without the key."""
        return name.removeprefix(f"{self._key}.") if self._key else name

    def nested(self, flat: Mapping[str, object]) -> object:
        """Return the state dict that was saved, made from its values by flat name."""
        state = unflatten_state_dict(dict(flat), {name: self._paths[name] for name in flat})
        return state[self._key] if self._key else state

    def load_others(self) -> dict[str, object]:
        """Return all values that are no tensors, by flat name."""
        values: dict[str, object] = dict.fromkeys(self.others)
        if values:
            dcp.load(values, storage_reader=dcp.FileSystemReader(self._folder), no_dist=True)
        return values

    def load_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield flat name and tensor, in the order of ``tensors``, ``BATCH_BYTES`` at a time."""
        batch: dict[str, torch.Tensor] = {}
        for name, entry in self.tensors.items():
            batch[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
            if sum(tensor.nbytes for tensor in batch.values()) >= BATCH_BYTES:
                yield from self._loaded(batch)
                batch = {}
        yield from self._loaded(batch)

    def _loaded(self, batch: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        if batch:
            dcp.load(batch, storage_reader=dcp.FileSystemReader(self._folder), no_dist=True)
        yield from batch.items()


def _write_pt(checkpoint: _Checkpoint, path: Path) -> None:
    """Write with ``torch.save``, which does not read mapped tensors into memory."""
    flat = checkpoint.load_others()
    for number, (name, tensor) in enumerate(checkpoint.load_tensors()):
        flat[name] = _mapped(tensor, path.with_name(f"{number}.bin"))
    torch.save(checkpoint.nested(flat), path)


def _mapped(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    """Copy ``tensor`` to a new file, and return it mapped from there."""
    if not tensor.numel():
        return tensor
    mapped = torch.from_file(str(path), shared=True, size=tensor.numel(), dtype=tensor.dtype)
    return mapped.view(tensor.shape).copy_(tensor)


def _write_safetensors(checkpoint: _Checkpoint, path: Path) -> None:
    """Write the length of a JSON header, the header, and the bytes of all tensors."""
    if checkpoint.others:
        raise ValueError(
            f"a safetensors file holds tensors alone, and {checkpoint.others[0]!r} is none: choose "
            "a key (--key model), or write a .pt file"
        )
    text = json.dumps(_safetensors_header(checkpoint)).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in checkpoint.load_tensors():
            # numpy, which could lend its memory, need not be installed.
            file.write((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


def _safetensors_header(checkpoint: _Checkpoint) -> dict[str, object]:
    """Return dtype, shape and range of bytes of every tensor, by name."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, entry in checkpoint.tensors.items():
        dtype = entry.properties.dtype
        if dtype not in DTYPES:
            raise ValueError(f"{name!r} is {dtype}: a safetensors file has no such dtype")
        stop = start + math.prod(entry.size) * dtype.itemsize
        header[checkpoint.short_name(name)] = {
            "dtype": DTYPES[dtype],
            "shape": list(entry.size),
            "data_offsets": [start, stop],
        }
        start = stop
    return header


def _read(path: Path) -> dict[str, object]:
    """Return the state dict in a file, with its tensors mapped from there."""
    if path.suffix == ".safetensors":
        return dict(_read_safetensors(path))
    try:
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, OSError, EOFError) as error:
        raise ValueError(f"{path}: torch.load cannot read it: {error}") from error
    if not isinstance(state, dict):
        raise ValueError(f"{path}: holds a {type(state).__name__}, not a state dict")
    return state


def _read_safetensors(path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor, mapped from the file unless it is not aligned there."""
    data = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    begin = 8 + int(data[:8].view(torch.int64))
    dtypes = {name: dtype for dtype, name in DTYPES.items()}
    for name, entry in json.loads(bytes(data[8:begin].tolist())).items():
        if name != "__metadata__":
            start, stop = (begin + offset for offset in entry["data_offsets"])
            stored, dtype = data[start:stop], dtypes[entry["dtype"]]
            stored = stored if start % dtype.itemsize == 0 else stored.clone()
            yield name, stored.view(dtype).view(entry["shape"])


def _under(state: Mapping[str, object], key: str, source: Path) -> dict[str, object]:
    """Return the dict that ``state``, read from ``source``, has under ``key``."""
    inner = state.get(key)
    if not isinstance(inner, dict):
        raise ValueError(
            f"{source}: has no dict under {key!r}, but {', '.join(map(str, list(state)[:20]))}"
        )
    return inner


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``consolidate`` to those of ``python -m graphshard``."""
    text = (
        "write a checkpoint of torch.distributed.checkpoint as one file, or such a file as a "
        "checkpoint"
    )
    parser = commands.add_parser("consolidate", help=text, description=text)
    parser.add_argument("source", help="the folder of a checkpoint; or a file, to go back")
    parser.add_argument("target", help="a file, .pt or .safetensors; or a folder, to go back")
    parser.add_argument("--key", help="only what is under this key, such as model")
    parser.set_defaults(run=_run, parser=parser)


def _run(args: argparse.Namespace) -> int:
    try:
        consolidate(args.source, args.target, args.key)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return 0
