"""Record a training step of one rank on a simulated GPU.

The process group is fake: only this rank exists. Parameters and batches are fake tensors. The
first step compiles; only the last one is recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .._torch.tensors import new_fake_mode, tree_leaves
from ..dynamo_backend import backend, shard
from ..fake_mesh import Ranks, fake_mesh, sharding_options
from ..planning.plan import Plan
from ..scripts import Inputs, call_model, loss_of
from ..tensor_parallel import Parallelize
from .actions import Action, GraphCall
from .recorder import Recorder

# Only the last step is recorded. DTensor propagates each new operator through full-size fake
# tensors, which would be counted as memory. The optimizer runs new operators in the first step, and
# again in the second, when it has state.
NUM_STEPS = 3

# Returns a model and the inputs of a step: a tuple, or a dictionary of keyword arguments.
MakeModel = Callable[[], tuple[nn.Module, Inputs]]

# Runs one step, given the model, the compiled model and the inputs.
Step = Callable[[nn.Module, Callable[..., object], Inputs], None]


def forward_backward(model: nn.Module, compiled: Callable[..., object], inputs: Inputs) -> None:
    """Compute the gradients of one batch."""
    loss_of(call_model(compiled, inputs)).backward()


@dataclass(frozen=True)
class Recording:
    """Plans and code of all compiled graphs, and the actions of the last step."""

    plans: tuple[Plan, ...]  # empty for an unsharded model
    codes: tuple[str, ...]  # source code that Inductor wrote for each graph
    kernels: tuple[tuple[str, str], ...]  # name and source of each Triton kernel
    actions: tuple[Action, ...]  # actions of the last step, including the optimizer's
    calls: tuple[GraphCall, ...]  # graph calls of the last step
    summary: str = ""  # ``Backend.summary()``
    trained_bytes: int = 0  # size of the trainable shards on the device


def record_steps(
    recorder: Recorder,
    make_model: MakeModel,
    ranks: Ranks,
    options: Mapping[str, Any],
    *,
    rank: int = 0,
    step: Step = forward_backward,
    dynamic: bool | None = None,
    parallelize: Parallelize | None = None,
) -> Recording:
    """Shard a model, train it for a few steps, and record the last step.

    Args:
        make_model: function that returns the model and its inputs, with the GPU as default device.
        options: arguments of ``graphshard.backend``, read after ``make_model``, which may add some.
        rank: rank whose step is recorded.
        dynamic: argument of ``torch.compile``.
        parallelize: function that splits the model over the mesh axis "tp" or "ep", if the axis has
            several ranks.
    """
    recorder.clear()
    with fake_mesh(ranks, "cuda", rank) as mesh:
        fake = new_fake_mode()
        with fake, torch.device("cuda:0"):
            model, inputs = make_model()
            if parallelize is not None and ranks.split_axis:
                parallelize(model, mesh[ranks.split_axis])
        # No dumps: they would replace those of a training run.
        options = {**sharding_options(options, model, mesh, ranks), "dump": None}
        ours = backend(**options)
        with fake:
            ours.forward_check.trace_plain(model, lambda: call_model(model, inputs))
        # ``shard`` runs outside of the fake mode: ranks exchange parameter names in real tensors.
        shard(model, **options)
        compiled = torch.compile(model, backend=ours, dynamic=dynamic)
        train(recorder, fake, model, compiled, inputs, step)
        return collect_recording(recorder, ours.plans, ours.summary(), _trained_bytes(model))


def train(
    recorder: Recorder,
    fake: AbstractContextManager[object],
    model: nn.Module,
    compiled: Callable[..., object],
    inputs: Inputs,
    step: Step = forward_backward,
) -> None:
    """Train for ``NUM_STEPS`` under a fake mode, recording the last step."""
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


def _kept(model: nn.Module, inputs: Inputs, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    held = [*model.parameters(), *model.buffers(), *tree_leaves([inputs, optimizer.state_dict()])]
    for tensor in held:
        if isinstance(tensor, Tensor):
            yield _local(tensor)


def _trained_bytes(model: nn.Module) -> int:
    trained = [_local(param) for param in model.parameters() if param.requires_grad]
    return sum(shard.nbytes for shard in trained if shard.device.type == "cuda")


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def collect_recording(
    recorder: Recorder, plans: Sequence[Plan] = (), summary: str = "", trained_bytes: int = 0
) -> Recording:
    """Return the contents of ``recorder`` and the other arguments as a ``Recording``."""
    return Recording(
        plans=tuple(plans),
        codes=tuple(recorder.codes),
        kernels=tuple(recorder.kernels),
        actions=tuple(recorder.actions),
        calls=tuple(recorder.calls),
        summary=summary,
        trained_bytes=trained_bytes,
    )
