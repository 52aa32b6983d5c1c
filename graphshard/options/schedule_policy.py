"""The user's options for scheduling collectives, and the limits and cost model that they imply."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import fx

from ..cost.devices import find_hardware, find_hardware_or_default
from ..cost.hardware import Hardware
from ..cost.model import CostModel
from ..planning.memory_budget import ScheduleLimits
from ..planning.plan import Bucket, Problem
from ..planning.search import find_schedule, schedule_without_overlap


@dataclass(frozen=True)
class SchedulePolicy:
    """Policy for bucketing and ordering collectives.

    Attributes:
        overlap: whether collectives overlap with compute. True: buckets and the places where they
            are launched follow from predicted times, and all ranks follow the first rank's plan.
            False: each collective is launched where its result is needed, and waited for at once.
        bucket_cap_mb: size of the largest bucket, in MB of full parameters; "auto": the cost model
            decides. A larger parameter travels alone.
        max_in_flight_gb: limit for the buffers between launch and wait, in GB; None: no limit.
        memory_budget_gb: limit for the peak memory of a graph on one rank, in GB: inputs,
            activations, gathered parameters and gradients; None: no limit. On a GPU, activations
            that do not fit are offloaded to the host until backward, and more of them if that makes
            the schedule faster.
        activation_memory_budget: fraction, from 0 to 1, to save of the activations that a graph
            would save otherwise. The rest is recomputed, starting with what is cheapest to
            recompute for its memory: 1 recomputes none, 0 all. None: the setting of that name in
            ``torch._functorch.config``. Backward gathers each parameter at most once, for
            recomputation and gradients together, and never for recomputation alone: vectors are
            kept unsharded, and the results of ops that use another such parameter are saved.
        hardware: name in ``graphshard.cost.devices.HARDWARE``, or path of a file that
            ``python -m graphshard calibrate`` wrote; "auto": the entry for the device's name. Equal
            on all ranks.
        regions: whether to compile repeated layers only once, between the same launches and waits.
            True: wherever layers repeat. "auto": only where that saves Inductor more time than the
            calls cost over a thousand steps. False: nowhere.
        auto: whether to plan several strategies of saving tensors for backward, at the first
            compile, and to take the one predicted to be fastest within ``memory_budget_gb`` (None
            on a GPU: its free memory, less two optimizer states). The strategies combine
            ``activation_memory_budget`` in five steps, unless it is given; keeping unsharded the
            parameters whose gathers are exposed, or all of them; and, on a GPU, offloading
            activations or not. A ``reshard_after_forward`` for single parameters (``overrides``) or
            with a number of ranks stays as it is. The first rank chooses for all ranks; a rank with
            a larger batch, or a later graph, saves fewer activations if it would exceed the budget.
            ``Backend.summary()`` shows what was tried.
        node_cost: function that is called with every node of a graph; a number replaces the cost
            model's time of that node, in microseconds, and None keeps it. Graphs are then not
            cached.

    Raises:
        ValueError: a field has a wrong type or value.
    """

    bucket_cap_mb: float | Literal["auto"] = "auto"
    max_in_flight_gb: float | None = None
    memory_budget_gb: float | None = None
    activation_memory_budget: float | None = None
    hardware: str = "auto"
    overlap: bool = True
    regions: bool | Literal["auto"] = False
    auto: bool = False
    node_cost: Callable[[fx.Node], float | None] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.overlap, bool):
            raise ValueError(f"schedule.overlap={self.overlap!r}: must be True or False")
        if self.regions not in (True, False, "auto"):
            raise ValueError(f'schedule.regions={self.regions!r}: must be True, False or "auto"')
        if self.bucket_cap_mb != "auto":
            _check_size("bucket_cap_mb", self.bucket_cap_mb)
        for name in ("max_in_flight_gb", "memory_budget_gb"):
            if getattr(self, name) is not None:
                _check_size(name, getattr(self, name))
        budget = self.activation_memory_budget
        if budget is not None and not (_is_number(budget) and 0 <= budget <= 1):
            raise ValueError(
                f"schedule.activation_memory_budget={budget!r}: must be a number from 0 (recompute "
                "all activations) to 1 (none), or None"
            )
        if not isinstance(self.auto, bool):
            raise ValueError(f"schedule.auto={self.auto!r}: must be True or False")
        if self.auto and not self.overlap:
            raise ValueError(
                "schedule.auto=True with overlap=False: auto chooses by the times of a schedule "
                "that overlaps; set schedule.overlap=True, or leave auto out"
            )
        if not self.overlap and self.limits() != ScheduleLimits():
            raise ValueError(
                "schedule.bucket_cap_mb, max_in_flight_gb and memory_budget_gb limit what "
                "overlaps: set schedule.overlap=True, or leave them out"
            )
        if self.node_cost is not None and not callable(self.node_cost):
            raise ValueError(
                f"schedule.node_cost={self.node_cost!r}: must be a function of an fx.Node, or None"
            )
        if self.hardware != "auto":
            _hardware(self.hardware)

    def plan_buckets(
        self, problem: Problem, cost_model: CostModel, *, refine: bool = True
    ) -> tuple[Bucket, ...]:
        """Return the buckets of a graph, with the steps of their launches and waits."""
        if self.overlap:
            return find_schedule(problem, cost_model, self.limits(), refine=refine)
        return schedule_without_overlap(problem)

    def limits(self) -> ScheduleLimits:
        """Return the limits of the schedule, in bytes."""
        return ScheduleLimits(
            cap=None if self.bucket_cap_mb == "auto" else _bytes(self.bucket_cap_mb, 1e6),
            in_flight=_bytes(self.max_in_flight_gb, 1e9),
            peak=_bytes(self.memory_budget_gb, 1e9),
        )

    def cost_model(self, device: torch.device) -> CostModel:
        if self.hardware != "auto":
            hardware = _hardware(self.hardware)
        elif device.type == "cuda":
            hardware, _ = find_hardware_or_default(torch.cuda.get_device_name(device))
        else:
            hardware = find_hardware("cpu")
        tf32 = torch.get_float32_matmul_precision() != "highest"
        return CostModel(hardware, self.node_cost, tf32 and device.type == "cuda")


def _check_size(name: str, value: object) -> None:
    if not _is_number(value) or not value > 0:  # type: ignore[operator]
        raise ValueError(f"schedule.{name}={value!r}: must be a positive number")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _bytes(size: float | None, unit: float) -> int | None:
    return None if size is None else int(size * unit)


def _hardware(name: str) -> Hardware:
    return Hardware.load(Path(name)) if Path(name).is_file() else find_hardware(name)
