"""Record a step of eager FSDP2 on a simulated GPU, as a baseline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

from graphshard._torch.tensors import new_fake_mode
from graphshard.check.recorder import Recorder
from graphshard.check.step import (
    MakeModel,
    Recording,
    Step,
    collect_recording,
    train,
)
from graphshard.fake_mesh import Ranks, fake_mesh


def record_fsdp2(
    recorder: Recorder,
    make_model: MakeModel,
    ranks: Ranks,
    rank: int,
    options: Mapping[str, Any],
    step: Step,
) -> Recording:
    """Record a step of a model under eager FSDP2, with a group per layer and one for the rest.

    Args:
        options: arguments of ``fully_shard``.
    """
    recorder.clear()
    with fake_mesh(ranks, "cuda", rank) as mesh:
        fake = new_fake_mode()
        with fake, torch.device("cuda:0"):
            model, inputs = make_model()
            for layers in [m for m in model.modules() if isinstance(m, nn.ModuleList)]:
                for layer in layers:
                    fully_shard(layer, mesh=mesh, **options)
            fully_shard(model, mesh=mesh, **options)
        train(recorder, fake, model, model, inputs, step)
        return collect_recording(recorder)
