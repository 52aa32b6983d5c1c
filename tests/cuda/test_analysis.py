from __future__ import annotations

from graphshard.check.actions import GraphCall, Launch
from graphshard.check.analysis import find_plan, order_differences
from graphshard.kinds import GraphKind, TransferKind
from graphshard.planning.plan import Bucket, Plan, Problem, Transfer, UserCollective

GATHER = "_c10d_functional.all_gather_into_tensor.default"


def _plan(user_group: str = "tp") -> Plan:
    transfer = Transfer(None, TransferKind.ALL_GATHER, 8, "", 4, False, "dp", 2, 0, 1, 1)
    zeros = (0, 0)
    kind = TransferKind.ALL_GATHER
    user = UserCollective("all_gather_into_tensor", kind, 8, user_group, 2, 0, 1)
    problem = Problem(
        GraphKind.FORWARD,
        ("a", "b"),
        (1.0, 1.0),
        zeros,
        (0, 0, 0),
        (transfer,),
        user_collectives=(user,),
    )
    bucket = Bucket(TransferKind.ALL_GATHER, ((0,),), 8, "dp", 2, launch=0, wait=1)
    return Plan((), problem, (bucket,))


def test_launches_on_wrong_side_of_user_collective_are_reported() -> None:
    plan, ours, theirs = _plan(), Launch(GATHER, "dp"), Launch(GATHER, "tp")
    call = GraphCall([ours, theirs], [0, 1, ~0, ~1])
    assert find_plan([plan], call) is plan
    assert not order_differences([plan], call)
    assert not order_differences([_plan("")], call)  # the graph computes the group
    swapped = GraphCall([theirs, ours], [0, 1, ~0, ~1])
    assert order_differences([plan], swapped) == [
        f"forward: launch 0 is {GATHER} in group 'tp' instead of all_gather_into_tensor in 'dp'",
        f"forward: launch 1 is {GATHER} in group 'dp' instead of all_gather_into_tensor in 'tp'",
    ]
    twice = GraphCall([ours, theirs, ours], [0, 1, 2, ~0, ~1, ~2])
    assert order_differences([plan], twice) == ["3 launches instead of 2 (forward)"]
