"""The choice between a ring and an exchange for each bucket of narrow gradients."""

from __future__ import annotations

import dataclasses

import pytest

from benchmarks.robustness import SCENARIOS, step_us
from graphshard.cost.devices import HARDWARE
from graphshard.cost.hardware import ALL_TO_ALL, Hardware
from graphshard.cost.model import CostModel
from graphshard.kinds import TransferKind
from graphshard.planning.buckets import bucket_of
from graphshard.planning.follow_plan import follow_plan
from graphshard.planning.live_bytes import alive_bytes, smallest_peak
from graphshard.planning.memory_budget import Reduce, ScheduleLimits
from graphshard.planning.plan import Bucket, Plan, PlanParam, Problem, Transfer
from graphshard.planning.search import BudgetError, find_schedule, schedule_without_overlap
from graphshard.planning.simulate import bucket_cost
from graphshard.show import Dump
from graphshard.show.table import table
from tests.plan.machines import MACHINE, flat_rate
from tests.plan.problems import problem

H100 = HARDWARE["H100"]
MIB = 1 << 20
LAYERS = 12
LARGE, SMALL = 64 * MIB, 8192  # bytes of a gradient in bfloat16


def _gradient(param: int, num_bytes: int, ready: int, world: int, stride: int) -> Transfer:
    """Return the reduction in float32 of a gradient of ``num_bytes`` in bfloat16."""
    return Transfer(
        param=param,
        kind=TransferKind.REDUCE_SCATTER,
        num_bytes=2 * num_bytes,
        dtype="torch.float32",
        shard_bytes=2 * num_bytes // world,
        casts=True,
        group="g",
        world=world,
        stride=stride,
        ready=ready,
        due=LAYERS,
        last=LAYERS - 1,
        grad_bytes=num_bytes,
        exchange_dtype="torch.bfloat16",
    )


def _backward(world: int, stride: int = 1, sizes: tuple[int, ...] = (LARGE, SMALL)) -> Problem:
    sent = [
        _gradient(layer * len(sizes) + i, size, layer + 1, world, stride)
        for layer in range(LAYERS)
        for i, size in enumerate(sizes)
    ]
    return problem([2000.0] * LAYERS, sent, [1 << 30] * LAYERS)


def _planned(
    graph: Problem, reduce: Reduce, hardware: Hardware = H100, **limits: int
) -> tuple[Bucket, ...]:
    return find_schedule(graph, CostModel(hardware), ScheduleLimits(reduce=reduce, **limits))


def test_all_to_all_takes_time_of_its_slowest_links() -> None:
    # Without its own rate, an all-to-all has the rate of a ring, which the 4 ranks of a node share.
    rates = {4: 13 + 1000 * 3 / 4, 8: 111 + 4 * 10_000 * 4 / 8, 1: 2 * 1000 + 1}
    for world, time_us in rates.items():
        assert CostModel(MACHINE).exchange_us(1000, world) == pytest.approx(time_us)
    measured = {
        name: dataclasses.replace(link, bus={**link.bus, ALL_TO_ALL: flat_rate(per_s)})
        for name, link, per_s in (("intra", MACHINE.intra, 1e5), ("inter", MACHINE.inter, 1e6))
    }
    cost_model = CostModel(dataclasses.replace(MACHINE, **measured))
    assert cost_model.exchange_us(1000, 8) == pytest.approx(111 + 10_000 * 3 / 8)
    # Neighbors on different nodes: nothing travels within a node.
    assert cost_model.exchange_us(1000, 4, stride=4) == pytest.approx(115 + 1000 * 3 / 4)


@pytest.mark.parametrize(
    ("world", "stride", "exchanged"),
    [(8, 1, True), (2, 1, True), (16, 1, False), (64, 1, False), (8, 8, True)],
    ids=["a node", "part of a node", "two nodes", "eight nodes", "one rank per node"],
)
def test_large_buckets_are_exchanged_if_ranks_share_no_network(
    world: int, stride: int, exchanged: bool
) -> None:
    graph = _backward(world, stride)
    buckets = _planned(graph, "auto")
    assert {bucket.exchanges for bucket in buckets if bucket.num_bytes > 4 * MIB} == {exchanged}
    half = sum(t.num_bytes for t in graph.transfers) // 2
    assert sum(bucket.num_bytes for bucket in _planned(graph, "exchange")) == half
    assert not any(bucket.exchanges for bucket in _planned(graph, "ring"))


def test_latency_bound_buckets_use_ring() -> None:
    buckets = _planned(_backward(8, sizes=(SMALL,)), "auto")
    assert buckets and not any(bucket.exchanges for bucket in buckets)


def test_float32_gradient_never_shares_an_exchange() -> None:
    graph = _backward(8)
    wide = dataclasses.replace(graph.transfers[1], casts=False, exchange_dtype="")
    graph = dataclasses.replace(graph, transfers=(graph.transfers[0], wide, *graph.transfers[2:]))
    for buckets in (
        _planned(graph, "auto"),
        _planned(graph, "exchange"),
        schedule_without_overlap(graph, exchanges=True),
    ):
        [with_wide] = [bucket for bucket in buckets if 1 in bucket.transfers]
        assert not with_wide.exchanges
        assert any(bucket.exchanges for bucket in buckets)


def test_gradients_summed_in_different_dtypes_never_share_a_bucket() -> None:
    # As over gloo, if only some of the bfloat16 gradients have ``reduce_dtype=float32``.
    wide = [_gradient(i, SMALL, i + 1, 8, 1).exchanged() for i in range(4)]
    sent = [t if i % 2 else dataclasses.replace(t, summed_in=t.dtype) for i, t in enumerate(wide)]
    graph = problem([2000.0] * LAYERS, sent)
    assert len(schedule_without_overlap(graph)) == 2
    for buckets in (schedule_without_overlap(graph), _planned(graph, "ring")):
        assert all(len({i % 2 for i in bucket.transfers}) == 1 for bucket in buckets)


def test_exchange_needs_copy_in_only_for_padding_and_packing() -> None:
    cost_model, graph = CostModel(H100), _backward(8)
    padded = dataclasses.replace(graph.transfers[0], copied_in=True)
    ring, exchange, exchange_padded, packed = (
        bucket_cost(each, bucket_of(each, ((buf),), launch=2, wait=2, exchanges=flag), cost_model)
        for each, buf, flag in (
            (graph, (0,), False),
            (graph, (0,), True),
            (dataclasses.replace(graph, transfers=(padded, *graph.transfers[1:])), (0,), True),
            (graph, (0, 2), True),
        )
    )
    # Measured on an H200: chunk_cat casts and packs 48 GB, read and written, in 25 ms.
    assert ring.copy_in_us == pytest.approx(3 * LARGE / 48e9 * 25e3, rel=0.1)
    assert exchange.copy_in_us == 0
    assert exchange_padded.copy_in_us == cost_model.copy_us(LARGE)
    assert packed.copy_in_us == cost_model.copy_us(2 * LARGE)
    # The sum reads the rows of all ranks in bfloat16, and writes this rank's in float32.
    assert exchange.copy_out_us == cost_model.copy_us((LARGE + 2 * LARGE // 8) // 2)
    assert ring.copy_out_us == 0
    assert exchange.lane_us < 0.6 * ring.lane_us


@pytest.mark.parametrize(("world", "stride"), [(8, 1), (16, 1), (8, 8)])
def test_choice_is_near_best_if_links_and_kernels_are_slower(world: int, stride: int) -> None:
    graph = _backward(world, stride)
    schedules = {reduce: [_planned(graph, reduce)] for reduce in ("auto", "ring", "exchange")}
    for scenario in SCENARIOS:
        times = {
            reduce: step_us([graph], schedule, H100, scenario)
            for reduce, schedule in schedules.items()
        }
        # "auto" is cautious between nodes: fast links would hide an exchange, which takes less
        # compute, but over slow links an exchange takes up to 1.4 times as long as a ring.
        assert times["auto"] <= 1.03 * min(times.values()), scenario


def test_exchange_fits_into_less_memory() -> None:
    graph = _backward(8)
    peak = smallest_peak(graph, exchanges=True)
    assert max(alive_bytes(graph, _planned(graph, "exchange", peak=peak))) <= peak
    with pytest.raises(BudgetError):
        _planned(graph, "ring", peak=peak)


def test_ranks_follow_choice_of_first_rank() -> None:
    graph = _backward(8)
    params = tuple(PlanParam(i, (8, 1), "torch.float32", 1) for i in range(len(graph.transfers)))
    plan = Plan(params, graph, _planned(graph, "auto"))
    # If a rank's batch has one sample, gradients may be expanded tensors there.
    expanded = [dataclasses.replace(t, copied_in=True, grad_bytes=2) for t in graph.transfers]
    other = dataclasses.replace(graph, transfers=tuple(expanded))
    assert follow_plan(other, params, Plan.from_json(plan.to_json())) == plan.buckets


def test_table_shows_choice_and_alternative() -> None:
    params = tuple(PlanParam(i, (8, 1), "torch.float32", 1, f"w{i}") for i in range(24))
    for world, reduce, text in (
        (8, "auto", "exchange (ring 0."),
        (16, "auto", ", not clearly faster on the link)"),
        (8, "ring", "ring (exchange 0."),
    ):
        graph = _backward(world)
        limits = ScheduleLimits(reduce=reduce)
        dump = Dump(Plan(params, graph, _planned(graph, reduce)), H100, limits)
        [row] = [line for line in table(dump).splitlines() if line.split()[:1] == ["1"]][-1:]
        assert text in row
        assert ("bfloat16" in row) == ("exchange (" in text)
