"""A Dynamo graph with its inputs, the names of its parameters, its process groups and options."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .._torch.dynamo import is_buffer, sources
from .._torch.tensors import size_hint

Runnable = Callable[..., Any]  # a compiled graph, called with its inputs


@dataclass(frozen=True)
class TracedGraph:
    """A graph as Dynamo passes it to the backend.

    Attributes:
        gm: graph; passes modify it.
        inputs: example value of each placeholder.
        fqns: parameter name of each input of AOTAutograd's graph, or "" if it is neither a shard
            nor a replicated parameter.
        shards: inputs that are shards of parameters, or replicated parameters.
        groups: for each mesh, name of the group of all its ranks, which all compile this graph.
        marker_groups: names of all groups that the markers may use.
        inductor_options: the user's options of ``torch.compile``.
        tp_groups: names of the groups over which tensor parallelism splits parameters.
        future_state_bytes: function that returns the bytes of optimizer states that training will
            add on a device.
    """

    gm: fx.GraphModule
    inputs: Sequence[Any]
    fqns: Sequence[str]
    shards: Sequence[torch.Tensor]
    groups: Sequence[str]
    marker_groups: Sequence[str]
    inductor_options: Mapping[str, Any]
    tp_groups: Sequence[str] = ()
    future_state_bytes: Callable[[torch.device], int] = lambda _: 0

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [value for value in self.inputs if isinstance(value, torch.Tensor)]

    def device_of_inputs(self) -> torch.device:
        return next((tensor.device for tensor in self.tensors), torch.device("cpu"))

    def trains(self) -> bool:
        """Return whether grad mode is on and an input requires a gradient."""
        return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in self.tensors)

    def batch_sizes(self) -> tuple[str, bool]:
        """Return the batch's sizes, as in "16x24, 16", and whether any of them is dynamic."""
        shards = {id(shard) for shard in self.shards}
        nodes = self.gm.graph.find_nodes(op="placeholder")
        batch = [  # all inputs that are neither parameters nor buffers
            (node.meta["example_value"].shape, value.shape)
            for node, source, value in zip(nodes, sources(self.gm), self.inputs, strict=True)
            if isinstance(value, torch.Tensor) and value.ndim and id(value) not in shards
            if not is_buffer(source)
        ]
        sizes = ["x".join(str(size_hint(size)) for size in shape) for _, shape in batch]
        varies = any(isinstance(size, torch.SymInt) for traced, _ in batch for size in traced)
        return ", ".join(sizes), varies
