"""A fake process group for the tests in this folder: rank 0 of eight.

Collectives return at once and transfer nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from graphshard._torch.distributed import fake_ranks

WORLD_SIZE = 8


@pytest.fixture(scope="package")
def _group() -> Iterator[None]:
    with fake_ranks(WORLD_SIZE):
        yield


@pytest.fixture
def mesh(_group: None) -> Iterator[DeviceMesh]:
    """Return a mesh over the fake ranks; reset Dynamo before and after the test."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield init_device_mesh("cpu", (WORLD_SIZE,))
    torch._dynamo.reset()


@pytest.fixture
def group(mesh: DeviceMesh) -> str:
    return mesh.get_group().group_name
