"""Values that ``SchedulePolicy(auto=True)`` saves for backward in real graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh

import graphshard
from graphshard.__main__ import main
from graphshard.kinds import GraphKind, TransferKind
from graphshard.pipeline.choose_saving import _free_gb
from graphshard.pipeline.traced_graph import TracedGraph
from graphshard.show.dump_folder import PAGE

DIM, LAYERS, ROWS = 64, 4, 512
FULL_GB = 4 * DIM * DIM / 1e9  # bytes of one full weight
AMPLE_GB = 1.0
NODE_US = 1e4  # slow nodes: recomputing is expensive, and all gathers are hidden


class Deep(nn.Module):
    """A model whose activations are much larger than its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(LAYERS))
        self.register_buffer("scale", torch.ones(DIM))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = F.gelu(layer(x))
        return (self.scale * x).square().mean()


def _train(
    mesh: DeviceMesh | None, model: nn.Module | None = None, **options: Any
) -> graphshard.Backend:
    policy = {name: options.pop(name) for name in [*options] if name in _OF_POLICY}
    schedule = graphshard.SchedulePolicy(auto=True, node_cost=lambda _: NODE_US, **policy)
    options = {"compiler": "aot_eager", **options}
    backend = graphshard.backend(mesh, schedule=schedule, **options)
    compiled = torch.compile(model or Deep(), backend=backend, fullgraph=True)
    compiled(torch.randn(ROWS, DIM)).backward()
    return backend


_OF_POLICY = ("memory_budget_gb", "activation_memory_budget")


def _taken(backend: graphshard.Backend) -> list[str]:
    rows = [line for line in backend.summary().splitlines() if line.endswith("chosen")]
    assert len(rows) == 1
    return [cell.strip() for cell in rows[0].split("  ") if cell.strip()][:2]


def _peak_gb(backend: graphshard.Backend) -> float:
    dumps = [dump for graph in backend._graphs for dump in graph.dumps]
    return max(dump.totals.peak_bytes for dump in dumps) / 1e9


def _gathered(backend: graphshard.Backend, kind: GraphKind) -> dict[str, int]:
    """Return the number of ranks from which a graph gathers each parameter, by name."""
    (plan,) = (plan for plan in backend.plans if plan.graph == kind)
    transfers = plan.problem.transfers
    return {plan.fqn_of(t): t.world for t in transfers if t.kind == TransferKind.ALL_GATHER}


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_auto_saves_less_if_memory_is_tight(compiler: str, mesh: DeviceMesh) -> None:
    ample = _train(mesh, memory_budget_gb=AMPLE_GB, compiler=compiler)
    assert _taken(ample) == ["100%", "all"]
    assert not _gathered(ample, GraphKind.BACKWARD)
    torch._dynamo.reset()
    budget_gb = 0.9 * _peak_gb(ample)
    tight = _train(mesh, memory_budget_gb=budget_gb, compiler=compiler)
    assert _taken(tight)[0] != "100%"
    assert _peak_gb(tight) <= budget_gb < _peak_gb(ample)
    assert "refused: " in tight.summary()


def test_auto_raises_if_nothing_fits(mesh: DeviceMesh) -> None:
    with pytest.raises(Exception, match="no strategy that auto=True tries fits") as caught:
        _train(mesh, memory_budget_gb=FULL_GB)
    assert "0%" in str(caught.value) and "refused: forward needs" in str(caught.value)


def test_auto_keeps_explicit_settings(mesh: DeviceMesh) -> None:
    # All activations are saved; one layer is gathered again from all ranks, another from two.
    overrides = {
        "layers.1": {"reshard_after_forward": True},
        "layers.2": {"reshard_after_forward": 2},
    }
    backend = _train(
        mesh,
        memory_budget_gb=AMPLE_GB,
        activation_memory_budget=1,
        overrides=overrides,
    )
    summary = backend.summary()
    assert "Tried only the given activation_memory_budget, 1" in summary
    assert "4 parameters whose overrides set reshard_after_forward" in summary
    assert _taken(backend) == ["100%", "all"]
    assert _gathered(backend, GraphKind.BACKWARD) == {"layers.1.weight": 8, "layers.2.weight": 2}


def test_auto_keeps_setting_for_second_name_of_tied_weight(mesh: DeviceMesh) -> None:
    model = Deep()
    model.layers[1].weight = model.layers[0].weight
    overrides = {"layers.1": {"reshard_after_forward": True}}
    backend = _train(mesh, model, memory_budget_gb=AMPLE_GB, overrides=overrides)
    assert _taken(backend) == ["100%", "all"]
    assert _gathered(backend, GraphKind.BACKWARD) == {"layers.0.weight": 8}


def test_auto_on_cpu_requires_budget(mesh: DeviceMesh) -> None:
    with pytest.raises(
        Exception, match=r"auto=True: device 'cpu' does not report .* also set schedule"
    ):
        _train(mesh)


def test_auto_chooses_nothing_for_evaluation(mesh: DeviceMesh) -> None:
    schedule = graphshard.SchedulePolicy(auto=True, memory_budget_gb=AMPLE_GB)
    backend = graphshard.backend(mesh, schedule=schedule, compiler="aot_eager")
    with torch.no_grad():
        torch.compile(Deep(), backend=backend, fullgraph=True)(torch.randn(ROWS, DIM))
    assert [plan.graph for plan in backend.plans] == [GraphKind.INFERENCE]
    assert "chosen" not in backend.summary()


def test_choice_for_training_ignores_trace_without_backward(mesh: DeviceMesh) -> None:
    # The first graph has no backward, though gradients are enabled.
    schedule = graphshard.SchedulePolicy(auto=True, memory_budget_gb=AMPLE_GB)
    backend = graphshard.backend(mesh, schedule=schedule, compiler="aot_eager")
    model = Deep()

    @torch.compile(backend=backend, fullgraph=True)
    def compiled(x: Tensor, trains: bool) -> Tensor:
        return model(x) if trains else model(x).detach()

    compiled(torch.randn(ROWS, DIM), False)
    assert "chosen" not in backend.summary()
    compiled(torch.randn(ROWS, DIM), True).backward()
    assert len(_taken(backend)) == 2


def test_tried_strategies_are_dumped(
    mesh: DeviceMesh, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend = _train(mesh, memory_budget_gb=AMPLE_GB, dump=tmp_path)
    table = (tmp_path / "00-saving.txt").read_text()
    assert backend.summary().endswith(table.rstrip()) and "chosen" in table
    page = (tmp_path / PAGE).read_text()
    assert f"for inputs of {ROWS}x{DIM}, within" in page and '"chosen"' in page
    assert main(["show", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{backend.summary()}\n"


def test_optimizer_states_yet_to_come_are_those_of_whole_models_on_the_device(
    mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[TracedGraph] = []
    build = graphshard.Backend._build

    def record(backend: graphshard.Backend, traced: TracedGraph, settings: Any) -> Any:
        seen.append(traced)
        return build(backend, traced, settings)

    monkeypatch.setattr(graphshard.Backend, "_build", record)
    model = Deep()
    model.layers[0].requires_grad_(False)
    graphshard.shard(model, mesh)
    backend = graphshard.backend(mesh, compiler="aot_eager")
    torch.compile(lambda x: model.layers[1](x), backend=backend)(torch.randn(ROWS, DIM))
    (traced,) = seen
    assert len(traced.shards) == 2  # the graph uses fewer parameters than are trained
    trained = [param for param in model.parameters() if param.requires_grad]
    num_bytes = sum(param.to_local().nbytes for param in trained)  # type: ignore[attr-defined]
    assert traced.future_state_bytes(torch.device("cpu")) == 2 * num_bytes
    assert traced.future_state_bytes(torch.device("cuda")) == 0  # no shard is on a GPU
    for param in trained:
        param.grad = torch.zeros_like(param)
    optimizer = torch.optim.SGD(trained[1:], momentum=0.9)
    optimizer.step()
    left = trained[0].to_local().nbytes  # type: ignore[attr-defined]
    assert traced.future_state_bytes(torch.device("cpu")) == 2 * left


def test_free_gpu_memory_is_rounded_to_be_equal_after_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Free memory is part of cache keys; optimizer states that do not exist yet are subtracted.
    traced = TracedGraph(
        fx.GraphModule({}, fx.Graph()),
        [],
        fqns=[],
        shards=[],
        groups=[],
        marker_groups=[],
        inductor_options={},
        future_state_bytes=lambda _: 8_000_000,
    )

    def free_gb(free: float) -> float:
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (int(free), int(80e9)))
        return _free_gb(traced, torch.device("cuda"))

    for name in ("memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.cuda, name, lambda _: 0)
    margin = 0.03 * 80e9 + 8e6
    assert free_gb(64e9 + margin) == pytest.approx(64)
    assert free_gb(65.5e9 + margin) == free_gb(64.1e9 + margin) == pytest.approx(64)
    assert free_gb(64e9 + margin - 1e6) == pytest.approx(62.4)
    assert free_gb(0) > 0
