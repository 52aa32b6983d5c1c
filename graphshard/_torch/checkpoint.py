"""The metadata of a checkpoint: classes that its pickle may name, and where it has its values.

Read in torch/distributed/checkpoint/metadata.py and filesystem.py.
"""

from __future__ import annotations

import dataclasses
import pickle
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.filesystem import _StorageInfo as StorageInfo

__all__ = ["StorageInfo", "read_metadata"]

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
"""Names by module; none of them does more than to build a value."""


def _set_attributes(unpickler: Any) -> None:
    """Set attributes of an object, which has to be one that the pickle has made.

    Those that it names, such as a class, a function or a member of an enum, are torch's.

    Raises:
        UnpicklingError: it is one of those.
    """
    made = unpickler.stack[-2]
    if isinstance(made, type) or not dataclasses.is_dataclass(made):
        raise pickle.UnpicklingError(f"changes {made!r}, which no metadata does")
    pickle._Unpickler.dispatch[pickle.BUILD[0]](unpickler)


class _Unpickler(pickle._Unpickler):
    """Builds what a checkpoint's metadata consists of, and nothing else.

    The one that is written in Python: the other lets nobody look at what is about to be changed.
    """

    dispatch: ClassVar = pickle._Unpickler.dispatch | {pickle.BUILD[0]: _set_attributes}

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        if module.split(".")[0] == "pathlib":  # where it was saved
            return PurePosixPath
        if name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(
            f"names {module}.{name}, which no metadata of torch.distributed.checkpoint has"
        )


def read_metadata(path: Path) -> Any:
    """Return what is pickled in ``path``, a ``Metadata`` if it is no other file.

    Raises:
        Exception: of any kind; the file is damaged, or names something that is none of metadata.
    """
    with path.open("rb") as file:
        return _Unpickler(file).load()
