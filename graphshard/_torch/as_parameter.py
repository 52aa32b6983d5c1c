"""Full parameters that look like ``nn.Parameter`` to forward, in traces and in eager parts.

Relies on its imports and on torch/nn/parameter.py, with the same names and arguments in torch 2.11
and 2.13.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import get_fake_value
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder, handle_traced_output
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.misc import LambdaVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._guards import Source, TracingContext
from torch._library.simple_registry import singleton
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor
from torch.nn.utils.stateless import _functional_call

from .dynamo import Trace, module_of_entry, run_as_python
from .tensors import OpOverload

_TRACED = "_graphshard_traced_parameters"  # attribute of an ``OutputGraph``


class GatheredParameter(nn.Parameter):
    """A gathered parameter that eager code sees as a leaf and may register on a module."""

    # With a plain tensor, slicing an ``nn.ParameterList`` would create new parameters, which get no
    # gradient.

    # Dynamo gets the real ``grad_fn`` and ``is_leaf``, because it copies tensors that are leaves.
    grad_fn: Any = property(lambda self: _real_in_traces(self, "grad_fn", None))
    is_leaf: Any = property(lambda self: _real_in_traces(self, "is_leaf", True))
    grad: Any = property(lambda self: None)


def _real_in_traces(tensor: torch.Tensor, attribute: str, as_a_leaf: object) -> object:
    is_tracing = TracingContext.try_get() is not None
    return getattr(torch._C.TensorBase, attribute).__get__(tensor) if is_tracing else as_a_leaf


@dataclass(frozen=True, eq=False)
class ParameterGetter:
    """Getter of a property that reads a full parameter.

    Attributes:
        op: operator called in traces, one of those given to `trace_as_parameters`.
        shard: module attribute that holds the operator's first argument.
        constants: constant arguments after the first.
        accumulators: module attributes that hold the last arguments, or None to pass None.
        read_eagerly: function that returns the value outside traces.
    """

    op: OpOverload
    shard: str
    constants: tuple[object, ...]
    accumulators: tuple[str | None, ...]
    read_eagerly: Callable[[Any], Any]

    def __call__(self, module: Any) -> Any:
        if not is_compiling():
            return self.read_eagerly(module)
        accumulators = [name and getattr(module, name) for name in self.accumulators]
        return self.op(getattr(module, self.shard), *self.constants, *accumulators)

    # Dynamo calls this instead of tracing ``__call__``, which takes 1.5 times as long.
    def trace(self, tx: Any, module: VariableTracker) -> VariableTracker:
        """Return the variable that represents the full parameter in a trace."""
        none = ConstantVariable.create(None)
        arguments = [
            module.var_getattr(tx, self.shard),
            *map(ConstantVariable.create, self.constants),
            *(module.var_getattr(tx, name) if name else none for name in self.accumulators),
        ]
        # ``call_function`` would dispatch to a user's function mode, which must not see this op.
        handler = TorchInGraphFunctionVariable._get_handlers()[self.op]
        return handler(TorchInGraphFunctionVariable(self.op), tx, *arguments)


run_as_python(ParameterGetter.__call__)


class _ParameterVariable(TensorVariable):
    """A full parameter in a trace.

    A trace has one variable per parameter, so identity checks give the same result as in the plain
    model. The first use in each scope (`_place`) emits a marker for the scope, so a parameter first
    read under ``no_grad`` still gets gradients from other uses.
    """

    _nonvar_fields = {"_markers", "_emit", "_shard", "_grad", *TensorVariable._nonvar_fields}

    def __init__(self, proxy: fx.Proxy, **properties: Any) -> None:
        self._markers: dict[tuple[object, ...], fx.Proxy] = {}
        self._emit: Callable[[], fx.Proxy]
        self._shard: Source
        self._grad: Source
        super().__init__(proxy, **properties)

    @property
    def proxy(self) -> fx.Proxy:
        marker = self._markers.get(_place())
        if marker is None or marker.node._erased:
            marker = self.proxy = self._emit()
        return marker

    @proxy.setter
    def proxy(self, marker: fx.Proxy) -> None:
        self._markers[_place()] = marker

    @property
    def source(self) -> None:
        return None  # code after a graph break then reads the full parameter from graph outputs

    @source.setter
    def source(self, source: Source | None) -> None:
        pass  # VariableBuilder assigns a source to every variable without one

    def clone(self, **changed: Any) -> _ParameterVariable:
        copied = object.__new__(type(self))
        copied.__dict__.update(self.__dict__, **changed)
        return copied

    def method_attr_grad(self, tx: Any) -> VariableTracker:
        return VariableTracker.build(tx, Trace().value(self._grad), self._grad)


def _place() -> tuple[object, ...]:
    """Return a key for the scope in which uses of a parameter share a marker.

    A scope is a graph, or the body of a higher-order operator, in one grad mode, inference mode and
    ``torch.func`` level.
    """
    tracer = InstructionTranslator.current_tx().output.current_tracer
    level = torch._C._functorch.maybe_current_level()
    return (tracer, torch.is_grad_enabled(), torch.is_inference_mode_enabled(), level)


def trace_as_parameters(
    ops: Iterable[OpOverload],
    dtensor_path: Iterable[str],
    on_functional_call: Callable[[Source], None],
) -> None:
    """Make Dynamo treat the results of ``ops`` as parameters.

    Args:
        ops: operators that take a shard as first argument and return the full parameter.
        dtensor_path: attributes that lead from the shard to the parameter's DTensor.
        on_functional_call: function called with the source of the shard if the parameter is read
            under ``torch.func.functional_call``.
    """

    def trace(
        function: TorchInGraphFunctionVariable, tx: InstructionTranslator, *args: VariableTracker
    ) -> VariableTracker:
        source = args[0].source
        assert source is not None, "the shard is an attribute of its module"
        if _in_functional_call(tx):
            on_functional_call(source)
        traced = tx.output.__dict__.setdefault(_TRACED, {})
        key = (function.value, *map(_identity, args))
        if key not in traced:
            traced[key] = variable = _parameter(tx, function.value, args)
            variable._shard = source
            variable._grad = functools.reduce(AttrSource, (*dtensor_path, "grad"), source)
        return traced[key]

    # The first call of ``_get_handlers`` builds and caches Dynamo's table, for the devices
    # registered so far.
    for op in ops:
        TorchInGraphFunctionVariable._get_handlers()[op] = trace
    _wrap_with(_wrap_getter, ParameterGetter)


def _wrap_getter(builder: VariableBuilder, getter: ParameterGetter) -> VariableTracker:
    builder.install_guards(GuardBuilder.ID_MATCH)
    output = builder.tx.output
    return LambdaVariable(lambda module: getter.trace(output.current_tx, module))


def _wrap_with(wrap: Callable[[VariableBuilder, Any], VariableTracker], kind: type) -> None:
    for trace_numpy in (False, True):
        VariableBuilder._type_dispatch_impl(trace_numpy)[kind] = wrap


def shards_read() -> list[Source]:
    """Return the sources of the shards whose parameters the running trace has read."""
    traced = InstructionTranslator.current_tx().output.__dict__.get(_TRACED, {})
    return list(dict.fromkeys(variable._shard for variable in traced.values()))


def _identity(argument: VariableTracker) -> object:
    if isinstance(argument, TensorVariable):
        return argument.as_proxy().node
    return argument.as_python_constant()


def _in_functional_call(tx: Any) -> bool:
    # Look for ``_functional_call`` (torch/nn/utils/stateless.py) among the traced callers.
    while tx is not None and tx.f_code is not _functional_call.__code__:
        tx = tx.parent
    return tx is not None


def _parameter(
    tx: InstructionTranslator,
    op: OpOverload,
    args: tuple[VariableTracker, ...],
) -> _ParameterVariable:
    arguments = tuple(argument.as_proxy() for argument in args)
    requires_grad = any(a.requires_grad for a in args if isinstance(a, TensorVariable))

    def emit() -> fx.Proxy:
        marker = tx.output.create_proxy("call_function", op, arguments, {})
        marker.node.meta["example_value"] = _fake_parameter(marker.node, requires_grad)
        return marker

    marker = emit()
    fake = marker.node.meta.pop("example_value")  # handle_traced_output sets it
    variable = handle_traced_output(fake, tx, marker, {}, None, _ParameterVariable)
    assert isinstance(variable, _ParameterVariable)
    variable._emit = emit
    return variable


def _fake_parameter(marker: fx.Node, requires_grad: bool) -> torch.Tensor:
    """Return the marker's fake result as an ``nn.Parameter``.

    The result is a leaf, except under a ``torch.func`` transform.
    """
    fake: torch.Tensor
    tx: Any = InstructionTranslator.current_tx()
    if torch._C._functorch.maybe_current_level() is not None:
        fake = get_fake_value(marker, tx, True)
    else:
        op: Any = marker.target
        fake_kernel: Any = singleton.find(op.name()).fake_impl.kernel
        with tx.fake_mode:  # running the op itself would take twice as long
            fake = fake_kernel(*fx.map_arg(marker.args, lambda node: node.meta["example_value"]))
        fake.requires_grad_(requires_grad)
    fake._is_param = True  # checked by ``_ParameterMeta``
    return fake


def trace_tables_by_attribute(
    is_ours: Callable[[DTensor], bool], adopt: Callable[[nn.Module, str], bool]
) -> None:
    """Make Dynamo trace DTensors in a module's ``_parameters`` as reads of the module's attributes.

    Args:
        is_ours: function that returns whether a DTensor is traced this way.
        adopt: function of a module and the name of one of its DTensors. It adds the attribute that
            reads the full parameter and returns True, so that the frame is traced again; it returns
            False if the module already has the attribute.
    """

    # ``_parameters`` holds DTensors, and ``parameters()``, ``named_parameters()`` and
    # ``state_dict()`` read it. An attribute gives traced code the full parameter instead.
    def wrap(builder: VariableBuilder, value: DTensor) -> VariableTracker:
        owner, tx = module_of_entry(builder.source, "_parameters"), builder.tx
        if owner is None or not is_ours(value):
            return builder.wrap_tensor(value)
        module: Any = Trace().value(owner)
        name = next(name for name, param in module._parameters.items() if param is value)
        if adopt(module, name):
            raise Trace().retrace(f"graphshard now provides parameter {name!r} to a second module")
        return VariableTracker.build(tx, module, owner).var_getattr(tx, name)

    _wrap_with(wrap, DTensor)
