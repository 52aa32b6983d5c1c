"""``torch.save`` of shards: all ranks do it, or it is an error at once.

    torch.save(model.state_dict(), f"{rank}.pt")              each rank loads its own: allowed
    if rank == 0: torch.save(model.state_dict(), "all.pt")    has the rows of rank 0: an error

Every DTensor pickles its mesh, once for each file: so what is asked stands in the mesh, and covers
parameters, gradients, states of optimizers, and what was computed of them. It is asked only within
``torch.save`` and by the thread that trains: a pickle that is sent to another process, or a file
that a thread of its own writes, cannot wait for other ranks. torch.distributed.checkpoint pickles
no DTensor.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any, SupportsIndex

from torch.distributed.device_mesh import DeviceMesh

from .._torch.distributed import process_group
from .._torch.frames import is_in_torch_save
from ..consensus.call_log import call_log_of
from .eager_calls import agree_on_gathering
from .mesh_groups import MeshGroups

_ATTRIBUTE = "_graphshard_saved_together"
_REMEDY = (
    "a file has the rows of its rank alone. For one file write `state = "
    "graphshard.full_state_dict(model)` on all ranks, and torch.save(state, path) on the first"
)


class _SavedTogether:
    """An attribute of a mesh that is pickled with it, as an empty container that loads anywhere."""

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
        except RuntimeError:  # it was destroyed
            return False
        return call_log_of(group).can_agree()


def save_together(mesh: DeviceMesh) -> None:
    """Have ``torch.save`` of shards over ``mesh`` raise an error unless all ranks do it."""
    if not isinstance(mesh.__dict__.get(_ATTRIBUTE), _SavedTogether):
        mesh.__dict__[_ATTRIBUTE] = _SavedTogether(MeshGroups(mesh))
