"""Process groups by name, their stores, timeouts and pending work.

Read in torch/distributed/distributed_c10d.py; the names are the same in torch 2.11 and 2.13.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


def process_group(name: str) -> dist.ProcessGroup:
    """Return the process group with that ``group_name``, as ``_resolve_process_group`` does.

    Raises:
        RuntimeError: no group has this name.
    """
    # One version of torch types the argument as a NewType of str, the other as str.
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type,unused-ignore]


def is_registered(group: dist.ProcessGroup | None) -> bool:
    """Return whether ``_world`` knows the group: not once it was destroyed, and not None."""
    return group in dist.distributed_c10d._world.pg_map


def has_fake_ranks(group: dist.ProcessGroup) -> bool:
    """Return whether the other ranks of the group do not exist, as of the backend "fake"."""
    return dist.get_backend(group) == "fake"


@contextmanager
def fake_ranks(world_size: int, rank: int = 0) -> Iterator[None]:
    """Have a process group meanwhile whose other ranks do not exist, of the backend "fake"."""
    # The import makes the backend known.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """Return a second connection to the group's store, which ``_world`` keeps.

    Another thread may block the shared one. A store without ``clone`` is returned as it is.
    """
    store = dist.distributed_c10d._world.pg_map[group][1]
    return store.clone() if hasattr(store, "clone") else store


def device_types(group: dist.ProcessGroup) -> list[str]:
    """Return the types of the devices that the group has a backend for, such as "cpu"."""
    return [device.type for device in group._device_types]


def is_of_gloo(group: dist.ProcessGroup) -> bool:
    """Return whether gloo runs all collectives of the group."""
    return all(group._get_backend(device).name() == "gloo" for device in group._device_types)


def device_for(group: dist.ProcessGroup) -> torch.device:
    """Return a device whose tensors ``group`` communicates; the CPU if it can be that."""
    types = device_types(group)
    if "cpu" in types or not types:
        return torch.device("cpu")
    return torch.device(types[0], torch.get_device_module(types[0]).current_device())


def group_timeout_s(group: dist.ProcessGroup) -> float:
    """Return how long a collective of ``group`` may take, torch's default if no backend tells.

    The timeout is in the ``_timeout`` of a backend's options; the backend "fake" has none.
    """
    backends = [group._get_backend(device) for device in group._device_types]
    options = [getattr(backend, "options", None) for backend in backends]
    timeouts = [getattr(backend_options, "_timeout", None) for backend_options in options]
    default = dist.distributed_c10d.default_pg_timeout
    return max(filter(None, timeouts), default=default).total_seconds()


def is_lost_peer(error: RuntimeError) -> bool:
    """Return whether a collective failed since a peer closed its connection, or was too late.

    Errors of gloo are of no class of their own; they name its source files.
    """
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def register_work(tensor: torch.Tensor, work: dist.Work) -> None:
    """Have the operator ``wait_tensor`` of ``tensor`` wait for ``work``.

    Functional collectives do this in C++ (torch/csrc/distributed/c10d/Functional.cpp).
    """
    torch._C._distributed_c10d._register_work(tensor, work)


def num_registered_works() -> int:
    """Return how many operations of this process are registered, and not waited for yet."""
    return torch._C._distributed_c10d._get_work_registry_size()
