"""Many simulated ranks at one real store: what each does there does not grow with their number."""

from __future__ import annotations

from benchmarks.agreement import NUM_GRAPHS, measure


def test_operations_of_the_store_for_each_rank() -> None:
    few, _ = measure(4)
    many, errors = measure(64)
    for phase, same in zip(many, few):
        more = max(0, phase.events - same.events)
        assert phase.most <= 2 * same.most + 10 * (1 + more)
    compile_all, idle, again, differ = many
    # A choice and a first run: two calls; each is posted, agreed to and read.
    assert compile_all.most <= 60 * NUM_GRAPHS
    # All ranks were idle for so long that one posted its last call. Where threads get the cores
    # late, a rank may have been idle earlier, too: another event, and its agreement.
    for phase in (idle, again, differ):
        assert phase.most <= 10 + 10 * phase.events
    assert max(idle.events, again.events, differ.events) < 10
    text = errors.pop()
    assert not errors and "layers.700." in text and "head." in text and len(text) < 800
    # A few numbers for each rank, and the texts of the last calls.
    assert idle.keys <= 4 * 64 + 30 and idle.num_bytes < 64 * 1000 + 10 * 40_000
