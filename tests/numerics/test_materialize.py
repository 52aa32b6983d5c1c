"""`graphshard.materialize`, whose values do not depend on the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

import graphshard
from graphshard._torch.distributed import fake_ranks
from tests import ranks
from tests.models import GPT
from tests.numerics.compare import compile_sharded, whole, world_mesh
from tests.ranks import on_ranks


class Tricky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, padding_idx=3)
        self.lin = nn.Linear(6, 11)
        self.tied = nn.Linear(6, 11, bias=False)
        self.tied.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(11)
        self.register_buffer("angles", torch.arange(5.0))
        self.register_buffer("twice", torch.zeros(5), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out = self.lin(self.embed(ids).mean(1)) + self.tied(self.embed(ids).mean(1))
        return (self.norm(out) * self.angles.sum()).square().mean()

    def init_weights(self) -> None:
        nn.init.trunc_normal_(self.embed.weight, std=0.02)
        self.embed.weight.data[3] = 0
        bound = 1 / math.sqrt(self.lin.weight.shape[1])
        for row in self.lin.weight.data:
            row.uniform_(-bound, bound)
        self.lin.weight.data[5:].mul_(2)
        self.lin.bias.data = torch.full_like(self.lin.bias, 0.5)
        self.norm.reset_parameters()
        self.angles = 1.0 / 10 ** torch.arange(5, device=self.angles.device)
        self.twice.copy_(self.angles).mul_(2)


def _materialized(kind: Callable[[], nn.Module], init: Any = None, **options: Any) -> nn.Module:
    torch.manual_seed(7 + dist.get_rank())  # only the first rank's seed matters
    with torch.device("meta"):
        model = kind()
    graphshard.shard(model, world_mesh(), **options)
    graphshard.materialize(model, init)
    return model


def _values(model: nn.Module) -> dict[str, torch.Tensor]:
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: whole(value).cpu() for name, value in named}


def _by_ranks(kind: Callable[[], nn.Module], init: Any = None, **options: Any) -> Any:
    model = _materialized(kind, init, **options)
    assert not any(value.is_meta for value in (*model.parameters(), *model.buffers()))
    return _values(model)


KINDS: list[Any] = [Tricky, GPT, lambda: nn.LSTM(5, 7), lambda: nn.MultiheadAttention(6, 2)]


@pytest.mark.parametrize("number", range(len(KINDS)))
def test_values_do_not_depend_on_number_of_ranks(number: int) -> None:
    found = [ranks.run(world, _numbered, number)[0] for world in (1, 2)]
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def _numbered(number: int) -> Any:
    return _by_ranks(KINDS[number])


@on_ranks(2)
def test_init_may_write_rows_and_data() -> None:
    model = _materialized(Tricky)
    values = _values(model)
    embed, weight = values["embed.weight"], values["lin.weight"]
    assert model.get_parameter("tied.weight") is model.get_parameter("embed.weight")
    assert (embed[3] == 0).all() and (embed[[0, 1, 2, 4]] != 0).all()
    assert 0.005 < embed.std() < 0.05
    assert weight[5:].abs().max() > 1 / math.sqrt(6) > weight[:5].abs().max()
    assert weight.unique().numel() == weight.numel()
    assert (values["lin.bias"] == 0.5).all()
    assert torch.equal(values["angles"], 1.0 / 10 ** torch.arange(5))
    assert torch.equal(values["twice"], 2 * values["angles"])
    assert values["norm.running_var"].eq(1).all() and values["norm.num_batches_tracked"] == 0
    compiled = compile_sharded(model)
    for _ in range(2):
        compiled(torch.randint(11, (4, 5))).backward()


class _Fills(nn.Module):
    def __init__(self, part: nn.Linear, value: float) -> None:
        super().__init__()
        self.part, self.value = part, value

    def reset_parameters(self) -> None:
        nn.init.constant_(self.part.weight, self.value)


def _with_parts() -> nn.Module:
    shared = nn.Linear(6, 6)
    return nn.Sequential(nn.MultiheadAttention(6, 2), _Fills(shared, 1.0), _Fills(shared, 2.0))


class _InitializedByAttributes(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 6)
        self.weight.gain = self.bias.gain = 0.5
        self.weight._is_hf_initialized = True  # as if transformers had written the values

    def init_weights(self) -> None:
        for param in self.parameters():
            if not getattr(param, "_is_hf_initialized", False):
                nn.init.normal_(param, std=param.gain)


@on_ranks(2)
def test_init_may_read_attributes_of_parameters() -> None:
    model = _materialized(_InitializedByAttributes)
    assert model.weight.full_tensor().std() < 1 and model.weight.gain == 0.5


@on_ranks(2)
def test_parents_are_initialized_after_their_children() -> None:
    values = _values(_materialized(_with_parts))
    assert (values["0.out_proj.bias"] == 0).all()
    assert (values["1.part.weight"] == 2).all() and values["1.part.bias"].any()


def _normal(model: nn.Module) -> None:
    for param in model.parameters():
        nn.init.normal_(param, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    "options",
    [{}, {"offload_policy": CPUOffloadPolicy()}, {"overrides": {"*bias": {"shard": False}}}],
)
def test_custom_init_does_not_depend_on_number_of_ranks(options: dict[str, Any]) -> None:
    one, two = ranks.run(2, _by_ranks, GPT, _normal, **options)
    assert all(torch.equal(value, two[name]) for name, value in one.items())
    assert all(value.std() > 0.5 for value in one.values() if value.numel() > 8)


def _half(model: nn.Module) -> None:
    nn.init.zeros_(model.lin.weight)


def _reads(model: nn.Module) -> None:
    if model.lin.weight.sum() > 0:
        nn.init.zeros_(model.lin.weight)


def _fails(model: nn.Module) -> None:
    raise RuntimeError("no metadata")


def _forgets_buffers(model: nn.Module) -> None:
    for param in model.parameters():
        nn.init.zeros_(param)


@on_ranks(2)
def test_invalid_init_raises_and_changes_nothing() -> None:
    with torch.device("meta"):
        model = Tricky()
    with pytest.raises(ValueError, match="Tricky is not sharded"):
        graphshard.materialize(model)
    graphshard.shard(model, world_mesh())
    before = dict(model.named_buffers())
    with pytest.raises(ValueError, match=r"does not write 66 of the 66 elements of 'embed.weight'"):
        graphshard.materialize(model, _half)
    with pytest.raises(RuntimeError, match=r"^no metadata$"):
        graphshard.materialize(model, _fails)
    with pytest.raises(ValueError, match="init reads a parameter"):
        graphshard.materialize(model, _reads)
    assert all(param.is_meta for param in model.parameters())
    assert all(value is before[name] for name, value in model.named_buffers())
    with pytest.raises(ValueError, match="does not write the buffer 'angles' of Tricky"):
        graphshard.materialize(model, _forgets_buffers)
    graphshard.materialize(model)
    assert compile_sharded(model)(torch.randint(11, (4, 5))).isfinite()


@on_ranks(2)
def test_initialized_parameters_and_buffers_keep_their_values() -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 6)
    model.register_buffer("kept", torch.ones(3))
    graphshard.shard(model, world_mesh())
    graphshard.materialize(model)
    values = model.weight.full_tensor()
    graphshard.materialize(model)
    assert torch.equal(model.kept, torch.ones(3))
    assert torch.equal(model.weight.full_tensor(), values)


class _Tables(nn.Module):
    """Module with complex, bool and integer tensors; `write` initializes some of them."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)
        self.phases = nn.Parameter(torch.ones(4, 2, dtype=torch.complex64))
        self.codes = nn.Parameter(torch.ones(4, dtype=torch.int32), requires_grad=False)
        self.flags = nn.Parameter(torch.ones(4, dtype=torch.bool), requires_grad=False)
        self.register_buffer("causal", torch.ones(4, 4, dtype=torch.bool))
        self.register_buffer("angles", torch.ones(4, dtype=torch.complex64))
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.uint8))
        self.register_buffer("ids", torch.ones(4, dtype=torch.int32))
        self.register_buffer("columns", torch.ones(4, 2, dtype=torch.int64).t())
        self.register_buffer("rates", torch.ones(4, 2).t())
        self.register_buffer("bytes", torch.ones(256, dtype=torch.uint8))
        self.register_buffer("shorts", torch.ones(1 << 15, dtype=torch.int16))
        self.register_buffer("empty", torch.ones(0, dtype=torch.uint8))  # needs no values

    def write(self, names: str) -> None:
        nn.init.ones_(self.lin.weight)
        nn.init.ones_(self.lin.bias)
        for name in names.split():
            if name in ("bytes", "shorts"):  # has all values of the dtype that are not negative
                getattr(self, name).copy_(torch.arange(len(getattr(self, name))))
                continue
            tensor = getattr(self, name).detach()
            tensor.copy_(torch.eye(4).flatten()[: tensor.numel()].view_as(tensor))


@on_ranks(2)
def test_complex_bool_and_integer_tensors_are_written_by_init() -> None:
    with torch.device("meta"):
        model = graphshard.shard(_Tables(), world_mesh())
    names = {"phases", "codes", "flags", "causal", "angles", "mask", "ids", "bytes"}
    names |= {"columns", "rates", "shorts"}
    for missing in sorted(names):
        written = " ".join(names - {missing})
        with pytest.raises(ValueError, match=f"does not write .*'{missing}'"):
            graphshard.materialize(model, lambda m, names=written: m.write(names))
    graphshard.materialize(model, lambda m: m.write(" ".join(names)))
    assert torch.equal(model.mask, torch.eye(4, dtype=torch.uint8))
    assert model.angles.is_complex() and model.angles.tolist() == [1, 0, 0, 0]
    assert torch.equal(model.causal, torch.eye(4).bool())


def test_fake_rank_materializes_its_shard() -> None:
    with fake_ranks(4, rank=1):
        with torch.device("meta"):
            model = graphshard.shard(nn.Linear(8, 8), init_device_mesh("cpu", (4,)))
        graphshard.materialize(model)
        assert model.weight.to_local().any()
