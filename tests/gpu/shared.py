"""Run several NCCL ranks on one GPU.

NCCL refuses a GPU that two ranks of one host use, but identifies hosts by NCCL_HOSTID. So each rank
sets a different NCCL_HOSTID, and ranks communicate over the loopback interface. This tests
numerics, order and memory, but not speed: each collective takes milliseconds, since the GPU
time-slices the processes.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from tests import ranks

T = TypeVar("T")

ENV = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "=lo",  # "=": exact name, not a prefix
    "NCCL_SOCKET_FAMILY": "AF_INET",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_MAX_CTAS": "4",  # kernels of one rank wait for those of another on the same GPU
    "NCCL_DEBUG": "WARN",  # logs why NCCL refuses
    "LOCAL_RANK": "0",
}


def run(world_size: int, backend: str, fn: Callable[..., T], *args: Any) -> list[T]:
    # The group connects in its first collective, so `_on_rank` can still set NCCL_HOSTID.
    return ranks.run_fresh(
        world_size, _on_rank, fn, *args, backend=backend, import_env=ENV, timeout_s=90
    )


def _on_rank(fn: Callable[..., T], *args: Any) -> T:
    os.environ["NCCL_HOSTID"] = f"rank{dist.get_rank()}"
    torch.cuda.set_device(0)
    torch.cuda.set_per_process_memory_fraction(0.9 / dist.get_world_size())
    return fn(*args)


def refusal(backend: str) -> str | None:
    """Return why two ranks cannot exchange CUDA tensors over ``backend``, or None if they can."""
    try:
        run(2, backend, collectives, "cuda")
    except ranks.RankError as error:
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        # The first rank's exception has the reason, followed by NCCL's own message.
        causes = [
            line for line in lines if "Error" in line or "NCCL" in line or "Duplicate" in line
        ]
        return " | ".join(causes[-4:] or lines[-1:])
    return None


def collectives(device: str) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    mine = torch.full((4,), float(rank), device=device)
    full = torch.empty(4 * world, device=device)
    dist.all_gather_into_tensor(full, mine)
    assert full.view(world, 4)[:, 0].tolist() == [float(r) for r in range(world)]
    dist.reduce_scatter_tensor(mine, full, op=dist.ReduceOp.AVG)
    assert mine.tolist() == [float(rank)] * 4
    dist.all_reduce(mine)
    dist.broadcast(mine.view(torch.uint8), src=0)
    assert mine[0].item() == sum(range(world))
