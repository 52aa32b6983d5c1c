"""Under ZeRO-3, forward saves neither full parameters nor values of that size derived from them.

Except in `Deep`, every activation is smaller than the smallest full weight.
"""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard.kinds import TransferKind
from graphshard.passes import saving
from graphshard.passes.contract import PassContext
from graphshard.pipeline.settings import CompileSettings

DIM = 64
FULL = DIM * DIM  # elements of the smallest full weight; a shard has an eighth


def _x() -> Tensor:
    return torch.randn(3, DIM)


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, DIM)
        self.second = nn.Linear(DIM, DIM)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.gain = nn.Parameter(torch.ones(DIM))


class Plain(_Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(torch.tanh(self.first(x * self.gain))).square().mean()


class Cast(_Model):
    def forward(self, x: Tensor) -> Tensor:
        low = torch.bfloat16
        x = F.linear(x.to(low), self.first.weight.to(low), self.first.bias.to(low))
        return (torch.tanh(x) @ self.second.weight.to(low).t()).float().square().mean()


class Autocast(_Model):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.second(torch.tanh(self.first(x))).float().square().mean()


class Transposed(_Model):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ self.first.weight.t().contiguous())
        return (x @ self.second.weight.view(2, -1, DIM).flatten(0, 1).t()).square().mean()


class OfSeveral(_Model):
    def forward(self, x: Tensor) -> Tensor:
        both = torch.cat([self.first.weight, self.second.weight])
        x = torch.tanh(x @ both.t()) @ both
        return (x @ (self.first.weight @ self.second.weight).tanh()).square().mean()


class Scaled(_Model):
    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(x @ (self.first.weight * self.scale).t())
        return (x @ (self.second.weight.tanh() * self.scale.exp()).t()).square().mean()


class Normed(_Model):
    def __init__(self) -> None:
        super().__init__()
        self.normed = parametrizations.weight_norm(nn.Linear(DIM, DIM))

    def forward(self, x: Tensor) -> Tensor:
        return self.normed(torch.tanh(self.normed(x))).square().mean()


class Adapted(_Model):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(2, DIM))
        self.up = nn.Parameter(torch.zeros(DIM, 2))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.first.weight + self.up @ self.down
        return self.second(torch.tanh(x @ weight.t())).square().mean()


class Quantised(_Model):
    def __init__(self) -> None:
        super().__init__()
        codes = torch.randint(-8, 8, (DIM, DIM), dtype=torch.int8)
        self.codes = nn.Parameter(codes, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.codes.float() * self.gain
        return self.second(torch.tanh(self.first(x) @ weight.t())).square().mean()


class Checkpointed(_Model):
    def layer(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(torch.tanh(self.first(x))))

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=False)
        return self.second(x).square().mean()


class Attention(_Model):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(DIM, DIM)
        self.layer = nn.TransformerEncoderLayer(DIM, 4, DIM, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        ids = (x[:, :2].abs() * 5).long().clamp_max(DIM - 1)
        y = self.layer(self.embed(ids))
        return (y @ self.embed.weight.t()).square().mean()


def _saved_by_forward(model: nn.Module, mesh: DeviceMesh, **options: Any) -> list[Tensor]:
    # With overlap, parameters that backward needs first stay unsharded: test_keep_unsharded.py.
    alone = graphshard.SchedulePolicy(overlap=False)
    options = {"compiler": "aot_eager", "schedule": alone, **options}
    backend = graphshard.backend(mesh, **options)
    loss = torch.compile(model, backend=backend, fullgraph=True)(_x())
    nodes = [loss.grad_fn, *(edge[0] for edge in loss.grad_fn.next_functions)]
    (compiled,) = [node for node in nodes if type(node).__name__ == "CompiledFunctionBackward"]
    saved = list(compiled.saved_tensors)
    loss.backward()
    return saved


KINDS = [
    Plain,
    Cast,
    Autocast,
    Transposed,
    OfSeveral,
    Scaled,
    Normed,
    Adapted,
    Quantised,
    Checkpointed,
    Attention,
]


@pytest.mark.parametrize("kind", KINDS)
def test_forward_saves_nothing_of_full_size(kind: type[nn.Module], mesh: DeviceMesh) -> None:
    saved = _saved_by_forward(kind(), mesh)
    sizes = [tuple(tensor.shape) for tensor in saved]
    assert max(tensor.numel() for tensor in saved) < FULL, sizes


def test_forward_saves_nothing_of_full_size_with_inductor(mesh: DeviceMesh) -> None:
    saved = _saved_by_forward(Cast(), mesh, compiler="inductor")
    assert max(tensor.numel() for tensor in saved) < FULL


class Deep(nn.Module):
    LAYERS, ROWS = 3, 512

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(self.LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        x = x.repeat(self.ROWS // x.shape[0] + 1, 1)
        for layer in self.layers:
            x = F.gelu(layer(x))
        return x.square().mean()


def _num_saved(budget: float | None, mesh: DeviceMesh, compiler: str = "aot_eager") -> int:
    policy = graphshard.SchedulePolicy(overlap=False, activation_memory_budget=budget)
    saved = _saved_by_forward(Deep(), mesh, schedule=policy, compiler=compiler)
    return sum(tensor.numel() for tensor in saved)


def test_smaller_activation_budget_saves_less(mesh: DeviceMesh) -> None:
    whole, half, none = (_num_saved(budget, mesh) for budget in (None, 0.5, 0))
    assert whole > half > none
    # The batch, shards, biases, and the first layer's output (backward needs no first weight).
    limit = 2 * FULL + (Deep.ROWS + len(_x())) * DIM
    assert none < limit < whole
    assert _num_saved(0, mesh, "inductor") < limit


class WithBudget(Deep):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.region_activation_memory_budget(0.0):
            return super().forward(x)


@pytest.mark.skipif(
    not hasattr(torch.autograd.graph, "region_activation_memory_budget"), reason="needs torch 2.13"
)
def test_budget_of_region_replaces_budget_of_schedule(mesh: DeviceMesh) -> None:
    saved = _saved_by_forward(WithBudget(), mesh)
    assert sum(tensor.numel() for tensor in saved) == _num_saved(0, mesh)
    # fp8 adds operators to the region.
    _saved_by_forward(WithBudget(), mesh, fp8=graphshard.Float8Policy())


def test_recomputation_gathers_each_parameter_once(mesh: DeviceMesh) -> None:
    policy = graphshard.SchedulePolicy(overlap=False, activation_memory_budget=0)
    backend = graphshard.backend(mesh, compiler="aot_eager", schedule=policy)
    model = Deep()
    torch.compile(model, backend=backend, fullgraph=True)(_x()).backward()
    gathered = [
        t.param for t in backend.plans[1].problem.transfers if t.kind == TransferKind.ALL_GATHER
    ]
    assert len(gathered) == len({*gathered}) == Deep.LAYERS - 1


@pytest.mark.parametrize("kind", [Plain, Cast, Attention])
def test_forward_saves_full_parameters_without_reshard(
    kind: type[nn.Module], mesh: DeviceMesh
) -> None:
    saved = _saved_by_forward(kind(), mesh, reshard_after_forward=False)
    assert max(tensor.numel() for tensor in saved) >= FULL


class LongAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inputs, self.outputs = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.inputs(x).unflatten(-1, (3, 4, -1)).movedim(-3, 0).transpose(-2, -3)
        attended = F.scaled_dot_product_attention(*heads)
        return self.outputs(attended.transpose(-2, -3).flatten(-2)).square().mean()


def _is_result(node: fx.Node) -> bool:
    return node.target is operator.getitem and "attention" in str(node.args[0])


def test_attention_output_may_be_offloaded(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[fx.Node] = []
    pairs_of = saving._offloadable

    def pairs(gm: fx.GraphModule, context: PassContext) -> dict[fx.Node, fx.Node]:
        found.extend(pairs_of(gm, context).values())
        return pairs_of(gm, context)

    monkeypatch.setattr(saving, "_offloadable", pairs)
    monkeypatch.setattr(CompileSettings, "may_offload_activations", True)
    compiled = torch.compile(LongAttention(), backend=graphshard.backend(mesh))
    with torch._inductor.config.patch(force_disable_caches=True):
        compiled(torch.randn(2, 512, DIM)).backward()
    # The operator also returns the small log-sum-exp, which forward saves as well.
    assert [node.args[1] for node in found if _is_result(node)] == [0]
