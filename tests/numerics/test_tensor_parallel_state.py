from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard.errors import BackendError
from graphshard.tools.consolidate import consolidate
from tests import ranks
from tests.numerics.compare import full_values, whole
from tests.numerics.parallel import (
    MLP,
    batches,
    mesh_2d,
    split,
    train,
    under_fsdp2,
)
from tests.ranks import on_ranks


def sharded(kind: Any, mesh: DeviceMesh) -> Any:
    return graphshard.shard(split(kind, mesh), mesh["dp"])


def _trained(make: Callable[..., Any], mesh: DeviceMesh) -> tuple[Any, Any]:
    model = make(MLP, mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=0.05)
    for batch in batches(MLP, mesh, 2):
        optim.zero_grad()
        model(batch).backward()
        optim.step()
    return model, optim


def _spoil(model: nn.Module) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(7.0)


def _save(make: Callable[..., Any], path: Path) -> dict[str, Tensor]:
    model, optim = _trained(make, mesh_2d())
    state, optim_state = get_state_dict(model, optim)
    dcp.save({"model": state, "optim": optim_state}, checkpoint_id=path)
    moments = {n: whole(optim.state[p]["exp_avg"]) for n, p in model.named_parameters()}
    return {**full_values(model), **{f"moment of {name}": m for name, m in moments.items()}}


def _load(
    make: Callable[..., Any],
    sizes: tuple[int, int],
    path: Path,
    saved: dict[str, Tensor],
) -> None:
    model, optim = _trained(make, mesh_2d(*sizes))
    _spoil(model)
    state, optim_state = get_state_dict(model, optim)
    dcp.load({"model": state, "optim": optim_state}, checkpoint_id=path)
    set_state_dict(model, optim, model_state_dict=state, optim_state_dict=optim_state)
    for name, value in full_values(model).items():
        assert torch.equal(value, saved[name]), name
    for name, param in model.named_parameters():
        assert torch.equal(whole(optim.state[param]["exp_avg"]), saved[f"moment of {name}"]), name


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, ranks.run(4, _save, sharded, folder)[0]


@pytest.mark.parametrize(
    ("load", "sizes"),
    [(sharded, (2, 2)), (under_fsdp2, (2, 2)), (sharded, (4, 1)), (sharded, (1, 2))],
)
def test_checkpoint_loads_on_another_mesh(
    load: Any, sizes: tuple[int, int], checkpoint: Any
) -> None:
    ranks.run(sizes[0] * sizes[1], _load, load, sizes, *checkpoint)


@on_ranks(4)
def test_checkpoint_of_fsdp2_is_loaded(tmp_path: Path) -> None:
    _load(sharded, (2, 2), tmp_path, _save(under_fsdp2, tmp_path))


def test_consolidated_checkpoint_has_full_tensors(checkpoint: Any, tmp_path: Path) -> None:
    folder, saved = checkpoint
    consolidate(folder, tmp_path / "full.pt")
    full = torch.load(tmp_path / "full.pt")
    moments = {name: state["exp_avg"] for name, state in full["optim"]["state"].items()}
    for name, value in full["model"].items():
        assert torch.equal(value, saved[name]), name
        assert torch.equal(moments[name], saved[f"moment of {name}"]), name


@on_ranks(4)
def test_torch_state_dict_functions_save_and_load() -> None:
    mesh = mesh_2d()
    model, _ = _trained(sharded, mesh)
    expected = full_values(model)
    state = {name: value.clone() for name, value in get_model_state_dict(model).items()}
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    assert all(torch.equal(value, expected[name]) for name, value in full.items())
    _spoil(model)
    set_model_state_dict(model, state)
    assert all(torch.equal(value, expected[name]) for name, value in full_values(model).items())


@on_ranks(4)
def test_full_and_sharded_tensors_are_loaded() -> None:
    mesh = mesh_2d()
    model, _ = _trained(sharded, mesh)
    expected = full_values(model)
    states = expected, {name: value.clone() for name, value in model.state_dict().items()}
    for assign, state in itertools.product((False, True), states):
        _spoil(model)
        model.load_state_dict(state, assign=assign)
        assert all(torch.equal(v, expected[name]) for name, v in full_values(model).items())
    train(
        torch.compile(model, backend=graphshard.backend(mesh["dp"], compiler="aot_eager")),
        model,
        batches(MLP, mesh),
    )


@on_ranks(4)
def test_full_state_dict_is_gathered_and_loaded() -> None:
    mesh = mesh_2d()
    model, optim = _trained(sharded, mesh)
    expected = full_values(model)
    moments = {n: whole(optim.state[p]["exp_avg"]) for n, p in model.named_parameters()}
    state, optim_state = graphshard.full_state_dict(model, optim)
    if dist.get_rank() == 0:
        assert list(state) == list(expected)
        for name, value in state.items():
            assert value.device.type == "cpu" and torch.equal(value, expected[name]), name
        MLP().load_state_dict(state)
        for name, moment in moments.items():
            assert torch.equal(optim_state["state"][name]["exp_avg"], moment), name
    else:
        assert not state and not optim_state
    other, other_optim = _trained(sharded, mesh)
    _spoil(other)
    graphshard.load_full_state_dict(other, state, other_optim, optim_state)
    for name, value in full_values(other).items():
        assert torch.equal(value, expected[name]), name
    for name, param in other.named_parameters():
        moment = other_optim.state[param]["exp_avg"]
        assert moment.placements == param.placements and torch.equal(whole(moment), moments[name])


@on_ranks(4)
def test_meta_device_model_is_materialized() -> None:
    mesh = mesh_2d()

    def init(model: nn.Module) -> None:
        for module in model.modules():
            for param in module.parameters(recurse=False):
                nn.init.normal_(param)

    with torch.device("meta"):
        model = MLP().parallelize(mesh["tp"])
    graphshard.shard(model, mesh["dp"])
    torch.manual_seed(3)
    graphshard.materialize(model, init)
    ours = full_values(model)
    with torch.device("meta"):
        plain = graphshard.shard(MLP())
    torch.manual_seed(3)
    graphshard.materialize(plain, init)
    for name, value in full_values(plain).items():
        assert torch.equal(ours[name], value), name


@on_ranks(4)
def test_file_of_another_rank_is_refused(tmp_path: Path) -> None:
    mesh = mesh_2d()
    model = sharded(MLP, mesh)
    path = tmp_path / f"{dist.get_rank()}.pt"
    torch.save(model.state_dict(), path)
    model.load_state_dict(torch.load(path, weights_only=False))
    dist.barrier()
    neighbor = tmp_path / f"{dist.get_rank() ^ 1}.pt"  # has the same rows over dp
    with pytest.raises(BackendError, match="has the rows of the rank at"):
        model.load_state_dict(torch.load(neighbor, weights_only=False))
