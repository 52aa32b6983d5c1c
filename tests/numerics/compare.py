"""Comparisons of sharded training with a reference.

`Twins` holds a compiled model and an unsharded copy of it. The copy sees the batches of all ranks
and averages their losses, so its gradients are the expected full gradients on every rank. Errors
are relative to the norm of the expected tensor; `distances` bounds this norm from below.
"""

from __future__ import annotations

import copy
import gc
import math
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

import graphshard
from graphshard.ops.float8_math import TENSORWISE
from graphshard.ops.float8_ops import float8_error
from tests.models import Trainable

TOLERANCE = 2e-5
SMALL = 1e-2
"""Lower bound of the norm in relative errors, as a fraction of the joint norm of all tensors."""

Loss = Callable[[Any, Any], Tensor]
"""Function ``loss(model, batch)``."""
Tensors = Mapping[str, Tensor | None]
"""Tensors by name; None for a missing gradient."""

NEEDS_NEWER_FSDP2 = pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason="FSDP2 in torch 2.11 neither casts dataclasses nor repeats casts in recomputation",
)

NEEDS_FP8 = pytest.mark.skipif(
    float8_error("cpu", TENSORWISE) is not None, reason="this CPU has no fp8 matmuls"
)


def compare_with_fsdp2(names: Iterable[str], not_on_2_11: Collection[str]) -> list[Any]:
    """Return names as pytest parameters; before torch 2.13, skip the names in `not_on_2_11`."""
    marks = {name: [NEEDS_NEWER_FSDP2] for name in not_on_2_11}
    return [pytest.param(name, marks=marks.get(name, [])) for name in names]


def call_model(model: Any, batch: Any) -> Tensor:
    return model(batch)


def world_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size(),))


def named_mesh(shape: tuple[int, ...]) -> DeviceMesh:
    """Return a mesh of shards or, if 2D, of replicas of shards; FSDP2 requires names."""
    names = ("replicate", "shard")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def generator(*key: int) -> torch.Generator:
    seed = 0
    for part in key:
        seed = seed * 1009 + part + 1
    return torch.Generator().manual_seed(seed)


def draw(
    make: Callable[[torch.Generator], Any], step: int, num_ranks: int | None = None
) -> list[Any]:
    """Return the batches of all ranks in a step."""
    return [make(generator(step, rank)) for rank in range(num_ranks or dist.get_world_size())]


def whole(tensor: Tensor) -> Tensor:
    """Return a full, plain copy of a tensor. Collective if the tensor is sharded."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    if tensor.dtype in (torch.int8, torch.int16, torch.bool):  # gloo cannot gather these
        return tensor.int().full_tensor().to(tensor.dtype)
    return tensor.full_tensor().clone()


def full_values(model: nn.Module) -> dict[str, Tensor]:
    """Return full copies of the entries of a state dict. Collective if the model is sharded."""
    return {name: whole(value) for name, value in model.state_dict().items()}


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Return `|ours - theirs| / |theirs|`; check dtype and shape. Collective if one is sharded."""
    ours, theirs = whole(ours), whole(theirs)
    assert ours.dtype == theirs.dtype, (ours.dtype, theirs.dtype)
    assert ours.shape == theirs.shape, (ours.shape, theirs.shape)
    if ours.numel() == 0 or torch.equal(ours, theirs):
        return 0.0
    ours, theirs = ours.double(), theirs.double()
    return float((ours - theirs).norm() / theirs.norm().clamp_min(1e-12))


def assert_close(
    what: str, ours: Tensor | None, theirs: Tensor | None, tolerance: float = TOLERANCE
) -> None:
    """Assert that two tensors agree or are both None; `what` names them in the error."""
    assert (ours is None) == (theirs is None), f"{what}: {ours} instead of {theirs}"
    if ours is not None and theirs is not None:
        error = relative_error(ours, theirs)
        assert error <= tolerance, f"{what}: relative error {error:.2e}"


def full_grads(model: nn.Module) -> dict[str, Tensor | None]:
    """Return full copies of all gradients by name. Collective if the model is sharded."""
    grads = {name: param.grad for name, param in model.named_parameters()}
    return {name: None if grad is None else whole(grad) for name, grad in grads.items()}


@dataclass
class History:
    """Losses and gradients of a training run.

    Attributes:
        losses: loss of each step or microbatch.
        grads: full gradients of each step, by parameter name; None for a missing gradient.
    """

    losses: list[Tensor] = field(default_factory=list)
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)

    def note_grads(self, model: nn.Module) -> None:
        """Append the gradients of a step. Collective if the model is sharded."""
        self.grads.append(full_grads(model))


def train_steps(
    call: Callable[..., Any],
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss = call_model,
    lr: float = 0.05,
) -> History:
    """Train a model with SGD; `call` runs its forward."""
    history, optimizer = History(), None
    for batch in batches:
        result = loss(call, batch)
        result.backward()
        history.losses.append(result.detach())
        history.note_grads(model)
        optimizer = optimizer or sgd(model, lr)  # the first forward shards the model
        optimizer.step()
        optimizer.zero_grad()
    return history


def assert_equal(ours: History, theirs: History, tolerance: float = 0.0) -> None:
    """Assert that losses and gradients have equal dtypes and equal values, by default bitwise."""
    for step, pair in enumerate(zip(ours.losses, theirs.losses, strict=True)):
        assert_close(f"loss {step}", *pair, tolerance)
    for step, (mine, other) in enumerate(zip(ours.grads, theirs.grads, strict=True)):
        assert mine.keys() == other.keys()
        for name, grad in mine.items():
            assert_close(f"{name}.grad in step {step}", grad, other[name], tolerance)


def assert_history_rounded(
    ours: History, theirs: History, exact: History, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Assert that rounding explains all errors of losses and gradients (see `assert_rounded`)."""
    histories = (ours, theirs, exact)
    assert_rounded("losses", *({"": torch.stack(h.losses)} for h in histories), dtype)
    assert_rounded("gradients", *map(_grads_by_step, histories), dtype)


def _grads_by_step(history: History) -> Tensors:
    steps = enumerate(history.grads)
    return {f"{name} in step {step}": grad for step, of in steps for name, grad in of.items()}


def assert_rounded(
    what: str,
    ours: Tensors,
    theirs: Tensors,
    exact: Tensors,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Assert that rounding explains the errors of `ours`.

    The expected rounding depends on the CPU's kernels, so it is measured: the error of `ours` may
    be twice that of `theirs`, or one eps of `dtype`, whichever is larger. This applies to the
    largest error of any tensor, and to the error of all tensors concatenated.

    Args:
        what: name of the tensors in the error message.
        ours: values to check.
        theirs: values from a trusted implementation, in the same precision on this machine.
        exact: values computed from the same inputs in a higher precision.
        dtype: lowest precision in the computation.
    """
    assert _dtypes(ours) == _dtypes(theirs) and ours.keys() == exact.keys()
    error, name, together = distances(ours, exact)
    their_error, _, their_together = distances(theirs, exact)
    eps = torch.finfo(dtype).eps
    for of, found, expected in (name, error, their_error), ("all", together, their_together):
        assert found <= max(2 * expected, eps), (
            f"{what}, {of}: relative error {found:.2e}, but rounding explains only {expected:.2e}"
        )


def _dtypes(tensors: Tensors) -> dict[str, torch.dtype | None]:
    return {name: None if t is None else t.dtype for name, t in tensors.items()}


def distances(rounded: Tensors, exact: Tensors, small: float = SMALL) -> tuple[float, str, float]:
    """Return the largest relative error, its tensor's name, and the error of all tensors as one.

    The error of a small tensor is relative to `small` times the joint norm, since the tensor may be
    pure rounding error.
    """
    sizes, errors = {}, {}
    for name, value in exact.items():
        ours = rounded[name]
        assert (ours is None) == (value is None), f"{name}: {ours} instead of {value}"
        if ours is not None and value is not None:
            assert ours.shape == value.shape, (name, ours.shape, value.shape)
            sizes[name] = float(value.double().norm())
            errors[name] = float((ours.double() - value.double()).norm())
    total = math.hypot(*sizes.values())
    relative = {name: errors[name] / max(size, small * total) for name, size in sizes.items()}
    worst = max(relative, key=relative.__getitem__)
    return relative[worst], worst, math.hypot(*errors.values()) / total


def assert_sharded(model: nn.Module) -> None:
    """Assert that parameters and gradients are DTensors, sharded on dim 0 where possible."""
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor) and isinstance(param, nn.Parameter), (name, type(param))
        kind = Shard(0) if param.dim() and param.numel() else Replicate()
        assert param.placements == (kind,), (name, param.placements)
        if param.grad is not None:
            assert isinstance(param.grad, DTensor), name
            assert param.grad.placements == param.placements, name


def assert_plain(model: nn.Module) -> None:
    for name, param in model.named_parameters():
        assert not isinstance(param, DTensor), name


def assert_same(model: nn.Module, reference: nn.Module, tolerance: float = TOLERANCE) -> None:
    """Assert that all parameters agree in name, ``requires_grad``, value and gradient."""
    ours, theirs = dict(model.named_parameters()), dict(reference.named_parameters())
    assert list(ours) == list(theirs)
    for name, param in theirs.items():
        assert ours[name].requires_grad == param.requires_grad, name
        assert_close(f"{name}.grad", ours[name].grad, param.grad, tolerance)
        assert_close(name, ours[name], param, tolerance)


def compile_sharded(model: Any, *, compiler: str = "aot_eager", **options: Any) -> Any:
    """Compile a model with graphshard over all ranks, with ``fullgraph=True``."""
    backend = graphshard.backend(world_mesh(), compiler=compiler, **options)
    return torch.compile(model, backend=backend, fullgraph=True)


def by_fsdp2(model: nn.Module, policies: Mapping[str, MixedPrecisionPolicy]) -> nn.Module:
    """Apply FSDP2 to modules of a model, by FQN, and to the model itself (""); return it."""
    for fqn in sorted({"", *policies}, key=len, reverse=True):  # inner modules first
        policy = policies.get(fqn, MixedPrecisionPolicy())
        fully_shard(model.get_submodule(fqn), mesh=world_mesh(), mp_policy=policy)
    return model


class Twins:
    """A compiled model and its unsharded copy.

    Args:
        reference: unsharded model with the same values; by default a deep copy of `model`.
        function: function from a model to the callable to compile; by default, the model itself.
        options: further arguments of ``graphshard.backend``.
    """

    def __init__(
        self,
        model: nn.Module,
        reference: nn.Module | None = None,
        *,
        function: Callable[[nn.Module], Any] | None = None,
        fullgraph: bool = True,
        compiler: str = "aot_eager",
        dynamic: bool | None = None,
        mesh: DeviceMesh | None = None,
        **options: Any,
    ) -> None:
        torch._dynamo.utils.counters.clear()
        self.model = model
        self.reference = reference or copy.deepcopy(model)
        self.mesh = mesh or world_mesh()
        self.backend = graphshard.backend(self.mesh, compiler=compiler, **options)
        target, self.plain = model, self.reference
        if function:
            target, self.plain = function(model), function(self.reference)
        self.compiled = torch.compile(
            target, backend=self.backend, fullgraph=fullgraph, dynamic=dynamic
        )

    def backward(self, batches: Sequence[Any], loss: Loss = call_model) -> Tensor:
        """Run forward and backward of both models; compare and return this rank's loss."""
        rank = self.mesh.get_local_rank() if self.mesh.ndim == 1 else dist.get_rank()
        ours = loss(self.compiled, batches[rank])
        ours.backward()
        theirs = [loss(self.plain, batch) for batch in batches]
        torch.stack(theirs).mean().backward()
        assert_close("loss", ours, theirs[rank])
        return ours.detach()

    def check(self, tolerance: float = TOLERANCE) -> None:
        """Assert that the model is sharded and matches its copy, gradients included."""
        assert_sharded(self.model)
        assert_same(self.model, self.reference, tolerance)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.model.zero_grad(set_to_none)
        self.reference.zero_grad(set_to_none)

    def step(self) -> None:
        """Step both models with stateless SGD and free their gradients."""
        for model in (self.model, self.reference):
            sgd(model).step()
        self.zero_grad()

    def train(
        self,
        make_batch: Callable[[torch.Generator], Any],
        steps: int = 3,
        loss: Loss = call_model,
    ) -> None:
        """Train both models with SGD; compare losses, gradients and parameters in each step."""
        optimizers = [sgd(self.model), sgd(self.reference)]
        for step in range(steps):
            self.backward(draw(make_batch, step, self.mesh.size()), loss)
            self.check()
            step_all(*optimizers)


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr)


def step_all(*optimizers: torch.optim.Optimizer) -> None:
    """Step optimizers and free the gradients."""
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def train(kind: Trainable, steps: int = 3, **kwargs: Any) -> None:
    """Train a model next to its unsharded copy: a complete test for `ranks.run`."""
    Twins(kind(), **kwargs).train(kind.batch, steps)


def num_graphs() -> int:
    """Return the number of graphs compiled since Dynamo's counters were cleared, as by `Twins`."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@contextmanager
def graphshard_warnings() -> Iterator[list[str]]:
    """Yield a list to which graphshard's warnings are added at the end of the block."""
    gc.collect()  # unused backends of earlier tests, which would warn
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(w.message) for w in caught if str(w.message).startswith("graphshard:")]
