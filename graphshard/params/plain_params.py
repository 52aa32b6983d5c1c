"""The parameters of a model before they are sharded, and the modules that hold them."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Set
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .._torch.nn import ddp_parameters, parameters_if_initialized, parameters_of
from .param_spec import ParamSpec
from .sharded_param import sharded_param_of

_T = TypeVar("_T")

# Attribute of a module: names of its ignored parameters, because ``to_empty``,
# ``load_state_dict(assign=True)`` and copies create parameters that ``ignored_params`` lacks.
_IGNORED = "_graphshard_ignored"

# Attribute of a parameter that a shard has replaced while a forward was using it.
REPLACED = "_graphshard_replaced"
WHY_REPLACED = (
    "graphshard has replaced this parameter with a DTensor: call model.parameters() again after "
    "sharding, or, if gc.freeze() has hidden its optimizer or module, gc.unfreeze() before the "
    "first step"
)


class Holder(NamedTuple):
    """A module that holds a parameter, and the parameter's name in it."""

    module: nn.Module
    name: str


@dataclass(eq=False)
class PlainParam:
    """A parameter to be sharded.

    Attributes:
        fqns: names in the model; more than one if the parameter is tied.
        holders: modules that hold the parameter, including those outside the model.
        in_ddp: whether a live ``DistributedDataParallel`` reduces its gradient.
        spec: how to shard the parameter; set by ``find_error``.
    """

    param: nn.Parameter
    fqns: list[str] = field(default_factory=list)
    holders: list[Holder] = field(default_factory=list)
    in_ddp: bool = False
    spec: ParamSpec = field(init=False)

    @property
    def fqn(self) -> str:
        return self.fqns[0]


def note_ignored(root: nn.Module, ignored: Set[nn.Parameter]) -> None:
    """Record the names of ignored parameters on their modules, and therefore on copies."""
    for module in root.modules():
        names = {name for name, param in parameters_of(module).items() if param in ignored}
        if names:
            vars(module)[_IGNORED] = names | vars(module).get(_IGNORED, set())


def noted_ignored(root: nn.Module) -> set[nn.Parameter]:
    """Return the parameters of ``root`` whose names :func:`note_ignored` recorded."""
    return {
        param
        for module in root.modules()
        if (names := vars(module).get(_IGNORED))
        # Not ``get(name)``: TorchScript modules only provide items.
        for name, param in parameters_of(module).items()
        if name in names and param is not None
    }


def find_plain_params(root: nn.Module, ignored: Set[nn.Parameter]) -> list[PlainParam]:
    """Return the unique parameters of ``root`` that are neither ignored nor already sharded."""
    plain_params: dict[nn.Parameter, PlainParam] = {}
    for prefix, module in root.named_modules():
        for name, param in parameters_of(module).items():
            if param is None or param in ignored or sharded_param_of(param) is not None:
                continue
            plain = plain_params.setdefault(param, PlainParam(param))
            plain.fqns.append(f"{prefix}.{name}" if prefix else name)
            plain.holders.append(Holder(module, name))
    inside = set(root.modules())
    for module in instances_of(nn.Module):
        if module in inside:
            continue
        for name, param in parameters_if_initialized(module).items():
            if param in plain_params:  # tied to a module outside the model, such as a loss
                plain_params[param].holders.append(Holder(module, name))
        if isinstance(module, DistributedDataParallel):
            for param in plain_params.keys() & ddp_parameters(module):
                plain_params[param].in_ddp = True
    return list(plain_params.values())


def live_optimizers() -> Iterator[torch.optim.Optimizer]:
    """Yield all live optimizers, except those whose ``__init__`` raised."""
    # A traceback may keep these alive, without param groups or state.
    return (o for o in instances_of(torch.optim.Optimizer) if hasattr(o, "param_groups"))


def instances_of(kind: type[_T]) -> Iterator[_T]:
    """Yield all live instances of ``kind`` and its subclasses, except those that are frozen.

    ``gc.freeze()`` hides objects from ``gc.get_objects()``.
    """
    # Filter types, not objects: there are few types, and isinstance may run a proxy's code.
    objects = gc.get_objects()
    kinds = {cls for cls in set(map(type, objects)) if issubclass(cls, kind)}
    return (o for o in objects if type(o) in kinds)


def find_reduced_by_ddp() -> set[nn.Parameter]:
    """Return the parameters whose gradients a live ``DistributedDataParallel`` reduces."""
    return {param for ddp in instances_of(DistributedDataParallel) for param in ddp_parameters(ddp)}
