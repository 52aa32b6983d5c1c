"""Training on one rank: no collectives, and gradients as in plain torch.compile or FSDP2."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import graphshard
from tests import ranks
from tests.numerics.compare import whole
from tests.ranks import on_ranks

BF16 = MixedPrecisionPolicy(torch.bfloat16, torch.float32)


class _Odd(nn.Module):
    """Model with tied weights, a convolution, and two parameters with equal gradients.

    Returns a parameter and a view of another.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 6)
        self.conv = nn.Conv1d(6, 6, 3, padding=1)
        self.norm = nn.LayerNorm(6)
        self.left, self.right = (nn.Parameter(torch.randn(6, 6)) for _ in range(2))
        self.head = nn.Linear(6, 12, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.conv(self.embedding(ids).transpose(1, 2)).transpose(1, 2)
        x = self.norm(x) @ (self.left + self.right)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())
        return loss, self.left, self.right[2:]


def _trained(called: Any, model: nn.Module) -> dict[str, Tensor]:
    """Accumulate gradients over two backwards; assert that they share no memory."""
    for seed in range(2):
        ids = torch.randint(12, (4, 5), generator=torch.Generator().manual_seed(seed))
        loss, left, right = called(ids)
        (loss + left.sum() + (right * right).sum()).backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    assert len({grad.data_ptr() for grad in map(_local, grads.values())}) == len(grads)
    return {name: whole(grad) for name, grad in grads.items()}  # type: ignore[arg-type]


def _local(grad: Any) -> Tensor:
    local: Tensor = grad.to_local() if hasattr(grad, "to_local") else grad
    assert local.is_contiguous()
    return local


def _by_plain(model: nn.Module) -> Any:
    return torch.compile(model, backend="aot_eager")


def _by_fsdp2(model: nn.Module) -> Any:
    return fully_shard(model, mesh=init_device_mesh("cpu", (1,)), mp_policy=BF16)


def _assert_same(theirs: Callable[[nn.Module], Any], mesh: tuple[int, ...], options: Any) -> None:
    torch.manual_seed(0)
    model = _Odd()
    other = copy.deepcopy(model)
    backend = graphshard.backend(init_device_mesh("cpu", mesh), compiler="aot_eager", **options)
    ours = _trained(torch.compile(model, backend=backend, fullgraph=True), model)
    expected = _trained(theirs(other), other)
    assert ours.keys() == expected.keys()
    for name, grad in expected.items():
        assert torch.equal(ours[name], grad), name
    assert len(backend.plans) == 2 and not any(plan.buckets for plan in backend.plans)


@pytest.mark.parametrize(("mesh", "reshard"), [((1,), True), ((1, 1), False)])
def test_gradients_match_plain_compile(mesh: tuple[int, ...], reshard: bool) -> None:
    ranks.run(1, _assert_same, _by_plain, mesh, {"reshard_after_forward": reshard})


@pytest.mark.low_precision
def test_bf16_gradients_match_fsdp2() -> None:
    ranks.run(1, _assert_same, _by_fsdp2, (1,), {"mp_policy": BF16})


@on_ranks(1)
def test_casts_are_not_saved_for_backward() -> None:
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
    options = {"mp_policy": BF16, "compiler": "aot_eager"}
    backend = graphshard.backend(init_device_mesh("cpu", (1,)), **options)
    compiled, saved = torch.compile(model, backend=backend), list[Tensor]()

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    x = torch.randn(4, 16)
    compiled(x).sum().backward()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        compiled(x)
    assert saved and all(t.shape != (16, 16) or t.dtype is torch.float32 for t in saved)


@on_ranks(1)
def test_inference_matches_plain_model() -> None:
    model = _Odd().eval()
    ids = torch.arange(10).view(2, 5)
    with torch.no_grad():
        expected = [tensor.clone() for tensor in model(ids)]
        backend = graphshard.backend(init_device_mesh("cpu", (1,)), compiler="aot_eager")
        ours = torch.compile(model, backend=backend)(ids)
        assert all(map(torch.equal, ours, expected))
        [plan] = backend.plans
        assert not plan.buckets
        ours[1].zero_()  # must not change the parameter
        assert torch.equal(whole(model.left), expected[1])


@on_ranks(1)
def test_scalar_gradient_is_not_reduced() -> None:
    class Scaled(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.scale = nn.Parameter(torch.tensor(1.5))

        def forward(self, x: Tensor) -> Tensor:
            return (self.scale * super().forward(x)).square().mean()

    model, x = Scaled(), torch.randn(4, 3)
    plain = copy.deepcopy(model)
    backend = graphshard.backend(init_device_mesh("cpu", (1,)), compiler="aot_eager")
    torch.compile(model, backend=backend)(x).backward()
    plain(x).backward()
    assert not any(plan.buckets for plan in backend.plans)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(whole(ours.grad), theirs.grad)  # type: ignore[arg-type]
