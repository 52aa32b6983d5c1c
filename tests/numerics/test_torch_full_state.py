"""Limits of torch's `StateDictOptions(full_state_dict, cpu_offload, broadcast_from_rank0)`.

Each test shows a limit of torch's functions that `graphshard.full_state_dict` and
`load_full_state_dict` do not have: see [Note: why not StateDictOptions]. If one of these
tests fails, torch may be able to replace a part of `graphshard.params.state_dict`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

import graphshard
from tests import ranks, recording
from tests.models import GPT, MLP
from tests.numerics.compare import world_mesh

SAVE = StateDictOptions(full_state_dict=True, cpu_offload=True)
LOAD = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


def _copies_tied_weights_and_drops_versions() -> None:
    model = graphshard.shard(GPT(), world_mesh())
    theirs, ours = get_model_state_dict(model, options=SAVE), graphshard.full_state_dict(model)
    if dist.get_rank() == 0:
        assert theirs["head.weight"] is not theirs["tokens.weight"]
        assert ours["head.weight"] is ours["tokens.weight"]
        assert not hasattr(theirs, "_metadata") and ours._metadata


def _steps_an_optimizer_without_state() -> None:
    model = graphshard.shard(MLP(), world_mesh())
    optim = torch.optim.AdamW(model.parameters())
    graphshard.full_state_dict(model, optim)
    assert not optim.state
    get_optimizer_state_dict(model, optim, options=SAVE)
    assert {int(state["step"]) for state in optim.state.values()} == {1}


def _does_not_load_an_optimizer_with_state_for_some_parameters() -> None:
    model = graphshard.shard(MLP(), world_mesh())
    optims = [torch.optim.AdamW(model.parameters()) for _ in range(3)]
    model.up.weight.grad = torch.ones_like(model.up.weight)
    optims[0].step()
    state, optim_state = graphshard.full_state_dict(model, optims[0])
    graphshard.load_full_state_dict(model, state, optims[1], optim_state)
    assert list(optims[1].state) == [model.up.weight]
    if dist.get_rank() == 0:  # other ranks raise a different error
        with pytest.raises(RuntimeError, match="Missing optimizer state"):
            set_optimizer_state_dict(model, optims[2], optim_state, options=SAVE)


def _leaves_8_bit_states_quantized() -> None:
    from torchao.optim import AdamW8bit

    model = graphshard.shard(nn.Linear(64, 128), world_mesh())
    optim = AdamW8bit(model.parameters())
    model(torch.ones(1, 64)).sum().backward()
    with torch.compiler.set_stance("force_eager"):  # compiling its step would take 15 s
        optim.step()
    theirs = get_optimizer_state_dict(model, optim, options=SAVE)
    ours = graphshard.full_state_dict(model, optim)[1]
    if dist.get_rank() == 0:
        kinds = [type(state["state"]["weight"]["exp_avg"]) for state in (theirs, ours)]
        assert kinds[0] is not torch.Tensor and kinds[1] is torch.Tensor


def _raises_on_one_rank_only() -> None:
    model = graphshard.shard(MLP(), world_mesh())
    state: Any = graphshard.full_state_dict(model)
    if dist.get_rank() == 0:
        state["more"] = torch.ones(1)
    with pytest.raises(RuntimeError, match="Unexpected key"):
        graphshard.load_full_state_dict(model, state)
    if dist.get_rank() == 0:
        with pytest.raises(RuntimeError, match="Unexpected key"):
            set_model_state_dict(model, state, options=LOAD)
    else:
        set_model_state_dict(model, state, options=LOAD)


def _turns_the_loaded_entries_into_shards() -> None:
    model = graphshard.shard(MLP(), world_mesh())
    state: Any = graphshard.full_state_dict(model)
    graphshard.load_full_state_dict(model, state)
    assert not any(isinstance(value, DTensor) for value in state.values())
    set_model_state_dict(model, state, options=LOAD)
    assert all(isinstance(value, DTensor) for value in state.values())


def _sends_float8_by_gloo() -> None:
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(model.weight.detach().to(torch.float8_e4m3fn), requires_grad=False)
    graphshard.shard(model, world_mesh())
    state = graphshard.full_state_dict(model)
    assert not state or state["weight"].dtype == torch.float8_e4m3fn
    with pytest.raises(RuntimeError, match="Invalid scalar type"):
        get_model_state_dict(model, options=SAVE)


CASES = [
    _copies_tied_weights_and_drops_versions,
    _steps_an_optimizer_without_state,
    _does_not_load_an_optimizer_with_state_for_some_parameters,
    _leaves_8_bit_states_quantized,
    _raises_on_one_rank_only,
    _turns_the_loaded_entries_into_shards,
    _sends_float8_by_gloo,
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.strip("_"))
def test_torch_has_this_limit(case: Any) -> None:
    ranks.run(2, case)


def _mesh_without_the_first_rank() -> None:
    if dist.get_rank() > 0:
        model = graphshard.shard(MLP(), DeviceMesh("cpu", [1, 2]))
        assert not get_model_state_dict(model, options=SAVE)
        assert bool(graphshard.full_state_dict(model)) == (dist.get_rank() == 1)
    dist.barrier()


def test_torch_returns_nothing_if_mesh_lacks_global_rank_0() -> None:
    ranks.run(3, _mesh_without_the_first_rank)


def _sends_all_rows_to_all_ranks() -> None:
    model = graphshard.shard(MLP(), world_mesh())
    state: Any = graphshard.full_state_dict(model)
    num_bytes = sum(param.nbytes for param in MLP().parameters())
    recording.clear()
    graphshard.load_full_state_dict(model, state)
    # Rows are scattered; only names, shapes and dtypes are broadcast.
    assert all(event.dtype != torch.float32 for event in recording.events("broadcast"))
    recording.clear()
    set_model_state_dict(model, state, options=LOAD)
    rows = [e for e in recording.events("broadcast") if e.dtype == torch.float32]
    assert sum(event.bytes for event in rows) == num_bytes


def test_torch_sends_all_rows_to_all_ranks() -> None:
    ranks.run(2, _sends_all_rows_to_all_ranks, backend=recording.BACKEND)
