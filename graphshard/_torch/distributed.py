"""Process groups: creation, lookup by name, stores, timeouts, waits, pending collectives and work.

Relies on torch/distributed/distributed_c10d.py, ``torch._C._distributed_c10d`` and the fake process
group of torch/testing/_internal; the names are the same in torch 2.11 and 2.13.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple
from unittest import mock
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional

from .dynamo import on_compile_start
from .patches import patch

_TORCH = f"{Path(torch.__file__).parent}{os.sep}"
_COLLECTIVES = dist.distributed_c10d.__file__
_POINT_TO_POINT = {"send", "recv", "isend", "irecv", "batch_isend_irecv"}

# Number of calls to ``new_local_group``, by default group and ranks.
_num_created: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()

# Part of a group's sequence number that counts point-to-point operations, as gloo's does.
_num_point_to_point: WeakKeyDictionary[dist.ProcessGroup, int] = WeakKeyDictionary()


def process_group(name: str) -> dist.ProcessGroup:
    """Return the process group registered as ``name``, for example by ``name_for_graphs``.

    Raises:
        RuntimeError: no group is registered under this name.
    """
    # One torch version types the argument as a NewType of str, the other as str.
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type,unused-ignore]


def new_local_group(ranks: Sequence[int], timeout: timedelta) -> dist.ProcessGroup:
    """Create a process group of ``ranks``; these ranks, and no others, must call this.

    Args:
        ranks: global ranks, in ascending order.
    """
    world: Any = dist.group.WORLD
    key, counts = tuple(ranks), _num_created.setdefault(world, Counter())
    counts[key] += 1
    # Ranks find each other by the group's name. Torch's own name contains the number of groups that
    # a rank is in, which may differ between ranks.
    name = hashlib.sha256(f"graphshard {key} {counts[key]}".encode()).hexdigest()
    named = mock.patch.object(dist.distributed_c10d, "_process_group_name", return_value=name)
    # If the default group has a device, torch splits its NCCL communicator for the new group, and
    # all ranks of the default group would have to take part.
    device, world.bound_device_id = world.bound_device_id, None
    try:
        with named:
            return dist.new_group(list(ranks), timeout=timeout, use_local_synchronization=True)
    finally:
        world.bound_device_id = device


def name_for_graphs(group: dist.ProcessGroup) -> str:
    """Register ``group`` as ``graphshard_N``, counting only groups used in graphs; return the name.

    ``process_group`` and torch's collectives find the group by this name. The numbers in torch's
    own names count all groups of a job. If graphs used those names, creating another group first
    would change the code and cache keys of graphs, and replicas, whose groups have different
    numbers, could not share code. The default group keeps its name.
    """
    if group is dist.group.WORLD:
        return group.group_name
    names = (f"graphshard_{number}" for number in itertools.count())
    return next(name for name in names if _take_name(name, group))


def _take_name(name: str, group: dist.ProcessGroup) -> bool:
    """Register ``group`` under ``name``; return False if another group has or had the name."""
    registry: Any = torch._C._distributed_c10d
    try:
        registry._register_process_group(name, group)
    except RuntimeError:  # taken, until the default group is destroyed
        with suppress(RuntimeError):  # raised if the group that had the name has been destroyed
            return process_group(name) is group
        return False
    return True


def is_registered(group: dist.ProcessGroup | None) -> bool:
    return group in dist.distributed_c10d._world.pg_map


def all_to_all(
    tensor: torch.Tensor,
    received_sizes: list[int] | None,
    sent_sizes: list[int] | None,
    group: str,
) -> torch.Tensor:
    """Exchange rows with all ranks of a group, in traced code; differentiable for floats.

    Args:
        group: name of the group.
        received_sizes, sent_sizes: numbers of rows from and to each rank, or None for equal parts.
    """
    for size in (*(received_sizes or ()), *(sent_sizes or ())):
        torch._check(size >= 0)  # unknown to the compiler if sizes depend on data
    exchange: Any = (
        functional.all_to_all_single_autograd
        if tensor.dtype.is_floating_point
        else functional.all_to_all_single
    )
    return exchange(tensor, received_sizes, sent_sizes, group)


def has_fake_ranks(group: dist.ProcessGroup) -> bool:
    """Return whether the group's other ranks do not exist (backend "fake")."""
    return dist.get_backend(group) == "fake"


@contextmanager
def fake_ranks(world_size: int, rank: int = 0) -> Iterator[None]:
    """Set up a default process group whose other ranks do not exist (backend "fake")."""
    # The import registers the backend.
    from torch.testing._internal.distributed.fake_pg import FakeStore

    _forget_shardings()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _forget_shardings()


def _forget_shardings() -> None:
    """Clear DTensor's cache of operator shardings, which refer to meshes."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache

    # Meshes with different groups can be equal: DTensor would reuse a mesh of a destroyed world.
    _clear_sharding_prop_cache()


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """Return a new connection to the group's store, or the store itself if it has no ``clone``."""
    # Another thread may block the shared connection.
    store = dist.distributed_c10d._world.pg_map[group][1]
    return store.clone() if hasattr(store, "clone") else store


def device_types(group: dist.ProcessGroup) -> list[str]:
    return [device.type for device in group._device_types]


def uses_only_gloo(group: dist.ProcessGroup) -> bool:
    return all(group._get_backend(device).name() == "gloo" for device in group._device_types)


def device_for(group: dist.ProcessGroup) -> torch.device:
    """Return a device whose tensors ``group`` can communicate, preferably the CPU."""
    types = device_types(group)
    if "cpu" in types or not types:
        return torch.device("cpu")
    return torch.device(types[0], torch.get_device_module(types[0]).current_device())


def group_timeout_s(group: dist.ProcessGroup) -> float:
    """Return the longest timeout of the backends of ``group``, in seconds."""
    # Backend "fake" has no options: use torch's default.
    backends = [group._get_backend(device) for device in group._device_types]
    options = [getattr(backend, "options", None) for backend in backends]
    timeouts = [getattr(backend_options, "_timeout", None) for backend_options in options]
    default = dist.distributed_c10d.default_pg_timeout
    return max(filter(None, timeouts), default=default).total_seconds()


def is_lost_peer(error: RuntimeError) -> bool:
    """Return whether a collective's error suggests that a peer closed its connection or stalled."""
    # gloo's errors have no special class, but contain paths of its source files.
    return isinstance(error, dist.DistError) or "gloo/transport" in str(error)


def register_work(tensor: torch.Tensor, work: dist.Work) -> None:
    """Make ``wait_tensor`` of ``tensor`` wait for ``work``."""
    # Functional collectives do this in C++ (torch/csrc/distributed/c10d/Functional.cpp).
    torch._C._distributed_c10d._register_work(tensor, work)


def num_registered_works() -> int:
    """Return the number of registered works that this process has not waited for yet."""
    return torch._C._distributed_c10d._get_work_registry_size()


# Code generated by Inductor (torch/_inductor/codegen/wrapper.py) and by fx looks up
# ``torch.ops._c10d_functional.wait_tensor.default`` at every call.
_wait_packet: Any = torch.ops._c10d_functional.wait_tensor
wait_tensor: Callable[[torch.Tensor], torch.Tensor] = _wait_packet.default


def replace_wait(wait: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Make graphs call ``wait`` instead of ``wait_tensor``.

    Lasts until :func:`restore_wait` is called or the next compilation starts.
    """
    on_compile_start(restore_wait)  # compiled graphs must contain the operator itself
    _wait_packet.default = wait


def restore_wait(_: object = None, /) -> None:
    _wait_packet.default = wait_tensor


class PendingCollective(NamedTuple):
    """A collective in progress on a thread.

    Attributes:
        what: function and the user's line that called it, as text.
        group: name of the process group.
        number: number of this group's collectives that this rank has begun, including this one.
    """

    what: str
    group: str
    number: int


def pending_collective(thread: int) -> PendingCollective | None:
    """Return the collective in progress on a thread of this process, or None.

    Ignores point-to-point operations, functional collectives, collectives of compiled graphs, and
    backends that do not number their collectives.
    """
    # The functions, and their local variable "group", are in distributed_c10d.py.
    frame = sys._current_frames().get(thread)
    if frame is None or frame.f_code.co_filename != _COLLECTIVES:
        return None
    name, group = frame.f_code.co_name, frame.f_locals.get("group") or dist.group.WORLD
    if name in _POINT_TO_POINT or "group" not in frame.f_locals or group is None:
        return None
    number = num_started(group.group_name)
    what = f"torch.distributed.{name}() of {_user_line(frame)}"
    return None if number is None else PendingCollective(what, group.group_name, number)


def num_started(group: str) -> int | None:
    """Return the number of collectives of a group that this rank has begun, or None if unknown."""
    try:
        member = process_group(group)
    except RuntimeError:  # this rank is not in the group
        return None
    number = _sequence_number(member)
    return None if number is None else number - _num_point_to_point.get(member, 0)


def _sequence_number(group: Any) -> int | None:  # mypy's stub of ProcessGroup lacks the method
    try:
        return int(group._get_sequence_number_for_group())
    except RuntimeError:  # the backend keeps no count
        return None


def _counting(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def counted(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        before = _sequence_number(group)
        try:
            return method(group, *args, **kwargs)
        finally:
            if before is not None and (after := _sequence_number(group)) is not None:
                earlier = _num_point_to_point.get(group, 0)
                _num_point_to_point[group] = earlier + after - before

    return counted


# Patch at import: a rank may send before it creates a backend. A monitored barrier consists of
# sends and receives; the first rank makes more of them than the others.
for _name in ("send", "recv", "recv_anysource", "monitored_barrier"):
    patch(f"torch.distributed.distributed_c10d.ProcessGroup.{_name}", _counting)


def _user_line(frame: FrameType) -> str:
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
