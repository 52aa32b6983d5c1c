"""Sharded parameters and their modules are copied, but not pickled: a sentence says what to do.

A pickled shard would know its rank's rows alone, and neither mesh nor sharded model in the process
that reads it. ``copy`` and ``pickle`` take an object apart by the same method, ``__reduce_ex__``.
So that only the second fails, what a module is made of is in an object that may be copied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, SupportsIndex

import torch

from ..errors import BackendError

Reduced = tuple[Any, ...]
"""What ``__reduce_ex__`` returns: a function, its arguments, and state."""


def refuse(what: str) -> NoReturn:
    """
    Raises:
        BackendError: always.
    """
    raise BackendError(
        f"{what} is sharded by graphshard and cannot be pickled: save "
        "graphshard.full_state_dict(model), or model.state_dict() and optimizer.state_dict() by "
        "torch.distributed.checkpoint; a process that needs the model builds it and loads these"
    )


class _Recipe:
    """How to make an object; it is copied as it is.

    Args:
        what: names the object, for the error.
        make: makes it, without its state.
        gradients: of its parameters. ``Tensor.__deepcopy__`` fails on a DTensor whose local tensor
            is a part of a storage, as gradients are, of a buffer that several were reduced in.
    """

    def __init__(
        self, what: str, make: Callable[[], object], gradients: Sequence[torch.Tensor]
    ) -> None:
        self.what, self.make, self.gradients = what, make, gradients

    def __deepcopy__(self, memo: dict[int, Any]) -> _Recipe:
        for grad in self.gradients:
            memo.setdefault(id(grad), grad.detach().clone())  # copied before the state
        return self

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse(self.what)


def _make(recipe: _Recipe) -> object:
    return recipe.make()


def for_copies_alone(what: str, reduced: Reduced, gradients: Sequence[torch.Tensor]) -> Reduced:
    """Return ``reduced`` so that ``copy`` makes the same of it, and ``pickle`` an error.

    Args:
        what: names the object, for the error.
        gradients: of the object's parameters.
    """
    make, arguments, *rest = reduced
    return (_make, (_Recipe(what, lambda: make(*arguments), gradients),), *rest)
