"""Assignment of matrices to the ranks that orthogonalise them, and to buckets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphshard.optim.spread import Bucket, MatrixSpec, plan_buckets

SIZES = st.integers(1, 40)
SPECS = st.builds(MatrixSpec, st.tuples(SIZES, SIZES), st.integers(0, 2))


def _owners(buckets: list[Bucket]) -> dict[int, int]:
    return {
        matrix: batch.owner for bucket in buckets for batch in bucket for matrix in batch.matrices
    }


@given(st.lists(SPECS, max_size=30), st.integers(1, 8), st.integers(1, 4000))
def test_every_matrix_has_one_owner(specs: list[MatrixSpec], num_ranks: int, limit: int) -> None:
    buckets = plan_buckets(specs, num_ranks, limit)
    batches = [batch for bucket in buckets for batch in bucket]
    assert sorted(i for batch in batches for i in batch.matrices) == list(range(len(specs)))
    assert all(0 <= batch.owner < num_ranks for batch in batches)
    for batch in batches:
        kinds = {specs[i] for i in batch.matrices}
        assert len(kinds) == 1 and kinds.pop().shape == batch.shape
    for bucket in buckets:
        assert [batch.owner for batch in bucket] == sorted(batch.owner for batch in bucket)
        held = [i for batch in bucket for i in batch.matrices]
        num_bytes = sum(specs[i].num_bytes for i in held)
        assert held and (num_bytes <= limit * num_ranks or len(held) <= num_ranks)


@given(st.lists(SPECS, min_size=1, max_size=30), st.integers(1, 8), st.integers(1, 4000))
def test_work_is_balanced(specs: list[MatrixSpec], num_ranks: int, limit: int) -> None:
    """No rank has more than an even share plus one matrix, the bound of a greedy choice."""
    work = [0] * num_ranks
    for matrix, owner in _owners(plan_buckets(specs, num_ranks, limit)).items():
        work[owner] += specs[matrix].cost
    assert max(work) <= sum(work) / num_ranks + max(spec.cost for spec in specs)


@pytest.mark.parametrize("limit", [1e9, 1])
def test_equal_matrices_are_batched(limit: float) -> None:
    """Eight matrices on two ranks: two batches of four, or with little memory one by one."""
    buckets = plan_buckets([MatrixSpec((8, 4), 0)] * 8, 2, limit)
    if limit > 1:
        assert [[(b.owner, b.matrices) for b in bucket] for bucket in buckets] == [
            [(0, (0, 2, 4, 6)), (1, (1, 3, 5, 7))]
        ]
    else:
        assert [len(bucket) for bucket in buckets] == [2] * 4


def test_matrices_of_different_param_groups_are_not_batched() -> None:
    specs = [MatrixSpec((8, 4), 0), MatrixSpec((8, 4), 1)]
    assert [batch.matrices for batch in plan_buckets(specs, 1, 1e9)[0]] == [(0,), (1,)]
