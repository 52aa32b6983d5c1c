"""Repeated layers in a sequence of nodes: finding them, and cutting all of them equally."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from graphshard.planning.plan import Regions
from graphshard.planning.repeats import Repeat, find_repeats, pieces, saves_time


def test_layers_are_found_among_other_nodes() -> None:
    labels = [1, 2, *[3, 4, 5, 3, 6] * 4, 7]
    assert find_repeats(labels, 5) == [Repeat(start=2, length=5, count=4)]


def test_layers_of_two_kinds_are_found() -> None:
    labels = [0, *[1, 2, 3] * 5, 8, 9, *[4, 5, 6, 7] * 5]
    found = find_repeats(labels, 6)
    assert found == [Repeat(1, 3, 5), Repeat(18, 4, 5)]


def test_small_repeats_are_ignored() -> None:
    assert find_repeats([1, 2, 3, 1, 2, 3, 4], 4) == []


@given(st.lists(st.integers(0, 5)), st.lists(st.integers(0, 9), min_size=3), st.integers(2, 6))
def test_found_repeats_are_repeats(around: list[int], layer: list[int], count: int) -> None:
    labels = [*around, *layer * count, *around[::-1]]
    repeats = find_repeats(labels, len(layer))
    stop = 0
    for repeat in repeats:
        parts = {
            tuple(labels[start : start + repeat.length])
            for start in range(repeat.start, repeat.stop, repeat.length)
        }
        assert len(parts) == 1 and repeat.count > 1
        assert repeat.start >= stop and repeat.num_saved >= len(layer)
        rest = labels[repeat.stop : repeat.stop + repeat.rest]
        assert rest == labels[repeat.start : repeat.start + repeat.rest]
        stop = repeat.stop
    if len(set(layer)) == len(layer):  # no other repeat hides the layers
        assert sum(repeat.num_saved for repeat in repeats) >= len(layer) * (count - 1)


def test_all_parts_of_repeat_are_cut_at_same_places() -> None:
    repeat = Repeat(start=10, length=6, count=3)
    assert pieces(repeat, [3, 10, 13, 23, 40]) == [
        range(10, 11), range(11, 13), range(13, 16),
        range(16, 17), range(17, 19), range(19, 22),
        range(22, 23), range(23, 25), range(25, 28),
    ]  # fmt: skip


def test_repeat_begins_at_a_cut() -> None:
    assert pieces(Repeat(10, 6, 2, rest=4), [13]) == [range(13, 19), range(19, 25)]


@given(
    st.integers(0, 9),
    st.integers(1, 8),
    st.integers(2, 5),
    st.integers(0, 7),
    st.sets(st.integers(0, 60)),
)
def test_pieces_cover_all_parts_and_contain_no_cut(
    start: int, length: int, count: int, rest: int, cuts: set[int]
) -> None:
    repeat = Repeat(start, length, count, rest % length)
    found = pieces(repeat, cuts)
    positions = [i for piece in found for i in piece]
    assert positions == list(range(found[0].start, found[-1].stop))
    assert len(positions) == length * count
    assert not any(cut in piece and cut != piece.start for piece in found for cut in cuts)
    sizes = [len(piece) for piece in found]
    assert sizes == sizes[: len(sizes) // count] * count


def test_only_large_regions_save_time() -> None:
    assert saves_time(
        Regions(num_compiled_regions=1, num_calls=20, num_nodes=2000, num_compiled=100)
    )
    assert not saves_time(
        Regions(num_compiled_regions=9, num_calls=90, num_nodes=270, num_compiled=135)
    )
