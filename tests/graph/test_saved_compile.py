"""Compiled code saved in a file: with empty caches, loading it avoids compilation or warns."""

from __future__ import annotations

import json
import warnings
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from graphshard.pipeline.cache_files import _circumstances
from tests import ranks
from tests.models import MLP

_AUTO = graphshard.SchedulePolicy(auto=True, memory_budget_gb=1)
WARNING = "compiling a graph that the loaded file does not have"


def _train(rows: int = 4, factor: int = 1, **options: Any) -> list[float]:
    torch.manual_seed(0)
    model, losses = MLP(), []
    options = {"schedule": _AUTO, **options}
    backend = graphshard.backend(init_device_mesh("cpu", (dist.get_world_size(),)), **options)

    @torch.compile(backend=backend, fullgraph=True, dynamic=False)
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return model(x) if factor == 1 else factor * model(x)

    for seed in range(2):
        loss = compiled(MLP.batch(torch.Generator().manual_seed(seed))[:rows])
        loss.backward()
        losses.append(loss.item())
    assert len(backend.plans) == 2
    return losses


def _save(path: Path) -> list[float]:
    with pytest.raises(RuntimeError, match="has compiled nothing that can be saved"):
        graphshard.save_compiled(path)
    losses = _train()
    if dist.get_rank() == 0:
        graphshard.save_compiled(path)
    return losses


def _load(path: Path) -> list[float]:
    graphshard.load_compiled(path)
    losses = _train()
    assert not counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]
    return losses


def _run(folder: Path, function: Any, *args: Any) -> list[Any]:
    env = {"TORCHINDUCTOR_CACHE_DIR": str(folder)}
    return ranks.run_fresh(2, function, *args, env=env)


def _load_for_others(path: Path) -> None:
    graphshard.load_compiled(path)
    # The warning becomes an error before anything is compiled.
    warnings.filterwarnings("error", f".*{WARNING}")
    for differs, options in {
        "other options": {"reshard_after_forward": False, "schedule": _WITHOUT_OVERLAP},
        "other sizes of inputs or parameters": {"rows": 2},
        "another model": {"factor": 2},
    }.items():
        torch.compiler.reset()
        with pytest.raises(Exception, match=f"{WARNING}: the file was saved with {differs}"):
            _train(**options)


_WITHOUT_OVERLAP = graphshard.SchedulePolicy(overlap=False)


def test_loaded_code_avoids_compilation_with_empty_caches(tmp_path: Path) -> None:
    path = tmp_path / "compiled"
    other = tmp_path / "disk" / "aa" / "other.main.so"  # a kernel of another model
    other.parent.mkdir(parents=True)
    for suffix in (".so", ".cpp"):
        other.with_suffix(suffix).touch()
    (tmp_path / "here").symlink_to(tmp_path / "disk")
    saved = _run(tmp_path / "here", _save, path)
    assert _run(tmp_path / "there", _load, path) == saved
    names = zipfile.ZipFile(path).namelist()
    assert len(set(names)) == len(names) and not any(other.name in name for name in names)
    libraries = {Path(name).name for name in names if name.endswith(".so")}
    assert libraries == {found.name for found in (tmp_path / "there").rglob("*.so")} != set()
    assert sum(name.startswith("files/graphshard/") for name in names) >= 2
    _run(tmp_path / "elsewhere", _load_for_others, path)


def _changed(path: Path, **fields: Any) -> Path:
    changed = path.with_name("changed")
    header = {"format": 1, "made": {"torch": "1.0"}, "graphs": {}}
    with zipfile.ZipFile(changed, "w") as file:
        file.writestr("header.json", json.dumps({**header, **fields}))
    return changed


def test_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "compiled"
    path.write_text("no file of ours")
    with pytest.raises(ValueError, match=r"was not written by graphshard\.save_compiled"):
        graphshard.load_compiled(path)
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("header.json", "[]")
    with pytest.raises(ValueError, match=r"was not written by graphshard\.save_compiled"):
        graphshard.load_compiled(path)
    with pytest.raises(ValueError, match=r"torch was 1\.0 and is .* Run a step without the file"):
        graphshard.load_compiled(_changed(path))
    with pytest.raises(ValueError, match="reads format 1"):
        graphshard.load_compiled(_changed(path, format=2))
    for fields in ({"made": None}, {"made": _circumstances(), "graphs": ["x"]}):
        with pytest.raises(ValueError, match=r"was not written by graphshard\.save_compiled"):
            graphshard.load_compiled(_changed(path, **fields))
    with pytest.raises(FileNotFoundError):
        graphshard.load_compiled(tmp_path / "nowhere")
