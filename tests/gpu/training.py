"""Compare training with graphshard to training with another implementation.

Both runs use the same weights and batches. Functions run on the ranks of `tests.ranks`, on CPU
or CUDA tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config as inductor_config
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

import graphshard
from benchmarks.models import DeepMLP
from graphshard.passes import single_rank
from graphshard.planning.plan import Plan
from graphshard.tools.demo_model import GPT as DemoGPT
from graphshard.tools.demo_model import Size
from tests import ranks
from tests.models import DeepGPT
from tests.numerics import parallel
from tests.numerics.compare import (
    History,
    assert_close,
    assert_equal,
    assert_sharded,
    generator,
    train_steps,
    whole,
)
from tests.numerics.parallel import (
    Llama,
    assert_like_fsdp2,
    batches,
    mesh_2d,
    under_fsdp2,
    under_graphshard,
)

STEPS = 5
# GPU kernels may add in varying order (atomics in an embedding's backward), and compilers fuse
# differently. Wrong gradients have larger errors.
TOLERANCE = {"cpu": 1e-5, "cuda": 1e-4}

T = TypeVar("T")
Wrap = Callable[[nn.Module, DeviceMesh], Any]
"""``wrap(model, mesh)`` returns the callable to train with instead of the model."""


def by_graphshard(compiler: str) -> Wrap:
    def wrap(model: nn.Module, mesh: DeviceMesh) -> Any:
        backend = graphshard.backend(mesh, compiler=compiler)
        return torch.compile(model, backend=backend, fullgraph=True)

    return wrap


def by_torch_compile(model: nn.Module, mesh: DeviceMesh) -> Any:
    on_gpu = mesh.device_type == "cuda"
    return torch.compile(model, backend="inductor" if on_gpu else "aot_eager")


def by_ddp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    device_ids = [0] if mesh.device_type == "cuda" else None
    return DistributedDataParallel(model, device_ids=device_ids)


def train(wrap: Wrap, device: str) -> tuple[nn.Module, History]:
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = DeepGPT().to(device)
    batches = [DeepGPT.batch(generator(step, rank)).to(device) for step in range(STEPS)]
    return model, train_steps(wrap(model, init_device_mesh(device, (world,))), model, batches)


def agree(theirs: Wrap, device: str, compiler: str) -> list[float]:
    model, history = train(by_graphshard(compiler), device)
    assert_sharded(model)
    for name, param in model.named_parameters():
        assert param.device.type == device, (name, param.device)
    other, expected = train(theirs, device)
    assert_equal(history, expected, TOLERANCE[device])
    for (name, param), (_, peer) in zip(model.named_parameters(), other.named_parameters()):
        assert_close(name, param, peer, TOLERANCE[device])
    losses = [loss.item() for loss in history.losses]
    assert losses[-1] != losses[0]  # training changes the loss
    return losses


def agree_under_tensor_parallelism(device: str, compiler: str) -> list[float]:
    mesh = mesh_2d(device=device)
    data = batches(Llama, mesh)
    model, compiled = under_graphshard(Llama, mesh, compiler=compiler)
    eager = under_fsdp2(Llama, mesh)
    ours = parallel.train(compiled, model, data)
    for mine, theirs in zip(ours, parallel.train(eager, eager, data), strict=True):
        assert_like_fsdp2(mine, theirs, TOLERANCE[device])
    return [step["loss"].item() for step in ours]


def cosines_in_fp8(device: str, compiler: str, recipe: str) -> list[float]:
    """Return the cosine between each parameter's gradients in fp8 (with bfloat16) and float32."""
    size = Size(layers=1, heads=2, dim=128, context=64, batch=4, steps=0)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    fp8 = graphshard.Float8Policy(recipe)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    grads = []
    for options in ({}, {"fp8": fp8, "mp_policy": policy}):
        torch.manual_seed(0)
        model = DemoGPT(size).to(device)
        backend = graphshard.backend(mesh, compiler=compiler, **options)
        ids = torch.randint(256, (size.batch, size.context + 1), generator=generator(0))
        torch.compile(model, backend=backend, fullgraph=True)(ids.to(device)).backward()
        grads.append([whole(param.grad).flatten() for param in model.parameters()])  # type: ignore[arg-type]
    return [float(F.cosine_similarity(*pair, dim=0)) for pair in zip(*grads, strict=True)]


def on_one_rank(device: str, function: Callable[..., T], *args: Any) -> T:
    """Call a function on one rank without eliding collectives, as on several ranks."""
    backend = "nccl" if device == "cuda" else "gloo"
    [result] = ranks.run(1, _sending, function, *args, backend=backend)
    return result


def _sending(function: Callable[..., T], *args: Any) -> T:
    with (
        mock.patch.object(single_rank, "is_alone", return_value=False),
        inductor_config.patch(force_disable_caches=True),  # cache keys do not include the patch
    ):
        torch.compiler.reset()
        return function(*args)


class Trainer:
    """Trainer whose steps read no tensor values on the host.

    Args:
        model: model to train; returns a loss for a tensor with ``model.dim`` columns.
        options: arguments of ``graphshard.backend``.
    """

    def __init__(self, model: DeepMLP, device: str, **options: Any) -> None:
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        self.model = model
        self._backend = graphshard.backend(mesh, **options)
        self._compiled: Any = torch.compile(model, backend=self._backend)
        self._x = torch.randn(16, model.dim, device=device)
        self._optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    @property
    def plans(self) -> list[Plan]:
        return self._backend.plans

    def forward(self) -> Tensor:
        return self._compiled(self._x)

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()

    def step(self) -> None:
        self.backward(self.forward())
