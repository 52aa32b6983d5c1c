from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import graphshard
from tests import ranks, recording
from tests.models import GPT, ConvNet, Trainable
from tests.numerics.compare import (
    Twins,
    assert_same,
    assert_sharded,
    compile_sharded,
    draw,
    full_values,
    whole,
    world_mesh,
)
from tests.ranks import on_ranks

KINDS = [GPT, ConvNet]


def _train(kind: Trainable) -> tuple[Any, Any, torch.optim.Optimizer]:
    model = kind()
    compiled = compile_sharded(model)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for step in range(3):
        compiled(draw(kind.batch, step)[dist.get_rank()]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, compiled, optimizer


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2, backend="recording")
def test_state_dict_communicates_nothing(kind: Trainable) -> None:
    names = list(kind().state_dict())
    model = sharded(kind())
    compiled = compile_sharded(model)
    recording.clear()
    state = model.state_dict()
    assert recording.events() == []
    assert list(state) == names
    params = dict(model.named_parameters(remove_duplicate=False))
    for name, value in state.items():
        assert isinstance(value, DTensor) == (name in params), name
        assert not value.requires_grad
        if isinstance(value, DTensor):
            assert value.to_local().data_ptr() == params[name].to_local().data_ptr()
    kept = model.state_dict(keep_vars=True)
    assert all(kept[name] is param for name, param in params.items())
    assert list(compiled.state_dict()) == [f"_orig_mod.{name}" for name in names]


@pytest.mark.parametrize("kind", KINDS)
@on_ranks(2)
def test_full_state_dict_loads_into_plain_model(kind: Trainable) -> None:
    model = sharded(kind())
    compiled = compile_sharded(model)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    for source in (model, compiled):
        state = get_model_state_dict(source, options=options)
        assert all(not isinstance(value, DTensor) for value in state.values())
        if dist.get_rank() == 0:
            kind().load_state_dict(state)


# torch.distributed.checkpoint between different numbers of ranks and kinds of models.

Prepare = Callable[[nn.Module], nn.Module]


def sharded(model: nn.Module) -> nn.Module:
    return graphshard.shard(model, world_mesh())


def plain(model: nn.Module) -> nn.Module:
    return model


def fsdp2(model: nn.Module) -> nn.Module:
    return fully_shard(model, mesh=world_mesh())


def _save_trained(kind: Trainable, path: Path) -> dict[str, torch.Tensor]:
    model, _, _ = _train(kind)
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    return full_values(model)


def _load(
    kind: Trainable,
    prepare: Prepare,
    path: Path,
    saved: list[dict[str, torch.Tensor]],
    trains: bool = False,
) -> None:
    """Load a checkpoint into a new model; check its values and, if `trains`, a training step."""
    torch.manual_seed(77)
    model = prepare(kind())
    state = {"model": model.state_dict()}
    dcp.load(state, checkpoint_id=path)
    model.load_state_dict(state["model"])
    values = full_values(model)
    assert values.keys() == saved[0].keys()
    for name, value in values.items():  # any rank's buffers may have been saved
        assert any(torch.equal(value, other[name]) for other in saved), name
    if prepare is sharded:
        assert_sharded(model)
    if trains:
        reference = kind()
        reference.load_state_dict(values)
        _assert_same_step(model, reference, kind)


def _assert_same_step(model: nn.Module, reference: nn.Module, kind: Trainable) -> None:
    twins = Twins(model, reference)
    twins.backward(draw(kind.batch, 5))
    assert_same(model, reference)


def test_checkpoint_of_four_ranks_loads_on_two(tmp_path: Path) -> None:
    saved = ranks.run(4, _save_trained, ConvNet, tmp_path)
    ranks.run(2, _load, ConvNet, sharded, tmp_path, saved, trains=True)


def _save_other(kind: Trainable, prepare: Prepare, path: Path) -> dict[str, torch.Tensor]:
    model = prepare(kind())
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    return full_values(model)


@pytest.mark.parametrize(
    ("before", "after"), [(plain, sharded), (fsdp2, sharded), (sharded, plain), (sharded, fsdp2)]
)
def test_checkpoint_moves_between_kinds_of_models(
    before: Prepare, after: Prepare, tmp_path: Path
) -> None:
    saved = ranks.run(2, _save_other, GPT, before, tmp_path)
    ranks.run(4, _load, GPT, after, tmp_path, saved, trains=before is plain)


def _save_with_optimizer(path: Path) -> list[float]:
    """Save, then continue training; return losses that a run from the checkpoint must repeat."""
    model, compiled, optimizer = _train(GPT)
    states = get_state_dict(model, optimizer)
    assert all("_orig_mod" not in name for name in states[0])
    dcp.save(dict(zip(("model", "optimizer"), states)), checkpoint_id=path)
    return _train_on(compiled, optimizer)


def _load_states(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.load(states, checkpoint_id=path)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=states["model"],
        optim_state_dict=states["optimizer"],
    )


def _load_with_optimizer(path: Path) -> list[float]:
    torch.manual_seed(77)
    model = sharded(GPT())
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    _load_states(model, optimizer, path)
    return _train_on(compile_sharded(model), optimizer)


def _train_on(compiled: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    """Train four steps and return the losses.

    All ranks get the same batch, so losses do not depend on the number of ranks.
    """
    losses, batch = [], draw(GPT.batch, 20)[0]
    for _ in range(4):
        loss = compiled(batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_training_resumes_with_its_optimizer(tmp_path: Path) -> None:
    after_save = ranks.run(4, _save_with_optimizer, tmp_path)[0]
    for losses in ranks.run(2, _load_with_optimizer, tmp_path):
        assert losses == pytest.approx(after_save, rel=1e-4)


@on_ranks(2)
def test_optimizer_state_dict_loads_into_another_optimizer() -> None:
    model, compiled, optimizer = _train(GPT)
    other = torch.optim.AdamW(model.parameters(), 1e-2)
    other.load_state_dict(optimizer.state_dict())
    for param in model.parameters():
        for name, value in optimizer.state[param].items():
            copied = other.state[param][name]
            assert isinstance(value, DTensor) == isinstance(copied, DTensor)
            assert torch.equal(whole(copied), whole(value))
    _train_on(compiled, other)


def _on_mesh(shape: tuple[int, ...]) -> nn.Module:
    return graphshard.shard(GPT(), init_device_mesh("cpu", shape))


def _save_on_mesh(shape: tuple[int, ...], path: Path) -> dict[str, torch.Tensor]:
    model = _on_mesh(shape)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    for param in model.parameters():
        param.grad = param.detach() * 3
    optimizer.step()
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer)))
    dcp.save(states, checkpoint_id=path)
    return _whole_states(model, optimizer)


def _load_on_mesh(shape: tuple[int, ...], path: Path, saved: dict[str, torch.Tensor]) -> None:
    torch.manual_seed(77)
    model = _on_mesh(shape)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    _load_states(model, optimizer, path)
    loaded = _whole_states(model, optimizer)
    assert loaded.keys() == saved.keys()
    for name, value in saved.items():
        assert torch.equal(loaded[name], value), name


def _whole_states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    values = full_values(model)
    for name, param in model.named_parameters():
        states = optimizer.state[param].items()
        values |= {f"{name}.{key}": whole(state) for key, state in states}
    return values


@pytest.mark.parametrize(("before", "after"), [((2, 2), (2,)), ((4,), (2, 2))])
def test_checkpoint_moves_between_hsdp_and_fsdp_meshes(
    before: tuple[int, ...], after: tuple[int, ...], tmp_path: Path
) -> None:
    saved = ranks.run(math.prod(before), _save_on_mesh, before, tmp_path)[0]
    ranks.run(math.prod(after), _load_on_mesh, after, tmp_path, saved)
