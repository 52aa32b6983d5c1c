"""``torch.compile(model, backend="graphshard", options=...)`` with options that hold containers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard

from tests import ranks
from tests.models import MLP
from tests.numerics.compare import world_mesh


def _train_by_name(folder: Path) -> list[str]:
    """Two models, each with options of its own that are equal; return the files dumped."""
    for _ in range(2):
        model: Any = MLP()
        options = {
            "compiler": "aot_eager",
            "dump": str(folder),
            "mesh": world_mesh(),
            "ignored_params": [],
            "overrides": {
                "*bias": {"shard": False},
                "down.*": {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float32)},
            },
        }
        compiled = torch.compile(model, backend="graphshard", options=options)
        compiled(torch.ones(5, 7)).backward()
        assert model.up.bias.placements == (Replicate(),)
        assert model.up.weight.placements == (Shard(0),)
    return sorted(path.name for path in folder.iterdir() if path.suffix == ".json")


def test_equal_options_share_a_backend(tmp_path: Path) -> None:
    files = ranks.run(2, _train_by_name, tmp_path)[0]
    numbers = {name.split("-")[0] for name in files if "forward" in name}
    assert numbers == {"00", "01"}  # of one backend, which numbers its graphs
