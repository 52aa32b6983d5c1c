"""`compare.assert_rounded` accepts rounding errors and rejects small real errors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models import GPT
from tests.numerics.compare import assert_rounded, full_grads, generator

Grads = dict[str, Any]
pytestmark = pytest.mark.low_precision


def _grads(model: nn.Module, dtype: torch.dtype, batches: list[Tensor]) -> Grads:
    """Return the sum of the batches' gradients, divided by two (the number of ranks)."""
    model = copy.deepcopy(model).to(dtype)
    for batch in batches:
        (model(batch) / 2).backward()
    return full_grads(model)


def _check(change: Callable[[Grads, Grads], Grads] | None = None) -> None:
    """Compare bfloat16 gradients with those of the same batches in a different order.

    Args:
        change: makes faulty gradients from those of both ranks and those of one.
    """
    torch.manual_seed(0)
    model = GPT()
    batches = [GPT.batch(generator(0, rank)) for rank in range(2)]
    theirs = _grads(model, torch.bfloat16, batches)
    ours = _grads(model, torch.bfloat16, [batch.flip(0) for batch in reversed(batches)])
    if change:
        ours = change(ours, _grads(model, torch.bfloat16, batches[:1]))
    assert_rounded("gradients", ours, theirs, _grads(model, torch.float32, batches))


def test_another_summation_order_is_accepted() -> None:
    _check()


def _scaled(grads: Grads, one_rank: Grads) -> Grads:
    return {name: grad * 1.1 for name, grad in grads.items()}


def _one_scaled(grads: Grads, one_rank: Grads) -> Grads:
    return grads | {"blocks.0.down.weight": grads["blocks.0.down.weight"] * 1.1}


def _without_the_second_rank(grads: Grads, one_rank: Grads) -> Grads:
    return one_rank


def _one_without_the_second_rank(grads: Grads, one_rank: Grads) -> Grads:
    return grads | {"norm.bias": one_rank["norm.bias"]}


def _of_one_rank_alone(grads: Grads, one_rank: Grads) -> Grads:
    return {name: grad * 2 for name, grad in one_rank.items()}


def _not_finite(grads: Grads, one_rank: Grads) -> Grads:
    return grads | {"norm.bias": torch.full_like(grads["norm.bias"], torch.nan)}


def _missing(grads: Grads, one_rank: Grads) -> Grads:
    return grads | {"norm.bias": None}


FAULTS = [
    _scaled,
    _one_scaled,
    _without_the_second_rank,
    _one_without_the_second_rank,
    _of_one_rank_alone,
    _not_finite,
    _missing,
]


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_rejected(fault: Callable[[Grads, Grads], Grads]) -> None:
    with pytest.raises(AssertionError):
        _check(fault)
