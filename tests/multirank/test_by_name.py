"""``torch.compile(model, backend="graphshard", options=...)``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard

from tests import ranks
from tests.models import MLP
from tests.numerics.compare import world_mesh
from tests.ranks import on_ranks


def _train_by_name(folder: Path) -> list[str]:
    for dtype in (torch.float32, torch.float64):  # different dtypes, so the models share no graph
        model: Any = MLP().to(dtype)
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
        compiled(torch.ones(5, 7, dtype=dtype)).backward()
        assert model.up.bias.placements == (Replicate(),)
        assert model.up.weight.placements == (Shard(0),)
    return sorted(path.name for path in folder.iterdir() if path.suffix == ".json")


def test_equal_options_share_a_backend(tmp_path: Path) -> None:
    files = ranks.run(2, _train_by_name, tmp_path)[0]
    numbers = {name.split("-")[0] for name in files if "forward" in name}
    assert numbers == {"00", "01"}  # one backend has numbered both graphs


@on_ranks(1)
def test_wrong_options_raise_in_torch_compile() -> None:
    with pytest.raises(ValueError, match="options has 'shards'"):
        torch.compile(MLP(), backend="graphshard", options={"shards": 4})
