from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests import ranks, recording

DIM = 8
LAYER_BYTES = (DIM * DIM + DIM) * 4  # parameters of one linear layer of `_mlp`

Summary = list[tuple[str, int, int]]  # (kind, index, bytes) of each event


def _summary() -> Summary:
    summary = [(event.kind, event.index, event.bytes) for event in recording.events()]
    recording.clear()
    return summary


def _world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD


def _functional() -> list[Summary]:
    c10d, size, name = torch.ops._c10d_functional, _world().size(), _world().group_name
    full, half = torch.arange(4.0), torch.ones(2)
    seen = []

    gathered = c10d.wait_tensor(c10d.all_gather_into_tensor(half, size, name))
    assert gathered.tolist() == [1.0] * 4
    seen.append(_summary())
    scattered = c10d.wait_tensor(c10d.reduce_scatter_tensor(full, "sum", size, name))
    assert scattered.tolist() == [[0.0, 2.0], [4.0, 6.0]][dist.get_rank()]
    seen.append(_summary())
    reduced = c10d.wait_tensor(c10d.all_reduce(full, "avg", name))
    assert torch.equal(reduced, full)
    seen.append(_summary())
    for tensor in c10d.all_gather_into_tensor_coalesced([half, full], size, name):
        c10d.wait_tensor(tensor)
    seen.append(_summary())
    for tensor in c10d.reduce_scatter_tensor_coalesced([full, half], "sum", size, name):
        c10d.wait_tensor(tensor)
    seen.append(_summary())
    for tensor in c10d.all_reduce_coalesced([full, half], "sum", name):
        c10d.wait_tensor(tensor)
    seen.append(_summary())
    return seen


def test_functional_collectives_are_recorded() -> None:
    expected = [
        [("all_gather", 0, 16), ("wait", 0, 16)],
        [("reduce_scatter", 0, 16), ("wait", 0, 16)],
        [("all_reduce", 0, 16), ("wait", 0, 16)],
        # A coalesced call is one collective with one wait per output.
        [("all_gather", 0, 48), ("wait", 0, 48), ("wait", 0, 48)],
        [("reduce_scatter", 0, 24), ("wait", 0, 24), ("wait", 0, 24)],
        [("all_reduce", 0, 24), ("wait", 0, 24), ("wait", 0, 24)],
    ]
    assert ranks.run(2, _functional, backend="recording") == [expected] * 2


def _other_collectives() -> list[str]:
    rank, pair = dist.get_rank(), [torch.zeros(2), torch.zeros(2)]
    objects: list[object] = [None, None]
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": 0}, {"rank": 1}]
    dist.all_gather(pair, torch.full((2,), float(rank)))
    assert pair[1].tolist() == [1.0, 1.0]
    dist.broadcast(pair[rank], src=1)
    dist.reduce(pair[0], dst=0)
    dist.scatter(pair[0], pair if rank == 0 else None, src=0)
    dist.gather(pair[0], [torch.empty(2), torch.empty(2)] if rank == 0 else None, dst=0)
    dist.all_to_all_single(pair[0], pair[1])
    if rank == 0:
        dist.send(pair[0], 1)
    else:
        assert dist.recv(pair[0]) == 0
    dist.barrier()
    subgroup = dist.new_group([0, 1])
    dist.all_reduce(pair[0], group=subgroup)
    names = {event.group_name for event in recording.events("all_reduce")}
    assert names == {subgroup.group_name} != {_world().group_name}
    return [event.kind for event in recording.collectives()]


def test_other_collectives_run_and_are_recorded() -> None:
    for rank, kinds in enumerate(ranks.run(2, _other_collectives, backend="recording")):
        assert kinds[:3] == ["all_gather_list"] * 3
        assert kinds[3:8] == ["broadcast", "reduce", "scatter", "gather", "all_to_all"]
        # In some versions of torch, new_group runs a barrier.
        assert kinds[8] == ("send", "recv")[rank]
        assert set(kinds[9:-1]) == {"barrier"} and kinds[-1] == "all_reduce"


def _mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))


def _batch() -> torch.Tensor:
    return torch.ones(2, DIM) * (dist.get_rank() + 1)


def _grads(model: nn.Module) -> list[Any]:
    return [param.grad for param in model.parameters()]


def _train_ddp() -> tuple[Summary, list[torch.Tensor]]:
    model = nn.parallel.DistributedDataParallel(_mlp())
    recording.clear()  # drops the broadcast of parameters
    model(_batch()).sum().backward()
    return _summary(), _grads(model)


def _train_fsdp2() -> tuple[Summary, list[torch.Tensor]]:
    model, mesh = _mlp(), init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh, reshard_after_forward=True)
    fully_shard(model, mesh=mesh)
    model(_batch()).sum().backward()
    return _summary(), [grad.full_tensor() for grad in _grads(model)]


def test_ddp_and_fsdp2_are_recorded_and_agree() -> None:
    (ddp, ddp_grads), _ = ranks.run(2, _train_ddp, backend="recording")
    (fsdp2, fsdp2_grads), _ = ranks.run(2, _train_fsdp2, backend="recording")
    # DDP waits for the work's future, which records no event.
    assert ddp == [("all_reduce", 0, 2 * LAYER_BYTES)]
    # Each layer is gathered in forward and again in backward.
    kinds = ["all_gather"] * 4 + ["reduce_scatter"] * 2
    expected = [(kind, i, LAYER_BYTES) for i, kind in enumerate(kinds)]
    assert [event for event in fsdp2 if event[0] != "wait"] == expected
    assert sum(kind == "wait" for kind, _, _ in fsdp2) == len(expected)
    for ours, theirs in zip(ddp_grads, fsdp2_grads):
        assert torch.equal(ours, theirs)


def _in_flight() -> int:
    tensors = [torch.ones(4) for _ in range(3)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    works[0].wait()
    dist.barrier()
    works[1].wait()
    works[2].wait()
    return recording.max_in_flight()


def test_max_in_flight_counts_unwaited_collectives() -> None:
    assert ranks.run(2, _in_flight, backend="recording") == [3, 3]


def _modelled_wire() -> tuple[float, float]:
    recording.wire(alpha_s=0.05, bytes_per_s=160)
    start = time.perf_counter()
    works = [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(2)]
    works[0].wait()
    first = time.perf_counter() - start
    works[1].wait()
    return first, time.perf_counter() - start


def test_modelled_wire_carries_one_collective_at_a_time() -> None:
    for first, both in ranks.run(2, _modelled_wire, backend="recording"):
        # Lower bounds only: a busy machine delays everything.
        assert first >= 0.15 and both >= 0.30


def _is_completed() -> tuple[bool, bool]:
    recording.wire(alpha_s=3600)
    slow = dist.all_reduce(torch.ones(4), async_op=True)
    recording.wire()
    fast = dist.all_reduce(torch.ones(4), async_op=True)
    fast.wait()
    return slow.is_completed(), fast.is_completed()


def test_collective_is_completed_only_when_wire_is_done() -> None:
    assert ranks.run(2, _is_completed, backend="recording") == [(False, True)] * 2
    assert ranks.run(2, _wire_is_instant, backend="recording") == [True, True]


def _wire_is_instant() -> bool:
    return recording._wire.latency_s == 0


def _train_ddp_on_a_wire() -> float:
    model = nn.parallel.DistributedDataParallel(_mlp())
    recording.wire(alpha_s=0.1)
    start = time.perf_counter()
    model(_batch()).sum().backward()
    return time.perf_counter() - start


def test_ddp_waits_for_the_wire() -> None:
    assert min(ranks.run(2, _train_ddp_on_a_wire, backend="recording")) >= 0.1
