"""Assignment of matrices to the ranks that orthogonalize them, and to buckets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphshard.optim.row_exchange import WIRE_DTYPE, Shape, assign_matrices, cost

SIZES = st.integers(1, 40)
SHAPES = st.tuples(SIZES, SIZES)


@given(st.lists(SHAPES, max_size=30), st.integers(1, 8), st.integers(1, 4000))
def test_every_matrix_has_one_owner(shapes: list[Shape], num_ranks: int, limit: int) -> None:
    buckets = assign_matrices(shapes, num_ranks, limit)
    every = [owned for bucket in buckets for owned in bucket]
    assert sorted(owned.matrix for owned in every) == list(range(len(shapes)))
    assert all(0 <= owned.rank < num_ranks for owned in every)
    assert all(owned.shape == shapes[owned.matrix] for owned in every)
    for bucket in buckets:
        assert [owned.rank for owned in bucket] == sorted(owned.rank for owned in bucket)
        num_bytes = sum(rows * columns for _, _, (rows, columns) in bucket) * WIRE_DTYPE.itemsize
        assert bucket and (num_bytes <= limit * num_ranks or len(bucket) <= num_ranks)


@given(st.lists(SHAPES, min_size=1, max_size=30), st.integers(1, 8), st.integers(1, 4000))
def test_work_is_balanced(shapes: list[Shape], num_ranks: int, limit: int) -> None:
    # No rank has more than an even share plus one matrix, the bound of a greedy choice.
    work = [0] * num_ranks
    for bucket in assign_matrices(shapes, num_ranks, limit):
        for owned in bucket:
            work[owned.rank] += cost(owned.shape)
    assert max(work) <= sum(work) / num_ranks + max(map(cost, shapes))


@pytest.mark.parametrize("limit", [1e9, 1])
def test_equal_matrices_share_a_bucket_if_memory_allows(limit: float) -> None:
    # Eight matrices on two ranks: one bucket, or with little memory one matrix per rank.
    buckets = assign_matrices([(8, 4)] * 8, 2, limit)
    if limit > 1:
        assert [[(rank, matrix) for rank, matrix, _ in bucket] for bucket in buckets] == [
            [(0, 0), (0, 2), (0, 4), (0, 6), (1, 1), (1, 3), (1, 5), (1, 7)]
        ]
    else:
        assert [len(bucket) for bucket in buckets] == [2] * 4
