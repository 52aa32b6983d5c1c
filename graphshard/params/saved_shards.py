"""Make ``torch.save`` of shards raise at once unless all ranks call it.

    torch.save(model.state_dict(), f"{rank}.pt")              each rank loads its own: allowed
    if rank == 0: torch.save(model.state_dict(), "all.pt")    has the rows of rank 0: an error

Every DTensor pickles its mesh, once per file. The check is therefore an attribute of the mesh, and
covers parameters, gradients, optimizer state, and tensors computed from them. It runs only within
``torch.save`` on the training thread: a pickle for another process, or a file written by a separate
thread, cannot wait for other ranks. torch.distributed.checkpoint does not pickle DTensors.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, SupportsIndex

from torch.distributed.device_mesh import DeviceMesh

from .._torch.distributed import process_group
from .._torch.frames import is_in_torch_save
from ..ranks.call_log import call_log_of
from .mesh import MeshGroups, agree_on_gathering

_ATTRIBUTE = "_graphshard_saved_together"
_REMEDY = (
    "a file has the rows of its rank alone. For one file write `state = "
    "graphshard.full_state_dict(model)` on all ranks, and torch.save(state, path) on the first"
)


class _SavedTogether:
    """Mesh attribute that raises, when ``torch.save`` pickles it, unless all ranks do so.

    It is pickled as an empty ``OrderedDict``, which loads anywhere.
    """

    def __init__(self, groups: MeshGroups) -> None:
        self._groups = groups

    def __deepcopy__(self, memo: dict[int, Any]) -> _SavedTogether:
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type, tuple[()]]:
        if is_in_torch_save() and self._can_agree():
            agree_on_gathering(self._groups, "torch.save", "shards", _REMEDY)
        return OrderedDict, ()

    def _can_agree(self) -> bool:
        try:
            group = process_group(self._groups.all_ranks)
        except RuntimeError:  # the group was destroyed
            return False
        return call_log_of(group).can_agree()


def require_collective_save(mesh: DeviceMesh) -> None:
    """Make ``torch.save`` of shards over ``mesh`` raise unless all ranks call it."""
    if not isinstance(mesh.__dict__.get(_ATTRIBUTE), _SavedTogether):
        mesh.__dict__[_ATTRIBUTE] = _SavedTogether(MeshGroups(mesh))
