"""What the numeric tests compare with and how. `Twins` holds a compiled model and an unsharded copy
of it: the copy sees the batches of all ranks and averages their losses, so its gradients are what
every rank's sharded gradients have to be. All errors are relative, in the norm of one tensor."""

from __future__ import annotations

import copy
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
from torch.distributed.tensor import DTensor, Replicate, Shard

import graphshard
from graphshard.ops.float8_math import TENSORWISE, device_fault
from tests.models import Trainable

TOLERANCE = 1e-5
SMALL = 1e-2
"""A tensor is small that is less than this part of all tensors together."""

Loss = Callable[[Any, Any], Tensor]
"""``loss(model, batch)``."""
Tensors = Mapping[str, Tensor | None]
"""By name; None: a gradient that there is not."""

NEEDS_NEWER_FSDP2 = pytest.mark.skipif(
    torch.__version__ < (2, 13),
    reason="FSDP2 of torch 2.11 raises: it looks into no dataclass, and recomputes without casts",
)

NEEDS_FP8 = pytest.mark.skipif(
    device_fault("cpu", TENSORWISE) is not None, reason="this CPU computes no products in fp8"
)


def beside_fsdp2(names: Iterable[str], not_on_2_11: Collection[str]) -> list[Any]:
    """Return the names as parameters of a test; FSDP2 of torch 2.11 cannot run some of them."""
    marks = {name: [NEEDS_NEWER_FSDP2] for name in not_on_2_11}
    return [pytest.param(name, marks=marks.get(name, [])) for name in names]


def call_model(model: Any, batch: Any) -> Tensor:
    """Return the loss of a model that computes it itself."""
    return model(batch)


def world_mesh() -> DeviceMesh:
    """Return a mesh of one axis over all ranks, on the CPU."""
    return init_device_mesh("cpu", (dist.get_world_size(),))


def generator(*key: int) -> torch.Generator:
    """A generator whose seed is made of a few small numbers."""
    seed = 0
    for part in key:
        seed = seed * 1009 + part + 1
    return torch.Generator().manual_seed(seed)


def draw(
    make: Callable[[torch.Generator], Any], step: int, num_ranks: int | None = None
) -> list[Any]:
    """The batches of all ranks in a step."""
    return [make(generator(step, rank)) for rank in range(num_ranks or dist.get_world_size())]


def whole(tensor: Tensor) -> Tensor:
    """A plain copy of a tensor that may be sharded; a collective if it is."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.clone()
    if tensor.dtype in (torch.int8, torch.int16, torch.bool):  # gloo gathers no such thing
        return tensor.int().full_tensor().to(tensor.dtype)
    return tensor.full_tensor().clone()


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """Return `|ours - theirs| / |theirs|` in norms; a collective if a tensor is sharded."""
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
    """Assert that two tensors agree, or that both are None; `what` names them in the error."""
    assert (ours is None) == (theirs is None), f"{what}: {ours} instead of {theirs}"
    if ours is not None and theirs is not None:
        error = relative_error(ours, theirs)
        assert error <= tolerance, f"{what}: relative error {error:.2e}"


def full_grads(model: nn.Module) -> dict[str, Tensor | None]:
    """Return copies of all gradients by parameter; a collective if the model is sharded."""
    grads = {name: param.grad for name, param in model.named_parameters()}
    return {name: None if grad is None else whole(grad) for name, grad in grads.items()}


@dataclass
class History:
    """What a training did.

    Attributes:
        losses: of every step.
        grads: full gradients of every step, by parameter; None where there was none.
    """

    losses: list[Tensor] = field(default_factory=list)
    grads: list[dict[str, Tensor | None]] = field(default_factory=list)

    def note_grads(self, model: nn.Module) -> None:
        """Add those of a step; a collective if the model is sharded."""
        self.grads.append(full_grads(model))


def train_steps(
    call: Callable[..., Any],
    model: nn.Module,
    batches: Iterable[Any],
    loss: Loss = call_model,
    lr: float = 0.05,
) -> History:
    """SGD steps of a model, each forward by `call`."""
    history, optimizer = History(), None
    for batch in batches:
        result = loss(call, batch)
        result.backward()
        history.losses.append(result.detach())
        history.note_grads(model)
        optimizer = optimizer or sgd(model, lr)  # once it is sharded
        optimizer.step()
        optimizer.zero_grad()
    return history


def assert_equal(ours: History, theirs: History) -> None:
    """Assert that losses and gradients are the same bit by bit, dtypes included."""
    for step, pair in enumerate(zip(ours.losses, theirs.losses, strict=True)):
        assert torch.equal(*pair) and pair[0].dtype == pair[1].dtype, f"loss {step}: {pair}"
    for step, (mine, other) in enumerate(zip(ours.grads, theirs.grads, strict=True)):
        assert mine.keys() == other.keys()
        for name, grad in mine.items():
            assert_close(f"{name}.grad in step {step}", grad, other[name], tolerance=0.0)


def assert_trained_alike(
    ours: History, theirs: History, exact: History, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Assert that losses and gradients are as close to the exact ones as `assert_rounded` asks."""
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
    """Assert that rounding alone takes `ours` away from the exact values.

    How much rounding is to be expected depends on the kernels, and so on the CPU. It is measured:
    `ours` may be twice as far away as `theirs`, or by one step of the dtype, whichever is larger.
    That holds for the tensor that is the furthest away, and for all tensors together.

    Args:
        what: names the tensors in the error.
        theirs: computed in the same precision on this machine, by a way that is known to be right.
        exact: computed from the same values in a higher precision.
        dtype: the lowest precision of the computation.
    """
    assert _dtypes(ours) == _dtypes(theirs) and ours.keys() == exact.keys()
    error, name, together = _distances(ours, exact)
    their_error, _, their_together = _distances(theirs, exact)
    eps = torch.finfo(dtype).eps
    for of, found, expected in (name, error, their_error), ("all", together, their_together):
        assert found <= max(2 * expected, eps), (
            f"{what}, {of}: relative error {found:.2e}, where rounding explains {expected:.2e}"
        )


def _dtypes(tensors: Tensors) -> dict[str, torch.dtype | None]:
    return {name: None if t is None else t.dtype for name, t in tensors.items()}


def _distances(rounded: Tensors, exact: Tensors) -> tuple[float, str, float]:
    """Return the largest relative error, of which tensor it is, and that of all tensors as one.

    A small tensor's error is relative to a part of all: it may be what rounding leaves of a zero.
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
    relative = {name: errors[name] / max(size, SMALL * total) for name, size in sizes.items()}
    worst = max(relative, key=relative.__getitem__)
    return relative[worst], worst, math.hypot(*errors.values()) / total


def assert_sharded(model: nn.Module) -> None:
    """Every parameter is a DTensor, split on dim 0 where it has rows; so is its gradient."""
    for name, param in model.named_parameters():
        assert isinstance(param, DTensor) and isinstance(param, nn.Parameter), (name, type(param))
        kind = Shard(0) if param.dim() and param.numel() else Replicate()
        assert param.placements == (kind,), (name, param.placements)
        if param.grad is not None:
            assert isinstance(param.grad, DTensor), name
            assert param.grad.placements == param.placements, name


def assert_plain(model: nn.Module) -> None:
    """Assert that no parameter is a DTensor."""
    for name, param in model.named_parameters():
        assert not isinstance(param, DTensor), name


def assert_same(model: nn.Module, reference: nn.Module, tolerance: float = TOLERANCE) -> None:
    """Names, ``requires_grad``, values and gradients of all parameters agree."""
    ours, theirs = dict(model.named_parameters()), dict(reference.named_parameters())
    assert list(ours) == list(theirs)
    for name, param in theirs.items():
        assert ours[name].requires_grad == param.requires_grad, name
        assert_close(f"{name}.grad", ours[name].grad, param.grad, tolerance)
        assert_close(name, ours[name], param, tolerance)


def compile_sharded(model: Any, *, compiler: str = "aot_eager", **options: Any) -> Any:
    """`torch.compile` by graphshard on the world's mesh: a call that has to be one graph."""
    backend = graphshard.backend(world_mesh(), compiler=compiler, **options)
    return torch.compile(model, backend=backend, fullgraph=True)


class Twins:
    """A compiled model and its unsharded copy.

    Args:
        reference: an unsharded model with the same values, if not a copy made here.
        function: what is compiled, given the model; the model itself if None.
        options: those of ``graphshard.backend``.
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
        """Forward and backward of both; the losses agree."""
        rank = self.mesh.get_local_rank() if self.mesh.ndim == 1 else dist.get_rank()
        ours = loss(self.compiled, batches[rank])
        ours.backward()
        theirs = [loss(self.plain, batch) for batch in batches]
        torch.stack(theirs).mean().backward()
        assert_close("loss", ours, theirs[rank])
        return ours.detach()

    def check(self, tolerance: float = TOLERANCE) -> None:
        """Assert that the model is sharded and agrees with its copy, gradients included."""
        assert_sharded(self.model)
        assert_same(self.model, self.reference, tolerance)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Zero the gradients of both models."""
        self.model.zero_grad(set_to_none)
        self.reference.zero_grad(set_to_none)

    def train(
        self,
        make_batch: Callable[[torch.Generator], Any],
        steps: int = 3,
        loss: Loss = call_model,
    ) -> None:
        """SGD steps of both; losses, gradients and parameters agree in each."""
        optimizers = [sgd(self.model), sgd(self.reference)]
        for step in range(steps):
            self.backward(draw(make_batch, step, self.mesh.size()), loss)
            self.check()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()


def sgd(model: nn.Module, lr: float = 0.05) -> torch.optim.SGD:
    """Return SGD over all parameters, without momentum."""
    return torch.optim.SGD(model.parameters(), lr)


def train(kind: Trainable, steps: int = 3, **kwargs: Any) -> None:
    """Train a class of models beside its unsharded copy; a whole test for `ranks.run`."""
    Twins(kind(), **kwargs).train(kind.batch, steps)


def num_graphs() -> int:
    """Graphs that Dynamo has made since the last `Twins` began."""
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@contextmanager
def graphshard_warnings() -> Iterator[list[str]]:
    """The texts of graphshard's own warnings meanwhile."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    texts += [str(w.message) for w in caught if str(w.message).startswith("graphshard:")]
