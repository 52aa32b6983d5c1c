"""Restarts with warm compile caches: gradients are correct, and only changes recompile."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import graphshard
from graphshard.cost.devices import HARDWARE
from tests import ranks
from tests.numerics.compare import assert_rounded, assert_same, full_grads, generator

REPLICATED = {"overrides": {"*": {"shard": False}}}
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
REDUCE_BF16 = MixedPrecisionPolicy(reduce_dtype=torch.bfloat16)


class Tanh(nn.Module):
    """Two layers of four rows; shards have two rows on two ranks and, with padding, on three."""

    activation: Callable[[Tensor], Tensor] = staticmethod(torch.tanh)

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(3, 4)
        self.down = nn.Linear(4, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x))).square().mean()


class Relu(Tanh):
    activation = staticmethod(torch.relu)


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        mesh: shape of the mesh.
        model: class of the model.
        options: arguments of ``graphshard.backend``.
        prepare: function called before the model is built.
        rows: rows per batch; sizes are dynamic if over 5.
    """

    mesh: tuple[int, ...] = (2,)
    model: type[Tanh] = Tanh
    options: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[], object] = int
    rows: int = 5


@dataclass(frozen=True)
class Found:
    """Cache counts and plans of one rank.

    Attributes:
        misses: number of FX graph cache misses, i.e. of graphs that the rank compiled.
        hits: number of hits of the FX graph and AOTAutograd caches.
        plans: plans of the rank's graphs, as JSON.
    """

    misses: int
    hits: int
    plans: list[str]


def _train(run: Run, caches: str) -> Found:
    """Run forward and backward; compare gradients with the unsharded model's.

    Under `mp_policy`, they may differ by FSDP2's rounding.
    """
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = caches
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    run.prepare()
    model, mesh = run.model(), init_device_mesh("cpu", run.mesh)
    reference, theirs = copy.deepcopy(model), copy.deepcopy(model)
    backend = graphshard.backend(mesh, **run.options)
    dynamic = True if run.rows > 5 else None
    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=dynamic)
    batches = [
        torch.randn(run.rows, 3, generator=generator(i)) for i in range(dist.get_world_size())
    ]
    # Wait longer than usual for another rank's compile, as machines may be busy.
    with mock.patch("graphshard.pipeline.compile._half_timeout_s", return_value=200.0):
        compiled(batches[dist.get_rank()]).backward()
    torch.stack([reference(batch) for batch in batches]).mean().backward()
    if "mp_policy" in run.options:
        by_fsdp2 = fully_shard(theirs, mesh=mesh, mp_policy=run.options["mp_policy"])
        by_fsdp2(batches[dist.get_rank()]).backward()
        assert_rounded("gradients", *map(full_grads, (model, theirs, reference)))
    else:
        assert_same(model, reference)
    graphs, joint = (torch._dynamo.utils.counters[name] for name in ("inductor", "aot_autograd"))
    return Found(
        misses=graphs["fxgraph_cache_miss"],
        hits=graphs["fxgraph_cache_hit"] + joint["autograd_cache_hit"],
        plans=[plan.to_json() for plan in backend.plans],
    )


@pytest.fixture(scope="module")
def caches(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("caches")


def _in_new_processes(run: Run, caches: Path, **env: str) -> list[Found]:
    return ranks.run_fresh(math.prod(run.mesh), _train, run, str(caches), import_env=env or None)


def _with_hardware_file(folder: Path) -> dict[str, Any]:
    path = folder / "machine.json"
    path.write_text(HARDWARE["cpu"].to_json())
    return {"schedule": graphshard.SchedulePolicy(hardware=str(path))}


def _create_other_groups() -> None:
    """Change the names that torch gives to later groups."""
    for _ in range(3):
        dist.new_group()


def _sum_of_misses(found: Sequence[Found]) -> int:
    return sum(rank.misses for rank in found)


RUNS_ON_RANKS: Mapping[str, Callable[[int], Run]] = {
    "sharded": lambda num_ranks: Run((num_ranks,)),
    "replicated": lambda num_ranks: Run((num_ranks,), options=REPLICATED),
    "replicas of shards": lambda num_ranks: Run((num_ranks, 1)),
}


def _train_each(num_ranks: int, caches: str) -> list[Found]:
    found = []
    for run in RUNS_ON_RANKS.values():
        found.append(_train(run(num_ranks), caches))
        torch._dynamo.reset()
    return found


def test_restart_on_another_world_size_recompiles(caches: Path) -> None:
    # Process groups have equal names in both worlds, so names do not distinguish the graphs.
    _, after = (ranks.run_fresh(n, _train_each, n, str(caches)) for n in (2, 3))
    for name, found in zip(RUNS_ON_RANKS, zip(*after)):
        assert _sum_of_misses(found) > 0, name


CHANGES = {
    "strategy": Run(options={"reshard_after_forward": False}),
    "one replicated": Run(options={"overrides": {"up.*": {"shard": False}}}),
    "mixed precision": Run(options={"mp_policy": BF16}),
    "reduced in bf16": Run(options={"mp_policy": REDUCE_BF16}),
    "schedule": Run(options={"schedule": graphshard.SchedulePolicy(overlap=False)}),
    "hardware": Run(options={"schedule": graphshard.SchedulePolicy(hardware="H100")}),
    "edited": Run(model=Relu),
    "symbolic sizes": Run(rows=6),
    "other sizes": Run(rows=60),
}


@pytest.fixture(scope="module")
def warm_caches(caches: Path) -> Path:
    _misses(Run(), caches)
    return caches


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.low_precision] if "mp_policy" in run.options else [])
        for name, run in CHANGES.items()
    ],
)
def test_restart_after_change_recompiles_once(name: str, warm_caches: Path) -> None:
    assert _misses(CHANGES[name], warm_caches) > 0
    assert _misses(CHANGES[name], warm_caches) == 0


def test_gradients_match_after_undoing_all_changes(warm_caches: Path) -> None:
    _misses(Run(), warm_caches)  # compares gradients


def _misses(run: Run, caches: Path) -> int:
    """Train in reused processes, which start faster; return the misses of all ranks."""
    return _sum_of_misses(ranks.run(2, _train, run, str(caches)))


# Two replicas, each with its own shard group. No other test compiles these graphs.
REPLICAS = Run((2, 1), Relu)


@pytest.fixture(scope="module")
def unchanged(caches: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[Found]]:
    """Return the results of two runs that differ only in folders, group names and string hashes."""
    folders = [tmp_path_factory.mktemp("temporary") for _ in range(2)]
    here, there = (replace(REPLICAS, options=_with_hardware_file(f)) for f in folders)
    there = replace(there, prepare=_create_other_groups)
    # Without PYTHONHASHSEED, the first run draws a random seed for string hashes.
    env = {"TMPDIR": str(folders[1]), "PYTHONHASHSEED": "2"}
    return [_in_new_processes(here, caches), _in_new_processes(there, caches, **env)]


def test_replicas_share_code(unchanged: list[list[Found]]) -> None:
    assert _sum_of_misses(unchanged[0]) == 2  # forward and backward


def test_unchanged_restart_compiles_nothing(unchanged: list[list[Found]]) -> None:
    before, after = unchanged
    assert _sum_of_misses(after) == 0
    for old, new in zip(before, after):
        assert new.hits and new.plans == old.plans and len(new.plans) == 2


def test_lost_and_damaged_plan_files_are_rebuilt(
    unchanged: list[list[Found]], caches: Path
) -> None:
    folder = caches / "graphshard"
    for path in folder.glob("*-backward.json"):
        path.unlink()
    for path in folder.glob("*-forward.json"):
        path.write_text("")
    after = _in_new_processes(REPLICAS, caches)
    for old, new in zip(unchanged[0], after):
        assert new.plans == old.plans and len(new.plans) == 2
    assert any(path.read_text() for path in folder.glob("*-forward.json"))
