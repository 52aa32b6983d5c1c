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
import functools
import warnings
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from . import ops
from ._torch import (
    BackendError,
    dtensor_like,
    gradient_hooks,
    graph_break_reasons,
    local_tensor,
    parameters_of,
    post_accumulate_hooks,
    set_local_tensor,
)

LINK = "_graphshard_link"
_MODEL = "_graphshard_model"


def leaf_name(name: str) -> str:
    """The attribute of a module that holds the leaf of its parameter ``name``."""
    return f"_leaf_of_{name}"


@dataclass(frozen=True, eq=False)
class Layout:
    """How one parameter is split over a 1D mesh, and as what it and its gradient travel.

    Attributes:
        dtype: as which it is gathered and used; None: its own.
        reduce_dtype: as which its gradient is reduced; None: that of the gradient.
        float8: recipe of fp8 for its linears; "": none.
        rows: None for a replicated one.
    """

    shape: torch.Size
    mesh: DeviceMesh
    reshard: bool
    dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    float8: str = ""
    rows: int | None = field(init=False)

    def __post_init__(self) -> None:
        splittable = len(self.shape) > 0 and self.shape.numel() > 0
        object.__setattr__(self, "rows", self.shape[0] if splittable else None)

    def __deepcopy__(self, memo: dict[int, Any]) -> Layout:
        return self

    @functools.cached_property
    def group(self) -> str:
        return self.mesh.get_group().group_name

    @functools.cached_property
    def placement(self) -> Shard | Replicate:
        return Replicate() if self.rows is None else Shard(0)

    @functools.cached_property
    def padded_shape(self) -> torch.Size:
        if self.rows is None:
            return self.shape
        return torch.Size((-(-self.rows // self.mesh.size()), *self.shape[1:]))

    @functools.cached_property
    def own_rows(self) -> slice:
        """This rank's rows of the full parameter."""
        assert self.rows is not None
        padded = self.padded_shape[0]
        start = min(padded * self.mesh.get_local_rank(), self.rows)
        return slice(start, min(start + padded, self.rows))

    @functools.cached_property
    def own_count(self) -> int:
        return self.own_rows.stop - self.own_rows.start

    def unshard(self, leaf: torch.Tensor) -> torch.Tensor:
        op, args = self.marker()
        return op(leaf, *args)

    def reduce(self, grad: torch.Tensor, result: torch.dtype) -> torch.Tensor:
        """The mean of all ranks' full gradients: this rank's padded shard of it, as ``result``."""
        if self.rows is None:
            return ops.all_reduce_grad(grad, self.group, self.reduce_dtype, result)
        return ops.reduce_grad(grad, self.padded_shape[0], self.group, self.reduce_dtype, result)

    def marker(self) -> tuple[Any, tuple[Any, ...]]:
        """The op that makes the full parameter of the leaf, and its arguments after the leaf."""
        if self.rows is None:
            return ops.replicate, (self.group, self.dtype, self.reduce_dtype)
        casts = (self.dtype, self.reduce_dtype, self.float8, None, 0)
        return ops.unshard, (self.rows, self.group, self.reshard, *casts)

    def padded_shard(self, full: torch.Tensor) -> torch.Tensor:
        """This rank's rows of ``full``, padded with zeros: a new contiguous tensor."""
        if self.rows is None:
            return full.detach().clone(memory_format=torch.contiguous_format)
        return self.padded(full.detach()[self.own_rows])

    def padded(self, own: torch.Tensor) -> torch.Tensor:
        padded = own.new_zeros(self.padded_shape)
        padded[: own.shape[0]] = own
        return padded

    def local_view(self, padded: torch.Tensor) -> torch.Tensor:
        return padded if self.rows is None else padded[: self.own_count]

    def dtensor(self, padded: torch.Tensor) -> DTensor:
        """A DTensor of the full shape whose local tensor is a view of ``padded``."""
        stride = torch.empty(self.shape, device="meta").stride()
        return DTensor.from_local(
            self.local_view(padded),
            self.mesh,
            [self.placement],
            run_check=False,
            shape=self.shape,
            stride=stride,
        )


@dataclass(eq=False)
class Model:
    """What is known of one sharded module tree; shared by all its modules and links.

    Attributes:
        breaks: where its graphs broke, as ``file:line: reason``.
        eager: classes of its modules whose forward ran outside a graph while parts were compiled.
        links: those of its parameters.
    """

    name: str
    breaks: list[str] = field(default_factory=list)
    eager: dict[str, None] = field(default_factory=dict)
    warned: bool = False
    links: weakref.WeakSet[Link] = field(default_factory=weakref.WeakSet)

    def __deepcopy__(self, memo: dict[int, Any]) -> Model:
        return Model(self.name)  # the copied links add themselves

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


class Link:
    """Joins one DTensor parameter, its leaf, and the modules that own it (several where tied)."""

    def __init__(self, layout: Layout, fqn: str, model: Model) -> None:
        self.layout = layout
        self.fqn = fqn
        self.model = model
        self.dtensor: Any = None
        self.leaf: Any = None
        self._local: torch.Tensor | None = None
        self._owners: list[tuple[weakref.ref[nn.Module], str]] = []
        model.links.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Link:
        # The copied modules attach and own it again, in their __setstate__.
        return Link(self.layout, self.fqn, copy.deepcopy(self.model, memo))

    def attach(self, dtensor: DTensor) -> None:
        """Make a leaf for ``dtensor``, whose local tensor becomes a view of it."""
        local = local_tensor(dtensor).detach()
        if local.shape == self.layout.padded_shape and local.is_contiguous():
            padded = local
        else:
            padded = self.layout.padded(local)
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


def link_of(tensor: Any) -> Any:
    """The link of a leaf or of a sharded DTensor, else None."""
    return getattr(tensor, LINK, None)


def leaf_of(module: nn.Module, name: str) -> Any:
    return module.__dict__.get(leaf_name(name))


def adopt(module: nn.Module, model: Model) -> None:
    """Note which sharded model ``module`` is part of; modules without parameters are, too."""
    module.__dict__[_MODEL] = model


def model_of(module: nn.Module) -> Model | None:
    return module.__dict__.get(_MODEL)


def in_sync(link: Link) -> bool:
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
    link, grad = link_of(leaf), leaf.grad
    assert link is not None
    if grad is None:  # autograd came by without a gradient
        return
    leaf.grad = None
    link.model.warn_of_breaks()
    link.deliver(grad)
