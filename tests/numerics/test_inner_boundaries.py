"""`mp_policy` of an inner module, compared with eager FSDP2 wrapping that module."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint

import graphshard
from tests import ranks
from tests.numerics.compare import (
    assert_equal,
    assert_history_rounded,
    by_fsdp2,
    compare_with_fsdp2,
    compile_sharded,
    draw,
    train_steps,
    world_mesh,
)
from tests.ranks import on_ranks

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Block(nn.Module):
    """Residual block whose output is float32 because of a float32 buffer, as with rotary tables."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.linear = nn.Linear(6, 6)
        self.register_buffer("table", torch.randn(6))

    def forward(self, x: Tensor, more: dict[str, Tensor]) -> Tensor:
        y = F.gelu(self.linear(self.norm(x).to(self.linear.weight.dtype)))
        return x + y * more["scale"] * self.table


class Stack(nn.Module):
    """Model of blocks; a block with a boundary casts the float32 output of the previous block."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(7, 6)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = self.run(block, x, {"scale": torch.full((), 0.5)})
        return self.head(x.to(self.head.weight.dtype)).square().mean()

    def run(self, block: nn.Module, x: Tensor, more: dict[str, Tensor]) -> Any:
        return block(x, more)

    @staticmethod
    def batch(rng: torch.Generator) -> Tensor:
        return torch.randn(5, 7, generator=rng)


class Checkpointed(Stack):
    def run(self, block: nn.Module, x: Tensor, more: dict[str, Tensor]) -> Any:
        return checkpoint(block, x, more, use_reentrant=False)


class Breaking(Stack):
    def run(self, block: nn.Module, x: Tensor, more: dict[str, Tensor]) -> Any:
        torch._dynamo.graph_break()
        return block(x, more)


@dataclass
class Case:
    """Policies of modules that FSDP2 wraps, and equivalent policies for graphshard.

    Attributes:
        wrapped: policies by FQN of the wrapped module; "": the model itself.
        ours: equivalent policies by glob; None: `wrapped`.
        kind: class of the model.
    """

    wrapped: dict[str, MixedPrecisionPolicy]
    ours: dict[str, MixedPrecisionPolicy] | None = None
    kind: type[Stack] = Stack


HALF = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
OUT = MixedPrecisionPolicy(param_dtype=BF16, output_dtype=FP32)
KEEP_INPUTS = MixedPrecisionPolicy(param_dtype=BF16, cast_forward_inputs=False)
UNCAST = MixedPrecisionPolicy(BF16, cast_forward_inputs=False)
ROUGH = MixedPrecisionPolicy(reduce_dtype=BF16, output_dtype=BF16)
FLOAT_NORM = MixedPrecisionPolicy(param_dtype=FP32, output_dtype=BF16)
BLOCKS = ["blocks.0", "blocks.1"]
NORMS = [f"{name}.norm" for name in BLOCKS]


def _each(names: list[str], policy: MixedPrecisionPolicy) -> dict[str, MixedPrecisionPolicy]:
    return dict.fromkeys(names, policy)


CASES = {
    "every block": Case({"": HALF, **_each(BLOCKS, HALF)}, {"": HALF, "blocks.*": HALF}),
    "blocks alone": Case(_each(BLOCKS, HALF), {"blocks.?": HALF}),
    "outputs are cast": Case({"": HALF, **_each(BLOCKS, OUT)}, {"": HALF, "blocks": OUT}),
    "inputs are cast at one boundary": Case({"": HALF, "blocks.0": KEEP_INPUTS, "blocks.1": HALF}),
    "norms compute in float32": Case(
        {"": HALF, **_each(BLOCKS, HALF), **_each(NORMS, FLOAT_NORM)},
        {"": HALF, "blocks.*": HALF, "*norm": FLOAT_NORM},
    ),
    "another dtype in one block": Case(
        {"": HALF, **_each(BLOCKS, HALF), "blocks.1": MixedPrecisionPolicy(FP16, FP32, FP32)},
        {"": HALF, "*blocks.*": HALF, "blocks.1": MixedPrecisionPolicy(FP16, FP32, FP32)},
    ),
    "the model by a glob": Case({"": ROUGH}, {"*": ROUGH}),
    "checkpointed": Case(
        {"": HALF, **_each(BLOCKS, HALF)}, {"": HALF, "blocks.*": HALF}, Checkpointed
    ),
    "graph breaks": Case({"": HALF, **_each(BLOCKS, HALF)}, {"": HALF, "blocks.*": HALF}, Breaking),
}


@pytest.mark.low_precision
@pytest.mark.parametrize("name", compare_with_fsdp2(CASES, ("checkpointed",)))
def test_inner_policy_casts_at_module_boundary_like_fsdp2(name: str) -> None:
    ranks.run(2, _train, CASES[name])


def _train(case: Case) -> None:
    torch.manual_seed(0)
    ours = case.kind()
    theirs = by_fsdp2(copy.deepcopy(ours), case.wrapped)
    backend = graphshard.backend(world_mesh(), compiler="aot_eager", **_arguments(case))
    compiled = torch.compile(ours, backend=backend, fullgraph=case.kind is not Breaking)
    batches = [draw(Stack.batch, step)[dist.get_rank()] for step in range(2)]
    trained = train_steps(compiled, ours, batches)
    assert_equal(trained, train_steps(theirs, theirs, batches))


def _arguments(case: Case) -> dict[str, Any]:
    policies = dict(case.ours or case.wrapped)
    whole_model = policies.pop("", MixedPrecisionPolicy())
    return {
        "mp_policy": whole_model,
        "overrides": {glob: {"mp_policy": policy} for glob, policy in policies.items()},
    }


@pytest.mark.low_precision
@on_ranks(2)
def test_inner_policy_casts_at_module_boundary_with_inductor() -> None:
    torch.manual_seed(0)
    ours = Stack()
    theirs = by_fsdp2(copy.deepcopy(ours), {"": HALF, **_each(BLOCKS, HALF)})
    exact = by_fsdp2(copy.deepcopy(ours), {})
    overrides = {"blocks.*": {"mp_policy": HALF}}
    compiled = compile_sharded(ours, compiler="inductor", mp_policy=HALF, overrides=overrides)
    batches = [draw(Stack.batch, step)[dist.get_rank()] for step in range(2)]
    trained = train_steps(compiled, ours, batches)
    assert_history_rounded(
        trained, *(train_steps(model, model, batches) for model in (theirs, exact))
    )


class Embedder(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        assert x.dtype == FP16
        return x * 2


class WithEmbedder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({"embedder": Embedder()})
        self.linear = nn.Linear(7, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.parts["embedder"](x)
        assert y.dtype == FP32
        return self.linear(y).square().mean()


@on_ranks(2)
def test_module_without_parameters_casts_at_its_boundary() -> None:
    overrides = {"parts": {"mp_policy": MixedPrecisionPolicy(FP16, output_dtype=FP32)}}
    compiled = compile_sharded(WithEmbedder(), overrides=overrides)
    for _ in range(2):
        compiled(torch.ones(5, 7)).backward()


@pytest.mark.parametrize(
    ("overrides", "match"),
    [
        ({"norms.*": {"mp_policy": HALF}}, r"overrides\['norms.\*'\] matches no parameter"),
        ({"blocks.*.bias": {"mp_policy": OUT}}, "output_dtype=torch.float32, but matches"),
        ({"blocks.*.bias": {"mp_policy": UNCAST}}, "cast_forward_inputs=False, .* their module"),
        ({"block.0.up": {"shard": False}}, r"no parameter: .* \d+ .* 'blocks\.0\..*'.{,99}$"),
        ({"blocks.*.dtypes": {"shard": False}}, "matches no parameter"),
    ],
)
@on_ranks(2)
def test_glob_without_effect_raises(overrides: dict[str, Any], match: str) -> None:
    model = Stack()
    with pytest.raises(ValueError, match=match):
        graphshard.shard(model, world_mesh(), overrides=overrides)
    assert type(model.head.weight) is nn.Parameter


@on_ranks(2)
def test_glob_of_module_covers_all_its_parameters() -> None:
    model = Stack()
    graphshard.shard(model, world_mesh(), overrides={"blocks.1": {"shard": False}})
    replicated = [n for n, p in model.named_parameters() if p.placements[0].is_replicate()]
    assert replicated == [n for n, _ in model.named_parameters() if n.startswith("blocks.1.")]
