"""Parameters with fewer rows than ranks: the first rank warns if their padding is large."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import graphshard
from tests import ranks
from tests.numerics.compare import graphshard_warnings

DIM = 1024


class Experts(nn.Module):
    def __init__(self, num_experts: int, dim: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(num_experts, dim, dim) / dim)

    def forward(self, x: Tensor) -> Tensor:
        return torch.einsum("bd,edh->bh", x, self.up).square().mean()


def _warned(
    num_experts: int, mesh_shape: tuple[int, ...] = (4,), dim: int = DIM, **options: Any
) -> list[str]:
    mesh, model = init_device_mesh("cpu", mesh_shape), Experts(num_experts, dim)
    with graphshard_warnings() as texts:
        graphshard.shard(model, mesh, **options)
    return texts


def _trained(num_experts: int) -> tuple[list[str], str]:
    backend = graphshard.backend(init_device_mesh("cpu", (4,)), compiler="aot_eager")
    with graphshard_warnings() as texts:
        compiled = torch.compile(Experts(num_experts, DIM), backend=backend, fullgraph=True)
        for _ in range(2):
            compiled(torch.ones(2, DIM)).backward()
    return texts, backend.summary().splitlines()[-1]


def _all_cases() -> dict[str, list[str]]:
    return {
        "two rows": _warned(2),
        "two rows, odd": _warned(2, dim=DIM + 1),
        "one row, odd": _warned(1, dim=DIM + 1),
        "HSDP": _warned(2, (2, 2)),
        "replicated": _warned(1, overrides={"up": {"shard": False}}),
        "small": _warned(2, dim=32),
        "even": _warned(4),
        "another dimension": _warned(2, overrides={"up": {"dim": 1}}),
    }


REMEDIES = {
    "two rows": "overrides={'up': {'dim': 1}} splits it evenly",
    "two rows, odd": "One parameter per row, as in nn.ParameterList, would need less padding",
    "one row, odd": "overrides={'up': {'shard': False}} takes no more memory on a rank, and avoids",
}


def test_first_rank_warns_about_large_padding() -> None:
    first, *others = ranks.run(4, _all_cases)
    for name, texts in first.items():
        assert not any(other[name] for other in others), name
        if name in REMEDIES:
            (text,) = texts
            assert text.startswith("graphshard: ") and REMEDIES[name] in text
        else:
            assert not texts, name
    (text,) = first["two rows"]
    assert "up has fewer rows (2) than the 4 ranks that share them" in text
    assert "4 MB of parameters, 2 times the even share of 2 MB" in text


def test_summary_reports_padding_after_one_warning() -> None:
    (texts, last_line), *others = ranks.run(4, _trained, 2)
    assert "up has fewer rows (2)" in last_line and texts == [f"graphshard: {last_line}"]
    assert others == [([], last_line)] * 3
    for texts, last_line in ranks.run(4, _trained, 4):
        assert not texts and "fewer rows" not in last_line
