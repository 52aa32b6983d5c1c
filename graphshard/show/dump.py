"""One graph's plan in a file, with what it was planned for.

A dump is a JSON object:

    version    of this form; a file of another one is refused
    compiled   Dynamo's name for the compilation, as in "0/0"; "" if there is none
    predicted  totals of the timeline: total_us, compute_us, communication_us, exposed_us, lost_us,
               peak_bytes, in_flight_bytes; for readers, since they follow from the rest
    limits     cap, in_flight, peak: as ``limits.Limits``, in bytes or null
    hardware   as ``Hardware.to_json``
    plan       as ``Plan.to_json``, parameters named
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..cost.hardware import Hardware
from ..cost.model import CostModel
from ..kinds import HOST_COPIES
from ..planning.memory_budget import ScheduleLimits
from ..planning.plan import Bucket, Plan, PlanParam
from ..planning.simulate import COMMUNICATION, COMPUTE, Slot, Timeline, simulate

VERSION = 3


@dataclass(frozen=True)
class Dump:
    """A plan with its parameters named, and what it was made for.

    Attributes:
        limits: what the schedule had to keep.
        compiled: Dynamo's name for the compilation; profiles have it too.
    """

    plan: Plan
    hardware: Hardware
    limits: ScheduleLimits
    compiled: str = ""

    @functools.cached_property
    def timeline(self) -> Timeline:
        """What is predicted of the plan on the hardware."""
        return simulate(self.plan.problem, self.plan.buckets, CostModel(self.hardware))

    @functools.cached_property
    def slots(self) -> dict[tuple[str, int], Slot]:
        """The timeline's slots by kind, and index of the step or of the bucket."""
        return {(slot.kind, slot.index): slot for slot in self.timeline.slots}

    @property
    def totals(self) -> dict[str, float]:
        """Times in microseconds, sizes in bytes; ``exposed_us``: while compute stands still."""
        return {
            "total_us": self.timeline.total_us,
            "compute_us": self.timeline.busy_us(COMPUTE),
            "communication_us": self.timeline.busy_us(COMMUNICATION),
            "exposed_us": sum(self.timeline.exposed_us),
            "lost_us": self.timeline.lost_us,
            "peak_bytes": self.timeline.peak_bytes,
            "in_flight_bytes": max(self.timeline.in_flight_bytes, default=0),
        }

    def names(self, bucket: Bucket) -> list[str]:
        """The FQNs of what travels in ``bucket``, each once, in graph order."""
        found = (self.plan.problem.transfers[i].param for i in sorted(bucket.transfers))
        return list(dict.fromkeys(param_name(self.plan.params[i]) for i in found if i is not None))

    def range_of(self, bucket: Bucket) -> str:
        """As in ``blocks.0.up.weight .. blocks.1.norm.bias (12)``."""
        names = self.names(bucket)
        if not names:
            return "an activation" if bucket.kind in HOST_COPIES else "scales of fp8"
        return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"

    def step(self, index: int) -> str:
        """A step's number and its first node; ``end`` behind the last one."""
        steps = self.plan.problem.steps
        return f"{index} {steps[index]}" if index < len(steps) else "end"

    def to_json(self) -> str:
        raw = {
            "version": VERSION,
            "compiled": self.compiled,
            "predicted": self.totals,
            "limits": dataclasses.asdict(self.limits),
            "hardware": json.loads(self.hardware.to_json()),
            "plan": json.loads(self.plan.to_json()),
        }
        return json.dumps(raw, indent=1)

    @classmethod
    def from_json(cls, text: str, source: str = "dump") -> Dump:
        """The reverse of ``to_json``.

        Raises:
            ValueError: the text is not of this form. It names ``source``.
        """
        try:
            return cls._of(json.loads(text))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{source}: is not a plan that graphshard dumped") from error
        except ValueError as error:  # JSONDecodeError is one
            raise ValueError(f"{source}: {error}") from error

    @classmethod
    def _of(cls, raw: dict[str, Any]) -> Dump:
        if "plan" in raw and raw["version"] != VERSION:
            raise ValueError(
                f"dump of version {raw['version']!r}: this graphshard reads {VERSION}; compile again"
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
            ValueError: it cannot be read, or is not a dump; it names the file.
        """
        try:
            text = path.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: {error}") from error
        return cls.from_json(text, str(path))


def param_name(param: PlanParam) -> str:
    return param.fqn or f"input {param.input}"
