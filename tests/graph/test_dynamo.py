"""Sources of graph inputs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from graphshard._torch import dynamo


class _WithTables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("own", torch.ones(2))
        self.kv_buffers = [torch.ones(2)]

    def forward(self, x: Tensor) -> Tensor:
        return x + self.own + self.kv_buffers[0]


def test_only_registered_buffers_are_buffers() -> None:
    found: list[bool] = []

    def backend(gm: Any, inputs: Any) -> Any:
        found.extend(map(dynamo.is_buffer, dynamo.sources(gm)))
        return gm.forward

    torch.compile(_WithTables(), backend=backend)(torch.zeros(2))
    assert sorted(found) == [False, False, True]
