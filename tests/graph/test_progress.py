from __future__ import annotations

import contextlib
import io
import logging
import os
from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard import progress

LOGGER = logging.getLogger("graphshard")


def _first_step(mesh: DeviceMesh, compiler: str) -> None:
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)) for _ in range(6)]
    schedule = graphshard.SchedulePolicy(regions=True, overlap=False)
    backend = graphshard.backend(mesh, compiler=compiler, schedule=schedule)
    torch.compile(nn.Sequential(*layers), backend=backend)(torch.ones(2, 8)).sum().backward()


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_line_is_shown_and_cleared(mesh: DeviceMesh) -> None:
    with contextlib.redirect_stderr(_Terminal()) as terminal:
        _first_step(mesh, "aot_eager")
    first, *lines, last = terminal.getvalue().split("\r\033[K")
    assert first == last == ""
    for text in ("sharding Sequential over 8 ranks", "tracing", "backward: planned 24 parameters"):
        assert any(line.startswith(f"graphshard: {text}") for line in lines), lines


def test_progress_line_is_as_wide_as_the_terminal_of_stderr(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    columns = {77: 20, 1: 50}  # by file descriptor
    size_of = os.terminal_size
    monkeypatch.setattr(os, "get_terminal_size", lambda fd: size_of((columns[fd], 24)))
    with contextlib.redirect_stderr(_Terminal()) as terminal:
        terminal.fileno = lambda: 77  # type: ignore[method-assign]
        progress.show_line("x" * 100)
    assert terminal.getvalue() == "\r\033[K" + "x" * 19


def test_other_ranks_and_configured_loggers_get_no_progress_line(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    with contextlib.redirect_stderr(_Terminal()) as terminal:
        with monkeypatch.context() as patched:
            patched.setattr("torch.distributed.get_rank", lambda *_: 1)
            _first_step(mesh, "aot_eager")
        torch._dynamo.reset()
        monkeypatch.setattr(LOGGER, "level", logging.WARNING)
        _first_step(mesh, "aot_eager")
    assert terminal.getvalue() == ""


@contextlib.contextmanager
def _torch_logs() -> Iterator[None]:
    torch._logging.set_logs(modules={"graphshard": logging.INFO})
    try:
        yield
    finally:
        torch._logging.set_logs()
        LOGGER.handlers.clear()
        LOGGER.propagate = True


@pytest.mark.filterwarnings("ignore:dynamo_pgo")
def test_torch_logs_shows_all_parts_in_order(mesh: DeviceMesh) -> None:
    uncached = torch._inductor.config.patch(force_disable_caches=True)
    with contextlib.redirect_stderr(_Terminal()) as terminal, _torch_logs(), uncached:
        _first_step(mesh, "inductor")
    log, position = terminal.getvalue(), 0
    for text in (
        "sharding Sequential over 8 ranks",
        "tracing forward and backward of",
        "forward: planned 24 parameters in",
        "forward: compiling region 1 of",
        "backward: compiling region 1 of",
        "compiling kernels",
        "comparing plans",
        "compiled in",
    ):
        assert text in log[position:], log
        position = log.index(text, position)
    assert "\r" not in log
