"""Parameters read inside a higher-order operator or under a ``torch.func`` transform."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import associative_scan, map, scan
from torch.nn import functional as F
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import graphshard
from tests.numerics.compare import Twins, assert_close, assert_same, draw, world_mesh
from tests.ranks import on_ranks

DIM, HEADS = 6, 2


class Reads(nn.Module):
    def __init__(self, compute: Callable[[Reads, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self, x).square().mean()


def _branches(model: Reads, x: Tensor) -> Tensor:
    return torch.cond(
        x.sum() > 0,
        lambda x: model.second(model.first(x)).sin(),
        lambda x: model.first(model.first(x)),
        (x,),
    )


def _branches_in_branches(model: Reads, x: Tensor) -> Tensor:
    return torch.cond(
        x[0].sum() > 0, lambda x: _branches(model, x), lambda x: model.second(x), (x,)
    )


@torch.compiler.nested_compile_region
def _marked(layer: nn.Module, x: Tensor) -> Tensor:
    return layer(x).cos()


def _regions_in_branches(model: Reads, x: Tensor) -> Tensor:
    return torch.cond(
        x.sum() > 0,
        lambda x: _marked(model.first, _marked(model.first, x)),
        lambda x: _marked(model.first, x),
        (x,),
    )


@torch.compiler.nested_compile_region
def _marked_branches(layer: nn.Module, x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, lambda x: layer(x).sin(), lambda x: layer(x).cos(), (x,))


def _branches_in_regions(model: Reads, x: Tensor) -> Tensor:
    x = _marked_branches(model.first, x)
    # The inputs of these calls, unlike that of the first, require gradients: they share a trace.
    return _marked_branches(model.second, _marked_branches(model.first, x))


@torch.compiler.nested_compile_region
def _marked_checkpoint(layer: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(lambda x: layer(x).sin(), x, use_reentrant=False)


def _checkpoints_in_regions_in_branches(model: Reads, x: Tensor) -> Tensor:
    x = _marked_checkpoint(model.first, model.first(x))
    return torch.cond(
        x.sum() > 0,
        lambda x: _marked_checkpoint(model.second, _marked_checkpoint(model.first, x)),
        lambda x: model.second(x),
        (x,),
    )


@torch.compiler.nested_compile_region
def _projected(weight: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, weight).sin()


def _parameters_passed_to_regions(model: Reads, x: Tensor) -> Tensor:
    return _projected(model.second.weight, _projected(model.first.weight, model.first(x)))


def _steps(model: Reads, x: Tensor) -> Tensor:
    def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.tanh(model.first(row) + state)
        return state, model.second(state)

    return scan(step, torch.zeros_like(x[0]), x)[1]


def _reduced_in_a_tree(model: Reads, x: Tensor) -> Tensor:
    return associative_scan(torch.add, model.first(x), 0, combine_mode="generic")


def _mapped(model: Reads, x: Tensor) -> Tensor:
    return map(lambda row: model.second(model.first(row).sin()), x)


def _vmapped(model: Reads, x: Tensor) -> Tensor:
    return model.second(torch.vmap(model.first)(x))


def _gradient(model: Reads, x: Tensor) -> Tensor:
    return model.second(torch.func.grad(lambda x: model.first(x).sin().sum())(x))


def _product_with_jacobian(model: Reads, x: Tensor) -> Tensor:
    return torch.stack(torch.func.jvp(lambda x: model.first(x).sin(), (x,), (x.cos(),)))


def _hessian(model: Reads, x: Tensor) -> Tensor:
    return torch.func.hessian(lambda x: model.first(x).sin().sum())(x[0])


def _loss(weight: Tensor, x: Tensor) -> Tensor:
    return F.linear(x, weight).sin().square().mean()


def _gradients_of_parameters(model: Reads, x: Tensor) -> Tensor:
    x = torch.func.grad(lambda x: _loss(model.first.weight, x))(x)
    with torch.no_grad():
        gradient = torch.func.grad(_loss)(model.first.weight, x)
    _, pull = torch.func.vjp(lambda weight: _loss(weight, x), model.second.weight)
    return model.second(F.linear(x, model.first.weight - gradient)) + pull(torch.ones(()))[0].sum(0)


def _gradients_of_gradients(model: Reads, x: Tensor) -> Tensor:
    def norm(x: Tensor) -> Tensor:
        return torch.func.grad(_loss)(model.first.weight, x).square().sum()

    return torch.func.grad(norm)(model.second(x))


def _per_sample_gradients(model: Reads, x: Tensor) -> Tensor:
    return torch.vmap(torch.func.grad(_loss), (None, 0))(model.first.weight, x).sum(1)


def _jacobians_of_parameters(model: Reads, x: Tensor) -> Tensor:
    backward = torch.func.jacrev(lambda bias: F.linear(x, model.first.weight, bias).sin().sum(0))
    forward = torch.func.jacfwd(lambda bias: (model.first(x) * bias).sin().sum(0))
    return backward(model.first.bias) @ forward(model.second.bias)


def _per_sample_gradients_of_gradients(model: Reads, x: Tensor) -> Tensor:
    def gradient(row: Tensor) -> Tensor:
        return torch.func.grad(lambda row: model.first(row).sin().sum())(row)

    twice = torch.func.grad(lambda row: gradient(row).square().sum())
    return model.first(x) + torch.vmap(twice)(x)  # also a read outside


def _product_with_jacobian_in_mode(model: Reads, x: Tensor) -> Tensor:
    def first(x: Tensor) -> Tensor:
        with torch.enable_grad():
            return model.first(x).sin()

    with torch.no_grad():
        y, product = torch.func.jvp(first, (x,), (torch.ones_like(x),))
        norm = model.first.weight.norm()
    return model.second(y + product) / norm + model.first(x)


def _scanned_parameters(model: Reads, x: Tensor) -> Tensor:
    def step(state: Tensor, row: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.tanh(model.second(state) + row)
        return state, state * 2

    return model.second(scan(step, model.first.bias, model.first.weight)[1]) + x.sum()


def _parameters_reduced_in_a_tree(model: Reads, x: Tensor) -> Tensor:
    weight = associative_scan(torch.add, model.first.weight, 0, combine_mode="generic")
    return model.second(x @ weight)


IN_CODE = (
    _branches_in_branches,
    _regions_in_branches,
    _branches_in_regions,
    _checkpoints_in_regions_in_branches,
    _parameters_passed_to_regions,
    _reduced_in_a_tree,
    _parameters_reduced_in_a_tree,
    _mapped,
)
TRANSFORMED = (
    _vmapped,
    _gradient,
    _product_with_jacobian,
    _hessian,
    _gradients_of_parameters,
    _gradients_of_gradients,
    _per_sample_gradients,
    _jacobians_of_parameters,
    _product_with_jacobian_in_mode,
)


def _rows(generator: torch.Generator) -> Tensor:
    """Return rows with a positive sum on about half of the ranks and steps."""
    return torch.randn(4, DIM, generator=generator)


NEEDS_2_13 = pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason="torch 2.11 mistakes inputs of scan for aliases of outputs, even without shards",
)


@pytest.mark.parametrize(
    ("compute", "compiler"),
    [
        *((compute, "aot_eager") for compute in (*IN_CODE, *TRANSFORMED)),
        pytest.param(_steps, "aot_eager", marks=NEEDS_2_13),
        pytest.param(_scanned_parameters, "aot_eager", marks=NEEDS_2_13),
        (_branches, "inductor"),
    ],
)
@on_ranks(2)
def test_training_matches_unsharded_model(
    compute: Callable[[Reads, Tensor], Tensor], compiler: str
) -> None:
    twins = Twins(Reads(compute), compiler=compiler)
    twins.train(_rows)
    plans = twins.backend.plans
    assert plans and all("first.weight" in {p.fqn for p in plan.params} for plan in plans)


@pytest.mark.parametrize("compute", [_gradients_of_parameters, _per_sample_gradients_of_gradients])
@on_ranks(2)
def test_gradients_of_gathers_along_other_dim_match_unsharded_model(
    compute: Callable[[Reads, Tensor], Tensor],
) -> None:
    twins = Twins(Reads(compute), overrides={"*": {"dim": -1}})
    twins.backward(draw(_rows, 0))
    assert_same(twins.model, twins.reference)


@on_ranks(2)
def test_gradients_of_branches_accumulate() -> None:
    twins = Twins(Reads(_branches))
    for step in range(2):
        with graphshard.no_sync(twins.model):
            twins.backward(draw(_rows, 2 * step))
        twins.backward(draw(_rows, 2 * step + 1))
        twins.check()


@on_ranks(2)
def test_ranks_may_map_different_numbers_of_rows() -> None:
    twins = Twins(Reads(_mapped), dynamic=True)
    for step in range(2):
        twins.backward([torch.randn(3 + 2 * ((rank + step) % 2), DIM) for rank in range(2)])
    twins.check()


# Operators that cannot be trained on a CPU.


class Loop(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        (halved,) = torch.while_loop(
            lambda x: x.abs().sum() > 1, lambda x: (self.layer(x).tanh() / 2,), (x,)
        )
        return halved

    def batch(self) -> Tensor:
        """Return rows that need a different number of iterations on each rank."""
        return torch.randn(4, DIM) * 5 ** torch.distributed.get_rank()


class LearnedBias(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HEADS * 8, 3 * HEADS * 8)
        self.slopes = nn.Parameter(torch.tensor([0.5, -0.25]))

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(x).unflatten(-1, (3, HEADS, 8)).permute(2, 0, 3, 1, 4)
        # Torch 2.11 does not accept three views of one tensor.
        query, key, value = (part.contiguous() for part in heads)

        def with_bias(score: Tensor, b: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score + self.slopes[head] * (i - j)

        return flex_attention(query, key, value, score_mod=with_bias).square().mean()

    def batch(self) -> Tensor:
        return torch.randn(2, 16, HEADS * 8)


@pytest.mark.parametrize(
    ("model", "compiler"),
    [(Loop(), "inductor"), (LearnedBias(), "aot_eager")],
    ids=["while_loop", "flex_attention"],
)
@on_ranks(2)
def test_inference_matches_unsharded_model(model: Loop | LearnedBias, compiler: str) -> None:
    reference, x = copy.deepcopy(model), model.batch()
    backend = graphshard.backend(world_mesh(), compiler=compiler)
    with torch.no_grad():
        assert_close("output", torch.compile(model, backend=backend)(x), reference(x))
    assert [len(plan.params) for plan in backend.plans] == [len([*reference.parameters()])]
