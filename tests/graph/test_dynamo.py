"""Callbacks of compilations, and sources of graph inputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from graphshard._torch import dynamo


def _failing(gm: Any, inputs: Any) -> Any:
    raise RuntimeError("planted")


def test_only_errors_of_compilations_are_reported() -> None:
    errors: list[BaseException] = []
    dynamo.on_compile_error(errors.append)
    try:
        raise KeyError("raised by the user's code")
    except KeyError:
        torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert not errors
    with pytest.raises(RuntimeError, match="planted"):
        torch.compile(lambda x: x + 2, backend=_failing)(torch.ones(2))
    assert len(errors) == 1 and "planted" in str(errors[0])


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
