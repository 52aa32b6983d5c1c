"""Find what would speed up a training step: plan the same graphs with one thing changed."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..cost.hardware import Hardware
from .cluster import Cluster
from .peak import MemoryForecast
from .planned_step import PlannedStep, plan_step
from .recipe import Recipe
from .trace import FASTER_COMPUTE, FASTER_MEMORY, NO_LAUNCHES, TracedStep, faster_machines, scaled


@dataclass(frozen=True)
class Change:
    """A training step, planned with one thing changed.

    Attributes:
        what: description of the change.
        step_us: time of the changed step, for as many tokens as the original step.
        gain: fraction of the step time that the change saves; negative if it costs time.
        memory_bytes: peak memory of a rank, margin included.
        fits: whether that fits on a device.
        is_machine: whether the machine changes, rather than the recipe.
    """

    what: str
    step_us: float
    gain: float
    memory_bytes: int
    fits: bool
    is_machine: bool


LINK, LATENCY, COMPUTE, BANDWIDTH = (
    "links twice as fast",
    "no latency of kernels and links",
    "matrix products twice as fast",
    "device memory twice as fast",
)
KEPT, FOUR = (
    "parameters kept from forward to backward (reshard_after_forward=False)",
    "4 microbatches in a step (per microbatch)",
)
HOST = "host twice as fast (its link and its memory)"
_BINDS = {
    HOST: "host",
    LINK: "link",
    LATENCY: "latency",
    COMPUTE: "compute",
    BANDWIDTH: "memory bandwidth",
}


def find_changes(traced: TracedStep, recipe: Recipe, cluster: Cluster) -> list[Change]:
    """Plan the step with each change, and compare with the unchanged step.

    Both are planned by the quick search. A change is left out if no schedule stays within the
    budget.
    """
    quick = functools.partial(plan_step, traced, refine=False)
    base = quick(recipe, cluster).time.step_us
    memory_machine = faster_machines(cluster.hardware)[FASTER_MEMORY]
    plans: dict[str, Callable[[], PlannedStep]] = {
        LINK: lambda: quick(recipe, _scaled_links(cluster, rate=2.0)),
        LATENCY: lambda: quick(recipe, _scaled_links(cluster, latency=0.0), prices=NO_LAUNCHES),
        COMPUTE: lambda: quick(recipe, cluster, prices=FASTER_COMPUTE),
        BANDWIDTH: lambda: quick(recipe, _with(cluster, memory_machine), prices=FASTER_MEMORY),
    }
    if recipe.offload:
        plans[HOST] = lambda: quick(recipe, _with(cluster, _with_faster_host(cluster.hardware)))
    if recipe.kind in ("zero3", "hsdp"):
        plans[KEPT] = lambda: quick(recipe, cluster, keep_all=True)
    if recipe.accumulate == 1:
        plans[FOUR] = lambda: quick(dataclasses.replace(recipe, accumulate=4), cluster)
    changes = []
    for what, plan in plans.items():
        # The unchanged step could be planned, so an error is about the budget.
        with contextlib.suppress(ValueError):
            changes.append(_change(what, plan(), base))
    return changes


def _change(what: str, step: PlannedStep, base_us: float) -> Change:
    step_us = step.time.step_us / (4 if what == FOUR else 1)
    memory = step.memory
    return Change(
        what, step_us, 1 - step_us / base_us, memory.total, memory.fits, is_machine=what in _BINDS
    )


def _with(cluster: Cluster, hardware: Hardware) -> Cluster:
    return dataclasses.replace(cluster, hardware=hardware)


def _with_faster_host(hardware: Hardware) -> Hardware:
    link, memory = scaled(hardware.host, 2.0), scaled(hardware.host_memory, 2.0)
    return dataclasses.replace(hardware, host=link, host_memory=memory)


def _scaled_links(cluster: Cluster, *, rate: float = 1.0, latency: float = 1.0) -> Cluster:
    links = {}
    for name in ("intra", "inter"):
        link = getattr(cluster.hardware, name)
        bus = {k: scaled(r, rate) for k, r in link.bus.items()}
        links[name] = dataclasses.replace(
            link, bus=bus, latency_us=link.latency_us * latency, hop_us=link.hop_us * latency
        )
    launch_us = cluster.hardware.launch_us * latency
    issue_us = cluster.hardware.issue_us * latency
    return _with(
        cluster,
        dataclasses.replace(cluster.hardware, **links, launch_us=launch_us, issue_us=issue_us),
    )


def find_bottleneck(memory: MemoryForecast, changes: Sequence[Change]) -> str:
    """Return the bottleneck of a step.

    That is memory if the step does not fit, otherwise the machine part whose speed-up gains most.
    """
    if not memory.fits:
        return "memory"
    machine = [change for change in changes if change.is_machine]
    return _BINDS[max(machine, key=lambda change: change.gain).what]
