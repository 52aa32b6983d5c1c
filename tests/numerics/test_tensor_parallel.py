from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import graphshard
from graphshard.errors import BackendError
from graphshard.params.sharded_param import sharded_param_of
from tests import ranks
from tests.multirank.test_errors import assert_refused
from tests.numerics.compare import generator
from tests.numerics.parallel import (
    MLP,
    Llama,
    assert_like_fsdp2,
    assert_trains_like_fsdp2,
    batches,
    mesh_2d,
    split,
    under_fsdp2,
    under_graphshard,
)
from tests.ranks import on_ranks


@pytest.mark.parametrize(
    ("kind", "optimizer"), [(MLP, torch.optim.SGD), (Llama, torch.optim.AdamW)]
)
@on_ranks(4)
def test_training_is_bitwise_equal_to_fsdp2(kind: Any, optimizer: Any) -> None:
    mesh = mesh_2d()
    model, compiled = under_graphshard(kind, mesh)
    eager = under_fsdp2(kind, mesh)
    data = batches(kind, mesh)
    assert_trains_like_fsdp2(compiled, model, eager, data, optimizer=optimizer)
    assert_like_fsdp2(dict(model.named_parameters()), dict(eager.named_parameters()))


@on_ranks(4)
def test_local_tensors_are_views_of_padded_shards() -> None:
    mesh = mesh_2d()
    model = graphshard.shard(split(MLP, mesh), mesh["dp"])
    for name, param in model.named_parameters():
        sharded_param = sharded_param_of(param)
        assert sharded_param is not None and isinstance(param, DTensor)
        assert param.to_local().data_ptr() == sharded_param.shard.data_ptr(), name
        assert param.device_mesh.ndim == (1 if name.startswith(("norm", "out")) else 2), name


@on_ranks(4)
def test_optimizer_created_before_sharding_stays_valid() -> None:
    mesh = mesh_2d()
    data = batches(MLP, mesh, 4)
    model, eager = split(MLP, mesh), under_fsdp2(MLP, mesh)
    optim = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    compiled = _compile(model, mesh)
    theirs = torch.optim.SGD(eager.parameters(), lr=0.05, momentum=0.9)
    for batch in data:
        for call, optimizer in ((compiled, optim), (eager, theirs)):
            optimizer.zero_grad()
            call(batch).backward()
            optimizer.step()
    assert_like_fsdp2(dict(model.named_parameters()), dict(eager.named_parameters()))


@on_ranks(4)
def test_state_of_stepped_optimizer_is_sharded() -> None:
    mesh = mesh_2d()
    batch = MLP.batch(generator(0))  # the same on all ranks, so that replicas stay equal
    model = split(MLP, mesh)
    optim = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model(batch).backward()
    optim.step()
    before = {name: _full(p) for name, p in model.named_parameters()}
    momentum = {n: _full(optim.state[p]["momentum_buffer"]) for n, p in model.named_parameters()}
    grads = {name: _full(p.grad) for name, p in model.named_parameters()}
    graphshard.shard(model, mesh["dp"], sync_module_states=False)
    for name, param in model.named_parameters():
        assert torch.equal(_full(param), before[name]), name
        state = optim.state[param]["momentum_buffer"]
        assert state.placements == param.placements and torch.equal(_full(state), momentum[name])
        torch.testing.assert_close(_full(param.grad), grads[name])


@pytest.mark.parametrize("break_graph", [False, True])
@on_ranks(4)
def test_eager_forward_is_close_to_fsdp2(break_graph: bool) -> None:
    mesh = mesh_2d()
    model, eager = split(Broken if break_graph else MLP, mesh), under_fsdp2(MLP, mesh)
    graphshard.shard(model, mesh["dp"])
    call = torch.compile(model, backend=_backend(mesh)) if break_graph else model
    data = batches(MLP, mesh)
    assert_trains_like_fsdp2(call, model, eager, data, 1e-6)


class Broken(MLP):
    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.up(self.norm(x)))
        torch._dynamo.graph_break()
        return self.out(x + self.down(y)).square().mean()


def _backend(mesh: Any, **options: Any) -> Any:
    return graphshard.backend(mesh["dp"], compiler="aot_eager", **options)


def _compile(model: nn.Module, mesh: Any, **options: Any) -> Any:
    return torch.compile(model, backend=_backend(mesh, **options), fullgraph=True)


def _full(tensor: Any) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


# Errors, before anything is changed.


def _with_partial(mesh: DeviceMesh) -> nn.Module:
    model = MLP()
    value = DTensor.from_local(torch.ones(3, 6), mesh["tp"], [Partial()])
    model.out.weight = nn.Parameter(value)
    return model


def _uneven(mesh: DeviceMesh) -> nn.Module:
    model = MLP()
    parallelize_module(model, mesh["tp"], {"out": ColwiseParallel()})
    return model


def _on_two_meshes(mesh: DeviceMesh) -> nn.Module:
    model = MLP().parallelize(mesh["tp"])
    value = distribute_tensor(model.out.weight.detach(), mesh["dp", "tp"], [Replicate()] * 2)
    model.out.weight = nn.Parameter(value)
    return model


def _split(mesh: DeviceMesh) -> nn.Module:
    return split(MLP, mesh)


def _with_buffer(mesh: DeviceMesh) -> nn.Module:
    model = MLP().parallelize(mesh["tp"])
    model.register_buffer("count", distribute_tensor(torch.ones(2), mesh["dp"], [Replicate()]))
    return model


@pytest.mark.parametrize(
    ("make", "over", "match"),
    [
        (_with_partial, "dp", "'out.weight'.*must be Shard or Replicate"),
        (_uneven, "dp", "'out.weight'.*size 3 in dim 0"),
        (_on_two_meshes, "dp", "'out.weight'.*(one axis|parallelize all)"),
        (_with_buffer, "dp", "buffer 'count' is a DTensor.*the mesh to shard over"),
        (_split, "tp", "'up.weight'.*the mesh to shard over.*different slices"),
        (_split, "all", "'tp' would be an axis of data parallelism"),
        (_split, "none", "'up.weight'.*slices of one mesh"),
        (_split, "other", "'up.weight'.*slices of one mesh"),
    ],
)
@on_ranks(4)
def test_unsupported_parameters_are_refused(make: Any, over: str, match: str) -> None:
    mesh = mesh_2d()
    meshes = {"all": mesh, "none": None, "other": init_device_mesh("cpu", (4,))}
    data_mesh = meshes[over] if over in meshes else mesh[over]
    assert_refused(make(mesh), lambda model: graphshard.shard(model, data_mesh), match)


@on_ranks(4)
def test_fp8_of_split_parameters_is_refused() -> None:
    mesh = mesh_2d()
    policy = graphshard.Float8Policy(filter_fn=lambda fqn, shape: True)

    def shard(model: nn.Module) -> None:
        graphshard.shard(model, mesh["dp"], fp8=policy)

    assert_refused(split(MLP, mesh), shard, "'(up|down).weight'.*fp8 is not supported for DTensors")


@on_ranks(4)
def test_muon_refuses_split_parameters() -> None:
    mesh = mesh_2d()
    model = graphshard.shard(split(MLP, mesh), mesh["dp"])
    for name in ("up.weight", "down.weight"):
        param = model.get_parameter(name)
        param.grad = torch.ones_like(param)
        with pytest.raises(ValueError, match=f"Muon cannot step parameter '{name}'"):
            graphshard.optim.Muon([param], lr=0.1).step()


@on_ranks(4)
def test_parameters_from_before_sharding_are_stale() -> None:
    mesh = mesh_2d()
    model = split(MLP, mesh)
    before = list(model.parameters())
    graphshard.shard(model, mesh["dp"])
    for param in before:
        with pytest.raises(RuntimeError, match="graphshard has replaced this parameter"):
            param.sum()


# Gradient clipping.


@on_ranks(4)
def test_clipping_across_meshes_matches_full_parameters() -> None:
    mesh = mesh_2d()
    model, compiled = under_graphshard(MLP, mesh)
    for norm_type in (2.0, float("inf")):
        model.zero_grad()
        compiled(batches(MLP, mesh, 1)[0]).backward()
        full = nn.ParameterList(torch.zeros(p.shape) for p in model.parameters())
        for one, param in zip(full, model.parameters()):
            one.grad = _full(param.grad)
        for max_norm in (1e-2, 1e2):  # the second call has nothing to clip
            ours = graphshard.clip_grad_norm_(model.parameters(), max_norm, norm_type)
            theirs = nn.utils.clip_grad_norm_(full, max_norm, norm_type)
            torch.testing.assert_close(ours, theirs)
            for one, param in zip(full, model.parameters()):
                torch.testing.assert_close(_full(param.grad), one.grad)


@on_ranks(4)
def test_clipping_on_mesh_with_tensor_parallel_axis_first() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    model = graphshard.shard(split(MLP, mesh), mesh["dp"])
    model(torch.ones(5, 6)).backward()
    full = [_full(param.grad) for param in model.parameters()]
    norm = graphshard.clip_grad_norm_(model.parameters(), 1e-2)
    torch.testing.assert_close(norm, nn.utils.get_total_norm(full))
    for param, grad in zip(model.parameters(), full):
        torch.testing.assert_close(_full(param.grad), grad * (1e-2 / norm))


@on_ranks(2)
def test_clipping_counts_partial_gradients_once() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for norm_type, expected in ((2.0, 10.0), (float("inf"), 8.0)):
        value = torch.tensor([3.0, 4.0])
        param = nn.Parameter(distribute_tensor(value, mesh, [Replicate()]))
        param.grad = DTensor.from_local(value, mesh, [Partial()])
        assert graphshard.clip_grad_norm_(param, 1.0, norm_type) == expected


# Forwards that change a parameter, or read it under no_grad.


@on_ranks(4)
def test_compiled_function_of_model_trains_like_fsdp2() -> None:
    mesh = mesh_2d()
    model, eager = split(MLP, mesh), under_fsdp2(MLP, mesh)
    compiled = torch.compile(lambda x: model(x), backend=_backend(mesh), fullgraph=True)
    data = batches(MLP, mesh)
    assert_trains_like_fsdp2(compiled, model, eager, data)


class Scaling(MLP):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.weight.mul_(0.5)
        return super().forward(x)


@pytest.mark.parametrize("is_compiled", [False, True])
@on_ranks(4)
def test_change_of_parameter_in_forward_is_refused(is_compiled: bool) -> None:
    mesh = mesh_2d()
    model = graphshard.shard(split(Scaling, mesh), mesh["dp"])
    call = _compile(model, mesh) if is_compiled else model
    with pytest.raises(BackendError, match=r"changes parameter 'up\.weight' in place"):
        call(batches(MLP, mesh, 1)[0]).backward()


class ReadingEarly(MLP):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            weight = self.up.weight
        assert weight is self.up.weight
        split_x = DTensor.from_local(x, weight.device_mesh, [Replicate()])
        return super().forward(x) + F.linear(split_x, weight).square().sum().full_tensor()


@pytest.mark.parametrize("is_compiled", [False, True])
@on_ranks(4)
def test_parameter_read_under_no_grad_gets_gradient(is_compiled: bool) -> None:
    mesh = mesh_2d()
    model, eager = split(ReadingEarly, mesh), under_fsdp2(ReadingEarly, mesh)
    graphshard.shard(model, mesh["dp"])
    call = _compile(model, mesh) if is_compiled else model
    data = batches(MLP, mesh, 2)
    assert_trains_like_fsdp2(call, model, eager, data, 1e-6)
    with torch.no_grad():
        torch.testing.assert_close(call(data[0]), eager(data[0]))


class TokenMLP(MLP):
    """MLP after a vocab-parallel embedding and a sequence-parallel norm, with DTensor buffers."""

    scale: DTensor
    count: DTensor

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(10, 6)

    def forward(self, ids: Tensor) -> Tensor:
        self.count.add_(1)
        x = F.gelu(self.up(self.norm(self.tokens(ids)))) * self.scale.to_local()
        return self.out(self.down(x)).square().mean()

    @staticmethod
    def batch(rng: torch.Generator) -> Tensor:
        return torch.randint(10, (2, 6), generator=rng)

    def parallelize(self, tp: DeviceMesh) -> TokenMLP:
        plan = {
            "tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(),
        }
        parallelize_module(self, tp, plan)
        scale, count = torch.linspace(0.5, 2.0, 14), torch.tensor(0)
        self.register_buffer("scale", distribute_tensor(scale, tp, [Shard(0)]))
        self.register_buffer("count", distribute_tensor(count, tp, [Replicate()]))
        return self


def _train_with_inductor() -> int:
    """Train with Inductor; return the number of graphs loaded from the cache."""
    mesh = mesh_2d(dp=1)
    model, compiled = under_graphshard(TokenMLP, mesh, compiler="inductor")
    eager = under_fsdp2(TokenMLP, mesh)
    assert_trains_like_fsdp2(compiled, model, eager, batches(TokenMLP, mesh, 1), 1e-5)
    assert model.count.full_tensor() == 1
    return int(torch._dynamo.utils.counters["inductor"]["fxgraph_cache_hit"])


def test_training_with_inductor_loads_graphs_from_cache(tmp_path: Path) -> None:
    # Compiled code depends on the rank's index along tp, to mask tokens whose embeddings are on
    # other ranks.
    env = {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    assert ranks.run_fresh(2, _train_with_inductor, env=env) == [0, 0]
    hits = ranks.run_fresh(2, _train_with_inductor, env=env)
    assert hits == [2, 2] or torch.__version__ < (2, 13)
