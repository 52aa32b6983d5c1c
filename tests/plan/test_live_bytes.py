"""Sums of spans by step, in the forms in which they are computed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from graphshard.planning.live_bytes import ByteChanges, LiveBytes, Span, bytes_by_step

NUM_STEPS = 6
_steps = st.integers(0, NUM_STEPS)
_spans = st.lists(st.builds(Span, begin=_steps, end=_steps, num_bytes=st.integers(0, 100)))


@given(_spans)
def test_all_forms_agree(spans: list[Span]) -> None:
    expected = [
        sum(span.num_bytes for span in spans if span.begin <= step < span.end)
        for step in range(NUM_STEPS)
    ]
    assert bytes_by_step(spans, NUM_STEPS) == expected
    live, changes = LiveBytes([0] * NUM_STEPS), ByteChanges(NUM_STEPS)
    for span in spans:
        live.add(span)
        if span.begin < span.end:
            changes.begin(span.begin, span.num_bytes)
            changes.end(span.end, span.num_bytes)
    assert live.by_step == list(changes.copy().by_step()) == expected
    for span in spans:
        live.remove(span)
    assert live.by_step == [0] * NUM_STEPS


def test_room_is_counted_in_the_steps_of_the_span_alone() -> None:
    live = LiveBytes([10, 50, 10])
    assert live.has_room(Span(0, 1, 40), budget=50)
    assert not live.has_room(Span(0, 2, 40), budget=50)
    assert live.has_room(Span(1, 1, 40), budget=50)
    assert live.exceeds(49, Span(0, 2, 0)) and not live.exceeds(50, Span(0, 2, 0))
