"""Predicted time of a checkpointed region."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch._prims import rng_prims
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import graphshard
from graphshard._torch.aot_graphs import is_recomputed
from graphshard.planning.plan import Plan


class Attention(nn.Module):
    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.qkv = nn.Linear(64, 3 * 64, bias=False)
        self.recompute = recompute

    def mix(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).view(2, 128, 3, 4, 16).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)

    def forward(self, x: Tensor) -> Tensor:
        mixed = checkpoint(self.mix, x, use_reentrant=False) if self.recompute else self.mix(x)
        return mixed.square().mean()


def _plans(mesh: DeviceMesh, recompute: bool) -> list[Plan]:
    backend = graphshard.backend(mesh, compiler="aot_eager")
    torch.compile(Attention(recompute), backend=backend, fullgraph=True)(
        torch.randn(2, 128, 64)
    ).backward()
    return backend.plans


@pytest.mark.parametrize("wrapper", ["run_with_rng_state", "graphsafe_run_with_rng_state"])
def test_random_operators_of_a_checkpoint_are_recomputed(wrapper: str) -> None:
    node = fx.Graph().call_function(getattr(rng_prims, wrapper))  # which the partitioner inserts
    assert is_recomputed(node)


def test_checkpointed_region_takes_time_in_forward_and_backward(mesh: DeviceMesh) -> None:
    kept, recomputed = (_plans(mesh, recompute) for recompute in (False, True))
    (forward_us, backward_us), (same_us, more_us) = (
        [sum(plan.problem.compute_us) for plan in plans] for plans in (kept, recomputed)
    )
    assert same_us == pytest.approx(forward_us, rel=0.02)
    assert more_us > backward_us + 0.8 * forward_us
    # Recomputation does not count toward MFU.
    kept_us, same_us = (sum(plan.problem.peak_us for plan in of) for of in (kept, recomputed))
    assert kept_us == pytest.approx(same_us) and kept_us > 0
