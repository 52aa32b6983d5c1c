"""``torch.optim.swa_utils`` on a sharded model, compared with an unsharded one."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn, update_bn

import graphshard
from tests.models import ConvNet
from tests.numerics.compare import (
    Twins,
    assert_close,
    assert_same,
    assert_sharded,
    draw,
    full_values,
    sgd,
    whole,
)
from tests.ranks import on_ranks


def _averaged(model: nn.Module) -> Any:
    return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))


def _save_and_load(average: Any) -> None:
    full = graphshard.full_state_dict(average)
    values = full_values(average)
    if full:
        plain = _averaged(ConvNet())
        plain.load_state_dict(full)
        assert all(torch.equal(plain.state_dict()[name], values[name]) for name in values)
    file = io.BytesIO()
    torch.save(average.state_dict(), file)
    file.seek(0)
    for by_each_rank in (False, True):
        again = _averaged(graphshard.shard(ConvNet(), average.module.head.weight.device_mesh))
        if by_each_rank:
            again.load_state_dict(torch.load(file))
        else:
            graphshard.load_full_state_dict(again, full)
        assert_sharded(again)
        loaded = again.state_dict()
        assert all(torch.equal(whole(loaded[name]), values[name]) for name in values)


@on_ranks(2)
def test_weight_average_with_batch_norm_matches_unsharded_copy() -> None:
    model = ConvNet()
    twins = Twins(model, copy.deepcopy(model))
    graphshard.shard(model, twins.mesh)
    averages = [_averaged(each) for each in (model, twins.reference)]
    optimizers = [sgd(model), sgd(twins.reference)]
    for step in range(2):
        twins.backward(draw(ConvNet.batch, step))
        for average, optimizer, each in zip(averages, optimizers, (model, twins.reference)):
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(each)
    loader = [[batch] for batch in draw(ConvNet.batch, 9)]  # every rank has all batches
    for average in averages:
        update_bn(loader, average)
    assert_sharded(averages[0])
    assert_same(*averages)
    for (name, ours), theirs in zip(averages[0].named_buffers(), averages[1].buffers()):
        assert_close(name, ours, theirs)
    _save_and_load(averages[0])
