from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed as dist

from graphshard.ranks.store import AgreedEvent, CallEvent, EventStore, LeaveEvent

PLAN = "forward\nall_gather 0\nall_gather 1"
OTHER = "forward\nall_gather 0\nall_gather 7"

STORES: dict[str, Callable[[Path], dist.Store]] = {
    "hash": lambda folder: dist.HashStore(),
    "file": lambda folder: dist.FileStore(str(folder / "store"), 2),
    "tcp": lambda folder: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    "prefix": lambda folder: dist.PrefixStore("a", dist.PrefixStore("b", dist.HashStore())),
}


@pytest.mark.parametrize("kind", STORES)
def test_two_ranks_exchange_events_in_every_kind_of_store(kind: str, tmp_path: Path) -> None:
    store = STORES[kind](tmp_path)
    for _ in range(2):  # two groups of the same name, one after another
        first, second = (EventStore(lambda: store, "graphshard/0", rank, 2) for rank in range(2))
        assert first.read(0) is None and second.num_posted() == 0 and not first.has_left(1)
        first.post_call(3, "plan", 17, PLAN)
        second.post_call(3, "other", 18, OTHER)  # ignored: this call has already been posted
        post = second.read(0)
        assert post == CallEvent(index=0, call=3, rank=0, plan_id="plan", history=17)
        assert second.plan_text(post) == PLAN
        first.agree(post)
        assert first.has_agreed(3, 0) and not first.has_agreed(3, 1) and first.num_posted() == 1
        second.agree(post)
        assert first.read(1) == AgreedEvent(index=1, call=3, call_event=0)
        second.leave()
        first.wait(2)
        assert first.read(2) == LeaveEvent(index=2)
        assert first.has_left(1) and not first.has_left(0)
        first.leave()
        assert first.read(3) is None and second.has_left(1) and second.has_left(0)


def test_agree_succeeds_while_another_thread_reads_agreement(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dist.HashStore()
    events = EventStore(lambda: store, "graphshard/0", 0, 1)
    events.post_call(0, "plan", 0, PLAN)
    post, agreed = events.post, AgreedEvent(call=0, call_event=0)
    monkeypatch.setattr(events, "post", lambda event: (post(event), events.forget(agreed)))
    event = events.read(0)
    assert isinstance(event, CallEvent)
    events.agree(event)
    assert events.read(0) is None and events.read(1) is not None
