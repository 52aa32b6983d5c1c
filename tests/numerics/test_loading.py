"""`load_state_dict` of a sharded model."""

from __future__ import annotations

import copy
import io
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

import graphshard
from tests import ranks, recording
from tests.models import GPT, MLP, ConvNet, Trainable
from tests.numerics.compare import (
    Twins,
    assert_sharded,
    draw,
    full_values,
    step_all,
    whole,
    world_mesh,
)
from tests.ranks import on_ranks

State = dict[str, Any]


class Even(nn.Module):
    """Model with equal shard sizes on all ranks, so that sizes do not identify the rank."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x))).square().mean()

    @staticmethod
    def batch(rng: torch.Generator) -> Tensor:
        return torch.randn(5, 4, generator=rng)


def _other(kind: Trainable) -> nn.Module:
    torch.manual_seed(77)
    model = kind()
    for buffer in model.buffers():
        buffer.add_(1)
    return model


def _assert_values(model: nn.Module, expected: State) -> None:
    state = model.state_dict()
    assert list(state) == list(expected)
    for name, value in state.items():
        assert torch.equal(whole(value), whole(expected[name])), name


def _sharded(kind: Trainable, **options: Any) -> nn.Module:
    return graphshard.shard(kind(), world_mesh(), **options)


# Full tensors.


@pytest.mark.parametrize(
    ("kind", "assign", "compiled_before"),
    [(MLP, True, False), (MLP, False, True), (ConvNet, True, True)],
)
@on_ranks(2)
def test_full_state_dict_is_split(kind: Trainable, assign: bool, compiled_before: bool) -> None:
    other = _other(kind)
    model, reference = kind(), kind()
    reference.load_state_dict(model.state_dict())
    twins = Twins(model, reference)
    if compiled_before:
        twins.train(kind.batch, steps=1)
    else:
        graphshard.shard(model, world_mesh())
    params = list(model.parameters())
    for loaded in (twins.model, twins.reference):
        loaded.load_state_dict(copy.deepcopy(other.state_dict()), assign=assign)
    assert_sharded(model)
    _assert_values(model, dict(other.state_dict()))
    assert all((a is b) != assign for a, b in zip(model.parameters(), params))
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in params]
    twins.train(kind.batch, steps=2)


@on_ranks(2)
def test_model_created_in_inference_mode_is_trained() -> None:
    reference = MLP()
    with torch.inference_mode():
        model = copy.deepcopy(reference)
    Twins(model, reference).train(MLP.batch, steps=2)


def _full(value: Tensor) -> Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def _load_itself(model: nn.Module, _: torch.optim.Optimizer) -> None:
    model.load_state_dict(model.state_dict(), assign=True)


def _load_full_values(model: nn.Module, _: torch.optim.Optimizer) -> None:
    full = {name: _full(value) for name, value in model.state_dict().items()}
    model.load_state_dict(full, assign=True)


def _load_from_first_rank(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state, optimizer_state = graphshard.full_state_dict(model, optimizer)
    graphshard.load_full_state_dict(model, state, optimizer, optimizer_state)


def _load_optimizer(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state_dict()
    full = {
        number: {name: _full(value) for name, value in values.items()}
        for number, values in state["state"].items()
    }
    optimizer.load_state_dict({**state, "state": full})


@pytest.mark.parametrize(
    "load", [_load_itself, _load_full_values, _load_from_first_rank, _load_optimizer]
)
@on_ranks(2)
def test_state_loaded_in_inference_mode_is_trained_on(
    load: Callable[[nn.Module, torch.optim.Optimizer], None],
) -> None:
    twins = Twins(ConvNet())
    adams = [torch.optim.Adam(model.parameters(), 0.01) for model in (twins.model, twins.reference)]
    for step in range(2):
        twins.backward(draw(ConvNet.batch, step))
        step_all(*adams)
    with torch.inference_mode():
        load(twins.model, adams[0])
    if load in (_load_itself, _load_full_values):  # new parameters
        twins.train(ConvNet.batch, steps=2)
        return
    for step in range(2):
        twins.backward(draw(ConvNet.batch, step))
        twins.check()
        step_all(*adams)


def _load_quietly() -> None:
    model = graphshard.shard(GPT(), init_device_mesh("cpu", (2, 2)))
    state = _other(GPT).state_dict()
    recording.clear()
    for assign in (False, True):
        model.load_state_dict(state, assign=assign)
    assert recording.events() == []


def test_loading_communicates_nothing() -> None:
    ranks.run(4, _load_quietly, backend="recording")


class Kinds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scalar = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.row = nn.Parameter(torch.randn(1, 5))
        self.frozen = nn.Parameter(torch.randn(5, 3).bfloat16(), requires_grad=False)
        self.whole = nn.Parameter(torch.randn(6, 2))


@on_ranks(2)
def test_parameters_of_every_kind_are_loaded() -> None:
    for assign in (False, True):
        model = _sharded(Kinds, overrides={"whole": {"shard": False}})
        state = _other(Kinds).state_dict()
        model.load_state_dict(state, assign=assign)
        _assert_values(model, state)
        model.load_state_dict({"scalar": torch.tensor([3.0])}, strict=False, assign=assign)
        assert model.scalar.to_local().item() == 3.0
        assert model.scalar.shape == ()


@on_ranks(2)
def test_full_state_dict_materializes_meta_model_and_keeps_ties() -> None:
    with torch.device("meta"):
        model: Any = GPT()
    graphshard.shard(model, world_mesh())
    file = io.BytesIO()
    torch.save(_other(GPT).state_dict(), file)
    file.seek(0)
    model.load_state_dict(torch.load(file), assign=True)
    assert model.head.weight is model.tokens.weight
    assert_sharded(model)
    _assert_values(model, _other(GPT).state_dict())
    Twins(model, _other(GPT)).train(GPT.batch)


@on_ranks(2)
def test_assign_takes_dtype_of_file() -> None:
    model = _sharded(MLP)
    state = {name: value.double() for name, value in _other(MLP).state_dict().items()}
    model.load_state_dict(state)
    assert all(param.dtype == torch.float32 for param in model.parameters())
    model.load_state_dict(state, assign=True)
    assert all(param.dtype == torch.float64 for param in model.parameters())
    _assert_values(model, state)


@on_ranks(2)
def test_replicated_tensors_are_split() -> None:
    model = _sharded(MLP)
    full = {n: v.redistribute(placements=[Replicate()]) for n, v in model.state_dict().items()}
    for assign in (False, True):
        model.load_state_dict({n: v * 2 for n, v in full.items()}, assign=assign)
        assert_sharded(model)
        _assert_values(model, {n: v * 2 for n, v in full.items()})


def _of_every_kind(mesh: DeviceMesh) -> nn.Module:
    return graphshard.shard(Kinds(), mesh, overrides={"whole": {"shard": False}}).double().float()


@pytest.mark.parametrize("new", [False, True])
@on_ranks(2)
def test_assigned_parameters_keep_their_identity(new: bool) -> None:
    # Torch caches the specs of results: after ``double``, the second model has the first mesh.
    _of_every_kind(world_mesh())
    model: Any = _of_every_kind(world_mesh())
    state = model.state_dict(keep_vars=True)
    if new:
        state = {n: nn.Parameter(2 * p.detach(), p.requires_grad) for n, p in state.items()}
    optimizer = torch.optim.SGD([state[name] for name in ("scalar", "row", "whole")], 0.01)
    expected = {name: whole(value) for name, value in state.items()}
    model.load_state_dict(state, assign=True)
    assert all(model.get_parameter(name) is value for name, value in state.items())
    _assert_values(model, expected)
    compiled = torch.compile(
        lambda: (model.scalar * model.row).sum() + model.whole.sum(),
        backend=graphshard.backend(world_mesh(), compiler="aot_eager"),
    )
    losses = []
    for _ in range(2):
        losses.append(compiled())
        losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
    for name, param in model.named_parameters():
        assert torch.equal(whole(param), expected[name]) == (name in ("empty", "frozen")), name
    assert losses[1] < losses[0]


class Renamed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.gain = nn.Linear(4, 6), nn.Parameter(torch.ones(6))
        self.register_load_state_dict_pre_hook(self._from_old)

    @staticmethod
    def _from_old(module: Any, state: State, prefix: str, *rest: Any) -> None:
        for name in [name for name in state if name.startswith(f"{prefix}old.")]:
            state[name.replace("old.", "layer.")] = state.pop(name)

    def _load_from_state_dict(self, state_dict: State, prefix: str, *rest: Any) -> None:
        if f"{prefix}scale" in state_dict:
            state_dict[f"{prefix}gain"] = state_dict.pop(f"{prefix}scale")
        super()._load_from_state_dict(state_dict, prefix, *rest)


@on_ranks(2)
def test_model_may_rename_entries_on_load() -> None:
    model, other = _sharded(Renamed), _other(Renamed)
    state = {
        name.replace("layer.", "old.").replace("gain", "scale"): value
        for name, value in other.state_dict().items()
    }
    model.load_state_dict(state)
    _assert_values(model, other.state_dict())


# Mismatches: torch's own errors, which name the parameters.


def _changed(name: str, value: Tensor | None) -> State:
    state = dict(_other(MLP).state_dict())
    state.pop(name, None)
    return state if value is None else state | {name: value}


WRONG = {
    "missing": (("mid.weight", None), "Missing key.*mid.weight"),
    "unexpected": (("extra.weight", torch.ones(2)), "Unexpected key.*extra.weight"),
    "size": (("mid.weight", torch.ones(12, 13)), r"size mismatch for mid.weight.*12, 13.*11, 13"),
    "no tensor": (("mid.weight", "text"), 'named "mid.weight", expected torch.Tensor'),
}


def _load_wrong(change: tuple[str, Tensor | None], said: str) -> None:
    model = _sharded(MLP)
    for assign in (False, True):
        with pytest.raises(RuntimeError, match=f"(?s){said}"):
            model.load_state_dict(_changed(*change), assign=assign)
        assert_sharded(model)
    missing, unexpected = model.load_state_dict({"no": torch.ones(1)}, strict=False)
    assert unexpected == ["no"] and len(missing) == 5


@pytest.mark.parametrize("what", WRONG)
def test_mismatched_entries_raise_by_name(what: str) -> None:
    ranks.run(2, _load_wrong, *WRONG[what])


# Shards.


def save_in_thread(state: object, path: Path) -> None:
    """Save in a separate thread, in which torch.save does not wait for the other ranks."""
    writer = threading.Thread(target=torch.save, args=(state, path))
    writer.start()
    writer.join()


def _save_alone(path: Path, shape: tuple[int, ...]) -> None:
    model = graphshard.shard(Even(), init_device_mesh("cpu", shape))
    if dist.get_rank() == 0:
        save_in_thread(model.state_dict(), path)


def _load_alone(path: Path, shape: tuple[int, ...], refused: str | None, assign: bool) -> None:
    torch.manual_seed(77)
    model = graphshard.shard(Even(), init_device_mesh("cpu", shape))
    before = full_values(model)
    state = torch.load(path)
    if refused is None:
        model.load_state_dict(state, assign=assign)
        return
    with pytest.raises(ValueError, match=refused) as caught:
        model.load_state_dict(state, assign=assign)
    assert "up.weight" in str(caught.value) and "full_state_dict" in str(caught.value)
    for name, value in model.state_dict().items():
        local = before[name]  # gathered earlier, since not all ranks run this loop
        assert value.shape == local.shape
        assert torch.equal(value.to_local(), _rows(local, model.state_dict()[name])), name


def _rows(full: Tensor, like: DTensor) -> Tensor:
    index = like.device_mesh.get_local_rank(like.device_mesh.ndim - 1)
    size = like.device_mesh.size(like.device_mesh.ndim - 1)
    return full.chunk(size)[index]


def _save_and_load_alone(path: Path, shape: tuple[int, ...], assign: bool) -> None:
    _save_alone(path, shape)
    dist.barrier()
    is_own = dist.get_rank() % shape[-1] == 0  # the rank that saved, or its replica
    refused = None if is_own else "only one rank saved the file"
    _load_alone(path, shape, refused, assign)


@pytest.mark.parametrize(("shape", "assign"), [((2,), False), ((2, 2), True)])
def test_shards_saved_by_one_rank_are_refused_by_others(
    shape: tuple[int, ...], assign: bool, tmp_path: Path
) -> None:
    world_size = torch.Size(shape).numel()
    ranks.run(world_size, _save_and_load_alone, tmp_path / "model.pt", shape, assign)


def test_shards_of_another_world_size_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.pt"
    ranks.run(2, _save_alone, path, (2,))
    ranks.run(4, _load_alone, path, (4,), "over the ranks .0, 1.*over .0, 1, 2, 3", False)


def _save_everywhere(folder: Path) -> None:
    model = _other(MLP)
    graphshard.shard(model, world_mesh())
    torch.save(model.state_dict(), folder / f"{dist.get_rank()}.pt")


def _load_everywhere(folder: Path, assign: bool) -> None:
    """Load each rank's own file, saved with a mesh of an earlier process group."""
    twins = Twins(_sharded(MLP), _other(MLP))
    state = torch.load(folder / f"{dist.get_rank()}.pt")
    twins.model.load_state_dict(state, assign=assign)
    _assert_values(twins.model, twins.reference.state_dict())
    twins.train(MLP.batch, steps=1)


@pytest.mark.parametrize("assign", [False, True])
def test_each_rank_loads_its_own_file(assign: bool, tmp_path: Path) -> None:
    ranks.run(2, _save_everywhere, tmp_path)
    ranks.run(2, _load_everywhere, tmp_path, assign)


def _itself(value: DTensor) -> Tensor:
    return value


@pytest.mark.parametrize("make", [_itself, whole])
@on_ranks(2)
def test_offloaded_meta_model_is_loaded_part_by_part(make: Callable[[DTensor], Tensor]) -> None:
    """Load one part at a time under CPU offload while the rest is on meta, as FSDP2's tests do."""
    from torch.distributed.fsdp import CPUOffloadPolicy

    with torch.device("meta"):
        model = MLP()
    graphshard.shard(model, world_mesh(), offload_policy=CPUOffloadPolicy(pin_memory=False))
    other = _other(MLP)
    sharded = graphshard.shard(copy.deepcopy(other), world_mesh())
    for name, value in sharded.state_dict().items():
        model.load_state_dict({name: make(value)}, assign=True, strict=False)
    _assert_values(model, other.state_dict())
    Twins(model, other).train(MLP.batch, steps=1)
