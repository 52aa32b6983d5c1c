"""A rank waits in a call while its peers are blocked in a collective: all raise the same error."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import graphshard.ranks.watcher
from graphshard._torch.distributed import num_started
from graphshard.ranks.call_log import CallLog

from .test_call_log import PLAN, Group, assert_same, call, choose, gather, message, run

pytestmark = pytest.mark.alone

BLOCKED_S = 0.5  # shorter than in production, since all tests wait this long

_with_short_wait = mock.patch.object(graphshard.ranks.watcher, "BLOCKED_S", BLOCKED_S)


@_with_short_wait
def _meet_elsewhere(group: Group, call_log: CallLog, alone: int, chooses: bool) -> str:
    gather(group)
    if group.rank() == alone:
        began = time.monotonic()
        text = message(choose, group, PLAN) if chooses else message(call_log.first_run, "p", PLAN)
        assert time.monotonic() < began + 6.0
        return text
    return message(call, call_log, dist.barrier, group)  # the other rank's error ends the barrier


@pytest.mark.parametrize(
    ("world", "alone", "chooses"), [(2, 0, False), (2, 1, False), (4, 2, False), (2, 1, True)]
)
def test_call_while_peers_are_blocked_raises_on_all_ranks(
    world: int, alone: int, chooses: bool
) -> None:
    messages = run(world, _meet_elsewhere, alone, chooses)
    assert_same(messages, f"rank {alone} waits in call 0 (forward)", "torch.distributed.barrier()")
    assert f"which rank {alone} has not called yet" in messages[0]
    assert "test_call_log.py:" in messages[0]  # the line in `call` that launches the collective


@_with_short_wait
def _wait_for_a_slow_rank(group: Group, call_log: CallLog) -> None:
    _send_from_2_to_1(group)  # gloo counts it like a collective, but not on all ranks
    others: Any = dist.new_group([1, 2], use_local_synchronization=True) if group.rank() else None
    for collect in (_gather_to_1, _broadcast_among):
        if group.rank() == 2:
            time.sleep(BLOCKED_S + 1.0)
        collect(group, others)
        call_log.first_run(collect.__name__, PLAN)
    if group.rank() == 2:
        time.sleep(BLOCKED_S + 1.0)  # the others wait in a call without an error
    call_log.first_run("last", PLAN)
    dist.barrier(group)
    if group.rank():
        dist.destroy_process_group(others)


def _send_from_2_to_1(group: Group) -> None:
    for source in (2, None):
        if group.rank() == 2:
            dist.send(torch.ones(3), 1, group=group)
        elif group.rank() == 1:
            dist.recv(torch.ones(3), source, group=group)
    assert num_started(group.group_name) == 0


def _gather_to_1(group: Group, others: Group) -> None:
    parts = [torch.ones(3) for _ in range(3)] if group.rank() == 1 else None
    dist.gather(torch.ones(3), parts, group=group, group_dst=1)


def _broadcast_among(group: Group, others: Group) -> None:
    if group.rank():
        dist.broadcast(torch.ones(3), 2, group=others)


def _count_after_monitored_barrier(group: Group, call_log: CallLog) -> int | None:
    dist.monitored_barrier(group)
    dist.barrier(group)
    return num_started(group.group_name)


def test_monitored_barrier_is_counted_alike_on_all_ranks() -> None:
    assert run(3, _count_after_monitored_barrier) == [1, 1, 1]


def test_slow_rank_raises_no_error() -> None:
    run(3, _wait_for_a_slow_rank)
