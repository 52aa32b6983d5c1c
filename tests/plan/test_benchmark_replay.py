from __future__ import annotations

import pytest

from benchmarks.replay import RECORDED, Replayed, replay

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
    _, measured, simulated, predicted = replayed[graph]
    assert simulated.exposed_ms == pytest.approx(measured.exposed_ms, rel=0.1)
    assert simulated.total_ms == pytest.approx(measured.total_ms, rel=0.01)
    # Predicted times are less accurate: a busy GPU is slower, and collectives start late.
    assert predicted.total_ms == pytest.approx(measured.total_ms, rel=0.15)
