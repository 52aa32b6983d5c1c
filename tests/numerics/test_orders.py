"""Edge cases of sharding, loading, eager reads and clipping, such as differences between ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import graphshard
from graphshard.errors import BackendError
from graphshard.integrations.common import shard_and_compile
from tests.numerics.compare import whole, world_mesh
from tests.ranks import on_ranks


class _TwoMatrices(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        values = {"u": 1.0, "v": 5.0}
        for name in sorted(values, reverse=dist.get_rank() == 1):
            self.register_parameter(name, nn.Parameter(torch.full((2, 2), values[name])))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.get_parameter("u")


@on_ranks(2)
def test_eager_gather_pairs_parameters_by_name() -> None:
    model = graphshard.shard(_TwoMatrices(), world_mesh())
    assert torch.equal(model(torch.ones(1, 2)), torch.full((1, 2), 2.0))


@on_ranks(2)
def test_full_state_for_parameters_in_other_order_is_refused() -> None:
    model = graphshard.shard(_TwoMatrices(), world_mesh())
    full = graphshard.full_state_dict(model)
    with pytest.raises(BackendError, match=r"(?s)sharded parameter 0.*in the same order"):
        graphshard.load_full_state_dict(model, full)


@on_ranks(2)
def test_mesh_with_descending_ranks_is_refused() -> None:
    mesh = DeviceMesh("cpu", [1, 0])
    with pytest.raises(ValueError, match=r"mesh has ranks \[1, 0\]: .*ascend"):
        graphshard.shard(nn.Linear(4, 4), mesh)


@on_ranks(2)
def test_meta_device_on_one_rank_is_refused() -> None:
    with torch.device("meta" if dist.get_rank() else "cpu"):
        model = nn.Linear(4, 4)
    with pytest.raises(BackendError, match="meta device on all ranks, or on none"):
        graphshard.shard(model, world_mesh())


@on_ranks(2)
def test_divide_factor_applies_to_all_parts() -> None:
    model = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(2)))
    graphshard.shard(model[0], world_mesh())
    graphshard.shard(model, world_mesh())
    graphshard.set_gradient_divide_factor(model, 1.0)
    model.append(nn.Linear(2, 2, bias=False))
    graphshard.shard(model, world_mesh())
    reference = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(3)))
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        theirs.data = whole(ours.detach())
    for called in (model, reference):
        called(torch.ones(1, 2)).sum().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert ours.grad is not None and theirs.grad is not None
        torch.testing.assert_close(whole(ours.grad), 2 * theirs.grad)  # the sum over two ranks


@on_ranks(2)
def test_gradient_from_before_sharding_is_kept() -> None:
    model = nn.Sequential(nn.Embedding(6, 3, sparse=True), nn.Linear(3, 1, bias=False))
    model[1].weight.register_hook(lambda grad: grad * 3)
    model(torch.tensor([1, 4])).sum().backward()
    expected = [param.grad.to_dense() for param in model.parameters() if param.grad is not None]
    graphshard.shard(model, world_mesh())
    for param, grad in zip(model.parameters(), expected, strict=True):
        assert param.grad is not None
        torch.testing.assert_close(whole(param.grad), grad)


@on_ranks(2)
def test_eager_read_after_step_in_same_call_is_current() -> None:
    model = nn.Linear(2, 2, bias=False)
    graphshard.shard(model, world_mesh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    @torch.compiler.disable
    def train_once(x: Tensor) -> Tensor:
        loss = (x @ model.weight.t()).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    class Loop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def forward(self, x: Tensor) -> Tensor:
            return train_once(x) - train_once(x)

    loop = graphshard.shard(Loop(), world_mesh())
    difference = loop(torch.ones(1, 2))
    # Each of the four weights decreases by 0.5.
    torch.testing.assert_close(difference, torch.tensor(2.0))


@on_ranks(2)
def test_sharding_ignores_optimizer_that_failed_to_initialize() -> None:
    model = nn.Linear(2, 2)
    try:
        torch.optim.AdamW(model.parameters(), lr=-1)
    except ValueError as error:  # its traceback keeps the optimizer alive
        kept = error
    graphshard.shard(model, world_mesh())
    assert isinstance(model.weight, DTensor) and kept


@on_ranks(2)
def test_integrations_accept_iterator_of_ignored_parameters() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    options = {"ignored_params": model[1].parameters(), "mesh": world_mesh()}
    shard_and_compile(model, graphshard.backend(**options), options)
    assert isinstance(model[0].weight, DTensor)
    assert type(model[1].weight) is nn.Parameter


@pytest.mark.parametrize(("norm_type", "value"), [(math.inf, -2.0), ("inf", 3 + 4j)])
@on_ranks(2)
def test_infinity_norm_includes_ranks_without_rows(norm_type: Any, value: complex) -> None:
    x = torch.full((1, 8), value)
    model = graphshard.shard(nn.Linear(8, 1, bias=False, dtype=x.dtype), world_mesh())
    model(x).sum().abs().backward()
    norm = graphshard.clip_grad_norm_(model.parameters(), 1.0, norm_type)
    assert float(norm) == pytest.approx(abs(value))
    assert torch.allclose(whole(model.weight.grad).abs(), torch.ones(1, 8))


@pytest.mark.parametrize("bad_rank", [0, 1])
@on_ranks(2)
def test_infinity_norm_keeps_nan_of_any_rank(bad_rank: int) -> None:
    model = graphshard.shard(nn.Linear(8, 4), world_mesh())
    model(torch.ones(1, 8)).sum().backward()
    if dist.get_rank() == bad_rank:
        model.weight.grad.to_local()[0, 0] = math.nan
    with pytest.raises(RuntimeError, match="norm of the gradients is nan"):
        graphshard.clip_grad_norm_(model.parameters(), 1.0, math.inf, error_if_nonfinite=True)
    assert graphshard.clip_grad_norm_(model.parameters(), 1.0, math.inf).isnan()
    assert whole(model.bias.grad).isnan().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("scale", [320.0, 2.0**-14])  # squares are infinite or 0 in float16
@on_ranks(2)
def test_norm_of_narrow_gradients_is_summed_in_float32(scale: float, dtype: torch.dtype) -> None:
    model = graphshard.shard(nn.Linear(4, 4, bias=False, dtype=dtype), world_mesh())
    model(torch.full((1, 4), scale, dtype=dtype)).sum().backward()
    norm = graphshard.clip_grad_norm_(model.parameters(), scale)
    assert norm.dtype == dtype and norm == 4 * scale
    clipped = whole(model.weight.grad).float()
    torch.testing.assert_close(clipped, torch.full((4, 4), scale / 4), rtol=2e-2, atol=0.0)


@on_ranks(2)
def test_parameter_whose_gradients_have_another_dtype_is_refused() -> None:
    model = nn.Linear(4, 4, dtype=torch.bfloat16)
    model.bias.grad_dtype = torch.float32
    with pytest.raises(BackendError, match=r"'bias' has grad_dtype=torch.float32.*reduce_dtype"):
        graphshard.shard(model, world_mesh())
    assert type(model.weight) is nn.Parameter
    model.bias.grad_dtype = torch.bfloat16
    graphshard.shard(model, world_mesh())


@pytest.mark.parametrize("norm_type", [0, -math.inf, math.nan])
def test_norm_type_must_be_positive(norm_type: float) -> None:
    with pytest.raises(ValueError, match=f"norm_type={float(norm_type)}: must be positive"):
        graphshard.clip_grad_norm_(nn.Linear(2, 2).parameters(), 1.0, norm_type)
