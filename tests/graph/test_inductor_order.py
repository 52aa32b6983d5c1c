"""Inductor's final code keeps the planned order of collectives, waits and matmuls."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, fx, nn
from torch._inductor import config
from torch._inductor.utils import run_and_get_code
from torch.distributed._symmetric_memory import _test_mode
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.experimental.proxy_tensor import make_fx

import graphshard
from graphshard._torch.inductor import _fuse_operators, compile_rewritten
from graphshard.pipeline import run_passes
from graphshard.planning.plan import Plan

DIM = 32
# Patterns that match each kind of event in an FX graph and in Inductor's code.
EVENTS = {
    "gather": r"all_gather_into_tensor(_coalesced)?\.default\(",
    "reduce": r"reduce_scatter_tensor(_coalesced)?\.default\(",
    "wait": r"wait_tensor\.default\(",
    "product": r"(extern_kernels|aten)\.(add)?mm(\.default)?\(",
}


class Deep(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(4))
        self.norms = nn.ModuleList(nn.LayerNorm(DIM) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer, norm in zip(self.layers, self.norms):
            x = x + torch.tanh(layer(norm(x)))
        return x.square().mean()


def _events_of_code(code: str) -> list[str]:
    body = code[code.index("def call(") :]
    lines = [line.strip() for line in body.splitlines()]
    calls = [line for line in lines if not line.startswith(("assert", "#"))]
    return [name for line in calls for name, pattern in EVENTS.items() if re.search(pattern, line)]


def _events_of_graph(graph: fx.Graph) -> list[str]:
    calls = [f"{node.target}(" for node in graph.nodes if node.op == "call_function"]
    return [name for call in calls for name, p in EVENTS.items() if re.search(p, call)]


def _compiled(
    run: Callable[[Any], None], mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> list[tuple[list[str], list[str], Plan]]:
    """Return, for each graph, the events as lowered, the events in the final code, and the plan."""
    written: dict[str, tuple[list[str], Plan]] = {}
    verify = run_passes.verify_lowered

    def verify_and_note(graph: fx.Graph, plan: Plan) -> None:
        verify(graph, plan)
        written[plan.graph] = _events_of_graph(graph), plan

    monkeypatch.setattr(run_passes, "verify_lowered", verify_and_note)
    policy = graphshard.SchedulePolicy(overlap=True, bucket_cap_mb=DIM * DIM * 4 / 1e6)
    backend = graphshard.backend(mesh, schedule=policy)
    model = torch.compile(Deep(), backend=backend, fullgraph=True)
    with torch._inductor.config.patch(force_disable_caches=True):
        _, codes = run_and_get_code(run, model)
    assert len(codes) == len(written)
    return [
        (events, _events_of_code(code), plan)
        for (events, plan), code in zip(written.values(), codes)
    ]


def _train(model: Any) -> None:
    model(torch.randn(4, DIM)).backward()


def _infer(model: Any) -> None:
    with torch.no_grad():
        model(torch.randn(4, DIM))


@pytest.mark.parametrize(("run", "num_graphs"), [(_train, 2), (_infer, 1)])
def test_inductor_keeps_planned_order(
    run: Callable[[Any], None],
    num_graphs: int,
    mesh: DeviceMesh,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # As a user of SimpleFSDP does.
    buckets = {f"bucket_{kind}_fx": "all" for kind in ("all_gathers", "reduce_scatters")}
    with config.patch(buckets), pytest.warns(UserWarning, match="without bucket_all_gathers_fx"):
        graphs = _compiled(run, mesh, monkeypatch)
    assert len(graphs) == num_graphs
    for written, in_code, plan in graphs:
        launches = [event for event in written if event in ("gather", "reduce")]
        assert [event for event in in_code if event in ("gather", "reduce")] == launches
        assert len(launches) == len(plan.buckets) > 4
        assert _products_before("gather", in_code) == _products_before("gather", written)
        # A gradient may be fused into the next kernel, which delays its reduction.
        for event in ("reduce", "wait"):
            pairs = zip(_products_before(event, in_code), _products_before(event, written))
            assert all(late - planned in (0, 1) for late, planned in pairs)
        # A gather is in flight during the first product.
        start = written[: written.index("product")]
        assert start.count("gather") > start.count("wait")


def _partition(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("never called")


@pytest.mark.parametrize("name", ["custom_partitioner_fn", "_post_fusion_custom_pass"])
def test_pass_that_would_replace_ours_is_refused(mesh: DeviceMesh, name: str) -> None:
    backend = graphshard.backend(mesh)
    by_options = torch.compile(nn.Linear(4, 4), backend=backend, options={name: _partition})
    by_config = torch.compile(nn.Linear(4, 4), backend=backend)
    with pytest.raises(ValueError, match=f"^{name} is set, .*: remove it from the options"):
        by_options(torch.ones(2, 4))
    with config.patch({name: _partition}), pytest.raises(ValueError, match=f"^{name} is set"):
        by_config(torch.ones(2, 4))


def _products_before(event: str, events: list[str]) -> list[int]:
    return [events[:i].count("product") for i, other in enumerate(events) if other == event]


@pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a CUDA build of torch")
def test_collectives_of_async_tensor_parallelism_are_fused_before_planning(group: str) -> None:
    lowered: list[fx.Graph] = []

    def backend(gm: fx.GraphModule, inputs: list[Tensor]) -> Any:
        return compile_rewritten(gm, inputs, lambda part: lowered.append(part.graph), {})

    @torch.compile(backend=backend)
    @torch.no_grad()
    def gathered_product(x: Tensor, w: Tensor) -> Tensor:
        return funcol.all_gather_tensor(x, 0, group) @ w

    x, w = torch.ones(DIM, DIM), torch.ones(DIM, DIM)
    on_cpu = pytest.raises(NotImplementedError, match="fused_all_gather_matmul")
    with _test_mode(), config.patch(_micro_pipeline_tp=True), on_cpu:
        gathered_product(x, w)
    assert any("fused_all_gather_matmul" in str(node.target) for node in lowered[0].nodes)


def test_planned_graph_has_strides_of_given_inputs(mesh: DeviceMesh) -> None:
    gm = make_fx(lambda x: x.relu(), tracing_mode="fake")(torch.ones(4, 6))
    placeholder, relu, _ = gm.graph.nodes
    with placeholder.meta["val"].fake_mode:
        given = torch.empty_strided((4, 6), (1, 4))
    _fuse_operators(gm, [given])
    assert relu.meta["val"].stride() == given.stride()
