"""Process groups by name, their stores, timeouts and pending work.

Read in torch/distributed/distributed_c10d.py.
"""

from __future__ import annotations

import torch
import torch.distributed as dist


def process_group(name: str) -> dist.ProcessGroup:
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type,unused-ignore]


def is_registered(group: dist.ProcessGroup | None) -> bool:
    """False once the group was destroyed, or was never there."""
    return group in dist.distributed_c10d._world.pg_map


def store_of(group: dist.ProcessGroup) -> dist.Store:
    """The group's store by a connection of its own: another thread may block the shared one."""
    store = dist.distributed_c10d._world.pg_map[group][1]
    return store.clone() if hasattr(store, "clone") else store


def group_timeout_s(group: dist.ProcessGroup) -> float:
    """How long a collective of ``group`` may take; torch's default where no backend tells."""
    backends = (group._get_backend(device) for device in group._device_types)
    timeouts = [getattr(getattr(of, "options", None), "_timeout", None) for of in backends]
    default = dist.distributed_c10d.default_pg_timeout
    return max(filter(None, timeouts), default=default).total_seconds()


def register_work(tensor: torch.Tensor, work: dist.Work) -> None:
    """Have ``wait_tensor`` of ``tensor`` wait for ``work``."""
    torch._C._distributed_c10d._register_work(tensor, work)
