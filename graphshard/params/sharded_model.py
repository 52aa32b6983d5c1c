"""State shared by all modules and sharded parameters of one model."""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, SupportsIndex

import torch
import torch.distributed as dist
from torch import nn

from .._torch.autograd import on_backward_success
from .._torch.distributed import process_group
from .._torch.dynamo import graph_break_reasons
from ..errors import BackendError
from ..ops.accumulators import ACCUMULATOR_NAMES
from ..options.options import Options
from .eager_calls import eager_reduction
from .grad_accumulation import GradAccumulation
from .layout import Layout
from .no_pickle import refuse_pickling

_MODEL = "_graphshard_model"
_WHY_NOT_COMPILED = (
    "call what torch.compile(model, backend=graphshard.backend(mesh)) returns; is compiling off "
    "(disable=True, TORCH_COMPILE_DISABLE=1, set_stance)?"
)

_accumulating: weakref.WeakKeyDictionary[ShardedModel, None] = weakref.WeakKeyDictionary()
"""Models with unreduced gradients, in the order in which they started to accumulate."""


class ModelParam(Protocol):
    """Interface of ``ShardedParam`` that its model uses; see that class for docstrings."""

    fqn: str
    layout: Layout
    accumulation: GradAccumulation

    @property
    def grad_destination(self) -> str | None: ...

    def is_owned(self) -> bool: ...

    def is_replaced(self) -> bool: ...

    def sync(self) -> bool: ...

    def reduce_accumulated(self, *, unsynced: bool) -> None: ...

    def refresh_accessors(self) -> None: ...


def changed_in_place(fqn: str) -> str:
    """Return the error message for a forward that changes a full parameter in place."""
    return (
        f"forward changes parameter {fqn!r} in place, which would be lost, since forward has a "
        "gathered copy: change model.get_parameter(name) between steps under torch.no_grad(), or "
        "compute another tensor from it"
    )


@dataclass(eq=False)
class ShardedModel:
    """State of one sharded module tree.

    Attributes:
        name: class name of the root.
        options: options it was sharded with.
        warned_of_options: whether a backend's other arguments were reported.
        breaks: graph breaks, as ``file:line: reason``.
        eager_classes: names of module classes whose forward ran outside a graph while parts of the
            model were compiled; a dictionary keeps them in order.
        warned: whether the user was warned of ``breaks`` and ``eager_classes``.
        sharded_params: all live sharded parameters.
        accumulates: whether gradients of some parameter accumulate, or have accumulated and may
            not be reduced yet.
        compiled: whether a graph was compiled for this model; False if it only reuses graphs of an
            identical model.
        reads_eagerly: whether some parameter was read outside any graph.
        trains_eagerly: whether some gradient came from outside any graph.
        gathered_bytes: most bytes of unsharded parameters that any of its graphs holds at once.
        padding: description of notable padding with a remedy; "" if padding takes little.
        changed_in_place: FQN of a parameter whose unsharded copy was changed by an eager part of a
            forward; None: there is none.
        gradient_divide_factor: divisor of summed gradients; None: the number of ranks.
    """

    name: str
    options: Options
    warned_of_options: bool = False
    breaks: list[str] = field(default_factory=list)
    eager_classes: dict[str, None] = field(default_factory=dict)
    warned: bool = False
    sharded_params: weakref.WeakSet[ModelParam] = field(default_factory=weakref.WeakSet)
    accumulates: bool = False
    compiled: bool = False
    reads_eagerly: bool = False
    trains_eagerly: bool = False
    gathered_bytes: int = 0
    padding: str = ""
    changed_in_place: str | None = None
    gradient_divide_factor: float | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModel:
        # Copied parameters register themselves.
        divide_factor = self.gradient_divide_factor
        return ShardedModel(self.name, self.options, gradient_divide_factor=divide_factor)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse_pickling(f"a module of {self.name}")

    def raise_if_changed(self) -> None:
        """Raise BackendError if a forward has changed a parameter in place."""
        fqn, self.changed_in_place = self.changed_in_place, None
        if fqn is not None:
            raise BackendError(changed_in_place(fqn))

    def start_accumulating(self) -> None:
        """Record that gradients of some parameter are about to accumulate unreduced."""
        self.accumulates = True
        _accumulating.setdefault(self)

    def reduce_leftovers(self) -> None:
        """Reduce accumulated gradients of parameters for which the last backward made none."""
        done = [p for p in self.sharded_params if p.is_owned() and p.grad_destination is None]
        done.sort(key=lambda sharded_param: sharded_param.fqn)
        self.accumulates = any(p.grad_destination is not None for p in self.sharded_params)
        if done:
            with eager_reduction(done[0].layout.groups, [param.fqn for param in done]):
                self._reduce_pending(done)

    def _reduce_pending(self, sharded_params: list[ModelParam]) -> None:
        pending = self._pending_on_any_rank(sharded_params)
        for sharded_param, (unsynced, partial) in zip(sharded_params, pending):
            if unsynced or partial:
                sharded_param.reduce_accumulated(unsynced=unsynced)

    def _pending_on_any_rank(self, sharded_params: list[ModelParam]) -> list[list[bool]]:
        """Return, per parameter, whether each of its two accumulators must be reduced."""
        pending = [
            [sharded_param.accumulation.key(name) is not None for name in ACCUMULATOR_NAMES]
            for sharded_param in sharded_params
        ]
        if not self.reads_eagerly or not sharded_params:
            return pending
        # In eager parts, which parameters get a gradient may depend on a rank's data.
        groups = sharded_params[0].layout.groups
        flags = torch.tensor(pending, dtype=torch.int32, device=groups.device)
        dist.all_reduce(flags, group=process_group(groups.all_ranks))
        return [[flag > 0 for flag in row] for row in flags.tolist()]

    def warn_of_other_options(self, options: Options) -> None:
        """Warn once if a backend's options differ from those the model was sharded with."""
        ignored = options.differences_from(self.options)
        if ignored and not self.warned_of_options:
            self.warned_of_options = True
            warnings.warn(
                f"graphshard: {', '.join(ignored)} of the backend has no effect: {self.name} was "
                "sharded before, with other arguments. Give graphshard.shard the same",
                stacklevel=2,
            )

    def warn_of_breaks(self) -> None:
        """Warn once about parts that are not compiled.

        Called in backward: by then, forward has met all its graph breaks.
        """
        broken = bool(self.breaks or self.eager_classes)
        if self.warned or not (broken or (self.trains_eagerly and not self.compiled)):
            return
        self.warned = True
        what, after = "is not compiled", f"\n  {_WHY_NOT_COMPILED}"
        if broken:
            lines = self.breaks or [
                f"forward of {', '.join(self.eager_classes)} runs outside of a graph",
                *graph_break_reasons(),
            ]
            what = "does not compile to one graph"
            after = "\n  " + "\n  ".join(lines) + "\nTORCH_LOGS=graph_breaks tells more."
        warnings.warn(
            f"graphshard: {self.name} {what}. Training is right, but eager parts gather their "
            f"parameters unscheduled, not in fp8, and keep them for backward:{after}",
            stacklevel=2,
        )


def join_model(module: nn.Module, model: ShardedModel) -> None:
    """Record which sharded model ``module`` is part of, even if it owns no parameters."""
    module.__dict__[_MODEL] = model


def sharded_model_of(module: nn.Module) -> ShardedModel | None:
    """Return the sharded model that ``module`` is part of, or None."""
    return module.__dict__.get(_MODEL)


def any_model_accumulates() -> bool:
    """Return whether any model may have unreduced gradients."""
    return bool(_accumulating)


def reduce_leftovers_after_backward() -> None:
    """Reduce the leftovers of all models once the running backward has succeeded."""
    on_backward_success(_reduce_all_leftovers)


def _reduce_all_leftovers() -> None:
    for model in list(_accumulating):
        model.reduce_leftovers()
        for sharded_param in model.sharded_params:
            sharded_param.refresh_accessors()
        if not model.accumulates:
            del _accumulating[model]
