"""Order of a recorded graph call, compared with its plan."""

from __future__ import annotations

from graphshard.check.actions import GraphCall, RecordedLaunch
from graphshard.check.analysis import find_plan, order_differences
from graphshard.kinds import GraphKind, TransferKind
from graphshard.planning.plan import Bucket, Plan, Problem, Transfer

GATHER = "_c10d_functional.all_gather_into_tensor.default"


def _plan() -> Plan:
    transfer = Transfer(None, TransferKind.ALL_GATHER, 8, "", 4, False, "dp", 2, 0, 1, 1)
    zeros = (0, 0)
    problem = Problem(GraphKind.FORWARD, ("a", "b"), (1.0, 1.0), zeros, (0, 0, 0), (transfer,))
    bucket = Bucket(TransferKind.ALL_GATHER, ((0,),), 8, "dp", 2, launch=0, wait=1)
    return Plan((), problem, (bucket,))


def test_collectives_of_other_groups_are_not_of_the_plan() -> None:
    plan, ours, theirs = _plan(), RecordedLaunch(GATHER, "dp"), RecordedLaunch(GATHER, "tp")
    call = GraphCall([theirs, ours, theirs], [0, ~0, 1, 2, ~2, ~1])
    assert find_plan([plan], call) is plan
    assert not order_differences([plan], call)
    twice = GraphCall([ours, theirs, ours], [0, 1, ~1, 2, ~0, ~2])
    assert order_differences([plan], twice) == ["2 launches instead of 1 (forward)"]
