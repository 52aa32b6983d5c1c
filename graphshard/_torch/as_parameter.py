"""Full parameters that look like ``nn.Parameter`` to forward, in traces and in eager parts.

Relies on its imports and on torch/nn/parameter.py, with the same names and arguments in torch 2.11
and 2.13.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import CodeType
from typing import Any
from unittest import mock

import torch
from torch import fx, nn
from torch._dynamo.exc import raise_observed_exception
from torch._dynamo.guards import GuardBuilder
from torch._dynamo.source import AttrSource
from torch._dynamo.symbolic_convert import InstructionTranslator
from torch._dynamo.utils import get_fake_value
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.builder import VariableBuilder, handle_traced_output
from torch._dynamo.variables.constant import ConstantVariable
from torch._dynamo.variables.misc import GetAttrVariable, LambdaVariable
from torch._dynamo.variables.tensor import TensorVariable
from torch._dynamo.variables.torch import TorchInGraphFunctionVariable
from torch._functorch.pyfunctorch import (
    GradInterpreter,
    JvpInterpreter,
    retrieve_all_functorch_interpreters,
    temporarily_pop_interpreter_stack,
)
from torch._guards import Source, TracingContext
from torch._library.simple_registry import singleton
from torch.compiler import is_compiling
from torch.distributed.tensor import DTensor
from torch.nn.utils.stateless import _functional_call

from .dynamo import Trace, module_of_entry, run_as_python
from .frames import is_in_forward
from .patches import patch
from .tensors import OpOverload

HOOK_METHODS = ("register_hook", "register_post_accumulate_grad_hook")
_WRITES = ("requires_grad_", *HOOK_METHODS)  # methods that change the parameter, not its values
_DERIVATIVES = (GradInterpreter, JvpInterpreter)
_SET_GRAD = torch._C._set_grad_enabled
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
        name: name of the parameter.
        op: operator called in traces, one of those given to `trace_as_parameters`.
        shard: module attribute that holds the operator's first argument.
        constants: constant arguments after the first.
        accumulators: module attributes that hold the last arguments, or None to pass None.
        convert: function from the operator's result to the parameter, or None if they are equal.
        read_eagerly: function of a module and the name that returns the value outside traces.
    """

    name: str
    op: OpOverload
    shard: str
    constants: tuple[object, ...]
    accumulators: tuple[str | None, ...]
    convert: Callable[[Any], Any] | None
    read_eagerly: Callable[[Any, str], Any]

    def __call__(self, module: Any) -> Any:
        if not is_compiling():
            return self.read_eagerly(module, self.name)
        accumulators = [name and getattr(module, name) for name in self.accumulators]
        rows = self.op(getattr(module, self.shard), *self.constants, *accumulators)
        return rows if self.convert is None else self.convert(rows)

    # Dynamo calls this instead of tracing ``__call__``, which takes 1.5 times as long.
    def trace(self, tx: Any, module: VariableTracker, getter: Source) -> VariableTracker:
        """Return the variable that represents the full parameter in a trace.

        ``getter`` is the source of this object.
        """
        none = ConstantVariable.create(None)
        arguments = [
            module.var_getattr(tx, self.shard),
            *map(ConstantVariable.create, self.constants),
            *(module.var_getattr(tx, name) if name else none for name in self.accumulators),
        ]
        # ``call_function`` would dispatch to a user's function mode, which must not see this op.
        handler = TorchInGraphFunctionVariable._get_handlers()[self.op]
        rows: _ParameterVariable = handler(TorchInGraphFunctionVariable(self.op), tx, *arguments)
        if self.convert is None:
            return rows
        convert = VariableTracker.build(tx, self.convert, AttrSource(getter, "convert"))
        return rows.converted(tx, convert)


run_as_python(ParameterGetter.__call__)


class _ParameterVariable(TensorVariable):
    """A full parameter in a trace.

    A trace has one variable per parameter, so identity checks give the same result as in the plain
    model. The first use in each scope (`_place`) emits a marker for the scope, so a parameter first
    read under ``no_grad`` still gets gradients from other uses.
    """

    _own_fields = ("_markers", "_emit", "_shard", "_dtensor", "_attributes_of", "_converted")
    _nonvar_fields = {*_own_fields, *TensorVariable._nonvar_fields}

    # Dynamo calls the class of a tensor for its rows in ``a, b = tensor`` and for the results of
    # comparisons; neither are parameters.
    def __new__(
        cls, *args: Any, emit: Callable[[], fx.Proxy] | None = None, **properties: Any
    ) -> Any:
        return TensorVariable(*args, **properties) if emit is None else super().__new__(cls)

    def __init__(self, proxy: fx.Proxy, *, emit: Callable[[], fx.Proxy], **properties: Any) -> None:
        self._markers: dict[tuple[object, ...], fx.Proxy] = {}
        self._emit = emit
        self._shard: Source
        self._dtensor: Source
        self._attributes_of: Callable[[Any], Mapping[str, object]]
        self._converted: _ParameterVariable | None = None
        super().__init__(proxy, **properties)

    @property
    def proxy(self) -> fx.Proxy:
        marker = self._markers.get(_place())
        if marker is None or marker.node._erased:
            marker = self.proxy = _emitted(self._emit)
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

    def converted(self, tx: Any, convert: VariableTracker) -> _ParameterVariable:
        """Return the variable for ``convert`` of this one, always the same."""
        if self._converted is None:
            output, requires_grad = tx.output, self.requires_grad

            def emit() -> fx.Proxy:
                # Dynamo also emits markers after it has set ``should_exit``, for graph outputs.
                with mock.patch.object(output, "should_exit", False):
                    proxy = convert.call_function(output.current_tx, [self], {}).as_proxy()
                value = proxy.node.meta["example_value"]
                if torch._C._functorch.maybe_current_level() is None:
                    value = value.detach().requires_grad_(requires_grad)
                value._is_param = True
                proxy.node.meta["example_value"] = value
                return fx.Proxy(proxy.node, proxy.tracer)  # Dynamo tracks variables by proxy

            self._converted = _variable(tx, emit)
            for name in ("_shard", "_dtensor", "_attributes_of"):
                setattr(self._converted, name, getattr(self, name))
        return self._converted

    def nodes(self, graph: fx.Graph) -> list[fx.Node]:
        """Return the nodes of ``graph`` whose values are this parameter."""
        nodes = (marker.node for marker in self._markers.values())
        return [node for node in nodes if node.graph is graph and not node._erased]

    def traced_dtensor(self, tx: Any) -> VariableTracker:
        return VariableTracker.build(tx, Trace().value(self._dtensor), self._dtensor).realize()

    def _assigned(self, tx: Any, name: str) -> VariableTracker | None:
        """Return the value that the trace has assigned to an attribute, or None."""
        effects, dtensor = tx.output.side_effects, Trace().value(self._dtensor)
        if dtensor in effects and effects.has_pending_mutation_of_attr(effects[dtensor], name):
            assigned: VariableTracker = effects.load_attr(effects[dtensor], name)
            return assigned
        return None

    def method_attr_grad(self, tx: Any) -> VariableTracker:
        if (assigned := self._assigned(tx, "grad")) is not None:
            return assigned
        source = AttrSource(self._dtensor, "grad")
        return VariableTracker.build(tx, Trace().value(source), source)

    def method_requires_grad_(self, tx: Any, *args: Any, **kwargs: Any) -> VariableTracker:
        # Breaks the graph if the value differs: Python then calls a module's ``requires_grad_``.
        self.traced_dtensor(tx).call_method(tx, "requires_grad_", list(args), kwargs)
        return self

    # Dynamo registers hooks of a tensor with a source after the graph, on the tensor itself.
    def _method_register_hook(
        self, tx: Any, name: str, *args: Any, **kwargs: Any
    ) -> VariableTracker:
        return self.traced_dtensor(tx).call_method(tx, name, list(args), kwargs)

    def dynamic_getattr(self, tx: Any, name: str) -> VariableTracker:
        if (assigned := self._assigned(tx, name)) is not None:
            return assigned
        if not hasattr(nn.Parameter, name):
            source, attributes_of = self._dtensor, self._attributes_of
            attributes = attributes_of(Trace().value(source))
            if name in attributes:
                return VariableTracker.build(tx, attributes[name], AttrSource(source, name))
            what = f"{source.name} has no attribute {name!r}"
            Trace().guard(source, lambda p: name not in vars(p), what)
        return super().dynamic_getattr(tx, name)


def _place() -> tuple[Any, bool, bool, int]:
    """Return a key for the scope in which uses of a parameter share a marker.

    A scope is a graph, or the body of a higher-order operator, in one grad mode, inference mode and
    ``torch.func`` level. Mode and level are those outside ``torch.func`` derivatives (`_emitted`).
    """
    tracer = InstructionTranslator.current_tx().output.current_tracer
    grad, level = torch.is_grad_enabled(), torch._C._functorch.maybe_current_level() or 0
    if level:
        for interpreter in reversed(retrieve_all_functorch_interpreters()):  # innermost first
            if isinstance(interpreter, GradInterpreter):
                grad, level = interpreter.prev_grad_mode(), interpreter.level() - 1
            elif isinstance(interpreter, JvpInterpreter):
                level = interpreter.level() - 1
    return (tracer, grad, torch.is_inference_mode_enabled(), level)


def _emitted(emit: Callable[[], fx.Proxy]) -> fx.Proxy:
    """Call ``emit``, with its nodes before any ``torch.func`` derivative that is being traced.

    ``torch.func`` differentiates only with respect to tensors from outside.
    """
    # A call from within ``emit`` finds no derivative: its nodes go to the same place.
    if not any(isinstance(i, _DERIVATIVES) for i in retrieve_all_functorch_interpreters()):
        return emit()
    tracer, grad, *_ = _place()
    outermost, levels, grad_before = _outermost_derivative(tracer.graph)
    if outermost is None:
        return emit()
    with contextlib.ExitStack() as stack:
        for _ in range(levels):
            stack.enter_context(temporarily_pop_interpreter_stack())
        stack.enter_context(torch.set_grad_enabled(grad))
        stack.enter_context(tracer.graph.inserting_before(outermost))
        if grad == grad_before:
            return emit()
        set_grad = functools.partial(tracer.create_node, "call_function", _SET_GRAD)
        set_grad((grad,), {})
        marker = emit()
        set_grad((grad_before,), {})
        return marker


def _outermost_derivative(graph: fx.Graph) -> tuple[fx.Node | None, int, bool]:
    """Return the node that enters the outermost derivative being traced.

    Also returns the number of levels since it, and the grad mode before it. The node is None if
    this graph does not enter a derivative, but perhaps a graph around it does.
    """
    outermost, levels, entered, left = None, 0, 0, 0
    grad_before = grad = torch.is_grad_enabled()
    for node in reversed(graph.nodes):
        name = getattr(node.target, "__name__", "")
        if node.target is _SET_GRAD:
            grad = not node.args[0]  # Dynamo emits only changes
        elif name.endswith("_decrement_nesting"):
            left += 1
        elif name.endswith("_increment_nesting") and left:
            left -= 1
        elif name.endswith("_increment_nesting"):
            entered += 1
            if name in ("_grad_increment_nesting", "_jvp_increment_nesting"):
                outermost, levels, grad_before = node, entered, grad
    return outermost, levels, grad_before


def trace_as_parameters(
    ops: Iterable[OpOverload],
    dtensor_path: Iterable[str],
    attributes_of: Callable[[Any], Mapping[str, object]],
    on_functional_call: Callable[[Source], None],
) -> None:
    """Make Dynamo treat the results of ``ops`` as parameters.

    Args:
        ops: operators that take a shard as first argument and return the full parameter.
        dtensor_path: attributes that lead from the shard to the parameter's DTensor.
        attributes_of: function that returns the attributes of a DTensor that forward may read.
        on_functional_call: function called with the source of the shard if the parameter is read
            under ``torch.func.functional_call``.
    """

    def trace(
        function: TorchInGraphFunctionVariable, tx: InstructionTranslator, *args: VariableTracker
    ) -> VariableTracker:
        source = args[0].source
        assert source is not None, "the shard is an attribute of its module"
        if _functional_call.__code__ in _traced_codes(tx):  # torch/nn/utils/stateless.py
            on_functional_call(source)
        traced = tx.output.__dict__.setdefault(_TRACED, {})
        key = (function.value, *map(_identity, args))
        if key not in traced:
            traced[key] = variable = _parameter(tx, function.value, args)
            variable._shard = source
            variable._dtensor = functools.reduce(AttrSource, dtensor_path, source)
            variable._attributes_of = attributes_of
        return traced[key]

    # The first call of ``_get_handlers`` builds and caches Dynamo's table, for the devices
    # registered so far.
    for op in ops:
        TorchInGraphFunctionVariable._get_handlers()[op] = trace
    patch("torch._dynamo.side_effects.SideEffects.store_attr", _storing_on_dtensors)
    tensor_check = "torch._dynamo.variables.higher_order_ops._check_all_tensorvariable"
    patch(tensor_check, _accepting_parameters)
    if importlib.util.find_spec("torch._dynamo.variables.invoke_subgraph"):  # not in torch 2.11
        patch("torch._dynamo.variables.invoke_subgraph.classify_vt", _classifying_others)


def _storing_on_dtensors(store_attr: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(store_attr)
    def store(self: Any, item: Any, *args: Any, **kwargs: Any) -> None:
        if type(item) is _ParameterVariable:
            item = item.traced_dtensor(InstructionTranslator.current_tx())
        store_attr(self, item, *args, **kwargs)

    return store


def _accepting_parameters(check: Callable[[list[Any]], None]) -> Callable[[list[Any]], None]:
    def check_others(variables: list[Any]) -> None:
        check([v for v in variables if not isinstance(v, _ParameterVariable)])

    return check_others


def _classifying_others(classify: Callable[[object], object]) -> Callable[[object], object]:
    def classify_others(variable: object) -> object:
        return None if isinstance(variable, _ParameterVariable) else classify(variable)

    return classify_others


def trace_getters(always: Callable[[], bool]) -> None:
    """Make Dynamo trace a `ParameterGetter` as a read of the full parameter.

    Outside any forward, it is traced as a read of the DTensor unless ``always()``.
    """

    def wrap(builder: VariableBuilder, getter: ParameterGetter) -> VariableTracker:
        builder.install_guards(GuardBuilder.ID_MATCH)
        output = builder.tx.output

        def trace(module: Any) -> VariableTracker:
            tx = output.current_tx
            holds = module.value._parameters.get(getter.name) is not None
            if holds and (always() or is_in_forward(_traced_codes(tx))):
                return getter.trace(tx, module, builder.source)
            return _table_entry(tx, module, getter.name)

        return LambdaVariable(trace)

    _wrap_with(wrap, ParameterGetter)


def _table_entry(tx: Any, module: VariableTracker, name: str) -> VariableTracker:
    """Return attribute ``name`` as ``nn.Module.__getattr__`` reads it, with guards."""
    key = ConstantVariable.create(name)
    for table in ("_parameters", "_buffers", "_modules"):
        entries = module.var_getattr(tx, table)
        if entries.call_method(tx, "__contains__", [key], {}).as_python_constant():
            return entries.call_method(tx, "__getitem__", [key], {})
    raise_observed_exception(AttributeError, tx, args=[key])


def _wrap_with(wrap: Callable[[VariableBuilder, Any], VariableTracker], kind: type) -> None:
    for trace_numpy in (False, True):
        VariableBuilder._type_dispatch_impl(trace_numpy)[kind] = wrap


def shards_read() -> list[Source]:
    """Return the sources of the shards whose parameters the running trace has read."""
    traced = InstructionTranslator.current_tx().output.__dict__.get(_TRACED, {})
    return list(dict.fromkeys(variable._shard for variable in traced.values()))


def parameters_returned(gm: fx.GraphModule) -> dict[int, int]:
    """Return the position of each output of a graph that is a full parameter.

    Each is mapped to the position of the input that is its shard. ``gm`` is the graph that Dynamo
    has just traced.
    """
    traced = InstructionTranslator.current_tx().output.__dict__.get(_TRACED, {})
    positions = {node: i for i, node in enumerate(gm.graph.find_nodes(op="placeholder"))}
    shards: dict[fx.Node, int] = {}  # position of its shard, for each node that is a parameter
    for variable in traced.values():
        markers = variable.nodes(gm.graph)
        shown = variable if variable._converted is None else variable._converted
        shards.update((node, positions[markers[0].args[0]]) for node in shown.nodes(gm.graph))
    outputs: Any = gm.graph.output_node().args[0]
    return {i: shards[node] for i, node in enumerate(outputs) if node in shards}


def shard_written_at_break() -> Source | None:
    """Return the source of the shard to whose parameter the breaking instruction writes, or None.

    Python would run the instruction on the gathered copy that the graph returns.
    """
    tx: Any = InstructionTranslator.current_tx()
    written = tx.stack[-1:] if tx.current_instruction.opname == "STORE_ATTR" else []
    written += [
        callee.obj
        for callee in tx.stack
        if isinstance(callee, GetAttrVariable) and callee.name in _WRITES
    ]
    return next((v._shard for v in written if isinstance(v, _ParameterVariable)), None)


def _identity(argument: VariableTracker) -> object:
    if type(argument) is ConstantVariable:  # most are; isinstance takes long for variables
        return argument.value
    if isinstance(argument, TensorVariable):
        return argument.as_proxy().node
    return argument.as_python_constant()


def _traced_codes(tx: Any) -> Iterator[CodeType]:
    """Yield the code of the function being traced, and of its traced callers."""
    while tx is not None:
        yield tx.f_code
        tx = tx.parent


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

    return _variable(tx, emit)


def _variable(tx: InstructionTranslator, emit: Callable[[], fx.Proxy]) -> _ParameterVariable:
    marker = _emitted(emit)
    fake = marker.node.meta.pop("example_value")  # handle_traced_output sets it
    variable = handle_traced_output(fake, tx, marker, {"emit": emit}, None, _ParameterVariable)
    assert isinstance(variable, _ParameterVariable)
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
