"""What is claimed of GPUs without one, measured on one: kernels, waits of the host, memory, CUDA
graphs; layers that are compiled once, compiled code in a file, where a model from the meta device
comes to lie. Each function runs on one rank, on CPU tensors or on CUDA tensors."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor import cudagraph_utils
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

import graphshard
from benchmarks.models import DeepMLP, parameter_bytes
from graphshard.planning.live_bytes import alive_bytes
from graphshard.planning.plan import Plan
from tests.numerics.compare import relative_error

_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")  # the profiler calls a third one itself


@dataclass(frozen=True)
class Profiled:
    """What a step did by a profile; nothing of it is there on a CPU.

    Attributes:
        kernels: but those of NCCL.
        waits: of the host for the device, by name.
        plans: of the graphs; none of a model that is not sharded.
    """

    kernels: int
    waits: tuple[str, ...]
    plans: tuple[Plan, ...]


def _model(device: str) -> tuple[DeepMLP, Tensor]:
    """Return the same model and batch at every call."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    dim = 2048 if device == "cuda" else 32
    model = DeepMLP(dim, 8)
    return model.to(device), torch.randn(16 * dim, dim).to(device)


def _backend(device: str, **options: Any) -> graphshard.Backend:
    return graphshard.backend(init_device_mesh(device, (dist.get_world_size(),)), **options)


def profiled(device: str, sharded: bool, **options: Any) -> Profiled:
    """Profile a step.

    Args:
        options: of ``graphshard.backend``.
    """
    model, x = _model(device)
    ours = _backend(device, **options) if sharded else None
    compiled = torch.compile(model, backend=ours or "inductor")
    for _ in range(3):
        compiled(x).backward()
    with torch.profiler.profile() as profiler:
        compiled(x).backward()
    names = [(event.device_type, event.name) for event in profiler.events() or ()]
    on_gpu = [name for where, name in names if where == torch.autograd.DeviceType.CUDA]
    kernels = [name for name in on_gpu if not name.startswith(("nccl", "Memcpy", "Memset"))]
    waits = tuple(name for _, name in names if name in _WAITS)
    return Profiled(len(kernels), waits, tuple(ours.plans) if ours else ())


def peaks(device: str) -> list[tuple[int, int]]:
    """Return the bytes that a forward and a backward need, each with what its plan says."""
    model, x = _model(device)
    ours = _backend(device)
    compiled = torch.compile(model, backend=ours)
    for _ in range(3):
        compiled(x).backward()
    model.zero_grad(set_to_none=True)
    others = _allocated(device) - parameter_bytes(model) - x.nbytes  # workspaces of libraries
    _reset_peak(device)
    loss = compiled(x)
    found = [_peak(device) - others]
    _reset_peak(device)
    loss.backward()
    found.append(_peak(device) - others)
    planned = [max(alive_bytes(plan.problem, plan.buckets)) for plan in ours.plans]
    return list(zip(found, planned, strict=True))


def _allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def _reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def _peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device == "cuda" else 0


def warnings_about_cuda_graphs(device: str) -> list[str]:
    """Train with CUDA graphs asked for, and return the warnings; the numbers are as without."""
    without = _losses(device)
    with (
        warnings.catch_warnings(record=True) as caught,
        inductor_config.patch({"triton.cudagraphs": True}),
    ):
        warnings.simplefilter("always")
        assert relative_error(_losses(device), without) < 1e-5
    texts = [str(warning.message) for warning in caught]
    return [text for text in texts if "CUDA graphs" in text]


def graphs_that_a_policy_captures(device: str) -> int:
    """Train under a policy that says how graphs are captured, and return how many it was asked for.

    It captures none of them: whether NCCL's collectives can be is another question.
    """
    asked: list[bool] = []

    class Policy(cudagraph_utils.CUDAGraphPolicy):
        def cudagraphify(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            asked.append(kwargs["is_backward"])
            return model

    without = _losses(device)
    options = {"triton.cudagraphs": True, "cudagraph_policy": Policy(), "fx_graph_cache": False}
    with inductor_config.patch(options):
        assert relative_error(_losses(device), without) < 1e-5
    return len(asked)


def error_of_regions(device: str) -> tuple[int, float]:
    """Train with layers that are alike compiled once, and return how many calls of one region there
    are, and the relative error of the losses."""
    without = _losses(device)
    model, x = _model(device)
    ours = _backend(device, schedule=graphshard.SchedulePolicy(regions=True))
    losses = _train(model, torch.compile(model, backend=ours), x)
    return sum(plan.regions.num_calls for plan in ours.plans), relative_error(losses, without)


def save(device: str, path: Path) -> Tensor:
    """Train with the caches of this process, save what was compiled, and return the losses."""
    losses = _losses(device)
    graphshard.save_compiled(path)
    return losses


def load(device: str, path: Path) -> tuple[Tensor, int]:
    """Train with what was saved, and return the losses, and how many graphs were compiled."""
    graphshard.load_compiled(path)
    losses = _losses(device)
    return losses, counters["inductor"]["fxgraph_cache_miss"]


def devices_of_an_offloaded_model(device: str) -> tuple[set[str], set[str]]:
    """Return where parameters and buffers of a model from the meta device lie, once it has made a
    step."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32))
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()}
    graphshard.shard(model, mesh, **options)
    graphshard.materialize(model)
    compiled: nn.Module = torch.compile(model, backend=graphshard.backend(mesh, **options))
    compiled(torch.randn(8, 32, device=device)).square().mean().backward()
    params, buffers = model.parameters(), model.buffers()
    return {p.device.type for p in params}, {b.device.type for b in buffers}


def _losses(device: str) -> Tensor:
    model, x = _model(device)
    return _train(model, torch.compile(model, backend=_backend(device)), x)


def _train(model: nn.Module, compiled: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Return the losses of some steps."""
    losses = []
    for _ in range(3):
        loss = compiled(x)
        loss.backward()
        losses.append(loss.detach().cpu())
        with torch.no_grad():
            for param in model.parameters():
                param -= 0.1 * param.grad
        model.zero_grad(set_to_none=True)
    return torch.stack(losses)
