"""How a sharded module's forward comes to full parameters while everyone else sees DTensors.

The class of a module that owns sharded parameters becomes a subclass with one property per
parameter. Under tracing the property yields ``graphshard::unshard(leaf)``; in an eager part of a
forward (a graph break, a plain call of the model) it runs that op for real; anywhere else it yields
the DTensor. ``_parameters`` holds the DTensor, so ``named_parameters``, ``state_dict`` and
``torch.distributed.checkpoint`` never meet the property.

Classes are shared by all modules of one class with equally laid out parameters: graphs are compiled
once for all equal layers, because Dynamo guards on the class and not on the module.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from .._torch.dynamo import run_as_python
from .._torch.frames import compiled_call
from .._torch.nn import parameters_of
from ..errors import BackendError
from ..ops.accumulators import ACCUMULATOR_NAMES
from .eager_unshard import full_parameters
from .grad_accumulation import ALL_REDUCES, SYNCS, flag_of
from .layout import Layout
from .sharded_param import (
    ShardedModel,
    ShardedParam,
    adopt,
    leaf_name,
    leaf_of,
    sharded_model_of,
    sharded_param_of,
)


class ShardedModule:
    """Mixed in before the module's own class: keeps leaves and DTensors linked."""

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        result = super()._apply(fn, recurse)  # type: ignore[misc]
        relink(self)  # type: ignore[arg-type]
        return result

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)  # type: ignore[misc]
        relink(self)  # type: ignore[arg-type]

    def refresh_accessors(self) -> None:
        """Read the parameters as their links say now; see ``graphshard.params.grad_accumulation``."""
        cls: Any = type(self)
        _give_class(self, cls._plain_class, cls._markers)  # type: ignore[arg-type]

    def __setstate__(self, state: Any) -> None:
        super().__setstate__(state)  # type: ignore[misc]
        relink(self)  # type: ignore[arg-type]


def install(module: nn.Module, links: dict[str, ShardedParam], model: ShardedModel) -> None:
    """Give ``module`` accessors and leaves for ``links``, beside those that it may have already."""
    plain: Any = type(module)
    kept: dict[str, Any] = {}
    if isinstance(module, ShardedModule):
        plain, kept = plain._plain_class, plain._markers
    module.__dict__.pop("_flat_weights", None)  # nn.RNNBase: a property from now on
    for name, link in links.items():
        link.own(module, name)
    _give_class(module, plain, {**kept, **dict.fromkeys(links)})
    adopt(module, model)


def _give_class(module: nn.Module, plain: type, kept: Mapping[str, Any]) -> None:
    """A class whose accessors do what the links of these parameters say.

    Args:
        kept: markers by name, for parameters that are there no more.
    """
    markers = {}
    for name, marker in kept.items():
        link = sharded_param_of(leaf_of(module, name))
        if link is None:
            markers[name] = marker
            continue
        link.sums.syncs = flag_of(module, SYNCS)
        link.sums.all_reduces = flag_of(module, ALL_REDUCES)
        summed = link.summed()
        marker_spec = link.layout.marker(link.leaf)
        accumulators = tuple(n if n in summed else None for n in marker_spec.accumulators)
        markers[name] = (marker_spec.op(), marker_spec.constants(), accumulators)
        for argument in ACCUMULATOR_NAMES:
            module.__dict__.pop(_sum_name(name, argument), None)
        module.__dict__.update({_sum_name(name, of): value for of, value in summed.items()})
    module.__class__ = _sharded_class(plain, tuple(markers.items()))


def is_replaced(module: nn.Module, name: str) -> bool:
    """Whether ``module`` had a sharded parameter ``name``; for one that holds a plain one now."""
    return isinstance(module, ShardedModule) and name in type(module)._markers  # type: ignore[attr-defined]


@functools.cache
def _sharded_class(cls: type, markers: tuple[tuple[str, Any], ...]) -> type:
    namespace: dict[str, Any] = {name: _accessor(name, *marker) for name, marker in markers}
    # Libraries look at a module's class name (transformers picks the loss by it).
    namespace.update(__module__=cls.__module__, __qualname__=cls.__qualname__, __doc__=cls.__doc__)
    namespace.update(_plain_class=cls, _markers=dict(markers))
    if issubclass(cls, nn.RNNBase):
        namespace["_flat_weights"] = property(_flat_weights, lambda self, value: None)
    return type(cls)(cls.__name__, (ShardedModule, cls), namespace)


def _flat_weights(self: nn.RNNBase) -> list[Any]:
    # nn.RNNBase keeps a list of its parameters beside them.
    return [getattr(self, name, None) for name in self._flat_weights_names]


def _sum_name(name: str, argument: str) -> str:
    """The attribute of a module that holds what gradients of its parameter ``name`` add up in."""
    return f"_{argument}_of_{name}"


def _accessor(
    name: str, op: Any, constants: tuple[Any, ...], accumulators: tuple[str | None, ...]
) -> property:
    """
    Args:
        op: the marker; ``constants`` are its arguments between the leaf and the accumulators.
        accumulators: the marker's last arguments, each one of ``ACCUMULATOR_NAMES``, or None.
    """
    leaf = leaf_name(name)
    attributes = [
        None if argument is None else _sum_name(name, argument) for argument in accumulators
    ]

    def get(self: nn.Module) -> Any:
        if torch.compiler.is_compiling():
            values = [
                None if attribute is None else getattr(self, attribute) for attribute in attributes
            ]
            return op(getattr(self, leaf), *constants, *values)
        return _eager_value(self, name)

    run_as_python(get)
    return property(get)


@torch.compiler.disable
def _eager_value(module: nn.Module, name: str) -> Any:
    if name not in parameters_of(module):
        raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")
    param, model = parameters_of(module)[name], sharded_model_of(module)
    if param is None or model is None:
        return param
    registered = [n for n in type(module)._markers if parameters_of(module).get(n) is not None]  # type: ignore[attr-defined]
    full = full_parameters(module, registered)
    if full is None:
        return param
    if not model.warned and compiled_call().backend is not None:
        model.eager.setdefault(type(module).__name__)
    return full[name]


def relink(module: nn.Module) -> None:
    """Attach new leaves where this module's DTensors, or their storages, were replaced."""
    for name in type(module)._markers:  # type: ignore[attr-defined]
        param = parameters_of(module).get(name)
        old = sharded_param_of(leaf_of(module, name))
        if param is None:
            continue
        if not isinstance(param, DTensor):
            fqn = old.fqn if old else name
            raise BackendError(
                f"parameter {fqn!r} is sharded, but was replaced by a plain "
                f"{type(param).__name__}: load a state dict of DTensors, or load without assign"
            )
        if old is not None and old.layout.host and param.device.type not in ("cpu", "meta"):
            raise BackendError(
                f"parameter {old.fqn!r} was moved to {param.device}, but offload_policy keeps it on the "
                'host: leave it there; to_empty(device="cpu") materialises it'
            )
        link = _link_for(param, old)
        if old is not None and old is not link:
            old.disown(module, name)
        if not link.attached_to(param):
            link.attach(param)
        link.own(module, name)
    module.refresh_accessors()  # type: ignore[operator]


def _link_for(param: DTensor, old: ShardedParam | None) -> ShardedParam:
    known = sharded_param_of(param)
    if old is not None and old.dtensor is param:
        return old
    if known is not None and known.dtensor in (None, param):
        return known
    like = known or old
    assert like is not None
    _check_layout(param, like.layout, like.fqn)
    return ShardedParam(like.layout, like.fqn, like.model)


def _check_layout(param: DTensor, layout: Layout, fqn: str) -> None:
    want = (tuple(layout.shape), layout.placements)
    have = (tuple(param.shape), tuple(param.placements))
    if have != want or param.device_mesh != layout.mesh:
        raise BackendError(
            f"parameter {fqn!r} was replaced by a DTensor of shape and placements {have} on "
            f"{param.device_mesh}: it has to be {want} on {layout.mesh}"
        )
