"""Training steps on a simulated H100: kernels, order, races, waits of the host, and memory.

The kernels compile, launches and waits follow the plan, nothing races, the host waits only for
gradients copied to it, and memory is as planned.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping, Sequence

import pytest

from graphshard.check.analysis import (
    Counts,
    count,
    order_differences,
    peak_bytes,
    peak_bytes_of_step,
    planned_peak_bytes,
)
from graphshard.check.process import call, obstacle
from graphshard.check.races import find_races
from graphshard.check.step import Recording
from graphshard.kinds import GraphKind, TransferKind
from graphshard.planning.plan import Plan
from tests.cuda.cases import DEVICE, Case, Outcome


def is_skipped(obstacle: str, environment: Mapping[str, str]) -> bool:
    """Return whether tests are skipped because of an obstacle; in CI they fail instead."""
    return bool(obstacle) and not environment.get("CI")


skip_without_stand_ins = pytest.mark.skipif(
    is_skipped(obstacle(), os.environ), reason=obstacle() or "nothing is in the way"
)
pytestmark = [
    skip_without_stand_ins,
    pytest.mark.timeout(600),  # the first test waits for all cases
]
CASES = [
    *(Case("gpt", strategy) for strategy in ("ZeRO-3", "fp8 rowwise", "CPU offload")),
    *(Case(model, "offloaded activations") for model in ("llama", "moe", "wide_convnet")),
    Case("gpt", "ZeRO-3", rank=7),
    Case("gpt", "HSDP", world=1024, rank=1023),
]
"""A few of ``cases.ALL``; `python -m tests.cuda` runs them all."""


@functools.cache
def _outcomes() -> list[Outcome]:
    outcomes: list[Outcome] = call("tests.cuda.cases:run", DEVICE, CASES, (DEVICE,))
    return outcomes


def _outcome(case: Case) -> Outcome:
    return _outcomes()[CASES.index(case)]


def recording_of(case: Case) -> Recording:
    outcome = _outcome(case)
    assert outcome.recording is not None, outcome.error
    return outcome.recording


cases = pytest.mark.parametrize("case", CASES, ids=str)


@cases
def test_kernels_compile(case: Case) -> None:
    assert recording_of(case).kernels
    kernels = _outcome(case).kernels[DEVICE]
    errors = [f"{kernel.name}: {kernel.error}" for kernel in kernels if kernel.error]
    assert kernels and not errors, "\n".join(errors)


@cases
def test_step_has_no_races(case: Case) -> None:
    races = find_races(recording_of(case).actions)
    assert not races, "\n".join(map(str, races))


@cases
def test_launches_and_waits_follow_the_plan(case: Case) -> None:
    recording = recording_of(case)
    assert recording.calls
    for run in recording.calls:
        assert not order_differences(recording.plans, run)


@cases
def test_host_waits_only_for_gradients(case: Case) -> None:
    # Under CPU offload, the host waits once for each copy of gradients to it.
    recording = recording_of(case)
    copies = [
        bucket
        for plan in recording.plans
        for bucket in plan.buckets
        if bucket.kind == TransferKind.COPY_TO_HOST and plan.params_of(bucket)
    ]
    counts = count(recording.actions, recording.calls)
    assert counts.host_waits == len(copies) and not counts.blocking
    assert bool(copies) == (case.strategy == "CPU offload")


@cases
def test_sharding_adds_only_kernels_for_bucket_copies(case: Case) -> None:
    unsharded, recording = _outcome(case).unsharded, recording_of(case)
    if unsharded is None:
        pytest.skip("torch.compile alone computes something else")
    theirs = count(unsharded.actions, unsharded.calls)
    ours = count(recording.actions, recording.calls)
    assert not too_many(ours, theirs)


def too_many(ours: Counts, theirs: Counts) -> str:
    """Return a message if there are too many kernels, otherwise ""."""
    if ours.kernels - ours.bucket_copies > max(1.01 * theirs.kernels, theirs.kernels + 1):
        return f"{ours.kernels - ours.bucket_copies} beside copies, {theirs.kernels} unsharded"
    # Copy-in, copy-out, and a second copy-in if only some gradients of a bucket are cast.
    if not 0 < ours.bucket_copies <= 3 * ours.collectives:
        return f"{ours.bucket_copies} copies for {ours.collectives} collectives"
    return ""


@cases
def test_graphs_need_the_planned_memory(case: Case) -> None:
    recording = recording_of(case)
    assert [plan.graph for plan in recording.plans] == [GraphKind.FORWARD, GraphKind.BACKWARD]
    for plan, run in zip(recording.plans, recording.calls, strict=True):
        needed = peak_bytes(recording.actions, run)
        assert is_planned(plan, needed)
        if case.budget_gb is not None:
            assert needed <= case.budget_gb * 1e9


def is_planned(plan: Plan, needed: int) -> bool:
    """Return whether a graph's peak is within 2 % of its plan."""
    return abs(planned_peak_bytes(plan) - needed) <= 0.02 * needed


@cases
def test_step_needs_no_more_memory_than_eager_fsdp2(case: Case) -> None:
    recording, theirs = recording_of(case), _outcome(case).fsdp2
    if theirs is None:
        pytest.skip("eager FSDP2 does not train so")
    assert peak_bytes_of_step(recording.actions) <= peak_bytes_of_step(theirs.actions)


def test_all_ranks_run_the_same_code() -> None:
    first, last = (recording_of(Case("gpt", "ZeRO-3", rank=rank)) for rank in (0, 7))
    assert is_same_text(first.codes, last.codes)


def is_same_text(codes: Sequence[str], others: Sequence[str]) -> bool:
    """Return whether two ranks run the same generated code."""
    return list(map(_text, codes)) == list(map(_text, others))


def _text(code: str) -> list[str]:
    """Return the lines of a graph's code without comments, which have file names and graph ids."""
    return [line for line in code.splitlines() if not line.startswith("#")]
