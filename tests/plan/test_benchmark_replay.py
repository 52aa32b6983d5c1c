from __future__ import annotations

import pytest

from benchmarks.replay import RECORDED, Replayed, replay
from graphshard.planning.simulate import COMMUNICATION

GRAPHS = [
    f"graphshard-{links} {graph}"
    for links in ("0.03-370", "0.05-100")
    for graph in ("forward", "backward")
]


@pytest.fixture(scope="module")
def replayed() -> dict[str, Replayed]:
    return {each.name: each for each in replay(RECORDED)}


@pytest.mark.parametrize("graph", GRAPHS)
def test_simulator_reproduces_recorded_step(graph: str, replayed: dict[str, Replayed]) -> None:
    _, measured, simulated, predicted, _ = replayed[graph]
    assert simulated.exposed_ms == pytest.approx(measured.exposed_ms, rel=0.1)
    assert simulated.total_ms == pytest.approx(measured.total_ms, rel=0.01)
    # Predicted times are less accurate: a busy GPU is slower, and collectives start late.
    assert predicted.total_ms == pytest.approx(measured.total_ms, rel=0.15)


def test_exchanges_shorten_reductions_and_step(replayed: dict[str, Replayed]) -> None:
    for graph in GRAPHS[1::2]:
        reduced = replayed[graph].reduced
        link_us = {reduce: timeline.busy_us(COMMUNICATION) for reduce, timeline in reduced.items()}
        assert link_us["exchange"] < 0.75 * link_us["ring"]
        assert reduced["auto"].total_us <= 1.001 * reduced["exchange"].total_us
        assert reduced["exchange"].total_us < 0.97 * reduced["ring"].total_us
