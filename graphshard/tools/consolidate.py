"""``python -m graphshard consolidate``: a checkpoint of ``torch.distributed.checkpoint`` (DCP) as one file.

    consolidate DIR OUT.pt            torch.load(OUT.pt) is the state dict that was saved, unsharded
    consolidate DIR OUT.safetensors   tensors alone, by the names that DCP gave them
    consolidate FILE DIR              and back: a checkpoint that any number of ranks loads

Tensors are read a gigabyte at a time, whatever the size of the checkpoint, and go to a file beside the
target, which gets its name when it is whole. One process does it, without a process group.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from .._torch.nn import unflatten_state_dict

BATCH_BYTES = 1 << 30
# The names of https://github.com/huggingface/safetensors, of its format.
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


def consolidate(source: str | Path, target: str | Path, key: str = "") -> None:
    """Write the checkpoint ``source`` as the file ``target`` (.pt, .pth or .safetensors), or such a file as
    the checkpoint ``target``, a folder.

    Args:
        key: only what the state dict has under this key, such as "model".

    Raises:
        ValueError: what is given does not exist, exists already, or cannot hold what is in the other.
    """
    source, target = Path(source), Path(target)
    if target.exists():
        raise ValueError(f"{target}: exists already; remove it, or give another name")
    if source.is_dir():
        write = _writer(target)
        checkpoint = _Checkpoint(source, key)
        _whole(target, lambda scratch: write(checkpoint, scratch))
    elif source.is_file():
        state = _read(source)
        state = _under(state, key, source) if key else state
        _whole(target, lambda scratch: dcp.save(state, checkpoint_id=scratch, no_dist=True))
    else:
        raise ValueError(f"{source}: there is no such checkpoint or file")


def _writer(target: Path) -> Callable[[_Checkpoint, Path], None]:
    writers = {".pt": _write_pt, ".pth": _write_pt, ".safetensors": _write_safetensors}
    if target.suffix not in writers:
        raise ValueError(f"{target}: must end in one of {', '.join(writers)}")
    return writers[target.suffix]


def _whole(target: Path, write: Callable[[Path], object]) -> None:
    """Have ``write`` make a file or a folder that becomes ``target`` once it is complete."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        write(scratch := Path(folder) / target.name)
        os.rename(scratch, target)


class _Checkpoint:
    """What a folder holds, by the flat names that DCP gives it.

    Attributes:
        names: of tensors, as they are called in the file, with those in the checkpoint.
    """

    def __init__(self, folder: Path, key: str) -> None:
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
            name: of for name in chosen if isinstance(of := entries[name], TensorStorageMetadata)
        }
        self.others = [name for name in chosen if name not in self.tensors]

    def short(self, name: str) -> str:
        return name.removeprefix(f"{self._key}.") if self._key else name

    def nested(self, flat: Mapping[str, Any]) -> Any:
        """The state dict that was saved, of values by flat names."""
        whole = unflatten_state_dict(dict(flat), {name: self._paths[name] for name in flat})
        return whole[self._key] if self._key else whole

    def load_others(self) -> dict[str, Any]:
        values: dict[str, Any] = dict.fromkeys(self.others)
        if values:
            dcp.load(values, storage_reader=dcp.FileSystemReader(self._folder), no_dist=True)
        return values

    def load_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """One after the other, in the order of ``tensors``."""
        batch: dict[str, torch.Tensor] = {}
        for name, of in self.tensors.items():
            batch[name] = torch.empty(of.size, dtype=of.properties.dtype)
            if sum(tensor.nbytes for tensor in batch.values()) >= BATCH_BYTES:
                yield from self._loaded(batch)
                batch = {}
        yield from self._loaded(batch)

    def _loaded(self, batch: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        if batch:
            dcp.load(batch, storage_reader=dcp.FileSystemReader(self._folder), no_dist=True)
        yield from batch.items()


def _num_bytes(of: TensorStorageMetadata) -> int:
    return math.prod(of.size) * of.properties.dtype.itemsize


def _write_pt(checkpoint: _Checkpoint, path: Path) -> None:
    """``torch.save`` writes tensors that are mapped from a file without reading them into memory."""
    flat: dict[str, Any] = checkpoint.load_others()
    for number, (name, tensor) in enumerate(checkpoint.load_tensors()):
        flat[name] = _mapped(tensor, path.with_name(f"{number}.bin"))
    torch.save(checkpoint.nested(flat), path)


def _mapped(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    if not tensor.numel():
        return tensor
    mapped = torch.from_file(str(path), shared=True, size=tensor.numel(), dtype=tensor.dtype)
    return mapped.view(tensor.shape).copy_(tensor)


def _write_safetensors(checkpoint: _Checkpoint, path: Path) -> None:
    if checkpoint.others:
        raise ValueError(
            f"a safetensors file holds tensors alone, and {checkpoint.others[0]!r} is none: choose a key "
            "(--key model), or write a .pt file"
        )
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, of in checkpoint.tensors.items():
        if of.properties.dtype not in DTYPES:
            raise ValueError(
                f"{name!r} is {of.properties.dtype}: a safetensors file has no such dtype"
            )
        stop = start + _num_bytes(of)
        dtype = DTYPES[of.properties.dtype]
        entry = {"dtype": dtype, "shape": list(of.size), "data_offsets": [start, stop]}
        header[checkpoint.short(name)] = entry
        start = stop
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, tensor in checkpoint.load_tensors():
            # numpy, which could lend its memory, need not be installed.
            file.write((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


def _read(path: Path) -> Any:
    """A state dict whose tensors are mapped from a file."""
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
    data = torch.from_file(str(path), shared=False, size=path.stat().st_size, dtype=torch.uint8)
    begin = 8 + int(data[:8].view(torch.int64))
    names = {name: dtype for dtype, name in DTYPES.items()}
    for name, of in json.loads(bytes(data[8:begin].tolist())).items():
        if name != "__metadata__":
            start, stop = (begin + offset for offset in of["data_offsets"])
            part, dtype = data[start:stop], names[of["dtype"]]
            part = part if start % dtype.itemsize == 0 else part.clone()
            yield name, part.view(dtype).view(of["shape"])


def _under(state: Any, key: str, source: Path) -> Any:
    if not isinstance(state.get(key), dict):
        raise ValueError(
            f"{source}: has no dict under {key!r}, but {', '.join(map(str, list(state)[:20]))}"
        )
    return state[key]


def add_parser(commands: Any) -> None:
    """Add the command to those of ``python -m graphshard``."""
    text = "write a checkpoint of torch.distributed.checkpoint as one file, or such a file as a checkpoint"
    parser = commands.add_parser("consolidate", help=text, description=text)
    parser.add_argument("source", help="the folder of a checkpoint; or a file, to go back")
    parser.add_argument("target", help="a file, .pt or .safetensors; or a folder, to go back")
    parser.add_argument("--key", default="", help="only what is under this key, such as model")
    parser.set_defaults(run=_run, parser=parser)


def _run(args: argparse.Namespace) -> int:
    try:
        consolidate(args.source, args.target, args.key)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return 0
