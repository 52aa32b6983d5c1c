"""The link between the DTensor that a user sees and the plain leaf that graphs take.

    module._parameters["weight"] ──► DTensor (Shard(0)) ──► local tensor
                                        ▲                      │ view of the first rows
                                  .grad │                      ▼
    module.<leaf of weight> ────────► leaf: this rank's rows, padded    (see [Note: padded shards])

A compiled graph takes the leaf, because flattening, wrapping and guarding a DTensor costs more than
FSDP2's hooks do. Autograd accumulates into the leaf; a post-accumulate hook hands the gradient to
the DTensor and runs the DTensor's own hooks. What replaces a parameter's storage (``to_empty``,
``.to``, ``load_state_dict(assign=True)``, ``copy.deepcopy``) attaches a new leaf, as FSDP2's
``reset_sharded_param`` does; a link that is lost otherwise is an error at the next step.
"""

from __future__ import annotations

import copy
import warnings
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from .._torch.autograd import at_end_of_backward, gradient_hooks, post_accumulate_hooks
from .._torch.distributed import process_group
from .._torch.dtensor import dtensor_like, local_tensor, set_local_tensor
from .._torch.dynamo import graph_break_reasons
from .._torch.nn import parameters_of
from ..errors import BackendError
from ..ops import markers
from ..ops.accumulators import ACCUMULATOR_NAMES, PARTIAL, UNSYNCED
from ..ops.host_copy import to_host_memory
from .grad_accumulation import GradAccumulation
from .layout import Layout

LINK = "_graphshard_link"
_MODEL = "_graphshard_model"


def leaf_name(name: str) -> str:
    """The attribute of a module that holds the leaf of its parameter ``name``."""
    return f"_leaf_of_{name}"


@dataclass(eq=False)
class ShardedModel:
    """What is known of one sharded module tree; shared by all its modules and links.

    Attributes:
        breaks: where its graphs broke, as ``file:line: reason``.
        eager: classes of its modules whose forward ran outside a graph while parts were compiled.
        links: those of its parameters.
        accumulates: gradients of some add up, or did and may be left.
        reads_eagerly: some parameter was read outside of any graph.
        gathered_bytes: the most that is gathered at once in any of its graphs.
    """

    name: str
    breaks: list[str] = field(default_factory=list)
    eager: dict[str, None] = field(default_factory=dict)
    warned: bool = False
    links: weakref.WeakSet[ShardedParam] = field(default_factory=weakref.WeakSet)
    accumulates: bool = False
    reads_eagerly: bool = False
    gathered_bytes: int = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedModel:
        return ShardedModel(self.name)  # the copied links add themselves

    def reduce_rest(self) -> None:
        """Reduce sums of gradients that the backward which is over had none to add to."""
        links = [link for link in self.links if link.is_owned() and not link.asked]
        links.sort(key=lambda link: link.fqn)
        self.accumulates = any(link.asked for link in self.links)
        pending = [
            [link.sums.key(name) is not None for name in ACCUMULATOR_NAMES] for link in links
        ]
        if self.reads_eagerly and links:  # where each rank's data decides what has a gradient
            groups = links[0].layout.groups
            flags = torch.tensor(pending, dtype=torch.int32, device=groups.device)
            dist.all_reduce(flags, group=process_group(groups.all))
            pending = [[flag > 0 for flag in of] for of in flags.tolist()]
        for link, (unsynced, partial) in zip(links, pending):
            if unsynced or partial:
                link.reduce_sums(unsynced)

    def warn_of_breaks(self) -> None:
        """Once, when a backward starts: by then a forward has met all its breaks."""
        if self.warned or not (self.breaks or self.eager):
            return
        self.warned = True
        where = self.breaks or [
            f"forward of {', '.join(self.eager)} runs outside of a graph",
            *graph_break_reasons(),
        ]
        warnings.warn(
            f"graphshard: {self.name} does not compile to one graph. Training is right, but eager "
            "parts gather their parameters unscheduled, not in fp8, and keep them for backward:\n  "
            + "\n  ".join(where)
            + "\nTORCH_LOGS=graph_breaks tells more.",
            stacklevel=2,
        )


class ShardedParam:
    """Joins one DTensor parameter, its leaf, and the modules that own it (several where tied)."""

    def __init__(self, layout: Layout, fqn: str, model: ShardedModel) -> None:
        self.layout = layout
        self.fqn = fqn
        self.model = model
        self.dtensor: Any = None
        self.leaf: Any = None
        self._local: torch.Tensor | None = None
        self._owners: list[tuple[weakref.ref[nn.Module], str]] = []
        self.sums = GradAccumulation(self._on_sum)
        model.links.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedParam:
        # The copied modules attach and own it again, in their __setstate__.
        return ShardedParam(self.layout, self.fqn, copy.deepcopy(self.model, memo))

    def attach(self, dtensor: DTensor) -> None:
        """Make a leaf for ``dtensor``, whose local tensor becomes a view of it."""
        local = local_tensor(dtensor).detach()
        if local.shape == self.layout.padded_shape and local.is_contiguous():
            padded = local
        else:
            padded = self.layout.padded(local)
        padded = to_host_memory(padded, self.layout.host)
        self.leaf = nn.Parameter(padded, requires_grad=dtensor.requires_grad)
        self._local = self.layout.local_view(self.leaf.detach())
        set_local_tensor(dtensor, self._local)
        self.dtensor = dtensor
        setattr(dtensor, LINK, self)
        setattr(self.leaf, LINK, self)
        if self.leaf.is_floating_point() or self.leaf.is_complex():
            # Registering needs requires_grad, which a frozen parameter may get later.
            self.leaf.requires_grad_(True).register_post_accumulate_grad_hook(_deliver)
            self.leaf.requires_grad_(dtensor.requires_grad)
        for ref, name in self._owners:
            if (owner := ref()) is not None:
                self._give_leaf(owner, name)

    def attached_to(self, param: Any) -> bool:
        return self.dtensor is param and local_tensor(param) is self._local

    def own(self, module: nn.Module, name: str) -> None:
        """``module`` holds the parameter as ``name``: give it DTensor and leaf."""
        parameters_of(module)[name] = self.dtensor
        self._give_leaf(module, name)
        if all(ref() is not module or at != name for ref, at in self._owners):
            self._owners.append((weakref.ref(module), name))

    def _give_leaf(self, module: nn.Module, name: str) -> None:
        module.__dict__[leaf_name(name)] = self.leaf

    @property
    def asked(self) -> str:
        """Where gradients go, one of ``sums.NAMES``; "" where they are reduced."""
        if not self.dtensor.requires_grad:
            return ""
        if not self.sums.syncs:
            return UNSYNCED
        return PARTIAL if self.averages_shards and not self.sums.all_reduces else ""

    @property
    def averages_shards(self) -> bool:
        """Whether reduced shards are averaged over replicas."""
        return self.layout.rows is not None and bool(self.layout.groups.replicas)

    def summed(self) -> dict[str, torch.Tensor]:
        """Stand-ins and keys: arguments of the marker."""
        asked = self.asked
        if asked:
            self.model.accumulates = True
            _accumulating.setdefault(self.model)
        if not self.dtensor.requires_grad:
            return {}
        found = (
            {}
            if asked == UNSYNCED
            else {n: k for n in ACCUMULATOR_NAMES if (k := self.sums.key(n)) is not None}
        )
        return {**found, asked: self.sum_of(asked).stand_in} if asked else found

    def sum_of(self, name: str) -> Any:
        """What gradients add up in: in the dtype in which they are reduced."""
        used = markers.used_dtype(self.leaf, self.layout.dtype)
        reduced = self.layout.reduce_dtype if used.is_floating_point else None
        shape = self.layout.shape if name == UNSYNCED else self.layout.padded_shape
        return self.sums.of(name, shape, reduced or used, self.layout.groups.device)

    def _on_sum(self) -> None:
        """A gradient may come when those of further forwards are reduced again."""
        if not self.asked:
            self.refresh()

    def refresh(self) -> None:
        """Have the owners' accessors hand out what ``summed`` says now."""
        for ref, _ in self._owners:
            if (owner := ref()) is not None:
                owner.refresh_accessors()  # type: ignore[operator]

    def reduce_sums(self, unsynced: bool) -> None:
        """Reduce what has added up here or on another rank, without a gradient to add it to.

        Args:
            unsynced: full gradients have; else shards, over which replicas average.
        """
        layout, result = self.layout, self.leaf.dtype
        of = self.sum_of(UNSYNCED if unsynced else PARTIAL)
        total = of.take()
        if total is None:
            total = torch.zeros_like(of.stand_in, memory_format=torch.contiguous_format)
        if unsynced:
            grad = layout.reduce(total, result, self.sums.key(PARTIAL))
        else:
            grad = markers.all_reduce_grad(total, layout.groups.replicas, None, result)
            grad = to_host_memory(grad, layout.host)
        self.deliver(grad)
        self.sums.delivered()

    def is_owned(self) -> bool:
        """False for one that was replaced."""
        return any(ref() is not None for ref, _ in self._owners)

    def disown(self, module: nn.Module, name: str) -> None:
        self._owners = [(r, at) for r, at in self._owners if r() is not module or at != name]

    def lost(self) -> bool:
        """Whether a module's parameter, or its storage, was replaced behind our back."""
        if local_tensor(self.dtensor) is not self._local:
            return True
        for ref, name in self._owners:
            module = ref()
            if module is not None and parameters_of(module).get(name) is not self.dtensor:
                return True
        return False

    def sync(self) -> bool:
        """Give the leaf the DTensor's ``requires_grad``; False if that changed anything.

        Raises:
            BackendError: the link is lost.
        """
        if self.lost():
            raise BackendError(
                f"parameter {self.fqn!r} was replaced after it was sharded, so training would not "
                "reach it: change it in place (copy_, load_state_dict), or assign before sharding"
            )
        if self.dtensor.requires_grad == self.leaf.requires_grad:
            return True
        self.leaf.requires_grad_(self.dtensor.requires_grad)
        if self.model.accumulates:
            self.refresh()
        return False

    def deliver(self, padded_grad: torch.Tensor) -> None:
        """Accumulate this rank's padded gradient into the DTensor and run the DTensor's hooks."""
        param = self.dtensor
        grad: Any = dtensor_like(self.layout.local_view(padded_grad), param)
        for hook in gradient_hooks(param):
            replaced = hook(grad)
            grad = grad if replaced is None else replaced
        if param.grad is None:
            param.grad = grad
        else:
            with torch.no_grad():
                param.grad.add_(grad)
        for done in post_accumulate_hooks(param):
            done(param)


def sharded_param_of(tensor: Any) -> Any:
    """The link of a leaf or of a sharded DTensor, else None."""
    return getattr(tensor, LINK, None)


def leaf_of(module: nn.Module, name: str) -> Any:
    return module.__dict__.get(leaf_name(name))


def adopt(module: nn.Module, model: ShardedModel) -> None:
    """Note which sharded model ``module`` is part of; modules without parameters are, too."""
    module.__dict__[_MODEL] = model


def sharded_model_of(module: nn.Module) -> ShardedModel | None:
    return module.__dict__.get(_MODEL)


def in_sync(link: ShardedParam) -> bool:
    """A guard of every compiled graph, for each leaf: False makes Dynamo ask the backend again.

    Where a ``requires_grad`` was flipped, all leaves of the model get theirs here, so that the
    graph compiled for the new ones earlier, if there is one, is found: Dynamo tries the graph of
    the last call, whose guards on the leaves still hold, before all others.
    """
    if link.lost():
        return False
    if link.sync():
        return True
    for other in link.model.links:
        if not other.lost():
            other.sync()
    return False


def _deliver(leaf: torch.Tensor) -> None:
    link, grad = sharded_param_of(leaf), leaf.grad
    assert link is not None
    if grad is None:  # autograd came by without a gradient
        return
    leaf.grad = None
    link.model.warn_of_breaks()
    link.deliver(grad)
    if _accumulating:
        link.sums.delivered()
        at_end_of_backward(_reduce_rest)


_accumulating: weakref.WeakKeyDictionary[ShardedModel, None] = weakref.WeakKeyDictionary()
"""Models with gradients that add up, or did and may be left, in the order in which they began to."""


def _reduce_rest() -> None:
    for model in list(_accumulating):
        model.reduce_rest()
        for link in model.links:
            link.refresh()
        if not model.accumulates:
            del _accumulating[model]
