"""All models of the zoo train like DDP or FSDP2 in float32.

Losses and all gradients agree in each of five steps, on 2 and 4 ranks, and with both compilers.
Models are one graph; those that Dynamo has to break warn once.
"""

from __future__ import annotations

import pytest

from tests import ranks

from .models import ZOO
from .training import Comparison, compare

TOLERANCE = 1e-5
SHALLOW = ["llama-shallow", "mixtral-shallow"]  # one layer, since Inductor is slow for each


def check(name: str, comparisons: list[Comparison]) -> None:
    """Assert what must hold for every rank's comparison of the model ``name``."""
    entry = ZOO[name]
    for rank in comparisons:
        assert rank.loss_error <= TOLERANCE
        assert rank.gradient_error <= TOLERANCE, rank.worst
        assert bool(rank.unused) != entry.all_used, rank.unused
        assert (rank.num_graphs == 1) == entry.one_graph
        assert len(rank.warnings) == (0 if entry.one_graph else 1), rank.warnings


FOUR_RANKS, LIKE_FSDP2 = "gpt2", "llama"
LIKE_DDP = [name for name in ZOO if name not in (*SHALLOW, FOUR_RANKS, LIKE_FSDP2)]


@pytest.mark.parametrize("name", LIKE_DDP)
def test_zoo_model_trains_like_ddp(name: str) -> None:
    check(name, ranks.run(2, compare, name))


@pytest.mark.parametrize("name", SHALLOW)
def test_zoo_model_trains_like_ddp_with_inductor(name: str) -> None:
    check(name, ranks.run(2, compare, name, compiler="inductor"))


def test_zoo_model_trains_like_fsdp2() -> None:
    check(LIKE_FSDP2, ranks.run(2, compare, LIKE_FSDP2, against="fsdp2"))


def test_zoo_model_trains_like_ddp_on_four_ranks() -> None:
    check(FOUR_RANKS, ranks.run(4, compare, FOUR_RANKS))
