"""Dumps for tests: one computed by hand, and random ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from graphshard.cost.hardware import COLLECTIVE_KINDS, Hardware, Interconnect, Rate
from graphshard.kinds import GraphKind, TransferKind
from graphshard.planning.memory_budget import ScheduleLimits
from graphshard.planning.plan import Bucket, Plan, PlanParam, Problem
from graphshard.planning.search import find_schedule
from graphshard.show import Dump
from tests.plan.problems import WORLD, Line, gather, lines, problem, problems, reduction


def hardware(line: Line, name: str = "wire") -> Hardware:
    per_s = (WORLD - 1) / WORLD * 1e6 / max(line.us_per_byte, 1e-3)
    bus = {kind: Rate(per_s, ((1.0, 1.0),)) for kind in COLLECTIVE_KINDS}
    link = Interconnect(line.latency_us, 0.0, line.buffer_cost_us, bus)
    memory = Rate(2e6 / max(line.copy_us_per_byte, 1e-3), ((1.0, 1.0),))
    rate = Rate(1e12, ((1.0, 1.0),))
    return Hardware(
        name,
        {"float32": rate},
        memory,
        host=memory,
        special_per_s=1e12,
        launch_us=0.0,
        issue_us=line.issue_us,
        contention=line.contention,
        ranks_per_node=WORLD,
        intra=link,
        inter=link,
    )


WIRE = hardware(Line(10.0, 1.0, 0.1))


def bucket(kind: str, buffers: Sequence[tuple[int, ...]], size: int, at: tuple[int, int]) -> Bucket:
    return Bucket(kind, tuple(buffers), size, "g", WORLD, *at)


def fqns_of(plan: Plan, bucket: Bucket) -> list[str]:
    transfers = [plan.problem.transfers[i] for i in bucket.transfers]
    return [plan.fqn_of(transfer) for transfer in transfers if transfer.param is not None]


def dump(
    asked: Problem,
    buckets: Sequence[Bucket],
    fqns: Sequence[str] | None = None,
    limits: ScheduleLimits | None = None,
    on: Hardware = WIRE,
) -> Dump:
    num_params = 1 + max((transfer.param for transfer in asked.transfers), default=-1)
    names = fqns or [f"p{i}" for i in range(num_params)]
    params = tuple(PlanParam(i, (4, 2), "torch.float32", 1, n) for i, n in enumerate(names))
    return Dump(Plan(params, asked, tuple(buckets)), on, limits or ScheduleLimits(), "0/0")


def by_hand() -> Dump:
    """Return a dump with this timeline (in us; durations in brackets).

    compute        ....30[step 0: 20]50....60[step 1: 40]100[copy 4][step 2: 10]114
    communication  [gather a: 30][gather b: 30]60           104[reduce: 50]154
    """
    asked = problem(
        [20.0, 40.0, 10.0],
        [gather(0, 20, 0), gather(1, 20, 1, 2), reduction(2, 24, 2, 3), reduction(3, 16, 2, 3)],
        fixed_bytes=[100, 200, 100],
    )
    buckets = [
        bucket(TransferKind.ALL_GATHER, [(0,)], 20, (0, 0)),
        bucket(TransferKind.ALL_GATHER, [(1,)], 20, (0, 1)),
        bucket(TransferKind.REDUCE_SCATTER, [(2, 3)], 40, (2, 3)),
    ]
    return dump(asked, buckets, ["up.weight", "down.weight", "norm.weight", "norm.bias"])


def as_kind(shown: Dump, graph: GraphKind, **changes: Any) -> Dump:
    """Return a dump as that of another kind of graph, with other changes of its plan."""
    asked = dataclasses.replace(shown.plan.problem, graph=graph)
    return dataclasses.replace(
        shown, plan=dataclasses.replace(shown.plan, problem=asked, **changes)
    )


@st.composite
def dumps(draw: st.DrawFn) -> Dump:
    asked, on = draw(problems()), hardware(draw(lines))
    empty = dump(asked, [], on=on)
    cost = draw(lines)  # differs from the hardware, since any schedule is valid
    return dump(asked, find_schedule(asked, cost, ScheduleLimits()), on=empty.hardware)
