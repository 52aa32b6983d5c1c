"""`graphshard.optim.Muon` compared with unsharded `torch.optim.Muon` on the same gradients."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import graphshard
from graphshard.optim import Muon, muon
from tests import ranks
from tests.models import GPT, MLP, DeepGPT
from tests.multirank.test_call_log import assert_same as assert_same_texts
from tests.multirank.test_call_log import message
from tests.numerics.compare import (
    assert_same,
    compile_sharded,
    draw,
    generator,
    named_mesh,
    world_mesh,
)
from tests.ranks import on_ranks

VARIANTS: dict[str, dict[str, Any]] = {
    "default": {"lr": 0.05},
    "no nesterov": {"lr": 0.05, "nesterov": False, "momentum": 0.5, "ns_steps": 2},
    "rms": {"lr": 0.01, "adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.3},
    "tensor lr": {"lr": torch.tensor([0.05]), "ns_coefficients": (2.0, -1.5, 0.5)},
}


def _matrices(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.ndim == 2]


def _grouped(model: nn.Module) -> list[dict[str, Any]]:
    matrices = _matrices(model)
    return [{"params": matrices[::3], "momentum": 0.8}, {"params": matrices[1::3] + matrices[2::3]}]


def _give_gradients(models: Sequence[nn.Module], step: int) -> None:
    rng = generator(step)
    for ours, theirs in zip(*(model.parameters() for model in models)):
        if ours.requires_grad:
            theirs.grad = torch.randn(theirs.shape, generator=rng)
            ours.grad = theirs.grad.clone()
            if isinstance(ours, DTensor):
                ours.grad = distribute_tensor(ours.grad, ours.device_mesh, ours.placements)


def _train(models: Sequence[nn.Module], optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for step in range(3):
        _give_gradients(models, step)
        for optimizer in optimizers:
            optimizer.step()
        assert_same(*models, tolerance=0.0)


def _against_torch(
    shape: tuple[int, ...],
    variant: str = "default",
    kind: Any = DeepGPT,
    bucket_bytes: int = muon.BUCKET_BYTES,
    **sharding: Any,
) -> None:
    muon.BUCKET_BYTES, before = bucket_bytes, muon.BUCKET_BYTES
    try:
        model = kind()
        models = model, copy.deepcopy(model)
        ours, theirs = (_grouped(model) for model in models)
        options = VARIANTS[variant]
        optimizers = Muon(ours, **options), torch.optim.Muon(theirs, **options)
        graphshard.shard(model, named_mesh(shape), **sharding)  # must re-point the optimizer
        _train(models, optimizers)
    finally:
        muon.BUCKET_BYTES = before


@pytest.mark.parametrize("variant", VARIANTS)
def test_steps_match_unsharded_muon(variant: str) -> None:
    ranks.run(2, _against_torch, (2,), variant)


@pytest.mark.parametrize(
    ("kind", "shape"), [(GPT, (4,)), (MLP, (4,)), (MLP, (2, 2)), (GPT, (4, 1))]
)
def test_steps_with_many_buckets_on_four_ranks_match_unsharded_muon(
    kind: type, shape: tuple[int, ...]
) -> None:
    # The MLP has fewer matrices than ranks, one of them with fewer rows than ranks.
    ranks.run(4, _against_torch, shape, kind=kind, bucket_bytes=100)


@pytest.mark.parametrize(
    "sharding", [{"shard": False}, {"offload_policy": CPUOffloadPolicy(False)}]
)
def test_steps_of_replicated_and_offloaded_matrices_match_unsharded_muon(
    sharding: dict[str, Any],
) -> None:
    ranks.run(2, _against_torch, (2,), overrides={"*blocks.0*": sharding})


@on_ranks(1)
def test_steps_of_plain_matrices_equal_torch_muon() -> None:
    model = MLP()
    reference = copy.deepcopy(model)
    for each, kind in ((model, Muon), (reference, torch.optim.Muon)):
        optimizer = kind(_matrices(each), lr=0.1)
        each(draw(MLP.batch, 0)[0]).backward()
        optimizer.step()
    assert_same(model, reference, tolerance=0.0)


@on_ranks(2)
def test_steps_of_fsdp2_matrices_match_unsharded_muon() -> None:
    model = MLP()
    models = model, copy.deepcopy(model)
    fully_shard(model, mesh=world_mesh())  # its DTensors have the same layout as ours
    _train(models, [Muon(_matrices(models[0])), torch.optim.Muon(_matrices(models[1]))])


@on_ranks(2)
def test_optimizer_with_state_survives_sharding() -> None:
    model = MLP()
    models = model, copy.deepcopy(model)
    optimizers = Muon(_matrices(models[0])), torch.optim.Muon(_matrices(models[1]))
    _train(models, optimizers)
    graphshard.shard(model, world_mesh())
    _train(models, optimizers)


@on_ranks(2)
def test_matrices_without_gradient_are_skipped() -> None:
    model = DeepGPT()
    models = model, copy.deepcopy(model)
    graphshard.shard(model, world_mesh())
    for each in models:
        each.blocks[0].qkv.weight.requires_grad_(False)
    optimizers = Muon(_matrices(models[0])), torch.optim.Muon(_matrices(models[1]))
    _train(models, optimizers)
    _give_gradients(models, 9)
    for each, optimizer in zip(models, optimizers):
        each.blocks[1].up.weight.grad = None
        optimizer.step()
    assert_same(*models, tolerance=0.0)
    for each, optimizer in zip(models, optimizers):
        each.zero_grad()
        optimizer.step()  # no gradients at all
    _train(models, optimizers)


def _differ(known: bool) -> str:
    """Return the error of a step in which one rank lacks the gradient of a matrix.

    Args:
        known: whether to run steps with all gradients first.
    """
    model = DeepGPT()
    models = model, copy.deepcopy(model)
    graphshard.shard(model, world_mesh())
    optimizer = Muon(_matrices(model))
    if known:
        _train(models, [optimizer, torch.optim.Muon(_matrices(models[1]))])
    _give_gradients(models, 0)
    if dist.get_rank() == 1:
        model.blocks[1].up.weight.grad = None
    return message(optimizer.step)


@pytest.mark.parametrize("known", [False, True])
def test_gradient_missing_on_one_rank_raises_on_all(known: bool) -> None:
    texts = ranks.run_fresh(2, _differ, known)
    assert_same_texts(texts, "a step of Muon", "blocks.1.up.weight", ".grad")


# State in checkpoints.


def _trained(steps: int) -> tuple[nn.Module, Any, Muon]:
    model = graphshard.shard(MLP(), world_mesh())
    optimizer, compiled = Muon(_matrices(model), lr=0.05), compile_sharded(model)
    _continue(compiled, optimizer, range(steps))
    return model, compiled, optimizer


def _continue(compiled: Any, optimizer: Muon, steps: range) -> None:
    for step in steps:
        compiled.zero_grad()
        compiled(draw(MLP.batch, step)[dist.get_rank()]).backward()
        optimizer.step()


@pytest.mark.parametrize("by_file", [False, True])
@on_ranks(2)
def test_resumed_training_matches_uninterrupted(tmp_path: Path, by_file: bool) -> None:
    model, compiled, optimizer = _trained(2)
    if by_file:
        full, full_optim = graphshard.full_state_dict(model, optimizer)
    else:
        dcp.save(dict(zip("mo", get_state_dict(model, optimizer))), checkpoint_id=tmp_path)
    _continue(compiled, optimizer, range(2, 4))
    torch.manual_seed(5)
    again, compiled, resumed = _trained(0)
    if by_file:
        graphshard.load_full_state_dict(again, full, resumed, full_optim)
    else:
        states: Any = dict(zip("mo", get_state_dict(again, resumed)))
        dcp.load(states, checkpoint_id=tmp_path)
        set_state_dict(again, resumed, model_state_dict=states["m"], optim_state_dict=states["o"])
    for state in resumed.state.values():
        assert isinstance(state["momentum_buffer"], DTensor)
    _continue(compiled, resumed, range(2, 4))
    assert_same(again, model, tolerance=0.0)


# Errors, and other ways to call ``step``.


def test_parameters_that_are_not_matrices_raise() -> None:
    layer = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"parameter 'bias' has shape \(2,\).*AdamW"):
        Muon(layer.named_parameters())
    optimizer = Muon([layer.weight])
    with pytest.raises(ValueError, match=r"parameter 0 of group 1 has shape \(2,\)"):
        optimizer.add_param_group({"params": [layer.bias]})
    assert len(optimizer.param_groups) == 1


@on_ranks(2)
def test_unsupported_placements_raise() -> None:
    mesh = world_mesh()
    param = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)]))
    param.grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(1)])
    with pytest.raises(ValueError, match="Muon cannot step parameter 0 of group 0, placed as"):
        Muon([param]).step()
    param = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)]))
    param.grad = distribute_tensor(torch.ones(4, 4), mesh, [Replicate()])
    with pytest.raises(ValueError, match="gradient must have the same placements"):
        Muon([param]).step()
    optimizer, replicated = Muon([param]), param.grad
    param.grad = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)])
    optimizer.step()
    param.grad = replicated  # the first step's plan does not cover it
    with pytest.raises(ValueError, match="gradient must have the same placements"):
        optimizer.step()


@on_ranks(2)
def test_state_of_unsharded_optimizer_raises() -> None:
    plain = nn.Parameter(torch.ones(4, 4))
    plain.grad = torch.ones(4, 4)
    unsharded = Muon([plain])
    unsharded.step()
    param = nn.Parameter(distribute_tensor(torch.ones(4, 4), world_mesh(), [Shard(0)]))
    param.grad = distribute_tensor(torch.ones(4, 4), world_mesh(), [Shard(0)])
    optimizer = Muon([param])
    optimizer.step()
    optimizer.load_state_dict(unsharded.state_dict())
    with pytest.raises(ValueError, match="is a Tensor, but the parameter is a DTensor"):
        optimizer.step()


@on_ranks(2)
def test_step_accepts_closure_compilation_and_torch_state() -> None:
    model, compiled, optimizer = _trained(1)
    twin = copy.deepcopy(model)
    theirs = torch.optim.Muon(_matrices(twin), lr=0.05)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    other = Muon(_matrices(twin))
    other.load_state_dict(theirs.state_dict())
    batch = draw(MLP.batch, 1)[dist.get_rank()]

    def closure() -> Tensor:
        loss: Tensor = compiled(batch)
        loss.backward()
        return loss

    assert isinstance(optimizer.step(closure), Tensor)
    compile_sharded(twin)(batch).backward()
    other.step()
    assert_same(model, twin, tolerance=0.0)
    torch.compile(optimizer.step, backend="aot_eager")()
    other.step()
    assert_same(model, twin, tolerance=0.0)
