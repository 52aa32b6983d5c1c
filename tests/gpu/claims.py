"""Measure on a GPU the properties that other tests check only on a simulated one.

Covers kernels, host waits, memory, CUDA graphs, regions, saved compiled code, and the devices of a
materialized model. Each function runs on one rank, on CPU or CUDA tensors.
"""

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

# Excludes cudaDeviceSynchronize, which the profiler itself calls.
_WAITS = ("cudaStreamSynchronize", "cudaEventSynchronize")


@dataclass(frozen=True)
class Profiled:
    """Profile of a step; on a CPU it has no kernels and no waits.

    Attributes:
        kernels: number of kernels, without NCCL's.
        waits: names of the calls in which the host waited for the device.
        plans: plans of the graphs; empty for an unsharded model.
    """

    kernels: int
    waits: tuple[str, ...]
    plans: tuple[Plan, ...]


def _model(device: str, layers_on_cpu: int = 2) -> tuple[DeepMLP, Tensor]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    dim, layers = (2048, 8) if device == "cuda" else (32, layers_on_cpu)
    model = DeepMLP(dim, layers)
    return model.to(device), torch.randn(16 * dim, dim).to(device)


def _compiler(device: str) -> str:
    return "inductor" if device == "cuda" else "aot_eager"


def _backend(device: str, **options: Any) -> graphshard.Backend:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    return graphshard.backend(mesh, compiler=_compiler(device), **options)


def profiled(device: str, sharded: bool, **options: Any) -> Profiled:
    model, x = _model(device)
    ours = _backend(device, **options) if sharded else None
    compiled = torch.compile(model, backend=ours or _compiler(device))
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
    """Return (peak bytes, planned peak bytes) of forward and of backward.

    On a CPU, the former are meaningless.
    """
    model, x = _model(device)
    ours = _backend(device)
    compiled = torch.compile(model, backend=ours)
    for _ in range(3):
        compiled(x).backward()
    model.zero_grad(set_to_none=True)
    # Workspaces of libraries.
    others = torch.cuda.memory_allocated() - parameter_bytes(model) - x.nbytes
    _reset_peak(device)
    loss = compiled(x)
    found = [torch.cuda.max_memory_allocated() - others]
    _reset_peak(device)
    loss.backward()
    found.append(torch.cuda.max_memory_allocated() - others)
    planned = [max(alive_bytes(plan.problem, plan.buckets)) for plan in ours.plans]
    return list(zip(found, planned, strict=True))


def _reset_peak(device: str) -> None:
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()


def warnings_about_cuda_graphs(device: str) -> list[str]:
    """Train with CUDA graphs enabled, which must not change losses; return the warnings."""
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
    """Return the number of graphs that a CUDA graph policy is asked to capture during training.

    The policy captures none, so this does not test whether NCCL collectives can be captured.
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
    """Train with regions; return the number of their calls, and the losses' relative error."""
    without = _losses(device, 8)
    model, x = _model(device, 8)
    ours = _backend(device, schedule=graphshard.SchedulePolicy(regions=True))
    losses = _train(model, torch.compile(model, backend=ours), x)
    return sum(plan.regions.num_calls for plan in ours.plans), relative_error(losses, without)


def save(device: str, path: Path) -> Tensor:
    losses = _losses(device)
    graphshard.save_compiled(path)
    return losses


def load(device: str, path: Path) -> tuple[Tensor, int]:
    graphshard.load_compiled(path)
    losses = _losses(device)
    return losses, counters["inductor"]["fxgraph_cache_miss"]


def devices_of_an_offloaded_model(device: str) -> tuple[set[str], set[str]]:
    """Return the device types of parameters and of buffers of an offloaded model after a step.

    The model starts on the meta device.
    """
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32))
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy()}
    graphshard.shard(model, mesh, **options)
    graphshard.materialize(model)
    compiled: nn.Module = torch.compile(model, backend=_backend(device, **options))
    compiled(torch.randn(8, 32, device=device)).square().mean().backward()
    params, buffers = model.parameters(), model.buffers()
    return {p.device.type for p in params}, {b.device.type for b in buffers}


def _losses(device: str, layers_on_cpu: int = 2) -> Tensor:
    model, x = _model(device, layers_on_cpu)
    return _train(model, torch.compile(model, backend=_backend(device)), x)


def _train(model: nn.Module, compiled: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
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
