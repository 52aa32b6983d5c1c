"""Training on several ranks that share one GPU agrees with DDP.

Ranks communicate over NCCL or, if NCCL refuses to share a GPU, over gloo with CUDA tensors.
"""

from __future__ import annotations

import functools

import pytest

from tests.gpu import shared
from tests.gpu.training import agree, by_ddp

pytestmark = pytest.mark.gpu

_refusal = functools.cache(shared.refusal)


@pytest.fixture
def backend() -> str:
    """The first backend that works; without one, the test is skipped with the reasons."""
    refusals = {}
    for name in ("nccl", "gloo"):
        reason = _refusal(name)
        if reason is None:
            return name
        refusals[name] = reason
    pytest.skip(f"no backend takes several ranks on one GPU: {refusals}")


def test_nccl_takes_several_ranks_on_one_gpu() -> None:
    if reason := _refusal("nccl"):
        pytest.skip(f"the tests below run on gloo, since NCCL refuses: {reason}")


# No size of the model is divisible by three, so with three ranks shards differ in size.
@pytest.mark.parametrize(
    ("world_size", "compiler"),
    [(2, "aot_eager"), (2, "inductor"), (3, "aot_eager"), (4, "inductor")],
)
def test_agrees_with_ddp(backend: str, world_size: int, compiler: str) -> None:
    losses = shared.run(world_size, backend, agree, by_ddp, "cuda", compiler)
    assert len({tuple(of_rank) for of_rank in losses}) == world_size  # batches differ by rank
