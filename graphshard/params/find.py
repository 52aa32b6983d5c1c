"""Find the parameters of a model that are to be sharded, and all modules that hold them."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from .._torch.instances import live_instances
from .._torch.nn import ddp_parameters, parameters_if_initialised, parameters_of
from ..options.param_options import ParamOptions
from .sharded_param import sharded_param_of

_T = TypeVar("_T")


class Holder(NamedTuple):
    """A module that holds a parameter, and the parameter's name in it."""

    module: nn.Module
    name: str


@dataclass(eq=False)
class PlainParam:
    """A parameter that is to be sharded.

    Attributes:
        fqns: its names in the model; several if it is tied.
        holders: all modules that hold it, inside and outside of the model.
        in_ddp: whether a ``DistributedDataParallel`` reduces its gradient, perhaps one that has yet
            to be garbage-collected.
        options: its options; like the next two, set by ``graphshard.params.check``.
        float8: fp8 recipe of its linears; None if they do not compute in fp8.
        host_memory: kind of host memory for its shards (``graphshard.ops.host_copy``); None keeps
            them on the device.
    """

    param: nn.Parameter
    fqns: list[str] = field(default_factory=list)
    holders: list[Holder] = field(default_factory=list)
    in_ddp: bool = False
    options: ParamOptions = field(default_factory=ParamOptions)
    float8: str | None = None
    host_memory: str | None = None

    @property
    def fqn(self) -> str:
        """The first of its names."""
        return self.fqns[0]


def find_plain_params(root: nn.Module, ignored: frozenset[nn.Parameter]) -> list[PlainParam]:
    """Return the parameters of ``root`` that are neither ignored nor sharded already, each once."""
    plain_params: dict[nn.Parameter, PlainParam] = {}
    for prefix, module in root.named_modules():
        for name, param in parameters_of(module).items():
            if param is None or param in ignored or sharded_param_of(param) is not None:
                continue
            plain = plain_params.setdefault(param, PlainParam(param))
            plain.fqns.append(f"{prefix}.{name}" if prefix else name)
            plain.holders.append(Holder(module, name))
    inside = set(root.modules())
    for module in living(nn.Module):
        if module in inside:
            continue
        for name, param in parameters_if_initialised(module).items():
            if param in plain_params:  # tied from outside of the model, such as a loss's weight
                plain_params[param].holders.append(Holder(module, name))
        if isinstance(module, DistributedDataParallel):
            for param in plain_params.keys() & ddp_parameters(module):
                plain_params[param].in_ddp = True
    return list(plain_params.values())


def living(kind: type[_T]) -> Iterator[_T]:
    """Yield all living instances of ``kind`` and its subclasses.

    The garbage collector does not list objects frozen by ``gc.freeze()``; these are found only if
    they are registered in ``graphshard._torch.instances``.
    """
    # Filter types, not objects: there are few types, and isinstance would run code of proxies.
    things = gc.get_objects()
    kinds = {cls for cls in set(map(type, things)) if issubclass(cls, kind)}
    frozen = live_instances(kind) if gc.get_freeze_count() else {}
    for thing in things if kinds else ():
        if type(thing) in kinds:
            frozen.pop(id(thing), None)
            yield thing
    yield from frozen.values()


def find_reduced_by_ddp() -> set[nn.Parameter]:
    """Return the parameters whose gradients a living ``DistributedDataParallel`` reduces."""
    return {param for ddp in living(DistributedDataParallel) for param in ddp_parameters(ddp)}
