"""The Dynamo backend: finds the model, shards it at the first compile, hands graphs to a compiler.

    first call     full parameters among the graph's inputs ─► shard their model ─► trace again
    every compile  leaves among the inputs ─► guard their links ─► compile ─► record the plans
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from tabulate import tabulate
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.tensor import DTensor

from ._torch import BackendError, Trace, frames, is_dynamo_entry, source_name, sources
from .accessors import model_of
from .handoff import PlanRecord, compile_graph
from .link import in_sync, link_of
from .plan import ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, Plan
from .policy import Options, check_mesh, default_mesh
from .sharding import Model, shard_module

log = logging.getLogger(__name__)


class Backend:
    """A ``torch.compile`` backend that trains a model fully sharded; made by :func:`backend`."""

    def __init__(self, options: Options) -> None:
        self.options = options
        self._mesh = options.mesh
        self._records: list[PlanRecord] = []

    def __call__(
        self, gm: fx.GraphModule, inputs: Sequence[Any], *, options: dict[str, Any] | None = None
    ) -> Any:
        trace = Trace()
        if self._shard_plain(trace, gm, inputs):
            raise trace.retrace("graphshard sharded the model")
        if not self._sync_links(trace, gm, inputs):
            raise trace.retrace("requires_grad of a sharded parameter changed")
        links = [link_of(value) for value in inputs]
        record = PlanRecord(gm, [link.fqn if link else "" for link in links], self.options.compiler)
        self._records.append(record)
        return compile_graph(gm, inputs, record, self.options.compiler, options or {})

    @property
    def plans(self) -> list[Plan]:
        """The plan of every graph compiled so far, in order of compilation."""
        return [plan for record in self._records for plan in record.plans()]

    def summary(self) -> str:
        """A table of what every compiled graph gathers and reduces."""
        headers = ["graph", "params", "collective", "count", "MB"]
        rows = []
        for plan in self.plans:
            for kind in (ALL_GATHER, REDUCE_SCATTER, ALL_REDUCE):
                if plan.count(kind):
                    size = plan.num_bytes(kind) / 1e6
                    rows.append([plan.graph, len(plan.params), kind, plan.count(kind), size])
        return tabulate(rows, headers, floatfmt=".3f")

    def _shard_plain(self, trace: Trace, gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
        """Shard the models whose full parameters are inputs; whether there were any."""
        done: set[int] = set()
        for source, value in zip(sources(gm), inputs, strict=True):
            if not _is_plain_parameter(value) or value in self.options.ignored_params:
                continue
            if id(value) in done:
                continue
            root, in_use = _root_of(trace, source, value)
            done.update(id(param) for param in root.parameters())
            if self._mesh is None:
                self._mesh = default_mesh(value.device.type)
            log.info("sharding %s over %s", type(root).__name__, self._mesh)
            shard_module(root, self._mesh, self.options, in_use=in_use)
        return bool(done)

    def _sync_links(self, trace: Trace, gm: fx.GraphModule, inputs: Sequence[Any]) -> bool:
        """Guard every leaf's link; False if one's ``requires_grad`` was not what was traced."""
        synced = True
        for source, value in zip(sources(gm), inputs, strict=True):
            link = link_of(value)
            if link is None:
                continue
            synced &= link.sync()
            trace.guard(source, in_sync, f"graphshard: {source_name(source)} is in sync")
        return synced


def _is_plain_parameter(value: Any) -> bool:
    return isinstance(value, nn.Parameter) and link_of(value) is None


def _root_of(trace: Trace, source: Any, param: nn.Parameter) -> tuple[nn.Module, bool]:
    """The outermost module of the call that holds ``param``, and whether it runs eagerly already.

    It is an object that the parameter's source passes through; or, where Dynamo skipped the frame
    of an outer module, a module whose forward is on the Python stack.
    """
    running = list(_running_modules())
    for candidate in running + list(trace.owners(source)):
        candidate = getattr(candidate, "_orig_mod", candidate)
        if isinstance(candidate, nn.Module) and any(p is param for p in candidate.parameters()):
            return candidate, candidate in running or trace.is_resumed()
    raise BackendError(
        f"parameter {source_name(source)} belongs to no module that the compiled code names: "
        "compile the module, or code that reads the parameter through its module"
    )


def _running_modules() -> Iterator[nn.Module]:
    """Modules whose calls are on the stack inside torch.compile's outermost entry, outer first."""
    stack = list(frames())
    entries = [i for i, frame in enumerate(stack) if is_dynamo_entry(frame)]
    for frame in reversed(stack[: entries[-1]] if entries else []):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and frame.f_code.co_name in ("forward", "_call_impl"):
            yield owner


def backend(
    mesh: DeviceMesh | None = None,
    *,
    reshard_after_forward: bool = True,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] | None = None,
    overrides: dict[str, Any] | None = None,
    fp8: Any = None,
    schedule: Any = None,
    compiler: str = "inductor",
    dump: str | None = None,
    sync_module_states: bool = True,
) -> Backend:
    """A backend for ``torch.compile`` that shards the model it meets (ZeRO-3, arXiv 1910.02054)."""
    arguments = dict(locals())
    arguments["offload_policy"] = offload_policy or OffloadPolicy()
    arguments["ignored_params"] = ignored_params or frozenset()
    return Backend(Options(**arguments))
