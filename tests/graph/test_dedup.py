"""Equal markers are merged, and a sum of reductions becomes one reduction of the sum."""

from __future__ import annotations

import pytest

from graphshard.ops import markers
from graphshard.passes.dedup import merge_markers
from tests.graph.builder import Builder, add, count, mul, output, run


def test_two_reads_of_parameter_gather_once(group: str) -> None:
    build = Builder(group)
    shard = build.primal(2, 3)
    gm = build.module(build.call(mul, build.unshard(shard, 13), build.unshard(shard, 13)))
    run(merge_markers, gm)
    gm.graph.lint()
    assert count(gm.graph, markers.unshard) == 1
    left, right = output(gm.graph).args
    assert left is right


def test_two_reads_of_scalar_are_merged(group: str) -> None:
    build = Builder(group)
    shard = build.primal()
    gm = build.module(build.call(mul, build.replicate(shard), build.replicate(shard)))
    run(merge_markers, gm)
    assert count(gm.graph, markers.replicate) == 1


def test_different_parameters_are_not_merged(group: str) -> None:
    build = Builder(group)
    reads = [build.unshard(build.primal(2, 3), 13) for _ in range(2)]
    gm = build.module(build.call(mul, *reads))
    run(merge_markers, gm)
    assert count(gm.graph, markers.unshard) == 2


def test_reads_with_and_without_reshard_are_not_merged(group: str) -> None:
    build = Builder(group)
    shard = build.primal(2, 3)
    reads = [build.unshard(shard, 13, reshard) for reshard in (True, False)]
    gm = build.module(build.call(mul, *reads))
    run(merge_markers, gm)
    assert count(gm.graph, markers.unshard) == 2


@pytest.mark.parametrize("num_uses", [2, 3, 5])
@pytest.mark.parametrize("from_right", [False, True])
def test_gradients_of_all_uses_are_reduced_once(
    group: str, num_uses: int, from_right: bool
) -> None:
    build = Builder(group)
    grads = [build.tangent(13, 3) for _ in range(num_uses)]
    total, *rest = [build.reduce(grad) for grad in grads]
    for one in rest:
        total = build.call(add, one, total) if from_right else build.call(add, total, one)
    gm = build.module(total)
    run(merge_markers, gm)
    gm.graph.lint()
    assert count(gm.graph, markers.reduce_grad) == 1
    assert count(gm.graph, add) == num_uses - 1
    reduced = output(gm.graph)
    assert reduced.target is markers.reduce_grad
    assert reduced.meta["val"].shape == (2, 3)
    assert reduced.args[0].meta["val"].shape == (13, 3)  # type: ignore[union-attr]


def test_gradients_of_replicated_parameter_are_reduced_once(group: str) -> None:
    build = Builder(group)
    reduced = [build.all_reduce(build.tangent()) for _ in range(2)]
    gm = build.module(build.call(add, *reduced))
    run(merge_markers, gm)
    assert count(gm.graph, markers.all_reduce_grad) == 1


def test_reduction_with_another_use_is_kept(group: str) -> None:
    build = Builder(group)
    first, second = (build.reduce(build.tangent(13, 3)) for _ in range(2))
    gm = build.module(build.call(add, first, second), first)
    run(merge_markers, gm)
    gm.graph.lint()
    assert count(gm.graph, markers.reduce_grad) == 2


def test_sum_of_reduction_and_other_value_is_kept(group: str) -> None:
    build = Builder(group)
    gm = build.module(build.call(add, build.reduce(build.tangent(13, 3)), build.tangent(2, 3)))
    run(merge_markers, gm)
    assert count(gm.graph, markers.reduce_grad) == 1
    assert output(gm.graph).target is add
