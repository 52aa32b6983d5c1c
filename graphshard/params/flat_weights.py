"""``_flat_weights`` of a sharded RNN: its weights, as read from attributes of the module.

Forward of a plain RNN uses whatever is in this list. Here, it cannot be changed: a write raises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from .._torch.nn import FLAT_WEIGHTS, flat_weight_names, parameters_of
from ..errors import BackendError

_Weights = Sequence[torch.Tensor | None]


def read_only_flat_weights(cls: type[nn.RNNBase]) -> dict[str, object]:
    """Return members for a subclass of ``cls`` whose ``_flat_weights`` cannot be changed."""
    if cls.__setattr__ is not nn.RNNBase.__setattr__:
        # It may call ``RNNBase.__setattr__``, which writes to the list: here, to a copy.
        return {FLAT_WEIGHTS: property(_weights, _check)}
    return {FLAT_WEIGHTS: property(_read, _check), "__setattr__": _set_attribute}


def _weights(module: nn.RNNBase) -> list[torch.Tensor | None]:
    return [getattr(module, name, None) for name in flat_weight_names(module)]


def _read(module: nn.RNNBase) -> _Weights:
    weights = _weights(module)
    # Dynamo only knows plain tuples. If code writes to one, Python runs it instead, and raises.
    return tuple(weights) if is_compiling() else _ReadOnly(weights)


def _check(module: nn.RNNBase, weights: _Weights) -> None:
    own = {**vars(module), **parameters_of(module)}
    for name, weight in zip(flat_weight_names(module), weights):
        # Not parametrized weights, which reading would compute again.
        if name in own and weight is not own[name] and weight is not getattr(module, name):
            raise BackendError(_ERROR.format(name))


def _set_attribute(module: nn.RNNBase, name: str, value: Any) -> None:
    super(nn.RNNBase, module).__setattr__(name, value)  # without a write to ``_flat_weights``


class _ReadOnly(tuple[Any, ...]):
    __slots__ = ()

    def __setitem__(self, index: object, value: object) -> None:
        raise BackendError(_ERROR.format(index))


_ERROR = (
    "_flat_weights of a sharded RNN is read-only, but code changes its item {!r}: register the "
    "parameter under a different name, and assign the tensor computed from it to the attribute "
    "of the RNN, as in rnn.weight_hh_l0 = mask * self.weight_hh_raw"
)
