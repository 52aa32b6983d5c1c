"""Does the simulator predict how long compute waits, given all measured durations?

    python -m benchmarks.replay [RACE]

RACE is the file that ``benchmarks.race --out`` writes on a GPU; default:
benchmarks/results/race.tar.gz. For each plan, the simulator gets these durations from the last
profiled step:

    step            its predicted share of the time that kernels take between two launches
    copy-in         the time of its kernels
    collective      the time from its earliest possible start, after its copy-in and the previous
                    collective, even if it starts later because kernels leave no room for it

"predicted" is the prediction that the plan was based on. "exposed" is the time in which compute
waits.
"""

from __future__ import annotations

import dataclasses
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, takewhile, zip_longest
from pathlib import Path
from typing import NamedTuple

from benchmarks import common
from benchmarks.gpu_trace import Kernel, parse, streams
from graphshard.cost.hardware import Hardware
from graphshard.cost.model import CostModel
from graphshard.planning.buckets import next_in_chain
from graphshard.planning.plan import Plan, Problem
from graphshard.planning.simulate import BucketCost, Clock, clock, start_times_us, sweep

RECORDED = Path(__file__).parent / "results" / "race.tar.gz"
COPIES_IN = ("multi_tensor_apply", "chunk_cat")
WAIT_US = 20.0
"""Longest pause between kernels of the compute stream that is not a wait, in microseconds."""


class Times(NamedTuple):
    """Milliseconds of a graph: in total, and while compute waits for communication."""

    total_ms: float
    exposed_ms: float


class Replayed(NamedTuple):
    """Times of one graph of an entry of the race."""

    name: str
    measured: Times
    simulated: Times
    predicted: Times


@dataclass
class Stretch:
    """Kernels of the compute stream from one launch to the next.

    Attributes:
        copies: copy-in kernels of the launched buckets.
        others: kernels of compute and copy-out.
    """

    copies: list[Kernel]
    others: list[Kernel]


def main() -> None:
    parser = common.new_parser(__doc__)
    parser.add_argument("race", nargs="?", type=Path, default=RECORDED)
    rows = []
    for name, *times in replay(parser.parse_args().race):
        named = dict(zip(("measured", "simulated", "predicted"), times))
        totals = {f"ms, {part}": f"{each.total_ms:.2f}" for part, each in named.items()}
        exposed = {f"exposed, {part}": f"{each.exposed_ms:.2f}" for part, each in named.items()}
        rows.append({"graph": name, **totals, **exposed})
    common.show(common.table(rows))


def replay(path: Path) -> Iterator[Replayed]:
    with tarfile.open(path) as packed:
        files = {m.name: packed.extractfile(m).read() for m in packed.getmembers() if m.isfile()}
    for file in sorted(f for f in files if f.endswith("wire.json")):
        folder = file.rpartition("/")[0]
        own = [files[f] for f in sorted(files) if f.startswith(f"{folder}/")]
        *plans, _, trace, hardware = own
        yield from _replay(
            Path(folder).name,
            [Plan.from_json(plan.decode()) for plan in plans],
            parse(trace),
            CostModel(Hardware.from_json(hardware.decode())),
        )


def _replay(
    name: str, plans: Sequence[Plan], kernels: Sequence[Kernel], cost_model: CostModel
) -> Iterator[Replayed]:
    compute, links = streams(kernels)
    collectives = [kernel for kernel in links if kernel.is_collective]
    num_buckets = sum(len(plan.buckets) for plan in plans)
    start_us = collectives[-num_buckets - 1].end_us
    collectives = collectives[-num_buckets:]
    stretches = _last_step(compute, start_us, collectives[-1].end_us)
    for plan in plans:
        launches = _launch_steps(plan)
        own, stretches = stretches[: len(launches)], stretches[len(launches) :]
        sent, collectives = collectives[: len(plan.buckets)], collectives[len(plan.buckets) :]
        end_us = stretches[0].copies[0].start_us if stretches else sent[-1].end_us
        predicted = clock(plan.problem, plan.buckets, cost_model)
        by_launch = dict(zip(launches, own, strict=True))
        problem = _with_measured_steps(plan, by_launch)
        simulated = _simulate(plan, problem, by_launch, sent)
        times = (_times(simulated), _times(predicted))
        yield Replayed(f"{name} {plan.graph}", _measured(own, end_us), *times)


def _last_step(compute: Sequence[Kernel], start_us: float, end_us: float) -> list[Stretch]:
    """Return the stretches between the last collectives of two consecutive steps."""
    kernels = [k for k in compute if "Memcpy" not in k.name and k.start_us < end_us]
    first = [kernel for kernel in kernels if kernel.start_us < start_us]
    last = [kernel for kernel in kernels if kernel.start_us >= start_us]
    # The optimizer's kernels come first and are named like copies. To skip them, keep only as many
    # leading copies as the first step has.
    num_copies, num_leading = (sum(1 for _ in takewhile(_is_copy, some)) for some in (first, last))
    runs = [list(run) for _, run in groupby(last[num_leading - num_copies :], _is_copy)]
    return [Stretch(*pair) for pair in zip_longest(runs[::2], runs[1::2], fillvalue=[])]


def _is_copy(kernel: Kernel) -> bool:
    return any(name in kernel.name for name in COPIES_IN)


def _launch_steps(plan: Plan) -> list[int]:
    """Return the steps before which buckets are launched, one for each start time."""
    start_us = start_times_us(plan.problem)
    launches = sorted({bucket.launch for bucket in plan.buckets})
    return [next(run) for _, run in groupby(launches, start_us.__getitem__)]


def _measured(stretches: Sequence[Stretch], end_us: float) -> Times:
    kernels = [k for stretch in stretches for k in (*stretch.copies, *stretch.others)]
    kernels = [kernel for kernel in kernels if kernel.start_us < end_us]
    waits_us = _waits_us(kernels, end_us)
    return Times((end_us - kernels[0].start_us) / 1e3, waits_us / 1e3)


def _waits_us(kernels: Sequence[Kernel], end_us: float) -> float:
    starts = [*(kernel.start_us for kernel in kernels[1:]), end_us]
    pauses = (start - kernel.end_us for kernel, start in zip(kernels, starts))
    return sum(pause for pause in pauses if pause > WAIT_US)


def _with_measured_steps(plan: Plan, stretches: Mapping[int, Stretch]) -> Problem:
    """Return the problem of ``plan`` with the measured durations of compute."""
    compute_us = list(plan.problem.compute_us)
    boundaries = [*stretches, len(compute_us)]
    for (first, stretch), last in zip(stretches.items(), boundaries[1:]):
        predicted_us = sum(compute_us[first:last])
        if predicted_us:
            end_us = stretch.others[-1].end_us
            start_us = stretch.copies[-1].end_us
            measured_us = (
                end_us - start_us - _waits_us([stretch.copies[-1], *stretch.others], end_us)
            )
            for step in range(first, last):
                compute_us[step] *= measured_us / predicted_us
    return dataclasses.replace(plan.problem, compute_us=tuple(compute_us))


def _simulate(
    plan: Plan, problem: Problem, stretches: Mapping[int, Stretch], sent: Sequence[Kernel]
) -> Clock:
    """Simulate a plan with the measured durations of compute, copy-ins and collectives.

    Args:
        problem: result of ``_with_measured_steps``.
    """
    boundaries = [*stretches, problem.num_steps]
    copy_us: dict[int, float] = {}
    ready_us: dict[int, float] = {}
    for (first, stretch), last in zip(stretches.items(), boundaries[1:]):
        launched = [
            i for i, b in enumerate(plan.buckets) if first <= b.launch < max(last, first + 1)
        ]
        copies_us = sum(kernel.us for kernel in stretch.copies)
        copy_us |= dict.fromkeys(launched, copies_us / len(launched))
        ready_us |= dict.fromkeys(launched, stretch.copies[-1].end_us)
    free_us = [0.0, *(kernel.end_us for kernel in sent)]
    lane_us = [k.end_us - max(free_us[i], min(ready_us[i], k.start_us)) for i, k in enumerate(sent)]
    return sweep(
        start_times_us(problem),
        launches=[bucket.launch for bucket in plan.buckets],
        waits=[bucket.wait for bucket in plan.buckets],
        costs=[BucketCost(copy_us[i], us, 0.0) for i, us in enumerate(lane_us)],
        successors=next_in_chain(plan.buckets),
    )


def _times(timeline: Clock) -> Times:
    return Times(timeline.total_us / 1e3, sum(timeline.exposed_us) / 1e3)


if __name__ == "__main__":
    main()
