"""What a step does on an H100 that is not there, for each strategy: its kernels compile for three
generations of GPUs, it launches and waits as its plan says, and nothing races."""

from __future__ import annotations

import functools
from importlib.util import find_spec

import pytest

from graphshard.check.counts import count
from graphshard.check.launch import call
from graphshard.check.order import order_faults
from graphshard.check.races import find_races
from graphshard.check.step import Recording
from graphshard.kinds import TransferKind
from tests.cuda.cases import DEVICE, STRATEGIES, Case, Outcome

pytestmark = [
    pytest.mark.skipif(
        find_spec("triton") is None, reason="needs triton, beside the CPU build of torch"
    ),
    pytest.mark.timeout(600),  # the first test of a process waits for all its cases
]
CASES = [
    *(Case("gpt", strategy) for strategy in STRATEGIES),
    *(Case(model, "ZeRO-3") for model in ("llama", "convnet", "moe")),
    Case("gpt", "ZeRO-3", rank=7),
    Case("gpt", "HSDP", world=1024, rank=512),
]
NUM_CASES = 5  # of one process, which needs seconds to start


@functools.cache
def _outcomes(chunk: int) -> list[Outcome]:
    cases = CASES[chunk * NUM_CASES : (chunk + 1) * NUM_CASES]
    outcomes: list[Outcome] = call("tests.cuda.cases:run", DEVICE, cases)
    return outcomes


def _outcome(case: Case) -> Outcome:
    chunk, number = divmod(CASES.index(case), NUM_CASES)
    return _outcomes(chunk)[number]


def _recording(case: Case) -> Recording:
    outcome = _outcome(case)
    assert outcome.recording is not None, outcome.error
    return outcome.recording


cases = pytest.mark.parametrize("case", CASES, ids=str)


@cases
def test_kernels_compile_for_every_gpu(case: Case) -> None:
    assert _recording(case).kernels
    for gpu, kernels in _outcome(case).kernels.items():
        errors = [f"{gpu}: {kernel.name}: {kernel.error}" for kernel in kernels if kernel.error]
        assert kernels and not errors, "\n".join(errors)


@cases
def test_nothing_races(case: Case) -> None:
    races = find_races(_recording(case).actions)
    assert not races, "\n".join(map(str, races))


@cases
def test_launches_and_waits_are_those_of_the_plan(case: Case) -> None:
    recording = _recording(case)
    assert recording.runs
    for run in recording.runs:
        assert not order_faults(recording.plans, run)


@cases
def test_the_host_waits_for_gradients_alone(case: Case) -> None:
    """It waits once for each copy of gradients, whose home is the host; nothing else stops it."""
    recording = _recording(case)
    copies = [
        bucket
        for plan in recording.plans
        for bucket in plan.buckets
        if bucket.kind == TransferKind.COPY_TO_HOST and plan.params_of(bucket)
    ]
    counts = count(recording.actions, recording.runs)
    assert counts.host_waits == len(copies) and not counts.blocking
    assert bool(copies) == (case.strategy == "CPU offload")


@cases
def test_kernels_are_those_of_an_unsharded_model_and_one_for_each_copy(case: Case) -> None:
    unsharded, recording = _outcome(case).unsharded, _recording(case)
    if unsharded is None:
        pytest.skip("torch.compile alone computes something else")
    theirs = count(unsharded.actions, unsharded.runs)
    ours = count(recording.actions, recording.runs)
    shards = 0
    if case.strategy == "hpZ":  # one for each parameter, whose part of it stays for backward
        shards = len(recording.plans[0].params)
    assert ours.kernels - ours.bucket_copies - shards <= 1.01 * theirs.kernels
    if case.strategy != "autocast":  # whose small buckets mix dtypes
        # In, out, and in once more where a buffer has others beside it.
        assert 0 < ours.bucket_copies <= 3 * ours.collectives


def test_all_ranks_run_the_same_text() -> None:
    first, last = (_recording(Case("gpt", "ZeRO-3", rank=rank)) for rank in (0, 7))
    assert list(map(_text, first.codes)) == list(map(_text, last.codes))


def _text(code: str) -> list[str]:
    """Return the lines of a graph's code, but for comments, which name files and number graphs."""
    return [line for line in code.splitlines() if not line.startswith("#")]
