"""Allow copies of sharded parameters and modules, but make pickling raise with advice.

A pickled shard would hold only its rank's rows, and the process that loads it has neither the mesh
nor the sharded model. ``copy`` and ``pickle`` both call ``__reduce_ex__``. To fail only for
``pickle``, the reduced module contains a ``_Recipe``, which can be copied but not pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, SupportsIndex

import torch

from ..errors import BackendError

Reduced = tuple[Any, ...]
"""Result of ``__reduce_ex__``: a function, its arguments, and state."""


def refuse_pickling(what: str) -> NoReturn:
    """Raise the BackendError for pickling ``what``."""
    raise BackendError(
        f"{what} is sharded by graphshard and cannot be pickled: save "
        "graphshard.full_state_dict(model), or model.state_dict() and optimizer.state_dict() by "
        "torch.distributed.checkpoint; a process that needs the model builds it and loads these"
    )


class _Recipe:
    """Recipe for rebuilding an object, which can be copied but not pickled.

    Args:
        what: name of the object, for the error.
        make: function that makes the object, without its state.
        gradients: gradients of its parameters.
    """

    def __init__(
        self, what: str, make: Callable[[], object], gradients: Sequence[torch.Tensor]
    ) -> None:
        self.what, self.make, self.gradients = what, make, gradients

    def __deepcopy__(self, memo: dict[int, Any]) -> _Recipe:
        # Copy gradients before deepcopy reaches the state: ``Tensor.__deepcopy__`` fails on a
        # DTensor whose local tensor is only part of a storage, such as a gradient that is a slice
        # of a reduction buffer.
        for grad in self.gradients:
            memo.setdefault(id(grad), grad.detach().clone())
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_pickling(self.what)


def _make(recipe: _Recipe) -> object:
    return recipe.make()


def copyable_only(what: str, reduced: Reduced, gradients: Sequence[torch.Tensor]) -> Reduced:
    """Wrap ``reduced`` so that ``copy`` works as before, and ``pickle`` raises.

    Args:
        what: name of the object, for the error.
        reduced: result of the object's ``__reduce_ex__``.
        gradients: gradients of the object's parameters.
    """
    make, arguments, *rest = reduced
    return (_make, (_Recipe(what, lambda: make(*arguments), gradients),), *rest)
