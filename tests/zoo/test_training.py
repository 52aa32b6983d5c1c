"""Ten steps of every model of the zoo: losses, and all gradients of each step, are those of DDP and
of FSDP2, in fp32, on 2 and 4 ranks, by both compilers; one graph where Dynamo can make one, and one
warning where it cannot."""

from __future__ import annotations

import pytest

from tests import ranks

from .models import ZOO
from .training import Comparison, compare

TOLERANCE = 1e-5
SHALLOW = ["llama-shallow", "mixtral-shallow"]  # one layer: Inductor takes its time for each


def check(name: str, comparisons: list[Comparison]) -> None:
    """What has to hold for every rank's comparison of ``name``."""
    entry = ZOO[name]
    for rank in comparisons:
        assert rank.loss_error <= TOLERANCE
        assert rank.gradient_error <= TOLERANCE, rank.worst
        assert bool(rank.unused) != entry.all_used, rank.unused
        assert (rank.num_graphs == 1) == entry.one_graph
        assert len(rank.warnings) == (0 if entry.one_graph else 1), rank.warnings


FOUR_RANKS = "gpt2"


@pytest.mark.parametrize("name", [name for name in ZOO if name not in (*SHALLOW, FOUR_RANKS)])
def test_ddp(name: str) -> None:
    check(name, ranks.run(2, compare, name))


@pytest.mark.parametrize("name", SHALLOW)
def test_inductor(name: str) -> None:
    check(name, ranks.run(2, compare, name, compiler="inductor"))


def test_fsdp2() -> None:
    check("llama", ranks.run(2, compare, "llama", against="fsdp2"))


def test_four_ranks() -> None:
    check(FOUR_RANKS, ranks.run(4, compare, FOUR_RANKS))
