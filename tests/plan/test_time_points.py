"""Sums of spans at each point in time: all implementations agree."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from graphshard.planning.live_bytes import ByteChanges, LiveBytes, Span, sum_spans

NUM_POINTS = 6
_points = st.integers(0, NUM_POINTS)
_spans = st.lists(st.builds(Span, begin=_points, end=_points, num_bytes=st.integers(0, 100)))


@given(_spans)
def test_all_sums_of_spans_agree(spans: list[Span]) -> None:
    expected = [
        sum(span.num_bytes for span in spans if span.begin <= point < span.end)
        for point in range(NUM_POINTS)
    ]
    assert sum_spans(spans, NUM_POINTS) == expected
    live, changes = LiveBytes([0] * NUM_POINTS), ByteChanges(NUM_POINTS)
    for span in spans:
        live.add(span)
        if span.begin < span.end:
            changes.add(span.begin, span.num_bytes)
            changes.add(span.end, -span.num_bytes)
    assert live.by_point == list(changes.copy().by_point()) == expected
    for span in spans:
        live.remove(span)
    assert live.by_point == [0] * NUM_POINTS


def test_has_room_looks_only_at_the_points_of_the_span() -> None:
    live = LiveBytes([10, 50, 10])
    assert live.has_room(Span(0, 1, 40), budget=50)
    assert not live.has_room(Span(0, 2, 40), budget=50)
    assert live.has_room(Span(1, 1, 40), budget=50)
    assert live.exceeds(49, Span(0, 2, 0)) and not live.exceeds(50, Span(0, 2, 0))
