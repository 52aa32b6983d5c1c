"""A machine with costs that can be computed by hand, and a builder of graphs for it.

In a microsecond, the machine moves 1 byte, executes 1000 float32 flops or computes a tenth of an
exponential. It has 4 ranks per node.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from graphshard.cost.hardware import COLLECTIVE_KINDS, Hardware, Interconnect, Rate
from graphshard.cost.model import CostModel


def flat_rate(per_s: float) -> Rate:
    return Rate(per_s, ((1, 1.0),))


def interconnect_of(latency_us: float, hop_us: float, bytes_per_s: float) -> Interconnect:
    return Interconnect(
        latency_us, hop_us, 20.0, dict.fromkeys(COLLECTIVE_KINDS, flat_rate(bytes_per_s))
    )


FLOPS = {
    "float32": flat_rate(1e9),
    "tf32": flat_rate(2e9),
    "bfloat16": flat_rate(4e9),
    "float8": flat_rate(8e9),
}
MACHINE = Hardware(
    name="by hand",
    flops=FLOPS,
    memory=flat_rate(1e6),
    host=flat_rate(1e4),
    special_per_s=1e5,
    launch_us=1.0,
    issue_us=30.0,
    contention=0.05,
    ranks_per_node=4,
    intra=interconnect_of(10.0, 1.0, 1e6),
    inter=interconnect_of(100.0, 5.0, 1e5),
)
# A machine where only flops take time.
COMPUTE = dataclasses.replace(MACHINE, memory=flat_rate(1e15), special_per_s=1e15, launch_us=0.0)


class Graph:
    def __init__(self) -> None:
        self.graph = fx.Graph()

    def input(self, *shape: int, dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.placeholder("x")
        node.meta["val"] = torch.empty(shape, dtype=dtype, device="meta")
        return node

    def __call__(self, op: Any, *args: Any, out: Any = None, **kwargs: Any) -> fx.Node:
        """Add a call of ``op``; ``out`` is its result's shape, for ops without a meta kernel."""
        node = self.graph.call_function(op, args, kwargs)
        if out is not None:
            node.meta["val"] = torch.empty(out, dtype=args[0].meta["val"].dtype, device="meta")
        else:
            values = fx.map_arg((args, kwargs), lambda n: n.meta["val"])
            node.meta["val"] = op(*values[0], **values[1])
        return node

    def costs(self, *outputs: fx.Node, on: Hardware = MACHINE) -> dict[fx.Node, float]:
        self.graph.output(outputs)
        return CostModel(on).compute_us(self.graph)


def total_us(function: Callable[..., Any], *args: Any, mode: str = "fake") -> float:
    graph = make_fx(function, tracing_mode=mode)(*args).graph
    return sum(CostModel(MACHINE).compute_us(graph).values())
