"""A graph of Dynamo's, and what is needed besides to compile it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

Runnable = Callable[..., Any]
"""A compiled graph: inputs in, outputs out."""


@dataclass(frozen=True)
class TracedGraph:
    """A graph as Dynamo hands it to the backend.

    Attributes:
        gm: the graph; passes change it.
        inputs: one example for each placeholder.
        fqns: by input of the graph that AOTAutograd makes of it, the name of the parameter whose
            shard it is; "" for others.
        groups: for each mesh of its parameters, the name of the group of all ranks; they compile
            this graph, too.
        marker_groups: names of all groups that its markers may have.
        inductor_options: the user's options of ``torch.compile``.
        regathered: positions in ``fqns`` of the parameters for which the user's ``overrides`` say
            what is kept for backward.
    """

    gm: fx.GraphModule
    inputs: Sequence[Any]
    fqns: Sequence[str]
    groups: Sequence[str]
    marker_groups: Sequence[str]
    inductor_options: Mapping[str, Any]
    regathered: frozenset[int] = frozenset()

    def device_of_inputs(self) -> torch.device:
        """Return the device of the first tensor among the inputs."""
        tensors = (value for value in self.inputs if isinstance(value, torch.Tensor))
        return next((tensor.device for tensor in tensors), torch.device("cpu"))
