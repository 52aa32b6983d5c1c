"""Training steps on a simulated H100: kernels, order, races, host waits, and memory.

Checks that kernels compile, launches and waits follow the plan, nothing races, the host waits only
for gradients copied to it, and memory is as planned. For each check, a test injects a fault that it
must find.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Mapping, Sequence

import pytest

from graphshard._torch.no_gpu import stand_ins
from graphshard.check.actions import HOST, Action, Allocate, Record, WaitEvent, Work
from graphshard.check.analysis import (
    Counts,
    count,
    order_differences,
    peak_bytes,
    peak_bytes_of_step,
    planned_peak_bytes,
)
from graphshard.check.process import call, obstacle
from graphshard.check.races import Race, find_races
from graphshard.check.recorder import COMPUTE, Recorder
from graphshard.check.step import Recording
from graphshard.kinds import GraphKind, TransferKind
from graphshard.planning.plan import Plan
from tests.cuda.cases import DEVICE, Case, Outcome, Planted
from tests.cuda.cases import run as run_some
from tests.plan.dumps import fqns_of


def is_skipped(obstacle: str, environment: Mapping[str, str]) -> bool:
    """Return whether to skip the tests because of an obstacle; in CI they fail instead."""
    return bool(obstacle) and not environment.get("CI")


skip_without_stand_ins = pytest.mark.skipif(
    is_skipped(obstacle(), os.environ), reason=obstacle() or "no obstacle"
)
pytestmark = [
    skip_without_stand_ins,
    pytest.mark.timeout(600),  # the first test waits for all cases
]
# Compiling a kernel takes a second, and the other cases launch mostly the same kernels.
COMPILED = [Case("small_gpt", strategy) for strategy in ("ZeRO-3", "fp8 rowwise", "exchange")]
CASES = [
    *COMPILED,
    Case("small_gpt", "CPU offload"),
    *(Case(model, "offloaded activations") for model in ("moe", "wide_convnet")),
    Case("small_gpt", "ZeRO-3", rank=7),
    Case("small_gpt", "HSDP", world=1024, rank=1023),
    Case("small_llama", "TP=2", world=1024, rank=1023),
    Case("routed", "EP=8", world=1024, rank=1023),
]
"""A few of ``cases.ALL``; `python -m tests.cuda` runs them all."""


# Strided store of a column, such as ``x0 + 4096*r0_1``, in a loop over a row ``r0_1``. Inductor
# writes such loops by default.
COLUMN_STORE = re.compile(r"tl\.store\(\w+ \+ \(x\d+ \+ \d+\*r0_\d\)")


def run_cases(recorder: Recorder) -> list[Outcome]:
    """Run `CASES` in one process, where they share baselines; compile kernels of `COMPILED`."""
    others = CASES[len(COMPILED) :]
    return [*run_some(recorder, COMPILED, (DEVICE,)), *run_some(recorder, others, ())]


@functools.cache
def _outcomes() -> list[Outcome]:
    outcomes: list[Outcome] = call("tests.cuda.test_cases:run_cases", DEVICE)
    return outcomes


def _outcome(case: Case) -> Outcome:
    return _outcomes()[CASES.index(case)]


def recording_of(case: Case) -> Recording:
    outcome = _outcome(case)
    assert outcome.recording is not None, outcome.error
    return outcome.recording


cases = pytest.mark.parametrize("case", CASES, ids=str)


@pytest.mark.parametrize("case", COMPILED, ids=str)
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
def test_launches_and_waits_follow_plan(case: Case) -> None:
    recording = recording_of(case)
    assert recording.calls
    for run in recording.calls:
        assert not order_differences(recording.plans, run)


@cases
def test_host_waits_only_for_gradients(case: Case) -> None:
    # Under CPU offload, the host waits once for each copy of gradients to the host.
    recording = recording_of(case)
    copies = [
        bucket
        for plan in recording.plans
        for bucket in plan.buckets
        if bucket.kind == TransferKind.COPY_TO_HOST and fqns_of(plan, bucket)
    ]
    counts = count(recording.actions, recording.calls)
    assert counts.host_waits == len(copies) and not counts.blocking
    assert bool(copies) == (case.strategy == "CPU offload")


def test_fp8_kernels_store_rows_contiguously() -> None:
    row = re.compile(r"tl\.store\(\w+ \+ \(r0_\d \+ \d+\*x\d+\)")  # checks the variable names
    codes = recording_of(Case("small_gpt", "fp8 rowwise")).codes
    assert "*fp8e4nv" in codes[1] and row.search(codes[1])
    assert not [store for code in codes for store in COLUMN_STORE.findall(code)]


@cases
def test_sharding_adds_only_kernels_for_bucket_copies(case: Case) -> None:
    unsharded, recording = _outcome(case).unsharded, recording_of(case)
    if unsharded is None:
        pytest.skip("no comparable unsharded baseline")
    theirs = count(unsharded.actions, unsharded.calls)
    ours = count(recording.actions, recording.calls)
    assert not too_many(ours, theirs)


def too_many(ours: Counts, theirs: Counts) -> str:
    if ours.kernels - ours.bucket_copies > max(1.01 * theirs.kernels, theirs.kernels + 1):
        return f"{ours.kernels - ours.bucket_copies} besides copies, {theirs.kernels} unsharded"
    # Copy-in, copy-out, and a second copy-in if only some gradients of a bucket are cast.
    if not 0 < ours.bucket_copies <= 3 * ours.collectives:
        return f"{ours.bucket_copies} copies for {ours.collectives} collectives"
    return ""


@cases
def test_graphs_need_planned_memory(case: Case) -> None:
    recording = recording_of(case)
    assert [plan.graph for plan in recording.plans] == [GraphKind.FORWARD, GraphKind.BACKWARD]
    for plan, run in zip(recording.plans, recording.calls, strict=True):
        needed = peak_bytes(recording.actions, run)
        assert is_planned(plan, needed)
        if case.budget_gb is not None:
            assert needed <= case.budget_gb * 1e9


def is_planned(plan: Plan, needed: int) -> bool:
    return abs(planned_peak_bytes(plan) - needed) <= 0.02 * needed


@cases
def test_step_needs_no_more_memory_than_eager_fsdp2(case: Case) -> None:
    recording, theirs = recording_of(case), _outcome(case).fsdp2
    if theirs is None:
        pytest.skip("eager FSDP2 does not support this strategy")
    assert peak_bytes_of_step(recording.actions) <= peak_bytes_of_step(theirs.actions)


def test_all_ranks_run_same_code() -> None:
    first, last = (recording_of(Case("small_gpt", "ZeRO-3", rank=rank)) for rank in (0, 7))
    assert is_same_text(first.codes, last.codes)


def is_same_text(codes: Sequence[str], others: Sequence[str]) -> bool:
    return list(map(_text, codes)) == list(map(_text, others))


def _text(code: str) -> list[str]:
    """Return the lines of a graph's code without comments, which name files and graph ids."""
    return [line for line in code.splitlines() if not line.startswith("#")]


# Injected faults.


def _races_without(actions: Sequence[Action], dropped: Action) -> list[Race]:
    return find_races([action for action in actions if action is not dropped])


def _last_wait(actions: Sequence[Action], stream: str, on: str) -> WaitEvent:
    origin = {action.event: action.stream for action in actions if isinstance(action, Record)}
    waits = [
        action
        for action in actions
        if isinstance(action, WaitEvent)
        and action.stream == stream
        and origin[action.event].startswith(on)
    ]
    return waits[-1]


def test_collective_without_wait_is_a_race() -> None:
    recording = recording_of(Case("small_gpt", "ZeRO-3"))
    start, stop = recording.calls[0].actions  # forward, which uses its last gather
    wait = _last_wait(recording.actions[start:stop], COMPUTE, "nccl")
    races = _races_without(recording.actions, wait)
    assert any(race.first.name.startswith("_c10d_functional.all_gather") for race in races)


def test_optimizer_reading_gradients_before_their_copy_is_a_race() -> None:
    actions = recording_of(Case("small_gpt", "CPU offload")).actions
    races = _races_without(actions, _last_wait(actions, HOST, "stream"))
    assert any(race.first.name.startswith("aten.copy_") and race.stream == HOST for race in races)


def test_activation_read_before_its_copy_back_is_a_race() -> None:
    actions = recording_of(Case("moe", "offloaded activations")).actions
    races = _races_without(actions, _last_wait(actions, COMPUTE, "stream"))
    assert any(race.first.name.startswith("aten.copy_") for race in races)


def test_early_wait_is_an_order_fault() -> None:
    recording = recording_of(Case("small_gpt", "ZeRO-3"))
    run = recording.calls[-1]
    last_launch = max(i for i, number in enumerate(run.order) if number >= 0)
    order = [*run.order[: last_launch - 1], run.order[last_launch], run.order[last_launch - 1]]
    planted = dataclasses.replace(run, order=[*order, *run.order[last_launch + 1 :]])
    assert not order_differences(recording.plans, run)
    assert order_differences(recording.plans, planted)
    assert order_differences(recording.plans, dataclasses.replace(run, order=run.order[:-1]))


@functools.cache
def _planted() -> Planted:
    kernel = recording_of(Case("small_gpt", "ZeRO-3")).kernels[0]
    planted: Planted = call("tests.cuda.cases:plant", DEVICE, *kernel)
    return planted


def test_kernels_unsupported_by_gpu_have_errors() -> None:
    fine, wrong, poor = _planted().kernel_errors
    assert not fine and "lode" in wrong and "bytes of shared memory" in poor


def test_fp8_products_unsupported_by_cublaslt_raise() -> None:
    fine, row_major, odd, shifted = _planted().product_errors
    assert not fine
    assert "mat2 must be col_major" in row_major
    assert "16" in odd, odd
    assert "begins at byte 8 of its storage" in shifted


def test_convolutions_return_cudnn_layout() -> None:
    assert _planted().channels_last == [False, True, True]


def test_only_thread_that_runs_kernel_sees_meta_device() -> None:
    assert _planted().devices == ["meta", "cuda"]


def _split_into_kernels(action: Action) -> Action:
    """Split a bucket copy into kernels, as if dtypes differed; return other actions unchanged."""
    if isinstance(action, Work) and action.name.startswith("aten._foreach_copy_"):
        return dataclasses.replace(action, kernels=len(action.writes) * 10)
    return action


def test_bucket_copy_with_many_kernels_is_reported() -> None:
    recording = recording_of(Case("small_gpt", "ZeRO-3"))
    outcome = _outcome(Case("small_gpt", "ZeRO-3"))
    assert outcome.unsharded
    theirs = count(outcome.unsharded.actions, outcome.unsharded.calls)
    ours = count(recording.actions, recording.calls)
    planted = count([_split_into_kernels(action) for action in recording.actions], recording.calls)
    assert not too_many(ours, theirs)
    assert "copies for" in too_many(planted, theirs)
    cast = dataclasses.replace(ours, kernels=ours.kernels + 10)
    assert "besides copies" in too_many(cast, theirs)


def test_unplanned_memory_is_reported() -> None:
    recording = recording_of(Case("small_gpt", "ZeRO-3"))
    plan, run = recording.plans[0], recording.calls[0]
    needed = peak_bytes(recording.actions, run)
    start, stop = run.actions
    forgotten = Allocate(-1, needed // 20, COMPUTE)
    actions = [*recording.actions[:start], forgotten, *recording.actions[start:]]
    planted = dataclasses.replace(run, actions=(start, stop + 1))
    assert is_planned(plan, needed)
    assert not is_planned(plan, peak_bytes(actions, planted))


def test_ranks_with_different_code_are_reported() -> None:
    codes = recording_of(Case("small_gpt", "ZeRO-3")).codes
    launch = "torch.ops._c10d_functional.all_gather_into_tensor"
    assert launch in codes[0]
    planted = [codes[0].replace(launch, f"{launch}_out", 1), *codes[1:]]
    commented = [f"# of rank 1\n{codes[0]}", *codes[1:]]
    assert is_same_text(codes, commented)
    assert not is_same_text(codes, planted)


def test_cuda_build_of_torch_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", "13.0")
    assert "this one is for CUDA 13.0: in a separate environment, pip install" in obstacle()


def test_unknown_torch_version_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tests are skipped for this reason; in CI they fail with it.
    monkeypatch.setattr(stand_ins, "TORCH_VERSIONS", ("1.0",))
    reason = obstacle()
    assert "install torch 1.0" in reason
    assert is_skipped(reason, {}) and not is_skipped(reason, {"CI": "1"})
    with pytest.raises(RuntimeError, match=r"install torch 1\.0"):
        call("tests.cuda.cases:plant", DEVICE)
