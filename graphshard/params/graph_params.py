"""Sharded parameters as inputs of compiled graphs: find their module, guard and check them.

A full parameter is a copy that was gathered for one forward. Compiling raises an error if a graph
changes the copy in place (the change would be lost) or reads a parameter without its module.

Unless a parameter is kept unsharded, backward gathers it again from the shard that forward saved,
and raises if the shard has changed since.
Autograd does not notice such a change: an in-place op on a DTensor increments only the version of
the DTensor, not the one that its local tensor shares with the shard. Each run of a graph therefore
records the versions of the DTensors whose shards it saves. Autograd also ignores ``requires_grad``
of DTensors, so backward first copies it to their shards.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook
from torch.utils.hooks import RemovableHandle

from .._torch.as_parameter import shard_written_at_break, shards_read, trace_as_parameters
from .._torch.autograd import (
    before_backward,
    call_and_find_nodes,
    compiled_nodes,
    saved_tensors,
    saves_unpacked,
    version_of,
)
from .._torch.dynamo import Source, Trace, sources
from .._torch.frames import CompiledCall
from .._torch.tensors import storage_of, traced_storage, traced_value, written_arguments
from ..errors import BackendError
from ..ops import markers
from ..ops.nodes import graph_modules
from .shard import take_replacements
from .sharded_param import (
    SHARDED_PARAM,
    ShardedParam,
    changed_in_place,
    in_sync,
    sharded_model_of,
    sharded_param_of,
    user_attributes,
)
from .trained_module import uncompiled_modules

_R = TypeVar("_R")


def find_root(
    trace: Trace, source: Any, param: nn.Parameter, call: CompiledCall
) -> tuple[nn.Module, bool]:
    """Return the outermost module that holds ``param``, and whether its forward is running.

    Raises:
        BackendError: the compiled code refers to no module that holds ``param``.
    """
    # The compiled module; outer modules whose forward Dynamo left to Python; and, if a function is
    # compiled, the modules on the path of the parameter's source.
    candidates = [call.module, *call.running, *trace.owners(source)]
    for candidate in uncompiled_modules(candidates):
        if any(p is param for p in candidate.parameters()):
            return candidate, trace.is_resumed() or call.runs(candidate)
    raise BackendError(
        f"parameter {source.name} belongs to no module that the compiled code refers to: "
        "compile the module, or read the parameter through its module. If forward creates the "
        "parameter, use a tensor instead"
    )


def record_graph_breaks(
    trace: Trace, params: Sequence[ShardedParam | None], call: CompiledCall
) -> None:
    """Record the graph break that ends a trace, and modules that run eagerly, for a warning."""
    owner = trace.owner()
    models = [param.model for param in params if param]
    model = models[0] if models else sharded_model_of(owner) if owner is not None else None
    if model is None:
        return
    where = trace.graph_break()
    if where is not None and where not in model.breaks:
        model.breaks.append(where)
    for module in call.running:
        if sharded_model_of(module) is model:
            model.eager_classes.setdefault(type(module).__name__)


def sync_params(trace: Trace, gm: fx.GraphModule, inputs: Sequence[object]) -> bool:
    """Guard the shards that a trace has read, and sync the parameters whose shards its graph takes.

    Return False if Dynamo must trace again, because a shard was replaced or ``requires_grad`` has
    changed.
    """
    # Dynamo drops a shard from the inputs if forward only reads attributes of its parameter.
    for shard in shards_read():
        read = sharded_param_of(trace.value(shard))
        # The trace has read None from owners that have removed the parameter.
        holds = functools.partial(in_sync, read.removed() if read else None)
        trace.guard(shard, holds, f"{shard.name} is in sync")
    synced = True
    for source, value in zip(sources(gm), inputs, strict=True):
        param = sharded_param_of(value)
        if param is None:
            continue
        owners = uncompiled_modules(trace.owners(source))
        if param.is_replaced() and any(map(take_replacements, owners)):
            synced = False  # the trace has read the old shard
            continue
        synced &= param.sync()  # False if its requires_grad has changed
    return synced


def guard_shard(
    gm: fx.GraphModule, inputs: Sequence[object], holds: Callable[[], bool], what: str
) -> None:
    """Guard the frame being traced on ``holds()``, if its graph takes a shard."""
    pairs = zip(sources(gm), inputs, strict=True)
    shards = (source for source, value in pairs if sharded_param_of(value) is not None)
    if (shard := next(shards, None)) is not None:
        Trace().guard(shard, lambda _: holds(), what)


# --- how a traced graph uses its parameters ------------------------------------------------------


@functools.cache
def trace_parameters() -> None:
    """Make Dynamo treat the results of unshard markers as parameters from now on."""
    path = (SHARDED_PARAM, "dtensor")
    trace_as_parameters(markers.UNSHARD_MARKERS, path, user_attributes, _refuse_functional_call)


def _fqn_of(shard: Source) -> str | Source:
    param = sharded_param_of(Trace().value(shard))
    return param.fqn if param else shard


def _refuse_functional_call(shard: Source) -> None:
    raise BackendError(
        f"torch.func.functional_call cannot replace parameter {_fqn_of(shard)!r}, "
        "because it is sharded: forward would use the module's value. List it in ignored_params, "
        "or call an unsharded copy of the module"
    )


def check_reads(gm: fx.GraphModule, inputs: Sequence[object]) -> None:
    """Check how a graph that Dynamo traced, and its subgraphs, use sharded parameters.

    Raises:
        BackendError: the graph changes a full parameter in place, or takes a sharded DTensor; or
            the code that ends the graph sets ``requires_grad`` or ``data`` of a full parameter, or
            registers a hook on it.
    """
    if (shard := shard_written_at_break()) is not None:
        _refuse_write(shard)
    fqns: dict[int | None, str] = {}  # keyed by the storage of the shard in the trace
    placeholders = gm.graph.find_nodes(op="placeholder")
    for node, value in zip(placeholders, inputs):
        if (param := sharded_param_of(value)) is None:
            continue
        if isinstance(value, DTensor):
            raise BackendError(
                f"forward reads parameter {param.fqn!r} through a reference that bypasses its "
                "module, and would compute with a shard: read it through its module"
            )
        fqns[traced_storage(node)] = param.fqn
    for part in graph_modules(gm):
        _refuse_changes(part.graph, fqns)


def _refuse_write(shard: Source) -> None:
    raise BackendError(
        f"forward sets requires_grad or data of parameter {_fqn_of(shard)!r}, or "
        "registers a hook that Dynamo cannot trace, but has only a gathered copy of it: do so "
        "between steps, or call requires_grad_() of its module"
    )


def _refuse_changes(graph: fx.Graph, fqns: Mapping[int | None, str]) -> None:
    read: dict[int | None, str] = {}  # FQNs keyed by the storage of the full parameter and views
    for op in markers.UNSHARD_MARKERS:
        for node in graph.find_nodes(op="call_function", target=op):
            shard = node.args[0]
            assert isinstance(shard, fx.Node)
            read[traced_storage(node)] = fqns.get(traced_storage(shard), str(shard))
    for node in graph.nodes:
        value, storage = traced_value(node), traced_storage(node)
        # Fake tensors also count versions: 0 until an op in the graph writes to them.
        if isinstance(value, torch.Tensor) and storage in read and version_of(value):
            raise BackendError(changed_in_place(read[storage]))
        # Foreach and fused ops, and some custom ones, do not increment versions.
        for storage in map(traced_storage, written_arguments(node)):
            if storage in read:
                raise BackendError(changed_in_place(read[storage]))


# --- parameters that change between forward and backward -----------------------------------------

# Attribute of a graph's autograd node: the parameters whose shards it saved, with versions.
_VERSIONS = "graphshard_versions"

# A hook on all optimizers, which increments versions after each step, because foreach ops on
# DTensors do not. Empty until a graph saves a shard.
_hook: list[RemovableHandle] = []


def with_backward_hook(compiled: Callable[..., _R]) -> Callable[..., _R]:
    """Wrap a compiled graph so that its backward detects parameters changed since the forward.

    Backward honors changes to ``requires_grad``. It raises if it would gather a parameter whose
    values have changed, unless the forward ran under saved-tensor hooks.
    """
    node_type: type | None = None  # class of the graph's autograd nodes, once they have our hook
    # Positions of the inputs that are shards and saved for backward; None until determined.
    saved: list[int] | None = None

    def run(*args: object) -> _R:
        nonlocal node_type
        if node_type is None:
            outputs, nodes = call_and_find_nodes(compiled, args)
            if nodes:
                node = nodes.pop()
                before_backward(node, _before_backward)
                node_type = type(node)
        else:
            outputs = compiled(*args)
        # Saved-tensor hooks pack a copy, or recompute with the parameters as they are in backward.
        if node_type is not None and saved != [] and saves_unpacked():
            assert isinstance(outputs, Sequence), "graphs with a backward return sequences"
            record_versions(outputs, args)
        return outputs

    def record_versions(outputs: Sequence[object], args: Sequence[object]) -> None:
        nonlocal saved
        for node in compiled_nodes(outputs):
            if type(node) is node_type and not hasattr(node, _VERSIONS):
                if saved is None:
                    saved = _find_saved(node, args)
                params = [p for i in saved if (p := sharded_param_of(args[i])) is not None]
                setattr(node, _VERSIONS, [(p, version_of(p.dtensor)) for p in params])

    return run


def _find_saved(node: Any, args: Sequence[object]) -> list[int]:
    """Return the positions of the inputs that are shards saved by ``node``.

    If there are any, also register a hook that makes every optimizer step increment the versions of
    DTensors that have gradients.
    """
    # Compared by storage: on a single rank, the gathered parameter is a view of its shard.
    # Parameters that are kept unsharded are not saved as shards, and keep their values.
    kept = {storage_of(tensor) for tensor in saved_tensors(node)}
    shards = [
        i
        for i, arg in enumerate(args)
        if isinstance(arg, torch.Tensor) and sharded_param_of(arg) and storage_of(arg) in kept
    ]
    if shards and not _hook:
        _hook.append(register_optimizer_step_post_hook(_count_step))
    return shards


def _before_backward(node: Any) -> None:
    recorded: list[tuple[ShardedParam, int]] = getattr(node, _VERSIONS, [])
    for sharded_param, version in recorded:
        # If the DTensor was replaced, the new one starts at version 0, and has its own memory.
        if version_of(sharded_param.dtensor) > version:
            raise BackendError(
                f"parameter {sharded_param.fqn!r} was modified by an inplace operation, such as "
                "optimizer.step(), after the forward, and backward would gather its new values. "
                "Call backward before the change, or run the forward again after it; "
                "reshard_after_forward=False keeps the values that forward gathered"
            )
    for accumulation, _ in node.next_functions:
        accumulated = sharded_param_of(getattr(accumulation, "variable", None))
        if accumulated is not None:
            accumulated.sync_requires_grad()


def _count_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    if torch.compiler.is_compiling():
        return
    params = (param for group in optimizer.param_groups for param in group["params"])
    increment_version([p for p in params if isinstance(p, DTensor) and p.grad is not None])
