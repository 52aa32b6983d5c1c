"""The command ``python -m graphshard consolidate``: convert a checkpoint to one file, or back.

A checkpoint is a folder that ``torch.distributed.checkpoint`` (DCP) wrote.

    consolidate DIR OUT.pt            torch.load(OUT.pt) is the saved state dict, unsharded
    consolidate DIR OUT.safetensors   tensors only, under the names that DCP gave them
    consolidate FILE DIR              a checkpoint that any number of ranks can load

Tensors are read one gigabyte at a time, whatever the size of the checkpoint. They are written to a
scratch file next to the target, which is renamed once it is complete. One process does it all,
without a process group. No code contained in a file is run; a damaged file raises an error that
names it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from ..files import whole
from .checkpoint import Checkpoint, reading, without_prefix
from .safetensors import SafetensorsFile, write_safetensors


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
        key: write only what the state dict holds under this key, such as "model"; None: everything.
        strip_prefix: prefix to remove from the names that have it, such as "model.".

    Raises:
        ValueError: ``source`` does not exist, ``target`` exists or cannot hold the content, no name
            has the prefix, or two names are equal without it.
    """
    source, target = Path(source), Path(target)
    if target.exists():
        raise ValueError(f"{target}: exists already; remove it, or give another name")
    if source.is_dir():
        write = _writer(target)
        checkpoint = Checkpoint(source, key, strip_prefix)
        with _new(target) as scratch:
            write(checkpoint, scratch)
    elif source.is_file():
        state = _read(source)
        state = _under(state, key, source) if key else state
        new_names = without_prefix(state, strip_prefix, source)
        state = {new_names[name]: value for name, value in state.items()}
        with _new(target) as scratch, reading(source):  # saving reads the mapped tensors
            dcp.save(state, checkpoint_id=scratch, no_dist=True)
    else:
        raise ValueError(f"{source}: there is no such checkpoint or file")


def _new(target: Path) -> AbstractContextManager[Path]:
    """Create the parent folder of ``target`` and return the scratch path of :func:`whole`."""
    target.parent.mkdir(parents=True, exist_ok=True)
    return whole(target)


def _writer(target: Path) -> Callable[[Checkpoint, Path], None]:
    """Return the function that writes files with the suffix of ``target``."""
    writers = {".pt": _write_pt, ".pth": _write_pt, ".safetensors": write_safetensors}
    if target.suffix not in writers:
        raise ValueError(f"{target}: must end in one of {', '.join(writers)}")
    return writers[target.suffix]


def _write_pt(checkpoint: Checkpoint, path: Path) -> None:
    """Write with ``torch.save``, which does not load mapped tensors into memory."""
    flat = checkpoint.load_others()
    for number, (name, tensor) in enumerate(checkpoint.load_tensors()):
        flat[name] = _mapped(tensor, path.with_name(f"{number}.bin"))
    torch.save(checkpoint.nested(flat), path)


def _mapped(tensor: torch.Tensor, path: Path) -> torch.Tensor:
    """Copy ``tensor`` to a new file and return it memory-mapped."""
    if not tensor.numel():
        return tensor
    mapped = torch.from_file(str(path), shared=True, size=tensor.numel(), dtype=tensor.dtype)
    return mapped.view(tensor.shape).copy_(tensor)


def _read(path: Path) -> dict[str, object]:
    """Return the state dict in a file, with memory-mapped tensors.

    Raises:
        ValueError: the file is damaged or holds something else.
    """
    with reading(path):
        if path.suffix == ".safetensors":
            return dict(SafetensorsFile(path).mapped())
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        if not isinstance(state, dict):
            raise ValueError(f"{path}: holds a {type(state).__name__}, not a state dict")
        return state


def _under(state: Mapping[str, object], key: str, source: Path) -> dict[str, object]:
    """Return the dictionary under ``key`` in ``state``, which was read from ``source``."""
    inner = state.get(key)
    if not isinstance(inner, dict):
        raise ValueError(
            f"{source}: has no dict under {key!r}, but {', '.join(map(str, list(state)[:20]))}"
        )
    return inner


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the ``consolidate`` command to ``python -m graphshard``."""
    text = (
        "write a checkpoint of torch.distributed.checkpoint as one file, or such a file as a "
        "checkpoint"
    )
    parser = commands.add_parser("consolidate", help=text, description=text)
    parser.add_argument("source", help="the folder of a checkpoint; or a file, to go back")
    parser.add_argument("target", help="a file, .pt or .safetensors; or a folder, to go back")
    parser.add_argument("--key", help="only what is under this key, such as model")
    parser.add_argument(
        "--strip-prefix",
        metavar="PREFIX",
        help="remove this prefix from the names that have it: model. of a LightningModule's model",
    )
    parser.set_defaults(run=_run, parser=parser)


def _run(args: argparse.Namespace) -> int:
    try:
        consolidate(args.source, args.target, args.key, strip_prefix=args.strip_prefix)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return 0
