"""Work that is skipped during a compile is done if its result is needed."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor import fx_utils
from torch._inductor.virtualized import V
from torch._subclasses import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.proxy_tensor import make_fx

import graphshard
from graphshard._torch.unused_work import without_unused_work


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


def test_torch_is_restored_after_a_compile(mesh: DeviceMesh) -> None:
    update = fx_utils.FakeTensorUpdater.incremental_update
    backend = graphshard.backend(mesh, compiler="aot_eager")
    torch.compile(nn.Linear(4, 4), backend=backend)(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ZeroDivisionError):
        torch.compile(lambda x: x / (1 // 0), backend=backend)(torch.ones(2))
    assert fx_utils.FakeTensorUpdater.incremental_update is update
