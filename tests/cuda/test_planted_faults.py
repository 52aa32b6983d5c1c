"""Each check finds a fault that is planted in a step that ran without one."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from graphshard.check.actions import HOST, Action, Record, WaitEvent
from graphshard.check.launch import call
from graphshard.check.order import order_faults
from graphshard.check.races import Race, find_races
from graphshard.check.recorder import COMPUTE
from tests.cuda import test_cases
from tests.cuda.cases import DEVICE, Case

pytestmark = test_cases.pytestmark
recording_of = test_cases.recording_of


def _races_without(actions: Sequence[Action], dropped: Action) -> list[Race]:
    return find_races([action for action in actions if action is not dropped])


def _last_wait(actions: Sequence[Action], stream: str, on: str) -> WaitEvent:
    """Return the last wait of ``stream`` for work on a stream whose name begins with ``on``."""
    origin = {action.event: action.stream for action in actions if isinstance(action, Record)}
    waits = [
        action
        for action in actions
        if isinstance(action, WaitEvent)
        and action.stream == stream
        and origin[action.event].startswith(on)
    ]
    return waits[-1]


def test_a_collective_that_nobody_waits_for() -> None:
    recording = recording_of(Case("gpt", "ZeRO-3"))
    start, stop = recording.runs[0].actions  # of the forward graph, whose last gather is used
    wait = _last_wait(recording.actions[start:stop], COMPUTE, "nccl")
    races = _races_without(recording.actions, wait)
    assert any(race.first.name.startswith("_c10d_functional.all_gather") for race in races)


def test_an_optimizer_that_reads_gradients_before_they_are_copied() -> None:
    actions = recording_of(Case("gpt", "CPU offload")).actions
    races = _races_without(actions, _last_wait(actions, HOST, "stream"))
    assert any(race.first.name.startswith("aten.copy_") and race.stream == HOST for race in races)


def test_an_activation_that_is_read_before_it_is_back() -> None:
    actions = recording_of(Case("llama", "stowed activations")).actions
    races = _races_without(actions, _last_wait(actions, COMPUTE, "stream"))
    assert any(race.first.name.startswith("aten.copy_") for race in races)


def test_a_wait_before_its_time() -> None:
    recording = recording_of(Case("gpt", "ZeRO-3"))
    run = recording.runs[-1]
    last_launch = max(i for i, number in enumerate(run.order) if number >= 0)
    order = [*run.order[: last_launch - 1], run.order[last_launch], run.order[last_launch - 1]]
    planted = dataclasses.replace(run, order=[*order, *run.order[last_launch + 1 :]])
    assert not order_faults(recording.plans, run)
    assert order_faults(recording.plans, planted)
    assert order_faults(recording.plans, dataclasses.replace(run, order=run.order[:-1]))


def test_kernels_that_a_gpu_refuses() -> None:
    kernel = recording_of(Case("gpt", "ZeRO-3")).kernels[0]
    fine, wrong, poor = call("tests.cuda.cases:compile_planted", DEVICE, *kernel)
    assert not fine and "lode" in wrong and "bytes of shared memory" in poor
