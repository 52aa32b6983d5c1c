"""Process groups: lookup by name, stores, timeouts and pending work.

Relies on torch/distributed/distributed_c10d.py; the names are the same in torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


def process_group(name: str) -> dist.ProcessGroup:
    """Return the process group with this ``group_name``, as ``_resolve_process_group`` does.

    Raises:
        RuntimeError: no group has this name.
    """
    # One torch version types the argument as a NewType of str, the other as str.
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type,unused-ignore]


def is_registered(group: dist.ProcessGroup | None) -> bool:
    """Return whether ``_world`` knows the group; False for None and for destroyed groups."""
    return group in dist.distributed_c10d._world.pg_map


def has_fake_ranks(group: dist.ProcessGroup) -> bool:
    """Return whether the group's other ranks do not exist (backend "fake")."""
    return dist.get_backend(group) == "fake"


@contextmanager
def fake_ranks(world_size: int, rank: int = 0) -> Iterator[None]:
    """Set up a default process group whose other ranks do not exist (backend "fake")."""
    # The import registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """Return a second connection to the group's store, which ``_world`` keeps.

    The shared connection may be blocked by another thread. A store without ``clone`` is returned
    itself.
    """
    store = dist.distributed_c10d._world.pg_map[group][1]
    return store.clone() if hasattr(store, "clone") else store


def device_types(group: dist.ProcessGroup) -> list[str]:
    """Return the device types that the group has a backend for, such as "cpu"."""
    return [device.type for device in group._device_types]


def uses_only_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether gloo runs all collectives of the group."""
    return all(group._get_backend(device).name() == "gloo" for device in group._device_types)


def device_for(group: dist.ProcessGroup) -> torch.device:
    """Return a device whose tensors ``group`` can communicate, if possible the CPU."""
    types = device_types(group)
    if "cpu" in types or not types:
        return torch.device("cpu")
    return torch.device(types[0], torch.get_device_module(types[0]).current_device())


def group_timeout_s(group: dist.ProcessGroup) -> float:
    """Return the timeout of a collective of ``group``, in seconds.

    It is the longest ``_timeout`` in the options of the group's backends, or torch's default if
    they have none (backend "fake").
    """
    backends = [group._get_backend(device) for device in group._device_types]
    options = [getattr(backend, "options", None) for backend in backends]
    timeouts = [getattr(backend_options, "_timeout", None) for backend_options in options]
    default = dist.distributed_c10d.default_pg_timeout
    return max(filter(None, timeouts), default=default).total_seconds()


def is_lost_peer(error: RuntimeError) -> bool:
    """Return whether a collective failed because a peer closed its connection or was too late.

    gloo's errors have no class of their own, but name its source files.
    """
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def register_work(tensor: torch.Tensor, work: dist.Work) -> None:
    """Make ``wait_tensor`` of ``tensor`` wait for ``work``.

    Functional collectives do this in C++ (torch/csrc/distributed/c10d/Functional.cpp).
    """
    torch._C._distributed_c10d._register_work(tensor, work)


def num_registered_works() -> int:
    """Return how many registered operations of this process have not been waited for yet."""
    return torch._C._distributed_c10d._get_work_registry_size()
