"""Command ``python -m graphshard consolidate``: convert a checkpoint to one file, or back.

A checkpoint is a folder that ``torch.distributed.checkpoint`` (DCP) wrote.

    consolidate DIR OUT.pt            torch.load(OUT.pt) is the saved state dict, unsharded
    consolidate DIR OUT.safetensors   tensors only, under DCP's flat names, without the key
    consolidate FILE DIR              a checkpoint that any number of ranks can load

The conversion runs in one process, without a process group. Output goes to a scratch path that is
renamed once complete. No code from a checkpoint is run; errors for damaged files name the file.
Empty containers are not kept, because DCP does not save them.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, TensorSpec, safe_open, serialize_file
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from ..files import whole
from .checkpoint import Checkpoint, reading, require, without_prefix


def consolidate(
    source: str | Path,
    target: str | Path,
    key: str | None = None,
    *,
    strip_prefix: str | None = None,
) -> None:
    """Convert the checkpoint ``source`` to the file ``target``, or a file to a checkpoint.

    Args:
        source: folder of a checkpoint, or a .pt, .pth or .safetensors file.
        target: file with one of these suffixes, or a folder.
        key: top-level key of the state dict to convert, such as "model" (default: all keys).
        strip_prefix: prefix to remove from the names that have it, such as "model.".

    Raises:
        ValueError: ``source`` does not exist, is damaged or lacks ``key``; ``target`` exists, has
            an unsupported suffix, cannot hold the content or cannot be written; its disk has not
            enough space; no name has the prefix, or removing it makes two names equal.
    """
    source, target = Path(source), Path(target)
    if target.exists():
        raise ValueError(f"{target}: already exists; remove it, or choose another name")
    if source.is_dir():
        if target.suffix not in _WRITERS:
            raise ValueError(f"{target}: must end in one of {', '.join(_WRITERS)}")
        checkpoint = Checkpoint(source, key, strip_prefix)
        needed = 2 * _num_bytes(checkpoint.tensors)  # in scratch files, and in the target
        with _new(target, source, needed) as scratch:
            _WRITERS[target.suffix](checkpoint, scratch)
    elif source.is_file():
        if target.suffix in _WRITERS:
            raise ValueError(
                f"{target}: {source} is a file, so it is converted to a checkpoint, which is a "
                f"folder: choose a name without {target.suffix}"
            )
        state = _read(source)
        state = _under(state, key, source) if key else state
        new_names = without_prefix(state, strip_prefix, source)
        state = {new_names[name]: value for name, value in state.items()}
        with reading(source):  # an untrusted state dict may contain itself
            needed = _num_bytes(state)
        # ``dcp.save`` reads the mapped tensors.
        with _new(target, source, needed) as scratch:
            with reading(source):
                failure = _save(state, scratch)
            if failure is not None:
                raise failure
    else:
        raise ValueError(
            f"{source}: does not exist; pass the folder of a checkpoint, or a .pt, .pth or "
            ".safetensors file"
        )


@contextlib.contextmanager
def _new(target: Path, source: Path, needed: int) -> Iterator[Path]:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Writing to a mapped file on a full disk would end the process.
        free = shutil.disk_usage(target.parent).free
        require(
            needed <= free,
            f"{target}: writing the tensors of {source} takes {needed / 1e9:.1f} GB of disk space, "
            f"but {free / 1e9:.1f} GB are free: make room, or choose another disk",
        )
        with whole(target) as scratch:
            yield scratch
    except (OSError, RuntimeError, SafetensorError) as error:  # torch raises a RuntimeError
        reason = f"{type(error).__name__}: {error}".splitlines()[0]
        advice = ": choose a writable folder on a disk with room"
        raise ValueError(
            f"{target}: cannot be written from {source}: {reason}"
            f"{advice if isinstance(error, OSError) else ''}"
        ) from error


def _save(state: Mapping[str, object], folder: Path) -> OSError | None:
    """Write a checkpoint; return the error if ``folder`` cannot be written."""
    try:
        dcp.save(dict(state), checkpoint_id=folder, no_dist=True)
    except dcp.CheckpointException as error:
        failure = next(failure for failure, _ in error.failures.values())
        if isinstance(failure, OSError):
            return failure
        raise failure from error
    return None


def _num_bytes(value: object) -> int:
    """Return the size of all tensors in a checkpoint, or in a nested state dict."""
    if isinstance(value, TensorStorageMetadata):
        return math.prod(value.size) * value.properties.dtype.itemsize
    if isinstance(value, Mapping):
        return sum(map(_num_bytes, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(_num_bytes, value))
    return value.nbytes if isinstance(value, torch.Tensor) else 0


def _write_pt(checkpoint: Checkpoint, path: Path) -> None:
    flat = checkpoint.load_others() | dict(_mapped_tensors(checkpoint, path))
    torch.save(checkpoint.nested(flat), path)


def _write_safetensors(checkpoint: Checkpoint, path: Path) -> None:
    if checkpoint.others:
        raise ValueError(
            f"{checkpoint.others[0]!r} is not a tensor, and a safetensors file holds only tensors: "
            "choose a key (--key model), or write a .pt file"
        )
    tensors: dict[str, torch.Tensor] = {}
    specs: dict[str, TensorSpec] = {}
    for name, tensor in _mapped_tensors(checkpoint, path):
        short, dtype = checkpoint.short_name(name), str(tensor.dtype).removeprefix("torch.")
        require(
            short != "__metadata__", f"{name!r}: safetensors reserves this name; write a .pt file"
        )
        require(
            short not in specs,
            f"{name!r}: another tensor is also called {short!r} in a flat file; write a .pt file",
        )
        tensors[short] = tensor  # keeps alive the memory to which the spec points
        # safetensors.torch.save_file would require numpy.
        pointer, num_bytes = tensor.data_ptr(), tensor.nbytes
        try:
            specs[short] = TensorSpec(
                dtype=dtype, shape=tensor.shape, data_ptr=pointer, data_len=num_bytes
            )
        except SafetensorError as error:
            raise ValueError(
                f"{name!r} is {tensor.dtype}, which safetensors cannot store: write a .pt file "
                f"({error})"
            ) from error
    serialize_file(specs, path, {"format": "pt"})


_WRITERS = {".pt": _write_pt, ".pth": _write_pt, ".safetensors": _write_safetensors}


def _mapped_tensors(checkpoint: Checkpoint, path: Path) -> Iterator[tuple[str, torch.Tensor]]:
    # Map scratch files next to ``path``, so that writers need not hold all tensors in memory.
    for number, (name, tensor) in enumerate(checkpoint.load_tensors()):
        if tensor.numel():
            file = str(path.with_name(f"{number}.bin"))
            mapped = torch.from_file(file, shared=True, size=tensor.numel(), dtype=tensor.dtype)
            tensor = mapped.view(tensor.shape).copy_(tensor)
        yield name, tensor


def _read(path: Path) -> dict[str, object]:
    with reading(path):
        if path.suffix == ".safetensors":
            with safe_open(path, "pt", "cpu") as file:
                return {name: _aligned(file.get_tensor(name)) for name in file.offset_keys()}
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        if not isinstance(state, dict):
            raise ValueError(
                f"{path}: holds a {type(state).__name__}, not a state dict: save a dictionary"
            )
        return state


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    # A file may store a tensor at an unaligned offset.
    return tensor.clone() if tensor.data_ptr() % tensor.itemsize else tensor


def _under(state: Mapping[str, object], key: str, source: Path) -> dict[str, object]:
    if key not in state:
        keys = ", ".join(map(str, list(state)[:20]))
        raise ValueError(f"{source}: no key {key!r}; keys include {keys}")
    inner = state[key]
    if not isinstance(inner, dict):
        raise ValueError(
            f"{source}: {key!r} is a {type(inner).__name__}, not a dictionary: choose another key, "
            "or none"
        )
    return inner


def convert(args: argparse.Namespace) -> int:
    """Run the command ``consolidate`` and return its exit status."""
    try:
        consolidate(args.source, args.target, args.key, strip_prefix=args.strip_prefix)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return 0
