"""A file with the plan of one graph and the settings that it was made for.

A dump is a JSON object:

    version    version of this format; files with another version are rejected
    compiled   Dynamo's name for the compilation, such as "0/0", or ""
    predicted  ``Totals``, derived from the other fields for the reader's convenience
    limits     ``ScheduleLimits``: sizes in bytes or null, and ``reduce``
    hardware   as in ``Hardware.to_json``
    plan       as in ``Plan.to_json``, with parameter names
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from pathlib import Path

from ..cost.hardware import Hardware
from ..cost.model import CostModel, optimizer_passes
from ..kinds import HOST_COPIES, TransferKind
from ..planning.live_bytes import alive_by_point
from ..planning.memory_budget import FreeMemory, ScheduleLimits
from ..planning.plan import Bucket, Plan, PlanParam, UserCollective
from ..planning.simulate import (
    COMMUNICATION,
    COMPUTE,
    USER,
    Scenario,
    Slot,
    Timeline,
    clock,
    simulate,
)

VERSION = 4
# Slowdown of transfers in the pessimistic estimate of exposed time. Measured on an H200: modelled
# links took 1.3 to 1.6 times as long as planned.
TRANSFER_SLOWDOWN = 1.5


@dataclass(frozen=True)
class Totals:
    """Sums and peaks of a timeline."""

    total_us: float  # time until all lanes are done
    compute_us: float  # busy time of the compute lane
    communication_us: float  # busy time of the communication lane
    exposed_us: float  # time that compute spends waiting for buckets
    slow_exposed_us: float  # ``exposed_us`` if transfers take ``TRANSFER_SLOWDOWN`` times as long
    lost_us: float  # slowdown of compute by hidden collectives; not part of ``total_us``
    peak_bytes: int  # largest live memory of a step
    in_flight_bytes: int  # largest size of the transfers in flight, between launch and wait
    user_collectives_us: float  # busy time of the lane of user collectives
    user_exposed_us: float  # time that compute spends waiting for user collectives

    @property
    def all_exposed_us(self) -> float:
        return self.exposed_us + self.user_exposed_us


@dataclass(frozen=True)
class Dump:
    """A plan with named parameters, and the settings that it was made for.

    Attributes:
        plan: plan of one graph.
        hardware: hardware for which times are predicted.
        limits: limits of the schedule.
        compiled: Dynamo's name for the compilation, also used in profiles, or "".
    """

    plan: Plan
    hardware: Hardware
    limits: ScheduleLimits
    compiled: str = ""

    @functools.cached_property
    def timeline(self) -> Timeline:
        cost_model = CostModel(self.hardware)
        return simulate(self.plan.problem, self.plan.buckets, cost_model)

    @functools.cached_property
    def slots(self) -> dict[tuple[str, int], Slot]:
        return {(slot.kind, slot.index): slot for slot in self.timeline.slots}

    @functools.cached_property
    def free_memory(self) -> FreeMemory:
        alive = alive_by_point(self.plan.problem, self.plan.buckets)
        # The result is cached: callers must not modify it.
        return FreeMemory(alive, self.limits, self.timeline.in_flight_bytes)

    @functools.cached_property
    def totals(self) -> Totals:
        problem, buckets = self.plan.problem, self.plan.buckets
        scenario = Scenario(TRANSFER_SLOWDOWN, TRANSFER_SLOWDOWN)
        slow = clock(problem, buckets, CostModel(self.hardware), scenario)
        return Totals(
            total_us=self.timeline.total_us,
            compute_us=self.timeline.busy_us(COMPUTE),
            communication_us=self.timeline.busy_us(COMMUNICATION),
            exposed_us=sum(self.timeline.exposed_us),
            slow_exposed_us=sum(slow.exposed_us),
            lost_us=self.timeline.slowdown_us,
            peak_bytes=self.timeline.peak_bytes,
            in_flight_bytes=max(self.timeline.in_flight_bytes, default=0),
            user_collectives_us=self.timeline.busy_us(USER),
            user_exposed_us=sum(self.timeline.user_exposed_us),
        )

    def user_collective(self, slot: Slot) -> UserCollective:
        return self.plan.problem.user_collectives[slot.index - len(self.plan.buckets)]

    @property
    def worlds(self) -> list[int]:
        buckets = (b for b in self.plan.buckets if b.kind not in HOST_COPIES)
        return sorted({bucket.world for bucket in buckets})

    def param_positions(self, bucket: Bucket) -> list[int]:
        # Unique, and in graph order.
        transfers = (self.plan.problem.transfers[i] for i in sorted(bucket.transfers))
        return list(dict.fromkeys(t.param for t in transfers if t.param is not None))

    def param_names(self, bucket: Bucket) -> list[str]:
        params = self.plan.params
        return list(dict.fromkeys(param_name(params[i]) for i in self.param_positions(bucket)))

    def bucket_label(self, bucket: Bucket) -> str:
        """Describe a bucket's contents, as in ``blocks.0.up.weight .. blocks.1.norm.bias (12)``."""
        names = self.param_names(bucket)
        if not names:
            return "an activation" if bucket.kind in HOST_COPIES else "fp8 scales"
        return names[0] if len(names) == 1 else f"{names[0]} .. {names[-1]} ({len(names)})"

    def step_label(self, index: int) -> str:
        steps = self.plan.problem.steps
        return f"{index} {steps[index]}" if index < len(steps) else "end"

    def step_modules(self) -> list[str]:
        """Return, for each step, the name of the module to which it belongs.

        This is the module of a parameter that the step is the first to use, or whose gradient it
        computes. Other steps belong to the previous step's module; "" before the first module.
        """
        used: dict[int, int] = {}
        reduced: dict[int, int] = {}
        for transfer in self.plan.problem.transfers:
            if transfer.param is None:
                continue
            if transfer.kind == TransferKind.ALL_GATHER:
                used.setdefault(transfer.due, transfer.param)
            elif transfer.kind.is_reduction:  # the step before ``ready`` computes the gradient
                reduced.setdefault(transfer.ready - 1, transfer.param)
        modules, module = list[str](), ""
        for step in range(self.plan.problem.num_steps):
            param = used.get(step, reduced.get(step))
            if param is not None:
                module = param_name(self.plan.params[param]).rpartition(".")[0]
            modules.append(module)
        return modules

    def optimizer_us(self) -> float:
        """Return the predicted time of a fused AdamW on the gradients that the graph reduces.

        Offloaded gradients do not count: the host updates their parameters.
        """
        transfers = self.plan.problem.transfers
        reduced = sum(t.shard_bytes for t in transfers if t.kind.reduces_gradients and not t.host)
        if not reduced:
            return 0.0
        passes = optimizer_passes(num_states=2)
        return self.hardware.memory.us(passes * reduced) + self.hardware.launch_us

    def to_json(self) -> str:
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
        """Parse a dump.

        Args:
            source: name of the file, for error messages.

        Raises:
            ValueError: ``text`` is not a dump of this version.
        """
        try:
            raw = json.loads(text)
            if "plan" in raw and raw["version"] != VERSION:
                raise ValueError(
                    f"dump of version {raw['version']!r}: this graphshard reads version {VERSION}; "
                    "compile again to write a new dump"
                )
            dump = cls(
                plan=Plan.from_json(json.dumps(raw["plan"])),
                hardware=Hardware.from_json(json.dumps(raw["hardware"])),
                limits=ScheduleLimits(**raw["limits"]),
                compiled=raw["compiled"],
            )
            # Impossible numbers, such as of a step that does not exist, raise here.
            _ = dump.slots, dump.totals, list(map(dump.bucket_label, dump.plan.buckets))
            return dump
        # Valid JSON, but not a dump.
        except (LookupError, TypeError, AttributeError, ArithmeticError) as error:
            raise ValueError(
                f"{source}: is not a dump from graphshard: pass a .json file that "
                "graphshard.backend(dump=...) wrote"
            ) from error
        except ValueError as error:  # includes JSONDecodeError
            raise ValueError(f"{source}: {error}") from error

    @classmethod
    def load(cls, path: Path) -> Dump:
        """Read a dump file.

        Raises:
            ValueError: the file cannot be read or is not a dump of this version.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"{path}: {error}") from error
        return cls.from_json(text, str(path))


def param_name(param: PlanParam) -> str:
    """Return the FQN of a parameter, or the number of its graph input if it has no name."""
    return param.fqn or f"input {param.input}"
