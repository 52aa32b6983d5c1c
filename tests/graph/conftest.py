"""A fake process group for all tests of this folder: rank 0 of eight, the only one that runs.
Collectives return at once and move nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from graphshard._torch.distributed import fake_ranks

WORLD_SIZE = 8


@pytest.fixture(scope="package")
def _group() -> Iterator[None]:
    """Initialise a fake process group for the tests of this folder."""
    with fake_ranks(WORLD_SIZE):
        yield


@pytest.fixture
def mesh(_group: None) -> Iterator[DeviceMesh]:
    """A mesh over the fake ranks; Dynamo has forgotten what other tests compiled."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield init_device_mesh("cpu", (WORLD_SIZE,))
    torch._dynamo.reset()


@pytest.fixture
def group(mesh: DeviceMesh) -> str:
    """The name of the fake group."""
    return mesh.get_group().group_name
