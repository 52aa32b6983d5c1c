"""One graph's plan in a file, with what it was planned for.

A dump is a JSON object:

    version    of this form; a file of another version is refused
    compiled   Dynamo's name for the compilation, as in "0/0"; "" if there is none
    predicted  ``Totals``; for readers, since they follow from the rest
    limits     cap, in_flight, peak: as ``ScheduleLimits``, in bytes or null
    hardware   as ``Hardware.to_json``
    plan       as ``Plan.to_json``, parameters named
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..cost.hardware import Hardware
from ..cost.model import CostModel
from ..kinds import HOST_COPIES, GraphKind
from ..planning.live_bytes import alive_by_moment
from ..planning.memory_budget import FreeMemory, ScheduleLimits
from ..planning.plan import Bucket, Plan, PlanParam
from ..planning.simulate import (
    COMMUNICATION,
    COMPUTE,
    Scenario,
    Slot,
    Timeline,
    clock,
    simulate,
)

VERSION = 3
SLOWNESS = 1.5
"""Factor on the time of transfers, for the pessimistic end of what is exposed.

Measured on an H200: modelled links took 1.3 to 1.6 times as long as planned.
"""


@dataclass(frozen=True)
class Totals:
    """Sums and peaks of a timeline.

    Attributes:
        total_us: until all lanes are done.
        compute_us: in which the compute lane is busy.
        communication_us: in which the communication lane is busy.
        exposed_us: in which compute waits.
        slow_exposed_us: the same, if transfers take ``SLOWNESS`` times as long.
        lost_us: what hidden collectives cost compute; not in ``total_us``.
        peak_bytes: alive in the step that has most.
        in_flight_bytes: between launch and wait in the step that has most.
    """

    total_us: float
    compute_us: float
    communication_us: float
    exposed_us: float
    slow_exposed_us: float
    lost_us: float
    peak_bytes: int
    in_flight_bytes: int


@dataclass(frozen=True)
class Dump:
    """A plan with its parameters named, and what it was made for.

    Attributes:
        plan: of one graph.
        hardware: that times are predicted for.
        limits: that the schedule had to keep.
        compiled: Dynamo's name for the compilation, which profiles have too; "" if there is none.
    """

    plan: Plan
    hardware: Hardware
    limits: ScheduleLimits
    compiled: str = ""

    @functools.cached_property
    def timeline(self) -> Timeline:
        """The predicted timeline of the plan on the hardware."""
        cost_model = CostModel(self.hardware)
        return simulate(self.plan.problem, self.plan.buckets, cost_model)

    @functools.cached_property
    def slots(self) -> dict[tuple[str, int], Slot]:
        """The timeline's slots by kind, and index of the step or of the bucket."""
        return {(slot.kind, slot.index): slot for slot in self.timeline.slots}

    @functools.cached_property
    def free_memory(self) -> FreeMemory:
        """The memory that the limits leave in every moment; to be read only."""
        alive = alive_by_moment(self.plan.problem, self.plan.buckets)
        return FreeMemory(alive, self.limits, self.timeline.in_flight_bytes)

    @property
    def totals(self) -> Totals:
        """The totals of the timeline."""
        problem, buckets = self.plan.problem, self.plan.buckets
        slow = clock(problem, buckets, CostModel(self.hardware), Scenario(SLOWNESS, SLOWNESS))
        return Totals(
            total_us=self.timeline.total_us,
            compute_us=self.timeline.busy_us(COMPUTE),
            communication_us=self.timeline.busy_us(COMMUNICATION),
            exposed_us=sum(self.timeline.exposed_us),
            slow_exposed_us=sum(slow.exposed_us),
            lost_us=self.timeline.lost_us,
            peak_bytes=self.timeline.peak_bytes,
            in_flight_bytes=max(self.timeline.in_flight_bytes, default=0),
        )

    @property
    def worlds(self) -> list[int]:
        """The numbers of ranks that collectives have, ascending."""
        buckets = (b for b in self.plan.buckets if b.kind not in HOST_COPIES)
        return sorted({bucket.world for bucket in buckets})

    def param_names(self, bucket: Bucket) -> list[str]:
        """Return the names of the parameters in ``bucket``, each once, in graph order."""
        transfers = (self.plan.problem.transfers[i] for i in sorted(bucket.transfers))
        positions = [transfer.param for transfer in transfers if transfer.param is not None]
        return list(dict.fromkeys(param_name(self.plan.params[i]) for i in positions))

    def bucket_label(self, bucket: Bucket) -> str:
        """Return what travels, as in ``blocks.0.up.weight .. blocks.1.norm.bias (12)``."""
        names = self.param_names(bucket)
        if not names:
            return "an activation" if bucket.kind in HOST_COPIES else "scales of fp8"
        return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"

    def step_label(self, index: int) -> str:
        """Return a step's number and first node; ``end`` for the end of the graph."""
        steps = self.plan.problem.steps
        return f"{index} {steps[index]}" if index < len(steps) else "end"

    def to_json(self) -> str:
        """Return the contents of a file that ``load`` reads."""
        raw = {
            "version": VERSION,
            "compiled": self.compiled,
            "predicted": dataclasses.asdict(self.totals),
            "limits": dataclasses.asdict(self.limits),
            "hardware": json.loads(self.hardware.to_json()),
            "plan": json.loads(self.plan.to_json()),
        }
        return json.dumps(raw, indent=1)

    @classmethod
    def from_json(cls, text: str, source: str = "dump") -> Dump:
        """Return the dump that ``to_json`` wrote.

        Raises:
            ValueError: the text is not of this form. The error names ``source``.
        """
        try:
            return cls._from_raw(json.loads(text))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{source}: is not a plan that graphshard dumped") from error
        except ValueError as error:  # JSONDecodeError is one
            raise ValueError(f"{source}: {error}") from error

    @classmethod
    def _from_raw(cls, raw: Mapping[str, Any]) -> Dump:
        if "plan" in raw and raw["version"] != VERSION:
            raise ValueError(
                f"dump of version {raw['version']!r}: this graphshard reads {VERSION}; "
                "compile again"
            )
        return cls(
            plan=Plan.from_json(json.dumps(raw["plan"])),
            hardware=Hardware.from_json(json.dumps(raw["hardware"])),
            limits=ScheduleLimits(**raw["limits"]),
            compiled=raw["compiled"],
        )

    @classmethod
    def load(cls, path: Path) -> Dump:
        """Read a file.

        Raises:
            ValueError: the file cannot be read, or is not a dump. The error names the file.
        """
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: {error}") from error
        return cls.from_json(text, str(path))


def param_name(param: PlanParam) -> str:
    """Return the FQN of a parameter, or the number of its graph input where it has none."""
    return param.fqn or f"input {param.input}"


def exposure(dumps: Sequence[Dump]) -> float:
    """Return which part of the time of graphs that train is exposed; 0 where there are none."""
    training = [dump.totals for dump in dumps if dump.plan.graph != GraphKind.INFERENCE]
    total_us = sum(totals.total_us for totals in training)
    return sum(totals.exposed_us for totals in training) / total_us if total_us else 0.0
