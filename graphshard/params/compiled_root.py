"""Find the root module of a traced parameter, note graph breaks, and guard sharded parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import fx, nn

from .._torch.as_parameter import shards_read
from .._torch.dynamo import Trace, source_name, sources
from .._torch.frames import CompiledCall
from .._torch.nn import uncompiled
from ..errors import BackendError
from .shard import take_replacements
from .sharded_model import sharded_model_of
from .sharded_param import SHARDED_PARAM, ShardedParam, in_sync, sharded_param_of


def uncompiled_modules(owners: Iterable[object]) -> Iterator[nn.Module]:
    """Yield the modules among ``owners``, without the wrapper of ``torch.compile``."""
    return (owner for owner in map(uncompiled, owners) if isinstance(owner, nn.Module))


def record_graph_breaks(
    trace: Trace, params: Sequence[ShardedParam | None], call: CompiledCall
) -> None:
    """Record the graph breaks of a model, and what ran eagerly, for its one warning about them."""
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


def find_root(
    trace: Trace, source: Any, param: nn.Parameter, call: CompiledCall
) -> tuple[nn.Module, bool]:
    """Return the outermost module that holds ``param``, and whether its forward already runs.

    That is the compiled module, an outer module whose forward Dynamo left to Python, or, if a
    function is compiled, a module on the path of the parameter's source.

    Raises:
        BackendError: none of these holds ``param``.
    """
    for candidate in [call.module, *call.running, *trace.owners(source)]:
        candidate = uncompiled(candidate)
        if isinstance(candidate, nn.Module) and any(p is param for p in candidate.parameters()):
            return candidate, trace.is_resumed() or call.runs(candidate)
    raise BackendError(
        f"parameter {source_name(source)} belongs to no module that the compiled code names: "
        "compile the module, or code that reads the parameter through its module"
    )


def sync_params(trace: Trace, gm: fx.GraphModule, inputs: Sequence[object]) -> bool:
    """Guard every sharded parameter, and sync its shard; return False to have Dynamo trace again.

    That is needed if a parameter was replaced, or its ``requires_grad`` has changed.
    """
    # Dynamo drops a shard from the inputs if forward only reads attributes of its parameter.
    for shard in shards_read():
        trace.guard(shard, SHARDED_PARAM, in_sync)
    synced = True
    for source, value in zip(sources(gm), inputs, strict=True):
        param = sharded_param_of(value)
        if param is None:
            continue
        if param.is_replaced() and any(
            map(take_replacements, uncompiled_modules(trace.owners(source)))
        ):
            synced = False
            continue
        synced &= param.sync()
    return synced
