"""The user's options for scheduling collectives, and the limits and cost model that they imply."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from torch import fx

from ..cost.devices import (
    TABLE,
    find_hardware,
    find_hardware_or_default,
    load_hardware,
    with_node_size,
)
from ..cost.hardware import Hardware
from ..cost.model import CostModel
from ..planning.memory_budget import Reduce, ScheduleLimits
from ..planning.plan import Bucket, Problem
from ..planning.search import find_schedule, schedule_without_overlap
from .checks import check_bool, is_number


@dataclass(frozen=True)
class SchedulePolicy:
    """Policy for bucketing and ordering collectives.

    Attributes:
        overlap: whether collectives overlap with compute. If True, buckets and launch points are
            chosen by predicted times, and all ranks follow the first rank's plan. If False, gathers
            are launched where their results are needed, reductions where their gradients are ready,
            and each is waited for immediately; no parameter is kept unsharded to save a gather.
        bucket_cap_mb: maximum size of a bucket, in MB of full parameters, or "auto" to let the cost
            model decide. A larger parameter gets a separate bucket.
        max_in_flight_gb: limit for the total size of buckets between launch and wait, in GB
            (default: no limit).
        memory_budget_gb: limit for the peak memory of a graph on one rank, in GB, including inputs,
            activations, gathered parameters and gradients (default: no limit). On a GPU,
            activations that do not fit are offloaded to the host until backward, as are others if
            that makes the schedule faster.
        activation_memory_budget: fraction of the activations to save for backward, from 0
            (recompute all) to 1 (recompute none); the cheapest to recompute for their size are
            recomputed first. The default is the setting of that name in
            ``torch._functorch.config``; ``torch.autograd.graph.region_activation_memory_budget``
            (torch 2.13) overrides both. Below 1, and outside of checkpointed regions, backward
            never gathers a parameter solely to recompute: biases and other parameters with fewer
            than two dimensions are kept unsharded, and if recomputation alone needs a parameter,
            such as an embedding's, the results of the ops that use it are saved instead.
        hardware: name in ``graphshard.cost.devices.HARDWARE``, path of a file written by
            ``python -m graphshard calibrate``, which is read at once, or "auto" for the entry with
            the device's name (if there is none, a default entry, with a warning) and nodes as large
            as ``torchrun``'s, if there are several. Must be equal on all ranks.
        reduce: reduction of gradients narrower than ``mp_policy.reduce_dtype``; over gloo, always
            "exchange". "ring" casts them, and a reduce-scatter sums them. "exchange" sends them
            uncast in an all-to-all, which is half the bytes for bf16 gradients summed in float32;
            each rank sums its rows in ``reduce_dtype``, in a fixed order. "auto" exchanges the
            buckets for which that is predicted to be faster: large ones within a node. Between
            nodes with several GPUs, an exchange sends more through each network card than a ring.
            Without ``overlap``, "auto" is "ring".
        regions: whether to compile repeated layers only once: their parts between launches and
            waits become calls to shared subgraphs. "auto" does so only if it saves Inductor more
            time than the calls cost over a thousand steps.
        auto: whether to plan several strategies for saving tensors for backward, at the first
            compile, and to use the one predicted to be fastest within ``memory_budget_gb``, which
            is required on a CPU. On a GPU, the default is the free memory, less a reserve for
            fragmentation and for two optimizer values per parameter. Strategies combine five values
            of ``activation_memory_budget``, unless it is set here or in torch; keeping parameters
            unsharded (those with exposed gathers, or all); and, on a GPU, offloading activations or
            not. ``reshard_after_forward`` still applies where it is set in ``overrides`` or to a
            number of ranks. The first rank chooses for all ranks; a rank with a larger batch, or a
            later graph, saves fewer activations if it exceeds the budget. ``Backend.summary()``
            shows all candidates.
        node_cost: function that takes a node of a graph and returns its time in microseconds, or
            None for the time of the cost model. Graphs are then not cached.

    Raises:
        ValueError: a field has a wrong type or value, or contradicts another.
        OSError: the file ``hardware`` cannot be read.
    """

    bucket_cap_mb: float | Literal["auto"] = "auto"
    max_in_flight_gb: float | None = None
    memory_budget_gb: float | None = None
    activation_memory_budget: float | None = None
    hardware: str = "auto"
    overlap: bool = True
    reduce: Reduce = "ring"
    regions: bool | Literal["auto"] = "auto"
    auto: bool = False
    node_cost: Callable[[fx.Node], float | None] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        check_bool("schedule.overlap", self.overlap)
        if self.reduce not in get_args(Reduce):
            raise ValueError(
                f'schedule.reduce={self.reduce!r}: must be "ring", "exchange" or "auto"'
            )
        if not isinstance(self.regions, bool) and self.regions != "auto":
            raise ValueError(f'schedule.regions={self.regions!r}: must be True, False or "auto"')
        if self.bucket_cap_mb != "auto":
            _check_size("bucket_cap_mb", self.bucket_cap_mb, '"auto"')
        for name in ("max_in_flight_gb", "memory_budget_gb"):
            if getattr(self, name) is not None:
                _check_size(name, getattr(self, name), "None")
        budget = self.activation_memory_budget
        if budget is not None and not (is_number(budget) and 0 <= budget <= 1):
            raise ValueError(
                f"schedule.activation_memory_budget={budget!r}: must be a number from 0 (recompute "
                "all activations) to 1 (none), or None"
            )
        check_bool("schedule.auto", self.auto)
        if self.auto and not self.overlap:
            raise ValueError(
                "schedule.auto=True with overlap=False: auto compares schedules that overlap "
                "communication with compute; set schedule.overlap=True, or omit auto"
            )
        if not self.overlap and self.limits() != ScheduleLimits(reduce=self.reduce):
            raise ValueError(
                "schedule.overlap=False with a bucket_cap_mb, max_in_flight_gb or "
                "memory_budget_gb: these limit overlapping collectives; set schedule.overlap=True, "
                "or omit them"
            )
        if self.node_cost is not None and not callable(self.node_cost):
            raise ValueError(
                f"schedule.node_cost={self.node_cost!r}: must be a function of an fx.Node, or None"
            )
        if self.hardware != "auto" and not isinstance(self.hardware, _LoadedHardware):
            object.__setattr__(self, "hardware", _LoadedHardware(self.hardware))

    def plan_buckets(
        self, problem: Problem, cost_model: CostModel, *, refine: bool = True
    ) -> tuple[Bucket, ...]:
        if self.overlap:
            return find_schedule(problem, cost_model, self.limits(), refine=refine)
        return schedule_without_overlap(problem, exchanges=self.reduce == "exchange")

    def limits(self) -> ScheduleLimits:
        return ScheduleLimits(
            cap=None if self.bucket_cap_mb == "auto" else _bytes(self.bucket_cap_mb, 1e6),
            in_flight=_bytes(self.max_in_flight_gb, 1e9),
            peak=_bytes(self.memory_budget_gb, 1e9),
            reduce=self.reduce,
        )

    def cost_model(self, device: torch.device) -> CostModel:
        if isinstance(self.hardware, _LoadedHardware):
            hardware = self.hardware.rates
        elif device.type == "cuda":
            hardware = find_hardware_or_default(torch.cuda.get_device_name(device))
            hardware = _in_nodes_of_torchrun(hardware)
        else:
            hardware = find_hardware("cpu")
        # ``get_float32_matmul_precision`` raises after some uses of these newer attributes.
        tf32 = torch.backends.cuda.matmul.fp32_precision == "tf32"
        return CostModel(hardware, self.node_cost, tf32 and device.type == "cuda")


class _LoadedHardware(str):
    """A ``SchedulePolicy.hardware`` with its rates, which ``dataclasses.replace`` passes on."""

    # Compiles do not read the file: by then, a relative path may not exist, or the file may differ.
    def __init__(self, name: str) -> None:
        self.rates = load_hardware(name)


def _in_nodes_of_torchrun(hardware: Hardware) -> Hardware:
    """Return ``hardware`` with the node size of this job, if it runs on several equal nodes."""
    names = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE")
    world, in_node, nodes = (int(os.environ.get(name, 1)) for name in names)
    # Nodes that differ do not agree on a size, but all ranks must use the same rates.
    are_equal = nodes > 1 and nodes * in_node == world
    # torchrun's nodes are hosts, but the links of a rack connect several.
    is_rack = hardware.ranks_per_node > TABLE["gpu"]["ranks_per_node"]
    return with_node_size(hardware, in_node) if are_equal and not is_rack else hardware


def _check_size(name: str, value: object, alternative: str) -> None:
    if not is_number(value) or not 0 < value < math.inf:
        raise ValueError(
            f"schedule.{name}={value!r}: must be a positive, finite number or {alternative}"
        )


def _bytes(size: float | None, unit: float) -> int | None:
    return None if size is None else int(size * unit)
