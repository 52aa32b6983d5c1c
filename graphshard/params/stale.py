"""Classes of parameters that no longer hold values: operations on them raise an error."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

from torch import nn
from torch.distributed.tensor import DTensor

from .plain_params import WHY_REPLACED
from .sharded_param import ShardedParam

WHY_INTERRUPTED = (
    "an error or a signal has interrupted the sharding of this model, so some of its values are "
    "lost: build the model again, on all ranks"
)


class _Stale:
    __slots__ = ()
    why: ClassVar[str] = WHY_REPLACED

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError(cls.why)


class StaleParameter(_Stale, nn.Parameter):
    """Class of a parameter after its DTensor has replaced it: operations on it raise an error."""


class StaleDTensor(_Stale, DTensor):
    """Class of a tensor-parallel parameter after another DTensor replaced it: operations raise."""

    __slots__ = ()  # as in DTensor: ``__class__`` can only change between equal layouts


class InterruptedParameter(StaleParameter):
    """Class of a parameter whose sharding was interrupted: operations on it raise an error."""

    why = WHY_INTERRUPTED


class InterruptedDTensor(StaleDTensor):
    """Class of a DTensor parameter whose sharding was interrupted: operations on it raise."""

    __slots__ = ()
    why = WHY_INTERRUPTED


@contextlib.contextmanager
def unusable_if_interrupted(sharded_params: Mapping[nn.Parameter, ShardedParam]) -> Iterator[None]:
    """Make operations on these parameters and their DTensors raise if the context raises.

    Full values are freed one by one, so they are gone, and other ranks may be further along.
    """
    try:
        yield
    except BaseException:  # a KeyboardInterrupt, too: a notebook lives on
        for old, sharded_param in sharded_params.items():
            for param in (old, sharded_param.dtensor):
                unusable: Any = InterruptedParameter
                if isinstance(param, DTensor):
                    unusable = InterruptedDTensor
                param.__class__ = unusable
        raise
