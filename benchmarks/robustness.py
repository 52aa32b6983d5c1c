"""How good are schedules if links and kernels are not as fast as predicted?

    python -m benchmarks.robustness [--models 8B 70B 405B] [--gpus 8 64 1024] [--out FILE]

Needs no ranks and no data, only fake tensors and a fake process group. Llama-3 is traced once, and
scheduled for each number of GPUs and each kind of link: the H100's in the hardware table, and links
that take 3.7 times as long per byte. Each schedule is then simulated in ``SCENARIOS``, and compared
with

    FSDP2's rule    the faster of its two schedules, with and without packed buffers
    exact           a schedule planned for the times of the scenario
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from benchmarks import common
from benchmarks.llama import DEVICE, LLAMA3, trace
from benchmarks.schedules import at_world, fsdp2_rule, uncopied
from graphshard.cost.devices import HARDWARE
from graphshard.cost.hardware import Hardware, Interconnect
from graphshard.cost.model import CostModel
from graphshard.planning.live_bytes import alive_bytes
from graphshard.planning.memory_budget import ScheduleLimits
from graphshard.planning.plan import Bucket, Plan, Problem
from graphshard.planning.search import find_schedule
from graphshard.planning.simulate import clock

LINKS = (1.0, 3.7)
"""Factors on the time per byte of the links that are planned for."""


class Scenario(NamedTuple):
    """Factors on planned times.

    Attributes:
        link: factor on the time per byte of collectives.
        compute: factor on the time of steps.
        latency: factor on the time of a collective of no bytes.
    """

    link: float
    compute: float
    latency: float


AS_PLANNED = Scenario(1.0, 1.0, 1.0)
SCENARIOS = [Scenario(*f) for f in itertools.product((0.5, 1, 1.5, 2), (0.8, 1, 1.2), (1, 5))]

Schedules = Sequence[Sequence[Bucket]]
"""Buckets of the forward and of the backward graph."""


def step_us(
    problems: Sequence[Problem], schedules: Schedules, hardware: Hardware, scenario: Scenario
) -> float:
    cost_model = CostModel(slowed(hardware, scenario))
    return sum(
        clock(_computing(problem, scenario), buckets, cost_model).total_us
        for problem, buckets in zip(problems, schedules, strict=True)
    )


def plan_for(
    problems: Sequence[Problem], hardware: Hardware, scenario: Scenario = AS_PLANNED
) -> Schedules:
    cost_model = CostModel(slowed(hardware, scenario))
    return [
        find_schedule(_computing(problem, scenario), cost_model, ScheduleLimits())
        for problem in problems
    ]


def slowed(hardware: Hardware, scenario: Scenario) -> Hardware:
    """Return ``hardware`` with its links changed by the factors of a scenario."""

    def slow(links: Interconnect) -> Interconnect:
        bus = {
            kind: dataclasses.replace(rate, peak=rate.peak / scenario.link)
            for kind, rate in links.bus.items()
        }
        return dataclasses.replace(
            links,
            latency_us=links.latency_us * scenario.latency,
            hop_us=links.hop_us * scenario.latency,
            bus=bus,
        )

    return dataclasses.replace(hardware, intra=slow(hardware.intra), inter=slow(hardware.inter))


def _computing(problem: Problem, scenario: Scenario) -> Problem:
    compute_us = tuple(us * scenario.compute for us in problem.compute_us)
    return dataclasses.replace(problem, compute_us=compute_us)


class Ratios(NamedTuple):
    """Ratios of our schedules' times to others', one per scenario.

    Attributes:
        rule: ratios to the better of FSDP2's schedules.
        exact: ratios to schedules planned for the scenario, if there are any.
    """

    rule: list[float]
    exact: list[float]


def ratios(
    plans: Sequence[Plan],
    problems: Sequence[Problem],
    ours: Schedules,
    hardware: Hardware,
    *,
    exact: bool,
) -> Ratios:
    """Compare schedules in all ``SCENARIOS``; if ``exact``, also with ones planned for each."""
    theirs = [
        [rule(plan, problem) for plan, problem in zip(plans, problems, strict=True)]
        for rule in (fsdp2_rule, uncopied)
    ]
    found = Ratios([], [])
    for scenario in SCENARIOS:
        our_us = step_us(problems, ours, hardware, scenario)
        their_us = min(step_us(problems, each, hardware, scenario) for each in theirs)
        found.rule.append(our_us / their_us)
        if exact:
            planned = plan_for(problems, hardware, scenario)
            found.exact.append(our_us / step_us(problems, planned, hardware, scenario))
    return found


# --- output --------------------------------------------------------------------------------------


def row(name: str, plans: Sequence[Plan], gpus: int, link: float, *, exact: bool) -> dict[str, str]:
    problems = [at_world(plan, gpus) for plan in plans]
    hardware = slowed(HARDWARE[DEVICE], Scenario(link, 1.0, 1.0))
    begin = time.perf_counter()
    ours = plan_for(problems, hardware)
    planning_s = time.perf_counter() - begin
    found = ratios(plans, problems, ours, hardware, exact=exact)
    theirs = [uncopied(plan, problem) for plan, problem in zip(plans, problems, strict=True)]
    cells = {
        "model, GPUs, links": f"{name}, {gpus}, {link:g}x",
        "planning s": f"{planning_s:.1f}",
        "peak GiB": f"{peak_bytes(problems, ours) / 2**30:.1f}",
        "FSDP2's peak": f"{peak_bytes(problems, theirs) / 2**30:.1f}",
        "over FSDP2's rule: median": f"{statistics.median_high(found.rule):.3f}",
        "worst": f"{max(found.rule):.3f}",
        "over exact: median": "",
        "worst exact": "",
        "within 2 %": "",
    }
    if exact:
        near = sum(ratio <= 1.02 for ratio in found.exact)
        cells["over exact: median"] = f"{statistics.median_high(found.exact):.3f}"
        cells["worst exact"] = f"{max(found.exact):.3f}"
        cells["within 2 %"] = f"{near} of {len(found.exact)}"
    return cells


def peak_bytes(problems: Sequence[Problem], schedules: Schedules) -> int:
    return max(max(alive_bytes(p, s)) for p, s in zip(problems, schedules, strict=True))


NOTE = f"""Simulated forward and backward in {len(SCENARIOS)} scenarios: links at 0.5, 1, 1.5 and 2
times the planned time per byte, compute at 0.8, 1 and 1.2 times, latency at 1 and 5 times. *Exact*:
planned for the times of the scenario. *Peak*: sharded and gathered parameters, gradients and
activations, without optimizer state."""


def main() -> None:
    args = _arguments()
    parts = [common.heading("benchmarks.robustness", torch.device("cpu"))]
    lines = []
    for name in args.models:
        plans = trace(LLAMA3[name])
        for gpus, link in itertools.product(args.gpus, LINKS):
            lines.append(row(name, plans, gpus, link, exact=name in args.exact))
            print("  ".join(lines[-1].values()), flush=True)
    parts += [common.table(lines), NOTE]
    common.show(parts[-2])
    common.write_report(args.out, parts)


def _arguments() -> argparse.Namespace:
    parser = common.new_parser(__doc__)
    parser.add_argument("--models", nargs="+", choices=LLAMA3, default=list(LLAMA3))
    parser.add_argument("--gpus", nargs="+", type=common.count, default=[8, 64, 1024])
    parser.add_argument(
        "--exact", nargs="*", choices=LLAMA3, default=["8B"], help="models with exact schedules"
    )
    common.add_out(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
