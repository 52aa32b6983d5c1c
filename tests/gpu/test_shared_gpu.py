"""Training on ranks that share one GPU agrees with DDP or, with tensor parallelism, with FSDP2.

Ranks communicate over NCCL or, if NCCL refuses to share a GPU, over gloo with CUDA tensors.
"""

from __future__ import annotations

import functools

import pytest

from tests.gpu import shared
from tests.gpu.training import agree, agree_under_tensor_parallelism, by_ddp

pytestmark = pytest.mark.gpu

_refusal = functools.cache(shared.refusal)


@pytest.fixture
def backend() -> str:
    refusals = {}
    for name in ("nccl", "gloo"):
        reason = _refusal(name)
        if reason is None:
            print(f"ranks communicate over {name}; refused: {refusals}")
            return name
        refusals[name] = reason
    pytest.skip(f"no backend supports several ranks on one GPU: {refusals}")


# No size in the model is divisible by three: on three ranks, shards are padded.
@pytest.mark.parametrize(
    ("world_size", "compiler"),
    [(2, "aot_eager"), (2, "inductor"), (3, "aot_eager"), (4, "inductor")],
)
def test_training_agrees_with_ddp(backend: str, world_size: int, compiler: str) -> None:
    losses = shared.run(world_size, backend, agree, by_ddp, "cuda", compiler)
    assert len({tuple(of_rank) for of_rank in losses}) == world_size  # batches differ by rank


@pytest.mark.parametrize("compiler", ["aot_eager", "inductor"])
def test_tensor_parallelism_agrees_with_fsdp2(backend: str, compiler: str) -> None:
    losses = shared.run(4, backend, agree_under_tensor_parallelism, "cuda", compiler)
    assert losses[0] == losses[1] != losses[2]  # ranks along tp share batches
