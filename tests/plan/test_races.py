"""Race detection: injected races are named; results on random programs agree with a path search."""

from __future__ import annotations

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from graphshard.check.actions import (
    HOST,
    Action,
    Allocate,
    Free,
    Record,
    RecordStream,
    WaitEvent,
    Work,
)
from graphshard.check.races import find_races

COMPUTE, NCCL = "compute", "nccl"

GATHER: list[Action] = [
    Allocate(0, 64, COMPUTE),
    Work("copy_in", COMPUTE, writes=(0,)),
    Allocate(1, 512, COMPUTE),
    Record(0, COMPUTE),
    WaitEvent(0, NCCL),
    Work("all_gather", NCCL, reads=(0,), writes=(1,)),
    Record(1, NCCL),
    WaitEvent(1, COMPUTE),
    Free(0),
    Work("mm", COMPUTE, reads=(1,)),
    Free(1),
]
"""Actions of an all-gather with functional collectives."""


def test_gather_with_all_waits_has_no_race() -> None:
    assert find_races(GATHER) == []


def test_event_of_an_earlier_step_orders_nothing() -> None:
    assert find_races([WaitEvent(7, COMPUTE), *GATHER]) == []


@pytest.mark.parametrize(
    ("dropped", "expected"),
    [
        (WaitEvent(0, NCCL), "block 0: all_gather on stream nccl does not wait for copy_in"),
        (WaitEvent(1, COMPUTE), "block 1: mm on stream compute does not wait for all_gather"),
    ],
)
def test_dropped_wait_is_a_race(dropped: Action, expected: str) -> None:
    races = find_races([action for action in GATHER if action != dropped])
    assert any(expected in str(race) for race in races)


def test_freeing_buffer_before_wait_is_a_race() -> None:
    early = [action for action in GATHER if action != Free(0)]
    early.insert(6, Free(0))
    (race,) = find_races(early)
    assert "block 0 is freed while all_gather on stream nccl may still use it" in str(race)
    assert find_races([*early[:6], RecordStream(0, NCCL), *early[6:]]) == []


def test_writing_buffer_in_flight_is_a_race() -> None:
    reused = [*GATHER[:7], Work("relu", COMPUTE, writes=(0,)), *GATHER[7:]]
    (race,) = find_races(reused)
    assert "block 0: relu on stream compute does not wait for all_gather" in str(race)


def _copy_to_host(*waits: Action) -> list[Action]:
    """Return the copy of a gradient to the host, then ``waits``, then an optimizer step there."""
    return [
        Allocate(0, 64, COMPUTE),
        Work("grad", COMPUTE, writes=(0,)),
        Allocate(1, 64, HOST),
        Record(0, COMPUTE),
        WaitEvent(0, "copies"),
        Work("copy", "copies", reads=(0,), writes=(1,)),
        Record(1, "copies"),
        *waits,
        Work("adam", HOST, reads=(1,), writes=(1,)),
    ]


def test_host_read_without_host_wait_is_a_race() -> None:
    assert find_races(_copy_to_host(WaitEvent(1, HOST))) == []
    (race,) = find_races(_copy_to_host(WaitEvent(1, COMPUTE)))
    assert "block 1: adam on stream host does not wait for copy on stream copies" in str(race)


def test_host_wait_orders_all_later_work_of_host() -> None:
    actions = _copy_to_host(WaitEvent(1, HOST))
    assert find_races([*actions, Free(0), Work("again", NCCL, reads=(1,))]) == []


STREAMS = ("a", "b", HOST)
NUM_BLOCKS = 3


@st.composite
def _programs(draw: st.DrawFn) -> list[Action]:
    streams, blocks = st.sampled_from(STREAMS), st.integers(0, NUM_BLOCKS - 1)
    homes = draw(st.lists(streams, min_size=NUM_BLOCKS, max_size=NUM_BLOCKS))
    actions: list[Action] = [Allocate(i, 8, home) for i, home in enumerate(homes)]
    num_events = 0
    for i in range(draw(st.integers(1, 14))):
        match draw(st.sampled_from(("work", "work", "record", "wait", "use"))):
            case "work":
                accesses = draw(st.tuples(st.sets(blocks, max_size=2), st.sets(blocks, max_size=1)))
                actions.append(Work(f"w{i}", draw(streams), *map(tuple, accesses)))
            case "record":
                actions.append(Record(num_events, draw(streams)))
                num_events += 1
            case "wait" if num_events:
                actions.append(WaitEvent(draw(st.integers(0, num_events - 1)), draw(streams)))
            case "use":
                actions.append(RecordStream(draw(blocks), draw(streams)))
    return actions + [Free(block) for block in draw(st.sets(blocks))]


def _has_race(actions: list[Action]) -> bool:
    """Return whether some conflicting accesses of a block, or a use and its free, may overlap.

    They may if no path connects them. Blocks on the host, and streams recorded for a block, need no
    path to its free.
    """
    graph: nx.DiGraph[int] = nx.DiGraph()
    last: dict[str, int] = {}
    records: dict[int, int] = {}
    accesses: dict[int, list[tuple[int, str, bool]]] = {i: [] for i in range(NUM_BLOCKS)}
    homes: dict[int, str] = {}
    recorded: set[tuple[int, str]] = set()

    def put(node: int, stream: str) -> None:
        graph.add_node(node)
        graph.add_edges_from((last[s], node) for s in (stream, HOST) if s in last)

    for node, action in enumerate(actions):
        match action:
            case Allocate(block, _, stream):
                homes[block] = stream
            case Work(_, stream, reads, writes):
                put(node, stream)
                last[stream] = node
                for block in {*reads, *writes}:
                    for other, _, wrote in accesses[block]:
                        if (wrote or block in writes) and not nx.has_path(graph, other, node):
                            return True
                    accesses[block].append((node, stream, block in writes))
            case Record(event, stream):
                put(node, stream)
                records[event] = node
            case WaitEvent(event, stream):
                put(node, stream)
                graph.add_edge(records[event], node)
                last[stream] = node
            case RecordStream(block, stream):
                recorded.add((block, stream))
            case Free(block):
                put(node, homes[block])
                for other, stream, _ in accesses[block]:
                    safe = (block, stream) in recorded or homes[block] == HOST
                    if not safe and not nx.has_path(graph, other, node):
                        return True
    return False


@settings(max_examples=500)
@given(_programs())
def test_find_races_agrees_with_a_path_search(actions: list[Action]) -> None:
    assert bool(find_races(actions)) == _has_race(actions)
