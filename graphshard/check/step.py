"""Two steps of training on one of many ranks, on a GPU that is not there: `record_steps`.

The process group has the other ranks' places and no ranks; parameters and batches are fake. The
first step compiles; the second one is what is recorded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from .._torch.distributed import fake_store
from .._torch.tensors import new_fake_mode, tree_leaves
from ..backend import backend, shard
from ..planning.plan import Plan
from .actions import Action
from .recorder import GraphRun, Recorder

NUM_STEPS = 2
MakeModel = Callable[[], tuple[nn.Module, Any]]
"""Returns a model, and the inputs of a step: a tuple, or a dictionary of keywords."""


Step = Callable[[nn.Module, Callable[..., Any], Any], None]
"""One step: of the model, the compiled model and the inputs."""


def forward_backward(model: nn.Module, compiled: Callable[..., Any], inputs: Any) -> None:
    """Compute the gradients of one batch."""
    keywords = isinstance(inputs, Mapping)
    _loss(compiled(**inputs) if keywords else compiled(*inputs)).backward()


@dataclass(frozen=True)
class Cluster:
    """One rank of a mesh.

    Attributes:
        mesh: sizes of its axes; two are replicas and shards.
        rank: the one whose step is recorded.
    """

    mesh: tuple[int, ...]
    rank: int = 0

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return math.prod(self.mesh)


@dataclass(frozen=True)
class Recording:
    """Plans, code and actions of one step.

    Attributes:
        plans: of all graphs.
        codes: that Inductor wrote, by graph.
        kernels: name and source of each.
        actions: of the step, and of those before.
        runs: calls of graphs in the last step.
    """

    plans: tuple[Plan, ...]
    codes: tuple[str, ...]
    kernels: tuple[tuple[str, str], ...]
    actions: tuple[Action, ...]
    runs: tuple[GraphRun, ...]


def record_steps(
    recorder: Recorder,
    make_model: MakeModel,
    cluster: Cluster,
    options: Mapping[str, Any],
    *,
    step: Step = forward_backward,
    dynamic: bool | None = None,
) -> Recording:
    """Train a sharded model, and return what its last step does.

    Args:
        make_model: called with the GPU as the default device.
        options: of ``graphshard.backend``.
        dynamic: argument of ``torch.compile``.
    """
    torch.compiler.reset()
    recorder.clear()
    dist.init_process_group(
        "fake", store=fake_store(), rank=cluster.rank, world_size=cluster.world_size
    )
    try:
        return _record(recorder, make_model, cluster, options, step, dynamic)
    finally:
        dist.destroy_process_group()


def _record(
    recorder: Recorder,
    make_model: MakeModel,
    cluster: Cluster,
    options: Mapping[str, Any],
    step: Step,
    dynamic: bool | None,
) -> Recording:
    names = ("replicate", "shard")[-len(cluster.mesh) :]
    mesh = init_device_mesh("cuda", cluster.mesh, mesh_dim_names=names)
    fake = new_fake_mode()
    with fake, torch.device("cuda:0"):
        model, inputs = make_model()
    # There is no rank to take values from; and ranks exchange names outside of the mode.
    options = {**options, "sync_module_states": False}
    shard(model, mesh, **options)
    ours = backend(mesh, **options)
    compiled = torch.compile(model, backend=ours, dynamic=dynamic)
    for _ in range(NUM_STEPS):
        recorder.begin_step()
        with fake:
            step(model, compiled, inputs)
        model.zero_grad(set_to_none=True)
    return Recording(
        plans=tuple(ours.plans),
        codes=tuple(recorder.codes),
        kernels=tuple(recorder.kernels),
        actions=tuple(recorder.actions),
        runs=tuple(recorder.runs),
    )


def _loss(outputs: Any) -> Tensor:
    """Return the loss among a model's outputs: the first tensor's sum, if that is no scalar."""
    loss = getattr(outputs, "loss", None)
    if loss is None:
        loss = next(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))
    return loss if loss.dim() == 0 else loss.float().sum()
