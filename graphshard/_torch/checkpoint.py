"""Checkpoint metadata: safe unpickling, and the location of each value.

Relies on torch/distributed/checkpoint/metadata.py, filesystem.py and default_planner.py.
"""

from __future__ import annotations

import dataclasses
import enum
import pickle
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.default_planner import _check_box_bounds as is_within
from torch.distributed.checkpoint.default_planner import _check_box_overlap as overlap
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

__all__ = ["StorageInfo", "is_within", "overlap", "read_metadata"]

# Names that the pickle may contain, keyed by module, in addition to dtypes, paths and members of
# enums. Calling any of them only builds a value.
_CLASSES: dict[str, tuple[str, ...]] = {
    metadata.__name__: (
        "Metadata",
        "MetadataIndex",
        "TensorStorageMetadata",
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "TensorProperties",
        "StorageMeta",
        "_MEM_FORMAT_ENCODING",
    ),
    filesystem.__name__: ("_StorageInfo", "_StoragePrefix"),
    "torch": ("Size",),
    "torch.serialization": ("_get_layout",),
    "collections": ("OrderedDict",),
}


_NEVER_DOES = (
    "which metadata of torch.distributed.checkpoint never does: pass a checkpoint that "
    "torch.distributed.checkpoint.save wrote"
)


def _enum_member(owner: Any, name: str) -> Any:
    """Replace ``getattr``, with which some Python versions (such as 3.11.2) pickle enum members."""
    if not (isinstance(owner, type) and issubclass(owner, enum.Enum) and name in owner.__members__):
        raise pickle.UnpicklingError(
            f"the .metadata file refers to {name!r} of {owner!r}, {_NEVER_DOES}"
        )
    return owner[name]


def _set_attributes(unpickler: Any) -> None:
    """Run the BUILD opcode, which sets attributes, but only on dataclass instances."""
    # The pickle itself has built these. Classes, functions and enum members belong to torch, and
    # must not change.
    made = unpickler.stack[-2]
    if isinstance(made, type) or not dataclasses.is_dataclass(made):
        raise pickle.UnpicklingError(f"the .metadata file modifies {made!r}, {_NEVER_DOES}")
    pickle._Unpickler.dispatch[pickle.BUILD[0]](unpickler)


class _Unpickler(pickle._Unpickler):
    """Unpickler that refuses everything but checkpoint metadata."""

    # Derived from the Python implementation: the C implementation hides BUILD's object.
    dispatch: ClassVar = pickle._Unpickler.dispatch | {pickle.BUILD[0]: _set_attributes}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if (module, name) == ("builtins", "getattr"):
            return _enum_member
        if module.split(".")[0] == "pathlib":  # the path that the checkpoint was saved to
            return PurePosixPath
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"the .metadata file refers to {module}.{name}, {_NEVER_DOES}")


def read_metadata(path: Path) -> Any:
    """Unpickle a checkpoint's metadata file, and return its content, usually a ``Metadata``.

    Raises:
        Exception: of any type; the file is missing, damaged, or not checkpoint metadata.
    """
    with path.open("rb") as file:
        return _Unpickler(file).load()
