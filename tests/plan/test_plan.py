from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphshard.kinds import GraphKind, TransferKind
from graphshard.planning.plan import Bucket, Plan, PlanParam, Problem, Transfer

_sizes = st.integers(0, 1 << 40)
_params = st.builds(
    PlanParam,
    input=_sizes,
    shape=st.lists(_sizes, max_size=4).map(tuple),
    dtype=st.sampled_from(["torch.float32", "torch.bool"]),
    padded_rows=st.none() | _sizes,
    fqn=st.text(max_size=20),
)
_steps = st.integers(0, 9)
_transfers = st.builds(
    Transfer,
    param=st.integers(0, 9),
    kind=st.sampled_from(
        [TransferKind.ALL_GATHER, TransferKind.REDUCE_SCATTER, TransferKind.ALL_REDUCE]
    ),
    num_bytes=_sizes,
    dtype=st.just("torch.float32"),
    shard_bytes=_sizes,
    casts=st.booleans(),
    group=st.text(max_size=5),
    world=st.integers(1, 4096),
    ready=_steps,
    due=_steps,
    last=_steps,
    grad_bytes=_sizes,
    copied_in=st.booleans(),
)
_problems = st.builds(
    Problem,
    graph=st.sampled_from([GraphKind.FORWARD, GraphKind.BACKWARD, GraphKind.INFERENCE]),
    steps=st.lists(st.text(max_size=5), max_size=4).map(tuple),
    compute_us=st.lists(st.floats(0, 1e9), max_size=4).map(tuple),
    fixed_bytes=st.lists(_sizes, max_size=4).map(tuple),
    fixed_boundary_bytes=st.lists(_sizes, max_size=4).map(tuple),
    transfers=st.lists(_transfers, max_size=4).map(tuple),
)
_buckets = st.builds(
    Bucket,
    kind=st.sampled_from(
        [TransferKind.ALL_GATHER, TransferKind.REDUCE_SCATTER, TransferKind.ALL_REDUCE]
    ),
    buffers=st.lists(
        st.lists(st.integers(0, 9), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4
    ).map(tuple),
    num_bytes=_sizes,
    group=st.text(max_size=5),
    world=st.integers(1, 4096),
    launch=_steps,
    wait=_steps,
)
plans = st.builds(
    Plan,
    params=st.lists(_params, max_size=4).map(tuple),
    problem=_problems,
    buckets=st.lists(_buckets, max_size=6).map(tuple),
)


@given(plans)
def test_a_plan_survives_json(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.to_json() == plan.to_json()


@given(plans)
def test_counts_and_bytes_cover_all_buckets(plan: Plan) -> None:
    kinds = (TransferKind.ALL_GATHER, TransferKind.REDUCE_SCATTER, TransferKind.ALL_REDUCE)
    assert sum(map(plan.count, kinds)) == len(plan.buckets)
    assert sum(map(plan.num_bytes, kinds)) == sum(b.num_bytes for b in plan.buckets)


_TRANSFER = Transfer(
    param=0,
    kind=TransferKind.ALL_GATHER,
    num_bytes=168,
    dtype="torch.float32",
    shard_bytes=84,
    casts=False,
    group="0",
    world=2,
    ready=0,
    due=0,
    last=0,
)
_PROBLEM = Problem(GraphKind.FORWARD, ("mm",), (3.0,), (40,), (30, 30), (_TRANSFER,))


def test_json_of_plan_is_readable() -> None:
    param = PlanParam(3, (5, 7), "torch.float32", 3, "up.weight")
    plan = Plan((param,), _PROBLEM, (Bucket(TransferKind.ALL_GATHER, ((0,),), 168, "0", 2, 0, 0),))
    raw = json.loads(plan.to_json())
    assert raw["problem"]["graph"] == plan.graph == "forward"
    assert raw["params"][0]["fqn"] == "up.weight"
    assert raw["buckets"][0]["kind"] == "all_gather"


def test_plan_of_another_version_is_refused() -> None:
    raw = json.loads(Plan((), _PROBLEM, ()).to_json())
    raw["version"] += 1
    with pytest.raises(ValueError, match="the plan has version"):
        Plan.from_json(json.dumps(raw))


def test_named_assigns_names_by_graph_input() -> None:
    params = tuple(PlanParam(i, (4,), "torch.float32", 2) for i in (2, 0))
    plan = Plan(params, _PROBLEM, ())
    assert [p.fqn for p in plan.named(["a", "b", "c"]).params] == ["c", "a"]
    assert [p.fqn for p in plan.params] == ["", ""]
