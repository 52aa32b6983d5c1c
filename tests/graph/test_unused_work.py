"""Work that is skipped during a compile is done if its result is needed."""

from __future__ import annotations

import inspect
import logging
import operator
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._functorch._aot_autograd import graph_compile
from torch._inductor import fx_utils
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.proxy_tensor import make_fx

import graphshard
from graphshard._torch.unused_work import (
    generating_code_later,
    without_code_of_graphs,
    without_unused_work,
)


def _train(mesh: DeviceMesh) -> None:
    torch._dynamo.reset()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    backend = graphshard.backend(mesh, compiler="aot_eager")
    torch.compile(model, backend=backend)(torch.ones(2, 4)).sum().backward()


@pytest.fixture
def formatted(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """Graphs that AOTAutograd has formatted for its logs."""
    found: list[fx.GraphModule] = []
    print_readable: Callable[..., str] = fx.GraphModule.print_readable

    def recording(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> str:
        if sys._getframe(1).f_code.co_filename == graph_compile.__file__:
            found.append(gm)
        return print_readable(gm, *args, **kwargs)

    monkeypatch.setattr(fx.GraphModule, "print_readable", recording)
    return found


def test_graphs_are_formatted_only_for_logs(
    mesh: DeviceMesh,
    formatted: list[fx.GraphModule],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch._logging._internal.trace_log, "handlers", [])  # pytest adds some
    _train(mesh)
    assert not formatted
    with caplog.at_level(logging.INFO, graph_compile.aot_graphs_log.name):
        _train(mesh)
    assert len(formatted) == 3  # joint, forward, backward


def test_fake_tensors_of_changed_nodes_are_updated() -> None:
    with FakeTensorMode() as mode:
        x = torch.empty(2, 3)
    gm = make_fx(lambda x: torch.ops.aten.sum.dim_IntList(x, [0]) + 1)(x)
    takes_module = "gm" in inspect.signature(fx_utils.FakeTensorUpdater).parameters  # not on 2.11
    traced: Any = gm if takes_module else gm.graph
    updater = fx_utils.FakeTensorUpdater(traced)
    (total,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.sum.dim_IntList)
    before = total.meta["val"]
    with without_unused_work(), V.set_fake_mode(mode):
        updater.incremental_update()
        with gm.graph.inserting_after(total):
            other = gm.graph.call_function(total.target, (total.args[0], [1]))
        total.replace_all_uses_with(other)
        updater.incremental_update()
    assert total.meta["val"] is before
    assert [tuple(node.meta["val"].shape) for node in (other, *other.users)] == [(2,), (2,)]


def test_graphs_made_without_code_run() -> None:
    traced = fx.symbolic_trace(lambda x: x + 1)
    lazy = generating_code_later(traced)
    with without_code_of_graphs():
        plain = fx.GraphModule(traced, traced.graph)
        lazy.recompile()
        (add,) = plain.graph.find_nodes(op="call_function", target=operator.add)
        add.args = (add.args[0], 2)
        plain.recompile()
        assert plain(1) == lazy(1) == 3
        add.args = (add.args[0], 3)
        plain.recompile()
    assert generating_code_later(plain)(1) == 4


def test_torch_is_restored_after_a_compile(mesh: DeviceMesh) -> None:
    before = graph_compile._log_fw_bw_graphs, fx_utils.FakeTensorUpdater.incremental_update
    _train(mesh)
    with pytest.raises(ZeroDivisionError):
        torch.compile(lambda x: x / (1 // 0), backend=graphshard.backend(mesh))(torch.ones(2))
    after = graph_compile._log_fw_bw_graphs, fx_utils.FakeTensorUpdater.incremental_update
    assert before == after
