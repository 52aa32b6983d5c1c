"""The state that all modules and sharded parameters of one model share."""

from __future__ import annotations

import warnings
import weakref
from dataclasses import dataclass, field
from typing import Any, NoReturn, Protocol, SupportsIndex

import torch
import torch.distributed as dist
from torch import nn

from .._torch.autograd import at_success_of_backward
from .._torch.distributed import process_group
from .._torch.dynamo import graph_break_reasons
from ..errors import BackendError
from ..ops.accumulators import ACCUMULATOR_NAMES
from ..options.options import Options
from .eager_calls import eager_reduction
from .grad_accumulation import GradAccumulation
from .layout import Layout
from .no_pickle import refuse

_MODEL = "_graphshard_model"
_WHY_NOT_COMPILED = (
    "call what torch.compile(model, backend=graphshard.backend(mesh)) returns; is compiling off "
    "(disable=True, TORCH_COMPILE_DISABLE=1, set_stance)?"
)

_accumulating: weakref.WeakKeyDictionary[ShardedModel, None] = weakref.WeakKeyDictionary()
"""Models with unreduced gradients, in the order in which they began to accumulate."""


class ModelParam(Protocol):
    """The part of a ``ShardedParam`` that its model calls; that class has the docstrings."""

    fqn: str
    layout: Layout
    accumulation: GradAccumulation

    @property
    def accumulates_in(self) -> str | None: ...

    def is_owned(self) -> bool: ...

    def is_lost(self) -> bool: ...

    def sync(self) -> bool: ...

    def reduce_accumulated(self, *, unsynced: bool) -> None: ...

    def refresh_accessors(self) -> None: ...


def changed_in_place(fqn: str) -> str:
    """Return the text of the error about a forward that changes a full parameter in place."""
    return (
        f"forward changes parameter {fqn!r} in place, which would be lost, since forward has a "
        "gathered copy: change model.get_parameter(name) between steps under torch.no_grad(), or "
        "compute another tensor from it"
    )


@dataclass(eq=False)
class ShardedModel:
    """One sharded module tree.

    Attributes:
        name: the root's class.
        options: what it was sharded with.
        told: whether the user was told that a backend's arguments are others.
        breaks: where its graphs broke, as ``file:line: reason``.
        eager_classes: classes of its modules whose forward ran outside a graph while parts of the
            model were compiled; a dictionary keeps them in order.
        warned: whether the user was told of both.
        sharded_params: all sharded parameters that are alive.
        accumulates: gradients of some parameter accumulate, or did and may not be reduced yet.
        compiled: a graph was compiled for it; it may also use that of an equal model.
        reads_eagerly: some parameter was read outside of any graph.
        trains_eagerly: some gradient came from outside of any graph.
        gathered_bytes: the most that any of its graphs holds gathered at once.
        padding: what padding takes of a rank, and what to do; "" if it is little.
        changed_in_place: a parameter whose gathered copy an eager part of a forward has changed.
        gradient_divide_factor: what sums of gradients are divided by; None: the number of ranks.
    """

    name: str
    options: Options
    told: bool = False
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
        # The copied parameters add themselves.
        divide_factor = self.gradient_divide_factor
        return ShardedModel(self.name, self.options, gradient_divide_factor=divide_factor)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        refuse(f"a module of {self.name}")

    def raise_if_changed(self) -> None:
        """
        Raises:
            BackendError: a forward has changed a parameter in place.
        """
        fqn, self.changed_in_place = self.changed_in_place, None
        if fqn is not None:
            raise BackendError(changed_in_place(fqn))

    def start_accumulating(self) -> None:
        """Note that gradients of some parameter are about to accumulate unreduced."""
        self.accumulates = True
        _accumulating.setdefault(self)

    def reduce_leftovers(self) -> None:
        """Reduce, after a backward, the totals of parameters for which it made no gradient."""
        done = [p for p in self.sharded_params if p.is_owned() and p.accumulates_in is None]
        done.sort(key=lambda sharded_param: sharded_param.fqn)
        self.accumulates = any(p.accumulates_in is not None for p in self.sharded_params)
        if done:
            with eager_reduction(done[0].layout.groups, [param.fqn for param in done]):
                self._reduce_pending(done)

    def _reduce_pending(self, sharded_params: list[ModelParam]) -> None:
        pending = self._pending_on_any_rank(sharded_params)
        for sharded_param, (unsynced, partial) in zip(sharded_params, pending):
            if unsynced or partial:
                sharded_param.reduce_accumulated(unsynced=unsynced)

    def _pending_on_any_rank(self, sharded_params: list[ModelParam]) -> list[list[bool]]:
        """Return, for each parameter, whether each of its two accumulators has to be reduced."""
        pending = [
            [sharded_param.accumulation.key(name) is not None for name in ACCUMULATOR_NAMES]
            for sharded_param in sharded_params
        ]
        if not self.reads_eagerly or not sharded_params:
            return pending
        # In eager parts each rank's data decides which parameters get a gradient.
        groups = sharded_params[0].layout.groups
        flags = torch.tensor(pending, dtype=torch.int32, device=groups.device)
        dist.all_reduce(flags, group=process_group(groups.all_ranks))
        return [[flag > 0 for flag in row] for row in flags.tolist()]

    def warn_of_other_options(self, options: Options) -> None:
        """Warn once if a backend asks for what the model was not sharded with."""
        ignored = options.not_held_by(self.options)
        if ignored and not self.told:
            self.told = True
            warnings.warn(
                f"graphshard: {', '.join(ignored)} of the backend has no effect: {self.name} was "
                "sharded before, with other arguments. Give graphshard.shard the same",
                stacklevel=2,
            )

    def warn_of_breaks(self) -> None:
        """Warn once, when a backward starts: by then a forward has met all its breaks."""
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
    """Note which sharded model ``module`` is part of; modules without parameters are, too."""
    module.__dict__[_MODEL] = model


def sharded_model_of(module: nn.Module) -> ShardedModel | None:
    """Return the sharded model that ``module`` is part of, or None."""
    return module.__dict__.get(_MODEL)


def any_model_accumulates() -> bool:
    """Return whether any model may have unreduced gradients."""
    return bool(_accumulating)


def reduce_leftovers_after_backward() -> None:
    """Reduce the leftovers of all models when the backward that is under way has succeeded."""
    at_success_of_backward(_reduce_all_leftovers)


def _reduce_all_leftovers() -> None:
    for model in list(_accumulating):
        model.reduce_leftovers()
        for sharded_param in model.sharded_params:
            sharded_param.refresh_accessors()
        if not model.accumulates:
            del _accumulating[model]
