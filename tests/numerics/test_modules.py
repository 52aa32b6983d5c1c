"""`torch.nn` modules that store or use their parameters in unusual ways."""

from __future__ import annotations

import abc
import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import parametrizations

import graphshard
from graphshard.errors import BackendError
from tests.models import MLP, Trainable
from tests.numerics.compare import (
    Twins,
    assert_history_rounded,
    compile_sharded,
    draw,
    graphshard_warnings,
    train,
    train_steps,
    world_mesh,
)
from tests.ranks import on_ranks

DIM = 6


def _sequence(rng: torch.Generator) -> Tensor:
    return torch.randn(2, 5, DIM, generator=rng)


class Containers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterList([torch.randn(DIM) for _ in range(3)])
        self.biases = nn.ParameterDict({"a": torch.randn(DIM), "b": torch.randn(1)})
        self.paths = nn.ModuleDict({"x": nn.ModuleList([nn.Linear(DIM, DIM)]), "y": nn.Identity()})

    def forward(self, x: Tensor) -> Tensor:
        for gain in self.gains:
            x = torch.tanh(x * gain)
        for name, bias in self.biases.items():
            x = x + bias * len(name)
        return sum(path(x) for path in [*self.paths["x"], self.paths["y"]]).square().mean()

    batch = staticmethod(_sequence)


class Attention(nn.Module):
    """`MultiheadAttention`, which reads its weights by name and does not call `out_proj`."""

    def __init__(self, kdim: int | None = None) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(
            DIM, 2, batch_first=True, kdim=kdim, add_bias_kv=True
        )
        self.project = nn.Linear(DIM, kdim or DIM)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.project(x)
        values = keys if self.attention.vdim == keys.shape[-1] else x
        return self.attention(x, keys, values, need_weights=False)[0].square().mean()

    batch = staticmethod(_sequence)


class AttentionOfOtherKeys(Attention):
    def __init__(self) -> None:
        super().__init__(kdim=4)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(DIM, 2, 9, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.encoder(x).square().mean() + self.encoder(x.flip(1)).exp().mean()

    batch = staticmethod(_sequence)


class Parametrized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.normed = parametrizations.weight_norm(nn.Linear(DIM, 5))
        self.rotation = parametrizations.orthogonal(nn.Linear(5, 5), use_trivialization=False)
        self.conv = parametrizations.weight_norm(nn.Conv1d(5, 3, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.rotation(self.normed(x)).transpose(1, 2)).square().mean()

    batch = staticmethod(_sequence)


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 6, 3, groups=2, padding_mode="circular", padding=1)
        self.norm = nn.GroupNorm(3, 6)
        self.up = nn.ConvTranspose2d(6, 3, 3, stride=2)
        self.slope = nn.PReLU(3)
        self.mix = nn.Bilinear(4, 4, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.slope(self.up(self.norm(self.conv(x))))
        flat = y.flatten(1)[:, :4]
        return y.square().mean() + self.mix(flat, flat.exp()).mean()

    @staticmethod
    def batch(rng: torch.Generator) -> Tensor:
        return torch.randn(3, 2, 5, 5, generator=rng)


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(11, DIM, mode="sum")
        self.padded = nn.Embedding(11, DIM, padding_idx=0)
        self.norm = nn.RMSNorm(DIM)

    def forward(self, ids: Tensor) -> Tensor:
        return (self.norm(self.padded(ids)).sum(1) * self.bag(ids)).square().mean()

    @staticmethod
    def batch(rng: torch.Generator) -> Tensor:
        return torch.randint(11, (3, 4), generator=rng)


class Inherited(nn.Linear):
    def __init__(self) -> None:
        super().__init__(DIM, 3)
        self.extra = nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return (super().forward(x) * self.extra + self.weight.mean()).square().mean()

    batch = staticmethod(_sequence)


class LooksAtItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, 3)

    def forward(self, x: Tensor) -> Tensor:
        param = next(self.parameters())
        x = x.to(param.device, param.dtype)
        count = sum(p.numel() for p in self.parameters()) + self.linear.weight.shape[1]
        return self.linear(x).square().mean() * count

    batch = staticmethod(_sequence)


class WithAutocast(nn.Module):
    def __init__(self, enabled: bool = True) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(DIM, 7), nn.Tanh(), nn.Linear(7, 3))
        self.enabled = enabled

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
            return self.layers(x).float().square().mean()

    batch = staticmethod(_sequence)


class Conjugate(nn.Module):
    """Several complex weights, which torch conjugates with a constant."""

    def __init__(self) -> None:
        super().__init__()
        weights = [torch.randn(DIM, DIM, dtype=torch.complex64) for _ in range(3)]
        self.weights = nn.ParameterList(weights)

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(x @ (weight.conj() * 1j).real)
        return x.square().mean()

    batch = staticmethod(_sequence)


MODULES = [
    Containers,
    Conjugate,
    Attention,
    AttentionOfOtherKeys,
    Encoder,
    Parametrized,
    Convolutions,
    Embeddings,
    Inherited,
    LooksAtItself,
]


def _classes(model: nn.Module) -> list[tuple[str, bool]]:
    return [(type(module).__name__, isinstance(module, nn.Linear)) for module in model.modules()]


@pytest.mark.parametrize("kind", MODULES)
@on_ranks(2)
def test_unusual_module_trains_and_keeps_its_classes(kind: Any) -> None:
    model = kind()
    described, classes = repr(model), _classes(model)
    Twins(model).train(kind.batch)
    # Libraries inspect module classes.
    assert repr(model) == described
    assert _classes(model) == classes


@pytest.mark.low_precision
@on_ranks(2)
def test_autocast_in_forward_is_kept() -> None:
    torch.manual_seed(0)
    ours = WithAutocast()
    theirs, exact = copy.deepcopy(ours), copy.deepcopy(ours)
    exact.enabled = False
    batches = [draw(_sequence, step)[dist.get_rank()] for step in range(3)]
    trained = train_steps(compile_sharded(ours), ours, batches)
    for model in (theirs, exact):
        fully_shard(model, mesh=world_mesh())
    assert_history_rounded(
        trained, *(train_steps(model, model, batches) for model in (theirs, exact))
    )


class Recurrent(nn.Module):
    def __init__(self, layer: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.layer = layer(DIM, 4, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.layer.flatten_parameters()
        return F.gelu(self.head(self.layer(x)[0])).square().mean()

    batch = staticmethod(_sequence)


class _MovesWeights(nn.LSTM):
    def flatten_parameters(self) -> None:  # as on a GPU
        for weight in self._flat_weights:
            weight.data = weight.data.clone()


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, _MovesWeights])
@on_ranks(2)
def test_recurrent_layers_train_with_one_warning(layer: type[nn.RNNBase]) -> None:
    with graphshard_warnings() as warned:
        Twins(Recurrent(layer), fullgraph=False).train(Recurrent.batch)
    assert len(warned) == 1


class _Dropping(nn.Module):
    """An LSTM that drops some of its recurrent weights in each forward, as fastai's does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(DIM, 4, batch_first=True)
        self.raw = nn.Parameter(self.layer.weight_hh_l0.detach().clone())
        del self.layer.weight_hh_l0
        self.layer.weight_hh_l0 = self.raw.detach()
        self.register_buffer("mask", torch.arange(4) % 3 != 0)

    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight_hh_l0 = self.raw * self.mask
        return self.layer(x)[0].square().mean()

    batch = staticmethod(_sequence)


@on_ranks(2)
def test_recurrent_weights_that_forward_computes_train() -> None:
    Twins(_Dropping(), fullgraph=False).train(_Dropping.batch)


def _assign(layer: nn.LSTM) -> None:
    layer._flat_weights = [getattr(layer, name) * 2 for name in layer._flat_weights_names]


def _assign_item(layer: nn.LSTM) -> None:
    layer._flat_weights[1] = layer.weight_hh_l0 * 2


class _WritesFlatWeights(nn.Module):
    def __init__(self, write: Callable[[nn.LSTM], None]) -> None:
        super().__init__()
        self.layer, self.write = nn.LSTM(DIM, 4), write

    def forward(self, x: Tensor) -> Tensor:
        self.write(self.layer)
        return self.layer(x)[0].square().mean()


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("write", [_assign, _assign_item])
@on_ranks(2)
def test_write_to_flat_weights_raises(write: Callable[[nn.LSTM], None], compiled: bool) -> None:
    model = _WritesFlatWeights(write)
    forward = graphshard.shard(model, world_mesh())
    if compiled:
        backend = graphshard.backend(world_mesh(), compiler="aot_eager")
        forward = torch.compile(model, backend=backend)
    with pytest.raises(BackendError, match="_flat_weights of a sharded RNN is read-only"):
        forward(torch.ones(2, 5, DIM))
    layer = model.layer
    with pytest.raises(BackendError, match="read-only"):
        write(layer)
    layer._flat_weights = [getattr(layer, name) for name in layer._flat_weights_names]
    layer.double().flatten_parameters()
    copied = copy.deepcopy(layer)
    assert all(w is p for w, p in zip(copied._flat_weights, copied.parameters(), strict=True))


class Tables(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.first, self.last = (nn.Embedding(7, DIM, sparse=sparse) for _ in range(2))
        self.bag = nn.EmbeddingBag(7, DIM, mode="sum", sparse=sparse)
        self.head = nn.Linear(DIM, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        return self.look_up(ids, self.head(self.first(ids) + self.bag(ids)[:, None]).sin())

    @torch.compiler.disable
    def look_up(self, ids: Tensor, x: Tensor) -> Tensor:
        return (self.last(ids) * x).square().mean()

    @staticmethod
    def batch(rng: torch.Generator) -> Tensor:
        return torch.randint(7, (2, 3), generator=rng)


class TablesInBranches(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.first, self.last = (nn.Embedding(7, DIM, sparse=sparse) for _ in range(2))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, ids: Tensor) -> Tensor:
        last = self.last.weight
        x = torch.cond(
            ids.sum() > 18,
            lambda ids: self.first(ids),
            lambda ids: F.embedding(ids, last, sparse=self.last.sparse),
            (ids,),
        )
        return self.head(x).square().mean()

    batch = staticmethod(Tables.batch)


@pytest.mark.parametrize(
    ("tables", "compiler"), [(Tables, "inductor"), (TablesInBranches, "aot_eager")]
)
@on_ranks(2)
def test_sparse_gradients_become_dense(
    tables: type[Tables] | type[TablesInBranches], compiler: str
) -> None:
    sparse, dense = tables(True), tables(False)
    dense.load_state_dict(sparse.state_dict())
    Twins(sparse, dense, fullgraph=False, compiler=compiler).train(tables.batch)


@on_ranks(2)
def test_gradients_of_ignored_tables_stay_sparse() -> None:
    model = Tables(True)
    tables = [model.first.weight, model.bag.weight, model.last.weight]
    backend = graphshard.backend(world_mesh(), compiler="aot_eager", ignored_params=set(tables))
    torch.compile(model, backend=backend)(torch.zeros(2, 3, dtype=torch.int64)).backward()
    assert all(table.grad is not None and table.grad.is_sparse for table in tables)


@on_ranks(2)
def test_parameters_of_sharded_module_are_attributes() -> None:
    twins = Twins(nn.Sequential(nn.Linear(DIM, 3)))
    twins.train(_sequence, steps=1, loss=lambda model, x: model(x).square().mean())
    layer = twins.model[0]
    assert layer.get_parameter("bias") is layer.bias is twins.model.get_parameter("0.bias")
    assert not hasattr(layer, "gain")
    with pytest.raises(AttributeError, match="gain"):
        functools.reduce(getattr, ["gain"], layer)
    del layer.bias
    assert not hasattr(layer, "bias") and [n for n, _ in layer.named_parameters()] == ["weight"]


class _Meta(type):
    classes: dict[str, type] = {}

    def __new__(mcs, name: str, bases: Any, namespace: Any, *, key: str) -> type:
        mcs.classes[key] = cls = super().__new__(mcs, name, bases, namespace)
        return cls

    def __init__(cls, name: str, bases: Any, namespace: Any, *, key: str) -> None:
        super().__init__(name, bases, namespace)


class _Registered(nn.Module):
    classes: dict[str, type] = {}

    def __init_subclass__(cls, *, key: str, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.classes[key] = cls


class _ByInit(_Registered, key="init"):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0, 1, 21).view(7, 3))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight).square().mean()

    @staticmethod
    def batch(rng: torch.Generator) -> Tensor:
        return torch.randn(5, 7, generator=rng)


class _ByMetaclass(MLP, metaclass=_Meta, key="meta"):
    pass


class _Abstract(MLP, abc.ABC):
    pass


@pytest.mark.parametrize("kind", [_ByInit, _ByMetaclass, _Abstract])
@on_ranks(2)
def test_sharding_does_not_register_subclasses(kind: Trainable) -> None:
    train(kind)
    assert _Registered.classes == {"init": _ByInit}
    assert _Meta.classes == {"meta": _ByMetaclass}
    assert not issubclass(MLP, _Abstract) and not isinstance(MLP(), type(_Abstract()))
