"""Store operations per rank do not grow with the number of ranks, simulated on one real store."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from benchmarks.agreement import NUM_GRAPHS, measure


def test_store_operations_per_rank_do_not_grow_with_ranks() -> None:
    with ThreadPoolExecutor(2) as pool:
        (few, _), (many, errors) = pool.map(measure, (4, 16))
    for phase, same in zip(many, few):
        more = max(0, phase.events - same.events)
        assert phase.most <= 2 * same.most + 10 * (1 + more)
    compile_all, idle, again, differ = many
    # Each graph makes two calls, choice and first run; each is posted, agreed on and read.
    assert compile_all.most <= 60 * NUM_GRAPHS
    # All ranks are idle long enough for one to post its last call. On a busy machine, a rank may
    # also seem idle earlier, which adds an event and its agreement.
    for phase in (idle, again, differ):
        assert phase.most <= 10 + 10 * phase.events
    assert max(idle.events, again.events, differ.events) < 10
    text = errors.pop()
    assert not errors and "layers.700." in text and "head." in text and len(text) < 800
    # A few numbers per rank, and the texts of the last calls.
    assert idle.keys <= 4 * 16 + 30 and idle.num_bytes < 16 * 1000 + 10 * 40_000
