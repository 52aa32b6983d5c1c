"""Tensor-parallel models, and functions that train them with graphshard and FSDP2."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

import graphshard
from benchmarks import llama
from tests.numerics.compare import generator


class MLP(nn.Module):
    """Two tensor-parallel linears, a plain norm, and a plain linear with few rows.

    On 2 x 2 ranks, shards of `up` and `out` are padded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 14), nn.Linear(14, 6)
        self.out = nn.Linear(6, 3, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        return self.out(x).square().mean()

    @staticmethod
    def batch(rng: torch.Generator) -> Tensor:
        return torch.randn(5, 6, generator=rng)

    def parallelize(self, tp: DeviceMesh) -> MLP:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(self, tp, plan)
        return self


class Llama(llama.Llama):
    """A one-layer Llama with sequence parallelism; `zoo/` tests that of `transformers`."""

    VOCAB = 130

    def __init__(self) -> None:
        super().__init__(llama.LlamaSizes(64, 1, 4, 2, 96, recompute=False, vocab=self.VOCAB))

    def forward(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(ids, ids)

    @staticmethod
    def batch(rng: torch.Generator) -> Tensor:
        return torch.randint(Llama.VOCAB, (2, 6), generator=rng)

    def parallelize(self, tp: DeviceMesh) -> Llama:
        llama.parallelize(self, tp)
        return self


def mesh_2d(dp: int = 2, tp: int = 2, device: str = "cpu") -> DeviceMesh:
    return init_device_mesh(device, (dp, tp), mesh_dim_names=("dp", "tp"))


def split(kind: Any, mesh: DeviceMesh) -> Any:
    """Return a model parallelized over `mesh["tp"]`, with the same values in each call."""
    torch.manual_seed(0)
    return kind().to(mesh.device_type).parallelize(mesh["tp"])


def under_fsdp2(kind: Any, mesh: DeviceMesh, **options: Any) -> Any:
    model = split(kind, mesh)
    fully_shard(model, mesh=mesh["dp"], **options)
    return model


def under_graphshard(
    kind: Any, mesh: DeviceMesh, *, compiler: str = "aot_eager", **options: Any
) -> tuple[Any, Any]:
    """Return a model of `split`, and a callable that graphshard compiled over `mesh["dp"]`."""
    model = split(kind, mesh)
    backend = graphshard.backend(mesh["dp"], compiler=compiler, **options)
    return model, torch.compile(model, backend=backend, fullgraph=True)


def batches(kind: Any, mesh: DeviceMesh, steps: int = 3) -> list[Any]:
    """Return this rank's batches; ranks along "tp" have the same ones."""
    dp_rank = mesh["dp"].get_local_rank()
    data = [kind.batch(generator(step, dp_rank)) for step in range(steps)]
    return [batch.to(mesh.device_type) for batch in data]


def train(
    call: Callable[[Any], Tensor],
    model: nn.Module,
    batches: list[Any],
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
) -> list[dict[str, Any]]:
    history, optim = [], None
    for batch in batches:
        loss = call(batch)
        loss.backward()
        grads = {n: p.grad.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
        history.append({"loss": loss.detach(), **grads})
        optim = optim or optimizer(model.parameters(), lr=0.05)  # the first call shards the model
        optim.step()
        optim.zero_grad()
    return history


def assert_like_fsdp2(ours: dict[str, Any], theirs: dict[str, Any], tolerance: float = 0.0) -> None:
    """Assert equal local values, by default bitwise, and equal layouts of DTensors."""
    assert list(ours) == list(theirs)
    for name, value in theirs.items():
        mine = ours[name]
        assert isinstance(mine, DTensor) == isinstance(value, DTensor), name
        if isinstance(value, DTensor):
            assert mine.placements == value.placements, (name, mine.placements, value.placements)
            assert mine.device_mesh == value.device_mesh, (name, mine.device_mesh)
            assert (mine.shape, mine.stride()) == (value.shape, value.stride()), name
            mine, value = mine.to_local(), value.to_local()
        if tolerance == 0.0:
            assert torch.equal(mine, value), f"{name}: differs by {(mine - value).abs().max():.1e}"
        torch.testing.assert_close(mine, value, rtol=tolerance, atol=tolerance, msg=name)


def assert_trains_like_fsdp2(
    call: Callable[[Any], Tensor],
    model: nn.Module,
    eager: nn.Module,
    data: list[Any],
    tolerance: float = 0.0,
    optimizer: type[torch.optim.Optimizer] = torch.optim.SGD,
) -> None:
    """Train with graphshard and with FSDP2; compare all steps and the final state dicts.

    Args:
        call: callable that runs the forward of `model`.
        eager: model that FSDP2 has sharded.
    """
    ours, theirs = train(call, model, data, optimizer), train(eager, eager, data, optimizer)
    for mine, other in zip(ours, theirs, strict=True):
        assert_like_fsdp2(mine, other, tolerance)
    assert_like_fsdp2(model.state_dict(), eager.state_dict(), tolerance)
