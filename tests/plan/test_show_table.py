from __future__ import annotations

import dataclasses

import pytest

from graphshard.kinds import TransferKind
from graphshard.planning.memory_budget import ScheduleLimits
from graphshard.planning.simulate import COLLECTIVE
from graphshard.show import Dump, summary, table
from graphshard.show.table import MAX_LISTED_BUCKETS, MAX_LISTED_EXPOSED, exposed_reason
from tests.plan.dumps import bucket, by_hand, dump
from tests.plan.problems import gather, problem, reduction

BY_HAND = """\
backward 0/0: 4 parameters, 3 steps, ranks: 4; predicted for wire

collective      count       MB  wire dtype      predicted ms    exposed ms
--------------  -------  -----  ------------  --------------  ------------
all_gather      2 -> 2   0.000  float32                0.060         0.040
reduce_scatter  2 -> 1   0.000  float32                0.050         0.040

predicted
time    0.154 ms = 0.074 compute + 0.080 exposed (0.135 with links 1.5 times slower); \
communication 0.110, 27% hidden; slowdown of compute 0.091
memory  peak 0.000 MB in step 1 step1; at most 0.000 MB in flight

most exposed (predicted)
  bucket  collective        predicted ms    exposed ms  reason
--------  --------------  --------------  ------------  -----------------------------
       2  reduce_scatter           0.050         0.040  compute after it is too short
       0  all_gather               0.030         0.030  first: no compute before it
       1  all_gather               0.030         0.010  link is busy with bucket 0

buckets, in order of launch
  bucket  collective      parameters                       MB  wire dtype      predicted ms  \
launch before    wait before
--------  --------------  ----------------------------  -----  ------------  --------------  \
---------------  -------------
       0  all_gather      up.weight                     0.000  float32                0.030  \
0 step0          0 step0
       1  all_gather      down.weight                   0.000  float32                0.030  \
0 step0          1 step1
       2  reduce_scatter  norm.weight .. norm.bias (2)  0.000  float32                0.050  \
2 step2          end"""


def test_table_of_plan_matches_hand_computation() -> None:
    assert table(by_hand()) == BY_HAND


def test_summary_has_all_tables() -> None:
    assert summary([by_hand(), by_hand()]).count(BY_HAND) == 2
    assert "no graph" in summary([])


def _alone(kind: str, launch: int, wait: int, limits: ScheduleLimits | None = None) -> Dump:
    """Return a dump of three steps (5 us, 100 bytes each) and one transfer (20 bytes, 30 us)."""
    if kind in (TransferKind.ALL_GATHER, TransferKind.COPY_TO_DEVICE):
        transfer = gather(0, 20, wait)
    else:
        transfer = reduction(0, 20, launch, 3)
    transfer = dataclasses.replace(transfer, kind=TransferKind(kind))
    asked = problem([5.0, 5.0, 5.0], [transfer], [100, 100, 100])
    return dump(asked, [bucket(kind, [(0,)], 20, (launch, wait))], limits=limits)


@pytest.mark.parametrize(
    ("shown", "because"),
    [
        (_alone(TransferKind.ALL_GATHER, 0, 0), "first: no compute before it"),
        (_alone(TransferKind.ALL_GATHER, 0, 2), "compute before it is too short"),
        (_alone(TransferKind.REDUCE_SCATTER, 3, 3), "last: no compute after it"),
        (_alone(TransferKind.REDUCE_SCATTER, 1, 3), "compute after it is too short"),
        (_alone(TransferKind.ALL_GATHER, 1, 2, ScheduleLimits(peak=119)), "memory budget"),
        (
            _alone(TransferKind.ALL_GATHER, 1, 2, ScheduleLimits(peak=120)),
            "compute before it is too short",
        ),
        (_alone(TransferKind.ALL_GATHER, 1, 2, ScheduleLimits(in_flight=19)), "in-flight limit"),
        (
            _alone(TransferKind.ALL_GATHER, 1, 2, ScheduleLimits(in_flight=20)),
            "compute before it is too short",
        ),
        (_alone(TransferKind.COPY_TO_DEVICE, 1, 1, ScheduleLimits(peak=119)), "memory budget"),
        (
            _alone(TransferKind.COPY_TO_DEVICE, 1, 1, ScheduleLimits(peak=120)),
            "compute before it is too short",
        ),
        (_alone(TransferKind.REDUCE_SCATTER, 1, 2, ScheduleLimits(peak=124)), "memory budget"),
        (
            _alone(TransferKind.REDUCE_SCATTER, 1, 2, ScheduleLimits(peak=125)),
            "compute after it is too short",
        ),
    ],
)
def test_exposed_reason_names_what_prevents_hiding(shown: Dump, because: str) -> None:
    assert shown.timeline.exposed_us[0] > 0
    assert exposed_reason(shown, 0) == because


def test_exposed_reason_names_collective_of_user() -> None:
    # The model's own all-reduce, which begins with step 1, occupies the link of the gather.
    asked = problem([50.0] * 4, [gather(0, 20, 3)], user_launches=[1])
    large = dataclasses.replace(asked.user_collectives[0], num_bytes=10_000, wait=4)
    asked = dataclasses.replace(asked, user_collectives=(large,))
    shown = dump(asked, [bucket(TransferKind.ALL_GATHER, [(0,)], 20, (2, 3))])
    assert shown.timeline.exposed_us[0] > 0
    assert exposed_reason(shown, 0) == "link is busy with user all_reduce"


def test_host_copies_are_counted_separately_from_communication() -> None:
    # Compute waits for a host copy of 20 us; the gather after it is fully hidden.
    copied = dataclasses.replace(gather(1, 200, 0), kind=TransferKind.COPY_TO_DEVICE)
    asked = problem([100.0, 5.0], [gather(0, 20, 1), copied])
    copy = dataclasses.replace(bucket(TransferKind.COPY_TO_DEVICE, [(1,)], 200, (0, 0)), world=1)
    buckets = [
        copy,
        bucket(TransferKind.ALL_GATHER, [(0,)], 20, (0, 1)),
    ]
    shown = dump(asked, buckets)
    copy_ms, gather_ms = (shown.slots[COLLECTIVE, i].duration_us / 1e3 for i in range(2))
    assert shown.timeline.exposed_us[0] > 0 and shown.timeline.exposed_us[1] == 0
    text = table(shown)
    assert ", ranks: 4; " in text
    assert f"communication {gather_ms:.3f}, 100% hidden" in text
    assert f"host copies {copy_ms:.3f}, 0% hidden" in text


def _many(num_layers: int) -> Dump:
    num_bytes = 2_000_000
    asked = problem([1.0] * num_layers, [gather(i, num_bytes, i) for i in range(num_layers)])
    buckets = [
        bucket(TransferKind.ALL_GATHER, [(i,)], num_bytes, (i, i)) for i in range(num_layers)
    ]
    return dump(asked, buckets, [f"layers.{i}.weight" for i in range(num_layers)])


def test_table_of_many_layers_is_short() -> None:
    shown = _many(100)
    lines = table(shown).splitlines()
    assert len(lines) == 10 + (3 + MAX_LISTED_EXPOSED) + 1 + (3 + MAX_LISTED_BUCKETS + 1)
    (left_out,) = (line for line in lines if "more" in line)
    num_left_out = 100 - MAX_LISTED_BUCKETS
    assert left_out.split()[:4] == ["...", str(num_left_out), "more", "buckets"]
    assert float(left_out.split()[4]) == pytest.approx(2.0 * num_left_out)


def test_all_buckets_are_shown_on_request() -> None:
    text = table(_many(100), all_buckets=True)
    assert all(f" layers.{i}.weight " in text for i in range(100)) and "more" not in text


def test_table_of_graph_without_transfers_has_only_compute() -> None:
    text = table(dump(problem([5.0], []), []))
    assert "0 parameters, 1 steps; predicted" in text
    assert (
        "time    0.005 ms = 0.005 compute + 0.000 exposed; communication 0.000; "
        "slowdown of compute 0.000\n" in text
    )
    assert "collective" not in text and "buckets" not in text
    assert table(dump(problem([], []), []))
