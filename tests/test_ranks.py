from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests import ranks
from tests.ranks import on_ranks

# Results.


def _sum_ranks(offset: int, *, scale: int = 1) -> tuple[int, torch.Tensor]:
    total = torch.tensor([dist.get_rank() * scale + offset])
    dist.all_reduce(total)
    return dist.get_rank(), total


@pytest.mark.parametrize("world_size", [1, 2])
def test_results_are_in_rank_order(world_size: int) -> None:
    results = ranks.run(world_size, _sum_ranks, 1, scale=2)
    total = sum(rank * 2 + 1 for rank in range(world_size))
    assert [rank for rank, _ in results] == list(range(world_size))
    assert all(torch.equal(value, torch.tensor([total])) for _, value in results)


@pytest.mark.parametrize("scale", [1, 3])
@on_ranks(2)
def test_decorated_test_runs_on_all_ranks_with_its_arguments(tmp_path: Path, scale: int) -> None:
    assert _sum_ranks(1, scale=scale) == (dist.get_rank(), torch.tensor([scale + 2]))
    assert tmp_path.is_dir()


@on_ranks(2)
def _fails_on_one_rank() -> None:
    assert dist.get_rank() == 0


def test_decorated_test_fails_if_one_rank_fails() -> None:
    with pytest.raises(ranks.RankError, match="1 of 2 ranks failed") as error:
        _fails_on_one_rank()
    assert [failure.rank for failure in error.value.failures] == [1]


def test_view_is_passed_by_value() -> None:
    (column,) = ranks.run(1, _column, torch.arange(6).reshape(2, 3).t())
    assert torch.equal(column, torch.tensor([1, 4]))


def _column(matrix: torch.Tensor) -> torch.Tensor:
    return matrix[1]


def _pid_and_state() -> tuple[int, tuple[Any, ...]]:
    """Return this rank's process id and the call's initial state; then change that state."""
    state = (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch._dynamo.config.cache_size_limit,
        torch.get_default_device().type,
        os.environ.get("RANKS_LEFTOVER"),
        torch.rand(1).item(),
        random.random(),
    )
    torch.set_grad_enabled(False)
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    torch._dynamo.config.cache_size_limit = 1
    os.environ["RANKS_LEFTOVER"] = "yes"
    return os.getpid(), state


def test_processes_are_reused_with_fresh_state() -> None:
    first = ranks.run(2, _pid_and_state)
    second = ranks.run(2, _pid_and_state)
    assert first == second
    assert len({pid for pid, _ in first}) == 2
    state = first[0][1]
    assert state[:3] == (True, torch.float32, 1)
    assert state[4:6] == ("cpu", None)


def test_pool_with_destroyed_group_is_discarded() -> None:
    pids = ranks.run(2, os.getpid)
    ranks.run(2, dist.destroy_process_group)
    assert len(ranks.run(2, _sum_ranks, 1)) == 2
    assert not {*ranks.run(2, os.getpid)} & {*pids}


def _environ(name: str) -> str | None:
    return os.environ.get(name)


def test_env_lasts_for_one_call() -> None:
    assert ranks.run(1, _environ, "RANKS_ENV", env={"RANKS_ENV": "x"}) == ["x"]
    assert ranks.run(1, _environ, "RANKS_ENV") == [None]


def test_run_fresh_uses_new_processes_that_end() -> None:
    kept = ranks.run(1, os.getpid)
    fresh = ranks.run_fresh(1, os.getpid)
    assert fresh != kept
    assert ranks.run(1, os.getpid) == kept
    assert not _alive(fresh[0])


def _max_autotune() -> tuple[str | None, str]:
    import torch._inductor.config as config

    return os.environ.get("TORCHINDUCTOR_MAX_AUTOTUNE"), str(config.max_autotune)


def test_import_env_of_run_fresh_is_set_before_torch_import() -> None:
    env = {"TORCHINDUCTOR_MAX_AUTOTUNE": "1"}
    assert ranks.run_fresh(1, _max_autotune, import_env=env) == [("1", "True")]


def test_at_most_two_pools_are_alive() -> None:
    pids = [ranks.run(size, os.getpid) for size in (1, 2, 3)]
    assert not _alive(pids[0][0])
    assert all(_alive(pid) for pid in pids[1] + pids[2])


def _alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"  # a zombie has ended but is not reaped yet


def _speak() -> None:
    print("to stdout")
    os.write(2, b"to stderr\n")


def test_output_of_ranks_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    ranks.run(2, _speak)
    lines = capsys.readouterr().out.splitlines()
    expected = [f"[rank {rank}] to {name}" for rank in (0, 1) for name in ("stdout", "stderr")]
    assert lines == expected


# Failures. Most are followed by a call that succeeds, in a new pool.


def _raise_on(rank: int) -> None:
    print("about to")
    if dist.get_rank() == rank:
        raise ValueError(f"no luck on {rank}")
    dist.all_reduce(torch.ones(1))


def test_exception_ends_ranks_blocked_in_collective(
    capsys: pytest.CaptureFixture[str],
) -> None:
    start = time.monotonic()
    with pytest.raises(ranks.RankError, match="no luck on 1") as caught:
        ranks.run(2, _raise_on, 1)
    assert time.monotonic() - start < ranks.GRACE_S
    assert [failure.rank for failure in caught.value.failures] == [1, 0]
    first = caught.value.failures[0].text
    assert first.startswith("Traceback") and 'raise ValueError(f"no luck' in first
    assert "ranks.py" not in first.replace("test_ranks.py", "")
    assert "[rank 1] about to" in capsys.readouterr().out
    assert len(ranks.run(2, _sum_ranks, 1)) == 2


def _raise_or_sleep() -> None:
    if dist.get_rank() == 0:
        raise ValueError("no luck")
    time.sleep(600)


def test_ranks_still_running_after_failure_are_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "GRACE_S", 0.5)
    with pytest.raises(ranks.RankError, match=r"still running 0\.5 s after the first") as caught:
        ranks.run(2, _raise_or_sleep)
    failures = caught.value.failures
    assert [failure.rank for failure in failures] == [0, 1]
    assert "in _raise_or_sleep" in failures[1].text
    assert len(ranks.run(2, _sum_ranks, 1)) == 2


def _compare() -> None:
    left, right = torch.arange(2), [1, 2]
    assert left.tolist() == right


def test_failed_assertion_shows_local_values() -> None:
    with pytest.raises(ranks.RankError) as caught:
        ranks.run(1, _compare)
    assert "left = tensor([0, 1])" in str(caught.value)
    assert "right = [1, 2]" in str(caught.value)


def _die(code: int) -> None:
    if dist.get_rank() == 1:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os._exit(code) if code > 0 else os.kill(os.getpid(), -code)
    dist.all_reduce(torch.ones(1))


@pytest.mark.parametrize(("code", "text"), [(3, "died, exit code 3"), (-11, "by SIGSEGV")])
def test_dead_rank_is_reported(code: int, text: str) -> None:
    with pytest.raises(ranks.RankError, match=text) as caught:
        ranks.run(2, _die, code)
    assert {failure.rank for failure in caught.value.failures} == {0, 1}
    assert len(ranks.run(2, _sum_ranks, 1)) == 2


def _sleep_on(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(600)


@pytest.mark.alone  # the first rank has to end within a second
def test_timeout_shows_stack_of_hanging_rank() -> None:
    with pytest.raises(ranks.RankError, match="still running after 1 s") as caught:
        ranks.run(2, _sleep_on, 1, timeout_s=1)
    (failure,) = caught.value.failures
    assert failure.rank == 1
    assert "in _sleep_on" in failure.text
    assert len(ranks.run(2, _sum_ranks, 1)) == 2


def _return_a_lambda() -> object:
    return lambda: None


def test_unpicklable_result_is_reported() -> None:
    with pytest.raises(ranks.RankError, match="lambda"):
        ranks.run(1, _return_a_lambda)


PARENT = """
import os, signal
from tests import ranks, test_ranks

if __name__ == "__main__":
    pids = ranks.run(2, os.getpid)
    print(*pids, flush=True)
    ranks.run(2, test_ranks._die_with_parent, os.getpid())
"""


def _die_with_parent(parent: int) -> None:
    if dist.get_rank() == 0:
        os.kill(parent, 9)
    time.sleep(600)


def test_ranks_do_not_outlive_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    root = str(Path(__file__).parents[1])
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": root},
        stdout=subprocess.PIPE,
        text=True,
        timeout=120,
    )
    assert done.returncode == -9
    pids = [int(pid) for pid in done.stdout.split()]
    assert len(pids) == 2
    deadline = time.monotonic() + 10
    while any(_alive(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(_alive(pid) for pid in pids)
