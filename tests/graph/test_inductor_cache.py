"""Inductor's caches: repeating a training run in new processes compiles nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._logging import _internal as torch_logging
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import graphshard
from graphshard._torch.inductor import cache_dir
from graphshard.pipeline import compile
from graphshard.pipeline.cache_files import PlanCache
from graphshard.pipeline.compile import CompiledGraph
from graphshard.show.dump_folder import PAGE
from tests import ranks
from tests.models import MLP
from tests.multirank.test_dump_folder import INFERENCE, STEP


@dataclass(frozen=True)
class Run:
    counters: dict[str, int]
    keys: dict[str, list[str]]
    plans: list[str]
    summary: str
    losses: list[float]
    num_cache_hits: float


def _train(dump: Path) -> Run:
    torch.manual_seed(0)
    model, mesh = MLP(), init_device_mesh("cpu", (dist.get_world_size(),))
    backend = graphshard.backend(mesh, dump=dump)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    optimizer = torch.optim.SGD(model.parameters(), 0.05)
    losses = []
    for step in range(2):
        loss = compiled(MLP.batch(torch.Generator().manual_seed(step)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    with torch.no_grad():
        losses.append(compiled(torch.ones(5, 7)).item())
    return Run(
        _counters(),
        _keys(),
        [plan.to_json() for plan in backend.plans],
        backend.summary(),
        losses,
        backend.metrics()["num_cache_hits"],
    )


def _train_logged(dump: Path, log: Path) -> Run:
    _log_to(log)
    return _train(dump)


def _log_to(folder: Path) -> None:
    """Write torch's trace log to a folder, as TORCH_TRACE does if set before torch is imported."""
    handler: Any = torch_logging.LOG_TRACE_HANDLER
    handler.root_dir = str(folder)
    torch_logging.trace_log.addHandler(handler)


def _train_late(dump: Path, log: Path) -> Run:
    """Train; rank 0, which dumps, compiles each graph after another rank has compiled it."""
    _log_to(log)
    seen: set[Path] = set()

    def wait_and_compile(*args: Any) -> CompiledGraph:
        while dist.get_rank() == 0:
            compiled = set(Path(cache_dir()).glob("graphshard/*.compiled"))
            if compiled > seen:
                seen.update(compiled)
                break
            time.sleep(0.05)
        return compile_now(*args)

    compile_now = compile._compile
    with mock.patch.object(compile, "_compile", wait_and_compile):
        return _train(dump)


def _counters() -> dict[str, int]:
    counters = torch._dynamo.utils.counters
    return {
        name: count
        for group in ("inductor", "aot_autograd")
        for name, count in counters[group].items()
        if name.startswith(("fxgraph_cache", "autograd_cache"))
    }


def _keys() -> dict[str, list[str]]:
    """Return the keys of all cache entries that this process wrote or hit, by kind."""
    artifacts = torch.compiler.save_cache_artifacts()
    assert artifacts is not None
    return {kind: sorted(keys) for kind, keys in artifacts[1].artifacts.items() if keys}


def _run(train: Callable[[Path, Path], Run], cache: Path, folder: Path) -> list[Run]:
    env, log = {"TORCHINDUCTOR_CACHE_DIR": str(cache)}, folder / "log"
    runs = ranks.run_fresh(2, train, folder / "dump", log, env=env)
    logs = list(log.iterdir())
    assert len(logs) == 2
    for path in logs:
        _check_log(path.read_text())
    return runs


def test_second_run_compiles_nothing(tmp_path: Path) -> None:
    late = _run(_train_late, tmp_path / "cache", tmp_path / "late")
    warm = _run(_train_logged, tmp_path / "cache", tmp_path / "warm")
    _compare_runs(late, warm)
    _compare_dumps(tmp_path / "late/dump", tmp_path / "warm/dump", late[0].summary)


def _compare_runs(cold: list[Run], warm: list[Run]) -> None:
    expected = cold[0]
    misses = [run.counters.get("fxgraph_cache_miss", 0) for run in cold]
    assert sum(misses) == 3, misses  # one per graph
    assert sum(run.num_cache_hits for run in cold) == 2  # a training step and an evaluation
    for run in warm:
        assert not run.counters.get("fxgraph_cache_miss"), run.counters
        assert not run.counters.get("fxgraph_cache_bypass"), run.counters
        assert not run.counters.get("autograd_cache_bypass"), run.counters
        hits = run.counters.get("autograd_cache_hit", 0) + run.counters.get("fxgraph_cache_hit", 0)
        assert hits > 0, run.counters
    for run in [*cold, *warm]:
        assert run.keys == expected.keys and run.keys
        assert run.plans == expected.plans and len(run.plans) == 3
        assert run.summary == expected.summary
        assert run.losses == expected.losses


def _compare_dumps(cold: Path, warm: Path, summary: str) -> None:
    written = {*STEP, *INFERENCE}
    assert {path.name for path in cold.iterdir()} == written
    assert {path.name for path in warm.iterdir()} == written
    for name in written - {PAGE}:
        assert (warm / name).read_text() == (cold / name).read_text()
    graphs = "00-forward", "00-backward", "01-inference"
    for graph, text in zip(graphs, summary.split("\n\n\n"), strict=True):
        assert (cold / f"{graph}.txt").read_text() == f"{text}\n"


def _check_log(text: str) -> None:
    num_params = len(list(MLP().parameters()))
    for graph, compiled in (("forward", "0/0"), ("backward", "0/0"), ("inference", "0/1")):
        for kind in ("plan", "table"):
            assert text.count(f'"name": "graphshard_{graph}_{kind}"') == 1
        assert f"{graph} {compiled}: {num_params} parameters" in text


def test_folder_of_plans_need_not_be_writable(mesh: DeviceMesh, tmp_path: Path) -> None:
    x, folder = torch.ones(2, 4), tmp_path / "plans"
    with mock.patch.object(PlanCache, "_folder", lambda _: folder):
        backend = graphshard.backend(mesh, compiler="aot_eager")
        torch.compile(nn.Linear(4, 4), backend=backend)(x).sum().backward()
        assert not folder.exists()  # plans of graphs that run op by op are not read again
        folder.touch()  # a file, so the folder cannot be made
        for _ in range(2):  # the second graph is in Inductor's cache, but its plan is not
            torch._dynamo.reset()
            backend = graphshard.backend(mesh, dump=tmp_path / "dump")
            with pytest.warns(UserWarning, match=f"cannot write to {folder} "):
                torch.compile(nn.Linear(4, 4), backend=backend)(x).sum().backward()
            assert len(backend.plans) == 2


def test_graphs_planned_with_node_cost_are_not_cached(mesh: DeviceMesh) -> None:
    for _ in range(2):
        torch._dynamo.reset()
        schedule = graphshard.SchedulePolicy(node_cost=lambda _: 1.0)  # has no key
        backend = graphshard.backend(mesh, schedule=schedule)
        options = {"force_disable_caches": False}  # does not turn caches on
        compiled = torch.compile(nn.Linear(4, 4), backend=backend, fullgraph=True, options=options)
        compiled(torch.ones(2, 4)).sum().backward()
        assert backend.metrics()["num_cache_hits"] == 0
