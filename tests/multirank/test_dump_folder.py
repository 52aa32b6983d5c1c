"""`dump="folder"` in training: the first rank's files, and profiles with predictions."""

from __future__ import annotations

import json
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.kinds import TransferKind
from graphshard.show import Dump, profile, table
from graphshard.show.dump_folder import PAGE
from graphshard.show.trace import PID
from tests import ranks
from tests.models import MLP
from tests.multirank.test_errors import ERRORS
from tests.ranks import on_ranks

PLANS = [
    f"{name}.{end}" for name in ("forward", "backward") for end in ("json", "trace.json", "txt")
]
STAGES = ("joint", "keep-forward", "keep-backward", "forward", "backward")
CODE = [f"{name}.{when}.py" for name in STAGES for when in ("before", "after")]
STEP = sorted([*(f"00-{name}" for name in [*PLANS, *CODE]), PAGE])
INFERENCE = [
    f"01-inference.{end}" for end in ("json", "trace.json", "txt", "before.py", "after.py")
]


def _train(folder: Path) -> None:
    backend = graphshard.backend(compiler="aot_eager", dump=folder / str(dist.get_rank()))
    torch.compile(MLP(), backend=backend)(torch.ones(5, 7)).backward()


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _evaluate_too(folder: Path) -> list[str]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    backend = graphshard.backend(mesh, compiler="aot_eager", dump=str(folder))
    compiled = torch.compile(MLP(), backend=backend)
    compiled(torch.ones(5, 7)).backward()
    with torch.no_grad():
        compiled(torch.ones(5, 7))
    return [plan.to_json() for plan in backend.plans]


def test_first_rank_dumps_all_files_of_all_graphs(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "dump"
    plans, _ = ranks.run(2, _evaluate_too, folder)
    assert _names(folder) == sorted([*STEP, *INFERENCE])
    names = ["00-forward", "00-backward", "01-inference"]
    dumps = [Dump.load(folder / f"{name}.json") for name in names]
    assert [dump.plan.to_json() for dump in dumps] == plans
    assert [dump.compiled for dump in dumps] == ["0/0", "0/0", "0/1"]
    for name, dump in zip(names, dumps):
        assert dump.hardware.name == "cpu"
        assert (folder / f"{name}.txt").read_text() == f"{table(dump)}\n"
        assert json.loads((folder / f"{name}.trace.json").read_text())["traceEvents"]


def test_dump_has_code_before_and_after_each_stage(tmp_path: Path) -> None:
    ranks.run(2, _train, tmp_path)
    assert _names(tmp_path / "0") == STEP and _names(tmp_path / "1") == []

    def code(name: str) -> str:
        return (tmp_path / "0" / f"00-{name}.py").read_text()

    num_params = len(list(MLP().parameters()))
    gathers, reductions = "graphshard.unshard.default(", "graphshard.reduce_grad.default("
    for name in ("joint.before", "joint.after", "forward.before"):
        assert code(name).count(gathers) == num_params, name
    for name in ("joint.before", "joint.after", "backward.before"):
        assert code(name).count(reductions) == num_params, name
    assert "MUST_RECOMPUTE" in code("joint.after") and "MUST_RECOMPUTE" not in code("joint.before")
    kept = Dump.load(tmp_path / "0" / "00-forward.json").plan.kept
    again = [code(f"keep-backward.{when}").count(gathers) for when in ("before", "after")]
    assert kept and again[0] - again[1] == len(kept)
    for graph in ("forward", "backward"):
        plan = Dump.load(tmp_path / "0" / f"00-{graph}.json").plan
        lowered = code(f"{graph}.after")
        assert gathers not in lowered and reductions not in lowered
        assert lowered.count("_c10d_functional.all_gather_into") == plan.count(
            TransferKind.ALL_GATHER
        )
        assert lowered.count("_c10d_functional.all_to_all_single") == plan.count(
            TransferKind.REDUCE_SCATTER
        )


def _profile(folder: Path) -> None:
    backend = graphshard.backend(compiler="aot_eager", dump=folder)
    compiled = torch.compile(MLP(), backend=backend)
    compiled(torch.ones(5, 7)).backward()
    with profile(folder / "step.json", all_ranks=True):
        for _ in range(2):
            compiled(torch.ones(5, 7)).backward()
    with profile(folder / "none.json", folder.parent):
        compiled(torch.ones(5, 7)).backward()


def test_profile_contains_predicted_trace(tmp_path: Path) -> None:
    ranks.run(2, _profile, tmp_path / "dump")
    events = json.loads((tmp_path / "dump" / "step.json").read_text())["traceEvents"]
    named = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert named[0] == "predicted on cpu"
    assert any(name.startswith("measured: ") for name in named[1:])
    measured = [e["ts"] for e in events if e["name"].startswith("Torch-Compiled Region: ")]
    steps = {
        kind: Dump.load(tmp_path / "dump" / f"00-{kind}.json").plan.problem.num_steps
        for kind in ("forward", "backward")
    }
    counters = [e["ts"] for e in events if e["pid"] == PID and e["name"] == "alive"]
    assert len(counters) == 2 * sum(steps.values())
    first = min(e["ts"] for e in events if e["pid"] == PID and e["ph"] == "X")
    assert len(measured) == 2 and first == pytest.approx(min(measured), abs=1e-2)
    page = (tmp_path / "dump" / PAGE).read_text()
    assert page.count('"measured":{"runs":2,"median_us":') == 2
    assert (tmp_path / "dump" / "step.rank1.json").exists()
    assert page.count('"lanes":{"0":{"compute":') == page.count('"1":{"compute":') == 2
    unknown = json.loads((tmp_path / "dump" / "none.json").read_text())["traceEvents"]
    assert unknown and all(event["pid"] != PID for event in unknown)


@pytest.mark.parametrize("in_block", [True, False])
@on_ranks(1)
def test_profile_releases_peers_unless_block_raises(tmp_path: Path, in_block: bool) -> None:
    (tmp_path / "00-forward.json").touch()  # cannot be read
    with (
        pytest.raises(ValueError, match="bad batch" if in_block else "00-forward.json"),
        mock.patch.object(dist, "barrier") as barrier,
        profile(tmp_path / "step.json", all_ranks=True),
    ):
        if in_block:
            raise ValueError("bad batch")
    assert barrier.called != in_block  # a barrier would hold back the error of the block


def _bad_folder(path: Path) -> None:
    model = MLP()
    for act in (graphshard.backend, lambda **given: graphshard.shard(model, **given)):
        with pytest.raises(ValueError, match=r"dump='.*file/dump': .*choose a writable folder"):
            act(dump=str(path / "file" / "dump"))
    options = {"dump": str(path / "file"), "compiler": "aot_eager"}
    with pytest.raises(ERRORS, match=r"dump='.*file': File exists: choose a writable folder"):
        torch.compile(model, backend="graphshard", options=options)(torch.ones(5, 7))
    assert all(type(param) is nn.Parameter for param in model.parameters())


def test_unwritable_dump_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ranks.run(2, _bad_folder, tmp_path)
