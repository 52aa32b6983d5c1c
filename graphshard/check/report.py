"""Check a user's model inside the process that simulates a GPU, and report the findings.

script.py:make_model ─► steps over fake tensors ─► kernels, order, races, memory ─► text
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, repeat
from typing import Any

from torch import nn

from ..dynamo_backend import backend
from ..expert_parallel import parallelize_balanced
from ..failures import data_dependence
from ..fake_mesh import Ranks
from ..options.schedule_policy import SchedulePolicy
from ..scripts import Inputs, load_function, load_named_function, unpack
from ..tensor_parallel import Parallelize, parallelize
from .analysis import (
    count,
    find_plan,
    order_differences,
    peak_bytes,
    peak_bytes_of_step,
    planned_peak_bytes,
)
from .gpus import GPUS, compile_kernels
from .races import find_races
from .recorder import Recorder
from .step import Recording, record_steps

GB = 1e9
_NO_VALUES = (
    "on a GPU the host would wait for the value, but simulated tensors have none. Use tensors of "
    "fixed sizes instead, for example with torch.where"
)


@dataclass(frozen=True)
class Target:
    """The arguments of ``graphshard check``."""

    script: str
    function: str
    device: str
    world: int
    replicas: int = 1
    rank: int = 0
    tp: int = 1
    tp_plan: str | None = None
    ep: int = 1

    def ranks(self) -> Ranks:
        return Ranks(self.replicas, self.world // self.replicas // self.tp, self.tp, self.ep)

    def parallelize(self) -> Parallelize:
        if self.ep > 1:
            return parallelize_balanced
        if self.tp_plan is None:
            return parallelize
        return load_named_function("--tp-plan", self.tp_plan)


@dataclass(frozen=True)
class Report:
    """Findings of a check."""

    errors: tuple[str, ...]  # one sentence per problem
    text: str  # full report, formatted for the user


def check(recorder: Recorder, target: Target) -> Report:
    """Train a user's model for a few steps as one rank, on a simulated GPU; check the last step.

    The user's function takes no arguments and is called with the GPU as the default device. It
    returns a model, the inputs of a step (a tuple, or a dictionary of keyword arguments) and,
    optionally, a dictionary of options of ``graphshard.backend``.

    Raises:
        ValueError: the function does not exist, returns anything else or unknown options, or no
            parameter requires a gradient.
        RuntimeError: control flow or sizes depend on the values of tensors.
    """
    make = load_function(target.script, target.function)
    options: dict[str, Any] = {}

    def make_model() -> tuple[nn.Module, Inputs]:
        model, inputs, chosen = unpack(target.function, make())
        _check_names(target.function, chosen)
        options.update({"schedule": SchedulePolicy(hardware=target.device), **chosen})
        return model, inputs

    try:
        recording = record_steps(
            recorder,
            make_model,
            target.ranks(),
            options,
            rank=target.rank,
            parallelize=target.parallelize(),
        )
    except Exception as error:
        if (reason := data_dependence(error)) is not None:
            raise RuntimeError(f"{reason}: {_NO_VALUES}") from error
        raise
    errors = tuple(_errors(recording, target.device))
    return Report(errors, _text(recording, target, errors))


def _check_names(function: str, options: Mapping[str, Any]) -> None:
    known = set(inspect.signature(backend).parameters) - {"mesh"}
    if wrong := sorted(options.keys() - known):
        raise ValueError(
            f"{function} returned unknown options {', '.join(wrong)}: must be arguments of "
            f"graphshard.backend other than mesh ({', '.join(sorted(known))}); --world, "
            "--replicas, --tp and --ep set the mesh"
        )


def _errors(recording: Recording, device: str) -> Iterator[str]:
    """Describe each problem that would raise an error or corrupt results on the device."""
    for kernel in compile_kernels(recording.kernels, GPUS[device]):
        if kernel.error:
            yield f"kernel {kernel.name} cannot be compiled or loaded: {kernel.error}"
    yield from map(str, find_races(recording.actions))
    # The peak of the whole step: a check per graph would miss memory held between graphs.
    memory = GPUS[device].total_memory
    peak = peak_bytes_of_step(recording.actions)
    if peak > memory:
        yield (
            f"out of memory: a step needs {peak / GB:.1f} GB, but {device} has {memory / GB:.1f} GB"
            "; try a smaller batch, SchedulePolicy(activation_memory_budget=...) or more ranks"
        )


def _text(recording: Recording, target: Target, errors: tuple[str, ...]) -> str:
    counts = count(recording.actions, recording.calls)
    blocking = ", ".join(sorted(set(counts.blocking)))
    rows: Mapping[str, Sequence[str]] = {
        "errors": errors or ["none"],
        "kernels": [
            f"{counts.kernels} in the graphs of a step, including {counts.bucket_copies} copy-ins "
            f"and copy-outs of buckets; {len(set(recording.kernels))} distinct Triton kernels"
        ],
        "collectives": [f"{counts.collectives} in the graphs of a step"],
        "host": [
            f"copies {counts.host_copies} tensors, waits {counts.host_waits} times"
            + (f", for {blocking}" if blocking else "")
        ],
        "memory": list(_memory(recording)),
        "order": list(_order(recording)) or ["as planned"],
    }
    width = max(map(len, rows))
    title = f"{target.script}:{target.function}, rank {target.rank} of {target.world}, "
    lines = [f"{title}simulated {target.device}", ""]
    for name, texts in rows.items():
        lines += [f"{head:{width}}  {text}" for head, text in zip(chain([name], repeat("")), texts)]
    return "\n".join([*lines, "", recording.summary])


def _memory(recording: Recording) -> Iterator[str]:
    step = peak_bytes_of_step(recording.actions)
    adam = (step + recording.trained_bytes) / GB  # Adam has one more state per parameter
    yield f"a step needs {step / GB:.3f} GB with SGD and momentum, {adam:.3f} with Adam"
    plans = list(recording.plans)
    names: Counter[str] = Counter()
    for call in recording.calls:
        needed = f"alone needs {peak_bytes(recording.actions, call) / GB:.3f} GB"
        plan = find_plan(plans, call)
        graph = plan.graph if plan else "a graph without a plan"
        names[graph] += 1
        if plan:
            plans.sort(key=lambda other: other is plan)  # on a tie, prefer unused plans
            needed += f" (planned {planned_peak_bytes(plan) / GB:.3f})"
        yield f"{graph} {names[graph]}".removesuffix(" 1") + f" {needed}"


def _order(recording: Recording) -> Iterator[str]:
    for call in recording.calls:
        yield from order_differences(recording.plans, call)
