"""Fake tensors, symbolic sizes, operators' schemas, and kernels for lists of tensors.

Read in torch/_subclasses/fake_tensor.py, torch/fx/experimental/symbolic_shapes.py and
torch/_ops.py.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental import symbolic_shapes
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

__all__ = ["OpOverload", "is_traceable_wrapper_subclass", "tree_leaves"]


def fake_mode_of(values: Iterable[Any]) -> Any:
    """The mode of the first fake tensor among ``values``, of which no more are looked at."""
    leaves = (leaf for value in values for leaf in tree_leaves(value))
    return next(leaf.fake_mode for leaf in leaves if isinstance(leaf, FakeTensor))


@contextmanager
def asking_fakes(value: torch.Tensor) -> Iterator[None]:
    """Calls run in the mode of the fake tensor ``value``, and what they refuse is not logged."""
    log = logging.getLogger(FakeTensor.__module__)
    log.addFilter(_nothing)
    try:
        with fake_mode_of([value]):
            yield
    finally:
        log.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False


def argument_names(op: Any) -> list[str]:
    """Of an operator's schema, in their order."""
    return [argument.name for argument in op._schema.arguments]


def size_hint(size: int | torch.SymInt, fallback: int = 4096) -> int:
    """What a size, or an expression of sizes, was when it was traced; no guard is added.

    Args:
        fallback: for a size that only data determines.
    """
    names = ("optimization_hint", "size_hint")  # 2.13, 2.11
    ask = next(getattr(symbolic_shapes, name) for name in names if hasattr(symbolic_shapes, name))
    return int(ask(size, fallback))


def foreach_copy_(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
    """Copy and cast each of ``sources``, on a GPU in as few kernels as can be."""
    torch._foreach_copy_(targets, sources)


def foreach_max_abs(tensors: list[torch.Tensor]) -> torch.Tensor:
    """The largest absolute value of each, in one dimension."""
    return torch.stack(torch._foreach_norm(tensors, float("inf")))
