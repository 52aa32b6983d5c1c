from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given

from graphshard.kinds import TransferKind
from graphshard.planning.memory_budget import ScheduleLimits
from graphshard.planning.plan import Bucket, Plan
from graphshard.show import Dump, diff
from tests.plan.dumps import WIRE, bucket, by_hand, dump, dumps, hardware
from tests.plan.problems import Line, gather, problem, reduction

SIZE = 20


def _gathers(*buckets: Bucket, names: str = "a b c d", steps: int = 4) -> Dump:
    fqns = names.split()
    asked = problem([30.0] * steps, [gather(i, SIZE, i) for i in range(len(fqns))])
    return dump(asked, buckets, fqns)


def _of(*transfers: int, at: tuple[int, int] | None = None, packed: bool = False) -> Bucket:
    buffers = [transfers] if packed else [(i,) for i in transfers]
    return bucket(TransferKind.ALL_GATHER, buffers, SIZE * len(transfers), at or (0, transfers[0]))


def _changes(one: Dump, other: Dump) -> list[str]:
    lines = diff(one, other).splitlines()
    ends = [i for i, line in enumerate(lines) if line.split() == ["before", "after"]]
    return lines[: ends[0]] if ends else lines


APART = (_of(0), _of(1), _of(2), _of(3))


@given(dumps())
def test_the_diff_of_equal_plans_is_empty(shown: Dump) -> None:
    again = Dump.from_json(shown.to_json())
    assert diff(shown, again) == ""
    assert diff(shown, dataclasses.replace(again, compiled="7/3")) == ""


@given(dumps(), dumps())
def test_the_diff_of_different_plans_is_not_empty(one: Dump, other: Dump) -> None:
    assert (diff(one, other) == "") == (one == other)


@pytest.mark.parametrize(
    ("before", "after", "changes"),
    [
        (APART, (_of(0), _of(1, 2), _of(3)), ["merged: 2 all_gather -> 1: b, c -> b .. c (2)"]),
        ((_of(0), _of(1, 2, 3)), APART, ["split: 1 all_gather -> 3: b .. d (3) -> b, c, d"]),
        (
            (_of(0, 1), _of(2, 3)),
            (_of(0), _of(1, 2), _of(3)),
            ["regrouped: 2 all_gather -> 3: a .. b (2), c .. d (2) -> a, b .. c (2), d"],
        ),
        (
            (*APART[:2], _of(2), _of(3)),
            (*APART[:2], _of(2, at=(1, 2)), _of(3, at=(1, 2))),
            [
                "moved: all_gather of c: launch before 0 step0 -> before 1 step1",
                "moved: all_gather of d: launch before 0 step0 -> before 1 step1",
                "moved: all_gather of d: wait before 3 step3 -> before 2 step2",
            ],
        ),
        (
            (_of(0, 1), _of(2, 3)),
            (_of(0, 1, packed=True), _of(2, 3)),
            ["packed differently: all_gather of a .. b (2): 2 buffers -> 1 buffers"],
        ),
        (APART, APART[:3], ["removed: 1 all_gather -> 0: d"]),
        (APART[:3], APART, ["added: 0 all_gather -> 1: d"]),
    ],
)
def test_diff_describes_changed_buckets(
    before: list[Bucket], after: list[Bucket], changes: list[str]
) -> None:
    assert _changes(_gathers(*before), _gathers(*after)) == changes


def test_buckets_of_a_parameter_gathered_twice_are_matched_by_order() -> None:
    gathers = [gather(0, SIZE, 0), dataclasses.replace(gather(1, SIZE, 1), param=0)]
    asked = problem([30.0] * 4, gathers)
    one, other = (dump(asked, (_of(0), _of(1, at=at)), ["a"]) for at in ((0, 1), (1, 1)))
    assert diff(one, one) == ""
    moved = "moved: all_gather of a: launch before 0 step0 -> before 1 step1"
    assert _changes(one, other) == [moved]


def test_diff_describes_changed_parameters() -> None:
    one, other = _gathers(*APART[:3], names="a b c"), _gathers(*APART[:3], names="a b x")
    param = other.plan.params[0]
    wider = dataclasses.replace(param, shape=(4, 9), dtype="torch.bfloat16")
    params = (wider, *other.plan.params[1:])
    plan = dataclasses.replace(other.plan, params=params)
    assert _changes(one, dataclasses.replace(other, plan=plan)) == [
        "parameter changed: a [4, 2] float32 -> [4, 9] bfloat16",
        "parameter removed: c [4, 2] float32",
        "parameter added: x [4, 2] float32",
        "removed: 1 all_gather -> 0: c",
        "added: 0 all_gather -> 1: x",
    ]


def test_diff_ignores_step_numbers() -> None:
    one = _gathers(_of(0), _of(1))
    old = one.plan.problem
    later = dataclasses.replace(
        old,
        steps=("new", *old.steps),
        compute_us=(0.0, *old.compute_us),
        fixed_bytes=(0, *old.fixed_bytes),
        fixed_boundary_bytes=(0, *old.fixed_boundary_bytes),
        transfers=tuple(dataclasses.replace(t, due=t.due + 1) for t in old.transfers),
    )
    buckets = (_of(0, at=(1, 1)), _of(1, at=(1, 2)))
    other = dump(later, buckets, ["a", "b", "c", "d"])
    assert _changes(one, other) == ["steps: 4 -> 5"]


def test_diff_describes_changed_settings() -> None:
    one = by_hand()
    other = dataclasses.replace(
        one, limits=ScheduleLimits(cap=10), hardware=hardware(Line(), "slower")
    )
    assert _changes(one, other)[:2] == [
        "hardware: wire -> slower",
        "limit of cap: None -> 10",
    ]
    both = problem([5.0], [reduction(0, SIZE, 1, 1)])
    reduces = dump(both, [bucket(TransferKind.REDUCE_SCATTER, [(0,)], SIZE, (1, 1))])
    gathers = dump(both, [bucket(TransferKind.ALL_GATHER, [(0,)], SIZE, (1, 1))])
    assert _changes(reduces, gathers) == [
        "removed: 1 reduce_scatter -> 0: p0",
        "added: 0 all_gather -> 1: p0",
    ]


def test_buckets_without_parameters_are_matched_by_order() -> None:
    transfers = [
        dataclasses.replace(gather(0, SIZE, i), param=None, kind=TransferKind.COPY_TO_DEVICE)
        for i in range(3)
    ]

    def reloads(*steps: tuple[int, int]) -> Dump:
        buckets = [
            bucket(TransferKind.COPY_TO_DEVICE, [(i,)], SIZE, at) for i, at in enumerate(steps)
        ]
        plan = Plan((), problem([30.0] * 4, transfers), tuple(buckets))
        return Dump(plan, WIRE, ScheduleLimits())

    one = reloads((0, 1), (0, 2))
    assert diff(one, reloads((0, 1), (0, 2))) == ""
    assert _changes(one, reloads((0, 1), (1, 2))) == [
        "moved: copy_to_device of an activation: launch before 0 step0 -> before 1 step1"
    ]
    assert _changes(one, reloads((0, 1), (0, 2), (0, 2))) == [
        "added: 0 copy_to_device -> 1: an activation"
    ]


def test_diff_shows_changed_totals() -> None:
    one = _gathers(_of(0), _of(1))
    other = dataclasses.replace(one, hardware=hardware(Line(20.0, 1.0, 0.1), WIRE.name))
    rows = [line.rsplit(maxsplit=3) for line in diff(one, other).splitlines()[2:]]
    assert ["total ms", "0.150", "0.170", "+13.3%"] in rows
    assert ["communication ms", "0.060", "0.080", "+33.3%"] in rows
    assert "compute ms" not in [row[0] for row in rows]


def test_change_without_effect_on_totals_is_named() -> None:
    one = _gathers(_of(0), _of(1))
    problem_ = dataclasses.replace(one.plan.problem, steps=("x", "step1", "step2", "step3"))
    other = dataclasses.replace(one, plan=dataclasses.replace(one.plan, problem=problem_))
    assert diff(one, other) == "differs in detail: plan.problem.steps"
