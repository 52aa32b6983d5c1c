"""A lane runs one piece of work after another, each no earlier than it is ready."""

from __future__ import annotations

import math

from graphshard.planning.simulate import Lane


def test_work_waits_for_the_lane_or_the_lane_for_work() -> None:
    lane = Lane()
    assert lane.run(10.0, ready_us=5.0) == 15.0
    assert lane.start_us(0.0) == 15.0 and lane.start_us(20.0) == 20.0
    assert lane.run(10.0) == 25.0
    assert lane.run(1.0, ready_us=40.0) == lane.free_us == 41.0


def test_a_lane_can_run_backward_in_time() -> None:
    lane = Lane(-math.inf)
    assert -lane.run(10.0, -100.0) == 90.0
    assert -lane.run(10.0, -95.0) == 80.0
