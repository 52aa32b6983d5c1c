"""The call log: ranks that make different calls all raise the same error."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import graphshard.ranks.watcher
from graphshard.errors import BackendError
from graphshard.ranks import members
from graphshard.ranks.call_log import CallLog, call_log_of
from graphshard.ranks.calls import describe_difference
from graphshard.ranks.plan_consensus import choose_on_first_rank
from tests import ranks

pytestmark = pytest.mark.alone

STALL_S = 0.5  # shorter than in production, since most tests wait this long
PLAN = "forward\nall_gather 0\nall_gather 1"
OTHER = "forward\nall_gather 0\nall_gather 7"

Group = dist.ProcessGroup


def run(world: int, fn: Callable[..., Any], *args: Any, timeout_s: float = 60.0) -> list[Any]:
    """Call fn(group, call_log, *args) on each rank with a new group, which fn may break."""
    return ranks.run(world, _in_group, fn, timeout_s, args, timeout_s=30)


def _in_group(fn: Callable[..., Any], timeout_s: float, args: Any) -> Any:
    group: Any = dist.new_group(timeout=timedelta(seconds=timeout_s))
    with mock.patch.object(graphshard.ranks.watcher, "STALL_S", STALL_S):
        try:
            result = fn(group, call_log_of(group), *args)
            dist.barrier()  # the default group works even if this one is broken
            return result
        finally:
            dist.destroy_process_group(group)


def mesh_of(group: Group) -> DeviceMesh:
    """Return a 1D CPU mesh over a group of `run` that differs from the meshes of all other groups.

    DTensor caches redistributions, including group names, by mesh: with an equal mesh, it would
    communicate in a destroyed group.
    """
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=(f"group {group.group_name}",))


def gather(group: Group) -> None:
    full = torch.empty(3 * group.size())
    dist.all_gather_into_tensor(full, torch.full((3,), float(group.rank())), group=group)
    assert full.tolist() == [float(r) for r in range(group.size()) for _ in range(3)]


def call(call_log: CallLog, collective: Callable[[Group], object], group: Group) -> None:
    try:
        collective(group)
    except Exception as error:
        call_log.raise_posted_error(error)
        raise


def choose(group: Group, key: str, text: str = "") -> str:
    return choose_on_first_rank(lambda: text, key, key, [group.group_name])


def message(act: Callable[..., object], *args: Any) -> str:
    with pytest.raises(BackendError) as raised:
        act(*args)
    return str(raised.value)


def assert_same(messages: list[str], *parts: str) -> None:
    assert len(set(messages)) == 1, messages
    for part in parts:
        assert part in messages[0], messages[0]


# Equal plans.


def _train(group: Group, call_log: CallLog, slow_rank: int, seconds: float) -> None:
    for step in range(3):
        for plan in ("forward", "backward"):
            if step == 0:
                time.sleep(seconds if group.rank() == slow_rank else 0)
                call_log.first_run(plan, f"{plan}\nall_gather")
            else:
                call_log.run(plan)
            call(call_log, gather, group)


@pytest.mark.parametrize(("world", "seconds"), [(1, 0.0), (2, STALL_S + 1.0), (4, 0.0)])
def test_equal_plans_with_a_late_rank_agree(world: int, seconds: float) -> None:
    run(world, _train, world - 1, seconds)


def _recompile_alone(group: Group, call_log: CallLog) -> None:
    call_log.first_run("plan", PLAN)
    for step in range(30):
        if step == 7 * group.rank():
            call_log.first_run("plan", PLAN)
        else:
            call_log.run("plan")
        call(call_log, gather, group)


def test_recompile_to_same_plan_on_one_rank_agrees() -> None:
    run(4, _recompile_alone)


def _compile_late(group: Group, call_log: CallLog) -> None:
    call_log.first_run("plan", PLAN)
    call_log.run("plan")
    if group.rank() == 0:
        call_log.run("plan")
        time.sleep(STALL_S + 1.0)
        call_log.run("plan")
        call_log.first_run("next", OTHER)
    else:
        time.sleep(STALL_S + 2.0)
        call_log.run("plan")
        call_log.first_run("plan", PLAN)
        call_log.run("next")


def test_rank_several_calls_late_agrees() -> None:
    run(2, _compile_late)


# Different plans.


def test_difference_is_shown_between_lines_of_same_kind() -> None:
    texts = ["graphs\nall_gather of b\nmemory 3", "graphs\nmemory 4"]
    for ours, theirs in (texts, texts[::-1]):
        said = describe_difference([ours, theirs], ["rank 0", "rank 1"])
        assert f"{ours.splitlines()[-1]} (rank 0) differs from {theirs.splitlines()[-1]}" in said


def _compile_other(group: Group, call_log: CallLog, other_rank: int) -> str:
    call_log.first_run("same", "same")
    plan = ("other", OTHER) if group.rank() == other_rank else ("plan", PLAN)
    text = message(call_log.first_run, *plan)
    assert message(call_log.run, "same") == text
    assert message(choose, group, "key") == text
    return text


@pytest.mark.parametrize(("world", "other_rank"), [(2, 0), (2, 1), (4, 2)])
def test_first_run_of_different_plan_raises_on_all_ranks(world: int, other_rank: int) -> None:
    messages = run(world, _compile_other, other_rank)
    assert_same(messages, "call 1", f"all_gather 7 (rank {other_rank})", "all_gather 1 (")


def functional(group: Group) -> None:
    ops = torch.ops._c10d_functional
    ops.wait_tensor(ops.all_gather_into_tensor(torch.ones(3), group.size(), group.group_name))


def backward(group: Group) -> None:
    x = torch.ones(3, requires_grad=True)
    x.register_hook(lambda grad: call(call_log_of(group), gather, group))
    x.sum().backward()


def _recompile_other(group: Group, call_log: CallLog, new_rank: int, collective: Any) -> str:
    call_log.first_run("plan", PLAN)
    gather(group)
    if group.rank() == new_rank:
        time.sleep(1.0)  # lets the others enter the collective
        text = message(call_log.first_run, "other", OTHER)
    else:
        call_log.run("plan")
        text = message(call, call_log, collective, group)
    assert message(call_log.run, "plan") == text
    return text


@pytest.mark.parametrize(
    ("world", "new_rank", "collective"),
    [(2, 0, gather), (2, 1, functional), (2, 0, backward), (4, 3, gather)],
)
def test_ranks_blocked_in_collective_raise_same_error(
    world: int, new_rank: int, collective: Any
) -> None:
    messages = run(world, _recompile_other, new_rank, collective)
    assert_same(messages, "call 1", f"all_gather 7 (rank {new_rank})", "all_gather 1 (")


def _post_amid_a_transfer(group: Group, call_log: CallLog) -> str:
    """Post an error while a broadcast to rank 0 is in flight and the process of rank 0 is stopped.

    Return the error of the next collective.
    """
    call_log.first_run("plan", PLAN)
    store = dist.distributed_c10d._get_default_store()
    data = torch.full((2**24,), float(group.rank()))  # 64 MiB, more than the buffers of a socket
    if group.rank() == 1:
        pid = int(store.get("pid"))
        time.sleep(0.5)  # rank 0 is ready to receive
        os.kill(pid, signal.SIGSTOP)
    broadcast: Any = dist.broadcast(data, group=group, group_src=1, async_op=True)
    if group.rank() == 0:
        store.set("pid", str(os.getpid()))
    else:
        call_log.post_error("something went wrong")
        time.sleep(1.0)  # this rank aborts
        os.kill(pid, signal.SIGCONT)
    broadcast.wait()  # the transfer in flight completes
    assert data[-1] == 1
    return message(_gather_on, group, call_log)  # later transfers raise


def _gather_on(group: Group, call_log: CallLog) -> None:
    for _ in range(200):
        call(call_log, gather, group)
        time.sleep(0.05)


def test_transfer_in_flight_ends_before_abort() -> None:
    assert_same(run(2, _post_amid_a_transfer), "something went wrong")


def test_sends_succeed_after_reads_have_ended() -> None:
    # See [Note: sends that never end].
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as ours,
        server.accept()[0] as theirs,
    ):
        members._end_reads([ours, theirs])
        for connection in (ours, theirs):
            connection.sendall(b"to a rank that reads no more")
            connection.sendall(b"which must not answer with a reset")
        assert ours.recv(99) and theirs.recv(99)
        assert ours.recv(1) == theirs.recv(1) == b""


def _choose_other(group: Group, call_log: CallLog) -> str:
    for plan in (PLAN, OTHER):
        call_log.first_run(plan, plan)
        gather(group)
    if group.rank() == 1:
        call_log.run(OTHER)
        return message(call, call_log, lambda g: dist.all_reduce(torch.ones(8), group=g), group)
    call_log.run(PLAN)
    return message(call, call_log, gather, group)


def test_different_known_graphs_that_block_raise() -> None:
    assert_same(run(4, _choose_other), "call 2", "rank 1", "all_gather 7")


def _swap_once() -> str:
    with pytest.MonkeyPatch.context() as patch:
        # Must be patched before the call log, which reads it, is created.
        patch.setattr(graphshard.ranks.watcher, "AUDIT_S", 0.5)
        return _in_group(lambda *each: message(_train_with_a_swap, *each), 60.0, ())


def _train_with_a_swap(group: Group, call_log: CallLog) -> None:
    for step in range(1000):
        call_log.run("other" if step == 3 and group.rank() == 1 else "plan")
        call(call_log, gather, group)
        time.sleep(0.01)


def test_audit_finds_earlier_difference_without_hang() -> None:
    assert_same(ranks.run(2, _swap_once, timeout_s=30), "ranks 0, 1", "earlier call")


# Ranks that stop making calls.


def _late(group: Group, call_log: CallLog) -> str:
    call_log.first_run("plan", PLAN)
    text = message(call_log.first_run, "late", PLAN) if group.rank() < 2 else ""
    time.sleep(0 if text else 3)
    return text or message(call_log.raise_posted_error, RuntimeError("of a collective"))


def test_missing_ranks_are_named_after_timeout() -> None:
    assert_same(run(4, _late, timeout_s=2), "ranks 2, 3 did not arrive", "call 1 (forward)", "2 s")


# Choices.


def _choose(group: Group, call_log: CallLog) -> list[str]:
    made = []
    for key in ("a", "b", "a"):
        made.append(choose(group, key, f"{key} of {group.rank()}"))
        call_log.first_run(made[-1], PLAN)
    return made


@pytest.mark.parametrize("world", [1, 4])
def test_all_ranks_get_choices_of_first_rank(world: int) -> None:
    assert run(world, _choose) == [["a of 0", "b of 0", "a of 0"]] * world


def _choose_alone(group: Group, call_log: CallLog) -> str:
    call_log.first_run("plan", PLAN)
    if group.rank() == 1:
        return message(choose, group, "key")
    call_log.run("plan")
    return message(call, call_log, gather, group)


def test_choice_without_first_rank_raises_on_all_ranks() -> None:
    parts = ("call 1", "rank 1 calls key", "rank 0 calls forward")
    assert_same(run(2, _choose_alone), *parts)


def _fail_to_choose(group: Group, call_log: CallLog) -> str:
    if group.rank() > 0:
        return message(choose, group, "key")
    with pytest.raises(ZeroDivisionError):
        choose_on_first_rank(lambda: str(1 // 0), "what", "key", [group.group_name])
    return ""


def test_failed_choice_on_first_rank_raises_on_others() -> None:
    text = run(2, _fail_to_choose)[1]
    assert "rank 0 cannot choose what: ZeroDivisionError" in text


# Store, process group and process exit.


class _Counting:
    def __init__(self, store: Any) -> None:
        self._store, self._thread, self.num_operations = store, threading.get_ident(), 0

    def __getattr__(self, name: str) -> Any:
        self.num_operations += threading.get_ident() == self._thread
        return getattr(self._store, name)


def _count_operations(group: Group, call_log: CallLog) -> None:
    assert call_log._watcher is not None
    events = call_log._watcher.events
    store: Any = _Counting(events._store)
    events._store = store
    call_log.first_run("plan", PLAN)
    num_operations = store.num_operations
    for _ in range(10_000):
        call_log.run("plan")
    assert store.num_operations == num_operations > 0


def test_repeated_runs_do_not_access_the_store() -> None:
    run(2, _count_operations)


def _num_keys(group: Group, call_log: CallLog) -> None:
    store = dist.distributed_c10d._get_default_store()
    first = 0
    for number in range(20):
        call_log.first_run(f"plan {number}", PLAN)
        choose(group, "key")
        dist.barrier()
        first = first or _count_keys(store)
        dist.barrier()
    # Less than one key per round, as watchers of other tests' groups may add some meanwhile.
    end = time.monotonic() + 20
    while _count_keys(store) > first + 10 and time.monotonic() < end:
        time.sleep(0.1)  # watchers delete keys in the background
    assert 0 < _count_keys(store) <= first + 10
    dist.barrier()


def _count_keys(store: Any) -> int:
    return sum("graphshard" in key for key in store.list_keys())


def test_number_of_store_keys_is_bounded() -> None:
    run(2, _num_keys)


def _groups_of_one_name(folder: Path) -> list[str]:
    made = []
    rank, world = dist.get_rank(), dist.get_world_size()
    for number in range(3):
        dist.destroy_process_group()
        path = f"file://{folder / str(number)}"
        dist.init_process_group("gloo", init_method=path, rank=rank, world_size=world)
        assert dist.group.WORLD is not None
        call_log = call_log_of(dist.group.WORLD)
        call_log.first_run("plan", PLAN)
        made.append(choose(dist.group.WORLD, "key", str(number)))
        dist.barrier()
    dist.destroy_process_group()
    for thread in threading.enumerate():
        if thread.name == "graphshard":
            thread.join(20)
            assert not thread.is_alive()
    return made


def test_successive_groups_of_the_same_name_are_separate(tmp_path: Path) -> None:
    assert ranks.run(2, _groups_of_one_name, tmp_path) == [["0", "1", "2"]] * 2


SCRIPT = """
import sys
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from graphshard.ranks.call_log import call_log_of

rank, path, how = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
call_log = call_log_of(dist.group.WORLD)
call_log.first_run("plan", "text")
if how == "raise":
    assert rank == 0, "an error on one rank"
    call_log.first_run("next", "text")
"""


def _end(folder: Path, how: str) -> list[tuple[int, str]]:
    """Return the exit codes and stderr of two processes that exit while their watchers run."""
    starts = [[sys.executable, "-c", SCRIPT, str(r), str(folder / "group"), how] for r in range(2)]
    env = {**os.environ, **ranks.RANK_ENV}
    processes = [subprocess.Popen(s, stderr=subprocess.PIPE, text=True, env=env) for s in starts]
    try:
        return [(p.wait(100), p.communicate()[1]) for p in processes]
    finally:
        for process in processes:
            process.kill()


def test_process_exits_cleanly_with_running_watcher(tmp_path: Path) -> None:
    for code, errors in _end(tmp_path, "return"):
        assert code == 0 and "Traceback" not in errors and "terminate" not in errors, errors


def test_error_on_one_rank_reaches_waiting_rank(tmp_path: Path) -> None:
    (code, errors), (other_code, _) = _end(tmp_path, "raise")
    assert code == other_code == 1
    assert "BackendError" in errors and "rank 1 left" in errors, errors
