from __future__ import annotations

import dataclasses

from hypothesis import given
from hypothesis import strategies as st

from graphshard.kinds import HOST_COPIES, TransferKind
from graphshard.planning.live_bytes import alive_bytes, smallest_peak
from graphshard.planning.memory_budget import ScheduleLimits
from graphshard.planning.offload import (
    SavedActivation,
    add_host_copies,
    choose_offloaded,
    without_host_copies,
)
from graphshard.planning.plan import Bucket, Problem, Transfer
from graphshard.planning.search import find_schedule, schedule_without_overlap
from graphshard.planning.simulate import COLLECTIVE, simulate
from tests.plan.problems import WORLD, Line, gather, lines, problem, problems, reduction


def _by_hand(limits: ScheduleLimits) -> tuple[Bucket, ...]:
    """Return the schedule of a gather due at step 3 and of a reduction, with host copies.

    Copying the gather's 40 bytes of shards takes 10 + 40 us; each step takes 50 us.
    """
    graph = problem(
        [50.0] * 5,
        [gather(0, 40 * WORLD, 3, host=True), reduction(1, 8 * WORLD, 4, 5, host=True)],
    )
    buckets = (
        Bucket(TransferKind.ALL_GATHER, ((0,),), 40 * WORLD, "g", WORLD, 2, 3),
        Bucket(TransferKind.REDUCE_SCATTER, ((1,),), 8 * WORLD, "g", WORLD, 4, 5),
    )
    return add_host_copies(graph, buckets, Line(), limits)


def test_schedule_of_shard_copies_matches_hand_computation() -> None:
    load, collective, reduced, store = _by_hand(ScheduleLimits())
    # The copy takes 50 us. It is launched 100 us before the gather.
    assert (load.kind, load.launch, load.wait, load.num_bytes) == (
        TransferKind.COPY_TO_DEVICE,
        0,
        2,
        40,
    )
    assert (store.kind, store.launch, store.wait, store.num_bytes) == (
        TransferKind.COPY_TO_HOST,
        5,
        5,
        8,
    )
    assert (collective.launch, reduced.wait) == (2, 5)


def test_shards_are_copied_at_their_gather_without_free_memory() -> None:
    (late,) = (
        b for b in _by_hand(ScheduleLimits(peak=39)) if b.kind == TransferKind.COPY_TO_DEVICE
    )
    assert (late.launch, late.wait) == (2, 2)


def test_host_copies_have_their_own_lane() -> None:
    graph = problem([100.0] * 2, [gather(0, 40, 0), gather(1, 40, 1, host=True)])
    buckets = add_host_copies(graph, schedule_without_overlap(graph), None, ScheduleLimits())
    timeline = simulate(graph, buckets, Line())
    lanes = {slot.index: slot.lane for slot in timeline.slots if slot.kind == COLLECTIVE}
    assert [lanes[i] == TransferKind.COPY_TO_DEVICE for i in range(3)] == [
        b.kind == TransferKind.COPY_TO_DEVICE for b in buckets
    ]
    assert alive_bytes(graph, buckets) == [40, 50]


@given(problems(), lines, st.none() | st.integers(0, 800))
def test_all_shards_on_the_host_are_copied_within_the_limit(
    graph: Problem, line: Line, room: int | None
) -> None:
    plain = find_schedule(graph, line, ScheduleLimits())
    limits = ScheduleLimits(peak=None if room is None else max(alive_bytes(graph, plain)) + room)
    buckets = add_host_copies(graph, plain, line, limits)
    assert [b for b in buckets if b.kind not in HOST_COPIES] == list(plain)
    copies = {(b.kind, b.buffers): b for b in buckets if b.kind in HOST_COPIES}
    assert len(copies) == len(buckets) - len(plain)
    for bucket in plain:
        if not graph.transfers[bucket.transfers[0]].host:
            assert not any(buffers == bucket.buffers for _, buffers in copies)
        elif bucket.kind == TransferKind.ALL_GATHER:
            load = copies.pop((TransferKind.COPY_TO_DEVICE, bucket.buffers))
            assert load.launch <= load.wait == bucket.launch
        elif not (bucket.kind == TransferKind.REDUCE_SCATTER and _is_averaged(bucket, plain)):
            store = copies.pop((TransferKind.COPY_TO_HOST, bucket.buffers))
            assert bucket.wait == store.launch <= store.wait <= graph.num_steps
    assert not copies
    if limits.peak is not None:
        assert max(alive_bytes(graph, buckets)) <= limits.peak


def _is_averaged(bucket: Bucket, buckets: tuple[Bucket, ...]) -> bool:
    return any(
        b.kind == TransferKind.ALL_REDUCE_SHARDS and b.buffers == bucket.buffers for b in buckets
    )


# Offloaded activations.


def _activation(kind: TransferKind, num_bytes: int, *, ready: int, due: int, last: int) -> Transfer:
    return Transfer(
        param=None,
        kind=kind,
        num_bytes=num_bytes,
        dtype="float32",
        shard_bytes=0,
        casts=False,
        group="",
        world=1,
        ready=ready,
        due=due,
        last=last,
    )


def test_schedule_of_offloaded_activation_matches_hand_computation() -> None:
    # Copying its 40 bytes takes 10 + 40 us in either direction; each step takes 50 us.
    away = problem(
        [50.0] * 5, [_activation(TransferKind.COPY_TO_HOST, 40, ready=1, due=5, last=4)], [0] * 5
    )
    (store,) = add_host_copies(away, (), Line(), ScheduleLimits())
    assert (store.launch, store.wait) == (1, 3)
    assert alive_bytes(away, [store]) == [0, 40, 40, 40, 0]  # freed by the wait before step 3
    (at_once,) = add_host_copies(away, (), Line(), ScheduleLimits(peak=39))
    assert (at_once.launch, at_once.wait) == (1, 1)
    back = problem(
        [50.0] * 5, [_activation(TransferKind.COPY_TO_DEVICE, 40, ready=0, due=3, last=3)], [0] * 5
    )
    (load,) = add_host_copies(back, (), Line(), ScheduleLimits())
    assert (load.launch, load.wait) == (1, 3)
    assert alive_bytes(back, [load]) == [0, 40, 40, 40, 0]
    assert without_host_copies(back).fixed_bytes == (0, 0, 0, 40, 0)


def test_activations_that_backward_needs_last_are_offloaded_first() -> None:
    saved = [
        SavedActivation(10, 0, 3, 3),
        SavedActivation(10, 1, 2, 2),
        SavedActivation(10, 2, 1, 1),
    ]
    forward = problem([1.0] * 4, [], [10, 20, 30, 30])
    backward = problem([1.0] * 4, [], [30, 30, 20, 10])
    for peak, chosen in ((30, []), (20, [0]), (10, [0, 1]), (9, [0, 1, 2])):
        assert (
            choose_offloaded(forward, backward, saved, Line(), ScheduleLimits(peak=peak)) == chosen
        )
    assert choose_offloaded(forward, backward, saved, Line(), ScheduleLimits()) == []


def test_exchanged_gradients_need_less_offloading() -> None:
    grad = dataclasses.replace(
        reduction(0, 200, 0, 2), casts=True, grad_bytes=100, exchange_dtype="torch.bfloat16"
    )
    forward, backward = problem([1.0] * 2, [], [50] * 2), problem([1.0] * 2, [grad], [50] * 2)
    saved = [SavedActivation(50, 0, 1, 1)]  # backward needs it after the reduction
    for reduce, chosen in (("ring", [0]), ("exchange", [])):
        limits = ScheduleLimits(peak=smallest_peak(backward, exchanges=True), reduce=reduce)
        assert choose_offloaded(forward, backward, saved, Line(), limits) == chosen


def _offloaded_for_a_gather(line: Line) -> list[int]:
    """Return the activations to offload in a problem where one of them delays a gather.

    The first step of backward needs 80 of the 90 bytes, including an activation of 40 bytes that
    only the last step uses. Therefore, the gather for the second step, 40 bytes in 50 us, cannot
    be launched before the first step.
    """
    forward = problem([100.0] * 4, [], [50] * 4)
    backward = problem([100.0] * 4, [gather(0, 40, 1)], [80, 50, 50, 50])
    return choose_offloaded(
        forward, backward, [SavedActivation(40, 0, 3, 3)], line, ScheduleLimits(peak=90)
    )


def test_activation_is_offloaded_for_a_gather_if_that_saves_time() -> None:
    assert _offloaded_for_a_gather(Line()) == [0]
    assert _offloaded_for_a_gather(Line(latency_us=500.0)) == []


@given(problems(), lines, st.lists(st.tuples(*[st.integers(0, 7)] * 2, st.integers(1, 90))))
def test_copies_of_activations_keep_a_budget(
    graph: Problem, line: Line, activations: list[tuple[int, int, int]]
) -> None:
    end = graph.num_steps
    copies = [
        _activation(
            TransferKind.COPY_TO_HOST, num_bytes, ready=min(step, end), due=end, last=end - 1
        )
        if step % 2
        else _activation(
            TransferKind.COPY_TO_DEVICE,
            num_bytes,
            ready=0,
            due=min(step, end - 1),
            last=min(max(step, last), end - 1),
        )
        for step, last, num_bytes in activations
    ]
    graph = dataclasses.replace(graph, transfers=(*graph.transfers, *copies))
    bare = without_host_copies(graph)
    needed = smallest_peak(bare)
    limits = ScheduleLimits(peak=needed)
    plain = find_schedule(bare, line, limits)
    buckets = add_host_copies(graph, plain, line, limits)
    assert [b for b in buckets if b.kind not in HOST_COPIES] == list(plain)
    assert {i for b in buckets for i in b.transfers} == set(range(len(graph.transfers)))
    assert max(alive_bytes(graph, buckets)) <= needed


def test_shard_copy_waits_until_less_is_in_flight() -> None:
    graph = problem([50.0] * 5, [gather(0, 320, 3), gather(1, 320, 4, host=True)])
    buckets = (
        Bucket(TransferKind.ALL_GATHER, ((0,),), 320, "g", WORLD, 0, 3),
        Bucket(TransferKind.ALL_GATHER, ((1,),), 320, "g", WORLD, 3, 4),
    )
    for limit, launch in ((None, 2), (320, 3)):
        copies = add_host_copies(graph, buckets, Line(), ScheduleLimits(in_flight=limit))
        (copy,) = (b for b in copies if b.kind == TransferKind.COPY_TO_DEVICE)
        assert (copy.launch, copy.wait) == (launch, 3)
