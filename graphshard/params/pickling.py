"""Raise an error where a pickle of shards would silently lose data.

Parameters and modules can be copied but not pickled: a pickled shard would hold only its rank's
rows, and the process that loads it has neither the mesh nor the sharded model.

State dicts can be saved if all ranks save theirs:

    torch.save(model.state_dict(), f"{rank}.pt")              each rank loads its own: allowed
    if rank == 0: torch.save(model.state_dict(), "all.pt")    has the rows of rank 0: an error

Every DTensor pickles its mesh, once per file. The check is therefore an attribute of the mesh, and
covers parameters, gradients, optimizer state, and tensors computed from them.
torch.distributed.checkpoint does not pickle DTensors.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NoReturn, SupportsIndex

from torch.distributed.device_mesh import DeviceMesh

from .._torch.distributed import process_group
from .._torch.frames import is_in_torch_save
from ..errors import BackendError
from ..ranks.call_log import call_log_of
from .mesh import MeshGroups, agree_on_gathering

# Result of ``__reduce_ex__``: a function, its arguments, and state.
Reduced = tuple[Any, ...]


def refuse_pickling(what: str) -> NoReturn:
    """Raise a BackendError that says how to save ``what`` instead."""
    raise BackendError(
        f"{what} is sharded by graphshard and cannot be pickled: save "
        "graphshard.full_state_dict(model), or model.state_dict() and optimizer.state_dict() with "
        "torch.distributed.checkpoint. To get the model in another process, build and load it there"
    )


# copy and pickle both call __reduce_ex__. The result contains a _Recipe, so only pickle fails.
class _Recipe:
    """Recipe for rebuilding an object; the recipe can be copied but not pickled."""

    def __init__(self, what: str, make: Callable[[], object]) -> None:
        self.what, self.make = what, make

    def __deepcopy__(self, memo: dict[int, Any]) -> _Recipe:
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_pickling(self.what)


def _make(recipe: _Recipe) -> object:
    return recipe.make()


def copyable_only(what: str, reduced: Reduced) -> Reduced:
    """Wrap the result of ``__reduce_ex__``: ``copy`` works as before, and ``pickle`` raises."""
    make, arguments, *rest = reduced
    return (_make, (_Recipe(what, lambda: make(*arguments)),), *rest)


_ATTRIBUTE = "_graphshard_saved_together"
_REMEDY = (
    "each file has only the rows of its rank. For a single file, call `state = "
    "graphshard.full_state_dict(model)` on all ranks, and torch.save(state, path) on the first"
)


class _SavedTogether:
    """Mesh attribute that raises if only some ranks pickle it with ``torch.save``."""

    def __init__(self, groups: MeshGroups) -> None:
        self._groups = groups

    def __deepcopy__(self, memo: dict[int, Any]) -> _SavedTogether:
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[type, tuple[()]]:
        # Only in torch.save on the training thread: a pickle for another process, or a file that
        # another thread writes, cannot wait for other ranks.
        if is_in_torch_save() and self._can_agree():
            agree_on_gathering(self._groups, "torch.save", "shards", _REMEDY)
        return OrderedDict, ()  # loads without graphshard

    def _can_agree(self) -> bool:
        try:
            group = process_group(self._groups.all_ranks)
        except RuntimeError:  # the group was destroyed
            return False
        return call_log_of(group).can_agree()


def require_collective_save(groups: MeshGroups) -> None:
    """Make ``torch.save`` of shards over a mesh raise unless all ranks call it."""
    for mesh in (groups.mesh, groups.whole_mesh):
        if not isinstance(mesh.__dict__.get(_ATTRIBUTE), _SavedTogether):
            mesh.__dict__[_ATTRIBUTE] = _SavedTogether(groups)


def has_shards(mesh: DeviceMesh) -> bool:
    """Return whether a model is sharded over ``mesh``."""
    return _ATTRIBUTE in vars(mesh)
