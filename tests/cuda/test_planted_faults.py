"""Each check finds a fault that is planted in a faultless step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest

from graphshard._torch.no_gpu import stand_ins
from graphshard.check.actions import HOST, Action, Allocate, Record, WaitEvent, Work
from graphshard.check.analysis import count, order_differences, peak_bytes
from graphshard.check.process import call, obstacle
from graphshard.check.races import Race, find_races
from graphshard.check.recorder import COMPUTE
from tests.cuda import test_cases
from tests.cuda.cases import DEVICE, Case

pytestmark = test_cases.pytestmark
recording_of = test_cases.recording_of


def _races_without(actions: Sequence[Action], dropped: Action) -> list[Race]:
    return find_races([action for action in actions if action is not dropped])


def _last_wait(actions: Sequence[Action], stream: str, on: str) -> WaitEvent:
    """Return the last wait of ``stream`` for a stream whose name begins with ``on``."""
    origin = {action.event: action.stream for action in actions if isinstance(action, Record)}
    waits = [
        action
        for action in actions
        if isinstance(action, WaitEvent)
        and action.stream == stream
        and origin[action.event].startswith(on)
    ]
    return waits[-1]


def test_collective_without_a_wait_is_a_race() -> None:
    recording = recording_of(Case("gpt", "ZeRO-3"))
    start, stop = recording.calls[0].actions  # the forward graph, which uses its last gather
    wait = _last_wait(recording.actions[start:stop], COMPUTE, "nccl")
    races = _races_without(recording.actions, wait)
    assert any(race.first.name.startswith("_c10d_functional.all_gather") for race in races)


def test_optimizer_reading_gradients_before_their_copy_is_a_race() -> None:
    actions = recording_of(Case("gpt", "CPU offload")).actions
    races = _races_without(actions, _last_wait(actions, HOST, "stream"))
    assert any(race.first.name.startswith("aten.copy_") and race.stream == HOST for race in races)


def test_activation_read_before_its_copy_back_is_a_race() -> None:
    actions = recording_of(Case("llama", "offloaded activations")).actions
    races = _races_without(actions, _last_wait(actions, COMPUTE, "stream"))
    assert any(race.first.name.startswith("aten.copy_") for race in races)


def test_early_wait_is_an_order_fault() -> None:
    recording = recording_of(Case("gpt", "ZeRO-3"))
    run = recording.calls[-1]
    last_launch = max(i for i, number in enumerate(run.order) if number >= 0)
    order = [*run.order[: last_launch - 1], run.order[last_launch], run.order[last_launch - 1]]
    planted = dataclasses.replace(run, order=[*order, *run.order[last_launch + 1 :]])
    assert not order_differences(recording.plans, run)
    assert order_differences(recording.plans, planted)
    assert order_differences(recording.plans, dataclasses.replace(run, order=run.order[:-1]))


def test_kernels_that_a_gpu_refuses_have_errors() -> None:
    kernel = recording_of(Case("gpt", "ZeRO-3")).kernels[0]
    fine, wrong, poor = call("tests.cuda.cases:compile_planted", DEVICE, *kernel)
    assert not fine and "lode" in wrong and "bytes of shared memory" in poor


def test_fp8_products_that_cublaslt_refuses_raise() -> None:
    fine, row_major, odd, shifted = call("tests.cuda.cases:multiply_planted", DEVICE)
    assert not fine
    assert "mat2 must be col_major" in row_major
    assert "16" in odd, odd
    assert "multiples of 16 bytes, not at 8" in shifted


def test_convolutions_return_cudnn_layout() -> None:
    assert call("tests.cuda.cases:convolve", DEVICE) == [False, True, True]


def _fallen_apart(action: Action) -> Action:
    """Return a bucket copy with many kernels instead of one, as if dtypes differed."""
    if isinstance(action, Work) and action.name.startswith("aten._foreach_copy_"):
        return dataclasses.replace(action, kernels=len(action.writes) * 10)
    return action


def test_bucket_copy_of_many_kernels_is_found() -> None:
    recording = recording_of(Case("gpt", "ZeRO-3"))
    outcome = test_cases._outcome(Case("gpt", "ZeRO-3"))
    assert outcome.unsharded
    theirs = count(outcome.unsharded.actions, outcome.unsharded.calls)
    ours = count(recording.actions, recording.calls)
    planted = count([_fallen_apart(action) for action in recording.actions], recording.calls)
    assert not test_cases.too_many(ours, theirs)
    assert "copies for" in test_cases.too_many(planted, theirs)
    cast = dataclasses.replace(ours, kernels=ours.kernels + 10)
    assert "beside copies" in test_cases.too_many(cast, theirs)


def test_unplanned_memory_is_found() -> None:
    recording = recording_of(Case("gpt", "ZeRO-3"))
    plan, run = recording.plans[0], recording.calls[0]
    needed = peak_bytes(recording.actions, run)
    start, stop = run.actions
    forgotten = Allocate(-1, needed // 20, COMPUTE)
    actions = [*recording.actions[:start], forgotten, *recording.actions[start:]]
    planted = dataclasses.replace(run, actions=(start, stop + 1))
    assert test_cases.is_planned(plan, needed)
    assert not test_cases.is_planned(plan, peak_bytes(actions, planted))


def test_ranks_with_different_code_are_found() -> None:
    codes = recording_of(Case("gpt", "ZeRO-3")).codes
    launch = "torch.ops._c10d_functional.all_gather_into_tensor"
    assert launch in codes[0]
    planted = [codes[0].replace(launch, f"{launch}_out", 1), *codes[1:]]
    commented = [f"# of rank 1\n{codes[0]}", *codes[1:]]
    assert test_cases.is_same_text(codes, commented)
    assert not test_cases.is_same_text(codes, planted)


def test_cuda_build_of_torch_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.cuda", "13.0")
    assert "this one is for CUDA 13.0: in a separate environment, pip install" in obstacle()


def test_unknown_torch_version_is_an_obstacle(monkeypatch: pytest.MonkeyPatch) -> None:
    # Tests are skipped with the reason; in CI, they are not, and fail with the reason.
    monkeypatch.setattr(stand_ins, "TORCH_VERSIONS", ("1.0",))
    reason = obstacle()
    assert "install torch 1.0" in reason
    assert test_cases.is_skipped(reason, {}) and not test_cases.is_skipped(reason, {"CI": "1"})
    with pytest.raises(RuntimeError, match=r"install torch 1\.0"):
        call("tests.cuda.cases:multiply_planted", DEVICE)
