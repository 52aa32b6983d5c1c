"""Typical user mistakes on some ranks, and the error that they raise on every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import graphshard
from graphshard.ranks.call_log import CallLog
from tests.multirank.test_call_log import assert_same, mesh_of, message, run

pytestmark = pytest.mark.alone

DIM, LAYERS = 8, 12
MAX_CHARACTERS = 800


class Net(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def _compiled(
    group: dist.ProcessGroup,
    dynamic: bool | None = None,
    layers: int = LAYERS,
    **options: Any,
) -> Any:
    backend = graphshard.backend(mesh_of(group), compiler="aot_eager", **options)
    return torch.compile(Net(layers), backend=backend, dynamic=dynamic)


def _first_line(act: Callable[[], object]) -> str:
    return message(act).splitlines()[0]  # Dynamo appends lines to errors during compilation


def _assert_told(messages: list[str], *parts: str) -> None:
    assert_same(messages, *parts)
    assert len(messages[0]) < MAX_CHARACTERS
    assert f"layers.{LAYERS - 1}" not in messages[0]


def _meet_ever_new_shapes(group: dist.ProcessGroup, _: CallLog, everywhere: bool) -> str:
    torch._dynamo.config.recompile_limit = 3
    # Only the error, whose length is checked, needs many layers.
    model = _compiled(group, dynamic=False, layers=2 if everywhere else LAYERS)

    def train(steps: range) -> None:
        for step in steps:
            model(torch.ones(4 + step * (everywhere or group.rank() == 1), DIM)).backward()

    train(range(3))
    if not everywhere:
        return _first_line(lambda: train(range(3, 5)))
    train(range(3, 5))
    return ""


def test_recompile_limit_on_one_rank_is_an_error() -> None:
    messages = run(2, _meet_ever_new_shapes, False)
    _assert_told(messages, "rank 1 calls a gather", "recompile limit", "dynamic=True", "pad")


def test_recompile_limit_on_all_ranks_is_no_error() -> None:
    assert run(2, _meet_ever_new_shapes, True) == [""] * 2


def _evaluate_alone(group: dist.ProcessGroup, _: CallLog) -> str:
    model, x = _compiled(group), torch.ones(4, DIM)
    model(x).backward()

    def step() -> None:
        with torch.set_grad_enabled(group.rank() == 1):
            loss = model(x)
        if group.rank() == 1:
            loss.backward()
        model(x)

    return _first_line(step)


def test_evaluation_on_one_rank_is_an_error() -> None:
    parts = ("calls a graph for inference", "calls graphs for training", "torch.no_grad()")
    _assert_told(run(2, _evaluate_alone), *parts)


def _evaluate_known_graphs_alone(group: dist.ProcessGroup, _: CallLog, alone: int) -> str:
    model, x = _compiled(group), torch.ones(4, DIM)

    def evaluate() -> None:
        with torch.no_grad():
            model(x)

    for _ in range(2):
        model(x).backward()
        evaluate()
    model(x).backward()

    def go_on() -> None:
        if group.rank() == alone:
            evaluate()
        for _ in range(2):
            model(x).backward()

    return _first_line(go_on)


@pytest.mark.parametrize("alone", [0, 1])
def test_evaluation_of_known_graphs_on_one_rank_is_an_error(alone: int) -> None:
    parts = ("calls a graph for inference", "calls graphs for training", "torch.no_grad()")
    _assert_told(run(3, _evaluate_known_graphs_alone, alone), *parts)


def _skip_backward(group: dist.ProcessGroup, _: CallLog, at: int, shards: bool, runs: int) -> str:
    """Train, but call backward `runs` times on rank 1 in step `at`; otherwise, once."""
    overrides: Any = None if shards else {"*": {"shard": False}}
    model, x = _compiled(group, overrides=overrides), torch.ones(4, DIM)

    def train() -> None:
        for step in range(at + 2):
            loss = model(x)
            for _ in range(runs if step == at and group.rank() == 1 else 1):
                loss.backward(retain_graph=True)

    return _first_line(train)


@pytest.mark.parametrize(
    ("at", "shards", "runs"), [(0, True, 0), (2, True, 0), (2, False, 0), (2, True, 2)]
)
def test_other_number_of_backwards_on_one_rank_is_an_error(
    at: int, shards: bool, runs: int
) -> None:
    messages = run(2, _skip_backward, at, shards, runs)
    _assert_told(messages, "calls backward of graphs for training", "did a rank skip backward()")


def _step_alone(group: dist.ProcessGroup, call_log: CallLog) -> str:
    model, x = _compiled(group), torch.ones(4, DIM)
    model(x).backward()
    if group.rank() == 0:
        return _first_line(lambda: model(x[:2]).backward())
    assert call_log._watcher is not None
    # Idle instead of blocked in a collective, which peers would notice at once.
    call_log._watcher.wait_until(lambda: False, 60.0)
    return ""


def test_step_on_one_rank_is_an_error() -> None:
    text, _ = run(2, _step_alone, timeout_s=5.0)
    assert "rank 1 did not arrive" in text and "must call the model together" in text


def _fail_in_backward(group: dist.ProcessGroup, call_log: CallLog) -> str:
    model, x = _compiled(group), torch.ones(4, DIM)
    model(x).backward()
    loss = model(x)
    if group.rank() == 0:
        return _first_line(loss.backward)
    call_log.post_error("something went wrong")
    return message(call_log.raise_posted_error, RuntimeError("of a collective"))


def test_rank_blocked_in_backward_raises_same_error() -> None:
    _assert_told(run(2, _fail_in_backward), "something went wrong")
