"""Steps of training on one of many ranks, on a GPU that is not there: `record_steps`.

The process group has the other ranks' places and no ranks; parameters and batches are fake. The
first step compiles; the last one is what is recorded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from .._torch.distributed import fake_ranks
from .._torch.tensors import new_fake_mode, tree_leaves
from ..backend import backend, shard
from ..planning.plan import Plan
from ..scripts import loss_of
from .actions import Action
from .recorder import Recorder
from .runs import GraphRun

NUM_STEPS = 3
"""DTensor tries each new operator on fake tensors of full size, which would pass for memory. The
optimizer's are new in the first step, and others in the second one, which finds its state."""
MakeModel = Callable[[], tuple[nn.Module, Any]]
"""Returns a model, and the inputs of a step: a tuple, or a dictionary of keywords."""


Step = Callable[[nn.Module, Callable[..., Any], Any], None]
"""One step: of the model, the compiled model and the inputs."""


def forward_backward(model: nn.Module, compiled: Callable[..., Any], inputs: Any) -> None:
    """Compute the gradients of one batch."""
    loss_of(_call(compiled, inputs)).backward()


def _call(model: Callable[..., Any], inputs: Any) -> Any:
    return model(**inputs) if isinstance(inputs, Mapping) else model(*inputs)


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
        actions: of the last step, the optimizer's among them.
        runs: calls of graphs in the last step.
        summary: ``Backend.summary()``; "" of an unsharded model.
        trained_bytes: of the device, of the shards that are trained; 0 of an unsharded model.
    """

    plans: tuple[Plan, ...]
    codes: tuple[str, ...]
    kernels: tuple[tuple[str, str], ...]
    actions: tuple[Action, ...]
    runs: tuple[GraphRun, ...]
    summary: str = ""
    trained_bytes: int = 0


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
        options: of ``graphshard.backend``, read behind the call of ``make_model``.
        dynamic: argument of ``torch.compile``.
    """
    recorder.clear()
    with group_of(cluster) as mesh:
        fake = new_fake_mode()
        with fake, torch.device("cuda:0"):
            model, inputs = make_model()
        # There is no rank to take values from; and ranks exchange names outside of the mode.
        options = {**options, "sync_module_states": False}
        ours = backend(mesh, **options)
        with fake:
            ours.forward_check.trace_plain(model, lambda: _call(model, inputs))
        shard(model, mesh, **options)
        compiled = torch.compile(model, backend=ours, dynamic=dynamic)
        train(recorder, fake, model, compiled, inputs, step)
        return dataclasses.replace(
            recording_of(recorder, ours.plans),
            summary=ours.summary(),
            trained_bytes=_trained_bytes(model),
        )


@contextmanager
def group_of(cluster: Cluster) -> Iterator[DeviceMesh]:
    """Have a process group without the other ranks meanwhile."""
    names = ("replicate", "shard")[-len(cluster.mesh) :]
    with fake_ranks(cluster.world_size, cluster.rank):
        yield init_device_mesh("cuda", cluster.mesh, mesh_dim_names=names)


def record_unsharded(
    recorder: Recorder,
    make_model: MakeModel,
    dtype: torch.dtype,
    *,
    step: Step = forward_backward,
    dynamic: bool | None = None,
) -> Recording:
    """Train a model with ``torch.compile`` alone, and return what its last step does.

    Args:
        dtype: default dtype while ``make_model`` is called.
    """
    recorder.clear()
    fake, before = new_fake_mode(), torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with fake, torch.device("cuda:0"):
            model, inputs = make_model()
    finally:
        torch.set_default_dtype(before)
    train(recorder, fake, model, torch.compile(model, dynamic=dynamic), inputs, step)
    return recording_of(recorder)


def train(
    recorder: Recorder,
    fake: AbstractContextManager[Any],
    model: nn.Module,
    compiled: Callable[..., Any],
    inputs: Any,
    step: Step = forward_backward,
) -> None:
    """Train for ``NUM_STEPS`` under a fake mode, and record the last one."""
    torch.compiler.reset()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=True)
    for number in range(NUM_STEPS):
        is_last = number == NUM_STEPS - 1
        with fake, recorder.recording() if is_last else nullcontext():
            if is_last:
                recorder.see(_kept(model, inputs, optimizer))
            step(model, compiled, inputs)
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)


def _kept(model: nn.Module, inputs: Any, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield the tensors that there are between two steps."""
    held = [*model.parameters(), *model.buffers(), *tree_leaves([inputs, optimizer.state_dict()])]
    for tensor in held:
        if isinstance(tensor, Tensor):
            yield _local(tensor)


def _trained_bytes(model: nn.Module) -> int:
    trained = [_local(param) for param in model.parameters() if param.requires_grad]
    return sum(shard.nbytes for shard in trained if shard.device.type == "cuda")


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def recording_of(recorder: Recorder, plans: Sequence[Plan] = ()) -> Recording:
    """Return what a recorder has taken in."""
    return Recording(
        plans=tuple(plans),
        codes=tuple(recorder.codes),
        kernels=tuple(recorder.kernels),
        actions=tuple(recorder.actions),
        runs=tuple(recorder.runs),
    )
