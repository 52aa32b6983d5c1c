"""Build small graphs like AOTAutograd's, in which every node has a fake value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from graphshard.cost.devices import HARDWARE
from graphshard.cost.model import CostModel
from graphshard.kinds import GraphKind
from graphshard.ops.groups import padded_rows
from graphshard.ops.host_copy import PAGEABLE
from graphshard.ops.marker_specs import (
    AllReduceGradSpec,
    MarkerSpec,
    ReduceGradSpec,
    ReplicateSpec,
    UnshardSpec,
)
from graphshard.passes.contract import PassContext, Stage
from graphshard.pipeline.run_passes import run_stage
from graphshard.planning.memory_budget import ScheduleLimits
from graphshard.planning.offload import add_host_copies
from graphshard.planning.plan import Bucket, Plan, Problem
from graphshard.planning.search import find_schedule, schedule_without_overlap

add, mul = torch.ops.aten.add.Tensor, torch.ops.aten.mul.Tensor
to_copy, t = torch.ops.aten._to_copy.default, torch.ops.aten.t.default


CONTEXT = PassContext(CostModel(HARDWARE["cpu"]))
"""Context for passes that need only the graph."""

PlanBuckets = Callable[[Problem], tuple[Bucket, ...]]


class Builder:
    """A graph under construction.

    Most methods add a node with a fake value and return it. Markers use `group` by default.
    """

    def __init__(self, group: str, world_size: int = 8, device: str = "cpu") -> None:
        self.graph = fx.Graph()
        self.group = group
        self.world_size = world_size
        self._mode = FakeTensorMode()
        self._device = device
        self._num_primals = 0

    def _placeholder(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: str = ""
    ) -> fx.Node:
        node = self.graph.placeholder(name)
        with self._mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype, device=device or self._device)
        return node

    def primal(self, *shape: int, dtype: torch.dtype = torch.float32, device: str = "") -> fx.Node:
        self._num_primals += 1
        return self._placeholder(f"primals_{self._num_primals}", shape, dtype, device)

    def tangent(self, *shape: int) -> fx.Node:
        number = sum(node.op == "placeholder" for node in self.graph.nodes) + 1
        return self._placeholder(f"tangents_{number}", shape, torch.float32)

    def call(self, op: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(op, args, kwargs)
        values, named = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
        with self._mode:
            node.meta["val"] = op(*values, **named)
        return node

    def unshard(
        self, shard: fx.Node, rows: int, reshard: bool = True, device: torch.device | None = None
    ) -> fx.Node:
        """Add the marker that gathers a parameter from its shards.

        Args:
            rows: number of rows of the full parameter.
            reshard: whether to free the parameter after forward and gather it again in backward.
            device: device to gather on, if the host keeps the shard.
        """
        return self.marker(
            UnshardSpec(
                shard=shard,
                rows=rows,
                group=self.group,
                regather_group=self.group if reshard else None,
                device=device,
                host_memory=PAGEABLE if device else None,
            )
        )

    def replicate(self, param: fx.Node, dtype: torch.dtype | None = None) -> fx.Node:
        return self.marker(ReplicateSpec(param=param, group=self.group, dtype=dtype))

    def reduce(self, grad: fx.Node, **fields: Any) -> fx.Node:
        """Add the marker that reduce-scatters a gradient; `fields` are other fields of its spec."""
        rows = padded_rows(grad.meta["val"].shape[0], self.world_size)
        return self.marker(ReduceGradSpec(grad=grad, padded_rows=rows, group=self.group, **fields))

    def all_reduce(self, grad: fx.Node) -> fx.Node:
        return self.marker(AllReduceGradSpec(grad=grad, group=self.group))

    def marker(self, spec: MarkerSpec) -> fx.Node:
        node: fx.Node = spec.call(self.call)
        return node

    def module(self, *outputs: fx.Node | None) -> fx.GraphModule:
        self.graph.output(outputs)
        return fx.GraphModule(torch.nn.Module(), self.graph)


def run(one: Callable[[fx.GraphModule, PassContext], None], gm: fx.GraphModule) -> None:
    """Run a pass on a joint graph, then remove dead code, as the pipeline does."""
    one(gm, CONTEXT)
    gm.graph.eliminate_dead_code()


def lowered(
    gm: fx.GraphModule, kind: str, plan_buckets: PlanBuckets = schedule_without_overlap
) -> Plan:
    """Plan, lower and verify a graph; return the plan."""
    context = PassContext(CostModel(HARDWARE["cpu"]), GraphKind(kind))
    context.plan_buckets = lambda problem, *_: add_host_copies(
        problem, plan_buckets(problem), context.cost_model, ScheduleLimits()
    )
    run_stage(Stage.FINAL, gm, context)
    assert context.plan is not None
    return context.plan


def overlapped(limits: ScheduleLimits) -> PlanBuckets:
    return lambda problem: find_schedule(problem, CostModel(HARDWARE["cpu"]), limits)


def targets(graph: fx.Graph) -> list[Any]:
    return [node.target for node in graph.nodes if node.op == "call_function"]


def count(graph: fx.Graph, op: Any) -> int:
    return targets(graph).count(op)


def output(graph: fx.Graph, position: int = 0) -> fx.Node:
    outputs: Any = graph.output_node().args[0]
    node = outputs[position]
    assert isinstance(node, fx.Node)
    return node
