"""Compare the graphs that Dynamo traces before and after a model is sharded.

A forward may test a module's class (``type(m) is nn.Linear``), which sharding changes, and then
take another branch. The graphs must call the same operators on the same values:

    plain      matmul(x, parameter 'w')              add(value 0, parameter 'b')
    sharded    matmul(x, unshard(shard of 'w'))      add(value 0, unshard(shard of 'b'))
"""

from __future__ import annotations

import itertools
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import fx, nn

from .._torch.dynamo import capture_graph, set_grad_enabled
from .._torch.tensors import HigherOrderOperator
from ..errors import BackendError
from ..ops.markers import UNSHARD_MARKERS
from ..options.options import Options
from . import param_spec
from .plain_params import noted_ignored
from .sharded_param import sharded_param_of

_Label = tuple[object, ...]
# Labels of a graph's values: names of parameters, numbers of inputs and results.
_Labels: TypeAlias = "defaultdict[fx.Node, _Label]"


class _Step(NamedTuple):
    op: str  # name of the function, method or module
    # Labels of values, and constants; None for higher-order operators and in their bodies.
    arguments: object
    line: str  # file, line number and text of the user's code


class ForwardCheck:
    """A check that the first graph of a sharded model equals that of the plain model."""

    def __init__(self, options: Options) -> None:
        # With casts of parameters, inputs or outputs, the graphs differ by design: compare nothing.
        policies = [options.mp_policy, *(o.get("mp_policy") for o in options.overrides.values())]
        self._casts = any(p.param_dtype or p.output_dtype for p in policies if p is not None)
        self._ignored = options.ignored_params
        self._plain: tuple[_Step, ...] | None = None

    def trace_plain(self, module: nn.Module, call: Callable[[], object]) -> None:
        """Trace and store a call of a module that is not sharded yet, up to the first graph break.

        Does nothing unless the environment variable ``GRAPHSHARD_CHECK`` is 1 and no ``mp_policy``
        casts parameters or outputs. If Dynamo captures no graph, the call runs as plain Python.
        """
        enabled = os.environ.get("GRAPHSHARD_CHECK") == "1" and not self._casts
        captured = capture_graph(call) if enabled else None
        if captured is not None:
            self.expect(*captured, names_of(module))

    def expect(self, gm: fx.GraphModule, inputs: Sequence[object], fqns: Mapping[int, str]) -> None:
        """Store the graph of a model that is not sharded yet, for :meth:`check`.

        Does nothing if an ``mp_policy`` casts parameters or outputs, or if ``fqns`` is empty.

        Args:
            fqns: names of the model's parameters, keyed by their ``id``.
        """
        if fqns and not self._casts:  # without names, the model was sharded before
            self._plain = _trace_of(gm, [self._fqn(value, fqns) for value in inputs])

    def _fqn(self, value: object, fqns: Mapping[int, str]) -> str | None:
        if (sharded := sharded_param_of(value)) is not None:
            return sharded.fqn
        ignored = isinstance(value, nn.Parameter) and value in self._ignored
        return None if ignored else fqns.get(id(value))

    def check(self, gm: fx.GraphModule, inputs: Sequence[object]) -> None:
        """Compare a sharded model's graph with the stored graph, if any, and drop the stored graph.

        Raises:
            BackendError: the graphs differ; the message shows the first difference.
        """
        plain, self._plain = self._plain, None
        if plain is None:
            return
        sharded = _trace_of(gm, [self._fqn(value, {}) for value in inputs])
        for before, after in itertools.zip_longest(plain, sharded):
            if before is None or after is None or before[:2] != after[:2]:
                raise BackendError(_difference(before, after))


def names_of(module: nn.Module) -> dict[int, str]:
    """Map the ``id`` of each parameter that is not recorded as ignored to its first FQN."""
    ignored = noted_ignored(module)
    return {id(p): name for name, p in module.named_parameters() if p not in ignored}


def _difference(before: _Step | None, after: _Step | None) -> str:
    ours, theirs = (step.op if step else "nothing" for step in (after, before))
    last = after or before
    assert last is not None
    return (
        f"forward behaves differently once its parameters are sharded: it calls {ours} where the "
        f"plain model calls {theirs}"
        + (" with different arguments" if ours == theirs else "")
        + f", at {last.line}. If it tests the class of a module (type(m) is nn.Linear), use "
        "isinstance"
    )


def _new_labels() -> _Labels:
    inputs = itertools.count()
    return defaultdict(lambda: ("input", next(inputs)))


def _trace_of(gm: fx.GraphModule, fqns: Sequence[str | None]) -> tuple[_Step, ...]:
    labels = _new_labels()
    for node, fqn in zip(gm.graph.find_nodes(op="placeholder"), fqns, strict=True):
        if fqn is not None:
            labels[node] = ("parameter", fqn)
    return tuple(_steps(gm, labels))


def _steps(gm: fx.GraphModule, labels: _Labels) -> Iterator[_Step]:
    results = itertools.count()
    for node in gm.graph.nodes:
        # In the plain graph, the value is the parameter itself.
        if node.target in UNSHARD_MARKERS or _is_of_accessor(node):
            labels[node] = labels[node.args[0]]
        elif node.op == "get_attr":
            labels[node] = ("attribute",)
            graph = getattr(gm, node.target, None)
            if isinstance(graph, fx.GraphModule):
                # The body of a higher-order operator. The order of its inputs may differ between
                # the two traces, so arguments are not compared.
                yield from (step._replace(arguments=None) for step in _steps(graph, _new_labels()))
        # Skip set_grad_enabled: a read under no_grad leaves an empty block in one graph only.
        elif node.op not in ("placeholder", "output") and node.target is not set_grad_enabled:
            yield _Step(_name(node), _arguments(node, labels), _line(node))
            labels[node] = ("result", next(results))


def _is_of_accessor(node: fx.Node) -> bool:
    """Return whether an accessor added the node, to move a dimension or to make a DTensor."""
    return node.op not in ("placeholder", "output") and param_spec.__file__ in _line(node)


def _name(node: fx.Node) -> str:
    target: Any = node.target
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


def _arguments(node: fx.Node, labels: _Labels) -> object:
    if isinstance(node.target, HigherOrderOperator):
        return None

    def label(value: Any) -> Any:
        if isinstance(value, fx.Node):
            return labels[value]
        return value if isinstance(value, (bool, int, float, str)) else None

    return fx.node.map_aggregate((node.args, node.kwargs), label)


def _line(node: fx.Node) -> str:
    lines = [line.strip() for line in (node.stack_trace or "").splitlines()]
    # The last file is the innermost frame; the line after it is the code.
    files = [i for i, line in enumerate(lines) if line.startswith("File ")]
    return ": ".join(lines[files[-1] : files[-1] + 2]) if files else "an unknown line"
