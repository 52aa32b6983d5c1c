"""Classes of sharded modules: forward reads full parameters, all other code reads DTensors.

The class of a module that owns sharded parameters is replaced by a subclass with one property per
sharded parameter, its *accessor*, which returns:

    under tracing       the result of the marker op, such as ``graphshard::unshard(shard)``; to
                        Dynamo, an ``nn.Parameter`` (_torch/as_parameter.py)
    in eager forwards   the full parameter, gathered outside of graphs (eager.py): after a graph
                        break, in a plain call
    anywhere else       the DTensor

``named_parameters``, ``state_dict`` and ``torch.distributed.checkpoint`` never call the property:
``_parameters`` holds the DTensor.

Modules of one class whose parameters have equal markers share a subclass. Dynamo guards on the
class rather than on the module: identical layers, even of different models, share a compiled graph.
"""

from __future__ import annotations

import functools
from abc import ABCMeta
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ClassVar, NamedTuple, SupportsIndex, cast

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor

from .._torch.as_parameter import ParameterGetter
from .._torch.dynamo import run_as_python
from .._torch.frames import compiled_call
from .._torch.nn import FLAT_WEIGHTS, NoticesReplacement, parameters_of
from ..errors import BackendError
from ..ops.accumulators import ACCUMULATOR_NAMES
from ..ops.marker_specs import ReplicateSpec, UnshardSpec
from .eager import full_parameters
from .flat_weights import read_only_flat_weights
from .generate import generate_together, has_generate
from .grad_sync import ALL_REDUCES, SYNCS, module_flag, set_flags
from .loading import prepare_loaded
from .param_spec import ParamSpec, TensorParallel, reader
from .pickling import Reduced, copyable_only
from .save_pretrained import METHOD, has_save_pretrained, save_in_full
from .sharded_param import (
    FUNCTIONAL_CALL,
    ShardedModel,
    ShardedParam,
    join_model,
    owned_by,
    shard_attribute,
    sharded_model_of,
    sharded_param_of,
)


class Reading(NamedTuple):
    """Arguments of an accessor, the property that reads a parameter."""

    marker: UnshardSpec | ReplicateSpec  # with names of module attributes instead of tensors
    dim: int  # dimension whose slices are the rows
    tensor_parallel: TensorParallel | None  # how to wrap the result in a DTensor, if at all


class ShardedModule(NoticesReplacement):
    """Mixin, placed before the module's own class, that keeps shards and DTensors linked."""

    _graphshard_plain_class: ClassVar[type]
    _graphshard_readings: ClassVar[Mapping[str, Reading]]  # keyed by parameter name

    def __init_subclass__(cls, **kwargs: Any) -> None:
        if not _is_ours(cls):
            super().__init_subclass__(**kwargs)

    # Slicing a ParameterList calls self.__class__(), which must make a plain module. The switch to
    # the plain class is in __init__, because copying and unpickling call cls.__new__(cls) and need
    # an instance of cls. Dynamo cannot trace the switch: under tracing, __new__ makes the plain
    # module.

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        new: Any = super().__new__
        if not (is_compiling() and _is_ours(cls)):
            return new(cls) if new is object.__new__ else new(cls, *args, **kwargs)
        plain = cls._graphshard_plain_class
        module = plain.__new__(plain, *args, **kwargs)
        module.__init__(*args, **kwargs)
        return module

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        cls = type(self)
        if not _is_ours(cls):
            super().__init__(*args, **kwargs)
            return
        object.__setattr__(self, "__class__", cls._graphshard_plain_class)
        self.__init__(*args, **kwargs)  # type: ignore[misc]

    def __reduce_ex__(self, protocol: SupportsIndex) -> Reduced:
        what = f"a module {type(self).__name__}"
        reduced = cast(Reduced, super().__reduce_ex__(protocol))
        return copyable_only(what, reduced)

    @property
    def require_backward_grad_sync(self) -> bool:
        """DDP's name for the ``set_requires_gradient_sync`` flag; code written for DDP sets it."""
        return module_flag(self, SYNCS)

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        # Any truthy value is accepted, as in DDP.
        set_flags(dict.fromkeys(self.modules(), bool(value)), SYNCS)

    def _graphshard_on_replacement(self, *, empty: bool = False) -> None:
        for name in type(self)._graphshard_readings:
            param = parameters_of(self).get(name)
            if param is None:
                continue
            previous = owned_by(self, name)
            dtensor = _check_replacement(param, name, previous)
            sharded_param = _sharded_param_for(dtensor, previous)
            if previous is not None and previous is not sharded_param:
                previous.remove_owner(self, name)
            if not sharded_param.is_attached_to(dtensor):
                sharded_param.attach(dtensor, empty=empty)
            sharded_param.add_owner(self, name)
        self._graphshard_refresh_accessors()

    def _graphshard_before_loading(
        self, state_dict: dict[str, Any], prefix: str, assigns: bool
    ) -> None:
        for name in type(self)._graphshard_readings:
            sharded_param, key = owned_by(self, name), prefix + name
            if sharded_param is not None and key in state_dict:
                state_dict[key] = prepare_loaded(state_dict[key], sharded_param, key, assigns)

    def _graphshard_refresh_accessors(self) -> None:
        cls = type(self)
        readings = cls._graphshard_readings
        # The new accessors reduce or accumulate gradients as currently requested.
        _set_class(self, cls._graphshard_plain_class, readings, previous=readings)


def _is_ours(cls: type) -> bool:
    """Return whether ``_sharded_class`` made ``cls`` itself; False for a user's subclass."""
    return "_graphshard_plain_class" in vars(cls)


def install(
    module: nn.Module, sharded_params: Mapping[str, ShardedParam], model: ShardedModel
) -> None:
    """Add accessors and shards to ``module``; keep existing ones."""
    previous: Mapping[str, Reading] = {}
    if isinstance(module, ShardedModule):
        previous = type(module)._graphshard_readings
    module.__dict__.pop(FLAT_WEIGHTS, None)  # the new class of an RNN has a property for it
    for name, sharded_param in sharded_params.items():
        sharded_param.add_owner(module, name)
    _set_class(module, plain_class(module), [*previous, *sharded_params], previous)
    join_model(module, model)


def adopt(module: nn.Module, name: str) -> bool:
    """Make ``module`` an owner of a sharded parameter that the user has assigned to it.

    For example, a new head may be tied to an embedding. Return False if ``module`` already has an
    accessor for ``name``.
    """
    if had_sharded(module, name):
        return False
    dtensor = parameters_of(module)[name]
    sharded_param = sharded_param_of(dtensor)
    assert sharded_param is not None and isinstance(dtensor, DTensor)
    if not sharded_param.is_attached():  # a copy of a parameter
        sharded_param.attach(dtensor)
    install(module, {name: sharded_param}, sharded_param.model)
    return True


def _set_class(
    module: nn.Module, plain: type, names: Iterable[str], previous: Mapping[str, Reading]
) -> None:
    """Switch ``module`` to the class whose accessors match its sharded parameters."""
    readings: dict[str, Reading] = {}
    for name in names:
        sharded_param = owned_by(module, name)
        if sharded_param is None:
            readings[name] = previous[name]  # the module has lost its sharded parameter
            continue
        sharded_param.syncs = module_flag(module, SYNCS)
        sharded_param.all_reduces = module_flag(module, ALL_REDUCES)
        tensors = sharded_param.marker_accumulators()
        attributes = {}
        for argument in ACCUMULATOR_NAMES:
            attribute = f"_graphshard_{argument}_of_{name}"
            module.__dict__.pop(attribute, None)
            if argument in tensors:
                module.__dict__[attribute] = tensors[argument]
                attributes[argument] = attribute
        spec = sharded_param.spec
        marker = spec.marker(shard_attribute(name), **attributes)
        readings[name] = Reading(marker, spec.dim, spec.tensor_parallel)
    module.__class__ = _sharded_class(plain, tuple(readings.items()))


def class_error(cls: type[nn.Module]) -> str | None:
    """Return why modules of this class cannot have accessors, or None if they can."""
    try:
        object.__setattr__(object.__new__(cls), "__class__", _sharded_class(cast(Any, cls), ()))
    except TypeError as error:
        return str(error)
    return None


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that ``module`` had before it was sharded."""
    if isinstance(module, ShardedModule):
        return type(module)._graphshard_plain_class
    return type(module)


def had_sharded(module: nn.Module, name: str) -> bool:
    """Return whether parameter ``name`` was sharded in ``module``, even if replaced later."""
    return isinstance(module, ShardedModule) and name in type(module)._graphshard_readings


# Never emptied: Dynamo guards on the class, so a model that is built after an identical one was
# freed can reuse the compiled graphs.
@functools.cache
def _sharded_class(cls: type, readings: tuple[tuple[str, Reading], ...]) -> type[ShardedModule]:
    namespace: dict[str, object] = {name: _accessor(name, reading) for name, reading in readings}
    # Keep the class name: libraries look at it (transformers picks the loss by it).
    namespace.update(__module__=cls.__module__, __qualname__=cls.__qualname__, __doc__=cls.__doc__)
    namespace.update(_graphshard_plain_class=cls, _graphshard_readings=dict(readings))
    if issubclass(cls, nn.RNNBase):
        namespace.update(read_only_flat_weights(cls))
        # In forward, it would move the gathered parameters, which looks like a change.
        namespace["flatten_parameters"] = lambda self: None
    # On the class, so that copies of a model have them.
    if has_save_pretrained(cls):
        namespace[METHOD] = save_in_full(getattr(cls, METHOD))
    if has_generate(cls):
        namespace["generate"] = generate_together(cls.generate)  # type: ignore[attr-defined]
    if (own := getattr(cls, "__deepcopy__", None)) is not None:  # of a parametrized module
        namespace["__deepcopy__"] = _attaching_copies(own)
    # Bypass __new__ of a custom metaclass, which might register the class or need arguments.
    make = ABCMeta.__new__ if isinstance(cls, ABCMeta) else type.__new__
    return cast(type[ShardedModule], make(type(cls), cls.__name__, (ShardedModule, cls), namespace))


def _attaching_copies(deepcopy: Callable[[Any, dict[int, Any]], Any]) -> Callable[..., Any]:
    """Wrap a class's ``__deepcopy__`` to give the sharded parameters of a copy shards of their own.

    The method may bypass ``__reduce_ex__`` and ``__setstate__``, which otherwise do so.
    """

    @functools.wraps(deepcopy)
    def copy(self: ShardedModule, memo: dict[int, Any]) -> Any:
        copied = deepcopy(self, memo)
        if isinstance(copied, ShardedModule):
            copied._graphshard_on_replacement()
        return copied

    return copy


# --- accessors -----------------------------------------------------------------------------------


def _accessor(name: str, reading: Reading) -> property:
    marker = reading.marker
    shard, *others = cast(tuple[Any, ...], marker.arguments())
    num_constants = len(marker.argument_names()) - 1 - len(marker.accumulators)
    constants, accumulators = tuple(others[:num_constants]), tuple(others[num_constants:])
    convert = None
    if reading.dim or reading.tensor_parallel is not None:
        convert = reader(reading.dim, reading.tensor_parallel)
        run_as_python(convert)
    getter = ParameterGetter(
        name, marker.op(), shard, constants, accumulators, convert, _eager_value
    )
    return property(getter, functools.partial(_set_plain, name))


def _set_plain(name: str, module: ShardedModule, value: object) -> None:
    """Make ``name`` a plain attribute, as torch does after ``del module.<name>``."""
    # nn.Module.__setattr__ assigns here only if ``name`` is no longer a parameter.
    sharded_param, cls = owned_by(module, name), type(module)
    if sharded_param is not None:
        sharded_param.remove_owner(module, name)
        del module.__dict__[shard_attribute(name)]
    readings = cls._graphshard_readings
    _set_class(module, cls._graphshard_plain_class, [n for n in readings if n != name], readings)
    setattr(module, name, value)


@torch.compiler.disable
def _eager_value(module: ShardedModule, name: str) -> torch.Tensor | None:
    parameters, model = parameters_of(module), sharded_model_of(module)
    if name not in parameters:
        raise AttributeError(f"{type(module).__name__!r} object has no attribute {name!r}")
    param = parameters[name]
    if param is None or model is None:
        return param
    # Gather all parameters of the module together (see eager.py), sorted by name, because ranks may
    # have registered them in different orders.
    readings = sorted(type(module)._graphshard_readings)
    names = [name for name in readings if parameters.get(name) is not None]
    full = full_parameters(module, names)
    if full is None:  # outside of any forward
        return param
    if not model.warned and compiled_call().backend is not None:
        model.eager_classes.setdefault(type(module).__name__)
    return full[name]


# --- replaced parameters -------------------------------------------------------------------------


def _check_replacement(param: nn.Parameter, name: str, previous: ShardedParam | None) -> DTensor:
    if not isinstance(param, DTensor):
        fqn = previous.fqn if previous else name
        raise BackendError(
            f"parameter {fqn!r} is sharded, but was replaced by a plain "
            f"{type(param).__name__}: load full values with load_state_dict, or copy_ a DTensor "
            "into it"
        )
    on_device = param.device.type not in ("cpu", "meta")
    if previous is not None and previous.spec.host_memory is not None and on_device:
        raise BackendError(
            f"parameter {previous.fqn!r} was moved to {param.device}, but offload_policy keeps it "
            'on the host: leave it there, or use to_empty(device="cpu") to materialize it'
        )
    return param


def _sharded_param_for(dtensor: DTensor, previous: ShardedParam | None) -> ShardedParam:
    """Return the sharded parameter for ``dtensor``, a new one if it needs a shard of its own."""
    known = sharded_param_of(dtensor)
    for candidate in (previous, known):
        if candidate is not None and candidate.is_attached() and candidate.dtensor is dtensor:
            return candidate
    if known is not None and not known.is_attached():  # a fresh copy, by copy.deepcopy
        _check_placements(dtensor, known.spec)
        return known
    like = known or previous
    assert like is not None
    if not dtensor.is_leaf:
        raise BackendError(
            f"parameter {like.fqn!r} was replaced by a DTensor that was computed from others, "
            "which would get no gradients: detach it. " + FUNCTIONAL_CALL
        )
    _check_placements(dtensor, like.spec)
    return ShardedParam(like.spec, like.model)


def _check_placements(dtensor: DTensor, spec: ParamSpec) -> None:
    actual, expected = (
        # The text of a mesh may omit its ranks.
        f"shape {tuple(value.shape)} and placements {tuple(value.placements)} on {mesh} of the "
        f"ranks {mesh.mesh.tolist()}"
        for value, mesh in ((dtensor, dtensor.device_mesh), (spec, spec.mesh))
    )
    if actual != expected:
        raise BackendError(
            f"parameter {spec.fqn!r} was replaced by a DTensor of {actual} instead of {expected}: "
            "load full values with load_state_dict, copy_ a DTensor into it, or assign a matching "
            "DTensor"
        )
