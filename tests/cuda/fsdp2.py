"""Eager FSDP2 on a GPU that is not there, to compare with: `record_fsdp2`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from graphshard._torch.tensors import new_fake_mode
from graphshard.check.recorder import Recorder
from graphshard.check.step import (
    Cluster,
    MakeModel,
    Recording,
    Step,
    group_of,
    recording_of,
    train,
)


def record_fsdp2(
    recorder: Recorder,
    make_model: MakeModel,
    cluster: Cluster,
    options: Mapping[str, Any],
    step: Step,
) -> Recording:
    """Train a model whose layers and whose rest are groups of FSDP2's, without a compiler.

    Args:
        options: of ``fully_shard``.
    """
    recorder.clear()
    with group_of(cluster) as mesh:
        fake = new_fake_mode()
        with fake, torch.device("cuda:0"):
            model, inputs = make_model()
            for layers in [m for m in model.modules() if isinstance(m, nn.ModuleList)]:
                for layer in layers:
                    fully_shard(layer, mesh=mesh, **options)
            fully_shard(model, mesh=mesh, **options)
        train(recorder, fake, model, model, inputs, step)
        return recording_of(recorder)
