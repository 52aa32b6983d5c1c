"""How much memory a rank needs at its peak: in a training step, beside eager FSDP2 and ZeRO-2, and
while a model is sharded. `benchmarks/memory.py` measures, in new processes."""

from __future__ import annotations

import itertools
import statistics

import pytest

from benchmarks.common import FSDP2
from benchmarks.memory import (
    MB,
    Memory,
    kind_name,
    measure,
    peak_is_known,
    resident_by_step,
    sharding_memory,
    strategies_memory,
)
from tests import ranks

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(
        not peak_is_known(), reason="this kernel does not tell the peak memory of a process"
    ),
]
WORLD = 2
# So large that what Python modules and the compiler hold, tens of MB more than in a process that
# only runs FSDP2, does not decide.
STEP = 560e6, 20, WORLD, True


def _is_no_more(ours: Memory, theirs: Memory) -> bool:
    """Than five percent; also without what was resident before: the gathered parameters and full
    gradients of a step."""
    in_step = ours.peak - ours.before, theirs.peak - theirs.before
    return ours.peak <= 1.05 * theirs.peak and in_step[0] <= 1.05 * in_step[1]


def test_a_step_needs_what_fsdp2_needs() -> None:
    theirs, kind = measure(FSDP2, *STEP), kind_name("inductor", "ZeRO-3")
    ours = measure(kind, *STEP)
    assert ours.params > 500 * MB
    if not _is_no_more(
        ours, theirs
    ):  # it compiled what is not in a cache, and holds what that took
        ours = measure(kind, *STEP)
    assert _is_no_more(ours, theirs), (ours, theirs)


def test_strategies_need_more_and_more() -> None:
    """With P of parameters on 4 ranks: P / 2 of shards and gradients; when backward begins and
    gradients are not there yet, P / 2 more for what hpZ keeps for it, P more for ZeRO-2; P more and
    no P / 4 of shards, but P of gradients for DDP."""
    params = 200e6
    for peaks in ranks.run_fresh(4, strategies_memory, "aot_eager", params, 20):
        # What gloo copies of gradients in flight differs by tens of MB from run to run.
        for (less, more), margin in zip(itertools.pairwise(peaks), (0.1, 0.1, 0.0), strict=True):
            assert less <= more - margin * params, peaks


def test_every_step_needs_the_same() -> None:
    kind = kind_name("aot_eager", "ZeRO-3")
    for resident in ranks.run_fresh(WORLD, resident_by_step, kind, 80e6, 20, 8):
        # A gathered parameter that stays would be 4 MB more in each step, 16 MB from one half to
        # the other. Memory comes in pages of 2 MiB, and some steps may do with two less; what
        # gloo's threads have not let go of when a step ends is there in some of them.
        first, second = resident[: len(resident) // 2], resident[len(resident) // 2 :]
        assert abs(min(second) - min(first)) <= 5 * MB, resident
        assert statistics.median(second) - min(resident) <= 5 * MB, resident


@pytest.mark.parametrize("at_first_call", [False, True])
def test_sharding_needs_the_model_and_one_parameter_more(at_first_call: bool) -> None:
    linears, params = 50, 200e6
    for memory in ranks.run_fresh(WORLD, sharding_memory, at_first_call, params, linears):
        parameter = memory.params / linears
        # One more shard of a parameter, and what messages and Python objects need.
        assert memory.peak - memory.before <= 1.5 * parameter + 2 * MB, memory
